"""Scrapes of a metrics address, or saved ones, as samples by name; and which engine and model they are of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from magicdec.errors import ConfigError, ServerError, StorageError, unknown_choice
from magicdec.files import read_bytes
from magicdec.live.http import LIMIT_BYTES, Address, get, parse_address
from magicdec.live.series import CACHE_INFO, ENGINES, PROCESS_START, Series
from magicdec.records import LARGEST_NUMBER
from magicdec.units import printable

METRICS_PATHS = ("/metrics", "/prometheus/metrics")
"""Where engines answer in Prometheus's format: all but TensorRT-LLM, whose /metrics is JSON, and TensorRT-LLM."""
PREFIXES = tuple(series.prefix for series in ENGINES)
MIN_INTERVAL_S = 0.2
MAX_WINDOW_S = 24 * 3600.0
Labels = Mapping[str, str]
Source = Address | tuple[Path, Path]
"""A live address, or two saved scrapes."""


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """All samples of one answer. NaN and infinite values are left out."""

    samples: Mapping[str, tuple[tuple[Labels, float], ...]] = field(repr=False)
    time_s: float | None = None
    """When it was read, by a clock that only runs forward; None for a file."""
    where: str = ""

    def total(self, name: str | None, labels: Labels) -> float | None:
        """Sum of a name's samples whose labels include `labels`; None where there is none."""
        values = [value for own, value in self.samples.get(name or "", ()) if _includes(own, labels)]
        return math.fsum(values) if values else None

    def by_labels(self, name: str, labels: Labels) -> dict[frozenset[tuple[str, str]], float]:
        """A name's samples whose labels include `labels`, each by all of its own."""
        return {frozenset(own.items()): value for own, value in self.samples.get(name, ()) if _includes(own, labels)}

    def by_label(self, name: str | None, label: str, labels: Labels) -> dict[str, float]:
        """The sums by the value of one label."""
        sums: dict[str, float] = {}
        for own, value in self.samples.get(name or "", ()):
            if label in own and _includes(own, labels):
                sums[own[label]] = sums.get(own[label], 0.0) + value
        return sums

    def values(self, label: str, prefix: str) -> list[str]:
        """The values of a label, over the samples whose name starts with `prefix`."""
        rows = [own for name, rows in self.samples.items() if name.startswith(prefix) for own, _ in rows]
        return sorted({own[label] for own in rows if label in own})


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
                if not math.isfinite(sample.value):
                    continue
                if abs(sample.value) > LARGEST_NUMBER and sample.name.startswith(PREFIXES):
                    raise ServerError(f"{where} counts {sample.value:g} of {sample.name}, which no engine has")
                labels = {name: printable(value) for name, value in sample.labels.items()}
                samples.setdefault(sample.name, []).append((labels, float(sample.value)))
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
    text = read_bytes(path, limit_bytes=LIMIT_BYTES, error=StorageError).decode(errors="replace")
    return parse(text, where=str(path))


def parse_source(arguments: Sequence[str]) -> Source:
    """One address, or two files in the order in which they were saved. Raises ConfigError."""
    if len(arguments) == 1 and not Path(arguments[0]).is_file():
        return parse_address(arguments[0])
    if len(arguments) == 2 and not any("://" in each for each in arguments):
        return Path(arguments[0]), Path(arguments[1])
    raise ConfigError("observe takes one address, or two saved scrapes (the earlier one first): counters need two")


def scrapes(
    source: Source,
    *,
    seconds: float,
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Scrape]:
    """Yields each scrape when it is read: those of the window's start, end and every interval between; at least two,
    should one take as long as the window.

    Raises ConfigError for a window or interval out of range, ServerError or StorageError for what cannot be read.
    """
    if isinstance(source, tuple):
        yield from (read_dump(path) for path in source)
        return
    if not MIN_INTERVAL_S <= interval_s <= seconds <= MAX_WINDOW_S:
        raise ConfigError(
            f"the interval must be at least {MIN_INTERVAL_S} s and at most the window, and the window at most "
            f"{MAX_WINDOW_S:.0f} s; not {interval_s:g} s of {seconds:g} s"
        )
    started = clock()
    number = 0
    while True:
        yield read_address(source)
        number += 1
        due = min(number * interval_s, seconds)
        if number > 1 and clock() - started >= seconds:
            return
        sleep(max(due - (clock() - started), 0.0))


def targets(scrape: Scrape) -> list[Target]:
    """Every engine of every model that a scrape is of.

    Raises ServerError where it is of none that is known.
    """
    found = []
    for series in ENGINES:
        if not any(name.startswith(series.prefix) for name in scrape.samples):
            continue
        for model in scrape.values("model_name", series.prefix) or [""]:
            labels = {"model_name": model} if model else {}
            running = scrape.by_label(series.gauges["running"], series.replica_label or "", labels)
            found += [Target(series=series, model=model, replica=replica) for replica in sorted(running) or [""]]
    if not found:
        known = ", ".join(f"{series.engine} ({series.prefix}...)" for series in ENGINES)
        raise ServerError(f"{scrape.where} has no metrics of a known engine; known: {known}")
    return found


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
    """Tokens that the engine's KV cache has room for; None except for vLLM, which reports it."""
    for labels, _ in scrape.samples.get(CACHE_INFO, ()):
        if target.replica and labels.get("engine", target.replica) != target.replica:
            continue
        try:
            tokens = float(labels["num_gpu_blocks"]) * float(labels["block_size"])
        except (KeyError, ValueError):
            return None
        return tokens if 0.0 < tokens < LARGEST_NUMBER else None
    return None


def restarted(before: Scrape, after: Scrape, target: Target) -> bool:
    """Whether a counter fell, is gone, or the process is another one: what was counted between is then unknown."""
    started = before.total(PROCESS_START, {}), after.total(PROCESS_START, {})
    if None not in started and started[0] != started[1]:
        return True
    for name in target.series.counters.values():
        was, now = (scrape.by_labels(name, target.labels) for scrape in (before, after))
        if any(now.get(labels, -math.inf) < count for labels, count in was.items()):
            return True
    return False
