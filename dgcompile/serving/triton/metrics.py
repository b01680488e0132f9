"""The service's counts among Triton's own metrics."""

from __future__ import annotations

import threading
from typing import Any

from dgcompile.errors import EngineError
from dgcompile.serving.service import Service
from dgcompile.serving.statistics import METRICS
from dgcompile.serving.triton.backend import pb_utils

UPDATE_SECONDS = 0.25
"""Between two updates. Each value that changed costs a message to the server's process, about 20 us."""


class TritonMetrics:
    """Keeps Triton's metrics up to date until it is closed.

    A thread of its own gives the beat, so that rates fall to zero when nothing happens; the engine thread does the
    work.

    Args:
        service: whose counts.
        labels: of every metric, such as the model's name.
    """

    def __init__(self, service: Service, labels: dict[str, str]) -> None:
        families = pb_utils().MetricFamily
        kinds = {"counter": families.COUNTER, "gauge": families.GAUGE}
        self._service = service
        self._families: list[Any] = []
        self._metrics: list[Any] = []
        for metric in METRICS:
            self._families.append(families(name=metric.exposed_name, description=metric.help, kind=kinds[metric.kind]))
            self._metrics.append(self._families[-1].Metric(labels=labels))
        self._values = [0.0] * len(METRICS)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dgcompile-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. The values stay as they are."""
        self._closed.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._closed.wait(UPDATE_SECONDS):
            try:
                if self._read() != self._values:
                    self._service.call_soon(self._update)
            except EngineError:
                return  # the engine thread has ended, and with it all that could change

    def _read(self) -> list[float]:
        statistics = self._service.statistics()
        return [float(metric.value(statistics)) for metric in METRICS]

    def _update(self) -> None:
        values = self._read()
        for index, (metric, target) in enumerate(zip(METRICS, self._metrics, strict=True)):
            change = values[index] - self._values[index]
            if not change:
                continue
            if metric.kind == "counter":
                target.increment(change)
            else:
                target.set(values[index])
            self._values[index] = values[index]
