"""explain(...).memory: bytes alive per step with their origin, eager's beside, ways to lower the peak; a budget for
what is saved for the backward; what is saved is freed when the plan says so."""

import gc
import os
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reflib
from reflib.errors import OptionError
from reflib.observe import eager_memory
from reflib.plan.memory import memory
from reflib.plan.order import search
from reflib.plan.peak import as_kernels
from reflib.plan.steps import Alloc


class Block(nn.Module):
    def __init__(self, n, wide):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(n, wide), nn.Linear(wide, n), nn.LayerNorm(n)

    def forward(self, x):
        y = self.norm(x)
        y = F.gelu(self.up(y))
        return x + self.down(y)


class Cell(nn.Module):
    """A recurrent cell, its states stacked."""

    def __init__(self, n, steps):
        super().__init__()
        self.h, self.steps = nn.Linear(n, 2 * n, bias=False), steps

    def forward(self, x):
        h, states = x, []
        for _ in range(self.steps):
            gate, new = self.h(h).chunk(2, -1)
            h = gate.sigmoid() * h + new.tanh()
            states.append(h)
        return torch.stack(states, 1)


class Skip(nn.Module):
    """A U-Net in small: what the middle reads is read again at the end."""

    def __init__(self, n):
        super().__init__()
        self.middle = nn.Sequential(*(nn.Conv1d(n, n, 3, padding=1) for _ in range(4)))
        self.one, self.two = nn.Conv1d(2 * n, 4, 1), nn.Conv1d(2 * n, 4, 1)

    def forward(self, x):
        x = x * 2
        y = torch.cat((self.middle(x), x), 1)
        return self.one(y) + self.two(y)


class Dense(nn.Module):
    """Each layer reads all before it."""

    def __init__(self, n, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear((i + 1) * n, n) for i in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu()], -1)
        return x


def model():
    torch.manual_seed(3)
    return nn.Sequential(Block(32, 96), Block(32, 96)), torch.randn(48, 32, requires_grad=True)


def saved_bytes(e):
    return sum(h.bytes for h in e.memory.table[-1].held if h.kind == "saved")


@pytest.fixture(scope="module")
def explained():
    return reflib.explain(*model(), dynamic=False)


def test_every_step_beside_eager_in_training(explained):
    m, e = model()[0], explained
    mem, back = e.memory, e.backward.memory
    assert [s.bytes for s in mem.table] == [p.bytes for p in mem.moments] and mem.peak.bytes == mem.peak_bytes
    # eager, by hand: a block saves norm (and two numbers per row), up, gelu; it ends with down beside its input
    rows, n, wide = 48, 32, 96
    block = 4 * rows * (n + 2 + 2 * wide)
    assert mem.eager.how == "computed"
    assert mem.eager_peak_bytes == 2 * block + 4 * rows * n * 3  # the first block's result, down and the result
    assert mem.peak_bytes <= mem.eager_peak_bytes and back.peak_bytes <= back.eager_peak_bytes
    gelu = next(h for h in mem.peak.held if h.what == f"float32[{rows}, {wide}]" and h.module == "1.up")
    assert gelu.kind == "saved" and "y = F.gelu(self.up(y))" in gelu.source and gelu.bytes == 4 * rows * wide
    assert {h.kernel for s in back.table for h in s.held if h.kind == "saved"} == {"the forward"}
    assert back.table[-1].bytes < back.table[0].bytes + sum(p.nbytes for p in m.parameters())
    text = repr(mem)
    assert f"peak {mem.peak_bytes:,} bytes" in text and f"eager {mem.eager_peak_bytes:,}" in text and "order: " in text
    assert "1.up" in mem._repr_html_() and any("activation_memory_budget=0.5" in w.text for w in mem.ways)


def test_what_is_read_late_is_not_kept_as_what_it_was_made_from():
    r = random.Random(0)
    n, steps = 2 * r.randint(8, 16), r.randint(5, 8)
    cell = reflib.explain(Cell(n, steps).requires_grad_(False), torch.randn(steps, n)).memory
    both = reflib.explain(Skip(n), torch.randn(2, n, 64 * steps, requires_grad=True))
    for mem in (cell, both.memory, both.backward.memory):
        assert mem.peak_bytes <= mem.eager_peak_bytes


def test_parts_are_kept_rather_than_their_cat_if_one_is_an_argument():
    x, layers = torch.randn(512, 64), 3
    mem = reflib.explain(Dense(64, layers).requires_grad_(False), x).memory
    assert mem.peak_bytes == (2 * layers + 1) * x.nbytes < mem.eager_peak_bytes


