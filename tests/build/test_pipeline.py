"""Which stages run, which output folders are refused, and what is refused before any work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dgcompile.build import DEFAULT_MAX_CONTEXT, build, resolve_max_context
from dgcompile.build.limits import resolve_max_batch
from dgcompile.bundle import MANIFEST_FILE, WEIGHTS_FILE, Bundle, Manifest
from dgcompile.errors import (
    BundleError,
    CheckpointError,
    InputError,
    MissingDependencyError,
    RecipeError,
    StageError,
    TargetError,
)
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Advance, Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Target
from tests.build.helpers import content, cpu_build


@pytest.fixture
def folder(bundle: Path, tmp_path: Path) -> Path:
    """A finished bundle that a test may change."""
    return shutil.copytree(bundle, tmp_path / "bundle")


@pytest.fixture
def other_weights(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint with one weight changed."""
    changed = shutil.copytree(checkpoint, tmp_path / "other")
    file = changed / "model.safetensors"
    tensors = load_file(file)
    tensors["model.decoder.norm.weight"] = tensors["model.decoder.norm.weight"] + torch.tensor(1, dtype=torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    return changed


class Stopping(Progress):
    """Presses Ctrl-C when a task starts."""

    def __init__(self, label: str) -> None:
        self.label = label

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        if label == self.label:
            raise KeyboardInterrupt
        with super().task(label, total, unit) as advance:
            yield advance


def build_until(label: str, checkpoint: Path, output: Path, *, overwrite: bool = False) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(
            checkpoint,
            Target.load("cpu"),
            Recipe.load("fp32"),
            output,
            overwrite=overwrite,
            progress=Stopping(label),
        )


def test_the_bundle_holds_what_the_manifest_lists_and_nothing_else(bundle: Path, checkpoint: Path) -> None:
    opened = Bundle.open(bundle)
    assert set(content(bundle)) == {MANIFEST_FILE, *opened.manifest.files}
    manifest = (bundle / MANIFEST_FILE).read_text()
    assert str(bundle) not in manifest and str(checkpoint) not in manifest
    assert opened.manifest.stages["trace"].tools.keys() >= {"python", "torch", "transformers", "onnx", "onnxscript"}
    assert opened.max_context == opened.spec.max_position_embeddings == 4096
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (bundle / name).read_bytes() == (checkpoint / name).read_bytes()
    for name in content(bundle):
        assert str(bundle.parent).encode() not in (bundle / name).read_bytes(), name


def test_a_finished_bundle_is_only_checked(checkpoint: Path, folder: Path, bundle: Path) -> None:
    assert cpu_build(checkpoint, folder) == []
    assert content(folder) == content(bundle)


def test_only_the_stage_whose_inputs_changed_is_redone(checkpoint: Path, folder: Path, bundle: Path) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["stages"]["engine"]["inputs"] = "0" * 64  # as another version of onnxruntime would have left it
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert cpu_build(checkpoint, folder) == ["engine"]
    assert content(folder) == content(bundle)


@pytest.mark.parametrize(
    ("name", "stage"), [(WEIGHTS_FILE, "weights"), ("tokenizer.json", "assets"), ("generation_config.json", "assets")]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_made_again(
    checkpoint: Path, folder: Path, bundle: Path, name: str, stage: str, damage: str
) -> None:
    path = folder / name
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:] if damage == "flip" else data[:-1])
    with pytest.raises(BundleError, match=f"{name}.*the `dgcompile build` command that made it"):
        Bundle.open(folder)
    assert cpu_build(checkpoint, folder) == [stage]
    assert content(folder) == content(bundle)


def test_another_max_context_needs_overwrite_and_no_work(checkpoint: Path, folder: Path, bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"max_context 4096 instead of 100; .*--overwrite"):
        cpu_build(checkpoint, folder, max_context=100)
    assert content(folder) == content(bundle)
    assert cpu_build(checkpoint, folder, max_context=100, overwrite=True) == []
    assert Bundle.open(folder).max_context == 100


