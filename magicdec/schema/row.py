"""One configuration of a plan with its prediction, in parts: layout, draft, a step's times, steady
decoding, whole requests, memory and cost.

Times are in seconds, sizes in bytes per device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from magicdec.counts import Z_90

Verdict = Literal["pays", "unclear", "does not pay"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[float, msgspec.Meta(ge=0)]
"""Not below 0; JSON has no NaN and no infinity."""
Positive = Annotated[float, msgspec.Meta(gt=0)]
PLUGIN = "--plugin"
"""Mark of a draft that no release of the engine runs."""
Gamma = Annotated[int, msgspec.Meta(ge=0, le=1024)]


SURELY = 0.9
"""Probability from which a draft is said to pay."""


def verdict_of(chance: float) -> Verdict:
    """Decide whether speculation pays at one load from the probability of a speedup above 1, by the one
    definition of all sentences, tables, figures and exports.

    It pays where that is 90 % or more as printed, in whole percents, and does not where it is 10 % or
    less; else it is unclear. Another batch may give more throughput: `speedup_vs_best_autoregressive`
    states that separately.
    """
    printed = round(chance, 2)
    if printed >= SURELY:
        return "pays"
    if printed <= round(1.0 - SURELY, 2):
        return "does not pay"
    return "unclear"


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """A speedup over autoregressive decoding at equal batch, with its 90 % interval. `speedup` is the
    median: more is as likely as less. Configurations are ranked by it."""

    speedup: Positive
    low: Number
    high: Number
    pays: Number | None = None
    """Probability that it is above 1, from all errors together; null: by the interval alone."""

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.probability)

    @property
    def probability(self) -> float:
        """Probability that the speedup is above 1; where it was not computed, by the log-normal
        whose interval this is.
        """
        if self.pays is not None:
            return self.pays
        if self.high <= self.low or self.low <= 0.0:
            return float(self.speedup > 1.0)
        deviation = math.log(self.high / self.low) / (2.0 * Z_90)
        return 0.5 * (
            1.0 + math.erf(math.log(self.speedup) / deviation / math.sqrt(2.0))
        )


NO_GAIN = Gain(speedup=1.0, low=1.0, high=1.0)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Spread of a replica over devices, and the number of replicas."""

    tp_size: Count
    pp_size: Count = 1
    """Stages of a pipeline."""
    dp_size: Count = 1
    """Groups of tp ranks that hold sequences of their own (data-parallel attention)."""
    ep_size: Count = 1
    """Ranks that whole experts are divided over; 1: each expert is cut by tp."""
    num_replicas: Count = 1
    num_nodes: Count = 1
    """Nodes of one replica."""

    @property
    def num_gpus(self) -> int:
        """Devices of one replica."""
        return self.tp_size * self.dp_size * self.pp_size

    @property
    def label(self) -> str:
        """Spread of one replica, for people: "tp 8 x pp 2"."""
        parts = [f"dp {self.dp_size}"] if self.dp_size > 1 else []
        if self.tp_size > 1 or self.dp_size == 1:
            parts.append(f"tp {self.tp_size}")
        if self.pp_size > 1:
            parts.append(f"pp {self.pp_size}")
        experts = f", ep {self.ep_size}" if self.ep_size > 1 else ""
        return " x ".join(parts) + experts


