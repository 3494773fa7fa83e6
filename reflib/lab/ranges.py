"""For chapters about autotuning: decisions from given times, and the variants of a program by size as a table and as a
chart of time over the size.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from reflib.errors import LabError
from reflib.lab.moving import Explorer, emit
from reflib.lab.range_spec import range_spec
from reflib.lab.rows import Rows, short

Times = Callable[[str, Mapping[str, int]], float]
Requested = list[tuple[str, dict[str, int]]]


@contextmanager
def told_times(times: Times) -> Iterator[Requested]:
    """Context in which autotuning calls ``times(candidate, {size symbol: value})`` (µs per call) instead of measuring.

    Decisions are then the same on every machine, also for a ``target`` that is not present. All else (guards, ranges,
    thresholds, fusion) is unchanged. Yields a list to which each request for a time is appended.

    >>> with told_times(lambda name, sizes: 1.0 if name == "mine" else 2.0) as requested: ...
    """
    decide: Any = importlib.import_module("reflib.autotune.decide")  # the module, not the function of that name
    points: Any = importlib.import_module("reflib.autotune.points")
    requested: Requested = []
    statically = decide._decide_statically

    def given(request: Any, *_: Any, **__: Any) -> Any:
        return _result(request, times, requested)

    def given_for_a_target(program: Any, choice: Any, target: Any, options: Any) -> Any:
        """Decide with the given times for a target that is not present, which normally is not measured."""
        if options.autotune == "off":
            return statically(program, choice, target, options)
        work = decide.new_work(options, lambda device: target, None, {})
        return decide._decide_by_measuring(program, choice, target, work)

    instead = [
        (points, "measure", given),
        (decide, "_decide_statically", given_for_a_target),
        (points, "_send", lambda *_: None),  # times are given, in this process
        (points, "device_lock", lambda *_: contextlib.nullcontext()),
        (points.known, "find", lambda *_: None),  # earlier measurements are not used, and
        (points.known, "keep", lambda *_: None),  # the given times are not stored
    ]
    with contextlib.ExitStack() as stack:
        for module, name, fn in instead:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, fn)
        yield requested


def _result(request: Any, times: Times, requested: Requested) -> Any:
    from reflib.autotune.request import Result
    from reflib.autotune.winner import pick_winner
    from reflib.ir.decision import Candidate

    rows = []
    for name in request.programs:
        requested.append((name, dict(request.sizes)))
        us = float(times(name, dict(request.sizes)))
        rows.append(Candidate(request.key(name), "ok", us, us, None, 0.0, 0.0, "told"))
    winner, reason = pick_winner(rows, request.default, request.min_speedup)
    return Result(tuple(rows), winner, reason, "told", "told")


def variants(e: Any) -> list[dict[str, Any]]:
    """One dict per variant by size in an explanation's program: its condition and what runs then. Empty if one winner
    serves all sizes."""
    from reflib.ir.program import kernels_and_calls

    rows = []
    for v in (v for node in _by_size(e) for v in node.variants):
        condition = " and ".join(_condition(p) for p in v.predicate) or "otherwise"
        kernels, calls = kernels_and_calls(v.nodes)
        rows.append({"if": condition, "runs": v.name.removeprefix("else: "), "kernels": kernels, "calls": calls})
    return rows


def _by_size(e: Any) -> list[Any]:
    """The nodes with one variant per range of a size, not those with a fast kernel and its fallback."""
    from reflib.ir.program import Variants

    return [n for n in e.scheduled.nodes if isinstance(n, Variants) and not n.of_kernels]


def served(e: Any, top: int) -> list[tuple[int, int, str]]:
    """(least, most, winner) per range of the first decision in an explanation, up to ``top``. One range if one winner
    serves all sizes. A winner's other conditions on the sizes are omitted."""
    node = next(iter(_by_size(e)), None)
    if node is None:
        return [(1, top, e.decisions[0].winner)]
    out: list[tuple[int, int, str]] = []
    least = 1
    for v in node.variants:
        most = next((p.value for p in v.predicate if p.kind == "at_most"), top)
        if least <= most:
            out.append((least, most, v.name.rsplit(": ", 1)[-1]))
            least = most + 1
    return out


def _condition(p: Any) -> str:
    signs = {"at_most": "{} <= {}", "at_least": "{} >= {}", "divisible": "{} % {} == 0", "equal": "{} == {}"}
    signs["differs"] = "{} != {}"
    return signs[p.kind].format(p.what, p.value) if p.kind in signs else f"{p.kind}: {p.what} {p.value}"


def range_picture(
    rows: Rows,
    served: Sequence[tuple[int, int, str]],
    *,
    caption: str,
    x: str = "size",
    tuned: Sequence[int] = (),
) -> Explorer | None:
    """Draw time (µs) over a size: one line per case, and a strip below that shows which case serves which sizes. In
    Vega-Lite a size can be selected to compare all cases at it.

    served: (least, most, case) per range, in order; a case without a line is grey.
    tuned: sizes at which autotuning measured; marks in the strip.
    Prints a line and returns None if nothing was measured.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows.where(metric="time"):
        if row.ok and row.value and x in row.at:
            lines.setdefault(row.case, []).append((row.at[x], row.value))
    if not lines:
        print("Nothing to draw: no time was measured here.")
        return None
    if not served:
        raise LabError("range_picture: served= needs at least one (least, most, case)")
    for points in lines.values():
        points.sort()
    return emit(range_spec(lines, served, tuned, x, caption, _alt(lines, served, x)))


def _alt(lines: Mapping[str, list[tuple[float, float]]], served: Sequence[tuple[int, int, str]], x: str) -> str:
    ends = "; ".join(
        f"{case}: {short(points[0][1])} at {short(points[0][0])}, {short(points[-1][1])} at {short(points[-1][0])}"
        for case, points in lines.items()
    )
    ranges = "; ".join(f"{case} from {least:,} to {most:,}" for least, most, case in served)
    return f"Line chart of µs over {x}. {ends}. A strip below shows which case serves: {ranges}."
