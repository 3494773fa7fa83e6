"""Several models in one file: weights that are equal are stored once, and models are loaded and exported by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reflib
from reflib.errors import PackageError
from reflib.package import archive, manifest
from reflib.package.export_cpp import export_cpp
from reflib.package.inspect import inspect
from tests import exported_cpp
from tests.exported_cpp import build, command

Tensor = torch.Tensor
COUNT = 103 * 64 * 4  # bytes of the table


class Encoder(nn.Module):
    def __init__(self, table: nn.Parameter):
        super().__init__()
        self.table, self.shift = table, nn.Parameter(torch.randn(7))
        self.register_buffer("calls", torch.zeros(64))

    def forward(self, i: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.relu(self.table[i]) + self.calls + self.shift.sum()


class Decoder(nn.Module):
    """Another one's table by another name; a buffer that is written, with the same numbers at first; a part of a
    tensor; names that are ``Encoder``'s."""

    def __init__(self, table: nn.Parameter):
        super().__init__()
        self.lm_head, self.shift = table, nn.Parameter(torch.randn(64))
        self.register_buffer("steps", torch.zeros(64))
        self.register_buffer("part", torch.arange(20.0)[3:17:2])

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(2)
        return torch.relu(x + self.shift) @ self.lm_head.t() * self.part.sum() + self.steps.sum()


def joined(folder: Path) -> tuple[Path, dict[str, nn.Module], dict[str, tuple[Tensor]]]:
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(103, 64))
    models: dict[str, nn.Module] = {"encode": Encoder(table), "decode": Decoder(table)}
    args: dict[str, Any] = {"encode": (torch.tensor([3, 102, 0]),), "decode": (torch.randn(3, 64),)}
    packages = {n: reflib.aot_compile(m, args[n], folder / f"{n}.reflib", "cpu") for n, m in models.items()}
    path = reflib.join_packages(packages, folder / "both.reflib")
    alone = sum(p.stat().st_size for p in packages.values())
    assert alone - path.stat().st_size > COUNT - 4000, "the table is there once"
    again = reflib.join_packages(packages, folder / "again.reflib")
    assert path.read_bytes() == again.read_bytes()
    for p in (*packages.values(), again):
        p.unlink()
    return path, models, args


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return joined(tmp_path_factory.mktemp("joined"))


def same(f: Any, model: nn.Module, args: tuple[Tensor]) -> None:
    torch.testing.assert_close(f(*args), model(*args).detach(), atol=1e-3, rtol=1e-5)  # (numbers up to 1,000)


def test_models_by_name(both: Any) -> None:
    path, models, args = both
    with torch.no_grad():
        for n, m in models.items():
            state = {k: v.clone() for k, v in m.state_dict().items()}
            f = reflib.load(path, model=n)
            for _ in range(3):
                same(f, m, args[n])
            f.unload()
            m.load_state_dict(state)
            assert [row[0] for row in inspect(path, model=n).inputs] == ["i" if n == "encode" else "x"]


def test_models_at_once_share_what_none_of_them_writes(both: Any) -> None:
    path, models, args = both
    states = {n: {k: v.clone() for k, v in m.state_dict().items()} for n, m in models.items()}
    loaded = reflib.load_models(path)
    encode, decode = loaded["encode"], loaded["decode"]
    assert encode._state["table"].data_ptr() == decode._state["lm_head"].data_ptr()
    assert encode._state["calls"].data_ptr() != decode._state["steps"].data_ptr()
    other = reflib.load(path, model="decode")
    with torch.no_grad():
        for _ in range(2):
            for n, f in loaded.items():
                same(f, models[n], args[n])
        models["encode"].table.mul_(2)
        encode.load_constants({"table": models["encode"].table}, check_full_update=False)
        for n, f in loaded.items():
            same(f, models[n], args[n])
        encode.unload()
        same(decode, models["decode"], args["decode"])
        models["decode"].load_state_dict(states["decode"])
        same(other, models["decode"], args["decode"])  # a mapping of its own


