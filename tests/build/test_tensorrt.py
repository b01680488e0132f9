"""Bundles for GPUs, built by the real TensorRT-RTX without a GPU: engines, kernels, --resume, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import psutil
import pytest
from click.testing import CliRunner

from dgcompile import gpu
from dgcompile.build import build, resume, stages
from dgcompile.build.stage import Stage
from dgcompile.build.tensorrt import engines
from dgcompile.build.tensorrt.graph import engine_graph
from dgcompile.build.tensorrt.worker import EngineJob
from dgcompile.bundle import MANIFEST_FILE, Bundle, Manifest
from dgcompile.cli.app import cli
from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.engine_table import EngineTable, engine_file, layers_file, table_file
from dgcompile.errors import BundleError, EngineElsewhereError, EngineError
from dgcompile.gpu import Card, Gpus
from dgcompile.progress import Advance, Progress
from dgcompile.recipe import Recipe, weight_class
from dgcompile.target import Target
from tests.build.helpers import Labels, content, readers, start_runner, unfinished_copy
from tests.models import random_checkpoint

pytest.importorskip("tensorrt_rtx")

MAX_CONTEXT = 96
RTX5090 = Card(index=0, name="RTX 5090", compute_capability="12.0", memory_bytes=32 << 30, multiprocessors=170)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose heads are wide enough for the kernels."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return random_checkpoint(folder, layers=("sliding", "full"), head_dim=16, full_head_dim=32)


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rtx5090 bundle of ``source``. Shared by all tests: do not write into it."""
    folder = tmp_path_factory.mktemp("bundles") / "bundle"
    gpu_build(source, folder)
    return folder


def gpu_build(source: Path, folder: Path, target: str = "rtx5090", *, overwrite: bool = False) -> list[str]:
    progress = Labels()
    recipe = Recipe.load("bf16")
    build(source, Target.load(target), recipe, folder, max_context=MAX_CONTEXT, overwrite=overwrite, progress=progress)
    return progress.stages


