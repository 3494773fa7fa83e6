"""What all tests share: a cache of their own, fixed random examples, the GPU marker."""

import contextlib
import gc
import hashlib
import logging
import os
import re
import resource
import signal
import sys
import sysconfig
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import forking, kernels
from tests.overheads import without_overheads

# Examples are derived from the test alone: a failure on CI is the same failure here.
settings.register_profile(
    "reflib",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# `make fuzz` looks further afield
settings.register_profile("fuzz", parent=settings.get_profile("reflib"), derandomize=False)
settings.load_profile("fuzz" if os.environ.get("REFLIB_FUZZ") else "reflib")

CACHE = "REFLIB_CACHE_DIR"
# A run in the background of a script ignores Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Threads of OpenMP that wait keep their core busy, which is some other test's: a quarter of all processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Where CI is set, PyTorch refuses results that alias before our own check sees them; elsewhere it warns.
os.environ.setdefault("TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING", "0")
# Processes that tests start import what is in the first folder before all else, and may import `tests`.
FOLDERS = [str(Path(__file__).parent / "child"), str(Path(__file__).parents[1])]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="without the tests marked slow, and one variant in n of those marked sample(n)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One cache for the whole run: xdist's workers inherit the folder that their controller makes. Decisions are not
    kept in it: tests measure. ``--quick``: chapters show what is recorded of TorchInductor, and measure briefly, and
    fewer random graphs are drawn."""
    os.environ.setdefault("REFLIB_CACHE_DECISIONS", "0")
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in FOLDERS]
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *path])
    if config.getoption("--quick"):
        os.environ.setdefault("REFLIB_LAB_PEERS", "0")
        os.environ.setdefault("REFLIB_LAB_BUDGET", "0.1")
        os.environ.setdefault("REFLIB_FUZZ_SECONDS", "4")
        # each process with TorchInductor would compile programs and start Pythons to see which vectors this CPU has
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
        fork_kernels()
    if CACHE not in os.environ:
        config.stash[made] = tempfile.TemporaryDirectory(prefix="reflib-tests-")
        os.environ[CACHE] = config.stash[made].name
    quick, worker = config.getoption("--quick"), hasattr(config, "workerinput")
    if quick and config.getoption("numprocesses", None) and not worker:
        servers.enter_context(forking.shared())
        kernels.fork_tests()


def fork_kernels() -> None:
    """Where there is nbval, and processes can be forked."""
    with contextlib.suppress(ImportError):
        from jupyter_client.provisioning import local_provisioner

        local_provisioner.launch_kernel = kernels.launch


def pytest_unconfigure(config: pytest.Config) -> None:
    kernels.end_server()
    servers.close()
    folder = config.stash.get(made, None)
    if folder is not None:
        os.environ.pop(CACHE, None)
        folder.cleanup()


# -- what a failed run leaves behind (REFLIB_ARTIFACTS=1), in runs/<id>/ -------------------------------
failures: dict[str, str] = {}  # what to run again -> why


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:  # (a chapter's cells need those before them)
        what = report.nodeid.partition("::")[0] if ".ipynb" in report.nodeid else report.nodeid
        failures[what] = f"{failures.get(what, '')}\n{report.nodeid} ({report.when})\n{report.longreprtext}".lstrip()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:  # (each of xdist's workers says so)
        failures[report.nodeid or "."] = f"{report.nodeid} (collected)\n{report.longreprtext}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With xdist: in the controller, which hears of all failures."""
    if not failures or "PYTEST_XDIST_WORKER" in os.environ:
        return
    from reflib.batch.artifacts import Failed, gather, wanted

    if not wanted():
        return
    notebook = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout", "600"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--rootdir", str(session.config.rootpath)]

    def again(what: str) -> list[str]:
        path = str(session.config.rootpath / what)
        return [*command, "-p", "no:cacheprovider", *(notebook if what.endswith(".ipynb") else []), path]

    folder = session.config.rootpath / "runs" / time.strftime("tests-%Y%m%d-%H%M%S")
    problems = gather(folder, [Failed(w, why, lambda _, w=w: again(w)) for w, why in failures.items()])
    print("\n".join(["", *problems, f"artifacts: {folder / 'index.html'}"]))
    if problems:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


servers = contextlib.ExitStack()
made = pytest.StashKey[tempfile.TemporaryDirectory]()


