"""The controls of the page: one for each of a plan's options that a link may set.

What an option means, and its limits, stand in schema/request.py; here are labels, and how a control's
text is read. Numbers and switches without a row in OWN get a control of their own by themselves.
Text that could name a file is no control.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from magicdec.errors import ConfigError
from magicdec.schema import (
    BALANCES,
    COUNT_OR_SHARE,
    OF_ARRIVALS,
    PREFILLS,
    Option,
    request_options,
)
from magicdec.specs import DTYPE_BYTES, engine_names
from magicdec.tasks import task_named
from magicdec.units import parse_count

Kind = Literal[
    "choice",
    "name",
    "whole",
    "number",
    "share",
    "milliseconds",
    "dollars",
    "rate",
    "length",
    "switch",
    "text",
    "file",
]
MAX_DIGITS = 12
"""Characters of a number that are read: more than any price, length or rate has."""
LONGEST_TEXT = 400
"""Characters of a rate that changes over time, or of a trace's columns."""
EXAMPLES: dict[str, str] = {
    "whole": "a whole number like 64 or 32k",
    "number": "a number like 0.7",
    "share": "a number from 0 to 1, like 0.8",
    "milliseconds": "a number of milliseconds like 30",
    "dollars": "a number of dollars like 2.5",
    "rate": "requests per second like 4, or at seconds like 2@0,8@600",
    "length": "tokens like 4096, or a share like 90%",
    "text": "arrival=NAME,prompt=NAME,output=NAME",
}
YES = "yes"


@dataclass(frozen=True, kw_only=True)
class Control:
    """One control: its label, how it is read, and what it may be left empty for."""

    label: str
    kind: Kind
    empty: str = ""
    """Meaning of an empty control; "" where it must be filled."""
    hint: str = ""
    option: str = ""
    """The plan's option, where it is not the control's name."""
    of: Literal["", "steady", "arrivals"] = ""
    """Questions that it belongs to; "": all."""

    @property
    def steps(self) -> bool:
        """Whether it has buttons for less and more."""
        return self.kind in ("whole", "number", "share", "milliseconds", "dollars")


MAIN: dict[str, Control] = {
    "model": Control(
        label="Model", kind="name", hint="a name, or a Hugging Face id; type to search"
    ),
    "hardware": Control(
        label="GPU", kind="name", hint="a name, or so many: 4xh100; type to search"
    ),
    "task": Control(
        label="Task",
        kind="name",
        empty="any text",
        hint="a task, or shares of several: chat=70,code=30; type to search",
    ),
    "draft": Control(label="Draft", kind="choice", empty="all"),
    "batch": Control(
        label="Batch",
        kind="whole",
        empty="64",
        hint="sequences at once; at a rate it is searched",
    ),
    "context": Control(label="Context", kind="whole", hint="tokens of the prompt"),
    "gen_len": Control(
        label="Output",
        kind="whole",
        empty="decoding",
        hint="tokens of a request; empty: decoding alone, or the task's",
    ),
    "acceptance": Control(
        label="Acceptance",
        kind="share",
        empty="known",
        hint="0 to 1; empty: as measured, published or believed",
        option="acceptance_rate",
    ),
    "rate": Control(
        label="Requests/s",
        kind="rate",
        empty="full batch",
        hint="requests per second, or at seconds: 2@0,8@600; empty: a full batch",
    ),
    "requests": Control(
        label="Trace",
        kind="file",
        empty="none",
        hint="CSV or JSONL: when requests come, their prompts and outputs",
    ),
    "ttft_ms": Control(
        label="TTFT limit, ms",
        kind="milliseconds",
        empty="no limit",
        hint="limit on the time to the first token",
        of="steady",
    ),
    "tpot_ms": Control(
        label="TPOT limit, ms",
        kind="milliseconds",
        empty="no limit",
        hint="limit on the time per token",
        of="steady",
    ),
    "p95_ttft_ms": Control(
        label="TTFT limit, ms",
        kind="milliseconds",
        empty="no limit",
        hint="limit on the 95th percentile of the time to the first token",
        of="arrivals",
    ),
    "p95_tpot_ms": Control(
        label="TPOT limit, ms",
        kind="milliseconds",
        empty="no limit",
        hint="limit on the 95th percentile of the time per token",
        of="arrivals",
    ),
}
"""Always shown."""
OWN: dict[str, Control] = {
    "engine": Control(label="Engine", kind="choice", empty="the device's"),
    "gpus": Control(label="GPUs in all", kind="whole", empty="fewest"),
    "tp": Control(label="Tensor parallel", kind="whole", empty="fewest"),
    "gamma": Control(
        label="γ", kind="whole", empty="searched", hint="tokens drafted per step"
    ),
    "budget": Control(
        label="Draft budget",
        kind="whole",
        empty="searched",
        hint="KV slots that a draft step reads",
        option="draft_budget",
    ),
    "draft_tp": Control(label="Draft's ranks", kind="whole", empty="all"),
    "temperature": Control(
        label="Temperature", kind="number", empty="1", hint="0 is greedy"
    ),
    "price": Control(
        label="Price, $/h", kind="dollars", empty="none", hint="per device and hour"
    ),
    "weight_dtype": Control(label="Weights", kind="choice", empty="as published"),
    "kv_dtype": Control(label="KV cache", kind="choice", empty="as published"),
    "draft_weight_dtype": Control(
        label="Draft's weights", kind="choice", empty="as published"
    ),
    "draft_kv_dtype": Control(
        label="Draft's cache", kind="choice", empty="the target's"
    ),
    "balance": Control(
        label="Balance", kind="choice", empty="round-robin", of="arrivals"
    ),
    "prefill": Control(
        label="Prefill",
        kind="choice",
        empty="here",
        hint="elsewhere: a pool that only decodes, sent its keys and values",
    ),
    "columns": Control(
        label="Trace's columns",
        kind="text",
        empty="recognised",
        hint="arrival=NAME,prompt=NAME,output=NAME",
        of="arrivals",
    ),
}
"""Folded, with a label of their own."""
CHOICES: dict[str, tuple[str, ...]] = {
    "engine": tuple(engine_names()),
    "balance": BALANCES,
    "prefill": PREFILLS,
    **dict.fromkeys(
        ("weight_dtype", "kv_dtype", "draft_weight_dtype", "draft_kv_dtype"),
        tuple(DTYPE_BYTES),
    ),
}
LABELS = {"pp": "Pipeline stages", "ep": "Expert ranks", "top_p": "Top p"}


