"""Servers under arrivals, and closed loops with limits: what the simulation gives for each measured row.

A row is one load: engine, engine_version, model, gpu, quant, tp, output_len, and of

    open loop      rate_rps, prompt_len_mean; arrival (constant rate, or poisson), duration_s, requests_failed,
                   max_num_seqs, max_num_batched_tokens, cached_len
    closed loop    concurrency, input_len; slo_pass

with any of the METRICS. A closed loop is taken to send ROUNDS requests per user: percentiles of TTFT count the first
burst as so large a part. The largest load within limits is that of the last row of a shape that kept them, and in the
simulation the most users that keep TTFT_P99_S and TPOT_P50_S (a median between tokens that no prompt delays).
Prompts that a note calls shared ("shared-prefix") come again: they are cached, while the cache holds them, but for the
first SHARED_PROMPTS of a server's first row (rows with one `source` are of one server, in their order).
docs/traffic.md says which constants these tables informed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from magicdec.comparison import ErrorSummary
from magicdec.errors import ConfigError, MagicdecError
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.traffic.requests import Requests, alike
from magicdec.perfmodel.traffic.simulate import Outcome, Server, simulate, simulate_closed
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec
from magicdec.units import MILLI
from magicdec.validate.rows import NEWEST, Count, Length, Size, engine_name, model_name, read_rows, weight_format

ROUNDS = 4
DURATION_S = 600.0
SHARED_PROMPTS = 45
"""Prompts that a load of shared prefixes goes through again and again: users of the published configurations, 44 to 50
(profile.yaml of the runs in inference-sim/training: 9 to 11 system prompts, 4 or 5 users each)."""
TTFT_P99_S, TPOT_P50_S = 2.0, 0.050
MOST_USERS = 1024
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
METRICS = (
    *(f"{what}_{which}_ms" for what in ("ttft", "tpot", "e2e") for which in ("mean", *QUANTILES)), "output_tok_s"
)  # fmt: skip
Users = Annotated[int, msgspec.Meta(ge=1, le=MOST_USERS)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class LoadRow(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One measured load, with its figures in their columns' units. Raises ConfigError for what is not known."""

    where: str = ""
    source: str = ""
    engine: str
    engine_version: str = NEWEST
    model: str
    gpu: str
    quant: str = "bf16"
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
            raise ConfigError("column 'prompt_len_mean' or 'input_len' is missing or empty")
        _ = self.setup  # an unknown name is refused here

    @cached_property
    def setup(self) -> Setup:
        model = load_model_spec(model_name(self.model))
        engine = load_engine(engine_name(self.engine)).of_version(self.engine_version)
        weights = weight_format(model, self.quant)
        return Setup.of(model, self.gpu, engine, AUTOREGRESSIVE, sampling=SamplingSpec(), weight_dtype=weights)

    @property
    def prompt_len(self) -> int:
        return round(self.prompt_len_mean or self.input_len or 1.0)

    @property
    def shape(self) -> str:
        """Equal for loads that differ in users only."""
        name = f"{self.setup.model.name} {self.setup.precision.weight_dtype}"
        return f"{name}/tp {self.tp}/{self.prompt_len}+{round(self.output_len)}"

    @property
    def table(self) -> str:
        return "open loop" if self.rate_rps is not None else "closed loop"

    def simulated(self, *, is_first: bool = True) -> Outcome:
        """The load's own requests, as many as were measured; `is_first` of those that its server had."""
        if self.rate_rps is None:
            return self.closed(self.concurrency or 1)
        requests = self._requests(max(int(self.duration_s * self.rate_rps), 2))
        gaps = np.full(len(requests), 1.0 / self.rate_rps)
        if self.arrival.startswith("poisson"):
            gaps = np.random.default_rng(0).exponential(gaps)
        requests.arrival_s[:] = np.cumsum(gaps)
        server = self.server(requests)
        requests.cached_len[:] = self._cached(server)
        if is_first and self.cached_len is None:
            requests.cached_len[:SHARED_PROMPTS] = 0
        return simulate(server, requests)

    def closed(self, users: int) -> Outcome:
        requests = self._requests(ROUNDS * users)
        return simulate_closed(self.server(requests), requests, users=users)

    def server(self, requests: Requests) -> Server:
        return Server.of(
            self.setup, requests, tp_size=self.tp, max_sequences=self.max_num_seqs,
            max_tokens=self.max_num_batched_tokens,
        )  # fmt: skip

    def _requests(self, count: int) -> Requests:
        return alike(count, prompt_len=self.prompt_len, output_len=round(self.output_len))

    def _cached(self, server: Server) -> int:
        """Tokens of a prompt that are cached when it comes: as stated; of shared prompts all but the last block's,
        while the cache holds them and the answers of two rounds."""
        if self.cached_len is not None:
            return min(round(self.cached_len), self.prompt_len - 1)
        limits = server.limits
        round_len = SHARED_PROMPTS * (self.prompt_len + self.output_len)
        has_room = limits.num_blocks * limits.block_size >= 2 * round_len
        is_shared = "shared-prefix" in self.note
        return (self.prompt_len - 1) // limits.block_size * limits.block_size if has_room and is_shared else 0


