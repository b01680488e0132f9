"""transformers' own ``generate()``, run with given random numbers and watched step by step.

Nothing of ``generate()`` is written again here. While it runs, three names that its module looks up are replaced:
``torch.multinomial`` and ``torch.randint`` (by draws from a :class:`RowRandom`) and ``EntropyBoundSampler`` (by a
subclass that takes notes). Module hooks and the streamer see the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma
from transformers.utils import logging

from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import CheckpointError, RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.random_numbers import RowRandom
from dgcompile.transformers_model import load_model, their_config
from dgcompile.verify.compare import cut, draw

# Hardly annotated, so nothing can be checked against it.
generation_module: Any = generation_diffusion_gemma
transformers_logging: Any = logging

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ReferenceCache:
    """transformers' KV cache when a canvas starts.

    Attributes:
        canvas: number of the canvas, from 0.
        token_ids: int32 [n], what the encoder was given since the last canvas.
        keys: per layer float32 [n_i, Hkv_i, D_i], the cached tokens in order; sliding layers hold the last ones only.
        values: likewise.
        router_margin: smallest gap between chosen and unchosen experts of the tokens encoded since the last canvas.
    """

    canvas: int
    token_ids: Ints
    keys: list[Floats]
    values: list[Floats]
    router_margin: float


@dataclass(frozen=True)
class ReferenceStep:
    """One denoising step: L positions, V tokens, H hidden.

    Attributes:
        canvas: number of the canvas, from 0.
        step: number of the step, from 1.
        canvas_ids: int32 [L], the canvas that the step read.
        self_conditioning: float32 [L, H], the soft embeddings that the step before came to; zeros on the first step.
            They are what the step read, unless it was guided.
        logits: float32 [L, V], after softcap and temperature.
        probabilities: float32 [L, V], what the tokens were drawn from.
        uniform: float32 [L], the random numbers of that draw.
        noise_ids: int32 [L], the tokens for positions that are not accepted.
        argmax_ids, next_canvas_ids: int32 [L].
        accepted: bool [L].
        entropy: float32 [L], nats.
        router_margin: smallest gap between chosen and unchosen experts in this step.
    """

    canvas: int
    step: int
    canvas_ids: Ints
    self_conditioning: Floats
    logits: Floats
    probabilities: Floats
    uniform: Floats
    noise_ids: Ints
    argmax_ids: Ints
    next_canvas_ids: Ints
    accepted: npt.NDArray[np.bool_]
    entropy: Floats
    router_margin: float


class Watcher(Protocol):
    """Is told what happens inside ``generate()`` while it happens, so that no step's logits need to be kept."""

    def canvas_started(self, cache: ReferenceCache) -> None:
        """The encoder has run; denoising a canvas begins."""

    def stepped(self, step: ReferenceStep) -> None:
        """A denoising step is done."""


class Guide(Protocol):
    """Another run that transformers is led along: each of its steps starts from that run's state, not from its own."""

    def committed(self, canvas: int) -> Ints | None:
        """The final tokens of a canvas, int32 [L]; None where the other run has none."""

    def state(self, canvas: int, step: int) -> tuple[Ints, Floats] | None:
        """What a step (from 2) starts from: canvas int32 [L] and soft embeddings [L, H]; None as above."""


