"""``scripts/real_size_check.py`` on stand-ins: the same code with models of a megabyte.

Builds are those of the session's tiny bundle, so that only what a check is about is done again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from real_size import parts
from real_size.checks import (
    CHECKS,
    CheckFailed,
    Reference,
    Workplace,
    check_build,
    check_generate,
    check_quantize,
    check_resume,
    half_of_the_weights,
    read_and_write,
)
from real_size.results import Results, Row, at_most, equal, near
from synthetic_checkpoint import Fill

from dgcompile.checkpoint import Checkpoint
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from dgcompile.weights_store import JOURNAL_FILE, WEIGHTS_FILE, lay_out_store

ROOT = Path(__file__).parent.parent


class Prepared(Workplace):
    """Builds on the session's checkpoint and bundle.

    Attributes:
        source: the checkpoint, three layers.
        bundles: the folders that begin as copies of the session's bundle, which they are a build of, by name.
    """

    source: Path
    bundles: dict[str, Path]

    @property
    def whole(self) -> int:
        return 3

    def checkpoint(self, layers: int, fill: Fill) -> Path:
        return self.source

    @contextmanager
    def new_folder(self, name: str) -> Iterator[Path]:
        with super().new_folder(name) as folder:
            if name in self.bundles:
                shutil.copytree(self.bundles[name], folder, dirs_exist_ok=True)
            elif name == "generate":
                shutil.copytree(self.bundles["bundle"], folder / "bundle")
            yield folder


@pytest.fixture
def place(checkpoint: Path, bundle: Path, tmp_path: Path) -> Prepared:
    found = Prepared(tmp_path / "work", small=True, target="cpu", recipe="fp32")
    found.source, found.bundles = checkpoint, {"bundle": bundle}
    return found


def rows(check: Any, place: Workplace) -> dict[str, Row]:
    return {row.what: row for row in check(place)}


def test_bounds_tell_good_from_bad() -> None:
    assert at_most("a", 1.0, 2.0, str).holds and not at_most("a", 2.0, 2.0, str).holds
    assert equal("a", 3, 3).holds and not equal("a", 3, 4).holds
    assert near("a", 91, 100, 0.1, str).holds and near("a", 109, 100, 0.1, str).holds
    assert not near("a", 111, 100, 0.1, str).holds and not near("a", 89, 100, 0.1, str).holds


def test_the_script_measures_and_reports(tmp_path: Path) -> None:
    """`plan` is always about the published config; whether the bounds hold is for the full-size run to say."""
    report, work = tmp_path / "report.json", tmp_path / "work"
    words = ["--small", "--target", "cpu", "--only", "quantize", "--only", "plan", "--output", report, "--work", work]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "real_size_check.py", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    found = json.loads(report.read_text())
    assert list(found["checks"]) == ["plan", "quantize"]
    failures = [row for check in found["checks"].values() for row in check["rows"] if row["holds"] is False]
    assert found["failures"] == len(failures)
    assert done.returncode == (1 if failures else 0), done.stderr
    plan = found["checks"]["plan"]["rows"]
    assert plan[0]["found"] == "25.25 billion" and plan[0]["holds"]
    quantize = found["checks"]["quantize"]
    assert not any("carried out" in row["what"] for row in (*plan, *quantize["rows"]))
    for layers in ("1", "2"):
        figures = quantize["figures"][f"quantize.{layers}-layers"]
        assert figures["seconds"] > 0 and 0 < figures["store_bytes"] < figures["source_bytes"]
        assert sum(figures["phases_seconds"].values()) == pytest.approx(figures["seconds"], abs=0.1)
        assert figures["phases_seconds"]["rounding"] > 0
        assert figures["peak_resident_bytes"] > 1e7
    assert "parameters" in done.stdout and "25.25 billion" in done.stdout
    assert not list(work.iterdir())


def test_a_build_is_held_against_its_plan(place: Prepared, bundle: Path) -> None:
    found = rows(check_build, place)
    assert found["all stages"].found and found["all stages: peak memory"].holds
    figures = place.figures["build"]
    assert figures["planned_bytes"] > 0
    assert figures["disk_bytes"] == sum(file.stat().st_blocks * 512 for file in bundle.rglob("*") if file.is_file())
    assert place.reference == Reference.of(bundle)
    assert not (place.folder / "bundle").exists()


def test_a_killed_build_must_end_the_same(place: Prepared, bundle: Path, tmp_path: Path) -> None:
    unfinished = shutil.copytree(bundle, tmp_path / "unfinished")
    (unfinished / WEIGHTS_FILE).unlink()
    place.bundles = {"resumed": unfinished}
    place.reference = reference = Reference.of(bundle)
    found = rows(check_resume, place)
    assert found["killed after half of the weights: exit code"].found == "-9"
    assert all(row.holds is not False for row in found.values()), found

    reference.files.update({WEIGHTS_FILE: "0" * 64, "manifest.json": "0" * 64})
    reference.manifest["stages"]["engine"]["inputs"] = "0" * 64
    what = "files that differ from those of the build in one go"
    differing = f"manifest.json (stages.engine.inputs), {WEIGHTS_FILE}"
    assert rows(check_resume, place)[what] == Row(what, differing, "none", False)


def test_the_bundle_says_what_transformers_says(place: Prepared) -> None:
    found = rows(check_generate, place)
    assert found["prompts with identical tokens"].holds and found["exit code of the comparison"].holds
    pairs = place.figures["generate"]["report"]["pairs"]
    assert all(1 <= steps <= 4 for pair in pairs for steps in pair["reference_steps"])


def test_half_of_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    spec = Checkpoint.open(checkpoint).spec
    store = lay_out_store(spec, Recipe.load("fp32").for_target(Target.load("cpu")))
    assert not half_of_the_weights(tmp_path)
    with (tmp_path / (WEIGHTS_FILE + ".partial")).open("wb") as file:
        file.write(store.head)
        file.truncate(store.nbytes)
    journal, lines, done = tmp_path / JOURNAL_FILE, ['{"conversion": "key"}'], 0
    for name, tensor in store.tensors.items():
        lines.append(json.dumps({"tensor": name, "source_sha256": ""}))
        journal.write_text("\n".join(lines) + '\n{"tens')
        done += tensor.nbytes
        assert half_of_the_weights(tmp_path) == (2 * done >= store.nbytes - len(store.head)), name
    journal.unlink()
    assert not half_of_the_weights(tmp_path)
    (tmp_path / (WEIGHTS_FILE + ".partial")).rename(tmp_path / WEIGHTS_FILE)
    assert half_of_the_weights(tmp_path)


def test_constants_are_found_wherever_they_are(bundle: Path, tmp_path: Path) -> None:
    facts = parts._graph_facts(bundle / "denoiser.onnx")
    assert facts["operators"] == {"BlockAttention": 3, "MixtureOfExperts": 3}
    assert 0 < facts["largest_constant_bytes"] < 1e6
    model = onnx.load(bundle / "denoiser.onnx", load_external_data=False)
    tensor = numpy_helper.from_array(np.zeros(300_000, np.float32), "large")
    model.functions[0].node.append(helper.make_node("Constant", [], ["unused"], value=tensor))
    onnx.save(model, tmp_path / "changed.onnx")
    assert parts._graph_facts(tmp_path / "changed.onnx")["largest_constant_bytes"] >= 1_200_000


def test_plain_reading_and_writing_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    assert read_and_write(checkpoint, 20_000_000, tmp_path / "plain") > 0
    assert not list(tmp_path.iterdir())


def test_a_command_that_fails_fails_the_check(place: Prepared, tmp_path: Path) -> None:
    place.source = tmp_path / "nowhere"
    place.source.mkdir()
    with pytest.raises(CheckFailed, match=r"ended with exit code 2: .*config\.json"):
        rows(check_build, place)
    with pytest.raises(CheckFailed, match="exit code 1"):
        rows(check_quantize, place)


def test_results_are_written_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results({"small": True}, tmp_path / "report.json")
    results.rows["plan"] = [Row("a", "1"), at_most("b", 3, 2, str), at_most("c", 1, 2, str)]
    results.figures["plan"] = {"b": 3}
    results.write()
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["failures"] == results.failures == 1 and written["checks"]["plan"]["figures"] == {"b": 3}
    results.print()
    printed = capsys.readouterr().out
    assert printed.count("DOES NOT HOLD") == 1 and printed.count("holds") == 1


def test_every_check_is_described() -> None:
    said = (ROOT / "scripts" / "real_size_check.py").read_text().split('"""')[1]
    assert all(f"\n    {name} " in said for name in CHECKS)
