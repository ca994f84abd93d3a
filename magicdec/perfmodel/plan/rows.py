"""Candidates of a prediction: one row per point, built once from typed columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.uncertain import tokens_at
from magicdec.perfmodel.drafting import draft_of, draft_tp
from magicdec.perfmodel.intervals import Interval, chance_above, interval, tokens_error
from magicdec.perfmodel.kernels.op import BOUNDS
from magicdec.perfmodel.plan.choice import keeps_limits
from magicdec.perfmodel.plan.request import Case
from magicdec.perfmodel.serving import WholeRequests, whole_requests
from magicdec.perfmodel.setup import Setup, microbatch
from magicdec.perfmodel.speedup import BoolArray, Prediction
from magicdec.schema import (
    NO_DRAFT,
    PLUGIN,
    ByAcceptance,
    Candidate,
    Cost,
    Decoding,
    Drafting,
    Gain,
    Layout,
    Memory,
    Requests,
    StepTimes,
)
from magicdec.units import MEGA, SECONDS_PER_HOUR, format_tokens

MEASURED_RANGE = 1.05
"""A budget or context is taken as measured up to this factor beyond the first and last measured."""


@dataclass(frozen=True, kw_only=True)
class Users:
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


def requests_of(case: Case, prediction: Prediction) -> WholeRequests | None:
    """Whole requests at each point; None where the length of their output is not known."""
    lengths = case.lengths
    if not lengths.output_len:
        return None
    return whole_requests(
        prediction, prompts=lengths.prompts, output_len=lengths.output_len
    )


@dataclass(frozen=True, kw_only=True)
class Gains:
    """Speedups with the ends of their intervals, one of each per row."""

    speedup: list[float]
    low: list[float]
    high: list[float]
    pays: list[float]

    def at(self, place: int) -> Gain:
        return Gain(
            speedup=self.speedup[place],
            low=self.low[place],
            high=self.high[place],
            pays=self.pays[place],
        )


PERCENTILES = (0.1, 0.5, 0.9)
"""Percentiles of the acceptance for which gains are reported."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceColumns:
    """Gains by percentile of the acceptance, [percentiles, rows], and break-even tokens per
    step."""

    tokens: Array
    speedup: Array
    break_even: list[float]

    @classmethod
    def of(
        cls,
        prediction: Prediction,
        whole: WholeRequests | None,
        error: Array,
    ) -> AcceptanceColumns:
        expected = prediction.expected_tokens_per_step
        gamma = prediction.points.gamma
        tokens = []
        speedup = []
        for share in PERCENTILES:
            sigmas = NormalDist().inv_cdf(share)
            found = tokens_at(sigmas, prediction.middle_tokens_per_step, gamma, error)
            decoding = prediction.speedup * found / expected
            gain = decoding if whole is None else whole.speedup_at(decoding)
            tokens.append(prediction.full(found))
            speedup.append(prediction.full(gain))
        needed = least_decoding(whole) * expected / prediction.speedup
        return cls(
            tokens=np.stack(tokens),
            speedup=np.stack(speedup),
            break_even=_column(prediction, needed),
        )

    def at(self, place: int) -> ByAcceptance:
        return ByAcceptance(
            tokens_per_step=self.tokens[:, place].tolist(),
            speedup=self.speedup[:, place].tolist(),
        )


def least_decoding(whole: WholeRequests | None) -> Any:
    """The speedup of decoding from which on a draft pays."""
    return 1.0 if whole is None else whole.decoding_to_break_even


