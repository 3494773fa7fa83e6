"""What a matrix product must cost, and what a tiling of it will: the model that ranks candidates before measuring.

**Roofline** (Williams, Waterman and Patterson, CACM 2009): no kernel is faster than its operations at the arithmetic
units' rate, nor than its bytes at the memory's. A product of M x N x K does 2MNK operations on at least
(MK + KN + MN) elements.

**A tiling** misses the roofline for reasons that can be counted:

* a program multiplies whole blocks: sizes are rounded up;
* programs are dealt out to multiprocessors: the fullest one decides (wave quantization);
* an operand is read again by every tile of its row or column: from L2, whose bandwidth is a few times the memory's;
* a multiprocessor receives bytes_in_flight / latency and no more (Little's law): stages x block bytes x programs
  (128 x 11008 x 4096 on an H200, blocks of 128x128x64: 33 us with 4 stages, 28 us with 6);
* the first block of a program is waited for, and its tile stored, while nothing multiplies (but for ``persistent``);
* what computes an operand takes instructions, and warps enough to hide how long each one takes (weights of 8 bits, a
  row of 8192 by 8192 x 7168, where memory needs 14 us: 50 with 4 warps per multiprocessor, 23 with 8 and less stored);
* an epilogue's loads and stores are few at a time: a thread has its part of the tile in registers, and few left;
* split-K stores float32 parts, waits for all of a tile's, and reads them back.

The model is for ranking. Where it matters which of two is faster, they are measured. Its constants were fitted to 850
split-K configurations on an H200 (32 shapes of M = N in 16..64, and 8 larger ones; fp16; a kernel whose parts are
their own flags), none held out: the first of a ranking took 16% more than the best measured, the best of its first
six 4% (geometric means, the 32 shapes). Of 370 tiled and persistent kernels for 14 shapes (M in 16..4096, N in
2048..11008) the best was among the first ten.
"""

import functools
from dataclasses import dataclass
from math import prod

import torch

from ..ir.program import Tiling
from ..target import Target

HALVES = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (*HALVES, *FP8)  # what tensor cores multiply at full rate: halves, and 8 bits at twice that
REGISTERS = 65536  # 32-bit, of a multiprocessor
THREADS = 1536  # that a multiprocessor surely holds
LATENCY = 0.8e-6  # s, from memory; what a program waits for its first block
BUSY = 1.5e-6  # s, the same while all multiprocessors read all the time, as they do for larger products than split-K's
CLOCK = 1.7e9  # Hz: within a fifth on all of these
SHARED_BYTES_PER_CLOCK = 128
LANES = 128  # of a multiprocessor: instructions of one thread that it starts per clock
L2_BYTES_PER_CLOCK = 64  # into one multiprocessor
STEP = 100e-9  # s: a step of the loop over depth, whatever is in it: its products wait for each other
START = 3.5e-9  # s: from the start of one program to that of the next, until all multiprocessors are full
HAND_IN = 0.6e-6  # s: from storing a part to having seen all
WAIT = 2.5e-9  # s: for each of a tile's parts
PART = 0.27e-9  # s: an element of a part, stored, read back and added
# Of an operand that is computed, instructions of one thread per element, their waits included (4 to 6 were counted in
# kernels for sm_90). Fitted to 252 kernels with weights of 8 bits, 12 products of 1 and 16 rows on an H200, none held
# out: of those that fit, the first of a ranking took 9% more than the best, the best of its first four 1%.
WORK = 7
RAGGED = 6  # more where a program's depth is no multiple of its blocks', and what is behind it is made zero
THROUGH = 16  # in all where it is stored to shared memory two bytes at a time, for mma.sync
ACROSS = 16  # columns of that operand for each warp, with which it goes from registers to mma.sync
WARPS = 8  # of a multiprocessor; 16 were no faster
EPILOGUE = 64  # bytes of an epilogue that a thread has in flight: four accesses (seen in kernels of 16 and 32 blocks)


@dataclass(frozen=True)
class Rates:
    """Of a whole chip of ``units`` multiprocessors, dense: TFLOP/s of half products with float32 sums, of tf32, of
    float32; GB/s of memory and of L2."""

    half: float
    tf32: float
    float32: float
    memory: float
    l2: float
    units: int


# The makers' data sheets; L2 as measured by others' microbenchmarks, roughly.
_RATES = {
    "sm_75": Rates(65, 8.1, 8.1, 320, 1300, 40),  # T4
    "sm_80": Rates(312, 156, 19.5, 2039, 5000, 108),  # A100 80 GB
    "sm_86": Rates(155, 77, 38.7, 768, 2500, 84),  # A6000
    "sm_89": Rates(165, 83, 82.6, 1008, 5000, 128),  # RTX 4090
    "sm_90": Rates(989, 495, 67, 4800, 9000, 132),  # H200
    "sm_100": Rates(2250, 1125, 80, 8000, 14000, 148),  # B200
    "sm_103": Rates(2500, 1250, 80, 8000, 14000, 148),  # B300
    "sm_120": Rates(210, 105, 105, 1792, 8000, 170),  # RTX 5090
    "gfx90a": Rates(191, 48, 48, 1638, 4000, 104),  # half an MI250X
    "gfx942": Rates(1307, 653, 163, 5300, 10000, 304),  # MI300X
    "gfx950": Rates(2500, 157, 157, 8000, 12000, 256),  # MI355X
    "gfx1100": Rates(123, 61, 61, 960, 3500, 48),  # RX 7900 XTX
}


