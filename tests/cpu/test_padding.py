"""Products of padded operands: eager's values and strides, aligned operands, and only where it pays."""

import functools
import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib.ir.interpret import interpret
from reflib.ir.program import Choice, Extern, Program, Template
from reflib.lower import matmul, padding, strips
from reflib.lower.context import LoweringContext
from tests.choices import GPU, choices, program_of, with_variant
from tests.semantics import Compiled

OPS = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "baddbmm": torch.baddbmm}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "BALANCE", 0)
    monkeypatch.setattr(padding, "LAUNCHES", -1)


def products(program: Program) -> list[Extern]:
    """By themselves, or the first of a choice."""
    first = (n.variants[0].nodes[0] if isinstance(n, Choice) else n for n in program.nodes)
    return [n for n in first if isinstance(n, Extern) and "mm" in str(n.target)]


def is_padded(program: Program) -> bool:
    return any("padded" in n.reason for n in products(program))


def check(fn, args, **options) -> Program:
    program = program_of(fn, *args, options=GPU.but(**options))
    for got, want in zip(interpret(program, list(args)), torch.utils._pytree.tree_leaves(fn(*args)), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return program


def matrix(rng: random.Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, whose sums are exact: by rows, by columns, or part of something larger."""
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    kind = rng.choice(["rows", "columns", "slice", "columns of a slice"])
    *batch, m, n = shape
    if "columns" in kind:
        m, n = n, m
    extra = rng.randrange(5) if "slice" in kind else 0
    x = torch.randint(-3, 4, (*batch, m, n + extra), generator=g).to(dtype)[..., extra // 2 : extra // 2 + n]
    return x.transpose(-1, -2) if "columns" in kind else x


def assert_aligned(program: Program) -> None:
    for p in products(program):
        out = program.buffers[p.outputs[0]]
        *_, a, b = p.args
        for v in (a, b, out):
            step = 16 // v.dtype.itemsize
            turned = v.strides[-2] == 1 and v.strides[-1] != 1
            inner, outer = (-2, -1) if turned else (-1, -2)
            assert v.shape[inner].constant % step == 0
            assert v.strides[outer].constant % step == 0 or v.shape[outer] == 1


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_strides_and_alignment(op: str, dtype: torch.dtype) -> None:
    rng = random.Random(f"{op} {dtype}")
    padded = 0
    for _ in range(6):
        batch = [rng.randint(1, 3)] if "bmm" in op else []
        m, n, k = (rng.randint(2, 40) for _ in range(3))
        args = [matrix(rng, *batch, m, k, dtype=dtype), matrix(rng, *batch, k, n, dtype=dtype)]
        scale = {}
        if "add" in op:
            shape = rng.choice([(n,), (1, n), (m, 1), (m, n), (1,), (*batch, m, n)])
            args.insert(0, torch.randint(-3, 4, shape).to(dtype))
            scale = rng.choice([{}, {"alpha": 2}, {"beta": 3}, {"alpha": 0.5, "beta": 2}])
        program = check(lambda *a, f=OPS[op], s=scale: f(*a, **s), args)
        if is_padded(program):
            padded += 1
            assert_aligned(program)
        else:
            assert n % 8 == 0
    assert padded


@pytest.mark.usefixtures("always")
def test_what_surrounds_a_padded_product() -> None:
    """Made by a kernel, read by a kernel, flattened, returned, and a NaN where there is one in eager."""
    rng = random.Random(5)
    for _ in range(4):
        m, n, k = (rng.randrange(3, 40, 2) for _ in range(3))
        a, b = matrix(rng, m, k, dtype=torch.float16), matrix(rng, k, n, dtype=torch.float16)
        a[rng.randrange(m), rng.randrange(k)] = math.nan

        def fn(a, b):
            y = (a * 2) @ b.relu()
            return y, y.flatten(), y.t() + 1, (y * 0.5).sum(1)

        assert is_padded(check(fn, [a, b]))


@pytest.mark.usefixtures("always")
def test_an_operand_of_two_products_is_copied_once() -> None:
    """A linear layer's gradients read the same dY, one of them transposed; dW's first rows are the result."""

    def gradients(dy, w, x):
        dy = dy * 2
        return dy @ w, dy.t() @ x

    args = [torch.randint(-3, 4, s).half() for s in ((24, 15), (15, 32), (24, 40))]
    program = check(gradients, args)
    dx, dw = products(program)
    assert dx.args[0].buffer == dw.args[0].buffer
    assert program.outputs[1].buffer == dw.outputs[0]
    assert program.buffers[dw.outputs[0]].shape == (16, 40)


@pytest.fixture
def strips_of_eight(always: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("LEAST", 0), ("TILE", 8)):
        monkeypatch.setattr(strips, name, value)
    monkeypatch.setattr(padding, "LONG", 0)
    library = torch.library.Library("aten", "IMPL")  # (PyTorch has this one for CUDA only)
    library.impl("addmm.dtype_out", lambda c, a, b, dtype, *, out: out.copy_(c + a.to(dtype) @ b.to(dtype)), "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("strips_of_eight")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_with_misaligned_rows_is_copied_in_strips_for_both_products(dtype: torch.dtype) -> None:
    """Widths that strips divide or not, rows that are and are none of a multiple; a part of something larger."""
    rng = random.Random(7)
    for wide in (9, 31, 33, 65, rng.randrange(67, 99, 2), rng.randrange(66, 98, 8)):
        tokens, inner, extra = 8 * rng.randint(1, 4), 8 * rng.randint(1, 4), rng.choice([0, 3])
        sizes = ((tokens, wide + extra), (wide, inner), (tokens, inner))
        dy, w, x = (torch.randint(-1, 2, s).to(dtype) for s in sizes)
        program = check(lambda dy, w, x: (dy @ w, dy.t() @ x), [dy[:, extra:], w, x])
        made = [b for b in program.buffers if "strip" in b]
        each = program.buffers[made[0]].shape[1].hint()
        empty = (len(made) - 1) * each == wide - wide % 8  # the last one: it is of the rest alone
        assert 1 <= len(made) <= strips.STRIPS[1] and len(products(program)) == 2 * len(made) - empty
        assert not any("operand" in b for b in program.buffers)


@pytest.mark.usefixtures("strips_of_eight")
def test_what_is_summed_over_strips_is_rounded_once() -> None:
    torch.manual_seed(5)
    dy, w = torch.randn(64, 257).bfloat16(), torch.randn(257, 32).bfloat16()
    program = program_of(torch.mm, dy, w, options=GPU)
    assert sum("strip" in b for b in program.buffers) > 1
    got, exact = interpret(program, [dy, w])[0], dy.double() @ w.double()
    assert got.dtype == torch.bfloat16
    assert (got - exact).norm() < 1.01 * ((dy.float() @ w.float()).bfloat16() - exact).norm()


@pytest.mark.usefixtures("strips_of_eight")
def test_sums_of_strips_that_half_precision_does_not_hold() -> None:
    signs = torch.tensor([1, -1]).repeat_interleave(128)[:-1].half()
    dy, w = 100 * signs.expand(64, 255), torch.full((255, 32), 100.0).half()
    program = check(torch.mm, [dy.contiguous(), w])  # up to 1,280,000, and then 10,000
    assert sum("strip" in b for b in program.buffers) > 1


@pytest.mark.parametrize("bias", [False, True])
def test_a_step_holds_one_strip_at_a_time(bias: bool) -> None:
    """Though each copy reads a part of the gradient, long after another did."""
    rng = random.Random(3)
    tokens, inner, wide = 1024 * rng.randint(1, 3), 256 * rng.randint(1, 3), rng.randrange(33001, 45000, 2)
    head = torch.nn.Linear(inner, wide, bias).bfloat16()
    x = torch.empty(tokens, inner, dtype=torch.bfloat16, requires_grad=True)
    memory = reflib.explain(head, x, target="sm_90", dynamic=False).backward.memory
    gradients = 2 * (wide * (inner + 1) + tokens * inner)
    sums = 4 * tokens * inner  # in float32
    assert memory.peak_bytes < 2 * tokens * wide * (1 + 1.1 / strips.STRIPS[0]) + 1.01 * gradients + sums


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_rows_after_the_last_multiple_are_added(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second operand, all right but for their number, is read where it is."""
    monkeypatch.setattr(padding, "LONG", 0)
    rng = random.Random(op)
    for _ in range(5):
        batch = [rng.randint(1, 3)] if op == "bmm" else []
        m, n, k = rng.randint(1, 40), rng.randrange(8, 40, 8), rng.choice([9, 23, 30, 15])
        a, b = (torch.randint(-3, 4, (*batch, *s)).bfloat16() for s in ((m, k), (k, n)))
        (product,) = products(program := check(OPS[op], [a, b]))
        assert product.args[2].buffer == program.inputs[1] and product.args[2].shape[-2] == k // 8 * 8


@pytest.mark.usefixtures("always")
def test_a_copy_fuses_with_what_makes_the_operand() -> None:
    x, w = torch.ones(24, 18, dtype=torch.bfloat16), torch.ones(18, 24, dtype=torch.bfloat16)
    e = reflib.explain(lambda x, w: torch.softmax(x, -1) @ w, x, w, target="sm_90")
    assert is_padded(e.program)
    made = next(p for p in products(e.program)).args[0].buffer
    kernels = [k.source for k in e.kernels if "tl.exp" in k.source]
    assert kernels and all(f"{made}_ptr" in source for source in kernels)


# m, n, k, target, what becomes of its logarithms of sums, and of the product itself if that is returned?
SIZES = {
    "bert's vocabulary": (2048, 30522, 768, "sm_90", "padded", "in place"),
    "whisper's": (512, 51865, 384, "sm_90", "padded", "in place"),
    "an older GPU": (512, 51865, 384, "sm_80", "padded", "padded"),
    "little shared memory": (512, 51865, 384, "sm_120", "padded", "padded"),
    "a long odd K": (2048, 768, 30522, "sm_90", "padded", "padded"),
    "an odd K too": (2048, 30522, 777, "sm_90", "padded", "padded"),
    "aligned": (2048, 30528, 768, "sm_90", "", ""),
    "one token": (1, 30522, 768, "sm_90", "", ""),
    "few operations per byte": (65536, 30, 30, "sm_90", "", ""),
    "small": (256, 257, 256, "sm_90", "", ""),
    "another maker's GPU": (2048, 30522, 768, "gfx942", "", ""),
    "a CPU": (2048, 30522, 768, "cpu", "", ""),
}


def how(program: Program) -> str:
    chosen = any(isinstance(n, Template) and n.tiling is not None for n in program.nodes)
    return "in place" if chosen else "padded" if is_padded(program) else ""


@pytest.mark.parametrize("name", SIZES)
def test_when(name: str) -> None:
    m, n, k, target, summed, returned = SIZES[name]
    options = GPU.but(target=target)
    with torch._subclasses.FakeTensorMode():
        x, w, b = (torch.empty(s, dtype=torch.bfloat16) for s in ((m, k), (n, k), (n,)))
        sums = program_of(lambda *args: F.linear(*args).logsumexp(1), x, w, b, mode="real", options=options)
        assert how(sums) == summed
        x = x.unflatten(0, (-1, 1))
        for fn in (F.linear, lambda *args: F.linear(*args).float() * 0.5):
            assert how(program_of(fn, x, w, b, mode="real", options=options)) == returned


def test_who_returns_it_is_asked_once_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has two users, so there are 2^12 ways through the graph."""
    graph, asked, is_pointwise = torch.fx.Graph(), list[object](), padding._is_pointwise
    monkeypatch.setattr(padding, "_is_pointwise", lambda target: asked.append(target) or is_pointwise(target))
    x = first = graph.placeholder("x")
    for _ in range(12):
        gate = graph.call_function(torch.ops.aten.sigmoid.default, (x,))
        x = graph.call_function(torch.ops.aten.mul.Tensor, (x, gate))
    graph.output(graph.call_function(torch.ops.aten.sum.default, (x,)))
    assert not padding._is_returned(first) and len(asked) <= len(graph.nodes)
    graph.output(x)
    assert padding._is_returned(first)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("op", ["mm", "addmm"])
def test_rows_that_are_none_are_written_in_place(op: str) -> None:
    """The values and strides of eager; memory for one result, and for what describes the operands to TMA."""
    rng = random.Random(op)
    for _ in range(3):
        m, n, k = 8 * rng.randint(16, 20), 2 * rng.randint(130, 300) + 1, 8 * rng.randint(2, 6)
        a, b = (torch.randint(-3, 4, s).bfloat16() for s in ((m, k), (n, k)))
        a = rng.choice([a, a.t().contiguous().t()])  # by rows or by columns
        args, scale = [a, b.t()], {}
        if op == "addmm":
            args.insert(0, torch.randint(-3, 4, rng.choice([(n,), (m, n), (m, 1)])).bfloat16())
            scale = {"alpha": rng.choice([1, 2]), "beta": rng.choice([0, 1, 3])}
        program = check(functools.partial(OPS[op], **scale), args)
        assert how(program) == "in place"
        e = reflib.explain(lambda *args, scale=scale: OPS[op](*args, **scale), *args, target="sm_90")
        (kernel,) = e.kernels
        assert "make_tensor_descriptor" in kernel.source and not e.stages.scheduled.buffers.keys() & {"padded"}
        assert e.memory.peak_bytes <= 2 * m * n + 256 * 132


def test_what_a_kernel_makes_is_padded_for_nothing() -> None:
    """The copy of an operand that is there counts, one that a kernel stores with padding does not."""
    with torch._subclasses.FakeTensorMode():
        x, w = (torch.empty(s, dtype=torch.bfloat16) for s in ((32768, 415), (415, 64)))
        assert not is_padded(program_of(torch.mm, x, w, mode="real"))
        assert is_padded(program_of(lambda x, w: torch.cat((x[:, :64], x[:, 64:] * 2), 1) @ w, x, w, mode="real"))


@pytest.mark.parametrize(("tf32", "pays"), [(False, False), (True, True)])
def test_float32(tf32: bool, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary arithmetic needs no alignment; tf32's is four elements."""
    monkeypatch.setattr(matmul, "float32_precision", lambda: "tf32" if tf32 else "ieee")
    with torch._subclasses.FakeTensorMode():
        assert is_padded(program_of(torch.mm, torch.empty(4096, 4098), torch.empty(4098, 4096), mode="real")) == pays
        assert not is_padded(program_of(torch.mm, torch.empty(4096, 4100), torch.empty(4100, 4096), mode="real"))


@pytest.mark.usefixtures("always")
def test_symbolic_sizes_are_left_alone() -> None:
    a, b = torch.ones(9, 7).half(), torch.ones(7, 5).half()
    assert not is_padded(program_of(torch.mm, a, b, mode="symbolic"))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("op", OPS)
def test_as_a_candidate(op: str) -> None:
    """Where products are measured, eager's call stays the default."""
    batch = (2,) if "bmm" in op else ()
    args = [torch.randint(-3, 4, s).half() for s in ((*batch, 9, 7), (*batch, 7, 5))]
    args = [torch.randint(-3, 4, (5,)).half(), *args] if "add" in op else args
    program = program_of(OPS[op], *args, options=GPU.but(autotune="blocking"))
    (choice,) = choices(program)
    assert choice.variants[0].name == "aten"
    (padded,) = [v for v in choice.variants if v.name.startswith("padded")]
    one = with_variant(program, lambda _: padded)
    assert_aligned(one)
    (got,) = interpret(one, args)
    torch.testing.assert_close(got, OPS[op](*args), rtol=0, atol=0)


@pytest.fixture
def as_on_a_gpu(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoweringContext, "on_gpu", property(lambda cx: True))
    monkeypatch.setattr(padding, "_on_cuda", lambda cx: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_run_and_differentiated(wrapper: str) -> None:
    """A head with an odd vocabulary, forward and backward, through both wrappers."""
    rng = random.Random(wrapper)
    v, d, t = (rng.randrange(11, 60, 2) for _ in range(3))
    head = torch.nn.Linear(d, v).bfloat16()
    x = torch.randn(t, d).bfloat16().requires_grad_()
    compiled = Compiled(head, wrapper=wrapper)
    grad = torch.randn(t, v).bfloat16()
    results = []
    for fn in (head, compiled):
        y = fn(x)
        results.append([y, *torch.autograd.grad(y, [x, head.weight, head.bias], grad)])
    assert [is_padded(s.program) for s in compiled.stages] == [True, True]
    for want, got in itertools.pairwise(results):
        for a, b in zip(want, got, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("seed", range(4))
def test_narrow_operands_fill_a_part_of_a_tile(seed: int) -> None:
    """A few columns or rows of very many: whole tiles are computed, so padding pays though the operations are few; of
    fewer it does not. No tile of our own kernel is mostly empty."""
    rng = random.Random(seed)
    few, rows, width = rng.choice([3, 5, 7]), rng.randint(150_000, 400_000) | 1, 8 * rng.randint(20, 40)
    for shapes in (((rows, width), (width, few)), ((few, rows), (rows, width)), ((rows, few), (few, width))):
        for scale, pays in ((1, True), (40, False)):
            a, b = (
                torch.empty([max(7, n // scale) if n == rows else n for n in s], dtype=torch.bfloat16) for s in shapes
            )
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                program = program_of(lambda a, b: a @ b, a, b, options=GPU)
            assert is_padded(program) == pays, (a.shape, b.shape)
            assert not [n for n in program.nodes if isinstance(n, Template)]


@pytest.mark.parametrize("seed", range(3))
def test_vectors_small_matrices_and_caches_stay(seed: int) -> None:
    """One vector for each, a batch of small products, a few rows times many that would have to be copied."""
    r = random.Random(seed)
    batch, keys, few = r.randint(2000, 5000), r.randint(3_000_000, 5_000_000) | 1, r.choice([3, 5, 7])
    for one, other in (
        ((keys, 64), (64, 1)), ((1, 64), (64, keys)), ((batch, 27, 64), (batch, 64, 27)), ((few, 64), (64, keys)),
    ):  # fmt: skip
        a, b = torch.empty(one, dtype=torch.bfloat16), torch.empty(other, dtype=torch.bfloat16)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            assert not is_padded(program_of(lambda a, b: (a @ b) * 2, a, b, options=GPU)), (one, other)


@pytest.mark.parametrize("seed", range(4))
def test_what_nests_read_is_not_copied(seed: int) -> None:
    """Scores that a mask and a softmax read are padded, in a buffer that no nest copies."""
    rng = random.Random(seed)
    s, d = 8 * rng.randint(90, 110) + rng.choice([1, 3, 5]), 8 * rng.randint(8, 12)
    q, k = torch.empty(64, s, d, dtype=torch.bfloat16), torch.empty(64, d, s + 8 - s % 8, dtype=torch.bfloat16)[..., :s]
    program = program_of(lambda q, k: torch.bmm(q, k).view(8, 8, s, s).mul(0.1).softmax(-1)[..., 0], q, k, options=GPU)
    assert is_padded(program) and products(program)[0].outputs == ("bmm_padded",)
