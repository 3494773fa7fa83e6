"""What goes into a package, and what cannot: architectures in any order, weights that are read, models as they are."""

import os
import textwrap
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import reflib
from reflib.errors import CaptureError, OptionError, PackageError
from reflib.package import archive, manifest
from reflib.package.architectures import ALL, wanted
from tests.forking import forked

Tensor = torch.Tensor
close = torch.testing.assert_close


def about(path: Path) -> manifest.Manifest:
    return manifest.read(archive.open(path).manifest)


# -- archs ----------------------------------------------------------------------------------------------------
def archs(*of: Any) -> list[str]:
    return [t.arch for t in wanted(*of).targets]


def test_architectures_in_any_order() -> None:
    assert archs(["cpu", "gfx942", "sm_120", "sm_90", "sm_100", "sm_90"]) == [
        "sm_90", "sm_100", "sm_120", "gfx942", "cpu",
    ]  # fmt: skip
    assert archs({"sm_80", "cpu"}) == archs(a for a in ("cpu", "sm_80")) == ["sm_80", "cpu"]
    assert archs("all") == archs(["sm_90", "all"]) == archs([*ALL[::-1], *ALL]) == list(ALL)
    assert wanted(["sm_90", "cpu"]).ptx and not wanted(["sm_90"], ptx=False).ptx and not wanted("gfx942").ptx


def test_the_cpu_by_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert wanted("native").here and archs("native") == ["cpu"]
    assert not wanted(["native", "cpu"]).here and archs(["cpu", "native"]) == ["cpu"]  # "cpu" runs on every one
    assert not wanted(["sm_90"]).here


@pytest.mark.parametrize("of, says", [
    (None, "archs=None: takes names"), (90, "archs=90: takes names"), ([], "archs is empty"), ((), "archs is empty"),
    ([90], "names such as 'sm_90', got 90"), ([None], "got None"), (["sm_90", b"cpu"], "got b'cpu'"),
    ("sm_91", "unknown target 'sm_91'; known: native, all, cpu, sm_75, .*sm_120, gfx90a"), ("", "unknown target ''"),
    (["cpu", "CPU"], "unknown target 'CPU'"), (Path("cpu"), "takes names"),
])  # fmt: skip
def test_what_names_no_architectures(of: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=says):
        reflib.aot_compile(torch.sin, (torch.randn(3),), tmp_path / "m.reflib", of)


def test_the_same_set_makes_the_same_file(tmp_path: Path) -> None:
    orders = ["cpu", "sm_90", "sm_80"], ("sm_80", "sm_90", "cpu", "sm_80"), {"sm_90", "cpu", "sm_80"}
    made = [reflib.aot_compile(torch.sin, (torch.randn(9),), tmp_path / f"{i}", o) for i, o in enumerate(orders)]
    assert about(made[0]).archs == ("sm_80", "sm_90", "cpu", "ptx")
    assert made[0].read_bytes() == made[1].read_bytes() == made[2].read_bytes()


# -- the model --------------------------------------------------------------------------------------------------
class Trains(torch.nn.Module):
    def __init__(self, p: float = 0.5, track: bool = True) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4, track_running_stats=track)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(self.norm(x), self.p, self.training)


@pytest.mark.parametrize("way", ["module", "program"])
def test_training_mode_is_said(way: str, tmp_path: Path) -> None:
    model, x = Trains(), torch.randn(8, 4)
    given: tuple[Any, ...] = (model, (x,))
    if way == "program":
        given = (torch.export.export(model, (x,)),)
    says = "as it is in training: batch_norm updates its running statistics, dropout draws random numbers. "
    with pytest.warns(UserWarning, match=rf"{says}For inference call model\.eval\(\) first") as w:
        path = reflib.aot_compile(*given, path=tmp_path / "t.reflib", archs="cpu")
    assert [v.filename for v in w] == [__file__]
    f = reflib.load(path)
    before = f._state["norm.running_mean"].clone()
    y = f(x + 5)
    assert (y == 0).any() and not torch.equal(f._state["norm.running_mean"], before)


