"""Loading an engine: what the library is asked for, what becomes of its refusals, and its cache of kernels."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dgcompile.engine_table import EngineTable
from dgcompile.errors import EngineError
from dgcompile.runtime.tensorrt_engine import TensorRTEngine, _logger

TABLE = EngineTable.model_validate(
    {
        "graph": "denoiser",
        "tensors": [
            {"name": "x", "mode": "input", "dtype": "bfloat16", "shape": ["batch", 4]},
            {"name": "table", "mode": "input", "dtype": "int8", "shape": [7], "parts": ["table"]},
            {"name": "y", "mode": "output", "dtype": "int32", "shape": ["batch", 4]},
        ],
    }
)


class FakeCache:
    """A runtime cache that takes what begins with "ours"."""

    def __init__(self) -> None:
        self.content = b"new"

    def deserialize(self, blob: bytes) -> bool:
        if not blob.startswith(b"ours"):
            return False
        self.content = blob
        return True

    def serialize(self) -> bytes:
        return self.content


class FakeContext:
    def __init__(self) -> None:
        self.said: list[Any] = []
        self.works = True

    def set_device_memory(self, address: int, nbytes: int) -> None:
        self.said.append((address, nbytes))

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return shape[0] < 3

    def set_tensor_address(self, name: str, address: int) -> bool:
        return address % 256 == 0

    def execute_async_v3(self, stream: int) -> bool:
        self.said.append(stream)
        return self.works


class FakeConfig:
    """TensorRT's own: no compilation on this machine."""

    strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy


class FakeRtxConfig(FakeConfig):
    def create_runtime_cache(self) -> FakeCache:
        return FakeCache()

    def set_runtime_cache(self, cache: FakeCache) -> None:
        self.cache = cache


class FakeEngine:
    device_memory_size_v2 = 1234
    tensors = (
        ("x", "BF16", (-1, 4), "in"),
        ("table", "INT8", (7,), "in"),
        ("y", "INT32", (-1, 4), "out"),
    )

    def __init__(self, config: Any) -> None:
        self.config = config
        self.num_io_tensors = len(self.tensors)

    def _find(self, name: str) -> Any:
        return next(tensor for tensor in self.tensors if tensor[0] == name)

    def get_tensor_name(self, index: int) -> str:
        return self.tensors[index][0]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self._find(name)[1])

    def get_tensor_shape(self, name: str) -> Any:
        return self._find(name)[2]

    def get_tensor_mode(self, name: str) -> str:
        return str(self._find(name)[3])

    def create_runtime_config(self) -> Any:
        return self.config

    def create_execution_context(self, runtime_config: Any) -> FakeContext:
        assert runtime_config is self.config
        return FakeContext()


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO = range(4)


TRT: Any = SimpleNamespace(
    __name__="tensorrt_rtx",
    __version__="9.9",
    ILogger=ILogger,
    TensorIOMode=SimpleNamespace(INPUT="in"),
    ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user"),
    DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
    CudaGraphStrategy=SimpleNamespace(DISABLED="disabled"),
)


class Plugins:
    problem: EngineError | None = None

    def check(self) -> None:
        if self.problem:
            raise self.problem


class Loader:
    """Makes engines of one bundle folder."""

    def __init__(self, folder: Path) -> None:
        self.file, self.cache = folder / "denoiser.engine", folder / "cache" / "denoiser.kernels"
        self.file.write_bytes(b"an engine")
        self.logger, self.plugins = _logger(TRT), Plugins()
        self.engine: Any = FakeEngine(FakeRtxConfig())

    def deserialize_cuda_engine(self, content: Any) -> Any:
        assert bytes(content) == b"an engine"
        return self.engine

    def load(self, table: EngineTable = TABLE) -> TensorRTEngine:
        return TensorRTEngine(TRT, self, self.logger, self.plugins, self.file, table, self.cache)


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


def test_a_context_gets_memory_shapes_and_addresses(loader: Loader) -> None:
    engine = loader.load()
    config = loader.engine.config
    assert (config.strategy, config.cuda_graph_strategy) == ("user", "disabled")
    assert config.dynamic_shapes_kernel_specialization_strategy == "eager"
    context = engine.new_context(512)
    context.set_shape("x", (2, 4))
    context.set_address("x", 512)
    context.enqueue(7)
    inner: FakeContext = context._context
    assert inner.said == [(512, engine.workspace_bytes), 7]
    assert context.is_capturable(7)


