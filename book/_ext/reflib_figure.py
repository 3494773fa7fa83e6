"""The first page's figure: model, kernels, package, drawn from what the example on that page made (landing.json)."""

from __future__ import annotations

import html
import json
from itertools import groupby
from pathlib import Path
from typing import Any

ROW, WIDTH = 26, 230
LETTERS = "ABCDEFGH"  # a kernel's colour is not all that tells it


def read(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / "book" / "landing.json").read_text(encoding="utf-8")))


def figure(root: Path) -> str:
    """Three drawings side by side, below one another on a phone, with a caption; words for all three."""
    made = read(root)
    before, after = made["moved"]
    kinds = "kernels and calls" if None in made["kernels"] else "kernels"
    caption = (
        f"The example below, drawn from what it made: {len(made['ops'])} operations become {len(made['kernels'])} "
        f"{kinds}, which move {after / before:.0%} of the bytes, and one file with code for "
        f"{len(made['variants'])} targets."
    )
    ops, variants = len(made["ops"]), len(made["variants"])
    panels = [("model", ops, operations), ("kernels", ops, kernels), ("package", variants + 2, package)]
    drawn = "".join(
        f'<div class="reflib-panel"><div class="reflib-panel-title">{name}</div><svg viewBox="0 0 {WIDTH} '
        f'{rows * ROW + 8}" aria-hidden="true" xmlns="http://www.w3.org/2000/svg">{draw(made)}</svg></div>'
        for name, rows, draw in panels
    )
    return (
        f'<figure class="reflib-figure reflib-landing"><div class="reflib-panels" role="img" '
        f'aria-label="{html.escape(words(made))}">{drawn}</div><figcaption>{html.escape(caption)}</figcaption></figure>'
    )


def box(y: float, height: float, kind: str, texts: list[tuple[str, str]]) -> str:
    """A box at y, with lines of text: (class, text)."""
    middle = y + height / 2 + 5 - (len(texts) - 1) * 19 / 2
    lines = "".join(
        f'<text x="12" y="{middle + i * 19:.0f}" class="{c}">{html.escape(t)}</text>' for i, (c, t) in enumerate(texts)
    )
    return f'<rect x="1" y="{y + 2}" width="{WIDTH - 2}" height="{height - 4}" rx="5" class="{kind}"/>{lines}'


def letter(y: float, kernel: int) -> str:
    return f'<text x="{WIDTH - 12}" y="{y}" class="letter">{LETTERS[kernel]}</text>'


def operations(made: dict[str, Any]) -> str:
    return "".join(
        box(4 + i * ROW, ROW, f"kernel-{kernel}", [("code", op)]) + letter(4 + i * ROW + ROW / 2 + 5, kernel)
        for i, (op, kernel) in enumerate(made["ops"])
    )


def kernels(made: dict[str, Any]) -> str:
    """A box for each kernel, as high as the operations beside it that are in it."""
    parts, y = [], 4
    for kernel, group in groupby(made["ops"], key=lambda pair: pair[1]):
        count = len(list(group))
        generated = made["kernels"][kernel]
        text = f"{generated['lines']} lines of Triton" if generated else "a call of PyTorch's"
        lines = [("what", f"{count} operations"), ("what", text)][-min(count, 2) :]
        parts.append(box(y, count * ROW, f"kernel-{kernel}", lines) + letter(y + count * ROW / 2 + 5, kernel))
        y += count * ROW
    return "".join(parts)


def kilobytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def variant_name(variant: dict[str, Any]) -> str:
    if variant["name"] == "ptx":
        return "PTX, for GPUs to come"
    return "CPU" if variant["name"] == "cpu" else f"{variant['name']}, {variant['generation']}"


def package(made: dict[str, Any]) -> str:
    rows = [(variant_name(a), kilobytes(a["bytes"])) for a in made["variants"]]
    rows.append(("weights, once", kilobytes(made["weights"])))
    parts = []
    for i, (name, size) in enumerate(rows):
        y = 4 + i * ROW
        kind = "variant" if i < len(made["variants"]) else "weights"
        parts.append(box(y, ROW, kind, [("what", name)]))
        parts.append(f'<text x="{WIDTH - 12}" y="{y + ROW / 2 + 5}" class="size">{size}</text>')
    y = 4 + len(rows) * ROW
    parts.append(f'<text x="12" y="{y + 20}" class="size start">model.reflib: {kilobytes(made["size"])}</text>')
    return "".join(parts)


def words(made: dict[str, Any]) -> str:
    grouped = [", ".join(op for op, _ in group) for _, group in groupby(made["ops"], key=lambda pair: pair[1])]
    inside = "; ".join(f"kernel {LETTERS[i]} holds {ops}" for i, ops in enumerate(grouped))
    variants = ", ".join(f"{variant_name(a)} ({kilobytes(a['bytes'])})" for a in made["variants"])
    return (
        f"From model to kernels to package. The model: {len(made['ops'])} operations. The kernels: {inside}. "
        f"The package: code for {variants}, and {kilobytes(made['weights'])} of weights, once."
    )


def example(root: Path) -> str:
    """The ten lines, and what they printed."""
    code = (root / "book" / "landing.py").read_text(encoding="utf-8").rstrip()
    made = read(root)
    versions = ", ".join(f"{k} {v}" for k, v in made["versions"].items() if k in ("torch", "triton"))
    return (
        f"```python\n{code}\n```\n\n"
        f"It prints (with {versions}, on a machine that has no GPU):\n\n```text\n{made['output'].rstrip()}\n```"
    )


PAGES = {"landing-figure": figure, "landing-example": example}