class Drafting(msgspec.Struct, frozen=True, kw_only=True):
    """The draft of a configuration, and its acceptance. Autoregressive: "none" and gamma 0."""

    draft: str = "none"
    """"self", "ngram", "eagle" (a trained head), the name of a draft model, or "none"."""
    method: str = "none"
    budget: Count | None = None
    """KV slots per sequence; null: the full cache."""
    budget_share: Positive | None = None
    """The budget as a share of the context."""
    tp_size: Count | None = None
    """Ranks that the draft was priced on."""
    gamma: Gamma = 0
    tokens_per_step: Positive = 1.0
    """Expected tokens of a sequence per step."""
    break_even_tokens_per_step: Number | None = None
    """Tokens per step with which it is as fast as without a draft; null: no number is enough."""
    break_even_gen_len: int | None = None
    """Generated tokens from which the draft's extra prefill is paid back; null: never."""
    acceptance_text: str = ""
    """Text that the acceptance was counted on; "": the source does not say."""
    acceptance_source: str = ""
    checkpoint: str = ""
    """Published weights of a draft head whose acceptance this is, where they are of this model."""
    lookup_min: Count | None = None
    """Shortest n-gram that an n-gram draft looks up, where its acceptance was replayed from logs.
    """
    lookup_max: Count | None = None
    """Longest n-gram that it looks up."""
    is_extrapolated: bool = False
    """Whether the budget, the context or gamma is outside what that source measured."""
    needs_plugin: bool = False
    """Whether no release of the engine runs the draft: it needs magicdec's plugin."""
    is_hypothetical: bool = False
    """Whether no such draft is known to be published for the model."""
    marks: list[str] = []
    """Reservations in a few words: "plugin", "trained to 2k"."""
    lane: str = ""
    """Kind of server, whose measurements set the width of the gain: "vllm from 0.14, trained head,
    dense, device measured"."""


NO_DRAFT = Drafting()


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one step, and what binds it."""

    autoregressive_s: Positive
    draft_s: Number
    """One draft step."""
    verify_s: Number
    accept_s: Number
    upkeep_s: Number
    step_s: Positive
    """The whole speculative step."""
    bound_by: str
    """Resource that binds most of the step: weights, kv, compute, link or overhead."""
    is_captured: bool = True
    """Whether the engine captures graphs of these passes as it is set by default; priced as if it
    did.
    """


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding in steady state, prefill left out."""

    tpot_s: Positive
    tpot_low_s: Number
    tpot_high_s: Number
    ttft_s: Number
    """Seconds to the first token of one request, the draft's prefill included."""
    tokens_per_s: Number
    """Rate of one replica."""
    tokens_per_s_per_gpu: Number
    gain: Gain
    speedup_static_batch: Number | None = None
    """Speedup of a batch that waits for its slowest sequence; for the chosen configuration, with a
    generated length.
    """


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Whole requests in steady state: one that ends is replaced, so that prefills of others come
    between a request's tokens.
    """

    ttft_s: Number
    tpot_s: Number
    request_s: Number
    """From its slot to the last token."""
    gain: Gain
    """Prefill included in both."""
    prefill_share: Number
    """Share of the devices' time."""
    output_tokens_per_s_per_gpu: Number
    requests_per_s: Number
    """Requests per second of all replicas."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory per device."""

    bytes_per_gpu: Number
    fits: bool


class TokenCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of generated tokens: prefill included where lengths are known, else of decoding alone.
    Null where no price, or no length, was given.
    """

    per_million_tokens_usd: Number | None = None
    gpu_hours_per_million_requests: Number | None = None
    per_million_requests_usd: Number | None = None


COLUMNS: dict[str, str] = {
    "hardware": "hardware",
    "draft": "drafting.draft",
    "draft_method": "drafting.method",
    "draft_budget": "drafting.budget",
    "draft_tp_size": "drafting.tp_size",
    "gamma": "drafting.gamma",
    "tp_size": "layout.tp_size",
    "num_replicas": "layout.num_replicas",
    "batch_size": "batch_size",
    "context_len": "context_len",
    "autoregressive_step_s": "step.autoregressive_s",
    "draft_step_s": "step.draft_s",
    "verify_step_s": "step.verify_s",
    "accept_step_s": "step.accept_s",
    "upkeep_step_s": "step.upkeep_s",
    "step_s": "step.step_s",
    "expected_tokens_per_step": "drafting.tokens_per_step",
    "tpot_s": "decoding.tpot_s",
    "tpot_low_s": "decoding.tpot_low_s",
    "tpot_high_s": "decoding.tpot_high_s",
    "ttft_s": "decoding.ttft_s",
    "tokens_per_s": "decoding.tokens_per_s",
    "tokens_per_s_per_gpu": "decoding.tokens_per_s_per_gpu",
    "speedup": "decoding.gain.speedup",
    "speedup_low": "decoding.gain.low",
    "speedup_high": "decoding.gain.high",
    "speedup_vs_best_autoregressive": "speedup_vs_best_autoregressive",
    "speedup_static_batch": "decoding.speedup_static_batch",
    "break_even_gen_len": "drafting.break_even_gen_len",
    "bound_by": "step.bound_by",
    "memory_bytes_per_gpu": "memory.bytes_per_gpu",
    "fits": "memory.fits",
    "within_limits": "within_limits",
    "cost_per_million_tokens_usd": "cost.per_million_tokens_usd",
    "pays_probability": "decoding.gain.pays",
    "break_even_tokens_per_step": "drafting.break_even_tokens_per_step",
    "acceptance_text": "drafting.acceptance_text",
    "acceptance_source": "drafting.acceptance_source",
    "draft_checkpoint": "drafting.checkpoint",
    "lookup_min": "drafting.lookup_min",
    "lookup_max": "drafting.lookup_max",
    "acceptance_extrapolated": "drafting.is_extrapolated",
    "marks": "drafting.marks",
    "is_captured": "step.is_captured",
    "request_ttft_s": "requests.ttft_s",
    "request_tpot_s": "requests.tpot_s",
    "request_s": "requests.request_s",
    "request_speedup": "requests.gain.speedup",
    "request_speedup_low": "requests.gain.low",
    "request_speedup_high": "requests.gain.high",
    "prefill_share": "requests.prefill_share",
    "output_tokens_per_s_per_gpu": "requests.output_tokens_per_s_per_gpu",
    "requests_per_s": "requests.requests_per_s",
    "gpu_hours_per_million_requests": "cost.gpu_hours_per_million_requests",
    "cost_per_million_requests_usd": "cost.per_million_requests_usd",
    "pp_size": "layout.pp_size",
    "dp_size": "layout.dp_size",
    "ep_size": "layout.ep_size",
    "num_nodes": "layout.num_nodes",
    "lane": "drafting.lane",
}
"""Columns of a table of candidates (CSV, pandas, records), each with its place in a candidate, whose
field says what it is.
"""

PLACES: Mapping[str, str] = COLUMNS | {
    "draft_budget_share": "drafting.budget_share",
    "needs_plugin": "drafting.needs_plugin",
    "is_hypothetical": "drafting.is_hypothetical",
    "request_pays_probability": "requests.gain.pays",
}
"""Every quantity that is predicted of a candidate, those without a column too."""

PATHS = {name: tuple(place.split(".")) for name, place in PLACES.items()}
"""Their places, by part: a plan of several devices puts half a million quantities there."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration with its prediction. Autoregressive: gamma 0, draft and method "none",
    speedup 1.
    """

    hardware: str
    batch_size: Count
    """Sequences of one replica, over all its groups and stages."""
    context_len: Count
    layout: Layout
    drafting: Drafting = NO_DRAFT
    step: StepTimes
    decoding: Decoding
    requests: RequestTimes | None = None
    """Whole requests, where the length of their output is known."""
    memory: Memory
    cost: TokenCost
    within_limits: bool
    speedup_vs_best_autoregressive: Number | None
    """`rate` over that of autoregressive decoding at its own best batch within the limits; null:
    none.
    """

    @property
    def draft(self) -> str:
        return self.drafting.draft

    @property
    def draft_method(self) -> str:
        return self.drafting.method

    @property
    def draft_budget(self) -> int | None:
        return self.drafting.budget

    @property
    def gamma(self) -> int:
        return self.drafting.gamma

    @property
    def tp_size(self) -> int:
        return self.layout.tp_size

    @property
    def num_replicas(self) -> int:
        return self.layout.num_replicas

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def step_s(self) -> float:
        return self.step.step_s

    @property
    def tpot_s(self) -> float:
        return self.decoding.tpot_s

    @property
    def ttft_s(self) -> float:
        return self.decoding.ttft_s

    @property
    def tokens_per_s(self) -> float:
        return self.decoding.tokens_per_s

    @property
    def speedup(self) -> float:
        return self.decoding.gain.speedup

    @property
    def speedup_low(self) -> float:
        return self.decoding.gain.low

    @property
    def speedup_high(self) -> float:
        return self.decoding.gain.high

    @property
    def num_gpus(self) -> int:
        """Devices of one replica."""
        return self.layout.num_gpus

    @property
    def is_speculative(self) -> bool:
        return self.gamma > 0

    @property
    def gain(self) -> Gain:
        """Speedup of whole requests where these are known, else of decoding."""
        if self.requests is None:
            return self.decoding.gain
        return self.requests.gain

    @property
    def gain_is_of(self) -> str:
        """Quantity of `gain` and `verdict`."""
        if self.requests is None:
            return "decoding"
        return "whole requests"

    @property
    def verdict(self) -> Verdict:
        return self.gain.verdict

    @property
    def rate_per_gpu(self) -> float:
        """Generated tokens per second and device in use, of whole requests where these are known,
        else of decoding.
        """
        if self.requests is None:
            return self.decoding.tokens_per_s_per_gpu
        return self.requests.output_tokens_per_s_per_gpu

    @property
    def rate(self) -> float:
        """Generated tokens per second of all replicas: what configurations of a case are ranked by,
        so that devices which a tp size leaves idle count.
        """
        return self.rate_per_gpu * self.num_gpus * self.num_replicas

    @property
    def between_tokens_s(self) -> float:
        """Time between tokens as users see it: with the prefills of others where requests are
        known.
        """
        if self.requests is None:
            return self.decoding.tpot_s
        return self.requests.tpot_s

    @property
    def first_token_s(self) -> float:
        """Time to the first token as users see it."""
        if self.requests is None:
            return self.decoding.ttft_s
        return self.requests.ttft_s


def same_configuration(row: Candidate, other: Candidate) -> bool:
    """Whether two rows run the same draft, gamma, layout and batch."""
    return configuration(row) == configuration(other)


def configuration(row: Candidate) -> tuple[object, ...]:
    """The draft, gamma, layout and batch of a row: what tells configurations of a case apart."""
    return (*at_any_gamma(row), row.gamma)


def at_any_gamma(row: Candidate) -> tuple[object, ...]:
    """A row's configuration but for its gamma."""
    draft = (row.draft, row.draft_method, row.draft_budget)
    layout = (
        row.layout.tp_size,
        row.layout.pp_size,
        row.layout.dp_size,
        row.layout.ep_size,
    )
    return (*draft, *layout, row.batch_size)


def column(row: Candidate, name: str) -> Any:
    """A column's value; None where the row has no such part. `verdict` is a column too."""
    if name == "verdict":
        return row.verdict
    value: Any = row
    for part in COLUMNS[name].split("."):
        value = getattr(value, part)
        if value is None:
            return None
    return value


def columns(row: Candidate) -> dict[str, Any]:
    """Every column of a candidate, the verdict last."""
    values = {name: column(row, name) for name in COLUMNS}
    return values | {"verdict": row.verdict}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate's document from its quantities by name. Those without a value, and parts without
    any, are left out.
    """
    document: dict[str, Any] = {}
    for name, (*parts, last) in PATHS.items():
        value = flat.get(name)
        if value is None:
            continue
        part = document
        for step in parts:
            part = part.setdefault(step, {})
        part[last] = value
    document.setdefault("cost", {})
    document.setdefault("speedup_vs_best_autoregressive", None)
    return document
