"""Source texts for `lab.peer` and `lab.measure_peer` that are too long for a chapter's page.

Each is a file here, which a child process runs as its `peer_source`; nothing imports it in the notebook's process.
"""

from pathlib import Path
from typing import Any


def peer_text(name: str, **settings: Any) -> str:
    """The text of `name`.py, with its SETTINGS filled in: plain values, as `repr` writes them."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return f"{text}\nSETTINGS.update({settings!r})\n" if settings else text
