"""A toy model: two small ONNX graphs with the real interface, and the answers that they must give, in plain numpy.

Its "encoder" caches sums over exactly the tokens that a row of each layer may attend to, and its "denoiser" hashes
everything that it may see: a cache row in a wrong slot, a token too many, a buffer not swapped, self-conditioning not
zeroed or a random number of another row each change the answer. How many steps a canvas takes depends on the hash.
All numbers are small integers, so nothing rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from dgcompile.contract import GRAPH_FILES, GraphName, TensorSpec, graph_inputs, graph_outputs
from dgcompile.engine_table import graph_engine_file
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import LayerSpec, ModelSpec
from dgcompile.runtime.random_numbers import RowRandom

WINDOW = 8
CANVAS = 6
VOCAB = 32
SURE = 0.001  # entropy of a canvas that has settled

_TYPES = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "bool": TensorProto.BOOL}


def toy_spec(canvas_length: int = CANVAS) -> ModelSpec:
    """One sliding and one full layer."""
    return ModelSpec(
        vocab_size=VOCAB,
        hidden_size=4,
        intermediate_size=4,
        num_attention_heads=2,
        num_experts=2,
        top_k_experts=1,
        moe_intermediate_size=4,
        sliding_window=WINDOW,
        canvas_length=canvas_length,
        max_position_embeddings=512,
        final_logit_softcapping=30.0,
        rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
        layers=(
            LayerSpec(kind="sliding_attention", num_key_value_heads=1, head_dim=2, window=WINDOW, has_v_proj=True),
            LayerSpec(kind="full_attention", num_key_value_heads=2, head_dim=1, window=0, has_v_proj=False),
        ),
    )


@dataclass
class _Builder:
    """Collects nodes: ``g("Add", a, b)`` adds one and gives its output's name; numbers become constants."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def __call__(self, op: str, *inputs: str | int | float | list[int], output: str = "", **attributes: Any) -> str:
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        output = output or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [output], **attributes))
        return output

    def constant(self, value: int | float | list[int]) -> str:
        name = f"c{len(self.constants)}"
        dtype = np.float32 if isinstance(value, float) else np.int64
        self.constants.append(onnx.numpy_helper.from_array(np.array(value, dtype=dtype), name))
        return name

    def to_int(self, value: str) -> str:
        return self("Cast", value, to=TensorProto.INT64)

    def to_float(self, value: str) -> str:
        return self("Cast", value, to=TensorProto.FLOAT)

    def cached(self, layer: int, kind: str) -> str:
        """The first number of each cached row, int64 [B, C]."""
        array = f"past_key_values.{layer}.{kind}"
        flat = self("Reshape", array, [0, 0, -1])
        return self.to_int(self("Gather", flat, 0, axis=2))

    def slots(self, layer: int, past: str) -> tuple[str, str]:
        """Position of each slot and whether it holds a token; int64 and bool [B, C]; ``past`` is int64 [B, 1]."""
        capacity = self("Gather", self("Shape", f"past_key_values.{layer}.key"), 1)
        slot = self("Unsqueeze", self("Range", 0, capacity, 1), [0])
        newest = self("Sub", past, 1)
        position = self("Sub", newest, self("Mod", self("Sub", newest, slot), capacity))
        return position, self("Less", slot, self("Min", past, capacity))

    def masked_sum(self, values: str, mask: str) -> str:
        """Sum over the last axis where ``mask``."""
        return self("ReduceSum", self("Where", mask, values, 0), [-1], keepdims=0)


def _encoder(g: _Builder) -> None:
    ids = g.to_int("input_ids")  # [B, N]
    past = g("Unsqueeze", g.to_int("past_length"), [1])  # [B, 1]
    length = g("Gather", g("Shape", "input_ids"), 1)
    index = g("Range", 0, length, 1)
    position = g("Add", past, g("Unsqueeze", index, [0]))  # [B, N]
    query = g("Unsqueeze", position, [2])  # [B, N, 1]
    causal = g("LessOrEqual", g("Unsqueeze", position, [1]), query)  # [B, N, N]
    token = g("Add", ids, 1)

    slot_position, held = g.slots(0, past)
    oldest = g("Sub", query, WINDOW)
    near = g("And", g("Unsqueeze", held, [1]), g("Greater", g("Unsqueeze", slot_position, [1]), oldest))
    cached = g("Unsqueeze", g("Add", g.cached(0, "value"), 1), [1])
    within = g("And", causal, g("Greater", g("Unsqueeze", position, [1]), oldest))
    window_sum = g("Add", g.masked_sum(cached, near), g.masked_sum(g("Unsqueeze", token, [1]), within))

    slot_position, held = g.slots(1, past)
    weighted = g("Mul", g("Add", g.cached(1, "value"), 1), g("Add", slot_position, 1))
    seen = g.masked_sum(weighted, held)  # [B]
    new = g.masked_sum(g("Unsqueeze", g("Mul", token, g("Add", position, 1)), [1]), causal)
    total = g("Add", g("Unsqueeze", seen, [1]), new)

    for name, value in (
        ("present.0.key", window_sum),
        ("present.0.value", ids),
        ("present.1.key", total),
        ("present.1.value", ids),
    ):
        pair = g("Concat", g("Unsqueeze", value, [2]), g("Unsqueeze", position, [2]), axis=2)
        # Padding rows get a number that would spoil every sum, so that storing one is noticed.
        real = g("Less", g("Unsqueeze", index, [0]), g("Unsqueeze", g.to_int("input_length"), [1]))
        pair = g("Where", g("Unsqueeze", real, [2]), pair, 100003)
        heads = [0, 0, 1, 2] if name.startswith("present.0") else [0, 0, 2, 1]
        g("Reshape", g.to_float(pair), heads, output=name)


