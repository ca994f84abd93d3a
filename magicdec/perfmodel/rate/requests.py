"""Requests that arrive: when, with how long a prompt, how much of it cached, and how many tokens to
generate.

Drawn: gaps between arrivals are gamma-distributed with mean 1 / rate and a coefficient of variation
of √burstiness (1: Poisson; 0: a constant rate). Read: arrival (seconds), prompt, output and cached
(tokens), as the columns of a CSV file or the keys of objects in JSONL.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.files import PROFILE_LIMIT_BYTES, decode_json, read_text
from magicdec.specs.workload import MAX_TOKENS, WorkloadSpec

Whole = npt.NDArray[np.int64]
REQUEST_COLUMNS = ("arrival", "prompt", "output")
MAX_ARRIVAL_S = 1e12
MIN_RATE = 1e-6
MAX_RATE = 1e6
"""Requests per second; more than that arrive at once."""


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
        """Arrivals per second; 0 where all arrive at once."""
        gaps = len(self) - 1
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        if gaps == 0 or gaps > MAX_RATE * span:
            return 0.0
        return gaps / span

    @property
    def mean_len(self) -> float:
        """Tokens that a request holds, on average over the time in which it generates."""
        weights = self.output_len / self.output_len.sum()
        held = self.prompt_len + self.output_len / 2.0
        return float((held * weights).sum())

    @property
    def lengths(self) -> tuple[int, int]:
        """The shortest prompt, and the longest request."""
        whole = self.prompt_len + self.output_len
        return int(self.prompt_len.min()), int(whole.max())

    def at_rate(self, rate: float) -> Requests:
        """The requests at another mean rate, with their pattern."""
        return replace(self, arrival_s=self.arrival_s * (self.rate / rate))

    def part(self, chosen: Any) -> Requests:
        """Some of the requests."""
        return Requests(
            arrival_s=self.arrival_s[chosen],
            prompt_len=self.prompt_len[chosen],
            output_len=self.output_len[chosen],
            cached_len=self.cached_len[chosen],
        )


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The requests that `mine` of `every` replicas receive, which take turns."""

    mine: int
    every: int

    @property
    def share(self) -> float:
        return self.mine / self.every

    def of(self, count: int) -> Whole:
        """Their places among `count` requests."""
        places = np.arange(count)
        return places[places % self.every < self.mine]

    def evenly(self, count: int) -> Whole:
        """As many places, spread evenly: no replica has turns."""
        return np.arange(0.0, count, 1.0 / self.share).astype(np.int64)

    def gaps(self, count: int) -> Array:
        """Gaps between all arrivals that lie before each of their first `count`."""
        gaps = np.ones(count)
        gaps[self.mine :: self.mine] += self.every - self.mine
        return gaps


ALL_TURNS = Turns(mine=1, every=1)


def alike(
    count: int, *, prompt_len: int, output_len: int, cached_len: int = 0
) -> Requests:
    """Equal requests, all at time 0."""
    return Requests(
        arrival_s=np.zeros(count),
        prompt_len=np.full(count, prompt_len, dtype=np.int64),
        output_len=np.full(count, output_len, dtype=np.int64),
        cached_len=np.full(count, cached_len, dtype=np.int64),
    )


def drawn(
    count: int,
    *,
    rate: float,
    workload: WorkloadSpec,
    burstiness: float = 1.0,
    cached_len: int = 0,
    seed: int = 0,
    turns: Turns = ALL_TURNS,
) -> Requests:
    """Requests of a mix at a rate, those of `turns` only. `cached_len` of each prompt is cached,
    but for its last token."""
    random = np.random.default_rng(seed)
    gaps = turns.gaps(count)
    if burstiness > 0:
        shape = 1.0 / max(burstiness, 1e-9)
        gaps = random.gamma(shape * gaps, 1.0 / (rate * shape))
    else:
        gaps = gaps / rate
    weights = np.array([shape.weight for shape in workload.requests])
    prompts = np.array([shape.prompt_len for shape in workload.requests])
    outputs = np.array([shape.gen_len for shape in workload.requests])
    chosen = random.choice(len(weights), count, p=weights / weights.sum())
    prompt = prompts[chosen]
    return Requests(
        arrival_s=np.cumsum(gaps),
        prompt_len=prompt,
        output_len=outputs[chosen],
        cached_len=np.minimum(cached_len, prompt - 1),
    )


