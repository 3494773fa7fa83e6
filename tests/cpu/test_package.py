"""Packages on a CPU: built, loaded, called; what is in them for GPUs that are not here; what is refused."""

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import reflib
from reflib.errors import OptionError, PackageError, ReflibError
from reflib.package import architectures, images, manifest
from tests.models import MODELS, build
from tests.processes import python

Tensor = torch.Tensor
close = torch.testing.assert_close


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(24, 16)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.norm(torch.relu(self.inner(x))), -1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    model = Small()
    return model, reflib.aot_compile(model, (torch.randn(8, 24),), tmp_path_factory.mktemp("p") / "small.reflib", "cpu")


@torch.no_grad()
def test_a_model(small: tuple[Any, Path]) -> None:
    model, path = small
    loaded = reflib.load(path)
    for _ in range(3):
        x = torch.randn(8, 24)
        close(loaded(x), model(x))
    assert not loaded(torch.randn(8, 24)).requires_grad
    assert loaded.variant == "cpu" and loaded.device == torch.device("cpu") and "small.reflib" in repr(loaded)
    held = sum(p.numel() * 4 for p in model.parameters())
    found = loaded.memory_metrics()
    assert found["weights"] == held and found["workspace"] >= 8 * 16 * 4 and found["peak"] == held + found["workspace"]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
def test_models(name: str, tmp_path: Path) -> None:
    _, args, model = build(name, "cpu")
    args = args[len(list(model.parameters())) :]
    path = reflib.aot_compile(model, args, tmp_path / "m.reflib", "cpu")
    f = reflib.load(path)
    torch.manual_seed(3)
    got = f(*args)
    torch.manual_seed(3)
    want = model(*args)  # (in training mode: both update running means, the model's after it was packed)
    assert got.shape == want.shape and got.dtype == want.dtype
    if "dropout" not in name and name != "vae":  # other random numbers
        close(got, want, rtol=2e-3, atol=2e-3)


# -- how it is called -----------------------------------------------------------------------------------


def test_keywords_in_any_order_and_ints_in_their_range(tmp_path: Path) -> None:
    class Takes(torch.nn.Module):
        def forward(self, x: Tensor, k: int, *, a: Tensor, b: Tensor) -> Tensor:
            return x[:k] * 2 + a - b

    x, a, b = torch.randn(8, 4), torch.randn(4), torch.randn(4)
    shapes = {"x": None, "k": Dim.DYNAMIC, "a": None, "b": None}
    path = reflib.aot_compile(
        Takes(), (x, 5), tmp_path / "k.reflib", "cpu", kwargs={"a": a, "b": b}, dynamic_shapes=shapes
    )  # fmt: skip
    with torch.device("meta"):  # whatever is the default
        f = reflib.load(path)
    for k in (3, 8):
        close(f(x, k, b=b, a=a), Takes()(x, k, a=a, b=b))
    for k, says in ((9, "k: 9, which was exported for 0 to 8"), (-1, "argument k: -1"), (2.0, "expected an int")):
        with pytest.raises(ReflibError, match=says):
            f(x, k, a=a, b=b)


@pytest.mark.parametrize("wrapper", ["python", "cpp", "package"])
def test_sizes_in_terms_of_another(wrapper: str, tmp_path: Path) -> None:
    h = Dim("h", min=2, max=32)
    for f, shapes, good, wrong in (
        (lambda x: x.view(-1, 2).sum(1), ({0: 2 * h},), (4, 10, 64), (7, 66)),
        (lambda x: torch.softmax(x, 0) * x.shape[0], ({0: h + 1},), (4, 33), (34, 2)),
    ):
        if wrapper == "package":
            path = reflib.aot_compile(f, (torch.randn(8),), tmp_path / "h.reflib", "cpu", dynamic_shapes=shapes)
            g = reflib.load(path)
        else:
            ep = torch.export.export(function(f), (torch.randn(8),), dynamic_shapes=shapes)
            g = reflib.compile(ep, wrapper=wrapper)
        for n in good:
            x = torch.randn(n)
            close(g(x), f(x))
        for n in wrong:
            with pytest.raises(ReflibError, match="exported"):
                g(torch.randn(n))


