"""Compilations that stop after a stage, and what is run then."""

from collections.abc import Callable
from typing import Any

from reflib.ir.interpret import interpret
from reflib.options import Options
from reflib.pipeline import Backend, Stages, run


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


class Until(Backend):
    """A backend that runs what the interpreter makes of the program after one stage."""

    def __init__(self, until: str, *more: Any, **options: Any):
        super().__init__(Options(verify=True, **options), *more)
        self.until = until

    def _compile(self, graph: Any, inputs: Any) -> Callable[[list], Any]:
        stages = run(graph, self.options, self.until)
        self.on_stages(stages)
        return stopped(stages)
