"""Writes a checkpoint of the published size, or of its first layers, without the published weights.

The config, the names, shapes and dtype of the tensors and the split into files are those of
google/diffusiongemma-26B-A4B-it, but for the vision tower, which dgcompile does not read and is tiny here. Tokenizer,
chat template, generation_config.json and calibration.jsonl are those of examples/sudoku, whose vocabulary is smaller.

    python scripts/synthetic_checkpoint.py CHECKPOINT --fill sparse          # all 30 layers, 50 GB of holes: no disk
    python scripts/synthetic_checkpoint.py CHECKPOINT --layers 2             # two layers of random weights: 4.8 GB

Weights are written as they are drawn, a few megabytes at a time. For small models of any shape and dtype, and in either
form of config.json, there is random_checkpoint.py, which has the whole model in memory.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import numpy as np
import numpy.typing as npt

# The model's shape belongs to the tests, which are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dgcompile.checkpoint import CONFIG_FILE, INDEX_FILE
from dgcompile.cli.render import progress as rendered_progress
from dgcompile.files import PARTIAL_SUFFIX, sync_folder
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Advance, Progress
from dgcompile.safetensors_file import StoredTensor, lay_out, tensor_nbytes
from tests.model_config import MAX_LAYERS, published_config, vision_tensors

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "sudoku"
ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "calibration.jsonl",
)
SHARD_BYTES = 5_000_000_000
"""Largest file of weights: what transformers' ``save_pretrained`` calls 5GB."""

PIECE_ELEMENTS = 1 << 20
"""Weights drawn at a time by each thread: 2 MB in bfloat16, so that all steps stay in the processor's cache. Each piece
has random numbers of its own."""

STORED_DTYPE = "BF16"
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

Fill = Literal["random", "sparse"]


class Shard(NamedTuple):
    """One file of weights, before it exists.

    Attributes:
        head: its first bytes.
        tensors: where its tensors go.
    """

    head: bytes
    tensors: dict[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors.values())


def plan_shards(shapes: Mapping[str, tuple[int, ...]], shard_bytes: int) -> dict[str, Shard]:
    """The files by name: tensors in the given order, as many to a file as fit into ``shard_bytes``."""
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    room = 0
    for name, shape in shapes.items():
        nbytes = tensor_nbytes(STORED_DTYPE, shape)
        if not groups or nbytes > room:
            groups.append({})
            room = shard_bytes
        groups[-1][name] = (STORED_DTYPE, shape)
        room -= nbytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return {name: Shard(*lay_out(Path(name), group)) for name, group in zip(names, groups, strict=True)}


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    *,
    fill: Fill = "random",
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> int:
    """Writes a checkpoint beside ``folder`` and gives it that name when it is complete.

    Args:
        folder: missing or empty.
        config: config.json of the model, in the published form.
        fill: "random": see :func:`tests.model_weights.scaled`; "sparse": holes, which read as zeros and take no disk.
        seed: a tensor's bytes depend on this, its name and its shape, and on nothing else.
        shard_bytes: largest file of weights, unless one tensor alone is larger.
        progress: told the bytes of weights.

    Returns:
        The bytes of the weights' files, holes included.

    Raises:
        FileExistsError: ``folder`` has content, or something else lies where the unfinished checkpoint would.
        OSError: the disk is too small, or as the file system reports it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder")
    spec = ModelSpec.from_config(config)
    shards = plan_shards({**spec.expected_tensors(), **vision_tensors(config)}, shard_bytes)
    total = sum(shard.nbytes for shard in shards.values())
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _folder_that_appears_whole(folder) as partial:
        free = shutil.disk_usage(partial).free
        if fill == "random" and free < total:
            raise OSError(f"{folder} needs {total:,} bytes, {free:,} are free")
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        (partial / INDEX_FILE).write_text(json.dumps(_index(shards), indent=2) + "\n")
        for name in ASSETS:
            shutil.copyfile(EXAMPLE / name, partial / name)
        for name, shard in shards.items():
            with (partial / name).open("wb") as file:
                file.write(shard.head)
                file.truncate(shard.nbytes)
        if fill == "random":
            with (progress or Progress()).task("weights", total, "bytes") as advance:
                _fill(partial, shards, spec, seed, advance)
    return total


def _index(shards: Mapping[str, Shard]) -> dict[str, Any]:
    tensors = {name: tensor for shard in shards.values() for name, tensor in shard.tensors.items()}
    return {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: str(tensor.file) for name, tensor in sorted(tensors.items())},
    }


@contextlib.contextmanager
def _folder_that_appears_whole(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` that takes its name when the block ends, and goes away when it fails."""
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    _remove_unfinished(partial)
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        sync_folder(partial)
        partial.replace(folder)
    except BaseException:
        _remove_unfinished(partial)
        raise
    sync_folder(folder.absolute().parent)


def _remove_unfinished(partial: Path) -> None:
    """Removes what a killed run left behind; never what somebody else put there."""
    if not partial.exists():
        return
    ours = {CONFIG_FILE, INDEX_FILE, *ASSETS}
    foreign = [
        file.name for file in partial.iterdir() if file.name not in ours and not _SHARD_NAME.fullmatch(file.name)
    ]
    if foreign:
        raise FileExistsError(f"{partial} is where the unfinished checkpoint would lie, and it holds {foreign[0]}")
    shutil.rmtree(partial)


