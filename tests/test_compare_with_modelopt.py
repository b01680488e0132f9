"""The comparison with modelopt really compares: the experts are quantized, and the errors are those of two models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "compare_with_modelopt.py"


def test_modelopts_row(tmp_path: Path) -> None:
    made = tmp_path / "rows.json"
    options = ["--only", "int4", "--prompts", "2", "--json", str(made)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [row] = json.loads(made.read_text())
    assert (row["format"], row["made_by"]) == ("int4", "modelopt")
    # 4 layers of 8 experts with two weights each; 4 or 3 of attention, 3 of the MLP, 3 of self-conditioning.
    assert row["details"] == "64 weights of experts, 29 others, 0 inputs"
    assert 1e-4 < row["kl"] < row["largest_kl"]
    assert 0.02 < row["relative"] < 0.2
