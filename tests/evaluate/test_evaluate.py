"""evaluate on real bundles: what is equal gives zeros, and what is not shows everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import dgcompile.evaluate.run as run_module
from dgcompile.bundle import GENERATION_CONFIG_FILE, MANIFEST_FILE
from dgcompile.errors import BundleError, RequestError
from dgcompile.evaluate import EvaluationReport, Example, evaluate, first_step_logits, open_graphs, read_examples
from dgcompile.evaluate.metrics import LOGITS
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.safetensors_file import read_header
from tests.evaluate.conftest import EXAMPLES, rewrite


@pytest.fixture(scope="module")
def against_itself(bundle: Path) -> EvaluationReport:
    return evaluate(bundle, bundle, prompts=EXAMPLES, threads=1)


@pytest.fixture(scope="module")
def against_checkpoint(bundle: Path, checkpoint: Path) -> EvaluationReport:
    return evaluate(bundle, checkpoint, prompts=EXAMPLES, threads=1)


@pytest.fixture(scope="module")
def noisy(bundle: Path, noisy_bundle: Path) -> EvaluationReport:
    return evaluate(noisy_bundle, bundle, prompts=EXAMPLES, threads=1)


def test_a_bundle_costs_nothing_against_itself(against_itself: EvaluationReport) -> None:
    report = against_itself
    errors = [report.first_step, report.trajectory, *report.steps]
    assert {(error.kl, error.relative_error) for error in errors} == {(0.0, 0.0)}
    assert {layer.relative_error for layer in report.layers} == {0.0} and len(report.layers) == 3
    assert report.identical_texts == len(EXAMPLES) and report.steps_ratio == 1.0 and report.largest_kl == 0.0
    assert all(row.reference == row.candidate for row in report.step_counts)
    assert report.reference_kind == "bundle" and report.reference_recipe == "fp32" and not report.graphs_only


def test_every_step_of_every_canvas_counts(against_itself: EvaluationReport) -> None:
    report = against_itself
    steps = [count for prompt in report.prompts for count in prompt.reference_steps]
    assert sum(step.canvases for step in report.steps) == sum(steps)
    assert report.steps[0].canvases == len(steps) == sum(row.reference for row in report.step_counts)
    assert [row.steps for row in report.step_counts] == list(range(min(steps), max(steps) + 1))
    # Several canvases, or rows that end apart, would leave something untested.
    assert len(steps) > len(EXAMPLES) and len(set(steps)) > 1


def test_the_texts_are_what_the_bundle_generates(bundle: Path, against_itself: EvaluationReport) -> None:
    """The bundle runs its engines and an evaluation the traced graphs: float32 in both, summed in another order.

    A tie may part two runs; a fault would part nearly all.
    """
    pipeline = Pipeline.open(bundle, threads=1)
    same = 0
    for prompt, example in zip(against_itself.prompts, EXAMPLES, strict=True):
        text = example.prompt
        ids = pipeline.encode([{"role": "user", "content": text}]) if isinstance(text, str) else list(text)
        result = pipeline.generate([ids], seeds=[prompt.seed])[0]
        text_and_steps = pipeline.decode(result.token_ids), tuple(result.steps_per_canvas)
        same += text_and_steps == (prompt.candidate_text, prompt.candidate_steps)
    assert same >= len(EXAMPLES) - 1


def test_against_its_checkpoint_only_rounding_is_left(against_checkpoint: EvaluationReport) -> None:
    report = against_checkpoint
    assert report.same_checkpoint and report.reference_kind == "checkpoint"
    # Exactly zero would mean that something was compared with itself.
    assert 0 < report.first_step.relative_error < 1e-4 and 0 <= report.first_step.kl < 1e-7
    assert 0 < report.trajectory.relative_error < 1e-4 and 0 <= report.trajectory.kl < 1e-7
    assert all(0 < layer.relative_error < 1e-4 for layer in report.layers)
    # A tie may part two runs on some machine; a fault would part nearly all.
    assert report.identical_texts >= len(EXAMPLES) - 1
    assert 0.8 < report.steps_ratio < 1.25


def test_both_kinds_of_reference_see_the_same(
    against_checkpoint: EvaluationReport, noisy: EvaluationReport, checkpoint: Path, noisy_bundle: Path
) -> None:
    report = evaluate(noisy_bundle, checkpoint, prompts=EXAMPLES[:2], threads=1)
    for found, expected in zip(report.prompts, noisy.prompts, strict=False):
        assert found.kl == pytest.approx(expected.kl, rel=1e-2)
        assert (found.candidate_text, found.candidate_steps) == (expected.candidate_text, expected.candidate_steps)
    assert report.prompts[0].reference_text == against_checkpoint.prompts[0].reference_text


def test_noise_shows_everywhere(noisy: EvaluationReport) -> None:
    report = noisy
    assert 1e-4 < report.first_step.kl < 10 and 1e-2 < report.first_step.relative_error < 1
    assert report.largest_kl > report.first_step.kl
    assert report.trajectory.kl > 1e-4 and all(step.relative_error > 1e-2 for step in report.steps)
    assert all(layer.relative_error > 1e-3 for layer in report.layers)
    assert report.identical_texts < len(EXAMPLES)
    assert report.step_counts != () and any(row.reference != row.candidate for row in report.step_counts)
    assert report.same_checkpoint  # as far as the manifests say


def test_rows_beside_a_prompt_change_nothing(
    bundle: Path, noisy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token that ends two of the reference's texts early: their rows leave the batch and others take their places.
    ending = Path(shutil.copytree(noisy_bundle, tmp_path / "ending"))
    config = json.loads((ending / GENERATION_CONFIG_FILE).read_text())
    config["eos_token_id"] = [206]
    rewrite(ending, GENERATION_CONFIG_FILE, json.dumps(config).encode())
    together = evaluate(ending, bundle, prompts=EXAMPLES, threads=1)
    # The first rows of a batch are those with the longest prompts.
    canvases = [len(together.prompts[index].reference_steps) for index in (1, 0, 2, 3)]
    assert canvases[0] < canvases[-1], canvases
    monkeypatch.setattr(run_module, "MAX_ROWS", 1)
    alone = evaluate(ending, bundle, prompts=EXAMPLES, threads=1)
    assert [step.canvases for step in alone.steps] == [step.canvases for step in together.steps]
    for found, expected in zip(alone.steps, together.steps, strict=True):
        assert found.kl == pytest.approx(expected.kl, rel=1e-3)
    for one, other in zip(alone.prompts, together.prompts, strict=True):
        assert one.kl == pytest.approx(other.kl, rel=1e-3)
        assert (one.candidate_text, one.reference_text) == (other.candidate_text, other.reference_text)


def test_first_step_logits_are_those_of_transformers(bundle: Path, checkpoint: Path) -> None:
    from dgcompile.verify.reference import Reference

    class First:
        logits: Any = None

        def canvas_started(self, cache: object) -> None:
            pass

        def stepped(self, step: Any) -> None:
            if self.logits is None:
                self.logits = step.logits

    config = open_graphs(bundle).generation.replace(max_new_tokens=1)
    ids, watcher = list(range(30, 60)), First()
    Reference(checkpoint, 1).generate(ids, config, 5, watcher)
    found = first_step_logits(bundle, ids, seed=5)
    expected = watcher.logits * config.temperature(config.max_denoising_steps)
    assert found.shape == expected.shape and found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-3 and np.abs(expected).max() > 1
    assert np.abs(found - first_step_logits(bundle, ids, seed=6)).max() > 0.1


def test_bytes_are_those_of_the_store(bundle: Path, against_itself: EvaluationReport) -> None:
    report = against_itself
    assert report.stored_bytes == sum(tensor.nbytes for tensor in read_header(bundle / "weights.safetensors").values())
    assert report.bits_per_weight == 32 and {row.bits_per_weight for row in report.weights} == {32.0}
    assert len(report.weights) == 7


def test_the_report_is_json(against_itself: EvaluationReport) -> None:
    content = json.loads(against_itself.model_dump_json())
    assert content["first_step"]["kl"] == 0 and content["steps_ratio"] == 1
    assert content["identical_texts"] == len(EXAMPLES) == len(content["prompts"])


# Refusals.


def test_a_graph_without_names_is_refused(bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    model = onnx.load(str(folder / "denoiser.onnx"), load_external_data=False)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["anonymous" if name == LOGITS else name for name in names]
    rewrite(folder, "denoiser.onnx", model.SerializeToString())
    with pytest.raises(BundleError, match=r"no value named logits.*build the bundle again"):
        evaluate(folder, bundle, prompts=EXAMPLES[:1])


def test_damage_and_unfinished_builds_are_refused(bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    with (folder / "weights.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x77")
    with pytest.raises(BundleError, match="damaged"):
        evaluate(folder, bundle, prompts=EXAMPLES[:1])
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["stages"]["weights"] = {"state": "pending"}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="stage weights is to be done"):
        evaluate(bundle, folder, prompts=EXAMPLES[:1])


def test_another_model_is_refused(bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["spec"]["rms_norm_eps"] = 0.5
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(RequestError, match=r"another model.*rms_norm_eps is 0\.5"):
        evaluate(bundle, folder, prompts=EXAMPLES[:1])


def test_requests_are_checked_before_transformers_runs(bundle: Path, checkpoint: Path) -> None:
    with pytest.raises(RequestError, match="no prompt"):
        evaluate(bundle, checkpoint, prompts=[])
    with pytest.raises(RequestError, match="token ids from 0 to"):
        evaluate(bundle, checkpoint, prompts=[Example([10**6])])
    with pytest.raises(RequestError, match="number of threads"):
        evaluate(bundle, checkpoint, prompts=EXAMPLES[:1], threads=0)


def test_prompts_are_taken_from_all_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"p{index}", "answer": f"a{index}", "other": 1}) for index in range(10)]
    file.write_text("\n".join([*lines[:5], "", *lines[5:]]) + '\n{"prompt": "without"}\n')
    found = read_examples(file, 3)
    assert [(example.prompt, example.answer, example.line) for example in found] == [
        ("p0", "a0", 1),
        ("p3", "a3", 4),
        ("p7", "a7", 9),
    ]
    assert len(read_examples(file)) == len(read_examples(file, 99)) == 11
    assert read_examples(file)[-1] == Example("without", None, 12)
    file.write_text('{"prompt": "p", "answer": 4}\n')
    with pytest.raises(RequestError, match=r":1 has 4 under 'answer'"):
        read_examples(file)
