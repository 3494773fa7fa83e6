"""Rows of a matmul set to a table (losses first), geomeans, minima, and promises kept or broken."""

from collections import Counter
from typing import Any

from reflib.lab.rows import text_table as table

from .contenders import EAGER, PEER_MAX, TUNED, US
from .report import Promise, Row, _num, geomean, median, pivot

ORDER = (EAGER, PEER_MAX, US, TUNED)
BEST = f"the best of {EAGER} and {PEER_MAX}"
# set: (against whom, "geomean" or "least", limit): the speed that was promised on a GPU
PROMISED = {
    "splitk": ((EAGER, "geomean", 1.7), (PEER_MAX, "geomean", 1.4)),
    "long": ((BEST, "least", 0.98), (EAGER, "geomean", 1.15)),
    "llm": ((PEER_MAX, "geomean", 1.0),),
}
Cases = dict[str, dict[str, Row]]


def of_set(name: str, rows: list[Row], count: int, device: str, rivals: bool = True) -> tuple[str, list[Promise]]:
    """The text and the promises of one set that has ``count`` cases; ``rivals``: whether peers ran."""
    cases = pivot([r for r in rows if r["kind"] == "row"])
    peers = {r["case"]: r for r in rows if r["kind"] == "prepared"}
    for case, by in cases.items():  # what the peer could not compile is its row
        if case in peers and peers[case].get("compile_s") is None:
            by.setdefault(PEER_MAX, peers[case])
    gains = {case: found for case, by in cases.items() if (found := ratios(by))}
    beside = [c for c in gains if PEER_MAX in gains[c]]
    lines = [
        case_table(cases, gains),
        f"measured: {len(gains)} of {count} cases, {len(beside)} of them beside {PEER_MAX}",
        *ratio_lines(gains),
        *choice_lines(cases, peers),
        *compile_lines(cases, peers),
        *disturbed_lines(cases),
        *notes(cases),
    ]
    return "\n".join(lines), promises(name, cases, gains, count, device, rivals)


def ratios(by: dict[str, Row]) -> dict[str, float]:
    """{whom: their time over ours}. The best of two is not known where the peer was not reached; where it failed,
    it is eager."""
    ours = by.get(TUNED, {}).get("us")
    theirs = {who: by[who]["us"] for who in (EAGER, PEER_MAX, US) if by.get(who, {}).get("us")}
    if not ours or EAGER not in theirs:
        return {}
    found = {w: t / ours for w, t in theirs.items()}
    if PEER_MAX in by:
        found[BEST] = min(found[w] for w in (EAGER, PEER_MAX) if w in found)
    return found


def case_table(cases: Cases, gains: dict[str, dict[str, float]]) -> str:
    heads = ["case", *(f"{w}, µs" for w in ORDER), "±", "vs eager", f"vs {PEER_MAX}", "vs best", "chosen"]
    body = []
    for case in sorted(cases, key=lambda c: gains.get(c, {}).get(BEST, gains.get(c, {}).get(EAGER, 0.0))):
        by, gain = cases[case], gains.get(case, {})
        ours = by.get(TUNED, {})
        spread = "-" if ours.get("spread") is None else f"{ours['spread']:.1%}{'!' if ours.get('disturbed') else ''}"
        line = [case, *(_num(by.get(w, {}).get("us")) for w in ORDER), spread]
        line += [f"{gain[w]:.2f}x" if w in gain else "-" for w in (EAGER, PEER_MAX, BEST)]
        body.append([*line, (ours.get("choice") or "-")[:60]])
    return table(heads, body)


