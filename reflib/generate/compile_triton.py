"""Triton source to a binary, ahead of time: no GPU is needed, any known architecture will do.

A compiled kernel is plain data (:class:`Binary`), kept in the on-disk cache. When it is found there Triton is not
imported, which saves most of a warm start.
"""

import contextlib
import ctypes
import functools
import importlib
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch

from .. import cache, failures
from ..errors import CacheError, DeviceError, ToolchainError
from ..ir.expr import expr
from ..target import Target
from . import libdevice
from .kernel import Kernel
from .triton_facts import pointer_name

_FORMAT = 10  # of the cached data; change it when Binary or how we compile changes
_SCRATCH_ALIGN = 128

_TYPES = {
    torch.bool: "*i8", torch.uint8: "*u8",
    torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint16: "*u16", torch.uint32: "*u32", torch.uint64: "*u64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and how to launch it. Plain data.

    image: a cubin (CUDA) or a code object (HIP). entry: the function's name in it.
    shared: bytes of dynamic shared memory. num_warps, warp: threads per program are num_warps * warp.
    pointers, symbols: how many arguments of each kind come before Triton's two hidden pointers. scratch: bytes of
    global scratch per program that the kernel was planned with (if not 0, its address is one more argument, Triton's
    first hidden pointer). pdl: may be launched before the previous kernel has ended. ptx: the assembly text, for later
    GPUs (CUDA).
    """

    name: str
    arch: str
    entry: str
    shared: int
    num_warps: int
    warp: int
    pointers: int
    symbols: int
    scratch: int
    image: bytes = field(repr=False)
    ptx: str = field(default="", repr=False)
    pdl: bool = False


def compile_kernel(kernel: Kernel, target: Target, fewer_stages: bool = False) -> Binary:
    """``kernel`` for ``target``, from the cache or from Triton. A kernel that differs from one that is there in names
    alone (a tuned one has another number in the program) is assembled from that one's PTX, which takes a quarter of the
    time. ``fewer_stages``: where its stages need more shared memory than the target has, it is compiled with fewer
    (how much a stage takes is Triton's decision, which the model behind a tiling only estimates). Raises ToolchainError
    (no Triton, or it refused the source) or DeviceError (more shared memory than the target has)."""
    key = _key(kernel, target)
    named = target.kind != "cuda" or "tl.device_assert(" in kernel.source  # (whose messages have its name)
    first = key if named else _key(_nameless(kernel), target)
    like = _kept(first)
    if like is not None and like.name == kernel.name:
        return like
    if first != key and (found := _kept(key)) is not None:
        return found
    if like is not None:
        binary = _renamed(like, kernel, target)
    else:
        try:
            binary = _compile(kernel, target, key)
        except DeviceError:
            if not fewer_stages or kernel.num_stages == 1:
                raise
            binary = compile_kernel(replace(kernel, num_stages=kernel.num_stages - 1), target, True)
    cache.put("triton", first if like is None else key, _to_bytes(binary), ".bin")
    return binary


def _kept(key: str) -> Binary | None:
    data = cache.read("triton", key)
    if data is not None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return _from_bytes(data)
    return None


def alike(kernels: Iterable[Kernel]) -> dict[Kernel, Kernel]:
    """Each kernel, and the first one whose machine code is the same: the layers of a model differ in names alone. A
    profiler shows the name of the first for all of them."""
    first: dict[Kernel, Kernel] = {}
    return {k: first.setdefault(_nameless(k) if k.language == "triton" else k, k) for k in kernels}


@functools.lru_cache(1024)  # asked for when building begins, when kernels are bound, and by ``compile_kernel``
def _nameless(kernel: Kernel) -> Kernel:
    """What the machine code follows from: no comments, no grid, numbers for names of the function and its pointers."""
    numbers = {pointer_name(b): f"<{i}>" for i, (b, _) in enumerate(kernel.buffers)}
    own = rf"(?<![\w.]){re.escape(kernel.name)}"  # (not the op in ``tl.exp``, of a kernel ``exp``)
    text = re.sub(r"^ *#.*\n", "", re.sub(own, "<>", kernel.source), flags=re.M)
    text = re.sub(r"\w+_ptr\b", lambda m: numbers.get(m[0], m[0]), text)
    buffers = tuple((str(i), dtype) for i, (_, dtype) in enumerate(kernel.buffers))
    return replace(kernel, name="", source=text, buffers=buffers, grid=expr(1))


def start_triton() -> None:
    """What Triton does once in a process, before its first kernel: imports."""
    with contextlib.suppress(ImportError), _front_end:
        importlib.import_module("triton.compiler.code_generator")
        importlib.import_module("triton.backends.nvidia.compiler")


def _key(kernel: Kernel, target: Target) -> str:
    own = (str(getattr(kernel, f.name)) for f in fields(kernel) if f.name != "grid")
    return cache.key("triton", _FORMAT, _triton_version(), target.arch, target.warp, *own)


@functools.cache
def _triton_version() -> str:
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "none"


# -- compiling --------------------------------------------------------------------------------------
def load_function(kernel: Kernel, key: str = "") -> Any:
    """The kernel's ``@triton.jit`` function. Its text is written to the cache, where Triton and debuggers read it."""
    path = cache.put("kernels", key or cache.key("source", kernel.source), kernel.source.encode(), ".py")
    names: dict[str, Any] = {"__name__": f"reflib_kernel_{kernel.name}", "__file__": str(path)}
    exec(compile(kernel.source, str(path), "exec"), names)
    return names[kernel.name]


def signature(kernel: Kernel, parameters: list[str]) -> dict[str, str]:
    """Triton's types of the parameters: pointers, then sizes, then constants."""
    types = [_TYPES[d] for _, d in kernel.buffers]
    types += ["i32" if kernel.index_type == "int32" else "i64"] * len(kernel.symbols)
    types += ["constexpr"] * (len(parameters) - len(types))
    return dict(zip(parameters, types))


def parse(kernel: Kernel, target: Target) -> None:
    """Raises ToolchainError if Triton's front end refuses the source; its passes and the assembler are not asked."""
    _compile(kernel, target, _key(kernel, target), only_parse=True)


def _compile(kernel: Kernel, target: Target, key: str, only_parse: bool = False) -> Any:
    try:
        with _front_end:
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource
    except ImportError as e:
        raise ToolchainError(f"Triton is needed to compile kernels for {target.arch}: pip install triton ({e})") from e
    where = (
        GPUTarget("cuda", target.capability, 32)
        if target.kind == "cuda"
        else GPUTarget("hip", target.arch, target.warp)
    )
    options = _options(kernel)
    attrs = {(i,): [["tt.divisibility", 16]] for i in kernel.aligned}
    by_hand = ""

    def attempt() -> tuple[dict[str, Any], Any]:
        nonlocal by_hand
        with _private_settings(), same_addresses():
            with _front_end:
                fn = load_function(kernel, key)
                constants = {p.name: p.default for p in fn.params if p.is_constexpr}
                types = signature(kernel, list(fn.arg_names))
                by_hand = BY_HAND.format(kernel.source, kernel.name, types, constants, attrs, repr(where), options)
                module, stages, facts = _parsed(ASTSource(fn, types, constants, attrs), where, options)
            return {} if only_parse else _passes(module, stages, facts, kernel.keep_loops), facts

    try:
        try:
            made, facts = attempt()
        except Exception as e:
            if not failures.crashed(f"{type(e).__name__}: {e}"[:1000]):  # without the source that ptxas's holds
                raise
            failures.forget(e)
            with failures.ALONE:
                made, facts = attempt()
    except CacheError:
        raise
    except Exception as e:
        raise ToolchainError(failures.of_kernel(kernel.name, kernel.source, target.arch, e, by_hand)) from e
    return None if only_parse else _binary(kernel, target, made, SimpleNamespace(**facts))


def _options(kernel: Kernel) -> dict[str, Any]:
    """Triton's, of how it compiles."""
    # else every sum of integers becomes a comparison in 64 bits, which is dropped only after it was built
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "sanitize_overflow": False}
    options |= dict(kernel.settings)
    if kernel.exact:
        options |= {"enable_fp_fusion": False, "enable_reflect_ftz": False}
    if "tl.device_assert(" in kernel.source:  # else Triton drops them
        options["debug"] = True
    return options


def _renamed(like: Binary, kernel: Kernel, target: Target) -> Binary:
    """``kernel``, which does what ``like`` does under another name: Triton's last pass alone, on its PTX."""
    try:
        with _front_end:
            from triton.backends.compiler import GPUTarget, Language
            from triton.compiler.compiler import make_backend
    except ImportError as e:
        raise ToolchainError(f"Triton is needed to compile kernels for {target.arch}: pip install triton ({e})") from e
    backend, stages = make_backend(GPUTarget("cuda", target.capability, 32)), dict[str, Callable[..., Any]]()
    backend.add_stages(stages, backend.parse_options(_options(kernel)), Language.TRITON)
    old = re.escape(like.entry)  # (an instruction may be called so, too)
    places = rf"(\.entry |\.globl\t|function |// @){old}\b|\b{old}(?=_param_\d)"
    ptx = re.sub(places, lambda m: f"{m[1] or ''}{kernel.name}", like.ptx)
    try:
        with _private_settings(), same_addresses():
            image = stages["cubin"](ptx, {"name": kernel.name})
    except Exception as e:
        raise ToolchainError(failures.of_kernel(kernel.name, kernel.source, target.arch, e, "")) from e
    return replace(like, name=kernel.name, entry=kernel.name, image=image, ptx=ptx)


def _parsed(
    source: Any, target: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Callable[..., Any]], dict[str, Any]]:
    """The module in Triton's language, the passes by their result ("ptx", "cubin", ...), what these write facts to."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, parsed, source.language)
    helpers = backend.get_codegen_implementation(parsed), backend.get_module_map()
    return source.make_ir(target, parsed, *helpers, context), stages, {"target": target, **parsed.__dict__}


def _passes(
    module: Any, stages: dict[str, Callable[..., Any]], facts: dict[str, Any], keep_loops: bool
) -> dict[str, Any]:
    """What ``triton.compile`` does, but for its cache, whose eight files per kernel take longer than some passes; our
    cache has what we need. Returns the results by stage; ``facts`` such as the shared memory are added."""
    made: dict[str, Any] = {}
    for stage, run in stages.items():
        module = run(module, facts)
        if stage == "ptx":
            module = without_packed_adds(with_loops_kept(module) if keep_loops else module)
        made[stage] = module
    return made


# What was asked of Triton, as a program.
BY_HAND = """{0}

