"""Published quantized checkpoints: every layout reads as its publisher means it, and nothing else is taken for one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dgcompile.checkpoint import Checkpoint, is_vision_tensor
from dgcompile.errors import CheckpointError, InputError, RecipeError
from dgcompile.plugins.moe.formats import fp8_decode
from dgcompile.quantize import calibration
from dgcompile.quantize.calibration import calibrate
from dgcompile.quantize.convert import convert_weights
from dgcompile.recipe import Recipe
from tests.models import random_checkpoint
from tests.published_checkpoints import (
    COMPRESSED_TENSORS,
    LAYOUTS,
    MODELOPT,
    Tensors,
    compressed_tensors,
    dequantized,
    modelopt_tensors,
    write_layout,
    write_published,
)
from tests.tiny_checkpoint import split, tiny_tensors

EXAMPLE = Path(__file__).parent.parent / "examples" / "sudoku"
QUERY = "model.decoder.layers.0.self_attn.q_proj"
EXPERT = "model.decoder.layers.1.experts.2.up_proj"
EXPORT = """
import copy, sys
import torch
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import save_file
from transformers import DiffusionGemmaForBlockDiffusion

source, folder, fake = sys.argv[1:]
model = DiffusionGemmaForBlockDiffusion.from_pretrained(
    source, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
).eval()
config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
config["quant_cfg"] = [*config["quant_cfg"], *copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])]
torch.manual_seed(0)
mtq.quantize(model, config, lambda model: model.generate(torch.arange(3, 40)[None]))
seen = {}
for name, module in model.model.decoder.named_modules():
    if getattr(getattr(module, "input_quantizer", None), "is_enabled", False):
        seen[f"{name}.weight"] = module.weight_quantizer(module.weight.detach().float())
        # Encoder and decoder share the weight; the export gives it the larger of their two ranges.
        other = dict(model.model.encoder.language_model.named_modules()).get(name, module)
        seen[f"{name}.amax"] = torch.maximum(module.input_quantizer.amax, other.input_quantizer.amax).float()
    if hasattr(module, "gate_up_proj_weight_quantizers"):
        for weight in ("gate_up_proj", "down_proj"):
            pairs = zip(getattr(module, f"{weight}_weight_quantizers"), getattr(module, weight).detach().float())
            seen[f"{name}.{weight}"] = torch.stack([quantizer(values) for quantizer, values in pairs])
save_file(seen, fake)
export_hf_checkpoint(model, export_dir=folder)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(folder)
    return str(raised.value)


# what is read ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_reads_as_its_publisher_means_it(tmp_path: Path, layout: str, shards: int | None) -> None:
    names = list(LAYOUTS[layout][0](tiny_tensors()))
    stored = write_layout(tmp_path, layout, shards=split(names, shards) if shards else None)
    checkpoint = Checkpoint.open(tmp_path)
    shapes = checkpoint.spec.expected_tensors()
    assert {**checkpoint.tensors, **checkpoint.quantized}.keys() == shapes.keys()
    assert list(checkpoint.tensors) == [name for name in shapes if name in checkpoint.tensors]
    assert list(checkpoint.quantized) == [name for name in shapes if name in checkpoint.quantized]
    for name, values in dequantized(stored, shapes).items():
        read = checkpoint.read(name)
        assert tuple(read.shape) == shapes[name]
        np.testing.assert_allclose(read.double().numpy(), values, rtol=1e-6, err_msg=name)
    # Two layers of 4 or 3 attention and 3 MLP weights and 2 of experts; self-conditioning where it is quantized.
    assert len(checkpoint.quantized) == 7 + 6 + 4 + (0 if layout == "compressed-tensors" else 3)
    assert checkpoint.stored.keys() == stored.keys()


