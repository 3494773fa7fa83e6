"""Compilations that stop after a stage, and what is run then."""

from collections.abc import Callable
from typing import Any

from reflib.ir.interpret import interpret
from reflib.pipeline import Stages


def stopped(stages: Stages) -> Callable[[list], Any]:
    """What the stages compiled; before ``wrap`` what the interpreter makes of the last program that they gave."""
    if stages.call is not None:
        return stages.call
    program = stages.scheduled or (stages.fused and stages.fused.program) or stages.program

    def call(args: list) -> Any:
        values = list(args)
        args.clear()
        return interpret(program, values)  # type: ignore[arg-type]

    return call
