"""What is measured on logits and hidden states, in float64. numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dgcompile.evaluate.report import LayerError, LogitsError, StepError

Array = npt.NDArray[Any]

LOGITS = "logits"
"""Name, in the denoiser graph, of the softcapped logits before temperature: float32 [B, L, V]."""

_CHUNK_NUMBERS = 1 << 22
"""Logits that are looked at together: float64 copies of 32 MB, however large canvas and vocabulary are."""


def hidden_states_name(layer: int) -> str:
    """Name, in the denoiser graph, of the output of a layer: [B, L, H]."""
    return f"hidden_states.{layer}"


def kl_divergence(expected: Array, found: Array) -> npt.NDArray[np.float64]:
    """KL(expected || found) of the distributions that two sets of logits stand for, in nats.

    Args:
        expected: [L, V].
        found: [L, V].

    Returns:
        float64 [L]; what rounding makes negative is 0.
    """
    result = np.empty(len(expected), dtype=np.float64)
    for rows in _chunks(expected):
        log_p, log_q = _log_softmax(expected[rows]), _log_softmax(found[rows])
        result[rows] = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return np.maximum(result, 0.0)


def _log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _chunks(array: Array) -> Iterator[slice]:
    rows = max(1, _CHUNK_NUMBERS // max(1, array[0].size))
    for start in range(0, len(array), rows):
        yield slice(start, start + rows)


@dataclass
class ErrorSum:
    """Sums of squares, for a relative error over arrays that come one after the other."""

    difference: float = 0.0
    expected: float = 0.0

    def add(self, expected: Array, found: Array) -> None:
        """Takes in two arrays of one shape."""
        for rows in _chunks(expected):
            wide = expected[rows].astype(np.float64)
            self.expected += float(np.square(wide).sum())
            wide -= found[rows]
            self.difference += float(np.square(wide).sum())

    @property
    def relative(self) -> float:
        """``||found - expected|| / ||expected||``; infinite where only ``expected`` is zero."""
        if self.expected == 0:
            return 0.0 if self.difference == 0 else math.inf
        return math.sqrt(self.difference / self.expected)


@dataclass
class LogitsSum:
    """Errors of logits, summed over canvases."""

    canvases: int = 0
    kl: float = 0.0
    errors: ErrorSum = field(default_factory=ErrorSum)

    def add(self, kl: float, expected: Array, found: Array) -> None:
        """Takes in one canvas: the mean KL of its positions and its logits [L, V]."""
        self.canvases += 1
        self.kl += kl
        self.errors.add(expected, found)

    @property
    def error(self) -> LogitsError:
        """What came out."""
        return LogitsError(kl=self.kl / self.canvases, relative_error=self.errors.relative)


class Tally:
    """All that is measured while the candidate follows the reference.

    Args:
        layers: of the model.

    Attributes:
        first_kl: KL of the first step by prompt.
    """

    def __init__(self, layers: int) -> None:
        self.first_kl: dict[int, float] = {}
        self._first = LogitsSum()
        self._all = LogitsSum()
        self._steps: dict[int, LogitsSum] = {}
        self._layers = [ErrorSum() for _ in range(layers)]

    def add(
        self, prompt: int, canvas: int, step: int, expected: Mapping[str, Array], found: Mapping[str, Array]
    ) -> None:
        """Takes in one denoising step of one row.

        Args:
            prompt: its number.
            canvas: number of the canvas, from 0.
            step: number of the step, from 1.
            expected: the reference's logits [L, V] by their names in the graph; in the first step of the first canvas
                the outputs of all layers [L, H] too.
            found: the candidate's.
        """
        kl = float(kl_divergence(expected[LOGITS], found[LOGITS]).mean())
        sums = [self._all, self._steps.setdefault(step, LogitsSum())]
        if canvas == 0 and step == 1:
            self.first_kl[prompt] = kl
            sums.append(self._first)
            for layer, errors in enumerate(self._layers):
                name = hidden_states_name(layer)
                errors.add(expected[name], found[name])
        for logits_sum in sums:
            logits_sum.add(kl, expected[LOGITS], found[LOGITS])

    @property
    def first_step(self) -> LogitsError:
        """The first steps of all prompts."""
        return self._first.error

    @property
    def trajectory(self) -> LogitsError:
        """All steps."""
        return self._all.error

    @property
    def steps(self) -> tuple[StepError, ...]:
        """By number of the step."""
        return tuple(
            StepError(step=step, canvases=found.canvases, **found.error.model_dump())
            for step, found in sorted(self._steps.items())
        )

    @property
    def layers(self) -> tuple[LayerError, ...]:
        """Of the first steps."""
        return tuple(
            LayerError(layer=layer, relative_error=errors.relative) for layer, errors in enumerate(self._layers)
        )
