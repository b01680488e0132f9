"""The process that takes the ranges of activations: ``python -m dgcompile.quantize.calibration_worker``.

The job comes as one JSON line on stdin, which stays open as long as the parent lives. Events go out as JSON lines on
stdout; what libraries print there goes to stderr.

Three things would give ranges without any error that are worth nothing, and are seen to here:

- Encoder and decoder layers share their parameters, but are different modules with quantizers of their own. They are
  made to share the modules too, so that one quantizer sees both.
- The experts and the attention run in transformers' plain implementations, the only ones that modelopt sees into.
- Self-conditioning reads zeros in a canvas's first step, so a single forward pass would give it an empty range. Hence
  the whole of ``generate()``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import CalibrationError, CheckpointError, DgcompileError, InputError
from dgcompile.quantize.calibration import Calibration, CalibrationJob, CalibrationReport, ExpertUse
from dgcompile.transformers_model import load_model, their_config

Emit = Callable[[dict[str, Any]], None]

# Linear layers read the same tensor within each of these groups.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_FP8 = {"num_bits": (4, 3), "axis": None}
_MAX_CANVASES = 2
_SMALL_MODEL = 100_000_000
"""Parameters."""


def main() -> None:
    """Entry point of the process."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")

    values = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = CalibrationJob(**{**values, "prompts": [(line, prompt) for line, prompt in values["prompts"]]})
    try:
        emit({"event": "done", "calibration": _calibrate(job, emit).model_dump(mode="json")})
    except DgcompileError as error:
        # The parent knows these classes; what else the checkpoint's reader raises is a CheckpointError.
        kinds = (InputError, CalibrationError) if not isinstance(error, CheckpointError) else (CheckpointError,)
        kind = next((kind.__name__ for kind in kinds if isinstance(error, kind)), CalibrationError.__name__)
        problem = {"problem": error.problem, "expected": error.expected, "fix": error.fix}
        emit({"event": "error", "kind": kind, **problem})
    except Exception as error:
        traceback.print_exc()
        problem = {"problem": f"{type(error).__name__}: {error}", "expected": None, "fix": None}
        emit({"event": "error", "kind": CalibrationError.__name__, **problem})
    events.flush()
    sys.stderr.flush()
    # A thread still waits for stdin.
    os._exit(0)


def _end_with_parent() -> None:
    """Ends this process when the other end of stdin is closed, as it is when the parent dies."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def _calibrate(job: CalibrationJob, emit: Emit) -> Calibration:
    checkpoint = Checkpoint.open(Path(job.checkpoint))
    prompts = _encoded(job, checkpoint)
    model = load_model(checkpoint)
    if sum(parameter.numel() for parameter in model.parameters()) < _SMALL_MODEL:
        # A second thread would only wait for the first, and beside another busy process for long.
        torch.set_num_threads(1)
    share_modules(model)
    config = checkpoint.generation
    # The second canvas is there because the encoder then reads generated text, too.
    config = config.replace(max_new_tokens=min(config.max_new_tokens, _MAX_CANVASES * checkpoint.spec.canvas_length))

    observer = _Observer(model, job.weights)

    def run() -> None:
        for index, ids in enumerate(prompts):
            torch.manual_seed(index)
            model.generate(torch.tensor([ids]), generation_config=their_config(config))
            emit({"event": "prompt"})

    observer.watch(run)
    return Calibration(
        input_amax=observer.ranges(),
        report=CalibrationReport(
            prompts=len(prompts),
            prompt_tokens=sum(map(len, prompts)),
            canvas_tokens=observer.canvas_tokens,
            experts=observer.expert_use(),
        ),
    )


def _encoded(job: CalibrationJob, checkpoint: Checkpoint) -> list[list[int]]:
    """Token ids of all prompts, each short enough to leave room for a canvas."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(job.checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{job.checkpoint}: transformers cannot load its tokenizer: {error}") from error
    if job.chat:
        tokenizer.chat_template = checkpoint.chat_template()
    longest = checkpoint.spec.max_position_embeddings - checkpoint.spec.canvas_length
    encoded = []
    for line, prompt in job.prompts:
        where = f"{job.source}, line {line}"
        try:
            text = prompt
            if job.chat:
                messages = [{"role": "user", "content": prompt}]
                text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = list(tokenizer(text, add_special_tokens=not job.chat)["input_ids"])
        except Exception as error:  # a template may raise anything
            raise InputError(f"{where}: the prompt cannot be rendered: {type(error).__name__}: {error}") from error
        if not ids or max(ids) >= checkpoint.spec.vocab_size:
            raise CheckpointError(f"{where}: the checkpoint's tokenizer makes no token ids of the model from it")
        if len(ids) > longest:
            raise InputError(
                f"{where}: the prompt has {len(ids)} tokens",
                expected=f"at most {longest}: the model's context without one canvas",
            )
        encoded.append(ids)
    return encoded