def _fill(folder: Path, shards: Mapping[str, Shard], spec: ModelSpec, seed: int, advance: Advance) -> None:
    """Writes random weights into the files, pieces of tensors side by side on all cores."""
    import torch

    torch.set_num_threads(1)  # every thread below keeps a core busy
    stopped = threading.Event()
    with contextlib.ExitStack() as files, ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting: set[Future[int]] = set()
        try:
            for name, shard in shards.items():
                handle = files.enter_context((folder / name).open("r+b")).fileno()
                for tensor_name, tensor in shard.tensors.items():
                    for rows in _pieces(tensor.shape):
                        task = _Piece(tensor_name, tensor, rows, spec, seed)
                        waiting.add(pool.submit(task.write, handle, stopped))
            advance(sum(len(shard.head) for shard in shards.values()))
            for done in concurrent.futures.as_completed(waiting):
                advance(done.result())
        except BaseException:
            stopped.set()  # what is queued returns at once
            raise


def _pieces(shape: tuple[int, ...]) -> Iterator[slice]:
    """The rows (vectors along the last axis, in the order of their bytes) of each piece; depends on the shape alone."""
    count, step = math.prod(shape[:-1]), max(1, PIECE_ELEMENTS // shape[-1])
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


class _Piece(NamedTuple):
    """Rows of a tensor that one thread draws and writes."""

    name: str
    tensor: StoredTensor
    rows: slice
    spec: ModelSpec
    seed: int

    def write(self, handle: int, stopped: threading.Event) -> int:
        """Writes the rows to their place in the open file; returns their bytes."""
        if stopped.is_set():
            return 0
        import torch

        from tests.model_weights import scaled

        noise = torch.from_numpy(self._noise())
        weights = scaled(self.name, noise, self.spec.hidden_size, _final_norm(self.spec), self.rows.start)
        data = weights.to(torch.bfloat16).view(torch.uint8).numpy().reshape(-1).data
        offset = self.tensor.offset + self.rows.start * 2 * self.tensor.shape[-1]
        written = 0
        while written < len(data):
            written += os.pwrite(handle, data[written:], offset + written)
        return len(data)

    def _noise(self) -> npt.NDArray[np.float32]:
        """Standard normal numbers: 16 random bits choose one of 65,536 equally probable ones, four times as fast
        as drawing each, and finer than bfloat16."""
        name = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")
        bits = np.random.SFC64([self.seed, name, self.rows.start])
        width = self.tensor.shape[-1]
        count = (self.rows.stop - self.rows.start) * width
        drawn = bits.random_raw(-(-count // 4)).view(np.uint16)[:count]
        found: npt.NDArray[np.float32] = np.take(_normal_quantiles(), drawn)
        return found if len(self.tensor.shape) == 1 else found.reshape(-1, width)


@functools.cache
def _normal_quantiles() -> npt.NDArray[np.float32]:
    """The normal distribution's quantiles at the middles of 65,536 equal steps of probability."""
    import torch

    middles = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    found: npt.NDArray[np.float32] = torch.special.ndtri(middles).float().numpy()
    return found


def _final_norm(spec: ModelSpec) -> tuple[float, float]:
    """Mean and standard deviation of the last norm's weight.

    A token sees itself in its own logits: they are about mean x sqrt(hidden) x (its embedding's share of the stream),
    while those of other tokens are near 0. At 0.72 ln(vocabulary), between t_min and t_max of the temperature times
    ln(vocabulary), tokens with a long embedding are sure of themselves from the first step on and others become so.
    """
    # Each layer adds two contributions of 0.35 to a stream that begins at 1.
    share = (1 + 2 * 0.35**2 * spec.num_hidden_layers) ** -0.5
    mean = 0.72 * math.log(spec.vocab_size) / (math.sqrt(spec.hidden_size) * share)
    return mean, 0.2 * mean


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--layers",
    type=click.IntRange(1, MAX_LAYERS),
    default=MAX_LAYERS,
    show_default=True,
    help="Write the first N layers only. Every sixth layer has full attention; where the last one would not, it gets "
    "full attention all the same, because the model must end so.",
)
@click.option(
    "--fill",
    type=click.Choice(["random", "sparse"]),
    default="random",
    show_default=True,
    help="random: normal numbers of a sensible scale for each kind of weight. sparse: holes; all zeros, no disk.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random weights.")
def main(output: Path, layers: int, fill: Fill, seed: int) -> None:
    """Write a checkpoint of the published size of DiffusionGemma 26B-A4B into the new folder OUTPUT.

    Its tensors have the published names, shapes and dtype, in files of at most 5 GB; nothing else is real about the
    weights. Nothing half-written is ever called OUTPUT.

    \b
    Examples:
      # All 30 layers as holes: 50 GB that take no disk, at once
      python scripts/synthetic_checkpoint.py CHECKPOINT --fill sparse
      # Two layers of random weights, 4.8 GB
      python scripts/synthetic_checkpoint.py CHECKPOINT --layers 2
    """
    try:
        total = write_checkpoint(output, published_config(layers), fill=fill, seed=seed, progress=rendered_progress())
    except OSError as error:
        problem = f"{output} cannot be written: {error.strerror}" if error.strerror else str(error)
        raise click.UsageError(f"{problem}; name another folder") from error
    disk = sum(file.stat().st_blocks * 512 for file in output.iterdir())
    click.echo(f"{output}: {layers} layers, {total / 1e9:.1f} GB of weights, {disk / 1e9:.1f} GB on disk")


if __name__ == "__main__":
    main()
