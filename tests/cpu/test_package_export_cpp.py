"""Packages as C++ projects: built, run, and compared with Python; the folder; what is refused."""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from torch.export import Dim
from torch.utils import _pytree as pytree

import reflib
from reflib.cli import cli
from reflib.errors import OptionError, PackageError
from reflib.package.build import results
from reflib.package.export_cpp import MARKER, _why, export_cpp
from tests import exported_cpp
from tests.exported_cpp import (
    PLAIN,
    CTensor,
    CValue,
    assert_reproducible,
    build,
    build_and_run,
    command,
    equal,
    files,
    run,
)

Tensor = torch.Tensor
close = torch.testing.assert_close
pytestmark = pytest.mark.skipif(bool(exported_cpp.missing_tools()), reason="needs cmake and ninja")


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
def on_cpu(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> tuple[Path, Path]:
    """(a package for CPUs, its project, built file by file; as a user does, but for a quick run)."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cpu")
    n = Dim("n", min=3, max=50)
    shapes = {"x": {0: n}, "i": {0: n}, "seen": {0: n}, "y": None}
    reflib.aot_compile(Rows(), rows(8), folder / "rows.reflib", "cpu", dynamic_shapes=shapes)
    export_cpp(folder / "rows.reflib", folder / "project")
    build(folder / "project", [PLAIN] if pytestconfig.getoption("--quick") else [])
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
    assert "variant cpu" in said and "output 0: float32 [8, 7]" in said and "output 4: none" in said


def test_nothing_is_written_outside(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    project = on_cpu[1]
    assert not [n for n in files(project / "build") if "torch" in n.lower()]
    (file,) = project.glob("*_weights.safetensors")
    weights = file.read_bytes()
    command(project / "build" / "example")
    assert (project / "build" / file.name).read_bytes() == weights


@pytest.mark.parametrize(
    "i, wrong, says",
    [
        (0, torch.randn(8, 6), r"argument \d+ \(x\): expected float32 \[any, 7\].*; got float32 \[8, 6\]"),
        (0, torch.randn(8, 7).double(), r"\(x\): expected float32 .*; got float64 \[8, 7\], strides \[7, 1\], on cpu"),
        (0, torch.randn(7, 8).t(), r"\(x\): expected .*strides \[7, 1\].*; got .* strides \[1, 8\]"),
        (1, torch.zeros(8), r"\(i\): expected int64 .*; got float32"),
        (1, torch.zeros(9, dtype=torch.int64), r"\(i\): size 9 in dimension 0, expected s\d+ = 8"),
        (1, torch.full((8,), 5), r"index out of range in kernel k.*, aten\.\S+ at test_\w+\.py:\d+ in "),
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
    memory = args[0].flatten()
    for seen, y, says in (
        (memory[2:6], args[3], b"with argument 0 (x)"), (memory[:4], memory[3:15].view(4, 3).t(), b"argument 0"),
        (args[2], args[2].expand(3, 4), b"with argument 3 (y)"),
    ):  # fmt: skip
        before = memory.clone()
        ins = (CValue * 4)(*map(value, (args[0], args[1], seen, y)))
        assert lib.reflib_run(models[0], None, ins, 4, out, 6)
        error = lib.reflib_error()
        assert b"argument 2 (seen) is written to and shares memory " in error and says in error
        assert torch.equal(memory, before), "nothing is written before"
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
        ({"strides": (-7, 1)}, "stride -7 in dimension 0"), ({"dim": -1}, "-1 dimensions"),
        ({"dim": 65}, "65 dimensions"), ({"dtype": -1}, "there is no dtype -1"),
        ({"sizes": (2**62, 2**62)}, "2^63 bytes or more"), ({"sizes": (2**61, 7)}, "2^63 bytes or more"),
        ({"strides": (2**62, 2**62)}, "2^63 bytes or more"), ({"dtype": 99}, "there is no dtype 99"),
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
    message = said(lib.reflib_run(m, None, ins, 4, out, 6))
    assert "(x): expected float32" in message and "got an int" in message
    empty = value(torch.empty(0, 7))
    empty.any.tensor.sizes = (ctypes.c_int64 * 2)(0, 2**62)
    assert lib.reflib_new(m, None, ctypes.byref(empty)) == 0, "no elements, no bytes"
    lib.reflib_free(ctypes.byref(empty))
    lib.reflib_free(ctypes.byref(empty))  # it is none any more
    lib.reflib_unload(m)


class Cut(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor, n: int) -> Tensor:
        return (x[:, :3] * n + torch.cat([y, y])).relu()


@pytest.mark.slow
def test_ints_ranges_and_guards(tmp_path: Path) -> None:
    """An int with a range; and a size that must be twice another's, which only a guard says."""
    dims = {"x": {0: Dim("a", min=4, max=64)}, "y": {0: Dim("b", min=2, max=32)}, "n": Dim.DYNAMIC(min=3, max=9)}
    dims["x"] = {0: 2 * dims["y"][0]}
    path = reflib.aot_compile(
        Cut(), (torch.randn(8, 6), torch.randn(4, 3), 5), tmp_path / "c.reflib", "cpu", dynamic_shapes=dims
    )
    built = build(export_cpp(path, tmp_path / "p"))
    for b, n in ((4, 5), (2, 3), (32, 9)):
        args = torch.randn(2 * b, 6), torch.randn(b, 3), n
        equal(run(built, args), reflib.load(path)(*args))
    for args, says in [
        ((torch.randn(8, 6), torch.randn(4, 3), 2), r"3 <= (s\d+) <= 9 holds of the arguments' sizes; here \1 = 2"),
        ((torch.randn(8, 6), torch.randn(4, 3), 10), r"<= 9 holds of the arguments' sizes; here s\d+ = 10"),
        (
            (torch.randn(8, 6), torch.randn(4, 3), -(2**63)),
            rf"<= 9 holds of the arguments' sizes; here s\d+ = -{2**63}",
        ),
        ((torch.randn(9, 6), torch.randn(4, 3), 5), r"\(x\): size 9 in dimension 0, expected 2 ?\* ?s\d+ = 8"),
    ]:
        with pytest.raises(AssertionError, match=says):
            run(built, args)


class Named(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        if x.shape[0] * x.shape[1] > 100 and y.shape[0] % 4 == 0:
            return {"h": x + 1, "c": (y * 2, [x - 1])}
        return {"h": x}


def test_sizes_of_the_example_and_names_of_results(tmp_path: Path) -> None:
    """The sizes that it was exported with: all guards hold."""
    shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "y": {0: Dim.DYNAMIC}}
    args = torch.randn(20, 20), torch.randn(8)
    path = reflib.aot_compile(Named(), args, tmp_path / "n.reflib", "cpu", dynamic_shapes=shapes)
    project = export_cpp(path, tmp_path / "p")
    said = command(build(project) / "example")
    assert "output 0: float32 [20, 20]" in said and "output 1: float32 [8]" in said
    text = (project / "README.md").read_text()
    assert re.search(r"It holds of the sizes: `s\d+\*s\d+ > 100 \(x\.shape\[\d\]\*x\.shape\[\d\] > 100\)`\.", text)
    for i, name in enumerate(["result['h']", "result['c'][0]", "result['c'][1][0]"]):
        assert f"| {i} | `{name}` |" in text


def test_names_of_results_of_classes() -> None:
    @dataclass
    class Its:
        h: Any
        c: Any

    pytree.register_dataclass(Its)
    found = Its(1, ({"a": 2, 3: 4}, Pair(5, 6)))
    names = ["result.h", "result.c[0]['a']", "result.c[0][3]", "result.c[1].first", "result.c[1].second"]
    assert results(pytree.tree_structure(found)) == tuple(names)


class Pair(NamedTuple):
    first: Any
    second: Any


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


@pytest.mark.slow
def test_a_model_that_calls_aten(tmp_path: Path) -> None:
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


# -- the files ------------------------------------------------------------------------------------------------
def test_equal_packages_equal_files(on_cpu: tuple[Path, Path], tmp_path: Path, host_folders: list[bytes]) -> None:
    assert_reproducible(*on_cpu, tmp_path, host_folders)


def test_names_and_messages(tmp_path: Path) -> None:
    assert _why("python_3_note") == "nullptr" and "laid out" in _why("python_12_expect_sort_0")
    assert _why("python_0_op0") == '"PyTorch refused the call"'
    path = reflib.aot_compile(lambda x: x + 1, (torch.ones(3),), tmp_path / "my model-2.reflib", "cpu")
    assert b"project(my_model_2 " in files(export_cpp(path, tmp_path / "p"))["CMakeLists.txt"]


def test_libraries_may_lie_in_one_folder(tmp_path: Path) -> None:
    """What each model opens beside its library has a name of its own: weights of equal size were those of the other."""
    beside = {}
    for name in "ab":
        path = reflib.aot_compile(torch.nn.Linear(4, 4), (torch.ones(2, 4),), tmp_path / f"{name}.reflib", "cpu")
        project = export_cpp(path, tmp_path / name)
        copied = (project / "CMakeLists.txt").read_text().partition("POST_BUILD")[2]
        beside[name] = set(re.findall(r"SOURCE_DIR}/(\S+)", copied))
        file = f"{name}_weights.safetensors"
        assert file in beside[name] and f'"{file}"' in (project / "tables.cpp").read_text()
    assert beside["a"].isdisjoint(beside["b"])


def test_the_folder(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    package, project = on_cpu[0], tmp_path / "p"
    (project / "mine").mkdir(parents=True)
    with pytest.raises(PackageError, match="not empty, and no earlier export"):
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
        with pytest.raises(PackageError, match=f"has {mine}, which no export wrote; move that, or choose a new folder"):
            export_cpp(package, project)
        (project / mine).unlink()
    export_cpp(package, project)
    with pytest.raises(PackageError, match=r"no folder .*a to write b into"):
        export_cpp(package, tmp_path / "a" / "b")
    with pytest.raises(PackageError, match="exists and is no folder"):
        export_cpp(package, project / "README.md")


# -- what is refused ------------------------------------------------------------------------------------------
def test_what_is_no_folder_and_no_variant(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    for folder in (None, 3):
        with pytest.raises(PackageError, match=f"folder={folder}: takes a str or a pathlib.Path"):
            export_cpp(on_cpu[0], folder)  # type: ignore[arg-type]
    with pytest.raises(PackageError, match="no variant 3 to export; it has cpu"):
        export_cpp(on_cpu[0], tmp_path / "p", 3)  # type: ignore[arg-type]


def test_a_wrapper_in_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"a package's wrapper is C\+\+"):
        reflib.aot_compile(torch.sin, (torch.ones(3),), tmp_path / "s.reflib", "cpu", wrapper="python")
    assert not (tmp_path / "s.reflib").exists()


def test_what_needs_python(tmp_path: Path) -> None:
    op = torch.library.custom_op("export_test::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    path = reflib.aot_compile(
        lambda x: torch.ops.export_test.twice(x) + 1, (torch.ones(3),), tmp_path / "o.reflib", "cpu"
    )
    with pytest.raises(PackageError, match=r"o\.reflib: its cpu variant needs Python for export_test\.twice"):
        export_cpp(path, tmp_path / "p")
    path = reflib.aot_compile(lambda x: (x + 1, "a\0b"), (torch.ones(3),), tmp_path / "t.reflib", "cpu")
    with pytest.raises(PackageError, match=r"results is .*: it must be a tensor, a number or text"):
        export_cpp(path, tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_the_command(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["export-cpp", str(on_cpu[0]), str(tmp_path / "p")])
    assert done.exit_code == 0 and "cmake -G Ninja" in done.output
    assert (tmp_path / "p" / "CMakeLists.txt").is_file()
    done = CliRunner().invoke(cli, ["export-cpp", str(on_cpu[0]), str(tmp_path / "q"), "--arch", "sm_90"])
    assert done.exit_code != 0 and "no variant 'sm_90'" in f"{done.output}{done.exception}"


def test_it_is_c_as_well(on_cpu: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text('#include "model.h"\nint main(void) { return REFLIB_CPU != -1; }\n')
    words = ["-x", "c", "-std=c11", "-Wall", "-Werror", f"-I{on_cpu[1]}"]
    command("g++", *words, tmp_path / "a.c", "-o", tmp_path / "a")


def test_check_nan_of_nothing(tmp_path: Path) -> None:
    model, sizes = (lambda x: (torch.cumsum(x, 0) * 2, x.log())), ({0: Dim("n", min=0)},)
    made = {"dynamic_shapes": sizes, "check_nan": True}
    path = reflib.aot_compile(model, (torch.ones(5, 6),), tmp_path / "n.reflib", ["cpu"], **made)
    built = build(export_cpp(path, tmp_path / "p"))
    for n in (0, 3):
        equal(run(built, [torch.ones(n, 6)]), model(torch.ones(n, 6)))
