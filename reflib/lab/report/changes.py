"""What changed between two reports of one model: `reflib report FILE.py:NAME --against OLD.json`.

Graphs and kernels have no identity across commits: a kernel's name contains its number. They are matched as lines of
text are in a diff, by what they compute (a graph by its captured operators; a kernel by its operators and the user's
lines), so that a new kernel in front does not make all others look different.
"""

import difflib
import json
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from reflib.errors import LabError

FORMAT = 1  # of the data of `--json`; change it when older data cannot be compared
Pairs = Iterator[tuple[Any, Any]]


def read(path: Path) -> dict[str, Any]:
    """The data of an earlier report. Raises LabError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"--against {path}: {getattr(error, 'strerror', None) or error}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        what = f"its format is {found}, this version's is {FORMAT}" if found else "it is not what --json writes"
        raise LabError(f"--against {path}: {what}; make it again with `reflib report --json`")
    return data


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`facts`, `totals`, `times`: rows of (name, before, after). `graphs`: per graph its changed kernels and decisions;
    `before` or `after` is None for what is new or gone."""
    facts = [
        *((n, old[n], new[n]) for n in ("title", "machine", "target", "inputs")),
        *_entries(old["versions"], new["versions"]), *_entries(old["options"], new["options"]),
    ]  # fmt: skip
    graphs = [_graph(a, b) for a, b in matched(old["graphs"], new["graphs"], lambda g: g["capture"], lambda g: None)]
    return {
        "since": old["date"],
        "facts": [(n, _text(a), _text(b)) for n, a, b in facts if a != b],
        "totals": [(n, a, new["totals"][n]) for n, a in old["totals"].items()],
        "times": _times(old, new) if old["machine"] == new["machine"] else [],
        "graphs": [g for g in graphs if g["kernels"] or g["decisions"] or g["how"] != "kept"],
        "same_kernels": sum(g["same"] for g in graphs),
    }


def matched(a: Sequence[Any], b: Sequence[Any], *keys: Callable[[Any], Hashable]) -> Pairs:
    """(of `a`, of `b`), in order; None beside what only one of them has. What the first key leaves without a
    counterpart is matched, between the same neighbours, by the next."""
    if not keys:
        yield from ((x, None) for x in a)
        yield from ((None, x) for x in b)
        return
    matcher = difflib.SequenceMatcher(None, [keys[0](x) for x in a], [keys[0](x) for x in b], autojunk=False)
    for how, i, i_end, j, j_end in matcher.get_opcodes():
        if how == "equal":
            yield from zip(a[i:i_end], b[j:j_end])
        else:
            yield from matched(a[i:i_end], b[j:j_end], *keys[1:])


def _entries(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(n, a.get(n), b.get(n)) for n in {**a, **b}]


def _text(value: Any) -> str:
    return "" if value is None else ", ".join(value) if isinstance(value, list) else str(value)


def _times(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians of cases that both have; `differs`: by more than both spreads."""
    before = {(r["clock"], r["case"]): r for r in old["times"] if r["status"] == "ok"}
    rows = []
    for r in new["times"]:
        was = before.get((r["clock"], r["case"]))
        if was is None or r["status"] != "ok":
            continue
        spread = (was["spread_us"] + r["spread_us"]) / 2
        rows.append({"case": r["case"], "clock": r["clock"], "before": was["us"], "after": r["us"],
                     "differs": abs(r["us"] - was["us"]) > spread})  # fmt: skip
    return rows


def _graph(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any]:
    kernels = [_kernel(*pair) for pair in matched(_kernels(a), _kernels(b), _computes, _ops)]
    named = (b or a or {})["name"]
    return {
        "name": named,
        "id": b["id"] if b else "",
        "how": "gone" if b is None else "new" if a is None else "kept",
        "kernels": [k for k in kernels if k["how"] != "same"],
        "same": sum(k["how"] == "same" for k in kernels),
        "decisions": list(_decisions(a, b)),
    }


def _kernels(graph: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [k for k in graph["kernels"] if not k["fallback"]] if graph else []


def _computes(kernel: dict[str, Any]) -> tuple[Hashable, ...]:
    return *_ops(kernel), re.sub(r":\d+ in ", " in ", kernel["lines"])  # wherever they are in the file now


def _ops(kernel: dict[str, Any]) -> tuple[Hashable, ...]:
    return kernel["language"], *kernel["ops"]


def _kernel(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any]:
    before, after = (_lines(k) for k in (a, b))
    diff = list(difflib.unified_diff(before, after, "before", "after", lineterm="")) if a and b else []
    how = "gone" if b is None else "new" if a is None else "changed" if diff else "same"
    one = b or a or {}
    return {"how": how, "name": one["name"], "ops": one["ops"], "lines": one["lines"], "diff": "\n".join(diff)}


def _lines(kernel: dict[str, Any] | None) -> list[str]:
    """Launch and source, without what follows from its place: the kernel's name, comments (they have the numbers of
    the user's lines), and the numbers of buffers, which count from 0 here."""
    if kernel is None:
        return []
    text = re.sub(r"^\s*(//|# ).*\n", "", kernel["source"], flags=re.M).replace(kernel["name"], "kernel")
    known: dict[str, str] = {}
    text = re.sub(r"\b([a-z]+)_\d+", lambda m: known.setdefault(m[0], f"{m[1]}_{len(known)}"), text)
    return [kernel["launch"], *text.splitlines()]


def _decisions(a: dict[str, Any] | None, b: dict[str, Any] | None) -> Iterator[dict[str, str]]:
    """Choices between implementations that both graphs have, and that came out otherwise."""
    before, after = ([d for d in g["decisions"] if d["measured"]] if g else [] for g in (a, b))
    for was, now in matched(before, after, lambda d: (d["op"] or d["region"], str(d["sizes"]))):
        if was and now and was["chosen"] != now["chosen"]:
            yield {"op": now["op"] or now["region"], "sizes": str(now["sizes"]), "before": was["chosen"],
                   "after": now["chosen"], "reason": now["reason"]}  # fmt: skip
