"""Arguments that a compiled graph is not for go to the graph that Dynamo captured, which PyTorch runs, op by op.

Kernels read and write plain memory. Dynamo's guards hold a tensor's dtype, sizes and strides against those at capture,
but not all that this takes:

* its numbers are as they are in memory: not negated in passing (``x.conj().imag``), not in a layout of oneDNN's;
* no other argument is in the memory of one that is written to, unless it was so at capture, the same distance apart;
* one that is written to has a place in memory for each element;
* it carries no tangent of forward-mode differentiation: nothing of the graph computes one.

A graph that sees more of a storage than the tensor that is in it (``as_strided``) is not compiled at all: neither
AOTAutograd nor a kernel knows storages. Where it counts elements from the begin of a storage, an argument is to be as
far from there as at capture. (TorchInductor counts from where the argument was then.)

Where its storage was resized and does not hold it any more (FSDP resizes to 0 to save memory), PyTorch would read what
is not there, or end the process: an error is raised. One function in C looks at the arguments of each call, in about 20
ns per tensor. A backward graph has no other form: it resolves what is negated.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..capture.storages import counted_from, reaches_beyond, root, strided, value
from ..errors import ArgumentError
from ..ir.expr import Sym
from ..logs import get as logger
from ..options import Options
from . import host, structure
from .cpp import laid_out
from .python import py
from .runtime import expect

NO_SIZE = "size_bytes_is_heap_allocated_"  # what PyTorch says of a storage of symbolic size, where it needs a number
SKIP, READ, WRITTEN = b"-rw"


def eager_for_unusual(
    call: Callable[..., Any], what: Any, inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """``call`` with the checks. ``what``: Dynamo's graph, called with ``inputs``; or a backward graph's Stages."""
    if options.target is not None:
        return call
    if isinstance(what, torch.fx.GraphModule):
        return _forward(call, what, inputs)
    return _backward(call, what.scheduled) if what.graph.name == "backward" else _bases(call, what.graph.module)


def op_by_op(
    compile: Callable[..., Any], backend: Any, module: torch.fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """``compile``; the graph itself where a view in it, or an argument, reaches beyond what it is a view of, and
    where AOTAutograd cannot make one tensor of arguments in one storage, since that may have another size later. (They
    are results of an earlier graph, of which one is updated here.) Plugs into ``pipeline.COMPILE``."""
    plain = (x for x in inputs if _is_looked_at(x) and x.layout is torch.strided)
    seen = [(x, x._base) for x in plain if x._is_view()]
    seen += [(value(n), value(root(n))) for n in strided(module)]
    why = "it sees more of a storage than the tensor that is in it"
    if not any(reaches_beyond(view, base) for view, base in seen):
        try:
            return compile(backend, module, inputs)
        except RuntimeError as e:
            if NO_SIZE not in str(e):
                raise
            why = "arguments are in one storage, whose size may change"
    logger("fallback").info("a graph is run op by op: %s", why)
    return module.forward


def _bases(call: Callable[[list], Any], module: torch.fx.GraphModule) -> Callable[[list], Any]:
    """``call``, given as much of each base as at capture. AOTAutograd passes arguments that are in one storage as that
    storage, a tensor: of a call's it is all; of those at capture, which are fake, it may be what they need."""
    given = [n for n in module.graph.nodes if n.op == "placeholder"]
    bases = [i for i, n in enumerate(given) if type(n.meta.get("desc")).__name__ == "SyntheticBaseAOTInput"]
    sizes = [(i, n) for i in bases if isinstance(n := given[i].meta["val"].numel(), int)]
    if not sizes:
        return call

    def run(args: list) -> Any:
        for i, n in sizes:
            if args[i].numel() < n:
                raise ArgumentError(f"arguments in a storage of {args[i].numel()} elements, which had {n}")
            args[i] = args[i][:n]
        return call(args)

    return run


