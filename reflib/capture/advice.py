"""Remedies for errors of torch.export."""

import os
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import CaptureError, ReflibError

_ADVICE = (
    (
        ("aliasing the input", "do not support aliasing"),
        "Branches and bodies of torch.cond, while_loop and scan return new tensors: clone() an input, a view of one, "
        "and what is returned twice",
    ),
    (
        ("is not functional", "mutating the input", "input mutation"),
        "Branches and bodies of torch.cond, while_loop and scan write to no tensor from outside: return the new value",
    ),
    (
        ("torch.cond branches", "two branches", "differing branch outputs", "unsupported branch return"),
        "The branches of torch.cond return the same structure of tensors and ints: of the same ranks and dtypes, laid "
        "out in the same order (contiguous())",
    ),
    (
        ("same metadata", "carried_inputs"),
        "The body of while_loop returns what it carries, that of scan what it was given first: the same structure, "
        "sizes, strides and dtypes",
    ),
    (
        ("Unsupported input type", "not a known type"),
        "Tensors, numbers and text in tuples, lists and dicts go in and out; a class needs "
        "torch.export.register_dataclass(cls, serialized_type_name=...)",
    ),
    (
        ("is not tracked with proxy",),
        "A function of flex_attention's that reads a tensor which is not contiguous: give it x.contiguous(), or export "
        "the model with torch.export.export(..., strict=True), which captures it, and give that program",
    ),
    (
        ("lifted_tensor", "doesn't have storage", "storage of TensorWrapper", "Expected FakeTensor"),
        "Gradients that it computes itself (torch.func.grad, torch.autograd.grad) are captured by "
        "torch.fx.experimental.proxy_tensor.make_fx(f)(*args): export what that returns",
    ),
    (
        ("gen_vmap_plumbing",),
        "In branches and bodies of torch.cond, while_loop and scan torch.export leaves torch.vmap as it is: call it "
        "outside; give flex_attention there a block_mask that create_block_mask made outside",
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
        "{dimension: Dim.AUTO, or a Dim that equal sizes share}, for an int None or Dim.AUTO, for anything else None. "
        "(PyTorch captures associative_scan for one length, but with combine_mode='pointwise' on a GPU; scan has any)",
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
        line = users_line(traceback.extract_tb(e.__traceback__)) or _line_said(str(e))
        raise CaptureError(f"torch.export cannot capture {name}{line}: {first_lines(e)}\n{_advice(e)}.") from e


def _advice(e: Exception) -> str:
    return next((advice for words, advice in _ADVICE if any(w in str(e) for w in words)), _OTHERWISE)


def users_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Of the frames below the model's ``forward``, the user's, and those of torch's own layers."""
    all_forward = [i for i, f in enumerate(stack) if f.name == "forward"]
    ours = [i + 1 for i in all_forward if stack[i].filename.startswith(_HERE)]  # which calls a function of the user's
    start = next(iter(ours or (i for i in all_forward if not stack[i].filename.startswith(_TRACING))), len(stack))
    return [f for f in stack[start:] if _LAYER.match(f.filename) or not f.filename.startswith(_NOT_USERS)]


def users_line(stack: traceback.StackSummary) -> str:
    """`` at FILE:LINE in FUNCTION``, the innermost one; nothing if the user has none in it."""
    frames = users_frames(stack)
    return f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


_HERE = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_TRACING = (f"{_TORCH}_", f"{_TORCH}export{os.sep}")
_LAYER = re.compile(rf"{re.escape(_TORCH)}nn.modules.(?!module\.py)")
_NOT_USERS = (_HERE, _TORCH, "<")


def _line_said(text: str) -> str:
    """The same, of a traceback in a message: where the node was that torch.export stopped at."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    lines = [found for found in lines if not found[0].startswith(_NOT_USERS)]
    return f" at {os.path.basename(lines[-1][0])}:{lines[-1][1]} in {lines[-1][2]}" if lines else ""


def first_lines(e: BaseException, lines: int = 4) -> str:
    said = [line.strip() for line in str(e).splitlines() if line.strip()][:lines]
    return f"{type(e).__name__}: " + " ".join(said)[:600]
