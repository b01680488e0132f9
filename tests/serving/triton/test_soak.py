"""A thousand short requests of sixteen clients, some malformed, some cancelled: right answers, and nothing grows."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from dgcompile.runtime.pipeline import Pipeline
from dgcompile.serving.triton.metrics import UPDATE_SECONDS
from dgcompile.serving.triton.repository import write_model
from tests.serving.triton.clients import GrpcStream, Reply, generate, generate_stream, open_stream, reply_of
from tests.serving.triton.server import Installation, TritonServer, running

pytestmark = pytest.mark.triton_server

REQUESTS = 1000
CLIENTS = 16
WARM = 200
"""Requests after which memory is measured first: until then buffers and threads are made."""

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""The server's 60 threads would otherwise each fill a heap of their own, which takes thousands of requests and looks
like a leak: 3,000 requests took 107 MB more than one heap does, and then nothing more."""

MODEL = "random"
PROMPTS = [[5 + number, 40, 41, 42 + number] * (1 + 3 * number) for number in range(6)]
LENGTHS = (16, 12, 40)
"""Tokens asked for: a canvas, less than one, three."""

GOOD = {"INPUT_IDS": PROMPTS[0], "MAX_TOKENS": 16}

MALFORMED: list[dict[str, Any] | bytes] = [
    {},
    b"{",
    b'{"PROMPT": "\xff\xfe"}',
    {**GOOD, "PROMPT": "two"},
    {**GOOD, "MAX_TOKENS": 0},
    {**GOOD, "MAX_TOKENS": 2**40},
    {**GOOD, "max_tokens": 16},
    {**GOOD, "T_MIN": 2.0, "T_MAX": 1.0},
    {**GOOD, "STOP": [""]},
    {**GOOD, "SEED": -1},
    {"INPUT_IDS": [2**40]},
    {"INPUT_IDS": [5] * 20_000},
    {"MESSAGES": "[" * 50_000},
    {"MESSAGES": '[{"role": 1}]'},
    {"TEXT": ["a", "b"]},
]


@dataclass
class Tally:
    """What the clients saw."""

    wrong: list[str] = field(default_factory=list)
    right: int = 0
    refused: int = 0
    cancelled: int = 0
    memory: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def good_request(number: int) -> dict[str, Any]:
    return {"INPUT_IDS": PROMPTS[number % 6], "SEED": number % 4, "MAX_TOKENS": LENGTHS[number % 3]}


def rss(server: TritonServer) -> int:
    """Memory of the server and its python backend, in bytes."""
    return sum(process.memory_info().rss for process in server.processes())


def ask(server: TritonServer, stream: GrpcStream, number: int) -> Reply:
    """A good request, each in another way."""
    request = good_request(number)
    way = number // 7 % 4
    if way == 0:
        return reply_of(generate(server.http, request, MODEL))
    if way == 1:
        return generate_stream(server.http, {**request, "STREAM": True}, MODEL)
    return stream.infer({**request, "STREAM": way == 2}, MODEL)


