"""Two comparison charts: `lab.ratios` of cases to one of them, `lab.predicted_plot` of predicted to measured times."""

import math
from collections.abc import Mapping, Sequence

from reflib.lab.explorer import KINDS
from reflib.lab.figures import INK, Picture, below_each_other, figure, palette, plain_log, series_style, style
from reflib.lab.plots import RECORDED, nickname
from reflib.lab.rows import Rows, short

MANY = 40  # places: more have no names, and less room


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; 0 without values.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


def speeds(rows: Rows, against: str, keys: Sequence[str], metric: str = "time") -> dict[str, dict[str, float]]:
    """case -> place -> speedup over ``against``, for places where both have a value."""
    timed = rows.where(lambda r: r.metric == metric and r.ok and r.value is not None)

    def place(at: Mapping[str, object]) -> str:
        return " x ".join(str(at.get(k)) for k in keys)

    base = {place(r.at): r.value for r in timed.where(case=against)}
    out: dict[str, dict[str, float]] = {}
    for r in timed:
        own = base.get(place(r.at))
        if r.case != against and own and r.value:
            out.setdefault(r.case, {})[place(r.at)] = own / r.value
    return out


def ratios(
    rows: Rows, *, caption: str, against: str = "eager", keys: Sequence[str] = ("M", "K", "N"),
    recorded: Rows | None = None, metric: str = "time",
) -> Picture | None:  # fmt: skip
    """Draw speedups over ``against``, or its ``metric`` over each case's: one line per place (without
    names, if they are more than MANY), one mark per case, one panel per device."""
    panels = []
    for some, mark in ((rows, ""), (rows.elsewhere(recorded), RECORDED)):
        for device in some.devices:
            found = speeds(some.where(device=device), against, keys, metric)
            if found:
                panels.append((nickname(device) + mark, found))
    if not panels:
        print(f"Nothing to draw: nothing was measured beside {against} here, and nothing is recorded yet.")
        return None
    cases = list(dict.fromkeys(c for _, found in panels for c in found))
    places = [list(dict.fromkeys(p for line in found.values() for p in line)) for _, found in panels]
    many = max(map(len, places)) > MANY
    tall = [(0.04 if many else 0.36) * len(p) + 0.5 for p in places]
    turn, words = palette(cases), f"times as fast as {against}"
    words = words if metric == "time" else f"{against}'s {metric} over each one's"
    with style():
        fig, axes = below_each_other(tall, sum(tall) + 1.0, sharex=True)
        for ax, (device, found), shown in zip(axes, panels, places, strict=True):
            for case, line in found.items():
                look = series_style(turn[case])
                xs, ys = list(line.values()), [shown.index(p) for p in line]
                ax.plot(xs, ys, look["marker"], color=look["color"], markersize=4 if many else 7, label=case)
            ax.axvline(1.0, color=INK, linewidth=1)
            ax.set_ylim(len(shown) - 0.5, -0.5)
            if many:
                ax.set_yticks([])
                ax.set_ylabel(f"{len(shown)} cases, in order")
            else:
                ax.set_yticks(range(len(shown)), shown)
            if len(panels) > 1 or device.endswith(RECORDED):
                ax.set_title(device)
        axes[-1].set_xlabel(words)
        handles, labels = axes[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside upper left", ncols=2)
    said = f"how many {words}" if metric == "time" else words
    parts = [f"Marks: {said}, for each of {' x '.join(keys)}."]
    for device, found in panels:
        for case, line in found.items():
            listed = ", ".join(f"{p}: {short(v)}" for p, v in line.items())
            parts.append(f"{device}, {case}: {listed}; geometric mean {short(geometric_mean(list(line.values())))}.")
    return figure(fig, caption=caption, alt=" ".join(parts))


def predicted_plot(points: Mapping[str, Sequence[tuple[float, float]]], *, caption: str) -> Picture | None:
    """Draw predicted and measured µs of each kind of candidate, with the diagonal."""
    import matplotlib.pyplot as plt

    every = [p for found in points.values() for p in found]
    if not every:
        print("Nothing to draw: no candidate was measured here, and none is recorded yet.")
        return None
    low, high = min(min(p) for p in every) / 1.3, max(max(p) for p in every) * 1.3
    with style():
        fig, ax = plt.subplots(figsize=(5.6, 4.2))
        for kind, found in points.items():
            if found:
                colour, _, marker = KINDS.get(kind, KINDS["other"])
                xs, ys = zip(*found, strict=True)
                ax.plot(xs, ys, marker, color=colour, markersize=5, alpha=0.8, label=kind)
        ax.plot([low, high], [low, high], color=INK, linewidth=1, label="as predicted")
        ax.set_xscale("log")
        ax.set_yscale("log")
        plain_log(ax, "x")
        plain_log(ax)
        ax.set_xlabel("µs, predicted")
        ax.set_ylabel("µs, measured")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=3)
    parts = [f"Scatter of {len(every)} candidates, predicted against measured time in µs."]
    for kind, found in points.items():
        if found:
            off = geometric_mean([m / p for p, m in found])
            parts.append(f"{kind}: {len(found)}, measured {short(off)} times the prediction on average.")
    return figure(fig, caption=caption, alt=" ".join(parts))
