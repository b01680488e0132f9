"""``dgcompile bench``: the real command on a tiny model, beside transformers; what it refuses. No time is judged."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dgcompile.cli.bench import _seconds
from tests.cli.helpers import finish, run, start

VARIANT = "float32,eager"
SMALL = ("--prompt-tokens", "20", "--new-tokens", "40", "--steps", "3", "--turns", "2", "--threads", "1")


@pytest.fixture(scope="module")
def report(bundle: Path, checkpoint: Path) -> dict[str, Any]:
    """Two contenders of one model and transformers, with three pasts."""
    process = start(
        *("bench", str(bundle), str(bundle), "--against", "transformers", "--checkpoint", str(checkpoint)),
        *("--variant", VARIANT, *SMALL, "--past", "20", "--past", "7", "--past", "70", "--json"),
    )
    code, stdout, stderr = finish(process)
    assert code == 0, stderr
    found: dict[str, Any] = json.loads(stdout)
    return found


def test_report_says_what_was_measured(report: dict[str, Any]) -> None:
    assert report["settings"] == {
        "prompt_tokens": 20,
        "new_tokens": 40,
        "steps": 3,
        "pasts": [7, 20, 70],
        "threads": 1,
        "turns": 2,
        "seed": 0,
    }
    assert [(one["label"], one["kind"]) for one in report["contenders"]] == [
        ("A", "bundle"),
        ("B", "bundle"),
        ("C", "transformers"),
    ]
    assert report["contenders"][2]["title"] == VARIANT and report["probes"] == []
    assert report["machine"]["cpu"] and {"onnxruntime", "torch"} <= report["machine"]["packages"].keys()


def test_all_contenders_did_the_same_work(report: dict[str, Any]) -> None:
    """Canvases of 16: the end-to-end task has three, those at other pasts one, all of exactly three steps."""
    for one in report["contenders"]:
        assert len(one["turns"]) == 2
        for turn in one["turns"]:
            assert [[len(times) + 1 for times in task["step_seconds"]] for task in turn] == [[3, 3, 3], [3], [3]]
            assert [task["tokens"] for task in turn] == [40, 16, 16]
            assert [len(task["commit_seconds"]) for task in turn] == [2, 0, 0]


def test_figures_are_there_for_everyone(report: dict[str, Any]) -> None:
    names = (
        "encoder_seconds",
        "encoder_seconds_per_token",
        "generate_seconds",
        "tokens_per_second",
        "import_seconds",
        "open_seconds",
        "first_step_seconds",
        "load_seconds",
    )
    for one in report["contenders"]:
        assert list(one["step_seconds"]) == list(one["above_floor"]) == ["7", "20", "70"]
        for figure in [*one["step_seconds"].values(), *(one[name] for name in names)]:
            assert 0 < figure["low"] <= figure["median"] <= figure["high"]
            assert figure["ratio"] > 0
        assert len(one["generate_seconds"]["samples"]) == 2 and len(one["load_seconds"]["samples"]) == 3
        assert 0 < one["memory"]["peak_anonymous"] <= one["memory"]["peak_rss"] <= one["memory"]["since_start"]
    assert report["contenders"][0]["generate_seconds"]["ratio"] == 1


def test_a_samples_are_its_raw_times(report: dict[str, Any]) -> None:
    for one in report["contenders"]:
        whole = [turn[0] for turn in one["turns"]]
        assert one["generate_seconds"]["samples"] == [task["seconds"] for task in whole]
        assert one["encoder_seconds"]["samples"] == [task["prompt_seconds"] for task in whole]
        # Two steps of the first canvas were timed: their median is their mean.
        for past, place in (("20", 0), ("7", 1), ("70", 2)):
            expected = [sum(turn[place]["step_seconds"][0]) / 2 for turn in one["turns"]]
            assert one["step_seconds"][past]["samples"] == pytest.approx(expected)
        assert all(task["seconds"] > task["prompt_seconds"] + sum(map(sum, task["step_seconds"])) for task in whole)


def test_only_transformers_process_has_torch(report: dict[str, Any]) -> None:
    assert [one["has_torch"] for one in report["contenders"]] == [False, False, True]


def test_the_floor_is_measured_before_and_after(report: dict[str, Any]) -> None:
    floor = report["floor"]
    assert [rates["when"] for rates in floor["rates"]] == ["begin", "end"]
    best = max(product["flops_per_second"] for rates in floor["rates"] for product in rates["products"])
    assert floor["flops_per_second"] == best > 0
    assert {product["library"] for product in floor["rates"][0]["products"]} == {"numpy", "onnxruntime"}
    assert [step["past"] for step in floor["steps"]] == [7, 20, 70]
    for one in report["contenders"]:
        for step in floor["steps"]:
            expected = one["step_seconds"][str(step["past"])]["median"] / step["seconds"]
            assert one["above_floor"][str(step["past"])] == pytest.approx(expected)


def test_table_and_progress(bundle: Path) -> None:
    process = start("bench", str(bundle), *SMALL, "--turns", "1")
    code, stdout, stderr = finish(process)
    assert code == 0, stderr
    assert max(map(len, stdout.splitlines())) <= 80
    for words in ("step, past 20", "tokens/s", "memory, peak", "floor, float32", "3 steps a canvas", "recipe fp32"):
        assert words in stdout.replace("\n", " ").replace("           ", ""), words
    assert "floor of this machine (begin): done in" in stderr and "start the contenders: done in" in stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt-tokens", "4000", "--new-tokens", "400"), "--prompt-tokens 4000 and --new-tokens 400 take 4400"),
        (("--past", "4090"), "--past 4090 and a canvas take 4106 tokens"),
        (("--steps", "1"), "--steps is 1"),
        (("--turns", "0"), "--turns is 0"),
        (("--threads", "0"), "--threads is 0"),
        (("--seed", "-1"), "--seed is -1"),
        (("--against", "transformers"), "belong together"),
        (("--checkpoint", "somewhere"), "belong together"),
        (("--variant", VARIANT), "--against transformers"),
        (("--against", "vllm", "--checkpoint", "x"), "'vllm'"),
        (("--against", "transformers", "--checkpoint", "missing/there", "--variant", "fast"), "--variant is 'fast'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(
    bundle: Path, options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("dgcompile.bench.process.Worker.__init__", started)
    result = run("bench", str(bundle), *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr.replace("\n", " ")


def test_a_folder_that_is_no_bundle_and_a_checkpoint_of_another_model_are_refused(
    bundle: Path, checkpoint: Path, example_bundle: Path
) -> None:
    result = run("bench", str(checkpoint))
    assert result.exit_code == 2 and "it is a checkpoint" in result.stderr
    result = run("bench", str(bundle), str(example_bundle), *SMALL)
    assert result.exit_code == 2 and "is another model than" in result.stderr
    result = run("bench", str(example_bundle), "--against", "transformers", "--checkpoint", str(checkpoint), *SMALL)
    assert result.exit_code == 2 and "is another model than" in result.stderr
    assert run("bench").exit_code == 2


def test_a_contender_that_cannot_start_is_named_and_the_others_end(bundle: Path, tmp_path: Path) -> None:
    """Its manifest agrees with its files, as that of a bundle which was tampered with would."""
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    manifest = json.loads((broken / "manifest.json").read_text())
    for stage in manifest["stages"].values():
        for name in stage["files"]:
            if name.endswith("denoiser.onnx"):
                (broken / name).write_bytes(b"no graph")
                stage["files"][name] = {"size": 8, "sha256": hashlib.sha256(b"no graph").hexdigest()}
    (broken / "manifest.json").write_text(json.dumps(manifest))
    process = start("bench", str(bundle), str(broken), *SMALL)
    code, stdout, stderr = finish(process)
    assert code == 1 and not stdout
    assert f"Error: {broken}: " in stderr and "cannot load it" in stderr


def test_ctrl_c_leaves_no_process(bundle: Path) -> None:
    process = start("bench", str(bundle), *SMALL, "--turns", "1000")
    parent = psutil.Process(process.pid)
    try:
        children: list[psutil.Process] = []
        for _ in range(1200):
            found = [child for child in parent.children() if "bundle_worker" in " ".join(child.cmdline())]
            if found:
                children = parent.children(recursive=True)
                break
            time.sleep(0.05)
        assert children
        process.send_signal(signal.SIGINT)
        code, _, stderr = finish(process)
        assert code == 130 and "Interrupted" in stderr
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    finally:
        if process.poll() is None:
            process.kill()


def test_times_are_shown_with_three_digits_in_a_fitting_unit() -> None:
    shown = [_seconds(value) for value in (0.0000123, 0.000999, 0.0412, 0.412, 1.224, 12.34, 123.4)]
    assert shown == ["12.3 us", "999 us", "41.2 ms", "412 ms", "1.22 s", "12.3 s", "123 s"]
