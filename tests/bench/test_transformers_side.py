"""transformers as a contender: it is given the row's random numbers, and slow variants are given up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dgcompile.bench import transformers_side
from dgcompile.bench.process import Worker
from dgcompile.bench.transformers_side import TransformersSide
from dgcompile.errors import InputError
from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.random_numbers import RowRandom

CANVAS, VOCAB, SEED = 16, 288, 5


def command(steps: int = 3, new_tokens: int = 2 * CANVAS, **changes: Any) -> dict[str, Any]:
    """What a ``generate`` is told."""
    config = GenerationConfig(
        max_new_tokens=new_tokens, max_denoising_steps=steps, stability_threshold=steps, **changes
    ).model_dump(mode="json")
    return {"prompt": list(range(20, 40)), "config": config, "seed": SEED}


def opening(checkpoint: Path, variant: str = "float32,eager") -> dict[str, Any]:
    return {"path": str(checkpoint), "variant": variant, "threads": 1, **command(1, CANVAS)}


@pytest.fixture
def side(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> TransformersSide:
    """In this process; what it does to transformers' module is undone."""
    module = transformers_side.generation_module
    monkeypatch.setattr(module, "EntropyBoundSampler", module.EntropyBoundSampler)
    opened = TransformersSide()
    opened.open(opening(checkpoint))
    return opened


def test_canvases_and_noise_are_those_of_the_runtimes_row(side: TransformersSide) -> None:
    seen: list[torch.Tensor] = []

    def look(module: object, args: object, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["decoder_input_ids"][0].clone())

    side._model.model.decoder.register_forward_pre_hook(look, with_kwargs=True)
    # Flat distributions and hardly any entropy allowed: one token is accepted in each step, all others are noise.
    flat = command(3, t_min=80.0, t_max=90.0, entropy_bound=1e-9)
    for _ in range(2):  # the second one starts from the first canvas again
        seen.clear()
        run = side.generate(flat)
        assert [len(times) for times in run["step_seconds"]] == [2, 2] and run["tokens"] == 2 * CANVAS
        random = RowRandom(SEED, CANVAS, VOCAB)
        for canvas in range(2):
            first, *others = (np.asarray(ids) for ids in seen[3 * canvas : 3 * canvas + 3])
            assert np.array_equal(first, random.initial_canvas(canvas))
            for step, ids in enumerate(others, start=1):
                assert np.count_nonzero(ids != random.step(canvas, step)[1]) <= 1


def test_the_draws_are_seeded(side: TransformersSide) -> None:
    drawn: list[torch.Tensor] = []
    side._model.model.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: drawn.append(kwargs["decoder_input_ids"].clone()), with_kwargs=True
    )
    wide = command(3, entropy_bound=100.0)  # every drawn token is accepted
    side.generate(wide)
    first = list(drawn)
    drawn.clear()
    side.generate(wide)
    assert all(torch.equal(one, other) for one, other in zip(first, drawn, strict=True))


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[Worker]:
    with Worker("transformers", "dgcompile.bench.transformers_worker", 1, os.environ) as started:
        started.ask("open", **opening(checkpoint, "bfloat16,eager,eager_attention"))
        yield started


def test_a_variant_that_is_clearly_slower_is_given_up(worker: Worker) -> None:
    answer = worker.ask("probe", best=1e-9, **command(4, CANVAS))
    assert answer["step_seconds"] is None and answer["seen"] > 1e-9


@pytest.mark.parametrize("best", [None, 1e9])
def test_a_variant_that_is_not_runs_to_the_end(worker: Worker, best: float | None) -> None:
    answer = worker.ask("probe", best=best, **command(4, CANVAS))
    assert answer["step_seconds"] > 0 and answer["seen"] is None


def test_a_checkpoint_that_transformers_cannot_load_is_the_users_fault(tmp_path: Path) -> None:
    with (
        Worker("transformers", "dgcompile.bench.transformers_worker", 1, os.environ) as started,
        pytest.raises(InputError, match="transformers: transformers cannot load it"),
    ):
        started.ask("open", **opening(tmp_path))
