"""Packages built without a GPU, on one: machine code, PTX alone, another device, memory, the exported C++ program."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import reflib
from reflib.errors import PackageError, ReflibError
from tests import packages

close = torch.testing.assert_close


def without_a_gpu(folder: Path, **more: str) -> Path:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **more}
    command = [sys.executable, "-m", "tests.packages", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    elsewhere = os.environ.get("REFLIB_PACKAGES")
    return Path(elsewhere) if elsewhere else without_a_gpu(tmp_path_factory.mktemp("packages"))


def inputs(args: Any, device: str, rows: int | None = None) -> Any:
    torch.manual_seed(7)
    return pytree.tree_map(lambda t: torch.randn((rows or t.shape[0], *t.shape[1:])).to(device, t.dtype), args)


@torch.no_grad()
def check(f: Any, name: str, device: str = "cuda") -> None:
    model, args = packages.made(name)
    model, tolerance = model.to(device), packages.CASES[name].tolerance
    for rows in (None, 5, 17) if packages.CASES[name].dynamic_shapes else (None, None):
        xs = inputs(args, device, rows)
        got, want = f(*xs), model(*xs)
        close(got, want, rtol=tolerance, atol=tolerance, check_stride=False)
        assert [t.device for t in pytree.tree_leaves(got)] == [t.device for t in pytree.tree_leaves(want)]


@pytest.mark.parametrize("name", packages.CASES)
def test_built_without_a_gpu(name: str, built: Path) -> None:
    f = reflib.load(built / f"{name}.reflib")
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
    expected = capability if capability in packages.CASES[name].archs else "ptx"
    assert f.variant == expected or capability.startswith("sm_8")
    assert "ptx" not in name or f.variant == "ptx"
    check(f, name)


@pytest.mark.parametrize("name", ["norm", "split_product", "norm_from_ptx"])
def test_images_in_a_table(name: str, tmp_path: Path) -> None:
    without_a_gpu(tmp_path, REFLIB_FATBINARY="")
    f = reflib.load(tmp_path / f"{name}.reflib")
    assert f.manifest.images == "table"
    check(f, name)


def test_memory(built: Path) -> None:
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f = reflib.load(built / "block.reflib")
    assert f.device.type == "cuda"
    held = torch.cuda.memory_allocated() - start
    assert torch.cuda.max_memory_allocated() - start == held  # never more than the weights
    model, args = packages.made("block")
    size = sum(t.nbytes for t in model.state_dict().values())
    count = len(model.state_dict())
    assert size <= held <= size + 512 * count
    assert f.memory_metrics()["weights"] == size
    xs = inputs(args, "cuda")
    out = f(*xs)
    torch.cuda.synchronize()
    del out
    f.unload()
    with pytest.raises(PackageError, match="unloaded"):
        f(*xs)
    del f, xs, model
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    left = torch.cuda.memory_allocated() - start
    words = sum(t.nbytes for t in [*reflib_zeros().of.values(), *reflib_zeros().reserve.values()])
    assert left <= words + 2 * 2**20, (left, words)  # (what cuBLASLt keeps)


def reflib_zeros() -> Any:
    from reflib.wrap.zeros import zeros

    return zeros


def test_loading_again_and_again(built: Path) -> None:
    """What the allocator holds is this process's own count. What the driver holds (a kernel's code) is seen only in the
    device's free memory, which other processes change too: in one of several short rounds they do not."""
    _, args = packages.made("norm")
    xs = inputs(args, "cuda")
    want = reflib.load(built / "norm.reflib")(*xs)

    def held() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    def after_loading(times: int) -> tuple[int, int]:
        for _ in range(times):
            f = reflib.load(built / "norm.reflib")
            assert torch.equal(f(*xs), want)
            f.unload()
        return held()

    after_loading(10)
    lost = []
    for _ in range(20):
        (ours, free), (ours_after, free_after) = held(), after_loading(20)
        assert ours_after == ours
        lost.append(free - free_after)
        if abs(lost[-1]) < 4 * 2**20:
            return
    pytest.fail(f"free memory went down by {lost} bytes in rounds of 20 loads")


@pytest.mark.alone
def test_how_long_it_takes(built: Path) -> None:
    reflib.load(built / "norm.reflib")  # host.c is built, CUDA started
    for name, first in (("norm", 0.5), ("block", 5.0)):
        start = time.perf_counter()
        f = reflib.load(built / f"{name}.reflib", verify="code")
        loaded = time.perf_counter() - start
        _, args = packages.made(name)
        xs = inputs(args, "cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        f(*xs)
        torch.cuda.synchronize()
        called = time.perf_counter() - start
        print(f"{name}: load {loaded * 1e3:.1f} ms, first call {called * 1e3:.1f} ms")
        assert loaded < 0.5 and called < first


def test_two_devices(built: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    for name in ("norm", "split_product", "block_of_any_length", "convolution_and_sort"):
        f, g = reflib.load(built / f"{name}.reflib", device="cuda:1"), reflib.load(built / f"{name}.reflib")
        check(f, name, "cuda:1")
        check(g, name)
        assert torch.cuda.current_device() == 0
        _, args = packages.made(name)
        with pytest.raises(ReflibError, match="cuda:0"):
            f(*inputs(args, "cuda:0"))


def test_a_cpu_variant_beside(built: Path) -> None:
    f = reflib.load(built / "block.reflib", device="cpu")
    assert f.variant == "cpu"
    check(f, "block", "cpu")


def test_the_exported_program(built: Path, tmp_path: Path) -> None:
    from tests.exported_cpp import build_and_run

    for name in ("norm", "split_product", "norm_from_ptx", "block"):
        _, args = packages.made(name)
        xs = list(inputs(args, "cuda"))
        want = reflib.load(built / f"{name}.reflib")(*xs)
        got = build_and_run(built / f"{name}.reflib", tmp_path / name, [x.cpu() for x in xs])
        close(got[0], want.cpu(), rtol=1e-3, atol=1e-3)
