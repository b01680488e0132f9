"""Options of OpenAI's API that this server does not have: a value that asks for nothing passes, any other is refused.

Ignoring an option would change the answer silently. A denoised canvas has no next token whose probability could be
reported, cut off or penalised, so most of these cannot exist here; the others are not in this version.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from dgcompile.serving.openai.errors import ApiError

ONE_ANSWER = "each request gets one answer"
NO_NEXT_TOKEN = "a canvas is denoised as a whole, so there is no next token's distribution to act on"
NO_TOOLS = "tools are not supported"
NO_FORMAT = "the text is not constrained to a format"
TEXT_ONLY = "the model reads and writes text only"
NOTHING_STORED = "nothing is stored"
NO_REASONING = "there is no such control over this model"

Table = Mapping[str, tuple[tuple[Any, ...], str]]
"""Name of an option: its values that ask for nothing (None always is one), and why others are refused."""

CHAT: Table = {
    "audio": ((), TEXT_ONLY),
    "frequency_penalty": ((0,), NO_NEXT_TOKEN),
    "function_call": (("none", "auto"), NO_TOOLS),
    "functions": (([],), NO_TOOLS),
    "logit_bias": (({},), NO_NEXT_TOKEN),
    "logprobs": ((False,), NO_NEXT_TOKEN),
    "modalities": ((["text"],), TEXT_ONLY),
    "moderation": ((), "there is no moderation"),
    "n": ((1,), ONE_ANSWER),
    "parallel_tool_calls": ((True, False), NO_TOOLS),
    "prediction": ((), "a predicted answer is of no use to a denoised canvas"),
    "presence_penalty": ((0,), NO_NEXT_TOKEN),
    "prompt_cache_options": ((), NOTHING_STORED),
    "prompt_cache_retention": ((), NOTHING_STORED),
    "reasoning_effort": (("none",), NO_REASONING),
    "response_format": (({"type": "text"},), NO_FORMAT),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), NOTHING_STORED),
    "tool_choice": (("none", "auto"), NO_TOOLS),
    "tools": (([],), NO_TOOLS),
    "top_logprobs": ((0,), NO_NEXT_TOKEN),
    "top_p": ((1,), NO_NEXT_TOKEN),
    "verbosity": (("medium",), NO_REASONING),
    "web_search_options": ((), NO_TOOLS),
}
"""Of /v1/chat/completions."""

TEXT: Table = {
    "best_of": ((1,), ONE_ANSWER),
    "echo": ((False,), "the answer never repeats the prompt"),
    "frequency_penalty": CHAT["frequency_penalty"],
    "logit_bias": CHAT["logit_bias"],
    "logprobs": ((False,), NO_NEXT_TOKEN),
    "n": CHAT["n"],
    "presence_penalty": CHAT["presence_penalty"],
    "suffix": (("",), "text is only generated after the prompt"),
    "top_p": CHAT["top_p"],
}
"""Of /v1/completions."""


def without_unsupported(values: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """``values`` without the options of ``table``.

    Raises:
        ApiError: 400, an option asks for something; names it.
    """
    for name, value in values.items():
        if name not in table or value is None:
            continue
        neutral, reason = table[name]
        if not any(_same(value, each) for each in neutral):
            expected = " or ".join([*map(repr, neutral), "no such field"])
            raise ApiError(
                400,
                f"{name} is {reprlib.repr(value)}, which is not supported: {reason}; expected {expected}",
                param=name,
                code="unsupported_parameter",
            )
    return {name: value for name, value in values.items() if name not in table}


def _same(value: Any, neutral: Any) -> bool:
    """Equality as JSON has it: Python takes true for 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
