"""Random programs: fused or not, on a CPU or a GPU target, they compute the same."""

import torch
import torch.nn.functional as F
from fuse_cases import CPU, GPU, check_same, lowered
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reflib.fuse import fuse
from reflib.options import Options

FAST = [Phase.explicit, Phase.generate]  # a failing example is not made smaller: tracing is slow
SHAPES = [(4, 6), (6, 4), (24,), (4, 1), (6,), (2, 2, 6)]
UNARY = [torch.sin, torch.relu, lambda t: t * 0.5 + 1, torch.neg, torch.sigmoid]
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: torch.where(a > b, a, b * 0.5)]
VIEWS = [
    lambda t, k: t.transpose(0, -1),
    lambda t, k: t.reshape(-1),
    lambda t, k: t.reshape(2, -1) if t.numel() % 2 == 0 and t.numel() else t,
    lambda t, k: t.reshape(-1, 3) if t.numel() % 3 == 0 and t.numel() else t,
    lambda t, k: t[..., k % 2 :],
    lambda t, k: t[::2],
    lambda t, k: t.flip(-1),
    lambda t, k: t.unsqueeze(k % 2),
    lambda t, k: t.contiguous().clone(),
]
ROWS = [
    lambda t, d: t.sum(d, keepdim=True),
    lambda t, d: t.amax(d),
    lambda t, d: t.mean(d),
    lambda t, d: t.argmax(d).to(torch.float32),
    lambda t, d: torch.softmax(t, d),
    lambda t, d: t.sum(),
    lambda t, d: t.cumsum(d),
]
PIECES = [
    lambda a, b: torch.cat([a, b], 0) if a.shape[1:] == b.shape[1:] and a.dim() else a,
    lambda a, b: torch.cat([a, a * 2], -1),
    lambda a, b: F.pad(a, (1, 2)),
    lambda a, b: a[(b.reshape(-1)[:3].abs() * 100).long() % a.shape[0]],
    lambda a, b: torch.stack([a, a.sin()], 0).sum(0),
]


def small(t):
    return t.numel() <= 200 and t.dim() <= 4 and all(n > 0 for n in t.shape) and t.dim() > 0


def chosen(table):
    return lambda a, b, which, j: table[which % len(table)](a, b)


def unary(a, b, which, j):
    return UNARY[which % len(UNARY)](a)


def binary(a, b, which, j):
    try:
        torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        b = a.sin()
    return BINARY[which % len(BINARY)](a, b)


def view(a, b, which, j):
    return VIEWS[which % len(VIEWS)](a, j)


def row(a, b, which, j):
    return ROWS[which % len(ROWS)](a, j % a.dim())


def interpretation(steps, mutate, kinds, often=()):
    """The function that a list of steps stands for. ``kinds``: what a step may be; ``often``: kinds whose results are
    chosen more often."""

    def fn(*inputs):
        pool = [t * 0.5 if i in mutate else t for i, t in enumerate(inputs)]
        for kind, which, i, j in steps:
            out = kinds[kind](pool[i % len(pool)], pool[j % len(pool)], which, j)
            if small(out):
                pool += [out] * (1 + (kinds[kind] in often))
        for i in mutate:
            new = next((t for t in reversed(pool) if t.shape == inputs[i].shape), pool[i])
            inputs[i].copy_(new)
        return tuple(t.neg() for t in pool[-3:])

    return fn


def step(kinds):
    return st.tuples(st.integers(0, len(kinds) - 1), st.integers(0, 9), st.integers(0, 30), st.integers(0, 30))


KINDS = [unary, binary, view, row, chosen(PIECES)]


@settings(max_examples=25, deadline=None, phases=FAST, suppress_health_check=list(HealthCheck))
@given(st.lists(step(KINDS), min_size=3, max_size=14), st.sets(st.integers(0, 2), max_size=2), st.integers(0, 99))
def test_random_programs(steps, mutate, seed):
    torch.manual_seed(seed)
    args = [torch.randn(s) for s in SHAPES]
    fn = interpretation(steps, sorted(mutate), KINDS)
    program = lowered(fn, args)
    for target, options in ((GPU, Options()), (CPU, Options(max_fused_ops=15))):
        check_same(program, fuse(program, options, target), fn, args)