def _denoiser(g: _Builder) -> None:
    past = g("Unsqueeze", g.to_int("past_length"), [1])
    position, held = g.slots(0, past)
    near = g("And", held, g("Greater", position, g("Sub", past, WINDOW)))
    digest = g.masked_sum(g("Add", g("Add", g.cached(0, "value"), 1), g.cached(0, "key")), near)
    position, held = g.slots(1, past)
    weighted = g("Mul", g("Add", g.cached(1, "value"), 1), g("Add", position, 1))
    digest = g("Add", digest, g.masked_sum(g("Add", weighted, g.cached(1, "key")), held))
    digest = g("Unsqueeze", digest, [1])  # [B, 1]

    def memory(channel: int) -> str:
        return g("Gather", "self_conditioning", channel, axis=2)

    step = g.to_int(memory(0))  # [B, L], steps taken before
    canvas = g.to_int("canvas_ids")
    first = g("Where", g("Equal", step, 0), canvas, g.to_int(memory(1)))
    heat = g("Add", memory(2), g("Unsqueeze", "temperature", [1]))
    index = g("Unsqueeze", g("Range", 0, g("Gather", g("Shape", "canvas_ids"), 1), 1), [0])
    target = g("Mod", g("Add", g("Add", digest, g("Mul", index, 7)), first), VOCAB)
    needed = g("Add", g("Mod", digest, 4), 1)
    settled = g("Not", g("Less", step, needed))
    drawn = g.to_int(g("Floor", g("Mul", "uniform", float(VOCAB))))
    wandering = g("Mod", g("Add", g("Add", canvas, step), drawn), VOCAB)
    argmax = g("Cast", g("Where", settled, target, wandering), to=TensorProto.INT32)
    entropy = g("Where", settled, SURE, g("Add", heat, 1.0))
    accepted = g("LessOrEqual", entropy, g("Unsqueeze", "entropy_bound", [1]))
    g("Identity", argmax, output="argmax_ids")
    g("Identity", entropy, output="entropy")
    g("Identity", accepted, output="accepted")
    g("Where", accepted, argmax, "noise_ids", output="next_canvas_ids")
    channels = [g.to_float(g("Add", step, 1)), g.to_float(first), heat, g("Identity", heat)]
    g("Concat", *[g("Unsqueeze", channel, [2]) for channel in channels], axis=2, output="next_self_conditioning")


def _save(graph: GraphName, spec: ModelSpec, path: Path) -> None:
    builder = _Builder()
    {"encoder": _encoder, "denoiser": _denoiser}[graph](builder)

    def infos(tensors: Sequence[TensorSpec]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(tensor.name, _TYPES[tensor.dtype], tensor.shape) for tensor in tensors]

    inputs, outputs = graph_inputs(graph, spec, "float32"), graph_outputs(graph, spec, "float32")
    body = helper.make_graph(builder.nodes, graph, infos(inputs), infos(outputs), builder.constants)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def write_toy_graphs(folder: Path, spec: ModelSpec | None = None) -> Path:
    """Writes both graphs into ``folder``, and again as the engines of the cpu target."""
    (folder / "engines").mkdir(exist_ok=True)
    for graph in GRAPH_FILES:
        for name in (GRAPH_FILES[graph], graph_engine_file(graph)):
            _save(graph, spec or toy_spec(), folder / name)
    return folder


def _digest(tokens: list[int]) -> int:
    """What the toy denoiser hashes of the committed tokens, from its definition alone: no cache, no ring."""
    ids = [token + 1 for token in tokens]
    window_sums = [sum(ids[max(0, end - WINDOW) : end]) for end in range(1, len(ids) + 1)]
    weighted = [value * (position + 1) for position, value in enumerate(ids)]
    totals = [sum(weighted[: end + 1]) for end in range(len(ids))]
    near = slice(max(0, len(ids) - WINDOW + 1), None)
    return sum(ids[near]) + sum(window_sums[near]) + sum(weighted) + sum(totals)


def toy_answer(prompt: Sequence[int], config: GenerationConfig, seed: int) -> tuple[list[int], list[int]]:
    """What the toy model must answer: generated ids before any cut (whole canvases up to an EOS), steps per canvas."""
    random = RowRandom(seed, CANVAS, VOCAB)
    tokens, steps = list(prompt), []
    for canvas in range(-(-config.max_new_tokens // CANVAS)):
        digest = _digest(tokens)
        target = (digest + 7 * np.arange(CANVAS) + random.initial_canvas(canvas)) % VOCAB
        current = random.initial_canvas(canvas).astype(np.int64)
        history: list[npt.NDArray[np.int64]] = []
        heat = 0.0
        for step in range(config.max_denoising_steps):
            uniform, noise = random.step(canvas, step + 1)
            heat += config.temperature(config.max_denoising_steps - step)
            settled = step >= 1 + digest % 4
            wandering = (current + step + np.floor(uniform * VOCAB).astype(np.int64)) % VOCAB
            history.append(target if settled else wandering)
            entropy = SURE if settled else 1 + heat
            current = history[-1] if entropy <= config.entropy_bound else noise.astype(np.int64)
            stability, confidence = config.stability_threshold, config.confidence_threshold
            if stability is None or confidence is None or len(history) <= stability:
                continue
            if entropy < confidence and all((old == history[-1]).all() for old in history[-1 - stability :]):
                break
        steps.append(len(history))
        tokens += history[-1].tolist()
        if any(token in config.eos_token_ids for token in history[-1].tolist()):
            break
    return tokens[len(prompt) :], steps
