"""``flex_attention`` for few queries and many keys, as when a model generates text (Dao et al., "Flash-Decoding for
long-context inference", 2023).

**Why.** The forward kernel has a program per block of queries, head and batch: for one query of each of 32 heads, 32
programs on 132 multiprocessors, each walking along all keys. The time is that of reading keys and values, and a quarter
of the GPU cannot ask for as many bytes at a time as its memory could deliver. So more programs share the work:

- *Keys are split.* Program ``part`` of ``splits`` walks along a range of the blocks of keys (with a block mask: of its
  lists, so all have as many that are not empty) and keeps, per row, ``top``, the largest score, ``total``, the sum of
  powers of two of scores less that, and ``acc``, the sum of values weighed by these. With one split it stores the
  results themselves, else these three in float32, and a loop nest of the compiler's combines the splits, each scaled by
  ``2 ** (top - largest top)``. It is fused with what follows like any other.
- *Heads are packed.* Query heads that share keys (grouped-query attention) are rows of one block, which products
  need 16 of anyway: keys are read once for all of them. A block mask that differs by head leaves a head per block.

The functions of scores and masks, what they capture, block masks, and lengths of keys that change are as in the forward
kernel, whose text it is (``generate.flex_decode``).

**When.** Fewer than 128 queries, a number known when compiled, in one block of the mask; and several splits, or blocks
with several heads (fewer than 32 queries). Not with ``batch_invariant``, since the number of splits depends on the
batch, nor for a forward whose backward follows, unless the call asks for it
(``kernel_options={"BACKEND": "TRITON_DECODE"}``).
"""

import math
from typing import TYPE_CHECKING, Any

import torch

from reflib.ir.expr import Expr, Sym, expr
from reflib.ir.program import View

from .flex_options import MOST
from .flex_tilings import LEAST_BLOCK
from .subgraph import put_instead

if TYPE_CHECKING:
    from .flex_template import Attention

FEW = 128  # queries
KEYS = 128  # per split, at least
ROWS = 32  # of a block, at most, as in ``flex_tilings``
UNITS = 132  # multiprocessors, where the target is not known


def splits(programs: int, keys: Expr, units: int) -> int:
    """Among how many programs a row's keys are divided, for ``programs`` blocks of rows on ``units`` multiprocessors.

    A multiprocessor has room for two programs at a time (``flex_tilings``: each takes up to about 100 KB of shared
    memory), and memory is busy when all have two. So as many as make up one wave of ``2 * units`` programs, rounded
    down: one more would leave a few programs to a second wave, which takes as long as the first. One wave is filled by
    at least half that way, if there are splits at all. A split has at least KEYS keys: the kernel that combines
    them costs a launch, and about as much as walking along one or two blocks. Lengths that change are not looked at:
    the first one, of a prompt, says nothing about later ones, and splits without keys cost little.
    """
    longest = keys.constant
    if longest is None and isinstance(keys.atom, Sym):
        longest = keys.atom.hi
    most = MOST if longest is None else min(MOST, longest // KEYS)
    return max(1, min(2 * units // max(programs, 1), most))


def few_queries(a: "Attention") -> dict[str, int] | None:
    """How the kernel for few queries does it, if it is to."""
    if a.asked.backend == "TRITON":
        return None
    how = _supported(a)
    if a.asked.backend == "TRITON_DECODE":
        if isinstance(how, str):
            raise a.asked.error("BACKEND", f"the kernel for few queries does not support {how}; leave it out")
        return how
    if isinstance(how, str) or _trained(a.cx.node):
        return None
    packed = how["packed"]
    shared = _tiles(packed * int(a.rows)) < packed  # (else the forward kernel reads keys less: its blocks are larger)
    return how if how["splits"] > 1 or shared else None


def _trained(node: torch.fx.Node) -> bool:
    """Is it the forward of a backward? That is given the log-sum-exp as it is; users have it in base e."""
    same = [u for u in node.users if u.args[1:] == (1,)]
    for n in same:
        for u in n.users:
            if u.op == "output" or "flex_attention_backward" in str(u.target):
                return True
            if u.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
                same.append(u)
    return False


def _supported(a: "Attention") -> dict[str, int] | str:
    """``packed`` and ``splits`` of the kernel for few queries; or why the call has none."""
    queries = a.rows.constant
    if queries is None:
        return "a number of queries known only at run time"
    if queries >= FEW:
        return f"{queries} queries; fewer than {FEW} only"
    if a.cx.low.options.batch_invariant:
        return "batch_invariant: the number of splits depends on the batch"
    (block, _), lists = a.blocks(by_key=False)
    if block and queries > block:
        return f"{queries} queries in more than one block of the mask"
    if dict(a.asked.tiling("decode", (0, 0))).get("m", 0) > ROWS:
        return f"blocks of more than {ROWS} rows"  # (why: ``flex_tilings.HOPPER``)
    packed = a.groups if all(x.shape[1] == 1 for x in lists.values()) else 1
    programs = a.batch.hint() * (a.heads.hint() // packed) * _tiles(packed * queries)
    target = a.target
    found = a.asked.splits or splits(programs, a.columns, target.units if target else UNITS)
    return {"packed": packed, "splits": found}


def _tiles(rows: int) -> int:
    """Blocks of so many rows."""
    return -(-rows // max(LEAST_BLOCK, min(ROWS, 1 << (rows - 1).bit_length())))


def decode(a: "Attention", how: dict[str, int], written: dict[str, View], exact: bool) -> None:
    """Append the kernel, and what combines its splits. ``written``: the results that are used."""
    if how["splits"] == 1:
        a.kernels({"decode": written}, {}, exact, **how)
        return
    shape = a.batch, a.heads, expr(how["splits"]), a.rows
    shapes = {"acc": (*shape, a.width), "total": shape, "top": shape}
    parts = {n: a.cx.temp(n, s, torch.float32) for n, s in shapes.items()}
    a.kernels({"decode": parts}, {}, exact, **how)
    outputs = [written.get(n) for n in ("out", "lse", "top")][: len(a.cx.fakes)]
    dtype = a.q.dtype

    def combined(acc: Any, total: Any, top: Any) -> Any:
        def factors(top: Any) -> tuple[Any, Any]:
            largest = top.amax(2, keepdim=True)
            return torch.exp2(top - torch.where(largest == -math.inf, 0.0, largest)), largest.squeeze(2)

        # Per element of the output, so that it is one kernel: a row's sums are read by all of its elements.
        factor, _ = factors(top.unsqueeze(-1).expand(acc.shape))
        whole = (total.unsqueeze(-1) * factor).sum(2)
        out = (acc * factor).sum(2) / torch.where(whole == 0, 1.0, whole)
        factor, largest = factors(top)
        return [out.to(dtype), largest + torch.log2((total * factor).sum(2)), largest][: len(outputs)]

    put_instead(a.cx, "combined", combined, list(parts.values()), outputs)
