"""The file of a package: one ZIP archive with one right form, mapped, never unpacked.

Any zip tool opens it, but a zip tool does not make one: the file's bytes are a function of its members' names and
contents alone (and of zlib: another version may compress to other bytes). Members lie in the order of their names;
times, attributes and padding are fixed; ``manifest.json`` comes last::

    member    local header | its padding (an extra field) | contents, from a multiple of 64 (weights: of 4096)
    ...
    manifest.json          | the same                     | JSON: the caller's, and "entries", of all other members
    directory of all members | end record | "reflib sha256:" and the SHA-256 of manifest.json, in hex

Last, because where the others lie must not depend on a text that holds their digests: contents go to the file as
they come, each is hashed on its way, and the headers (which need the CRC) are filled in at the end.

**Every byte is covered.** Contents by the SHA-256 in the manifest; the manifest by that in the file's last bytes;
headers, padding and directory are not parsed but computed again from the manifest (``form``,
which the writer uses too) and compared. The few fields that are read before that are read to find the manifest, and
to say what is wrong with a file that some other tool wrote.

**Code is compressed, weights are not.** Code is copied anyway before it runs: to the driver, or to a file that the
system's loader maps. Unpacking what one GPU needs takes about a millisecond, and saves two bytes of three. Weights
are gigabytes that are used where they lie. Digests are of the bytes as they lie in the file, so damage is found before
anything is unpacked; the unpacked must have the size that the manifest says, which is limited.

**A package is code.** Loading one runs it. The digests inside find damage, not an attacker, who would write new ones:
open only files from people you trust, or say which file you mean (``sha256=``: any other is refused).

Weights are read through one private mapping of the file: processes share its pages, writing to a view changes neither
the file nor what others see. The file must not shrink while it is mapped: the system ends a process that reads pages
which are gone (SIGBUS). ``write`` never does that: it renames a new file into the old one's place.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .. import atomic
from ..errors import OptionError, PackageError
from .form import (
    COMMENT,
    DEFLATED,
    END,
    END64,
    LOCATOR,
    MANIFEST,
    MARK,
    RECORD,
    STORED,
    Entry,
    Place,
    dump,
    head,
    is_weights,
    layout,
    method,
    name_fault,
    parse,
    place_of,
    tail,
)  # fmt: skip

FORMAT = 2
MANIFEST_LIMIT = 64 << 20  # bytes: JSON costs many times its length in memory
CODE_LIMIT = 1 << 30  # bytes of one that is unpacked
LEVEL = 9  # of zlib
_PIECE = 16 << 20  # bytes hashed at a time: CRC and SHA read them from the cache

_COPY = "copy it again from where it was built, or build it again"
_BUILD = "build the package again"


@dataclass(frozen=True)
class Chunks:
    """A member's contents, piece by piece. ``make()`` yields buffers of ``size`` bytes together, anew at each call."""

    size: int
    make: Callable[[], Iterable[Any]]  # of whatever memoryview() takes

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


# -- write ------------------------------------------------------------------------------------------
def write(
    path: str | os.PathLike[str], manifest: Mapping[str, Any], members: Mapping[str, bytes | Chunks]
) -> Path:
    """Write a package and return its path. ``manifest``: any JSON; its "entries" are made here.

    The file appears whole or not at all, after a crash of the system too: what ``path`` was before stays until the new
    one is complete, and is left as it was, with nothing beside it, when writing fails. (A process that is killed leaves
    a ``.new-*`` file.) A link stays one: the file that it leads to is replaced.
    """
    path = as_path(path)
    for name in members:
        fault = "is taken" if name == MANIFEST else name_fault(name)
        if fault:
            raise PackageError(f"cannot write {path}: the member name {name!r} {fault}; choose another")
    manifest = {"format": FORMAT, **manifest, "entries": []}
    if manifest["format"] != FORMAT:
        raise PackageError(f"cannot write {path} in format {manifest['format']!r}: this is {FORMAT}; leave it out")
    _manifest_text(path, manifest)  # before gigabytes are written
    chunks = {name: c if isinstance(c, Chunks) else _whole(c) for name, c in members.items()}
    try:
        if path.exists() and not path.is_file():  # /dev/null, a pipe: there is no going back in one
            raise PackageError(f"cannot write {path}: it is there and no file; choose another path")
        with atomic.file(path, sync=True) as f:
            _fill(path, f, manifest, chunks)
    except (OSError, ValueError) as e:  # ValueError: a path with NUL in it
        reason = getattr(e, "strerror", None) or e
        raise PackageError(f"cannot write {path}: {reason}; choose a folder that is there and has room") from e
    return path


