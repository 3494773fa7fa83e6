"""Checks what this machine supports: `reflib doctor`.

Each check is a small function that returns a `Finding`. Nothing is installed. A check that raises becomes a finding, so
the others still run.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from reflib import cache, toolchain
from reflib.errors import ReflibError

OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `reflib doctor` exits with 1 if a `needed` finding is not ok."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = False


def check_python() -> Finding:
    version = platform.python_version()
    return Finding("Python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer", needed=True)


def check_torch() -> Finding:
    remedy = "pip install 'torch>=2.11'"
    if importlib.util.find_spec("torch") is None:
        return Finding("PyTorch", False, "not installed", remedy, needed=True)
    import torch

    release = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    return Finding("PyTorch", release >= OLDEST_TORCH, torch.__version__, remedy, needed=True)


def check_triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        why = "GPU kernels can be neither run nor shown"
        remedy = "pip install triton" if sys.platform == "linux" else "Triton has no build for this system"
        return Finding("Triton", False, f"not installed: {why}", remedy)
    import triton

    return Finding("Triton", True, triton.__version__)


def check_gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        detail = "none seen" if built else "none: this PyTorch is built for the CPU only"
        remedy = "check the driver with nvidia-smi" if built else "install a CUDA build of PyTorch to use a GPU"
        yield Finding("GPU", False, detail, f"{remedy}; everything else runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        chip = getattr(p, "gcnArchName", "") if torch.version.hip else f"sm_{p.major}{p.minor}"
        memory = p.total_memory / 2**30
        detail = f"{p.name}, {chip}, {memory:.0f} GiB, {p.multi_processor_count} multiprocessors"
        yield Finding(f"GPU {index}", True, detail)
    if torch.version.cuda:
        yield Finding("CUDA", True, f"runtime {torch.version.cuda}, bf16 {torch.cuda.is_bf16_supported()}")


def check_compiler() -> Finding:
    try:
        found = toolchain.compiler()
    except ReflibError as error:
        return Finding("C++ compiler", False, "none usable: CPU kernels cannot be built", str(error))
    return Finding("C++ compiler", True, f"{' '.join(found.command)}: {found.version}")


def check_openmp() -> Finding:
    try:
        threads = toolchain.compiler().openmp
    except ReflibError:
        return Finding("OpenMP", False, "needs the C++ compiler")
    remedy = "brew install libomp" if sys.platform == "darwin" else "install the compiler's OpenMP library"
    if not threads:
        return Finding("OpenMP", False, "CPU kernels run on one thread", remedy)
    return Finding("OpenMP", True, f"{threads}, {os.cpu_count()} cores")


def check_headers() -> Finding:
    folder = Path(sysconfig.get_path("include"))
    ok = (folder / "Python.h").exists()
    detail = str(folder) if ok else f"no Python.h in {folder}: compiled launchers fall back to ctypes"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Finding("Python headers", ok, detail, f"apt-get install python{version}-dev, or your system's package")


def check_simd() -> Finding:
    import torch

    level = torch.backends.cpu.get_cpu_capability()
    return Finding("CPU", True, f"{platform.machine()}, {level}")


def check_cache() -> Finding:
    try:
        folder = cache.root()
    except ReflibError as error:
        return Finding("Cache", False, str(error), "set REFLIB_CACHE_DIR to a folder of your own")
    free = shutil.disk_usage(folder).free / 2**30
    return Finding("Cache", free > 1, f"{folder}, {free:.0f} GiB free", "free some disk space")


def check_borrowed_handles() -> Finding:
    """Whether a tensor's C++ handle can be read from the Python object, as the fast call path does."""
    import ctypes

    import torch

    tensor = torch.empty(1)
    ok = ctypes.c_uint64.from_address(id(tensor) + 16).value == tensor._cdata
    detail = "tensors are passed to compiled code without a copy of their handle" if ok else "calls cost more"
    return Finding("Fast calls", ok, detail, "nothing to do: a slower path is used")


def check_notebooks() -> Finding:
    needed = ["papermill", "ipykernel", "matplotlib", "nbformat"]
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        return Finding("Notebooks", False, f"missing {', '.join(lacking)}", "pip install 'reflib[batch]', or make run")
    try:
        dask = f"Dask {importlib.metadata.version('distributed')}"
    except importlib.metadata.PackageNotFoundError:
        dask = "no Dask"
    papermill = f"papermill {importlib.metadata.version('papermill')}"
    return Finding("Notebooks", True, f"{papermill}; {dask} for several machines")


CHECKS: tuple[Callable[[], Finding | Iterator[Finding]], ...] = (
    check_python, check_torch, check_triton, check_gpus, check_simd, check_compiler, check_openmp, check_headers,
    check_cache, check_borrowed_handles, check_notebooks,
)  # fmt: skip


def doctor() -> list[Finding]:
    """The findings of all checks, in the order of the report."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            found = check()
            findings += [found] if isinstance(found, Finding) else list(found)
        except Exception as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            findings.append(Finding(name, False, f"this check failed: {type(error).__name__}: {error}"))
    return findings


def report(findings: list[Finding]) -> str:
    """The findings as text: one line each, followed by the remedy if it is not ok."""
    width = max(len(f.name) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{'ok     ' if f.ok else 'missing'}  {f.name:<{width}}  {f.detail}")
        if not f.ok and f.remedy:
            lines.append(f"{'':7}  {'':<{width}}  -> {f.remedy}")
    return "\n".join(lines)
