"""``verify``: runs transformers and a bundle on the same prompts and random numbers, and compares what they do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgcompile.checkpoint import Checkpoint
from dgcompile.config_file import require_file
from dgcompile.errors import RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.progress import Progress
from dgcompile.runtime.loop import GenerationResult
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.verify.compare import cut
from dgcompile.verify.pairs import Course, ErrorSums, GuidedRun, PlainRun, run_bundle
from dgcompile.verify.report import Difference, Kind, PairReport, StepShare, VerifyReport

if TYPE_CHECKING:
    from dgcompile.verify.reference import Reference

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
    transformers' own inputs of every encoder call and denoising step. Each difference is either explained by float32
    rounding (see :attr:`Difference.reason`) or counts as a failure.

    Args:
        bundle: the bundle's folder.
        checkpoint: the checkpoint's folder or hub id.
        prompts: texts or token ids.
        seeds: seeds of the random numbers.
        config: how to generate; None for the bundle's defaults.
        max_new_tokens: replaces that of ``config``.
        batch_size: pairs that the bundle generates together in its own runs; transformers takes one at a time.
        threads: threads of each engine call and of transformers; None leaves the choice to them.
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
    comparison = _Comparison(pipeline, Reference(source.path, threads), config)
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
        quantized=pipeline.bundle.recipe.quantizes,
        same_checkpoint=source.fingerprint(progress) == pipeline.bundle.manifest.checkpoint,
        errors=comparison.sums.errors,
        step_shares=tuple(
            StepShare(step=step, canvases=canvases, identical=identical)
            for step, (canvases, identical) in sorted(comparison.sums.shares.items())
        ),
        pairs=tuple(pairs),
    )


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The prompts of a file, see :func:`read_prompt_lines`; ``limit``: only the first ones."""
    return [str(entry["prompt"]) for _, entry in itertools.islice(read_prompt_lines(path), limit)]


def read_prompt_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads a file with one JSON object ``{"prompt": "..."}`` per line: number and content of each line.

    Raises:
        RequestError: the file cannot be read, has no prompt or a malformed line; names the line.
    """
    require_file(path, error=RequestError)
    try:
        # Only line ends end lines: a text may hold others of Unicode's separators as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}", expected="a UTF-8 text file") from error
    count = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
            raise RequestError(f"{path}:{number} is not JSON ({error})", expected='{"prompt": "..."}') from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise RequestError(f"{path}:{number} has no text under 'prompt'", expected='{"prompt": "..."}')
        count += 1
        yield number, entry
    if not count:
        raise RequestError(f"{path} has no prompts", expected='lines like {"prompt": "..."}')


@dataclass(frozen=True)
class _Pair:
    """A prompt (its index and token ids, and what was wrong with them already) and a seed."""

    prompt: int
    seed: int
    token_ids: list[int]
    difference: Difference | None


class _Comparison:
    """Both sides, loaded, and the sums over all pairs."""

    def __init__(self, pipeline: Pipeline, reference: Reference, config: GenerationConfig) -> None:
        self.pipeline = pipeline
        self.reference = reference
        self.config = config
        self.sums = ErrorSums()

    def encode(self, prompt: Prompt) -> tuple[list[int], Difference | None]:
        """Token ids by the bundle, and the difference where transformers' tokenizer and template give others."""
        if not isinstance(prompt, str):
            return list(prompt), None
        chat = self.pipeline.chat_template is not None
        found = self.pipeline.encode([{"role": "user", "content": prompt}] if chat else prompt)
        expected = self.reference.encode(prompt, chat=chat)
        return found, _token_difference("prompt", expected, found)

    def compare(self, pairs: list[_Pair]) -> Iterator[PairReport]:
        """Runs pairs on both sides: on the bundle together, on transformers one after the other."""
        session, config = self.pipeline.session, self.config
        runs = run_bundle(session, [pair.token_ids for pair in pairs], config, [pair.seed for pair in pairs])
        for pair, (result, course) in zip(pairs, runs, strict=True):
            watcher = PlainRun(session, config, course, len(pair.token_ids), self.sums)
            tokens = self.reference.generate(pair.token_ids, config, pair.seed, watcher)
            watcher.finish()
            yield PairReport(
                prompt=pair.prompt,
                seed=pair.seed,
                tokens=len(tokens),
                exact=tokens == result.token_ids,
                reference_steps=tuple(watcher.steps),
                bundle_steps=tuple(result.steps_per_canvas),
                first_difference=self._judge(pair, result, course, watcher, tokens),
                step_differences=tuple(watcher.step_differences),
            )

    def _judge(
        self, pair: _Pair, result: GenerationResult, course: Course, watcher: PlainRun, tokens: list[int]
    ) -> Difference | None:
        """The first difference of the whole runs, with the reason where there is one."""
        config = self.config
        if pair.difference is not None:
            return pair.difference
        # Whatever the canvases hold, the answer must be what they say, and it must have ended for a reason.
        answer = cut(course.canvases, config)
        wrong = _token_difference("tokens", answer, result.token_ids)
        ended = len(answer) == config.max_new_tokens or answer[-1] in config.eos_token_ids
        if wrong is not None or not ended or course.steps != tuple(result.steps_per_canvas):
            return wrong or Difference(kind="tokens", position=len(answer))
        first = watcher.first_difference
        if first is None and (tokens != answer or tuple(watcher.steps) != course.steps):
            return _token_difference("tokens", tokens, answer) or Difference(kind="tokens", position=len(answer))
        if first is None or first.reason is not None:
            return first
        guided = GuidedRun(config, course)
        self.reference.generate(pair.token_ids, config, pair.seed, guided, course)
        guided.finish()
        return first.model_copy(update={"reason": "drift"}) if guided.agrees else guided.failure or first


def _token_difference(kind: Kind, expected: list[int], found: list[int]) -> Difference | None:
    """The first difference of two lists of tokens; None when they are equal."""
    if expected == found:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    position = next((index for index, (a, b) in pairs if a != b), min(len(expected), len(found)))
    return Difference(
        kind=kind,
        position=position,
        expected=expected[position] if position < len(expected) else None,
        found=found[position] if position < len(found) else None,
    )
