"""Custom ops that choose their own implementation, from registration to the compiled call."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import reflib
from reflib.autotune.measure import Result
from reflib.autotune.winner import pick_winner as winner_of
from reflib.ir.decision import Candidate, Key
from reflib.ir.program import Choice, Variants
from reflib.lower.lower import RESERVED
from reflib.wrap.runtime import namespace

count = iter(range(10_000))


def by_size(e: Any) -> Variants:
    """The node with a variant for each range of sizes."""
    return next(n for n in e.scheduled.nodes if isinstance(n, Variants) and not n.of_kernels)


def split_k(a: torch.Tensor, b: torch.Tensor, splits: int = 4) -> torch.Tensor:
    m, k = a.shape
    a3 = a.reshape(m, splits, k // splits).transpose(0, 1)
    return torch.bmm(a3, b.reshape(splits, k // splits, -1)).sum(0)


def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def fours(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert a.shape[0] % 4 == 0
    return a @ b


def make_op(body: Callable[..., Any] = plain, slow: bool = True) -> Any:
    """A fresh custom op; ``slow``: its eager implementation takes a millisecond, so that a winner is sure."""

    @torch.library.custom_op(f"tests::product{next(count)}", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if slow:
            for _ in range(10):
                (torch.randn(100, 100) @ torch.randn(100, 100)).sum()
        return body(a, b)

    @product.register_fake
    def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.new_empty(a.shape[0], b.shape[1])

    return product


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def by_rows(op: Any, splits: list[int], *configs: Callable[..., Any]) -> None:
    """Register ``configs``, to be chosen between by the number of rows of ``a``."""
    on = {"tensor_name": "a", "dim": 0}
    reflib.register_custom_op_autotuning(op, configs=list(configs), split_points=splits, dispatch_on=on)


def explained(op: Any, rows: int = 32, **limits: int) -> Any:
    """``op`` + 1, whose ``a`` may have another number of rows at each call; all of them, or within ``limits``."""
    a, b = torch.randn(rows, 8), torch.randn(8, 4)
    torch._dynamo.mark_dynamic(a, 0, **limits)
    return reflib.explain(lambda a, b: op(a, b) + 1, a, b, autotune="blocking", verify=True)


def check(f: Callable[..., Any], *args: torch.Tensor) -> None:
    """Compiled with tuning, ``f`` returns what it returns eagerly."""
    torch._dynamo.reset()
    assert close(reflib.compile(f, autotune="blocking")(*args), f(*args))


def test_a_threshold_keeps_the_default() -> None:
    op = make_op()
    reflib.register_custom_op_autotuning(op, configs=[plain], min_speedup_threshold=1e9)
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    d = reflib.explain(lambda a, b: op(a, b) * 3, a, b, autotune="blocking").decisions[0]
    assert d.winner == "eager" and {c.name for c in d.candidates} == {"eager", "plain"}


def test_equal_regions_are_decided_once() -> None:
    op = make_op()
    reflib.register_custom_op_autotuning(op, configs=[plain])

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            a = torch.relu(op(a, b))
        return a

    a, b = torch.randn(8, 8), torch.randn(8, 8)
    e = reflib.explain(f, a, b, autotune="blocking")
    decided = [d for d in e.decisions if d.config is None]
    assert len(decided) == 3 and sum("decided before" in d.reason for d in decided) >= 1
    check(f, a, b)


def test_for_a_named_target_the_choice_is_shown_and_nothing_is_measured() -> None:
    op = make_op()
    reflib.register_custom_op_autotuning(op, configs=[plain, split_k])
    a, b = torch.randn(16, 4096), torch.randn(4096, 16)
    e = reflib.explain(lambda a, b: op(a, b) + 1, a, b, autotune="blocking", target="sm_90", verify=True)
    choice = next(n for n in e.program.nodes if isinstance(n, Choice))
    assert [a.name for a in choice.variants] == ["eager", "plain", "split_k"]
    assert e.decisions[0].winner == "eager" and "nothing is measured" in e.decisions[0].reason


def test_a_tensor_that_a_candidate_holds_is_itself_when_it_is_measured() -> None:
    @torch.library.custom_op(f"tests::lower{next(count)}", mutates_args=())
    def lower(x: torch.Tensor) -> torch.Tensor:
        torch.randn(300, 300) @ torch.randn(300, 300)
        return torch.tril(x)

    @lower.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    table = torch.ones(64, 64).tril()

    def by_table(x: torch.Tensor) -> torch.Tensor:
        return x * table

    reflib.register_custom_op_autotuning(lower, configs=[by_table])
    x = torch.randn(64, 64)
    e = reflib.explain(lambda x: lower(x * 2) + 1, x, autotune="blocking", verify=True)
    assert e.decisions[0].winner == "by_table", e.decisions
    torch._dynamo.reset()
    assert close(reflib.compile(lambda x: lower(x * 2) + 1, autotune="blocking")(x), lower(x * 2) + 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", sorted(RESERVED))
def test_an_op_may_be_named_as_what_the_wrapper_calls(name: str) -> None:
    @torch.library.custom_op(f"tests::{name}", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    x = torch.randn(4, 6)
    assert close(reflib.compile(lambda x: double(double(x)[1:3] + 1).sum(), verify=True)(x), (x[1:3] * 4 + 2).sum())


def test_those_are_all_its_names() -> None:
    assert set(namespace()) <= RESERVED


# -- ranges -----------------------------------------------------------------------------------------
def clocked(monkeypatch: Any, time_us: Callable[[str, dict[str, int]], float]) -> None:
    """Measuring with times from a formula of a candidate's name and the sizes, so that the outcome is certain."""

    def measured(request: Any, build: Any, makers: Any = None, constants: Any = None) -> Result:
        times = {name: time_us(name, request.sizes) for name in request.programs}
        rows = tuple(Candidate(request.key(name), "ok", t, spread=0.01, error=0.0) for name, t in times.items())
        winner, reason = winner_of(rows, request.default, request.min_speedup)
        return Result(rows, winner, reason)

    monkeypatch.setattr(importlib.import_module("reflib.autotune.points"), "measure", measured)
    monkeypatch.setattr(importlib.import_module("reflib.tuning"), "_tuner", lambda s, store: None)  # all of it here


