"""Child process of `lab.peer` and `lab.measure_peer`: times a peer at each of the job's places."""

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from reflib.lab.children import Job, serve


def tasks(job: Job) -> Iterator[Any]:
    return (partial(time_peer, job, place) for place in job["places"])


def time_peer(job: Job, place: dict[str, Any]) -> Job:
    from reflib.lab import session
    from reflib.lab.measuring import time_cases
    from reflib.lab.timing import Samples

    here = session.setup(**job["here"], quiet=True)
    source = importlib.import_module("peer_source")
    fn = source.make(device=here.device, dtype=here.dtype, **place)
    found = time_cases({"peer": fn}, **job["timing"], device=here.device)["peer"]
    if isinstance(found, Samples):
        note = "; ".join(p for p in ("own process", found.note) if p)
        return {"seconds": found.seconds, "clock": found.clock, "note": note}
    return {"status": found.status, "note": found.note}


if __name__ == "__main__":
    serve(tasks)
