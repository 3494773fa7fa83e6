"""fuse.unroll and fuse.reversal: what a reduction or a scan makes joins readers with other rows or another direction.
(In Triton's interpreter: test_triton_programs.)"""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import CPU, fused, kernels
from torch import Tensor
from triton_programs import colours

import reflib
from reflib.fuse import unroll
from reflib.fuse.unroll import LONGEST, STRIDED


def nearest(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    d = (x[:, None] - y).square().sum(-1)
    return d.amin(0), d.amin(1)


SHORT: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: (x * x).sum(1),
    "mean": lambda x: x.mean(1),
    "prod": lambda x: x.prod(1),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: (x + 1).amin(1),
    "norm": lambda x: x.norm(dim=1),
    "var": lambda x: x.var(1),
    "any": lambda x: (x > 0.8).any(1).float(),
    "all": lambda x: (x > 0.2).all(1).float(),
    "argmax": lambda x: x.argmax(1).float(),
    "argmin of equals": lambda x: (x * 2).round().argmin(1).float(),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", SHORT)
def test_a_short_reduction_that_is_reduced_again_is_one_kernel(kind: str, seed: int) -> None:
    """Odd sizes, infinities and NaN too; eager's results."""
    r = random.Random(f"{kind} {seed}")
    x = torch.rand(r.randrange(3, 40), r.randrange(2, LONGEST + 1), r.randrange(5, 60), generator=_seeded(seed))
    if seed == 3:
        x[0, 0, 0], x[1, 1, 1] = float("inf"), float("nan")
    f = fused(lambda x: (SHORT[kind](x).sum(-1),), (x,))
    (kernel,) = kernels(f)
    assert kernel.rnumel == x.shape[2]
    assert len(kernels(fused(lambda x: (SHORT[kind](x).sum(-1),), (x,), CPU))) == 2


def test_all_distances_are_not_stored() -> None:
    x, y = torch.rand(45, 3, generator=_seeded(0)), torch.rand(37, 3, generator=_seeded(1))
    f = fused(nearest, (x, y))
    assert len(kernels(f)) == 2 and not any(b.kind == "temp" and b.numel == 45 * 37 for b in f.program.buffers.values())


@pytest.mark.parametrize("kind", ["sum", "prod", "mean", "amax"])
def test_short_reductions_of_other_lengths_meet_in_one_kernel(kind: str) -> None:
    """A cost of pairs of boxes: sums over four coordinates, products of two sides, and a long row's sum beside them."""
    r = random.Random(kind)
    m, n, k = r.randrange(20, 60), r.randrange(20, 60), r.randrange(40, 90)
    a, b = torch.rand(m, 4, generator=_seeded(0)), torch.rand(n, 4, generator=_seeded(1))
    long = torch.rand(m, n, k, generator=_seeded(2))

    def cost(a: Tensor, b: Tensor, long: Tensor) -> tuple[Tensor, ...]:
        a, b = a[:, None], b[None]
        side = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).relu().prod(-1)
        near = getattr((a - b).abs(), kind)(-1)
        return (5 * near - side.sqrt(), near * long.sum(-1) + side)

    f = fused(lambda a, b, long: cost(a, b, long)[:1], (a, b, long))
    assert len(kernels(f)) == 1
    f = fused(cost, (a, b, long))
    assert len(kernels(f)) == 1 and kernels(f)[0].rnumel == k


@pytest.mark.parametrize("seed", range(3))
def test_coordinates_that_are_mixed_are_written_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes rows of a cross product and what takes them are one kernel, which reads each input once."""
    monkeypatch.setattr(unroll, "LONG", 1)
    n, g = random.Random(seed).randrange(50, 400), _seeded(seed)
    q, v, w = torch.randn(n, 4, generator=g), torch.randn(n, 3, generator=g), torch.randn(n, 3, generator=g)

    def fn(q: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        axis = F.normalize(q, dim=-1)[:, 1:]
        t = torch.linalg.cross(axis, v * 2)
        return v + q[:, :1] * t + torch.linalg.cross(axis, t), torch.linalg.cross(t, w.relu()).sum(-1)

    (kernel,) = kernels(fused(fn, (q, v, w)))
    assert not kernel.reduced and kernel.numel == n and len(kernel.loads()) == 4 + 3 + 3
    assert len(kernels(fused(fn, (q, v, w), CPU))) > 1
    (rolled,) = kernels(fused(lambda v: (v.roll(1, 1).sin() + v,), (v,)))
    assert rolled.numel == n
    (other,) = kernels(fused(lambda v: (v.flip(1).sin() + v,), (v,)))
    assert other.numel == 3 * n, "linear in the coordinate"


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_halves(half: torch.dtype) -> None:
    x = torch.rand(31, 5, 43, generator=_seeded(2)).to(half)
    assert len(kernels(fused(lambda x: ((x * 3).sum(1).sum(-1),), (x,)))) == 1


def test_gathered_rows() -> None:
    """A factorization machine's interactions: the embeddings are read once, by one kernel."""

    def fn(w: Tensor, i: Tensor) -> tuple[Tensor]:
        e = F.embedding(i, w)
        return ((e.sum(1).square() - e.square().sum(1)).sum(-1),)

    w, i = torch.rand(50, 23, generator=_seeded(3)), torch.randint(0, 50, (77, 6), generator=_seeded(4))
    assert len(kernels(fused(fn, (w, i)))) == 1


