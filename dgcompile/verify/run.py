"""``verify``: runs transformers and a bundle on the same prompts and random numbers, and compares what they do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.progress import Progress
from dgcompile.runtime.loop import GenerationResult, StepEvent, encode_prompts, generate
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.runtime.session import Session
from dgcompile.verify.compare import Outcome, compare_step, compare_stop, relative_error
from dgcompile.verify.report import (
    MAX_RELATIVE_ERROR,
    TIE,
    Difference,
    EngineErrors,
    PairReport,
    StepShare,
    VerifyReport,
)

if TYPE_CHECKING:
    from dgcompile.verify.reference import Reference, ReferenceCache, ReferenceStep

Prompt = str | Sequence[int]
"""Text (the only user message, where the bundle has a chat template) or token ids."""


def verify(
    bundle: str | Path,
    checkpoint: str | Path,
    *,
    prompts: Sequence[Prompt],
    seeds: Sequence[int] = (0,),
    config: GenerationConfig | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 1,
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compares a bundle with the checkpoint in transformers: float32, on the CPU, every prompt with every seed.

    For each pair both sides generate by themselves with the same random numbers, and besides the engines are run on
    transformers' own inputs of every encoder call and denoising step. Each difference is either a tie that float32
    rounding explains or counts as a failure; see :class:`VerifyReport`.

    Args:
        bundle: the bundle's folder.
        checkpoint: the checkpoint's folder or hub id.
        prompts: texts or token ids.
        seeds: seeds of the random numbers.
        config: how to generate; None for the bundle's defaults.
        max_new_tokens: replaces that of ``config``.
        batch_size: pairs that the bundle generates together in its own runs; transformers takes one at a time.
        threads: threads of each engine call.
        progress: told how far the comparison got, in pairs.

    Raises:
        RequestError: no prompt or seed, a prompt that the bundle refuses, or early stopping switched off.
        CheckpointError, BundleError, EngineError: one side cannot be loaded or run.
    """
    if not prompts or not seeds:
        raise RequestError(f"{len(prompts)} prompts and {len(seeds)} seeds were given", expected="at least one of each")
    if batch_size < 1:
        raise RequestError(f"the batch size is {batch_size}", expected="at least 1")
    progress = progress or Progress()
    pipeline = Pipeline.open(bundle, threads, progress=progress)
    source = Checkpoint.open(checkpoint)
    # torch and transformers take seconds to import: only after both folders turned out to be usable.
    from dgcompile.verify.reference import Reference

    config = config or pipeline.bundle.generation
    if max_new_tokens is not None:
        config = config.replace(max_new_tokens=max_new_tokens)
    comparison = _Comparison(pipeline, Reference(source.path), config)
    todo = [
        _Pair(index, seed, token_ids, difference)
        for index, prompt in enumerate(prompts)
        for token_ids, difference in [comparison.encode(prompt)]
        for seed in seeds
    ]
    pairs: list[PairReport] = []
    with progress.task("compare with transformers", len(todo), "pairs") as advance:
        for start in range(0, len(todo), batch_size):
            for report in comparison.compare(todo[start : start + batch_size]):
                pairs.append(report)
                advance()
    return VerifyReport(
        bundle=str(bundle),
        checkpoint=str(source.path),
        same_checkpoint=source.fingerprint() == pipeline.bundle.manifest.checkpoint,
        errors=comparison.errors,
        step_shares=comparison.step_shares(),
        pairs=tuple(pairs),
    )


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Reads prompts from a file with one JSON object ``{"prompt": "..."}`` per line; other keys are ignored.

    Args:
        path: the file.
        limit: take only the first ones.

    Raises:
        RequestError: the file cannot be read, has no prompt or a malformed line; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}", expected="a UTF-8 text file") from error
    prompts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RequestError(f"{path}:{number} is not JSON ({error})", expected='{"prompt": "..."}') from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise RequestError(f"{path}:{number} has no text under 'prompt'", expected='{"prompt": "..."}')
        prompts.append(entry["prompt"])
    if not prompts:
        raise RequestError(f"{path} has no prompts", expected='lines like {"prompt": "..."}')
    return prompts


@dataclass(frozen=True)
class _Pair:
    """A prompt (its index and token ids, and what was wrong with them already) and a seed."""

    prompt: int
    seed: int
    token_ids: list[int]
    difference: Difference | None


_Events = dict[tuple[int, int], Outcome]
"""What the bundle's own run did in each (canvas, step)."""