def test_views_saved_of_one_tensor_count_once():
    def fn(x, w):
        gate, up = (x @ w).chunk(2, -1)
        return F.silu(gate) * up

    x, w = torch.randn(64, 32), torch.randn(32, 2 * 96, requires_grad=True)
    e = reflib.explain(fn, x, w, dynamic=False)
    product, half = 4 * 64 * 2 * 96, 4 * 64 * 96
    back = e.backward.memory
    assert saved_bytes(e) == product
    assert sum(h.bytes for h in back.table[0].held if h.kind == "saved") == product + half  # and the gradient
    assert back.peak_bytes <= back.eager_peak_bytes and back.order.given == back.peak_bytes


def test_a_budget_saves_less_and_changes_no_result(explained):
    m, x = model()
    m(x).square().sum().backward()
    want = [x.grad, *(p.grad for p in m.parameters())]
    kept = {}
    for budget in (None, 0.5, 0):
        x.grad = None
        m.zero_grad()
        torch._dynamo.reset()
        reflib.compile(m, activation_memory_budget=budget)(x).square().sum().backward()
        torch.testing.assert_close([x.grad, *(p.grad for p in m.parameters())], want, atol=1e-4, rtol=1e-4)
        how = {"target": "cpu", "activation_memory_budget": budget}
        e = explained if budget is None else reflib.explain(m, x, dynamic=False, **how)
        kept[budget] = saved_bytes(e)
        if budget is None:
            promised = {w.text: w.saves for w in e.memory.ways}
            least = e.memory.peak_bytes
        else:
            assert least - e.memory.peak_bytes == promised[f"Options(activation_memory_budget={budget})"]
    assert kept[0] == 0 < kept[0.5] <= 0.5 * kept[None]
    for bad in (1.5, -0.1, True, "half"):
        with pytest.raises(OptionError, match="from 0 to 1"):
            reflib.Options(activation_memory_budget=bad)


@pytest.mark.sample(3)
@pytest.mark.parametrize("own_numbers", [False, True])
@pytest.mark.parametrize("budget", [None, 0.5, 0])
def test_a_budget_draws_no_other_numbers(budget, own_numbers):
    """The results tell the numbers that the forward drew: gradients must be of these."""
    x, w, v = torch.randn(256, 32), torch.randn(32, 96, requires_grad=True), torch.randn(96, 64, requires_grad=True)

    def fn(x, w, v):
        h = ((x @ w).tanh() @ v).tanh()
        return F.dropout(h.exp(), 0.5, True), h.cos() * torch.rand_like(h), h

    options = {"activation_memory_budget": budget, "fallback_random": not own_numbers}
    *drawn, h = reflib.compile(fn, **options)(x, w, v)
    got = torch.autograd.grad(sum(t.sum() for t in drawn), (w, v))
    again = ((x @ w).tanh() @ v).tanh()
    numbers = (drawn[0] / h.exp()).detach(), (drawn[1] / h.cos()).detach()
    want = torch.autograd.grad((again.exp() * numbers[0] + again.cos() * numbers[1]).sum(), (w, v))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    usual = reflib.explain(fn, x, w, v, target="cpu", fallback_random=not own_numbers)
    saved = saved_bytes(reflib.explain(fn, x, w, v, target="cpu", **options))
    assert saved < saved_bytes(usual) or budget is None


def test_ways_say_how_much_and_keep_it():
    def fn(x, w):
        first, second = (x + 1).softmax(1), x.softmax(1)
        wide = torch.sort((first + second) @ w, 1).values
        return (torch.sort(wide, 1).values @ w.T) * second, first

    x, w = torch.randn(64, 32), torch.randn(32, 256)
    mem = reflib.explain(fn, x, w).memory
    assert mem.peak_bytes <= mem.eager_peak_bytes and mem.peak.kernel.startswith("op")
    returned, halves, again = mem.ways
    assert "first" in returned.text and returned.moves == 0 and returned.saves == x.nbytes
    alone = reflib.explain(lambda x, w: fn(x, w)[0], x, w).memory
    assert mem.peak_bytes - alone.peak_bytes == returned.saves
    assert "again" in again.text and "second" in again.text and again.moves >= 2 * x.nbytes == 2 * again.saves
    assert "32 of 64 rows" in halves.text
    split = reflib.explain(fn, x[:32], w).memory
    assert mem.peak_bytes - (split.peak_bytes + x.nbytes) == halves.saves, "and what the first call returned"
    exported = reflib.explain(torch.export.export(model()[0], (torch.randn(48, 32),))).memory
    assert exported.eager_peak_bytes is None and "is not known" in repr(exported)


