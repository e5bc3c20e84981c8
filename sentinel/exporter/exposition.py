"""A scrape as Prometheus text or OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector as Registered

from sentinel import __version__
from sentinel.edges.nvml import GpuId
from sentinel.exporter.collector import GpuState, Scrape
from sentinel.exporter.metrics import DESCRIBED, PREFIX

TEXT: Final = "text/plain"


def exposition(scrape: Scrape, hostname: str, accept: str = TEXT) -> tuple[bytes, str]:
    """(body, content type), in the form that `accept` prefers."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(scrape, hostname))
    return encode(registry), content_type


class _Families(Registered):
    def __init__(self, scrape: Scrape, hostname: str) -> None:
        self._scrape, self._hostname = scrape, hostname

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families = {
            d.name: Metric(PREFIX + d.name.removesuffix("_total"), d.help, d.type)
            for d in DESCRIBED
        }
        for name, labels, value in _library(self._scrape):
            families[name].add_sample(PREFIX + name, labels, value)
        for gpu in self._scrape.gpus:
            own = gpu_labels(gpu, self._hostname)
            for name, labels, value in _gpu(gpu):
                families[name].add_sample(PREFIX + name, {**own, **labels}, value)
        yield from (family for family in families.values() if family.samples)


Row = tuple[str, dict[str, str], float]


def gpu_labels(gpu: GpuState, hostname: str) -> dict[str, str]:
    """What names a GPU: as much of it as is known."""
    seen = gpu.id or GpuId(gpu.index, "", "", "")
    labels = {
        "UUID": seen.uuid if seen.key == seen.uuid else "",  # blacked out: it names nothing
        "gpu": str(gpu.index),
        "model_name": seen.model,
        "pci_bus_id": seen.pci_bus_id,
        "Hostname": hostname,
    }
    return {name: value for name, value in labels.items() if value}


def _library(scrape: Scrape) -> Iterator[Row]:
    yield "build_info", {"version": __version__}, 1
    yield "up", {}, not scrape.reason
    if scrape.reason:
        yield "scrape_error", {"reason": scrape.reason}, 1
    if scrape.versions:
        yield "driver_info", {k: v for k, v in scrape.versions.items() if v}, 1
    if scrape.count is not None and not scrape.reason:
        yield "gpus", {}, scrape.count
    yield "scrape_duration_seconds", {}, round(scrape.took_s, 6)


def _gpu(gpu: GpuState) -> Iterator[Row]:
    yield "gpu_up", {}, not gpu.reason
    if gpu.reason:
        yield "scrape_error", {"reason": gpu.reason}, 1
    if gpu.read_s is not None:
        yield "gpu_read_seconds", {}, round(gpu.read_s, 6)
    if gpu.unanswered_s is not None:
        yield "gpu_unanswered_seconds", {}, round(gpu.unanswered_s, 3)
    for reason, count in sorted(gpu.errors.items()):
        yield "gpu_errors_total", {"reason": reason}, count
    for field, reason in sorted(gpu.unsupported.items()):
        yield "field_unsupported", {"field": field, "reason": reason}, 1
    for sample in gpu.samples:
        yield sample.metric, dict(sample.labels), sample.value
    if gpu.xids is not None:
        for code, count in sorted(gpu.xids.counts.items()):
            yield "xid_errors_total", {"xid": str(code)}, count
        yield "last_xid", {}, gpu.xids.last
        if gpu.xids.last:
            yield "last_xid_timestamp_seconds", {}, round(gpu.xids.last_s, 3)
