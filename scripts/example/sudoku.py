"""6x6 sudoku: every grid up to relabelling, their symmetry orbits, and puzzles that logic alone can solve.

A grid is an int8 array of 36 digits (0-5 inside this package, shown as "1"-"6"); -1 is a blank. Boxes are 2 rows by
3 columns. Two grids are *relabellings* of each other when renaming the digits turns one into the other, and they are
in the same *orbit* when, on top of that, rows, columns, bands or stacks were permuted. Test puzzles come from whole
orbits that training never sees: otherwise a test grid could be a training grid in disguise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

SIDE = 6
CELLS = SIDE * SIDE
BOX_ROWS, BOX_COLUMNS = 2, 3

TEST_ORBITS = 7
DEV_ORBITS = 4

Grids = np.ndarray  # int8 [N, 36]


@cache
def units() -> np.ndarray:
    """The 18 units (6 rows, 6 columns, 6 boxes) as cell indices, int64 [18, 6]."""
    cells = np.arange(CELLS).reshape(SIDE, SIDE)
    rows = [cells[i] for i in range(SIDE)]
    columns = [cells[:, i] for i in range(SIDE)]
    boxes = [
        cells[r : r + BOX_ROWS, c : c + BOX_COLUMNS].reshape(-1)
        for r in range(0, SIDE, BOX_ROWS)
        for c in range(0, SIDE, BOX_COLUMNS)
    ]
    return np.stack(rows + columns + boxes)


@cache
def membership() -> np.ndarray:
    """float32 [18, 36]: 1 where the cell lies in the unit."""
    member = np.zeros((len(units()), CELLS), np.float32)
    for unit, cells in enumerate(units()):
        member[unit, cells] = 1
    return member


@cache
def peers() -> np.ndarray:
    """float32 [36, 36]: 1 where two different cells share a unit."""
    shared = (membership().T @ membership() > 0).astype(np.float32)
    np.fill_diagonal(shared, 0)
    return shared


def is_valid(grids: Grids) -> np.ndarray:
    """Whether each full grid holds every digit once in every unit, bool [N]."""
    by_unit = np.sort(np.asarray(grids)[:, units()], axis=-1)  # [N, 18, 6]
    return (by_unit == np.arange(SIDE)).all(axis=(1, 2))


def relabel(grids: Grids) -> Grids:
    """Rename the digits of each grid so that its first row reads 0, 1, ..., 5."""
    renaming = np.argsort(grids[:, :SIDE], axis=1).astype(np.int8)  # digit -> its column in the first row
    return np.take_along_axis(renaming, grids.astype(np.int64), axis=1)


def _keys(relabelled: Grids) -> np.ndarray:
    """One integer a relabelled grid, int64 [N]. Rows 2-5 decide the rest (row 1 is fixed, row 6 follows)."""
    weights = 6 ** np.arange(24, dtype=np.int64)
    return relabelled[:, SIDE : 5 * SIDE].astype(np.int64) @ weights


@cache
def all_grids() -> Grids:
    """All 39,168 grids whose first row is 0, 1, ..., 5, sorted by key, int8 [39168, 36]."""
    rows = np.array(list(permutations(range(SIDE))), np.int8)  # [720, 6]
    columns_differ = (rows[:, None] != rows[None]).all(-1)
    left = np.array([sum(1 << d for d in row[:BOX_COLUMNS]) for row in rows.tolist()])
    same_band = columns_differ & ((left[:, None] & left[None]) == 0)  # the halves of a box share no digit
    found: list[list[int]] = []

    def extend(chosen: list[int], allowed: np.ndarray) -> None:
        if len(chosen) == SIDE:
            found.append(chosen)
            return
        candidates = allowed & same_band[chosen[-1]] if len(chosen) % BOX_ROWS else allowed
        for row in np.flatnonzero(candidates):
            extend([*chosen, int(row)], allowed & columns_differ[row])

    extend([0], columns_differ[0])
    grids = rows[np.array(found)].reshape(-1, CELLS)
    return grids[np.argsort(_keys(grids))]


def _generators() -> Iterator[np.ndarray]:
    """Cell permutations [36] that generate all symmetries (a 2x3 box rules out transposition)."""
    cells = np.arange(CELLS).reshape(SIDE, SIDE)
    for a in (0, 2, 4):  # the two rows of a band
        order = list(range(SIDE))
        order[a], order[a + 1] = order[a + 1], order[a]
        yield cells[order].reshape(-1)
    for order in ([2, 3, 0, 1, 4, 5], [0, 1, 4, 5, 2, 3]):  # bands
        yield cells[order].reshape(-1)
    for a in (0, 1, 3, 4):  # neighbouring columns of a stack
        order = list(range(SIDE))
        order[a], order[a + 1] = order[a + 1], order[a]
        yield cells[:, order].reshape(-1)
    yield cells[:, [3, 4, 5, 0, 1, 2]].reshape(-1)  # stacks


@cache
def orbit_labels() -> np.ndarray:
    """The orbit number (0-48) of each grid of `all_grids`, int64 [39168]."""
    grids = all_grids()
    keys = _keys(grids)
    images = [np.searchsorted(keys, _keys(relabel(grids[:, generator]))) for generator in _generators()]
    labels = np.arange(len(grids))
    while True:  # spread the smallest index through each orbit
        spread = labels
        for image in images:
            spread = np.minimum(spread, spread[image])
            spread[image] = np.minimum(spread[image], spread)  # safe: each image is a permutation
        if (spread == labels).all():
            return np.unique(labels, return_inverse=True)[1]
        labels = spread


def orbit_of(grids: Grids) -> np.ndarray:
    """The orbit number of any full, valid grids, int64 [N]."""
    return orbit_labels()[np.searchsorted(_keys(all_grids()), _keys(relabel(np.asarray(grids))))]


@dataclass(frozen=True)
class Split:
    """Orbit numbers for training, for tuning (dev) and for the one final measurement (test)."""

    train: np.ndarray
    dev: np.ndarray
    test: np.ndarray


def split_orbits(seed: int) -> Split:
    """Hold out whole orbits of middling size (300-1,000 grids): a small one would make for a test set that repeats few
    grids over and over, and a large one would cost too much of the training data."""
    sizes = np.bincount(orbit_labels())
    drawn = np.random.default_rng(seed).permutation(np.flatnonzero((sizes >= 300) & (sizes <= 1000)))
    test, dev = drawn[:TEST_ORBITS], drawn[TEST_ORBITS : TEST_ORBITS + DEV_ORBITS]
    train = np.setdiff1d(np.arange(len(sizes)), np.concatenate([test, dev]))
    return Split(train=train, dev=np.sort(dev), test=np.sort(test))


def solve_by_singles(puzzles: Grids) -> tuple[Grids, np.ndarray]:
    """Fill in naked and hidden singles until nothing moves.

    Every such step is forced, so a puzzle that ends full has exactly one solution. Returns the grids [N, 36] and
    whether each is full [N].
    """
    grids = np.array(puzzles, np.int8)
    digits = np.arange(SIDE, dtype=np.int8)
    active = np.arange(len(grids))
    while len(active):
        current = grids[active]
        given = current[:, :, None] == digits  # [n, 36, 6]
        seen = np.einsum("pc,ncd->npd", peers(), given.astype(np.float32), optimize=True) > 0
        open_ = (current < 0)[:, :, None] & ~seen  # the digit may still go into the cell
        naked = open_ & (open_.sum(-1, keepdims=True) == 1)
        per_unit = np.einsum("uc,ncd->nud", membership(), open_.astype(np.float32), optimize=True) == 1
        lonely = np.einsum("uc,nud->ncd", membership(), per_unit.astype(np.float32), optimize=True) > 0
        forced = naked | (open_ & lonely)
        cell_forced = forced.any(-1)
        grids[active] = np.where(cell_forced, forced.argmax(-1).astype(np.int8), current)
        active = active[cell_forced.any(-1) & (grids[active] < 0).any(-1)]
    return grids, (grids >= 0).all(-1)


def random_grids(rng: np.random.Generator, orbits: np.ndarray, count: int) -> Grids:
    """`count` grids drawn evenly from the grids of the given orbits, with random digit names, int8 [count, 36]."""
    pool = np.flatnonzero(np.isin(orbit_labels(), orbits))
    grids = all_grids()[rng.choice(pool, count)]
    names = rng.permuted(np.tile(np.arange(SIDE, dtype=np.int8), (count, 1)), axis=1)
    return np.take_along_axis(names, grids.astype(np.int64), axis=1)


def make_puzzles(rng: np.random.Generator, orbits: np.ndarray, blanks: np.ndarray) -> tuple[Grids, Grids]:
    """One puzzle with exactly `blanks[i]` blanks for each i, from the given orbits.

    Returns (puzzles, solutions), both int8 [N, 36]. A draw that singles cannot solve is drawn again, grid included.
    """
    count = len(blanks)
    puzzles, solutions = np.empty((2, count, CELLS), np.int8)
    missing = np.arange(count)
    while len(missing):
        grids = random_grids(rng, orbits, len(missing))
        rank = rng.permuted(np.tile(np.arange(CELLS), (len(missing), 1)), axis=1)
        drawn = np.where(rank < blanks[missing, None], -1, grids).astype(np.int8)
        solved, full = solve_by_singles(drawn)
        good = full & (solved == grids).all(-1)
        puzzles[missing[good]], solutions[missing[good]] = drawn[good], grids[good]
        missing = missing[~good]
    return puzzles, solutions


def to_text(grid: np.ndarray) -> str:
    """A grid [36] as six lines of six characters, "." for a blank."""
    marks = ["." if digit < 0 else str(digit + 1) for digit in grid.tolist()]
    return "\n".join("".join(marks[i : i + SIDE]) for i in range(0, CELLS, SIDE))


def from_text(text: str) -> np.ndarray:
    """The inverse of `to_text`, int8 [36]. Raises ValueError when the text is not six lines of six cells."""
    lines = text.split("\n")
    if len(lines) != SIDE or any(len(line) != SIDE for line in lines) or set("".join(lines)) - set(".123456"):
        raise ValueError(f"not a 6x6 grid: {text!r}")
    return np.array([-1 if mark == "." else int(mark) - 1 for mark in "".join(lines)], np.int8)
