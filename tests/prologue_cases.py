"""Products that compute an operand as they read it, lowered from functions, as cases of ``matmul_cases``: read by
Triton's interpreter, by ahead-of-time compilation, and on a GPU."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from matmul_cases import F16, KINDS, MatmulCase, rand
from torch.fx.experimental.proxy_tensor import make_fx

from reflib.autotune.prologue import NAME, with_prologues
from reflib.capture.graph import Graph
from reflib.ir.interpret import bind_symbols
from reflib.ir.program import Choice, Program, Template, Tiling
from reflib.ir.rename import renamed
from reflib.lower import decompositions
from reflib.options import Options
from reflib.pipeline import run

Fn = Callable[..., torch.Tensor]
TILINGS = {k: t for k, t in KINDS.items() if k not in ("persistent", "split warps")}


def per_column(x, w, s):
    return x @ (w.to(x.dtype) * s[None, :])


def per_row(x, w, s):
    return x @ (w.to(x.dtype) * s[:, None])


def linear(x, w, s):
    return torch.nn.functional.linear(x, w.to(x.dtype) * s[:, None])


def per_group(x, w, s):
    """``s``: [N, groups]."""
    n, k = w.shape
    return x @ (w.view(n, s.shape[1], -1).to(x.dtype) * s[:, :, None]).view(n, k).t()


def int4(x, p, s):
    """``p``: [N, K / 2], the low half of a byte first; ``s``: [N, groups]."""
    n = p.shape[0]
    w = torch.stack([p & 15, p >> 4], -1).view(n, s.shape[1], -1)
    return x @ ((w.to(x.dtype) - 8) * s[:, :, None]).view(n, -1).t()


def int4_rows(x, p, s):
    """``p``: [K / 2, N]: rows 0 and 1 are the halves of the first row of bytes."""
    w = torch.stack([p & 15, p >> 4], 1).view(-1, p.shape[1])
    return x @ ((w.to(x.dtype) - 8) * s)


def int4_halves(x, p, s):
    """Low halves are the first K / 2 columns."""
    w = torch.cat([p & 15, p >> 4], 1)
    return x @ ((w.to(x.dtype) - 8) * s[:, None]).t()


def int4_signed(x, p, s):
    """The upper half of the rows is in the low bits."""
    return x @ (torch.cat([(p << 4) >> 4, p >> 4]).to(x.dtype) * s)


def int4_shifted(x, p, s):
    """Unpacked by a shift that depends on the row."""
    k = torch.arange(2 * p.shape[0], device=p.device)
    w = (p.repeat_interleave(2, 0) >> (4 * (k % 2)).to(torch.uint8)[:, None]) & 15
    return x @ ((w.to(x.dtype) - 8) * s)


def masked(x, mask, w):
    return (x * mask) @ w


def cast(x, w):
    return x @ w.to(x.dtype)


def pooled(x, w):
    return torch.nn.functional.adaptive_max_pool2d(x, 1).flatten(1) @ w


def activated(x, w):
    return torch.relu(x) @ w


def selected(x, keep, w):
    return torch.where(keep, x, 0) @ w


def both(x, w, s):
    return torch.relu(x) @ (w.to(x.dtype) * s)


def batched(x, w, s):
    return torch.bmm(x, w.to(x.dtype) * s)


def with_bias(bias, x, w, s):
    return torch.addmm(bias, x, w.to(x.dtype) * s)


def batched_bias(bias, x, w, s):
    return torch.baddbmm(bias, x, w.to(x.dtype) * s, beta=0.5, alpha=2)


def bytes_(*shape: int, seed: int = 0, unsigned: bool = False) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    low, high, dtype = (0, 256, torch.uint8) if unsigned else (-8, 9, torch.int8)
    return torch.randint(low, high, shape, generator=g).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return (2.0 ** torch.randint(-2, 2, shape, generator=g)).half()


U = True
FUNCTIONS: dict[str, tuple[Fn, Callable[[], tuple[torch.Tensor, ...]]]] = {
    "per column": (per_column, lambda: (rand(20, 96), bytes_(96, 64), scales(64))),
    "per row, ragged": (per_row, lambda: (rand(33, 70), bytes_(70, 50), scales(70))),
    "linear": (linear, lambda: (rand(1, 128), bytes_(48, 128), scales(48))),
    "groups of 16": (per_group, lambda: (rand(17, 96), bytes_(40, 96), scales(40, 6))),
    "groups of 64": (per_group, lambda: (rand(17, 192), bytes_(40, 192), scales(40, 3))),
    "groups of 24": (per_group, lambda: (rand(17, 72), bytes_(40, 72), scales(40, 3))),
    "groups of 128": (per_group, lambda: (rand(17, 384), bytes_(40, 384), scales(40, 3))),
    "int4": (int4, lambda: (rand(20, 128), bytes_(64, 64, unsigned=U), scales(64, 1))),
    "int4, groups of 32": (int4, lambda: (rand(20, 128), bytes_(48, 64, unsigned=U), scales(48, 4))),
    "int4, ragged": (int4, lambda: (rand(5, 70), bytes_(33, 35, unsigned=U), scales(33, 1))),
    "int4 rows": (int4_rows, lambda: (rand(20, 96), bytes_(48, 40, unsigned=U), scales(40))),
    "int4 halves": (int4_halves, lambda: (rand(20, 96), bytes_(40, 48, unsigned=U), scales(40))),
    "int4 signed, halves of the rows": (int4_signed, lambda: (rand(20, 96), bytes_(48, 40), scales(40))),
    "int4 shifted": (int4_shifted, lambda: (rand(20, 96), bytes_(48, 40, unsigned=U), scales(40))),
    "mask": (masked, lambda: (rand(40, 72), rand(40, 72, seed=3) > 0, rand(72, 48))),
    "relu": (activated, lambda: (rand(40, 70), rand(70, 50))),
    "where": (selected, lambda: (rand(40, 70), rand(70, seed=1) > 0, rand(70, 50))),
    "both": (both, lambda: (rand(40, 70), bytes_(70, 50), scales(50))),
    "batch": (batched, lambda: (rand(3, 20, 70), bytes_(3, 70, 50), scales(50))),
    "bias": (with_bias, lambda: (rand(50), rand(20, 64), bytes_(64, 50), scales(50))),
    "batch, bias": (batched_bias, lambda: (rand(3, 20, 50), rand(3, 20, 64), bytes_(3, 64, 50), scales(64, 50))),
    "8-bit floats": (linear, lambda: (rand(20, 64), rand(48, 64).to(torch.float8_e4m3fn), scales(48))),
    "8-bit floats, cast": (cast, lambda: (rand(20, 70), rand(70, 40).to(torch.float8_e5m2))),
    "indices that nothing reads": (pooled, lambda: (rand(20, 64, 2, 2), rand(64, 40))),
    "float32 weights": (lambda x, w: x @ (w * 0.5).half(), lambda: (rand(20, 64), rand(64, 40, dtype=torch.float32))),
}
ONE_ROW = ("per column", "linear", "int4", "int4, groups of 32", "int4, ragged", "int4 rows", "int4 halves", "batch")
DYNAMIC = ("per column", "linear", "int4", "both")


def lowered(fn: Fn, args: Sequence[torch.Tensor], dynamic: bool = False, **options: Any) -> Program:
    """For sm_90, with its choices, and with what may be computed among these."""
    mode = "symbolic" if dynamic else "fake"
    one = torch.func.functionalize(lambda *a: (fn(*a),))
    gm = make_fx(one, decomposition_table=decompositions(), tracing_mode=mode)
    options = {"target": "sm_90", "autotune": "blocking", "num_decompose_k_splits": 0, **options}
    program = run(Graph(gm(*args)), Options(**options), "lower").program
    assert program is not None
    return with_prologues(program)


def computing(program: Program) -> Template:
    """The template of the one choice's variant that computes operands."""
    (choice,) = (n for n in program.nodes if isinstance(n, Choice))
    (t,) = next(v for v in choice.variants if v.name == NAME).nodes
    assert isinstance(t, Template)
    return t


