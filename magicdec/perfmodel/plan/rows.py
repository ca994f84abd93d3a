"""Candidates of a prediction: one row per point, part by part from columns."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeVar

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
from magicdec.schema.row import (
    NO_DRAFT,
    PLUGIN,
    ByAcceptance,
    Candidate,
    Decoding,
    Drafting,
    Gain,
    Layout,
    Memory,
    RequestTimes,
    StepTimes,
    TokenCost,
)
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
    """One candidate per point of a prediction in rows. `acceptance` None: nothing is drafted.

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
    drafting: Any = NO_DRAFT
    by_acceptance = None
    if acceptance is not None:
        drafting = rows.drafting()
        by_acceptance = rows.by_acceptance()
    requests = None
    if rows.whole is not None:
        requests = rows.request_times()
    return rows.parts(
        Candidate,
        hardware=rows.setup.hardware.name,
        batch_size=whole_numbers(rows.points.batch),
        context_len=whole_numbers(rows.points.context),
        layout=rows.layout(),
        drafting=drafting,
        step=rows.step_times(),
        decoding=rows.decoding(),
        requests=requests,
        memory=rows.memory(),
        cost=rows.cost(),
        within_limits=rows.is_within_limits,
        by_acceptance=by_acceptance,
        speedup_vs_best_autoregressive=rows.over_best_autoregressive,
    )


Part = TypeVar("Part", bound=msgspec.Struct)


class Rows(Users, frozen=True, kw_only=True, dict=True):
    """A prediction in rows: the parts of its candidates, and what several of their quantities are
    computed from."""

    acceptance: AcceptanceProfile | None
    baseline: float | None

    def column(self, values: Any) -> list[Any]:
        """A plain value per row."""
        if isinstance(values, list):
            return values
        if values is None or isinstance(values, str | msgspec.Struct):
            return [values] * self.prediction.points.shape[0]
        every: list[Any] = self.prediction.full(np.asarray(values)).tolist()
        return every

    def parts(self, part: type[Part], **quantities: Any) -> list[Part]:
        """A part of each row from its quantities: one value for all rows, an array or a list."""
        columns = map(self.column, quantities.values())
        return [
            part(**dict(zip(quantities, row, strict=True)))
            for row in zip(*columns, strict=True)
        ]

    def layout(self) -> list[Layout]:
        spread = self.setup.spread
        return self.parts(
            Layout,
            tp_size=whole_numbers(self.points.tp),
            pp_size=spread.pp,
            dp_size=spread.dp,
            ep_size=whole_numbers(spread.ep_size(self.points.tp)),
            num_replicas=whole_numbers(self.num_replicas),
            num_nodes=whole_numbers(self.num_nodes),
        )

    def drafting(self) -> list[Drafting]:
        speculation = self.setup.speculation
        lookup_min, lookup_max = self.law.lookup_lengths
        return self.parts(
            Drafting,
            draft=speculation.draft,
            method=speculation.draft_method,
            budget=self.budget,
            budget_share=self.budget_share,
            tp_size=whole_numbers(draft_tp(self.setup, self.points.tp)),
            gamma=self.points.gamma,
            tokens_per_step=self.prediction.expected_tokens_per_step,
            break_even_tokens_per_step=self.finite(self.tokens_to_break_even),
            break_even_gen_len=self.break_even_gen_len,
            acceptance_text=self.law.dataset,
            acceptance_source=self.source,
            checkpoint=self.checkpoint,
            lookup_min=lookup_min,
            lookup_max=lookup_max,
            is_extrapolated=self.is_extrapolated,
            needs_plugin=[PLUGIN in marks for marks in self.marks],
            is_hypothetical=self.is_hypothetical,
            marks=self.marks,
            lane=evidence_of(self.setup).lane,
        )

    def step_times(self) -> list[StepTimes]:
        prediction = self.prediction
        alone_s = prediction.autoregressive_step_s
        draft_s: Any = 0.0
        verify_s = alone_s
        accept_s: Any = 0.0
        upkeep_s: Any = 0.0
        if self.acceptance is not None:
            draft_s = prediction.draft_step_s
            verify_s = prediction.verify_step_s
            accept_s = prediction.accept_step_s
            upkeep_s = prediction.upkeep_step_s
        return self.parts(
            StepTimes,
            autoregressive_s=alone_s,
            draft_s=draft_s,
            verify_s=verify_s,
            accept_s=accept_s,
            upkeep_s=upkeep_s,
            step_s=prediction.step_s,
            bound_by=self.bound_by,
            is_captured=self.is_captured,
        )

    def decoding(self) -> list[Decoding]:
        prediction = self.prediction
        return self.parts(
            Decoding,
            tpot_s=prediction.tpot_s,
            tpot_low_s=self.bounds.tpot_low_s,
            tpot_high_s=self.bounds.tpot_high_s,
            ttft_s=prediction.ttft_s,
            tokens_per_s=prediction.tokens_per_s,
            tokens_per_s_per_gpu=prediction.tokens_per_s / prediction.num_gpus,
            gain=self.gain(prediction.speedup, self.gains),
        )

    def request_times(self) -> list[RequestTimes]:
        requests = self.requests
        drafted = requests.drafted
        speedup = requests.speedup_at(self.prediction.speedup)
        return self.parts(
            RequestTimes,
            ttft_s=drafted.ttft_s,
            tpot_s=drafted.tpot_s,
            request_s=drafted.in_slot_s,
            gain=self.gain(speedup, requests.gains(self.gains)),
            prefill_share=drafted.prefill_share,
            output_tokens_per_s_per_gpu=self.rate_per_gpu,
            requests_per_s=self.requests_per_s,
        )

    def gain(self, speedup: Array, gains: Gains) -> list[Gain]:
        quantiles = gains.quantiles()
        quartiles = None
        if self.acceptance is not None:
            quartiles = self.lists(list(quantiles[QUARTILES]))
        return self.parts(
            Gain,
            speedup=speedup,
            low=quantiles[0],
            high=quantiles[-1],
            pays=gains.above(),
            quartiles=quartiles,
        )

    def memory(self) -> list[Memory]:
        memory = self.prediction.memory
        return self.parts(Memory, bytes_per_gpu=memory.total_bytes, fits=memory.fits)

    def cost(self) -> list[TokenCost]:
        gpu_hours = None
        if self.whole is not None:
            gpu_hours = self.gpu_s_per_request / SECONDS_PER_HOUR * MEGA
        return self.parts(
            TokenCost,
            per_million_tokens_usd=self.usd_per_million_tokens,
            gpu_hours_per_million_requests=gpu_hours,
            per_million_requests_usd=self.usd_per_million_requests,
        )

    def by_acceptance(self) -> list[ByAcceptance]:
        return self.parts(
            ByAcceptance,
            tokens_per_step=self.lists(self.tokens_by_acceptance),
            speedup=self.lists(self.gain_by_acceptance),
        )

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

    @property
    def requests_per_s(self) -> Array:
        num_gpus = self.prediction.num_gpus * self.num_replicas
        return num_gpus * self.rate_per_gpu / self.case.lengths.output_len

    @property
    def gpu_s_per_request(self) -> Array:
        return self.case.lengths.output_len / self.rate_per_gpu

    @property
    def usd_per_million_requests(self) -> Any:
        if self.whole is None or self.usd_per_gpu_s is None:
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
    draft = engine.draft(speculation.draft, speculation.draft_method)
    needs_plugin = bool(draft.note)
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
