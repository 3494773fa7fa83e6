"""A loaded package as an object: its signature, copies, ``with``, devices, under ``torch.compile``."""

import copy
import inspect
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

import reflib
from reflib.errors import PackageError
from reflib.package import load as loading
from reflib.package.inspect import inspect as described
from reflib.wrap import structure

Tensor = torch.Tensor
close = torch.testing.assert_close


class Counts(torch.nn.Module):
    """Arguments of all kinds, a buffer that it writes to, a call of ATen's from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], times: int, *, z: dict[str, Tensor]) -> Any:
        self.n.add_(1)
        return {"found": torch.unique(x + pair[0] * times + z["q"] + self.n)}


def call(x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x, (x, x), 3), {"z": {"q": x}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "plain.reflib"
    return reflib.aot_compile(torch.nn.Linear(4, 3).eval(), (torch.randn(2, 4),), path, "cpu")


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    args, kwargs = call(torch.randn(2, 4))
    return reflib.aot_compile(Counts(), args, tmp_path_factory.mktemp("model") / "c.reflib", "cpu", kwargs=kwargs)


def test_its_signature(plain: Path, counts: Path) -> None:
    assert str(inspect.signature(reflib.load(plain))) == "(input, /)"
    f = reflib.load(counts)
    assert str(inspect.signature(f)) == "(x, pair, times, /, *, z)"
    args, kwargs = call(torch.randn(2, 4))
    inspect.signature(f).bind(*args, **kwargs)  # as it is called
    assert f(*args, **kwargs)["found"].ndim == 1


def test_the_signature_of_any_function(tmp_path: Path) -> None:
    def f(x: Tensor, *rest: Tensor, **named: Tensor) -> Tensor:
        return x + rest[0] + rest[1] + named["k"]

    x = torch.randn(3)
    path = reflib.aot_compile(f, (x, x, x), tmp_path / "f.reflib", "cpu", kwargs={"k": x})
    assert str(inspect.signature(reflib.load(path))) == "(x, rest_0, rest_1, /, *, k)"
    m = loading.manifest.read(loading.archive.open(path).manifest).programs["cpu"]
    convention = loading.convention_of(m, torch.device("cpu"))
    assert str(structure.signature(convention.in_spec)) == "(args_0, args_1, args_2, /, *, k)"  # nothing was said
    assert str(structure.signature(convention.in_spec, ("x", "x", "y"))) == "(*args, **kwargs)"


def test_it_is_not_copied(plain: Path) -> None:
    f = reflib.load(plain)
    for act in (copy.copy, copy.deepcopy, pickle.dumps, lambda f: copy.deepcopy({"model": [f]})):
        with pytest.raises(PackageError, match=rf"cannot be copied or pickled; call reflib\.load\('{f.path}'\) again"):
            act(f)


def test_with(plain: Path) -> None:
    x = torch.randn(2, 4)
    with reflib.load(plain) as f:
        y = f(x)
    assert y.shape == (2, 3)
    with pytest.raises(PackageError, match="was unloaded"):
        f(x)
    with pytest.raises(ZeroDivisionError), reflib.load(plain) as f:
        1 / 0  # noqa: B018
    with pytest.raises(PackageError, match="was unloaded"):
        f(x)


def test_unload_waits_for_the_gpu(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    f = reflib.load(plain)
    f.unload()
    assert not waited  # on a CPU there is nothing to wait for
    f = reflib.load(plain)
    f.device = torch.device("cuda", 1)
    f.unload()
    f.unload()
    assert waited == [torch.device("cuda", 1)]

    def fails(device: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    f = reflib.load(plain)
    f.device = torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="illegal memory"):
        f.unload()
    assert not f._state  # what can be given back is
    with pytest.raises(PackageError, match="was unloaded"):
        f(torch.randn(2, 4))


# -- load's own arguments -------------------------------------------------------------------------------------


def test_paths(plain: Path) -> None:
    class Where(os.PathLike):  # type: ignore[type-arg]
        def __fspath__(self) -> str:
            return str(plain)

    x = torch.randn(2, 4)
    want = reflib.load(plain)(x)
    for path in (str(plain), Where()):
        close(reflib.load(path)(x), want)
    for wrong in (3, None, b"m.reflib", [plain], torch.nn.Linear(1, 1)):
        with pytest.raises(PackageError, match=r"takes a str or a pathlib.Path, such as 'model.reflib'"):
            reflib.load(wrong)  # type: ignore[arg-type]


# -- torch.compile --------------------------------------------------------------------------------------------
@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """What Dynamo hands to ``backend``, as text."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["plain", "counts"])
def test_compiled_code_calls_it_as_it_is(name: str, compiled: list[str], request: pytest.FixtureRequest) -> None:
    """Dynamo looks into no function of a package, neither on its way in nor in its calls of ATen."""
    f = reflib.load(request.getfixturevalue(name))

    def model(x: Tensor) -> Tensor:
        if name == "plain":
            return f(x + 1) * 2
        args, kwargs = call(x + 1)
        return f(*args, **kwargs)["found"] * 2

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    x = torch.randn(2, 4)
    runs = torch.compile(model, backend=backend)
    if name == "counts":
        got, count = runs(x), f._state["n"].item()
        close(got, (x + 1 + (x + 1) * 3 + (x + 1) + count).unique() * 2)
        runs(x)
        assert f._state["n"].item() == count + 1 == 2
    else:
        close(runs(x), model(x))
        with torch.no_grad():
            close(torch.compile(f, backend=backend)(x), f(x))
    assert sorted(compiled) == ["<built-in function add>", "<built-in function mul>"]
    f.unload()
    with pytest.raises(PackageError, match="was unloaded"):
        runs(x)


