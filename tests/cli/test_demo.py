"""The demo on the example of the source tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dgcompile.cli.sudoku import Puzzle, Solved, choose, pictures, read_puzzles
from dgcompile.errors import CheckpointError
from tests.cli.helpers import ESCAPE, ROOT, finish, run, start

DEMO = ("demo", "--puzzles", "6")

GRID = "123456\n456123\n231564\n564231\n312645\n645312"


def test_the_demo_solves_puzzles_and_keeps_its_bundle(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    code, stdout, stderr = finish(start(*DEMO, "--bundle", str(bundle)))
    assert code == 0, stderr
    assert ESCAPE not in stdout
    assert stdout.count(": right") >= 4, "most of the six are solved, the easier ones surely"
    assert f"{stdout.count(': right')} of 6 right" in stdout
    assert max(map(len, stdout.splitlines())) <= 80
    made = (bundle / "manifest.json").stat().st_mtime_ns
    facts = json.loads(run(*DEMO, "--bundle", str(bundle), "--json").stdout)
    assert (bundle / "manifest.json").stat().st_mtime_ns == made
    assert facts["right"] == stdout.count(": right") == sum(p["got"] == p["answer"] for p in facts["puzzles"])
    assert len({puzzle["blanks"] for puzzle in facts["puzzles"]}) == 6


def test_an_installed_package_without_the_example_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dgcompile.cli.demo.EXAMPLE", tmp_path / "nowhere")
    result = run("demo")
    assert result.exit_code == 2 and "--checkpoint" in result.stderr


def test_a_wrong_answer_is_shown_as_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    puzzle = Puzzle(prompt="." + GRID[1:], answer=GRID, blanks=1)
    wrong = Solved(puzzle, "2" + GRID[1:], steps=3)
    right = Solved(puzzle, GRID, steps=1)
    broken = Solved(puzzle, f"{ESCAPE}[31m1", steps=16)
    Console(width=80).print(pictures([wrong, right, broken]))
    out = capsys.readouterr().out
    assert "1 blanks, 3 steps: WRONG" in out and "2!2 3 | 4 5 6" in out
    assert "1 blanks, 1 step: right" in out
    assert out.count("WRONG") == 2 and "?!?!?!| ?!?!?!" in out and ESCAPE not in out


def test_puzzles_of_every_difficulty_are_chosen() -> None:
    puzzles = read_puzzles(ROOT / "examples" / "sudoku" / "prompts.jsonl")
    assert [puzzle.blanks for puzzle in choose(puzzles, 7)] == [8, 8, 10, 12, 14, 16, 20]
    assert len(choose(puzzles, 10**6)) == len(puzzles)


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"prompt": "12", "answer": "12", "blanks": 0}', '{"prompt": 3}', "null"]
)
def test_files_that_hold_no_puzzles_are_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(CheckpointError, match=r"prompts\.jsonl"):
        read_puzzles(file)
    with pytest.raises(CheckpointError, match="missing"):
        read_puzzles(tmp_path / "missing")
