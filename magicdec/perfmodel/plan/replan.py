"""A plan's configuration as another engine would run it: the same draft, device, batch and context on its profile.

What is exported is what was priced: `for_engine` picks a candidate that the engine can run and predicts it anew there,
with a gamma table of that draft alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import AcceptanceProfile, default_profile_names
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.perfmodel.plan.planner import plan
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.plan_document import Candidate, Plan, Site
from magicdec.specs.catalog import load_model_spec, served_names
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.speculation import SPARSE_METHODS


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """A plan whose best is what the engine is to run, and why it is not the original's best, where it is not."""

    plan: Plan
    reason: str = ""
    site: Site


def for_engine(
    original: Plan,
    engine: str,
    *,
    number: int | None = None,
    acceptance: tuple[AcceptanceProfile, ...] = (),
    hardware: Path | None = None,
) -> Replanned:
    """`original`'s candidate `number` (from 1, as ranked), or the best that the engine can run, predicted on it.

    The gamma is the candidate's own on the engine that the plan was made for, the best one on another. Where no
    candidate can be run, or what can does not pay, the best is autoregressive decoding.

    Raises:
        ConfigError: no candidate of that number, a chosen one that the engine cannot run, or a device or acceptance
            that only the plan's maker has: give the profile again.
    """
    profile = load_engine(engine)
    chosen = _chosen(original, number)
    reason = ""
    if chosen.is_speculative and not _runs(profile, chosen):
        wanted = f"{chosen.draft}/{chosen.draft_method}"
        wanted += f" with pp {chosen.pp_size}" if chosen.pp_size > 1 else ""
        if number is not None:
            raise ConfigError(f"engine {engine} does not run {wanted}; choose a candidate with another draft")
        able = [row for row in _of_case(original) if row.fits and _runs(profile, row)]
        reason = f"{engine} does not run the plan's best draft, {wanted}"
        if not able:
            reason += ", nor another that it ranked"
        chosen = able[0] if able else original.autoregressive
    device = _device(original, chosen, hardware)
    again = plan(_request(original, chosen, engine, acceptance, device))
    best = again.best
    if chosen.is_speculative and again.candidates:
        same = [row for row in again.candidates if engine == original.engine and row.gamma == chosen.gamma]
        best = max(same or again.candidates, key=lambda row: row.speedup)
        if best.verdict == "does not pay":
            reason, best = _losing(best, reason), again.autoregressive
    return Replanned(plan=msgspec.structs.replace(again, best=best), reason=reason, site=_site(again, device))


def _site(again: Plan, device: HardwareProfile) -> Site:
    """The model goes by its name in the plan, which for a directory is not the argument."""
    asked = again.request.model
    names = served_names(asked, again.best.draft)
    return Site(
        checkpoints=names | ({again.model: names[asked]} if asked in names else {}),
        longest_context=load_model_spec(asked).longest_context,
        is_cpu=device.kind == "cpu",
    )


def _runs(profile: EngineProfile, row: Candidate) -> bool:
    return profile.runs(row.draft, row.draft_method) and profile.runs_staged(row.draft, row.draft_method, row.pp_size)


def _losing(row: Candidate, before: str) -> str:
    lost = (
        f"{row.draft}/{row.draft_method}, gamma {row.gamma}, is predicted at {row.speedup:.2f} times autoregressive "
        f"decoding ({row.speedup_low:.2f} to {row.speedup_high:.2f})"
    )
    return f"{before}; {lost}" if before else lost


def _of_case(original: Plan) -> list[Candidate]:
    best = original.best
    return [row for row in original.candidates if (row.hardware, row.context_len) == (best.hardware, best.context_len)]


def _chosen(original: Plan, number: int | None) -> Candidate:
    if number is None:
        return original.best
    if not 1 <= number <= len(original.candidates):
        raise ConfigError(f"the plan has candidates 1 to {len(original.candidates)}, not {number}")
    return original.candidates[number - 1]


def _device(original: Plan, row: Candidate, given: Path | None) -> HardwareProfile:
    """The candidate's device: its profile as given, or as the plan names it."""
    if given is not None:
        return load_hardware(given)
    for name in original.request.hardware:
        try:
            profile = load_hardware(name)
        except ConfigError:
            continue
        if profile.name == row.hardware:
            return profile
    raise ConfigError(f"the plan's device '{row.hardware}' is not in the catalog; give its profile with --hardware")


def _request(
    original: Plan,
    row: Candidate,
    engine: str,
    acceptance: tuple[AcceptanceProfile, ...],
    device: HardwareProfile,
) -> PlanRequest:
    """The one configuration's request. The draft's ranks are kept where the engine lets a draft have its own."""
    asked, formats = original.request, original.precision
    unknown = set(asked.acceptance) - {*default_profile_names(), *(each.name or each.source for each in acceptance)}
    if unknown and asked.acceptance_rate is None and row.is_speculative and not acceptance:
        raise ConfigError(f"the plan used the acceptance profile '{min(unknown)}'; give its file with --acceptance")
    drafts: dict[str, Any] = {}
    if row.is_speculative:
        drafts = {
            "draft_model": asked.draft_model, "draft_method": row.draft_method,
            "draft_weight_dtype": formats.draft_weight_dtype, "draft_kv_dtype": formats.draft_kv_dtype,
        }  # fmt: skip
        if row.draft_budget and row.draft_method in SPARSE_METHODS:
            drafts["draft_budgets"] = (row.draft_budget,)
        if not load_engine(engine).draft_on_all_ranks:
            drafts["draft_tp_size"] = row.draft_tp_size
    kept = ("model", "gen_len", "temperature", "top_k", "top_p", "acceptance_rate")
    return PlanRequest(
        **{name: getattr(asked, name) for name in kept},
        **drafts,
        hardware=(device,),
        engine=engine,
        tp_size=row.tp_size,
        pp_size=row.pp_size if row.pp_size > 1 else None,
        ep_size=row.ep_size if row.ep_size > 1 else None,
        dp_attention=row.dp_size > 1,
        batch_sizes=(row.batch_size,),
        context_lens=(row.context_len,),
        draft=row.draft,
        acceptance=acceptance,
        weight_dtype=formats.weight_dtype,
        kv_dtype=formats.kv_dtype,
    )
