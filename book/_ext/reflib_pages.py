"""The book's pages that are data: Markdown and HTML made from the notebooks, their recordings and tables.

Where a page says `<!-- generated: results -->`, the function of that name in PAGES puts its text.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MAP = "inductor_map.tsv"
GITHUB = "https://github.com"
REPOSITORIES = {"": "pytorch/pytorch", "torchdynamo": "pytorch/torchdynamo", "triton": "triton-lang/triton"}
PAPERS = {"arXiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}
TORCH = "v2.13.0"  # the version whose files the map names; a test looks them up in it


# ---- chapters


@dataclass(frozen=True)
class Chapter:
    """What a chapter says of itself: its title up to the colon, its claim, and how long reading it takes."""

    slug: str
    title: str
    claim: str
    minutes: int
    stamp: dict[str, Any]
    matches: bool  # its outputs belong to its code
    newer: int  # code cells that the recording did not execute: they were changed or added after it

    @property
    def link(self) -> str:
        return f"[{self.title}](../notebooks/{self.slug})"


def chapter(path: Path) -> Chapter:
    """Read one. Raises ValueError where the title, the claim or the time is missing."""
    from reflib.lab import notebook as nb

    book = nb.read(path)
    prose = "\n\n".join(c.source for c in book.cells if c.cell_type == "markdown")
    found = [re.search(p, prose, re.M) for p in (r"^# ([^:\n]+)", r"^\*\*(.+)\*\*$", r"^\*\*Time\.\*\* (.+)$")]
    if not all(found):
        raise ValueError(f"{path.name}: a chapter begins with a title, a claim in bold, and says **Time.**")
    title, claim, time = (f.group(1) for f in found if f)
    stamp = dict(book.metadata.get("reflib") or {})
    newer = sum(c.cell_type == "code" and c.execution_count is None for c in book.cells)
    return Chapter(path.stem, title.strip(), claim, minutes_in(time), stamp, not nb.stamp_problem(book), newer)


def minutes_in(text: str) -> int:
    """The first time that a sentence names: 'About 40 minutes to read' is 40, 'Ten minutes' is 10."""
    words = {"ten": 10, "fifteen": 15, "twenty": 20, "thirty": 30}
    found = re.search(r"(?i)\b(\d+|" + "|".join(words) + r") minutes", text)
    if not found:
        raise ValueError(f"no number of minutes in {text!r}")
    return int(words.get(found.group(1).lower(), 0) or found.group(1))


@cache
def chapters(root: Path) -> dict[str, Chapter]:
    """All notebooks, in the book's order."""
    from reflib.lab import runner

    return {p.stem: chapter(p) for p in runner.notebooks(root)}


def duration(minutes: int) -> str:
    """'50 minutes', '1 hour', '7½ hours': to the half hour where it is long."""
    if minutes <= 55:
        return f"{minutes} minutes"
    halves = round(minutes / 30)
    number = f"{halves // 2}{'½' if halves % 2 else ''}"
    return f"{number} hour" + ("" if halves == 2 else "s")


def parts(root: Path) -> list[tuple[str, str, list[str]]]:
    """(name, overview page, slugs) of each part: an entry of the table of contents with the chapters of the next."""
    import yaml

    toc = yaml.safe_load((root / "book" / "_toc.yml").read_text(encoding="utf-8"))["parts"]
    return [
        (part["caption"], part["chapters"][0]["file"], [c["file"].split("/")[1] for c in numbered["chapters"]])
        for part, numbered in itertools.pairwise(toc)
        if numbered.get("numbered")
    ]


def contents(root: Path, only: str = "") -> str:
    """A table of the chapters of each part (or of one): number, name, claim, time."""
    numbers = itertools.count(1)
    lines = ["| | Chapter | What it shows | Reading |", "|---|---|---|---|"]
    for name, page, slugs in parts(root):
        told = [(next(numbers), chapters(root)[slug]) for slug in slugs]
        if only in ("", page):
            if not only:
                total = sum(c.minutes for _, c in told)
                lines.append(f"| | **[{name}](../{page})** | | **{total} min** |")
            lines += [f"| {n} | {c.link} | {c.claim} | {c.minutes} min |" for n, c in told]
    return "\n".join(lines)


ONE_FEATURE = {
    "numerics": "eager's bits, or the same bits for every batch",
    "inline-fusion": "an op that chooses its own implementation",
    "decompose-k": "splitting the long dimension of a matrix product",
    "input-ranges": "a winner for each range of a size",
    "async-autotuning": "tuning while the program runs",
    "cpp-wrapper": "calls that cost less",
    "multi-arch-packages": "one file for many GPUs",
}


