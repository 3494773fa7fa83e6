"""Lists of a mask's blocks to measure fused attention with, and ends of groups for grouped products: zeros, as other
integers are, would be empty masks and groups.

As many blocks as a causal mask leaves: one that it cuts, half of the others.
"""

from collections.abc import Callable, Mapping

import torch

from reflib.ir.program import View


def which(like: torch.Tensor) -> torch.Tensor:
    """Each row's blocks in order."""
    return torch.arange(like.shape[-1], dtype=like.dtype, device=like.device).expand(like.shape).contiguous()


def one(like: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(like)


def half(like: torch.Tensor) -> torch.Tensor:
    """Of as many blocks as there are rows."""
    return torch.full_like(like, max(1, like.shape[-1] // 2))


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flex blocks: which": which, "flex blocks: one": one, "flex blocks: half": half,
}  # fmt: skip


def ends_of_groups(total: int) -> str:
    """The key of what makes the ends of groups of about one size, of ``total`` in all."""

    def ends(like: torch.Tensor) -> torch.Tensor:
        n = like.shape[0]
        return torch.tensor([(i + 1) * total // n for i in range(n)], dtype=like.dtype, device=like.device)

    key = f"ends of groups: {total}"
    MAKERS.setdefault(key, ends)
    return key


def inputs_from(lists: Mapping[str, View]) -> tuple[tuple[str, str], ...]:
    """(buffer, key in MAKERS) of the lists among an Extern's arguments (``ir.flex``)."""
    out: dict[str, str] = {}
    for num, idx, most in (("num", "idx", "full_num" not in lists), ("full_num", "full_idx", True)):
        if num in lists:
            rows, columns = (e.hint() for e in lists[idx].shape[2:])
            out[lists[num].buffer] = "flex blocks: half" if most and columns >= rows // 2 else "flex blocks: one"
            out[lists[idx].buffer] = "flex blocks: which"
    return tuple(out.items())
