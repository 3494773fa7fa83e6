"""Choosing between implementations of an op that communicates: all ranks measure the same candidate at the same time.

A rank that decided alone would wait for others that decided otherwise. So for such a choice (``talks``)

* the ranks of its process group **meet** first: the candidates must be the same, and what the first rank knows from an
  earlier run holds for all;
* each candidate runs in **worker processes**, one per rank, on the rank's own device, with a process group of their own
  (``child``). Its time is the slowest rank's. The user's process group takes no part, so that whatever happens to the
  workers it stays as it is;
* after each candidate they meet again: its row is **one row for all**. A candidate that crashed, hung, ran out of
  memory or was wrong on one rank is a failed row on every rank, which says on which. All workers then end, also one
  that waits for the failed one in a collective (NCCL does, to its limit), and the next candidate gets new ones.
  ``Options(candidate_seconds=)`` limits how long a rank's worker may be silent.

The winner follows from the rows, which are equal. In the background the same is done beside the program: in meetings
of each graph's own (``Work.background`` is its name), as its thread and the program's come to theirs in any order.
``swap`` says how the winner comes in.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from ..autotune import switches
from ..autotune.inputs import main_device
from ..autotune.isolation import isolated
from ..autotune.pool import Job, pool
from ..autotune.question import groups_of
from ..autotune.request import Limits, Request, Result
from ..autotune.store import Outcome
from ..autotune.winner import pick_winner
from ..ir.decision import Candidate
from ..ir.program import Choice
from ..logs import get as logger
from .meeting import Meeting, RanksError, store_of
from .share import claim, deal, order, publish, release, settle
from .swap import turn

# (With those of this module, the functions of ``autotune.points.Alone``.)
__all__ = [
    "claim", "deal", "known_to_all", "measured_by_all", "order", "publish", "release", "settle", "talks", "turn",
]  # fmt: skip

WORST = ("crashed", "hung", "error", "wrong", "skipped", "ok")  # of several ranks' words on one candidate
LOOK, GRACE = 0.2, 1.0  # seconds between looks at whether another rank has failed, and for a worker to notice itself
STARTING = 300.0  # seconds that workers may take to begin, beside ``candidate_seconds``


def talks(q: Any) -> bool:
    """May a candidate communicate?"""
    return bool(groups_of(q.choice))


def known_to_all(q: Any, found: Outcome | None, work: Any) -> Outcome | None:
    """What the first rank knows, if it knows anything. Raises RanksError where ranks have other candidates."""
    why = _stays(q, work)
    if why:
        return _default(q, why)
    meeting = _meeting(q, work, "known")
    meeting.tell([[str(k) for k in q.candidates], q.sizes, None if found is None else asdict(found)])
    data = meeting.hear(lambda said: _same(said, q.choice.op))
    return None if data is None else Outcome.from_data(data)


def measured_by_all(q: Any, point: Any, work: Any) -> Result:
    """The candidates' rows, equal on all ranks of the group."""
    group, request = _group(q.choice), point.request
    sent = isolated(request, q.region.constants, work.options, point.makers)
    why = sent if isinstance(sent, str) else ""
    meeting = _meeting(q, work, "begin")
    meeting.tell(why)
    why, name = meeting.hear(
        lambda said: [next((f"rank {i}: {w}" for i, w in enumerate(said) if w), ""), uuid.uuid4().hex]
    )
    if why or isinstance(sent, str):
        skipped = tuple(Candidate(request.key(n), "skipped", why=why) for n in request.programs)
        return Result(skipped, str(point.default), f"{point.default} stays, unmeasured: {why}", complete=False)
    team = _Team(group, name, sent, work)
    names = [request.default, *(n for n in request.programs if n != request.default)]
    try:
        rows = [team.measure(names[0], q.choice.op)]
        for n in names[1:]:  # without the default's results there is nothing to check others against
            why = f"{names[0]} {rows[0].status}" if rows[0].status not in ("ok", "wrong") else ""
            rows.append(Candidate(request.key(n), "skipped", why=why) if why else team.measure(n, q.choice.op))
    finally:
        team.leave()
    winner, reason = pick_winner(rows, request.default, request.min_speedup)
    logger("autotune").info("measured by %d ranks: %s", group.size(), reason)
    return Result(tuple(rows), winner, f"by {group.size()} ranks: {reason}", "wall")


