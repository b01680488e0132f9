"""What a comparison of a bundle with transformers found."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

TIE = 1e-5
"""Largest margin at which two correct float32 implementations may decide differently.

One float32 rounding is 6e-8 relative. Sums in another order over the widths and layers of a model leave about 1e-6 in
logits and probabilities (``VerifyReport.errors`` shows what was measured); ten times that is allowed. A wrong mask,
weight or formula moves logits by 1e-2 and more, so its differences have margins far beyond this.
"""

MAX_RELATIVE_ERROR = 1e-4
"""Largest relative error of an engine's output on equal inputs; reasons as for :data:`TIE`, summed over more terms."""

Kind = Literal["prompt", "argmax", "sample", "acceptance", "noise", "stop", "tokens"]
Reason = Literal["margin", "router", "drift"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Difference(_Frozen):
    """One place where the bundle decided otherwise than transformers.

    Attributes:
        kind: "prompt" (token ids of the prompt), "argmax" (most probable token), "sample" (token drawn), "acceptance"
            (which positions keep their token), "noise" (token put in place of one not accepted), "stop" (after which
            step the canvas was final) or "tokens" (final tokens, though all canvases were equal).
        canvas: number of the canvas, from 0; None for "prompt" and "tokens".
        step: number of the denoising step, from 1.
        position: the position in the canvas; of several that differ in a step, the one with the largest margin.
        positions: how many positions differ in this step.
        expected: what transformers has there: a token, or 0 and 1 for no and yes.
        found: what the bundle has there.
        margin: how far transformers was from deciding as the bundle did. "argmax": gap of the two tokens' logits,
            relative to the larger one's size; "sample": distance of the draw from the other token's interval of the
            cumulative distribution; "acceptance": distance of the entropies before it from the bound, or of its entropy
            from its neighbour's in the order (nats); "stop": distance of the mean entropy from the confidence
            threshold, relative to it. None where nothing numeric decides.
        router_margin: smallest gap between the last expert chosen and the first one not chosen (in router logits) of
            any token that this step depends on.
        drift: relative difference of the self-conditioning that the two runs had come to when they parted.
        reason: why both answers are equally right; None for a failure. "margin": the margin is at most :data:`TIE`.
            "router": the router's margin is. "drift" (whole runs only): rounding had grown from step to step through
            the self-conditioning, as small changes do in some models. What proves it is a guided run: transformers,
            started in every step from the bundle's own state, decides as the bundle did in each (ties aside) and comes
            to the bundle's self-conditioning within :data:`MAX_RELATIVE_ERROR`.
    """

    kind: Kind
    canvas: int | None = None
    step: int | None = None
    position: int | None = None
    positions: int = 1
    expected: int | None = None
    found: int | None = None
    margin: float | None = None
    router_margin: float | None = None
    drift: float | None = None
    reason: Reason | None = None


class PairReport(_Frozen):
    """One prompt with one seed.

    Attributes:
        prompt: index of the prompt.
        seed: the seed.
        tokens: tokens that transformers generated.
        exact: whether the bundle generated the same ones.
        reference_steps: denoising steps that transformers took in each canvas.
        bundle_steps: those of the bundle.
        first_difference: where the two runs parted; None when every step agreed.
        step_differences: disagreements when each step is run on transformers' own inputs.
    """

    prompt: int
    seed: int
    tokens: int
    exact: bool
    reference_steps: tuple[int, ...]
    bundle_steps: tuple[int, ...]
    first_difference: Difference | None
    step_differences: tuple[Difference, ...]

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All of them."""
        first = () if self.first_difference is None else (self.first_difference,)
        return first + self.step_differences


class EngineErrors(_Frozen):
    """Largest errors of the engines' outputs when they are given transformers' own inputs.

    Errors are ``max |found - expected| / max |expected|`` over one tensor of one call. Errors beyond
    :data:`MAX_RELATIVE_ERROR` of calls that depend on a router tie (see :attr:`Difference.router_margin`) are left out
    and counted: there another choice of experts is as right.

    Attributes:
        keys: encoder, keys of any layer against transformers' cache.
        values: likewise.
        self_conditioning: denoiser, soft embeddings.
        entropy: denoiser, absolute, in nats.
        encoder_calls: encoder calls compared.
        denoiser_calls: denoising steps compared.
        left_out: errors left out.
    """

    keys: float = 0.0
    values: float = 0.0
    self_conditioning: float = 0.0
    entropy: float = 0.0
    encoder_calls: int = 0
    denoiser_calls: int = 0
    left_out: int = 0

    @property
    def largest(self) -> float:
        """The largest of the errors."""
        return max(self.keys, self.values, self.self_conditioning, self.entropy)


class StepShare(_Frozen):
    """How many canvases agreed after a given step, over all pairs and canvases that got that far in both runs."""

    step: int
    canvases: int
    identical: int


class VerifyReport(_Frozen):
    """Result of comparing a bundle with transformers.

    Attributes:
        bundle: the bundle's folder.
        checkpoint: the checkpoint's folder.
        quantized: whether the bundle's recipe rounds, which the bounds here do not allow for.
        same_checkpoint: whether the bundle was built from exactly this checkpoint.
        tie_bound: :data:`TIE`.
        error_bound: :data:`MAX_RELATIVE_ERROR`.
        errors: of single engine calls.
        step_shares: of whole runs.
        pairs: every (prompt, seed).
    """

    bundle: str
    checkpoint: str
    quantized: bool
    same_checkpoint: bool
    tie_bound: float = TIE
    error_bound: float = MAX_RELATIVE_ERROR
    errors: EngineErrors
    step_shares: tuple[StepShare, ...]
    pairs: tuple[PairReport, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exact_pairs(self) -> int:
        """Pairs whose final tokens are identical."""
        return sum(pair.exact for pair in self.pairs)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def canvases(self) -> int:
        """Canvases that transformers denoised."""
        return sum(len(pair.reference_steps) for pair in self.pairs)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ties(self) -> int:
        """Differences in decisions so near that rounding decides."""
        return sum(difference.reason in ("margin", "router") for difference in self._differences)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def drifts(self) -> int:
        """Runs that parted because the model amplified rounding, each step being right."""
        return sum(difference.reason == "drift" for difference in self._differences)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def failures(self) -> int:
        """Differences that nothing explains."""
        return sum(difference.reason is None for difference in self._differences)

    @property
    def _differences(self) -> list[Difference]:
        return [difference for pair in self.pairs for difference in pair.differences]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Whether every difference is explained and every engine output is within the error bound."""
        return bool(self.pairs) and self.failures == 0 and self.errors.largest <= self.error_bound
