"""The compiler: found, asked once, its refusals readable; and calling what it made."""

import ctypes
import os
import stat
import sys
import threading
import warnings

import pytest

from reflib import cache, toolchain
from reflib.errors import ReflibError, ToolchainError
from reflib.options import Options
from reflib.wrap import host_ctypes, native

ADD = """
extern "C" int {0}_packed(const long long* a) {{ return (int)(a[0] + 2 * a[1] + 3 * a[2]); }}
"""


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REFLIB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_library_is_built_once(empty_cache, monkeypatch):
    first = toolchain.build_library(ADD.format("f"))
    monkeypatch.setattr(toolchain, "_build", None)  # a second build would fail
    assert toolchain.build_library("// from another line of the model\n" + ADD.format("f")) == first
    assert native.load_library(first).function("f", 3)(1, 10, 100) == 321


def test_a_damaged_library_is_built_again(empty_cache):
    path = toolchain.build_library(ADD.format("f"))
    path.write_bytes(path.read_bytes()[:1000])
    again = toolchain.build_library(ADD.format("f"))
    assert native.load_library(again).function("f", 3)(1, 0, 0) == 1


def test_flags_make_another_library(empty_cache):
    plain = toolchain.build_library(ADD.format("f"))
    assert toolchain.build_library(ADD.format("f"), Options(cpp_flags=("-DX=1",))) != plain


def test_many_functions_are_compiled_side_by_side(empty_cache, monkeypatch):
    monkeypatch.setattr(toolchain, "_UNIT_CHARS", 10)
    texts = [ADD.format(f"f{i}") for i in range(5)]
    header = "static int used_by_all = 0;\n"
    library = native.load_library(toolchain.build_library(texts, Options(compile_threads=2), header=header))
    assert [library.function(f"f{i}", 3)(i, 0, 0) for i in range(5)] == [0, 1, 2, 3, 4]


def test_refused_code_names_the_command_and_the_message(empty_cache):
    with pytest.raises(ToolchainError, match=r"(?s)\$ .*-O3.*error: .*no_such_thing"):
        toolchain.build_library('extern "C" int f() { return no_such_thing; }')


def test_no_compiler_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler found.*install one.*CXX") as e:
        toolchain.compiler()
    assert "\n" not in str(e.value)


def test_cxx_names_the_compiler(tmp_path, monkeypatch, empty_cache):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="CXX='no-such-compiler' was not found"):
        toolchain.compiler()
    real = toolchain.shutil.which("g++") or toolchain.shutil.which("c++")
    wrapper = tmp_path / "my-c++"
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", f"{wrapper} -DMINE")
    assert toolchain.compiler().command == (str(wrapper), "-DMINE")
    assert toolchain.build_library("#ifndef MINE\n#error\n#endif\n" + ADD.format("f")).exists()


