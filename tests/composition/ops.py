"""Ops in Python that have a function in C as well (``Options.c_shims``), for every device."""

import ctypes
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests import c_library

NEGATED = "composition_in_c::negated"
PROTOTYPE = "int32_t composition_negated(AtenTensorHandle x, AtenTensorHandle* out)"
PRODUCT = "composition_in_c::product"
SHIMS = {
    NEGATED: PROTOTYPE,
    PRODUCT: "int32_t composition_product(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle* out)",
}
TEXT = """
extern "C" {
int32_t composition_calls = 0;

int32_t composition_negated(AtenTensorHandle x, AtenTensorHandle* out) {
  AtenTensorHandle own;
  if (aoti_torch_new_tensor_handle(x, &own)) return 1;
  uint64_t stack[1] = {(uint64_t)own};
  if (torch_call_dispatcher("aten::neg", "", stack, VERSION)) return 1;
  *out = (AtenTensorHandle)stack[0];
  ++composition_calls;
  return 0;
}

int32_t composition_product(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle* out) {
  AtenTensorHandle x, y;
  if (aoti_torch_new_tensor_handle(a, &x) || aoti_torch_new_tensor_handle(b, &y)) return 1;
  uint64_t stack[2] = {(uint64_t)x, (uint64_t)y};
  if (torch_call_dispatcher("aten::mm", "", stack, VERSION)) return 1;
  *out = (AtenTensorHandle)stack[0];
  ++composition_calls;
  return 0;
}
}
"""


@functools.cache
def _made() -> tuple[Any, Any, ctypes.CDLL, tempfile.TemporaryDirectory[str]]:
    folder = tempfile.TemporaryDirectory(prefix="reflib-op-in-c-")
    made = c_library.build(Path(folder.name, "op.so"), TEXT)
    torch.ops.load_library(str(made))

    @torch.library.custom_op(NEGATED, mutates_args=())
    def negated(x: torch.Tensor) -> torch.Tensor:
        return -x

    @torch.library.custom_op(PRODUCT, mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    negated.register_fake(torch.empty_like)
    product.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    return negated, product, ctypes.CDLL(str(made)), folder


def op_in_c() -> Any:
    """The op. What it is called with is contiguous."""
    return _made()[0]


def product_in_c() -> Any:
    """The op that multiplies matrices."""
    return _made()[1]


def calls_of_c() -> int:
    """How often their functions in C were called."""
    return ctypes.c_int32.in_dll(_made()[2], "composition_calls").value


def library() -> str:
    """The path of the library with the functions in C."""
    return _made()[2]._name
