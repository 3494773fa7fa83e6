"""A kernel's machine code for several architectures: one CUDA fatbin, or one member per architecture.

A fatbin is NVIDIA's container: the driver selects the image for the GPU (``cuModuleLoadData``). ``fatbinary``, which
makes them, comes with the CUDA toolkit and with the PyPI package nvidia-cuda-nvcc, but not with Triton; without it each
image is a member, and the manifest names the one of each variant.

Assembly text is always a member of its own. The driver prefers machine code to text, even if the GPU has too little
shared memory for it: from a fatbin with both, an RTX 4090 would get sm_80's code where ``variant_for`` chooses the
text, which belongs to another program with other launches.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..errors import PackageError
from .architectures import EXACT, capability


@dataclass(frozen=True)
class Image:
    """``kind``: cubin, ptx or hsaco. ``arch``: sm_90, gfx942."""

    kind: str
    arch: str
    data: bytes


def fatbinary() -> str | None:
    """The tool's path: $REFLIB_FATBINARY (empty: none), else the toolkit's, else the PyPI package's."""
    named = os.environ.get("REFLIB_FATBINARY")
    if named is not None:
        return named or None
    homes = [Path(home, "bin", "fatbinary") for v in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(v))]
    found = shutil.which("fatbinary") or next((str(p) for p in homes if p.exists()), None)
    if found is None:
        with contextlib.suppress(metadata.PackageNotFoundError):
            files = metadata.files("nvidia-cuda-nvcc") or []
            found = next((str(f.locate()) for f in files if f.name == "fatbinary"), None)
    return found


def members(name: str, images: list[Image]) -> dict[str, bytes]:
    """By member: a fatbin of all cubins, if there are any and the tool exists; one member per other image."""
    tool = fatbinary()
    cuda = [i for i in images if i.kind == "cubin"]
    rest = [i for i in images if tool is None or i.kind != "cubin"]
    out = {member(name, i, tool is not None): i.data for i in rest}
    if tool is not None and cuda:
        out[f"kernels/{name}.fatbin"] = fatbin(tool, cuda)
    return out


def member(name: str, image: Image, fat: bool) -> str:
    """The member that holds an image of the kernel."""
    if fat and image.kind == "cubin":
        return f"kernels/{name}.fatbin"
    return f"kernels/{name}.{image.arch}.{image.kind}"


def fatbin(tool: str, images: list[Image]) -> bytes:
    """Cubins in one container; equal images, equal bytes. Raises PackageError with the tool's output."""
    with tempfile.TemporaryDirectory(prefix="reflib-fatbin-") as folder:
        words = [tool, "-64", "--create=all.fatbin"]
        for i in sorted(images, key=lambda i: i.arch):
            Path(folder, f"{i.arch}.cubin").write_bytes(i.data)
            exact = "a" if capability(i.arch) >= EXACT else ""
            words.append(f"--image3=kind=elf,sm={capability(i.arch)}{exact},file={i.arch}.cubin")
        try:
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except OSError as e:
            raise PackageError(f"cannot run {tool}: {e}; set REFLIB_FATBINARY to its path, or empty for none") from e
        made = Path(folder, "all.fatbin")
        if done.returncode or not made.is_file():
            said = (done.stderr or done.stdout).strip() or "(no output)"
            remedy = "set REFLIB_FATBINARY to the path of another, or empty to do without"
            what = f"fatbinary failed (exit {done.returncode}); {remedy}"
            raise PackageError(f"{what}\n$ {shlex.join(words)}\n{said}")
        return made.read_bytes()
