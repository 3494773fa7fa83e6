"""The file of a package: a ZIP archive that ``zipfile`` writes, mapped into memory when it is read.

    member          contents at a multiple of 64 bytes (weights: 4096), in the order of the names
    ...
    manifest.json   JSON: the caller's, and "entries": name, offset, size, unpacked and sha256 of each other member
    directory       with the comment "reflib sha256:" and the SHA-256 of manifest.json, in hex

**Reproducible.** The bytes are a function of the members' names and contents (and of zlib: another version may compress
differently): order, times, attributes and padding are fixed.

**Digests cover exactly the bytes that are used.** The reader finds the manifest through ``zipfile`` and checks it
against the digest in the comment. All other contents are the ranges of the file that the manifest names, each with its
own digest. Headers and directory serve zip tools only. What has the right digest is what ``write`` wrote, and is not
checked further.

**Code is compressed, weights are not.** Code is copied anyway before it runs: to the driver, or to an anonymous file
that the system's loader maps. Unpacking the code for one GPU takes about a millisecond and saves two thirds of its
bytes. Weights are gigabytes that are used in place. Digests are those of the bytes in the file, so damage is found
before anything is unpacked.

**A package is code.** Loading one runs it. Digests find damage, not an attacker, who would write new ones: open only
files from people you trust, or name the file's digest (``sha256=``: any other file is refused).

Weights are read through a private mapping: processes share its pages, and writing to a view changes neither the file
nor another process. The file must not shrink while it is mapped: the system ends a process that reads missing pages
(SIGBUS). ``write`` never shrinks a file: it renames a new one into place. Writing into the file itself
changes mapped weights, but never code: its digest is checked on the copy that is unpacked. With ``sha256=`` nothing is
mapped: the file is read once, and what was hashed is what is used.

**A small file costs little**, whatever is in it: the manifest's length and number of values are limited, members must
not overlap, and their contents must not unpack to more than they say, nor to more than ``CODE`` in total.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from .. import atomic
from ..errors import OptionError, PackageError

FORMAT = 4
MANIFEST = "manifest.json"
ALIGN, ALIGN_WEIGHTS = 64, 4096  # a cache line, a page
MARK = b"reflib sha256:"
NAME = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)  # no "..", nothing absolute: unpacking stays in its folder
_PADDING = 0xD935  # an extra field of ZIP: "alignment", as Android's zipalign writes it
_PIECE = 16 << 20  # bytes hashed at a time
TEXT, VALUES = 64 << 20, 2_000_000  # the largest manifest: bytes, and values in it (50,000 weights have 800,000)
CODE = 1 << 30  # bytes of all members but weights, unpacked

_COPY = "copy it again from where it was built, or build it again"
_BUILD = "build the package again"


@dataclass(frozen=True)
class Chunks:
    """A member's contents in pieces. ``make()`` yields buffers of ``size`` bytes in total, and can be called again."""

    size: int
    make: Callable[[], Iterable[Any]]  # of whatever memoryview() takes

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


@dataclass(frozen=True)
class Entry:
    """A member: ``size`` bytes of the file from ``offset`` on, and their digest. ``unpacked``: size of its contents."""

    name: str
    offset: int
    size: int
    unpacked: int
    sha256: str


_ENTRY = {f.name: f.type for f in fields(Entry)}


def is_weights(name: str) -> bool:
    """Is the member stored as it is, and left unchecked by ``verify="code"``?"""
    return name.startswith("weights")


def dump(manifest: Mapping[str, Any]) -> bytes:
    """The manifest's text. Raises ValueError or TypeError for what JSON cannot hold."""
    return json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False).encode()


# -- write ------------------------------------------------------------------------------------------
class Replaced(PackageError):
    """Another file is there meanwhile, which is kept."""


Stamp = tuple[int, int, int, int]


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """Which file is there, and when it was written to; None: there is none."""
    try:
        s = os.stat(path)
    except OSError:
        return None
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns


