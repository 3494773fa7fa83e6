"""Accessible figures: alt text, a caption, and colours that also differ in lightness.

A figure is an SVG image inside HTML: it scales to a phone, is shown in untrusted notebooks, and has a white background
that keeps dark text readable in dark mode.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without yellow; each colour has its own marker and dash.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#2a8fa8", "#8a6d00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
HATCHES = ("", "//", "\\\\", "xx", "--", "||", "++")
ALWAYS = ("eager", "TorchInductor", "reflib")  # have the first colours, in whatever order a figure has them, and alone
LIMIT = "limit"  # has the last colour, and alone
INK = "#222222"
QUIET = "#6b6b6b"

SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "reflib",
    "svg.fonttype": "path",
    "figure.figsize": (5.6, 3.6),
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "#ffffff",
    "savefig.facecolor": "#ffffff",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "hatch.linewidth": 0.5,
}


@contextmanager
def style() -> Iterator[None]:
    """Context with this book's matplotlib settings: `with lab.style(): fig, ax = plt.subplots()`."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        yield


def below_each_other(tall: Sequence[float], high: float, **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure ``high`` inches high with one panel per number in ``tall``, of heights in that proportion."""
    import matplotlib.pyplot as plt

    shape: dict[str, Any] = {"figsize": (5.6, high), "height_ratios": list(tall), "layout": "constrained", **more}
    fig, axes = plt.subplots(len(tall), 1, squeeze=False, **shape)
    return fig, list(axes[:, 0])


def palette(cases: Sequence[str]) -> dict[str, int]:
    """case -> its place in the palette: those of ALWAYS and LIMIT have the same in all figures, and no other has it."""
    found: dict[str, int] = {}
    for case in sorted(cases, key=lambda case: case not in ALWAYS):  # "reflib" before "reflib, tuned"
        who = case.replace(",", " ").split(" ")[0]
        if who in ALWAYS and ALWAYS.index(who) not in found.values():
            found[case] = ALWAYS.index(who)
    if LIMIT in cases:
        found[LIMIT] = len(COLOURS) - 1
    places = (i for i in itertools.count(len(ALWAYS)) if i != len(COLOURS) - 1)
    return found | {case: next(places) for case in cases if case not in found}


def colour(index: int) -> str:
    """Of a place in the palette; beyond its end those between ALWAYS and LIMIT begin again."""
    rest = COLOURS[len(ALWAYS) : -1]
    return COLOURS[index] if index < len(COLOURS) else rest[(index - len(COLOURS)) % len(rest)]


def colours(cases: Sequence[str]) -> dict[str, Any]:
    """A scale of Vega-Lite: each case in the colour that it has in all figures."""
    turn = palette(cases)
    return {"domain": list(cases), "range": [colour(turn[case]) for case in cases]}


def series_style(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the index-th series."""
    turn = index % len(MARKERS)
    return {"color": colour(index), "marker": MARKERS[turn], "linestyle": DASHES[turn]}


def plain(value: float, _: float = 0) -> str:
    """How an axis writes its numbers: 1,048,576 and 0.25."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def plain_log(ax: Axes, which: str = "y") -> None:
    """Plain numbers on a logarithmic axis, "x" or "y": ticks at 1, 2, 5 on a short one, else at powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis, (low, high) = (ax.xaxis, ax.get_xlim()) if which == "x" else (ax.yaxis, ax.get_ylim())
    narrow = high < 100 * low
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=8))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(plain)


def note(ax: Axes, words: str, at: tuple[float, float], shift: tuple[float, float], **more: Any) -> None:
    """Small text beside a place, shifted by so many points. ``more``: as of ``annotate``."""
    ax.annotate(words, at, xytext=shift, **{"textcoords": "offset points", "fontsize": 9.5, **more})


class Picture:
    """A finished figure, displayed as HTML; its text form is the alt text."""

    def __init__(self, svg: str, caption: str, alt: str) -> None:
        self.svg, self.caption, self.alt = svg, caption, alt

    def __repr__(self) -> str:
        return f"[figure: {self.alt}]\n{self.caption}"

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg.encode()).decode()
        words = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(self.caption))
        return (
            '<figure style="margin:1em 0;padding:6px;background:#fff;border-radius:6px">'
            f'<img class="dark-light" width="640" alt="{html.escape(self.alt, quote=True)}" '
            'style="width:100%;max-width:44rem;height:auto;background:#fff" '
            f'src="data:image/svg+xml;base64,{data}">'
            f'<figcaption style="color:#444">{words}</figcaption></figure>'
        )


def figure(fig: Figure, *, caption: str, alt: str) -> Picture:
    """Emit a matplotlib figure with its caption and alt text, and close it.

    `alt` should state what the figure shows, computed from the same numbers (as `lab.lines` and `lab.bars` do).
    """
    from reflib.lab.showing import display_thing

    if not caption.strip() or not alt.strip():
        raise LabError("a figure needs a caption and an alt text")
    picture = Picture(to_svg(fig), caption, alt)
    display_thing(picture)
    return picture


def to_svg(fig: Figure) -> str:
    """The figure as SVG, reproducible byte for byte; it is closed."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import ScalarFormatter

    for axis in (axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)):
        if type(axis.get_major_formatter()) is ScalarFormatter:  # nobody has chosen another
            axis.set_major_formatter(plain)
    buffer = io.StringIO()
    with style():
        fig.savefig(
            buffer,
            format="svg",
            bbox_inches="tight",
            pad_inches=0.12,
            metadata={"Date": None, "Creator": None},
        )
    plt.close(fig)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    return re.sub(r' d="[^"]*"', lambda m: re.sub(r"(\d+\.\d{2})\d+", r"\1", m[0]), svg)
