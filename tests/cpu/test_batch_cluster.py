"""`reflib run --scheduler`: a cluster of processes, here on this machine, whose workers have a stand-in for kernels."""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reflib.batch import cluster as clusters
from reflib.batch import run as batch
from reflib.errors import LabError
from reflib.lab import runner
from tests.batching import checkout
from tests.processes import soon

PRELOAD = f"""
import os, pathlib, sys
sys.path.insert(0, {str(runner.ROOT)!r})
from reflib.lab import executing
from tests.batching import Stand
executing.execute = Stand(float(os.environ.get("STAND_SECONDS", "0.5")), stopped=pathlib.Path("stopped"))
pathlib.Path("up").touch()
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts `dask scheduler` or `dask worker`; ended after the test."""
    children = []
    (tmp_path / "preload.py").write_text(PRELOAD)
    (tmp_path / "dask").mkdir()

    def begin(*words: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "distributed.cli.dask_" + words[0], *words[1:], "--no-dashboard"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        own = {**os.environ, **environment, "DASK_TEMPORARY_DIRECTORY": str(tmp_path / "dask")}
        children.append(subprocess.Popen(command, env=own, cwd=tmp_path, start_new_session=True, **quiet))  # type: ignore[call-overload]
        return children[-1]  # type: ignore[no-any-return]

    yield begin
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture
def address(start: Callable[..., Any]) -> str:
    port = free_port()
    start("scheduler", "--host", "127.0.0.1", "--port", str(port))

    def answers() -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", port)) == 0

    assert soon(answers, 60)
    return f"tcp://127.0.0.1:{port}"


def worker(start: Callable[..., Any], address: str, tmp_path: Path, name: str, *words: str, **environment: str) -> Any:
    own = ("--nthreads", "1", "--no-nanny", "--name", name, "--preload", str(tmp_path / "preload.py"))
    return start("worker", address, *own, *words, **environment)


def test_a_worker_that_is_killed_leaves_the_rest(
    tmp_path: Path, start: Callable[..., Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed while it runs a job, one before its first result is fetched; that takes longer than a fetch may."""
    monkeypatch.setattr(clusters, "WORKERS_SECONDS", 120.0)
    monkeypatch.setattr(clusters, "FETCH_SECONDS", 0.2)
    root = checkout(tmp_path, a="")
    (tmp_path / "s.yaml").write_text("size: [1, 2, 3, 4, 5, 6, 7, 8]\n")
    all_of_them = {name: worker(start, address, tmp_path, name) for name in ("first", "second", "third")}
    said: list[str] = []
    killed: list[str] = []
    outcome_of = clusters.outcome_of

    def fetch(future: Any) -> Any:
        if not killed and third in future.client.who_has([future])[future.key]:
            all_of_them["third"].kill()
            all_of_them["third"].wait()
            killed.append(future.key)
        return outcome_of(future)

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("[4/8] a size=4: ok"):
            all_of_them["first"].kill()

    out = tmp_path / "out"
    cluster = clusters.remote(address)
    assert soon(lambda: len(cluster.workers()) == 3, 120)
    third = next(a for a, w in cluster.workers().items() if w["name"] == "third")
    cluster.close()
    monkeypatch.setattr(clusters, "outcome_of", fetch)
    status = batch.run(root, "cpu", out=out, book=False, say=say, scheduler=address, sweep_file=tmp_path / "s.yaml")
    found = json.loads((out / "results.json").read_text())["results"]
    assert status == 0 and len(found) == 8, said
    assert {r["status"] for r in found} == {"ok"}
    by_name = {r["worker"] for r in found}
    assert killed and by_name == {"first", "second"} and "3 at the same time" in said
    assert found[-1]["worker"] == "second"
    pids = {p.read_text() for p in (out / "jobs").glob("*/log.txt")}
    assert len(pids) == 2  # each in its worker's process: nothing but bytes came from there
    with pytest.raises(LabError, match=r"no worker of .* offers a GPU: start them with dask worker"):
        batch.run(root, "cuda", say=said.append, scheduler=address)


def test_jobs_on_gpus_go_to_workers_that_offer_one(
    tmp_path: Path, start: Callable[..., Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "WORKERS_SECONDS", 120.0)
    worker(start, address, tmp_path, "gpu", "--resources", "GPU=1", CUDA_VISIBLE_DEVICES="7,6")
    cluster = clusters.remote(address)
    try:
        assert (cluster.slots("cuda"), cluster.slots("cpu")) == (1, 1)
        assert (cluster.resolve("auto"), cluster.resolve("cpu")) == ("cuda", "cpu")
    finally:
        cluster.close()
    root = checkout(tmp_path, a="")
    assert batch.run(root, out=tmp_path / "out", book=False, say=str, scheduler=address) == 0
    [found] = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert (found["parameters"]["device"], found["worker"], found["status"]) == ("cuda", "gpu", "ok")


def test_a_job_ends_with_the_run_that_wants_it(tmp_path: Path, start: Callable[..., Any], address: str) -> None:
    """The run is killed: its scheduler and the worker go on, the job does not."""
    root = checkout(tmp_path, a="")
    worker(start, address, tmp_path, "one", STAND_SECONDS="300")
    assert soon((tmp_path / "up").exists, 120)
    words = [sys.executable, "-m", "reflib.cli", "run", "--root", str(root), "--scheduler", address, "--no-book"]
    with open(tmp_path / "said", "w+") as said:
        child = subprocess.Popen(words, cwd=runner.ROOT, stdout=said, stderr=said)
        try:
            soon(lambda: "[1/1] a ..." in (tmp_path / "said").read_text() or child.poll() is not None, 120)
            assert child.poll() is None, (tmp_path / "said").read_text()
            time.sleep(1)
        finally:
            child.kill()
            child.wait()
    assert soon((tmp_path / "stopped").exists, 120)


@pytest.mark.parametrize(
    "address, message",
    [
        ("tcp://127.0.0.1:PORT", "no Dask scheduler responds at tcp://127.0.0.1:.*refused.*`dask scheduler`"),
        ("tcp://no-such-host.invalid:8786", "no Dask scheduler responds at tcp://no-such-host.invalid:8786"),
        ("nonsense", "--scheduler nonsense: missing port number .*such as tcp://"),
        ("foo://x:1", "--scheduler foo://x:1: unknown address scheme"),
    ],
)
def test_an_unreachable_scheduler_is_told_quickly(tmp_path: Path, address: str, message: str) -> None:
    root = checkout(tmp_path, a="")
    begun = time.monotonic()
    with pytest.raises(LabError, match=message):
        batch.run(root, "cpu", say=print, scheduler=address.replace("PORT", str(free_port())))
    assert time.monotonic() - begun < 20 and not (root / "runs").exists()


# ---- what a cluster's workers are asked first


def asked(answers: dict[str, Any], **facts: dict[str, Any]) -> clusters.JobCluster:
    """A cluster whose workers answer so."""
    known = {a: {"name": a, "nthreads": 1, "resources": {}} | facts.get(a, {}) for a in answers}
    client = SimpleNamespace(
        wait_for_workers=lambda n, timeout: None,
        run=lambda function, on_error: answers,
        scheduler_info=lambda n_workers: {"workers": known},
    )
    return clusters.JobCluster(client, "tcp://x:1")


def answer(**more: str) -> dict[str, str]:
    return {"reflib": importlib.metadata.version("reflib"), "lacks": "", "host": "h", "gpu": "", **more}


def test_workers_that_cannot_be_used_are_named() -> None:
    clusters.check(asked({"a": answer(), "b": answer()}))
    gpu = {"resources": {"GPU": 1}}
    clusters.check(asked({"a": answer(gpu="0"), "b": answer(gpu="1")}, a=gpu, b=gpu))
    for cluster, message in [
        (asked({"a": answer(), "b": answer(reflib="0.0.1")}), "worker b .*has 0.0.1 reflib, not"),
        (asked({"a": answer(reflib="")}), "worker a .*has no reflib, not .*pip install"),
        (asked({"a": answer(lacks="papermill")}), "worker a .*lacks papermill: pip install"),
        (asked({"a": ModuleNotFoundError("no msgpack")}), "worker a .*cannot be inspected: .*no msgpack"),
        (asked({"a": answer()}, a={"nthreads": 4}), "worker a .*start it with --nthreads 1"),
        (asked({"a": answer(gpu="0"), "b": answer(gpu="0")}, a=gpu, b=gpu), "worker b .* both see GPU 0"),
        (asked({"a": answer(), "b": answer()}, a=gpu, b=gpu), "both see all GPUs"),
    ]:
        with pytest.raises(LabError, match=message):
            clusters.check(cluster)


def test_the_facts_of_a_worker_need_no_reflib_to_be_asked() -> None:
    import cloudpickle

    sent = cloudpickle.dumps(clusters.facts_of_worker())
    program = f"import cloudpickle; print(cloudpickle.loads({sent!r})()['host'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    assert done.stdout.strip() == socket.gethostname(), done.stderr
    assert b"reflib.batch.cluster" not in sent.split(b"facts_of_worker")[0]


def test_a_cluster_in_this_process_opens_no_port() -> None:
    before = listening()
    cluster = clusters.local(2)
    try:
        assert (cluster.slots("cpu"), cluster.slots("cuda")) == (2, 0)
        assert listening() == before
    finally:
        cluster.close()


def listening() -> set[str]:
    """This process's TCP sockets that listen."""
    own = set()
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(handle).removeprefix("socket:[").removesuffix("]"))
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {line[1] for line in lines if line[3] == "0A" and line[9] in own}
