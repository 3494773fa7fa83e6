"""``kernel_options`` of a call of ``flex_attention``: which of PyTorch's keys mean something here.

    BLOCK_M, BLOCK_N              queries (decoding: rows, 32 at most) and keys per block of the forward kernels
    BLOCK_M1, BLOCK_N1            of the kernel of keys' and values' gradients
    BLOCK_M2, BLOCK_N2            of the kernel of queries' gradients
    num_warps, num_stages         of all three
    BACKEND                       AUTO; TRITON: not the kernel for few queries; TRITON_DECODE: that one, or an error
    FORCE_USE_FLEX_ATTENTION      as BACKEND="TRITON"
    SPLIT_KV                      among how many programs the kernel for few queries divides a row's keys

``fwd_`` or ``bwd_`` in front of a key limits it to forward or backward, and prevails there. Other documented keys are
hints (HINTS): accepted, without effect. A key that is none of these is named in a warning, once (PyTorch says nothing:
a misspelt one is lost). The op's dense formula, which runs where there is no fused kernel, has nothing to set.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from reflib.errors import OptionError, did_you_mean

from .lower import FRAME

TILING = {
    "forward": {"BLOCK_M": "m", "BLOCK_N": "n"},
    "decode": {"BLOCK_M": "m", "BLOCK_N": "n"},
    "dkv": {"BLOCK_M1": "m", "BLOCK_N1": "n"},
    "dq": {"BLOCK_M2": "m", "BLOCK_N2": "n"},
}
LAUNCH = {"num_warps": "num_warps", "num_stages": "num_stages"}
WHICH = ("BACKEND", "FORCE_USE_FLEX_ATTENTION", "SPLIT_KV")
HINTS = (
    *("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "USE_TMA"),
    *("kpack", "matrix_instr_nonkdim", "waves_per_eu", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX"),
)
KNOWN = {*(k for keys in TILING.values() for k in keys), *LAUNCH, *WHICH, *HINTS}
MOST = 128  # splits: what combines them holds one number of each in registers
LIMITS = {"m": (16, 1024), "n": (16, 1024), "num_warps": (1, 32), "num_stages": (1, 16)}


@dataclass(frozen=True)
class KernelOptions:
    """Of one call, for forward or backward; keys without prefixes. ``where``: the call, for messages."""

    values: Mapping[str, Any]
    where: str = ""

    def tiling(self, kind: str, blocks: tuple[int, int]) -> tuple[tuple[str, int], ...]:
        """The fields of a kernel's tiling that are set; ``blocks``: the mask's. Raises OptionError for what it cannot
        have."""
        found = {}
        for key, name in (TILING[kind] | LAUNCH).items():
            if key in self.values:
                found[name] = self._number(key, *LIMITS[name], power=name != "num_stages")
        for (key, name), size in zip(TILING[kind].items(), blocks):
            rows = kind == "decode" and name == "m"  # of several heads: the mask's rows do not matter
            if size and name in found and size % found[name] and not rows:
                side = "queries" if name == "m" else "keys"
                raise self.error(
                    key, f"the block mask has blocks of {size} {side}, which have to be whole blocks of the kernel: "
                    f"give a power of two that divides {size}, or create_block_mask another BLOCK_SIZE",
                )  # fmt: skip
        return tuple(found.items())

    @property
    def splits(self) -> int | None:
        return self._number("SPLIT_KV", 1, MOST, power=False) if "SPLIT_KV" in self.values else None

    @property
    def backend(self) -> str:
        """AUTO, TRITON or TRITON_DECODE. Raises OptionError for another."""
        if self.values.get("FORCE_USE_FLEX_ATTENTION"):
            return "TRITON"
        found = self.values.get("BACKEND", "AUTO")
        if found not in ("AUTO", "TRITON", "TRITON_DECODE"):
            raise self.error("BACKEND", "reflib has its own kernels only; give AUTO, TRITON or TRITON_DECODE")
        return found

    def _number(self, key: str, least: int, most: int, power: bool) -> int:
        value = self.values[key]
        what = f"a power of two from {least} to {most}" if power else f"a number from {least} to {most}"
        if type(value) is not int or not least <= value <= most or (power and value & (value - 1)):
            raise self.error(key, f"it has to be {what}; or leave it out, and reflib chooses")
        return value

    def error(self, key: str, why: str) -> OptionError:
        return OptionError(f"flex_attention{self.where}: kernel_options[{key!r}] = {self.values[key]!r}: {why}")


def kernel_options(node: torch.fx.Node, forward: bool) -> KernelOptions:
    """Those of a call. A number that Dynamo made a symbol is what it was: PyTorch compiles again for another."""
    given = next((a for a in node.args if isinstance(a, Mapping)), {})
    own, other = ("fwd_", "bwd_") if forward else ("bwd_", "fwd_")
    plain, special = dict[str, Any](), dict[str, Any]()
    for key, value in given.items():
        value = int(value.meta["val"]) if isinstance(value, torch.fx.Node) else value
        name = key.removeprefix("fwd_").removeprefix("bwd_")
        if name not in KNOWN:
            _warn(key)
        elif key.startswith(own):
            special[name] = value
        elif not key.startswith(other):
            plain[name] = value
    return KernelOptions(plain | special, _where(node))


def _where(node: torch.fx.Node) -> str:
    """The user's line: PyTorch's own function is around the op."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    for path, line, _, code in reversed(frames):
        if "/torch/nn/attention/" not in path.replace("\\", "/"):
            return f" at {path.rpartition('/')[2]}:{line}: {code.strip()}"
    return ""


@cache
def _warn(key: str) -> None:
    near = did_you_mean(key, KNOWN) or did_you_mean(key.upper(), KNOWN) or did_you_mean(key.lower(), KNOWN)
    warnings.warn(
        f"flex_attention: kernel_options[{key!r}] is unknown, and has no effect" + (f"; {near}" if near else "")
    )
