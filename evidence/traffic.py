"""Compares the simulation with measured servers: under arrivals, and in closed loops with limits.

A row is one load: engine, engine_version, model, gpu, quant, tp, output_len, any of the METRICS,
and

    open loop      rate_rps, prompt_len_mean; arrival (constant rate, or poisson), duration_s,
                   requests_failed, max_num_seqs, max_num_batched_tokens, cached_len
    closed loop    concurrency, input_len; slo_pass

A closed loop is assumed to send ROUNDS requests per user, which sets the weight of the first burst
in percentiles of TTFT. The largest measured load within limits is the last row of a shape that kept
them. The simulated one is the largest number of users that keeps TTFT_P99_S and TPOT_P50_S (a
median time between tokens, which no prompt delays). A note "shared-prefix" says that prompts come
again. They are cached as long as the cache holds them, except for the first SHARED_PROMPTS of a
server's first row; rows with one `source` belong to one server, in their order. docs/traffic.md
lists the constants that these tables informed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from magicdec.errors import ConfigError, MagicdecError
from magicdec.perfmodel.rate.replica import PassLimit
from magicdec.perfmodel.rate.requests import MIN_RATE, Requests, alike
from magicdec.perfmodel.rate.simulate import (
    Server,
    SimulatedTimes,
    simulate,
    simulate_closed,
)
from magicdec.perfmodel.setup import Setup
from magicdec.progress import Progress, StepMessage
from magicdec.schema.comparison import ErrorSummary
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec
from magicdec.specs.workload import MAX_TOKENS
from magicdec.units import MILLI
from magicdec.validate.rows import (
    NEWEST,
    Count,
    Length,
    Size,
    engine_name,
    read_rows,
    weight_format,
)

ROUNDS = 4
MOST_REQUESTS = 100_000
"""Largest number of requests that is simulated for one load."""
LEAST_MEASURED = 1e-6
"""Smallest figure but 0 of a row: an error is relative to it."""
MOST_LOAD_WORK = 4_000_000
"""Scheduler passes allowed for all rows together: some minutes of one core."""
DURATION_S = 600.0
SHARED_PROMPTS = 45
"""Prompts that a load of shared prefixes repeats: the users of the published configurations, 44 to
50 (profile.yaml of the runs in inference-sim/training: 9 to 11 system prompts, 4 or 5 users
each)."""
TTFT_P99_S, TPOT_P50_S = 2.0, 0.050
MOST_USERS = 1024
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LATENCIES = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", *QUANTILES)
METRICS = (
    *(
        f"{latency}_{statistic}_ms"
        for latency, statistic in product(LATENCIES, STATISTICS)
    ),
    "output_tok_s",
)
Users = Annotated[int, msgspec.Meta(ge=1, le=MOST_USERS)]
Rate = Annotated[float, msgspec.Meta(ge=MIN_RATE, le=1e6)]


class LoadRow(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One measured load, with figures in their columns' units. Raises ConfigError for unknown
    names."""

    where: str = ""
    source: str = ""
    engine: str
    engine_version: str = NEWEST
    model: str
    gpu: str
    quant: str = ""
    tp: Count
    output_len: Size
    prompt_len_mean: Size | None = None
    input_len: Size | None = None
    rate_rps: Rate | None = None
    concurrency: Users | None = None
    arrival: str = "constant rate"
    duration_s: Size = DURATION_S
    requests_failed: Length = 0.0
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    cached_len: Length | None = None
    slo_pass: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    note: str = ""
    ttft_mean_ms: Length | None = None
    ttft_p50_ms: Length | None = None
    ttft_p90_ms: Length | None = None
    ttft_p95_ms: Length | None = None
    ttft_p99_ms: Length | None = None
    tpot_mean_ms: Length | None = None
    tpot_p50_ms: Length | None = None
    tpot_p90_ms: Length | None = None
    tpot_p95_ms: Length | None = None
    tpot_p99_ms: Length | None = None
    e2e_mean_ms: Length | None = None
    e2e_p50_ms: Length | None = None
    e2e_p90_ms: Length | None = None
    e2e_p95_ms: Length | None = None
    e2e_p99_ms: Length | None = None
    output_tok_s: Length | None = None

    def __post_init__(self) -> None:
        if (self.rate_rps is None) == (self.concurrency is None):
            raise ConfigError("a load is a rate_rps or a concurrency")
        if self.prompt_len_mean is None and self.input_len is None:
            raise ConfigError(
                "column 'prompt_len_mean' or 'input_len' is missing or empty"
            )
        for metric in METRICS:
            measured = getattr(self, metric)
            if measured and measured < LEAST_MEASURED:
                raise ConfigError(
                    f"column '{metric}' must be 0 or at least {LEAST_MEASURED:g}"
                )
        self._check_size()
        _ = self.setup  # an unknown name is refused here

    def _check_size(self) -> None:
        """Raises ConfigError for more requests or tokens than are simulated."""
        if self.num_requests > MOST_REQUESTS:
            raise ConfigError(
                f"a load of {self.num_requests:.3g} requests is too large; {MOST_REQUESTS} are "
                "simulated at most"
            )
        if self.prompt_len + self.output_len > MAX_TOKENS:
            raise ConfigError(f"a request of more than {MAX_TOKENS} tokens is too long")
        if self.max_num_batched_tokens and self.max_num_batched_tokens > MAX_TOKENS:
            raise ConfigError(f"a pass of more than {MAX_TOKENS} tokens is too long")

    @cached_property
    def setup(self) -> Setup:
        model = load_model_spec(self.model)
        newest = load_engine(engine_name(self.engine))
        (*_, version) = (NEWEST, *newest.versions_meant(self.engine_version)[:1])
        engine = newest.of_version(version)
        weights = None  # the checkpoint's own, as in a plan
        if self.quant:
            weights = weight_format(model, self.quant)
        return Setup.of(
            model,
            self.gpu,
            engine,
            AUTOREGRESSIVE,
            sampling=SamplingSpec(),
            weight_dtype=weights,
        )

    @property
    def users(self) -> int:
        """Users of a closed loop."""
        assert self.concurrency is not None
        return self.concurrency

    @property
    def num_requests(self) -> float:
        """Requests of the load: the measured number, or ROUNDS for each user."""
        if self.rate_rps is None:
            return ROUNDS * self.users
        return max(self.duration_s * self.rate_rps, 2.0)

    @property
    def simulated_alike(self) -> tuple[object, ...]:
        """Equal for rows whose simulations are the same."""
        server = (
            self.engine,
            self.engine_version,
            self.model,
            self.gpu,
            self.quant,
            self.tp,
        )
        lengths = (
            self.prompt_len,
            self.output_len,
            self.cached_len,
            "shared-prefix" in self.note,
        )
        load = (self.rate_rps, self.concurrency, self.arrival, self.duration_s)
        return (
            *server,
            *lengths,
            *load,
            self.max_num_seqs,
            self.max_num_batched_tokens,
        )

    @property
    def prompt_len(self) -> int:
        length = self.prompt_len_mean or self.input_len
        assert length is not None  # one of them is given
        return round(length)

    @property
    def shape(self) -> str:
        """Equal for loads that differ in users only."""
        name = f"{self.setup.model.name} {self.setup.precision.weight_dtype}"
        return f"{name}/tp {self.tp}/{self.prompt_len}+{round(self.output_len)}"

    @property
    def table(self) -> str:
        if self.rate_rps is None:
            return "closed loop"
        return "open loop"

    def simulated(
        self, *, is_first: bool = True, work: PassLimit | None = None
    ) -> SimulatedTimes:
        """The outcome of the measured number of requests. `is_first`: the server saw no load
        before this one."""
        if self.rate_rps is None:
            return self.closed(self.users, work=work)
        requests = self._requests(int(self.num_requests))
        gaps = np.full(len(requests), 1.0 / self.rate_rps)
        if self.arrival.startswith("poisson"):
            gaps = np.random.default_rng(0).exponential(gaps)
        requests.arrival_s[:] = np.cumsum(gaps)
        server = self.server(requests)
        requests.cached_len[:] = self._cached(server)
        if is_first and self.cached_len is None:
            requests.cached_len[:SHARED_PROMPTS] = 0
        return simulate(server, requests, work=work)

    def closed(self, users: int, *, work: PassLimit | None = None) -> SimulatedTimes:
        requests = self._requests(ROUNDS * users)
        return simulate_closed(self.server(requests), requests, users=users, work=work)

    def server(self, requests: Requests) -> Server:
        return Server.of(
            self.setup,
            requests,
            tp_size=self.tp,
            max_sequences=self.max_num_seqs,
            max_tokens=self.max_num_batched_tokens,
        )

    def _requests(self, count: int) -> Requests:
        return alike(
            count, prompt_len=self.prompt_len, output_len=round(self.output_len)
        )

    def _cached(self, server: Server) -> int:
        """Cached tokens of an arriving prompt. If the row does not state them, shared prompts are
        cached up to their last block, provided the cache holds two rounds of prompts and
        answers."""
        if self.cached_len is not None:
            return min(round(self.cached_len), self.prompt_len - 1)
        limits = server.limits
        round_len = SHARED_PROMPTS * (self.prompt_len + self.output_len)
        has_room = limits.num_blocks * limits.block_size >= 2 * round_len
        is_shared = "shared-prefix" in self.note
        if has_room and is_shared:
            return (self.prompt_len - 1) // limits.block_size * limits.block_size
        return 0


