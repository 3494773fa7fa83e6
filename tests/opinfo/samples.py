"""PyTorch's own samples, by name: ``op|dtype|mode|number``."""

import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool, "bfloat16": torch.bfloat16}
MODES = ("forward", "backward")
SEED = 20240


@functools.cache
def ops() -> dict[str, Any]:
    """Every OpInfo by its full name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    _leave_seeds_alone()
    return {op.full_name: op for op in op_db}


def _leave_seeds_alone() -> None:
    """Random OpInfos set the seed inside the op, which tracing cannot see; checking.call does it around the op."""

    def plain(op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing") and hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = plain  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Group:
    """All samples of one op, dtype and mode, on one device."""

    op: str
    dtype: str
    mode: str
    device: str = "cpu"
    seed: int = SEED

    @property
    def name(self) -> str:
        return f"{self.op}|{self.dtype}|{self.mode}"


def groups(
    dtypes: Iterable[str], modes: Iterable[str], only: Callable[[str], bool], device: str = "cpu", seed: int = SEED
) -> list[Group]:
    """The groups that exist on ``device``, mode by mode, dtype by dtype."""
    out = []
    for mode in modes:
        for dtype in dtypes:
            t = DTYPES[dtype]
            for name, op in ops().items():
                have = op.supported_dtypes(device) if mode == "forward" else op.supported_backward_dtypes(device)
                if mode == "backward" and not (op.supports_autograd and t.is_floating_point):
                    continue
                if t in have and only(name):
                    out.append(Group(name, dtype, mode, device, seed))
    return out


def samples(group: Group) -> list[Any]:
    """The group's SampleInputs: the same ones each time."""
    random.seed(group.seed)
    numpy.random.seed(group.seed)
    torch.manual_seed(group.seed)
    op, backward = ops()[group.op], group.mode == "backward"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(op.sample_inputs(group.device, DTYPES[group.dtype], requires_grad=backward))


def spread(count: int, limit: int) -> list[int]:
    """``limit`` of ``count`` positions, evenly spread, the first and the last among them; all if limit is 0."""
    if not limit or count <= limit:
        return list(range(count))
    if limit == 1:
        return [0]
    return sorted({round(i * (count - 1) / (limit - 1)) for i in range(limit)})


@dataclass
class Case:
    """One sample as a function of its tensors; everything else is held inside, as Dynamo would."""

    key: str
    fn: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    backward: bool
    device: str = "cpu"
    operands: tuple[Any, ...] = ()  # the op's own arguments
    named: dict[str, Any] = field(default_factory=dict)


def case(group: Group, number: int, sample: Any) -> Case:
    op, backward = ops()[group.op], group.mode == "backward"
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    held = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    process = sample.output_process_fn_grad

    def fn(*given: torch.Tensor) -> Any:
        filled = list(held)
        for i, t in zip(where, given):
            filled[i] = t
        # a float64 reference asks for float64 wherever the sample names a dtype
        if given and any(t.dtype in (torch.float64, torch.complex128) for t in given):
            filled = [_wide_dtype(x) for x in filled]
        args, kwargs = tree_unflatten(filled, spec)
        result = op.op(*args, **kwargs)
        result = process(result) if backward else result
        return tuple(result) if type(result) in (list, torch.Size) else result

    operands = (sample.input, *sample.args)
    return Case(
        f"{group.name}|{number}", fn, tuple(leaves[i] for i in where), backward, group.device, operands, sample.kwargs
    )


def _wide_dtype(x: Any) -> Any:
    return torch.float64 if x in (torch.float32, torch.bfloat16, torch.float16) and isinstance(x, torch.dtype) else x
