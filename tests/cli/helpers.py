"""Running the command line in this process and as a real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from dgcompile.cli.app import cli

ROOT = Path(__file__).resolve().parents[2]
ESCAPE = "\x1b"


def run(*args: str, stdin: str | None = None, env: dict[str, str | None] | None = None) -> Result:
    """Runs the command line in this process; stdout and stderr are kept apart."""
    return CliRunner().invoke(cli, list(args), input=stdin, env=env or {}, prog_name="dgcompile")


def start(*args: str, **options: object) -> subprocess.Popen[str]:
    """Starts the command line as a process of its own, with pipes."""

    def interruptible() -> None:
        # A test run that was started in the background ignores Ctrl-C, and its children would inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-m", "dgcompile", *args],
        **{
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "cwd": ROOT,
            "env": {**os.environ, "OMP_NUM_THREADS": "1"},
            "preexec_fn": interruptible,
            **options,
        },
    )


def finish(process: subprocess.Popen[str], timeout: float = 240) -> tuple[int, str, str]:
    """Waits for a started command: (exit code, stdout, stderr)."""
    stdout, stderr = process.communicate(timeout=timeout)
    return process.returncode, stdout, stderr
