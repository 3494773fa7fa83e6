"""Which code runs on which GPU.

Machine code (SASS, in a cubin) runs on the generation that it was made for: sm_80 code on 8.0, 8.6, 8.7 and 8.9, but
never on 9.0. From Hopper on Triton compiles the architecture-specific variants (sm_90a, sm_100a), which run on exactly
that one. Assembly text (PTX) of an architecture without such a variant runs on every later one, once the driver has
compiled it; the driver must know that version of PTX. (CUDA C++ Programming Guide, 3.1.2 to 3.1.4; PTX ISA, 11.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OptionError, PackageError
from ..target import Target, device_target, parse_target

ALL = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PTX = "sm_80"  # the program whose PTX is added for later GPUs
EXACT = 90  # from this compute capability on machine code is for exactly one
# (version of PTX, the first CUDA driver that takes it: as cuDriverGetVersion says it, and its branch on Linux)
DRIVERS = (
    (63, 10020, "440"), (65, 11000, "450"), (70, 11000, "450"), (71, 11010, "455"), (72, 11020, "460"),
    (73, 11030, "465"), (74, 11040, "470"), (75, 11050, "495"), (76, 11060, "510"), (77, 11070, "515"),
    (78, 11080, "520"), (80, 12000, "525"), (81, 12010, "530"), (82, 12020, "535"), (83, 12030, "545"),
    (84, 12040, "550"), (85, 12050, "555"), (86, 12070, "565"), (87, 12080, "570"), (88, 12090, "575"),
    (90, 13000, "580"), (91, 13010, "590"),
)  # fmt: skip


@dataclass(frozen=True)
class Driver:
    """``version``: the least of cuDriverGetVersion (12040 for CUDA 12.4); ``branch``: of NVIDIA's releases."""

    version: int
    branch: str

    def __str__(self) -> str:
        return f"{self.branch} (CUDA {self.version // 1000}.{self.version % 1000 // 10})"


def targets(archs: Sequence[str] | str, ptx: bool = True) -> tuple[list[Target], bool]:
    """The targets that ``archs`` names, in order, and whether PTX is wanted (with a GPU of NVIDIA's among them).

    "all": every one that this was made for; "native": the GPU of this machine, or its CPU where there is none; "cpu".
    Raises OptionError for what is no architecture, and for none at all.
    """
    names = [archs] if isinstance(archs, str) else list(archs)
    found: dict[str, Target] = {}
    for name in names:
        if not isinstance(name, str):
            raise OptionError(f"archs: expected names such as 'sm_90', got {name!r}")
        for target in [native()] if name == "native" else map(parse_target, ALL if name == "all" else (name,)):
            found.setdefault(target.arch, target)
    if not found:
        raise OptionError("archs is empty: name architectures ('sm_80', 'sm_90', 'cpu'), 'native' or 'all'")
    return list(found.values()), ptx and any(t.kind == "cuda" for t in found.values())


def native() -> Target:
    import torch

    if not torch.cuda.is_available():
        return parse_target("cpu")
    here = device_target("cuda", torch.cuda.current_device())
    return parse_target(here.arch)  # the same code for all of the kind, whatever this one's clock and memory


def capability(arch: str) -> int:
    """90 for sm_90."""
    m = re.fullmatch(r"sm_(\d+)", arch)
    if not m:
        raise PackageError(f"{arch!r} is no CUDA architecture")
    return int(m.group(1))


def runs_on(arch: str, device: int) -> bool:
    """Does machine code of ``arch`` run on a GPU of compute capability ``device`` (89 for 8.9)?"""
    made_for = capability(arch)
    if made_for >= EXACT:
        return made_for == device
    return made_for // 10 == device // 10 and made_for <= device


def choose(archs: Sequence[str], ptx: str | None, device: int) -> str | None:
    """The arm for a GPU: an architecture's name, "ptx", or None where nothing runs. As the driver chooses in a fatbin:
    machine code if there is any, of the nearest architecture."""
    fitting = [a for a in archs if runs_on(a, device)]
    if fitting:
        return max(fitting, key=capability)
    return "ptx" if ptx is not None and capability(ptx) <= device else None


def driver_for(ptx: str) -> Driver | None:
    """The least driver for a text of PTX; None if it says no version that is known."""
    m = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", ptx, re.M)
    if not m:
        return None
    version = int(m.group(1)) * 10 + int(m.group(2))
    known = [(cuda, branch) for isa, cuda, branch in DRIVERS if isa >= version]
    return Driver(*known[0]) if known else None
