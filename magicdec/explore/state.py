"""The controls of the page as one value: read from a link's query string, and turned into a request to the planner."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal
from urllib.parse import parse_qsl, urlencode

from magicdec.errors import ConfigError, unknown_choice
from magicdec.perfmodel.acceptance import AcceptanceProfile, load_profile
from magicdec.perfmodel.plan.planner import PlanRequest
from magicdec.specs.catalog import load_model_spec, model_names
from magicdec.specs.engine import EngineProfile, engine_names, load_engine
from magicdec.specs.hardware import HardwareProfile, hardware_names, load_hardware
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import OWN_METHOD, SPARSE_METHODS
from magicdec.units import GIGA, MILLI

METHODS = (*SPARSE_METHODS, "full", *OWN_METHOD)
MAX_DRAFT_PARAMETERS = 4 * GIGA
MAX_DIGITS = 12
FORMATS = {"weight_dtype": ("bf16", "fp8", "int8", "int4", "fp32"), "kv_dtype": ("bf16", "fp8", "int4", "fp32")}
EXAMPLES = {
    "whole": "a whole number like 64",
    "share": "a number from 0 to 1, like 0.8",
    "milliseconds": "a number of milliseconds like 30",
    "dollars": "a number of dollars like 2.5",
}


@dataclass(frozen=True, kw_only=True)
class Control:
    """One control: its label, how it is read, and what it may be left empty for."""

    label: str
    kind: Literal["choice", "whole", "share", "milliseconds", "dollars"]
    empty: str = ""
    """What an empty control means; "" where it must be filled."""
    hint: str = ""


CONTROLS: dict[str, Control] = {
    "model": Control(label="Model", kind="choice"),
    "hardware": Control(label="Hardware", kind="choice"),
    "engine": Control(label="Engine", kind="choice", empty="the device's"),
    "tp": Control(label="Tensor parallel", kind="whole", empty="the whole node", hint="ranks; empty: the whole node"),
    "batch": Control(label="Batch", kind="whole", hint="sequences"),
    "context": Control(label="Context", kind="whole", hint="tokens of the prompt"),
    "gen_len": Control(
        label="Output", kind="whole", empty="decoding alone", hint="tokens of a request; empty: decoding alone"
    ),
    "draft": Control(label="Draft", kind="choice", empty="every measured one"),
    "budget": Control(
        label="Draft budget", kind="whole", empty="searched", hint="KV slots per draft step; empty: searched"
    ),
    "draft_tp": Control(
        label="Draft tensor parallel", kind="whole", empty="all ranks", hint="ranks of the draft; empty: all"
    ),
    "gamma": Control(label="γ", kind="whole", empty="searched", hint="drafted per step; empty: searched"),
    "acceptance": Control(label="Acceptance", kind="share", empty="as measured", hint="0 to 1; empty: as measured"),
    "weight_dtype": Control(label="Weights", kind="choice", empty="the default"),
    "kv_dtype": Control(label="KV cache", kind="choice", empty="the default"),
    "tpot_ms": Control(label="Limit per token", kind="milliseconds", empty="none", hint="ms; empty: none"),
    "ttft_ms": Control(label="Limit to first token", kind="milliseconds", empty="none", hint="ms; empty: none"),
    "price": Control(label="Price", kind="dollars", empty="none", hint="dollars per device and hour; empty: none"),
}
"""In the order of the page; the names are those of the query string and, but for `draft`, of `magicdec plan`."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What the controls say. None: left empty."""

    model: str = "llama-3.1-8b"
    hardware: str = "a100-sxm-80gb"
    engine: str | None = None
    tp: int | None = None
    batch: int = 64
    context: int = 32_768
    gen_len: int | None = None
    draft: str | None = None
    budget: int | None = None
    draft_tp: int | None = None
    gamma: int | None = None
    acceptance: float | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    price: float | None = None

    def query(self) -> str:
        """The state as a query string: what differs from the defaults, the model and the device always."""
        first = ("model", "hardware")
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        return urlencode({k: v for k, v in shown.items() if v is not None and (k in first or v != getattr(State(), k))})


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """What may be chosen: the catalogs, and what was given when the page was started.

    A page may not name files, so that a link never makes the program read one. An engine profile goes with the device
    it was given with, acceptance profiles with the model.
    """

    start: State = field(default_factory=State)
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    hardware: Mapping[str, HardwareProfile] = field(default_factory=dict)
    engine: EngineProfile | None = None
    acceptance: tuple[AcceptanceProfile, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names as they were given at the start, for the command line that repeats an answer."""

    @classmethod
    def given(
        cls,
        *,
        model: str | None = None,
        hardware: str | None = None,
        engine: str | None = None,
        acceptance: Iterable[str] = (),
    ) -> Catalog:
        """The catalogs with a model, a device, an engine and acceptance profiles of the user's (names or files).

        Raises ConfigError for what cannot be read.
        """
        defaults = State()
        spec = load_model_spec(model or defaults.model)
        device = load_hardware(hardware or defaults.hardware)
        paths = tuple(acceptance)
        return cls(
            start=State(model=spec.name, hardware=device.name),
            models={spec.name: spec},
            hardware={device.name: device},
            engine=load_engine(engine) if engine else None,
            acceptance=tuple(load_profile(path) for path in paths),
            sources={
                "model": (model or spec.name,),
                "hardware": (hardware or device.name,),
                "engine": (engine,) if engine else (),
                "acceptance": paths,
            },
        )

    def choices(self, name: str) -> list[str]:
        """What a control of kind "choice" may be, but for empty."""
        if name == "model":
            return [*self.models, *(each for each in model_names() if each not in self.models)]
        if name == "hardware":
            return [*self.hardware, *(each for each in hardware_names() if each not in self.hardware)]
        if name == "engine":
            return engine_names()
        if name in FORMATS:
            return list(FORMATS[name])
        small = [each for each in model_names() if load_model_spec(each).num_parameters <= MAX_DRAFT_PARAMETERS]
        return [*METHODS, *small]

    def read(self, query: str) -> State:
        """The state of a link. Raises ConfigError for an unknown control, a choice that there is not, or no number."""
        values: dict[str, str | int | float | None] = {}
        for name, text in parse_qsl(query, keep_blank_values=True):
            if name not in CONTROLS:
                raise unknown_choice("control", name, CONTROLS)
            values[name] = self._value(name, text.strip())
        start = {each.name: getattr(self.start, each.name) for each in fields(State)}
        return State(**(start | values))

    def _value(self, name: str, text: str) -> str | int | float | None:
        control = CONTROLS[name]
        if not text:
            if not control.empty:
                raise ConfigError(f"{name} must be given")
            return None
        if control.kind == "choice":
            if text not in (known := self.choices(name)):
                raise unknown_choice(name, text, known)
            return text
        try:
            if len(text) > MAX_DIGITS:
                raise ValueError(text)
            return int(text) if control.kind == "whole" else float(text)
        except ValueError:
            example = EXAMPLES[control.kind]
            raise ConfigError(f"{name} must be {example}, not '{text[:40]}'") from None

    def request(self, state: State) -> PlanRequest:
        """The planner's request. Raises ConfigError for numbers out of range."""
        is_start_device = state.hardware == self.start.hardware
        is_method = state.draft in METHODS
        return PlanRequest(
            model=self.models.get(state.model, state.model),
            hardware=(self.hardware.get(state.hardware, state.hardware),),
            engine=state.engine or (self.engine if is_start_device else None),
            tp_size=state.tp,
            batch_sizes=(state.batch,),
            context_lens=(state.context,),
            gen_len=state.gen_len or 0,
            price_per_hour_usd=state.price,
            draft=None if is_method else state.draft,
            draft_method=state.draft if is_method else None,
            draft_budgets=(state.budget,) if state.budget is not None else (),
            draft_tp_size=state.draft_tp,
            gamma=state.gamma,
            acceptance_rate=state.acceptance,
            weight_dtype=state.weight_dtype,
            kv_dtype=state.kv_dtype,
            tpot_limit_s=None if state.tpot_ms is None else state.tpot_ms * MILLI,
            ttft_limit_s=None if state.ttft_ms is None else state.ttft_ms * MILLI,
            acceptance=self.acceptance if state.model == self.start.model else (),
        )

    def command(self, state: State) -> str:
        """The command line that gives the same answer."""
        model = self.sources.get("model", ()) if state.model == self.start.model else ()
        device = self.sources.get("hardware", ()) if state.hardware == self.start.hardware else ()
        options: list[tuple[str, object]] = [
            ("--model", (model or (state.model,))[0]),
            ("--hardware", (device or (state.hardware,))[0]),
            ("--batch", state.batch),
            ("--context", state.context),
        ]
        if state.engine is not None:
            options.append(("--engine", state.engine))
        elif state.hardware == self.start.hardware:
            options += [("--engine", each) for each in self.sources.get("engine", ())]
        if state.model == self.start.model:
            options += [("--acceptance", each) for each in self.sources.get("acceptance", ())]
        draft = "--draft-method" if state.draft in METHODS else "--draft"
        for option, value in (
            ("--tp", state.tp), ("--gen-len", state.gen_len), (draft, state.draft), ("--draft-budget", state.budget),
            ("--draft-tp", state.draft_tp), ("--gamma", state.gamma), ("--acceptance-rate", state.acceptance),
            ("--weight-dtype", state.weight_dtype), ("--kv-dtype", state.kv_dtype), ("--tpot-ms", state.tpot_ms),
            ("--ttft-ms", state.ttft_ms), ("--price", state.price),
        ):  # fmt: skip
            if value is not None:
                options.append((option, value))
        return shlex.join(["magicdec", "plan", *(str(word) for option in options for word in option)])
