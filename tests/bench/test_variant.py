"""The ways to run transformers."""

from __future__ import annotations

import pytest

from dgcompile.bench.variant import Variant, compiled_variants, is_hopeless, plain_variants
from dgcompile.errors import RequestError


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("float32,eager", Variant("float32", "eager")),
        ("float32,grouped_mm,compile", Variant("float32", "grouped_mm", True)),
        ("compile, batched_mm ,bfloat16", Variant("bfloat16", "batched_mm", True)),
        ("bfloat16,eager,eager_attention", Variant("bfloat16", "eager", False, "eager")),
    ],
)
def test_names(text: str, variant: Variant) -> None:
    assert Variant.parse(text) == variant
    assert Variant.parse(variant.name) == variant


@pytest.mark.parametrize(
    "text",
    ["", "float32", "eager", "float32,bfloat16,eager", "float32,eager,grouped_mm", "float32,eager,fast", "eager,eager"],
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"--variant is .*expected float32 or bfloat16.*grouped_mm,compile"):
        Variant.parse(text)


def test_plain_variants_are_all_combinations() -> None:
    found = {(variant.dtype, variant.experts) for variant in plain_variants()}
    assert found == {(d, e) for d in ("float32", "bfloat16") for e in ("eager", "batched_mm", "grouped_mm")}
    assert not any(variant.compiled for variant in plain_variants())


def test_only_what_is_near_the_best_is_compiled_the_fastest_first() -> None:
    eager, grouped, batched = (Variant("float32", experts) for experts in ("eager", "grouped_mm", "batched_mm"))  # type: ignore[arg-type]
    found = compiled_variants({eager: 1.2, grouped: 1.1, batched: 6.0})
    assert [variant.name for variant in found] == ["float32,grouped_mm,compile", "float32,eager,compile"]
    assert compiled_variants({}) == []


@pytest.mark.parametrize(
    ("steps", "hopeless"),
    [([], False), ([3.9], False), ([4.1], True), ([3.9, 1.6], True), ([9.0, 1.4], False), ([1.4, 9.0], False)],
)
def test_one_step_says_that_a_variant_is_far_slower_and_two_that_it_is_clearly_slower(
    steps: list[float], hopeless: bool
) -> None:
    assert is_hopeless(steps, 1.0, warm_up=False) is hopeless
    assert is_hopeless([2 * step for step in steps], 2.0, warm_up=False) is hopeless


def test_while_it_warms_up_only_a_far_slower_variant_is_given_up() -> None:
    assert not is_hopeless([9.0, 3.9], 1.0, warm_up=True)
    assert is_hopeless([9.0, 4.1], 1.0, warm_up=True)
