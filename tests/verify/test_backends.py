"""Engines against their graphs: on a device of host memory, where an engine is a graph, and with faults put in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from dgcompile.build.tensorrt.graph import engine_table
from dgcompile.bundle import Bundle
from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.errors import RequestError
from dgcompile.progress import Progress
from dgcompile.runtime.weight_loading import load_weights, stored_weights
from dgcompile.verify.backends import (
    OutputReport,
    _judge,
    _pack,
    _unpack,
    compare_backends,
    compare_engines,
    error_bound,
)
from tests.runtime.host_device import HostDevice, HostEngine, lift_weights

pytest.importorskip("polygraphy")

MAX_CONTEXT = 64


def compared(
    bundle: Bundle, faults: dict[str, float], max_batch: int = 2
) -> tuple[tuple[OutputReport, ...], HostDevice]:
    """Compares graphs with engines whose constants named in ``faults`` are multiplied by a factor."""
    device = HostDevice()
    engines: dict[GraphName, HostEngine] = {}
    for graph, file in GRAPH_FILES.items():
        model, lifted = lift_weights(bundle.path / file)
        for initializer in model.graph.initializer:
            if initializer.name in faults:
                changed = onnx.numpy_helper.to_array(initializer) * np.float32(faults[initializer.name])
                initializer.CopyFrom(onnx.numpy_helper.from_array(changed, initializer.name))
        table = engine_table(graph, bundle.spec, "float32", MAX_CONTEXT, max_batch, lifted)
        engines[graph] = HostEngine(device, model, table)
    stored = stored_weights([engine.table for engine in engines.values()], bundle.weights_file)
    weights = load_weights(device, stored, Progress())
    manifest = bundle.manifest.model_copy(update={"max_batch": max_batch, "max_context": MAX_CONTEXT})
    opened = Bundle(bundle.path, manifest, bundle.generation)
    return compare_engines(opened, device, engines, weights, seed=0, progress=Progress()), device


@pytest.fixture(scope="module")
def opened(bundle: Path) -> Bundle:
    return Bundle.open(bundle)


@pytest.mark.parametrize("max_batch", [1, 2])
def test_an_engine_that_is_its_graph_agrees(opened: Bundle, max_batch: int) -> None:
    reports, device = compared(opened, {}, max_batch)
    calls = list(dict.fromkeys(report.call for report in reports))
    assert calls == ["encoder call 1", "encoder call 2", "denoiser step 1", "denoiser step 2"]
    assert device.counts["engine"] == 4
    assert {report.output for report in reports if report.call == calls[2]} == {
        "next_canvas_ids",
        "argmax_ids",
        "next_self_conditioning",
        "accepted",
        "entropy",
    }
    assert all(report.ok and report.error < 1e-5 for report in reports)


@pytest.mark.parametrize(
    ("weight", "call"),
    [
        ("model.decoder.layers.0.self_attn.k_norm.weight", "encoder call 1"),
        # The encoder does without the last layer's experts.
        ("model.decoder.layers.2.post_feedforward_layernorm_2.weight", "denoiser step 1"),
        # The signal is zero in the first step, so its fault shows in the second.
        ("model.decoder.self_conditioning.down_proj.weight", "denoiser step 2"),
    ],
)
def test_a_fault_is_found_where_it_first_matters(opened: Bundle, weight: str, call: str) -> None:
    reports, _ = compared(opened, {weight: 1.5})
    failed = [report.call for report in reports if not report.ok]
    assert failed and failed[0] == call


def test_an_engine_that_gives_nan_fails(opened: Bundle) -> None:
    reports, _ = compared(opened, {"model.decoder.layers.0.input_layernorm.weight": float("nan")})
    assert not any(report.ok for report in reports if report.output == "next_self_conditioning")


def test_a_cpu_bundle_has_no_engine_to_compare(bundle: Path) -> None:
    with pytest.raises(RequestError, match=r"runs its graphs as they are; expected a bundle for a GPU; .*--against"):
        compare_backends(bundle)


def test_acceptance_and_canvas_are_judged_by_the_engines_own_entropies() -> None:
    entropy = np.array([[0.05, 0.2, 0.01, 3.0]], dtype=np.float32)
    feed = {"entropy_bound": np.array([0.1], dtype=np.float32), "noise_ids": np.array([[7, 7, 7, 7]], dtype=np.int32)}
    accepted = np.array([[True, True, True, False]])
    canvas = np.array([[1, 2, 3, 7]], dtype=np.int32)
    given = {"entropy": entropy, "accepted": accepted, "next_canvas_ids": canvas}

    def error(name: str, changed: np.ndarray) -> float:
        return _judge("step", name, given, {**given, name: changed}, feed, 0.1).error

    assert error("accepted", accepted) == 0 and error("next_canvas_ids", canvas) == 0
    assert error("accepted", ~accepted) == 1
    assert error("next_canvas_ids", np.array([[1, 2, 3, 4]], dtype=np.int32)) == 1
    assert error("entropy", entropy * np.float32(1.5)) == pytest.approx(0.5, rel=1e-3)


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    import torch

    values = np.random.default_rng(0).standard_normal(10000).astype(np.float32)
    values = np.concatenate([values, np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 3e38], dtype=np.float32)])
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(_unpack(_pack(values, "bfloat16"), "bfloat16"), expected)


def test_the_bound_is_far_from_a_broken_engine(opened: Bundle) -> None:
    # Two unrelated results of equal size differ by the square root of two.
    deep = opened.spec.model_copy(update={"layers": opened.spec.layers * 10})
    assert error_bound(opened.spec) < 0.15 and error_bound(deep) < 0.5
