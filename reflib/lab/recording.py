"""Recorded rows: measurements of the notebooks on a GPU, stored beside them."""

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from reflib import atomic
from reflib.lab.machine import ROOT
from reflib.lab.rows import Row, Rows

FOLDER = "REFLIB_RECORDED"  # environment variable with another folder of recordings
LIMIT_BYTES = 1_000_000
ALIKE = 0.5  # of a claim's text: the rest may be its numbers
OFF = " than predicted; "  # in the explanation of a prediction that failed, behind "less" or "more"


class _Asked:
    """The recordings that this notebook has asked for: their rows are drawn beside, their claims told beside."""

    paths: ClassVar[dict[Path, None]] = {}


def folder() -> Path:
    """notebooks/recorded of this checkout, or beside the notebook that is running."""
    if named := os.environ.get(FOLDER):
        return Path(named)
    places = [ROOT / "notebooks" / "recorded", Path.cwd() / "recorded"]
    return next((p for p in places if p.is_dir()), places[0])


def recorded(chapter: str, gpu: str = "h200") -> Rows:
    """The rows recorded for this chapter; empty without a recording."""
    path = folder() / f"{chapter}.{gpu}.json"
    if not path.exists():
        return Rows()
    _Asked.paths[path] = None
    return load(path)[0]


def recorded_claim(text: str, otherwise: str) -> str:
    """What the recording says where this claim was made, "" if it was made on this device or has no such claim.

    The claims of one call differ in their text, which has numbers in it, but share their explanation."""
    from reflib.lab.session import current

    why = otherwise.split(OFF)[-1]
    for path in _Asked.paths:
        data = json.loads(path.read_text(encoding="utf-8"))
        device = data.get("shared", {}).get("device", "")
        same = {c["claim"]: c.get("holds") for c in data["claims"] if c.get("otherwise", "").split(OFF)[-1] == why}
        near = difflib.get_close_matches(text, [c for c, holds in same.items() if holds is not None], 1, ALIKE)
        if near and device and device != current().machine.name:
            return f"Recorded on {device}: {'✓' if same[near[0]] else '✗'} {near[0]}"
    return ""


def load(path: Path) -> tuple[Rows, list[dict[str, Any]]]:
    """The rows and claims of one file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    shared = data.get("shared", {})
    rows = Rows(Row.from_data({**shared, **row}) for row in data["rows"])
    return rows, list(data.get("claims", []))


def dump(
    path: Path, rows: Iterable[Mapping[str, Any]], claims: Iterable[Mapping[str, Any]], made: Mapping[str, Any] = {}
) -> None:
    """Write a recording: the fields shared by all rows once, then one line per row, sorted. ValueError if too large.
    made: device, versions, commit and date, for claims without rows."""
    listed = [dict(row) for row in rows]
    shared: dict[str, Any] = {
        key: listed[0][key]
        for key in ("device", "versions", "commit", "date")
        if listed and all(row.get(key) == listed[0].get(key) for row in listed) and key in listed[0]
    }
    shared |= {} if listed else made
    slim = [{k: v for k, v in row.items() if k not in shared} for row in listed]
    lines = sorted(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in slim)
    spoken = [json.dumps(dict(c), sort_keys=True, ensure_ascii=False) for c in claims]
    text = "\n".join(
        [
            "{",
            f'"shared": {json.dumps(shared, sort_keys=True, ensure_ascii=False)},',
            '"rows": [\n' + ",\n".join(lines) + "\n],",
            '"claims": [\n' + ",\n".join(spoken) + "\n]",
            "}",
        ]
    )
    if len(text.encode()) > LIMIT_BYTES:
        raise ValueError(f"{path.name} would be over {LIMIT_BYTES:,} bytes; measure fewer rows")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, text + "\n")
