"""What is not compiled, and what is not measured: never what could have won, by what was measured on an H200."""

import json
import re
from dataclasses import replace
from pathlib import Path

from test_matmul_choice import H200, OFF, product

from reflib.autotune.matmul import FAR, LEAST, MOST, NEAR, estimate, problem, tilings, worth_compiling
from reflib.autotune.report import Report, prune
from reflib.autotune.split_k import known
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


def test_what_is_far_has_one_place_or_none() -> None:
    for times, count in ((NEAR["tiled"] - 0.1, 12), (NEAR["tiled"] + 0.1, 1), (FAR["tiled"] + 0.1, 0)):
        made = ranked(("split", 1.0), *[("tiled", times)] * 20)
        assert [c.kind for c in worth_compiling(made, 13)] == ["split"] + ["tiled"] * count
    assert len(worth_compiling(ranked(("tiled", 1.0), *[("split", 1.3)] * 5), 12)) == 1
    assert len(worth_compiling(ranked(("tiled", 1.0), ("tiled", 1.9), ("tiled", 2.1)), 12)) == 2, "far behind its kind"
    made = ranked(("split", 1.0), ("tiled", 1.1), ("persistent", 1.2), *[("tiled", 1.3)] * 9)
    assert all(worth_compiling(made, most) == [c for c, _ in made[:most]] for most in range(6))
    assert worth_compiling([], 12) == []


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
    why = "spills 312 bytes per thread, which 14 of its 15 siblings do not"
    assert prune(kernel(312), A6000, [*clean, kernel(96)]) == why
    assert prune((*kernel(), *kernel(312)), A6000, [*clean, kernel(96)]) == why  # any of its kernels
    assert prune(kernel(312), A6000) == ""
    assert prune(kernel(312), A6000, [kernel(), kernel(64)]) == ""  # half of them
    assert prune(kernel(96), A6000, clean) == ""  # perhaps outside of the loop
    unknown = (replace(kernel()[0], stack=None),)
    assert prune(unknown, A6000, clean) == ""
    assert prune(kernel(312), A6000, [unknown] * 3) == ""


