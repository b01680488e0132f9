"""What the loop allocates (numpy tells tracemalloc): nothing of the cache's size, neither in a step nor in a canvas."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.kv_cache import SWAP_BYTES, KVCache
from dgcompile.runtime.loop import CPU_ENCODE_CHUNK, generate
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from dgcompile.runtime.session import Batch
from tests.runtime.test_loop import WatchedSession
from tests.runtime.test_scheduler import Request, serve
from tests.runtime.toy_model import CANVAS, VOCAB, toy_spec

STEP_BYTES = 64 << 10
"""A step allocates its random numbers, some copies of a canvas, and Python's small things: a few kilobytes here."""

CAPACITY = 400_000
CACHE_BYTES = 2 * 4 * 2 * CAPACITY  # two numbers for a token in the full layer's keys and as many in its values


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture(scope="module")
def roomy_session(toy_folder: Path) -> OnnxRuntimeSession:
    return OnnxRuntimeSession(toy_folder, toy_spec(), max_context=CAPACITY, threads=1)


class MeteredSession(WatchedSession):
    """A real session that notes how much memory was allocated at most since its last call."""

    def __init__(self, session: OnnxRuntimeSession) -> None:
        super().__init__(session)
        self.of_steps: list[int] = []
        self.of_canvases: list[int] = []
        self._before: int | None = None

    def new_batch(self, rows: int, capacity: int) -> Batch:
        """A batch with all the room there is, whatever the request needs."""
        return super().new_batch(rows, self.max_context)

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        self._start()  # of the prompt: making the batch is not counted
        super().encode(batch, input_ids, input_length, first)
        self._note(self.of_canvases)

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        super().denoise(batch, first, last)
        self._note(self.of_steps)

    def _start(self) -> None:
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]

    def _note(self, noted: list[int]) -> None:
        assert self._before is not None
        noted.append(tracemalloc.get_traced_memory()[1] - self._before)
        self._start()


CONFIG = GenerationConfig(max_new_tokens=4 * CANVAS, max_denoising_steps=5, stability_threshold=None, eos_token_ids=())


@pytest.mark.usefixtures("traced")
def test_neither_a_step_nor_a_canvas_allocates_what_a_cache_takes(roomy_session: OnnxRuntimeSession) -> None:
    session = MeteredSession(roomy_session)
    batch = session.new_batch(2, CAPACITY)
    assert sum(array.nbytes for array in (*batch.cache.keys, *batch.cache.values)) > 2 * CACHE_BYTES
    generate(session, [[1, 2, 3], [4]], CONFIG, [0, 1])
    assert (len(session.of_steps), len(session.of_canvases)) == (20, 4)
    assert 0 < max(session.of_steps) < STEP_BYTES
    assert 0 < max(session.of_canvases) < STEP_BYTES


@pytest.mark.usefixtures("traced")
def test_an_encoder_call_allocates_for_its_new_tokens_only(roomy_session: OnnxRuntimeSession) -> None:
    session = MeteredSession(roomy_session)
    batch = session.new_batch(1, CAPACITY)
    counts = [500, 3000, 3000, 500]
    for count in counts:
        session.encode(batch, np.ones((1, count), dtype=np.int32), np.array([count], dtype=np.int32))
    # The tokens as a list, which this test's session keeps, are pointers to one small integer.
    new = [count * (2 * 4 * 4 + 8) for count in counts]  # four numbers for a token in keys and in values
    assert all(0 <= found - least < STEP_BYTES for found, least in zip(session.of_canvases, new, strict=True))


@pytest.mark.usefixtures("traced")
def test_two_rows_change_places_without_a_copy_of_either() -> None:
    cache = KVCache(toy_spec(), 2, CAPACITY, np.float32)
    cache.past_length[:] = CAPACITY, 17
    cache.keys[1][0, :, 0, 0] = np.arange(CAPACITY)
    cache.keys[1][1, :17, 0, 0] = -1
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    cache.swap_rows(0, 1)
    # A piece and the one before it.
    assert tracemalloc.get_traced_memory()[1] - before < 2 * SWAP_BYTES + STEP_BYTES < CACHE_BYTES / 8
    assert cache.past_length.tolist() == [17, CAPACITY]
    assert np.array_equal(cache.keys[1][1, :, 0, 0], np.arange(CAPACITY))
    assert (cache.keys[1][0, :17, 0, 0] == -1).all()


def test_no_token_is_encoded_twice(roomy_session: OnnxRuntimeSession) -> None:
    """The prompt chunk by chunk, each canvas but the last once: alone, beside others, and in a server."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(VOCAB, size=size).tolist() for size in (2 * CPU_ENCODE_CHUNK + 9, 3, CPU_ENCODE_CHUNK)]
    committed = CONFIG.max_new_tokens - CANVAS
    for group in (prompts[:1], prompts):
        watched = WatchedSession(roomy_session)
        results = generate(watched, group, CONFIG, range(len(group)))
        assert [len(result.token_ids) for result in results] == [CONFIG.max_new_tokens] * len(group)
        assert sum(len(row) for call in watched.encoded for row in call) == sum(len(p) + committed for p in group)
        longest = max(group, key=len)
        of_longest = [token for call in watched.encoded for token in call[0]]
        assert of_longest == [*longest, *results[group.index(longest)].token_ids[:committed]]

    requests = [Request(prompt, CONFIG, seed) for seed, prompt in enumerate(prompts)]
    _, watched = serve(roomy_session, [(3 * place, request) for place, request in enumerate(requests)], rows=2)
    assert [len(request.token_ids) for request in requests] == [CONFIG.max_new_tokens] * 3
    assert sum(len(row) for call in watched.encoded for row in call) == sum(len(p) + committed for p in prompts)
