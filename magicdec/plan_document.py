"""The plan document: what `magicdec plan` answers, written and read by the same types (docs/planning.md). No torch.

    plan = load_plan(Path("plan.json"))
    plan.best.gamma, plan.best.speedup, plan.best.verdict

Times are in seconds, sizes in bytes per device.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from magicdec.errors import ConfigError
from magicdec.files import converted, read_json, rows_to_csv
from magicdec.naming import draft_name
from magicdec.plan_request import Request

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 3
ADVICE = "write one with `magicdec plan --format json`"
Verdict = Literal["pays", "unclear", "does not pay"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[float, msgspec.Meta(ge=0)]
"""Not below 0; JSON has no NaN and no infinity."""
Positive = Annotated[float, msgspec.Meta(gt=0)]


def verdict_of(*, speedup_low: float, speedup_high: float) -> Verdict:
    """Decide whether speculation pays at one load, by the one definition of all tables, figures and exports.

    It pays where the speedup's 90 % interval lies above 1, and does not pay where it does not reach above 1; else it is
    unclear. Another batch may give more throughput: `speedup_vs_best_autoregressive` states that separately.
    """
    if speedup_high <= 1.0:
        return "does not pay"
    return "pays" if speedup_low > 1.0 else "unclear"


def _layout(row: Candidate | TrafficLoad) -> str:
    """How one replica is spread, for people: "tp 8 x pp 2"."""
    parts = [("dp", row.dp_size), ("tp", row.tp_size), ("pp", row.pp_size)]
    named = [f"{name} {size}" for name, size in parts if size > 1 or (name == "tp" and row.dp_size == 1)]
    return " x ".join(named) + (f", ep {row.ep_size}" if row.ep_size > 1 else "")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration with its prediction. Autoregressive: gamma 0, draft and method "none", speedup 1."""

    hardware: str
    draft: str
    """"self", "ngram", "eagle" (a trained head), the name of a draft model, or "none"."""
    draft_method: str
    draft_budget: Count | None
    """KV slots per sequence; null: the full cache."""
    draft_tp_size: Count | None
    """The ranks that the draft was priced on."""
    gamma: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    tp_size: Count
    num_replicas: Count
    batch_size: Count
    """Sequences of one replica, over all its groups and stages."""
    context_len: Count
    autoregressive_step_s: Positive
    draft_step_s: Number
    """One draft step."""
    verify_step_s: Number
    accept_step_s: Number
    upkeep_step_s: Number
    step_s: Positive
    """The whole speculative step."""
    expected_tokens_per_step: Positive
    tpot_s: Positive
    tpot_low_s: Number
    tpot_high_s: Number
    ttft_s: Number
    """Seconds to the first token of one request, the draft's prefill included."""
    tokens_per_s: Number
    """Rate of one replica."""
    tokens_per_s_per_gpu: Number
    speedup: Positive
    """At equal batch, in steady state."""
    speedup_low: Positive
    speedup_high: Positive
    """The 90 % interval."""
    speedup_vs_best_autoregressive: Number | None
    """`rate` over that of autoregressive decoding at its own best batch within the limits; null: none."""
    verdict: Verdict
    """Verdict on the speedup of whole requests where these are known, else of decoding."""
    speedup_static_batch: Number | None = None
    """Speedup of a batch that waits for its slowest sequence; for the best configuration, with a generated length."""
    break_even_gen_len: int | None
    """Generated tokens from which the draft's extra prefill is paid back; null: never."""
    bound_by: str
    """Resource that binds most of the step: weights, kv, compute, link or overhead."""
    memory_bytes_per_gpu: Number
    fits: bool
    within_limits: bool
    cost_per_million_tokens_usd: Number | None
    """Cost of generated tokens: prefill included where lengths are known, else of decoding alone."""
    acceptance_source: str
    draft_checkpoint: str = ""
    """Published weights of a draft head whose acceptance this is, where they are of this model."""
    acceptance_extrapolated: bool
    """Whether the budget or the context is outside what that source measured."""
    marks: list[str] = []
    """Reservations in a few words: "plugin", "untested", "trained to 2k"."""
    is_captured: bool = True
    """Whether the engine captures graphs of these passes as it is set by default; priced as if it did."""
    request_ttft_s: Number | None = None
    """From here on: whole requests, where the length of their output is known, in steady state: one that ends is
    replaced, so that prefills of others come between a request's tokens."""
    request_tpot_s: Number | None = None
    request_s: Number | None = None
    """From its slot to the last token."""
    request_speedup: Number | None = None
    """Over autoregressive decoding at equal batch, prefill included in both."""
    request_speedup_low: Number | None = None
    request_speedup_high: Number | None = None
    prefill_share: Number | None = None
    """Share of the devices' time."""
    output_tokens_per_s_per_gpu: Number | None = None
    requests_per_s: Number | None = None
    """Requests per second of all replicas."""
    gpu_hours_per_million_requests: Number | None = None
    cost_per_million_requests_usd: Number | None = None
    pp_size: Count = 1
    """Stages of a pipeline."""
    dp_size: Count = 1
    """Groups of tp ranks that hold sequences of their own (data-parallel attention)."""
    ep_size: Count = 1
    """Ranks that whole experts are divided over; 1: each expert is cut by tp."""
    num_nodes: Count = 1
    """Nodes of one replica."""

    @property
    def num_gpus(self) -> int:
        """Devices of one replica."""
        return self.tp_size * self.dp_size * self.pp_size

    @property
    def layout(self) -> str:
        return _layout(self)

    @property
    def is_speculative(self) -> bool:
        return self.gamma > 0

    @property
    def rate_per_gpu(self) -> float:
        """Generated tokens per second and device in use, of whole requests where these are known, else of decoding."""
        whole = self.output_tokens_per_s_per_gpu
        return self.tokens_per_s_per_gpu if whole is None else whole

    @property
    def rate(self) -> float:
        """Generated tokens per second of all replicas: what configurations of a case are ranked by, so that devices
        which a tp size leaves idle count."""
        return self.rate_per_gpu * self.num_gpus * self.num_replicas

    @property
    def gain(self) -> tuple[float, float, float]:
        """Speedup with the ends of its interval, of whole requests where these are known, else of decoding."""
        if self.request_speedup is None or self.request_speedup_low is None or self.request_speedup_high is None:
            return self.speedup, self.speedup_low, self.speedup_high
        return self.request_speedup, self.request_speedup_low, self.request_speedup_high

    @property
    def rate_low_per_gpu(self) -> float:
        """Rate per device at the low end of the speedup's interval."""
        return self.rate_per_gpu * self.gain[1] / self.gain[0]

    @property
    def between_tokens_s(self) -> float:
        """Time between tokens as users see it: with the prefills of others where requests are known."""
        return self.tpot_s if self.request_tpot_s is None else self.request_tpot_s

    @property
    def first_token_s(self) -> float:
        """Time to the first token as users see it."""
        return self.ttft_s if self.request_ttft_s is None else self.request_ttft_s


