"""What is known about GPUs that are not here decides for them: pinned by a table, or measured on one of their kind."""

import logging
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.autotune.store import Outcome
from reflib.ir.decision import Candidate, Key
from reflib.models import arch_of
from reflib.package import archive, manifest
from reflib.tables import Entry, Table, _say_once

Tensor = torch.Tensor
HALF = torch.float16
SIZES = "b[256] x[1024, 512] w[256, 512]"
HOPPER, ADA = "triton tiled 64x64x128 w4 s5", "triton tiled 32x32x128 w2 s4"  # 160 KB and 64 KB of shared memory


class Layer(torch.nn.Module):
    """(Of a size whose product the static rule leaves to ATen.)"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(512, 256, dtype=HALF)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(x))


X = torch.zeros(1024, 512, dtype=HALF)


def table(*entries: tuple[str, str], **more: str) -> dict[str, Any]:
    """For Layer's product: (device model, winner)."""
    about = {"op": "aten.addmm", "sizes": SIZES, **more}
    return {"format": 1, "entries": [{"device": d, "winner": w, **about} for d, w in entries]}


def built(path: Path, archs: list[str], f: Any = None, args: Any = (X,), **options: Any) -> manifest.Manifest:
    file = archive.open(reflib.aot_compile(f or Layer(), args, path, archs, **options))
    found = manifest.read(file.manifest)
    file.close()
    return found


def products(variant: manifest.PackagedVariant) -> list[manifest.KernelEntry]:
    return [k for k in variant.kernels if "mm" in k.name and not k.late]


def decided(target: str, f: Any = None, args: Any = (X,), **options: Any) -> Any:
    e = reflib.explain(f or Layer(), *args, target=target, dynamic=False, **options)
    return next(d for d in e.decisions if d.op)


def measured(device: str, winner: str, date: str = "2026-07-01T00:00:00+00:00", **more: str) -> tuple[str, Any, Any]:
    """A decision as the store has it, made on ``device``."""
    rows = Candidate(Key("aten"), "ok", 9.0), Candidate(Key(winner), "ok", 5.0)
    facts = {"device": device, "op": "aten.addmm", "sizes": SIZES, "dtypes": "float16", "default": "aten",
             "epilogue": "aten.sigmoid.default", "date": date, **more}  # fmt: skip
    return f"{device} {date}", Outcome((Key(winner),), rows, "it was measured"), facts


# -- pinned by a table ----------------------------------------------------------------------------------
def test_a_tiling_for_each_architecture(tmp_path: Path) -> None:
    pins = table(("NVIDIA H200", HOPPER), ("NVIDIA L4", ADA))
    m = built(tmp_path / "m.reflib", ["sm_80", "sm_89", "sm_90"], lookup_table=pins)
    (hopper,), (ada,) = products(m.variant("sm_90")), products(m.variant("sm_89"))
    assert (hopper.threads, ada.threads) == (128, 64) and hopper.shared > 99 * 1024 > ada.shared
    assert not products(m.variant("sm_80")) and not products(m.variant("ptx"))
    file = zipfile.ZipFile(tmp_path / "m.reflib")
    calls = {arch: b"aten.addmm" in file.read(m.variant(arch).text) for arch in ("sm_80", "sm_89", "sm_90")}
    assert calls == {"sm_80": True, "sm_89": False, "sm_90": False}
    assert decided("sm_90", lookup_table=pins).reason == "pinned by lookup_table"


def test_what_does_not_fit_is_no_candidate(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    pins = {"aten.addmm": {SIZES: HOPPER}}  # for any device
    _say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "reflib.tuning"):
        m = built(tmp_path / "m.reflib", ["sm_90", "sm_120"], lookup_table=pins)
    assert products(m.variant("sm_90")) and not products(m.variant("sm_120"))
    said = [r.getMessage() for r in caplog.records if "sm_120" in r.getMessage()]
    assert len(said) == 1 and HOPPER in said[0] and "99 KB" in said[0] and "the nearest is triton" in said[0]
    assert "the default" in decided("sm_120", lookup_table=pins).reason


