"""The prompt files beside the checkpoint, and token rows for training."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from example import sudoku
from example import tokenizer as tok
from example.checkpoint import CANVAS_LENGTH

FEWEST_BLANKS, MOST_BLANKS = 6, 22
TEST_BLANKS = (8, 10, 12, 14, 16, 20)
TEST_PUZZLES = 256
CALIBRATION_PUZZLES = 128


def write_jsonl(path: Path, puzzles: sudoku.Grids, solutions: sudoku.Grids) -> None:
    """One {"prompt", "answer", "blanks"} a line; puzzles and solutions int8 [N, 36]."""
    with path.open("w") as file:
        for puzzle, solution in zip(puzzles, solutions, strict=True):
            blanks = int((puzzle < 0).sum())
            record = {"prompt": sudoku.to_text(puzzle), "answer": sudoku.to_text(solution), "blanks": blanks}
            file.write(json.dumps(record) + "\n")


def held_out(rng: np.random.Generator, orbits: np.ndarray, blanks: Sequence[int], count: int) -> tuple[np.ndarray, ...]:
    """`count` puzzles for each number of blanks, (puzzles, solutions) int8 [len(blanks) * count, 36]."""
    return sudoku.make_puzzles(rng, orbits, np.repeat(np.array(blanks), count))


def write_prompts(folder: Path, seed: int) -> None:
    """Write prompts.jsonl (test orbits) and calibration.jsonl (training orbits) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    split = sudoku.split_orbits(seed)
    # Own streams: neither file depends on how many puzzles training drew.
    test_rng, calibration_rng = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
    write_jsonl(folder / "prompts.jsonl", *held_out(test_rng, split.test, TEST_BLANKS, TEST_PUZZLES))
    blanks = calibration_rng.integers(FEWEST_BLANKS, MOST_BLANKS + 1, CALIBRATION_PUZZLES)
    write_jsonl(folder / "calibration.jsonl", *sudoku.make_puzzles(calibration_rng, split.train, blanks))


def cell_tokens(grids: sudoku.Grids) -> torch.Tensor:
    """Token ids of grids [N, 36] as the tokenizer would give them, int64 [N, 36]."""
    tokens = torch.from_numpy(grids.astype(np.int64)) + tok.FIRST_DIGIT
    line_ends = torch.arange(5, 35, 6)
    tokens[:, line_ends] += tok.LINE_END_OFFSET
    return tokens


def prompt_tokens(puzzles: sudoku.Grids) -> torch.Tensor:
    """The prompts the chat template gives for puzzles [N, 36], int64 [N, 74]."""
    count = len(puzzles)
    names = torch.arange(tok.FIRST_NAME, tok.SEPARATOR).expand(count, -1)
    bos, separator = torch.full((count, 1), tok.BOS), torch.full((count, 1), tok.SEPARATOR)
    return torch.cat([bos, names, cell_tokens(puzzles), separator], dim=1)


def canvas_tokens(solutions: sudoku.Grids) -> torch.Tensor:
    """The canvases to learn for solutions [N, 36], int64 [N, 40]: the cells, <eos> and padding."""
    canvas = torch.full((len(solutions), CANVAS_LENGTH), tok.PAD)
    canvas[:, : sudoku.CELLS] = cell_tokens(solutions)
    canvas[:, sudoku.CELLS] = tok.EOS
    return canvas
