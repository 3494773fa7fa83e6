"""Matrix products as choices: every alternative, put in the choice's place and interpreted, is the eager product."""

import itertools
import math

import pytest
import torch

import reflib
from reflib.ir.data import from_data, to_data
from reflib.ir.interpret import interpret
from reflib.ir.loops import Acc, Load, LoopNest, Op
from reflib.ir.program import Choice, Extern, Program, Template
from reflib.ir.verify import verify
from reflib.lower.matmul import float32_precision
from reflib.options import Options
from tests.choices import GPU, choices, program_of, with_variant


def check(fn, *args, options: Options = GPU, mode: str = "fake", others=None) -> Program:
    """Every combination of alternatives gives eager's values exactly (make inputs small integers), and its strides.
    ``others``: arguments of other sizes to run the same program on."""
    program = program_of(fn, *args, options=options, mode=mode)
    assert choices(program)
    verify(from_data(to_data(program), program.constants))
    for picked in itertools.product(*[c.variants for c in choices(program)]):
        one = with_variant(program, lambda _, left=iter(picked): next(left))  # type: ignore[misc]
        verify(one)
        for given in (args, *(others or ())):
            expected = torch.utils._pytree.tree_leaves(fn(*given))
            for e, r in zip(expected, interpret(one, list(given)), strict=True):
                assert (e.shape, e.dtype) == (r.shape, r.dtype)
                assert e.stride() == r.stride() or e.numel() < 2
                torch.testing.assert_close(r, e, rtol=0, atol=0, equal_nan=True)
    return program


def ints(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """Integers from -3 to 3, so that no order of summation rounds."""
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-3, 4, shape, generator=g).to(dtype)


def only_template(program: Program) -> Template:
    (choice,) = choices(program)
    (alternative,) = [a for a in choice.variants if a.name == "triton"]
    (node,) = alternative.nodes
    assert isinstance(node, Template)
    return node


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mm(dtype):
    t = only_template(check(torch.mm, ints(5, 7, dtype=dtype), ints(7, 6, dtype=dtype)))
    assert t.dtype == dtype and t.tiling is None
    rounds = [s.op for s in t.epilogue.body if isinstance(s, Op)]
    assert rounds == {torch.float16: ["to_f16"], torch.bfloat16: ["to_bf16"], torch.float32: []}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_bmm(dtype, batch):
    t = only_template(check(torch.bmm, ints(batch, 5, 7, dtype=dtype), ints(batch, 7, 6, dtype=dtype)))
    assert len(t.epilogue.axes) == (2 if batch == 1 else 3)


BIASES = {
    "row": lambda d: ints(6, dtype=d),
    "matrix": lambda d: ints(5, 6, dtype=d),
    "one row": lambda d: ints(1, 6, dtype=d),
    "column": lambda d: ints(5, 1, dtype=d),
    "scalar": lambda d: ints(1, dtype=d)[0],
    "transposed": lambda d: ints(6, 5, dtype=d).t(),
    "expanded": lambda d: ints(6, dtype=d).expand(5, 6),
}


@pytest.mark.each
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", BIASES)
def test_addmm(dtype, bias):
    args = BIASES[bias](dtype), ints(5, 7, dtype=dtype), ints(7, 6, dtype=dtype)
    check(torch.addmm, *args)
    check(lambda c, a, b: torch.addmm(c, a, b, alpha=0.5, beta=2), *args)


@pytest.mark.parametrize("bias", [(5, 6), (6,), (3, 5, 6), (3, 1, 6), (1,)])
def test_baddbmm(bias):
    args = ints(*bias), ints(3, 5, 7), ints(3, 7, 6)
    check(torch.baddbmm, *args)
    check(lambda c, a, b: torch.baddbmm(c, a, b, alpha=-2, beta=0.5), *args)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_baddbmm_is_one_kernel_with_what_follows(wrapper, arch):
    args = [torch.zeros(s, dtype=torch.bfloat16) for s in ((4, 1, 96), (4, 64, 128), (4, 128, 96))]
    e = reflib.explain(lambda c, a, b: torch.tanh(torch.baddbmm(c, a, b, beta=0.5, alpha=2)) + 1, *args, target=arch,
                       wrapper=wrapper, verify=True)  # fmt: skip
    assert len(e.kernels) == 1 and str(e.decisions[0].winner).startswith("triton")