class Reference:
    """A checkpoint in transformers: float32, CPU, the plain implementations of attention and experts.

    Args:
        checkpoint: its folder.
        threads: threads of torch, for the whole process; None leaves them as they are.

    Raises:
        CheckpointError: transformers cannot load it.
    """

    def __init__(self, checkpoint: Path, threads: int | None = None) -> None:
        self.checkpoint = checkpoint
        if threads is not None:
            torch.set_num_threads(threads)
        opened = Checkpoint.open(checkpoint)
        self.model: Any = load_model(opened) if opened.quantized else self._load(checkpoint)
        # Only what the caller asks for counts: transformers fills gaps from here.
        self.model.generation_config = generation_module.DiffusionGemmaGenerationConfig()

    @staticmethod
    def _load(checkpoint: Path) -> Any:
        """Loaded by transformers itself, as somebody who uses it does."""
        model_class: Any = DiffusionGemmaForBlockDiffusion
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            return model_class.from_pretrained(
                checkpoint,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
            ).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint}: transformers cannot load it: {error}") from error
        finally:
            if bars:
                transformers_logging.enable_progress_bar()

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """Token ids of a prompt by the checkpoint's tokenizer; ``chat`` renders it as the only user message.

        Raises:
            CheckpointError: transformers cannot load the tokenizer.
        """
        tokenizer = self._tokenizer
        if not chat:
            return list(tokenizer(text)["input_ids"])
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            return AutoTokenizer.from_pretrained(self.checkpoint, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.checkpoint}: transformers cannot load its tokenizer: {error}") from error

    def generate(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        seed: int,
        watcher: Watcher,
        guide: Guide | None = None,
    ) -> list[int]:
        """Runs ``generate()`` on one prompt.

        Args:
            prompt: token ids.
            config: how to generate.
            seed: of the random numbers, those of the runtime's row with this seed.
            watcher: told what happens.
            guide: a run to be led along; what ``generate()`` decides in each step then answers that run's state.

        Returns:
            The new tokens, cut after the first EOS and at ``max_new_tokens``.

        Raises:
            RequestError: early stopping is off in ``config``, which transformers cannot do.
        """
        input_ids = torch.tensor([list(prompt)])
        notes = _Notes(
            RowRandom(seed, self.model.config.canvas_length, self.model.config.text_config.vocab_size), watcher, guide
        )
        with _watched(self.model, notes):
            output = self.model.generate(input_ids, generation_config=_comparable(config), streamer=notes)
        return cut(output.sequences[0, input_ids.shape[1] :].tolist(), config)


def _comparable(config: GenerationConfig) -> Any:
    """``config`` as ``generate()`` takes it, if it does what the runtime does with it."""
    if config.stability_threshold is None or config.confidence_threshold is None:
        raise RequestError(
            "stability_threshold or confidence_threshold is None",
            expected="numbers",
            fix="compare with early stopping on: transformers cannot switch it off",
        )
    return their_config(config)


