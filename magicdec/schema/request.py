"""The options of a plan as one struct, shared by `magicdec plan`, `magicdec.plan()`, the what-if page and
the plan document.

    asked = fields_of({"batch": [16, 64], "context": "32k", "tpot_ms": 30})  # from options' names
    given(Request(batch_sizes=(16,)))  # and back: {"batch": (16,)}
"""

from __future__ import annotations

import math
import operator
import os
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.naming import draft_by_name
from magicdec.tasks import shares_of, task_named, usual_lengths
from magicdec.units import MILLI, parse_count, parse_share

MAX_TP_SIZE, MAX_PP_SIZE, MAX_EP_SIZE = 1024, 64, 1024
WEIGHT_FORMATS = (
    "bf16, fp16, fp8, fp8_block, int8, int4, nvfp4, mxfp4, fp32, or a GGUF type (q4_k_m, with its "
    "file's size q4_k_m@19.8GB)"
)
DEFAULT_CONTEXT = 32_768
DEFAULT_CONTEXTS = (DEFAULT_CONTEXT,)
"""Those of a request without any: this object, so that the same length asked for can be told from it."""
MAX_BATCH = 65_536
MAX_CONTEXT = 2**26
BALANCES = ("round-robin", "least-loaded")
PREFILLS = ("here", "elsewhere")
COUNT_OR_SHARE: Any = int | str
COUNTS_OR_SHARES: Any = tuple[int | str, ...]
NUMBERS = (float, float | None)
REPEATED = ("acceptance",)
"""Options that are given once for each of their values."""
OF_ARRIVALS = ("burstiness", "p95_ttft_ms", "p95_tpot_ms", "balance")
"""Options that only a rate of arrivals gives a meaning."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A field of the request as it is asked for."""

    help: str
    name: str = ""
    """Name in Python and in a link, and with dashes on the command line, where it is not the
    field's.
    """
    unit: float = 1.0
    """One of the option's units, in the field's."""
    least: float = -math.inf
    most: float = math.inf
    is_open: bool = False
    """Whether a value must be above `least`."""
    field: str = ""
    kind: Any = None
    """The field's type."""
    default: Any = None

    @property
    def is_many(self) -> bool:
        return self.kind in (tuple[int, ...], tuple[str, ...], COUNTS_OR_SHARES)

    @property
    def is_whole(self) -> bool:
        return self.kind in (int, int | None, tuple[int, ...])

    def value(self, name: str, given: Any) -> Any:
        """The field's value of a plain one: counts may be written "32k", and one value stand for a
        list of one.
        """
        if self.is_many:
            return self._values(name, given)
        if self.is_whole or (
            self.kind == COUNT_OR_SHARE and not str(given).endswith("%")
        ):
            return _count(name, given)
        if isinstance(given, list | tuple):
            return tuple(given)
        if self.unit != 1.0:
            return given * self.unit
        return _named(given)

    def _values(self, name: str, given: Any) -> tuple[Any, ...]:
        """The values of a list, for which one value may stand."""
        values = (given,)
        if isinstance(given, Iterable) and not isinstance(given, str | Path):
            values = tuple(given)
        if self.is_whole:
            return tuple(_count(name, value) for value in values)
        if self.kind == COUNTS_OR_SHARES:
            return tuple(_count_or_share(name, value) for value in values)
        return tuple(map(_named, values))

    def check(self, value: Any) -> None:
        """Raises ConfigError for a number outside the option's limits."""
        kinds = (*NUMBERS, COUNT_OR_SHARE, COUNTS_OR_SHARES)
        if not self.is_whole and self.kind not in kinds:
            return
        values = (value,)
        if self.is_many:
            values = value
        for number in values:
            if number is not None and not isinstance(number, str):
                self._check_number(number)

    def _check_number(self, number: float) -> None:
        name = (self.name or self.field).replace("_", " ")
        if not math.isfinite(number):
            raise ConfigError(f"{name} must be a finite number, not {number}")
        is_least = self.is_open and number == self.least
        if is_least or not self.least <= number <= self.most:
            value = number / self.unit
            raise ConfigError(f"{name} must be {self._limits()}, not {value:.10g}")
        if self.is_whole:
            _count(name, number)

    def _limits(self) -> str:
        """The numbers that the option takes, in words."""
        if self.is_open:
            limits = f"above {self.least:.0f}"
        elif self.most == math.inf:
            return f"at least {self.least:.0f}"
        else:
            return f"between {self.least:.0f} and {self.most:.0f}"
        if self.most < math.inf:
            limits += f" and at most {self.most:.0f}"
        return limits


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's request in plain values; None leaves a choice to the planner."""

    model: Annotated[
        str, Option(help="Catalog name, config.json or its directory.")
    ] = "llama-3.1-8b"
    hardware: Annotated[
        tuple[str, ...],
        Option(
            help="Names (4xh100, h100=2.5 with a price), TOML files, or all; a list."
        ),
    ] = ("a100-sxm-80gb",)
    engine: Annotated[
        str | None,
        Option(help="vllm (GPUs), ours (CPUs), sglang, trtllm, a TOML file."),
    ] = None
    attention_backend: Annotated[
        str | None,
        Option(help="The engine's (FLASHINFER, triton); default: its own choice."),
    ] = None
    tp_size: Annotated[
        int | None,
        Option(
            name="tp",
            help="Tensor-parallel size; default: the fewest devices that hold the model.",
            least=1,
            most=MAX_TP_SIZE,
        ),
    ] = None
    num_gpus: Annotated[
        int | None,
        Option(
            name="gpus",
            help="Devices to use: searches tp and replicas.",
            least=1,
            most=10**6,
        ),
    ] = None
    pp_size: Annotated[
        int | None,
        Option(
            name="pp",
            help="Pipeline stages; default: 1, or searched over nodes.",
            least=1,
            most=MAX_PP_SIZE,
        ),
    ] = None
    ep_size: Annotated[
        int | None,
        Option(
            name="ep",
            help="Ranks that whole experts are divided over.",
            least=1,
            most=MAX_EP_SIZE,
        ),
    ] = None
    dp_attention: Annotated[
        bool, Option(help="Groups of tp ranks hold sequences of their own.")
    ] = False
    batch_sizes: Annotated[
        tuple[int, ...],
        Option(
            name="batch",
            help="Sequences per replica, a list; default 64, or searched.",
            least=1,
            most=MAX_BATCH,
        ),
    ] = ()
    context_lens: Annotated[
        tuple[int, ...],
        Option(
            name="context",
            help="Prompt lengths in tokens, a list.",
            least=1,
            most=MAX_CONTEXT,
        ),
    ] = DEFAULT_CONTEXTS
    gen_len: Annotated[
        int,
        Option(help="Tokens generated after the prompt.", least=0, most=MAX_CONTEXT),
    ] = 0
    gamma: Annotated[
        int | None, Option(help="Drafted tokens per step; default: searched.", least=0)
    ] = None
    draft: Annotated[
        str | None, Option(help="self, none, ngram, eagle3, or model.")
    ] = None
    plugin: Annotated[
        bool, Option(help="Admit drafts that need magicdec's vLLM plugin.")
    ] = False
    draft_model: Annotated[
        str | None,
        Option(help="Its checkpoint: a path, a Hugging Face id or a published name."),
    ] = None
    draft_method: Annotated[
        str | None, Option(help="streamingllm, snapkv, topk or full.")
    ] = None
    draft_budgets: Annotated[
        tuple[int | str, ...],
        Option(
            name="draft_budget",
            help="KV slots per sequence, or shares of the context (7%), a list.",
            least=1,
            most=MAX_CONTEXT,
        ),
    ] = ()
    draft_tp_size: Annotated[
        int | None,
        Option(
            name="draft_tp",
            help="Ranks of the draft; default: all.",
            least=1,
            most=MAX_TP_SIZE,
        ),
    ] = None
    task: Annotated[
        str | None,
        Option(
            help="Text: chat, code, code-edit, math, summarisation, rag, translation, agentic, "
            "long-document; a mixture by tokens: chat=70,code=30."
        ),
    ] = None
    draft_name: str | None = None
    """Published checkpoint of the draft: the option `draft_model` where that is a name, no path."""
    temperature: Annotated[float, Option(help="0 is greedy.", least=0, most=100)] = 1.0
    top_p: Annotated[
        float | None, Option(help="Nucleus sampling.", least=0, most=1, is_open=True)
    ] = None
    top_k: Annotated[
        int | None, Option(help="Sampling from the k most likely.", least=1)
    ] = None
    acceptance_rate: Annotated[
        float | tuple[float, ...] | None,
        Option(help="One rate for every position, or a list by position."),
    ] = None
    accept_length: Annotated[
        float | None,
        Option(
            help="Tokens per step at --gamma, as engines print them (mean acceptance length).",
            least=1,
        ),
    ] = None
    drafted_share: Annotated[
        float | None,
        Option(
            help="Share of steps that had a draft, where --accept-length is of these alone (look-ups "
            "in vLLM); 1: it is of all steps.",
            least=0,
            most=1,
            is_open=True,
        ),
    ] = None
    acceptance: Annotated[
        tuple[str, ...], Option(help="Measured acceptance profile; repeatable.")
    ] = ()
    weight_dtype: Annotated[str | None, Option(help=f"Weights: {WEIGHT_FORMATS}.")] = (
        None
    )
    kv_dtype: Annotated[
        str | None, Option(help="KV cache: bf16, fp16, fp8, int4 or fp32.")
    ] = None
    draft_weight_dtype: Annotated[str | None, Option(help="Weights of the draft.")] = (
        None
    )
    draft_kv_dtype: Annotated[str | None, Option(help="KV cache of the draft.")] = None
    tpot_limit_s: Annotated[
        float | None,
        Option(
            name="tpot_ms",
            help="Limit on the time per output token, ms.",
            unit=MILLI,
            least=0,
            is_open=True,
        ),
    ] = None
    ttft_limit_s: Annotated[
        float | None,
        Option(
            name="ttft_ms",
            help="Limit on the time to the first token, ms.",
            unit=MILLI,
            least=0,
            is_open=True,
        ),
    ] = None
    prefill: Annotated[
        str,
        Option(
            help="here, or elsewhere: a pool that only decodes, sent its keys and values."
        ),
    ] = "here"
    kv_link_gb_s: Annotated[
        float,
        Option(
            help="GB/s per device on which keys and values of prompts arrive from elsewhere.",
            least=0,
            most=1e6,
            is_open=True,
        ),
    ] = 50.0
    price_per_hour_usd: Annotated[
        float | None,
        Option(
            name="price",
            help="Dollars per device and hour.",
            least=0,
            most=1e6,
            is_open=True,
        ),
    ] = None
    workload: Annotated[
        Any, Option(help="Distribution of prompt and output lengths.")
    ] = None
    rate: Annotated[
        float | None,
        Option(
            help="Requests per second: searches the fewest devices.",
            least=0,
            most=1e6,
            is_open=True,
        ),
    ] = None
    burstiness: Annotated[
        float,
        Option(
            help="Squared variation of gaps between arrivals; 1: Poisson.",
            least=0,
            most=1e4,
        ),
    ] = 1.0
    requests: Annotated[
        str | None,
        Option(
            help="Requests to serve: CSV or JSONL of arrival (s), prompt, output, cached."
        ),
    ] = None
    cached_len: Annotated[
        int | str,
        Option(
            name="cached",
            help="Tokens of each prompt that are cached, or their share: 90%.",
            least=0,
            most=MAX_CONTEXT,
        ),
    ] = 0
    ttft_p95_s: Annotated[
        float | None,
        Option(
            name="p95_ttft_ms",
            help="Limit on TTFT's 95th percentile, ms.",
            unit=MILLI,
            least=0,
            is_open=True,
        ),
    ] = None
    tpot_p95_s: Annotated[
        float | None,
        Option(
            name="p95_tpot_ms",
            help="Limit on TPOT's 95th percentile, ms.",
            unit=MILLI,
            least=0,
            is_open=True,
        ),
    ] = None
    balance: Annotated[
        str, Option(help="Over replicas: round-robin or least-loaded.")
    ] = "round-robin"

    @property
    def has_arrivals(self) -> bool:
        """Whether it is about a rate of requests."""
        return self.rate is not None or self.requests is not None


