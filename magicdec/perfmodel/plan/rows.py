"""Candidates of a prediction: one row per point, part by part from columns."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.drafting import draft_of, draft_tp
from magicdec.perfmodel.intervals import (
    Gains,
    Interval,
    cost_place,
    interval,
    tokens_error,
)
from magicdec.perfmodel.kernels.op import BOUNDS
from magicdec.perfmodel.lanes import evidence_of
from magicdec.perfmodel.plan.request import Case
from magicdec.perfmodel.plan.standing import published_head
from magicdec.perfmodel.serving import WholeRequests, whole_requests
from magicdec.perfmodel.setup import Points, Setup, budgets_of, microbatch
from magicdec.perfmodel.speedup import BoolArray, Prediction
from magicdec.schema.row import (
    NO_DRAFT,
    NO_GAIN,
    PLUGIN,
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
from magicdec.specs.heads import is_named
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
    )
    over_best = None
    if baseline is not None:
        of_replica = rows.rate_per_gpu * prediction.num_gpus
        over_best = of_replica * rows.num_replicas / baseline
    drafting: Any = NO_DRAFT
    if acceptance is not None:
        drafting = rows.drafting(acceptance)
    requests = None
    if rows.whole is not None:
        requests = rows.request_times(rows.whole)
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
        speedup_vs_best_autoregressive=over_best,
    )


Part = TypeVar("Part", bound=msgspec.Struct)


class Rows(Users, frozen=True, kw_only=True, dict=True):
    """A prediction in rows: each part of its candidates, with what its quantities are computed from."""

    acceptance: AcceptanceProfile | None

    def column(self, values: Any) -> list[Any]:
        """A plain value per row."""
        if isinstance(values, list):
            return values
        if values is None or isinstance(values, str | msgspec.Struct):
            return [values] * self.prediction.points.shape[0]
        every: list[Any] = self.prediction.full(np.asarray(values)).tolist()
        return every

    def finite(self, values: Any) -> list[float | None]:
        """None instead of infinity, which JSON does not have."""
        column = self.column(values)
        return [value if math.isfinite(value) else None for value in column]

    def parts(self, part: type[Part], **quantities: Any) -> list[Part]:
        """A part of each row from its quantities: one value for all rows, an array or a list."""
        columns = map(self.column, quantities.values())
        return [
            part(**dict(zip(quantities, row, strict=True)))
            for row in zip(*columns, strict=True)
        ]

    @property
    def setup(self) -> Setup:
        return self.prediction.setup

    @property
    def points(self) -> Points:
        return self.prediction.points

    @property
    def num_replicas(self) -> Array:
        replica = self.prediction.num_gpus
        given = self.case.request.num_gpus or replica
        return np.maximum(1.0, given // replica)

    @cached_property
    def error(self) -> Array:
        """Relative error of the tokens per step."""
        return tokens_error(self.prediction, self.acceptance)

    @cached_property
    def bounds(self) -> Interval:
        """Intervals of decoding's predictions."""
        return interval(self.prediction, self.error)

    def layout(self) -> list[Layout]:
        spread = self.setup.spread
        hardware = self.setup.hardware
        num_nodes: Any = 1
        if hardware.kind == "gpu":
            num_nodes = np.ceil(
                self.prediction.num_gpus / hardware.link.num_gpus_per_node
            )
        return self.parts(
            Layout,
            tp_size=whole_numbers(self.points.tp),
            pp_size=spread.pp,
            dp_size=spread.dp,
            ep_size=whole_numbers(spread.ep_size(self.points.tp)),
            num_replicas=whole_numbers(self.num_replicas),
            num_nodes=whole_numbers(num_nodes),
        )

    def drafting(self, law: AcceptanceProfile) -> list[Drafting]:
        """The draft of each row, with its acceptance."""
        setup = self.setup
        speculation = setup.speculation
        draft = speculation.draft
        method = speculation.draft_method
        needs_plugin = bool(setup.engine.draft(draft, method).note)
        is_hypothetical = self.case.is_hypothetical(draft, method)
        trained_len = law.trained_len or math.inf
        source = str(law.source)
        measured = setup.engine.errors.cost_place
        if measured and measured == cost_place(setup):
            source = f"{source}; {COST_MEASURED}"
        # the context at which its acceptance is that of a draft with its whole cache
        context_seen = self.column(
            draft_of(setup).context_seen(
                np.floor(self.points.context), self.points.budget
            )
        )
        budgets = budgets_of(self.column(self.points.budget))
        contexts = self.column(whole_numbers(self.points.context))
        gammas = self.column(self.points.gamma)
        shares = []
        is_extrapolated = []
        marks = []
        for budget, context, seen, gamma in zip(
            budgets, contexts, context_seen, gammas, strict=True
        ):
            shares.append(None if budget is None else budget / context)
            is_extrapolated.append(_is_extrapolated(law, budget, seen, gamma))
            of_row = []
            if needs_plugin:
                of_row.append(PLUGIN)
            if seen > trained_len * MEASURED_RANGE:
                of_row.append(f"trained to {format_tokens(trained_len)}")
            if is_extrapolated[-1]:
                of_row.append("extrapolated")
            if is_hypothetical:
                of_row.append("none known")
            marks.append(of_row)
        # the speedup of decoding from which on a draft pays
        least: Any = 1.0
        if self.whole is not None:
            least = self.whole.decoding_to_break_even
        tokens = self.prediction.expected_tokens_per_step
        paid_back = self.finite(self.prediction.break_even_gen_len)
        lookup_min, lookup_max = law.lookup_lengths
        return self.parts(
            Drafting,
            draft=draft,
            method=method,
            budget=budgets,
            budget_share=shares,
            tp_size=whole_numbers(draft_tp(setup, self.points.tp)),
            gamma=self.points.gamma,
            tokens_per_step=tokens,
            break_even_tokens_per_step=self.finite(
                least * tokens / self.prediction.speedup
            ),
            break_even_gen_len=[
                None if length is None else int(length) for length in paid_back
            ],
            acceptance_text=law.dataset,
            acceptance_source=source,
            checkpoint=self.checkpoint(law),
            lookup_min=lookup_min,
            lookup_max=lookup_max,
            is_extrapolated=is_extrapolated,
            needs_plugin=needs_plugin,
            is_hypothetical=is_hypothetical,
            marks=marks,
            lane=evidence_of(setup).lane,
        )

    def checkpoint(self, law: AcceptanceProfile) -> str:
        """The draft's weights as engines load them: of the head that was named, or published."""
        request = self.case.request
        named = request.draft_model
        if named is None and is_named(request.draft_name or ""):
            named = request.draft_name
        if named is None:
            if law.checkpoint or not law.is_assumed:
                return law.checkpoint
            return published_head(self.case.model, self.setup.speculation.draft_method)
        if named.endswith(".json"):
            return str(Path(named).parent)
        return named

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
        # the resource that binds most of each step
        seconds = prediction.terms.step_seconds("bound")
        by_bound = np.stack([prediction.full(seconds[bound]) for bound in BOUNDS])
        graphs = self.setup.engine.graphs
        is_captured = []
        for batch, gamma, tp_size in zip(
            self.column(microbatch(self.setup, self.points.batch)),
            self.column(self.points.gamma),
            self.column(self.points.tp),
            strict=True,
        ):
            is_captured.append(
                graphs.is_captured(batch=int(batch), gamma=gamma, tp_size=int(tp_size))
            )
        return self.parts(
            StepTimes,
            autoregressive_s=alone_s,
            draft_s=draft_s,
            verify_s=verify_s,
            accept_s=accept_s,
            upkeep_s=upkeep_s,
            step_s=prediction.step_s,
            bound_by=np.asarray(BOUNDS)[np.argmax(by_bound, axis=0)],
            is_captured=is_captured,
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
            gain=self.gain(prediction.speedup, self.bounds.gains),
        )

    def request_times(self, requests: WholeRequests) -> list[RequestTimes]:
        drafted = requests.drafted
        speedup = requests.speedup_at(self.prediction.speedup)
        num_gpus = self.prediction.num_gpus * self.num_replicas
        return self.parts(
            RequestTimes,
            ttft_s=drafted.ttft_s,
            tpot_s=drafted.tpot_s,
            request_s=drafted.in_slot_s,
            gain=self.gain(speedup, requests.gains(self.bounds.gains)),
            prefill_share=drafted.prefill_share,
            output_tokens_per_s_per_gpu=self.rate_per_gpu,
            requests_per_s=num_gpus * self.rate_per_gpu / self.case.lengths.output_len,
        )

    def gain(self, speedup: Array, gains: Gains) -> list[Gain]:
        if self.acceptance is None:
            return self.column(NO_GAIN)
        low, high = gains.quantiles()
        return self.parts(
            Gain,
            speedup=speedup,
            low=low,
            high=high,
            pays=gains.above(),
        )

    def memory(self) -> list[Memory]:
        memory = self.prediction.memory
        return self.parts(Memory, bytes_per_gpu=memory.total_bytes, fits=memory.fits)

    def cost(self) -> list[TokenCost]:
        price = self.setup.hardware.price_per_hour_usd
        per_gpu_s = price / SECONDS_PER_HOUR if price else None
        per_tokens = None
        if per_gpu_s is not None:
            per_tokens = per_gpu_s / self.rate_per_gpu * MEGA
        gpu_hours = None
        per_requests = None
        if self.whole is not None:
            gpu_s_per_request = self.case.lengths.output_len / self.rate_per_gpu
            gpu_hours = gpu_s_per_request / SECONDS_PER_HOUR * MEGA
            if per_gpu_s is not None:
                per_requests = per_gpu_s * gpu_s_per_request * MEGA
        return self.parts(
            TokenCost,
            per_million_tokens_usd=per_tokens,
            gpu_hours_per_million_requests=gpu_hours,
            per_million_requests_usd=per_requests,
        )


def whole_numbers(values: Any) -> Any:
    return np.asarray(values).astype(np.int64)


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
