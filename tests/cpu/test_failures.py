"""What compilers and assemblers refuse: the line marked, a command that says the same again, and what to change."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reflib
from reflib import cache, failures, toolchain
from reflib.errors import DeviceError, ToolchainError
from reflib.generate.compile_triton import compile_kernel
from reflib.target import Target, parse_target


@pytest.fixture(scope="module")
def kernel():
    return reflib.explain(lambda x: torch.relu(x) + 1, torch.randn(64, 64), target="sm_90").kernels[0]


def by_hand(text: str) -> str:
    """What the command in the message says."""
    command = re.search(r"^\$ (.*)$", text, re.M)
    assert command, text
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache.root() / "by-hand")}
    done = subprocess.run(["bash", "-c", command[1]], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode, "it fails in the same way"
    return done.stdout + done.stderr


def only_marked(text: str) -> str:
    (line,) = re.findall(r"^> *\d+ \| (.*)$", text, re.M)
    return line


def test_a_c_compilers_error(fresh_cache):
    filler = "\n".join(f"static int filler{i};" for i in range(100))
    with pytest.raises(ToolchainError) as e:
        toolchain.build_library(f'{filler}\nextern "C" int f() {{\n  return no_such_thing;\n}}', header="// header\n")
    text = str(e.value)
    assert only_marked(text).strip() == "return no_such_thing;" and "   ..." in text and "filler0;" not in text
    assert "to change: this code was generated" in text
    assert "no_such_thing" in by_hand(text)


def test_tritons_error_marks_the_line(kernel, fresh_cache):
    broken = replace(kernel, name=kernel.name, source=kernel.source.replace("tl.store(", "tl.no_such_thing("))
    with pytest.raises(ToolchainError, match=f"refused kernel {kernel.name} for sm_90") as e:
        compile_kernel(broken, parse_target("sm_90"))
    text = str(e.value)
    assert "tl.no_such_thing(" in only_marked(text)
    assert "no_such_thing" in by_hand(text)


def test_an_assemblers_error_marks_the_line_of_ptx(kernel, fresh_cache, capfd):
    load = re.search(r"^( *)(\w+) = tl\.load\(.*$", kernel.source, re.M)
    assert load is not None
    call = f'tl.inline_asm_elementwise("bogus.f32 $0, $1;", "=f,f", [{load[2]}], tl.float32, True, 1)'
    asm = f"{load[1]}{load[2]} = {call}"
    broken = replace(kernel, source=kernel.source.replace(load[0], f"{load[0]}\n{asm}"))
    with pytest.raises(ToolchainError) as e:
        compile_kernel(broken, parse_target("sm_90"))
    text = str(e.value)
    assert "bogus.f32" in only_marked(text) and f"{kernel.name}.ptx:" in text
    assert "bogus" in by_hand(text)
    ptx = re.search(r"^\$ cd (\S+)", text, re.M)
    assert ptx and sorted(p.suffix for p in Path(ptx[1]).iterdir()) == [".ptx", ".py"]


def test_too_much_shared_memory_says_what_is_used(fresh_cache):
    x = torch.randn(256, 256)
    [turn] = reflib.explain(lambda x: x.t().contiguous() + x, x, target="sm_90").kernels
    with pytest.raises(DeviceError, match=r"shared memory.*\(\d+ registers per thread, \d+ warps, \d+ stages\)") as e:
        compile_kernel(turn, Target("cuda", "sm_90", 16, 1))
    assert "to change: smaller blocks" in str(e.value) and "tl.load" in str(e.value)


def test_what_to_change():
    said = {
        "g++: internal compiler error: Segmentation fault": "CXX",
        "ptxas fatal   : Value 'sm_130' is not defined for option 'gpu-name'": "TRITON_PTXAS_PATH",
        "uses too much shared data (0x12000 bytes, 0xc000 max)": "persistent_limit",
        "fatal error: error writing to /tmp/x.s: No space left on device": "TMPDIR",
        "c++: fatal error: Killed signal terminated program cc1plus": "compile_threads",
        "g++: error: unrecognized command-line option '-fnope'": "cpp_flags",
        "/usr/bin/ld: cannot find -lmvec": "doctor",
        "error: expected ';'": "reflib repro",
    }
    assert all(what in failures.advice(message) for message, what in said.items())


def test_failures_kept_are_bounded_and_a_folder_that_is_none_is_no_error(fresh_cache, monkeypatch):
    monkeypatch.setattr(failures, "KEPT", 3)
    folders = [failures.keep({"a.cpp": str(i)}) for i in range(5)]
    assert len(list((cache.root() / "failed").iterdir())) == 3 and folders[-1] and folders[-1].exists()
    for old in (cache.root() / "failed").iterdir():
        for f in old.iterdir():
            f.unlink()
        old.rmdir()
    (cache.root() / "failed").rmdir()
    (cache.root() / "failed").write_text("")
    assert failures.keep({"a.cpp": "1"}) is None
    text = failures.of_kernel("k", "def k():\n  pass", "sm_90", ValueError("x"), "program")
    assert "refused kernel k" in text and "\n$ " not in text
