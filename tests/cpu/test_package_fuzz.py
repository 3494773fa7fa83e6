"""Damaged packages: each loads, or raises PackageError. In a child process, so that a crash is a failed test.

Half of the damage is random (the digests find it), half has its digests computed again: only what ``load`` itself looks
at finds that. A package is code, and code with a right digest is run: so changed bytes in what is mapped of a library
are not tried, only its header and its length. Such a library goes through all that comes before the system's loader.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.errors import PackageError
from reflib.package import load as loading
from tests import damaged

COUNT = int(os.environ.get("REFLIB_FUZZ") or 10_000)
WHERE = 400  # bytes of what a child says: what it is at
HEADER = 64  # bytes of an ELF file before its table of segments


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor, more: dict[str, Any]) -> Any:
        self.count.add_(1)
        return {"y": torch.relu(self.inner(x)), "n": [x.shape[0], more["z"].sort(0)[0]]}


def build(folder: Path) -> list[Path]:
    """One with an arm for CPUs alone, one with arms for GPUs too, and an image a member."""
    torch.manual_seed(0)
    os.environ["REFLIB_FATBINARY"] = ""
    args = torch.randn(5, 4), {"z": torch.randn(6), "k": 3}
    shapes = {"x": {0: torch.export.Dim("n", max=90)}, "more": {"z": None, "k": None}}
    kinds = {"cpu": ["cpu"], "gpus": ["sm_80", "sm_90", "cpu"]}
    return [reflib.aot_compile(Tiny(), args, folder / n, a, dynamic_shapes=shapes) for n, a in kinds.items()]


# -- damage of this file's own ------------------------------------------------------------------------
def tree(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The structure of the arguments or of the results, which is JSON inside the JSON."""
    parts = damaged.take_apart(data)
    program = parts.manifest["programs"][rng.choice(sorted(parts.manifest["programs"]))]
    key = rng.choice(["arguments_tree", "result_tree"])
    names = ["builtins.dict", "collections.defaultdict", "collections.namedtuple", "collections.deque", "torch.Size"]
    changed, what = damaged.mutate(json.loads(program[key]), rng)
    program[key] = json.dumps(changed)
    if rng.random() < 0.3:
        program[key] = program[key].replace("builtins.tuple", rng.choice(names))
    return damaged.with_manifest(parts, damaged.text(parts.manifest)), f"{key}: {what}"


def library(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The headers or the length of a library."""
    parts = damaged.take_apart(data)
    i = rng.choice([i for i, (name, _) in enumerate(parts.members) if name.endswith(".so")])
    name, content = parts.members[i]
    out = bytearray(content)
    kind = rng.choice(["bits", "bits", "cut", "grow", "text"])
    at = rng.randrange(HEADER + 10 * 56)
    if kind == "bits":
        flipped = bytes([out[at] ^ 1 << rng.randrange(8)]) + out[at + 1 : at + 4]
        out[at : at + 4] = rng.choice([bytes(4), b"\xff" * 4, rng.randbytes(4), flipped])
    elif kind == "cut":
        del out[rng.choice([at, rng.randrange(len(out)), len(out) - at]) :]
    elif kind == "grow":
        out += bytes(at)
    else:
        out = bytearray(rng.choice([c for n, c in parts.members if n != name]))
    parts.members[i] = (name, bytes(out))
    return damaged.put_together(parts), f"{name}: {kind} at {at}"


def damage(data: bytes, rng: random.Random, repair: bool) -> tuple[bytes, str]:
    kinds: list[Callable[..., tuple[bytes, str]]] = [tree, library]
    if repair and rng.random() < 0.4:
        return rng.choice(kinds)(data, rng)
    return damaged.damage(data, rng, repair)


# -- in the child -------------------------------------------------------------------------------------
def main(seeds: range, paths: list[str]) -> None:
    """Prints how many of which repair loaded, and every exception that is none of PackageError."""
    faulthandler.enable()
    torch.set_num_threads(1)
    packages = [Path(p).read_bytes() for p in paths]
    libraries = [c for p in packages for n, c in damaged.take_apart(p).members if n.endswith(".so")]
    really = loading._Libraries._open
    loading._Libraries._open = staticmethod(lambda name, data: really(name, trusted(bytes(data), libraries)))
    file = Path(paths[0]).with_name(f"damaged-{seeds.start}")
    count: Counter[str] = Counter()
    for seed in seeds:
        rng, repair = random.Random(seed), seed % 2 == 1
        data, what = damage(rng.choice(packages), rng, repair)
        at = f"{seed}: {what}".encode("utf-8", "replace")[:WHERE]
        os.pwrite(1, at.ljust(WHERE), 0)  # stays when this process dies
        file.unlink(missing_ok=True)
        file.write_bytes(data)
        try:
            reflib.load(file, device=rng.choice([None, "cpu"])).unload()
            count["loaded, repaired" if repair else "loaded"] += 1
        except PackageError as e:
            count["refused by load" if repair and str(file) not in str(e) else "refused"] += 1
        except BaseException as e:
            count[f"{type(e).__name__} {e} ({seed}: {what})"] += 1
    gc.collect()
    left = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line or "damaged" in line]
    os.lseek(1, WHERE, os.SEEK_SET)
    print(json.dumps([count, len(left), len(os.listdir("/proc/self/fd"))]), flush=True)


def trusted(data: bytes, libraries: list[bytes]) -> bytes:
    """``data``, if all that is mapped of it is a compiler's."""
    for known in libraries:
        n = min(len(data), len(known))
        if data[HEADER:n] == known[HEADER:n]:
            return data
    raise OSError("this code is nobody's")


# -- the tests ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    before = os.environ.get("REFLIB_FATBINARY")
    try:
        return build(tmp_path_factory.mktemp("fuzz"))
    finally:
        os.environ.pop("REFLIB_FATBINARY")
        if before is not None:
            os.environ["REFLIB_FATBINARY"] = before


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts what Linux says of a process")
def child(seeds: range, packages: list[Path], folder: Path, root: Path) -> Counter[str]:
    """What became of these, by a process of its own. It must end well, and hold nothing at its end."""
    said = folder / f"said-{seeds.start}"
    command = [sys.executable, "-c", "import sys; from tests.cpu.test_package_fuzz import main; "
               f"main({seeds!r}, sys.argv[1:])", *map(str, packages)]  # fmt: skip
    with said.open("w+b") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, cwd=root)
    text = said.read_text(errors="replace")
    why = done.stderr.decode(errors="replace")[-3000:]
    assert done.returncode == 0, f"at seed {text[:WHERE].strip()}: exit {done.returncode}\n{why}"
    count, mappings, files = json.loads(said.read_bytes()[WHERE:])
    assert mappings == 0 and files < 12, (count, mappings, files)
    return Counter(count)


def test_damaged_packages(packages: list[Path], tmp_path: Path, root: Path) -> None:
    """In two processes side by side: it is the longest of all tests."""
    halves = range(COUNT // 2), range(COUNT // 2, COUNT)
    count: Counter[str] = Counter()
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda seeds: child(seeds, packages, tmp_path, root), halves):
            count += found
    wrong = {k: n for k, n in count.items() if k not in ("loaded, repaired", "refused", "refused by load")}
    assert not wrong, "\n".join(wrong)
    assert sum(count.values()) == COUNT
    if COUNT >= 10_000:  # both happen, each often
        assert count["loaded, repaired"] > 300 and count["refused by load"] > 1000, count
