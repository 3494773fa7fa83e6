"""FILE.py:NAME and the input options -> a model and its arguments. Reports the user's mistakes.

The rule:

* with `--inputs OTHER`, OTHER of the same file is the arguments: a tuple, a dict (keyword arguments), a tensor, or a
  function of no arguments that returns one of these;
* with `--input 128x256:float32` (repeatable) the arguments are random tensors made from the seed;
* with neither, NAME is a function of no arguments that returns `(model, args)` or `(model, args, kwargs)`.

In the first two cases NAME is the model: a module, a class of module that needs no arguments, or a function.

A repro file, without :NAME, has its graph, inputs and options in it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError, did_you_mean
from reflib.lab.machine import pick_device

if TYPE_CHECKING:
    import torch

    from reflib.observe.rebuild import Subject as Repro

_SPEC = re.compile(r"^(?P<shape>scalar|\d+(x\d+)*)(:(?P<dtype>\w+)(:(?P<low>-?\d+)\.\.(?P<high>-?\d+))?)?$")
REPRO = "from reflib.observe.rebuild import main"  # a line that each has
INTEGERS = (0, 9)  # range of random integers: small, because they are mostly indices


@dataclass
class Subject:
    """The model and its arguments. `spec`: as given. `repro`: what to compile, if that is a repro file."""

    spec: str
    path: Path
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    repro: Repro | None = None


def load(spec: str, inputs: str = "", shapes: Sequence[str] = (), device: str = "", seed: int = 0) -> Subject:
    """See the module docstring. `device` moves the model and its tensors; "" keeps their devices. Raises LabError, with
    the line of the user's code if that raised."""
    import torch

    from reflib.observe.explain import original

    if inputs and shapes:
        raise LabError("--inputs names the arguments, --input describes them: say one of the two")
    if spec.endswith(".py") and Path(spec).is_file() and REPRO in Path(spec).read_text(encoding="utf-8"):
        if inputs or shapes or device:
            raise LabError(f"{spec} is a repro: its inputs, and their device, are in it")
        return _of_repro(spec)
    wanted = pick_device(device) if device else None
    drawn = [parse_shape(text) for text in shapes]
    path, name = _split(spec)
    module = _imported(path)
    thing = _named(module, name, path)
    torch.manual_seed(seed)
    kwargs: dict[str, Any] = {}
    if inputs or shapes:
        model = _instance(thing, path)
        if inputs:
            args, kwargs = _arguments(_called(_named(module, inputs, path), path), inputs)
        else:
            args = tuple(d.make(wanted or _device_of(model), seed + i) for i, d in enumerate(drawn))
    else:
        model, args, kwargs = _pair(thing, name, path)
    if not callable(model):
        raise LabError(f"{spec}: the model is {_kind(model)}, which cannot be called")
    model = original(model)
    if wanted is not None:
        model, args, kwargs = _moved(model, args, kwargs, wanted)
    return Subject(spec, path, model, args, kwargs)


def _of_repro(spec: str) -> Subject:
    from reflib.observe.rebuild import load, run_file

    path = Path(spec)
    try:
        repro = load(run_file(spec))
        values = () if repro.options.get("target") else tuple(repro.values())
    except Exception as error:
        raise LabError(f"loading {path} raised: {located(error, path)}") from error
    return Subject(path.name, path, repro.module, values, repro=repro)


# -- the file ---------------------------------------------------------------------------------------
def _split(spec: str) -> tuple[Path, str]:
    file, colon, name = spec.rpartition(":")
    if not colon or name.endswith(".py"):
        path = Path(spec)
        there = f" It has: {', '.join(_names_in(path)[:12])}." if path.is_file() else ""
        raise LabError(f"{spec!r} names no function: say FILE.py:NAME.{there}")
    path = Path(file)
    if not path.is_file():
        beside = [str(p) for p in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        hint = did_you_mean(path, beside)
        raise LabError(f"no file {file!r}{hint and f'; {hint}'}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise LabError(f"{name!r} in {spec!r} is not a name: say FILE.py:NAME")
    return path, name


def _names_in(path: Path) -> list[str]:
    """Names that the file defines, without importing it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    found = (n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef))
    return [n for n in found if not n.startswith("_")]


def _imported(path: Path) -> ModuleType:
    """The file as a module; its folder comes first in the search path, as for `python FILE.py`."""
    name = "reported_" + re.sub(r"\W", "_", path.stem)
    made = importlib.util.spec_from_file_location(name, path.resolve())
    if made is None or made.loader is None:
        raise LabError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(made)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        made.loader.exec_module(module)
    except SyntaxError as error:
        where = f"{error.filename or path}:{error.lineno}"
        raise LabError(f"{where}: {error.msg}: {(error.text or '').strip()}") from error
    except SystemExit as error:
        raise LabError(
            f"{path} exits when it is imported: put what it runs below `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        raise LabError(f"importing {path} raised: {located(error, path)}") from error
    return module


def _named(module: ModuleType, name: str, path: Path) -> Any:
    thing: Any = module
    for part in name.split("."):
        if not hasattr(thing, part):
            own = [n for n in dir(thing) if not n.startswith("_")]
            there = ", ".join(_names_in(path)[:12]) or "no functions"
            hint = did_you_mean(part, own, 0.5) or f"it has {there}"
            raise LabError(f"{path} has no {name!r}; {hint}")
        thing = getattr(thing, part)
    return thing


def located(error: BaseException, path: Path) -> str:
    """`model.py:12 in forward: y = x @ w: RuntimeError: ...`, from the last traceback line in the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).resolve() == path.resolve()]
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}: " if own else ""
    return f"{where}{type(error).__name__}: {_short(str(error))}"


