"""A plan's configuration predicted anew: on another engine (`for_engine`), or with one input moved
(`sensitivity`).

`for_engine` picks a candidate that the engine can run and predicts it anew there, with a gamma
table of that draft alone, so an export is what was priced.

elasticity   d ln S / d ln x, by a central difference of ± 10 %: 0.5 means 10 % more of x gives 5 %
more speedup
swing        half the change of ln S when x moves by ± its own stated standard deviation: what x's uncertainty costs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import AcceptanceProfile, default_profile_names
from magicdec.perfmodel.acceptance.law import MOST_CONTEXT_EXPONENT
from magicdec.perfmodel.intervals import one_token_pass, relative_errors
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.plan.standing import (
    AskedDraft,
    is_known_in_stages,
    standing,
)
from magicdec.perfmodel.planner import answered, make_plan
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.schema.plan import Plan, Site
from magicdec.schema.row import Candidate
from magicdec.specs.catalog import load_model_spec, served_checkpoint
from magicdec.specs.engine import load_engine
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import load_head


class Replanned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan whose best configuration the engine can run, and the reason if it differs from the
    original's best."""

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
    """Predicts a candidate of `original` on an engine: candidate `number` (from 1, as ranked), or
    the best one that the engine can run.

    On the engine that the plan was made for, gamma is the candidate's own. On another engine it is
    the best gamma there. If the engine can run no candidate, or the one it can run does not pay,
    the best is autoregressive decoding.

    Raises:
        ConfigError: no candidate has that number; the engine cannot run the chosen one; or only the
            plan's maker has the device or acceptance profile, which has to be given again.
    """
    is_same_engine = engine == original.engine
    engine = _of_version(original, engine)
    wanted = _chosen(original, number)
    against = _against(original, wanted, engine)
    if number is None and is_same_engine and not against:
        return Replanned(
            plan=original, site=_site(original, _device(original, wanted, hardware))
        )
    chosen = wanted
    reasons = []
    if against:
        if number is not None:
            raise ConfigError(f"{against}; choose a candidate with another draft")
        chosen, why = _instead(original, wanted, engine)
        reasons.append(why)
    device = _device(original, chosen, hardware)
    again = make_plan(_request(original, chosen, engine, acceptance, device))
    choice = again.choice
    if number is not None and is_same_engine:
        ranked = (row for row in again.candidates if row.gamma == chosen.gamma)
        choice = again.choosing(next(ranked, again.autoregressive))
    if choice.is_speculative and choice.row.gain.speedup <= 1.0:
        reasons.append(_lost(choice.row))
        choice = again.choosing(again.autoregressive)
    elif chosen.is_speculative and choice.left_out is not None:
        reasons.append(_lost(choice.left_out))
    return Replanned(
        plan=msgspec.structs.replace(again, choice=choice),
        reason="; ".join(reasons),
        site=_site(again, device),
    )


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a plan as a setup that can be priced anew."""

    setup: Setup
    acceptance: AcceptanceProfile
    points: Points

    def tokens_at(self, gamma: int) -> float:
        """Planned tokens per step at a gamma."""
        at = replace(self.points, gamma=gamma)
        return predict(self.setup, self.acceptance, at).expected_tokens_per_step.item()


def priced(
    original: Plan,
    engine: str,
    *,
    acceptance: tuple[AcceptanceProfile, ...] = (),
    hardware: Path | None = None,
) -> Priced:
    """The plan's choice on an engine. Raises ConfigError where it drafts nothing, or only the plan's
    maker has its device or acceptance."""
    row = original.best
    if not row.is_speculative:
        raise ConfigError(
            "the plan's choice drafts nothing, so there is no cost to check"
        )
    device = _device(original, row, hardware)
    engine = _of_version(original, engine)
    request = _request(original, row, engine, acceptance, device)
    request = msgspec.structs.replace(request, gamma=row.gamma)
    model = request.model
    if isinstance(model, str):
        model = load_model_spec(model)
    answer = answered(request, model, [])[0][0]
    options = [found.option for found in answer.searched if found.option is not None]
    if not options:
        raise ConfigError(f"no acceptance of {_draft_of(row)} is known")
    option = options[0]
    return Priced(
        setup=answer.case.setup(option),
        acceptance=option.acceptance,
        points=Points(
            batch=row.batch_size,
            context=row.context_len,
            tp=float(row.tp_size),
            budget=row.draft_budget,
            gamma=row.gamma,
            gen_len=float(original.request.gen_len),
        ),
    )


def _of_version(original: Plan, engine: str) -> str:
    """The engine in the version that the plan was made for."""
    asked = original.request.engine or ""
    return asked if asked.startswith(f"{engine}@") else engine


def _against(original: Plan, row: Candidate, engine: str) -> str:
    """Why an engine cannot be started with a candidate's draft; "" where nothing is known to."""
    if not row.is_speculative:
        return ""
    profile = load_engine(engine)
    draft_tp_size = row.drafting.tp_size
    if profile.paths.draft_on_all_ranks:
        draft_tp_size = None  # it is priced anew on all of them
    head = None
    if original.request.draft_model is not None:
        head = load_head(Path(original.request.draft_model))
    found = standing(
        AskedDraft(
            draft=row.draft,
            method=row.draft_method,
            checkpoint=row.drafting.checkpoint,
            head=head,
            gamma=row.gamma,
            tp_size=row.tp_size,
            draft_tp_size=draft_tp_size,
            pp_size=row.layout.pp_size,
            exists=original.request.acceptance_rate is not None
            or original.request.accept_length is not None,
            is_measured=bool(original.request.acceptance),
        ),
        load_model_spec(original.request.model),
        profile,
    )
    if found.answer in ("not published", "cannot start"):
        return found.sentence
    return ""


