"""The JSON around an answer's text: chat completions and completions, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from dgcompile.runtime.row import FinishReason
from dgcompile.serving.service import Completion

_FINISH: dict[FinishReason, Literal["stop", "length"]] = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI has one word for both natural ends."""


class Envelope(ABC):
    """One answer's envelope.

    Args:
        model: the served model's name.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, completion: Completion) -> dict[str, Any]:
        """A whole answer."""
        choice = self._choice(self._whole_text(completion.text), _FINISH[completion.finish_reason])
        body = {**self._head, "object": self.whole_object, "choices": [choice], "usage": usage(completion)}
        return {**body, "dgcompile": details(completion)}

    def first_chunk(self) -> dict[str, Any] | None:
        """What a stream begins with."""
        return None

    def chunk(self, text: str) -> dict[str, Any]:
        """One canvas of a stream."""
        return self._chunk([self._choice(self._chunk_text(text), None)])

    def last_chunk(self, completion: Completion) -> dict[str, Any]:
        """The end of a stream: why it ended."""
        body = self._chunk([self._choice(self._last_text(), _FINISH[completion.finish_reason])])
        return {**body, "dgcompile": details(completion)}

    def usage_chunk(self, completion: Completion) -> dict[str, Any]:
        """What follows the end of a stream if the client asked for the usage."""
        return {**self._chunk([]), "usage": usage(completion)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    @staticmethod
    def _choice(text: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, **text, "logprobs": None, "finish_reason": finish_reason}

    @abstractmethod
    def _whole_text(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_text(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _last_text(self) -> dict[str, Any]: ...


class ChatEnvelope(Envelope):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunk(self) -> dict[str, Any]:
        """Says whose text follows."""
        return self._chunk([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _chunk_text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _last_text(self) -> dict[str, Any]:
        return {"delta": {}}


class TextEnvelope(Envelope):
    """Of /v1/completions."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _chunk_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _last_text(self) -> dict[str, Any]:
        return {"text": ""}


def usage(completion: Completion) -> dict[str, int]:
    """Tokens read and generated."""
    prompt, output = completion.usage.prompt_tokens, completion.usage.output_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def details(completion: Completion) -> dict[str, int | float]:
    """What OpenAI's API has no place for. Times are in milliseconds from the submission."""
    spent = completion.usage
    return {
        "seed": completion.seed,
        "denoising_steps": spent.steps,
        "queue_ms": round(spent.queue_ms, 3),
        "first_canvas_ms": round(spent.first_canvas_ms, 3),
        "total_ms": round(spent.total_ms, 3),
    }
