"""A question: one choice in its surroundings, and the candidates to decide between.

``question_of`` cuts out the choice with what any variant would fuse with it (``subprogram.cut``) and lists the
candidates: the variants; a Template once for every Tiling worth trying. ``Question.text`` is equal for equal
questions, so that the layers of a transformer are decided once, and is the store's key.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from ..errors import ReflibError
from ..fuse.dependencies import inside
from ..ir.data import encode, to_data
from ..ir.decision import Key
from ..ir.loops import LoopNest
from ..ir.program import Choice, Extern, KernelNode, Node, Program, Template, Variant, Variants
from ..options import Options
from ..target import Target
from .circumstances import decision_key
from .isolation import body_of, digest_of, one_value, ops_in, source_of
from .matmul import apart, on_end, open_template, tilings, with_tiling
from .ranges import Range, key_of, ranges_of
from .subprogram import Subprogram, cut

# Options that change how, not what, is compiled and measured.
NOT_IN_KERNELS = {
    "autotune", "verify", "check_nan", "wrapper", "compile_threads", "isolate", "candidate_seconds", "tuning_seconds",
    "tuning_idle_seconds", "tuning_imports", "cache_decisions", "lookup_table", "num_decompose_k_splits",
    "decompose_k_threshold", "c_shims", "repro", "trace",
}  # fmt: skip
Makers = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Question:
    """``candidates``: the default first. ``text``: everything that is compiled and measured, equal for subprograms that
    do the same to other tensors; empty where it cannot be known (such a decision is not kept)."""

    region: Subprogram
    candidates: dict[Key, Variant]
    ranges: list[Range]
    text: str

    @property
    def choice(self) -> Choice:
        return self.region.choice

    @property
    def default(self) -> Key:
        return next(iter(self.candidates))

    @cached_property
    def named(self) -> dict[str, Key]:
        """The candidates' keys by their names."""
        return {str(key): key for key in self.candidates}

    @cached_property
    def device(self) -> torch.device:
        return self.region.program.buffers[self.choice.outputs[0]].device

    @cached_property
    def sizes(self) -> str:
        return sizes_of(self.region.program, self.choice)

    @cached_property
    def dtypes(self) -> str:
        return dtypes_of(self.region.program, self.choice)

    @cached_property
    def epilogue(self) -> str:
        """The ops that are measured with it, in words that are the same in any program."""
        nodes = [n for n in self.region.program.nodes if n.name in self.region.members]
        return " ".join(dict.fromkeys(o.op for n in nodes for o in n.origins))

    @cached_property
    def store_key(self) -> str:
        return decision_key(self.text + _ranks(self.choice), str(self.device)) if self.text else ""


def question_of(program: Program, choice: Choice, target: Target, options: Options, makers: Makers) -> Question:
    """``makers``: as for ``decide``."""
    region = cut(program, choice, options, target)
    candidates = {key_of(a): a for a in _expand(region, target, options)}
    return Question(region, candidates, ranges_of(choice), text_of(region, list(candidates), options, makers))


def _expand(region: Subprogram, target: Target, options: Options) -> list[Variant]:
    """The variants, a Template once for each tiling. With an epilogue the best two of each kind also with it in kernels
    of its own, which is compiled where the compiler's report leaves open which is faster, and the best on end. (ATen's
    call is a variant, whose epilogue always is a kernel of its own.)"""
    pruned_first = options.isolate or options.autotune == "background"  # else both would always be measured
    out: list[Variant] = []
    for a in region.choice.variants:
        t = open_template(a)
        if t is None:
            out.append(a)
            continue
        both = pruned_first and target.is_gpu and has_epilogue(region.program, region.choice, a)
        seen: dict[str, int] = {}
        found = tilings(t, target, options)
        for tiling in found:
            out.append(with_tiling(a, tiling))
            seen[tiling.kind] = seen.get(tiling.kind, 0) + 1
            if both and seen[tiling.kind] <= 2 and tiling.kind != "split":
                out.append(apart(out[-1]))
        if both:
            out += [with_tiling(a, tiling) for tiling in on_end(found, t, target)]
    return out


