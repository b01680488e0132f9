"""transformers' generate(), run with given random numbers: it must be left as it was, and see those numbers alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation_module

from dgcompile.errors import CheckpointError, RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.random_numbers import RowRandom
from dgcompile.verify.compare import cut, draw
from dgcompile.verify.reference import Reference, ReferenceCache, ReferenceStep

CONFIG = GenerationConfig(max_new_tokens=40, max_denoising_steps=9)
PROMPT = list(range(20, 50))


class Recorder:
    """Keeps everything."""

    def __init__(self) -> None:
        self.caches: list[ReferenceCache] = []
        self.steps: list[ReferenceStep] = []

    def canvas_started(self, cache: ReferenceCache) -> None:
        self.caches.append(cache)

    def stepped(self, step: ReferenceStep) -> None:
        self.steps.append(step)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def recorded(reference: Reference) -> tuple[list[int], Recorder]:
    recorder = Recorder()
    return reference.generate(PROMPT, CONFIG, 3, recorder), recorder


def test_every_random_number_comes_from_the_row(recorded: tuple[list[int], Recorder]) -> None:
    _, recorder = recorded
    random = RowRandom(3, 16, 288)
    for step in recorder.steps:
        uniform, noise_ids = random.step(step.canvas, step.step)
        if step.step == 1:
            np.testing.assert_array_equal(step.canvas_ids, random.initial_canvas(step.canvas))
            assert not step.self_conditioning.any()
        drawn = draw(step.probabilities, uniform)
        np.testing.assert_array_equal(step.next_canvas_ids, np.where(step.accepted, drawn, noise_ids))


def test_steps_follow_each_other(recorded: tuple[list[int], Recorder]) -> None:
    tokens, recorder = recorded
    assert [cache.canvas for cache in recorder.caches] == [0, 1, 2]
    assert recorder.caches[0].token_ids.tolist() == PROMPT
    final = []
    for earlier, later in zip(recorder.steps, recorder.steps[1:], strict=False):
        if later.canvas == earlier.canvas:
            assert later.step == earlier.step + 1
            np.testing.assert_array_equal(later.canvas_ids, earlier.next_canvas_ids)
        else:
            assert later.step == 1
            assert recorder.caches[later.canvas].token_ids.tolist() == earlier.argmax_ids.tolist()
            final += earlier.argmax_ids.tolist()
    final += recorder.steps[-1].argmax_ids.tolist()
    assert tokens == final[:40]


def test_the_model_has_something_to_decide(recorded: tuple[list[int], Recorder]) -> None:
    """Otherwise agreement would mean nothing."""
    steps = recorded[1].steps
    entropy = np.concatenate([step.entropy for step in steps])
    assert entropy.min() < 1e-3 and entropy.max() > 1.0
    assert any(0 < step.accepted.sum() < 16 for step in steps)
    drawn = [draw(step.probabilities, step.uniform) for step in steps]
    assert any((ids != step.argmax_ids)[step.accepted].any() for ids, step in zip(drawn, steps, strict=True))
    assert len({step.canvas for step in steps}) == 3 and len(steps) > 15


def test_watching_changes_nothing(reference: Reference, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run without hooks and notes, on transformers' default implementations."""
    random = RowRandom(3, 16, 288)
    count = {"canvas": -1, "step": 0}
    pending: list[torch.Tensor] = []

    def randint(**_: object) -> torch.Tensor:
        if pending:
            return pending.pop()
        count.update(canvas=count["canvas"] + 1, step=0)
        return torch.from_numpy(random.initial_canvas(count["canvas"])).long()[None]

    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        count["step"] += 1
        uniform, noise_ids = random.step(count["canvas"], count["step"])
        pending.append(torch.from_numpy(noise_ids).long()[None])
        return torch.from_numpy(draw(probabilities.numpy(), uniform))[:, None]

    monkeypatch.setattr(torch, "randint", randint)
    monkeypatch.setattr(torch, "multinomial", multinomial)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(checkpoint, dtype=torch.float32)
    plain = model.generate(torch.tensor([PROMPT]), max_new_tokens=40, max_denoising_steps=9).sequences[0, len(PROMPT) :]
    watched = reference.generate(PROMPT, CONFIG.replace(eos_token_ids=(1, 5)), 3, Recorder())
    assert cut(plain.tolist(), CONFIG.replace(eos_token_ids=(1, 5))) == watched


def test_seeds_matter_and_repeat(reference: Reference, recorded: tuple[list[int], Recorder]) -> None:
    assert reference.generate(PROMPT, CONFIG, 3, Recorder()) == recorded[0]
    assert reference.generate(PROMPT, CONFIG, 4, Recorder()) != recorded[0]


def test_everything_is_put_back_even_after_an_error(reference: Reference) -> None:
    class Failing(Recorder):
        def stepped(self, step: ReferenceStep) -> None:
            raise KeyboardInterrupt

    sampler = generation_module.EntropyBoundSampler
    with pytest.raises(KeyboardInterrupt):
        reference.generate(PROMPT, CONFIG, 0, Failing())
    assert vars(generation_module)["torch"] is torch
    assert generation_module.EntropyBoundSampler is sampler
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in reference.model.modules())


def test_cut() -> None:
    config = GenerationConfig(max_new_tokens=5, eos_token_ids=(1, 7))
    assert cut([4, 7, 1, 0, 0, 0, 0, 0], config) == [4, 7]
    assert cut([4, 5, 6, 8, 9, 1, 0, 0], config) == [4, 5, 6, 8, 9]
    assert cut([4, 5, 6, 8, 1, 0, 0, 0], config) == [4, 5, 6, 8, 1]


def test_what_transformers_cannot_do_is_refused(reference: Reference) -> None:
    with pytest.raises(RequestError, match="confidence_threshold"):
        reference.generate(PROMPT, CONFIG.replace(confidence_threshold=None), 0, Recorder())


def test_a_folder_without_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Reference(tmp_path)