def malform(server: TritonServer, stream: GrpcStream, number: int) -> bool:
    """A malformed request; whether it was refused."""
    body = MALFORMED[number // 10 % len(MALFORMED)]
    if number % 20 == 3 or isinstance(body, bytes) or "SEED" in body or "max_tokens" in body or not body:
        return "error" in generate(server.http, body, MODEL).json()
    try:
        stream.infer(body, MODEL)
    except InferenceServerException:
        return True
    return False


def leaves_early(number: int) -> bool:
    """Whether a client that cancels does not wait for a canvas: its request may never have reached the model."""
    return number % 60 == 27


def cancel(server: TritonServer, number: int) -> None:
    """A long request whose client leaves after the first canvas, or before it."""
    request = {"INPUT_IDS": PROMPTS[1], "SEED": number, "MAX_TOKENS": 3000, "STREAM": True}
    if number % 40 == 7:
        with open_stream(server.http, request, MODEL) as events:
            next(events)
        return
    with GrpcStream(server.grpc) as own:
        own.send(request, MODEL)
        if leaves_early(number):
            time.sleep(0.05)
        else:
            own.next()


def work(
    server: TritonServer, tally: Tally, wanted: dict[int, tuple[str, list[int]]], client: int, warm: threading.Barrier
) -> None:
    """One client: every sixteenth request. All pause when they are warm, so that memory is measured at rest."""
    with GrpcStream(server.grpc) as stream:
        for number in range(3, 10 * 2 * len(MALFORMED), 10):  # the largest buffers are made now
            assert malform(server, stream, number)
        for number in range(client, REQUESTS, CLIENTS):
            if number - CLIENTS < WARM <= number:
                warm.wait(timeout=60)
            if number % 10 == 3:
                refused = malform(server, stream, number)
                outcome = "refused" if refused else f"{number}: not refused"
            elif number % 20 == 7:
                cancel(server, number)
                outcome = "cancelled"
            else:
                reply = ask(server, stream, number)
                right = (reply.text, reply.token_ids) == wanted[number % 12]
                outcome = "right" if right else f"{number}: {reply.token_ids}, not {wanted[number % 12][1]}"
            with tally.lock:
                if outcome in ("right", "refused", "cancelled"):
                    setattr(tally, outcome, getattr(tally, outcome) + 1)
                else:
                    tally.wrong.append(outcome)


def test_soak(installation: Installation, bundle: Path, tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    write_model(bundle, repository, name=MODEL, rows=8, threads=1)
    pipeline = Pipeline.open(bundle, threads=1)
    wanted = {}
    for number in range(12):
        request = good_request(number)
        config = pipeline.bundle.generation.replace(max_new_tokens=request["MAX_TOKENS"])
        result = pipeline.generate([request["INPUT_IDS"]], config, [request["SEED"]])[0]
        wanted[number] = (pipeline.decode(result.token_ids), result.token_ids)

    tally = Tally()
    with running(installation, repository, tmp_path / "server.log", environment=ONE_ARENA) as server:
        started = time.monotonic()
        warm = threading.Barrier(CLIENTS, action=lambda: tally.memory.append(rss(server)))
        with ThreadPoolExecutor(CLIENTS) as pool:
            for client in [pool.submit(work, server, tally, wanted, client, warm) for client in range(CLIENTS)]:
                client.result()
        tally.memory.append(rss(server))
        seconds = time.monotonic() - started
        growth = tally.memory[1] / tally.memory[0] - 1
        print(f"{REQUESTS} requests in {seconds:.1f} s, memory {tally.memory}, growth {growth:.2%}")

        assert tally.wrong == []
        assert (tally.right, tally.refused, tally.cancelled) == (850, 100, 50)
        assert server.alive
        time.sleep(4 * UPDATE_SECONDS)
        assert server.metric("dgcompile_active_rows", model=MODEL) == 0
        assert server.metric("dgcompile_queued_requests", model=MODEL) == 0
        # A few whose clients left have come to their end before, and a few have not come to the model at all.
        finished = server.metric("dgcompile_requests_finished_total", model=MODEL)
        cancelled = server.metric("dgcompile_requests_cancelled_total", model=MODEL)
        unsure = sum(leaves_early(number) for number in range(7, REQUESTS, 20))
        assert 850 <= finished <= 860
        assert 900 - unsure <= finished + cancelled <= 900
        assert server.metric("dgcompile_requests_failed_total", model=MODEL) == 0
        assert reply_of(generate(server.http, good_request(0), MODEL)).token_ids == wanted[0][1]
        assert growth < 0.02
        processes: list[psutil.Process] = server.processes()
        assert server.stop() == 0, server.log_text()
        assert not any(process.is_running() for process in processes)
        assert server.shm_files() == []
