"""Every operation and every reduction, in C++, on hostile values of every dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
from cpp_running import Case, build
from hand_loops import FLOATS, TAKES, eager_traps, op_loops, operands, reduce_loops, short

from reflib.generate import cpp_text
from reflib.ir.ops import OPS, REDUCTIONS, VALUE_DTYPES, cast

# More units in the last place than the default 2: by libm's or torch's own error, or by cancellation near a zero.
ULPS = {
    "pow": 4,
    "lgamma": 64,
    "tan": 4,
    "sinh": 3,
    "erfc": 16,
    "fma": 4,
    "asinh": 4,
    "acosh": 4,
    "atanh": 4,
    "log1p": 3,
}


def hostile(dtype: torch.dtype) -> torch.Tensor:
    """Values at which things go wrong, and ordinary ones."""
    g = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.tensor([True, False, True, True])
    if not dtype.is_floating_point:
        i = torch.iinfo(dtype)
        edge = [0, 1, 2, 3, 7, 8, 31, 63, 64, 100, i.max, i.max - 1, i.min, i.min + 1]
        edge += [] if dtype == torch.uint8 else [-1, -2, -3, -7, -64, -100]
        return torch.tensor([e for e in edge if i.min <= e <= i.max], dtype=dtype)
    f = torch.finfo(dtype)
    edge = [
        0.0,
        1,
        0.5,
        1.5,
        2.5,
        3,
        1e-3,
        88.5,
        89,
        103.9,
        708,
        720,
        20,
        9,
        1e5,
        1e10,
        f.max,
        f.tiny,
        f.tiny / 8,
        f.eps,
    ]
    edge += [float("inf"), 0.9999999, 4.0, 10.0, 0.25, 1e-20, 33.3]
    values = torch.tensor([*edge, *(-e for e in edge), float("nan")], dtype=dtype)
    return torch.cat(
        [values, torch.randn(64, generator=g, dtype=dtype), 10 * torch.randn(64, generator=g, dtype=dtype)]
    )


def op_case(name: str, dtype: torch.dtype, to: torch.dtype | None = None) -> Case:
    return Case(*op_loops(name, operands(name, hostile(dtype), points=4001), to))


def all_ops() -> dict[str, tuple[str, torch.dtype, torch.dtype | None]]:
    cases = {}
    for name, spec in OPS.items():
        if name == "cast":
            for a, b in itertools.permutations(VALUE_DTYPES, 2):
                cases[f"cast_{short(a)}_{short(b)}"] = (name, a, b)
        else:
            for dtype in TAKES[spec.kind]:
                cases[f"{name}_{short(dtype)}"] = (name, dtype, None)
    return cases


OP_CASES = all_ops()


@pytest.fixture(scope="module")
def ops():
    cases = {f"op_{n}": op_case(*c) for n, c in OP_CASES.items()}
    return cases, build(cases)


@pytest.mark.parametrize("case", OP_CASES)
def test_op(case, ops):
    cases, library = ops
    name, dtype, to = OP_CASES[case]
    c = cases[f"op_{case}"]
    args = [c.tensors[f"x{k}"] for k in range(OPS[name].arity)]
    got = c.run(library)["out"]
    fine = ~eager_traps(name, args)
    args, got = [a[fine] for a in args], got[fine]
    if dtype.is_floating_point and name in ("remainder", "fmod"):
        fine = ~((args[0] / args[1]).isinf() & (args[1] != 0))  # eager gives NaN where the quotient overflows
        args, got = [a[fine] for a in args], got[fine]
    if name == "cast":
        want = cast(args[0], to)
        if dtype.is_floating_point and not to.is_floating_point and to != torch.bool:
            i = torch.iinfo(to)
            fine = (args[0] > i.min) & (args[0] < i.max)  # outside, C++ and torch leave it open
            got, want = got[fine], want[fine]
    else:
        want = OPS[name].meaning(*args)
    check(name, got, want, args)


def check(name: str, got: torch.Tensor, want: torch.Tensor, args: list[torch.Tensor]) -> None:
    if not got.dtype.is_floating_point:
        bad = got != want
    else:
        exact = want
        if name not in ("cast", "nextafter", "to_f16", "to_bf16"):
            exact = OPS[name].meaning(*[a if a.dtype == torch.bool else a.double() for a in args])
        same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= torch.finfo(got.dtype).tiny)
        ulp = torch.finfo(got.dtype).eps * want.abs()
        near = (got.double() - exact.double()).abs() <= ULPS.get(name, 2) * ulp + 2 * (
            want.double() - exact.double()
        ).abs()
        bad = ~(same | near)
    where = bad.nonzero().flatten()[:5].tolist()
    shown = [([a[i].item() for a in args], got[i].item(), want[i].item()) for i in where]
    assert not where, f"{name}: {int(bad.sum())} of {bad.numel()} wrong; (operands, got, want): {shown}"


def test_every_reduction_is_known():
    for kind in REDUCTIONS:
        if kind[:3] != "arg":  # those are made of the others
            dtype = torch.bool if kind in ("any", "all") else torch.float32
            assert cpp_text.identity(kind, dtype) and cpp_text.combine(kind, "acc", "v")


# -- reductions -------------------------------------------------------------------------------------
def reduce_case(kind: str, dtype: torch.dtype, across: bool) -> Case:
    return Case(*reduce_loops(kind, hostile(dtype), across))


def reduction_dtypes(kind: str) -> tuple[torch.dtype, ...]:
    if kind in ("any", "all"):
        return (torch.bool,)
    return (torch.int32, torch.int64, *FLOATS) if kind in ("sum", "prod") else VALUE_DTYPES


REDUCE_CASES = {
    f"{kind}_{short(dtype)}_{'across' if across else 'along'}": (kind, dtype, across)
    for kind in REDUCTIONS
    for dtype in reduction_dtypes(kind)
    for across in (False, True)
}


@pytest.fixture(scope="module")
def reductions():
    cases = {f"reduce_{n}": reduce_case(*c) for n, c in REDUCE_CASES.items()}
    return cases, build(cases)


@pytest.mark.parametrize("case", REDUCE_CASES)
def test_reduction(case, reductions):
    cases, library = reductions
    c = cases[f"reduce_{case}"]
    got, want = c.run(library)["out"], c.interpreted()["out"]
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5 if got.dtype == torch.float32 else 1e-12, atol=1e-5)
    if not got.dtype.is_floating_point:
        assert torch.equal(got, want)