def test_ptx_fits_into_every_later_gpu(tmp_path: Path) -> None:
    large = "triton tiled 128x256x64 w8 s4"  # fits an A100, not an RTX 3090
    args = torch.zeros(2048, 1024, dtype=HALF), torch.zeros(1024, 2048, dtype=HALF)
    pins = {"aten.mm": {"[2048, 1024] [1024, 2048]": large}}
    m = built(tmp_path / "m.reflib", ["sm_80"], lambda a, b: torch.sigmoid(a @ b), args, lookup_table=pins)
    (k,) = products(m.variant("sm_80"))
    assert k.shared > 99 * 1024 and not products(m.variant("ptx"))
    small = {"aten.mm": {"[2048, 1024] [1024, 2048]": "triton tiled 64x128x64 w4 s3"}}
    m = built(tmp_path / "s.reflib", ["sm_80"], lambda a, b: torch.sigmoid(a @ b), args, lookup_table=small)
    assert products(m.variant("ptx")) and all(0 < k.shared <= 99 * 1024 for k in products(m.variant("ptx")))


def test_decompose_k(tmp_path: Path) -> None:
    args = torch.randn(32, 8192, dtype=HALF), torch.randn(8192, 32, dtype=HALF)
    pins = {"aten.mm": {"[32, 8192] [8192, 32]": "decompose_k(k_splits=64)"}}
    m = built(tmp_path / "k.reflib", ["sm_90"], lambda a, b: a @ b, args, lookup_table=pins, autotune="blocking")
    variant = m.variant("sm_90")
    assert [k.name for k in variant.kernels] == ["k0_sum_to_copy"]  # of 64 partial products, by the library
    text = zipfile.ZipFile(tmp_path / "k.reflib").read(variant.text).decode()
    assert "aten.bmm.dtype" in text and "{64, 32, 32}" in text and "launch(run, k0_sum_to_copy" in text
    assert not variant.needs  # of Python


def test_a_product_with_its_activation_is_known_as_one(tmp_path: Path) -> None:
    class Relu(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.inner(x))

    whole = {"aten.addmm + relu": {SIZES: "aten._addmm_activation (relu)"}}
    assert decided("sm_90", Relu(), lookup_table=whole).winner == "aten._addmm_activation (relu)"
    alone = {"aten.addmm": {SIZES: HOPPER}}
    d = decided("sm_90", Relu(), lookup_table=alone)
    assert d.op == "aten.addmm" and d.winner == HOPPER and d.reason == "pinned by lookup_table"
    args = X, torch.zeros(512, 256, dtype=HALF)
    no_bias = {"aten.mm + relu": {"[1024, 512] [512, 256] [256]": "aten._addmm_activation (relu)"}}
    m = built(tmp_path / "a.reflib", ["sm_90"], lambda x, w: torch.relu(x @ w), args, lookup_table=no_bias)
    assert not m.variant("sm_90").kernels and [w.kind for w in m.weights] == ["constant"]  # the bias: zeros


# -- measured on another GPU ----------------------------------------------------------------------------
def test_a_decision_counts_for_its_architecture(kept: Any, tmp_path: Path) -> None:
    kept.put(*measured("NVIDIA H200", HOPPER))
    m = built(tmp_path / "m.reflib", ["sm_80", "sm_90"])
    assert products(m.variant("sm_90")) and not products(m.variant("sm_80")) and not products(m.variant("ptx"))
    d = decided("sm_90")
    assert (d.winner, d.reason, d.candidates[0].status) == (HOPPER, "known of NVIDIA H200", "known")
    assert decided("sm_90", cache_decisions=False).winner == "aten"
    assert decided("sm_90", lookup_table={"aten.addmm": {SIZES: "aten"}}).reason == "pinned by lookup_table"
    assert decided("sm_80").reason.endswith("the default")


