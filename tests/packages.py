"""Packages for tests on GPUs, built where there is none: ``python -m tests.packages FOLDER`` (in CI, on a laptop).

``make test-gpu`` builds them in a process that sees no GPU; ``REFLIB_PACKAGES=FOLDER`` names some that another machine
built, and those are then tested as they are.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from reflib.package import archive
from tests.models import Block

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """``make() -> (model, arguments)``, on the CPU, always the same. ``aten``: does it call ATen?"""

    make: Callable[[], tuple[Any, tuple[Tensor, ...]]]
    archs: tuple[str, ...] = ("sm_80", "sm_90")
    dynamic_shapes: Any = None
    aten: bool = False
    tolerance: float = 1e-4


CASES: dict[str, Case] = {}


def case(**about: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def keep(make: Callable[[], Any]) -> Callable[[], Any]:
        CASES[make.__name__] = Case(make, **about)
        return make

    return keep


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)


class Norm(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight, -1)


@case()
def norm() -> Any:
    return Norm(640), (randn(96, 640),)


@case(archs=("sm_75",))
def norm_from_ptx() -> Any:
    return norm()


@case(dynamic_shapes=({0: Dim("n", min=2, max=4096)},))
def norm_of_any_length() -> Any:
    return norm()


class Product(torch.nn.Module):
    def __init__(self, k: int, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(randn(k, n, dtype=dtype) / k**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.w) + 1


@case(tolerance=2e-2)
def split_product() -> Any:
    """Its depth is cut: counters that must be zero, a launch that may be early."""
    return Product(12288, 64, torch.float16), (randn(64, 12288, dtype=torch.float16),)


@case(archs=("sm_80",), tolerance=2e-2)
def split_product_from_ptx() -> Any:
    return split_product()


class Counted(Block):
    """With a buffer that calls write to."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


@case(archs=("sm_80", "sm_90", "sm_120", "cpu"), aten=True, tolerance=5e-3)
def block() -> Any:
    return Counted(128, 4), (randn(2, 32, 128),)


@case(aten=True, dynamic_shapes=({0: Dim("b", min=2, max=64), 1: Dim("t", min=2, max=512)},), tolerance=5e-3)
def block_of_any_length() -> Any:
    return block()


class Sorts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.bn = torch.nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.bn(self.conv(x)))
        where = torch.arange(8, device=x.device).float()
        values, order = torch.sort(y.mean((2, 3)) * where, -1)
        return values, order


@case(aten=True, tolerance=2e-2)
def convolution_and_sort() -> Any:
    return Sorts().eval(), (randn(4, 3, 16, 16),)


def made(name: str) -> tuple[Any, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return CASES[name].make()


def changed(package: Path, path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Path:
    """The package with something else in it, ``change(manifest, members)``, all digests right, at ``path``."""
    file = archive.open(package)
    members: dict[str, Any] = {name: bytes(file.view(name)) for name in file.names}
    manifest = {k: v for k, v in file.manifest.items() if k != "entries"}
    change(manifest, members)
    return archive.write(path, manifest, members)


def build(folder: Path) -> None:
    """All of them, as ``NAME.reflib``."""
    import reflib

    folder.mkdir(parents=True, exist_ok=True)
    for name, c in CASES.items():
        model, args = made(name)
        reflib.aot_compile(model, args, folder / f"{name}.reflib", c.archs, dynamic_shapes=c.dynamic_shapes)


if __name__ == "__main__":
    assert not torch.cuda.is_available(), "build these where there is no GPU: CUDA_VISIBLE_DEVICES="
    build(Path(sys.argv[1]))
