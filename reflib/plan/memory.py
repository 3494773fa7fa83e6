"""Which buffers hold memory while each step of a Plan runs: read off the steps themselves."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..ir.program import Buffer, Program
from .steps import Alloc, Branch, Call, Free, Launch, Plan, Step


@dataclass(frozen=True, slots=True)
class Change:
    """Buffers in memory while a step runs and not while the one before it did, with their bytes, and the reverse."""

    label: str
    born: Mapping[str, int]
    died: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory in temp buffers while node number ``node`` runs, for plots of memory over time."""

    node: int
    label: str
    live: tuple[tuple[str, int], ...]  # (buffer, bytes at the hints)

    @property
    def bytes(self) -> int:
        return sum(b for _, b in self.live)


@dataclass(frozen=True)
class Memory(Plan):
    """A Plan, and how the memory in use changes from one kernel or call to the next (sizes at the traced hints)."""

    changes: tuple[Change, ...] = ()

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """All that is live at each: made when asked for, since it grows with the square of the steps."""
        live: dict[str, int] = {}
        out = []
        for i, c in enumerate(self.changes):
            live = {b: n for b, n in live.items() if b not in c.died} | dict(c.born)
            out.append(Moment(i, c.label, tuple(live.items())))
        return tuple(out)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that temp buffers, outputs included, hold at once."""
        return max(accumulate(sum(c.born.values()) - sum(c.died.values()) for c in self.changes), default=0)

    @property
    def allocations(self) -> int:
        return sum(isinstance(s, Alloc) and s.reuse is None for s in self.steps)

    @property
    def reuses(self) -> int:
        return sum(isinstance(s, Alloc) and s.reuse is not None for s in self.steps)


def memory(program: Program, plan: Plan, owned: Collection[str] = ()) -> Memory:
    """What ``plan``, of ``program``, holds at each kernel and call. ``owned``: inputs that count until they are freed
    (those of a backward, which autograd gives away)."""
    names: Iterable[str] = [n.name for n in program.nodes]
    if len(list(names)) != sum(isinstance(s, Launch | Call | Branch) for s in plan.steps):
        names = ()  # (a node may be several)
    start = {b: n for b in owned if (n := program.buffers[b].nbytes.hint())}
    return Memory(plan.steps, tuple(_changes(plan.steps, program.buffers, iter(names), start)))


def _changes(
    steps: Iterable[Step], buffers: Mapping[str, Buffer], names: Iterator[str], start: dict[str, int]
) -> Iterator[Change]:
    live = dict(start)
    born, died = dict(start), dict[str, int]()

    def begin(b: str, size: int | None = None) -> None:
        if b not in live:
            born[b] = live[b] = buffers[b].nbytes.hint() if size is None else size

    def end(b: str) -> None:
        if b in born:
            del live[b], born[b]
        elif b in live:
            died[b] = live.pop(b)

    for s in steps:
        if isinstance(s, Alloc):
            if s.reuse is not None:
                end(s.reuse)  # its storage goes on as the new one's
            begin(s.buffer)
        elif isinstance(s, Free):
            end(s.buffer)
        elif isinstance(s, Launch | Call | Branch):
            own = made(s, buffers, live)
            for b, n in own.items():
                begin(b, n)
            yield Change(next(names, None) or _label(s), born, died)
            born, died = {}, {}
            stay = s.extern.writes() if isinstance(s, Call) else _left(s.otherwise) if isinstance(s, Branch) else ()
            for b in own.keys() - set(stay):
                end(b)
            for b in stay:
                if buffers[b].kind == "temp":
                    begin(b)


def made(s: Launch | Call | Branch, buffers: Mapping[str, Buffer], live: Mapping[str, int]) -> dict[str, int]:
    """What it has in memory besides ``live``, when that is most."""
    if isinstance(s, Launch):
        return {b.name: b.nbytes.hint() for b in s.kernel.workspace if b.kind != "zeros"}
    if isinstance(s, Call):
        return {b: buffers[b].nbytes.hint() for b in s.extern.writes() if b not in live and buffers[b].kind == "temp"}
    found: list[dict[str, int]] = [{}]
    for branch in (s.then, s.otherwise):
        now: dict[str, int] = {}
        for c in _changes(branch, buffers, iter(()), {}):
            now = {b: n for b, n in now.items() if b not in c.died} | dict(c.born)
            found.append({b: n for b, n in now.items() if b not in live})
    return max(found, key=lambda made: sum(made.values()))


def _left(steps: Iterable[Step]) -> set[str]:
    """Buffers that these steps make and do not free."""
    made: set[str] = set()
    for s in steps:
        if isinstance(s, Alloc):
            made.add(s.buffer)
        elif isinstance(s, Call):
            made.update(s.extern.writes())
        elif isinstance(s, Branch):
            made |= _left(s.otherwise)
        elif isinstance(s, Free):
            made.discard(s.buffer)
    return made


def _label(s: Step) -> str:
    if isinstance(s, Branch):
        return next((_label(x) for x in (*s.then, *s.otherwise) if isinstance(x, Launch | Call | Branch)), "branch")
    return s.kernel.name if isinstance(s, Launch) else s.extern.name if isinstance(s, Call) else type(s).__name__
