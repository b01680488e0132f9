"""``dgcompile plan``: what it reads, what it prints, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dgcompile.recipe import list_recipes
from dgcompile.target import list_targets
from tests.cli.helpers import ESCAPE, ROOT, run
from tests.model_config import published_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published config.json, alone in a folder."""
    file = tmp_path_factory.mktemp("published") / "config.json"
    file.write_text(json.dumps(published_config()))
    return file


def test_json_for_the_published_model(config: Path) -> None:
    found = json.loads(run("plan", str(config), "--target", "rtx5090", "--recipe", "int4", "--json").stdout)
    assert found["parameters"] == pytest.approx(25.25e9, abs=0.01e9)
    assert (found["max_context"], found["max_batch"]) == (8192, 1)
    device = found["device"]
    assert device["total_bytes"] < 18e9 < device["memory_bytes"] and device["fits"]
    assert device["weights_bytes"] == device["bound_weights_bytes"] + sum(device["engine_weights_bytes"].values())
    assert device["kv_cache_bytes"] == sum(device["kv_cache_bytes_by_kind"].values()) == 377_487_360
    assert found["disk"]["bundle_bytes"] == found["disk"]["needed_bytes"]
    assert found["disk"]["free_bytes"] > 0 and found["host"]["memory_bytes"] > 0
    step = found["step"]
    assert step["floor_seconds"] == max(step["memory_seconds"], step["compute_seconds"])
    assert step["estimated_seconds"] == pytest.approx(sum(part["seconds"] for part in step["work"].values()))
    assert step["floor_tokens_per_second"] == pytest.approx(16 / step["floor_seconds"])


def test_a_folder_with_only_a_config_is_enough(config: Path) -> None:
    of_file = run("plan", str(config), "--target", "h100", "--json")
    of_folder = run("plan", str(config.parent), "--target", "h100", "--json")
    first, second = json.loads(of_file.stdout), json.loads(of_folder.stdout)
    for found in (first, second):
        del found["host"], found["disk"], found["build_refusal"]  # what is free changes while we look
    assert first == second and first["recipe"] == "w8a16"


@pytest.mark.parametrize("target", list_targets())
def test_text_has_no_colours_and_fits_80_columns(config: Path, target: str) -> None:
    result = run("plan", str(config), "--target", target, "--max-context", "262144", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    assert ESCAPE not in result.stdout and max(map(len, result.stdout.splitlines())) <= 80
    assert "25.25 billion" in result.stdout and "total" in result.stdout
    assert ("tokens/s" in result.stdout) == (target != "cpu")


def test_every_recipe_on_every_target_that_runs_it(config: Path) -> None:
    recipes = {found["name"]: found["targets"] for found in json.loads(run("recipes", "--json").stdout)}
    assert set(recipes) == set(list_recipes())
    for recipe, targets in recipes.items():
        for target in targets:
            result = run("plan", str(config), "--target", target, "--recipe", recipe, "--json")
            assert result.exit_code == 0, (recipe, target, result.stderr)
            assert json.loads(result.stdout)["host"]["calibrates"] == (recipe == "fp8")


def test_what_does_not_fit_is_shown_and_said(config: Path) -> None:
    result = run("plan", str(config), "--target", "rtx4090", "--recipe", "bf16")
    assert result.exit_code == 0
    assert "DOES NOT FIT; nor does it with any shorter context or smaller batch" in result.stdout
    assert "A BUILD HERE IS REFUSED: NVIDIA GeForce RTX 4090 24 GB has 24.0 GB and would" in result.stdout
    found = json.loads(run("plan", str(config), "--target", "rtx4090", "--recipe", "bf16", "--json").stdout)
    assert found["build_refusal"].startswith("NVIDIA GeForce RTX 4090 24 GB has 24.0 GB and would need 53.0 GB")
    many = run("plan", str(config), "--target", "rtx5090", "--max-batch", "32").stdout
    assert "DOES NOT FIT; at this context a max batch of" in many


def test_a_card_of_ones_own(config: Path, tmp_path: Path) -> None:
    card = tmp_path / "mine.yaml"
    lines = (ROOT / "dgcompile" / "targets" / "rtx4090.yaml").read_text().replace("name: rtx4090", "name: mine")
    card.write_text(lines.replace("1.008e+12", "2.016e+12"))
    steps = [
        json.loads(run("plan", str(config), "--target", target, "--json").stdout)["step"]
        for target in ("rtx4090", str(card))
    ]
    assert steps[0]["memory_seconds"] == pytest.approx(2 * steps[1]["memory_seconds"])
    assert steps[0]["compute_seconds"] == steps[1]["compute_seconds"]


def test_tokens_per_step(config: Path) -> None:
    arguments = ("plan", str(config), "--target", "h100", "--json", "--tokens-per-step")
    slow, fast = (json.loads(run(*arguments, number).stdout)["step"] for number in ("8", "16"))
    assert 2 * slow["floor_tokens_per_second"] == pytest.approx(fast["floor_tokens_per_second"])
    assert run(*arguments, "0").exit_code == 2


def test_a_checkpoint_with_weights(checkpoint: Path) -> None:
    found = json.loads(run("plan", str(checkpoint), "--target", "cpu", "--max-batch", "3", "--json").stdout)
    small_files = sum((checkpoint / name).stat().st_size for name in ("tokenizer.json", "chat_template.jinja"))
    assert found["disk"]["files_bytes"]["assets"] >= small_files
    assert found["build_refusal"] is None
    assert found["max_batch"] == 3 and found["step"] is None and found["step_lacks"] == "memory_bandwidth"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/folder", "--target", "cpu"), "there is no no/such/folder"),
        (("./nowhere", "--target", "cpu"), "there is no ./nowhere"),
        (("CONFIG", "--target", "b200"), "unknown target 'b200'"),
        (("CONFIG", "--target", "h100", "--recipe", "fp32"), "computes in float32"),
        (("CONFIG", "--target", "h100", "--max-context", "100"), "max_context is 100"),
        (("CONFIG", "--target", "h100", "--max-batch", "65"), "max_batch is 65"),
        (("CONFIG", "--target", "cpu", "--max-batch", "0"), "max_batch is 0"),
    ],
)
def test_refusals(config: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run("plan", *(str(config) if word == "CONFIG" else word for word in arguments))
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""


def test_a_config_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    result = run("plan", str(tmp_path), "--target", "cpu")
    assert result.exit_code == 2 and "model_type is 'llama'" in result.stderr


def test_it_imports_no_torch(config: Path) -> None:
    script = (
        "import sys\n"
        "from dgcompile.cli import main\n"
        f"sys.argv = ['dgcompile', 'plan', {str(config)!r}, '--target', 'h100', '--recipe', 'fp8', '--json']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print('LOADED', sorted({'torch', 'transformers', 'onnx', 'onnxruntime', 'triton'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"
