"""Activation ranges: the largest value that the input of each quantized linear layer takes on real prompts.

nvidia-modelopt watches the layers while transformers' own ``generate()`` runs. That happens in a process of its own
(``calibration_worker.py``): modelopt changes classes of torch and transformers for the rest of a process, and the
float32 model's memory goes back with it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dgcompile.checkpoint import Checkpoint
from dgcompile.config_file import parse_json, require_file
from dgcompile.errors import CalibrationError, CheckpointError, DgcompileError, InputError, MissingDependencyError
from dgcompile.progress import Progress
from dgcompile.recipe import weight_class
from dgcompile.worker_process import run_worker

MAX_LINE_BYTES = 1 << 20
"""Longest line of a file of prompts."""

CALIBRATION_PROMPTS = 128
"""How many prompts are run unless somebody says otherwise."""

_LAST_LINES = 12
_LINEAR_CLASSES = ("attention", "dense_mlp", "self_conditioning")
_ERRORS: dict[str, type[DgcompileError]] = {
    error.__name__: error for error in (InputError, CheckpointError, CalibrationError)
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ExpertUse(_Frozen):
    """Which experts of a layer were used.

    Attributes:
        layer: index of the layer.
        tokens: how often each expert was chosen, by encoder and decoder together.
    """

    layer: int
    tokens: tuple[int, ...]

    @property
    def unused(self) -> tuple[int, ...]:
        """The experts that no token reached. Their weights are quantized like all others: by their own values."""
        return tuple(expert for expert, count in enumerate(self.tokens) if not count)


class CalibrationReport(_Frozen):
    """What the ranges were taken from.

    Attributes:
        prompts: how many were run.
        prompt_tokens: tokens of all prompts together, chat template included.
        canvas_tokens: canvas positions times denoising steps: how many tokens the decoder saw.
        experts: use of the experts, per layer.
    """

    prompts: int
    prompt_tokens: int
    canvas_tokens: int
    experts: tuple[ExpertUse, ...]

    @property
    def unused_experts(self) -> int:
        """How many experts of all layers no token reached."""
        return sum(len(use.unused) for use in self.experts)


class Calibration(_Frozen):
    """Ranges of activations. It holds no time and no path: equal inputs give equal JSON.

    Attributes:
        input_amax: largest magnitude of a linear layer's input, by the canonical name of its weight. Finite and
            positive; layers that read the same tensor have the same.
        report: what they were taken from.
    """

    input_amax: dict[str, float]
    report: CalibrationReport


@dataclass(frozen=True)
class CalibrationJob:
    """What the worker is given.

    Attributes:
        checkpoint: its folder.
        weights: canonical names of the linear layers' weights.
        prompts: number of each line, and the prompt on it.
        chat: whether the checkpoint's template turns a prompt into a chat.
        source: how error messages name the file of the prompts.
    """

    checkpoint: str
    weights: list[str]
    prompts: list[tuple[int, str]]
    chat: bool
    source: str


def calibrate(
    checkpoint: Checkpoint,
    weights: Iterable[str],
    prompts: Path | None,
    progress: Progress | None = None,
    *,
    limit: int = CALIBRATION_PROMPTS,
) -> Calibration:
    """Runs the model in float32 on prompts and takes the ranges of linear layers' inputs.

    One range covers both modes of a layer, encoder and decoder, because they share the weight. Ranges that a published
    quantized checkpoint has are taken from there, and only the others are measured. On one machine, two runs give the
    same result.

    Args:
        checkpoint: the model. It is loaded as a whole: four bytes of memory per parameter.
        weights: canonical names of weights of class attention, dense_mlp or self_conditioning.
        prompts: JSON lines, each an object with a text "prompt"; what else it holds is not looked at. None where the
            checkpoint has all ranges, see :func:`ranges_lacking`.
        progress: told of each prompt.
        limit: how many prompts to run at most, from the first on.

    Raises:
        InputError: the prompts cannot be read, or one is too long for the model; names file and line.
        CheckpointError: transformers cannot load the model or its tokenizer.
        CalibrationError: a weight whose input was never seen, or was always zero; activations that are not finite; or
            the process ended. Names the weights.
        MissingDependencyError: modelopt, torch or transformers is not installed.
    """
    names = sorted(set(weights))
    known = checkpoint.spec.expected_tensors()
    for name in names:
        if name not in known or weight_class(name) not in _LINEAR_CLASSES:
            raise ValueError(f"{name} is no linear layer whose input is quantized by one scale")
    known_ranges = {name: amax for name in names if (amax := _published_range(checkpoint, name)) is not None}
    lacking = ranges_lacking(checkpoint, names)
    if not lacking:
        return Calibration(
            input_amax=known_ranges,
            report=CalibrationReport(prompts=0, prompt_tokens=0, canvas_tokens=0, experts=()),
        )
    if prompts is None:
        raise InputError(f"there are no prompts, and {checkpoint.path} has no range of the input of {lacking[0]}")
    missing = [package for package in ("torch", "transformers", "modelopt") if find_spec(package) is None]
    if missing:
        raise MissingDependencyError(
            f"ranges of activations are taken with {missing[0]}, which is not installed",
            fix="pip install 'dgcompile[build]', or give a recipe without fp8_static",
        )
    job = CalibrationJob(
        checkpoint=str(checkpoint.path.resolve()),
        weights=lacking,
        prompts=list(read_prompts(prompts, limit)),
        chat=checkpoint.chat_template() is not None,
        source=str(prompts),
    )
    result = Calibration.model_validate(_run_worker(job, progress or Progress())["calibration"])
    _refuse_missing_ranges(lacking, result)
    ranges = {**known_ranges, **result.input_amax}
    return Calibration(input_amax={name: ranges[name] for name in names}, report=result.report)


def ranges_lacking(checkpoint: Checkpoint, weights: Iterable[str]) -> list[str]:
    """Those weights whose input has no range in the checkpoint, so that prompts are needed."""
    return [name for name in weights if _published_range(checkpoint, name) is None]


def _published_range(checkpoint: Checkpoint, name: str) -> float | None:
    published = checkpoint.quantized.get(name)
    return published.input_amax if published else None


def read_prompts(file: Path, limit: int) -> Iterator[tuple[int, str]]:
    """The first prompts of a file of JSON lines, each with the number of its line. Empty lines are passed over.

    Raises:
        InputError: the file is missing, cannot be read or has no prompt, or a line is malformed; names file and line.
    """
    require_file(file, error=InputError)
    count = 0
    try:
        with file.open("rb") as lines:
            for number in itertools.count(1):
                line = lines.readline(MAX_LINE_BYTES + 1)
                if not line or count == limit:
                    break
                where = f"{file}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(f"{where} has more than {MAX_LINE_BYTES} bytes", expected="one prompt a line")
                if not line.strip():
                    continue
                prompt = parse_json(line, where, error=InputError).get("prompt")
                if not isinstance(prompt, str) or not prompt.strip():
                    raise InputError(f"{where} has no prompt", expected='an object such as {"prompt": "Hello"}')
                count += 1
                yield number, prompt
    except OSError as problem:
        raise InputError(f"{file} cannot be read: {problem.strerror}") from problem
    if not count:
        raise InputError(f"{file} holds no prompt", expected='lines such as {"prompt": "Hello"}')


def _refuse_missing_ranges(names: Iterable[str], result: Calibration) -> None:
    """Refuses ranges that no scale can be made of. The worker's JSON has null where no input was seen."""
    empty = [name for name in names if not result.input_amax.get(name)]
    if not empty:
        return
    more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
    raise CalibrationError(
        f"the input of {', '.join(empty[:3])}{more} was zero or never seen in {result.report.prompts} prompts",
        expected="each layer to be used",
        fix="give more prompts, or more denoising steps in generation_config.json: the first one of a canvas has no "
        "self-conditioning",
    )


def _run_worker(job: CalibrationJob, progress: Progress) -> Mapping[str, Any]:
    """The last event of a worker that did its work; an exception for one that did not."""
    with progress.task("calibration", len(job.prompts), "prompts") as advance:

        def told(event: Mapping[str, Any]) -> None:
            if event["event"] == "prompt":
                advance()

        ended = run_worker(_worker_command(), asdict(job), told)
        last = ended.last
        if ended.done:
            return last
        if last.get("event") == "error":
            raise _ERRORS[last["kind"]](last["problem"], expected=last["expected"], fix=last["fix"])
        raise CalibrationError(f"the process that took the ranges {ended.words}")


def _worker_command() -> list[str]:
    return [sys.executable, "-m", "dgcompile.quantize.calibration_worker"]
