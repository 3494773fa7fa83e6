"""Matrix products take in what follows them: which kernels come out, that they compute the same, and why not more."""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import CPU, GPU, calls, check_same, kernels, lowered, products, refused, templated, templates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_fuse_random import FAST, binary, interpretation, row, step, unary, view

from reflib.fuse import fuse
from reflib.ir.expr import expr
from reflib.ir.loops import BodyBuilder, LoopNest
from reflib.options import Options

R = torch.randn
X, W = R(4, 6), R(6, 8)  # [M, K] @ [K, N]


def heads(x, w):
    """[B*S, H*D] as [B, H, S, D], contiguous."""
    return (((x @ w).view(2, 2, 4, 2) * 0.5).permute(0, 2, 1, 3).contiguous() + 1,)


def swiglu(x, w, v):
    return (F.silu(x @ w) * (x @ v),)


ONE_KERNEL = {
    "nothing": (lambda x, w: (x @ w,), [X, W]),
    "bias": (lambda x, w, b: (x @ w + b,), [X, W, R(8)]),
    "bias of each row": (lambda x, w, b: (x @ w + b,), [X, W, R(4, 1)]),
    "bias, whole": (lambda x, w, b: (x @ w + b,), [X, W, R(4, 8)]),
    "bias, by addmm": (lambda x, w, b: (torch.addmm(b, x, w).relu(),), [X, W, R(8)]),
    "relu": (lambda x, w: (torch.relu(x @ w),), [X, W]),
    "bias, gelu, residual": (lambda x, w, b, r: (F.gelu(x @ w + b) + r,), [X, W, R(8), R(4, 8)]),
    "residual is an operand": (lambda x, w: (x @ w + x,), [R(6, 6), R(6, 6)]),
    "bfloat16": (lambda x, w, b: (F.gelu(x @ w + b),), [X.bfloat16(), W.bfloat16(), R(8).bfloat16()]),
    "float16 to float32": (lambda x, w: ((x @ w).float() * 2,), [X.half(), W.half()]),
    "float64": (lambda x, w: (torch.sin(x @ w),), [X.double(), W.double()]),
    "view": (lambda x, w, r: ((x @ w).view(2, 2, 8) + r,), [X, W, R(2, 2, 8)]),
    "view and bias": (lambda x, w, b, r: (((x @ w).view(2, 2, 8) + b).relu() * r,), [X, W, R(8), R(2, 2, 1)]),
    "linear, batched": (lambda x, w, b: (F.gelu(F.linear(x, w, b)),), [R(2, 3, 6), R(8, 6), R(8)]),
    "heads": (heads, [X, W]),
    "flattened": (lambda x, w, r: ((x @ w).view(-1) + r,), [X, W, R(32)]),
    "transposed store": (lambda x, w: (((x @ w).t() * 2).contiguous(),), [X, W]),
    "transposed read": (lambda x, w, r: ((x @ w).t() + r,), [X, W, R(8, 4)]),
    "product returned too": (lambda x, w: (y := x @ w, y.relu()), [X, W]),
    "two consumers": (lambda x, w: (y := x @ w, y.relu(), y.t().exp().contiguous()), [X, W]),
    "mask": (lambda x, w, m: (torch.where(m, x @ w, 0.0) * 2,), [X, W, R(4, 8) > 0]),
    "in place over the residual": (lambda x, w, r: (r.copy_(r + x @ w),), [X, W, R(4, 8)]),
    "transposed operands": (lambda x, w: ((x.t() @ w.t()).relu(),), [R(6, 4), R(8, 6)]),
    "bmm": (lambda x, w, r: (torch.bmm(x, w) + r,), [R(3, 4, 6), R(3, 6, 8), R(3, 4, 8)]),
    "baddbmm, scaled": (lambda x, w, r: (torch.baddbmm(r, x, w) * 0.5,), [R(3, 4, 6), R(3, 6, 8), R(3, 1, 8)]),
    "bmm of one": (lambda x, w, r: (torch.bmm(x, w) + r,), [R(1, 4, 6), R(1, 6, 8), R(1, 4, 8)]),
    "bmm, heads joined": (
        lambda x, w: ((torch.bmm(x, w) * 2).view(2, 3, 4, 8).transpose(1, 2).reshape(2, 4, 24) + 1,),
        [R(6, 4, 6), R(6, 6, 8)],
    ),
    "one row": (lambda x, w, b: (torch.relu(x @ w + b),), [R(1, 6), W, R(8)]),
    "one column": (lambda x, w, b: (torch.relu(x @ w + b),), [X, R(6, 1), R(4, 1)]),
    "one element": (lambda x, w: (torch.relu(x @ w),), [R(1, 6), R(6, 1)]),
    "no rows": (lambda x, w: (torch.relu(x @ w),), [R(0, 6), W]),
    "nothing to add up": (lambda x, w, b: (torch.relu(x @ w + b),), [R(4, 0), R(0, 8), R(8)]),
    "a sum of one": (lambda x, w: ((x @ w)[:, None].sum(1),), [X, W]),
    "a private producer": (lambda x, w, r: (x @ w + r.sin(),), [X, W, R(4, 8)]),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name):
    fn, args = ONE_KERNEL[name]
    f = products(fn, args)
    assert [g.kind for g in f.groups] == ["template"]


