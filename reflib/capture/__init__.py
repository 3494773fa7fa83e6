"""Stage 1, ``capture``: a model and its arguments become a :class:`Graph` of ATen calls."""

from .capture import dynamo_graph_to_aten, exported_graph
from .export import Exported, export_for
from .graph import Graph

__all__ = ["Exported", "Graph", "dynamo_graph_to_aten", "export_for", "exported_graph"]