def _whole(contents: bytes) -> Chunks:
    return Chunks(memoryview(contents).nbytes, lambda: (contents,))


def as_path(path: Any) -> Path:
    """``path``, if it can be one. Raises PackageError."""
    try:
        return Path(path)
    except TypeError as e:
        raise PackageError(f"path={path!r:.80}: takes a str or a pathlib.Path, such as 'model.reflib'") from e


def _fill(path: Path, f: BinaryIO, manifest: dict[str, Any], chunks: Mapping[str, Chunks]) -> None:
    entries: list[Entry] = []
    start = 0
    for name in sorted(chunks):
        place = place_of(Entry(name, 0, chunks[name].size, "", 0), start)
        f.seek(place.data)
        entries.append(_pour(path, f, place.entry, chunks[name]))
        start = place.data + entries[-1].size
    text = _manifest_text(path, {**manifest, "entries": [vars(e) for e in entries]})
    places = layout([*entries, _manifest_entry(text)])
    for place in places:
        f.seek(place.start)
        f.write(head(place))
    f.seek(places[-1].data)
    f.write(text + tail(places))


def _pour(path: Path, f: BinaryIO, entry: Entry, chunks: Chunks) -> Entry:
    """Write one member's contents, compressed if it is code; hashed on their way."""
    name, sha, crc, size, unpacked = entry.name, hashlib.sha256(), 0, 0, 0
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS) if method(name) == DEFLATED else None
    if packer and entry.unpacked > CODE_LIMIT:
        raise PackageError(f"cannot write {path}: {name} has {entry.unpacked} bytes, code has at most {CODE_LIMIT}")

    def put(data: memoryview | bytes) -> None:
        nonlocal size
        f.write(data)
        sha.update(data)
        size += len(data)

    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        unpacked += len(view)
        if unpacked <= entry.unpacked:
            crc = zlib.crc32(view, crc)
            put(packer.compress(view) if packer else view)
    if packer:
        put(packer.flush())
    if unpacked != entry.unpacked:
        raise PackageError(f"cannot write {path}: {name} has {unpacked} bytes, {entry.unpacked} were announced")
    return Entry(name, size, unpacked, sha.hexdigest(), crc)


def _manifest_entry(text: bytes) -> Entry:
    return Entry(MANIFEST, len(text), len(text), hashlib.sha256(text).hexdigest(), zlib.crc32(text))


def _manifest_text(path: Path, manifest: dict[str, Any]) -> bytes:
    """The manifest as text that a reader will take."""
    try:
        text = dump(manifest)
        if dump(parse(text)) != text:
            raise ValueError("its keys must be strings")
        if len(text) > MANIFEST_LIMIT:
            raise ValueError(f"it has {len(text)} bytes, more than {MANIFEST_LIMIT}")
    except (ValueError, TypeError, RecursionError) as e:
        raise PackageError(f"cannot write {path}: the manifest cannot be JSON: {e}; put plain data into it") from e
    return text


# -- read -------------------------------------------------------------------------------------------
class Archive:
    """An open package. ``manifest`` is its dict, ``names`` those of the members beside it."""

    def __init__(self, path: Path, manifest: dict[str, Any], places: Sequence[Place], mapping: mmap.mmap):
        self.path = path
        self.manifest = manifest
        self.names = tuple(p.entry.name for p in places[:-1])
        self._places = {p.entry.name: p for p in places}
        self._mapping: mmap.mmap | None = mapping

    def view(self, name: str) -> memoryview:
        """A member's contents: weights as they lie in the mapping, where writing to them changes this process's copy
        alone; code unpacked, anew at each call. Raises PackageError for code that cannot be unpacked."""
        if self._mapping is None:
            raise PackageError(f"{self.path} was closed; open it again")
        if name not in self._places:
            raise PackageError(f"{self.path} has no member {name!r}; it has {', '.join(self.names) or 'none'}")
        place = self._places[name]
        found = memoryview(self._mapping)[place.data : place.end]
        return memoryview(_unpacked(self.path, found, place.entry)) if method(name) == DEFLATED else found

    def close(self) -> None:
        """Let go of the mapping. It lasts as long as a view of it does."""
        self._mapping = None