def write(
    path: str | os.PathLike[str], manifest: Mapping[str, Any], members: Mapping[str, bytes | Chunks],
    instead_of: Stamp | None = None,
) -> Path:  # fmt: skip
    """Write a package and return its path. ``manifest``: any JSON; "format" and "entries" are added here.
    ``instead_of``: raise Replaced if another file than this one is there, of whatever process.

    The file appears whole or not at all, also after a crash of the system. When writing fails, the old file is kept and
    nothing is left beside it. (A killed process may leave a ``.new-*`` file.) A link stays one: its target is replaced.
    """
    path = as_path(path)
    chunks = {name: c if isinstance(c, Chunks) else _whole(c) for name, c in members.items()}
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal cannot be replaced
            raise PackageError(f"cannot write {path}: it exists and is no file; choose another path")
        with atomic.file(path, sync=True) as f:
            _fill(f, {**manifest, "format": FORMAT}, chunks)
            if instead_of is not None and stamp(path) not in (None, instead_of):
                raise Replaced(f"{path} was written anew, and is kept")
    except (OSError, ValueError) as e:  # ValueError: a path with NUL in it
        reason = getattr(e, "strerror", None) or e
        raise PackageError(f"cannot write {path}: {reason}; choose an existing folder with room") from e
    return path


def _whole(contents: bytes) -> Chunks:
    return Chunks(memoryview(contents).nbytes, lambda: (contents,))


def as_path(path: Any) -> Path:
    """``path`` as a Path. Raises PackageError."""
    try:
        return Path(path)
    except TypeError as e:
        raise PackageError(f"path={path!r:.80}: takes a str or a pathlib.Path, such as 'model.reflib'") from e


class _Hashing:
    """A file for ``zipfile`` to write to, which hashes what is written from ``start`` on: contents, not headers."""

    def __init__(self, f: BinaryIO):
        self.f, self.seek, self.tell, self.flush = f, f.seek, f.tell, f.flush
        self.start, self.sha = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        if self.tell() >= self.start:
            self.sha.update(data)
        return self.f.write(data)


def _fill(f: BinaryIO, manifest: dict[str, Any], chunks: Mapping[str, Chunks]) -> None:
    out = _Hashing(f)
    with zipfile.ZipFile(out, "w") as z:  # type: ignore[call-overload]
        entries = [_member(z, out, name, chunks[name]) for name in sorted(chunks)]
        text = dump({**manifest, "entries": [asdict(e) for e in entries]})
        z.writestr(_info(MANIFEST, len(text)), text)
        z.comment = MARK + hashlib.sha256(text).hexdigest().encode()


def _info(name: str, size: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)  # of 1980-01-01, the first day of the format
    info.create_system, info.external_attr = 3, (stat.S_IFREG | 0o644) << 16
    info.compress_type = zipfile.ZIP_STORED if is_weights(name) or name == MANIFEST else zipfile.ZIP_DEFLATED
    info.file_size = size
    return info


def _member(z: zipfile.ZipFile, out: _Hashing, name: str, chunks: Chunks) -> Entry:
    """Write one member, its contents aligned."""
    info = _info(name, chunks.size)
    long = 20 if chunks.size * 1.05 > zipfile.ZIP64_LIMIT else 0  # zipfile's own rule for sizes of 64 bits
    header = 30 + len(name) + long + 4  # fixed fields, name, extra fields without the padding
    padding = -(out.tell() + header) % (ALIGN_WEIGHTS if is_weights(name) else ALIGN)
    info.extra = struct.pack("<2H", _PADDING, padding) + bytes(padding)
    out.start, out.sha = out.tell() + header + padding, hashlib.sha256()
    with z.open(info, "w") as member:
        for chunk in chunks:
            member.write(chunk)
    return Entry(name, out.start, info.compress_size, info.file_size, out.sha.hexdigest())


