"""Weights that are engine inputs: each is loaded once, whatever the sizes of pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dgcompile.engine_table import EngineTable
from dgcompile.errors import BundleError
from dgcompile.progress import Advance, Progress
from dgcompile.runtime.device import ALIGNMENT
from dgcompile.runtime.weight_loading import device_bytes, load_weights, stored_weights
from dgcompile.safetensors_file import lay_out, read_header
from tests.runtime.host_device import HostDevice

TENSORS = {
    "a": ("F32", (7, 3)),
    "b": ("U8", (64,)),
    "c": ("BF16", (5, 2, 3)),
    "unused": ("F32", (2,)),
    "q": ("I8", (130, 6)),
    "k": ("I8", (7, 6)),
    "v": ("BF16", (3, 6)),
    "w": ("BF16", (70, 6)),
}


class Counted(Progress):
    """Adds up what a task is told."""

    def __init__(self) -> None:
        self.tasks: dict[str, list[float]] = {}

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        assert unit == "bytes" and total is not None
        self.tasks[label] = [total, 0.0]

        def advance(amount: float = 1.0, /) -> None:
            self.tasks[label][1] += amount

        yield advance


@pytest.fixture
def store(tmp_path: Path) -> Path:
    file = tmp_path / "weights.safetensors"
    head, tensors = lay_out(file, TENSORS)
    data = np.random.default_rng(0).integers(0, 256, sum(tensor.nbytes for tensor in tensors.values()), dtype=np.uint8)
    file.write_bytes(head + data.tobytes())
    return file


def tensor(name: str, dtype: str, shape: tuple[int, ...], *parts: str, transposed: bool = False) -> dict[str, object]:
    kept = parts or (name,)
    return {"name": name, "mode": "input", "dtype": dtype, "shape": shape, "parts": kept, "transposed": transposed}


def of(*tensors: dict[str, object]) -> EngineTable:
    return EngineTable.model_validate({"graph": "denoiser", "tensors": tensors})


def table(*tensors: tuple[str, str, tuple[int, ...]]) -> EngineTable:
    return of(*(tensor(*each) for each in tensors))


@pytest.mark.parametrize("staging", [1, 13, 64, 1000])
def test_every_byte_arrives_once(store: Path, staging: int) -> None:
    tables = [table(("c", "bfloat16", (5, 2, 3)), ("a", "float32", (7, 3))), table(("a", "float32", (7, 3)))]
    tables.append(table(("b", "int8", (64,))))
    weights = stored_weights(tables, store)
    assert set(weights) == {"a", "b", "c"}
    device, progress = HostDevice(), Counted()
    addresses = load_weights(device, weights, progress, staging)
    assert device.allocated == {"weights": device_bytes(weights)}
    content = store.read_bytes()
    for name, weight in weights.items():
        (stored,) = weight.parts
        assert addresses[name] % ALIGNMENT == 0
        assert device.view(addresses[name], stored.nbytes).tobytes() == content[stored.offset :][: stored.nbytes]
    total = 84 + 64 + 60
    assert progress.tasks == {"load weights": [total, total]}


@pytest.mark.parametrize("staging", [1, 13, 64, 1000])
def test_weights_of_several_parts_lie_as_the_engine_wants_them(store: Path, staging: int) -> None:
    weights = stored_weights(
        [
            of(
                tensor("q+k", "int8", (1, 6, 137), "q", "k", transposed=True),
                tensor("v+w", "bfloat16", (1, 6, 73), "v", "w", transposed=True),
                tensor("w+v", "bfloat16", (1, 73, 6), "w", "v"),
            )
        ],
        store,
    )
    device, progress = HostDevice(), Counted()
    addresses = load_weights(device, weights, progress, staging)
    stored, content = read_header(store), store.read_bytes()

    def matrix(name: str) -> np.ndarray:
        part = stored[name]
        return np.frombuffer(content, f"V{part.nbytes // part.shape[0] // 6}", 6 * part.shape[0], part.offset).reshape(
            part.shape
        )

    for name, expected in {
        "q+k": np.concatenate([matrix("q"), matrix("k")]).T,
        "v+w": np.concatenate([matrix("v"), matrix("w")]).T,
        "w+v": np.concatenate([matrix("w"), matrix("v")]),
    }.items():
        assert device.view(addresses[name], expected.nbytes).tobytes() == expected.tobytes()
    total = 6 * (137 + 2 * 73 + 2 * 73)
    assert progress.tasks == {"load weights": [total, total]}


def test_parts_that_do_not_fit_the_engine_are_refused(store: Path) -> None:
    def refused(*tables: EngineTable, match: str) -> None:
        with pytest.raises(BundleError, match=match):
            stored_weights(tables, store)

    refused(
        of(tensor("x", "int8", (1, 6, 137), "q", "gone")),
        match=r"gone is missing; expected 822 bytes in all, which the denoiser engine takes as x",
    )
    refused(of(tensor("x", "int8", (1, 6, 136), "q", "k")), match=r"q and k have 822 bytes; expected 816 bytes")
    # As many bytes in other shapes, or of other items: a transposition would mix them up.
    refused(of(tensor("x", "int8", (1, 2, 30), "c", transposed=True)), match=r"c are \[5, 2, 3\]; expected matrices")
    refused(of(tensor("x", "int8", (1, 3, 274), "q", "k", transposed=True)), match="expected matrices with 3 columns")
    refused(of(tensor("x", "int8", (1, 6, 6), "v", transposed=True)), match="expected matrices with 6 columns")
    refused(
        of(tensor("x", "int8", (1, 6, 137), "q", "k", transposed=True)),
        of(tensor("x", "int8", (1, 6, 137), "k", "q", transposed=True)),
        match="different weights by x",
    )


def test_weights_of_another_model_are_refused(store: Path) -> None:
    with pytest.raises(
        BundleError, match=r"weights.safetensors: d is missing; expected 4 bytes in all, which the denoiser engine"
    ):
        stored_weights([table(("d", "float32", (1,)))], store)
    with pytest.raises(BundleError, match="a has 84 bytes; expected 42 bytes"):
        stored_weights([table(("a", "bfloat16", (7, 3)))], store)


def test_a_file_that_shrinks_is_refused(store: Path) -> None:
    weights = stored_weights([table(("a", "float32", (7, 3)), ("b", "int8", (64,)), ("c", "float16", (30,)))], store)
    store.write_bytes(store.read_bytes()[: weights["c"].parts[0].offset + 1])
    with pytest.raises(BundleError, match="ended while it was read"):
        load_weights(HostDevice(), weights, Progress())


def test_nothing_to_load() -> None:
    device = HostDevice()
    assert load_weights(device, {}, Progress()) == {}
    assert device.allocated == {}