class _Comparison:
    """Both sides, loaded, and the sums over all pairs."""

    def __init__(self, pipeline: Pipeline, reference: Reference, config: GenerationConfig) -> None:
        self.pipeline = pipeline
        self.reference = reference
        self.config = config
        self.errors = EngineErrors()
        self.canvases: Counter[int] = Counter()  # by step
        self.identical: Counter[int] = Counter()

    def encode(self, prompt: Prompt) -> tuple[list[int], Difference | None]:
        """Token ids by the bundle, and the difference where transformers' tokenizer and template give others."""
        if not isinstance(prompt, str):
            return list(prompt), None
        chat = self.pipeline.chat_template is not None
        found = self.pipeline.encode([{"role": "user", "content": prompt}] if chat else prompt)
        expected = self.reference.encode(prompt, chat=chat)
        if found == expected:
            return found, None
        pairs = zip(expected, found, strict=False)
        position = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
        return found, Difference(
            kind="prompt",
            position=position,
            expected=expected[position] if position < len(expected) else None,
            found=found[position] if position < len(found) else None,
        )

    def compare(self, pairs: list[_Pair]) -> Iterator[PairReport]:
        """Runs pairs on both sides: on the bundle together, on transformers one after the other."""
        session, config = self.pipeline.session, self.config
        events: list[_Events] = [{} for _ in pairs]

        def remember(event: StepEvent) -> None:
            for place, row in enumerate(event.rows):
                outcome = Outcome(event.argmax_ids[place], event.next_canvas_ids[place], event.accepted[place])
                events[row][event.canvas, event.step] = outcome

        prompts, seeds = [pair.token_ids for pair in pairs], [pair.seed for pair in pairs]
        results = generate(session, prompts, config, seeds, remember)
        for pair, own, result in zip(pairs, events, results, strict=True):
            watcher = _PairWatcher(self, len(pair.token_ids), own, pair.difference)
            tokens = self.reference.generate(pair.token_ids, config, pair.seed, watcher)
            watcher.finish(tokens, result)
            yield PairReport(
                prompt=pair.prompt,
                seed=pair.seed,
                tokens=len(tokens),
                exact=tokens == result.token_ids,
                reference_steps=tuple(watcher.steps),
                bundle_steps=tuple(result.steps_per_canvas),
                first_difference=watcher.first_difference,
                step_differences=tuple(watcher.step_differences),
            )

    def called(self, counter: str, router_margin: float, **errors: float) -> None:
        """Counts one engine call and takes in the errors of its outputs."""
        self.errors = self.errors.model_copy(update={counter: getattr(self.errors, counter) + 1})
        self.measured(router_margin, **errors)

    def measured(self, router_margin: float, **errors: float) -> None:
        """Takes in errors, or only counts them where they are large but a router tie explains them."""
        if router_margin <= TIE and max(errors.values()) > MAX_RELATIVE_ERROR:
            update: dict[str, float] = {"left_out": self.errors.left_out + 1}
        else:
            update = {name: max(error, getattr(self.errors, name)) for name, error in errors.items()}
        self.errors = self.errors.model_copy(update=update)

    def step_shares(self) -> tuple[StepShare, ...]:
        """Agreement by step."""
        return tuple(
            StepShare(step=step, canvases=count, identical=self.identical[step])
            for step, count in sorted(self.canvases.items())
        )


