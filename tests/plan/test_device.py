"""Device memory: against what sessions allocate, what engines that were built say, and the limits that are promised."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcompile.bundle import Bundle
from dgcompile.contract import GraphName
from dgcompile.model_spec import ModelSpec
from dgcompile.plan import Workload
from dgcompile.plan.activations import activation_bytes
from dgcompile.plan.cache import kv_cache_bytes
from dgcompile.plan.device import LARGEST_BATCH, device_memory, largest_batch, largest_context
from dgcompile.recipe import Recipe
from dgcompile.runtime.kv_cache import KVCache
from dgcompile.target import Target
from dgcompile.weights_store import lay_out_store
from tests.model_config import published_config
from tests.plan.helpers import plan, workload
from tests.runtime.host_device import HostDevice
from tests.runtime.test_tensorrt_session import opened
from tests.tiny_checkpoint import tiny_config


def test_cache_of_the_published_model(published: ModelSpec) -> None:
    """5.6 GB at 256 K tokens, because sliding layers keep no more than their window; unbounded they alone had 54 GB."""
    sizes = kv_cache_bytes(workload(published, "h100", "fp8", 262144))
    assert sum(sizes.values()) == pytest.approx(5.6e9, abs=0.05e9)
    assert sizes["sliding_attention"] == 25 * 2 * 1024 * 8 * 256 * 2
    assert sizes["full_attention"] == 5 * 2 * 262144 * 2 * 512 * 2


@given(
    window=st.integers(1, 40), context=st.integers(9, 200), batch=st.integers(1, 4), kv_heads=st.sampled_from([1, 2])
)
def test_the_cache_is_the_one_of_sessions(window: int, context: int, batch: int, kv_heads: int) -> None:
    spec = ModelSpec.from_config(tiny_config(sliding_window=window, num_key_value_heads=kv_heads))
    planned = kv_cache_bytes(workload(spec, "cpu", "fp32", context, batch))
    rings = 2 * spec.num_hidden_layers
    assert 0 <= sum(planned.values()) - KVCache(spec, batch, context, "float32").nbytes < rings * 256


@pytest.mark.parametrize("batch", [1, 3])
def test_a_session_allocates_what_was_planned(bundle: Path, batch: int) -> None:
    source = Bundle.open(bundle)
    session = opened(source.path, source.spec, source.weights_file, max_batch=batch, max_context=200)
    device = session._device
    assert isinstance(device, HostDevice)
    held = device.allocated
    # The session is a GPU's, in float32: there is no kernel for that, so no recipe gives this workload.
    made_up = Workload(source.spec, source.recipe, Target.load("rtx5090"), 200, batch)
    planned = device_memory(made_up, lay_out_store(source.spec, source.recipe))
    assert held["cache"] == sum(planned.kv_cache.values())
    assert held["self-conditioning"] == planned.self_conditioning
    small = held["inputs"] + held["outputs"]
    assert planned.small_tensors <= small <= planned.small_tensors + 13 * 256
    assert planned.new_tokens == held["new tokens"]
    # The stand-in's graphs lift fewer weights than the builder's: test_weights compares those.
    named = {"weights", "cache", "self-conditioning", "inputs", "outputs", "new tokens", "workspace"}
    assert set(held) == named


# "Total Activation Memory" that TensorRT-RTX 1.7.1.116 reported when it built these engines for an RTX 5090: two layers
# (one of each kind) of the published widths with 8 experts, recipe int4, max_context 4096.
ACTIVATIONS_OF_BUILT_ENGINES: dict[tuple[GraphName, int], int] = {
    ("denoiser", 1): 1_479_298_048,
    ("denoiser", 2): 2_962_806_784,
    ("denoiser", 8): 11_841_617_920,
    ("encoder", 1): 57_315_840,
    ("encoder", 2): 111_225_856,
    ("encoder", 8): 398_816_256,
}


@pytest.mark.parametrize(("graph", "batch"), ACTIVATIONS_OF_BUILT_ENGINES)
def test_activations_are_those_of_engines_that_were_built(graph: GraphName, batch: int) -> None:
    spec = ModelSpec.from_config(published_config(2, num_experts=8))
    planned = {
        str(name): size for name, size in activation_bytes(workload(spec, "rtx5090", "int4", 4096, batch)).items()
    }
    built = ACTIVATIONS_OF_BUILT_ENGINES[graph, batch]
    assert built <= planned[graph] <= built * (1.01 if graph == "denoiser" else 1.35)


@pytest.mark.parametrize(
    ("target", "recipe", "context", "limit"),
    [("rtx5090", "int4", 8192, 18e9), ("h100", "fp8", 32768, 40e9)],
)
def test_the_published_model_fits(published: ModelSpec, target: str, recipe: str, context: int, limit: float) -> None:
    found = plan(published, target, recipe, context)
    assert found.fits and found.device.total < limit
    device = found.device
    parts = [*device.kv_cache.values(), device.new_tokens, device.self_conditioning, device.small_tensors]
    assert device.total == device.weights + sum(parts) + device.workspace + device.allowance


@settings(deadline=None, max_examples=25)
@given(gigabytes=st.integers(1, 60), batch=st.integers(1, 8), context=st.integers(9, 256))
def test_the_largest_limits_fit_and_the_next_do_not(gigabytes: int, batch: int, context: int) -> None:
    spec = ModelSpec.from_config(tiny_config(vocab_size=4096, sliding_window=64))
    asked = workload(spec, "cpu", "fp32", context, batch)
    store, memory = lay_out_store(spec, asked.recipe), gigabytes * 100_000

    def fits(other: Workload) -> bool:
        return device_memory(other, store).total <= memory

    tokens, rows = largest_context(asked, store, memory), largest_batch(asked, store, memory)
    smallest = spec.canvas_length + 1
    if tokens is None:
        assert not fits(asked.sized(max_context=smallest))
    else:
        assert fits(asked.sized(max_context=tokens))
        assert tokens == spec.max_position_embeddings or not fits(asked.sized(max_context=tokens + 1))
    if rows is None:
        assert not fits(asked.sized(max_batch=1))
    else:
        assert fits(asked.sized(max_batch=rows))
        assert rows == LARGEST_BATCH or not fits(asked.sized(max_batch=rows + 1))


def test_dequantized_weights_count_on_the_cpu(published: ModelSpec) -> None:
    assert plan(published, "cpu", "fp32", 8192).device.converted_weights == 0
    converted = plan(published, "cpu", "int4", 8192).device.converted_weights
    assert converted == 4 * max(128 * 1408 * 2816, 262144 * 2816)


def test_recipes_that_are_not_for_the_target_yet(published: ModelSpec) -> None:
    with pytest.raises(AssertionError, match="not for a target"):
        _ = Workload(published, Recipe.load("int4"), Target.load("h100"), 8192, 1).item_bytes
