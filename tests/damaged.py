"""Packages, damaged: at random, and so that only the one thing that was changed is wrong.

``damage(data, rng, repair)`` takes a package's bytes and returns others, and what was done to them. With ``repair``,
what was changed is the manifest, a header or a member, and every size and digest that follows from it is made right
again: what a reader finds wrong then is what it checks beyond digests.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reflib.package import archive

NAMES = [
    "", "/etc/passwd", "../x", "a/../b", "a//b", "a\\b", "C:x", "a\0b", "é", "./a", "a/", "manifest.json", "x" * 2000,
    "weights", "a", "new.so",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 63, 64, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "0", "x" * 5000, "\0", "\ud800", "ü", "../x", "float32",
    "int8", "F32", [], {}, [[]], [0], [-1], [2**62, 2**62], {"a": 1}, {"_": "float", "value": "nan"}, *NAMES,
]  # fmt: skip


@dataclass
class Parts:
    """What a package is made of. ``members``: those beside the manifest, in the file's order. ``packed``: what lies in
    the file for a compressed member, where that is not what its contents compress to."""

    manifest: Any
    members: list[tuple[str, bytes]]
    packed: dict[str, bytes] = field(default_factory=dict)


def take_apart(data: bytes) -> Parts:
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        members = [(i.filename, z.read(i)) for i in z.infolist() if i.filename != archive.MANIFEST]
        return Parts(json.loads(z.read(archive.MANIFEST)), members)


def put_together(parts: Parts) -> bytes:
    """The package of these parts, however wrong. Its "entries" are made anew."""
    rows = [vars(entry(name, content, parts.packed.get(name))) for name, content in parts.members]
    return with_manifest(parts, text({**parts.manifest, "entries": rows}))


def with_manifest(parts: Parts, manifest: bytes) -> bytes:
    """The package of these members and this text, with all digests that lie outside of it."""
    contents = [*parts.members, (archive.MANIFEST, manifest)]
    places = archive.layout([entry(name, content, parts.packed.get(name)) for name, content in contents])
    lie = [parts.packed.get(name, in_file(name, content)) for name, content in contents]
    return b"".join(archive.head(p) + data for p, data in zip(places, lie)) + archive.tail(places)


def entry(name: str, content: bytes, packed: bytes | None = None) -> archive.Entry:
    data = in_file(name, content) if packed is None else packed
    return archive.Entry(name, len(data), len(content), hashlib.sha256(data).hexdigest(), zlib.crc32(content))


def in_file(name: str, content: bytes) -> bytes:
    """What lies in the file for a member."""
    if archive.method(name) == 0:
        return content
    packer = zlib.compressobj(archive.LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def text(manifest: Any) -> bytes:
    """JSON as archive.dump writes it, for what it refuses too."""
    return json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")


def headers(data: bytes) -> list[tuple[str, int, int]]:
    """(what, start, size) of every header in the file: "local" and "directory", a member each, then "end"."""
    out = []
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        at = z.start_dir
        for i in z.infolist():
            n, e = struct.unpack_from("<2H", data, i.header_offset + 26)
            out.append(("local", i.header_offset, 30 + n + e))
        for _ in z.infolist():
            n, e, c = struct.unpack_from("<3H", data, at + 28)
            out.append(("directory", at, 46 + n + e + c))
            at += out[-1][2]
    return [*out, ("end", at, len(data) - at)]


def damage(data: bytes, rng: random.Random, repair: bool) -> tuple[bytes, str]:
    """Other bytes, and what was done."""
    if not repair:
        return _raw(data, rng)
    kinds: list[Callable[[bytes, random.Random], tuple[bytes, str]]]
    kinds = [_manifest, _manifest, _manifest, _manifest_text, _header, _weights, _content, _members, _stream]
    while True:
        new, what = rng.choice(kinds)(data, rng)
        if new != data:
            return new, what


# -- without repair ---------------------------------------------------------------------------------
def _raw(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    out = bytearray(data)
    kind = rng.choice(["flip", "set", "cut", "drop", "double", "insert", "zero", "swap", "field"])
    # half of all damage is where the structure is
    a = rng.randrange(len(out)) if rng.random() < 0.5 else rng.choice(headers(data))[1] + rng.randrange(30)
    b = min(len(out), a + rng.choice([1, 2, 4, 8, 30, 64, 500]))
    if kind == "flip":
        out[a] ^= 1 << rng.randrange(8)
    elif kind == "set":
        out[a:b] = rng.randbytes(b - a)
    elif kind == "cut":
        del out[a:]
    elif kind == "drop":
        del out[a:b]
    elif kind == "double":
        out[a:a] = out[a:b]
    elif kind == "insert":
        out[a:a] = rng.randbytes(b - a)
    elif kind == "zero":
        out[a:b] = bytes(b - a)
    elif kind == "swap":
        c = rng.randrange(len(out))
        out[a], out[c] = out[c], out[a]
    else:
        out[a : a + 4] = struct.pack("<I", rng.choice([0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, len(out)]))
    if out == data:
        out[a % len(out)] ^= 0xFF
        kind = "flip"
    return bytes(out), f"{kind} at {a}, to {b}"


# -- with repair ------------------------------------------------------------------------------------
def _manifest(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A value somewhere in the manifest."""
    parts = take_apart(data)
    manifest, what = mutate(parts.manifest, rng)
    return with_manifest(parts, text(manifest)), f"manifest: {what}"


