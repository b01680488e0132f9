"""How an operator's probe tells that the model's process is gone, which Triton's own health endpoints do not."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from dgcompile.runtime.scheduler import FAILURES_IN_A_ROW
from dgcompile.serving.triton.metrics import UPDATE_SECONDS
from dgcompile.serving.triton.repository import write_model
from tests.serving.triton.clients import generate
from tests.serving.triton.server import ROOT, Installation, running

pytestmark = pytest.mark.triton_server


def probe_command(address: str) -> list[str]:
    """The liveness probe of docs/serving.md, for another address."""
    text = (ROOT / "docs" / "serving.md").read_text()
    manifest = next(part for part in text.split("```yaml\n")[1:] if "livenessProbe" in part).split("```")[0]
    command: list[str] = yaml.safe_load(manifest)["containers"][0]["livenessProbe"]["exec"]["command"]
    return [part.replace("localhost:8000", address) for part in command]


def test_the_documented_probe_sees_that_the_model_is_dead(
    installation: Installation, bundle: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "model_repository"
    write_model(bundle, repository, rows=2, threads=1)
    with running(installation, repository, tmp_path / "server.log") as server:
        probe = probe_command(server.http)
        assert subprocess.run(probe, timeout=60).returncode == 0
        (model,) = [process for process in server.processes() if "python" in process.name()]
        model.kill()
        while model.is_running() and model.status() != psutil.STATUS_ZOMBIE:  # the server does not reap it
            time.sleep(0.01)
        assert httpx.get(f"http://{server.http}/v2/models/diffusiongemma/ready").status_code == 200  # Triton's word
        assert subprocess.run(probe, timeout=60).returncode != 0


def test_the_documented_probe_sees_that_the_engine_is_given_up(
    installation: Installation, bundle: Path, tmp_path: Path
) -> None:
    """An engine with broken weights gives no numbers."""
    broken = tmp_path / "bundle"
    shutil.copytree(bundle, broken)
    weights, manifest = broken / "weights.safetensors", broken / "manifest.json"
    data = bytearray(weights.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header:] = b"\xff" * (len(data) - header)  # NaN
    weights.write_bytes(data)
    facts = json.loads(manifest.read_text())
    facts["stages"]["weights"]["files"]["weights.safetensors"]["sha256"] = hashlib.sha256(data).hexdigest()
    manifest.write_text(json.dumps(facts))

    repository = tmp_path / "model_repository"
    write_model(broken, repository, rows=2, threads=1)
    with running(installation, repository, tmp_path / "server.log") as server:
        probe = probe_command(server.http)
        for number in range(FAILURES_IN_A_ROW):
            assert subprocess.run(probe, timeout=60).returncode == 0, number
            assert "entropy is nan" in generate(server.http, {"INPUT_IDS": [5]}, "diffusiongemma").text
        assert subprocess.run(probe, timeout=60).returncode != 0
        time.sleep(4 * UPDATE_SECONDS)
        assert server.metric("dgcompile_requests_failed_total", model="diffusiongemma") == FAILURES_IN_A_ROW
        assert server.metric("dgcompile_active_rows", model="diffusiongemma") == 0
