"""A description of this machine: device, caches, versions, commit. Nothing is timed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reflib.errors import LabError
from reflib.lab.timing import CPU_CLOCK

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
# glibc's: no mapping of its own for a large piece; free memory at the end of the heap is kept, and more is asked for
MALLOC = {"MMAP_MAX": (-4, 0), "TRIM_THRESHOLD": (-1, 2**31 - 1), "TOP_PAD": (-2, 2**26)}
CORES_ENOUGH, CORES_SECONDS = 0.75, 0.1  # of the threads; how long to look


@dataclass(frozen=True)
class Machine:
    """One device, described."""

    name: str
    arch: str
    memory_bytes: int
    cache_bytes: int
    units: int  # multiprocessors of a GPU, threads PyTorch uses on a CPU

    def __str__(self) -> str:
        kind = "multiprocessors" if self.arch.startswith(("sm_", "gfx")) else "threads"
        return (
            f"{self.name} ({self.arch}, {self.units} {kind}, "
            f"{self.memory_bytes / 2**30:.0f} GiB, "
            f"last-level cache {self.cache_bytes / 2**20:.0f} MiB)"
        )


def pick_device(wanted: str) -> torch.device:
    """`"auto"` selects the GPU if there is one. LabError if another device does not exist."""
    import torch

    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise LabError(f"device is {wanted!r}; it must be auto, cpu or cuda") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise LabError(f"device is {wanted!r}; these notebooks run on cpu and cuda")
    if not torch.cuda.is_available():
        raise LabError(
            'device is "cuda", but PyTorch sees no CUDA device here. Say device="auto" to use '
            "what there is, or install a CUDA build of PyTorch on a machine with a GPU."
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise LabError(f"device is {wanted!r}, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def gpu_slug(name: str) -> str:
    """'h200' for 'NVIDIA H200'; for other names, a string usable in file names."""
    short = re.sub(r"(?i)nvidia|amd|geforce|instinct|tesla", "", name)
    return re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-") or "unknown"


@functools.cache
def describe(device: torch.device) -> Machine:
    """The facts about a device."""
    import torch

    from reflib.autotune.circumstances import device_model

    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        amd = getattr(props, "gcnArchName", "") if torch.version.hip else ""
        arch = amd.split(":")[0] if amd else f"sm_{props.major}{props.minor}"
        cache = int(getattr(props, "L2_cache_size", 0)) or 32 * 2**20
        if amd:  # MI300 does not report its 256 MB cache between L2 and memory
            cache = max(cache, 256 * 2**20)
        return Machine(props.name, arch, props.total_memory, cache, props.multi_processor_count)
    return Machine(device_model(device), platform.machine(), _cpu_memory(), _cpu_cache(), torch.get_num_threads())


def _cpu_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _cpu_cache() -> int:
    """Size of the last-level cache, 32 MiB if unknown."""
    for name in ("SC_LEVEL4_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
        try:
            size = os.sysconf(name)
        except (ValueError, OSError):
            continue
        if size > 0:
            return size
    return 32 * 2**20


def beyond_cache(room: int) -> int:
    """MiB of a tensor that the CPU's last-level cache does not hold, so that memory is the limit: for `auto` of
    `lab.setup`. ``room``: bytes that a notebook may use."""
    return max(16, min(128, 2 * _cpu_cache() // 2**20, room // 2**24))


def busy() -> str:
    """A warning if more programs are ready to run than the CPU has cores, else ""."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return ""
    cores = os.cpu_count() or 1
    if load <= cores:
        return ""
    return f"{load:.1f} programs compete for {cores} cores: times will vary, most of all those of threaded loops"


def use_free_cores() -> str:
    """Gives PyTorch as many threads as get a core of their own here; returns what it changed, in words.

    A loop ends when its last thread does. A thread that shares its core with another program may wait for a time slice,
    many times what the loop takes. Processes that this one starts get the same number.
    """
    import torch

    threads, got = torch.get_num_threads(), cores_got()
    if got > CORES_ENOUGH * threads:
        return ""
    free = max(1, int(got))
    torch.set_num_threads(free)
    os.environ["OMP_NUM_THREADS"] = str(free)
    clock = ", timed by the processor's clock" if free == 1 else ""
    if clock:
        os.environ[CPU_CLOCK] = "processor"
    return f"other programs leave {got:.1f} of {threads} cores; threads that PyTorch uses: {free}{clock}"


def keep_pages() -> None:
    """The C library keeps freed memory for the next tensor, as PyTorch's allocator does on a GPU.

    By default it returns a large tensor's pages to the system, and getting new ones takes longer than writing to them:
    the times would be those of the system. Processes that this one starts do the same. Only glibc has this.
    """
    os.environ.update({f"MALLOC_{name}_": str(value) for name, (_, value) in MALLOC.items()})
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOC.values():
            mallopt(option, value)


def cores_got() -> float:
    """On how many cores PyTorch's threads ran at once: processor time per time, of a threaded loop."""
    import torch

    some = torch.rand(2**20)
    start, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < CORES_SECONDS:
        torch.exp(some, out=torch.empty_like(some))
    return (time.process_time() - used) / (time.perf_counter() - start)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the software that affects measurements."""
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    return found


@functools.cache
def commit() -> str:
    """The commit of this copy of reflib, followed by "+" if files differ; "" if unknown."""
    if named := os.environ.get("REFLIB_COMMIT"):  # for copies without a git history
        return named
    try:
        head = git(ROOT, "rev-parse", "--short=12", "HEAD")
        dirty = git(ROOT, "status", "--porcelain", "--untracked-files=no", "--", "reflib")
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+" if dirty else "")


def git(folder: Path, *words: str) -> str:
    """Output of a git command in `folder`. Raises OSError or SubprocessError."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