def refusal(folder: Path, **options: bool) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, **options)
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    return text


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the driver report a card."""

    def report(card: Card | None, driver: tuple[int, int] = (13, 0)) -> None:
        cards = () if card is None else (card,)
        found = Gpus(driver_cuda=driver, driver_version="580.1", cards=cards, problem=None if card else "no GPU")
        monkeypatch.setattr(gpu, "query_gpus", lambda: found)
        monkeypatch.setattr(stages, "query_gpus", lambda: found)

    return report


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_engines_run_plugins_where_the_graphs_have_operators(built: Path, graph: GraphName) -> None:
    layers = (built / layers_file(graph)).read_text()
    kinds = Counter(
        re.findall(r"^Name: \S*node_(block_attention|mixture_of_experts)\S*, LayerType: (\w+)", layers, re.M)
    )
    model = onnx.load(str(built / GRAPH_FILES[graph]), load_external_data=False)
    nodes = Counter(node.op_type for node in model.graph.node if node.domain == "dgcompile")
    assert sum(nodes.values()) > 0
    assert kinds == {
        (kind, "custom_layer"): nodes[name]
        for kind, name in (("block_attention", "BlockAttention"), ("mixture_of_experts", "MixtureOfExperts"))
        if nodes[name]
    }
    # What only the operators' bodies have: softmax over keys is fused into attention, experts are sorted by a scan.
    bodies = {node.op_type for function in model.functions for node in function.node}
    assert "OneHot" in bodies and "OneHot" not in {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_each_dense_weight_is_read_by_one_product_as_it_lies(built: Path, graph: GraphName) -> None:
    layers = (built / layers_file(graph)).read_text()
    dense = [
        tensor.name for tensor in EngineTable.read(built / table_file(graph)).weights if "_proj.weight" in tensor.name
    ]
    assert len(dense) > 4
    assert {name: readers(layers, name) for name in dense} == {name: [("gemm", "BFloat16")] for name in dense}


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_tables_say_what_a_run_needs(built: Path, graph: GraphName) -> None:
    table = EngineTable.read(built / table_file(graph))
    spec = Bundle.open(built, to_run=False).spec
    assert table.workspace_bytes is not None
    # The logits of a canvas in float32 are part of the denoiser's.
    assert table.workspace_bytes > (4 * spec.canvas_length * spec.vocab_size if graph == "denoiser" else 0)
    assert table.workspace_bytes < 1 << 30


def test_no_table_is_copied_in_a_call(built: Path) -> None:
    layers = (built / layers_file("denoiser")).read_text()
    readers = re.findall(
        r"^Name: (\S+), LayerType: \w+, Inputs: \[[^\n]*Name: model\.decoder\.embed_tokens", layers, re.M
    )
    # The lookup, the product that gives logits, the product that gives soft embeddings.
    assert len(readers) == 3
    assert not [name for name in readers if re.match(r"__myl_(Tran|Move|Copy|Cast)_", name)]


@pytest.mark.parametrize("graph", GRAPH_FILES)
def test_tables_say_what_is_bound(built: Path, graph: GraphName) -> None:
    bundle = Bundle.open(built, to_run=False)
    table = EngineTable.read(built / table_file(graph))
    record = bundle.manifest.graphs[graph]
    given = [tensor.name for tensor in table.tensors if not tensor.parts]
    assert given == [tensor.name for tensor in (*record.inputs, *record.outputs)]
    last = bundle.spec.num_hidden_layers - 1
    experts = {
        f"model.decoder.layers.{index}.experts.{name}_proj"
        for index in range(bundle.spec.num_hidden_layers)
        for name in ("gate_up", "down")
        if graph == "denoiser" or index != last  # nothing reads what the encoder's last layer would add
    }
    bound = {tensor.name for tensor in table.weights}
    assert bound >= {*experts, "model.decoder.embed_tokens.weight"}
    # All matrices are bound, those that multiply the same value as one.
    parts = [part for tensor in table.weights for part in tensor.parts]
    used = {
        tensor.name
        for tensor in onnx.load(built / GRAPH_FILES[graph], load_external_data=False).graph.initializer
        if tensor.external_data and len(tensor.dims) > 1 and weight_class(tensor.name) != "router"
    }
    assert sorted(parts) == sorted(used)
    between = "model.decoder.layers.0."
    assert {f"{between}self_attn.q_proj+k_proj+v_proj.weight", f"{between}mlp.gate_proj+up_proj.weight"} <= bound
    for tensor in table.tensors:
        dynamic = any(isinstance(axis, str) for axis in tensor.shape)
        assert (tensor.profile is not None) == (dynamic and tensor.mode == "input")
    cache = next(tensor for tensor in table.tensors if tensor.name == f"past_key_values.{last}.key")
    assert cache.profile is not None
    assert (cache.profile.min[1], cache.profile.max[1]) == (1, MAX_CONTEXT)


def test_an_engine_holds_no_lifted_weight(built: Path) -> None:
    # The denoiser's engine against the weights that it would hold otherwise: random bytes do not compress.
    engine = (built / engine_file("denoiser")).read_bytes()
    store = built / "weights.safetensors"
    from dgcompile.safetensors_file import read_header

    tensors = read_header(store)
    embedding = tensors["model.decoder.embed_tokens.weight"]
    data = store.read_bytes()[embedding.offset : embedding.offset + embedding.nbytes]
    assert data[: 1 << 10] not in engine


def test_a_second_build_is_the_same_bytes(source: Path, built: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", "kernels", "engine")
    assert gpu_build(source, folder) == ["kernels", "engine"]
    assert content(folder) == content(built)
    assert gpu_build(source, folder) == []


@pytest.mark.parametrize(
    ("label", "count"),
    [
        ("kernels", "1"),
        ("rename", "encoder.engine"),
        ("engine denoiser", "0"),
        ("record engine", "end"),
    ],
)
def test_killed_in_a_gpu_stage_it_goes_on_to_the_same_bytes(
    source: Path, built: Path, tmp_path: Path, label: str, count: str
) -> None:
    stages = ("kernels", "engine") if "kernels" in label else ("engine",)
    folder = unfinished_copy(built, tmp_path / "bundle", *stages)
    options = ("--target", "rtx5090", "--max-context", str(MAX_CONTEXT), "--at", label, count, "kill")
    process = start_runner(source, folder, *options)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGKILL, errors
    assert "unfinished" in refusal(folder)
    gpu_build(source, folder)
    assert content(folder) == content(built)


@pytest.mark.parametrize("label", ["kernels", "engine encoder"])
def test_ctrl_c_ends_the_workers_and_the_build_goes_on_later(
    source: Path, built: Path, tmp_path: Path, label: str
) -> None:
    folder = unfinished_copy(
        built, tmp_path / "bundle", *(("kernels", "engine") if label == "kernels" else ("engine",))
    )

    class Interrupting(Progress):
        @contextmanager
        def task(self, started: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
            def advance(amount: float = 1.0, /) -> None:
                if started == label:
                    signal.raise_signal(signal.SIGINT)

            yield advance

    with pytest.raises(KeyboardInterrupt):
        build(
            source,
            Target.load("rtx5090"),
            Recipe.load("bf16"),
            folder,
            max_context=MAX_CONTEXT,
            progress=Interrupting(),
        )
    assert not psutil.Process().children(recursive=True)
    assert not list((folder / "engines").glob("*")) if (folder / "engines").exists() else True
    if label != "kernels":  # the rest is the same, and takes a while
        return
    gpu_build(source, folder)
    assert content(folder) == content(built)


def test_resume_builds_engines_without_the_checkpoint(built: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", "engine")
    assert f"dgcompile build --resume {folder}" in refusal(folder)
    result = CliRunner().invoke(cli, ["build", "--resume", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["target"] == "rtx5090"
    assert content(folder) == content(built)


def test_inspect_shows_what_a_gpu_bundle_is(built: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(built), "--verify"])
    assert result.exit_code == 0, result.output
    assert "runs on this version only" in result.stdout and "max batch" in result.stdout
    assert "engines/denoiser.engine" in result.stdout and ".cubin" not in result.stdout
    assert re.search(r"and \d+ files of the stage kernels", result.stdout)


def test_resume_refuses_what_it_cannot_finish(built: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="there is no such folder"):
        resume(tmp_path / "nothing")
    folder = unfinished_copy(built, tmp_path / "bundle", "weights", "engine")
    with pytest.raises(BundleError, match="stage weights is to be done, which needs the checkpoint"):
        resume(folder)
    damaged = unfinished_copy(built, tmp_path / "damaged", "engine")
    (damaged / "encoder.onnx").write_bytes(b"x" + (damaged / "encoder.onnx").read_bytes()[1:])
    with pytest.raises(BundleError, match=r"encoder\.onnx is damaged"):
        resume(damaged)
    result = CliRunner().invoke(cli, ["build", "examples/sudoku", "--resume", str(folder)])
    assert result.exit_code == 2 and "no other option goes with it" in result.output


def test_h100_ends_before_its_engines_and_says_what_to_do_where(
    source: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(built, tmp_path / "bundle")
    with pytest.raises(EngineElsewhereError) as caught:
        gpu_build(source, folder, "h100", overwrite=True)
    text = str(caught.value)
    assert caught.value.exit_code == 3 and "\n" not in text
    assert "tensorrt is not installed here (pip install 'dgcompile[h100]')" in text
    assert f"a machine with NVIDIA H100 SXM 80 GB and tensorrt and run there: dgcompile build --resume {folder}" in text
    manifest = Manifest.read(folder)
    assert manifest.unfinished == ("engine",)
    assert all(name.startswith("kernels/sm90/") for name in manifest.stages["kernels"].files)
    # With the library but another GPU it is no different: TensorRT times its kernels on the card.
    monkeypatch.setattr(stages, "library_version", lambda backend: "11.4")
    with pytest.raises(EngineElsewhereError, match="this machine has no NVIDIA driver"):
        resume(folder)
    refused = refusal(folder)
    assert "unfinished" in refused and "--resume" in refused


def test_without_the_library_the_rtx5090_too_is_finished_elsewhere(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", "engine")
    monkeypatch.setattr(stages, "library_version", lambda backend: None)
    with pytest.raises(EngineElsewhereError, match=r"tensorrt_rtx is not installed here .*dgcompile\[rtx5090\]"):
        resume(folder)


def test_what_cannot_be_redone_here_stays_finished(
    source: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(built, tmp_path / "bundle")
    monkeypatch.setattr(stages, "library_version", lambda backend: None)
    # Another machine has other versions of the tools, the engine library among them.
    ours = Stage.tool_versions
    monkeypatch.setattr(Stage, "tool_versions", lambda self: {**ours(self), "onnx": "0", "tensorrt_rtx": ""})
    assert resume(folder).manifest.unfinished == ()
    assert content(folder) == content(built)
    # But what no longer fits is said, and not thrown away either.
    edit(folder, lambda manifest: manifest.update(max_context=64))
    with pytest.raises(EngineElsewhereError):
        resume(folder)
    assert Manifest.read(folder).stages["engine"].state == "finished"
    assert (folder / engine_file("denoiser")).exists()


def test_a_full_disk_in_the_engine_stage(built: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", "engine")
    size = (built / engine_file("encoder")).stat().st_size
    command = [sys.executable, "-m", "dgcompile", "build", "--resume", str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY)),
    )
    assert done.returncode == 1
    assert "no space left for" in done.stderr and "run the same command again" in done.stderr
    assert "engine encoder: done" not in done.stderr and "Traceback" not in done.stderr
    assert not list((folder / "engines").glob("*"))


@pytest.mark.parametrize("name", ["kernels", "engines", "kernels/sm120"])
def test_links_in_place_of_a_bundles_folders_are_refused(source: Path, built: Path, tmp_path: Path, name: str) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", "engine")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "x.cubin").write_text("mine")
    if (folder / name).exists():
        shutil.rmtree(folder / name)
    (folder / name).symlink_to(victim)
    for start in (lambda: resume(folder), lambda: gpu_build(source, folder)):
        with pytest.raises(BundleError, match=f"{name} is a link; expected a folder of the bundle"):
            start()
    assert [path.name for path in victim.iterdir()] == ["x.cubin"]


# What a bundle for a GPU is refused for -------------------------------------------------------------------------------


def test_without_a_gpu_generate_says_so_in_one_line(built: Path) -> None:
    result = CliRunner().invoke(cli, ["generate", str(built), "hello"])
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "built for NVIDIA GeForce RTX 5090" in lines[0] and "no NVIDIA driver" in lines[0]


def test_another_gpu_and_an_old_driver(built: Path, with_gpu: Callable[..., None]) -> None:
    with_gpu(Card(0, "NVIDIA H100", "9.0", 80 << 30, 132))
    text = refusal(built)
    assert "NVIDIA H100 (9.0)" in text and "compute capability 12.0" in text
    with_gpu(RTX5090, (12, 4))
    assert "offers CUDA 12.4; expected CUDA 13.0 or newer" in refusal(built)
    with_gpu(None)
    assert "no GPU" in refusal(built)


def test_another_version_of_the_library(built: Path, tmp_path: Path, with_gpu: Callable[..., None]) -> None:
    with_gpu(RTX5090)
    assert Bundle.open(built).manifest.engine is not None
    folder = shutil.copytree(built, tmp_path / "bundle")
    edit(folder, lambda manifest: manifest["engine"].update(version="1.6.0.0"))
    text = refusal(folder)
    assert "this machine has tensorrt_rtx 1.7" in text and "1.6.0.0, which built the engines" in text


def test_damage(built: Path, tmp_path: Path) -> None:
    for number, (name, change) in enumerate(
        (
            (engine_file("denoiser"), "is damaged"),
            (table_file("encoder"), "is damaged"),
            ("kernels/sm120/index.json", "is damaged"),
            (engine_file("encoder"), "is missing"),
        )
    ):
        folder = shutil.copytree(built, tmp_path / str(number))
        file = folder / name
        if change == "is missing":
            file.unlink()
        else:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        text = refusal(folder, to_run=False)
        assert name in text and (change in text or "no such file" in text.lower())


def test_a_manifest_that_lists_no_engine(built: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(built, tmp_path / "bundle")
    edit(folder, lambda manifest: manifest["stages"]["engine"]["files"].pop(engine_file("encoder")))
    assert f"{engine_file('encoder')} is not recorded" in refusal(folder, to_run=False)
    edit(folder, lambda manifest: manifest.update(max_batch=None))
    assert "max_batch is None" in refusal(folder, to_run=False)
    edit(folder, lambda manifest: manifest.update(format_version=99))
    assert "newer than this dgcompile reads" in refusal(folder, to_run=False)


def test_engines_of_a_rehearsal_are_for_nothing(built: Path, tmp_path: Path, with_gpu: Callable[..., None]) -> None:
    with_gpu(RTX5090)
    folder = shutil.copytree(built, tmp_path / "bundle")
    edit(folder, lambda manifest: manifest["engine"].update(rehearsed=True))
    assert "engines of a rehearsal, which no GPU runs" in refusal(folder)


def edit(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    change(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


# What an engine build fails with --------------------------------------------------------------------------------------


def build_engines(folder: Path) -> None:
    manifest = Manifest.read(folder)
    engines.build_engines(
        folder,
        manifest.spec,
        "bfloat16",
        manifest.target,
        "kernels/sm120",
        MAX_CONTEXT,
        1,
        Progress(),
    )


def rewrite(folder: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    """Changes the encoder's graph."""
    file = folder / GRAPH_FILES["encoder"]
    model = onnx.load(str(file), load_external_data=False)
    change(model)
    onnx.save(model, str(file))


