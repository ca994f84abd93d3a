"""The form of the what-if page: one field for each of a plan's options, and the link that holds them.

A link never makes the program read a file or fetch a model: options that name files are no fields, and
names must be the catalogs' or those that the page was started with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from magicdec.errors import ConfigError, unknown_choice
from magicdec.naming import draft_by_name
from magicdec.perfmodel.kernels.profile import EVERY_GPU, hardware_names, load_hardware
from magicdec.schema.request import NUMBERS, request_options
from magicdec.specs.catalog import model_names
from magicdec.specs.engine import engine_names
from magicdec.specs.names import resolve_name
from magicdec.tasks import TASKS

FIRST = (
    "model",
    "hardware",
    "task",
    "context",
    "gen_len",
    "batch",
    "draft",
    "gamma",
    "acceptance_rate",
    "rate",
    "tpot_ms",
    "ttft_ms",
)
"""Fields that stand unfolded, in their order."""
FILES = ("acceptance", "draft_model", "draft_name", "requests", "workload")
FIELDS = {
    name: option for name, option in request_options().items() if name not in FILES
}
LONGEST_TEXT = 200
YES = "yes"
"""Text of a switch that is on."""

Start = Mapping[str, str]
"""Options that the page was started with, as texts."""


def suggestions() -> dict[str, list[str]]:
    """Names to choose from while typing, by field."""
    return {
        "model": model_names(),
        "hardware": [*hardware_names()],
        "engine": [*engine_names()],
        "task": [*TASKS],
    }


def texts_of(query: str, start: Start) -> dict[str, str]:
    """The text of each field that is filled in. Raises ConfigError for a name that is no field."""
    texts = dict(start)
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in FIELDS:
            raise unknown_choice("option", name, FIELDS)
        texts[name] = text.strip()
    return {name: text for name, text in texts.items() if text}


def values_of(texts: Mapping[str, str], start: Start) -> dict[str, Any]:
    """Options of a plan from the texts of their fields. Raises ConfigError."""
    values = {}
    for name, text in texts.items():
        if len(text) > LONGEST_TEXT:
            raise ConfigError(f"{name} has more than {LONGEST_TEXT} characters")
        if text != start.get(name):
            _check_name(name, text)
        values[name] = _value(name, text)
    return values


def _value(name: str, text: str) -> Any:
    """An option's plain value; counts are read by the request."""
    option = FIELDS[name]
    if option.kind is bool:
        if text != YES:
            raise ConfigError(f"{name} is {YES} or left out, not '{text[:40]}'")
        return True
    if option.is_many:
        return tuple(part.strip() for part in text.split(","))
    if name == "acceptance_rate":
        rates = tuple(_number(name, part) for part in text.split(","))
        return rates if len(rates) > 1 else rates[0]
    if option.kind in NUMBERS:
        return _number(name, text)
    return text


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number, not '{text[:40]}'") from None


def _check_name(name: str, text: str) -> None:
    """Raises ConfigError for a name that is in no catalog."""
    if name == "model":
        _check_model(name, text)
    if name == "draft" and ("/" in text or draft_by_name(text) is None):
        _check_model(name, text)
    if name == "engine" and text not in engine_names():
        raise unknown_choice(name, text, engine_names())
    if name == "hardware":
        for part in map(str.strip, text.split(",")):
            if "/" in part or part.endswith(".toml"):
                raise unknown_choice(name, part, hardware_names())
            if part != EVERY_GPU:
                load_hardware(part)


def _check_model(name: str, text: str) -> None:
    if text in model_names():
        return
    if resolve_name(text) is None:
        elsewhere = "type a part of its name to search"
        if text.count("/") == 1:
            elsewhere = (
                f"the page fetches no models: magicdec explore --model {text} does"
            )
        raise unknown_choice(name, text, model_names(), or_else=elsewhere)
    if Path(text).exists():
        raise ConfigError(f"{text} is a file here, and a page reads none by name")
