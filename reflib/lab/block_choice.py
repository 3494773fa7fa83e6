"""`lab.block_slider`: sliders for XBLOCK and RBLOCK, and which program then computes which element.

(`lab.blocks_picture` is the static version.)
"""

from itertools import product
from typing import Any

from reflib.errors import LabError
from reflib.ir.program import Config
from reflib.lab.block_chart import blocks, masked
from reflib.lab.figures import COLOURS
from reflib.lab.moving import Explorer, Spec, emit, moving, pick, slider

XBLOCKS, RBLOCKS = (1, 2, 4, 8), (8, 16, 32)
BEYOND = "#8a8a8a"


def block_slider(rows: int = 6, columns: int = 20, *, caption: str) -> Explorer:
    """Show a ``rows`` by ``columns`` matrix, reduced along its rows, with sliders for the block: XBLOCK rows
    by RBLOCK columns per step. Masked lanes are grey. LabError above 8 by 32."""
    high, wide = XBLOCKS[-1], RBLOCKS[-1]
    if not (1 <= rows <= high and 1 <= columns <= wide):
        raise LabError(f"block_slider draws at most {high} rows of {wide} columns, not {rows} of {columns}")
    spec = moving(
        [_view(rows)],
        params=[
            pick("xblock", "XBLOCK", XBLOCKS, 2),
            pick("rblock", "RBLOCK", RBLOCKS, 8),
            slider("columns", "columns of the matrix", 1, wide, 1, columns),
        ],
        says=_says(rows),
        data={f"blocks of {rows} by {columns} elements": [_line(rows, columns, *b) for b in product(XBLOCKS, RBLOCKS)]},
        alt=f"A matrix of {rows} rows and at most {wide} columns, coloured by the program that computes an element. "
        f"XBLOCK is one of {', '.join(map(str, XBLOCKS))}, RBLOCK one of {', '.join(map(str, RBLOCKS))}.",
        caption=caption,
    )
    return emit(spec)


def _says(rows: int) -> list[str]:
    programs, steps = f"ceil({rows} / xblock)", "ceil(columns / rblock)"
    lanes = f"({programs} * xblock * {steps} * rblock)"
    return [
        f"{programs} + ' programs, ' + {steps} + ({steps} === 1 ? ' step: persistent' : ' steps each: looped')",
        f"({lanes} - {rows} * columns) + ' of ' + {lanes} + ' lanes are beyond the edge'",
        f"'rows ' + ({rows} % xblock === 0 ? 'need no mask' : 'are masked') + "
        "', columns ' + (columns % rblock === 0 ? 'need no mask' : 'are masked')",
    ]


def _line(rows: int, columns: int, xblock: int, rblock: int) -> dict[str, Any]:
    """The row of the figure's table for one block size."""
    found = blocks(rows, columns, Config("persistent", xblock=xblock, rblock=rblock))
    programs, steps = 1 + max(b.program for b in found), 1 + max(b.step for b in found)
    beyond = masked(rows, columns, found)
    return {"XBLOCK": xblock, "RBLOCK": rblock, "programs": programs, "steps": steps, "lanes beyond the edge": beyond}


def _view(rows: int) -> Spec:
    """One cell per lane of the blocks."""
    high, wide = XBLOCKS[-1], RBLOCKS[-1]
    axis = {"grid": False, "tickMinStep": 1, "tickCount": 6}
    across = {"domain": [0, wide], "nice": False}
    down = {"domain": [0, high], "reverse": True, "nice": False}
    colours = [COLOURS[i % len(COLOURS)] for i in range(high)]
    return {
        "data": {"sequence": {"start": 0, "stop": high * wide, "as": "lane"}},
        "transform": [
            {"calculate": f"floor(datum.lane / {wide})", "as": "row"},
            {"calculate": f"datum.lane % {wide}", "as": "column"},
            {"filter": f"datum.row < ceil({rows} / xblock) * xblock && datum.column < ceil(columns / rblock) * rblock"},
            {"calculate": f"datum.row < {rows} && datum.column < columns", "as": "inside"},
            {"calculate": "floor(datum.row / xblock)", "as": "program"},
            {"calculate": "floor(datum.column / rblock)", "as": "step"},
            {"calculate": "datum.row + 1", "as": "below"},
            {"calculate": "datum.column + 1", "as": "right"},
        ],
        "height": 150,
        "mark": {"type": "rect", "stroke": "#ffffff", "strokeWidth": 1},
        "encoding": {
            "x": {"field": "column", "type": "quantitative", "title": "column", "scale": across, "axis": axis},
            "x2": {"field": "right"},
            "y": {"field": "row", "type": "quantitative", "title": "row", "scale": down, "axis": axis},
            "y2": {"field": "below"},
            "color": {
                "condition": {"test": "!datum.inside", "value": BEYOND},
                "field": "program", "type": "nominal", "legend": {"orient": "bottom", "columns": 8},
                "scale": {"domain": list(range(high)), "range": colours},
            },
            "opacity": {"condition": {"test": "!datum.inside", "value": 0.25},
                        "field": "step", "type": "quantitative", "legend": None,
                        "scale": {"domain": [0, 3], "range": [1.0, 0.4]}},
            "tooltip": [{"field": f} for f in ("row", "column", "program", "step", "inside")],
        },
    }  # fmt: skip
