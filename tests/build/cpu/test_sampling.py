"""The streamed sampler against the traced one, for vocabularies of one chunk, of many, and of no whole blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dgcompile.build.onnxruntime import sampling
from dgcompile.build.onnxruntime.sampling import chunk_of
from dgcompile.trace.sampler import block_size
from tests.build.cpu.rewritten import run
from tests.build.cpu.sampler_model import CANVAS, OUTPUTS, SOFTCAP, WIDTH, Tail, streamed


def inputs_of(vocab: int, rows: int, sharpness: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "canvas_ids": np.zeros((rows, CANVAS), np.int32),
        "hidden": (sharpness * rng.standard_normal((rows, CANVAS, WIDTH))).astype(np.float32),
        "temperature": rng.uniform(0.4, 0.8, rows).astype(np.float32),
        "entropy_bound": rng.uniform(0, 3, rows).astype(np.float32),
        "uniform": rng.random((rows, CANVAS), dtype=np.float32),
        "noise_ids": rng.integers(vocab, size=(rows, CANVAS), dtype=np.int32),
    }


@pytest.mark.parametrize(("vocab", "largest"), [(300, 4096), (512, 64), (512, 4096), (480, 96), (1021, 64)])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 12.0])
def test_equals_the_traced_sampler(
    vocab: int, largest: int, sharpness: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "chunk_of", lambda size: chunk_of(size, largest))
    rng = np.random.default_rng(vocab)
    table = rng.standard_normal((vocab, WIDTH), dtype=np.float32)
    model = streamed(table, tmp_path)
    inputs = inputs_of(vocab, 3, sharpness, rng)
    actual = dict(zip(OUTPUTS, run(model, tmp_path, inputs), strict=True))

    tail = Tail(vocab)
    tail.table.data = torch.from_numpy(table)
    with torch.no_grad():
        expected = dict(zip(OUTPUTS, tail(*(torch.from_numpy(array) for array in inputs.values())), strict=True))
    for name in ("argmax_ids", "accepted"):
        np.testing.assert_array_equal(actual[name], expected[name].numpy(), err_msg=name)
    # A draw may fall on the other side of a boundary that lies within rounding: of these 36 positions one at most.
    assert (actual["next_canvas_ids"] != expected["next_canvas_ids"].numpy()).mean() < 0.03
    # Entropy: log and quotient of sums of V terms. Soft embeddings: a mean of unit-size rows, times 4.
    np.testing.assert_allclose(actual["entropy"], expected["entropy"].numpy(), atol=1e-5)
    np.testing.assert_allclose(
        actual["next_self_conditioning"], expected["next_self_conditioning"].numpy(), atol=2e-5, rtol=1e-5
    )


def test_an_entropy_keeps_its_digits_where_a_position_is_nearly_certain(tmp_path: Path) -> None:
    """Sums are relative to the largest logit, as in the traced sampler: nothing cancels."""
    vocab = 512
    table = np.zeros((vocab, WIDTH), np.float32)
    table[:, 0] = -1.0
    table[137, 0] = 1.0
    model = streamed(table, tmp_path)
    inputs = inputs_of(vocab, 1, 0.0, np.random.default_rng(0))
    inputs["hidden"][..., 0] = np.linspace(4, 12, CANVAS)
    inputs["temperature"][:] = 0.5
    actual = dict(zip(OUTPUTS, run(model, tmp_path, inputs), strict=True))
    gap = 2 * SOFTCAP * np.tanh(inputs["hidden"][0, :, 0].astype(np.float64) / SOFTCAP) / 0.5
    rest = (vocab - 1) * np.exp(-gap)
    expected = np.log1p(rest) + rest / (1 + rest) * gap
    # What is lost is the logarithm of a sum that rounds to one: a part in 1 + gap, at gaps from 16 to 48.
    np.testing.assert_allclose(actual["entropy"][0], expected, rtol=0.07)
    assert (actual["argmax_ids"] == 137).all()


@pytest.mark.parametrize(("vocab", "chunk"), [(262144, 4096), (32768, 4096), (64, 64), (300, 300), (1021, 1021)])
def test_chunks_are_whole_blocks(vocab: int, chunk: int) -> None:
    assert chunk_of(vocab) == chunk
    assert vocab % chunk == 0 and (chunk == vocab or chunk % block_size(vocab) == 0)
