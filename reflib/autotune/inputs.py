"""Data to measure with: made from a seed, laid out as the program expects, shared by all candidates.

Values. Floats: normal, mean 0, standard deviation (longest dimension) ** -1/4 within 0.03 .. 1, so that a sum of
products over the longest dimension has a deviation of about 1. Bools: random. Integers: 0, the one value that is a
valid index into anything (a kernel that gathers is timed on its best case: register an ``input_gen_fn`` if that
matters). Never zeros for floats: they hide unwritten outputs, and a GPU runs faster on them.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import MeasureError
from ..worker import first_line

Maker = Callable[[torch.Tensor], torch.Tensor]
MIB = 2**20
MAX_COPIES = 1024  # of the weights; below 2 * L2 / MAX_COPIES bytes they are not quite cold


@dataclass(frozen=True)
class InputSpec:
    """One argument of the programs. ``role``: ``weight``, ``activation``, ``size`` (an int: ``value``) or ``unused``
    (None is passed). ``strides``: elements. ``dtype``: ``float16``. ``maker``: key of a registered input maker.
    ``fill``: the value that all elements have."""

    name: str
    role: str
    value: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    maker: str | None = None
    fill: float | None = None

    @property
    def is_tensor(self) -> bool:
        return self.role in ("weight", "activation")

    @property
    def extent(self) -> int:
        """Elements of the storage: from the first to the last that the strides reach."""
        return extent(self.shape, self.strides)

    @property
    def nbytes(self) -> int:
        return self.extent * getattr(torch, self.dtype).itemsize if self.is_tensor else 0


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))


def main_device(specs: Sequence[InputSpec]) -> torch.device:
    """Where the programs run: the first GPU among the inputs' devices, else the CPU."""
    devices = [torch.device(s.device) for s in specs if s.is_tensor]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def make_inputs(specs: Sequence[InputSpec], seed: int, makers: Mapping[str, Maker]) -> list[Any]:
    """One argument per spec. The same seed gives the same data; no generator but our own is used (a maker uses the
    default ones: the caller puts those back). Raises MeasureError naming the maker that failed."""
    out: list[Any] = []
    for i, s in enumerate(specs):
        if s.is_tensor:
            t = _random(s, seed * 1000 + i)
            out.append(t if s.maker is None else _from_maker(s, s.maker, t, makers))
        else:
            out.append(s.value if s.role == "size" else None)
    return out


def _random(s: InputSpec, seed: int) -> torch.Tensor:
    dtype, device = getattr(torch, s.dtype), torch.device(s.device)
    g = torch.Generator(device).manual_seed(seed)
    storage = torch.empty(s.extent, dtype=dtype, device=device)
    if s.fill is not None:
        storage.fill_(s.fill)
    elif dtype == torch.bool:
        storage.bernoulli_(0.5, generator=g)
    elif dtype.is_floating_point or dtype.is_complex:
        std = min(1.0, max(0.03, max(s.shape, default=1) ** -0.25)) if s.extent else 1.0
        if dtype.itemsize == 1:  # float8 has no normal_ of its own
            storage.copy_(torch.empty(s.extent, device=device).normal_(0, std, generator=g))
        else:
            storage.normal_(0, std, generator=g)
    else:
        storage.zero_()
    return storage.as_strided(s.shape, s.strides)


def _from_maker(s: InputSpec, key: str, like: torch.Tensor, makers: Mapping[str, Maker]) -> torch.Tensor:
    """The registered function's result for ``like``, in the layout of ``like``."""
    if key not in makers:
        raise MeasureError(f"input {s.name}: no input maker {key!r} here; pass it in makers=")
    try:
        made = makers[key](like)
    except Exception as e:
        raise MeasureError(f"the input maker {key!r} raised {first_line(e)}") from e
    if not isinstance(made, torch.Tensor) or (made.shape, made.dtype) != (like.shape, like.dtype):
        what = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
        raise MeasureError(f"the input maker {key!r} made {what}, not a tensor {like.dtype} {tuple(like.shape)}")
    if 0 in like.stride():  # one cell is many elements: take it from any of them
        index = tuple(slice(0, 1) if step == 0 else slice(None) for step in like.stride())
        like[index].copy_(made[index])
    else:
        like.copy_(made)
    return like


def storage_of(t: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in memory, first to last, as one dimension."""
    return t.as_strided((extent(t.shape, t.stride()),), (1,))


def copy_of(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Another storage, laid out the same (overlaps too), as ``dtype``."""
    return storage_of(t).to(dtype or t.dtype, copy=True).as_strided(t.shape, t.stride())


def fingerprint(t: torch.Tensor) -> int:
    """A sum over the bytes in memory, to detect writes."""
    return int(storage_of(t).view(torch.uint8).sum(dtype=torch.int64))


# -- how much memory --------------------------------------------------------------------------------
def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now; for a GPU, with what PyTorch holds unused."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4096 * MIB


def l2_bytes(device: torch.device) -> int:
    """Size of a GPU's last-level cache."""
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 64 * MIB


def weight_copies(weights: int, room: int, l2: int) -> int:
    """How many sets of ``weights`` bytes, used in turn, keep each other out of an ``l2``-byte cache: twice its size in
    all, in at most ``room`` bytes beside the first set. 1: there are none, or no room."""
    if weights == 0:
        return 1
    return max(1, min(math.ceil(2 * l2 / weights), 1 + room // weights, MAX_COPIES))


def rotate(specs: Sequence[InputSpec], args: Sequence[Any], copies: int, fixed: set[int]) -> list[list[Any]]:
    """``copies`` argument lists that share all but the weights; inputs in ``fixed`` (positions) are shared, too."""
    turning = {i for i, s in enumerate(specs) if s.role == "weight" and i not in fixed}
    more = [[copy_of(a) if i in turning else a for i, a in enumerate(args)] for _ in range(copies - 1)]
    return [list(args), *more]


def is_out_of_memory(e: BaseException) -> bool:
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(e, RuntimeError) and ("out of memory" in str(e) or "can't allocate memory" in str(e))