def test_what_training_does_not_change_is_not_warned_of(tmp_path: Path) -> None:
    x = torch.randn(8, 4)
    models = [Trains().eval(), torch.nn.Linear(4, 4), Trains(p=0.0, track=False), lambda x: x + 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for i, model in enumerate(models):
            reflib.aot_compile(model, (x,), tmp_path / f"{i}.reflib", "cpu")
    assert not Trains().eval().training and models[1].training  # type: ignore[attr-defined]


class Spare(torch.nn.Module):
    """Weights that nothing reads; one that is only written to."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = torch.nn.Linear(4, 4), torch.nn.Linear(500, 500)
        self.register_buffer("last", torch.zeros(2, 4))
        self.register_buffer("table", torch.zeros(300_000))

    def forward(self, x: Tensor) -> Tensor:
        y = self.used(x)
        self.last.copy_(y)
        return y * 2


@pytest.mark.parametrize("way", ["module", "program", "both kinds"])
def test_weights_that_nothing_reads_are_left_out(way: str, tmp_path: Path) -> None:
    model, x = Spare().eval(), torch.randn(2, 4)
    given: tuple[Any, ...] = (torch.export.export(model, (x,)),) if way == "program" else (model, (x,))
    kinds = ["sm_90", "cpu"] if way == "both kinds" else "cpu"
    path = reflib.aot_compile(*given, path=tmp_path / "s.reflib", archs=kinds)
    assert {w.name for w in about(path).weights} == {"used.weight", "used.bias", "last"}
    assert path.stat().st_size < 400_000 < sum(4 * t.numel() for t in model.state_dict().values())
    f = reflib.load(path)
    with torch.no_grad():
        close(f(x), model(x))
        close(f._state["last"], model.last)
    assert f.memory_metrics()["weights"] == 4 * (16 + 4 + 8)


def test_weights_without_data(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for arch in ("cpu", "sm_90"):
        with pytest.raises(CaptureError, match=r"0\.weight has no data \(it is a meta tensor\).*model\.to_empty"):
            reflib.aot_compile(model, (torch.randn(2, 4),), tmp_path / "m.reflib", arch)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(2, 4)
    path = reflib.aot_compile(model, (x.to("meta"),), tmp_path / "m.reflib", "cpu")  # arguments need none
    with torch.no_grad():
        close(reflib.load(path)(x), model(x))


@pytest.mark.parametrize("given, says", [
    ({"args": torch.ones(3)}, r"example arguments in a tuple, \(x,\) for one: got a Tensor"),
    ({"args": {"x": 1}}, "in a tuple.*got a dict"), ({"args": "x"}, "in a tuple.*got a str"),
    ({"args": (), "kwargs": [torch.ones(3)]}, "by name in a dict: got a list"),
])  # fmt: skip
def test_examples_of_another_kind(given: Any, says: str, tmp_path: Path) -> None:
    for model in (torch.sin, torch.export.export(torch.nn.ReLU(), (torch.ones(3),))):
        with pytest.raises(CaptureError, match=says):
            reflib.aot_compile(model, path=tmp_path / "m.reflib", archs="cpu", **given)


def test_what_is_no_model(tmp_path: Path) -> None:
    for model, says in ((torch.nn.Linear, r"Linear is a class: pass a model, such as Linear\("), ("m.pt2", "got str")):
        with pytest.raises(CaptureError, match=says):
            reflib.aot_compile(model, (torch.ones(3),), tmp_path / "m.reflib", "cpu")
    with pytest.raises(CaptureError, match=r"Unsupported input type.*\n.*tuples, lists and dicts.*register_dataclass"):
        reflib.aot_compile(torch.sin, (torch.ones(3).numpy(),), tmp_path / "m.reflib", "cpu")


def test_complex_numbers(tmp_path: Path) -> None:
    x = torch.randn(3, 4, dtype=torch.complex128)
    path = reflib.aot_compile(lambda x: x * x.conj() + 1j, (x,), tmp_path / "c.reflib", "cpu")
    close(reflib.load(path)(x), x * x.conj() + 1j)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.randn(4, dtype=torch.complex128))
    model.forward = lambda x: x * model.w  # type: ignore[method-assign]
    with pytest.raises(PackageError, match=r"the weight 'w' is torch.complex128.*convert it"):
        reflib.aot_compile(model, (x,), tmp_path / "w.reflib", "cpu")
    with pytest.raises(PackageError, match=r"it computes with torch.complex32; convert it"):
        reflib.aot_compile(lambda x: x.to(torch.complex64), (x.to(torch.complex32),), tmp_path / "h.reflib", "cpu")


# -- structures ---------------------------------------------------------------------------------------------------
class Pair(NamedTuple):
    a: Tensor
    b: Tensor


Hidden = namedtuple("Other", "a b")  # not what it is called


def swapped(pair: Pair) -> Pair:
    return Pair(pair.b + 1, pair.a)


def test_namedtuples(tmp_path: Path) -> None:
    x, y = torch.randn(3), torch.randn(3)
    package = reflib.aot_compile(swapped, (Pair(x, y),), tmp_path / "n.reflib", "cpu")
    got = reflib.load(package)(Pair(x, y))
    assert type(got) is Pair
    close(tuple(got), (y + 1, x))
    text = textwrap.dedent("""
        import sys, torch, reflib
        {first}
        f = reflib.load(sys.argv[1])
        from {module} import Pair
        print(type(f(Pair(torch.ones(3), torch.ones(3)))) is Pair)
    """)
    path = os.pathsep.join([str(Path(__file__).parent), str(Path.cwd())])
    for first, says in ((f"import {__name__}", "True"), ("", f"first import {__name__}")):
        _, out, errors = forked("-c", text.format(first=first, module=__name__), str(package), PYTHONPATH=path)
        assert (out + errors).strip().endswith(says)


def test_structures_without_a_name(tmp_path: Path) -> None:
    x = torch.randn(3)
    for f, says in (
        (lambda x: Hidden(x, x), "the namedtuple Other is not what .* has by that name"),
        (lambda x: torch.max(x, 0), "torch.return_types.max was registered without a name"),
    ):
        with pytest.raises(PackageError, match=f"{says}.*use tuples, lists and dicts"):
            reflib.aot_compile(f, (x,), tmp_path / "m.reflib", "cpu")


# -- the file -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [3, None, b"m.reflib", ["m.reflib"]])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(PackageError, match=r"takes a str or a pathlib.Path"):
        reflib.aot_compile(torch.sin, (torch.ones(3),), path, "cpu")
    with pytest.raises(PackageError, match=r"takes a str or a pathlib.Path"):
        archive.write(path, {}, {})


def test_the_disk_has_it_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(number: int) -> None:
        done.append(f"{os.fstat(number).st_size} bytes")
        sync(number)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *of: (done.append("name"), replace(*of)))
    path = archive.write(tmp_path / "m.reflib", {"n": 1}, {"a": b"text"})
    assert done == [f"{path.stat().st_size} bytes", "name"]
