"""Sorts of short rows as loop nests for a GPU: eager's results in the interpreter, one kernel with what is around, the
code. (That runs in test_triton_programs.)"""

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_cases import GPU, lowered

from reflib import explain
from reflib.fuse import fuse
from reflib.fuse.scatters import scatters
from reflib.generate.compile_triton import compile_kernel
from reflib.ir.interpret import interpret
from reflib.ir.loops import LoopNest
from reflib.ir.program import Extern
from reflib.ir.verify import verify
from reflib.options import Options
from reflib.target import parse_target
from tests.sorts import DTYPES, FUNCTIONS, STABLE, WIDE, cases, gate, hostile, sparsemax, wrong

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


def computed(fn: Callable[..., Any], x: torch.Tensor, **options: Any) -> tuple[list[Any], int]:
    """The results on a GPU, interpreted, and how many calls there are."""
    o = Options(target="sm_90", **options)
    program = fuse(lowered(lambda x: tuple(fn(x)), [x], options=o), o, GPU).program
    verify(program)
    return interpret(program, [x]), sum(isinstance(n, Extern) for n in program.nodes)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_every_dtype_at_random(dtype: torch.dtype, name: str) -> None:
    for x, d in cases(dtype, 4):
        fn = FUNCTIONS[name]
        if dtype == torch.bool and name not in STABLE and name != "unstable":
            continue  # (not in eager)
        got, calls = computed(lambda x, fn=fn, d=d: fn(x, d), x)
        assert not calls
        assert not wrong(name, x, d, got, fn(x, d)), (x, d)


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (4, 1), (0, 1)])
def test_none_or_one(shape: tuple[int, ...]) -> None:
    for name in ("sort", "argsort", "values", "two greatest", "median"):
        x = torch.ones(shape)
        if name == "two greatest" and not shape:
            continue
        got, calls = computed(lambda x, fn=FUNCTIONS[name]: fn(x, -1), x)
        assert not calls and not wrong(name, x, -1, got, FUNCTIONS[name](x, -1))


def test_zeros_keep_their_signs_where_bits_count() -> None:
    x = torch.tensor([[0.0, -0.0, 1.0, -0.0, 0.0, -1.0]])
    want = x.sort(stable=True).values.signbit().tolist()
    both, _ = computed(lambda x: x.sort(stable=True), x)
    alone, _ = computed(lambda x: (x.sort(stable=True).values,), x, numerics="eager")
    assert both[0].signbit().tolist() == alone[0].signbit().tolist() == want


# -- kernels ----------------------------------------------------------------------------------------
def kernels(fn: Callable[..., Any], *args: torch.Tensor, **options: Any) -> list[str]:
    """Their source texts, if there is nothing else."""
    e = explain(fn, *args, target="sm_90", verify=True, **options)
    assert not [n for n in e.program.nodes if isinstance(n, Extern)]
    return [k.source for k in e.kernels]


R = torch.randn
ONE_KERNEL: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "sparsemax": (sparsemax, R(999, 16)),
    "sparsemax, not a power of two": (sparsemax, R(50, 300)),
    "experts": (gate, R(999, 64)),
    "both": (lambda x: x.exp().sort(-1), R(999, 40)),
    "columns": (lambda x: x.sort(0), R(40, 999)),
    "median away": (lambda x: x - x.median(-1, keepdim=True).values, R(999, 31)),
    "the third": (lambda x: x - x.sort(-1).values[:, 2:3], R(999, 31)),
    "range": (lambda x: (s := x.sort(-1).values)[:, -1] - s[:, 0], R(999, 31)),
    "quantile": (lambda x: x.quantile(0.3, -1), R(999, 31)),
    "at their places": (lambda x: torch.zeros_like(x).scatter(1, (t := x.topk(3)).indices, t.values.exp()), R(999, 31)),
    "top k filter": (lambda x: x.where(x >= x.topk(5, -1).values[:, -1:], -1e9).softmax(-1), R(999, 100)),
}


@needs_triton
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name: str) -> None:
    (source,) = kernels(*ONE_KERNEL[name])
    assert source.count("tl.sort(") == (name not in ("experts", "at their places", "top k filter"))


@needs_triton
def test_keys_are_as_wide_as_they_must_be() -> None:
    def wide(fn: Callable[..., Any], dtype: torch.dtype) -> bool:
        (source,) = kernels(fn, torch.ones(99, 64, dtype=dtype))
        return "tl.full([], 1, tl.int64)" in source or ".to(tl.int64) << " in source or "v0.to(tl.int64)" in source

    assert wide(lambda x: x.argsort(-1).to(torch.int32), torch.int32)
    assert not wide(lambda x: x.argsort(-1).to(torch.int32), torch.int16)


def calls(fn: Callable[..., Any], x: torch.Tensor, **options: Any) -> int:
    e = explain(fn, x, **{"target": "sm_90", **options})
    return sum(isinstance(n, Extern) for n in e.program.nodes)


