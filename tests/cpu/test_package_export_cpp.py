"""Packages as C++ projects: built, run, and compared with Python; against a stand-in for the CUDA driver; refused."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.export import Dim

import reflib
from reflib.cli import cli
from reflib.errors import OptionError, PackageError
from reflib.ir.data import encode
from reflib.ir.expr import Sym, expr
from reflib.package import archive, describe, example, manifest
from reflib.package.export_cpp import MARKER, _why, export_cpp
from reflib.wrap import host
from tests import exported_cpp
from tests.exported_cpp import build, build_and_run, command, run
from tests.packages import CASES

Tensor = torch.Tensor
close = torch.testing.assert_close
pytestmark = pytest.mark.skipif(bool(exported_cpp.missing_tools()), reason="needs cmake and ninja")


def equal(got: list[Tensor], want: Any) -> None:
    want = want if isinstance(want, (tuple, list)) else [want]
    assert len(got) == len(want)
    for g, w in zip(got, want):
        assert g.dtype == w.dtype and g.shape == w.shape and torch.equal(g, w)


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


# -- on a CPU, without PyTorch --------------------------------------------------------------------------------
class Rows(torch.nn.Module):
    """Weights that share memory, some of odd sizes; a buffer that calls write to; a mutated argument; an index."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(7))
        self.table = torch.nn.Parameter(torch.randn(5, 7))
        self.same = self.table
        self.register_buffer("calls", torch.zeros(3, 2).t())

    def forward(self, x: Tensor, i: Tensor, seen: Tensor, y: Tensor) -> tuple[Any, ...]:
        self.calls.add_(1)
        seen.copy_(x.sum(1))
        z = torch.softmax(x * self.scale + self.table[i] - self.same[0], -1) + torch.arange(7.0) + y.sum()
        return z, self.calls * 2, x.shape[0], 2.5, None, z.t()[1:3]


def rows(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 7), torch.randint(5, (n,)), torch.zeros(n), torch.randn(4, 3).t()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a package for CPUs, its project, built)."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cpu")
    n = Dim("n", min=3, max=50)
    shapes = {"x": {0: n}, "i": {0: n}, "seen": {0: n}, "y": None}
    reflib.aot_compile(Rows(), rows(8), folder / "rows.reflib", "cpu", dynamic_shapes=shapes)
    export_cpp(folder / "rows.reflib", folder / "project")
    build(folder / "project")
    return folder / "rows.reflib", folder / "project"


def test_a_model_without_pytorch(on_cpu: tuple[Path, Path]) -> None:
    package, project = on_cpu
    linked = command("ldd", project / "build" / "librows.so") + command("ldd", project / "build" / "example")
    assert "libstdc++" in linked and not re.search("lib(torch|c10|cuda|python)", linked)
    for n in (3, 8, 50):
        args = rows(n)
        want = reflib.load(package)(*args)
        got = run(project / "build", args)
        assert int(got[2]) == n and float(got[3]) == 2.5
        equal([*got[:2], got[4]], [*want[:2], want[5]])  # (None is not printed as a tensor)
    said = command(project / "build" / "example")
    assert "arm cpu" in said and "output 0: float32 [3, 7]" in said and "output 4: none" in said


