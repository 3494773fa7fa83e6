"""A model of the sweep: its name, how it is built, what that needs; and where models are listed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reflib.errors import LabError

Built = tuple[Any, tuple[Any, ...]]  # a torch.nn.Module in float32 on the CPU, and the tensors it is called with


@dataclass(frozen=True)
class Model:
    """``build(real)``: with real sizes for a GPU, or small ones for a CPU; random weights, without a network, without
    dropout. It returns a module whose results are tensors (nested in tuples, lists or dicts), and its inputs.
    ``needs``: the library it is imported from. ``cost``: seconds of compiling relative to others, to begin early what
    takes long.
    """

    name: str
    build: Callable[[bool], Built]
    needs: str = ""
    cost: float = 1.0
    modes: tuple[str, ...] = ("inference", "training")


def models(file: str = "") -> tuple[Model, ...]:
    """The registry, or ``MODELS`` of a Python file, which is executed. LabError if it has none."""
    if not file:
        from reflib.sweep.registry import MODELS

        return MODELS
    from reflib.worker import import_file

    found = tuple(getattr(import_file(file), "MODELS", ()))
    if not found or not all(isinstance(m, Model) for m in found):
        raise LabError(f"{file}: expected MODELS = [reflib.sweep.Model(...), ...]")
    return found
