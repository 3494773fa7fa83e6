"""Weights: one member of a package, in the safetensors format, mapped and never read.

The format is a length (8 bytes, little-endian), a JSON header, and the tensors' bytes without holes::

    {"layer.weight": {"dtype": "F32", "shape": [64, 10], "data_offsets": [0, 2560]}, ...}

It knows contiguous tensors only. What else a model's weights are is said by *rows* in the package's manifest, one for
each tensor::

    name, dtype ("float32"), shape, strides     the tensor
    key                                         the name in the header that its bytes are under
    offset                                      where in them it begins, in bytes

Tensors that share a storage share a key: tied weights, and views of one buffer, are stored once and are views of one
storage again. Under a key lies the span of memory that its tensors cover: as the shape it has, if one of them is
contiguous and covers it all, else as one dimension. Bytes of a span that belong to none of its tensors are stored as
zeros, for they may be anything. So the bytes depend on the tensors' values alone, and the whole header on the rows:
``_layout`` makes it, for the writer to write and for the reader to compare. Nothing of it is parsed.

Kernels want data at multiples of 64 bytes, the format wants no holes. The header is padded with spaces, and the larger
the power of two (up to 64) that divides a span's size, the earlier it comes: all whose size is a multiple of 64 lie at
one. The few others are copied when they are loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..errors import PackageError
from .archive import Chunks

ALIGN = 64
PIECE = 4 << 20  # bytes that are copied at a time
HEADER_LIMIT = 100_000_000  # bytes: safetensors' own
_DIMENSIONS = 64  # torch's own kernels stop there

DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",  # two numbers in one of torch's elements
}  # fmt: skip
_BY_NAME = {str(d).removeprefix("torch."): d for d in DTYPES}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # to move bits, whatever they mean


@dataclass(frozen=True)
class _Row:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    key: str
    offset: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The byte after its last, in the span."""
        if not self.count:
            return self.offset
        return self.offset + (1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))) * self.dtype.itemsize


# -- what lies where, from the rows alone -----------------------------------------------------------
@dataclass(frozen=True)
class _Span:
    """What lies under one key: ``size`` bytes from ``start`` of the member, and whose they are."""

    rows: tuple[_Row, ...]
    start: int
    size: int


def _layout(rows: Sequence[_Row]) -> tuple[bytes, list[_Span]]:
    """The safetensors header, and all spans in the order of their bytes."""
    by_key: dict[str, list[_Row]] = {}
    for r in sorted(rows, key=lambda r: r.name):
        by_key.setdefault(r.key, []).append(r)
    sizes = {key: max(r.end for r in group) for key, group in by_key.items()}
    order = sorted(by_key, key=lambda key: (-math.gcd(sizes[key], ALIGN), key))
    described, starts, at = {}, {}, 0
    for key in order:
        dtype, shape = _stored(by_key[key], sizes[key])
        described[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + sizes[key]]}
        starts[key] = at
        at += sizes[key]
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    header = len(text).to_bytes(8, "little") + text
    return header, [_Span(tuple(by_key[key]), len(header) + starts[key], sizes[key]) for key in order]


def _chosen(group: Sequence[_Row], size: int) -> _Row:
    """The row whose name is the key: the first that covers the span, contiguous; else the first."""
    whole = (r for r in group if r.offset == 0 and r.end == size and _is_contiguous(r))
    return next(whole, group[0])


