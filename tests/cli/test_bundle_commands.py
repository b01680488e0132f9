"""build, generate, inspect and verify on a real bundle."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dgcompile.bundle import Manifest
from dgcompile.cli.text import printable
from tests.cli.helpers import ESCAPE, finish, run, start

PROMPT = "tell me about rings"


def test_generate_writes_the_text_to_stdout_and_the_statistics_to_stderr(bundle: Path) -> None:
    process = start("generate", str(bundle), PROMPT, "--seed", "3", text=False)
    stdout, stderr = (stream.decode() for stream in process.communicate(timeout=120))  # type: ignore[attr-defined]
    assert process.returncode == 0 and ESCAPE not in stderr
    facts = json.loads(run("generate", str(bundle), PROMPT, "--seed", "3", "--json").stdout)
    assert stdout == facts["text"].rstrip("\n") + "\n"
    assert f"{facts['tokens']} tokens in" in stderr and "seed 3" in stderr
    assert facts["tokens"] == len(facts["token_ids"]) > 0
    assert facts["finish_reason"] in ("eos", "length")
    assert len(facts["steps_per_canvas"]) >= 1 and facts["seconds"] > 0 and facts["tokens_per_second"] > 0


def test_generate_is_what_the_library_generates(bundle: Path) -> None:
    from dgcompile.runtime.pipeline import Pipeline

    pipeline = Pipeline.open(bundle)
    token_ids = pipeline.encode([{"role": "user", "content": PROMPT}])
    config = pipeline.bundle.generation.replace(max_new_tokens=20, max_denoising_steps=3, t_max=0.9, entropy_bound=0.2)
    expected = pipeline.generate([token_ids], config, [11])[0]
    options = ["--max-new-tokens", "20", "--max-denoising-steps", "3", "--t-max", "0.9", "--entropy-bound", "0.2"]
    facts = json.loads(run("generate", str(bundle), PROMPT, "--seed", "11", "--json", *options).stdout)
    assert facts["token_ids"] == expected.token_ids
    assert facts["steps_per_canvas"] == expected.steps_per_canvas
    assert facts["prompt_tokens"] == len(token_ids)


def test_a_prompt_from_stdin_is_the_same_prompt(bundle: Path) -> None:
    given = run("generate", str(bundle), PROMPT, "--json").stdout
    ids = json.loads(given)["token_ids"]
    assert json.loads(run("generate", str(bundle), "-", "--json", stdin=PROMPT).stdout)["token_ids"] == ids
    assert json.loads(run("generate", str(bundle), "--json", stdin=PROMPT).stdout)["token_ids"] == ids


def test_raw_leaves_the_chat_template_out(bundle: Path) -> None:
    chat = json.loads(run("generate", str(bundle), PROMPT, "--json").stdout)
    raw = json.loads(run("generate", str(bundle), PROMPT, "--raw", "--json").stdout)
    assert raw["prompt_tokens"] < chat["prompt_tokens"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--t-min", "2", "--t-max", "1"], "t_max"),
        (["--entropy-bound", "nan"], "entropy_bound"),
        (["--max-new-tokens", "100000"], "max_context"),
        (["--threads", "0"], "threads"),
        (["--seed", "-1"], "seed"),
        (["--max-denoising-steps", "many"], "--max-denoising-steps"),
    ],
)
def test_bad_options_are_named_and_exit_2(bundle: Path, args: list[str], named: str) -> None:
    result = run("generate", str(bundle), PROMPT, *args)
    assert result.exit_code == 2 and named in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stderr


def test_an_empty_prompt_is_refused(bundle: Path) -> None:
    result = run("generate", str(bundle), "", "--raw")
    assert result.exit_code == 2 and "empty" in result.stderr


def test_a_prompt_that_is_no_text_is_refused(bundle: Path) -> None:
    process = start("generate", str(bundle), "-", stdin=subprocess.PIPE, text=False)
    _, stderr = process.communicate(b"\xff\xfe", timeout=120)  # type: ignore[arg-type]
    assert process.returncode == 2 and b"not UTF-8" in stderr
    code, _, message = finish(start("generate", str(bundle), os.fsdecode(b"caf\xe9")))
    assert code == 2 and "not UTF-8" in message


@pytest.mark.parametrize("name", ["generate", "inspect", "verify"])
def test_a_missing_bundle_exits_2_and_names_it(name: str, tmp_path: Path, checkpoint: Path) -> None:
    more = {"generate": [PROMPT], "inspect": [], "verify": ["--against", str(checkpoint), "--prompts", "p.jsonl"]}[name]
    result = run(name, str(tmp_path / "nowhere"), *more)
    assert result.exit_code == 2
    assert "nowhere" in result.stderr or "p.jsonl" in result.stderr


def test_watch_writes_a_plain_line_per_step_where_there_is_no_terminal(bundle: Path) -> None:
    result = run("generate", str(bundle), PROMPT, "--watch", "--json", "--max-new-tokens", "40")
    facts = json.loads(result.stdout)
    lines = [line for line in result.stderr.splitlines() if line.startswith("canvas ")]
    assert len(lines) == sum(facts["steps_per_canvas"])
    assert lines[0].startswith("canvas 1, step 1 of ") and "accepted, mean entropy" in lines[0]
    assert lines[-1].startswith(f"canvas {len(facts['steps_per_canvas'])}, step {facts['steps_per_canvas'][-1]} of ")
    assert ESCAPE not in result.stderr
    # Watching changes nothing.
    again = json.loads(run("generate", str(bundle), PROMPT, "--json", "--max-new-tokens", "40").stdout)
    assert again["token_ids"] == facts["token_ids"]


def _on_a_terminal(*args: str, env: dict[str, str]) -> tuple[int, str]:
    """Runs a command on a terminal of 80 by 24: (exit code, everything that it drew)."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    process = start(*args, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    drawn = b""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            drawn += part
    os.close(ours)
    return process.wait(timeout=10), drawn.decode(errors="replace")


