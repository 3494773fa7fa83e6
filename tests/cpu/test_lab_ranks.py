"""Ranks that a notebook starts, and the figure of many simulated ones."""

import os
import pickle
import time
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist

from reflib import lab
from reflib.autotune import by_value
from reflib.errors import LabError

c = torch.ops._c10d_functional


def in_a_cell(text: str) -> dict[str, Any]:
    """Functions as in a notebook: in ``__main__``, with no file."""
    names: dict[str, Any] = {"__name__": "__main__", "c": c, "dist": dist, "torch": torch, "os": os, "time": time}
    exec(text, names)
    return names


def test_a_cells_function_runs_on_all_ranks_together(two: Any) -> None:
    cell = in_a_cell(
        "factor = 10\n"
        "def summed(x):\n    return c.wait_tensor(c.all_reduce(x * factor, 'sum', '0'))\n"
        "def go(n):\n"
        "    return dist.get_rank(), torch.compile(summed, backend='reflib')(torch.ones(n))[0].item()\n"
    )
    assert two.run(cell["go"], 4) == [(0, 20.0), (1, 20.0)]


def test_modules_that_are_no_plain_modules_are_sent_by_name() -> None:
    names = {"__name__": "__main__", "ops": torch.ops, "c": c, "config": torch._inductor.config}
    exec("def f():\n    return ops, c, config", names)
    function = pickle.loads(by_value.packed(names["f"], "f")[0])
    assert function() == (torch.ops, c, torch._inductor.config)


def test_what_goes_wrong_on_a_rank_is_its_result(two: Any) -> None:
    cell = in_a_cell(
        "def fails():\n    if dist.get_rank():\n        raise ValueError('no')\n    return 1\n"
        "def waits():\n    if not dist.get_rank():\n        dist.barrier()\n"
        "def ends():\n    if dist.get_rank():\n        os._exit(1)\n"
        "def sleeps():\n    time.sleep(100 * dist.get_rank())\n"
    )
    assert two.run(cell["fails"]) == [1, "ValueError: no"]
    first, second = two.run(cell["waits"], timeout=1.0)
    assert "RuntimeError" in first and second is None
    assert two.run(cell["sleeps"], limit=2.0)[1] == "killed: it was not done in time"
    assert two.run(cell["ends"]) == [None, "its process has ended"]  # (a new one)


def test_no_rank_begins_before_all_have_joined(two: Any) -> None:
    """One that is done at once leaves, and those that still connect to it would end."""
    cell = in_a_cell(
        "def slow():\n"
        "    init = dist.init_process_group\n"
        "    def slowly(*args, **more):\n"
        "        dist.init_process_group = init\n"
        "        init(*args, **more)\n"
        "        time.sleep(0.5)\n"
        "        dist.joined = time.monotonic()\n"
        "    if not dist.get_rank():\n        dist.init_process_group = slowly\n"
        "def times():\n    return getattr(dist, 'joined', None), time.monotonic()\n"
    )
    two.run(cell["slow"])
    (joined, _), (_, began) = two.run(cell["times"])
    assert joined is not None and began > joined


def test_without_gpus_ranks_are_on_the_cpu() -> None:
    if torch.cuda.device_count() < 2:
        assert lab.ranks(2, "cuda").device == "cpu"


def lines(**more: Any) -> list[dict[str, Any]]:
    ways = {"alone": [4.0, 4.0], "met": [4.0, None]}
    return [
        {"way": way, "ranks": n, "seconds": s, "note": "a note" if n > 1 else "", "failures": f, **more}
        for f in ("0%", "2%")
        for way, found in ways.items()
        for n, s in zip((1, 1000), found)
    ]


def test_the_figure_says_what_is_chosen() -> None:
    lab.setup(device="cpu", quiet=True)
    found = lab.ranks_explorer(lines(), caption="c")
    controls = {p["name"]: p.get("bind") for p in found.spec["params"]}
    assert controls["step"]["max"] == 2 and controls["failures"]["options"] == ["0%", "2%"]
    assert '"met: never ends, a note"' in next(p["expr"] for p in found.spec["params"] if p["name"] == "says")
    assert "With failures 2%, at 1,000 ranks: alone: 4.00 s, a note; met: never ends, a note." in found.alt
    with pytest.raises(LabError, match="one line per number of ranks"):
        lab.ranks_explorer(lines()[:-1], caption="c")
