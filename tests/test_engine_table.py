"""The table of an engine's tensors, which is untrusted like everything in a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgcompile.engine_table import EngineTable, EngineTensor, Profile
from dgcompile.errors import BundleError

TABLE = EngineTable(
    graph="encoder",
    tensors=(
        EngineTensor(
            name="input_ids",
            mode="input",
            dtype="int32",
            shape=("batch", "new_tokens"),
            profile=Profile(min=(1, 1), opt=(1, 256), max=(1, 512)),
        ),
        EngineTensor(name="a.weight", mode="input", dtype="bfloat16", shape=(4, 8), parts=("a.weight",)),
        EngineTensor(name="present.0.key", mode="output", dtype="bfloat16", shape=("batch", "new_tokens", 2, 16)),
    ),
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "encoder.tensors.json"
    file.write_bytes(TABLE.to_bytes())
    assert EngineTable.read(file) == TABLE
    assert [tensor.name for tensor in TABLE.weights] == ["a.weight"]


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        (0, "dtype", "int64"),
        (0, "mode", "both"),
        (1, "mode", "output"),
        (1, "weight", "b.weight"),
        (1, "extra", 1),
        (2, "shape", "wide"),
    ],
)
def test_what_no_build_writes_is_refused_by_file(tmp_path: Path, place: int, key: str, value: Any) -> None:
    content = json.loads(TABLE.to_bytes())
    content["tensors"][place][key] = value
    file = tmp_path / "encoder.tensors.json"
    file.write_text(json.dumps(content))
    with pytest.raises(BundleError, match=r"encoder\.tensors\.json"):
        EngineTable.read(file)
    file.write_text("[" * 100000)
    with pytest.raises(BundleError, match=r"encoder\.tensors\.json"):
        EngineTable.read(file)