class GammaTable(msgspec.Struct, frozen=True, kw_only=True):
    """The best gamma of one draft by batch (rows) and context (columns) at one tp; gamma 0, speedup 1 where it is not
    faster than decoding without it."""

    tp_size: Count
    draft: str = ""
    """The best configuration's draft, or the leading one where that is autoregressive."""
    draft_method: str = ""
    draft_budget: Count | None = None
    batch_sizes: list[Count]
    context_lens: list[Count]
    gamma: list[list[Annotated[int, msgspec.Meta(ge=0)]]]
    """Where a length is generated, gamma, verdict and break-even context go by whole requests, as candidates do."""
    speedup: list[list[Number]]
    """Speedup of decoding."""
    speedup_low: list[list[Number]] | None = None
    """Ends of the 90 % interval of the draft's speedup at its best gamma, below 1 too; 0 where it cannot run."""
    speedup_high: list[list[Number]] | None = None
    verdict: list[list[Verdict]]
    fits: list[list[bool]]
    break_even_gen_len: list[list[int | None]]
    break_even_context: list[Number | None]
    """The context from which on speculation is faster, up to the longest of the table, by batch; null: it is not faster
    there."""
    idle_speedup: list[list[Number]] | None = None
    """Speedup of an engine that has the draft set up and drafts nothing (K = 0), over one without it; null: the best
    has no draft."""
    gamma_set_up: list[list[Annotated[int, msgspec.Meta(ge=0)]]] | None = None
    """The best gamma once the draft is set up: 0 only where drafting nothing is faster."""

    @property
    def gamma_of_steps(self) -> list[list[int]]:
        """The gammas that an engine with the draft set up should draft: what is shown and exported."""
        return self.gamma if self.gamma_set_up is None else self.gamma_set_up

    @property
    def draft_name(self) -> str:
        """The draft in a few words: "StreamingLLM 512"."""
        return draft_name(self.draft, self.draft_method, self.draft_budget)

    def __post_init__(self) -> None:
        num_batches, width = len(self.batch_sizes), {len(self.context_lens)}
        optional = ("idle_speedup", "gamma_set_up", "speedup_low", "speedup_high")
        for name in ("gamma", "speedup", "verdict", "fits", "break_even_gen_len", *optional):
            rows = getattr(self, name)
            if rows is not None and (len(rows) != num_batches or {len(row) for row in rows} != width or width == {0}):
                raise ValueError(f"gamma_table: {name} must have a row per batch size and a column per context")
        if len(self.break_even_context) != num_batches:
            raise ValueError("gamma_table: break_even_context must have one entry per batch size")
        if any(axis != sorted(set(axis)) for axis in (self.batch_sizes, self.context_lens)):
            raise ValueError("gamma_table: batch_sizes and context_lens must be in rising order")


