"""Two charts that do not take rows: `lab.roofline_plot`, and `lab.dots` for raw samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from reflib.lab.figures import COLOURS, INK, Picture, figure, note, palette, plain, plain_log, series_style, style
from reflib.lab.rows import short

if TYPE_CHECKING:
    from reflib.lab.ceilings import Roofline


def dots(samples: Sequence[float], *, caption: str, unit: str = "µs") -> Picture:
    """Plot samples in the order taken, with median, mean and interquartile range. Times in ``unit``."""
    from reflib.lab.timing import quantile

    low, median, high = (quantile(tuple(samples), q) for q in (0.25, 0.5, 0.75))
    mean = sum(samples) / len(samples)
    with style():
        fig, ax = plt.subplots()
        ax.plot(samples, ".", color=COLOURS[0], markersize=4, label="one sample")
        ax.axhspan(low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label="middle half")
        ax.axhline(median, color=COLOURS[0], label="median")
        ax.axhline(mean, color=COLOURS[1], linestyle="--", label="mean")
        ax.set_yscale("log")
        plain_log(ax)
        ax.set_xlabel("sample")
        ax.set_ylabel(f"time of one call, {unit}")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2)
    alt = (
        f"Scatter of {len(samples)} samples in the order taken, in {unit}. Median {short(median)}, "
        f"middle half from {short(low)} to {short(high)}, mean {short(mean)}, slowest {short(max(samples))}."
    )
    return figure(fig, caption=caption, alt=alt)


def _draw_ceilings(ax: Axes, roof: Roofline, low: float, high: float) -> None:
    """Bandwidth up to the ridge, then the peak of arithmetic, between two intensities."""
    ax.plot(
        [low, roof.ridge, high],
        [low * roof.bandwidth / 1e3, roof.flops, roof.flops],
        color=INK,
        linewidth=2,
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    plain_log(ax)
    slope = (low, low * roof.bandwidth / 1e3)
    note(ax, f"{short(roof.bandwidth)} GB/s", slope, (12, -4))
    note(ax, f"{short(roof.flops)} TFLOP/s", (high, roof.flops), (-2, 5), ha="right")


def roofline_plot(roof: Roofline, points: Mapping[str, tuple[float, float]], *, caption: str) -> Picture:
    """Plot the two ceilings of a device and kernels below them.

    `points` maps a label to (FLOPs per byte, TFLOP/s reached). The legend says what share of its limit each reaches.
    """
    xs = [p[0] for p in points.values()] + [roof.ridge]
    low, high = min(xs) / 4, max(xs) * 8
    with style():
        fig, ax = plt.subplots()
        _draw_ceilings(ax, roof, low, high)
        turn = palette(list(points))
        for label, (x, y) in points.items():
            look = series_style(turn[label])
            ax.plot(
                [x],
                [y],
                marker=look["marker"],
                color=look["color"],
                linestyle="none",
                markersize=9,
                label=f"{label}, {y / roof.limit(x):.0%}",
            )
        ax.xaxis.set_major_formatter(plain)
        ax.set_xlabel("arithmetic intensity, FLOPs per byte")
        ax.set_ylabel("TFLOP/s")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2)
    reached = ". ".join(
        f"{label}: {short(y)} TFLOP/s at {short(x)} FLOPs per byte, {y / roof.limit(x):.0%} of its limit"
        for label, (x, y) in points.items()
    )
    alt = (
        f"Roofline of {roof.device}: rises with {short(roof.bandwidth)} GB/s until "
        f"{short(roof.ridge)} FLOPs per byte, then flat at {short(roof.flops)} TFLOP/s. {reached}."
    )
    return figure(fig, caption=caption, alt=alt)