def test_what_nobody_needs_is_not_stored():
    (t,) = templates(products(*ONE_KERNEL["bias, gelu, residual"]))
    assert len(t.epilogue.stores()) == 1 and len(t.reads()) == 4
    (t,) = templates(products(*ONE_KERNEL["a private producer"]))
    assert len(t.epilogue.stores()) == 1
    (t,) = templates(products(*ONE_KERNEL["product returned too"]))
    assert len(t.epilogue.stores()) == 2


def test_axes_come_back_whole():
    """A view of the product splits its axes while the group grows; the indices are linear again afterwards."""
    (t,) = templates(products(*ONE_KERNEL["view and bias"]))
    assert [int(a.size) for a in t.epilogue.axes] == [4, 8]
    assert "//" not in str(t) and "%" not in "".join(str(s.index) for s in [*t.epilogue.loads(), *t.epilogue.stores()])
    (t,) = templates(products(*ONE_KERNEL["heads"]))
    (store,) = t.epilogue.stores()
    assert [int(a.size) for a in t.epilogue.axes] == [4, 8] and "//" in str(store.index)


def test_swiglu():
    """The second product's epilogue reads the first one's (or the other way round)."""
    f = products(swiglu, [X, W, R(6, 8)])
    assert len(templates(f)) == 2 and not kernels(f)
    assert "template" in refused(f)


def test_transposed_twice():
    """Read plainly and transposed: one of them needs the whole product."""
    f = products(lambda x, w: ((y := x @ w).relu() + y.t(),), [X, R(6, 4)])
    assert len(templates(f)) == 1 and len(kernels(f)) == 1 and "index" in refused(f)


