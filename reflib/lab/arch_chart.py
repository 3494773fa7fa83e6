"""`lab.arch_explorer`: tick the architectures of a package; see its size in bytes and what each GPU would run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reflib.lab.figures import COLOURS
from reflib.lab.moving import Explorer, Spec, emit, moving, text
from reflib.lab.rows import count

if TYPE_CHECKING:
    from reflib.package.inspect import Inspection

CODE, PTX, NOTHING = "machine code", "PTX, compiled by the driver", "nothing"
LOOKS = {CODE: COLOURS[0], PTX: COLOURS[2], NOTHING: COLOURS[1]}
TICKED = "sm_80"  # initially the only one


def arch_explorer(found: Inspection, *, caption: str) -> Explorer | None:
    """Show the size and the coverage of a package for any subset of its architectures.

    ``found``: the result of `inspect` on a package with all architectures; each becomes a checkbox. Prints a line and
    returns None if it has no GPU code."""
    from reflib.package import architectures
    from reflib.package.inspect import GPUS

    sizes = {a.arch: found.machine_code(a) for a in found.manifest.variants if a.arch != "cpu"}
    archs = [a for a in sizes if a != "ptx"]
    if not archs:
        print("Nothing to draw: there is no code for GPUs in this package.")
        return None
    made_for = next((a.made_for for a in found.manifest.variants if a.arch == "ptx"), None)
    pairs = [
        {"GPU": gpu, "code": arch, "on": _name(arch), "capability": architectures.capability(arch), "kind": CODE}
        for gpu, number in GPUS
        for arch in archs
        if architectures.runs_on(arch, number)
    ]
    if made_for:
        pairs += [
            {"GPU": gpu, "code": f"PTX of {made_for}", "on": _name("ptx"), "capability": 0, "kind": PTX}
            for gpu, number in GPUS
            if number >= architectures.capability(made_for)
        ]
    pairs += [{"GPU": gpu, "code": "nothing", "on": "always", "capability": -1, "kind": NOTHING} for gpu, _ in GPUS]
    ticked = TICKED if TICKED in archs else archs[0]
    boxes = [{"name": _name(a), "value": a == ticked, "bind": {"input": "checkbox", "name": f"{a} "}} for a in sizes]
    spec = moving(
        [_view([gpu for gpu, _ in GPUS], list(sizes))],
        params=boxes,
        says=_says(sizes, pairs, len(GPUS)),
        data={"code and GPUs": pairs, "bytes": [{"code": a, "bytes": size} for a, size in sizes.items()]},
        alt=_alt(sizes, pairs),
        caption=caption,
    )
    return emit(spec)


def _name(arch: str) -> str:
    return f"has_{arch}"


def _says(sizes: dict[str, int], pairs: list[dict[str, Any]], gpus: int) -> list[str]:
    """Vega expressions: total bytes of the ticked architectures, and the number of GPUs that can run one."""
    code = " + ".join(f"({_name(a)} ? {size} : 0)" for a, size in sizes.items())
    on: dict[str, list[str]] = {}
    for pair in pairs:
        if pair["on"] != "always":
            on.setdefault(pair["GPU"], []).append(pair["on"])
    served = " + ".join(f"({' || '.join(names)} ? 1 : 0)" for names in on.values())
    return [
        f"format({code}, ',') + {text(' bytes of code for GPUs, before they are packed')}",
        f"({served}) + {text(f' of {gpus} GPUs have code that they can run')}",
    ]


def _view(gpus: list[str], archs: list[str]) -> Spec:
    """One row per GPU: the nearest of the ticked architectures that it can run."""
    ticked = " || ".join(f"(datum.on === {text(_name(a))} && {_name(a)})" for a in archs)
    scale = {"domain": list(LOOKS), "range": list(LOOKS.values())}
    y: dict[str, Any] = {"field": "GPU", "type": "nominal", "sort": gpus, "title": None, "axis": {"labelLimit": 150}}
    return {
        "data": {"name": "code and GPUs"},
        "transform": [
            {"filter": f"datum.on === 'always' || {ticked}"},
            {
                "groupby": ["GPU"],
                "sort": [{"field": "capability", "order": "descending"}],
                "window": [{"op": "row_number", "as": "place"}],
            },
            {"filter": "datum.place === 1"},
        ],
        "height": {"step": 24},
        "encoding": {"y": y},
        "layer": [
            {
                "mark": {"type": "bar", "height": 18},
                "encoding": {
                    "x": {"value": 0}, "x2": {"value": 18},
                    "color": {"field": "kind", "type": "nominal", "scale": scale,
                              "legend": {"orient": "bottom", "title": None, "columns": 2}},
                    "tooltip": [{"field": f} for f in ("GPU", "code", "kind")],
                },
            },
            {
                "mark": {"type": "text", "align": "left", "baseline": "middle"},
                "encoding": {"x": {"value": 26}, "text": {"field": "code", "type": "nominal"}},
            },
        ],
    }  # fmt: skip


def _alt(sizes: dict[str, int], pairs: list[dict[str, Any]]) -> str:
    parts = [f"{count(len(sizes), 'version')} of the code to tick, and the GPUs that run each."]
    for arch, size in sizes.items():
        runs = [p["GPU"] for p in pairs if p["on"] == _name(arch)]
        parts.append(f"{arch}, {size:,} bytes: {', '.join(runs) or 'no GPU listed here'}.")
    return " ".join(parts)
