"""What a range's candidates are, and that what was measured is what runs."""

from typing import Any

import pytest
import torch
from test_autotuning import by_rows, by_size, clocked, close, count, explained, fours, make_op, plain

import reflib
from reflib import lab
from reflib.ir.program import Variants, holds, kernel_variants


def test_a_trace_that_fails_at_the_first_calls_size_is_made_for_the_ranges(monkeypatch: Any) -> None:
    op = make_op(slow=False)

    def two_ways(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b if a.shape[0] <= 64 else torch.stack([a @ b]).sum(0)

    def never(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    clocked(monkeypatch, lambda name, sizes: {"fours": 2.0, "eager": 10.0}.get(name, 1.0 + max(sizes.values()) / 64))
    reflib.register_custom_op_autotuning(
        op, configs=[fours, two_ways, never], split_points=[64],
        dispatch_on={"tensor_name": "a", "dim": 0, "range_upper_bound": 1024},
    )  # fmt: skip
    e = explained(op, 10)
    rows = e.decisions[0].candidates
    assert {c.name for c in rows} == {"eager", "fours", "two_ways", "two_ways (traced at 1024)", "never"}
    assert [c.status for c in rows if c.name == "never"] == ["raised"]
    assert [c.status for c in rows if c.name == "fours"].count("ok") >= 4
    assert e.decisions[0].winner == "two_ways | fours"


def test_where_guards_fail_the_ranges_own_default_runs(monkeypatch: Any) -> None:
    op = make_op(slow=False)

    def cost(name: str, sizes: dict[str, int]) -> float:
        few = max(sizes.values()) <= 64
        return {"fours": 1.0 if few else 20.0, "plain": 20.0 if few else 1.0, "eager": 10.0}[name]

    clocked(monkeypatch, cost)
    by_rows(op, [64], fours, plain)

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return op(a, b) + 1

    a, b = torch.randn(32, 8), torch.randn(8, 4)
    torch._dynamo.mark_dynamic(a, 0, min=16, max=1024)
    e = reflib.explain(f, a, b, autotune="blocking", verify=True)
    variants = by_size(e).variants
    assert [[(p.kind, p.value) for p in v.predicate] for v in variants] == [
        [("at_most", 64), ("divisible", 4)], [("at_most", 64)], [],
    ]  # fmt: skip
    assert [v.name.rpartition(": ")[2] for v in variants] == ["fours", "eager", "plain"]
    torch._dynamo.reset()
    g = reflib.compile(f, autotune="blocking", verify=True)
    for rows in (32, 41, 64, 65, 300):
        a = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(a, 0, min=16, max=1024)
        assert close(g(a, b), f(a, b)), rows


def test_a_guard_that_the_range_implies_needs_no_other_arm(monkeypatch: Any) -> None:
    op = make_op(slow=False)

    def few(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.shape[0] <= 64
        return a @ b

    clocked(monkeypatch, lambda name, sizes: 1.0 if name == "few" else 10.0)
    by_rows(op, [64], few)
    variants = by_size(explained(op)).variants
    assert [[(p.kind, p.value) for p in v.predicate] for v in variants] == [[("at_most", 64)], []]


def test_the_winners_kernels_are_launched_with_its_patches() -> None:
    """``persistent_limit`` is used when kernels are chosen, after deciding."""

    @torch.library.custom_op(f"tests::soft{next(count)}", mutates_args=())
    def soft(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    def written(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    soft.register_fake(torch.empty_like)
    patched = reflib.CustomOpConfig(written, {"persistent_limit": 64})
    reflib.register_custom_op_autotuning(soft, configs=[patched, lambda x: torch.softmax(x, -1)])

    def kernels(e: Any) -> list[str]:
        return [n.variants[0].kernel.config.reduction for n in kernel_variants(e.scheduled.nodes)]

    def f(x: torch.Tensor) -> torch.Tensor:
        return soft(x) + 1

    x = torch.randn(8, 512)
    with lab.told_times(lambda name, sizes: 1.0 if name == "written" else 10.0):
        e = reflib.explain(f, x, autotune="blocking", target="sm_90", verify=True)
    (variant,) = by_size(e).variants
    assert variant.patches == (("persistent_limit", 64),)
    assert kernels(e) == ["looped"]
    with lab.told_times(lambda name, sizes: 1.0 if name == "<lambda>" else 10.0):
        e = reflib.explain(f, x, autotune="blocking", target="sm_90", verify=True)
    assert kernels(e) == ["persistent"]


def test_a_size_made_of_two_symbols_is_decided_once_and_that_is_said(caplog: Any, monkeypatch: Any) -> None:
    op = make_op(slow=False)
    clocked(monkeypatch, lambda name, sizes: 1.0 if name == "plain" else 10.0)
    by_rows(op, [64], plain)
    x, y, b = torch.randn(5, 8), torch.randn(7, 8), torch.randn(8, 4)
    for t in (x, y):
        torch._dynamo.mark_dynamic(t, 0)
    e = reflib.explain(lambda x, y, b: op(torch.cat([x, y]), b) + 1, x, y, b, autotune="blocking", verify=True)
    assert e.decisions[0].winner == "plain"
    assert caplog.text.count("depends on several sizes") == 1


def test_what_uses_a_tensors_value_is_told_so() -> None:
    @torch.library.custom_op(f"tests::scaled{next(count)}", mutates_args=())
    def scaled(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return x * s

    scaled.register_fake(lambda x, s: torch.empty_like(x))
    reflib.register_custom_op_autotuning(scaled, configs=[lambda x, s: x * float(s.item())])
    e = reflib.explain(lambda x, s: scaled(x, s) + 1, torch.randn(4), torch.tensor(2.0), autotune="blocking")
    row = e.decisions[0].candidates[1]
    assert row.status == "unsupported" and "it uses a tensor's value, known only at run time (.item()" in row.why


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["corner", "first", "second", "none", "stairs"])
def test_pairs_of_ranges(kind: str, monkeypatch: Any) -> None:
    """Of two sizes: each call runs what is best of its pair; ranges with one winner are joined."""
    op = make_op(slow=False)

    def few(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    def many(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (b.t() @ a.t()).t().contiguous()

    def best(m: int, n: int) -> str:
        holds = {
            "corner": m <= 16 and n <= 64, "first": m <= 16, "second": n <= 64, "none": False,
            "stairs": (m <= 16 and n <= 8) or (16 < m <= 32 and n <= 64),
        }  # fmt: skip
        return "few" if holds[kind] else "many"

    def cost(name: str, sizes: dict[str, int]) -> float:
        m, n = (sizes[s] for s in sorted(sizes, key=order.index)) if len(sizes) == 2 else (1, 1)
        return 1.0 if name == best(m, n) else 9.0

    reflib.register_custom_op_autotuning(
        op, configs=[few, many], split_points=[[16, 32], [8, 64]],
        dispatch_on=[{"tensor_name": "a", "dim": 0, "range_upper_bound": 512},
                     {"tensor_name": "b", "dim": 1, "range_upper_bound": 1024}],
    )  # fmt: skip
    a, b = torch.randn(11, 5), torch.randn(5, 13)
    torch._dynamo.mark_dynamic(a, 0)
    torch._dynamo.mark_dynamic(b, 1)
    f = lambda a, b: op(a, b) + 1  # noqa: E731
    p = reflib.explain(f, a, b).program
    order = [str(p.buffers[n].shape[d]) for n, d in zip([n for n in p.inputs if isinstance(n, str)], (0, 1))]
    clocked(monkeypatch, cost)
    torch._dynamo.reset()
    e = reflib.explain(f, a, b, autotune="blocking", verify=True)
    found = [n for n in e.scheduled.nodes if isinstance(n, Variants) and not n.of_kernels]
    assert bool(found) == (kind != "none")
    if kind == "none":
        return
    for m in (2, 16, 17, 32, 33, 600):
        for n in (2, 8, 9, 64, 65, 2000):
            sizes = dict(zip(order, (m, n)))
            runs = next(v for v in found[0].variants if all(holds(p, sizes) for p in v.predicate))
            assert runs.name.endswith(best(m, n)), (m, n, runs.name)
    wanted = {"corner": 3, "first": 2, "second": 2, "stairs": 5}[kind]
    assert len(found[0].variants) <= wanted + 1, [v.name for v in found[0].variants]
    if kind == "stairs":
        clocked(monkeypatch, lambda name, sizes: 1.0 if (name == "few") == (min(sizes.values()) <= 16) else 9.0)
        torch._dynamo.reset()
        g = reflib.compile(f, autotune="blocking", verify=True)
        for m, n in ((11, 13), (16, 8), (20, 65), (20, 64), (33, 2), (700, 9)):
            a, b = torch.randn(m, 5), torch.randn(5, n)
            torch._dynamo.mark_dynamic(a, 0)
            torch._dynamo.mark_dynamic(b, 1)
            assert close(g(a, b), f(a, b)), (m, n)
