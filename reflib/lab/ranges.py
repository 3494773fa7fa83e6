"""For chapters about choosing: choosing that is told instead of measuring, the arms of a compiled region as a table,
and a chart of time over a size with the arms under it.
"""

from __future__ import annotations

import contextlib
import html
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError
from reflib.lab.explorer import Explorer
from reflib.lab.figures import COLOURS, INK, QUIET, plain_log, series_style, style, to_svg
from reflib.lab.range_spec import range_spec
from reflib.lab.rows import Rows, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Times = Callable[[str, Mapping[str, int]], float]
Asked = list[tuple[str, dict[str, int]]]


@contextmanager
def told_times(times: Times) -> Iterator[Asked]:
    """Inside, choosing does not measure: ``times(candidate, {size symbol: value})`` says how many µs a call takes.

    What is chosen is then the same on every machine, and a ``target`` that is not here can be chosen for. Everything
    else is as always: guards, ranges, thresholds, fusing. Yields the questions asked, as a list that grows.

    >>> with told_times(lambda name, sizes: 1.0 if name == "mine" else 2.0) as asked: ...
    """
    decide: Any = importlib.import_module("reflib.choose.decide")  # the module: the package has a function of that name
    asked: Asked = []
    statically = decide._decide_statically
    known = decide.known

    def told(request: Any, *_: Any, **__: Any) -> Any:
        return _result(request, times, asked)

    def told_for_a_target(program: Any, choice: Any, target: Any, options: Any) -> Any:
        """Nothing can be measured for a target that is not here; but it can be told."""
        if options.autotune == "off":
            return statically(program, choice, target, options)
        work = decide._Work(options, lambda device: target, None, {})
        return decide._decide_by_measuring(program, choice, target, work)

    instead = [
        (decide, "measure", told),
        (decide, "_decide_statically", told_for_a_target),
        (decide, "isolated", lambda *_: "it is told, not measured"),
        (decide, "device_lock", lambda *_: contextlib.nullcontext()),
        (known, "find", lambda *_: None),  # what was measured once does not count, and
        (known, "keep", lambda *_: None),  # what is told here is not to be found later
    ]
    with contextlib.ExitStack() as stack:
        for module, name, fn in instead:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, fn)
        yield asked


def _result(request: Any, times: Times, asked: Asked) -> Any:
    from reflib.choose.decision import Candidate
    from reflib.choose.request import Result
    from reflib.choose.winner import decide

    rows = []
    for name in request.programs:
        asked.append((name, dict(request.sizes)))
        us = float(times(name, dict(request.sizes)))
        rows.append(Candidate(name, "ok", us, us, None, 0.0, 0.0, "told"))
    winner, reason = decide(rows, request.default, request.min_speedup)
    return Result(tuple(rows), winner, reason, "told", "told")


def arms(e: Any) -> list[dict[str, Any]]:
    """A line for each arm of each dispatched region in an explanation: what it asks of the sizes, what runs then.
    Empty where one winner serves all sizes."""
    from reflib.ir.program import Dispatch, Extern, walk

    lines = []
    for node in e.chosen.nodes:
        if not isinstance(node, Dispatch):
            continue
        for arm in node.arms:
            inside = list(walk(arm.nodes))
            calls = sum(isinstance(n, Extern) for n in inside)
            asks = " and ".join(_condition(p) for p in arm.predicate) or "otherwise"
            runs = arm.label.removeprefix("else: ")
            lines.append({"if": asks, "runs": runs, "kernels": len(inside) - calls, "calls": calls})
    return lines


