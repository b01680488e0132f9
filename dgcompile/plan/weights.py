"""Parameters and bytes of the weights: by class, and by where they lie while a bundle runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dgcompile.contract import GRAPH_FILES, GraphName
from dgcompile.engine_table import TABLES
from dgcompile.model_spec import ModelSpec
from dgcompile.recipe import DENSE_CLASSES, Recipe, WeightClass, weight_class, weight_of
from dgcompile.runtime.device import aligned
from dgcompile.weights_store import Store

_LAST_LAYER_OF_ENCODER = ("k_proj", "v_proj", "k_norm", "v_norm", "input_layernorm")
"""What the encoder needs of the last layer: its keys and values, and the norm before them."""


@dataclass(frozen=True)
class EngineWeights:
    """Where the weights of a GPU bundle lie while it runs.

    Attributes:
        bound: bytes of device memory that both engines are given.
        constants: bytes inside each engine's file, which its device memory holds as well.
    """

    bound: int
    constants: Mapping[GraphName, int]


def weights_in_engines(spec: ModelSpec, recipe: Recipe, store: Store) -> EngineWeights:
    """How a store's tensors are shared out between device memory and the two engines.

    ``dgcompile.build.tensorrt`` decides it, graph by graph; this is the same from names and formats alone.
    """
    bound = 0
    constants: dict[GraphName, int] = dict.fromkeys(GRAPH_FILES, 0)
    for name, tensor in store.tensors.items():
        if is_engine_input(name, recipe):
            bound += aligned(tensor.nbytes)
            if _is_loaded_twice(name, spec, recipe):
                bound += aligned(tensor.nbytes)
            continue
        for graph in constants:
            if is_in_graph(weight_of(name), graph, spec):
                constants[graph] += tensor.nbytes
    return EngineWeights(bound, constants)


def is_engine_input(name: str, recipe: Recipe) -> bool:
    """Whether a tensor of the store is an input of the engines that use it, and so lies in device memory once; every
    other one is a constant of each of them."""
    kind = weight_class(name)
    is_matrix = kind in DENSE_CLASSES and name == weight_of(name)
    return kind in TABLES or (is_matrix and recipe.weights.of(kind).format != "int4")


def _is_loaded_twice(name: str, spec: ModelSpec, recipe: Recipe) -> bool:
    """Whether a tensor is part of one input of the encoder and of another one of the denoiser.

    Projections of one value are one input, and in the last layer the encoder has no queries. Static scales keep them
    apart.
    """
    last = f"model.decoder.layers.{spec.num_hidden_layers - 1}.self_attn."
    return recipe.weights.attention.activations == "none" and name in (
        last + "k_proj.weight",
        last + "v_proj.weight",
    )


def is_in_graph(weight: str, graph: GraphName, spec: ModelSpec) -> bool:
    """Whether a graph uses a weight of this canonical name.

    The encoder ends with the last layer's keys and values: what comes after feeds nothing, and is not in the graph.
    """
    if weight == "model.decoder.embed_tokens.weight":
        return True
    if weight.startswith("model.encoder."):  # the encoder's own layer scalars; the last one feeds nothing
        return graph == "encoder" and f".layers.{spec.num_hidden_layers - 1}." not in weight
    if graph == "denoiser":
        return True
    if not weight.startswith("model.decoder.layers.") or weight.endswith(".layer_scalar"):
        return False  # self-conditioning, the last norm, and the decoder's own layer scalars
    layer = int(weight.split(".")[3])
    return layer < spec.num_hidden_layers - 1 or weight.split(".")[-2] in _LAST_LAYER_OF_ENCODER


def parameters_of(spec: ModelSpec) -> dict[WeightClass, int]:
    """Parameters of each class of weight. Encoder and decoder share theirs, and each counts once."""
    counts: dict[WeightClass, int] = {}
    for name, shape in spec.expected_tensors().items():
        kind = weight_class(name)
        counts[kind] = counts.get(kind, 0) + math.prod(shape)
    return counts


def bytes_of(store: Store) -> dict[WeightClass, int]:
    """Stored bytes of each class of weight, scales included."""
    sizes: dict[WeightClass, int] = {}
    for name, tensor in store.tensors.items():
        kind = weight_class(name)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    return sizes
