"""One request for text, validated: what every front turns its own format into."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from dgcompile.config_file import validation_error
from dgcompile.errors import RequestError
from dgcompile.generation_config import Count, GenerationConfig, Number
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.runtime.random_numbers import MAX_SEED

MAX_STOP_STRINGS = 16
"""Stop strings of one request."""

MAX_STOP_LENGTH = 256
"""Characters of one stop string: while text is streamed, up to that many are held back."""

MAX_DENOISING_STEPS = 10_000
"""Of a request: 200 times what published checkpoints take at most. So that nobody holds a row for good."""

MIN_T_MAX = 0.001
"""Of the first step's temperature. Far below, a step divides the logits by nearly nothing, and float32 overflows."""

LARGEST = 1e6
"""Of t_max and entropy_bound: long before, every token is as probable as any other, and every one is accepted."""

SOURCES = ("text", "messages", "prompt", "input_ids")
"""The fields that a prompt may be given in; each request has exactly one."""

StopString = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=MAX_STOP_LENGTH)]


def _list_of_strings(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of strings")
    return value


Text = Annotated[str, StringConstraints(strict=True)]


class GenerateRequest(BaseModel):
    """What to generate. Options that are None are the checkpoint's own.

    Attributes:
        text: a user's message; the chat template makes the prompt.
        messages: a chat, for the chat template.
        prompt: plain text, given to the model as it is.
        input_ids: token ids, given to the model as they are.
        max_new_tokens: tokens to generate at most.
        max_denoising_steps: denoising steps per canvas at most.
        t_min, t_max: temperature of the last and of the first step.
        entropy_bound: entropy, in nats, that the tokens accepted in one step may have together.
        seed: 0 .. 2**64 - 1; None draws one.
        stop: the text ends before the first of these strings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: Text | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: Text | None = None
    input_ids: list[Annotated[int, Field(strict=True)]] | None = None
    max_new_tokens: Count | None = None
    max_denoising_steps: Annotated[Count, Field(le=MAX_DENOISING_STEPS)] | None = None
    t_min: Annotated[Number, Field(ge=0)] | None = None
    t_max: Annotated[Number, Field(ge=MIN_T_MAX, le=LARGEST)] | None = None
    entropy_bound: Annotated[Number, Field(gt=0, le=LARGEST)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[tuple[StopString, ...], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_list_of_strings)] = ()

    @model_validator(mode="after")
    def _check_source(self) -> GenerateRequest:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(SOURCES)} must be given, not {' and '.join(given) or 'none'}")
        return self

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "the request") -> GenerateRequest:
        """Validates a request.

        Args:
            values: the fields by name.
            source: what messages call the request.

        Raises:
            RequestError: an unknown field, a wrong type or a value out of range; names the field.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as problem:
            raise validation_error(source, problem, cls, error=RequestError) from problem

    def generation(self, defaults: GenerationConfig) -> GenerationConfig:
        """How to generate: ``defaults``, but for what the request says.

        Raises:
            RequestError: a value out of range; names the option.
        """
        names = ("max_new_tokens", "max_denoising_steps", "t_min", "t_max", "entropy_bound")
        return defaults.replace(**{name: value for name in names if (value := getattr(self, name)) is not None})

    @property
    def characters(self) -> int:
        """Characters of the prompt, before the chat template: all strings in it."""
        count = 0
        left: list[Any] = [self.text, self.prompt, self.messages]
        while left:
            value = left.pop()
            if isinstance(value, str):
                count += len(value)
            elif isinstance(value, list):
                left += value
            elif isinstance(value, dict):
                left += value.values()
        return count

    def token_ids(self, pipeline: Pipeline) -> list[int]:
        """The prompt's token ids.

        Raises:
            RequestError: an empty prompt, malformed messages, or no tokenizer or chat template for them.
        """
        if self.input_ids is not None:
            return self.input_ids
        if self.prompt is not None:
            return pipeline.encode(self.prompt)
        if self.messages is not None:
            return pipeline.encode(self.messages)
        return pipeline.encode([{"role": "user", "content": self.text}])


def new_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(64)
