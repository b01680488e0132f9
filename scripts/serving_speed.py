"""What a batch gains and what Triton Inference Server costs: the same requests one after another, in a batch, and in a
batch behind Triton, in turns.

    python scripts/serving_speed.py BUNDLE --json result.json

All run the same bundle with the same threads, each in a process of its own. Give it a bundle whose steps take
50 ms or more, so that what is measured is not the noise: `--make` writes one (random weights, a minute).
The server is the one that the tests fetch. The figures are this machine's; nothing asserts them.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import click

# The server's fixture belongs to the tests, which are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dgcompile.build import build
from dgcompile.bundle import Bundle
from dgcompile.errors import DgcompileError
from dgcompile.recipe import Recipe
from dgcompile.serving.request import GenerateRequest
from dgcompile.serving.service import Completion, Delta, Service
from dgcompile.serving.triton.repository import write_model
from dgcompile.target import Target
from tests.serving.triton.clients import GrpcStream
from tests.serving.triton.server import TritonServer, install

MODEL = "measured"
ALONE = 10
"""Requests of one client alone, in each measurement."""

# Some 30 ms for a row and 200 ms for eight, on one core.
SHAPE = (
    "--layers sff --hidden 256 --intermediate 512 --head-dim 32 --full-head-dim 64 --experts 16 --moe-intermediate 128 "
)
SHAPE += "--vocab 2048 --canvas 64 --window 128 --sharpness 5"


def request(number: int, canvases: int, length: int) -> dict[str, Any]:
    """One request; each canvas takes all its steps, so that both sides do the same work."""
    return {
        "max_new_tokens": canvases * length,
        "max_denoising_steps": 4,
        "seed": number,
        "prompt": f"Request {number}",
    }


class Waiter:
    """A listener that notes when each canvas came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.completion: Completion | None = None
        self.error: DgcompileError | None = None
        self.done = threading.Event()

    def is_cancelled(self) -> bool:
        return False

    def on_delta(self, delta: Delta) -> None:
        self.times.append(time.perf_counter())

    def on_finish(self, completion: Completion) -> None:
        self.completion = completion
        self.done.set()

    def on_cancelled(self) -> None:
        raise AssertionError("nobody cancels")

    def on_error(self, error: DgcompileError) -> None:
        self.error = error
        self.done.set()


class Answer(NamedTuple):
    """What a client saw.

    Attributes:
        times: seconds from the request to each canvas.
        tokens: generated.
        inside_ms: milliseconds from the request to the end, by the service's own clock.
    """

    times: list[float]
    tokens: int
    inside_ms: float

    @property
    def outside_ms(self) -> float:
        """Milliseconds that the client waited and the service did not have the request: the way there and back."""
        return 1e3 * self.times[-1] - self.inside_ms


def ask_service(service: Service, values: dict[str, Any]) -> Answer:
    """One request, straight to the service."""
    waiter, started = Waiter(), time.perf_counter()
    service.submit(GenerateRequest.from_values(values), waiter)
    waiter.done.wait()
    if waiter.completion is None:
        raise waiter.error or AssertionError("no answer and no error")
    times = [moment - started for moment in waiter.times]
    return Answer(times, len(waiter.completion.token_ids), waiter.completion.usage.total_ms)


def ask_triton(stream: GrpcStream, values: dict[str, Any]) -> Answer:
    """The same through gRPC."""
    names = {
        "max_new_tokens": "MAX_TOKENS",
        "max_denoising_steps": "MAX_DENOISING_STEPS",
        "seed": "SEED",
        "prompt": "PROMPT",
    }
    started, times, tokens, inside, last = time.perf_counter(), list[float](), 0, 0.0, False
    stream.send({names[key]: value for key, value in values.items()} | {"STREAM": True}, MODEL)
    while not last:
        outputs, last = stream.next()
        if outputs:
            times.append(time.perf_counter() - started)
            tokens += len(outputs["TOKEN_IDS"])
            inside = outputs.get("TOTAL_MS", 0.0)
    return Answer(times, tokens, inside)


def measure(
    ask: Callable[[Any, dict[str, Any]], Answer],
    ends: Sequence[Any],
    requests: int,
    canvases: int,
    length: int,
) -> dict[str, float]:
    """Clients at once, each with its own of ``ends``, and one alone.

    Returns:
        tokens_per_second of all clients; for one alone, medians of canvas_ms, the time of a canvas, and outside_ms.
    """
    alone = [ask(ends[0], request(number, canvases, length)) for number in range(ALONE)]
    work = [request(number, canvases, length) for number in range(requests)]
    started = time.perf_counter()
    with ThreadPoolExecutor(len(ends)) as pool:
        # A connection is used by one thread: each client takes every so many-th request.
        shares = [(end, work[client :: len(ends)]) for client, end in enumerate(ends)]
        answers = list(pool.map(lambda share: [ask(share[0], values) for values in share[1]], shares))
    seconds = time.perf_counter() - started
    return {
        "tokens_per_second": sum(answer.tokens for share in answers for answer in share) / seconds,
        "canvas_ms": statistics.median(1e3 * answer.times[-1] / len(answer.times) for answer in alone),
        "outside_ms": statistics.median(answer.outside_ms for answer in alone),
    }


