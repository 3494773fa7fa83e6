"""What code is generated for: a CPU, or a GPU generation, which need not be in this machine."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from functools import cache

from .errors import DeviceError, OptionError

# arch: (shared memory a block may use in KB, multiprocessors of the best known chip, generation)
_CUDA = {
    "sm_75": (64, 40, "Turing"),
    "sm_80": (163, 108, "Ampere"),
    "sm_86": (99, 84, "Ampere"),
    "sm_89": (99, 128, "Ada"),
    "sm_90": (227, 132, "Hopper"),
    "sm_100": (227, 148, "Blackwell"),
    "sm_103": (227, 148, "Blackwell"),
    "sm_120": (99, 170, "Blackwell"),
}
_HIP = {
    "gfx90a": (64, 104, "CDNA2"),
    "gfx942": (64, 304, "CDNA3"),
    "gfx950": (160, 256, "CDNA4"),
    "gfx1100": (64, 48, "RDNA3"),
}


@dataclass(frozen=True)
class Target:
    """``kind``: cpu, cuda or hip. ``shared``: bytes of shared memory per block. ``units``: multiprocessors."""

    kind: str
    arch: str = "cpu"
    shared: int = 0
    units: int = 1
    warp: int = 32

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 for what is not CUDA."""
        return _capability(self.arch)


@functools.cache
def _capability(arch: str) -> int:
    m = re.match(r"sm_(\d+)", arch)
    return int(m.group(1)) if m else 0


def parse_target(name: str) -> Target:
    """``cpu``, ``sm_90``, ``gfx942``. Raises OptionError with the list of known ones."""
    if name == "cpu":
        return Target("cpu")
    if name in _CUDA:
        shared, units, _ = _CUDA[name]
        return Target("cuda", name, shared * 1024, units)
    if name in _HIP:
        shared, units, _ = _HIP[name]
        return Target("hip", name, shared * 1024, units, 32 if name.startswith("gfx1") else 64)
    raise OptionError(f"unknown target {name!r}; known: cpu, {', '.join(_CUDA)}, {', '.join(_HIP)}")


# What devices call themselves, and what they are; the first that fits. (Ada's workstation cards have Turing's names.)
_MODELS = tuple((re.compile(pattern, re.IGNORECASE), arch) for pattern, arch in (
    (r"\bMIG\b", ""),  # a part of a GPU, whose decisions are its own
    (r"\bAda Generation\b|\bGeForce RTX 40\d\d|\b(L4|L20|L40S?)\b", "sm_89"),
    (r"\bBlackwell\b|\bGeForce RTX 50\d\d", "sm_120"),
    (r"\bG?B300\b", "sm_103"),
    (r"\bG?B[12]00\b", "sm_100"),
    (r"\b(G?H[12]00|H[82]00?)\b", "sm_90"),
    (r"\b(A100X?|A800|A30X?)\b", "sm_80"),
    (r"\b(A2|A10[GM]?|A16|A40|A[2-6]\d00|A4500|A5500)\b|\bGeForce RTX 30\d\d", "sm_86"),
    (r"\bT4G?\b|\b(GeForce|Quadro|TITAN) RTX\b|\bGeForce GTX 16\d\d", "sm_75"),
    (r"\bMI3(00[AX]|25X)\b", "gfx942"),
    (r"\bMI35[05]X\b", "gfx950"),
    (r"\bMI2[15]0X?\b", "gfx90a"),
))  # fmt: skip


def arch_of(model: str) -> str:
    """The architecture of a device model ("NVIDIA H200": sm_90); empty where it is not known."""
    return next((arch for pattern, arch in _MODELS if pattern.search(model)), "")


def known_archs() -> tuple[str, ...]:
    """What ``parse_target`` takes, but for the CPU."""
    return (*_CUDA, *_HIP)


def generation(arch: str) -> str:
    """"Hopper" for sm_90; empty where it has no name."""
    return (_CUDA | _HIP).get(arch, (0, 0, ""))[2]


@cache
def device_target(kind: str, index: int = 0) -> Target:
    """The target of a device in this machine."""
    import torch

    if kind == "cpu":
        return Target("cpu")
    if kind == "cuda" and torch.cuda.is_available():
        p = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            arch = p.gcnArchName.split(":")[0]
            return Target("hip", arch, 64 * 1024, p.multi_processor_count, p.warp_size)
        shared = getattr(p, "shared_memory_per_block_optin", 48 * 1024)
        return Target("cuda", f"sm_{p.major}{p.minor}", shared, p.multi_processor_count)
    raise DeviceError(f"no {kind} device in this machine; use target= to generate code for one")
