"""Checks and times the project's kernels, and the whole denoising step, on the GPU of this machine.

Needs a Hopper or Blackwell GPU and, from this repository's environment, nothing but torch, triton, numpy and
safetensors: no TensorRT, no checkpoint. See docs/gpu_check.md.

    python scripts/gpu_check.py --output result.json
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

# `gpu` lies beside this file, where Python looks; the project itself need not be installed.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from gpu.parts import run_part
from gpu.results import Results
from gpu.runner import Runner

FAILED, UNUSABLE = 1, 2


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        prog="gpu_check.py",
        description="Check every kernel against float64 and time it, one layer and the whole denoising step.",
        epilog="Exit code: 0 all checks passed, 1 one failed or did not finish, 2 the device cannot be used.",
    )
    made.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="JSON file (default: %(default)s)")
    made.add_argument("--minutes", type=float, default=8.0, help="time for everything (default: %(default)g)")
    made.add_argument("--quick", action="store_true", help="fewer cases, and one format of the whole step")
    made.add_argument("--device", default="cuda", help='"cuda", "cuda:1"..., or "cpu": a self-test at tiny sizes')
    made.add_argument("--part", help=argparse.SUPPRESS)  # one part in this process; the runner uses it
    made.add_argument("--rates", help=argparse.SUPPRESS)
    return made


def main(words: list[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    arguments = parser().parse_args(words)
    if arguments.part:
        run_part(arguments.part, arguments)
        return 0
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", arguments.device):
        parser().error(f'--device is {arguments.device!r}, expected "cuda", "cuda:N" or "cpu"')
    if arguments.minutes <= 0:
        parser().error(f"--minutes is {arguments.minutes:g}, expected a positive number")
    if not arguments.output.absolute().parent.is_dir():
        parser().error(f"--output {arguments.output}: its folder does not exist")
    settings = {"device": arguments.device, "quick": arguments.quick, "minutes": arguments.minutes}
    results = Results(settings)
    begin = time.monotonic()

    def write() -> None:
        settings["seconds"] = round(time.monotonic() - begin, 1)
        results.write(arguments.output)

    runner = Runner(Path(__file__).resolve(), arguments.device, arguments.quick, arguments.minutes, results, write)
    if not runner.run():
        reasons = [error["output"] for error in results.records["errors"]]
        reasons += [skipped["reason"] for skipped in results.records["skipped"]]
        reasons.append(f"gpu_check: the device {arguments.device!r} cannot be used, see above")
        print("\n".join(reasons), file=sys.stderr)
        return UNUSABLE
    write()
    device = results.device
    versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
    print(f"{device['device']}, driver {device.get('driver', '-')}; {versions}")
    print(results.tables())
    print(f"\n{settings['seconds']:.0f} s; written to {arguments.output}")
    return FAILED if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
