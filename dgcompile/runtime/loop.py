"""The generation loop: prompts in, token ids out, canvas by canvas.

The rules are those of ``DiffusionGemmaGenerationMixin.generate`` in transformers 5.24. Rows are independent: what a row
generates depends on its prompt, its seed and the options alone, never on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from dgcompile.errors import EngineError, RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.random_numbers import RowRandom
from dgcompile.runtime.session import Batch, Session

ENCODE_CHUNK = 512
"""Tokens of a prompt that one encoder call takes: bounds the memory of attention scores, [heads, chunk, context]."""

FinishReason = Literal["eos", "length"]


@dataclass(frozen=True)
class StepEvent:
    """What one denoising step did, for watchers. Rows that converged before take no part; the arrays are copies.

    Attributes:
        canvas: number of the canvas, from 0.
        step: number of the step, from 1.
        rows: the prompts' indices, in the order of the arrays' first axis (R rows).
        argmax_ids: int32 [R, L], the most probable tokens: the output, if this was the row's last step.
        next_canvas_ids: int32 [R, L], what the next step starts from.
        accepted: bool [R, L], positions whose sampled token was kept; the others were renoised.
        entropy: float32 [R, L], in nats.
        converged: bool [R], rows for which this was the last step of the canvas (unless the steps ran out).
        places: where in the session's batch the R rows lie.
    """

    canvas: int
    step: int
    rows: tuple[int, ...]
    argmax_ids: npt.NDArray[np.int32]
    next_canvas_ids: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.bool_]
    entropy: npt.NDArray[np.float32]
    converged: npt.NDArray[np.bool_]
    places: tuple[int, ...]


@dataclass(frozen=True)
class GenerationResult:
    """What one prompt got.

    Attributes:
        token_ids: the generated tokens, up to and including the first EOS; at most ``max_new_tokens``, no padding.
        finish_reason: "eos", or "length" when max_new_tokens was reached first.
        steps_per_canvas: denoising steps that this row took in each canvas.
        encoder_calls: encoder calls that this row took part in (prompt chunks and committed canvases).
    """

    token_ids: list[int]
    finish_reason: FinishReason
    steps_per_canvas: list[int]
    encoder_calls: int


@dataclass
class _Row:
    """One prompt on its way: where its state is kept while its place in the batch changes."""

    index: int
    prompt: npt.NDArray[np.int32]
    random: RowRandom
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    steps_per_canvas: list[int] = field(default_factory=list)
    encoder_calls: int = 0


def generate(
    session: Session,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int],
    on_step: Callable[[StepEvent], None] | None = None,
) -> list[GenerationResult]:
    """Generates an answer to each prompt.

    More prompts than the session's ``max_batch`` are generated group by group, prompts of similar length together.

    Args:
        session: the loaded model.
        prompts: token ids, at least one prompt of at least one token.
        config: how to generate.
        seeds: one per prompt, 0 .. 2**64 - 1.
        on_step: called after each denoising step.

    Returns:
        One result per prompt, in the order of the prompts.

    Raises:
        RequestError: a prompt, a seed or the length asked for is impossible; found before any work is done.
        EngineError: the engine failed or returned numbers that are not finite.
    """
    rows = _check_request(session, prompts, config, seeds)
    # Longest first, so that the rows which still have prompt tokens to encode are always the first rows of a batch.
    rows.sort(key=lambda row: -len(row.prompt))
    group = session.max_batch or len(rows)
    results: dict[int, GenerationResult] = {}
    for start in range(0, len(rows), group):
        results |= _generate_group(session, rows[start : start + group], config, on_step)
    return [results[index] for index in range(len(rows))]


def _generate_group(
    session: Session, rows: list[_Row], config: GenerationConfig, on_step: Callable[[StepEvent], None] | None
) -> dict[int, GenerationResult]:
    """Generates the answers of rows that form one batch, the longest prompt first; results by the rows' index."""
    length = session.spec.canvas_length
    canvases = -(-config.max_new_tokens // length)
    # The last canvas is never committed, so it needs no room.
    batch = session.new_batch(len(rows), len(rows[0].prompt) + (canvases - 1) * length)
    results: dict[int, GenerationResult] = {}

    encode_prompts(session, batch, [row.prompt for row in rows])
    for row in rows:
        row.encoder_calls = -(-len(row.prompt) // ENCODE_CHUNK)
    for canvas in range(canvases):
        canvas_ids = _denoise_canvas(session, batch, rows, config, canvas, on_step)
        for row, ids in zip(rows, canvas_ids.tolist(), strict=True):
            _take_canvas(row, ids, config)
            if row.finish_reason is not None:
                results[row.index] = GenerationResult(
                    row.token_ids, row.finish_reason, row.steps_per_canvas, row.encoder_calls
                )
        rows, canvas_ids = _drop_finished(batch, rows, canvas_ids)
        if not rows:
            break
        session.encode(batch, canvas_ids, np.full(len(rows), length, dtype=np.int32))
        for row in rows:
            row.encoder_calls += 1
    return results


def encode_prompts(
    session: Session, batch: Batch, prompts: Sequence[npt.NDArray[np.int32]], chunk: int = ENCODE_CHUNK
) -> None:
    """Encodes the prompts of an empty batch, ``chunk`` tokens at a time.

    Each chunk attends to the cache that the chunks before it filled, and is written only afterwards, so the result does
    not depend on the chunk size.

    Args:
        session: the loaded model.
        batch: its rows hold no tokens yet.
        prompts: int32 [n] each, the longest first.
        chunk: tokens per encoder call.
    """
    for start in range(0, len(prompts[0]), chunk):
        parts = [prompt[start : start + chunk] for prompt in prompts if len(prompt) > start]
        input_ids = np.zeros((len(parts), len(parts[0])), dtype=np.int32)
        for row, part in enumerate(parts):
            input_ids[row, : len(part)] = part
        session.encode(batch, input_ids, np.array([len(part) for part in parts], dtype=np.int32))


def _denoise_canvas(
    session: Session,
    batch: Batch,
    rows: list[_Row],
    config: GenerationConfig,
    canvas: int,
    on_step: Callable[[StepEvent], None] | None,
) -> npt.NDArray[np.int32]:
    """Denoises one canvas of every row; returns the argmax canvases, int32 [R, L], which are the output."""
    batch.start_canvas(np.stack([row.random.initial_canvas(canvas) for row in rows]))
    batch.entropy_bound.fill(config.entropy_bound)
    argmax_ids = np.full((len(rows), session.spec.canvas_length), -1, dtype=np.int32)
    repeats = [0] * len(rows)  # earlier argmax canvases in a row that equal the newest one
    for row in rows:
        row.steps_per_canvas.append(0)
    running = list(range(len(rows)))
    for step in range(1, config.max_denoising_steps + 1):
        batch.temperature.fill(config.temperature(config.max_denoising_steps - step + 1))
        for place in running:
            batch.uniform[place], batch.noise_ids[place] = rows[place].random.step(canvas, step)
        # A converged row between running ones is computed along, which costs no copy; its results are ignored.
        session.denoise(batch, running[0], running[-1])
        same = (batch.argmax_ids[: len(rows)] == argmax_ids).all(axis=1).tolist()
        mean_entropy = batch.entropy[: len(rows)].mean(axis=1).tolist()
        converged = []
        for place in running:
            if not math.isfinite(mean_entropy[place]):
                raise EngineError(
                    f"the denoiser's entropy is {mean_entropy[place]} in step {step} of canvas {canvas}",
                    expected="finite numbers",
                    fix="check the weights with `dgcompile verify`",
                )
            rows[place].steps_per_canvas[-1] += 1
            repeats[place] = repeats[place] + 1 if same[place] else 0
            argmax_ids[place] = batch.argmax_ids[place]
            if _has_converged(repeats[place], mean_entropy[place], config):
                converged.append(place)
        if on_step is not None:
            on_step(_step_event(batch, rows, running, converged, canvas, step))
        running = [place for place in running if place not in converged]
        if not running:
            break
    return argmax_ids


def _has_converged(repeats: int, mean_entropy: float, config: GenerationConfig) -> bool:
    """Whether a row's canvas is stable and confident: transformers' ``StableAndConfidentStoppingCriteria``."""
    if config.stability_threshold is None or config.confidence_threshold is None:
        return False
    return repeats >= config.stability_threshold and mean_entropy < config.confidence_threshold


def _step_event(
    batch: Batch, rows: list[_Row], running: list[int], converged: list[int], canvas: int, step: int
) -> StepEvent:
    return StepEvent(
        canvas=canvas,
        step=step,
        rows=tuple(rows[place].index for place in running),
        argmax_ids=batch.argmax_ids[running],
        next_canvas_ids=batch.canvas_ids[running],
        accepted=batch.accepted[running],
        entropy=batch.entropy[running],
        converged=np.isin(running, converged),
        places=tuple(running),
    )


def _take_canvas(row: _Row, canvas_ids: list[int], config: GenerationConfig) -> None:
    """Appends a denoised canvas to a row's answer, cut after the first EOS and at max_new_tokens."""
    for token in canvas_ids[: config.max_new_tokens - len(row.token_ids)]:
        row.token_ids.append(token)
        if token in config.eos_token_ids:
            row.finish_reason = "eos"
            return
    if len(row.token_ids) == config.max_new_tokens:
        row.finish_reason = "length"


def _drop_finished(
    batch: Batch, rows: list[_Row], canvas_ids: npt.NDArray[np.int32]
) -> tuple[list[_Row], npt.NDArray[np.int32]]:
    """Moves the rows that go on to the first places of the batch, copying at most one cache row per finished row."""
    places = [place for place, row in enumerate(rows) if row.finish_reason is None]
    count = len(places)
    gaps = [place for place in range(count) if rows[place].finish_reason is not None]
    order = list(range(count))
    for gap, source in zip(gaps, [place for place in places if place >= count], strict=True):
        batch.cache.move_row(source, gap)
        order[gap] = source
    return [rows[place] for place in order], canvas_ids[order]


def _check_request(
    session: Session, prompts: Sequence[Sequence[int]], config: GenerationConfig, seeds: Sequence[int]
) -> list[_Row]:
    """Refuses what cannot be served, before any work; see :func:`generate`."""
    spec = session.spec
    if not prompts:
        raise RequestError("there is no prompt", expected="at least one")
    if len(seeds) != len(prompts):
        raise RequestError(f"{len(seeds)} seeds were given for {len(prompts)} prompts", expected="one seed per prompt")
    canvases = -(-config.max_new_tokens // spec.canvas_length)
    rows = []
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        which = "the prompt" if len(prompts) == 1 else f"prompt {index}"
        if not len(prompt):
            raise RequestError(f"{which} is empty", expected="at least one token")
        needed = len(prompt) + canvases * spec.canvas_length
        if needed > session.max_context:
            raise RequestError(
                f"{which} has {len(prompt)} tokens and {config.max_new_tokens} new ones take {canvases} canvases of "
                f"{spec.canvas_length}: {needed} tokens",
                expected=f"at most {session.max_context}, the bundle's max_context",
                fix="shorten the prompt, lower max_new_tokens, or build the bundle with a larger --max-context",
            )
        rows.append(
            _Row(
                index, _token_ids(prompt, which, spec.vocab_size), RowRandom(seed, spec.canvas_length, spec.vocab_size)
            )
        )
    return rows


def _token_ids(prompt: Sequence[int], which: str, vocab_size: int) -> npt.NDArray[np.int32]:
    """A prompt as int32 [n]."""
    for position, token in enumerate(prompt):
        integer = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
        if not integer or not 0 <= token < vocab_size:
            raise RequestError(
                f"{which} has {token!r} at position {position}", expected=f"token ids from 0 to {vocab_size - 1}"
            )
    return np.array(prompt, dtype=np.int32)
