"""Messages stay short, however long the values are that they show."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.errors import ReflibError
from reflib.options import Options

LONG = "x" * 70_000
HUGE: dict[str, Any] = {
    "text": LONG, "list": list(range(20_000)), "texts": [LONG], "dict": {LONG: LONG}, "number": -(10**4000),
    "tensor": torch.arange(30_000.0), "tensors": [torch.ones(100, 100)] * 40, "function": lambda: None,
    "class": type("C", (), {"__repr__": lambda self: LONG})(),
}  # fmt: skip


@torch.library.custom_op("reflib_messages::op", mutates_args=())
def op(x: torch.Tensor, n: int = 3) -> torch.Tensor:
    return x * n


@op.register_fake
def _(x: torch.Tensor, n: int = 3) -> torch.Tensor:
    return torch.empty_like(x)


def add(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def registered(**given: Any) -> None:
    reflib.register_custom_op_autotuning(op, **({"configs": [reflib.CustomOpConfig(n=3)]} | given))


X = torch.ones(3)
USES: dict[str, Callable[[Any], Any]] = {
    **{f"Options({f.name})": lambda v, n=f.name: Options(**{n: v}) for f in fields(Options)},
    "unknown": lambda v: Options.make({str(v): 1}),
    "mode": lambda v: Options.make(mode=v),
    "c_shims name": lambda v: Options(c_shims={str(v): "int32_t f(AtenTensorHandle x)"}),
    "c_shims text": lambda v: Options(c_shims={"a::b": str(v)}),
    "lookup_table": lambda v: Options(lookup_table={str(v): {str(v): str(v)}}),
    "compile": lambda v: reflib.compile(add, dynamic=False, **{"wrapper": v})(X),
    "explain until": lambda v: reflib.explain(add, X, target=v),
    "candidate": lambda v: reflib.CustomOpConfig(v),
    "patches": lambda v: reflib.CustomOpConfig(add, config_patches=v),
    "patched": lambda v: reflib.CustomOpConfig(add, config_patches={str(v): v}),
    "parameter": lambda v: registered(configs=[reflib.CustomOpConfig(**{str(v): v})]),
    **{
        name: lambda v, n=name: registered(**{n: v})
        for name in ("configs", "config_generator", "name", "input_gen_fns", "dispatch_on", "split_points",
                     "min_speedup_threshold", "benchmark_with_cudagraphs")
    },
    "input_gen_fns key": lambda v: registered(input_gen_fns={str(v): v}),
    "dispatch_on key": lambda v: registered(dispatch_on={str(v): v}),
    "registered op": lambda v: reflib.register_custom_op_autotuning(v, configs=[add]),
    "load": lambda v: reflib.load(v),
    "load device": lambda v: reflib.load("nowhere", device=v),
    "load verify": lambda v: reflib.load("nowhere", verify=v),
    "load sha256": lambda v: reflib.load("nowhere", sha256=v),
    "load model": lambda v: reflib.load("nowhere", model=v),
    "join": lambda v: reflib.join_packages({str(v): v}, "nowhere"),
    "archs": lambda v: reflib.aot_compile(torch.nn.Identity(), (X,), "nowhere", v),
    "args": lambda v: reflib.aot_compile(torch.nn.Identity(), v, "nowhere", "cpu"),
    "dynamic_shapes": lambda v: reflib.aot_compile(torch.nn.Identity(), (X,), "nowhere", "cpu", dynamic_shapes=v),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_long_values(use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for what, value in HUGE.items():
        try:
            USES[use](value)
        except ReflibError as e:
            assert len(str(e)) < 4000, (what, type(e), str(e)[:500])
        except (TypeError, OSError) as e:  # Python's own
            assert len(str(e)) < 4000 or LONG in str(e), (what, type(e), str(e)[:500])


def test_both_ends_of_a_line_are_kept() -> None:
    e = reflib.ReflibError(f"first\nvalue={LONG}: must be less\nlast", 3)
    assert e.args[0].startswith("first\nvalue=xxx") and e.args[0].endswith("xxx: must be less\nlast") and e.args[1] == 3
    assert len(e.args[0]) < 1600 and str(reflib.ReflibError("short")) == "short"


def test_a_command_to_run_by_hand_is_whole() -> None:
    command = "    $ g++ " + " ".join(f"unit{i}.o" for i in range(600))
    assert str(ReflibError(f"it failed:\n{command}\n{LONG}")).splitlines()[1] == command
