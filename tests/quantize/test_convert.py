"""Conversion into the weights store: right values, the same bytes whatever happens, nothing half-finished."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dgcompile import content_hashes
from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import CheckpointError, StageError
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Advance, Progress
from dgcompile.quantize import convert
from dgcompile.quantize.convert import convert_weights
from dgcompile.recipe import Recipe
from dgcompile.safetensors_file import read_header
from dgcompile.target import Target
from dgcompile.weights_store import JOURNAL_FILE, WEIGHTS_FILE, lay_out_store
from tests.tiny_checkpoint import TENSORS_PER_CHECKPOINT, split, tiny_config, tiny_tensors, write_checkpoint

EXPERTS = "model.decoder.layers.1.experts.down_proj"
PARTIAL_FILE = WEIGHTS_FILE + ".partial"
RECIPE = Recipe.load("fp32").for_target(Target.load("cpu"))
KILLED_AT = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from dgcompile.checkpoint import Checkpoint
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Progress
from dgcompile.quantize.convert import convert_weights
from dgcompile.recipe import Recipe
from dgcompile.target import Target

source, folder, recipe_name, flush_bytes, *points = sys.argv[1:]
recipe = Recipe.load(recipe_name).for_target(Target.load("cpu"))

class Killer(Progress):
    @contextmanager
    def task(self, label, total=None, unit=""):
        left = point
        def advance(amount=1.0):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        yield advance

# Each point in a child of its own: importing torch once is enough.
for point in map(int, points):
    child = os.fork()
    if not child:
        target = Path(folder) / str(point)
        target.mkdir()
        convert_weights(Checkpoint.open(source), recipe, target, Killer(), flush_bytes=int(flush_bytes))
        os._exit(0)
    print(point, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class Hook(Progress):
    """Calls a function at each report of progress."""

    def __init__(self, called: Callable[[float], object]) -> None:
        self.called = called

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        def advance(amount: float = 1.0, /) -> None:
            self.called(amount)

        yield advance


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), shards=split(list(tiny_tensors()), 3))


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The store that an undisturbed conversion of ``source`` makes."""
    return converted(source, tmp_path_factory.mktemp("undisturbed"))


def converted(source: Path, folder: Path, **options: Any) -> bytes:
    folder.mkdir(exist_ok=True)
    convert_weights(Checkpoint.open(source), RECIPE, folder, **options)
    assert [file.name for file in folder.iterdir()] == [WEIGHTS_FILE]
    return (folder / WEIGHTS_FILE).read_bytes()


# values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_layout(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = tiny_tensors(dtype)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "source", tensors))
    result = convert_weights(checkpoint, RECIPE, tmp_path)
    file = tmp_path / WEIGHTS_FILE
    stored = load_file(file)
    assert set(stored) == set(tensors)
    assert all(torch.equal(stored[name], values.float()) for name, values in tensors.items())
    planned = lay_out_store(checkpoint.spec, RECIPE).tensors
    assert read_header(file) == {name: tensor._replace(file=file) for name, tensor in planned.items()}
    assert result == (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size)


