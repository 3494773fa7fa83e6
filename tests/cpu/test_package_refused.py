"""What is wrong with a package, with this machine, or with a call: each is said by a message of its own."""

import gc
import json
import os
import platform
import random
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import reflib
from reflib.errors import PackageError, ReflibError
from reflib.package import load as loading
from reflib.package import trees
from reflib.target import parse_target
from tests import packages

Tensor = torch.Tensor
COUNT, SEED = int(os.environ.get("REFLIB_FUZZ") or 300), int(os.environ.get("REFLIB_FUZZ_SEED") or 7)
HERE = f"{platform.system()} on {platform.machine()}"
Change = Callable[[dict[str, Any], dict[str, Any]], Any]


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x)) + 1


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("refused") / "small.reflib"
    return reflib.aot_compile(Small(), (torch.randn(5, 6),), path, ["sm_80", "sm_90", "cpu"])


@pytest.fixture(scope="module")
def for_cpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("refused") / "cpu.reflib"
    return reflib.aot_compile(Small(), (torch.randn(5, 6),), path, "cpu")


class Changed:
    """The package with something else in it, all digests right: ``change(manifest, members)``."""

    def __init__(self, package: Path, folder: Path):
        self.package, self.folder, self.made = package, folder, 0

    def __call__(self, change: Change) -> Path:
        self.made += 1
        return packages.changed(self.package, self.folder / f"changed-{self.made}.reflib", change)


@pytest.fixture
def changed(package: Path, tmp_path: Path) -> Changed:
    return Changed(package, tmp_path)


def variant(manifest: dict[str, Any], name: str = "cpu") -> dict[str, Any]:
    return next(a for a in manifest["variants"] if a["arch"] == name)


def refused(path: Path, match: str, **options: Any) -> str:
    with pytest.raises(PackageError, match=match) as e:
        reflib.load(path, **options)
    return str(e.value)


# -- the file -------------------------------------------------------------------------------------------


def test_another_interface_or_system(changed: Changed) -> None:
    newer = changed(lambda m, _: m.update(host=10**6, versions={"reflib": "9.1"}))
    refused(newer, r"built by a newer reflib \(9\.1\), which calls host code in another way: upgrade reflib")
    refused(changed(lambda m, _: m.update(host=0)), r"built by an older reflib .*: build it again")
    for change, says in (({"system": "Darwin"}, "Darwin on .*"), ({"machine": "riscv64"}, ".* on riscv64")):
        path = changed(lambda m, _, change=change: m.update(change))
        refused(path, f"its host code is for {says}, and this is {HERE}: build it there")


# -- the machine ----------------------------------------------------------------------------------------
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """As if there were one."""

    def pretend(arch: str, name: str, driver: int = 13000) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
        monkeypatch.setattr(loading, "device_target", lambda kind_, index=0: parse_target(arch))

    return pretend


def test_a_gpu_that_no_code_is_for(package: Path, gpu: Callable[..., None]) -> None:
    gpu("sm_75", "Tesla T4")
    message = refused(package, r"none of it runs on this Tesla T4 \(sm_75\)", device="cuda")
    assert "holds code for sm_80, sm_90, cpu, PTX of sm_80 for later GPUs;" in message
    assert message.endswith("build it again with archs=[..., 'sm_75']")
    refused(package, "Tesla T4")  # device=None takes the GPU that is there


def test_a_gpu_of_another_maker(package: Path, gpu: Callable[..., None]) -> None:
    gpu("gfx942", "MI300X")
    refused(package, "this GPU is a gfx942: reflib compiles for AMD GPUs but cannot run there yet", device="cuda")


def test_ptx_that_needs_a_newer_driver(changed: Changed, gpu: Callable[..., None]) -> None:
    gpu("sm_120", "RTX 5090", driver=12040)
    path = changed(lambda m, _: variant(m, "ptx").update(driver=[12080, "570"]))
    message = refused(path, r"this RTX 5090 \(sm_120\) needs its assembly text \(PTX\)", device="cuda")
    assert (
        "a driver of 570 or later (CUDA 12.8); this one supports CUDA 12.4: update the driver, or build it" in message
    )
    assert "archs=[..., 'sm_120']" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_no_driver(package: Path, changed: Changed) -> None:
    none = "this machine has no GPU that PyTorch can use"
    refused(package, f"device cuda: {none}", device="cuda")
    refused(package, f"device cuda:7: {none}", device="cuda:7")
    only = changed(lambda m, _: m.update(variants=[a for a in m["variants"] if a["arch"] != "cpu"]))
    refused(only, f"holds code for sm_80, sm_90, PTX of sm_80 .*, and {none}; .*archs=.*'cpu'")
    refused(only, "none for a CPU; build it again with archs=.*'cpu'", device="cpu")


