"""The experts' module in every number format: traced, as ONNX, and run by onnxruntime through the functions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxruntime import OrtValue
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram

from dgcompile.contract import ONNX_DOMAIN
from dgcompile.plugins.moe import formats
from dgcompile.plugins.moe.formats import WeightFormat
from dgcompile.plugins.moe.torch_op import mixture_of_experts
from dgcompile.trace.functions import OPSET, function_protos
from dgcompile.trace.modules import MixtureOfExpertsModule
from dgcompile.trace.nodes import ONNX_DOMAIN_VERSION, TRANSLATIONS

EXPERTS, WIDTH, INNER = 4, 96, 32
FORMATS: list[tuple[WeightFormat, int]] = [("float", 0), ("fp8", 0), ("int4", 32), ("w4a8", 64)]
SHAPES = {"gate_up_proj": (EXPERTS, 2 * INNER, WIDTH), "down_proj": (EXPERTS, WIDTH, INNER)}


class Layer(nn.Module):
    """The least that holds experts under their name."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        output: Tensor = self.experts(hidden, ids, weights)
        return output


def traced(weight_format: WeightFormat, group: int, dtype: torch.dtype = torch.float32) -> ExportedProgram:
    """A program whose weights take no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        original = nn.Module()
        for name, shape in SHAPES.items():
            original.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
        arguments = (torch.zeros(5, WIDTH, dtype=dtype), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2))
    layer = Layer(MixtureOfExpertsModule(original, weight_format, group))
    tokens = Dim("tokens")
    with torch.no_grad():
        return torch.export.export(layer, arguments, dynamic_shapes=[{0: tokens}] * 3, strict=False)


def exported(program: ExportedProgram) -> ir.Model:
    result = torch.onnx.export(
        program,
        dynamo=True,
        optimize=False,
        opset_version=OPSET,
        custom_translation_table=TRANSLATIONS,
        verbose=False,
    )
    assert result is not None
    return result.model


@pytest.mark.parametrize(("weight_format", "group"), FORMATS)
def test_the_node_and_its_weights(weight_format: WeightFormat, group: int) -> None:
    model = exported(traced(weight_format, group, torch.bfloat16))
    (node,) = (node for node in model.graph if node.domain == ONNX_DOMAIN)
    assert node.op_type == "MixtureOfExperts"
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    assert attributes == {"activation": "gelu_tanh", "weight_format": weight_format, "group_size": group}
    names = [value.name for value in node.inputs[3:] if value is not None]
    weights = ["experts.gate_up_proj", "experts.down_proj"]
    assert names == (weights if weight_format == "float" else [*weights, *(f"{name}_scale" for name in weights)])
    types = {
        "float": [ir.DataType.BFLOAT16] * 2,
        "fp8": [ir.DataType.FLOAT8E4M3FN] * 2 + [ir.DataType.FLOAT] * 2,
        "int4": [ir.DataType.UINT8] * 2 + [ir.DataType.FLOAT16] * 2,
        "w4a8": [ir.DataType.UINT8] * 2 + [ir.DataType.FLOAT16] * 2,
    }
    assert [model.graph.initializers[name].dtype for name in names] == types[weight_format]
    assert node.outputs[0].dtype == ir.DataType.BFLOAT16


@pytest.mark.parametrize(("weight_format", "group"), FORMATS[1:3])
def test_onnxruntime_runs_the_graph(weight_format: WeightFormat, group: int) -> None:
    """Weights become inputs, so that real ones can be given; another number of tokens than was traced."""
    rng = np.random.default_rng(0)
    packed: dict[str, np.ndarray] = {}
    for name, shape in SHAPES.items():
        weight = rng.standard_normal(shape) / shape[-1] ** 0.5
        quantized = formats.fp8_quantize(weight) if weight_format == "fp8" else formats.int4_quantize(weight, group)
        packed[f"experts.{name}"], packed[f"experts.{name}_scale"] = quantized
    model = exported(traced(weight_format, group))
    for name in packed:
        value = model.graph.initializers.pop(name)
        value.const_value = None
        model.graph.inputs.append(value)
    for proto in function_protos(weight_format):
        function = ir.serde.deserialize_function(proto)
        model.functions[function.identifier()] = function
    model.opset_imports[ONNX_DOMAIN] = ONNX_DOMAIN_VERSION
    model.ir_version = 10

    hidden = rng.standard_normal((9, WIDTH)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(9)])
    weights = rng.random((9, 2), dtype=np.float32)
    types = {value.name: value.dtype for value in model.graph.inputs}
    values = dict(zip(types, (hidden, ids, weights), strict=False)) | packed
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = {
        name: OrtValue.ortvalue_from_numpy_with_onnx_type(array, int(types[name])) for name, array in values.items()
    }
    actual = session.run_with_ort_values(None, inputs)[0].numpy()
    names = ("experts.gate_up_proj", "experts.down_proj")
    arrays = [hidden, ids, weights, *(packed[name] for name in names), *(packed[f"{name}_scale"] for name in names)]
    expected = mixture_of_experts(*(torch.from_numpy(array) for array in arrays), weight_format, group).numpy()
    # Both sum up to 96 terms of unit size in float32.
    np.testing.assert_allclose(actual, expected, atol=2e-6)
