"""How many kernels well-known functions become, and that the fused program computes the same (see ``fuse_cases``)."""

import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import CPU, GPU, calls, fused, kernels, lowered

from reflib.fuse import fuse
from reflib.ir.loops import Op
from reflib.options import Options

R = torch.randn
aten = torch.ops.aten


def rms_norm(x, w):
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w,)


def rope(x, c, s):
    return (x * c + torch.cat([-x[..., 4:], x[..., :4]], -1) * s,)


def jensen_shannon(log_p, log_q):
    """Values that the sum's operands share have two readers."""
    p, q = log_p.exp(), log_q.exp()
    log_m = ((p + q) / 2).log()
    return ((p * (log_p - log_m) + q * (log_q - log_m)).sum(-1),)


def moved_apart(f):
    """Each element asks only for its own part (a step of a lattice Boltzmann method)."""
    f = torch.stack([part.roll(i, 0) for i, part in enumerate(f)]).exp()
    u = f[1] + f[5] - f[3] - f[7]
    return (torch.stack([part - 0.6 * (part - u * f[0] * i) for i, part in enumerate(f)]),)


ONE_KERNEL = {
    "divergence": (jensen_shannon, [R(4, 6), R(4, 6)]),
    "entropy": (lambda x: ((x.softmax(-1) * x.log_softmax(-1)).sum(-1),), [R(4, 6)]),
    "softmax": (lambda x: (torch.softmax(x, -1),), [R(4, 6)]),
    "softmax over columns": (lambda x: (torch.softmax(x, 0),), [R(4, 6)]),
    "softmax in bfloat16": (lambda x: (torch.softmax(x, -1),), [R(4, 6).bfloat16()]),
    "log_softmax over the middle": (lambda x: (torch.log_softmax(x, 1),), [R(3, 4, 5)]),
    "softmax in place": (lambda x: (x.copy_(torch.softmax(x, -1)),), [R(4, 6)]),
    "layer_norm": (lambda x, w, b: (F.layer_norm(x, (6,), w, b),), [R(4, 5, 6), R(6), R(6)]),
    "layer_norm and statistics": (lambda x, w: tuple(aten.native_layer_norm(x, [6], w, None, 1e-5)), [R(4, 6), R(6)]),
    "layer_norm over two": (lambda x: (F.layer_norm(x, (5, 6)),), [R(4, 5, 6)]),
    "group_norm": (lambda x, w, b: (F.group_norm(x, 3, w, b),), [R(4, 6, 5), R(6), R(6)]),
    "batch_norm": (lambda x, w, b: (F.batch_norm(x, None, None, w, b, True),), [R(4, 3, 5, 5), R(3), R(3)]),
    "gelu(x + bias)": (lambda x, b: (F.gelu(x + b),), [R(4, 6), R(6)]),
    "rms_norm": (rms_norm, [R(4, 6), R(6)]),
    "softmax backward": (lambda g, y: (aten._softmax_backward_data(g, y, -1, torch.float32),), [R(4, 6), R(4, 6)]),
    "transpose": (lambda x, y: (torch.relu(x).t() + y.exp(),), [R(4, 6), R(6, 4)]),
    "reshape": (lambda x, y: (torch.relu(x).reshape(6, 4) + y,), [R(4, 6), R(6, 4)]),
    "heads": (lambda x: ((x.exp().view(2, 5, 3, 4).transpose(1, 2) * 2).contiguous() + 1,), [R(2, 5, 12)]),
    "diamond": (lambda x: ((x.exp() + x.sin()) * x.exp().cos(),), [R(8)]),
    "cat": (lambda x, y: (torch.cat([x + 1, y * 2], 1).relu(),), [R(4, 3), R(4, 2)]),
    "cat of long chains": (
        lambda x, g: (torch.cat([F.gelu(x) * g, aten.gelu_backward(g, x, approximate="tanh")], 1),),
        [R(4, 6), R(4, 6)],
    ),
    "elements of a stack": (moved_apart, [R(9, 4, 3)]),
    "pad": (lambda x: (F.pad(x * 2, (1, 2)) + 1,), [R(4, 3)]),
    "slice": (lambda x: (x.exp()[:, 1:3] * 2,), [R(4, 5)]),
    "flip": (lambda x: (x.exp().flip(0) + 1,), [R(4, 3)]),
    "rotary embedding": (rope, [R(2, 3, 8), R(3, 8), R(3, 8)]),
    "gather of a product": (lambda x, i: ((x * 2)[i] + 1,), [R(5, 3), torch.tensor([0, 4, 4])]),
    "embedding, layer_norm": (lambda w, i: (F.layer_norm(F.embedding(i, w), (6,)),), [R(7, 6), torch.tensor([1, 3])]),
    "siblings": (lambda x: (x.sum(-1), x.amax(-1), x.exp()), [R(4, 6)]),
    "in place": (lambda x, y: (x.copy_(x + y) * 2,), [R(4), R(4)]),
    "zero size": (lambda x: (torch.softmax(x + 1, -1),), [R(0, 6)]),
    "scalar": (lambda x: (x.exp() + 1,), [R(())]),
}


