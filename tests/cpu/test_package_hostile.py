"""Packages that somebody made to do harm, with digests that are right: refused, and at little cost."""

import hashlib
import io
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import reflib
from reflib.errors import PackageError
from reflib.package import archive
from reflib.package.export_cpp import export_cpp
from reflib.package.inspect import inspect
from tests import forking, packages, spoiled_manifests

Manifest = dict[str, Any]
MANY = 9_000


class Sorts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(torch.relu(self.inner(x)))[0] + 1


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("hostile") / "small.reflib"
    shapes = ({0: Dim("n", min=2, max=64)},)
    return reflib.aot_compile(Sorts().eval(), (torch.randn(5, 6),), path, "cpu", dynamic_shapes=shapes)


def variant(m: Manifest) -> Manifest:
    return m["variants"][0]


def program(m: Manifest) -> Manifest:
    return m["programs"]["cpu"]


def size(m: Manifest) -> list[Any]:
    """[1, the argument's number of rows]: a term of an expression."""
    return program(m)["arguments"][0]["tensor"]["shape"][0]["value"][0]


def refused(path: Path, match: str, folder: Path) -> None:
    """By all that read packages; no control character in the message, nothing written."""
    for use in (reflib.load, inspect, lambda p: export_cpp(p, folder / "a" / "project")):
        with pytest.raises(PackageError, match=match) as e:
            use(path)
        assert all(c.isprintable() or c == "\n" for c in str(e.value))
    assert not (folder / "a").exists() and not (folder / "project").exists()