def has_epilogue(program: Program, choice: Choice, a: Variant) -> bool:
    """Is the result read by elementwise kernels only? (Or is one in the variant itself, of a choice that includes
    its activation?)"""
    if any(isinstance(n, LoopNest) and not n.reduced for n in a.nodes[1:]):
        return True
    readers = [n for n in program.nodes if set(choice.outputs) & set(n.reads())]
    return bool(readers) and all(isinstance(n, LoopNest) and not n.reduced for n in readers)


# -- candidates that communicate -----------------------------------------------------------------------
def group_of(x: Extern) -> str:
    """The name of a call's process group; "" if it does not communicate."""
    names = [a.name for a in x.target._schema.arguments] if isinstance(x.target, torch._ops.OpOverload) else []
    given = {**dict(zip(names, x.args)), **dict(x.kwargs)}.get("group_name", "")
    return given if isinstance(given, str) else given.group_name


def groups_of(choice: Choice) -> set[str]:
    """The names of the process groups in which its candidates communicate."""
    calls = (x for v in choice.variants for n in v.nodes for x in inside(n) if isinstance(x, Extern))
    return {name for name in map(group_of, calls) if name}


def _ranks(choice: Choice) -> str:
    """How many ranks these have: another number, another decision."""
    import torch.distributed.distributed_c10d as c10d

    sizes = [c10d._resolve_process_group(name).size() for name in sorted(groups_of(choice))]
    return f" {sizes} ranks" if sizes else ""


# -- what it is about, for people and tables -----------------------------------------------------------
def sizes_of(program: Program, choice: Choice) -> str:
    """The shapes of the inputs, for people: ``x[32, 4096] w[4096, 32]``."""
    return " ".join(f"{b}[{', '.join(map(str, program.buffers[b].shape))}]" for b in _tensors(program, choice))


def dtypes_of(program: Program, choice: Choice) -> str:
    found = dict.fromkeys(str(program.buffers[b].dtype).removeprefix("torch.") for b in _tensors(program, choice))
    return " ".join(found)


def _tensors(program: Program, choice: Choice) -> list[str]:
    return [b for b in choice.reads()[:4] if b in program.buffers]


# -- recognising equal questions -----------------------------------------------------------------------
def text_of(region: Subprogram, candidates: Sequence[Key], options: Options, makers: Makers) -> str:
    """Names are replaced by their order of appearance, origins left out. What the user's ops compute, and what makes
    inputs, is in it as source. Empty where an operator has no name, or its source cannot be known."""
    try:
        code = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in NOT_IN_KERNELS}
        values = [_value(t) for t in region.constants.values()]
        program = to_data(region.program)
        bodies = [body_of(op) for op in sorted(set(ops_in(program["nodes"])))]
        bodies += [source_of(makers.get(k)) for _, k in region.choice.inputs_from]
        if None in bodies:
            return ""
        data = json.dumps([_anonymous(program), [encode(str(c)) for c in candidates], code, values, bodies])
    except ReflibError:
        return ""
    names = {*region.program.buffers, *_names(region.program.nodes)}
    seen: dict[str, str] = {}

    def short(m: re.Match[str]) -> str:
        what, word = m.groups()
        return f'"#{seen.setdefault(word, str(len(seen)))}"' if word in names and not what else m.group(0)

    return re.sub(r'("(?:op|kind|reduction)": )?"([^"\\]*)"', short, data)  # (a buffer may be called ``exp``, as an op)


def _names(nodes: Iterable[Node]) -> set[str]:
    """Of nodes, of temporaries and of axes."""
    out: set[str] = set()
    for n in nodes:
        out.add(n.name)
        if isinstance(n, LoopNest):
            out |= {a.var.name for a in n.axes}
        elif isinstance(n, Template):
            out |= _names([*n.prologues, n.epilogue])
        elif isinstance(n, KernelNode):
            out |= _names(n.parts)
        elif isinstance(n, (Choice, Variants)):
            out |= {b.name for a in n.variants for b in a.buffers}.union(*(_names(a.nodes) for a in n.variants))
    return out


def _value(t: Any) -> Any:
    """What a candidate may rely on: a constant that has one value everywhere, and the values of an index."""
    if not isinstance(t, torch.Tensor):
        return None
    fill = one_value(t)
    if fill is not None or t.dtype.is_floating_point or t.dtype.is_complex:
        return fill
    return digest_of(t)


def _anonymous(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _anonymous(v) for k, v in data.items() if k not in ("origins", "reason")}
    return [_anonymous(v) for v in data] if isinstance(data, list) else data
