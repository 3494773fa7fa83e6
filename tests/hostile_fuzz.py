"""Random damage to a cache, and random calls. Prints each before it is tried: what ends the process
is the last line.

    python -m tests.hostile_fuzz caches FOLDER FIRST COUNT    caches in FOLDER; the seeds FIRST, FIRST + 1, ...
    python -m tests.hostile_fuzz calls FOLDER FIRST COUNT
"""

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import reflib
from tests import checking
from tests.cpu.test_package_refused import damage

Some = tuple[Any, ...]


# -- caches ---------------------------------------------------------------------------------------------
def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w, -1) + torch.sort(x)[0][:, :1]


def ways() -> list[Callable[..., Any]]:
    how: list[dict[str, Any]] = [{"wrapper": "cpp"}, {"autotune": "blocking"}]
    return [reflib.compile(program, dynamic=False, **options) for options in how]


def spoil(folder: Path, rng: random.Random) -> str:
    """One file of the cache damaged, gone, or replaced by something else."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    path, other = rng.sample(files, 2)
    kind = rng.choice(("damage", "damage", "damage", "empty", "gone", "folder", "pipe", "link", "swap", "foreign"))
    data = path.read_bytes()
    if kind in ("gone", "folder", "pipe", "link"):
        path.unlink()
    if kind == "damage":
        new, how = damage(b"PK" + data, rng)
        path.write_bytes(new[2:])
        kind = how
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(rng.choice(("nowhere", str(other), "/dev/zero", str(path))))
    elif kind == "swap":
        path.write_bytes(other.read_bytes())
    elif kind == "foreign":
        path.write_bytes(rng.randbytes(300))
    return f"{path.relative_to(folder)}: {kind}"


def caches(folder: Path, seeds: range) -> None:
    torch.set_num_threads(1)
    os.environ["REFLIB_CACHE_DECISIONS"] = "1"
    x, w = torch.randn(17, 9), torch.randn(9, 13)
    want, whole = program(x, w), folder / "whole"
    os.environ["REFLIB_CACHE_DIR"] = str(whole)
    for f in ways():
        torch.testing.assert_close(f(x, w), want)
    for n in seeds:
        cache = folder / f"spoiled{n}"
        shutil.copytree(whole, cache)
        print(n, spoil(cache, random.Random(n)), flush=True)
        if os.fork() == 0:  # what a damaged file does to a process is seen in one that loaded nothing of it
            try:
                os.environ["REFLIB_CACHE_DIR"] = str(cache)
                torch._dynamo.reset()
                for f in ways():
                    torch.testing.assert_close(f(x, w), want)
                code = 0
            except BaseException as e:
                print(f"{type(e).__name__}: {e}", flush=True)
                code = 1
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.wait()[1])
        assert code == 0, f"seed {n}: {code}"
        shutil.rmtree(cache)


# -- calls ----------------------------------------------------------------------------------------------
def updated(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.mul_(2)
    return x + y, x[..., :1]


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    lambda x, y: x * 2 + y, lambda x, y: (x + y).sum(-1), updated, lambda x, y: torch.softmax(x, -1) * y,
    lambda x, y: F.gelu(x) @ y.mT, lambda x, y: torch.cat([x, y], -1), lambda x, y: (x.flatten(), y.abs().max()),
    lambda x, y: torch.where(x > y, x, y).cumsum(0), lambda x, y: x.to(y.dtype) // (y.abs() + 1),
)  # fmt: skip
DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
          torch.complex64)  # fmt: skip


def misaligned(x: torch.Tensor) -> torch.Tensor:
    new = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return new.copy_(x)


CHANGES: dict[str, Callable[[random.Random, Some], Any]] = {
    "transposed": lambda r, a: (a[0].mT, *a[1:]), "both transposed": lambda r, a: [x.mT for x in a],
    "strided": lambda r, a: (a[0].repeat(1, 2)[:, ::2], *a[1:]), "misaligned": lambda r, a: (misaligned(a[0]), *a[1:]),
    "expanded": lambda r, a: (a[0][:1].expand(a[0].shape), *a[1:]), "a row": lambda r, a: (a[0], a[1][:1]),
    "no rows": lambda r, a: [x[:0] for x in a], "one element": lambda r, a: [x[:1, :1] for x in a],
    "a number": lambda r, a: (a[0], 2.5), "no dimensions": lambda r, a: (a[0], a[1][0, 0]),
    "dtype": lambda r, a: (a[0].to(r.choice(DTYPES)), a[1]), "dtypes": lambda r, a: [x.to(r.choice(DTYPES)) for x in a],
    "negated": lambda r, a: (torch._neg_view(a[0]), a[1]), "the same": lambda r, a: (a[0], a[0]),
    "views of one": lambda r, a: (a[0][:-1], a[0][1:]), "more dimensions": lambda r, a: (a[0][None], a[1]),
    "parameter": lambda r, a: (torch.nn.Parameter(a[0]), a[1]), "longer": lambda r, a: [x.repeat(3, 1) for x in a],
    "other sizes": lambda r, a: (a[0], a[1][:, :-1]), "None": lambda r, a: (a[0], None), "missing": lambda r, a: a[:1],
    "too many": lambda r, a: (*a, 1), "a list": lambda r, a: (a[0].tolist(), a[1]), "text": lambda r, a: ("x", a[1]),
    "not finite": lambda r, a: (a[0] / 0, a[1]), "conjugated": lambda r, a: (torch.complex(*a).conj(), a[1]),
    "imaginary part": lambda r, a: (torch.complex(*a).conj().imag, a[1]), "large": lambda r, a: [x * 1e30 for x in a],
    "grad": lambda r, a: [x.clone().requires_grad_() for x in a], "sparse": lambda r, a: (a[0].to_sparse(), a[1]),
}  # fmt: skip


def calls(folder: Path, seeds: range) -> None:
    """Where eager raises, the compiled call raises; elsewhere it is right."""
    torch.set_num_threads(1)
    for n in seeds:
        rng = random.Random(n)
        torch.manual_seed(n)
        which, wrapper, dynamic = rng.randrange(len(FUNCTIONS)), rng.choice(("python", "cpp")), rng.choice((None, True))
        torch._dynamo.reset()
        fn = FUNCTIONS[which]
        f = reflib.compile(fn, wrapper=wrapper, dynamic=dynamic)
        for name in ("", *rng.sample(sorted(CHANGES), 5)):
            args: Some = tuple(torch.randn(6, 6) for _ in range(2))
            args = tuple(CHANGES[name](rng, args)) if name else args
            print(n, which, wrapper, dynamic, name, flush=True)
            eager, got = checking.call(fn, args), checking.call(f, args)
            if eager.error is not None:
                assert got.error is not None, f"eager raises {eager.error!r}"
                continue
            problems = checking.wrong(got, eager, checking.call(fn, args, wide=True))
            if problems:  # PyTorch's own?
                torch._dynamo.reset()
                theirs = checking.call(torch.compile(fn, backend="aot_eager", dynamic=dynamic), args)
                assert checking.wrong(theirs, eager), problems


if __name__ == "__main__":
    what, where, first, count = sys.argv[1:]
    {"caches": caches, "calls": calls}[what](Path(where), range(int(first), int(first) + int(count)))