@cache
def request_options() -> dict[str, Option]:
    """Every option of a plan, under its name."""
    hints = get_type_hints(Request, include_extras=True)
    by_name = {}
    for field in msgspec.structs.fields(Request):
        hint = hints[field.name]
        if field.name == "draft_name":
            continue
        (option,) = hint.__metadata__
        by_name[option.name or field.name] = msgspec.structs.replace(
            option,
            field=field.name,
            kind=hint.__origin__,
            default=field.default,
        )
    return by_name


def fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The request's fields from plain values under the options' names; what is None is left out.

    A task, or a rate, brings the lengths of a usual request where none are given. Raises
    ConfigError for an unknown option or task, or what is no number.
    """
    known = request_options()
    fields = {}
    for name, value in values.items():
        if name not in known:
            raise unknown_choice("option", name, known)
        if value is not None:
            option = known[name]
            fields[option.field] = option.value(name, value)
    if "task" in fields:
        fields["task"] = task_named(fields["task"])
    if "draft" in fields:
        fields |= _draft_fields(fields["draft"])
    if "draft_model" in fields and not _is_path(fields["draft_model"]):
        name = fields.pop("draft_model")
        fields = {**_draft_fields(name), **fields, "draft_name": name}
    return _assumed_lengths(fields) | fields


def _draft_fields(draft: str) -> dict[str, Any]:
    """A draft under our name: engines have other spellings, and a head's repository names its sort."""
    ours = draft_by_name(draft)
    if ours is None:
        return {}
    if "/" in draft:
        return {"draft": ours, "draft_name": draft}
    return {"draft": ours}


