"""Remedies for errors of torch.export."""

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
        ("dynamic_shapes", "onstraint", "specialized", "marked", "different definitions", "Dim"),
        "Change dynamic_shapes: a tuple like args, or a dict by the arguments' names; for each tensor None or "
        "{dimension: Dim.AUTO, or a Dim that equal sizes share}, for an int None or Dim.AUTO, for anything else None",
    ),
)
_OTHERWISE = (
    "Check that the model can be called with these arguments, and that dynamic_shapes has their structure; if so: "
    "torch.export needs the whole of it as one graph, reflib.compile(model) can do with parts of it in Python"
)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn torch.export's errors into CaptureErrors with a remedy; reflib's own pass unchanged."""
    try:
        with warnings.catch_warnings():  # of torch.export's own use of pytrees
            warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)
            yield
    except ReflibError:
        raise
    except Exception as e:
        raise CaptureError(f"torch.export cannot capture {name}: {first_lines(e)}\n{_advice(e)}.") from e


def _advice(e: Exception) -> str:
    return next((advice for words, advice in _ADVICE if any(w in str(e) for w in words)), _OTHERWISE)


def first_lines(e: BaseException, lines: int = 4) -> str:
    said = [line.strip() for line in str(e).splitlines() if line.strip()][:lines]
    return f"{type(e).__name__}: " + " ".join(said)[:600]
