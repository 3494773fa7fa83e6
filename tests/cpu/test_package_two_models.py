"""Two exported models in one CMake project and one program."""

from pathlib import Path

import pytest
import torch

import reflib
from reflib.package.export_cpp import export_cpp
from tests import exported_cpp
from tests.exported_cpp import build, command

Tensor = torch.Tensor
pytestmark = pytest.mark.skipif(bool(exported_cpp.missing_tools()), reason="needs cmake and ninja")

TWO = """
#include <stdio.h>
#include "one_model.h"
#include "two_model.h"
static int call(const reflib_functions *f) {
  reflib_model *m;
  float data[3] = {1, 2, 3};
  int64_t size = 3, stride = 1;
  reflib_value x = {.kind = REFLIB_TENSOR}, y;
  x.tensor.data = data, x.tensor.dtype = REFLIB_FLOAT32, x.tensor.device = REFLIB_CPU, x.tensor.dim = 1;
  x.tensor.sizes = &size, x.tensor.strides = &stride;
  if (f->load(&m, NULL, 0) || f->run(m, NULL, &x, 1, &y, 1)) return fprintf(stderr, "%s", f->error());
  printf("%g ", ((float *)y.tensor.data)[2]);
  f->free(&y), f->unload(m);
  return 0;
}
int main(void) { return call(functions_of_one()) || call(functions_of_two()); }
"""


@pytest.mark.slow
def test_each_is_called_by_its_own_table(tmp_path: Path) -> None:
    class Scale(torch.nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.full((3,), by))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    for name, by in (("one", 10.0), ("two", 0.5)):
        reflib.aot_compile(Scale(by), (torch.ones(3),), tmp_path / f"{name}.reflib", "cpu")
        export_cpp(tmp_path / f"{name}.reflib", tmp_path / name)
    (tmp_path / "main.c").write_text(TWO)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(both C CXX)\nadd_subdirectory(one)\nadd_subdirectory(two)\n"
        "add_executable(both main.c)\ntarget_link_libraries(both PRIVATE reflib_one reflib_two)\n"
    )
    built = build(tmp_path)
    assert command(built / "both").split() == ["30", "1.5"]