def _is_path(checkpoint: str) -> bool:
    """Whether a checkpoint is a directory or its config.json, not a name."""
    is_written_so = checkpoint.endswith(".json") or checkpoint.startswith(
        (".", "/", "~")
    )
    return is_written_so or checkpoint.count("/") > 1 or os.path.exists(checkpoint)


def _assumed_lengths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt and output of a usual request, for a question of a text or a rate, which needs them,
    that gives none."""
    if fields.get("task") is None and fields.get("rate") is None:
        return {}
    if fields.get("workload") is not None or fields.get("requests") is not None:
        return {}
    usual = usual_lengths(fields.get("task"))
    return {"context_lens": (usual.prompt_len,), "gen_len": usual.output_len}


def given(request: Request) -> dict[str, Any]:
    """Options of a request that it does not have by itself, under the options' names and in their
    units.
    """
    values = {}
    usual = _assumed_lengths(msgspec.structs.asdict(request))
    for name, option in request_options().items():
        value = getattr(request, option.field)
        if name == "draft_model" and value is None:
            value = request.draft_name
        if value == usual.get(option.field, option.default):
            continue
        if option.unit != 1.0:
            value = round(value / option.unit, 9)
        values[name] = value
    return values


def plan_command(values: Mapping[str, Any]) -> str:
    """The command line of a plan with these options; none for a value that is empty."""
    words = ["magicdec", "plan"]
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
            continue
        listed = (value,)
        if isinstance(value, tuple | list):
            listed = tuple(value)
        texts = [_argument(each) for each in listed if each is not None]
        if name not in REPEATED:
            texts = [",".join(texts)]
        for text in filter(None, texts):
            words += [flag, text]
    return shlex.join(words)


def _argument(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)


def check_fields(request: Request) -> None:
    """Raises ConfigError for a number outside its option's limits, or a request of no context or
    device.
    """
    for asked in request_options().values():
        asked.check(getattr(request, asked.field))
    if request.balance not in BALANCES:
        raise unknown_choice("balance", request.balance, BALANCES)
    if request.prefill not in PREFILLS:
        raise unknown_choice("prefill", request.prefill, PREFILLS)
    if request.prefill == "here" and "kv_link_gb_s" in given(request):
        raise ConfigError("--kv-link-gb-s goes with --prefill elsewhere")
    if request.task is not None:
        shares_of(request.task)  # an unknown one is refused here
    _check_arrivals(request)
    if not request.context_lens or not request.hardware:
        raise ConfigError("a plan needs at least one context length and one device")


def _check_arrivals(request: Request) -> None:
    """Raises ConfigError for options of arrivals without any."""
    asked_of_rate = [name for name in OF_ARRIVALS if name in given(request)]
    if asked_of_rate and not request.has_arrivals:
        raise ConfigError(
            f"--{asked_of_rate[0].replace('_', '-')} goes with --rate or --requests"
        )


def _named(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return value


def _count_or_share(name: str, value: Any) -> int | str:
    """A number, or a share as its text."""
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return _count(name, value)
    if parse_share(value) is None:
        raise ConfigError(
            f"{name} must be tokens like 512, or a share of the context above 0% and up to 100%, "
            f"not '{value}'"
        )
    return value.strip()


def _count(name: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return parse_count(value)
        except ValueError:
            raise ConfigError(
                f"{name} must be a number like 4096 or 32k, not '{value}'"
            ) from None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    return operator.index(value)
