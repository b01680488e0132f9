"""The GPU session on a device of host memory: the same tokens as the CPU session, whatever the batch."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcompile import gpu
from dgcompile.build.tensorrt.graph import engine_table
from dgcompile.bundle import Bundle, StageRecord
from dgcompile.contract import GRAPH_FILES
from dgcompile.engine_table import EngineTable, graph_engine_file
from dgcompile.errors import BundleError, EngineError, RequestError
from dgcompile.gpu import Card, Gpus
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.runtime import tensorrt_session
from dgcompile.runtime.device_batch import download
from dgcompile.runtime.loop import StepEvent, encode_prompts, generate
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.runtime.scheduler import Scheduler
from dgcompile.runtime.session import Batch
from dgcompile.runtime.tensorrt_session import MIN_NEW_TOKENS, TensorRTSession
from dgcompile.safetensors_file import lay_out
from dgcompile.target import Target
from tests.runtime.host_device import HostContext, HostDevice, HostEngine, lift_weights
from tests.runtime.test_loop import CONFIG, expected, summary
from tests.runtime.test_scheduler import REQUESTS, ArrivalSession, Request, run
from tests.runtime.toy_model import CANVAS, VOCAB, toy_spec

MAX_CONTEXT = 200


def stand_in_engines(
    device: HostDevice,
    folder: Path,
    spec: ModelSpec,
    max_batch: int,
    max_context: int,
    tables: dict[Any, EngineTable] | None = None,
) -> dict[Any, HostEngine]:
    """Both engines over the graphs in ``folder``; ``tables`` replace their tables."""
    engines: dict[Any, HostEngine] = {}
    for graph, file in GRAPH_FILES.items():
        model, lifted = lift_weights(folder / file)
        table = engine_table(graph, spec, "float32", max_context, max_batch, lifted)
        engines[graph] = HostEngine(device, model, (tables or {}).get(graph, table))
    return engines


def opened(
    folder: Path,
    spec: ModelSpec,
    weights_file: Path,
    *,
    max_batch: int,
    max_context: int,
    free: int = 1 << 40,
    progress: Progress | None = None,
    tables: dict[Any, EngineTable] | None = None,
    use_graphs: bool = True,
) -> TensorRTSession:
    """A session over the graphs in ``folder``; ``session._device`` and ``session._engines`` are the stand-ins."""
    device = HostDevice(free)
    engines = stand_in_engines(device, folder, spec, max_batch, max_context, tables)
    return TensorRTSession(spec, max_context, max_batch, device, engines, weights_file, progress, use_graphs=use_graphs)


@pytest.fixture(scope="module")
def no_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    file.write_bytes(lay_out(file, {})[0])
    return file


@pytest.fixture(scope="module")
def toy(toy_folder: Path, no_weights: Path) -> TensorRTSession:
    return opened(toy_folder, toy_spec(), no_weights, max_batch=3, max_context=128)


@pytest.fixture(scope="module")
def real_bundle(bundle: Path) -> Bundle:
    return Bundle.open(bundle)


@pytest.fixture(scope="module")
def real(real_bundle: Bundle) -> TensorRTSession:
    return opened(real_bundle.path, real_bundle.spec, real_bundle.weights_file, max_batch=3, max_context=MAX_CONTEXT)


class PaddedSession(OnnxRuntimeSession):
    """The CPU session with calls of the GPU session's shapes: products of other shapes round differently."""

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        length = input_ids.shape[1]
        padded = max(MIN_NEW_TOKENS, 2 ** int(np.ceil(np.log2(length))))
        super().encode(batch, np.pad(input_ids, ((0, 0), (0, padded - length))), input_length, first)

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        super().denoise(batch, 0, last)


