"""The CUDA launcher against a stand-in driver that logs its calls."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reflib import toolchain
from reflib.errors import ToolchainError
from reflib.wrap import cuda_launch

Run = Callable[..., list[dict]]

STAND_IN = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void *current; static int fail_launch;
#define NOTE(...) do { FILE *f = fopen(getenv("STAND_IN_LOG"), "a"); fprintf(f, __VA_ARGS__); fputc('\n', f); fclose(f); } while (0)
int cuInit(unsigned f) { return getenv("STAND_IN_NO_GPU") ? 100 : 0; }
int cuGetErrorName(int r, const char **s) { *s = r == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_STAND_IN"; return 0; }
int cuGetErrorString(int r, const char **s) { *s = "the stand-in says no"; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(uintptr_t)(d + 1); return 0; }
int cuCtxGetCurrent(void **c) { *c = current; return 0; }
int cuCtxSetCurrent(void *c) { current = c; NOTE("{\"context\": %d}", (int)(uintptr_t)c); return 0; }
int cuModuleLoadData(void **m, const void *p) { NOTE("{\"image\": \"%s\"}", (const char *)p); *m = (void *)7; return strcmp(p, "bad") ? 0 : 209; }
int cuModuleGetFunction(void **f, void *m, const char *n) { NOTE("{\"entry\": \"%s\"}", n); *f = (void *)9; return 0; }
int cuModuleUnload(void *m) { NOTE("{\"unloaded\": %d}", (int)(uintptr_t)m); return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { NOTE("{\"attribute\": [%d, %d]}", a, v); return 0; }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **p, void **extra) {
    if (!current) return 201;
    if (bx == 32 * 64) return 701;
    if (getenv("STAND_IN_QUIET")) return 0;
    NOTE("{\"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, \"stream\": %ld, \"args\": [%ld, %ld, %d, %ld, %ld]}",
         x, y, z, bx, by, bz, shared, (long)(uintptr_t)stream, *(long *)p[0], *(long *)p[1], *(int *)p[2], *(long *)p[3], *(long *)p[4]);
    return 0;
}
int cuLaunchKernelEx(const unsigned *c, void *f, void **p, void **extra) { /* grid, block, shared; stream, attributes */
    void *const *tail = (void *const *)(c + 8); const int *attribute = tail[1];
    NOTE("{\"attributes\": [%u, %d, %d]}", *(const unsigned *)(tail + 2), attribute[0], attribute[2]);
    return cuLaunchKernel(f, c[0], c[1], c[2], c[3], c[4], c[5], c[6], tail[0], p, extra);
}
"""

# A C++ wrapper, reduced to one launch: of kernel 0, on a grid of input 1
WRAPPER = r"""
#include "host.h"
int32_t reflib_call(Host *host, Frame *frame, const Value *in, Value *out) {
    int64_t a = in[0].integer, hidden = 0, n = 123;
    void *params[] = {&a, &a, &n, &hidden, &hidden};
    frame->step = "k";
    if (!host->kernels[0].function && host->load(host, frame, 0)) return -1;
    if (host->launch(host, frame, &host->kernels[0], in[1].integer, (void *)77, params)) return -1;
    out[0].kind = VALUE_INT, out[0].integer = a + 1;
    return 0;
}
"""

