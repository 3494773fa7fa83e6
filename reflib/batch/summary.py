"""summary.html of a run: a table of its jobs, and charts of their measurements over the swept parameters.

One file without scripts and without network access.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflib import atomic
from reflib.batch.jobs import NotebookJob
from reflib.batch.work import FILES, JobOutcome
from reflib.lab.figures import COLOURS, Picture, below_each_other, plain_log, series_style, style, to_svg
from reflib.lab.ratio_chart import geometric_mean
from reflib.lab.rows import Row, short

if TYPE_CHECKING:
    from reflib.batch.run import RunProgress

MOST_CASES = len(COLOURS)
TIMES = ("s", "ms", "µs", "us", "ns")

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 1.5rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #8886; text-align: left; vertical-align: top; }
td.number { text-align: right; }
.failed { color: #c0392b; font-weight: 600; } .waiting, .interrupted { color: #8a6d00; font-weight: 600; }
@media (prefers-color-scheme: dark) { .failed { color: #ff8a7a; } .waiting, .interrupted { color: #e5c158; } }
figure { max-width: 46rem; } figcaption { font-size: 14px; }
"""


PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>{style}</style></head>
<body>{body}</body>
</html>
"""


def write(folder: Path, progress: RunProgress, made_by: Mapping[str, Any]) -> Path:
    """summary.html in a run's folder."""
    outcomes = [(job, progress.outcome(job)) for job in progress.jobs]
    title = f"Run {folder.name}: {devices(outcomes)}"
    versions = ", ".join(f"{k} {v}" for k, v in made_by["versions"].items())
    made = f"reflib {made_by['reflib']}, commit {made_by['commit'] or 'unknown'}; {versions}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(standing(progress))}</p>",
        f"<p>{html.escape(made)}</p>",
        f'<div class="wide">{table(folder, outcomes)}</div>',
        *(picture._repr_html_() for picture in pictures(outcomes)),
    ]
    page = PAGE.format(title=html.escape(title), style=STYLE, body="".join(body))
    atomic.write(folder / "summary.html", page)
    return folder / "summary.html"


def devices(outcomes: Iterable[tuple[NotebookJob, JobOutcome]]) -> str:
    """The devices: by name from the rows, else by kind."""
    found = [(job, outcome.records()[0]) for job, outcome in outcomes]
    names = dict.fromkeys(str(row["device"]) for _, rows in found for row in rows if row.get("device"))
    return ", ".join(names or dict.fromkeys(job.device for job, _ in found))


def standing(progress: RunProgress) -> str:
    """The state of the run in words."""
    statuses = [progress.outcome(job).status for job in progress.jobs]
    parts = [f"{statuses.count(s)} {s}" for s in ("ok", "failed", "waiting") if s in statuses]
    if progress.resumed:
        parts.append(f"{progress.resumed} finished in an earlier session")
    ran = [(job, o) for job in progress.jobs if (o := progress.outcome(job)).began]
    if ran:
        beside = max(o.beside for _, o in ran)
        disturbed = ", which disturbs timings on the CPU" if any(j.device == "cpu" for j, _ in ran) else ""
        parts.append("executed one at a time" if beside == 1 else f"executed {beside} at the same time{disturbed}")
    busy = progress.busy()
    if busy is not None:
        parts.append(f"this session took {progress.seconds:,.0f} s, workers busy {busy:.0%} of it")
    return "; ".join([*parts, *filter(None, [progress.trouble])]) + "."


