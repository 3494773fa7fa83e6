"""What code is generated for: a CPU, or a GPU generation, which need not be in this machine."""

from dataclasses import dataclass
from functools import cache

from .errors import DeviceError, OptionError

# arch: (shared memory a block may use in KB, multiprocessors of the best known chip, generation)
CUDA = {
    "sm_75": (64, 40, "Turing"),
    "sm_80": (163, 108, "Ampere"),
    "sm_86": (99, 84, "Ampere"),
    "sm_89": (99, 128, "Ada"),
    "sm_90": (227, 132, "Hopper"),
    "sm_100": (227, 148, "Blackwell"),
    "sm_103": (227, 148, "Blackwell"),
    "sm_120": (99, 170, "Blackwell"),
}
HIP = {
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
        return int(self.arch.removeprefix("sm_")) if self.kind == "cuda" else 0


def parse_target(name: str) -> Target:
    """``cpu``, ``sm_90``, ``gfx942``. Raises OptionError with the list of known ones."""
    if name == "cpu":
        return Target("cpu")
    if name in CUDA:
        shared, units, _ = CUDA[name]
        return Target("cuda", name, shared * 1024, units)
    if name in HIP:
        shared, units, _ = HIP[name]
        return Target("hip", name, shared * 1024, units, 32 if name.startswith("gfx1") else 64)
    raise OptionError(f"unknown target {name!r:.200}; known: cpu, {', '.join(CUDA)}, {', '.join(HIP)}")


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
