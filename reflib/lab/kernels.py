"""`lab.load_kernel`: makes a callable from the source text of a hand-written kernel.

The compiler launches its kernels through `wrap` instead, at a fraction of the cost per call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError

if TYPE_CHECKING:
    import torch


def load_kernel(
    name: str, source: str, language: str, programs: int = 1, result: torch.Tensor | None = None
) -> WrittenKernel:
    """The function `name` of `source`, as a function of tensors; compiled on the first call.

    `"cpp"`: `source` defines `extern "C" void name(pointer, ...)`; the helpers of reflib's own C++ kernels
    (such as `op::erf`) are prepended. `"triton"`: `source` defines a `@triton.jit` function, launched
    as `programs` programs; `triton` and `tl` are imported already. With `result`, each call makes a contiguous
    tensor of that shape and dtype, passes it as the last pointer, and returns it.
    """
    if language not in ("cpp", "triton"):
        raise LabError(f'language is {language!r}; it must be "cpp" or "triton"')
    return WrittenKernel(name, source, language, programs, result)


class WrittenKernel:
    """A kernel from source text. `lab.show` lists it; torch.fx can call it as a function."""

    def __init__(
        self, name: str, source: str, language: str, programs: int, result: torch.Tensor | None
    ) -> None:
        self.name, self.source, self.language = name, source.strip(), language
        self.__name__, self.__module__ = name, "kernels"
        self._programs, self._result = programs, result
        self._launch: Callable[..., Any] | None = None

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | None:
        import torch

        if self._launch is None:
            self._launch = self._load_cpp() if self.language == "cpp" else self._load_triton()
        out = self._result
        if out is None:
            self._launch(*tensors)
            return None
        made = torch.empty(out.shape, dtype=out.dtype, device=tensors[0].device if tensors else "cpu")
        self._launch(*tensors, made)
        return made

    def _load_cpp(self) -> Callable[..., Any]:
        from reflib.generate.cpp import HEADER
        from reflib.options import Options
        from reflib.toolchain import build_library

        library = ctypes.CDLL(str(build_library(f"{HEADER}\n{self.source}\n", Options())))
        entry = getattr(library, self.name)
        return lambda *tensors: entry(*[ctypes.c_void_p(t.data_ptr()) for t in tensors])

    def _load_triton(self) -> Callable[..., Any]:
        from reflib.lab.triton_text import load

        text = f"import triton\nimport triton.language as tl\n\n\n{self.source}\n"
        return load(text, self.name)[(self._programs,)]