def test_beta_zero_does_not_look_at_the_bias():
    a, b = ints(5, 7), ints(7, 6)
    nan = torch.full((6,), math.nan, dtype=torch.float16)
    t = only_template(check(lambda c, a, b: torch.addmm(c, a, b, beta=0), nan, a, b))
    assert not any(isinstance(s, Load) for s in t.epilogue.body)
    check(lambda c, a, b: torch.baddbmm(c, a[None], b[None], beta=0, alpha=3), nan, a, b)


def test_the_bias_is_added_before_rounding():
    """1024.5 is no half: rounded first, 1 + 1024.5 would lose the 0.5 twice."""
    a, b = torch.tensor([[32.0, 0.5]]).half(), torch.tensor([[32.0], [1.0]]).half()
    args = torch.tensor([0.5]).half(), a, b
    kernel = with_variant(program_of(torch.addmm, *args), lambda c: next(a for a in c.variants if a.name == "triton"))
    (result,) = interpret(kernel, args)
    assert result.item() == 1025


LAYOUTS = {
    "transposed": lambda m, n: ints(n, m).t(),
    "strided": lambda m, n: ints(2 * m, 3 * n)[::2, ::3],
    "offset": lambda m, n: ints(m + 2, n + 3)[2:, 3:],
    "row expanded": lambda m, n: ints(1, n).expand(m, n),
    "column expanded": lambda m, n: ints(m, 1).expand(m, n),
    "one number": lambda m, n: ints(1, 1).expand(m, n),
}


@pytest.mark.each
@pytest.mark.parametrize("a", LAYOUTS)
@pytest.mark.parametrize("b", LAYOUTS)
def test_operands_of_any_strides(a, b):
    t = only_template(check(torch.mm, LAYOUTS[a](5, 7), LAYOUTS[b](7, 6)))
    assert t.a.shape[0] == 1 and len(t.a.strides) == 3


def test_batches_of_any_strides():
    check(torch.bmm, ints(5, 3, 7).transpose(0, 1), ints(3, 6, 7).transpose(1, 2))
    check(torch.bmm, ints(5, 7).expand(3, 5, 7), ints(3, 7, 6)[:1].expand(3, 7, 6))


def test_views_in_the_graph():
    check(lambda a, b: a.t() @ b[1:].reshape(7, 6), ints(7, 5), ints(8, 6)[:, :6])
    check(lambda a, b: (a @ b).relu() + 1, ints(5, 7), ints(7, 6))


@pytest.mark.parametrize("m, n, k", [(1, 6, 7), (5, 1, 7), (5, 6, 1), (1, 1, 1), (1, 1, 64)])
def test_sizes_of_one(m, n, k):
    if k > 1:
        check(torch.mm, ints(m, k), ints(k, n))
        check(torch.bmm, ints(2, m, k), ints(2, k, n))
    check(torch.addmm, ints(n), ints(m, k), ints(k, n))


def followed(fn):
    return lambda a, b: fn(a, b).transpose(-1, -2) + 1


