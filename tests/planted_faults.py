"""Faults planted in lowering rules, and random graphs that meet one of them once, for the minifier.

    python -m tests.planted_faults 0 1 2        minify these; prints one line of JSON for each

It is a process of its own: trials are forked from it, which neither OpenMP nor autograd of the tests' process allows.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import reflib.lower  # noqa: F401  (its rules)
from reflib.lower.rules import RULES
from reflib.observe.given import Tensor
from reflib.observe.minify import minify
from reflib.observe.rebuild import Subject

aten = torch.ops.aten
N = 16
OPS = 100
# what else a graph is made of: bounded values, all [N, N]
USUAL: list[Callable[..., torch.Tensor]] = [
    lambda g, a, b: g(torch.sin, a), lambda g, a, b: g(torch.cos, a), lambda g, a, b: g(torch.add, a, b, alpha=0.5),
    lambda g, a, b: g(torch.mul, a, b), lambda g, a, b: g(torch.sub, a, b), lambda g, a, b: g(torch.sigmoid, a),
    lambda g, a, b: g(torch.softmax, a, -1), lambda g, a, b: g(torch.roll, a, 3, 0), lambda g, a, b: g(torch.abs, a),
    lambda g, a, b: g(torch.clamp, a, -2, 2), lambda g, a, b: g(torch.erf, a),
]  # fmt: skip


def other(op: Any) -> Callable[[Any], Any]:
    """The rule of another op."""
    return lambda rule: RULES[op]


def transposed(rule: Any) -> Any:
    """A result whose strides are the wrong way round."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        v = rule(*args, **kwargs)
        return replace(v, strides=tuple(reversed(v.strides)))

    return wrong


def unmasked(rule: Any) -> Any:
    """The values as if no mask was there."""
    return lambda cx, x, *more, **kwargs: RULES[aten.clone.default](cx, x)


# kind, the function at fault, its arguments, its ATen op, what becomes of its rule
FAULTS: list[tuple[str, Any, Callable[..., tuple[Any, ...]], Any, Callable[[Any], Any]]] = [
    ("wrong rule", torch.tanh, lambda a, b: (a,), aten.tanh.default, other(aten.sin.default)),
    ("wrong rule", torch.maximum, lambda a, b: (a, b), aten.maximum.default, other(aten.minimum.default)),
    ("wrong rule", torch.atan, lambda a, b: (a,), aten.atan.default, other(aten.abs.default)),
    ("wrong stride", torch.relu, lambda a, b: (a,), aten.relu.default, transposed),
    ("wrong stride", torch.flip, lambda a, b: (a, [0]), aten.flip.default, transposed),
    ("missing mask", torch.tril, lambda a, b: (a,), aten.tril.default, unmasked),
    ("missing mask", torch.triu, lambda a, b: (a,), aten.triu.default, unmasked),
]


def planted(number: int, ops: int = OPS) -> tuple[str, Subject, Callable[[], None]]:
    """(kind, a graph of ``ops`` ops that meets it once, what takes it out again)."""
    r = random.Random(number)
    kind, faulty, args, op, wrong = FAULTS[number % len(FAULTS)]
    graph = torch.fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(3)]
    g = lambda f, *args, **kwargs: graph.call_function(f, args, kwargs)  # noqa: E731
    place = r.randrange(ops // 4, ops)
    for i in range(ops):
        a, b = r.sample(values[:3] if i == place else values[-6:] if i > 6 else values, 2)
        values.append(g(faulty, *args(a, b)) if i == place else r.choice(USUAL)(g, a, b))
    wrong_one = values[3 + place]  # what follows may be nearly constant, and hide it
    graph.output(tuple(v for v in values[3:] if not v.users or v is wrong_one))
    inputs = [Tensor((N, N), (N, 1), seed=number + i, between=(-1.5, 2.0)) for i in range(3)]
    before = RULES[op]
    RULES[op] = wrong(before)
    return kind, Subject(torch.fx.GraphModule(torch.nn.Module(), graph), inputs), lambda: RULES.update({op: before})


def main(numbers: list[int]) -> None:
    torch.set_num_threads(1)
    for number in numbers:
        kind, subject, undo = planted(number)
        fault = next(n.name for n in subject.module.graph.nodes if n.target is FAULTS[number % len(FAULTS)][1])
        found = minify(subject)
        undo()
        ops = [n.name for n in found.subject.module.graph.nodes if n.op.startswith("call_")]
        row = {"number": number, "fault": fault, "what": kind, "kind": found.kind, "before": found.before, "ops": ops}
        print(json.dumps({**row, "trials": found.trials, "seconds": round(found.seconds, 1)}), flush=True)


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]])
