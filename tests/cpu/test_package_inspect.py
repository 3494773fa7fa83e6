"""Looking into a package without loading it."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from torch.export import Dim

import reflib
from reflib.cli import cli, main
from reflib.ir.expr import Sym, expr
from reflib.package import architectures, archive, build, images
from reflib.package.inspect import Inspection, inspect
from reflib.wrap.convention import Argument, Convention, Expected, Guard
from tests.packages import CASES, changed


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(24, 16)
        self.register_buffer("shift", torch.ones(16, dtype=torch.int64))

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        return torch.softmax(torch.relu(self.inner(x)) + self.shift, -1) * times


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "small.reflib"
    shapes = ({0: Dim("n", min=2, max=100)}, None)
    archs = ["sm_80", "sm_90", "gfx942", "cpu"]
    return reflib.aot_compile(Small(), (torch.randn(8, 24), 3), path, archs, dynamic_shapes=shapes, max_fused_ops=300)


@pytest.fixture(scope="module")
def found(package: Path) -> Inspection:
    return inspect(package)


def rows(found: Inspection, title: str) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for t in found.tables if t.title == title for row in t.rows}


def test_inputs_and_weights(found: Inspection) -> None:
    (x, times) = found.inputs
    assert x[:2] == ("x", "float32") and re.fullmatch(r"\[s\d+, 24\]", x[2]) and x[4] == "cpu, cuda"
    assert re.fullmatch(r"s\d+: 2 to 100", x[3])
    assert times[:3] == ("times", "no tensor", "must be 3")
    weights = [row for t in found.tables if t.title == "weights" for row in t.rows]
    assert weights == [("buffer", "int64", "1", "128"), ("parameter", "float32", "2", f"{4 * 16 * 25:,}")]


def test_head(found: Inspection, package: Path) -> None:
    head = rows(found, "small.reflib")
    assert head["size"] == (f"{package.stat().st_size:,} bytes",) and head["options"] == ("max_fused_ops=300",)
    assert "torch 2" in head["built with"][0] and "Linux" in head["host code"][0] and len(head["source"][0]) == 64
    assert head["Python"] == ("no call needs it",)


def test_kernels_and_variants(found: Inspection) -> None:
    variants = rows(found, "variants")
    assert list(variants) == ["sm_80", "sm_90", "gfx942", "cpu", "ptx"]
    assert variants["sm_90"][0] == "Hopper" and variants["gfx942"][-1] == "not run yet"
    assert "driver" in variants["ptx"][-1]
    assert variants["ptx"][1] == "sm_80"
    heads = next(t.heads for t in found.tables if t.title == "kernels")
    assert heads == ("kernel", *variants)
    shown = rows(found, "kernels")
    assert any(name.endswith("(late)") for name in shown)
    for at, arch in enumerate(variants):
        sizes = [of[arch] for of in found.kernels.values() if of.get(arch)]
        total = int(shown["all"][at].replace(",", ""))
        assert total == (sum(sizes) if arch != "cpu" else found.machine_code(found.manifest.variant("cpu"))) > 0
    only_cpu = [cells for name, cells in shown.items() if "in .so" in cells and name != "all"]
    only_gpu = [cells for name, cells in shown.items() if cells[3] == "-"]
    assert only_cpu and only_gpu


def test_sizes_add_up(found: Inspection, package: Path) -> None:
    assert sum(found.sizes.values()) == found.size == package.stat().st_size
    assert found.sizes["PTX"] == found.machine_code(found.manifest.variant("ptx"))
    assert all(found.sizes[k] > 0 for k in found.sizes if k not in ("containers", "compression"))
    assert found.sizes["compression"] == sum(e.size - e.unpacked for e in found.manifest.entries) < 0
    assert found.overhead == (found.size - found.sizes["weights"]) / found.sizes["machine code"]


def test_without_fatbins_the_containers_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFLIB_FATBINARY", "")
    assert images.fatbinary() is None
    made = inspect(reflib.aot_compile(torch.sin, (torch.randn(8),), tmp_path / "s.reflib", ["sm_90", "sm_120"]))
    assert made.sizes["containers"] == 0 and "one member per kernel" in str(made)


@pytest.mark.parametrize("tool", ["", None], ids=["table", "fatbin"])
@pytest.mark.slow
def test_a_file_is_little_more_than_its_machine_code(
    tool: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tool is not None:
        monkeypatch.setenv("REFLIB_FATBINARY", tool)
    model, args = CASES["block"].make()
    made = inspect(reflib.aot_compile(model, args, tmp_path / "b.reflib", ["sm_80", "sm_90", "sm_120"]))
    assert made.sizes["machine code"] > 200_000 and made.overhead < 1.3


@pytest.mark.parametrize("ptx", [True, False])
def test_what_runs_where(ptx: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = inspect(reflib.aot_compile(torch.sin, (torch.randn(8),), tmp_path / "s.reflib", ["sm_80", "sm_90"], ptx=ptx))
    runs = {name.split(" (")[0]: said for name, said in made.gpus.items()}
    assert runs["A100"] == runs["RTX 4090, L4"] == "machine code sm_80" and runs["H100, H200"] == "machine code sm_90"
    assert runs["T4"] == "nothing: rebuild with archs=[..., 'sm_75']"
    if ptx:
        says = "PTX of sm_80, compiled by the driver ({} or later)"  # that knows the GPU; the text is older
        assert runs["B200"] == says.format(570) and runs["GB10"] == says.format(575)
    else:
        assert runs["B200"] == "nothing: rebuild with archs=[..., 'sm_100']"
        assert runs["GB10"] == "nothing: rebuild with ptx=True"  # there is no sm_121 to name


@pytest.mark.parametrize("ptx", [True, False])
def test_what_needs_more_shared_memory_than_a_gpu_has(ptx: bool, tmp_path: Path) -> None:
    """sm_80's code runs on 8.6 and 8.9, which have 99 KB of it where 8.0 has 163: in words, and by the one rule."""

    def change(data: Any, members: Any) -> None:
        data["variants"][0]["kernels"][0]["shared"] = 99 * 1024 + more
        data["variants"][-1]["driver"] = (12080, "570") if ptx else None

    path = reflib.aot_compile(torch.sin, (torch.randn(8),), tmp_path / "s.reflib", ["sm_80", "sm_90"], ptx=ptx)
    for more, less in ((0, "sm_80"), (1, "ptx" if ptx else None), (65 * 1024, None)):
        found = inspect(changed(path, tmp_path / "m.reflib", change))
        runs = {name.split(" (")[0]: said for name, said in found.gpus.items()}
        chosen = {n: architectures.variant_for(found.manifest, n, architectures.shared_of(n)) for n in (80, 86, 89, 90)}
        arch = {n: variant.arch if variant else None for n, variant in chosen.items()}
        if more > 64 * 1024:  # more than any has
            assert arch[80] == ("ptx" if ptx else None)
            continue
        assert arch == {80: "sm_80", 86: less, 89: less, 90: "sm_90"}
        assert runs["A100"] == "machine code sm_80"
        words = {"sm_80": "machine code sm_80", "ptx": "PTX of sm_80, compiled by the driver (570 or later)"}
        assert runs["RTX 4090, L4"] == words.get(str(less), "nothing: rebuild with archs=[..., 'sm_89']")
    text = architectures.variant_for(found.manifest, 90, 227 * 1024, only_text=True)
    assert (text.arch if text else None) == ("ptx" if ptx else None)


