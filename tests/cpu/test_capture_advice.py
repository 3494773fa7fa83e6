"""What is advised where torch.export refuses: about the arguments, about dynamic_shapes, or about the model."""

import re
from typing import Any

import pytest
import torch
from torch._higher_order_ops import while_loop
from torch.export import Dim
from torch.nn.attention.flex_attention import flex_attention

from reflib.capture.export import export_for
from reflib.errors import CaptureError
from reflib.lower import decompositions
from reflib.lower.lower import origin


class Add(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x + y


X, Y = torch.ones(8, 3), torch.ones(8, 3)
N = Dim("n")


def said(args: tuple[Any, ...], shapes: Any = None, kwargs: Any = None, model: Any = None) -> str:
    with pytest.raises(CaptureError) as e:
        export_for(model or Add(), args, kwargs, shapes, decompositions=decompositions())
    assert e.value.__cause__ is not None
    return str(e.value)


@pytest.mark.parametrize("args, kwargs", [((X,), None), ((X, X, X), None), ((X, X), {"z": X}), ((X, X), {"y": X})])
def test_other_arguments_than_the_model_takes(args: tuple[Any, ...], kwargs: Any) -> None:
    assert "\nCheck that the model can be called with these arguments" in said(args, None, kwargs)


@pytest.mark.parametrize("args, shapes", [
    ((X, X), 3), ((X, X), "xy"), ((X, X), ({5: N}, None)), ((X, X), ({"n": N}, None)), ((X, X), ({0: N}, {1: N})),
    ((X, 3), (None, {0: N})), ((X, X), ({0: N}, {0: Dim("n", min=20)})), ((X, Y), ({0: N}, {0: Dim("m")})),
    ((X, X), ({0: N},)), ((X, X), {"x": None, "z": None}), ((X, X), ({0: N}, {0: 4.5})),
])  # fmt: skip
def test_dynamic_shapes_that_are_none(args: tuple[Any, ...], shapes: Any) -> None:
    text = said(args, shapes)
    assert "\nChange dynamic_shapes" in text or "that dynamic_shapes has their structure" in text


def breaks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if isinstance(x, torch._subclasses.FakeTensor):
        raise TypeError("f() got an unexpected keyword argument 'z'")
    return x


def test_what_the_model_raises() -> None:
    """There another way of capture may help, if the arguments are right."""
    for text in (said((X, torch.ones(7, 3))), said((X, X), ({0: Dim.AUTO}, None), model=breaks)):
        assert "\nCheck that the model can be called with these arguments" in text and "reflib.compile(model)" in text


def helper(y: torch.Tensor) -> torch.Tensor:
    return y.view(7)


def of_cond(true: Any) -> Any:
    return lambda x: torch.cond(x.sum() > 0, true, lambda x: x + 1, (x,))


def attended(x: torch.Tensor) -> torch.Tensor:
    """Its block mask is made with torch.vmap."""
    x = x.expand(1, 1, 8, 3)
    return flex_attention(x, x, x).view(8, 3)


@pytest.mark.parametrize("model, says", [
    (lambda x: helper(x * 2), r" at test_capture_advice.py:\d+ in helper: .*'\[7\]' is invalid"),
    (of_cond(lambda x: x.sum()), r" at test_capture_advice.py:\d+ in <lambda>: .*\nThe branches of torch.cond return"),
    (of_cond(lambda x: (x * 2).t()), r"\nThe branches of torch.cond .* laid out in the same order"),
    (of_cond(lambda x: None), r"\nThe branches of torch.cond return the same structure of tensors and ints"),
    (of_cond(attended), r"\nIn branches and bodies .*give flex_attention there a block_mask"),
    (of_cond(lambda x: x), r"test_capture_advice.py\", line \d+, in <lambda>\nBranches .* return new tensors: clone"),
    (of_cond(lambda x: x.add_(1)), r"\nBranches and bodies .* write to no tensor from outside"),
])  # fmt: skip
def test_the_users_line_and_the_branch(model: Any, says: str) -> None:
    assert re.search(says, said((X,), model=model), re.DOTALL)


def test_lines_of_functions_that_are_called() -> None:
    """torch.export keeps lines of functions named ``forward`` alone; of a function, that was ours."""
    e = export_for(lambda x: torch.relu(tanh(x)), (X,), decompositions=decompositions())
    lines = [origin(n).source for n in e.graph.nodes if n.op == "call_function"]
    functions = [re.match(r"test_capture_advice\.py:\d+ in (\S+):", line)[1] for line in lines]  # type: ignore[index]
    assert functions == ["tanh", "<lambda>"]


def tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def test_branches_and_bodies() -> None:
    """The user's line, and what they may return."""

    def same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x, lambda x: x + 1, (x,))

    def longer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.cat([x, x])), (first, x))[1]

    for f, advice in ((same, "return new tensors: clone()"), (longer, "body of while_loop returns what it carries")):
        text = said((X, Y), model=f)
        assert re.search(rf"cannot capture {f.__name__} at test_capture_advice.py:\d+ in {f.__name__}", text), text
        assert advice in text