def function(f: Any) -> torch.nn.Module:
    class Calls(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return f(x)

    return Calls()


def test_constants_ties_and_calls_of_aten(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(50, 32)
            self.head = torch.nn.Linear(32, 50, bias=False)
            self.head.weight = self.words.weight
            self.scale = torch.arange(32).float()

        def forward(self, i: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.sort(self.words(i) * self.scale + torch.tensor([1.0, 2.0]).sum(), -1).values
            return self.head(x), torch.cumsum(x, 1)

    model, i = Tied(), torch.randint(50, (4, 7))
    path = reflib.aot_compile(model, (i,), tmp_path / "t.reflib", "cpu")
    f = reflib.load(path)
    with torch.no_grad():
        close(f(i), model(i), rtol=1e-4, atol=1e-4)
    assert path.stat().st_size < 50 * 32 * 4 * 2 + 150_000 and f.memory_metrics()["weights"] < 50 * 32 * 4 + 1000
    with pytest.raises(IndexError, match="index out of range"):
        f(i + 50)


def test_the_model_is_not_kept(tmp_path: Path) -> None:
    model = Small()
    gone = weakref.ref(model)
    path = reflib.aot_compile(model, (torch.randn(8, 24),), tmp_path / "s.reflib", "cpu")
    del model
    gc.collect()
    assert gone() is None
    f = reflib.load(path)
    weights = weakref.ref(f._state["inner.weight"])
    f.unload()
    with pytest.raises(PackageError, match="was unloaded"):
        f(torch.randn(8, 24))
    gc.collect()
    assert weights() is None
    path.unlink()


LOADS = """
import sys, time, torch, reflib
import reflib.package.load, reflib.wrap.host
reflib.wrap.host.extension()
start = time.process_time()
f = reflib.load(sys.argv[1])
seconds = time.process_time() - start
f(torch.randn(8, 24))
heavy = [m for m in ("triton", "torch._dynamo.convert_frame", "torch._inductor", "sympy.core") if m in sys.modules]
print(seconds, heavy)
"""


def test_loading_is_quick_and_needs_no_compiler(small: tuple[Any, Path]) -> None:
    seconds, _, heavy = python(LOADS, small[1], env={"CXX": "/nowhere/c++"}).partition(" ")
    assert float(seconds) < 0.5 and "triton" not in heavy and "inductor" not in heavy, (seconds, heavy)


# -- what is in the file --------------------------------------------------------------------------------
def built(path: Path, *archs: str, **more: Any) -> manifest.Manifest:
    from reflib.package import archive

    torch.manual_seed(0)
    reflib.aot_compile(Small(), (torch.randn(8, 24),), path, list(archs), **more)
    file = archive.open(path)
    found = manifest.read(file.manifest)
    file.close()
    return found


@pytest.mark.parametrize("tool", ["", None], ids=["table", "fatbin"])
def test_code_for_gpus_that_are_not_here(tool: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool is not None:
        monkeypatch.setenv("REFLIB_FATBINARY", tool)
    elif images.fatbinary() is None:
        pytest.skip("no fatbinary here")
    m = built(tmp_path / "g.reflib", "sm_75", "sm_80", "sm_90", "sm_120", "gfx942", "cpu")
    assert m.archs == ("sm_75", "sm_80", "sm_90", "sm_120", "gfx942", "cpu", "ptx")
    assert m.images == ("table" if tool == "" else "fatbin")
    kinds = {Path(k.image).suffix for a in m.variants if a.arch not in ("cpu", "gfx942") for k in a.kernels}
    assert kinds == ({".cubin", ".ptx"} if tool == "" else {".fatbin", ".ptx"})
    assert {Path(k.image).suffix for k in m.variant("gfx942").kernels} == {".hsaco"}
    assert m.variant("ptx").made_for == "sm_80" and m.variant("ptx").driver is not None
    for variant in m.variants:
        if variant.arch.startswith("sm"):
            limit = architectures.parse_target(variant.arch).shared
            assert variant.kernels and all(0 < k.threads <= 1024 and k.shared <= limit for k in variant.kernels)
    assert all(k.shared <= 99 * 1024 for k in m.variant("ptx").kernels)
    with pytest.raises(PackageError, match="no GPU that PyTorch can use"):
        reflib.load(tmp_path / "g.reflib", device="cuda")
    x = torch.randn(8, 24)
    reflib.load(tmp_path / "g.reflib")(x)  # there is an variant for CPUs


@pytest.mark.slow
def test_equal_input_equal_bytes(tmp_path: Path, host_folders: list[bytes]) -> None:
    script = textwrap.dedent("""
        import sys, torch, reflib
        from tests.cpu.test_package import Small
        torch.manual_seed(0)
        reflib.aot_compile(Small(), (torch.randn(8, 24),), sys.argv[1], ["sm_90", "cpu"])
    """)
    running = []
    for i in range(2):
        env = {**os.environ, "PYTHONHASHSEED": str(i), "REFLIB_CACHE_DIR": str(tmp_path / f"c{i}")}
        (tmp_path / f"c{i}").mkdir(mode=0o700)
        running.append(subprocess.Popen([sys.executable, "-c", script, str(tmp_path / f"{i}.reflib")], env=env))
    assert [p.wait() for p in running] == [0, 0]
    a, b = ((tmp_path / f"{i}.reflib").read_bytes() for i in range(2))
    assert a == b
    for place in [*host_folders, str(tmp_path).encode()]:
        assert place not in a, place


def test_options_that_do_not_suit(tmp_path: Path) -> None:
    x = torch.randn(8, 24)
    for more, says in (
        ({"target": "sm_90"}, "archs="), ({"wraper": 1}, "did you mean"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=says):
            reflib.aot_compile(Small(), (x,), tmp_path / "o.reflib", **more)
    with pytest.raises(PackageError, match="folder"):
        reflib.aot_compile(Small(), (x,), tmp_path, "cpu")
    with pytest.raises(PackageError, match="no folder"):
        reflib.aot_compile(Small(), (x,), tmp_path / "a" / "b.reflib", "cpu")
    assert not list(tmp_path.iterdir())


# -- which code runs where ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "archs, device, found",
    [
        (["sm_80", "sm_90"], 90, "sm_90"), (["sm_80", "sm_90"], 86, "sm_80"), (["sm_80", "sm_86"], 89, "sm_86"),
        (["sm_80", "sm_90"], 100, "ptx"), (["sm_100"], 103, "ptx"), (["sm_75"], 80, "ptx"), (["sm_80"], 75, None),
        (["sm_90"], 90, "sm_90"), (["sm_120"], 121, "ptx"), (["sm_86"], 80, "ptx"),
    ],
)  # fmt: skip
def test_the_variant_for_a_gpu(archs: list[str], device: int, found: str | None) -> None:
    assert architectures.choose_arch(archs, "sm_80", device) == found


def test_the_least_driver() -> None:
    assert str(architectures.driver_for(".version 8.4\n.target sm_80")) == "550 (CUDA 12.4)"
    assert architectures.driver_for(".version 99.0") is None and architectures.driver_for("no") is None
