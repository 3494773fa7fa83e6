"""One sample, stage by stage: which graph, which program, which kernels, and which stage first goes wrong."""

from typing import Any

import torch

from tests import checking

from .batch import Library, Result, _compile, capture, tupled
from .samples import Group, case, samples


def show(key: str) -> int:
    """Print everything about the sample ``op|dtype|mode|number``; 1 if it is wrong."""
    from reflib.options import Options
    from reflib.pipeline import run

    op, dtype, mode, number = key.split("|")
    group = Group(op, dtype, mode)
    one = case(group, int(number), samples(group)[int(number)])
    for i, t in enumerate(one.args):
        print(f"arg {i}: {t.dtype} {tuple(t.shape)} strides {t.stride() if t.layout == torch.strided else t.layout}")
    eager = checking.call(one.fn, one.args, backward=one.backward)
    wide = checking.call(one.fn, one.args, backward=one.backward, wide=True)
    print("eager:", eager.error or [_brief(t) for t in (*eager.leaves, *eager.grads)])
    bad = 0
    for until in ("capture", "lower", "fuse", "schedule", "wrap"):
        made = capture(one)
        if made.error is not None:
            print("AOTAutograd alone cannot capture it:", repr(made.error))
            return 1
        library, options = Library(Options(verify=True)), Options(verify=True)
        library.options = options
        if until == "capture":
            for g in made.graphs:
                print(g)
        else:
            error = _compile(made, options, library, Result(key, ""), until)
            if error is not None:
                raise error
            if until == "wrap":
                library.build()
        for g in made.graphs:
            if until == "lower":
                print(run(g, options, "lower").program)
            elif until == "wrap":
                s = run(g, options, "generate")
                assert s.kernels is not None
                print(s.scheduled, *(k.source for k in s.kernels.values()), sep="\n")
        assert made.compiled is not None
        actual = checking.call(tupled(made.compiled), one.args, backward=one.backward)
        problems = checking.wrong(actual, eager, wide)
        print(f"== after {until}: {problems or 'right'}")
        if actual.error is not None:
            import traceback

            traceback.print_exception(actual.error)
        bad = bad or bool(problems)
        if problems and until == "capture":
            print("   (with no stage of ours but the decompositions)")
    return int(bad)


def _brief(t: Any) -> str:
    if isinstance(t, torch.Tensor) and t.layout == torch.strided:
        return f"{t.dtype} {tuple(t.shape)} {t.stride()}"
    return repr(t)[:80]
