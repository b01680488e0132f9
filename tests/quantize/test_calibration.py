"""Ranges of activations, against transformers' own model watched without modelopt and without shared modules."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

from dgcompile.checkpoint import Checkpoint
from dgcompile.errors import CalibrationError, InputError, MissingDependencyError
from dgcompile.progress import Advance, Progress
from dgcompile.quantize import calibration
from dgcompile.quantize.calibration import Calibration, CalibrationJob, calibrate, read_prompts
from dgcompile.recipe import weight_class

PROMPTS = ("Hello", "What is the sum of 2 and 3?", "x")
SEVERAL_JOBS = """
import json, sys
from dgcompile.errors import DgcompileError
from dgcompile.quantize.calibration import CalibrationJob
from dgcompile.quantize.calibration_worker import _calibrate

for values in json.load(sys.stdin):
    try:
        print("result", _calibrate(CalibrationJob(**values), lambda event: None).model_dump_json())
    except DgcompileError as error:
        print("result", json.dumps([type(error).__name__, str(error)]))
"""


def linear_weights(checkpoint: Checkpoint) -> list[str]:
    wanted = ("attention", "dense_mlp", "self_conditioning")
    return [name for name in checkpoint.spec.expected_tensors() if weight_class(name) in wanted]


def write_prompts(file: Path, *prompts: str) -> Path:
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "unused"}) + "\n" for prompt in prompts))
    return file


class Counting(Progress):
    """Counts what is done."""

    done = 0.0

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        assert (label, total, unit) == ("calibration", len(PROMPTS), "prompts")

        def advance(amount: float = 1.0, /) -> None:
            self.done += amount

        yield advance


@pytest.fixture(scope="module")
def calibrated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """The first PROMPTS; what follows them in the file is beyond the limit."""
    prompts = write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *PROMPTS, "beyond")
    opened, progress = Checkpoint.open(checkpoint), Counting()
    result = calibrate(opened, linear_weights(opened), prompts, progress, limit=len(PROMPTS))
    assert progress.done == len(PROMPTS)
    return result


def test_ranges_and_experts_are_those_of_the_plain_model(checkpoint: Path, calibrated: Calibration) -> None:
    plain: Any = DiffusionGemmaForBlockDiffusion
    model = plain.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    largest: dict[str, float] = defaultdict(float)
    tokens: dict[int, torch.Tensor] = {}
    last = len(model.model.decoder.layers) - 1

    def watch(name: str, module: torch.nn.Module) -> None:
        def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            largest[name] = max(largest[name], float(args[0].abs().max()))

        module.register_forward_pre_hook(hook)

    def count(layer: int, router: torch.nn.Module) -> None:
        def hook(_: Any, args: Any, output: tuple[torch.Tensor, ...]) -> None:
            for expert in output[2].flatten().tolist():
                tokens[layer][expert] += 1

        router.register_forward_hook(hook)

    for name, module in model.model.decoder.named_modules():
        if isinstance(module, torch.nn.Linear):
            watch(f"model.decoder.{name}.weight", module)
    for layer, module in enumerate(model.model.decoder.layers):
        tokens[layer] = torch.zeros(6, dtype=torch.int64)
        count(layer, module.router)
    for layer, module in enumerate(model.model.encoder.language_model.layers):
        for name, linear in module.named_modules():
            # Of the encoder's last layer, an engine computes keys and values only; queries are made of the same tensor.
            if isinstance(linear, torch.nn.Linear) and (
                layer != last or name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            ):
                watch(f"model.decoder.layers.{layer}.{name}.weight", linear)
        if layer != last:
            count(layer, module.router)

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    lengths = []
    for index, prompt in enumerate(PROMPTS):
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        lengths.append(len(ids))
        torch.manual_seed(index)
        model.generate(torch.tensor([ids]), max_new_tokens=2 * 16)

    names = linear_weights(Checkpoint.open(checkpoint))
    assert calibrated.input_amax == {name: pytest.approx(largest[name], rel=1e-5) for name in names}
    assert [use.tokens for use in calibrated.report.experts] == [tuple(tokens[layer].tolist()) for layer in tokens]
    assert calibrated.report.prompt_tokens == sum(lengths)
    decoder_tokens = int(tokens[last].sum()) // 2  # two experts a token
    assert calibrated.report.canvas_tokens == decoder_tokens > 16 * 2 * len(PROMPTS)


def test_layers_that_read_the_same_tensor_have_one_range(calibrated: Calibration) -> None:
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        ranges: dict[str, set[float]] = defaultdict(set)
        for name, amax in calibrated.input_amax.items():
            place, layer, _ = name.rsplit(".", 2)
            if layer in group:
                ranges[place].add(amax)
        assert ranges and all(len(found) == 1 for found in ranges.values())


def test_the_report_counts_experts_that_no_token_reached() -> None:
    use = calibration.ExpertUse(layer=3, tokens=(5, 0, 1, 0))
    assert use.unused == (1, 3)
    report = calibration.CalibrationReport(prompts=1, prompt_tokens=2, canvas_tokens=3, experts=(use, use))
    assert report.unused_experts == 4


def test_the_same_again_and_what_is_refused_inside_the_worker(
    checkpoint: Path, calibrated: Calibration, tmp_path: Path
) -> None:
    # One process for all of them: most of its time is imports.
    opened = Checkpoint.open(checkpoint)
    names = linear_weights(opened)
    good = CalibrationJob(str(checkpoint), names, list(enumerate(PROMPTS, 1)), True, "prompts.jsonl")

    one_step = shutil.copytree(checkpoint, tmp_path / "one_step")
    settings = json.loads((one_step / "generation_config.json").read_text())
    (one_step / "generation_config.json").write_text(json.dumps({**settings, "max_denoising_steps": 1}))

    infinite = shutil.copytree(checkpoint, tmp_path / "infinite")
    tensors = load_file(infinite / "model.safetensors")
    tensors["model.decoder.layers.1.mlp.up_proj.weight"][:] = 3e38
    save_file(tensors, infinite / "model.safetensors", metadata={"format": "pt"})

    jobs = [
        asdict(good),
        {**asdict(good), "checkpoint": str(one_step)},
        {**asdict(good), "checkpoint": str(infinite)},
        {**asdict(good), "prompts": [(7, "x" * 4097)]},
        {**asdict(good), "weights": [name for name in names if "self_conditioning" not in name], "prompts": [(1, "x")]},
    ]
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL_JOBS], input=json.dumps(jobs), capture_output=True, text=True, check=True
    )
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("result ")]
    assert len(results) == len(jobs), done.stderr
    again, zero, not_finite, too_long, fewer = results

    assert Calibration.model_validate(again).model_dump_json() == calibrated.model_dump_json()

    with pytest.raises(CalibrationError, match=r"self_conditioning\.gate_proj\.weight, .+ was zero or never"):
        calibration._refuse_missing_ranges(names, Calibration.model_validate(zero))

    assert not_finite[0] == "CalibrationError"
    assert "the input of model.decoder.layers.1.mlp.down_proj holds NaN or infinity" in not_finite[1]

    assert too_long[0] == "InputError"
    assert "prompts.jsonl, line 7: the prompt has" in too_long[1] and "at most 4080" in too_long[1]

    assert set(fewer["input_amax"]) == {name for name in names if "self_conditioning" not in name}


def test_the_first_prompts_are_read_by_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n  {"prompt": "b", "blanks": 3}\r\n{"prompt": "c"}')
    assert list(read_prompts(file, 9)) == [(1, "a"), (3, "b"), (4, "c")]
    assert list(read_prompts(file, 2)) == [(1, "a"), (3, "b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b'{"prompt": "a"}\n{"prompt": 3}\n', "line 2 has no prompt"),
        (b'{"prompt": "a"}\n{"text": "b"}\n', "line 2 has no prompt"),
        (b'{"prompt": " "}\n', "line 1 has no prompt"),
        (b'{"prompt": "a"}\n["b"]\n', "line 2 holds a list"),
        (b'{"prompt": "a"}\n\n{"prompt": "b"\n', "line 3 is not JSON"),
        (b'{"prompt": "\xff"}\n', "line 1 is not UTF-8"),
        (b'{"prompt": "' + b"x" * (1 << 20) + b'"}\n', "line 1 has more than 1048576 bytes"),
    ],
)
def test_malformed_prompts_are_refused_by_line(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text)
    with pytest.raises(InputError, match=message):
        list(read_prompts(file, 9))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.jsonl is missing"):
        list(read_prompts(tmp_path / "nothing.jsonl", 9))


def test_a_worker_that_dies_is_told_with_its_last_words(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import os, sys; print('no memory left', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(calibration, "_worker_command", lambda: [sys.executable, "-c", script])
    opened = Checkpoint.open(checkpoint)
    with pytest.raises(CalibrationError, match="was ended by SIGKILL; its last words: no memory left"):
        calibrate(opened, linear_weights(opened), write_prompts(tmp_path / "prompts.jsonl", "x"))


def test_the_worker_ends_with_its_parent(checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    # Would take an hour.
    job = CalibrationJob(str(checkpoint), linear_weights(opened), [(1, "x")] * 10_000, True, "prompts.jsonl")
    worker = subprocess.Popen(
        calibration._worker_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert worker.stdin and worker.stdout
    with worker:
        worker.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        worker.stdin.flush()
        assert json.loads(worker.stdout.readline()) == {"event": "prompt"}
        # What happens to the pipe when the parent dies.
        worker.stdin.close()
        assert worker.wait(timeout=20) == 1


def test_without_modelopt_the_extra_is_named(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "find_spec", lambda package: None if package == "modelopt" else object())
    opened = Checkpoint.open(checkpoint)
    with pytest.raises(
        MissingDependencyError, match=r"modelopt, which is not installed; pip install 'dgcompile\[build\]'"
    ):
        calibrate(opened, linear_weights(opened), write_prompts(tmp_path / "prompts.jsonl", "x"))


def test_only_linear_layers_have_one_input_range(checkpoint: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", "x")
    for name in ("model.decoder.layers.0.experts.down_proj", "model.decoder.norm.weight", "no.such.weight"):
        with pytest.raises(ValueError, match=name):
            calibrate(Checkpoint.open(checkpoint), [name], prompts)
