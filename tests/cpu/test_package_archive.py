"""A package's file: one right form, every byte covered, nothing but PackageError for what is wrong with it."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import re
import stat
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from reflib.errors import OptionError, PackageError
from reflib.package import archive, form, weights
from tests import damaged

ROOT = Path(archive.__file__).parents[2]
MEMBERS = {"code/a.so": b"\x7fELF" + bytes(range(200)), "code/b.txt": b"", "weights.safetensors": b"w" * 300}
ABOUT = {"versions": {"reflib": "0.1.0"}, "name": "ünï", "deep": [1, 2.5, None, {"x": [True, -1]}]}


@pytest.fixture
def path(tmp_path) -> Path:
    return archive.write(tmp_path / "m.reflib", ABOUT, MEMBERS)


@pytest.fixture
def small(tmp_path) -> bytes:
    """As few bytes as will do: every one of them is damaged."""
    return archive.write(tmp_path / "s.reflib", {}, {"a": b"code", "weights": b"12"}).read_bytes()


class Refused:
    """Opens bytes, as a new file each time: a mapping may still be there."""

    def __init__(self, folder: Path):
        self.path = folder / "damaged.reflib"

    def put(self, data: bytes) -> Path:
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(data)
        return self.path

    def __call__(self, data: bytes, match: str | None = None, **options) -> str:
        with pytest.raises(PackageError, match=match) as e:
            archive.open(self.put(data), **options)
        message = str(e.value)
        assert str(self.path) in message and ";" in message  # what, and the remedy
        return message


@pytest.fixture
def refused(tmp_path) -> Refused:
    return Refused(tmp_path)


# -- round trips ------------------------------------------------------------------------------------
def test_what_was_written_is_read(path):
    a = archive.open(path)
    assert a.path == path and a.names == tuple(sorted(MEMBERS))
    assert {n: bytes(a.view(n)) for n in a.names} == MEMBERS
    entries = a.manifest.pop("entries")
    assert a.manifest == {**ABOUT, "format": archive.FORMAT}
    assert [e["name"] for e in entries] == sorted(MEMBERS)
    lie = damaged.in_file("code/a.so", MEMBERS["code/a.so"])
    assert entries[0]["sha256"] == hashlib.sha256(lie).hexdigest() and lie in path.read_bytes()
    assert (entries[0]["unpacked"], entries[0]["size"]) == (len(MEMBERS["code/a.so"]), len(lie))
    assert json.loads(bytes(a.view("manifest.json")))["entries"] == entries
    with pytest.raises(PackageError, match=r"no member 'nothing'; it has code/a\.so"):
        a.view("nothing")


def test_a_package_without_members(tmp_path):
    assert archive.open(archive.write(tmp_path / "m", {}, {})).names == ()


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert archive.open(archive.write("m.reflib", {}, {"a": b"x"})).view("a") == b"x"


def test_views_are_aligned_private_and_outlive_the_archive(path):
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


def test_code_is_compressed_and_weights_are_not(tmp_path):
    content = b"the same again " * 1000
    a = archive.open(archive.write(tmp_path / "m", {}, {"code": content, "weights": content}))
    code, weights = a.manifest["entries"]
    assert code["size"] < 200 and code["unpacked"] == weights["size"] == weights["unpacked"] == 15_000
    assert a.view("code") == a.view("weights") == content and content in (tmp_path / "m").read_bytes()
    with zipfile.ZipFile(tmp_path / "m") as z:
        assert [(i.compress_type, i.compress_size) for i in z.infolist()][:2] == [(8, code["size"]), (0, 15_000)]


def test_code_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "CODE_LIMIT", 100)
    archive.write(tmp_path / "m", {}, {"a": bytes(100), "weights": bytes(101)})
    with pytest.raises(PackageError, match="a has 101 bytes, code has at most 100"):
        archive.write(tmp_path / "n", {}, {"a": bytes(101)})
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_chunks(tmp_path):
    pieces = [b"ab", memoryview(b"cde"), bytearray(b""), torch.arange(3, dtype=torch.int32).numpy()]
    content = b"".join(bytes(memoryview(p).cast("B")) for p in pieces)
    chunks = archive.Chunks(len(content), lambda: pieces)
    a = archive.write(tmp_path / "a", {}, {"x": chunks}).read_bytes()
    assert a == archive.write(tmp_path / "b", {}, {"x": content}).read_bytes()
    for size in (len(content) - 1, len(content) + 1, 0):
        with pytest.raises(PackageError, match="17 bytes"):
            archive.write(tmp_path / "c", {}, {"x": archive.Chunks(size, lambda: pieces)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


# -- one right form ---------------------------------------------------------------------------------
def test_the_same_contents_make_the_same_bytes(path, tmp_path):
    turned = dict(reversed(MEMBERS.items()))
    again = archive.write(tmp_path / "other", dict(reversed(ABOUT.items())), turned)
    assert again.read_bytes() == path.read_bytes()
    a = archive.open(path)
    again = archive.write(tmp_path / "b", a.manifest, {n: bytes(a.view(n)) for n in a.names})
    assert again.read_bytes() == path.read_bytes()


def test_another_process_makes_the_same_bytes(tmp_path):
    program = (
        "import sys, torch; from reflib.package import archive, form, weights\n"
        "t = torch.arange(40.)\n"
        "c, rows = weights.pack({n: t[::2] for n in {'a', 'b', 'c'}} | {n: torch.ones(3) for n in {'p', 'q', 'r'}})\n"
        "about = {k: 1 for k in {'p', 'q', 'r'}} | {'rows': rows}\n"
        "archive.write(sys.argv[1], about, {'weights.safetensors': c} | {n: b'' for n in {'s', 't', 'u'}})\n"
    )
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", program, str(tmp_path / seed)], env=env, cwd=tmp_path, check=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert bytes(tmp_path) not in (tmp_path / "1").read_bytes()


def test_zip_tools_read_it(path):
    test = [sys.executable, "-m", "zipfile", "-t", str(path)]
    said = subprocess.run(test, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "Done testing"
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
        assert z.namelist() == [*sorted(MEMBERS), "manifest.json"]
        assert {n: z.read(n) for n in MEMBERS} == MEMBERS
        assert {(i.date_time, i.external_attr >> 16) for i in z.infolist()} == {((1980, 1, 1, 0, 0, 0), 0o100644)}
        digest = hashlib.sha256(z.read("manifest.json")).hexdigest()
        assert z.comment == b"reflib sha256:" + digest.encode() and path.read_bytes().endswith(z.comment)


@pytest.mark.parametrize("limit, count", [(3000, 0xFFFF), (0xFFFFFFFF, 4), (3000, 4), (0xFFFFFFFF, 5)])
def test_zip64(limit, count, tmp_path, monkeypatch):
    """Its longer forms, by lower limits: of a size, an offset and the number of members."""
    members = {**MEMBERS, "weights.safetensors": b"w" * 3000}
    short = archive.write(tmp_path / "short", ABOUT, members).read_bytes()
    monkeypatch.setattr(form, "ZIP64", limit)
    monkeypatch.setattr(form, "ZIP64_MEMBERS", count)
    path = archive.write(tmp_path / "m", ABOUT, members)
    a = archive.open(path)
    assert {n: bytes(a.view(n)) for n in a.names} == members
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None and {n: z.read(n) for n in members} == members
    data = path.read_bytes()
    assert (data == short) == ((limit, count) == (0xFFFFFFFF, 5))
    assert (b"PK\6\6" in data) == (data != short)


def test_more_than_4_gib(tmp_path):
    """A sparse file: nothing in it is written but headers. "code" does not read the weights."""
    size = 5 << 30
    parts = [
        damaged.entry("code", b"abc"), archive.Entry("weights", size, size, "0" * 64, 0), damaged.entry("z/code", b""),
    ]  # fmt: skip
    text = archive.dump({"format": archive.FORMAT, "entries": [vars(e) for e in parts]})
    places = archive.layout([*parts, archive._manifest_entry(text)])
    path = tmp_path / "m"
    with path.open("wb") as f:
        for p, content in zip(places, (damaged.in_file("code", b"abc"), b"", damaged.in_file("z", b""), text)):
            f.seek(p.start)
            f.write(archive.head(p) + content)
        f.write(archive.tail(places))
    assert path.stat().st_size > size > 1000 * path.stat().st_blocks * 512
    a = archive.open(path, verify="code")
    assert a.view("code") == b"abc" and len(a.view("weights")) == size and a.view("weights")[-1] == 0
    with zipfile.ZipFile(path) as z:
        assert [(i.filename, i.file_size, i.header_offset) for i in z.infolist()] == [
            (p.entry.name, p.entry.unpacked, p.start) for p in places
        ]
        assert z.read("code") == b"abc" and z.read("z/code") == b"" and z.read("manifest.json") == text


def test_more_than_65535_members(tmp_path):
    members = {f"{i}": b"" for i in range(65_534)}  # and the manifest: the first number that is too large
    path = archive.write(tmp_path / "m", {}, members)
    assert len(archive.open(path).names) == 65_534 and b"PK\6\6" in path.read_bytes()
    with zipfile.ZipFile(path) as z:
        assert len(z.infolist()) == 65_535


# -- every byte -------------------------------------------------------------------------------------
def test_every_byte_counts(small, refused):
    for i in range(len(small)):
        for change in (0xFF, 1 << i % 8):
            refused(small[:i] + bytes([small[i] ^ change]) + small[i + 1 :])


def test_every_truncation(small, refused):
    for n in range(len(small)):
        refused(small[:n], "empty" if n == 0 else "truncated|not a zip|not even|no package")
    assert "truncated" in refused(small[: len(small) // 2])


def test_every_insertion_and_loss(small, refused):
    for i in range(0, len(small) + 1, 7):
        refused(small[:i] + b"\0" + small[i:])
        refused(small[:i] + small[i : i + 64] + small[i:] + bytes(i == len(small)))
        if i < len(small):
            refused(small[:i] + small[i + 1 :])
    refused(small + b"x", "1 bytes lie after the package's last")
    refused(b"xyz" + small, "3 bytes lie before")
    refused(small + small)


def test_code_leaves_the_weights_contents_out_and_nothing_else(path, refused):
    data = path.read_bytes()
    weights_at = data.index(b"w" * 300)
    changed = bytearray(data)
    changed[weights_at] ^= 1
    refused(bytes(changed), "weights.safetensors is altered")
    a = archive.open(refused.put(bytes(changed)), verify="code")
    assert a.view("weights.safetensors")[0] == ord("w") ^ 1
    for i in range(0, len(data), 3):
        if not weights_at <= i < weights_at + 300:
            refused(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :], verify="code")
    changed = bytearray(data)
    changed[data.index(damaged.in_file("code/a.so", MEMBERS["code/a.so"])) + 9] ^= 1
    refused(bytes(changed), "the member code/a.so is altered", verify="code")


@pytest.mark.parametrize("verify", [False, 1, None, "weights", "all", ""])
def test_other_values_of_verify(path, verify):
    with pytest.raises(OptionError, match=r'takes True .* or "code"'):
        archive.open(path, verify=verify)


def test_the_whole_files_digest(path):
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    for verify in (True, "code"):
        assert archive.open(path, verify, sha256=right).names
        assert archive.open(path, verify, sha256=right.upper()).names
        wrong = "0" * 64
        with pytest.raises(PackageError, match=f"{right}, not {wrong}"):
            archive.open(path, verify, sha256=wrong)
    for nonsense in ("", right[:-1], right + "0", "x" * 64, 5, right.encode(), right + "\n"):
        with pytest.raises(OptionError, match="64 hex digits"):
            archive.open(path, sha256=nonsense)


# -- what is no package -----------------------------------------------------------------------------
def test_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello " * 1000)
    (tmp_path / "short").write_text("h")
    (tmp_path / "link").symlink_to("nowhere")
    with zipfile.ZipFile(tmp_path / "zip", "w") as z:
        z.writestr("manifest.json", "{}")
    zipfile.ZipFile(tmp_path / "none", "w").close()
    cases = {
        "missing": "no such file", "link": "no such file", "": "a folder", "pipe": "not a file", "empty": "is empty",
        "text": "not even a zip", "short": "not even a zip", "zip": "a zip file, but no package", "none": "no package",
        "text/x": "Not a directory", "a\0b": "null",
    }  # fmt: skip
    for name, match in cases.items():
        with pytest.raises(PackageError, match=match):
            archive.open(os.path.join(tmp_path, name))
    with pytest.raises(PackageError, match="not a file"):
        archive.open("/dev/null")


def test_formats(path, refused):
    parts = damaged.take_apart(path.read_bytes())
    for format, match in [
        (3, r"written by a newer reflib \(version 0.1.0\) in format 3.*upgrade"),
        (1, r"written by an older reflib \(version 0.1.0\) in format 1, known here is 2; build the package again"),
        (10**15, "newer"), (0, "no format"), (-1, "no format"), ("1", "no format"), (1.0, "no format"),
        (True, "no format"), (None, "no format"),
    ]:  # fmt: skip
        parts.manifest["format"] = format
        refused(damaged.put_together(parts), match)
    del parts.manifest["format"]
    refused(damaged.put_together(parts), "says no format")
    for versions in (None, 5, {}, {"reflib": []}):
        parts.manifest.update(format=3, versions=versions)
        refused(damaged.put_together(parts), "newer reflib")


@pytest.mark.parametrize(
    "text, match",
    [
        (b"", "cannot be read"), (b"{", "cannot be read"), (b"\xff", "cannot be read"),
        (b"\xef\xbb\xbf{}", "cannot be read"),
        (b"[]", "no JSON object"), (b"1", "no JSON object"), (b"null", "no JSON object"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"), (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": 1' + b"0" * 30 + b"}", "too large"), (b'{"a": 1' + b"0" * 9999 + b"}", "too large"),
        (b'{"a": 1e999}', "too large"), (b'{"a": NaN}', "NaN is no number"), (b'{"a": -Infinity}', "no number"),
        (b'{"format": 1, "a": 1, "a": 2}', "'a' is there twice"),
        (b'{"format":2,"entries":[]}', "not written as reflib writes it"),
        (b'{\n "a": "\\ud800",\n "format": 2\n}', "not written as reflib writes it"),
        (b'{\n "format": 2\n}', "no list"), (b'{\n "entries": {},\n "format": 2\n}', "no list"),
    ],
)  # fmt: skip
def test_manifests(text, match, refused):
    refused(damaged.with_manifest(damaged.Parts(None, []), text), match)


def test_a_huge_manifest(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(archive, "MANIFEST_LIMIT", 1000)
    with pytest.raises(PackageError, match="more than 1000"):
        archive.write(tmp_path / "m", {"a": "x" * 1000}, {})
    with pytest.raises(PackageError, match="more than 1000"):  # by its entries alone
        archive.write(tmp_path / "m", {}, {f"{i}": b"" for i in range(10)})
    assert not list(tmp_path.iterdir())
    refused(damaged.with_manifest(damaged.Parts(None, []), b"{" + b" " * 1000 + b"}"), "more than 1000")


def test_entries(path, refused):
    parts = damaged.take_apart(path.read_bytes())
    good = parts.manifest["entries"]
    for key, value, match in [
        ("unpacked", -1, "is no number of bytes"), ("unpacked", "3", "is no number"),
        ("unpacked", True, "is no number"), ("unpacked", 1.5, "is no number"), ("unpacked", None, "is no number"),
        ("unpacked", 10**15, "to unpack to 10{15} bytes"),
        ("unpacked", 2**63, "code has at most"), ("unpacked", 205, "directory"), ("unpacked", 203, "directory"),
        ("size", -1, "is no number of bytes"), ("size", True, "is no number"), ("size", None, "is no number"),
        ("size", 10**15, "the whole file has"), ("size", 3, "sizes make|directory"),
        ("size", 5000, "sizes make|the whole file"), ("size", 4500, "sizes make"),
        ("sha256", "0" * 64, "a.so is altered"), ("sha256", "A" * 64, "64 hex"), ("sha256", 1, "64 hex"),
        ("sha256", "0" * 64 + "\n", "64 hex"), ("crc32", -1, "32 bits"), ("crc32", 1 << 32, "32 bits"),
        ("crc32", False, "32 bits"), ("crc32", 1, "directory"),
        ("name", "code/c", "is out of order|is missing|does not know"), ("name", "code/b.txt", "is there twice"),
        ("name", "code/0", "code/0 is missing"), ("name", "../a", "an empty part"), ("name", 5, "no text"),
        ("more", 1, "takes name, size"),
    ]:  # fmt: skip
        parts.manifest["entries"] = [{**good[0], key: value}, *good[1:]]
        refused(damaged.with_manifest(parts, damaged.text(parts.manifest)), match)
    for entries, match in [
        ([5], "takes name"), ([{}], "takes name"), ([], "does not know the member code/a.so"),
        (good[:-1], "does not know"), (good[1:], "does not know"), (good[::-1], "out of order"),
        ([*good, {**good[-1], "name": "z"}], "z is missing"),
    ]:  # fmt: skip
        parts.manifest["entries"] = entries
        refused(damaged.with_manifest(parts, damaged.text(parts.manifest)), match)


BAD_NAMES = {
    "": "is empty", "/a": "absolute", "../a": r'"\.\."', "a/..": r'"\.\."', "a/../b": "empty part",
    "a//b": "empty part",
    "a/": "empty part", "./a": "empty part", ".": "empty part", "a\\b": "backslash", "C:a": "colon", "a\0": "ASCII",
    "a\n": "ASCII", "é": "ASCII", "a\x7f": "ASCII", "x" * 1001: "longer",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names(name, refused, tmp_path):
    with pytest.raises(PackageError, match=BAD_NAMES[name]):
        archive.write(tmp_path / "m", {}, {name: b""})
    parts = damaged.Parts({"format": archive.FORMAT}, [(name, b"x")])
    message = refused(damaged.put_together(parts), "the member name")
    assert re.search(BAD_NAMES[name], message) or "is there twice" in message


def test_the_manifests_name_is_taken(tmp_path, refused):
    with pytest.raises(PackageError, match="is taken"):
        archive.write(tmp_path / "m", {}, {"manifest.json": b""})
    refused(damaged.put_together(damaged.Parts({"format": archive.FORMAT}, [("manifest.json", b"{}")])), "there twice")


def test_members_that_other_tools_make(path, refused):
    data = path.read_bytes()
    found = damaged.headers(data)
    local, record = (next(h[1] for h in found if h[0] == kind) for kind in ("local", "directory"))

    def patched(*patches: tuple[int, str, int]) -> bytes:
        out = bytearray(data)
        for at, field, value in patches:
            struct.pack_into(field, out, at, value)
        return bytes(out)

    refused(patched((record + 10, "<H", 12), (local + 8, "<H", 12)), "code/a.so is compressed by method 12")
    refused(patched((record + 10, "<H", 0), (local + 8, "<H", 0)), "code/a.so is not compressed")
    refused(patched((record + 8, "<H", 1), (local + 6, "<H", 1)), "code/a.so is encrypted")
    refused(patched((record + 38, "<L", (stat.S_IFLNK | 0o777) << 16)), "code/a.so is a link")
    refused(patched((record + 20, "<L", 1 << 30), (record + 24, "<L", 1 << 30)), "directory")
    refused(patched((local + 18, "<L", 1 << 30)), "the header or the padding of code/a.so")
    refused(patched((record + 42, "<L", 7)), "directory")
    parts = damaged.take_apart(data)
    parts.members.insert(0, parts.members[0])
    refused(damaged.put_together(parts), "code/a.so is there twice")
    parts.members.pop(0)
    parts.members.reverse()
    refused(damaged.put_together(parts), "out of order")
    again = io.BytesIO()
    with zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as z:
        for name, content in MEMBERS.items():
            z.writestr(name, content)
        z.writestr("manifest.json", damaged.text(parts.manifest))
        z.comment = data[-archive.COMMENT :]
    refused(again.getvalue(), "manifest.json is compressed by method 8")


def test_nothing_is_allocated_by_a_size_that_is_not_there(refused):
    """In a child with little memory to have."""
    rows = [
        {"name": f"weights{i:06}", "size": 2**40, "unpacked": 2**40, "sha256": "0" * 64, "crc32": 0}
        for i in range(1000)
    ]
    parts = damaged.Parts(None, [(r["name"], b"") for r in rows])
    path = refused.put(damaged.with_manifest(parts, damaged.text({"format": archive.FORMAT, "entries": rows})))
    for start in (0, 2**40, 2**64 - 1):
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, start & 0xFFFFFFFF, archive.COMMENT)
        long = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2**60, 2**60, 2**62, start)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
        (path.parent / f"{start}").write_bytes(bytes(500) + long + locator + end + archive.MARK + b"0" * 64)
    program = (
        "import resource, sys; from reflib.package import archive; from reflib.errors import PackageError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))\n"
        "for path in sys.argv[1:]:\n"
        "    try: archive.open(path)\n"
        "    except PackageError as e: print(e)\n"
    )
    files = [str(path), *(str(path.parent / f"{n}") for n in (0, 2**40, 2**64 - 1))]
    said = subprocess.run([sys.executable, "-c", program, *files], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(said.stdout.splitlines()) == 4


def test_a_bad_stream(path, refused):
    """Compressed bytes whose digests are right: all that is wrong is what they unpack to."""
    parts = damaged.take_apart(path.read_bytes())
    content = dict(parts.members)["code/a.so"]
    right = damaged.in_file("code/a.so", content)
    for wrong, match in [
        (b"\xff" * 30, "cannot be unpacked: .*invalid"), (b"", "unpacks to other"), (right[:-1], "unpacks to other"),
        (right + b"x", "unpacks to other"), (damaged.in_file("code", content[:-1]), "unpacks to other"),
        (damaged.in_file("code", content[:-1] + b"?"), "unpacks to other"),
        (damaged.in_file("code", content + b"?"), "unpacks to other"),
    ]:  # fmt: skip
        parts.packed["code/a.so"] = wrong
        a = archive.open(refused.put(damaged.put_together(parts)))
        with pytest.raises(PackageError, match=match) as e:
            a.view("code/a.so")
        assert str(a.path) in str(e.value) and "build the package again" in str(e.value)
        assert a.view("weights.safetensors") == MEMBERS["weights.safetensors"]


def test_a_bomb_makes_no_more_than_the_manifest_says(path, refused):
    """In a child with little memory to have: 512 MB from half a megabyte."""
    parts = damaged.take_apart(path.read_bytes())
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(512)) + packer.flush()
    assert len(bomb) < 1 << 20
    parts.packed["code/a.so"] = bomb
    program = (
        "import resource, sys; from reflib.package import archive; from reflib.errors import PackageError\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (100 << 20, 100 << 20))\n"
        "try: archive.open(sys.argv[1]).view('code/a.so')\n"
        "except PackageError as e: print(e)\n"
    )
    child = [sys.executable, "-c", program, str(refused.put(damaged.put_together(parts)))]
    said = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "unpacks to other contents" in said.stdout


# -- writing that fails -----------------------------------------------------------------------------
@pytest.mark.parametrize("manifest", [{1: 2}, {"a": object()}, {"a": float("nan")}, {"a": "\ud800"}, {"a": 10**30}])
def test_what_json_cannot_hold_is_refused_first(manifest, tmp_path):
    def never():
        raise AssertionError

    with pytest.raises(PackageError, match="manifest cannot be JSON"):
        archive.write(tmp_path / "m", manifest, {"a": archive.Chunks(1, never)})
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_contains_itself(tmp_path):
    deep: list = []
    deep.append(deep)
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    for a in (deep, nested):
        with pytest.raises(PackageError, match="manifest cannot be JSON"):
            archive.write(tmp_path / "m", {"a": a}, {})


def test_another_format_is_not_written(tmp_path):
    with pytest.raises(PackageError, match="format 1"):
        archive.write(tmp_path / "m", {"format": 1}, {})


def test_a_full_disk_keeps_the_old_file(path, monkeypatch):
    before = path.read_bytes()
    for after in range(4):  # the n-th piece

        def pieces(after=after):
            for i in range(4):
                if i == after:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                yield bytes(1 << 20)

        with pytest.raises(PackageError, match=f"cannot write {path}: No space left on device; .*room"):
            archive.write(path, {}, {"a": archive.Chunks(4 << 20, pieces)})
        assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(archive, "tail", full)  # the last that is written
    with pytest.raises(PackageError, match="No space"):
        archive.write(path, {}, {"a": b"x"})
    monkeypatch.undo()
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PackageError, match="No space"):
        archive.write(path, {}, {"a": b"x"})
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("limit", [0, 100, 4096, 5000, 60_000, 100_000])
def test_a_limit_of_file_sizes_keeps_the_old_file(path, limit):
    before = path.read_bytes()
    program = (
        "import resource, sys; from reflib.package import archive; from reflib.errors import PackageError\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "try: archive.write(sys.argv[1], {}, {'a': b'x', 'weights': bytes(100_000)})\n"
        "except PackageError as e: print(e)\n"
    )
    child = [sys.executable, "-c", program, str(path)]
    said = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "File too large" in said.stdout
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_what_goes_wrong_in_the_middle_leaves_no_litter(path, error):
    before = path.read_bytes()

    def pieces():
        yield b"1"
        raise error

    with pytest.raises(error):
        archive.write(path, {}, {"a": archive.Chunks(2, pieces)})
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_places_that_cannot_be_written(tmp_path):
    for p, match in [
        (tmp_path / "none" / "m", "No such file"), (tmp_path, "no file"), ("/dev/null", "no file"), ("", "no file"),
        (tmp_path / ("x" * 300), "name too long"),
    ]:  # fmt: skip
        with pytest.raises(PackageError, match=f"cannot write .*{match}"):
            archive.write(p, {}, {"a": b""})
    assert not list(tmp_path.iterdir()) and stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_new_file_has_a_new_files_permissions(tmp_path):
    old = os.umask(0o027)
    try:
        assert stat.S_IMODE(archive.write(tmp_path / "m", {}, {}).stat().st_mode) == 0o640
    finally:
        os.umask(old)


def test_replacing_leaves_what_is_mapped_alone(path):
    a = archive.open(path)
    archive.write(path, {}, {"code/a.so": b"other"})
    assert a.view("code/a.so") == MEMBERS["code/a.so"] and archive.open(path).view("code/a.so") == b"other"


def test_memory_stays_flat(tmp_path):
    """200 MiB by pieces, in a child that may not have 100."""
    program = (
        "import resource, sys; from reflib.package import archive\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (100 << 20, 100 << 20))\n"
        "pieces = archive.Chunks(200 << 20, lambda: (bytes(1 << 20) for _ in range(200)))\n"
        "archive.write(sys.argv[1], {}, {'weights': pieces})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "m")], cwd=ROOT, check=True)
    assert len(archive.open(tmp_path / "m").view("weights")) == 200 << 20


# -- fuzz -------------------------------------------------------------------------------------------
def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0)
    return {
        "a": base.view(4, 6), "a.t": base.view(4, 6).t(), "b": torch.arange(3), "c": torch.ones(5, dtype=torch.bool),
        "e": torch.ones(1).expand(4), "n": torch.empty(0, 3), "s": torch.tensor(2.0), "v": base[::5],
    }  # fmt: skip


def check_consistent(a: archive.Archive, data: bytes, again: Path) -> None:
    """What opens is whole: other tools read the same, and it is the one file of these contents, unless what was changed
    is how they are compressed."""
    contents = {n: bytes(a.view(n)) for n in a.names}
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        assert z.testzip() is None and {n: z.read(n) for n in a.names} == contents
    ours = True
    for p in a._places.values():
        lie = data[p.data : p.end]
        assert hashlib.sha256(lie).hexdigest() == p.entry.sha256
        ours &= p.entry.name == archive.MANIFEST or lie == damaged.in_file(p.entry.name, contents[p.entry.name])
    assert not ours or archive.write(again, a.manifest, contents).read_bytes() == data


@pytest.mark.parametrize("repair", [False, True], ids=["raw", "repaired"])
def test_damaged_files_fuzz(repair, tmp_path, refused):
    chunks, rows = weights.pack(tensors())
    members = {"code/a.so": b"\x7fELF", "code/b": b"", "weights.safetensors": chunks}
    data = archive.write(tmp_path / "m", {"rows": rows, "x": {"y": [1, 2]}}, members).read_bytes()
    rng = random.Random(20240 + repair)
    opened = read = 0
    slowest = 0.0
    for i in range(5000):
        new, what = damaged.damage(data, rng, repair)
        path = refused.put(new)
        start = time.perf_counter()
        try:
            a = archive.open(path)
        except PackageError:
            slowest = max(slowest, time.perf_counter() - start)
            continue
        except BaseException:
            print(f"damage {i}: {what}")
            raise
        try:
            check_consistent(a, new, tmp_path / "again")
            opened += 1
            found = weights.mapped(a.view("weights.safetensors"), a.manifest.get("rows"))
            for t in found.values():
                t.numel() < 10_000 and t.clone()  # all of it can be read
            read += 1
        except PackageError:
            pass
        except BaseException:
            print(f"damage {i}: {what}")
            raise
    assert slowest < 5
    assert (opened, read) == (0, 0) if not repair else opened > read > 500