def test_bits_are_parted() -> None:
    """Of rows of any length, and of numbers that were bits."""
    for fn in (
        lambda x: (x > 0).sort(dim=1, stable=True),
        lambda x: (x > 0).to(torch.int8).sort(dim=-1, descending=True, stable=True),
        lambda x: ((x > 0).int().argsort(dim=0, stable=True),),
    ):
        x = R(3, 1500)
        got, calls = computed(fn, x)
        assert not calls and all(torch.equal(g, w) and g.dtype == w.dtype for g, w in zip(got, fn(x), strict=True))
    (source,) = kernels(lambda x: x.sort(-1, descending=True), R(99, 3000) > 0)
    assert "tl.sort(" not in source and "associative_scan" in source


def test_what_stays_a_call() -> None:
    assert calls(lambda x: x.sort(-1), R(9, 1024)) == 0 and calls(lambda x: x.sort(-1), R(9, 1025)) == 1
    assert calls(lambda x: x.topk(16), R(9, 16384)) == 0 and calls(lambda x: x.topk(1), R(9, 16385)) == 1
    assert calls(lambda x: x.topk(17), R(9, 1024)) == 0 and calls(lambda x: x.topk(17), R(9, 1025)) == 1
    assert calls(lambda x: x.sort(0), R(256, 9)) == 0 and calls(lambda x: x.sort(0), R(257, 9)) == 1
    assert calls(lambda x: x.sort(-1), R(9, 64), dynamic=True) == 1
    assert calls(lambda x: x.sort(-1), R(9, 64), batch_invariant=True) == 1
    assert calls(lambda x: x.sort(-1), R(9, 64), persistent_limit=32) == 1
    assert calls(lambda x: x.sort(-1), R(9, 64), target="cpu") == 1
    for dtype in WIDE:
        assert calls(lambda x: x.sort(-1).values, torch.ones(9, 64, dtype=dtype)) == 0
        assert calls(lambda x: x.argsort(-1), torch.ones(9, 64, dtype=dtype)) == 1


@needs_triton
@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(12))
def test_few_long_rows_take_more_warps(seed: int) -> None:
    """Few rows leave schedulers idle: a row of over 128 keys has as many warps as those, down to a few keys per
    thread. Of many rows each is sorted by one warp."""
    g = random.Random(seed)
    n, units = g.randint(129, 1024), parse_target("sm_90").units
    rows = g.choice([g.randint(1, 200), g.randint(201, 3 * units), g.randint(8 * units, 99999)])
    fn = g.choice([lambda x: x.sort(dim=-1, stable=True), lambda x: x.topk(100), lambda x: x.median(-1)])
    (k,) = [k for k in explain(fn, torch.ones(rows, n), target="sm_90").kernels if "tl.sort(" in k.source]
    assert k.grid.constant == rows and (k.num_warps == 1) == (rows >= 8 * units)
    assert rows * k.num_warps >= 8 * units or k.num_warps * 32 * 4 >= n / 2


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_compiles_ahead_of_time(dtype: torch.dtype) -> None:
    target = parse_target("sm_90")
    for fn, shape in ((sparsemax, (9999, 24)), (lambda x: x.sort(-1), (9999, 130)), (lambda x: x.sort(0), (20, 9999))):
        if dtype == torch.int8 and fn is sparsemax:
            continue
        for k in explain(fn, torch.ones(shape, dtype=dtype), target="sm_90").kernels:
            assert compile_kernel(k, target).shared <= target.shared


def test_values_selected_by_a_sort_have_gradients() -> None:
    """What a backward stores at places is stored by the kernel that computes it."""

    def backward(x: torch.Tensor, g: torch.Tensor) -> Any:
        at = x.argsort(dim=-1, stable=True)
        return (torch.zeros_like(x).scatter(-1, at, g.flip(-1).cumsum(-1).flip(-1)),)

    args, o = [hostile((9, 12), 0, torch.float32), R(9, 12)], Options(target="sm_90")
    program = fuse(lowered(backward, args, options=o), o, GPU).program
    stores = [n for n in program.nodes if isinstance(n, LoopNest) and any(map(scatters, n.stores()))]
    assert len(stores) == 1 and stores[0].reduced
    torch.testing.assert_close(interpret(program, args), list(backward(*args)))


@pytest.mark.parametrize("shape", [(13, 822), (8, 5, 926), (3, 1024)])
def test_a_sorted_row_stays_whole(shape: tuple[int, ...]) -> None:
    """Few, long rows: a reduction of them would be cut."""
    x = hostile(shape, 0, torch.float32)
    fn = lambda x: x.kthvalue((shape[-1] + 1) // 2, -1)  # noqa: E731
    (got, at), calls = computed(fn, x)
    assert not calls
    torch.testing.assert_close(got, fn(x).values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x.gather(-1, at[..., None])[..., 0], got, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(4))
def test_positions_that_were_found_are_sorted_in_a_kernel(seed: int) -> None:
    """A topk's, brought to their order: no call of a sort of 64-bit integers."""
    rng = random.Random(seed)
    rows, length = rng.randint(1, 5), rng.randint(20, 900)
    count, descending = rng.randint(17, length), rng.random() < 0.5

    def kept(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, where = x.topk(count, -1)
        where, order = where.view(rows, -1).sort(-1, descending=descending)
        return where, best.gather(1, order)

    x = torch.stack([torch.randperm(length) for _ in range(rows)]).float()
    results, calls = computed(kept, x)
    assert calls == 0
    for got, want in zip(results, kept(x), strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype
