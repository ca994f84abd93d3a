"""The plan document: what `magicdec plan` answers, written and read by the same types
(docs/planning.md). No torch.

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
from magicdec.schema.evidence import LaneEvidence
from magicdec.schema.gamma_table import BatchBand, TableGamma
from magicdec.schema.plan_rows import packed, unpacked, written
from magicdec.schema.request import Request
from magicdec.schema.row import (
    COLUMNS,
    Candidate,
    Count,
    Gain,
    Layout,
    Number,
    Positive,
    Verdict,
    columns,
)
from magicdec.units import MILLI, format_number

if TYPE_CHECKING:
    import pandas as pd

PLAN_SCHEMA_VERSION = 5
"""Version of the document, the only one that is read."""
ADVICE = "write one with `magicdec plan --format json`"


class GammaTable(msgspec.Struct, frozen=True, kw_only=True):
    """The best gamma of one draft by batch (rows) and context (columns) at one tp; gamma 0, speedup
    1 where it is not faster than decoding without it."""

    tp_size: Count
    draft: str = ""
    """The best configuration's draft, or the leading one where that is autoregressive."""
    draft_method: str = ""
    draft_budget: Count | None = None
    batch_sizes: list[Count]
    context_lens: list[Count]
    gamma: list[list[Annotated[int, msgspec.Meta(ge=0)]]]
    """Where a length is generated, gamma, verdict and break-even context go by whole requests, as
    candidates do.
    """
    speedup: list[list[Number]]
    """Speedup of decoding."""
    speedup_low: list[list[Number]] | None = None
    """Ends of the 90 % interval of the draft's speedup at its best gamma, below 1 too; 0 where it
    cannot run.
    """
    speedup_high: list[list[Number]] | None = None
    verdict: list[list[Verdict]]
    fits: list[list[bool]]
    break_even_gen_len: list[list[int | None]]
    break_even_context: list[Number | None]
    """The context from which on speculation is faster, up to the longest of the table, by batch;
    null: it is not faster there."""
    idle_speedup: list[list[Number]] | None = None
    """Speedup of an engine that has the draft set up and drafts nothing (K = 0), over one without
    it; null: the best has no draft."""
    gamma_set_up: list[list[Annotated[int, msgspec.Meta(ge=0)]]] | None = None
    """The best gamma once the draft is set up: 0 only where drafting nothing is faster."""
    speedup_set_up: list[list[Number]] | None = None
    """Speedup of decoding by `gamma_set_up`, before what the engine takes for following a table."""

    @property
    def gamma_of_steps(self) -> list[list[int]]:
        """The gammas to draft in an engine with the draft set up, as shown and exported."""
        if self.gamma_set_up is None:
            return self.gamma
        return self.gamma_set_up

    @property
    def policy(self) -> TableGamma:
        """Its gammas as engines, simulations and runs look them up."""
        return TableGamma(
            batch_sizes=tuple(self.batch_sizes),
            context_lens=tuple(self.context_lens),
            gammas=tuple(tuple(row) for row in self.gamma_of_steps),
        )

    @property
    def draft_name(self) -> str:
        """The draft in a few words: "StreamingLLM 512"."""
        return draft_name(self.draft, self.draft_method, self.draft_budget)

    def __post_init__(self) -> None:
        num_batches = len(self.batch_sizes)
        width = {len(self.context_lens)}
        optional = (
            "idle_speedup",
            "gamma_set_up",
            "speedup_set_up",
            "speedup_low",
            "speedup_high",
        )
        for name in (
            "gamma",
            "speedup",
            "verdict",
            "fits",
            "break_even_gen_len",
            *optional,
        ):
            rows = getattr(self, name)
            if rows is not None and (
                len(rows) != num_batches
                or {len(row) for row in rows} != width
                or width == {0}
            ):
                raise ValueError(
                    f"gamma_table: {name} must have a row per batch size and a column per context"
                )
        if len(self.break_even_context) != num_batches:
            raise ValueError(
                "gamma_table: break_even_context must have one entry per batch size"
            )
        if any(
            axis != sorted(set(axis)) for axis in (self.batch_sizes, self.context_lens)
        ):
            raise ValueError(
                "gamma_table: batch_sizes and context_lens must be in rising order"
            )


