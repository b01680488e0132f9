"""What is measured, and who takes part. Everything that can be refused is refused here, before anything is started."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from dgcompile.bench.variant import Variant
from dgcompile.bundle import Bundle
from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import InputError, MissingDependencyError, RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.plan.host import available_memory
from dgcompile.plan.weights import parameters_of
from dgcompile.runtime.random_numbers import RowRandom

TRANSFORMERS = "transformers"
MAX_TURNS = 1000
MAX_THREADS = 1024
WARM_UP_STEPS = 2
"""Steps of each canvas while warming up: the first reads no self-conditioning in transformers, the others do."""


class Settings(BaseModel):
    """What is measured.

    Attributes:
        prompt_tokens: of the prompt.
        new_tokens: that an end-to-end ``generate`` generates.
        steps: denoising steps of each canvas, exactly.
        pasts: cached tokens at which the denoising step is timed.
        threads: of each contender.
        turns: of each contender.
        seed: of the prompts and of the row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_tokens: int
    new_tokens: int
    steps: int
    pasts: tuple[int, ...]
    threads: int
    turns: int
    seed: int

    def canvases(self, spec: ModelSpec) -> int:
        """Of an end-to-end ``generate``."""
        return math.ceil(self.new_tokens / spec.canvas_length)

    def check(self, spec: ModelSpec, max_context: int, whose: str) -> None:
        """Refuses what a model cannot do.

        Args:
            spec: the model.
            max_context: tokens of a row.
            whose: what has that limit.

        Raises:
            RequestError: names the option.
        """
        for option, value, lowest, highest in (
            ("--prompt-tokens", self.prompt_tokens, 1, max_context),
            ("--new-tokens", self.new_tokens, 1, max_context),
            ("--steps", self.steps, 2, 1 << 20),
            ("--threads", self.threads, 1, MAX_THREADS),
            ("--turns", self.turns, 1, MAX_TURNS),
            *(("--past", past, 1, max_context) for past in self.pasts),
        ):
            if not lowest <= value <= highest:
                why = " (a step is timed from one to the next)" if option == "--steps" else ""
                raise RequestError(f"{option} is {value}", expected=f"{lowest} to {highest}{why}")
        needed = self.prompt_tokens + self.canvases(spec) * spec.canvas_length
        if needed > max_context:
            raise RequestError(
                f"--prompt-tokens {self.prompt_tokens} and --new-tokens {self.new_tokens} take {needed} tokens "
                f"(canvases of {spec.canvas_length})",
                expected=f"at most {max_context}, the max_context of {whose}",
                fix="lower one of them, or build with a larger --max-context",
            )
        longest = max(self.pasts)
        if longest + spec.canvas_length > max_context:
            raise RequestError(
                f"--past {longest} and a canvas take {longest + spec.canvas_length} tokens",
                expected=f"at most {max_context}, the max_context of {whose}",
                fix="lower it, or build with a larger --max-context",
            )

    def generation(self, base: GenerationConfig, new_tokens: int, steps: int) -> GenerationConfig:
        """The options of a ``generate`` of exactly ``steps`` steps a canvas, to the last token.

        transformers cannot switch early stopping off. But a canvas is stable only after as many equal ones before it
        as ``stability_threshold`` says, and no canvas has ``steps`` ones before it.
        """
        return base.replace(
            max_new_tokens=new_tokens,
            max_denoising_steps=steps,
            stability_threshold=steps,
            confidence_threshold=base.confidence_threshold or GenerationConfig().confidence_threshold,
            eos_token_ids=(),
        )


