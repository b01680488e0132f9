"""The floor: FLOPs against a count by hand and against torch's own counter, and the arithmetic on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DiffusionGemmaForBlockDiffusion

from dgcompile.bench.floor import MAX_OPERAND_BYTES, Product, Rates, floor_of, product_shapes, step_bytes
from dgcompile.checkpoint import Checkpoint
from dgcompile.plan.roofline import step_flops
from tests.runtime.toy_model import toy_spec


def test_flops_by_hand() -> None:
    """L 6, H 4, V 32, dense 4, experts 2 top-1 of width 4, 2 heads; a sliding layer of 1 x 2 with a window of 8, a full
    one of 2 x 1 without values."""
    flops = step_flops(toy_spec(), rows=1, past=10)
    # q 4x4, k 2x4, v 2x4, o 4x4; q 2x4, k 2x4, o 4x2; norms of the heads are no products.
    assert flops["attention"] == 2 * 6 * ((16 + 8 + 8 + 16) + (8 + 8 + 8))
    assert flops["dense_mlp"] == 2 * 6 * 2 * (3 * 16)
    assert flops["self_conditioning"] == 2 * 6 * 3 * 16
    assert flops["experts"] == 2 * 6 * 2 * (3 * 16)  # one expert for each token, in two layers
    assert flops["attention_scores"] == 4 * 6 * 2 * (2 * (8 + 6) + 1 * (10 + 6))
    assert flops["embedding"] == 2 * (2 * 6 * 32 * 4)
    assert flops["norms"] == flops["sampling"] == 0


def test_rows_multiply_all_flops() -> None:
    one, three = (step_flops(toy_spec(), rows, 10) for rows in (1, 3))
    assert three == {kind: 3 * count for kind, count in one.items()}


def test_flops_are_those_that_torch_counts(checkpoint: Path) -> None:
    """A decoder call of transformers with self-conditioning; its experts run in a loop, so no more than is needed."""
    opened = Checkpoint.open(checkpoint)
    spec, past = opened.spec, 40
    model_class: Any = DiffusionGemmaForBlockDiffusion
    model = model_class.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(9, spec.vocab_size - 3, (1, count), generator=generator)

    with torch.no_grad():
        cache = model.model.encoder(input_ids=tokens(past)).cache
        with FlopCounterMode(display=False) as counter:
            model(
                decoder_input_ids=tokens(spec.canvas_length),
                self_conditioning_logits=torch.randn(1, spec.canvas_length, spec.vocab_size, generator=generator),
                cache=cache,
                decoder_position_ids=torch.arange(past, past + spec.canvas_length)[None],
            )
    # transformers keeps one token less than the window; RoPE's angles and the like are products for torch.
    assert counter.get_total_flops() == pytest.approx(sum(step_flops(spec, 1, past).values()), rel=0.01)


def test_bytes_of_a_step_by_hand() -> None:
    spec = toy_spec()
    weights = sum(
        count
        for name, shape in spec.expected_tensors().items()
        if ".experts." not in name and (count := torch.Size(shape).numel())
    )
    touched = 2 * (2 * 12 * 4) * (1 - 0.5**6)  # two layers; an expert is missed by all six tokens once in 64
    cache = 2 * 8 * 1 * 2 + 2 * 10 * 2 * 1
    assert step_bytes(spec, 10) == pytest.approx(4 * (weights + touched + cache))


def rates(when: str, flops: float, copy: float) -> Rates:
    product = Product(m=1, k=1, n=1, library="numpy", flops_per_second=flops)
    slower = Product(m=1, k=1, n=1, library="onnxruntime", flops_per_second=flops / 2)
    return Rates(when=when, copy_bytes_per_second=copy, products=(slower, product))


def test_the_floor_is_the_longer_of_two_times_at_the_best_rates() -> None:
    spec = toy_spec()
    flops, size = sum(step_flops(spec, 1, 10).values()), step_bytes(spec, 10)
    floor = floor_of(spec, [10, 20], [rates("begin", 1e6, 1e9), rates("end", 2e6, 5e8)])
    assert (floor.flops_per_second, floor.bytes_per_second) == (2e6, 1e9)
    first = floor.steps[0]
    assert first.compute_seconds == pytest.approx(flops / 2e6)
    assert first.memory_seconds == pytest.approx(size / 1e9)
    assert floor.seconds(10) == first.compute_seconds > first.memory_seconds
    assert floor.seconds(20) > floor.seconds(10)
    slow_memory = floor_of(spec, [10], [rates("begin", 1e12, 1e3)])
    assert slow_memory.seconds(10) == slow_memory.steps[0].memory_seconds == pytest.approx(size / 1e3)


def test_shapes_are_the_models_own_but_for_a_vocabulary_that_is_too_long() -> None:
    assert product_shapes(toy_spec()) == [(6, 4, 32), (6, 32, 4), (6, 4, 4)]
    wide = toy_spec().model_copy(update={"hidden_size": 2816, "vocab_size": 262144})
    vocabulary = product_shapes(wide)[0][2]
    assert vocabulary < 262144 and 4 * 2816 * vocabulary <= MAX_OPERAND_BYTES
