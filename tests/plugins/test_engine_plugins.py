"""The plugins in TensorRT-RTX's own parser and builder, which build for SM 120 without a GPU: one-node networks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed: NO plugin is tried in a builder")

from dgcompile.plugins.block_attention.launch import Mode, Shape
from dgcompile.plugins.block_attention.launch import launches as plan_attention
from dgcompile.plugins.block_attention.tiles import tile_for
from dgcompile.plugins.kernel_library import INDEX_FILE, KernelRecord, index_bytes
from dgcompile.plugins.moe import launch as moe
from tests.plugins.trt_runner import run

# Batch, tokens and capacity are dynamic, as in the engines of a bundle: smallest, most common, largest.
BATCH, TOKENS, CAPACITY = (1, 1, 8), (1, 256, 512), (1, 1024, 1024)
PAIRS = (1, 256, 4096)
EXPERTS, HIDDEN, INNER = 8, 256, 96  # 96 is one and a half blocks of INT4


def dynamic(*axes: tuple[int, int, int]) -> list[list[int]]:
    return [list(column) for column in zip(*axes, strict=True)]


def attention(library: Path, **changes: Any) -> dict[str, Any]:
    block, cache = dynamic(BATCH, TOKENS), dynamic(BATCH, CAPACITY)
    kind = changes.pop("type", "bf16")
    job = {
        "library": str(library),
        "node": "BlockAttention",
        "attributes": {"scale": 1.0, "window": 1024, "causal": 1},
        "inputs": [
            ["query", kind, [0, 0, 16, 256], block],
            ["key", kind, [0, 0, 8, 256], block],
            ["value", kind, [0, 0, 8, 256], block],
            ["past_key", kind, [0, 0, 8, 256], cache],
            ["past_value", kind, [0, 0, 8, 256], cache],
            ["past_length", "i32", [0], dynamic(BATCH)],
        ],
    }
    for key, value in changes.items():
        job[key] = {**job[key], **value} if isinstance(value, dict) else value
    return job


def with_input(job: dict[str, Any], name: str, kind: str, shape: list[int]) -> dict[str, Any]:
    inputs = [[name, kind, shape, entry[3]] if entry[0] == name else entry for entry in job["inputs"]]
    return {**job, "inputs": inputs}


def experts(
    library: Path, weight_format: str = "float", group_size: int = 0, kind: str = "bf16", codes: str = "i8"
) -> dict[str, Any]:
    tokens = dynamic(PAIRS)
    inputs: list[Any] = [
        ["hidden", kind, [0, HIDDEN], tokens],
        ["expert_ids", "i32", [0, 2], tokens],
        ["expert_weights", "fp32", [0, 2], tokens],
    ]
    for name, rows, places in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
        if group_size:
            inputs.append([name, codes, [EXPERTS, -(-places // 64), rows, 32], None])
        else:
            inputs.append([name, kind if weight_format == "float" else codes, [EXPERTS, rows, places], None])
    if weight_format == "fp8":
        inputs += [
            ["gate_up_scale", "fp32", [EXPERTS, 2 * INNER], None],
            ["down_scale", "fp32", [EXPERTS, HIDDEN], None],
        ]
    elif group_size:
        for name, rows, places in (("gate_up_scale", 2 * INNER, HIDDEN), ("down_scale", HIDDEN, INNER)):
            inputs.append([name, "fp16", [EXPERTS, -(-places // group_size), rows], None])
    attributes = {"activation": "gelu_tanh", "weight_format": weight_format, "group_size": group_size}
    return {"library": str(library), "node": "MixtureOfExperts", "attributes": attributes, "inputs": inputs}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that lists the kernels of all jobs: building an engine needs its digest and index, not its cubins."""
    folder = tmp_path_factory.mktemp("library")
    tile = tile_for(120, 256)
    launches = [
        launch
        for kind in ("bf16", "fp16")
        for causal in (False, True)
        for window in (0, 1024)
        for splits in (1, 2)
        for launch in plan_attention(Shape(1, 1, 16, 8, 256, 1), Mode(1.0, window, causal), kind, tile, splits)
    ]
    launches += [
        launch
        for kind in ("bf16", "fp16")
        for weight_format, group_size in (("float", 0), ("fp8", 0), ("int4", 32), ("int4", 64), ("w4a8", 64))
        for tile_of_pairs in moe.TILES[120, weight_format]
        for launch in moe.launches(
            moe.Shape(1, 2, EXPERTS, HIDDEN, INNER), weight_format, group_size, tile_of_pairs, kind
        )
    ]
    records = {
        launch.key: KernelRecord(
            key=launch.key,
            sha256="0" * 64,
            size=1,
            entry=launch.function,
            parameters=len(launch.arguments),
            threads=128,
            shared_bytes=0,
            registers=32,
            spilled_bytes=0,
        )
        for launch in launches
    }
    (folder / INDEX_FILE).write_bytes(index_bytes(120, "nobody", records.values()))
    return folder


