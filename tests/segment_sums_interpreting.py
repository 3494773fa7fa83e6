"""Runs ``lower.segment_sums`` in Triton's interpreter, on a CPU's tensors, as ``flex_interpreting`` does.

TRITON_INTERPRET=1 python tests/segment_sums_interpreting.py

Prints one JSON object: for each case, what is wrong with it, or nothing.
"""

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from interpreter import answer, told

from reflib.plugins import PLUGS

del PLUGS["generate.PRINTERS"]["cpu"]
PLUGS["wrap.BINDERS"].clear()

from reflib.ir.program import kernel_variants  # noqa: E402
from reflib.lower import segment_sums  # noqa: E402
from reflib.lower.context import LoweringContext  # noqa: E402
from reflib.options import Options  # noqa: E402
from reflib.pipeline import Backend  # noqa: E402

LONG = "more rows than 16 bits"  # as if 16 bits held 40: the interpreter takes a millisecond per row
Sizes = tuple[int, int, tuple[int, ...], torch.dtype]  # rows of the result, rows that are added, a row's, dtype
CASES: dict[str, tuple[Any, Sizes]] = {
    "index_add": (lambda x, i, y: x.index_add(0, i, y), (7, 50, (5,), torch.float32)),
    "wide": (lambda x, i, y: x.index_add(0, i, y), (3, 9, (2, 70), torch.float32)),
    "many": (lambda x, i, y: torch.zeros_like(x).index_add(0, i, y), (2, 300, (3,), torch.float32)),
    "counts": (lambda x, i, y: x.scatter_add(0, i, y), (40, 120, (), torch.float32)),
    LONG: (lambda x, i, y: x.index_add(0, i, y), (41, 90, (), torch.float32)),
    "halves": (lambda x, i, y: x.index_add(0, i, y), (7, 50, (5,), torch.float16)),
    "mean": (
        lambda x, i, y: x.scatter_reduce(0, i[:, None].expand_as(y), y, "mean", include_self=False),
        (7, 20, (6,), torch.float32),
    ),
    "lying otherwise": (
        lambda x, i, y: x.index_add(0, torch.stack([i, i], 1)[:, 1], y[:1].expand_as(y)), (7, 50, (5,), torch.float32)
    ),
    "put": (lambda x, i, y: x.index_put((i - x.shape[0],), y, True), (7, 50, (5,), torch.float32)),
}


def problem(name: str) -> str:
    fn, (rows, count, sizes, dtype) = CASES[name]
    torch.manual_seed(0)
    x, y = torch.randn(rows, *sizes).to(dtype), torch.randn(count, *sizes).to(dtype)
    index, stages = torch.randint(rows, (count,)), list[Any]()
    with torch.no_grad(), patch.object(segment_sums, "SHORT", 40 if name == LONG else segment_sums.SHORT):
        got = _compiled(fn, stages)(x, index, y)
    return _wrong(got, fn(x.double(), index, y.double()), stages)


def gradients() -> str:
    """Of a table that is read at places, in two ways."""
    torch.manual_seed(0)
    table, where, y = torch.randn(30, 4, requires_grad=True), torch.randint(30, (6, 5)), torch.randn(6, 5, 4)

    def read(table: Any, where: Any) -> tuple[Any, Any]:
        return F.embedding(where, table, padding_idx=3), table[where]

    def of_table(run: Any) -> Any:
        return torch.autograd.grad([(r * y).sum() for r in run(table, where)], table)[0]

    stages = list[Any]()
    return _wrong(of_table(_compiled(read, stages)), of_table(read), stages, 2)


def _compiled(fn: Any, stages: list[Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend=Backend(Options(verify=True, batch_invariant=True), stages.append), dynamic=False)


def _wrong(got: Any, want: Any, stages: list[Any], launches: int = 1) -> str:
    parts = [v.variants[0].kernel.parts[0] for s in stages for v in kernel_variants(s.scheduled.nodes)]
    if sum(str(getattr(p, "target", "")) == "segment_sums" for p in parts) != launches:
        return f"other kernels: {[str(s.program) for s in stages]}"
    error = (got.double() - want.double()).abs().max().item()
    return "" if error <= 4 * torch.finfo(got.dtype).eps * (1 + want.abs().max().item()) else f"off by {error}"


def problems() -> dict[str, str]:
    LoweringContext.on_gpu = property(lambda self: True)
    return {n: told(problem, n) for n in CASES} | {"gradients": told(gradients)}


if __name__ == "__main__":
    answer(problems)