Source = Literal["table", "carried over", "roofline", "report"]
"""Where a kernel's time comes from: a table of this kernel on this device; another device's or
format's; no table, so the datasheet's rates and usual efficiencies; one report.
"""


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one kernel comes from, and how sure it is."""

    kernel: str
    source: Source
    relative_error: Number
    """One standard deviation, relative."""
    is_inside: bool | None = None
    """Whether the shape lies inside the shapes of the table; null: no table, or its shapes are not
    known.
    """


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of a pass: its time, the datasheet's ceiling for the same work, what binds it,
    and where its time comes from.
    """

    op: str
    time_s: Number
    ceiling_s: Number
    bound_by: str
    flops: Number
    bytes: Number
    kernels: list[KernelTime] = []
    """Its kernels; none: its time is the engine's constants."""

    @property
    def time_from(self) -> str:
        """Where its time comes from, in a word or two: that of its least sure kernel."""
        if not self.kernels:
            return "engine"
        least_sure = max(self.kernels, key=lambda kernel: kernel.relative_error)
        if least_sure.is_inside is False:
            return f"beyond {least_sure.source}"
        return least_sure.source


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
    """Roof over the operations of `breakdown`: one device, in the format of its matrix products."""

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
    """The rate from which it would pay at the best configuration's batch and context; null: at
    none.
    """


class Formats(msgspec.Struct, frozen=True, kw_only=True):
    """Number formats of weights and KV caches: what was asked, or the defaults."""

    weight_dtype: str
    kv_dtype: str
    draft_weight_dtype: str
    draft_kv_dtype: str


Outcome = Literal[
    "speculate",
    "no gain",
    "no room",
    "over limits",
    "no acceptance",
    "not published",
    "not asked",
]
"""Whether speculation is chosen, or why not: it is chosen; no draft is faster; the fastest draft
does not fit in
memory at this batch, or not within the limits; it needs a plugin that was not asked for; no draft
has a known acceptance; the draft that was asked for is not published for the model; no draft was
asked for.
"""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit on a latency, with the choice's value."""

    of: Literal[
        "time per token", "first token", "p95 of time per token", "p95 of first token"
    ]
    limit_s: Positive
    value_s: Number | None
    """Null: a load that grows without bound."""

    @property
    def is_kept(self) -> bool:
        return self.value_s is not None and self.value_s <= self.limit_s


