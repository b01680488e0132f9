"""The main results of an evaluation in words, for the terminal and the page alike."""

from __future__ import annotations

from dataclasses import dataclass

from dgcompile.evaluate.report import EvaluationReport


def reference_name(report: EvaluationReport) -> str:
    """How the reference is called in tables."""
    return "transformers" if report.reference_kind == "checkpoint" else "reference"


def facts(report: EvaluationReport) -> dict[str, str]:
    """Names and values, the most telling ones first."""
    first, trajectory, count = report.first_step, report.trajectory, len(report.prompts)
    reference = reference_name(report)
    how = "transformers, float32" if report.reference_kind == "checkpoint" else f"recipe {report.reference_recipe}"
    foreign = "" if report.same_checkpoint else "; NOT what the bundle was built from"
    graphs = "; its graphs in float32 on the CPU, not its engines" if report.graphs_only else ""
    worst = report.worst_prompt
    return {
        "bundle": f"{report.bundle} (target {report.target}, recipe {report.recipe}{graphs})",
        "against": f"{report.against} ({how}{foreign})",
        "first step": f"KL {first.kl:.2e} nats, relative error of the logits {first.relative_error:.2e}; mean of "
        f"{count} prompts",
        "worst prompt": f"KL {worst.kl:.2e} nats ({worst.place})",
        "all steps": f"KL {trajectory.kl:.2e} nats, relative error {trajectory.relative_error:.2e}; "
        f"{sum(step.canvases for step in report.steps)} steps",
        "identical texts": f"{report.identical_texts} of {count}",
        **(
            {
                "right answers": f"bundle {report.candidate_right}, {reference} {report.reference_right} "
                f"of {report.answers}"
            }
            if report.answers
            else {}
        ),
        "steps per canvas": f"bundle {report.candidate_mean_steps:.2f}, {reference} {report.reference_mean_steps:.2f}: "
        f"{report.steps_ratio:.3f} times as many",
        "bits per weight": f"{report.bits_per_weight:.2f}: {report.stored_bytes / report.bf16_bytes:.0%} of bfloat16",
    }


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns and the rows of cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(report: EvaluationReport) -> tuple[Table, ...]:
    """The results in full, but for the single prompts. Every column but the first holds numbers."""
    weights = tuple(
        (
            row.weight_class,
            f"{row.weights}",
            f"{row.stored_bytes}",
            f"{row.bf16_bytes}",
            f"{row.stored_bytes / row.bf16_bytes:.1%}",
            f"{row.bits_per_weight:.2f}",
        )
        for row in report.weights
    )
    return (
        Table(
            "Bytes of the weights, scales included, and bits per weight",
            ("class", "weights", "stored", "bfloat16", "of it", "bits"),
            weights,
        ),
        Table(
            "Logits by denoising step, both given the reference's canvas",
            ("step", "canvases", "KL (nats)", "relative error"),
            tuple(
                (f"{step.step}", f"{step.canvases}", f"{step.kl:.2e}", f"{step.relative_error:.2e}")
                for step in report.steps
            ),
        ),
        Table(
            "Outputs of the layers in the first step",
            ("layer", "relative error"),
            tuple((f"{layer.layer}", f"{layer.relative_error:.2e}") for layer in report.layers),
        ),
        Table(
            "Denoising steps that canvases took, each side by itself",
            ("steps", reference_name(report), "bundle"),
            tuple((f"{row.steps}", f"{row.reference}", f"{row.candidate}") for row in report.step_counts),
        ),
    )
