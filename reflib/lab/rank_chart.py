"""`lab.ranks_explorer`: seconds to tune over the number of ranks, for several ways of sharing, with controls for the
conditions under which they were computed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reflib.errors import LabError
from reflib.lab.explorer import GREY
from reflib.lab.figures import COLOURS
from reflib.lab.moving import Explorer, Spec, emit, moving, pick, slider, text, values
from reflib.lab.rows import short

SHAPES = ("circle", "square", "triangle-up", "diamond")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])


def ranks_explorer(lines: Sequence[Mapping[str, Any]], *, caption: str) -> Explorer:
    """Show one line per way over the number of ranks, with a list of values for each condition.

    ``lines``: dicts with "way", "ranks", "seconds" (None: it never ends), "note" (more about it, or ""); every other
    key is a condition, one word, its values texts. LabError if a way lacks a line for some ranks."""
    conditions = [k for k in lines[0] if k not in ("way", "ranks", "seconds", "note")]
    counts, ways = sorted({x["ranks"] for x in lines}), list(dict.fromkeys(x["way"] for x in lines))
    said: dict[str, list[list[str]]] = {}
    for line in lines:
        words = said.setdefault(_key(line, conditions), [[] for _ in counts])
        words[counts.index(line["ranks"])].append(_words(line))
    if any(len(words) != len(ways) for each in said.values() for words in each):
        raise LabError("ranks_explorer: each way needs one line per number of ranks, under all conditions")
    place = "[" + " + '|' + ".join(conditions) + "][step - 1]"
    spec = moving(
        [_view(ways, counts, conditions, max(x["seconds"] or 0.0 for x in lines))],
        params=[
            slider("step", "ranks, step", 1, len(counts), 1, len(counts)),
            *(pick(c, c, list(dict.fromkeys(x[c] for x in lines))) for c in conditions),
        ],
        says=[f"{text(counts)}[step - 1] + ' ranks'", *(f"({text(said)}){place}[{i}]" for i in range(len(ways)))],
        data={"lines": values(lines)},
        alt=_alt(lines, counts, ways, conditions),
        caption=caption,
    )
    return emit(spec)


def _key(line: Mapping[str, Any], conditions: Sequence[str]) -> str:
    return "|".join(str(line[c]) for c in conditions)


def _words(line: Mapping[str, Any]) -> str:
    time = "never ends" if line["seconds"] is None else f"{short(line['seconds'])} s"
    return ", ".join(filter(None, (f"{line['way']}: {time}", line["note"])))


def _view(ways: list[str], counts: list[int], conditions: list[str], most: float) -> Spec:
    chosen = " && ".join(f"datum[{json.dumps(c)}] === {c}" for c in conditions)
    scale = {"type": "log", "domain": [counts[0], counts[-1]]}
    axis = {"values": counts, "format": ",d"}
    x = {"field": "ranks", "type": "quantitative", "title": "ranks", "scale": scale, "axis": axis}
    title = "seconds until the last rank is tuned"
    y = {"field": "seconds", "type": "quantitative", "title": title, "scale": {"domain": [0, most]}}
    legend = {"orient": "bottom", "columns": 1, "title": None, "labelLimit": 400}

    def by_way(values: Sequence[Any]) -> Spec:
        return {
            "field": "way", "type": "nominal", "sort": None, "legend": legend,
            "scale": {"domain": ways, "range": list(values[: len(ways)])},
        }  # fmt: skip

    tooltip = [{"field": f} for f in ("way", "ranks", "seconds", "note")]
    colour = by_way(COLOURS)
    return {
        "height": 230,
        "data": {"name": "lines"},
        "transform": [{"filter": f"{chosen} && isValid(datum.seconds)"}],
        "encoding": {"x": x, "y": y},
        "layer": [
            {"mark": {"type": "line"}, "encoding": {"color": colour, "strokeDash": by_way(DASHES)}},
            {
                "mark": {"type": "point", "filled": True, "opacity": 1},
                "encoding": {
                    "color": colour, "shape": by_way(SHAPES), "tooltip": tooltip,
                    "size": {"condition": {"test": f"datum.ranks === {text(counts)}[step - 1]", "value": 170},
                             "value": 45},
                },
            },
            {
                "data": {"values": [{}]},
                "transform": [{"calculate": f"{text(counts)}[step - 1]", "as": "here"}],
                "mark": {"type": "rule", "color": GREY, "strokeDash": [3, 3]},
                "encoding": {"x": {"field": "here", "type": "quantitative"}, "y": None},
            },
        ],
    }  # fmt: skip


def _alt(lines: Sequence[Mapping[str, Any]], counts: list[int], ways: list[str], conditions: list[str]) -> str:
    parts = [
        f"Seconds until the last rank is tuned, over {counts[0]} to {counts[-1]:,} ranks, one line per way: "
        f"{'; '.join(ways)}."
    ]
    for key in dict.fromkeys(_key(x, conditions) for x in lines):
        most = [x for x in lines if _key(x, conditions) == key and x["ranks"] == counts[-1]]
        under = ", ".join(f"{c} {v}" for c, v in zip(conditions, key.split("|")))
        parts.append(f"With {under}, at {counts[-1]:,} ranks: {'; '.join(_words(x) for x in most)}.")
    return " ".join(parts)
