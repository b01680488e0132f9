"""A running server for tests, and what its answers must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from openai import OpenAI

from dgcompile.runtime.pipeline import Pipeline
from dgcompile.serving.openai.front import Front
from dgcompile.serving.openai.server import Server, bind, url
from dgcompile.serving.service import Service

MODEL = "tiny"
CHAT = [{"role": "user", "content": "Hello"}]

ENDLESS: dict[str, Any] = {"t_min": 1e5, "t_max": 2e5, "max_denoising_steps": 10_000}
"""Options of an answer that takes longer than any test: so hot, no canvas ever settles."""


@dataclass(frozen=True)
class Served:
    """A server that runs in this process."""

    url: str
    front: Front
    service: Service
    pipeline: Pipeline
    http: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def client(self, **options: Any) -> OpenAI:
        """The official client, which tries once."""
        return OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "unused", "max_retries": 0, "timeout": 60.0, **options}
        )

    def post(self, path: str, **options: Any) -> httpx.Response:
        """A request as bytes."""
        return self.http.post(f"{self.url}{path}", **options)

    def expected(self, prompt: str | list[int] | list[dict[str, Any]], seed: int, **options: Any) -> tuple[str, int]:
        """Text and number of tokens that the pipeline gives for it, alone and without a server."""
        ids = prompt if prompt and isinstance(prompt[0], int) else self.pipeline.encode(prompt)  # type: ignore[arg-type]
        config = self.pipeline.bundle.generation.replace(**options)
        result = self.pipeline.generate([ids], config, [seed])[0]  # type: ignore[list-item]
        return self.pipeline.decode(result.token_ids), len(result.token_ids)

    def settles(self, condition: Callable[[], bool], seconds: float = 20) -> bool:
        """Waits until a condition holds."""
        end = time.monotonic() + seconds
        while not (holds := condition()) and time.monotonic() < end:
            time.sleep(0.01)
        return holds

    def is_idle(self) -> bool:
        """Whether no row holds a request and none waits."""
        now = self.service.statistics()
        return now.active_rows == now.queued == 0


@contextmanager
def serving(
    bundle: Path, *, rows: int | None = None, queue_limit: int = 256, grace: float = 0.2, **front: Any
) -> Iterator[Served]:
    """Serves a bundle on a free port; the end waits ``grace`` seconds for running answers."""
    listener = bind("127.0.0.1", 0)
    state = Front(**{"model_name": MODEL, **front})
    with httpx.Client(timeout=60) as http, Server(state, listener, grace=grace):
        state.service = Service.open(bundle, rows=rows, queue_limit=queue_limit, threads=1)
        yield Served(url(listener), state, state.service, Pipeline.open(bundle, threads=1), http)
