"""``dgcompile batch`` as a real process, on the bundle of the example."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dgcompile.runtime.pipeline import Pipeline
from tests.cli.helpers import ESCAPE, ROOT, finish, run, start

PUZZLES = [json.loads(line) for line in (ROOT / "examples" / "sudoku" / "prompts.jsonl").read_text().splitlines()]


def write_puzzles(path: Path, count: int, **fields: Any) -> None:
    puzzles = [{"id": f"p{index}", "text": puzzle["prompt"], **fields} for index, puzzle in enumerate(PUZZLES[:count])]
    path.write_text("".join(json.dumps(puzzle) + "\n" for puzzle in puzzles))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def stop(process: subprocess.Popen[str], partial: Path, *, after: int, by: signal.Signals) -> tuple[int, str]:
    """Sends a signal when so many lines are written, and a moment more went by: (exit code, stderr)."""
    deadline = time.monotonic() + 120
    while process.poll() is None and (not partial.exists() or partial.read_bytes().count(b"\n") < after):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.05))
    process.send_signal(by)
    code, _, stderr = finish(process)
    return code, stderr


def test_500_puzzles_killed_twice_and_interrupted_once(example_bundle: Path, tmp_path: Path) -> None:
    source, output, undisturbed = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    write_puzzles(source, 500)
    lines = source.read_text().splitlines()
    lines[100:100] = ["{", "", '{"text": "x", "n": 2}']
    source.write_text("\n".join(lines))

    def arguments(out: Path) -> tuple[str, ...]:
        return "batch", str(example_bundle), str(source), str(out), "--token-ids", "--threads", "1"

    code, stdout, stderr = finish(start(*arguments(undisturbed)))
    assert (code, stdout) == (0, "")
    assert "500 of 502 lines answered" in stderr and "rows per step" in stderr
    assert f"2 lines are bad; {tmp_path / 'undisturbed.errors.jsonl'}" in stderr
    assert ESCAPE not in stderr

    partial = output.with_name("out.jsonl.partial")
    done = 0
    for by, most in ((signal.SIGKILL, 200), (signal.SIGKILL, 350), (signal.SIGINT, 450)):
        after = random.randint(done, most)
        code, stderr = stop(start(*arguments(output)), partial, after=after, by=by)
        assert not output.exists(), f"killed after {after} lines: too late"
        done = partial.read_bytes().count(b"\n")
        assert done >= after
        assert code == (130 if by == signal.SIGINT else -signal.SIGKILL)
    assert "Interrupted: run the same command again" in stderr and "Traceback" not in stderr

    code, stdout, _ = finish(start(*arguments(output), "--json"))
    assert code == 0
    report = json.loads(stdout)
    assert (report["lines"], report["answered"], report["bad"], report["done_before"]) == (502, 500, 2, done + 2)
    assert report["errors"] == str(tmp_path / "out.errors.jsonl")

    assert output.read_bytes() == undisturbed.read_bytes()
    found = records(output)
    assert [record["id"] for record in found] == [f"p{index}" for index in range(500)]
    assert [record["line"] for record in found] == [*range(1, 101), *range(104, 504)]
    right = sum(record["text"] == puzzle["answer"] for record, puzzle in zip(found, PUZZLES, strict=False))
    assert right > 450
    assert [record["line"] for record in records(tmp_path / "out.errors.jsonl")] == [101, 103]
    assert sum(record["output_tokens"] for record in found) == report["output_tokens"]
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("out")} == {
        "out.jsonl",
        "out.errors.jsonl",
    }

    # And each line is what it is alone.
    pipeline = Pipeline.open(example_bundle, threads=1)
    for index in (0, 99, 100, 499):
        prompt = pipeline.encode([{"role": "user", "content": PUZZLES[index]["prompt"]}])
        (alone,) = pipeline.generate([prompt], seeds=[found[index]["line"]])
        assert (found[index]["token_ids"], found[index]["steps"]) == (alone.token_ids, sum(alone.steps_per_canvas))


def test_options_are_defaults_for_lines_that_do_not_say(example_bundle: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    lines = ({"text": PUZZLES[0]["prompt"]}, {"text": PUZZLES[1]["prompt"], "max_new_tokens": 2, "seed": 5})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--max-new-tokens", "7", "--seed", "40", "--unordered", "--rows", "1", "--max-denoising-steps", "3")
    result = run("batch", str(example_bundle), str(source), str(output), *options)
    assert result.exit_code == 0, result.stderr
    first, second = sorted(records(output), key=lambda record: record["line"])
    assert (first["output_tokens"], first["seed"]) == (7, 41)
    assert (second["output_tokens"], second["seed"]) == (2, 5)
    assert max(first["steps"], second["steps"]) <= 3
    assert result.stdout == "" and "2 of 2 lines answered" in result.stderr and "Warning" not in result.stderr


def test_only_a_run_of_nothing_but_bad_lines_fails(example_bundle: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{\n\n[]\n")
    result = run("batch", str(example_bundle), str(source), str(output))
    assert result.exit_code == 1
    assert "0 of 2 lines answered" in result.stderr and "2 lines are bad" in result.stderr
    assert output.read_bytes() == b""
    assert [record["line"] for record in records(tmp_path / "out.errors.jsonl")] == [1, 3]

    result = run("batch", str(example_bundle), str(source), str(output))
    assert result.exit_code == 2 and "out.jsonl exists" in result.stderr and "--overwrite" in result.stderr
    source.write_text("{\n" + json.dumps({"text": PUZZLES[0]["prompt"]}))
    result = run("batch", str(example_bundle), str(source), str(output), "--overwrite")
    assert result.exit_code == 0 and "1 line is bad" in result.stderr


def test_two_runs_at_once_are_refused(example_bundle: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_puzzles(source, 500)
    first = start("batch", str(example_bundle), str(source), str(output), "--threads", "1")
    partial = output.with_name("out.jsonl.partial")
    while not partial.exists():
        assert first.poll() is None
        time.sleep(0.01)
    result = run("batch", str(example_bundle), str(source), str(output))
    assert result.exit_code == 2 and "another run is writing it" in result.stderr
    first.send_signal(signal.SIGINT)
    code, _, stderr = finish(first)
    assert (code, "Interrupted: run the same command again" in stderr) == (130, True)


@pytest.mark.parametrize(
    ("source", "output", "said"),
    [("-", "out.jsonl", "resumable"), ("none.jsonl", "out.jsonl", "missing"), ("in.jsonl", "none/out", "no folder")],
)
def test_paths_that_cannot_be_used(tmp_path: Path, source: str, output: str, said: str) -> None:
    (tmp_path / "in.jsonl").touch()
    result = run("batch", str(tmp_path), source if source == "-" else str(tmp_path / source), str(tmp_path / output))
    assert result.exit_code == 2 and said in result.stderr
