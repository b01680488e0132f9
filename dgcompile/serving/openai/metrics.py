"""The service's counts as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from dgcompile.serving.statistics import METRICS, Statistics

_SUM, _COUNT = "_sum", "_count"


class _ServiceCollector(Collector):
    """Reads the statistics anew for each scrape.

    Args:
        statistics: gives them; None while the bundle is being loaded.
    """

    def __init__(self, statistics: Callable[[], Statistics | None]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        now = self._statistics()
        if now is None:
            return
        values = {metric.name: metric.value(now) for metric in METRICS}
        for metric in METRICS:
            if metric.name.endswith(_COUNT):
                continue  # goes with its sum
            if metric.name.endswith(_SUM):
                stem = metric.name.removesuffix(_SUM)
                yield SummaryMetricFamily(stem, metric.help, int(values[stem + _COUNT]), values[metric.name])
            elif metric.kind == "counter":
                yield CounterMetricFamily(metric.name, metric.help, values[metric.name])
            else:
                yield GaugeMetricFamily(metric.name, metric.help, values[metric.name])


def make_registry(statistics: Callable[[], Statistics | None]) -> CollectorRegistry:
    """The metrics of the service, and those of the process (memory, CPU seconds, open files).

    Args:
        statistics: gives the service's; None while there is none.
    """
    registry = CollectorRegistry()
    registry.register(_ServiceCollector(statistics))
    ProcessCollector(registry=registry)
    return registry