def test_what_stays_a_reduction() -> None:
    def rows(fn: Callable[..., Tensor], x: Tensor, **options: bool) -> list[int]:
        return [n.rnumel.hint() for n in kernels(fused(lambda x: (fn(x),), (x,), **options))]

    x, y = torch.rand(33, 4, 21, generator=_seeded(5)), torch.rand(33, 21, 4)
    assert rows(lambda y: y.sum(2), y) == [4]  # nothing reduces it again, and a thread reads it at once
    assert rows(lambda y: y / y.sum(2, keepdim=True), y) == [4]  # put back beside each element
    assert rows(lambda x: x.sum(1).sum(-1), torch.rand(33, LONGEST + 1, 21)) == [LONGEST + 1, 21]
    assert rows(lambda x: x.sum(1).sum(-1), x, batch_invariant=True) == [1, 21]  # in pairs, as a block adds them


@pytest.mark.parametrize("seed", range(3))
def test_few_strided_elements_are_written_out(seed: int) -> None:
    """In blocks of results and elements, all that is computed per result would go through shared memory."""
    r = random.Random(seed)
    columns, rows = 16 * r.randrange(2, 6), r.randrange(2, LONGEST + 1)
    x = torch.rand(r.randrange(30, 60), rows, columns, generator=_seeded(seed))

    def bag(w: Tensor, i: Tensor) -> tuple[Tensor]:
        return (F.embedding(i, w).sum(1),)

    w, i = torch.rand(50, columns), torch.randint(0, 50, (77, rows), generator=_seeded(seed))
    back = lambda x: (x / x.square().mean(1, keepdim=True), x.amax(1))  # noqa: E731
    for fn, args in ((bag, (w, i)), (back, (x,)), (lambda x: (x.var(1), x + 1), (x,))):
        (kernel,) = kernels(fused(fn, args))
        assert not kernel.reduced
        assert [n.rnumel.hint() for n in kernels(fused(fn, args, batch_invariant=True))] in ([rows], [1])  # in pairs
    longer = torch.rand(40, LONGEST + 1, columns)
    assert [n.rnumel.hint() for n in kernels(fused(back, (longer,)))] == [LONGEST + 1]
    many = torch.rand(200, r.randrange(LONGEST + 1, STRIDED + 1), 700)  # enough results for a thread each
    assert [n.rnumel.hint() for n in kernels(fused(back, (many,)))] == [1]
    assert [n.rnumel.hint() for n in kernels(fused(back, (many.mT.contiguous().mT,)))] == [many.shape[1]]


@pytest.mark.parametrize("seed", range(4))
def test_few_elements_that_many_results_share_are_written_out(seed: int) -> None:
    """All pairs of two lists of points, and what is there for each element by itself."""
    r = random.Random(seed)
    d = r.randrange(2, LONGEST + 1)
    x, y = torch.rand(r.randrange(20, 60), d), torch.rand(r.randrange(20, 60), d)
    pairs = lambda x, y: (torch.exp(-(x[:, None] - y).square().sum(-1)), (x[:, None] * y).amax(-1))  # noqa: E731
    stacked = lambda x: (torch.stack([x, x.roll(1), x.roll(2)]).logsumexp(0),)  # noqa: E731
    for fn, args in ((pairs, (x, y)), (stacked, (x[:, 0].clone(),))):
        assert not any(n.reduced for n in kernels(fused(fn, args)))
    assert all(n.reduced for n in kernels(fused(lambda x: (x.square().sum(-1),), (x,))))  # read at once by a thread


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_which_of_few_is_the_greatest(dtype: torch.dtype) -> None:
    """The first of equals, or the first NaN."""
    x = torch.randint(0, 3, (40, 3, 48), generator=_seeded(0)).to(dtype)
    if dtype.is_floating_point:
        x[torch.rand(x.shape, generator=_seeded(1)) < 0.2] = float("nan")
        x[0] = float("-inf")
    for fn in (lambda x: (*x.max(1), *x.min(1)), lambda x: (x.flip(1).argmax(1),)):
        (kernel,) = kernels(fused(fn, (x,)))
        assert not kernel.reduced


