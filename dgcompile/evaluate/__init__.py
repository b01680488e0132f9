"""What a bundle costs in accuracy against the unquantized model."""

from dgcompile.evaluate.graphs import GraphSession, open_graphs
from dgcompile.evaluate.report import EvaluationReport
from dgcompile.evaluate.run import Example, evaluate, first_step_logits, is_bundle, read_examples

__all__ = [
    "EvaluationReport",
    "Example",
    "GraphSession",
    "evaluate",
    "first_step_logits",
    "is_bundle",
    "open_graphs",
    "read_examples",
]
