"""GenerationConfig: the numbers that steer the denoising loop, as ``generation_config.json`` gives them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dgcompile.config_file import read_json, validation_error
from dgcompile.errors import CheckpointError, DgcompileError, RequestError

Count = Annotated[int, Field(strict=True, ge=1)]
TokenId = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]

SAMPLER = "EntropyBoundSamplerConfig"
"""The one sampler that transformers defines for this model, by the name in ``sampler_config._cls_name``."""

_IGNORED_KEYS = frozenset(
    {
        # Where and how transformers runs and stores things: without meaning for the tokens that come out.
        "return_dict_in_generate",
        "cache_implementation",
        "cache_config",
        "disable_compile",
        "transformers_version",
        "_commit_hash",
        "_from_model_config",
    }
)


class GenerationConfig(BaseModel):
    """How text is generated. Defaults are transformers' own for this model.

    Attributes:
        max_new_tokens: tokens to generate at most; whole canvases are run, then cut.
        max_denoising_steps: denoising steps per canvas at most.
        t_min: temperature towards the last step.
        t_max: temperature of the first step.
        entropy_bound: how much entropy the tokens accepted in one step may have together; larger accepts more.
        stability_threshold: how many earlier argmax canvases the newest must equal for a row to stop early; None never
            stops early.
        confidence_threshold: mean entropy below which such a row stops; None never stops early.
        eos_token_ids: each of these ends the text.
        pad_token_id: fills a row after its end.
        bos_token_id: starts a prompt; None where the model has no such token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: Count = 256
    max_denoising_steps: Count = 48
    t_min: Annotated[Number, Field(ge=0)] = 0.4
    t_max: Annotated[Number, Field(gt=0)] = 0.8
    entropy_bound: Annotated[Number, Field(gt=0)] = 0.1
    stability_threshold: Annotated[int, Field(strict=True, ge=0)] | None = 1
    confidence_threshold: Annotated[Number, Field(gt=0)] | None = 0.005
    eos_token_ids: tuple[TokenId, ...] = ()
    pad_token_id: TokenId = 0
    bos_token_id: TokenId | None = None

    @model_validator(mode="after")
    def _check_temperatures(self) -> GenerationConfig:
        if self.t_max <= self.t_min:
            raise ValueError(f"t_max is {self.t_max} and t_min is {self.t_min}, but t_max must be the larger")
        return self

    @classmethod
    def from_file(
        cls,
        path: Path,
        *,
        defaults: GenerationConfig | None = None,
        error: type[DgcompileError] = CheckpointError,
    ) -> GenerationConfig:
        """Reads ``generation_config.json``.

        Args:
            path: the file.
            defaults: where a key is absent or null.
            error: class of the exceptions.

        Raises:
            DgcompileError: (``error``) see :meth:`from_values`; also an unreadable file. Names the file and the key.
        """
        return cls.from_values(read_json(path, error=error), source=str(path), defaults=defaults, error=error)

    @classmethod
    def from_values(
        cls,
        values: Mapping[str, Any],
        *,
        source: str = "generation_config.json",
        defaults: GenerationConfig | None = None,
        error: type[DgcompileError] = CheckpointError,
    ) -> GenerationConfig:
        """Reads the parsed ``generation_config.json``, in transformers' names and nesting.

        As in transformers, null means "the default" and a key that the diffusion loop does not know is refused:
        ignoring, say, ``top_k`` would change the text silently.

        Raises:
            DgcompileError: (``error``) an unknown key or sampler, or a value out of range.
        """
        given = {key: value for key, value in values.items() if value is not None and key not in _IGNORED_KEYS}
        fields = (defaults or cls()).model_dump()
        if "max_length" in given:
            raise error(f"{source}: max_length is {given['max_length']!r}", expected="max_new_tokens in its place")
        sampler = given.pop("sampler_config", None)
        if sampler is not None:
            fields["entropy_bound"] = _entropy_bound(sampler, source, error)
        eos = given.pop("eos_token_id", None)
        if eos is not None:
            fields["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
        for key in ("eos_token_ids", "entropy_bound"):
            # Our own spellings are not those of the file.
            if key in given:
                raise error(f"{source}: unknown key {key!r}", expected="eos_token_id, sampler_config.entropy_bound")
        try:
            return cls.model_validate({**fields, **given})
        except ValidationError as problem:
            raise validation_error(source, problem, cls, error=error) from problem

    def to_values(self) -> dict[str, Any]:
        """The content of a ``generation_config.json`` that :meth:`from_values` reads back to an equal object.

        Raises:
            RequestError: early stopping is off, which that file cannot say.
        """
        if self.stability_threshold is None or self.confidence_threshold is None:
            raise RequestError(
                "stability_threshold or confidence_threshold is None",
                expected="numbers: generation_config.json cannot say that a row never stops early",
            )
        values = self.model_dump(exclude={"eos_token_ids", "entropy_bound"}, exclude_none=True)
        values["eos_token_id"] = list(self.eos_token_ids)
        values["sampler_config"] = {"_cls_name": SAMPLER, "entropy_bound": self.entropy_bound}
        return values

    def replace(self, **changes: Any) -> GenerationConfig:
        """A validated copy with some fields changed.

        Raises:
            RequestError: an unknown option or a value out of range; names the option.
        """
        try:
            return type(self).model_validate({**self.model_dump(), **changes})
        except ValidationError as problem:
            raise validation_error("generation options", problem, type(self), error=RequestError) from problem

    def temperature(self, steps_left: int) -> float:
        """Temperature of the step with ``steps_left`` steps to go, this one included: transformers'
        ``LinearTemperatureScheduleLogitsProcessor``, in its order of operations.
        """
        return self.t_min + ((self.t_max - self.t_min) * (steps_left / self.max_denoising_steps))

    def check_vocabulary(self, vocab_size: int, *, source: str, error: type[DgcompileError] = CheckpointError) -> None:
        """Refuses token ids that the model does not have.

        Raises:
            DgcompileError: (``error``) names the key and the id.
        """
        named = [("eos_token_id", token) for token in self.eos_token_ids]
        named += [("pad_token_id", self.pad_token_id), ("bos_token_id", self.bos_token_id or 0)]
        for key, token in named:
            if token >= vocab_size:
                raise error(f"{source}: {key} {token} is not in the vocabulary", expected=f"below {vocab_size}")


def _entropy_bound(sampler: Any, source: str, error: type[DgcompileError]) -> Any:
    """``entropy_bound`` of a ``sampler_config``; its value is checked with the other fields."""
    if not isinstance(sampler, Mapping):
        raise error(f"{source}: sampler_config is {sampler!r}", expected="an object with entropy_bound")
    name = sampler.get("_cls_name", SAMPLER)
    if name != SAMPLER:
        raise error(f"{source}: sampler_config._cls_name is {name!r}", expected=SAMPLER)
    unknown = sorted(set(sampler) - {"_cls_name", "entropy_bound"})
    if unknown:
        raise error(f"{source}: unknown key {'sampler_config.' + unknown[0]!r}", expected="entropy_bound")
    if sampler.get("entropy_bound") is None:
        raise error(f"{source}: sampler_config.entropy_bound is missing")
    return sampler["entropy_bound"]