@functools.cache
def rates(target: Target) -> Rates:
    """Of the target, or of the nearest older one known; operations scaled to its number of multiprocessors."""
    known = _RATES.get(target.arch)
    if known is None and target.kind == "hip":
        known = _RATES["gfx90a"]
    if known is None:
        older = [a for a in _RATES if a.startswith("sm_") and int(a[3:]) <= max(75, target.capability)]
        known = _RATES[max(older, key=lambda a: int(a[3:]))]
    by = target.units / known.units
    return Rates(known.half * by, known.tf32 * by, known.float32 * by, known.memory, known.l2, target.units)


def tensor_cores(target: Target) -> bool:
    """Can Triton's ``tl.dot`` use them there? (On sm_75 it compiles to ordinary arithmetic.)"""
    return target.kind == "hip" or target.capability >= 80


def flops_per_second(dtype: torch.dtype, target: Target, tf32: bool = False) -> float:
    r = rates(target)
    return 1e12 * (2 * r.half if dtype in FP8 else r.half if dtype in HALVES else r.tf32 if tf32 else r.float32)


@dataclass(frozen=True)
class Problem:
    """A product as the model sees it. ``a_bytes``, ``b_bytes``: of an element as it lies in memory. ``moved``: bytes
    per element of the result that its epilogue loads and stores, beside the result. ``computed``: which of a and b are,
    as they are read. ``twice``: are sums of some products kept apart, in registers of their own (8-bit floats)?"""

    sizes: tuple[int, int, int, int]
    dtype: torch.dtype
    tf32: bool
    a_bytes: float
    b_bytes: float
    moved: int = 0
    computed: str = ""
    twice: bool = False

    def tiles(self, t: Tiling) -> int:
        b, m, n, _ = self.sizes
        return b * _ceil(m, t.m) * _ceil(n, t.n)

    def steps(self, t: Tiling) -> int:
        """Blocks of depth that one program walks over."""
        return max(1, _ceil(self.sizes[3], t.k * t.splits))

    def step_bytes(self, t: Tiling) -> int:
        """Of shared memory. What lies outside of the matrices is not read: ``step_traffic``."""
        return int(t.k * (t.m * self.a_bytes + t.n * self.b_bytes))

    def made(self, t: Tiling) -> int:
        """Elements that a step computes."""
        return t.k * (t.m * ("a" in self.computed) + t.n * ("b" in self.computed))

    def made_bytes(self, t: Tiling) -> int:
        """Of shared memory, for a block of what is computed."""
        return self.made(t) * self.dtype.itemsize

    def denser(self) -> int:
        """How many times as many elements of a row of what an operand is computed from are as long as the product's."""
        each = [b for name, b in (("a", self.a_bytes), ("b", self.b_bytes)) if name in self.computed]
        times = self.dtype.itemsize / max(min(each, default=self.dtype.itemsize), 0.5)
        return 4 if times > 3 else 2 if times > 1.5 else 1

    def step_traffic(self, t: Tiling) -> float:
        _, m, n, _ = self.sizes
        return t.k * (m / _ceil(m, t.m) * self.a_bytes + n / _ceil(n, t.n) * self.b_bytes)


def grouped(p: Problem, t: Tiling, target: Target) -> bool:
    """Does Triton multiply such a block from shared memory, four warps together (wgmma, tcgen05)?"""
    if target.kind != "cuda" or target.capability not in (90, 100, 103):
        return False
    rows = t.n if t.turned else t.m
    return (p.dtype in NARROW or p.tf32) and rows >= 64 and t.num_warps >= 4 and t.warps_k == 1


def shared_bytes(p: Problem, t: Tiling, target: Target) -> int:
    """Shared memory of a program, as Triton 3.7 is seen to take it: a copy of both blocks for each stage, but for the
    one that goes to registers where warps multiply from there; a persistent kernel stores one tile while the next is
    on its way; a part of split-K is turned around before it is stored. Before sm_80 there is one copy."""
    stages = t.num_stages if grouped(p, t, target) else t.num_stages - 1
    if target.kind == "cuda" and target.capability < 80:
        stages = 1
    blocks = max(1, stages) * p.step_bytes(t) + p.made_bytes(t)
    if t.kind == "persistent":
        blocks += min(2 * t.m * t.n, 32768)
    return max(blocks, t.m * t.n * 4 if t.kind == "split" else 0, 16384) + 64


