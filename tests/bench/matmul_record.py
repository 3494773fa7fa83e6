"""The matmul sets as a recording that notebooks read: ``lab.recorded("matmul")``.

    python -m tests.bench.matmul splitk.jsonl long.jsonl llm.jsonl --record notebooks/recorded/matmul.h200.json

The recording is made of these files, and of what the recording had. All of a case comes from one run: the last that had
the peer in it, else the last. Nothing is left out for what it says: a failure is a row with a status, a disturbed case
says so in its notes. A row's name is the set, its case the contender, its note what that one chose; ``at`` is the
product. How many cases a set has, measured or not, is a row too. Then the cells that show such rows are filled again
(refilling.py).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reflib.lab import recording
from reflib.lab.ranking import ALL_CASES, DISTURBED
from reflib.lab.rows import Row as LabRow

from . import matmul_cases, refilling
from .contenders import EAGER, PEER_MAX, TUNED, US
from .report import pivot

Row = dict[str, Any]
Run = tuple[Row, list[Row]]  # what it says of itself, and its rows
CONTENDERS = {
    EAGER: "eager",
    PEER_MAX: "TorchInductor max-autotune",
    US: "reflib, not measured",  # it takes the static choice
    TUNED: "reflib, tuned",
}
STATUS = {"wrong": "wrong", "crashed": "crashed", "exit code": "crashed", "hung": "timed out"}  # how a note begins


def record(paths: Sequence[str], target: Path) -> None:
    """Write the recording, and fill the cells of the notebooks in the folder above it that show recorded rows."""
    before = list(recording.load(target)[0]) if target.exists() else []
    rows = counted(joined(before, rows_of(runs(paths))))
    if len(devices := {row.device for row in rows}) != 1:
        raise SystemExit(f"a recording is of one device, not of {len(devices)}: {', '.join(sorted(devices))}")
    recording.dump(target, [row.to_data() for row in rows], [])
    print(f"{target}: {len(rows)} rows")
    for notebook in sorted(target.resolve().parent.parent.glob("*.ipynb")):
        if filled := refilling.refill(notebook):
            print(f"{notebook.name}: {filled} cells filled")


def joined(before: Sequence[LabRow], after: Sequence[LabRow]) -> list[LabRow]:
    """Rows of an earlier recording and a later: a case is the later one's, unless only the earlier has the peer."""

    def beside_peer(rows: Sequence[LabRow]) -> set[tuple[Any, ...]]:
        return {_case(row) for row in rows if row.case == CONTENDERS[PEER_MAX]}

    stays = beside_peer(before) - beside_peer(after)
    stays |= {_case(row) for row in before} - {_case(row) for row in after}
    return [row for row in before if _case(row) in stays] + [row for row in after if _case(row) not in stays]


def _case(row: LabRow) -> tuple[Any, ...]:
    return row.name, *sorted(row.at.items())


def runs(paths: Iterable[str]) -> list[Run]:
    """The runs in these files; a file to which several were appended has several."""
    found: list[Run] = []
    for line in (line for path in paths for line in Path(path).read_text().splitlines()):
        row = json.loads(line)
        if row["kind"] == "about":
            found.append((row, []))
        else:
            found[-1][1].append(row)
    return found


def rows_of(found: Sequence[Run]) -> list[LabRow]:
    latest: dict[str, tuple[bool, Row, dict[str, Row]]] = {}
    for about, rows in found:
        for case, by in contenders_of(rows).items():
            if case not in latest or PEER_MAX in by or not latest[case][0]:
                latest[case] = (PEER_MAX in by, about, by)
    return [lab_row(who, row, about) for _, about, by in latest.values() for who, row in by.items()]


def contenders_of(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """{case: {who: its row}}, with what the peer chose, or why it could not, from when it was compiled."""
    found = pivot([row for row in rows if row["kind"] == "row" and row.get("set") in matmul_cases.SETS])
    for row in rows:
        if row["kind"] == "prepared" and row["case"] in found:
            by = found[row["case"]]
            if row.get("compile_s") is None:
                by.setdefault(PEER_MAX, {**row, "us": None})
            elif PEER_MAX in by:
                by[PEER_MAX] = {**by[PEER_MAX], "choice": row["choice"]}
    return found


def lab_row(who: str, row: Row, about: Row) -> LabRow:
    us, note = row.get("us"), row.get("note") or ""
    status = "ok" if us else next((s for begins, s in STATUS.items() if note.startswith(begins)), "refused")
    notes = [row.get("choice") or "", note]
    if row.get("disturbed"):
        taken = ", ".join(f"{x:.2f}" for x in row["reference"])
        notes.append(f"{DISTURBED}: a kernel timed before, among and after took {taken} times its time when idle")
    return LabRow(
        row["set"], CONTENDERS[who], "time", us, "µs", row["spread"] * us if us else None,
        place(row["case"], about["where"]), clock=row.get("clock", ""), cache="warm", status=status,
        note="; ".join(n for n in notes if n), **origin(about),
    )  # fmt: skip


def place(name: str, where: str) -> dict[str, Any]:
    """Which product: its sizes, dtype and function, and the weights' name. (Rows of crashes have no sizes.)"""
    case = next(c for found in matmul_cases.cases(where).values() for c in found if c.name == name)
    facts = case.facts
    at = {**{key.upper(): facts[key] for key in ("m", "n", "k")}, "dtype": facts["dtype"], "op": facts["op"]}
    return at | ({"weights": case.label.split()[1]} if case.set == "llm" else {})


def counted(rows: Sequence[LabRow]) -> list[LabRow]:
    """With a row for each set: how many cases it has now, measured or not."""
    rows = [row for row in rows if row.case != ALL_CASES]
    last = {row.name: row for row in rows}
    every = matmul_cases.cases("cuda" if any(row.clock == "graph" for row in rows) else "cpu")
    return rows + [
        replace(row, case=ALL_CASES, metric="count", value=len(every[name]), unit="", spread=None, at={}, clock="",
                cache="", status="ok", note="")
        for name, row in last.items()
    ]  # fmt: skip


def origin(about: Row) -> dict[str, Any]:
    said = {key: about[key] for key in ("versions", "commit", "date")}
    return {"device": about["device"].split(" (")[0], **said}