def measures(outcome: SimulatedTimes) -> dict[str, float]:
    """Every figure that a row may state, in its units."""
    figures = {"output_tok_s": outcome.tokens_per_s}
    times = (("ttft", outcome.ttft_s), ("tpot", outcome.tpot_s), ("e2e", outcome.e2e_s))
    for name, seconds in times:
        if not len(seconds):
            continue
        figures[f"{name}_mean_ms"] = float(seconds.mean()) / MILLI
        for key, share in QUANTILES.items():
            figures[f"{name}_{key}_ms"] = float(np.quantile(seconds, share)) / MILLI
    return figures


def validate_traffic(
    paths: Sequence[Path], progress: Progress = lambda _: None
) -> dict[str, Any]:
    """{"groups": errors by table and figure, "rows": each figure, "largest_loads": by shape,
    "refused": [lines]}. Equal rows are simulated once.

    Raises:
        ConfigError: a file that is neither table, and when no row can be judged.
        CapacityError: rows that take too long to simulate.
    """
    loads, refused = read_rows(paths, LoadRow, one_of=("rate_rps", "concurrency"))
    work = PassLimit(MOST_LOAD_WORK)
    figures: dict[tuple[object, ...], JudgedLoad | str] = {}
    rows: list[dict[str, Any]] = []
    overloads: list[bool] = []
    servers: set[str] = set()
    for number, load in enumerate(loads):
        progress(StepMessage(load.where, done=number, total=len(loads)))
        is_first = load.source not in servers
        key = (load.simulated_alike, is_first)
        if key not in figures:
            figures[key] = _judged(load, is_first=is_first, work=work)
        judged = figures[key]
        if isinstance(judged, str):
            refused.append(f"{load.where}: {judged}")
            continue
        servers |= {load.source} - {""}
        if load.rate_rps is not None:
            overloads.append(judged.is_overloaded == (load.requests_failed > 0))
        if not load.requests_failed:
            rows += _compared(load, judged.figures)
    largest = _largest_loads(loads, work)
    groups = _groups(rows, largest)
    if overloads:
        groups.append(
            {
                "name": "open loop/overload",
                "rows": len(overloads),
                "agree": float(np.mean(overloads)),
            }
        )
    return {
        "groups": groups,
        "rows": rows,
        "largest_loads": largest,
        "refused": refused,
    }