# -- names, and what fits together ----------------------------------------------------------------------
PLACES: dict[str, Callable[[Manifest, str], Any]] = {
    "arch": lambda m, bad: variant(m).update(arch=bad),
    "made_for": lambda m, bad: variant(m).update(made_for=bad),
    "graph": lambda m, bad: variant(m).update(graph=bad),
    "text": lambda m, bad: variant(m).update(text=bad),
    "kernel": lambda m, bad: variant(m)["kernels"][0].update(name=bad),
    "symbol": lambda m, bad: variant(m)["kernels"][0].update(symbol=bad),
    "image": lambda m, bad: variant(m)["kernels"][0].update(image=bad),
    "functions": lambda m, bad: variant(m).update(functions=[bad]),
    "C functions": lambda m, bad: variant(m).update(symbols=[bad]),
    "programs": lambda m, bad: m["programs"].update({bad: program(m)}),
    "size": lambda m, bad: program(m)["arguments"][0]["tensor"]["shape"].__setitem__(
        0, {"_": "atom", "value": ["sym", bad, 0, None, 3]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_names_that_lead_elsewhere(place: str, package: Path, tmp_path: Path) -> None:
    for i, bad in enumerate(("../../project", "a\x1b[2J", 'x"); system("true', "a b")):
        path = packages.changed(package, tmp_path / f"{i}.reflib", lambda m, _, bad=bad: PLACES[place](m, bad))
        refused(path, "none of reflib's|no name of a size|not have", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["versions"].update(reflib="\x1b[2J"),
        lambda m: m["libraries"].append({"op": "a.b\x9b.c", "module": "", "file": "", "symbol": ""}),
        lambda m: variant(m)["kernels"][0].update(threads="1}, evil"),
        lambda m: variant(m)["kernels"][0].update(shared=2**70),
        lambda m: variant(m)["kernels"][0].update(early=1),
        lambda m: variant(m).update(kernels={}),
        lambda m: variant(m).update(unheard_of=1),
        lambda m: variant(m).update(program="nobody"),
        lambda m: variant(m).update(constants=[["nobody", "cpu"]]),
        lambda m: m.update(variants=[]),
        lambda m: m.update(variants=m["variants"] * 2),
        lambda m: m.update(weights=5),
        lambda m: m.pop("programs"),
        lambda m: program(m).update(devices=[]),
        lambda m: program(m).update(in_spec="[1, {}]"),
        lambda m: program(m).update(in_spec=nested(60)),
        lambda m: program(m)["ranges"].update({f"s{i}": [0, 1] for i in range(10_001)}),
        *(lambda m, i=i, bad=bad: size(m).__setitem__(i, bad) for i, bad in ((0, "5"), (0, [1]), (1, "x"), (1, None))),
        *(lambda m, i=i: size(m)[1].__setitem__(i, "2") for i in (2, 3, 4)),
        lambda m: size(m).__setitem__(1, ["//", 5, 7]),
        lambda m: variant(m).update(symbols=[]),
        lambda m: variant(m).update(functions=variant(m)["functions"][:-1]),
        lambda m: variant(m).update(objects=variant(m)["objects"] + [1]),
        lambda m: variant(m)["kernels"].pop(),
        lambda m: variant(m).update(table=["nobody", *variant(m)["table"]]),
        lambda m: program(m).update(outputs=[]),
        lambda m: program(m).update(names=[""]),
        lambda m: variant(m)["kernels"][0].update(name="nobody"),
        lambda m: variant(m)["kernels"][0].update(symbol="nobody"),
        lambda m: variant(m).update(kernels=variant(m)["kernels"] * 2),
        lambda m: m["spans"][0].update(start=-64),
        lambda m: m.update(spans=m["spans"] * 2),
        lambda m: m["weights"][0].update(shape=[1 << 40]),
        lambda m: m["weights"][0].update(strides=[-1]),
        lambda m: m["weights"][0].update(dtype="int4", span=0),
        lambda m: m["weights"][0].update(span=77),
    ],
)
def test_manifests_that_do_not_fit(change: Callable[[Manifest], Any], package: Path, tmp_path: Path) -> None:
    path = packages.changed(package, tmp_path / "m.reflib", lambda m, _: change(m))
    start = time.process_time()
    with pytest.raises(PackageError, match=r"m\.reflib: (its|the)") as e:
        reflib.load(path)
    assert str(e.value).isprintable() and time.process_time() - start < 5


def test_spoiled_manifests_fuzz(tmp_path: Path) -> None:
    """One value changed at random: refused, or loaded and called, and never the end of the process."""
    package, count = spoiled_manifests.make(tmp_path / "much.reflib"), int(os.environ.get("REFLIB_FUZZ") or 60)
    seed = int(os.environ.get("REFLIB_FUZZ_SEED") or 0)
    for first in range(seed, seed + count, 500):
        words = (str(package), str(tmp_path), str(first), str(min(500, seed + count - first)))
        code, out, errors = forking.forked("tests.spoiled_manifests", *words, OMP_NUM_THREADS="1")
        assert code == 0, out[-2000:] + errors[-3000:]
        found = json.loads(out.splitlines()[-1])
        assert found["refused"] > sum(found.values()) / 3 and found["called"]


def nested(deep: int) -> str:
    node: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    for _ in range(deep):
        node = {"type": "builtins.tuple", "context": "null", "children_spec": [node]}
    return json.dumps([1, node])


def test_names_that_a_terminal_would_obey_are_not_packed(tmp_path: Path) -> None:
    model = Sorts().eval()
    model.register_buffer("a\x1b[2J", torch.ones(4))
    model.forward = lambda x: x + getattr(model, "a\x1b[2J")  # type: ignore[method-assign]
    with pytest.raises(PackageError, match="control characters"):
        reflib.aot_compile(model, (torch.randn(5, 4),), tmp_path / "m.reflib", "cpu")


# -- costs ----------------------------------------------------------------------------------------------
def test_ranges_by_arguments_cost_little(package: Path, tmp_path: Path) -> None:
    def grown(m: Manifest, _: Any) -> None:
        p = program(m)
        first = p["arguments"][0]
        p["ranges"] |= {f"s9{i}": [0, 5] for i in range(MANY)}
        p["arguments"] = [first] + [{**first, "name": f"x{i}", "tensor": None, "value": 3} for i in range(MANY)]
        p["inputs"] = [n for n in p["inputs"] if n] + [""] * (MANY + 1)
        p["devices"] = ["cpu"] * len(p["inputs"])

    path = packages.changed(package, tmp_path / "m.reflib", grown)
    start = time.process_time()
    assert "2 to 64" in inspect(path).inputs[0][3]
    assert time.process_time() - start < 20  # (it was minutes)


def written(path: Path, text: bytes, **members: bytes) -> Path:
    """A package with this text for a manifest, which may be anything."""
    out = io.BytesIO()
    with archive.zipfile.ZipFile(out, "w", archive.zipfile.ZIP_DEFLATED) as z:
        for name, data in {**members, archive.MANIFEST: text}.items():
            z.writestr(name, data)
        z.comment = archive.MARK + hashlib.sha256(text).hexdigest().encode()
    path.write_bytes(out.getvalue())
    return path


@pytest.mark.parametrize(
    "text, says",
    [
        (b'{"entries": [' + b"[" * 3_000_000, "more than 2,000,000 values"),
        (b'{"entries": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "none of reflib's .Recursion"),
        (b" " * (archive.TEXT + 1), "altered"),
        (b"[]", "none of reflib's"),
        (b"{", "none of reflib's"),
        (b'{"format": "3", "entries": []}', "none of reflib's"),
        (b'{"format": 4}', "none of reflib's"),
        (b'{"format": 4, "entries": [{"name": "a"}]}', "none of reflib's"),
        (b'{"format": 99, "versions": {"reflib": "\\u001b[2J"}}', "newer reflib .version .\\[2J"),
    ],
)
def test_texts_that_are_no_manifests(text: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=says) as e:
        archive.open(written(tmp_path / "m", text))
    assert str(e.value).isprintable()


def entry(name: str, offset: int, size: int, unpacked: int, data: bytes = b"") -> Manifest:
    sha = hashlib.sha256(data[offset : offset + size]).hexdigest()
    return {"name": name, "offset": offset, "size": size, "unpacked": unpacked, "sha256": sha}


@pytest.mark.parametrize(
    "entries, says",
    [
        ([entry("a", 0, 10**9, 5)], "not within the file"),
        ([entry("a", -5, 3, 5)], "not within the file"),
        ([entry(f"a{i}", 0, 100, 5) for i in range(100)], "overlap"),
        ([entry("a", 0, 1, 5), entry("a", 1, 1, 5)], "overlap"),
        ([entry("a", 0, 1, archive.CODE), entry("b", 1, 1, 1)], "a package has no more than"),
        ([entry("../a", 0, 1, 1)], "no plain relative path"),
    ],
)
def test_members_that_cost_much(entries: list[Manifest], says: str, tmp_path: Path) -> None:
    text = json.dumps({"format": archive.FORMAT, "entries": entries}).encode()
    with pytest.raises(PackageError, match=says):
        archive.open(written(tmp_path / "m", text))


def test_members_that_unpack_to_more_or_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for says in (0, 5, (50 << 20) - 1, (50 << 20) + 1):
        monkeypatch.setattr(archive, "asdict", lambda e, says=says: {**asdict(e), "unpacked": says})
        file = archive.open(archive.write(tmp_path / "m", {}, {"code": bytes(50 << 20)}))
        with pytest.raises(PackageError, match="does not unpack to"):
            file.view("code")


# -- somebody writes to the file while it is used -------------------------------------------------------
def overwrite(path: Path, data: bytes) -> None:
    with path.open("r+b") as f:  # (the same file: a mapping sees it)
        f.write(data)


def test_code_that_is_written_over_after_the_check(package: Path, tmp_path: Path) -> None:
    data = package.read_bytes()
    path = tmp_path / "m.reflib"
    path.write_bytes(data)
    file = archive.open(path)
    overwrite(path, bytes(len(data)))
    for name in file.names:
        if not archive.is_weights(name):
            with pytest.raises(PackageError, match="is altered"):
                file.view(name)


def test_with_a_digest_the_file_is_read_once(package: Path, tmp_path: Path) -> None:
    data = package.read_bytes()
    path = tmp_path / "m.reflib"
    path.write_bytes(data)
    file = archive.open(path, sha256=hashlib.sha256(data).hexdigest())
    want = {n: bytes(file.view(n)) for n in file.names}
    rng = random.Random(3)
    overwrite(path, rng.randbytes(len(data)))
    assert {n: bytes(file.view(n)) for n in file.names} == want
    os.truncate(path, 10)
    assert {n: bytes(file.view(n)) for n in file.names} == want
    path.write_bytes(data)
    x = torch.randn(7, 6)
    f = reflib.load(path, sha256=hashlib.sha256(data).hexdigest())
    before = f(x)
    overwrite(path, rng.randbytes(len(data)))
    torch.testing.assert_close(f(x), before)
