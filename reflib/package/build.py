"""Writing a package: compile the parts of each variant, put them together, describe them in a manifest.

Kernels of all architectures and wrappers are compiled at the same time, in a pool of threads (Triton's passes, ptxas
and the C++ compiler run outside the GIL), through the caches. Nothing in the file names this machine or the date: the
same input gives the same bytes.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import __version__, toolchain
from ..c_shims import Shim
from ..errors import PackageError, ReflibError
from ..generate.compile_triton import Binary, alike, compile_kernel
from ..generate.cpp import HEADER
from ..generate.kernel import Kernel
from ..ir.data import encode
from ..ir.printer import dtype_name
from ..ir.program import Extern, Program, fallback_kernels, kernel_nodes, walk
from ..options import Options
from ..plan import Plan
from ..plan.arena import sizes_of_arenas
from ..plan.memory import memory
from ..target import Target, parse_target
from ..wrap.convention import Argument, Convention, Source, sources
from ..wrap.cpp import CppPrinter
from ..wrap.host import build_wrapper
from ..wrap.indices import has_indirect, where_indexed
from ..wrap.python import PythonPrinter
from . import archive, checks, images, manifest, trees, weights
from .architectures import PTX, PTX_SHARED, driver_for
from .libraries import library_of
from .ptx import for_old_drivers

# features that CPU kernels may use, unless they are for this machine only: (the compiler's name, the Linux kernel's)
X86 = (("avx2", "avx2"), ("fma", "fma"), ("f16c", "f16c"), ("bmi", "bmi1"), ("bmi2", "bmi2"), ("lzcnt", "abm"),
       ("movbe", "movbe"), ("popcnt", "popcnt"))  # fmt: skip
FEATURES = re.compile(r"^(avx|amx|fma|f16c|bmi|abm|movbe|popcnt|sse4|gfni|vaes|vpclmul|asimd|sve|fphp|bf16|i8mm)")
SMALL = ("-Os", "-Wl,-z,noseparate-code")  # a file has several wrappers; calls are not slower (measured)
BUILT_IN = ("aten", "prims", "prim", "higher_order", "rngprims", "_c10d_functional", "quantized", "inductor")
_SILENT = ("compile_threads", "isolate", "tuning_seconds", "tuning_idle_seconds", "candidate_seconds", "c_shims")


@dataclass(frozen=True)
class Planned:
    """A variant before compilation. ``arch``: its name; ``here``: it may use all features of this machine's CPU."""

    arch: str
    target: Target
    kind: str
    program: Program
    plan: Plan
    kernels: Mapping[str, Kernel]
    here: bool = False


@dataclass(frozen=True)
class Captured:
    """A graph for one kind of device: its calling convention, weights and their kinds, digest, the names of its
    arguments by position, and the process groups that it communicates in."""

    convention: Convention
    state: Mapping[str, torch.Tensor]
    kinds: Mapping[str, str]
    digest: str
    names: tuple[str, ...] = ()
    groups: Mapping[str, manifest.Group] = field(default_factory=dict)


def ptx_target() -> Target:
    """The target of the assembly text for later GPUs."""
    return replace(parse_target(PTX), shared=PTX_SHARED)


def build(
    path: Path, captured: Mapping[str, Captured], variants: Sequence[Planned], options: Options,
    shims: Mapping[str, Shim], metadata: Mapping[str, str], instead_of: archive.Stamp | None = None,
) -> Path:  # fmt: skip
    """Write the package. Raises PackageError for a model that cannot be packaged, ToolchainError, DeviceError."""
    for planned in variants:
        _check(planned.program)
    threads = options.compile_threads or None
    with ThreadPoolExecutor(threads, thread_name_prefix="reflib-package") as pool:
        making = [_Making(v, options, shims, pool) for v in variants]
        made = [m.variant() for m in making]
    by_kernel: dict[str, list[images.Image]] = {}
    for m in making:
        for name, image in m.images():
            if image not in by_kernel.setdefault(name, []):
                by_kernel[name].append(image)
    members: dict[str, Any] = {}
    for m in making:
        members |= m.members
    for name, found in sorted(by_kernel.items()):
        members |= images.members(name, found)
    tensors, kinds = _weights(captured, making)
    members["weights.safetensors"], packed, spans = weights.pack(tensors, kinds)
    gpu = any(m.planned.target.is_gpu for m in making)
    about = manifest.Manifest(
        format=archive.FORMAT, host=manifest.HOST, system=platform.system(), machine=platform.machine(),
        images="fatbin" if gpu and images.fatbinary() else "table", versions=_versions(gpu), options=_options(options),
        source=hashlib.sha256("".join(captured[k].digest for k in sorted(captured)).encode()).hexdigest(),
        programs={k: _program(c.convention, c.names) for k, c in captured.items()}, variants=tuple(made),
        weights=packed, spans=spans, libraries=_libraries(making), libc=_libc(members),
        groups=dict(next(iter(captured.values())).groups), metadata=dict(metadata),
    )  # fmt: skip
    data = manifest.write(about)
    sizes = {name: c.size if isinstance(c, archive.Chunks) else len(c) for name, c in members.items()}
    checks.check(manifest.read(json.loads(archive.dump(data))), sizes)  # what could not be loaded is not written
    archive.write(path, data, members, instead_of)
    return path


