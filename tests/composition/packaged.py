"""A function as a package: ``aot_compile`` for the arguments of the first call, ``load``, call.

It stands where a compiled function stands, so that one check serves both; and keeps the stages of what it packaged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

import reflib
from reflib import aot
from reflib.ir.program import Extern
from reflib.package import archive, manifest
from reflib.pipeline import Stages

called: list[Packaged] = []  # in the order of their first calls


class Packaged:
    """dynamic: every size may change, every whole number too. Options: ``aot_compile``'s and reflib's."""

    def __init__(self, fn: Callable[..., Any], dynamic: bool | None = None, **options: Any):
        self.fn, self.dynamic, self.options = fn, bool(dynamic), {"verify": True, "ptx": False, **options}
        self.stages: list[Stages] = []
        self.loaded: dict[str, Any] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="reflib-packaged-")
        self.path = Path(self.folder.name, "f.reflib")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = device_of((args, kwargs))
        if device not in self.loaded:
            self.loaded[device] = self.load(device, args, kwargs)
        return self.loaded[device](*args, **kwargs)

    def load(self, device: str, args: Any, kwargs: Any) -> Any:
        if not self.path.exists():
            called.append(self)
            self.make(args, kwargs)
        return reflib.load(self.path, device=device)

    def make(self, args: Any, kwargs: Any) -> None:
        on_gpu = device_of((args, kwargs)) != "cpu"
        archs = "native" if on_gpu or not torch.cuda.is_available() else "cpu"
        given: dict[str, Any] = {}
        if not isinstance(self.fn, torch.export.ExportedProgram):
            given = {"args": args, "kwargs": kwargs, "dynamic_shapes": sizes((args, kwargs)) if self.dynamic else None}
        with remembered(self.stages):
            reflib.aot_compile(self.fn, path=self.path, archs=archs, **given, **self.options)

    def again(self) -> None:
        """The next call loads the file as it is then."""
        self.loaded.clear()

    def options_in_file(self) -> dict[str, Any]:
        return manifest.read(archive.open(self.path).manifest).options

    @property
    def externs(self) -> list[Any]:
        return [n for s in self.stages for n in s.scheduled.nodes if isinstance(n, Extern)]  # type: ignore[union-attr]

    @property
    def texts(self) -> list[str]:
        """The variants' host code, as it is in the package."""
        file = archive.open(self.path)
        return [bytes(file.view(a.text)).decode() for a in manifest.read(file.manifest).variants]


def device_of(call: Any) -> str:
    """Of the first tensor that is on a GPU; else the CPU."""
    tensors = (t for t in pytree.tree_leaves(call) if isinstance(t, torch.Tensor))
    return next((str(t.device) for t in tensors if t.is_cuda), "cpu")


def sizes(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """``dynamic_shapes`` with everything that may change; of keyword arguments nothing."""
    args, kwargs = call
    assert not kwargs, "say which sizes of keyword arguments may change"

    def one(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return dict.fromkeys(range(x.ndim), Dim.AUTO)
        return Dim.AUTO if type(x) is int else None

    every = pytree.tree_map(one, args)
    return every


@contextmanager
def remembered(found: list[Stages]) -> Iterator[None]:
    """What ``aot_compile`` takes each variant through goes into ``found``."""
    before = aot._stages

    def stages(*args: Any) -> Stages:
        found.append(before(*args))
        return found[-1]

    aot._stages = stages
    try:
        yield
    finally:
        aot._stages = before
