"""How long recording each notebook took, for the book's page on the recordings.

recorded/seconds.tsv: one line "slug <tab> device <tab> seconds" per recording, sorted.
"""

import fcntl
import os
from pathlib import Path

from reflib import atomic

FILE = "seconds.tsv"


def read(folder: Path, device: str) -> dict[str, float]:
    """{slug: seconds} on this device ("h200"); empty without a file."""
    return {slug: seconds for (slug, where), seconds in _read(folder / FILE).items() if where == device}


def note(folder: Path, slug: str, device: str, seconds: float) -> None:
    """Record one time. Safe against other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        found = {**_read(folder / FILE), (slug, device): float(round(seconds))}
        lines = [f"{s}\t{d}\t{seconds:.0f}\n" for (s, d), seconds in sorted(found.items())]
        atomic.write(folder / FILE, "".join(lines))
    finally:
        os.close(handle)


def _read(path: Path) -> dict[tuple[str, str], float]:
    """Malformed lines are skipped."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        parts = line.split("\t")
        if len(parts) == 3 and parts[2].isdigit():
            found[parts[0], parts[1]] = float(parts[2])
    return found
