"""Plots of tidy rows: `lab.lines` over a sweep, `lab.bars` of cases.

Each draws this machine's rows in full colour and recorded rows, if given, fainter, computes its alt text from the
numbers, and emits the figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from reflib.lab.figures import (
    HATCHES,
    INK,
    QUIET,
    Picture,
    below_each_other,
    colour,
    figure,
    note,
    palette,
    plain,
    plain_log,
    series_style,
    style,
)
from reflib.lab.rows import Row, Rows, short, show_plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECORDED = " (recorded)"
AXIS = {
    "bytes": "bytes", "time": "µs", "bandwidth": "GB/s", "rate": "TFLOP/s", "peak memory": "MB", "first call": "s",
    "tuned": "s",
}  # fmt: skip


def lines(
    rows: Rows,
    *,
    caption: str,
    x: str = "bytes",
    metric: str = "time",
    recorded: Rows | None = None,
    curves: Mapping[str, Callable[[float], float]] | None = None,
    levels: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
    log: str = "xy",
    title: str = "",
) -> Picture | None:
    """One line per case over the sweep's `x`, with the interquartile range shaded.

    `curves` are functions of x for comparison, `levels` horizontal lines and `marks` vertical ones, each by its label;
    `log` names the logarithmic axes. Prints a line and returns None if there is nothing to draw.
    """
    import matplotlib.pyplot as plt

    groups = _series(rows, recorded, x, metric)
    if not groups:
        print(f"Nothing to draw: no {metric} was measured here, and none is recorded yet.")
        return None
    with style():
        fig, ax = plt.subplots()
        turn = palette(list(dict.fromkeys(points[0].case for points in groups.values())))
        for label, points in groups.items():
            _line(ax, label, points, turn[points[0].case], x)
        xs = sorted({p.at[x] for points in groups.values() for p in points})
        for label, curve in (curves or {}).items():
            ax.plot(xs, [curve(v) for v in xs], color=INK, linewidth=1, label=label)
        _scales(ax, x, log)
        _notes(ax, levels or {}, marks or {})
        ax.set_xlabel("bytes moved by one call" if x == "bytes" else x)
        ax.set_ylabel(f"{metric}, {AXIS.get(metric, '')}".rstrip(", "))
        shown = len(groups) + len(curves or {})
        ax.set_title(title or ("" if shown > 1 else next(iter(groups))))
        if shown > 1:
            ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=_columns(ax))
    alt = _lines_alt(groups, x, metric, levels or {}, marks or {})
    place = short_bytes if x == "bytes" else short
    for label, curve in (curves or {}).items():
        alt += f" {label}: " + ", ".join(f"{short(curve(v))} at {place(v)}" for v in (xs[0], xs[-1])) + "."
    return figure(fig, caption=caption, alt=alt)


def _line(ax: Axes, label: str, points: list[Row], index: int, x: str) -> None:
    """A case has the same colour and marker on all devices; recorded lines have hollow marks."""
    xs = [p.at[x] for p in points]
    ys = [p.value or 0.0 for p in points]
    half = [(p.spread or 0.0) / 2 for p in points]
    look = series_style(index)
    if label.endswith(RECORDED):
        look |= {"markerfacecolor": "#ffffff", "linestyle": (0, (1, 1))}
    ax.plot(xs, ys, label=label, **look)
    low = [max(y - h, 0.2 * y) for y, h in zip(ys, half, strict=True)]
    high = [y + h for y, h in zip(ys, half, strict=True)]
    ax.fill_between(xs, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _series(rows: Rows, recorded: Rows | None, x: str, metric: str) -> dict[str, list[Row]]:
    """label -> points in order of x. Labels of recorded lines include the device."""
    groups: dict[str, list[Row]] = {}
    elsewhere = rows.elsewhere(recorded)
    for row in [*rows, *elsewhere]:
        if row.metric == metric and row.ok and x in row.at and row.value:
            groups.setdefault(_series_name(row, row in elsewhere, bool(elsewhere)), []).append(row)
    return {k: sorted(v, key=lambda r: r.at[x]) for k, v in groups.items()}


def _series_name(row: Row, is_recorded: bool, several: bool) -> str:
    if not several:
        return row.case
    return f"{row.case}, {nickname(row.device)}{RECORDED if is_recorded else ''}"


def _columns(ax: Axes) -> int:
    """The legend's columns: two if they fit above a narrow figure, else one."""
    return 2 if max(map(len, ax.get_legend_handles_labels()[1])) <= 20 else 1