@pytest.mark.parametrize("options", [GPU, Options()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_an_outer_product_is_fused(dtype, options):
    """As the rotary angles are: frequencies times positions."""
    args = ints(2, 5, 1, dtype=dtype), ints(2, 1, 6, dtype=dtype)
    a, b = args
    for fn, given in ((torch.bmm, args), (torch.mm, (a[0], b[0])), (torch.bmm, (a, b[:, :, :0]))):
        program = program_of(followed(fn), *given, options=options)
        assert all(isinstance(node, LoopNest) for node in program.nodes)
        torch.testing.assert_close(interpret(program, list(given))[0], followed(fn)(*given), rtol=0, atol=0)


@pytest.mark.parametrize("m, n, k", [(0, 6, 7), (5, 0, 7), (5, 6, 0), (0, 0, 0)])
def test_nothing_to_multiply_is_a_call(m, n, k):
    args = ints(n), ints(m, k), ints(k, n)
    for fn in (lambda c, a, b: a @ b, torch.addmm, lambda c, a, b: torch.addmm(c, a, b, beta=2)):
        program = program_of(fn, *args)
        (node,) = program.nodes
        assert isinstance(node, Extern) and node.reason == "library call"
        torch.testing.assert_close(interpret(program, list(args))[0], fn(*args))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_other_dtypes_are_calls(dtype):
    program = program_of(torch.mm, ints(5, 7, dtype=dtype), ints(7, 6, dtype=dtype))
    assert isinstance(program.nodes[0], Extern)


def test_on_a_cpu_nothing_changes_unless_something_is_measured():
    program = program_of(torch.addmm, ints(6), ints(5, 7), ints(7, 6), options=Options())
    (node,) = program.nodes
    assert isinstance(node, Extern) and node.out is not None and node.reason == "library call"


@pytest.mark.parametrize("fn", [torch.mm, lambda a, b: torch.addmm(a[0, :1], a, b)])
def test_on_a_cpu_there_is_no_template(fn):
    program = program_of(fn, ints(8, 4096), ints(4096, 8), options=Options(autotune="blocking"))
    (choice,) = choices(program)
    assert choice.variants[0].name == "aten" and all("decompose_k" in a.name for a in choice.variants[1:])
    check(fn, ints(8, 4096), ints(4096, 8), options=Options(autotune="blocking"))


def test_measured_choices_on_a_gpu_hold_all_alternatives():
    options = Options(target="sm_90", autotune="blocking")
    for fn in (torch.mm, lambda a, b: torch.addmm(a[:, :1], a, b, alpha=0.5, beta=2)):
        program = check(fn, ints(8, 4096), ints(4096, 8), options=options)
        names = [a.name for a in choices(program)[0].variants]
        assert names[:2] == ["aten", "triton"] and any("decompose_k" in name for name in names[2:])


def test_the_default_is_the_call_as_it_would_be_without_a_choice():
    args = ints(6), ints(5, 7), ints(7, 6)
    (choice,) = program_of(torch.addmm, *args).nodes
    (plain,) = program_of(torch.addmm, *args, options=Options()).nodes
    assert isinstance(choice, Choice) and choice.variants[0].nodes == (plain,)
    assert (choice.op, choice.custom, choice.outputs) == ("aten.addmm", False, ("addmm",))


def test_symbolic_sizes():
    other = ints(9, 11), ints(11, 3)
    program = check(torch.mm, ints(5, 7), ints(7, 6), mode="symbolic", others=[other])
    assert only_template(program).a.shape[1].constant is None
    check(
        lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=0.5),
        *(ints(6), ints(3, 5, 7), ints(3, 7, 6)),
        mode="symbolic",
        others=[(ints(3), ints(2, 9, 11), ints(2, 11, 3))],
    )


def test_a_scalar_that_is_a_size():
    def f(a, b):
        return torch.addmm(a[:, :1], a, b, alpha=a.shape[0], beta=b.shape[1])

    check(f, ints(4, 8), ints(8, 2), mode="symbolic")


def test_a_scalar_that_is_a_float_known_at_run_time_leaves_atens_call():
    program = program_of(
        lambda c, a, b: torch.addmm(c, a, b, alpha=1 / a.shape[0]), ints(6), ints(5, 7), ints(7, 6), mode="symbolic"
    )
    assert not any(a.name == "triton" for c in choices(program) for a in c.variants)


def test_a_template_reads_buffers_as_what_they_are():
    program = program_of(lambda a, b: a.view(torch.float16) @ b, torch.ones(5, 7, dtype=torch.int16), ints(7, 6))
    t = only_template(program)
    assert all(program.buffers[v.buffer].dtype == v.dtype for v in (t.a, t.b))


def test_float32_is_tf32_only_when_torch_says_so():
    a, b = ints(5, 7, dtype=torch.float32), ints(7, 6, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        for word, precision in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(word)
            assert float32_precision() == precision
            assert only_template(program_of(torch.mm, a, b)).precision == precision
        assert only_template(program_of(torch.mm, a.half(), b.half())).precision == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_product_is_taken_once():
    t = only_template(program_of(torch.addmm, ints(6), ints(5, 7), ints(7, 6)))
    assert [type(s) for s in t.epilogue.body].count(Acc) == 1


def test_unused_products_and_the_sizes_they_need():
    program = program_of(lambda a, b: (a @ b, a + 1)[1], ints(5, 7), ints(7, 6))
    assert not choices(program)
