"""From a checkpoint to tokens: the bundle's answers are those of transformers' own ``generate()``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dgcompile.build import build
from dgcompile.generation_config import GenerationConfig
from dgcompile.recipe import Recipe
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.target import Target
from dgcompile.verify import verify
from dgcompile.verify.reference import Reference, ReferenceCache, ReferenceStep
from tests.models import random_checkpoint


class Unwatched:
    """Looks at nothing: here only the tokens count."""

    def canvas_started(self, cache: ReferenceCache) -> None: ...

    def stepped(self, step: ReferenceStep) -> None: ...


@dataclass(frozen=True)
class Model:
    """A checkpoint on both sides."""

    checkpoint: Path
    bundle: Path
    pipeline: Pipeline
    reference: Reference

    @property
    def window(self) -> int:
        return self.pipeline.session.spec.sliding_window

    @property
    def canvas(self) -> int:
        return self.pipeline.session.spec.canvas_length

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Random tokens, none of them special."""
        vocab = self.pipeline.session.spec.vocab_size
        return [2, *np.random.default_rng([length, seed]).integers(9, vocab - 3, length - 1).tolist()]

    def check(self, prompt: Sequence[int], config: GenerationConfig, seed: int) -> list[int]:
        """Asserts that both sides generate the same tokens; returns those of transformers.

        Only a tie that float32 rounding explains may part them. On any one machine about one run in fifty has one.
        """
        expected = self.reference.generate(prompt, config, seed, Unwatched())
        if self.pipeline.generate([prompt], config, [seed])[0].token_ids != expected:
            report = verify(self.bundle, self.checkpoint, prompts=[prompt], seeds=[seed], config=config, threads=1)
            assert report.ok and report.ties + report.drifts, report.pairs
        return expected


@pytest.fixture(scope="module")
def published(checkpoint: Path, bundle: Path) -> Model:
    """The published form of config.json; a window longer than the canvas."""
    return Model(checkpoint, bundle, Pipeline.open(bundle, threads=1), Reference(checkpoint))


@pytest.fixture(scope="module")
def resaved(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The form that transformers saves, in two shards; a window shorter than the canvas, odd sizes, a sliding layer
    after a full one.
    """
    folder = tmp_path_factory.mktemp("resaved")
    checkpoint = random_checkpoint(
        folder / "checkpoint",
        layers=("full", "sliding", "full"),
        config_form="transformers",
        shards=2,
        hidden=24,
        intermediate=20,
        heads=6,
        kv_heads=3,
        head_dim=6,
        full_kv_heads=2,
        full_head_dim=8,
        experts=5,
        top_k=3,
        moe_intermediate=10,
        vocab=70,
        canvas=12,
        window=7,
        seed=5,
    )
    build(checkpoint, Target.load("cpu"), Recipe.load("fp32"), folder / "bundle")
    return Model(checkpoint, folder / "bundle", Pipeline.open(folder / "bundle", threads=1), Reference(checkpoint))


@pytest.fixture(params=["published", "resaved"])
def model(request: pytest.FixtureRequest) -> Model:
    found: Model = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
@pytest.mark.parametrize("around", ["one", "window-1", "window", "window+1", "long"])
def test_three_canvases_are_those_of_transformers(model: Model, around: str, seed: int) -> None:
    """Without an end of text, so that all three canvases are compared."""
    length = {
        "one": 1,
        "window-1": model.window - 1,
        "window": model.window,
        "window+1": model.window + 1,
        "long": 2 * model.window + model.canvas + 3,
    }[around]
    config = model.pipeline.bundle.generation.replace(max_new_tokens=3 * model.canvas, eos_token_ids=())
    assert len(model.check(model.prompt(length), config, seed)) == 3 * model.canvas


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_window_that_fills_up_exactly_at_a_canvas_boundary(model: Model, extra: int) -> None:
    """Prompt and first canvas end one token before, at, and one token after the point where the ring has filled up."""
    turns = model.canvas // model.window + 1  # a window may be shorter than a canvas
    length = turns * model.window + extra - model.canvas
    assert length >= 1
    config = model.pipeline.bundle.generation.replace(max_new_tokens=2 * model.canvas + 1, eos_token_ids=())
    assert len(model.check(model.prompt(length), config, 11)) == 2 * model.canvas + 1


@pytest.mark.parametrize("seed", range(3))
def test_an_end_of_text_ends_both_alike(model: Model, seed: int) -> None:
    """A frequent token is declared an end."""
    free = model.pipeline.bundle.generation.replace(max_new_tokens=3 * model.canvas, eos_token_ids=())
    tokens = model.check(model.prompt(20), free, seed)
    # Its first occurrence lies in the second canvas, or wherever it lies first.
    eos = next((token for token in tokens[model.canvas :] if token not in tokens[: model.canvas]), tokens[-1])
    config = free.replace(eos_token_ids=(eos,))
    expected = model.check(model.prompt(20), config, seed)
    assert expected[-1] == eos and eos not in expected[:-1]


def test_engines_are_exact_and_every_step_agrees(model: Model) -> None:
    prompts = [model.prompt(length) for length in (3, model.window, 3 * model.window)]
    report = verify(model.bundle, model.checkpoint, prompts=prompts, seeds=(1, 2), threads=1)
    assert report.ok, [difference for pair in report.pairs for difference in pair.differences]
    assert report.errors.largest < 1e-4
    assert report.canvases >= 12


def test_rows_of_a_batch_are_what_each_is_alone(model: Model) -> None:
    """Of different lengths and with different ends: each is what transformers makes of it alone."""
    prompts = [model.prompt(length) for length in (2 * model.window + 5, 1, model.window, model.window + 1, 9)]
    report = verify(model.bundle, model.checkpoint, prompts=prompts, seeds=(3, 4), batch_size=5, threads=1)
    assert report.ok, [difference for pair in report.pairs for difference in pair.differences]
    assert report.exact_pairs >= 8
    assert len({pair.bundle_steps for pair in report.pairs}) > 2, "all rows took the same steps: nothing was tested"


def test_text_in_and_text_out(published: Model) -> None:
    pipeline = published.pipeline
    messages = [{"role": "user", "content": "Héllo?"}]
    token_ids = pipeline.encode(messages)
    assert token_ids == published.reference.encode("Héllo?", chat=True)
    assert pipeline.decode(token_ids, skip_special_tokens=False) == (
        "<bos><|turn>user\nHéllo?<turn|>\n<|turn>assistant\n"
    )
    answer = published.check(token_ids, pipeline.bundle.generation, 0)
    assert pipeline.decode(answer, skip_special_tokens=False)
