"""Requests that arrive: when, with how long a prompt, how much of it cached, and how many tokens to generate.

Drawn: gaps between arrivals are gamma-distributed with mean 1 / rate and a coefficient of variation of √burstiness (1:
Poisson; 0: a constant rate). Read, as published or with columns of our own:

    arrival, prompt, output, cached         seconds and tokens; CSV, or objects of these in JSONL
    …, prefix, shared                       a name, and the first tokens of a prompt that its requests have in common:
                                            cached from the first of them on
    Azure LLM inference 2023 and 2024       TIMESTAMP, ContextTokens, GeneratedTokens; CSV
    Mooncake                                timestamp (ms), input_length, output_length, hash_ids; JSONL. Blocks of 512
                                            tokens whose hashes came before, from the first on, are cached
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.files import LIMIT_BYTES, read_text
from magicdec.specs.workload import WorkloadSpec
from magicdec.units import MILLI

Whole = npt.NDArray[np.int64]
MOONCAKE_BLOCK = 512
COLUMNS = ("arrival", "prompt", "output", "cached")
MAX_TOKENS = 2**26
MAX_RATE, MAX_SECONDS = 1e6, 1e9


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests in the order of their arrival."""

    arrival_s: Array
    prompt_len: Whole
    output_len: Whole
    cached_len: Whole
    """Tokens of the prompt whose keys and values are cached when it arrives."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        span = float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span if span > 0 else 0.0

    @property
    def mean_len(self) -> float:
        """Tokens that a request holds, on average over the time in which it generates."""
        weight = self.output_len / self.output_len.sum()
        return float(((self.prompt_len + self.output_len / 2.0) * weight).sum())

    @property
    def lengths(self) -> tuple[int, int]:
        """The shortest prompt, and the longest request."""
        return int(self.prompt_len.min()), int((self.prompt_len + self.output_len).max())

    def at_rate(self, rate: float) -> Requests:
        """The requests at another mean rate, with their pattern."""
        return replace(self, arrival_s=self.arrival_s * (self.rate / rate))

    def part(self, chosen: Any) -> Requests:
        """Some of the requests."""
        return Requests(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A rate of arrivals that changes over time, linear between points."""

    times_s: Array
    rates: Array

    @classmethod
    def of(cls, text: str) -> Schedule:
        """From "2@0,8@600": 2 requests per second at first, 8 after ten minutes. Raises ConfigError."""
        points = [each.partition("@") for each in text.split(",")]
        try:
            rates, times = np.array([(float(rate), float(at)) for rate, _, at in points]).T
        except ValueError:
            rates, times = np.zeros(1), np.zeros(1)
        if (
            len(times) < 2 or times[0] != 0.0 or not np.all(np.diff(times) > 0.0) or not times[-1] <= MAX_SECONDS
            or not np.all((rates >= 0.0) & (rates <= MAX_RATE)) or not np.any(rates > 0.0)
        ):  # fmt: skip
            raise ConfigError(
                f"rate must be a number above 0, or rates at seconds that ascend from 0, like 2@0,8@600, not '{text}'"
            )
        return cls(times_s=times, rates=rates)

    @property
    def _arrived(self) -> Array:
        """Arrivals up to each point, on average."""
        between = np.diff(self.times_s) * (self.rates[1:] + self.rates[:-1]) / 2.0
        return np.concatenate([[0.0], np.cumsum(between)])

    @property
    def mean(self) -> float:
        return float(self._arrived[-1] / self.times_s[-1])

    @property
    def count(self) -> float:
        """Requests in all, on average."""
        return float(self._arrived[-1])

    def at_rate(self, rate: float) -> Schedule:
        """The schedule at another mean rate, over as long a time."""
        return replace(self, rates=self.rates * (rate / self.mean))

    def paced(self, requests: Requests) -> Requests:
        """Requests that arrive at a rate of 1, at the schedule's instead: those that come before its end."""
        arrived = self._arrived
        found = requests.part(requests.arrival_s < arrived[-1])
        place = np.searchsorted(arrived, found.arrival_s, side="right") - 1
        rest, first = found.arrival_s - arrived[place], self.rates[place]
        slope = (np.diff(self.rates) / np.diff(self.times_s))[place]
        passed = 2.0 * rest / np.maximum(first + np.sqrt(np.maximum(first**2 + 2.0 * slope * rest, 0.0)), 1e-12)
        return replace(found, arrival_s=self.times_s[place] + passed)


def alike(count: int, *, prompt_len: int, output_len: int, cached_len: int = 0) -> Requests:
    """Equal requests, all at time 0."""
    full = (np.full(count, value, dtype=np.int64) for value in (prompt_len, output_len, cached_len))
    return Requests(
        **dict(zip(("prompt_len", "output_len", "cached_len"), full, strict=True)), arrival_s=np.zeros(count)
    )


