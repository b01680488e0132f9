"""README and docs say what the program does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from dgcompile.cli.app import COMMANDS, cli
from tests.cli.helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def command_lines() -> list[str]:
    """Every command line of dgcompile in the pages."""
    return [
        line.strip()
        for page in PAGES
        for line in page.read_text().splitlines()
        if line.startswith("    dgcompile ") and " COMMAND" not in line
    ]


def sections() -> dict[str, str]:
    """Sections of docs/cli.md by their headings."""
    parts = re.split(r"^## (\w+)$", (ROOT / "docs" / "cli.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_cli_page_describes_every_command_in_the_order_of_the_help() -> None:
    assert tuple(sections()) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_cli_page_describes_every_option_and_no_other(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    options = {
        option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts
    }
    options -= {"--debug", "--json"}  # described once for all
    described = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", sections()[name])) - {"--json"}
    assert described == options


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_in_the_pages_parses(line: str) -> None:
    words = shlex.split(re.split(r" (?:<|>|>>|\|) ", line)[0], comments=True)[1:]
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None, line
    parent = cli.make_context("dgcompile", ["--debug", words[0]])
    command.make_context(words[0], words[1:], parent=parent).close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_readme_python_runs(example_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert code is not None
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / "sudoku").symlink_to(example_bundle)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code[1], names)
    grid = names["pipeline"].decode(names["result"].token_ids)  # type: ignore[attr-defined]
    assert grid.split() == ["216354", "354216", "631542", "542631", "423165", "165423"]
