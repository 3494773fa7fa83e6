"""Packages that somebody writes to while they are used, and texts that are no manifests."""

import hashlib
import io
import os
import random
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import reflib
from reflib.errors import PackageError
from reflib.package import archive


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
        (b'{"entries": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "none of reflib's .Recursion"),
        (b"[]", "none of reflib's"),
        (b"{", "none of reflib's"),
        (b'{"format": "3", "entries": []}', "none of reflib's"),
        (b'{"format": 3}', "none of reflib's"),
        (b'{"format": 3, "entries": [{"name": "../a"}]}', "no plain relative path"),
        (b'{"format": 99, "versions": {"reflib": "\\u001b[2J"}}', "newer reflib .version .\\[2J"),
    ],
)
def test_texts_that_are_no_manifests(text: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=says) as e:
        archive.open(written(tmp_path / "m", text))
    assert str(e.value).isprintable()


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