def routes(root: Path) -> str:
    """Three ways through the book, with the time of each summed up from the chapters."""
    told = chapters(root)
    start, stages = told["start-here"], told["one-function-all-stages"]
    features = "\n".join(f"  - {told[s].link}: {what}" for s, what in ONE_FEATURE.items())
    one = max(told[s].minutes for s in ONE_FEATURE) + stages.minutes
    return f"""
- **An hour** ({start.minutes + stages.minutes} minutes of reading, and a little to try): {start.link}, then
  {stages.link}. You compile a function of your own and follow it through every stage.
- **One feature** ({duration(one)} at most): {stages.link}, then the chapter of the feature:
{features}
- **The whole book** (about {duration(sum(c.minutes for c in told.values()))} of reading; more with the exercises): from
  {start.link} to the last chapter, in order.
"""


# ---- what was recorded


def recordings(root: Path) -> Iterator[tuple[str, Path]]:
    """(chapter, file) of every recording, in the book's order; what no chapter has as its own comes last. Sweeps have
    a page of their own."""
    order = list(chapters(root))
    files = sorted(p for p in (root / "notebooks" / "recorded").glob("*.json") if not p.name.startswith("sweep."))
    yield from sorted(((f.name.split(".")[0], f) for f in files), key=lambda x: (order + [x[0]]).index(x[0]))


def results(root: Path) -> str:
    """Every recorded table: a heading per device and per chapter, and a folded table per measurement."""
    by_device: dict[str, list[str]] = {}
    size: dict[str, int] = {}
    for slug, path in recordings(root):
        data = json.loads(path.read_text(encoding="utf-8"))
        shared = data["shared"]
        told = chapters(root).get(slug)
        text = [f"### {told.title if told else slug.capitalize()}", ""]
        told_in = f" They are explained in {told.link}." if told else ""
        text += [f"{made_with(data)} {len(data['rows']):,} numbers.{told_in}", ""]
        text += [folded(name, told_by(group)) for name, group in grouped(data["rows"])]
        text += [claims(data["claims"])] if data["claims"] else []
        device = shared.get("device", "unknown")
        by_device.setdefault(device, []).append("\n".join(text))
        size[device] = size.get(device, 0) + len(data["rows"])
    order = sorted(by_device, key=lambda device: -size[device])
    return "\n\n".join(f"## {device}\n\n" + "\n\n".join(by_device[device]) for device in order)


def made_with(data: dict[str, Any]) -> str:
    """Dates, versions and commits, in a line: a recording may be of several runs."""
    shared = data["shared"]

    def all_of(key: str) -> list[str]:
        return sorted({r.get(key, shared.get(key, "")) for r in data["rows"] or [{}]} - {""})

    commits, dates = all_of("commit"), all_of("date")
    versions = ", ".join(f"{name} {number}" for name, number in shared["versions"].items())
    where = f"commit{'s' if len(commits) > 1 else ''} {', '.join(f'`{c}`' for c in commits)}"
    return f"Measured on {' and '.join(dates)} with {versions}, at {where}."