def test_in_a_notebook(found: Inspection) -> None:
    page = ElementTree.fromstring(f"<div>{found._repr_html_()}</div>")
    assert {e.tag for e in page.iter()} == {"p", "b", "div", "table", "thead", "tbody", "tr", "th", "td"}
    assert not any("color" in value for e in page.iter() for value in e.attrib.values())


def test_names_from_elsewhere(package: Path, tmp_path: Path) -> None:
    def change(data: Any, members: Any) -> None:
        data["weights"][0]["kind"] = "<script>"

    made = inspect(changed(package, tmp_path / "n.reflib", change))
    assert "<script>" in str(made) and "<script>" not in made._repr_html_()
    said = CliRunner().invoke(cli, ["inspect", "--json", str(tmp_path / "n.reflib")])
    assert said.exit_code == 0 and said.output.isascii()


def test_nothing_of_it_is_loaded(package: Path, tmp_path: Path) -> None:
    """Code that no loader would take is code all the same."""

    def change(data: Any, members: Any) -> None:
        for name in members:
            if name.endswith((".so", ".py", ".fatbin", ".hsaco")):
                members[name] = b"raise SystemExit" * 10

    assert "sm_90" in str(inspect(changed(package, tmp_path / "x.reflib", change)))


class Guarded(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > y.shape[0] and x.shape[0] * x.shape[1] > 100 else x


def test_guards(tmp_path: Path) -> None:
    shapes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}
    args = torch.randn(20, 20), torch.randn(8)
    path = reflib.aot_compile(Guarded(), args, tmp_path / "g.reflib", "cpu", dynamic_shapes=shapes)
    made = inspect(path)
    (note,) = (t.note for t in made.tables if t.title == "inputs")
    first, second = note.splitlines()
    assert re.fullmatch(r"holds of the sizes: s\d+ > s\d+ \(x\.shape\[0\] > y\.shape\[0\]\)", first)
    assert re.fullmatch(r"holds of the sizes: s\d+\*s\d+ > 100 \(x\.shape\[\d\]\*x\.shape\[\d\] > 100\)", second)
    assert note in str(made) and made._repr_html_().count("<p>holds of the sizes: ") == 2

    def change(data: Any, members: Any) -> None:
        data["programs"]["cpu"]["conditions"][0] = "<script>"

    made = inspect(changed(path, tmp_path / "n.reflib", change))
    assert "<script>" in str(made) and "<script>" not in made._repr_html_()