def test_refusals_are_errors_with_the_librarys_words(loader: Loader) -> None:
    context = loader.load().new_context(0)
    loader.logger.log(ILogger.INFO, "chatter")
    loader.logger.log(ILogger.ERROR, "out of\nthe profile")
    with pytest.raises(EngineError, match=r"x cannot have the shape \[3, 4\]: out of the profile$"):
        context.set_shape("x", (3, 4))
    with pytest.raises(EngineError, match="x cannot lie at 0x1: it did not say why"):
        context.set_address("x", 1)
    context._context.works = False
    with pytest.raises(EngineError, match=r"denoiser.engine failed to run"):
        context.enqueue(7)
    # A plugin's own error says more.
    loader.plugins.problem = EngineError("a plugin failed: no such kernel")
    with pytest.raises(EngineError, match="no such kernel"):
        context.enqueue(7)


def test_an_engine_that_the_library_refuses(loader: Loader) -> None:
    loader.engine = None
    loader.logger.log(ILogger.ERROR, "made for another device")
    with pytest.raises(EngineError, match=r"tensorrt_rtx 9.9 refuses it: made for another device; build the bundle"):
        loader.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "z"}, "denoiser.engine: y is in only one of it and engines/denoiser.tensors.json|z is in only one"),
        ({"dtype": "float32"}, r"y is INT32 \[-1, 4\]; expected output FLOAT \[-1, 4\]"),
        ({"shape": ("batch", 5)}, r"expected output INT32 \[-1, 5\]"),
        ({"mode": "input"}, "expected input INT32"),
    ],
)
def test_an_engine_that_is_not_its_tables(loader: Loader, change: dict[str, Any], message: str) -> None:
    tensors = (*TABLE.tensors[:-1], TABLE.tensors[-1].model_copy(update=change))
    with pytest.raises(EngineError, match=message):
        loader.load(EngineTable(graph="denoiser", tensors=tensors))


def test_kernels_are_kept_for_the_next_start(loader: Loader) -> None:
    loader.load().save_kernels()
    assert loader.cache.read_bytes() == b"new"
    loader.cache.write_bytes(b"ours, of last time")
    loader.load()
    assert loader.engine.config.cache.content == b"ours, of last time"


def test_caches_that_are_no_use_are_ignored(loader: Loader, tmp_path: Path) -> None:
    loader.cache.parent.mkdir()
    for content in (b"", b"another machine's"):
        loader.cache.write_bytes(content)
        engine = loader.load()
        assert loader.engine.config.cache.content == b"new"
    engine.save_kernels()
    assert loader.cache.read_bytes() == b"new"
    # A link may lead anywhere, and a bundle comes from anywhere.
    (tmp_path / "elsewhere").write_bytes(b"ours, it says")
    loader.cache.unlink()
    loader.cache.symlink_to(tmp_path / "elsewhere")
    loader.load()
    assert loader.engine.config.cache.content == b"new"


def test_a_bundle_that_cannot_be_written_to_runs(loader: Loader) -> None:
    engine = loader.load()
    loader.cache.parent.write_text("no folder")
    engine.save_kernels()
    loader.cache.parent.unlink()
    loader.cache.parent.symlink_to(loader.file.parent.parent)
    engine.save_kernels()
    assert not (loader.file.parent.parent / loader.cache.name).exists()


def test_tensorrt_without_compilation_on_the_machine(loader: Loader) -> None:
    loader.engine = FakeEngine(FakeConfig())
    engine = loader.load()
    engine.save_kernels()
    assert not loader.cache.exists()


def test_the_library_has_what_is_called() -> None:
    """The stand-ins above must not know names that the library does not."""
    pytest.importorskip("tensorrt_rtx")
    trt: Any = import_module("tensorrt_rtx")
    for theirs, ours in (
        (trt.ICudaEngine, FakeEngine),
        (trt.IExecutionContext, FakeContext),
        (trt.IRuntimeConfig, FakeRtxConfig),
        (trt.IRuntimeConfig, FakeConfig),
        (trt.IRuntimeCache, FakeCache),
        (trt.Runtime, Loader),
    ):
        used = {name for name in vars(ours) if not name.startswith("_")} - {"tensors", "strategy", "load"}
        assert [name for name in used if not hasattr(theirs, name)] == []
    for name in ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy"):
        assert hasattr(trt.IRuntimeConfig, name)
    assert hasattr(trt.IExecutionContext, "is_stream_capturable") and hasattr(trt.ICudaEngine, "num_io_tensors")
    assert trt.TensorIOMode.INPUT and trt.ExecutionContextAllocationStrategy.USER_MANAGED
    assert trt.DynamicShapesKernelSpecializationStrategy.EAGER is not None
    assert trt.CudaGraphStrategy.DISABLED is not None
    logger = _logger(trt)
    logger.log(trt.ILogger.WARNING, "heard")
    assert logger.said() == "heard"
    trt.Runtime(logger)
