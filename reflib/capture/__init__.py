"""Stage 1, ``capture``: a model and its arguments become a :class:`Graph` of ATen calls."""

from .capture import dynamo_graph_to_aten
from .graph import Graph

__all__ = ["Graph", "dynamo_graph_to_aten"]
