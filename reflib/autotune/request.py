"""What to measure, and what was found: plain data, so that another process can do the measuring."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import MeasureError
from ..ir.data import to_data
from ..ir.decision import Candidate, Key
from ..ir.expr import Atom, Expr, expr
from ..ir.program import Program, symbols_in
from ..options import Options
from .inputs import InputSpec

RACE = "<race>"  # in a candidate's place: those near the best, at the end


@dataclass(frozen=True)
class Limits:
    """``seconds``: for the whole request, best effort: what comes too late is skipped. ``candidate_seconds``: for
    timing one candidate; one whose calls are too slow for that is timed by a single call. ``memory``: bytes for inputs,
    copies of the weights and outputs; None: 2 GiB or half of what is free, if that is less. ``rounds``: of the race."""

    seconds: float = 60.0
    candidate_seconds: float = 5.0
    memory: int | None = None
    rounds: int = 15


@dataclass(frozen=True)
class Request:
    """What to measure: plain data that can be pickled, except for what the programs hold by reference.

    programs: candidate -> ``ir.data.to_data`` of a program; all have the same inputs and outputs.
    default: the candidate that stays unless another is worth it. reference: whose program, widened, is right.
    keys: of the candidates whose key is more than their name.
    inputs: one spec per argument. sizes: size symbol -> value.
    options: fields of Options for all; patches: candidate -> fields that differ. autotune is "off" always.
    min_speedup: default's time / winner's time at least. graph_timing: False times plain calls, launches included.
    makers, imports: for another process: what makes inputs, by the keys in their specs (``by_value.makers``); what it
        imports first, names of modules, paths of files, ops by value.
    paired: the device does other work meanwhile: each candidate is timed in turn with the default.
    """

    programs: dict[str, dict[str, Any]]
    default: str
    reference: str
    inputs: tuple[InputSpec, ...]
    keys: dict[str, Key] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    patches: dict[str, dict[str, Any]] = field(default_factory=dict)
    min_speedup: float = 1.0
    graph_timing: bool = True
    paired: bool = False
    seed: int = 0
    limits: Limits = Limits()
    makers: bytes = b""
    imports: tuple[str | bytes, ...] = ()

    def key(self, name: str) -> Key:
        return self.keys.get(name) or Key(name)


@dataclass(frozen=True)
class Result:
    """``rows``: in the request's order; status ``ok``, ``wrong``, ``error`` (it raised) or ``skipped``. ``clock``:
    graph, events or wall. ``reference``: float64, float32 or default (whose results stood for it). ``seconds``: how
    long measuring took. ``complete``: no limit cut it short; another run would find nothing else."""

    rows: tuple[Candidate, ...]
    winner: str
    reason: str
    clock: str = ""
    reference: str = ""
    seconds: float = 0.0
    complete: bool = True

    def row(self, name: str) -> Candidate:
        return next(r for r in self.rows if r.name == name)


def request(
    programs: Mapping[str, Program],
    default: str,
    reference: str | None = None,
    *,
    keys: Mapping[str, Key] | None = None,
    sizes: Mapping[str, int] | None = None,
    weights: Collection[str] = (),
    makers: Mapping[str, str] | None = None,
    options: Options | None = None,
    patches: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,
) -> Request:
    """A Request to measure ``programs`` at ``sizes`` (symbol -> value; the traced value where none is given).

    reference: ``default``'s program unless given. weights: names of input buffers (consts count as such). makers:
    input buffer -> key of a maker. more: ``min_speedup``, ``graph_timing``, ``seed``, ``limits``.
    Raises MeasureError if the programs' inputs differ, or for a name that is not there.
    """
    reference = default if reference is None else reference
    for name in (default, reference):
        if name not in programs:
            raise MeasureError(f"no candidate {name!r}; the candidates are {', '.join(programs)}")
    env = _sizes(programs.values(), sizes or {})
    specs = {name: _specs(p, env, set(weights), makers or {}) for name, p in programs.items()}
    for name, found in specs.items():
        if [replace(s, name="") for s in found] != [replace(s, name="") for s in specs[default]]:
            raise MeasureError(f"candidate {name!r} takes other inputs than {default!r}")
    plain = json.loads(json.dumps(asdict((options or Options()).but(autotune="off"))))
    data = {name: to_data(p) for name, p in programs.items()}
    changed = {name: dict(p) for name, p in (patches or {}).items()}
    structured = {name: key for name, key in (keys or {}).items() if name in programs}
    return Request(data, default, reference, specs[default], structured, env, plain, changed, **more)


def _sizes(programs: Collection[Program], given: Mapping[str, int]) -> dict[str, int]:
    env = {}
    for p in programs:
        shapes = [(b.shape, b.strides) for b in p.buffers.values()]
        for s in symbols_in((shapes, [expr(i) for i in p.inputs if isinstance(i, (Expr, Atom))])):
            env[s.name] = int(given.get(s.name, expr(s).hint()))
    return env


def _specs(
    p: Program, sizes: dict[str, int], weights: Collection[str], makers: Mapping[str, str]
) -> tuple[InputSpec, ...]:
    def one(i: Any) -> InputSpec:
        if isinstance(i, (Expr, Atom)):
            return InputSpec(str(i), "size", int(expr(i).evaluate(sizes)))
        if i is None:
            return InputSpec("", "unused")
        b = p.buffers[i]
        shape, strides = (tuple(int(e.evaluate(sizes)) for e in es) for es in (b.shape, b.strides))
        role = "weight" if i in weights or b.kind == "const" else "activation"
        return InputSpec(i, role, 0, shape, strides, str(b.dtype).removeprefix("torch."), str(b.device), makers.get(i))

    return tuple(one(i) for i in p.inputs)
