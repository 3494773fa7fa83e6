"""Assembly text for later GPUs says the oldest version that it can have."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.package import archive, manifest, ptx
from reflib.package.architectures import driver_for

HALF = torch.float16
needs_ptxas = pytest.mark.skipif(ptx.ptxas() is None, reason="no ptxas")


def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.softmax(x @ w, -1), torch.nn.functional.gelu(x.bfloat16()).float().sum()


@needs_ptxas
def test_a_package_takes_old_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFLIB_FATBINARY", "")  # texts are members
    sizes = "[2048, 1024] [1024, 2048]"
    pins = {"aten.mm": {sizes: "triton tiled 64x128x64 w4 s3"}}
    args = torch.zeros(2048, 1024, dtype=HALF), torch.zeros(1024, 2048, dtype=HALF)
    file = archive.open(reflib.aot_compile(f, args, tmp_path / "m.reflib", "sm_90", lookup_table=pins))
    variant = manifest.read(file.manifest).variant("ptx")
    assert variant.driver is not None and variant.driver[1] < "570"
    names = [k.name for k in variant.kernels]
    assert any("mm" in n for n in names) and any("amax" in n for n in names) and any("gelu" in n for n in names)
    tool = ptx.ptxas()
    assert tool is not None
    for k in variant.kernels:
        text = bytes(file.view(k.image)).decode()
        driver = driver_for(text)
        assert driver is not None and driver.version <= 11070 and driver.version <= variant.driver[0], k.name
        for arch in ("sm_80", "sm_90", "sm_120"):
            assert ptx.assembled(tool, text, arch), (k.name, arch)


TEXT = """
.version {version}
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p) {{
  .reg .b64 %p; .reg .b32 %a;
  ld.param.u64 %p, [p];
  mov.b32 %a, 1;
  {more}
  st.global.b32 [%p], %a;
  ret;
}}
"""


def version(text: str) -> str:
    return re.findall(r"\.version (\S+)", text)[0]


@needs_ptxas
@pytest.mark.parametrize("more, oldest", [
    ("", "7.0"), ("{ .reg .b64 %q; createpolicy.fractional.L2::evict_first.b64 %q, 1.0; }", "7.4"),
    ("this is no instruction;", "8.2"),
])  # fmt: skip
def test_the_oldest_version(more: str, oldest: str) -> None:
    text = TEXT.format(version="8.2", more=more)
    found = ptx.for_old_drivers(text, "sm_80")
    assert version(found) == oldest and found.replace(f".version {oldest}", ".version 8.2") == text
    assert ptx.for_old_drivers(text, "sm_80") == found  # from the cache
    assert ptx.for_old_drivers(found, "sm_80") == found


@needs_ptxas
def test_a_version_that_means_something_else_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ptx.assembled

    def assembled(tool: str, text: str, arch: str) -> Any:
        code = real(tool, text, arch)
        return b"other" if code and version(text) < "7.3" else code

    monkeypatch.setattr(ptx, "assembled", assembled)
    assert version(ptx.for_old_drivers(TEXT.format(version="8.1", more="// another text"), "sm_80")) == "7.3"


def test_a_broken_ptxas_is_named_and_the_text_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "ptxas"
    broken.write_text("#!/bin/sh\necho 'ptxas fatal : no licence' >&2\nexit 3\n")
    broken.chmod(0o755)
    text = TEXT.format(version="8.2", more=f"// {tmp_path}")
    monkeypatch.setattr(ptx, "ptxas", lambda: str(broken))
    with caplog.at_level("WARNING", "reflib.package"):
        assert ptx.for_old_drivers(text, "sm_80") == text
    assert ptx.assembled(str(tmp_path / "gone"), text, "sm_80") is None
    (said,) = [r.getMessage() for r in caplog.records if r.name == "reflib.package"]
    for words in ("may need a new driver", "TRITON_PTXAS_PATH", f"$ {broken} --gpu-name sm_80", "exit 3: ptxas fatal"):
        assert words in said


def test_without_ptxas_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "ptxas", lambda: None)
    text = TEXT.format(version="8.2", more="")
    assert ptx.for_old_drivers(text, "sm_80") == text
