"""The model in a real Triton server, on the trained example."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient.utils import InferenceServerException

from dgcompile.runtime.pipeline import Pipeline
from dgcompile.serving.triton.inputs import MAX_TEXT_BYTES
from dgcompile.serving.triton.metrics import UPDATE_SECONDS
from dgcompile.serving.triton.repository import write_model
from tests.serving.triton.clients import GrpcStream, Reply, generate, generate_stream, open_stream, reply_of
from tests.serving.triton.server import Installation, TritonServer, running

pytestmark = pytest.mark.triton_server

PUZZLE = "21.354 .54216 .3154. 5..631 423... .654.."
SOLUTION = "216354\n354216\n631542\n542631\n423165\n165423"
LONG = {"INPUT_IDS": [5, 6, 7], "MAX_TOKENS": 3900, "SEED": 1}
"""A prompt that means nothing: no canvas of its answer converges, and 98 of them take longer than any test."""

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")


@pytest.fixture(scope="module")
def repository(example_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one bundle."""
    folder = tmp_path_factory.mktemp("triton") / "model_repository"
    write_model(example_bundle, folder, name="sudoku", rows=8, threads=1)
    write_model(example_bundle, folder, name="narrow", rows=1, queue_limit=1, threads=1)
    return folder


@pytest.fixture(scope="module")
def server(
    installation: Installation, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    with running(installation, repository, tmp_path_factory.mktemp("log") / "server.log", EXPLICIT) as started:
        yield started


@pytest.fixture(scope="module")
def pipeline(example_bundle: Path) -> Pipeline:
    return Pipeline.open(example_bundle, threads=1)


def expected(pipeline: Pipeline, prompt: list[int], seed: int, **options: Any) -> tuple[str, list[int], str]:
    """What the bundle answers in this process: text, token ids, finish reason."""
    result = pipeline.generate([prompt], pipeline.bundle.generation.replace(**options), [seed])[0]
    return pipeline.decode(result.token_ids), result.token_ids, result.finish_reason


def outcome(reply: Reply) -> tuple[str, list[int], str]:
    return reply.text, reply.token_ids, reply.last["FINISH_REASON"]


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> float:
    """Waits; returns how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it never came"
        time.sleep(0.02)
    return time.monotonic() - started


def test_generate_solves_the_puzzle(server: TritonServer) -> None:
    reply = reply_of(generate(server.http, {"TEXT": PUZZLE, "SEED": 2**64 - 1}))
    assert reply.text == SOLUTION
    last = reply.last
    assert (last["FINISH_REASON"], last["PROMPT_TOKENS"], last["OUTPUT_TOKENS"]) == ("eos", 74, 37)
    assert last["SEED"] == 2**64 - 1
    assert last["DENOISING_STEPS"] >= 2
    assert 0 <= last["QUEUE_MS"] < last["FIRST_CANVAS_MS"] <= last["TOTAL_MS"] < 1e5


def test_without_a_seed_one_is_drawn_and_told(server: TritonServer, pipeline: Pipeline) -> None:
    request = {"INPUT_IDS": [5, 6, 7], "MAX_TOKENS": 40}
    first, second = (reply_of(generate(server.http, request)) for _ in range(2))
    assert first.last["SEED"] != second.last["SEED"]
    assert outcome(first) == expected(pipeline, [5, 6, 7], first.last["SEED"], max_new_tokens=40)


@pytest.mark.parametrize("seed", [0, 7, 123456789])
def test_all_ways_in_give_what_the_process_itself_gives(server: TritonServer, pipeline: Pipeline, seed: int) -> None:
    prompt = pipeline.encode([{"role": "user", "content": PUZZLE}])
    same = [
        {"TEXT": PUZZLE},
        {"MESSAGES": json.dumps([{"role": "user", "content": PUZZLE}])},
        {"PROMPT": pipeline.render([{"role": "user", "content": PUZZLE}])},
        {"INPUT_IDS": prompt},
    ]
    for source in same:
        # Plain text is tokenized with the special tokens that the tokenizer adds.
        ids = pipeline.encode(source["PROMPT"]) if "PROMPT" in source else prompt
        wanted = expected(pipeline, ids, seed)
        request = {**source, "SEED": seed}
        assert outcome(reply_of(generate(server.http, request))) == wanted
        assert outcome(generate_stream(server.http, {**request, "STREAM": True})) == wanted
        with GrpcStream(server.grpc) as stream:
            assert outcome(stream.infer(request)) == wanted


def test_options_reach_the_loop(server: TritonServer, pipeline: Pipeline) -> None:
    options = {"T_MIN": 0.5, "T_MAX": 1.5, "ENTROPY_BOUND": 0.3, "MAX_DENOISING_STEPS": 5}
    reply = reply_of(generate(server.http, {"INPUT_IDS": [5, 6, 7], "SEED": 3, "MAX_TOKENS": 75, **options}))
    wanted = expected(
        pipeline,
        [5, 6, 7],
        3,
        max_new_tokens=75,
        **{name.lower(): value for name, value in options.items()},
    )
    assert outcome(reply) == wanted
    assert reply.last["DENOISING_STEPS"] == 10
    assert reply.last["FINISH_REASON"] == "length"


def test_a_stream_has_one_response_for_each_canvas(server: TritonServer, pipeline: Pipeline) -> None:
    request = {"INPUT_IDS": [5, 6, 7], "SEED": 1, "MAX_TOKENS": 190}
    wanted = expected(pipeline, [5, 6, 7], 1, max_new_tokens=190)
    with GrpcStream(server.grpc) as stream:
        replies = [stream.infer({**request, "STREAM": True})]
        assert len(stream.infer(request).responses) == 1
    replies.append(generate_stream(server.http, {**request, "STREAM": True}))
    for reply in replies:
        assert outcome(reply) == wanted
        assert [len(response["TOKEN_IDS"]) for response in reply.responses] == [40, 40, 40, 40, 30]
        assert all("FINISH_REASON" not in response for response in reply.responses[:-1])
        assert reply.last["OUTPUT_TOKENS"] == 190


def test_stop_strings_end_the_text(server: TritonServer) -> None:
    for stream in (False, True):
        request = {"TEXT": PUZZLE, "SEED": 7, "STOP": ["never", "631542"], "STREAM": stream}
        for reply in (reply_of(generate(server.http, request)), generate_stream(server.http, request)):
            assert reply.text == "216354\n354216\n"
            assert reply.last["FINISH_REASON"] == "stop"


REFUSED: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "no prompt": ({}, "no prompt"),
    "two prompts": ({"TEXT": PUZZLE, "PROMPT": "x"}, "TEXT and PROMPT"),
    "an unknown field": ({"TEXT": PUZZLE, "TOP_P": 1}, "TOP_P"),
    "a field in small letters": ({"TEXT": PUZZLE, "max_tokens": 5}, "max_tokens"),
    "an unknown parameter": ({"TEXT": PUZZLE, "parameters": {"logprobs": True}}, "logprobs"),
    "a nested field": ({"TEXT": PUZZLE, "response_format": {"type": "json"}}, "response_format"),
    "no UTF-8": (b'{"TEXT": "21\xff"}', "TEXT is not UTF-8"),
    "too large": ({"PROMPT": "x" * (MAX_TEXT_BYTES + 1)}, "PROMPT has"),
    "what the template refuses": ({"TEXT": "hello"}, "refuses the messages"),
    "an empty prompt": ({"INPUT_IDS": []}, "empty"),
    "messages that are no JSON": ({"MESSAGES": "[{"}, "MESSAGES is not JSON"),
    "messages that are no list": ({"MESSAGES": '{"role": "user"}'}, "a list of messages"),
    "messages that are no objects": ({"MESSAGES": "[1]"}, "MESSAGES.0"),
    "messages nested too deeply": ({"MESSAGES": "[" * 100_000}, "MESSAGES is nested"),
    "no messages": ({"MESSAGES": "[]"}, "messages"),
    "a negative token": ({"INPUT_IDS": [-1]}, "-1"),
    "a token of more than 32 bits": ({"INPUT_IDS": [2**40]}, "1099511627776"),
    "too many tokens": ({"INPUT_IDS": [5] * 5000}, "at most 4096"),
    "no tokens asked for": ({"TEXT": PUZZLE, "MAX_TOKENS": 0}, "MAX_TOKENS is 0"),
    "a negative count": ({"TEXT": PUZZLE, "MAX_DENOISING_STEPS": -4}, "MAX_DENOISING_STEPS is -4"),
    "more tokens than there is room": ({"TEXT": PUZZLE, "MAX_TOKENS": 2**40}, "MAX_TOKENS"),
    "no number": (b'{"TEXT": "x", "T_MIN": NaN}', "T_MIN is nan"),
    "a negative temperature": ({"TEXT": PUZZLE, "T_MIN": -0.5}, "T_MIN is -0.5"),
    "temperatures the wrong way round": ({"TEXT": PUZZLE, "T_MIN": 0.9, "T_MAX": 0.1}, "T_MAX must be the larger"),
    "no entropy": ({"TEXT": PUZZLE, "ENTROPY_BOUND": 0.0}, "ENTROPY_BOUND"),
    "an empty stop string": ({"TEXT": PUZZLE, "STOP": [""]}, "STOP.0"),
    "too many stop strings": ({"TEXT": PUZZLE, "STOP": ["a"] * 17}, "STOP"),
    "a stop string that is too long": ({"TEXT": PUZZLE, "STOP": "x" * 257}, "STOP.0"),
    # What follows is refused by the server itself.
    "a string for a number": ({"TEXT": PUZZLE, "MAX_TOKENS": "5"}, "integer"),
    "a fraction for a count": ({"TEXT": PUZZLE, "MAX_TOKENS": 1.5}, "integer"),
    "two counts": ({"TEXT": PUZZLE, "MAX_TOKENS": [1, 2]}, "MAX_TOKENS"),
    "a negative seed": ({"TEXT": PUZZLE, "SEED": -1}, "unsigned"),
    "a seed of 65 bits": ({"TEXT": PUZZLE, "SEED": 2**64}, "unsigned"),
    "a text that is null": ({"TEXT": None}, "string"),
    "a batch of texts": ({"TEXT": [PUZZLE, PUZZLE]}, "TEXT"),
    "half a surrogate pair": (b'{"TEXT": "\\ud800"}', "surrogate"),
    "no JSON": (b"{", "JSON"),
    "a list": (b"[]", "object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(server: TritonServer, case: str) -> None:
    body, complaint = REFUSED[case]
    answer = generate(server.http, body)
    assert answer.status_code in (400, 500), answer.text  # 500 is what Triton makes of a body that it cannot read
    assert complaint in answer.json()["error"]
    assert "Traceback" not in answer.text and "Failed to process" not in answer.text
    # And the next one is answered.
    assert reply_of(generate(server.http, {"TEXT": PUZZLE, "SEED": 7})).text == SOLUTION


def test_refusals_over_grpc_leave_the_stream_open(server: TritonServer) -> None:
    with GrpcStream(server.grpc) as stream:
        refusals: list[tuple[dict[str, Any], dict[str, Any], str]] = [
            ({"TEXT": PUZZLE, "MAX_TOKENS": 0}, {}, "MAX_TOKENS is 0"),
            ({"TEXT": b"\xff"}, {}, "TEXT is not UTF-8"),
            ({"TEXT": PUZZLE}, {"parameters": {"n": 2}}, "'n'"),
            ({"TEXT": PUZZLE, "NOPE": "x"}, {}, "NOPE"),
            ({"TEXT": [PUZZLE, PUZZLE]}, {}, "TEXT"),
            ({"TEXT": []}, {}, "TEXT"),
        ]
        for values, options, complaint in refusals:
            stream.send(values, **options)
            with pytest.raises(InferenceServerException, match=complaint):
                stream.next()
        assert stream.infer({"TEXT": PUZZLE, "SEED": 7}).text == SOLUTION


def test_a_refusal_of_ours_is_counted(server: TritonServer) -> None:
    def refused() -> float:
        return server.metric("dgcompile_requests_refused_total", model="sudoku")

    time.sleep(3 * UPDATE_SECONDS)  # earlier tests' refusals have arrived
    before = refused()
    generate(server.http, {"TEXT": PUZZLE, "MAX_TOKENS": 0})
    generate(server.http, {"TEXT": "hello"})
    wait_for(lambda: refused() == before + 2)


def active(server: TritonServer, model: str = "sudoku") -> float:
    return server.metric("dgcompile_active_rows", model=model)


def cancelled(server: TritonServer, model: str = "sudoku") -> float:
    return server.metric("dgcompile_requests_cancelled_total", model=model)


def test_closing_a_grpc_stream_frees_the_row(server: TritonServer) -> None:
    before = cancelled(server)
    stream = GrpcStream(server.grpc)
    stream.send({**LONG, "STREAM": True})
    stream.next()
    wait_for(lambda: active(server) == 1)
    stream.close()
    wait_for(lambda: active(server) == 0 and cancelled(server) == before + 1)


def test_leaving_a_generate_stream_frees_the_row(server: TritonServer) -> None:
    before = cancelled(server)
    with open_stream(server.http, {**LONG, "STREAM": True}) as events:
        next(events)
        wait_for(lambda: active(server) == 1)
    wait_for(lambda: active(server) == 0 and cancelled(server) == before + 1)


def test_an_abandoned_generate_runs_to_its_end(server: TritonServer) -> None:
    # Triton's HTTP front does not read from a connection that waits for its one response, so it does not see it closed.
    def finished() -> float:
        return server.metric("dgcompile_requests_finished_total", model="sudoku")

    time.sleep(3 * UPDATE_SECONDS)  # earlier tests' requests have arrived
    before = finished()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"http://{server.http}/v2/models/sudoku/generate", json={**LONG, "MAX_TOKENS": 400}, timeout=0.3)
    assert finished() == before
    wait_for(lambda: active(server) == 0 and finished() == before + 1)


def relabelled(number: int) -> tuple[str, str]:
    """The puzzle with its digits renamed, and its solution. What these give does not hang on a rounding."""
    digits = str.maketrans("123456", "".join(list(permutations("123456"))[number * 41 % 720]))
    return PUZZLE.translate(digits), SOLUTION.translate(digits)


def test_sixteen_clients_get_what_each_gets_alone(server: TritonServer, pipeline: Pipeline) -> None:
    puzzles = [relabelled(seed)[0] for seed in range(16)]
    prompts = [pipeline.encode([{"role": "user", "content": puzzle}]) for puzzle in puzzles]
    wanted = [expected(pipeline, prompt, seed) for seed, prompt in enumerate(prompts)]
    assert [text for text, _, _ in wanted] == [relabelled(seed)[1] for seed in range(16)]

    def client(seed: int) -> list[tuple[str, list[int], str]]:
        request = {"TEXT": puzzles[seed], "SEED": seed}
        streamed = {**request, "STREAM": True}
        with GrpcStream(server.grpc) as stream:
            by_grpc = [stream.infer(streamed), stream.infer(request)]
        by_http = [reply_of(generate(server.http, request)), generate_stream(server.http, streamed)]
        return [outcome(reply) for reply in by_grpc + by_http]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(client, range(16)))
    assert answers == [[each] * 4 for each in wanted]


def test_one_stream_carries_many_requests_at_once(server: TritonServer) -> None:
    with GrpcStream(server.grpc) as stream:
        for number in range(20):
            stream.send({"TEXT": relabelled(number)[0], "SEED": number})
        texts = {}
        while len(texts) < 20:
            outputs, _ = stream.next()
            texts[outputs["SEED"]] = outputs["TEXT"]
    assert texts == {number: relabelled(number)[1] for number in range(20)}


def test_a_full_queue_is_told_and_a_waiting_request_can_leave(server: TritonServer) -> None:
    def queued() -> float:
        return server.metric("dgcompile_queued_requests", model="narrow")

    before = cancelled(server, "narrow")
    running_one, waiting_one = GrpcStream(server.grpc), GrpcStream(server.grpc)
    running_one.send({**LONG, "STREAM": True}, "narrow")
    running_one.next()
    waiting_one.send(LONG, "narrow")
    wait_for(lambda: queued() == 1)
    answer = generate(server.http, {"TEXT": PUZZLE}, "narrow")
    # The error has the kind "unavailable", of which the generate endpoints of Triton 2.51 make 400, as of any.
    assert answer.status_code == 400
    assert "try again later" in answer.json()["error"]
    # The other model has a batch of its own.
    assert reply_of(generate(server.http, {"TEXT": PUZZLE, "SEED": 7})).text == SOLUTION
    waiting_one.close()
    wait_for(lambda: queued() == 0)
    running_one.close()
    wait_for(lambda: active(server, "narrow") == 0 and cancelled(server, "narrow") == before + 2)
    assert reply_of(generate(server.http, {"TEXT": PUZZLE, "SEED": 7}, "narrow")).text == SOLUTION


def test_rates_fall_to_zero_when_nothing_happens(server: TritonServer) -> None:
    generate(server.http, {"TEXT": PUZZLE})
    wait_for(lambda: server.metric("dgcompile_tokens_per_second", model="sudoku") > 0)
    # They are taken over the last 10 seconds.
    wait_for(lambda: server.metric("dgcompile_tokens_per_second", model="sudoku") == 0)
    assert server.metric("dgcompile_steps_per_second", model="sudoku") == 0


def control(server: TritonServer, action: str, model: str) -> httpx.Response:
    return httpx.post(f"http://{server.http}/v2/repository/models/{model}/{action}", timeout=60)


def ready(server: TritonServer, model: str) -> bool:
    return httpx.get(f"http://{server.http}/v2/models/{model}/ready").status_code == 200


def test_a_model_is_unloaded_and_loaded_while_a_request_runs(server: TritonServer) -> None:
    with GrpcStream(server.grpc) as stream:
        stream.send({**LONG, "MAX_TOKENS": 400, "STREAM": True}, "narrow")
        stream.next()
        assert control(server, "unload", "narrow").status_code == 200
        assert not ready(server, "narrow")
        # Triton lets it finish before it takes the model away.
        last, count = False, 1
        while not last:
            _, last = stream.next()
            count += 1
    assert count == 10
    assert control(server, "load", "narrow").status_code == 200
    assert ready(server, "narrow")
    assert reply_of(generate(server.http, {"TEXT": PUZZLE, "SEED": 7}, "narrow")).text == SOLUTION


def test_a_bundle_that_is_not_there_is_told_to_the_operator(
    server: TritonServer, repository: Path, example_bundle: Path
) -> None:
    write_model(example_bundle, repository, name="lost", bundle_path_there="/nowhere/bundle")
    answer = control(server, "load", "lost")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "/nowhere/bundle: there is no such folder" in error
    assert "--bundle-path" in error
    assert reply_of(generate(server.http, {"TEXT": PUZZLE, "SEED": 7})).text == SOLUTION


def test_a_copied_bundle_is_found_beside_the_model(
    server: TritonServer, repository: Path, example_bundle: Path
) -> None:
    write_model(example_bundle, repository, name="shipped", copy=True, rows=2, threads=1)
    assert control(server, "load", "shipped").status_code == 200
    assert reply_of(generate(server.http, {"TEXT": PUZZLE, "SEED": 7}, "shipped")).text == SOLUTION


GIVES_UP = '''
from dgcompile.serving.triton.model import TritonPythonModel as Model


class TritonPythonModel(Model):
    """Its engine thread ends at the first request with a stop string."""

    def execute(self, requests):
        if any(tensor.name() == "STOP" for request in requests for tensor in request.inputs()):
            self._service.close()
        super().execute(requests)
'''


def test_when_the_engine_has_given_up_every_request_is_told(
    server: TritonServer, repository: Path, example_bundle: Path
) -> None:
    folder = write_model(example_bundle, repository, name="dying", threads=1)
    (folder / "1" / "model.py").write_text(GIVES_UP)
    assert control(server, "load", "dying").status_code == 200
    with GrpcStream(server.grpc) as stream:
        stream.send({**LONG, "STREAM": True}, "dying")
        stream.next()
        for values in ({"TEXT": PUZZLE, "STOP": "x"}, {"TEXT": PUZZLE}, {"TEXT": "bad"}, {"TEXT": PUZZLE}):
            answer = generate(server.http, values, "dying")
            assert answer.status_code == 400
            assert "the service is closed" in answer.text or "refuses the messages" in answer.text
        with pytest.raises(InferenceServerException, match="closed before the answer was complete"):
            while True:
                stream.next()
    assert control(server, "unload", "dying").status_code == 200
    assert reply_of(generate(server.http, {"TEXT": PUZZLE, "SEED": 7})).text == SOLUTION


def test_a_stop_lets_running_requests_finish_and_leaves_nothing(
    installation: Installation, repository: Path, tmp_path: Path
) -> None:
    options = ("--model-control-mode=explicit", "--load-model=sudoku")
    with running(installation, repository, tmp_path / "server.log", options) as server:
        processes = server.processes()
        stream = GrpcStream(server.grpc)
        stream.send({**LONG, "MAX_TOKENS": 200, "STREAM": True})
        stream.next()
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(server.stop)
            canvases, last = 1, False
            while not last:
                _, last = stream.next()
                canvases += 1
            stream.close()  # Triton waits for open streams, too
            assert stopping.result() == 0
        assert canvases == 5
        assert not any(process.is_running() for process in processes)
        assert server.shm_files() == []
