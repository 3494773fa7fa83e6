"""A package's file: reproducible, digests over all that is used, PackageError for every damaged or foreign file."""

import errno
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reflib.errors import OptionError, PackageError
from reflib.package import archive

ROOT = Path(archive.__file__).parents[2]
MEMBERS = {"code/a.so": b"\x7fELF" + bytes(range(200)), "code/b.txt": b"", "weights.safetensors": b"w" * 300}
ABOUT = {"versions": {"reflib": "0.1.0"}, "name": "ünï", "deep": [1, 2.5, None, {"x": [True, -1]}]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return archive.write(tmp_path / "m.reflib", ABOUT, MEMBERS)


@pytest.fixture
def small(tmp_path: Path) -> bytes:
    """As few bytes as possible: every one of them is damaged."""
    return archive.write(tmp_path / "s.reflib", {}, {"a": b"code", "weights": b"12"}).read_bytes()


class Refused:
    """Opens bytes, as a new file each time: a mapping may still exist."""

    def __init__(self, folder: Path):
        self.path = folder / "damaged.reflib"

    def put(self, data: bytes) -> Path:
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(data)
        return self.path

    def __call__(self, data: bytes, match: str | None = None, **options: Any) -> str:
        with pytest.raises(PackageError, match=match) as e:
            archive.open(self.put(data), **options)
        message = str(e.value)
        assert str(self.path) in message and ";" in message  # the fault, and the remedy
        return message

    def or_same(self, data: bytes, contents: dict[str, bytes]) -> bool:
        """Is it refused? Else it must have the right contents."""
        try:
            a = archive.open(self.put(data))
        except PackageError as e:
            assert str(self.path) in str(e)
            return True
        assert {n: bytes(a.view(n)) for n in a.names} == contents
        return False


@pytest.fixture
def refused(tmp_path: Path) -> Refused:
    return Refused(tmp_path)


def child(program: str, *args: str | Path) -> str:
    """The output of a process, with ``open`` and ``write`` of the archive, and ``limit(which, bytes)``."""
    head = (
        "import resource, sys; from reflib.package import archive; from reflib.errors import PackageError\n"
        "def limit(which, n): resource.setrlimit(getattr(resource, 'RLIMIT_' + which), (n, n))\n"
        "def tried(f):\n    try: f()\n    except PackageError as e: print(e)\n"
    )
    command = [sys.executable, "-c", head + program, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


# -- round trips ------------------------------------------------------------------------------------
def test_what_was_written_is_read(path: Path) -> None:
    a = archive.open(path)
    assert a.path == path and a.names == tuple(sorted(MEMBERS))
    assert {n: bytes(a.view(n)) for n in a.names} == MEMBERS
    entries = a.manifest.pop("entries")
    assert a.manifest == {**ABOUT, "format": archive.FORMAT}
    assert [e["name"] for e in entries] == sorted(MEMBERS)
    data = path.read_bytes()
    for e in entries:
        lies = data[e["offset"] : e["offset"] + e["size"]]
        assert hashlib.sha256(lies).hexdigest() == e["sha256"] and e["unpacked"] == len(MEMBERS[e["name"]])
        assert e["offset"] % (4096 if e["name"].startswith("weights") else 64) == 0
    assert data[entries[0]["offset"] :].startswith(zlib.compress(MEMBERS["code/a.so"], wbits=-15))
    with pytest.raises(PackageError, match=r"no member 'nothing'; it has code/a\.so"):
        a.view("nothing")


def test_a_package_without_members_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert archive.open(archive.write("m", {}, {})).names == ()
    assert archive.open(archive.write("m.reflib", {}, {"a": b"x"})).view("a") == b"x"


def test_views_are_aligned_private_and_outlive_the_archive(path: Path) -> None:
    before = path.read_bytes()
    a = archive.open(path)
    view = a.view("weights.safetensors")
    assert torch.frombuffer(view, dtype=torch.uint8).data_ptr() % 4096 == 0
    view[:3] = b"new"
    assert path.read_bytes() == before and archive.open(path).view("weights.safetensors")[:3] == b"www"
    a.close()
    path.unlink()
    assert view[:4] == b"neww"
    with pytest.raises(PackageError, match="closed"):
        a.view("code/a.so")
    a.close()


def test_code_is_compressed_and_weights_are_not(tmp_path: Path) -> None:
    content = b"the same again " * 1000
    a = archive.open(archive.write(tmp_path / "m", {}, {"code": content, "weights": content}))
    code, weights = a.manifest["entries"]
    assert code["size"] < 200 and code["unpacked"] == weights["size"] == weights["unpacked"] == 15_000
    assert a.view("code") == a.view("weights") == content and content in (tmp_path / "m").read_bytes()


def test_chunks(tmp_path: Path) -> None:
    pieces = [b"ab", memoryview(b"cde"), bytearray(b""), torch.arange(3, dtype=torch.int32).numpy()]
    content = b"".join(bytes(memoryview(p).cast("B")) for p in pieces)
    chunks = archive.Chunks(len(content), lambda: pieces)
    a = archive.write(tmp_path / "a", {}, {"x": chunks}).read_bytes()
    assert a == archive.write(tmp_path / "b", {}, {"x": content}).read_bytes()


def test_pieces_need_little_memory(tmp_path: Path) -> None:
    """200 MiB, written by a process that may have 100."""
    program = (
        "limit('DATA', 100 << 20)\n"
        "pieces = archive.Chunks(200 << 20, lambda: (bytes(1 << 20) for _ in range(200)))\n"
        "archive.write(sys.argv[1], {}, {'weights': pieces})\n"
    )
    child(program, tmp_path / "m")
    assert len(archive.open(tmp_path / "m").view("weights")) == 200 << 20


# -- reproducible -----------------------------------------------------------------------------------
def test_the_same_contents_make_the_same_bytes(path: Path, tmp_path: Path) -> None:
    turned = dict(reversed(MEMBERS.items()))
    again = archive.write(tmp_path / "other", dict(reversed(ABOUT.items())), turned)
    assert again.read_bytes() == path.read_bytes()
    a = archive.open(path)
    again = archive.write(tmp_path / "b", a.manifest, {n: bytes(a.view(n)) for n in a.names})
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("limit", [zipfile.ZIP64_LIMIT, 3000])
def test_zip_tools_read_it(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with ZIP's fields of 64 bits, by a lower limit."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    members = {**MEMBERS, "weights.safetensors": b"w" * 3001}
    path = archive.write(tmp_path / "m", ABOUT, members)
    a = archive.open(path)
    assert {n: bytes(a.view(n)) for n in a.names} == members
    assert all(e.offset % 64 == 0 for e in a.entries.values()) and (b"PK\6\6" in path.read_bytes()) == (limit == 3000)
    monkeypatch.undo()
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None and z.namelist() == [*sorted(members), "manifest.json"]
        assert {n: z.read(n) for n in members} == members
        assert {(i.date_time, i.external_attr >> 16) for i in z.infolist()} == {((1980, 1, 1, 0, 0, 0), 0o100644)}
        digest = hashlib.sha256(z.read("manifest.json")).hexdigest()
        assert z.comment == b"reflib sha256:" + digest.encode() and path.read_bytes().endswith(z.comment)


# -- every byte that is used ------------------------------------------------------------------------
def test_every_byte_and_every_length(small: bytes, refused: Refused) -> None:
    """Changed, cut or lengthened anywhere, a file is refused or has the right contents."""
    contents = {"a": b"code", "weights": b"12"}
    a = archive.open(refused.put(small))
    used = [i for e in a.entries.values() for i in range(e.offset, e.offset + e.size)]
    used += range(at := small.rindex(json.dumps(a.manifest, sort_keys=True, indent=1).encode()), small.rindex(b"}", at))
    for i in range(0, len(small), 1 if len(small) < 2000 else 3):
        noticed = refused.or_same(small[:i] + bytes([small[i] ^ 1 << i % 8]) + small[i + 1 :], contents)
        assert noticed or i not in used, i
    for i in used:
        assert refused.or_same(small[:i] + bytes([small[i] ^ 0xFF]) + small[i + 1 :], contents), i
    for n in range(0, len(small), 5):
        refused(small[:n], "empty" if n == 0 else "truncated|not a package|no package|altered")
        refused.or_same(small[:n] + b"\0" + small[n:], contents)
        refused.or_same(small[:n] + small[n + 1 :], contents)
    assert "truncated" in refused(small[: len(small) // 2])
    refused(b"xyz" + small, "does not begin as a zip file does")
    refused(small[:1] + small, "does not begin")


def test_code_leaves_out_the_weights_contents_only(path: Path, refused: Refused) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b"w" * 300)
    data[at] ^= 1
    refused(bytes(data), "weights.safetensors is altered")
    a = archive.open(refused.put(bytes(data)), verify="code")
    assert a.view("weights.safetensors")[0] == ord("w") ^ 1
    data[a.entries["code/a.so"].offset + 9] ^= 1
    refused(bytes(data), "the member code/a.so is altered", verify="code")


@pytest.mark.parametrize("verify", [False, 1, None, "weights", "all", ""])
def test_other_values_of_verify(path: Path, verify: Any) -> None:
    with pytest.raises(OptionError, match=r'takes True .* or "code"'):
        archive.open(path, verify=verify)


def test_the_whole_files_digest(path: Path) -> None:
    right, wrong = hashlib.sha256(path.read_bytes()).hexdigest(), "0" * 64
    for verify in (True, "code"):
        assert archive.open(path, verify, sha256=right).names
        assert archive.open(path, verify, sha256=right.upper()).names
        with pytest.raises(PackageError, match=f"{right}, not {wrong}"):
            archive.open(path, verify, sha256=wrong)
    for nonsense in ("", right[:-1], right + "0", "x" * 64, 5, right.encode(), right + "\n"):
        with pytest.raises(OptionError, match="64 hex digits"):
            archive.open(path, sha256=nonsense)  # type: ignore[arg-type]


# -- what is no package -----------------------------------------------------------------------------
def test_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello " * 1000)
    (tmp_path / "link").symlink_to("nowhere")
    for name, member in (("zip", "manifest.json"), ("other", "a")):
        with zipfile.ZipFile(tmp_path / name, "w") as z:
            z.writestr(member, "{}")
    cases = {
        "missing": "no such file", "link": "no such file", "": "a folder", "pipe": "not a file", "empty": "is empty",
        "text": "not a package", "zip": "a zip file, but no package", "other": "a zip file, but no package",
        "text/x": "Not a directory", "a\0b": "null", "/dev/null": "not a file",
    }  # fmt: skip
    for name, match in cases.items():
        with pytest.raises(PackageError, match=match):
            archive.open(os.path.join(tmp_path, name))


def test_zipped_again(path: Path, refused: Refused) -> None:
    """As other tools do it: without the comment; with it, and without a member; and with a name of its own."""
    out = io.BytesIO()
    for keep, match in ((False, "zipped again"), (True, "is altered")):
        with zipfile.ZipFile(path) as z, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as again:
            for name in z.namelist():
                again.writestr(name, z.read(name).replace(b"code/b.txt", b"code/c.txt") if keep else z.read(name))
            again.comment = z.comment if keep else b""
        refused(out.getvalue(), match)
        out = io.BytesIO()
    for name in ("/a", "../a", "a/../b", "a\\b", "C:a"):
        with pytest.raises(PackageError, match="no plain relative path"):
            archive.open(archive.write(path, {}, {name: b""}))


@pytest.mark.parametrize("format, says", [(archive.FORMAT + 1, "newer"), (archive.FORMAT - 1, "older")])
def test_formats(format: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(archive, "FORMAT", format)
        path = archive.write(tmp_path / "m", ABOUT, {})
    with pytest.raises(PackageError, match=rf"{says} reflib \(version 0.1.0\) in format {format}, not"):
        archive.open(path)


# -- writing that fails -----------------------------------------------------------------------------
def kept(path: Path, write: Callable[[], Any], error: Any, match: str = "") -> None:
    """Writing fails; the old file is as it was, and nothing is beside it."""
    before = path.read_bytes()
    with pytest.raises(error, match=match):
        write()
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def pieces(after: int, error: BaseException) -> archive.Chunks:
    def make() -> Iterator[bytes]:
        for i in range(4):
            if i == after:
                raise error
            yield bytes(1 << 20)

    return archive.Chunks(4 << 20, make)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = f"cannot write {path}: No space left on device; .*room"
    for after in range(4):
        kept(path, lambda after=after: archive.write(path, {}, {"a": pieces(after, FULL)}), PackageError, says)
    for error in (KeyboardInterrupt, RuntimeError, MemoryError):
        kept(path, lambda error=error: archive.write(path, {}, {"a": pieces(1, error())}), error)

    def full(*args: Any) -> Any:
        raise FULL

    for of, name in ((zipfile.ZipFile, "_write_end_record"), (os, "replace")):  # the last that is written; renamed
        monkeypatch.setattr(of, name, full)
        kept(path, lambda: archive.write(path, {}, {"a": b"x"}), PackageError, "No space")
        monkeypatch.undo()


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for p, match in [
        (tmp_path / "none" / "m", "No such file"), (tmp_path, "no file"), ("/dev/null", "no file"), ("", "no file"),
        (tmp_path / ("x" * 300), "name too long"),
    ]:  # fmt: skip
        with pytest.raises(PackageError, match=f"cannot write .*{match}"):
            archive.write(p, {}, {"a": b""})
    assert not list(tmp_path.iterdir()) and stat.S_ISCHR(os.stat("/dev/null").st_mode)