def open(path: str | os.PathLike[str], verify: bool | str = True, sha256: str | None = None) -> Archive:
    """Open a package, or raise PackageError: no other exception, whatever the file holds.

    verify: ``True`` hashes every member. ``"code"`` leaves out those whose name begins with "weights", which may be
        gigabytes; everything else (also where they lie, and how large they are) is checked all the same.
    sha256: the digest that the whole file must have, as ``sha256sum`` prints it.
    """
    if verify is not True and verify != "code":
        raise OptionError(f'verify={verify!r}: takes True (check everything) or "code" (all but the weights)')
    if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-fA-F]{64}", sha256)):
        raise OptionError(f"sha256={sha256!r}: takes the 64 hex digits that  sha256sum FILE  prints")
    path = as_path(path)
    data = _map(path)
    if sha256 is not None:
        _check_file(path, data, sha256.lower())
    end = _find_end(path, data)
    records = _read_directory(path, data, end)
    manifest, entry = _read_manifest(path, data, end, records[-1])
    _check_records(path, records)
    entries = _read_entries(path, manifest, len(data))
    _check_names(path, entries, records)
    places = layout([*entries, entry])
    _check_headers(path, data, end, places)
    for place in places[:-1]:
        if verify is True or not is_weights(place.entry.name):
            _check_contents(path, data, place)
    return Archive(path, manifest, places, data)


def _bad(path: Path, what: str, remedy: str = _COPY) -> PackageError:
    return PackageError(f"{path}: {what}; {remedy}")


def _map(path: Path) -> mmap.mmap:
    """The file, mapped. A private mapping: written pages are this process's own. (All might be, so Linux wants the
    file to fit into memory and swap, unless vm.overcommit_memory is 1.)"""
    try:
        info = path.stat()
        if stat.S_ISREG(info.st_mode) and info.st_size:  # opening a pipe would wait for its other end
            with path.open("rb") as f:
                return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as e:
        raise _bad(path, "there is no such file", "check the path") from e
    except (OSError, ValueError) as e:  # ValueError: a path with NUL in it; a file emptied since
        remedy = "check the path, its permissions, and that there is memory for the whole file"
        raise _bad(path, f"cannot be opened: {getattr(e, 'strerror', None) or e}", remedy) from e
    if stat.S_ISREG(info.st_mode):
        raise _bad(path, "the file is empty")
    kind = "a folder" if stat.S_ISDIR(info.st_mode) else "not a file"
    raise _bad(path, f"this is {kind}", "give the path of a package (model.reflib)")


def _check_file(path: Path, data: mmap.mmap, wanted: str) -> None:
    sha, _ = _digests(data, 0, len(data))
    if sha != wanted:
        remedy = "do not use it, unless you know where it comes from"
        raise _bad(path, f"this is not the file that was asked for: its SHA-256 is {sha}, not {wanted}", remedy)


@dataclass(frozen=True)
class _End:
    """Where the directory lies, as the end record says."""

    start: int
    size: int
    count: int


def _find_end(path: Path, data: mmap.mmap) -> _End:
    at = len(data) - END.size - COMMENT
    if at < 0 or data[at : at + 4] != b"PK\5\6" or data[at + END.size :][: len(MARK)] != MARK:
        raise _no_end(path, data)
    _, _, _, _, count, size, start, _ = END.unpack_from(data, at)
    long = at - LOCATOR.size - END64.size
    if long >= 0 and data[at - LOCATOR.size : at - LOCATOR.size + 4] == b"PK\6\7":
        count, size, start = END64.unpack_from(data, long)[-3:]
        at = long
    if start + size != at:
        if at - start - size > 0 and data[:4] != b"PK\3\4":
            raise _bad(path, f"{at - start - size} bytes lie before the package's first")
        raise _bad(path, "altered: the directory is not where the end record says; bytes were added, lost or changed")
    if not 1 <= count <= size // RECORD.size:
        raise _bad(path, f"altered: the end record says {count} members, the directory has {size} bytes")
    return _End(start, size, count)


def _no_end(path: Path, data: mmap.mmap) -> PackageError:
    """Why the file's last bytes are not a package's."""
    near = max(0, len(data) - (1 << 20))
    over = len(data) - data.rfind(MARK, near) - COMMENT
    if data.rfind(MARK, near) >= 0 and over > 0:
        return _bad(path, f"{over} bytes lie after the package's last")
    if data.rfind(b"PK\5\6", near) >= 0:
        return _bad(path, "a zip file, but no package (one that was unpacked is not a package when it is zipped again)")
    if data[:4] == b"PK\3\4":
        return _bad(path, "truncated: the file ends before the package does")
    return _bad(path, "not a package: not even a zip file", "give the path of a file that reflib.aot_compile wrote")


