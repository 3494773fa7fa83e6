"""The text of a ``@triton.jit`` function with all that it uses: helper functions, constants, imports of Triton.

A kernel's globals are its module's, which a cache, a package or another process does not have. So its text is copied
together with that of the functions it calls, in whatever modules; a name that means two things in two modules gets
two names. Global constants become part of the text, with their values at that moment, as they do for Triton.
"""

import ast
import builtins
import importlib
import math
import re
import sys
from types import ModuleType
from typing import Any

from ..errors import LoweringError
from .rules import Unsupported

HEADER = "import triton\nimport triton.language as tl\n"


def literal(value: Any) -> str | None:
    """A constant as Triton text; None for what is no plain constant."""
    import triton.language as tl

    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, tl.dtype):
        return f"tl.dtype({value.name!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, tuple) and type(value) in (tuple, getattr(tl, "tuple", tuple)):
        inner = [literal(v) for v in value]
        return None if None in inner else f"({', '.join(map(str, inner))}{',' if len(inner) == 1 else ''})"
    of = next((t for t in (bool, int, float, str) if isinstance(value, t)), None)  # (an enumeration's, NumPy's)
    if of is not None and type(value) is not of:
        value = of.__str__(value) if of is str else of(value)
    return repr(value) if value is None or of is not None else None


class KernelText:
    """The text of a module with ``kernel`` in it. ``function`` and ``named`` add to it; LoweringError: for what cannot
    be copied. ``names``: of what is in the text, by identity, for which it is ``kept``."""

    def __init__(self, kernel: str):
        import triton
        import triton.language as tl

        self.kernel = kernel
        self.names: dict[int, str] = {id(triton): "triton", id(tl): "tl"}
        self.taken = {"triton", "tl"}
        self.kept: list[Any] = []
        self.imports: list[str] = []
        self.constants: list[str] = []
        self.functions: list[str] = []

    def unique(self, wanted: str, what: Any) -> str:
        name, n = wanted, 1
        while name in self.taken or hasattr(builtins, name):
            n += 1
            name = f"{wanted}_{n}"
        self.taken.add(name)
        self.names[id(what)] = name
        self.kept.append(what)  # its identity is its key
        return name

    def __str__(self) -> str:
        imports = "".join(f"{line}\n" for line in self.imports)
        constants = "".join(f"{line}\n" for line in self.constants)
        return HEADER + imports + (f"\n{constants}" if constants else "") + "".join(self.functions)

    # -- what a name means ------------------------------------------------------------------------
    def named(self, what: Any, wanted: str) -> str:
        """The name of ``what`` in the text, which it is put into."""
        from triton.runtime.jit import JITFunction

        if id(what) in self.names:
            return self.names[id(what)]
        module = _module(what)
        if isinstance(what, ModuleType):
            name = self.unique(wanted, what)
            self.imports.append(f"import {module} as {name}")
            return name
        if (value := literal(what)) is not None:
            name = self.unique(wanted, what)
            constant = type(what).__name__ == "constexpr"
            self.constants.append(f"{name} = " + (f"tl.constexpr({value})" if constant else value))
            return name
        own = getattr(what, "__name__", "")
        if own and _importable(module) and getattr(importlib.import_module(module), own, None) is what:
            name = self.unique(wanted, what)
            self.imports.append(f"from {module} import {own}" + (f" as {name}" if name != own else ""))
            return name
        if isinstance(what, JITFunction) or type(what).__name__ == "ConstexprFunction":
            return self.function(what)
        raise LoweringError(
            f"the Triton kernel {self.kernel} uses {wanted}, a {type(what).__name__}, which cannot be copied out of "
            "its module; use tl.constexpr constants and @triton.jit functions"
        )

    def function(self, f: Any) -> str:
        """The name of a function, whose text is added after that of all that it calls."""
        name = self.unique(f.__name__, f)
        tree = ast.parse(f.src).body[0]
        assert isinstance(tree, ast.FunctionDef)
        how = "@triton.jit(noinline=True)" if getattr(f, "noinline", False) else "@triton.jit"
        how = "@triton.constexpr_function" if type(f).__name__ == "ConstexprFunction" else how
        text = replaced(f.src, _Names(self, f, tree).changes)
        text = re.sub(r"^def\s+\w+", f"def {name}", text)
        self.functions.append(f"\n\n{how}\n{text.rstrip()}\n")
        return name


