"""Scans as loop nests: eager's results in C++ and in the interpreter, one kernel with their neighbours, three where
rows are few and long; code for a GPU. (Their Triton code runs in test_triton_programs.)"""

import importlib.util
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_cases import GPU, fused, kernels, lowered

from reflib import explain
from reflib.capture import products  # noqa: F401  (its op)
from reflib.errors import VerifyError
from reflib.generate.compile_triton import compile_kernel
from reflib.ir.data import from_data, to_data
from reflib.ir.expr import Var, expr
from reflib.ir.interpret import interpret
from reflib.ir.loops import Axis, Load, LoopNest, Scan
from reflib.ir.program import Buffer, Program
from reflib.ir.scans import SCANS
from reflib.ir.verify import verify
from reflib.target import parse_target
from tests.semantics import compare

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


def hostile(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ties; in floats also NaN and infinities."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, shape, generator=g)
    if not dtype.is_floating_point:
        return x.to(dtype)
    x = x.to(dtype) / 2
    for value in (float("nan"), float("inf"), float("-inf")):
        x[torch.rand(shape, generator=g) < 0.01] = value
    return x


def every_scan(dim: int) -> Callable[[torch.Tensor], Any]:
    def fn(x: torch.Tensor) -> Any:
        out = [x.cumsum(dim), *x.cummax(dim), *x.cummin(dim), x.cumprod(dim)]
        return out + ([x.logcumsumexp(dim)] if x.dtype.is_floating_point else [x.cumsum(dim, dtype=torch.float32)])

    return fn


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_every_dtype_at_random(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    shape = tuple(rng.randint(2, 40) for _ in range(rng.randint(1, 3)))
    for dim in range(len(shape)):
        x = hostile(shape, dim, dtype)
        compiled = compare(every_scan(dim), x if dim else x.clone(memory_format=torch.contiguous_format))
        assert not compiled.externs


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sizes_unknown_and_strides_of_any_order(dim: int) -> None:
    x = hostile((7, 33, 5), dim).permute(2, 0, 1)
    assert not compare(every_scan(dim), x, dynamic=True).externs


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 3), (4, 1)])
def test_none_or_one(shape: tuple[int, ...]) -> None:
    compare(lambda x: (x.cumsum(-1), x.cumprod(-1), x.logcumsumexp(-1)), torch.ones(shape))
    if 0 not in shape:
        compare(lambda x: (*x.cummax(-1), *x.cummin(-1)), torch.ones(shape))


def test_gradients() -> None:
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    compare(lambda x: (x.cumsum(-1), x.exp().cumprod(0), x.logcumsumexp(1)), x, backward=True)


def test_half_types_are_accumulated_in_float32() -> None:
    """4096 ones and more, in a format whose whole numbers end at 2048 (256)."""
    for dtype in (torch.float16, torch.bfloat16):
        got = compare(lambda x: x.cumsum(0), torch.ones(5000, dtype=dtype))(torch.ones(5000, dtype=dtype))
        assert torch.equal(got, torch.arange(1.0, 5001).to(dtype))


# -- fusion -----------------------------------------------------------------------------------------
R = torch.randn


def from_the_end(x: Any, g: Any) -> Any:
    """As the gradient of a log-sum-exp scan has it: the input, cast, is read twice."""
    y, scan = x.float(), g.flip(-1).cumsum(-1).flip(-1)
    return ((y + scan).exp() - (y - g.exp().flip(-1).cumsum(-1).flip(-1)).exp(),)


ONE_KERNEL: dict[str, tuple[Any, list[Any]]] = {
    "before and after": (lambda x, b: ((x * 2 + b).cumsum(-1).relu(),), [R(4, 6), R(6)]),
    "softmax": (lambda x: (torch.softmax(x, -1).cumsum(-1),), [R(4, 6)]),
    "a sum of it": (lambda x: (x.cumsum(-1).sum(-1),), [R(4, 6)]),
    "normed": (lambda x: ((y := x.exp().cumsum(-1)) / y.sum(-1, keepdim=True),), [R(4, 6)]),
    "twice": (lambda x: (x.cumsum(-1).cumprod(-1),), [R(4, 6)]),
    "columns": (lambda x: (x.relu().cumsum(0) + 1,), [R(6, 4)]),
    "the last": (lambda x: (x / x.cumsum(-1)[:, -1:],), [R(4, 6)]),
    "at a place": (lambda x, i: ((x.cumsum(-1) - 1).gather(-1, i) * x,), [R(4, 6), torch.tensor([[5], [0], [3], [3]])]),
    "from the end": (from_the_end, [R(4, 6).bfloat16(), R(4, 6)]),
    "of columns": (lambda x: (x.cummax(0).values[2] + x,), [R(6, 4)]),
    "top p": (lambda x: ((x.softmax(-1).cumsum(-1) > 0.9).to(torch.int64).cumsum(-1),), [R(4, 6)]),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name: str) -> None:
    fn, args = ONE_KERNEL[name]
    assert len(fused(fn, args).groups) == 1
    compare(fn, *args)