# Files that take nine seconds of processor or more, the longest first. pytest-xdist hands out whole files in this order
# (`--dist loadfile --no-loadscope-reorder`), so that none of them is left for the end, on one core alone.
LONGEST = (
    "test_browser.py", "cpp-wrapper.ipynb", "test_jupyterlab.py", "numerics.ipynb", "async-autotuning.ipynb",
    "multi-arch-packages.ipynb", "tuning-across-ranks.ipynb", "test_semantics.py", "test_flex_attention.py",
    "test_flex_decoding.py",
    "training.ipynb", "whole-transformer.ipynb", "observability.ipynb", "a-gpu-for-compiler-readers.ipynb",
    "the-matmul-ladder.ipynb", "mini-compiler-tuned.ipynb", "mini-compiler.ipynb", "fusion.ipynb",
    "inline-fusion.ipynb", "test_figures_move.py",
    "test_batch_invariant.py", "test_symmetric.py", "test_like_eager.py", "loops-to-triton.ipynb", "test_ranks.py",
    "test_report_packed.py", "your-own-kernel.ipynb", "test_memory_report.py", "test_triton_compile.py",
    "input-ranges.ipynb", "test_user_kernels.py", "test_grouped_matmul.py", "test_prologue.py", "test_weekend.py",
    "test_notebook_alone.py", "reductions.ipynb", "reductions-of-every-shape.ipynb", "decompose-k.ipynb",
    "test_package_export_cpp.py", "test_repro.py",
    "test_capture_export_gpu.py", "test_package_decisions.py", "test_composition.py", "test_complex_pairs.py",
    "test_mix_order.py", "test_runner.py", "collectives.ipynb", "test_background.py", "memory.ipynb", "test_opinfo.py",
    "test_fuzz.py", "test_sweep.py", "test_cpp_ops.py", "test_collectives.py", "test_models.py", "test_refilling.py",
    "test_batch.py", "test_triton_programs.py", "test_one_pass.py", "test_slice_sums.py", "test_fuzz_hostile.py",
    "test_layouts.py", "test_symmetric_kernels.py", "test_cpp_wrapper_built.py",
)  # fmt: skip


# parameters of chapters with --quick
QUICK = {"cpp-wrapper": {"steps": 8}, "inline-fusion": {"side": "512", "inner": "512"}}


def make_quick(item: pytest.Item) -> None:
    """A chapter's cell of parameters gets those of QUICK."""
    cell = getattr(item, "cell", None)
    if cell and "parameters" in cell.metadata.get("tags", []):
        for name, value in QUICK.get(item.path.stem, {}).items():
            given = rf'(?m)^({name}: \w+ = )(?:\d+|"auto")'
            cell.source, changed = re.subn(given, rf"\g<1>{value!r}", cell.source)
            assert changed, f"{item.path.stem} has no parameter {name}"


SEEDS = 4  # (of so many variants that differ in a seed alone, one is in a quick run)


