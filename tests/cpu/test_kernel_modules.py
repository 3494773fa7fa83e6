"""A kernel is said to come from its own module, not from every module with the same op at the same line."""

import torch

import reflib


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.inner(x), -1)


def test_each_kernel_has_its_own_module():
    e = reflib.explain(torch.nn.Sequential(Layer(), Layer(), Layer()), torch.randn(4, 8))
    kernels = [r.modules for r in e.ranking() if r.is_kernel]  # of the forward and of the backward
    assert kernels and all(len(m) == 1 for m in kernels), kernels
    assert {f"L['fn'].{i}" for i in range(3)} <= {m for (m,) in kernels}
