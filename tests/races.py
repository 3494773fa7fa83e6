"""Candidates as Python functions, raced by ``autotune/measure`` with clocks that are tables."""

from itertools import cycle

import torch

from reflib.autotune.measure import Result, measure, request
from reflib.ir.program import Program
from tests.measured import matmul_relu

M, N, K = 8, 16, 64


def small(dtype=torch.float32, m=M, target=torch.ops.aten.mm.default) -> Program:
    return matmul_relu(m, N, K, dtype, target=target)


def right(args):
    return (torch.relu(args[0] @ args[1]),)


def wrong(args):
    return (torch.relu(args[0] @ args[1]) + 0.5,)


class Race:
    """Candidates as Python functions, and a clock that reads their times from a table instead of running them."""

    name = "table"

    def __init__(self, **candidates):
        self.candidates = candidates  # name -> (function or exception, microseconds of each round in turn)
        self.program = small()
        self.calls: list[str] = []
        self.order = iter(candidates)

    def build(self, program, options):
        name = next(self.order)
        fn = self.candidates[name][0]
        if isinstance(fn, Exception):
            raise fn

        def call(args):
            self.calls.append(name)
            args, given = list(args), args
            given.clear()
            return fn(args)

        call.candidate = name
        return call

    def sampler(self, call, sets):
        times = cycle(self.candidates[call.candidate][1])
        return lambda: next(times) * 1e-6

    def run(self, default="aten", **more):
        makers = more.pop("makers_by_key", None)
        r = request(dict.fromkeys(self.candidates, self.program), default, **more)
        return measure(r, self.build, makers, clock=self)


class Flat:
    """A clock by which all take the same time."""

    name = "flat"

    def sampler(self, call, sets):
        return lambda: 1e-6


def check(program, **fns) -> Result:
    """These functions of the arguments, by name, as candidates for ``program``; the first is the default."""
    turn = iter(fns.values())
    return measure(request(dict.fromkeys(fns, program), next(iter(fns))), lambda p, o: next(turn), clock=Flat())
