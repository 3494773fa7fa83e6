"""Packages for GPUs as C++ projects, run against a stand-in for the CUDA driver (stand_in_driver.c)."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.errors import PackageError
from reflib.package import archive, images, inspect, manifest
from reflib.package.export_cpp import export_cpp
from tests import exported_cpp
from tests.exported_cpp import assert_reproducible, build, command, equal, files, run
from tests.packages import CASES, changed

Tensor = torch.Tensor
pytestmark = pytest.mark.skipif(bool(exported_cpp.missing_tools()), reason="needs cmake and ninja")


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
    folder, source = tmp_path_factory.mktemp("driver"), Path(reflib.__file__).parent / "lab" / "stand_in_driver.c"
    command("g++", "-x", "c", "-w", "-shared", "-fPIC", source, "-o", folder / "libcuda.so.1")
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


def test_a_captured_call(asked: Asked) -> None:
    """Its memory is no part of the graph, and is kept as long as the graph may be replayed: to the end."""
    x = torch.randn(512, 32)
    found = asked(x, x * torch.arange(32.0) + 1, count=512 * 32, captures=1)
    assert {k for a in found for k in a if k in ("plain", "pool")} == {"plain"}
    assert found[-1] == {"left": [0, 0, 0]}


@pytest.mark.parametrize("gpu, variant", [(90, "sm_90"), (80, "sm_80"), (89, "sm_80"), (100, "ptx"), (120, "ptx")])
def test_the_image_for_the_gpu(on_gpu: tuple[Path, Path], asked: Asked, gpu: int, variant: str) -> None:
    file = archive.open(on_gpu[0])
    k = manifest.read(file.manifest).variant(variant).kernels[0]
    found = asked(capability=gpu)
    image = next(a["image"] for a in found if "image" in a)
    assert bytes.fromhex(image) == bytes(file.view(k.image)[:64])
    launch = next(a for a in found if "launch" in a)
    assert launch["block"] == [k.threads, 1, 1] and launch["dynamic"] == k.shared and launch["launch"] == k.symbol


@pytest.mark.slow
def test_shared_memory_and_text_alone(on_gpu: tuple[Path, Path], driver: Path, tmp_path: Path) -> None:
    """sm_80's code runs on 8.6 and 8.9 if its kernels find as much shared memory there; the text fits everywhere."""

    def change(data: dict[str, Any], members: Any) -> None:
        next(a for a in data["variants"] if a["arch"] == "sm_80")["kernels"][0]["shared"] = 120 << 10

    path = changed(on_gpu[0], tmp_path / "m.reflib", change)
    file = archive.open(path)
    for arch in (None, "sm_80"):
        built = build(export_cpp(path, tmp_path / str(arch), arch))
        for env, variants in [
            ({"CAPABILITY": 80, "SHARED": 163 << 10}, ("sm_80", "sm_80")),
            ({"CAPABILITY": 89, "SHARED": 120 << 10}, ("sm_80", "sm_80")),
            ({"CAPABILITY": 89, "SHARED": 99 << 10}, ("ptx", None)), ({"CAPABILITY": 90}, ("sm_90", None)),
            ({"CAPABILITY": 90, "CUDA_FORCE_PTX_JIT": 1}, ("ptx", None)),
        ]:  # fmt: skip
            words = {k if k.startswith("CUDA") else f"STAND_IN_{k}": str(v) for k, v in env.items()}
            words |= {"STAND_IN_LOG": str(tmp_path / "log"), "LD_LIBRARY_PATH": str(driver)}
            want = variants[arch is not None]
            if want is None:
                with pytest.raises(
                    AssertionError, match=r"no variant for this Stand-In \(sm_\d\d, \d+ KB .*: it has sm_80; "
                ):
                    command(built / "example", env=words)
                continue
            assert f"variant {want}\n" in command(built / "example", env=words)
            about = manifest.read(file.manifest).variant(want).kernels[0]
            asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
            image = next(a["image"] for a in asked if "image" in a)
            assert bytes.fromhex(image) == bytes(file.view(about.image)[:64])


