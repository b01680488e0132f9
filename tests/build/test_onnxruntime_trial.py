"""The proof run: graphs that onnxruntime cannot load or run, or that break the contract, are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from dgcompile.build.onnxruntime.trial import oldest_version, read_graph, try_engines
from dgcompile.bundle import GRAPH_FILES, WEIGHTS_FILE, Bundle, GraphRecord
from dgcompile.contract import GraphName
from dgcompile.engine_table import graph_engine_file
from dgcompile.errors import EngineError, TraceError
from dgcompile.progress import Progress


@pytest.fixture
def folder(bundle: Path, tmp_path: Path) -> Path:
    """A copy of a finished bundle whose graphs a test may break."""
    return shutil.copytree(bundle, tmp_path / "bundle")


def failure(folder: Path, bundle: Path) -> str:
    manifest = Bundle.open(bundle).manifest
    with pytest.raises(EngineError) as caught:
        try_engines(folder, manifest.graphs, manifest.spec, "float32", Progress())
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_good_bundle_records_the_library(bundle: Path) -> None:
    import onnxruntime

    manifest = Bundle.open(bundle).manifest
    library = try_engines(bundle, manifest.graphs, manifest.spec, "float32", Progress())
    assert library == manifest.engine
    assert (library.name, library.version) == ("onnxruntime", onnxruntime.__version__)


@pytest.mark.parametrize("graph", ["encoder", "denoiser"])
def test_a_graph_that_cannot_be_loaded_is_named(folder: Path, bundle: Path, graph: GraphName) -> None:
    path = folder / graph_engine_file(graph)
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path.name}: onnxruntime" in failure(folder, bundle)
    path.unlink()
    assert f"{path.name}: onnxruntime" in failure(folder, bundle)


def test_swapped_graphs_are_seen(folder: Path, bundle: Path) -> None:
    engines = folder / "engines"
    (engines / "encoder.onnx").rename(engines / "kept")
    (engines / "denoiser.onnx").rename(engines / "encoder.onnx")
    assert "encoder.onnx: the input input_ids is missing" in failure(folder, bundle)


def test_missing_weights_are_seen(folder: Path, bundle: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(b"")
    assert "encoder.onnx" in failure(folder, bundle)


def test_weights_that_overflow_are_seen(folder: Path, bundle: Path) -> None:
    path = folder / WEIGHTS_FILE
    data = np.fromfile(path, dtype=np.float32)
    data[len(data) // 8 :] = np.nan
    data.tofile(path)
    assert "encoder.onnx: present.0.key holds NaN or infinity" in failure(folder, bundle)


@pytest.mark.parametrize("graph", ["encoder", "denoiser"])
def test_a_traced_graph_that_breaks_the_contract_is_refused(folder: Path, bundle: Path, graph: GraphName) -> None:
    path, spec = folder / GRAPH_FILES[graph], Bundle.open(bundle).spec
    assert read_graph(path, graph, spec, "float32") == Bundle.open(bundle).manifest.graphs[graph]
    model = onnx.load(str(path), load_external_data=False)
    model.graph.output.pop()
    onnx.save(model, str(path))
    with pytest.raises(TraceError, match=rf"{path.name}: its outputs are"):
        read_graph(path, graph, spec, "float32")


@pytest.mark.parametrize(
    ("opset", "ir_version", "oldest"),
    [
        (17, 8, "1.22.0"),
        (21, 10, "1.22.0"),
        (23, 11, "1.22.0"),
        (24, 10, "1.23.0"),
        (21, 12, "1.23.0"),
        (99, 10, "1.32.0"),
        (21, 99, "1.32.0"),
    ],
)
def test_the_oldest_library_follows_from_the_graphs(opset: int, ir_version: int, oldest: str) -> None:
    record = GraphRecord(opsets={"": opset, "dgcompile": 1}, ir_version=ir_version, inputs=(), outputs=())
    assert oldest_version({"encoder": record, "denoiser": record}, "1.32.0") == oldest