if __name__ == "__main__":
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    asked = ASTSource({1}, {2!r}, {3!r}, {4!r})
    print(triton.compile(asked, target={5}, options={6!r}).metadata)
"""


# Triton's part in Python, for one thread at a time: it parses functions, and keeps tables of them, in ways that are not
# safe in threads (Python 3.11's own parser miscounts its recursion depth then, gh-106905). Passes and the assembler run
# beside one another. (A child does not have the thread that was in it.)
_front_end = threading.Lock()
os.register_at_fork(after_in_child=_front_end._at_fork_reinit)  # type: ignore[attr-defined]

_KEEP = 0xFFFFFFFF  # personality(2): only return it
_FIXED = 0x0040000 | 0x0200000  # ADDR_NO_RANDOMIZE; ADDR_COMPAT_LAYOUT, whatever the limit of the stack is


@contextlib.contextmanager
def same_addresses() -> Iterator[None]:
    """Processes that this thread starts within have their memory at the same addresses each time. NVIDIA's assembler
    for Blackwell (ptxas 12.9 to 13.1) numbers registers by addresses: the same PTX for sm_100 resulted in two or three
    variants of machine code. Where this is not permitted (by a container, on another system), nothing is changed."""
    personality = getattr(ctypes.CDLL(None), "personality", lambda _: -1)  # Linux has it
    before = personality(ctypes.c_ulong(_KEEP))
    changed = before != -1 and personality(ctypes.c_ulong(before | _FIXED)) != -1
    try:
        yield
    finally:
        if changed:
            personality(ctypes.c_ulong(before))


def _binary(kernel: Kernel, target: Target, made: dict[str, Any], m: Any) -> Binary:
    scratch, align = getattr(m, "global_scratch_size", 0) or 0, getattr(m, "global_scratch_align", 1) or 1
    if scratch > kernel.scratch or align > _SCRATCH_ALIGN:
        raise ToolchainError(
            f"kernel {kernel.name} was planned with {kernel.scratch} bytes of scratch memory per program; "
            f"Triton needs {scratch}, in multiples of {align}"
        )
    # a cluster's size is in the code; the launchers need not know it
    unknown = getattr(m, "num_ctas", 1) != 1 and ".reqnctapercluster" not in made.get("ptx", "")
    if unknown or getattr(m, "profile_scratch_size", 0):
        raise ToolchainError(f"kernel {kernel.name} needs a cluster or a profile, which the launchers do not support")
    binary = Binary(
        name=kernel.name, arch=target.arch, entry=m.name, shared=m.shared, num_warps=m.num_warps,
        warp=getattr(m, "warp_size", target.warp), pointers=len(kernel.buffers), symbols=len(kernel.symbols),
        scratch=kernel.scratch, image=made["cubin" if target.kind == "cuda" else "hsaco"],
        ptx=made["ptx"] if target.kind == "cuda" else "",
        pdl=kernel.pdl,
    )  # fmt: skip
    if target.shared and m.shared > target.shared:
        used = f"{kernel.num_warps} warps, {kernel.num_stages} stages"
        with contextlib.suppress(ToolchainError, OSError):
            used = f"{resources(binary)['registers']} registers per thread, {used}"
        has = f"{target.arch} has {target.shared} per block ({used})"
        text = f"kernel {kernel.name} needs {m.shared} bytes of shared memory; {has}"
        raise DeviceError(f"{text}\n{failures.marked(kernel.source, 0)}\n{failures.advice(text)}")
    return binary


_settings_lock = threading.Lock()
_settings_users = 0
_settings_exit = contextlib.ExitStack()


@contextlib.contextmanager
def _private_settings() -> Iterator[None]:
    """Triton's process-wide settings while at least one thread compiles: no source lines in binaries (half the size,
    and no local paths), and of libdevice only what a kernel calls."""
    global _settings_users
    from triton import knobs
    from triton._C.libtriton import llvm

    with _settings_lock:
        _settings_users += 1
        if _settings_users == 1:
            _settings_exit.enter_context(knobs.compilation.scope())
            knobs.compilation.disable_line_info = True
            whole = llvm.link_extern_libs
            llvm.link_extern_libs = functools.partial(libdevice.link, whole)
            _settings_exit.callback(setattr, llvm, "link_extern_libs", whole)
    try:
        yield
    finally:
        with _settings_lock:
            _settings_users -= 1
            if _settings_users == 0:
                _settings_exit.close()


def with_loops_kept(ptx: str) -> str:
    """PTX with the pragma ``nounroll`` on its kernel (PTX ISA 8.8, 13.1): ptxas unrolls loops with a constant number of
    rounds up to some thousand instructions, and then needs seconds to schedule them."""
    return re.sub(r"^(\.visible )?\.entry[^{]*", lambda m: f'{m[0]}.pragma "nounroll";\n', ptx, flags=re.M)


_PACKED_ADD = re.compile(r"^(\s*)add\.[su]16x2\s+(%\w+), (%\w+), (%\w+);", re.M)
_TWO_ADDS = r"""\1{ .reg .b16 %half<4>;
\1mov.b32 {%half0, %half1}, \3;
\1mov.b32 {%half2, %half3}, \4;
\1add.s16 %half0, %half0, %half2;
\1add.s16 %half1, %half1, %half3;
\1mov.b32 \2, {%half0, %half1}; }"""


def without_packed_adds(ptx: str) -> str:
    """PTX with two adds in place of each one of two packed 16-bit numbers. ptxas (12.8, 12.9, 13.0; right in 13.3) adds
    0 instead of a constant where only the low half of the sum is used (triton-lang/triton#11581). LLVM packs index
    arithmetic on sm_90 and later: a kernel of Swin's backward stored its rows in the wrong places."""
    return _PACKED_ADD.sub(_TWO_ADDS, ptx)


# -- plain data -------------------------------------------------------------------------------------
def _to_bytes(b: Binary) -> bytes:
    facts = asdict(b)
    image, ptx = facts.pop("image"), facts.pop("ptx").encode()
    facts["sizes"] = [len(image), len(ptx)]
    return json.dumps(facts, sort_keys=True).encode() + b"\n" + image + ptx


def _from_bytes(data: bytes) -> Binary:
    head, _, rest = data.partition(b"\n")
    facts = json.loads(head)
    n, m = facts.pop("sizes")
    return Binary(**facts, image=rest[:n], ptx=rest[n : n + m].decode())


# -- looking at a binary ----------------------------------------------------------------------------
def resources(binary: Binary) -> dict[str, int]:
    """``registers`` per thread, ``stack`` bytes (spills) and static ``shared`` bytes of a CUDA binary, as NVIDIA's
    own tool (which Triton carries) reports them. For ``explain`` and for tests."""
    out = _tool("cuobjdump", ["--dump-resource-usage"], binary)
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", out)}
    return {
        "registers": found.get("REG", 0),
        "stack": found.get("STACK", 0) + found.get("LOCAL", 0),
        "shared": found.get("SHARED", 0),
    }


def sass(binary: Binary) -> str:
    """The machine code as text."""
    return _tool("nvdisasm", ["-c"], binary)


def _tool(name: str, flags: list[str], binary: Binary) -> str:
    from triton import knobs

    path = getattr(knobs.nvidia, name).path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(binary.image)
        f.flush()
        done = subprocess.run([path, *flags, f.name], capture_output=True, text=True)
    if done.returncode:
        raise ToolchainError(f"{name} failed on {binary.name}: {done.stderr.strip()}")
    return done.stdout
