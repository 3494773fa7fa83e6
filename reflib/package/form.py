"""The one right form of a package: where each member of the ZIP lies, what its headers say, the manifest's text.

Functions of names, sizes and digests alone. The writer writes what they give; the reader does not parse what a file has
there but compares it, so nothing in it can be otherwise. (See ``archive``.)
"""

from __future__ import annotations

import json
import math
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

MANIFEST = "manifest.json"
NAME_LIMIT = 1000
MARK = b"reflib sha256:"
COMMENT = len(MARK) + 64
ALIGN, ALIGN_WEIGHTS = 64, 4096  # a cache line, a page
ZIP64, ZIP64_MEMBERS = 0xFFFFFFFF, 0xFFFF  # from here on a number needs the format's longer form
_LONG, _LONG_MEMBERS = 0xFFFFFFFF, 0xFFFF  # what the short form says then
STORED, DEFLATED = 0, 8  # methods of compression, by the format's numbers

# PKWARE's APPNOTE, 4.3: local header, directory record, end record, and the long end record with its locator
_LOCAL = struct.Struct("<4s5H3L2H")
RECORD = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
_1980 = 0x0021  # 1980-01-01, the first day that the format knows
_MADE = 3 << 8 | 45  # on Unix, by version 4.5 of the format: attributes are a Unix mode
_MODE = (stat.S_IFREG | 0o644) << 16
_PADDING = 0xD935  # "ZIP alignment", as Android's zipalign writes it


@dataclass(frozen=True)
class Entry:
    """What the manifest's "entries" say of a member.

    size, sha256: of the bytes that lie in the file for it. unpacked, crc32: of its contents.
    """

    name: str
    size: int
    unpacked: int
    sha256: str
    crc32: int


# -- where everything lies --------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    entry: Entry
    start: int  # of the local header
    data: int  # of the contents

    @property
    def end(self) -> int:
        return self.data + self.entry.size


def layout(entries: Sequence[Entry]) -> list[Place]:
    """Where each member lies, one after another. Depends on names and sizes alone."""
    places: list[Place] = []
    for e in entries:
        places.append(place_of(e, places[-1].end if places else 0))
    return places


def place_of(e: Entry, start: int) -> Place:
    """Where a member lies whose header starts at ``start``."""
    least = start + _LOCAL.size + len(e.name.encode()) + len(_long_sizes(e)) + 6  # 6: padding of no bytes
    return Place(e, start, least + -least % _align(e))


def head(place: Place) -> bytes:
    """The local header of one member, and its padding: what lies before its contents."""
    e, name, long = place.entry, place.entry.name.encode(), _long_sizes(place.entry)
    padding = place.data - place.start - _LOCAL.size - len(name) - len(long)
    extra = long + struct.pack("<3H", _PADDING, padding - 4, _align(e)) + bytes(padding - 6)
    sizes = (_LONG, _LONG) if long else (e.size, e.unpacked)
    fields = (b"PK\3\4", _needed(e, long), 0, method(e.name), 0, _1980, e.crc32, *sizes, len(name), len(extra))
    return _LOCAL.pack(*fields) + name + extra


def tail(places: Sequence[Place]) -> bytes:
    """All that follows the last contents, which are the manifest's: directory, end record, the manifest's digest."""
    directory = b"".join(_record(p) for p in places)
    start, size, count = places[-1].end, len(directory), len(places)
    long = b""
    if start >= ZIP64 or size >= ZIP64 or count >= ZIP64_MEMBERS:
        long = END64.pack(b"PK\6\6", END64.size - 12, _MADE, 45, 0, 0, count, count, size, start)
        long += LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    n = _LONG_MEMBERS if count >= ZIP64_MEMBERS else count
    end = END.pack(b"PK\5\6", 0, 0, n, n, _short(size), _short(start), COMMENT)
    return directory + long + end + MARK + places[-1].entry.sha256.encode()


def _record(place: Place) -> bytes:
    """A member's record in the directory."""
    e, name = place.entry, place.entry.name.encode()
    long = b"".join(struct.pack("<Q", n) for n in (e.unpacked, e.size, place.start) if n >= ZIP64)
    extra = struct.pack("<2H", 1, len(long)) + long if long else b""
    sizes = (_short(e.size), _short(e.unpacked), len(name), len(extra), 0, 0, 0)
    start = (_MODE, _short(place.start))
    fields = (b"PK\1\2", _MADE, _needed(e, long), 0, method(e.name), 0, _1980, e.crc32, *sizes, *start)
    return RECORD.pack(*fields) + name + extra


def _long_sizes(e: Entry) -> bytes:
    """A local header's extra field for a size of 4 GiB or more. (What is compressed is never that large.)"""
    return struct.pack("<2H2Q", 1, 16, e.unpacked, e.size) if e.unpacked >= ZIP64 else b""


def _needed(e: Entry, long: bytes) -> int:
    """The version of the format that a tool must know: 45 for long sizes, 20 to unpack."""
    return 45 if long else 20 if method(e.name) == DEFLATED else 10


def method(name: str) -> int:
    """How a member lies in the file: as it is (0), or compressed (8: deflate, RFC 1951)."""
    return STORED if is_weights(name) or name == MANIFEST else DEFLATED


def _short(n: int) -> int:
    return _LONG if n >= ZIP64 else n


def _align(e: Entry) -> int:
    return ALIGN_WEIGHTS if is_weights(e.name) else ALIGN


def is_weights(name: str) -> bool:
    """Contents that ``verify="code"`` does not hash."""
    return name.startswith("weights")


def name_fault(name: Any) -> str | None:
    """Why a member must not have this name, or None. No tool that unpacks the file may write elsewhere."""
    if not isinstance(name, str) or not name:
        return "is empty or no text"
    if len(name) > NAME_LIMIT:
        return f"is longer than {NAME_LIMIT} characters"
    if not all(" " <= c <= "~" for c in name):
        return "has characters other than printable ASCII"
    if name.startswith("/"):
        return "is an absolute path"
    if "\\" in name or ":" in name:
        return "has a backslash or a colon (Windows reads a path or a drive)"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return 'has an empty part, "." or ".."'
    return None


# -- the manifest's text ----------------------------------------------------------------------------
def dump(manifest: Mapping[str, Any]) -> bytes:
    """The manifest's one right text. Raises ValueError, TypeError or RecursionError for what JSON cannot hold."""
    return json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False).encode()


def parse(data: bytes) -> Any:
    """``dump`` reversed. Raises ValueError or RecursionError."""
    return json.loads(
        data.decode(), object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_constant
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [k for k, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)[:80]!r} is there twice")
    return out


def _int(text: str) -> int:
    if len(text) > 20:  # 64 bits
        raise ValueError(f"the number {text[:20]}... is too large")
    return int(text)


def _float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return float(text)


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