def test_nothing_is_written_outside(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    project = on_cpu[1]
    assert not [n for n in files(project / "build") if "torch" in n.lower()]
    weights = (project / "weights.safetensors").read_bytes()
    command(project / "build" / "example")
    assert (project / "build" / "weights.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    "i, wrong, says",
    [
        (0, torch.randn(8, 6), r"argument \d+ \(x\): expected float32 \[any, 7\].*; got float32 \[8, 6\]"),
        (0, torch.randn(8, 7).double(), r"\(x\): expected float32 .*; got float64 \[8, 7\], strides \[7, 1\], on cpu"),
        (0, torch.randn(7, 8).t(), r"\(x\): expected .*strides \[7, 1\].*; got .* strides \[1, 8\]"),
        (1, torch.zeros(8), r"\(i\): expected int64 .*; got float32"),
        (1, torch.zeros(9, dtype=torch.int64), r"\(i\): size 9 in dimension 0, expected s\d+ = 8"),
        (1, torch.full((8,), 5), "index out of range in kernel k"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(on_cpu: tuple[Path, Path], i: int, wrong: Tensor, says: str) -> None:
    args = [*rows(8)]
    args[i] = wrong
    with pytest.raises(AssertionError, match=says):
        run(on_cpu[1] / "build", args)


@pytest.mark.parametrize("n", [0, 2, 51])
def test_sizes_outside_the_range(n: int, on_cpu: tuple[Path, Path]) -> None:
    says = rf"it was exported where 3 <= (s\d+) <= 50 holds of the arguments' sizes; here \1 = {n}"
    with pytest.raises(AssertionError, match=says):
        run(on_cpu[1] / "build", rows(n))


def test_other_weights(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    program = on_cpu[1] / "build" / "example"
    (tmp_path / "short").write_bytes(b"no")
    with pytest.raises(AssertionError, match=r"short have 2 bytes, this model's have \d+"):
        command(program, "--weights", tmp_path / "short")
    with pytest.raises(AssertionError, match=r"cannot open the weights .*gone: No such file"):
        command(program, "--weights", tmp_path / "gone")


# What model.h declares, for Python.
class CTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("device", ctypes.c_int32), ("dim", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("owner", ctypes.c_void_p),
    ]  # fmt: skip


class CAny(ctypes.Union):
    _fields_ = [("tensor", CTensor), ("integer", ctypes.c_int64), ("number", ctypes.c_double)]


class CValue(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("any", CAny)]


def value(t: Tensor) -> CValue:
    v = CValue(kind=1)
    v.any.tensor = CTensor(
        t.data_ptr(), {torch.float32: 6, torch.int64: 4}[t.dtype], -1, t.dim(),
        (ctypes.c_int64 * t.dim())(*t.shape), (ctypes.c_int64 * t.dim())(*t.stride()),
    )  # fmt: skip
    return v


def floats(v: CValue) -> Tensor:
    t = v.any.tensor
    size = [t.sizes[d] for d in range(t.dim)]
    last = 1 + sum((n - 1) * t.strides[d] for d, n in enumerate(size))
    flat = torch.frombuffer(bytearray(ctypes.string_at(t.data, 4 * last)), dtype=torch.float32)
    return flat.as_strided(size, [t.strides[d] for d in range(t.dim)])


def test_the_functions_of_model_h(on_cpu: tuple[Path, Path]) -> None:
    """Called from here: results outlive the model, weights and arguments are written to, files are not."""
    lib = ctypes.CDLL(str(on_cpu[1] / "build" / "librows.so"))
    lib.reflib_error.restype = ctypes.c_char_p
    models = [ctypes.c_void_p(), ctypes.c_void_p()]
    for m in models:
        assert lib.reflib_load(ctypes.byref(m), None, 0) == 0, lib.reflib_error()
    args = rows(4)
    ins = (CValue * 4)(*map(value, args))
    out = (CValue * 6)()
    for turn in (1, 2, 3):
        assert lib.reflib_run(models[0], None, ins, 4, out, 6) == 0, lib.reflib_error()
        close(floats(out[1]), torch.full((2, 3), 2.0 * turn))
        close(args[2], args[0].sum(1))
        assert (out[2].kind, out[2].any.integer, out[3].any.number, out[4].kind) == (2, 4, 2.5, 0)
        for v in out if turn < 3 else ():
            lib.reflib_free(ctypes.byref(v))
    other = (CValue * 6)()
    assert lib.reflib_run(models[1], None, ins, 4, other, 6) == 0
    close(floats(other[1]), torch.full((2, 3), 2.0))  # each has weights of its own
    for m in models:
        lib.reflib_unload(m)
    close(floats(out[0]), floats(other[0]))
    for v in (*out, *other):
        lib.reflib_free(ctypes.byref(v))
    assert lib.reflib_load(ctypes.byref(models[0]), None, 0) == 0
    assert lib.reflib_run(models[0], None, ins, 3, out, 6)
    assert lib.reflib_error() == b"the model takes 4 inputs and gives 6 outputs; called with 3 and 6"
    lib.reflib_unload(models[0])


def test_tensors_that_cannot_be(on_cpu: tuple[Path, Path]) -> None:
    """What a caller says of a tensor is checked before it is used: nothing is read, nothing is allocated."""
    lib = ctypes.CDLL(str(on_cpu[1] / "build" / "librows.so"))
    lib.reflib_error.restype = ctypes.c_char_p
    m = ctypes.c_void_p()
    assert lib.reflib_load(ctypes.byref(m), None, 0) == 0
    args = rows(4)
    out = (CValue * 6)()

    def said(rc: int) -> str:
        assert rc != 0
        return lib.reflib_error().decode()

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sizes": (-4, 7)}, "size -4 in dimension 0"), ({"sizes": (4, -(2**63))}, f"size -{2**63} in dimension 1"),
        ({"strides": (-7, 1)}, "stride -7 in dimension 0"), ({"dim": -1}, "-1 dimensions"), ({"dim": 65}, "65 dimensions"),
        ({"sizes": (2**62, 2**62)}, "2^63 bytes or more"), ({"sizes": (2**61, 7)}, "2^63 bytes or more"),
        ({"strides": (2**62, 2**62)}, "2^63 bytes or more"), ({"dtype": 99}, "there is no dtype 99"), ({"dtype": -1}, "there is no dtype -1"),
        ({"sizes": None}, "no sizes or no strides"), ({"strides": None}, "no sizes or no strides"),
        ({"data": None}, "it has no data"), ({"device": 0}, "it is on GPU 0, where the model is not"),
    ]  # fmt: skip
    for change, says in wrong:
        ins = (CValue * 4)(*map(value, args))
        for name, v in change.items():
            lists = name in ("sizes", "strides")
            setattr(ins[0].any.tensor, name, (ctypes.c_int64 * 2)(*v) if lists and v else v)
        message = said(lib.reflib_run(m, None, ins, 4, out, 6))
        assert message.startswith("argument ") and " (x): " in message and says in message
        assert {v.kind for v in out} == {0}, "there is nothing to free"
        copied = value(torch.randn(4, 7))
        assert f"cannot copy: {says}" in said(lib.reflib_copy(m, None, ctypes.byref(copied), ctypes.byref(ins[0])))
        assert f"cannot copy: {says}" in said(lib.reflib_copy(m, None, ctypes.byref(ins[0]), ctypes.byref(copied)))
        if "data" not in change:
            ins[0].any.tensor.data = None
            assert f"cannot make a tensor: {says}" in said(lib.reflib_new(m, None, ctypes.byref(ins[0])))
    ins = (CValue * 4)(*map(value, args))
    ins[0].kind = 2
    assert "(x): expected float32" in (message := said(lib.reflib_run(m, None, ins, 4, out, 6))) and "got an int" in message
    empty = value(torch.empty(0, 7))
    empty.any.tensor.sizes = (ctypes.c_int64 * 2)(0, 2**62)
    assert lib.reflib_new(m, None, ctypes.byref(empty)) == 0, "no elements, no bytes"
    lib.reflib_free(ctypes.byref(empty))
    lib.reflib_free(ctypes.byref(empty))  # it is none any more
    lib.reflib_unload(m)


class Cut(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor, n: int) -> Tensor:
        return (x[:, :3] * n + torch.cat([y, y])).relu()


def test_ints_ranges_and_guards(tmp_path: Path) -> None:
    """An int with a range; and a size that must be twice another's, which only a guard says."""
    dims = {"x": {0: Dim("a", min=4, max=64)}, "y": {0: Dim("b", min=2, max=32)}, "n": Dim.DYNAMIC(min=3, max=9)}
    dims["x"] = {0: 2 * dims["y"][0]}
    path = reflib.aot_compile(Cut(), (torch.randn(8, 6), torch.randn(4, 3), 5), tmp_path / "c.reflib", "cpu", dynamic_shapes=dims)
    built = build(export_cpp(path, tmp_path / "p"))
    for b, n in ((4, 5), (2, 3), (32, 9)):
        args = torch.randn(2 * b, 6), torch.randn(b, 3), n
        equal(run(built, args), reflib.load(path)(*args))
    for args, says in [
        ((torch.randn(8, 6), torch.randn(4, 3), 2), r"3 <= (s\d+) <= 9 holds of the arguments' sizes; here \1 = 2"),
        ((torch.randn(8, 6), torch.randn(4, 3), 10), r"<= 9 holds of the arguments' sizes; here s\d+ = 10"),
        ((torch.randn(8, 6), torch.randn(4, 3), -(2**63)), rf"<= 9 holds of the arguments' sizes; here s\d+ = -{2**63}"),
        ((torch.randn(9, 6), torch.randn(4, 3), 5), r"\(x\): size 9 in dimension 0, expected 2 ?\* ?s\d+ = 8"),
    ]:
        with pytest.raises(AssertionError, match=says):
            run(built, args)


class Halves(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] > 2 * y.shape[0]:
            return x * 2
        return y * 3


def test_a_guard(tmp_path: Path) -> None:
    args = torch.randn(9, 3), torch.randn(4, 3)
    shapes = {"x": {0: Dim.DYNAMIC}, "y": {0: Dim.DYNAMIC}}
    path = reflib.aot_compile(Halves(), args, tmp_path / "c.reflib", "cpu", dynamic_shapes=shapes)
    (program,) = manifest.read(archive.open(path).manifest).programs.values()
    assert program.guards
    built = build(export_cpp(path, tmp_path / "p"))
    equal(run(built, args), args[0] * 2)
    with pytest.raises(AssertionError, match=r"it was exported where .* holds of the arguments' sizes; here s\d+ = \d"):
        run(built, (torch.randn(8, 3), args[1]))


class Named(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        if x.shape[0] * x.shape[1] > 100 and y.shape[0] % 4 == 0:
            return {"h": x + 1, "c": (y * 2, [x - 1])}
        return {"h": x}


def test_sizes_of_the_example_and_names_of_results(tmp_path: Path) -> None:
    """A guard excludes the least sizes."""
    shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "y": {0: Dim.DYNAMIC}}
    args = torch.randn(20, 20), torch.randn(8)
    path = reflib.aot_compile(Named(), args, tmp_path / "n.reflib", "cpu", dynamic_shapes=shapes)
    project = export_cpp(path, tmp_path / "p")
    said = command(build(project) / "example")
    assert "output 0: float32 [8, 16]" in said and "output 1: float32 [4]" in said
    text = (project / "README.md").read_text()
    assert re.search(r"It holds of the sizes: `s\d+\*s\d+ > 100 \(x\.shape\[\d\]\*x\.shape\[\d\] > 100\)`\.", text)
    for i, name in enumerate(['result["h"]', 'result["c"][0]', 'result["c"][1][0]']):
        assert f"| {i} | `{name}` |" in text
    assert "No sizes of which" not in text


def guarded(*guards: tuple[str, Any], hints: tuple[int | None, ...], most: int | None = None) -> manifest.Program:
    """A program of an argument x, with so many sizes s0, s1, ..., and guards of them."""
    sizes = [Sym(f"s{i}", lo=2, hi=most, hint=h) for i, h in enumerate(hints)]
    x = manifest.Tensor("float32", encode(tuple(map(expr, sizes))), encode(tuple(map(expr, sizes))), "cpu")
    listed = tuple(manifest.Guard(kind, encode(what(*map(expr, sizes))), "") for kind, what in guards)
    ranges = {s.name: (2, most) for s in sizes}
    return manifest.Program(("",), (manifest.Argument("x", x),), (), "", "", ranges, ("cpu",), listed)


def test_how_sizes_are_found() -> None:
    def large(*s: Any) -> Any:
        return sum(s[1:], s[0]) - 100

    assert example.sizes(guarded(hints=(20, 20))) == ({"s0": 2, "s1": 2}, True)
    found, good = example.sizes(guarded(("differs", lambda a, b: a - b), hints=(20, 20)))
    assert good and sorted(found.values()) == [2, 4]
    assert example.sizes(guarded(("equal", lambda a: a - 37), hints=(37,))) == ({"s0": 37}, True), "as it was exported"
    assert example.sizes(guarded(("at_least", large), hints=(None,), most=200)) == ({"s0": 128}, True)
    many = tuple(range(90, 100))
    assert example.sizes(guarded(("at_least", large), hints=many)) == ({f"s{i}": h for i, h in enumerate(many)}, True)
    assert example.sizes(guarded(("equal", lambda a: a - 37), hints=(None,))) == ({"s0": 2}, False)
    assert example.sizes(guarded(("equal", lambda a, b: a // (b - 2)), hints=(3, 8))) == ({"s0": 2, "s1": 8}, True), "not by 0"


def test_names_of_results_of_classes() -> None:
    """Of classes that are not known here, too."""
    leaf = {"type": None, "context": None, "children_spec": []}

    def names(kind: str, context: Any, children: int = 2) -> list[str]:
        tree = json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf] * children}])
        return describe.results(manifest.Program((), (), (), "", tree, {}, ()))

    assert names("its.ModelOutput", '["logits", "loss"]') == ['result["logits"]', 'result["loss"]']
    assert names("its.Dataclass", '[["h", "c"], ["gone"]]') == ["result.h", "result.c"]
    assert names("collections.namedtuple", "its:Pair") == names("its.Box", '{"any": 1}') == ["result[0]", "result[1]"]
    found = {"default_factory_module": "builtins", "default_factory_name": "list", "dict_context": ["a", 3]}
    assert names("collections.defaultdict", found) == ['result["a"]', "result[3]"]


# -- on a CPU, with PyTorch -----------------------------------------------------------------------------------
class Calls(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(self.inner(x))
        self.total.add_(y.sum(0))
        return *torch.sort(y, -1), torch.cumsum(y, 0) @ torch.ones(4, 4), self.total + 1


def test_a_model_that_calls_aten(tmp_path: Path) -> None:
    torch.manual_seed(0)
    package = reflib.aot_compile(Calls(), (torch.randn(8, 16),), tmp_path / "calls it.reflib", "cpu")
    x = torch.randn(8, 16)
    got = build_and_run(package, tmp_path / "project", [x])
    equal(got, reflib.load(package)(x))
    text = (tmp_path / "project" / "README.md").read_text()
    assert "To build it: CMake 3.18, a C++17 compiler, PyTorch 2.11 or later" in text
    assert "To run it: PyTorch's libraries.\n" in text
    assert "libtorch_cpu" in command("ldd", tmp_path / "project" / "build" / "libcalls_it.so")
    with pytest.raises(AssertionError, match=r"argument \d \(x\): expected float32 \[8, 16\].*got float32 \[8, 17\]"):
        run(tmp_path / "project" / "build", [torch.randn(8, 17)])


def test_pytorchs_functions_are_those_of_the_process() -> None:
    text = (Path(reflib.__file__).parent / "package" / "cpp" / "tensors_torch.cpp").read_text()
    found = re.findall(r'^    \{"(\w+)", (\w+)\},', text, re.M)
    assert [(n, w.lower()) for n, w in found] == list(host.FUNCTIONS)


# -- against a stand-in for the driver ------------------------------------------------------------------------
STAND_IN = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void *current;
static int blocks, modules, contexts;
static FILE *out(void) { static FILE *f; return f ? f : (f = fopen(getenv("STAND_IN_LOG"), "w")); }
#define NOTE(...) (fprintf(out(), __VA_ARGS__), fputc('\n', out()))
static int setting(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }
__attribute__((destructor)) static void end(void) {
    NOTE("{\"left\": [%d, %d, %d]}", blocks, modules, contexts);
    fclose(out());
}
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int cuInit(unsigned f) { return 0; }
int cuGetErrorName(int r, const char **s) { *s = "CUDA_ERROR_STAND_IN"; return 0; }
int cuGetErrorString(int r, const char **s) { *s = "the stand-in says no"; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetCount(int *n) { *n = setting("STAND_IN_GPUS", 1); return 0; }
int cuDeviceGetName(char *s, int n, int d) { strcpy(s, "Stand-In"); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
    int c = setting("STAND_IN_CAPABILITY", 90);
    *v = a == 75 ? c / 10 : a == 76 ? c % 10 : a == 97 ? setting("STAND_IN_SHARED", 227 << 10)
       : a == 115 ? setting("STAND_IN_POOLS", 1) : -1;
    return *v < 0;
}
int cuDriverGetVersion(int *v) { *v = setting("STAND_IN_DRIVER", 13000); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { ++contexts; *c = (void *)(uintptr_t)(d + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { --contexts; return 0; }
int cuCtxGetCurrent(void **c) { *c = current; return 0; }
int cuCtxSetCurrent(void *c) { current = c; return 0; }
static int make(void **p, size_t n, const char *how) {
    if (!current || n > setting("STAND_IN_MEMORY", 1 << 24)) return 2;
    NOTE("{\"%s\": %zu}", how, n);
    return ++blocks, (*p = malloc(n)) ? 0 : 2;
}
static int drop(void *p) { return current ? free(p), --blocks, 0 : 1; }
int cuMemAlloc_v2(void **p, size_t n) { return make(p, n, "plain"); }
int cuMemFree_v2(void *p) { return drop(p); }
int cuMemAllocAsync(void **p, size_t n, void *s) { return make(p, n, "pool"); }
int cuMemFreeAsync(void *p, void *s) { return drop(p); }
int cuDeviceGetDefaultMemPool(void **p, int d) { *p = (void *)5; return 0; }
int cuMemPoolSetAttribute(void *p, int a, void *v) { return !(p == (void *)5 && a == 4 && *(uint64_t *)v == UINT64_MAX); }
int cuMemcpyAsync(void *to, const void *from, size_t n, void *s) { memmove(to, from, n); return current ? 0 : 1; }
int cuMemsetD8Async(void *p, unsigned char v, size_t n, void *s) { NOTE("{\"zeros\": %zu}", n); memset(p, v, n); return 0; }
int cuStreamSynchronize(void *s) { return 0; }
int cuStreamIsCapturing(void *s, int *v) { *v = setting("STAND_IN_CAPTURES", 0); return 0; }
int cuModuleLoadData(void **m, const void *p) {
    const unsigned char *b = p;
    fprintf(out(), "{\"image\": \"");
    for (int i = 0; i < 64; ++i) fprintf(out(), "%02x", b[i]);
    NOTE("\"}");
    return ++modules, *m = (void *)p, setting("STAND_IN_BAD", 0);
}
int cuModuleUnload(void *m) { return --modules, 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { return *f = strdup(n), 0; }
int cuLaunchKernelEx(const unsigned *c, void *f, void **p, void **extra) { /* grid, block, shared; stream, attributes */
    void *const *tail = (void *const *)(c + 8); const int *attribute = tail[1];
    NOTE("{\"early\": [%u, %d, %d]}", *(const unsigned *)(tail + 2), attribute[0], attribute[2]);
    return cuLaunchKernel(f, c[0], c[1], c[2], c[3], c[4], c[5], c[6], tail[0], p, extra);
}
int cuFuncSetAttribute(void *f, int a, int v) { NOTE("{\"shared\": %d}", v); return 0; }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **p, void **extra) {
    NOTE("{\"launch\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"dynamic\": %u, \"stream\": %ld}",
         (char *)f, x, y, z, bx, by, bz, shared, (long)stream);
    if (!current) return 201;
    int count = setting("STAND_IN_COUNT", 0);
    if (count) { /* as if it were the kernel of Scaled: x, w, y and two hidden pointers */
        float *x = *(float **)p[0], *w = *(float **)p[1], *y = *(float **)p[2];
        for (int i = 0; i < count; ++i) y[i] = x[i] * w[i % 32] + 1;
        if (*(void **)p[3] || *(void **)p[4]) return 1;
    }
    return setting("STAND_IN_LAUNCH", 0);
}
"""

Asked = Callable[..., list[dict[str, Any]]]


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(32.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w + 1


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a package for GPUs with an image for each kernel and architecture, its project, built)."""
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFLIB_FATBINARY", "")
        package = reflib.aot_compile(Scaled(), (torch.randn(512, 32),), folder / "g.reflib", ["sm_80", "sm_90"])
    export_cpp(package, folder / "project")
    build(folder / "project")
    return package, folder / "project"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-in."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(STAND_IN)
    command("g++", "-x", "c", "-w", "-shared", "-fPIC", folder / "driver.c", "-o", folder / "libcuda.so.1")
    return folder


@pytest.fixture
def asked(on_gpu: tuple[Path, Path], driver: Path, tmp_path: Path) -> Asked:
    """What the driver was asked to do by one run of the example."""
    built = on_gpu[1] / "build"

    def call(x: Tensor | None = None, gives: Tensor | None = None, **env: Any) -> list[dict[str, Any]]:
        more = {f"STAND_IN_{k.upper()}": str(v) for k, v in env.items()}
        log = tmp_path / "log"
        more |= {"STAND_IN_LOG": str(log), "LD_LIBRARY_PATH": str(driver)}
        try:
            got = run(built, [] if x is None else [x], more)
        finally:
            found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            log.unlink(missing_ok=True)
        if gives is not None:
            equal(got, gives)
        return found

    return call


def test_a_gpu_that_is_not_there(asked: Asked) -> None:
    x = torch.randn(512, 32)
    for pools in (1, 0):
        found = asked(x, x * torch.arange(32.0) + 1, count=512 * 32, pools=pools)
        (launch,) = [a for a in found if "launch" in a]
        assert launch["launch"].startswith("k0_")
        assert launch["grid"][0] >= 1 and launch["grid"][1:] == launch["block"][1:] == [1, 1]
        kinds = {k for a in found for k in a if k in ("plain", "pool")}
        assert kinds == {"pool" if pools else "plain"}, "memory is the driver's to keep, or ours"
        assert found[-1] == {"left": [0, 0, 0]}, "memory, machine code, contexts: all given back"


@pytest.mark.parametrize("gpu, arm", [(90, "sm_90"), (80, "sm_80"), (89, "sm_80"), (100, "ptx"), (120, "ptx")])
def test_the_image_for_the_gpu(on_gpu: tuple[Path, Path], asked: Asked, gpu: int, arm: str) -> None:
    file = archive.open(on_gpu[0])
    k = manifest.read(file.manifest).arm(arm).kernels[0]
    found = asked(capability=gpu)
    image = next(a["image"] for a in found if "image" in a)
    assert bytes.fromhex(image) == bytes(file.view(k.image)[:64])
    launch = next(a for a in found if "launch" in a)
    assert launch["block"] == [k.threads, 1, 1] and launch["dynamic"] == k.shared and launch["launch"] == k.symbol


def test_shared_memory_and_text_alone(on_gpu: tuple[Path, Path], driver: Path, tmp_path: Path) -> None:
    """sm_80's code runs on 8.6 and 8.9 if its kernels find as much shared memory there; the text fits everywhere."""
    file = archive.open(on_gpu[0])
    members = {name: bytes(file.view(name)) for name in file.names}
    data = {k: v for k, v in file.manifest.items() if k != "entries"}
    arm = next(a for a in data["arms"] if a["arch"] == "sm_80")
    arm["kernels"][0]["shared"] = 120 << 10
    path = archive.write(tmp_path / "m.reflib", data, members)
    for arch in (None, "sm_80"):
        built = build(export_cpp(path, tmp_path / str(arch), arch))
        for env, arms in [
            ({"CAPABILITY": 80, "SHARED": 163 << 10}, ("sm_80", "sm_80")),
            ({"CAPABILITY": 89, "SHARED": 120 << 10}, ("sm_80", "sm_80")),
            ({"CAPABILITY": 89, "SHARED": 99 << 10}, ("ptx", None)), ({"CAPABILITY": 90}, ("sm_90", None)),
            ({"CAPABILITY": 90, "CUDA_FORCE_PTX_JIT": 1}, ("ptx", None)),
        ]:  # fmt: skip
            words = {k if k.startswith("CUDA") else f"STAND_IN_{k}": str(v) for k, v in env.items()}
            words |= {"STAND_IN_LOG": str(tmp_path / "log"), "LD_LIBRARY_PATH": str(driver)}
            want = arms[arch is not None]
            if want is None:
                with pytest.raises(AssertionError, match=r"no arm for this Stand-In \(sm_\d\d, \d+ KB .*: it has sm_80; "):
                    command(built / "example", env=words)
                continue
            assert f"arm {want}\n" in command(built / "example", env=words)
            about = manifest.read(file.manifest).arm(want).kernels[0]
            asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
            image = next(a["image"] for a in asked if "image" in a)
            assert bytes.fromhex(image) == members[about.image][:64]


@pytest.mark.parametrize(
    "env, says",
    [
        ({"capability": 75}, r"no arm for this Stand-In \(sm_75, 227 KB .*\): it has sm_80, sm_90, ptx; .*archs=\[..., 'sm_75'\]"),
        ({"capability": 100, "driver": 10020}, r"wants a driver for CUDA 1\d\.\d or later; this one takes CUDA 10.2"),
        ({"gpus": 0}, "there is no GPU 0; this machine has 0"),
        ({"bad": 209}, r"cannot load kernel k0_\w+: the stand-in says no \(CUDA_ERROR_STAND_IN, CUDA error 209\)"),
        ({"launch": 701}, r"step k0_\w+: cannot launch: the stand-in says no"),
        ({"captures": 1}, "cannot be captured"),
    ],
)  # fmt: skip
def test_errors_of_the_driver(asked: Asked, env: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        asked(**env)


def test_errors_about_arguments_on_a_gpu(asked: Asked) -> None:
    with pytest.raises(AssertionError, match=r"\(x\): expected float32 \[512, 32\].* on cuda:0; got .*\[2, 32\].* on cuda:0"):
        asked(torch.randn(2, 32))
    with pytest.raises(AssertionError, match="cannot make a tensor: cannot allocate memory: the stand-in says no"):
        asked(memory=1 << 10)


def test_no_driver(on_gpu: tuple[Path, Path]) -> None:
    with pytest.raises(AssertionError, match=r"cannot load the CUDA driver: libcuda.so.1"):
        command(on_gpu[1] / "build" / "example")


def test_one_arm_only(on_gpu: tuple[Path, Path], tmp_path: Path) -> None:
    export_cpp(on_gpu[0], tmp_path / "p", "sm_80")
    found = files(tmp_path / "p")
    kernels = [n for n in found if n.startswith("kernels/")]
    assert kernels and all(n.endswith(".sm_80.cubin") for n in kernels)
    assert b'{"sm_80", 0,' in found["tables.cpp"] and b'{"sm_90"' not in found["tables.cpp"]


# A program that calls the library twice, and twice with an input that is not aligned.
CALLS = """
import ctypes, sys
class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("device", ctypes.c_int32),
                ("dim", ctypes.c_int32), ("sizes", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("owner", ctypes.c_void_p)]
class Value(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("tensor", Tensor)]
class Input(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("example", Value)]
lib = ctypes.CDLL(sys.argv[1])
lib.reflib_about_input.restype, lib.reflib_error.restype = Input, ctypes.c_char_p
def check(rc):
    assert rc == 0, lib.reflib_error()
m, out, stream = ctypes.c_void_p(), Value(), ctypes.c_void_p(64)
check(lib.reflib_load(ctypes.byref(m), None, 0))
x = lib.reflib_about_input(m, 0).example
check(lib.reflib_new(m, stream, ctypes.byref(x)))
for odd in (0, 0, 2, 2):
    x.tensor.data += odd
    check(lib.reflib_run(m, stream, ctypes.byref(x), 1, ctypes.byref(out), 1))
    x.tensor.data -= odd
    lib.reflib_free(ctypes.byref(out))
lib.reflib_unload(m)
lib.reflib_free(ctypes.byref(x))  # later than the model
"""


def test_wrappers_that_differ_counters_and_late_kernels(driver: Path, tmp_path: Path) -> None:
    """Arms with texts of their own, in one library; a product whose depth is cut needs counters that are zero; what is
    not aligned goes to kernels that are loaded then."""
    case = CASES["split_product"]
    model, args = case.make()
    path = reflib.aot_compile(model, args, tmp_path / "m.reflib", ["sm_80", "sm_90"])
    file = archive.open(path)
    about = manifest.read(file.manifest)
    arm = about.arm("sm_90")
    assert arm.text != about.arm("sm_80").text and b"zeros(run" in bytes(file.view(arm.text))
    found = files(export_cpp(path, tmp_path / "p"))
    wrappers = [n for n in found if n.startswith("wrapper") and n.endswith(".cpp")]
    assert sorted(found[n] for n in wrappers) == sorted({bytes(file.view(a.text)) for a in about.arms})
    assert b"reflib_call=reflib_call_sm_90" in found["CMakeLists.txt"]
    built = build(tmp_path / "p", "-DCMAKE_BUILD_TYPE=Debug")
    env = {"STAND_IN_LOG": str(tmp_path / "log"), "LD_LIBRARY_PATH": str(driver)}
    command(sys.executable, "-c", CALLS, built / "libm.so", env=env)
    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sum("zeros" in a for a in asked) == 1, "cleared once, and left at zero"
    at = [i for i, a in enumerate(asked) if "image" in a]
    first = next(i for i, a in enumerate(asked) if "launch" in a)
    late = [k for k in arm.kernels if k.late]
    assert late and sum(i < first for i in at) == len(arm.kernels) - len(late)
    launched = [a["launch"] for a in asked if "launch" in a]
    assert len(launched) % 4 == 0 and set(launched) & {k.symbol for k in late}
    assert sum(i > first for i in at) == len(set(launched) & {k.symbol for k in late}), "each loaded once, if it is called"
    assert {a["stream"] for a in asked if "launch" in a} == {64} and asked[-1] == {"left": [0, 0, 0]}
    for k in arm.kernels:
        assert not k.early or not set(launched) & {k.symbol} or {"early": [1, 6, 1]} in asked


# -- the files ------------------------------------------------------------------------------------------------
def test_equal_packages_equal_files(
    on_gpu: tuple[Path, Path], on_cpu: tuple[Path, Path], tmp_path: Path, host_folders: list[bytes]
) -> None:
    for which, (package, project) in (("g", on_gpu), ("c", on_cpu)):
        a, b = (files(export_cpp(package, tmp_path / f"{which}{i}")) for i in range(2))
        assert a == b
        assert a == {n: d for n, d in files(project).items() if not n.startswith("build/")}
        for place in [*host_folders, str(tmp_path).encode()]:
            assert not [n for n, data in a.items() if place in data], place
        assert not [n for n, d in a.items() if b"@" in d and n in ("CMakeLists.txt", "README.md")]


def test_names_and_messages(tmp_path: Path) -> None:
    assert _why("python_3_note") == "nullptr" and "laid out" in _why("python_12_expect_sort_0")
    assert _why("python_0_op0") == '"PyTorch refused the call"'
    path = reflib.aot_compile(lambda x: x + 1, (torch.ones(3),), tmp_path / "my model-2.reflib", "cpu")
    assert b"project(my_model_2 " in files(export_cpp(path, tmp_path / "p"))["CMakeLists.txt"]


def test_the_folder(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    package, project = on_cpu[0], tmp_path / "p"
    (project / "mine").mkdir(parents=True)
    with pytest.raises(PackageError, match="not empty, and not an export"):
        export_cpp(package, project)
    (project / "mine").rmdir()
    export_cpp(package, project)
    (project / "README.md").write_text("changed")
    assert sorted((project / MARKER).read_text().splitlines()[2:]) == sorted(n for n in files(project) if n != MARKER)
    (project / "build" / "more").mkdir(parents=True)
    (project / "build" / "CMakeCache.txt").touch()
    (project / "build" / "more" / "any.o").touch()
    export_cpp(package, project)
    assert (project / "README.md").read_text() != "changed" and not (project / "build").exists()
    assert list(tmp_path.iterdir()) == [project], "nothing beside it"
    for mine in ("mine.cpp", "kernels/mine.cpp", "own/mine.cpp", "link"):
        (project / mine).parent.mkdir(exist_ok=True)
        (project / mine).symlink_to("..") if mine == "link" else (project / mine).touch()
        with pytest.raises(PackageError, match=f"has {mine}, which no export wrote.*; move that, or choose a new folder"):
            export_cpp(package, project)
        (project / mine).unlink()
    export_cpp(package, project)
    with pytest.raises(PackageError, match=r"no folder .*a to write b into"):
        export_cpp(package, tmp_path / "a" / "b")
    with pytest.raises(PackageError, match="is there and no folder"):
        export_cpp(package, project / "README.md")


def test_a_folder_that_is_a_link(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for name, to in (("link", "real"), ("new", "not/yet"), ("round", "round")):
        (tmp_path / name).symlink_to(to)
    for _ in range(2):
        assert export_cpp(on_cpu[0], tmp_path / "link") == tmp_path / "link"
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / MARKER).is_file()
    with pytest.raises(PackageError, match=r"no folder .*not to write yet into"):
        export_cpp(on_cpu[0], tmp_path / "new")
    with pytest.raises(PackageError, match=r"cannot write .*round: "):
        export_cpp(on_cpu[0], tmp_path / "round")
    (tmp_path / "not").mkdir()
    export_cpp(on_cpu[0], tmp_path / "new")
    assert (tmp_path / "new").is_symlink() and (tmp_path / "not" / "yet" / MARKER).is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "new", "not", "real", "round"]


def test_nothing_half_written(on_cpu: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_cpp(on_cpu[0], tmp_path / "p")
    before = files(tmp_path / "p")
    real = Path.write_bytes

    def fails(self: Path, data: Any) -> int:
        if self.name == "README.md":
            raise OSError(28, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(PackageError, match="No space left"):
        export_cpp(on_cpu[0], tmp_path / "p")
    assert files(tmp_path / "p") == before and len(list(tmp_path.iterdir())) == 1


# -- what is refused ------------------------------------------------------------------------------------------
def test_arms_that_are_not_there(on_gpu: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"no arm 'cpu' to export; it has sm_80, sm_90, ptx"):
        export_cpp(on_gpu[0], tmp_path / "p", "cpu")
    path = reflib.aot_compile(Scaled(), (torch.randn(4, 32),), tmp_path / "amd.reflib", "gfx942")
    for arch in (None, "gfx942"):
        with pytest.raises(PackageError, match=r"gfx942: .* cannot run there yet"):
            export_cpp(path, tmp_path / "p", arch)
    with pytest.raises(PackageError, match="no such file"):
        export_cpp(tmp_path / "gone.reflib", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_what_is_no_folder_and_no_arm(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    for folder in (None, 3):
        with pytest.raises(PackageError, match=f"folder={folder}: takes a str or a pathlib.Path"):
            export_cpp(on_cpu[0], folder)  # type: ignore[arg-type]
    with pytest.raises(PackageError, match="no arm 3 to export; it has cpu"):
        export_cpp(on_cpu[0], tmp_path / "p", 3)  # type: ignore[arg-type]


def test_a_wrapper_in_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"a package's wrapper is C\+\+"):
        reflib.aot_compile(torch.sin, (torch.ones(3),), tmp_path / "s.reflib", "cpu", wrapper="python")
    assert not (tmp_path / "s.reflib").exists()


def test_what_needs_python(tmp_path: Path) -> None:
    op = torch.library.custom_op("export_test::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    path = reflib.aot_compile(lambda x: torch.ops.export_test.twice(x) + 1, (torch.ones(3),), tmp_path / "o.reflib", "cpu")
    with pytest.raises(PackageError, match=r"o\.reflib: its cpu arm needs Python for export_test\.twice"):
        export_cpp(path, tmp_path / "p")
    path = reflib.aot_compile(lambda x: (x + 1, "text"), (torch.ones(3),), tmp_path / "t.reflib", "cpu")
    with pytest.raises(PackageError, match="results is 'text', which is no tensor and no number"):
        export_cpp(path, tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_the_command(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["export-cpp", str(on_cpu[0]), str(tmp_path / "p")])
    assert done.exit_code == 0 and "cmake -G Ninja" in done.output
    assert (tmp_path / "p" / "CMakeLists.txt").is_file()
    done = CliRunner().invoke(cli, ["export-cpp", str(on_cpu[0]), str(tmp_path / "q"), "--arch", "sm_90"])
    assert done.exit_code != 0 and "no arm 'sm_90'" in f"{done.output}{done.exception}"


def test_it_is_c_as_well(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text('#include "model.h"\nint main(void) { return REFLIB_CPU != -1; }\n')
    words = ["g++", "-x", "c", "-std=c11", "-Wall", "-Werror", f"-I{on_cpu[1]}", str(tmp_path / "a.c")]
    done = subprocess.run([*words, "-o", str(tmp_path / "a")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
