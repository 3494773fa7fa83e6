"""One sample, stage by stage: which graph, which program, which kernels, and which stage first goes wrong."""

import traceback
from typing import Any

import torch

from tests import checking
from tests.stopping import Until

from .judging import compiled
from .samples import Group, case, samples


def show(key: str) -> int:
    """Print everything about the sample ``op|dtype|mode|number``; 1 if it is wrong."""
    op, dtype, mode, number = key.split("|")
    group = Group(op, dtype, mode)
    one = case(group, int(number), samples(group)[int(number)])
    for i, t in enumerate(one.args):
        print(f"arg {i}: {t.dtype} {tuple(t.shape)} strides {t.stride() if t.layout == torch.strided else t.layout}")
    eager = checking.call(one.fn, one.args, backward=one.backward)
    wide = checking.call(one.fn, one.args, backward=one.backward, wide=True)
    print("eager:", eager.error or [_brief(t) for t in (*eager.leaves, *eager.grads)])
    bad = 0
    for until in ("aot_eager", "lower", "fuse", "schedule", "wrap"):
        seen: list[Any] = []
        backend = until if until == "aot_eager" else Until(until, seen.append, fallback_random=True)
        actual = checking.call(compiled(one, backend), one.args, backward=one.backward)
        for s in seen:
            if until == "lower":
                print(s.graph, s.program, sep="\n")
            elif until == "wrap":
                print(s.scheduled, *(k.source for k in s.kernels.values()), sep="\n")
        problems = checking.wrong(actual, eager, wide)
        print(f"== after {until}: {problems or 'right'}")
        if actual.error is not None:
            traceback.print_exception(actual.error)
        bad = bad or bool(problems)
    return int(bad)


def _brief(t: Any) -> str:
    if isinstance(t, torch.Tensor) and t.layout == torch.strided:
        return f"{t.dtype} {tuple(t.shape)} {t.stride()}"
    return repr(t)[:80]
