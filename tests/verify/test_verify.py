"""verify on a real bundle: what is right passes, and what is wrong, however little, does not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dgcompile.runtime.loop as loop
from dgcompile.errors import RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.progress import Advance, Progress
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.runtime.row import Row
from dgcompile.runtime.session import Batch
from dgcompile.verify import VerifyReport, read_prompts, verify
from dgcompile.verify.pairs import GuidedRun, run_bundle
from dgcompile.verify.reference import Reference

PROMPTS = ["Why is the sky blue?", [2, *range(30, 70)]]
LAYER = "model.decoder.layers.1."


@pytest.fixture(scope="module")
def report(bundle: Path, checkpoint: Path) -> VerifyReport:
    return verify(bundle, checkpoint, prompts=PROMPTS, seeds=(0, 1), threads=1)


def test_the_bundle_of_a_checkpoint_agrees_with_it(report: VerifyReport) -> None:
    assert report.ok and report.same_checkpoint
    # A tie may part two runs on some machine; a fault would part nearly all.
    assert report.exact_pairs >= 3 and report.failures == 0
    assert [(pair.prompt, pair.seed) for pair in report.pairs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for pair in report.pairs:
        assert pair.first_difference is not None or (pair.exact and pair.reference_steps == pair.bundle_steps)


def test_engines_are_compared_on_every_call(report: VerifyReport) -> None:
    errors = report.errors
    assert errors.encoder_calls == report.canvases
    assert errors.denoiser_calls == sum(sum(pair.reference_steps) for pair in report.pairs)
    # Exactly zero would mean that something was compared with itself.
    assert all(0 < error < 1e-4 for error in (errors.keys, errors.values, errors.self_conditioning, errors.entropy))


def test_every_canvas_counts_in_the_shares(report: VerifyReport) -> None:
    assert [share.step for share in report.step_shares] == list(range(1, len(report.step_shares) + 1))
    assert report.step_shares[0].canvases == report.canvases
    assert report.step_shares[0].identical >= report.canvases - 3


def test_the_report_is_json(report: VerifyReport) -> None:
    content = json.loads(report.model_dump_json())
    assert content["ok"] is True and content["exact_pairs"] == report.exact_pairs and content["tie_bound"] == 1e-5


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        (LAYER + "self_attn.k_norm.weight", 1.02),
        (LAYER + "router.per_expert_scale", 1.02),
        (LAYER + "layer_scalar", 1.02),
        ("model.encoder.language_model.layers.0.layer_scalar", 1.02),
        ("model.decoder.self_conditioning.up_proj.weight", 1.02),
        (LAYER + "experts.down_proj", -1.0),
    ],
)
def test_one_weight_that_is_a_little_wrong_fails(
    bundle: Path, checkpoint: Path, tmp_path: Path, name: str, factor: float
) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors[name] = (tensors[name].to(torch.float32) * factor).to(torch.bfloat16)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    report = verify(bundle, other, prompts=PROMPTS[1:], threads=1)
    assert not report.ok and not report.same_checkpoint
    assert report.errors.largest > report.error_bound


def test_a_loop_that_stops_late_fails(bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Row.take_step

    def one_step_late(row: Row, argmax_ids: Any, mean_entropy: float) -> bool:
        original(row, argmax_ids, mean_entropy)
        stability, confidence = row.config.stability_threshold, row.config.confidence_threshold
        assert stability is not None and confidence is not None
        return row._repeats - 1 >= stability and mean_entropy < confidence

    monkeypatch.setattr(Row, "take_step", one_step_late)
    config = GenerationConfig(max_new_tokens=16, max_denoising_steps=30, confidence_threshold=0.02)
    report = verify(bundle, checkpoint, prompts=PROMPTS[1:], seeds=range(3), config=config, threads=1)
    assert not report.ok
    kinds = {pair.first_difference.kind for pair in report.pairs if pair.first_difference is not None}
    assert kinds == {"stop"}
    # The engines themselves did nothing wrong.
    assert not any(pair.step_differences for pair in report.pairs)
    assert report.errors.largest < report.error_bound


def warmer(original: Callable[[Row], Any], factor: float) -> Callable[[Row], Any]:
    """A row whose first step is hotter by a factor."""

    def next_step(row: Row) -> Any:
        config = row.config.replace(t_max=row.config.t_max * factor)
        steps_left = config.max_denoising_steps - row.steps_per_canvas[-1]
        return config.temperature(steps_left), *original(row)[1:]

    return next_step


def test_a_loop_with_another_temperature_fails_although_the_engines_are_right(
    bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Row, "next_step", warmer(Row.next_step, 1.05))
    report = verify(bundle, checkpoint, prompts=PROMPTS[1:], seeds=range(2), threads=1)
    assert not report.ok and report.failures > 0
    assert report.errors.largest < report.error_bound


HOT = GenerationConfig(
    max_new_tokens=16, max_denoising_steps=40, t_max=2.5, confidence_threshold=1e-9, entropy_bound=0.1
)
"""So hot and so long that tokens keep changing: rounding grows until runs part, in about four of ten."""


def test_runs_that_rounding_parts_are_told_from_wrong_ones(
    bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = verify(bundle, checkpoint, prompts=PROMPTS[1:], seeds=range(10), config=HOT, threads=1)
    assert report.ok and report.drifts > 0
    drifted = [pair.first_difference for pair in report.pairs if pair.first_difference is not None]
    assert all(difference.drift is not None and difference.drift > 1e-5 for difference in drifted)

    monkeypatch.setattr(Row, "next_step", warmer(Row.next_step, 1.005))
    report = verify(bundle, checkpoint, prompts=PROMPTS[1:], seeds=range(3), config=HOT, threads=1)
    assert not report.ok and report.failures == 3


def test_self_conditioning_that_outlives_its_canvas_fails(
    bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Batch.start_canvas

    def forgetful(batch: Batch, canvas_ids: Any) -> None:
        kept = batch.self_conditioning.copy()
        original(batch, canvas_ids)
        batch.self_conditioning[:] = kept

    monkeypatch.setattr(Batch, "start_canvas", forgetful)
    report = verify(bundle, checkpoint, prompts=PROMPTS[1:], max_new_tokens=32, threads=1)
    (pair,) = report.pairs
    assert not report.ok and pair.first_difference is not None
    assert (pair.first_difference.canvas, pair.first_difference.step) == (1, 1)
    assert not pair.step_differences


@pytest.mark.parametrize("change", ["argmax", "accepted", "next_self_conditioning", "steps"])
def test_a_guided_run_sees_any_step_that_was_decided_otherwise(bundle: Path, checkpoint: Path, change: str) -> None:
    session, config = Pipeline.open(bundle, threads=1).session, HOT.replace(max_denoising_steps=12, max_new_tokens=32)
    reference, prompt = Reference(checkpoint), list(range(30, 70))
    ((_, course),) = run_bundle(session, [prompt], config, [1])

    def agrees() -> bool:
        watcher = GuidedRun(config, course)
        reference.generate(prompt, config, 1, watcher, course)
        watcher.finish()
        return watcher.agrees

    assert agrees()
    steps = course.steps[1]
    outcome, last = course.outcome(1, 5), course.outcome(1, steps)
    assert outcome is not None and last is not None and steps > 5
    argmax_ids, accepted = outcome.argmax_ids.copy(), outcome.accepted.copy()
    argmax_ids[3] += 1
    accepted[3] = not accepted[3]
    if change == "argmax":
        course.add(1, 5, dataclasses.replace(outcome, argmax_ids=argmax_ids))
    elif change == "accepted":
        course.add(1, 5, dataclasses.replace(outcome, accepted=accepted))
    elif change == "next_self_conditioning":
        changed = np.asarray(outcome.next_self_conditioning, np.float32) * np.float32(1.001)
        course.add(1, 5, dataclasses.replace(outcome, next_self_conditioning=changed))
    else:
        course.add(1, steps + 1, last)
    course.add(1, steps, last)
    assert not agrees()


def test_lost_tokens_fail(bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Row.take_canvas

    def forgetful(row: Row) -> list[int]:
        part = original(row)
        row.token_ids[-1] = 0
        return part

    monkeypatch.setattr(Row, "take_canvas", forgetful)
    report = verify(bundle, checkpoint, prompts=PROMPTS[1:], max_new_tokens=16, threads=1)
    (pair,) = report.pairs
    assert not report.ok and not pair.exact
    assert pair.first_difference is not None and pair.first_difference.kind == "tokens"
    assert pair.first_difference.position == 15


def test_another_chat_template_fails(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("'<|turn>' ~ message", "'<|turn> ' ~ message"))
    report = verify(bundle, other, prompts=["Hello"], max_new_tokens=16, threads=1)
    first = report.pairs[0].first_difference
    assert not report.ok and first is not None and first.kind == "prompt"
    assert first.position == 2  # after <bos> and <|turn>


def test_max_new_tokens_and_progress(bundle: Path, checkpoint: Path) -> None:
    class Recording(Progress):
        def __init__(self) -> None:
            self.tasks: dict[str, tuple[float | None, float]] = {}

        @contextmanager
        def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
            self.tasks[label] = (total, 0)

            def advance(amount: float = 1.0, /) -> None:
                self.tasks[label] = (total, self.tasks[label][1] + amount)

            yield advance

    progress = Recording()
    report = verify(bundle, checkpoint, prompts=PROMPTS, seeds=(5,), max_new_tokens=17, threads=1, progress=progress)
    assert report.ok
    assert all(pair.tokens <= 17 for pair in report.pairs) and report.canvases <= 4
    assert progress.tasks["compare with transformers"] == (2, 2)


@pytest.mark.parametrize(("prompts", "seeds"), [([], [0]), (["x"], [])])
def test_nothing_to_compare_is_refused(
    bundle: Path, checkpoint: Path, prompts: Sequence[str], seeds: Sequence[int]
) -> None:
    with pytest.raises(RequestError, match="at least one"):
        verify(bundle, checkpoint, prompts=prompts, seeds=seeds)


def test_a_batch_is_compared_row_by_row(bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_sizes = []
    original = loop.generate

    def counted(session: Any, prompts: Any, *rest: Any) -> Any:
        batch_sizes.append(len(prompts))
        return original(session, prompts, *rest)

    monkeypatch.setattr("dgcompile.verify.pairs.generate", counted)
    report = verify(bundle, checkpoint, prompts=PROMPTS, seeds=(0, 1, 2), batch_size=4, max_new_tokens=16, threads=1)
    assert report.ok and batch_sizes == [4, 2]
    assert [(pair.prompt, pair.seed) for pair in report.pairs] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    with pytest.raises(RequestError, match="batch size"):
        verify(bundle, checkpoint, prompts=PROMPTS, batch_size=0)


def test_reads_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb", "answer": "c"}\n\n{"prompt": "ü"}\n')
    assert read_prompts(file) == ["a\nb", "ü"]
    assert read_prompts(file, limit=1) == ["a\nb"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\nnot json\n', "prompts.jsonl:2 is not JSON"),
        (b'{"text": "a"}\n', "prompts.jsonl:1 has no text"),
        (b'["a"]\n', "prompts.jsonl:1 has no text"),
        (b"\n", "has no prompts"),
        (b"\xff\xfe", "cannot be read"),
        (None, "is missing"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RequestError, match=message):
        read_prompts(file)


def test_both_sides_draw_alike_by_different_means() -> None:
    """The reference draws by a flat float64 sum, the engine in two float32 levels."""
    from dgcompile.trace import sampler
    from dgcompile.verify import compare

    table = np.random.default_rng(0).random((50, 300), np.float32)
    uniform = np.random.default_rng(1).random(50, np.float32)
    theirs = sampler.draw(torch.from_numpy(table)[None], torch.from_numpy(uniform)[None])[0]
    assert compare.draw(table, uniform).tolist() == theirs.tolist()