# A server: imports once, then runs each snippet in a fork of itself, so that each sees a driver of its own.
SERVER = r"""
import ctypes, json, os, sys, threading, time, traceback
from reflib.errors import DeviceError, ToolchainError
from reflib.generate.compile_triton import Binary
from reflib.wrap import cuda_launch, host, native

def binary(image=b"image", warps=4, shared=0, arch="sm_90", scratch=0, pdl=False):
    return Binary("k", arch, "entry", shared, warps, 32, 2, 1, scratch, image, pdl=pdl)

def graph(facts, loader=None):
    library = ctypes.CDLL(os.environ["STAND_IN_WRAPPER"])
    return host.graph(library, "g", 2, 1, [("k", facts)], [loader], [], [], [], [], None, unloads=True)

def no_compiler():
    raise ToolchainError("no compiler here")

def refused(call, text):
    try:
        call()
    except (DeviceError, TypeError) as e:
        assert text in str(e), e
    else:
        raise AssertionError("no error: " + text)

for line in sys.stdin:
    task = json.loads(line)
    answer, theirs = os.pipe()
    if not os.fork():
        os.environ.update(task["env"])
        how = task["how"]
        if how == "ctypes":
            native.build_host = no_compiler
        try:
            exec(task["code"])
            said = ""
        except BaseException:
            said = traceback.format_exc()
        os.write(theirs, said.encode()[-4000:])
        os._exit(0)
    os.close(theirs)
    os.wait()
    print(json.dumps(os.read(answer, 5000).decode()), flush=True)
    os.close(answer)
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[str]:
    try:
        found = toolchain.compiler()
    except ToolchainError as e:
        pytest.skip(str(e))
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("driver", STAND_IN), ("wrapper", WRAPPER)):
            source, out = Path(folder, f"{name}.c"), Path(folder, f"{name}.so")
            source.write_text(text)
            flags = ["-x", "c", "-w", "-shared", "-fPIC", f"-I{Path(cuda_launch.__file__).parent}"]
            subprocess.run([*found.command, *flags, str(source), "-o", str(out)], check=True)
        yield str(Path(folder, "driver.so"))


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as p:
        yield p
        p.stdin.close()  # type: ignore[union-attr]


@pytest.fixture
def run(server: subprocess.Popen, driver: str, tmp_path: Path) -> Callable[..., list[dict]]:
    """``run(how, code, **env)``: the calls of the driver that ``code`` made."""

    def call(how: str, code: str, libcuda: str = driver, **env: str) -> list[dict]:
        log = tmp_path / "log"
        log.write_text("")
        wrapper = str(Path(driver).with_name("wrapper.so"))
        names = {"REFLIB_LIBCUDA": libcuda, "STAND_IN_LOG": str(log), "STAND_IN_WRAPPER": wrapper}
        task = {"how": how, "code": code, "env": {**names, **env}}
        server.stdin.write(json.dumps(task) + "\n")  # type: ignore[union-attr]
        server.stdin.flush()  # type: ignore[union-attr]
        error = json.loads(server.stdout.readline())  # type: ignore[union-attr]
        assert not error, error
        return [json.loads(line) for line in log.read_text().splitlines()]

    return call


both = pytest.mark.parametrize("how", ["native", "ctypes"])


@both
def test_a_launch(run: Run, how: str) -> None:
    code = """
k = cuda_launch.load(binary(), device=0)
k(77, 5, 0x7f0000001000, 2**63 + 8, 123)
"""
    asked = run(how, code)
    assert [a for a in asked if "context" not in a] == [
        {"image": "image"},
        {"entry": "entry"},
        {"grid": [5, 1, 1], "block": [128, 1, 1], "shared": 0, "stream": 77,
         "args": [0x7F0000001000, 8 - 2**63, 123, 0, 0]},
    ]  # fmt: skip


@both
def test_a_grid_of_three_dimensions(run: Run, how: str) -> None:
    code = """
k = cuda_launch.load(binary(), device=0)
for x, y, z in ((5, 1, 1), (5, 7, 3), (2**31 - 2, 65535, 32767)):
    k(77, 2**62 + x + (y - 1) * 2**31 + (z - 1) * 2**47, 1, 2, 3)
for grid in (2**31, 2**62 + 2**31 - 1, 2**62 + 1 + 65535 * 2**31, 2**62 + 1 + 32767 * 2**47):
    refused(lambda: k(77, grid, 1, 2, 3), "a grid of too many programs; the limit is 2^31 - 1, and 65535 and 32767")
"""
    grids = [a["grid"] for a in run(how, code) if "grid" in a]
    assert grids == [[5, 1, 1], [5, 7, 3], [2**31 - 2, 65535, 32767]]


@both
def test_scratch_memory_is_the_last_argument_and_the_first_hidden_pointer(run: Run, how: str) -> None:
    asked = run(how, "cuda_launch.load(binary(scratch=256), 0)(77, 5, 1, 2, 3, 0x7f0000002000)\n")
    assert asked[-1]["args"] == [1, 2, 3, 0x7F0000002000, 0]


def test_an_early_launch(run: Run) -> None:
    asked = run("native", "cuda_launch.load(binary(pdl=True, shared=1000), 0)(77, 5, 1, 2, 3)\n")
    assert asked[-2] == {"attributes": [1, 6, 1]}, "programmatic stream serialization, on"
    assert (asked[-1]["grid"], asked[-1]["block"]) == ([5, 1, 1], [128, 1, 1])
    assert (asked[-1]["shared"], asked[-1]["stream"], asked[-1]["args"]) == (1000, 77, [1, 2, 3, 0, 0])


@both
def test_loading_waits_for_the_first_launch(run: Run, how: str) -> None:
    asked = run(how, "k = cuda_launch.load(binary())\nk(0, 0, 1, 2, 3)\n")
    assert asked == [], "nothing is loaded, and an empty grid is not launched"
    asked = run(how, "k = cuda_launch.load(binary())\nk(0, 1, 1, 2, 3)\nk(0, 1, 1, 2, 3)\n")
    assert sum("image" in a for a in asked) == 1 and sum("grid" in a for a in asked) == 2


@both
def test_much_shared_memory_is_asked_for(run: Run, how: str) -> None:
    asked = run(how, "cuda_launch.load(binary(shared=100000), 0)(0, 1, 1, 2, 3)\n")
    assert {"attribute": [8, 100000]} in asked and asked[-1]["shared"] == 100000
    asked = run(how, "cuda_launch.load(binary(shared=48 * 1024), 0)\n")
    assert not any("attribute" in a for a in asked)


@both
def test_the_other_device_and_back(run: Run, how: str) -> None:
    code = "cuda_launch.load(binary(), 0)\ncuda_launch.load(binary(), 1)\n"
    contexts = [a["context"] for a in run(how, code) if "context" in a]
    assert contexts == [1, 2, 1], "device 1's context for loading, then device 0's again"


@both
def test_errors_carry_the_drivers_words(run: Run, how: str) -> None:
    code = """
