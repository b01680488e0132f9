"""What doctor finds on machines that these tests make up."""

from __future__ import annotations

from email.message import Message
from importlib import metadata
from typing import Any

import pytest

from dgcompile.doctor import BASE, Ability, diagnose, installed_extras
from dgcompile.gpu import Card, Gpus
from dgcompile.target import Target

REQUIRES = [
    "click>=8.1",
    "onnxruntime>=1.22",
    'onnx>=1.23; extra == "build"',
    'torch==2.13.0; extra == "build"',
    'nowhere>=1; platform_system == "Nowhere" and extra == "build"',
    'cuda-python<14,>=13.0; extra == "rtx5090"',
    'polygraphy; extra == "rtx5090"',
    'tensorrt_rtx<1.8,>=1.7; extra == "rtx5090"',
    'cuda-python<14,>=13.0; extra == "h100"',
    'tensorrt<12,>=11.0; extra == "h100"',
    'pytest>=8.0; extra == "dev"',
]
EVERYTHING = {
    "click": "8.2",
    "onnxruntime": "1.32.0",
    "onnx": "1.23.2",
    "torch": "2.13.0+cpu",
    "cuda-python": "13.4",
    "polygraphy": "0.50",
    "tensorrt_rtx": "1.7.1.116",
    "tensorrt": "11.4.0.106",
}
RTX = Card(0, "NVIDIA GeForce RTX 5090", "12.0", 32 << 30, 170)
H100 = Card(0, "NVIDIA H100 80GB HBM3", "9.0", 80 << 30, 132)


def gpus(*cards: Card, cuda: tuple[int, int] = (13, 1)) -> Gpus:
    return Gpus(cuda, "590.1", cards, None if cards else "this machine has an NVIDIA driver but no GPU")


NO_DRIVER = Gpus(None, None, (), "this machine has no NVIDIA driver")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that this machine has; tests change them."""
    packages = dict(EVERYTHING)
    about = Message()
    for extra in ("build", "rtx5090", "h100", "dev"):
        about["Provides-Extra"] = extra

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(metadata, "metadata", lambda name: about)
    return packages


def abilities(machine: Gpus) -> dict[str, Ability]:
    diagnosis = diagnose([Target.load(name) for name in ("cpu", "h100", "rtx5090")], machine)
    return {ability.target: ability for ability in diagnosis.abilities}


def can(machine: Gpus) -> dict[str, tuple[bool, bool]]:
    return {name: (ability.can_build, ability.can_run) for name, ability in abilities(machine).items()}


def test_extras_are_those_of_the_package(installed: dict[str, str]) -> None:
    extras = {extra.name: extra for extra in installed_extras()}
    assert list(extras) == [BASE, "build", "rtx5090", "h100"]
    assert [package.name for package in extras[BASE].packages] == ["click", "onnxruntime"]
    # What another operating system needs is nobody's concern here.
    assert [package.name for package in extras["build"].packages] == ["onnx", "torch"]
    assert all(not extra.bad for extra in extras.values())


def test_machines_with_everything(installed: dict[str, str]) -> None:
    assert can(gpus(RTX)) == {"cpu": (True, True), "h100": (False, False), "rtx5090": (True, True)}
    assert can(gpus(H100)) == {"cpu": (True, True), "h100": (True, True), "rtx5090": (True, False)}
    assert can(NO_DRIVER) == {"cpu": (True, True), "h100": (False, False), "rtx5090": (True, False)}


def test_what_a_gpu_machine_lacks_is_said_with_what_helps(installed: dict[str, str]) -> None:
    (lack,) = abilities(NO_DRIVER)["rtx5090"].run_lacks
    assert lack.problem.startswith("this machine has no NVIDIA driver; expected a GPU of compute capability 12.0")
    assert lack.fix is not None and "install the NVIDIA driver" in lack.fix
    (lack,) = abilities(gpus(H100))["rtx5090"].run_lacks
    assert "NVIDIA H100 80GB HBM3 (9.0)" in lack.problem
    assert lack.fix == "use a machine with NVIDIA GeForce RTX 5090 32 GB"
    (lack,) = abilities(gpus(RTX, cuda=(12, 8)))["rtx5090"].run_lacks
    assert "CUDA 12.8" in lack.problem and lack.fix == "update the driver to 580 or newer"
    (lack,) = abilities(gpus())["h100"].build_lacks
    assert "no GPU" in lack.problem and lack.fix is not None
    assert "build --resume BUNDLE` on a machine with NVIDIA H100 SXM 80 GB" in lack.fix


@pytest.mark.parametrize(
    ("package", "version", "target", "build", "run", "problem"),
    [
        ("torch", None, "rtx5090", False, True, "torch"),
        ("torch", "2.12.1", "cpu", False, True, "torch 2.12.1 (needs ==2.13.0)"),
        ("tensorrt_rtx", None, "rtx5090", False, False, "tensorrt_rtx"),
        ("tensorrt_rtx", "1.8.0", "rtx5090", False, False, "tensorrt_rtx 1.8.0 (needs <1.8,>=1.7)"),
        ("cuda-python", None, "rtx5090", True, False, "cuda-python"),
        ("polygraphy", None, "rtx5090", True, True, ""),
        ("onnxruntime", None, "cpu", True, False, "onnxruntime"),
        ("onnxruntime", "1.21", "cpu", True, False, "onnxruntime 1.21 (needs >=1.22)"),
    ],
)
def test_packages_that_are_missing_or_old(
    installed: dict[str, str], package: str, version: str | None, target: str, build: bool, run: bool, problem: str
) -> None:
    del installed[package]
    if version:
        installed[package] = version
    ability = abilities(gpus(RTX))[target]
    assert (ability.can_build, ability.can_run) == (build, run)
    for lack in (*ability.build_lacks, *ability.run_lacks):
        assert lack.problem == f"not installed as needed: {problem}"
        assert lack.fix is not None and lack.fix.startswith("pip install ")
    bad = [bad.name for extra in installed_extras() for bad in extra.bad]
    assert set(bad) == {package}


def test_onnxruntime_for_gpus_is_onnxruntime_too(installed: dict[str, str]) -> None:
    installed["onnxruntime-gpu"] = installed.pop("onnxruntime")
    assert can(NO_DRIVER)["cpu"] == (True, True)


def test_a_folder_that_was_never_installed(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    found = abilities(gpus(RTX))
    assert not any(ability.can_build or ability.can_run for ability in found.values())
    assert found["cpu"].run_lacks[0].fix == "pip install dgcompile"


def test_the_real_package() -> None:
    """Its own metadata name at least what the tests run with."""
    extras = {extra.name: extra for extra in installed_extras()}
    assert {BASE, "build"} <= set(extras) and "dev" not in extras
    assert {"click", "onnxruntime"} <= {package.name for package in extras[BASE].packages}
    assert "torch" in {package.name for package in extras["build"].packages}
    assert extras[BASE].bad == ()


def test_a_gpu_that_no_kernel_runs_on_can_neither_be_built_for_nor_run() -> None:
    ampere = Target.load("rtx5090").model_copy(update={"name": "ampere", "compute_capability": "8.6"})
    (ability,) = diagnose([ampere]).abilities
    for lacks in (ability.build_lacks, ability.run_lacks):
        assert any("no kernels for compute capability 8.6" in lack.problem for lack in lacks)