def _draft_of(row: Candidate) -> str:
    name = f"{row.draft}/{row.draft_method}"
    if row.layout.pp_size > 1:
        name += f" with pp {row.layout.pp_size}"
    return name


def _instead(original: Plan, wanted: Candidate, engine: str) -> tuple[Candidate, str]:
    """The best ranked candidate that the engine runs, else autoregressive decoding; and the reason
    why it replaces the wanted one."""
    best = original.best
    reason = f"{engine} does not run the plan's best draft, {_draft_of(wanted)}"
    profile = load_engine(engine)
    draft = (wanted.draft, wanted.draft_method)
    model = load_model_spec(original.request.model)
    staged = is_known_in_stages(profile, *draft, model, wanted.layout.pp_size)
    if profile.runs(*draft) and staged:
        reason = _against(original, wanted, engine)
    for row in original.candidates:
        is_same_case = (row.hardware, row.context_len) == (
            best.hardware,
            best.context_len,
        )
        if is_same_case and row.fits and not _against(original, row, engine):
            return row, reason
    return original.autoregressive, f"{reason}, nor another that it ranked"


def _lost(row: Candidate) -> str:
    """The reason why a draft that the engine runs is not exported."""
    name = f"{row.draft}/{row.draft_method}, gamma {row.gamma}"
    if not row.fits:
        return f"{name}, does not fit in memory there"
    gain = row.gain
    return (
        f"{name}, is predicted at {gain.speedup:.2f} times autoregressive decoding "
        f"({gain.low:.2f} to {gain.high:.2f})"
    )


def _site(again: Plan, device: HardwareProfile) -> Site:
    """The model goes by its name in the plan, which for a directory is not the argument."""
    asked = again.request.model
    is_cpu = device.kind == "cpu"
    named = {asked: asked, again.model: asked, again.best.draft: again.best.draft}
    served = {name: served_checkpoint(model) for name, model in named.items()}
    model = load_model_spec(asked)
    published = model.quantization
    return Site(
        checkpoints={
            name: known for name, known in served.items() if known is not None
        },
        architecture=model.architecture,
        published_weights=None if published is None else published.weight_dtype,
        longest_context=model.longest_context,
        is_cpu=is_cpu,
    )


def _chosen(original: Plan, number: int | None) -> Candidate:
    if number is None:
        return original.best
    if not 1 <= number <= len(original.candidates):
        raise ConfigError(
            f"the plan has candidates 1 to {len(original.candidates)}, not {number}"
        )
    return original.candidates[number - 1]


def _device(original: Plan, row: Candidate, given: Path | None) -> HardwareProfile:
    """The profile of the candidate's device: the given one, or the catalog's."""
    if given is not None:
        return load_hardware(given)
    for name in original.request.hardware:
        try:
            profile = load_hardware(name)
        except ConfigError:
            continue
        if profile.name == row.hardware:
            return profile
    raise ConfigError(
        f"the plan's device '{row.hardware}' is not in the catalog; give its profile with "
        "--hardware"
    )


