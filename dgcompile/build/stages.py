"""The stages of a build, in their order for each backend.

A stage never writes under a final name before all of its bytes are written. What it depends on is hashed: a finished
stage is redone only when that hash, or a file that it made, has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dgcompile.build.kernels import make_kernels, plan_kernels
from dgcompile.build.onnxruntime.trial import read_graph, try_engines
from dgcompile.build.stage import Job, Made, Stage
from dgcompile.build.tensorrt.libraries import library_version
from dgcompile.bundle import (
    CALIBRATION_FILE,
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
    GRAPH_FILES,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    EngineLibrary,
    Manifest,
    kernels_folder,
)
from dgcompile.checkpoint import Checkpoint
from dgcompile.config_file import read_bytes
from dgcompile.errors import CheckpointError, StageError
from dgcompile.files import write_atomically
from dgcompile.gpu import LIBRARY_EXTRAS, query_gpus
from dgcompile.safetensors_file import read_header
from dgcompile.target import Backend, Target
from dgcompile.weights_store import class_sizes, lay_out_store, with_static_scale

# assets: what the runtime needs beside the graphs ---------------------------------------------------------------------


def _assets_content(job: Job, manifest: Manifest) -> dict[str, bytes]:
    """The small files by name. generation_config.json is written anew: its defaults may come from config.json."""
    checkpoint = job.checkpoint
    content = {GENERATION_CONFIG_FILE: _json_bytes(checkpoint.generation.to_values())}
    if checkpoint.tokenizer_file is not None:
        content[TOKENIZER_FILE] = read_bytes(checkpoint.tokenizer_file)
    template = checkpoint.chat_template()
    if template is not None:
        content[CHAT_TEMPLATE_FILE] = template.encode()
    return content


def _assets_inputs(job: Job, manifest: Manifest) -> dict[str, Any]:
    content = _assets_content(job, manifest)
    return {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}


def _make_assets(job: Job, manifest: Manifest) -> Made:
    content = _assets_content(job, manifest)
    if TOKENIZER_FILE in content:
        _check_tokenizer(content[TOKENIZER_FILE], job.checkpoint, manifest.spec.vocab_size)
    with job.progress.task("assets", len(content), "files") as advance:
        for name, data in content.items():
            write_atomically(job.folder / name, data)
            advance()
    return Made(files=tuple(content))


def _check_tokenizer(data: bytes, checkpoint: Checkpoint, vocab_size: int) -> None:
    """Refuses now what would fail at the first prompt."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            f"{checkpoint.tokenizer_file} is not a tokenizer that can be read ({error})", fix="fetch the file again"
        ) from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{checkpoint.tokenizer_file}: its largest token id is {largest}", expected=f"below vocab_size {vocab_size}"
        )


