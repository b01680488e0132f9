"""What /v1/chat/completions and /v1/completions take, and the GenerateRequest that each becomes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dgcompile.config_file import parse_json, validation_error
from dgcompile.errors import RequestError
from dgcompile.generation_config import Count, GenerationConfig, Number
from dgcompile.runtime.random_numbers import MAX_SEED
from dgcompile.serving.openai.errors import ApiError
from dgcompile.serving.openai.unsupported import CHAT, TEXT, Table, without_unsupported
from dgcompile.serving.request import (
    LARGEST,
    MAX_DENOISING_STEPS,
    MAX_STOP_STRINGS,
    MIN_T_MAX,
    GenerateRequest,
    StopString,
    Text,
)

MIN_TEMPERATURE = 0.01
"""Of ``temperature``. What it scales, t_max, must stay above :data:`dgcompile.serving.request.MIN_T_MAX`."""

MAX_TEMPERATURE = 2.0
"""OpenAI's own limit."""

MESSAGE_EXTRAS = ("annotations", "audio", "function_call", "name", "refusal", "tool_calls", "tool_call_id")
"""Fields of OpenAI's messages that must say nothing here. Clients send a whole answer back as part of a chat."""

MAX_MESSAGES = 10_000
"""Of one chat. Its tokens are limited anyway; this and the next two limit how much can be wrong in one body."""

MAX_FIELDS = 64
"""Of a request: twice as many as OpenAI's API has."""

MAX_LABELS = 16
"""Entries of ``metadata``: OpenAI's own limit."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Flag = Annotated[bool, Field(strict=True)]


def _at_most(limit: int) -> BeforeValidator:
    """Refuses a long list or object before each of its entries is found to be wrong."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise ValueError(f"{len(value)} entries are too many; expected at most {limit}")
        return value

    return BeforeValidator(check)


