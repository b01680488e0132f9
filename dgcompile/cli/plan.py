"""``dgcompile plan``: bytes and milliseconds of a build before any work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dgcompile.cli.command import FOLDER, Command, complete_recipe, complete_target, json_option
from dgcompile.cli.text import format_bytes, print_json

if TYPE_CHECKING:
    from dgcompile.plan import BuildPlan
    from dgcompile.plan.roofline import StepTime

_WORK_TITLES = {
    "experts": "experts",
    "attention": "attention, projections",
    "dense_mlp": "dense MLP",
    "self_conditioning": "self-conditioning",
    "router": "router",
    "norms": "norms",
    "attention_scores": "attention, over the KV cache",
    "embedding": "logits and soft embeddings",
    "sampling": "sampling",
}


@click.command(
    "plan",
    cls=Command,
    examples=[
        ("plan CHECKPOINT --target rtx5090", "Does it fit an RTX 5090, and how fast can it be?"),
        ("plan google/diffusiongemma-26B-A4B-it --target h100 --recipe fp8", "A hub checkpoint: fetches its config"),
        ("plan config.json --target h200 --max-context 262144 --max-batch 8", "Long requests, eight at a time"),
        ("plan config.json --target my_card.yaml --json | jq .device", "A card of your own, for a script"),
    ],
)
@click.argument("checkpoint")
@click.option("--target", required=True, shell_complete=complete_target, help="Target name or YAML file.")
@click.option("--recipe", shell_complete=complete_recipe, help="Recipe name or YAML file.  [default: the target's own]")
@click.option(
    "--max-context",
    type=int,
    help="Most tokens, prompt and answer, of one request.  [default: the model's, up to 8192]",
)
@click.option("--max-batch", type=int, help="Most requests of one engine call.  [default: 1]")
@click.option(
    "--tokens-per-step",
    type=float,
    help="Tokens of a finished text that a denoising step gives each request; depends on the text.  [default: 16]",
)
@click.option("-o", "--output", type=FOLDER, help="Folder of the bundle, for the disk space there.  [default: .]")
@json_option
def command(
    checkpoint: str,
    target: str,
    recipe: str | None,
    max_context: int | None,
    max_batch: int | None,
    tokens_per_step: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show what a bundle of CHECKPOINT takes, and how fast it can be, before any work.

    CHECKPOINT is a folder, a config.json, or a Hugging Face hub id, of which only the config is fetched. Nothing is
    written. `dgcompile build` refuses what does not fit, by the same figures.

    Bytes of weights and of the KV cache are exact. Everything else is an estimate, and times are arithmetic on the
    card's published peaks: nothing is measured.
    """
    from dgcompile.build.planning import plan_build
    from dgcompile.plan.refusal import refusal_of
    from dgcompile.recipe import Recipe
    from dgcompile.target import Target

    chosen = Target.load(target)
    plan = plan_build(
        checkpoint,
        chosen,
        Recipe.load(recipe or chosen.default_recipe),
        max_context=max_context,
        max_batch=max_batch,
        tokens_per_step=tokens_per_step,
        output=output,
    )
    refusal = refusal_of(plan)
    if as_json:
        print_json({**plan.to_values(), "build_refusal": str(refusal) if refusal else None})
        return
    _render(plan)
    from dgcompile.cli.render import console

    console().print()
    console().print(f"A BUILD HERE IS REFUSED: {refusal}" if refusal else "can be built here")


def _render(plan: BuildPlan) -> None:
    from dgcompile.cli.render import console, print_facts

    workload = plan.workload
    print_facts(
        {
            "target": f"{workload.target.name} ({workload.target.title})",
            "recipe": f"{workload.recipe.name} ({workload.recipe.title})",
            "max context": f"{workload.max_context} tokens",
            "max batch": f"{workload.max_batch} rows",
            "parameters": f"{sum(plan.parameters.values()) / 1e9:.2f} billion",
        }
    )
    for show in (_show_weights, _show_device, _show_step, _show_host):
        console().print()
        show(plan)


def _show_weights(plan: BuildPlan) -> None:
    from dgcompile.cli.render import print_table

    rows = [
        (kind, plan.workload.recipe.weights.of(kind).text, f"{count / 1e6:,.1f}", format_bytes(plan.weight_bytes[kind]))
        for kind, count in sorted(plan.parameters.items(), key=lambda item: -item[1])
    ]
    total = ("all", "", f"{sum(plan.parameters.values()) / 1e6:,.1f}", format_bytes(sum(plan.weight_bytes.values())))
    print_table(("weights", "format", "million", "stored"), [*rows, total], right=frozenset({"million", "stored"}))