@dataclass(frozen=True, kw_only=True)
class RequestColumns:
    """Quantities of whole requests, one value per row."""

    ttft_s: list[float]
    tpot_s: list[float]
    request_s: list[float]
    gains: Gains
    prefill_share: list[float]
    output_tokens_per_s_per_gpu: list[float]

    @classmethod
    def of(
        cls,
        whole: WholeRequests,
        prediction: Prediction,
        bounds: Interval,
        pays: Array,
    ) -> RequestColumns:
        drafted = whole.drafted
        low, high = whole.speedup_bounds(bounds)

        def column(values: Any) -> list[float]:
            return _column(prediction, values)

        return cls(
            ttft_s=column(drafted.ttft_s),
            tpot_s=column(drafted.tpot_s),
            request_s=column(drafted.in_slot_s),
            gains=Gains(
                speedup=column(whole.speedup_at(prediction.speedup)),
                low=column(low),
                high=column(high),
                pays=column(pays),
            ),
            prefill_share=column(drafted.prefill_share),
            output_tokens_per_s_per_gpu=column(
                whole.output_tokens_per_s / prediction.num_gpus
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Quantities of a prediction in rows, one value per row."""

    batch_size: list[int]
    context_len: list[int]
    tp_size: list[int]
    ep_size: list[int]
    gamma: list[int]
    budget: list[float]
    draft_tp_size: list[float]
    tokens_per_step: list[float]
    break_even_gen_len: list[float]
    autoregressive_s: list[float]
    draft_s: list[float]
    verify_s: list[float]
    accept_s: list[float]
    upkeep_s: list[float]
    step_s: list[float]
    bound_by: list[str]
    tpot_s: list[float]
    tpot_low_s: list[float]
    tpot_high_s: list[float]
    ttft_s: list[float]
    tokens_per_s: list[float]
    gains: Gains
    bytes_per_gpu: list[float]
    fits: list[bool]
    is_within_limits: list[bool]
    requests: RequestColumns | None
    by_acceptance: AcceptanceColumns

    @classmethod
    def of(cls, case: Case, prediction: Prediction, error: Array) -> Columns:
        points = prediction.points
        users = Users.of(case, prediction)
        bounds = interval(prediction, error)
        pays = chance_above(prediction, error, least_decoding(users.whole))
        requests = None
        if users.whole is not None:
            requests = RequestColumns.of(users.whole, prediction, bounds, pays)

        def column(values: Any) -> list[Any]:
            return _column(prediction, values)

        return cls(
            batch_size=column(points.batch.astype(np.int64)),
            context_len=column(points.context.astype(np.int64)),
            tp_size=column(points.tp.astype(np.int64)),
            ep_size=column(
                np.asarray(prediction.setup.spread.ep_size(points.tp), dtype=np.int64)
            ),
            gamma=column(points.gamma),
            budget=column(0.0 if points.budget is None else points.budget),
            draft_tp_size=column(draft_tp(prediction.setup, points.tp)),
            tokens_per_step=column(prediction.expected_tokens_per_step),
            break_even_gen_len=column(prediction.break_even_gen_len),
            autoregressive_s=column(prediction.autoregressive_step_s),
            draft_s=column(prediction.draft_step_s),
            verify_s=column(prediction.verify_step_s),
            accept_s=column(prediction.accept_step_s),
            upkeep_s=column(prediction.upkeep_step_s),
            step_s=column(prediction.step_s),
            bound_by=column(_binding(prediction)),
            tpot_s=column(prediction.tpot_s),
            tpot_low_s=column(bounds.tpot_low_s),
            tpot_high_s=column(bounds.tpot_high_s),
            ttft_s=column(prediction.ttft_s),
            tokens_per_s=column(prediction.tokens_per_s),
            gains=Gains(
                speedup=column(prediction.speedup),
                low=column(bounds.speedup_low),
                high=column(bounds.speedup_high),
                pays=column(chance_above(prediction, error)),
            ),
            bytes_per_gpu=column(prediction.memory.total_bytes),
            fits=column(prediction.memory.fits),
            is_within_limits=column(users.is_within_limits),
            requests=requests,
            by_acceptance=AcceptanceColumns.of(prediction, users.whole, error),
        )


def _column(prediction: Prediction, values: Any) -> list[Any]:
    """A plain value per point of a prediction in rows."""
    every: list[Any] = prediction.full(np.asarray(values)).tolist()
    return every


def _binding(prediction: Prediction) -> Any:
    """The resource that binds most of each point's step."""
    seconds = prediction.terms.step_seconds("bound")
    stacked = np.stack([prediction.full(seconds[bound]) for bound in BOUNDS])
    return np.asarray(BOUNDS)[np.argmax(stacked, axis=0)]


def candidates(
    case: Case,
    prediction: Prediction,
    acceptance: AcceptanceProfile | None,
    *,
    baseline: float | None,
) -> list[Candidate]:
    """One candidate per point of a prediction in rows.

    `baseline`: tokens per second, over all devices, of autoregressive decoding at its best batch;
    None: there is none.
    """
    error = tokens_error(prediction, acceptance)
    builder = RowBuilder(
        case=case,
        setup=prediction.setup,
        acceptance=acceptance,
        baseline=baseline,
        columns=Columns.of(case, prediction, error),
    )
    return [builder.row(place) for place in range(len(builder.columns.gamma))]


@dataclass(frozen=True, kw_only=True)
class RowBuilder:
    """Builds the candidates of one draft (acceptance None: of autoregressive decoding)."""

    case: Case
    setup: Setup
    acceptance: AcceptanceProfile | None
    baseline: float | None
    columns: Columns

    def row(self, place: int) -> Candidate:
        columns = self.columns
        layout = self._layout(place)
        decoding = self._decoding(place, layout)
        requests = self._requests(place, layout)
        if requests is None:
            rate_per_gpu = decoding.tokens_per_s_per_gpu
        else:
            rate_per_gpu = requests.output_tokens_per_s_per_gpu
        over_best = None
        if self.baseline is not None:
            over_best = (
                rate_per_gpu * layout.num_gpus * layout.num_replicas / self.baseline
            )
        return Candidate(
            hardware=self.setup.hardware.name,
            batch_size=columns.batch_size[place],
            context_len=columns.context_len[place],
            layout=layout,
            drafting=self._drafting(place),
            step=self._step(place),
            decoding=decoding,
            requests=requests,
            memory=Memory(
                bytes_per_gpu=columns.bytes_per_gpu[place], fits=columns.fits[place]
            ),
            cost=self._cost(rate_per_gpu, is_of_requests=requests is not None),
            within_limits=columns.is_within_limits[place],
            by_acceptance=columns.by_acceptance.at(place)
            if self._is_drafted(place)
            else None,
            speedup_vs_best_autoregressive=over_best,
        )

    def _layout(self, place: int) -> Layout:
        spread = self.setup.spread
        hardware = self.setup.hardware
        tp_size = self.columns.tp_size[place]
        num_gpus = tp_size * spread.groups
        num_nodes = 1
        if hardware.kind == "gpu":
            num_nodes = -(-num_gpus // hardware.link.num_gpus_per_node)
        return Layout(
            tp_size=tp_size,
            pp_size=spread.pp,
            dp_size=spread.dp,
            ep_size=self.columns.ep_size[place],
            num_replicas=max(1, (self.case.request.num_gpus or num_gpus) // num_gpus),
            num_nodes=num_nodes,
        )

    def _is_drafted(self, place: int) -> bool:
        return self.acceptance is not None and self.columns.gamma[place] > 0

    def _drafting(self, place: int) -> Drafting:
        columns = self.columns
        acceptance = self.acceptance
        if acceptance is None or not self._is_drafted(place):
            return NO_DRAFT
        speculation = self.setup.speculation
        budget = int(columns.budget[place])
        context = columns.context_len[place]
        paid_back = columns.break_even_gen_len[place]
        even = columns.by_acceptance.break_even[place]
        seen = float(draft_of(self.setup).context_seen(context, budget))
        marks = reservations(self.setup, acceptance, seen)
        lengths = None
        if acceptance.replay is not None and acceptance.replay.setting.max_ngram:
            lengths = acceptance.replay.setting
        return Drafting(
            draft=speculation.draft,
            method=speculation.draft_method,
            budget=budget or None,
            budget_share=budget / context if budget else None,
            tp_size=int(columns.draft_tp_size[place]),
            gamma=columns.gamma[place],
            tokens_per_step=columns.tokens_per_step[place],
            break_even_tokens_per_step=even if math.isfinite(even) else None,
            break_even_gen_len=int(paid_back) if math.isfinite(paid_back) else None,
            acceptance_text=acceptance.dataset,
            acceptance_source=acceptance.source,
            checkpoint=self._checkpoint(acceptance),
            lookup_min=None if lengths is None else lengths.min_ngram,
            lookup_max=None if lengths is None else lengths.max_ngram,
            is_extrapolated=_is_extrapolated(
                acceptance, budget, seen, columns.gamma[place]
            ),
            needs_plugin=PLUGIN in marks,
            marks=marks,
        )

    def _checkpoint(self, acceptance: AcceptanceProfile) -> str:
        """The draft's weights as engines load them: of the head that was named, or published."""
        named = self.case.request.draft_model
        if named is None:
            return acceptance.checkpoint
        if named.endswith(".json"):
            return str(Path(named).parent)
        return named

    def _step(self, place: int) -> StepTimes:
        columns = self.columns
        gamma = columns.gamma[place]
        is_captured = self.setup.engine.graphs.is_captured(
            batch=int(microbatch(self.setup, columns.batch_size[place])),
            gamma=gamma,
            tp_size=columns.tp_size[place],
        )
        autoregressive_s = columns.autoregressive_s[place]
        if not self._is_drafted(place):
            return StepTimes(
                autoregressive_s=autoregressive_s,
                draft_s=0.0,
                verify_s=autoregressive_s,
                accept_s=0.0,
                upkeep_s=0.0,
                step_s=columns.step_s[place],
                bound_by=columns.bound_by[place],
                is_captured=is_captured,
            )
        return StepTimes(
            autoregressive_s=autoregressive_s,
            draft_s=columns.draft_s[place],
            verify_s=columns.verify_s[place],
            accept_s=columns.accept_s[place],
            upkeep_s=columns.upkeep_s[place],
            step_s=columns.step_s[place],
            bound_by=columns.bound_by[place],
            is_captured=is_captured,
        )

    def _decoding(self, place: int, layout: Layout) -> Decoding:
        columns = self.columns
        return Decoding(
            tpot_s=columns.tpot_s[place],
            tpot_low_s=columns.tpot_low_s[place],
            tpot_high_s=columns.tpot_high_s[place],
            ttft_s=columns.ttft_s[place],
            tokens_per_s=columns.tokens_per_s[place],
            tokens_per_s_per_gpu=columns.tokens_per_s[place] / layout.num_gpus,
            gain=columns.gains.at(place),
        )

    def _requests(self, place: int, layout: Layout) -> Requests | None:
        columns = self.columns.requests
        if columns is None:
            return None
        rate_per_gpu = columns.output_tokens_per_s_per_gpu[place]
        num_gpus = layout.num_gpus * layout.num_replicas
        return Requests(
            ttft_s=columns.ttft_s[place],
            tpot_s=columns.tpot_s[place],
            request_s=columns.request_s[place],
            gain=columns.gains.at(place),
            prefill_share=columns.prefill_share[place],
            output_tokens_per_s_per_gpu=rate_per_gpu,
            requests_per_s=num_gpus * rate_per_gpu / self.case.lengths.output_len,
        )

    def _cost(self, rate_per_gpu: float, *, is_of_requests: bool) -> Cost:
        """The cost of generated tokens at a rate per case."""
        price = self.setup.hardware.price_per_hour_usd
        if not price:
            usd_per_s = None
        else:
            usd_per_s = price / SECONDS_PER_HOUR
        per_token = None
        if usd_per_s is not None:
            per_token = usd_per_s / rate_per_gpu * MEGA
        if not is_of_requests:
            return Cost(per_million_tokens_usd=per_token)
        gpu_s = self.case.lengths.output_len / rate_per_gpu
        per_request = None
        if usd_per_s is not None:
            per_request = usd_per_s * gpu_s * MEGA
        return Cost(
            per_million_tokens_usd=per_token,
            gpu_hours_per_million_requests=gpu_s / SECONDS_PER_HOUR * MEGA,
            per_million_requests_usd=per_request,
        )


def reservations(
    setup: Setup, acceptance: AcceptanceProfile, context: float
) -> list[str]:
    """Reservations about a draft: no release of the engine runs it, no server was measured with it,
    its head was trained on shorter texts.
    """
    engine = setup.engine
    speculation = setup.speculation
    formats = setup.precision
    own = engine.draft(speculation.draft, speculation.draft_method)
    needs_plugin = bool(own.note)
    is_tested = engine.is_speculation_fitted(
        setup.hardware.name,
        formats.weight_dtype,
        formats.kv_dtype,
    )
    marks = []
    if needs_plugin:
        marks.append(PLUGIN)
    if needs_plugin or not is_tested:
        marks.append("untested")
    trained_len = acceptance.trained_len
    if trained_len is not None and context > trained_len * MEASURED_RANGE:
        marks.append(f"trained to {format_tokens(trained_len)}")
    return marks


def _is_extrapolated(
    acceptance: AcceptanceProfile,
    budget: float,
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


def _is_outside(value: float, measured: list[float]) -> bool:
    """Whether a value lies outside the measured ones; 0 and nothing measured do not."""
    if value <= 0 or not measured:
        return False
    lowest = min(measured) / MEASURED_RANGE
    highest = max(measured) * MEASURED_RANGE
    return not lowest <= value <= highest