def test_devices(package: Path, for_cpus: Path, gpu: Callable[..., None]) -> None:
    for path in (package, for_cpus):
        refused(path, "packages run on cpu and cuda devices, not on mps", device="mps")
        refused(path, "device='nonsense' is no device", device="nonsense")
        for wrong in ([], True, -1, 1.5):
            refused(path, "is no device: packages run on 'cpu' and 'cuda'", device=wrong)
    refused(for_cpus, r"holds code for cpu, none for a GPU; .*archs=", device="cuda")
    refused(for_cpus, "holds code for cpu, none for a GPU", device=0)
    gpu("sm_90", "H200")
    refused(package, "there is no cuda:7; this machine has 2 GPUs", device="cuda:7")


def test_features_of_the_processor(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("of x86-64 alone something is wanted")
    have = loading.cpu_features() - {"avx2", "fma"}
    monkeypatch.setattr(loading, "cpu_features", lambda: have)
    refused(package, "its CPU code uses avx2, fma, which this CPU does not have; build it again with", device="cpu")


def test_libraries_that_are_not_here(changed: Changed) -> None:
    def needs(**library: str) -> Path:
        return changed(lambda m, _: m.update(libraries=[{"op": "nobody.scaled.default", **library}]))

    path = needs(module="my_ops", file="")
    refused(path, "it calls nobody.scaled.default, which is not registered here: first import my_ops$")
    refused(needs(module="", file="my.so"), r"not registered here: first torch\.ops\.load_library\('my\.so'\)")
    path = changed(lambda m, _: variant(m).update(symbols=["nobodys_shim"]))
    refused(path, r"calls the C function nobodys_shim, which no library here has: first torch\.ops\.load", device="cpu")


def test_an_older_torch(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.host, "lacking", lambda: "aoti_torch_of_tomorrow")
    refused(package, r"torch 2.* has no aoti_torch_of_tomorrow: packages need torch 2\.11 or later")


# -- what is in the file --------------------------------------------------------------------------------
def cut_short(m: dict[str, Any], members: dict[str, Any]) -> None:
    members[variant(m)["wrapper"]] = b"\x7fELF"


def test_libraries_that_cannot_be_loaded(changed: Changed) -> None:
    """Built for a newer system, say."""
    refused(changed(cut_short), r"its host code wrapper/\w+\.so cannot be loaded here: ", device="cpu")


def test_structures_come_back() -> None:
    factory: Any = defaultdict(list, {"a": 1})
    for x in ((1, [2, {"a": 3}]), {"b": 1, "a": (2,)}, 3, [], factory, torch.Size([2, 3]), {1: 2}):
        found = pytree.tree_structure(x)
        assert trees.tree(trees.text(found, "arguments")) == found


def test_classes_that_are_not_registered_here() -> None:
    for kind, context, says in (
        ("nobodys.Class", "null", "the class 'nobodys.Class', .* import the module that registers it"),
        ("collections.namedtuple", "nobodys:Pair", "the namedtuple 'nobodys:Pair': first import nobodys"),
    ):
        with pytest.raises(PackageError, match=says):
            trees.tree(json.dumps([1, {"type": kind, "context": context, "children_spec": []}]))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts what Linux says of a process")
def test_damaged_packages_fuzz(for_cpus: Path, tmp_path: Path) -> None:
    """Random damage is refused, or does not matter; REFLIB_FUZZ says how often, REFLIB_FUZZ_SEED which."""
    data, path, rng, x = for_cpus.read_bytes(), tmp_path / "damaged.reflib", random.Random(SEED), torch.randn(5, 6)
    want, refusals = reflib.load(for_cpus)(x), 0
    for i in range(COUNT):
        new, what = damage(data, rng)
        path.unlink(missing_ok=True)
        path.write_bytes(new)
        try:
            with reflib.load(path) as f:
                torch.testing.assert_close(f(x), want)
        except PackageError as e:
            assert str(path) in str(e)
            refusals += 1
        except BaseException:
            print(f"damage {i}: {what}")
            raise
    assert COUNT / 2 < refusals < COUNT


def damage(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Other bytes, and what was done. Half of all damage is in headers."""
    out = bytearray(data)
    headers = [m.start() for m in re.finditer(b"PK", data)]
    a = rng.randrange(len(out)) if rng.random() < 0.5 else min(rng.choice(headers) + rng.randrange(30), len(out) - 1)
    b = min(len(out), a + rng.choice([1, 2, 4, 8, 30, 64, 500]))
    new = {
        "flip": bytes([out[a] ^ 1 << rng.randrange(8)]) + out[a + 1 : b], "set": rng.randbytes(b - a), "drop": b"",
        "double": out[a:b] * 2, "insert": rng.randbytes(b - a) + out[a:b], "zero": bytes(b - a),
        "length": (0xFFFFFFFF).to_bytes(4, "little") + out[a + 4 : b],
    }  # fmt: skip
    kind = rng.choice([*new, "cut"])
    if kind == "cut":
        return bytes(out[:a]), f"cut at {a}"
    out[a:b] = new[kind]
    return bytes(out), f"{kind} at {a}, to {b}"


# -- failures leave nothing -----------------------------------------------------------------------------
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts what Linux says of a process")
def test_failures_leave_nothing(changed: Changed) -> None:
    late = [  # found after libraries were loaded, or weights mapped
        changed(lambda m, _: variant(m).update(symbols=["nobodys_shim"])),
        changed(lambda m, _: variant(m).update(functions=["nobody"])),
        changed(cut_short),
        changed(lambda m, _: m.update(host=0)),
    ]
    reflib.load(changed.package, device="cpu").unload()

    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum("memfd:reflib" in m or ".reflib" in m for m in maps)

    before = held()
    for i in range(210):
        refused(late[i % len(late)], ".", device="cpu")
    assert held() == before


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts what Linux says of a process")
@pytest.mark.parametrize("called", [False, True])
def test_code_stays_as_long_as_it_may_be_called(called: bool, for_cpus: Path) -> None:
    def mapped() -> int:
        return sum("memfd:reflib" in m for m in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()
    x, before = torch.randn(5, 6), mapped()
    f = reflib.load(for_cpus)
    want = f(x) if called else None
    call = f.__call__
    del f
    gc.collect()
    assert mapped() > before
    torch.testing.assert_close(call(x), want if called else call(x))
    del call
    gc.collect()
    assert mapped() == before
    f = reflib.load(for_cpus)
    call = f.__call__
    if called:
        f(x)
    f.unload()
    with pytest.raises(PackageError, match="was unloaded"):
        f(x)
    call(x)  # who kept the way in has the code
    del call
    assert mapped() == before  # at once


def test_unload_while_it_is_called(for_cpus: Path) -> None:
    x, stop, wrong = torch.randn(5, 6), threading.Event(), []
    models = [reflib.load(for_cpus)]
    want = models[0](x)

    def work() -> None:
        while not stop.is_set():
            try:
                torch.testing.assert_close(models[-1](x), want)
            except PackageError:
                pass
            except BaseException as e:
                wrong.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(60):
        models.append(reflib.load(for_cpus))
        models.pop(0).unload()
    stop.set()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]


# -- calls ----------------------------------------------------------------------------------------------
def test_calls(for_cpus: Path) -> None:
    """A package is called by the code that calls a compiled ExportedProgram (test_exported.py)."""
    f, x = reflib.load(for_cpus), torch.randn(5, 6)
    want = f(x)
    for args, says in (
        ((x[0],), "argument x: ndim 1, but it was exported with 2"), ((x.double(),), "argument x: dtype torch.float64"),
        ((x[:3],), "argument x: size 3 in dimension 0, but it was exported with 5"),
        (("text",), "argument x: expected a tensor, got str"), ((x, x), "arguments of another structure"),
    ):  # fmt: skip
        for _ in range(2):
            with pytest.raises(ReflibError, match=says):
                f(*args)
    torch.testing.assert_close(f(x.t().contiguous().t()), want)  # laid out in another way: copied
    f.unload()
    f.unload()
    for _ in range(2):
        with pytest.raises(PackageError, match=r"cpu\.reflib was unloaded; load it again"):
            f(x)
