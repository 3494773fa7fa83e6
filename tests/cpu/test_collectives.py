"""Collectives in compiled graphs, on a process group that is as late as it may be (``late_group``): storage, order,
overlap. (Several processes: ``test_ranks.py``.)"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import reflib
from reflib.ir.program import Extern
from reflib.lower import custom_ops
from reflib.ranks import collectives
from tests import late_group

c = torch.ops._c10d_functional
Fn = Callable[..., Any]
PROGRAMS = 4


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """(Without the check that all ranks compile the same.)"""
    with pytest.MonkeyPatch.context() as m:
        m.setattr("reflib.ranks.agree.check", lambda lists: None)
        yield late_group.join()
    dist.destroy_process_group()


def waited(x: Any) -> Any:
    return c.wait_tensor(x) if isinstance(x, torch.Tensor) else [c.wait_tensor(t) for t in x]


OPS: dict[str, Fn] = {
    "all_reduce": lambda x, g: waited(c.all_reduce(x, "sum", g)),
    "all_gather": lambda x, g: waited(c.all_gather_into_tensor(x, 2, g))[: x.shape[0]],
    "reduce_scatter": lambda x, g: torch.cat([waited(c.reduce_scatter_tensor(x, "sum", 2, g))] * 2),
    "all_to_all": lambda x, g: waited(c.all_to_all_single(x, [x.shape[0] // 2] * 2, [x.shape[0] // 2] * 2, g)),
    "broadcast": lambda x, g: waited(c.broadcast(x, 0, g)),
    "coalesced": lambda x, g: sum(waited(c.all_reduce_coalesced([x, x.sin()], "sum", g))),
    "gathers": lambda x, g: sum(waited(c.all_gather_into_tensor_coalesced([x, x.cos()], 2, g)))[: x.shape[0]],
}


def same(fn: Fn, *args: Any, **options: Any) -> list[str]:
    """Compiled as eager; what was started, in order."""
    log = dist.group.WORLD.log  # type: ignore[union-attr]
    got = torch.compile(fn, backend="reflib", dynamic=options.pop("dynamic", None), options=options)
    del log[:]
    out, started = got(*args), list(log)
    torch.testing.assert_close(pytree.tree_map(waited, out), pytree.tree_map(waited, at_once(fn, *args)))
    return started


def at_once(fn: Fn, *args: Any) -> Any:
    """Eager's result, each collective done when it is started: late ones would read what is written meanwhile."""
    dist.group.WORLD.late = False  # type: ignore[union-attr]
    try:
        return fn(*args)
    finally:
        dist.group.WORLD.late = True  # type: ignore[union-attr]


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_each_collective_in_one_graph(group: Any, wrapper: str) -> None:
    n = group.group_name

    def fn(x: Any, y: Any) -> Any:
        out = []
        for i, op in enumerate(OPS.values()):  # contiguous, a transposed view, a slice, broadcast
            for v in (x * (i + 1), (y + i).t(), x[:, ::2], x[:1].expand(4, 6)):
                out.append(op(v, n) + 1)
        unwaited = c.all_gather_into_tensor(x.relu(), 2, n)  # its wait is in another graph
        return out, unwaited

    x, y = torch.randn(4, 6), torch.randn(6, 4)
    started = same(fn, x, y, wrapper=wrapper, dynamic=wrapper == "python")
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce", "all_gather"]
    assert started == [n for n in names for _ in range(4)] + ["all_gather"]  # the order of the graph