class Task(BaseModel):
    """One ``generate`` of a turn.

    Attributes:
        past: tokens of its prompt.
        new_tokens: that it generates.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    past: int
    new_tokens: int


def tasks_of(settings: Settings, spec: ModelSpec) -> list[Task]:
    """What a contender does in a turn: the end-to-end ``generate`` first, whose first canvas also gives the step at the
    past of its prompt, then one canvas at each other past."""
    others = [Task(past=past, new_tokens=spec.canvas_length) for past in settings.pasts]
    return [
        Task(past=settings.prompt_tokens, new_tokens=settings.new_tokens),
        *(task for task in others if task.past != settings.prompt_tokens),
    ]


def prompt_ids(seed: int, length: int, vocab_size: int, avoid: Collection[int]) -> list[int]:
    """``length`` random token ids, none of them in ``avoid``: a token that stands for an image has no text."""
    # Not the numbers of the row with this seed: its first canvas would be the prompt.
    random = RowRandom(seed ^ (1 << 63), length, vocab_size)
    kept: list[int] = []
    draw = 0
    while len(kept) < length:
        ids = random.initial_canvas(draw)
        kept += ids[~np.isin(ids, list(avoid))].tolist()
        draw += 1
    return kept[:length]


@dataclass(frozen=True)
class Contender:
    """Who takes part.

    Attributes:
        kind: a bundle, or transformers.
        name: as the user gave it.
        path: folder of the bundle or the checkpoint.
        on_cpu: whether its steps run on the CPU, so that the floor of this machine concerns it.
        weight_bytes: of this machine's memory that its weights take.
        values: what its process is told besides the path.
        title: a few words on what it is.
    """

    kind: Literal["bundle", "transformers"]
    name: str
    path: Path
    on_cpu: bool
    weight_bytes: int
    values: dict[str, Any]
    title: str

    @property
    def module(self) -> str:
        """What its process runs."""
        return f"dgcompile.bench.{self.kind}_worker"


def bundle_contender(bundle: Bundle, name: str, threads: int) -> Contender:
    """A bundle as a contender."""
    on_cpu = bundle.target.backend == "onnxruntime"
    return Contender(
        kind="bundle",
        name=name,
        path=bundle.path,
        on_cpu=on_cpu,
        weight_bytes=bundle.weights_file.stat().st_size if on_cpu else 0,
        values={"backend": bundle.target.backend, "threads": threads},
        title=f"target {bundle.target.name}, recipe {bundle.recipe.name}",
    )


def transformers_contender(checkpoint: Checkpoint, variant: Variant, threads: int) -> Contender:
    """A checkpoint in transformers as a contender."""
    item = 2 if variant.dtype == "bfloat16" else 4
    return Contender(
        kind="transformers",
        name=TRANSFORMERS,
        path=checkpoint.path,
        on_cpu=True,
        weight_bytes=item * sum(parameters_of(checkpoint.spec).values()),
        values={"variant": variant.name, "threads": threads},
        title=variant.name,
    )


def check_same_model(bundles: Sequence[Bundle], checkpoint: Checkpoint | None) -> None:
    """Refuses contenders that are not the same model.

    Raises:
        RequestError: names the one that differs, and the field.
    """
    others = [(f"the bundle {bundle.path}", bundle.spec) for bundle in bundles[1:]]
    others += [(f"the checkpoint {checkpoint.path}", checkpoint.spec)] if checkpoint else []
    first = bundles[0].spec.model_dump()
    for name, spec in others:
        differing = [field for field, value in spec.model_dump().items() if value != first[field]]
        if differing:
            raise RequestError(
                f"{name} is another model than {bundles[0].path}: they differ in {differing[0]}",
                expected="bundles and checkpoint of one model",
            )
    if checkpoint is not None and checkpoint.quantized:
        raise RequestError(
            f"the checkpoint {checkpoint.path} is quantized, which transformers does not run as it is",
            expected="the checkpoint that it was quantized from",
        )


def check_extra() -> None:
    """Refuses to start transformers where it is not installed.

    Raises:
        MissingDependencyError: names the package and its extra.
    """
    for package in ("torch", TRANSFORMERS):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"the package {package!r} is not installed", fix="install it with: pip install 'dgcompile[build]'"
            )


def check_memory(contenders: Sequence[Contender]) -> None:
    """Refuses contenders whose weights do not fit into memory together: they would be read from the disk in each step.

    Raises:
        InputError: says how much there is.
    """
    available = available_memory()
    needed = sum(contender.weight_bytes for contender in contenders)
    if available is not None and needed > available:
        raise InputError(
            f"the weights of all contenders take {needed / 1e9:.1f} GB together, {available / 1e9:.1f} GB are free",
            expected="contenders that fit into memory at the same time, because they take turns",
            fix="measure fewer of them, or a smaller model",
        )
