"""Weights: one member of a package, in the safetensors format, mapped and used in place.

The format is a length (8 bytes, little-endian), a JSON header, and the tensors' bytes without holes::

    {"layer.weight": {"dtype": "F32", "shape": [64, 10], "data_offsets": [0, 2560]}, ...}

It has contiguous tensors only, so the manifest describes the tensors of the model: each ``Weight`` is a strided view of
one ``Span`` of the member. Tensors that share a storage share a span: tied weights, and views of one buffer, are stored
once and are views of one storage again after loading. A span is the memory that its tensors cover; bytes of it that
belong to no tensor are stored as zeros, so that the file depends on the tensors' values alone. The header is for other
tools: a span appears under the name of one of its tensors, with that tensor's shape if it is contiguous and covers the
span, else as one dimension.

Kernels want data at multiples of 64 bytes, the format wants no holes. The header is padded with spaces, and spans are
ordered by the power of two (up to 64) that divides their size: all whose size is a multiple of 64 are aligned. The few
others are copied when they are loaded.

NB: the safetensors library is not used here: it writes from memory as a whole, and reads a file of its own or a copy,
never a part of another file in place.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PackageError
from .archive import Chunks

ALIGN = 64
PIECE = 4 << 20  # bytes copied at a time

DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",  # two numbers in one of torch's elements
}  # fmt: skip
BY_NAME = {str(d).removeprefix("torch."): d for d in DTYPES}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # to copy bits of any dtype


@dataclass(frozen=True)
class Span:
    """``size`` bytes from ``start`` of the member on: one storage."""

    start: int
    size: int


@dataclass(frozen=True)
class Weight:
    """A tensor. ``kind``: parameter, buffer or constant. ``dtype``: "float32". It begins ``offset`` bytes into the span
    with the number ``span``."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    span: int
    offset: int

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * BY_NAME[self.dtype].itemsize


# -- write ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Group:
    """Tensors of one storage, by name: ``size`` bytes from ``begin`` of it on."""

    tensors: Mapping[str, torch.Tensor]
    begin: int
    size: int

    @property
    def whole(self) -> str | None:
        """The first tensor that is contiguous and covers all bytes."""
        found = (n for n, t in self.tensors.items() if t.is_contiguous() and t.numel() * t.itemsize == self.size)
        return next(found, None)

    @property
    def key(self) -> str:
        """Its name in the header."""
        return self.whole or next(iter(self.tensors))

    def described(self) -> tuple[str, list[int]]:
        """Its dtype and shape in the header."""
        t = self.tensors[self.key]
        shape = list(t.shape) if self.whole else [self.size // t.itemsize]
        if self.size % t.itemsize:
            return "U8", [self.size]
        if t.dtype == torch.float4_e2m1fn_x2:
            shape = [*shape[:-1], 2 * shape[-1]] if shape else [2]
        return DTYPES[t.dtype], shape


def pack(
    tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, str]
) -> tuple[Chunks, tuple[Weight, ...], tuple[Span, ...]]:
    """The member's contents, and the manifest's description of them. ``kinds``: by name. Tensors are copied from where
    they are, piece by piece, when the contents are read: they must not change until then. (A span that no contiguous
    tensor covers is first put together in memory.) Raises PackageError for tensors that cannot be stored."""
    plain = {name: _plain(name, tensors[name]) for name in sorted(tensors)}
    by_storage: dict[Any, dict[str, torch.Tensor]] = {}
    for name, t in plain.items():
        storage = t.untyped_storage()
        place = (t.device, storage.data_ptr(), storage.nbytes()) if t.numel() else name
        by_storage.setdefault(place, {})[name] = t
    groups = sorted(map(_group, by_storage.values()), key=lambda g: (-math.gcd(g.size, ALIGN), g.key))
    header, spans = _layout(groups)
    weights = [
        Weight(n, kinds[n], str(t.dtype).removeprefix("torch."), tuple(t.shape), tuple(t.stride()), i,
               _offset(t) - g.begin)
        for i, g in enumerate(groups) for n, t in g.tensors.items()
    ]  # fmt: skip

    def make() -> Iterator[Any]:
        yield header
        for group in groups:
            yield from _pieces(group)

    size = len(header) + sum(s.size for s in spans)
    return Chunks(size, make), tuple(sorted(weights, key=lambda w: w.name)), spans