def _check(program: Program) -> None:
    """Raises PackageError for what neither a file nor a wrapper in C++ can hold."""
    for b in program.buffers.values():
        if b.dtype not in CppPrinter.dtype_numbers:
            raise PackageError(f"this model cannot be packaged: it computes with {b.dtype}; convert it")
    for x in walk(program.nodes):
        if not isinstance(x, Extern):
            continue
        if getattr(x.target, "__name__", "").startswith("triton_kernel_wrapper"):
            raise PackageError(f"this model cannot be packaged: PyTorch launches {x.reason}; change that, or its call")
        if any(isinstance(a, torch.fx.GraphModule) for a in pytree.tree_leaves((x.args, x.kwargs))):
            where = next((f" at {o.source}" for o in x.origins if o.source), "")
            raise PackageError(
                f"this model cannot be packaged: it calls {x.target.__name__}{where}, whose functions are PyTorch's to "
                f"run here: {x.reason}; write it with operators of tensors, or call reflib.compile(model) where it runs"
            )


class _Making:
    """One variant: its host code is printed at once, and compiled in the pool."""

    def __init__(self, planned: Planned, options: Options, shims: Mapping[str, Shim], pool: ThreadPoolExecutor):
        self.planned, self.options = planned, options
        self.kernels = list(dict.fromkeys(planned.kernels.values()))
        self.printer = CppPrinter(planned.program, planned.plan, planned.kernels, options.check_nan, shims)
        self.text = self.printer.print() + manifest.tables_line(self._tables())
        self.fallback = self._in_python()
        self.wrapper = pool.submit(build_wrapper, self.text, (*toolchain.REPRODUCIBLE, *SMALL))
        first = alike(k for k in self.kernels if k.language == "triton" and k.grid != 0)
        made = {k: pool.submit(self._compile, k) for k in dict.fromkeys(first.values())}
        self.binaries: dict[str, Future[Binary]] = {k.name: made[one] for k, one in first.items()}
        cpp = [k for k in self.kernels if k.language == "cpp"]
        self.library = pool.submit(self._cpu_library, cpp) if cpp else None
        self.members: dict[str, bytes] = {}

    def _compile(self, k: Kernel) -> Binary:
        b, target = compile_kernel(k, self.planned.target, True), self.planned.target
        return replace(b, ptx=for_old_drivers(b.ptx, target.arch)) if self.planned.arch == "ptx" else b

    def variant(self) -> manifest.PackagedVariant:
        p, printer, arch = self.planned, self.printer, self.planned.arch
        late = fallback_kernels(p.program.nodes)
        checked = {n.name: where_indexed(n) for n in kernel_nodes(p.program.nodes) if has_indirect(n)}
        kernels = tuple(
            self._gpu_kernel(k, k.name in late) if k.name in self.binaries else self._cpu_kernel(k, checked.get(k.name))
            for name in printer.kernels for k in self.kernels if k.name == name and (k.grid != 0)
        )  # fmt: skip
        return manifest.PackagedVariant(
            arch=arch, made_for=p.target.arch, program=p.kind, **self._host_code(),
            graph=p.program.nodes[0].name if p.program.nodes else "empty",
            kernels=kernels, table=tuple(printer.kernels),
            functions=tuple(printer.functions), needs=printer.needs,
            names=_encoded(printer.names, "an operator's argument"), objects=_encoded(printer.objects, "a result"),
            symbols=tuple(printer.symbols), constants=tuple(map(self._constant, printer.constants)),
            cpu=self._features(),
            driver=self._driver(), unrecorded=self._unrecorded(), workspace=memory(p.program, p.plan).peak_bytes,
            arena=sizes_of_arenas(p.program, p.plan),
        )  # fmt: skip

    def _in_python(self) -> str:
        """The same steps for a machine where nothing can call C++. Its names are among the printer's."""
        p = self.planned
        printer = PythonPrinter(p.program, p.plan, p.kernels, self.options.check_nan)
        printer.names = self.printer.names
        return printer.print()

    def _tables(self) -> str:
        printer, buffers = self.printer, self.planned.program.buffers
        held = [buffers[name] for name in printer.constants]
        layouts = [(dtype_name(b.dtype), [int(e) for e in b.shape], [int(e) for e in b.strides]) for b in held]
        return manifest.tables_digest(
            len(self.planned.program.inputs), len(self.planned.program.outputs), printer.kernels,
            [k.name for k in self.kernels if k.grid != 0], printer.functions, len(printer.objects), printer.symbols,
            layouts,
        )  # fmt: skip

    def constant(self, name: str) -> str:
        """The weight for a tensor in the graph."""
        return f"{self.planned.kind}.{name}"

    def _constant(self, name: str) -> tuple[str, str]:
        return self.constant(name), self.planned.program.buffers[name].device.type

    def _host_code(self) -> dict[str, str]:
        """Members, by the field of the variant. Variants with the same host code share them."""
        name = _name(toolchain._without_comments(self.text))
        python = self.printer.python.encode()
        found = {
            "wrapper": (f"{name}.so", self.wrapper.result().read_bytes()), "text": (f"{name}.cpp", self.text.encode()),
            "python": (f"{_name(python)}.py", python) if python else ("", b""),
            "fallback": (f"{_name(self.fallback)}.py", self.fallback.encode()),
        }  # fmt: skip
        members = {field: (f"wrapper/{name}", data) for field, (name, data) in found.items() if name}
        self.members |= dict(members.values())
        return {field: member for field, (member, _) in members.items()}

    # -- kernels --------------------------------------------------------------------------------
    def _gpu_kernel(self, k: Kernel, late: bool) -> manifest.KernelEntry:
        b, image = self.binaries[k.name].result(), self._image(k.name)
        where = images.member(k.name, image, images.fatbinary() is not None)
        return manifest.KernelEntry(
            k.name, where, b.entry, b.num_warps * b.warp, b.shared, b.pdl, late, bytes=len(image.data)
        )  # fmt: skip

    def _image(self, name: str) -> images.Image:
        b, target = self.binaries[name].result(), self.planned.target
        if self.planned.arch == "ptx":
            return images.Image("ptx", target.arch, b.ptx.encode())
        return images.Image("cubin" if target.kind == "cuda" else "hsaco", target.arch, b.image)

    def images(self) -> list[tuple[str, images.Image]]:
        return [(name, self._image(name)) for name in self.binaries]

    def _driver(self) -> tuple[int, str] | None:
        if self.planned.arch != "ptx":
            return None
        found = [d for n in self.binaries if (d := driver_for(self.binaries[n].result().ptx)) is not None]
        d = max(found, key=lambda d: d.version, default=None)
        return (d.version, d.branch) if d else None

    def _unrecorded(self) -> str:
        """Why calls are not recorded, where that was asked for. (Parts of a program are not in the file.)"""
        if not self.options.cuda_graphs:
            return ""
        from ..wrap.cuda_graphs import RECORDER, reason
        from ..wrap.graph_parts import cut

        if self.planned.kind != RECORDER.kind:
            return "it runs on a CPU"
        parts = cut(self.planned.program, RECORDER.kind)
        why = dict.fromkeys(w for p in parts for w in p.why)
        around = f"a package's calls are recorded whole, and {'; '.join(why)}" if len(parts) > 1 else ""
        return reason(self.planned.program, parts, self.options) or around

    def _cpu_kernel(self, k: Kernel, where: str | None) -> manifest.KernelEntry:
        checked = where is not None
        return manifest.KernelEntry(k.name, self._library_member(), k.name, checked=checked, where=where or "")

    def _library_member(self) -> str:
        assert self.library is not None
        data = self.library.result().read_bytes()
        name = f"kernels/{_name(data)}.so"
        self.members[name] = data
        return name

    def _cpu_library(self, kernels: list[Kernel]) -> Path:
        found = toolchain.compiler()
        if self.planned.here:
            found = replace(toolchain.for_others(found, ()), flags=found.flags)
        else:
            found = toolchain.for_others(found, [flag for flag, _ in X86] if platform.machine() == "x86_64" else [])
        return toolchain.build_library([k.source for k in kernels], self.options, header=HEADER, found=found)

    def _features(self) -> tuple[str, ...]:
        """Features of the CPU that its kernels use."""
        if self.library is None:
            return ()
        if self.planned.here:
            return tuple(sorted(f for f in cpu_features() if FEATURES.match(f)))
        return tuple(sorted(name for _, name in X86)) if platform.machine() == "x86_64" else ()