def share_modules(model: DiffusionGemmaForBlockDiffusion) -> None:
    """Puts the decoder's linear layers, routers and experts in the place of the encoder's, whose weights they have.

    Of the encoder's last layer only keys and values are shared: nothing reads what else it computes, and an engine
    does not compute it.
    """
    inner: Any = model.model
    pairs = list(zip(inner.encoder.language_model.layers, inner.decoder.layers, strict=True))
    for encoder, decoder in pairs:
        last = encoder is pairs[-1][0]
        for name in ("k_proj", "v_proj") if last else ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(encoder.self_attn, name, getattr(decoder.self_attn, name))
        if not last:
            for name in ("mlp", "router", "experts"):
                setattr(encoder, name, getattr(decoder, name))


class _Observer:
    """Watches linear layers with modelopt's quantizers, and which experts are chosen.

    Args:
        model: its encoder and decoder share their modules.
        weights: canonical names of the linear layers' weights.
    """

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, weights: Iterable[str]) -> None:
        self._decoder: Any = model.model.decoder
        # By the names that they have in the decoder.
        self._layers = {
            name: name.removeprefix("model.decoder.").removesuffix(".weight") for name in sorted(set(weights))
        }
        self._tokens = [
            torch.zeros(layer.router.proj.out_features, dtype=torch.int64) for layer in self._decoder.layers
        ]
        self.canvas_tokens = 0

    def watch(self, run: Callable[[], None]) -> None:
        """Runs ``run`` while watching.

        Raises:
            CalibrationError: a layer's input holds NaN or infinity.
        """
        mtq: Any = import_module("modelopt.torch.quantization")
        hooks = [
            self._decoder.register_forward_pre_hook(self._decoder_called, with_kwargs=True),
            *(layer.router.register_forward_hook(self._routed(i)) for i, layer in enumerate(self._decoder.layers)),
            *(
                self._decoder.get_submodule(layer).register_forward_pre_hook(self._refuse_infinite(layer))
                for layer in self._layers.values()
            ),
        ]
        config = {
            "quant_cfg": [
                {"quantizer_name": "*", "enable": False},
                *({"quantizer_name": f"{layer}.input_quantizer", "cfg": _FP8} for layer in self._layers.values()),
            ],
            "algorithm": "max",
        }
        try:
            mtq.quantize(self._decoder, config, lambda _: run())
        finally:
            for hook in hooks:
                hook.remove()
        enabled = {name for name, module in self._decoder.named_modules() if getattr(module, "is_enabled", False)}
        if enabled != {f"{layer}.input_quantizer" for layer in self._layers.values()}:
            raise CalibrationError(f"modelopt watched {len(enabled)} places", expected=f"{len(self._layers)}")

    def ranges(self) -> dict[str, float]:
        """Largest magnitude by weight; 0 where no input was seen."""
        seen = {name: self._range(layer) for name, layer in self._layers.items()}
        return {name: max(seen.get(other, 0.0) for other in _same_input(name)) for name in seen}

    def expert_use(self) -> tuple[ExpertUse, ...]:
        """Of all layers."""
        return tuple(ExpertUse(layer=i, tokens=tuple(tokens.tolist())) for i, tokens in enumerate(self._tokens))

    def _range(self, layer: str) -> float:
        amax = self._decoder.get_submodule(layer).input_quantizer.amax
        return 0.0 if amax is None else float(amax)

    def _decoder_called(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.canvas_tokens += kwargs["decoder_input_ids"].numel()

    def _routed(self, index: int) -> Callable[[nn.Module, Any, tuple[torch.Tensor, ...]], None]:
        def count(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
            self._tokens[index] += output[2].flatten().bincount(minlength=len(self._tokens[index]))

        return count

    def _refuse_infinite(self, layer: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def check(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if not bool(torch.isfinite(args[0]).all()):
                raise CalibrationError(
                    f"the input of model.decoder.{layer} holds NaN or infinity",
                    expected="finite activations",
                    fix="try the checkpoint in transformers: it does not compute in float32 as it is",
                )

        return check


def _same_input(name: str) -> list[str]:
    """Canonical names of all weights that read the same tensor as this one, itself included."""
    place, layer, _ = name.rsplit(".", 2)
    group = next((group for group in _SAME_INPUT if layer in group), (layer,))
    return [f"{place}.{other}.weight" for other in group]


if __name__ == "__main__":
    main()
