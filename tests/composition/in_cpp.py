"""A function as exported C++: its package is exported, compiled and loaded into this process, and called through
``model.h``, without reflib. It stands where a compiled function stands.

The project's files are compiled here without CMake, whose part ``tests/cpu/test_package_export_cpp.py`` looks at: those
that are the same in every project once.
"""

import ctypes
import functools
import hashlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from reflib import toolchain
from reflib.errors import ReflibError
from reflib.package import manifest
from reflib.package.export_cpp import _callers, export_cpp
from reflib.package.load import convention_of
from tests.composition.ops import library
from tests.composition.packaged import Packaged, called
from tests.exported_cpp import CTensor, CValue, command

TORCH = Path(torch.__file__).parent / "lib"
SAME = ("model", "values", "gpu", "graphs", "nan", "tensors", "tensors_torch")  # in all projects
HEADERS = ("model.h", "runtime.h", "host.h", "wrapper.h", "cuda_driver.h")
NONE, TENSOR, INT, FLOAT, TEXT, TRUTH = range(6)
count = itertools.count()  # of projects: no two libraries have one path


class Failed(ReflibError, IndexError):
    """What ``reflib_error`` says, which has no class."""


class Exported(Packaged):
    def load(self, device: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        if not self.path.exists():
            called.append(self)
            self.make(args, kwargs)
        if not self.loaded:
            folder = Path(self.folder.name, f"project{next(count)}")
            export_cpp(self.path, folder)
            self.library = _built(folder, [library()] if "c_shims" in self.options else [])
        with manifest.opened(self.path) as (_, about):
            (program,) = about.programs.values()
        return _Model(self.library, program, torch.device(device))


# -- compiling ----------------------------------------------------------------------------------------
@functools.cache
def _objects() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="reflib-objects-")


def _built(folder: Path, libraries: Sequence[str]) -> Path:
    """The library of the project in ``folder``, with the files that it opens beside it."""
    compiler = toolchain.find_compiler()
    sources = [*sorted(folder.glob("*.cpp")), *folder.glob("*.S")]
    objects = [_object(compiler, s) for s in sources if s.name != "main.cpp"]
    library, torch_too = folder / "build" / "model.so", (folder / "torch.cmake").exists()
    library.parent.mkdir()
    names = [n for n in ("torch_cpu", "c10", "torch_cuda", "c10_cuda") if (TORCH / f"lib{n}.so").exists()]
    linked = ["-Wl,--no-as-needed", f"-L{TORCH}", *(f"-l{n}" for n in names), f"-Wl,-rpath,{TORCH}"] * torch_too
    command(*compiler, "-shared", "-o", library, *objects, "-Wl,-Bsymbolic-functions", "-ldl", *linked, *libraries,
            "-Wl,--allow-shlib-undefined")  # fmt: skip
    for beside in (*folder.glob("kernels/*.so"), *folder.glob("*_weights.safetensors")):
        shutil.copy(beside, library.parent)
    return library


def _object(compiler: tuple[str, ...], source: Path) -> Path:
    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden"] if source.suffix == ".cpp" else []
    flags += ["-fwrapv", "-fno-strict-aliasing"] if source.name.startswith("wrapper") else []
    made = source.with_suffix(".o")
    if source.stem in SAME:
        texts = [source.read_bytes(), *(source.with_name(h).read_bytes() for h in HEADERS)]
        made = Path(_objects().name, hashlib.sha256(b"\0".join(texts)).hexdigest() + ".o")
    if not made.exists():
        command(*compiler, *flags, "-I", source.parent, "-c", source, "-o", made)
    return made


# -- calling ------------------------------------------------------------------------------------------
def _numbers() -> dict[int, torch.dtype]:
    from reflib.wrap.cpp import DTYPES

    return {n: d for d, n in DTYPES.items()}


