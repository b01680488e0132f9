"""The random checkpoints that other tests build on, and the script that writes them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from tokenizers import Tokenizer

from dgcompile.checkpoint import Checkpoint
from dgcompile.model_spec import ModelSpec
from tests.models import random_checkpoint

SCRIPT = Path(__file__).parent.parent / "scripts" / "random_checkpoint.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("random_checkpoint_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_layout_is_the_published_one(checkpoint: Path) -> None:
    expected = Checkpoint.open(checkpoint).spec.expected_tensors()
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    others = {name for name in stored if name not in expected}
    assert {name: stored[name] for name in expected} == expected
    assert others and all(
        name.startswith(("model.encoder.vision_tower", "model.encoder.embed_vision")) for name in others
    )


def test_no_weight_is_trivial(checkpoint: Path) -> None:
    """A norm of ones or a scalar of one would hide that it is not applied."""
    opened = Checkpoint.open(checkpoint)
    for name in opened.spec.expected_tensors():
        tensor = opened.read(name).float()
        assert tensor.ne(1).any() and (tensor.numel() == 1 or tensor.std() > 0.01), name
    for index in range(opened.spec.num_hidden_layers):
        encoder = opened.read(f"model.encoder.language_model.layers.{index}.layer_scalar")
        assert not torch.equal(encoder, opened.read(f"model.decoder.layers.{index}.layer_scalar"))


def test_equal_seeds_give_equal_files_and_leave_torch_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    folders = [random_checkpoint(tmp_path / str(run), seed=run // 2) for run in range(3)]
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]


def test_both_config_forms_and_shards_are_the_same_model(tmp_path: Path, checkpoint: Path) -> None:
    saved = random_checkpoint(tmp_path / "saved", config_form="transformers", shards=3)
    config = json.loads((saved / "config.json").read_text())
    assert "per_layer_config" in config["text_config"] and "global_head_dim" not in config["text_config"]
    assert ModelSpec.from_config(config) == Checkpoint.open(checkpoint).spec
    assert len(list(saved.glob("*.safetensors"))) == 3


def test_the_tokenizer_spells_any_text_and_every_id(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = "Ünïcode\t☃\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 288
    assert all(tokenizer.id_to_token(token) is not None for token in range(288))


def test_the_script_writes_what_was_asked_for(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "checkpoint"
    arguments = [str(folder), "--layers", "sfsf", "--vocab", "70", "--window", "9", "--canvas", "12", "--shards", "2"]
    result = CliRunner().invoke(script.main, arguments)
    assert result.exit_code == 0, result.output
    spec = Checkpoint.open(folder).spec
    assert [layer.window for layer in spec.layers] == [9, 0, 9, 0]
    assert (spec.vocab_size, spec.canvas_length) == (70, 12)


def test_the_script_takes_another_tokenizer(script: ModuleType, tmp_path: Path, checkpoint: Path) -> None:
    result = CliRunner().invoke(script.main, [str(tmp_path / "new"), "--vocab", "300", "--tokenizer", str(checkpoint)])
    assert result.exit_code == 0, result.output
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "new" / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "ssx"], "letters s (sliding) and f (full)"),
        (["--layers", "fs"], "end with f"),
        (["--vocab", "15"], "15 is not in the range"),
        (["--vocab", "64", "--tokenizer", "CHECKPOINT"], "has 288 tokens but --vocab is 64"),
    ],
)
def test_the_script_refuses_what_cannot_be(
    script: ModuleType, tmp_path: Path, checkpoint: Path, arguments: list[str], message: str
) -> None:
    given = [str(checkpoint) if argument == "CHECKPOINT" else argument for argument in arguments]
    result = CliRunner().invoke(script.main, [str(tmp_path / "new"), *given])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "new").exists()


def test_the_script_never_writes_into_a_used_folder(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(script.main, [str(tmp_path)])
    assert result.exit_code == 2 and "not empty" in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
