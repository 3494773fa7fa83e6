"""`lab.setup`: validates the parameters cell, chooses device, dtype and sizes, and prints the choices."""

from __future__ import annotations

import linecache
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError
from reflib.lab import machine
from reflib.lab.params import Parameter, check_value, parse_parameters, validate

if TYPE_CHECKING:
    import torch

ROOM_BYTES = 12 * 10**9  # limit for notebooks, so that they fit a 16 GB GPU

STANDARD = (
    Parameter("device", "str", "auto", "where to run"),
    Parameter("dtype", "str", "auto", "float type", ("auto", "float32", "float16", "bfloat16")),
    Parameter("seed", "int", 0, "random seed", ((0, 2**31 - 1),)),
)

Size = int | float | str | Callable[[int], int | float]


@dataclass(frozen=True)
class Setup:
    """The result of `lab.setup`. All parameters are attributes too: `here.megabytes`."""

    device: torch.device
    dtype: torch.dtype
    seed: int
    machine: machine.Machine
    versions: Mapping[str, str]
    commit: str
    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"no parameter {name!r}; there are {', '.join(values)}")

    def arguments(self) -> dict[str, Any]:
        """Arguments of `setup` with which another process gets the same device, dtype and seed."""
        return {"device": str(self.device), "dtype": str(self.dtype).removeprefix("torch."), "seed": self.seed}

    def __str__(self) -> str:
        chosen = {"dtype": str(self.dtype).removeprefix("torch."), "seed": self.seed}
        sizes = {k: v for k, v in self.values.items() if k not in ("device", "dtype", "seed")}
        lines = [
            ("device", f"{self.device}: {self.machine}"),
            ("versions", ", ".join(f"{k} {v}" for k, v in self.versions.items())),
            ("reflib", f"commit {self.commit}" if self.commit else "commit unknown"),
            ("chosen", ", ".join(f"{k}={v}" for k, v in {**chosen, **sizes}.items())),
        ]
        return "\n".join(f"{key:9} {text}" for key, text in lines)


class _Current:
    """The set-up of this notebook, the only state kept between cells."""

    value: Setup | None = None


def current() -> Setup:
    """The notebook's set-up; a default one without output if `lab.setup` was not called."""
    if _Current.value is None:
        return setup(quiet=True)
    return _Current.value


def setup(
    namespace: Mapping[str, Any] | None = None,
    *,
    auto: Mapping[str, Mapping[str, Size]] | None = None,
    source: str | None = None,
    quiet: bool = False,
    keep_pages: bool = True,
    **values: object,
) -> Setup:
    """Validate the parameters and replace `"auto"` by concrete values.

    In a notebook, call `lab.setup(globals())`: the parameters cell is found among the executed cells, and each name is
    checked against its line there. Elsewhere, pass the values: `lab.setup(device="cpu")`. `auto` defines `"auto"` for
    sizes by kind of device: `auto={"megabytes": {"cpu": 32, "cuda": lambda room: room // 10**7}}`, where `room` is the
    number of bytes that the notebook may use. On a CPU `keep_pages` keeps the memory that tensors leave, as PyTorch
    does on a GPU, and other programs' cores are left to them.
    """
    os.environ.setdefault("REFLIB_CACHE_DECISIONS", "0")  # chapters measure again instead of using stored decisions
    declared = _declared(namespace, source)
    parameters = declared + tuple(p for p in STANDARD if p.name not in {d.name for d in declared})
    known = {p.name: p for p in parameters}
    given = {d.name: namespace[d.name] for d in declared if namespace and d.name in namespace}
    checked = validate(parameters, {**given, **values})
    device = machine.pick_device(str(checked["device"]))
    fewer = ""
    if namespace and device.type == "cpu" and not quiet:  # a notebook; both reach the processes that it starts, too
        if keep_pages:
            machine.keep_pages()
        fewer = machine.use_free_cores()
    room = _room(device)
    for name, meanings in (auto or {}).items():
        if name not in known:
            raise LabError(f"auto= names {name!r}, which is not a parameter")
        if checked[name] == "auto":
            size = meanings[device.type]
            checked[name] = check_value(known[name], size(room) if callable(size) else size)
    result = Setup(
        device=device,
        dtype=pick_dtype(str(checked["dtype"]), device),
        seed=int(str(checked["seed"])),
        machine=machine.describe(device),
        versions=MappingProxyType(machine.versions()),
        commit=machine.commit(),
        values=MappingProxyType(checked),
    )
    _seed(result.seed)
    _Current.value = result
    if not quiet:
        print(result)
        for warning in filter(None, (machine.busy(), fewer)):
            print(f"busy      {warning}")
    return result


def _declared(namespace: Mapping[str, Any] | None, source: str | None) -> tuple[Parameter, ...]:
    """The parameters of the cell; empty without one."""
    cells = _cells(namespace or {})
    if source is None:
        source = _parameters_cell(cells)
    parameters = parse_parameters(source) if source else ()
    for cell in cells:
        _refuse_unknown(cell, parameters)
    return parameters


def _cells(namespace: Mapping[str, Any]) -> list[str]:
    """The source of the executed cells; from the linecache if the kernel keeps no history, as under nbval."""
    if "In" not in namespace:
        return []
    cells = [str(cell) for cell in namespace["In"] if cell]
    kept = [entry[2] for entry in linecache.cache.values() if len(entry) == 4 and entry[1] is None]
    return cells or ["".join(lines) for lines in kept]


def _parameters_cell(cells: list[str]) -> str:
    """The last executed cell that declares `device: str`."""
    for cell in reversed(cells):
        if any(line.startswith("device: str") for line in cell.splitlines()):
            return cell
    return ""


def _refuse_unknown(cell: str, parameters: tuple[Parameter, ...]) -> None:
    """LabError for undeclared parameters, about which papermill only warns."""
    if not parameters or not cell.startswith("# Parameters\n"):
        return
    names = [line.partition("=")[0].strip() for line in cell.splitlines()[1:] if " = " in line]
    validate(parameters, {n: _default(parameters, n) for n in names if n.isidentifier()})


def _default(parameters: tuple[Parameter, ...], name: str) -> object:
    return next((p.default for p in parameters if p.name == name), None)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """`"auto"`: float32 on a CPU, bfloat16 if the GPU has it in hardware, else float16."""
    import torch

    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cpu":
        return torch.float32
    if torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.bfloat16
    return torch.float16


def _room(device: torch.device) -> int:
    """Number of bytes that a notebook may use: 12 GB, or most of the free memory if that is less."""
    import torch

    if device.type == "cuda":
        return min(ROOM_BYTES, int(0.8 * torch.cuda.mem_get_info(device)[0]))
    return min(ROOM_BYTES // 12, machine.describe(device).memory_bytes // 4 or ROOM_BYTES // 12)


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
