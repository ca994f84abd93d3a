"""The planner's prediction of configurations that are to be measured, as records. No torch.

Predictions come from the same `plan` that users call, so what is validated is what they get.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from magicdec.calibrate.local_profile import LocalProfile
from magicdec.errors import ConfigError
from magicdec.measure.configuration import BenchmarkRequest, configuration_fields
from magicdec.perfmodel.plan.planner import Plan, PlanRequest, plan
from magicdec.perfmodel.plan.request import DEFAULT_MAX_GAMMA
from magicdec.plan_document import Candidate
from magicdec.records import Record, current_environment
from magicdec.specs.precision import PROFILE_DTYPES
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec

PREDICTED_FIELDS = (
    "autoregressive_step_s", "draft_step_s", "verify_step_s", "accept_step_s", "step_s", "expected_tokens_per_step",
    "tpot_s", "tokens_per_s", "speedup", "speedup_low", "speedup_high", "bound_by", "memory_bytes_per_gpu",
)  # fmt: skip
MEMORY_TERMS = ("autoregressive_step_s", "draft_step_s", "verify_step_s", "step_s")
SLOWER = 1.1
"""How much slower memory is for the second prediction, from which `memory_shares` follows."""


def plan_local(
    request: BenchmarkRequest,
    profile: LocalProfile,
    *,
    draft_budgets: tuple[int, ...] = (),
    method: str | None = None,
    draft_weight_dtype: str | None = None,
) -> Plan:
    """A plan for a measured configuration's model, batch and context on the calibrated machine."""
    dtype = PROFILE_DTYPES[request.dtype]
    return plan(
        PlanRequest(
            model=request.model,
            hardware=(profile.hardware,),
            engine=profile.engine,
            tp_size=1,
            batch_sizes=(request.batch_size,),
            context_lens=(request.context_len,),
            gen_len=request.gen_len,
            draft="self",
            draft_method=method,
            draft_budgets=draft_budgets,
            temperature=request.sampling.temperature,
            top_k=request.sampling.top_k,
            top_p=request.sampling.top_p,
            acceptance=profile.acceptance,
            weight_dtype=dtype,
            kv_dtype=dtype,
            draft_weight_dtype=draft_weight_dtype,
        )
    )


def predict_records(request: BenchmarkRequest, profile: LocalProfile) -> list[Record]:
    """One predicted record for each of the request's configurations, the autoregressive one first."""
    predicted: list[Record] = []
    hardware = profile.hardware
    slow_hardware = msgspec.structs.replace(hardware, memory_bytes_per_s=hardware.memory_bytes_per_s / SLOWER)
    slow_profile = replace(profile, hardware=slow_hardware)
    deepest = max((s.gamma for s in request.speculations), default=0)
    if deepest > DEFAULT_MAX_GAMMA:
        raise ConfigError(f"predictions reach gamma {DEFAULT_MAX_GAMMA}, not {deepest}; measure it with magicdec run")
    for method, weights in dict.fromkeys((s.draft_method, s.draft_weight_dtype) for s in request.speculations):
        chosen = [s for s in request.speculations if (s.draft_method, s.draft_weight_dtype) == (method, weights)]
        budgets = tuple(sorted({s.draft_budget for s in chosen if s.draft_budget is not None}))
        document = plan_local(request, profile, draft_budgets=budgets, method=method, draft_weight_dtype=weights)
        if not document.candidates:
            raise ConfigError(
                f"no acceptance of {method} on {request.model} is known; measure it with "
                f"`magicdec profile-acceptance --draft-method {method}`, saved next to the profile"
            )
        slower = plan_local(request, slow_profile, draft_budgets=budgets, method=method, draft_weight_dtype=weights)
        rows = {(row.draft_budget, row.gamma): row for row in document.candidates}
        slow_rows = {(row.draft_budget, row.gamma): row for row in slower.candidates}
        if not predicted:
            pair = document.autoregressive, slower.autoregressive
            predicted.append(_record(request, AUTOREGRESSIVE, *pair, profile))
        for s in chosen:
            key = s.draft_budget, s.gamma
            predicted.append(_record(request, s, rows[key], slow_rows[key], profile))
    return predicted


def _record(
    request: BenchmarkRequest, speculation: SpeculationSpec, row: Candidate, slow_row: Candidate, profile: LocalProfile
) -> Record:
    return Record(
        source="calibrated",
        hardware=profile.hardware.name,
        environment=current_environment(),
        **{**configuration_fields(request, speculation), "engine": profile.engine.name},
        **{name: getattr(row, name) for name in PREDICTED_FIELDS},
        memory_shares={
            name: (getattr(slow_row, name) / seconds - 1.0) / (SLOWER - 1.0)
            for name in MEMORY_TERMS
            if (seconds := getattr(row, name))
        },
        reference_s=profile.hardware.reference_s,
        compute_reference_s=profile.hardware.compute_reference_s,
        acceptance_by_position=_rates(request, speculation, profile),
    )


def _rates(request: BenchmarkRequest, speculation: SpeculationSpec, profile: LocalProfile) -> list[float] | None:
    """The acceptance profile's conditional rates at the configuration; None where no profile describes its method."""
    kind = speculation.draft, speculation.draft_method
    law = next((p for p in profile.acceptance if (p.draft, p.draft_method) == kind), None)
    if law is None or not speculation.gamma:
        return None
    rates = law.conditional_rates(
        budget=speculation.draft_budget, context=request.context_len, gamma_max=speculation.gamma
    )
    return [float(rate) for rate in rates]