@pytest.mark.each
@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name, target):
    fn, args = ONE_KERNEL[name]
    f = fused(fn, args, target)
    assert len(f.groups) == 1


@pytest.mark.parametrize("shape", [(300, 40), (20, 15, 40), (300, 1)])
def test_a_loss_of_whole_rows(shape):
    """The sum over all is cut so that its first step has the rows of the softmax; the second is short."""
    f = fused(lambda x, y: ((x.log_softmax(-1) - y.log_softmax(-1)).square().sum(),), [R(shape), R(shape)])
    first, *rest = kernels(f)
    assert {len({*first.reads()}), *(len({*n.reads()}) for n in rest)} == ({2, 1} if shape[-1] > 1 else {2})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_maximum_that_was_stored_is_found_again(dtype):
    """As the gradient of ``amax`` does, and divides by how many there are: what is compared is rounded as that was."""
    x = (R(8, 64) * 2).to(dtype)
    fused(lambda x, m: ((x.exp() == m).sum(-1),), [x, x.exp().amax(-1, keepdim=True)])


ANY_SIZE = ["softmax", "layer_norm", "rms_norm", "gelu(x + bias)", "softmax backward", "rotary embedding"]


@pytest.mark.parametrize("name", ANY_SIZE)
def test_one_kernel_for_all_sizes(name):
    fn, args = ONE_KERNEL[name]
    sizes = {4: 7, 3: 9, 2: 5}
    other = [R([sizes.get(n, n) for n in a.shape]) for a in args]
    f = fused(fn, args, GPU, symbolic=True, run_on=[other] if name != "rotary embedding" else ())
    assert len(f.groups) == 1


def parts_of_rows(x, b):
    """Sums over rows would be repeated in sums over their parts."""
    y = b.exp() + 1
    return (x * b[:, :, None]).sum((1, 2)), y, y.sum(-1)


