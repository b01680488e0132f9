"""The checks. Each is a function of a :class:`Workplace` that yields rows and leaves its figures there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import Measured, Part, measure
from synthetic_checkpoint import EXAMPLE, Fill, write_checkpoint

from dgcompile.bundle import MANIFEST_FILE, Manifest
from dgcompile.checkpoint import GENERATION_CONFIG_FILE
from dgcompile.cli.render import progress
from dgcompile.cli.text import format_bytes, format_seconds
from dgcompile.files import sha256_file
from dgcompile.safetensors_file import read_header
from dgcompile.weights_store import JOURNAL_FILE, WEIGHTS_FILE
from real_size.results import Row, at_most, equal, near
from tests.model_config import MAX_LAYERS, SMALL_SIZES, published_config

PARTS = Path(__file__).with_name("parts.py")
MINUTE, GB = 60.0, 1e9
PROMPTS, DENOISING_STEPS = 5, 4


class CheckFailed(Exception):
    """A check that could not be carried out; the message says why."""


@dataclass(frozen=True)
class Reference:
    """A finished bundle, as far as another build of it is held against it.

    Attributes:
        files: SHA-256 of each file by name.
        manifest: the content of its manifest.
    """

    files: dict[str, str]
    manifest: dict[str, Any]

    @classmethod
    def of(cls, bundle: Path) -> Reference:
        """Reads all of a bundle."""
        return cls(hashes(bundle), json.loads((bundle / MANIFEST_FILE).read_text()))

    def differences(self, bundle: Path) -> list[str]:
        """Names of the files that differ in another bundle; for the manifest also which entries."""
        other = Reference.of(bundle)
        differing = sorted({name for name, _ in self.files.items() ^ other.files.items()})
        entries = ", ".join(different_entries(self.manifest, other.manifest))
        return [f"{name} ({entries})" if name == MANIFEST_FILE and entries else name for name in differing]


@dataclass
class Workplace:
    """Where and how large the checks run.

    Attributes:
        folder: for checkpoints and bundles.
        small: a stand-in of a megabyte and two layers instead of the real size.
        target, recipe: what graphs and bundles are made for.
        keep: leave checkpoints and bundles where they are.
        echo: pass on what the measured commands say.
        figures: JSON data by check, filled in by the checks.
        reference: what the whole build came to, once it has been made.
    """

    folder: Path
    small: bool
    target: str
    recipe: str = "int4"
    keep: bool = False
    echo: bool = False
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    reference: Reference | None = None

    @property
    def whole(self) -> int:
        """Layers of the whole model."""
        return 2 if self.small else MAX_LAYERS

    def config(self, layers: int) -> dict[str, Any]:
        """config.json of a model's first layers."""
        return published_config(layers, **(SMALL_SIZES if self.small else {}))

    def checkpoint(self, layers: int, fill: Fill) -> Path:
        """A synthetic checkpoint, written unless it is there."""
        folder = self.folder / f"checkpoint-{layers}-{fill}{'-small' if self.small else ''}"
        if not folder.exists():
            write_checkpoint(folder, self.config(layers), fill=fill, progress=progress())
        return folder

    @contextmanager
    def new_folder(self, name: str) -> Iterator[Path]:
        """A folder for what a check makes; gone afterwards."""
        folder = self.folder / name
        remove(folder)
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            if not self.keep:
                remove(folder)

    def run(self, name: str, *words: str | Path, may_fail: bool = False, **options: Any) -> Measured:
        """Runs a Python script or module (``-m name``) with arguments, and keeps its figures under ``name``.

        Raises:
            CheckFailed: it ended with an error.
        """
        done = measure([sys.executable, *map(str, words)], echo=self.echo, environment=_PATHS, **options)
        self.figures.setdefault(name.split(".")[0], {})[name] = done.to_values()
        if done.exit_code and not may_fail:
            raise failure(done)
        return done

    def dgcompile(self, name: str, *words: str | Path, **options: Any) -> Measured:
        """Runs a command of dgcompile."""
        return self.run(name, "-m", "dgcompile", *words, **options)


