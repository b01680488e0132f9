"""The CPU session: buffers are bound where they lie, and graphs that are not the model's are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from dgcompile.errors import BundleError, EngineError, RequestError
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from dgcompile.runtime.session import Batch
from tests.runtime.toy_model import CANVAS, toy_spec, write_toy_graphs


def started(session: OnnxRuntimeSession, rows: int = 3) -> Batch:
    """A batch with two tokens in every row, at the start of a canvas."""
    batch = session.new_batch(rows, 20)
    session.encode(batch, np.full((rows, 2), 4, dtype=np.int32), np.full(rows, 2, dtype=np.int32))
    batch.start_canvas(np.arange(rows * CANVAS, dtype=np.int32).reshape(rows, CANVAS) % 32)
    batch.entropy_bound.fill(0.1)
    return batch


def test_the_cache_is_read_where_it_lies(toy_session: OnnxRuntimeSession) -> None:
    """After the first steps of a batch, changes to its arrays reach the engine without another binding."""
    batch = started(toy_session)
    toy_session.denoise(batch, 0, 2)
    toy_session.denoise(batch, 0, 2)
    bindings = dict(batch.bindings)
    assert len(bindings) == 2  # one per direction between the two copies of canvas and self-conditioning

    results = []
    for changed in (False, True):
        batch.start_canvas(np.zeros((3, CANVAS), dtype=np.int32))
        if changed:
            batch.cache.values[1][1, 0] += 1
        for _ in range(6):
            toy_session.denoise(batch, 0, 2)
        results.append(batch.argmax_ids.copy())
    assert batch.bindings == bindings
    assert np.array_equal(results[0][[0, 2]], results[1][[0, 2]])
    assert not np.array_equal(results[0][1], results[1][1])


def test_results_and_next_inputs_change_places(toy_session: OnnxRuntimeSession) -> None:
    batch = started(toy_session)
    read, written = batch.self_conditioning, batch.next_self_conditioning
    assert not read.any()
    toy_session.denoise(batch, 0, 2)
    assert batch.self_conditioning is written
    assert batch.next_self_conditioning is read
    assert (written[..., 0] == 1).all()  # the toy model counts its steps there
    assert not read.any()


def test_rows_outside_the_range_are_not_touched(toy_session: OnnxRuntimeSession) -> None:
    together, batch = started(toy_session), started(toy_session)
    for each in (together, batch):
        generator = np.random.default_rng(3)
        toy_session.encode(each, generator.integers(0, 32, (2, 3), dtype=np.int32), np.array([3, 1], dtype=np.int32))
        each.uniform[:] = generator.random((3, CANVAS))
        each.noise_ids[:] = generator.integers(0, 32, (3, CANVAS))
        each.temperature[:] = [0.2, 0.4, 0.9]
        each.entropy_bound[:] = [0.1, 5.0, 1.5]
    toy_session.denoise(together, 0, 2)
    untouched = [array[[0, 2]].copy() for array in _results(batch)]
    toy_session.denoise(batch, 1, 1)
    for array, other, before in zip(_results(batch), _results(together), untouched, strict=True):
        assert np.array_equal(array[1], other[1])
        assert np.array_equal(array[[0, 2]], before)
        assert not np.array_equal(other[1], other[2])


def _results(batch: Batch) -> list[np.ndarray]:
    # By buffer, not by role: the canvas that was written has become the current one.
    return [batch.argmax_ids, batch.entropy, batch.accepted, batch._canvas_ids[1], batch._self_conditioning[1]]


def test_padding_never_reaches_the_cache(toy_session: OnnxRuntimeSession) -> None:
    batch = toy_session.new_batch(2, 20)
    ids = np.array([[1, 2, 3], [9, 0, 0]], dtype=np.int32)
    toy_session.encode(batch, ids, np.array([3, 1], dtype=np.int32))
    assert batch.cache.past_length.tolist() == [3, 1]
    assert batch.cache.values[0][1, :, 0, 0].tolist() == [9, 0, 0, 0, 0, 0, 0, 0]
    # The toy encoder gives 100003 for padding.
    assert all(array.max() < 100003 for array in (*batch.cache.keys, *batch.cache.values))


def test_another_canvas_length_is_refused(toy_session: OnnxRuntimeSession, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"canvas of 5 tokens.*expected 6"):
        toy_session.new_batch(1, 20).start_canvas(np.zeros((1, 5), dtype=np.int32))
    write_toy_graphs(tmp_path, toy_spec(canvas_length=5))
    with pytest.raises(BundleError, match=r"denoiser.onnx: the input canvas_ids is .* \['batch', 5\]; expected .* 6\]"):
        OnnxRuntimeSession(tmp_path, toy_spec(), 128)


def test_a_graph_of_another_model_is_refused(tmp_path: Path) -> None:
    write_toy_graphs(tmp_path)
    model = onnx.load(tmp_path / "engines" / "encoder.onnx")
    del model.graph.output[1]
    onnx.save(model, tmp_path / "engines" / "encoder.onnx")
    with pytest.raises(BundleError, match=r"encoder.onnx: the output present.0.value is missing"):
        OnnxRuntimeSession(tmp_path, toy_spec(), 128)


def test_a_damaged_graph_is_an_engine_error(tmp_path: Path) -> None:
    write_toy_graphs(tmp_path)
    (tmp_path / "engines" / "denoiser.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match=r"denoiser.onnx: onnxruntime .* cannot load it"):
        OnnxRuntimeSession(tmp_path, toy_spec(), 128)
    (tmp_path / "engines" / "encoder.onnx").unlink()
    with pytest.raises(BundleError, match=r"encoder.onnx: no such file"):
        OnnxRuntimeSession(tmp_path, toy_spec(), 128)


def test_an_engine_that_fails_is_an_engine_error(toy_session: OnnxRuntimeSession) -> None:
    batch = started(toy_session)
    batch.cache.keys[0] = batch.cache.keys[0][:, :, :, :0]  # a cache of another shape
    with pytest.raises(EngineError, match=r"encoder.onnx: onnxruntime failed"):
        toy_session.encode(batch, np.ones((3, 1), dtype=np.int32), np.ones(3, dtype=np.int32))


@pytest.mark.parametrize("threads", [0, -2])
def test_threads_below_one_are_refused(toy_folder: Path, threads: int) -> None:
    with pytest.raises(RequestError, match=f"threads is {threads}"):
        OnnxRuntimeSession(toy_folder, toy_spec(), 128, threads=threads)
