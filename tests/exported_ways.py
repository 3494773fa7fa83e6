"""The ways in which a compiled program is called: from C, or by the slow path with ctypes."""

import contextlib
from collections.abc import Iterator

import pytest

from reflib.wrap import host, host_ctypes

WAYS = ["C", "ctypes"]


@contextlib.contextmanager
def taken(way: str) -> Iterator[None]:
    """Programs that are first called within it are called in this way from then on."""
    with pytest.MonkeyPatch.context() as m:
        if way == "ctypes":  # without an extension
            m.setattr(host, "extension", lambda: host_ctypes)
        yield
