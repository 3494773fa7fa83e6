"""The numerics table: every op's last bits beside eager's, and both beside float64.

    python -m tests.numerics_table [--device cuda]      # measures, writes book/numerics.DEVICE.tsv and book/numerics.md

Each op is compiled beside others on numbers of all sizes: special ones, the ends of the dtype's range, subnormal ones,
and a dense random sample. A difference is in units in the last place (ULP): how many numbers of the dtype lie between.
"""

import argparse
import csv
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

import reflib
from tests.like_eager_cases import BINARY, UNARY
from tests.sum_bounds import SUMS as SUM_BOUNDS
from tests.sum_bounds import allowed

BOOK = Path(__file__).parents[1] / "book"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MODES = ("fast", "eager")
FIELDS = ("op", "dtype", "mode", "from_eager", "own_error", "eagers_error", "why")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 3.0, float("inf"), float("-inf"), float("nan"), 88.0, -103.0, 1e-8, -7.25)
ROWS, COLUMNS = 61, 67
Op = Callable[..., torch.Tensor]
SUMS: dict[str, Op] = {
    "sum": lambda x: x.sum(-1), "mean": lambda x: x.mean(-1), "var": lambda x: x.var(-1), "prod": lambda x: x.prod(-1),
    "amax": lambda x: x.amax(-1), "amin": lambda x: x.amin(-1), "norm": lambda x: x.norm(dim=-1),
    "logsumexp": lambda x: x.logsumexp(-1), "cumsum": lambda x: x.cumsum(-1), "sum, columns": lambda x: x.sum(0),
}  # fmt: skip
COMPOSITES: dict[str, Op] = {
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]), "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x.view(1, x.shape[0], -1), 1),
}  # fmt: skip
PRODUCTS: dict[str, Op] = {
    "mm": lambda x, y: x @ y.mT, "addmm": lambda x, y: torch.addmm(x[:, :1], x, y.mT),
    "bmm": lambda x, y: x[None] @ y.mT[None],
}  # fmt: skip
KINDS: dict[str, dict[str, Op]] = {
    "elementwise": UNARY | BINARY, "reduction": SUMS, "composite": COMPOSITES, "product": PRODUCTS,
}  # fmt: skip
WHY = {
    "elementwise": "a function of our own, or rounded elsewhere", "reduction": "another order of additions",
    "composite": "another order of additions, functions of our own", "product": "another order of additions",
}  # fmt: skip
# What a GPU's kernel adds atomically by default, in an order that varies from run to run. Ops, or in brackets the
# gradients of ops: fn(x, along its first dimension: where, for each element: at, new)
ATOMIC: dict[str, Callable[..., torch.Tensor]] = {
    "index_add": lambda x, where, at, new: x.index_add(0, where, new),
    "index_put, accumulate=True": lambda x, where, at, new: x.index_put((where,), new, accumulate=True),
    "scatter_add": lambda x, where, at, new: x.scatter_add(0, at, new),
    "scatter_reduce, sum": lambda x, where, at, new: x.scatter_reduce(0, at, new, "sum"),
    "scatter_reduce, mean": lambda x, where, at, new: x.scatter_reduce(0, at, new, "mean"),
    "embedding (gradient)": lambda x, where, at, new: F.embedding(where, x).square(),
    "index (gradient)": lambda x, where, at, new: x[where].square(),
    "index_select (gradient)": lambda x, where, at, new: x.index_select(0, where).square(),
    "gather (gradient)": lambda x, where, at, new: x.gather(0, at).square(),
}
STORED: dict[str, Callable[..., torch.Tensor]] = {  # where two values for one place race, and one of them wins
    "scatter": lambda x, where, at, new: x.scatter(0, at, new),
    "index_copy": lambda x, where, at, new: x.index_copy(0, where, new),
    "index_put": lambda x, where, at, new: x.index_put((where,), new),
}
JUMPS = {"floor", "ceil", "remainder", "fmod", "floor_divide"}
Row = dict[str, str]


