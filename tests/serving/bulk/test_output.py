"""The output on disk: refusals, and every moment at which a run can be killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dgcompile.errors import RequestError
from dgcompile.serving.bulk.output import OutputFiles, RunState, append_to
from dgcompile.serving.bulk.records import Written

STATE = RunState(input_sha256="a", bundle_sha256="b", defaults={"t_max": 1.0}, seed=0, token_ids=False, ordered=True)
OTHER = {"input_sha256": "x", "bundle_sha256": "x", "defaults": {}, "seed": 1, "token_ids": True, "ordered": False}


@pytest.fixture
def files(tmp_path: Path) -> OutputFiles:
    return OutputFiles.of(tmp_path / "out.jsonl")


def test_names(tmp_path: Path) -> None:
    files = OutputFiles.of(tmp_path / "a.b.jsonl")
    names = [files.errors, files.partial_output, files.partial_errors, files.state]
    assert [path.name for path in names] == [
        "a.b.errors.jsonl",
        "a.b.jsonl.partial",
        "a.b.errors.jsonl.partial",
        "a.b.jsonl.state",
    ]
    assert OutputFiles.of(Path("out")).errors == Path("out.errors")


def test_nothing_there_is_new_and_begun_is_unfinished(files: OutputFiles) -> None:
    assert files.look(STATE, overwrite=False) == "new"
    files.begin(STATE)
    assert files.look(STATE, overwrite=False) == "unfinished"
    assert files.look(STATE, overwrite=True) == "unfinished"


@pytest.mark.parametrize("name", OTHER)
def test_a_run_of_other_work_is_refused_unless_overwritten(files: OutputFiles, name: str) -> None:
    files.begin(STATE)
    other = STATE.model_copy(update={name: OTHER[name]})
    (words,) = STATE.differences(other)
    with pytest.raises(RequestError, match=f"was begun with {words}.*--overwrite"):
        files.look(other, overwrite=False)
    assert files.look(other, overwrite=True) == "new"


def test_files_that_are_not_the_runs_own_are_never_replaced_unasked(files: OutputFiles) -> None:
    for path in (files.output, files.errors, files.state, files.partial_output, files.partial_errors):
        path.write_text("mine")
        with pytest.raises(RequestError, match=f"{path.name} .*--overwrite"):
            files.look(STATE, overwrite=False)
        assert files.look(STATE, overwrite=True) == "new"
        path.unlink()


def test_a_begun_run_does_not_replace_an_output_unasked(files: OutputFiles) -> None:
    files.begin(STATE)
    files.output.write_text("mine")
    with pytest.raises(RequestError, match=r"out\.jsonl exists"):
        files.look(STATE, overwrite=False)
    assert files.look(STATE, overwrite=True) == "unfinished"


class _Killed(BaseException):
    pass


def calls(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills at the ``step``-th change of a name, from 0."""
    left = [step]

    def before(function):
        def wrapped(*args, **kwargs):
            if not left[0]:
                raise _Killed
            left[0] -= 1
            return function(*args, **kwargs)

        return wrapped

    for name in ("unlink", "replace", "write_bytes"):
        monkeypatch.setattr(Path, name, before(getattr(Path, name)))


@pytest.mark.parametrize("bad_lines", [b"", b'{"line": 1}\n'])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("step", range(8))
def test_killed_between_any_two_changes_it_can_be_finished(
    files: OutputFiles, step: int, old: bool, bad_lines: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        files.output.write_text("old")
        files.errors.write_text("old")

    def work() -> None:
        found = files.look(STATE, overwrite=old)
        if found == "renamed":
            files.state.unlink()
            return
        if found == "new":
            files.begin(STATE)
        # What a run does: anything in the partial files is kept, what is missing is added.
        with append_to(files.partial_output, Written()) as output, append_to(files.partial_errors, Written()) as errors:
            output.write(b'{"line": 2}\n')
            if bad_lines:
                errors.write(bad_lines)
        files.finish()

    with monkeypatch.context() as patch:
        calls(step, patch)
        try:
            work()
            killed = False
        except _Killed:
            killed = True
    if killed:
        work()
    elif not old:
        with pytest.raises(RequestError, match="exists"):
            files.look(STATE, overwrite=False)
    assert files.output.read_bytes() == b'{"line": 2}\n'
    assert (files.errors.read_bytes() if files.errors.exists() else b"") == bad_lines
    assert {path.name for path in files.output.parent.iterdir()} == {
        files.output.name,
        *([files.errors.name] if bad_lines else []),
    }


def test_kills_really_happen(files: OutputFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(_Killed):
        calls(2, patch)
        files.begin(STATE)


def test_two_runs_at_once_are_refused(files: OutputFiles) -> None:
    with files.lock(), pytest.raises(RequestError, match="another run is writing it"), files.lock():
        pass
    with files.lock():
        pass
    assert list(files.output.parent.iterdir()) == []


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.touch()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "link.jsonl").symlink_to(source)
    for given, target, said in [
        (Path("-"), out, "resumable"),
        (source, Path("-"), "resumable"),
        (tmp_path / "none", out, "missing"),
        (fifo, out, "not a regular file"),
        (tmp_path, out, "not a regular file"),
        (source, tmp_path, "not a regular file"),
        (source, fifo, "not a regular file"),
        (source, tmp_path / "none" / "out", "no folder"),
        (source, source, "is the input"),
        (source, tmp_path / "link.jsonl", "is the input"),
    ]:
        with pytest.raises(RequestError, match=said):
            OutputFiles.of(target).check_paths(given)
    errors = tmp_path / "out.errors.jsonl"
    source.rename(errors)
    with pytest.raises(RequestError, match="is the input"):
        OutputFiles.of(out).check_paths(errors)


def test_a_record_file_goes_on_after_the_part_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with append_to(path, Written()) as file:
        file.write(b"one\n")
        assert path.read_bytes() == b"one\n", "a record waits in this process"
        file.write(b"two\nthr")
    with append_to(path, Written(bytes=8)) as file:
        file.write(b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"
