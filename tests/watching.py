"""A job in the pool, watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reflib.autotune.pool import Job, Pool
from tests.processes import soon


class Watch:
    """A job of ``tests/tuning_faults.py``, and what was heard of it."""

    def __init__(self, function: str, where: str = "compile", limit: float = 30.0, priority: tuple = (), **data: Any):
        self.messages: list[dict] = []
        self.ends: list[tuple[str, dict]] = []
        what = function if ":" in function else f"tests.tuning_faults:{function}"
        end: Callable[..., None] = lambda *ending: self.ends.append(ending)  # noqa: E731
        self.job = Job(what, data, where, self.messages.append, end, limit, priority)

    def on(self, p: Pool) -> Watch:
        p.submit(self.job)
        return self

    def first(self) -> dict:
        """Its first message."""
        assert soon(lambda: self.messages, 60), self.ends
        return self.messages[0]

    def end(self) -> tuple[str, dict]:
        assert soon(lambda: self.ends, 60), "the job did not end"
        return self.ends[0]

    def result(self) -> dict:
        how, facts = self.end()
        assert how == "done", facts
        return facts

    def why(self, how: str) -> str:
        assert self.end()[0] == how, self.ends
        return self.ends[0][1]["why"]