class _Team:
    """The workers of one question: this rank's, which is one of ``group.size()`` that act alike. ``name``: the same on
    all ranks, and of no other question, nor of another run with the same store."""

    def __init__(self, group: Any, name: str, sent: Request, work: Any):
        self.group, self.name, self.sent, self.options = group, name, sent, work.options
        self.apart = work.background
        self.device = str(main_device(sent.inputs))
        self.number = 0  # of teams so far: the next follows a failure
        self.joined = False

    def measure(self, name: str, op: str) -> Candidate:
        """One candidate's row. All ranks call this for the same candidates in the same order."""
        limit = self.options.candidate_seconds
        meeting = Meeting(self.group, "candidate", f"the candidate {name} of {op}", 2 * limit + STARTING, self.apart)
        if not self.joined:
            self.joined = self._job("begin", {"name": name}, STARTING).status == "ok"
        mine = self._job("try_one", {"name": name}, limit)
        meeting.tell(mine.to_data())
        row = Candidate.from_data(meeting.hear(lambda said: _merged(map(Candidate.from_data, said)).to_data()))
        if row.status in ("crashed", "hung", "error"):
            self.leave()
            self.number += 1
        return row

    def leave(self) -> None:
        """This rank's worker ends, if it has not."""
        self._job("leave", {"name": self.sent.default}, 10.0)
        self.joined = False

    def _job(self, what: str, data: dict[str, Any], limit: float) -> Candidate:
        done = threading.Event()
        answer: dict[str, Any] = {}
        lost: dict[str, Any] = {}

        def said(message: dict[str, Any]) -> None:
            if message.get("kind") == "lost":
                lost.update(message)

        def ended(how: str, facts: dict[str, Any]) -> None:
            answer.update(how=how, facts=facts)
            done.set()

        r, where = self.sent, self._where()
        failed, store = f"{where['prefix']}/failed", store_of(self.group)
        data |= {"imports": r.imports, "group": where}
        limits = Limits(seconds=1e6, candidate_seconds=self.options.candidate_seconds)
        data |= {"request": replace(r, limits=limits), "switches": switches.read()}
        # the worker that hangs is found first, not one that waits for it in a collective
        data["limit"] = limits.candidate_seconds + STARTING
        workers = pool(self.options.compile_threads)
        job = Job(f"reflib.ranks.child:{what}", data, self.device, said=said, ended=ended, limit=limit + 5)
        workers.submit(job)
        while not done.wait(LOOK):
            if what == "try_one" and store.check([failed]) and not done.wait(GRACE):
                workers.cancel(job)
        how, facts, key = answer["how"], answer["facts"], r.key(data["name"])
        if how == "done":
            return facts.get("row") or Candidate(key, "ok")
        if what == "try_one" and how != "cancelled":
            store.set(failed, "")
        if lost:  # (it may have been cancelled since)
            return Candidate(key, lost["status"], why=lost["why"])
        if how == "cancelled":
            return Candidate(key, "error", why="ended, as another rank has failed")
        return Candidate(key, how if how in WORST else "error", why=facts.get("why", how))

    def _where(self) -> dict[str, Any]:
        """How a worker finds the others: a part of the same store."""
        import torch.distributed as dist

        group, store = self.group, store_of(self.group)
        return {
            "name": group.group_name, "rank": group.rank(), "size": group.size(), "store": reach(store),
            "backend": dist.get_backend(group),
            "prefix": f"reflib/team/{self.name}/{self.number}",
        }  # fmt: skip


def reach(store: Any) -> tuple[Any, ...] | None:
    """What another process needs to open the same store; None if it cannot."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "port"):
        return "tcp", store.host, store.port
    return ("file", store.path) if hasattr(store, "path") else None


def _merged(rows: Iterable[Candidate]) -> Candidate:
    """One row for all ranks: the worst that happened on any, and where; else the first rank's."""
    said = sorted(enumerate(rows), key=lambda pair: WORST.index(pair[1].status))
    worst = said[0][1]
    if worst.status == "ok":
        return worst
    failed = [(i, r) for i, r in said if r.status != "ok"]
    why = "; ".join(f"rank {i}: {r.status}{f' ({r.why})' if r.why else ''}" for i, r in failed)
    return Candidate(worst.key, worst.status, why=why)


def _same(said: list[Any], op: str) -> Any:
    """What rank 0 knows, if all ask the same."""
    for rank, (names, sizes, _) in enumerate(said):
        if [names, sizes] != said[0][:2]:
            raise RanksError(
                f"ranks would choose for {op} among other candidates: {', '.join(said[0][0])} for {said[0][1]} on rank "
                f"0, {', '.join(names)} for {sizes} on rank {rank}. Register the same on all ranks"
            )
    return said[0][2]


def _meeting(q: Any, work: Any, what: str) -> Meeting:
    apart = work.background
    limit = work.options.tuning_seconds if apart else None  # (another rank's other choices may take longer)
    return Meeting(_group(q.choice), what, f"the choice of {q.choice.op}", limit, apart)


def _group(choice: Choice) -> Any:
    import torch.distributed.distributed_c10d as c10d

    (name,) = groups_of(choice)
    return c10d._resolve_process_group(name)


def _stays(q: Any, work: Any) -> str:
    """Why nothing is measured; the same on all ranks."""
    if len(q.candidates) < 2:
        return "there is no other candidate"
    if len(groups_of(q.choice)) > 1:
        return "its candidates communicate over several process groups"
    if not work.options.isolate:
        return "a candidate that communicates is measured in worker processes: isolate=True"
    return "" if reach(store_of(_group(q.choice))) else "its process group's store cannot be reached by other processes"


def _default(q: Any, why: str) -> Outcome:
    rows = tuple(Candidate(k, "skipped", why=why) for k in q.candidates)
    return Outcome((q.default,) * len(q.ranges), rows, f"{q.default} stays, unmeasured: {why}")