def nickname(device: str) -> str:
    """A device's name, short enough for a legend."""
    for word in ("NVIDIA ", "AMD Instinct ", "GeForce ", "(R)", "(TM)", " Processor", " CPU"):
        device = device.replace(word, "")
    return device if len(device) <= 18 else device[:17] + "…"


def _scales(ax: Axes, x: str, log: str) -> None:
    """Logarithmic axes with plain numbers, few enough for a phone."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if "x" in log:
        places = {float(v) for line in ax.get_lines() for v in line.get_xdata()}  # type: ignore[arg-type,union-attr]
        doubling = x == "bytes" or all(v >= 1 and math.log2(v).is_integer() for v in places)
        ax.set_xscale("log", base=2 if doubling else 10)
        ax.xaxis.set_major_locator(LogLocator(base=4 if doubling else 10, numticks=6))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.xaxis.set_major_formatter(plain)
    if x == "bytes":
        ax.xaxis.set_major_formatter(lambda v, _: short_bytes(v))
    if "y" in log:
        ax.set_yscale("log")
        plain_log(ax)


def _notes(ax: Axes, levels: Mapping[str, float], marks: Mapping[str, float]) -> None:
    """Labelled reference lines: horizontal levels, vertical marks."""
    for label, level in levels.items():
        ax.axhline(level, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        note(ax, label, (0.99, level), (0, 2), xycoords=("axes fraction", "data"), va="bottom", ha="right")
    for label, place in marks.items():
        ax.axvline(place, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
        note(ax, label, (place, 0.02), (3, 0), xycoords=("data", "axes fraction"), va="bottom", rotation=90)


def short_bytes(size: float) -> str:
    """2048 -> "2 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"


def _lines_alt(
    groups: Mapping[str, list[Row]],
    x: str,
    metric: str,
    levels: Mapping[str, float],
    marks: Mapping[str, float],
) -> str:
    place = short_bytes if x == "bytes" else short
    unit = AXIS.get(metric, "")
    parts = [f"Line chart of {metric}{f' in {unit}' if unit else ''} against {x}."]
    for label, points in groups.items():
        first, last = points[0], points[-1]
        best = max(points, key=lambda p: p.value or 0)
        text = (
            f"{label}: {short(first.value or 0)} at {place(first.at[x])}, "
            f"{short(last.value or 0)} at {place(last.at[x])}"
        )
        if best not in (first, last):
            text += f", highest {short(best.value or 0)} at {place(best.at[x])}"
        parts.append(text + ".")
    parts += [f"A horizontal line at {short(v)}: {k}." for k, v in levels.items()]
    parts += [f"A vertical line at {place(v)}: {k}." for k, v in marks.items()]
    return " ".join(parts)


