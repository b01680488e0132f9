"""Timings at the real sizes: the kernels beside torch's own, one layer, the whole denoising step, and transformers'."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import float64, kernels, numeric
from gpu.denoiser import Denoiser
from gpu.device import Rates
from gpu.records import check, emit, skip
from gpu.shapes import (
    FULL,
    PUBLISHED,
    PUBLISHED_CONTEXT,
    PUBLISHED_TOKENS_PER_STEP,
    SLIDING,
    TINY,
    TINY_CONTEXT,
    DenoiserShape,
    LayerShape,
)
from gpu.timing import capture, report
from gpu.weights import FORMATS, ExpertWeights, Format, random_dense, random_experts

RESERVE = 5 * 2**30
"""Device memory kept free beside weights and cache: logits and their copies in the sampler, CUDA itself."""

# Relative error of a token in one layer, bfloat16 against float32: a dozen roundings on the way gave 0.5 % when torch's
# own operators did the layer at its real size on a CPU. A token whose eighth and ninth expert nearly tie takes another
# one and is 8 % off or more: 4 % of the tokens there.
LAYER_TOKEN, LAYER_MEDIAN, LAYER_FAR_SHARE = 5e-2, 1.5e-2, 0.15


def sizes(device: torch.device) -> tuple[DenoiserShape, int, torch.dtype]:
    """Model, tokens in the cache, and dtype of what is timed here."""
    if device.type == "cuda":
        return PUBLISHED, PUBLISHED_CONTEXT, torch.bfloat16
    return TINY, TINY_CONTEXT, torch.float16


def time_attention(device: torch.device, rates: Rates, *, baseline: bool) -> None:
    """Both kinds of layers on a full cache; as the baseline, torch's attention on the same keys in one piece."""
    shape, context, dtype = sizes(device)
    generator = torch.Generator(device).manual_seed(3)
    for layer in (SLIDING, FULL) if shape is PUBLISHED else shape.layers:
        capacity = layer.window or context
        past = 4 * capacity if layer.window else context
        inputs = numeric.layer_inputs(shape, layer, capacity, [past], dtype, generator)
        tokens, heads, width = shape.canvas_length, shape.num_attention_heads, layer.head_dim
        cached = layer.window - 1 if layer.window else past
        keys = cached + tokens
        work: dict[str, Any] = {
            "nbytes": 2 * (2 * tokens * heads * width + 2 * keys * layer.num_key_value_heads * width),
            "flops": 4 * tokens * heads * width * keys,
        }
        name = f"attention head_dim {width}, {keys} keys"
        if not baseline:
            report(name, lambda: kernels.attention(**inputs, window=layer.window), device, rates, **work)  # noqa: B023
            continue

        def joined(which: str) -> Tensor:
            rows = torch.cat([inputs[f"past_{which}"][:, :cached], inputs[which]], dim=1)  # noqa: B023
            return rows.transpose(1, 2).contiguous()  # [B, Hkv, keys, D]

        query = inputs["query"].transpose(1, 2).contiguous()
        key, value = joined("key"), joined("value")
        _time_sdpa(name, query, key, value, device, rates, work)


def _time_sdpa(
    name: str, query: Tensor, key: Tensor, value: Tensor, device: torch.device, rates: Rates, work: dict[str, Any]
) -> None:
    """Each backend of torch's that takes these sizes; joining cache and block beforehand is not counted."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    group = query.shape[1] // key.shape[1]
    for backend, kind in backends.items():
        # The efficient backend knows no grouped heads.
        repeated = [part.repeat_interleave(group, 1) if backend == "efficient" else part for part in (key, value)]

        def call(parts: list[Tensor] = repeated, kind: Any = kind) -> Tensor:
            with sdpa_kernel(kind):
                return functional.scaled_dot_product_attention(query, *parts, scale=1.0, enable_gqa=True)

        _baseline(f"{name}: torch sdpa {backend}", call, device, rates, work)


def _baseline(
    name: str, call: Callable[[], Any], device: torch.device, rates: Rates, work: dict[str, Any], *, graph: bool = True
) -> None:
    """Time something of torch's; what it cannot do is left out, with its own words."""
    try:
        report(name, call, device, rates, **work, baseline=True, graph=graph)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        skip(name, f"torch: {str(error).strip().splitlines()[0][:200]}")
        if device.type == "cuda":
            torch.cuda.synchronize()  # a sticky error belongs here and not to the next measurement


def experts_work(shape: DenoiserShape, weights: ExpertWeights, tokens: int) -> dict[str, Any]:
    """Bytes and FLOPS of one MixtureOfExperts; with a canvas of 256 tokens all 128 experts are in use."""
    pairs = tokens * shape.top_k_experts
    return {
        "nbytes": weights.nbytes + 2 * 2 * tokens * shape.hidden_size,
        "flops": pairs * 6 * shape.hidden_size * shape.moe_intermediate_size,
        "fp8": weights.format.weight_format == "w4a8",
    }


