"""The script that finds tiles, without a GPU: what it prunes and how it ranks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

pytest.importorskip("triton", reason="triton (extra `build`) is not installed: NO candidate is compiled")

import torch

from dgcompile.plugins.block_attention.tiles import TILES, shared_memory_bytes
from dgcompile.plugins.launch import SHARED_MEMORY_LIMIT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "retune_tiles.py"
    spec = importlib.util.spec_from_file_location("retune_tiles", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its processes unpickle what is named here.
    sys.modules["retune_tiles"] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("sm", [90, 120])
def test_candidates_hold_todays_tiles_and_fit(script: ModuleType, sm: int) -> None:
    for head_dim, tile in TILES[sm].items():
        candidates = list(script.AttentionCase(head_dim).candidates(sm))
        assert tile in candidates
        assert all(shared_memory_bytes(sm, head_dim, found) <= SHARED_MEMORY_LIMIT[sm] for found in candidates)
    for weight_format in ("float", "fp8", "int4", "w4a8"):
        from dgcompile.plugins.moe.launch import TILES as MOE_TILES

        for many, tile in enumerate(MOE_TILES[sm, weight_format]):
            assert tile in list(script.ExpertsCase(weight_format, bool(many)).candidates(sm))


def test_model_only(script: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "tiles.json"
    arguments = ["--sm", "120", "--head-dim", "32", "--limit", "2", "--model-only", "--workers", "1"]
    result = CliRunner().invoke(script.main, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "# SM 120, ranked by the model alone, nothing timed\n32: Tile(" in result.output
    report = json.loads(output.read_bytes())
    assert report["sm"] == 120 and report["timed"] is False
    results = report["tiles"]["32"]
    assert 1 <= len(results) <= 2
    assert [found["score"] for found in results] == sorted((found["score"] for found in results), reverse=True)
    assert all(found["milliseconds"] is None and found["compiled"]["spilled_bytes"] == 0 for found in results)
    assert all(found["compiled"]["blocks"] >= 1 for found in results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed(script: ModuleType) -> None:
    result = CliRunner().invoke(script.main, ["--sm", "90", "--head-dim", "64"])
    assert result.exit_code == 1
    assert "there is no GPU to time on; pass --model-only" in result.output