def test_what_is_refused(both: Any, tmp_path: Path) -> None:
    path, *_ = both
    alone = reflib.aot_compile(lambda x: x + 1, (torch.ones(3),), tmp_path / "one.reflib", "cpu")
    for call, says in (
        (lambda: reflib.load(path), "both.reflib: it holds 2 models, decode, encode: name one, model='decode'"),
        (lambda: reflib.load(path, model="train"), "it has no model 'train'; it holds decode, encode"),
        (lambda: reflib.load(alone, model="train"), "it has no model 'train'; it holds one, without a name"),
        (lambda: reflib.load_models(alone), "one.reflib: it holds one model, without a name"),
        (lambda: export_cpp(path, tmp_path / "p"), "it holds 2 models"),
        (lambda: reflib.join_packages({}, tmp_path / "x"), "no models to join"),
        (lambda: reflib.join_packages({"a.b": alone}, tmp_path / "x"), "'a.b' is no name for a model"),
        (lambda: reflib.join_packages({"a": path}, tmp_path / "x"), "it holds 2 models"),
    ):
        with pytest.raises(PackageError, match=says):
            call()
    file = archive.write(tmp_path / "bad", {"models": {"a": 3}}, {})
    with pytest.raises(PackageError, match="its manifest is none of reflib's"):
        reflib.load(file, model="a")


def test_kernels_of_gpus(tmp_path: Path) -> None:
    """Other kernels by the same name: each model has its own."""
    pytest.importorskip("triton")
    args = (torch.ones(300),)
    fns = {"a": lambda x: x + 1, "b": lambda x: x + 2}
    packages = {n: reflib.aot_compile(f, args, tmp_path / n, ["sm_90"], ptx=False) for n, f in fns.items()}
    path = reflib.join_packages(packages, tmp_path / "both")
    images = []
    for n in fns:
        with manifest.opened(path, model=n) as (file, m), manifest.opened(packages[n]) as (own, alone):
            for k, was in zip(m.variants[0].kernels, alone.variants[0].kernels, strict=True):
                assert k.name == was.name and bytes(file.view(k.image)) == bytes(own.view(was.image))
                images.append(k.image)
    assert len(images) == len(set(images)) > 2


PROGRAM = """
#include <stdio.h>
#include "encode_model.h"
#include "decode_model.h"
static reflib_value run(const reflib_functions *f, const char *weights, reflib_value x) {
  reflib_model *m;
  reflib_value y = {.kind = REFLIB_NONE};
  if (f->load(&m, weights, 0) || f->run(m, NULL, &x, 1, &y, 1)) fprintf(stderr, "%s", f->error());
  return y;
}
int main(int count, char **words) {
  int64_t data[3] = {3, 102, 0}, size = 3, stride = 1;
  reflib_value x = {.kind = REFLIB_TENSOR};
  x.tensor.data = data, x.tensor.dtype = REFLIB_INT64, x.tensor.device = REFLIB_CPU, x.tensor.dim = 1;
  x.tensor.sizes = &size, x.tensor.strides = &stride;
  reflib_value y = run(functions_of_decode(), words[1], run(functions_of_encode(), words[1], x));
  for (int i = 0; i < 3; ++i) printf("%.9g ", ((float *)y.tensor.data)[i]);
  return 0;
}
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(exported_cpp.missing_tools()), reason="needs cmake and ninja")
def test_as_cpp_in_one_program_with_one_file_of_weights(tmp_path: Path) -> None:
    path, models, args = joined(tmp_path)
    for n in models:
        export_cpp(path, tmp_path / n, model=n)
    (tmp_path / "main.c").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(both C CXX)\nadd_subdirectory(encode)\nadd_subdirectory(decode)"
        "\nadd_executable(both main.c)\ntarget_link_libraries(both PRIVATE reflib_encode reflib_decode)\n"
    )
    built = build(tmp_path)
    weights = tmp_path / "encode" / "encode_weights.safetensors"
    found = [float(word) for word in command(built / "both", weights).split()]
    wanted = models["decode"](models["encode"](*args["encode"])).flatten()[:3].tolist()
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))