refused(lambda: cuda_launch.load(binary(b"bad"), 0), "cannot load kernel k: the stand-in says no")
k = cuda_launch.load(binary(warps=64), 0)
refused(lambda: k(0, 1, 1, 2, 3), "cannot launch kernel k: the stand-in says no")
refused(lambda: k(0, 1, 1, 2), "3 arguments")
refused(lambda: k(0, 2**31, 1, 2, 3), "2^31 - 1")
refused(lambda: k(0, 1, 1, "two", 3), "") if how == "native" else None
refused(lambda: cuda_launch.load(binary(arch="gfx942")), "cannot launch there yet")
refused(lambda: cuda_launch.load(binary(scratch=64), 0)(0, 1, 1, 2, 3), "4 arguments")
"""
    run(how, code)


@both
def test_no_driver_and_no_gpu(run: Run, how: str) -> None:
    code = 'refused(lambda: cuda_launch.load(binary(), 0), "no usable GPU")\n'
    run(how, code, STAND_IN_NO_GPU="1")
    code = 'refused(lambda: cuda_launch.load(binary(), 0), "cannot load the CUDA driver")\n'
    run(how, code, libcuda="/nowhere/libcuda.so")


def test_a_cpp_wrapper_launches_by_the_same_functions(run: Run) -> None:
    code = """
g = graph(cuda_launch.facts(binary(shared=100000), 0))
assert g([5, 3]) == (6,) and g([6, 3]) == (7,)
refused(lambda: g([5, 2**31]), "2^31 - 1")
del g
late = graph(None, lambda: cuda_launch.facts(binary(b"other"), 1))
assert late([5, 1]) == (6,) and late([5, 1]) == (6,)
refused(lambda: graph(cuda_launch.facts(binary(warps=64), 0))([1, 1]), "the stand-in says no")
refused(lambda: graph(cuda_launch.facts(binary(b"bad"), 0)), "cannot load kernel k: the stand-in says no")
refused(lambda: graph(None, lambda: cuda_launch.facts(binary(b"bad"), 0))([1, 1]), "cannot load kernel k")
"""
    asked = run("native", code)
    launches = [a for a in asked if "grid" in a]
    assert [a["grid"][0] for a in launches] == [3, 3, 1, 1]
    assert launches[0] == {"grid": [3, 1, 1], "block": [128, 1, 1], "shared": 100000, "stream": 77,
                           "args": [5, 5, 123, 0, 0]}  # fmt: skip
    assert [a["image"] for a in asked if "image" in a] == ["image", "other", "image", "bad", "bad"]
    assert asked.index({"unloaded": 7}) < asked.index({"image": "other"}), "with the graph"


def test_another_thread_gets_the_context(run: Run) -> None:
    code = """
k = cuda_launch.load(binary(), 0)
import ctypes, os
ctypes.CDLL(os.environ["REFLIB_LIBCUDA"]).cuCtxSetCurrent(None)  # a thread without a context
k(0, 1, 1, 2, 3)
"""
    asked = run("native", code)
    assert asked[-2] == {"context": 1} and asked[-1]["grid"] == [1, 1, 1]


def test_a_launch_takes_less_than_two_microseconds(run: Run) -> None:
    code = """
k = cuda_launch.load(binary(), 0)
best = 1
for _ in range(20):
    t = time.perf_counter()
    for _ in range(1000):
        k(0, 1, 1, 2, 3)
    best = min(best, (time.perf_counter() - t) / 1000)
assert best < 2e-6, best
"""
    run("native", code, STAND_IN_QUIET="1")
