"""Portable tables of decisions: which candidate won, by device model, op and sizes, as JSON.

Format::

    {"format": 1, "entries": [
        {"device": "NVIDIA H200", "op": "aten.addmm", "sizes": "x[32, 4096] w[4096, 32]", "dtypes": "float16 float16",
         "winner": "triton tiled 64x64x32 w4 s3", "time_us": 5.1, "default": "aten", "default_us": 6.9,
         "versions": {"torch": "2.13.0"}, "date": "2026-07-01T12:00:00+00:00"}]}

``device``, ``op``, ``sizes`` and ``winner`` are required. Two entries are about the same thing when device (``*``:
any), op and sizes are equal, and dtypes and epilogue where both give them. Names of tensors and of run-time sizes do
not count: ``x[s0, 64]`` and ``arg0_1[s33, 64]`` are the same. Where several size ranges have winners of their own,
``winner`` is a list: one name for each range, in order.

A table comes from elsewhere, so every value is checked before any is used, and a name in it is only ever *compared*
with the names of candidates that the compiler made itself (``chosen``). None reaches a source text.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from . import atomic
from .errors import OptionError, ReflibError, did_you_mean
from .logs import get as logger

FORMAT = 1
LONGEST = 2000  # characters of a text in an entry
ANY = "*"  # the device of an entry that holds for all
Winner = str | tuple[str, ...]  # a candidate's name; for several ranges, one name for each


class TableError(ReflibError, ValueError):
    """A table of decisions is not usable. The message names the file, the entry's number (from 1) and the key."""


# -- entries ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entry:
    """One decision. ``time_us``, ``default_us``: microseconds per call of the winner and of the default, None if not
    known. ``epilogue``: what was fused behind it; an entry with another one still counts, after those with the same.
    ``date``: ISO 8601, empty if not known."""

    device: str
    op: str
    sizes: str
    winner: Winner
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

    @property
    def winner_text(self) -> str:
        return self.winner if isinstance(self.winner, str) else " | ".join(self.winner)

    def to_data(self) -> dict[str, Any]:
        """As JSON data; what is not known is left out."""
        data = {name: getattr(self, name) for name in _ORDER}
        data |= {"winner": list(self.winner) if isinstance(self.winner, tuple) else self.winner}
        return {k: v for k, v in data.items() if v not in ("", None, {}) or k in _NEEDED}


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

    def ranked(
        self, own: Callable[[Entry], bool], op: str, sizes: str, dtypes: str = "", epilogue: str = ""
    ) -> list[Entry]:
        """All entries that fit, the best first: the device's ``own`` before ``*``, then equal dtypes, then an equal
        epilogue, then the newest, then the last. None if ``sizes`` is no list of shapes."""
        try:
            about = op_key(op), sizes_key(sizes)
        except ValueError:
            return []
        dtypes = dtypes_key(dtypes)
        fitting = [
            e for e in self.entries
            if e.key[1:3] == about and (own(e) or e.key[0] == ANY) and (not dtypes or e.key[3] in (dtypes, ""))
        ]  # fmt: skip
        return sorted(fitting, key=lambda e: (own(e), e.key[3] == dtypes, e.key[4] == epilogue, e.when))[::-1]

    def find(self, device_model: str, op: str, sizes: str, dtypes: str = "", epilogue: str = "") -> Winner | None:
        """The winner of the entry that fits best, to be compared with names of candidates (``chosen``) and for nothing
        else; or None."""
        found = self.ranked(lambda e: e.key[0] == device_key(device_model), op, sizes, dtypes, epilogue)
        return found[0].winner if found else None

    def on(self, device: str) -> Table:
        """The entries for a device model, as they name it."""
        return Table(tuple(e for e in self.entries if e.key[0] == device_key(device)))

    def devices(self) -> dict[str, int]:
        """How many entries each device model has, by its name."""
        return dict(sorted(Counter(e.device for e in self.entries).items()))

    def to_data(self) -> dict[str, Any]:
        """The table as JSON data, in a fixed order; what is not known is left out."""
        entries = sorted(self.entries, key=lambda e: (e.key, e.when, e.winner_text))
        return {"format": FORMAT, "entries": [e.to_data() for e in entries]}

    def to_text(self) -> str:
        """The table as the text of a file."""
        return json.dumps(self.to_data(), indent=1, ensure_ascii=False) + "\n"

    def shown(self, source: Callable[[Entry], str], op: str = "") -> str:
        """The entries whose op contains ``op`` as a text of aligned columns, sorted, for people; empty if there are
        none. ``source``: the text of the last column."""
        found = sorted((e for e in self.entries if op_key(op) in op_key(e.op)), key=lambda e: e.key)
        lines = [_HEADS, *((*_cells(e), source(e)) for e in found)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths)).rstrip() for line in lines)
        return text if found else ""


