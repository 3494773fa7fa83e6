"""Which measured candidate wins, and why."""

import math
from collections.abc import Sequence

from ..ir.decision import Candidate, Key

NOISE = 0.02  # a smaller difference counts as none, whatever the spread: where its tensors lie moves a kernel by 1.4%


def pick_winner(rows: Sequence[Candidate], default: str, min_speedup: float = 1.0) -> tuple[str, str]:
    """The winner's name, and why in one sentence. The fastest right candidate wins whose lead over the default is
    more than the spread (``Samples.spread``; the larger of both, NOISE at least) and ``min_speedup`` or more. A
    candidate that was dropped after a short round was not raced, and cannot win."""
    own = next(r for r in rows if r.name == default)
    right = sorted((r for r in rows if r.status == "ok" and r.time_us is not None and not r.dropped), key=_time)
    others = [r for r in right if r.name != default]
    if own not in right:
        what = f"{default} is {own.status}" if own.status != "error" else f"{default} failed"
        what += f" ({own.why})" if own.why else ""
        if not others:
            return default, f"{what}, and there is no other to take: {default} stays"
        return others[0].name, f"{what}; {others[0].name} {_us(others[0])} is the fastest that is right"
    if not others:
        return default, f"{default} {_us(own)}: no other candidate is right and was timed"
    refused = ""
    for r in others:
        ratio = _time(own) / max(_time(r), 1e-9)
        spread = max(own.spread or 0.0, r.spread or 0.0, NOISE)
        both = f"{r.name} {_us(r)}, {default} {_us(own)}: {ratio:.2f}x"
        if ratio <= 1:
            break
        if ratio - 1 <= spread:
            refused = refused or f"{both} is inside the spread of {spread:.0%}, so {default} stays"
        elif ratio < min_speedup:
            refused = refused or f"{both} faster is less than the {min_speedup:.2f}x asked for, so {default} stays"
        else:
            return r.name, f"{both} faster, spread {max(own.spread or 0.0, r.spread or 0.0):.0%}"
    if refused:
        return default, refused
    return default, f"{default} {_us(own)} is the fastest; {others[0].name} {_us(others[0])} comes next"


def overall(key: Key, rows: Sequence[Candidate]) -> Candidate:
    """One row for a candidate that was measured at several sizes: geometric means of its times and of 1 + its spreads
    (so that one size where the machine was busy does not decide alone). ``ok`` only if it is at every size."""
    bad = next((r for r in rows if r.status != "ok" or not r.time_us), None)
    if bad is not None or not rows:
        status = bad.status if bad is not None and bad.status != "ok" else "unmeasured"
        return Candidate(key, status, why="" if bad is None else bad.why)
    time = math.exp(sum(math.log(_time(r)) for r in rows) / len(rows))
    spread = math.expm1(sum(math.log1p(r.spread or 0.0) for r in rows) / len(rows))
    return Candidate(key, "ok", time, spread=spread, dropped=any(r.dropped for r in rows))


def _time(r: Candidate) -> float:
    return math.inf if r.time_us is None else r.time_us


def _us(r: Candidate) -> str:
    t = _time(r)
    return f"{t:.1f} us" if t < 100 else f"{t:.0f} us"
