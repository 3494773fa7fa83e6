"""Rows of the composition table that are not applicable to a package, or to C++: why, and what is there instead."""

from collections.abc import Callable

import pytest
import torch

from reflib.errors import CaptureError, PackageError
from tests.composition.in_cpp import Exported
from tests.composition.packaged import Packaged
from tests.composition.table import product_op
from tests.cpp_wrapping import python_op
from tests.semantics import randn

Tensor = torch.Tensor


def one_graph(device: str) -> None:
    """What Dynamo would leave to Python: said with the way out."""

    def f(x: Tensor) -> Tensor:
        return x.cos() if x.sum() > 0 else x.sin()

    with pytest.raises(CaptureError, match=r"(?s)capture f at not_in_packages.py:\d+ in f: .*: use torch\.where"):
        Packaged(f)(randn(5, device=device))


NOT_IN_PACKAGES: dict[str, tuple[str, Callable[[str], None]]] = {
    "graph_breaks": ("between two graphs is Python, which a file has not: torch.export takes whole graphs", one_graph),
}


def an_op_in_python(device: str) -> None:
    """The error names the op, and what to do."""
    for op in (python_op(lambda x: x * 2), lambda x, product=product_op(): product(x, x)):
        with pytest.raises(PackageError, match=r"needs Python for \w+\.(op|product)\d+\.default.*c_shims"):
            Exported(op)(randn(4, 4, device=device))


NOT_EXPORTED = NOT_IN_PACKAGES | {
    "custom_ops_in_python": ("C++ has no Python; an op with a function in C is called", an_op_in_python),
}