def test_the_most_recent_of_two_models(kept: Any) -> None:
    other = "triton tiled 64x128x128 w4 s4"
    kept.put(*measured("NVIDIA H200", HOPPER, "2026-07-02T00:00:00+00:00"))
    kept.put(*measured("NVIDIA H100 PCIe", other, "2026-07-01T00:00:00+00:00"))
    d = decided("sm_90")
    assert d.winner == HOPPER
    assert d.reason == f"known of NVIDIA H200, the most recent; {other} of NVIDIA H100 PCIe"
    kept.put(*measured("NVIDIA H100 PCIe", "gone", "2026-07-03T00:00:00+00:00"))  # not a candidate any more
    assert decided("sm_90").winner == HOPPER


def test_a_decision_about_something_else(kept: Any) -> None:
    kept.put(*measured("NVIDIA H200", HOPPER, dtypes="bfloat16"))
    kept.put(*measured("NVIDIA H200 MIG 1g.18gb", HOPPER))
    kept.put(*measured("NVIDIA H200", HOPPER, sizes="b[256] x[1024, 256] w[256, 256]"))
    kept.put(*measured("NVIDIA H200", HOPPER, op="aten.mm"))
    assert decided("sm_90").winner == "aten"


def test_imported_tables(kept: Any) -> None:
    kept.import_table(Table((Entry("NVIDIA GH200 480GB", "aten.addmm", SIZES, HOPPER),)))
    assert decided("sm_90").reason == "known of NVIDIA GH200 480GB, from an imported table"
    kept.put(*measured("NVIDIA H200", "aten"))
    assert decided("sm_90").reason == "known of NVIDIA H200" and decided("sm_90").winner == "aten"


def test_a_store_that_cannot_be_used(kept: Any) -> None:
    kept.folder.mkdir(parents=True)
    kept.path.mkdir()  # renamed, and a new one is begun
    assert decided("sm_90").winner == "aten"
    shutil.rmtree(kept.folder)
    kept.folder.write_text("in its place")
    assert decided("sm_90").winner == "aten"


@pytest.mark.parametrize(
    "model, arch",
    [
        ("NVIDIA H200", "sm_90"), ("NVIDIA H100 80GB HBM3", "sm_90"), ("NVIDIA GH200 480GB", "sm_90"),
        ("nvidia h200", "sm_90"), ("NVIDIA H200 MIG 1g.18gb", ""), ("NVIDIA H20", "sm_90"), ("NVIDIA H800", "sm_90"),
        ("NVIDIA A100-SXM4-80GB", "sm_80"), ("NVIDIA A30", "sm_80"), ("NVIDIA GeForce RTX 3090", "sm_86"),
        ("NVIDIA A10", "sm_86"), ("NVIDIA A10G", "sm_86"), ("NVIDIA A40", "sm_86"), ("NVIDIA RTX A6000", "sm_86"),
        ("NVIDIA GeForce RTX 4090", "sm_89"), ("NVIDIA L4", "sm_89"), ("NVIDIA L40S", "sm_89"),
        ("NVIDIA RTX 5000 Ada Generation", "sm_89"), ("Tesla T4", "sm_75"), ("NVIDIA GeForce RTX 2080 Ti", "sm_75"),
        ("Quadro RTX 6000", "sm_75"), ("NVIDIA B200", "sm_100"), ("NVIDIA GB200", "sm_100"), ("NVIDIA B300", "sm_103"),
        ("NVIDIA GeForce RTX 5090", "sm_120"), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm_120"),
        ("AMD Instinct MI300X", "gfx942"), ("Tesla V100-SXM2-16GB", ""), ("AMD EPYC 9654 96-Core Processor", ""),
        ("*", ""), ("", ""),
    ],
)  # fmt: skip
def test_the_architecture_of_a_model(model: str, arch: str) -> None:
    assert arch_of(model) == arch
