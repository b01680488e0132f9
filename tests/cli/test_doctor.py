"""``dgcompile doctor``: what it prints, and its exit code."""

from __future__ import annotations

import json

import pytest

from dgcompile import doctor
from dgcompile.gpu import Card, Gpus
from tests.cli.helpers import run

CARD = Card(0, "A GPU \x1b[31m", "12.0", 32_000_000_000, 170)


@pytest.fixture(
    params=[Gpus(None, None, (), "this machine has no NVIDIA driver"), Gpus((13, 1), "590.1", (CARD,), None)]
)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    monkeypatch.setattr(doctor, "query_gpus", lambda: request.param)
    found: Gpus = request.param
    return found


def test_all_targets_are_shown_and_the_exit_code_is_0(machine: Gpus) -> None:
    result = run("doctor", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    for name in ("cpu", "h100", "rtx5090", "base", "build"):
        assert f"\n{name} " in result.stdout
    # H100 engines are built where the H100 is, which is nowhere here.
    assert "h100 lacks:\n- to build" in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert ("A GPU" in result.stdout) == bool(machine.cards)


def test_one_target_that_cannot_run_exits_1(machine: Gpus) -> None:
    result = run("doctor", "--target", "h100")
    assert result.exit_code == 1
    assert "GeForce RTX 5090" not in result.stdout
    assert "compute capability 9.0" in " ".join(result.stdout.split())
    assert run("doctor", "--target", "cpu").exit_code == 0


def test_json(machine: Gpus) -> None:
    facts = json.loads(run("doctor", "--json").stdout)
    assert [ability["target"] for ability in facts["abilities"]] == ["cpu", "h100", "h200", "rtx4090", "rtx5090"]
    assert facts["abilities"][0]["can_run"] is True and facts["abilities"][1]["can_run"] is False
    assert facts["abilities"][1]["run_lacks"][-1]["problem"]
    assert [card["name"] for card in facts["gpus"]["cards"]] == [card.name for card in machine.cards]
    assert facts["extras"][0]["name"] == "base"
    assert json.loads(run("doctor", "--json", "--target", "h100").stdout)["abilities"][0]["target"] == "h100"


def test_an_unknown_target_exits_2() -> None:
    result = run("doctor", "--target", "abacus")
    assert result.exit_code == 2 and "abacus" in result.stderr
