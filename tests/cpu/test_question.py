"""What is asked about a product in its surroundings: which candidates there are, and which questions are equal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from reflib.autotune.activation import with_activations
from reflib.autotune.question import Question, question_of
from reflib.autotune.subprogram import splice
from reflib.capture import Graph
from reflib.ir.decision import Key
from reflib.ir.program import Choice, Extern, Tiling, kernel_variants
from reflib.lower import decompositions
from reflib.options import Options
from reflib.pipeline import run
from reflib.target import parse_target
from reflib.tuning import generated

H200 = parse_target("sm_90")
BLOCKING = Options(autotune="blocking")
Tensor = torch.Tensor


def half(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def questions(fn: Callable[..., Any], *args: Tensor) -> list[Question]:
    """(Traced, never run.)"""
    gm = make_fx(fn, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    program = with_activations(run(Graph(gm), BLOCKING.but(target="sm_90"), "lower").program)
    return [question_of(program, c, H200, BLOCKING, {}) for c in program.nodes if isinstance(c, Choice)]


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 3584, 8192), (4096, 8192, 7168), (1024, 8192, 7168)])
def test_the_librarys_product_with_one_kernel_behind_it_is_a_candidate(m: int, n: int, k: int) -> None:
    """What is measured has the same inputs and outputs as the kernels that fuse both."""
    (q,) = questions(linear_gelu, half(m, k), half(n, k), half(n))
    first, *others = q.candidates
    assert first == Key("aten") and q.default == first and len(q.region.members) == 1
    assert {c.tiling.kind for c in others if c.tiling} == {"tiled", "persistent"}
    blocks = {(c.tiling.kind, c.tiling.m, c.tiling.n) for c in others if c.tiling and not c.apart}
    assert blocks >= {(kind, *sides) for kind in ("tiled", "persistent") for sides in ((128, 256), (256, 128))}
    fused = next(c for c in others if c.tiling and not c.apart)
    for key, calls, kernels in ((first, 1, 1), (fused, 0, 1), (Key("triton", fused.tiling, True), 0, 2)):
        scheduled, _ = generated(splice(q.region.program, q.choice, q.candidates[key]), Options(), lambda d: H200)
        assert sum(isinstance(n, Extern) for n in scheduled.nodes) == calls
        assert len(list(kernel_variants(scheduled.nodes))) == kernels
        assert scheduled.inputs == q.region.program.inputs and scheduled.outputs == q.region.program.outputs


def test_blocks_on_end_are_tried_where_an_epilogue_follows() -> None:
    def tall(q: Question) -> list[Tiling]:
        return [c.tiling for c in q.candidates if c.tiling and (c.tiling.m, c.tiling.n) == (256, 128)]

    (alone,) = questions(lambda a, b: a @ b, half(4096, 4096), half(4096, 4096))
    (fused,) = questions(lambda a, b: torch.sigmoid(a @ b), half(4096, 4096), half(4096, 4096))
    assert not tall(alone) and [c.kind for c in tall(fused)] == ["persistent", "tiled"]


def test_equal_layers_are_one_question() -> None:
    """With their epilogues, whose axes are numbered through the program."""

    def layers(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return linear_gelu(linear_gelu(x, w, b), v, c)

    one, two = questions(layers, half(512, 512), half(512, 512), half(512), half(512, 512), half(512))
    assert one.text and one.text == two.text and one.region.members != two.region.members


@pytest.mark.parametrize("pair", [(torch.exp, torch.log), (torch.sin, torch.cos)])
def test_other_epilogues_are_other_questions(pair: Any) -> None:
    """(In the graph a tensor is called as the op that made it.)"""
    def about(fn: Callable[[Tensor], Tensor]) -> Question:
        return questions(lambda a, b: fn(a @ b), half(512, 512), half(512, 512))[0]

    one, two = map(about, pair)
    assert one.text != two.text
