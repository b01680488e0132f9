"""Parts as processes: what crashes, hangs or does not fit the time costs no other part its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from gpu import runner
from gpu.parts import FORMAT_NAMES, HEAD_DIMS, Part, numeric_parts, timing_parts
from gpu.records import MARK, check, parse
from gpu.results import Results
from gpu.runner import Runner

# Does what its part's name says, instead of importing torch for seconds.
SCRIPT = """
import json, sys, time
part = sys.argv[sys.argv.index("--part") + 1]
def emit(**record):
    print("gpu_check>" + json.dumps(record), flush=True)
print("chatter of a library")
if part == "device":
    emit(kind="device", name="device", device="none", versions={}, rates={}, step_formats=[])
else:
    emit(kind="check", name=part, error=0.5, bound=1.0, passed=True, why="")
if part == "hangs":
    time.sleep(60)
if part == "crashes":
    sys.exit("no kernel image is available")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(
    script: Path, monkeypatch: pytest.MonkeyPatch, numeric: list[Part], timing: list[Part], seconds: float = 30
) -> Results:
    monkeypatch.setattr(runner, "numeric_parts", lambda cpu, quick: numeric)
    monkeypatch.setattr(runner, "timing_parts", lambda cpu, quick, formats: timing)
    results = Results({})
    assert Runner(script, "cpu", False, seconds / 60, results).run()
    return results


def test_a_crash_fails_the_check_and_keeps_the_rest(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(script, monkeypatch, [Part("crashes", True, 0), Part("works", True, 0)], [Part("later", False, 0)])
    assert {record["name"] for record in results.records["checks"]} == {"crashes", "works", "later"}
    assert results.failures == ["crashes: no kernel image is available"]


def test_what_is_not_ours_may_crash(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(script, monkeypatch, [Part("works", True, 0)], [Part("crashes", False, 0, ours=False)])
    assert results.failures == []
    assert "no kernel image" in results.records["skipped"][0]["reason"]


def test_a_numeric_part_that_hangs_is_stopped_and_fails(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Part("hangs", True, 0), Part("works", True, 0)]
    results = run(script, monkeypatch, parts, [Part("later", False, 0)], seconds=4)
    assert {record["name"] for record in results.records["checks"]} == {"hangs", "works", "later"}
    assert len(results.failures) == 1
    assert results.failures[0].startswith("hangs: stopped after")


def test_a_timing_that_does_not_fit_is_left_out(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(script, monkeypatch, [Part("works", True, 0)], [Part("long", False, 3600), Part("short", False, 0)])
    assert results.failures == []
    assert {record["name"] for record in results.records["checks"]} == {"works", "short"}
    left_out = next(record for record in results.records["skipped"] if record["name"] == "long")
    assert "it needs about 3600" in left_out["reason"]


def test_a_device_that_cannot_be_used(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no GPU')")
    results = Results({})
    assert not Runner(script, "cpu", False, 1, results).run()
    assert results.records["errors"][0]["message"] == "no GPU"


def test_a_run_without_checks_has_not_passed() -> None:
    assert Results({}).failures == ["no numeric check ran"]


@pytest.mark.parametrize(("error", "passed"), [(0.5, True), (1.0, True), (1.5, False), (float("nan"), False)])
def test_a_check_passes_up_to_its_bound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, error: float, passed: bool
) -> None:
    check("something", error, 1.0, "a reason")
    line = capsys.readouterr().out
    assert line.startswith(MARK)
    record = parse(line)
    assert record is not None
    assert record["passed"] is passed
    results = Results({})
    results.add(record, "part")
    assert bool(results.failures) is not passed
    assert ("FAILED" in results.tables()) is not passed
    results.write(tmp_path / "result.json")
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["passed"] is passed
    assert written["checks"][0]["why"] == "a reason"


def test_every_kernel_is_in_the_full_run() -> None:
    names = {part.name for part in numeric_parts(cpu=False, quick=False)}
    assert names == {
        *(f"attention {head_dim}" for head_dim in HEAD_DIMS),
        "attention real",
        *(f"experts {name}" for name in FORMAT_NAMES),
    }
    timings = [part.name for part in timing_parts(cpu=False, quick=False, step_formats=["fp8", "int4 g32"])]
    assert [name for name in timings if name.startswith("step")] == ["step fp8", "step int4 g32"]
    assert "transformers" in timings


def test_the_scripts_import_no_more_than_they_may() -> None:
    """A machine with a GPU may have torch, triton, numpy and safetensors only."""
    from tests.cli.helpers import ROOT

    allowed = {"torch", "triton", "numpy", "safetensors", "gpu", "dgcompile", "__future__"}
    found = set()
    for file in [ROOT / "scripts" / "gpu_check.py", *(ROOT / "scripts" / "gpu").glob("*.py")]:
        if file.name == "peer.py":  # is imported where transformers is
            continue
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]) and len(words) > 1:
                found.add(words[1].split(".")[0])
    assert found - allowed - set(sys.stdlib_module_names) == set()