def time_experts(form: Format, device: torch.device, rates: Rates, *, baseline: bool) -> None:
    """One layer's experts on a canvas; as the baseline, unquantized: torch's grouped product, and a plain loop."""
    shape, _, dtype = sizes(device)
    generator = torch.Generator(device).manual_seed(4)
    weights = random_experts(form, shape.num_experts, shape.hidden_size, shape.moe_intermediate_size, dtype, generator)
    inputs = numeric.expert_inputs(shape, shape.canvas_length, dtype, generator)
    work = experts_work(shape, weights, shape.canvas_length)
    name = f"experts {form.name}, {shape.canvas_length} tokens"
    if baseline:
        grouped, loop = _torch_experts(*inputs, weights)
        _baseline(f"{name}: torch grouped_mm", grouped, device, rates, work)
        _baseline(f"{name}: torch loop over experts", loop, device, rates, work)
    else:
        report(name, lambda: kernels.experts(*inputs, weights), device, rates, **work)


def _torch_experts(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, weights: ExpertWeights
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """MixtureOfExperts by torch's grouped product and by a loop; the loop knows the experts' loads beforehand."""
    experts, top_k = weights.gate_up.shape[0], expert_ids.shape[1]
    counts = torch.bincount(expert_ids.flatten().long(), minlength=experts).tolist()

    def sorted_pairs() -> tuple[Tensor, Tensor, Tensor]:
        order = expert_ids.flatten().argsort(stable=True)
        token = order // top_k
        return token, hidden[token], expert_weights.flatten()[order]

    def gather(token: Tensor, rows: Tensor, shares: Tensor) -> Tensor:
        return torch.zeros_like(hidden).index_add_(0, token, (rows * shares[:, None]).to(hidden.dtype))

    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up

    def grouped() -> Tensor:
        token, rows, shares = sorted_pairs()
        loads = torch.zeros(experts, dtype=torch.int32, device=hidden.device)
        loads.index_add_(0, expert_ids.flatten().long(), torch.ones_like(expert_ids.flatten()))
        ends = loads.cumsum(0).to(torch.int32)
        product = getattr(functional, "grouped_mm", None) or torch._grouped_mm
        inner = gated(product(rows, weights.gate_up.transpose(1, 2), offs=ends))
        return gather(token, product(inner, weights.down.transpose(1, 2), offs=ends), shares)

    def loop() -> Tensor:
        token, rows, shares = sorted_pairs()
        parts = []
        for expert, part in enumerate(rows.split(counts)):
            inner = gated(functional.linear(part, weights.gate_up[expert]))
            parts.append(functional.linear(inner, weights.down[expert]))
        return gather(token, torch.cat(parts), shares)

    return grouped, loop


class Run:
    """A denoiser with random weights and one canvas under way on a full cache.

    Args:
        shape: of the model.
        form: of the experts' weights.
        context: tokens in the cache.
    """

    def __init__(
        self, shape: DenoiserShape, form: Format, context: int, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        device = generator.device
        self.shape = shape
        self.context = context
        self.weights = random_dense(shape, dtype, generator)
        self.experts = [
            random_experts(form, shape.num_experts, shape.hidden_size, shape.moe_intermediate_size, dtype, generator)
            for _ in shape.layers
        ]
        self.operators = "torch.ops.dgcompile" if device.type == "cuda" and form.name == "float" else "torch_call"
        self.denoiser = Denoiser(shape, self.weights, self._attention, self._experts)
        canvas = shape.canvas_length

        def tokens() -> Tensor:
            return torch.randint(shape.vocab_size, (1, canvas), generator=generator, device=device, dtype=torch.int32)

        self.past_key_values = []
        for layer in shape.layers:
            size = (1, layer.window or context, layer.num_key_value_heads, layer.head_dim)
            # Keys as large as the model's own after its norm, see random_dense.
            key = torch.randn(size, generator=generator, device=device) * (1.3 * layer.head_dim**-0.25)
            value = torch.randn(size, generator=generator, device=device)
            self.past_key_values.append((key.to(dtype), value.to(dtype)))
        signal = torch.randn(1, canvas, shape.hidden_size, generator=generator, device=device)
        self.inputs: dict[str, Tensor] = {
            "canvas_ids": tokens(),
            "self_conditioning": signal.to(dtype),
            "past_length": torch.full((1,), context, dtype=torch.int32, device=device),
            "temperature": torch.full((1,), 0.6, device=device),
            "entropy_bound": torch.full((1,), 0.1, device=device),
            "uniform": torch.rand(1, canvas, generator=generator, device=device),
            "noise_ids": tokens(),
        }

    def _attention(self, *tensors: Tensor, window: int) -> Tensor:
        if self.operators == "torch_call":
            return kernels.attention(*tensors, window=window)
        # The operators choose tiles and splits themselves.
        import dgcompile.plugins.block_attention.torch_op  # noqa: F401

        result: Tensor = torch.ops.dgcompile.block_attention(*tensors, 1.0, window, False)
        return result

    def _experts(self, layer: int, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        weights = self.experts[layer]
        if self.operators == "torch_call":
            return kernels.experts(hidden, expert_ids, expert_weights, weights)
        import dgcompile.plugins.moe.torch_op  # noqa: F401

        result: Tensor = torch.ops.dgcompile.mixture_of_experts(
            hidden, expert_ids, expert_weights, weights.gate_up, weights.down
        )
        return result

    def step(self) -> Any:
        """One denoising step; the sampler's output."""
        return self.denoiser.step(**self.inputs, past_key_values=self.past_key_values)

    def logits(self) -> Tensor:
        """The step without its sampler."""
        names = ("canvas_ids", "self_conditioning", "past_length")
        return self.denoiser.logits(*(self.inputs[name] for name in names), self.past_key_values)

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        """One layer."""
        canvas = torch.arange(self.shape.canvas_length, device=hidden.device)
        past_length = self.inputs["past_length"]
        rotations = self.denoiser.rotations(past_length[:, None] + canvas)
        return self.denoiser.layer(index, hidden, rotations, past_length, self.past_key_values[index])


def layer_work(shape: DenoiserShape, layer: LayerShape, context: int, form: Format) -> dict[str, Any]:
    """Bytes and FLOPS of one layer on a canvas; all experts are in use."""
    tokens = shape.canvas_length
    dense = replace(shape, layers=(layer,)).dense_parameters() - replace(shape, layers=()).dense_parameters()
    cached = layer.window - 1 if layer.window else context
    cache = 2 * cached * layer.num_key_value_heads * layer.head_dim
    attention = 4 * tokens * (cached + tokens) * shape.num_attention_heads * layer.head_dim
    experts = 6 * tokens * shape.top_k_experts * shape.hidden_size * shape.moe_intermediate_size
    return {
        "nbytes": shape.expert_parameters() * form.bytes_per_weight + 2 * (dense + cache),
        "flops": 2 * tokens * dense + attention + experts,
    }


def step_work(shape: DenoiserShape, context: int, form: Format) -> dict[str, Any]:
    """Bytes and FLOPS of a whole step: the layers, self-conditioning, head, and soft embeddings.

    The embedding is read twice, for the head and for the soft embeddings. Logits are not counted: 268 MB in fp32, which
    a sampler that is fused with the head need never write.
    """
    layers = [layer_work(shape, layer, context, form) for layer in shape.layers]
    once = replace(shape, layers=()).dense_parameters() + 2 * shape.vocab_size * shape.hidden_size
    return {
        "nbytes": sum(layer["nbytes"] for layer in layers) + 2 * once,
        "flops": sum(layer["flops"] for layer in layers) + 2 * shape.canvas_length * once,
    }


def check_layer(form: Format, device: torch.device, rates: Rates) -> None:
    """One full-size layer of each kind: time, and its result against the same layer in float32 without our kernels."""
    shape, _, _ = sizes(device)
    for layer in dict.fromkeys(shape.layers):
        _check_layer(layer, form, device, rates)


def _check_layer(layer: LayerShape, form: Format, device: torch.device, rates: Rates) -> None:
    shape, context, dtype = sizes(device)
    generator = torch.Generator(device).manual_seed(5)
    run = Run(replace(shape, layers=(layer,), vocab_size=1024), form, context, dtype, generator)
    hidden = torch.randn(1, shape.canvas_length, shape.hidden_size, generator=generator, device=device).to(dtype)
    actual = run.layer(0, hidden)
    expected = _plain_layer(run, hidden)
    errors = (actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)  # [1, L]
    name = f"layer {'sliding' if layer.window else 'full'}, {form.name}"
    far: float = (errors > LAYER_TOKEN).float().mean().item()
    check(f"{name}: median token", errors.median().item(), LAYER_MEDIAN, "a dozen roundings to 16 bits on the way")
    check(f"{name}: tokens far off", far, LAYER_FAR_SHARE, "ties between the last expert in and the first one out")
    work = layer_work(shape, layer, context, form)
    report(name, lambda: run.layer(0, hidden), device, rates, **work, operators=run.operators)


def _plain_layer(run: Run, hidden: Tensor) -> Tensor:
    """The layer in float32 with attention and experts in float64, [1, L, H]."""
    quantizes = run.experts[0].format.weight_format == "w4a8"

    def attention(*tensors: Tensor, window: int) -> Tensor:
        return float64.attention(*tensors, scale=1.0, window=window, causal=False)[0].float()

    def experts(layer: int, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        weights = run.experts[layer]
        return float64.experts(hidden, expert_ids, expert_weights, weights, round_activations=quantizes).float()

    weights = {name: tensor.float() for name, tensor in run.weights.items()}
    plain = Denoiser(run.shape, weights, attention, experts)
    past_length = run.inputs["past_length"]
    positions = past_length[:, None] + torch.arange(run.shape.canvas_length, device=hidden.device)
    past = (run.past_key_values[0][0].float(), run.past_key_values[0][1].float())
    return plain.layer(0, hidden.float(), plain.rotations(positions), past_length, past)


def step_bytes(form: Format) -> float:
    """Device memory that the published model's weights take in this format."""
    experts = len(PUBLISHED.layers) * PUBLISHED.expert_parameters() * form.bytes_per_weight
    return experts + 2 * (PUBLISHED.dense_parameters() + PUBLISHED.vocab_size * PUBLISHED.hidden_size)


def step_formats(free_bytes: float) -> list[str]:
    """Formats in which the whole model fits, the most telling first: unquantized, FP8, INT4, W4A8."""
    order = ["float", "fp8", "int4 g32", "w4a8 g32"]
    return [name for name in order if step_bytes(FORMATS[name]) + RESERVE < free_bytes]


def time_step(form: Format, device: torch.device, rates: Rates) -> None:
    """The whole denoising step, sampler included, as one CUDA graph; and what its head and sampler take of it."""
    shape, context, dtype = sizes(device)
    run = Run(shape, form, context, dtype, torch.Generator(device).manual_seed(6))
    name = f"denoising step, experts {form.name}"
    if device.type == "cuda":
        graph, output = capture(run.step)
        graph.replay()
        first = [tensor.clone() for tensor in output]
        graph.replay()
        again = [tensor.clone() for tensor in output]
        del graph, output
    else:
        first, again = list(run.step()), list(run.step())
    next_canvas, argmax, signal, accepted, entropy = first
    finite = torch.isfinite(signal).all() & torch.isfinite(entropy).all()
    inside = ((next_canvas >= 0) & (next_canvas < shape.vocab_size) & (argmax < shape.vocab_size)).all()
    check(f"{name}: finite", float(not (finite & inside)), 0.0, "no NaN, all tokens in the vocabulary")
    same = all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    check(f"{name}: repeated", float(not same), 0.0, "equal inputs give equal bits")
    median = report(
        name,
        run.step,
        device,
        rates,
        **step_work(shape, context, form),
        context=context,
        operators=run.operators,
        program="plain torch denoiser, scripts/gpu/denoiser.py",
    )
    emit(
        "info",
        f"{name}: estimate",
        estimated_tokens_per_s=1e3 / median * PUBLISHED_TOKENS_PER_STEP,
        how=f"the published {PUBLISHED_TOKENS_PER_STEP} tokens per step over the step's time; no text was generated",
        mean_entropy=entropy.mean().item(),
        accepted=int(accepted.sum()),
    )
    logits = run.logits()
    hidden = torch.randn_like(signal)
    embedding = {"nbytes": 2 * shape.vocab_size * shape.hidden_size}
    product = 2 * shape.canvas_length * shape.vocab_size * shape.hidden_size
    report(f"{name}: head", lambda: run.denoiser.head(hidden), device, rates, **embedding, flops=product)
    names = ("temperature", "entropy_bound", "uniform", "noise_ids")
    given = [run.inputs[name] for name in names]
    report(
        f"{name}: sampler",
        lambda: run.denoiser.sample(logits, *given),
        device,
        rates,
        nbytes=embedding["nbytes"] + logits.nbytes,
        flops=product,
    )


def time_transformers(device: torch.device, rates: Rates) -> None:
    """The denoising step that transformers itself runs, with random weights of the same size, launched from Python."""
    name = "denoising step, transformers"
    if importlib.util.find_spec("transformers") is None:
        skip(name, "transformers is not installed")
        return
    try:
        from gpu.peer import TransformersStep
    except ImportError as error:
        skip(name, f"this transformers has no DiffusionGemma (5.14 or newer has): {error}")
        return
    shape, context, dtype = sizes(device)
    if device.type == "cuda":
        needed = step_bytes(FORMATS["float"]) + 2 * RESERVE
        free = torch.cuda.mem_get_info(device)[0]
        if free < needed:
            skip(name, f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
            return
    try:
        peer = TransformersStep(shape, context, dtype if device.type == "cuda" else torch.float32, device)
        peer()
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        skip(name, f"transformers: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
        return
    report(
        name,
        peer,
        device,
        rates,
        **step_work(shape, context, FORMATS["float"]),
        graph=False,
        baseline=True,
        context=context,
        program=peer.description,
    )