def _stored(group: Sequence[_Row], size: int) -> tuple[str, list[int]]:
    """A span's dtype and shape in the header."""
    r = _chosen(group, size)
    if r.offset == 0 and r.end == size and _is_contiguous(r):
        shape = list(r.shape)
    elif size % r.dtype.itemsize == 0:
        shape = [size // r.dtype.itemsize]
    else:
        return "U8", [size]
    if r.dtype == torch.float4_e2m1fn_x2:
        shape = [*shape[:-1], 2 * shape[-1]] if shape else [2]
    return DTYPES[r.dtype], shape


def _is_contiguous(r: _Row) -> bool:
    want = 1
    for n, s in reversed([*zip(r.shape, r.strides)]):
        if n != 1 and s != want:
            return r.count == 0
        want *= n
    return True


def _is_dense(r: _Row) -> bool:
    """Do its elements fill what it spans, in whatever order?"""
    want = 1
    for s, n in sorted((s, n) for n, s in zip(r.shape, r.strides) if n != 1):
        if s != want:
            return False
        want *= n
    return True


def _is_covered(span: _Span) -> bool:
    """Does every byte surely belong to a tensor?"""
    covered = 0
    for r in sorted(span.rows, key=lambda r: r.offset):
        if r.offset <= covered and _is_dense(r):
            covered = max(covered, r.end)
    return covered >= span.size


# -- write ------------------------------------------------------------------------------------------
def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[Chunks, list[dict[str, Any]]]:
    """The member's contents, and the manifest's rows for them. Tensors are copied from where they are piece by piece,
    when the contents are asked for: they must stay as they are until then. (A span that its tensors do not fill is
    put together in memory first, as a whole.)"""
    plain = {name: _plain(name, tensors[name]) for name in sorted(tensors)}
    groups: dict[Any, list[str]] = {}
    for name, t in plain.items():
        storage = t.untyped_storage()
        alone = not t.numel()
        groups.setdefault(name if alone else (t.device, storage.data_ptr(), storage.nbytes()), []).append(name)
    rows: list[_Row] = []
    begins: dict[str, int] = {}  # of each key's span, in its storage
    for names in groups.values():
        begin = _begin([plain[n] for n in names])
        group = [_row(n, plain[n], begin) for n in names]
        key = _chosen(group, max(r.end for r in group)).name
        begins[key] = begin
        rows += [replace(r, key=key) for r in group]
    out = [{**asdict(r), "dtype": str(r.dtype).removeprefix("torch.")} for r in sorted(rows, key=lambda r: r.name)]
    out = [{**r, "shape": list(r["shape"]), "strides": list(r["strides"])} for r in out]
    header, spans = _layout(_checked(out))  # what cannot be read is not written
    if len(header) - 8 > HEADER_LIMIT:
        raise PackageError(f"the weights' header has {len(header)} bytes, more than {HEADER_LIMIT}: use shorter names")

    def make() -> Iterator[Any]:
        yield header
        for span in spans:
            yield from _pieces(span, plain, begins[span.rows[0].key])

    return Chunks(len(header) + sum(s.size for s in spans), make), out


def _plain(name: str, t: torch.Tensor) -> torch.Tensor:
    """``t``, if its memory is what it is made of."""
    if t.dtype not in DTYPES:
        raise PackageError(f"the weight {name!r} is {t.dtype}, which safetensors has no name for; convert it")
    wrapped = type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wrapped or t.layout != torch.strided or t.device.type == "meta" or t.is_nested:
        what = f"{type(t).__name__}, {t.layout}, {t.device}"
        raise PackageError(f"the weight {name!r} ({what}) has no memory of its own; make it a plain, dense tensor")
    return t.detach().resolve_conj().resolve_neg()


def _begin(group: Sequence[torch.Tensor]) -> int:
    """Where in their storage the span of these tensors begins. If they begin at different places, at a multiple of
    64, so that each stays as well aligned as it was."""
    begins = {_offset(t) for t in group}
    return min(begins) if len(begins) == 1 else min(begins) // ALIGN * ALIGN


def _offset(t: torch.Tensor) -> int:
    return t.storage_offset() * t.itemsize if t.numel() else 0


def _row(name: str, t: torch.Tensor, begin: int) -> _Row:
    return _Row(name, t.dtype, tuple(t.shape), tuple(t.stride()), name, _offset(t) - begin)


def _pieces(span: _Span, tensors: Mapping[str, torch.Tensor], begin: int) -> Iterator[memoryview]:
    if not span.size:
        return
    storage = tensors[span.rows[0].name].untyped_storage()
    if not _is_covered(span):
        storage, begin = _gathered(span, tensors), 0
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (span.size,), (1,))
    for at in range(0, span.size, PIECE):
        yield memoryview(flat[at : at + PIECE].cpu().numpy())