def drawn(rng: random.Random, names: list[str]) -> Fn:
    """A program of collectives, products and elementwise ops, whose arguments are updated in place now and then."""
    steps = [(rng.choice(names), rng.randrange(99), rng.randrange(99)) for _ in range(rng.randrange(8, 24))]

    def fn(*given: Any) -> Any:
        have, g = [*given], "0"
        for what, i, j in steps:
            a, b = have[i % len(have)], have[j % len(have)]
            if what in OPS:
                have.append(OPS[what](a, g))
            elif what == "product":
                have.append(a @ b * 0.1)
            elif what == "update":
                given[0].mul_(0.5).add_(b.mean())
            elif what == "late":  # started here, waited for after the next steps
                r = c.all_gather_into_tensor(a, 2, g)
                given[1].copy_(b * 2)
                have.append(waited(r)[:4] + a)
            else:
                have.append((a * 0.5 + b).relu())
        return have[-1], have[-2], have[len(have) // 2]  # (the others die young)

    return fn


def test_drawn_programs(group: Any) -> None:
    """What is read or written until a wait is not taken for anything else: no NaN, no stale value."""
    rng = random.Random(22)
    names = [*OPS, "product", "update", "late", "add", "add"]
    for i in range(PROGRAMS):
        fn = drawn(rng, names)
        given = [torch.randn(4, 4) for _ in range(3)]
        ours, theirs = [t.clone() for t in given], [t.clone() for t in given]
        torch._dynamo.reset()
        options = {"wrapper": "cpp" if i % 4 == 3 else "python", "fuse": i % 3 != 2, "verify": True}
        got = torch.compile(fn, backend="reflib", options=options)(*ours)
        for a, b in zip((*got, *ours), (*at_once(fn, *theirs), *theirs), strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, i=i: f"program {i}: {m}")


def test_starts_are_early_waits_are_late_and_memory_is_kept(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    n = group.group_name

    def fn(x: Any, w: Any) -> Any:
        s = waited(c.all_reduce(x @ w, "sum", n)) + 1
        g = waited(c.all_gather_into_tensor(x.sin(), 2, n)) * 2
        return s, g, (x.cos() @ w).relu()

    x = torch.randn(8, 8)
    lines = reflib.explain(fn, x, x).wrapper.partition("def call")[2].splitlines()
    called = ("mm_out(", "all_reduce__default(", "all_gather_into_tensor_default(", "wait_default(")
    order = [name for line in lines for name in called if name in line]
    assert order == ["mm_out(", *called[1:3], "mm_out(", "wait_default(", "wait_default("]
    waits = [line for line in lines if "wait_default" in line]
    assert "(mm, [])" in waits[0] and "[sin]" in waits[1]  # what a pending collective reads is not freed

    monkeypatch.setattr(collectives, "PENDING", 8 * 8 * 4)  # one result at a time
    program = reflib.explain(fn, x, x).fused
    order = [str(e.target).split(".")[1] for e in program.nodes if isinstance(e, Extern) and "mm" not in str(e.target)]
    assert order == ["all_reduce_", "wait", "all_gather_into_tensor", "wait"]


def test_a_result_is_not_written_while_another_of_its_call_is_waited_for(group: Any) -> None:
    """(As all of them may be written again then.)"""

    def fn(x: Any, y: Any) -> Any:
        kinds = (c.reduce_scatter_tensor_coalesced, c.all_gather_into_tensor_coalesced)
        each = [k([x, y], *more, 2, group.group_name) for k, more in zip(kinds, (["sum"], []))]
        each.append(c.all_reduce_coalesced([x, y.sin()], "sum", group.group_name))
        return [waited(r) + 1 for results in each for r in results]

    same(fn, torch.randn(4, 4), torch.randn(8, 3))


def test_sums_are_made_in_place_where_their_argument_is_not_needed(group: Any) -> None:
    from reflib.ranks import agree, candidates

    def own_op(x: Any, w: Any) -> Any:
        return candidates.all_reduce(x @ w, "0") * 2

    def product(x: Any, w: Any) -> Any:
        return waited(c.all_reduce(x @ w, "sum", "0")) * 2

    def needed(x: Any, w: Any) -> Any:
        y = x @ w
        return waited(c.all_reduce(y, "sum", "0")) * 2, y.sin()

    def part(x: Any, w: Any) -> Any:
        return waited(c.all_reduce((x @ w)[1:, ::2], "sum", "0")) * 2

    def written_back(x: Any, w: Any) -> Any:
        dist.all_reduce(x)
        return waited(c.broadcast(x + w, 0, "0")).cos()

    def read_after(x: Any, w: Any) -> Any:
        y = x.sum(0)
        dist.all_reduce(x)
        return y + x

    texts, n = {}, random.Random(22).randrange(3, 40)
    for fn, in_place in {own_op: 1, product: 1, needed: 0, part: 0, written_back: 2, read_after: 1}.items():
        given = torch.randn(n, n), torch.randn(n, n)
        program: Any = reflib.explain(fn, *(t.clone() for t in given), dynamic=False).fused
        calls = [str(x.target) for x in collectives.starts(program.nodes)]
        assert sum("_." in t for t in calls) == in_place, (fn.__name__, calls)
        texts[fn] = [t.partition(" at ")[0] for t in agree.by_group(program)["0"]]
        for args in (given, tuple(t.t() for t in given)):
            torch._dynamo.reset()
            ours, theirs = ([t.clone() for t in args] for _ in range(2))
            torch.testing.assert_close(torch.compile(fn, backend="reflib")(*ours), at_once(fn, *theirs))
            torch.testing.assert_close(ours, theirs)
    assert texts[own_op] == texts[product] == texts[needed]  # one rank may need what another does not


def test_what_storage_has_no_room_for_is_the_groups(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a meeting, or workers."""
    from reflib.ranks import candidates, symmetric, tune

    monkeypatch.setattr(tune, "_meeting", lambda *_: 1 / 0)
    x = torch.ones(symmetric.BYTES["cpu"] // 8 + 1)
    e = reflib.explain(lambda x: candidates.all_reduce(x * 2, "0"), x, autotune="blocking", cache_decisions=False)
    (d,) = [d for d in e.decisions if "all_reduce" in d.op]
    assert [r.name for r in d.candidates] == [str(d.winner)] == ["eager"] and "no other candidate" in d.reason
    assert [str(n.target) for n in collectives.starts(e.fused.nodes)] == ["_c10d_functional.all_reduce_.default"]
    r = custom_ops.registration(candidates.all_reduce)
    assert r is not None and r.min_speedup > 292 / 257  # NCCL's time with a copy in, which measuring has, over without


def test_a_decision_is_for_a_number_of_ranks(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from reflib.autotune import points
    from tests import rank_tasks as tasks

    reflib.register_custom_op_autotuning(tasks.sum_product, [tasks.by_reduce])
    seen: list[str] = []

    def find(q: Any, *more: Any) -> Any:
        seen.append(q.store_key)
        raise RuntimeError("seen")

    monkeypatch.setattr(points.known, "find", find)
    for size in (2, 2, 4):
        monkeypatch.setattr(type(group), "size", lambda self, size=size: size)
        with pytest.raises(Exception, match="seen"):
            reflib.explain(lambda x: tasks.sum_product(x, x) + 1, torch.ones(4, 4), autotune="blocking")
        torch._dynamo.reset()
    assert seen[0] and seen[0] == seen[1] != seen[2]


def test_what_cannot_communicate_says_so(group: Any) -> None:
    def fn(x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: waited(c.all_reduce(x, "sum", "0")), lambda x: x * 2, (x,))

    with pytest.raises(Exception, match=r"runs inside torch.cond or a loop at test_collectives.py:.* ranks whose data"):
        torch.compile(fn, backend="reflib")(torch.randn(4))