def custom_node(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == kind)


def test_a_node_without_a_plugin(built: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", "engine")

    def rename(model: onnx.ModelProto) -> None:
        custom_node(model, "BlockAttention").op_type = "BlockAttentionX"

    rewrite(folder, rename)
    with pytest.raises(EngineError, match=r"encoder\.onnx: tensorrt_rtx .* cannot take it: node .*BlockAttentionX"):
        build_engines(folder)
    assert not list((folder / "engines").iterdir())


@pytest.mark.parametrize(
    ("kind", "attribute", "value", "message"),
    [
        ("BlockAttention", "scale", -1.0, "scale"),
        ("BlockAttention", "window", -3, "window"),
        ("MixtureOfExperts", "weight_format", "int3", "int3"),
    ],
)
def test_a_field_out_of_range(
    built: Path, tmp_path: Path, kind: str, attribute: str, value: float | int | str, message: str
) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", "engine")

    def change(model: onnx.ModelProto) -> None:
        node = custom_node(model, kind)
        kept = [found for found in node.attribute if found.name != attribute]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(attribute, value)])

    rewrite(folder, change)
    with pytest.raises(EngineError, match=f"(?s){kind}.*{message}"):
        build_engines(folder)
    assert not list((folder / "engines").iterdir())


def test_kernels_of_another_gpu(built: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", "engine")
    index = folder / "kernels/sm120/index.json"
    index.write_text(index.read_text().replace('"sm": 120', '"sm": 90'))
    with pytest.raises(EngineError, match="kernels for compute capability 90; expected 120"):
        build_engines(folder)


def test_a_graph_that_needs_kernels_which_are_not_there(built: Path, tmp_path: Path) -> None:
    folder = unfinished_copy(built, tmp_path / "bundle", "engine")

    index = folder / "kernels/sm120/index.json"
    content = json.loads(index.read_text())
    content["kernels"] = [kernel for kernel in content["kernels"] if "gate_up" not in kernel["key"]]
    index.write_text(json.dumps(content))
    with pytest.raises(EngineError, match=r"(?s)a plugin failed: MixtureOfExperts.*gate_up_kernel"):
        build_engines(folder)


def test_a_worker_that_dies_is_reported_with_its_last_words(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_worker_command", lambda: ["/bin/sh", "-c", "echo last words >&2; kill -ABRT $$"])
    job = EngineJob("tensorrt_rtx", "encoder", "{}", "", 120, 170, "", "", f"{os.getpid():010}")
    with pytest.raises(EngineError, match=r"built the encoder was ended by SIGABRT; its last words: last words"):
        engines._run_worker(job, built, Progress())


def test_progress_never_goes_back_and_ends_at_the_whole() -> None:
    phases = engines._Phases()
    events = [
        {"event": "phase", "name": "a", "parent": None, "steps": 2},
        {"event": "phase", "name": "b", "parent": "a", "steps": 2},
        {"event": "step", "name": "b", "step": 0},
        {"event": "finish", "name": "b"},
        {"event": "step", "name": "a", "step": 0},
        {"event": "phase", "name": "b", "parent": "a", "steps": 1000},
        {"event": "step", "name": "b", "step": 0},
        {"event": "finish", "name": "a"},
        {"event": "done"},
    ]
    further = [phases.take(event) for event in events]
    assert min(further) >= 0 and sum(further) == pytest.approx(100)
    assert sum(further[:3]) == pytest.approx(25) and sum(further[:5]) == pytest.approx(50)


def test_engine_graphs_have_no_functions_and_no_large_constant(built: Path) -> None:
    for file in GRAPH_FILES.values():
        model, lifted = engine_graph(built / file)
        assert not model.functions
        assert {value.name for value in model.graph.input} >= set(lifted)
        assert not set(lifted) & {initializer.name for initializer in model.graph.initializer}