def place(item: pytest.Item) -> int:
    name = item.nodeid.partition("::")[0].rpartition("/")[2]
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """What ``--quick`` leaves out, chapters' cells tagged ``slow`` too. Which variants of a test it keeps is drawn by a
    hash of their names (``each``: until every value of every parameter is there); of those that only draw other numbers
    (``seed``) and have no mark, one in SEEDS."""
    slow, variants, products = [], defaultdict(list), defaultdict(list)
    for item in items:
        cell = getattr(item, "cell", None)
        if item.get_closest_marker("slow") or (cell and "slow" in cell.metadata.get("tags", [])):
            slow.append(item)
        elif item.get_closest_marker("each"):
            products[item.nodeid.partition("[")[0]].append(item)
        elif mark := item.get_closest_marker("sample"):
            variants[item.nodeid.partition("[")[0], mark.args[0]].append(item)
        elif "seed" in (given := dict(getattr(getattr(item, "callspec", None), "params", {}))):
            del given["seed"]
            variants[f"{item.nodeid.partition('[')[0]} {given}", SEEDS].append(item)
    for (_, n), group in variants.items():
        group.sort(key=lambda item: zlib.crc32(item.name.encode()))
        slow += group[-(-len(group) // n) :]
    for group in products.values():
        kept = with_each_value(group)
        slow += [item for item in group if item not in kept]
    return slow


def with_each_value(group: list[pytest.Item]) -> set[pytest.Item]:
    """Few variants of one test, among which every value of every parameter is."""
    values = {i: {(name, repr(v)) for name, v in i.callspec.params.items()} for i in group}  # type: ignore[attr-defined]
    group = sorted(group, key=lambda item: hashlib.sha1(item.name.encode()).digest())
    kept, missing = set[pytest.Item](), set().union(*values.values())
    while missing:
        kept.add(best := max(group, key=lambda item: len(values[item] & missing)))
        missing -= values[best]
    return kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first. What needs a GPU (all under tests/gpu) is skipped where there is no CUDA device."""
    if config.getoption("--quick") and (out := set(left_out(items))):
        config.hook.pytest_deselected(items=list(out))
        items[:] = [i for i in items if i not in out]
    if config.getoption("--quick"):
        for item in items:
            make_quick(item)
    items.sort(key=place)
    gpu_folder = str(Path(__file__).parent / "gpu") + os.sep
    wanting = [i for i in items if i.get_closest_marker("gpu") or str(i.path).startswith(gpu_folder)]
    if not wanting:
        return
    import torch

    for item in wanting:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is collected stays: whoever collects garbage would look through all of it


@pytest.fixture(autouse=True, scope="module")
def little_garbage(request: pytest.FixtureRequest) -> None:
    """Files that collect garbage look through what others left once, not each time."""
    if hasattr(request.module, "gc"):
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """Functions compiled anew in every test: one that several tests compile soon meets Dynamo's limit of
    recompilations, past which it silently runs eagerly. (Where nothing has imported Dynamo, nothing is compiled.)"""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
        without_overheads()
        # pytest attaches its handlers to loggers that do not propagate, and where this one has any, torch formats and
        # writes every graph of every stage
        traces = logging.getLogger("torch.__trace")
        traces.propagate = True
        traces.handlers.clear()


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner's, but for tests of how they are started."""
    pool, own = sys.modules.get("reflib.autotune.pool"), request.path.name.startswith("test_pool")
    if pool and not own and request.config.getoption("--quick"):
        monkeypatch.setattr(pool, "subprocess", pool.subprocess)
        kernels.fork_workers()


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE, str(folder))
    yield folder


@pytest.fixture
def kept(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """An empty store of decisions, which are kept in it."""
    from reflib.autotune.store import store

    monkeypatch.setenv("REFLIB_CACHE_DECISIONS", "1")
    return store()


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``lab`` runs in a Python of its own is forked from a process that has imported torch."""
    from reflib.lab import children
    from tests.forking import child_of, server

    monkeypatch.setattr(children, "_run_child", child_of(server()))
    monkeypatch.setattr(children, "cores", lambda: 1)  # which forks one at a time


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The published book: (the folder of pages, the seconds of processor that building them took). One of xdist's
    workers builds it, the others wait for it."""
    filelock = pytest.importorskip("filelock")
    from reflib.lab import book

    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "site"
    seconds = folder / "seconds"
    with filelock.FileLock(f"{folder}.lock"):
        if not seconds.exists():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            book.build(root, folder, named="https://github.com/somebody/reflib")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            seconds.write_text(str(took))
    return folder / "_build" / "html", float(seconds.read_text())


@pytest.fixture(scope="session")
def site(built: tuple[Path, float]) -> Path:
    """The folder of the published book's pages. Only read it: other tests do."""
    return built[0]


@pytest.fixture(scope="session")
def host_folders(root: Path) -> list[bytes]:
    """This machine's folders: none of them may be in a file that is for other machines."""
    ours = {tempfile.gettempdir(), str(Path.home()), str(root), str(Path.cwd()), sysconfig.get_path("purelib")}
    return [f"{name.rstrip('/')}/".encode() for name in sorted(ours - {"/"})]


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    """Two gloo ranks on this machine."""
    yield from _ranks(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    yield from _ranks(4)


def _ranks(size: int) -> Iterator[Any]:
    """Each is a fork, of a process that has imported what it needs."""
    from reflib.lab import rank_group

    context = SimpleNamespace(get_context=lambda way: kernels.fork_server())
    with pytest.MonkeyPatch.context() as m, contextlib.closing(rank_group.ranks(size)) as found:
        m.setattr(rank_group, "multiprocessing", context)
        yield found
    assert not found.processes
