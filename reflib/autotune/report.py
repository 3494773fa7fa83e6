"""What a compiled kernel needs, from the compiler's own report, and which candidates need not be measured.

The binary says how many registers a thread has, how large its stack is and how much shared memory a thread block takes.
From these follow the occupancy (how many thread blocks a multiprocessor holds at once) and what limits it. ``report``
reads the binary's bytes: 0.1 ms, where NVIDIA's ``cuobjdump`` takes 20 to 100.

* ``prune``: a compiled candidate that cannot win is skipped: it cannot be launched, or it spills much (what registers
  cannot hold is kept on the stack, in memory) where most of its siblings spill nothing.
* ``epilogue_verdict``: an epilogue costs registers. If the kernel with it spills no more than without, at the same
  occupancy, it only saves bytes and is fused unmeasured. Else both ways are candidates (``matmul.apart``).

Pure functions: no process, no file.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..target import Target
from .roofline import REGISTERS

SPILLS = 64  # bytes of a thread's stack; less is an array (of a sine's reduction), or a few registers
HEAVY = 256  # bytes: 64 registers that are stored and read again, in every step if the sums are among them
REGISTER_UNIT = 256  # registers are handed out in such pieces, to warps
SHARED_UNIT = 128  # bytes
QUARTERS = 4  # of a multiprocessor, each with its own registers; a warp is in one of them
MOST_REGISTERS = 255  # of a thread


@dataclass(frozen=True)
class Report:
    """One kernel on one architecture. None: not known.

    registers: per thread.   stack: bytes per thread, in memory: what was spilled, and arrays.
    shared: bytes per thread block, static and dynamic.   threads: per thread block.
    blocks: thread blocks that a multiprocessor holds at once; 0: not even one.
    limit: what keeps it from holding more: ``registers``, ``shared memory``, ``threads``, ``blocks``, or several.
    """

    name: str
    arch: str
    registers: int | None
    stack: int | None
    shared: int
    threads: int
    blocks: int | None = None
    limit: str = ""

    @property
    def spills(self) -> bool:
        return self.stack is not None and self.stack >= SPILLS


def report(binary: Any, target: Target) -> Report:
    """``binary``: a ``generate.compile_triton.Binary``. Of one for AMD only the shared memory is known."""
    used = _cubin(binary.image, binary.entry) or {}
    shared = binary.shared + used.get("shared", 0)
    threads = binary.num_warps * binary.warp
    made = Report(binary.name, target.arch, used.get("registers"), used.get("stack"), shared, threads)
    blocks, limit = occupancy(made, target)
    return replace(made, blocks=blocks, limit=limit)


# -- occupancy --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Multiprocessor:
    """What all thread blocks on one share. ``shared``: KB in all; ``kept``: bytes of it that each block adds."""

    threads: int
    blocks: int
    shared: int
    kept: int = 1024


_MULTIPROCESSORS = {  # CUDA programming guide, "Compute Capabilities"
    "sm_75": Multiprocessor(1024, 16, 64, 0),
    "sm_80": Multiprocessor(2048, 32, 164),
    "sm_86": Multiprocessor(1536, 16, 100),
    "sm_89": Multiprocessor(1536, 24, 100),
    "sm_90": Multiprocessor(2048, 32, 228),
    "sm_100": Multiprocessor(2048, 32, 228),
    "sm_103": Multiprocessor(2048, 32, 228),
    "sm_120": Multiprocessor(1536, 24, 100),
}


def occupancy(r: Report, target: Target) -> tuple[int | None, str]:
    """(thread blocks at once on a multiprocessor, what limits them); (None, "") for what is not in the table."""
    sm = _MULTIPROCESSORS.get(target.arch)
    if sm is None or r.registers is None:
        return None, ""
    warps = -(-r.threads // target.warp)
    by_threads = sm.threads // (warps * target.warp)
    shared = -(-(r.shared + sm.kept) // SHARED_UNIT) * SHARED_UNIT
    by_shared = sm.shared * 1024 // max(1, shared) if r.shared <= target.shared else 0
    of_a_warp = max(1, -(-r.registers * target.warp // REGISTER_UNIT)) * REGISTER_UNIT
    by_registers = REGISTERS // QUARTERS // of_a_warp * QUARTERS // warps
    if r.registers > MOST_REGISTERS:
        by_registers = 0
    limits = {"registers": by_registers, "shared memory": by_shared, "threads": by_threads, "blocks": sm.blocks}
    blocks = min(limits.values())
    return blocks, " and ".join(name for name, count in limits.items() if count == blocks)


# -- reading binaries -------------------------------------------------------------------------------
_SIZED = 4  # a record of .nv.info with a value behind its header: (format, attribute, bytes of the value)
_REGISTERS, _STACK = 0x2F, 0x11  # attributes whose value is (a symbol's number, a number)


def _cubin(image: bytes, entry: str) -> dict[str, int] | None:
    """``registers``, ``stack`` and static ``shared`` of a kernel that has its binary to itself, from the ELF sections
    that ptxas writes: .nv.info has records of a symbol's number and a value. None where that is not what it finds."""
    try:
        sections = _sections(image)
        (at, size), _ = sections[".nv.info"], sections[f".text.{entry}"]
        end, found = at + size, dict[int, int]()
        while at + 4 <= end:
            form, attribute, size = struct.unpack_from("<BBH", image, at)
            at += 4
            if form == _SIZED:
                if attribute in (_REGISTERS, _STACK):
                    found[attribute] = max(found.get(attribute, 0), struct.unpack_from("<II", image, at)[1])
                at += size
        shared = sections.get(f".nv.shared.{entry}", (0, 0))[1]
        return {"registers": found[_REGISTERS], "stack": found[_STACK], "shared": shared}
    except (KeyError, ValueError, struct.error):
        return None


