"""A kernel's machine code for several architectures: one CUDA fatbin, or a member each.

A fatbin is NVIDIA's own container: the driver takes one apart by itself (``cuModuleLoadData``) and picks what suits the
GPU, machine code before assembly text. ``fatbinary``, which makes them, comes with the CUDA toolkit and with the PyPI
package nvidia-cuda-nvcc, but not with Triton; without it each image is a member, and the manifest says which is whose.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .. import cache
from ..errors import PackageError
from .architectures import EXACT, capability

SUFFIXES = {"cubin": "cubin", "ptx": "ptx", "hsaco": "hsaco"}


@dataclass(frozen=True)
class Image:
    """``kind``: cubin, ptx or hsaco. ``arch``: sm_90, gfx942."""

    kind: str
    arch: str
    data: bytes


def fatbinary() -> str | None:
    """The tool's path: $REFLIB_FATBINARY (empty: do without), else of the toolkit, else of the PyPI package."""
    named = os.environ.get("REFLIB_FATBINARY")
    if named is not None:
        return named or None
    homes = [Path(home, "bin", "fatbinary") for v in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(v))]
    found = shutil.which("fatbinary") or next((str(p) for p in homes if p.exists()), None)
    return found or _of_the_wheel()


def _of_the_wheel() -> str | None:
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in files if f.name == "fatbinary"), None)


def members(name: str, images: list[Image]) -> dict[str, bytes]:
    """By the member's name: a fatbin, if there is the tool for it and something of CUDA's; the rest one by one."""
    tool = fatbinary()
    cuda = [i for i in images if i.kind != "hsaco"]
    rest = [i for i in images if tool is None or i.kind == "hsaco"]
    out = {member(name, i, tool is not None): i.data for i in rest}
    if tool is not None and cuda:
        out[f"kernels/{name}.fatbin"] = fatbin(tool, cuda)
    return out


def member(name: str, image: Image, fat: bool) -> str:
    """Where an image of the kernel is."""
    if fat and image.kind != "hsaco":
        return f"kernels/{name}.fatbin"
    return f"kernels/{name}.{image.arch}.{SUFFIXES[image.kind]}"


def fatbin(tool: str, images: list[Image]) -> bytes:
    """The images in one container; equal images, equal bytes. Raises PackageError with what the tool said."""
    images = sorted(images, key=lambda i: (i.kind, i.arch))
    key = cache.key("fatbin", tool, os.stat(tool).st_mtime, [(i.kind, i.arch, i.data) for i in images])
    known = cache.read("fatbin", key)
    if known is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="reflib-fatbin-") as folder:
        words = [tool, "-64", "--create=all.fatbin"]
        for i in images:
            number = capability(i.arch)
            file = f"{i.arch}.{SUFFIXES[i.kind]}"
            Path(folder, file).write_bytes(i.data)
            exact = "a" if i.kind == "cubin" and number >= EXACT else ""
            kind = "elf" if i.kind == "cubin" else "ptx"
            words.append(f"--image3=kind={kind},sm={number}{exact},file={file}")
        try:
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except OSError as e:
            raise PackageError(f"cannot run {tool}: {e}; set REFLIB_FATBINARY to its path, or empty for none") from e
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise PackageError(f"fatbinary failed (exit {done.returncode})\n$ {' '.join(words)}\n{said}")
        data = Path(folder, "all.fatbin").read_bytes()
    cache.put("fatbin", key, data, ".fatbin")
    return data