def grouped(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Rows that make one table: of one measurement, by one clock, over the same sweep."""

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return row.get("name", ""), row.get("clock", ""), row.get("cache", ""), ", ".join(row.get("at", {}))

    for (name, clock, cache_, _), group in itertools.groupby(sorted(rows, key=key), key=key):
        said = [f"{what} {value}" for what, value in (("clock", clock), ("cache", cache_)) if value]
        yield f"{name or 'rows'}" + (f" ({', '.join(said)})" if said else ""), list(group)


def told_by(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(heads, lines): a line for each case and place of the sweep, a column for each metric. No row is lost: where a
    case has two values of one metric, it has two lines."""
    from reflib.lab.rows import show_number, show_plain

    places = list(dict.fromkeys(p for r in rows for p in r.get("at", {})))
    metrics = list(dict.fromkeys((r["metric"], r.get("unit", "")) for r in rows))
    lines: dict[tuple[Any, ...], dict[Any, str]] = {}
    for row in sorted(rows, key=along_sweep):
        where = (row["case"], *(str(row.get("at", {}).get(p, "")) for p in places))
        metric = (row["metric"], row.get("unit", ""))
        again = next(i for i in itertools.count() if metric not in lines.get((*where, i), ()))
        line = lines.setdefault((*where, again), {p: show_plain(row.get("at", {}).get(p, "")) for p in places})
        status = "" if row.get("status", "ok") == "ok" else row["status"]
        line[metric] = show_number(row["value"], row.get("spread")) or status
        notes = [x for x in (line.get("note", ""), row.get("note", "")) if x]
        line["note"] = "; ".join(dict.fromkeys(notes))
    noted = ["note"] if any(line.get("note") for line in lines.values()) else []
    heads = ["case", *places, *(f"{m}, {u}" if u else m for m, u in metrics), *noted]
    body = [[k[0], *(line.get(c, "") for c in [*places, *metrics, *noted])] for k, line in lines.items()]
    return heads, body


def along_sweep(row: dict[str, Any]) -> list[tuple[float, str]]:
    """By case, then along the sweep, numbers by their size."""
    along = [row["case"], *row.get("at", {}).values()]
    return [(x, "") if isinstance(x, (int, float)) else (0.0, str(x)) for x in along]


def folded(title: str, table: tuple[list[str], list[list[str]]]) -> str:
    heads, body = table
    summary = f"{html.escape(title)}: {len(body):,} line{'' if len(body) == 1 else 's'}"
    return f"<details><summary>{summary}</summary>\n{html_table(heads, body, escape=True)}\n</details>"


def claims(said: list[dict[str, Any]]) -> str:
    """What the chapter's prose claims, and whether it held on this device."""
    held = sum(bool(c.get("holds")) for c in said)
    lines = [
        ["holds" if c.get("holds") else "does not hold" if "holds" in c else "not checked here", c["claim"],
         "" if c.get("holds") else c.get("otherwise", "")]
        for c in said
    ]  # fmt: skip
    summary = f"claims: {held} of {len(said)} hold here"
    table = html_table(["here", "claim", "why not"], lines, escape=True)
    return f"<details><summary>{summary}</summary>\n{table}\n</details>"


WIDE = 10  # columns of a table that is set smaller


def html_table(heads: Iterable[str], body: Iterable[Iterable[str]], escape: bool = False) -> str:
    """One line of HTML per row and no blank line, so that Markdown does not change it."""
    clean: Callable[[str], str] = (lambda text: html.escape(str(text)).replace("\n", " ")) if escape else str
    heads = list(heads)
    head = "".join(f'<th scope="col">{clean(h)}</th>' for h in heads)
    kind = "table reflib-table reflib-wide" if len(heads) >= WIDE else "table reflib-table"
    lines = "\n".join("<tr>" + "".join(f"<td>{clean(c)}</td>" for c in line) + "</tr>" for line in body)
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{lines}\n</tbody></table>'
    return f'<div class="reflib-scroll" tabindex="0">{table}</div>'


def status(root: Path) -> str:
    """A table: each notebook, seconds to execute, whether its code matches. Device and versions are said once above it,
    where most have the same."""
    told_all = list(chapters(root).values())
    made = {told.slug: executed_on(told.stamp) for told in told_all}
    most = Counter(filter(None, made.values())).most_common(1)
    usual = most[0][0] if most else ""
    lines = [f"Executed on {usual}, if the table does not say otherwise.\n"] if usual else []
    lines += ["| Notebook | in | at commit | Its outputs |", "|---|---|---|---|"]
    for told in told_all:
        state = "not recorded yet"
        if told.stamp:
            state = "match its code" if told.matches else "its code changed since"
            if told.newer:
                state += f"; {told.newer} cells are newer and have none"
            if made[told.slug] != usual:
                state += f"; {made[told.slug]}"
        took = seconds(root, told.slug, told.stamp.get("device", ""))
        lines.append(f"| {told.link} | {took} | {told.stamp.get('commit', '')} | {state} |")
    return "\n".join(lines)


def executed_on(stamp: Mapping[str, Any]) -> str:
    """A stamp's device and versions, in words."""
    versions = stamp.get("versions", {})
    named = (f"{k} {versions[k]}" for k in ("torch", "triton") if k in versions)
    return ", ".join(filter(None, (stamp.get("device", ""), *named)))


def seconds(root: Path, slug: str, device: str) -> str:
    """How long executing it took on this device ('64 s'), or 'not noted'."""
    from reflib.lab import durations, machine

    folder = root / "notebooks" / "recorded"
    for where in (machine.gpu_slug(device), "cpu"):  # a CPU's name is not a slug
        if (found := durations.read(folder, where).get(slug)) is not None:
            return f"{found:.0f}\u00a0s"
    return "not noted"


# ---- the model sweep


NO_SWEEP = (
    "**Nothing has been recorded on an H200 yet.** To make a recording: `make sweep` on a machine with that GPU, and "
    "again until it says that nothing is left; then copy `runs/sweep-h200/sweep.h200.json` to `notebooks/recorded/`, "
    "and `make book`. It may be partial: this page says how much of it there is."
)


def sweep(root: Path) -> str:
    """The recorded sweeps, a heading per device."""
    from reflib.lab import recording
    from reflib.sweep import report

    found = {path: recording.load(path)[0] for path in (root / "notebooks" / "recorded").glob("sweep.*.json")}
    text = []
    if not any("H200" in device for rows in found.values() for device in rows.devices):
        text.append(NO_SWEEP)
    for path in sorted(found, key=lambda path: ("cpu" in path.name, path.name)):
        text += [f"## {found[path].devices[0]}", report.made_with(found[path])]
        for heading, sentence, (heads, body) in report.sections(found[path]):
            text += [f"### {heading}", sentence, html_table(heads, body, escape=True) if body else ""]
    return "\n\n".join(text)


# ---- the map


@dataclass(frozen=True)
class Counterpart:
    """A file of reflib, the files of PyTorch that do the same, and where to read about them."""

    file: str
    theirs: tuple[str, ...]
    sources: tuple[str, ...]


def counterparts(root: Path) -> list[Counterpart]:
    lines = (root / "book" / MAP).read_text(encoding="utf-8").splitlines()
    split = [(line.split("\t") + ["", ""])[:3] for line in lines if line and not line.startswith("#")]
    return [Counterpart(a, tuple(b.split()), tuple(c.split())) for a, b, c in split]


def address(source: str) -> str:
    """Where a source of the map is: '#949', 'torchdynamo#949', 'arXiv:2301.03598', 'doi:10.1145/...'."""
    kind, _, rest = source.partition(":")
    if kind in PAPERS:
        return PAPERS[kind] + rest
    name, _, number = source.partition("#")
    return f"{GITHUB}/{REPOSITORIES[name]}/pull/{number}"


def first_sentence(path: Path) -> str:
    """What a file is for: the first sentence of its docstring, or of its first comment where it is C."""
    import ast

    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        block = re.match(r"\s*(?:/\*(.*?)\*/|((?://[^\n]*\n)+))", text, re.S)
        said = re.sub(r"(?m)^\s*(\*|//) ?", "", (block.group(1) or block.group(2)) if block else "")
    said = " ".join(said.split("\n\n")[0].split())
    said = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", said).replace("``", "`")
    return re.split(r"(?<=[.])\s", said)[0].rstrip(".:")


def inductor_map(root: Path) -> str:
    """A table a folder: file, what it is for, the files there, the sources."""
    import reflib

    library = Path(reflib.__file__).parent
    text = []
    for folder, group in itertools.groupby(counterparts(root), key=lambda c: c.file.rpartition("/")[0]):
        lines = []
        for c in group:
            theirs = "<br>".join(their_link(f) for f in c.theirs) or "no counterpart"
            named = [(address(s), "paper" if s.startswith("doi:") else s) for s in c.sources]
            sources = "<br>".join(f'<a href="{where}">{name}</a>' for where, name in named)
            about = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(first_sentence(library / c.file)))
            lines.append([f"<code>{c.file.rpartition('/')[2]}</code>", about, theirs, sources])
        heads = [f"reflib/{folder}{'/' if folder else ''}", "what it is for", "in PyTorch", "pull requests, papers"]
        text.append(f"## {folder or 'beside the stages'}\n\n{html_table(heads, lines)}")
    return "\n\n".join(text)


def their_link(file: str) -> str:
    short = file.removeprefix("torch/_inductor/")
    return f'<a href="{GITHUB}/pytorch/pytorch/blob/{TORCH}/{file}"><code>{short.replace("/", "/<wbr>")}</code></a>'


PAGES: dict[str, Callable[..., str]] = {
    "contents": contents,
    "routes": routes,
    "results": results,
    "status": status,
    "sweep": sweep,
    "inductor-map": inductor_map,
}
MARK = re.compile(r"^<!-- generated: ([\w-]+)(?: (\S+))? -->$", re.M)


def fill(text: str, root: Path, pages: Mapping[str, Callable[..., str]]) -> str:
    """The page with its marks replaced; `<!-- generated: contents book/kernels -->` hands an argument on."""

    def made(mark: re.Match[str]) -> str:
        page = pages[mark.group(1)]
        return page(root, mark.group(2)) if mark.group(2) else page(root)

    return MARK.sub(made, text)
