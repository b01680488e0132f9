"""The run: what is to be done, what is done already, the work, and the final names."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dgcompile.bundle import Manifest
from dgcompile.content_hashes import FileIdentity
from dgcompile.errors import RequestError
from dgcompile.progress import Progress
from dgcompile.serving.bulk.feed import Feed
from dgcompile.serving.bulk.lines import Contents, read_lines, survey
from dgcompile.serving.bulk.output import OutputFiles, RunState, append_to
from dgcompile.serving.bulk.records import BulkOptions, LineSet, read_written
from dgcompile.serving.service import Service


@dataclass(frozen=True)
class BulkReport:
    """What a run did.

    Attributes:
        lines: of the input that are not blank; each was answered or is bad.
        answered, bad: how many of them, over all runs.
        done_before: lines that earlier runs had done.
        errors: the file of the bad lines; None where there are none.
        output_tokens: tokens generated, over all runs.
        new_tokens: tokens generated in this run.
        steps, row_steps: denoising steps of this run, and the rows of all those steps together.
        seconds: this run's, without loading the bundle and reading the files.
    """

    lines: int
    answered: int
    bad: int
    done_before: int
    errors: Path | None
    output_tokens: int
    new_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens that this run generated per second."""
        return self.new_tokens / self.seconds if self.new_tokens else 0.0

    @property
    def rows_per_step(self) -> float:
        """Rows of a denoising step on average; 0 where there was no step."""
        return self.row_steps / self.steps if self.steps else 0.0


def run_bulk(
    open_service: Callable[[], Service],
    bundle: Path,
    source: Path,
    output: Path,
    options: BulkOptions,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> BulkReport:
    """Answers every line of a file; or goes on where an earlier, interrupted run of the same work stopped.

    Bad lines go to the error file and never stop the run.

    Args:
        open_service: loads ``bundle``; called when the files are known to be usable. The service is closed here.
        bundle: the bundle's folder.
        source: the input.
        output: the output; appears when every line is done.
        options: how to answer.
        overwrite: replace an output that exists, or partial files of other work.
        progress: told how reading and answering go.

    Raises:
        RequestError: files or options that cannot be used, another run at work, or an input that changed meanwhile.
        BundleError: no bundle, or what ``open_service`` says.
        EngineError: the engine failed; the run can be continued.
        OSError: as the file system reports it; the run can be continued.
    """
    progress = progress or Progress()
    files = OutputFiles.of(output)
    files.check_paths(source)
    manifest = hashlib.sha256(Manifest.read(bundle).to_bytes()).hexdigest()
    with files.lock():
        contents = survey(source, progress)
        state = RunState(
            input_sha256=contents.sha256,
            bundle_sha256=manifest,
            defaults=dict(options.defaults),
            seed=options.seed,
            token_ids=options.token_ids,
            ordered=options.ordered,
        )
        found = files.look(state, overwrite=overwrite)
        if found == "renamed":
            return _clean_up(files, contents, options)
        with closing(open_service()) as service:
            # Before anything is written: wrong for every line that says nothing else.
            options.check(contents.last, service.pipeline.bundle.generation)
            if found == "new":
                files.begin(state)
            return _answer(service, files, source, contents, options, progress)


def _clean_up(files: OutputFiles, contents: Contents, options: BulkOptions) -> BulkReport:
    """Ends a run that was killed when its output had its final name already."""
    done = LineSet(contents.last)
    answers = read_written(files.output, done, ascending=options.ordered)
    errors = read_written(files.errors, done, ascending=True)
    if answers.records + errors.records != contents.lines:
        raise RequestError(
            f"{files.output} does not have all lines and {files.partial_output} is gone",
            fix="give --overwrite to start anew",
        )
    files.state.unlink()
    return BulkReport(
        lines=contents.lines,
        answered=answers.records,
        bad=errors.records,
        done_before=contents.lines,
        errors=files.errors if errors.records else None,
        output_tokens=answers.output_tokens,
    )


def _answer(
    service: Service, files: OutputFiles, source: Path, contents: Contents, options: BulkOptions, progress: Progress
) -> BulkReport:
    done = LineSet(contents.last)
    answers = read_written(files.partial_output, done, ascending=options.ordered)
    errors = read_written(files.partial_errors, done, ascending=True)
    done_before = answers.records + errors.records
    digest = hashlib.sha256()
    started = time.monotonic()

    def speed() -> str:
        return f"{service.statistics().tokens_per_second:.1f} tokens/s"

    with (
        append_to(files.partial_output, answers) as answers_file,
        append_to(files.partial_errors, errors) as errors_file,
        source.open("rb") as file,
        progress.task("batch", contents.lines, "lines", note=speed) as advance,
    ):
        if done_before:
            advance(done_before)
        feed = Feed(service, answers_file, errors_file, options, advance)
        for line in read_lines(file, digest.update):
            if line.number not in done:
                feed.take(line)
        feed.drain()
    _check_unchanged(files, source, contents, digest.hexdigest(), progress)
    seconds = time.monotonic() - started
    files.finish()
    statistics = service.statistics()
    return BulkReport(
        lines=contents.lines,
        answered=answers.records + feed.answered,
        bad=errors.records + feed.bad,
        done_before=done_before,
        errors=files.errors if errors.records + feed.bad else None,
        output_tokens=answers.output_tokens + feed.output_tokens,
        new_tokens=feed.output_tokens,
        steps=statistics.steps,
        row_steps=statistics.row_steps,
        seconds=seconds,
    )


def _check_unchanged(files: OutputFiles, source: Path, contents: Contents, answered: str, progress: Progress) -> None:
    """Refuses an input that is not, or was not while it was answered, what it was at the start; a mere touch is fine.

    Args:
        files: the output's.
        source: the input.
        contents: as it was at the start.
        answered: SHA-256 of what was answered.
        progress: told of another look at the file.
    """
    if answered != contents.sha256:
        # The answers are of a mixture, which is nothing to go on with, even if the old content comes back.
        files.state.unlink()
    elif FileIdentity.of(source) == contents.identity or survey(source, progress).sha256 == contents.sha256:
        return
    raise RequestError(
        f"{source} changed while it was read: {files.output} is not made",
        fix="when the file is complete, give --overwrite to start anew",
    )
