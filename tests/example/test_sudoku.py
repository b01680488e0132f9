"""Grids, orbits and puzzles, and that the example's prompt files keep what is held out apart from training."""

from pathlib import Path

import numpy as np
import pytest
from example import sudoku
from example.evaluation import load_puzzles
from example.prompts import FEWEST_BLANKS, MOST_BLANKS, TEST_BLANKS, TEST_PUZZLES

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sudoku"
SEED = 0  # of the committed checkpoint


def read(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(puzzles, solutions) of a prompts file, int8 [N, 36]."""
    puzzles = load_puzzles(EXAMPLE / name)
    return (
        np.stack([sudoku.from_text(puzzle.prompt) for puzzle in puzzles]),
        np.stack([sudoku.from_text(puzzle.answer) for puzzle in puzzles]),
    )


def count_solutions(grid: np.ndarray) -> int:
    """Solutions of a puzzle by plain search, at most 2: shares nothing with the solver under test."""
    cells = grid.reshape(6, 6)
    holes = np.argwhere(cells < 0)
    if not len(holes):
        return 1
    options = []
    for row, column in holes:
        top, left = row // 2 * 2, column // 3 * 3
        seen = {*cells[row], *cells[:, column], *cells[top : top + 2, left : left + 3].flat}
        options.append([digit for digit in range(6) if digit not in seen])
    best = min(range(len(holes)), key=lambda i: len(options[i]))
    total = 0
    for digit in options[best]:
        filled = cells.copy()
        filled[tuple(holes[best])] = digit
        total += count_solutions(filled.reshape(-1))
        if total > 1:
            break
    return total


def test_all_grids_are_found_once_and_are_valid():
    grids = sudoku.all_grids()
    assert len(grids) * 720 == 28_200_960  # the known number of 6x6 sudoku grids
    assert len(np.unique(grids, axis=0)) == len(grids)
    assert sudoku.is_valid(grids).all()


def test_is_valid_sees_a_swapped_pair():
    grid = sudoku.all_grids()[:1].copy()
    grid[0, [0, 1]] = grid[0, [1, 0]]
    assert not sudoku.is_valid(grid).any()


def test_there_are_49_orbits():
    assert len(np.unique(sudoku.orbit_labels())) == 49


@pytest.mark.parametrize("seed", range(3))
def test_a_disguised_grid_keeps_its_orbit(seed: int):
    rng = np.random.default_rng(seed)
    grids = sudoku.random_grids(rng, np.arange(49), 50)
    bands, stacks = rng.permutation(3), rng.permutation(2)
    rows = np.concatenate([2 * band + rng.permutation(2) for band in bands])
    columns = np.concatenate([3 * stack + rng.permutation(3) for stack in stacks])
    moved = grids.reshape(-1, 6, 6)[:, rows][:, :, columns].reshape(-1, 36)
    disguised = rng.permutation(6).astype(np.int8)[moved]
    assert sudoku.is_valid(disguised).all()
    assert (sudoku.orbit_of(disguised) == sudoku.orbit_of(grids)).all()


def test_split_shares_no_orbit():
    split = sudoku.split_orbits(SEED)
    assert len(split.test) == 7
    together = np.concatenate([split.train, split.dev, split.test])
    assert sorted(together) == list(range(49))


def test_singles_never_guess():
    """Four cells, two digits that could swap: none is a single, so the solver leaves all of them open."""
    grids = sudoku.all_grids()
    top, bottom = grids[:, [0, 3]], grids[:, [6, 9]]  # one band, two stacks
    swappable = (top == bottom[:, ::-1]).all(axis=1)
    grid = grids[swappable][0].copy()
    grid[[0, 3, 6, 9]] = -1
    assert count_solutions(grid) == 2
    solved, full = sudoku.solve_by_singles(grid[None])
    assert not full[0]
    assert (solved[0] == grid).all()


def test_made_puzzles_have_the_blanks_asked_for_and_one_solution():
    rng = np.random.default_rng(5)
    blanks = np.array([6, 14, 22] * 4)
    puzzles, solutions = sudoku.make_puzzles(rng, np.arange(49), blanks)
    assert ((puzzles < 0).sum(axis=1) == blanks).all()
    assert sudoku.is_valid(solutions).all()
    assert ((puzzles < 0) | (puzzles == solutions)).all()
    assert [count_solutions(puzzle) for puzzle in puzzles] == [1] * len(puzzles)


@pytest.mark.parametrize("text", ["", "123456", "\n".join(["12345."] * 5), "\n".join(["123457"] * 6)])
def test_from_text_refuses_what_is_no_grid(text: str):
    with pytest.raises(ValueError, match="not a 6x6 grid"):
        sudoku.from_text(text)


@pytest.mark.parametrize("name", ["prompts.jsonl", "calibration.jsonl"])
def test_prompt_files_hold_puzzles_with_their_only_solution(name: str):
    puzzles, solutions = read(name)
    assert sudoku.is_valid(solutions).all()
    solved, full = sudoku.solve_by_singles(puzzles)
    assert full.all()
    assert (solved == solutions).all()
    assert [count_solutions(puzzle) for puzzle in puzzles[::25]] == [1] * len(puzzles[::25])


def test_prompts_are_from_held_out_orbits():
    split = sudoku.split_orbits(SEED)
    _, solutions = read("prompts.jsonl")
    found = np.unique(sudoku.orbit_of(solutions))
    assert set(found) == set(split.test)
    assert not set(found) & {*split.train, *split.dev}


def test_calibration_is_from_training_orbits():
    puzzles, solutions = read("calibration.jsonl")
    assert len(puzzles) == 128
    assert np.isin(sudoku.orbit_of(solutions), sudoku.split_orbits(SEED).train).all()
    blanks = (puzzles < 0).sum(axis=1)
    assert FEWEST_BLANKS <= blanks.min() < blanks.max() <= MOST_BLANKS


def test_prompts_cover_every_number_of_blanks():
    puzzles = load_puzzles(EXAMPLE / "prompts.jsonl")
    counts = {blanks: sum(puzzle.blanks == blanks for puzzle in puzzles) for blanks in TEST_BLANKS}
    assert counts == dict.fromkeys(TEST_BLANKS, TEST_PUZZLES)
    assert all(puzzle.prompt.count(".") == puzzle.blanks for puzzle in puzzles)
    assert len({puzzle.prompt for puzzle in puzzles}) == len(puzzles)
