"""The parameters cell and `lab.setup`."""

import linecache

import pytest
import torch

from reflib import lab
from reflib.errors import LabError
from reflib.lab import machine, session
from reflib.lab.params import parse_parameters, validate

CELL = """device: str = "auto"     # where to run (auto | cpu | cuda)
dtype: str = "auto"      # float type (auto | float32 | float16 | bfloat16)
megabytes: str = "auto"  # largest tensor, MiB (auto | 1 .. 64)
rows: int = 8            # rows (1 .. 100)
fast: bool = False       # skip the slow part
"""


@pytest.fixture(autouse=True)
def fresh_session(monkeypatch):
    monkeypatch.setattr(session._Current, "value", None)


def test_the_cell_is_read_line_by_line():
    found = {p.name: p for p in parse_parameters(CELL)}
    assert list(found) == ["device", "dtype", "megabytes", "rows", "fast"]
    assert found["device"].domain == ("auto", "cpu", "cuda")
    assert found["megabytes"].domain == ("auto", (1.0, 64.0))
    assert found["rows"].help == "rows" and found["rows"].default == 8


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("device = 'auto'", "expected `name: type = value"),
        ("rows: list = 3", "type 'list'"),
        ("rows: int", "needs a default"),
        ("rows: int = 'x'", "must be int"),
        ("rows: int = 0  # rows (1 .. 9)", "must be 1 to 9"),
        ("rows: int = 1  # rows (one .. 9)", "is not a range"),
    ],
)
def test_a_line_that_breaks_the_grammar_says_so(source, message):
    with pytest.raises(LabError, match=message):
        parse_parameters(source)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"row": 1}, "Did you mean 'rows'"),
        ({"rows": 101}, "1 to 100"),
        ({"rows": True}, "a bool"),
        ({"rows": 1.5}, "a float"),
        ({"device": "cdua"}, "Did you mean 'cuda'"),
        ({"megabytes": 65}, "auto, 1 to 64"),
        ({"megabytes": "much"}, "auto, 1 to 64"),
        ({"fast": 1}, "must be bool"),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(LabError, match=message):
        validate(parse_parameters(CELL), values)


def test_a_number_given_as_text_becomes_a_number():
    checked = validate(parse_parameters(CELL), {"megabytes": "16"})
    assert checked["megabytes"] == 16 and checked["rows"] == 8


def test_setup_reads_the_cell_from_the_notebook(capsys, monkeypatch):
    kept = []
    monkeypatch.setattr(machine, "keep_pages", lambda: kept.append(True))
    monkeypatch.setattr(machine, "use_free_cores", lambda: "others are here")
    namespace = {"In": ["", CELL, "x = 1"], "device": "cpu", "dtype": "auto", "megabytes": "auto", "rows": 3}
    here = lab.setup(namespace, auto={"megabytes": {"cpu": lambda room: min(4, room), "cuda": 64}})
    assert (here.device, here.dtype) == (torch.device("cpu"), torch.float32)
    assert (here.megabytes, here.rows, here.fast, here.seed) == (4, 3, False, 0)
    said = capsys.readouterr().out
    assert "torch" in said and "busy      others are here" in said and kept
    with pytest.raises(AttributeError, match="no parameter 'columns'"):
        _ = here.columns
    with pytest.raises(AttributeError):
        here.seed = 1


def test_setup_refuses_what_papermill_only_warns_of():
    injected = "# Parameters\nrowz = 3\n"
    with pytest.raises(LabError, match="Did you mean 'rows'"):
        lab.setup({"In": [CELL, injected], "device": "cpu"}, quiet=True)


def test_setup_finds_the_cell_where_the_kernel_keeps_no_history(monkeypatch):
    lines = CELL.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<cell>", (len(CELL), None, lines, "<cell>"))
    here = lab.setup({"In": [""], "device": "cpu", "rows": 5}, quiet=True)
    assert here.rows == 5


def test_only_auto_falls_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lab.setup(device="auto", quiet=True).device.type == "cpu"
    with pytest.raises(LabError, match='Say device="auto"'):
        lab.setup(device="cuda", quiet=True)
    with pytest.raises(LabError, match="auto, cpu or cuda"):
        lab.setup(device="gpu", quiet=True)


def test_auto_dtype_follows_the_architecture(monkeypatch):
    gpu = torch.device("cuda", 0)
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        assert session.pick_dtype("auto", gpu) == dtype
    assert session.pick_dtype("float16", torch.device("cpu")) == torch.float16


def test_the_seed_seeds():
    lab.setup(device="cpu", seed=7, quiet=True)
    first = torch.rand(3)
    lab.setup(device="cpu", seed=7, quiet=True)
    assert torch.equal(first, torch.rand(3))


def test_capabilities_on_a_cpu(monkeypatch):
    lab.setup(device="cpu", quiet=True)
    assert not any(lab.has(c) for c in ("cuda", "graphs", "bf16", "tensor_cores", "tma", "fp8"))
    with pytest.raises(LabError, match="there are cuda"):
        lab.has("warp drive")


def test_capabilities_follow_the_architecture(monkeypatch):
    here = lab.setup(device="cpu", quiet=True)
    fake = session.Setup(**{**here.__dict__, "device": torch.device("cuda", 0)})
    monkeypatch.setattr(session._Current, "value", fake)
    expected = {(7, 5): "fp16", (8, 0): "fp16 bf16 tensor_cores", (9, 0): "fp16 bf16 fp8 tensor_cores tma"}
    for capability, names in expected.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        found = [c for c in ("fp16", "bf16", "fp8", "tensor_cores", "tma") if lab.has(c)]
        assert found == names.split()
