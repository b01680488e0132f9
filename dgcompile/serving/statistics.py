"""What a service counts, and the metrics that are made of it: one table for every front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dgcompile.runtime.scheduler import Counts


@dataclass(kw_only=True)
class Statistics(Counts):
    """The scheduler's counts, what it holds now, and rates over the last seconds.

    Attributes:
        rows: rows of the batch.
        active_rows: rows that hold a request now.
        queued: requests that wait for a row.
        steps_per_second, tokens_per_second: over the last 10 seconds.
    """

    rows: int
    active_rows: int
    queued: int
    steps_per_second: float
    tokens_per_second: float

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per denoising step of a row, since the start; 0 before the first."""
        return self.output_tokens / self.row_steps if self.row_steps else 0.0


@dataclass(frozen=True)
class Metric:
    """One metric in Prometheus's terms.

    Attributes:
        name: as in the table; see :attr:`exposed_name`.
        help: one sentence.
        kind: a counter only grows.
        value: reads it.
    """

    name: str
    help: str
    kind: Literal["counter", "gauge"]
    value: Callable[[Statistics], float]

    @property
    def exposed_name(self) -> str:
        """The name in Prometheus: counters end in ``_total``, but for the two parts of a summary."""
        plain = self.kind == "gauge" or self.name.endswith(("_sum", "_count"))
        return self.name if plain else f"{self.name}_total"


METRICS = (
    Metric("dgcompile_rows", "Rows of the batch", "gauge", lambda s: s.rows),
    Metric("dgcompile_active_rows", "Rows that hold a request", "gauge", lambda s: s.active_rows),
    Metric("dgcompile_queued_requests", "Requests that wait for a row", "gauge", lambda s: s.queued),
    Metric("dgcompile_requests_finished", "Requests answered", "counter", lambda s: s.finished),
    Metric("dgcompile_requests_failed", "Requests that the engine failed", "counter", lambda s: s.failed),
    Metric("dgcompile_requests_cancelled", "Requests cancelled by the client", "counter", lambda s: s.cancelled),
    Metric(
        "dgcompile_requests_refused", "Requests refused as invalid or for a full queue", "counter", lambda s: s.refused
    ),
    Metric("dgcompile_denoising_steps", "Denoising steps", "counter", lambda s: s.steps),
    Metric("dgcompile_row_steps", "Rows of all denoising steps together", "counter", lambda s: s.row_steps),
    Metric("dgcompile_encoder_calls", "Encoder calls", "counter", lambda s: s.encoder_calls),
    Metric("dgcompile_prompt_tokens", "Prompt tokens read", "counter", lambda s: s.prompt_tokens),
    Metric("dgcompile_output_tokens", "Tokens generated", "counter", lambda s: s.output_tokens),
    Metric(
        "dgcompile_first_canvas_seconds_sum",
        "Seconds from submission to the first canvas, summed over requests",
        "counter",
        lambda s: s.first_canvas_seconds,
    ),
    Metric(
        "dgcompile_first_canvas_seconds_count",
        "Requests that got a first canvas",
        "counter",
        lambda s: s.first_canvases,
    ),
    Metric(
        "dgcompile_steps_per_second",
        "Denoising steps per second over the last 10 s",
        "gauge",
        lambda s: s.steps_per_second,
    ),
    Metric(
        "dgcompile_tokens_per_second", "Tokens per second over the last 10 s", "gauge", lambda s: s.tokens_per_second
    ),
    Metric("dgcompile_tokens_per_step", "Tokens per denoising step of a row", "gauge", lambda s: s.tokens_per_step),
)
"""All metrics."""
