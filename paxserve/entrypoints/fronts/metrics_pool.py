"""The counts of all fronts of a server added up, whichever of them is scraped."""

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from paxserve.metrics import Metrics

SMALLEST = frozenset({"process_start_time_seconds"})
"""Gauges of processes of which the server's is the smallest. All others are sums: memory, open files."""


class Family(msgspec.Struct, array_like=True):
    """One metric of one front."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Family])


class MetricsPool(Collector):
    """Files with what each front of a server counted, in a private folder. Fronts that have ended still count."""

    def __init__(self, front: int, folder: Path, metrics: Metrics) -> None:
        self._folder, self._metrics = folder, metrics
        self._path = folder / f"metrics-{front}"
        self._live: Collection[int] = ()
        self._registry = CollectorRegistry()
        self._registry.register(metrics.engine)
        self._registry.register(self)

    def save(self) -> None:
        """Put down what this front has counted by now; readers find the whole of it, or what was there before."""
        shared = {metric.name for metric in self._metrics.engine.collect()}
        families = [
            Family(
                metric.name, metric.documentation, metric.type, [(s.name, s.labels, s.value) for s in metric.samples]
            )
            for metric in self._metrics.registry.collect()
            if metric.name not in shared
        ]
        beside = self._path.with_name(f".{self._path.name}")
        beside.write_bytes(_encoder.encode(families))
        os.replace(beside, self._path)

    def render(self, live: Collection[int]) -> bytes:
        """The text that Prometheus scrapes; of fronts that are not `live` what they counted, not what they held."""
        self._live = live
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The sums of what the files say."""
        sums: dict[str, Family] = {}
        for path in sorted(self._folder.glob("metrics-*")):
            is_live = int(path.name.rpartition("-")[2]) in self._live
            add_up(sums, (family for family in _decoder.decode(path.read_bytes()) if is_live or family.kind != "gauge"))
        for family in sums.values():
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def add_up(sums: dict[str, Family], families: Iterable[Family]) -> None:
    """Add the samples of one front to `sums`; those with equal labels become one."""
    for family in families:
        total = sums.setdefault(family.name, Family(family.name, family.text, family.kind, []))
        known = {(name, *labels.items()): place for place, (name, labels, _) in enumerate(total.samples)}
        for name, labels, value in family.samples:
            place = known.get((name, *labels.items()))
            if place is None:
                total.samples.append((name, labels, value))
                continue
            before = total.samples[place][2]
            total.samples[place] = name, labels, min(before, value) if name in SMALLEST else before + value