def _further() -> Iterator[tuple[str, Control]]:
    """Controls of the options that are numbers or switches and have no row above."""
    taken = {control.option or name for name, control in (MAIN | OWN).items()}
    for name, option in request_options().items():
        kind = _kind_of(option)
        if name in taken or kind is None:
            continue
        words = LABELS.get(name, name.replace("_", " ").capitalize())
        yield (
            name,
            Control(
                label=words,
                kind=kind,
                empty="auto",
                hint=option.help,
                of="arrivals" if name in OF_ARRIVALS else "",
            ),
        )


def _kind_of(option: Option) -> Kind | None:
    """How an option is read; None for one that is no number or switch."""
    if option.kind is bool:
        return "switch"
    if option.is_whole and not option.is_many:
        return "whole"
    if option.kind == COUNT_OR_SHARE:
        return "length"
    if option.kind in (float, float | None):
        return "milliseconds" if option.unit != 1.0 else "number"
    return None


CONTROLS: dict[str, Control] = {**MAIN, **OWN, **dict(_further())}
"""The page's controls in order, under their names in a link; `draft` holds the plan's draft or
draft method.
"""
FOLDED = tuple(name for name in CONTROLS if name not in MAIN)


def read_value(name: str, text: str) -> str | int | float | bool | None:
    """A control's value from its text; names are read by the catalog.

    Raises ConfigError for what is no value of it.
    """
    control = CONTROLS[name]
    if control.kind == "switch":
        if text != YES:
            raise ConfigError(f"{name} is {YES} or left empty, not '{text[:40]}'")
        return True
    if name == "task":
        return task_named(text)
    if control.kind in ("rate", "length", "text"):
        return _spelt(name, text)
    try:
        if len(text) > MAX_DIGITS:
            raise ValueError(text)
        if control.kind == "whole":
            return parse_count(text)
        return float(text)
    except ValueError:
        raise _misread(name, text) from None


def _spelt(name: str, text: str) -> str | float:
    """A rate, a length or columns, which the planner reads where they are no number."""
    if len(text) > LONGEST_TEXT:
        raise _misread(name, text)
    if CONTROLS[name].kind != "rate":
        return text
    try:
        return float(text)
    except ValueError:
        if "@" not in text:
            raise _misread(name, text) from None
        return text


def _misread(name: str, text: str) -> ConfigError:
    example = EXAMPLES[CONTROLS[name].kind]
    return ConfigError(f"{name} must be {example}, not '{text[:40]}'")