def accumulators(t: Tiling) -> int:
    """Registers of a thread (of 32 a warp) that hold the sums."""
    return max(1, t.m * t.n * t.warps_k // (32 * t.num_warps))


def resident(p: Problem, t: Tiling, target: Target) -> int:
    """Programs of this tiling that one multiprocessor holds at once."""
    threads = t.num_warps * target.warp
    registers = threads * min(255, 48 + accumulators(t) * 32 // target.warp + p.made(t) // (2 * threads))
    return max(1, min(target.shared // shared_bytes(p, t, target), REGISTERS // registers, THREADS // threads))


def efficiency(p: Problem, t: Tiling, target: Target) -> float:
    """The share of the arithmetic rate that a block of this shape can reach.

    Tensor cores eat from shared memory: a block (Hopper's wgmma, from 64 rows on) or a warp's part of it (mma.sync)
    of m x n does mn / (m + n) multiplications for each element read, and 128 bytes come a clock. mma.sync reaches
    about 0.6 of Hopper's rate at best (Luo et al., 2024, measured 62%)."""
    if target.kind == "cuda" and (p.dtype not in NARROW and not p.tf32 or not tensor_cores(target)):
        return 0.6 if t.m * t.n >= 64 * 64 else 0.35
    groups = grouped(p, t, target)
    m, n = (t.m, t.n) if groups else _warp_tile(t)
    per_byte = 2 * m * n / ((m + n) * p.dtype.itemsize)
    fed = per_byte * SHARED_BYTES_PER_CLOCK * CLOCK * target.units
    top = 0.8 if groups or target.kind == "hip" or target.capability not in (90, 100, 103) else 0.5
    return top * min(1.0, fed / flops_per_second(p.dtype, target, p.tf32))


def _warp_tile(t: Tiling) -> tuple[int, int]:
    """A warp's part of a block, as square as can be, 16 x 8 at least."""
    m, n, warps = t.m, t.n, max(1, t.num_warps // t.warps_k)
    while warps > 1 and (m > 16 or n > 8):
        m, n = (m // 2, n) if m >= n and m > 16 or n <= 8 else (m, n // 2)
        warps //= 2
    return m, n


def moving(p: Problem, each: float, target: Target) -> float:
    """Seconds in which memory moves the operands once, and ``each`` bytes per element of the result."""
    b, m, n, k = p.sizes
    return b * (m * k * p.a_bytes + k * n * p.b_bytes + m * n * each) / (1e9 * rates(target).memory)


def multiplying(p: Problem, target: Target) -> float:
    """Seconds at the arithmetic units' full rate."""
    return 2 * prod(p.sizes) / flops_per_second(p.dtype, target, p.tf32)


def work(p: Problem, t: Tiling, target: Target) -> float:
    """Instructions of a step's threads that compute operands. For mma.sync, warps side by side compute the same."""
    mine, other = (t.n, t.m) if "b" in p.computed else (t.m, t.n)
    direct = mine <= ACROSS * t.num_warps
    each = WORK if direct or grouped(p, t, target) and not t.turned else THROUGH
    each += RAGGED * (p.sizes[3] % (t.k * t.splits) != 0)
    again = max(1, min(t.num_warps, other // 16)) if direct and not grouped(p, t, target) else 1
    return p.made(t) * each * again * (1.2 if t.turned else 1)


def estimate(p: Problem, t: Tiling, target: Target) -> float:
    """Seconds that the kernel runs (without its launch), by the rules in the module's docstring."""
    r, units = rates(target), target.units
    programs = p.tiles(t) * t.splits
    load = _ceil(programs, units)  # on the fullest multiprocessor
    together = 1 if t.kind == "persistent" else min(load, resident(p, t, target))
    busy, steps, traffic = min(programs, units), p.steps(t), p.step_traffic(t)
    rate = flops_per_second(p.dtype if tensor_cores(target) else torch.float32, target, p.tf32)
    compute = load * steps * 2 * t.m * t.n * t.k / (rate / units * efficiency(p, t, target))
    if p.computed:
        compute = compute if grouped(p, t, target) else 0.0  # (in ``work``)
        compute += load * steps * work(p, t, target) / (LANES * CLOCK * min(1.0, together * t.num_warps / WARPS))
    in_flight = together * max(1, min(t.num_stages - 1, steps)) * traffic
    latency = LATENCY if t.kind == "split" else BUSY
    into = min(in_flight / latency, L2_BYTES_PER_CLOCK * CLOCK, 1e9 * r.l2 / busy)
    body = max(compute, load * steps * traffic / into, moving(p, p.dtype.itemsize + p.moved, target))
    total = min(programs, together * units) * START + body + load / together * steps * STEP
    total += LATENCY * (3 if t.kind == "persistent" else _ceil(load, together))  # 3: descriptors are made first
    if p.moved:
        few = together * t.num_warps * target.warp * EPILOGUE / BUSY
        total += load * t.m * t.n * p.moved / min(few, L2_BYTES_PER_CLOCK * CLOCK, 1e9 * r.l2 / busy)
    if t.splits > 1:
        total += HAND_IN + t.splits * WAIT + t.m * t.n * PART
    return total


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