def _module(what: Any) -> str:
    return what.__name__ if isinstance(what, ModuleType) else str(getattr(what, "__module__", ""))


def _importable(module: str) -> bool:
    root = module.partition(".")[0]
    return root == "triton" or root in sys.stdlib_module_names


Change = tuple[ast.expr, str]  # this part of the text, the new text


class _Names(ast.NodeVisitor):
    """``changes``: what to replace in a function's text, so that its names are those of ``text``."""

    def __init__(self, text: KernelText, f: Any, tree: ast.FunctionDef):
        self.text, self.changes = text, list[Change]()
        cells = zip(f.fn.__code__.co_freevars, f.fn.__closure__ or ())
        self.scope = f.fn.__globals__ | {name: cell.cell_contents for name, cell in cells}
        a = tree.args
        parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
        for p in parameters:
            if p.annotation is not None:  # the types of pointers and sizes are the caller's
                constant = "constexpr" in ast.unparse(p.annotation)
                self.changes.append((p.annotation, "tl.constexpr" if constant else "None"))
        if tree.returns is not None:
            self.changes.append((tree.returns, "None"))
        stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in [*a.defaults, *(d for d in a.kw_defaults if d)]:
            self.visit(node)
        self.local = stored | {p.arg for p in parameters}
        text.taken |= self.local
        self.strict = type(f).__name__ != "ConstexprFunction"
        for statement in tree.body:
            self.visit(statement)

    local: set[str] = set()
    strict = False  # in what Triton compiles, globals are constexpr

    def visit_Name(self, node: ast.Name) -> None:
        self._chain(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._chain(node):
            self.generic_visit(node)

    def _chain(self, node: ast.expr) -> bool:
        """``a.b.c`` that begins at a global: is it one, and then replaced as far as it needs to be?"""
        chain: list[ast.expr] = [node]
        while isinstance(chain[-1], ast.Attribute):
            chain.append(chain[-1].value)
        root = chain[-1]
        if not isinstance(root, ast.Name) or root.id in self.local or root.id not in self.scope:
            return not isinstance(node, ast.Attribute)
        what, at = self.scope[root.id], len(chain) - 1
        while isinstance(what, (ModuleType, type)) and at and not _importable(_module(what)):
            at -= 1
            what = getattr(what, chain[at].attr)  # type: ignore[attr-defined]
        if self.strict and type(what) in (bool, int, float, str) and chain[at] is root:
            raise LoweringError(
                f"the Triton kernel {self.text.kernel} uses the global variable {root.id}, which Triton allows only as "
                f"a constant: {root.id} = tl.constexpr({what!r})"
            )
        wanted = chain[at].attr if isinstance(chain[at], ast.Attribute) else root.id  # type: ignore[attr-defined]
        if isinstance(what, ModuleType) and not _importable(what.__name__):
            raise LoweringError(f"the Triton kernel {self.text.kernel} uses the module {what.__name__} as a value")
        name = self.text.named(what, wanted)
        if name in self.local:  # of a function that was found after ``what`` had got its name
            raise Unsupported(f"it has a variable {name}, which is the name of something else that it uses")
        if name != ast.unparse(chain[at]):
            self.changes.append((chain[at], name))
        return True


def replaced(source: str, changes: list[Change]) -> str:
    """``source`` with the changes, no two of the same place."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for node, new in sorted(changes, key=lambda c: (c[0].lineno, c[0].col_offset), reverse=True):
        first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[operator]
        head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [head + new.encode() + tail]
    return b"".join(lines).decode()
