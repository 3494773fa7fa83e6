"""Portable tables of decisions: which candidate won, by device model, op and sizes, as JSON.

Format::

    {"format": 1, "entries": [
        {"device": "NVIDIA H200", "op": "aten.addmm", "sizes": "x[32, 4096] w[4096, 32]", "dtypes": "float16 float16",
         "winner": "triton tiled 64x64x32 w4 s3", "time_us": 5.1, "default": "aten", "default_us": 6.9,
         "versions": {"torch": "2.13.0"}, "date": "2026-07-01T12:00:00+00:00"}]}

``device``, ``op``, ``sizes`` and ``winner`` must be there. Two entries are about the same when device (``*``: any), op
and sizes are, and dtypes and epilogue where both say them. Names of tensors and of run-time sizes do not count:
``x[s0, 64]`` and ``arg0_1[s33, 64]`` are the same. Where several size ranges have winners of their own, ``winner`` has
them all, in order: ``a | b``.

A table comes from elsewhere, so every value is checked before any is used, and a name found in it is only ever
*compared* with the names of candidates that the compiler made itself (``chosen``). None reaches a source text.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import OptionError, ReflibError
from .logs import get as logger

FORMAT = 1
LARGEST = 64 * 2**20  # bytes of a file
ANY = "*"  # the device of an entry that holds for all
BETWEEN = " | "  # winners of ranges


class TableError(ReflibError, ValueError):
    """A table of decisions is not usable. The message names the file, the entry's number (from 1) and the key."""


# -- entries ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entry:
    """One decision. ``time_us``, ``default_us``: microseconds a call of the winner and of the default, None if not
    known. ``epilogue``: what was fused behind it; an entry with another still counts, after those with the same.
    ``date``: ISO 8601, empty if not known."""

    device: str
    op: str
    sizes: str
    winner: str
    dtypes: str = ""
    epilogue: str = ""
    time_us: float | None = None
    default: str = ""
    default_us: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    @cached_property
    def key(self) -> tuple[str, str, str, str, str]:
        """What it is about: entries with equal keys say the same or contradict each other."""
        return (
            device_key(self.device), op_key(self.op), sizes_key(self.sizes), dtypes_key(self.dtypes), self.epilogue
        )  # fmt: skip

    @property
    def when(self) -> datetime:
        return _moment(self.date) if self.date else datetime.min.replace(tzinfo=UTC)


def device_key(device: str) -> str:
    return " ".join(device.split()).casefold()


def op_key(op: str) -> str:
    """``aten::mm``, ``aten.mm`` and ``aten.mm.default`` are one op."""
    return op.replace("::", ".").removesuffix(".default")


def dtypes_key(dtypes: str) -> str:
    return " ".join(word.removeprefix("torch.") for word in dtypes.split())