@pytest.fixture(scope="module")
def traced(real_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traced graphs in the place of the CPU's engines: they are what the stand-in for the GPU runs too."""
    folder = tmp_path_factory.mktemp("traced")
    shutil.copyfile(real_bundle.weights_file, folder / real_bundle.weights_file.name)
    for graph in GRAPH_FILES:
        place = folder / graph_engine_file(graph)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(real_bundle.graph_file(graph), place)
    return folder


@pytest.fixture(scope="module")
def cpu(real_bundle: Bundle, traced: Path) -> OnnxRuntimeSession:
    return OnnxRuntimeSession(traced, real_bundle.spec, MAX_CONTEXT, threads=1)


@pytest.fixture(scope="module")
def padded(real_bundle: Bundle, traced: Path) -> OnnxRuntimeSession:
    return PaddedSession(traced, real_bundle.spec, MAX_CONTEXT, threads=1)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    changes=st.fixed_dictionaries(
        {
            "max_new_tokens": st.integers(1, 4 * CANVAS),
            "max_denoising_steps": st.integers(1, 9),
            "stability_threshold": st.sampled_from([None, 0, 1, 3]),
            "eos_token_ids": st.sampled_from([(), (3,), (3, 17, 30)]),
            "entropy_bound": st.sampled_from([0.0001, 0.1, 2.0]),
        }
    ),
)
def test_every_batch_gives_every_row_its_own_right_answer(
    toy: TensorRTSession, prompts: list[list[int]], seed: int, changes: dict[str, object]
) -> None:
    """The toy model's answers tell any wrong slot, buffer or random number; groups of more than 3 rows are split."""
    config = CONFIG.replace(**changes)
    seeds = [seed + index for index in range(len(prompts))]
    results = generate(toy, prompts, config, seeds)
    assert [summary(result) for result in results] == [
        expected(prompt, config, seed) for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def real_prompts(spec: ModelSpec, lengths: Sequence[int]) -> list[list[int]]:
    generator = np.random.default_rng(sum(lengths))
    return [generator.integers(3, spec.vocab_size - 3, length).tolist() for length in lengths]


@pytest.mark.parametrize("lengths", [[1], [23], [24], [40], [97], [5, 30, 70], [60, 9, 9]])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_tokens_are_those_of_the_cpu_session(
    real: TensorRTSession,
    cpu: OnnxRuntimeSession,
    padded: OnnxRuntimeSession,
    real_bundle: Bundle,
    lengths: list[int],
    seed: int,
) -> None:
    """Prompts shorter and longer than the window of 24 tokens, whose ring wraps; three canvases. Not a bit differs."""
    prompts = real_prompts(cpu.spec, lengths)
    config, seeds = real_bundle.generation, [seed + index for index in range(len(lengths))]
    assert config.max_new_tokens == 3 * cpu.spec.canvas_length and cpu.spec.sliding_window == 24
    events: tuple[list[StepEvent], list[StepEvent]] = ([], [])
    results = [
        generate(session, prompts, config, seeds, collected.append)
        for session, collected in zip((real, padded), events, strict=True)
    ]
    assert results[0] == results[1] == generate(cpu, prompts, config, seeds)
    for one, other in zip(*events, strict=True):
        assert (one.rows, one.canvas, one.step) == (other.rows, other.canvas, other.step)
        for name in ("argmax_ids", "next_canvas_ids", "accepted", "entropy", "converged"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_rows_finish_at_different_times(real: TensorRTSession, padded: OnnxRuntimeSession, real_bundle: Bundle) -> None:
    """The first row ends in the second canvas and is dropped, so that another row takes its place."""
    prompts = real_prompts(padded.spec, [31, 30, 29])
    endless = real_bundle.generation.replace(eos_token_ids=())
    texts = [result.token_ids for result in generate(padded, prompts, endless, [1, 2, 3])]
    length = padded.spec.canvas_length
    eos = next(token for token in texts[0][length : 2 * length] if token not in texts[0][:length] + texts[1] + texts[2])
    config = endless.replace(eos_token_ids=(eos,))
    results = generate(real, prompts, config, [1, 2, 3])
    assert results == generate(padded, prompts, config, [1, 2, 3])
    assert [result.finish_reason for result in results] == ["eos", "length", "length"]
    assert [len(result.steps_per_canvas) for result in results] == [2, 3, 3]


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 30), REQUESTS), min_size=1, max_size=8),
    rows=st.integers(1, 3),
    overhead=st.sampled_from([0.0, 1.0]),
)
def test_requests_that_come_and_go_get_what_they_get_alone(
    toy: TensorRTSession, arrivals: list[tuple[int, Request]], rows: int, overhead: float
) -> None:
    """Rows change places, the encoder begins in the middle of the batch. No row of the toy's window is aligned."""
    gc.collect()  # the batch of the example before frees its buffers
    run(ArrivalSession(toy, arrivals), rows, overhead)
    for _, request in arrivals:
        ids, reason, steps = expected(request.prompt, request.config, request.seed)
        if request.ends[0] in ("cancelled", "stop"):
            assert request.token_ids == ids[: CANVAS * len(request.canvases)]
        else:
            assert request.answer == (ids, reason, steps)


