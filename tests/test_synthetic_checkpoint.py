"""``scripts/synthetic_checkpoint.py``: checkpoints of the published layout, small ones and, as holes, the whole."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from dgcompile.checkpoint import Checkpoint, is_vision_tensor
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Advance, Progress
from dgcompile.safetensors_file import read_header
from tests.model_config import SMALL_SIZES, published_config, vision_tensors

SCRIPT = Path(__file__).parent.parent / "scripts" / "synthetic_checkpoint.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("synthetic_checkpoint", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return published_config(8, **SMALL_SIZES)


@pytest.fixture(scope="module")
def written(script: ModuleType, config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "checkpoint"
    script.write_checkpoint(folder, config)
    return folder


def tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor, wherever it lies."""
    return {
        name: file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        for file in folder.glob("*.safetensors")
        for name, tensor in read_header(file).items()
    }


def test_the_published_config_has_the_published_size() -> None:
    config = published_config()
    spec = ModelSpec.from_config(config)
    assert [index for index, layer in enumerate(spec.layers) if layer.kind == "full_attention"] == [5, 11, 17, 23, 29]
    assert sum(map(math.prod, spec.expected_tensors().values())) == pytest.approx(25.25e9, abs=0.01e9)
    assert config["text_config"]["num_hidden_layers"] == 30


@pytest.mark.parametrize("layers", [1, 2, 6, 8])
def test_the_first_layers_are_those_of_the_whole_model(layers: int) -> None:
    spec, whole = ModelSpec.from_config(published_config(layers)), ModelSpec.from_config(published_config())
    assert spec.layers[:-1] == whole.layers[: layers - 1] and spec.layers[-1] == whole.layers[-1]
    assert spec.model_copy(update={"layers": whole.layers}) == whole


def test_a_size_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="hiden_size"):
        published_config(2, hiden_size=8)


def test_transformers_expects_the_same_tensors_at_the_published_size() -> None:
    config = published_config()
    expected = {**ModelSpec.from_config(config).expected_tensors(), **vision_tensors(config)}
    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**json.loads(json.dumps(config))))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: theirs.get(name) for name in expected} == expected
    assert set(filter(is_vision_tensor, theirs)) == set(vision_tensors(config))


def test_transformers_loads_it_and_nothing_is_missing(written: Path) -> None:
    model: Any = DiffusionGemmaForBlockDiffusion
    loaded, found = model.from_pretrained(written, output_loading_info=True)
    assert not any(found.values()), found
    opened = Checkpoint.open(written)
    theirs = loaded.state_dict()
    assert all(torch.equal(theirs[name].bfloat16(), opened.read(name)) for name in opened.tensors)


