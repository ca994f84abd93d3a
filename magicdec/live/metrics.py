"""A scrape of a metrics address, or a saved one, as samples by name; and which engine and model it is of."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from magicdec.errors import ConfigError, ServerError, StorageError, unknown_choice
from magicdec.live.http import LIMIT_BYTES, Address, get
from magicdec.live.series import CACHE_INFO, ENGINES, PROCESS_START, Series
from magicdec.units import format_bytes

METRICS_PATHS = ("/metrics", "/prometheus/metrics")
"""Where engines answer in Prometheus's format: all but TensorRT-LLM, whose /metrics is JSON, and TensorRT-LLM."""
Labels = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """All samples of one answer. NaN and infinite values are left out."""

    samples: Mapping[str, tuple[tuple[Labels, float], ...]] = field(repr=False)
    time_s: float | None = None
    """When it was read, by a clock that only runs forward; None: of a file."""
    where: str = ""

    def total(self, name: str | None, labels: Labels) -> float | None:
        """Sum of a name's samples whose labels include `labels`; None where there is none."""
        values = [value for own, value in self.samples.get(name or "", ()) if _includes(own, labels)]
        return math.fsum(values) if values else None

    def by_label(self, name: str | None, label: str, labels: Labels) -> dict[str, float]:
        """The sums by the value of one label."""
        sums: dict[str, float] = {}
        for own, value in self.samples.get(name or "", ()):
            if label in own and _includes(own, labels):
                sums[own[label]] = sums.get(own[label], 0.0) + value
        return sums

    def values(self, label: str, prefix: str) -> list[str]:
        """What a label says, over the samples whose name starts with `prefix`."""
        found = {
            own[label]
            for name, rows in self.samples.items()
            if name.startswith(prefix)
            for own, _ in rows
            if label in own
        }
        return sorted(found)


def _includes(own: Labels, wanted: Labels) -> bool:
    return all(own.get(name) == value for name, value in wanted.items())


@dataclass(frozen=True, kw_only=True)
class Target:
    """One engine of one model behind an address."""

    series: Series
    model: str = ""
    replica: str = ""

    @property
    def labels(self) -> dict[str, str]:
        labels = {"model_name": self.model} if self.model else {}
        if self.replica and self.series.replica_label:
            labels[self.series.replica_label] = self.replica
        return labels

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.model, self.replica) if part) or self.series.engine


def parse(text: str, *, where: str, time_s: float | None = None) -> Scrape:
    """Raises ServerError for text that is not Prometheus's exposition format."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{where} is not in Prometheus's text format: {error}") from None
    if not samples:
        raise ServerError(f"{where} holds no metrics in Prometheus's text format")
    return Scrape(samples={name: tuple(rows) for name, rows in samples.items()}, time_s=time_s, where=where)


def read_address(address: Address) -> Scrape:
    """Scrapes an address; without a path, where engines have their metrics.

    Raises ServerError.
    """
    paths = (address.path,) if address.path else METRICS_PATHS
    for number, path in enumerate(paths, 1):
        at = address.at(path)
        try:
            body = get(at)
            return parse(body.decode("utf-8", errors="replace"), where=str(at), time_s=time.monotonic())
        except ServerError as error:
            if number == len(paths) or not _elsewhere(error):
                raise
    raise AssertionError("no path was tried")


def _elsewhere(error: ServerError) -> bool:
    """Whether the address answers, but not with metrics."""
    return "not in Prometheus" in str(error) or "no metrics" in str(error) or "status 404" in str(error)


def read_dump(path: Path) -> Scrape:
    """Reads a saved answer. Raises StorageError or ServerError."""
    try:
        size = path.stat().st_size
        if size > LIMIT_BYTES:
            raise StorageError(
                f"{path} has {format_bytes(size)}, more than the {format_bytes(LIMIT_BYTES)} of a scrape"
            )
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    return parse(text, where=str(path))


def targets(scrape: Scrape) -> list[Target]:
    """Every engine of every model that a scrape is of.

    Raises ServerError where it is of none that is known.
    """
    found = []
    for series in ENGINES:
        if not any(name.startswith(series.prefix) for name in scrape.samples):
            continue
        models = scrape.values("model_name", series.prefix) or [""]
        for model in models:
            replicas = _replicas(scrape, series, model) if series.replica_label else [""]
            found += [Target(series=series, model=model, replica=replica) for replica in replicas]
    if not found:
        known = ", ".join(f"{series.engine} ({series.prefix}...)" for series in ENGINES)
        raise ServerError(f"{scrape.where} has no metrics of a known engine; known: {known}")
    return found


def _replicas(scrape: Scrape, series: Series, model: str) -> list[str]:
    running = scrape.by_label(series.running, series.replica_label or "", {"model_name": model} if model else {})
    return sorted(running) or [""]


def choose_target(scrape: Scrape, wanted: str | None) -> Target:
    """The one engine that is there, or the one named MODEL or MODEL/ENGINE.

    Raises ConfigError listing what is there.
    """
    there = targets(scrape)
    if wanted is None:
        if len(there) > 1:
            names = ", ".join(target.name for target in there)
            raise ConfigError(
                f"{scrape.where} is of {len(there)} engines, whose batches are apart: {names}; choose one with --target"
            )
        return there[0]
    matching = [target for target in there if wanted in (target.name, target.model)]
    if len(matching) != 1:
        raise unknown_choice("target", wanted, [target.name for target in there])
    return matching[0]


def cache_tokens(scrape: Scrape, target: Target) -> float | None:
    """Tokens that the engine's KV cache has room for, where vLLM says so."""
    for labels, _ in scrape.samples.get(CACHE_INFO, ()):
        if target.replica and labels.get("engine", target.replica) != target.replica:
            continue
        try:
            return float(labels["num_gpu_blocks"]) * float(labels["block_size"])
        except (KeyError, ValueError):
            return None
    return None


def restarted(before: Scrape, after: Scrape, names: Sequence[str], labels: Labels) -> bool:
    """Whether a counter fell, is gone, or the process is another one: what was counted between is then unknown."""
    started = before.total(PROCESS_START, {}), after.total(PROCESS_START, {})
    if None not in started and started[0] != started[1]:
        return True
    for name in names:
        was, now = before.total(name, labels), after.total(name, labels)
        if was is not None and (now is None or now < was):
            return True
    return False
