"""The command line as a whole: help, imports, errors, exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dgcompile import errors
from dgcompile.cli.app import COMMANDS, cli
from dgcompile.cli.command import Command
from tests.cli.helpers import ESCAPE, ROOT, finish, run, start

HEAVY = ("numpy", "onnx", "onnxruntime", "pydantic", "rich", "tokenizers", "torch", "transformers", "yaml")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """Makes ``dgcompile targets`` raise the exception that the test puts into the list."""
    to_raise: list[BaseException] = []

    @click.command("targets", cls=Command)
    def command() -> None:
        raise to_raise[0]

    monkeypatch.setattr("dgcompile.cli.targets.command", command)
    yield to_raise


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_examples_that_parse(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, Command) and command.examples
    for line, meaning in command.examples:
        words = line.split(" | ")[0].split(" > ")[0].split(" >> ")[0].split(" < ")[0].replace('"', "").split()
        assert words[0] == name
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-") and word != "-"} <= options, line
        assert meaning in result.stdout


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name: str) -> None:
    result = run(*([name] if name else []), "-h", env={"COLUMNS": "80"})
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_help_lists_every_command_and_no_options_are_a_usage_error() -> None:
    listed = run("--help").stdout
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    assert run().exit_code == 2


@pytest.mark.parametrize("args", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    script = (
        "import sys\n"
        "from dgcompile.cli import main\n"
        f"sys.argv = ['dgcompile', *{args}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"print('LOADED', sorted(set({HEAVY}) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_version() -> None:
    import dgcompile

    assert dgcompile.__version__ in run("--version").stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CheckpointError("shard.safetensors: cut short"), 2),
        (errors.TargetError("unknown target 'h200'"), 2),
        (errors.RequestError("the prompt is empty", expected="a text"), 2),
        (errors.EngineError("engine failed"), 1),
        (errors.MissingDependencyError("torch is not installed", fix="pip install torch"), 1),
    ],
)
def test_our_errors_are_one_message_with_their_exit_code(
    failing: list[BaseException], error: errors.DgcompileError, code: int
) -> None:
    failing.append(error)
    result = run("targets")
    assert result.exit_code == code
    assert result.stderr == f"Error: {error}\n"
    assert result.stdout == ""


@pytest.mark.parametrize("args", [["targets", "--debug"], ["--debug", "targets"]])
def test_a_traceback_only_with_debug(failing: list[BaseException], args: list[str]) -> None:
    failing.append(errors.CheckpointError("config.json is missing"))
    assert "Traceback" not in run("targets").stderr
    result = run(*args)
    assert "Traceback" in result.stderr and "Error: config.json is missing" in result.stderr
    assert result.exit_code == 2


def test_a_fault_of_the_program_says_so(failing: list[BaseException]) -> None:
    failing.append(KeyError("logits"))
    result = run("targets")
    assert result.exit_code == 1
    assert "KeyError: 'logits'" in result.stderr and "report it" in result.stderr and "--debug" in result.stderr


def test_errors_of_the_system_name_the_file(failing: list[BaseException]) -> None:
    failing.append(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/weights.safetensors"))
    result = run("targets")
    assert (result.exit_code, result.stderr) == (1, "Error: /data/weights.safetensors: Permission denied\n")


def test_a_missing_package_of_the_build_extra_says_how_to_get_it(failing: list[BaseException]) -> None:
    failing.append(ModuleNotFoundError("No module named 'torch'", name="torch.export"))
    result = run("targets")
    assert result.exit_code == 1
    assert "pip install 'dgcompile[build]'" in result.stderr and "report it" not in result.stderr


def test_ctrl_c_is_exit_130(failing: list[BaseException]) -> None:
    failing.append(KeyboardInterrupt("run the same command again"))
    result = run("targets")
    assert result.exit_code == 130
    assert result.stderr.strip() == "Interrupted: run the same command again"


@pytest.mark.parametrize(
    "work",
    [
        # CPython remembers an interrupted exec() and dies of the signal at its end.
        "exec('import os, signal; os.kill(os.getpid(), signal.SIGINT)')",
        # What an interrupted C extension does.
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    raise ImportError('failed')",
        # What Python does in __del__.
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
        "with progress().task('goes on') as advance:\n    sys.exit(3)",
    ],
)
def test_ctrl_c_is_exit_130_wherever_it_arrives(tmp_path: Path, work: str) -> None:
    indented = "\n".join("    " + line for line in work.splitlines())
    (tmp_path / "interrupted.py").write_text(
        "import os, signal, sys, click\n"
        "import dgcompile.cli.targets as targets\n"
        "from dgcompile.cli import main\n"
        "from dgcompile.cli.render import progress\n"
        f"def work():\n{indented}\n"
        "targets.command = click.Command('targets', callback=work)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "main()\n"
    )
    # As a module: a script's exit code hides what CPython remembers.
    command = [sys.executable, "-m", "interrupted", "targets"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (130, "Interrupted")


def test_names_from_files_cannot_steer_the_terminal(failing: list[BaseException]) -> None:
    failing.append(errors.CheckpointError(f"unknown tensor '{ESCAPE}]0;owned\x07'"))
    result = run("targets")
    assert ESCAPE not in result.stderr and "\\x1b]0;owned\\x07" in result.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as gone:
        process = start("targets", "--json", stdout=gone)
        code, _, stderr = finish(process)
    assert (code, stderr) == (141, "")


def test_an_unknown_command_is_a_usage_error() -> None:
    result = run("compile")
    assert result.exit_code == 2 and "No such command 'compile'" in result.stderr


@pytest.mark.parametrize("name", ["targets", "recipes"])
def test_tables_when_piped_have_no_colours_and_fit_80_columns(name: str) -> None:
    code, stdout, _ = finish(start(name, env={**os.environ, "COLUMNS": "80"}))
    assert code == 0 and ESCAPE not in stdout
    assert max(map(len, stdout.splitlines())) <= 80


def test_targets_and_recipes_as_json() -> None:
    targets = {target["name"]: target for target in json.loads(run("targets", "--json").stdout)}
    assert {"cpu", "h100", "h200", "rtx4090", "rtx5090"} <= set(targets)
    assert (targets["cpu"]["default_recipe"], targets["h100"]["default_recipe"]) == ("fp32", "w8a16")
    assert targets["h100"]["compute_capability"] == "9.0"
    recipes = {recipe["name"]: recipe for recipe in json.loads(run("recipes", "--json").stdout)}
    assert recipes["bf16"]["targets"] == ["h100", "h200", "rtx4090", "rtx5090"]
    assert recipes["fp32"]["targets"] == ["cpu"] and recipes["fp32"]["weights"]["experts"]["format"] == "fp32"


def test_dgcompile_is_installed_as_a_command() -> None:
    command = Path(sys.executable).with_name("dgcompile")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("dgcompile")
