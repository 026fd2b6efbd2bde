"""Newest values of all measures, as a collector of ``prometheus_client``."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.node.metrics.catalogue import CONSTANT, INFO, MEASURES, WAITS, Fields, Measure, Reading, readings
from shoal.node.metrics.sink import About


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(WAITS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(WAITS, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        return list(zip((*map(str, WAITS), "+Inf"), accumulate(self.counts), strict=True))


class Gauges(Collector):
    """Collector of the values of events. One thread adds events, any other may collect. Empty before the first event."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._constant: tuple[str, ...] = ("",) * len(CONSTANT)
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, _Histogram] = {}

    def begin(self, about: About) -> None:
        """Set the labels that are the same throughout the run."""
        with self._lock:
            self._constant = tuple(getattr(about, name) for name in CONSTANT)
            self._take(Reading(INFO, 1.0, tuple(getattr(about, name) for name in INFO.labels)))

    def event(self, name: str, fields: Fields) -> None:
        """Store the readings of an event."""
        with self._lock:
            for reading in readings(name, fields):
                self._take(reading)

    def _take(self, reading: Reading) -> None:
        measure, value, labels = reading
        if measure.how == "observe":
            self._histograms.setdefault(measure.name, _Histogram()).observe(value)
            return
        values = self._values.setdefault(measure.name, {})
        values[labels] = value + (values.get(labels, 0.0) if measure.how == "add" else 0.0)

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the measures that have a value."""
        with self._lock:
            found = [family for measure in MEASURES if (family := self._family(measure)) is not None]
        yield from found

    def _family(self, measure: Measure) -> Metric | None:
        names = (*CONSTANT, *measure.labels)
        if measure.kind == "histogram":
            histogram = self._histograms.get(measure.name)
            if histogram is None:
                return None
            family = HistogramMetricFamily(measure.name, measure.text, labels=names)
            family.add_metric(self._constant, histogram.buckets(), histogram.sum)
            return family
        values: Mapping[tuple[str, ...], float] = self._values.get(measure.name, {})
        if not values:
            return None
        kind = CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily
        simple = kind(measure.name, measure.text, labels=names)
        for labels, value in values.items():
            simple.add_metric((*self._constant, *labels), value)
        return simple
