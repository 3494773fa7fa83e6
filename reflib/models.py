"""Models and names of GPUs: which architecture a card has, and what its generation is called."""

import re

from .target import CUDA, HIP

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
    return (*CUDA, *HIP)


def generation(arch: str) -> str:
    """"Hopper" for sm_90; empty where it has no name."""
    return (CUDA | HIP).get(arch, (0, 0, ""))[2]
