"""The scripts are no package that gets installed: put their folder where `import gpu` finds it."""

from __future__ import annotations

import sys

from tests.cli.helpers import ROOT

if str(ROOT / "scripts") not in sys.path:
    sys.path.insert(0, str(ROOT / "scripts"))
