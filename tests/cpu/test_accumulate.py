"""Sums into places that tensors name: one loop nest fills them, another adds atomically, and computes what it adds."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import atomic as adding
from fuse_cases import calls, kernels
from fuse_cases import gpu_fused as fused

import reflib
from reflib.errors import VerifyError
from reflib.ir.expr import Ref, Var, expr
from reflib.ir.loops import Axis, Const, Indirect, Load, LoopNest, Op, Reduce, Store
from reflib.ir.program import Buffer, Program, full_view
from reflib.ir.verify import verify
from reflib.lower.accumulate import SUMMED_IN
from reflib.pipeline import Stages
from tests.semantics import Compiled, compare

aten = torch.ops.aten
I64, BF16, F32 = torch.int64, torch.bfloat16, torch.float32


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# -- every op, on random sizes ----------------------------------------------------------------------------
def _sizes(seed: int) -> tuple[random.Random, int, int, int]:
    r = random.Random(seed)
    return r, r.randint(1, 9), r.randint(1, 9), r.choice((0, 1, 5, 12))


def _index_put(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Which dimensions have an index, of what shape; whether values are broadcast."""
    r, rows, columns, n = _sizes(seed)
    shape = (rows, columns, 3)
    own = (n, 2) if r.random() < 0.3 else (n,)
    used = sorted(r.sample(range(3), r.randint(1, 3)))
    where = [torch.randint(-shape[d], shape[d], own if r.random() < 0.7 else own[-1:]) for d in range(3)]
    where = [w if d in used else None for d, w in enumerate(where)]
    result = torch.zeros(shape)[tuple(slice(None) if w is None else w for w in where)]
    values = torch.randn([s if r.random() < 0.7 else 1 for s in result.shape])
    x = torch.randn(shape)

    def fn(x: Any, values: Any, *found: Any) -> Any:
        each = iter(found)
        return (aten.index_put(x.sin(), [w if w is None else next(each) for w in where], values.cos(), True) * 2,)

    return fn, (x, values, *(w for w in where if w is not None))


