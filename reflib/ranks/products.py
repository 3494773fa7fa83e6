"""Products whose rows are gathered from all ranks, or scattered to them, over symmetric storage (``symmetric``).

They go rank by rank: what one rank needs is multiplied while what belongs to another moves. It is copied to where the
other rank can use it, its landing, by the device's copy engines, which take no time from what multiplies. So neither
argument need lie in storage, and what has landed is read there::

    rank r of 4: product and scatter                     gather and product
    products     r+1   r+2   r+3   r   [sum]             r     r-1   r-2   r-3
    copies             r+1   r+2   r+3                   x->r+1   x->r+2   x->r+3

Each rank is sent one part at a time, and sends one. A product of its own rows needs nothing that moves: it is the last
before a sum, and the first of a gather. A rank's landing is free when it comes to the first meeting: whatever read
there was before. What has landed is known after another; of a gather there is one per copy.

Two products in turn may run at once, so that the second fills the device while the first ends; the first is preferred.

NB: PyTorch's ``fused_matmul_reduce_scatter`` and ``fused_all_gather_matmul`` (PR 127454) let ranks copy from where the
others have computed, or have copied to; each step then needs two barriers of all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..lower.rules import RULES
from .meeting import RanksError
from .reduce import added, communicates
from .symmetric import ALIGN, DTYPES, KINDS, storage

_library = torch.library.Library("reflib", "FRAGMENT")
_library.define("symmetric_gather_product(Tensor x, Tensor w, str group_name) -> Tensor")
_library.define("symmetric_product_scatter(Tensor x, Tensor w, str group_name) -> Tensor")
GATHER, SCATTER = KINDS[-2:]


# -- the ops ----------------------------------------------------------------------------------------------
@torch.library.impl(_library, "symmetric_gather_product", "CompositeExplicitAutograd")
def _gather_product(x: torch.Tensor, w: torch.Tensor, group_name: str) -> torch.Tensor:
    """All ranks' rows of x, [m, ..., k], times w, [k, n]."""
    s = _storage(x, w, group_name)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()
    out = x.new_empty(s.size, rows.shape[0], w.shape[1])
    most = _rows_at_once(s, rows.shape[0], x.shape[-1] * x.element_size())
    for start in range(0, rows.shape[0], most):
        gather_product(s, rows[start : start + most], w, out[:, start : start + most])
    return out.view(s.size * x.shape[0], *x.shape[1:-1], w.shape[1])