def test_both_plugins_build(library: Path, tmp_path: Path) -> None:
    jobs = {
        "attention bf16": attention(library),
        "attention fp16, denoiser": attention(library, type="fp16", attributes={"causal": 0}),
        "attention without window": attention(library, attributes={"window": 0}),
        "experts bf16": experts(library),
        "experts fp16": experts(library, kind="fp16"),
        "experts fp8 as fp8": experts(library, "fp8", codes="fp8"),
        "experts fp8 as bytes": experts(library, "fp8"),
        "experts int4, groups of 32": experts(library, "int4", 32),
        "experts int4, groups of 64": experts(library, "int4", 64, kind="fp16"),
        "experts w4a8": experts(library, "w4a8", 64),
    }
    results = dict(zip(jobs, run(tmp_path, list(jobs.values())), strict=True))
    assert {name: result for name, result in results.items() if "error" in result} == {}
    # The engine holds the digest of the kernels that it was planned for, and no weights.
    assert all(result["digest"] for result in results.values())
    assert all(result["size"] < 300_000 for result in results.values())


FAULTS: dict[str, tuple[Any, str]] = {
    "scale of zero": (
        lambda job: attention(job, attributes={"scale": 0.0}),
        "scale is 0.0, expected a positive number",
    ),
    "negative window": (lambda job: attention(job, attributes={"window": -1}), "window is -1, expected 0"),
    "causal 2": (lambda job: attention(job, attributes={"causal": 2}), "causal is 2, expected 0 or 1"),
    "window of the wrong type": (
        lambda job: attention(job, attributes={"window": 8.0}),
        "window is of type PluginFieldType.FLOAT32, expected PluginFieldType.INT32",
    ),
    "head_dim": (
        lambda job: attention(
            job, inputs=[[n, k, [48 if s == 256 else s for s in d], r] for n, k, d, r in attention(job)["inputs"]]
        ),
        "head_dim is 48, expected a power of two from 16 to 512",
    ),
    "heads": (
        lambda job: with_input(attention(job), "query", "bf16", [0, 0, 12, 256]),
        "12 query heads and 8 KV heads",
    ),
    "a key of another width": (
        lambda job: with_input(attention(job), "value", "bf16", [0, 0, 8, 128]),
        "value has shape .*128.*, expected .*256",
    ),
    "length of the wrong type": (
        lambda job: with_input(attention(job), "past_length", "i64", [0]),
        "past_length is DataType.INT64, expected i32",
    ),
    "float32": (lambda job: attention(job, type="fp32"), "query is fp32, expected bf16 or fp16"),
    "an input too few": (
        lambda job: attention(job, inputs=attention(job)["inputs"][:5]),
        "5 inputs, expected query, key, value, past_key, past_value, past_length",
    ),
    "activation": (
        lambda job: {**experts(job), "attributes": {**experts(job)["attributes"], "activation": "silu"}},
        "activation is 'silu', expected 'gelu_tanh'",
    ),
    "weight format": (
        lambda job: experts(job, "int3"),
        "weight_format is 'int3', expected one of float, fp8, int4, w4a8",
    ),
    "group size": (lambda job: experts(job, "int4", 128), "group_size of int4 is 128, expected 32 or 64"),
    "more experts per token than there are": (
        lambda job: with_input(with_input(experts(job), "expert_ids", "i32", [0, 9]), "expert_weights", "fp32", [0, 9]),
        "top_k is 9 but there are 8 experts",
    ),
    "weights of another size": (
        lambda job: with_input(experts(job), "down", "bf16", [EXPERTS, HIDDEN, INNER + 1]),
        "down has shape .8, 256, 97., expected .8, 256, 96.",
    ),
    "scales of another type": (
        lambda job: with_input(experts(job, "fp8"), "down_scale", "fp16", [EXPERTS, HIDDEN]),
        "down_scale is fp16, expected fp32",
    ),
    "a node nobody registered": (
        lambda job: {**attention(job), "node": "BlockAttentio", "operation": "BlockAttention"},
        "Plugin not found",
    ),
    "kernels of another GPU": (
        lambda job: {**attention(job), "sm": 90},
        "kernels for compute capability 120; expected 90",
    ),
    # TensorRT itself would swallow these two and write an engine.
    "get_workspace_size": (
        lambda job: attention(job, fault="workspace_limit"),
        "BlockAttention.get_workspace_size: broken on purpose",
    ),
    "get_fields_to_serialize": (
        lambda job: attention(job, fault="fields"),
        "BlockAttention.get_fields_to_serialize: broken on purpose",
    ),
    "configure_plugin": (
        lambda job: attention(job, fault="check"),
        "BlockAttention.configure_plugin: broken on purpose",
    ),
}


@pytest.fixture(scope="module")
def failures(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    jobs = [make(library) for make, _ in FAULTS.values()]
    # After all those failures a good network still builds in the same process.
    *results, good = run(tmp_path_factory.mktemp("libraries"), [*jobs, attention(library)])
    assert "error" not in good
    return dict(zip(FAULTS, results, strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str, failures: dict[str, dict[str, Any]]) -> None:
    result = failures[name]
    assert re.search(FAULTS[name][1], result.get("error", "an engine was built")), result