def _gathered(span: _Span, tensors: Mapping[str, torch.Tensor]) -> torch.UntypedStorage:
    """A storage with the span's tensors in it, and zeros between."""
    storage = torch.zeros(span.size, dtype=torch.uint8).untyped_storage()
    for r in span.rows:
        t, word = tensors[r.name], _WORDS[r.dtype.itemsize]
        source = torch.empty(0, dtype=word, device=t.device)
        source = source.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
        target = torch.empty(0, dtype=word, device="cpu")
        target = target.set_(storage, r.offset // r.dtype.itemsize, r.shape, r.strides)
        for d, stride in enumerate(r.strides):
            if stride == 0:  # an expanded dimension: one element, copied once
                source, target = source.narrow(d, 0, 1), target.narrow(d, 0, 1)
        target.copy_(source)
    return storage


# -- read -------------------------------------------------------------------------------------------
def mapped(view: memoryview, rows: Any) -> dict[str, torch.Tensor]:
    """The tensors, on the CPU. They lie in ``view`` (a package's ``view("weights.safetensors")``: writing to them
    changes this process's copy alone), but for spans that are not aligned to 64 bytes, which are copied.

    Raises PackageError if ``rows`` are not a package's, or if ``view`` is not what they describe.
    """
    header, spans = _layout(_checked(rows))
    size = len(header) + sum(s.size for s in spans)
    if size != view.nbytes:
        raise PackageError(f"the weights have {view.nbytes} bytes, the manifest says {size}; build the package again")
    if view[: len(header)] != header:
        raise PackageError("the weights' header is not what the manifest describes; build the package again")
    if view.readonly:  # tensors can be written to
        view = memoryview(bytearray(view))
    out = {}
    for span in spans:
        if span.rows[0].key != _chosen(span.rows, span.size).name:
            raise PackageError(f"the weights' key {span.rows[0].key!r} is not the right one; build the package again")
        storage = _storage(view, span)
        for r in span.rows:
            out[r.name] = _tensor(storage, r)
    return {name: out[name] for name in sorted(out)}


def _storage(view: memoryview, span: _Span) -> torch.UntypedStorage:
    if not span.size:  # which frombuffer refuses
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    flat = torch.frombuffer(view, dtype=torch.uint8, count=span.size, offset=span.start)
    return (flat if flat.data_ptr() % ALIGN == 0 else flat.clone()).untyped_storage()


def _tensor(storage: torch.UntypedStorage, r: _Row) -> torch.Tensor:
    try:
        empty = torch.empty(0, dtype=r.dtype, device="cpu")
        return empty.set_(storage, r.offset // r.dtype.itemsize, r.shape, r.strides)
    except (RuntimeError, OverflowError, TypeError) as e:
        raise PackageError(f"the weight {r.name!r} cannot be made: {e}; build the package again") from e


def _checked(rows: Any) -> list[_Row]:
    """The manifest's rows, each of the right types, and small enough that torch's own sums do not overflow. Whether
    they lie in the file, the sizes tell: they must add up to it."""
    if not isinstance(rows, (list, tuple)):
        raise PackageError("the manifest's rows of weights are no list; build the package again")
    out = []
    names = set()
    for i, row in enumerate(rows):
        fault = _fault(row)
        if fault is None and row["name"] in names:
            fault = f"the name {row['name'][:80]!r} is there twice"
        if fault is not None:
            raise PackageError(f"the manifest's rows of weights, row {i}: {fault}; build the package again")
        names.add(row["name"])
        shape, strides = tuple(row["shape"]), tuple(row["strides"])
        out.append(_Row(row["name"], _BY_NAME[row["dtype"]], shape, strides, row["key"], row["offset"]))
    return out


def _fault(row: Any) -> str | None:
    if not isinstance(row, dict) or row.keys() != {"name", "dtype", "shape", "strides", "key", "offset"}:
        return "takes name, dtype, shape, strides, key and offset"
    for what in ("name", "key"):
        if not _is_name(row[what]):
            return f"the {what} {str(row[what])[:80]!r} is no text, or one that safetensors keeps for itself"
    if not isinstance(row["dtype"], str) or row["dtype"] not in _BY_NAME:
        return f"the dtype {str(row['dtype'])[:80]!r} is not known here (one of {', '.join(_BY_NAME)})"
    for what in ("shape", "strides"):
        v = row[what]
        if not isinstance(v, (list, tuple)) or len(v) > _DIMENSIONS or not all(_is_small(n) for n in v):
            return f"{what} are not up to {_DIMENSIONS} numbers from 0 to 2**63 - 1"
    if len(row["shape"]) != len(row["strides"]):
        return "shape and strides are not of one length"
    if math.prod(max(n, 1) for n in row["shape"]) >= 1 << 63:
        return "the shape has 2**63 elements or more"
    if not _is_small(row["offset"]) or row["offset"] % _BY_NAME[row["dtype"]].itemsize:
        return "the offset is no multiple of the dtype's size"
    return None


def _is_small(n: Any) -> bool:
    return type(n) is int and 0 <= n < 1 << 63


def _is_name(name: Any) -> bool:
    if not isinstance(name, str) or name == "__metadata__":
        return False
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True
