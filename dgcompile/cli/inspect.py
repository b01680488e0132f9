"""``dgcompile inspect``: what is in a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dgcompile.cli.command import FOLDER, Command, json_option
from dgcompile.cli.text import format_bytes, print_json

if TYPE_CHECKING:
    from dgcompile.bundle import EngineLibrary, Manifest


@click.command(
    "inspect",
    cls=Command,
    examples=[
        ("inspect BUNDLE", "What it was built from and for, its files and stages"),
        ("inspect BUNDLE --verify", "Also compare every file with its recorded SHA-256"),
        ("inspect BUNDLE --json | jq .spec.layers", "The shape of the model's layers"),
    ],
)
@click.argument("bundle", type=FOLDER)
@click.option("--verify", is_flag=True, help="Hash every file again and compare it with the manifest.")
@json_option
def command(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show what is in BUNDLE, also when its build is unfinished or was made for another machine."""
    from dgcompile.bundle import Manifest, check_files

    manifest = Manifest.read(bundle)
    if verify:
        from dgcompile.cli.render import progress

        check_files(bundle, manifest.files, full=True, progress=progress())
    if as_json:
        print_json({**manifest.model_dump(mode="json"), "verified": verify})
        return
    from dgcompile.cli.render import console, print_facts, print_table

    spec, engine = manifest.spec, manifest.engine
    kinds = [layer.kind for layer in spec.layers]
    print_facts(
        {
            "bundle": str(bundle),
            "state": f"unfinished, next stage: {manifest.unfinished[0]}" if manifest.unfinished else "finished",
            "target": f"{manifest.target.name} ({manifest.target.title})",
            "recipe": f"{manifest.recipe.name} ({manifest.recipe.title})",
            "max context": f"{manifest.max_context} tokens",
            **({"max batch": f"{manifest.max_batch} rows"} if manifest.max_batch else {}),
            "model": f"{spec.num_hidden_layers} layers ({kinds.count('sliding_attention')} sliding, window "
            f"{spec.sliding_window}; {kinds.count('full_attention')} full), hidden {spec.hidden_size}, vocabulary "
            f"{spec.vocab_size}, canvas {spec.canvas_length}",
            "experts": f"{spec.num_experts}, {spec.top_k_experts} per token, width {spec.moe_intermediate_size}",
            "engine": _engine(engine) if engine else "-",
            **_workspaces(bundle, manifest),
            "checkpoint": manifest.checkpoint,
            "made by": f"dgcompile {manifest.dgcompile_version}, bundle format {manifest.format_version}",
        }
    )
    console().print()
    print_table(
        ("file", "size", "sha256", "stage"),
        [
            (name, format_bytes(record.size), record.sha256[:12], stage)
            for stage, stage_record in manifest.stages.items()
            if stage_record.state == "finished"
            for name, record in sorted(stage_record.files.items())
            # Many small files with names for machines; --json has them.
            if stage != "kernels"
        ],
        right=frozenset({"size"}),
    )
    kernels = manifest.stages.get("kernels")
    if kernels and kernels.files:
        size = format_bytes(sum(record.size for record in kernels.files.values()))
        console().print(f"and {len(kernels.files)} files of the stage kernels, {size}")
    if verify:
        console().print("every file is as its stage left it")


def _engine(engine: EngineLibrary) -> str:
    """The library, and which versions of it run the bundle."""
    if engine.rehearsed:
        return f"{engine.name} {engine.version}, of a rehearsal: runs nowhere"
    versions = f"{engine.oldest_version} or newer" if engine.name == "onnxruntime" else "this version only"
    return f"{engine.name} {engine.version}, runs on {versions}"


def _workspaces(bundle: Path, manifest: Manifest) -> dict[str, str]:
    """What the engines' runs need beside weights and caches, of which the larger counts: they take turns."""
    from dgcompile.contract import GRAPH_FILES
    from dgcompile.engine_table import EngineTable, table_file

    if manifest.target.backend == "onnxruntime" or manifest.stages["engine"].state != "finished":
        return {}
    needed = {graph: EngineTable.read(bundle / table_file(graph)).workspace_bytes for graph in GRAPH_FILES}
    known = [f"{graph} {format_bytes(nbytes)}" for graph, nbytes in needed.items() if nbytes is not None]
    return {"workspace": ", ".join(known) + " of device memory, shared"} if known else {}