# -- read -------------------------------------------------------------------------------------------
class Archive:
    """An open package. ``manifest``: its dict. ``entries``: of the other members, by name. ``names``: theirs."""

    def __init__(self, path: Path, manifest: dict[str, Any], mapping: mmap.mmap):
        self.path, self.manifest = path, manifest
        self.entries = {row["name"]: Entry(**row) for row in manifest["entries"]}
        self.names = tuple(self.entries)
        self._mapping: mmap.mmap | None = mapping

    def view(self, name: str) -> memoryview:
        """A member's contents. Weights: the mapping itself; writing to it changes this process's copy only. Code: newly
        unpacked at each call."""
        if self._mapping is None:
            raise PackageError(f"{self.path} was closed; open it again")
        if name not in self.entries:
            raise PackageError(f"{self.path} has no member {name!r}; it has {', '.join(self.names) or 'none'}")
        e = self.entries[name]
        found = memoryview(self._mapping)[e.offset : e.offset + e.size]
        return found if is_weights(name) else memoryview(self._unpacked(e, bytes(found)))

    def _unpacked(self, e: Entry, packed: bytes) -> bytes:
        """``packed`` is a copy: it cannot change between the check and the use."""
        if hashlib.sha256(packed).hexdigest() != e.sha256:
            raise _altered(self.path, e)
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, e.unpacked + 1)
        except zlib.error as error:
            raise _bad(self.path, f"the member {e.name} cannot be unpacked ({error})", _BUILD) from error
        if len(data) != e.unpacked:
            raise _bad(self.path, f"the member {e.name} does not unpack to the {e.unpacked} bytes it should", _BUILD)
        return data

    def close(self) -> None:
        """Release the mapping, which lasts as long as a view of it does."""
        self._mapping = None


def open(path: str | os.PathLike[str], verify: bool | str = True, sha256: str | None = None) -> Archive:
    """Open a package. Raises PackageError and nothing else, whatever the file holds.

    verify: ``True`` checks the digest of every member. ``"code"`` skips members whose name begins with "weights", which
        may be gigabytes.
    sha256: the digest that the whole file must have, as ``sha256sum`` prints it.
    """
    if verify is not True and verify != "code":
        raise OptionError(f'verify={verify!r:.200}: takes True (check everything) or "code" (all but the weights)')
    if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-fA-F]{64}", sha256)):
        raise OptionError(f"sha256={sha256!r:.200}: takes the 64 hex digits that  sha256sum FILE  prints")
    path = as_path(path)
    data = _contents(path, whole=sha256 is not None)
    if sha256 is not None and (whole := _digest(data, 0, len(data))) != sha256.lower():
        remedy = "do not use it, unless you know where it comes from"
        raise _bad(path, f"this is not the requested file: its SHA-256 is {whole}, not {sha256.lower()}", remedy)
    found = Archive(path, _read_manifest(path, _manifest_text(path, data)), data)
    _check_entries(path, found, len(data))
    for e in found.entries.values():
        if (verify is True or not is_weights(e.name)) and _digest(data, e.offset, e.size) != e.sha256:
            raise _altered(path, e)
    return found


def _check_entries(path: Path, file: Archive, size: int) -> None:
    """Raises PackageError for members with other names than a package has, outside of the file, or too large."""
    of_file = of_code = 0
    for e in file.entries.values():
        if not is_member(e.name):
            raise _bad(path, f"the member name {e.name!r:.80} is no plain relative path", _BUILD)
        of_file += e.size
        of_code += 0 if is_weights(e.name) else e.unpacked
        if min(e.offset, e.size, e.unpacked) < 0 or e.offset + e.size > size:
            raise _bad(path, f"the member {e.name} is not within the file", _BUILD)
    if of_file > size or len(file.entries) != len(file.manifest["entries"]):
        raise _bad(path, "its members overlap", _BUILD)
    if of_code > CODE:
        raise _bad(path, f"its code is {of_code:,} bytes; a package has no more than {CODE:,}", "build for fewer archs")


def is_member(name: Any) -> bool:
    """Is it the name of a member: letters, digits, ``_+-.``, and ``/`` between the parts of a relative path?"""
    return isinstance(name, str) and bool(NAME.fullmatch(name))


def _altered(path: Path, e: Entry) -> PackageError:
    return _bad(path, f"the member {e.name} is altered: its SHA-256 is not the one in the manifest")


def _bad(path: Path, what: str, remedy: str = _COPY) -> PackageError:
    return PackageError(f"{path}: {printable(what)}; {remedy}")


