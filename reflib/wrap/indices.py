"""Which operation an index that is out of range belongs to, for the error's message: a kernel reports only that one of
its indices was.
"""

import re

from ..ir.loops import Indirect, LoopNest, Origin
from ..ir.program import KernelNode, Template

_INDEXES = re.compile("index|embed|gather|scatter|take|put|pool|sampl|upsample")  # ops that read or write at indices


def has_indirect(kernel: KernelNode) -> bool:
    """Does it index with values that it reads, so that its kernel has to report one that is out of range?"""
    return bool(_parts(kernel))


def where_indexed(kernel: KernelNode) -> str:
    """The operations that may have met the index and the user's lines, such as ``, aten.embedding.default at m.py:7 in
    forward``. (A fused kernel may hold several; it does not tell which.)"""
    origins = list(dict.fromkeys(o for p in _parts(kernel) for o in p.origins))
    found = [o for o in origins if _INDEXES.search(o.op)] or origins
    return f", {' or '.join(dict.fromkeys(map(_said, found[:4])))}" if found else ""


def _said(o: Origin) -> str:
    line = o.source.split(": ")[0]  # without the code
    return f"{o.op} at {line}" if line else o.op


def _parts(kernel: KernelNode) -> list[LoopNest]:
    """Its loop nests with such indices."""
    nests = [p.epilogue if isinstance(p, Template) else p for p in kernel.parts]
    return [p for p in nests if isinstance(p, LoopNest) and any(isinstance(s, Indirect) for s in p.body)]