def table(folder: Path, outcomes: Sequence[tuple[NotebookJob, JobOutcome]]) -> str:
    """One row per job: parameters, status, seconds, files."""
    names = list(dict.fromkeys(name for job, _ in outcomes for name in job.parameters))
    heads = ["notebook", *names, "status", "seconds", "rows", "worker", "files", "what happened"]
    lines = []
    for job, outcome in outcomes:
        files = [
            f'<a href="jobs/{job.id}/{name}">{Path(name).stem}</a>'
            for name in FILES.values()
            if (folder / "jobs" / job.id / name).exists()
        ]
        tries = [f"attempt {i}: {error}" for i, error in enumerate(outcome.earlier, 1)]
        rows, claims = outcome.records()
        broken = [f"claim does not hold: {c.get('claim')}" for c in claims if c.get("holds") is False]
        cells = [
            f'<th scope="row">{html.escape(job.notebook)}</th>',
            *(f"<td>{html.escape(str(job.parameters.get(name, '')))}</td>" for name in names),
            f'<td class="{outcome.status}">{outcome.status}</td>',
            f'<td class="number">{outcome.seconds:,.1f}</td>',
            f'<td class="number">{len(rows)}</td>',
            f"<td>{html.escape(outcome.worker)}</td>",
            f"<td>{' '.join(files)}</td>",
            f"<td>{'<br>'.join(html.escape(t) for t in [*filter(None, [outcome.error]), *tries, *broken])}</td>",
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


# ---- pictures


@dataclass(frozen=True)
class ChartPoint:
    """A job's result for a case: the geometric mean of its rows over the notebook's own sweep."""

    case: str
    x: Any
    y: float
    panel: str  # the job's other parameters


def pictures(outcomes: Sequence[tuple[NotebookJob, JobOutcome]]) -> list[Picture]:
    """One chart per notebook and series of rows, for notebooks that were executed more than once."""
    drawn = []
    for slug in dict.fromkeys(job.notebook for job, _ in outcomes):
        own = [(job, outcome) for job, outcome in outcomes if job.notebook == slug and outcome.status == "ok"]
        x, others = axis([job.parameters for job, _ in own])
        if x is None:
            continue
        series: dict[tuple[str, str], list[ChartPoint]] = {}
        for job, outcome in own:
            panel = ", ".join(f"{n}={job.parameters.get(n)}" for n in others)
            for (name, case, unit), values in timed(outcome).items():
                point = ChartPoint(case, job.parameters.get(x), geometric_mean(values), panel)
                series.setdefault((name, unit), []).append(point)
        drawn += [draw(slug, name, unit, x, points) for (name, unit), points in series.items()]
    return drawn


def axis(parameters: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[str]]:
    """(parameter for the x axis, other swept parameters). The first is the numeric one with most values, if any."""
    names = list(dict.fromkeys(name for p in parameters for name in p))
    values = {name: {p.get(name) for p in parameters} for name in names}
    swept = [name for name in names if len(values[name]) > 1]
    if not swept:
        return None, []
    x = max(swept, key=lambda name: (all(map(is_number, values[name])), len(values[name])))
    return x, [name for name in swept if name != x]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_measured(row: Row) -> bool:
    """Whether the value is a positive number, since a user's notebook may write anything."""
    return is_number(row.value) and 0 < (row.value or 0) < math.inf


def timed(outcome: JobOutcome) -> dict[tuple[str, str, str], list[float]]:
    """(series, case, unit) -> the measured times."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in map(Row.from_data, named(outcome.records()[0])):
        if row.ok and is_measured(row) and row.unit in TIMES and row.metric == "time":
            found.setdefault((row.name, row.case, row.unit), []).append(row.value or 0.0)
    return found


def named(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with a name; those of a user's notebook may lack it."""
    return [{"name": "", "case": "", "metric": "", **row} for row in rows]


def draw(slug: str, name: str, unit: str, x: str, points: Sequence[ChartPoint]) -> Picture:
    """One panel per combination of the other parameters, one line per case."""
    panels = list(dict.fromkeys(p.panel for p in points))
    cases = list(dict.fromkeys(p.case for p in points))
    places = sorted({p.x for p in points}, key=lambda v: (0, v) if is_number(v) else (1, str(v)))
    numeric = all(map(is_number, places)) and min(places) > 0
    with style():
        fig, axes = below_each_other([1] * len(panels), 2.6 * len(panels) + 0.6, sharex=True)
        for ax, panel in zip(axes, panels, strict=True):
            for index, case in enumerate(cases[:MOST_CASES]):
                own = sorted((p for p in points if (p.panel, p.case) == (panel, case)), key=lambda p: places.index(p.x))
                xs = [p.x if numeric else places.index(p.x) for p in own]
                look = series_style(index) | ({} if numeric else {"linestyle": "none"})
                ax.plot(xs, [p.y for p in own], label=case, **look)
            ax.set_title(panel)
            ax.set_ylabel(f"time, {unit}")
            ax.set_yscale("log")
            plain_log(ax)
            scale(ax, places, numeric)
        axes[-1].set_xlabel(x)
        fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
        svg = to_svg(fig)
    left_out = f" The first {MOST_CASES} of {len(cases)} cases are drawn." if len(cases) > MOST_CASES else ""
    of = f"{slug}, {name}" if name else slug
    caption = f"{of}: time over {x}, the geometric mean of what each run measured.{left_out}"
    return Picture(svg, caption, words(x, points, cases[:MOST_CASES], unit))


def scale(ax: Any, places: Sequence[Any], numeric: bool) -> None:
    """Ticks at the swept values, on a logarithmic axis if they are far apart."""
    if not numeric:
        ax.set_xticks(range(len(places)), [str(p) for p in places])
        return
    if max(places) >= 8 * min(places):
        ax.set_xscale("log")
    shown = places[:: math.ceil(len(places) / 10)]
    ax.set_xticks(shown, [f"{p:,.6g}" for p in shown])
    ax.minorticks_off()


def words(x: str, points: Sequence[ChartPoint], cases: Sequence[str], unit: str) -> str:
    """The alt text."""
    parts = [f"Time in {unit} over {x}."]
    for case in cases:
        listed = [f"{p.x}{f' ({p.panel})' if p.panel else ''}: {short(p.y)}" for p in points if p.case == case]
        parts.append(f"{case or 'measured'}: {', '.join(listed)}.")
    return " ".join(parts)