def _stop_strings(value: Any) -> Any:
    if value is None:
        return ()
    if not isinstance(value, (str, list)):
        raise ValueError("expected a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _not_greedy(value: Any) -> Any:
    if type(value) in (int, float) and value < MIN_TEMPERATURE:
        raise ValueError(
            f"denoising needs a temperature of at least {MIN_TEMPERATURE}; for repeatable text give a seed, for more "
            "certain text a small temperature such as 0.1"
        )
    return value


def _joined_parts(content: Any) -> Any:
    """The text of a message's content, which may come in parts. Nothing is put between them."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            found = f"of type {kind!r:.80}" if isinstance(kind, str) else "no object with a type"
            raise ValueError(f"part {index} is {found}, but the model reads text parts only")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f'part {index} must be {{"type": "text", "text": "..."}} and have no other field')
        texts.append(part["text"])
    return "".join(texts)


def _one_prompt(value: Any) -> Any:
    """The one prompt of a list of prompts."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise ValueError("several prompts are not supported; send one request for each, they are answered together")
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        return value
    raise ValueError("a prompt is a string or a list of token ids")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Message(_Strict):
    """One message of a chat. Which roles may follow each other is the chat template's question."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_joined_parts)]

    @model_validator(mode="before")
    @classmethod
    def _refuse_extras(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in MESSAGE_EXTRAS:
            if values.get(name) not in (None, [], ""):
                raise ValueError(f"{name} is not supported; expected role and content")
        known = {name: value for name, value in values.items() if name in cls.model_fields}
        if len(unknown := values.keys() - known.keys() - set(MESSAGE_EXTRAS)):
            raise ValueError(f"unknown key {min(unknown)!r:.80}; expected role and content")
        return known


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: Flag | None = None
    include_obfuscation: Literal[False] | None = None


class _Request(_Strict):
    """What both kinds of requests share. A field that is null is one that is not given.

    Attributes:
        model: the served model's name.
        max_tokens: tokens to generate at most.
        seed: 0 .. 2**64 - 1; without one a seed is drawn.
        stop: a string or a list; the text ends before the first of them.
        temperature: scales both ends of the checkpoint's range of temperatures; 1 is the checkpoint's own.
        stream: whether to send the text canvas by canvas.
        max_denoising_steps, t_min, t_max, entropy_bound: not OpenAI's; see GenerateRequest.
        user, metadata, safety_identifier, prompt_cache_key: labels, without influence on the answer.
    """

    unsupported: ClassVar[Table]

    model: Text
    max_tokens: Count | None = None
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[tuple[StopString, ...], BeforeValidator(_stop_strings), _at_most(MAX_STOP_STRINGS)] = ()
    temperature: Annotated[Number, Field(le=MAX_TEMPERATURE), BeforeValidator(_not_greedy)] | None = None
    stream: Flag | None = None
    stream_options: Annotated[StreamOptions | None, _at_most(MAX_FIELDS)] = None
    max_denoising_steps: Annotated[Count, Field(le=MAX_DENOISING_STEPS)] | None = None
    t_min: Annotated[Number, Field(ge=0)] | None = None
    t_max: Annotated[Number, Field(ge=MIN_T_MAX, le=LARGEST)] | None = None
    entropy_bound: Annotated[Number, Field(gt=0, le=LARGEST)] | None = None
    user: Text | None = None
    metadata: Annotated[dict[Text, Text] | None, _at_most(MAX_LABELS)] = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> _Request:
        if self.temperature is not None and (self.t_min is not None or self.t_max is not None):
            raise ValueError("temperature scales t_min and t_max, so it cannot be given together with them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def generate_request(self, defaults: GenerationConfig) -> GenerateRequest:
        """The request in the form that all fronts share.

        Args:
            defaults: the checkpoint's options, whose temperatures ``temperature`` scales.
        """
        t_min, t_max = self.t_min, self.t_max
        if self.temperature is not None:
            t_min, t_max = defaults.t_min * self.temperature, defaults.t_max * self.temperature
        return GenerateRequest.from_values(
            {
                **self._prompt(),
                "max_new_tokens": self._max_new_tokens(),
                "max_denoising_steps": self.max_denoising_steps,
                "t_min": t_min,
                "t_max": t_max,
                "entropy_bound": self.entropy_bound,
                "seed": self.seed,
                "stop": self.stop,
            }
        )

    def _max_new_tokens(self) -> int | None:
        return self.max_tokens

    def _prompt(self) -> dict[str, Any]:
        """The field of GenerateRequest that holds the prompt."""
        raise NotImplementedError


class ChatRequest(_Request):
    """A request to /v1/chat/completions."""

    unsupported = CHAT

    messages: Annotated[list[Message], Field(min_length=1), _at_most(MAX_MESSAGES)]
    max_completion_tokens: Count | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; give one"
            )
        return self

    def _max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _prompt(self) -> dict[str, Any]:
        return {"messages": [message.model_dump() for message in self.messages]}


class TextRequest(_Request):
    """A request to /v1/completions: the prompt is given to the model as it is."""

    unsupported = TEXT

    prompt: Annotated[Any, BeforeValidator(_one_prompt)]

    def _prompt(self) -> dict[str, Any]:
        return {"prompt" if isinstance(self.prompt, str) else "input_ids": self.prompt}


Request = TypeVar("Request", bound=_Request)


def parse_request(body: bytes, schema: type[Request]) -> Request:
    """Reads and validates a request's body.

    Raises:
        ApiError: 400; names the field at fault.
        RequestError: the body is no JSON object, or holds what is no text.
    """
    values = parse_json(body, "the request", error=RequestError)
    _check_text(body, values)
    if len(values) > MAX_FIELDS:
        raise ApiError(400, f"the request has {len(values)} fields; expected at most {MAX_FIELDS}")
    wanted = without_unsupported(values, schema.unsupported)
    try:
        return schema.model_validate(wanted)
    except ValidationError as problem:
        message = str(validation_error("the request", problem, schema, error=RequestError))
        raise ApiError(400, message, param=_param(problem)) from problem


def _check_text(body: bytes, values: dict[str, Any]) -> None:
    """Refuses strings that no UTF-8 can hold. JSON can spell half of a surrogate pair, and Python reads it."""
    if _SURROGATE.search(body) is None:
        return
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as problem:
        raise RequestError(
            "the request holds an escape that is half a character", expected="surrogates such as \\ud83d in pairs"
        ) from problem


def _param(problem: ValidationError) -> str | None:
    """The field that the message of ``validation_error`` is about."""
    errors = problem.errors(include_url=False, include_input=False, include_context=False)
    first: Mapping[str, Any] = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    return str(first["loc"][0]) if first["loc"] else None