def test_another_checkpoint_needs_overwrite_and_only_its_weights(
    other_weights: Path, folder: Path, bundle: Path
) -> None:
    with pytest.raises(BundleError, match="holds a bundle of another build: another checkpoint"):
        cpu_build(other_weights, folder)
    assert content(folder) == content(bundle)
    assert cpu_build(other_weights, folder, overwrite=True) == ["weights", "engine"]
    before = content(bundle)
    changed = {name for name, digest in content(folder).items() if digest != before[name]}
    assert changed == {MANIFEST_FILE, WEIGHTS_FILE}


def test_a_bundle_replaced_half_way_is_neither_the_old_nor_the_new_one(
    checkpoint: Path, other_weights: Path, folder: Path
) -> None:
    build_until("weights", other_weights, folder, overwrite=True)
    with pytest.raises(BundleError, match="stage weights is to be done"):
        Bundle.open(folder)
    with pytest.raises(BundleError, match="another checkpoint"):
        cpu_build(checkpoint, folder)
    assert cpu_build(other_weights, folder) == ["weights", "engine"]


def test_a_bundle_of_another_model_keeps_nothing(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["spec"]["rms_norm_eps"] = 1e-5
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    build_until("assets", checkpoint, folder, overwrite=True)
    assert Manifest.read(folder).unfinished == ("assets", "trace", "weights", "engine")
    assert Manifest.read(folder).graphs == {}


def test_files_that_the_new_bundle_lacks_are_removed(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(checkpoint, tmp_path / "plain")
    for path in [*plain.glob("tokenizer*"), plain / "chat_template.jinja"]:
        path.unlink()
    (folder / "weights.safetensors.journal").write_text("left behind")
    (folder / "encoder.onnx.partial").write_text("left behind")
    assert cpu_build(plain, folder) == ["assets"]
    assert set(content(folder)) == {MANIFEST_FILE, *Bundle.open(folder).manifest.files}
    assert Bundle.open(folder).tokenizer_file is None


@pytest.mark.parametrize("data", [b"{", b'{"format_version": 2}', b'{"name": "a web page"}'])
def test_an_unreadable_manifest_needs_overwrite(checkpoint: Path, folder: Path, data: bytes) -> None:
    (folder / MANIFEST_FILE).write_bytes(data)
    with pytest.raises(BundleError, match=MANIFEST_FILE):
        cpu_build(checkpoint, folder)
    assert (folder / MANIFEST_FILE).read_bytes() == data
    (folder / "thesis.txt").write_text("the only copy")
    with pytest.raises(BundleError, match=r"holds thesis\.txt"):
        cpu_build(checkpoint, folder, overwrite=True)
    assert (folder / MANIFEST_FILE).read_bytes() == data
    (folder / "thesis.txt").unlink()
    build_until("trace", checkpoint, folder, overwrite=True)
    assert Manifest.read(folder).unfinished == ("trace", "weights", "engine")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_bundle_is_never_touched(checkpoint: Path, tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "thesis.txt").write_text("the only copy")
    before = content(folder)
    with pytest.raises(BundleError, match=r"not a bundle and not empty: it holds thesis\.txt; .*another output folder"):
        cpu_build(checkpoint, folder, overwrite=overwrite)
    assert content(folder) == before
    with pytest.raises(BundleError, match="not a bundle and not empty"):
        cpu_build(checkpoint, checkpoint, overwrite=overwrite)
    (folder / "thesis.txt").rename(folder / "thesis.partial")
    with pytest.raises(BundleError, match=r"holds thesis\.partial"):
        cpu_build(checkpoint, folder, overwrite=overwrite)
    assert content(folder) == {"thesis.partial": before["thesis.txt"]}


def test_an_output_that_cannot_be_written_is_refused_before_any_work(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(BundleError, match="is a file"):
        cpu_build(checkpoint, file)
    # Nobody, not even root, makes folders in these.
    for folder in (file / "below", Path("/sys/dgcompile-test"), Path("/proc/dgcompile-test")):
        with pytest.raises(BundleError, match="cannot be written") as caught:
            cpu_build(checkpoint, folder)
        assert str(folder) in str(caught.value)


def test_an_empty_folder_and_one_that_a_killed_build_just_made_are_used(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("")
    (tmp_path / "manifest.json.partial").write_text('{"half": ')
    (tmp_path / "weights.safetensors.partial").write_text("")
    build_until("trace", checkpoint, tmp_path)
    assert Manifest.read(tmp_path).unfinished == ("trace", "weights", "engine")


def test_what_no_kernel_runs_on_is_refused_before_any_work(checkpoint: Path, tmp_path: Path) -> None:
    rtx5090, bf16 = Target.load("rtx5090"), Recipe.load("bf16")
    ampere = rtx5090.model_copy(update={"name": "ampere", "compute_capability": "8.6"})
    with pytest.raises(
        TargetError, match=r"target 'ampere' has compute capability 8.6, .* no kernels; expected 8.9 or 9.0 or 12.0"
    ):
        build(checkpoint, ampere, bf16, tmp_path / "out")
    with pytest.raises(TargetError, match=r"the model cannot run on compute capability 12\.0: head_dim is 8"):
        build(checkpoint, rtx5090, bf16, tmp_path / "out")
    with pytest.raises(RecipeError, match="'fp32' computes in float32"):
        build("/no/such/checkpoint", rtx5090, Recipe.load("fp32"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_max_batch_is_for_gpus(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_batch was given for target cpu"):
        build(checkpoint, Target.load("cpu"), Recipe.load("fp32"), tmp_path / "out", max_batch=2)
    with pytest.raises(InputError, match="max_batch is 0; expected 1 to 64"):
        resolve_max_batch(Target.load("rtx5090"), 0)


def test_bad_input_leaves_no_folder_behind(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, cpu, recipe = tmp_path / "out", Target.load("cpu"), Recipe.load("fp32")
    with pytest.raises(CheckpointError, match="/no/such/checkpoint"):
        build("/no/such/checkpoint", cpu, recipe, output)
    with pytest.raises(RecipeError, match="fp32"):
        build(checkpoint, cpu.model_copy(update={"weight_formats": ("int4",)}), recipe, output)
    with pytest.raises(InputError, match=r"max_context is 16; expected 17 .* to 4096"):
        build(checkpoint, cpu, recipe, output, max_context=16)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingDependencyError, match=r"onnxscript.*pip install 'dgcompile\[build\]'"):
        build(checkpoint, cpu, recipe, output)
    assert not output.exists()


def test_a_tokenizer_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        cpu_build(broken, tmp_path / "out")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["beyond"] = 288
    (broken / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="largest token id is 288; expected below vocab_size 288"):
        cpu_build(broken, tmp_path / "out")


def test_whatever_else_goes_wrong_names_the_stage(checkpoint: Path, folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()

    class Failing(Progress):
        @contextmanager
        def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
            if label == "weights":
                raise RuntimeError("the terminal went away\nand more")
            with super().task(label, total, unit) as advance:
                yield advance

    with pytest.raises(StageError, match=r"^stage weights failed: RuntimeError: the terminal went away; ") as caught:
        build(checkpoint, Target.load("cpu"), Recipe.load("fp32"), folder, progress=Failing())
    assert "\n" not in str(caught.value)


@given(canvas=st.integers(1, 300), limit=st.integers(1, 20_000), requested=st.none() | st.integers(-5, 30_000))
def test_max_context_always_leaves_room_for_a_prompt_and_a_canvas(
    canvas: int, limit: int, requested: int | None
) -> None:
    spec = ModelSpec.model_construct(canvas_length=canvas, max_position_embeddings=limit)
    allowed = canvas < limit if requested is None else canvas < requested <= limit
    if not allowed:
        with pytest.raises(InputError):
            resolve_max_context(spec, requested)
        return
    context = resolve_max_context(spec, requested)
    assert context == (min(limit, DEFAULT_MAX_CONTEXT) if requested is None else requested)


def test_importing_the_build_does_not_import_what_only_its_stages_need() -> None:
    code = (
        "import sys, dgcompile.build\nprint(sorted({'torch', 'transformers', 'onnx', 'onnxscript'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
