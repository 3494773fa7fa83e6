"""Writes notebooks reproducibly: the bytes depend on the notebook and its results, not on the host or the time.

    notebook = ipynb["cells": [cell], "metadata": {kernelspec, language_info, reflib: stamp}]
    stamp    = {code_hash, device, versions, commit}

`normalize` keeps sources, tags and outputs, and removes what differs from run to run: execution metadata,
widget state, papermill's metadata, injected parameters, terminal progress lines, host paths, object addresses.
"""

import hashlib
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat

from reflib import atomic

Notebook = Any  # nbformat.NotebookNode: a dict whose keys are also attributes

KEPT_CELL_METADATA = ("tags", "jupyter", "mystnb", "editable", "slideshow")
WIDGET_MIMES = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json")
THEIR_WARNING = r"\S*site-packages\S*:\d+: \w*Warning"  # how stderr begins where a package warns its own developers
BINARY_MIMES = ("image/png", "image/jpeg", "application/pdf")
INJECTED = "injected-parameters"
PROBLEM_MARKERS = ("papermill-error-cell-tag", "papermill-error-cell")


def read(path: str | os.PathLike[str]) -> Notebook:
    """The notebook at `path`, as nbformat 4."""
    return nbformat.read(path, as_version=4)


def code_hash(notebook: Notebook) -> str:
    """Hash of the code cells' sources in order, without injected parameters."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code" and INJECTED not in cell.metadata.get("tags", []):
            digest.update(cell.source.strip().encode() + b"\0")
    return digest.hexdigest()[:16]


def stamp(notebook: Notebook, device: str, versions: Mapping[str, str], commit: str) -> None:
    """Store the origin of the outputs in the notebook's metadata."""
    notebook.metadata["reflib"] = {
        "code_hash": code_hash(notebook),
        "device": device,
        "versions": dict(sorted(versions.items())),
        "commit": commit,
    }


def stamp_problem(notebook: Notebook) -> str:
    """'' if the notebook is unrecorded or its stamp matches its code cells, else an error message."""
    recorded = notebook.metadata.get("reflib")
    if not recorded:
        return ""
    if recorded.get("code_hash") != code_hash(notebook):
        return (
            f"its code cells changed after it was recorded on {recorded.get('device')} at commit "
            f"{recorded.get('commit')}: run `make record` again"
        )
    return ""