def test_sizes_that_cannot_come_are_not_measured(monkeypatch: Any) -> None:
    op = make_op(slow=False)
    clocked(monkeypatch, lambda name, sizes: 1.0 if (name == "plain") == (max(sizes.values()) <= 16) else 10.0)
    by_rows(op, [4, 16, 32, 64], plain)
    e = explained(op, 12, min=6, max=20)
    sizes = {int(c.where.partition("=")[2]) for c in e.decisions[0].candidates}
    assert min(sizes) >= 6 and max(sizes) == 20 and 16 in sizes
    assert [[p.value for p in v.predicate] for v in by_size(e).variants] == [[16], []]


def test_a_range_is_decided_by_the_sizes_that_there_is_room_for(monkeypatch: Any) -> None:
    op = make_op(slow=False)
    clocked(monkeypatch, lambda name, sizes: 1.0 if name == "plain" else 10.0)
    decide = importlib.import_module("reflib.autotune.points")
    timed = decide.measure

    def measured(request: Any, build: Any, *more: Any) -> Result:
        found = timed(request, build, *more)
        if max(request.sizes.values()) < 65536:
            return found
        return Result(tuple(Candidate(Key(name), "skipped") for name in request.programs), request.default, "no room")

    monkeypatch.setattr(decide, "measure", measured)
    by_rows(op, [64], plain)
    d = explained(op).decisions[0]
    assert d.winner == "plain" and "over 2 sizes" in d.reason
    assert sum(c.status == "skipped" for c in d.candidates) == 2


def test_a_size_that_a_call_will_say_can_be_dispatched_on(monkeypatch: Any) -> None:
    op = make_op(slow=False)
    clocked(monkeypatch, lambda name, sizes: 1.0 if (name == "plain") == (max(sizes.values()) <= 2) else 10.0)
    by_rows(op, [2], plain)
    g = reflib.compile(lambda a, b, m: op(a[m], b) + 1, autotune="blocking", fullgraph=True, verify=True)
    a, b = torch.randn(4, 8), torch.randn(8, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for mask in ([True, False, True, True], [True, False, True, False], [True, False, False, False]):
            m = torch.tensor(mask)
            assert close(g(a, b, m), a[m] @ b + 1)


def test_neighbouring_ranges_with_one_winner_merge(monkeypatch: Any) -> None:
    op = make_op(slow=False)
    by_rows(op, [8, 64], plain)
    clocked(monkeypatch, lambda name, sizes: 1.0 if name == "plain" else 10.0)
    e = explained(op)
    assert e.decisions[0].winner == "plain"
    assert not any(isinstance(n, Variants) and not n.of_kernels for n in e.scheduled.nodes)

    torch._dynamo.reset()
    clocked(monkeypatch, lambda name, sizes: 1.0 if (name == "plain") == (max(sizes.values()) <= 64) else 10.0)
    node = by_size(explained(op))
    assert [[p.value for p in v.predicate] for v in node.variants] == [[64], []]
    assert "plain" in node.variants[0].name and "eager" in node.variants[1].name


def test_guards_of_a_winner_are_checked_at_every_call() -> None:
    op = make_op()

    reflib.register_custom_op_autotuning(op, configs=[fours])

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return op(a, b) * 2

    a, b = torch.randn(32, 8), torch.randn(8, 4)
    torch._dynamo.mark_dynamic(a, 0)
    e = reflib.explain(f, a, b, autotune="blocking", verify=True)
    assert e.decisions[0].winner == "fours"
    node = by_size(e)
    assert [p.kind for p in node.variants[0].predicate] == ["divisible"] and not node.variants[1].predicate
    torch._dynamo.reset()
    g = reflib.compile(f, autotune="blocking")
    torch._dynamo.mark_dynamic(a, 0)
    for rows in (32, 12, 7, 4):
        x = torch.randn(rows, 8)
        assert close(g(x, b), f(x, b))


def test_an_op_may_be_named_as_a_node_is() -> None:
    @torch.library.custom_op("tests::op0", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (torch.randn(300, 300) @ torch.randn(300, 300)).sum()
        return a @ b

    product.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))

    reflib.register_custom_op_autotuning(product, configs=[fours])
    g = reflib.compile(product, autotune="blocking", dynamic=True, verify=True)
    for rows in (32, 7):
        a, b = torch.randn(rows, 8), torch.randn(8, 4)
        assert close(g(a, b), a @ b)


