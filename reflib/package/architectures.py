"""Which code runs on which GPU.

Machine code (SASS, in a cubin) runs on the generation that it was made for: sm_80 code on 8.0, 8.6, 8.7 and 8.9, but
never on 9.0. From Hopper on, Triton compiles architecture-specific code (sm_90a, sm_100a), which runs on exactly that
architecture. Other assembly text (PTX) runs on every later architecture, once the driver has compiled it; the driver
must support that version of PTX. (CUDA C++ Programming Guide, 3.1.2 to 3.1.4; PTX ISA, 11.)
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError, PackageError
from ..models import known_archs
from ..target import Target, device_target, parse_target
from .manifest import Manifest, PackagedVariant

ALL = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PTX = "sm_80"  # the program whose PTX is added for later GPUs
PTX_SHARED = 99 * 1024  # of an RTX 3090, 4090 or 5090: the least per thread block on later GPUs
EXACT = 90  # from this compute capability on, machine code is for exactly one
# (version of PTX, the first CUDA driver that supports it: as cuDriverGetVersion returns it, and its branch on Linux)
DRIVERS = (
    (63, 10020, "440"), (65, 11000, "450"), (70, 11000, "450"), (71, 11010, "455"), (72, 11020, "460"),
    (73, 11030, "465"), (74, 11040, "470"), (75, 11050, "495"), (76, 11060, "510"), (77, 11070, "515"),
    (78, 11080, "520"), (80, 12000, "525"), (81, 12010, "530"), (82, 12020, "535"), (83, 12030, "545"),
    (84, 12040, "550"), (85, 12050, "555"), (86, 12070, "565"), (87, 12080, "570"), (88, 12090, "575"),
    (90, 13000, "580"), (91, 13010, "590"),
)  # fmt: skip
# (compute capability, the first CUDA that supports it, and that driver's branch)
FIRST_DRIVERS = (
    (75, 10000, "410"), (80, 11000, "450"), (86, 11010, "455"), (87, 11040, "470"), (89, 11080, "520"),
    (90, 11080, "520"), (100, 12080, "570"), (103, 12090, "575"), (120, 12080, "570"), (121, 12090, "575"),
)  # fmt: skip


@dataclass(frozen=True)
class Driver:
    """``version``: the least of cuDriverGetVersion (12040 for CUDA 12.4); ``branch``: of NVIDIA's releases."""

    version: int
    branch: str

    def __str__(self) -> str:
        return f"{self.branch} (CUDA {self.version // 1000}.{self.version % 1000 // 10})"


@dataclass(frozen=True)
class Wanted:
    """What a package is built for. ``targets``: each once, NVIDIA's GPUs before AMD's before the CPU, older before
    newer, so that the same set makes the same package. ``ptx``: also assembly text for later NVIDIA GPUs. ``here``: the
    CPU's code may use all features of this machine's CPU."""

    targets: tuple[Target, ...]
    ptx: bool
    here: bool


def wanted(archs: Iterable[str] | str, ptx: bool = True) -> Wanted:
    """The targets named by ``archs``, in any order and with repetitions.

    "all": every architecture in ``ALL``; "native": the GPU of this machine, or its CPU where there is none; "cpu".
    Raises OptionError for an unknown architecture, and for none at all.
    """
    if not isinstance(archs, Iterable):
        raise OptionError(f"archs={archs!r:.80}: takes names, such as {_EXAMPLES}")
    names = set(map(_name, [archs] if isinstance(archs, str) else archs))
    found: dict[str, Target] = {}
    for name in names:
        for target in [native()] if name == "native" else map(parse_target, ALL if name == "all" else (name,)):
            found[target.arch] = target
    if not found:
        raise OptionError(f"archs is empty: name architectures, such as {_EXAMPLES}")
    order = (*known_archs(), "cpu")
    ordered = tuple(sorted(found.values(), key=lambda t: order.index(t.arch)))
    # "cpu" means code for any CPU, whatever else is named
    here = "native" in names and "cpu" not in names and not ordered[-1].is_gpu
    return Wanted(ordered, ptx and any(t.kind == "cuda" for t in ordered), here)


_EXAMPLES = "['sm_80', 'sm_90', 'cpu'], 'native' or 'all'"


def _name(name: Any) -> str:
    """One of ``archs``. Raises OptionError for an unknown one."""
    known = "native", "all", "cpu", *known_archs()
    if not isinstance(name, str):
        raise OptionError(f"archs: expected names such as 'sm_90', got {name!r:.80}")
    if name not in known:
        raise OptionError(f"archs: unknown target {name!r:.80}; known: {', '.join(known)}")
    return name


def native() -> Target:
    import torch

    if not torch.cuda.is_available():
        return parse_target("cpu")
    here = device_target("cuda", torch.cuda.current_device())
    return parse_target(here.arch)  # the same code for all of its kind, whatever the clock and memory


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


def choose_arch(archs: Sequence[str], ptx: str | None, device: int) -> str | None:
    """The variant for a GPU: an architecture's name, "ptx", or None where nothing runs. As the driver chooses in a
    fatbin: machine code if there is any, of the nearest architecture."""
    fitting = [a for a in archs if runs_on(a, device)]
    if fitting:
        return max(fitting, key=capability)
    return "ptx" if ptx is not None and capability(ptx) <= device else None


def variant_for(m: Manifest, device: int, shared: int, only_text: bool = False) -> PackagedVariant | None:
    """``choose_arch`` for a package: among the variants whose kernels need no more than ``shared`` bytes of shared
    memory, the GPU's limit per thread block. (8.6 and 8.9 run sm_80's code, and have less of it than 8.0.)

    only_text: ignore machine code, as the driver does where CUDA_FORCE_PTX_JIT is 1.
    """
    fits = [v for v in m.variants if v.shared <= shared]
    cuda = [v.arch for v in fits if v.arch.startswith("sm_") and not only_text]
    found = choose_arch(cuda, next((v.made_for for v in fits if v.arch == "ptx"), None), device)
    return None if found is None else m.variant(found)


def shared_of(device: int) -> int:
    """Bytes of shared memory per thread block, by compute capability; of an unknown one, the least of all."""
    name = f"sm_{device}"
    return parse_target(name).shared if name in known_archs() else PTX_SHARED


def driver_of(device: int) -> Driver | None:
    """The first driver for a GPU; None for an unknown GPU."""
    return next((Driver(cuda, branch) for number, cuda, branch in FIRST_DRIVERS if number == device), None)


def driver_for(ptx: str) -> Driver | None:
    """The least driver for a text of PTX; None if it has no known version."""
    m = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", ptx, re.M)
    if not m:
        return None
    version = int(m.group(1)) * 10 + int(m.group(2))
    known = [(cuda, branch) for isa, cuda, branch in DRIVERS if isa >= version]
    return Driver(*known[0]) if known else None
