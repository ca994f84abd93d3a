"""An observation with what no metrics tell (device, engine's profile, draft, sampling), as a situation to advise on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from magicdec.errors import ConfigError
from magicdec.live.advice import Situation
from magicdec.live.observation import Observation
from magicdec.live.profile import MIN_DRAFTS, acceptance_profile
from magicdec.live.observation import Draft
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.drafts import check_profiles
from magicdec.perfmodel.setup import Setup, precision_of
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import engine_names, load_engine
from magicdec.specs.hardware import load_hardware
from magicdec.specs.speculation import OWN_METHOD, SELF, SamplingSpec, SpeculationSpec


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server as its user describes it. Formats that are None are those of a plan; an engine that is None is the one
    that the server's metrics name, else ours."""

    model: str
    hardware: str
    engine: str | None = None
    tp_size: int = 1
    temperature: float = 1.0
    weight_dtype: str | None = None
    kv_dtype: str | None = None

    def setup(self, draft: Draft | None, serving_engine: str = "") -> Setup:
        """The server as it is predicted; `draft` None: without one.

        Raises ConfigError for a name that is not known, or a draft of another vocabulary.
        """
        model, hardware = load_model_spec(self.model), load_hardware(self.hardware)
        engine = self.engine or (serving_engine if serving_engine in engine_names() else "ours")
        setup = Setup(
            model=model,
            hardware=hardware,
            engine=load_engine(engine),
            sampling=SamplingSpec(temperature=self.temperature),
            precision=precision_of(model, hardware, weight_dtype=self.weight_dtype, kv_dtype=self.kv_dtype),
        )
        if draft is None:
            return setup
        return dataclasses.replace(
            setup,
            speculation=SpeculationSpec(
                draft=draft.name, draft_method=draft.method, draft_budget=draft.budget, gamma=1
            ),
            draft_model=None if draft.name in (SELF, *OWN_METHOD) else load_model_spec(draft.name),
        )


def situation_of(
    observation: Observation,
    draft: Draft,
    serving: Serving,
    *,
    acceptance: AcceptanceProfile | None = None,
    context: float | None = None,
    batch: float | None = None,
) -> Situation:
    """The observed load with the observed acceptance, or with a given one where none was observed. `context` and
    `batch` replace what was observed.

    Raises ConfigError where the batch or the sequences' length is not known, or there is no acceptance at all.
    """
    length, batch = context or observation.context_len, batch or observation.batch_size
    if not length or not batch:
        raise ConfigError("no advice without a load: this window does not show a running batch, or sequences' length")
    drafted = observation.is_speculative and (observation.counts.drafts or 0.0) >= MIN_DRAFTS
    if drafted:
        acceptance = acceptance_profile(observation, draft, model=serving.model, context=context)
    elif acceptance is None:
        raise ConfigError(
            "no advice without acceptance, and this server verified no drafts: give a profile with --acceptance, or "
            "let it draft for a while"
        )
    else:
        check_profiles([acceptance], draft=draft.name, method=draft.method)
    share = observation.drafted_share if draft.may_be_absent and drafted else None
    return Situation(
        setup=serving.setup(draft, observation.target.series.engine),
        acceptance=acceptance,
        batch_size=batch,
        context_len=length,
        gamma=(observation.gamma or 0) if drafted else 0,
        tp_size=serving.tp_size,
        drafted_share=1.0 if share is None else min(share, 1.0),
    )