def _index_add(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    r, rows, columns, n = _sizes(seed)
    dim = r.choice((0, 1, -1))
    shape = (n, columns) if dim == 0 else (rows, n)
    index = torch.randint(0, rows if dim == 0 else columns, (n,), dtype=r.choice((I64, torch.int32)))
    return lambda x, i, v: (x.index_add(dim, i, v.exp(), alpha=r.choice((1, 3))),), (
        torch.randn(rows, columns), index, torch.randn(shape),
    )  # fmt: skip


def _scatter(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    r, rows, columns, n = _sizes(seed)
    shape = (n, r.randint(1, columns))
    index, new = torch.randint(0, rows, shape), torch.randn(n + 1, columns)
    way = r.choice(("sum", "mean"))
    own = r.random() < 0.5
    return lambda x, i, v: (
        x.scatter_add(0, i, v) * 2, x.scatter_reduce(0, i, v.relu(), way, include_self=own),
    ), (torch.randn(rows, columns), index, new)  # fmt: skip


def _embedding(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    r, rows, columns, n = _sizes(seed)
    padding = r.randint(-1, rows - 1)
    return lambda g, i: (aten.embedding_dense_backward(g * 3, i, rows, padding, False),), (
        torch.randn(n, 2, columns), torch.randint(0, rows, (n, 2)),
    )  # fmt: skip


@pytest.mark.parametrize("make", [_index_put, _index_add, _scatter, _embedding])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sample(8)
def test_random(make: Callable[[int], Any], seed: int) -> None:
    torch.manual_seed(seed)
    fn, args = make(seed)
    f = fused(fn, *args)
    assert not calls(f) and adding(f)
    assert not any(n.reduced for n in kernels(f))


def test_sizes_that_vary() -> None:
    def fn(x: Any, i: Any, v: Any) -> Any:
        return (x.index_put((i,), v.sin(), accumulate=True), aten.embedding_dense_backward(v, i.abs(), 7, 1, False))

    f = fused(fn, torch.randn(7, 5), torch.randint(-7, 7, (12,)), torch.randn(12, 5), symbolic=True)
    assert not calls(f) and adding(f)


@pytest.mark.parametrize("dtype", [*SUMMED_IN, torch.uint8, torch.int16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Half dtypes are summed in float32; what the hardware cannot add atomically is a call."""
    x, v = torch.arange(12).view(4, 3).to(dtype), torch.arange(18).view(6, 3).to(dtype)
    f = fused(lambda x, i, v: (x.index_put((i,), v, accumulate=True),), x, torch.tensor([0, -1, 3, 0, 2, 0]), v)
    assert len(calls(f)) == (dtype not in SUMMED_IN)
    for n in adding(f):
        assert [f.program.buffers[s.buffer].dtype for s in n.stores()] == [SUMMED_IN[dtype]]


# -- fusion -----------------------------------------------------------------------------------------------
def test_what_is_added_is_computed_there_and_readers_wait() -> None:
    def fn(x: Any, i: Any, g: Any) -> Any:
        return (torch.index_add(x.relu(), 0, i, g.sin() * 2) + 1,)

    fill, add, read = kernels(fused(fn, torch.randn(5, 4), torch.randint(0, 5, (9,)), torch.randn(9, 4)))
    assert [s.op for s in add.body if isinstance(s, Op)] == ["sin", "mul"]
    assert fill.reads() == ["x_1"] or len(fill.reads()) == 1
    assert set(add.writes()) == set(fill.writes()) == set(read.reads())


def test_one_position_per_row_needs_none() -> None:
    def fn(x: Any, i: Any, g: Any) -> Any:
        return (torch.scatter_add(x.sin(), 1, i, g) * 2,)

    f = fused(fn, torch.randn(5, 4), torch.randint(0, 4, (5, 1)), torch.randn(5, 1))
    assert not adding(f) and len(kernels(f)) == 1


def test_not_with_a_reduction() -> None:
    def fn(x: Any, i: Any, g: Any) -> Any:
        return (torch.index_add(x, 0, i, torch.softmax(g, -1)),)

    f = fused(fn, torch.randn(5, 4), torch.randint(0, 5, (9,)), torch.randn(9, 4))
    assert not any(isinstance(s, Reduce) for n in adding(f) for s in n.body)
    assert any(r.reason.code == "scatter" for r in f.refusals)


# -- stores, in place ----------------------------------------------------------------------------------------
def copies(f: Any) -> list[LoopNest]:
    """Loop nests that only load and store."""
    return [n for n in kernels(f) if len(n.body) == 2]


def test_a_cache_is_written_in_place() -> None:
    def fn(cache: Any, at: Any, k: Any) -> Any:
        new = cache.index_copy(1, at, k.sin())
        new = new.index_put((at[:1], at[:1]), k[0, 0], accumulate=True)
        out = (new * 2).sum(0)
        cache.copy_(new)
        return (out,)

    f = fused(fn, torch.randn(3, 9, 4), torch.tensor([1, 2]), torch.randn(3, 2, 4))
    writers = [n for n in kernels(f) if f.program.inputs[0] in n.writes()]
    assert not calls(f) and len(writers) == 2 and not copies(f)


def _writes(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Random stores and additions to an input and to values, which are read before, between and after."""
    r = random.Random(seed)
    steps = [(r.randint(0, 6), r.random() < 0.5, r.random() < 0.9) for _ in range(r.randint(1, 4))]
    finish = r.randint(0, 1)

    def fn(x: Any, i: Any, v: Any) -> Any:
        values, outputs = [x.sin(), x], []
        for which, add, last in steps:
            old = values[-1] if last else values[which % len(values)]
            new = old.index_put((i[which % 2],), v * which, accumulate=add)
            if which % 3 == 0:
                outputs.append(new.exp())
            if which == 1:
                outputs.append(old.cos())
            values.append(new)
        outputs.append(values[-1].abs())
        x.copy_(values[-1])
        return (*outputs, values[-1 - finish] + 1)

    rows = torch.stack([torch.randperm(7)[:3] for _ in range(2)])
    return fn, (torch.randn(7, 3), rows, torch.randn(3, 3))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sample(4)
def test_random_writes(seed: int) -> None:
    fn, args = _writes(seed)
    fused(fn, *args)


# -- interpolation ----------------------------------------------------------------------------------------
def backward(fn: Callable[..., Any], x: torch.Tensor, **options: Any) -> Stages:
    compiled = Compiled(fn, target="sm_90", **options)
    compiled(x).sum().backward()
    return compiled.stages[-1]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("way", "kernels"),
    [
        ({"scale_factor": 2}, 1),
        ({"size": (3, 2)}, 1),
        ({"scale_factor": 3}, 1),
        ({"scale_factor": 2, "mode": "bilinear"}, 1),
        ({"scale_factor": 4, "mode": "bilinear"}, 2),
        ({"scale_factor": 9, "mode": "bilinear"}, 2),
        ({"scale_factor": 2, "mode": "bicubic"}, 2),
        ({"size": (7, 9), "mode": "bilinear", "align_corners": True}, 1),
        ({"size": (9, 11), "mode": "bilinear"}, 2),
    ],
    ids=str,
)
def test_interpolation_gathers(way: dict[str, Any], kernels: int) -> None:
    x = torch.randn(1, 2, 4, 5, dtype=BF16, requires_grad=True)
    stages = backward(lambda x: F.interpolate(x, **way), x)
    assert stages.fused is not None
    assert not calls(stages.fused) and not adding(stages.fused)
    assert len(stages.fused.program.nodes) == kernels


@pytest.mark.parametrize("shape", [(1,), (1, 7), (5, 1)])
def test_a_place_that_is_known_is_filled_by_an_earlier_kernel(shape: tuple[int, ...]) -> None:
    """Of a tensor of one row, every index is 0: what fills it and what adds to it touch the same element."""

    def fn(x: Any) -> Any:
        return ((x * 2).index_add(0, torch.zeros(1, dtype=I64, device=x.device), x[:1] + 1),)

    e = reflib.explain(fn, torch.randn(shape), target="sm_90", verify=True)
    assert not calls(e) and len(e.kernels) == 2


# -- where it is not wanted --------------------------------------------------------------------------------
def test_options_and_devices_that_sum_in_a_fixed_order() -> None:
    def fn(x: Any, i: Any, v: Any) -> Any:
        return (x.index_put((i,), v, accumulate=True),)

    args = (torch.randn(9, 3), torch.tensor([1, 1, -4]), torch.randn(3, 3))
    assert len(calls(fused(fn, *args, atomics=False))) == 1
    with deterministic():
        assert len(calls(fused(fn, *args))) == 1
        whole = (torch.ones(9, 3, dtype=I64), args[1], torch.ones(3, 3, dtype=I64))
        assert adding(fused(fn, *whole))
        assert len(calls(fused(lambda x, i, v: (x.index_put((i,), v),), *args))) == 1
    assert not calls(fused(lambda x, i, v: (x.index_put((i[1:],), v[1:]),), *args))
    assert [str(e.target) for e in compare(fn, *args).externs] == ["aten.index_put.default"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i, v: aten.embedding_dense_backward(v, i, 9, -1, True),
        lambda x, i, v: x.scatter_reduce(0, i[:, None].expand(-1, 3), v, "amax"),
        lambda x, i, v: aten.index_put(x, [x[:, 0] > 0], v[:1], True),
    ],
)
def test_other_cases_are_calls(fn: Callable[..., Any]) -> None:
    e = reflib.explain(fn, torch.randn(9, 3), torch.tensor([1, 1, 4]), torch.randn(3, 3), target="sm_90")
    assert len(calls(e)) == 1


# -- the IR ------------------------------------------------------------------------------------------------
N, R = Var("i", expr(4)), Var("r", expr(3))
AT = (Load("where", expr(N), I64), Indirect(0, expr(5)), Load("new", expr(N), F32))
ADD = Store("sums", expr(Ref(1, expr(5))), 2, "atomic")
ROWS = (Axis(N, "p"), Axis(R, "r"))


def check(*body: Any, fill: bool = True, dtype: torch.dtype = F32, axes: tuple[Axis, ...] = (Axis(N, "p"),)) -> None:
    cpu = torch.device("cpu")
    kinds = {"where": (I64, 4, "input"), "new": (F32, 4, "input"), "sums": (dtype, 5, "temp")}
    buffers = {n: Buffer(n, d, cpu, (expr(k),), (expr(1),), kind) for n, (d, k, kind) in kinds.items()}
    var = Var("f", expr(5))
    value = Const(0.0 if dtype.is_floating_point else 0, F32 if dtype == BF16 else dtype)
    first = LoopNest("fill", (Axis(var, "p"),), (value, Store("sums", expr(var), 0)))
    nodes = (*([first] if fill else []), LoopNest("add", axes, body))
    verify(Program(("where", "new"), buffers, nodes, (full_view(buffers["sums"]),)))


def test_atomic_stores_are_verified() -> None:
    check(*AT, ADD)
    check(*AT, ADD, ADD)
    check(*AT, Load("new", expr(R), F32), Reduce("sum", (3,), F32), ADD, replace(ADD, value=4), axes=ROWS)
    for message, body, more in (
        ("before it is filled", (*AT, ADD), {"fill": False}),
        ("no atomic addition", (*AT, ADD), {"dtype": BF16}),
        ("another statement", (*AT, Load("sums", expr(N), F32), ADD), {}),
        ("another statement", (*AT, ADD, Store("sums", expr(N), 2)), {}),
        ("for each element", (*AT[:2], Load("new", expr(R), F32), Reduce("sum", (2,), F32), ADD), {"axes": ROWS}),
    ):
        with pytest.raises(VerifyError, match=message):
            check(*body, **more)


# -- sums of sums ------------------------------------------------------------------------------------------
def sums(count: int, what: Callable[..., Any], dtype: torch.dtype = F32) -> Any:
    """Fused: ``what`` of tensors, each zeros that rows were added to."""

    def fn(*args: Any) -> tuple[Any, ...]:
        new = (torch.zeros(9, 3, dtype=dtype).index_add(0, i, v) for i, v in zip(args[::2], args[1::2]))
        return (what(*new),)

    args = [a for _ in range(count) for a in (torch.randint(0, 9, (20,)), torch.randn(20, 3).to(dtype))]
    return fused(fn, *args)


def filled(f: Any) -> int:
    return sum(len(n.stores()) for n in kernels(f) if not n.reads() and not n.reduced)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_sum_of_sums_is_one(dtype: torch.dtype) -> None:
    f = sums(4, lambda a, b, c, d: (a + b).relu() * 2 + (c + d), dtype)
    assert filled(f) == 2, "what is not added before something else happens stays apart"
    f = sums(4, lambda a, b, c, d: ((a + b) + (c + d)).relu(), dtype)
    last = [n for n in kernels(f) if any(s.buffer in f.program.output_buffers() for s in n.stores())]
    assert filled(f) == 1 and [len(n.reads()) for n in last] == [1]
    assert len({s.buffer for n in adding(f) for s in n.stores() if s.reduce}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_additions_to_one_tensor_are_one_kernel(seed: int) -> None:
    """Also of one value at one position twice. What each row's position chooses is gathered there, of all its columns
    that are needed; what is computed from gathered rows is not computed again for each."""
    rng = random.Random(seed)
    n, m = rng.randrange(5, 30), rng.randrange(40, 90)
    x, e = torch.randn(n, 3), torch.randint(0, n, (m, 2))

    def both(x: Any, e: Any) -> Any:
        d = x[e[:, 0]].roll(1, 1) * x[e[:, 1]].roll(-1, 1)
        out = torch.zeros_like(x).index_add(0, e[:, 0], d).index_add(0, e[:, 1], d)
        return (out.index_add(0, e[:, 1], d),)

    f = fused(both, x, e)
    (only,) = adding(f)
    assert len(only.stores()) == 3 and len(kernels(f)) == 2

    def between(x: Any, e: Any, v: Any) -> Any:
        once = torch.zeros_like(x).index_add(0, e[:, 0], v)
        return (once.index_add(0, e[:, 1], once[e[:, 0]] * v),)

    found = adding(fused(between, x, e, torch.randn(m, 3)))
    assert [len(n.stores()) for n in found] == [1, 1], "the first sum is read"

    def around(x: Any, e: Any) -> Any:
        y = (x.sin() / x.norm(dim=-1, keepdim=True)).exp() / x.cos()
        return (y[e[:, 0]] + y[e[:, 1]] * y[e[:, 0] * 0],)

    big = torch.randint(0, n, (n * 9, 2))
    assert len([s for k in kernels(fused(around, x, big)) for s in k.body if isinstance(s, Op) and s.op == "exp"]) == 1


def test_a_sum_that_is_copied_is_made_in_the_copy() -> None:
    for f in (sums(n, add, F32) for n, add in ((3, lambda a, b, c: (a + b) + c), (2, lambda a, b: (a + b).t()))):
        assert filled(f) == 1 and len(kernels(f)) == 1 + len(adding(f))
    assert len(kernels(sums(2, lambda a, b: a + b, BF16))) == 2 + len(adding(f)), "rounded from float32"
    both = lambda x, i, v: (y := (x.sin().index_add(0, i, v) + 0.0), y.exp())  # noqa: E731
    fused(both, torch.randn(9, 3), torch.randint(0, 9, (20,)), torch.randn(20, 3))


def test_sums_that_something_else_reads_stay_apart() -> None:
    for what in (lambda a, b: a * b, lambda a, b: (a + b) * a, lambda a, b: a + b.flip(0), lambda a, b: a - b):
        assert filled(sums(2, what)) == 2


def test_one_of_the_sums_may_begin_with_a_tensor() -> None:
    def fn(x: Any, i: Any, v: Any, j: Any) -> Any:
        return ((x.sin().index_add(0, i, v) + torch.zeros_like(x).index_add(0, j, v)) * 2,)

    args = torch.randn(9, 3), torch.randint(0, 9, (20,)), torch.randn(20, 3), torch.randint(0, 9, (20,))
    f = fused(fn, *args)
    assert filled(f) == 0 and len({s.buffer for n in adding(f) for s in n.stores() if s.reduce}) == 1
    both = fused(lambda x, i, v, j: ((x.sin().index_add(0, i, v) + x.cos().index_add(0, j, v)) * 2,), *args)
    assert len({s.buffer for n in adding(both) for s in n.stores() if s.reduce}) == 2, "each begins with another tensor"


# -- 32 bits ---------------------------------------------------------------------------------------------


def test_only_what_is_proved_to_be_inside_is_read_unchecked() -> None:
    """Not what ``_unsafe_index`` calls so: torch itself gives it negative positions. And int32 wraps around."""
    around = lambda x: x[(torch.arange(50000, dtype=torch.int32) * 100000).clamp(-5, 10)]  # noqa: E731
    for fn, args, wrapped in (
        (lambda x, i: aten._unsafe_index(x, [i]), (torch.randn(5, 3), torch.tensor([1, -2])), True),
        (around, (torch.randn(100),), True),
        (lambda x: aten._unsafe_index(x, [4 - torch.arange(5)]), (torch.randn(5, 3),), False),
        (lambda x, i: x[i.clamp(0, 4)] + x[i.remainder(5)], (torch.randn(5, 3), torch.tensor([-9, 9])), False),
        (lambda x, i: x[i.to(torch.int64)], (torch.randn(256, 3), torch.tensor([0, 9], dtype=torch.uint8)), False),
    ):
        kernels = reflib.explain(fn, *args, target="sm_90").kernels
        assert any("ok" in k.source for k in kernels) == wrapped


def _integers(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Positions that floats make, clamped first or last; packed integers taken apart by a table's shifts; masks that
    are always true."""
    r, rows, columns, _ = _sizes(seed)
    n, bits = r.randint(2, 40), r.choice((4, 8))
    low = r.randint(-3, 3)
    table = r.sample(range(0, 32, bits), 32 // bits)

    def fn(x: Any, packed: Any, y: Any) -> Any:
        at = (x * 3).to(I64)
        inside, shift = at.clamp(0, n - 1), torch.tensor(table)
        parts = (packed[:, :, None] >> shift) & (2**bits - 1)
        some = torch.arange(rows * columns).view(rows, columns) // 2
        return (
            y[inside], inside * 5 - at.clamp(low, low + 4), at + inside, (at.abs() < 10) & (inside >= 0),
            y[at.remainder(n)], parts.to(torch.int8), parts.flatten(1).float() * 0.5, (inside << 2) | 1,
            y[(some - some.flip(0)).abs() % n],
            (parts.sum(-1) > 3).cumsum(0), y[((parts[..., 0] > 2).cumsum(0) - 1).clamp(min=0) % n],
        )  # fmt: skip

    x = torch.randn(rows, columns) * 20
    x[0, 0] = r.choice((1e9, 2.5e9, -4e9, 7.0))
    return fn, (x, torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32), torch.randn(n))


@pytest.mark.parametrize("seed", range(6))
def test_integers_that_are_known_to_be_small(seed: int) -> None:
    fn, args = _integers(seed)
    fused(fn, *args)


def test_what_is_known_takes_no_statements_and_little_memory() -> None:
    def ops(f: Any, dtype: torch.dtype) -> list[str]:
        return [s.op for n in kernels(f) for s in n.body if isinstance(s, Op) and s.dtype == dtype]

    packed, table = torch.randint(-(2**31), 2**31 - 1, (9, 4), dtype=torch.int32), [0, 16, 4, 20]
    f = fused(lambda x: (((x[:, :, None] >> torch.tensor(table)) & 15).float(),), packed)
    assert not {"where", "maximum", "minimum"} & {*ops(f, I64), *ops(f, torch.int32)}
    assert ops(f, torch.int32).count("shr") == 1 and "shr" not in ops(f, I64), "an int64 only for torch's promotion"
    f = fused(lambda x, y: (y[(x * 2).to(I64).clamp(0, 8)],), torch.randn(50), torch.randn(9))
    assert ops(f, I64) == [], "clamped in 32 bits, and within the tensor"
    order = fused(lambda x: (x.gather(1, (x > 0).argsort(dim=1, stable=True)),), torch.randn(5, 300))
    assert torch.int16 in [b.dtype for b in order.program.buffers.values() if b.kind == "temp"]


@pytest.mark.parametrize("rows", [(), (3,)])
def test_one_row(rows: tuple[int, ...]) -> None:
    """Its place is known, and what reads it touches the same elements: after all additions only."""
    x, i, y = torch.randn(1, *rows).bfloat16(), torch.tensor([0]), torch.randn(1, *rows).bfloat16()
    f = fused(lambda x, i, y: (x.index_add(0, i, y, alpha=2) * 3,), x, i, y)
    assert adding(f) and not any({s.buffer for s in n.stores() if s.reduce} & set(n.reads()) for n in kernels(f))


def test_what_fills_one_element_is_apart_from_what_adds_to_it() -> None:
    """The verifier asks for that: in one kernel nothing else touches atomic sums."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        part = torch.as_strided(x, (1,), (1,))
        return part.index_add_(0, torch.zeros(1, dtype=torch.int64, device=x.device), part * 2)

    e = reflib.explain(fn, torch.randn(2, 2), target="sm_90", verify=True)
    assert any("tl.atomic_add" in k.source for k in e.kernels)
