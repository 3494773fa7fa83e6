"""Every operation and every reduction, in C++, on hostile values of every dtype."""

import pytest
import torch
from cpp_running import Case, build, one
from hand_loops import FLOATS, eager_traps, every_op, hostile, op_loops, operands, reduce_loops, short

from reflib.generate import cpp_text
from reflib.ir.ops import OPS, REDUCTIONS, VALUE_DTYPES

# More units in the last place than the default 2: by libm's or torch's own error, or by cancellation near a zero.
ULPS = {
    "pow": 4, "lgamma": 64, "tan": 4, "sinh": 3, "erfc": 16, "fma": 4, "asinh": 4, "acosh": 4, "atanh": 4, "log1p": 3,
}  # fmt: skip


def values_of(dtype: torch.dtype) -> torch.Tensor:
    return hostile(dtype, lambda f: [103.9, 708, 720, 9, 1e10, f.tiny / 8, 4.0, 0.25], ordinary=64)


def op_case(name: str, dtype: torch.dtype, to: torch.dtype | None = None) -> Case:
    return one(*op_loops(name, operands(name, values_of(dtype), points=4001), to))


OP_CASES = every_op()


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
        want = args[0].to(to)
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
        if kind[:3] != "arg" and kind != "m2":  # those are made of the others
            dtype = torch.bool if kind in ("any", "all") else torch.float32
            assert cpp_text.start(kind, dtype) and cpp_text.combine(kind, "acc", "v")


# -- reductions -------------------------------------------------------------------------------------
def reduce_case(kind: str, dtype: torch.dtype, across: bool) -> Case:
    return one(*reduce_loops(kind, values_of(dtype), across))


def reduction_dtypes(kind: str) -> tuple[torch.dtype, ...]:
    if kind in ("any", "all"):
        return (torch.bool,)
    numbers = FLOATS if kind == "m2" else (torch.int32, torch.int64, *FLOATS)
    return numbers if kind in ("sum", "prod", "m2") else VALUE_DTYPES


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
    got, want = c.run(library)["out"], c.expected()["out"]
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5 if got.dtype == torch.float32 else 1e-12, atol=1e-5)
    if not got.dtype.is_floating_point:
        assert torch.equal(got, want)
