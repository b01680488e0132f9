"""How the scheduler's rule for encoder calls does, on a GPU's roofline: the real scheduler, a session of arithmetic.

The session computes nothing: each denoising step and encoder call takes the time that the roofline model of
`dgcompile plan` gives for its rows, on a clock that only these calls move. How many steps a canvas takes is drawn
around 16. **All figures are estimates**: no kernel reaches a card's peaks, and no GPU was used.

    python scripts/serving_policy.py CONFIG.json --target h100 --rows 8

`CONFIG.json` is a model's config, or a folder that has one. Every row is always busy, each request asking for several
canvases, so the tokens per second are those of a server that is never idle.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from dgcompile.errors import DgcompileError
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.plan.roofline import step_time
from dgcompile.plan.workload import Workload
from dgcompile.recipe import Recipe
from dgcompile.runtime.row import FinishReason, Row
from dgcompile.runtime.scheduler import Job, Scheduler
from dgcompile.runtime.session import Batch
from dgcompile.target import Target
from dgcompile.weights_store import lay_out_store

ONLY_OF_THE_DENOISER = ("self_conditioning", "embedding", "sampling")
MEAN_STEPS, STEPS_DEVIATION = 16, 4


class Clock:
    """Seconds of each call, by the roofline model, for caches that are full but for the canvas."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._store = lay_out_store(workload.spec, workload.recipe)

    @functools.cache  # noqa: B019 - one clock lives as long as the script
    def _work(self, rows: int) -> dict[str, float]:
        time = step_time(self.workload.sized(max_batch=rows), self._store, MEAN_STEPS)
        if time is None:
            raise click.UsageError(f"{self.workload.target.name} states no bandwidth or no rate for this recipe.")
        return {kind: work.seconds for kind, work in time.work.items()}

    def denoise(self, rows: int) -> float:
        """Seconds of a denoising step."""
        return sum(self._work(rows).values())

    def encode(self, rows: int, width: int) -> float:
        """Seconds of an encoder call: the layers alone, for as many canvases as it has tokens."""
        canvases = max(1, round(rows * width / self.workload.spec.canvas_length))
        work = self._work(canvases)
        return sum(seconds for kind, seconds in work.items() if kind not in ONLY_OF_THE_DENOISER)


class NoCache:
    """A cache that only counts."""

    def __init__(self, rows: int) -> None:
        self.past_length: npt.NDArray[np.int32] = np.zeros(rows, dtype=np.int32)
        self.keys: list[npt.NDArray[np.generic]] = []
        self.values: list[npt.NDArray[np.generic]] = []

    def move_row(self, source: int, target: int) -> None:
        self.past_length[target] = self.past_length[source]

    def clear_row(self, row: int, *, wipe: bool = False) -> None:
        self.past_length[row] = 0


class TimedBatch(Batch):
    """Rows of which nothing is known but when each canvas will be done."""

    def __init__(self, spec: ModelSpec, rows: int, seed: int) -> None:
        self.cache = NoCache(rows)
        self.canvas_length = spec.canvas_length
        self.temperature = np.ones(rows, dtype=np.float32)
        self.entropy_bound = np.zeros(rows, dtype=np.float32)
        self.uniform = np.zeros((rows, spec.canvas_length), dtype=np.float32)
        self.noise_ids = np.zeros((rows, spec.canvas_length), dtype=np.int32)
        self.argmax_ids = np.ones((rows, spec.canvas_length), dtype=np.int32)
        self.accepted = np.zeros((rows, spec.canvas_length), dtype=np.bool_)
        self.entropy = np.ones((rows, spec.canvas_length), dtype=np.float32)
        self.steps_left = np.zeros(rows, dtype=np.int64)
        self._random = np.random.default_rng(seed)

    @property
    def canvas_ids(self) -> npt.NDArray[np.int32]:
        return self.noise_ids

    @property
    def self_conditioning(self) -> npt.NDArray[np.generic]:
        return self.entropy

    def _start_canvas(self, canvas_ids: npt.NDArray[np.int32], first: int) -> None:
        steps = self._random.normal(MEAN_STEPS, STEPS_DEVIATION, len(canvas_ids)).round()
        self.steps_left[first : first + len(canvas_ids)] = steps.clip(2, 48)

    def swap_rows(self, one: int, other: int) -> None:
        self.steps_left[[one, other]] = self.steps_left[[other, one]]


