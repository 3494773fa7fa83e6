"""Kernels that reduce rows and sum columns (``fuse.mix_order``), printed in Triton.

::

    r = ...                                        the columns, and all that does not change from row to row
    sum0 = zeros [XBLOCK, RBLOCK]
    x = the program's first XBLOCK rows
    next3 = tl.load(...)                           ... which are loaded
    for x0 in range(pid * XBLOCK, rows, P * XBLOCK):
        v3 = next3                                 this step's rows are here
        next3 = tl.load(...)                       the next step's are on their way while these are worked on
        ...                                        the persistent body
        sum0 = sum0 + v7
    tl.store(part + row pid, sum0 over its XBLOCK rows)

A loop's rows come one after another, and each waits for its own reductions, so loads are ahead by one step: else the
memory would be idle meanwhile. They wait in registers, in their own dtype. (TorchInductor has Triton's pipeliner put
them into shared memory.) Where groups of rows are summed apart (the gradient of a shift for each image), a program has
rows of one. The accumulators have XBLOCK rows as well, since adding these up takes an exchange between
warps: that happens once, at the end.
"""

from dataclasses import replace
from typing import Any

import torch

from ..fuse.mix_order import programs
from ..ir.expr import Expr, Ref, Var, expr, mod, product
from ..ir.loops import Load, Store, stmt_args, stmt_exprs
from ..ir.program import Buffer, Config
from ..schedule.axes import Space
from ..schedule.mixed import by_group
from .triton_body import BLOCK, PartPrinter
from .triton_facts import paren
from .triton_statements import Dims


class MixedPrinter(PartPrinter):
    """Prints the one part of such a kernel: a program per row of the partial sums."""

    def __init__(self, space: Space, config: Config, buffers: dict[str, Buffer], *more: Any, **named: Any):
        super().__init__(by_group(space, buffers), config, buffers, *more, **named)

    def programs(self) -> Expr:
        return expr(programs(self._sums(), int(self._rsize()), self.buffers))

    def print(self) -> list[str]:
        body, each, z = self.space.body, self._varies(), self.space.z
        groups = 1 if z is None else int(z.size)
        rows, share = self.space.x.size // groups, int(self.programs()) // groups
        self.step = share * self.block["x"]
        self.end, start = self.size(rows), "pid * XBLOCK"
        self.put(f"pid = tl.program_id(0){'.to(tl.int64)' if self.wide else ''}")
        if z is not None:  # a program has rows of one group
            self.masks["x"] = rows.constant is None or int(rows) % self.block["x"] != 0
            self.put(f"z = pid // {share}")
            self.put(f"end = (z + 1) * {paren(self.end)}")
            self.end, start = "end", f"z * {paren(self.end)} + pid % {share} * XBLOCK"
        self._r_block("")
        for i in range(len(body)):
            if not each[i]:
                self.statement(i)
        self.ahead = [i for i, s in enumerate(body) if isinstance(s, Load) and each[i] and self._may_be_ahead(i, s)]
        for total in self._sums():
            self.put(f"{self._sum(total)} = tl.full({self._shape(BLOCK)}, 0, tl.float32)")
        self.put(f"x = {start} + {self.arange('x')}")
        self._fetch(expr(0))
        self.put(f"for x0 in range({start}, {self.end}, {self.step}):")
        self.indent = "    "
        self.put(f"x = x0 + {self.arange('x')}")
        if self.masks["x"]:
            self._mask("x")
        for i in self.ahead:
            s = body[i]
            assert isinstance(s, Load)
            self._bind(i, self._widened(f"next{i}", s), self.dims[i])
        self._fetch(expr(self.step))
        for i in range(len(body)):
            if each[i] and i not in self.ahead:
                self.statement(i)
        self.indent = ""
        for total in self._sums():
            self._store_sum(total)
        return self.lines

    def _mask(self, d: str) -> None:
        self.put(f"xmask = x < {self.end}")

    def _sums(self) -> list[Store]:
        return [s for s in self.space.stores if s.reduce]

    def _sum(self, s: Store) -> str:
        return f"sum{self._sums().index(s)}"

    def _varies(self) -> list[bool]:
        """For each statement: does it change from row to row?"""
        out: list[bool] = []
        for s in self.space.body:
            here = any(e.has(self.space.x) for e in stmt_exprs(s)) or any(out[a] for a in stmt_args(s))
            out.append(here or isinstance(s, Store))
        return out

    # -- the next step's rows -------------------------------------------------------------------
    def _may_be_ahead(self, i: int, s: Load) -> bool:
        """Is it known early where to read, and is the data there?"""
        chosen = s.mask is not None or any(isinstance(a, Ref) for a in s.index.atoms())
        stored = any(isinstance(o, Store) and o.buffer == s.buffer for o in self.space.body[:i])
        return not (chosen or stored or i in self.unread)

    def _fetch(self, by: Expr) -> None:
        """Load the rows ``by`` further on, as far as there are any."""
        self.put(f"more = x < {self.size(self.space.x.size - by) if self.space.z is None else f'end - {by}'}")
        self.dims: dict[int, Dims] = {}
        masks = dict(self.masks)
        self.masks["x"] = True
        for i in self.ahead:
            s = self.space.body[i]
            assert isinstance(s, Load)
            call, self.dims[i] = self._load_call(
                i, replace(s, index=s.index.subs({self.space.x: expr(self.space.x) + by}))
            )
            self.put(f"next{i} = {call.replace('xmask', 'more')}")
        self.masks = masks

    # -- the sums -------------------------------------------------------------------------------
    def _store(self, s: Store) -> None:
        if not s.reduce:
            super()._store(s)
            return
        value = self.operand(s.value, torch.float32)
        value = f"tl.where(xmask, {value}, 0)" if self.masks["x"] else value
        self.put(f"{self._sum(s)} = {self._sum(s)} + {value}")

    def _store_sum(self, s: Store) -> None:
        """One row of the partial results."""
        name, one = self._sum(s), self.block["x"] == 1
        shape, pid = self.buffers[s.buffer].shape, expr(Var("pid", self.programs()))
        assert not s.index.has(self.space.x)
        row = mod(pid, shape[0]) * product(shape[1:])
        text, masks, _ = self._access(s.index + row, ())
        total = name if one else f"tl.sum({name}, axis={self.order.index('x')}, keep_dims=True)"
        mask = f", mask={' & '.join(masks)}" if masks else ""
        self.put(f"tl.store({self.pointer(s.buffer)} + ({text}), {total}{mask})")