def _json_bytes(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


# trace: the two graphs -----------------------------------------------------------------------------------------------


def _layout(manifest: Manifest) -> dict[str, list[Any]]:
    """Where each tensor lies in weights.safetensors, as JSON data: the graphs point there."""
    planned = lay_out_store(manifest.spec, manifest.recipe).tensors
    return {name: [tensor.dtype, list(tensor.shape), tensor.offset, tensor.nbytes] for name, tensor in planned.items()}


def _trace_inputs(job: Job, manifest: Manifest) -> dict[str, Any]:
    return {
        "config": dict(job.checkpoint.config),
        "spec": manifest.spec.model_dump(mode="json"),
        "recipe": manifest.recipe.model_dump(mode="json"),
        "layout": _layout(manifest),
    }


def _trace(job: Job, manifest: Manifest) -> Made:
    from dgcompile.trace import trace_graphs

    spec, recipe = manifest.spec, manifest.recipe
    trace_graphs(job.checkpoint.config, spec, recipe, job.folder, job.progress)
    graphs = {
        graph: read_graph(job.folder / file, graph, spec, recipe.computes_in) for graph, file in GRAPH_FILES.items()
    }
    return Made(files=tuple(GRAPH_FILES.values()), graphs=graphs)


# calibration: ranges of activations, for static scales ---------------------------------------------------------------


def _calibration_inputs(job: Job, manifest: Manifest) -> dict[str, Any]:
    prompts = hashlib.sha256(job.calibration.read_bytes()).hexdigest() if job.calibration else None
    weights = with_static_scale(manifest.spec, manifest.recipe)
    # Prompts are rendered and generated from with what the checkpoint's other files say.
    return {
        "checkpoint": manifest.checkpoint,
        "weights": weights,
        "prompts": prompts,
        "assets": _assets_inputs(job, manifest),
    }


def _calibrate(job: Job, manifest: Manifest) -> Made:
    from dgcompile.quantize.calibration import calibrate

    weights = with_static_scale(manifest.spec, manifest.recipe)
    calibration = calibrate(job.checkpoint, weights, job.calibration, job.progress)
    write_atomically(job.folder / CALIBRATION_FILE, _json_bytes(calibration.model_dump(mode="json")))
    return Made(files=(CALIBRATION_FILE,))


def _input_amax(job: Job, manifest: Manifest) -> dict[str, float]:
    """The ranges of a finished calibration; empty where the recipe needs none."""
    if not manifest.recipe.needs_calibration:
        return {}
    from dgcompile.quantize.calibration import Calibration

    return Calibration.model_validate_json(read_bytes(job.folder / CALIBRATION_FILE)).input_amax


# weights: the store --------------------------------------------------------------------------------------------------


def _weights_inputs(job: Job, manifest: Manifest) -> dict[str, Any]:
    return {
        "checkpoint": manifest.checkpoint,
        "recipe": manifest.recipe.model_dump(mode="json"),
        "layout": _layout(manifest),
        **({"ranges": _hashes(manifest, CALIBRATION_FILE)} if manifest.recipe.needs_calibration else {}),
    }


def _convert(job: Job, manifest: Manifest) -> Made:
    from dgcompile.quantize.convert import convert_weights

    ranges = _input_amax(job, manifest)
    converted = convert_weights(job.checkpoint, manifest.recipe, job.folder, job.progress, input_amax=ranges)
    _check_sizes(job.folder / WEIGHTS_FILE, manifest)
    return Made(files=(WEIGHTS_FILE,), known_hashes={WEIGHTS_FILE: converted.sha256})


_SIZE_TOLERANCE = 0.02


def _check_sizes(file: Path, manifest: Manifest) -> None:
    """Refuses a store whose classes of weight are not as small as their formats promise, whoever planned them."""
    stored = read_header(file, error=StageError)
    for weight_class, size in class_sizes(manifest.spec, manifest.recipe, stored).items():
        if abs(size.stored_bytes - size.exact_bytes) > _SIZE_TOLERANCE * size.exact_bytes:
            raise StageError(
                f"{file}: {weight_class} in {manifest.recipe.weights.of(weight_class).text} take {size.stored_bytes:,} "
                "bytes",
                expected=f"{size.exact_bytes:,.0f} bytes, by the shapes of the model",
            )


# engine, on the CPU: the graphs rewritten, and proof that the library runs them ---------------------------------------


def _engine_inputs(job: Job, manifest: Manifest) -> dict[str, Any]:
    return {
        "files": _hashes(manifest, *GRAPH_FILES.values(), WEIGHTS_FILE),
        "graphs": {graph: record.model_dump(mode="json") for graph, record in manifest.graphs.items()},
    }


def _hashes(manifest: Manifest, *names: str) -> dict[str, str]:
    files = manifest.files
    return {name: files[name].sha256 for name in names}


def _write_engines(job: Job, manifest: Manifest) -> Made:
    from dgcompile.build.onnxruntime.engines import ENGINE_FILES, write_engines

    write_engines(job.folder, job.progress)
    dtype = manifest.recipe.computes_in
    library = try_engines(job.folder, manifest.graphs, manifest.spec, dtype, job.progress)
    return Made(files=ENGINE_FILES, engine=library)


# kernels, of GPU targets: what the plugins launch ---------------------------------------------------------------------


def _kernels_inputs(job: Job, manifest: Manifest) -> dict[str, Any]:
    return {
        "spec": manifest.spec.model_dump(mode="json"),
        "recipe": manifest.recipe.model_dump(mode="json"),
        "target": manifest.target.model_dump(mode="json"),
    }


def _make_kernels(job: Job, manifest: Manifest) -> Made:
    launches = plan_kernels(manifest.spec, manifest.recipe, manifest.target)
    return Made(files=make_kernels(job.folder, launches, manifest.target, job.progress))


# engine, of GPU targets: built by TensorRT or TensorRT-RTX ------------------------------------------------------------

REHEARSAL = "DGCOMPILE_ENGINE_REHEARSAL"
"""Environment variable that lets the TensorRT backend build where the target's GPU is missing, to try this code; the
engines are marked in the manifest, and nothing runs them."""


def _tensorrt_inputs(job: Job, manifest: Manifest) -> dict[str, Any]:
    stage = manifest.stages["kernels"]
    return {
        "files": _hashes(manifest, *GRAPH_FILES.values(), WEIGHTS_FILE, *sorted(stage.files)),
        "target": manifest.target.model_dump(mode="json"),
        "max_context": manifest.max_context,
        "max_batch": manifest.max_batch,
        "rehearsed": _is_rehearsal(manifest.target),
    }


def _is_rehearsal(target: Target) -> bool:
    return target.backend == "tensorrt" and bool(os.environ.get(REHEARSAL))


def _build_engines(job: Job, manifest: Manifest) -> Made:
    target = manifest.target
    from dgcompile.build.tensorrt.engines import ENGINE_FILES, build_engines

    version = build_engines(
        job.folder,
        manifest.spec,
        manifest.recipe.computes_in,
        target,
        kernels_folder(target),
        manifest.max_context,
        manifest.max_batch or 1,
        job.progress,
    )
    library = EngineLibrary(
        name=target.backend, version=version, oldest_version=version, rehearsed=_is_rehearsal(target)
    )
    return Made(files=ENGINE_FILES, engine=library)


def _engine_lacks(manifest: Manifest) -> str | None:
    return whats_lacking(manifest.target, rehearsed=_is_rehearsal(manifest.target))


def whats_lacking(target: Target, *, rehearsed: bool = False) -> str | None:
    """What this machine lacks to build engines for a GPU target; None when it can.

    TensorRT-RTX builds for a GPU that is not there. TensorRT times its kernels, so it builds only for the one that is.

    Args:
        target: of the tensorrt or tensorrt_rtx backend.
        rehearsed: do without the GPU.
    """
    if library_version(target.backend) is None:
        return f"{target.backend} is not installed here (pip install 'dgcompile[{LIBRARY_EXTRAS[target.backend]}]')"
    if target.backend == "tensorrt" and not rehearsed:
        gpus = query_gpus()
        if not any(card.compute_capability == target.compute_capability for card in gpus.cards):
            found = ", ".join(card.name for card in gpus.cards)
            return gpus.problem or f"this machine has {found}"
    return None


_ASSETS = Stage("assets", (), ("dgcompile.generation_config",), _assets_inputs, _make_assets)
_TRACE = Stage(
    "trace",
    ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "protobuf"),
    (
        "dgcompile.trace",
        "dgcompile.transformers_model",
        "dgcompile.plugins.block_attention.torch_op",
        "dgcompile.plugins.moe.torch_op",
        "dgcompile.contract",
        "dgcompile.model_spec",
        "dgcompile.checkpoint",
    ),
    _trace_inputs,
    _trace,
)
_CALIBRATION = Stage(
    "calibration",
    ("torch", "transformers", "nvidia-modelopt"),
    (
        "dgcompile.quantize.calibration",
        "dgcompile.quantize.calibration_worker",
        "dgcompile.transformers_model",
        "dgcompile.checkpoint",
        "dgcompile.published",
    ),
    _calibration_inputs,
    _calibrate,
)
_WEIGHTS = Stage(
    "weights",
    ("torch",),
    (
        "dgcompile.quantize.convert",
        "dgcompile.quantize.formats",
        "dgcompile.quantize.requantize",
        "dgcompile.plugins.moe.formats",
        "dgcompile.published",
        "dgcompile.weights_store",
        "dgcompile.safetensors_file",
        "dgcompile.checkpoint",
    ),
    _weights_inputs,
    _convert,
)
_REWRITTEN = Stage(
    "engine",
    ("onnxruntime", "onnx", "onnx-ir"),
    ("dgcompile.build.onnxruntime", "dgcompile.contract", "dgcompile.plugins.moe.formats", "dgcompile.trace.sampler"),
    _engine_inputs,
    _write_engines,
)
_KERNELS = Stage(
    "kernels", ("triton",), ("dgcompile.plugins", "dgcompile.build.kernels"), _kernels_inputs, _make_kernels
)


def _tensorrt(*tools: str) -> Stage:
    code = ("dgcompile.build.tensorrt", "dgcompile.contract", "dgcompile.engine_table", "dgcompile.plugins")
    return Stage("engine", ("onnx", *tools), code, _tensorrt_inputs, _build_engines, _engine_lacks)


STAGES_OF: dict[Backend, tuple[Stage, ...]] = {
    "onnxruntime": (_ASSETS, _TRACE, _CALIBRATION, _WEIGHTS, _REWRITTEN),
    "tensorrt_rtx": (_ASSETS, _TRACE, _CALIBRATION, _WEIGHTS, _KERNELS, _tensorrt("tensorrt_rtx")),
    "tensorrt": (_ASSETS, _TRACE, _CALIBRATION, _WEIGHTS, _KERNELS, _tensorrt("tensorrt", "tensorrt_cu13_bindings")),
}
"""In the order in which they run; a bundle has those of :func:`dgcompile.bundle.stages_of`."""
