"""`lab.show_wins`: where reflib is much faster than TorchInductor, what both have generated, side by side.

A ratio that bytes do not explain has its cause in the kernels: how often a row is read, how many kernels there are.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reflib.lab.rivals import own_copy
from reflib.lab.rows import Rows, show_plain
from reflib.lab.showing import Listing, show, table

WIN = 1.5  # times as fast as TorchInductor: both kernels are shown
Texts = tuple[str, Sequence[Any]]  # TorchInductor's program after its imports, reflib's kernels
COMMENTS = re.compile(r"^# (?!Topologically).*\n", re.M)  # where a kernel's file is, and the graph that it is made of
HEADS = ("compiler", "kernel", "loops", "loads", "stores")


def generated(fn: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None) -> Texts:
    """What both compilers generate for `fn(*args)`, and for its gradients if an argument needs them. `options` are
    TorchInductor's."""
    import torch
    import torch._inductor.config as config
    from torch._inductor.utils import run_and_get_code

    import reflib

    theirs = torch.compile(own_copy(fn), dynamic=False, options=dict(options) if options else None)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]

    def step() -> None:
        result = theirs(*args)
        if leaves:
            torch.autograd.grad(result, leaves, torch.ones_like(result))

    with config.patch(fx_graph_cache=False):  # a program from the cache has no text
        _, texts = run_and_get_code(step)
    e = reflib.explain(own_copy(fn), *args, dynamic=False)
    backward = e.backward.kernels if leaves and e.backward else ()
    return "\n\n".join(map(after_imports, texts)), [*e.kernels, *backward]


def after_imports(text: str) -> str:
    """TorchInductor's program from its first kernel on, of its comments those that name a kernel's operations.

    >>> print(after_imports("# kernel path: a\\n# Topologically Sorted Source Nodes: [x]\\n#   x => y\\nk = 1"))
    # Topologically Sorted Source Nodes: [x]
    k = 1
    """
    own = text.split("_SymmetricMemory.empty_strided_p2p")[-1]
    return COMMENTS.sub("", own).strip()


def show_wins(
    rows: Rows,
    texts_at: Callable[[dict[str, Any]], Texts],
    *,
    ours: str = "reflib",
    theirs: str = "TorchInductor",
) -> None:
    """A line per kernel of both compilers wherever `ours` is more than `WIN` times as fast as `theirs`, and the texts
    themselves of the largest win. `texts_at(at)` returns the texts of a place, as `generated` does. Places with the
    same texts have one table, below the largest of their wins."""
    found = wins(rows, ours, theirs)
    if not found:
        print(f"Nowhere is {ours} more than {WIN} times as fast as {theirs} here.")
    seen: list[tuple[str, list[str]]] = []
    for at, ratio in found:
        place = ", ".join(f"{key}: {show_plain(value)}" for key, value in at.items())
        text, kernels = texts_at(at)
        print(f"{place or 'here'}: {ratio:.2f} times as fast as {theirs}")
        if (program := (text, [k.source for k in kernels])) in seen:
            continue
        seen.append(program)
        lines = [*counted("TorchInductor", text), *(line for k in kernels for line in counted("reflib", k.source))]
        table(lines, *HEADS)
        if at is found[0][0]:  # the largest win
            language = "python" if "@triton.jit" in text or "def call" in text else "cpp"
            show(Listing("TorchInductor's program, after its imports", text, language), list(kernels))


def wins(rows: Rows, ours: str = "reflib", theirs: str = "TorchInductor") -> list[tuple[dict[str, Any], float]]:
    """(place, ratio) for each place where `ours` is more than `WIN` times as fast, the largest first."""
    timed = [r for r in rows.where(metric="time") if r.ok and r.value]
    us = {(r.case, tuple(r.at.items())): r.value or 0.0 for r in timed}
    places = {tuple(r.at.items()): dict(r.at) for r in timed}
    ratios = [(at, us[theirs, k] / us[ours, k]) for k, at in places.items() if {(theirs, k), (ours, k)} <= set(us)]
    return sorted((one for one in ratios if one[1] > WIN), key=lambda one: -one[1])


def counted(compiler: str, text: str) -> list[tuple[Any, ...]]:
    """For each kernel of the text: its name, and how many loops, loads and stores it has; for each call of a library's
    kernel a line as well.

    >>> counted("TorchInductor", "@triton.jit\\ndef k(x):\\n    for i in range(9):\\n        a = tl.load(x)\\n")
    [('TorchInductor', 'k', 1, 1, 0)]
    """
    found: list[tuple[Any, ...]] = []
    for part in text.split("@triton.jit")[1:]:
        body = part.split("'''")[0]
        name = re.search(r"def (\w+)", body)
        loops = len(re.findall(r"^\s+for \w+ in ", body, re.M))
        loads, stores = body.count("tl.load("), body.count("tl.store(")
        if name and loads + stores:  # else it is a function that kernels call
            found.append((compiler, name[1], loops, loads, stores))
    for part in re.split(r'extern "C"', text)[1:]:
        name = re.search(r"(\w+)\(", part)
        if name and name[1].endswith("_packed"):
            continue  # calls the one before it
        found.append((compiler, name[1] if name else "", len(re.findall(r"\bfor\s?\(", part)), "-", "-"))
    calls = re.findall(r"^\s+(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", text, re.M)
    return found + [(compiler, f"a call: {name}", "-", "-", "-") for name in calls]