class _Model:
    """Results are not freed."""

    def __init__(self, library: Path, program: manifest.Signature, device: torch.device):
        self.lib = ctypes.CDLL(str(library))
        self.lib.reflib_error.restype = ctypes.c_char_p
        self.device, self.program = device, program
        self.convention = convention_of(program, device)
        self.dtypes, self.model = _numbers(), ctypes.c_void_p()
        self._expect(self.lib.reflib_load(ctypes.byref(self.model), None, device.index or 0))

    def _expect(self, status: int) -> None:
        if status:
            raise Failed(self.lib.reflib_error().decode())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        wanted = {a.name for a in _callers(self.program)}
        given = [x for a, x in zip(self.program.arguments, leaves, strict=True) if a.name in wanted]
        inputs, outputs = (CValue * len(given))(), (CValue * len(self.program.outputs))()
        kept = [self._fill(v, x) for v, x in zip(inputs, given, strict=True)]
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None
        stream = ctypes.c_void_p(stream)
        self._expect(self.lib.reflib_run(self.model, stream, inputs, len(inputs), outputs, len(outputs)))
        del kept
        return pytree.tree_unflatten(self._results(outputs, given), self.convention.out_spec)

    def _fill(self, v: CValue, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            v.kind, v.integer = INT, x
            return None
        numbers = {d: n for n, d in self.dtypes.items()}
        sizes, strides = ((ctypes.c_int64 * x.dim())(*n) for n in (x.shape, x.stride()))
        device = -1 if x.device.type == "cpu" else x.device.index
        v.kind, v.tensor = TENSOR, CTensor(x.data_ptr(), numbers[x.dtype], device, x.dim(), sizes, strides, None)
        return sizes, strides

    def _results(self, values: Sequence[CValue], given: Sequence[Any]) -> list[Any]:
        """Those that share memory with an argument or each other are views of one storage, as in eager mode."""
        blocks: list[tuple[int, torch.UntypedStorage]] = [
            (s.data_ptr(), s) for x in given if isinstance(x, torch.Tensor) for s in [x.untyped_storage()]
        ]
        ends: dict[int, int] = {}
        for t in (v.tensor for v in values if v.kind == TENSOR and v.tensor.data):
            ends[t.data] = max(ends.get(t.data, 0), t.data + self._bytes(t))
        joined: list[list[int]] = []
        for start in sorted(ends):
            if any(p <= start < p + s.nbytes() for p, s in blocks):
                continue
            if joined and start < joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], ends[start])
            else:
                joined.append([start, ends[start]])
        blocks += [(start, self._storage(start, end - start)) for start, end in joined if end > start]
        return [self._result(v, blocks) for v in values]

    def _bytes(self, t: CTensor) -> int:
        sizes, strides = t.sizes[: t.dim], t.strides[: t.dim]
        last = -1 if 0 in sizes else sum((n - 1) * s for n, s in zip(sizes, strides))
        return (last + 1) * self.dtypes[t.dtype].itemsize

    def _storage(self, start: int, size: int) -> torch.UntypedStorage:
        if self.device.type == "cpu":
            flat = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=torch.uint8)
        else:
            about = {"data": (start, False), "shape": (size,), "typestr": "|u1", "version": 2}
            flat = torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": about})(), device=self.device)
        return flat.untyped_storage()

    def _result(self, v: CValue, blocks: list[tuple[int, torch.UntypedStorage]]) -> Any:
        if v.kind != TENSOR:
            made = {
                INT: lambda: v.integer,
                FLOAT: lambda: v.number,
                TEXT: lambda: v.text.decode(),
                TRUTH: lambda: bool(v.integer),
            }
            return made.get(v.kind, lambda: None)()
        t = v.tensor
        dtype, sizes, strides = self.dtypes[t.dtype], t.sizes[: t.dim], t.strides[: t.dim]
        device = "cpu" if t.device == -1 else self.device
        found = next(((p, s) for p, s in blocks if p <= (t.data or 0) < p + s.nbytes()), None)
        if found is None:
            return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        at = (t.data - found[0]) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=device).set_(found[1], at, sizes, strides)
