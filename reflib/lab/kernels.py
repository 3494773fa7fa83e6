"""`lab.load_kernel`: the text of a kernel that a reader wrote, compiled and ready to call on tensors.

The compiler does not use this: it launches what it generates through `wrap`, at a fraction of the cost a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError

if TYPE_CHECKING:
    import torch


def load_kernel(name: str, source: str, language: str, programs: int = 1) -> Callable[..., None]:
    """The function `name` of `source`, as a function of tensors.

    `"cpp"`: `source` defines `extern "C" void name(pointer, ...)`; the helpers of reflib's own C++ kernels
    (`op::erf` and the like) are in front of it. `"triton"`: `source` defines a `@triton.jit` function, launched
    as `programs` programs; `triton` and `tl` are imported for it.
    """
    if language == "cpp":
        return _load_cpp(name, source)
    if language == "triton":
        return _load_triton(name, source, programs)
    raise LabError(f'language is {language!r}; it must be "cpp" or "triton"')


def _load_cpp(name: str, source: str) -> Callable[..., None]:
    from reflib.generate.cpp import HEADER
    from reflib.options import Options
    from reflib.toolchain import build_library

    library = ctypes.CDLL(str(build_library(f"{HEADER}\n{source}", Options())))
    entry = getattr(library, name)

    def call(*tensors: torch.Tensor) -> None:
        entry(*[ctypes.c_void_p(t.data_ptr()) for t in tensors])

    return call


def _load_triton(name: str, source: str, programs: int) -> Callable[..., None]:
    from reflib import cache

    text = f"import triton\nimport triton.language as tl\n\n\n{source}\n"
    path = cache.put("kernels", cache.key("lab", text), text.encode(), ".py")  # Triton reads the file again
    names: dict[str, Any] = {"__name__": f"reflib_lab_{name}", "__file__": str(path)}
    exec(compile(text, str(path), "exec"), names)
    launch = names[name][(programs,)]

    def call(*tensors: torch.Tensor) -> None:
        launch(*tensors)

    return call
