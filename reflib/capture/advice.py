"""What to do about what torch.export says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CaptureError, ReflibError

_ADVICE = (
    (
        ("Unsupported input type", "not a known type"),
        "Tensors, numbers and text in tuples, lists and dicts go in and out; a class needs "
        "torch.export.register_dataclass(cls, serialized_type_name=...)",
    ),
    (
        ("same device", "different devices", "two devices", "expected device"),
        "A tensor that is not the module's own (a global's, a closure's) stays where it is: make it a buffer, or make "
        "it in forward with device=x.device",
    ),
    (
        ("data-dependent", "data dependent"),
        "A branch or a size depends on values in a tensor: use torch.where, or say what holds of a size with "
        "torch._check",
    ),
    (
        ("dynamic_shapes", "onstraint", "specialized", "marked"),
        "Change dynamic_shapes as it says (Dim.AUTO leaves it to torch.export)",
    ),
)
_OTHERWISE = (
    "torch.export needs the whole model as one graph: reflib.compile(model) can do with parts of it in Python"
)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """torch.export's errors become CaptureErrors that say what to do; reflib's own stay as they are."""
    try:
        with warnings.catch_warnings():  # of torch.export's own use of pytrees
            warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)
            yield
    except ReflibError:
        raise
    except Exception as e:
        said = str(e)
        advice = next((a for words, a in _ADVICE if any(w in said for w in words)), _OTHERWISE)
        raise CaptureError(f"torch.export cannot capture {name}: {first_lines(e)}\n{advice}.") from e


def first_lines(e: BaseException, lines: int = 4) -> str:
    said = [line.strip() for line in str(e).splitlines() if line.strip()][:lines]
    return f"{type(e).__name__}: " + " ".join(said)[:600]
