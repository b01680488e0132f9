"""Writing a model repository and checking one, without a server."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dgcompile.bundle import Bundle
from dgcompile.errors import BundleError, RequestError
from dgcompile.serving.triton.check import check_repository
from dgcompile.serving.triton.parameters import Parameters
from dgcompile.serving.triton.repository import write_model
from tests.cli.helpers import run


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_written_is_right_in_the_eyes_of_the_check(bundle: Path, tmp_path: Path) -> None:
    repository = tmp_path / "a" / "model_repository"
    folder = write_model(bundle, repository, rows=4, queue_limit=9, threads=2)
    assert folder == repository / "diffusiongemma"
    assert files(repository) == {"diffusiongemma/config.pbtxt", "diffusiongemma/1/model.py"}
    report = check_repository(repository)
    assert (report.models, report.others, report.problems, report.notes) == (["diffusiongemma"], [], [], [])
    config = (folder / "config.pbtxt").read_text()
    for name, value in {"bundle": str(bundle), "rows": "4", "queue_limit": "9", "threads": "2"}.items():
        assert f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' in config


def test_a_copy_is_whole(bundle: Path, tmp_path: Path) -> None:
    folder = write_model(bundle, tmp_path, copy=True)
    copied = folder / "1" / "bundle"
    assert Bundle.open(copied).manifest == Bundle.open(bundle).manifest
    assert (bundle / "weights.safetensors").stat().st_nlink == 1  # ONNX's checker refuses a file with two names
    assert check_repository(tmp_path).problems == []
    # The repository is moved as a whole.
    moved = tmp_path.parent / "moved_repository"
    tmp_path.rename(moved)
    assert check_repository(moved).problems == []
    moved.rename(tmp_path)


def test_a_full_disk_leaves_the_old_model_and_nothing_else(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(bundle, tmp_path, rows=3)
    before = (tmp_path / "diffusiongemma" / "config.pbtxt").read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_model(bundle, tmp_path, copy=True, overwrite=True)
    assert files(tmp_path) == {"diffusiongemma/config.pbtxt", "diffusiongemma/1/model.py"}
    assert (tmp_path / "diffusiongemma" / "config.pbtxt").read_bytes() == before


def test_only_what_was_written_here_is_overwritten(bundle: Path, tmp_path: Path) -> None:
    write_model(bundle, tmp_path, copy=True)
    with pytest.raises(RequestError, match="--overwrite"):
        write_model(bundle, tmp_path)
    write_model(bundle, tmp_path, overwrite=True)
    assert files(tmp_path) == {"diffusiongemma/config.pbtxt", "diffusiongemma/1/model.py"}
    (tmp_path / "diffusiongemma" / "config.pbtxt").write_text('backend: "python"\n')
    with pytest.raises(RequestError, match="was not written by dgcompile"):
        write_model(bundle, tmp_path, overwrite=True)
    assert (tmp_path / "diffusiongemma" / "config.pbtxt").read_text() == 'backend: "python"\n'


def test_a_killed_overwrite_is_put_right_by_the_next(bundle: Path, tmp_path: Path) -> None:
    folder = write_model(bundle, tmp_path)
    folder.rename(tmp_path / ".diffusiongemma.old")  # killed between its two renames
    (tmp_path / ".diffusiongemma.partial").mkdir()
    with pytest.raises(RequestError, match="--overwrite"):
        write_model(bundle, tmp_path)
    assert folder.is_dir()
    write_model(bundle, tmp_path, overwrite=True)
    assert files(tmp_path) == {"diffusiongemma/config.pbtxt", "diffusiongemma/1/model.py"}


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "-x", "x" * 101, 'a"b', "a\n"])
def test_names_that_are_no_folder_of_a_model_are_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="name is"):
        write_model(bundle, tmp_path, name=name)
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_checked_before_anything_is_written(bundle: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for options in ({"rows": 0}, {"queue_limit": -1}, {"threads": 0}, {"bundle_path_there": "relative/path"}):
        with pytest.raises(RequestError):
            write_model(bundle, repository, **options)  # type: ignore[arg-type]
    with pytest.raises(BundleError):
        write_model(tmp_path / "none", repository)
    assert not repository.exists()


def test_paths_with_any_character_survive_the_configuration(bundle: Path, tmp_path: Path) -> None:
    there = '/bundles/a "quoted" back\\slash é/dg'
    write_model(bundle, tmp_path, bundle_path_there=there)
    report = check_repository(tmp_path)
    assert report.problems == []
    assert len(report.notes) == 1 and there in report.notes[0]


CHANGES: dict[str, tuple[str, str, str]] = {
    "no backend": ('backend: "python"', "", "backend is ''"),
    "another backend": ('backend: "python"', 'backend: "onnxruntime"', "backend is 'onnxruntime'"),
    "another name": ('name: "diffusiongemma"', 'name: "other"', "name is 'other'"),
    "Triton's batches": ("max_batch_size: 0", "max_batch_size: 8", "max_batch_size is 8"),
    "a scheduler": ("max_batch_size: 0", "max_batch_size: 0\ndynamic_batching { }", "dynamic_batching is set"),
    "not decoupled": ("decoupled: true", "decoupled: false", "not decoupled"),
    "two instances": ("count: 1", "count: 2", "count is 2"),
    "no instance": ("instance_group [", "# instance_group [", "there are 0 instance groups"),
    "an instance on every GPU": ("KIND_CPU", "KIND_GPU", "kind is KIND_GPU"),
    "no inputs": ("\ninput [", "\n# input [", "input TEXT is missing"),
    "an input twice": ('name: "PROMPT"', 'name: "TEXT"', "'TEXT' is there 2 times"),
    "an unknown input": ('name: "STOP"', 'name: "STOPS"', "'STOPS' is none of the model's"),
    "a narrow input": ('name: "MAX_TOKENS" data_type: TYPE_INT64', 'name: "MAX_TOKENS" data_type: TYPE_INT32', "INT32"),
    "other dims": (
        '"INPUT_IDS" data_type: TYPE_INT64 dims: [ -1 ]',
        '"INPUT_IDS" data_type: TYPE_INT64 dims: [ 8 ]',
        "[8]",
    ),
    "a needed input": (
        'name: "SEED" data_type: TYPE_UINT64 dims: [ 1 ] optional: true',
        'name: "SEED" data_type: TYPE_UINT64 dims: [ 1 ]',
        "SEED is not optional",
    ),
    "a ragged input": ('name: "STREAM"', 'allow_ragged_batch: true name: "STREAM"', "STREAM has allow_ragged_batch"),
    "an unknown field": ("max_batch_size: 0", "max_batches: 0", "max_batches"),
    "a bad value": ("TYPE_BOOL", "TYPE_BOOLEAN", "TYPE_BOOLEAN"),
    "no text format": ("max_batch_size: 0", "max_batch_size 0 {{{", "line"),
    "an unknown parameter": ('key: "rows"', 'key: "row"', "row"),
    "a parameter that is no number": ('string_value: "4"', 'string_value: "four"', "rows is 'four'"),
    "no bundle": ('key: "bundle"', 'key: "EXECUTION_ENV_PATH"', "bundle is missing"),
    "a bundle that is not there": ('string_value: "/', 'string_value: "/nowhere/', "there is no such folder"),
    "another runtime": ("max_batch_size: 0", 'max_batch_size: 0\nruntime: "foo"', "runtime is 'foo'"),
    "a response cache": ("max_batch_size: 0", "max_batch_size: 0\nresponse_cache { enable: true }", "response cache"),
    "no such version": (
        "max_batch_size: 0",
        "max_batch_size: 0\nversion_policy { specific { versions: [3] } }",
        "versions that are not there: [3]",
    ),
    "an empty warm-up": (
        "max_batch_size: 0",
        'max_batch_size: 0\nmodel_warmup { name: "w" batch_size: 0 }',
        "model_warmup 'w' has no inputs",
    ),
    "another file": (
        "max_batch_size: 0",
        'max_batch_size: 0\ndefault_model_filename: "m.py"',
        "default_model_filename",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_check_sees(bundle: Path, tmp_path: Path, case: str) -> None:
    old, new, complaint = CHANGES[case]
    config = write_model(bundle, tmp_path, rows=4) / "config.pbtxt"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    problems = check_repository(tmp_path).problems
    assert any(complaint in problem.found and problem.file == str(config) for problem in problems), problems
    assert all(problem.fix for problem in problems)


def test_the_check_sees_files_that_are_missing_or_misplaced(bundle: Path, tmp_path: Path) -> None:
    folder = write_model(bundle, tmp_path)
    (folder / "1" / "model.py").unlink()
    (found,) = check_repository(tmp_path).problems
    assert found.file == str(folder / "1" / "model.py") and "for ever" in found.found

    (folder / "1" / "model.py").write_text("# dgcompile\n")
    (found,) = check_repository(tmp_path).problems
    assert "has no TritonPythonModel" in found.found
    (folder / "1" / "model.py").unlink()

    (folder / "1").rename(folder / "v1")
    assert [problem.file for problem in check_repository(tmp_path).problems] == [str(folder / "v1"), str(folder / "1")]

    shutil.rmtree(folder / "v1")
    write_model(bundle, tmp_path, overwrite=True)
    (folder / "config.pbtxt").write_bytes(b"# Written by dgcompile\n\xff")
    (found,) = check_repository(tmp_path).problems
    assert "UTF-8" in found.found

    (folder / "config.pbtxt").unlink()
    (found,) = check_repository(tmp_path).problems
    assert (found.file, found.found) == (str(folder / "config.pbtxt"), "missing")
    os.mkfifo(folder / "config.pbtxt")
    (found,) = check_repository(tmp_path).problems
    assert (found.file, found.found) == (str(folder / "config.pbtxt"), "is no file")
    (folder / "config.pbtxt").unlink()

    problems = check_repository(folder).problems  # one folder too deep
    assert any("no model of dgcompile" in problem.found for problem in problems)


def test_a_damaged_bundle_is_seen(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(bundle, tmp_path, copy=True)
    weights = folder / "1" / "bundle" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()
    weights.write_bytes(data)
    (found,) = check_repository(tmp_path).problems
    assert "damaged" in found.found


def test_parameters_of_the_python_backend_are_left_alone() -> None:
    parameters = Parameters.from_config({"bundle": "bundle", "EXECUTION_ENV_PATH": "/env.tar.gz"})
    assert (parameters.bundle, parameters.rows, parameters.bundle_elsewhere) == ("bundle", None, False)


def test_command_line(bundle: Path, tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    result = run("triton", str(bundle), "-o", str(repository), "--name", "dg", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"model": "dg", "folder": str(repository / "dg")}
    (repository / "other" / "1").mkdir(parents=True)
    (repository / "other" / "1" / "model.onnx").touch()

    result = run("triton", "--check", str(repository))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"note: {repository / 'other'} was not written by dgcompile: not checked",
        "dg: nothing is wrong",
    ]

    config = repository / "dg" / "config.pbtxt"
    config.write_text(config.read_text().replace('backend: "python"', ""))
    result = run("triton", "--check", str(repository))
    assert result.exit_code == 2
    assert result.stdout.splitlines()[0] == (
        f"{config}: backend is '', which Triton does not check; write backend: \"python\""
    )
    report = json.loads(run("triton", "--check", str(repository), "--json").stdout)
    assert (report["models"], report["others"], len(report["problems"])) == (["dg"], ["other"], 1)

    for arguments in (
        [],
        [str(bundle)],
        ["--check", str(repository), "--rows", "3"],
        [str(bundle), "-o", "x", "--copy", "--bundle-path", "/x"],
    ):
        result = run("triton", *arguments)
        assert result.exit_code == 2
        assert "Usage" in result.stderr
    assert run("triton", "--check", str(tmp_path / "none")).exit_code == 2
