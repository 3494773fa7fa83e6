"""Which kernel differs from eager first, and by how much: each step's results beside those of the graph's nodes.

A buffer has the name of the node whose value it holds, so eager is the captured graph, run node by node, in its own
dtypes and again in float64. A step is wrong by the rule of ``autotune/correct.py``; what follows a wrong one is wrong
too, mostly: look at the first.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..autotune import correct
from ..autotune.inputs import copy_of
from ..errors import ReflibError
from ..options import Options
from ..pipeline import Backend, Stages
from ..wrap.bad_values import watching
from .rebuild import Watched


@dataclass(frozen=True)
class Difference:
    """One result of one step. ``error``, ``eager``: of the worst element, ours and eager's own, relative to float64 (to
    eager, where an op refuses float64). ``wrong``: why it is wrong, or empty. ``origin``: op and the user's line."""

    graph: str
    step: str
    buffer: str
    error: float
    eager: float
    wrong: str
    origin: str

    def __str__(self) -> str:
        said = f"WRONG: {self.wrong}" if self.wrong else "right"
        return f"{self.graph} {self.step} -> {self.buffer}: error {self.error:.1e}, eager's {self.eager:.1e}: {said}"


class Differences(list[Difference]):
    """In the order in which the steps ran."""

    @property
    def first(self) -> Difference | None:
        """The first that is wrong, or None."""
        return next((d for d in self if d.wrong), None)

    def __repr__(self) -> str:
        first = self.first
        last = f"first: {first.step}, {first.origin}" if first else "nothing is wrong"
        return "\n".join([*map(str, self), last])


def compare_with_eager(
    f: Callable[..., Any], *args: Any, kwargs: dict[str, Any] | None = None, dynamic: bool | None = None, **options: Any
) -> Differences:
    """Compile and run ``f`` (as in ``explain``), gradients included, and compare every kernel and call with eager.

    options: fields of :class:`reflib.Options`; the wrapper is in Python. Random numbers are drawn twice: where a model
    draws some by ATen's operators, what depends on them differs. Raises ReflibError if nothing was captured.
    """
    from .explain import _graphs, original

    opts = Options.make(options).but(check_nan=True, wrapper="python", target=None)
    found = Differences()

    class Comparing(Backend):
        def around(self, call: Any, what: Any, inputs: Sequence[Any]) -> Any:
            if not isinstance(what, Stages):
                return super().around(call, what, inputs)
            return super().around(lambda given: _compared(call, what, given, found), what, inputs)

    if not _graphs(Comparing, original(f), args, kwargs or {}, opts, dynamic):
        raise ReflibError("compare_with_eager: no tensor operation was captured")
    return found


def _compared(call: Callable[[list], Any], stages: Stages, args: list[Any], found: Differences) -> Any:
    """``call(args)``, with a row for each result of a step."""
    module = stages.graph.module
    eager, wide = _values(module, args, None), _values(module, args, torch.float64)

    def watch(node: Any, wrote: Sequence[Any]) -> None:
        random = torch.Tag.nondeterministic_seeded in getattr(getattr(node, "target", None), "tags", ())
        for name, t in zip(node.writes(), wrote):
            want = eager.get(name)
            if random and isinstance(t, torch.Tensor) and not t.dtype.is_floating_point:
                continue  # a seed: attention returns one
            if isinstance(want, torch.Tensor) and isinstance(t, torch.Tensor) and t.layout == torch.strided:
                found.append(_difference(stages.graph.name, node, name, t, want, wide.get(name)))

    watching.append(watch)
    try:
        return call(args)
    finally:
        watching.pop()


def _difference(graph: str, node: Any, name: str, got: torch.Tensor, want: torch.Tensor, wide: Any) -> Difference:
    origin = next((f"{o.op} at {o.source}" for o in reversed(node.origins)), "")
    wrong, ours, own = correct.beside_eager(got, want, wide)
    return Difference(graph, node.name, name, ours.worst, own.worst, wrong, origin)


@torch.no_grad()
def _values(module: torch.fx.GraphModule, args: Sequence[Any], wide: torch.dtype | None) -> dict[str, Any]:
    """By node; of a node with several results also by ``name_0``. Those before an op that refuses ``wide``, with it."""
    seen: dict[str, Any] = {}

    def saw(n: torch.fx.Node, value: Any) -> None:
        seen[n.name] = value.clone() if isinstance(value, torch.Tensor) and n.op != "placeholder" else value
        for i, t in enumerate(value) if isinstance(value, (tuple, list)) else ():
            seen[f"{n.name}_{i}"] = t

    real = lambda a: isinstance(a, torch.Tensor) and a.dtype.is_floating_point  # noqa: E731
    plain = lambda a: isinstance(a, torch.Tensor) and a.layout == torch.strided  # noqa: E731
    # laid out as given: an attention's bias is the inner part of a padded tensor, and refused otherwise
    given = [copy_of(a, wide if real(a) else None) if plain(a) else copy.copy(a) for a in args]
    try:
        Watched(module, saw).run(*given)
    except Exception:
        if wide is None:
            raise
    return seen