def test_ways_with_other_options_and_fewer_rows_are_tried():
    """What they say is what the plan has then, in both directions; in training with the gradients of the first call."""
    (m, _), x = model()
    off = {"reuse_buffers": False, "inplace_buffers": False}
    grads = sum(p.nbytes for p in (x[:24], *m.parameters()))
    now = reflib.explain(m, x, dynamic=False, **off).memory
    half = reflib.explain(m, x.detach()[:24].requires_grad_(), dynamic=False, **off).memory
    found = {w.text: w.saves for w in now.ways}
    rows = "call it for 24 of 48 rows at a time, add up the gradients, if no row needs another"
    assert found.pop(rows, 0) == max(0, now.peak_bytes - half.peak_bytes - grads)
    for text, saves in found.items():
        options = off | eval(text.replace("Options", "dict"))
        assert now.peak_bytes - reflib.explain(m, x, dynamic=False, **options).memory.peak_bytes == saves > 0
    assert len(found) >= 2
    one = reflib.explain(lambda x, w: (x @ w).sort().values.sum(1), x[:1], x.t()).memory
    assert not any("rows" in w.text for w in one.ways)


seen = []


@torch.library.custom_op("reflib_memory::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    """x; and what of the watched storages is alive."""
    seen.append(sum(size for ref, size in watched if ref() is not None))
    return x.clone()


look.register_fake(torch.empty_like)
look.register_autograd(lambda ctx, g: look(g))
watched = []


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_saved_activations_go_when_the_plan_says(wrapper):
    def net(x, ws):
        for w in ws:
            x = look(F.gelu(x @ w))
        return x

    ws = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]
    x = torch.randn(128, 16)
    e = reflib.explain(net, x, ws, wrapper=wrapper)
    kept = {b for b in e.backward.scheduled.inputs if b in e.backward.memory.changes[0].born} - {"tangents_1"}
    taken = [s for s in e.backward.stages.plan.steps if isinstance(s, Alloc) and s.reuse]
    assert any(s.reuse in kept for s in taken) == (wrapper == "python")
    for s in taken:  # what has their memory after them
        kept |= {s.buffer} if s.reuse in kept else set()
    looks = {n.name for n in e.backward.scheduled.nodes if "look" in str(getattr(n, "target", ""))}
    planned = [sum(n for b, n in m.live if b in kept) for m in e.backward.memory.moments if m.label in looks]
    torch._dynamo.reset()
    y = reflib.compile(net, wrapper=wrapper)(x, ws)
    given = {t.untyped_storage()._cdata for t in (*ws, x)}
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in y.grad_fn.saved_tensors}
    watched[:] = [(weakref.ref(s), s.nbytes()) for key, s in storages.items() if key not in given]
    del storages
    seen.clear()
    torch.autograd.grad(y, ws, torch.ones_like(y))
    watched_all = sum(size for _, size in watched)
    gc.collect()
    assert seen == planned and seen[0] == watched_all > seen[-1] and not any(ref() for ref, _ in watched)
    assert memory(e.scheduled, e.stages.plan).peak_bytes == e.memory.peak_bytes


def test_the_users_line_may_be_in_a_package_whose_name_begins_like_torchs():
    where = f"{os.path.dirname(torch.__file__)}vision/models/resnet.py"
    scope = {"line": eager_memory._line}
    exec(compile("def block():\n    return line()\n", where, "exec"), scope)
    assert scope["block"]() == "resnet.py:2 in block"


def test_inside_of_loops_and_branches():
    """What a loop or a branch holds counts in the order's peak too, and has a maker; whose line is ours has none."""
    from torch._higher_order_ops import while_loop

    def loop(x):
        body = lambda i, x: (i + 1, torch.softmax(x @ x.t(), -1) @ x)  # noqa: E731
        return while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))[1]

    def branch(x):
        return torch.cond(x.sum() > 0, lambda x: x.softmax(0).cumsum(1), lambda x: x + 1, (x,)).sum(0)

    for fn in (loop, branch):
        e = reflib.explain(fn, torch.randn(64, 8), target="cpu")
        memory = e.memory
        assert memory.order.peak == memory.peak_bytes
        assert search(as_kernels(e.stages.fused.program)).peak > 0, "before its blocks have steps"
        assert all(h.kernel for s in memory.table for h in s.held)
        assert "depends on numbers" in memory.eager.how
    memory = reflib.explain(nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8), target="cpu").memory
    assert not [s for s in memory.table if "explain.py" in s.source]


def test_eager_that_needs_numbers_runs_on_copies():
    def fn(x):
        noise = torch.rand_like(x)
        return (noise[x > 0] * 2).tanh()

    x = torch.randn(64, 8)
    e = reflib.explain(fn, x)
    state, count = torch.get_rng_state(), int((x > 0).sum())
    assert e.memory.eager_peak_bytes >= x.nbytes + 2 * 4 * count and e.memory.eager.how == "computed"
    assert torch.equal(torch.get_rng_state(), state)


def test_a_result_beside_an_update_is_no_update():
    def fn(cache, row):
        old = cache * 3
        cache.index_copy_(0, torch.tensor([3]), row)
        return old + cache

    updates = reflib.explain(fn, torch.randn(8, 4), torch.randn(1, 4), target="cpu").updates
    assert not [u for u in updates if "mul" in u.op]
