"""What the rows of the composition table are written with: the table itself, a function under a wrapper, ops."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import reflib
from reflib.lab import told_times
from reflib.wrap import host
from tests.checking import check
from tests.composition.in_cpp import Exported
from tests.composition.packaged import Packaged
from tests.semantics import Compiled

Tensor = torch.Tensor
Feature = Callable[[str, str], None]
IN_A_FILE = ("package", "exported")  # what torch.export captures, for inference
WRAPPERS = ("python", "cpp", *IN_A_FILE)
OPS = Path(__file__).parents[1] / "tuning_ops.py"
FEATURES: dict[str, Feature] = {}
CUDA_FEATURES: dict[str, Feature] = {}
count = itertools.count()


def feature(fn: Feature) -> Feature:
    FEATURES[fn.__name__] = fn
    return fn


def cuda_feature(fn: Feature) -> Feature:
    CUDA_FEATURES[fn.__name__] = fn
    return fn


def is_in(wrapper: str, text: str | None) -> bool:
    """Is a wrapper's text in the language that was asked for?"""
    in_cpp = wrapper in IN_A_FILE or wrapper == "cpp" and host.extension() is not None
    return text is not None and ("int32_t reflib_call(" in text) == in_cpp


def compiled(fn: Callable[..., Any], wrapper: str, **options: Any) -> Compiled | Packaged:
    if wrapper in IN_A_FILE:
        return (Packaged if wrapper == "package" else Exported)(fn, **options)
    return Compiled(fn, wrapper=wrapper, **options)


def compiled_program(program: torch.export.ExportedProgram, wrapper: str) -> Callable[..., Any]:
    if wrapper in IN_A_FILE:
        return compiled(program, wrapper)  # type: ignore[arg-type]
    return reflib.compile(program, wrapper=wrapper, verify=True)


def texts(c: Compiled | Packaged) -> list[str | None]:
    """Of the wrappers."""
    return [*c.texts] if isinstance(c, Packaged) else [s.wrapper for s in c.stages]


def same(
    fn: Callable[..., Any], wrapper: str, *args: Any, backward: bool = False, **options: Any
) -> Compiled | Packaged:
    """Compile, call twice, compare; every graph's wrapper is of the right kind. ``backward``: but a package is for
    inference."""
    c = compiled(fn, wrapper, **options)
    if wrapper in IN_A_FILE:
        backward, args = False, tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    check(fn, c, *args, backward=backward, times=2)
    assert c.stages and all(is_in(wrapper, text) for text in texts(c))
    return c


def product_op(body: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Any:
    """A custom op that multiplies matrices."""

    @torch.library.custom_op(f"composition::product{next(count)}", mutates_args=())
    def product(a: Tensor, b: Tensor) -> Tensor:
        return body(a, b)

    product.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    return product


def split_k(a: Tensor, b: Tensor, splits: int = 4) -> Tensor:
    m, k = a.shape
    return torch.bmm(a.reshape(m, splits, -1).transpose(0, 1), b.reshape(splits, k // splits, -1)).sum(0)


def preferring(*names: str) -> Any:
    """Measuring is replaced: a candidate with one of these in its name is fastest."""
    return told_times(lambda name, sizes: 1.0 if any(n in name for n in names) else 10.0)