@pytest.mark.parametrize("scratch", [64, 1000, 1 << 20])
def test_the_scheduler_gets_the_tokens_of_the_cpu_session(
    real: TensorRTSession,
    padded: OnnxRuntimeSession,
    real_bundle: Bundle,
    scratch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not a bit differs, with rings that wrap, whether rows change places whole or, for want of memory, in pieces."""
    gc.collect()
    monkeypatch.setattr(real._present, "nbytes", min(scratch, real._present.nbytes))
    assert real.new_batch(2, MAX_CONTEXT).cache.may_begin_with(
        1
    )  # so the encoder begins with other rows than the first
    gc.collect()
    config = real_bundle.generation
    prompts = real_prompts(padded.spec, [31, 5, 60, 1, 24, 47])
    answers = []
    for session in (real, padded):
        requests = [Request(prompt, config, seed) for seed, prompt in enumerate(prompts)]
        run(ArrivalSession(session, [(3 * place, request) for place, request in enumerate(requests)]))
        answers.append([request.answer for request in requests])
    assert answers[0] == answers[1]


def test_warming_up_runs_every_step_as_a_graph(toy_folder: Path, no_weights: Path) -> None:
    """So that no request waits for a capture; the rows are empty afterwards."""
    session = opened(toy_folder, toy_spec(), no_weights, max_batch=3, max_context=128)
    device: Any = session._device
    scheduler = Scheduler(session, rows=3, queue_limit=1)
    scheduler.warm_up()
    assert device.counts["capture"] == 3 * 2
    assert scheduler.encoder_overhead >= 0
    assert not scheduler._batch.cache.past_length.any()
    session.denoise(scheduler._batch, 0, 1)
    assert device.counts["capture"] == 3 * 2


def test_a_step_is_one_graph(toy_folder: Path, no_weights: Path) -> None:
    """One upload, one replay, one download, one wait; a graph for each direction; captured after a warm-up."""
    session = opened(toy_folder, toy_spec(), no_weights, max_batch=2, max_context=64)
    device: Any = session._device
    batch = session.new_batch(2, 20)
    session.encode(batch, np.full((2, 2), 4, dtype=np.int32), np.full(2, 2, dtype=np.int32))
    batch.start_canvas(np.zeros((2, CANVAS), dtype=np.int32))
    for _ in range(4):
        session.denoise(batch, 0, 1)
    assert (device.counts["capture"], device.counts["replay"]) == (2, 2)
    before = dict(device.counts)
    session.denoise(batch, 0, 1)
    done = {name: count - before[name] for name, count in device.counts.items() if count != before[name]}
    assert done == {"upload": 1, "download": 1, "replay": 1, "synchronise": 1}
    session.denoise(batch, 0, 0)  # one row: another graph
    assert device.counts["capture"] == 2
    engine: Any = session._engines["denoiser"]
    assert engine.saved == 1  # not while nothing new was compiled
    without = opened(toy_folder, toy_spec(), no_weights, max_batch=2, max_context=64, use_graphs=False)
    assert generate(without, [[5]], CONFIG, [0]) == generate(session, [[5]], CONFIG, [0])
    counts: Any = without._device
    assert counts.counts["capture"] == 0


def test_buffers_are_used_again_when_their_batch_is_gone(toy_folder: Path, no_weights: Path) -> None:
    session = opened(toy_folder, toy_spec(), no_weights, max_batch=2, max_context=64)
    device: Any = session._device
    allocated = dict(device.allocated)
    assert generate(session, [[1, 2]] * 2, CONFIG, [0, 1]) == generate(session, [[1, 2]] * 2, CONFIG, [0, 1])
    gc.collect()
    first = session.new_batch(1, 20)
    assert device.allocated == allocated
    second = session.new_batch(1, 20)
    assert device.allocated["cache"] == 2 * allocated["cache"]
    assert first.state is not second.state
    del first, second
    gc.collect()
    for _ in range(2):
        generate(session, [[3], [4]], CONFIG, [0, 1])
        gc.collect()
    captured = device.counts["capture"]
    generate(session, [[3], [4]], CONFIG, [0, 1])
    assert device.counts["capture"] == captured  # graphs stay with their buffers
    assert device.allocated["cache"] == 2 * allocated["cache"]


def test_the_cache_is_that_of_the_cpu_session(real: TensorRTSession, cpu: OnnxRuntimeSession) -> None:
    """Whatever the chunks; and padding, which NaN follows here, is nowhere."""
    prompts = [np.array(prompt, dtype=np.int32) for prompt in real_prompts(cpu.spec, [61, 24, 5])]
    for chunk in (512, 24, 13):
        batches = [session.new_batch(3, MAX_CONTEXT) for session in (real, cpu)]
        for session, batch in zip((real, cpu), batches, strict=True):
            encode_prompts(session, batch, prompts, chunk)
        mine, theirs = batches[0].cache, batches[1].cache
        assert mine.past_length.tolist() == theirs.past_length.tolist() == [61, 24, 5]
        for layer in range(len(cpu.spec.layers)):
            for one, other in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                for row, past in enumerate([61, 24, 5]):
                    slots = [position % one[layer].shape[1] for position in range(past)]
                    np.testing.assert_allclose(one[layer][row, slots], other[layer][row, slots], rtol=1e-3, atol=1e-4)
                assert np.isfinite(one[layer]).all()
        del batches, batch


def test_new_tokens_are_written_in_place_where_nothing_reads(toy_folder: Path, no_weights: Path) -> None:
    """One row, no padding, no wrap; what does not fit that goes through scratch."""
    session = opened(toy_folder, toy_spec(), no_weights, max_batch=2, max_context=64)
    device: Any = session._device
    batch = session.new_batch(1, 64)

    def copies(length: int) -> int:
        before = device.counts["copy"]
        session.encode(batch, np.full((1, length), 4, dtype=np.int32), np.array([length], dtype=np.int32))
        return int(device.counts["copy"] - before)

    # 32 tokens overflow the ring of 8 slots (one piece), and lie in place in the full layer.
    assert copies(32) == 1
    # 5 tokens are padded to 16, so nothing is written in place.
    assert copies(5) == 2
    # The next 5 wrap in the ring of 8 slots.
    assert copies(5) == 3
    assert batch.cache.past_length.tolist() == [42]


def test_weights_are_loaded_once_for_both_engines(real: TensorRTSession, real_bundle: Bundle) -> None:
    device: Any = real._device
    names = {tensor.name for engine in real._engines.values() for tensor in engine.table.weights}
    assert set(real._weights) == names and any("experts" in str(name) for name in names)
    everything = sum(size for name, size in device.allocated.items() if name == "weights")
    assert everything < 1.1 * real_bundle.weights_file.stat().st_size
    bound: Any = [context for engine in real._engines.values() for context in engine.contexts]
    for name in names:
        assert len({context._addresses[name] for context in bound if name in context._addresses}) == 1


def test_what_does_not_fit_is_refused(toy: TensorRTSession) -> None:
    with pytest.raises(RequestError, match="a batch of 4 rows was asked for; expected at most 3"):
        toy.new_batch(4, 10)
    with pytest.raises(RequestError, match="a batch of 129 tokens was asked for; expected at most 128"):
        toy.new_batch(1, 129)
    batch = toy.new_batch(1, 10)
    with pytest.raises(RequestError, match="made for 10 tokens but a row would hold 11"):
        toy.encode(batch, np.zeros((1, 11), dtype=np.int32), np.array([11], dtype=np.int32))
    assert batch.cache.past_length.tolist() == [0]
    with pytest.raises(RequestError, match="canvas of 5 tokens"):
        batch.start_canvas(np.zeros((1, 5), dtype=np.int32))


def test_too_little_memory_is_said_with_all_sizes(toy_folder: Path, no_weights: Path) -> None:
    with pytest.raises(EngineError, match=r"free.*expected .* GB \(weights .* GB, cache .* GB, new tokens .*workspace"):
        opened(toy_folder, toy_spec(), no_weights, max_batch=2, max_context=64, free=1000)


def test_engines_of_another_model_are_refused(toy_folder: Path, no_weights: Path) -> None:
    spec = toy_spec()
    options: dict[str, Any] = {"max_batch": 2, "max_context": 64}
    whole = engine_table("encoder", spec, "float32", 64, 2, {})
    for tensors, message in (
        (whole.tensors[:-1], r"encoder.tensors.json: present.1.value is missing"),
        (
            (whole.tensors[0].model_copy(update={"dtype": "float32"}), *whole.tensors[1:]),
            r"input_ids is input float32 .*expected input int32",
        ),
    ):
        with pytest.raises(BundleError, match=message):
            opened(
                toy_folder,
                spec,
                no_weights,
                tables={"encoder": EngineTable(graph="encoder", tensors=tensors)},
                **options,
            )
    small = engine_table("denoiser", spec, "float32", 63, 2, {})
    with pytest.raises(
        BundleError, match=r"past_key_values.1.key was built for shapes up to \[2, 63, 2, 1\]; expected"
    ):
        opened(toy_folder, spec, no_weights, tables={"denoiser": small}, **options)


@pytest.mark.parametrize("drop", [True, False])
def test_a_session_that_is_closed_or_dropped_frees_the_device(toy_folder: Path, no_weights: Path, drop: bool) -> None:
    session = opened(toy_folder, toy_spec(), no_weights, max_batch=1, max_context=64)
    device: Any = session._device
    batch = session.new_batch(1, 10)
    if not drop:
        session.close()
        assert device.closed
        return
    del session
    gc.collect()
    assert not device.closed  # the batch's arrays are the device's memory
    del batch
    gc.collect()
    assert device.closed


def test_a_session_that_cannot_be_made_frees_the_device(real_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    target, device = Target.load("rtx5090"), HostDevice()
    manifest = real_bundle.manifest.model_copy(update={"target": target, "max_batch": 2})
    card = Card(0, "RTX 5090", "12.0", 32 << 30, 170)
    monkeypatch.setattr(gpu, "query_gpus", lambda: Gpus((13, 0), None, (card,), None))
    monkeypatch.setattr(tensorrt_session, "CudaDevice", lambda found, extra: device)

    def refused(bundle: Bundle, progress: Progress | None) -> Any:
        raise EngineError("the library refuses it")

    monkeypatch.setattr(tensorrt_session, "open_engines", refused)
    with pytest.raises(EngineError, match="refuses it"):
        TensorRTSession.open(replace(real_bundle, manifest=manifest))
    assert device.closed


def test_steps_that_cannot_be_captured_run_without_graphs(
    toy_folder: Path, no_weights: Path, toy: TensorRTSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = generate(toy, [[5], [6]], CONFIG, [0, 1])

    def fail(enqueue: Any) -> object:
        raise EngineError("operation not permitted when stream is capturing")

    for attribute, replacement, message in (
        ("capture", fail, "without a CUDA graph, which is slower: operation not permitted"),
        ("is_capturable", lambda self, stream: False, "slower: the engine says that it cannot"),
    ):
        session = opened(toy_folder, toy_spec(), no_weights, max_batch=2, max_context=64)
        device: Any = session._device
        monkeypatch.setattr(device if attribute == "capture" else HostContext, attribute, replacement)
        with pytest.warns(RuntimeWarning, match=message) as warned:
            assert generate(session, [[5], [6]], CONFIG, [0, 1]) == wanted
        assert len(warned) == 1
        assert device.counts["replay"] == 0
        engine: Any = session._engines["encoder"]
        assert engine.saved > 0


def test_a_pipeline_runs_a_gpu_bundle_where_its_gpu_is(
    real_bundle: Bundle, cpu: OnnxRuntimeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the GPU and TensorRT is real."""
    target = Target.load("rtx5090")
    stages = {**real_bundle.manifest.stages, "kernels": StageRecord()}
    changes = {"target": target, "stages": stages, "max_batch": 2, "max_context": MAX_CONTEXT}
    manifest = real_bundle.manifest.model_copy(update=changes)
    gpu_bundle = replace(real_bundle, manifest=manifest)
    monkeypatch.setattr(Bundle, "open", lambda path, progress=None: gpu_bundle)
    nothing = Gpus(None, None, (), "this machine has no NVIDIA driver")
    monkeypatch.setattr(gpu, "query_gpus", lambda: nothing)
    with pytest.raises(BundleError, match=r"no NVIDIA driver; expected a GPU of compute capability 12\.0"):
        Pipeline.open(real_bundle.path)

    card = Card(1, "RTX 5090", "12.0", 32 << 30, 170)
    monkeypatch.setattr(gpu, "query_gpus", lambda: Gpus((13, 0), None, (card,), None))
    device = HostDevice()

    def on_host(found: Card, extra: str) -> HostDevice:
        assert (found, extra) == (card, "rtx5090")
        return device

    monkeypatch.setattr(tensorrt_session, "CudaDevice", on_host)
    stand_ins = stand_in_engines(device, real_bundle.path, real_bundle.spec, 2, MAX_CONTEXT)
    monkeypatch.setattr(tensorrt_session, "open_engines", lambda bundle, progress: stand_ins)
    pipeline = Pipeline.open(real_bundle.path)
    assert isinstance(pipeline.session, TensorRTSession)
    prompts = [pipeline.encode(text) for text in ("one", "a second prompt", "and a third, longer than the others")]
    assert pipeline.generate(prompts) == generate(cpu, prompts, real_bundle.generation, [0, 1, 2])
    assert device.counts["replay"] > 0


def test_bfloat16_becomes_float32_for_comparisons() -> None:
    device = HostDevice()
    address = device.allocate(8, "numbers")
    host = device.allocate_host(8)
    host.view(np.uint16)[:] = [0x3F80, 0xC040, 0x0000, 0x7F80]
    device.upload(address, host)
    assert download(device, address, "bfloat16", (2, 2)).tolist() == [[1.0, -3.0], [0.0, np.inf]]