class JudgedLoad(NamedTuple):
    """A simulated load."""

    figures: dict[str, float]
    is_overloaded: bool


def _judged(load: LoadRow, *, is_first: bool, work: PassLimit) -> JudgedLoad | str:
    """The figures of a load, or the reason why it cannot be simulated. Raises CapacityError when
    the allowed work is spent."""
    try:
        outcome = load.simulated(is_first=is_first, work=work)
    except MagicdecError as error:
        if work.is_spent:
            raise
        return str(error)
    return JudgedLoad(measures(outcome), outcome.is_overloaded)


def _groups(
    rows: list[dict[str, Any]], largest: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Errors by table and figure."""
    import pandas as pd

    figures = pd.DataFrame(rows, columns=["table", "metric", "error"])
    figures["name"] = figures["table"] + "/" + figures["metric"]
    loads = pd.DataFrame(largest, columns=["predicted", "measured"])
    loads["error"] = loads["predicted"] / loads["measured"] - 1.0
    loads["name"] = "largest load within limits"
    judged = pd.concat([figures, loads])
    groups: list[dict[str, Any]] = []
    for name, own in judged.groupby("name", sort=False):
        summary = ErrorSummary.of(own["error"].to_numpy(dtype=np.float64))
        group: dict[str, Any] = {"name": name}
        group |= summary.figures()
        group["median_error"] = summary.median_error
        groups.append(group)
    return groups


def _compared(load: LoadRow, predicted: dict[str, float]) -> list[dict[str, Any]]:
    """Every stated figure with its prediction."""
    at = f"{load.concurrency} users"
    if load.rate_rps is not None:
        at = f"{load.rate_rps:g}/s"
    compared = []
    for metric in METRICS:
        measured = getattr(load, metric)
        if not measured or metric not in predicted:
            continue
        compared.append(
            {
                "table": load.table,
                "load": f"{load.shape}, {at}",
                "metric": metric,
                "measured": measured,
                "predicted": predicted[metric],
                "error": predicted[metric] / measured - 1.0,
            }
        )
    return compared


def _largest_loads(loads: Sequence[LoadRow], work: PassLimit) -> list[dict[str, Any]]:
    """Largest numbers of users within limits, measured and predicted, by shape. Only shapes with
    rows on both sides of the limits count."""
    shapes: dict[str, list[LoadRow]] = defaultdict(list)
    for load in loads:
        if load.slo_pass is not None:
            shapes[load.shape].append(load)
    largest = []
    for shape, rows in shapes.items():
        kept = [load.concurrency or 0 for load in rows if load.slo_pass]
        if kept and len(kept) < len(rows):
            predicted = _most_users(rows[0], work)
            largest.append(
                {"shape": shape, "measured": max(kept), "predicted": predicted}
            )
    return largest


def _most_users(load: LoadRow, work: PassLimit) -> int:
    """The most users that keep the limits."""

    def keeps(users: int) -> bool:
        outcome = load.closed(users, work=work)
        slowest = np.quantile(outcome.ttft_s, 0.99)
        between = 0.0
        if len(outcome.tpot_s):
            between = float(np.median(outcome.tpot_s))
        return bool(slowest <= TTFT_P99_S and between <= TPOT_P50_S)

    kept = 0
    failed = 1
    while failed <= MOST_USERS and keeps(failed):
        kept = failed
        failed = 2 * failed
    while failed - kept > max(kept // 100, 1):
        middle = (kept + failed) // 2
        if keeps(middle):
            kept = middle
        else:
            failed = middle
    return kept
