"""What is not compiled, and what is not measured: never what could have won, by what was measured on an H200."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_matmul_choice import H200, HALF, OFF, SHAPES, TARGETS, product

from reflib.choose import roofline as model
from reflib.choose.matmul import FAR, LEAST, MOST, NEAR, estimate, problem, tilings, worth_compiling
from reflib.choose.report import Report, prune
from reflib.choose.roofline import Problem, bound, cannot_win, roofline
from reflib.choose.split import known
from reflib.ir.program import Tiling
from reflib.target import parse_target
from tests.bench.matmul_cases import cases

TILING = re.compile(
    r"triton (?P<kind>\w+) (?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+) w(?P<num_warps>\d+) s(?P<num_stages>\d+)"
    r"(?P<turned> turned)?( splits (?P<splits>\d+)(\+(?P<reducers>\d+))?)?( wk(?P<warps_k>\d+))?"
)


def tiling(name: str) -> Tiling | None:
    """Of a candidate, by its name."""
    match = TILING.fullmatch(name)
    if match is None:
        return None
    said = {what: value for what, value in match.groupdict().items() if value is not None}
    kind, turned = said.pop("kind"), said.pop("turned", None) is not None
    return Tiling(kind, turned=turned, **{what: int(value) for what, value in said.items()})


Rows = dict[str, float]  # candidate -> us


def recorded(root: Path) -> dict[tuple[int, int, int], Rows]:
    """What every candidate for relu(a @ b) in float16 took on an H200, by (M, N, K)."""
    data = json.loads((root / "notebooks" / "recorded" / "decompose-k.h200.json").read_text())
    found: dict[tuple[int, int, int], Rows] = {}
    for row in data["rows"]:
        if row["name"] == "candidates" and row["metric"] == "time" and row.get("value"):
            at = row["at"]
            found.setdefault((at["M"], at["N"], at["K"]), {})[row["case"]] = row["value"]
    return found


def measured(root: Path) -> Iterator[tuple[Problem, Rows, str, Tiling, float]]:
    """(product, all rows, a tiling's name, itself, its us)."""
    for shape, rows in recorded(root).items():
        for name, us in rows.items():
            found = tiling(name)
            if found is not None:
                assert f"triton {found}" == name
                yield problem(product(*shape)[0]), rows, name, found, us


# -- before compiling -------------------------------------------------------------------------------
def test_what_was_fastest_is_still_compiled(root: Path) -> None:
    found = recorded(root)
    assert len(found) >= 5
    for shape, rows in found.items():
        times = {name: us for name, us in rows.items() if tiling(name) is not None}
        kept = {f"triton {t}" for t in tilings(product(*shape)[0], H200, OFF)}
        assert min(us for name, us in times.items() if name in kept) <= 1.01 * min(times.values()), shape


def test_no_product_has_more_than_a_dozen() -> None:
    for of in cases("cuda").values():
        for case in of[::3]:
            t, _ = product(case.m, case.n, case.k, dtype=case.dtype)
            found, p = tilings(t, H200, OFF), problem(t)
            assert 0 < len(found) <= MOST
            assert len({str(c) for c in found}) == len(found)
            best = min(found, key=lambda c: estimate(p, c, H200))
            assert found[0] in known(p, H200) or estimate(p, found[0], H200) == estimate(p, best, H200)


def ranked(*made: tuple[str, float]) -> list[tuple[Tiling, float]]:
    return [(Tiling(kind, 64, 64, 16 * i), seconds) for i, (kind, seconds) in enumerate(made, 1)]


def test_every_kind_that_is_near_has_its_places() -> None:
    made = ranked(*[("split", 1 + i / 100) for i in range(20)], *[("tiled", 1.5 + i / 100) for i in range(20)])
    found = worth_compiling(made, 12)
    assert [c.kind for c in found] == ["split", "tiled"] + ["split"] * 7 + ["tiled"] * (LEAST - 1)
    assert found[:2] == [made[0][0], made[20][0]]


def test_a_kind_that_is_far_has_one_place_or_none() -> None:
    for times, count in ((NEAR["tiled"] - 0.1, 12), (NEAR["tiled"] + 0.1, 1), (FAR["tiled"] + 0.1, 0)):
        made = ranked(("split", 1.0), *[("tiled", times)] * 20)
        assert [c.kind for c in worth_compiling(made, 13)] == ["split"] + ["tiled"] * count
    assert FAR["split"] == NEAR["split"]
    assert len(worth_compiling(ranked(("tiled", 1.0), *[("split", 1.3)] * 5), 12)) == 1


def test_a_tiling_far_behind_its_kind_has_none() -> None:
    assert len(worth_compiling(ranked(("tiled", 1.0), ("tiled", 1.9), ("tiled", 2.1)), 12)) == 2


def test_never_more_than_asked_for() -> None:
    made = ranked(("split", 1.0), ("tiled", 1.1), ("persistent", 1.2), *[("tiled", 1.3)] * 9)
    for most in range(6):
        assert worth_compiling(made, most) == [c for c, _ in made[:most]]
    assert worth_compiling([], 12) == []


# -- the bound --------------------------------------------------------------------------------------
def test_nothing_was_faster_than_its_bound(root: Path) -> None:
    rows = list(measured(root))
    assert len(rows) > 50
    shares = {name: bound(p, t, H200) * 1e6 / us for p, _, name, t, us in rows}
    assert max(shares.values()) < 0.9, max(shares, key=lambda name: shares[name])
    assert max(shares.values()) > 0.2  # it says something


def test_nothing_that_could_have_won_is_pruned_by_it(root: Path) -> None:
    pruned = 0
    for p, rows, name, t, us in measured(root):
        best = min(rows, key=lambda name: rows[name])
        why = prune((), H200, product=(p, t), best=(best, rows[best]))
        assert not why or us > 1.03 * rows[best], (name, why)
        pruned += bool(why)
    print(f"{pruned} recorded candidates need not have been measured")


def test_none_is_above_the_estimate() -> None:
    for name in TARGETS:
        there = parse_target(name)
        for shape in SHAPES[::2]:
            for dtype, precision in ((HALF, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee")):
                t, _ = product(*shape, dtype=dtype, precision=precision)
                p = problem(t)
                for c in tilings(t, there, OFF):
                    assert 0 <= bound(p, c, there) <= estimate(p, c, there), (name, shape, dtype, str(c))


def test_a_bound_knows_waves_and_whole_blocks() -> None:
    t = Tiling("tiled", 128, 128, 64, 8, 4)

    def of(m: int, n: int, k: int) -> float:
        return bound(problem(product(m, n, k)[0]), t, H200)

    assert of(128, 133 * 128, 4096) == pytest.approx(2 * of(128, 132 * 128, 4096))
    assert of(1, 1, 64) == of(128, 128, 1)
    flops = 2 * 128 * 128 * 4096
    assert of(128, 128, 4096) == pytest.approx(flops / (4096 * 2.0e9))  # one multiprocessor's
    assert of(4096, 4096, 4096) >= 0.8 * roofline((1, 4096, 4096, 4096), HALF, H200)[2]


def test_a_bound_knows_what_is_read_and_what_is_cold() -> None:
    p, t = problem(product(16, 65536, 16384)[0]), Tiling("tiled", 16, 64, 128, 4, 4, turned=True)
    weights = 65536 * 16384 * 2
    assert bound(p, t, H200) >= (weights - 64e6) / 5e12
    small = problem(product(16, 4096, 4096)[0])
    assert bound(small, t, H200, cold_bytes=4096 * 4096 * 2) > bound(small, t, H200)
    thin = Tiling("tiled", 16, 16, 64, 2, 4)
    assert bound(problem(product(4096, 4096, 4096)[0]), thin, H200) > 2e-4  # it reads 16 MB a row of tiles


def test_a_bound_knows_that_sums_wait_for_each_other() -> None:
    p = problem(product(16, 16, 65536)[0])
    one = bound(p, Tiling("tiled", 16, 16, 64, 2, 4), H200)
    assert one == pytest.approx(65536 / 16 * model.CHAIN / 2.0e9)
    assert bound(p, Tiling("split", 16, 16, 64, 2, 4, splits=64), H200) < one / 32
    assert bound(p, Tiling("split", 16, 16, 64, 2, 4, splits=1, warps_k=2), H200) == pytest.approx(one / 2)


def test_a_bound_knows_what_parts_cost() -> None:
    p = problem(product(512, 512, 32768)[0])
    few, many = (Tiling("split", 128, 128, 64, 8, 3, splits=s) for s in (8, 512))
    assert bound(p, many, H200) > bound(p, few, H200)


def test_without_tensor_cores_ordinary_arithmetic_bounds() -> None:
    t = Tiling("tiled", 64, 64, 32, 4, 2)
    half, t4 = problem(product(1024, 1024, 1024)[0]), parse_target("sm_75")
    full = problem(product(1024, 1024, 1024, dtype=torch.float32)[0])
    assert bound(half, t, t4) == bound(full, t, t4) > 10 * bound(half, t, H200)
    assert bound(full, t, H200) > 10 * bound(half, t, H200)


def test_nothing_is_known_of_others() -> None:
    p, t = problem(product(4096, 4096, 4096)[0]), Tiling("tiled", 64, 64, 64, 4, 3)
    assert bound(p, t, parse_target("gfx942")) == bound(p, t, replace(H200, arch="sm_87")) == 0.0


def test_a_margin_is_left() -> None:
    assert cannot_win(40e-6, 30.0) and not cannot_win(40e-6, 39.0) and not cannot_win(40e-6, None)


# -- after compiling --------------------------------------------------------------------------------
def kernel(stack: int = 0, shared: int = 0, blocks: int | None = 2, registers: int = 128) -> tuple[Report, ...]:
    return (Report("k", "sm_86", registers, stack, shared, 256, blocks, "registers"),)


A6000 = parse_target("sm_86")


def test_what_cannot_run() -> None:
    assert prune(kernel(shared=180 * 1024), A6000) == "needs 180 KB of shared memory, the device has 99"
    why = prune(kernel(blocks=0, registers=300), A6000)
    assert why == "cannot be launched: 256 threads of 300 registers are too much for sm_86"
    assert prune(kernel(), A6000) == prune((), A6000) == ""


def test_what_spills_among_those_that_do_not() -> None:
    clean = [kernel() for _ in range(14)]
    why = "spills 312 bytes a thread, which 14 of its 15 siblings do not"
    assert prune(kernel(312), A6000, [*clean, kernel(96)]) == why
    assert prune((*kernel(), *kernel(312)), A6000, [*clean, kernel(96)]) == why  # any of its kernels
    assert prune(kernel(312), A6000) == ""
    assert prune(kernel(312), A6000, [kernel(), kernel(64)]) == ""  # half of them
    assert prune(kernel(96), A6000, clean) == ""  # perhaps outside of the loop
    unknown = (replace(kernel()[0], stack=None),)
    assert prune(unknown, A6000, clean) == ""
    assert prune(kernel(312), A6000, [unknown] * 3) == ""


def test_what_is_too_slow() -> None:
    p, t = problem(product(4096, 4096, 4096)[0]), Tiling("tiled", 16, 16, 32, 2, 3)
    least = bound(p, t, A6000) * 1e6
    why = prune(kernel(), A6000, product=(p, t), best=("aten", 30.1))
    assert why == f"cannot win: at least {least:.1f} us, aten takes 30.1 us"
    assert prune(kernel(), A6000, product=(p, t), best=("aten", least)) == ""
    assert prune(kernel(), A6000, product=(p, t)) == prune(kernel(), A6000, best=("aten", 1.0)) == ""