def serve_in_process(bundle: str, rows: int, threads: int, pipe: Connection, sizes: tuple[int, int, int, int]) -> None:
    """In a process of its own: measures whenever it is asked."""
    service = Service.open(bundle, rows=rows, threads=threads)
    clients, requests, canvases, length = sizes
    pipe.send("ready")
    while pipe.recv() == "measure":
        pipe.send(measure(ask_service, [service] * clients, requests, canvases, length))
    service.close()


class InProcess:
    """A service in a process of its own."""

    def __init__(self, bundle: Path, rows: int, threads: int, sizes: tuple[int, int, int, int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=serve_in_process, args=(str(bundle), rows, threads, there, sizes))
        self._process.start()
        self._pipe.recv()

    def measure(self) -> dict[str, float]:
        """Runs the requests once."""
        self._pipe.send("measure")
        found: dict[str, float] = self._pipe.recv()
        return found

    def end(self) -> None:
        """Ends the process."""
        self._pipe.send("end")
        self._process.join()


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.option("--make", is_flag=True, help="Write a bundle of suitable size to BUNDLE first.")
@click.option("--rows", default=8, help="Rows of the batch.")
@click.option("--threads", default=1, help="Threads of the engine: the rest is the server's and the clients'.")
@click.option("--clients", default=16, help="Clients at once.")
@click.option("--requests", default=96, help="Requests of a measurement.")
@click.option("--canvases", default=3, help="Canvases of a request.")
@click.option("--turns", default=5, help="Measurements of each.")
@click.option("--json", "result", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures there.")
def main(
    bundle: Path,
    make: bool,
    rows: int,
    threads: int,
    clients: int,
    requests: int,
    canvases: int,
    turns: int,
    result: Path | None,
) -> None:
    """Measure BUNDLE with one row, with several, and behind Triton, in turns."""
    with tempfile.TemporaryDirectory() as scratch:
        if make:
            checkpoint = Path(scratch) / "checkpoint"
            subprocess.run(
                [sys.executable, Path(__file__).with_name("random_checkpoint.py"), checkpoint, *SHAPE.split()],
                check=True,
            )
            build(checkpoint, Target.load("cpu"), Recipe.load("fp32"), bundle)
        length = Bundle.open(bundle).spec.canvas_length
        repository = Path(scratch) / "repository"
        write_model(bundle, repository, name=MODEL, rows=rows, threads=threads)
        sizes = (clients, requests, canvases, length)
        sides = {name: InProcess(bundle, count, threads, sizes) for name, count in (("serial", 1), ("batch", rows))}
        server = TritonServer(install(), repository, Path(scratch) / "log")
        streams = [GrpcStream(server.grpc) for _ in range(clients)]
        found: dict[str, list[dict[str, float]]] = {"serial": [], "batch": [], "triton": []}
        try:
            for _ in range(turns):
                for name, side in sides.items():
                    found[name].append(side.measure())
                found["triton"].append(measure(ask_triton, streams, requests, canvases, length))
        finally:
            for stream in streams:
                stream.close()
            server.stop()
            for side in sides.values():
                side.end()
    medians = {
        side: {key: statistics.median(turn[key] for turn in turns_) for key in turns_[0]}
        for side, turns_ in found.items()
    }
    serial, direct, triton = medians["serial"], medians["batch"], medians["triton"]
    summary = {
        "rows": rows,
        "threads": threads,
        "clients": clients,
        "requests": requests,
        "canvases": canvases,
        "steps_per_canvas": 4,
        "step_ms_of_one_row": round(direct["canvas_ms"] / 4, 2),
        "medians": medians,
        "batch_over_serial": direct["tokens_per_second"] / serial["tokens_per_second"],
        "throughput_lost_by_triton": 1 - triton["tokens_per_second"] / direct["tokens_per_second"],
        # What a stream's canvas waits for besides the service; the request's way there is in it too.
        "ms_added_by_triton": triton["outside_ms"] - direct["outside_ms"],
        "turns": found,
    }
    print(json.dumps({key: value for key, value in summary.items() if key != "turns"}, indent=2))
    if result is not None:
        result.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