@dataclass
class _Notes:
    """What was seen of the current canvas and step; also the streamer of ``generate()``."""

    random: RowRandom
    watcher: Watcher
    guide: Guide | None = None
    canvas: int = -1
    step: int = 0
    encoder_margin: float = math.inf
    seen: dict[str, Any] = field(default_factory=dict)

    # What generate() draws.

    def randint(self, *, low: int, high: int, size: tuple[int, int], device: torch.device) -> torch.Tensor:
        """A canvas of uniformly random tokens: the initial one, or the one that renoises when a draw came before."""
        if "noise_ids" in self.seen:
            ids = self.seen["noise_ids"]
        else:
            self.canvas += 1
            self.step = 0
            ids = self.random.initial_canvas(self.canvas)
        if low != 0 or size != (1, len(ids)) or not 0 <= ids.min() <= ids.max() < high:
            raise AssertionError(f"transformers asked for random tokens {low} to {high} in shape {size}")
        return torch.from_numpy(ids).long()[None].to(device)

    def multinomial(self, probabilities: torch.Tensor, *, num_samples: int) -> torch.Tensor:
        """One token per row of ``probabilities`` [L, V], [L, 1], by the row's uniform numbers."""
        if num_samples != 1:
            raise AssertionError(f"transformers asked for {num_samples} samples")
        self.step += 1
        uniform, noise_ids = self.random.step(self.canvas, self.step)
        table = probabilities.numpy()
        self.seen |= {"uniform": uniform, "noise_ids": noise_ids, "probabilities": table}
        return torch.from_numpy(draw(table, uniform))[:, None]

    # What hooks see.

    def encoder_called(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.encoder_margin = math.inf
        if self.guide is not None and self.canvas >= 0:
            committed = self.guide.committed(self.canvas)
            if committed is not None:
                kwargs = {**kwargs, "input_ids": torch.from_numpy(committed).long()[None]}
        self.seen["token_ids"] = _ints(kwargs["input_ids"])
        return args, kwargs

    def decoder_called(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.step == 0:
            layers = kwargs["cache"].layers
            self.watcher.canvas_started(
                ReferenceCache(
                    canvas=self.canvas,
                    token_ids=self.seen.pop("token_ids"),
                    keys=[layer.keys[0].transpose(0, 1).numpy() for layer in layers],
                    values=[layer.values[0].transpose(0, 1).numpy() for layer in layers],
                    router_margin=self.encoder_margin,
                )
            )
        state = self._guided_state()
        if state is not None:
            kwargs = {**kwargs, "decoder_input_ids": torch.from_numpy(state[0]).long()[None]}
        self.seen |= {"canvas_ids": _ints(kwargs["decoder_input_ids"]), "router_margin": math.inf}
        return args, kwargs

    def self_conditioning_called(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        self.seen["self_conditioning"] = args[1][0].numpy()
        state = self._guided_state()
        return args if state is None else (args[0], torch.from_numpy(state[1]).to(args[1].dtype)[None])

    def _guided_state(self) -> tuple[Ints, Floats] | None:
        """What the guide says the coming step starts from. Every run starts its first step alike."""
        if self.guide is None or self.step == 0:
            return None
        return self.guide.state(self.canvas, self.step + 1)

    def encoder_routed(self, module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        self.encoder_margin = min(self.encoder_margin, _router_margin(output))

    def decoder_routed(self, module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        self.seen["router_margin"] = min(self.seen["router_margin"], _router_margin(output))

    # What the streamer is given.

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then each final canvas: nothing that was not seen before."""

    def put_draft(self, value: torch.Tensor) -> None:
        """The argmax canvas [1, L] at the end of a step."""
        self.watcher.stepped(ReferenceStep(canvas=self.canvas, step=self.step, argmax_ids=_ints(value), **self.seen))
        self.seen.clear()

    def end(self) -> None:
        """Nothing more comes."""


@contextmanager
def _watched(model: DiffusionGemmaForBlockDiffusion, notes: _Notes) -> Iterator[None]:
    """Attaches ``notes`` to the model and to the module of ``generate()``, and takes everything off again."""

    class WatchedSampler(generation_module.EntropyBoundSampler):  # type: ignore[misc]
        """Takes notes of what the sampler decided."""

        def accept_canvas(self, current: Any, drawn: Any, logits: torch.Tensor, cur_step: Any) -> Any:
            canvas = super().accept_canvas(current, drawn, logits, cur_step)
            notes.seen |= {
                "logits": logits[0].numpy(),
                "entropy": torch.distributions.Categorical(logits=logits).entropy()[0].numpy(),  # type: ignore[no-untyped-call]
                "accepted": self.accepted_token_mask[0].numpy(),
            }
            return canvas

        def renoise_canvas(self, accepted: Any, cur_step: Any) -> Any:
            canvas = super().renoise_canvas(accepted, cur_step)
            notes.seen["next_canvas_ids"] = _ints(canvas)
            return canvas

    encoder, decoder = model.model.encoder, model.model.decoder
    with ExitStack() as stack:
        hooks = [
            encoder.register_forward_pre_hook(notes.encoder_called, with_kwargs=True),
            decoder.register_forward_pre_hook(notes.decoder_called, with_kwargs=True),
            decoder.self_conditioning.register_forward_pre_hook(notes.self_conditioning_called),
            # The experts of the encoder's last layer feed nothing.
            *(layer.router.register_forward_hook(notes.encoder_routed) for layer in encoder.language_model.layers[:-1]),
            *(layer.router.register_forward_hook(notes.decoder_routed) for layer in decoder.layers),
        ]
        for hook in hooks:
            stack.callback(hook.remove)
        replaced = {
            "torch": _TorchWith(multinomial=notes.multinomial, randint=notes.randint),
            "EntropyBoundSampler": WatchedSampler,
        }
        for name, value in replaced.items():
            stack.callback(setattr, generation_module, name, getattr(generation_module, name))
            setattr(generation_module, name, value)
        yield


class _TorchWith:
    """torch with some functions replaced, for one module that calls them as ``torch.name``."""

    def __init__(self, **functions: Any) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _router_margin(output: tuple[torch.Tensor, ...]) -> float:
    """Smallest gap, over the tokens, between the logits of the last expert chosen and the first one not chosen."""
    probabilities, chosen = output[0], output[2]
    top_k = chosen.shape[-1]
    if probabilities.shape[-1] == top_k:
        return math.inf
    best = probabilities.topk(top_k + 1, dim=-1).values.double().log()
    return float((best[:, -2] - best[:, -1]).min())


def _ints(ids: torch.Tensor) -> Ints:
    """[1, n] to int32 [n]; a copy."""
    return ids[0].to(torch.int32).numpy().copy()