@dataclass(frozen=True)
class _Record:
    """What the directory says of a member, as far as it is read."""

    name: str
    flags: int
    method: int
    size: int
    mode: int


def _read_directory(path: Path, data: mmap.mmap, end: _End) -> list[_Record]:
    out = []
    at, stop = end.start, end.start + end.size
    for _ in range(end.count):
        if stop - at < RECORD.size or data[at : at + 4] != b"PK\1\2":
            raise _bad(path, "altered: the directory of its members is not readable")
        fields = RECORD.unpack_from(data, at)
        _, _, _, flags, method, _, _, _, _, size, name, extra, comment, _, _, attributes, _ = fields
        at += RECORD.size
        text = data[at : min(at + name, stop)].decode("latin-1")
        out.append(_Record(text, flags, method, size, attributes >> 16))
        at += name + extra + comment
    return out


def _read_manifest(path: Path, data: mmap.mmap, end: _End, record: _Record) -> tuple[dict[str, Any], Entry]:
    """The manifest, whose contents end where the directory starts. Its format is looked at before its form: a newer
    one may have another."""
    if record.name != MANIFEST:
        raise _bad(path, f"altered: the last member is {record.name[:80]!r}, not {MANIFEST}")
    _check_record(path, record)
    if record.size > MANIFEST_LIMIT:
        raise _bad(path, f"{MANIFEST} has {record.size} bytes, more than {MANIFEST_LIMIT}", _BUILD)
    if record.size > end.start:
        raise _bad(path, f"altered: {MANIFEST} is said to have {record.size} bytes, the file has fewer")
    text = data[end.start - record.size : end.start]
    entry = _manifest_entry(text)
    if MARK + entry.sha256.encode() != data[len(data) - COMMENT :]:
        raise _bad(path, f"{MANIFEST} is altered: its SHA-256 is not the one at the file's end")
    try:
        manifest = parse(text)
    except (ValueError, RecursionError) as e:
        what = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise _bad(path, f"{MANIFEST} cannot be read: {what}", _BUILD) from e
    if not isinstance(manifest, dict):
        raise _bad(path, f"{MANIFEST} is no JSON object", _BUILD)
    _check_format(path, manifest)
    try:
        again = dump(manifest)
    except (ValueError, RecursionError):  # a lone half of a surrogate pair
        again = b""
    if again != text:
        raise _bad(path, f"{MANIFEST} is not written as reflib writes it", _BUILD)
    return manifest, entry


def _check_format(path: Path, manifest: dict[str, Any]) -> None:
    format = manifest.get("format")
    if type(format) is not int or format < 1:
        raise _bad(path, f"{MANIFEST} says no format (a number from 1 on)", _BUILD)
    if format != FORMAT:
        versions = manifest.get("versions")
        version = str(versions.get("reflib", "not said") if isinstance(versions, dict) else "not said")[:40]
        age, remedy = ("a newer", "upgrade reflib") if format > FORMAT else ("an older", _BUILD)
        what = f"written by {age} reflib (version {version}) in format {format}, known here is {FORMAT}"
        raise _bad(path, what, remedy)


def _check_record(path: Path, r: _Record) -> None:
    """What other tools make of a package, said by name. (What they change else, ``_check_headers`` finds.)"""
    fault = name_fault(r.name)
    if fault:
        raise _bad(path, f"the member name {r.name[:80]!r} {fault}", _BUILD)
    if r.flags & 0x2041:  # encrypted, strongly, with its directory
        raise _bad(path, f"the member {r.name} is encrypted")
    if r.method != method(r.name):
        here = f"compressed by method {r.method}" if r.method else "not compressed"
        raise _bad(path, f"the member {r.name} is {here}; in a package it is by method {method(r.name)}")
    if stat.S_ISLNK(r.mode):
        raise _bad(path, f"the member {r.name} is a link", _BUILD)


def _check_records(path: Path, records: Sequence[_Record]) -> None:
    seen = set()
    for r in records:
        _check_record(path, r)
        if r.name in seen:
            raise _bad(path, f"the member {r.name} is there twice", _BUILD)
        seen.add(r.name)