_HEADS = ("op", "sizes", "winner", "us", "default", "default us", "device", "date", "from")


def _cells(e: Entry) -> tuple[str, ...]:
    sizes = " ".join(filter(None, (e.sizes, e.dtypes)))
    us, default_us = ("-" if t is None else f"{t:.4g}" for t in (e.time_us, e.default_us))
    return e.op, sizes, e.winner_text, us, e.default or "-", default_us, e.device, e.date[:10] or "-"


def merge(tables: Iterable[Table], how: str = "newest") -> tuple[Table, list[str]]:
    """One table with one entry for each thing decided, and a line for each whose winners differed.

    how: which entry stays: ``newest``, or ``fastest`` by ``time_us`` (by date where a time is missing). A later table
    wins a tie.
    """
    if how not in ("newest", "fastest"):
        raise TableError(f"cannot merge by {how!r:.200}: it is 'newest' or 'fastest'")
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
    return f"{e.winner_text} ({known})" if known else e.winner_text


# -- files ------------------------------------------------------------------------------------------
_ORDER = tuple(f.name for f in fields(Entry))
_NEEDED = ("device", "op", "sizes", "winner")


def load_table(source: str | os.PathLike[str] | Mapping[str, Any], name: str = "") -> Table:
    """The table in a file (``-``: in standard input), or in data as ``json.load`` returns it; ``name``: what messages
    call it. Raises TableError: all of it is valid, or nothing is returned."""
    if isinstance(source, Mapping):
        return _table(source, name or "the table")
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as e:
        raise TableError(f"cannot read the table {source}: {e.strerror or e}") from e
    return parse_table(data, name or ("standard input" if source == "-" else str(source)))


def write_table(table: Table, file: str) -> None:
    """Write a table; ``-``: to standard output. A file is written whole or left as it was. Raises TableError."""
    data = table.to_text().encode()
    if file == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        atomic.write(file, data)
    except OSError as e:
        raise TableError(f"cannot write the table {file}: {e.strerror or e}") from e


def parse_table(text: bytes | str, name: str) -> Table:
    """The table in the text of a file. Raises TableError."""
    try:
        data = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError) as e:
        raise TableError(f"{name} is not JSON: {e}; `reflib tune export` writes such a table") from e
    return _table(data, name)


# -- checking ---------------------------------------------------------------------------------------
def _table(data: Any, name: str) -> Table:
    if not isinstance(data, Mapping) or "format" not in data:
        raise TableError(f'{name} is not a table of decisions: there is no "format"; `reflib tune export` writes one')
    if data["format"] != FORMAT or isinstance(data["format"], bool):
        raise TableError(f"{name} has format {data['format']!r:.80}; this version of reflib reads format {FORMAT}")
    if more := [k for k in data if k not in ("format", "entries")]:
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
        if k not in _ORDER:
            hint = did_you_mean(str(k)[:80], _ORDER)
            raise TableError(f"{where}: unknown key {k!r:.80}{hint and f'; {hint}'}")
    for k in _NEEDED:
        if k not in data:
            raise TableError(f"{where}: key {k!r}: is missing")
    values = {}
    for k, v in data.items():
        try:
            values[k] = _checked(k, v)
        except ValueError as e:
            raise TableError(f"{where}: key {k!r}: {e}") from e
    return Entry(**values)


