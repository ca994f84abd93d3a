"""The controls of the page as one value: read from a link's query string, and turned into a request
to the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.perfmodel.acceptance import AcceptanceProfile, load_profile
from magicdec.perfmodel.kernels.profile import (
    HardwareProfile,
    hardware_aliases,
    hardware_names,
    load_hardware,
)
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.plan_request import OF_ARRIVALS, Request, fields_of, given, plan_command
from magicdec.specs.catalog import load_model_spec, model_names
from magicdec.specs.device import DTYPE_BYTES
from magicdec.specs.engine import EngineProfile, engine_names, load_engine
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import OWN_METHOD, SPARSE_METHODS
from magicdec.tasks import TASKS
from magicdec.units import GIGA, parse_count

METHODS = (*SPARSE_METHODS, "full", *OWN_METHOD)
MAX_DRAFT_PARAMETERS = 4 * GIGA
MAX_DIGITS = 12
FORMATS = ("weight_dtype", "kv_dtype", "draft_weight_dtype", "draft_kv_dtype")
EXAMPLES = {
    "whole": "a whole number like 64 or 32k",
    "number": "a number like 0.7",
    "share": "a number from 0 to 1, like 0.8",
    "milliseconds": "a number of milliseconds like 30",
    "dollars": "a number of dollars like 2.5",
}


@dataclass(frozen=True, kw_only=True)
class Control:
    """One control: its label, how it is read, and what it may be left empty for."""

    label: str
    kind: Literal["choice", "whole", "number", "share", "milliseconds", "dollars"]
    empty: str = ""
    """Meaning of an empty control; "" where it must be filled."""
    hint: str = ""
    option: str = ""
    """The plan's option, where it is not the control's name."""


CONTROLS: dict[str, Control] = {
    "model": Control(label="Model", kind="choice"),
    "hardware": Control(label="Hardware", kind="choice"),
    "batch": Control(
        label="Batch",
        kind="whole",
        empty="64",
        hint="sequences; at a rate it is searched",
    ),
    "context": Control(
        label="Context", kind="whole", hint="tokens of the prompt, as 32k"
    ),
    "draft": Control(label="Draft", kind="choice", empty="all"),
    "acceptance": Control(
        label="Acceptance",
        kind="share",
        empty="as known",
        hint="0 to 1; empty: as measured, published or believed",
        option="acceptance_rate",
    ),
    "task": Control(label="Task", kind="choice", empty="any text"),
    "rate": Control(
        label="Requests per second",
        kind="number",
        empty="a full batch",
        hint="empty: a full batch",
    ),
    "gen_len": Control(
        label="Output",
        kind="whole",
        empty="decoding alone",
        hint="tokens of a request; empty: decoding alone, or the task's",
    ),
    "p95_ttft_ms": Control(
        label="Limit to 1st token, p95",
        kind="milliseconds",
        empty="none",
        hint="ms; empty: none",
    ),
    "p95_tpot_ms": Control(
        label="Limit per token, p95",
        kind="milliseconds",
        empty="none",
        hint="ms; empty: none",
    ),
    "engine": Control(label="Engine", kind="choice", empty="the device's"),
    "tp": Control(
        label="Tensor parallel",
        kind="whole",
        empty="the whole node",
        hint="ranks; empty: the whole node",
    ),
    "gpus": Control(
        label="GPUs",
        kind="whole",
        empty="tensor parallel's",
        hint="in all; empty: tensor parallel's",
    ),
    "budget": Control(
        label="Draft budget",
        kind="whole",
        empty="searched",
        hint="KV slots per draft step; empty: searched",
        option="draft_budget",
    ),
    "draft_tp": Control(
        label="Draft tensor parallel",
        kind="whole",
        empty="all ranks",
        hint="ranks of the draft; empty: all",
    ),
    "gamma": Control(
        label="γ",
        kind="whole",
        empty="searched",
        hint="drafted per step; empty: searched",
    ),
    "temperature": Control(
        label="Temperature", kind="number", empty="1", hint="0 is greedy; empty: 1"
    ),
    "weight_dtype": Control(label="Weights", kind="choice", empty="the default"),
    "kv_dtype": Control(label="KV cache", kind="choice", empty="the default"),
    "draft_weight_dtype": Control(
        label="Draft's weights", kind="choice", empty="the default"
    ),
    "draft_kv_dtype": Control(
        label="Draft's KV cache", kind="choice", empty="the default"
    ),
    "tpot_ms": Control(
        label="Limit per token",
        kind="milliseconds",
        empty="none",
        hint="ms; empty: none",
    ),
    "ttft_ms": Control(
        label="Limit to first token",
        kind="milliseconds",
        empty="none",
        hint="ms; empty: none",
    ),
    "price": Control(
        label="Price",
        kind="dollars",
        empty="none",
        hint="dollars per device and hour; empty: none",
    ),
}
"""The page's controls in order, under their names in a link; `draft` holds the plan's draft or
draft method.
"""
MAIN_CONTROLS = tuple(CONTROLS)[:7]
RATE_CONTROLS = tuple(CONTROLS)[7:11]
"""Controls that are always shown, and controls for a rate of requests. The latter and all others
stay folded until one is set.
"""
EXAMPLE = (
    "model=llama-3.1-8b&hardware=l4-24gb&context=1024&gen_len=64&rate=1&p95_ttft_ms=1500"
    "&p95_tpot_ms=80"
)
"""A rate for which the answer takes a few seconds."""
START = Request(batch_sizes=(64,))


def shown(state: Request) -> dict[str, str]:
    """Text of each control for a request; "": left empty."""
    values = {
        "model": state.model,
        "hardware": state.hardware,
        "context": state.context_lens,
    } | given(state)
    values["draft"] = state.draft_method or state.draft
    return {
        name: _text(values.get(control.option or name))
        for name, control in CONTROLS.items()
    }


def _text(value: Any) -> str:
    """A control's text; of a list, which has one value on the page, that one's."""
    if isinstance(value, tuple):
        value = None if not value else value[0]
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)


def link(state: Request) -> str:
    """The request as a link's query string: what differs from the page's start, the model and the
    device always.
    """
    start = shown(START)
    always = ["model", "hardware"]
    if (
        state.task is not None or state.has_arrivals
    ):  # which would bring a context of their own
        always.append("context")
    differing = {}
    for name, text in shown(state).items():
        if name in always or text not in ("", start[name]):
            differing[name] = text
    return urlencode(differing)


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The choices of a page: the catalogs, and what was given when the page was started.

    A page may not name files, so that a link never makes the program read one. An engine profile
    goes with the device it was given with, acceptance profiles with the model.
    """

    start: Request = START
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    hardware: Mapping[str, HardwareProfile] = field(default_factory=dict)
    engine: EngineProfile | None = None
    acceptance: tuple[AcceptanceProfile, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The words on the command line for what was given, by option."""

    @classmethod
    def given(
        cls,
        *,
        model: str | None = None,
        hardware: str | None = None,
        engine: str | None = None,
        acceptance: Iterable[str] = (),
    ) -> Catalog:
        """The catalogs with a model, a device, an engine and acceptance profiles of the user's
        (names or files).

        Raises ConfigError for what cannot be read.
        """
        spec = load_model_spec(model or START.model)
        device = load_hardware(hardware or START.hardware[0])
        paths = tuple(acceptance)
        return cls(
            start=msgspec.structs.replace(
                START, model=spec.name, hardware=(device.name,)
            ),
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
        """Choices of a control of kind "choice", besides empty."""
        if name == "model":
            return list(dict.fromkeys((*self.models, *model_names())))
        if name == "hardware":
            return list(dict.fromkeys((*self.hardware, *hardware_names())))
        if name == "engine":
            return engine_names()
        if name == "task":
            return list(TASKS)
        if name in FORMATS:
            return list(DTYPE_BYTES)
        drafts: list[str] = list(METHODS)
        for model in model_names():
            if load_model_spec(model).num_parameters <= MAX_DRAFT_PARAMETERS:
                drafts.append(model)
        return drafts

    def read(self, query: str) -> Request:
        """The request of a link. Raises ConfigError for an unknown control, choice or number."""
        values = dict[str, str | int | float | None]()
        for name, text in parse_qsl(query, keep_blank_values=True):
            if name not in CONTROLS:
                raise unknown_choice("control", name, CONTROLS)
            values[CONTROLS[name].option or name] = self._value(name, text.strip())
        if values.get("draft") in METHODS:
            values["draft_method"] = values.pop("draft")
        if (
            values.get("rate") is None
        ):  # what a page still says of a rate that was taken away
            for name in OF_ARRIVALS:
                values.pop(name, None)
        state = msgspec.structs.replace(self.start, **fields_of(values))
        if state.has_arrivals:
            return msgspec.structs.replace(state, batch_sizes=())
        return state

    def _value(self, name: str, text: str) -> str | int | float | None:
        control = CONTROLS[name]
        if not text:
            if not control.empty:
                raise ConfigError(f"{name} must be given")
            return None
        if control.kind == "choice":
            if name == "hardware":
                text = hardware_aliases().get(text, text)
            choices = self.choices(name)
            if text not in choices:
                raise unknown_choice(name, text, choices)
            return text
        try:
            if len(text) > MAX_DIGITS:
                raise ValueError(text)
            if control.kind == "whole":
                return parse_count(text)
            return float(text)
        except ValueError:
            example = EXAMPLES[control.kind]
            raise ConfigError(f"{name} must be {example}, not '{text[:40]}'") from None

    def request(self, state: Request) -> PlanRequest:
        """The planner's request. Raises ConfigError for numbers out of range."""
        (device,) = state.hardware
        own: dict[str, Any] = {
            "model": self.models.get(state.model, state.model),
            "hardware": (self.hardware.get(device, device),),
            "acceptance": (),
        }
        if state.model == self.start.model:
            own["acceptance"] = self.acceptance
        if not state.engine:
            own["engine"] = None
            if state.hardware == self.start.hardware:
                own["engine"] = self.engine
        return PlanRequest(**msgspec.structs.asdict(state) | own)

    def command(self, state: Request) -> str:
        """The command line that gives the same answer."""
        values = {
            "model": state.model,
            "hardware": state.hardware,
            "batch": state.batch_sizes,
        } | given(state)
        if state.hardware == self.start.hardware:
            values |= self._given("hardware")
            values.setdefault("engine", self.sources.get("engine", ()))
        if state.model == self.start.model:
            values |= self._given("model", "acceptance")
        return plan_command(values)

    def _given(self, *names: str) -> dict[str, tuple[str, ...]]:
        """The words on the command line for what was given."""
        return {name: self.sources[name] for name in names if name in self.sources}
