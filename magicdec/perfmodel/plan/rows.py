"""Candidates of a prediction: one row per point, built once from typed columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.drafting import draft_of, draft_tp
from magicdec.perfmodel.intervals import (
    QUARTILES,
    Gains,
    Interval,
    cost_place,
    drawn_tokens,
    interval,
    tokens_error,
)
from magicdec.perfmodel.kernels.op import BOUNDS
from magicdec.perfmodel.lanes import evidence_of
from magicdec.perfmodel.plan.request import Case
from magicdec.perfmodel.plan.standing import is_named, published_head
from magicdec.perfmodel.serving import WholeRequests, whole_requests
from magicdec.perfmodel.setup import Points, Setup, budgets_of, microbatch
from magicdec.perfmodel.speedup import BoolArray, Prediction
from magicdec.schema import PLUGIN, Candidate, nested
from magicdec.units import MEGA, SECONDS_PER_HOUR, format_tokens

MEASURED_RANGE = 1.05
"""A budget or context is taken as measured up to this factor beyond the first and last measured."""

COST_MEASURED = "cost measured (yours)"


class Users(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies and rates that users see and limits bear on: of whole requests where their lengths
    are known.
    """

    case: Case
    prediction: Prediction
    whole: WholeRequests | None

    @classmethod
    def of(cls, case: Case, prediction: Prediction) -> Users:
        return cls(
            case=case, prediction=prediction, whole=requests_of(case, prediction)
        )

    @property
    def between_s(self) -> Array:
        if self.whole is None:
            return self.prediction.tpot_s
        return self.whole.drafted.tpot_s

    @property
    def first_s(self) -> Array:
        if self.whole is None:
            return self.prediction.ttft_s
        return self.whole.drafted.ttft_s

    @property
    def rate_per_gpu(self) -> Array:
        if self.whole is None:
            return self.prediction.tokens_per_s / self.prediction.num_gpus
        return self.whole.output_tokens_per_s / self.prediction.num_gpus

    @property
    def is_within_limits(self) -> BoolArray:
        request = self.case.request
        return keeps_limits(
            self.between_s,
            self.first_s,
            tpot_limit_s=request.tpot_limit_s,
            ttft_limit_s=request.ttft_limit_s,
        )


def keeps_limits(
    between_tokens_s: Any,
    first_token_s: Any,
    *,
    tpot_limit_s: float | None,
    ttft_limit_s: float | None,
) -> BoolArray:
    """Whether times keep the limits on latency; arrays broadcast."""
    kept = np.ones((), dtype=np.bool_)
    if tpot_limit_s is not None:
        kept = kept & (np.asarray(between_tokens_s) <= tpot_limit_s)
    if ttft_limit_s is not None:
        kept = kept & (np.asarray(first_token_s) <= ttft_limit_s)
    return kept


def requests_of(case: Case, prediction: Prediction) -> WholeRequests | None:
    """Whole requests at each point; None where the length of their output is not known."""
    lengths = case.lengths
    if not lengths.output_len:
        return None
    return whole_requests(
        prediction, prompts=lengths.prompts, output_len=lengths.output_len
    )


def least_decoding(whole: WholeRequests | None) -> Any:
    """The speedup of decoding from which on a draft pays."""
    return 1.0 if whole is None else whole.decoding_to_break_even


def candidates(
    case: Case,
    prediction: Prediction,
    acceptance: AcceptanceProfile | None,
    *,
    baseline: float | None,
) -> list[Candidate]:
    """One candidate per point of a prediction in rows, by the tables at the end of this file.
    `acceptance` None: nothing is drafted.

    `baseline`: tokens per second, over all devices, of autoregressive decoding at its best batch;
    None: there is none.
    """
    rows = Rows(
        case=case,
        prediction=prediction,
        whole=requests_of(case, prediction),
        acceptance=acceptance,
        baseline=baseline,
    )
    tables = [OF_ALL]
    if rows.whole is not None:
        tables.append(OF_REQUESTS)
    if acceptance is not None:
        tables.append(OF_DRAFTS)
    columns: dict[str, list[Any]] = {}
    for table in tables:
        for name, value in table.items():
            columns[name] = rows.column(value(rows))
    documents = []
    for row in zip(*columns.values(), strict=True):
        documents.append(nested(dict(zip(columns, row, strict=True))))
    return msgspec.convert(documents, list[Candidate])


