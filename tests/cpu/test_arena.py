"""plan.arena: one allocation per call; offsets apart for all sizes; both wrappers, dynamic sizes, packages."""

import itertools
import random
import time

import pytest
import torch

import reflib
from reflib.ir.expr import Sym, expr
from reflib.package.inspect import inspect
from reflib.plan import Alloc
from reflib.plan.arena import ALIGN, Arena, Storage, assign

ROWS = 24, 40


def apart(x, w):
    """Kernels between reductions of both axes, with shared and long-lived values: several storages at once."""
    a = torch.softmax(x, -1)
    b = torch.softmax(x * 2, 0)
    c = (a - b.mean(0, keepdim=True)).cumsum(0)
    d = torch.softmax(c + a, 0) - torch.softmax(c - b, 0).sum(-1, keepdim=True)
    return (d.sum(0), torch.mm(d + b, w), (a.sum(0) * d).amax(-1))


def inputs(rows=ROWS[0]):
    torch.manual_seed(rows)
    return torch.randn(rows, ROWS[1]), torch.randn(ROWS[1], 8)


def step_of(e):
    (found,) = [s for s in e.memory.steps if isinstance(s, Arena)]
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_are_the_same(wrapper, dynamic):
    f = reflib.compile(apart, wrapper=wrapper, dynamic=dynamic, arena=True, verify=True)
    for rows in (24, 7, 33, 2, 1, 24) if dynamic else (24,):
        args = inputs(rows)
        for got, want in zip(f(*args), apart(*args), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    e = reflib.explain(apart, *inputs(), dynamic=dynamic, wrapper=wrapper, arena=True)
    plain = reflib.explain(apart, *inputs(), dynamic=dynamic, wrapper=wrapper)
    assert len(step_of(e).places) >= 2 and e.memory.allocations < plain.memory.allocations


def test_results_are_no_part_of_it():
    f = reflib.compile(apart, arena=True)
    first = f(*inputs())
    kept = [t.clone() for t in first]
    f(*(-t for t in inputs()))
    assert all(torch.equal(a, b) for a, b in zip(first, kept))
    e = reflib.explain(apart, *inputs(), arena=True)
    placed = {b for b, _ in step_of(e).places}
    assert not placed & {v.buffer for v in e.memory.steps[-1].outputs}
    assert not placed & {s.buffer for s in e.memory.steps if type(s) is Alloc}


def test_what_is_saved_for_the_backward_is_no_part_of_it():
    x, w = inputs()
    found = []
    for compiled in (False, True):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        f = reflib.compile(apart, arena=True) if compiled else apart
        outs = f(a, b)
        if compiled:
            f(*(t.detach().neg().requires_grad_() for t in (a, b)))  # another forward before the first one's backward
        sum(o.square().sum() for o in outs).backward()
        found.append((a.grad, b.grad))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(30))
def test_what_lives_at_once_is_apart_for_all_sizes(seed):
    r = random.Random(seed)
    m, n = Sym("m", 0, None, 50), Sym("n", 0, None, 9)
    sizes = [expr(1024), expr(256), expr(m) * 256, expr(n) * 512, (expr(m) * 4 + 255) // 256 * 256, expr(m) * n * 256]
    made = []
    for i in range(r.randint(2, 12)):
        first = r.randint(0, 20)
        made.append(Storage([f"b{i}"], first, first + r.randint(0, 8), r.choice(sizes[:2] if seed < 10 else sizes)))
    total = assign(made)
    for values in itertools.product((0, 1, 2, 3, 64, 1000), repeat=2):
        env = dict(zip((m, n), values))
        spans = [(s, s.at.evaluate(env), (s.at + s.size).evaluate(env)) for s in made]
        assert all(0 <= at <= end <= total.evaluate(env) and at % ALIGN == 0 for _, at, end in spans)
        for (s, a, b), (t, c, d) in itertools.combinations(spans, 2):
            assert s.last < t.first or t.last < s.first or b <= c or d <= a, (s, t, env)
    most = max(sum(s.size.hint() for s in made if s.first <= i <= s.last) for i in range(30))
    assert most <= total.hint() <= sum(s.size.hint() for s in made)


def test_storage_is_used_again():
    """Of four in a row, of which two live at once, two sizes' worth."""
    made = [Storage([f"b{i}"], i, i + 1, expr(4096)) for i in range(4)]
    assert assign(made) == 2 * 4096


def test_a_package_says_the_size_of_its_arena(tmp_path):
    class M(torch.nn.Module):
        def forward(self, x, w):
            return apart(x, w)

    shapes = ({0: torch.export.Dim("rows", min=2, max=4096)}, None)
    path = reflib.aot_compile(M(), inputs(), tmp_path / "m.reflib", "cpu", dynamic_shapes=shapes, arena=True)
    model = reflib.load(path)
    for rows in (24, 3, 100):
        for got, want in zip(model(*inputs(rows)), apart(*inputs(rows)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    (variant,) = inspect(path).manifest.variants
    assert "s" in variant.arena["cpu"] and variant.arena["cpu"] in str(inspect(path))


def test_time_is_linear_where_much_is_held_to_the_end():
    """As in a forward that saves activations; eight times as many steps, at most 24 times the processor time."""

    def seconds(count):
        rng = random.Random(count)
        lasts = [count if rng.random() < 0.3 else i + rng.randint(1, 40) for i in range(count)]
        storages = [Storage([f"b{i}"], i, last, expr(64 * rng.randint(1, 5000))) for i, last in enumerate(lasts)]
        before = time.process_time()
        assign(storages)
        return time.process_time() - before

    assert min(seconds(12000) for _ in range(2)) < 24 * min(seconds(1500) for _ in range(3))
