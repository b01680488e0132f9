"""Where two runs of one denoising step decided differently, and how near to deciding alike they were. numpy only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dgcompile.generation_config import GenerationConfig
from dgcompile.verify.report import TIE, Difference, Kind, Reason

if TYPE_CHECKING:
    from dgcompile.verify.reference import ReferenceStep


@dataclass(frozen=True)
class Outcome:
    """What the bundle made of one denoising step: int32 [L], int32 [L], bool [L] and [L, H]."""

    argmax_ids: npt.NDArray[np.int32]
    next_canvas_ids: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.bool_]
    next_self_conditioning: npt.NDArray[np.generic]


def draw(probabilities: npt.NDArray[np.float32], uniform: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """One token per position by inverse CDF: the first token whose cumulative probability exceeds ``uniform * total``.

    In float64, which is exact enough that the flat sum over a vocabulary moves no token.

    Args:
        probabilities: [L, V], not negative.
        uniform: [L] in [0, 1).

    Returns:
        int64 [L].
    """
    cumulative = np.cumsum(probabilities, axis=-1, dtype=np.float64)
    target = uniform.astype(np.float64)[:, None] * cumulative[:, -1:]
    beyond: npt.NDArray[np.int64] = (cumulative <= target).sum(axis=-1)
    return beyond


def cut(tokens: list[int], config: GenerationConfig) -> list[int]:
    """Cuts whole canvases at ``max_new_tokens`` and after the first EOS."""
    kept = tokens[: config.max_new_tokens]
    ends = [index for index, token in enumerate(kept) if token in config.eos_token_ids]
    return kept[: ends[0] + 1] if ends else kept


def compare_step(step: ReferenceStep, found: Outcome, entropy_bound: float, router_margin: float) -> Difference | None:
    """The difference between a step of transformers and the bundle's outcome of it; None when they agree.

    Args:
        step: transformers' step.
        found: the bundle's, from the same canvas.
        entropy_bound: the sampler's.
        router_margin: smallest router gap of anything that the step depends on.
    """
    accepted = step.accepted & found.accepted
    checks: list[tuple[Kind, npt.NDArray[np.bool_], Callable[[int], float | None]]] = [
        ("argmax", step.argmax_ids != found.argmax_ids, lambda position: argmax_margin(step, found, position)),
        (
            "acceptance",
            step.accepted != found.accepted,
            lambda position: acceptance_margin(step.entropy, step.accepted, entropy_bound, position),
        ),
        (
            "sample",
            accepted & (step.next_canvas_ids != found.next_canvas_ids),
            lambda position: sample_margin(step, int(found.next_canvas_ids[position]), position),
        ),
        (
            "noise",
            ~step.accepted & ~found.accepted & (step.next_canvas_ids != found.next_canvas_ids),
            lambda position: None,
        ),
    ]
    worst: tuple[float, Kind, int, float | None] | None = None
    count = 0
    for kind, differs, margin_at in checks:
        for position in np.flatnonzero(differs).tolist():
            margin = margin_at(position)
            size = math.inf if margin is None else margin
            count += 1
            if worst is None or size > worst[0]:
                worst = (size, kind, position, margin)
    if worst is None:
        return None
    size, kind, position, margin = worst
    expected, actual = _values(kind, step, found, position)
    return Difference(
        kind=kind,
        canvas=step.canvas,
        step=step.step,
        position=position,
        positions=count,
        expected=expected,
        found=actual,
        margin=margin,
        router_margin=None if math.isinf(router_margin) else router_margin,
        reason=reason_of(size, router_margin),
    )


def compare_stop(
    canvas: int, steps: tuple[int, int], entropy: npt.NDArray[np.float32], threshold: float, router_margin: float
) -> Difference:
    """The difference of two runs that agreed so far, one of which called the canvas final earlier.

    Args:
        canvas: its number.
        steps: denoising steps that transformers and the bundle took.
        entropy: float32 [L], transformers' entropies in the last step that both took.
        threshold: confidence threshold.
        router_margin: smallest router gap of anything that the step depends on.
    """
    margin = abs(float(entropy.mean(dtype=np.float64)) - threshold) / threshold
    return Difference(
        kind="stop",
        canvas=canvas,
        step=min(steps),
        expected=int(steps[0] == min(steps)),
        found=int(steps[1] == min(steps)),
        margin=margin,
        router_margin=None if math.isinf(router_margin) else router_margin,
        reason=reason_of(margin, router_margin),
    )


def reason_of(margin: float, router_margin: float) -> Reason | None:
    """Why a difference with these margins is none that counts; None when it counts."""
    if margin <= TIE:
        return "margin"
    return "router" if router_margin <= TIE else None


def argmax_margin(step: ReferenceStep, found: Outcome, position: int) -> float:
    """Gap between the two tokens' logits, relative to the larger one's size (at least 1)."""
    row = step.logits[position].astype(np.float64)
    best, other = row[step.argmax_ids[position]], row[found.argmax_ids[position]]
    return float(abs(best - other) / max(1.0, abs(best)))


def sample_margin(step: ReferenceStep, token: int, position: int) -> float:
    """Distance of the draw's target from the interval of the cumulative distribution that belongs to ``token``."""
    cumulative = np.cumsum(step.probabilities[position], dtype=np.float64)
    target = float(step.uniform[position]) * cumulative[-1]
    low = cumulative[token - 1] if token else 0.0
    return float(max(low - target, target - cumulative[token], 0.0) / cumulative[-1])


def acceptance_margin(
    entropy: npt.NDArray[np.float32], accepted: npt.NDArray[np.bool_], bound: float, position: int
) -> float:
    """How much entropies would have to change for ``position`` to be decided otherwise, in nats.

    The accepted positions are the first ones in the order of entropy. One leaves or joins them when the sum of the
    entropies before it crosses the bound, or when it changes places with the last one in or the first one out.

    Args:
        entropy: float32 [L].
        accepted: bool [L], the decision.
        bound: the entropy bound.
        position: the position.
    """
    values = entropy.astype(np.float64)
    own = values[position]
    order = np.lexsort((~accepted, values))  # of equal entropies, accepted ones came first
    rank = np.flatnonzero(order == position)[0]
    margins = [abs(values[order[:rank]].sum() - bound)]
    others = values[~accepted] if accepted[position] else values[accepted]
    if len(others):
        margins.append(np.abs(others - own).min())
    return float(min(margins))


def relative_error(found: npt.NDArray[np.generic], expected: npt.NDArray[np.generic]) -> float:
    """``max |found - expected| / max |expected|``; infinite where either is not finite or only ``expected`` is zero."""
    expected64, found64 = expected.astype(np.float64), found.astype(np.float64)
    error, scale = np.abs(found64 - expected64).max(), np.abs(expected64).max()
    if not np.isfinite(error):
        return math.inf
    if scale == 0:
        return 0.0 if error == 0 else math.inf
    return float(error / scale)


def _values(kind: Kind, step: ReferenceStep, found: Outcome, position: int) -> tuple[int, int]:
    if kind == "argmax":
        return int(step.argmax_ids[position]), int(found.argmax_ids[position])
    if kind == "acceptance":
        return int(step.accepted[position]), int(found.accepted[position])
    return int(step.next_canvas_ids[position]), int(found.next_canvas_ids[position])
