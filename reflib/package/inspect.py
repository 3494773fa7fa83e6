"""Describing a package without loading it: its contents, their sizes, and the code that each GPU would run.

Everything is read from the manifest and the sizes of the members; no code of the package is mapped as code, and weights
are read only to check their digest.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import torch

from ..models import generation, known_archs
from ..target import device_target
from . import archive, manifest
from .architectures import Driver, driver_of, shared_of, variant_for
from .manifest import KernelEntry, Manifest, PackagedVariant

# common GPUs, and their compute capabilities
GPUS = (
    ("T4", 75), ("A100", 80), ("RTX 3090, A10", 86), ("RTX 4090, L4", 89), ("H100, H200", 90), ("B200", 100),
    ("B300", 103), ("RTX 5090", 120), ("GB10", 121),
)  # fmt: skip
_SUFFIXES = {".so": "host code", ".cpp": "text of the host code", ".py": "text of the host code"}


def inspect(path: str | Path, verify: bool | str = True, model: str | None = None) -> Inspection:
    """The contents of the package at ``path``: data, which str() and a notebook show as tables. Loads no code.

    verify, model: as for :func:`reflib.load`; sizes are those of the whole file.

    Raises PackageError for a file that is no whole package.
    """
    with manifest.opened(path, verify, model=model) as (file, about):
        return Inspection(Path(path), Path(path).stat().st_size, about, file.manifest)


@dataclass(frozen=True)
class Table:
    """``note``: sentences below it, in lines."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