@pytest.mark.parametrize(
    "env, says",
    [
        ({"capability": 75}, r"Stand-In \(sm_75, 227 KB .*\): it has sm_80, sm_90, ptx; .*archs=\[..., 'sm_75'\]"),
        ({"capability": 100, "driver": 10020}, r"a driver for CUDA 1\d\.\d or later; this one supports CUDA 10.2"),
        ({"gpus": 0}, "there is no GPU 0; this machine has 0"),
        ({"bad": 209}, r"cannot load kernel k0_\w+: the stand-in says no \(CUDA_ERROR_STAND_IN, CUDA error 209\)"),
        ({"launch": 701}, r"step k0_\w+: cannot launch: the stand-in says no"),
    ],
)  # fmt: skip
def test_errors_of_the_driver(asked: Asked, env: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        asked(**env)


def test_errors_about_arguments_on_a_gpu(asked: Asked) -> None:
    with pytest.raises(
        AssertionError, match=r"\(x\): expected float32 \[512, 32\].* on cuda:0; got .*\[2, 32\].* on cuda:0"
    ):
        asked(torch.randn(2, 32))
    with pytest.raises(AssertionError, match="cannot make a tensor: cannot allocate memory: the stand-in says no"):
        asked(memory=1 << 10)


def test_no_driver(on_gpu: tuple[Path, Path]) -> None:
    with pytest.raises(AssertionError, match=r"cannot load the CUDA driver: libcuda.so.1"):
        command(on_gpu[1] / "build" / "example")


def test_one_variant_only(on_gpu: tuple[Path, Path], tmp_path: Path) -> None:
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


# Calls of a model whose calls are recorded: a letter each, "s" as before, "k" with the last result kept, "o" elsewhere,
# "b" with an argument that is refused.
RECORDED = (
    CALLS.partition("for odd in")[0]
    + """
import numpy as np
rng, y = np.random.default_rng(0), lib.reflib_about_input(m, 0).example
check(lib.reflib_new(m, stream, ctypes.byref(y)))
def memory(v):
    held = (ctypes.c_float * (512 * 32)).from_address(v.tensor.data)
    return np.frombuffer(held, np.float32).reshape(512, 32)
kept = []
for how in sys.argv[2]:
    if how == "b":
        bad, out = Value.from_buffer_copy(x), Value()
        bad.kind = 2
        assert lib.reflib_run(m, stream, ctypes.byref(bad), 1, ctypes.byref(out), 1)
        continue
    x, y = (y, x) if how == "o" else (x, y)
    memory(x)[:] = rng.standard_normal((512, 32))
    out = Value()
    check(lib.reflib_run(m, stream, ctypes.byref(x), 1, ctypes.byref(out), 1))
    kept.append((out, memory(x) * np.arange(32, dtype=np.float32) + 1))
    assert all((memory(v) == want).all() for v, want in kept)
    if how != "k":
        lib.reflib_free(ctypes.byref(kept.pop()[0]))
for v, _ in kept:
    lib.reflib_free(ctypes.byref(v))
lib.reflib_free(ctypes.byref(x)), lib.reflib_free(ctypes.byref(y)), lib.reflib_unload(m)
"""
)


def test_recorded_calls(driver: Path, tmp_path: Path) -> None:
    """The second call like another is recorded; results are whose they are; everything is given back at the end."""
    args = (torch.randn(512, 32),)
    path = reflib.aot_compile(Scaled(), args, tmp_path / "g.reflib", ["sm_90"], ptx=False, cuda_graphs=True)
    built = build(export_cpp(path, tmp_path / "p"))
    env = {"STAND_IN_LOG": str(tmp_path / "log"), "LD_LIBRARY_PATH": str(driver), "STAND_IN_COUNT": str(512 * 32)}
    for calls, graphs in (("ssss", 3), ("skks", 3), ("sosososo", 6), ("k" * 13, 8), ("bbsbsbbs", 2)):
        command(sys.executable, "-c", RECORDED, built / "libg.so", calls, env=env)
        asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert sum("graph" in a for a in asked) == graphs and asked[-1] == {"left": [0, 0, 0]}
        assert {a["graph"] for a in asked if "graph" in a} == {1}
        assert sum("launch" in a and a["stream"] == 64 for a in asked) == len(calls.replace("b", "")), (
            "each call once, on its stream"
        )


def test_wrappers_that_differ_counters_and_late_kernels(driver: Path, tmp_path: Path) -> None:
    """Variants with texts of their own, in one library; a split-K matmul needs counters that are zero; what is
    not aligned goes to kernels that are loaded then."""
    case = CASES["split_product"]
    model, args = case.make()
    path = reflib.aot_compile(model, args, tmp_path / "m.reflib", ["sm_80", "sm_90"])
    file = archive.open(path)
    about = manifest.read(file.manifest)
    variant = about.variant("sm_90")
    assert variant.text != about.variant("sm_80").text and b"zeros(run" in bytes(file.view(variant.text))
    found = files(export_cpp(path, tmp_path / "p"))
    wrappers = [n for n in found if n.startswith("wrapper") and n.endswith(".cpp")]
    assert sorted(found[n] for n in wrappers) == sorted({bytes(file.view(a.text)) for a in about.variants})
    assert b"reflib_call=reflib_call_sm_90" in found["CMakeLists.txt"]
    built = build(tmp_path / "p")
    env = {"STAND_IN_LOG": str(tmp_path / "log"), "LD_LIBRARY_PATH": str(driver)}
    command(sys.executable, "-c", CALLS, built / "libm.so", env=env)
    asked = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sum("zeros" in a for a in asked) == 1, "cleared once, and left at zero"
    at = [i for i, a in enumerate(asked) if "image" in a]
    first = next(i for i, a in enumerate(asked) if "launch" in a)
    late = [k for k in variant.kernels if k.late]
    assert late and sum(i < first for i in at) == len(variant.kernels) - len(late)
    launched = [a["launch"] for a in asked if "launch" in a]
    assert len(launched) % 4 == 0 and set(launched) & {k.symbol for k in late}
    assert sum(i > first for i in at) == len(set(launched) & {k.symbol for k in late}), (
        "each loaded once, if it is called"
    )
    assert {a["stream"] for a in asked if "launch" in a} == {64} and asked[-1] == {"left": [0, 0, 0]}
    command(sys.executable, "-c", CALLS, built / "libm.so", env=env | {"STAND_IN_CAPTURES": "1"})
    captured = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    count = set(re.findall(r"launch\(run, (\w+), [^;]*_words", bytes(file.view(variant.text)).decode()))
    counting = sum(symbol in {k.symbol for k in variant.kernels if k.name in count} for symbol in launched)
    assert sum("zeros" in a for a in captured) == counting >= 2, "in a graph each call has counters of its own"
    assert not any("pool" in a for a in captured) and captured[-1] == {"left": [0, 0, 0]}
    for k in variant.kernels:
        assert not k.early or not set(launched) & {k.symbol} or {"early": [1, 6, 1]} in asked


def test_numbers_are_read_without_python(tmp_path: Path) -> None:
    """``.item()`` of a tensor on a GPU, and of a float on a CPU: by a function of PyTorch's C interface."""

    class Sized(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, float]:
            n = x.max().int().item()
            torch._check(n >= 0)
            torch._check(n < 100)
            return torch.zeros(n, device=x.device) + x.sum(), x.sum().item()

    x = torch.tensor([1.0, 3.0])
    for arch in ("sm_90", "cpu"):
        path = reflib.aot_compile(Sized(), (x,), tmp_path / f"{arch}.reflib", arch)
        with manifest.opened(path) as (_, about):
            assert "aoti_torch_item_float64" in about.variant(arch).symbols and not about.variant(arch).needs
        assert (export_cpp(path, tmp_path / arch) / "wrapper.cpp").exists()
    result, number = reflib.load(path)(x)
    assert result.tolist() == [4.0] * 3 and number == 4.0


def test_equal_packages_equal_files(on_gpu: tuple[Path, Path], tmp_path: Path, host_folders: list[bytes]) -> None:
    assert_reproducible(*on_gpu, tmp_path, host_folders)


def test_variants_that_are_not_there(on_gpu: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"no variant 'cpu' to export; it has sm_80, sm_90, ptx"):
        export_cpp(on_gpu[0], tmp_path / "p", "cpu")
    path = reflib.aot_compile(Scaled(), (torch.randn(4, 32),), tmp_path / "amd.reflib", "gfx942")
    for arch in (None, "gfx942"):
        with pytest.raises(PackageError, match=r"gfx942: .* cannot run there yet"):
            export_cpp(path, tmp_path / "p", arch)
    with pytest.raises(PackageError, match="no such file"):
        export_cpp(tmp_path / "gone.reflib", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_assembly_text_is_compiled_for_gpus_that_the_build_names(on_gpu: tuple[Path, Path], tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton").knobs
    built, made = tmp_path / "build", "CMakeFiles/reflib_g.dir/kernels.S.o"
    if (tool := images.fatbinary()) is None:
        pytest.skip("no fatbinary")
    tools = f"-DPTXAS={knobs.nvidia.ptxas.path}", f"-DFATBINARY={tool}"
    command("cmake", "-G", "Ninja", "-S", on_gpu[1], "-B", built, "-DFATBIN_ARCHS=86;120", *tools)
    command("cmake", "--build", built, "--target", made)
    object_file, texts = (built / made).read_bytes(), sorted((on_gpu[1] / "kernels").glob("*.ptx"))
    assert texts
    for text in texts:
        fatbin = built / "fatbin" / "kernels" / text.name
        assert fatbin.read_bytes() in object_file and text.read_bytes() not in object_file
        assert {p.suffixes[-2] for p in fatbin.parent.glob(f"{text.name}.*.cubin")} == {".86", ".120"}


def test_what_pytorch_allocates_is_not_recorded(tmp_path: Path) -> None:
    """It could not be known whether the caller has the results still."""
    for fn, recorded in (
        (lambda x: torch.relu(x).cumsum(0) * 2, True),
        (lambda x: torch.relu(x).sort(0).values * 2, False),
    ):
        path = reflib.aot_compile(
            fn, (torch.randn(300, 400),), tmp_path / "a.reflib", ["sm_90"], ptx=False, cuda_graphs=True
        )
        assert not inspect.inspect(path).manifest.variants[0].unrecorded
        text = (export_cpp(path, tmp_path / f"p{recorded}") / "tables.cpp").read_text()
        assert f"{str(recorded).lower()},  // calls are recorded" in text
