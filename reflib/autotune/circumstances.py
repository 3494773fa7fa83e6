"""What a decision depends on beside the program: the device, its driver, torch's switches, versions."""

import contextlib
import functools
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .. import cache
from . import switches


def decision_key(text: str, device: str) -> str:
    """The store's key of a decision on ``device`` (``cuda:0``). text: of the subprogram and its candidates, without
    names. Another device model or driver, other math switches or versions: another key. Equal devices share
    decisions: the device's index does not count."""
    here = torch.device(device)
    text = re.sub(rf'"{here.type}:\d+"', f'"{here.type}"', text)
    runtime = str(torch.version.cuda or torch.version.hip or "")
    math = tuple(sorted(switches.of_math().items()))
    return cache.key("decision", text, device_model(here), device_details(here), math, cache.versions(), runtime)


def facts(
    device: torch.device, op: str, sizes: str, default: str, dtypes: str = "", epilogue: str = ""
) -> dict[str, Any]:
    """What the store keeps beside a decision, for people and portable tables; dated now. default: the name of the
    default candidate. dtypes: of the tensors in ``sizes``. epilogue: what is fused with it, in words that are the same
    in any program."""
    source, torch_version, triton_version, python = cache.versions()
    versions = {"reflib": source, "torch": torch_version.split()[-1], "triton": triton_version.split()[-1]}
    versions["python"] = python
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "device": device_model(device), "op": op, "sizes": sizes, "dtypes": dtypes, "epilogue": epilogue,
        "default": default, "versions": versions, "date": date,
    }  # fmt: skip


def device_model(device: torch.device) -> str:
    """What portable tables call a device: ``NVIDIA H200``, ``AMD EPYC 9654 96-Core Processor``."""
    if device.type == "cpu":
        return _cpu_model()
    return str(torch.cuda.get_device_properties(device).name)


def device_details(device: torch.device) -> tuple[str, ...]:
    """What differs between devices of one name and matters to times."""
    if device.type == "cpu":
        return cache.cpu_features(), f"{torch.get_num_threads()} threads"
    p = torch.cuda.get_device_properties(device)
    arch = getattr(p, "gcnArchName", "") if torch.version.hip else f"sm_{p.major}{p.minor}"
    memory = f"{p.total_memory / 2**30:.0f} GiB"
    return arch, f"{p.multi_processor_count} multiprocessors", memory, _driver()


@functools.cache
def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        m = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if m:
            return m.group(1).strip()
    return platform.processor() or platform.machine()


@functools.cache
def _driver() -> str:
    """The kernel module's version, and the newest CUDA it can run; empty where neither can be found."""
    found = []
    with contextlib.suppress(OSError):
        found.append(Path("/sys/module/nvidia/version").read_text().strip())
    newest = getattr(torch._C, "_cuda_getDriverVersion", None)
    if newest is not None:
        found.append(str(newest()))
    return " ".join(found)