@dataclass(frozen=True)
class Inspection:
    """A package. ``size``: of the file, in bytes. ``manifest``: see ``manifest.py``; ``data``: its JSON.

    inputs: (name, dtype, shape, range, device) of each argument. kernels: {kernel: {variant: bytes}}, None for a CPU's,
        which are in one library. gpus: {GPU: the code that it would run, in words}.
    sizes: {what: bytes}, uncompressed; with "compression", which is negative, they add up to ``size``. overhead: bytes
        of the file without its weights per byte of machine code. tables: all of it, as text.
    """

    path: Path
    size: int
    manifest: Manifest
    data: Mapping[str, Any]

    @cached_property
    def inputs(self) -> list[tuple[str, str, str, str, str]]:
        programs = list(self.manifest.programs.values())
        ranges = {s: f"{s}: {_range(*r)}" for s, r in programs[0].ranges.items()}
        order = {s: i for i, s in enumerate(ranges)}
        rows = []
        for i, a in enumerate(programs[0].arguments):
            if a.tensor is None:
                rows.append((a.name, "no tensor", _value(a.value, ranges), "", ""))
                continue
            shape = f"[{', '.join(map(str, a.tensor.shape))}]"
            symbols = {s.name for e in a.tensor.shape for s in e.symbols()} & ranges.keys()
            limits = ", ".join(ranges[s] for s in sorted(symbols, key=order.__getitem__))
            there = [p.arguments[i].tensor for p in programs if i < len(p.arguments)]
            devices = {t.device.type for t in there if t is not None}
            rows.append((a.name, str(a.tensor.dtype).removeprefix("torch."), shape, limits, ", ".join(sorted(devices))))
        return rows

    @cached_property
    def kernels(self) -> dict[str, dict[str, int | None]]:
        out: dict[str, dict[str, int | None]] = {}
        for v in self.manifest.variants:
            for k in v.kernels:
                out.setdefault(k.name, {})[v.arch] = None if _in_library(k) else k.bytes
        return out

    def machine_code(self, variant: PackagedVariant) -> int:
        """Bytes of a variant's kernels (of PTX: text)."""
        libraries = {k.image for k in variant.kernels if _in_library(k)}
        return sum(k.bytes for k in variant.kernels) + sum(self._entries[name] for name in libraries)

    @cached_property
    def gpus(self) -> dict[str, str]:
        found = {f"{name} ({_dotted(number)})": self._runs(number, shared_of(number)) for name, number in GPUS}
        if torch.cuda.is_available():
            here = device_target("cuda", torch.cuda.current_device())
            said = "nothing: code for AMD GPUs is not run yet"
            if here.kind == "cuda":
                said = self._runs(here.capability, here.shared)
            found[f"this machine's {torch.cuda.get_device_name()} ({here.arch})"] = said
        return found

    @cached_property
    def sizes(self) -> dict[str, int]:
        text = sum(self.machine_code(v) for v in self.manifest.variants if v.arch == "ptx")
        code = sum(self.machine_code(v) for v in self.manifest.variants if v.arch != "ptx")
        out = {"machine code": code, "PTX": text, "containers": -code - text}
        out |= {"host code": 0, "text of the host code": 0, "compression": 0, "weights": 0}
        for e in self.manifest.entries:
            of_wrapper = _SUFFIXES.get(Path(e.name).suffix, "text of the host code")
            of_kernels = e.name.startswith("kernels/")
            of = "weights" if archive.is_weights(e.name) else "containers" if of_kernels else of_wrapper
            out[of] += e.unpacked
            out["compression"] += e.size - e.unpacked
        out["manifest"] = len(archive.dump(self.data))
        out["headers and padding"] = self.size - sum(out.values())
        return out

    @property
    def overhead(self) -> float:
        code = self.sizes["machine code"]
        return (self.size - self.sizes["weights"]) / code if code else math.inf

    @cached_property
    def _entries(self) -> dict[str, int]:
        return {e.name: e.unpacked for e in self.manifest.entries}

    def _runs(self, device: int, shared: int) -> str:
        v = variant_for(self.manifest, device, shared)
        if v is None:
            name = f"sm_{device}"
            remedy = f"archs=[..., {name!r}]" if name in known_archs() else "ptx=True"
            return f"nothing: rebuild with {remedy}"
        if v.arch != "ptx":
            return f"machine code {v.arch}"
        drivers = [Driver(*v.driver)] if v.driver else []  # that support the text; and the GPU
        drivers += [d] if (d := driver_of(device)) else []
        needed = f" ({max(drivers, key=lambda d: d.version).branch} or later)" if drivers else ""
        return f"PTX of {v.made_for}, compiled by the driver{needed}"

    # -- as tables ---------------------------------------------------------------------------------
    @cached_property
    def tables(self) -> tuple[Table, ...]:
        described = self._head(), self._inputs(), self._weights(), self._variants()
        made = *described, self._kernels(), self._gpus(), self._sizes()
        return tuple(t for t in made if t.rows)

    def _head(self) -> Table:
        m = self.manifest
        versions = ", ".join(f"{name} {v}" for name, v in m.versions.items())
        rows = [
            ("size", f"{self.size:,} bytes"), ("format", f"{m.format}, {_IMAGES.get(m.images, m.images)}"),
            ("built with", versions),
            ("host code", f"{m.system} on {m.machine}" + (f", glibc {m.libc}" if m.libc else "")),
            ("source", m.source),
            ("options", ", ".join(f"{k}={_short(v)}" for k, v in m.options.items()) or "the defaults"),
            ("Python", self._python()),
        ]  # fmt: skip
        if symbols := sorted({s for v in m.variants for s in v.symbols}):
            rows.append(("C functions", ", ".join(symbols)))
        rows += [("metadata", f"{name}: {text}") for name, text in m.metadata.items()]
        rows += [("library", f"{lib.op}: first {lib.remedy}") for lib in m.libraries]
        return Table(str(self.path.name), ("", ""), rows)

    def _python(self) -> str:
        """The ops for which host code needs an interpreter."""
        needed = {v.arch: sorted(set(v.needs.values())) for v in self.manifest.variants if v.needs}
        if not needed:
            return "no call needs it"
        return "; ".join(f"{arch} needs it for {', '.join(ops)}" for arch, ops in needed.items())

    def _inputs(self) -> Table:
        held = dict.fromkeys(said for p in self.manifest.programs.values() for said in p.conditions)
        note = "\n".join(f"holds of the sizes: {said}" for said in held)
        return Table("inputs", ("name", "dtype", "shape", "range", "device"), self.inputs, note)

    def _weights(self) -> Table:
        found: dict[tuple[str, str], list[int]] = {}
        for w in self.manifest.weights:
            found.setdefault((w.kind, w.dtype), []).append(w.bytes)
        rows = [(kind, dtype, f"{len(of):,}", f"{sum(of):,}") for (kind, dtype), of in sorted(found.items())]
        note = "Bytes of each tensor alone; tensors that share memory are in the file once."
        return Table("weights", ("kind", "dtype", "tensors", "bytes"), rows, note)

    def _variants(self) -> Table:
        rows = [
            (v.arch, generation(v.made_for), v.made_for, f"{len(v.kernels)}", f"{self.machine_code(v):,}",
             f"{self._entries[v.wrapper]:,}", f"{v.workspace:,}", self._needs(v))
            for v in self.manifest.variants
        ]  # fmt: skip
        heads = ("variant", "generation", "made for", "kernels", "their bytes", "host code", "workspace", "needs")
        found = ((v.arch, d, size) for v in self.manifest.variants for d, size in v.arena.items())
        arenas = [f"{arch}: an arena of {size} bytes on {d}" for arch, d, size in found]
        said = [f"{v.arch}: calls are not recorded: {v.unrecorded}" for v in self.manifest.variants if v.unrecorded]
        note = "\n".join(["Sizes in bytes. Variants with the same host code share it.", *arenas, *said])
        return Table("variants", heads, rows, note)

    def _needs(self, v: PackagedVariant) -> str:
        if v.arch.startswith("gfx"):
            return "not run yet"
        return ", ".join([*([f"driver {Driver(*v.driver)}"] if v.driver else []), *v.cpu])

    def _kernels(self) -> Table:
        archs = self.manifest.archs
        late = {k.name for v in self.manifest.variants for k in v.kernels if k.late}

        def cell(kernel: str, arch: str) -> str:
            size = self.kernels[kernel].get(arch, "")
            return "in .so" if size is None else f"{size:,}" if size != "" else "-"

        rows = [(f"{k} (late)" if k in late else k, *(cell(k, a) for a in archs)) for k in self.kernels]
        rows += [("all", *(f"{self.machine_code(v):,}" for v in self.manifest.variants))] if rows else []
        note = "Bytes of machine code; of ptx: of text."
        note += " Late ones are loaded when a call first needs them." if late else ""
        return Table("kernels", ("kernel", *archs), rows, note)

    def _gpus(self) -> Table:
        rows = list(self.gpus.items())
        here = platform.system(), platform.machine()
        host = self.manifest.system, self.manifest.machine
        for v in self.manifest.variants:
            if v.arch == "cpu":
                rows.append((f"a CPU ({host[1]})", "machine code" + (f" for {', '.join(v.cpu)}" if v.cpu else "")))
        note = "" if here == host else f"Its host code is for {host[0]} on {host[1]}, this is {here[0]} on {here[1]}."
        return Table("what runs where", ("GPU", "runs"), rows, note)

    def _sizes(self) -> Table:
        rows = [(what, f"{n:,}", f"{n / self.size:.1%}") for what, n in self.sizes.items()]
        rows.append(("all", f"{self.size:,}", ""))
        ratio = f"{self.overhead:.2f} times its machine code" if self.sizes["machine code"] else "all but machine code"
        note = f"Without its weights the file is {ratio}. Containers: what fatbins add, less what they compress."
        note += " Compression: bytes saved in the file."
        return Table("bytes", ("what", "bytes", "share"), rows, note)

    def __str__(self) -> str:
        return "\n\n".join(map(_text, self.tables))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(map(_html, self.tables))


