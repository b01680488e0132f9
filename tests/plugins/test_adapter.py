"""The plugins as the engine library calls them at run time, with a driver that writes down what it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: NO plugin is tried")

import tensorrt_rtx as trt

from dgcompile.errors import EngineError
from dgcompile.plugins import adapter
from dgcompile.plugins.cuda_launch import LoadedKernels
from dgcompile.plugins.kernel_library import KernelLibrary
from tests.plugins.test_cuda_launch import (
    ATTENTION,
    MULTIPROCESSORS,
    STREAM,
    RecordingDriver,
    attention_tensors,
    check_launches,
    write_library,
)

SHAPES = [attention_tensors(1, 32, 1024), attention_tensors(2, 32, 1024), attention_tensors(8, 512, 1024)]
TYPES = {"bf16": trt.DataType.BF16, "i32": trt.DataType.INT32}


@pytest.fixture
def library(tmp_path: Path) -> KernelLibrary:
    empty = KernelLibrary(tmp_path, 120, "", "", {})
    plans = [ATTENTION.plan(shape, empty, MULTIPROCESSORS) for shape in SHAPES]
    steps = {step.key: step for plan in plans for step in plan.launches}
    return write_library(tmp_path, list(steps.values()))


@pytest.fixture
def registration(library: KernelLibrary) -> Iterator[adapter.PluginRegistration]:
    registered = adapter.register_plugins(trt, library, MULTIPROCESSORS)
    driver = RecordingDriver()
    driver.parameters = {record.entry: record.parameters for record in library.records.values()}
    registered.__dict__["kernels"] = LoadedKernels(library, driver)  # instead of the real driver
    yield registered
    for creator in adapter._registered.pop(trt.__name__).creators:
        trt.get_plugin_registry().deregister_creator(creator)


_arrays: list[Any] = []  # fields only point at their values


def attention_fields(**changes: Any) -> Any:
    fields, *arrays = adapter._make_fields(trt, {"scale": 0.5, "window": 1024, "causal": 1, **changes})
    _arrays.append(arrays)
    return fields


def described(tensors: dict[str, Any]) -> list[Any]:
    return [SimpleNamespace(dims=tensor.shape, type=TYPES[tensor.type]) for tensor in tensors.values()]


def loaded(registration: adapter.PluginRegistration) -> Any:
    """A plugin as an execution context has it: built, serialised, deserialised, attached."""
    creator = registration.creators[0]
    built = creator.create_plugin("node", attention_fields(), trt.TensorRTPhase.BUILD)
    fields = built.get_fields_to_serialize()
    return creator.create_plugin("node", fields, trt.TensorRTPhase.RUNTIME).attach_to_context(None)


def test_from_attributes_to_launches(registration: adapter.PluginRegistration, library: KernelLibrary) -> None:
    plugin, driver = loaded(registration), registration.kernels.driver
    assert plugin.operation == ATTENTION
    for start, shape in enumerate([*SHAPES, *SHAPES], start=1):
        plugin.on_shape_change(described(shape), [])
        loads = driver.calls.count("cuLibraryLoadData")
        driver.launched.clear()
        addresses = [0x10_0000 * start + 0x1000 * index for index in range(7)]
        plugin.enqueue(described(shape), [], addresses[:6], addresses[6:], 0x900_0000, STREAM)
        plan = ATTENTION.plan(shape, library, MULTIPROCESSORS)
        names = (*ATTENTION.inputs, "output")
        check_launches(plan, driver, dict(zip(names, addresses, strict=True)), 0x900_0000)
        assert driver.calls.count("cuLibraryLoadData") == loads  # enqueue itself loads nothing
    assert driver.calls.count("cuLibraryLoadData") == len(library.records)
    registration.check()


def test_a_builder_without_a_gpu_loads_nothing(registration: adapter.PluginRegistration) -> None:
    built = registration.creators[0].create_plugin("node", attention_fields(), trt.TensorRTPhase.BUILD)
    built.on_shape_change(described(SHAPES[0]), [])
    assert registration.kernels.driver.calls == []


def test_the_size_of_the_gpu_is_the_builds(registration: adapter.PluginRegistration, library: KernelLibrary) -> None:
    """It fixes the workspace, which was reserved when the engine was built."""
    built = registration.creators[0].create_plugin("node", attention_fields(), trt.TensorRTPhase.BUILD)
    fields = built.get_fields_to_serialize()
    later = adapter.register_plugins(trt, library, 2 * MULTIPROCESSORS)
    plugin = later.creators[0].create_plugin("node", fields, trt.TensorRTPhase.RUNTIME)
    assert plugin.multiprocessors == MULTIPROCESSORS
    assert plugin.clone().multiprocessors == MULTIPROCESSORS


def test_an_engine_refuses_other_kernels(registration: adapter.PluginRegistration, tmp_path: Path) -> None:
    built = registration.creators[0].create_plugin("node", attention_fields(), trt.TensorRTPhase.BUILD)
    fields = built.get_fields_to_serialize()
    other = tmp_path / "other"
    other.mkdir()
    later = adapter.register_plugins(trt, write_library(other, []), MULTIPROCESSORS)
    with pytest.raises(EngineError, match="built with other kernels"):
        later.creators[0].create_plugin("node", fields, trt.TensorRTPhase.RUNTIME)
    with pytest.raises(
        EngineError, match=r"a plugin failed: BlockAttention\.create_plugin: .* built with other kernels"
    ):
        later.check()
    later.check()  # what was told once is told


def test_registering_again_replaces(registration: adapter.PluginRegistration, library: KernelLibrary) -> None:
    again = adapter.register_plugins(trt, library, MULTIPROCESSORS)
    registry = trt.get_plugin_registry()
    ours = [creator for creator in registry.all_creators if creator.name in ("BlockAttention", "MixtureOfExperts")]
    assert len(ours) == 2
    assert again.creators and again is not registration


def test_a_failing_enqueue_is_recorded(registration: adapter.PluginRegistration) -> None:
    plugin = loaded(registration)
    plugin.on_shape_change(described(SHAPES[0]), [])
    registration.kernels.driver.fail = "cuLaunchKernel"
    with pytest.raises(EngineError, match="cuLaunchKernel failed"):
        plugin.enqueue(described(SHAPES[0]), [], [0x100] * 6, [0x100], 0x100, STREAM)
    with pytest.raises(EngineError, match=r"BlockAttention\.enqueue: cuLaunchKernel failed"):
        registration.check()


def test_a_shape_whose_kernels_are_missing_fails_before_enqueue(registration: adapter.PluginRegistration) -> None:
    creator = registration.creators[0]
    built = creator.create_plugin("node", attention_fields(window=8), trt.TensorRTPhase.BUILD)
    with pytest.raises(Exception, match="has no kernel"):
        built.attach_to_context(None).on_shape_change(described(SHAPES[0]), [])
    with pytest.raises(EngineError, match=r"BlockAttention\.on_shape_change: .*has no kernel"):
        registration.check()