_TENSOR = re.compile(r"[\s,;]*[^\s\[\]]*\[([\w\s+*/%().,-]*)\]\s*", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_]\w*(?!\w|\s*\()", re.ASCII)


@functools.lru_cache(4096)
def sizes_key(sizes: str) -> str:
    """``x[s33, 64] w[64, 32]`` without names: ``[s0,64][64,32]``. Raises ValueError for what is no list of shapes."""
    out: list[str] = []
    at = 0
    while at < len(sizes.rstrip()):
        m = _TENSOR.match(sizes, at)
        if m is None:
            raise ValueError(f"{sizes!r} is not a list of shapes such as 'x[32, 4096] w[4096, 32]'")
        out.append("[" + "".join(m.group(1).split()) + "]")
        at = m.end()
    names: dict[str, str] = {}
    return _SYMBOL.sub(lambda m: names.setdefault(m.group(), f"s{len(names)}"), "".join(out))


def _moment(date: str) -> datetime:
    moment = datetime.fromisoformat(date)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


# -- tables -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Table:
    """Entries, and finding the one that fits."""

    entries: tuple[Entry, ...] = ()

    @cached_property
    def _index(self) -> dict[tuple[str, str], list[Entry]]:
        out: dict[tuple[str, str], list[Entry]] = {}
        for e in self.entries:
            out.setdefault((e.key[1], e.key[2]), []).append(e)
        return out

    def entry(self, device: str, op: str, sizes: str, dtypes: str = "", epilogue: str = "") -> Entry | None:
        """The entry that fits best: its own device before ``*``, then equal dtypes, then an equal epilogue, then the
        newest, then the last. None if there is none, or ``sizes`` is no list of shapes."""
        found = self.ranked(lambda e: e.key[0] == device_key(device), op, sizes, dtypes, epilogue)
        return found[0] if found else None

    def ranked(
        self, own: Callable[[Entry], bool], op: str, sizes: str, dtypes: str = "", epilogue: str = ""
    ) -> list[Entry]:
        """All entries that fit, the best first, as ``entry`` has it. ``own``: is this one of the device?"""
        try:
            around = self._index.get((op_key(op), sizes_key(sizes)), [])
        except ValueError:
            return []
        dtypes = dtypes_key(dtypes)

        def rank(item: tuple[int, Entry]) -> tuple[bool, bool, bool, datetime, int]:
            at, e = item
            return (own(e), e.key[3] == dtypes, e.key[4] == epilogue, e.when, at)

        fitting = [
            (at, e)
            for at, e in enumerate(around)
            if (own(e) or e.key[0] == ANY) and (not dtypes or e.key[3] in (dtypes, ""))
        ]
        return [e for _, e in sorted(fitting, key=rank, reverse=True)]

    def find(self, device_model: str, op: str, sizes: str, dtypes: str = "", epilogue: str = "") -> str | None:
        """The winner's name, to be compared with names of candidates (``chosen``) and for nothing else; or None."""
        found = self.entry(device_model, op, sizes, dtypes, epilogue)
        return None if found is None else found.winner

    def on(self, device: str) -> Table:
        """The entries for a device model, as they name it."""
        return Table(tuple(e for e in self.entries if e.key[0] == device_key(device)))

    def devices(self) -> dict[str, int]:
        """How many entries each device model has, by its name."""
        return dict(sorted(Counter(e.device for e in self.entries).items()))

    def to_data(self) -> dict[str, Any]:
        """The table as JSON data, in a fixed order; what is not known is left out."""
        entries = sorted(self.entries, key=lambda e: (e.key, e.when, e.winner))
        return {"format": FORMAT, "entries": [{k: v for k, v in _plain(e).items() if v not in ("", None, {})
                or k in _NEEDED} for e in entries]}  # fmt: skip

    def to_text(self) -> str:
        """The table as the text of a file."""
        return json.dumps(self.to_data(), indent=1, ensure_ascii=False) + "\n"


def _plain(e: Entry) -> dict[str, Any]:
    return {name: dict(e.versions) if name == "versions" else getattr(e, name) for name in _FIELDS}


def merge(tables: Iterable[Table], how: str = "newest") -> tuple[Table, list[str]]:
    """One table with one entry for each thing decided, and a line for each whose winners differed.

    how: which entry stays: ``newest``, or ``fastest`` by ``time_us`` (by date where a time is missing). A later table
    wins a tie.
    """
    if how not in ("newest", "fastest"):
        raise TableError(f"cannot merge by {how!r}: it is 'newest' or 'fastest'")
    kept: dict[tuple[str, ...], Entry] = {}
    conflicts: list[str] = []
    for e in (e for t in tables for e in t.entries):
        other = kept.setdefault(e.key, e)
        if other is e:
            continue
        stays, goes = (e, other) if _better(e, other, how) else (other, e)
        kept[e.key] = stays
        if stays.winner != goes.winner:
            conflicts.append(f"{e.device}, {e.op} {e.sizes}: {_said(stays)} stays, {_said(goes)} goes")
    return Table(tuple(kept.values())), conflicts


def _better(e: Entry, other: Entry, how: str) -> bool:
    """Does ``e``, which comes later, replace ``other``?"""
    if how == "fastest" and e.time_us is not None and other.time_us is not None and e.time_us != other.time_us:
        return e.time_us < other.time_us
    return e.when >= other.when


def _said(e: Entry) -> str:
    time = "" if e.time_us is None else f"{e.time_us:.4g} us"
    known = ", ".join(filter(None, (time, e.date[:10])))
    return f"{e.winner} ({known})" if known else e.winner


# -- reading ----------------------------------------------------------------------------------------
_LENGTHS = {
    "device": 200, "op": 300, "sizes": 2000, "dtypes": 300, "epilogue": 1000, "winner": 2000, "default": 300,
    "date": 40,
}  # fmt: skip
_NEEDED = ("device", "op", "sizes", "winner")
_NUMBERS = ("time_us", "default_us")
_FIELDS = (
    "device", "op", "sizes", "dtypes", "epilogue", "winner", "time_us", "default", "default_us", "versions", "date",
)  # fmt: skip


def load_table(source: str | os.PathLike[str] | Mapping[str, Any], name: str = "") -> Table:
    """The table in a file, or in data as ``json.load`` gives it; ``name``: what messages call it.
    Raises TableError: all of it is valid, or nothing is returned."""
    if isinstance(source, Mapping):
        return _table(source, name or "the table")
    path = Path(source)
    try:
        if path.is_file() and path.stat().st_size > LARGEST:
            raise TableError(_too_large(str(path)))
        with open(path, "rb") as f:
            data = f.read(LARGEST + 1)  # what is no file (a pipe) has no size
    except OSError as e:
        raise TableError(f"cannot read the table {path}: {e.strerror or e}") from e
    return parse_table(data, name or str(path))


def parse_table(text: bytes | str, name: str) -> Table:
    """The table in the text of a file. Raises TableError."""
    if len(text) > LARGEST:
        raise TableError(_too_large(name))
    return _table(_parsed(text, name), name)


def _too_large(name: str) -> str:
    return f"{name} has more than {LARGEST // 2**20} MB, and no table of decisions has: is it the right file?"


def _parsed(text: bytes | str, name: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for k, v in pairs:
            if k in out:
                raise ValueError(f"the key {k!r:.80} is there twice")
            out[k] = v
        return out

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON number")

    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as e:
        why = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise TableError(f"{name} is not JSON: {why}; `reflib tune export` writes such a table") from e


def _table(data: Any, name: str) -> Table:
    if not isinstance(data, Mapping) or "format" not in data:
        raise TableError(f'{name} is not a table of decisions: there is no "format"; `reflib tune export` writes one')
    if data["format"] != FORMAT or isinstance(data["format"], bool):
        raise TableError(f"{name} has format {data['format']!r:.80}; this version of reflib reads format {FORMAT}")
    more = [k for k in data if k not in ("format", "entries")]
    if more:
        raise TableError(f"{name}: unknown key {more[0]!r:.80}; a table has 'format' and 'entries'")
    entries = data.get("entries")
    if not isinstance(entries, (list, tuple)):
        raise TableError(f"{name}: key 'entries': must be a list")
    return Table(tuple(entry_of(e, f"{name}: entry {i}") for i, e in enumerate(entries, 1)))


def entry_of(data: Any, where: str) -> Entry:
    """An Entry from JSON data, checked. Raises TableError whose message starts with ``where``."""
    if not isinstance(data, Mapping):
        raise TableError(f"{where}: must be an object with the keys {', '.join(_NEEDED)}")
    for k in data:
        if k not in _FIELDS:
            near = difflib.get_close_matches(str(k)[:80], _FIELDS, n=1)
            raise TableError(f"{where}: unknown key {k!r:.80}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for k in _NEEDED:
        if k not in data:
            raise TableError(f"{where}: key {k!r}: is missing")
    values = {k: _value(k, v, f"{where}: key {k!r}") for k, v in data.items()}
    return Entry(**values)


def _value(key: str, value: Any, where: str) -> Any:
    if key in _NUMBERS:
        return _number(value, where)
    if key == "versions":
        if not isinstance(value, Mapping) or len(value) > 20:
            raise TableError(f"{where}: must be an object of at most 20 names and versions")
        return {_text(k, 40, where): _text(v, 200, where) for k, v in value.items()}
    text = _text(value, _LENGTHS[key], where)
    if key in _NEEDED and key != "sizes" and not text.strip():
        raise TableError(f"{where}: must not be empty")
    try:
        if key == "sizes":
            sizes_key(text)
        elif key == "date" and text:
            _moment(text)
    except ValueError as e:
        raise TableError(f"{where}: {e}") from e
    if key == "dtypes" and not re.fullmatch(r"[\w. ]*", text, re.ASCII):
        raise TableError(f"{where}: {text!r} is not a list of dtypes such as 'float16 float16'")
    return text


def _text(value: Any, most: int, where: str) -> str:
    """Printable and of a reasonable length: it will be shown in terminals and logs."""
    if not isinstance(value, str):
        raise TableError(f"{where}: {value!r:.80} must be a text")
    if len(value) > most:
        raise TableError(f"{where}: has {len(value)} characters, at most {most} are allowed")
    if not value.isprintable():
        bad = next(c for c in value if not c.isprintable())
        raise TableError(f"{where}: must not contain the character {bad!r}")
    return value


def _number(value: Any, where: str) -> float | None:
    """Microseconds."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise TableError(f"{where}: {value!r:.80} must be a time in microseconds")
    return value if math.isfinite(value) else None


# -- using what was found ---------------------------------------------------------------------------
def chosen(winner: str, names: Sequence[str], ranges: int = 1, where: str = "a table") -> tuple[str, ...] | None:
    """A winner's name from a table as names of candidates, one a range; None, and a line in the log that names the
    nearest, if one of them is not among ``names``, the candidates there are. One name serves all ranges."""
    wanted = [winner] if winner in names else winner.split(BETWEEN)
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            _say_once(f"{where} says {name!r}, which is not among the {len(names)} candidates, so it does not count; "
                      f"the nearest is {', '.join(near) or 'none'}")  # fmt: skip
            return None
    if len(wanted) not in (1, ranges):
        _say_once(f"{where} says {winner!r}, for {len(wanted)} ranges; there are {ranges}, so it does not count")
        return None
    return tuple(wanted) * (ranges if len(wanted) == 1 else 1)


@functools.lru_cache(1024)
def _say_once(message: str) -> None:
    logger("tuning").warning("%s", message)


# -- the option lookup_table ------------------------------------------------------------------------
_LOOKUP = "option lookup_table"
_EXPECTED = "it takes the path of a table (`reflib tune export` writes one) or a mapping {op: {sizes: winner}}"


def normalize_lookup(value: Any) -> str:
    """A value of the option as one canonical text, which is itself such a value; empty for None and empty ones.

    value: the path of a table, or ``{op: {sizes: winner}}``, which holds for any device. The file is read here, once:
    what it says later does not count. Raises OptionError.
    """
    if value is None or (isinstance(value, (str, Mapping)) and not value):
        return ""
    try:
        table, _ = merge([_given(value)])
    except TableError as e:
        raise OptionError(f"{_LOOKUP}: {e}; {_EXPECTED}") from e
    kept = ("device", "op", "sizes", "winner", "dtypes", "epilogue", "date")  # of two models' entries the newer counts
    plain = Table(tuple(Entry(**{k: getattr(e, k) for k in kept}) for e in table.entries))
    return json.dumps(plain.to_data(), sort_keys=True, separators=(",", ":")) if plain.entries else ""


def _given(value: Any) -> Table:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return parse_table(value, "the text")
    if isinstance(value, (str, os.PathLike)):
        return load_table(value)
    if not isinstance(value, Mapping):
        raise TableError(f"{value!r:.80} is neither")
    if "format" in value:
        return load_table(value)
    entries = []
    for op, by_sizes in value.items():
        if not isinstance(by_sizes, Mapping):
            raise TableError(f"the value of op {op!r:.80} must be a mapping {{sizes: winner}}")
        for sizes, winner in by_sizes.items():
            data = {"device": ANY, "op": op, "sizes": sizes, "winner": winner}
            entries.append(entry_of(data, f"op {op!r:.80}, sizes {sizes!r:.80}"))
    return Table(tuple(entries))


def lookup(text: str, device_model: str, op: str, sizes: str, dtypes: str = "", epilogue: str = "") -> str | None:
    """What the option's text (``normalize_lookup``) says; None if nothing. For ``chosen``, as ``Table.find``."""
    return lookup_entries(text).find(device_model, op, sizes, dtypes, epilogue) if text else None


@functools.lru_cache(8)
def lookup_entries(text: str) -> Table:
    """The option's text as a table."""
    return parse_table(text, _LOOKUP) if text else Table()
