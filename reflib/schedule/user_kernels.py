"""How a Triton kernel of the user's is launched: as its call says, with the facts that Triton would specialize it for.

Triton compiles a kernel again for each combination of arguments that are multiples of 16. Here the first variant is
for all that were when the program was captured: the addresses of inputs (what reflib allocates is aligned), sizes, and
sizes that fit 32 bits. The second one assumes only the last, the third nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import GenerateError
from ..ir.assume import limit_facts
from ..ir.expr import Expr, expr, nonneg, product
from ..ir.program import Assume, Buffer, Config, Extern, KernelNode, Variant, View, symbols_in
from ..ir.user_kernel import UserKernel
from ..target import Target


def variants(name: str, x: Extern, buffers: dict[str, Buffer], target: Target) -> tuple[Variant, ...]:
    """The kernel ``name``, which launches ``x``. Raises GenerateError for a target that is no GPU."""
    kernel = x.target
    assert isinstance(kernel, UserKernel)
    if not target.is_gpu:
        raise GenerateError(f"{kernel.function} is a Triton kernel: there is no code of it for {target.arch}")
    sizes = [e for e in x.args if isinstance(e, Expr)]
    appended = [buffers[v.buffer].extent for views in dict(x.kwargs).get("appended", ()) for v in views]
    limits = limit_facts([*sizes, *(v.offset for v in x.args if isinstance(v, View)), *appended])
    index = "int64" if limits is None else "int32"
    low = tuple(Assume("at_least", e, -(2**31)) for e in sizes if not nonneg(e)) if limits is not None else ()
    limits = (*(limits or ()), *low)
    multiples = sorted(s for s in symbols_in(tuple(sizes)) if s.hint and s.hint % 16 == 0)
    facts = tuple(Assume("aligned", b, 16) for b in x.reads() if buffers[b].kind != "temp")
    facts += tuple(Assume("divisible", expr(s), 16) for s in multiples)
    config = Config("user", 1, 1, kernel.num_warps, kernel.num_stages, index)
    known = replace(config, extras=(("divisible", tuple(s.name for s in multiples)),))
    ways = [("fast", known, (*limits, *facts))] if facts else []
    ways += [("small", config, limits)] if limits else []
    ways.append(("fallback", replace(config, index="int64"), ()))
    space = _scratch(name, x, buffers)
    names = (name if i == 0 else f"{name}_{way}" for i, (way, _, _) in enumerate(ways))
    return tuple(Variant(way, (KernelNode(n, (x,), c, space),), facts) for n, (way, c, facts) in zip(names, ways))


def _scratch(name: str, x: Extern, buffers: dict[str, Buffer]) -> tuple[Buffer, ...]:
    """Global memory for descriptors that the kernel makes."""
    if not x.target.scratch:
        return ()
    size, device = product(dict(x.kwargs)["grid"]) * x.target.scratch, buffers[x.writes()[0]].device
    return (Buffer(f"{name}_scratch", torch.uint8, device, (size,), (expr(1),), "scratch"),)
