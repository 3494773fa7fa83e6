"""What a mask of attention says: its numbers, if no input decides them; else, may it hide all of a row?"""

import math
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .attention_call import ABSORBS, HIDES, Fill, Parts, Refused, Term, named, writes
from .storages import value

LARGEST = 2**26  # elements of a tensor that is computed for a mask: 8,192 queries and keys
MADE = "arange full zeros ones eye tensor scalar_tensor full_like zeros_like ones_like new_full new_zeros new_ones"
COMPUTED = """add sub mul neg div truediv floordiv mod remainder abs eq ne lt le gt ge and or xor not invert where any
amax __and__ __or__ logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor all
cumsum diff tril triu masked_fill minimum maximum min max clamp to _to_copy bool float half bfloat16 long int type"""
MOVED = """getitem index slice select unsqueeze squeeze expand expand_as view reshape flatten permute transpose t cat
stack repeat flip clone contiguous detach lift_fresh_copy"""
KNOWN = frozenset(f"{MADE} {COMPUTED} {MOVED}".split())


def computed(mask: Node) -> torch.Tensor | None:
    """The mask's numbers, if they are the same in every call; without the dimensions along which all are alike."""
    needed, todo = set[Node](), [mask]
    while todo:
        if (node := todo.pop()) in needed:
            continue
        fake = value(node)
        if named(node) not in KNOWN or writes(node) or not isinstance(fake, torch.Tensor) or not _small(fake):
            return None
        needed.add(node)
        todo += node.all_input_nodes
    if any(writes(node) and _of(node, needed) for node in mask.graph.nodes):
        return None
    found: dict[Node, Any] = {}
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        for node in (n for n in mask.graph.nodes if n in needed):
            args, kwargs = tree_map(_here, torch.fx.map_arg((node.args, dict(node.kwargs)), found.__getitem__))
            if node.op == "call_method":
                made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                made = node.target(*args, **kwargs)  # type: ignore[operator]
            found[node] = made
    once = [slice(0, 1) if s == 0 else slice(None) for s in found[mask].stride()]
    return found[mask][tuple(once)]


def _small(fake: torch.Tensor) -> bool:
    return all(isinstance(s, int) for s in fake.shape) and fake.numel() <= LARGEST


def _of(write: Node, needed: set[Node]) -> bool:
    """May what the call writes to share storage with one of these?"""
    written = tree_leaves((write.args[:1], write.kwargs.get("out")))  # (of torch._foreach_*: a list)
    seen, todo = set[Node](), [n for n in written if isinstance(n, Node)]
    while todo:
        if (node := todo.pop()) in needed:
            return True
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes[:1]  # views have one tensor, the first
    return False


def _here(argument: Any) -> Any:
    """A device becomes the CPU, whatever computes the mask when the model runs."""
    if isinstance(argument, str):
        try:
            argument = torch.device(argument)
        except RuntimeError:
            return argument
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


# -- rows that it hides ---------------------------------------------------------------------------------
def hides_rows(parts: Parts) -> str:
    """How all keys of a row may be hidden where gradients are asked for that another way would not have: by a bias that
    is a "number" (eager has gradients of scores that change no result, ``attention_call.Hidden``), or "filled" with
    -inf (eager has none behind a fill, ``attention_call.Filled``). "": in neither way.

    A bias may if it is made of an input that is not trained, or with a number that no score changes; both are looked
    for through views and calls by element, no further. Raises Refused where two masks hide: of one row keys may then be
    hidden by their sum, -inf, and others by a number."""
    # (Dynamo's values: what is exported has no gradients)
    given = [o.node.meta.get("example_value") for o in (parts.q, parts.k)]
    if not torch.is_grad_enabled() or not any(getattr(x, "requires_grad", False) for x in given):
        return ""
    lowest, seen = HIDES.get(parts.dtype, ABSORBS), dict[Node, tuple[int, bool]]()
    found = [_hiding(t.node, lowest, seen) for t in parts.steps if isinstance(t, Term)]
    if not any(may for _, may in found):
        return "filled" if _filled(parts) and not any(masks for masks, _ in found) else ""
    if sum(masks for masks, _ in found) + any(isinstance(t, Fill) for t in parts.steps) > 1:
        raise Refused("two masks hide keys: gradients of a row that both hide would not be eager's")
    return "number"


def _filled(parts: Parts) -> bool:
    """May all of a row be filled with -inf?"""
    fills = [t for t in parts.steps if isinstance(t, Fill) and t.value == -math.inf]
    if len(fills) != 1 or (known := computed(fills[0].node)) is None or not known.dim():
        return bool(fills)
    return bool((known != fills[0].inverted).all(-1).any())


def _hiding(node: Any, lowest: float, seen: dict[Node, tuple[int, bool]]) -> tuple[int, bool]:
    """(How many masks that hide are added up in ``node``, may it hide a row by a number?)"""
    if not isinstance(node, Node):
        low = isinstance(node, (int, float)) and abs(node) >= -lowest
        return int(low), low and math.isfinite(node)
    if isinstance(fake := value(node), torch.SymFloat):  # another number in the next call
        return int(abs(fake.node.hint or 0.0) >= -lowest), True
    if node not in seen:
        found = list[tuple[int, bool]]()
        if (known := computed(node)) is not None:
            low = known <= lowest
            rows = low.all(-1) & known.isfinite().any(-1) if known.dim() else low
            found = [(int(low.any()), bool(rows.any()))]
        elif isinstance(fake, torch.Tensor) and fake.is_floating_point():
            written = writes(node) or any(writes(n) and _of(n, {node}) for n in node.graph.nodes)
            found = [(0, written or node.op == "placeholder" and not fake.requires_grad)]
            if named(node) in KNOWN:
                found += [_hiding(a, lowest, seen) for a in tree_leaves((node.args, node.kwargs))]
        masks = [n for n, _ in found]
        added = named(node) in ("add", "iadd", "sub", "isub")
        seen[node] = sum(masks) if added else max(masks, default=0), any(may for _, may in found)
    return seen[node]
