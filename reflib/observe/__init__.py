"""Looking at what the compiler did: ``explain``, and ``doctor`` for the machine."""

from .explain import Explanation, explain

__all__ = ["Explanation", "explain"]