def _checked(key: str, value: Any) -> Any:
    """The value of an entry's ``key``. Raises ValueError."""
    if key in ("time_us", "default_us"):
        if value is None or type(value) in (int, float) and 0 <= value < 1e15:
            return value
        raise ValueError(f"{value!r:.80} must be a time in microseconds")
    if key == "versions":
        if not isinstance(value, Mapping):
            raise ValueError("must be an object of names and versions")
        return {_text(k): _text(v) for k, v in value.items()}
    if key == "winner" and isinstance(value, (list, tuple)) and value:
        return tuple(_checked(key, name) for name in value)
    text = _text(value)
    if key in ("device", "op", "winner") and not text.strip():
        raise ValueError("must not be empty")
    if key == "sizes":
        sizes_key(text)
    if key == "date" and text:
        _moment(text)
    return text


def _text(value: Any) -> str:
    """Printable and of a reasonable length: it will be shown in terminals and logs."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} must be a text")
    if len(value) > LONGEST:
        raise ValueError(f"has {len(value)} characters, at most {LONGEST} are allowed")
    if not value.isprintable():
        bad = next(c for c in value if not c.isprintable())
        raise ValueError(f"must not contain the character {bad!r}")
    return value


# -- using what was found ---------------------------------------------------------------------------
def chosen(winner: Winner, names: Sequence[str], ranges: int = 1, where: str = "a table") -> tuple[str, ...] | None:
    """A winner from a table as names of candidates, one for each range; a single name serves all ranges. None, and a
    line in the log with the nearest name, if one of them is not among ``names``, the candidates that exist."""
    wanted = (winner,) if isinstance(winner, str) else winner
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            _say_once(f"{where} has {name!r}, which is not among the {len(names)} candidates, so it does not count; "
                      f"the nearest is {', '.join(near) or 'none'}")  # fmt: skip
            return None
    if len(wanted) not in (1, ranges):
        _say_once(f"{where} has winners for {len(wanted)} ranges; there are {ranges}, so it does not count")
        return None
    return wanted * (ranges if len(wanted) == 1 else 1)


@functools.lru_cache(1024)
def _say_once(message: str) -> None:
    logger("tuning").warning("%s", message)


# -- the option lookup_table ------------------------------------------------------------------------
_LOOKUP = "option lookup_table"
_EXPECTED = "it takes the path of a table (`reflib tune export` writes one) or a mapping {op: {sizes: winner}}"


def normalize_lookup(value: Any) -> str:
    """A value of the option as one canonical text, which is itself such a value; empty for None and empty ones.

    value: the path of a table, or ``{op: {sizes: winner}}``, which holds for any device. The file is read here, once:
    later changes do not count. Raises OptionError.
    """
    if value is None or (isinstance(value, (str, Mapping)) and not value):
        return ""
    try:
        table, _ = merge([_given(value)])
    except TableError as e:
        raise OptionError(f"{_LOOKUP}: {e}; {_EXPECTED}") from e
    plain = Table(tuple(replace(e, time_us=None, default="", default_us=None, versions={}) for e in table.entries))
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


def lookup(text: str, device_model: str, op: str, sizes: str, dtypes: str = "", epilogue: str = "") -> Winner | None:
    """The winner in the option's text (``normalize_lookup``), as ``Table.find``; for ``chosen``."""
    return lookup_entries(text).find(device_model, op, sizes, dtypes, epilogue) if text else None


@functools.lru_cache(8)
def lookup_entries(text: str) -> Table:
    """The option's text as a table."""
    return parse_table(text, _LOOKUP) if text else Table()