def test_a_colour_transform_is_one_kernel_each_way() -> None:
    """The hue is picked among three parts that a ``stack`` joins: each is computed from the same pixel."""
    graphs = reflib.explain(colours, torch.rand(2, 3, 256, requires_grad=True), target="sm_90").graphs
    assert [[n.rnumel for n in g.fused.program.nodes] for g in graphs] == [[1], [1]]


def test_what_reads_the_greatest_few() -> None:
    """These are stored one by one: the place of the least is found among them; their sums so far stay a scan."""
    for fn, count in ((lambda v: v.argmin(-1), 1), (lambda v: v.cumsum(-1), 2)):
        e = reflib.explain(lambda x: fn(x.topk(3).values), torch.rand(30, 20), target="sm_90")  # noqa: B023
        assert len(e.graphs[0].fused.program.nodes) == count


def test_an_operand_that_is_stored_anyway_is_not_read_again() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, y.sum(1).sum(-1)

    first, second = kernels(fused(fn, (torch.rand(33, 4, 21, generator=_seeded(6)),)))
    assert len(first.writes()) == 2 and first.numel == 33 * 21 and second.rnumel == 21


@pytest.mark.parametrize("mode", ["replicate", "reflect"])
def test_an_edge_that_is_read_at_several_places_is_not_stored(mode: str) -> None:
    """Where the padded tensor is read is computed: no dearer than a mask. With it, windows of 49 elements."""

    def fn(x: Tensor) -> tuple[Tensor]:
        p = F.pad(x * 2, (2, 2), mode=mode)
        return (p[..., 4:] - p[..., :-4] + 2 * (p[..., 3:-1] - p[..., 1:-3]),)

    assert len(kernels(fused(fn, (torch.rand(5, 7, 37, generator=_seeded(7)),)))) == 1
    images = torch.rand(2, 3, 14, 14, generator=_seeded(8))
    assert len(kernels(fused(lambda x: (F.adaptive_avg_pool2d(F.relu6(x), 2),), (images,)))) == 1


def test_operands_that_are_read_once_may_be_many() -> None:
    """Half of the features rotated, the others kept: one concatenation of another's parts."""

    def fn(x: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor]:
        a, b, rest = x[..., :5], x[..., 5:10], x[..., 10:]
        return (torch.cat([torch.cat([a * c - b * s, b * c + a * s], -1), rest], -1),)

    args = [torch.rand(*shape, generator=_seeded(9)) for shape in ((3, 11, 21), (11, 5), (11, 5))]
    assert len(kernels(fused(fn, args))) == 1


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- from the end ----------------------------------------------------------------------------------------
def from_end(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


@pytest.mark.parametrize("seed", range(4))
def test_a_scan_from_the_end_is_one_kernel(seed: int) -> None:
    r = random.Random(seed)
    x = torch.rand(r.randrange(3, 40), r.randrange(3, 70), generator=_seeded(seed))
    dim = seed % 2
    for fn in (
        lambda x: (from_end(x, dim),),
        lambda x: (from_end(x * 2, dim) * x.exp() + 1,),
        lambda x: (x.flip(0, 1).cumsum(dim).flip(dim).relu() - x,),
        lambda x: (from_end(x, dim), from_end(x, dim) - x),
    ):
        assert len(kernels(fused(fn, (x,)))) == 1


@pytest.mark.parametrize("seed", range(3))
def test_parts_that_a_stack_joins_are_computed_each_for_itself(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each point computed of all parts is computed once. Not where lanes would go along the parts."""
    monkeypatch.setattr("reflib.fuse.unroll.FILLED", 0)
    r = random.Random(seed)
    x = torch.rand(r.randrange(2, 9), 3, r.randrange(9, 70), generator=_seeded(seed))

    def mixed(x: Tensor, dim: int) -> tuple[Tensor]:
        a, b, c = x.unbind(dim)
        parts = torch.stack([a.pow(2.4) + b, (b + c).log1p(), (a + c).sin()], dim)
        return (torch.where(parts > 0.5, parts, parts * x),)

    def pows(dim: int, x: Tensor) -> list[tuple[int, int]]:
        found = kernels(fused(lambda x: mixed(x, dim), (x,)))
        return [(len(n.parallel), sum(getattr(s, "op", "") == "pow" for s in n.body)) for n in found]

    assert pows(1, x) == [(2, 1)]
    assert all(axes == 2 for axes, _ in pows(2, x.mT.contiguous()))
