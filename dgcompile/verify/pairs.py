"""One prompt with one seed: what is compared while transformers runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.loop import GenerationResult, StepEvent, encode_prompts, generate
from dgcompile.runtime.session import Batch, Session
from dgcompile.verify.compare import Outcome, compare_step, compare_stop, relative_error
from dgcompile.verify.report import MAX_RELATIVE_ERROR, TIE, Difference, EngineErrors

if TYPE_CHECKING:
    from dgcompile.verify.reference import ReferenceCache, ReferenceStep

Ints = npt.NDArray[np.int32]


class Course:
    """What the bundle's own run of one pair did, step by step. A guide for transformers."""

    def __init__(self) -> None:
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._steps: list[int] = []

    def add(self, canvas: int, step: int, outcome: Outcome) -> None:
        """Takes in the next step."""
        self._outcomes[canvas, step] = outcome
        if step == 1:
            self._steps.append(0)
        self._steps[canvas] = step

    def outcome(self, canvas: int, step: int) -> Outcome | None:
        """What a step did; None when the run had no such step."""
        return self._outcomes.get((canvas, step))

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of each canvas."""
        return tuple(self._steps)

    @property
    def canvases(self) -> list[int]:
        """The tokens of all final canvases."""
        return [token for canvas, step in enumerate(self._steps) for token in self._final(canvas, step).tolist()]

    def _final(self, canvas: int, step: int) -> Ints:
        return self._outcomes[canvas, step].argmax_ids

    def committed(self, canvas: int) -> Ints | None:
        """The final tokens of a canvas; None when the run had no such canvas."""
        return self._final(canvas, self._steps[canvas]) if canvas < len(self._steps) else None

    def state(self, canvas: int, step: int) -> tuple[Ints, npt.NDArray[np.float32]] | None:
        """What a step from 2 on started from; None when the run had no step before it."""
        before = self._outcomes.get((canvas, step - 1))
        if before is None:
            return None
        return before.next_canvas_ids, before.next_self_conditioning.astype(np.float32)


class _TappedSession:
    """A session that keeps the batch which the loop makes, where a watcher can read what step events leave out."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.spec = session.spec
        self.max_context = session.max_context
        self.max_batch = session.max_batch
        self.encode = session.encode
        self.denoise = session.denoise
        self.batch: Batch | None = None

    def new_batch(self, rows: int, capacity: int) -> Batch:
        self.batch = self._session.new_batch(rows, capacity)
        return self.batch


def run_bundle(
    session: Session, prompts: list[list[int]], config: GenerationConfig, seeds: list[int]
) -> list[tuple[GenerationResult, Course]]:
    """Lets the bundle generate by itself, all prompts in one batch; errors as of ``generate``."""
    tapped = _TappedSession(session)
    courses = [Course() for _ in prompts]

    def remember(event: StepEvent) -> None:
        assert tapped.batch is not None
        for index, (row, place) in enumerate(zip(event.rows, event.places, strict=True)):
            outcome = Outcome(
                event.argmax_ids[index],
                event.next_canvas_ids[index],
                event.accepted[index],
                tapped.batch.self_conditioning[place].copy(),
            )
            courses[row].add(event.canvas, event.step, outcome)

    return list(zip(generate(tapped, prompts, config, seeds, remember), courses, strict=True))


class ErrorSums:
    """Errors of engine calls and agreement by step, summed over all pairs."""

    def __init__(self) -> None:
        self.errors = EngineErrors()
        self.shares: dict[int, list[int]] = {}  # by step: canvases, identical ones

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

    def compared(self, step: int, identical: bool) -> None:
        """Counts one canvas after one step."""
        share = self.shares.setdefault(step, [0, 0])
        share[0] += 1
        share[1] += identical


