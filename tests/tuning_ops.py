"""Ops for worker processes: one with several implementations, most of which misbehave. Imported there by its path."""

import ctypes
import functools
import os
import sys
import time

import torch

Tensor = torch.Tensor


def _op(name: str, body):  # type: ignore[no-untyped-def]
    def op(a: Tensor, b: Tensor) -> Tensor:
        return body(a, b)

    made = torch.library.custom_op(f"tuning_faults::{name}", mutates_args=())(op)
    made.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    return made


def candidate(body):  # type: ignore[no-untyped-def]
    """A decomposition that is the call of one op, which does so: what it does is not seen before it runs."""
    op = _op(body.__name__, body)

    @functools.wraps(body)
    def call(a: Tensor, b: Tensor) -> Tensor:
        return op(a, b)

    call.op = op  # type: ignore[attr-defined]
    return call


def _slow(a: Tensor, b: Tensor) -> Tensor:
    time.sleep(0.05)
    return a @ b


product = _op("product", _slow)


def slow_input(a: Tensor) -> Tensor:
    time.sleep(2)
    return torch.ones_like(a)


def good(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def wrong(a: Tensor, b: Tensor) -> Tensor:
    return a @ b + 0.1


@candidate
def crashing(a: Tensor, b: Tensor) -> Tensor:
    if "pytest" not in sys.modules:  # in a worker
        ctypes.string_at(0)
    return a @ b


@candidate
def leaving(a: Tensor, b: Tensor) -> Tensor:
    os._exit(3)


@candidate
def hanging(a: Tensor, b: Tensor) -> Tensor:
    while True:
        pass


@candidate
def starving(a: Tensor, b: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("out of memory: tried to allocate 1 EiB")


@candidate
def raising(a: Tensor, b: Tensor) -> Tensor:
    raise ValueError("no such luck")


@candidate
def daemonizing(a: Tensor, b: Tensor) -> Tensor:
    """Leaves a process behind that has all that the worker had open, and dies while it measures."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
        os._exit(0)
    os._exit(5)


@candidate
def forking(a: Tensor, b: Tensor) -> Tensor:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)


@candidate
def doubling(a: Tensor, b: Tensor) -> Tensor:
    """The copy goes on as if it were the worker."""
    os.fork()
    return a @ b
