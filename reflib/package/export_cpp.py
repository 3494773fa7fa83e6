"""A package as C++: a CMake project that needs neither Python nor reflib.

What a package holds is almost that already: wrappers are C++ text that is written in ``wrapper.h`` and asks for all
else through the tables of ``host.h``. The folder ``cpp/`` is another process's side of these tables, as ``wrap/host.c``
is Python's: a runtime of a few hundred lines, with tensors of its own, or PyTorch's where a wrapper calls ATen. Added
are the kernels as files, which one assembly file includes, the weights, and ``tables.cpp``: what the manifest says.

A project holds the arms for all GPUs of the package and picks one when it runs, by ``architectures.choose``'s rule; or
one arm. The same package gives the same files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import PackageError, ReflibError
from ..ir.data import decode
from ..ir.expr import Sym, expr
from ..wrap.aten import number
from ..wrap.cpp import DTYPES
from . import archive, describe, example, manifest, weights
from .architectures import capability
from .manifest import Arm, Manifest, Program

RUNTIME = Path(__file__).with_name("cpp")
WRAP = Path(__file__).parent.parent / "wrap"
MARKER = ".reflib-export"
MARK = "Written by reflib export-cpp: these files. Exporting into this folder again replaces it as a whole.\n"
KERNELS = """file(GLOB images ${CMAKE_CURRENT_SOURCE_DIR}/kernels/*)
set_source_files_properties(kernels.S PROPERTIES OBJECT_DEPENDS "${images}")
"""
NUMBERS = {str(d).removeprefix("torch."): n for d, n in DTYPES.items()}
_CALLS_ATEN = re.compile(r"\b(dispatch|call)\(run\b")
_PYTHON = re.compile(r"python_\d+_(note|expect_)?")


def export_cpp(path: str | os.PathLike[str], folder: str | os.PathLike[str], arch: str | None = None) -> Path:
    """Write the package at ``path`` as a CMake project into ``folder``, which is new, empty, or of an export before.

    arch: the arm to export. None: those for all GPUs; of a package without any, the one for CPUs.
    folder: an export of before is replaced, with what was changed in it and folders that CMake built in; but not if it
        has files of another's. A link to a folder stays one.

    Returns the folder. Raises PackageError for a package that cannot be read, or whose code needs Python, and for a
    folder that is not to be written to; what was there before is then still there.
    """
    try:
        target = Path(folder)
    except TypeError as e:
        raise PackageError(f"folder={folder!r:.80}: takes a str or a pathlib.Path, such as 'project'") from e
    file = archive.open(path)
    try:
        about = manifest.read(file.manifest)
        files = _Project(file, about, _arms(about, arch)).files()  # views, which last longer than the archive
    except PackageError as e:
        raise e if str(path) in str(e) else PackageError(f"{path}: {e}") from e
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ReflibError) as e:
        what = f"{path}: its manifest does not make sense ({type(e).__name__}: {e}): build it again"
        raise PackageError(what) from e
    finally:
        file.close()
    return _write(target, files)


# -- which arms ---------------------------------------------------------------------------------------------
def _arms(m: Manifest, arch: str | None) -> list[Arm]:
    if m.host != manifest.HOST:
        raise PackageError(f"it was built by another reflib ({m.versions.get('reflib', '?')}): build it again")
    there = [a for a in m.archs if not a.startswith("gfx")]
    if str(arch or "").startswith("gfx") or not there:
        raise PackageError(f"{arch or ', '.join(m.archs)}: reflib compiles for AMD GPUs but cannot run there yet")
    if arch is not None and arch not in there:
        raise PackageError(f"it has no arm {arch!r} to export; it has {', '.join(there)}")
    names = [arch] if arch is not None else [a for a in there if a != "cpu"] or there
    arms = [m.arm(a) for a in names]
    for arm in arms:
        for op in arm.needs.values():
            remedy = "register it in C++, or declare a function in C for it (option c_shims)"
            if arm.arch != "cpu" and op.startswith("aten.") and "+cpu" in m.versions.get("torch", ""):
                remedy = "build the package with a PyTorch for CUDA (no GPU is needed): it has functions in C for more"
            raise PackageError(f"its {arm.arch} arm needs Python for {op}, which a C++ program does not have: {remedy}")
    return arms


# -- what is written ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Kernels:
    """Files of machine code, in order: images for GPUs, by member; libraries for CPUs, by member: their new name."""

    images: list[str]
    libraries: dict[str, str]


class _Project:
    """The files of a project: ``files()``, by name."""

    def __init__(self, file: archive.Archive, m: Manifest, arms: Sequence[Arm]):
        self.file, self.m, self.arms = file, m, arms
        self.program: Program = m.programs[arms[0].program]
        self.name = re.sub(r"\W", "_", Path(file.path).stem, flags=re.ASCII) or "model"
        self.texts = {a.text: bytes(file.view(a.text)) for a in arms}
        self.wrappers = {a.text: a.arch for a in reversed(arms)}  # by text, the first arm's name
        self.kernels = self._kernels()
        called = [t.decode().partition("/* Called from above, in Python:")[0] for t in self.texts.values()]
        self.aten = any(a.symbols for a in arms) or any(map(_CALLS_ATEN.search, called))
        self.gpu = arms[0].arch != "cpu"
        self.weights = self._weights()
        self.sizes, self.sizes_hold = example.sizes(self.program)

    def files(self) -> dict[str, bytes | memoryview]:
        tensors = "tensors_torch.cpp" if self.aten else "tensors.cpp"
        out: dict[str, bytes | memoryview] = {}
        for name in ("model.h", "runtime.h", "model.cpp", "gpu.cpp", "main.cpp", tensors):
            out[name] = (RUNTIME / name).read_bytes()
        for name in ("wrapper.h", "host.h", "cuda_driver.h"):
            out[name] = (WRAP / name).read_bytes()
        for text, data in self.texts.items():
            out[self._wrapper(text)] = data
        for member in self.kernels.images:
            out[member] = self.file.view(member)
        for member, name in self.kernels.libraries.items():
            out[name] = self.file.view(member)
        if self.weights:
            out["weights.safetensors"] = self.file.view("weights.safetensors")
        if self.kernels.images:
            out["kernels.S"] = self._assembly().encode()
        if self.aten:
            out["torch.cmake"] = (RUNTIME / "torch.cmake").read_bytes()
        out["tables.cpp"] = _Tables(self).text().encode()
        out["CMakeLists.txt"] = self._cmake(tensors).encode()
        out["README.md"] = self._readme(tensors).encode()
        return out | {MARKER: "\n".join([MARK, *sorted(out), ""]).encode()}

    # -- names ----------------------------------------------------------------------------------
    def _wrapper(self, text: str) -> str:
        return "wrapper.cpp" if len(self.texts) == 1 else f"wrapper_{self.wrappers[text]}.cpp"

    def entry(self, arm: Arm) -> str:
        """What the arm's ``reflib_call`` is called here."""
        return "reflib_call" if len(self.texts) == 1 else f"reflib_call_{self.wrappers[arm.text]}"

    def _kernels(self) -> _Kernels:
        found = _Kernels([], {})
        for arm in self.arms:
            for k in arm.kernels:
                if not k.image.endswith(".so"):
                    if k.image not in found.images:
                        found.images.append(k.image)
                elif k.image not in found.libraries:
                    found.libraries[k.image] = f"kernels/{self.name}_kernels_{arm.arch}.so"
        return found

    def _weights(self) -> list[tuple[str, bool]]:
        """(name, on a GPU) of each that is needed."""
        p = self.program
        wanted = [(n, d) for n, d in zip(p.inputs, p.devices) if n]
        wanted += [c for a in self.arms for c in a.constants]
        return list(dict.fromkeys((name, device == "cuda") for name, device in wanted))

    # -- files ----------------------------------------------------------------------------------
    def _assembly(self) -> str:
        lines = ["/* The kernels' machine code, as it is in the files. */", "        .section .rodata"]
        for i, member in enumerate(self.kernels.images):
            lines += [f"        .globl image_{i}", f"        .hidden image_{i}", "        .balign 64",
                      f'image_{i}: .incbin "{member}"', "        .byte 0 /* ends a text */"]  # fmt: skip
        return "\n".join([*lines, '        .section .note.GNU-stack,"",%progbits', ""])

    def _cmake(self, tensors: str) -> str:
        sources = [*sorted(map(self._wrapper, self.texts)), *(["kernels.S"] if self.kernels.images else [])]
        several = len(self.texts) > 1
        entries = ["# Each wrapper defines reflib_call; here they have names of their own."] if several else []
        for a in self.arms:
            if self.wrappers[a.text] == a.arch:
                named = f" COMPILE_DEFINITIONS reflib_call={self.entry(a)}" if several else ""
                entries.append(f"set_source_files_properties({self._wrapper(a.text)} PROPERTIES\n"
                               f'  COMPILE_OPTIONS "-fwrapv;-fno-strict-aliasing"{named})')  # fmt: skip
        beside = [*self.kernels.libraries.values(), *(["weights.safetensors"] if self.weights else [])]
        copies = "".join(f"\n    ${{CMAKE_CURRENT_SOURCE_DIR}}/{name}" for name in beside)
        return _filled("CMakeLists.txt", {
            "NAME": self.name, "TENSORS": tensors, "SOURCES": "".join(f"  {s}\n" for s in sources).rstrip("\n"),
            "ENTRIES": "\n".join(entries),
            "KERNELS": KERNELS if self.kernels.images else "",
            "TORCH": "include(torch.cmake)\n" if self.aten else "",
            "BESIDE": "# What the library looks for beside itself.\nadd_custom_command(TARGET model POST_BUILD COMMAND "
            f"${{CMAKE_COMMAND}} -E copy_if_different{copies}\n    $<TARGET_FILE_DIR:model>)" if beside else "",
        })  # fmt: skip

    def _readme(self, tensors: str) -> str:
        texts = ", ".join(f"`{self._wrapper(t)}`" for t in sorted(self.texts, key=self._wrapper))
        files = []
        if self.kernels.images:
            files.append("| `kernels/`, `kernels.S` | machine code for GPUs, and what puts it into the library |")
        if self.kernels.libraries:
            files.append("| `kernels/*.so` | machine code for CPUs |")
        if self.weights:
            files.append("| `weights.safetensors` | parameters, buffers, constants; mapped, not read |")
        beside = [*(["weights.safetensors"] if self.weights else []), *(["kernels"] if self.kernels.libraries else [])]
        torch = "tensors that are PyTorch's" if self.aten else "tensors, without PyTorch"
        return _filled("README.md", {
            "NAME": self.name, "NEEDS": self._needs(), "RUNS": self._runs(), "CALLED": self._called(),
            "CMAKE_MORE": ' -DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")'
            if self.aten else "",
            "BELONGS": f" ({', '.join(beside)})" if beside else "",
            "WRAPPERS": f"| {texts} | the model: its kernels and calls, in order, as reflib printed it |",
            "FILES": "\n".join(files), "TENSORS": tensors, "TENSORS_SAY": torch,
        }).replace("\n\n\n", "\n\n")  # fmt: skip

    def _needs(self) -> str:
        build, run = ["CMake 3.18", "a C++17 compiler"], ["a driver of NVIDIA's, no CUDA toolkit"] if self.gpu else []
        if self.aten:
            version = self.m.versions.get("torch", "?").partition("+")[0]
            build.append(f"PyTorch 2.11 or later (built with {version}), for the model calls ATen")
            run.append("PyTorch's libraries")
        what = [f"To build it: {', '.join(build)}.", f"To run it: {'; '.join(run) or 'nothing else'}."]
        called = b"".join(self.texts.values()).decode()
        for lib in self.m.libraries:
            if f'"{lib.op.partition(".")[0]}::' in called:
                what.append(f"A library of its own registers `{lib.op}`: `-DEXTRA_LIBRARIES={lib.file or '...'}`.")
        return "\n".join(what)

    def _runs(self) -> str:
        if not self.gpu:
            arm = self.arms[0]
            features = f" with {', '.join(arm.cpu)}" if arm.cpu else ""
            return f"CPU: {self.m.machine}{features}, on {self.m.system}."
        said = [
            f"PTX of {a.made_for} for later GPUs, with a driver of {a.driver[1] if a.driver else '?'} or later"
            if a.arch == "ptx" else a.arch for a in self.arms
        ]  # fmt: skip
        return f"GPUs: {'; '.join(said)}.\nWhich of it a GPU runs is decided when the model is loaded."

    def _called(self) -> str:
        lines = ["| input | | sizes | |", "|---|---|---|---|"]
        for i, a in enumerate(example.callers(self.program)):
            if a.tensor is None:
                lines.append(f"| {i} | `{a.name}` | | an int |")
            else:
                sizes = ", ".join(map(str, decode(a.tensor.shape)))
                lines.append(f"| {i} | `{a.name}` | [{sizes}] | {a.tensor.dtype}, {a.tensor.device} |")
        fixed = [a for a in self.program.arguments if a.tensor is None and not isinstance(decode(a.value), Sym)]
        lines += [f"\n`{a.name}` is always {decode(a.value)!r}, as it was exported." for a in fixed]
        for s, (least, most) in sorted(self.program.ranges.items()):
            lines.append(f"\n`{s}` is from {least} {'on' if most is None else f'to {most}'}.")
        lines += [f"\nIt holds of the sizes: `{said}`." for said in describe.guards(self.program)]
        if not self.sizes_hold:
            lines.append("\nNo sizes of which all that holds were found: give `build/example` some, with `--input`.")
        names = describe.results(self.program)
        lines.append(f"\nIt gives {len(names)} result{'' if len(names) == 1 else 's'}.")
        if names != ["result"] and names != [f"result[{i}]" for i in range(len(names))]:
            lines += ["\n| result | in Python |", "|---|---|", *(f"| {i} | `{n}` |" for i, n in enumerate(names))]
        return "\n".join(lines)


def _filled(template: str, words: Mapping[str, str]) -> str:
    text = (RUNTIME / template).read_text()
    for key, value in words.items():
        text = text.replace(f"@{key}@", value)
    return text


# -- tables.cpp -------------------------------------------------------------------------------------------------
class _Tables:
    """The initializer of ``runtime::tables``, in the order of its members (``cpp/runtime.h``)."""

    def __init__(self, project: _Project):
        self.project, self.m, self.p = project, project.m, project.program
        self.given = [a.name for a in example.callers(self.p)]
        self.weight_rows = {w: i for i, w in enumerate(project.weights)}
        self.sizes = project.sizes

    def text(self) -> str:
        entries = sorted({self.project.entry(a) for a in self.project.arms})
        declared = [f"int32_t {e}(Host *, Frame *, const Value *, Value *);" for e in entries]
        declared += [f"extern const char image_{i}[];  // {n}" for i, n in enumerate(self.project.kernels.images)]
        cuda = [_code(a) for a in self.m.arms if a.arch.startswith("sm_")]
        text = next((_code(a) for a in self.m.arms if a.arch == "ptx"), "{0, 0}")
        weight_rows, spans, size = self._weights()
        fields = [
            _table("arms", map(self._arm, self.project.arms)),
            f"{_list(cuda)}, {text},  // capability and shared memory: of machine code, of assembly text",
            f"{size},  // bytes of the weights",
            _table("spans: start, bytes", spans),
            _table("weights: name, dtype, on a GPU?, span, offset, sizes, strides", weight_rows),
            _table("arguments: name, kind, dtype, on a GPU?, sizes, strides",
                   map(self._argument, example.callers(self.p))),
            _table("inputs", self._inputs()),
            _table("outputs", self._outputs()).rstrip(","),
        ]  # fmt: skip
        body = "\n".join(_indented(f) for f in fields)
        return (
            "// Written by reflib export-cpp: what the model consists of, for runtime.h.\n"
            '#include "runtime.h"\n\nextern "C" {\n' + "\n".join(declared) + "\n}\n\n"
            f"namespace runtime {{\nconst Tables tables = {{\n{body}\n}};\n}}  // namespace runtime\n"
        )

    def _arm(self, arm: Arm) -> str:
        by_name = {k.name: k for k in arm.kernels}
        fields = [
            f"{_text(arm.arch)}, {arm.driver[0] if arm.driver else 0}, {_text(arm.graph)}, {self.project.entry(arm)},",
            _table("kernels: name, symbol, image, library, threads, shared, early, checked, late",
                   (self._kernel(name, by_name.get(name)) for name in arm.table)),
            f"{_list(map(_text, arm.symbols))},  // symbols",
            f"{_list(map(_why, arm.functions))},  // functions in Python",
            f"{_list(map(_object, arm.objects))},  // results that are the same in every call",
            f"{_list(self.weight_rows[n, d == 'cuda'] for n, d in arm.constants)},  // constants",
            f"{_list(map(_text, arm.cpu))},  // what the processor must be able to do",
        ]  # fmt: skip
        return "{" + "\n".join(map(_indented, fields)).lstrip() + "\n}"

    def _kernel(self, name: str, k: manifest.Kernel | None) -> str:
        if k is None:  # for an empty tensor
            return "{" + f"{_text(name)}, nullptr, nullptr, nullptr, 0, 0, false, false, true" + "}"
        files = self.project.kernels
        library = files.libraries.get(k.image)
        image = "nullptr" if library else f"image_{files.images.index(k.image)}"
        where = f"{image}, {_text(Path(library).name) if library else 'nullptr'}"
        flags = ", ".join(map(_flag, (k.early, k.checked, k.late)))
        return "{" + f"{_text(name)}, {_text(k.symbol)}, {where}, {k.threads}, {k.shared}, {flags}" + "}"

    def _weights(self) -> tuple[list[str], list[str], int]:
        """Rows of weights, rows of spans, and the bytes of the file."""
        header, spans = weights._layout(weights._checked(self.m.rows))
        rows = {r.name: (r, s) for s in spans for r in s.rows}
        if missing := [n for n, _ in self.weight_rows if n not in rows]:
            raise PackageError(f"the weight {missing[0]!r} is not in the file")
        used = list({id(s): s for n, _ in self.weight_rows for _, s in [rows[n]]}.values())
        out = []
        for name, on_gpu in self.weight_rows:
            r, s = rows[name]
            dtype = _dtype(str(r.dtype).removeprefix("torch."))
            at = f"{used.index(s)}, {r.offset}, {_list(r.shape)}, {_list(r.strides)}"
            out.append(f"{{{_text(name)}, {dtype}, {_flag(on_gpu)}, {at}}}")
        return out, [f"{{{s.start}, {s.size}}}" for s in used], len(header) + sum(s.size for s in spans)

    def _argument(self, a: manifest.Argument) -> str:
        if a.tensor is None:
            return f"{{{_text(a.name)}, REFLIB_INT, 0, false, {{{self._size(decode(a.value))}}}, {{}}}}"
        shape, strides = decode(a.tensor.shape), decode(a.tensor.strides)
        kind = f"REFLIB_TENSOR, {_dtype(a.tensor.dtype)}, {_flag(a.tensor.device == 'cuda')}"
        sizes = ", ".join(_list(map(self._size, es)) for es in (shape, strides))
        return f"{{{_text(a.name)}, {kind}, {sizes}}}"

    def _size(self, e: Any) -> int:
        return int(expr(e).evaluate(self.sizes))

    def _inputs(self) -> list[str]:
        out, arguments = [], iter(self.p.arguments)
        for name, device in zip(self.p.inputs, self.p.devices):
            if name:
                out.append(f"{{WEIGHT, {self.weight_rows[name, device == 'cuda']}}}")
                continue
            argument = next(arguments)
            given = argument.name in self.given
            out.append(f"{{CALLER, {self.given.index(argument.name)}}}" if given else "{NOBODY, 0}")
        return out

    def _outputs(self) -> list[str]:
        out = []
        on = {n: d == "cuda" for n, d in zip(self.p.inputs, self.p.devices) if n}
        for o in self.p.outputs:
            if o.kind in ("result", "same"):
                out.append("{CALLER, -1}")
            elif o.kind == "weight":
                out.append(f"{{WEIGHT, {self.weight_rows[o.target, on[o.target]]}}}")
            else:
                out.append(f"{{CALLER, {self.given.index(o.target)}}}")
        return out


def _code(arm: Arm) -> str:
    return f"{{{capability(arm.made_for)}, {max((k.shared for k in arm.kernels), default=0)}}}"


def _why(function: str) -> str:
    """What is said when C++ gets to where Python would be called."""
    kind = (m := _PYTHON.match(function)) and m.group(1)
    if kind == "note":
        return "nullptr"
    if kind == "expect_":
        return _text("the operator's result is not laid out as its meta function says, which only Python puts right")
    return _text("PyTorch refused the call")


def _object(data: Any) -> str:
    x = decode(data)
    if isinstance(x, (bool, int)):
        return f"integer({int(x)})"
    if isinstance(x, float):
        return f"number({number(x)})"
    raise PackageError(f"one of its results is {x!r}, which is no tensor and no number: there is no such value in C++")


def _dtype(name: str) -> str:
    if name not in NUMBERS:
        raise PackageError(f"the dtype {name} cannot be exported; known are {', '.join(NUMBERS)}")
    return f"REFLIB_{name.upper()}"


def _text(s: str) -> str:
    return json.dumps(s)


def _flag(b: bool) -> str:
    return str(b).lower()


def _list(items: Any) -> str:
    return "{" + ", ".join(map(str, items)) + "}"


def _table(what: str, rows: Any) -> str:
    rows = list(rows)
    if not rows:
        return f"{{}},  // {what}"
    return "\n".join([f"{{  // {what}", *(_indented(f"{r},") for r in rows), "},"])


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.split("\n"))


