"""The numerics table in the book is what this compiler does."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import reflib
from tests import numerics_table as numerics


def test_the_page_shows_the_stored_table() -> None:
    assert (numerics.BOOK / "numerics.md").read_text() == numerics.page()
    ops = [(k, n) for k, of in numerics.KINDS.items() for n in of]
    for device in ("cpu", "cuda"):
        of_mode = {m: [n for _, n in numerics.promised(ops, m, device)] for m in numerics.MODES}
        every = [(str(d)[6:], m, n) for d in numerics.DTYPES for m, names in of_mode.items() for n in names]
        _, rows = numerics.stored(device)
        assert [(r["dtype"], r["mode"], r["op"]) for r in rows] == every
        assert all(bool(r["why"]) is (r["from_eager"] != "0") for r in rows)
        assert not any(r["why"] for r in rows if r["mode"] == "eager")


@pytest.mark.parametrize("mode", numerics.MODES)
def test_a_sample_of_it_holds_here(mode: str) -> None:
    """On another kind of machine, or with another torch, eager's own functions are others."""
    rng = random.Random(mode)
    dtype = rng.choice(numerics.DTYPES)
    where, rows = numerics.stored("cpu")
    stored = {r["op"]: r for r in rows if (r["dtype"], r["mode"]) == (str(dtype)[6:], mode)}
    kinds = {n: k for k, of in numerics.KINDS.items() for n in of}
    for row in numerics.measured([(kinds[n], n) for n in rng.sample(sorted(kinds), 8)], dtype, mode, "cpu"):
        old = stored[row["op"]]
        if mode == "eager":
            assert row["from_eager"] == old["from_eager"] == "0", row
        elif where == numerics.here("cpu"):
            assert row["from_eager"] == old["from_eager"], (row, old)


def test_ulps() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, float("nan")])
    assert numerics.ulps(one, one) == 0 == numerics.ulps(torch.tensor(0.0), torch.tensor(-0.0))
    assert numerics.ulps(one[:1], torch.nextafter(one[:1], torch.tensor(2.0))) == 1
    assert numerics.ulps(torch.tensor([1e-45]), torch.tensor([-1e-45])) == 2
    assert numerics.ulps(one[3:], one[:1]) == float("inf")


@pytest.fixture
def deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def gpu_kernels(fn: Callable[..., Any], *args: torch.Tensor, **options: Any) -> list[str]:
    torch._dynamo.reset()
    e = reflib.explain(fn, *args, dynamic=False, target="sm_90", **options)
    return [k.source for stages in (e, e.backward) if stages for k in stages.kernels]


def test_what_varies_from_run_to_run_on_a_gpu_and_what_stops_it(deterministic: None) -> None:
    """As book/numerics.md says."""
    leaf, new = torch.randn(9, 7).requires_grad_(), torch.randn(12, 7)
    where, at = torch.randint(9, (12,)), torch.randint(9, (12, 7))

    def additions(**options: Any) -> int:
        def all_of_them(x: Any, where: Any, at: Any, new: Any) -> list[Any]:
            ops = numerics.ATOMIC.items()
            return [fn(x if n.endswith("(gradient)") else x.detach(), where, at, new) for n, fn in ops]

        return sum(s.count("tl.atomic_add") for s in gpu_kernels(all_of_them, leaf, where, at, new, **options))

    def stores(name: str) -> bool:
        sources = gpu_kernels(numerics.STORED[name], leaf.detach(), where, at, new)
        assert not any("atomic" in s for s in sources)
        return bool(sources)

    assert additions() == len(numerics.ATOMIC) + 1  # a mean also counts
    assert all(map(stores, numerics.STORED))
    assert additions(atomics=False) == 0
    assert not reflib.Options(numerics="eager").atomics and not reflib.Options(batch_invariant=True).atomics
    torch.use_deterministic_algorithms(True)
    assert additions() == 0 and not any(map(stores, numerics.STORED))


def test_no_sum_in_the_table_varies_from_run_to_run() -> None:
    def program(x: Any, y: Any) -> list[Any]:
        sums = [fn(x) for fn in (*numerics.SUMS.values(), *numerics.COMPOSITES.values())]
        return sums + [fn(x, y) for fn in numerics.PRODUCTS.values()]

    assert not any("atomic" in s for s in gpu_kernels(program, torch.randn(5, 6), torch.randn(5, 6)))
