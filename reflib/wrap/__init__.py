"""Stage 8, ``wrap``: the steps become a callable."""

from .wrap import wrap

__all__ = ["wrap"]
