"""Runs parts as processes, numeric ones beside each other and timings alone, within a time budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.parts import Part, numeric_parts, timing_parts
from gpu.records import log, parse
from gpu.results import Results

NUMERIC_SHARE = 0.55
"""Share of the time that the numeric checks may take: a kernel that hangs must not cost the timings."""

MEMORY_PER_PART = 4 * 2**30
"""Device memory that a numeric part needs at most, CUDA's own included."""


class Runner:
    """One run.

    Args:
        script: the command's own file, which ``--part`` is passed to.
        device: "cuda", "cuda:1" or "cpu".
        quick: fewer cases.
        minutes: for everything.
        results: where records go.
        after: called when a part has ended.
    """

    def __init__(
        self,
        script: Path,
        device: str,
        quick: bool,
        minutes: float,
        results: Results,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.script = script
        self.device = device
        self.quick = quick
        self.begin = time.monotonic()
        self.end = self.begin + 60 * minutes
        self.results = results
        self.after = after
        self.lock = threading.Lock()

    @property
    def cpu(self) -> bool:
        """Whether this is a self-test without a GPU."""
        return self.device == "cpu"

    def run(self) -> bool:
        """Run all parts; False when the device cannot be used, and nothing was checked."""
        self._run(Part("device", False, 0), self.end)
        if not self.results.device:
            return False
        numeric_end = self.begin + NUMERIC_SHARE * (self.end - self.begin)
        with ThreadPoolExecutor(self._workers()) as pool:
            list(pool.map(lambda part: self._run(part, numeric_end), numeric_parts(self.cpu, self.quick)))
        step_formats = self.results.device["step_formats"]
        for part in timing_parts(self.cpu, self.quick, step_formats):
            self._run(part, self.end)
        if not step_formats:
            self._skip(Part("step", False, 0), "the model fits this device's memory in no format")
        return True

    def _workers(self) -> int:
        memory = self.results.device.get("free_memory_bytes", 8 * MEMORY_PER_PART)
        return max(1, min(os.cpu_count() or 1, 8, memory // MEMORY_PER_PART))

    def _skip(self, part: Part, reason: str) -> None:
        record = {"kind": "skipped", "name": part.name, "reason": reason, "numeric": part.numeric}
        with self.lock:
            self.results.add(record, part.name)

    def _command(self, part: Part) -> list[str]:
        command = [sys.executable, str(self.script), "--part", part.name, "--device", self.device]
        if self.quick:
            command.append("--quick")
        if self.results.device:
            command += ["--rates", json.dumps(self.results.device["rates"])]
        return command

    def _environment(self) -> dict[str, str]:
        # Multiply-add in one rounding, as in the kernels compiled ahead of time; the default is about to change.
        environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
        environment.pop("TRITON_INTERPRET", None)
        if self.cpu:
            environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        return environment

    def _run(self, part: Part, end: float) -> None:
        """Run one part until it ends or its time is over, and take in its records as they come."""
        left = end - time.monotonic()
        if left < part.seconds:
            self._skip(part, f"{max(left, 0):.0f} s were left of the time, it needs about {part.seconds}")
            return
        begun = time.monotonic()
        log(f"[{begun - self.begin:4.0f} s] {part.name}")
        process = subprocess.Popen(
            self._command(part),
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        killed = threading.Event()

        def stop() -> None:
            killed.set()
            process.kill()

        timer = threading.Timer(left, stop)
        timer.start()
        chatter: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        reader = threading.Thread(target=_collect, args=(process.stderr, chatter))
        reader.start()
        try:
            for line in process.stdout:
                record = parse(line)
                if record is not None:
                    with self.lock:
                        self.results.add(record, part.name)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            reader.join()
        if killed.is_set():
            self._skip(part, f"stopped after {time.monotonic() - begun:.0f} s, when its time was over")
        elif code:
            message = next((line for line in reversed(chatter) if line.strip()), f"exit code {code}")
            if not part.ours:
                self._skip(part, f"ended with {message}")
                return
            with self.lock:
                record = {"kind": "error", "name": part.name, "message": message, "output": "\n".join(chatter[-40:])}
                self.results.add(record, part.name)
        with self.lock:
            seconds = self.results.settings.setdefault("part_seconds", {})
            seconds[part.name] = round(time.monotonic() - begun, 1)
            self.after()


def _collect(stream: Any, lines: list[str]) -> None:
    lines.extend(line.rstrip("\n") for line in stream)
