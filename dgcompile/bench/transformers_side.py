"""A checkpoint in transformers, measured. Imports torch and transformers.

Nothing of ``generate()`` is written again here. The initial canvases and the tokens that renoise are those that the
runtime's row with the same seed draws: a subclass of the sampler takes them from there, in place of ``torch.randint``.
The draws of ``torch.multinomial`` are only seeded: replacing them would change what is measured. No logits are copied.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma
from transformers.utils import logging

from dgcompile.bench.machine import watch_memory
from dgcompile.bench.stamps import Run, Stamps
from dgcompile.bench.variant import Variant, is_hopeless
from dgcompile.errors import CheckpointError
from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.random_numbers import RowRandom
from dgcompile.transformers_model import their_config

# Hardly annotated, so nothing can be checked against it.
generation_module: Any = generation_diffusion_gemma
transformers_logging: Any = logging


class _GivenUpError(Exception):
    """The variant is clearly slower than another one."""


class TransformersSide:
    """The loaded model. Its methods are commands: what they are told is named there, they return the answer."""

    _model: Any

    def __init__(self) -> None:
        self._stamps = Stamps()
        self._random: RowRandom | None = None
        self._compiled = False
        self._watch_step: Callable[[], None] = lambda: None

    def open(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Loads the checkpoint and takes one denoising step: ``path``, ``variant``, ``threads``, ``prompt``,
        ``config``, ``seed``."""
        torch.set_num_threads(command["threads"])
        variant = Variant.parse(command["variant"])
        started = time.perf_counter()
        self._model = _load(Path(command["path"]), variant)
        opened = time.perf_counter()
        self._attach(variant)
        self._generate(command)
        return {
            "open_seconds": opened - started,
            "first_step_seconds": time.perf_counter() - opened,
        }

    def probe(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Times a few steps, after as many that warm up: ``prompt``, ``config``, ``seed``, ``best`` (seconds of the
        best step so far, or null). ``step_seconds`` is null where it was given up, ``seen`` the fastest step then."""
        best = command["best"]
        for warm_up in (True, False):
            # Compiling takes place while it warms up, so those steps say nothing.
            watched = best and not (warm_up and self._compiled)
            self._watch_step = _give_up_over(self._stamps, best, warm_up) if watched else _go_on
            try:
                run = self._generate(command)
            except _GivenUpError:
                return {"step_seconds": None, "seen": min(self._stamps.step_seconds)}
            finally:
                self._watch_step = _go_on
        return {"step_seconds": statistics.median(run.step_seconds[0]), "seen": None}

    def generate(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Generates with stamps: ``prompt``, ``config``, ``seed``."""
        run: Mapping[str, Any] = self._generate(command).model_dump()
        return run

    def memory(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """The memory of a ``generate``."""
        return {**watch_memory(lambda: self._generate(command)).model_dump(), "has_torch": True}

    def _attach(self, variant: Variant) -> None:
        """Notes the calls of encoder and decoder, compiles what is to be compiled, and gives the sampler its tokens."""
        model, side = self._model, self
        encoder = model.model.encoder
        encode, denoise = encoder.forward, model.forward
        self._compiled = variant.compiled
        if variant.compiled:
            denoise = torch.compile(denoise)

        def stamped_encode(*args: Any, **options: Any) -> Any:
            with side._stamps.encoding():
                return encode(*args, **options)

        def stamped_denoise(*args: Any, **options: Any) -> Any:
            side._stamps.denoising()
            side._watch_step()
            return denoise(*args, **options)

        encoder.forward = stamped_encode
        model.forward = stamped_denoise

        class GivenTokens(generation_module.EntropyBoundSampler):  # type: ignore[misc]
            """Takes the random tokens from the row."""

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.canvas, self.step, self.renoises = -1, 0, False

            def initialize_canvas(self, batch_size: int, device: torch.device) -> torch.Tensor:
                assert batch_size == 1 and side._random is not None
                if self.renoises:
                    self.step += 1
                    return _row(side._random.step(self.canvas, self.step)[1], device)
                self.canvas, self.step = self.canvas + 1, 0
                return _row(side._random.initial_canvas(self.canvas), device)

            def renoise_canvas(self, accepted: Any, cur_step: Any) -> Any:
                self.renoises = True
                try:
                    return super().renoise_canvas(accepted, cur_step)
                finally:
                    self.renoises = False

        generation_module.EntropyBoundSampler = GivenTokens

    def _generate(self, command: Mapping[str, Any]) -> Run:
        shape = self._model.config
        self._random = RowRandom(command["seed"], shape.canvas_length, shape.text_config.vocab_size)
        torch.manual_seed(command["seed"])
        config = their_config(GenerationConfig.model_validate(command["config"]))
        prompt = torch.tensor([command["prompt"]])
        self._stamps.start()
        output = self._model.generate(prompt, generation_config=config)
        new_tokens: list[int] = output.sequences[0, prompt.shape[1] :].tolist()
        return self._stamps.finish(len(new_tokens[: config.max_new_tokens]))


def _load(checkpoint: Path, variant: Variant) -> Any:
    """Loaded by transformers itself, as somebody who uses it does."""
    model_class: Any = DiffusionGemmaForBlockDiffusion
    transformers_logging.disable_progress_bar()
    try:
        model = model_class.from_pretrained(
            checkpoint,
            dtype=getattr(torch, variant.dtype),
            attn_implementation=variant.attention,
            experts_implementation=variant.experts,
            local_files_only=True,
            use_safetensors=True,
        ).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot load it: {error}") from error
    # Only what is asked for counts: transformers fills gaps from here.
    model.generation_config = generation_module.DiffusionGemmaGenerationConfig()
    return model


def _row(ids: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(ids).long()[None].to(device)


def _go_on() -> None:
    """Lets a step begin."""


def _give_up_over(stamps: Stamps, best: float, warm_up: bool) -> Callable[[], None]:
    """Raises before a step when those before it say that the variant is hopeless beside ``best``."""

    def check() -> None:
        if is_hopeless(stamps.step_seconds, best, warm_up=warm_up):
            raise _GivenUpError

    return check