def test_a_guard_of_what_is_twice_a_size() -> None:
    n = Sym("s1", lo=2, hint=4)
    x = Expected(torch.float32, torch.device("cpu"), (2 * expr(n) + 1,), (expr(1),))
    guards = tuple(Guard("differs", expr(Sym(s)), text) for s, text in (("s1", "Ne(s1, 8)"), ("s2", "s2")))
    c = Convention(("",), (Argument("x", x),), (), None, None, {}, ("cpu",), guards)
    assert build.guards(c) == ("Ne(s1, 8) (Ne(((x.shape[0] - 1)//2), 8))", "s2")


def test_the_command(package: Path, tmp_path: Path, found: Inspection) -> None:
    said = CliRunner().invoke(cli, ["inspect", str(package)])
    assert said.exit_code == 0 and said.output == f"{found}\n"
    as_json = CliRunner().invoke(cli, ["inspect", str(package), "--json"])
    assert json.loads(as_json.output) == archive.open(package).manifest


@pytest.mark.parametrize("words", [["inspect"], ["inspect", "--json"], ["export-cpp"]])
def test_errors_of_the_commands(
    words: list[str], package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = bytearray(package.read_bytes())
    damaged[archive.open(package).entries["weights.safetensors"].offset + 1] ^= 1
    (tmp_path / "d.reflib").write_bytes(damaged)
    more = [str(tmp_path / "p")] if words == ["export-cpp"] else []
    for path, says in ((tmp_path / "d.reflib", "weights.safetensors is altered"), (tmp_path / "none", "no such file")):
        monkeypatch.setattr(sys, "argv", ["reflib", *words, str(path), *more])
        with pytest.raises(SystemExit) as e:
            main()
        said = capsys.readouterr()
        assert e.value.code == 2 and said.err.startswith("reflib: ") and says in said.err and not said.out
