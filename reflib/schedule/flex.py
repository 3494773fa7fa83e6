"""How a kernel of fused attention is launched: its tiling, chosen here unless it was measured, and what it assumes.

The first variant assumes what held when the program was captured: addresses of inputs that are multiples of 16
bytes, sizes that are multiples of 16, lengths that are whole blocks (so that no access needs a mask), indices of 32
bits. The second one assumes the last alone, the third nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import GenerateError
from ..ir.assume import limit_facts
from ..ir.expr import Expr, expr
from ..ir.flex import FlexKernel
from ..ir.program import Assume, Buffer, Config, Extern, KernelNode, Variant, View, symbols_in
from ..lower.flex_tilings import tilings
from ..target import Target


def variants(name: str, x: Extern, buffers: dict[str, Buffer], target: Target) -> tuple[Variant, ...]:
    """The kernel ``name``, which launches ``x``. Raises GenerateError for a target that is no GPU."""
    kernel, given = x.target, dict(x.kwargs)
    assert isinstance(kernel, FlexKernel)
    if not target.is_gpu:
        raise GenerateError(f"{kernel.__name__} is a Triton kernel: there is no code of it for {target.arch}")
    if kernel.tiling is None:
        heads = given["q"].shape[3].constant or 0, given["v"].shape[3].constant or 0
        kernel = replace(kernel, tiling=tilings(kernel, heads, target)[0])
        x = replace(x, target=kernel)
    assert kernel.tiling is not None
    limits = limit_facts([buffers[b].extent for b in x.reads()] + _products(given))
    symbols = symbols_in((x.args, x.kwargs))
    if any(s.lo < -(2**31) for s in symbols):
        limits = None
    multiples = sorted(s for s in symbols if s.hint and s.hint % 16 == 0)
    whole = [(d, e, b) for d, e, b in _lengths(given, kernel) if e.hint() % b == 0]
    facts = tuple(Assume("aligned", b, 16) for b in x.reads() if buffers[b].kind != "temp")
    facts += tuple(Assume("divisible", expr(s), 16) for s in multiples)
    facts += tuple(Assume("divisible", e, b) for _, e, b in whole if e.constant is None)
    config = Config("flex", 1, 1, kernel.tiling.num_warps, kernel.tiling.num_stages, "int64")
    small = replace(config, index="int32") if limits is not None else config
    always = tuple(d for d, e, _ in whole if e.constant is not None)
    known = {"divisible": tuple(s.name for s in multiples), "whole": tuple(d for d, _, _ in whole)}
    ways = [("fast", replace(small, extras=tuple(known.items())), (*(limits or ()), *facts))] if facts else []
    ways += [("small", replace(small, extras=(("whole", always),)), limits)] if limits else []
    ways.append(("fallback", replace(config if limits else small, extras=(("whole", always),)), ()))
    names = (name if i == 0 else f"{name}_{way}" for i, (way, _, _) in enumerate(ways))
    return tuple(Variant(way, (KernelNode(n, (x,), c),), f) for n, (way, c, f) in zip(names, ways))


def _lengths(given: dict[str, View], kernel: FlexKernel) -> tuple[tuple[str, Expr, int], ...]:
    """(m or n, how many queries or keys there are, of what that must be a multiple): of a block of scores, or, where
    blocks of the mask are walked along, of such a block."""
    assert kernel.tiling is not None
    block = {"m": kernel.tiling.m, "n": kernel.tiling.n}
    walked = "m" if kernel.kind == "dkv" else "n"
    block[walked] = max(block[walked], kernel.blocks["mn".index(walked)])
    return ("m", given["q"].shape[2], block["m"]), ("n", given["k"].shape[2], block["n"])


def _products(given: dict[str, View]) -> list[Expr]:
    """Numbers of the kernel's that are not offsets: an index of all queries, and of all keys."""
    q, k = given["q"].shape, given["k"].shape
    return [q[0] * q[1] * q[2], k[0] * k[1] * k[2]]
