"""``Options(cuda_graphs=True)``: which calls are recorded, what is copied, and whom outputs belong to. A CPU has no
CUDA graphs: the recorder here replays a call into the memory of the recorded one, as a GPU would."""

import copy
import ctypes
import logging
import random
import weakref

import pytest
import torch

import reflib
from reflib.wrap import cuda_graphs, graph_parts, host

# asked when such a test begins: each of pytest-xdist's workers would compile it while it collects
no_extension = pytest.mark.skipif("host.replays() is None", reason="no C extension")

class OnCpu(cuda_graphs.Recorder):
    kind = "cpu"

    def __init__(self):
        self.recorded, self.replayed, self.shared, self.busy = 0, 0, 0, False

    def stream(self, device):
        return 0

    def place(self, device):
        return -1, 0

    def is_busy(self):
        return self.busy

    def lane(self, device, shared):
        return None

    def record(self, call, args, lane, shared):
        """Nothing is to happen yet, so what inputs held is put back."""
        self.shared += shared
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        held = [x.clone() for x in tensors]
        for x in tensors:
            if x.dtype == torch.int64:
                x.zero_()  # (indices, in memory that nothing was copied to yet)
        outputs = list(call(list(args)))
        for x, old in zip(tensors, held):
            if not torch._debug_has_internal_overlap(x):
                x.copy_(old)
        given = {x.untyped_storage().data_ptr() for x in tensors}
        own = [isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given for x in outputs]
        assert not (shared and any(own))  # what it returns is in memory that it was given, not in the pool
        places = [x if mine else None for x, mine in zip(outputs, own)]
        addresses = [at(x) if isinstance(x, torch.Tensor) else x for x in args]
        self.recorded += 1

        def replay():
            self.replayed += 1
            for new, x in zip(call(list(addresses)), places):
                if x is not None and new.data_ptr() != x.data_ptr():
                    x.copy_(new)

        return outputs, replay, None


