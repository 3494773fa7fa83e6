"""A package as C++: a CMake project that needs neither Python nor reflib.

A package is almost that already: wrappers are C++ text written in terms of ``wrapper.h``, and reach everything else
through the tables of ``host.h``. The folder ``cpp/`` implements these tables for C++ as ``wrap/host.c`` does for
Python: a runtime of a few hundred lines, with tensors of its own, or PyTorch's where a wrapper calls ATen. Added are
the kernels as files, which one assembly file includes, the weights, and ``tables.cpp``, from the manifest.

A project holds the variants for all GPUs of the package, and chooses one at run time by the rule of
``architectures.variant_for``; or it holds one variant. The same package gives the same files.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import PackageError
from ..ir.data import decode
from ..ir.expr import Sym, expr
from ..ir.printer import dtype_name
from ..wrap import bad_values, host
from ..wrap.aten import number
from ..wrap.convention import Argument
from ..wrap.cpp import DTYPES
from . import archive, manifest
from .architectures import capability
from .checks import WEIGHTS
from .manifest import Manifest, PackagedVariant, Signature

RUNTIME = Path(__file__).with_name("cpp")
WRAP = Path(__file__).parent.parent / "wrap"
MARKER = ".reflib-export"
MARK = "These files were written by reflib export-cpp. Exporting into this folder again replaces it as a whole.\n"
KERNELS = """file(GLOB images ${CMAKE_CURRENT_SOURCE_DIR}/kernels/*)
set_source_files_properties(kernels.S PROPERTIES OBJECT_DEPENDS "${images}")
"""
# Of model.h, in the order of reflib_functions.
FUNCTIONS = (
    "load", "run", "free", "unload", "error", "input_count", "output_count", "about_input", "variant", "new", "copy",
    "dtype_name", "dtype_size",
)  # fmt: skip
OWN_HEADER = """#include "model.h"
#ifdef __cplusplus
extern "C"
#endif
REFLIB_API const reflib_functions *functions_of_@NAME@(void);
"""
NUMBERS = {str(d).removeprefix("torch."): n for d, n in DTYPES.items()}
_CALLS_ATEN = re.compile(r"\b(dispatch|call)\(run\b")
_PYTHON = re.compile(r"python_\d+_(note|expect_|size)?")


def export_cpp(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], arch: str | None = None, model: str | None = None
) -> Path:
    """Write the package at ``path`` as a CMake project into ``folder``, which is new, empty, or an earlier export.

    arch: the variant to export. None: those for all GPUs; of a package without any, the one for CPUs.
    model: of a file with several, the one to export; the project has its name. Projects of one file have the same
        weights: programs may load all from one file.
    folder: an earlier export is replaced, with changes to its files and CMake's build folders in it, unless it has
        other files. A link to a folder stays one.

    Returns the folder. Raises PackageError for a package that cannot be read, or whose code needs Python, and for a
    folder that must not be replaced; its contents are then kept.
    """
    try:
        target = Path(folder)
    except TypeError as e:
        raise PackageError(f"folder={folder!r:.80}: takes a str or a pathlib.Path, such as 'project'") from e
    with manifest.opened(path, model=model) as (file, about):
        files = _Project(model or Path(path).stem, file, about, _variants(file, about, arch)).files()
    return _write(target, files)


# -- the variants to export ---------------------------------------------------------------------------------------
def _variants(file: archive.Archive, m: Manifest, arch: str | None) -> list[PackagedVariant]:
    if m.host != manifest.HOST:
        raise PackageError(f"it was built by another reflib ({m.versions.get('reflib', '?')}): build it again")
    there = [a for a in m.archs if not a.startswith("gfx")]
    if str(arch or "").startswith("gfx") or not there:
        raise PackageError(f"{arch or ', '.join(m.archs)}: reflib compiles for AMD GPUs but cannot run there yet")
    if arch is not None and arch not in there:
        raise PackageError(f"it has no variant {arch!r} to export; it has {', '.join(there)}")
    names = [arch] if arch is not None else [a for a in there if a != "cpu"] or there
    variants = [m.variant(a) for a in names]
    for variant in variants:
        if manifest.tables_line(manifest.tables_of(m, variant)) not in bytes(file.view(variant.text)).decode():
            what = f"the tables of its variant {variant.arch} are not those that its host code uses"
            raise PackageError(f"{what}; build it again")
        for op in (op for op in variant.needs.values() if op != "check_nan"):
            remedy = "register it in C++, or declare a function in C for it (option c_shims)"
            if variant.arch != "cpu" and op.startswith("aten.") and "+cpu" in m.versions.get("torch", ""):
                remedy = "build the package with a PyTorch for CUDA (no GPU is needed): it has functions in C for more"
            raise PackageError(f"its {variant.arch} variant needs Python for {op}, which C++ does not have: {remedy}")
    return variants


def _callers(p: Signature) -> list[Argument]:
    """Arguments that a caller in C++ passes: tensors and sizes."""
    return [a for a in p.arguments if a.tensor is not None or isinstance(a.value, Sym)]


def _sizes(p: Signature) -> dict[str, int]:
    """The sizes, by symbol, with which the example program calls the model: as exported, where all guards hold."""
    found: dict[str, int] = {}
    for a in _callers(p):
        sizes = [*a.tensor.shape, *a.tensor.strides] if a.tensor is not None else [a.value]
        for s in (s for e in sizes for s in expr(e).symbols()):
            least, _ = p.ranges.get(s.name, (s.lo, s.hi))
            found[s.name] = s.hint if s.hint is not None else max(least, 2)
    return found


# -- the files --------------------------------------------------------------------------------------------------
class _Project:
    """The files of a project: ``files()``, by name. Those of machine code: ``images`` for GPUs, by member their number;
    ``beside`` the library (for CPUs, and the weights), by member their new name, that no other project's file has."""

    def __init__(self, name: str, file: archive.Archive, m: Manifest, variants: Sequence[PackagedVariant]):
        self.file, self.m, self.variants = file, m, variants
        self.program: Signature = m.programs[variants[0].program]
        self.name = re.sub(r"\W", "_", name, flags=re.ASCII) or "model"
        self.texts = {a.text: bytes(file.view(a.text)) for a in variants}
        self.wrappers = {a.text: a.arch for a in reversed(variants)}  # by text, the first variant's name
        self.images: dict[str, int] = {}
        self.beside: dict[str, str] = {}
        for variant in variants:
            for k in variant.kernels:
                if k.image.endswith(".so"):
                    self.beside.setdefault(k.image, f"kernels/{self.name}_kernels_{variant.arch}.so")
                else:
                    self.images.setdefault(k.image, len(self.images))
        called = [t.decode().partition("/* Called from above, in Python:")[0] for t in self.texts.values()]
        self.aten = any(a.symbols for a in variants) or any(map(_CALLS_ATEN.search, called))
        self.gpu = variants[0].arch != "cpu"
        self.text = next((a for a in variants if a.arch == "ptx"), None)
        self.weights = self._weights()
        if self.weights:
            self.beside[WEIGHTS] = f"{self.name}_weights.safetensors"
        self.sizes = _sizes(self.program)

    def files(self) -> dict[str, bytes | memoryview]:
        tensors = "tensors_torch.cpp" if self.aten else "tensors.cpp"
        out: dict[str, bytes | memoryview] = {}
        for name in ("model.h", "runtime.h", "model.cpp", "values.cpp", "gpu.cpp", "graphs.cpp", "nan.cpp", "main.cpp"):
            out[name] = (RUNTIME / name).read_bytes()
        looked_up = "".join(f'\n    {{"{n}", {_flag(where == "cpu")}}},' for n, where in host.FUNCTIONS)
        out[tensors] = _filled(tensors, {"FUNCTIONS": looked_up}).encode()
        for name in ("wrapper.h", "host.h", "cuda_driver.h"):
            out[name] = (WRAP / name).read_bytes()
        for text, data in self.texts.items():
            out[self._wrapper(text)] = data
        for member in self.images:
            out[member] = self.file.view(member)
        for member, name in self.beside.items():
            out[name] = self.file.view(member)
        if self.images:
            out["kernels.S"] = self._assembly().encode()
        if self.text is not None:
            out["fatbin.cmake"] = _filled("fatbin.cmake", {"PTX": str(capability(self.text.made_for))}).encode()
        if self.aten:
            out["torch.cmake"] = (RUNTIME / "torch.cmake").read_bytes()
        out["tables.cpp"] = _Tables(self).text().encode()
        out[f"{self.name}_model.h"] = OWN_HEADER.replace("@NAME@", self.name).encode()
        out["CMakeLists.txt"] = self._cmake(tensors).encode()
        out["README.md"] = self._readme().encode()
        return out | {MARKER: "\n".join([MARK, *sorted(out), ""]).encode()}

    # -- names ----------------------------------------------------------------------------------
    def _wrapper(self, text: str) -> str:
        return "wrapper.cpp" if len(self.texts) == 1 else f"wrapper_{self.wrappers[text]}.cpp"

    def entry(self, variant: PackagedVariant) -> str:
        """The name of the variant's ``reflib_call`` here."""
        return "reflib_call" if len(self.texts) == 1 else f"reflib_call_{self.wrappers[variant.text]}"

    def _weights(self) -> list[tuple[str, bool]]:
        """(name, on a GPU) of each weight that is needed."""
        p = self.program
        wanted = [(n, d) for n, d in zip(p.inputs, p.devices) if n]
        wanted += [c for a in self.variants for c in a.constants]
        return list(dict.fromkeys((name, device == "cuda") for name, device in wanted))

    # -- files ----------------------------------------------------------------------------------
    def _assembly(self) -> str:
        lines = ["/* The kernels' machine code, as it is in the files. */", "        .section .rodata"]
        for i, member in enumerate(self.images):
            lines += [f"        .globl image_{i}", f"        .hidden image_{i}", "        .balign 64",
                      f'image_{i}: .incbin "{member}"', "        .byte 0 /* ends a text */"]  # fmt: skip
        return "\n".join([*lines, '        .section .note.GNU-stack,"",%progbits', ""])

    def _cmake(self, tensors: str) -> str:
        sources = [*sorted(map(self._wrapper, self.texts)), *(["kernels.S"] if self.images else [])]
        several = len(self.texts) > 1
        entries = ["# Each wrapper defines reflib_call; here each has another name."] if several else []
        for a in self.variants:
            if self.wrappers[a.text] == a.arch:
                named = f" COMPILE_DEFINITIONS reflib_call={self.entry(a)}" if several else ""
                entries.append(f"set_source_files_properties({self._wrapper(a.text)} PROPERTIES\n"
                               f'  COMPILE_OPTIONS "-fwrapv;-fno-strict-aliasing"{named})')  # fmt: skip
        copies = "".join(f"\n    ${{CMAKE_CURRENT_SOURCE_DIR}}/{name}" for name in self.beside.values())
        return _filled("CMakeLists.txt", {
            "NAME": self.name, "TENSORS": tensors, "SOURCES": "".join(f"  {s}\n" for s in sources).rstrip("\n"),
            "ENTRIES": "\n".join(entries),
            "KERNELS": KERNELS * bool(self.images) + "include(fatbin.cmake)\n" * (self.text is not None),
            "TORCH": "include(torch.cmake)\n" if self.aten else "",
            "BESIDE": "# Files that the library opens beside itself.\nadd_custom_command(TARGET ${MODEL} POST_BUILD "
            f"COMMAND ${{CMAKE_COMMAND}} -E copy_if_different{copies}\n    $<TARGET_FILE_DIR:${{MODEL}}>)"
            if copies else "",
        })  # fmt: skip

    def _readme(self) -> str:
        return _filled("README.md", {
            "NAME": self.name, "NEEDS": self._needs(), "RUNS": self._runs(), "CALLED": self._called(),
            "CMAKE_MORE": ' -DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")'
            if self.aten else "",
        })  # fmt: skip

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
            variant = self.variants[0]
            features = f" with {', '.join(variant.cpu)}" if variant.cpu else ""
            return f"CPU: {self.m.machine}{features}, on {self.m.system}."
        said = [
            f"PTX of {a.made_for} for later GPUs, with a driver of {a.driver[1] if a.driver else '?'} or later"
            if a.arch == "ptx" else a.arch for a in self.variants
        ]  # fmt: skip
        build = "\nTo compile the PTX for GPUs that the build names, see `fatbin.cmake`." if self.text else ""
        return f"GPUs: {'; '.join(said)}.\nWhich of it a GPU runs is decided when the model is loaded.{build}"

    def _called(self) -> str:
        lines = ["| input | | sizes | |", "|---|---|---|---|"]
        for i, a in enumerate(_callers(self.program)):
            if a.tensor is None:
                lines.append(f"| {i} | `{a.name}` | | an int |")
            else:
                sizes, dtype = ", ".join(map(str, a.tensor.shape)), dtype_name(a.tensor.dtype)
                lines.append(f"| {i} | `{a.name}` | [{sizes}] | {dtype}, {a.tensor.device.type} |")
        fixed = [a for a in self.program.arguments if a.tensor is None and not isinstance(a.value, Sym)]
        lines += [f"\n`{a.name}` is always {a.value!r}, as it was exported." for a in fixed]
        for s, (least, most) in sorted(self.program.ranges.items()):
            lines.append(f"\n`{s}` is from {least} {'on' if most is None else f'to {most}'}.")
        lines += [f"\nIt holds of the sizes: `{said}`." for said in self.program.conditions]
        names = list(self.program.results)
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
        self.given = {a.name: i for i, a in enumerate(_callers(self.p))}
        self.weight_rows = {w: i for i, w in enumerate(project.weights)}
        self.sizes = project.sizes

    def text(self) -> str:
        entries = sorted({self.project.entry(a) for a in self.project.variants})
        declared = [f"int32_t {e}(Host *, Frame *, const Value *, Value *);" for e in entries]
        declared += [f"extern const char image_{i}[];  // {n}" for i, n in enumerate(self.project.images)]
        cuda = [_code(a) for a in self.m.variants if a.arch.startswith("sm_")]
        text = next((_code(a) for a in self.m.variants if a.arch == "ptx"), "{0, 0}")
        weight_rows, spans, size = self._weights()
        fields = [
            _table("variants", map(self._variant, self.project.variants)),
            f"{_list(cuda)}, {text},  // capability and shared memory: of machine code, of assembly text",
            f"{_text(self.project.beside.get(WEIGHTS, ''))}, {size},  // the weights' file, its bytes",
            _table("spans: start, bytes", spans),
            _table("weights: name, dtype, on a GPU?, span, offset, sizes, strides", weight_rows),
            _table("arguments: name, kind, dtype, on a GPU?, sizes, strides",
                   map(self._argument, _callers(self.p))),
            _table("inputs", self._inputs()),
            f"{_list(self._written())},  // inputs that are written to",
            f"{len(self.p.outputs)}  // outputs",
        ]  # fmt: skip
        body = "\n".join(_indented(f) for f in fields)
        functions = ",\n      ".join(f"reflib_{f}" for f in FUNCTIONS)
        return (
            "// Written by reflib export-cpp: the parts of the model, for runtime.h.\n"
            f'#include "runtime.h"\n#include "{self.project.name}_model.h"\n\n'
            'extern "C" {\n' + "\n".join(declared) + "\n}\n\n"
            f"namespace runtime {{\nconst Tables tables = {{\n{body}\n}};\n}}  // namespace runtime\n\n"
            f'extern "C" const reflib_functions *functions_of_{self.project.name}() {{\n'
            f"  static const reflib_functions all = {{\n      {functions}}};\n  return &all;\n}}\n"
        )

    def _variant(self, variant: PackagedVariant) -> str:
        by_name, driver = {k.name: k for k in variant.kernels}, variant.driver[0] if variant.driver else 0
        fields = [
            f"{_text(variant.arch)}, {driver}, {_text(variant.graph)}, {self.project.entry(variant)},",
            _table("kernels: name, symbol, image, library, threads, shared, early, checked, late",
                   (self._kernel(name, by_name.get(name)) for name in variant.table)),
            f"{_list(map(_text, variant.symbols))},  // symbols",
            f"{_list(map(_why, variant.functions))},  // functions in Python",
            _table("of those, checks for NaN: what, names, written, infinite, origins",
                   (self._nan_check(variant, f) for f in variant.functions)),
            f"{_list(map(_object, variant.objects))},  // results that are the same in every call",
            f"{_list(self.weight_rows[n, d == 'cuda'] for n, d in variant.constants)},  // constants",
            f"{_list(map(_text, variant.cpu))},  // features that the processor must have",
            f"{_flag(self._recorded(variant))},  // calls are recorded",
        ]  # fmt: skip
        return "{" + "\n".join(map(_indented, fields)).lstrip() + "\n}"

    def _nan_check(self, variant: PackagedVariant, function: str) -> str:
        if variant.needs.get(function) != "check_nan":
            return "{nullptr, {}, 0, false, nullptr}"
        text = bytes(self.project.file.view(variant.python)).decode()
        m = re.search(rf"def {function}\(.*\):\n    check_nan\((\w+), \[(.*)\], \[(.*)\]\)\n", text)
        assert m is not None, "printed by wrap.bad_values"
        node = decode(variant.names[m[1]])
        wrote, read = ([n for n in names.split(", ") if n] for names in (m[2], m[3]))
        names = _list(map(_text, [*wrote, *read]))
        flag, origins = _flag(bad_values.infinite_by_itself(node)), "".join(bad_values.origins_of(node))
        return f"{{{_bytes(bad_values.step_of(node))}, {names}, {len(wrote)}, {flag}, {_bytes(origins)}}}"

    def _recorded(self, variant: PackagedVariant) -> bool:
        return bool(self.m.options.get("cuda_graphs")) and not (variant.unrecorded or self.project.aten)

    def _kernel(self, name: str, k: manifest.KernelEntry | None) -> str:
        if k is None:  # for an empty tensor
            return "{" + f"{_text(name)}, nullptr, nullptr, nullptr, 0, 0, false, false, true" + "}"
        library = self.project.beside.get(k.image)
        image = "nullptr" if library else f"image_{self.project.images[k.image]}"
        where = f"{image}, {_text(Path(library).name) if library else 'nullptr'}"
        flags = ", ".join(map(_flag, (k.early, k.checked, k.late)))
        return "{" + f"{_text(name)}, {_text(k.symbol)}, {where}, {k.threads}, {k.shared}, {flags}" + "}"

    def _weights(self) -> tuple[list[str], list[str], int]:
        """Rows of weights, rows of spans, and the bytes of the file."""
        weights = {w.name: w for w in self.m.weights}
        if missing := [n for n, _ in self.weight_rows if n not in weights]:
            raise PackageError(f"the weight {missing[0]!r} is not in the file")
        used = {s: i for i, s in enumerate(dict.fromkeys(weights[n].span for n, _ in self.weight_rows))}
        out = []
        for name, on_gpu in self.weight_rows:
            w = weights[name]
            at = f"{used[w.span]}, {w.offset}, {_list(w.shape)}, {_list(w.strides)}"
            out.append(f"{{{_text(name)}, {_dtype(w.dtype)}, {_flag(on_gpu)}, {at}}}")
        spans = [self.m.spans[i] for i in used]
        size = self.project.file.entries[WEIGHTS].size
        return out, [f"{{{s.start}, {s.size}}}" for s in spans], size

    def _argument(self, a: Argument) -> str:
        if a.tensor is None:
            return f"{{{_text(a.name)}, REFLIB_INT, 0, false, {{{self._size(a.value)}}}, {{}}}}"
        kind = f"REFLIB_TENSOR, {_dtype(dtype_name(a.tensor.dtype))}, {_flag(a.tensor.device.type == 'cuda')}"
        sizes = ", ".join(_list(map(self._size, es)) for es in (a.tensor.shape, a.tensor.strides))
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
            out.append(f"{{CALLER, {self.given[argument.name]}}}" if given else "{UNUSED, 0}")
        return out

    def _written(self) -> list[int]:
        """Positions among the inputs."""
        weights, arguments = list(self.p.inputs), iter(self.p.arguments)
        names = [("weight", name) if name else ("argument", next(arguments).name) for name in weights]
        return [names.index((o.kind, o.target)) for o in self.p.written]


def _code(variant: PackagedVariant) -> str:
    return f"{{{capability(variant.made_for)}, {variant.shared}}}"


def _why(function: str) -> str:
    """The error where C++ would have to call Python."""
    kind = (m := _PYTHON.match(function)) and m.group(1)
    if kind == "note":
        return "nullptr"
    if kind == "size":
        return _text("a number among the results is too large for C++")
    if kind == "expect_":
        return _text("the operator's result is not laid out as its meta function says, which only Python corrects")
    return _text("PyTorch refused the call")


def _object(data: Any) -> str:
    x = decode(data)
    if isinstance(x, bool):
        return f"truth({_flag(x)})"
    if isinstance(x, int):
        return f"integer({x})"
    if isinstance(x, float):
        return f"number({number(x)})"
    if isinstance(x, str) and "\0" not in x:
        return f"words({_bytes(x)})"
    raise PackageError(f"one of its results is {x!r:.200}: it must be a tensor, a number or text to be a value in C++")


def _dtype(name: str) -> str:
    if name not in NUMBERS:
        raise PackageError(f"the dtype {name} cannot be exported; known are {', '.join(NUMBERS)}")
    return f"REFLIB_{name.upper()}"


def _text(s: str) -> str:
    return json.dumps(s)


def _bytes(s: str) -> str:
    """A C literal of its UTF-8."""
    plain = {*range(32, 127)} - {*b'"\\?'}
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in s.encode()) + '"'


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
    """All files or none: they are written beside the folder and renamed into its place."""
    try:
        target = folder.resolve()  # a link stays
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
        raise PackageError(f"{folder} exists and is no folder; choose another path")
    if not target.parent.is_dir():
        raise PackageError(f"there is no folder {target.parent} to write {target.name} into")
    if not target.is_dir() or not any(target.iterdir()):
        return
    marker = target / MARKER
    if not marker.is_file():
        raise PackageError(f"{folder} is not empty, and no earlier export; choose a new folder")
    ours = set(marker.read_text(errors="replace").splitlines())
    for found, folders, names in os.walk(target):
        folders[:] = [f for f in folders if not Path(found, f, "CMakeCache.txt").is_file()]  # a build of CMake
        for name in [*names, *(f for f in folders if Path(found, f).is_symlink())]:
            member = Path(found, name).relative_to(target).as_posix()
            if member not in ours and member != MARKER:
                what = f"{folder} would be replaced as a whole, but has {member}, which no export wrote"
                raise PackageError(f"{what}; move that, or choose a new folder")
