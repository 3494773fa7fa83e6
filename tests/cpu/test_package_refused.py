"""What is wrong with a package, with this machine, or with a call: each is said by a message of its own."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import platform
import stat
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import reflib
from reflib.errors import OptionError, PackageError, ReflibError
from reflib.ir.data import decode
from reflib.package import archive, elf, trees
from reflib.package import load as loading
from reflib.target import parse_target
from tests import damaged

Tensor = torch.Tensor
HERE = f"{platform.system()} on {platform.machine()}"
Change = Callable[[damaged.Parts], Any]


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
    """The package with something else in it, all digests right."""

    def __init__(self, package: Path, folder: Path):
        self.package, self.folder, self.made = package, folder, 0

    def __call__(self, change: Change) -> Path:
        parts = damaged.take_apart(self.package.read_bytes())
        change(parts)
        self.made += 1
        path = self.folder / f"changed-{self.made}.reflib"
        path.write_bytes(damaged.put_together(parts))
        return path


@pytest.fixture
def changed(package: Path, tmp_path: Path) -> Changed:
    return Changed(package, tmp_path)


def arm(parts: damaged.Parts, name: str = "cpu") -> dict[str, Any]:
    return next(a for a in parts.manifest["arms"] if a["arch"] == name)


def refused(path: Path, match: str, **options: Any) -> str:
    with pytest.raises(PackageError, match=match) as e:
        reflib.load(path, **options)
    return str(e.value)


# -- the file -------------------------------------------------------------------------------------------
def test_truncated_or_altered(package: Path, tmp_path: Path) -> None:
    data, path = package.read_bytes(), tmp_path / "m.reflib"
    path.write_bytes(data[: len(data) // 2])
    refused(path, r"truncated: the file ends before the package does; copy it again")
    for name in ("wrapper/", "weights", "kernels/"):
        place = next(n for n, _ in damaged.take_apart(data).members if n.startswith(name))
        at = data.index(place.encode()) + 5000 % len(place)
        out = bytearray(data)
        out[at] ^= 1
        path.unlink()
        path.write_bytes(out)
        refused(path, r"altered")
    out = bytearray(data)
    out[data.rindex(b'"arms"') + 2] ^= 1
    path.unlink()
    path.write_bytes(out)
    refused(path, r"manifest\.json is altered: its SHA-256 is not the one at the file's end")
    refused(tmp_path / "no", "there is no such file; check the path")
    refused(tmp_path, "this is a folder; give the path of a package")


def test_another_format_or_interface(changed: Changed) -> None:
    newer = changed(lambda p: p.manifest.update(format=3, versions={"reflib": "9.1"}))
    refused(newer, r"written by a newer reflib \(version 9\.1\) in format 3, known here is 2; upgrade reflib")
    newer = changed(lambda p: p.manifest.update(host=10**6, versions={"reflib": "9.1"}))
    refused(newer, r"built by a newer reflib \(9\.1\), which calls host code in another way: upgrade reflib")
    refused(changed(lambda p: p.manifest.update(host=0)), r"built by an older reflib .*: build it again")


def test_another_system(changed: Changed) -> None:
    for change, says in (({"system": "Darwin"}, "Darwin on .*"), ({"machine": "riscv64"}, ".* on riscv64")):
        path = changed(lambda p, change=change: p.manifest.update(change))
        refused(path, f"its host code is for {says}, and this is {HERE}: build it there")


def test_names_links_and_sizes(package: Path, changed: Changed, tmp_path: Path) -> None:
    for name, says in (
        ("../../evil", '"." or ".."'), ("/etc/evil", "is an absolute path"), ("C:evil", "a backslash or a colon"),
        ("a\\evil", "a backslash or a colon"),
    ):  # fmt: skip
        message = refused(changed(lambda p, name=name: p.members.append((name, b"x"))), "the member name")
        assert says in message and name.replace("\\", "\\\\") in message
    data = bytearray(package.read_bytes())
    record = next(start for kind, start, _ in damaged.headers(bytes(data)) if kind == "directory")
    struct.pack_into("<L", data, record + 38, (stat.S_IFLNK | 0o777) << 16)
    link = tmp_path / "link.reflib"
    link.write_bytes(data)
    refused(link, "is a link; build the package again")

    def large(p: damaged.Parts) -> None:
        rows = [vars(damaged.entry(n, c)) for n, c in p.members]
        rows[0]["size"] = 10**15
        path.write_bytes(damaged.with_manifest(p, damaged.text({**p.manifest, "entries": rows})))

    path = tmp_path / "large.reflib"
    changed(large)
    refused(path, "is said to have 1000000000000000 bytes, the whole file has")
    assert not list(tmp_path.rglob("*evil*")) and not Path("/etc/evil").exists()


def test_the_digest_that_was_asked_for(package: Path) -> None:
    right = hashlib.sha256(package.read_bytes()).hexdigest()
    reflib.load(package, sha256=right, device="cpu").unload()
    wrong = f"not the file that was asked for: its SHA-256 is {right}, not {'0' * 64}; do not use it"
    refused(package, wrong, sha256="0" * 64)
    with pytest.raises(OptionError, match="64 hex digits"):
        reflib.load(package, sha256="abc")


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
    path = changed(lambda p: arm(p, "ptx").update(driver=[12080, "570"]))
    message = refused(path, r"this RTX 5090 \(sm_120\) needs its assembly text \(PTX\)", device="cuda")
    assert "a driver of 570 or later (CUDA 12.8); this one takes CUDA 12.4: update the driver, or build it" in message
    assert "archs=[..., 'sm_120']" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_no_driver(package: Path, changed: Changed) -> None:
    none = "this machine has no GPU that PyTorch can use"
    refused(package, f"device cuda: {none}", device="cuda")
    refused(package, f"device cuda:7: {none}", device="cuda:7")
    only = changed(lambda p: p.manifest.update(arms=[a for a in p.manifest["arms"] if a["arch"] != "cpu"]))
    refused(only, f"holds code for sm_80, sm_90, PTX of sm_80 .*, and {none}; .*archs=.*'cpu'")
    refused(only, "none for a CPU; build it again with archs=.*'cpu'", device="cpu")


def test_devices(package: Path, for_cpus: Path, gpu: Callable[..., None]) -> None:
    for path in (package, for_cpus):
        refused(path, "packages run on cpu and cuda devices, not on mps", device="mps")
        refused(path, "device='nonsense' is no device", device="nonsense")
        refused(path, r"device=\[\] is no device", device=[])
    refused(for_cpus, r"holds code for cpu, none for a GPU; .*archs=", device="cuda")
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
        return changed(lambda p: p.manifest.update(libraries=[{"op": "nobody.scaled.default", **library}]))

    path = needs(module="my_ops", file="")
    refused(path, "it calls nobody.scaled.default, which is not registered here: first import my_ops$")
    refused(needs(module="", file="my.so"), r"not registered here: first torch\.ops\.load_library\('my\.so'\)")
    path = changed(lambda p: arm(p).update(symbols=["nobodys_shim"]))
    refused(path, r"calls the C function nobodys_shim, which no library here has: first torch\.ops\.load", device="cpu")


def test_an_older_torch(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.host, "lacking", lambda: "aoti_torch_of_tomorrow")
    refused(package, r"torch 2.* has no aoti_torch_of_tomorrow: packages need torch 2\.11 or later")


# -- what is in the file --------------------------------------------------------------------------------
def content(parts: damaged.Parts, name: str, make: Callable[[bytes], bytes]) -> None:
    parts.members = [(n, make(c) if n == name else c) for n, c in parts.members]


def test_libraries_that_cannot_be_mapped(changed: Changed) -> None:
    """Each of them would end the process, or not be found out until it is called."""

    def put(at: int, form: str, *values: int) -> Callable[[bytes], bytes]:
        def make(c: bytes) -> bytes:
            out = bytearray(c)
            struct.pack_into(form, out, at, *values)
            return bytes(out)

        return make

    program = 64 + 56  # the second segment
    for make, says in (
        (lambda c: c[:30], "is no shared library"), (lambda c: b"", "is no shared library"),
        (lambda c: b"#!/bin/sh\n" + c, "is no shared library"), (put(4, "<B", 1), "is no 64-bit library"),
        (put(18, "<H", 243), f"is no shared library for {platform.machine()}"),
        (put(16, "<H", 2), "is no shared library for"), (put(56, "<H", 60_000), "has no whole table of segments"),
        (put(32, "<Q", 1 << 40), "has no whole table of segments"),
        (lambda c: c[:3000], "is truncated: a segment ends at"),
        (put(program + 32, "<2Q", 1 << 40, 1 << 40), "is truncated: a segment ends"),
        (put(program + 16, "<Q", 1 << 63), "has a segment at no possible address"),
        (put(program + 16, "<Q", 1), "has segments that cannot be mapped"),
        (put(program + 48, "<Q", 3), "has segments that cannot be mapped"),
        (put(56, "<H", 1), "has no segments that can be linked"),
    ):  # fmt: skip
        path = changed(lambda p, make=make: content(p, arm(p)["wrapper"], make))
        refused(path, rf"wrapper/\w+\.so in it {says}", device="cpu")
        path = changed(lambda p, make=make: content(p, arm(p)["kernels"][0]["image"], make))
        refused(path, rf"kernels/\w+\.so in it {says}", device="cpu")
    known = Path(next(n for n in torch.ops.loaded_libraries) if torch.ops.loaded_libraries else loading.__file__)
    assert elf.fault(memoryview(known.read_bytes())) == (None if known.suffix == ".so" else "is no shared library")


def test_fields_that_make_no_sense(changed: Changed) -> None:
    program = lambda p: p.manifest["programs"]["cpu"]  # noqa: E731
    tensor = lambda p: program(p)["arguments"][0]["tensor"]  # noqa: E731
    five = tensor(damaged.take_apart(changed.package.read_bytes()))["shape"][0]
    changes: list[tuple[Change, str]] = [
        (lambda p: p.manifest.update(arms=[]), "it has 0 arms"),
        (lambda p: p.manifest.update(arms=[arm(p), arm(p)]), "it has 2 arms"),
        (lambda p: p.manifest.update(arms={}), "arms: expected a list"),
        (lambda p: arm(p).update(workspace=2**63), "a number of 64 bits"),
        (lambda p: arm(p).update(program="gpu"), "a program 'gpu', which is not there"),
        (lambda p: arm(p).update(wrapper="x.so"), "names 'x.so', which the file does not have"),
        (lambda p: arm(p).update(wrapper="weights.safetensors"), r"weights\.safetensors in it is no shared library"),
        (lambda p: arm(p).update(wrapper=arm(p)["kernels"][0]["image"]), "does not make sense .*reflib_call"),
        (lambda p: arm(p)["kernels"][0].update(symbol="nobody"), "does not make sense .*nobody"),
        (lambda p: arm(p).update(functions=["nobody"]), "its Python text cannot be run .*nobody"),
        (lambda p: arm(p).update(constants=[["nobody", "cpu"]]), "the weight 'nobody' is not in the file"),
        (lambda p: arm(p).update(objects=[{"_": "op", "value": "nobody.op.default"}]), "nobody.op.default is not"),
        (lambda p: program(p).update(inputs=["", *program(p)["inputs"]]), "1 arguments, its graph another number"),
        (lambda p: program(p).update(devices=[]), "inputs on 0 devices"),
        (lambda p: program(p).update(outputs=[{"kind": "weight", "target": "x"}]), "a result for weight 'x', which is"),
        (lambda p: program(p).update(outputs=[{"kind": "thing", "target": "x"}]), "a result for thing 'x', which is"),
        (lambda p: program(p).update(result_tree="[1"), "the structure of its results makes no sense"),
        (lambda p: program(p).update(arguments_tree=program(p)["result_tree"]), "arguments is no call's"),
        (lambda p: tensor(p).update(dtype="float99"), "has no dtype 'float99'"),
        (lambda p: tensor(p).update(dtype="nn"), "has no dtype 'nn'"),
        (lambda p: tensor(p).update(device="meta"), "expected on 'meta'"),
        (lambda p: tensor(p).update(shape=[five]), "not as many sizes"),
        (lambda p: tensor(p).update(shape=[1, 2]), "not as many sizes"),
        (lambda p: tensor(p).update(shape={"_": "torch", "value": "load"}), "has no dtype or"),
        (lambda p: p.manifest["rows"][0].update(shape=[2**62, 2**62], strides=[1, 1]), r"2\*\*63"),
        (lambda p: p.manifest["rows"][0].update(dtype="float64"), "the manifest (says|describes)|multiple"),
    ]
    for change, says in changes:
        refused(changed(change), says, device="cpu")


@pytest.mark.parametrize(
    "data",
    [
        {"_": "torch", "value": "load"}, {"_": "torch", "value": "__builtins__"}, {"_": "torch", "value": "os"},
        {"_": "function", "value": "operator.__builtins__"}, {"_": "function", "value": "os.system"},
        {"_": "function", "value": "operator.attrgetter"}, {"_": "op", "value": "aten.add.__class__"},
        {"_": "op", "value": "__class__.__init__.__globals__"}, {"_": "higher_order", "value": "__class__"},
        {"_": "device", "value": "x"}, {"_": "device", "value": 3}, {"_": "eval", "value": "1"}, {"_": [], "value": 1},
        {"_": "expr", "terms": [["1"]]}, {"_": "expr", "terms": [[True]]}, {"_": "expr", "terms": [[1, ["+", 1, 2]]]},
        {"_": "expr", "terms": [[1, ["sym", "s", "0", None, None]]]}, {"_": "expr", "terms": [[1, ["//", 1, 2]]]},
        {"_": "atom", "value": []}, {"value": 1}, {"_": "Load"}, {"_": "Expr", "terms": 1},
        {"_": "complex", "value": 1},
    ],
)  # fmt: skip
def test_reading_data_builds_data(data: Any) -> None:
    with pytest.raises((ReflibError, KeyError, TypeError, ValueError, AttributeError)):
        decode(data)


# -- structures -----------------------------------------------------------------------------------------
def spec(kind: str | None, context: Any, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": list(children)}


LEAF = spec(None, None)


def read(root: Any, leaves: int = 1) -> Any:
    return trees.tree(json.dumps([1, root]), leaves, "arguments")


def test_structures_come_back() -> None:
    factory: Any = defaultdict(list, {"a": 1})
    for x in ((1, [2, {"a": 3}]), {"b": 1, "a": (2,)}, 3, [], factory, torch.Size([2, 3]), {1: 2}):
        found = pytree.tree_structure(x)
        assert trees.tree(pytree.treespec_dumps(found), found.num_leaves, "arguments") == found


def test_structures_import_and_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_enum.py").write_text("import enum\nclass E(enum.Enum):\n    A = 1\n")
    key = {"__enum__": True, "fqn": "evil_enum:E", "name": "A"}
    enum = spec("builtins.dict", json.dumps([key]), LEAF)
    with pytest.raises(PackageError, match="the enum 'E' of 'evil_enum': import that first"):
        read(enum)
    assert "evil_enum" not in sys.modules
    import evil_enum  # type: ignore[import-not-found]

    assert read(enum).unflatten([3]) == {evil_enum.E.A: 3}
    for module, factory in (("evil_enum", "E"), ("os", "system"), ("builtins", "eval"), ("builtins", "print")):
        context = {"default_factory_module": module, "default_factory_name": factory, "dict_context": ["a"]}
        with pytest.raises(PackageError, match=f"a defaultdict of '{factory}'"):
            read(spec("collections.defaultdict", context, LEAF))
    for fqn in ("os:environ", "os:system", "builtins:dict", "os.path:os.system", "evil_enum:enum.Enum.__init__"):
        with pytest.raises(PackageError, match="makes no sense"):
            read(spec("builtins.dict", json.dumps([{**key, "fqn": fqn}]), LEAF))


@pytest.mark.parametrize(
    "root, says",
    [
        (spec("nobodys.Class", "null", LEAF), "the class 'nobodys.Class', .* import the module that registers it"),
        (spec("NO_SERIALIZED_TYPE_NAME_FOUND", "null", LEAF), "the class 'NO_SER"),
        (spec("builtins.tuple", "null", LEAF, LEAF), "has 2 leaves, not 1"),
        (spec("builtins.tuple", "[1]", LEAF), "makes no sense"), (spec(None, None, LEAF), "a leaf with something"),
        (spec("builtins.dict", "[]", LEAF), "a dict of 1 values and the keys"),
        (spec("builtins.dict", '["a", "a"]', LEAF, LEAF), "a dict of 2 values"),
        (spec("builtins.dict", '[["a"]]', LEAF), "unhashable"), (spec("builtins.dict", "null", LEAF), "a dict of 1"),
        (spec("builtins.dict", 5, LEAF), "makes no sense"), (spec([], None, LEAF), "unhashable"),
        (spec("collections.namedtuple", [], LEAF), "unhashable"), ({}, "KeyError"), ([], "TypeError"), (3, "TypeError"),
    ],
)  # fmt: skip
def test_structures_that_make_no_sense(root: Any, says: str) -> None:
    with pytest.raises(PackageError, match=says):
        read(root)


def test_a_structure_that_is_nested_too_deeply() -> None:
    text = '{"type": "builtins.list", "context": "null", "children_spec": [' * 50_000
    with pytest.raises(PackageError, match=r"RecursionError|JSONDecodeError"):
        trees.tree(f"[1, {text}", 1, "arguments")


# -- failures leave nothing -----------------------------------------------------------------------------
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts what Linux says of a process")
def test_failures_leave_nothing(changed: Changed) -> None:
    late = [  # found after libraries were loaded, or weights mapped
        changed(lambda p: arm(p).update(wrapper=arm(p)["kernels"][0]["image"])),
        changed(lambda p: arm(p)["kernels"][0].update(symbol="nobody")),
        changed(lambda p: arm(p).update(symbols=["nobodys_shim"])),
        changed(lambda p: arm(p).update(functions=["nobody"])),
        changed(lambda p: content(p, arm(p)["wrapper"], lambda c: c[:3000])),
        changed(lambda p: p.manifest.update(host=0)),
        changed(lambda p: arm(p).update(objects=[{"_": "op", "value": "nobody.op.default"}])),
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


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, args = tmp_path / "m.reflib", (torch.randn(5, 6),)
    model = Small()
    reflib.aot_compile(model, args, path, "cpu")
    before, pour, poured = path.read_bytes(), archive._pour, []

    def full(*of: Any) -> Any:
        poured.append(of)
        if len(poured) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pour(*of)

    monkeypatch.setattr(archive, "_pour", full)
    with pytest.raises(PackageError, match=r"cannot write .*: No space left on device; choose a folder that is there"):
        reflib.aot_compile(Small(), args, path, "cpu")
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["m.reflib"]
    with torch.no_grad():
        torch.testing.assert_close(reflib.load(path)(*args), model(*args))


# -- calls ----------------------------------------------------------------------------------------------
def test_calls_of_another_kind(for_cpus: Path) -> None:
    f, x = reflib.load(for_cpus), torch.randn(5, 6)
    want = f(x)
    for args, says in (
        ((x[0],), "argument x: ndim 1, but it was exported with 2"), ((x[None],), "argument x: ndim 3, but"),
        ((x[:3],), "argument x: size 3 in dimension 0, but it was exported with 5"),
        ((torch.randn(5, 7),), "argument x: size 7 in dimension 1, but it was exported with 6"),
        ((x.double(),), "argument x: dtype torch.float64, but it was exported with torch.float32"),
        ((x.to("meta"),), "argument x: device meta, but it was exported with cpu"),
        ((x.to_sparse(),), "argument x: layout torch.sparse_coo, but"), ((None,), "structure|expected a tensor"),
        (("text",), "argument x: expected a tensor, got str"), ((), "arguments of another structure"),
        ((x, x), "arguments of another structure"), (([x],), "argument x: expected a tensor, got list"),
        (({"x": x},), "argument x: expected a tensor, got dict"),
    ):  # fmt: skip
        for _ in range(2):
            with pytest.raises(ReflibError, match=says):
                f(*args)
    with pytest.raises(ReflibError, match="arguments of another structure"):
        f(x, y=1)
    torch.testing.assert_close(f(x.t().contiguous().t()), want)  # laid out in another way: copied
    torch.testing.assert_close(f(torch.cat([x, x], 1)[:, :6]), want)
    f.unload()
    f.unload()
    for _ in range(2):
        with pytest.raises(PackageError, match=r"cpu\.reflib was unloaded; load it again"):
            f(x)
    torch.testing.assert_close(want, want)