SEVERAL = {
    "rows and columns": (lambda x: (x.exp().sum(0), x.exp().sum(1)), [R(14, 6)], 2, {"axes"}),
    "around a call": (lambda x, y: (torch.relu((x + 1) @ y).softmax(-1),), [R(4, 4), R(4, 4)], 2, {"call"}),
    "in place, transposed": (lambda x: (x.copy_(x.t() + 1),), [R(4, 4)], 2, {"index"}),
    "scaled in place beside a softmax": (lambda x: (x.copy_(x * 2), (x * 2).softmax(-1)), [R(4, 60)], 2, {"in-place"}),
    "parts of rows": (parts_of_rows, [R(4, 6, 5), R(4, 6)], 2, {"broadcast"}),
    "outer product": (lambda x, y: (x.erf()[:, None] * y.erf()[None],), [R(3000), R(2000)], 3, {"broadcast"}),
    "mean of a cross entropy": (lambda x, t: (F.cross_entropy(x, t),), [R(6, 7), torch.arange(6)], 2, {"axes"}),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_kernels_and_why(name):
    fn, args, count, codes = SEVERAL[name]
    f = fused(fn, args)
    assert len(kernels(f)) == count
    assert codes <= {r.reason.code for r in f.refusals}


def test_a_call_in_between():
    """b needs a and the call; the call needs a: a and b cannot be one kernel."""

    def fn(x):
        a = x.exp()
        return (a + a.sort(0).values,)

    f = fused(fn, [R(4, 3)])
    assert len(kernels(f)) == 2 and len(calls(f)) == 1
    assert any(r.reason.code == "order" for r in f.refusals)


def test_reads_before_a_mutation_stay_before():
    def fn(x, y):
        a = x.sum(0)
        x.copy_(y * 2)
        return a, x + 1

    fused(fn, [R(4, 3), R(4, 3)])


def test_a_reduction_over_one_element():
    """It reduces over no axis, and must not get one from its neighbours."""
    fused(lambda x, y: (torch.softmax(y * x.sum(1, keepdim=True), 1), x.sum(1)), [R(4, 1), R(4, 6)])
    fused(lambda x, y: (torch.softmax(y + x.sum(1), 1), x.exp().sum(1)), [R(4, 1, 6), R(4, 6)])


def test_limits():
    x = [R(8)]

    def fn(x):
        for _ in range(20):
            x = x.sin() + 1
        return (x,)

    assert len(kernels(fused(fn, x))) == 1
    f = fused(fn, x, max_fused_ops=12)
    assert len(kernels(f)) == 4
    assert any(r.reason.code == "limit" for r in f.refusals)
    many = [R(8) for _ in range(30)]
    f = fused(lambda *a: (sum(a),), many, max_fused_buffers=12)
    assert all(len(set(k.reads()) | set(k.writes())) <= 12 for k in kernels(f))


def test_fuse_off():
    f = fused(ONE_KERNEL["softmax"][0], [R(4, 6)], fuse=False)
    assert len(f.groups) > 1


def test_unused_buffers_go():
    f = fused(ONE_KERNEL["softmax"][0], [R(4, 6)])
    assert len(f.program.buffers) == 2
    (k,) = kernels(f)
    assert k.reads() == [f.program.inputs[0]] and len(k.writes()) == 1


def test_contiguous_pointwise_is_one_loop():
    (k,) = kernels(fused(lambda x, y: (torch.relu(x + y) * 2,), [R(3, 4, 5), R(3, 4, 5)]))
    assert len(k.axes) == 1


BIG = {
    "sum": (lambda x: ((x * x).sum(),), [R(300, 200)]),
    "odd": (lambda x: ((x * x).sum(), x.amax()), [R(100003)]),
    "pieces of rows": (lambda x: ((x * 2).sum(), x.argmax(), (x > 9).any()), [R(137, 6144)]),
    "rows": (lambda x: (x.amax(1), x.argmax(1), x.argmin(1)), [R(2, 70001)]),
    "columns": (lambda x: ((x * 2).sum(0) + 1,), [R(40000, 3)]),
    "variance": (lambda x: (torch.var(x, 1), *torch.var_mean(x, (0, 1))), [R(2, 70001)]),
    "even variance": (lambda x: (x.std(1),), [R(3, 65536)]),
    "variance of columns": (lambda x: (x.var(0), x.mean(0)), [R(40001, 2)]),
    "variance, two axes": (lambda x: torch.var_mean(x, (0, 2)), [R(3, 2, 40009)]),
    "variance, short axes": (lambda x: torch.var_mean(x, (0, 2, 3)), [R(17, 2, 53, 41)]),
    "integers": (lambda x: (x.amin(0), x.sum(0), (x > 3).any(0), (x > 3).all(0)), [torch.randint(0, 9, (70001, 2))]),
}  # fmt: skip


@pytest.mark.parametrize("name", BIG)
def test_split_reductions(name):
    fn, args = BIG[name]
    f = fused(fn, args)
    assert any("part" in b for b in f.program.buffers)
    whole = fused(fn, args, split_reductions=False)
    assert not any("part" in b for b in whole.program.buffers)


@pytest.mark.parametrize("name", ["rows", "variance"])
def test_split_symbolic(name):
    f = fused(BIG[name][0], [R(2, 70001)], symbolic=True, run_on=[[R(3, 50000)], [R(2, 3)]])
    assert any("part" in b for b in f.program.buffers)


def adam(n):
    def fn(*args):
        out = []
        for p, g, m, v in zip(*[iter(args)] * 4, strict=True):
            m.copy_(m * 0.9 + g * 0.1)
            v.copy_(v * 0.99 + g * g * 0.01)
            out.append(p.copy_(p - m / (v.sqrt() + 1e-8)))
        return tuple(out)

    return fn, [R(5, 7).abs() if i % 4 == 3 else R(5, 7) for i in range(4 * n)]


def test_adam_is_combined():
    fn, args = adam(16)
    f = fused(fn, args)
    assert len(kernels(f)) == 16
    assert sum(len(c) for c in f.combined) == 16 and len(f.combined) <= 2
    names = [n.name for n in f.program.nodes]
    for c in f.combined:
        at = names.index(c[0])
        assert tuple(names[at : at + len(c)]) == c
    assert fused(fn, args, combine_kernels=False).combined == ()


def test_what_nothing_reads_is_combined_at_the_end():
    """At three depths, after all that others need: in one launch."""

    def fn(x, w):
        y = x @ w
        z = y @ w
        return z @ w, (x @ w).t() + 1, y.sin(), z.t().contiguous()

    f = fused(fn, (R(6, 6), R(6, 6)))
    assert [len(c) for c in f.combined] == [3]

    def early(x, w):
        y = x @ w
        a = y.sin()  # its operand is not kept for a launch at the end
        z = y @ w
        return a, z @ w, z.cos()

    assert fused(early, (R(6, 6), R(6, 6))).combined == ()


ROWS, COLUMNS = 50, 6
TABLE = ROWS * COLUMNS * 4  # bytes of one table's gradient


def embeddings(tables):
    """A program of the gradients of so many embeddings, summed in float32 and rounded: three kernels each."""
    backward = torch.ops.aten.embedding_dense_backward.default

    def fn(i, *grads):
        return tuple(backward(g, i[t], ROWS, -1, False) for t, g in enumerate(grads))

    args = (torch.randint(0, ROWS, (tables, 9)), *(R(9, COLUMNS).bfloat16() for _ in range(tables)))
    return lowered(fn, args, options=Options(target="sm_90"))


def test_one_launch_hands_over_what_a_cache_holds(monkeypatch):
    """Some at a time from the first launch to the last; the last are smaller, beside all that the others have left."""

    def sets(program, **limits):
        for name, tables in limits.items():
            monkeypatch.setattr(f"reflib.fuse.combine.{name}", tables * TABLE)
        return fuse(program, Options(), GPU)

    def sizes(f):
        return [len(c) for c in f.combined]

    program = embeddings(7)
    assert sizes(sets(program)) == [7] * 3
    f = sets(program, MAX_BYTES=3)
    assert sizes(f) == [3] * 6
    sums, most = set[str](), 0
    for n in f.program.nodes:
        made = {b for b in n.writes() if f.program.buffers[b].dtype == torch.float32}
        sums = (sums | made) if made else sums - set(n.reads())
        most = max(most, len(sums))
    assert most == 3
    assert sorted(sizes(sets(program, MAX_BYTES=5))) == [3] * 3 + [4] * 3  # equal shares, not 5 and 2
    parts = sizes(sets(embeddings(12), MAX_BYTES=6, LAST_BYTES=2))
    assert sum(parts) == 3 * 12 and parts[-1] == 2 < max(parts) <= 6
    assert sorted(parts, reverse=True)[:3] == [max(parts)] * 3


def test_what_is_made_early_is_not_kept_for_one_launch():
    """Operands of four products one after the other: together where they are small."""

    def fn(x, *operands):
        for y in operands:
            x = x @ y.sin() + y
        return x

    for n, sets in ((64, [4]), (640, [2, 2, 2])):  # (with the sum before the product)
        program = lowered(fn, [R(n, n) for _ in range(5)], options=Options(target="sm_90"))
        assert [len(c) for c in fuse(program, Options(), GPU).combined] == sets


def test_a_chain_is_fused_in_linear_time():
    """What is merged is the smaller one's."""

    def chain(n):
        def fn(x, y):
            for i in range(n):
                x = (torch.sin, torch.relu, lambda t: t * 2, lambda t: t + y)[i % 4](x)
            return (x,)

        return lowered(fn, [R(16, 16), R(16, 16)])

    count = Counter()
    for n in (50, 150):
        program = chain(n)
        sys.setprofile(lambda frame, event, arg, n=n: count.update([n]))
        try:
            fuse(program, Options(), GPU)
        finally:
            sys.setprofile(None)
    assert count[150] < 4 * count[50], count  # of the square, 9


def test_a_path_may_lead_through_a_group_that_begins_before_both():
    """As in batch norm with squeeze-and-excite: ``c`` needs ``d0``, whose group grows by ``d0 + g``."""

    def fn(x, y, v):
        d0 = torch.relu(x)
        c = torch.mv(d0.t(), v)
        g = y.sum(0)
        return d0 + g, c * g

    for target in (CPU, GPU):
        f = fused(fn, [R(8, 6), R(5, 6), R(8)], target)
        assert any(r.reason.code == "order" for r in f.refusals)


def test_a_number_per_row_is_stored_rather_than_what_it_was_added_to():
    """Rows, then columns of what the rows gave (a step of Sinkhorn's algorithm)."""

    def step(c, v):
        u = (c + v).logsumexp(1, keepdim=True)
        return ((c - u).logsumexp(0),)

    f = fused(step, [R(5, 7), R(7)])
    assert max(b.numel.hint() for b in f.program.buffers.values() if b.kind == "temp") == 7


def rotated(x, turn, cos, sin):
    """A rotary embedding, or its backward."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a) if turn else (b, -a), -1) * sin


ROTATED = {
    "after a norm": lambda x, cos, sin: rotated(x * (x.square().mean(-1, True) + 1e-6).rsqrt(), True, cos, sin),
    "of a key that several share": lambda x, cos, sin: rotated(x.unflatten(0, (-1, 3)).sum(1), False, cos, sin),
    "of products": lambda x, cos, sin: torch.cat([*reversed((x * sin).chunk(2, -1))], -1) + x * cos,
}


@pytest.mark.parametrize("name", ROTATED)
def test_a_broadcast_cosine_is_not_computed_for_every_element(name):
    """Nor under a mask, where the lanes that are masked off cost little: it is read from a cache. Both halves of a row
    have the same ones."""

    def fn(x, rates):
        angles = torch.arange(x.shape[1])[:, None] * torch.cat((rates, rates))
        return (ROTATED[name](x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)),)

    f = fused(fn, (torch.rand(33, 16, 64).bfloat16(), torch.rand(32)), GPU)
    at = [n.numel * n.rnumel for n in kernels(f) for s in n.body if isinstance(s, Op) and s.op in ("cos", "sin")]
    assert at == [16 * 32] * 2


def half(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16)


def matrices(f):
    """Tensors made that are more than a row."""
    return [b for b in f.program.buffers.values() if b.kind == "temp" and b.numel.hint() > 64]


def test_a_scatter_is_computed_again_where_it_is_read():
    """The gradient of a loss, of rows and of columns, is zero but for one element of each."""

    def f(x, t):
        g = torch.zeros_like(x).scatter(1, t, -1.0)
        rows = g.sum(1, keepdim=True)
        return ((g - x.exp() * rows).sum(1), ((g - x.t().exp() * rows) * x).sum(0))

    assert not matrices(fused(f, [R(32, 32), torch.randint(32, (32, 1))]))


@pytest.mark.parametrize("gathered", [False, True])
def test_what_a_scatter_stored_is_not_read_again(gathered):
    """Another row may have stored to the same place since."""

    def f(x, w, at):
        h = (x * (w.index_select(0, at) if gathered else w)).bfloat16()
        out = torch.zeros(32, 16, dtype=torch.bfloat16).index_copy(0, at, h)
        return out, (h.float().sin() * out.float()).sum(0)

    fused(f, [R(32, 16), R(32, 16), torch.arange(32) // 2])


def test_what_is_stored_anyway_is_read_rather_than_stored_again():
    """The steps of a recurrence: what one stores as halves the next would read in float32 too, and what follows."""

    def f(x):
        y, out = x[0], []
        for step in x[1:]:
            y = torch.logaddexp(y, F.pad(y[:, :-1], (1, 0))) + step
            out.append(y)
        return tuple(out)

    f = fused(f, [half(4, 16, 32)])
    assert [b.dtype for b in matrices(f)] == 3 * [torch.bfloat16]


def test_what_broadcasts_is_computed_where_it_is_read_where_that_saves_a_launch():
    """A number, or a vector, takes a kernel of its own only where its arithmetic is more than a launch."""

    def fn(x, c, g):
        return ((-g.exp() * (x[:, None] - c).square()).exp(),)

    for m, n in ((40, 50), (300, 700)):
        assert len(kernels(fused(fn, [R(m), R(n), R(1)]))) == 1
    assert len(kernels(fused(fn, [R(4), R(5), R(1)], CPU))) > 1