def _request(
    original: Plan,
    row: Candidate,
    engine: str,
    acceptance: tuple[AcceptanceProfile, ...],
    device: HardwareProfile,
) -> PlanRequest:
    """The request of this one configuration. The draft keeps its ranks on engines that allow a
    draft its own."""
    asked = original.request
    gives = asked.acceptance_rate is not None or asked.accept_length is not None
    formats = original.precision
    if row.is_speculative and not acceptance and not gives:
        unknown = set(asked.acceptance) - set(default_profile_names())
        if unknown:
            raise ConfigError(
                f"the plan used the acceptance profile '{min(unknown)}'; give its file with "
                "--acceptance"
            )
    return PlanRequest(
        model=asked.model,
        gen_len=asked.gen_len,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        acceptance_rate=asked.acceptance_rate,
        accept_length=asked.accept_length,
        drafted_share=asked.drafted_share,
        **_draft_options(original, row, engine),
        hardware=(device,),
        engine=engine,
        tp_size=row.tp_size,
        pp_size=row.layout.pp_size if row.layout.pp_size > 1 else None,
        ep_size=row.layout.ep_size if row.layout.ep_size > 1 else None,
        dp_attention=row.layout.dp_size > 1,
        batch_sizes=(row.batch_size,),
        context_lens=(row.context_len,),
        draft=row.draft,
        acceptance=acceptance,
        weight_dtype=formats.weight_dtype,
        kv_dtype=formats.kv_dtype,
    )


def _draft_options(original: Plan, row: Candidate, engine: str) -> dict[str, Any]:
    if not row.is_speculative:
        return {}
    options: dict[str, Any] = {
        "draft_model": original.request.draft_model,
        "draft_name": original.request.draft_name,
        "draft_method": row.draft_method,
        "draft_weight_dtype": original.precision.draft_weight_dtype,
        "draft_kv_dtype": original.precision.draft_kv_dtype,
    }
    if row.draft_budget is not None:
        options["draft_budgets"] = (row.draft_budget,)
    if not load_engine(engine).paths.draft_on_all_ranks:
        options["draft_tp_size"] = row.drafting.tp_size
    return options


SENSITIVITY_SCHEMA_VERSION = 1
STEP = 0.1
State = tuple[Setup, AcceptanceProfile]
ENGINE_INPUTS = {
    "kernels.gemm_factor": ("time of linear layers", "gemm"),
    "kernels.attention_factor": ("time of attention", "attention"),
    "kernels.draft_attention_factor": ("time of the draft's attention", "attention"),
    "kernels.verify_attention_factor": (
        "time of the verification's attention",
        "attention",
    ),
    "kernels.elementwise_factor": ("time of elementwise kernels", "elementwise"),
    "kernels.collective_factor": ("time of collectives", "link"),
    "overheads.forward_overhead_s": ("overhead per forward pass", "overhead"),
    "overheads.layer_overhead_s": ("overhead per layer", "overhead"),
    "overheads.draft_step_overhead_s": ("overhead per draft step", "overhead"),
    "overheads.draft_block_overhead_s": ("overhead per block of drafts", "overhead"),
    "overheads.verify_overhead_s": ("overhead per verification", "overhead"),
    "overheads.step_overhead_s": ("overhead per speculative step", "overhead"),
}
"""Fields of the engine profile: what each is, and whose relative error it carries."""
LAW_INPUTS = {
    "rejection": "rejection rate at position 1",
    "drift": "drift of acceptance by position",
    "concentration": "concentration of acceptance",
    "budget_exponent": "exponent of the budget",
    "context_exponent": "exponent of the context",
}
CALIBRATE = "time its kernels on the device (magicdec calibrate)"
PROFILE = "count acceptance on your prompts (magicdec profile-acceptance)"


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """One input's effect. `sigma` (relative) and `swing` are None where no uncertainty is
    stated."""

    name: str
    elasticity: float
    sigma: float | None
    swing: float | None
    measure: str


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """The best drafted configuration, and the inputs: those whose uncertainty costs most first."""

    schema_version: int = SENSITIVITY_SCHEMA_VERSION
    kind: str = "sensitivity"
    configuration: Candidate
    speedup: float
    inputs: tuple[Input, ...]

    @property
    def measure_next(self) -> str:
        stated = [each for each in self.inputs if each.swing]
        if stated:
            return f"{stated[0].name}: {stated[0].measure}"
        return ""

    def to_document(self) -> dict[str, Any]:
        """Plain data."""
        return {**msgspec.to_builtins(self), "measure_next": self.measure_next}


