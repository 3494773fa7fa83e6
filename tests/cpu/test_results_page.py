"""The results page, and the question on the first page: what was recorded, in short."""

import json
import re
from html import unescape
from pathlib import Path

from reflib.lab import runner
from tests.cpu.test_book import CHAPTERS, article, data, standing

ROOT = runner.ROOT
WIN = 1.5  # times as fast as TorchInductor: both kernels are to be seen


def row(case: str, value: float | None, **more: object) -> dict[str, object]:
    return {"name": "a", "case": case, "metric": "time", "clock": "graph", "value": value, **more}


def test_the_results_begin_with_what_was_timed_together() -> None:
    rows = [
        row("reflib", 10.0), row("TorchInductor", 20.0), row("eager", 5.0),
        row("reflib, C++", 10.0, clock="wall"), row("TorchInductor, C++", 8.0, clock="wall"),
        row("reflib", 10.0, at={"n": 2}), row("TorchInductor", None, at={"n": 2}, status="crashed", clock="auto"),
        row("reflib", 10.0, at={"n": 3}), row("TorchInductor", 10.2, at={"n": 3}),
        row("TorchInductor", 1.0, at={"n": 4}), row("reflib", 1.0, at={"n": 5}),
        row("reflib, file", 3.0, name="b"), row("AOTInductor, GPU", None, name="b", status="crashed", clock=""),
    ]  # fmt: skip
    found = list(standing.pairs("chapter", rows))
    assert [(p.what, p.theirs) for p in found] == [
        ("a", 20.0), ("a, C++ (clock wall)", 8.0), ("a, n 2", None), ("a, n 3", 10.2),
        ("b, AOTInductor, GPU", None),
    ]  # fmt: skip
    assert standing.counts(found) == ["1", "1", "1", "2"]  # faster, equal, slower, no number


def test_the_results_say_how_much_of_a_set_was_measured() -> None:
    rows = [
        row("reflib, tuned", 1.0, at={"M": 1}), row("TorchInductor max-autotune", None, at={"M": 1}),
        row("reflib, tuned", 1.0, at={"M": 2}), row("reflib", 1.0, name="b", at={"M": 3}),
        row("all cases", 9.0, metric="count"),
    ]  # fmt: skip
    assert list(standing.sets_of(rows)) == ["a, 2 of 9 cases, 1 of them beside TorchInductor"]


def test_a_floor_is_bytes_operations_or_the_device_alone() -> None:
    limits = 1e3, 1e6  # bytes and operations per µs: 1 GB/s, 1 TFLOP/s
    peers = ("eager", 90.0), ("reflib", 30.0)
    rows = [row(case, us, name="moves") for case, us in peers]
    rows += [row(case, 60.0 / us, name="moves", metric="bandwidth") for case, us in peers]  # 60 kB
    rows += [row(case, us, name="product", at={"M": 100, "N": 100, "K": 2000}) for case, us in peers]
    rows += [row(case, us, name="calls", clock="wall") for case, us in peers]
    rows += [row("device alone", 7.0, name="calls"), row("reflib", 9.0, name="no peer")]
    rows += [row(case, us, name="unknown") for case, us in peers]
    found = {name: least for name, _, least, _ in standing.places(rows, limits)}
    assert found == {"moves": 60.0, "product": 820.0, "calls": 7.0}
    own = [row("copy", 2.0, name="ceilings", metric="bandwidth"), row("matmul", 3.0, name="ceilings", metric="rate")]
    assert standing.ceilings(ROOT, own, "nowhere") == (2e3, 3e6)
    assert standing.ceilings(ROOT, [], "nowhere") is None


# Chapters with a large win and no kernels: one times the host's part of a call, the other programs of other processes.
NO_KERNELS = {"measuring", "input-ranges"}


def test_a_large_win_over_torchinductor_shows_both_kernels() -> None:
    for slug, path in data.recordings(ROOT):
        if slug not in data.chapters(ROOT) or slug in NO_KERNELS:
            continue
        found = standing.pairs(slug, json.loads(path.read_text(encoding="utf-8"))["rows"])
        wins = [p.what for p in found if p.theirs and p.ratio > WIN]
        code = "\n".join(c.source for c in standing.notebook(ROOT, slug).cells if c.cell_type == "code")
        assert not wins or re.search(r"show_wins\(|run_and_get_code\(|empty_strided_p2p", code), (slug, wins)


def test_a_claim_fails_as_a_loss_a_prediction_or_otherwise() -> None:
    assert standing.kind_of("a: reflib takes 1.20 of the time of eager", "a loss, and it stays in the table") == "loss"
    assert standing.kind_of("times as fast: 1.28, predicted 2.00", "less than predicted; a cache") == "prediction"
    assert standing.kind_of("it is predicted to be faster", "the machine was busy") == "other"


def test_a_device_with_hardly_any_times_has_a_sentence_and_no_table() -> None:
    times = list(standing.pairs("chapter", [row("reflib", 1.0), row("TorchInductor", 2.0)]))
    text = standing.told(ROOT, "a CPU", [("chapter", times, [{"holds": False}])], [])
    assert "1 of 1 claims" in text and "<table" not in text


def test_the_results_have_floors_and_every_claim_that_failed(site: Path) -> None:
    text = unescape(article(site, "book/results"))
    beside = re.findall(r'reflib-floor"><p><a href="../notebooks/([\w-]+).html', text)
    whole = {slug for slug, told in data.chapters(ROOT).items() if not told.newer}  # of others the floor may be missing
    assert {p.stem for p in CHAPTERS} & whole <= set(beside)
    assert re.search(r"\d+ of \d+ claims in \d+ chapters", text)
    for slug, path in data.recordings(ROOT):
        for claim in json.loads(path.read_text(encoding="utf-8"))["claims"]:
            if claim.get("holds") is False:
                assert text.count(claim["claim"]) >= 2, (slug, claim)  # there, and folded in its chapter's tables
    found = [claim for path in CHAPTERS for claim in standing.printed(ROOT, path.stem)]
    assert {holds for holds, _, _ in found} == {True, False} and all(why for holds, _, why in found if not holds)


def test_the_first_page_asks_before_it_tells(site: Path) -> None:
    text = unescape(article(site, "book/index"))
    _, times, least, _, _ = standing.result(ROOT)
    asked, told = text.split("<details>", 1)
    assert f"{times['eager']:,.0f} µs" in asked and f"{least:,.0f} µs" in asked
    for case in ("TorchInductor", "reflib"):
        assert f">{case}<" in told and f">{case}<" not in asked