def at(x):
    """The same memory, which this does not keep alive: a recording knows addresses."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_like(x)
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(raw, dtype=x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.fixture
def recorder(monkeypatch):
    one = OnCpu()
    monkeypatch.setattr(cuda_graphs, "RECORDER", one)
    return one


def layer(x, w):
    return torch.relu(x @ w), (x * 2).sum(1)


def test_replayed_once_it_is_known_what_moves(recorder):
    w, kept = torch.randn(16, 16), []
    f = reflib.compile(layer, cuda_graphs=True)
    for _ in range(6):
        x = torch.randn(8, 16)
        kept.append(x)  # every x is elsewhere
        torch.testing.assert_close(f(x, w), layer(x, w))
    assert recorder.recorded == 1 and recorder.replayed == 4
    x = torch.randn(8, 32)[:, ::2].contiguous().t().contiguous().t()  # other strides: another graph
    torch.testing.assert_close(f(x, w), layer(x, w))


def test_without_the_extension_calls_run_unrecorded(recorder, monkeypatch, caplog):
    monkeypatch.setattr(host, "replays", lambda: None)
    monkeypatch.setenv("REFLIB_LOGS", "cuda_graphs")
    f, x, w = reflib.compile(layer, cuda_graphs=True), torch.randn(8, 16), torch.randn(16, 16)
    with caplog.at_level("INFO", "reflib.cuda_graphs"):
        for _ in range(4):
            torch.testing.assert_close(f(x, w), layer(x, w))
    assert recorder.recorded == 0 and "C extension" in caplog.text


def test_what_was_returned_never_changes(recorder):
    """Tensors or views of them are held, in any order, and dropped again."""
    f, rng = reflib.compile(layer, cuda_graphs=True), random.Random(0)
    w, x, held = torch.randn(16, 16), torch.randn(8, 16), []
    for _ in range(60):
        x.copy_(torch.randn(8, 16))
        got, want = f(x, w), layer(x, w)
        if rng.random() < 0.5:
            held.append(((got[0][1:], got[1]), (want[0][1:], want[1])))
        if len(held) > rng.randrange(14):
            held.pop(rng.randrange(len(held)))
        for ours, theirs in held:
            torch.testing.assert_close(ours, theirs)
    assert 1 < recorder.recorded <= cuda_graphs.RECORDINGS and recorder.replayed > 30


def test_outputs_that_are_inputs_and_caches_that_are_written(recorder):
    def step(cache, v, x):
        cache[:, 1] = v
        return cache, x, x[2:].t(), cache.sum(0), x.expand(3, *x.shape) * 2

    f = reflib.compile(step, cuda_graphs=True)
    caches = [[torch.zeros(4, 3) for _ in range(2)] for _ in range(3)]  # two that take turns
    for i in range(12):
        v, x = torch.randn(4), torch.randn(1, 5).expand(4, 5)
        results = []
        for run, cache in ((step, caches[0][i % 2]), (f, caches[1][i % 2])):
            out = run(cache, v, x)
            assert out[0] is cache and out[1] is x and out[2].data_ptr() == x.data_ptr()
            results.append([cache.clone(), *out[2:]])
        torch.testing.assert_close(*results)
    assert recorder.recorded == 2  # one for each cache; x and v are copied
    assert recorder.replayed > 6


def test_an_input_that_is_returned_keeps_its_dtype():
    """One of two that are in one storage, as floats and as their bits; or a view of it."""
    x, bits = (a := torch.randn(6, 4)), a.view(torch.int32)
    for args in ([x, bits], [bits, x]):
        given = [y.clone() for y in args]
        for out, want in ((bits, torch.int32), (bits[2:], torch.int32), (x, torch.float32), (x[:, 1], torch.float32)):
            how = cuda_graphs._output(out, args)
            made = given[how] if isinstance(how, int) else how(given)
            assert made.dtype == want and made.shape == out.shape
            assert torch.equal(made.view(torch.int32), out.view(torch.int32))


def replay_of(kinds, wanted, args, launch=lambda: None, copy=None, outputs=(), counts=()):
    addresses = tuple(x.data_ptr() if k == "f" else 0 for k, x in zip(kinds, args))
    counted = cuda_graphs.use_count
    like = (None,) * len(kinds)
    return host.replays()(kinds.encode(), addresses, wanted, like, counted, counts, copy, launch, outputs, None, -1, 0)


@no_extension
@pytest.mark.parametrize("seed", range(40))
def test_a_replay_is_of_what_was_recorded(seed):
    """Inputs of all kinds; one of them changed: nothing happens, and the list is as it was."""
    rng, calls = random.Random(seed), []
    kinds = "".join(rng.choice("fcn") for _ in range(rng.randrange(1, 9)))
    args = [rng.randrange(9) if k == "n" else torch.randn(*(rng.randrange(1, 4) for _ in range(3))) for k in kinds]
    wanted = tuple(x if k == "n" else (*x.shape, *x.stride()) for k, x in zip(kinds, args))
    own, number, i = torch.randn(3, 4).t(), rng.randrange(len(kinds)), rng.randrange(len(kinds))
    copy = (lambda given: calls.append(len(given))) if "c" in kinds else None
    outputs = own, number, ("value",), lambda given: (given[number], 1)
    run = replay_of(kinds, wanted, args, lambda: calls.append("launched"), copy, outputs)
    x = args[i]
    for other in {"n": [x, None], "f": [x, 1], "c": [torch.randn(5, 5, 5), torch.randn(0), None]}[kinds[i]]:
        other = x + 1 if other is x else other  # (elsewhere)
        given = [*args[:i], other, *args[i + 1 :]]
        assert run(given) is None and len(given) == len(args) and not calls
    assert run([*args, 1]) is None
    given = list(args)
    made, same, value, of_inputs = run(given)
    assert not given and calls == [len(args)] * bool(copy) + ["launched"] and value == "value"
    assert same is args[number] and of_inputs == (args[number], 1)
    assert made is not own and made.data_ptr() == own.data_ptr() and made.stride() == own.stride()
    assert torch.equal(made, own)


@no_extension
def test_a_replay_is_not_entered_twice():
    """By another thread while it is launched; an error in it is the caller's, and it can be called again."""
    inner = []

    def launch():
        inner.append(run([x]))
        if len(inner) == 2:
            raise RuntimeError("a lost GPU")

    x = torch.randn(3)
    run = replay_of("f", (None,), [x], launch, outputs=(0,))
    assert run([x]) == (x,) and inner == [None]
    with pytest.raises(RuntimeError, match="a lost GPU"):
        run([x])
    assert run([x]) == (x,) and inner == [None] * 3