def test_patches_compile_the_winner_with_other_options() -> None:
    op = make_op()
    reflib.register_custom_op_autotuning(op, configs=[reflib.CustomOpConfig(split_k, {"fuse": False}, splits=4)])
    a, b = torch.randn(8, 8), torch.randn(8, 4)

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(op(a, b)) * 2

    e = reflib.explain(f, a, b, autotune="blocking", verify=True)
    assert e.decisions[0].winner == "split_k(splits=4)"
    assert len(e.kernels) == 3, [k.name for k in e.kernels]  # the sum, relu and * 2, each by itself
    check(f, a, b)


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_of_torch_compile_measure(mode: str) -> None:
    f = torch.compile(lambda a, b: torch.relu(a @ b), backend="reflib", mode=mode)
    a, b = torch.randn(4, 1024), torch.randn(1024, 4)
    assert close(f(a, b), torch.relu(a @ b))


def test_an_implementation_is_measured_with_the_best_of_the_ops_that_it_calls(monkeypatch: Any) -> None:
    """Three deep: what each calls is decided first, and again where it stands once that has won."""
    ops = [make_op(slow=False) for _ in range(3)]
    monkeypatch.setattr(importlib.import_module("reflib.tuning"), "_tuner", lambda s, store: None)
    asked = []

    def measured(request: Any, *_: Any) -> Result:
        calls = {name: sum(str(op._opoverload) in str(p) for op in ops) for name, p in request.programs.items()}
        asked.append(calls)
        rows = tuple(Candidate(request.key(n), "ok", 1.0 + c + (n == "other") / 2, spread=0.01, error=0.0)
                     for n, c in calls.items())  # fmt: skip
        return Result(rows, *winner_of(rows, request.default, request.min_speedup))

    def first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops[1](a, b) + 0

    def second(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops[2](a, b).clone()

    def other(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b + 0

    monkeypatch.setattr(importlib.import_module("reflib.autotune.points"), "measure", measured)
    for op, own in zip(ops, ([first, other], [second, other], [lambda a, b: (b.t() @ a.t()).t().contiguous()])):
        reflib.register_custom_op_autotuning(op, configs=own)
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    e = reflib.explain(lambda a, b: torch.relu(ops[0](a, b)), a, b, autotune="blocking", verify=True)
    assert [str(d.winner) for d in e.decisions if d.op.startswith("tests.")] == ["first", "second", "<lambda>"]
    assert {"eager": 1, "first": 0, "other": 0} in asked and not any(str(o._opoverload) in e.wrapper for o in ops)
    check(lambda a, b: torch.relu(ops[0](a, b)), a, b)


def test_products_inside_an_implementation_are_decided_in_their_turn() -> None:
    """By the static rule while it is measured; once it has won, by measuring."""
    op = make_op()
    reflib.register_custom_op_autotuning(op, configs=[plain])
    a, b = torch.randn(8, 1024), torch.randn(1024, 8)  # long enough for decompose-K: the product is a Choice itself

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(op(a, b))

    e = reflib.explain(f, a, b, autotune="blocking", verify=True)
    assert {c.name: c.status for c in e.decisions[0].candidates} == {"eager": "ok", "plain": "ok"}, e.decisions
    assert e.decisions[0].winner == "plain", e.decisions
    assert e.decisions[1].op == "aten.mm" and len(e.decisions[1].candidates) > 2
    check(f, a, b)


def test_a_size_outside_is_logged_once_for_each_op_even_where_one_winner_serves_all(
    caplog: Any, monkeypatch: Any
) -> None:
    clocked(monkeypatch, lambda name, sizes: 1.0 if name == "plain" else 10.0)
    ops = [make_op(slow=False), make_op(slow=False)]
    for op in ops:
        reflib.register_custom_op_autotuning(
            op, configs=[plain], split_points=[8], dispatch_on={"tensor_name": "a", "dim": 0, "range_upper_bound": 64}
        )
        g = reflib.compile(lambda a, b, op=op: op(a, b) + 1, autotune="blocking")
        for rows in (32, 100, 200):
            a, b = torch.randn(rows, 8), torch.randn(8, 4)
            torch._dynamo.mark_dynamic(a, 0)
            assert close(g(a, b), a @ b + 1)
        torch._dynamo.reset()
    assert caplog.text.count("outside the sizes that were tuned") == 2