_PATHS = {"PYTHONPATH": os.pathsep.join([str(PARTS.parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def failure(done: Measured) -> CheckFailed:
    """What is said of a command that failed: its last line."""
    last = (done.errors.strip().splitlines() or ["it said nothing"])[-1]
    return CheckFailed(f"{' '.join(done.command[1:4])} ... ended with exit code {done.exit_code}: {last}")


def remove(folder: Path) -> None:
    """Removes a folder, if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


def disk_bytes(folder: Path) -> int:
    """What a folder's files take on the disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def memory(part: Part) -> str:
    """Peak memory for people: what belongs to processes, and the pages of files, which may peak at another time."""
    return f"{format_bytes(part.resident)}: {format_bytes(part.own)} own, {format_bytes(part.mapped)} of files"


# plan -----------------------------------------------------------------------------------------------------------------


def check_plan(place: Workplace) -> Iterator[Row]:
    """``dgcompile plan`` of the published config, which takes no time, so never of a stand-in."""
    with place.new_folder("plan") as folder:
        config = folder / "config.json"
        config.write_text(json.dumps(published_config()))

        def planned(target: str, recipe: str, context: int) -> dict[str, Any]:
            options = ("--target", target, "--recipe", recipe, "--max-context", f"{context}", "--max-batch", "1")
            name = f"plan.{target}-{recipe}-{context}"
            done = place.dgcompile(name, "plan", config, *options, "--json")
            found: dict[str, Any] = json.loads(done.output)
            place.figures["plan"][name] = found
            return found

        def billions(value: float) -> str:
            return f"{value / 1e9:.2f} billion"

        rtx5090, h100 = planned("rtx5090", "int4", 8192), planned("h100", "fp8", 32768)
        longest = planned("h100", "fp8", 262144)
        yield near("parameters", rtx5090["parameters"], 25.25e9, 0.01 / 25.25, billions)
        yield at_most(
            "rtx5090, int4, 8 K tokens: device memory", rtx5090["device"]["total_bytes"], 18 * GB, format_bytes
        )
        yield at_most("h100, fp8, 32 K tokens: device memory", h100["device"]["total_bytes"], 40 * GB, format_bytes)
        yield near("KV cache of 256 K tokens", longest["device"]["kv_cache_bytes"], 5.6 * GB, 0.01, format_bytes)


# trace ----------------------------------------------------------------------------------------------------------------


def check_trace(place: Workplace) -> Iterator[Row]:
    """Both graphs of all layers, from shapes alone."""
    source = place.checkpoint(place.whole, "sparse")
    with place.new_folder("trace") as folder:
        done = place.run("trace", PARTS, "trace", source, folder, "--target", place.target, "--recipe", place.recipe)
    found = json.loads(done.output)
    place.figures["trace"]["graphs"] = found
    yield at_most("both graphs", found["seconds"], 4 * MINUTE, format_seconds)
    yield at_most("peak memory", done.whole.resident, 3 * GB, format_bytes)
    # The encoder ends in the last layer's keys and values.
    for graph, layers in (("encoder", place.whole - 1), ("denoiser", place.whole)):
        facts = found["graphs"][graph]
        operators = facts["operators"]
        yield equal(f"{graph}: BlockAttention nodes", operators.get("BlockAttention", 0), layers)
        yield equal(f"{graph}: MixtureOfExperts nodes", operators.get("MixtureOfExperts", 0), layers)
        yield at_most(f"{graph}: largest constant", facts["largest_constant_bytes"], 1e6, format_bytes)
        yield Row(f"{graph}: file", f"{format_bytes(facts['file_bytes'])}, {facts['nodes']} nodes")


# quantize -------------------------------------------------------------------------------------------------------------


def check_quantize(place: Workplace) -> Iterator[Row]:
    """Random weights of two depths to int4: memory must not depend on depth, and time little on anything but bytes."""
    peaks = []
    for layers in (1, 2) if place.small else (2, 6):
        source = place.checkpoint(layers, "random")
        with place.new_folder(f"quantize-{layers}") as folder:
            forget(source)
            words = (PARTS, "quantize", source, folder, "--target", place.target, "--recipe", place.recipe)
            done = place.run(f"quantize.{layers}-layers", *words)
            found = json.loads(done.output)
            (folder / WEIGHTS_FILE).unlink()
            found["plain_seconds"] = read_and_write(source, found["store_bytes"], folder / "plain")
        place.figures["quantize"][f"quantize.{layers}-layers"] |= found
        peaks.append(done.whole.resident)
        if not place.keep and layers != 2:
            remove(source)  # that of two layers is used again
        seconds, name = found["seconds"], f"{layers} layers"
        yield at_most(f"{name}: peak memory", done.whole.resident, 4 * GB, format_bytes)
        yield Row(
            f"{name}: read, written",
            f"{format_bytes(found['source_bytes'])}, {format_bytes(found['store_bytes'])} in {format_seconds(seconds)}",
        )
        yield from _against_plain(name, found)
    yield near("peak memory, the deeper one's beside the other's", peaks[1], peaks[0], 0.1, format_bytes)


def _against_plain(name: str, found: dict[str, Any]) -> Iterator[Row]:
    """The time beside that of reading and writing. Beyond twice that, it is not judged: the profile says why not."""
    seconds, plain, phases = found["seconds"], found["plain_seconds"], found["phases_seconds"]
    times = seconds / max(plain, 1e-3)
    what = f"{name}: time beside reading once and writing once"
    yield Row(what, f"{times:.1f} x {format_seconds(plain)}", "under 2 x, else see below", times < 2 or None)
    shares = sorted(phases.items(), key=lambda item: -item[1])
    profile = ", ".join(f"{phase} {100 * spent / seconds:.0f} %" for phase, spent in shares if spent > 0.01 * seconds)
    yield Row(f"{name}: where it went", profile)


def forget(folder: Path) -> None:
    """Has the system drop what it keeps of a folder's files in memory, so that they are read from the disk."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_and_write(source: Path, nbytes: int, output: Path) -> float:
    """Seconds that it takes to read a checkpoint's weights and to write ``nbytes`` to the disk, and nothing else."""
    forget(source)
    piece = bytearray(os.urandom(8 << 20))
    started = time.monotonic()
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(piece):
                pass
    with output.open("wb", buffering=0) as opened:
        left = nbytes
        while left:
            left -= opened.write(memoryview(piece)[: min(left, len(piece))])
        os.fsync(opened.fileno())
    seconds = time.monotonic() - started
    output.unlink()
    return seconds


# build and resume -----------------------------------------------------------------------------------------------------


def build_words(place: Workplace, output: Path) -> tuple[str | Path, ...]:
    """The command that builds the whole model."""
    source = place.checkpoint(place.whole, "sparse")
    return ("build", source, "--target", place.target, "--recipe", place.recipe, "-o", output)


def check_build(place: Workplace) -> Iterator[Row]:
    """The whole build, from weights that are holes: what it takes, stage by stage."""
    source = place.checkpoint(place.whole, "sparse")
    words = ("plan", source, "--target", place.target, "--recipe", place.recipe, "--json")
    planned = json.loads(place.dgcompile("build.plan", *words).output)["disk"]["bundle_bytes"]
    with place.new_folder("bundle") as bundle:
        done = place.dgcompile("build.build", *build_words(place, bundle))
        used = disk_bytes(bundle)
        place.reference = Reference.of(bundle)
    place.figures["build"]["disk_bytes"], place.figures["build"]["planned_bytes"] = used, planned
    yield at_most("all stages", done.whole.seconds, 40 * MINUTE, format_seconds)
    for label, part in {**done.parts, "all stages": done.whole}.items():
        took = f"{format_seconds(part.seconds)}; {format_bytes(part.read)} read, {format_bytes(part.written)} written"
        yield Row(label, took)
        yield Row(f"{label}: peak memory", memory(part), f"under {format_bytes(12 * GB)}", part.resident < 12 * GB)
    row = near("bundle on the disk, beside its plan", used, planned, 0.05, format_bytes)
    # Small files are mostly file system blocks and headers, which no plan of gigabytes counts.
    yield Row(row.what, row.found, row.bound) if place.small else row


def check_resume(place: Workplace) -> Iterator[Row]:
    """The same build killed in the middle of its weights, and where there are engines between the two: it must end the
    same, file for file."""
    if place.reference is None:
        with place.new_folder("bundle") as bundle:
            place.dgcompile("resume.reference", *build_words(place, bundle))
            place.reference = Reference.of(bundle)
    with place.new_folder("resumed") as bundle:
        kills: list[tuple[str, Callable[[], bool]]] = [("half of the weights", lambda: half_of_the_weights(bundle))]
        if any(name.endswith(".engine") for name in place.reference.files):
            kills.append(("one of two engines", lambda: any(bundle.glob("engines/*.engine"))))
        for index, (when, reached) in enumerate(kills):
            done = place.dgcompile(
                f"resume.kill-{index + 1}", *build_words(place, bundle), stop_when=reached, may_fail=True
            )
            if done.exit_code > 0:
                raise failure(done)
            # 0: it had ended before.
            yield equal(f"killed after {when}: exit code", done.exit_code, -signal.SIGKILL)
            states = {name: record.state for name, record in Manifest.read(bundle).stages.items()}
            yield Row("finished by then", ", ".join(name for name in states if states[name] == "finished") or "nothing")
        done = place.dgcompile("resume.resumed", *build_words(place, bundle))
        yield Row("the rest", format_seconds(done.whole.seconds))
        differing = place.reference.differences(bundle)
    place.figures["resume"]["files"] = place.reference.files
    yield equal("files that differ from those of the build in one go", ", ".join(differing) or "none", "none")


def hashes(bundle: Path) -> dict[str, str]:
    """SHA-256 of each file of a bundle by name, but for what engines remember between runs."""
    files = (file for file in sorted(bundle.rglob("*")) if file.is_file() and file.parent.name != "cache")
    return {str(file.relative_to(bundle)): sha256_file(file) for file in files}


def different_entries(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two pieces of JSON data differ: ``stages.engine.inputs``."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        found = (different_entries(one.get(key), other.get(key), f"{path}.{key}".lstrip(".")) for key in keys)
        return [entry for entries in found for entry in entries]
    return [] if one == other else [path]


def half_of_the_weights(bundle: Path) -> bool:
    """Whether half of a bundle's weights are safely on disk; or all, where they are too few to be noted earlier."""
    if (bundle / WEIGHTS_FILE).exists():
        return True
    try:
        lines = (bundle / JOURNAL_FILE).read_text().splitlines()[1:]
        stored = read_header(bundle / (WEIGHTS_FILE + ".partial"))
    except Exception:  # not begun, or being written right now
        return False
    done = [json.loads(line)["tensor"] for line in lines if line.endswith("}")]
    sizes = {name: tensor.nbytes for name, tensor in stored.items()}
    return 2 * sum(sizes[name] for name in done) >= sum(sizes.values())


# generate -------------------------------------------------------------------------------------------------------------


def check_generate(place: Workplace) -> Iterator[Row]:
    """A random model of two layers in float32: onnxruntime and transformers say the same, token for token."""
    source = place.checkpoint(2, "random")
    with place.new_folder("generate") as folder:
        quick = few_steps(source, folder / "checkpoint")
        bundle = folder / "bundle"
        built = place.dgcompile("generate.build", "build", quick, "--target", "cpu", "--recipe", "fp32", "-o", bundle)
        prompts = ("--prompts", EXAMPLE / "calibration.jsonl", "--pairs", f"{PROMPTS}")
        words = ("verify", bundle, "--against", quick, *prompts, "--json")
        done = place.dgcompile("generate.verify", *words, may_fail=True)
    try:
        report = json.loads(done.output)
    except ValueError:
        raise failure(done) from None
    place.figures["generate"]["report"] = report
    pairs = report["pairs"]
    yield Row("build", f"{format_seconds(built.whole.seconds)}; {memory(built.whole)}")
    yield Row("comparison", f"{format_seconds(done.whole.seconds)}; {memory(done.whole)}")
    yield equal("prompts with identical tokens", sum(pair["exact"] for pair in pairs), PROMPTS)
    yield equal("exit code of the comparison", done.exit_code, 0)
    steps = sorted({count for pair in pairs for count in pair["reference_steps"]})
    yield Row("denoising steps of a canvas", ", ".join(map(str, steps)))


def few_steps(source: Path, folder: Path) -> Path:
    """The same checkpoint with a limit of few denoising steps: each takes seconds here."""
    folder.mkdir()
    for file in source.iterdir():
        os.link(file, folder / file.name)
    settings = folder / GENERATION_CONFIG_FILE
    content = json.loads(settings.read_text())
    settings.unlink()  # the link, not the original
    settings.write_text(json.dumps({**content, "max_denoising_steps": DENOISING_STEPS}))
    return folder


CHECKS: dict[str, Callable[[Workplace], Iterator[Row]]] = {
    "plan": check_plan,
    "trace": check_trace,
    "quantize": check_quantize,
    "build": check_build,
    "resume": check_resume,
    "generate": check_generate,
}
