"""What to do about what torch.export says."""

from __future__ import annotations

import traceback
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
        ("dynamic_shapes", "onstraint", "specialized", "marked", "different definitions"),
        "Change dynamic_shapes as it says (Dim.AUTO leaves it to torch.export)",
    ),
)
# how inspect.Signature.bind says that a call does not suit a function
_CALL = (
    "missing a required", "too many positional", "multiple values for", "got an unexpected keyword",
    "got some positional-only",
)  # fmt: skip
_ARGUMENTS = "Give args and kwargs as the model takes them: all that have no default, and no others"
_SHAPES = (
    "Change dynamic_shapes: a tuple like args, or a dict by the arguments' names; for each tensor None or {dimension: "
    "Dim.AUTO, or a Dim that equal sizes share}, for an int None or Dim.AUTO, for anything else None"
)
_OTHERWISE = (
    "If the model can be called with these arguments: torch.export needs the whole of it as one graph, "
    "reflib.compile(model) can do with parts of it in Python"
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
        raise CaptureError(f"torch.export cannot capture {name}: {first_lines(e)}\n{_advice(e)}.") from e


def _advice(e: Exception) -> str:
    said = str(e)
    if found := next((a for words, a in _ADVICE if any(w in said for w in words)), None):
        return found
    if isinstance(e, TypeError) and said.startswith(_CALL):
        return _ARGUMENTS
    if getattr(getattr(e, "error_type", None), "name", "") == "CONSTRAINT_VIOLATION":
        return _SHAPES
    frames = traceback.extract_tb(e.__traceback__)  # before the model runs, what it raises says not what it is about
    reads = any(
        f.filename.endswith("export/dynamic_shapes.py") or f.name == "_create_symbolic_context_for_tensor"
        for f in frames
    )
    return _SHAPES if reads else _OTHERWISE


def first_lines(e: BaseException, lines: int = 4) -> str:
    said = [line.strip() for line in str(e).splitlines() if line.strip()][:lines]
    return f"{type(e).__name__}: " + " ".join(said)[:600]
