"""The order of collectives, compared across ranks before it is first used.

Ranks that start different collectives, or the same in another order, wait for each other for ever (or mix up data), and
nothing says why. So before the first call of a compiled graph each rank tells the others what it will start on each
process group; a difference is an error on every rank that names the first op that differs.

It goes through the group's store, not through a collective (which is what might hang): each rank writes its list, the
group's first rank compares them all and writes a verdict, which the others read: N lists and N reads for N ranks. What
a group has agreed on once is not asked again, so that a graph may be compiled anew on one rank alone (for another size)
as long as it starts the same: sizes that the graph leaves open count only when its ranks first compare. A rank that
does not come within the store's timeout (``init_process_group(timeout=)``) is named on all the others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from ..autotune.question import group_of
from ..ir.printer import dtype_name
from ..ir.program import Extern, Program, View, iter_views
from ..logs import get as logger
from ..options import Options
from .collectives import starts
from .meeting import Meeting, RanksError

OPEN = "~"  # before a size that is not the same at every call
_agreed: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # process group -> digests, without open sizes


def agreed(call: Callable[..., Any], what: Any, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Plugs into ``pipeline.AROUND``: around a graph that communicates, which compares before its first call."""
    program = getattr(what, "scheduled", None)
    if program is None or options.target is not None:
        return call
    lists = by_group(program)
    if not lists:
        return call
    todo = [True]

    def checked(*args: Any) -> Any:
        if todo:
            check(lists)
            todo.clear()
        return call(*args)

    return checked


def by_group(program: Program) -> dict[str, list[str]]:
    """What the program starts on each process group, in order, as texts that are the same on all of its ranks."""
    out: dict[str, list[str]] = {}
    for x in starts(program.nodes):
        out.setdefault(group_of(x), []).append(_text(x, program))
    return out


def _text(x: Extern, program: Program) -> str:
    """The op (in place or not: others cannot tell), how it reduces, sizes as traced (of an all-to-all they are each
    rank's own), and the user's line."""
    plain = [str(a) for a in (*x.args, *dict(x.kwargs).values()) if isinstance(a, (int, str)) and a != group_of(x)]
    own = "all_to_all" in str(x.target)
    views = [_size(v, own) for v in iter_views((x.args, x.kwargs))]
    where = f" at {x.origins[0].source}" if x.origins and x.origins[0].source else ""
    return f"{str(x.target).replace('_.', '.')}({', '.join([*views, *plain])}){where}"


def _what(text: str) -> str:
    """Without the user's line, from where ranks may well start the same; a size may be open on one of them."""
    return text.partition(" at ")[0].replace(OPEN, "")


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps([*texts]).encode()).hexdigest()


def _size(v: View, own: bool) -> str:
    sizes = (f"{OPEN if e.constant is None else ''}{e.hint()}" for e in v.shape)
    return dtype_name(v.dtype) if own else f"{dtype_name(v.dtype)}[{', '.join(sizes)}]"


def check(lists: dict[str, list[str]]) -> None:
    """Compare with the other ranks of each group. Raises RanksError."""
    import torch.distributed.distributed_c10d as c10d

    asked = []
    for name, ops in lists.items():
        group = c10d._resolve_process_group(name)
        form = _digest(re.sub(rf"{OPEN}\d+", OPEN, op.partition(" at ")[0]) for op in ops)
        if group.size() > 1 and form not in _agreed.setdefault(group, set()):
            meeting = Meeting(group, "order", f"a graph that starts with {ops[0]}")
            # on all groups first: no rank waits on one for a rank that waits on another
            meeting.tell([_digest(map(_what, ops)), ops])
            asked.append((meeting, form))
    for meeting, form in asked:
        meeting.hear(partial(_compare, meeting.group))
        _agreed[meeting.group].add(form)
        logger("ranks").info("%d ranks start the same collectives", meeting.group.size())


def _compare(group: Any, found: list[Any]) -> None:
    """Raises RanksError, by the first rank whose list is not rank 0's."""
    for rank, (digest, ops) in enumerate(found):
        if digest != found[0][0]:
            raise RanksError(difference(found[0][1], ops, rank, group.group_name))


def difference(ours: list[str], theirs: list[str], rank: int, group: str) -> str:
    """The first op that differs between rank 0 and ``rank``."""
    both = max(len(ours), len(theirs))
    a, b = ([*ops, *["nothing more"] * (both - len(ops))] for ops in (ours, theirs))
    i = next(i for i in range(both) if _what(a[i]) != _what(b[i]))
    return (
        f"ranks of process group {group!r} would start different collectives, and wait for each other for ever: number "
        f"{i + 1} is {a[i]} on rank 0, and {b[i]} on rank {rank}. Run the same code with the same options and sizes on "
        "all ranks"
    )
