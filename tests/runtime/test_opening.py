"""Opening a large bundle reads its manifest, graphs and tokenizer, and of the weights only what is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dgcompile.bundle import MANIFEST_FILE, REMEMBER_FROM_BYTES, WEIGHTS_FILE, Bundle
from dgcompile.files import sha256_file

LARGE = 8 * REMEMBER_FROM_BYTES

SCRIPT = """
import os, sys
import dgcompile.runtime.onnxruntime_session
from dgcompile.runtime.pipeline import Pipeline

def accounts():
    fields = dict(line.split(":") for file in ("io", "status") for line in open(f"/proc/self/{file}"))
    return [int(fields["rchar"]), 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile"))]

before = accounts()
Pipeline.open(sys.argv[1], threads=1)
print(*(now - then for now, then in zip(accounts(), before)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_bundle_is_not_read_whole(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = tmp_path / "large"
    shutil.copytree(bundle, large)
    weights = large / WEIGHTS_FILE
    # Holes behind the tensors, which the graphs do not point to.
    os.truncate(weights, LARGE)
    manifest = json.loads((large / MANIFEST_FILE).read_text())
    record = {"size": LARGE, "sha256": sha256_file(weights)}
    manifest["stages"]["weights"]["files"][WEIGHTS_FILE] = record
    (large / MANIFEST_FILE).write_text(json.dumps(manifest))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Bundle.open(large)  # hashes everything, and remembers

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(large)], capture_output=True, text=True, timeout=120, check=True
    )
    read, resident = map(int, done.stdout.split())
    small = sum(file.stat().st_size for file in large.rglob("*") if file.is_file() and file != weights)
    assert small / 4 < read < 3 * small + (1 << 20)
    assert resident < LARGE / 4
