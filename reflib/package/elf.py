"""Is it a shared library that the system's loader can map? It maps first and looks later: what a header promises and
the file does not have ends the process (SIGBUS, SIGSEGV), with no error to catch.

Looked at here is what the loader goes by: the file's header, the table of segments, and that every segment lies within
the bytes. What is in the segments is code, and believed.
"""

from __future__ import annotations

import platform
import struct

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_LOAD, _DYNAMIC = 1, 2
_LIBRARY = 3  # ET_DYN
_MACHINES = {"x86_64": 62, "aarch64": 183}
_ADDRESSES = 1 << 47
_PAGE = 4096


def fault(data: memoryview) -> str | None:
    """Why ``data`` is no 64-bit library for this machine's processor, or None."""
    if len(data) < _HEADER.size or bytes(data[:4]) != b"\x7fELF":
        return "is no shared library"
    ident, kind, machine, version, _, table, _, _, size, entry, count, *_ = _HEADER.unpack_from(data)
    if ident[4:7] != b"\2\1\1" or version != 1 or size != _HEADER.size:
        return "is no 64-bit library"
    wanted = _MACHINES.get(platform.machine(), machine)
    if kind != _LIBRARY or machine != wanted:
        return f"is no shared library for {platform.machine()}"
    if table != _HEADER.size or entry != _SEGMENT.size or not count or table + count * entry > len(data):
        return "has no whole table of segments"
    return _segments_fault([_SEGMENT.unpack_from(data, table + i * entry) for i in range(count)], len(data))


def _segments_fault(segments: list[tuple[int, ...]], length: int) -> str | None:
    end, loads = -1, []
    for kind, _, offset, address, _, in_file, in_memory, align in segments:
        if offset + in_file > length and in_file:
            return f"is truncated: a segment ends at {offset + in_file}, the file at {length}"
        if address + in_memory > _ADDRESSES:
            return "has a segment at no possible address"
        if kind == _LOAD:
            if in_file > in_memory or align & (align - 1) or (offset - address) % max(align, _PAGE) or address < end:
                return "has segments that cannot be mapped"
            end = address + in_memory
            loads.append((offset, address, in_file))
    dynamic = [s for s in segments if s[0] == _DYNAMIC]
    if not loads or len(dynamic) != 1:
        return "has no segments that can be linked"
    _, _, offset, address, _, in_file, *_ = dynamic[0]
    within = any(o <= offset and offset + in_file <= o + n and offset - o == address - a for o, a, n in loads)
    return None if within and in_file else "has no segments that can be linked"