def measures(outcome: Outcome) -> dict[str, float]:
    """Every figure that a row may state, in its units."""
    found: dict[str, float] = {"output_tok_s": outcome.tokens_per_s}
    for name, values in (("ttft", outcome.ttft_s), ("tpot", outcome.tpot_s), ("e2e", outcome.e2e_s)):
        if len(values):
            found[f"{name}_mean_ms"] = float(values.mean()) / MILLI
            found |= {f"{name}_{key}_ms": float(np.quantile(values, at)) / MILLI for key, at in QUANTILES.items()}
    return found


def validate_traffic(paths: Sequence[Path]) -> dict[str, Any]:
    """{"groups": errors by table and figure, "rows": each figure, "largest_loads": by shape, "refused": [lines]}.

    Raises ConfigError for a file that is neither table, and when no row can be judged.
    """
    loads, refused = read_rows(paths, LoadRow, one_of=("rate_rps", "concurrency"))
    rows: list[dict[str, Any]] = []
    overloads: list[bool] = []
    servers: set[str] = set()
    for load in loads:
        try:
            outcome = load.simulated(is_first=load.source not in servers)
        except MagicdecError as error:
            refused.append(f"{load.where}: {error}")
            continue
        servers |= {load.source} - {""}
        if load.rate_rps is not None:
            overloads.append(outcome.is_overloaded == (load.requests_failed > 0))
        if not load.requests_failed:
            rows += _compared(load, outcome)
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        errors[f"{row['table']}/{row['metric']}"].append(row["error"])
    largest = _largest_loads(loads)
    if largest:
        errors["largest load within limits"] = [each["predicted"] / each["measured"] - 1.0 for each in largest]
    summaries = {name: ErrorSummary.of(np.array(each)) for name, each in errors.items()}
    groups: list[dict[str, Any]] = [
        {"name": name, **each.figures(), "median_error": each.median_error} for name, each in summaries.items()
    ]
    if overloads:
        groups.append({"name": "open loop/overload", "rows": len(overloads), "agree": float(np.mean(overloads))})
    return {"groups": groups, "rows": rows, "largest_loads": largest, "refused": refused}


def _compared(load: LoadRow, outcome: Outcome) -> list[dict[str, Any]]:
    """Every stated figure with its prediction."""
    at = f"{load.rate_rps:g}/s" if load.rate_rps is not None else f"{load.concurrency} users"
    told, found = measures(outcome), []
    for metric in METRICS:
        if (measured := getattr(load, metric)) and metric in told:
            found.append({
                "table": load.table, "load": f"{load.shape}, {at}", "metric": metric, "measured": measured,
                "predicted": told[metric], "error": told[metric] / measured - 1.0,
            })  # fmt: skip
    return found


def _largest_loads(loads: Sequence[LoadRow]) -> list[dict[str, Any]]:
    """The most users of each shape whose rows say which kept their limits, measured and predicted."""
    shapes: dict[str, list[LoadRow]] = defaultdict(list)
    for load in loads:
        if load.slo_pass is not None:
            shapes[load.shape].append(load)
    found = []
    for shape, rows in shapes.items():
        kept = [load.concurrency or 0 for load in rows if load.slo_pass]
        if kept and len(kept) < len(rows):
            found.append({"shape": shape, "measured": max(kept), "predicted": _most_users(rows[0])})
    return found


def _most_users(load: LoadRow) -> int:
    """The most users that keep the limits."""

    def keeps(users: int) -> bool:
        outcome = load.closed(users)
        slowest, between = np.quantile(outcome.ttft_s, 0.99), np.median(outcome.tpot_s)
        return bool(slowest <= TTFT_P99_S and between <= TPOT_P50_S)

    low, high = 0, 1
    while high <= MOST_USERS and keeps(high):
        low, high = high, 2 * high
    while high - low > max(low // 100, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
