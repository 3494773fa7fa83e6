"""Registrations of implementations: what fits, and what each that does not is told."""

from typing import Any

import pytest
import torch
from torch import Tensor

import reflib
from reflib import CustomOpConfig, register_custom_op_autotuning
from reflib.errors import RegistrationError
from reflib.lower import custom_ops
from tests.choices import check_all
from tests.registered_ops import empty_registry, fill_, mm_relu, plain, split, tensors  # noqa: F401


def one(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    "op, message",
    [
        (lambda x: x, "is no op; give what torch.library.custom_op returned"),
        ("aten::mm", "is no op"),
        (torch.ops.aten.add, "has the overloads .*; give one of them"),
        (torch.ops.aten.matmul.default, "torch takes this op apart.*aten.mm.default"),
        (torch.ops.aten.add_.Tensor, "writes to its argument self"),
        (torch.ops.aten.view.default, "returns a view"),
        (torch.ops.aten.rand_like.default, "random"),
        (torch.ops.aten._local_scalar_dense.default, "only ops that return tensors"),
        (fill_, "writes to its argument x"),
    ],
)
def test_ops_that_have_no_candidates(op: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        register_custom_op_autotuning(op, configs=[one])
    assert issubclass(RegistrationError, (reflib.ReflibError, ValueError))


def positional_only(x: Tensor, w: Tensor, k_splits: int = 1, /) -> Tensor:
    return plain(x, w)


def star(*tensors: Tensor, **rest: Any) -> Tensor:
    return plain(*tensors)


@pytest.mark.parametrize(
    "config",
    [
        plain,
        lambda a, b: plain(a, b),  # tensors go by position
        lambda x, w, k_splits: plain(x, w),
        CustomOpConfig(lambda x, w, extra, k_splits=1: plain(x, w), extra=3),
        CustomOpConfig(lambda x, w, **rest: plain(x, w), extra=3),
        positional_only,
        star,
        CustomOpConfig(lambda x, w, *, k_splits: plain(x, w), k_splits=3),
    ],
)
def test_signatures_that_fit(config: Any) -> None:
    register_custom_op_autotuning(mm_relu, configs=[config])
    choice = check_all(lambda x, w: mm_relu(x, w, 2), tensors()).choice
    lacks = (
        config is plain
        or getattr(config, "__name__", "") == "<lambda>"
        and "k_splits" not in config.__code__.co_varnames
    )
    assert len(choice.variants) == (1 if lacks else 2), choice.failed


@pytest.mark.parametrize(
    "config, message",
    [
        (lambda x: x, r"<lambda>\(x\): got an unexpected keyword argument 'w'. It must take .*, \(x, w, k_splits=1\)"),
        (lambda w, x: x, "it takes w where the op takes x"),
        (lambda x, w, extra: x, "missing a required argument: 'extra'. .* and its own, which CustomOpConfig"),
        (CustomOpConfig(plain, k_split=3), r"plain\(.*\): got an unexpected keyword argument 'k_split'"),
        (CustomOpConfig(split, k_split=3), r"unexpected keyword argument 'k_split'. .* \(x, w, k_splits=1\)"),
        (CustomOpConfig(split, w=3), "parameter w is a tensor argument"),
        (CustomOpConfig(ksplits=3), r"no argument 'ksplits' to tune \(did you mean 'k_splits'\?\)"),
        (CustomOpConfig(plain, config_patches={"fusee": True}), "unknown option 'fusee'; did you mean 'fuse'"),
        (CustomOpConfig(plain, config_patches={"autotune": "off"}), "cannot change autotune"),
        (CustomOpConfig(plain, config_patches={"inplace_buffers": False}), "cannot change inplace_buffers.*own fuse, "),
        (CustomOpConfig(plain, config_patches={"check_nan": True}), "cannot change check_nan, which is the program's"),
        (3, "must be a CustomOpConfig or a function, not 3"),
    ],
)
def test_configs_that_do_not_fit(config: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message) as e:
        register_custom_op_autotuning(mm_relu, configs=[config])
    assert "rtest.mm_relu.default" in str(e.value)


def test_configs_by_themselves() -> None:
    with pytest.raises(RegistrationError, match="decomposition must be a function"):
        CustomOpConfig(3)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="config_patches must be a dict"):
        CustomOpConfig(plain, config_patches=["fuse"])  # type: ignore[arg-type]
    assert repr(CustomOpConfig(split, k_splits=4)) == "CustomOpConfig(split(k_splits=4))"