@no_extension
def test_a_replay_waits_until_its_results_are_gone():
    own = torch.randn(4)
    storage = own.untyped_storage()
    counts = ((storage._cdata, cuda_graphs.use_count(storage._cdata), storage),)
    run = replay_of("", (), [], outputs=(own, (None,)), counts=counts)
    held, _ = run([])
    assert run([]) is None
    view = held[1:]
    del held
    assert run([]) is None
    del view
    assert run([])[1] is None


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training(recorder, accumulate):
    """Saved activations are read where the recorded forward left them; gradients are held until they are applied."""
    models = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    f = reflib.compile(models[1], cuda_graphs=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    for i in range(12):
        x = torch.randn(5, 8)
        for run, optimizer in zip((models[0], f), optimizers):
            (run(x) ** 2).mean().backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(*[list(m.parameters()) for m in models])
    assert recorder.replayed >= 12


def test_sizes_that_change(recorder):
    f = reflib.compile(lambda x: torch.softmax(x * 2, -1), dynamic=True, cuda_graphs=True)
    for _ in range(3):
        for n in (5, 7, 9):
            x = torch.randn(n, 4)
            torch.testing.assert_close(f(x), torch.softmax(x * 2, -1))
    assert recorder.recorded == 3


def test_calls_that_are_not_recorded_say_why(recorder, monkeypatch, caplog):
    monkeypatch.setenv("REFLIB_LOGS", "cuda_graphs")
    caplog.set_level(logging.INFO, "reflib.cuda_graphs")
    w, x = torch.randn(16, 16), torch.randn(8, 16)
    f = reflib.compile(layer, cuda_graphs=True)
    recorder.busy = True
    for _ in range(4):
        f(x, w)
    assert not recorder.recorded
    recorder.busy = False
    held = [f(x, w) for _ in range(cuda_graphs.RECORDINGS + 4)]
    assert recorder.recorded == cuda_graphs.RECORDINGS and len(held) == cuda_graphs.RECORDINGS + 4
    assert f"{cuda_graphs.RECORDINGS} recordings are of other addresses, or what they returned is in use" in caplog.text
    monkeypatch.setattr(recorder, "record", lambda *a: 1 / 0)
    g = reflib.compile(layer, cuda_graphs=True, fuse=False)
    for _ in range(4):
        torch.testing.assert_close(g(x, w), layer(x, w))
    assert "is not recorded: division by zero" in caplog.text
    monkeypatch.setattr(recorder, "kind", "cuda")
    reflib.compile(layer, cuda_graphs=True, max_fused_ops=9)(x, w)
    assert "test_cuda_graphs.py:" in caplog.text and "has tensors on cpu" in caplog.text


# -- parts ------------------------------------------------------------------------------------------------
@torch.library.custom_op("graph_tests::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


unsafe.register_fake(torch.empty_like)
unsafe.register_autograd(lambda cx, grad: unsafe(grad))


@torch.library.custom_op("graph_tests::own", mutates_args=())
def own(x: torch.Tensor) -> torch.Tensor:
    return x + 1


own.register_fake(torch.empty_like)


def chain(x, w, times):
    for i in range(times):
        x = torch.softmax(torch.relu(x @ w), i % 2) * 3
    return x


def around(x, w):
    """Three runs of steps: around a tagged op, and around a number of rows that data decide."""
    y = chain(x, w, 3)
    z = chain(unsafe(y), w, 3)
    rows = torch.nonzero(z[:, 0] > z[:, 1].mean()).squeeze(1)
    return y.sum(0), chain(z[rows], w, 3).sum(), z[1:]


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_parts(recorder, wrapper, caplog, monkeypatch):
    monkeypatch.setenv("REFLIB_LOGS", "cuda_graphs")
    caplog.set_level(logging.INFO, "reflib.cuda_graphs")
    w, held, rng = torch.randn(16, 16, dtype=torch.float64) / 4, [], random.Random(1)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = reflib.compile(around, cuda_graphs=True, verify=True, wrapper=wrapper)
        for i in range(16):
            x = torch.randn(8, 16, dtype=torch.float64)
            got, want = f(x, w), around(x, w)
            torch.testing.assert_close(got, want)
            if i > 8 and rng.random() < 0.7:
                held.append((got, [t.clone() for t in want]))
            for ours, theirs in held[-3:]:
                torch.testing.assert_close(list(ours), theirs)
    assert "the inference graph is recorded in 3 parts" in caplog.text
    assert "graph_tests.unsafe.default (test_cuda_graphs.py:" in caplog.text and "cudagraph_unsafe" in caplog.text
    assert recorder.recorded >= 3 and recorder.replayed > 20


def test_parts_in_training(recorder):
    """Forward and backward are cut; what a part saves is read where it left it."""
    ws = [(torch.randn(16, 16, dtype=torch.float64) / 4).requires_grad_() for _ in range(1)]
    ws.append(ws[0].detach().clone().requires_grad_())
    fn = lambda x, w: (chain(unsafe(chain(x, w, 4)), w, 4) ** 2).mean()  # noqa: E731
    f = reflib.compile(fn, cuda_graphs=True, verify=True)
    for i in range(16):
        x = torch.randn(6, 16, dtype=torch.float64)
        losses = [run(x, w) for run, w in zip((f, fn), ws)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close([losses[0], ws[0].grad], [losses[1], ws[1].grad])
        if i % 3:
            ws[0].grad = ws[1].grad = None
    assert recorder.replayed > 30


def test_where_a_program_is_cut():
    """Steps that cannot be recorded, and that nothing waits for, go to an end; short runs are not worth a replay."""

    def logged(x, w):
        seen = []
        for _ in range(3):
            x = chain(x, w, 2)
            seen.append(unsafe(x))
        return x, seen

    def kinds(fn, *args):
        torch._dynamo.reset()
        program = reflib.explain(fn, *args).scheduled
        parts = graph_parts.cut(program, "cpu")
        assert sum(len(p.program.nodes) for p in parts) == len(program.nodes)
        return [p.recorded for p in parts[:-1]]

    x, w = torch.randn(8, 16), torch.randn(16, 16)
    assert kinds(logged, x, w) == [True, False]
    assert kinds(lambda x, w: chain(unsafe(chain(x, w, 3)), w, 3), x, w) == [True, False, True]
    assert kinds(lambda x, w: chain(unsafe(x * 2), w, 3), x, w) == [False, True]
    assert kinds(lambda x, w: unsafe(x * 2) + 1, x, w) == [False]


def test_results_are_not_in_the_pool(recorder):
    """One pool for what dies in a call, unless a call returns a result in memory of its own."""
    w, x = torch.randn(16, 16), torch.randn(8, 16)
    for fn, shared in ((lambda x, w: chain(x, w, 2), True), (lambda x, w: own(chain(x, w, 2)), False)):
        recorder.recorded = recorder.shared = 0
        f = reflib.compile(fn, cuda_graphs=True)
        for _ in range(6):
            torch.testing.assert_close(f(x, w), fn(x, w))
        assert (recorder.recorded, recorder.shared) == (1, shared)


# -- TorchInductor's names --------------------------------------------------------------------------------
def test_names_and_modes_of_torchinductor():
    options = {"triton.cudagraphs": True, "cpp_wrapper": True, "max_autotune": True, "emulate_precision_casts": True}
    made = reflib.Options.make(options)
    assert (made.cuda_graphs, made.wrapper, made.autotune, made.numerics) == (True, "cpp", "blocking", "eager")
    assert reflib.Options.make(mode="reduce-overhead") == reflib.Options(cuda_graphs=True)
    assert reflib.Options.make({"autotune": "off"}, "max-autotune") == reflib.Options()
    with pytest.warns(UserWarning, match="ignored: epilogue_fusion, trace.enabled"):
        assert reflib.Options.make({"epilogue_fusion": True, "trace.enabled": True}) == reflib.Options()
    with pytest.raises(reflib.OptionError, match="unknown mode 'fast'; the modes are 'default', 'reduce-overhead'"):
        reflib.Options.make(mode="fast")
    with pytest.raises(reflib.OptionError, match="did you mean 'wrapper'"):
        reflib.Options.make({"wraper": "cpp"})


# -- exported programs, packages ------------------------------------------------------------------------
class Counting(torch.nn.Module):
    """Writes to a buffer and to an argument, returns one it wrote to, a view and a number."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x, total, *, by=2):
        y = torch.softmax(self.fc(x) * by, -1)
        self.calls.add_(1)
        total.add_(y.sum(0))
        return {"y": y + self.calls, "first": x[0], "total": total, "rows": x.shape[0]}


def exported(folder, how, model, *args, dynamic=False):
    """``how``: a package, or the wrapper of an exported program."""
    sizes = {"x": {0: torch.export.Dim("n", min=2)}, "total": None, "by": None} if dynamic else None
    if how == "package":
        path = reflib.aot_compile(
            model, args, folder / "m.reflib", ["cpu"], {"by": 3}, dynamic_shapes=sizes, cuda_graphs=True
        )
        return reflib.load(path)
    program = torch.export.export(model, args, {"by": 3}, dynamic_shapes=sizes)
    return reflib.compile(program, wrapper=how, cuda_graphs=True)


HOW = ["package", "python", "cpp"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_calls_are_recorded(recorder, tmp_path, how, dynamic):
    """They are those of the model, whatever mode they are made in, and whoever keeps the results."""
    model, rng = Counting().eval(), random.Random(0)
    compiled = copy.deepcopy(model)
    f = exported(tmp_path, how, compiled, torch.randn(5, 6), torch.zeros(4), dynamic=dynamic)
    mine, theirs, kept = torch.zeros(4), torch.zeros(4), []
    modes = torch.enable_grad, torch.no_grad, torch.inference_mode
    for _ in range(60):
        x = torch.randn(rng.choice([5, 7]) if dynamic else 5, 6)
        with (mode := rng.choice(modes))():
            got = f(x, mine, by=3)
        with torch.no_grad():
            want = model(x, theirs, by=3)
        assert got["total"] is mine and got["rows"] == want["rows"] and got["first"].data_ptr() == x.data_ptr()
        kept.append((got["y"], want["y"]))
        kept = kept[-rng.randrange(1, 4) :]
        for ours, eager in kept:
            torch.testing.assert_close(ours, eager)
        torch.testing.assert_close(mine, theirs)
        assert mode is torch.inference_mode or not got["y"].is_inference()
    assert 1 <= recorder.recorded <= 2 * cuda_graphs.RECORDINGS and recorder.replayed > 30
    if how != "package":
        return
    changed = {name: torch.randn_like(t) for name, t in model.state_dict().items()}
    f.load_constants(changed)
    model.load_state_dict(changed)
    x, before = torch.randn(5, 6), recorder.replayed
    last, want = f(x, mine, by=3)["y"], model(x, theirs, by=3)["y"].detach()
    assert recorder.replayed == before + 1
    ends = [weakref.ref(r) for rs in f._exported._recorded().recordings.values() for r in rs]
    f.unload()
    assert ends and not any(end() for end in ends)
    torch.testing.assert_close(last, want)


@pytest.mark.parametrize("how", HOW)
def test_a_recorded_call_looks_at_its_arguments(recorder, tmp_path, how):
    """What it was not made for is refused as without recordings, and nothing runs; the next good call replays."""
    f = exported(tmp_path, how, model := Counting(), torch.randn(5, 6), torch.zeros(4))
    x, total = torch.randn(5, 6), torch.zeros(4)
    for _ in range(5):
        f(x, total, by=3)
    wide = torch.empty(5 * 6, dtype=torch.float64)
    bad = {
        "argument x: dtype torch.int32": (x.view(torch.int32), total),
        "argument x: dtype torch.float64": (wide.view(5, 6), total),
        "argument x: size 4 in dimension 0": (x[:4], total),
        "argument x: expected a tensor, got int": (3, total),
        "is written to and shares memory with": (x, x.view(-1)[:4]),
        "another structure": (x,),
    }
    calls = f._state["calls"] if how == "package" else model.calls
    count, state = recorder.replayed, calls.clone()
    for text, args in bad.items():
        with pytest.raises(reflib.ReflibError, match=text):
            f(*args, by=3)
    with pytest.raises(reflib.ReflibError, match="argument by: it was exported with 3, got 4"):
        f(x, total, by=4)
    assert recorder.replayed == count and torch.equal(calls, state)
    turned = torch.empty(6, 5).t().copy_(x)  # only other strides: copied
    torch.testing.assert_close(f(turned, total.clone(), by=3)["y"], f(x, total.clone(), by=3)["y"] - 1)
    f(x, total, by=3)
    assert recorder.replayed > count


def test_why_a_package_is_not_recorded(recorder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("REFLIB_LOGS", "cuda_graphs")
    caplog.set_level(logging.INFO, "reflib.cuda_graphs")

    def around(x):
        y = torch.softmax(x * 2, -1).sum(0).sort().values.cumsum(0)
        i = torch.nonzero(y > 0.1)
        return torch.softmax(x + i.sum(), 0).sort().values.cumsum(1).sin().sum()

    f = reflib.load(reflib.aot_compile(around, (torch.randn(4, 4),), tmp_path / "a.reflib", ["cpu"], cuda_graphs=True))
    x = torch.randn(4, 4)
    for _ in range(4):
        torch.testing.assert_close(f(x), around(x))
    assert not recorder.recorded and "a.reflib are not recorded: " in caplog.text and "nonzero" in caplog.text