class _PairWatcher:
    """Follows transformers through one pair: replays every call on the engines and compares with the bundle's own run.

    Args:
        comparison: both sides.
        prompt_length: tokens of the prompt.
        events: the bundle's own run, by (canvas, step).
        first_difference: one that was found before the run.
    """

    def __init__(
        self,
        comparison: _Comparison,
        prompt_length: int,
        events: _Events,
        first_difference: Difference | None,
    ) -> None:
        self.comparison = comparison
        self.events = events
        self.first_difference = first_difference
        self.step_differences: list[Difference] = []
        self.steps: list[int] = []
        session, config = comparison.pipeline.session, comparison.config
        length = session.spec.canvas_length
        self.batch = session.new_batch(1, prompt_length + -(-config.max_new_tokens // length) * length)
        self.batch.entropy_bound.fill(config.entropy_bound)
        self.encoder_margin = np.inf  # of everything in the cache
        self.run_margin = np.inf  # of everything that the run depends on so far
        self.replayed: tuple[npt.NDArray[np.generic], float] | None = None
        self.last_step: ReferenceStep | None = None

    @property
    def session(self) -> Session:
        """The bundle's engines."""
        return self.comparison.pipeline.session

    def canvas_started(self, cache: ReferenceCache) -> None:
        """Encodes the same tokens and compares the caches."""
        self._finish_canvas()
        self.steps.append(0)
        self.encoder_margin = min(self.encoder_margin, cache.router_margin)
        self.run_margin = min(self.run_margin, self.encoder_margin)
        if cache.canvas == 0:
            encode_prompts(self.session, self.batch, [cache.token_ids])
        else:
            length = np.array([len(cache.token_ids)], dtype=np.int32)
            self.session.encode(self.batch, cache.token_ids[None], length)
        past = int(self.batch.cache.past_length[0])
        keys, values = (
            max(
                relative_error(_newest(ring[0], past, len(expected)), expected)
                for ring, expected in zip(rings, reference, strict=True)
            )
            for rings, reference in ((self.batch.cache.keys, cache.keys), (self.batch.cache.values, cache.values))
        )
        self.comparison.called("encoder_calls", self.encoder_margin, keys=keys, values=values)
        self.replayed = None

    def stepped(self, step: ReferenceStep) -> None:
        """Replays the step and compares it with both the replay and the bundle's own run."""
        self.steps[-1] += 1
        self.run_margin = min(self.run_margin, step.router_margin)
        self._replay(step)
        outcome = self.events.get((step.canvas, step.step))
        if outcome is not None:
            self._compare_run(step, outcome)
        elif self.first_difference is None and step.step > 1:
            self._stopped_apart(step.step, step.step - 1)
        self.last_step = step

    def finish(self, tokens: list[int], result: GenerationResult) -> None:
        """Compares the ends of both runs."""
        self._finish_canvas()
        if self.first_difference is None and (
            tokens != result.token_ids or tuple(self.steps) != tuple(result.steps_per_canvas)
        ):
            pairs = zip(tokens, result.token_ids, strict=False)
            shorter = min(len(tokens), len(result.token_ids))
            position = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
            self.first_difference = Difference(kind="tokens", position=position)

    def _replay(self, step: ReferenceStep) -> None:
        batch, config = self.batch, self.comparison.config
        margin = min(self.encoder_margin, step.router_margin)
        if self.replayed is not None:
            # What the step before wrote is what this step reads.
            found, earlier_margin = self.replayed
            error = relative_error(found, step.self_conditioning)
            self.comparison.measured(earlier_margin, self_conditioning=error)
        batch.start_canvas(step.canvas_ids[None])
        batch.self_conditioning[0] = step.self_conditioning
        batch.temperature.fill(config.temperature(config.max_denoising_steps - step.step + 1))
        batch.uniform[0], batch.noise_ids[0] = step.uniform, step.noise_ids
        self.session.denoise(batch, 0, 0)
        outcome = Outcome(batch.argmax_ids[0], batch.canvas_ids[0], batch.accepted[0])
        difference = compare_step(step, outcome, config.entropy_bound, margin)
        if difference is not None:
            self.step_differences.append(difference)
        entropy = float(np.abs(batch.entropy[0].astype(np.float64) - step.entropy).max())
        self.comparison.called("denoiser_calls", margin, entropy=entropy)
        self.replayed = batch.self_conditioning[0].copy(), margin

    def _compare_run(self, step: ReferenceStep, outcome: Outcome) -> None:
        self.comparison.canvases[step.step] += 1
        self.comparison.identical[step.step] += int(np.array_equal(step.next_canvas_ids, outcome.next_canvas_ids))
        if self.first_difference is None:
            self.first_difference = compare_step(step, outcome, self.comparison.config.entropy_bound, self.run_margin)

    def _finish_canvas(self) -> None:
        """Notices a canvas that the bundle went on with after transformers had stopped."""
        step = self.last_step
        if step is not None and self.first_difference is None and (step.canvas, step.step + 1) in self.events:
            self._stopped_apart(step.step, step.step + 1)
        self.last_step = None

    def _stopped_apart(self, expected: int, found: int) -> None:
        step, config = self.last_step, self.comparison.config
        if step is not None and config.confidence_threshold is not None:
            self.first_difference = compare_stop(
                step.canvas, (expected, found), step.entropy, config.confidence_threshold, self.run_margin
            )


def _newest(ring: npt.NDArray[np.generic], past: int, count: int) -> npt.NDArray[np.generic]:
    """The last ``count`` of ``past`` tokens, in order, from a ring [C, ...] where position p lies in slot p % C."""
    return ring[np.arange(past - count, past) % len(ring)]
