"""The output on disk: nothing half-written under a final name, and a killed run leaves what the next one continues.

Beside OUT.jsonl lie, while a run is unfinished, OUT.jsonl.partial and OUT.errors.jsonl.partial with the lines that are
done, and OUT.jsonl.state, which says of what. Each record is handed to the system as soon as it is there, so a killed
process loses none that it wrote; a torn last one is dropped. At the end the error file gets its final name, then the
output, and then the state is removed: each moment between tells the next run what is left to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dgcompile.config_file import read_bytes, require_file
from dgcompile.errors import DgcompileError, RequestError
from dgcompile.file_lock import file_lock
from dgcompile.files import PARTIAL_SUFFIX, sync_folder, write_atomically
from dgcompile.serving.bulk.records import Written

STATE_SUFFIX = ".state"
LOCK_SUFFIX = ".lock"


class RunState(BaseModel):
    """What the partial files belong to. Rows and threads are not in it: a run may go on with others.

    Attributes:
        input_sha256: of the input file.
        bundle_sha256: of the bundle's manifest, which has the hashes of its files.
        defaults, seed, token_ids, ordered: see :class:`~dgcompile.serving.bulk.records.BulkOptions`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_sha256: str
    bundle_sha256: str
    defaults: dict[str, int | float]
    seed: int
    token_ids: bool
    ordered: bool

    def differences(self, other: RunState) -> list[str]:
        """What differs, in the user's words."""
        names = {
            "input_sha256": "another input file",
            "bundle_sha256": "another bundle",
            "defaults": "other generation options",
            "seed": "another --seed",
            "token_ids": "another --token-ids",
            "ordered": "another --unordered",
        }
        return [words for name, words in names.items() if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True)
class OutputFiles:
    """The files of one output.

    Attributes:
        output: answers, in the end.
        errors: bad lines, in the end; not there when there are none.
    """

    output: Path
    errors: Path

    @classmethod
    def of(cls, output: Path) -> OutputFiles:
        """The files of an output: OUT.jsonl goes with OUT.errors.jsonl."""
        return cls(output, output.with_name(f"{output.stem}.errors{output.suffix}"))

    @property
    def partial_output(self) -> Path:
        """Answers so far."""
        return self.output.with_name(self.output.name + PARTIAL_SUFFIX)

    @property
    def partial_errors(self) -> Path:
        """Bad lines so far."""
        return self.errors.with_name(self.errors.name + PARTIAL_SUFFIX)

    @property
    def state(self) -> Path:
        """What the partial files belong to."""
        return self.output.with_name(self.output.name + STATE_SUFFIX)

    def check_paths(self, source: Path) -> None:
        """Refuses an input that cannot be read twice, and outputs that cannot be written or would hit the input.

        Raises:
            RequestError: names the path.
        """
        for path in (source, self.output):
            if str(path) == "-":
                raise RequestError("- is neither an input nor an output", expected="files: a run must be resumable")
        require_file(source, error=RequestError)
        if not self.output.absolute().parent.is_dir():
            raise RequestError(f"{self.output.parent} is no folder", expected="an existing folder for the output")
        ours = (self.output, self.errors, self.partial_output, self.partial_errors, self.state, self._lock_file)
        for path in ours:
            if path.exists():
                require_file(path, error=RequestError)
                if path.samefile(source):
                    raise RequestError(f"{source} is the input, and the output {self.output} would replace it")

    def lock(self) -> AbstractContextManager[None]:
        """One run at a time; raises RequestError when there is another."""
        busy = RequestError(f"{self.output}: another run is writing it", fix="wait for it, or choose another output")
        return file_lock(self._lock_file, busy)

    def look(self, wanted: RunState, *, overwrite: bool) -> Literal["new", "unfinished", "renamed"]:
        """What is there of a run: nothing, partial files to go on with, or all but the removal of the state.

        Args:
            wanted: the run that is asked for.
            overwrite: whether finished outputs, and partial files of other runs, may be replaced.

        Raises:
            RequestError: what is there belongs to something else; says to what.
        """
        found = self._read_state()
        if found == wanted:
            if self.output.exists() and not self.partial_output.exists():
                return "renamed"
            if self.output.exists() and not overwrite:
                raise self._refusal(f"{self.output} exists")
            return "unfinished"
        if overwrite:
            return "new"
        if isinstance(found, RunState):
            differences = " and ".join(found.differences(wanted))
            raise self._refusal(f"{self.partial_output} was begun with {differences}")
        for path in (self.output, self.errors):
            if path.exists():
                raise self._refusal(f"{path} exists")
        if found == "damaged":
            raise self._refusal(f"{self.state} is not what a run writes there")
        for path in (self.partial_output, self.partial_errors):
            # An empty one is left by a kill in the moment before the state is written.
            if path.exists() and path.stat().st_size:
                raise self._refusal(f"{path} exists, but not {self.state}, which says what it belongs to")
        return "new"

    def begin(self, state: RunState) -> None:
        """Replaces whatever was begun. The state comes last: with it there are always partial files."""
        self.state.unlink(missing_ok=True)
        self.partial_errors.unlink(missing_ok=True)
        self.partial_output.write_bytes(b"")
        write_atomically(self.state, state.model_dump_json(indent=2).encode() + b"\n")

    def finish(self) -> None:
        """Gives the files their final names; safe to repeat after a kill at any moment."""
        if self.partial_errors.exists() and self.partial_errors.stat().st_size:
            self.partial_errors.replace(self.errors)
        else:
            self.partial_errors.unlink(missing_ok=True)
            self.errors.unlink(missing_ok=True)
        self.partial_output.replace(self.output)
        sync_folder(self.output.absolute().parent)
        self.state.unlink()

    @property
    def _lock_file(self) -> Path:
        return self.output.with_name(self.output.name + LOCK_SUFFIX)

    def _read_state(self) -> RunState | Literal["missing", "damaged"]:
        if not self.state.exists():
            return "missing"
        try:
            return RunState.model_validate_json(read_bytes(self.state, error=RequestError))
        except (ValidationError, DgcompileError):
            return "damaged"

    def _refusal(self, problem: str) -> RequestError:
        return RequestError(problem, fix="choose another output, or give --overwrite to start anew")


class RecordFile:
    """A file of records that grows. Use :func:`append_to`."""

    def __init__(self, path: Path, written: Written) -> None:
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(written.bytes)
        self._file.seek(written.bytes)

    def write(self, record: bytes) -> None:
        """Hands a record to the system, which keeps it when this process is killed."""
        self._file.write(record)
        self._file.flush()

    def sync(self) -> None:
        """Waits until everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@contextmanager
def append_to(path: Path, written: Written) -> Iterator[RecordFile]:
    """A file of records, cut to the part that can be relied on, for appending. On the disk when the block ends well.

    Raises:
        DgcompileError: the file cannot be written, for want of room for instance. It then holds whole records, and
            perhaps a torn last one.
    """
    file = RecordFile(path, written)
    try:
        yield file
        file.sync()
    except OSError as error:
        raise DgcompileError(
            f"{error.filename or path}: {error.strerror}",
            fix="make room, then run the same command again: it goes on after the lines that are done",
        ) from error
    finally:
        file.close()