def test_tensors_larger_than_a_piece(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = converted(source, tmp_path / "whole")
    monkeypatch.setattr(convert, "_PIECE_ELEMENTS", 7)
    assert converted(source, tmp_path / "pieces") == whole


def test_every_float_survives(tmp_path: Path) -> None:
    # All finite bfloat16 values there are: rounding, subnormals and signed zeros included.
    patterns = numpy.arange(2**16, dtype=numpy.uint16).view(numpy.int16)
    every = torch.from_numpy(patterns).view(torch.bfloat16)
    every = torch.where(torch.isfinite(every), every, torch.zeros_like(every))
    config = tiny_config(vocab_size=2**13)
    name = "model.decoder.embed_tokens.weight"
    write_checkpoint(tmp_path / "source", {**tiny_tensors(), name: every.view(2**13, 8)}, config=config)
    converted(tmp_path / "source", tmp_path / "out")
    stored = load_file(tmp_path / "out" / WEIGHTS_FILE)[name].view(-1)
    assert torch.equal(stored.view(torch.int32), every.float().view(torch.int32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    tensors = tiny_tensors()
    tensors[EXPERTS].view(-1)[-1] = value
    write_checkpoint(tmp_path / "source", tensors, shards=split(list(tensors), 2))
    checkpoint = Checkpoint.open(tmp_path / "source")
    with pytest.raises(CheckpointError) as raised:
        convert_weights(checkpoint, RECIPE, tmp_path)
    assert str(raised.value).startswith(f"{EXPERTS} in {checkpoint.tensors[EXPERTS].file} holds NaN or infinity")
    assert not (tmp_path / WEIGHTS_FILE).exists()


# the same bytes -------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(1, TENSORS_PER_CHECKPOINT), st.booleans())
def test_the_shard_split_does_not_matter(
    undisturbed: bytes, tmp_path_factory: pytest.TempPathFactory, random: Any, shards: int, head_too: bool
) -> None:
    folder = tmp_path_factory.mktemp("split")
    tensors = tiny_tensors()
    if head_too:
        tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
    names = list(tensors)
    random.shuffle(names)
    write_checkpoint(folder / "source", tensors, shards=split(names, shards))
    assert converted(folder / "source", folder / "out") == undisturbed


@pytest.mark.parametrize("flush_bytes", [1, 1500, 1 << 30])
def test_killed_at_any_point_the_next_run_finishes_with_the_same_bytes(
    source: Path, undisturbed: bytes, tmp_path: Path, flush_bytes: int
) -> None:
    points = [0, 1, 2, 13, 30, TENSORS_PER_CHECKPOINT - 1, TENSORS_PER_CHECKPOINT]
    arguments = [str(source), str(tmp_path), "fp32", str(flush_bytes), *map(str, points)]
    run = subprocess.run([sys.executable, "-c", KILLED_AT, *arguments], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(part) for point in points for part in (point, -signal.SIGKILL)]
    for point in points:
        folder = tmp_path / str(point)
        assert not (folder / WEIGHTS_FILE).exists()
        journal = folder / JOURNAL_FILE
        finished = len(journal.read_text().splitlines()) - 1 if journal.exists() else 0
        if flush_bytes == 1 and point:
            # The report comes before the journal's line.
            assert finished == max(0, point - 1)
        # What is on disk need not be converted again.
        redone = conversions(partial(converted, source, folder))
        assert redone == TENSORS_PER_CHECKPOINT - finished
        assert (folder / WEIGHTS_FILE).read_bytes() == undisturbed


@pytest.mark.parametrize("name", ["int4", "w8a16"])
def test_quantized_weights_are_the_same_bytes_however_they_came_about(name: str, tmp_path: Path) -> None:
    recipe = Recipe.load(name).for_target(Target.load("cpu"))
    config = tiny_config(hidden_size=64, intermediate_size=64, moe_intermediate_size=64)
    generator = torch.Generator().manual_seed(0)
    shapes = ModelSpec.from_config(config).expected_tensors()
    tensors = {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in shapes.items()}
    whole = Checkpoint.open(write_checkpoint(tmp_path / "whole", tensors, config=config))
    expected = convert_weights(whole, recipe, tmp_path).sha256
    shards = split(sorted(tensors, key=lambda key: key[::-1]), 5)
    sharded = Checkpoint.open(write_checkpoint(tmp_path / "sharded", tensors, shards=shards, config=config))
    assert convert_weights(sharded, recipe, tmp_path).sha256 == expected
    points = [0, 1, 2, 17, 40, 70]
    arguments = [str(tmp_path / "whole"), str(tmp_path / "killed"), name, "1", *map(str, points)]
    (tmp_path / "killed").mkdir()
    run = subprocess.run([sys.executable, "-c", KILLED_AT, *arguments], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(part) for point in points for part in (point, -signal.SIGKILL)]
    for point in points:
        folder = tmp_path / "killed" / str(point)
        assert not (folder / WEIGHTS_FILE).exists()
        assert convert_weights(whole, recipe, folder).sha256 == expected
        assert hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest() == expected


def conversions(work: Callable[[], object]) -> int:
    """How many tensors ``work`` really converts."""
    count = 0
    real = convert._Conversion._convert

    def counting(*arguments: Any) -> Iterator[memoryview]:
        nonlocal count
        count += 1
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert._Conversion, "_convert", counting)
        work()
    return count


def interrupted(source: Path, folder: Path, after: int) -> None:
    """Leaves in ``folder`` what a conversion has done after some reports, each tensor journaled."""
    left = after

    def count_down(_: float) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    folder.mkdir(exist_ok=True)
    with pytest.raises(KeyboardInterrupt):
        convert_weights(Checkpoint.open(source), RECIPE, folder, Hook(count_down), flush_bytes=1)


def test_an_interrupted_run_leaves_what_the_next_needs(source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    interrupted(source, tmp_path, 20)
    assert {file.name for file in tmp_path.iterdir()} == {PARTIAL_FILE, JOURNAL_FILE}
    done: list[float] = []
    assert converted(source, tmp_path, progress=Hook(done.append)) == undisturbed
    # Progress covers the whole file, what was there already included.
    assert sum(done) == len(undisturbed)


def tear_last_line(folder: Path) -> None:
    journal = folder / JOURNAL_FILE
    journal.write_bytes(journal.read_bytes()[:-9])


def write_nonsense(folder: Path) -> None:
    (folder / JOURNAL_FILE).write_bytes(b"\x00nonsense")


def skip_a_line(folder: Path) -> None:
    journal = folder / JOURNAL_FILE
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:3] + lines[4:]))


