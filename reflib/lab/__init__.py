"""Tools for notebooks, unused by the compiler: set-up, measuring, claims, figures.

Importing this package is cheap: each name is loaded on first use, from the module that it is imported from below.
"""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reflib.lab.arch_chart import arch_explorer as arch_explorer
    from reflib.lab.axes_chart import axes_picture as axes_picture
    from reflib.lab.axes_chart import copies_picture as copies_picture
    from reflib.lab.block_chart import blocks_picture as blocks_picture
    from reflib.lab.block_choice import block_slider as block_slider
    from reflib.lab.capability import has as has
    from reflib.lab.ceilings import Roofline as Roofline
    from reflib.lab.ceilings import roofline as roofline
    from reflib.lab.charts import dots as dots
    from reflib.lab.charts import roofline_plot as roofline_plot
    from reflib.lab.checking import check as check
    from reflib.lab.claims import as_predicted as as_predicted
    from reflib.lab.claims import claim as claim
    from reflib.lab.clock_chart import Segment as Segment
    from reflib.lab.clock_chart import over_time as over_time
    from reflib.lab.clock_chart import race as race
    from reflib.lab.decision_chart import before_after as before_after
    from reflib.lab.decision_chart import candidates as candidates
    from reflib.lab.decision_chart import decision_rows as decision_rows
    from reflib.lab.explorer import candidate_rows as candidate_rows
    from reflib.lab.explorer import explore as explore
    from reflib.lab.explorer import kind_of as kind_of
    from reflib.lab.figures import figure as figure
    from reflib.lab.figures import plain_log as plain_log
    from reflib.lab.figures import style as style
    from reflib.lab.fusion_chart import fusion_graph as fusion_graph
    from reflib.lab.gantt_chart import gantt as gantt
    from reflib.lab.growing import Growing as Growing
    from reflib.lab.kernels import load_kernel as load_kernel
    from reflib.lab.lane_chart import banks_picture as banks_picture
    from reflib.lab.lane_chart import lanes_picture as lanes_picture
    from reflib.lab.live_widgets import live as live
    from reflib.lab.machine import beyond_cache as beyond_cache
    from reflib.lab.measuring import measure as measure
    from reflib.lab.memory_chart import memory_scrubber as memory_scrubber
    from reflib.lab.memory_trade import cut_picture as cut_picture
    from reflib.lab.memory_trade import trade as trade
    from reflib.lab.params import Parameter as Parameter
    from reflib.lab.params import parse_parameters as parse_parameters
    from reflib.lab.params import validate as validate
    from reflib.lab.peak_memory import counted as counted
    from reflib.lab.peak_memory import measure_memory as measure_memory
    from reflib.lab.peak_memory import peak_bytes as peak_bytes
    from reflib.lab.peer_sweep import measure_peer as measure_peer
    from reflib.lab.peers import peer as peer
    from reflib.lab.pictures import fusion_picture as fusion_picture
    from reflib.lab.pictures import memory_picture as memory_picture
    from reflib.lab.pictures import moved_bytes as moved_bytes
    from reflib.lab.pictures import refusals as refusals
    from reflib.lab.pictures import stages_picture as stages_picture
    from reflib.lab.pictures import steps_picture as steps_picture
    from reflib.lab.pictures import timeline_picture as timeline_picture
    from reflib.lab.pipeline_strip import strip as strip
    from reflib.lab.plots import bars as bars
    from reflib.lab.plots import lines as lines
    from reflib.lab.product_chart import order_picture as order_picture
    from reflib.lab.product_chart import split_picture as split_picture
    from reflib.lab.product_chart import tile_picture as tile_picture
    from reflib.lab.ranges import range_picture as range_picture
    from reflib.lab.ranges import served as served
    from reflib.lab.ranges import told_times as told_times
    from reflib.lab.ranges import variants as variants
    from reflib.lab.rank_chart import ranks_explorer as ranks_explorer
    from reflib.lab.rank_group import Ranks as Ranks
    from reflib.lab.rank_group import ranks as ranks
    from reflib.lab.ranking import standings as standings
    from reflib.lab.ratio_chart import geometric_mean as geometric_mean
    from reflib.lab.ratio_chart import predicted_plot as predicted_plot
    from reflib.lab.ratio_chart import ratios as ratios
    from reflib.lab.recording import recorded as recorded
    from reflib.lab.rivals import contenders as contenders
    from reflib.lab.roof_slider import Version as Version
    from reflib.lab.roof_slider import roofline_slider as roofline_slider
    from reflib.lab.rows import Row as Row
    from reflib.lab.rows import Rows as Rows
    from reflib.lab.session import Setup as Setup
    from reflib.lab.session import setup as setup
    from reflib.lab.showing import show as show
    from reflib.lab.showing import table as table
    from reflib.lab.side import no_slower as no_slower
    from reflib.lab.side import side_by_side as side_by_side
    from reflib.lab.trace_chart import trace_picture as trace_picture
    from reflib.lab.triton_text import Launch as Launch
    from reflib.lab.triton_text import Plan as Plan
    from reflib.lab.triton_text import compile_plan as compile_plan
    from reflib.lab.triton_text import gpu_call as gpu_call
    from reflib.lab.triton_text import run_plans as run_plans
    from reflib.lab.triton_text import run_triton as run_triton
    from reflib.lab.tuning import ColdStarts as ColdStarts
    from reflib.lab.tuning import cold_starts as cold_starts
    from reflib.lab.weight_loops import weight_product as weight_product
    from reflib.lab.wins import generated as generated
    from reflib.lab.wins import show_wins as show_wins

# name -> its module, as above. No module may have the name of a function here: importing a submodule sets an attribute
# of this package, which would hide the function.
_HOME = {name: module for module, name in re.findall(r"lab\.(\w+) import (\w+) as", Path(__file__).read_text())}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
