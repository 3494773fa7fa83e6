"""Rows of the composition table that have no meaning in a package, or as C++: why, and what is there instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reflib.errors import CaptureError, PackageError
from tests.checking import check
from tests.composition.features import Affine
from tests.composition.in_cpp import Exported
from tests.composition.packaged import Packaged
from tests.composition.table import product_op
from tests.cpp_wrapping import python_op
from tests.semantics import randn

Tensor = torch.Tensor


def without_gradients(device: str) -> None:
    """Weights and arguments that require grad: the results do not."""
    model = Affine().to(device)
    f, x = Packaged(model), randn(5, 6, device=device, grad=True)
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode:
            got = f(x)
        assert not got.requires_grad
        torch.testing.assert_close(got, model(x).detach())
    assert all(not t.requires_grad for t in f.loaded[str(x.device)]._state.values())
    assert torch.is_grad_enabled()


def one_graph(device: str) -> None:
    """What Dynamo would leave to Python: said with the way out."""

    def f(x: Tensor) -> Tensor:
        return x.cos() if x.sum() > 0 else x.sin()

    with pytest.raises(CaptureError, match=r"(?s)capture f at not_in_packages.py:\d+ in f: .*: use torch\.where"):
        Packaged(f)(randn(5, device=device))


NOT_IN_PACKAGES: dict[str, tuple[str, Callable[[str], None]]] = {
    "training": ("a package is for inference", without_gradients),
    "graph_breaks": ("torch.export takes whole graphs; Dynamo alone can leave one to Python", one_graph),
}


def an_op_in_python(device: str) -> None:
    """The error names the op, and what to do."""
    for op in (python_op(lambda x: x * 2), lambda x, product=product_op(): product(x, x)):
        with pytest.raises(PackageError, match=r"needs Python for \w+\.(op|product)\d+\.default.*c_shims"):
            Exported(op)(randn(4, 4, device=device))


def results_of_its_own_memory(device: str) -> None:
    f = lambda x: torch.sort(torch.sort(x.sin(), 0).values.cos(), 0).values  # noqa: E731
    check(f, Exported(f), randn(64, 64, device=device))


NOT_EXPORTED = NOT_IN_PACKAGES | {
    "custom_ops_in_python": ("C++ has no Python", an_op_in_python),
    "no_more_memory_than_eager": ("PyTorch's profiler does not see its memory", results_of_its_own_memory),
}
