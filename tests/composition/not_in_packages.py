"""Rows of the composition table that have no meaning in a package: why, and what is there instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reflib
from reflib.errors import CaptureError, OptionError
from tests.composition.features import Affine
from tests.composition.packaged import Packaged
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


NOT_IN_PACKAGES: dict[str, tuple[str, Callable[[str], None]]] = {
    "training": ("a package is for inference", without_gradients),
    "tuning_in_the_background": ("it goes on after a first call", refused_in_the_background),
    "graph_breaks": ("torch.export takes whole graphs; Dynamo alone can leave one to Python", one_graph),
}