class RequestLine(NamedTuple):
    """A line of a file of requests."""

    arrival_s: float
    prompt: int
    output: int
    cached: int

    def check(self) -> None:
        """Raises ConfigError for numbers that no request has."""
        if not 0.0 <= self.arrival_s < MAX_ARRIVAL_S:
            raise ConfigError(f"arrival must be at least 0, not {self.arrival_s:g}")
        limits = (
            ("prompt", self.prompt, 1),
            ("output", self.output, 1),
            ("cached", self.cached, 0),
        )
        for name, tokens, least in limits:
            if not least <= tokens <= MAX_TOKENS:
                raise ConfigError(
                    f"{name} must be between {least} and {MAX_TOKENS} tokens, not {tokens:.10g}"
                )
        if self.cached > self.prompt:
            raise ConfigError(
                f"{self.cached} tokens cached, of a prompt of {self.prompt}"
            )


def _documents(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The lines of a file, each with its place. Raises ConfigError for a file of none."""
    lines = read_text(
        path, limit_bytes=PROFILE_LIMIT_BYTES, error=ConfigError
    ).splitlines()
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        documents = list(_json_rows(path, lines))
    else:
        documents = list(_csv_rows(path, lines))
    if not documents:
        raise ConfigError(f"{path} holds no requests")
    return documents


def _of_rows(rows: Sequence[RequestLine]) -> Requests:
    """Requests whose first arrives at time 0. The last token of a prompt is never cached."""
    arrival = np.array([row.arrival_s for row in rows])
    prompt = np.array([row.prompt for row in rows], dtype=np.int64)
    output = np.array([row.output for row in rows], dtype=np.int64)
    cached = np.array([row.cached for row in rows], dtype=np.int64)
    return Requests(
        arrival_s=arrival - arrival[0],
        prompt_len=prompt,
        output_len=output,
        cached_len=np.minimum(cached, prompt - 1),
    )


def read_requests(path: str | Path) -> Requests:
    """The requests of a file. Raises ConfigError, naming the line."""
    path = Path(path)
    documents = _documents(path)
    _, first = documents[0]
    if not set(REQUEST_COLUMNS) <= set(first):
        raise ConfigError(
            f"{path} has the columns {', '.join(first)}; requests are arrival (seconds), prompt, "
            "output and cached (tokens)"
        )
    rows: list[RequestLine] = []
    for where, values in documents:
        try:
            arrival = values["arrival"]
            if isinstance(arrival, bool):
                raise ConfigError(
                    f"arrival must be a number, not {str(arrival).lower()}"
                )
            cached = 0
            if values.get("cached") not in (None, ""):
                cached = _tokens(values, "cached")
            row = RequestLine(
                arrival_s=float(arrival),
                prompt=_tokens(values, "prompt"),
                output=_tokens(values, "output"),
                cached=cached,
            )
            row.check()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{where}: not a request: {error}") from None
        if rows and row.arrival_s < rows[-1].arrival_s:
            raise ConfigError(
                f"{where}: arrives at {row.arrival_s:g}, before the request above it "
                f"({rows[-1].arrival_s:g}); sort by arrival"
            )
        rows.append(row)
    return _of_rows(rows)


def _csv_rows(path: Path, lines: list[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    try:
        for number, row in enumerate(csv.DictReader(lines), 2):
            if None in row:
                raise ConfigError(
                    f"{path}:{number} has more cells than the header has columns"
                )
            yield (
                f"{path}:{number}",
                {name.strip(): value for name, value in row.items()},
            )
    except csv.Error as error:
        raise ConfigError(f"{path} is not a table: {error}") from error


def _json_rows(path: Path, lines: list[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", decode_json(line, dict[str, Any])
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error


def _tokens(values: dict[str, Any], name: str) -> int:
    """A whole number. Raises ConfigError for a fraction or a truth value."""
    value = values[name]
    number = float(value)
    if isinstance(value, bool) or not number.is_integer():
        raise ConfigError(
            f"{name} must be a whole number of tokens, not {str(value).lower()}"
        )
    return int(number)
