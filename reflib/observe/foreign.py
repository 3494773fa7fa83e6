"""A user's own code that a graph calls, as text: imported where it has a module, else written out.

Operators of ``torch.library``, Triton kernels with their autotune configurations, and plain functions. What is written
out brings along what it uses: other kernels, constants and modules.
"""

import inspect
import os
import sys
import sysconfig
import textwrap
from types import ModuleType
from typing import Any

import torch

PYTORCH = ("aten", "prims", "prim", "higher_order", "_c10d_functional", "inductor")  # namespaces of its own operators

PLAIN = (bool, int, float, str, torch.dtype)


class Foreign:
    """Collects ``lines`` for the top of a file, the folders in which its imports are found, and what is ``missing``."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.folders: list[str] = []
        self.missing: list[str] = []
        self._have: dict[str, Any] = {}

    # -- functions, classes, modules and constants under a name -----------------------------------------
    def name(self, name: str, thing: Any) -> None:
        """Make ``name`` mean ``thing``."""
        if name in self._have:
            held = self._have[name]
            if held is not thing and not (type(held) is type(thing) in PLAIN and held == thing):
                self.missing.append(f"another {name}, a {type(thing).__name__}")
            return
        self._have[name] = thing
        if isinstance(thing, ModuleType):
            self.imported(thing.__name__, f"import {thing.__name__} as {name}")
        elif _is_kernel(thing):
            self._kernel(name, thing)
        elif (where := _importable(thing)) is not None:
            module, path = where
            tail = f".{path.partition('.')[2]}" if "." in path else ""
            self.imported(module, f"from {module} import {path.partition('.')[0]} as {name}")
            self.lines += [f"{name} = {name}{tail}"] if tail else []
        elif isinstance(thing, PLAIN):
            self.lines.append(f"{name} = {thing!r}")
        elif type(thing).__name__ == "constexpr" and type(thing).__module__.startswith("triton"):
            self.imported("triton", "import triton")
            self.lines.append(f"{name} = triton.language.constexpr({thing.value!r})")
        elif inspect.isfunction(thing):
            self._function("function", name, thing)
        else:
            self.missing.append(f"{name}, a {type(thing).__name__}")

    def imported(self, module: str, line: str) -> None:
        """Add ``line``, which imports ``module``, and the folder where it is found."""
        top = sys.modules.get(module.partition(".")[0])
        inside = next(iter(getattr(top, "__path__", [])), None) or getattr(top, "__file__", None)
        if inside and not inside.startswith((sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))):
            folder = os.path.dirname(os.path.abspath(inside))
            self.folders += [folder] if folder not in self.folders else []
        if line not in self.lines:
            self.lines.append(line)

    def _function(self, what: str, name: str, f: Any, *decorators: str) -> None:
        text = self._source(f)
        if text is None:
            self.missing.append(f"the {what} {name}, whose source is gone")
            return
        self._used_by(f)
        self.lines += ["", "", *decorators, *text.splitlines()]
        if f.__name__ != name:
            self.lines.append(f"{name} = {f.__name__}")

    def _source(self, f: Any) -> str | None:
        """Without decorators."""
        try:
            lines = textwrap.dedent(inspect.getsource(f)).splitlines()
        except (OSError, TypeError):
            return None
        start = next((i for i, line in enumerate(lines) if line.startswith(("def ", "async def "))), None)
        return None if start is None else "\n".join(lines[start:])

    def _used_by(self, f: Any) -> None:
        names = set(f.__code__.co_names)
        held = inspect.getclosurevars(f)
        for name, thing in {**held.globals, **held.nonlocals}.items():
            if name in names or name in f.__code__.co_freevars:
                self.name(name, thing)

    # -- Triton kernels -----------------------------------------------------------------------------
    def _kernel(self, name: str, kernel: Any) -> None:
        function, around = kernel, []
        while not hasattr(function, "src") and hasattr(function, "fn"):  # an Autotuner, Heuristics
            around.append(function)
            function = function.fn
        if (where := _importable(function.fn, kernel)) is not None:
            self.imported(where[0], f"from {where[0]} import {where[1]} as {name}")
            return
        self.imported("triton", "import triton")
        configs = [
            f"@triton.autotune(configs=[{', '.join(map(_config, a.configs))}], key={list(a.keys)!r})"
            for a in around if hasattr(a, "configs")
        ]  # fmt: skip
        if len(configs) < len(around):
            self.missing.append(f"what is around the Triton kernel {name}, besides its configurations")
        self._function("Triton kernel", name, function.fn, *configs, "@triton.jit")

    # -- operators ----------------------------------------------------------------------------------
    def op(self, op: Any) -> None:
        """What registers an operator that is not PyTorch's own."""
        from torch._library.custom_ops import OPDEFS

        name = op._schema.name
        if name in self._have or op.namespace in PYTORCH:
            return
        self._have[name] = op
        definition = OPDEFS.get(name)
        if definition is None:
            self._op_elsewhere(name)
            return
        if (where := _importable(definition._init_fn, definition)) is not None:
            self.imported(where[0], f"import {where[0]}")
            return
        function = definition._init_fn
        plain = "op_" + name.replace("::", "_")
        self.name(plain, function)
        mutated = tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        self.lines.append(f"{plain}_op = torch.library.custom_op({name!r}, {plain}, mutates_args={mutated!r})")
        for attribute, how in (("_abstract_fn", "register_fake({})"), ("_backward_fn", "register_autograd({}{})")):
            if (f := getattr(definition, attribute, None)) is None:
                continue
            self.name(f"{plain}{attribute}", f)
            context = getattr(definition, "_setup_context_fn", None)
            more = ""
            if attribute == "_backward_fn" and context is not None:
                self.name(f"{plain}_setup", context)
                more = f", setup_context={plain}_setup"
            self.lines.append(f"{plain}_op." + how.format(f"{plain}{attribute}", more))

    def _op_elsewhere(self, name: str) -> None:
        """An operator of ``torch.library.define`` and the like: its module, if a fake kernel of it names one."""
        from torch._library.simple_registry import singleton

        source = getattr(singleton.find(name).fake_impl.kernel, "source", "") if name in singleton._data else ""
        file = source.rpartition(":")[0]
        modules = (m.__name__ for m in list(sys.modules.values()) if file and getattr(m, "__file__", "") == file)
        module = next(modules, "")
        if module and module != "__main__":
            self.imported(module, f"import {module}")
            return
        for library in sorted(torch.ops.loaded_libraries):
            self.lines.append(f"torch.ops.load_library({library!r})")
        if not torch.ops.loaded_libraries:
            self.missing.append(f"what registers the operator {name}")


def _is_kernel(thing: Any) -> bool:
    return type(thing).__module__.startswith("triton.runtime") and hasattr(thing, "fn")


def _importable(thing: Any, found_as: Any = None) -> tuple[str, str] | None:
    """(module, name) where a fresh process finds the same, or None: in a script or another function."""
    module, path = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module is None and isinstance(getattr(thing, "__self__", None), ModuleType):
        module = thing.__self__.__name__
    if not module or module == "__main__" or not path or "<" in path or module.startswith("reported_"):
        return None
    at: Any = sys.modules.get(module)
    if at is None or not (getattr(at, "__spec__", None) or module == "builtins"):
        return None
    for part in path.split("."):
        at = getattr(at, part, None)
    return (module, path) if at is not None and at is (found_as if found_as is not None else thing) else None


def _config(c: Any) -> str:
    more = {k: getattr(c, k) for k in ("num_warps", "num_stages", "num_ctas", "maxnreg") if getattr(c, k, None)}
    return f"triton.Config({c.kwargs!r}{''.join(f', {k}={v!r}' for k, v in more.items())})"
