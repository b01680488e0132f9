"""Opening checkpoints: what is read, what is refused (by tensor and file), and the fingerprint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import DiffusionGemmaForBlockDiffusion

from dgcompile import content_hashes
from dgcompile.checkpoint import Checkpoint, canonical_name, is_vision_tensor
from dgcompile.errors import CheckpointError
from dgcompile.generation_config import GenerationConfig
from dgcompile.progress import Progress
from tests.models import random_checkpoint
from tests.test_model_spec import transformers_config
from tests.tiny_checkpoint import TENSORS_PER_CHECKPOINT, split, tiny_config, tiny_tensors, write_checkpoint

EMBEDDING = "model.decoder.embed_tokens.weight"
EXPERTS = "model.decoder.layers.1.experts.down_proj"
EXAMPLE = Path(__file__).parent.parent / "examples" / "sudoku"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def refusal(folder: Path | str) -> str:
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(folder)
    return str(raised.value)


# what is read ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shards", [None, 1, 3])
def test_every_tensor_reads_back(tmp_path: Path, dtype: torch.dtype, shards: int | None) -> None:
    tensors = tiny_tensors(dtype)
    write_checkpoint(tmp_path, tensors, shards=split(list(tensors), shards) if shards else None)
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint.tensors) == list(tensors)
    assert len(tensors) == TENSORS_PER_CHECKPOINT
    for name, values in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == dtype
        assert torch.equal(read, values)


def test_misaligned_tensors_read_back(tmp_path: Path) -> None:
    tensors = tiny_tensors(torch.float32)
    file = write_checkpoint(tmp_path, tensors) / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.tensors[EMBEDDING].offset % 2 == 1
    assert all(torch.equal(checkpoint.read(name), values) for name, values in tensors.items())


def test_what_is_done_to_a_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    Checkpoint.open(tmp_path).read(EMBEDDING).zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_the_trained_example_opens() -> None:
    checkpoint = Checkpoint.open(EXAMPLE)
    assert checkpoint.spec.canvas_length == 40
    assert checkpoint.generation.eos_token_ids == (1,)
    assert checkpoint.tokenizer_file == EXAMPLE / "tokenizer.json"
    assert checkpoint.generation_config_file == EXAMPLE / "generation_config.json"
    assert checkpoint.chat_template() == (EXAMPLE / "chat_template.jinja").read_text()
    assert not any(map(is_vision_tensor, checkpoint.tensors))


def test_a_checkpoint_saved_by_transformers_opens(tmp_path: Path) -> None:
    model = DiffusionGemmaForBlockDiffusion(transformers_config(tiny_config()))
    model.bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = Checkpoint.open(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(checkpoint.read(name), state[name]) for name in checkpoint.tensors)
    # transformers writes null for all that it has defaults for.
    assert checkpoint.generation == GenerationConfig(eos_token_ids=(1,), pad_token_id=0, bos_token_id=2)


def test_both_config_forms_open(tmp_path: Path) -> None:
    published = Checkpoint.open(random_checkpoint(tmp_path / "a", config_form="published"))
    saved = Checkpoint.open(random_checkpoint(tmp_path / "b", config_form="transformers", shards=2))
    assert "per_layer_config" in saved.config["text_config"]
    assert published.spec == saved.spec
    assert list(published.tensors) == list(saved.tensors)


def test_a_chat_template_in_the_tokenizer_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert Checkpoint.open(tmp_path).chat_template() is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    assert Checkpoint.open(tmp_path).chat_template() == "{{ x }}"
    (tmp_path / "chat_template.jinja").write_text("{{ y }}")
    assert Checkpoint.open(tmp_path).chat_template() == "{{ y }}"


def test_opening_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    code = (
        "import sys; from dgcompile.checkpoint import Checkpoint; "
        f"Checkpoint.open({str(tmp_path)!r}).fingerprint(); "
        "print(sorted({'torch', 'transformers', 'onnx', 'huggingface_hub'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# a tensor is missing, too much, misshapen, cut off; a shard is absent (case 9) ---------------------------------------


@pytest.mark.parametrize("shards", [None, 2])
def test_a_missing_tensor(tmp_path: Path, shards: int | None) -> None:
    tensors = tiny_tensors()
    del tensors[EXPERTS]
    write_checkpoint(tmp_path, tensors, shards=split(list(tensors), shards) if shards else None)
    file = "model.safetensors.index.json" if shards else "model.safetensors"
    assert refusal(tmp_path).startswith(f"{EXPERTS} missing from {tmp_path / file}")


def test_a_tensor_too_many(tmp_path: Path) -> None:
    extra = "model.decoder.layers.1.self_attn.v_proj.weight"
    tensors = {**tiny_tensors(), extra: torch.ones(6, 8)}
    write_checkpoint(tmp_path, tensors, shards=[list(tensors)[:9], list(tensors)[9:]])
    assert refusal(tmp_path).startswith(f"{extra} in {tmp_path / 'model-00002-of-00002.safetensors'}")


def test_a_wrong_shape(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**tiny_tensors(), EXPERTS: torch.ones(3, 5, 8)})
    message = refusal(tmp_path)
    assert message.startswith(f"{EXPERTS} in {tmp_path / 'model.safetensors'} has shape [3, 5, 8]")
    assert "[3, 8, 5]" in message


def test_a_dtype_that_is_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**tiny_tensors(), EXPERTS: torch.ones(3, 8, 5, dtype=torch.float8_e4m3fn)})
    assert refusal(tmp_path).startswith(f"{EXPERTS} in {tmp_path / 'model.safetensors'} is stored as F8_E4M3")


@pytest.mark.parametrize("left", [0.1, 0.5, 0.999])
def test_a_truncated_shard(tmp_path: Path, left: float) -> None:
    tensors = tiny_tensors()
    write_checkpoint(tmp_path, tensors, shards=split(list(tensors), 2))
    shard = tmp_path / "model-00002-of-00002.safetensors"
    length = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    size = shard.stat().st_size
    os.truncate(shard, length + int((size - length) * left))
    message = refusal(tmp_path)
    assert "truncated" in message
    tensor = message.split(" in ")[0]
    assert tensor in tensors
    assert str(shard) in message


def test_a_shard_that_the_index_names_but_that_is_absent(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_checkpoint(tmp_path, tensors, shards=[[EXPERTS], [name for name in tensors if name != EXPERTS]])
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.unlink()
    message = refusal(tmp_path)
    assert message.startswith(f"{shard} is missing")
    assert EXPERTS in message


def test_an_index_that_does_not_match_its_shards(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    index = write_checkpoint(tmp_path, tensors, shards=split(list(tensors), 2)) / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]

    def written(changed: dict[str, str]) -> str:
        index.write_text(json.dumps({"weight_map": changed}))
        return refusal(tmp_path)

    unlisted = written({name: file for name, file in weight_map.items() if name != EXPERTS})
    assert unlisted.startswith(f"{EXPERTS} in {tmp_path / weight_map[EXPERTS]}".replace(" in ", " is in "))
    promised = written({**weight_map, "model.other": weight_map[EXPERTS]})
    assert promised.startswith(f"model.other missing from {tmp_path / weight_map[EXPERTS]}")
    swapped = dict.fromkeys(weight_map, weight_map[EXPERTS])
    assert "says it lies in" in written({**swapped, EMBEDDING: weight_map[EMBEDDING]})


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        "a\\b.safetensors",
        "model.bin",
        "",
        7,
        None,
        "a" * 5000 + ".safetensors",
    ],
)
def test_shard_names_with_more_than_a_name_in_them(tmp_path: Path, shard: Any) -> None:
    write_checkpoint(tmp_path / "in", shards=[list(tiny_tensors())])
    save_file(tiny_tensors(), tmp_path / "model.safetensors")
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EXPERTS: shard}}))
    message = refusal(tmp_path / "in")
    assert message.startswith(f"{index}: {EXPERTS} is said to lie in {shard!r}")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    assert refusal(tmp_path).startswith(f"{tmp_path / name}: weights in a pickle are not read")


def test_no_weights_no_config_no_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path / 'config.json'} is missing"
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert refusal(tmp_path).startswith(f"{tmp_path} has no weights")
    assert refusal(tmp_path / "config.json").startswith(f"{tmp_path / 'config.json'} is a file")
    assert refusal("./nowhere/at/all").startswith("no such folder: nowhere/at/all")
    assert refusal("a" * 5000).startswith("a" * 5000 + " cannot be opened")


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        assert "not a regular file" in refusal(tmp_path)
        (tmp_path / name).unlink()
        write_checkpoint(tmp_path)


# other models, quantized ones (case 10) -------------------------------------------------------------------------------


def test_a_config_of_another_model_type(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config={**tiny_config(), "model_type": "gemma4"})
    assert refusal(tmp_path).startswith(f"{tmp_path / 'config.json'}: model_type is 'gemma4'")


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "no-such-scheme"}, "no-such-scheme"),
        ({"quant_algo": "NVFP4"}, "NVFP4"),
        ({}, "unnamed scheme"),
    ],
)
@pytest.mark.parametrize("where", ["top", "text_config", "hf_quant_config.json"])
def test_quantized_checkpoints(tmp_path: Path, quantization: dict[str, Any], scheme: str, where: str) -> None:
    config = tiny_config()
    if where == "top":
        config["quantization_config"] = quantization
    elif where == "text_config":
        config["text_config"]["quantization_config"] = quantization
    else:
        (tmp_path / where).write_text(json.dumps({"quantization": quantization}))
    write_checkpoint(tmp_path, config=config)
    file = where if where.endswith(".json") else "config.json"
    assert refusal(tmp_path).startswith(f"{tmp_path / file}: the checkpoint is quantized ({scheme!r})")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', '{"a": ' + "9" * 5000 + "}"])
def test_config_files_that_are_no_config(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in refusal(tmp_path)


def test_token_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 24]}))
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / 'generation_config.json'}: eos_token_id 24 is not in the vocabulary")


# tied tensors (case 11) -----------------------------------------------------------------------------------------------


def stored_twice() -> dict[str, torch.Tensor]:
    """Every shared tensor under each of its names, as a careless save writes them."""
    tensors = tiny_tensors()
    copies = {"lm_head.weight": tensors[EMBEDDING].clone()}
    for name, values in tensors.items():
        encoder = name.replace("model.decoder.", "model.encoder.language_model.")
        if canonical_name(encoder) == name != encoder:
            copies[encoder] = values.clone()
    return {**tensors, **copies}


def test_equal_copies_are_accepted_and_count_once(tmp_path: Path) -> None:
    stored = stored_twice()
    assert len(stored) > 1.8 * TENSORS_PER_CHECKPOINT
    twice = Checkpoint.open(write_checkpoint(tmp_path / "twice", stored, shards=split(list(stored), 2)))
    once = Checkpoint.open(write_checkpoint(tmp_path / "once"))
    assert list(twice.tensors) == list(once.tensors)
    assert twice.fingerprint() == once.fingerprint()


def test_only_the_encoders_copies_are_enough(tmp_path: Path) -> None:
    stored = {name: values for name, values in stored_twice().items() if name not in tiny_tensors()}
    own = {name: values for name, values in tiny_tensors().items() if "self_cond" in name or "layer_scalar" in name}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, {**stored, **own}))
    assert list(checkpoint.tensors) == list(tiny_tensors())
    assert torch.equal(checkpoint.read(EXPERTS), tiny_tensors()[EXPERTS])


@pytest.mark.parametrize(
    ("copy", "original"),
    [
        ("lm_head.weight", EMBEDDING),
        ("model.encoder.language_model.layers.1.experts.down_proj", EXPERTS),
        ("model.encoder.language_model.norm.weight", "model.decoder.norm.weight"),
    ],
)
def test_different_copies_are_refused_by_name(tmp_path: Path, copy: str, original: str) -> None:
    stored = stored_twice()
    stored[copy].view(-1)[-1] += 1
    rest = [name for name in stored if name != copy]
    write_checkpoint(tmp_path, stored, shards=[[copy], rest])
    first, second = (tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert refusal(tmp_path).startswith(f"{copy} in {first} differs from {original} in {second}")


def test_copies_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    stored = tiny_tensors()
    stored["lm_head.weight"] = stored[EMBEDDING].float()
    write_checkpoint(tmp_path, stored)
    assert refusal(tmp_path).startswith("lm_head.weight in ")


def test_layer_scalars_are_not_shared() -> None:
    encoder, decoder = "model.encoder.language_model.layers.0.layer_scalar", "model.decoder.layers.0.layer_scalar"
    assert canonical_name(encoder) == encoder
    assert canonical_name(decoder) == decoder


def test_names_are_tied_as_transformers_ties_them() -> None:
    model = DiffusionGemmaForBlockDiffusion(transformers_config(tiny_config()))
    storages: dict[str, set[int]] = {}
    for name, tensor in model.state_dict().items():
        storages.setdefault(canonical_name(name), set()).add(tensor.data_ptr())
    # One name, one storage; and no two names for the same one.
    assert all(len(pointers) == 1 for pointers in storages.values())
    assert len({pointer for (pointer,) in storages.values()}) == len(storages)


segments = st.sampled_from(
    ["model", "encoder", "decoder", "language_model", "layers", "7", "layer_scalar", "norm", "weight", "embed_tokens"]
)


@given(st.one_of(st.text(), st.lists(segments, max_size=7).map(".".join)))
def test_canonical_names_are_canonical(name: str) -> None:
    assert canonical_name(canonical_name(name)) == canonical_name(name)


# the hub --------------------------------------------------------------------------------------------------------------


def hub_cache(root: Path) -> dict[str, str]:
    """A hub cache that holds org/model: its files are symlinks to blobs. Returns the environment that uses it."""
    repo = root / "hub" / "models--org--model"
    blobs, snapshot = repo / "blobs", repo / "snapshots" / ("a" * 40)
    write_checkpoint(blobs, shards=split(list(tiny_tensors()), 2))
    snapshot.mkdir(parents=True)
    for number, blob in enumerate(sorted(blobs.iterdir())):
        target = blob.rename(blobs / f"{number:064x}")
        (snapshot / blob.name).symlink_to(Path("../../blobs") / target.name)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    return {**os.environ, "HF_HOME": str(root), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize(
    ("source", "answer"), [("org/model", "opened 51"), ("org/other", "CheckpointError: org/other is no folder and")]
)
def test_hub_ids(tmp_path: Path, source: str, answer: str) -> None:
    code = (
        "from dgcompile.checkpoint import Checkpoint\n"
        f"try: print('opened', len(Checkpoint.open({source!r}).tensors))\n"
        "except Exception as error: print(f'{type(error).__name__}: {error}')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=hub_cache(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith(answer), run.stdout
    assert run.stdout.count("\n") == 1


# the fingerprint ------------------------------------------------------------------------------------------------------


class Reading(Progress):
    """Counts how often weights were really read."""

    def __init__(self) -> None:
        self.count = 0

    def task(self, label: str, total: float | None = None, unit: str = "") -> Any:
        self.count += 1
        return super().task(label, total, unit)


def fingerprint(folder: Path) -> str:
    return Checkpoint.open(folder).fingerprint()


@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_the_fingerprint_does_not_depend_on_the_shards(
    tmp_path_factory: pytest.TempPathFactory, random: Any, shards: int
) -> None:
    folder = tmp_path_factory.mktemp("split")
    names = list(tiny_tensors())
    random.shuffle(names)
    write_checkpoint(folder / "split", shards=split(names, shards))
    write_checkpoint(folder / "single")
    assert fingerprint(folder / "split") == fingerprint(folder / "single")


def test_the_fingerprint_tells_checkpoints_apart(tmp_path: Path) -> None:
    flipped = tiny_tensors()
    flipped[EXPERTS].view(torch.int16).view(-1)[7] ^= 1
    exchanged = tiny_tensors()
    a, b = "model.decoder.layers.0.input_layernorm.weight", "model.decoder.layers.1.input_layernorm.weight"
    exchanged[a], exchanged[b] = exchanged[b], exchanged[a]
    prints = {
        fingerprint(write_checkpoint(tmp_path / "0")),
        fingerprint(write_checkpoint(tmp_path / "1", flipped)),
        fingerprint(write_checkpoint(tmp_path / "2", exchanged)),
        fingerprint(write_checkpoint(tmp_path / "3", tiny_tensors(torch.float16))),
        fingerprint(write_checkpoint(tmp_path / "4", config=tiny_config(final_logit_softcapping=20.0))),
    }
    assert len(prints) == 5


def test_vision_tensors_and_times_do_not_count(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain")
    vision = {"model.encoder.vision_tower.x": torch.ones(3), "model.encoder.embed_vision.y": torch.ones(2)}
    seeing = write_checkpoint(tmp_path / "seeing", {**tiny_tensors(), **vision})
    os.utime(seeing / "model.safetensors", (1, 1))
    assert fingerprint(plain) == fingerprint(seeing)


def test_a_settled_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_hashes, "_SETTLED_NS", -(10**18))
    write_checkpoint(tmp_path)
    reading = Reading()
    first = Checkpoint.open(tmp_path).fingerprint(reading)
    assert Checkpoint.open(tmp_path).fingerprint(reading) == first
    assert reading.count == 1

    # Another content of the same size and modification time, in the same inode.
    file = tmp_path / "model.safetensors"
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert Checkpoint.open(tmp_path).fingerprint(reading) != first
    assert reading.count == 2


def test_a_file_that_may_still_change_is_hashed_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    reading = Reading()
    for _ in range(2):
        Checkpoint.open(tmp_path).fingerprint(reading)
    assert reading.count == 2


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b'{"0+1": 7}'])
def test_a_damaged_or_unwritable_cache_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    monkeypatch.setattr(content_hashes, "_SETTLED_NS", -(10**18))
    folder = write_checkpoint(tmp_path / "checkpoint")
    first = fingerprint(folder)
    for file in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.json"):
        file.write_bytes(damage)
    assert fingerprint(folder) == first
    (tmp_path / "blocked").write_text("a file where the cache folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    assert fingerprint(folder) == first


# anything at all ------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    file=st.sampled_from(["config.json", "generation_config.json", "model.safetensors.index.json", "1", "2"]),
    place=st.floats(0, 1, exclude_max=True),
    length=st.integers(0, 12),
    new=st.one_of(
        st.binary(max_size=12),
        st.sampled_from([b"null", b"-1", b"1e999", b"NaN", b"{}", b"[]", b'"', b"9" * 5000, b"[" * 3000, b"\\ud800"]),
    ),
)
def test_damaged_files_open_or_are_refused_but_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, file: str, place: float, length: int, new: bytes
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write_checkpoint(folder, shards=split(list(tiny_tensors()), 2))
    (folder / "generation_config.json").write_text(json.dumps(GenerationConfig(eos_token_ids=(1,)).to_values()))
    target = folder / (f"model-0000{file}-of-00002.safetensors" if file in "12" else file)
    data = target.read_bytes()
    # Of a shard, only the header: its tensors may be anything.
    end = 8 + int.from_bytes(data[:8], "little") if file in "12" else len(data)
    start = int(place * end)
    target.write_bytes(data[:start] + new + data[start + length :])
    try:
        Checkpoint.open(folder)
    except CheckpointError as error:
        assert str(error).isprintable()
