"""The example's tokenizer and chat template, as AutoTokenizer loads them from the committed files."""

from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from example import prompts, sudoku
from example import tokenizer as tok
from example.evaluation import load_puzzles
from transformers import AutoTokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sudoku"
GRID = "53..2.\n......\n1.....\n..6...\n......\n.....4"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EXAMPLE)


def lay_out(tokenizer: Any, content: object, **options: object) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": content}], return_dict=False, **options)


def test_vocabulary_is_where_the_config_says(tokenizer: Any):
    ids = tokenizer.get_vocab()
    assert sorted(ids.values()) == list(range(64))
    expected = {"<pad>": 0, "<eos>": 1, "<bos>": 2, ".": 3, "1": 4, "6": 9, "\n": 10, ".\n": 11, "1\n": 12, "6\n": 17}
    expected |= {"<a1>": 18, "<a2>": 19, "<b1>": 24, "<f6>": 53, "<sep>": 54, "<image>": 61}
    assert {spelling: ids[spelling] for spelling in expected} == expected


def test_a_grid_is_36_tokens_and_reads_back(tokenizer: Any):
    ids = tokenizer(GRID)["input_ids"]
    assert len(ids) == 36
    assert all((11 <= token <= 17) == (cell % 6 == 5 and cell < 35) for cell, token in enumerate(ids))
    assert tokenizer.decode(ids) == GRID


def test_a_finished_canvas_decodes_to_the_grid(tokenizer: Any):
    puzzle = load_puzzles(EXAMPLE / "prompts.jsonl")[0]
    canvas = [*tokenizer(puzzle.answer)["input_ids"], tok.EOS, tok.PAD, tok.PAD, tok.PAD]
    assert len(canvas) == 40
    assert tokenizer.decode(canvas, skip_special_tokens=True) == puzzle.answer


def test_template_layout(tokenizer: Any):
    ids = lay_out(tokenizer, GRID)
    assert ids == [tok.BOS, *range(18, 54), *tokenizer(GRID)["input_ids"], tok.SEPARATOR]
    assert lay_out(tokenizer, GRID, add_generation_prompt=True) == ids


@pytest.mark.parametrize(
    "content",
    [
        GRID.replace(".", "0"),
        GRID.replace(".", "_"),
        GRID.replace("\n", ""),
        GRID.replace("\n", "\r\n") + "\n",
        "  " + " ".join(GRID),
        [{"type": "text", "text": GRID}],
        [{"type": "text", "text": GRID[:9]}, {"type": "text", "text": GRID[9:]}],
    ],
    ids=["zeros", "underscores", "one line", "windows", "spaced", "part", "two parts"],
)
def test_ways_to_write_the_same_grid(tokenizer: Any, content: object):
    assert lay_out(tokenizer, content) == lay_out(tokenizer, GRID)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GRID[:-1], "36 cells .* got 35"),
        (GRID + "1", "36 cells .* got 37"),
        ("", "36 cells .* got 0"),
        (GRID.replace("5", "7"), 'got "7"'),
        (GRID.replace("5", "<a1>"), 'got "<"'),
        ("Why is the sky blue?", 'got "W"'),
        ([{"type": "image"}], "type image"),
    ],
)
def test_template_refuses_what_is_no_grid(tokenizer: Any, content: object, message: str):
    with pytest.raises(jinja2.TemplateError, match=message):
        lay_out(tokenizer, content)


@pytest.mark.parametrize("roles", [("system", "user"), ("user", "assistant", "user"), ("assistant",)])
def test_template_refuses_anything_but_one_user_message(tokenizer: Any, roles: tuple[str, ...]):
    chat = [{"role": role, "content": GRID} for role in roles]
    with pytest.raises(jinja2.TemplateError, match="one user message"):
        tokenizer.apply_chat_template(chat)


def test_training_rows_are_what_the_tokenizer_gives(tokenizer: Any):
    """Training builds its rows with numpy for speed."""
    puzzles = load_puzzles(EXAMPLE / "calibration.jsonl", limit=3)
    grids = np.stack([sudoku.from_text(puzzle.prompt) for puzzle in puzzles])
    answers = np.stack([sudoku.from_text(puzzle.answer) for puzzle in puzzles])
    rows, canvases = prompts.prompt_tokens(grids), prompts.canvas_tokens(answers)
    for puzzle, row, canvas in zip(puzzles, rows.tolist(), canvases.tolist(), strict=True):
        assert row == lay_out(tokenizer, puzzle.prompt)
        assert canvas == [*tokenizer(puzzle.answer)["input_ids"], 1, 0, 0, 0]


def test_committed_files_are_what_the_code_makes(tokenizer: Any, tmp_path: Path):
    tok.build_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (EXAMPLE / name).read_text() == (tmp_path / name).read_text()
