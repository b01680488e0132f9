"""The time of a step: against floors worked out elsewhere by the same rule, and properties of the rule."""

from __future__ import annotations

from itertools import product
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcompile.errors import InputError
from dgcompile.model_spec import ModelSpec
from dgcompile.plan import make_plan
from dgcompile.plan.roofline import WORK, StepTime, experts_touched, lacking_facts, step_time
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from dgcompile.weights_store import lay_out_store
from tests.plan.helpers import recipe_of, workload
from tests.tiny_checkpoint import tiny_config

FP8 = dict.fromkeys(("experts", "attention", "dense_mlp", "self_conditioning"), "fp8")
FP8_PRODUCTS = {kind: {"format": "fp8", "activations": "fp8_static"} for kind in FP8 if kind != "experts"}
INT4 = {"format": "int4", "group_size": 64}
W4A8 = {**INT4, "activations": "fp8_dynamic"}


def step_of(
    spec: ModelSpec, target: str | Target, recipe: str | Recipe, context: int = 257, batch: int = 1
) -> StepTime:
    asked = workload(spec, target, recipe, context, batch)
    found = step_time(asked, lay_out_store(spec, asked.recipe), 16)
    assert found is not None
    return found


# Floors in ms that were worked out by hand from 25.25 billion parameters, 4.55 billion of which a token multiplies,
# without attention's scores. Formats are uniform there; the recipes that come with dgcompile differ, see docs/plan.md.
@pytest.mark.parametrize(
    ("target", "recipe", "milliseconds", "binding"),
    [
        ("h100", recipe_of(), 15.1, "memory"),
        ("h100", recipe_of(**FP8), 7.75, "memory"),
        ("h100", recipe_of(**{**FP8, "experts": INT4}), 4.6, "memory"),
        ("rtx5090", recipe_of(**{**FP8, "experts": INT4}), 11.2, "compute"),
    ],
)
def test_floors_at_one_canvas(
    published: ModelSpec, target: str, recipe: Recipe, milliseconds: float, binding: str
) -> None:
    step = step_of(published, target, recipe)
    assert step.floor_seconds * 1e3 == pytest.approx(milliseconds, rel=0.025)
    assert step.binding == binding


def test_fp8_products_lift_the_bound_of_arithmetic_on_an_rtx5090(published: ModelSpec) -> None:
    """7.7 ms, for the products at the rates of FP8 and, of the embedding, of bfloat16."""
    step = step_of(published, "rtx5090", recipe_of(**{**FP8_PRODUCTS, "experts": W4A8}))
    assert step.compute_seconds * 1e3 == pytest.approx(7.7, rel=0.025)
    # With 8 bits for all but the experts, reading takes longer than that.
    assert step.binding == "memory" and step.memory_seconds * 1e3 == pytest.approx(8.6, rel=0.025)


@pytest.mark.parametrize(("recipe", "speed"), [(recipe_of(**FP8), 2065), (recipe_of(**{**FP8, "experts": INT4}), 3500)])
def test_tokens_per_second_on_an_h100(published: ModelSpec, recipe: Recipe, speed: float) -> None:
    step = step_of(published, "h100", recipe)
    assert step.tokens_per_second(step.floor_seconds) == pytest.approx(speed, rel=0.025)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_experts_touched_by_counting_all_cases(tokens: int, top_k: int) -> None:
    experts = 4
    choices = [{i for i in range(experts) if bits >> i & 1} for bits in range(2**experts) if bits.bit_count() == top_k]
    assert len(choices) == comb(experts, top_k)
    touched = [len(set.union(*case)) for case in product(choices, repeat=tokens)]
    assert experts_touched(experts, top_k, tokens) == pytest.approx(sum(touched) / len(touched))


def test_a_canvas_touches_practically_every_expert() -> None:
    assert 128 - 1e-4 < experts_touched(128, 8, 256) < 128


@settings(deadline=None, max_examples=25)
@given(batch=st.integers(1, 64), context=st.integers(9, 256), experts=st.integers(2, 16))
def test_a_larger_batch_or_context_never_takes_less(batch: int, context: int, experts: int) -> None:
    spec = ModelSpec.from_config(tiny_config(num_experts=experts))
    step = step_of(spec, "h100", "bf16", context, batch)
    more_rows = step_of(spec, "h100", "bf16", context, batch + 1)
    assert step.floor_seconds <= more_rows.floor_seconds and step.seconds < more_rows.seconds
    assert step.seconds <= step_of(spec, "h100", "bf16", context + 1, batch).seconds
    assert step.seconds >= step.floor_seconds
    assert set(step.work) == set(WORK)
    for part in step.work.values():
        assert part.seconds > 0 or part.weight_bytes + part.other_bytes + part.flops == 0


def test_precisions_follow_the_recipe(published: ModelSpec) -> None:
    def precisions(recipe: str) -> dict[str, str]:
        return {kind: part.precision for kind, part in step_of(published, "h100", recipe).work.items()}

    assert set(precisions("int4").values()) == {"bf16"}
    assert {kind for kind, found in precisions("w4a8").items() if found == "fp8"} == {"experts"}
    assert {kind for kind, found in precisions("fp8").items() if found == "fp8"} == {"dense_mlp", "self_conditioning"}


def test_a_target_that_states_too_little(published: ModelSpec) -> None:
    cpu = workload(published, "cpu", "fp32", 512)
    assert lacking_facts(cpu) == "memory_bandwidth"
    assert step_time(cpu, lay_out_store(published, cpu.recipe), 16) is None
    slow = Target.load("h100").model_copy(update={"flops": {"bf16": 1e12}})
    assert lacking_facts(workload(published, slow, "w4a8", 512)) == "flops.fp8"
    assert lacking_facts(workload(published, slow, "int4", 512)) is None
    # The machine's own facts in a target of one's own are enough.
    mine = Target.load("cpu").model_copy(update={"memory_bandwidth": 4e10, "flops": {"fp32": 1e12}})
    step = step_of(published, mine, "fp32")
    assert step.binding == "memory" and step.floor_seconds > 2


@pytest.mark.parametrize("tokens", [0.0, -1.0, 257.0, float("nan"), float("inf")])
def test_tokens_per_step_out_of_range(published: ModelSpec, tokens: float) -> None:
    with pytest.raises(InputError, match="tokens_per_step is"):
        make_plan(workload(published, "h100", "bf16", 512), tokens_per_step=tokens)