SEVERAL: dict[str, tuple[Any, list[Any]]] = {
    "both ways": (lambda x: (x.cumsum(0).cumsum(1),), [R(4, 6)]),
    "a row in parts": (lambda x, y: (x.cumsum(-1).view(4, 5, 3) * y.transpose(1, 2),), [R(4, 15), R(4, 3, 5)]),
    "backwards": (lambda x: (x.flip(-1).cumsum(-1).flip(-1) + x,), [R(4, 6)]),
    "the last of many": (lambda x: (x / x.cumsum(-1)[:, -1:],), [R(4, 600)]),
    "a part": (lambda x: (x.cumsum(-1)[:, 2:4] * 2, x.cumsum(1)[:, ::2].sum(1)), [R(4, 6)]),
    "a matrix summed": (lambda x: (x.cumsum(-1).sum(),), [R(4, 6)]),
    "exclusive": (lambda x: (x.cumsum(-1) - x, x.cumsum(-1)[:, :-1] * 2), [R(4, 6)]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_what_cannot_be_one_kernel_is_right(name: str) -> None:
    fn, args = SEVERAL[name]
    fused(fn, args)
    compare(fn, *args)


@pytest.mark.parametrize("shape", [(3, 65536), (65536,), (2, 3, 49152), (2, 17000)])
def test_few_long_rows_are_three_kernels(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scans = [
        lambda x: ((x * 2).cumsum(-1).relu(),),
        lambda x: (x.cummax(-1).values,),
        lambda x: (x.sign().cumprod(-1),),
    ]
    for fn in scans:
        f = fused(fn, [x])
        assert [len(k.reduced) for k in kernels(f)] == [1, 1, 1]
        whole = fused(fn, [x], split_reductions=False)
        assert [len(k.reduced) for k in kernels(whole)][:1] == [1]


def test_not_cut() -> None:
    """Enough rows; an unknown length; a prime one; positions, which have no total."""

    def row(*shape: int) -> torch.Tensor:
        return R(shape, dtype=torch.float64)

    assert len(fused(lambda x: (x.cumsum(-1),), [row(300, 16384)]).groups) == 1
    assert len(fused(lambda x: (x.cumsum(-1),), [row(2, 16384)], symbolic=True).groups) == 1
    assert len(fused(lambda x: (x.cumsum(-1),), [row(16411)]).groups) == 1
    assert len(fused(lambda x: (x.cummax(-1).indices,), [R(2, 16384)]).groups) == 1


# -- the statement ----------------------------------------------------------------------------------
def test_written_and_read_back() -> None:
    p = lowered(every_scan(1), [R(3, 4)])
    back = from_data(json.loads(json.dumps(to_data(p))))
    assert str(back.nodes[0]) == str(p.nodes[0]) and "scan sum %0" in str(p.nodes[0])
    x = hostile((3, 4), 0)
    for got, want in zip(interpret(back, [x]), every_scan(1)(x), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


I, J, K = Var("i", expr(2)), Var("j", expr(3)), Var("k", expr(3))
F32 = torch.float32


@pytest.mark.parametrize(
    ("scan", "message"),
    [
        (Scan("median", (0,), F32), "no scan"),
        (Scan("sum", (0, 0), F32), "takes a value"),
        (Scan("argmax", (0,), torch.int64), "takes a value"),
        (Scan("sum", (0,), torch.float64), "is marked"),
    ],
)
def test_broken(scan: Scan, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(_program(scan, Axis(I, "p"), Axis(J, "r")))


def test_one_r_axis() -> None:
    verify(_program(Scan("sum", (0,), F32), Axis(I, "p"), Axis(J, "r")))
    for axes in ((Axis(I, "p"), Axis(J, "p")), (Axis(J, "r"), Axis(K, "r"))):
        with pytest.raises(VerifyError, match="one r axis"):
            verify(_program(Scan("sum", (0,), F32), *axes))


def _program(scan: Scan, *axes: Axis) -> Program:
    at = sum((expr(a.var) * s for a, s in zip(axes, (3, 1))), expr(0))
    x = Buffer("x", F32, torch.device("cpu"), (expr(9),), (expr(1),), "input")
    return Program(("x",), {"x": x}, (LoopNest("op0", axes, (Load("x", at, F32), scan)),), (), {})


def test_every_scan_has_a_rule() -> None:
    found = {s.kind for x in (R(3, 4), torch.ones(3, 4)) for n in lowered(every_scan(1), [x]).nodes for s in n.body
             if isinstance(s, Scan)}  # fmt: skip
    assert found == set(SCANS) - {"sort", "linear"}  # test_sorts; below


# -- gradients of products --------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradient_of_a_product_divides_by_nothing(dtype: torch.dtype, dim: int) -> None:
    """With no zero, one, several; of sizes that are known and not. One scan from the end, and no call."""
    x = torch.rand(5, 6, 7, generator=torch.Generator().manual_seed(dim)) + 0.3
    x[1, 2, ::2], x[3, 4], x[:, 1, 1] = 0, 0, 0
    x = x.to(dtype).requires_grad_()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cumprod(dim) * 0.5

    for dynamic in (False, True):
        compiled = compare(fn, x, backward=True, dynamic=dynamic)
        nodes = [n for n in compiled.stages[-1].fused.program.nodes if isinstance(n, LoopNest)]
        assert [s.kind for n in nodes for s in n.body if isinstance(s, Scan)] == ["linear"] and not compiled.externs


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (4, 1), (1, 4)])
def test_the_gradient_of_a_product_of_none_or_one(shape: tuple[int, ...]) -> None:
    compare(lambda x: x.cumprod(-1) * 2, torch.full(shape, 3.0).requires_grad_(), backward=True)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_the_gradient_of_a_product_in_a_transform(transform: Any) -> None:
    """It is PyTorch's, also under vmap: torch.func asks for rules of its own."""
    one = transform(lambda row: row.cumprod(0).sin().sum())
    compare(lambda x: (torch.vmap(one)(x), one(x[1])), hostile((4, 5), 1, torch.float64).nan_to_num(2, 3, 4))


def test_the_op_in_eager_mode() -> None:
    x = hostile((4, 5, 6), 1, torch.float64).nan_to_num(2, 3, 4).requires_grad_()
    grad = R(x.shape, dtype=x.dtype)
    for dim in (0, 1, -1):
        y = x.cumprod(dim)
        (want,) = torch.autograd.grad(y, x, grad)
        torch.testing.assert_close(torch.ops.reflib.cumprod_backward(grad, x.detach(), y.detach(), dim), want)


def test_whose_formula_a_gradient_has() -> None:
    """PyTorch's: of rows that are few and long, which the scan of a recurrence leaves to few programs; if an option
    asks for it."""

    def linear(fn: Any, *shape: int, **options: Any) -> int:
        e = explain(fn, torch.ones(shape, requires_grad=True), target="sm_90", dynamic=False, **options)
        nodes = [n for n in e.backward.fused.nodes if isinstance(n, LoopNest)]
        return sum(isinstance(s, Scan) and s.kind == "linear" for n in nodes for s in n.body)

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.cumprod(x, dim=-1)

    assert linear(product, 300, 40) == linear(lambda x: x.cumprod(1, dtype=torch.float64), 300, 40) == 1
    assert linear(product, 3, 20000) == linear(product, 300, 40, numerics="eager") == 0


# -- code for a GPU ---------------------------------------------------------------------------------
@needs_triton
@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize("length", [100, 9000])
def test_compiles_ahead_of_time(dtype: torch.dtype, length: int) -> None:
    """In one block and in a loop."""
    e = explain(every_scan(1), torch.ones(300, length).to(dtype), target="sm_90")
    target = parse_target("sm_90")
    assert not [n for n in e.program.nodes if not isinstance(n, LoopNest)]
    for k in e.kernels:
        assert "associative_scan" in k.source and ("for r0" in k.source) == (length > 4096)
        assert compile_kernel(k, target).shared <= target.shared


@needs_triton
def test_very_long_rows_that_cannot_be_cut_are_left_to_aten() -> None:
    def calls(length: int, rows: int = 1) -> int:
        p = explain(lambda x: x.cumsum(-1), torch.ones(rows, length), target="sm_90", dynamic=False).program
        return sum(not isinstance(n, LoopNest) for n in p.nodes)

    assert calls(1 << 17) == 0 and calls(131071, rows=40) == 0 and calls(131071) == 1


def test_on_a_gpu_the_pieces_are_parallel() -> None:
    f = fused(lambda x: (x.cumsum(-1),), [R(3, 65536, dtype=torch.float64)], GPU)
    assert all(k.numel.constant >= 3 * 16 for k in (kernels(f)[0], kernels(f)[2]))


def test_rows_of_no_element() -> None:
    shape = random.Random(6).randint(2, 9), 0
    fused(lambda x: (x.flip(-1).cumsum(-1).flip(-1), x.cumsum(-1).sum(-1)), [torch.empty(shape)], GPU)