class TimedSession:
    """A session whose calls take time and do nothing."""

    def __init__(self, clock: Clock, seed: int) -> None:
        self.spec = clock.workload.spec
        self.max_context = clock.workload.max_context
        self.max_batch = clock.workload.max_batch
        self.seconds = 0.0
        self.encoder_seconds = 0.0
        self._clock, self._seed = clock, seed

    def new_batch(self, rows: int, capacity: int) -> Batch:
        return TimedBatch(self.spec, rows, self._seed)

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        seconds = self._clock.encode(*input_ids.shape)
        self.seconds += seconds
        self.encoder_seconds += seconds

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        assert isinstance(batch, TimedBatch)
        self.seconds += self._clock.denoise(last + 1)
        rows = slice(0, last + 1)
        batch.steps_left[rows] -= 1
        batch.entropy[rows] = np.where(batch.steps_left[rows, None] > 0, 1.0, 0.0)


@dataclass
class Client:
    """Asks for another answer as soon as one is there."""

    scheduler: Scheduler
    session: TimedSession
    config: GenerationConfig
    prompt: int
    left: list[int]
    seconds: list[float]
    started: float = 0.0

    def submit(self) -> None:
        self.started = self.session.seconds
        row = Row(self.session.spec, self.session.max_context, [1] * self.prompt, self.config, 0)
        self.scheduler.submit(row, self)

    def is_cancelled(self) -> bool:
        return False

    def on_canvas(self, job: Job, token_ids: list[int]) -> bool:
        return False

    def on_finish(self, job: Job, finish_reason: FinishReason) -> None:
        self.seconds.append(self.session.seconds - self.started)
        self.left[0] -= 1
        if self.left[0] > 0:
            self.submit()
        else:
            self.scheduler.close()

    def on_cancelled(self) -> None:
        raise AssertionError("nobody cancels")

    def on_error(self, error: DgcompileError) -> None:
        """The requests that are under way at the end."""


def simulate(clock: Clock, rows: int, overhead: float, canvases: int, prompt: int, answers: int) -> dict[str, float]:
    """Serves ``answers`` answers with every row busy."""
    session = TimedSession(clock, seed=0)
    scheduler = Scheduler(session, rows=rows, queue_limit=rows, encoder_overhead=overhead)
    config = GenerationConfig(max_new_tokens=canvases * session.spec.canvas_length, stability_threshold=0)
    left, seconds = [answers], list[float]()
    for _ in range(rows):
        Client(scheduler, session, config, prompt, left, seconds).submit()
    scheduler.run()
    return {
        "encoder_overhead": round(overhead, 3),
        "tokens_per_second": round(scheduler.counts.output_tokens / session.seconds, 1),
        "seconds_per_answer": round(float(np.mean(seconds)), 4),
        "encoder_share": round(session.encoder_seconds / session.seconds, 4),
        "rows_per_step": round(scheduler.counts.row_steps / scheduler.counts.steps, 3),
        "encoder_calls": scheduler.counts.encoder_calls,
    }


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path(path_type=Path, exists=True))
@click.option("--target", default="h100", help="Name or file of a target.")
@click.option("--recipe", help="Name or file of a recipe; the target's own if not given.")
@click.option("--rows", default=8, type=click.IntRange(2), help="Rows of the batch.")
@click.option("--max-context", default=8192, help="Tokens of a row.")
@click.option("--canvases", default=4, help="Canvases of an answer.")
@click.option("--prompt", default=1000, help="Tokens of a prompt.")
@click.option("--answers", default=400, help="Answers to serve.")
def main(
    config: Path, target: str, recipe: str | None, rows: int, max_context: int, canvases: int, prompt: int, answers: int
) -> None:
    """Serve CONFIG's model in simulated time under several settings of the scheduler's rule; print JSON."""
    spec = ModelSpec.from_config(json.loads((config / "config.json" if config.is_dir() else config).read_text()))
    machine = Target.load(target)
    chosen = Recipe.load(recipe or machine.default_recipe).for_target(machine)
    clock = Clock(Workload(spec, chosen, machine, max_context, rows))
    length = spec.canvas_length
    one, all_rows, step = clock.encode(1, length), clock.encode(rows, length), clock.denoise(rows)
    measured = max(0.0, (rows * one - all_rows) / (rows - 1)) / step
    print(
        json.dumps(
            {
                "target": machine.name,
                "recipe": chosen.name,
                "rows": rows,
                "max_context": max_context,
                "denoise_ms": {str(count): round(1e3 * clock.denoise(count), 2) for count in (1, rows)},
                "encode_ms": {str(count): round(1e3 * clock.encode(count, length), 2) for count in (1, rows)},
                "encoder_overhead": round(measured, 3),
                "settings": {
                    name: simulate(clock, rows, factor * measured, canvases, prompt, answers)
                    for name, factor in (
                        ("at once", 0.0),
                        ("half the rule", 0.5),
                        ("the rule", 1.0),
                        ("twice the rule", 2.0),
                        ("eight times the rule", 8.0),
                    )
                },
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
