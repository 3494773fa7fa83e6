"""Launches hold what registers hold; temporaries lie as what they are computed from does."""

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reflib
from reflib.capture import layouts
from reflib.fuse.mix_order import REGISTERS, THREADS, column_sums, per_element
from reflib.generate.compile_triton import compile_kernel, sass
from reflib.ir.interpret import interpret
from reflib.ir.loops import LoopNest
from reflib.ir.program import KernelNode, walk
from reflib.pipeline import _retarget
from reflib.schedule.axes import layout
from reflib.schedule.pressure import CODE, MOST, code, live
from reflib.target import parse_target


def kernels(fn: Any, *args: Tensor) -> Iterator[tuple[KernelNode, LoopNest, Any]]:
    for stages in reflib.explain(fn, *args, target="sm_90").graphs:
        for node in walk(stages.scheduled.nodes):
            if isinstance(node, KernelNode) and not node.name.endswith("_fallback"):
                yield from ((node, p, stages.scheduled) for p in node.parts if isinstance(p, LoopNest))


def heavy(steps: int, scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Many values that are alive until the end."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        kept = [(x * (k + 1) + y).sin() for k in range(steps)]
        total = kept[0]
        for k in kept[1:]:
            total = (total * scale).cos() + k * total
        return (total / (1 + total.abs())).sum(-1)

    return fn


@pytest.mark.parametrize("seed", range(4))
def test_a_program_leaves_room_for_another(seed: int) -> None:
    """A row in registers that 512 threads hold is not spread over 1,024, which fill a multiprocessor."""
    rng = random.Random(seed)
    length = rng.randrange(4097, 8192, 16)
    w, g = (torch.empty(9999, length, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def fn(w: Tensor, g: Tensor) -> Tensor:
        var, mean = torch.var_mean(w, -1, keepdim=True)
        return (w - mean) * torch.rsqrt(var + 1e-4).clamp(max=100.0) * g[:, :1]

    seen = set[int]()
    for node, part, program in kernels(fn, w, g):
        c = node.config
        if c.reduction == "persistent" and c.rblock == 8192:
            values = live(layout(part, program.buffers)) * c.rblock / (c.num_warps * 32)
            assert values <= MOST and (c.num_warps <= 16 or 2 * values > MOST)
            seen.add(c.num_warps)
    assert 16 in seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
def test_elements_per_thread(seed: int) -> None:
    """Whatever is computed: no more values per thread than registers."""
    rng = random.Random(seed)
    shape, steps = rng.choice([(700, 5600), (30000, 129), (3, 2_000_001), (2000, 4096)]), rng.randrange(3, 24)
    x, y = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    seen = 0
    for node, part, program in kernels(heavy(steps, 0.5), x, y):
        c = node.config
        values = live(layout(part, program.buffers)) * c.xblock * c.rblock / (c.num_warps * 32)
        seen = max(seen, values)
        assert values <= MOST or c.num_warps == 32 or c.xblock * c.rblock <= c.num_warps * 32
    assert seen > 1


@pytest.mark.parametrize("seed", range(2))
def test_few_elements_of_columns_are_few_rows(seed: int) -> None:
    """Not few columns: what a program reads of a row fills sectors, whatever is computed."""
    rng = random.Random(seed)
    rows, columns, steps = rng.randrange(50, 200), rng.randrange(50_000, 100_000), rng.randrange(8, 24)
    x, y = (torch.empty((rows, columns), dtype=torch.bfloat16) for _ in range(2))
    fn = heavy(steps, 0.5)
    seen = [(node.config, live(layout(p, q.buffers))) for node, p, q in kernels(lambda x, y: fn(x.t(), y.t()), x, y)]
    assert any(values * 16 > MOST for _, values in seen)
    assert all(c.xblock >= 32 for c, values in seen if values > 4)


@pytest.mark.parametrize("rows", [False, True])
def test_code_fits_the_instruction_cache(rows: bool) -> None:
    """Of three inlined ``lgamma`` per element; a thread keeps at least one element."""

    def fn(x: Tensor) -> Tensor:
        y = x.lgamma() - (x + 1).lgamma() - (2 * x).lgamma()
        return y.sum(-1) if rows else y

    x = torch.empty(1000, 3072)
    kernel = reflib.explain(fn, x, target="sm_90").kernels[0]
    ((node, part, program),) = kernels(fn, x)
    text = sass(compile_kernel(getattr(kernel, "kernel", kernel), parse_target("sm_90")))
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", text, re.M))
    elements = node.config.xblock * node.config.rblock / (32 * node.config.num_warps)
    assert elements > 1 and instructions < 1.25 * CODE
    estimate = elements * code(layout(part, program.buffers))
    assert 0.7 * estimate < instructions < 1.5 * estimate


def test_rows_share_what_they_have_in_common() -> None:
    """Of four levels an inverse tangent each: computed per thread, so threads have several rows. Not of what differs
    from row to row, of a product with a vector, or where rows are few."""
    rng = random.Random(7)
    levels, many = torch.empty(4), 2 * rng.randint(100_000, 150_000) + 1

    def rows_per_thread(fn: Callable[[Tensor, Tensor], Tensor], rows: int) -> float:
        ((node, part, _),) = kernels(fn, torch.empty(rows, 4), levels)
        assert int(part.numel) == rows
        return node.config.xblock / (32 * node.config.num_warps)

    def common(x: Tensor, v: Tensor) -> Tensor:
        return (x * (v / 3).atanh() / v.log1p()).sum(-1)

    assert rows_per_thread(common, many) >= 4 > rows_per_thread(common, many // 1000)
    for fn in (lambda x, v: (x * v).atanh().log1p().sum(-1), lambda x, v: (x * v).sum(-1)):
        assert rows_per_thread(fn, many) <= 2


def test_positions_take_little_code() -> None:
    ((_, part, program),) = kernels(lambda x: x % 7 // 3 % 5, torch.empty(2**20, dtype=torch.int32))
    assert code(layout(part, program.buffers)) < 10


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(3))
def test_a_norm_holds_the_rows_that_registers_hold(seed: int) -> None:
    """The backward of two norms, one after the other, over rows just above a power of two too."""
    rng = random.Random(seed)
    n = rng.choice([64, 128, 512, 1024]) + rng.randrange(1, 60)

    def norms(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Any:
        y = y + F.rms_norm(x, (n,), a)
        return y, F.layer_norm(y, (n,), b)

    args = [torch.empty(2**24 // n, n, requires_grad=True) for _ in range(2)]
    args += [torch.empty(n, requires_grad=True) for _ in range(2)]
    found = 0
    for node, part, program in kernels(norms, *args):
        if node.config.reduction == "mixed" and node.config.xblock > 1:
            s, found = layout(part, program.buffers), found + 1
            reads = {(ld.buffer, ld.index): ld for ld in s.loads if ld.index.has(s.r)}.values()
            each = per_element(len(column_sums(part)), [(program.buffers[x.buffer], x.index.has(s.x)) for x in reads])
            assert node.config.xblock * node.config.rblock * each <= REGISTERS * THREADS
    assert found


class Causal(nn.Module):
    """Convolutions over time that are padded on both sides and cut: their gradients are slices written to zeros."""

    def __init__(self, c: int, pad: int):
        super().__init__()
        self.pad, self.layers = pad, nn.ModuleList(nn.Conv1d(c, c, 3, padding=pad) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[..., : -self.pad].relu()
        return x


def test_a_bias_of_what_is_padded_is_summed_along_columns() -> None:
    """What the gradient is added up from lies in channels-last order, the zeros around it do not."""
    model = Causal(256, 4).to(torch.bfloat16)
    x = torch.empty(32, 256, 1000, dtype=torch.bfloat16)
    large = [
        n for n, p, _ in kernels(model, x)
        if p.reduced and (p.numel * p.rnumel).hint() > 10**6
        and any(b.startswith("convolution_backward") for b in p.reads())
    ]  # fmt: skip
    assert large
    for node in large:
        assert node.config.xblock >= 32, node.config


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(3))
def test_another_order_computes_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out = layouts._lay_out
    monkeypatch.setattr(layouts, "_lay_out", lambda *args: min(1, lay_out(*args)))  # small as it is, it pays
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Causal(8 * rng.randrange(1, 3), rng.randrange(1, 4))
    x = torch.randn(2, model.layers[0].in_channels, rng.randrange(20, 40))
    for stages in reflib.explain(model.to(torch.bfloat16), x.to(torch.bfloat16), target="sm_90").graphs:
        given = [_values(n) for n in stages.graph.module.graph.nodes if n.op == "placeholder"]
        want = stages.graph.module(*[g.clone() for g in given])
        got = interpret(_retarget(stages.scheduled, parse_target("cpu")), [g.clone() for g in given])
        for a, b in zip(got, want, strict=True):
            if isinstance(b, Tensor):
                torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * max(1, float(b.abs().max())))


def _values(node: torch.fx.Node) -> Tensor:
    v = node.meta["val"]
    return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(torch.randn(v.shape))
