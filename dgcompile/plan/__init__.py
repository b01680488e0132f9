"""Bytes and milliseconds of a build before any work: arithmetic on shapes, formats and a target's facts. No torch.

workload.py     what is planned for
weights.py      parameters and bytes, by class and by where they lie
cache.py        the KV cache
activations.py  intermediate results of a run, and the traffic of the logits
device.py       all of a device's memory, and the largest limits that fit
roofline.py     the time of a denoising step
host.py         memory and disk of the machine that builds
build_plan.py   all of it
refusal.py      what cannot fit
"""

from dgcompile.plan.build_plan import DEFAULT_TOKENS_PER_STEP, BuildPlan, make_plan
from dgcompile.plan.workload import Workload

__all__ = ["DEFAULT_TOKENS_PER_STEP", "BuildPlan", "Workload", "make_plan"]