RANGE = {"tensor_name": "x", "dim": 0}
PLAIN: dict[str, Any] = {"configs": [plain]}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "give either configs or config_generator"),
        ({"configs": [plain], "config_generator": lambda fakes: []}, "give either configs or config_generator"),
        ({"configs": []}, "the list of configs is empty"),
        ({"configs": plain}, "must be a list"),
        ({"config_generator": [plain]}, "config_generator must be a function"),
        ({"configs": [plain], "min_speedup_threshold": 0.5}, "0.5: must be a number of at least 1"),
        ({"configs": [plain], "min_speedup_threshold": "1"}, "min_speedup_threshold='1'"),
        ({"configs": [plain], "min_speedup_threshold": float("nan")}, "min_speedup_threshold=nan"),
        ({"configs": [plain], "benchmark_with_cudagraphs": 1}, "must be True or False"),
        ({"configs": [plain], "name": 3}, "name must be a string"),
        ({"configs": [plain], "input_gen_fns": {"y": one}}, "'y' is no tensor argument of the op.*: x, w"),
        ({"configs": [plain], "input_gen_fns": {"k_splits": one}}, "'k_splits' is no tensor argument"),
        ({"configs": [plain], "input_gen_fns": {7: one}}, "7 is no tensor argument"),
        ({"configs": [plain], "input_gen_fns": {"x": 3}}, r"input_gen_fns\['x'\] must be a function"),
        ({"configs": [plain], "input_gen_fns": [one]}, "must be a dict"),
        ({**PLAIN, "split_points": [3]}, "split_points need dispatch_on"),
        ({**PLAIN, "dispatch_on": RANGE}, "dispatch_on needs split_points"),
        ({**PLAIN, "dispatch_on": ("x", 0), "split_points": [3]}, "dispatch_on must be"),
        ({**PLAIN, "dispatch_on": {"tensor_name": "x"}, "split_points": [3]}, "dispatch_on must be"),
        ({**PLAIN, "dispatch_on": [RANGE, RANGE], "split_points": [3]}, "split_points a list for each"),
        ({**PLAIN, "dispatch_on": [RANGE] * 3, "split_points": [[3]] * 3}, "dispatch_on lists one or two sizes"),
        ({**PLAIN, "dispatch_on": [RANGE, RANGE], "split_points": [[3], [4]]}, "the two sizes are the same"),
        ({**PLAIN, "dispatch_on": [RANGE], "split_points": [3]}, "split_points=3: must be a list of positive ints"),
        ({**PLAIN, "dispatch_on": {**RANGE, "tensor_name": "y"}, "split_points": [3]}, "'y' is no tensor"),
        ({**PLAIN, "dispatch_on": {**RANGE, "tensor_name": "k_splits"}, "split_points": [3]}, "no tensor arg"),
        ({**PLAIN, "dispatch_on": {**RANGE, "dim": "0"}, "split_points": [3]}, "dim='0' is no dimension"),
        ({**PLAIN, "dispatch_on": {**RANGE, "dim": 99}, "split_points": [3]}, "dim=99 is no dimension"),
        ({**PLAIN, "dispatch_on": {**RANGE, "range_uper_bound": 9}, "split_points": [3]}, "did you mean"),
        ({**PLAIN, "dispatch_on": {**RANGE, "range_upper_bound": 8}, "split_points": [8]}, "last split point, 8"),
        ({**PLAIN, "dispatch_on": RANGE, "split_points": []}, "positive ints"),
        ({**PLAIN, "dispatch_on": RANGE, "split_points": [0, 3]}, "positive ints"),
        ({**PLAIN, "dispatch_on": RANGE, "split_points": [2.5]}, "positive ints"),
        ({**PLAIN, "dispatch_on": RANGE, "split_points": [9, 3]}, "must ascend, without repetition"),
        ({**PLAIN, "dispatch_on": RANGE, "split_points": [3, 3]}, "must ascend, without repetition"),
    ],
)  # fmt: skip
def test_bad_registrations(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        register_custom_op_autotuning(mm_relu, **arguments)
    assert custom_ops.registration(mm_relu._opoverload) is None
