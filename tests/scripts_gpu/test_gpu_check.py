"""The command as a person runs it, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.helpers import ROOT

pytest.importorskip("triton", reason="triton (extra `build`) is not installed: gpu_check is not tested")


def gpu_check(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/gpu_check.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_self_test_runs_every_stage(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = gpu_check("--device", "cpu", "--quick", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "timings mean nothing" in done.stdout
    result = json.loads(output.read_text())
    assert result["passed"] is True
    assert result["errors"] == []
    assert "self-test" in result["device"]["device"]
    assert result["settings"]["quick"] is True
    names = [check["name"] for check in result["checks"]]
    for beginning in ("attention fp16 head_dim 32", "attention fp16 real size", "experts w4a8 g64", "denoising step"):
        assert any(name.startswith(beginning) for name in names), beginning
    assert all(check["error"] <= check["bound"] and check["why"] for check in result["checks"])
    for timing in result["timings"]:
        assert timing["ms"] > 0 and timing["floor_ms"] > 0
        assert timing["share_of_floor"] == pytest.approx(timing["floor_ms"] / timing["ms"])
    assert any(timing["name"] == "denoising step, experts float" for timing in result["timings"])
    assert any("estimate" in info["name"] for info in result["info"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = gpu_check("--output", str(output))
    assert done.returncode == 2
    assert "the device 'cuda' cannot be used" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--minutes", "0"],
        ["--device", "tpu"],
        ["--device", "cuda:x"],
        ["--output", "/nowhere/result.json"],
        ["--unknown"],
    ],
)
def test_wrong_options(options: list[str]) -> None:
    done = gpu_check(*options)
    assert done.returncode == 2
    assert options[0] in done.stderr