def printable(text: str) -> str:
    """``text`` from a file, for a terminal: control characters are replaced, but for ends of lines."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


class _Mapping(mmap.mmap):
    """With what ``zipfile`` asks of a file, beyond what a mapping has."""

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:  # type: ignore[override]
        try:
            super().seek(offset, whence)  # type: ignore[arg-type]
        except ValueError as e:
            raise OSError(*e.args) from e
        return self.tell()


def _contents(path: Path, whole: bool) -> _Mapping:
    """The file: mapped, or (``whole``) read into memory of this process. The mapping is private: written pages belong
    to this process. (Since all might be written, Linux wants the file to fit into memory and swap, unless
    vm.overcommit_memory is 1.)"""
    try:
        info = path.stat()
        if stat.S_ISREG(info.st_mode) and info.st_size:  # opening a pipe would wait for its other end
            with path.open("rb") as f:
                return _read_whole(f) if whole else _Mapping(f.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as e:
        raise _bad(path, "there is no such file", "check the path") from e
    except (OSError, ValueError) as e:  # ValueError: a path with NUL in it; a file emptied since
        remedy = "check the path, its permissions, and that there is memory for the whole file"
        raise _bad(path, f"cannot be opened: {getattr(e, 'strerror', None) or e}", remedy) from e
    if stat.S_ISREG(info.st_mode):
        raise _bad(path, "the file is empty")
    kind = "a folder" if stat.S_ISDIR(info.st_mode) else "not a file"
    raise _bad(path, f"this is {kind}", "give the path of a package (model.reflib)")


def _read_whole(f: BinaryIO) -> _Mapping:
    data, at = _Mapping(-1, os.fstat(f.fileno()).st_size), 0
    with memoryview(data) as view:
        while at < len(view) and (n := f.readinto(view[at : at + _PIECE])):  # type: ignore[attr-defined]
            at += n
    return data  # (of a file cut short meanwhile, the rest is zeros: another digest)


def _manifest_text(path: Path, data: _Mapping) -> bytes:
    """The manifest's text, checked against its digest."""
    if data[:4] != b"PK\3\4":
        remedy = "give the path of a file that reflib.aot_compile wrote"
        raise _bad(path, "not a package: it does not begin as a zip file does", remedy)
    try:
        with zipfile.ZipFile(data) as z:  # type: ignore[call-overload]
            comment, info = z.comment, z.NameToInfo.get(MANIFEST)
            text = z.read(info) if info is not None and info.file_size <= TEXT else b""
    except Exception as e:  # zipfile raises many kinds for damaged fields
        if isinstance(e, zipfile.BadZipFile) and "not a zip file" in str(e):
            raise _bad(path, "truncated: the file ends before the package does") from e
        raise _bad(path, f"altered: {MANIFEST} cannot be read ({type(e).__name__}: {e})") from e
    if not comment.startswith(MARK):
        raise _bad(path, "a zip file, but no package (a package that was unpacked and zipped again is none)")
    if MARK + hashlib.sha256(text).hexdigest().encode() != comment:
        raise _bad(path, f"{MANIFEST} is altered: its SHA-256 is not the one at the file's end")
    return text


def _read_manifest(path: Path, text: bytes) -> dict[str, Any]:
    if sum(map(text.count, (b"[", b"{", b","))) > VALUES:  # (before they cost memory)
        raise _bad(path, f"{MANIFEST} has more than {VALUES:,} values", _BUILD)
    try:
        manifest = json.loads(text)
        if (format := manifest["format"]) != FORMAT:
            version = manifest.get("versions", {}).get("reflib", "unknown")
            age, remedy = ("a newer", "upgrade reflib") if format > FORMAT else ("an older", _BUILD)
            raise _bad(path, f"written by {age} reflib (version {version}) in format {format}, not {FORMAT}", remedy)
        for row in manifest["entries"]:
            if {k: type(v).__name__ for k, v in row.items()} != _ENTRY:
                raise ValueError("a member of another kind")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise _bad(path, f"{MANIFEST} is none of reflib's ({type(e).__name__}: {e})", _BUILD) from e
    return manifest


def _digest(data: mmap.mmap, start: int, size: int) -> str:
    sha = hashlib.sha256()
    with memoryview(data) as whole:
        for at in range(start, start + size, _PIECE):
            with whole[at : min(at + _PIECE, start + size)] as piece:
                sha.update(piece)
    return sha.hexdigest()
