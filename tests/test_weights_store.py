"""The layout of weights.safetensors: complete, aligned, known beforehand, and the same everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import Recipe
from dgcompile.safetensors_file import read_header
from dgcompile.weights_store import WEIGHTS_FILE, lay_out_store
from tests.tiny_checkpoint import tiny_config

RECIPE = Recipe.load("fp32")
sizes = st.integers(1, 7)


@given(experts=sizes, hidden=sizes, moe=sizes, vocab=sizes, layers=st.integers(1, 3))
def test_the_plan_holds_every_tensor_once_and_aligned(
    experts: int, hidden: int, moe: int, vocab: int, layers: int
) -> None:
    config = tiny_config(
        num_experts=experts,
        top_k_experts=1,
        hidden_size=hidden,
        moe_intermediate_size=moe,
        vocab_size=vocab,
        num_hidden_layers=layers,
        layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
    )
    spec = ModelSpec.from_config(config)
    tensors = lay_out_store(spec, RECIPE).tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == spec.expected_tensors()
    end = min(tensor.offset for tensor in tensors.values())
    assert end % 64 == 0
    for tensor in tensors.values():
        assert tensor.file == Path(WEIGHTS_FILE)
        assert tensor.dtype == "F32"
        assert tensor.offset == end
        assert tensor.offset % min(64, tensor.nbytes & -tensor.nbytes) == 0
        end += tensor.nbytes


def test_large_tensors_of_the_published_model_are_aligned() -> None:
    config = tiny_config(hidden_size=2816, intermediate_size=2112, moe_intermediate_size=704, num_experts=128)
    tensors = lay_out_store(ModelSpec.from_config(config), RECIPE).tensors
    assert all(tensor.offset % 64 == 0 for tensor in tensors.values() if tensor.nbytes >= 64)


def test_the_head_describes_the_plan(tmp_path: Path) -> None:
    spec = ModelSpec.from_config(tiny_config())
    store = lay_out_store(spec, RECIPE)
    file = tmp_path / WEIGHTS_FILE
    with file.open("wb") as stream:
        stream.write(store.head)
        stream.truncate(store.nbytes)
    assert read_header(file) == {name: tensor._replace(file=file) for name, tensor in store.tensors.items()}


def test_the_layout_does_not_depend_on_the_process() -> None:
    code = (
        "import hashlib, json; from dgcompile.weights_store import lay_out_store; "
        "from dgcompile.model_spec import ModelSpec; from dgcompile.recipe import Recipe; "
        f"spec = ModelSpec.from_config(json.loads({json.dumps(tiny_config())!r})); "
        "print(hashlib.sha256(lay_out_store(spec, Recipe.load('fp32')).head).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
