"""``explain(target=...)``: code for a device that is not here, without computing anything."""

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib import OptionError

HUGE = 200_000  # a product of such matrices would take minutes and 160 GB


def huge() -> torch.Tensor:
    return torch.empty_strided((HUGE, HUGE), (0, 1), dtype=torch.float16)


def test_nothing_is_computed():
    e = reflib.explain(lambda x: (x @ x).relu(), huge(), target="sm_90")
    assert [k.language for k in e.kernels] == ["triton"] or "mm" in e.wrapper
    e = reflib.explain(lambda x: (x @ x).sin().sum(), huge(), target="cpu")
    assert [k.language for k in e.kernels] == ["cpp"] * len(e.kernels)


def test_calls_are_the_gpu_s():
    q = torch.randn(2, 4, 64, 32, dtype=torch.float16)
    e = reflib.explain(lambda q: F.scaled_dot_product_attention(q, q, q), q, target="sm_90")
    assert "for_cpu" not in e.wrapper and "attention" in e.wrapper
    assert "for_cpu" in reflib.explain(lambda q: F.scaled_dot_product_attention(q, q, q), q, target="cpu").wrapper

    def only_there(x):
        assert x.is_cuda
        return x.to(device="cuda").sin() + torch.ones(4, device="cuda")

    assert len(reflib.explain(only_there, torch.randn(4), target="sm_80").kernels) == 1


@pytest.mark.parametrize("target", ["sm90x", "h100", ""])
def test_a_bad_target(target):
    with pytest.raises(OptionError, match="target="):
        reflib.explain(torch.relu, torch.ones(3), target=target)


def test_training_dynamic_sizes_and_modules():
    m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    weights = [p.clone() for p in m.parameters()]
    e = reflib.explain(m, torch.randn(4, 8), target="sm_90")
    assert e.backward is not None and all(k.language == "triton" for g in e.graphs for k in g.kernels.values())
    assert all(torch.equal(p, w) and p.grad is None and p.requires_grad for p, w in zip(m.parameters(), weights))
    x = torch.randn(4, 8, requires_grad=True)
    assert reflib.explain(lambda x: x.sin() * 2, x, target="sm_90", dynamic=True).backward is not None
    with torch.no_grad():
        assert reflib.explain(m, torch.randn(4, 8), target="sm_90").backward is None


def test_a_model_without_memory():
    """On meta, as one makes a model that is too large for this machine."""
    with torch.device("meta"):
        m, x = torch.nn.Sequential(torch.nn.Linear(8, 10**9), torch.nn.GELU()), torch.randn(4, 8)
    for target, language in (("sm_90", "triton"), ("cpu", "cpp")):
        e = reflib.explain(m, x, target=target)
        assert [k.language for k in e.kernels] == [language]


def test_indices_into_one_number_everywhere():
    """They are computed, checked if need be, and in no address."""

    def fn(y, i):
        ones = torch.ones(4, 8)
        return ones[torch.arange(4)[:, None], torch.arange(8) // 2] * y, ones[i * 2]

    e = reflib.explain(fn, torch.randn(4, 8), torch.ones(3, dtype=torch.long), target="sm_90")
    assert e.kernels and all("tl.store" in k.source for k in e.kernels)


def test_what_needs_numbers_is_called():
    """A branch on data, and a tensor of the function's own, on this machine's CPU."""
    own, seen = torch.randn(4), []

    def fn(x):
        if x.sum() > 0:
            x = x * 2
        seen.append(x)
        return x.sin() + own

    e = reflib.explain(fn, torch.ones(4), target="sm_90")
    assert all(k.language == "triton" for g in e.graphs for k in g.kernels.values())
    assert not torch._subclasses.fake_tensor.is_fake(seen[-1])

    def there_too(x):
        assert x.is_cuda, "on a GPU alone"
        return fn(x)

    with pytest.raises(AssertionError, match="on a GPU alone") as e:
        reflib.explain(there_too, torch.ones(4), target="sm_90")
    cpu, gpu = e.value.__notes__
    assert "numbers, on their devices: AssertionError" in cpu and "as if on a GPU: " in gpu and "Assertion" not in gpu