def served(e: Any, top: int) -> list[tuple[int, int, str]]:
    """(least, most, winner) for each range of the first decision in an explanation, up to ``top``. Where one winner
    serves all sizes, one range. What a winner asks of the sizes besides is left out."""
    from reflib.ir.program import Dispatch

    node = next((n for n in e.chosen.nodes if isinstance(n, Dispatch)), None)
    if node is None:
        return [(1, top, e.decisions[0].winner)]
    out: list[tuple[int, int, str]] = []
    least = 1
    for arm in node.arms:
        most = next((p.value for p in arm.predicate if p.kind == "at_most"), top)
        if least <= most:
            out.append((least, most, arm.label.rsplit(": ", 1)[-1]))
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
    metric: str = "time",
) -> Explorer | None:
    """Time over a size: a line a case, and a strip under them that says who serves which sizes. Where Vega-Lite is
    drawn, a size can be picked, to see all cases at it.

    served: (least, most, case) for every range, in order; a case that has no line of its own is drawn in grey.
    tuned: sizes at which was measured in order to choose; ticks in the strip.
    Returns None, and says so, where nothing was measured.
    """
    import matplotlib.pyplot as plt

    from reflib.lab.showing import display_thing

    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows.where(metric=metric):
        if row.ok and row.value and x in row.at:
            lines.setdefault(row.case, []).append((row.at[x], row.value))
    if not lines:
        print(f"Nothing to draw: no {metric} was measured here.")
        return None
    if not served:
        raise LabError("range_picture: served= needs at least one (least, most, case)")
    with style():
        fig, (ax, strip) = plt.subplots(
            2, 1, sharex=True, figsize=(5.6, 4.4), height_ratios=(9, 1), gridspec_kw={"hspace": 0.08}
        )
        for index, (case, points) in enumerate(lines.items()):
            points.sort()
            ax.plot(*zip(*points, strict=True), label=case, **series_style(index))
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        plain_log(ax)
        ax.set_ylabel("time of one call, µs")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2 if max(map(len, lines)) <= 20 else 1)
        for least, _, _ in served[1:]:
            ax.axvline(least - 0.5, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
        _strip(strip, served, list(lines), tuned, [p for points in lines.values() for p, _ in points])
        strip.set_xlabel(x)
    alt = _alt(lines, served, x)
    svg = to_svg(fig)
    plt.close(fig)
    head, _, rest = svg.partition(">")
    svg = f'{head} role="img">\n <title>{html.escape(alt)}</title>{rest}'
    found = Explorer(range_spec(lines, served, tuned, x, caption, alt), svg, alt, caption)
    display_thing(found)
    return found


def _strip(
    ax: Axes, served: Sequence[tuple[int, int, str]], cases: Sequence[str], tuned: Sequence[int], xs: list[float]
) -> None:
    """Bars, in the colours of the lines, from the first to the last size that each case serves."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(xs), max(xs)
    for least, most, case in served:
        left, right = max(low, least - 0.5), min(high, most + 0.5)
        if left >= right:
            continue
        colour = COLOURS[cases.index(case) % len(COLOURS)] if case in cases else QUIET
        ax.barh(0, right - left, left=left, height=1, color=colour, edgecolor="#ffffff", linewidth=1.5)
        name = case.split("(")[0].replace("_", " ")
        ax.text((left * right) ** 0.5, 0, name, color="#ffffff", ha="center", va="center", fontsize=8.5, clip_on=True)
    inside = [t for t in tuned if low <= t <= high]
    ax.plot(inside, [0.72] * len(inside), linestyle="none", marker="v", markersize=4, color=INK)
    ax.set_ylim(-0.5, 1.0)
    ax.grid(visible=False)
    ax.spines["left"].set_visible(False)
    ax.yaxis.set_major_locator(NullLocator())
    ax.xaxis.set_major_locator(LogLocator(base=4, numticks=8))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}"))


def _alt(lines: Mapping[str, list[tuple[float, float]]], served: Sequence[tuple[int, int, str]], x: str) -> str:
    ends = "; ".join(
        f"{case}: {short(points[0][1])} at {short(points[0][0])}, {short(points[-1][1])} at {short(points[-1][0])}"
        for case, points in lines.items()
    )
    who = "; ".join(f"{case} from {least:,} to {most:,}" for least, most, case in served)
    return f"Line chart of µs over {x}. {ends}. A strip below says who serves: {who}."