def _short(text: str, most: int = 600) -> str:
    text = text.strip()
    return text if len(text) <= most else text[:most] + " …"


# -- the model and its arguments --------------------------------------------------------------------
def _pair(thing: Any, name: str, path: Path) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a function of no arguments returned: the model, its args and kwargs."""
    import torch

    hint = "say what to call it with: --input 128x256:float32 or --inputs NAME"
    if isinstance(thing, torch.nn.Module) or inspect.isclass(thing) or not callable(thing):
        raise LabError(f"{path}:{name} is {_kind(thing)}; {hint}")
    if needed := _required(thing):
        raise LabError(f"{path}:{name} needs {', '.join(needed)}; {hint}")
    found = _called(thing, path)
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not callable(found[0]):
        raise LabError(f"{path}:{name}() returned {_kind(found)}, not (model, args) or (model, args, kwargs); {hint}")
    args, kwargs = _arguments(found[1], f"{name}()[1]")
    if len(found) == 3:
        if not isinstance(found[2], dict):
            raise LabError(f"{path}:{name}() returned {_kind(found[2])} as keyword arguments, not a dict")
        kwargs = {**kwargs, **found[2]}
    return found[0], args, kwargs


def _instance(thing: Any, path: Path) -> Any:
    import torch

    if inspect.isclass(thing) and issubclass(thing, torch.nn.Module):
        if needed := _required(thing):
            raise LabError(f"{path}:{thing.__name__} needs {', '.join(needed)}: name a module that has been made")
        return _called(thing, path)
    return thing


def _called(thing: Any, path: Path) -> Any:
    """The result of calling `thing`; `thing` itself if it is not a function."""
    import torch

    if not callable(thing) or isinstance(thing, torch.Tensor | torch.nn.Module):
        return thing
    try:
        return thing()
    except Exception as error:
        name = getattr(thing, "__name__", "it")
        raise LabError(f"{path}: {name}() raised: {located(error, path)}") from error


def _arguments(found: Any, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    if isinstance(found, torch.Tensor):
        return (found,), {}
    if isinstance(found, dict) and all(isinstance(k, str) for k in found):
        return (), found
    if isinstance(found, tuple | list):
        return tuple(found), {}
    raise LabError(f"{name} is {_kind(found)}; the arguments are a tuple, a dict or a tensor")


def _required(thing: Any) -> list[str]:
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _kind(thing: Any) -> str:
    name = type(thing).__name__
    return f"a tuple of {len(thing)}" if isinstance(thing, tuple) else f"a {name}" if thing is not None else "None"


def _device_of(model: Any) -> torch.device:
    import torch

    first = next(iter(model.parameters()), None) if isinstance(model, torch.nn.Module) else None
    return first.device if first is not None else pick_device("auto")


def _moved(model: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any, Any]:
    import torch
    from torch.utils._pytree import tree_map

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().to(device).requires_grad_(x.requires_grad)

    if isinstance(model, torch.nn.Module):
        model = model.to(device)
    return model, *tree_map(one, (args, kwargs))


# -- tensors that are described ---------------------------------------------------------------------
@dataclass(frozen=True)
class Drawn:
    """A random tensor to make: normal floats, integers from `low` to `high` (inclusive), or bools."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: int
    high: int

    def make(self, device: torch.device, seed: int) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            wide = self.dtype if self.dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
            return torch.randn(self.shape, generator=generator, dtype=wide).to(self.dtype).to(device)
        high = 2 if self.dtype == torch.bool else self.high + 1
        return torch.randint(self.low, high, self.shape, generator=generator).to(self.dtype).to(device)


def parse_shape(text: str) -> Drawn:
    """`128x256`, `128x256:bfloat16`, `scalar:float32`, `8x64:int64:0..31999`. Raises LabError."""
    import torch

    found = _SPEC.match(text.replace(" ", ""))
    if not found:
        raise LabError(f"--input {text!r}: say 128x256:float32, scalar:float32 or 8x64:int64:0..31999")
    names = [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)]
    dtype = found["dtype"] or "float32"
    if dtype not in names:
        hint = did_you_mean(dtype, names)
        raise LabError(f"--input {text!r}: no dtype {dtype!r}{hint and f'; {hint}'}")
    low, high = (int(found[k]) if found[k] else default for k, default in zip(("low", "high"), INTEGERS))
    if low > high:
        raise LabError(f"--input {text!r}: {low}..{high} is empty")
    shape = () if found["shape"] == "scalar" else tuple(int(n) for n in found["shape"].split("x"))
    return Drawn(shape, getattr(torch, dtype), low, high)
