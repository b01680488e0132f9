"""What is refused before anything is started, and what the work is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgcompile.bench import job
from dgcompile.bench.job import (
    Contender,
    Settings,
    check_extra,
    check_memory,
    check_same_model,
    prompt_ids,
    tasks_of,
)
from dgcompile.bundle import Bundle
from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import InputError, MissingDependencyError, RequestError
from dgcompile.generation_config import GenerationConfig
from tests.models import random_checkpoint
from tests.runtime.toy_model import CANVAS, toy_spec

GOOD = Settings(prompt_tokens=10, new_tokens=12, steps=3, pasts=(10, 20), threads=1, turns=2, seed=0)


def test_settings_that_fit_exactly_are_taken() -> None:
    GOOD.check(toy_spec(), 26, "it")  # a past of 20 and a canvas; the prompt and two canvases take 22
    with pytest.raises(RequestError, match=r"--past 20 and a canvas take 26 tokens.*at most 25, the max_context of it"):
        GOOD.check(toy_spec(), 25, "it")
    with pytest.raises(RequestError, match=r"--prompt-tokens 10 and --new-tokens 13 take 28 tokens.*at most 27"):
        GOOD.model_copy(update={"new_tokens": 13}).check(toy_spec(), 27, "it")


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("prompt_tokens", 0, "--prompt-tokens"),
        ("new_tokens", -1, "--new-tokens"),
        ("steps", 1, "--steps"),
        ("threads", 0, "--threads"),
        ("threads", 5000, "--threads"),
        ("turns", 0, "--turns"),
        ("pasts", (0,), "--past"),
        ("pasts", (600,), "--past"),
    ],
)
def test_numbers_out_of_range_are_refused_by_the_options_name(field: str, value: object, option: str) -> None:
    with pytest.raises(RequestError, match=f"^{option} (is )?"):
        GOOD.model_copy(update={field: value}).check(toy_spec(), 512, "it")


def test_a_past_of_the_prompts_length_is_measured_by_the_end_to_end_run() -> None:
    assert [(task.past, task.new_tokens) for task in tasks_of(GOOD, toy_spec())] == [(10, 12), (20, CANVAS)]
    others = GOOD.model_copy(update={"pasts": (5, 20)})
    assert [task.past for task in tasks_of(others, toy_spec())] == [10, 5, 20]


def test_no_canvas_stops_early_and_no_text_ends_early() -> None:
    base = GenerationConfig(eos_token_ids=(1,), stability_threshold=None, confidence_threshold=None, t_max=0.9)
    config = GOOD.generation(base, 12, 3)
    assert config.stability_threshold == config.max_denoising_steps == 3
    assert config.eos_token_ids == () and config.max_new_tokens == 12 and config.t_max == 0.9
    assert config.confidence_threshold is not None  # transformers needs one


def test_prompts_are_repeatable_and_hold_no_special_token() -> None:
    ids = prompt_ids(7, 300, 32, {0, 1, 31})
    assert len(ids) == 300 and set(ids) == set(range(2, 31))
    assert ids == prompt_ids(7, 300, 32, {0, 1, 31}) != prompt_ids(8, 300, 32, {0, 1, 31})


def test_another_model_is_refused_by_the_field_that_differs(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    other = Checkpoint.open(random_checkpoint(tmp_path / "other", moe_intermediate=24))
    with pytest.raises(RequestError, match=r"other is another model than .*differ in moe_intermediate_size"):
        check_same_model([opened], other)


def test_the_same_model_is_taken(bundle: Path, checkpoint: Path) -> None:
    check_same_model([Bundle.open(bundle), Bundle.open(bundle)], Checkpoint.open(checkpoint))


def test_weights_that_do_not_fit_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = [Contender("bundle", name, Path(name), True, 600, {}, "") for name in ("one", "other")]
    monkeypatch.setattr(job, "available_memory", lambda: 1200)
    check_memory(contenders)
    monkeypatch.setattr(job, "available_memory", lambda: 1199)
    with pytest.raises(InputError, match=r"weights of all contenders take .* together.*measure fewer"):
        check_memory(contenders)


def test_transformers_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_extra()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else object())
    with pytest.raises(MissingDependencyError, match=r"'transformers' is not installed; .*dgcompile\[build\]"):
        check_extra()