def case(name: str, tiling: Tiling, dynamic: bool = False, rows: int | None = None) -> MatmulCase:
    """``rows``: of the product, instead of the function's own."""
    fn, make = FUNCTIONS[name]
    args = make()
    args = args if rows is None else (args[0][..., :rows, :], *args[1:])
    program = lowered(fn, args, dynamic)
    template = computing(program)
    (t,), _ = renamed((template,), (), {template.writes()[0]: "out"})
    assert isinstance(t, Template)
    out = MatmulCase(rand(1, 1), rand(1, 1), tiling, F16)
    out.template = replace(t, tiling=tiling)
    inputs = [n for n in program.inputs if isinstance(n, str)]
    given = dict(zip(inputs, args))
    shape = [int(a.size.evaluate(bind_symbols(program, _in_order(program, args)))) for a in t.epilogue.axes]
    out.tensors = {n: given[n] for n in t.reads()} | {"out": torch.zeros(shape, dtype=F16)}
    out.sizes = {k: v for k, v in bind_symbols(program, _in_order(program, args)).items() if isinstance(k, str)}
    return out


def _in_order(program: Program, args: Sequence[torch.Tensor]) -> list[Any]:
    """``args`` as the program's inputs list them, sizes among them."""
    tensors = iter(args)
    sizes = {}
    for n, t in zip((n for n in program.inputs if isinstance(n, str)), args):
        for e, s in zip(program.buffers[n].shape, t.shape):
            if e.constant is None and e.atom is not None:
                sizes[e.atom] = s
    return [next(tensors) if isinstance(n, str) else sizes.get(getattr(n, "atom", n)) for n in program.inputs]


def prologue_cases() -> dict[str, Callable[[], MatmulCase]]:
    found: dict[str, Callable[[], MatmulCase]] = {}
    for name in FUNCTIONS:
        for kind, t in TILINGS.items():
            found[f"{name}, {kind}"] = lambda name=name, t=t: case(name, t)  # type: ignore[misc]
    draw = random.Random(18)
    for name in ONE_ROW:
        for _ in range(2):
            t = Tiling("row", 1, 2 ** draw.randrange(5), 2 ** draw.randrange(4, 8), 4, draw.choice((1, 4)))
            found[f"{name}, a row by {t}"] = lambda name=name, t=t: case(name, t, rows=1)  # type: ignore[misc]
    for name in DYNAMIC:
        found[f"{name}, dynamic"] = lambda name=name: case(name, TILINGS["tiled"], True)  # type: ignore[misc]
    return found
