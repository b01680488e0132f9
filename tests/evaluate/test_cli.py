"""The command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.helpers import ESCAPE, run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Why is the sky blue?", "answer": "dust"}\n{"prompt": "tell me about rings"}\n')
    return file


def evaluated(bundle: Path, against: Path, prompts: Path, *options: str) -> tuple[int, str, str]:
    result = run(
        "evaluate", str(bundle), "--against", str(against), "--prompts", str(prompts), "--threads", "1", *options
    )
    return result.exit_code, result.stdout, result.stderr


def test_a_table_for_people(bundle: Path, noisy_bundle: Path, prompts: Path) -> None:
    code, stdout, _ = evaluated(noisy_bundle, bundle, prompts)
    assert code == 0 and ESCAPE not in stdout
    for shown in ("first step", "KL", "right answers     bundle 0, reference 0 of 1", "steps per canvas", "experts"):
        assert shown in stdout
    assert max(len(line) for line in stdout.splitlines()) <= 80


def test_json_and_a_page(bundle: Path, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    code, stdout, _ = evaluated(bundle, bundle, prompts, "--json", "--limit", "1", "--seed", "9", "--html", str(page))
    report = json.loads(stdout)
    assert code == 0 and len(report["prompts"]) == 1 and report["prompts"][0]["seed"] == 9
    assert report["first_step"] == {"kl": 0.0, "relative_error": 0.0}
    assert "Why is the sky blue?" in page.read_text()


def test_max_kl_decides_the_exit_code(bundle: Path, noisy_bundle: Path, prompts: Path) -> None:
    assert evaluated(bundle, bundle, prompts, "--max-kl", "0")[0] == 0
    code, stdout, stderr = evaluated(noisy_bundle, bundle, prompts, "--max-kl", "1e-6")
    assert code == 1 and "first step" in stdout and "more than 1e-06" in stderr
    assert evaluated(noisy_bundle, bundle, prompts, "--max-kl", "20")[0] == 0


def test_what_is_missing_is_said_first(bundle: Path, prompts: Path, tmp_path: Path) -> None:
    result = run("evaluate", str(bundle), "--against", str(bundle))
    assert result.exit_code == 2 and "has no prompts.jsonl" in result.stderr and "--prompts" in result.stderr
    code, _, stderr = evaluated(bundle, bundle, prompts, "--html", str(tmp_path / "none" / "page.html"))
    assert code == 2 and "is no folder" in stderr
    code, _, stderr = evaluated(bundle, tmp_path / "nothing", prompts)
    assert code == 2 and "nothing" in stderr
    assert run("evaluate", str(bundle)).exit_code == 2
