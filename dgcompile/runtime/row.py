"""Row: one prompt on its way to its answer. It decides; a loop runs it, alone or beside others.

The rules are those of ``DiffusionGemmaGenerationMixin.generate`` in transformers 5.24. What a row generates depends on
its prompt, its seed and its options alone, never on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from dgcompile.errors import EngineError, RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.runtime.random_numbers import RowRandom

FinishReason = Literal["eos", "length", "stop"]
"""Why an answer ended: the model ended it, max_new_tokens was reached, or whoever listens had enough (stop strings)."""


class Row:
    """One prompt on its way.

    Args:
        spec: the model.
        max_context: tokens (prompt and whole canvases) that a row may hold.
        prompt: token ids.
        config: how to generate.
        seed: 0 .. 2**64 - 1.
        which: what messages call the prompt.

    Attributes:
        prompt: int32 [n].
        config: how to generate.
        token_ids: generated so far, up to and including the first EOS; at most ``max_new_tokens``, no padding.
        finish_reason: None as long as there is more to generate.
        steps_per_canvas: denoising steps that each canvas took so far.
        encoder_calls: encoder calls that the row took part in (prompt chunks and committed canvases).

    Raises:
        RequestError: the prompt, the seed or the length asked for is impossible.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_context: int,
        prompt: Sequence[int],
        config: GenerationConfig,
        seed: int,
        which: str = "the prompt",
    ) -> None:
        _check_length(spec, max_context, prompt, config, which)
        self.prompt = _token_ids(prompt, which, spec.vocab_size)
        self.config = config
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.steps_per_canvas: list[int] = []
        self.encoder_calls = 0
        # Of the newest step. As bytes, copying and comparing take a microsecond; numpy's functions take several.
        self._argmax = b""
        self._random = RowRandom(seed, spec.canvas_length, spec.vocab_size)
        self._repeats = 0  # earlier argmax canvases in a row that equal the newest one

    @property
    def canvas(self) -> int:
        """Number of the canvas that is being denoised, from 0; -1 before the first."""
        return len(self.steps_per_canvas) - 1

    @property
    def argmax_ids(self) -> npt.NDArray[np.int32]:
        """int32 [L], the most probable tokens after the newest step: the output, if it was the canvas's last.

        Read-only, and of no tokens before a canvas's first step.
        """
        return np.frombuffer(self._argmax, dtype=np.int32)

    @property
    def steps(self) -> int:
        """Denoising steps of all canvases so far."""
        return sum(self.steps_per_canvas)

    def start_canvas(self) -> npt.NDArray[np.int32]:
        """Begins the next canvas; returns what it starts from, int32 [L]."""
        self.steps_per_canvas.append(0)
        self._argmax = b""
        self._repeats = 0
        return self._random.initial_canvas(self.canvas)

    def next_step(self) -> tuple[float, npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """What the next denoising step takes: temperature, uniform float32 [L], noise_ids int32 [L]."""
        done = self.steps_per_canvas[-1]
        uniform, noise_ids = self._random.step(self.canvas, done + 1)
        return self.config.temperature(self.config.max_denoising_steps - done), uniform, noise_ids

    def take_step(self, argmax_ids: npt.NDArray[np.int32], mean_entropy: float) -> bool:
        """Takes what a denoising step gave this row.

        Args:
            argmax_ids: int32 [L], the most probable tokens; copied.
            mean_entropy: mean of the positions' entropies, in nats.

        Returns:
            Whether the row has converged: its canvas is stable and confident. Transformers'
            ``StableAndConfidentStoppingCriteria``. The steps may run out before, see :attr:`steps_left`.

        Raises:
            EngineError: the entropy is not finite.
        """
        self.steps_per_canvas[-1] += 1
        if not math.isfinite(mean_entropy):
            raise EngineError(
                f"the denoiser's entropy is {mean_entropy} in step {self.steps_per_canvas[-1]} of canvas {self.canvas}",
                expected="finite numbers",
                fix="check the weights with `dgcompile verify`",
            )
        newest = argmax_ids.tobytes()
        self._repeats = self._repeats + 1 if newest == self._argmax else 0
        self._argmax = newest
        stability, confidence = self.config.stability_threshold, self.config.confidence_threshold
        if stability is None or confidence is None:
            return False
        return self._repeats >= stability and mean_entropy < confidence

    @property
    def steps_left(self) -> int:
        """Denoising steps that this canvas may still take."""
        return self.config.max_denoising_steps - self.steps_per_canvas[-1]

    def take_canvas(self) -> list[int]:
        """Ends the canvas: adds it to the answer, cut after the first EOS and at max_new_tokens; returns that part."""
        part: list[int] = self.argmax_ids[: self.config.max_new_tokens - len(self.token_ids)].tolist()
        ends = [part.index(token) for token in self.config.eos_token_ids if token in part]
        if ends:
            part = part[: min(ends) + 1]
            self.finish_reason = "eos"
        self.token_ids += part
        if self.finish_reason is None and len(self.token_ids) == self.config.max_new_tokens:
            self.finish_reason = "length"
        return part


def _check_length(
    spec: ModelSpec, max_context: int, prompt: Sequence[int], config: GenerationConfig, which: str
) -> None:
    if not len(prompt):
        raise RequestError(f"{which} is empty", expected="at least one token")
    canvases = -(-config.max_new_tokens // spec.canvas_length)
    needed = len(prompt) + canvases * spec.canvas_length
    if needed > max_context:
        raise RequestError(
            f"{which} has {len(prompt)} tokens and {config.max_new_tokens} new ones take {canvases} canvases of "
            f"{spec.canvas_length}: {needed} tokens",
            expected=f"at most {max_context}, the bundle's max_context",
            fix="shorten the prompt, lower max_new_tokens, or build the bundle with a larger --max-context",
        )


def _token_ids(prompt: Sequence[int], which: str, vocab_size: int) -> npt.NDArray[np.int32]:
    """A prompt as int32 [n]."""
    for position, token in enumerate(prompt):
        integer = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
        if not integer or not 0 <= token < vocab_size:
            raise RequestError(
                f"{which} has {token!r} at position {position}", expected=f"token ids from 0 to {vocab_size - 1}"
            )
    return np.array(prompt, dtype=np.int32)