def drawn(
    count: int, *, rate: float, workload: WorkloadSpec, burstiness: float = 1.0, cached_len: int = 0, seed: int = 0
) -> Requests:
    """Requests of a mix at a rate. `cached_len` of each prompt is cached, but for its last token."""
    random = np.random.default_rng(seed)
    shape = 1.0 / max(burstiness, 1e-9)
    gaps = random.gamma(shape, 1.0 / (rate * shape), count) if burstiness > 0 else np.full(count, 1.0 / rate)
    weights = np.array([each.weight for each in workload.requests])
    chosen = random.choice(len(weights), count, p=weights / weights.sum())
    prompt = np.array([each.prompt_len for each in workload.requests])[chosen]
    return Requests(
        arrival_s=np.cumsum(gaps),
        prompt_len=prompt,
        output_len=np.array([each.gen_len for each in workload.requests])[chosen],
        cached_len=np.minimum(cached_len, prompt - 1),
    )


def read_requests(path: str | Path) -> Requests:
    """The requests of a file, whose format its columns tell. Raises ConfigError, naming the line."""
    path = Path(path)
    lines = read_text(path, limit_bytes=LIMIT_BYTES, error=ConfigError).splitlines()
    is_csv = path.suffix != ".jsonl"
    every = list(_csv_rows(path, lines) if is_csv else _json_rows(path, lines))
    if not every:
        raise ConfigError(f"{path} holds no requests")
    read, seen, before = _reader(every[0][1], path), set[Any](), 0.0
    rows: list[tuple[float, int, int, int]] = []
    for where, values in every:
        try:
            arrival, prompt, output, cached = read(values, seen)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: not a request: {error}") from None
        if not 0.0 <= arrival < 1e12:
            raise ConfigError(f"{where}: arrival must be at least 0, not {arrival:g}")
        if rows and arrival < before:
            raise ConfigError(
                f"{where}: arrives at {arrival:g}, before the request above it ({before:g}); sort by arrival"
            )
        for name, value, least in (("prompt", prompt, 1), ("output", output, 1), ("cached", cached, 0)):
            if not least <= value <= MAX_TOKENS:
                raise ConfigError(f"{where}: {name} must be between {least} and {MAX_TOKENS} tokens, not {value}")
        if cached > prompt:
            raise ConfigError(f"{where}: {cached} tokens cached, of a prompt of {prompt}")
        rows.append((arrival, prompt, output, cached))
        before = arrival
    columns = np.array(rows)
    prompt, output, cached = columns[:, 1:].astype(np.int64).T
    return Requests(
        arrival_s=columns[:, 0] - columns[0, 0], prompt_len=prompt, output_len=output,
        cached_len=np.minimum(cached, prompt - 1),
    )  # fmt: skip


def _csv_rows(path: Path, lines: list[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        yield f"{path}:{number}", {str(key).strip(): value for key, value in row.items()}


def _json_rows(path: Path, lines: list[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error


def _reader(first: dict[str, Any], path: Path) -> Any:
    """A function from a row to (arrival, prompt, output, cached), by the first row's columns."""
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(first):
        return lambda row, _: (
            _timestamp(row["TIMESTAMP"]), int(row["ContextTokens"]), max(int(row["GeneratedTokens"]), 1), 0
        )  # fmt: skip
    if {"timestamp", "input_length", "output_length"} <= set(first):
        return _mooncake
    if set(COLUMNS[:3]) <= set(first):
        return _own
    raise ConfigError(
        f"{path} has the columns {', '.join(first)}; requests are arrival, prompt, output and cached (or prefix and "
        "shared), or a trace of "
        "Azure (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake (timestamp, input_length, output_length)"
    )


def _own(row: dict[str, Any], seen: set[Any]) -> tuple[float, int, int, int]:
    cached, name = int(row.get("cached") or 0), row.get("prefix") or None
    if name in seen:
        cached = max(cached, int(row.get("shared") or 0))
    elif name is not None:
        seen.add(name)
    return float(row["arrival"]), int(row["prompt"]), int(row["output"]), cached


def _timestamp(text: str) -> float:
    """Seconds; Azure's have seven digits after the point."""
    head, _, fraction = text.strip().replace("+00:00", "").partition(".")
    return datetime.fromisoformat(head + "+00:00").timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _mooncake(row: dict[str, Any], seen: set[Any]) -> tuple[float, int, int, int]:
    hashes, cached = row.get("hash_ids", []), 0
    while cached < len(hashes) and hashes[cached] in seen:
        cached += 1
    seen.update(hashes)
    prompt = int(row["input_length"])
    return float(row["timestamp"]) * MILLI, prompt, int(row["output_length"]), min(cached * MOONCAKE_BLOCK, prompt)