def cut_the_partial_file(folder: Path) -> None:
    os.truncate(folder / PARTIAL_FILE, 1000)


def remove_the_partial_file(folder: Path) -> None:
    (folder / PARTIAL_FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "redone"),
    [
        (tear_last_line, TENSORS_PER_CHECKPOINT - 18),
        (write_nonsense, TENSORS_PER_CHECKPOINT),
        (skip_a_line, TENSORS_PER_CHECKPOINT),
        (cut_the_partial_file, TENSORS_PER_CHECKPOINT),
        (remove_the_partial_file, TENSORS_PER_CHECKPOINT),
    ],
)
def test_damaged_leftovers(
    source: Path, undisturbed: bytes, tmp_path: Path, damage: Callable[[Path], None], redone: int
) -> None:
    interrupted(source, tmp_path, 20)
    damage(tmp_path)
    assert conversions(lambda: converted(source, tmp_path)) == redone
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == undisturbed


def test_leftovers_of_another_checkpoint_are_not_continued(source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", tiny_tensors(seed=1))
    interrupted(other, tmp_path / "out", 20)
    assert converted(source, tmp_path / "out") == undisturbed


def test_a_finished_store_is_replaced(source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes(b"old")
    assert converted(source, tmp_path) == undisturbed


# the source -----------------------------------------------------------------------------------------------------------


def test_a_source_that_changes_meanwhile(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "source"))
    file = tmp_path / "source" / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was read"):
        convert_weights(checkpoint, RECIPE, tmp_path, Hook(lambda _: file.touch()))
    assert not (tmp_path / WEIGHTS_FILE).exists()


def test_a_source_that_shrinks_meanwhile(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "source"))
    file = tmp_path / "source" / "model.safetensors"
    size = file.stat().st_size
    with pytest.raises(CheckpointError, match=r"model\.safetensors became shorter: model\.\S+ ends \d+ bytes early"):
        convert_weights(checkpoint, RECIPE, tmp_path, Hook(lambda _: os.truncate(file, size // 2)))


def test_the_fingerprint_needs_no_further_reading(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_hashes, "_SETTLED_NS", -(10**18))
    expected = Checkpoint.open(write_checkpoint(tmp_path / "same")).fingerprint()
    checkpoint = Checkpoint.open(source)
    interrupted(source, tmp_path / "out", 20)
    converted(source, tmp_path / "out")
    read: list[float] = []
    assert checkpoint.fingerprint(Hook(read.append)) == expected
    assert read == []


# resources ------------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    # A sparse file whose tensors no disk here can hold in float32.
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    hidden, vocab = 2**16, free // 2**17 + 2**10
    config = tiny_config(vocab_size=vocab, hidden_size=hidden)
    write_checkpoint(tmp_path, config=config)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in ModelSpec.from_config(config).expected_tensors().items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(
        StageError, match=r"out has no room for weights\.safetensors: it needs [\d,]+ bytes, [\d,]+ are"
    ):
        convert_weights(checkpoint, RECIPE, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"missing/weights\.safetensors could not be written"):
        convert_weights(Checkpoint.open(source), RECIPE, tmp_path / "missing")


def test_memory_is_bounded_by_a_piece(tmp_path: Path) -> None:
    vocab = 3_000_000
    tensors = {**tiny_tensors(), "model.decoder.embed_tokens.weight": torch.ones(vocab, 8, dtype=torch.bfloat16)}
    write_checkpoint(tmp_path, tensors, config=tiny_config(vocab_size=vocab))
    code = (
        "import resource; from pathlib import Path; from dgcompile.checkpoint import Checkpoint; "
        "from dgcompile.recipe import Recipe; from dgcompile.quantize.convert import convert_weights; "
        f"checkpoint = Checkpoint.open({str(tmp_path)!r}); recipe = Recipe.load('fp32'); "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        f"nbytes = convert_weights(checkpoint, recipe, Path({str(tmp_path)!r})).nbytes; "
        "print(nbytes, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    nbytes, grown = map(int, run.stdout.split())
    assert nbytes > 96_000_000
    # A piece has 4 Mi elements: 8 MB read, 16 MB written, and what torch needs to check and convert it.
    assert grown < 64_000_000
