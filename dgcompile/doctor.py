"""What this machine has, and what it lacks to build for a target or to run what was built for it."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

import dgcompile
from dgcompile.errors import BundleError
from dgcompile.gpu import LIBRARY_EXTRAS, Gpus, check_gpu, query_gpus
from dgcompile.plugins.moe.launch import TILES
from dgcompile.target import Target

BASE = "base"
"""Name of what is installed without an extra."""

_PROJECT = "dgcompile"
_DEVELOPERS = "dev"
_RUN_PACKAGES = ("cuda-python",)  # beside the engine library
# The GPU build of ONNX Runtime is another package with the same content and more; only one of the two can be installed.
_SUBSTITUTES = {"onnxruntime": ("onnxruntime-gpu",)}


@dataclass(frozen=True)
class Package:
    """A package that an extra asks for.

    Attributes:
        name: on the package index.
        wanted: versions that will do, such as ">=1.23"; empty for any.
        installed: version that is installed; None when it is not.
        is_fine: whether that version will do.
    """

    name: str
    wanted: str
    installed: str | None
    is_fine: bool


@dataclass(frozen=True)
class Extra:
    """An extra of this package, or :data:`BASE`."""

    name: str
    packages: tuple[Package, ...]

    @property
    def bad(self) -> tuple[Package, ...]:
        """What is missing or has a version that will not do."""
        return tuple(package for package in self.packages if not package.is_fine)


@dataclass(frozen=True)
class Lack:
    """Something that is missing.

    Attributes:
        problem: what.
        fix: the command that helps, or what to do; None when nothing on this machine does.
    """

    problem: str
    fix: str | None


@dataclass(frozen=True)
class Ability:
    """What this machine can do for a target.

    Attributes:
        target: its name.
        title: the product's name.
        build_lacks: what it lacks to build; empty when it can.
        run_lacks: what it lacks to run what was built for the target; empty when it can.
    """

    target: str
    title: str
    build_lacks: tuple[Lack, ...]
    run_lacks: tuple[Lack, ...]

    @property
    def can_build(self) -> bool:
        """Whether bundles for the target can be built here."""
        return not self.build_lacks

    @property
    def can_run(self) -> bool:
        """Whether bundles for the target run here."""
        return not self.run_lacks


@dataclass(frozen=True)
class Diagnosis:
    """All of it.

    Attributes:
        version: of dgcompile.
        python: version of Python.
        system: operating system and machine.
        extras: :data:`BASE` first.
        gpus: driver and GPUs.
        abilities: per target.
    """

    version: str
    python: str
    system: str
    extras: tuple[Extra, ...]
    gpus: Gpus
    abilities: tuple[Ability, ...]


def diagnose(targets: Iterable[Target], gpus: Gpus | None = None) -> Diagnosis:
    """Looks at this machine; imports none of the libraries that it looks for.

    Args:
        targets: what to look for.
        gpus: what :func:`~dgcompile.gpu.query_gpus` said; None to ask now.
    """
    gpus = query_gpus() if gpus is None else gpus
    extras = installed_extras()
    return Diagnosis(
        version=dgcompile.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        extras=extras,
        gpus=gpus,
        abilities=tuple(_ability(target, extras, gpus) for target in targets),
    )


def installed_extras() -> tuple[Extra, ...]:
    """What each extra of this package asks for, as its metadata say, and what is installed of it."""
    try:
        lines = metadata.requires(_PROJECT) or []
        names = metadata.metadata(_PROJECT).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:  # run from a folder that was never installed
        return ()
    packages: dict[str, list[Package]] = {BASE: [], **{name: [] for name in names if name != _DEVELOPERS}}
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        for extra, found in packages.items():
            asked = "" if extra == BASE else extra
            # The base packages have no marker with an extra, so they would be asked for by every extra as well.
            of_base = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if (extra == BASE) == of_base and (
                requirement.marker is None or requirement.marker.evaluate({"extra": asked})
            ):
                found.append(_package(requirement))
    return tuple(Extra(name, tuple(found)) for name, found in packages.items())


def _package(requirement: Requirement) -> Package:
    for name in (requirement.name, *_SUBSTITUTES.get(requirement.name, ())):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        fine = requirement.specifier.contains(installed, prereleases=True)
        return Package(name, str(requirement.specifier), installed, fine)
    return Package(requirement.name, str(requirement.specifier), None, False)


def _ability(target: Target, extras: tuple[Extra, ...], gpus: Gpus) -> Ability:
    by_name = {extra.name: extra for extra in extras}
    build = _lacking(by_name, "build")
    run: list[Lack] = []
    if target.backend == "onnxruntime":
        run += _lacking(by_name, BASE, only=("onnxruntime", "onnxruntime-gpu"))
    else:
        extra = LIBRARY_EXTRAS[target.backend]
        build += _lacking(by_name, extra, only=(target.backend,))
        if target.sm not in {sm for sm, _ in TILES}:
            lack = Lack(
                f"there are no kernels for compute capability {target.compute_capability}", "use another target"
            )
            build.append(lack)
            run.append(lack)
        run += _lacking(by_name, extra, only=(target.backend, *_RUN_PACKAGES))
        on_gpu = _gpu_lacks(target, gpus)
        run += on_gpu
        if target.backend == "tensorrt":
            # It measures its kernels while it builds; TensorRT-RTX compiles them where they run.
            elsewhere = (
                f"`dgcompile build` does all but the engines here; then run `dgcompile build --resume BUNDLE` on a "
                f"machine with {target.title}"
            )
            build += [Lack(lack.problem, elsewhere) for lack in on_gpu]
    return Ability(target.name, target.title, tuple(build), tuple(run))


def _lacking(extras: dict[str, Extra], name: str, only: tuple[str, ...] | None = None) -> list[Lack]:
    """What is bad in an extra, or in some packages of it, as one lack."""
    install = f"pip install '{_PROJECT}[{name}]'" if name != BASE else f"pip install {_PROJECT}"
    if name not in extras:
        return [Lack(f"no installed {_PROJECT} package knows what {name} consists of", install)]
    bad = [
        f"{package.name} {package.installed} (needs {package.wanted})" if package.installed else package.name
        for package in extras[name].bad
        if only is None or package.name.replace("-", "_") in [other.replace("-", "_") for other in only]
    ]
    if not bad:
        return []
    return [Lack(f"not installed as needed: {', '.join(bad)}", install)]


def _gpu_lacks(target: Target, gpus: Gpus) -> list[Lack]:
    assert target.compute_capability is not None
    try:
        check_gpu(target.compute_capability, target.backend, gpus)
    except BundleError as error:
        problem = error.problem + (f"; expected {error.expected}" if error.expected else "")
        # The message's own advice is for somebody who has a bundle at hand.
        driver_helps = gpus.driver_cuda is None or any(
            card.compute_capability == target.compute_capability for card in gpus.cards
        )
        return [Lack(problem, error.fix if driver_helps else f"use a machine with {target.title}")]
    return []