def test_static_scales_of_activations_become_ranges(tmp_path: Path) -> None:
    stored = write_layout(tmp_path / "modelopt", "modelopt")
    quantized = Checkpoint.open(tmp_path / "modelopt").quantized
    assert quantized[f"{QUERY}.weight"].input_amax == float(stored[f"{QUERY}.input_scale"]) * 448
    write_layout(tmp_path / "dynamic", "compressed-tensors")
    assert {weight.input_amax for weight in Checkpoint.open(tmp_path / "dynamic").quantized.values()} == {None}


def test_what_modelopt_itself_exports(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    fake = tmp_path / "fake.safetensors"
    arguments = [sys.executable, "-c", EXPORT, str(EXAMPLE), str(folder), str(fake)]
    run = subprocess.run(arguments, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    header = set(load_file(folder / "model.safetensors"))
    assert any(name.endswith("k_proj.k_scale") for name in header), "its KV cache is quantized too"

    checkpoint = Checkpoint.open(folder)
    assert checkpoint.quantization == "modelopt FP8"
    seen = {f"model.decoder.{name}": values for name, values in load_file(fake).items()}
    weights = {name: values for name, values in seen.items() if not name.endswith(".amax")}
    assert weights.keys() == checkpoint.quantized.keys()
    original = Checkpoint.open(EXAMPLE)
    for name, values in weights.items():
        read, plain = checkpoint.read(name), original.read(name).float()
        # The export divides by the scale in bfloat16, so some codes are neighbours of those that modelopt simulated.
        assert float(((read - values).abs() <= 0.004 * values.abs()).float().mean()) > 0.9, name
        assert 0.02 < float((values - plain).norm() / plain.norm()) < 0.03, name
        assert float((read - plain).norm()) < 1.03 * float((values - plain).norm()), name
        if ".experts." not in name:
            amax = float(seen[name.removesuffix("weight") + "amax"])
            assert checkpoint.quantized[name].input_amax == pytest.approx(amax, rel=1e-6)


def test_the_reference_gets_the_dequantized_weights(tmp_path: Path) -> None:
    # transformers by itself would fill the experts with random numbers, and say so in a log only.
    from dgcompile.verify.reference import Reference

    plain = random_checkpoint(tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    vision = {name: values for name, values in tensors.items() if is_vision_tensor(name)}
    text = {name: values for name, values in tensors.items() if name not in vision}
    stored = {**compressed_tensors(text), **vision}
    config = json.loads((plain / "config.json").read_text())
    write_published(tmp_path / "published", stored, COMPRESSED_TENSORS, config=config)

    state = Reference(tmp_path / "published").model.state_dict()
    expected = dequantized(stored, Checkpoint.open(plain).spec.expected_tensors())
    for name, values in expected.items():
        np.testing.assert_allclose(state[name].double().numpy(), values, rtol=1e-6, err_msg=name)
        shared = name.replace("model.decoder.layers", "model.encoder.language_model.layers")
        if not name.endswith("layer_scalar") and shared != name:
            assert state[shared].data_ptr() == state[name].data_ptr()


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_either_file_tells_of_modelopt(tmp_path: Path, where: str) -> None:
    write_published(tmp_path, modelopt_tensors(tiny_tensors()), MODELOPT, where=where)
    assert Checkpoint.open(tmp_path).quantization == "modelopt FP8"


def test_the_encoders_names_are_the_decoders(tmp_path: Path) -> None:
    stored = modelopt_tensors(tiny_tensors())
    renamed = {
        name.replace("model.decoder.layers", "model.encoder.language_model.layers")
        if not name.endswith("layer_scalar")
        else name: values.clone()
        for name, values in stored.items()
    }
    write_published(tmp_path / "a", stored, MODELOPT)
    write_published(tmp_path / "b", renamed, MODELOPT)
    write_published(tmp_path / "both", {**stored, **renamed}, MODELOPT)
    prints = {Checkpoint.open(tmp_path / each).fingerprint() for each in ("a", "b", "both")}
    assert len(prints) == 1

    copy = "model.encoder.language_model.layers.0.mlp.up_proj.weight_scale"
    renamed[copy] = renamed[copy] * 2
    write_published(tmp_path / "differs", {**renamed, **stored}, MODELOPT)
    assert refusal(tmp_path / "differs").startswith(
        f"{copy} in {tmp_path / 'differs' / 'model.safetensors'} differs from"
    )


def test_scales_of_a_quantized_cache_are_passed_over(tmp_path: Path) -> None:
    stored = modelopt_tensors(tiny_tensors())
    write_published(tmp_path / "without", stored, MODELOPT)
    for mode, scale in (("model.decoder", 1.0), ("model.encoder.language_model", 2.0)):
        for name in ("k_proj.k_scale", "v_proj.v_scale", "k_scale", "v_scale"):
            stored[f"{mode}.layers.0.self_attn.{name}"] = torch.tensor(scale)
    write_published(tmp_path / "with", stored, MODELOPT)
    assert Checkpoint.open(tmp_path / "with").fingerprint() == Checkpoint.open(tmp_path / "without").fingerprint()


def test_experts_that_were_left_out_are_plain(tmp_path: Path) -> None:
    # llm-compressor passes over stacked tensors without a word.
    plain = tiny_tensors()
    stored = {name: values for name, values in compressed_tensors(plain).items() if ".experts." not in name}
    stored |= {name: values for name, values in plain.items() if ".experts." in name}
    write_published(tmp_path, stored, COMPRESSED_TENSORS)
    checkpoint = Checkpoint.open(tmp_path)
    assert not any(".experts." in name for name in checkpoint.quantized)
    name = "model.decoder.layers.1.experts.down_proj"
    assert torch.equal(checkpoint.read(name), plain[name])


def test_the_fingerprint_covers_codes_and_scales(tmp_path: Path) -> None:
    stored = modelopt_tensors(tiny_tensors())
    write_published(tmp_path / "a", stored, MODELOPT)
    write_published(tmp_path / "b", stored, MODELOPT, shards=split(list(stored), 4))
    prints = [Checkpoint.open(tmp_path / each).fingerprint() for each in ("a", "b")]
    assert prints[0] == prints[1]
    for number, suffix in enumerate(("weight", "weight_scale", "input_scale")):
        name = f"{EXPERT}.{suffix}"
        changed = {**stored, name: (stored[name].float() * 2).to(stored[name].dtype)}
        write_published(tmp_path / str(number), changed, MODELOPT)
        prints.append(Checkpoint.open(tmp_path / str(number)).fingerprint())
    assert len(set(prints)) == 4


def test_opening_imports_no_torch(tmp_path: Path) -> None:
    write_layout(tmp_path, "compressed-tensors")
    code = (
        "import sys; from dgcompile.checkpoint import Checkpoint; "
        f"Checkpoint.open({str(tmp_path)!r}).fingerprint(); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# into a bundle's store ------------------------------------------------------------------------------------------------


def recipe(weights: str, dtype: str = "float32", **classes: Any) -> Recipe:
    """Every linear layer and the experts as ``weights``, all else in bfloat16."""
    linear = ("experts", "attention", "dense_mlp", "self_conditioning")
    formats = {**dict.fromkeys(linear, weights), **dict.fromkeys(("embedding", "router", "norms"), "bf16"), **classes}
    return Recipe.model_validate({"name": "test", "title": "test", "activation_dtype": dtype, "weights": formats})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_weights_are_taken_as_they_are(tmp_path: Path, layout: str) -> None:
    stored = write_layout(tmp_path / "checkpoint", layout)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    convert_weights(checkpoint, recipe("fp8"), tmp_path)
    store = load_file(tmp_path / "weights.safetensors")
    expected = dequantized(stored, checkpoint.spec.expected_tensors())
    for name, weight in checkpoint.quantized.items():
        if name.endswith("router.proj.weight"):
            continue
        codes = torch.cat([stored[f"{part.name}.weight"].view(torch.uint8) for part in weight.parts])
        assert torch.equal(store[name].view(torch.uint8).view(codes.shape), codes), name
        assert store[name].dtype == torch.float8_e4m3fn
        scale = store[f"{name}_scale"]
        assert scale.dtype == torch.float32 and tuple(scale.shape) == weight.shape[:-1]
        values = fp8_decode(store[name].view(torch.uint8).numpy()) * scale.double().numpy()[..., None]
        np.testing.assert_allclose(values, expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_floating_point_recipes_get_codes_times_scale(tmp_path: Path, layout: str) -> None:
    stored = write_layout(tmp_path / "checkpoint", layout)
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    mixed = recipe("fp32", experts="bf16")
    convert_weights(checkpoint, mixed, tmp_path)
    store = load_file(tmp_path / "weights.safetensors")
    for name, values in dequantized(stored, checkpoint.spec.expected_tensors()).items():
        exact = store[name].dtype == torch.float32
        np.testing.assert_allclose(store[name].double().numpy(), values, rtol=1e-6 if exact else 2**-8, err_msg=name)


def test_published_scales_are_exact_where_activations_are_bfloat16_too(tmp_path: Path) -> None:
    stored = write_layout(tmp_path / "checkpoint", "modelopt")
    convert_weights(Checkpoint.open(tmp_path / "checkpoint"), recipe("fp8", "bfloat16"), tmp_path)
    store = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(store[f"{QUERY}.weight_scale"], stored[f"{QUERY}.weight_scale"].expand(16))
    experts = store["model.decoder.layers.1.experts.down_proj_scale"]
    assert torch.equal(experts[2], stored["model.decoder.layers.1.experts.2.down_proj.weight_scale"].expand(8))


def test_a_second_rounding_is_refused_before_any_work(tmp_path: Path) -> None:
    write_layout(tmp_path / "checkpoint", "compressed-tensors")
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    int4 = {"format": "int4", "group_size": 32}
    with pytest.raises(RecipeError, match=r"stores experts as int4, and .+ has them in FP8 already .+ rounded twice"):
        convert_weights(checkpoint, recipe("fp8", experts=int4), tmp_path)
    assert not (tmp_path / "weights.safetensors.partial").exists()


def test_codes_that_are_no_numbers(tmp_path: Path) -> None:
    stored = modelopt_tensors(tiny_tensors())
    stored[f"{EXPERT}.weight"].view(torch.uint8)[3, 2] = 0x7F
    write_published(tmp_path / "checkpoint", stored, MODELOPT)
    with pytest.raises(CheckpointError, match=f"{EXPERT}.weight in .+ holds NaN"):
        convert_weights(Checkpoint.open(tmp_path / "checkpoint"), recipe("fp8"), tmp_path)


def test_ranges_that_the_checkpoint_has_are_not_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = write_layout(tmp_path, "modelopt")
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr(calibration, "_worker_command", lambda: [sys.executable, "-c", "raise SystemExit(7)"])
    names = [f"{QUERY}.weight", "model.decoder.self_conditioning.up_proj.weight"]
    result = calibrate(checkpoint, names, None)
    assert result.report.prompts == 0
    for name in names:
        scale = stored[name.removesuffix("weight") + "input_scale"]
        assert result.input_amax[name] == float(scale) * 448
        # What the store makes of it is the number that was published.
        assert torch.tensor(result.input_amax[name] / 448, dtype=torch.float32) == scale


def test_ranges_that_it_lacks_need_prompts(tmp_path: Path) -> None:
    write_layout(tmp_path, "compressed-tensors")
    with pytest.raises(InputError, match="no prompts"):
        calibrate(Checkpoint.open(tmp_path), [f"{QUERY}.weight"], None)


# other schemes --------------------------------------------------------------------------------------------------------


def changed(path: str, value: Any) -> dict[str, Any]:
    """The config of compressed-tensors with one key changed; ``path`` leads there."""
    values: dict[str, Any] = json.loads(json.dumps(COMPRESSED_TENSORS))
    place = values
    *outer, last = path.split("/")
    for key in outer:
        place = place[key]
    place[last] = value
    return values


GROUP = "config_groups/group_0"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantized ('NVFP4'), which is not read"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized ('MIXED_PRECISION')"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ"}}, "quantized ('W4A8_AWQ')"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quantized ('fp8')"),
        ({"quant_method": "bitsandbytes"}, "quantized ('bitsandbytes')"),
        ([], "quantized ('unnamed scheme')"),
        (changed("format", "nvfp4-pack-quantized"), "quantized ('nvfp4-pack-quantized')"),
        (changed("format", "int-quantized"), "quantized ('int-quantized')"),
        (changed("format", "\x1b[31m"), r"quantized ('\x1b[31m')"),
        (changed("config_groups", {}), "without config_groups"),
        (changed(GROUP, None), "whose config_groups.group_0.weights are None"),
        (changed(f"{GROUP}/weights/num_bits", 4), "weights are num_bits=4, type='float'"),
        (changed(f"{GROUP}/weights/type", "int"), "weights are num_bits=8, type='int'"),
        (changed(f"{GROUP}/weights/strategy", "block"), "strategy='block'"),
        (changed(f"{GROUP}/weights/symmetric", False), "symmetric=False"),
        (changed(f"{GROUP}/weights/dynamic", True), "dynamic=True"),
        (changed(f"{GROUP}/input_activations/num_bits", 4), "input_activations are num_bits=4"),
        (changed(f"{GROUP}/input_activations/dynamic", False), "input_activations are num_bits=8"),
        (changed(f"{GROUP}/input_activations", 3), "input_activations are 3"),
        (changed(f"{GROUP}/output_activations", {"num_bits": 8}), "with config_groups.group_0.output_activations"),
        (changed(f"{GROUP}/format", "mxfp8-quantized"), "quantized ('mxfp8-quantized')"),
        (changed("transform_config", {"config_groups": {"a": {}}}), "with transform_config"),
        (changed("sparsity_config", {"format": "sparse-24-bitmask"}), "with sparsity_config"),
    ],
)
def test_other_schemes_are_refused_by_name(tmp_path: Path, quantization: dict[str, Any], message: str) -> None:
    folder = write_published(tmp_path, compressed_tensors(tiny_tensors()), {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    told = refusal(folder)
    assert told.startswith(f"{folder / 'config.json'}: the checkpoint is quantized (")
    assert message in told and "expected FP8 of nvidia-modelopt" in told


def test_two_files_that_disagree(tmp_path: Path) -> None:
    write_published(tmp_path, modelopt_tensors(tiny_tensors()), MODELOPT)
    other = {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(other))
    assert "is said to be quantized by modelopt FP8 and by modelopt FP8_PER_CHANNEL_PER_TOKEN" in refusal(tmp_path)


def test_quantized_tensors_without_a_scheme(tmp_path: Path) -> None:
    write_published(tmp_path, {**tiny_tensors(), f"{QUERY}.weight": torch.zeros(16, 8).to(torch.float8_e4m3fn)}, {})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"{QUERY}.weight in {tmp_path / 'model.safetensors'} is stored as F8_E4M3" in refusal(tmp_path)


# damaged ones ---------------------------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Tensors], None]:
    def damage(stored: Tensors) -> None:
        for name in names:
            del stored[name]

    return damage


def with_(name: str, values: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda stored: stored.update({name: values})


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (without(f"{QUERY}.weight_scale"), f"{QUERY}.weight_scale", "missing from FILE"),
        (without(f"{QUERY}.weight"), f"{QUERY}.weight", "missing from FILE"),
        (without(f"{EXPERT}.weight_scale"), f"{EXPERT}.weight_scale", "missing from FILE"),
        (
            without(f"{EXPERT}.weight", f"{EXPERT}.weight_scale", f"{EXPERT}.input_scale"),
            f"{EXPERT}.weight",
            "missing from FILE",
        ),
        (with_(f"{QUERY}.weight_scale", torch.ones(3)), f"{QUERY}.weight_scale", "has shape [3]"),
        (with_(f"{QUERY}.weight_scale", torch.ones(1, 16)), f"{QUERY}.weight_scale", "has shape [1, 16]"),
        (with_(f"{QUERY}.input_scale", torch.ones(16)), f"{QUERY}.input_scale", "has shape [16]"),
        (with_(f"{QUERY}.weight_scale", torch.tensor(1)), f"{QUERY}.weight_scale", "is stored as I64"),
        (with_(f"{QUERY}.weight_scale", torch.tensor(0.0)), f"{QUERY}.weight_scale", "holds the scale 0;"),
        (with_(f"{QUERY}.weight_scale", torch.tensor(-2.0)), f"{QUERY}.weight_scale", "holds the scale -2;"),
        (with_(f"{EXPERT}.weight_scale", torch.tensor(torch.inf)), f"{EXPERT}.weight_scale", "holds the scale inf;"),
        (with_(f"{EXPERT}.input_scale", torch.tensor(torch.nan)), f"{EXPERT}.input_scale", "holds the scale nan;"),
        (
            with_(f"{QUERY}.weight_scale", torch.tensor([1.0] * 15 + [torch.inf], dtype=torch.bfloat16)),
            f"{QUERY}.weight_scale",
            "holds the scale inf;",
        ),
        (
            with_(f"{QUERY}.weight", torch.zeros(8, 16).to(torch.float8_e4m3fn)),
            f"{QUERY}.weight",
            "has shape [8, 16]; expected [16, 8]",
        ),
        (
            with_(f"{EXPERT}.weight", torch.zeros(10, 8).to(torch.float8_e4m3fn)),
            f"{EXPERT}.weight",
            "has shape [10, 8]; expected [5, 8]",
        ),
        (with_(f"{QUERY}.weight", torch.zeros(16, 8)), f"{QUERY}.weight", "is stored as F32 beside a scale"),
        (
            with_(f"{QUERY}.weight", torch.zeros(16, 8).to(torch.float8_e5m2)),
            f"{QUERY}.weight",
            "is stored as F8_E5M2 beside a scale",
        ),
        (
            with_("model.decoder.layers.1.experts.3.up_proj.weight", torch.zeros(5, 8).to(torch.float8_e4m3fn)),
            "model.decoder.layers.1.experts.3.up_proj.weight",
            "has no such tensor",
        ),
        (
            with_("model.decoder.layers.2.mlp.up_proj.weight_scale", torch.tensor(1.0)),
            "model.decoder.layers.2.mlp.up_proj.weight_scale",
            "has no such tensor",
        ),
        (
            with_(f"{QUERY}.weight_zero_point", torch.zeros(16)),
            f"{QUERY}.weight_zero_point",
            "has no such tensor",
        ),
        (
            with_("model.decoder.layers.1.experts.down_proj", torch.zeros(3, 8, 5)),
            "model.decoder.layers.1.experts.down_proj",
            "is stored a second time, expert by expert",
        ),
        (
            with_("model.decoder.norm.weight", torch.zeros(8).to(torch.float8_e4m3fn)),
            "model.decoder.norm.weight",
            "is stored as F8_E4M3",
        ),
    ],
)
def test_damage_is_named_by_tensor_and_file(
    tmp_path: Path, damage: Callable[[Tensors], None], name: str, message: str
) -> None:
    stored = modelopt_tensors(tiny_tensors())
    damage(stored)
    write_published(tmp_path, stored, MODELOPT)
    told = refusal(tmp_path)
    file = str(tmp_path / "model.safetensors")
    assert told.startswith(name) and file in told
    assert message.replace("FILE", file) in told
