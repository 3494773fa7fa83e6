"""Packages whose manifest is wrong in one place, at random, all digests right: loaded and called, which must not end
the process. Prints what comes of each.

    python -m tests.spoiled_manifests PACKAGE FOLDER FIRST COUNT    the changes FIRST, FIRST + 1, ... (seeds)
"""

import copy
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

import reflib
from reflib.errors import PackageError
from tests import packages

NUMBERS = (0, 1, -1, 2, 3, 7, 64, 255, 2**31, 2**40, 2**62, -(2**63))


class Much(torch.nn.Module):
    """Of all that a manifest describes: kernels that index, ops in C and in Python, constants, a buffer that is written
    to, results that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(12, 6)
        self.inner = torch.nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
        self.calls.add_(1)
        y = torch.relu(self.inner(x + self.table(i))) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        values, order = torch.sort(y)
        counts = torch.histc(values, 4)
        return {"a": values + 1, "b": (order, "a result", 2.5, x.shape[0])}, counts, torch.linalg.svd(y)[1]


def arguments(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    return torch.randn(n, 6, generator=g), torch.randint(12, (n,), generator=g)


def make(path: Path) -> Path:
    torch.manual_seed(0)
    n = Dim("n", min=2, max=64)
    return reflib.aot_compile(Much().eval(), arguments(5), path, "cpu", dynamic_shapes=({0: n}, {0: n}))


def places(x: Any) -> Iterator[tuple[Any, Any]]:
    """(list or dict, key) of every value."""
    keys = list(x) if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ()
    for k in keys:
        yield x, k
        yield from places(x[k])


def change(manifest: dict[str, Any], rng: random.Random) -> str:
    """Spoil one value; what was done."""
    fields = [n for n in manifest if n not in ("format", "host", "system", "machine", "versions", "source")]
    everything = [(where, k) for n in fields for where, k in [(manifest, n), *places(manifest[n])]]
    heavy = [place for n in ("variants", "programs") for place in places(manifest[n])]
    where, key = rng.choice(rng.choice((everything, heavy)))
    old = where[key]
    others: list[Any] = [w[k] for w, k in everything if type(w[k]) is type(old) and w[k] != old]
    choices: list[Callable[[], Any]] = [lambda: copy.deepcopy(rng.choice(others))] if others else []
    if isinstance(old, bool):
        choices.append(lambda: not old)
    elif isinstance(old, int):
        choices += [lambda: rng.choice(NUMBERS), lambda: old + rng.choice((-1, 1)), lambda: -old, lambda: old * 2]
    elif isinstance(old, str):
        choices += [lambda: "", lambda: old[:-1], lambda: old + "0"]
    elif isinstance(old, list):
        choices += [lambda: [], lambda: old[:-1], lambda: old[1:], lambda: old + old[-1:], lambda: old[::-1],
                    lambda: rng.sample(old, len(old))] * 2  # fmt: skip
    elif isinstance(old, dict):
        choices += [lambda: {}, lambda: dict(list(old.items())[1:]), lambda: dict(zip(old, [*old.values()][::-1]))]
    choices.append(lambda: rng.choice((None, [], {}, "", 0, True, 1.5)))
    where[key] = rng.choice(choices)()
    return f"{key!r}: {json.dumps(old):.60} -> {json.dumps(where[key]):.60}"


def main(package: str, folder: str, first: str, count: str) -> None:
    found: Counter[str] = Counter()
    path = Path(folder) / "m.reflib"
    for seed in range(int(first), int(first) + int(count)):
        rng = random.Random(seed)
        said: list[str] = []
        packages.changed(Path(package), path, lambda m, _, rng=rng, said=said: said.append(change(m, rng)))
        print(seed, said[0], end=" ", flush=True)
        start = time.process_time()
        try:
            model = reflib.load(path)
        except PackageError as e:
            assert str(e).replace("\n", "").isprintable() and len(str(e)) < 3000, e
            outcome = "refused"
        else:
            outcome = "called"
            for n in (5, 40):
                try:
                    model(*arguments(n))
                except Exception as e:  # an op with other arguments, say: anything but the process's end
                    outcome = f"raises {type(e).__name__}"
            del model
        found[outcome] += 1
        print(outcome, flush=True)
        assert time.process_time() - start < 20
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
