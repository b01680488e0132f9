"""What a wheel holds: packages are listed by name, and one that is forgotten is missed only where it is installed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_listed() -> None:
    listed = re.search(r"^packages = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    found = {
        ".".join((package, *module.parent.relative_to(ROOT / folder).parts))
        for folder, package in (
            ("dgcompile", "dgcompile"),
            ("plugins", "dgcompile.plugins"),
            ("recipes", "dgcompile.recipes"),
        )
        for module in (ROOT / folder).rglob("*.py")
    }
    # dgcompile/plugins is a link: where it is followed, it names the same packages.
    assert sorted(found) == sorted(re.findall(r'"([^"]+)"', listed[1]))