def _name(content: str | bytes) -> str:
    return hashlib.sha256(content if isinstance(content, bytes) else content.encode()).hexdigest()[:12]


def cpu_features() -> set[str]:
    """This machine's CPU's features, by Linux's names; empty where they are unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    m = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    return set(m.group(1).split()) if m else set()


# -- for the manifest ----------------------------------------------------------------------------------
def _weights(
    captured: Mapping[str, Captured], making: Sequence[_Making]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors that variants need, by name, and the kind of each."""
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    for c in captured.values():
        tensors |= c.state
        kinds |= {name: c.kinds[name] for name in c.state}
    for m in making:
        for name in m.printer.constants:
            tensors[m.constant(name)] = m.planned.program.constants[name]
            kinds[m.constant(name)] = "constant"
    return tensors, kinds


def _program(c: Convention, names: tuple[str, ...]) -> manifest.Signature:
    for a in c.arguments:
        _encoded(a.value, f"argument {a.name}")  # raises for a value that a file cannot hold
    specs = {"in_spec": trees.text(c.in_spec, "arguments"), "out_spec": trees.text(c.out_spec, "result")}
    said = {"results": results(c.out_spec), "conditions": guards(c)}
    return manifest.Signature(**vars(c) | specs | said, names=names)


def _encoded(x: Any, what: str) -> Any:
    try:
        if isinstance(x, dict):
            return {k: encode(v) for k, v in x.items()}
        return [encode(v) for v in x] if isinstance(x, list) else encode(x)
    except ReflibError as e:
        raise PackageError(f"this model cannot be packaged: {what}: {e}") from e