def _read_entries(path: Path, manifest: dict[str, Any], length: int) -> list[Entry]:
    """The manifest's entries, each of the right types and no larger than the file."""
    rows = manifest.get("entries")
    if not isinstance(rows, list):
        raise _bad(path, f'{MANIFEST} has no list "entries"', _BUILD)
    out: list[Entry] = []
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != {"name", "size", "unpacked", "sha256", "crc32"}:
            raise _bad(path, f"{MANIFEST}, entry {i}: takes name, size, unpacked, sha256 and crc32", _BUILD)
        e = Entry(**row)
        fault = name_fault(e.name)
        if fault:
            raise _bad(path, f"{MANIFEST}, entry {i}: the name {str(e.name)[:80]!r} {fault}", _BUILD)
        if out and e.name <= out[-1].name:
            twice = "is there twice" if e.name == out[-1].name else "is out of order"
            raise _bad(path, f"{MANIFEST}, entry {i}: {e.name} {twice}", _BUILD)
        _check_sizes(path, e, length)
        if not isinstance(e.sha256, str) or not re.fullmatch("[0-9a-f]{64}", e.sha256):
            raise _bad(path, f"{e.name}: its sha256 is not 64 hex digits", _BUILD)
        if type(e.crc32) is not int or not 0 <= e.crc32 < 1 << 32:
            raise _bad(path, f"{e.name}: its crc32 is no number of 32 bits", _BUILD)
        out.append(e)
    return out


def _check_sizes(path: Path, e: Entry, length: int) -> None:
    for n in (e.size, e.unpacked):
        if type(n) is not int or n < 0:
            raise _bad(path, f"{e.name}: the size {str(n)[:40]} is no number of bytes", _BUILD)
    if e.size > length:
        raise _bad(path, f"{e.name} is said to have {e.size} bytes, the whole file has {length}")
    if method(e.name) == STORED and e.unpacked != e.size:
        raise _bad(path, f"{e.name}: {e.unpacked} bytes cannot lie in {e.size}, for they are not compressed", _BUILD)
    if method(e.name) == DEFLATED and e.unpacked > CODE_LIMIT:
        raise _bad(path, f"{e.name} is said to unpack to {e.unpacked} bytes; code has at most {CODE_LIMIT}", _BUILD)


def _check_names(path: Path, entries: Sequence[Entry], records: Sequence[_Record]) -> None:
    said, there = [e.name for e in entries], [r.name for r in records[:-1]]
    if said != there:
        for name in sorted(set(said) - set(there)):
            raise _bad(path, f"the member {name} is missing")
        for name in sorted(set(there) - set(said)):
            raise _bad(path, f"{MANIFEST} does not know the member {name}")
        raise _bad(path, "altered: the members are out of order")


def _check_headers(path: Path, data: mmap.mmap, end: _End, places: Sequence[Place]) -> None:
    """All that is not contents, byte for byte. The sizes add up to the file's before anything is made from them."""
    if places[-1].end != end.start:
        raise _bad(path, f"altered: the members' sizes make {places[-1].end} bytes, there are {end.start}")
    if tail(places) != data[end.start :]:
        raise _bad(path, "altered: the directory or the end record is not what the manifest says")
    for place in places:
        if head(place) != data[place.start : place.data]:
            raise _bad(path, f"altered: the header or the padding of {place.entry.name} is not what the manifest says")


def _check_contents(path: Path, data: mmap.mmap, place: Place) -> None:
    e = place.entry
    sha, crc = _digests(data, place.data, place.end)
    if sha != e.sha256 or (method(e.name) == STORED and crc != e.crc32):
        raise _bad(path, f"the member {e.name} is altered: its SHA-256 or CRC is not what the manifest says")


def _digests(data: mmap.mmap, start: int, stop: int) -> tuple[str, int]:
    sha, crc = hashlib.sha256(), 0
    with memoryview(data) as whole:
        for at in range(start, stop, _PIECE):
            with whole[at : min(at + _PIECE, stop)] as piece:
                sha.update(piece)
                crc = zlib.crc32(piece, crc)
    return sha.hexdigest(), crc


def _unpacked(path: Path, data: memoryview, e: Entry) -> bytes:
    """The contents of compressed bytes. Never makes more than they should be, whatever the bytes say."""
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        out = unpacker.decompress(data, e.unpacked + 1)
    except zlib.error as error:
        raise _bad(path, f"the member {e.name} cannot be unpacked: {error}", _BUILD) from error
    if not unpacker.eof or unpacker.unused_data or len(out) != e.unpacked or zlib.crc32(out) != e.crc32:
        raise _bad(path, f"the member {e.name} unpacks to other contents than the manifest says", _BUILD)
    return out
