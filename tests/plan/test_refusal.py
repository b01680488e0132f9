"""Builds refuse what cannot fit, with figures and before anything is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dgcompile.build import build
from dgcompile.build.planning import plan_build
from dgcompile.bundle import Manifest
from dgcompile.errors import DgcompileError, InputError, StageError
from dgcompile.model_spec import ModelSpec
from dgcompile.plan import BuildPlan, make_plan
from dgcompile.plan.refusal import refuse_what_cannot_fit
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from tests.models import random_checkpoint
from tests.plan.helpers import plan, workload


def refusal(found: BuildPlan) -> DgcompileError:
    with pytest.raises(DgcompileError) as caught:
        refuse_what_cannot_fit(found)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_card_that_is_too_small(published: ModelSpec) -> None:
    error = refusal(plan(published, "rtx4090", "w8a16", 8192))
    assert isinstance(error, InputError)
    text = str(error)
    assert "NVIDIA GeForce RTX 4090 24 GB has 24.0 GB and would need 28" in text
    assert "weights 26.1 GB, KV cache 0.4 GB, activations 1.5 GB" in text
    assert "expected a recipe with fewer bits, or another target" in text and "dgcompile plan" in text


def test_a_limit_that_is_too_high_names_the_one_that_fits(published: ModelSpec) -> None:
    found = plan(published, "rtx5090", "w4a8", 8192, batch=64)
    assert found.context_fits is None and found.batch_fits
    assert f"a max_batch of at most {found.batch_fits} at that context" in str(refusal(found))
    refuse_what_cannot_fit(plan(published, "rtx5090", "w4a8", 8192, batch=found.batch_fits))

    found = plan(published, "rtx4090", "w4a8", 262144)
    if not found.fits:
        assert f"a max_context of at most {found.context_fits} at that batch" in str(refusal(found))
    assert found.context_fits and found.context_fits > 8192
    refuse_what_cannot_fit(plan(published, "rtx4090", "w4a8", found.context_fits))


def test_the_cpu_is_never_too_small(published: ModelSpec) -> None:
    found = replace(plan(published, "cpu", "fp32", 8192), device_has=1 << 30)
    assert not found.fits
    refuse_what_cannot_fit(found)


def test_memory_of_this_machine(published: ModelSpec) -> None:
    found = make_plan(workload(published, "h100", "fp8", 8192), calibrates=True)
    found = replace(found, host=replace(found.host, machine=64_000_000_000))
    error = refusal(found)
    assert isinstance(error, StageError)
    assert "stage calibration needs about 102.0 GB of memory and this machine has 64.0 GB" in str(error)
    assert "such as w8a16" in str(error)
    refuse_what_cannot_fit(replace(found, host=replace(found.host, machine=128_000_000_000)))


def test_engines_for_tensorrt_are_not_built_here(published: ModelSpec) -> None:
    """A machine that is too small for the engine stage may prepare everything else."""
    for target in ("h100", "rtx5090"):
        found = plan(published, target, "w8a16", 8192)
        stages = {**found.host.stages, "engine": 9_000_000_000}
        found = replace(found, host=replace(found.host, stages=stages, machine=8_000_000_000))
        if target == "h100":
            refuse_what_cannot_fit(found)
        else:
            assert "stage engine needs about 9.0 GB" in str(refusal(found))


def test_disk(published: ModelSpec) -> None:
    found = plan(published, "rtx5090", "int4", 8192)
    needed = found.disk.bundle
    for free, present, fits in ((needed, 0, True), (needed - 1, 0, False), (needed - 1, 1, True), (None, 0, True)):
        here = replace(found, disk=replace(found.disk, free=free, present=present))
        if fits:
            refuse_what_cannot_fit(here)
        else:
            text = str(refusal(here))
            assert (
                f"no space left for the bundle: it takes about {needed / 1e9:.1f} GB" in text
                and "another output folder" in text
            )


def test_a_build_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "checkpoint", layers=("sliding", "full"), head_dim=16, full_head_dim=32)
    small = Target.load("rtx5090").model_copy(
        update={"name": "small", "title": "A small card", "memory_bytes": 1 << 29}
    )
    with pytest.raises(InputError, match=r"A small card has 0\.5 GB and would need 0\.5 GB \(weights \d\.\d\d MB"):
        build(checkpoint, small, Recipe.load("bf16"), tmp_path / "out", max_context=96, max_batch=64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_a_build_is_refused_on_a_full_disk(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgcompile.plan.build_plan.free_bytes", lambda folder: 1000)
    said = r"no space left for .*: it takes about .* are free on its disk; .* run the same command again"
    with pytest.raises(StageError, match=said):
        build(checkpoint, Target.load("cpu"), Recipe.load("fp32"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_finished_bundle_needs_nothing_more(checkpoint: Path, bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    found = plan_build(checkpoint, manifest.target, manifest.recipe, output=bundle)
    assert found.disk.needed == 0 and found.disk.present == found.disk.bundle > 0
    other = plan_build(checkpoint, manifest.target, Recipe.load("w8a16"), output=bundle)
    assert other.disk.present == 0 and other.disk.needed == other.disk.bundle
