"""What is refused, and how: each with its status and in OpenAI's shape, by the name of the field at fault."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AuthenticationError, BadRequestError, NotFoundError
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from dgcompile.serving.openai import unsupported
from dgcompile.serving.openai.front import DEFAULT_MAX_REQUEST_BYTES
from dgcompile.serving.openai.schema import ChatRequest, TextRequest
from tests.serving.openai.helpers import CHAT, MODEL, Served, serving

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

REFUSED_IN_CHAT: list[tuple[dict[str, Any], str, str]] = [
    # what is asked for, the field at fault, words of the message
    ({"n": 2}, "n", "one answer"),
    ({"n": True}, "n", "True"),
    ({"top_p": 0.9}, "top_p", "next token"),
    ({"presence_penalty": 0.1}, "presence_penalty", "next token"),
    ({"frequency_penalty": -1}, "frequency_penalty", "next token"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "next token"),
    ({"logprobs": True}, "logprobs", "next token"),
    ({"top_logprobs": 3}, "top_logprobs", "next token"),
    ({"response_format": {"type": "json_object"}}, "response_format", "format"),
    ({"response_format": SCHEMA}, "response_format", "format"),
    ({"tools": [TOOL]}, "tools", "tools"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"function_call": {"name": "f"}}, "function_call", "tools"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "text only"),
    ({"store": True}, "store", "stored"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "control"),
    ({"verbosity": "low"}, "verbosity", "control"),
    ({"service_tier": "flex"}, "service_tier", "tier"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "canvas"),
    ({"web_search_options": {}}, "web_search_options", "tools"),
    ({"top_k": 5}, "top_k", "unknown"),
    ({"max_token": 5}, "max_token", "max_tokens"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 2.0}, "max_tokens", "integer"),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "greater"),
    ({"temperature": 0}, "temperature", "seed"),
    ({"temperature": -0.5}, "temperature", "at least 0.01"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": True}, "temperature", "number"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"t_min": float("inf")}, "t_min", "finite"),
    ({"t_min": 0, "t_max": 1e-40}, "t_max", "0.001"),
    ({"t_max": 1e39}, "t_max", "1000000"),
    ({"entropy_bound": 1e300}, "entropy_bound", "1000000"),
    ({"entropy_bound": 0}, "entropy_bound", "greater than 0"),
    ({"max_denoising_steps": 0}, "max_denoising_steps", "greater"),
    ({"seed": -1}, "seed", "greater"),
    ({"seed": 2**64}, "seed", "less"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"seed": True}, "seed", "integer"),
    ({"stop": ""}, "stop", "at least 1 character"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": "x" * 257}, "stop", "at most 256"),
    ({"stop": 5}, "stop", "list of strings"),
    ({"stop": [5]}, "stop", "string"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "boolean"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "False"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown"),
    ({"user": 5}, "user", "string"),
    ({"metadata": {"a": 1}}, "metadata", "string"),
    ({"metadata": {str(index): "x" for index in range(17)}}, "metadata", "at most 16"),
    ({"model": None}, "model", "string"),
    ({"messages": None}, "messages", "list"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "Hello"}, "messages", "list"),
    ({"messages": ["Hello"]}, "messages", "dictionary"),
    ({"messages": [{"role": "user"}]}, "messages", "content is missing"),
    ({"messages": [{"content": "Hello"}]}, "messages", "role is missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "'system', 'developer', 'user' or 'assistant'"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "string"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "text parts only"),
    ({"messages": [{"role": "user", "content": [AUDIO]}]}, "messages", "text parts only"),
    ({"messages": [{"role": "user", "content": ["Hello"]}]}, "messages", "no object with a type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages", "part 0 must be"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "part 0 must be"),
    ({"messages": [{**CHAT[0], "name": "Ann"}]}, "messages", "name is not supported"),
    ({"messages": [{**CHAT[0], "tool_calls": [{}]}]}, "messages", "tool_calls is not supported"),
    ({"messages": [{**CHAT[0], "colour": "red"}]}, "messages", "unknown"),
    ({"messages": [5] * 10_001}, "messages", "at most 10000"),
    ({"x" * 10_000: 1}, "x" * 100, "unknown"),
]

REFUSED_AS_A_WHOLE: list[tuple[dict[str, Any], str]] = [
    # what is asked for, words of the message; no single field is at fault
    ({"max_tokens": 5, "max_completion_tokens": 6}, "give one"),
    ({"temperature": 1, "t_min": 0.1}, "together"),
    ({"temperature": 1, "t_max": 0.9}, "together"),
    ({"t_min": 0.8, "t_max": 0.7}, "t_max must be the larger"),
    ({"stream_options": {"include_usage": True}}, "needs stream"),
    ({str(index): index for index in range(1000)}, "at most 64"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a character"),
    ({"messages": [{"role": "user", "content": "\udc00\ud83d"}]}, "half a character"),
    ({"user": "\ud800"}, "half a character"),
    ({"\ud800": 1}, "half a character"),
    ({"max_tokens": 10**30}, "context"),
    ({"max_tokens": 5000}, "context"),
    ({"messages": [{"role": "developer", "content": "x"}]}, "unknown role developer"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "context"),
]

REFUSED_IN_TEXT: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "a string or a list of token ids"),
    ({"prompt": 5}, "prompt", "a string or a list of token ids"),
    ({"prompt": ["a", "b"]}, "prompt", "several prompts"),
    ({"prompt": [[8], [9]]}, "prompt", "several prompts"),
    ({"prompt": [8, "a"]}, "prompt", "a string or a list of token ids"),
    ({"prompt": [8.0]}, "prompt", "a string or a list of token ids"),
    ({"prompt": [True]}, "prompt", "a string or a list of token ids"),
    ({"echo": True}, "echo", "prompt"),
    ({"suffix": "end"}, "suffix", "after the prompt"),
    ({"best_of": 2}, "best_of", "one answer"),
    ({"logprobs": 0}, "logprobs", "next token"),
    ({"logprobs": 5}, "logprobs", "next token"),
    ({"n": 3}, "n", "one answer"),
    ({"messages": CHAT}, "messages", "unknown"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown"),
]

NEUTRAL_IN_CHAT: dict[str, Any] = {
    "n": 1,
    "top_p": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": None,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "functions": None,
    "modalities": ["text"],
    "store": False,
    "service_tier": "auto",
    "reasoning_effort": None,
    "stop": None,
    "max_tokens": None,
    "temperature": None,
    "seed": 1,
    "stream": None,
    "stream_options": None,
    "user": "ann",
    "metadata": {"purpose": "test"},
    "safety_identifier": "abc",
    "prompt_cache_key": "abc",
}


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, which has the shape that it must have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    found: dict[str, Any] = body["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert isinstance(found["message"], str) and found["message"]
    return found


def post_json(served: Served, path: str, body: Any) -> httpx.Response:
    """Posts what httpx would refuse to write: NaN and lone surrogates."""
    return served.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("asked", "param", "words"), REFUSED_IN_CHAT, ids=lambda value: f"{value!r:.40}")
def test_refused_in_chat(served: Served, asked: dict[str, Any], param: str, words: str) -> None:
    found = error(post_json(served, CHAT_PATH, {"model": MODEL, "messages": CHAT, **asked}))
    assert (found["type"], found["param"]) == ("invalid_request_error", param)
    assert param in found["message"] and words in found["message"]


@pytest.mark.parametrize(("asked", "words"), REFUSED_AS_A_WHOLE, ids=lambda value: f"{value!r:.40}")
def test_refused_combinations_and_what_the_model_cannot_do(served: Served, asked: dict[str, Any], words: str) -> None:
    assert words in error(post_json(served, CHAT_PATH, {"model": MODEL, "messages": CHAT, **asked}))["message"]


@pytest.mark.parametrize(("asked", "param", "words"), REFUSED_IN_TEXT, ids=lambda value: f"{value!r:.40}")
def test_refused_in_completions(served: Served, asked: dict[str, Any], param: str, words: str) -> None:
    found = error(post_json(served, TEXT_PATH, {"model": MODEL, "prompt": "x", **asked}))
    assert found["param"] == param
    assert param in found["message"] and words in found["message"]


@pytest.mark.parametrize("prompt", ["", [], [288], [-1], [2**40], "\ud800"])
def test_prompts_that_the_model_cannot_read(served: Served, prompt: Any) -> None:
    error(post_json(served, TEXT_PATH, {"model": MODEL, "prompt": prompt}))


def test_a_refused_request_takes_no_row_and_is_no_answer(served: Served) -> None:
    before = served.service.statistics()
    error(post_json(served, CHAT_PATH, {"model": MODEL, "messages": CHAT, "n": 2}))
    error(post_json(served, CHAT_PATH, {"model": MODEL, "messages": CHAT, "max_tokens": 10**6}))
    after = served.service.statistics()
    assert (after.finished, after.failed, after.steps) == (before.finished, before.failed, before.steps)


def test_an_error_does_not_repeat_a_long_request(served: Served) -> None:
    for asked in ({"x" * 100_000: 1}, {"user": ["x" * 100_000]}, {"n": "x" * 100_000}, {"model": "x" * 100_000}):
        assert len(post_json(served, CHAT_PATH, {"model": MODEL, "messages": CHAT, **asked}).content) < 2000


def test_characters_beyond_the_first_plane_may_be_escaped(served: Served) -> None:
    chat = [{"role": "user", "content": "\N{GRINNING FACE}"}]
    answer = post_json(served, CHAT_PATH, {"model": MODEL, "messages": chat, "seed": 1})
    assert answer.json()["choices"][0]["message"]["content"] == served.expected(chat, 1)[0]


def test_neutral_values_and_labels_are_accepted_and_change_nothing(served: Served) -> None:
    answer = post_json(served, CHAT_PATH, {"model": MODEL, "messages": CHAT, **NEUTRAL_IN_CHAT})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == served.expected(CHAT, 1)[0]


@pytest.mark.parametrize(
    ("params", "schema", "table"),
    [
        (chat_params.CompletionCreateParamsBase, ChatRequest, unsupported.CHAT),
        (text_params.CompletionCreateParamsBase, TextRequest, unsupported.TEXT),
    ],
    ids=["chat", "completions"],
)
def test_every_option_of_the_official_client_is_known(params: type, schema: type, table: unsupported.Table) -> None:
    """Known is: done, or refused with its reason. None is "unknown", and none is both."""
    fields = set(schema.model_fields)  # type: ignore[attr-defined]
    assert typing.get_type_hints(params).keys() - fields - table.keys() == set()
    assert fields & table.keys() == set()


def test_the_official_client_raises_its_own_errors(served: Served) -> None:
    client = served.client()
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=CHAT, n=2)  # type: ignore[arg-type]
    assert (refused.value.param, refused.value.code) == ("n", "unsupported_parameter")
    with pytest.raises(NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=CHAT)  # type: ignore[arg-type]
    assert unknown.value.code == "model_not_found" and MODEL in str(unknown.value)


BODIES = {
    "empty": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"model": "\xff"}',
    "UTF-16": '{"model": "tiny"}'.encode("utf-16"),
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "a key twice": b'{"model": "tiny", "model": "tiny"}',
    "deep": b'{"messages": ' + b"[" * 100_000,
    "deep and closed": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a huge integer": b'{"seed": ' + b"9" * 5000 + b"}",
    "NUL": b"\0",
}


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_request(served: Served, body: bytes, path: str) -> None:
    found = error(served.post(path, content=body, headers={"Content-Type": "application/json"}))
    assert "the request" in found["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*ChatRequest.model_fields, *TextRequest.model_fields, *unsupported.CHAT, *unsupported.TEXT})
FIELD_VALUES = JSON | st.sampled_from([1, 0, 5, True, "x", ["x"], CHAT, [8, 9], {"type": "text"}, {}])


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from([CHAT_PATH, TEXT_PATH]),
    body=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), FIELD_VALUES, max_size=4),
    complete=st.booleans(),
)
def test_no_body_is_an_internal_error(served: Served, path: str, body: dict[str, Any], complete: bool) -> None:
    if complete:
        needed = {"messages": CHAT} if path == CHAT_PATH else {"prompt": "x"}
        body = {"model": MODEL, "max_tokens": 4, "max_denoising_steps": 2, **needed, **body}
    response = post_json(served, path, body)
    if response.status_code != 200:
        error(response, 404 if response.status_code == 404 else 400)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=64))
def test_no_bytes_are_an_internal_error(served: Served, body: bytes) -> None:
    error(served.post(CHAT_PATH, content=body, headers={"Content-Type": "application/json"}))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(served: Served, kind: str) -> None:
    body = json.dumps({"model": MODEL, "messages": CHAT})
    assert (
        "application/json"
        in error(served.post(CHAT_PATH, content=body, headers={"Content-Type": kind}), 415)["message"]
    )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/chat/completions", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/", 404),
        ("GET", CHAT_PATH, 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("OPTIONS", CHAT_PATH, 405),
        ("POST", "/health", 405),
    ],
)
def test_routes_that_are_not_there(served: Served, method: str, path: str, status: int) -> None:
    response = httpx.request(method, f"{served.url}{path}")
    error(response, status)
    assert (status == 405) == ("allow" in response.headers)


@pytest.fixture(scope="module")
def guarded(bundle: Path) -> Iterator[Served]:
    """A server with a key and a small limit."""
    with serving(bundle, rows=1, api_key="sesame", max_request_bytes=2000) as server:
        yield server


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Bearer sesam", "Basic sesame", "sesame", "Bearer s\xe9"]
)
def test_without_the_key_nothing_is_read(guarded: Served, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for response in (
        guarded.post(CHAT_PATH, content=b"no JSON", headers=headers),
        httpx.get(f"{guarded.url}/v1/models", headers=headers),
    ):
        assert error(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "sesame" not in response.text


def test_with_the_key(guarded: Served) -> None:
    answer = guarded.client(api_key="sesame").chat.completions.create(model=MODEL, messages=CHAT, seed=1)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == guarded.expected(CHAT, 1)[0]
    with pytest.raises(AuthenticationError):
        guarded.client(api_key="wrong").models.list()


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_need_no_key(guarded: Served, path: str) -> None:
    assert httpx.get(f"{guarded.url}{path}").status_code == 200


def padded(size: int) -> bytes:
    """A good request of exactly that many bytes."""
    body = json.dumps({"model": MODEL, "messages": CHAT, "seed": 1, "user": ""})
    return body.replace('"user": ""', f'"user": "{"x" * (size - len(body))}"').encode()


@pytest.mark.parametrize("chunked", [False, True])
def test_the_limit_of_a_body(guarded: Served, chunked: bool) -> None:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sesame"}

    def post(body: bytes) -> httpx.Response:
        pieces = (body[start : start + 500] for start in range(0, len(body), 500))
        return guarded.post(CHAT_PATH, content=pieces if chunked else body, headers=headers)

    assert post(padded(2000)).status_code == 200
    assert "2000" in error(post(padded(2001)), 413)["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_far_beyond_the_limit_is_told_and_not_kept(served: Served, chunked: bool) -> None:
    """Also through a client that sends all of it before it reads."""
    body = padded(8 * DEFAULT_MAX_REQUEST_BYTES)
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    headers = {"Content-Type": "application/json"}
    error(served.post(CHAT_PATH, content=pieces if chunked else body, headers=headers), 413)
