"""Child process of `lab.peer`: `python -m reflib.lab.peer_child FOLDER` times one peer."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    try:
        result = time_peer(folder / "peer_source.py", job)
    except Exception as error:
        result = refusal(error)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def time_peer(source: Path, job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from reflib.lab import session
    from reflib.lab.measuring import time_cases
    from reflib.lab.timing import Samples

    here = session.setup(device=job["device"].split(":")[0], dtype=job["dtype"], seed=job["seed"], quiet=True)
    device = torch.device(job["device"])
    fn = load(source).make(device=device, dtype=here.dtype, **job["arguments"])
    results = time_cases({"peer": fn}, job["clock"], job["cache"], job["rounds"], job["budget_s"], device)
    found = results["peer"]
    if isinstance(found, Samples):
        return {"seconds": found.seconds, "clock": found.clock, "note": found.note}
    return {"status": found.status, "note": found.note}


def load(source: Path) -> Any:
    """Import the text from a file, which torch.compile and Triton need."""
    spec = importlib.util.spec_from_file_location("peer_source", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_source"] = module
    spec.loader.exec_module(module)
    return module


def refusal(error: Exception) -> dict[str, Any]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # skip a first line that only names the backend
    reason = next((line for line in lines if not line.endswith("raised:")), lines[0])
    return {"status": "refused", "note": f"{type(error).__name__}: {reason[:120]}"}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
