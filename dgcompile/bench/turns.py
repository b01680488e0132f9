"""Who is measured when, and what many samples say. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

PERCENTILES_FROM = 10
"""Samples from which on a spread is the 10th to the 90th percentile; of fewer it is the smallest to the largest."""


class Turn(NamedTuple):
    """One contender's turn.

    Attributes:
        number: of the round, from 0; -1 for the warm-up.
        contender: which, from 0.
    """

    number: int
    contender: int

    @property
    def is_warm_up(self) -> bool:
        """Whether its figures do not count."""
        return self.number < 0


def alternate(contenders: int, turns: int) -> Iterator[Turn]:
    """A warm-up of each contender, then ``turns`` rounds A B A B: a machine that slows down treats all alike."""
    for number in range(-1, turns):
        for contender in range(contenders):
            yield Turn(number, contender)


class Figure(BaseModel):
    """One figure of one contender, over its turns.

    Attributes:
        median: of the samples.
        low, high: the spread, see :data:`PERCENTILES_FROM`.
        spread: what ``low`` and ``high`` are.
        ratio: to the first contender: the median of each round's ratio. None where the rounds cannot be compared.
        samples: in the order of the rounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    median: float
    low: float
    high: float
    spread: str
    ratio: float | None
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float], first: Sequence[float] | None = None) -> Figure:
        """The figure of ``samples``, at least one.

        Args:
            samples: one a round.
            first: those of the first contender, in the same rounds.
        """
        ordered = sorted(samples)
        if len(ordered) >= PERCENTILES_FROM:
            cuts = statistics.quantiles(ordered, n=10, method="inclusive")
            low, high, spread = cuts[0], cuts[-1], "p10-p90"
        else:
            low, high, spread = ordered[0], ordered[-1], "min-max"
        return cls(
            median=statistics.median(ordered),
            low=low,
            high=high,
            spread=spread,
            ratio=None if first is None else _ratio(samples, first),
            samples=tuple(samples),
        )


def _ratio(samples: Sequence[float], first: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(samples, first, strict=True))
