"""What a call reads from all ranks is planned into symmetric storage, so that it is not copied there.

A buffer that a sum over storage reads in place, and all that takes over its memory, is given a place in the planned
part: kernels write it there. Places are assigned as in an arena (``plan.arena``): buffers share bytes if they never
live at once. A buffer lives until its last use, as any other: when the call returns no rank reads it any more. The
allocation becomes a call that returns the place, or other memory where sizes have grown out of the planned part; so
both wrappers have it, and nothing depends on what other ranks have planned (``symmetric``).

What the caller sees, or what may be seen through a view, stays where it was, as does a buffer that a call returned. One
that would take over the memory of such a buffer, or be written in place of it, is given a place instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..ir.expr import expr
from ..ir.program import Buffer, Extern, Program, View
from ..lower.context import contiguous_strides
from ..plan.arena import Storage, assign, in_arena, storages
from ..plan.plan import escaping
from ..plan.steps import Call, Plan
from .agree import group_of
from .reduce import EMPTY, REDUCE, SCATTER, read_in_place
from .symmetric import BYTES


def placed(s: Any) -> tuple[Program, Plan]:
    """Of Stages, the program and its plan, with buffers in an arena (if the options say so) and in storage."""
    program, plan = in_arena(s)
    return program, plan if s.options.target is not None else in_storage(program, plan)


def in_storage(program: Program, plan: Plan) -> Plan:
    """``plan`` with allocations in symmetric storage. Assumes that it has one for each process group and device."""
    groups: dict[tuple[str, str], set[str]] = {}
    for call, x in _of_calls(plan):
        device = program.buffers[x.buffer].device
        if device.type in BYTES and read_in_place(call, device):
            groups.setdefault((group_of(call), str(device)), set()).add(x.buffer)
    steps = list(plan.steps)
    for (group, device), wanted in groups.items():
        for s in _that_fit(program, plan, wanted, BYTES[device.partition(":")[0]] // 2):
            head = program.buffers[s.buffers[0]]
            steps[s.first] = Call(_allocation(head, s, group))
    return Plan(tuple(steps))


def _of_calls(plan: Plan) -> Iterator[tuple[Extern, View]]:
    for step in plan.steps:
        if isinstance(step, Call) and step.extern.target in (REDUCE, SCATTER):
            x = step.extern.args[0]
            if x.strides == contiguous_strides(x.shape):  # (else it is copied in any case)
                yield step.extern, x


def _that_fit(program: Program, plan: Plan, wanted: set[str], most: int) -> list[Storage]:
    """Those with a place; the largest are left out until the others fit."""
    pinned = escaping(program) | program.output_buffers()

    def allowed(chain: list[str], _: set[str]) -> bool:
        return bool(wanted.intersection(chain)) and not pinned.intersection(chain)

    found = []
    for s in storages(program, plan, allowed):
        head = program.buffers[s.buffers[0]]
        if head.kind == "temp" and head.strides == contiguous_strides(head.shape):
            found.append(replace(s, at=expr(0)))
    found.sort(key=lambda s: s.size.hint())
    while found and assign(found).hint() > most:
        found = [replace(s, at=expr(0)) for s in found[:-1]]
    return found


def _allocation(b: Buffer, s: Storage, group: str) -> Extern:
    args = (b.shape, b.dtype, b.device, s.at, group)
    return Extern(f"{b.name}_place", EMPTY, args, (), (b.name,), reason="symmetric storage")
