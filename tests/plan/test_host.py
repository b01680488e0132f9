"""Memory and disk of the machine that builds."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dgcompile.bundle import Manifest
from dgcompile.model_spec import ModelSpec
from dgcompile.plan import make_plan
from dgcompile.plan.host import free_bytes, machine_memory, present_bytes
from dgcompile.weights_store import WEIGHTS_FILE
from tests.plan.helpers import plan, workload


def test_disk_of_a_bundle_that_was_built(bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    planned = plan(manifest.spec, "cpu", "fp32", manifest.max_context).disk
    assert planned.files[WEIGHTS_FILE] == (bundle / WEIGHTS_FILE).stat().st_size
    for folder in ("", "engines/"):
        graphs = (f"{folder}encoder.onnx", f"{folder}denoiser.onnx")
        actual = sum((bundle / name).stat().st_size for name in graphs)
        assert 0.5 * actual < sum(planned.files[name] for name in graphs) < 2.5 * actual


def test_disk_of_the_published_model(published: ModelSpec) -> None:
    found = plan(published, "rtx5090", "int4", 8192).disk
    assert found.bundle == sum(found.files.values()) == found.needed
    # Graphs, kernels and what is in the engines are small beside the weights.
    assert 15.2e9 < found.files[WEIGHTS_FILE] < found.bundle < 1.02 * found.files[WEIGHTS_FILE]


def test_what_an_earlier_build_left_needs_no_more_space(tmp_path: Path) -> None:
    planned = {"a": 8192, "b": 8192, "c": 8192, "d": 8192}
    (tmp_path / "a").write_bytes(bytes(100))  # finished: kept, however large it became
    (tmp_path / "b").write_bytes(bytes(8192))  # of another build: made again beside it
    (tmp_path / "c.partial").write_bytes(bytes([1]) * 4096)
    with (tmp_path / "d.partial").open("wb") as holes:
        holes.truncate(8192)
    assert present_bytes(tmp_path, planned, {"a"}) == 8192 + 4096
    assert present_bytes(tmp_path / "new", planned, ()) == 0


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    free = free_bytes(tmp_path / "not" / "yet")
    assert free is not None and 0 < free <= psutil.disk_usage(str(tmp_path)).total
    assert free_bytes(Path("/proc/nothing")) is None


def test_memory_of_this_machine() -> None:
    assert 0 < machine_memory() <= psutil.virtual_memory().total


def test_a_calibration_needs_the_model_in_float32(published: ModelSpec) -> None:
    asked = workload(published, "h100", "fp8", 8192)
    streaming, calibrating = make_plan(asked).host, make_plan(asked, calibrates=True).host
    assert "calibration" not in streaming.stages and streaming.needed < 10e9
    assert calibrating.needed == calibrating.stages["calibration"] > 4 * 25.25e9
    assert streaming.stages == {stage: calibrating.stages[stage] for stage in streaming.stages}


def test_conversion_does_not_grow_with_the_model(published: ModelSpec) -> None:
    half = published.model_copy(update={"layers": published.layers[-6:]})
    whole, part = (plan(spec, "rtx5090", "int4", 8192).host.stages["weights"] for spec in (published, half))
    assert whole == part < 1e9


@pytest.mark.parametrize("target", ["cpu", "h100", "rtx5090"])
def test_every_stage_is_named_as_builds_name_it(published: ModelSpec, target: str) -> None:
    stages = set(plan(published, target, "w8a16", 8192).host.stages)
    assert stages == {"trace", "weights", "engine"} | ({"kernels"} if target != "cpu" else set())
