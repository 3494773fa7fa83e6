"""NVIDIA's library of math functions, cut to the functions that a kernel calls.

Triton links LLVM bitcode of all of libdevice's 350 functions into every kernel that calls one (``exp2`` is one), and
drops what is not called: reading it takes 40 ms, a quarter of such a kernel's compilation. What is left of it for one
set of functions is kept, as text, in the on-disk cache; reading that takes 2 ms. The machine code is the same.

Triton has no option for this. So while reflib compiles, ``link`` stands in for its binding ``llvm.link_extern_libs``.
It makes the text with Triton's own linker, from a module that declares and calls those functions. Whatever goes wrong,
the whole library is linked.
"""

import contextlib
import functools
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import cache

_DECLARED = re.compile(r"^declare .*?(\w+) @(__nv_\w+)\((.*?)\)", re.M)
_MLIR = {"float": "f32", "double": "f64", "ptr": "!llvm.ptr", **{f"i{n}": f"i{n}" for n in (1, 8, 16, 32, 64)}}
_CALLER = "reflib_calls"
_FORMAT = 1  # of the text; change it when how it is made changes


def link(whole: Callable[[Any, list[str]], None], module: Any, paths: list[str]) -> None:
    """Links into an LLVM ``module`` what it calls of the libraries at ``paths``; ``whole`` is Triton's own way."""
    if len(paths) == 1 and "libdevice" in Path(paths[0]).name:
        with contextlib.suppress(Exception):
            return whole(module, [str(_cut(whole, paths[0], frozenset(_DECLARED.findall(str(module)))))])
    whole(module, paths)


def _cut(whole: Callable[[Any, list[str]], None], path: str, functions: frozenset[tuple[str, str, str]]) -> Path:
    """The file of these functions (result, name, arguments), and what they call, as text."""
    import triton

    key = cache.key("libdevice", _FORMAT, triton.__version__, _digest(path), *sorted(functions))
    found = cache.get("libdevice", key)
    return found or cache.put("libdevice", key, _linked(whole, path, sorted(functions)).encode(), ".ll")


@functools.cache
def _digest(path: str) -> str:
    return cache.key(Path(path).read_bytes())


def _linked(whole: Callable[[Any, list[str]], None], path: str, functions: Sequence[tuple[str, str, str]]) -> str:
    from triton._C.libtriton import ir, llvm, nvidia

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(_calling(functions))
        file.flush()
        mlir = ir.parse_mlir_module(file.name, context)
    llvm_context = llvm.context()
    module = llvm.to_module(mlir, llvm_context)
    llvm.attach_datalayout(module, "nvptx64-nvidia-cuda", "", "")
    whole(module, [path])
    text = re.sub(rf"^define \S+ @{_CALLER}\b.*?^}}\n", "", str(module), flags=re.M | re.S)
    return text.replace("define internal", "define")  # so that it can be linked again, which hides it again


def _calling(functions: Sequence[tuple[str, str, str]]) -> str:
    """MLIR of a module that declares and calls them: with LinkOnlyNeeded, the linker takes nothing else."""
    declared, called, made = [], [], []
    for i, (result, name, arguments) in enumerate(functions):
        types = [_MLIR[a.split()[0]] for a in arguments.split(", ")]
        made += [f"%x{i}_{j} = llvm.mlir.undef : {t}" for j, t in enumerate(types)]
        values = ", ".join(f"%x{i}_{j}" for j in range(len(types)))
        kind = f"({', '.join(types)}) -> {_MLIR[result]}"
        declared.append(f"llvm.func @{name}({', '.join(types)}) -> {_MLIR[result]}")
        called.append(f"%y{i} = llvm.call @{name}({values}) : {kind}")
    body = "\n".join([*made, *called])
    return "\n".join(["module {", *declared, f"llvm.func @{_CALLER}() {{", body, "llvm.return", "}", "}", ""])