# -- the folder -------------------------------------------------------------------------------------------------
def _write(folder: Path, files: Mapping[str, bytes | memoryview]) -> Path:
    """All files, or none: they are written beside the folder, which is renamed."""
    try:
        target = folder.resolve()  # what a link leads to: the link stays
        _check_folder(folder, target)
    except (OSError, RuntimeError) as e:  # RuntimeError: a link that leads to itself
        raise PackageError(f"cannot write {folder}: {getattr(e, 'strerror', None) or e}; choose another path") from e
    try:
        with atomic.folder(target) as new:
            for name, data in files.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(data)
    except OSError as e:
        raise PackageError(f"cannot write {folder}: {e.strerror or e}; choose a folder with room") from e
    return folder


def _check_folder(folder: Path, target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise PackageError(f"{folder} is there and no folder; choose another path")
    if not target.parent.is_dir():
        raise PackageError(f"there is no folder {target.parent} to write {target.name} into")
    if not target.is_dir() or not any(target.iterdir()):
        return
    marker = target / MARKER
    if not marker.is_file():
        raise PackageError(f"{folder} is not empty, and not an export of before; choose a new folder")
    ours = set(marker.read_text(errors="replace").splitlines())
    for found, folders, names in os.walk(target):
        folders[:] = [f for f in folders if not Path(found, f, "CMakeCache.txt").is_file()]  # what CMake built
        for name in [*names, *(f for f in folders if Path(found, f).is_symlink())]:
            member = Path(found, name).relative_to(target).as_posix()
            if member not in ours and member != MARKER:
                what = f"{folder} has {member}, which no export wrote, and would be replaced as a whole"
                raise PackageError(f"{what}; move that, or choose a new folder")