def _sections(image: bytes) -> dict[str, tuple[int, int]]:
    """(offset, size) of each section of a 64-bit little-endian ELF file. Raises ValueError for any other."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    texts = [headers[names][4] + h[0] for h in headers]
    return {image[t : image.index(b"\0", t)].decode(): (h[4], h[5]) for t, h in zip(texts, headers)}


# -- pruning ----------------------------------------------------------------------------------------
def prune(reports: Sequence[Report], target: Target, siblings: Sequence[Sequence[Report]] = ()) -> str:
    """Why a compiled candidate need not be measured; "" if it must be. Only what is nearly certain.

    reports: of its kernels. siblings: those of each other compiled candidate of its kind.
    """
    for r in reports:
        if r.shared > target.shared > 0:
            return f"needs {r.shared // 1024} KB of shared memory, the device has {target.shared // 1024}"
        if r.blocks == 0:
            return f"cannot be launched: {r.threads} threads of {r.registers} registers are too much for {r.arch}"
    # Candidates of one kind differ in little but their tiles. Where most do without the stack, tiles that need much of
    # it are too large. (If most need it, the computation does, and nothing is certain. A little of it may be outside of
    # the loop over K, and cost nothing.)
    stack = _stack(reports)
    clean = [of for of in siblings if of and all(r.stack is not None for r in of) and _stack(of) < SPILLS]
    if stack < HEAVY or 2 * len(clean) <= len(siblings):
        return ""
    return f"spills {stack} bytes per thread, which {len(clean)} of its {len(siblings)} siblings do not"


def _stack(reports: Sequence[Report]) -> int:
    return max((r.stack or 0 for r in reports), default=0)


# -- epilogues --------------------------------------------------------------------------------------
def epilogue_verdict(fused: Report, plain: Report, bytes_saved: int) -> tuple[str, str]:
    """Whether to fuse a matmul's epilogue: ("fuse", why) where it is certain, else ("measure", why).

    fused, plain: of one tiling, with the epilogue and without. bytes_saved: that are not written and read again."""
    if bytes_saved <= 0:
        return "measure", "fusing saves no bytes"
    if fused.stack is None or plain.stack is None or fused.blocks is None or plain.blocks is None:
        return "measure", f"the compiler's report for {fused.arch} does not say what the epilogue costs"
    if fused.stack > plain.stack:
        return "measure", f"with its epilogue the kernel spills {fused.stack} bytes per thread, without {plain.stack}"
    if fused.blocks < plain.blocks:
        counts = f"{fused.blocks} instead of {plain.blocks}"
        return "measure", f"with its epilogue {counts} thread blocks run at once on a multiprocessor ({fused.limit})"
    saved = f"{bytes_saved / 1e6:.1f} MB" if bytes_saved >= 1e5 else f"{bytes_saved / 1e3:.1f} KB"
    spilled = "nothing more" if fused.stack else "nothing"
    occupied = f"{fused.blocks} thread blocks per multiprocessor"
    return "fuse", f"the epilogue saves {saved}, spills {spilled} and leaves {occupied}"
