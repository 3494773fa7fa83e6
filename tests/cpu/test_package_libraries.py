"""Ops that a package calls and does not have: what it says of the library that registers them."""

import os
from pathlib import Path

import pytest

from reflib.package.manifest import Library
from tests import c_library
from tests.forking import forked

# -- in C ---------------------------------------------------------------------------------------------------
# `twice`, registered from C; and the C function of `thrice`, an op that Python registers
IN_C = r"""
static int32_t times(AtenTensorHandle x, float by, AtenTensorHandle* out) {
  int64_t n, one = 1;
  float *from, *to;
  aoti_torch_get_numel(x, &n);
  if (n > 5) return 1;
  aoti_torch_empty_strided(1, &n, &one, 6, 0, -1, out);
  aoti_torch_get_data_ptr(x, (void**)&from), aoti_torch_get_data_ptr(*out, (void**)&to);
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] * by;
  return 0;
}
extern "C" int32_t library_test_thrice(AtenTensorHandle x, AtenTensorHandle* out) { return times(x, 3, out); }

static void twice(uint64_t* stack, uint64_t, uint64_t) {
  AtenTensorHandle out = nullptr;
  times((AtenTensorHandle)stack[0], 2, &out);
  aoti_torch_delete_tensor_object((AtenTensorHandle)stack[0]);
  stack[0] = (uint64_t)out;
}
"""
PYTHON = """
import torch

@torch.library.custom_op("library_test::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3
thrice.register_fake(lambda x: torch.empty_like(x))

lib = torch.library.Library("library_test", "FRAGMENT")
lib.define("plus(Tensor x) -> Tensor")
lib.impl("plus", lambda x: x + 1, "CompositeExplicitAutograd")
torch.library.register_fake("library_test::plus", lambda x: torch.empty_like(x))

torch.library.define("library_test::minus", "(Tensor x) -> Tensor")
torch.library.impl("library_test::minus", "cpu", lambda x: x - 1)
@torch.library.register_fake("library_test::minus")
def _(x):
    return torch.empty_like(x)
"""
BARE = """
import torch
torch.library.define("library_test::bare", "(Tensor x) -> Tensor")
torch.library.impl("library_test::bare", "default", lambda x: x * 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With my_ops.py, and in_c.so (what IN_C is compiled to), there and in a package of Python's."""
    where = tmp_path_factory.mktemp("library")
    (where / "my_ops.py").write_text(PYTHON)
    (where / "my_package").mkdir()
    (where / "my_package" / "__init__.py").touch()
    made = c_library.build(where / "in_c.so", IN_C, {"library_test_c::twice": "twice(Tensor x) -> Tensor"})
    (where / "my_package" / "_C.so").write_bytes(made.read_bytes())
    return where


def said(folder: Path, text: str, *args: str) -> str:
    """What a process of its own prints."""
    text = f"import sys, torch\nfrom reflib.package.libraries import library_of\n{text}"
    _, out, errors = forked("-c", text, *args, PYTHONPATH=f"{folder}{os.pathsep}{Path.cwd()}")
    return out + errors.strip().rpartition("\n")[2]


ALL = "print(*(library_of(getattr(torch.ops.library_test, n).default).remedy for n in sys.argv[1:]), sep='; ')"


def test_ops_of_a_python_module(folder: Path) -> None:
    """By custom_op, by a Library, by define (which the fake implementation tells)."""
    found = said(folder, f"import my_ops\n{ALL}", "thrice", "plus", "minus")
    assert found == "import my_ops; import my_ops; import my_ops\n"


def test_ops_that_nothing_is_known_of(folder: Path) -> None:
    found = said(folder, f"{PYTHON}\n{BARE}\n{ALL}", "thrice", "plus", "minus", "bare")
    names = "thrice", "plus", "minus", "bare"
    assert found == "; ".join(f"import or load what registers library_test::{n}" for n in names) + "\n"
    assert Library("a.b.out").remedy == "import or load what registers a::b.out"


def test_ops_in_c(folder: Path) -> None:
    name = "torch.ops.library_test_c.twice.default"
    text = f"torch.ops.load_library(sys.argv[1])\nimport fake_of_twice\nprint(library_of({name}).remedy)"
    fake = "torch.library.register_fake('library_test_c::twice', lambda x: torch.empty_like(x))"
    (folder / "fake_of_twice.py").write_text(f"import torch\n{fake}\n")  # which is not where it is from
    assert said(folder, text, str(folder / "in_c.so")) == "torch.ops.load_library('in_c.so')\n"
    text = f"import my_package\n{text}"  # whose own library it is
    assert said(folder, text, str(folder / "my_package" / "_C.so")) == "import my_package\n"


# -- Options.c_shims ------------------------------------------------------------------------------------------
MAKE = """
import my_ops, reflib
torch.ops.load_library(sys.argv[2])
shims = {"library_test::thrice": "int32_t library_test_thrice(AtenTensorHandle x, AtenTensorHandle* out)"}
reflib.aot_compile(lambda x: my_ops.thrice(x) + 1, (torch.ones(4),), sys.argv[1], "cpu", c_shims=shims)
"""
USE = """
import reflib
{first}
f = reflib.load(sys.argv[1])
print(f(torch.ones(4)).tolist())
"""


def test_the_c_function_is_enough(folder: Path) -> None:
    made, library = str(folder / "shim.reflib"), str(folder / "in_c.so")
    assert said(folder, MAKE, made, library) == ""
    without_op = "assert not hasattr(torch.ops.library_test, 'thrice')"
    load = USE.format(first=f"torch.ops.load_library({library!r})\n{without_op}")
    assert said(folder, load, made) == "[4.0, 4.0, 4.0, 4.0]\n"
    found = said(folder, USE.format(first=""), made)
    says = "it calls the C function library_test_thrice, which no library here has"
    assert found.endswith(f"{says}: first torch.ops.load_library('in_c.so')")


def test_a_c_function_that_fails(folder: Path) -> None:
    """The op says why, where there is one."""
    made, library = str(folder / "fails.reflib"), str(folder / "in_c.so")
    assert said(folder, MAKE.replace("torch.ones(4)", "torch.ones(6)"), made, library) == ""
    load = USE.replace("torch.ones(4)", "torch.ones(6)")
    found = said(folder, load.format(first=f"torch.ops.load_library({library!r})"), made)
    assert "library_test_thrice failed; library_test.thrice.default, which would say why, is not registered" in found