@pytest.fixture
def crashing(tmp_path, monkeypatch, empty_cache):
    """``crashing(*flags)``: a compiler that crashes on sources with "crash" in them, where all the flags are given."""
    real = toolchain.shutil.which("g++") or toolchain.shutil.which("c++")

    def make(*flags):
        script = tmp_path / "crashing-c++"
        script.write_text(
            f"#!{sys.executable}\nimport os, sys\nwords = sys.argv[1:]\n"
            "texts = [open(w).read() for w in words if w.endswith('.cpp') and 'unit' in w]\n"
            f"if {set(flags)} <= set(words) and 'crash' in ''.join(texts):\n"
            "    sys.exit(print('unit0.cpp:7: internal compiler error: in vect', file=sys.stderr) or 4)\n"
            f"os.execv({real!r}, [{real!r}, *words])\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        toolchain._say_plainer.cache_clear()

    return make


@pytest.mark.parametrize("flags", [("-O3",), ("-O3", "-ffp-contract=fast"), ("-march=native",)])
def test_a_compiler_that_crashes_gets_plainer_flags(crashing, flags, monkeypatch):
    crashing(*flags)
    if set(flags) - set(toolchain.compiler().flags):
        pytest.skip("this compiler does not take them")
    monkeypatch.setattr(toolchain, "_UNIT_CHARS", 10)
    with pytest.warns(UserWarning, match=r"crashing-c\+\+ failed on .*internal compiler error.*CXX") as said:
        for n in (1, 2):  # one unit, and two of which one crashes
            texts = [ADD.format(f"crash{i}" if i % 2 else f"f{i}") for i in range(1, n + 1)]
            library = native.load_library(toolchain.build_library(texts, Options(compile_threads=2)))
            assert library.function("crash1", 3)(1, 10, 100) == 321
    assert len(said) == 1


def test_a_compiler_that_always_crashes(crashing):
    crashing("-fwrapv")
    with pytest.raises(ToolchainError, match=r"(?s)exit 4\); .*CXX\n\$ .*-O3.*internal compiler error"):
        toolchain.build_library(ADD.format("crash"))


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize(
    "dies", ["os.kill(os.getpid(), 9)", "sys.exit(print('fatal error: Killed signal', file=sys.stderr) or 1)"]
)
def test_a_compiler_that_is_killed_runs_again_alone(tmp_path, monkeypatch, empty_cache, always, dies):
    """Of two that run at once, and of a wrapper's."""
    real = toolchain.shutil.which("g++") or toolchain.shutil.which("c++")
    script, log = tmp_path / "starved-c++", tmp_path / "log"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\nwords = sys.argv[1:]\n"
        "names = [w for w in words if w.endswith('.cpp') and 'probe' not in w]\n"
        f"print(*names, file=open({str(log)!r}, 'a'))\n"
        f"if names and ({always} or open({str(log)!r}).read().count(names[0]) == 1):\n    {dies}\n"
        f"os.execv({real!r}, [{real!r}, *words])\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(toolchain, "_UNIT_CHARS", 10)

    def build():
        toolchain.build_library([ADD.format("f"), ADD.format("g")], Options(compile_threads=2))
        toolchain.shared_library("wrapper", {"wrapper.cpp": ADD.format("h")}, ("-shared", "-fPIC"))

    if always:
        with pytest.raises(ToolchainError, match=r"memory ran out: compile fewer at once.*compile_threads=1"):
            build()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build()
        assert all(log.read_text().count(name) == 2 for name in ("unit0.cpp", "unit1.cpp", "wrapper.cpp"))


def test_what_is_known_of_a_compiler_is_remembered(empty_cache, monkeypatch):
    toolchain._compiler.cache_clear()
    found = toolchain.compiler()
    toolchain._compiler.cache_clear()
    monkeypatch.setattr(toolchain, "_probe", None)
    assert toolchain.compiler() == found
    assert any("-fwrapv" in f for f in found.flags) and not any("fast-math" in f for f in found.flags)


def test_one_openmp_runtime(empty_cache):
    """Kernels use the threads that torch has, not a second pool."""
    if not toolchain.compiler().openmp or not os.path.exists("/proc/self/maps"):
        pytest.skip("no OpenMP here")
    source = """
    extern "C" int threads_packed(const long long* a) {
      int n = 0;
      #pragma omp parallel num_threads((int)a[0]) reduction(+:n)
      n += 1;
      return n;
    }"""
    import torch

    torch.ones(100000).add(1)  # torch's pool is up
    assert native.load_library(toolchain.build_library(source)).function("threads", 1)(2) == 2
    with open("/proc/self/maps") as f:
        runtimes = {os.path.realpath(line.split()[-1]) for line in f if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes


# -- calling ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["extension", "ctypes"])
def function(request):
    """The same calls through the extension and through ctypes."""
    library = native.load_library(toolchain.build_library(ADD.format("f")))
    if request.param == "extension":
        if native.extension() is host_ctypes:
            pytest.skip("no Python.h")
        return library.function("f", 3)
    return host_ctypes.function(library.address("f_packed"), 3, library)


def test_calls(function):
    assert function(1, 2, 3) == 14
    assert function(-1, 0, 0) == -1


def test_wrong_calls_are_refused(function):
    with pytest.raises(TypeError, match="3 arguments"):
        function(1, 2)
    with pytest.raises(TypeError):
        function(1, 2, "three")
    with pytest.raises(TypeError):
        function(1, 2, 1.5)


def test_pointers_keep_all_their_bits():
    if native.extension() is host_ctypes:
        pytest.skip("no Python.h")
    f = native.load_library(toolchain.build_library(ADD.format("f"))).function("f", 3)
    assert f(2**64 - 1, 0, 0) == -1
    with pytest.raises(OverflowError):
        f(2**65, 0, 0)


def test_many_arguments():
    n = 300
    source = f"""extern "C" int many_packed(const long long* a) {{
      long long s = 0; for (int i = 0; i < {n}; ++i) s += a[i]; return (int)s; }}"""
    f = native.load_library(toolchain.build_library(source)).function("many", n)
    assert f(*range(n)) == n * (n - 1) // 2


def test_the_gil_is_released():
    source = """
    extern "C" int wait_packed(const long long* a) {
      volatile int* flag = (volatile int*)a[0];
      for (long long i = 0; i < 20000000000LL && !*flag; ++i) {}
      return *flag;
    }"""
    f = native.load_library(toolchain.build_library(source)).function("wait", 1)
    flag = ctypes.c_int(0)
    timer = threading.Timer(0.05, lambda: setattr(flag, "value", 7))
    timer.start()
    assert f(ctypes.addressof(flag)) == 7


def test_a_missing_kernel_is_named():
    library = native.load_library(toolchain.build_library(ADD.format("f")))
    with pytest.raises(ReflibError, match="no kernel 'g'"):
        library.function("g", 1)
    with pytest.raises(ReflibError, match="cannot load"):
        native.load_library("/nowhere/lib.so")


def test_extensions_are_built_through_the_cache(empty_cache):
    source = """
    #include <Python.h>
    static PyObject* seven(PyObject* m, PyObject* a) { return PyLong_FromLong(7); }
    static PyMethodDef methods[] = {{"seven", seven, METH_NOARGS, ""}, {NULL}};
    static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "_reflib_test", NULL, -1, methods};
    PyMODINIT_FUNC PyInit__reflib_test(void) { return PyModule_Create(&def); }
    """
    assert native.build_extension("_reflib_test", source).seven() == 7
    assert len(list((cache.root() / "extensions").iterdir())) == 1