def ratio_lines(gains: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    dtypes = sorted({c.split()[-1] for c in gains})
    for dtype in ["", *dtypes] if len(dtypes) > 1 else dtypes:
        some = {c: g for c, g in gains.items() if c.endswith(dtype)}
        for who in (EAGER, PEER_MAX, BEST, US):
            found = {c: g[who] for c, g in some.items() if who in g}
            if not found:
                continue
            low, high = (pick(found, key=found.__getitem__) for pick in (min, max))
            lines.append(
                f"{dtype or 'all'}, {TUNED} over {who}: geomean {geomean(found.values()):.3f}x over {len(found)}, "
                f"least {found[low]:.3f}x ({low}), most {found[high]:.2f}x; "
                f"{sum(v < 0.98 for v in found.values())} under 0.98"
            )
    return lines


def choice_lines(cases: Cases, peers: dict[str, Row]) -> list[str]:
    """Who chose what, numbers in the candidates' names left out."""
    ours = Counter(_family(by[TUNED]["choice"]) for by in cases.values() if by.get(TUNED, {}).get("choice"))
    theirs = Counter(_family(r["choice"]) for r in peers.values() if r.get("choice"))
    return [
        f"{who} chose: " + ", ".join(f"{name} {n}" for name, n in found.most_common())
        for who, found in ((TUNED, ours), (PEER_MAX, theirs))
        if found
    ]


def _family(choice: str) -> str:
    return "".join(c for c in choice if not c.isdigit()).strip("_ -")


def compile_lines(cases: Cases, peers: dict[str, Row]) -> list[str]:
    found: dict[str, list[float]] = {PEER_MAX: [r["compile_s"] for r in peers.values() if r.get("compile_s")]}
    for who in (US, TUNED):
        found[who] = [by[who]["compile_s"] for by in cases.values() if by.get(who, {}).get("compile_s")]
    parts = [f"{w} {median(s):.2f} (sum {sum(s):.0f}, most {max(s):.1f})" for w, s in found.items() if s]
    return [f"first call, s, median of cases: {'; '.join(parts)} (several processes at once)"]


def disturbed_lines(cases: Cases) -> list[str]:
    """Cases during which the device was not ours alone; the table marks them with !."""
    timed = {c: next((r for r in by.values() if "reference" in r), None) for c, by in cases.items()}
    rows = {c: r for c, r in timed.items() if r}
    bad = {c: r["reference"] for c, r in rows.items() if r["disturbed"]}
    again = sum(r["attempts"] > 1 for r in rows.values())
    lines = [f"timed more than once, for the reference kernel was slow: {again} of {len(rows)}"] if again else []
    return lines + [
        f"  {c}: disturbed; reference before, among, after: " + ", ".join(f"{x:.2f}" for x in found)
        for c, found in bad.items()
    ]


def notes(cases: Cases) -> list[str]:
    return [f"  {c}, {w}: {r['note']}" for c, by in cases.items() for w, r in by.items() if r.get("note")]


def promises(
    name: str, cases: Cases, gains: dict[str, dict[str, float]], count: int, device: str, rivals: bool
) -> list[Promise]:
    bad = [c for c, by in cases.items() if TUNED in by and not by[TUNED].get("us")]
    made = [Promise(f"matmul {name}: cases of ours wrong or crashed", float(len(bad)), "<=", 0)]
    for who, what, limit in PROMISED[name] if device == "cuda" else ():
        if not rivals and who != EAGER:
            continue
        found = [g[who] for g in gains.values() if who in g]
        value = geomean(found) if what == "geomean" else min(found, default=None)
        made.append(
            Promise(f"matmul {name}: {what} speed against {who}, {len(found)} of {count} cases", value, ">=", limit)
        )
    return made


def progress(row: dict[str, Any]) -> str:
    """A line for the terminal, or ""."""
    if row["kind"] == "prepared":
        what = row.get("note") or f"{row['compile_s']:.1f} s, {row.get('choice') or '-'}"
        return f"  compiled {row['case']}: {what}"
    if row["kind"] != "row":
        return ""
    what = row.get("note") or "" if row.get("us") is None else f"{row['us']:.2f} µs ±{row['spread']:.1%}"
    chosen = f", {row['choice']}" if row.get("choice") else ""
    return f"  {row['case']}, {row['who']}: {what} (first call {row.get('compile_s') or 0:.1f} s{chosen})"