class PlainRun:
    """Watches transformers' own run: replays every call on the engines, and compares with the bundle's own run.

    Args:
        session: the bundle's engines.
        config: how both generate.
        course: the bundle's own run.
        prompt_length: tokens of the prompt.
        sums: take in what is measured.

    Attributes:
        steps: steps of each canvas.
        step_differences: disagreements on equal inputs.
        first_difference: where the runs parted.
    """

    def __init__(
        self, session: Session, config: GenerationConfig, course: Course, prompt_length: int, sums: ErrorSums
    ) -> None:
        self.session, self.config, self.course, self.sums = session, config, course, sums
        self.steps: list[int] = []
        self.step_differences: list[Difference] = []
        self.first_difference: Difference | None = None
        length = session.spec.canvas_length
        self._batch = session.new_batch(1, prompt_length + -(-config.max_new_tokens // length) * length)
        self._batch.entropy_bound.fill(config.entropy_bound)
        self._encoder_margin = math.inf  # of everything in the cache
        self._run_margin = math.inf  # of everything that the run depends on so far
        self._replayed: tuple[npt.NDArray[np.generic], float] | None = None
        self._last_step: ReferenceStep | None = None

    def canvas_started(self, cache: ReferenceCache) -> None:
        """Encodes the same tokens and compares the caches."""
        self.finish()
        self.steps.append(0)
        self._encoder_margin = min(self._encoder_margin, cache.router_margin)
        self._run_margin = min(self._run_margin, self._encoder_margin)
        if cache.canvas == 0:
            encode_prompts(self.session, self._batch, [cache.token_ids])
        else:
            length = np.array([len(cache.token_ids)], dtype=np.int32)
            self.session.encode(self._batch, cache.token_ids[None], length)
        past = int(self._batch.cache.past_length[0])
        keys, values = (
            max(
                relative_error(_newest(ring[0], past, len(expected)), expected)
                for ring, expected in zip(rings, reference, strict=True)
            )
            for rings, reference in ((self._batch.cache.keys, cache.keys), (self._batch.cache.values, cache.values))
        )
        self.sums.called("encoder_calls", self._encoder_margin, keys=keys, values=values)
        self._replayed = None

    def stepped(self, step: ReferenceStep) -> None:
        """Replays the step and compares it with both the replay and the bundle's own run."""
        self.steps[-1] += 1
        self._run_margin = min(self._run_margin, step.router_margin)
        self._replay(step)
        outcome = self.course.outcome(step.canvas, step.step)
        if outcome is not None:
            self._compare_run(step, outcome)
        elif self.first_difference is None and self._last_step is not None:
            self._parted_by_stopping(self._last_step, step.step, step.step - 1)
        self._last_step = step

    def finish(self) -> None:
        """Notices a canvas that the bundle went on with after transformers had stopped; call it at the end."""
        last, self._last_step = self._last_step, None
        if last is not None and self.first_difference is None and self.course.outcome(last.canvas, last.step + 1):
            self._parted_by_stopping(last, last.step, last.step + 1)

    def _replay(self, step: ReferenceStep) -> None:
        batch, config = self._batch, self.config
        margin = min(self._encoder_margin, step.router_margin)
        if self._replayed is not None:
            # What the step before wrote is what this step reads.
            found, earlier_margin = self._replayed
            error = relative_error(found, step.self_conditioning)
            self.sums.measured(earlier_margin, self_conditioning=error)
        batch.start_canvas(step.canvas_ids[None])
        batch.self_conditioning[0] = step.self_conditioning
        batch.temperature.fill(config.temperature(config.max_denoising_steps - step.step + 1))
        batch.uniform[0], batch.noise_ids[0] = step.uniform, step.noise_ids
        self.session.denoise(batch, 0, 0)
        next_self_conditioning = batch.self_conditioning[0].copy()
        outcome = Outcome(batch.argmax_ids[0], batch.canvas_ids[0], batch.accepted[0], next_self_conditioning)
        difference = compare_step(step, outcome, config.entropy_bound, margin)
        if difference is not None:
            self.step_differences.append(difference)
        entropy = float(np.abs(batch.entropy[0].astype(np.float64) - step.entropy).max())
        self.sums.called("denoiser_calls", margin, entropy=entropy)
        self._replayed = next_self_conditioning, margin

    def _compare_run(self, step: ReferenceStep, outcome: Outcome) -> None:
        self.sums.compared(step.step, np.array_equal(step.next_canvas_ids, outcome.next_canvas_ids))
        if self.first_difference is None:
            difference = compare_step(step, outcome, self.config.entropy_bound, self._run_margin)
            self.first_difference = self._with_drift(difference, step)

    def _parted_by_stopping(self, last: ReferenceStep, expected: int, found: int) -> None:
        difference = stopped_apart(last, (expected, found), self.config, self._run_margin)
        self.first_difference = self._with_drift(difference, last)

    def _with_drift(self, difference: Difference | None, step: ReferenceStep) -> Difference | None:
        """Adds how far the two runs' self-conditioning had come apart before ``step``."""
        state = self.course.state(step.canvas, step.step)
        if difference is None or state is None:
            return difference
        return difference.model_copy(update={"drift": relative_error(state[1], step.self_conditioning)})


class GuidedRun:
    """Watches transformers led along the bundle's own run: in every step it must decide as the bundle did.

    The bundle's run is then, step by step, one that transformers itself makes, up to rounding in each single step; that
    it is not transformers' own run can only be due to what the model makes of such rounding.

    Args:
        config: how both generate.
        course: the bundle's own run.

    Attributes:
        failure: the first difference that is no tie.
        error: largest relative error of the bundle's self-conditioning after a step.
    """

    def __init__(self, config: GenerationConfig, course: Course) -> None:
        self.config, self.course = config, course
        self.failure: Difference | None = None
        self.error = 0.0
        self._encoder_margin = math.inf
        self._step_margin = math.inf  # of the last step
        self._argmax_tie = False  # in this canvas: what is stable may then differ
        self._last_step: ReferenceStep | None = None

    @property
    def agrees(self) -> bool:
        """Whether every step was decided alike and came to the same."""
        return self.failure is None and self.error <= MAX_RELATIVE_ERROR

    def canvas_started(self, cache: ReferenceCache) -> None:
        """Only the router's margins count here."""
        self.finish()
        self._argmax_tie = False
        self._encoder_margin = min(self._encoder_margin, cache.router_margin)

    def stepped(self, step: ReferenceStep) -> None:
        """Compares the step with the bundle's."""
        state, outcome = self.course.state(step.canvas, step.step), self.course.outcome(step.canvas, step.step)
        if state is not None and self._step_margin > TIE:
            self.error = max(self.error, relative_error(state[1], step.self_conditioning))
        self._step_margin = min(self._encoder_margin, step.router_margin)
        if outcome is not None:
            difference = compare_step(step, outcome, self.config.entropy_bound, self._step_margin)
            self._take(difference)
            self._argmax_tie |= not np.array_equal(step.argmax_ids, outcome.argmax_ids)
        elif self._last_step is not None and self.course.outcome(step.canvas, step.step - 1):
            self._stopped(self._last_step, step.step, step.step - 1)
        self._last_step = step

    def finish(self) -> None:
        """Notices a canvas that the bundle went on with; call it at the end."""
        last, self._last_step = self._last_step, None
        if last is not None and self.course.outcome(last.canvas, last.step + 1):
            self._stopped(last, last.step, last.step + 1)

    def _stopped(self, last: ReferenceStep, expected: int, found: int) -> None:
        if not self._argmax_tie:
            self._take(stopped_apart(last, (expected, found), self.config, self._step_margin))

    def _take(self, difference: Difference | None) -> None:
        if difference is not None and difference.reason is None and self.failure is None:
            self.failure = difference


def stopped_apart(
    last: ReferenceStep, steps: tuple[int, int], config: GenerationConfig, router_margin: float
) -> Difference:
    """The difference of two runs that agreed up to step ``last``, after which only one of them stopped."""
    assert config.confidence_threshold is not None, "Reference.generate refuses it"
    return compare_stop(last.canvas, steps, last.entropy, config.confidence_threshold, router_margin)


def _newest(ring: npt.NDArray[np.generic], past: int, count: int) -> npt.NDArray[np.generic]:
    """The last ``count`` of ``past`` tokens, in order, from a ring [C, ...] where position p lies in slot p % C."""
    return ring[np.arange(past - count, past) % len(ring)]
