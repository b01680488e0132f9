"""The end of the denoiser alone, traced and as the engine of the cpu target has it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn
from torch.export import Dim

from dgcompile.build.onnxruntime.sampling import stream_sampler
from dgcompile.build.onnxruntime.writer import MICROSOFT
from dgcompile.trace.functions import OPSET
from dgcompile.trace.sampler import denoising_sample
from tests.build.cpu.rewritten import weights_in_file

WIDTH, CANVAS, SOFTCAP = 16, 12, 30.0
INPUTS = ("canvas_ids", "hidden", "temperature", "entropy_bound", "uniform", "noise_ids")
OUTPUTS = ("next_canvas_ids", "argmax_ids", "next_self_conditioning", "accepted", "entropy")


class Tail(nn.Module):
    """The end of the denoiser: from the normed hidden states on."""

    def __init__(self, vocab: int, width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocab, width))

    def forward(
        self,
        canvas_ids: Tensor,
        hidden: Tensor,
        temperature: Tensor,
        entropy_bound: Tensor,
        uniform: Tensor,
        noise: Tensor,
    ) -> tuple[Tensor, ...]:
        logits = torch.tanh(nn.functional.linear(hidden, self.table) / SOFTCAP) * SOFTCAP
        scale = torch.tensor(self.table.shape[1] ** 0.5)
        return denoising_sample(logits, temperature, entropy_bound, uniform, noise + 0 * canvas_ids, self.table, scale)


@cache
def _exported(vocab: int, width: int, canvas: int) -> bytes:
    rows = torch.zeros(2, canvas)
    arguments = (rows.int(), torch.zeros(2, canvas, width), torch.ones(2), torch.ones(2), rows, rows.int())
    batch = [{0: Dim("batch")}] * len(INPUTS)
    program = torch.export.export(Tail(vocab, width), arguments, dynamic_shapes=batch, strict=False)
    exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    assert exported is not None
    return ir.to_proto(exported.model).SerializeToString()


def traced(table: np.ndarray, folder: Path, canvas: int = CANVAS) -> ir.Model:
    """The traced sampler with the logits before it; its table [V, H] lies in a file in ``folder``."""
    model = ir.from_proto(onnx.ModelProto.FromString(_exported(*table.shape, canvas)))
    for value, name in zip((*model.graph.inputs, *model.graph.outputs), (*INPUTS, *OUTPUTS), strict=True):
        value.name = name
    (stored,) = weights_in_file(folder, {"stored": (table, ir.DataType.FLOAT)}).values()
    model.graph.register_initializer(stored)
    model.graph.initializers["table"].replace_all_uses_with(stored)
    del model.graph.initializers["table"]
    (tanh,) = (node for node in model.graph if node.op_type == "Tanh")
    (capped,) = tanh.outputs[0].consumers()
    capped.outputs[0].name = "logits"
    return model


def streamed(table: np.ndarray, folder: Path, canvas: int = CANVAS) -> ir.Model:
    """The same in one pass over the vocabulary."""
    model = traced(table, folder, canvas)
    stream_sampler(model.graph)
    RemoveUnusedNodesPass()(model)
    model.opset_imports[MICROSOFT] = 1
    return model