def test_the_files_are_what_the_index_says(script: ModuleType, written: Path) -> None:
    index = json.loads((written / "model.safetensors.index.json").read_text())
    stored = {name: file.name for file in written.glob("*.safetensors") for name in read_header(file)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(map(len, tensors(written).values()))
    for name in script.ASSETS:
        assert (written / name).read_bytes() == (script.EXAMPLE / name).read_bytes()


def test_no_weight_is_trivial_and_their_scale_is_sane(written: Path) -> None:
    opened = Checkpoint.open(written)
    for name, shape in opened.spec.expected_tensors().items():
        tensor = opened.read(name).float()
        # A single number may come out as 1.
        assert tensor.isfinite().all() and (tensor.numel() == 1 or tensor.std() > 0.01), name
        if len(shape) > 1 and "router" not in name and "embed" not in name:
            assert tensor.std().item() == pytest.approx(shape[-1] ** -0.5, rel=0.1), name
            assert abs(tensor.mean().item()) < 5 * tensor.std().item() / math.sqrt(tensor.numel()), name
    scalars = [opened.read(name).item() for name in opened.tensors if name.endswith("layer_scalar")]
    assert len(set(scalars)) > 8 and all(0.4 < scalar < 1.6 for scalar in scalars)
    embedding = opened.read("model.decoder.embed_tokens.weight").float()
    assert embedding.norm(dim=1).median().item() == pytest.approx(1, abs=0.1)


def test_bytes_depend_neither_on_the_split_nor_on_other_tensors(
    script: ModuleType, written: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    script.write_checkpoint(tmp_path / "split", config, shard_bytes=100_000)
    files = list((tmp_path / "split").glob("*.safetensors"))
    assert len(files) > 3 and len(list(written.glob("*.safetensors"))) == 1
    for file in files:
        sizes = [tensor.nbytes for tensor in read_header(file).values()]
        assert len(sizes) == 1 or sum(sizes) <= 100_000
    assert tensors(tmp_path / "split") == tensors(written)
    script.write_checkpoint(tmp_path / "shorter", published_config(7, **SMALL_SIZES))
    shorter = tensors(tmp_path / "shorter")
    assert {name: data for name, data in tensors(written).items() if ".layers.5." in name}.items() <= shorter.items()


def test_weights_differ_between_seeds_tensors_and_pieces(
    script: ModuleType, written: Path, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PIECE_ELEMENTS", 1000)
    script.write_checkpoint(tmp_path / "other", config, seed=1)
    first, second = tensors(written), tensors(tmp_path / "other")
    # Single numbers may be equal by chance.
    assert all(first[name] != second[name] for name in first if len(first[name]) > 2)
    experts = [second[f"model.decoder.layers.{index}.experts.gate_up_proj"] for index in range(8)]
    assert len(set(experts)) == 8
    # Rows of all pieces, numbered across pieces: none equals another one.
    rows = [experts[0][start : start + 128] for start in range(0, len(experts[0]), 128)]
    assert len(set(rows)) == len(rows)


def test_sparse_is_zeros_that_take_no_disk(script: ModuleType, tmp_path: Path) -> None:
    """At full size: 50 GB."""
    folder = tmp_path / "sparse"
    result = CliRunner().invoke(script.main, [str(folder), "--fill", "sparse"])
    assert result.exit_code == 0, result.output
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 11 and all(file.stat().st_size <= 5e9 for file in files)
    assert sum(file.stat().st_size for file in files) > 50e9
    assert sum(file.stat().st_blocks for file in folder.iterdir()) * 512 < 1e6
    opened = Checkpoint.open(folder)
    assert opened.spec == ModelSpec.from_config(published_config())
    assert not opened.read("model.decoder.layers.29.self_attn.q_proj.weight").any()


class _Stops(Progress):
    """Ctrl-C at the first piece."""

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        def advance(amount: float = 1.0, /) -> None:
            raise KeyboardInterrupt

        yield advance


def test_ctrl_c_leaves_nothing(script: ModuleType, config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        script.write_checkpoint(tmp_path / "checkpoint", config, progress=_Stops())
    assert not list(tmp_path.iterdir())


def test_a_killed_run_leaves_no_checkpoint_and_the_next_one_replaces_its_remains(
    script: ModuleType, written: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    folder, partial = tmp_path / "checkpoint", tmp_path / "checkpoint.partial"
    command = [sys.executable, str(SCRIPT), str(folder), "--layers", "1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not list(partial.glob("*.safetensors")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists() and partial.exists()
    script.write_checkpoint(folder, config)
    assert tensors(folder) == tensors(written)
    assert list(tmp_path.iterdir()) == [folder]


def test_nothing_of_others_is_touched(script: ModuleType, config: dict[str, Any], tmp_path: Path) -> None:
    for used in ("checkpoint", "free.partial"):
        (tmp_path / used).mkdir()
        (tmp_path / used / "notes.txt").write_text("mine")
    for folder in ("checkpoint", "free"):
        with pytest.raises(FileExistsError):
            script.write_checkpoint(tmp_path / folder, config)
    result = CliRunner().invoke(script.main, [str(tmp_path / "checkpoint"), "--fill", "sparse"])
    assert result.exit_code == 2 and "not an empty folder" in result.output
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.glob("*/*")) == [
        "checkpoint/notes.txt",
        "free.partial/notes.txt",
    ]


def test_an_empty_folder_is_as_good_as_none(script: ModuleType, config: dict[str, Any], tmp_path: Path) -> None:
    script.write_checkpoint(tmp_path, config, fill="sparse")
    assert Checkpoint.open(tmp_path).spec.num_hidden_layers == 8


@pytest.mark.parametrize("layers", ["0", "31", "2.5"])
def test_only_the_model_s_own_layers_can_be_had(script: ModuleType, tmp_path: Path, layers: str) -> None:
    result = CliRunner().invoke(script.main, [str(tmp_path / "new"), "--layers", layers])
    assert result.exit_code == 2 and layers in result.output
    assert not (tmp_path / "new").exists()