_IMAGES = {"fatbin": "one fatbin per kernel", "table": "one member per kernel and architecture"}


def _in_library(k: KernelEntry) -> bool:
    return k.image.endswith(".so")


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _range(least: int, most: int | None) -> str:
    return f"{least:,} or more" if most is None else f"{least:,} to {most:,}"


def _value(value: Any, ranges: Mapping[str, str]) -> str:
    said = str(value)
    return f"any, as {ranges[said]}" if said in ranges else f"must be {value!r}"


# -- tables as text and as HTML -------------------------------------------------------------------------
def _numeric(column: tuple[str, ...]) -> bool:
    return all(re.fullmatch(r"-?[\d,.]*%?|in \.so", cell) for cell in column) and any(column)


def _text(t: Table) -> str:
    columns = list(zip(*t.rows, strict=True))
    widths = [max(map(len, (head, *c))) for head, c in zip(t.heads, columns, strict=True)]
    right = [_numeric(c) for c in columns]
    lines = [t.heads, *t.rows] if any(t.heads) else [*t.rows]
    made = ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right)) for line in lines]
    return "\n".join([f"== {t.title}", *map(str.rstrip, made), *([t.note] if t.note else [])])


def _html(t: Table) -> str:
    """With the colours of its surroundings. Wide tables scroll."""
    right = [_numeric(c) for c in zip(*t.rows, strict=True)]

    def cell(tag: str, text: str, at: int) -> str:
        # (words break only in columns of words)
        side = "right; white-space: nowrap" if right[at] else "left"
        return f'<{tag} style="text-align: {side}">{escape(text)}</{tag}>'

    head = "".join(cell("th", h, i) for i, h in enumerate(t.heads)) if any(t.heads) else ""
    body = "".join(
        "<tr>" + "".join(cell("td" if i else "th", c, i) for i, c in enumerate(row)) + "</tr>" for row in t.rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    note = "".join(f"<p>{escape(line)}</p>" for line in t.note.splitlines())
    table = f'<table class="dataframe" style="font-size: 0.9em">{head}<tbody>{body}</tbody></table>'
    return f'<p><b>{escape(t.title)}</b></p><div style="overflow-x: auto">{table}</div>{note}'
