"""The whole measurement: checks, the best of transformers, starts, turns, memory, floor."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgcompile.bench.floor import Floor, Rates, floor_of, product_shapes, rates_from
from dgcompile.bench.job import (
    WARM_UP_STEPS,
    Contender,
    Settings,
    bundle_contender,
    check_extra,
    check_memory,
    check_same_model,
    prompt_ids,
    tasks_of,
    transformers_contender,
)
from dgcompile.bench.machine import Machine, Strangers, swapped_pages
from dgcompile.bench.process import TooSlowError, Worker
from dgcompile.bench.report import BenchReport, Load, Measured, contender_reports, label_of
from dgcompile.bench.stamps import Run, run_from
from dgcompile.bench.turns import alternate
from dgcompile.bench.variant import Probe, Variant, compiled_variants, plain_variants
from dgcompile.bundle import Bundle
from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import EngineError, RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.runtime.random_numbers import MAX_SEED

LOADS = 3
"""Times that each contender's process is started; the last one stays."""

PROBE_STEPS = 4
PROBE_SECONDS = 300.0
"""A variant that takes longer, loading and compiling included, is given up."""

BUSY = 0.05
"""Share of the machine's processors, used by others during the turns, from which on it is called busy."""


def bench(
    bundles: Sequence[str | Path],
    settings: Settings,
    *,
    checkpoint: str | Path | None = None,
    variant: Variant | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measures bundles of one model, and its checkpoint in transformers where one is given.

    Args:
        bundles: folders, at least one. The first is what the others are compared with.
        settings: what to measure.
        checkpoint: folder or hub id of the checkpoint for transformers.
        variant: how to run transformers; None to try all of them and take the fastest.
        progress: told how far it got.

    Raises:
        InputError: a bundle, the checkpoint or an option is at fault; found before anything is started.
        MissingDependencyError: a checkpoint is given, but transformers is not installed.
        EngineError: a contender failed, died, or did other work than it was asked to.
    """
    progress = progress or Progress()
    plan = _prepare(bundles, settings, checkpoint, variant, progress)
    machine, swapped = Machine.this(), swapped_pages()
    strangers = Strangers()
    probes: list[Probe] = []
    if plan.checkpoint is not None:
        chosen = variant or _best_variant(plan, probes, progress)
        plan.contenders.append(transformers_contender(plan.checkpoint, chosen, settings.threads))
    has_floor = any(contender.on_cpu for contender in plan.contenders)
    rates = [_measure_rates(plan, "begin", progress)] if has_floor else []
    with ExitStack() as stack:
        workers, loads = _start(plan, stack, progress)
        turns = _take_turns(plan, workers, strangers, progress)
        memory = [worker.ask("memory", **plan.command(0, WARM_UP_STEPS)) for worker in workers]
    rates += [_measure_rates(plan, "end", progress)] if has_floor else []
    floor: Floor | None = floor_of(plan.spec, settings.pasts, rates) if has_floor else None
    measured = [
        Measured(
            loads=tuple(loads[index]),
            turns=tuple(turns[index]),
            has_torch=memory[index].pop("has_torch"),
            memory=memory[index],  # type: ignore[arg-type]  # pydantic makes it
        )
        for index in range(len(workers))
    ]
    return BenchReport(
        machine=machine,
        settings=settings,
        contenders=contender_reports(plan.contenders, measured, settings, floor),
        probes=tuple(probes),
        floor=floor,
        others_processors=strangers.processors,
        warnings=tuple(_warnings(machine, strangers, swapped)),
    )


@dataclass
class _Plan:
    """What was checked.

    Attributes:
        spec: the model of all contenders.
        base: the generation options of the first bundle.
        settings: what to measure.
        contenders: who takes part.
        checkpoint: of transformers.
        avoid: token ids that no prompt holds.
        prompts: by task.
    """

    spec: ModelSpec
    base: GenerationConfig
    settings: Settings
    contenders: list[Contender]
    checkpoint: Checkpoint | None
    avoid: frozenset[int]
    prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompts = [self._prompt(task.past) for task in tasks_of(self.settings, self.spec)]

    def _prompt(self, length: int) -> list[int]:
        return prompt_ids(self.settings.seed, length, self.spec.vocab_size, self.avoid)

    def command(self, task: int, steps: int) -> dict[str, Any]:
        """What a ``generate`` of a task is told."""
        new_tokens = tasks_of(self.settings, self.spec)[task].new_tokens
        return self._command(self.prompts[task], new_tokens, steps)

    def short_command(self) -> dict[str, Any]:
        """What the first ``generate`` of a process is told: a few tokens, one step."""
        return self._command(self._prompt(min(8, self.settings.prompt_tokens)), self.spec.canvas_length, 1)

    def probe_command(self) -> dict[str, Any]:
        """What a probe is told: one canvas of a few steps."""
        return self._command(self.prompts[0], self.spec.canvas_length, PROBE_STEPS)

    def _command(self, prompt: list[int], new_tokens: int, steps: int) -> dict[str, Any]:
        config = self.settings.generation(self.base, new_tokens, steps)
        return {"prompt": prompt, "config": config.model_dump(mode="json"), "seed": self.settings.seed}


def _prepare(
    bundles: Sequence[str | Path],
    settings: Settings,
    checkpoint: str | Path | None,
    variant: Variant | None,
    progress: Progress,
) -> _Plan:
    if not bundles:
        raise RequestError("there is no bundle", expected="at least one")
    if not 0 <= settings.seed <= MAX_SEED:
        raise RequestError(f"--seed is {settings.seed}", expected=f"0 to {MAX_SEED}")
    if checkpoint is not None:
        check_extra()
    opened = [Bundle.open(bundle, progress=progress) for bundle in bundles]
    source = None if checkpoint is None else Checkpoint.open(checkpoint)
    check_same_model(opened, source)
    for bundle in opened:
        settings.check(bundle.spec, bundle.max_context, str(bundle.path))
    contenders = [
        bundle_contender(bundle, str(name), settings.threads) for bundle, name in zip(opened, bundles, strict=True)
    ]
    guessed = variant or plain_variants()[0]
    likely = [transformers_contender(source, guessed, settings.threads)] if source else []
    check_memory([*contenders, *likely])
    return _Plan(
        spec=opened[0].spec,
        base=opened[0].generation,
        settings=settings,
        contenders=contenders,
        checkpoint=source,
        avoid=_special_ids(opened[0].generation, source),
    )


def _special_ids(generation: GenerationConfig, checkpoint: Checkpoint | None) -> frozenset[int]:
    """Token ids that are no text, as far as is known here: the config of a checkpoint also names those of images."""
    found = {*generation.eos_token_ids, generation.pad_token_id}
    for key, value in (checkpoint.config if checkpoint else {}).items():
        if key.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            found.add(value)
    return frozenset(found)


def _best_variant(plan: _Plan, probes: list[Probe], progress: Progress) -> Variant:
    """Tries the variants one after another; fills ``probes``."""
    found: dict[Variant, float] = {}

    def note() -> str:
        best = f", the best took {min(found.values()) * 1e3:.3g} ms a step" if found else ""
        return f"the newest: {probes[-1].variant}{best}" if probes else "loading the first"

    with progress.task("try transformers' variants", None, "variants", note=note) as advance:

        def try_all(variants: Sequence[Variant]) -> None:
            for one in variants:
                seconds = _probe(plan, one, min(found.values(), default=None), probes)
                if seconds is not None:
                    found[one] = seconds
                advance()

        try_all(plain_variants())
        if not found:
            raise EngineError(
                f"no variant of transformers ran: {probes[0].outcome}", fix="name one with --variant to see its error"
            )
        try_all(compiled_variants(found))
        best = min(found, key=lambda one: found[one])
        try_all([Variant(best.dtype, best.experts, best.compiled, "eager")])
    return min(found, key=lambda one: found[one])


def _probe(plan: _Plan, variant: Variant, best: float | None, probes: list[Probe]) -> float | None:
    """The step of a variant in seconds; None where it was given up or failed. Adds to ``probes``."""
    assert plan.checkpoint is not None
    contender = transformers_contender(plan.checkpoint, variant, plan.settings.threads)
    started = time.perf_counter()
    seconds: float | None = None
    try:
        with _worker(contender, plan) as worker:
            # Its one step also takes what only happens once in a process, which is no reason to give a variant up.
            worker.ask("open", PROBE_SECONDS, path=str(contender.path), **contender.values, **plan.short_command())
            left = max(1.0, PROBE_SECONDS - (time.perf_counter() - started))
            answer = worker.ask("probe", left, best=best, **plan.probe_command())
        seconds = answer["step_seconds"]
        outcome = "ran"
        if seconds is None:
            outcome = f"given up: {answer['seen'] / (best or 1):.1f} times the best step"
    except TooSlowError:
        outcome = f"given up after {PROBE_SECONDS:g} s"
    except EngineError as error:
        outcome = f"failed: {error.problem}"
    taken = time.perf_counter() - started
    probes.append(Probe(variant=variant.name, step_seconds=seconds, outcome=outcome, seconds=taken))
    return seconds


def _worker(contender: Contender, plan: _Plan) -> Worker:
    return Worker(contender.name, contender.module, plan.settings.threads, os.environ)


def _measure_rates(plan: _Plan, when: str, progress: Progress) -> Rates:
    with (
        progress.task(f"floor of this machine ({when})"),
        Worker("the floor", "dgcompile.bench.floor_worker", plan.settings.threads, os.environ) as worker,
    ):
        shapes = product_shapes(plan.spec)
        return rates_from(worker.ask("measure", threads=plan.settings.threads, shapes=shapes), when)


def _start(plan: _Plan, stack: ExitStack, progress: Progress) -> tuple[list[Worker], list[list[Load]]]:
    """Starts every contender's process :data:`LOADS` times, in turns; the last ones stay."""
    workers: list[Worker] = []
    loads: list[list[Load]] = [[] for _ in plan.contenders]
    with progress.task("start the contenders", LOADS * len(plan.contenders), "starts") as advance:
        for number in range(LOADS):
            for index, contender in enumerate(plan.contenders):
                worker = _worker(contender, plan)
                stack.callback(worker.end)
                answer = worker.ask("open", path=str(contender.path), **contender.values, **plan.short_command())
                loads[index].append(Load(**answer, whole_seconds=time.perf_counter() - worker.started))
                if number == LOADS - 1:
                    workers.append(worker)
                else:
                    worker.end()
                advance()
    return workers, loads


def _take_turns(
    plan: _Plan, workers: Sequence[Worker], strangers: Strangers, progress: Progress
) -> list[list[tuple[Run, ...]]]:
    """By contender and turn, a run for each task."""
    settings, spec = plan.settings, plan.spec
    tasks = range(len(tasks_of(settings, spec)))
    found: list[list[tuple[Run, ...]]] = [[] for _ in workers]
    latest: dict[int, float] = {}

    def note() -> str:
        steps = [f"{label_of(index)} {seconds * 1e3:.3g} ms a step" for index, seconds in latest.items()]
        return ", ".join(steps) or "warming up"

    total = (settings.turns + 1) * len(workers)
    with progress.task("turns", total, "turns", note=note) as advance:
        for turn in alternate(len(workers), settings.turns):
            worker = workers[turn.contender]
            steps = WARM_UP_STEPS if turn.is_warm_up else settings.steps
            with strangers.beside(worker.pid):
                runs = tuple(run_from(worker.ask("generate", **plan.command(task, steps))) for task in tasks)
            for task, run in zip(tasks_of(settings, spec), runs, strict=True):
                _check_work(worker.name, run, steps, task.new_tokens, spec)
            if not turn.is_warm_up:
                found[turn.contender].append(runs)
                latest[turn.contender] = runs[0].first_canvas_step
            advance()
    return found


def _check_work(name: str, run: Run, steps: int, new_tokens: int, spec: ModelSpec) -> None:
    """Refuses a run that did other work than it was asked to: its time would compare with nothing."""
    wanted = [steps] * -(-new_tokens // spec.canvas_length)
    if run.steps_per_canvas != wanted or run.tokens != new_tokens:
        raise EngineError(
            f"{name} took {run.steps_per_canvas} steps for {run.tokens} tokens",
            expected=f"{wanted} steps for {new_tokens} tokens",
            fix="report it: a comparison of unequal work would mislead",
        )


def _warnings(machine: Machine, strangers: Strangers, swapped_before: int | None) -> list[str]:
    found = []
    others = strangers.processors
    if others is not None and others > BUSY * machine.cores:
        found.append(f"others kept {others:.1f} of the machine's processors busy meanwhile: times are too long")
    after = swapped_pages()
    if after is not None and swapped_before is not None and after > swapped_before:
        found.append(f"the machine swapped meanwhile ({after - swapped_before} pages): its memory does not suffice")
    return found
