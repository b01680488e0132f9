"""What the official client gets is what the pipeline gives alone."""

from __future__ import annotations

import itertools
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError, APIError, OpenAI

from dgcompile.errors import EngineError
from tests.serving.openai.helpers import CHAT, ENDLESS, MODEL, Served, serving

SEEDS = (0, 7, 2**64 - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_chat(served: Served, seed: int) -> None:
    text, tokens = served.expected(CHAT, seed)
    answer = served.client().chat.completions.create(model=MODEL, messages=CHAT, seed=seed)  # type: ignore[arg-type]
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens
    assert answer.usage.prompt_tokens == len(served.pipeline.encode(CHAT))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + tokens
    extras = answer.model_extra["dgcompile"]  # type: ignore[index]
    assert extras["seed"] == seed
    assert extras["denoising_steps"] >= -(-tokens // 16)
    assert 0 <= extras["queue_ms"] <= extras["first_canvas_ms"] <= extras["total_ms"]


@pytest.mark.parametrize("seed", SEEDS)
def test_chat_stream_has_a_chunk_for_each_canvas(served: Served, seed: int) -> None:
    text, tokens = served.expected(CHAT, seed)
    stream = served.client().chat.completions.create(
        model=MODEL,
        messages=CHAT,  # type: ignore[arg-type]
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, *canvases, last, usage = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in canvases) == text
    assert len(canvases) == -(-tokens // 16)
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *canvases])
    assert last.choices[0].finish_reason in ("stop", "length")
    assert last.model_extra["dgcompile"]["seed"] == seed  # type: ignore[index]
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == tokens
    assert len({chunk.id for chunk in [first, *canvases, last, usage]}) == 1


def test_without_include_usage_there_is_none(served: Served) -> None:
    stream = served.client().chat.completions.create(model=MODEL, messages=CHAT, seed=1, stream=True)  # type: ignore[arg-type]
    chunks = list(stream)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once upon", [8, 9, 10, 11]], ids=["text", "ids"])
def test_completions(served: Served, prompt: str | list[int], stream: bool) -> None:
    text, tokens = served.expected(prompt, 3)
    client = served.client()
    if stream:
        chunks = list(client.completions.create(model=MODEL, prompt=prompt, seed=3, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    else:
        answer = client.completions.create(model=MODEL, prompt=prompt, seed=3)
        assert (answer.object, answer.choices[0].text) == ("text_completion", text)
        assert answer.usage is not None and answer.usage.completion_tokens == tokens


@pytest.mark.parametrize("prompt", [["Once upon"], [[8, 9, 10, 11]]], ids=["text", "ids"])
def test_a_list_of_one_prompt_is_that_prompt(served: Served, prompt: Any) -> None:
    alone, listed = (
        served.client().completions.create(model=MODEL, prompt=each, seed=3).choices[0].text
        for each in (prompt[0], prompt)
    )
    assert alone == listed


def test_parts_of_text_are_joined(served: Served) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    answer = served.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
        seed=5,
    )
    assert answer.choices[0].message.content == served.expected(CHAT, 5)[0]


def test_an_answer_can_be_sent_back_as_it_came(served: Served) -> None:
    client = served.client()
    first = client.chat.completions.create(model=MODEL, messages=CHAT, seed=1).choices[0].message  # type: ignore[arg-type]
    chat = [*CHAT, first.model_dump(), {"role": "user", "content": "And?"}]
    plain = [*CHAT, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And?"}]
    answer = client.chat.completions.create(model=MODEL, messages=chat, seed=2)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == served.expected(plain, 2)[0]


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 5}, {"max_new_tokens": 5}),
    ({"max_completion_tokens": 33}, {"max_new_tokens": 33}),
    ({"max_tokens": 20, "max_completion_tokens": 20}, {"max_new_tokens": 20}),
    ({"max_denoising_steps": 2}, {"max_denoising_steps": 2}),
    ({"t_min": 0.1, "t_max": 1.5}, {"t_min": 0.1, "t_max": 1.5}),
    ({"entropy_bound": 2}, {"entropy_bound": 2.0}),
    ({"temperature": 1}, {}),
    ({"temperature": 1.5}, {"t_min": 0.4 * 1.5, "t_max": 0.8 * 1.5}),
]


