"""Inspection: ``explain`` shows a compilation, ``doctor`` checks the machine."""

from .explain import Explanation, explain

__all__ = ["Explanation", "explain"]
