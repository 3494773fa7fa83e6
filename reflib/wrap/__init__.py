"""Stage 7, ``wrap``: the steps become a callable."""

from .wrap import begin, wrap

__all__ = ["begin", "wrap"]