class OfTask(msgspec.Struct, frozen=True, kw_only=True):
    """One class of text: what the choice gains on it, and the fastest configuration there."""

    task: str
    weight: Number
    """Weight of the text in the choice; 0: it is named apart."""
    own: Gain
    """The choice's gain on this text."""
    draft: str
    """The fastest draft there; "none": no draft."""
    draft_method: str
    draft_budget: int | None
    gamma: int
    best: Gain
    """The gain of the fastest draft there."""
    changes: Number
    """Loss of keeping to the choice on this text, in tokens per second."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """How the choice hangs on what is not known of the draft that is chosen, else of the fastest that is
    not."""

    tasks: list[OfTask]
    """The choice on each class of text, where none was named and acceptance is believed, in the
    order of `tasks.TASKS`."""
    measure: str = ""
    """The command that measures its acceptance; "": it was measured or given."""


class OtherKernel(msgspec.Struct, frozen=True, kw_only=True):
    """Another attention backend of the engine, with which a draft surely is faster than the choice."""

    engine: str
    backend: str
    option: str
    """The option that asks for it."""
    row: Candidate
    """The draft with it."""
    kernel: str
    usual_kernel: str
    gain: Gain
    """In tokens per second over the choice."""
    usual_verify_s: float
    """The draft's verification without it."""
    loses_graphs: bool
    """Whether steps of several tokens replay no whole captured graph with it."""
    costs: str
    """Its price, in words; empty: nothing is known."""

    @property
    def reason(self) -> str:
        """Why it is faster, and what it costs."""
        verify_ms = format_number(self.row.step.verify_s / MILLI)
        usual_ms = format_number(self.usual_verify_s / MILLI)
        reason = (
            f"verification takes {verify_ms} ms, not {usual_ms}: {self.kernel} splits a context over the "
            f"device, {self.usual_kernel} does not for several tokens; no server was measured with both"
        )
        if self.costs:
            reason += f"; {self.costs}"
        return reason


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The one answer that every table, export and page shows: a configuration, its baseline and
    why.
    """

    row: Candidate
    """The configuration to run; autoregressive where speculation is not chosen."""
    outcome: Outcome
    without_draft: Candidate
    """Autoregressive decoding at the configuration's layout and batch, within the limits or not."""
    best_without_draft: Candidate | None
    """Autoregressive decoding at its own best layout and batch; null: it keeps the limits at none.
    """
    gammas: list[BatchBand]
    """(first batch, last batch, gamma) to run at the configuration's context, up to its batch."""
    limits: list[Limit] = []
    left_out: Candidate | None = None
    """The fastest drafted configuration at the same batch, where speculation is not chosen;
    `outcome`
    says why.
    """
    left_out_fits: Candidate | None = None
    """That draft at the largest batch at which it fits and keeps the limits, where it does not at
    this one.
    """
    outlook: Outlook | None = None
    """Null: no draft was considered."""
    faults: list[str] = []
    """Drafts that were measured and do not work, each in a sentence."""
    tied: Candidate | None = None
    """Another draft that is expected to be as fast within 3 %, neither being ahead in three of four
    draws; the choice is the one that was checked on engines, needs no extra package, or drafts
    less."""
    evidence: LaneEvidence | None = None
    """The evidence from measured servers like the choice's, or the left-out draft's; null: no draft was
    considered."""
    other_kernel: OtherKernel | None = None
    to_train: Candidate | None = None
    """The best configuration of a draft that was asked for and is not published for the model, with
    the acceptance of other models' drafts. It is never chosen nor exported.
    """

    @property
    def is_speculative(self) -> bool:
        return self.row.is_speculative


class CaseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one device and context. Tokens per second are compared within a case, never
    across cases.
    """

    hardware: str
    context_len: Count
    choice: Choice
    best_by_batch: list[Candidate]
    """The best of each batch, where batches were asked for."""
    pareto: list[Candidate]
    """The rows that none beats in both latency and throughput of all devices, fastest first."""
    gamma_table: GammaTable
    breakdown: dict[str, list[Operation]]
    """Operations of each pass of the best configuration."""
    path: str = ""
    """How the engine runs these passes, as they are priced: its model runner, graphs, padding and
    scheduling. Empty: not written down."""
    memory: MemoryUse
    ceilings: Ceilings | None = None
    layouts: list[Candidate] = []
    """The best of each way to spread a replica, where several were compared, the most tokens per
    second first.
    """

    @property
    def best(self) -> Candidate:
        """The configuration to run."""
        return self.choice.row

    @property
    def autoregressive(self) -> Candidate:
        """Autoregressive decoding at the best configuration's layout and batch."""
        return self.choice.without_draft

    @property
    def best_autoregressive(self) -> Candidate | None:
        return self.choice.best_without_draft

    def choosing(self, row: Candidate) -> Choice:
        """The choice with another configuration to run, by the table of this answer."""
        gammas = []
        if row.is_speculative:
            is_followed = len(self.choice.gammas) > 1 and row.gamma == self.best.gamma
            gammas = bands_of(row, self.gamma_table, is_followed=is_followed)
        outcome: Outcome = "speculate" if row.is_speculative else "no gain"
        return msgspec.structs.replace(
            self.choice, row=row, outcome=outcome, gammas=gammas
        )


