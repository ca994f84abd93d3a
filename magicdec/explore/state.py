"""The controls of the page as one value: read from a link's query string, and turned into a request
to the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.explore.controls import CHOICES, CONTROLS, YES, read_value
from magicdec.explore.uploads import Uploads
from magicdec.perfmodel import (
    AcceptanceProfile,
    HardwareProfile,
    PlanRequest,
    counted,
    engine_of,
    hardware_aliases,
    hardware_names,
    load_hardware,
    load_profile,
    offered,
)
from magicdec.schema import OF_ARRIVALS, Request, fields_of, given, plan_command
from magicdec.specs import (
    OWN_METHOD,
    SPARSE_METHODS,
    EngineProfile,
    ModelSpec,
    load_engine,
    load_model_spec,
    model_names,
    named_models,
    resolve_name,
)
from magicdec.tasks import ALIASES, TASKS

DRAFT_CHOICES = (*SPARSE_METHODS, "full", *OWN_METHOD)
NONE_CHOSEN = "none"
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
    if value is None or value is False:
        return ""
    if value is True:
        return YES
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)


def link(state: Request) -> str:
    """The request as a link's query string: what differs from the page's start, the model and the
    device always.
    """
    start = shown(START)
    always = ["model", "hardware"]
    # a text and arrivals bring lengths of their own, in place of the page's start
    if state.task is not None or state.has_arrivals:
        always.append("context")
    differing = {}
    for name, text in shown(state).items():
        if name in always or text not in ("", start[name]):
            differing[name] = text
    return urlencode(differing)


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The choices of a page: the catalogs, and what was given when the page was started.

    A page may not name files: a link must never make the program read one. An engine profile goes
    with the device it was given with, acceptance profiles with the model.
    """

    start: Request = START
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    hardware: Mapping[str, HardwareProfile] = field(default_factory=dict)
    engine: EngineProfile | None = None
    acceptance: tuple[AcceptanceProfile, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The words on the command line for what was given, by option."""
    uploads: Uploads = field(default_factory=Uploads, compare=False)

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

    def suggestions(self, name: str) -> dict[str, str]:
        """Names to type ahead, each with its other names."""
        if name == "hardware":
            return self._devices()
        if name == "task":
            others: dict[str, list[str]] = {task: [] for task in TASKS}
            for alias, task in ALIASES.items():
                others[task].append(alias)
            return {task: ", ".join(aliases) for task, aliases in others.items()}
        found = dict.fromkeys(self.models, "given when the page was started")
        for model in model_names():
            row = named_models().get(model)
            checkpoints = () if row is None else row.checkpoints
            found.setdefault(model, ", ".join(checkpoints))
        return found

    def _devices(self) -> dict[str, str]:
        found = dict.fromkeys(self.hardware, "")
        others: dict[str, list[str]] = {name: [] for name in hardware_names()}
        for alias, name in hardware_aliases().items():
            if alias != name:
                others[name].append(alias)
        for name, aliases in others.items():
            found[name] = ", ".join(aliases)
        return found

    def drafts(self, state: Request) -> list[str]:
        """The drafts that can exist for a state's model and that its engine runs."""
        request = self.request(state)
        model = request.model
        if not isinstance(model, ModelSpec):
            model = load_model_spec(model)
        engine = engine_of(request, request.hardware[0])
        return [NONE_CHOSEN, *offered(model, request, engine)]

    def read(self, query: str) -> Request:
        """The request of a link. Raises ConfigError for an unknown control, choice or number."""
        values = dict[str, Any]()
        for name, text in parse_qsl(query, keep_blank_values=True):
            if name not in CONTROLS:
                raise unknown_choice("control", name, CONTROLS)
            values[CONTROLS[name].option or name] = self._value(name, text.strip())
        if values.get("draft") in DRAFT_CHOICES:
            values["draft_method"] = values.pop("draft")
        if values.get("rate") is None and values.get("requests") is None:
            # what a page still says of a rate that was taken away
            for name in OF_ARRIVALS:
                values.pop(name, None)
        if values.get("requests") is None:
            values.pop("columns", None)
        state = msgspec.structs.replace(self.start, **fields_of(values))
        if state.has_arrivals:
            return msgspec.structs.replace(state, batch_sizes=())
        return state

    def _value(self, name: str, text: str) -> Any:
        control = CONTROLS[name]
        if not text:
            if not control.empty:
                raise ConfigError(f"{name} must be given")
            return None
        if control.kind == "file":
            return self.uploads.checked(text)
        if name == "hardware":
            return self.device(text)
        if name == "model":
            return self.model(text)
        if name == "draft":
            return (
                text
                if text in (NONE_CHOSEN, *DRAFT_CHOICES)
                else self.model(text, "draft")
            )
        if control.kind == "choice":
            if text not in CHOICES[name]:
                raise unknown_choice(name, text, CHOICES[name])
            return text
        return read_value(name, text)

    def model(self, text: str, what: str = "model") -> str:
        """A model's name as typed: the catalog's, or a checkpoint's. Raises ConfigError."""
        if text in self.models:
            return text
        if text not in model_names() and resolve_name(text) is None:
            known = [*self.suggestions("model")]
            if what == "draft":
                known += DRAFT_CHOICES
            raise unknown_choice(what, text, known, or_else=_elsewhere(text))
        if text not in model_names() and Path(text).exists():
            raise ConfigError(f"{text} is a file here, and a page reads none by name")
        return text

    def device(self, text: str) -> str:
        """A device's name in the catalog, with the number and price that were typed."""
        if text in self.hardware:
            return text
        devices = counted(text)
        if "/" in text or text.endswith(".toml"):
            raise unknown_choice("hardware", text, self.suggestions("hardware"))
        name = load_hardware(devices.name).name
        if devices.num_gpus is not None:
            each = devices.num_gpus_per_node
            nodes = "" if each is None else f"{devices.num_gpus // each}x"
            name = f"{nodes}{each or devices.num_gpus}x{name}"
        if devices.price_per_hour_usd is not None:
            name = f"{name}={devices.price_per_hour_usd:.12g}"
        return name

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
        if state.requests is not None:
            values["requests"] = self.uploads.name_of(state.requests)
        if state.hardware == self.start.hardware:
            values |= self._given("hardware")
            values.setdefault("engine", self.sources.get("engine", ()))
        if state.model == self.start.model:
            values |= self._given("model", "acceptance")
        return plan_command(values)

    def _given(self, *names: str) -> dict[str, tuple[str, ...]]:
        """The words on the command line for what was given."""
        return {name: self.sources[name] for name in names if name in self.sources}


def _elsewhere(text: str) -> str:
    """Advice on a model that the catalog lacks."""
    if text.count("/") == 1:
        return (
            f"the page does not fetch models: magicdec explore --model {text[:80]} does"
        )
    return "type a part of its name to search"
