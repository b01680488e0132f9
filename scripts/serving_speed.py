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
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
        self.tokens = 0
        self.error: DgcompileError | None = None
        self.done = threading.Event()

    def is_cancelled(self) -> bool:
        return False

    def on_delta(self, delta: Delta) -> None:
        self.times.append(time.perf_counter())

    def on_finish(self, completion: Completion) -> None:
        self.tokens = len(completion.token_ids)
        self.done.set()

    def on_cancelled(self) -> None:
        raise AssertionError("nobody cancels")

    def on_error(self, error: DgcompileError) -> None:
        self.error = error
        self.done.set()


def ask_service(service: Service, values: dict[str, Any]) -> tuple[list[float], int]:
    """Times of the canvases since the request, and the tokens."""
    waiter, started = Waiter(), time.perf_counter()
    service.submit(GenerateRequest.from_values(values), waiter)
    waiter.done.wait()
    if waiter.error is not None:
        raise waiter.error
    return [moment - started for moment in waiter.times], waiter.tokens


def ask_triton(stream: GrpcStream, values: dict[str, Any]) -> tuple[list[float], int]:
    """The same through gRPC."""
    names = {
        "max_new_tokens": "MAX_TOKENS",
        "max_denoising_steps": "MAX_DENOISING_STEPS",
        "seed": "SEED",
        "prompt": "PROMPT",
    }
    started, times, tokens, last = time.perf_counter(), list[float](), 0, False
    stream.send({names[key]: value for key, value in values.items()} | {"STREAM": True}, MODEL)
    while not last:
        outputs, last = stream.next()
        if outputs:
            times.append(time.perf_counter() - started)
            tokens += len(outputs["TOKEN_IDS"])
    return times, tokens


def measure(ask: Any, makers: list[Any], clients: int, requests: int, canvases: int, length: int) -> dict[str, float]:
    """Throughput of ``clients`` clients, each with its own connection, and the time of a canvas for one alone."""
    times, _ = ask(makers[0], request(0, canvases, length))  # whatever is slow the first time
    alone = []
    for number in range(3):
        times, _ = ask(makers[0], request(number, canvases, length))
        alone.append(times[-1] / len(times))
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        work = [(makers[number % clients], request(number, canvases, length)) for number in range(requests)]
        # A connection is used by one thread at a time: each client takes every clients-th request.
        shares = [work[client::clients] for client in range(clients)]
        answers = list(pool.map(lambda share: [ask(*item) for item in share], shares))
    seconds = time.perf_counter() - started
    tokens = sum(count for share in answers for _, count in share)
    return {"tokens_per_second": tokens / seconds, "canvas_ms": 1e3 * statistics.median(alone), "tokens": tokens}


def serve_in_process(bundle: str, rows: int, threads: int, pipe: Connection, sizes: tuple[int, int, int, int]) -> None:
    """In a process of its own: measures whenever it is asked."""
    service = Service.open(bundle, rows=rows, threads=threads)
    clients, requests, canvases, length = sizes
    pipe.send("ready")
    while pipe.recv() == "measure":
        pipe.send(measure(ask_service, [service] * clients, clients, requests, canvases, length))
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


@click.command(context_settings={"show_default": True})
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
                found["triton"].append(measure(ask_triton, streams, clients, requests, canvases, length))
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
        "ms_per_canvas_added_by_triton": triton["canvas_ms"] - direct["canvas_ms"],
        "turns": found,
    }
    print(json.dumps({key: value for key, value in summary.items() if key != "turns"}, indent=2))
    if result is not None:
        result.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
