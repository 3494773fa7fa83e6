"""Several models in one file: packages that were built one by one, joined.

The file's manifest has one manifest per model, as it was in its package but for the names of members: with
``manifest.opened(path, model=...)`` everything else reads one of them. All have one member of weights, in which equal
bytes are stored once, whatever their names; what a model writes to is its own.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import PackageError
from . import archive, manifest, weights
from .manifest import Manifest, PackagedVariant

WEIGHTS = "weights.safetensors"


def join_packages(models: Mapping[str, str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Write one file with the packages ``models``, by the names with which ``reflib.load(path, model=name)`` loads
    them. Returns its path. Raises PackageError for a bad name or package, and if it cannot be written."""
    if not models:
        raise PackageError("no models to join: give packages by name, such as {'encode': 'encode.reflib'}")
    opened: dict[str, tuple[archive.Archive, Manifest]] = {}
    for name, package in models.items():
        if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
            raise PackageError(f"{name!r:.80} is no name for a model: it takes letters, digits and _, as a variable's")
        with manifest.opened(package) as (file, about):  # (it stays open)
            opened[name] = file, about
    tensors, kinds = _tensors(opened)
    members: dict[str, Any] = {}
    members[WEIGHTS], packed, spans = weights.pack(tensors, kinds)
    data = {}
    for name, (file, m) in opened.items():
        members |= {_member(name, n): bytes(file.view(n)) for n in file.names if n != WEIGHTS}
        own = tuple(replace(w, name=w.name.partition(".")[2]) for w in packed if w.name.partition(".")[0] == name)
        variants = tuple(_variant(name, v) for v in m.variants)
        data[name] = manifest.write(replace(m, weights=own, spans=spans, variants=variants, entries=()))
    return archive.write(path, {"models": data, "versions": next(iter(data.values()))["versions"]}, members)


def _member(model: str, member: str) -> str:
    """``kernels/MODEL/k0.fatbin``."""
    folder, _, name = member.partition("/")
    return f"{folder}/{model}/{name}" if member else ""


def _variant(model: str, v: PackagedVariant) -> PackagedVariant:
    kernels = tuple(replace(k, image=_member(model, k.image)) for k in v.kernels)
    wrapper, text, python, fallback = (_member(model, n) for n in (v.wrapper, v.text, v.python, v.fallback))
    return replace(v, kernels=kernels, wrapper=wrapper, text=text, python=python, fallback=fallback)


def _tensors(opened: Mapping[str, tuple[archive.Archive, Manifest]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All weights, as ``MODEL.NAME``, and their kinds. Those of equal spans are in one storage."""
    storages: dict[Any, torch.UntypedStorage] = {}
    tensors, kinds = {}, {}
    for model, (file, m) in opened.items():
        view = file.view(WEIGHTS)
        written = {o.target for p in m.programs.values() for o in p.written if o.kind == "weight"}
        apart = {w.span for w in m.weights if w.name in written}
        for i, span in enumerate(m.spans):
            content = hashlib.sha256(view[span.start : span.start + span.size]).digest()
            storage = storages.setdefault((model, i) if i in apart else content, weights.storage(view, span))
            for w in m.weights:
                if w.span == i:
                    tensors[f"{model}.{w.name}"], kinds[f"{model}.{w.name}"] = weights.tensor(storage, w), w.kind
    return tensors, kinds