def _show_device(plan: BuildPlan) -> None:
    from dgcompile.cli.render import console, print_table

    device, on_gpu = plan.device, plan.workload.on_gpu
    sizes = {"weights" + (", once" if on_gpu else ", mapped"): device.bound_weights}
    sizes |= {f"weights in the {graph} engine": size for graph, size in device.engine_weights.items()}
    sizes |= {f"KV cache, {kind.removesuffix('_attention')} layers": size for kind, size in device.kv_cache.items()}
    sizes["new tokens, before they are cached"] = device.new_tokens
    sizes["canvases, self-conditioning"] = device.self_conditioning + device.small_tensors
    for graph, size in device.activations.items():
        shared = ", shared" if size == max(device.activations.values()) else ", in the other's memory"
        sizes[f"activations of the {graph}{shared}"] = size
    if device.converted_weights:
        sizes["one weight in float32"] = device.converted_weights
    if device.allowance:
        sizes["CUDA, library, kernels (allowance)"] = device.allowance
    rows = [(name, format_bytes(size)) for name, size in sizes.items()]
    rows += [("total", format_bytes(device.total)), ("there is", format_bytes(plan.device_has))]
    title = "on the device" if on_gpu else "in this machine's memory"
    print_table((title, "bytes"), rows, right=frozenset({"bytes"}))
    console().print()
    if plan.fits:
        console().print(
            f"fits; at this batch a max context of {plan.context_fits} fits too, at this context a max batch of "
            f"{plan.batch_fits}"
        )
    elif not on_gpu:
        console().print("more than this machine's memory: weights will be read from the disk again in every step")
    else:
        console().print(f"DOES NOT FIT; {_what_fits(plan)}")


def _what_fits(plan: BuildPlan) -> str:
    found = []
    if plan.context_fits is not None:
        found.append(f"at this batch a max context of {plan.context_fits} fits")
    if plan.batch_fits is not None:
        found.append(f"at this context a max batch of {plan.batch_fits} fits")
    return ", ".join(found) or "nor does it with any shorter context or smaller batch"


def _show_step(plan: BuildPlan) -> None:
    from dgcompile.cli.render import console, print_facts, print_table

    step = plan.step
    if step is None:
        console().print(f"no time of a step: target {plan.workload.target.name} does not state {plan.step_lacks}")
        return
    print_table(
        ("a denoising step", "bytes", "GFLOP", "in", "ms", "bound by"),
        [
            (
                _WORK_TITLES[kind],
                format_bytes(part.weight_bytes + part.other_bytes),
                f"{part.flops / 1e9:,.0f}",
                part.precision if part.flops else "-",
                f"{part.seconds * 1e3:.2f}",
                part.binding,
            )
            for kind, part in step.work.items()
        ],
        right=frozenset({"bytes", "GFLOP", "ms"}),
    )
    console().print()
    print_facts(
        {
            "floor": f"{_speed(step, step.floor_seconds)}: every weight and the cache read once takes "
            f"{step.memory_seconds * 1e3:.1f} ms, every multiply-add {step.compute_seconds * 1e3:.1f} ms",
            "estimate": f"{_speed(step, step.seconds)}: one kind of work after another, at the card's peaks",
            "assumed": f"{step.tokens_per_step:g} tokens of text for each step, full caches, no time for prompts",
        }
    )


def _speed(step: StepTime, seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms, {step.tokens_per_second(seconds):,.0f} tokens/s"


def _show_host(plan: BuildPlan) -> None:
    from dgcompile.cli.render import print_table

    host, disk = plan.host, plan.disk
    rows = [(f"memory, stage {stage}", format_bytes(size), "") for stage, size in host.stages.items()]
    rows.append(("memory, at most", format_bytes(host.needed), format_bytes(host.machine)))
    there = f" ({format_bytes(disk.present)} of it there)" if disk.present else ""
    free = "" if disk.free is None else f"{format_bytes(disk.free)} free"
    rows.append(("disk, the bundle" + there, format_bytes(disk.bundle), free))
    print_table(("to build it", "needs", "there is"), rows, right=frozenset({"needs", "there is"}))