def test_watch_draws_the_canvas_on_a_terminal_and_leaves_the_text(bundle: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    env.pop("NO_COLOR", None)
    options = ["--max-new-tokens", "40", "--seed", "1"]
    code, drawn = _on_a_terminal("generate", str(bundle), PROMPT, "--watch", *options, env=env)
    assert code == 0
    assert "canvas 1, step 1 of" in drawn and "canvas 2, step 1 of" in drawn
    assert f"{ESCAPE}[1m" in drawn and f"{ESCAPE}[2;3m" in drawn, "accepted tokens are bold, guesses dim"
    text = json.loads(run("generate", str(bundle), PROMPT, "--json", *options).stdout)["text"]
    # The terminal's driver ends lines with a carriage return too.
    assert printable(text).rstrip("\n").replace("\n", "\r\n") in drawn


def test_no_color_leaves_no_colours_on_a_terminal(bundle: Path) -> None:
    env = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": "80"}
    for args in (["inspect", str(bundle)], ["targets"]):
        code, drawn = _on_a_terminal(*args, env=env)
        assert code == 0
        colours = [code for code in drawn.split(ESCAPE)[1:] if code.startswith(("[3", "[4", "[9"))]
        assert not [code for code in colours if code.partition("m")[0].strip("[") not in ("3", "4")]


def test_inspect_shows_files_stages_and_model(bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    shown = run("inspect", str(bundle)).stdout
    for name, record in manifest.files.items():
        assert name in shown and record.sha256[:12] in shown
    assert "finished" in shown and "fp32" in shown and manifest.checkpoint[:32] in shown.replace("\n", "")
    assert max(map(len, shown.splitlines())) <= 80
    facts = json.loads(run("inspect", str(bundle), "--json").stdout)
    assert facts["spec"]["canvas_length"] == manifest.spec.canvas_length
    assert facts["verified"] is False


def test_inspect_verify_finds_a_flipped_byte(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    assert json.loads(run("inspect", str(copy), "--verify", "--json").stdout)["verified"] is True
    data = bytearray((copy / "denoiser.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "denoiser.onnx").write_bytes(data)
    result = run("inspect", str(copy), "--verify")
    assert result.exit_code == 2 and "denoiser.onnx" in result.stderr
    assert run("inspect", str(copy)).exit_code == 0


def test_build_again_only_checks_and_reports(bundle: Path, checkpoint: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in bundle.iterdir()}
    result = run("build", str(checkpoint), "--target", "cpu", "-o", str(bundle), "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["bundle"] == str(bundle) and facts["target"] == "cpu" and facts["recipe"] == "fp32"
    assert facts["bytes"] == sum(record.size for record in Manifest.read(bundle).files.values())
    after = {path.name: path.stat().st_mtime_ns for path in bundle.iterdir()}
    assert after.items() >= before.items()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--target", "h900"], "h900"),
        (["--target", "h100"], "head_dim is 8"),
        (["--target", "h100", "--recipe", "fp32"], "float32"),
        (["--target", "cpu", "--max-batch", "2"], "max_batch"),
        (["--recipe", "fp32"], "--target is missing"),
        (["--target", "cpu", "--recipe", "int3"], "int3"),
        (["--target", "cpu", "--max-context", "3"], "max_context"),
    ],
)
def test_a_build_that_cannot_be_is_refused_before_any_work(
    checkpoint: Path, tmp_path: Path, args: list[str], named: str
) -> None:
    result = run("build", str(checkpoint), *args, "-o", str(tmp_path / "out"))
    assert result.exit_code == 2 and named in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_ctrl_c_during_build_is_130_and_the_same_command_finishes(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    args = ("build", str(checkpoint), "--target", "cpu", "-o", str(out))
    process = start(*args)
    deadline = time.monotonic() + 120
    # The first stage is done, so the second, which takes seconds, is running.
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "manifest.json").exists() and Manifest.read(out).stages["assets"].state == "finished":
            break
        time.sleep(0.02)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(process)
    assert code == 130, stderr
    assert stdout == "" and "Traceback" not in stderr
    assert "Interrupted: run the same command again" in stderr
    manifest = Manifest.read(out)
    assert manifest.unfinished and manifest.stages["assets"].state == "finished"
    refused = run("generate", str(out), PROMPT)
    assert refused.exit_code == 2 and "unfinished" in refused.stderr
    assert "unfinished" in run("inspect", str(out)).stdout

    assert finish(start(*args))[0] == 0
    assert run("generate", str(out), PROMPT, "--max-new-tokens", "1").exit_code == 0


def test_ctrl_c_during_generate_is_130(bundle: Path) -> None:
    options = ["--max-new-tokens", "3000", "--max-denoising-steps", "5000", "--watch"]
    process = start("generate", str(bundle), PROMPT, *options, "--t-min", "50", "--t-max", "51")
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first.startswith("canvas 1, step 1 of 5000"), first + process.stderr.read()
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(process)
    assert code == 130
    assert stdout == "" and "Traceback" not in stderr and stderr.rstrip().endswith("Interrupted")


def test_verify_agrees_and_exits_0(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n" + json.dumps({"prompt": "another one"}) + "\n")
    args = ["--against", str(checkpoint), "--prompts", str(prompts), "--pairs", "4"]
    result = run("verify", str(bundle), *args)
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "of 4 pairs" in result.stdout and "says what transformers says" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_verify_of_another_checkpoint_differs_and_exits_1(bundle: Path, tmp_path: Path) -> None:
    from tests.models import random_checkpoint

    other = random_checkpoint(tmp_path / "other", seed=1)
    (other / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    result = run("verify", str(bundle), "--against", str(other), "--pairs", "1")
    assert result.exit_code == 1, result.stdout + result.stderr
    assert "DIFFERS" in result.stdout and "FAILURE" in result.stdout and "NOT what" in result.stdout
    report = json.loads(run("verify", str(bundle), "--against", str(other), "--pairs", "1", "--json").stdout)
    assert report["ok"] is False and report["failures"] > 0


def test_verify_without_prompts_says_where_they_come_from(bundle: Path, checkpoint: Path) -> None:
    result = run("verify", str(bundle), "--against", str(checkpoint))
    assert result.exit_code == 2 and "prompts.jsonl" in result.stderr and "--prompts" in result.stderr
