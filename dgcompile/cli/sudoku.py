"""The puzzles of ``dgcompile demo``: reading them, choosing some, and drawing what the model made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rich.columns import Columns
from rich.text import Text

from dgcompile.cli.text import printable
from dgcompile.errors import CheckpointError

SIZE, BOX_ROWS, BOX_COLUMNS = 6, 2, 3


@dataclass(frozen=True)
class Puzzle:
    """A grid with blanks (".") and its solution, both as lines of cells."""

    prompt: str
    answer: str
    blanks: int


@dataclass(frozen=True)
class Solved:
    """What the model made of a puzzle."""

    puzzle: Puzzle
    got: str
    steps: int

    @property
    def right(self) -> bool:
        """Whether every cell is."""
        return self.got == self.puzzle.answer


def read_puzzles(path: Path) -> list[Puzzle]:
    """The held-out puzzles beside the checkpoint: one JSON object a line."""
    puzzles = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error})",
            expected="the puzzles of the example",
            fix="give --checkpoint examples/sudoku",
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            puzzle = Puzzle(**json.loads(line))
            well_formed = all(len(grid.split()) == SIZE for grid in (puzzle.prompt, puzzle.answer))
        except (ValueError, TypeError, AttributeError):
            well_formed = False
        if not well_formed:
            raise CheckpointError(
                f"{path}, line {number} is no puzzle",
                expected='{"prompt": six lines, "answer": six lines, "blanks": number}',
            )
        puzzles.append(puzzle)
    if not puzzles:
        raise CheckpointError(f"{path} is empty", expected="the puzzles of the example")
    return puzzles


def choose(puzzles: list[Puzzle], count: int) -> list[Puzzle]:
    """``count`` puzzles, from every difficulty in turn, the easiest first."""
    levels: dict[int, list[Puzzle]] = {}
    for puzzle in puzzles:
        levels.setdefault(puzzle.blanks, []).append(puzzle)
    turns = zip_longest(*levels.values())
    chosen = [puzzle for turn in turns for puzzle in turn if puzzle is not None][:count]
    return sorted(chosen, key=lambda puzzle: puzzle.blanks)


def pictures(solved: Sequence[Solved]) -> Columns:
    """All of them, as many side by side as the terminal has room for."""
    return Columns([_picture(item) for item in solved], padding=(0, 6))


def _picture(solved: Solved) -> Text:
    """Puzzle and answer side by side under a headline; a wrong cell is followed by ``!``."""
    puzzle, answer = solved.puzzle.prompt.split(), solved.puzzle.answer.split()
    got = (solved.got.split() + [""] * SIZE)[:SIZE]
    verdict = ("right", "green") if solved.right else ("WRONG", "bold red")
    steps = f"{solved.steps} {'step' if solved.steps == 1 else 'steps'}"
    lines = [Text.assemble(f"{solved.puzzle.blanks} blanks, {steps}: ", verdict)]
    for row in range(SIZE):
        if row and row % BOX_ROWS == 0:
            lines.append(Text(_RULE + _GAP + _RULE))
        # An answer may be anything: cells that are missing count as wrong, those beyond a line's end are not shown.
        cells = printable(got[row]).ljust(SIZE, "?")[:SIZE]
        wrong = [cell != expected for cell, expected in zip(cells, answer[row], strict=True)]
        lines.append(Text.assemble(_row(puzzle[row], [False] * SIZE), _GAP, _row(cells, wrong)))
    return Text("\n").join([*lines, Text()])


def _row(cells: str, wrong: list[bool]) -> Text:
    """``1 2 3 | 4!5 6``: a row of a grid in boxes."""
    row = Text()
    for column, (cell, bad) in enumerate(zip(cells, wrong, strict=True)):
        row.append("| " if column and column % BOX_COLUMNS == 0 else "")
        row.append(cell + ("!" if bad else " "), "bold red" if bad else "")
    return row


_RULE = "+-".join("--" * BOX_COLUMNS for _ in range(SIZE // BOX_COLUMNS))
_GAP = "    "