def _forward(call: Callable[..., Any], module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    if any("resize_storage_bytes_" in str(n.target) for n in module.graph.nodes):  # it allocates its inputs itself
        return call
    kinds = _kinds(inputs)
    captured = _together(inputs, kinds)
    usual, dual = _usual(), forward_ad.__dict__
    quick = getattr(getattr(call, "boxed", None), "quick", None) if host.has_entries() else None  # (see ``Quick``)

    def run(*args: Any) -> Any:
        if dual["_current_level"] < 0 and usual(args, kinds, ()):
            if quick is not None and (outputs := quick.run([*args])) is not None:
                return outputs
            return call(*args)
        if _as_captured(args, kinds, captured):
            return call(*args)
        for i, (x, kind) in enumerate(zip(args, kinds)):
            if kind != SKIP and structure.has_memory(x):
                _expect_memory(x, f"argument {i} of a compiled graph")
        logger("fallback").info("a graph is run op by op: its arguments are not plain memory, or share it")
        return module(*args)

    places = [(i, inputs[i].storage_offset()) for i in counted_from(module)]

    def in_place(*args: Any) -> Any:
        return (run if all(args[i].storage_offset() == at for i, at in places) else module)(*args)

    return in_place if places else run


def _backward(call: Callable[[list], Any], program: Any) -> Callable[[list], Any]:
    """``call`` with the checks. What the forward was given is saved as it is, and may be another tensor by now
    (``p.data = torch.empty(0)``), of which autograd's versions know nothing: AOTAutograd names these ``primals_N``.
    And a hook for saved tensors may bring them in another layout (``save_on_cpu`` with pinned memory does)."""
    needed = laid_out(program)
    kinds = bytes(READ if x in needed else SKIP for x in program.inputs)
    symbols = {x: i for i, x in enumerate(program.inputs) if isinstance(x, Sym)}  # (one may be given twice)
    places, layouts, usual = [*symbols.values()], _layouts(program, symbols, needed), _usual()

    def run(args: list) -> Any:
        wanted = layouts(*[args[i] for i in places])
        if not usual(args, kinds, wanted):
            for i, x in enumerate(args):
                if kinds[i] == READ and isinstance(x, torch.Tensor) and structure.has_memory(x):
                    what = f"{program.inputs[i]}, which a compiled graph saved for backward"
                    _expect_memory(x, what)
                    args[i] = _laid_out(x.resolve_neg(), wanted[i], what)
        return call(args)

    return run


def _layouts(program: Any, symbols: Collection[Sym], needed: Collection[Any]) -> Callable[..., tuple]:
    """Of the values of ``symbols``, those among a program's inputs: sizes and strides per input that is needed, in one
    tuple; else None. -1: any, since it is read from a tensor."""
    given = {*symbols}
    buffers = [program.buffers[x] if x in needed else None for x in program.inputs]
    numbers = (b and [py(e) if e.symbols() <= given else "-1" for e in (*b.shape, *b.strides)] for b in buffers)
    text = "".join("None, " if n is None else f"({''.join(e + ', ' for e in n)}), " for n in numbers)
    names = ", ".join(x.name for x in symbols)
    return eval(f"lambda {names}: ({text})", {"int_max": max, "int_min": min})  # type: ignore[no-any-return]


def _laid_out(x: torch.Tensor, wanted: tuple[int, ...], what: str) -> torch.Tensor:
    sizes, strides = wanted[: len(wanted) // 2], wanted[len(wanted) // 2 :]
    if x.dim() != len(sizes) or any(n not in (-1, have) for n, have in zip(sizes, x.shape)):
        text = ["any" if n < 0 else n for n in sizes]
        raise ArgumentError(f"{what}: sizes {list(x.shape)}, which were {text}: its data was replaced since")
    return x if -1 in strides else expect(x, tuple(x.shape), strides)


def _expect_memory(x: torch.Tensor, what: str) -> None:
    if not structure.allocated(x):
        raise ArgumentError(f"{what}: {structure.why_not_allocated(x)}")


# -- what was captured ----------------------------------------------------------------------------------
def _kinds(inputs: Sequence[Any]) -> bytes:
    """A letter per argument: is it read, or written to? What has no memory of its own is not looked at: a subclass
    that holds others, or a sparse tensor, which only calls read."""
    info = getattr(getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None), "input_info", None)
    writes = [True] * len(inputs) if info is None else [i.mutates_data for i in info]
    if len(writes) != len(inputs):  # AOTAutograd passes other tensors, such as one that several are views of
        writes = [any(writes)] * len(inputs)
    return bytes((WRITTEN if w else READ) if _is_looked_at(x) else SKIP for x, w in zip(inputs, writes, strict=True))


def _is_looked_at(x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.layout in (torch.strided, torch._mkldnn)  # type: ignore[attr-defined]
        and not (is_fake(x) or is_traceable_wrapper_subclass(x))
    )


def _as_captured(args: Sequence[Any], kinds: bytes, captured: set[tuple[int, int, int]]) -> bool:
    """The checks again, where those in C found something: is it fine after all?"""
    looked_at = [x for x, kind in zip(args, kinds) if kind != SKIP]
    if any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args):
        return False
    if not all(map(_is_plain, looked_at)) or any(k == WRITTEN and structure.folded(x) for x, k in zip(args, kinds)):
        return False
    return _together(args, kinds) == captured


def _is_plain(x: torch.Tensor) -> bool:
    return structure.has_memory(x) and x.layout is torch.strided and not x.is_neg() and structure.allocated(x)


def _together(args: Sequence[Any], kinds: bytes) -> set[tuple[int, int, int]]:
    """Pairs of arguments (their numbers) in overlapping memory, one of them written to, and their distance in bytes."""
    if WRITTEN not in kinds:
        return set()
    known = [(i, *structure.extent(x)) for i, x in enumerate(args) if kinds[i] != SKIP and _is_plain(x)]
    return {
        (i, j, b - a)
        for n, (i, a, a_end) in enumerate(known) for j, b, b_end in known[n + 1 :]
        if a < b_end and b < a_end and WRITTEN in (kinds[i], kinds[j])
    }  # fmt: skip


@functools.cache
def _usual() -> Callable[[Sequence[Any], bytes, tuple], bool]:
    """The function in C; the same in Python where there is none."""
    from .host import checks

    return checks() or (lambda args, kinds, layouts: not any(layouts) and _as_captured(args, kinds, set()))
