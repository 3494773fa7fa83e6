"""What printed wrappers check, beyond ``runtime.py``: sizes, of exported programs and of tuned ones; and what a call
returns that was given memory for its results, or whose results are to have memory of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import ArgumentError, ReflibError
from ..ir.out_lists import has_lists, out_arguments
from ..logs import get as logger
from .python import PythonPrinter, _comment
from .runtime import _said
from .structure import allocated

if TYPE_CHECKING:
    from ..ir.program import Extern
    from ..plan import Call


def expect_sizes(holds: bool, what: str, **sizes: int) -> None:
    """What must hold of the sizes of the arguments, or the graph is not for them."""
    if not holds:
        here = ", ".join(f"{name} = {n}" for name, n in sizes.items())
        raise ArgumentError(f"it was exported where {what} holds of the arguments' sizes; here {here}")


def outside(what: str, size: int, least: int, most: int, op: str) -> None:
    """Log, once for each thing and op, that a size is outside the tuned ranges."""
    if (op, what) not in _said:
        _said.add((op, what))
        message = "%s = %d is outside the sizes that were tuned, %d to %d: the nearest range serves"
        logger("autotune").warning(message, what, size, least, most)


def given_back(given: list[torch.Tensor], op: str) -> Callable[[Any], None]:
    """What raises ReflibError unless ``op``, called next, returns the tensors that it is ``given``, neither resized nor
    others. (Of an op that returns nothing: that those are as they were.)"""
    layouts = [_layout(t) for t in given]

    def check(result: Any) -> None:
        returned = tree_leaves(result) if result is not None and result != () else given
        if len(returned) != len(given):
            raise ReflibError(f"{op} returned {len(returned)} tensors where it was given {len(given)} to write to")
        for i, (r, was) in enumerate(zip(returned, layouts)):
            if not isinstance(r, torch.Tensor) or _layout(r) != was:
                raise ReflibError(
                    f"{op}: its result {i} is not the tensor that it was given to write to (sizes {list(was[1])}, "
                    f"strides {list(was[2])}): an op with out= arguments must write to them as they are, and return "
                    "them"
                )

    return check


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def call_in_python(p: PythonPrinter, step: Call) -> None:
    """The call as the core prints it, and a check of what it returns (plugs into ``wrap.STEPS``)."""
    x = step.extern
    op = x.target if x.out is None else x.out[0]
    if x.out is not None and has_lists(x.out[1]):
        _call_with_lists(p, x, *x.out)
    else:
        p._call(x)
    if is_own(op) and op._schema.returns:
        name, promised = p._bind(op), ", ".join(str(r.real_type) for r in op._schema.returns)
        line = f"{name} = as_promised({name}, {str(op)!r}, {promised!r})"
        p.header += [line] if line not in p.header else []
    if made := own_results(x):
        if len(x.outputs) > 1 or any("List" in str(r.type) for r in op._schema.returns):
            first = next(i for i, line in enumerate(p.lines) if line.startswith(f"{p.pad}out_{x.name} = "))
            count = f"expect_count(out_{x.name}, {len(x.outputs)}, {str(x.target)!r})"
            p.lines.insert(first + 1, p.pad + count)
        given = ", ".join(dict.fromkeys((*x.reads(), *x.mutates)))
        dtypes = ", ".join(str(p.program.buffers[o].dtype) for o in made)
        p.put(f"expect_own([{', '.join(made)}], [{given}], {str(x.target)!r}, [{dtypes}])")


def _call_with_lists(p: PythonPrinter, x: Extern, op: Any, names: tuple[str, ...]) -> None:
    """The call of an out variant that takes lists of tensors for its results."""
    views, held = dict(x.kwargs), f"out_{x.name}"
    given = [p.value(views.pop(n)) if o is None else o for n, o in zip(names, x.outputs)]
    args = [p.value(a) for a in x.args] + [f"{k}={p.value(v)}" for k, v in views.items()]
    for k, v in out_arguments(names, [f"{held}[{i}]" for i in range(len(given))]).items():
        args.append(f"{k}=[{', '.join(v)}]" if isinstance(v, list) else f"{k}={v}")
    p.put(f"{held} = [{', '.join(given)}]")
    p.put(f"given_back({held}, {str(op)!r})({p._bind(op)}({', '.join(args)})){_comment(x.origins)}")
    p.put(f"del {held}")


def own_results(x: Extern) -> list[str]:
    """Results of an op of the user's that share memory with nothing, as its schema says: ``plan`` relies on it."""
    op = x.target
    if x.out is not None or not is_own(op):
        return []
    aliases = any(r.alias_info is not None for r in op._schema.returns)
    waits = "c10d" in op.namespace  # ``wait_tensor`` returns what it is given, and ``plan`` knows
    return [] if aliases or waits else [o for o in x.outputs if isinstance(o, str)]


def is_own(op: Any) -> bool:
    """Is it an op of the user's?"""
    return isinstance(op, torch._ops.OpOverload) and op.namespace not in ("aten", "prims")


def as_promised(call: Callable[..., Any], op: str, promised: str) -> Callable[..., Any]:
    """``call``, but a ReflibError where PyTorch says, without the op's name, that what a Python function returned is
    not of the types in the op's schema."""

    def calling(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (RuntimeError, TypeError) as e:
            if not (_UNLIKE_SCHEMA.match(str(e)) and _raised_by_call(e)):
                raise
            said = str(e).partition(" (#define")[0][:200]
            raise ReflibError(f"{op} returned something else where its schema promised ({promised}): {said}") from e

    return calling


_UNLIKE_SCHEMA = re.compile(r"Unable to cast |Object of type .* is not an instance of 'sequence'")


def _raised_by_call(e: BaseException) -> bool:
    """By the dispatcher, not in the op: what that calls may fail with the same words."""
    at, files = e.__traceback__, list[str]()
    while at is not None:
        files.append(at.tb_frame.f_code.co_filename)
        at = at.tb_next
    return files[-1] == torch._ops.__file__ and all(f.startswith(torch.__path__[0]) for f in files[1:])


def expect_count(made: Sequence[Any], promised: int, op: str) -> None:
    """Raises ReflibError unless ``op`` returned a list of so many results."""
    if len(made) != promised:
        raise ReflibError(f"{op} returned {len(made)} tensors where its meta function promised {promised}")


def expect_own(made: list[Any], given: list[Any], op: str, dtypes: Sequence[torch.dtype] = ()) -> None:
    """Raises ReflibError if a result shares memory with an argument or with another result, lacks some, or is of
    another dtype."""
    for i, (t, d) in enumerate(zip(made, dtypes)):
        if t.dtype is not d:
            name = str(d).removeprefix("torch.")
            raise ReflibError(f"{op}: its result {i} is not of dtype {name}, which its meta function promised")
    for i, t in enumerate(made):
        if not allocated(t):
            held = t.untyped_storage().nbytes()
            raise ReflibError(f"{op}: its result {i} is in a storage of {held} bytes, too few for it")
        if any(torch._C._is_alias_of(t, other) for other in (*given, *made[:i])):
            raise ReflibError(
                f"{op}: its result {i} shares memory with an argument or with another result, and its schema does not "
                "say so: return a clone, or declare the argument as written to and return nothing"
            )