def numbers(dtype: torch.dtype, device: str, wide: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors. ``wide``: of all sizes, special ones too; else what sums and products are usually made of."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, ROWS, COLUMNS, generator=g, dtype=torch.float64)
    if wide:
        x = x * 10 ** (2 * torch.randn(x.shape, generator=g, dtype=torch.float64))
        info = torch.finfo(dtype)
        least = info.tiny * info.eps
        ends = [s * v for s in (1, -1) for v in (info.max, info.tiny, least, info.tiny - least, 3 * least)]
        for i, v in enumerate((*SPECIAL, *ends)):
            x[0].view(-1)[7 * i] = x[1].view(-1)[7 * (i * 5 % 23) + 3] = v
            x[1].view(-1)[7 * i] = SPECIAL[i % 6]
    x = x.to(device, dtype)
    return x[0].clone(), x[1].clone()


def ulps(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two tensors of one dtype; infinite where one alone is NaN. Zeros are equal."""
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    a, b = a.cpu(), b.cpu()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    i, j = (t.contiguous().view(bits).to(torch.int64) for t in (a, b))
    least = torch.iinfo(bits).min
    i, j = (torch.where(t < 0, least - t, t) for t in (i, j))
    one = a.isnan() != b.isnan()
    if bool(one.any()):
        return float("inf")
    near = (i < 0) == (j < 0)  # else the difference may not fit, and is far
    apart = torch.where(near, (i - j).abs().double(), i.double().abs() + j.double().abs())
    apart = apart.masked_fill(a.isnan() | (a == b), 0)
    return float(apart.max()) if apart.numel() else 0.0


def measured(ops: Sequence[tuple[str, str]], dtype: torch.dtype, mode: str, device: str) -> list[Row]:
    """The rows of ``ops``, (kind, name), compiled as one program for each kind of numbers; those that jump at 0, with
    which others treat subnormal numbers otherwise too, as another."""
    out: list[Row] = []
    for wide, jump in ((True, False), (True, True), (False, False)):
        mine = [(k, n) for k, n in ops if (k == "elementwise") is wide and (n in JUMPS) is jump]
        if not mine:
            continue
        x, y = numbers(dtype, device, wide)

        def program(x: torch.Tensor, y: torch.Tensor, mine: Sequence[tuple[str, str]] = mine) -> list[torch.Tensor]:
            return [KINDS[k][n](x, y) if n in BINARY or k == "product" else KINDS[k][n](x) for k, n in mine]

        torch._dynamo.reset()
        got = reflib.compile(program, dynamic=False, numerics=mode)(x, y)
        want, exact = program(x, y), program(x.double(), y.double())
        for (kind, name), a, b, c in zip(mine, got, want, exact, strict=True):
            off = ulps(a, b)
            errors = ["", ""] if dtype == torch.float64 else [_text(ulps(t, c.to(t.dtype))) for t in (a, b)]
            why = "" if off == 0 else WHY[kind]
            out.append(dict(zip(FIELDS, (name, str(dtype)[6:], mode, _text(off), *errors, why), strict=True)))
    return out


def _text(off: float) -> str:
    return "0" if off == 0 else "NaN" if off == float("inf") else f"{off:.0f}"


def table(device: str) -> list[Row]:
    ops = [(k, n) for k, of in KINDS.items() for n in of]
    order = [n for _, n in ops]
    made = (measured(promised(ops, mode, device), dtype, mode, device) for dtype in DTYPES for mode in MODES)
    return [r for rows in made for r in sorted(rows, key=lambda r: order.index(r["op"]))]


def promised(ops: Sequence[tuple[str, str]], mode: str, device: str) -> list[tuple[str, str]]:
    """Those of which bits are promised: on a GPU ``numerics="eager"`` has bounds of sums (``sum_bounds``) instead."""
    bits = mode == "fast" or device == "cpu"
    return [(k, n) for k, n in ops if bits or k in ("elementwise", "product")]


def stored(device: str) -> tuple[str, list[Row]]:
    """Where and with what a device's table was measured, and its rows; nothing if it has not been."""
    path = BOOK / f"numerics.{device}.tsv"
    if not path.exists():
        return "", []
    head, *rest = path.read_text().splitlines()
    return head.removeprefix("# "), list(csv.DictReader(rest, delimiter="\t"))


def here(device: str) -> str:
    """What decides the bits: the device, what its vector units can do, torch's version."""
    kind = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{torch.cuda.get_device_name() if device == 'cuda' else kind}; torch {torch.__version__}"


def write(device: str, rows: list[Row]) -> None:
    lines = [f"# {here(device)}", "\t".join(FIELDS)]
    (BOOK / f"numerics.{device}.tsv").write_text("\n".join([*lines, *("\t".join(r.values()) for r in rows)]) + "\n")


def page() -> str:
    text = """# Last bits, op by op

*Generated by `python -m tests.numerics_table`.*

By how many units in the last place (ULP) results differ from eager's, at most, over special values, the ends of the
range, subnormal numbers and a random sample, with `numerics="fast"`, the default. **=** means bit-equal. In brackets:
the distance from the float64 result, rounded, of reflib's and of eager's own. Sums, norms and products are of normally
distributed numbers. NaN: one of the two alone is not a number.

Why an op differs with `"fast"`: elementwise ones are functions of our own, mostly good to 1 or 2 ULP, or rounded at
another place (near 0 a small absolute error is many ULP); sums, norms and softmax are added up in another order.
Products are the same library calls. On a GPU, Triton compiles its mathematical functions so that subnormal numbers,
given or returned, are 0 (not for functions that jump there, as `ceil` and `remainder`).

With `numerics="eager"`, elementwise ops and chains of them have eager's bits, and products are eager's calls. So are
sums, norms and softmax on a CPU. On a GPU these have an order of their own, and a bound:

| op | float32 | bfloat16, float16 | of what, without cancellation |
|---|--:|--:|---|
"""
    for name, s in SUM_BOUNDS.items():
        half = math.ceil(1000 * allowed(name, torch.float16)) / 1000
        text += f"| `{name}` | {s.bound:g} | {half:g} | {s.text} |\n"
    text += """
A result is at most so many ULP from the exact one, in units in the last place of the number in the last column: what
the result would be if its terms were added without their signs. (An error of one float32 rounding is large beside a
sum that is nearly 0.) Halves are computed in float32 and rounded once. Tests compare with float64 at random sizes.
"""
    for device, title in (("cpu", "CPU"), ("cuda", "GPU")):
        where, rows = stored(device)
        text += f"\n## {title}\n\n"
        if not rows:
            text += "This column comes from a recording on a GPU, which has not been made yet.\n"
            continue
        dtypes = [str(d)[6:] for d in DTYPES]
        by = {(r["op"], r["dtype"], r["mode"]): r for r in rows}
        differ = [f"`{r['op']}` in {r['dtype']}" for r in rows if r["mode"] == "eager" and r["from_eager"] != "0"]
        exact = sum(r["mode"] == "eager" for r in rows)
        equal = f'With `numerics="eager"`, {exact - len(differ)} of {exact} rows are bit-equal to eager'
        text += f"Measured on {where}. {equal}{': not ' + ', '.join(differ) if differ else ''}. With `\"fast\"`:\n"
        for kind, ops in KINDS.items():
            text += f"\n### {kind.capitalize()}\n\n| op | {' | '.join(dtypes)} |\n|---|" + "--:|" * len(dtypes) + "\n"
            for op in ops:
                text += f"| `{op}` | " + " | ".join(_cell(by[op, d, "fast"]) for d in dtypes) + " |\n"
    return text + f"""
## From run to run

With the same inputs, on the same machine, results of generated kernels are the same in every run, except where a tensor
says to which places a GPU's kernel adds, or which it overwrites:

* **Atomic additions**, in an order that varies and last bits with it:
  {_listed(ATOMIC)}.
  `atomics=False`, `numerics="eager"`, `batch_invariant=True` and `torch.use_deterministic_algorithms(True)` each stop
  it (under the last, integers are still added so, which varies nothing).
* **Several values for one place**, of which any may win, as in eager: {_listed(STORED)}. Only
  `torch.use_deterministic_algorithms(True)` stops that.

Where a call of PyTorch's remains, what PyTorch says of its op holds, and `torch.use_deterministic_algorithms(True)` is
the way to change it. A choice by measuring may fall otherwise in another process; stored decisions keep it.
"""


def _listed(ops: dict[str, Callable[..., torch.Tensor]]) -> str:
    return ", ".join(f"`{n.removesuffix(' (gradient)')}`{' (its gradient)' * n.endswith(')')}" for n in ops)


def _cell(r: Row) -> str:
    if r["from_eager"] == "0":
        return "="
    off, own, eagers = (_short(r[f]) for f in ("from_eager", "own_error", "eagers_error"))
    return off + (f" ({own}, {eagers})" if own else "")


def _short(number: str) -> str:
    return f"{float(number):.0e}".replace("e+0", "e") if len(number) > 4 else number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    write(device, table(device))
    (BOOK / "numerics.md").write_text(page())


if __name__ == "__main__":
    main()