def _versions(gpu: bool) -> dict[str, str]:
    from ..generate.compile_triton import _triton_version

    found = {"reflib": __version__, "torch": torch.__version__}
    if gpu:
        found["triton"] = _triton_version().split()[-1]
    return found


def _options(options: Options) -> dict[str, Any]:
    """Options that differ from the defaults and affect the code."""
    usual = asdict(Options())
    found = {k: v for k, v in asdict(options).items() if v != usual[k] and k not in _SILENT}
    found.pop("wrapper", None)
    found.pop("target", None)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def _libraries(making: Sequence[_Making]) -> tuple[manifest.Library, ...]:
    """The libraries of ops that are not PyTorch's: of those that are called, and of those that are arguments (of the op
    that functionalizes an op which writes to its arguments)."""
    found: list[Any] = [v for m in making for v in m.printer.names.values()]
    needed = {str(v) for v in found} | {op for m in making for op in m.printer.needs.values()}
    for m in making:
        calls = [n for n in walk(m.planned.program.nodes) if isinstance(n, Extern)]
        found += [t for n in calls for t in (n.target, n.out[0] if n.out else None)]
    ops = {t for t in found if isinstance(t, torch._ops.OpOverload) and t.namespace not in BUILT_IN}
    instead = {op: shim.symbol for m in making for op, shim in m.printer.shims.items() if op not in needed}
    return tuple(library_of(op, instead.get(str(op), "")) for op in sorted(ops, key=str))


def _libc(members: Mapping[str, Any]) -> str:
    """The least version of glibc that the compiled members need."""
    found = [
        tuple(map(int, v.split(b".")))
        for name, data in members.items() if name.endswith(".so") and isinstance(data, bytes)
        for v in re.findall(rb"GLIBC_(\d+\.\d+)", data)
    ]  # fmt: skip
    return ".".join(map(str, max(found))) if found else ""


# -- guards and results as text, for ``inspect`` and the README of an export ------------------------------------
def guards(c: Convention) -> tuple[str, ...]:
    """Conditions on sizes beyond their ranges: ``s77 > s17 (x.shape[0] > y.shape[0])``."""
    places = {s.symbol.name: _place(s, c.arguments) for s in sources(c.arguments)}
    names = "|".join(map(re.escape, places)) or "(?!)"
    said = [(g.text, re.sub(rf"\b({names})\b", lambda m: places[m[1]], g.text)) for g in c.guards]
    return tuple(f"{text} ({placed})" if placed != text else text for text, placed in said)


def _place(s: Source, arguments: tuple[Argument, ...]) -> str:
    """The symbol's value in terms of arguments: ``x.shape[0]``, ``(x.shape[0] - 1)//2``."""
    said = s.place(arguments)
    if s.plus:
        said = f"({said} {'-' if s.plus > 0 else '+'} {abs(s.plus)})"
    return said if s.times == 1 else f"({said}//{s.times})"


def results(spec: Any) -> tuple[str, ...]:
    """The leaves of what the model returns, in order: ``result['h']``, ``result['c'][0]``; by number where a class of
    the caller's was registered without names."""
    n = spec.num_leaves
    try:
        leaves = pytree.tree_leaves_with_path(pytree.tree_unflatten(range(n), spec))
    except Exception:  # it runs code of the caller's classes
        return tuple(f"result[{i}]" for i in range(n))
    return tuple(f"result{pytree.keystr(path)}" for path, _ in leaves)