Span = tuple[Count, Count]


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Contexts at which a draft is faster than decoding without it, at one batch: from and to which. By whole requests
    where a length is generated, else by decoding."""

    draft: str
    draft_method: str
    batch_size: Count
    contexts: Span
    """The shortest and the longest context that were looked at."""
    pays: Span | None
    """The last stretch in which the speedup is above 1; null: none."""
    surely: Span | None
    """The last stretch in which the speedup's whole 90 % interval is above 1; null: none."""
    possibly: Span | None
    """The last stretch in which the speedup's 90 % interval reaches above 1; null: none."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of a pass: its time, the datasheet's ceiling for the same work, and what binds it."""

    op: str
    time_s: Number
    ceiling_s: Number
    bound_by: str
    flops: Number
    bytes: Number


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """The best configuration's memory, per device."""

    weights_bytes: Number
    kv_bytes: Number
    draft_weights_bytes: Number
    draft_kv_bytes: Number
    workspace_bytes: Number
    capacity_bytes: Number
    largest_batch: Number
    largest_autoregressive_batch: Number


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The roof over the operations of `breakdown`: one device in the format that products run in."""

    memory_bytes_per_s: Positive
    flops_per_s: Positive
    """Nominal rate: the datasheet's, or for a calibrated machine the best seen."""
    gemm_bytes_per_s: Positive
    gemm_flops_per_s: Positive
    """FLOP/s as fitted to linear layers."""


class NeedsAcceptance(msgspec.Struct, frozen=True, kw_only=True):
    """A draft that is not ranked, for want of a measured acceptance."""

    draft: str
    draft_method: str
    reason: str
    break_even_acceptance_rate: Number | None = None
    """The rate from which it would pay at the best configuration's batch and context; null: at none."""


class Formats(msgspec.Struct, frozen=True, kw_only=True):
    """Number formats of weights and KV caches: what was asked, or the defaults."""

    weight_dtype: str
    kv_dtype: str
    draft_weight_dtype: str
    draft_kv_dtype: str


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one device and context. Tokens per second are compared within a case, never across cases."""

    hardware: str
    context_len: Count
    best: Candidate
    """The configuration to run; autoregressive where no draft gives more tokens per second and device."""
    autoregressive: Candidate
    """Autoregressive decoding at the best configuration's tp and batch."""
    best_autoregressive: Candidate | None
    """Autoregressive decoding at its own best tp and batch; null: within the limits at none."""
    best_by_batch: list[Candidate]
    """The best of each batch, where batches were asked for."""
    pareto: list[Candidate]
    """The rows that none beats in both latency and throughput of all devices, fastest first."""
    gamma_table: GammaTable
    reach: list[Reach] = []
    """Contexts at which each draft pays, at the best configuration's batch and tp."""
    breakdown: dict[str, list[Operation]]
    """Operations of each pass of the best configuration."""
    memory: MemoryUse
    ceilings: Ceilings | None = None
    layouts: list[Candidate] = []
    """The best of each way to spread a replica, where several were compared, the most tokens per second first."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """A time that users see, in seconds: its mean and percentiles over requests."""

    mean: Number
    p50: Number
    p95: Number
    p99: Number

    @classmethod
    def of(cls, seconds: Any) -> Percentiles:
        import numpy as np

        if not len(seconds):
            return cls(mean=0.0, p50=0.0, p95=0.0, p99=0.0)
        p50, p95, p99 = np.quantile(seconds, (0.5, 0.95, 0.99)).tolist()
        return cls(mean=float(np.mean(seconds)), p50=p50, p95=p95, p99=p99)


class TrafficLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas under arrivals, simulated."""

    draft: str
    draft_method: str
    draft_budget: Count | None
    gamma: Annotated[int, msgspec.Meta(ge=0)]
    """The best single gamma; `policy` says which are drafted."""
    policy: str
    """"off", "gamma 3", "by batch" or "by batch and context" (the plan's table of gammas)."""
    tp_size: Count
    pp_size: Count = 1
    dp_size: Count = 1
    """Data-parallel groups, each of tp ranks with sequences of its own."""
    ep_size: Count = 1
    """Ranks that whole experts are divided over."""
    num_replicas: Count
    rate_per_s: Positive
    overloaded: bool
    """Whether the queue grows without bound: no percentile is stated then."""
    within_limits: bool
    ttft: Percentiles | None
    tpot: Percentiles | None
    request: Percentiles | None
    goodput_per_s: Number
    """Requests per second that keep the limits."""
    output_tokens_per_s: Number
    preemptions: Annotated[int, msgspec.Meta(ge=0)]
    mean_batch: Number
    mean_waiting: Number
    kv_share: Number
    """Share of the cache in use, over time."""
    analytic_rate_per_s: Number
    """Rate by Little's law over mean times, within the limits."""
    cost_per_million_tokens_usd: Number | None = None
    highest_rate_per_s: Number | None = None
    """Rate up to which these devices keep the limits."""
    ttft_p95_low_s: Number | None = None
    ttft_p95_high_s: Number | None = None
    """From repeats and the costs' own error; null: they may be too few."""
    tpot_p95_low_s: Number | None = None
    tpot_p95_high_s: Number | None = None

    @property
    def num_gpus(self) -> int:
        """Devices of all replicas."""
        return self.tp_size * self.dp_size * self.pp_size * self.num_replicas

    @property
    def layout(self) -> str:
        return _layout(self)

    @property
    def is_speculative(self) -> bool:
        return self.policy != "off"


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One replica at one time."""

    time_s: Number
    batch: Number
    """Requests that decode or are prefilled."""
    waiting: Number
    kv_share: Number


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for a rate of arrivals and limits on percentiles."""

    rate_per_s: Positive
    num_requests: Count
    """Requests that were simulated."""
    best: TrafficLoad
    """The fewest devices that keep the limits."""
    autoregressive: TrafficLoad | None
    """The fewest without speculation; null: none keep them."""
    speculative: TrafficLoad | None
    curves: list[TrafficLoad]
    """Each layout and policy over rates, on as many devices as the best has."""
    timeline: list[Moment]
    notes: list[str]