@torch.library.impl(_library, "symmetric_product_scatter", "CompositeExplicitAutograd")
def _product_scatter(x: torch.Tensor, w: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum over ranks of x, [m, ..., k], times w, [k, n]: this rank's share of the rows."""
    s = _storage(x, w, group_name)
    if x.shape[0] % s.size:
        raise RanksError(f"{x.shape[0]} rows cannot be scattered over {s.size} ranks")
    if s.size == 1:
        return torch.matmul(x, w)
    rows = x.reshape(s.size, math.prod(x.shape[:-1]) // s.size, x.shape[-1])
    out = x.new_empty(rows.shape[1], w.shape[1])
    most = _rows_at_once(s, rows.shape[1], w.shape[1] * x.element_size())
    for start in range(0, rows.shape[1], most):
        product_scatter(s, rows[:, start : start + most], w, out[start : start + most])
    return out.view(x.shape[0] // s.size, *x.shape[1:-1], w.shape[1])


def _storage(x: torch.Tensor, w: torch.Tensor, group_name: str) -> Any:
    if x.dtype != w.dtype or x.dtype not in DTYPES or x.dim() < 2 or w.dim() != 2 or x.shape[-1] != w.shape[0]:
        raise RanksError(f"no product of {x.dtype} {tuple(x.shape)} and {w.dtype} {tuple(w.shape)} over storage")
    return storage(group_name, x.device)


def _rows_at_once(s: Any, rows: int, row: int) -> int:
    """So many of ``rows``, each of ``row`` bytes, that those of all other ranks fit into a landing; evenly."""
    most = (s.bytes - s.copied) // max(1, s.size - 1) // ALIGN * ALIGN // max(1, row)
    if most < 1:
        raise RanksError(f"a row of {row} bytes is larger than symmetric storage has room for")
    goes = -(-max(1, rows) // most)
    return max(1, -(-rows // goes))


GATHER_PRODUCT = torch.ops.reflib.symmetric_gather_product.default
PRODUCT_SCATTER = torch.ops.reflib.symmetric_product_scatter.default
RULES.update({str(op): communicates for op in (GATHER_PRODUCT, PRODUCT_SCATTER)})


@torch.library.register_fake("reflib::symmetric_gather_product", lib=_library)
def _gather_product_fake(x: Any, w: Any, group_name: str) -> Any:
    from .candidates import size_of

    return x.new_empty(size_of(group_name) * x.shape[0], *x.shape[1:-1], w.shape[1])


@torch.library.register_fake("reflib::symmetric_product_scatter", lib=_library)
def _product_scatter_fake(x: Any, w: Any, group_name: str) -> Any:
    from .candidates import size_of

    return x.new_empty(x.shape[0] // size_of(group_name), *x.shape[1:-1], w.shape[1])


# -- as often as the landing is large enough ----------------------------------------------------------------
def gather_product(s: Any, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = x of rank r times w; x: [m, k], contiguous. out: [ranks, m, n]."""
    with _Lanes(s, GATHER, x) as lanes:
        with lanes.side():
            lanes.meet(0)
        torch.mm(x, w, out=out[s.rank])
        came = []
        for step in range(1, s.size):
            with lanes.side():
                lanes.slot((s.rank + step) % s.size, step, x.shape).copy_(x)
                lanes.meet(1 + (step - 1) % 2)
                came.append(lanes.mark())
        for step in range(1, s.size):
            with lanes.product(step, came[step - 1]):
                torch.mm(lanes.slot(s.rank, step, x.shape), w, out=out[(s.rank - step) % s.size])


def product_scatter(s: Any, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out = the sum over ranks of their x[this rank] times w; x: [ranks, m, k]."""
    made = out.new_empty(s.size, *out.shape)  # the last: this rank's own
    with _Lanes(s, SCATTER, out) as lanes:
        with lanes.side():
            lanes.meet(0)
        for step in range(1, s.size):
            other = (s.rank + step) % s.size
            with lanes.product(step):
                torch.mm(x[other], w, out=made[step - 1])
                done = lanes.mark()
            with lanes.side(done):
                lanes.slot(other, step, out.shape).copy_(made[step - 1])
        torch.mm(x[s.rank], w, out=made[-1])
        lanes.join()
        lanes.add(made[-1], out)


class _Lanes:
    """Where products and copies run at once: on a GPU three streams, the caller's, ``s.ahead`` and ``s.side``; on a CPU
    there is one order. ``like``: what is copied in each step; ``how``: the kind of exchange."""

    def __init__(self, s: Any, how: str, like: torch.Tensor):
        self.s, self.how, self.cuda = s, how, s.device.type == "cuda"
        self.dtype, self.stride = like.dtype, -(-like.nbytes // ALIGN) * ALIGN
        self.said: Any = (KINDS.index(how), like.nbytes, DTYPES.index(like.dtype))
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> _Lanes:
        self.stack.enter_context(self.s.together())
        if self.cuda:
            from . import kernels

            self.s.in_order()
            self.said = kernels.said(self.how, self.said[1], self.dtype)
            self.main = torch.cuda.current_stream(self.s.device)
            for stream in (self.s.side, self.s.ahead):
                stream.wait_stream(self.main)
        return self

    def __exit__(self, *error: Any) -> None:
        if not any(error):
            self.join()
        self.stack.__exit__(*error)

    def join(self) -> None:
        """What the caller does next comes after all of it."""
        if self.cuda:
            self.main.wait_stream(self.s.ahead)
            self.main.wait_stream(self.s.side)

    @contextlib.contextmanager
    def _on(self, stream: Any, after: Any) -> Iterator[None]:
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield

    def side(self, after: Any = None) -> contextlib.AbstractContextManager[None]:
        return self._on(self.s.side, after) if self.cuda else contextlib.nullcontext()

    def product(self, step: int, after: Any = None) -> contextlib.AbstractContextManager[None]:
        if not self.cuda:
            return contextlib.nullcontext()
        return self._on(self.s.ahead if step % 2 else self.main, after)

    def mark(self) -> Any:
        """What comes after it comes after what has been started here."""
        return torch.cuda.current_stream(self.s.device).record_event() if self.cuda else None

    def slot(self, rank: int, step: int, shape: Any) -> torch.Tensor:
        """In the landing of ``rank``, where the rank ``step`` before it writes."""
        return self.s.part(rank, self.s.copied + (step - 1) * self.stride, shape, self.dtype)

    def meet(self, number: int) -> None:
        """All ranks, each in the order of its stream. 0: the first."""
        if self.cuda:
            from . import kernels

            kernels.meeting(self.s, number, self.said)
        elif number == 0:
            self.s.begin(self.s.copied, self.said)
        else:
            self.s.barrier()

    def add(self, own: torch.Tensor, out: torch.Tensor) -> None:
        """out = the sum over ranks, in their order, of what all have written here by now, and ``own``."""
        s = self.s
        if self.cuda:
            from . import kernels

            return kernels.landed_sum(s, own, out, self.stride, self.said)
        self.meet(2)
        steps = [(s.rank - r) % s.size for r in range(s.size)]
        added([own if step == 0 else self.slot(s.rank, step, out.shape) for step in steps], out)
