"""How long something takes on the device: CUDA graph replays between events, L2 flushed, median of several."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu.device import Rates
from gpu.records import emit

SECONDS = 1.5
"""Time that the runs of one measurement take at most, so that a slow device still gets through the list."""

RUNS = (5, 50)
"""Fewest and most runs of one measurement."""


def capture(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of the function's launches, and its result, which each replay overwrites.

    The function runs three times before, so that everything is compiled.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a graph has memory of its own and cannot use what the runs above left in the cache
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def samples_ms(function: Callable[[], Any], device: torch.device, *, graph: bool = True) -> list[float]:
    """Milliseconds of single runs, each with a cold L2, as between the other operations of a denoising step.

    Args:
        function: launches the work on the current stream.
        graph: replay a CUDA graph, so that launching from Python costs nothing; needs a function without
            synchronisation.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        function()
        return [1e3 * (time.perf_counter() - start)]
    run = capture(function)[0].replay if graph else function
    run()
    flushed = torch.empty(
        2 * max(torch.cuda.get_device_properties(device).L2_cache_size, 2**25), dtype=torch.uint8, device=device
    )

    def timed(count: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, end in events:
            # Also keeps the device busy while the launch below is on its way to it.
            flushed.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    first = timed(3)
    count = int(SECONDS * 1e3 / (statistics.median(first) + 0.2))
    return timed(min(max(count, RUNS[0]), RUNS[1]))


def median_ms(function: Callable[[], Any], device: torch.device, *, graph: bool = True) -> float:
    """Median of :func:`samples_ms`."""
    return statistics.median(samples_ms(function, device, graph=graph))


def report(
    name: str,
    function: Callable[[], Any],
    device: torch.device,
    rates: Rates,
    *,
    nbytes: float,
    flops: float,
    fp8: bool = False,
    graph: bool = True,
    **fields: Any,
) -> float:
    """Time a function and emit the record: median, spread, bytes and FLOPS per second, share of the floor.

    Args:
        nbytes: bytes that must move at least: inputs, weights and outputs once each.
        flops: additions and multiplications.
        fp8: the products run on FP8 tensor cores.

    Returns:
        The median in milliseconds.
    """
    times = samples_ms(function, device, graph=graph)
    median = statistics.median(times)
    floor = rates.floor_ms(nbytes, flops, fp8=fp8)
    emit(
        "timing",
        name,
        ms=median,
        fastest_ms=min(times),
        slowest_ms=max(times),
        runs=len(times),
        floor_ms=floor,
        share_of_floor=floor / median,
        nbytes=nbytes,
        flops=flops,
        bytes_per_s=nbytes / median * 1e3,
        flops_per_s=flops / median * 1e3,
        **fields,
    )
    return median