def _manifest_text(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    parts = take_apart(data)
    out = bytearray(text(parts.manifest))
    a = rng.randrange(len(out))
    texts = [b"NaN", b"-", b"9" * 30, b"9" * 6000, b"1e999", b"\xff", b"[" * 3000, b"{", b'"', b"\n", b" ", b"\0"]
    new = rng.choice(texts)
    if rng.random() < 0.5:
        digits = [i for i, c in enumerate(out) if chr(c).isdigit()]
        a = rng.choice(digits or [a])
        out[a : a + 1] = new
    else:
        out[a : a + rng.choice([0, 1, 20])] = new
    return with_manifest(parts, bytes(out)), f"manifest's text: {new[:20]!r} at {a}"


def _header(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    what, start, size = rng.choice(headers(data))
    at = start + rng.randrange(min(size, 46))
    out = bytearray(data)
    n = rng.choice([1, 2, 4])
    out[at : at + n] = rng.choice([bytes(n), b"\xff" * n, rng.randbytes(n), b"\1".ljust(n, b"\0")])
    return bytes(out[: len(data)]), f"{what} header at {start}: {n} bytes at {at - start}"


def _weights(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The header of the weights' member."""
    parts = take_apart(data)
    found = [i for i, (name, _) in enumerate(parts.members) if archive.is_weights(name)]
    if not found:
        return data, "no weights"
    name, content = parts.members[found[0]]
    n = struct.unpack_from("<Q", content)[0]
    if rng.random() < 0.3:
        n2 = rng.choice([0, 1, n - 1, n + 1, n + 64, len(content), len(content) - 8, 2**31, 2**63, 2**64 - 1])
        parts.members[found[0]] = (name, struct.pack("<Q", n2) + content[8:])
        return put_together(parts), f"weights: header length {n2}"
    header, what = mutate(json.loads(content[8 : 8 + n]), rng)
    new = json.dumps(header).encode()
    new += b" " * (-(8 + len(new)) % 64)
    parts.members[found[0]] = (name, struct.pack("<Q", len(new)) + new + content[8 + n :])
    return put_together(parts), f"weights: header: {what}"


def _content(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    parts = take_apart(data)
    i = rng.randrange(len(parts.members))
    name, content = parts.members[i]
    out = bytearray(content)
    kind = rng.choice(["flip", "cut", "grow", "empty"])
    if kind == "flip" and out:
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del out[rng.randrange(len(out) + 1) :]
    elif kind == "grow":
        out += rng.randbytes(rng.choice([1, 63, 64, 4096]))
    else:
        out.clear()
    parts.members[i] = (name, bytes(out))
    return put_together(parts), f"{name}: {kind}"


def _stream(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """What a member is compressed to, its contents as they were; or one that unpacks to far more."""
    parts = take_apart(data)
    name, content = rng.choice([m for m in parts.members if archive.method(m[0])])
    out = bytearray(in_file(name, content))
    kind = rng.choice(["flip", "cut", "grow", "bomb", "random"])
    if kind == "flip":
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del out[rng.randrange(len(out)) :]
    elif kind == "grow":
        out += rng.randbytes(rng.choice([1, 64]))
    else:
        out = bytearray(in_file(name, bytes(1 << 24)) if kind == "bomb" else rng.randbytes(len(out)))
    parts.packed[name] = bytes(out)
    return put_together(parts), f"{name}, compressed: {kind}"


def _members(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    parts = take_apart(data)
    i = rng.randrange(len(parts.members))
    name, content = parts.members[i]
    kind = rng.choice(["rename", "remove", "double", "add", "order"])
    if kind == "rename":
        parts.members[i] = (rng.choice(NAMES), content)
    elif kind == "remove":
        del parts.members[i]
    elif kind == "double":
        parts.members.insert(i, (name, content))
    elif kind == "add":
        parts.members.append((rng.choice(NAMES), rng.randbytes(10)))
    else:
        rng.shuffle(parts.members)
    if rng.random() < 0.5:
        parts.members.sort()
    return put_together(parts), f"members: {kind} {name}"


def mutate(data: Any, rng: random.Random) -> tuple[Any, str]:
    """JSON data with one value changed, somewhere, and what was done."""
    data = copy.deepcopy(data)
    node, path = data, "$"
    while isinstance(node, (dict, list)) and node:
        key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
        child = node[key]
        path += f".{key}"
        if not (isinstance(child, (dict, list)) and child) or rng.random() < 0.15:
            return data, f"{path}: {_change(node, key, rng)}"
        node = child
    return rng.choice(VALUES), path


def _change(node: Any, key: Any, rng: random.Random) -> str:
    kind = rng.choice(["value", "value", "near", "near", "remove", "double", "rename"])
    value = node[key]
    if kind == "near" and type(value) is int:
        node[key] = value + rng.choice([-64, -8, -1, 1, 4, 64, value])
    elif kind == "near" and isinstance(value, list):
        node[key] = rng.choice([value[::-1], value[1:], value * 2, [*value, rng.choice(VALUES)]])
    elif kind == "near" and isinstance(value, str) and value:
        i = rng.randrange(len(value))
        node[key] = value[:i] + rng.choice(["", "a", "0", "/", "\n", "é"]) + value[i + 1 :]
    elif kind == "remove":
        del node[key]
    elif kind == "double" and isinstance(node, list):
        node.insert(key, copy.deepcopy(value))
    elif kind == "rename" and isinstance(node, dict):
        node[rng.choice(["a", "name", "entries", "rows", key + "x"])] = node.pop(key)
    else:
        kind = "value"
        node[key] = copy.deepcopy(rng.choice(VALUES))
        return f"{kind} {str(node[key])[:40]!r}"
    return kind