class Plan(Case, frozen=True, kw_only=True):
    """The whole answer: the first case that was asked for and can be answered, together with the others."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["plan"] = "plan"
    source: Literal["analytical", "calibrated"] = "analytical"
    model: str
    engine: str
    request: Request
    precision: Formats
    other_cases: list[Case]
    needs_acceptance: list[NeedsAcceptance]
    notes: list[str]
    key_notes: list[str] = []
    """Those of `notes` that may change what to do."""
    autoregressive_rows: list[Candidate]
    """Autoregressive rows of all cases."""
    traffic: Traffic | None = None
    """Answer for a rate of arrivals; the rest of the document is then of its devices and lengths."""
    candidates: list[Candidate]
    """The drafted configurations, case by case, best first. Where the batch is searched: those of each draft that no
    other of it beats in both latency and throughput."""

    @property
    def cases(self) -> list[Case]:
        return [self, *self.other_cases]

    @property
    def rows(self) -> list[Candidate]:
        return [*self.autoregressive_rows, *self.candidates]

    def __repr__(self) -> str:
        """The best configuration of each case, in a line."""
        lines = [f"Plan: {self.model}, engine {self.engine}"]
        for case in self.cases:
            best = case.best
            draft = draft_name(best.draft, best.draft_method, best.draft_budget)
            gain = f"{best.speedup:.2f}x ({best.speedup_low:.2f}-{best.speedup_high:.2f}), {best.verdict}"
            answer = f"{draft}, gamma {best.gamma}: {gain}" if best.is_speculative else "no draft"
            lines.append(f"  {case.hardware}, context {case.context_len}, batch {best.batch_size}: {answer}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A notebook's view: its answer."""
        from html import escape  # with a table of all entities

        return f"<pre>{escape(repr(self))}</pre>"

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def to_csv(self) -> str:
        """Autoregressive rows and candidates as one table with a header."""
        return rows_to_csv((msgspec.structs.asdict(row) for row in self.rows), Candidate.__struct_fields__)

    def to_frame(self) -> pd.DataFrame:
        """Autoregressive rows and candidates as a table, under the fields' names."""
        import pandas as pd

        return pd.DataFrame([msgspec.structs.asdict(row) for row in self.rows]).convert_dtypes()


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The server that a plan is exported for, as far as the plan does not hold it."""

    checkpoints: dict[str, str] = {}
    """The directory or repository to load for a name of a model or a draft; a name without one is written as it is."""
    longest_context: int | None = None
    """Tokens that the model reads; None: not known."""
    is_cpu: bool = False


UNKNOWN_SITE = Site()


def load_plan(path: Path) -> Plan:
    """Reads a plan document.

    Raises ConfigError where the file cannot be read, is no plan, one of another version, or damaged; the message names
    the file and the place.
    """
    return plan_of(read_json(path, "plan"), where=str(path))


def plan_of(document: Any, *, where: str = "the plan") -> Plan:
    """The plan of a document's values. Raises ConfigError naming `where`."""
    if not isinstance(document, dict) or document.get("kind") != "plan":
        raise ConfigError(f"{where} is no plan; {ADVICE}")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{where} is a plan of schema version {version}, this program reads {SCHEMA_VERSION}; {ADVICE}"
        )
    return converted(document, Plan, where=f"{where} is not a whole plan")
