"""Loading a file of ops as worker processes do: by its path."""

import importlib.util
from pathlib import Path
from types import ModuleType


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
