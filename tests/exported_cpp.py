"""Building and running what ``reflib export-cpp`` writes: ``build_and_run(package, folder, inputs)``."""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from reflib.package.export_cpp import export_cpp

TOOLS = ("cmake", "ninja")
# a third of the processor's time: one file for all sources, nothing optimized
PLAIN = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"
SOONER = "-DCMAKE_UNITY_BUILD=ON", PLAIN


def missing_tools() -> list[str]:
    return [t for t in TOOLS if shutil.which(t) is None]


def build_and_run(
    package: str | Path, folder: str | Path, inputs: Sequence[torch.Tensor | int], arch: str | None = None
) -> list[torch.Tensor]:
    """Export ``package`` into ``folder``, build it with cmake and ninja, call it by its example program. Inputs may be
    on any device; results are on the CPU. Raises AssertionError with the command that failed, and what it said."""
    export_cpp(package, folder, arch)
    return run(build(folder), inputs)


def build(folder: str | Path, flags: Sequence[str] = SOONER) -> Path:
    """The folder with the library and the example. Without ``flags`` as a user builds it."""
    built = Path(folder) / "build"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    command("cmake", "-G", "Ninja", "-S", folder, "-B", built, prefix, *flags)
    command("cmake", "--build", built)
    return built


def run(built: Path, inputs: Sequence[torch.Tensor | int], env: Mapping[str, str] | None = None) -> list[torch.Tensor]:
    """The example's results: tensors; numbers as tensors without dimensions."""
    words: list[str | Path] = [built / "example"]
    for i, x in enumerate(inputs):
        words += ["--input", said(x, built / f"input{i}.bin")]
    files = [built / f"output{i}.bin" for i in range(100)]
    for f in files:
        f.unlink(missing_ok=True)
        words += ["--output", f]
    out = []
    for line in command(*words, env=env).splitlines():
        if m := re.match(r"output (\d+): (\w+) \[(.*)\]$", line):
            dtype, shape = getattr(torch, m[2]), [int(n) for n in m[3].split(", ") if n]
            data = bytearray(files[int(m[1])].read_bytes())
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            out.append(flat.view(dtype).reshape(shape))
        elif m := re.match(r"output \d+: (int|float) (\S+)$", line):
            out.append(torch.tensor({"int": int, "float": float}[m[1]](m[2])))
    return out


def said(x: torch.Tensor | int, file: Path) -> str:
    """An input, in the words of the example; its memory, from the first element to the last, goes into ``file``."""
    if isinstance(x, int):
        return str(x)
    x = x.detach().cpu()
    last = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0
    flat = torch.as_strided(x, (last,), (1,), x.storage_offset())
    file.write_bytes(flat.contiguous().view(torch.uint8).numpy().tobytes())
    sizes, strides = (",".join(map(str, n)) for n in (x.shape, x.stride()))
    return f"{file}:{sizes}:{str(x.dtype).removeprefix('torch.')}:{strides}"


def command(*words: str | Path, env: Mapping[str, str] | None = None) -> str:
    """What it printed. If it fails: an AssertionError with the command and all of its messages."""
    text = [str(w) for w in words]
    done = subprocess.run(text, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=600)
    assert done.returncode == 0, f"exit {done.returncode}\n$ {shlex.join(text)[:2000]}\n{done.stdout}{done.stderr}"
    return done.stdout


def equal(got: list[torch.Tensor], want: Any) -> None:
    want = want if isinstance(want, (tuple, list)) else [want]
    assert len(got) == len(want)
    for g, w in zip(got, want):
        assert g.dtype == w.dtype and g.shape == w.shape and torch.equal(g, w)


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def assert_reproducible(package: Path, project: Path, folder: Path, places: list[bytes]) -> None:
    """Exported twice, the package gives the project's files, and none names a place of this machine."""
    a, b = (files(export_cpp(package, folder / str(i))) for i in range(2))
    assert a == b
    assert a == {n: d for n, d in files(project).items() if not n.startswith("build/")}
    for place in [*places, str(folder).encode()]:
        assert not [n for n, data in a.items() if place in data], place
    assert not [n for n, d in a.items() if b"@" in d and n in ("CMakeLists.txt", "README.md")]


# -- what model.h declares, for Python ------------------------------------------------------------------
class CTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("device", ctypes.c_int32), ("dim", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("owner", ctypes.c_void_p),
    ]  # fmt: skip


class CAny(ctypes.Union):
    _fields_ = [
        ("tensor", CTensor), ("integer", ctypes.c_int64), ("number", ctypes.c_double), ("text", ctypes.c_char_p),
    ]  # fmt: skip


class CValue(ctypes.Structure):
    _anonymous_ = ("any",)
    _fields_ = [("kind", ctypes.c_int32), ("any", CAny)]