def test_new_weights_in_a_loaded_package(tmp_path):
    """Copied in place: what shares memory changes together, the file does not; wrong ones change nothing."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.outer = torch.nn.Linear(4, 4)
            self.outer.weight = self.inner.weight
            self.register_buffer("shift", torch.randn(4))

        def forward(self, x):
            return self.outer(self.inner(x).relu()) + self.shift

    old, new, x = Tied(), Tied(), torch.randn(3, 4)
    mine = {"step": "12", "trained by": "me"}
    path = reflib.aot_compile(old, (x,), tmp_path / "m.reflib", "cpu", metadata=mine)
    for bad in ({"step": 12}, {1: "step"}, {"step": "1\n2"}, [("step", "12")]):
        with pytest.raises(reflib.OptionError, match="metadata= takes"):
            reflib.aot_compile(old, (x,), path, "cpu", metadata=bad)
    assert "trained by: me" in str(described(path))
    before = path.read_bytes()
    with reflib.load(path) as model, reflib.load(path) as other:
        assert model.get_metadata() == mine
        names = model.get_constant_fqns()
        wanted = {n: v for n, v in new.state_dict().items() if n in names}
        for bad, says in (
            ({"inner.wieght": x}, r"has no parameter or buffer 'inner.wieght'; it has (inner|outer)\.weight"),
            ({"shift": torch.ones(4)}, "also has .*check_full_update=False"),
            (wanted | {"shift": torch.ones(5)}, r"shift is a tensor \(4,\) of torch.float32; given is a tensor \(5,\)"),
            (wanted | {"shift": 3}, "given is 3"),
        ):
            with pytest.raises(reflib.PackageError, match=says):
                model.load_constants(bad)
        torch.testing.assert_close(model(x), old(x))
        once = {n: v for n, v in (*new.named_parameters(), *new.named_buffers()) if n in names}
        for given in (wanted, once):  # (without the second name of the tied weight)
            model.load_constants(given)
            torch.testing.assert_close(model(x), new(x))
            model.load_constants({n: v * 0 for n, v in given.items()})
        assert len(once) < len(wanted)
        model.load_constants(wanted)
        model.load_constants({"shift": torch.zeros(4)}, check_full_update=False)
        torch.testing.assert_close(model(x), new(x) - new.shift)
        torch.testing.assert_close(other(x), old(x))
    assert path.read_bytes() == before