SEVERAL = {  # function, arguments, templates, other kernels, refusals
    "softmax after": (lambda x, w: (torch.softmax(x @ w, -1),), [X, W], 1, 1, {"template"}),
    "layer norm after": (lambda x, w, r: (F.layer_norm(x @ w + r, (8,)),), [X, W, R(4, 8)], 1, 1, {"template"}),
    "sum after": (lambda x, w: ((x @ w).sum(0), (x @ w).relu()), [X, W], 2, 1, {"template"}),
    "new axis": (lambda x, w, r: ((x @ w)[None] + r,), [X, W, R(3, 4, 8)], 1, 1, {"broadcast"}),
    "of a part": (lambda x, w: ((x @ w)[:, :4] * 2,), [X, W], 1, 1, {"space"}),
    "sibling": (lambda x, w: (x.exp(), (x @ w).relu()), [X, W], 1, 1, {"template"}),
    "sibling of the residual": (lambda x, w, r: (r.sin(), x @ w + r), [X, W, R(4, 8)], 1, 1, {"template"}),
    "operand": (lambda x, w: ((x + 1) @ w,), [X, W], 1, 1, {"template"}),
    "two products": (lambda x, w, v: ((x @ w).relu() @ v,), [X, W, R(8, 3)], 2, 0, {"template"}),
    "producer with other readers": (lambda x, w, r: (s := r.sin(), x @ w + s), [X, W, R(4, 8)], 1, 1, {"template"}),
    "small producer": (lambda x, w, b: (x @ w + b.sin(),), [X, W, R(8)], 1, 1, {"broadcast"}),
    "operand in place": (lambda x, w: (x.copy_(x @ w + 1),), [R(6, 6), R(6, 6)], 1, 1, {"template"}),
    "operand in place after": (lambda x, w: (x.copy_(x.sin() + 1), x @ w), [R(6, 6), R(6, 6)], 1, 1, {"template"}),
    "in place, transposed": (
        lambda x, w, r: (r.copy_(r.t() + x @ w),), [R(4, 6), R(6, 4), R(4, 4)], 1, 1, {"index"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_several_kernels_and_why(name):
    fn, args, products_, others, codes = SEVERAL[name]
    f = products(fn, args)
    assert len(templates(f)) == products_ and len(kernels(f)) == others
    assert codes <= refused(f)


def test_too_many_operands():
    def fn(x, w, *rest):
        y = x @ w
        for r in rest:
            y = y * r
        return (y,)

    f = products(fn, [X, W, *[R(4, 8) for _ in range(6)]])
    assert len(f.groups) == 1
    f = products(fn, [X, W, *[R(4, 8) for _ in range(12)]])
    assert len(f.groups) == 2 and "limit" in refused(f)
    f = products(fn, [X, W, *[R(8) for _ in range(12)]])  # small ones
    assert len(f.groups) == 1
    f = products(fn, [X, W, *[R(8) for _ in range(12)]], max_fused_buffers=8)
    assert len(f.groups) > 1 and "limit" in refused(f)


def test_order():
    """The residual comes from a call that needs the product."""
    f = products(lambda x, w: ((y := x @ w).relu() + y.sort(0).values,), [X, W])
    assert len(calls(f)) == 1 and "order" in refused(f)


# -- sizes known when it runs -----------------------------------------------------------------------
ANY_SIZE = {
    "bias, gelu, residual": (*ONE_KERNEL["bias, gelu, residual"], [[R(5, 7), R(7, 9), R(9), R(5, 9)]]),
    "view": (
        lambda x, w, r: ((x.view(-1, x.shape[2]) @ w).view(x.shape[0], x.shape[1], -1) + r,),
        [R(2, 3, 6), W, R(2, 3, 8)],
        [[R(5, 7, 3), R(3, 9), R(5, 7, 9)]],
    ),
    "heads": (
        lambda x, w: (
            (x.view(-1, x.shape[2]) @ w.view(w.shape[0], -1))
            .view(x.shape[0], x.shape[1], w.shape[1], w.shape[2])
            .transpose(1, 2)
            .contiguous()
            .mul(2),
        ),
        [R(2, 3, 6), R(6, 4, 5)],
        [[R(5, 2, 3), R(3, 6, 7)]],
    ),
    "bmm": (*ONE_KERNEL["bmm"], [[R(2, 5, 3), R(2, 3, 4), R(2, 5, 4)]]),
}


@pytest.mark.parametrize("name", ANY_SIZE)
def test_any_size(name):
    fn, args, others = ANY_SIZE[name]
    f = products(fn, args, symbolic=True, run_on=others)
    assert [g.kind for g in f.groups] == ["template"]


# -- casts ------------------------------------------------------------------------------------------
def test_a_widened_product_is_read_as_it_was():
    """The norm reads bfloat16; nothing is stored in float32."""

    def fn(x, w, r, g):
        y = x @ w + r
        z = y.float()
        return y, (z * torch.rsqrt((z * z).mean(-1, keepdim=True) + 1e-6) * g).bfloat16()

    args = [t.bfloat16() for t in (X, W, R(4, 8), R(8))]
    f = products(fn, args)
    assert len(templates(f)) == 1 and len(kernels(f)) == 1
    assert {b.dtype for b in f.program.buffers.values()} == {torch.bfloat16}


@pytest.mark.parametrize("seed", range(3))
def test_what_follows_from_the_product_is_not_stored_beside_it(seed):
    """A soft cap of logits, in float32: the softmax computes it from the product, which a backward needs."""
    r = random.Random(seed)
    m, k, n = r.randrange(5, 12), r.randrange(3, 9), r.randrange(20, 60)

    def fn(x, w):
        y = x @ w
        z = 30 * torch.tanh(y.float() / 30)
        return y, z.logsumexp(1, keepdim=True), (z.float() - 1).amax(1)

    f = products(fn, [R(m, k).bfloat16(), R(k, n).bfloat16()])
    (product,) = templates(f)
    assert product.writes() == ["mm"] and f.program.buffers["mm"].dtype == torch.bfloat16
    assert not any(b.dtype == torch.float32 and b.numel.hint() == m * n for b in f.program.buffers.values())


def test_a_scatter_stays_out():
    """Here a consumer is changed into one."""
    args = [X, W, torch.tensor([2, 0, 3, 1])]
    program = templated(lowered(lambda x, w, i: ((x @ w) * i[:, None],), args))
    (loops,) = (n for n in program.nodes if isinstance(n, LoopNest))
    (store,) = loops.stores()
    b = BodyBuilder()
    rows, columns = (expr(a.var) for a in loops.axes)
    row = b.indirect(b.load(program.inputs[2], rows, torch.int64), 4)
    (load,) = (s for s in loops.loads() if s.buffer != program.inputs[2])
    b.store(store.buffer, row * 8 + columns, b.add(load))
    scatter = replace(loops, body=tuple(b.body))
    program = replace(program, nodes=tuple(scatter if n is loops else n for n in program.nodes))
    f = fuse(program, Options(), GPU)
    assert len(f.groups) == 2 and any("scatter" in r.reason.text for r in f.refusals)


def test_an_indirect_load_joins():
    f = products(lambda x, w, t, i: (x @ w + F.embedding(i, t),), [X, W, R(9, 8), torch.tensor([2, 0, 8, 1])])
    assert [g.kind for g in f.groups] == ["template"]


# -- random programs --------------------------------------------------------------------------------
SHAPES = [(4, 6), (6, 4), (6, 6), (6,), (4, 1), (2, 3, 4)]


def multiply(a, b):
    """Some product of the two as matrices, if their sizes allow one."""
    for x in (a, a.transpose(-1, -2) if a.dim() > 1 else a):
        for y in (b, b.transpose(-1, -2) if b.dim() > 1 else b):
            if x.dim() == y.dim() == 2 and x.shape[1] == y.shape[0]:
                return x @ y
            if x.dim() == y.dim() == 3 and x.shape[0] == y.shape[0] and x.shape[2] == y.shape[1]:
                return torch.bmm(x, y)
            if x.dim() == 3 and y.dim() == 2 and x.shape[2] == y.shape[0]:
                return x @ y
    return a @ a.t() if a.dim() == 2 else a.reshape(-1, 1) @ b.reshape(1, -1)[:, :6]


def doubled(a, b, which, j):
    return a.double().float() if which % 2 else multiply(a.double(), b.double()).sin().float()


def multiplied(a, b, which, j):
    return multiply(a, b).tanh() if which % 2 else multiply(a, b) * 0.1


KINDS = [unary, binary, binary, view, row, doubled, multiplied, multiplied, multiplied]


@settings(max_examples=25, deadline=None, phases=FAST, suppress_health_check=list(HealthCheck))
@given(
    st.lists(step(KINDS), min_size=3, max_size=14),
    st.sets(st.integers(0, 2), max_size=2),
    st.integers(0, 99),
    st.one_of(st.none(), st.sets(st.integers(0, 5))),
)
def test_random_programs(steps, mutate, seed, only):
    torch.manual_seed(seed)
    args = [torch.randn(s) for s in SHAPES]
    fn = interpretation(steps, sorted(mutate), KINDS, often=(doubled, multiplied))
    program = templated(lowered(fn, args), only)
    for target, options in ((GPU, Options()), (CPU, Options(max_fused_ops=15, max_fused_buffers=6))):
        f = fuse(program, options, target)
        check_same(program, f, fn, args)
        check_same(f.program, fuse(f.program, options, target), fn, args)