def _plain(name: str, t: torch.Tensor) -> torch.Tensor:
    """``t`` as a tensor with memory of its own."""
    if t.dtype not in DTYPES:
        raise PackageError(f"the weight {name!r} is {t.dtype}, which safetensors has no name for; convert it")
    wrapped = type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wrapped or t.layout != torch.strided or t.device.type == "meta" or t.is_nested:
        what = f"{type(t).__name__}, {t.layout}, {t.device}"
        raise PackageError(f"the weight {name!r} ({what}) has no memory of its own; make it a plain, dense tensor")
    return t.detach().resolve_conj().resolve_neg()


def _group(tensors: Mapping[str, torch.Tensor]) -> _Group:
    """Tensors that begin at different places of their storage keep their alignment: the span begins at a multiple of
    64 bytes of the storage."""
    begins = {_offset(t) for t in tensors.values()}
    begin = min(begins) if len(begins) == 1 else min(begins) // ALIGN * ALIGN
    return _Group(tensors, begin, max(map(_end, tensors.values())) - begin)


def _offset(t: torch.Tensor) -> int:
    return t.storage_offset() * t.itemsize if t.numel() else 0


def _end(t: torch.Tensor) -> int:
    """The byte after its last, in its storage."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
    return _offset(t) + extent * t.itemsize


def _layout(groups: Sequence[_Group]) -> tuple[bytes, tuple[Span, ...]]:
    """The safetensors header, and where each group lies in the member."""
    described, starts, at = {}, [], 0
    for g in groups:
        dtype, shape = g.described()
        described[g.key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + g.size]}
        starts.append(at)
        at += g.size
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    header = len(text).to_bytes(8, "little") + text
    return header, tuple(Span(len(header) + start, g.size) for start, g in zip(starts, groups))


def _pieces(group: _Group) -> Iterator[memoryview]:
    if not group.size:
        return
    storage, begin = next(iter(group.tensors.values())).untyped_storage(), group.begin
    if group.whole is None:
        storage, begin = _gathered(group), 0
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (group.size,), (1,))
    for at in range(0, group.size, PIECE):
        yield memoryview(flat[at : at + PIECE].cpu().numpy())


def _gathered(group: _Group) -> torch.UntypedStorage:
    """A storage with copies of the group's tensors, and zeros between them."""
    storage = torch.zeros(group.size, dtype=torch.uint8).untyped_storage()
    for t in group.tensors.values():
        word, offset = _WORDS[t.itemsize], (_offset(t) - group.begin) // t.itemsize
        source = torch.empty(0, dtype=word, device=t.device)
        source = source.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
        target = torch.empty(0, dtype=word, device="cpu").set_(storage, offset, t.shape, t.stride())
        for d, stride in enumerate(t.stride()):
            if stride == 0:  # an expanded dimension: one element, copied once
                source, target = source.narrow(d, 0, 1), target.narrow(d, 0, 1)
        target.copy_(source)
    return storage


# -- read -------------------------------------------------------------------------------------------
def mapped(
    view: memoryview, weights: Sequence[Weight], spans: Sequence[Span],
    storages: dict[Span, torch.UntypedStorage] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The tensors by name, on the CPU. They lie in ``view`` (a package's ``view("weights.safetensors")``: writing to
    them changes this process's copy only), except for spans that are not aligned to 64 bytes, which are copied.
    ``storages``: those of models that share them, which is added to."""
    storages = {} if storages is None else storages
    for s in {spans[w.span] for w in weights} - storages.keys():
        storages[s] = storage(view, s)
    return {w.name: tensor(storages[spans[w.span]], w) for w in sorted(weights, key=lambda w: w.name)}


def storage(view: memoryview, span: Span) -> torch.UntypedStorage:
    if not span.size:  # which frombuffer refuses
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    flat = torch.frombuffer(view, dtype=torch.uint8, count=span.size, offset=span.start)
    return (flat if flat.data_ptr() % ALIGN == 0 else flat.clone()).untyped_storage()


def tensor(storage: torch.UntypedStorage, w: Weight) -> torch.Tensor:
    dtype = BY_NAME[w.dtype]
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, w.offset // dtype.itemsize, w.shape, w.strides)
