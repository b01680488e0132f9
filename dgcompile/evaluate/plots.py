"""The plots of an evaluation's page: SVG that takes the colour of the text around it, for light and dark pages."""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dgcompile.evaluate.report import EvaluationReport
from dgcompile.evaluate.summary import reference_name

_TEXT = "#010203"
"""Stands for the page's own text colour while matplotlib draws; nothing else is drawn in it."""

_REFERENCE, _CANDIDATE = "#8a8f98", "#2f81d6"
"""Grey and blue, told apart by brightness too, and readable on white and on black."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in a font of the reader's
    "svg.hashsalt": "dgcompile",  # equal reports give equal pages
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _TEXT,
    "axes.edgecolor": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.titlecolor": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def plots(report: EvaluationReport) -> dict[str, str]:
    """The plots as ``<svg>`` elements: "kl", "layers", "steps" and "bytes"."""
    with matplotlib.rc_context(_STYLE):
        figures = {
            "kl": _kl(report),
            "layers": _layers(report),
            "steps": _steps(report),
            "bytes": _bytes(report),
        }
        return {name: _svg(figure, name) for name, figure in figures.items()}


def _axes(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color=_TEXT, alpha=0.15)
    axes.set_axisbelow(True)
    return figure, axes


def _kl(report: EvaluationReport) -> Figure:
    figure, axes = _axes("KL by denoising step", "step", "nats")
    values = [step.kl for step in report.steps]
    axes.plot([step.step for step in report.steps], values, color=_CANDIDATE, marker="o", markersize=4)
    _whole_numbers(axes, [step.step for step in report.steps])
    if min(values) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    return figure


def _layers(report: EvaluationReport) -> Figure:
    figure, axes = _axes("Error of the layers' outputs, first step", "layer", "relative error")
    axes.bar(
        [layer.layer for layer in report.layers], [layer.relative_error for layer in report.layers], color=_CANDIDATE
    )
    _whole_numbers(axes, [layer.layer for layer in report.layers])
    return figure


def _steps(report: EvaluationReport) -> Figure:
    figure, axes = _axes("Denoising steps per canvas", "steps", "canvases")
    numbers = [row.steps for row in report.step_counts]
    bars = (
        (-0.2, [row.reference for row in report.step_counts], _REFERENCE, reference_name(report)),
        (0.2, [row.candidate for row in report.step_counts], _CANDIDATE, "bundle"),
    )
    for shift, counts, colour, label in bars:
        axes.bar([number + shift for number in numbers], counts, width=0.4, color=colour, label=label)
    _whole_numbers(axes, numbers)
    axes.legend()
    return figure


def _bytes(report: EvaluationReport) -> Figure:
    figure, axes = _axes("Bytes of the weights", "MB", "")
    places = range(len(report.weights))
    bars = (
        (-0.2, [row.bf16_bytes / 1e6 for row in report.weights], _REFERENCE, "bfloat16"),
        (0.2, [row.stored_bytes / 1e6 for row in report.weights], _CANDIDATE, "bundle"),
    )
    for shift, sizes, colour, label in bars:
        axes.barh([place + shift for place in places], sizes, height=0.4, color=colour, label=label)
    axes.set_yticks(list(places), [row.weight_class for row in report.weights])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=_TEXT, alpha=0.15)
    axes.legend(loc="lower right")
    return figure


def _whole_numbers(axes: Any, numbers: list[int]) -> None:
    """Ticks at some of the numbers, not so many that they touch."""
    axes.set_xticks(numbers[:: -(-len(numbers) // 16)])


def _svg(figure: Figure, name: str) -> str:
    """The drawing without its file header, its ids made unique on the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # HTML knows them
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    title = html.escape(figure.axes[0].get_title(loc="left"))
    text = text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    return text.replace(_TEXT, "currentColor")
