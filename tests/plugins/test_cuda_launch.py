"""What is passed to the CUDA driver, against a driver that writes it down: no GPU is here to ask."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dgcompile.errors import BundleError, EngineError
from dgcompile.plugins.block_attention.launch import LOG2_E, workspace
from dgcompile.plugins.block_attention.plugin import BlockAttention
from dgcompile.plugins.cuda_launch import LoadedKernels, PreparedCall, packed
from dgcompile.plugins.kernel_library import INDEX_FILE, KernelLibrary, KernelRecord, index_bytes
from dgcompile.plugins.launch import Launch
from dgcompile.plugins.moe.plugin import MixtureOfExperts
from dgcompile.plugins.operation import Operation, Plan, Tensor

STREAM = 77
MULTIPROCESSORS = 170


class RecordingDriver:
    """Stands in for ``cuda.bindings.driver``: calls succeed, launches are kept with the bytes of their arguments."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="max shared")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launched: list[dict[str, Any]] = []
        self.shared: dict[str, int] = {}
        self.fail: str | None = None
        self.parameters: dict[str, int] = {}

    def _result(self, name: str, *values: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        return (1 if self.fail == name else 0, *values)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return self._result("cuCtxGetCurrent", 5)

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> tuple[Any, ...]:
        assert options == ([], [], 0, [], [], 0)
        return self._result("cuLibraryLoadData", hashlib.sha256(code).hexdigest())

    def cuLibraryGetKernel(self, library: str, name: bytes) -> tuple[Any, ...]:
        return self._result("cuLibraryGetKernel", name.decode())

    def cuKernelGetFunction(self, kernel: str) -> tuple[Any, ...]:
        return self._result("cuKernelGetFunction", kernel)

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[Any, ...]:
        assert attribute == "max shared"
        self.shared[function] = value
        return self._result("cuFuncSetAttribute")

    def cuLaunchKernel(self, function: str, *rest: Any) -> tuple[Any, ...]:
        x, y, z, threads, one, also_one, shared, stream, parameters, extra = rest
        assert (one, also_one, extra) == (1, 1, 0)
        # Every argument of these kernels is read as eight bytes, of which numbers use the first four.
        count = self.parameters[function] + 2
        places = (ctypes.c_uint64 * count).from_address(parameters)
        values = [bytes((ctypes.c_char * 8).from_address(place)) for place in places]
        self.launched.append(
            {
                "function": function,
                "grid": (x, y, z),
                "threads": threads,
                "shared": shared,
                "stream": stream,
                "values": values,
            }
        )
        return self._result("cuLaunchKernel")


def fake_cubin(sm: int, text: str) -> bytes:
    header = bytearray(64)
    header[:5], header[7], header[18] = b"\x7fELF\x02", 0x33, 190
    header[48] = sm
    return bytes(header) + text.encode()


def write_library(folder: Path, launches: list[Launch], shared_bytes: int = 50_000) -> KernelLibrary:
    records = {}
    for launch in launches:
        cubin = fake_cubin(120, launch.key)
        digest = hashlib.sha256(cubin).hexdigest()
        record = KernelRecord(
            launch.key,
            digest,
            len(cubin),
            launch.key.replace("-", "_"),
            len(launch.arguments),
            128,
            shared_bytes,
            64,
            0,
        )
        (folder / record.file).write_bytes(cubin)
        records[launch.key] = record
    (folder / INDEX_FILE).write_bytes(index_bytes(120, "nobody", records.values()))
    return KernelLibrary.open(folder, 120)


def prepare(
    folder: Path, operation: Operation, tensors: dict[str, Tensor]
) -> tuple[Plan, RecordingDriver, LoadedKernels, PreparedCall]:
    """A library with just the kernels of one call, and that call."""
    empty = KernelLibrary(folder, 120, "", "", {})
    plan = operation.plan(tensors, empty, MULTIPROCESSORS)
    library = write_library(folder, plan.launches)
    driver = RecordingDriver()
    driver.parameters = {record.entry: record.parameters for record in library.records.values()}
    kernels = LoadedKernels(library, driver)
    return plan, driver, kernels, PreparedCall(plan, (*operation.inputs, "output"), kernels)


def attention_tensors(batch: int, tokens: int, capacity: int) -> dict[str, Tensor]:
    query = Tensor((batch, tokens, 16, 256), "bf16")
    block, cache = Tensor((batch, tokens, 8, 256), "bf16"), Tensor((batch, capacity, 8, 256), "bf16")
    caches = {"past_key": cache, "past_value": cache}
    return {"query": query, "key": block, "value": block, **caches, "past_length": Tensor((batch,), "i32")}


def experts_tensors(tokens: int) -> dict[str, Tensor]:
    """Of the published size, in INT4 with FP8 activations: the case with the most launches."""
    return {
        "hidden": Tensor((tokens, 2816), "bf16"),
        "expert_ids": Tensor((tokens, 8), "i32"),
        "expert_weights": Tensor((tokens, 8), "fp32"),
        "gate_up": Tensor((128, 44, 1408, 32), "i8"),
        "down": Tensor((128, 11, 2816, 32), "i8"),
        "gate_up_scale": Tensor((128, 88, 1408), "fp16"),
        "down_scale": Tensor((128, 22, 2816), "fp16"),
    }


ATTENTION = BlockAttention(scale=0.5, window=1024, causal=1)
EXPERTS = MixtureOfExperts("gelu_tanh", "w4a8", 32)


def check_launches(plan: Plan, driver: RecordingDriver, addresses: dict[str, int], base: int) -> None:
    """Every launch of the plan, in order, with the values that its arguments stand for."""
    assert len(driver.launched) == len(plan.launches)
    for launch, found in zip(plan.launches, driver.launched, strict=True):
        assert found["function"] == launch.key.replace("-", "_")
        assert found["grid"] == launch.grid
        assert (found["threads"], found["shared"], found["stream"]) == (128, 50_000, STREAM)
        *values, scratch, profile = found["values"]
        assert scratch == profile == bytes(8)
        assert len(values) == len(launch.arguments)
        for argument, kind, value in zip(launch.arguments, launch.types, values, strict=True):
            if isinstance(argument, str):
                address = struct.unpack("<Q", value)[0]
                if argument in plan.buffers:
                    offset, size = plan.buffers[argument]
                    assert address == base + offset
                    assert base <= address and address + size <= base + plan.workspace_bytes
                else:
                    assert address == addresses[argument]
                assert address % 16 == 0
            else:
                assert value == struct.pack("<i" if kind == "i32" else "<f", argument) + bytes(4)


@pytest.mark.parametrize(
    ("operation", "tensors", "functions"),
    [
        (ATTENTION, attention_tensors(8, 512, 1024), ["attention_kernel"]),
        (ATTENTION, attention_tensors(1, 32, 1024), ["attention_kernel", "combine_kernel"]),
        (
            EXPERTS,
            experts_tensors(256),
            [
                "route_kernel",
                "round_rows_kernel",
                "gate_up_kernel",
                "round_rows_kernel",
                "down_kernel",
                "combine_kernel",
            ],
        ),
        (EXPERTS, experts_tensors(1), None),
        (EXPERTS, experts_tensors(4096), None),
    ],
)
def test_arguments(
    operation: Operation, tensors: dict[str, Tensor], functions: list[str] | None, tmp_path: Path
) -> None:
    plan, driver, _, call = prepare(tmp_path, operation, tensors)
    if functions is not None:
        assert [launch.function for launch in plan.launches] == functions
    assert plan.workspace_bytes <= operation.workspace_limit(tensors, 120, MULTIPROCESSORS)
    names = (*operation.inputs, "output")
    for start, base in ((0x7F00_0000_0000, 0x7E00_0000_0100), (0x1000, 0x9000_0000)):  # other addresses, same call
        driver.launched.clear()
        addresses = {name: start + 0x10_0000 * index for index, name in enumerate(names)}
        call.run(list(addresses.values()), base, STREAM)
        check_launches(plan, driver, addresses, base)


def test_attention_by_hand(tmp_path: Path) -> None:
    plan, driver, _, call = prepare(tmp_path, ATTENTION, attention_tensors(1, 32, 1024))
    call.run([0x100 * index for index in range(1, 8)], 0x10000, STREAM)
    attention, combine = driver.launched
    buffers, size = workspace(ATTENTION.shape(attention_tensors(1, 32, 1024)), attention["grid"][1])
    numbers = [struct.unpack("<Q", value)[0] for value in attention["values"][:9]]
    assert numbers == [*[0x100 * index for index in range(1, 8)], 0x10000, 0x10000 + buffers["partial_stats"][0]]
    assert [struct.unpack("<i", value[:4])[0] for value in attention["values"][9:13]] == [
        1,
        32,
        1024,
        attention["grid"][1],
    ]
    assert struct.unpack("<f", attention["values"][13][:4])[0] == np.float32(0.5 * LOG2_E)
    assert struct.unpack("<Q", combine["values"][2])[0] == 0x700
    assert plan.workspace_bytes == size


def test_kernels_are_loaded_before_the_first_launch_and_once(tmp_path: Path) -> None:
    plan, driver, kernels, call = prepare(tmp_path, EXPERTS, experts_tensors(256))
    different = len({launch.key for launch in plan.launches})
    assert driver.calls.count("cuLibraryLoadData") == different
    assert set(driver.shared.values()) == {50_000} and len(driver.shared) == different  # above 48 KB: must be asked for
    driver.calls.clear()
    call.run([0x100] * 8, 0x10000, STREAM)
    assert driver.calls == ["cuLaunchKernel"] * len(plan.launches)  # nothing is loaded, allocated or waited for
    PreparedCall(plan, (*EXPERTS.inputs, "output"), kernels)
    assert "cuLibraryLoadData" not in driver.calls


@pytest.mark.parametrize("misplaced", ["tensor", "workspace"])
def test_addresses_that_the_kernels_do_not_take(misplaced: str, tmp_path: Path) -> None:
    *_, call = prepare(tmp_path, ATTENTION, attention_tensors(1, 32, 1024))
    addresses = [0x100] * 6 + [0x108 if misplaced == "tensor" else 0x100]
    with pytest.raises(EngineError, match="expected multiples of 16 bytes"):
        call.run(addresses, 0x10004 if misplaced == "workspace" else 0x10000, STREAM)


@pytest.mark.parametrize("name", ["cuLibraryLoadData", "cuKernelGetFunction", "cuCtxGetCurrent", "cuLaunchKernel"])
def test_the_drivers_errors_are_named(name: str, tmp_path: Path) -> None:
    plan, driver, kernels, call = prepare(tmp_path, ATTENTION, attention_tensors(1, 32, 1024))
    driver.fail = name
    kernels._functions.clear()
    with pytest.raises(EngineError, match=f"{name} failed: 1"):
        if name == "cuLaunchKernel":
            call.run([0x100] * 7, 0x10000, STREAM)
        else:
            PreparedCall(plan, (*ATTENTION.inputs, "output"), kernels)


def test_a_kernel_that_is_missing_or_damaged(tmp_path: Path) -> None:
    plan, _, kernels, _ = prepare(tmp_path, ATTENTION, attention_tensors(1, 32, 1024))
    kernels._functions.clear()
    record = kernels.kernel_library.record(plan.launches[0])
    (tmp_path / record.file).write_bytes(b"x" * record.size)
    with pytest.raises(BundleError, match="is damaged"):
        PreparedCall(plan, (*ATTENTION.inputs, "output"), kernels)
    other = BlockAttention(scale=0.5, window=512, causal=1)
    with pytest.raises(BundleError, match=r"has no kernel attention_kernel-\w+ .*WINDOW 512"):
        prepared = other.plan(attention_tensors(1, 32, 512), kernels.kernel_library, MULTIPROCESSORS)
        PreparedCall(prepared, (*other.inputs, "output"), kernels)


def test_numbers_that_cannot_be_passed() -> None:
    assert packed(-1, "i32") == 0xFFFFFFFF
    with pytest.raises(ValueError, match="does not fit into 32 bits"):
        packed(2**31, "i32")
    with pytest.raises(ValueError, match=r"1\.5 cannot be passed as i32"):
        packed(1.5, "i32")


def test_the_real_driver_takes_what_is_passed() -> None:
    """Without a GPU its functions still check their arguments' types, and fail with CUDA's own errors."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    kernels = LoadedKernels(KernelLibrary(Path(), 120, "", "", {}), driver)
    try:
        for name, arguments in (
            ("cuLibraryLoadData", (b"no cubin", [], [], 0, [], [], 0)),
            ("cuLaunchKernel", (driver.CUfunction(0), 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)),
        ):
            with pytest.raises((EngineError, RuntimeError), match=f"{name} failed|NVIDIA driver"):
                kernels.call(name, *arguments)
    except TypeError as problem:
        pytest.fail(f"{problem}")
