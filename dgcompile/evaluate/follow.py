"""The candidate led along the reference's runs: in every step it gets the reference's canvas and self-conditioning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dgcompile.evaluate.graphs import GraphSession
from dgcompile.evaluate.metrics import LOGITS, Tally
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.runtime.kv_cache import KVCache
from dgcompile.runtime.loop import GenerationResult, StepEvent, encode_prompts, generate
from dgcompile.runtime.session import Batch, HostBatch

if TYPE_CHECKING:
    from dgcompile.verify.reference import Reference, ReferenceCache, ReferenceStep

Array = npt.NDArray[Any]


class _FollowedCache(KVCache):
    """The reference's cache. When it moves a row, the candidate's own cache does too."""

    def __init__(self, spec: ModelSpec, rows: int, capacity: int) -> None:
        super().__init__(spec, rows, capacity, np.float32)
        self.follower = KVCache(spec, rows, capacity, np.float32)

    def move_row(self, source: int, target: int) -> None:
        super().move_row(source, target)
        self.follower.move_row(source, target)


class _FollowedSession:
    """The reference as a session of the loop; every call is done on the candidate too, from the same inputs.

    What the loop reads is the reference's. ``record`` is to be called after every step.
    """

    def __init__(self, reference: GraphSession, candidate: GraphSession, tally: Tally, indices: Sequence[int]) -> None:
        self.spec = reference.spec
        self.max_context = reference.max_context
        self.max_batch = None
        self._reference, self._candidate = reference, candidate
        self._tally, self._indices = tally, indices
        self._first_row = 0
        self._expected: Mapping[str, Array] = {}
        self._found: Mapping[str, Array] = {}
        self._started = False

    def new_batch(self, rows: int, capacity: int) -> Batch:
        cache = _FollowedCache(self.spec, rows, capacity)
        self._follower = HostBatch(self.spec, cache.follower, np.float32)
        self._started = False
        return HostBatch(self.spec, cache, np.float32)

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        self._reference.encode(batch, input_ids, input_length, first)
        self._candidate.encode(self._follower, input_ids, input_length, first)

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        inside = (LOGITS, *(() if self._started else self._reference.layer_names))
        self._started = True
        follower = self._follower
        for name in (
            "canvas_ids",
            "self_conditioning",
            "temperature",
            "entropy_bound",
            "uniform",
            "noise_ids",
        ):
            getattr(follower, name)[:] = getattr(batch, name)
        self._first_row = first
        self._expected = self._reference.step(batch, first, last, inside)
        self._found = self._candidate.step(follower, first, last, inside)

    def record(self, event: StepEvent) -> None:
        """Compares the rows for which the step counts."""
        for row, place in zip(event.rows, event.places, strict=True):
            expected, found = (
                {name: array[place - self._first_row] for name, array in side.items()}
                for side in (self._expected, self._found)
            )
            self._tally.add(self._indices[row], event.canvas, event.step, expected, found)


def follow_bundle(
    reference: GraphSession,
    candidate: GraphSession,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int],
    tally: Tally,
    indices: Sequence[int],
) -> list[GenerationResult]:
    """Lets a reference bundle generate while the candidate follows; returns what the reference generated.

    Args:
        reference: its graphs.
        candidate: a bundle of the same model.
        prompts: token ids; all are generated together.
        config: how to generate.
        seeds: one per prompt.
        tally: takes in the errors.
        indices: the prompts' numbers.
    """
    followed = _FollowedSession(reference, candidate, tally, indices)
    return generate(followed, prompts, config, seeds, followed.record)


def follow_transformers(
    reference: Reference,
    candidate: GraphSession,
    prompt: Sequence[int],
    config: GenerationConfig,
    seed: int,
    tally: Tally,
    index: int,
) -> tuple[list[int], tuple[int, ...]]:
    """Lets transformers generate while the candidate follows, one prompt.

    Args:
        reference: the checkpoint in transformers.
        candidate: a bundle of the same model.
        prompt: token ids.
        config: how to generate.
        seed: of the random numbers.
        tally: takes in the errors.
        index: the prompt's number.

    Returns:
        The tokens that transformers generated, and its steps of each canvas.
    """
    with _layer_outputs(reference) as layers:
        follower = _TransformersFollower(candidate, config, len(prompt), layers, tally, index)
        tokens = reference.generate(prompt, config, seed, follower)
    return tokens, tuple(follower.steps)


class _TransformersFollower:
    """Watches transformers and does on the candidate what it does; see ``Watcher``."""

    def __init__(
        self,
        candidate: GraphSession,
        config: GenerationConfig,
        prompt_length: int,
        layers: Sequence[Array],
        tally: Tally,
        index: int,
    ) -> None:
        self.steps: list[int] = []
        self._candidate, self._config, self._layers = candidate, config, layers
        self._tally, self._index = tally, index
        length = candidate.spec.canvas_length
        self._batch = candidate.new_batch(1, prompt_length + -(-config.max_new_tokens // length) * length)
        self._batch.entropy_bound.fill(config.entropy_bound)

    def canvas_started(self, cache: ReferenceCache) -> None:
        self.steps.append(0)
        if cache.canvas == 0:
            encode_prompts(self._candidate, self._batch, [cache.token_ids])
        else:
            length = np.array([len(cache.token_ids)], dtype=np.int32)
            self._candidate.encode(self._batch, cache.token_ids[None], length)

    def stepped(self, step: ReferenceStep) -> None:
        self.steps[-1] += 1
        batch, names = self._batch, self._candidate.layer_names
        temperature = np.float32(self._config.temperature(self._config.max_denoising_steps - step.step + 1))
        batch.start_canvas(step.canvas_ids[None])
        batch.self_conditioning[0] = step.self_conditioning
        batch.temperature.fill(temperature)
        batch.uniform[0], batch.noise_ids[0] = step.uniform, step.noise_ids
        inside = (LOGITS, *(names if step.canvas == 0 and step.step == 1 else ()))
        found = {name: array[0] for name, array in self._candidate.step(batch, 0, 0, inside).items()}
        expected = {LOGITS: step.logits * temperature, **dict(zip(names, self._layers, strict=True))}
        self._tally.add(self._index, step.canvas, step.step, expected, found)


@contextmanager
def _layer_outputs(reference: Reference) -> Iterator[list[Array]]:
    """A list that always holds what the decoder's layers gave last, float32 [L, H] each."""
    layers = reference.model.model.decoder.layers
    outputs: list[Array] = [np.empty(0)] * len(layers)
    hooks = []
    for index, layer in enumerate(layers):

        def remember(_module: object, _inputs: object, output: Any, index: int = index) -> None:
            outputs[index] = output[0].float().numpy().copy()

        hooks.append(layer.register_forward_hook(remember))
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
