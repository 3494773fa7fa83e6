"""A kernel's images in a file: what goes into a fatbin, and what is said of a tool that fails."""

from pathlib import Path

import pytest

from reflib.errors import PackageError
from reflib.package import images
from reflib.package.images import Image

CODE = [Image("cubin", "sm_80", b"80"), Image("cubin", "sm_90", b"90"), Image("ptx", "sm_80", b".version 7.0")]


def tool(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fatbinary on PATH, and no other."""
    path = folder / "fatbinary"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.delenv("REFLIB_FATBINARY", raising=False)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return path


def test_text_stays_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would take sm_80's code of a fatbin on every 8.x, whether or not its shared memory is there."""
    tool(tmp_path, 'echo "$@" > all.fatbin', monkeypatch)
    found = images.members("k0", [*CODE, Image("hsaco", "gfx942", b"amd")])
    assert sorted(found) == ["kernels/k0.fatbin", "kernels/k0.gfx942.hsaco", "kernels/k0.sm_80.ptx"]
    words = found["kernels/k0.fatbin"].decode()
    assert "kind=elf,sm=80,file=sm_80.cubin" in words and "sm=90a" in words and "ptx" not in words
    assert {images.member("k0", i, True) for i in CODE} == {"kernels/k0.fatbin", "kernels/k0.sm_80.ptx"}
    assert "kernels/k0.fatbin" not in images.members("k0", CODE[2:])
    monkeypatch.setenv("REFLIB_FATBINARY", "")
    assert sorted(images.members("k0", CODE)) == sorted(images.member("k0", i, False) for i in CODE)


@pytest.mark.parametrize("script, says", [
    ("echo 'no such option' >&2; exit 7", r"exit 7\)"), ("echo no such option; exit 1", r"exit 1\)"),
    ("echo no such option", r"exit 0\)"),
])  # fmt: skip
def test_a_tool_that_fails(script: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tool(tmp_path, script, monkeypatch)
    with pytest.raises(PackageError, match=says) as e:
        images.members("k0", CODE)
    message = str(e.value)
    assert f"\n$ {path} -64 --create=all.fatbin" in message and message.endswith("\nno such option")
    assert "set REFLIB_FATBINARY to the path of another, or empty to do without" in message


def test_a_tool_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tool(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setenv("REFLIB_FATBINARY", str(tmp_path))  # a folder
    with pytest.raises(PackageError, match=r"cannot run .*: .*REFLIB_FATBINARY to its path, or empty"):
        images.members("k0", CODE)
    gone.unlink()
    monkeypatch.setenv("REFLIB_FATBINARY", str(gone))
    with pytest.raises(PackageError, match=r"cannot run .*fatbinary: .*REFLIB_FATBINARY to its path, or empty"):
        images.members("k0", CODE)