def bands_of(
    row: Candidate, table: GammaTable, *, is_followed: bool
) -> list[BatchBand]:
    """The gammas to run by batch: the table's where it is followed, else the row's own."""
    if is_followed:
        return table.policy.bands(row.context_len, most=row.batch_size)
    return [BatchBand(1, row.batch_size, row.gamma)]


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


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate in a simulation that differs from the load in some ways: `of` is what the
    next one, or the load itself, has beside them.
    """

    of: Literal["waves and prompts", "arrivals that bunch", "percentiles"]
    rate_per_s: Number
    """The rate without it."""


class TrafficLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas under arrivals, simulated."""

    draft: str
    draft_method: str
    draft_budget: Count | None
    gamma: Annotated[int, msgspec.Meta(ge=0)]
    """The best single gamma; `policy` says which are drafted."""
    policy: str
    """"off", "gamma 3", or "by batch" (the plan's table of gammas)."""
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
    highest_rate_low_per_s: Number | None = None
    """At the 95th percentile of the time per token's distribution: with 95 %, they keep more."""
    highest_rate_high_per_s: Number | None = None
    """At its 5th percentile; null beside a lower end: no rate is too much there. Both null: the load
    takes too many simulations for an interval."""
    num_gpus_low: Count | None = None
    num_gpus_high: Count | None = None
    """The fewest devices of this layout for the requested rate at the 5th and 95th percentile;
    null beside `highest_rate_low_per_s`: no number of them keeps it."""
    reasons: list[Reason] = []
    """Where it differs from `analytic_rate_per_s`: from the steady answer, each simulation nearer
    to the load. Empty: it differs little.
    """
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
    def may_keep(self) -> bool:
        """Whether the devices keep the requested rate, if perhaps only where costs are lower than
        predicted."""
        highest = self.highest_rate_high_per_s
        return self.within_limits or (highest or 0.0) >= self.rate_per_s

    @property
    def layout(self) -> str:
        return Layout(
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            dp_size=self.dp_size,
            ep_size=self.ep_size,
        ).label

    @property
    def is_speculative(self) -> bool:
        return self.policy != "off"


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for a rate of arrivals and limits on percentiles."""

    rate_per_s: Positive
    num_requests: Count
    """Requests that were simulated."""
    best: TrafficLoad
    """The fewest devices that keep the limits; of a number that was given and is too small, those
    that keep the highest rate: `is_enough` is then false."""
    autoregressive: TrafficLoad | None
    """The fewest without speculation, also where they are more than were given; null: no number
    keeps them."""
    speculative: TrafficLoad | None
    """The fewest with it, likewise; null: no number keeps them, or no draft was served."""
    curves: list[TrafficLoad]
    """Each layout and policy over rates, on as many devices as the best has."""
    notes: list[str]
    has_limits: bool = True
    """Whether a latency is limited; else a load is kept where its queue does not grow."""
    lacking: list[str] = []
    """Why drafts that were asked for are not served."""

    @property
    def is_enough(self) -> bool:
        """Whether the best keeps the requested rate."""
        return self.best.within_limits


class Plan(CaseAnswer, frozen=True, kw_only=True):
    """The whole answer: the first case that was asked for and can be answered, of several devices
    that of the best offer, together with the others.
    """

    schema_version: int = PLAN_SCHEMA_VERSION
    kind: Literal["plan"] = "plan"
    source: Literal["analytical", "calibrated"] = "analytical"
    model: str
    engine: str
    request: Request
    context_is_default: bool = False
    """Whether it is of the default context, which nobody asked for."""
    precision: Formats
    other_cases: list[CaseAnswer]
    needs_acceptance: list[NeedsAcceptance]
    notes: list[str]
    key_notes: list[str] = []
    """Those of `notes` that may change what to do."""
    assumed: str | None = None
    """The sentence that says as what a model of no known architecture was planned."""
    autoregressive_rows: list[Candidate]
    """Autoregressive rows of all cases."""
    traffic: Traffic | None = None
    """Answer for a rate of arrivals; the rest of the document is then of its devices and lengths.
    """
    candidates: list[Candidate]
    """The drafted configurations, case by case, best first. Where the batch is searched: those of
    each draft that no other of it beats in both latency and throughput."""

    @property
    def cases(self) -> list[CaseAnswer]:
        return [self, *self.other_cases]

    @property
    def offers(self) -> list[Candidate]:
        """The answer on each of several devices at the first context, within the limits: by cost
        where all have a price, else by tokens per second and device, the best first.
        """
        first: dict[str, Candidate] = {}
        for case in self.cases:
            if case.best.within_limits:
                first.setdefault(case.hardware, case.best)
        if len(first) < 2:
            return []
        costs = [row.cost.per_million_tokens_usd for row in first.values()]
        if None in costs:
            return sorted(first.values(), key=lambda row: -row.rate_per_gpu)
        return sorted(
            first.values(), key=lambda row: row.cost.per_million_tokens_usd or 0.0
        )

    @property
    def rows(self) -> list[Candidate]:
        return [*self.autoregressive_rows, *self.candidates]

    def __repr__(self) -> str:
        """The best configuration of each case, in a line."""
        lines = [f"Plan: {self.model}, engine {self.engine}"]
        for case in self.cases:
            best = case.best
            draft = draft_name(best.draft, best.draft_method, best.draft_budget)
            if best.is_speculative:
                gain = best.gain
                faster = f"{gain.speedup:.2f}x ({gain.low:.2f}-{gain.high:.2f}), {gain.verdict}"
                answer = f"{draft}, gamma {best.gamma}: {faster}"
            else:
                answer = "no draft"
            lines.append(
                f"  {case.hardware}, context {case.context_len}, batch {best.batch_size}: {answer}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A notebook's view: its answer."""
        from html import escape  # with a table of all entities

        return f"<pre>{escape(repr(self))}</pre>"

    def to_json(self) -> str:
        """The document as JSON, rows packed. Numbers are written as `load_plan` reads them: a whole
        number in a field of floats as 558.0, and predictions with six significant digits.
        """
        document = msgspec.convert(msgspec.to_builtins(self), Plan)
        return written(packed(msgspec.to_builtins(document)))

    def to_csv(self) -> str:
        """Autoregressive rows and candidates as one table with a header."""
        return rows_to_csv(map(columns, self.rows), [*COLUMNS, "verdict"])

    def to_frame(self) -> pd.DataFrame:
        """Autoregressive rows and candidates as a table, with the columns of `to_csv`."""
        import pandas as pd

        return pd.DataFrame([columns(row) for row in self.rows]).convert_dtypes()


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The server that a plan is exported for, as far as the plan does not hold it."""

    checkpoints: dict[str, str] = {}
    """The directory or repository to load for a name of a model or a draft; a name without one is
    written as it is.
    """
    architecture: str = ""
    """The model's; "": not known."""
    published_weights: str | None = None
    """Format of the checkpoint's weights; None: 16 bits."""
    longest_context: int | None = None
    """Tokens that the model reads; None: not known."""
    is_cpu: bool = False


UNKNOWN_SITE = Site()


def load_plan(path: Path) -> Plan:
    """Reads a plan document.

    Raises ConfigError where the file cannot be read, is no plan, one of another version, or
    damaged; the message names the file and the place.
    """
    return plan_of(read_json(path, "plan"), where=str(path))


def plan_of(document: Any, *, where: str = "the plan") -> Plan:
    """The plan of a document's values. Raises ConfigError naming `where`."""
    if not isinstance(document, dict) or document.get("kind") != "plan":
        raise ConfigError(f"{where} is no plan; {ADVICE}")
    version = document.get("schema_version")
    if version != PLAN_SCHEMA_VERSION:
        raise ConfigError(
            f"{where} is a plan of schema version {version}, this program reads "
            f"{PLAN_SCHEMA_VERSION}; {ADVICE}"
        )
    rows = unpacked(document, where=where)
    return converted(rows, Plan, where=f"{where} is not a whole plan")
