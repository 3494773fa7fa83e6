"""Stage 5, ``schedule``: how each kernel is cut into blocks and launched, by a static model."""

from .schedule import schedule

__all__ = ["schedule"]
