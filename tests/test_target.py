"""Targets: the facts that come with dgcompile, and the user's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgcompile.errors import TargetError
from dgcompile.target import Target, list_targets

MINE = """
name: mine
title: My GPU
backend: tensorrt_rtx
compute_capability: "8.9"
memory_bytes: 24_000_000_000
memory_bandwidth: 1.008e+12
multiprocessors: 128
flops: {bf16: 165.2e12}
weight_formats: [bf16]
activation_dtypes: [bfloat16]
default_recipe: bf16
"""


def test_every_listed_target_loads_under_its_own_name() -> None:
    assert list_targets() == ["cpu", "h100", "h200", "rtx4090", "rtx5090"]
    assert [Target.load(name).name for name in list_targets()] == list_targets()


def test_the_cpu_states_nothing_about_the_machine() -> None:
    cpu = Target.load("cpu")
    assert (cpu.backend, cpu.compute_capability, cpu.memory_bytes, cpu.flops) == ("onnxruntime", None, None, {})
    assert cpu.weight_formats == ("fp32", "bf16", "fp8", "int8", "int4")


def test_gpu_facts() -> None:
    h100, h200, rtx4090, rtx5090 = map(Target.load, ("h100", "h200", "rtx4090", "rtx5090"))
    assert (h100.backend, h100.compute_capability) == ("tensorrt", "9.0")
    assert (rtx4090.backend, rtx4090.compute_capability) == ("tensorrt_rtx", "8.9")
    assert (rtx5090.backend, rtx5090.compute_capability) == ("tensorrt_rtx", "12.0")
    # The H200 is an H100 with more and faster memory.
    faster = {"name": "h200", "title": h200.title, "memory_bytes": 141_000_000_000, "memory_bandwidth": 4.8e12}
    assert h100.model_copy(update=faster) == h200
    # Roofline corners that are published in this form too: FLOP per byte at which compute and memory are in balance.
    assert h100.flops["bf16"] / (h100.memory_bandwidth or 0) == pytest.approx(295, abs=1)
    assert rtx5090.flops["bf16"] / (rtx5090.memory_bandwidth or 0) == pytest.approx(117, abs=1)
    assert rtx4090.flops["bf16"] / (rtx4090.memory_bandwidth or 0) == pytest.approx(164, abs=1)
    # Dense rates double with each halving of the number format, on all.
    for card in (h100, h200, rtx4090, rtx5090):
        assert card.flops["fp8"] == pytest.approx(2 * card.flops["bf16"], rel=1e-3)
    assert rtx5090.flops["fp4"] == pytest.approx(4 * rtx5090.flops["fp8"], rel=1e-3)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    for source in (file, str(file)):
        target = Target.load(source)
        assert (target.name, target.memory_bytes, target.flops["bf16"]) == ("mine", 24_000_000_000, 165.2e12)


def test_an_unknown_name() -> None:
    names = "cpu, h100, h200, rtx4090, rtx5090"
    with pytest.raises(TargetError, match=f"unknown target 'b200'; expected one of {names}, or the path"):
        Target.load("b200")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title:", "titel:", "unknown key 'titel'; expected one of name, title, backend"),
        ("title: My GPU", "", "title is missing"),
        ("tensorrt_rtx", "cuda", "backend is 'cuda'"),
        ("multiprocessors: 128", "", "a target of the tensorrt_rtx backend needs multiprocessors"),
        ("memory_bytes: 24_000_000_000", "", "a target of the tensorrt_rtx backend needs memory_bytes"),
        ('"8.9"', '"89"', "compute_capability is '89'"),
        ('"8.9"', "8.9", "compute_capability is 8.9"),
        ("24_000_000_000", "-1", "memory_bytes is -1"),
        ("1.008e+12", ".inf", "memory_bandwidth is inf"),
        ("{bf16", "{bf17", "flops.bf17"),
        ("name: mine", "name: mine\nname: yours", "key 'name' occurs twice"),
        ("name: mine", "name: !!python/object/apply:os.getpid []", "could not determine a constructor"),
        ("name: mine", "- name", "is not usable YAML"),
    ],
)
def test_bad_files_are_refused_by_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    assert old in MINE
    file.write_text(MINE.replace(old, new))
    with pytest.raises(TargetError) as raised:
        Target.load(file)
    assert str(file) in str(raised.value)
    assert message in str(raised.value)


def test_files_that_are_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("cpu")
    with pytest.raises(TargetError, match="holds a str"):
        Target.load(tmp_path / "x.yaml")
    with pytest.raises(TargetError, match="is missing"):
        Target.load(tmp_path / "y.yaml")
    with pytest.raises(TargetError, match="is not a regular file"):
        Target.load(tmp_path)
