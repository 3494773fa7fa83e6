"""Ops for worker processes: one with several implementations, most of which misbehave. Imported there by its path."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import torch

Tensor = torch.Tensor


def _fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _op(name: str, body):  # type: ignore[no-untyped-def]
    def op(a: Tensor, b: Tensor) -> Tensor:
        return body(a, b)

    made = torch.library.custom_op(f"tuning_faults::{name}", mutates_args=())(op)
    made.register_fake(_fake)
    return made


def _slow(a: Tensor, b: Tensor) -> Tensor:
    time.sleep(0.05)
    return a @ b


def _crash(a: Tensor, b: Tensor) -> Tensor:
    if "pytest" not in sys.modules:  # in a worker
        ctypes.string_at(0)
    return a @ b


def _exit(a: Tensor, b: Tensor) -> Tensor:
    os._exit(3)


def _hang(a: Tensor, b: Tensor) -> Tensor:
    while True:
        pass


def _memory(a: Tensor, b: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("out of memory: tried to allocate 1 EiB")


def _raises(a: Tensor, b: Tensor) -> Tensor:
    raise ValueError("no such luck")


product = _op("product", _slow)
crash, leave, hang, memory, raises = (
    _op(name, body)
    for name, body in (("crash", _crash), ("leave", _exit), ("hang", _hang), ("memory", _memory), ("raises", _raises))
)


def good(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def wrong(a: Tensor, b: Tensor) -> Tensor:
    return a @ b + 0.1


def crashing(a: Tensor, b: Tensor) -> Tensor:
    return crash(a, b)


def leaving(a: Tensor, b: Tensor) -> Tensor:
    return leave(a, b)


def hanging(a: Tensor, b: Tensor) -> Tensor:
    return hang(a, b)


def starving(a: Tensor, b: Tensor) -> Tensor:
    return memory(a, b)


def raising(a: Tensor, b: Tensor) -> Tensor:
    return raises(a, b)
