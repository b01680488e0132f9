"""The generation loop: prompts in, token ids out, canvas by canvas. All rows are in the same step of the same canvas.

A server's rows come and go: :mod:`dgcompile.runtime.scheduler` runs those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dgcompile.errors import RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.row import FinishReason, Row
from dgcompile.runtime.session import Batch, Session

ENCODE_CHUNK = 512
"""Tokens of a prompt that one encoder call takes at most: so many share one reading of the weights."""

CPU_ENCODE_CHUNK = 256
"""Likewise on a CPU, whose engine has the attention scores in memory, [heads, chunk, context]. Against 512, a prompt of
8192 tokens takes 280 MB of them instead of 560 and no more time, one of 512 tokens 8 % more time (6 layers of hidden
size 512 on a 2-core AMD EPYC, scripts/encoder_time.py). A denoising step has as many scores: its canvas is as long."""


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
    """Generates the answers of rows that form one batch, the longest prompt first; results by the prompts' index."""
    length = session.spec.canvas_length
    canvases = -(-config.max_new_tokens // length)
    # The last canvas is never committed, so it needs no room.
    batch = session.new_batch(len(rows), len(rows[0].prompt) + (canvases - 1) * length)
    results: dict[int, GenerationResult] = {}

    chunk = encode_chunk(session)
    encode_prompts(session, batch, [row.prompt for row in rows], chunk)
    for row in rows:
        row.encoder_calls = -(-len(row.prompt) // chunk)
    while True:
        _denoise_canvas(session, batch, rows, config, on_step)
        for row in rows:
            row.take_canvas()
            if row.finish_reason is not None:
                results[row.index] = GenerationResult(
                    row.token_ids, row.finish_reason, row.steps_per_canvas, row.encoder_calls
                )
        rows = _drop_finished(batch, rows)
        if not rows:
            return results
        canvas_ids = np.stack([row.argmax_ids for row in rows])
        session.encode(batch, canvas_ids, np.full(len(rows), length, dtype=np.int32))
        for row in rows:
            row.encoder_calls += 1


def encode_chunk(session: Session) -> int:
    """Tokens that one encoder call takes at most from a row: of a prompt, or all of a canvas."""
    return max(CPU_ENCODE_CHUNK if session.max_batch is None else ENCODE_CHUNK, session.spec.canvas_length)


def encode_prompts(
    session: Session, batch: Batch, prompts: Sequence[npt.NDArray[np.int32]], chunk: int | None = None
) -> None:
    """Encodes the prompts of an empty batch, ``chunk`` tokens at a time.

    Each chunk attends to the cache that the chunks before it filled, and is written only afterwards, so the result does
    not depend on the chunk size.

    Args:
        session: the loaded model.
        batch: its rows hold no tokens yet.
        prompts: int32 [n] each, the longest first.
        chunk: tokens per encoder call; None for :func:`encode_chunk`.
    """
    chunk = encode_chunk(session) if chunk is None else chunk
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
    on_step: Callable[[StepEvent], None] | None,
) -> None:
    """Denoises one canvas of every row; the output is what each row's ``argmax_ids`` hold then."""
    batch.start_canvas(np.stack([row.start_canvas() for row in rows]))
    batch.entropy_bound.fill(config.entropy_bound)
    running = list(range(len(rows)))
    for _ in range(config.max_denoising_steps):
        for place in running:
            batch.temperature[place], batch.uniform[place], batch.noise_ids[place] = rows[place].next_step()
        # A converged row between running ones is computed along, which costs no copy; its results are ignored.
        session.denoise(batch, running[0], running[-1])
        mean_entropy = batch.mean_entropy(len(rows))
        converged = [place for place in running if rows[place].take_step(batch.argmax_ids[place], mean_entropy[place])]
        if on_step is not None:
            on_step(_step_event(batch, rows, running, converged))
        running = [place for place in running if place not in converged]
        if not running:
            break


def _step_event(batch: Batch, rows: list[_Row], running: list[int], converged: list[int]) -> StepEvent:
    first = rows[running[0]]  # all running rows are in the same step of the same canvas
    return StepEvent(
        canvas=first.canvas,
        step=first.steps_per_canvas[-1],
        rows=tuple(rows[place].index for place in running),
        argmax_ids=batch.argmax_ids[running],
        next_canvas_ids=batch.canvas_ids[running],
        accepted=batch.accepted[running],
        entropy=batch.entropy[running],
        converged=np.isin(running, converged),
        places=tuple(running),
    )


def _drop_finished(batch: Batch, rows: list[_Row]) -> list[_Row]:
    """Moves the rows that go on to the first places of the batch, copying at most one cache row per finished row."""
    places = [place for place, row in enumerate(rows) if row.finish_reason is None]
    count = len(places)
    gaps = [place for place in range(count) if rows[place].finish_reason is not None]
    order = list(range(count))
    for gap, source in zip(gaps, [place for place in places if place >= count], strict=True):
        batch.cache.move_row(source, gap)
        order[gap] = source
    return [rows[place] for place in order]


def _check_request(
    session: Session, prompts: Sequence[Sequence[int]], config: GenerationConfig, seeds: Sequence[int]
) -> list[_Row]:
    """Refuses what cannot be served, before any work; see :func:`generate`."""
    if not prompts:
        raise RequestError("there is no prompt", expected="at least one")
    if len(seeds) != len(prompts):
        raise RequestError(f"{len(seeds)} seeds were given for {len(prompts)} prompts", expected="one seed per prompt")
    return [
        _Row(index, session, prompt, config, seed, "the prompt" if len(prompts) == 1 else f"prompt {index}")
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]


class _Row(Row):
    """A row that knows which prompt it is: its place in the batch changes."""

    def __init__(
        self, index: int, session: Session, prompt: Sequence[int], config: GenerationConfig, seed: int, which: str
    ) -> None:
        super().__init__(session.spec, session.max_context, prompt, config, seed, which)
        self.index = index