class Rows(Users, frozen=True, kw_only=True, dict=True):
    """A prediction in rows, and what several quantities of its candidates are computed from."""

    acceptance: AcceptanceProfile | None
    baseline: float | None

    def column(self, values: Any) -> list[Any]:
        """A plain value per row."""
        if isinstance(values, list):
            return values
        every: list[Any] = self.prediction.full(np.asarray(values)).tolist()
        return every

    @property
    def setup(self) -> Setup:
        return self.prediction.setup

    @property
    def points(self) -> Points:
        return self.prediction.points

    @cached_property
    def error(self) -> Array:
        """Relative error of the tokens per step."""
        return tokens_error(self.prediction, self.acceptance)

    @cached_property
    def bounds(self) -> Interval:
        """Intervals of decoding's predictions."""
        return interval(self.prediction, self.error)

    @property
    def gains(self) -> Gains:
        """The distribution of decoding's speedup."""
        return self.bounds.gains

    @cached_property
    def quantiles(self) -> Array:
        """Quantiles of decoding's speedup, [LEVELS, rows]."""
        return self.gains.quantiles()

    # How it runs
    @property
    def num_replicas(self) -> Array:
        replica = self.prediction.num_gpus
        given = self.case.request.num_gpus or replica
        return np.maximum(1.0, given // replica)

    @property
    def source(self) -> str:
        """Where the acceptance comes from, and the cost where its user measured it."""
        measured = self.setup.engine.errors.cost_place
        if measured and measured == cost_place(self.setup):
            return f"{self.law.source}; {COST_MEASURED}"
        return str(self.law.source)

    @property
    def num_nodes(self) -> Any:
        """Nodes of one replica."""
        hardware = self.setup.hardware
        if hardware.kind != "gpu":
            return 1
        return np.ceil(self.prediction.num_gpus / hardware.link.num_gpus_per_node)

    @property
    def is_captured(self) -> list[bool]:
        graphs = self.setup.engine.graphs
        batches = self.column(microbatch(self.setup, self.points.batch))
        gammas = self.column(self.points.gamma)
        tp_sizes = self.column(self.points.tp)
        captured = []
        for batch, gamma, tp_size in zip(batches, gammas, tp_sizes, strict=True):
            captured.append(
                graphs.is_captured(batch=int(batch), gamma=gamma, tp_size=int(tp_size))
            )
        return captured

    @property
    def bound_by(self) -> Any:
        """The resource that binds most of each step."""
        seconds = self.prediction.terms.step_seconds("bound")
        stacked = np.stack([self.prediction.full(seconds[bound]) for bound in BOUNDS])
        return np.asarray(BOUNDS)[np.argmax(stacked, axis=0)]

    # What it gives and costs
    @property
    def over_best_autoregressive(self) -> Any:
        if self.baseline is None:
            return None
        of_replica = self.rate_per_gpu * self.prediction.num_gpus
        return of_replica * self.num_replicas / self.baseline

    @property
    def usd_per_gpu_s(self) -> float | None:
        price = self.setup.hardware.price_per_hour_usd
        return price / SECONDS_PER_HOUR if price else None

    @property
    def usd_per_million_tokens(self) -> Any:
        if self.usd_per_gpu_s is None:
            return None
        return self.usd_per_gpu_s / self.rate_per_gpu * MEGA

    # Whole requests
    @property
    def requests(self) -> WholeRequests:
        assert self.whole is not None  # asked only where they are known
        return self.whole

    @cached_property
    def request_gains(self) -> Gains:
        return self.requests.gains(self.gains)

    @cached_property
    def request_quantiles(self) -> Array:
        """Quantiles of whole requests' speedup, [LEVELS, rows]."""
        return self.request_gains.quantiles()

    @property
    def request_quartiles(self) -> list[list[float]] | None:
        if self.whole is None:
            return None
        return self.lists(list(self.request_quantiles[QUARTILES]))

    @property
    def requests_per_s(self) -> Array:
        num_gpus = self.prediction.num_gpus * self.num_replicas
        return num_gpus * self.rate_per_gpu / self.case.lengths.output_len

    @property
    def gpu_s_per_request(self) -> Array:
        return self.case.lengths.output_len / self.rate_per_gpu

    @property
    def usd_per_million_requests(self) -> Any:
        if self.usd_per_gpu_s is None:
            return None
        return self.usd_per_gpu_s * self.gpu_s_per_request * MEGA

    # The draft
    @property
    def law(self) -> AcceptanceProfile:
        assert self.acceptance is not None  # asked only where something is drafted
        return self.acceptance

    @property
    def budget(self) -> list[int | None]:
        return budgets_of(self.column(self.points.budget))

    @property
    def budget_share(self) -> list[float | None]:
        """The budget as a share of the context."""
        shares: list[float | None] = []
        for budget, context in zip(
            self.budget, self.column(whole_numbers(self.points.context)), strict=True
        ):
            shares.append(None if budget is None else budget / context)
        return shares

    @cached_property
    def context_seen(self) -> list[float]:
        """Context at which the draft's acceptance is that of one with its whole cache."""
        context = np.floor(self.points.context)
        draft = draft_of(self.setup)
        return self.column(draft.context_seen(context, self.points.budget))

    @property
    def checkpoint(self) -> str:
        """The draft's weights as engines load them: of the head that was named, or published."""
        request = self.case.request
        named = request.draft_model
        if named is None and is_named(request.draft_name or ""):
            named = request.draft_name
        if named is None:
            if self.law.checkpoint or not self.law.is_assumed:
                return self.law.checkpoint
            return published_head(self.case.model, self.setup.speculation.draft_method)
        if named.endswith(".json"):
            return str(Path(named).parent)
        return named

    @property
    def is_hypothetical(self) -> bool:
        """Whether the draft would have to be trained first."""
        speculation = self.setup.speculation
        return self.case.is_hypothetical(speculation.draft, speculation.draft_method)

    @property
    def lookup(self) -> tuple[int | None, int | None]:
        """Shortest and longest n-gram that is looked up, where that was replayed from logs."""
        return self.law.lookup_lengths

    @property
    def is_extrapolated(self) -> list[bool]:
        gammas = self.column(self.points.gamma)
        outside = []
        for budget, seen, gamma in zip(
            self.budget, self.context_seen, gammas, strict=True
        ):
            outside.append(_is_extrapolated(self.law, budget, seen, gamma))
        return outside

    @cached_property
    def marks(self) -> list[list[str]]:
        marks = [reservations(self.setup, self.law, seen) for seen in self.context_seen]
        if self.is_hypothetical:
            return [[*of_row, "to train"] for of_row in marks]
        return marks

    @property
    def tokens_to_break_even(self) -> Any:
        expected = self.prediction.expected_tokens_per_step
        return least_decoding(self.whole) * expected / self.prediction.speedup

    @property
    def break_even_gen_len(self) -> list[int | None]:
        lengths = self.finite(self.prediction.break_even_gen_len)
        return [None if length is None else int(length) for length in lengths]

    @cached_property
    def tokens_by_acceptance(self) -> list[Array]:
        """Tokens per step at each of PERCENTILES."""
        sigmas = np.array([NormalDist().inv_cdf(share) for share in PERCENTILES])
        return list(drawn_tokens(self.prediction, sigmas, self.error))

    @property
    def gain_by_acceptance(self) -> list[Array]:
        gains = []
        for tokens in self.tokens_by_acceptance:
            expected = self.prediction.expected_tokens_per_step
            decoding = self.prediction.speedup * tokens / expected
            if self.whole is None:
                gains.append(decoding)
            else:
                gains.append(self.whole.speedup_at(decoding))
        return gains

    def finite(self, values: Any) -> list[float | None]:
        """None instead of infinity, which JSON does not have."""
        column = self.column(values)
        return [value if math.isfinite(value) else None for value in column]

    def lists(self, values: list[Array]) -> list[list[float]]:
        """Several values per row."""
        columns = [self.column(value) for value in values]
        return [list(row) for row in zip(*columns, strict=True)]


PERCENTILES = (0.1, 0.5, 0.9)
"""Percentiles of the acceptance for which gains are reported."""


def whole_numbers(values: Any) -> Any:
    return np.asarray(values).astype(np.int64)


def reservations(
    setup: Setup, acceptance: AcceptanceProfile, context: float
) -> list[str]:
    """Reservations about a draft: no release of the engine runs it, or its head was trained on
    shorter texts."""
    engine = setup.engine
    speculation = setup.speculation
    own = engine.draft(speculation.draft, speculation.draft_method)
    needs_plugin = bool(own.note)
    marks = []
    if needs_plugin:
        marks.append(PLUGIN)
    trained_len = acceptance.trained_len
    if trained_len is not None and context > trained_len * MEASURED_RANGE:
        marks.append(f"trained to {format_tokens(trained_len)}")
    return marks


def _is_extrapolated(
    acceptance: AcceptanceProfile,
    budget: int | None,
    context: float,
    gamma: int,
) -> bool:
    """Whether a profile is used outside the budgets or contexts that it was measured at, or for
    longer blocks.
    """
    if acceptance.measured_gamma is not None and gamma > acceptance.measured_gamma:
        return True
    if _is_outside(budget, acceptance.measured_budgets):
        return True
    return _is_outside(context, acceptance.measured_contexts)


def _is_outside(value: float | None, measured: list[float]) -> bool:
    """Whether a value lies outside the measured ones; a whole cache and an empty context do not."""
    if not value or not measured:
        return False
    lowest = min(measured) / MEASURED_RANGE
    highest = max(measured) * MEASURED_RANGE
    return not lowest <= value <= highest


Value = Callable[[Rows], Any]

OF_ALL: Mapping[str, Value] = {
    "hardware": lambda rows: rows.setup.hardware.name,
    "batch_size": lambda rows: whole_numbers(rows.points.batch),
    "context_len": lambda rows: whole_numbers(rows.points.context),
    "tp_size": lambda rows: whole_numbers(rows.points.tp),
    "pp_size": lambda rows: rows.setup.spread.pp,
    "dp_size": lambda rows: rows.setup.spread.dp,
    "ep_size": lambda rows: whole_numbers(rows.setup.spread.ep_size(rows.points.tp)),
    "num_replicas": lambda rows: whole_numbers(rows.num_replicas),
    "num_nodes": lambda rows: whole_numbers(rows.num_nodes),
    "autoregressive_step_s": lambda rows: rows.prediction.autoregressive_step_s,
    "draft_step_s": lambda rows: 0.0,
    "verify_step_s": lambda rows: rows.prediction.autoregressive_step_s,
    "accept_step_s": lambda rows: 0.0,
    "upkeep_step_s": lambda rows: 0.0,
    "step_s": lambda rows: rows.prediction.step_s,
    "bound_by": lambda rows: rows.bound_by,
    "is_captured": lambda rows: rows.is_captured,
    "tpot_s": lambda rows: rows.prediction.tpot_s,
    "tpot_low_s": lambda rows: rows.bounds.tpot_low_s,
    "tpot_high_s": lambda rows: rows.bounds.tpot_high_s,
    "ttft_s": lambda rows: rows.prediction.ttft_s,
    "tokens_per_s": lambda rows: rows.prediction.tokens_per_s,
    "tokens_per_s_per_gpu": lambda rows: (
        rows.prediction.tokens_per_s / rows.prediction.num_gpus
    ),
    "speedup": lambda rows: rows.prediction.speedup,
    "speedup_low": lambda rows: rows.quantiles[0],
    "speedup_high": lambda rows: rows.quantiles[-1],
    "pays_probability": lambda rows: rows.gains.above(),
    "memory_bytes_per_gpu": lambda rows: rows.prediction.memory.total_bytes,
    "fits": lambda rows: rows.prediction.memory.fits,
    "within_limits": lambda rows: rows.is_within_limits,
    "cost_per_million_tokens_usd": lambda rows: rows.usd_per_million_tokens,
    "speedup_vs_best_autoregressive": lambda rows: rows.over_best_autoregressive,
}
"""Value of each quantity of candidates (schema/row.py has their places), by name."""

OF_REQUESTS: Mapping[str, Value] = {
    "request_ttft_s": lambda rows: rows.requests.drafted.ttft_s,
    "request_tpot_s": lambda rows: rows.requests.drafted.tpot_s,
    "request_s": lambda rows: rows.requests.drafted.in_slot_s,
    "request_speedup": lambda rows: rows.requests.speedup_at(rows.prediction.speedup),
    "request_speedup_low": lambda rows: rows.request_quantiles[0],
    "request_speedup_high": lambda rows: rows.request_quantiles[-1],
    "request_pays_probability": lambda rows: rows.request_gains.above(),
    "prefill_share": lambda rows: rows.requests.drafted.prefill_share,
    "output_tokens_per_s_per_gpu": lambda rows: rows.rate_per_gpu,
    "requests_per_s": lambda rows: rows.requests_per_s,
    "gpu_hours_per_million_requests": lambda rows: (
        rows.gpu_s_per_request / SECONDS_PER_HOUR * MEGA
    ),
    "cost_per_million_requests_usd": lambda rows: rows.usd_per_million_requests,
}
"""Where the length of outputs is known."""

OF_DRAFTS: Mapping[str, Value] = {
    "draft": lambda rows: rows.setup.speculation.draft,
    "draft_method": lambda rows: rows.setup.speculation.draft_method,
    "draft_budget": lambda rows: rows.budget,
    "draft_budget_share": lambda rows: rows.budget_share,
    "draft_tp_size": lambda rows: whole_numbers(draft_tp(rows.setup, rows.points.tp)),
    "gamma": lambda rows: rows.points.gamma,
    "draft_step_s": lambda rows: rows.prediction.draft_step_s,
    "verify_step_s": lambda rows: rows.prediction.verify_step_s,
    "accept_step_s": lambda rows: rows.prediction.accept_step_s,
    "upkeep_step_s": lambda rows: rows.prediction.upkeep_step_s,
    "expected_tokens_per_step": lambda rows: rows.prediction.expected_tokens_per_step,
    "break_even_tokens_per_step": lambda rows: rows.finite(rows.tokens_to_break_even),
    "break_even_gen_len": lambda rows: rows.break_even_gen_len,
    "tokens_by_acceptance": lambda rows: rows.lists(rows.tokens_by_acceptance),
    "speedup_by_acceptance": lambda rows: rows.lists(rows.gain_by_acceptance),
    "acceptance_text": lambda rows: rows.law.dataset,
    "acceptance_source": lambda rows: rows.source,
    "speedup_quartiles": lambda rows: rows.lists(list(rows.quantiles[QUARTILES])),
    "request_speedup_quartiles": lambda rows: rows.request_quartiles,
    "lane": lambda rows: evidence_of(rows.setup).lane,
    "draft_checkpoint": lambda rows: rows.checkpoint,
    "lookup_min": lambda rows: rows.lookup[0],
    "lookup_max": lambda rows: rows.lookup[1],
    "acceptance_extrapolated": lambda rows: rows.is_extrapolated,
    "marks": lambda rows: rows.marks,
    "needs_plugin": lambda rows: [PLUGIN in marks for marks in rows.marks],
    "is_hypothetical": lambda rows: rows.is_hypothetical,
}
"""Where something is drafted."""
