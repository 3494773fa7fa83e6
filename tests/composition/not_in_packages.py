"""Rows of the composition table that have no meaning in a package, or as C++: why, and what is there instead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.errors import CaptureError, OptionError, PackageError, ReflibError
from tests.checking import check
from tests.composition.features import Affine
from tests.composition.in_cpp import Exported
from tests.composition.packaged import Packaged
from tests.composition.table import product_op
from tests.cpp_wrapping import python_op
from tests.semantics import randn

Tensor = torch.Tensor
NOWHERE = Path("/nowhere.reflib")  # nothing is written


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


def refused_in_the_background(device: str) -> None:
    with pytest.raises(OptionError, match='"background" goes on after a first call; "blocking" measures now'):
        reflib.aot_compile(torch.relu, (randn(3, device=device),), NOWHERE, "native", autotune="background")


def one_graph(device: str) -> None:
    """What Dynamo would leave to Python: said with the way out."""

    def f(x: Tensor) -> Tensor:
        return x.cos() if x.sum() > 0 else x.sin()

    with pytest.raises(CaptureError, match=r"(?s)capture f at not_in_packages.py:\d+ in f: .*: use torch\.where"):
        Packaged(f)(randn(5, device=device))


def not_recorded(device: str) -> None:
    with pytest.raises(OptionError, match="cuda_graphs=True records calls of the process that makes them: record"):
        reflib.aot_compile(torch.relu, (randn(3, device=device),), NOWHERE, "native", cuda_graphs=True)


NOT_IN_PACKAGES: dict[str, tuple[str, Callable[[str], None]]] = {
    "training": ("a package is for inference", without_gradients),
    "tuning_in_the_background": ("it goes on after a first call", refused_in_the_background),
    "recorded_calls": ("a recording is of one process; its calls can be recorded", not_recorded),
    "graph_breaks": ("torch.export takes whole graphs; Dynamo alone can leave one to Python", one_graph),
}


def an_op_in_python(device: str) -> None:
    """The error names the op, and what to do."""
    for op in (python_op(lambda x: x * 2), lambda x, product=product_op(): product(x, x)):
        with pytest.raises(PackageError, match=r"needs Python for \w+\.(op|product)\d+\.default.*c_shims"):
            Exported(op)(randn(4, 4, device=device))


def text_among_the_results(device: str) -> None:
    """Is refused. Numbers are there: of the caller, of sizes, and the same in every call."""
    x = randn(7, 3, device=device)
    with pytest.raises(PackageError, match="one of its results is 't', which is no tensor and no number"):
        Exported(lambda x: (x + 1, "t"))(x)

    def f(x: Tensor, k: int) -> Any:
        n = x.shape[0]
        return n, None, x + k, k, 0.5, n * n - k // 2, min(n, k) % 5, n * k

    c = Exported(f, dynamic=True)
    for n, k in ((7, 4), (9, 50), (2, 2**30)):
        check(f, c, randn(n, 3, device=device), k)


def nan_is_looked_for_in_python(device: str) -> None:
    with pytest.raises(PackageError, match="needs Python for check_nan"):
        Exported(torch.log, check_nan=True)(randn(4, device=device))


def results_of_its_own_memory(device: str) -> None:
    f = lambda x: torch.sort(torch.sort(x.sin(), 0).values.cos(), 0).values  # noqa: E731
    check(f, Exported(f), randn(64, 64, device=device))


def refused_under_capture(device: str) -> None:
    """Before anything is launched: a call afterwards is as before."""
    f = lambda x, w: torch.softmax(x @ w, -1).sum(0)  # noqa: E731
    c, args = Exported(f), (randn(64, 96, device=device), randn(96, 32, device=device))
    check(f, c, *args)
    refused = pytest.raises(ReflibError, match="a call cannot be captured in a CUDA graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        c(*args)
    check(f, c, *args)


NOT_EXPORTED = NOT_IN_PACKAGES | {
    "a_registered_op_without_tuning": ("the op that is called is in Python", an_op_in_python),
    "custom_ops_in_python": ("C++ has no Python", an_op_in_python),
    "input_ranges": ("where no range fits, the op in Python is called", an_op_in_python),
    "outputs_that_are_no_tensors": ("C++ has no value for text", text_among_the_results),
    "check_nan": ("a tool for Python", nan_is_looked_for_in_python),
    "captured_in_a_cuda_graph": ("its memory is the driver's, in the order of a stream", refused_under_capture),
    "split_k_words_under_capture": ("its memory is the driver's, in the order of a stream", refused_under_capture),
    "no_more_memory_than_eager": ("PyTorch's profiler does not see its memory", results_of_its_own_memory),
}
