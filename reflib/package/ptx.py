"""Assembly text for old drivers.

PTX text begins with its version of the language, and a driver refuses a version newer than its own. Triton writes the
newest version of its ptxas (8.7 or later: a driver of 2025), whatever the text uses. Most kernels of sm_80 need 7.0 to
7.4 (2020, 2021). ptxas refuses text that uses more than its version has, so the oldest possible version is the first
that ptxas accepts, if the machine code is the same as from Triton's own text.
"""

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from .. import cache
from ..logs import get as logger
from .architectures import DRIVERS

OLDEST = 70  # of sm_80
_VERSION = re.compile(r"^(\s*\.version\s+)(\d+)\.(\d+)", re.M)


def for_old_drivers(text: str, arch: str) -> str:
    """``text`` with the oldest possible version; unchanged without a ptxas, or if no older version is possible."""
    tool, m = ptxas(), _VERSION.search(text)
    if tool is None or m is None:
        return text
    key = cache.key("ptx", text, arch, tool, os.stat(tool).st_mtime)
    known = cache.read("ptx", key)
    if known is not None:
        return known.decode()
    own = int(m[2]) * 10 + int(m[3])
    code = assembled(tool, text, arch)
    if code is None:
        what = "ptxas cannot assemble a kernel: its PTX keeps Triton's version, and may need a new driver"
        logger("package").warning("%s; TRITON_PTXAS_PATH names another\n%s", what, _assembled(tool, text, arch)[1])
    older = (with_version(text, isa) for isa, _, _ in DRIVERS if OLDEST <= isa < own)
    found = text if code is None else next((t for t in older if assembled(tool, t, arch) == code), text)
    cache.put("ptx", key, found.encode(), ".ptx")
    return found


def with_version(text: str, version: int) -> str:
    return _VERSION.sub(lambda m: f"{m[1]}{version // 10}.{version % 10}", text, count=1)


def assembled(tool: str, text: str, arch: str) -> bytes | None:
    """The machine code, or None where ptxas refuses."""
    return _assembled(tool, text, arch)[0]


def _assembled(tool: str, text: str, arch: str) -> tuple[bytes | None, str]:
    """The machine code, if any; the command and its output."""
    with tempfile.TemporaryDirectory(prefix="reflib-ptx-") as folder:
        Path(folder, "k.ptx").write_text(text)
        words = [tool, "--gpu-name", arch, "-o", "k.cubin", "k.ptx"]
        code = None
        try:
            done = subprocess.run(
                words, cwd=folder, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
            )
            said = f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[:1000]}"
            if not done.returncode:
                code = Path(folder, "k.cubin").read_bytes()
        except OSError as e:
            said = str(e)
        return code, f"$ {shlex.join(words)}\n{said}"


@functools.cache
def ptxas() -> str | None:
    """The assembler that Triton uses, without importing Triton: $TRITON_PTXAS_PATH, else its own; else the system's."""
    named = os.environ.get("TRITON_PTXAS_PATH")
    spec = importlib.util.find_spec("triton")
    homes = list(spec.submodule_search_locations or ()) if spec else []
    found = [Path(p) for p in ([named] if named else []) + [f"{h}/backends/nvidia/bin/ptxas" for h in homes]]
    return next((str(p) for p in found if p.is_file()), None) or shutil.which("ptxas")