@pytest.mark.parametrize(("asked", "config"), OPTIONS, ids=[",".join(asked) for asked, _ in OPTIONS])
def test_options_reach_the_generation(served: Served, asked: dict[str, Any], config: dict[str, Any]) -> None:
    answers = [
        served.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT, "seed": seed, **asked}).json()
        for seed in range(4)
    ]
    found = [(each["choices"][0]["message"]["content"], each["usage"]["completion_tokens"]) for each in answers]
    assert found == [served.expected(CHAT, seed, **config) for seed in range(4)]


def test_every_option_changes_some_answer(served: Served) -> None:
    """Or the test before would pass with options that are ignored."""
    plain = [served.expected(CHAT, seed) for seed in range(4)]
    for _, config in OPTIONS:
        if config:
            assert [served.expected(CHAT, seed, **config) for seed in range(4)] != plain, config


def test_a_stop_string_ends_the_text(served: Served) -> None:
    text = next(text for seed in range(20) if len(text := served.expected(CHAT, seed)[0]) > 20)
    seed = next(seed for seed in range(20) if served.expected(CHAT, seed)[0] == text)
    stop = text[9:11]
    for given in (stop, [stop], ["never in the text", stop]):
        answer = served.client().chat.completions.create(model=MODEL, messages=CHAT, seed=seed, stop=given)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
    stream = served.client().chat.completions.create(model=MODEL, messages=CHAT, seed=seed, stop=stop, stream=True)  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text[: text.index(stop)]


def test_finish_reasons(served: Served) -> None:
    found, client = set(), served.client()
    for seed in itertools.takewhile(lambda _: len(found) < 2, range(20)):
        for limit in (1, 200):
            ids = served.pipeline.encode(CHAT)
            config = served.pipeline.bundle.generation.replace(max_new_tokens=limit)
            expected = served.pipeline.generate([ids], config, [seed])[0].finish_reason
            answer = client.chat.completions.create(model=MODEL, messages=CHAT, seed=seed, max_tokens=limit)  # type: ignore[arg-type]
            assert answer.choices[0].finish_reason == {"eos": "stop", "length": "length"}[expected]
            found.add(expected)
    assert found == {"eos", "length"}


def test_a_seed_is_drawn_and_told(served: Served) -> None:
    def ask(**seed: int) -> Any:
        return served.client().chat.completions.create(model=MODEL, messages=CHAT, **seed)  # type: ignore[call-overload]

    first, second = ask(), ask()
    drawn = first.model_extra["dgcompile"]["seed"]
    assert drawn != second.model_extra["dgcompile"]["seed"]
    assert ask(seed=drawn).choices[0].message.content == first.choices[0].message.content


def test_16_clients_at_once_get_what_each_gets_alone(served: Served) -> None:
    chats = [[{"role": "user", "content": f"Say {'x' * (3 * index)}"}] for index in range(16)]

    def ask(index: int) -> list[str]:
        texts = []
        client = served.client()
        for seed in range(3):
            create = client.chat.completions.create
            if (index + seed) % 2:
                answer = create(model=MODEL, messages=chats[index], seed=seed)  # type: ignore[arg-type]
                texts.append(answer.choices[0].message.content or "")
            else:
                stream = create(model=MODEL, messages=chats[index], seed=seed, stream=True)  # type: ignore[arg-type]
                texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
        return texts

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert answers == [[served.expected(chat, seed)[0] for seed in range(3)] for chat in chats]
    assert served.settles(served.is_idle)


def endless(**more: Any) -> dict[str, Any]:
    """The body of a request that is never answered."""
    return {"model": MODEL, "messages": CHAT, "seed": 1, **ENDLESS, **more}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(served: Served, stream: bool) -> None:
    before = served.service.statistics().cancelled
    body = json.dumps(endless(stream=stream))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(served.address) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        assert served.settles(lambda: served.service.statistics().active_rows == 1)
    assert served.settles(served.is_idle)
    assert served.service.statistics().cancelled == before + 1


