"""The committed checkpoint: its files, its structure, and that the trained model still solves puzzles."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from example import checkpoint, network, prompts, sudoku, training
from example.evaluation import Puzzle, evaluate, expert_shares, load_puzzles, table, transformers_contender
from safetensors import safe_open
from transformers import AutoTokenizer, DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sudoku"


@pytest.fixture(scope="module")
def loaded() -> tuple[DiffusionGemmaForBlockDiffusion, dict[str, Any]]:
    return DiffusionGemmaForBlockDiffusion.from_pretrained(EXAMPLE, dtype=torch.float32, output_loading_info=True)


@pytest.fixture(scope="module")
def model(loaded: tuple[DiffusionGemmaForBlockDiffusion, dict[str, Any]]) -> DiffusionGemmaForBlockDiffusion:
    return loaded[0].eval()


def test_every_stored_tensor_is_used_and_none_is_missing(loaded: tuple[Any, dict[str, Any]]):
    info = loaded[1]
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_stored_keys_follow_the_published_layout():
    with safe_open(EXAMPLE / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        assert {file.get_slice(key).get_dtype() for key in keys} == {"BF16"}
    assert (EXAMPLE / "model.safetensors").stat().st_size <= 6_000_000
    encoder = {key for key in keys if key.startswith("model.encoder.language_model.")}
    assert encoder == {f"model.encoder.language_model.layers.{i}.layer_scalar" for i in range(4)}
    others = ("model.decoder.", "model.encoder.vision_tower.", "model.encoder.embed_vision.")
    assert all(key.startswith(others) for key in keys - encoder)
    assert {"model.decoder.embed_tokens.weight", "model.decoder.self_conditioning.pre_norm.weight"} <= keys
    decoder_values = [key for key in keys if key.startswith("model.decoder.") and key.endswith("v_proj.weight")]
    with_values = {int(key.split(".")[3]) for key in decoder_values}
    assert with_values == {0, 2}, "full-attention layers use the keys as values"


def test_weights_are_shared_between_modes_except_layer_scalars(model: DiffusionGemmaForBlockDiffusion):
    encoder, decoder = model.model.encoder.language_model, model.model.decoder
    assert model.lm_head.weight is decoder.embed_tokens.weight
    for theirs, ours in zip(encoder.layers, decoder.layers, strict=True):
        assert theirs.experts.down_proj is ours.experts.down_proj
        assert theirs.layer_scalar.item() != ours.layer_scalar.item()


def test_config_keeps_the_published_form_and_transformers_reads_it():
    written = json.loads((EXAMPLE / "config.json").read_text())
    assert written == checkpoint.CONFIG
    text = written["text_config"]
    assert (text["global_head_dim"], text["num_global_key_value_heads"], text["final_logit_softcapping"]) == (64, 1, 30)
    read = DiffusionGemmaConfig.from_pretrained(EXAMPLE)
    layers = [read.text_config.per_layer_config[i] for i in range(4)]
    assert [layer.head_dim for layer in layers] == [32, 64, 32, 64]
    assert [layer.num_key_value_heads for layer in layers] == [2, 1, 2, 1]
    assert read.text_config.final_logit_softcapping == 30.0
    assert read.canvas_length == 40
    by_layer = {"global_head_dim", "num_global_key_value_heads", "head_dim", "num_key_value_heads"}
    for name in set(text) - by_layer - {"dtype", "model_type"}:
        assert getattr(read.text_config, name) == text[name], name


def test_the_prompt_overflows_the_sliding_window():
    assert checkpoint.SLIDING_WINDOW < checkpoint.PROMPT_LENGTH


def test_generation_config_is_read_back(model: DiffusionGemmaForBlockDiffusion):
    config = model.generation_config
    assert (config.max_new_tokens, config.max_denoising_steps, config.t_min, config.t_max) == (40, 16, 0.4, 0.8)
    assert (config.sampler_config.entropy_bound, config.stability_threshold) == (0.1, 1)
    assert (config.confidence_threshold, config.eos_token_id, config.pad_token_id) == (0.005, [1], 0)


def test_training_forward_agrees_with_transformers(model: DiffusionGemmaForBlockDiffusion):
    net = network.TrainingNetwork(model)
    with torch.no_grad():
        for mode, layers in enumerate((model.model.encoder.language_model.layers, model.model.decoder.layers)):
            net.scalars[mode] = torch.cat([layer.layer_scalar for layer in layers])
    training.check_against_transformers(model, net)


def test_every_expert_works(model: DiffusionGemmaForBlockDiffusion):
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    puzzles = load_puzzles(EXAMPLE / "calibration.jsonl")[:16]
    rows = [
        tokenizer.apply_chat_template([{"role": "user", "content": puzzle.prompt}], return_dict=False)
        for puzzle in puzzles
    ]
    torch.manual_seed(0)
    shares = expert_shares(model, torch.tensor(rows))
    assert shares.min() >= 0.02, shares


def test_it_solves_easy_puzzles_and_one_step_is_worse():
    """Well below the figures in the example's README, so that 32 puzzles cannot fail by bad luck."""
    puzzles = load_puzzles(EXAMPLE / "prompts.jsonl", blanks=[10, 14], limit=32)
    scores = {(s.blanks, s.max_steps): s for s in evaluate(transformers_contender(EXAMPLE), puzzles, [1, 16])}
    assert scores[10, 16].exact_match >= 90
    assert scores[14, 16].exact_match >= 80
    assert scores[14, 1].exact_match <= scores[14, 16].exact_match - 15
    assert scores[10, 1].mean_steps == 1
    assert 2 <= scores[10, 16].mean_steps <= 8


def test_evaluate_counts_whole_grids_only():
    puzzles = [Puzzle("p0", "a", 8), Puzzle("p1", "b", 8), Puzzle("p2", "c", 10)]

    def contender(prompts: Any, limit: int, seeds: Any) -> tuple[list[str], list[int]]:
        assert len(prompts) == len(seeds)
        return ["a" for _ in prompts], [limit for _ in prompts]

    scores = evaluate(contender, puzzles, [1, 4])
    assert [(s.blanks, s.max_steps, s.exact_match, s.mean_steps) for s in scores] == [
        (8, 1, 50.0, 1.0),
        (8, 4, 50.0, 4.0),
        (10, 1, 0.0, 1.0),
        (10, 4, 0.0, 4.0),
    ]
    assert table(scores).splitlines()[2] == "| 8 | 50.0 | 50.0 | 4.0 |"


def test_a_training_step_gives_every_used_weight_a_gradient():
    settings = training.Settings(puzzles=4)
    net = network.TrainingNetwork(checkpoint.build_model(0))
    rows, canvases = next(training.batches(settings, sudoku.split_orbits(0).train))
    entropy, balance = training.step_loss(net, rows, canvases, settings, torch.Generator().manual_seed(0))
    (entropy + balance).backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []
    assert 1 <= balance.item() < 8


def test_noise_levels_are_spread_and_some_are_all_noise():
    levels = training.noise_levels(64, 1 / 8, torch.Generator().manual_seed(0))
    assert (levels == 1).sum() == 8
    assert levels.min() < 1 / 56 and levels.mean().sub(0.5625).abs() < 0.02


def test_same_seed_same_prompt_files(tmp_path: Path):
    prompts.write_prompts(tmp_path, seed=0)
    for name in ("prompts.jsonl", "calibration.jsonl"):
        assert (tmp_path / name).read_text() == (EXAMPLE / name).read_text()
