"""The stages of a build: what each depends on, what it makes, and how.

A stage never writes under a final name before all of its bytes are written. What it depends on is hashed: a finished
stage is redone only when that hash, or a file that it made, has changed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgcompile import __version__
from dgcompile.build.onnxruntime import read_graph, try_graphs
from dgcompile.bundle import (
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
    GRAPH_FILES,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    EngineLibrary,
    GraphRecord,
    Manifest,
    StageName,
)
from dgcompile.checkpoint import Checkpoint
from dgcompile.config_file import read_bytes
from dgcompile.contract import GraphName
from dgcompile.errors import CheckpointError, StageError
from dgcompile.files import write_atomically
from dgcompile.progress import Progress
from dgcompile.weights_store import plan_store


@dataclass(frozen=True)
class Job:
    """What one build is given.

    Attributes:
        checkpoint: the source.
        folder: the bundle's folder.
        progress: told what is going on.
    """

    checkpoint: Checkpoint
    folder: Path
    progress: Progress


@dataclass(frozen=True)
class Made:
    """What a stage made: names of its files, and the parts of the manifest that it fills in.

    ``known_hashes`` are SHA-256 of files that were hashed while they were written.
    """

    files: tuple[str, ...] = ()
    known_hashes: Mapping[str, str] = field(default_factory=dict)
    graphs: dict[GraphName, GraphRecord] | None = None
    engine: EngineLibrary | None = None


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: in the manifest.
        tools: packages whose versions its result depends on.
        code: modules and packages of dgcompile whose source its result depends on.
        inputs: everything else that it depends on, as JSON data.
        run: does the work.
    """

    name: StageName
    tools: tuple[str, ...]
    code: tuple[str, ...]
    inputs: Callable[[Job, Manifest], dict[str, Any]]
    run: Callable[[Job, Manifest], Made]

    def tool_versions(self) -> dict[str, str]:
        """Versions of the tools, and of Python."""
        return {"python": platform.python_version(), **{tool: importlib.metadata.version(tool) for tool in self.tools}}

    def input_hash(self, job: Job, manifest: Manifest) -> str:
        """SHA-256 over everything that the result depends on."""
        content = {
            "dgcompile": __version__,
            "code": {name: source_hash(name) for name in self.code},
            "tools": self.tool_versions(),
            "inputs": self.inputs(job, manifest),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@functools.cache
def source_hash(module: str) -> str:
    """SHA-256 over the Python source of a module or a whole package, so that edited code makes its stage run again.

    Taken once per process: what is edited later is not what runs.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise StageError(f"the source of {module} cannot be found", fix="install dgcompile again")
    origin = Path(spec.origin)
    folder = origin.parent
    files = sorted(folder.rglob("*.py")) if spec.submodule_search_locations is not None else [origin]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


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


# trace: the two graphs ------------------------------------------------------------------------------------------------


def _layout(manifest: Manifest) -> dict[str, list[Any]]:
    """Where each tensor lies in weights.safetensors, as JSON data: the graphs point there."""
    planned = plan_store(manifest.spec, manifest.recipe)
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
    store = plan_store(spec, recipe)
    trace_graphs(job.checkpoint.config, spec, store, recipe.activation_dtype, job.folder, job.progress)
    graphs = {
        graph: read_graph(job.folder / file, graph, spec, recipe.activation_dtype)
        for graph, file in GRAPH_FILES.items()
    }
    return Made(files=tuple(GRAPH_FILES.values()), graphs=graphs)


# weights: the store ---------------------------------------------------------------------------------------------------


def _weights_inputs(job: Job, manifest: Manifest) -> dict[str, Any]:
    return {
        "checkpoint": manifest.checkpoint,
        "recipe": manifest.recipe.model_dump(mode="json"),
        "layout": _layout(manifest),
    }


def _convert(job: Job, manifest: Manifest) -> Made:
    from dgcompile.quantize.convert import convert_weights

    planned = plan_store(manifest.spec, manifest.recipe)
    size = max(tensor.offset + tensor.nbytes for tensor in planned.values())
    converted = convert_weights(job.checkpoint, manifest.recipe, job.folder, job.progress)
    written = (job.folder / WEIGHTS_FILE).stat().st_size
    if written != size:
        raise StageError(f"stage weights wrote {written} bytes", expected=f"{size} bytes, by the shapes of the model")
    return Made(files=(WEIGHTS_FILE,), known_hashes={WEIGHTS_FILE: converted.sha256})


# engine: proof that the library runs it -------------------------------------------------------------------------------


def _engine_inputs(job: Job, manifest: Manifest) -> dict[str, Any]:
    files = manifest.files
    return {
        "files": {name: files[name].sha256 for name in (*GRAPH_FILES.values(), WEIGHTS_FILE)},
        "graphs": {graph: record.model_dump(mode="json") for graph, record in manifest.graphs.items()},
    }


def _try_engine(job: Job, manifest: Manifest) -> Made:
    dtype = manifest.recipe.activation_dtype
    return Made(engine=try_graphs(job.folder, manifest.graphs, manifest.spec, dtype, job.progress))


ALL_STAGES = (
    Stage("assets", (), ("dgcompile.generation_config",), _assets_inputs, _make_assets),
    Stage(
        "trace",
        ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "protobuf"),
        ("dgcompile.trace", "dgcompile.plugins", "dgcompile.contract", "dgcompile.model_spec", "dgcompile.checkpoint"),
        _trace_inputs,
        _trace,
    ),
    Stage(
        "weights",
        ("torch",),
        ("dgcompile.quantize", "dgcompile.weights_store", "dgcompile.safetensors_file", "dgcompile.checkpoint"),
        _weights_inputs,
        _convert,
    ),
    Stage(
        "engine", ("onnxruntime",), ("dgcompile.build.onnxruntime", "dgcompile.contract"), _engine_inputs, _try_engine
    ),
)
"""In the order in which they run."""
