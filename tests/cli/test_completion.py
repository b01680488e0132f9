"""Completion scripts and what they complete."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT, finish, run, start


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_calls_back_with_its_own_name(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert f"_DGCOMPILE_COMPLETE={shell}_complete" in result.stdout


def test_the_script_needs_no_shell_where_it_is_made() -> None:
    code, stdout, stderr = finish(start("completion", "bash", env={**os.environ, "PATH": ""}))
    assert (code, stderr) == (0, "") and "complete" in stdout


def test_another_shell_is_a_usage_error() -> None:
    assert run("completion", "tcsh").exit_code == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dgcompile in", {"inspect"}),
        ("dgcompile build --target ", {"cpu", "h100", "h200", "rtx4090", "rtx5090"}),
        ("dgcompile build --recipe fp", {"fp32"}),
        ("dgcompile generate --max-d", {"--max-denoising-steps"}),
    ],
)
def test_what_is_completed(words: str, expected: set[str]) -> None:
    last = len(words.split(" ")) - 1
    env = {**os.environ, "_DGCOMPILE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(last)}
    code, stdout, _ = finish(start(env=env))
    assert code == 0
    assert expected <= {line.partition(",")[2] for line in stdout.splitlines()}


def test_names_that_do_not_match_leave_room_for_a_file() -> None:
    words = "dgcompile build --recipe ./mine"
    env = {**os.environ, "_DGCOMPILE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "3"}
    assert finish(start(env=env))[1].strip() == "file,./mine"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_accepts_its_script(tmp_path: Path) -> None:
    script = tmp_path / "dgcompile.bash"
    script.write_text(run("completion", "bash").stdout)
    check = f"source {script} && complete -p dgcompile"
    done = subprocess.run(["bash", "--norc", "-c", check], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "dgcompile" in done.stdout and done.stderr == ""