def test_closing_a_stream_of_the_official_client_frees_its_row(served: Served) -> None:
    before = served.service.statistics().cancelled
    stream = served.client().chat.completions.create(
        model=MODEL,
        messages=CHAT,  # type: ignore[arg-type]
        stream=True,
        extra_body=ENDLESS,
    )
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert served.settles(lambda: served.service.statistics().active_rows == 1)
    stream.close()
    assert served.settles(served.is_idle)
    assert served.service.statistics().cancelled == before + 1


def test_a_full_queue_is_429_and_the_official_client_tries_again(bundle: Path) -> None:
    with serving(bundle, rows=1, queue_limit=1) as served:
        first, second = (_stream(served.client()) for _ in range(2))
        assert served.settles(lambda: served.service.statistics().queued == 1)
        response = served.post("/v1/chat/completions", json=endless())
        assert response.status_code == 429 and float(response.headers["Retry-After"]) > 0
        assert response.json()["error"]["code"] == "queue_full"
        with ThreadPoolExecutor(1) as pool:
            patient = served.client(max_retries=5)
            asked = pool.submit(patient.chat.completions.create, model=MODEL, messages=CHAT, seed=3)  # type: ignore[arg-type]
            assert served.settles(lambda: served.service.statistics().refused == 2)
            first.close()
            second.close()
            assert asked.result(timeout=60).choices[0].message.content == served.expected(CHAT, 3)[0]


def _stream(client: OpenAI) -> Any:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,  # type: ignore[arg-type]
        stream=True,
        extra_body=ENDLESS,
    )
    next(iter(stream))
    return stream


def test_an_engine_that_fails(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineError("out of order")

    with serving(bundle, rows=1) as served:
        stream = _stream(served.client())
        monkeypatch.setattr(served.service.pipeline.session, "denoise", fail)
        with pytest.raises(APIError) as raised:
            list(stream)
        assert not isinstance(raised.value, APIConnectionError)
        assert raised.value.body["code"] == "engine_failed"  # type: ignore[index]
        # It may have been this request's fault: the next one is tried.
        assert served.http.get(f"{served.url}/health").status_code == 200
        while (response := served.post("/v1/chat/completions", json=endless())).status_code == 500:
            assert response.json()["error"]["code"] == "engine_failed"
            assert "out of order" in response.json()["error"]["message"]
        assert served.service.failure is not None
        # It was not: the process is of no use any more, and says so.
        for response in (
            served.post("/v1/chat/completions", json=endless()),
            served.http.get(f"{served.url}/health"),
            served.http.get(f"{served.url}/ready"),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_failed")


def test_stopping_the_server_ends_running_answers_with_an_error(bundle: Path) -> None:
    with serving(bundle, rows=2) as served:
        stream = _stream(served.client())
        pool = ThreadPoolExecutor(1)
        whole = pool.submit(served.post, "/v1/chat/completions", json=endless())
        assert served.settles(lambda: served.service.statistics().active_rows == 2)
    with pytest.raises(APIError) as raised:
        list(stream)
    assert raised.value.body["code"] == "closing"  # type: ignore[index]
    response = whole.result(timeout=10)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "closing")
    with pytest.raises(EngineError):
        served.service.call_soon(lambda: None)


def test_stopping_the_server_lets_a_short_answer_end(served: Served, bundle: Path) -> None:
    with serving(bundle, rows=1, grace=60) as own:
        stream = own.client().chat.completions.create(model=MODEL, messages=CHAT, seed=2, stream=True)  # type: ignore[arg-type]
        text = next(iter(stream)).choices[0].delta.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == served.expected(CHAT, 2)[0]


def test_the_raw_stream_is_server_sent_events(served: Served) -> None:
    body = {"model": MODEL, "messages": CHAT, "seed": 1, "stream": True}
    response = served.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")
    assert end == ""
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert json.loads(events[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
