"""What an evaluation of a bundle found."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

from dgcompile.recipe import WeightClass


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LogitsError(_Frozen):
    """How far the candidate's logits are off, at temperature 1, over some denoising steps.

    Attributes:
        kl: KL(reference || candidate) in nats, mean over the positions of all canvases.
        relative_error: ``||found - expected|| / ||expected||`` over all logits.
    """

    kl: float
    relative_error: float


class StepError(LogitsError):
    """Errors in one denoising step of a canvas, both sides given the reference's canvas and self-conditioning.

    Attributes:
        step: number of the step, from 1.
        canvases: how many canvases of the reference took this step.
    """

    step: int
    canvases: int


class LayerError(_Frozen):
    """``||found - expected|| / ||expected||`` of a layer's output in the first step, over all prompts."""

    layer: int
    relative_error: float


class StepCount(_Frozen):
    """How many canvases of each side's own runs took this many denoising steps."""

    steps: int
    reference: int
    candidate: int


class ClassBytes(_Frozen):
    """What one class of weight takes in the bundle, scales included.

    Attributes:
        weight_class: the class.
        weights: how many numbers the model has there.
        stored_bytes: their bytes in the bundle.
    """

    weight_class: WeightClass
    weights: int
    stored_bytes: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bf16_bytes(self) -> int:
        """Bytes that they take in bfloat16."""
        return 2 * self.weights

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight."""
        return 8 * self.stored_bytes / self.weights


class PromptReport(_Frozen):
    """One prompt.

    Attributes:
        index: its place among the prompts, from 0.
        line: its line in the file of prompts, from 1; None where there was no file.
        seed: of its random numbers, on both sides.
        prompt: its text; None where token ids were given.
        kl: KL of the first step, as in :class:`LogitsError`.
        identical: whether both sides generated the same tokens by themselves.
        reference_text, candidate_text: what they generated; None without a tokenizer.
        answer: the right answer, where there is one.
        reference_steps, candidate_steps: denoising steps that each side took in each canvas.
    """

    index: int
    line: int | None
    seed: int
    prompt: str | None
    kl: float
    identical: bool
    reference_text: str | None
    candidate_text: str | None
    answer: str | None
    reference_steps: tuple[int, ...]
    candidate_steps: tuple[int, ...]

    @property
    def place(self) -> str:
        """How it is called in tables."""
        return f"prompt {self.index}" if self.line is None else f"line {self.line}"

    @property
    def reference_right(self) -> bool:
        """Whether the reference gave the right answer; False where none is known."""
        return _same_text(self.reference_text, self.answer)

    @property
    def candidate_right(self) -> bool:
        """Whether the candidate gave the right answer; False where none is known."""
        return _same_text(self.candidate_text, self.answer)


def _same_text(found: str | None, expected: str | None) -> bool:
    return found is not None and expected is not None and found.strip() == expected.strip()


class EvaluationReport(_Frozen):
    """Result of comparing a bundle (the candidate) with an unquantized model (the reference).

    Attributes:
        bundle: the candidate's folder.
        target, recipe: what it was built for and with.
        against: the reference's folder.
        reference_kind: "checkpoint" (transformers, float32) or "bundle" (its graphs).
        reference_recipe: of a reference bundle; None for a checkpoint.
        same_checkpoint: whether the bundle was built from exactly this checkpoint, or both bundles from the same one.
        graphs_only: whether the bundle is for a GPU, so that its graphs were evaluated in float32 and not its engines.
        first_step: errors in the first step of the first canvas, over all prompts.
        steps: errors by step, along the reference's own runs.
        trajectory: the same over all steps.
        layers: errors of the layers in the first step.
        step_counts: histogram of the denoising steps per canvas in each side's own runs.
        weights: bytes by class of weight.
        prompts: every prompt.
    """

    bundle: str
    target: str
    recipe: str
    against: str
    reference_kind: Literal["checkpoint", "bundle"]
    reference_recipe: str | None
    same_checkpoint: bool
    graphs_only: bool
    first_step: LogitsError
    steps: tuple[StepError, ...]
    trajectory: LogitsError
    layers: tuple[LayerError, ...]
    step_counts: tuple[StepCount, ...]
    weights: tuple[ClassBytes, ...]
    prompts: tuple[PromptReport, ...]

    @property
    def worst_prompt(self) -> PromptReport:
        """The prompt with the largest KL in the first step."""
        return max(self.prompts, key=lambda prompt: prompt.kl)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def largest_kl(self) -> float:
        """Largest KL of a prompt's first step."""
        return self.worst_prompt.kl

    @computed_field  # type: ignore[prop-decorator]
    @property
    def identical_texts(self) -> int:
        """Prompts for which both sides generated the same tokens."""
        return sum(prompt.identical for prompt in self.prompts)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def answers(self) -> int:
        """Prompts whose right answer is known."""
        return sum(prompt.answer is not None for prompt in self.prompts)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reference_right(self) -> int:
        """Right answers of the reference."""
        return sum(prompt.reference_right for prompt in self.prompts)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def candidate_right(self) -> int:
        """Right answers of the candidate."""
        return sum(prompt.candidate_right for prompt in self.prompts)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reference_mean_steps(self) -> float:
        """Denoising steps per canvas of the reference."""
        return _mean([steps for prompt in self.prompts for steps in prompt.reference_steps])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def candidate_mean_steps(self) -> float:
        """Denoising steps per canvas of the candidate."""
        return _mean([steps for prompt in self.prompts for steps in prompt.candidate_steps])

    @computed_field  # type: ignore[prop-decorator]
    @property
    def steps_ratio(self) -> float:
        """Steps per canvas of the candidate, relative to the reference's: above 1, it pays in time as well."""
        return self.candidate_mean_steps / self.reference_mean_steps

    @computed_field  # type: ignore[prop-decorator]
    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights in the bundle."""
        return sum(row.stored_bytes for row in self.weights)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bf16_bytes(self) -> int:
        """Bytes of all weights in bfloat16."""
        return sum(row.bf16_bytes for row in self.weights)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight of the whole model."""
        return 8 * self.stored_bytes / sum(row.weights for row in self.weights)


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
