"""Opening a bundle: what is accepted, and that everything else is refused in one clear line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dgcompile import bundle as bundle_module
from dgcompile.bundle import (
    FORMAT_VERSION,
    GRAPH_FILES,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Bundle,
    EngineLibrary,
    GraphRecord,
    Manifest,
    StageName,
    StageRecord,
    record_files,
)
from dgcompile.contract import graph_inputs, graph_outputs
from dgcompile.errors import BundleError
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.progress import Advance, Progress
from dgcompile.recipe import Recipe
from dgcompile.target import Target

FILES: dict[StageName, dict[str, bytes]] = {
    "assets": {"generation_config.json": json.dumps(GenerationConfig(eos_token_ids=(1,)).to_values()).encode()},
    "trace": {"encoder.onnx": b"an encoder" * 30, "denoiser.onnx": b"a denoiser" * 30},
    "weights": {WEIGHTS_FILE: bytes(range(256)) * 8},
    "engine": {"engines/encoder.onnx": b"an engine" * 30, "engines/denoiser.onnx": b"another engine" * 30},
}
ALL_FILES = [name for files in FILES.values() for name in files]

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def spec(checkpoint: Path) -> ModelSpec:
    return ModelSpec.from_config(json.loads((checkpoint / "config.json").read_text()))


@pytest.fixture(scope="module")
def pristine(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose graphs and weights are any bytes: opening looks at hashes, sessions at content."""
    folder = tmp_path_factory.mktemp("pristine")
    stages: dict[StageName, StageRecord] = {}
    for stage, files in FILES.items():
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        records = record_files(folder, files, label="", progress=Progress())
        stages[stage] = StageRecord(state="finished", inputs="0" * 64, tools={"python": "3"}, files=records)
    Manifest(
        dgcompile_version="0",
        checkpoint="1" * 64,
        spec=spec,
        target=Target.load("cpu"),
        recipe=Recipe.load("fp32"),
        max_context=64,
        graphs={
            graph: GraphRecord(
                opsets={"": 21, "dgcompile": 1},
                ir_version=10,
                inputs=tuple(graph_inputs(graph, spec, "float32")),
                outputs=tuple(graph_outputs(graph, spec, "float32")),
            )
            for graph in GRAPH_FILES
        },
        engine=EngineLibrary(name="onnxruntime", version="1.32.0", oldest_version="1.22.0"),
        stages=stages,
    ).write(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(pristine, tmp_path / "bundle")


@contextmanager
def edited(folder: Path) -> Iterator[dict[str, Any]]:
    """The manifest's JSON, written back."""
    content = json.loads((folder / MANIFEST_FILE).read_text())
    yield content
    (folder / MANIFEST_FILE).write_text(json.dumps(content))


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    assert caught.value.exit_code == 2
    return text


class Counting(Progress):
    """Counts the bytes that were hashed."""

    def __init__(self) -> None:
        self.amount = 0.0

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
        def advance(amount: float = 1.0, /) -> None:
            self.amount += amount

        yield advance


def test_open_gives_what_was_recorded(folder: Path, spec: ModelSpec) -> None:
    bundle = Bundle.open(folder)
    assert bundle.spec == spec
    assert (bundle.target.name, bundle.recipe.name, bundle.max_context) == ("cpu", "fp32", 64)
    assert bundle.generation.eos_token_ids == (1,)
    assert bundle.graph_file("denoiser").read_bytes() == FILES["trace"]["denoiser.onnx"]
    assert bundle.weights_file == folder / WEIGHTS_FILE
    assert bundle.tokenizer_file is None and bundle.chat_template_file is None
    engines = ["engines/denoiser.onnx", "engines/encoder.onnx"]
    graphs = ["denoiser.onnx", "encoder.onnx"]
    assert list(bundle.manifest.files) == ["generation_config.json", *graphs, WEIGHTS_FILE, *engines]


def test_a_manifest_survives_reading_and_writing_byte_for_byte(folder: Path) -> None:
    before = (folder / MANIFEST_FILE).read_bytes()
    assert Manifest.read(folder).to_bytes() == before
    assert str(folder).encode() not in before


def test_a_bundle_may_be_moved_and_linked_to(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(moved)
    assert Bundle.open(tmp_path / "link").max_context == 64


@given(name=st.sampled_from(ALL_FILES), position=st.integers(0, 10_000), mask=st.integers(1, 255))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_of_any_file_is_seen(folder: Path, name: str, position: int, mask: int) -> None:
    path = folder / name
    good = path.read_bytes()
    bad = bytearray(good)
    bad[position % len(bad)] ^= mask
    path.write_bytes(bad)
    assert f"{path} is damaged" in refusal(folder)
    path.write_bytes(good)
    Bundle.open(folder)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_truncated_a_longer_and_a_missing_file_are_named(folder: Path, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    for changed in (data[:-1], data + b"\0", b""):
        path.write_bytes(changed)
        assert f"{path} has {len(changed)} bytes; expected {len(data)} bytes" in refusal(folder)
    path.unlink()
    assert f"{path} is missing" in refusal(folder)


def test_links_folders_and_pipes_are_no_files(folder: Path, tmp_path: Path) -> None:
    path = folder / WEIGHTS_FILE
    target = path.rename(tmp_path / "weights")
    path.symlink_to(target)
    assert f"{path} is not a regular file" in refusal(folder)
    path.unlink()
    path.mkdir()
    assert f"{path} is not a regular file" in refusal(folder)
    path.rmdir()
    os.mkfifo(path)
    assert f"{path} is not a regular file" in refusal(folder)


def test_a_linked_subfolder_does_not_lead_out(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s")
    (folder / "kernels").symlink_to(outside)
    with edited(folder) as content:
        content["stages"]["engine"]["files"]["kernels/secret"] = {"size": 1, "sha256": "0" * 64}
    assert f"{folder / 'kernels/secret'} is not a regular file of the bundle" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "a/../../b",
        "a\\..\\b",
        "a//b",
        "",
        ".",
        "..",
        ".hidden",
        "a/",
        "C:x",
        "a\nb",
        "x" * 201,
        MANIFEST_FILE,
        "weights.safetensors.partial",
    ],
)
def test_file_names_that_are_not_plain_are_refused(folder: Path, name: str) -> None:
    with edited(folder) as content:
        content["stages"]["engine"]["files"][name] = {"size": 0, "sha256": "0" * 64}
    text = refusal(folder)
    assert repr(name) in text
    assert "unsafe file name" in text or "reserved" in text


def test_a_newer_format_is_refused_before_anything_else_is_read(folder: Path) -> None:
    (folder / MANIFEST_FILE).write_text(json.dumps({"format_version": FORMAT_VERSION + 1, "unheard": "of"}))
    text = refusal(folder)
    assert f"format_version is {FORMAT_VERSION + 1}, newer than this dgcompile reads" in text
    assert "update dgcompile" in text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format_version": 1, "format_version": 1}',
        b'"x"',
        b"{}",
        b'{"format_version": true}',
        b'{"format_version": 0}',
        b'{"format_version": "1"}',
        b'{"format_version": 1}',
    ],
)
def test_an_unreadable_manifest_is_named(folder: Path, data: bytes) -> None:
    (folder / MANIFEST_FILE).write_bytes(data)
    assert MANIFEST_FILE in refusal(folder)