def sensitivity(request: PlanRequest) -> Sensitivity:
    """Vary each input of the best drafted configuration.

    Raises ConfigError where no draft can be predicted, and what `plan` raises.
    """
    if request.workload is not None:
        raise ConfigError("sensitivity takes a context, not a workload")
    if isinstance(request.model, ModelSpec):
        model = request.model
    else:
        model = load_model_spec(request.model)
    first = answered(request, model, [])[0][0]
    if not first.drafted:
        raise ConfigError(
            "no draft of this request has an acceptance: give --acceptance-rate or --acceptance"
        )
    best = first.drafted[0]
    row = first.searched.prediction(best)
    option = first.searched.origin(best).option
    assert option is not None  # a draft's row
    points = row.points

    def log_speedup(state: State) -> float:
        setup, acceptance = state
        return math.log(float(np.ravel(predict(setup, acceptance, points).speedup)[0]))

    found = []
    for name, scaled, sigma, measure in _inputs(row.setup, option.acceptance):
        rise = log_speedup(scaled(1.0 + STEP)) - log_speedup(scaled(1.0 - STEP))
        swing = None
        if sigma is not None:
            more, less = scaled(math.exp(sigma)), scaled(math.exp(-sigma))
            swing = abs(log_speedup(more) - log_speedup(less)) / 2.0
        found.append(
            Input(
                name=name,
                elasticity=rise / (math.log(1.0 + STEP) - math.log(1.0 - STEP)),
                sigma=sigma,
                swing=swing,
                measure=measure,
            )
        )
    found.sort(key=lambda each: (each.swing or 0.0, abs(each.elasticity)), reverse=True)
    speedup = math.exp(log_speedup((row.setup, option.acceptance)))
    return Sensitivity(configuration=best, speedup=speedup, inputs=tuple(found))


def _inputs(
    setup: Setup, acceptance: AcceptanceProfile
) -> Iterator[tuple[str, Callable[[float], State], float | None, str]]:
    """Name of each input that is not 0, the state in which it is so many times as large, its
    relative standard deviation, and how to measure it."""

    def of_device(factor: float, field: str) -> State:
        value = getattr(setup.hardware, field)
        if isinstance(value, dict):
            scaled = {key: each * factor for key, each in value.items()}
        else:
            scaled = value * factor
        hardware = msgspec.structs.replace(setup.hardware, **{field: scaled})
        return replace(setup, hardware=hardware), acceptance

    def of_engine(factor: float, field: str) -> State:
        scaled = setup.engine.constant(field) * factor
        return replace(
            setup, engine=setup.engine.with_constants({field: scaled})
        ), acceptance

    def of_law(factor: float, field: str) -> State:
        scaled = getattr(acceptance.law, field) * factor
        if field == "context_exponent":
            scaled = min(scaled, MOST_CONTEXT_EXPONENT)
        law = msgspec.structs.replace(acceptance.law, **{field: scaled})
        return setup, msgspec.structs.replace(acceptance, law=law)

    for name, field in (
        ("memory bandwidth", "memory_bytes_per_s"),
        ("compute rate", "flops_per_s"),
    ):
        yield name, partial(of_device, field=field), None, CALIBRATE
    errors = relative_errors(one_token_pass(setup), setup.hardware, setup.engine)
    for field, (name, group) in ENGINE_INPUTS.items():
        if setup.engine.constant(field):
            yield name, partial(of_engine, field=field), errors[group], CALIBRATE
    for field, name in LAW_INPUTS.items():
        value = getattr(acceptance.law, field)
        if not value:
            continue
        if field == "rejection":
            sigma = acceptance.error.log_rejection
        else:
            sigma = getattr(acceptance.error, field, 0.0) / abs(value)
        yield name, partial(of_law, field=field), sigma or None, PROFILE
