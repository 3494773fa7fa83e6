"""The ways in which a compiled program is called: C, its Python version, ctypes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from reflib.wrap import host, host_ctypes

WAYS = ["C", "Python", "ctypes"]  # host_entry.c; host_ctypes.entry, before C and before ctypes


@contextlib.contextmanager
def taken(way: str) -> Iterator[None]:
    """Programs that are first called within it are called in this way from then on."""
    with pytest.MonkeyPatch.context() as m:
        if way == "Python":  # for a torch without the functions that C needs
            m.setattr(host, "_entry_functions", tuple)
        elif way == "ctypes":  # without any extension
            m.setattr(host, "extension", lambda: host_ctypes)
        yield