def test_what_is_no_bundle_is_told_apart(checkpoint: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nothing")
    assert "it is a checkpoint" in refusal(checkpoint)
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in refusal(file)
    (tmp_path / "empty").mkdir()
    assert f"has no {MANIFEST_FILE}" in refusal(tmp_path / "empty")


def test_an_unfinished_build_is_not_run(folder: Path) -> None:
    with edited(folder) as content:
        content["stages"]["weights"] = {"state": "pending"}
    text = refusal(folder)
    assert "stage weights is to be done" in text
    assert "run the same `dgcompile build` command again" in text


def test_a_manifest_with_only_its_target_changed_is_refused(folder: Path) -> None:
    # Bundles for GPUs have a stage and files more: tests/build/test_tensorrt.py.
    with edited(folder) as content:
        content["target"] = Target.load("rtx5090").model_dump(mode="json")
    assert "stages.kernels is missing" in refusal(folder)


def test_an_onnxruntime_that_is_too_old_is_refused(folder: Path) -> None:
    with edited(folder) as content:
        content["engine"]["oldest_version"] = "999.0.0"
    text = refusal(folder)
    assert "onnxruntime 999.0.0 or newer" in text
    assert "opset 21" in text
    with edited(folder) as content:
        content["engine"]["oldest_version"] = "9" * 5000  # more digits than int() reads
    assert "or newer" in refusal(folder)
    # Built with a newer one than this machine has, but not needing it, is fine.
    with edited(folder) as content:
        content["engine"] |= {"version": "999.0.0", "oldest_version": "1.22.0"}
    Bundle.open(folder)


def _drop_stage(content: dict[str, Any]) -> None:
    del content["stages"]["trace"]


def _list_twice(content: dict[str, Any]) -> None:
    content["stages"]["engine"]["files"]["encoder.onnx"] = content["stages"]["trace"]["files"]["encoder.onnx"]


def _unlist(content: dict[str, Any]) -> None:
    content["stages"]["weights"]["files"] = {}


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda content: content.update(max_context=10**9), "max_context"),
        (lambda content: content.update(max_context=16), "max_context"),
        (lambda content: content["spec"].update(hidden_size=64), "graphs.denoiser"),
        (lambda content: content["graphs"]["encoder"]["inputs"].pop(), "graphs.encoder"),
        (lambda content: content["graphs"].pop("encoder"), "a graph is not recorded"),
        (lambda content: content.update(engine=None), "engine is not recorded"),
        (lambda content: content.update(extra=1), "extra"),
        (lambda content: content["stages"].update(melt={}), "melt"),
        (lambda content: content["target"].update(backend="abacus"), "target.backend"),
        (lambda content: content["stages"]["weights"]["files"][WEIGHTS_FILE].update(size=-1), WEIGHTS_FILE),
        (lambda content: content["stages"]["weights"]["files"][WEIGHTS_FILE].update(sha256="z"), WEIGHTS_FILE),
        (_drop_stage, "stages.trace is missing"),
        (_list_twice, "listed by the stages"),
        (_unlist, f"{WEIGHTS_FILE} is not recorded"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(folder: Path, edit: Edit, named: str) -> None:
    with edited(folder) as content:
        edit(content)
    assert named in refusal(folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(data=st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tampered_manifest_never_causes_another_error(folder: Path, data: st.DataObject) -> None:
    good = (folder / MANIFEST_FILE).read_text()
    content = json.loads(good)
    node: Any = content
    while True:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key: Any = data.draw(st.sampled_from(list(keys)))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.integers(0, 4)) == 0:
            break
        node = node[key]
    node[key] = data.draw(json_values)
    (folder / MANIFEST_FILE).write_text(json.dumps(content))
    try:
        Bundle.open(folder)
    except BundleError:
        pass
    finally:
        (folder / MANIFEST_FILE).write_text(good)


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hash checks are remembered whatever a bundle's size, in this folder."""
    monkeypatch.setattr(bundle_module, "REMEMBER_FROM_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def hashed(folder: Path) -> float:
    progress = Counting()
    Bundle.open(folder, progress=progress)
    return progress.amount


def test_a_large_bundle_is_hashed_once(folder: Path, remembering: Path) -> None:
    total = sum(len(data) for files in FILES.values() for data in files.values())
    before = sorted(folder.iterdir())
    assert [hashed(folder), hashed(folder)] == [total, 0]
    assert sorted(folder.iterdir()) == before

    (folder / WEIGHTS_FILE).touch()
    assert [hashed(folder), hashed(folder)] == [len(FILES["weights"][WEIGHTS_FILE]), 0]
    progress = Counting()
    Bundle.open(folder).verify_files(full=True, progress=progress)
    assert progress.amount == total


def test_damage_is_seen_even_if_the_modification_time_is_set_back(folder: Path, remembering: Path) -> None:
    Bundle.open(folder)
    path = folder / WEIGHTS_FILE
    found = path.stat()
    data = path.read_bytes()
    path.write_bytes(b"\1" + data[1:])
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert "is damaged" in refusal(folder)


def test_a_changed_record_is_not_vouched_for_by_an_old_check(folder: Path, remembering: Path) -> None:
    Bundle.open(folder)
    with edited(folder) as content:
        content["stages"]["weights"]["files"][WEIGHTS_FILE]["sha256"] = "0" * 64
    assert "is damaged" in refusal(folder)


@pytest.mark.parametrize("state", ["a file in the way", "not JSON", "not an object"])
def test_memory_that_cannot_be_used_costs_only_time(folder: Path, remembering: Path, state: str) -> None:
    if state == "a file in the way":
        remembering.write_text("")
    else:
        Bundle.open(folder)
        for path in remembering.rglob("*.json"):
            path.write_text("{" if state == "not JSON" else "[]")
    assert hashed(folder) > 0
    Bundle.open(folder)


def test_small_bundles_leave_no_trace(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Bundle.open(folder)
    assert not (tmp_path / "cache").exists()


def test_opening_imports_nothing_that_only_building_needs(pristine: Path) -> None:
    code = (
        "import sys; from dgcompile.bundle import Bundle; Bundle.open(sys.argv[1])\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'onnxscript'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(pristine)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
