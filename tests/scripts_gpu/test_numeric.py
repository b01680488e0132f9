"""The bounds of the check let rounding through and nothing else; what is known of devices and sizes."""

from __future__ import annotations

import pytest
import torch
from gpu import float64, numeric, speed
from gpu.device import Rates, published_rates
from gpu.numeric import judge_attention, judge_experts
from gpu.records import parse
from gpu.shapes import FULL, PUBLISHED, SLIDING, TINY, LayerShape
from gpu.weights import FORMATS, random_experts


def outcomes(capsys: pytest.CaptureFixture[str]) -> dict[str, bool]:
    """Which checks were made since the last call, and whether they passed; by the last part of their names."""
    records = [parse(line) for line in capsys.readouterr().out.splitlines()]
    return {record["name"].split(": ")[-1]: record["passed"] for record in records if record is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("layer", "capacity"), [(SLIDING, 1024), (FULL, 8192)])
def test_attention_off_by_one_token_at_the_real_length(
    capsys: pytest.CaptureFixture[str], layer: LayerShape, capacity: int, dtype: torch.dtype
) -> None:
    """Sees one cached token more than it should, with flat weights: the smallest mistake a mask can make."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"tokens": 8, "heads": 2, "kv_heads": 1, "head_dim": 64, "capacity": capacity + 1, "past": [capacity + 1]}
    inputs = numeric.attention_inputs(generator, dtype, **sizes)  # type: ignore[arg-type]
    inputs["query"] *= 0.01
    mode = {"scale": 1.0, "causal": False}
    expected, magnitude = float64.attention(**inputs, **mode, window=capacity + 1)  # type: ignore[arg-type]
    wrong, _ = float64.attention(**inputs, **mode, window=0)  # type: ignore[arg-type]
    right = expected.to(dtype)
    judge_attention("right", right, expected, magnitude, right)
    assert outcomes(capsys) == {"norm": True, "element": True, "repeated": True}
    judge_attention("wrong", wrong.to(dtype), expected, magnitude, right)
    assert outcomes(capsys) == {"norm": False, "element": dtype is torch.bfloat16, "repeated": False}


@pytest.mark.parametrize("name", FORMATS)
def test_experts_with_one_wrong_scale_or_weight(capsys: pytest.CaptureFixture[str], name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = random_experts(FORMATS[name], 4, 128, 64, torch.float16, generator)
    hidden = torch.randn(32, 128, generator=generator).to(torch.float16)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(32)])
    shares = torch.rand(32, 2, generator=generator)
    rounds = name.startswith("w4a8")
    exact = float64.experts(hidden, ids, shares, weights, round_activations=False)
    rounded = float64.experts(hidden, ids, shares, weights, round_activations=True) if rounds else None
    right = (exact if rounded is None else rounded).to(torch.float16)
    judge_experts("right", right, exact, rounded, right)
    assert all(outcomes(capsys).values())
    # One expert of four is used with its share off by a quarter.
    shares[ids == 2] *= 1.25
    wrong = float64.experts(hidden, ids, shares, weights, round_activations=rounds).to(torch.float16)
    judge_experts("wrong", wrong, exact, rounded, wrong)
    found = outcomes(capsys)
    assert found.pop("repeated")
    assert not any(found.values())


def test_rates_of_known_cards() -> None:
    cases = {
        "NVIDIA H100 80GB HBM3": 3.35e12,
        "NVIDIA H100 PCIe": 2.0e12,
        "NVIDIA H200": 4.8e12,
        "NVIDIA B200": 8.0e12,
        "NVIDIA GeForce RTX 5090": 1.792e12,
    }
    for name, bytes_per_s in cases.items():
        rates = published_rates(name)
        assert rates is not None and rates.bytes_per_s == bytes_per_s, name
    for name in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 5090 D", "NVIDIA GH200 480GB", "NVIDIA L4"):
        assert published_rates(name) is None, name


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    rates = Rates(bytes_per_s=1e12, flops=1e15, fp8_flops=2e15, source="published")
    assert rates.floor_ms(2e9, 1e9) == 2
    assert rates.floor_ms(1, 4e12) == 4
    assert rates.floor_ms(1, 4e12, fp8=True) == 2


def test_the_published_model_is_counted_right() -> None:
    """25.25 billion parameters: 22.84 in the experts, 1.65 in attention and dense MLP, 0.74 in the embedding."""
    assert len(PUBLISHED.layers) * PUBLISHED.expert_parameters() == pytest.approx(22.84e9, rel=1e-3)
    assert PUBLISHED.dense_parameters() == pytest.approx(1.65e9, rel=2e-2)
    assert speed.step_bytes(FORMATS["float"]) == pytest.approx(50.5e9, rel=1e-2)
    work = speed.step_work(PUBLISHED, 8192, FORMATS["float"])
    assert work["nbytes"] == pytest.approx(50.5e9 + 1.5e9 + 0.5e9, rel=2e-2)
    # 256 tokens x 2 x (1.65 dense + 22.84 x 8 / 128 experts + 2 x 0.74 embedding) billion, and the attention.
    assert work["flops"] == pytest.approx(2.34e12 + 0.5e12, rel=5e-2)
    assert speed.step_formats(75e9) == ["float", "fp8", "int4 g32", "w4a8 g32"]
    assert speed.step_formats(30e9) == ["int4 g32", "w4a8 g32"]
    assert speed.step_formats(10e9) == []


def test_what_torch_is_timed_with_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    weights = random_experts(FORMATS["float"], 4, 64, 32, torch.float32, torch.Generator().manual_seed(2))
    inputs = numeric.expert_inputs(TINY, TINY.canvas_length, torch.float32, torch.Generator().manual_seed(3))
    expected = float64.experts(*inputs, weights, round_activations=False)
    for function in speed._torch_experts(*inputs, weights):
        torch.testing.assert_close(function().double(), expected, rtol=1e-4, atol=1e-5)
    rates = Rates(1e12, 1e15, 2e15, "published")
    speed.time_attention(torch.device("cpu"), rates, baseline=True)
    assert '"attention head_dim 16, 15 keys: torch sdpa math", "ms"' in capsys.readouterr().out


def test_the_step_of_transformers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    speed.time_transformers(torch.device("cpu"), Rates(1e12, 1e15, 2e15, "published"))
    record = parse(capsys.readouterr().out.strip())
    assert record is not None and record["kind"] == "timing", record
    assert record["program"].endswith("not compiled, attention sdpa, experts grouped_mm")