def host_paths(more: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """(path on this host, replacement), longest first so that nested folders are replaced correctly."""
    roots = {
        **(more or {}),
        str(Path.cwd()): ".",
        str(Path(__file__).resolve().parents[2]): ".",
        sysconfig.get_path("purelib"): "<site-packages>",
        sysconfig.get_path("stdlib"): "<python>",
        sys.prefix: "<env>",
        sys.base_prefix: "<python>",
        tempfile.gettempdir(): "<tmp>",
        str(Path.home()): "~",
    }
    for name, shown in (("REFLIB_CACHE_DIR", "<cache>"), ("XDG_CACHE_HOME", "<cache>")):
        if os.environ.get(name):
            roots[os.environ[name]] = shown
    too_short = {"/", "/usr", "/usr/local", "."}
    return sorted(((p, s) for p, s in roots.items() if p not in too_short), key=lambda x: -len(x[0]))


def clean_text(text: str, paths: list[tuple[str, str]]) -> str:
    """The text with terminal progress reduced to its last state, without host paths, addresses and kernel files."""
    lines = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n")]
    text = "\n".join(lines)
    if "ipykernel_" in text:  # fast test first: the search is quadratic in word length, up to 100 kB
        text = re.sub(r"\S*ipykernel_\d+/\d+\.py", "<cell>", text)
    for path, shown in paths:
        text = text.replace(path, shown)
    return re.sub(r"\bat 0x[0-9a-f]{6,}", "at 0x...", text)


def clean_data(data: Any, paths: list[tuple[str, str]]) -> Any:
    """`clean_text` on all strings of a mime bundle, nested ones too (Vega-Lite figures are JSON)."""
    if isinstance(data, str):
        return clean_text(data, paths)
    if isinstance(data, list):
        return [clean_data(x, paths) for x in data]
    if isinstance(data, dict):
        return {k: clean_data(v, paths) for k, v in data.items()}
    return data


def clean_outputs(outputs: list[Any], count: int, paths: list[tuple[str, str]]) -> list[Any]:
    """Outputs in committed form: adjacent outputs of one stream joined, widgets replaced by their text, and without
    other packages' warnings."""
    kept: list[Any] = []
    for output in outputs:
        output = nbformat.from_dict(output)
        if output.output_type == "stream":
            if output.name == "stderr" and re.match(THEIR_WARNING, output.text):
                continue
            last = kept[-1] if kept else None
            if last is not None and last.output_type == "stream" and last.name == output.name:
                last.text += output.text
            else:
                kept.append(output)
            continue
        if output.output_type in ("display_data", "execute_result"):
            for mime in WIDGET_MIMES:
                output.data.pop(mime, None)
            if not output.data:
                continue
            text_like = {m: v for m, v in output.data.items() if m not in BINARY_MIMES}
            output.data.update(clean_data(text_like, paths))
            output.metadata = nbformat.from_dict({})
        if output.output_type == "execute_result":
            output.execution_count = count
        if output.output_type == "error":
            output.evalue = clean_text(output.evalue, paths)
            output.traceback = [clean_text(line, paths) for line in output.traceback]
        kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            output.text = clean_text(output.text, paths)
    return [o for o in kept if not (o.output_type == "stream" and not o.text.strip())]


def cell_ids(cells: list[Any]) -> list[str]:
    """Stable ids: cells keep theirs; a missing or repeated one is derived from the cell's source."""
    used: set[str] = set()
    ids = []
    for cell in cells:
        wanted = cell.get("id", "")
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", wanted) or wanted in used:
            base = hashlib.sha256(f"{cell.cell_type}\0{cell.source}".encode()).hexdigest()[:8]
            wanted, again = base, 1
            while wanted in used:
                again += 1
                wanted = f"{base}-{again}"
        used.add(wanted)
        ids.append(wanted)
    return ids


def normalize(notebook: Notebook, replace: Mapping[str, str] | None = None) -> Notebook:
    """A copy in committed form; `replace` adds paths to hide. Idempotent."""
    paths = host_paths(replace)
    source_cells = [
        c
        for c in notebook.cells
        if INJECTED not in c.metadata.get("tags", [])
        and not any(m in c.metadata.get("tags", []) for m in PROBLEM_MARKERS)
    ]
    cells = []
    count = 0
    for cell, cell_id in zip(source_cells, cell_ids(source_cells), strict=True):
        kept = {k: cell.metadata[k] for k in KEPT_CELL_METADATA if k in cell.metadata}
        # set by papermill to hide inputs; an empty "jupyter" has no effect
        kept = {k: v for k, v in kept.items() if v not in ({}, [], None)}
        new = {"cell_type": cell.cell_type, "id": cell_id, "metadata": kept, "source": cell.source.rstrip()}
        if cell.cell_type == "code":
            ran = cell.get("execution_count") is not None or bool(cell.outputs)
            count += ran
            new["execution_count"] = count if ran else None
            new["outputs"] = clean_outputs(cell.outputs, count, paths)
        elif cell.get("attachments"):
            new["attachments"] = cell["attachments"]
        cells.append(new)
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    if "reflib" in notebook.metadata:
        metadata["reflib"] = notebook.metadata["reflib"]
    return nbformat.from_dict({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def write(
    notebook: Notebook, path: str | os.PathLike[str], replace: Mapping[str, str] | None = None
) -> None:
    """Normalize and write atomically; the bytes depend only on the notebook."""
    normal = normalize(notebook, replace)
    nbformat.validate(normal)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, nbformat.writes(normal).rstrip() + "\n")
