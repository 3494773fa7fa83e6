"""The order in which a body's statements are printed: loads before the stores that they do not depend on.

A step of a recurrence loads, computes and stores, and so does the next one. A compiler that does not know whether the
two tensors overlap keeps a load behind the store before it, so a program waits for memory once per step (12 steps of a
gated recurrence: 50 us on an H200 where 21 are needed to issue its instructions). What a kernel reads and does not
write can be loaded earlier. AHEAD registers of a thread hold what waits for its turn.
"""

from collections.abc import Sequence

from ..ir.loops import Const, Index, Load, Op, Stmt, Store, stmt_args
from ..ir.program import Config
from ..schedule.axes import Space

AHEAD = 16


def printing_order(space: Space, config: Config) -> Sequence[int]:
    """The positions of ``space.body``."""
    body, points = space.body, config.xblock * dict(config.extras).get("yblock", 1)
    stores = [i for i, s in enumerate(body) if isinstance(s, Store)]
    written = {body[i].buffer for i in stores}  # type: ignore[union-attr]
    early = [i for i, s in enumerate(body) if isinstance(s, Load) and s.buffer not in written and _simple(body, s)]
    if space.mode == "reduction" or not stores or not early or early[-1] < stores[0]:
        return range(len(body))
    ahead, out, placed, done = max(1, AHEAD * 32 * config.num_warps // points), list[int](), set[int](), 0
    for i, s in enumerate(body):
        if i == 0 or isinstance(s, Store):
            passed = sum(at < i for at in early)
            for at in early[done : passed + ahead]:
                out += [a for a in (*_given(body, at), at) if a not in placed]
                placed |= {*_given(body, at), at}
            done = max(done, passed + ahead)
        if i not in placed:
            out.append(i)
            placed.add(i)
    return out


def _given(body: Sequence[Stmt], i: int) -> list[int]:
    """What the load's mask is made of."""
    out: list[int] = []
    for a in stmt_args(body[i]):
        out += [*_given(body, a), a]
    return out


def _simple(body: Sequence[Stmt], load: Load) -> bool:
    """Does it depend on sizes and places alone?"""
    todo = list(stmt_args(load))
    while todo:
        s = body[todo.pop()]
        if not isinstance(s, (Const, Index, Op)):
            return False
        todo += stmt_args(s)
    return True
