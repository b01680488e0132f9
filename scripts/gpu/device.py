"""What the device is and can do at most: the floors that timings are held against."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

ROOT = Path(__file__).resolve().parents[2]

# Bandwidth in TB/s; dense TFLOPS in bfloat16 and FP8, both accumulated in fp32: what the vendor publishes for the card.
PUBLISHED_RATES = [
    (r"\bH100 PCIe", 2.0, 756.0, 1513.0),
    (r"\bH100 NVL", 3.9, 835.0, 1671.0),
    (r"\bH100\b", 3.35, 989.0, 1979.0),
    (r"\bH200 NVL", 4.8, 835.0, 1671.0),
    (r"\bH200\b", 4.8, 989.0, 1979.0),
    (r"\bB200\b", 8.0, 2250.0, 4500.0),
    (r"\bRTX 5090$", 1.792, 209.5, 419.0),
]


@dataclass(frozen=True)
class Rates:
    """What no kernel on this device can exceed.

    Attributes:
        bytes_per_s: of the device's memory.
        flops, fp8_flops: per second, of bfloat16 and E4M3 products accumulated in fp32.
        source: "published" or "measured".
    """

    bytes_per_s: float
    flops: float
    fp8_flops: float
    source: str

    def floor_ms(self, nbytes: float, flops: float, *, fp8: bool = False) -> float:
        """Milliseconds that moving so many bytes and computing so many products take at least, one beside the other."""
        return 1e3 * max(nbytes / self.bytes_per_s, flops / (self.fp8_flops if fp8 else self.flops))


def published_rates(name: str) -> Rates | None:
    """Rates of a known card by its name; None of an unknown one, and of a slice of one."""
    if "MIG" in name:
        return None
    for pattern, terabytes, teraflops, fp8_teraflops in PUBLISHED_RATES:
        if re.search(pattern, name):
            return Rates(terabytes * 1e12, teraflops * 1e12, fp8_teraflops * 1e12, "published")
    return None


def measured_rates(device: torch.device) -> Rates:
    """What a large copy and a large matrix product of torch's reach; FP8 is taken as twice bfloat16."""
    from gpu.timing import median_ms

    source = torch.empty(2**30 if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), device)
    size = 8192 if device.type == "cuda" else 128
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.randn(size, size, dtype=dtype, device=device)
    product_ms = median_ms(lambda: left @ left, device)
    flops = 2 * size**3 / product_ms * 1e3
    return Rates(2 * source.numel() / copy_ms * 1e3, flops, 2 * flops, "measured")


def describe(device: torch.device) -> dict[str, Any]:
    """Device, driver, versions and rates, for the report."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "dgcompile": _commit(),
    }
    if device.type == "cpu":
        measured = measured_rates(device)
        return {
            "device": "cpu (self-test in Triton's interpreter: timings mean nothing)",
            "versions": versions,
            "rates": asdict(measured),
            "measured_rates": asdict(measured),
        }
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 9:
        raise RuntimeError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}; the kernels need Hopper "
            "(9.0) or Blackwell (10.0 or newer)"
        )
    free, _ = torch.cuda.mem_get_info(device)  # before the measurement below takes some
    measured = measured_rates(device)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "free_memory_bytes": free,
        "l2_bytes": properties.L2_cache_size,
        **_nvidia_smi(),
        "versions": versions,
        "rates": asdict(published_rates(properties.name) or measured),
        "measured_rates": asdict(measured),
    }


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _commit() -> str:
    """The commit that ran; "+" where files differ from it."""
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def _nvidia_smi() -> dict[str, Any]:
    """Driver, power limit and clock: without them a timing cannot be compared."""
    fields = ("driver_version", "power.limit", "clocks.max.sm")
    found = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    if not found:
        return {"driver": "unknown: nvidia-smi gave nothing"}
    driver, power, clock = (part.strip() for part in found.splitlines()[0].split(","))
    return {"driver": driver, "power_limit": power, "max_clock": clock}