def bars(
    rows: Rows,
    *,
    caption: str,
    metric: str = "time",
    recorded: Rows | None = None,
    log: bool = False,
    title: str = "",
    floor: float | None = None,
) -> Picture | None:
    """One horizontal bar per case, labelled with its value; one panel per device.

    A case without a value has the reason in place of the bar. `floor` is a line in this device's panel: what the metric
    is at best, such as `roof.time(bytes)`.
    """
    chosen = (rows + rows.elsewhere(recorded)).where(
        lambda r: r.metric == metric or (r.metric == "time" and not r.ok)
    )
    devices = [d for d in chosen.devices if any(r.ok for r in chosen.where(device=d))]
    if not devices:
        print(f"Nothing to draw: no {metric} was measured here, and none is recorded yet.")
        return None
    order = chosen.cases
    panels = [Rows(sorted(chosen.where(device=d), key=lambda r: order.index(r.case))) for d in devices]
    names = [device if device in rows.devices else device + RECORDED for device in devices]
    tall = [0.34 * len(p) + 0.35 for p in panels]
    with style():
        fig, axes = below_each_other(tall, sum(tall) + 0.5)
        for ax, panel, device in zip(axes, panels, names, strict=True):
            _bar_panel(ax, panel, order, log)
            if floor and device in rows.devices:
                _floor_line(ax, floor)
            ax.set_title(device if len(panels) > 1 or device.endswith(RECORDED) else title)
        axes[-1].set_xlabel(f"{metric}, {AXIS.get(metric, '')}".rstrip(", "))
    alt = _bars_alt(panels, names, metric)
    if floor and rows.devices:
        alt += f" A line at {short(floor)}: the limit."
    return figure(fig, caption=caption, alt=alt)


def _floor_line(ax: Axes, floor: float) -> None:
    """The limit, as a dotted line with its name below the bars, where there is room for it."""
    low, high = ax.get_ylim()
    ax.set_ylim(low + 0.45, high)
    if ax.get_xscale() == "linear":
        ax.set_xlim(0, max(ax.get_xlim()[1], floor * 1.25))
    ax.axvline(floor, color=INK, linewidth=1.2, linestyle=(0, (1, 2)))
    note(ax, f"limit {short(floor)}", (floor, 0.0), (3, 2), xycoords=("data", "axes fraction"), va="bottom")


def _bar_panel(ax: Axes, panel: Rows, cases: list[str], log: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    turn = palette(cases)
    labels = [_bar_label(row) for row in panel]
    top = max((row.value or 0) + (row.spread or 0) / 2 for row in panel)
    for place, (row, text) in enumerate(zip(panel, labels, strict=True)):
        value = row.value or 0.0
        error = (row.spread or 0.0) / 2
        which = turn[row.case]
        ax.barh(
            place,
            value,
            xerr=error if value else None,
            color=colour(which),
            hatch=HATCHES[which % len(HATCHES)],
            edgecolor="#ffffff",
            height=0.7,
            ecolor=INK,
        )
        note(ax, text, (value + error, place), (4, 0), va="center")
    ax.set_yticks(range(len(panel)), _bar_names(panel))
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    if log:
        ax.set_xscale("log")
        ax.set_xlim(min(row.value for row in panel if row.value) / 2, top * 2)
        plain_log(ax, "x")
    else:
        ax.set_xlim(0, top * 1.25)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(plain)


def _bar_names(panel: Rows) -> list[str]:
    """The case; for repeated cases also the fields that differ."""
    if len(panel.cases) == len(panel):
        return panel.cases
    places = [{**row.at, "clock": row.clock} for row in panel]
    keys = [k for k in places[0] if len({str(p.get(k)) for p in places}) > 1]
    wheres = [", ".join(dict.fromkeys(show_plain(place.get(key, "")) for key in keys)) for place in places]
    return [f"{r.case} ({where})" if where else r.case for r, where in zip(panel, wheres, strict=True)]


def _bar_label(row: Row) -> str:
    return short(row.value) if row.ok and row.value is not None else row.status


def _bars_alt(panels: list[Rows], devices: list[str], metric: str) -> str:
    unit = AXIS.get(metric, "")
    parts = [f"Bar chart of {metric}{f' in {unit}' if unit else ''}."]
    for panel, device in zip(panels, devices, strict=True):
        bars = zip(_bar_names(panel), panel, strict=True)
        listed = ", ".join(f"{name} {_bar_label(row)}" for name, row in bars)
        parts.append(f"{device}: {listed}.")
    return " ".join(parts)
