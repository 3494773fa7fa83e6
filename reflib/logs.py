"""Logging, switched on by the environment (``REFLIB_LOGS=fallback,compile`` or ``REFLIB_LOGS=all``), and the events of
timelines.

Each name is a logger ``reflib.<name>``; a name that is not listed logs only warnings.
"""

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def get(name: str) -> logging.Logger:
    """The logger ``reflib.<name>``, at INFO when ``REFLIB_LOGS`` names it (read at every call)."""
    logger = logging.getLogger(f"reflib.{name}")
    wanted = {part.strip() for part in os.environ.get("REFLIB_LOGS", "").split(",")}
    on = bool(wanted & {name, "all"})
    level = logging.INFO if on else logging.WARNING
    if logger.level != level:  # setting it empties the caches of all loggers
        logger.setLevel(level)
    root = logging.getLogger("reflib")
    if on and not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("reflib[%(name)s] %(message)s"))
        root.addHandler(handler)
    return logger


@dataclass(frozen=True)
class Event:
    """Something that took time. Unpacks into its first three: ``for name, start, seconds in timeline``.

    start: on ``time.perf_counter()``.   kind: one of ``timeline.KINDS``.
    status: "ok", "crashed", "hung", "pruned" ..., or "".   region: the region it was for, or "".
    track: where: "main", "compile 3", "cuda:0"; for kind "queue", whose turn is waited for.
    """

    name: str
    start: float
    seconds: float
    kind: str = "stage"
    track: str = "main"
    region: str = ""
    status: str = ""

    @property
    def end(self) -> float:
        return self.start + self.seconds

    def __iter__(self) -> Iterator[Any]:
        return iter((self.name, self.start, self.seconds))
