"""Servers measured with and without speculation: what is predicted for each pair, and which gamma
would be chosen.

Columns: source, model, hardware, engine, engine_version, tp, concurrency, prompt_len, output_len,
draft, draft_detail, gamma, tokens_per_step, weight_dtype, kv_dtype, unit, baseline, speculative,
note; for look-ups also drafted_share and tokens_per_drafted_step. Units: `tok_s`, output tokens per
second of the whole server (prefill inside, unless the note says "decode only"); `tpot_*_ms`, the
time between tokens. A row without lengths is taken to have those of the workload that its note
names (`WORKLOADS`), else `PROMPT_LEN` and `OUTPUT_LEN`; a row without a concurrency, one user.

A look-up drafts in some steps only. `tokens_per_step` is over all steps, `drafted_share` the share
of steps that had a draft; vLLM's mean acceptance length counts those alone and goes into
`tokens_per_drafted_step`. Any two of the three give the third:

    tokens_per_step = 1 + drafted_share · (tokens_per_drafted_step − 1)

The prediction is a plan's: its acceptance is the row's measured tokens per step, or what is believed
of its draft and text. The median of the time between tokens (`tpot_p50_ms`) is that of the median request,
whose text is easier than the mean step's.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isnan, nan
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from magicdec.comparison import ErrorSummary
from magicdec.counts import Z_90, Array, constant_rate, expected_tokens_per_step
from magicdec.errors import ConfigError, unknown_choice
from magicdec.perfmodel.acceptance import (
    LOOKUP_PRECISION,
    AcceptanceProfile,
)
from magicdec.perfmodel.acceptance.assumed import Question, checkpoint_in, profile_of
from magicdec.perfmodel.acceptance.law import sequence_rates
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.intervals import interval, tokens_error
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.serving import largest_active, whole_requests
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.specs.catalog import load_model_spec, model_names
from magicdec.specs.engine import EngineProfile, load_engine, version_number
from magicdec.specs.model_names import model_name
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import (
    AUTOREGRESSIVE,
    MAX_GAMMA,
    OWN_METHOD,
    SELF,
    SPARSE_METHODS,
    SamplingSpec,
    SpeculationSpec,
)
from magicdec.units import GIGA, MILLI
from magicdec.validate.rows import (
    FORMATS,
    NEWEST,
    Count,
    Length,
    Positive,
    columns,
    engine_name,
    format_name,
    places,
    read_rows,
    weight_format,
)

PROMPT_LEN, OUTPUT_LEN = 512.0, 256.0
"""Lengths of a row that states none and names no known workload."""
WORKLOADS = {"sharegpt": (217.0, 186.0)}
"""Mean prompt and output of workloads by name: 217,393 and 185,616 tokens of the 1,000 requests of
vLLM's benchmark.
"""
SHARED_BUDGET = 0.07
"""Share of the cache that a sparse draft reads where its row states neither a share nor a budget.
"""
SMALLEST_BUDGET = 64
SIGN_MARGIN = 0.05
ALIKE = (
    "model", "hardware", "engine", "engine_version", "weight_dtype", "kv_dtype", "draft", "draft_detail", "is_decoding"
)  # fmt: skip
CONSTANTS = (1, 3, 5, 7)
"""Gammas that a plan's choice is compared with."""
REQUEST_SPREAD = 0.134
"""Standard deviation of the acceptance rate between the requests of a mixed load: the one number
with which medians and means of 30 loads (gamma 1 to 7, 1 to 256 users) agree."""
DRAFT_NAMES = {
    "eagle-3": "eagle3", "eagle3.1": "eagle3", "eagle-3.1": "eagle3", "deepseek_mtp": "mtp", "deepseek-mtp": "mtp",
    "nextn": "mtp", "n-gram": "ngram", "prompt-lookup": "ngram", "peagle": "p-eagle", "p_eagle": "p-eagle",
    "d-flash": "dflash", "top-k": "topk", "vegas": "topk",
}  # fmt: skip
DRAFT_MODEL_NAMES = ("draft_model", "draft-model", "draft", "model", "standalone")
QUANTIZED_SELF = ("quantized-self", "quantised-self", "quantized_self", "self-quantized")
SHARES_HEAD = re.compile(r"eagle-?3\.1|full vocab|target'?s? (head|vocab)", re.IGNORECASE)
"""Details of heads that propose tokens of the whole vocabulary, by the target's own output layer.
"""


TEXTS = {
    "summar": "summarisation", "humaneval": "code", "mbpp": "code", "livecodebench": "code", "swe-bench": "agentic",
    "gsm8k": "math", "math": "math", "aime": "math", "mt-bench": "chat", "mt_bench": "chat", "mtbench": "chat",
    "sharegpt": "chat", "chat": "chat", "rag": "rag", "pg19": "long-document", "pg-19": "long-document",
    "longbench": "long-document", "code": "code", "translat": "translation",
}  # fmt: skip
"""Classes of text by a word of a row's note; the first that is found."""


class PairRow(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One measured pair, as its line states it. Raises ConfigError for what is not known."""

    where: str = ""
    source: str
    model: str
    hardware: str
    engine: str
    tp: Count
    draft: str
    gamma: Annotated[int, msgspec.Meta(ge=1, le=MAX_GAMMA)]
    unit: str
    baseline: Positive
    speculative: Positive
    engine_version: str = ""
    concurrency: Positive = nan
    prompt_len: Length = nan
    output_len: Positive = nan
    draft_detail: str = ""
    tokens_per_step: float | None = None
    drafted_share: float | None = None
    tokens_per_drafted_step: float | None = None
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    note: str = ""

    def __post_init__(self) -> None:
        named = (lengths for name, lengths in WORKLOADS.items() if name in self.note.lower())
        usual = dict(
            zip(("prompt_len", "output_len"), next(named, (PROMPT_LEN, OUTPUT_LEN)), strict=True)
        )
        for name, length in usual.items():
            if isnan(getattr(self, name)):
                msgspec.structs.force_setattr(self, name, length)
        if self.unit != "tok_s" and not re.fullmatch(r"(tpot|itl)(_\w+)?_ms", self.unit):
            raise ConfigError(f"unknown unit '{self.unit}': did you mean tok_s or tpot_mean_ms?")
        self._check_tokens()
        _ = self.setup  # an unknown name is refused here

    def _check_tokens(self) -> None:
        """Complete tokens per step and drafted share from each other. Raises ConfigError."""
        for name in ("tokens_per_step", "tokens_per_drafted_step"):
            tokens = getattr(self, name)
            if tokens is not None and not 0.0 <= tokens <= self.gamma + 1.0:
                raise ConfigError(f"column '{name}' must be at most gamma + 1, not {tokens:g}")
        share = self.drafted_share
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(f"column 'drafted_share' must be above 0, at most 1, not {share:g}")
        drafted = self.tokens_per_drafted_step
        if drafted is None:
            return
        if self.tokens_per_step is None and share is not None:
            tokens = 1.0 + share * (drafted - 1.0)
            msgspec.structs.force_setattr(self, "tokens_per_step", tokens)
        elif self.tokens_per_step is not None and share is None and drafted > 1.0:
            share = min((self.tokens_per_step - 1.0) / (drafted - 1.0), 1.0)
            msgspec.structs.force_setattr(self, "drafted_share", max(share, 0.0))

    @property
    def users(self) -> float:
        """Requests in the system; one where the row does not say."""
        if isnan(self.concurrency):
            return 1.0
        return self.concurrency

    @property
    def share(self) -> float:
        """Share of steps with a draft, estimated for a look-up that states none."""
        if self.drafted_share is not None:
            return self.drafted_share
        if not draft_of(self.setup).is_by_sequence or self.tokens_per_step is None:
            return 1.0
        accepted = max(self.tokens_per_step - 1.0, 0.0)
        return min(accepted / (LOOKUP_PRECISION * self.gamma), 1.0)

    @property
    def assumptions(self) -> list[str]:
        """Values that the row does not state and the prediction needs."""
        found = []
        if not version_number(self.engine_version):
            stated = self.engine_version or "no version"
            found.append(f"{stated} of {self.engine} read as the newest")
        if isnan(self.concurrency):
            found.append("one user assumed")
        if draft_of(self.setup).is_by_sequence and self.drafted_share is None:
            found.append(f"drafted share taken as {self.share:.2f}")
        return found

    @property
    def task(self) -> str:
        """The class of its text, by its note; "" where that does not say."""
        note = self.note.lower()
        return next((task for word, task in TEXTS.items() if re.search(rf"\b{word}", note)), "")

    @property
    def is_rate(self) -> bool:
        """Whether its figures are tokens per second rather than seconds per token."""
        return self.unit == "tok_s"

    @property
    def is_decoding(self) -> bool:
        """Whether no prefill is inside a rate."""
        return self.is_rate and re.search(r"decod\w* (only|alone)", self.note) is not None

    @property
    def measured(self) -> tuple[float, float]:
        """Seconds per token of the baseline and with speculation: of the whole server for a rate,
        else of a request.
        """
        if self.is_rate:
            return 1.0 / self.baseline, 1.0 / self.speculative
        return self.baseline * MILLI, self.speculative * MILLI

    @property
    def speedup(self) -> float:
        before, after = self.measured
        return before / after

    @property
    def origin(self) -> str:
        """The source without the place in it."""
        return self.source.split(maxsplit=1)[0]

    @property
    def alike(self) -> tuple[Any, ...]:
        """Equal for pairs that differ in numbers only."""
        return tuple(getattr(self, name) for name in ALIKE)

    @property
    def load(self) -> tuple[Any, ...]:
        """Equal for pairs that differ in gamma and users only."""
        return *self.alike, self.origin, self.tp, self.prompt_len, self.output_len

    @property
    def labels(self) -> dict[str, str]:
        """The parts of its group's name: source / model / hardware / draft / formats / what is
        compared.
        """
        precision = self.setup.precision
        return {
            "source": self.origin,
            "model": self.model,
            "hardware": self.setup.hardware.name,
            "draft": self.draft,
            "formats": f"{precision.weight_dtype}, KV {precision.kv_dtype}",
            "compared": "whole requests" if self.is_rate else "between tokens",
        }

    @property
    def budget(self) -> int:
        """Slots of a sparse draft, by its details ("budget 512", "7 % of KV")."""
        text = self.draft_detail.lower()
        if found := re.search(r"budget\D*(\d+)", text):
            return int(found[1])
        share = re.search(r"([\d.]+) ?%", text)
        if share:
            part = float(share[1]) / 100.0
        else:
            part = SHARED_BUDGET
        return max(int(part * (self.prompt_len + self.output_len / 2.0)), SMALLEST_BUDGET)

    @cached_property
    def setup(self) -> Setup:
        """The catalog's entries that its names stand for. Raises ConfigError for a name that is not
        known.
        """
        engine = load_engine(engine_name(self.engine))
        model = load_model_spec(model_name(self.model))
        hardware = load_hardware(self.hardware)
        kv = format_name(self.kv_dtype)
        kind = DRAFT_NAMES.get(self.draft.lower(), self.draft.lower())
        detail = f"{self.draft} {self.draft_detail}".lower()
        stated = next((form for word, form in FORMATS.items() if word in detail), None)
        own: str | None = None
        draft_model = None
        spec: dict[str, Any] = {"draft": kind, "draft_method": kind}
        if kind == "eagle3":
            spec["shares_vocabulary"] = SHARES_HEAD.search(detail) is not None
        if kind in SPARSE_METHODS:
            spec = {"draft": SELF, "draft_method": kind, "draft_budget": self.budget}
        elif kind in QUANTIZED_SELF:
            own = stated or "int4"
            spec = {"draft": SELF, "draft_method": "full", "draft_weight_dtype": own}
        elif kind not in OWN_METHOD:
            is_detailed = kind in DRAFT_MODEL_NAMES
            if is_detailed:
                words = [self.draft_detail, *re.split(r"[\s,;()]+", self.draft_detail)]
            else:
                words = [self.draft]
            found = next(
                (each for word in words if (each := model_name(word)) in model_names()), None
            )
            if found is None:
                raise unknown_choice(
                    "draft", self.draft_detail or self.draft, [*OWN_METHOD, *model_names()]
                )
            draft_model = load_model_spec(found)
            own = stated or ("fp8" if "fp8" in detail else None)
            spec = {"draft": found, "draft_method": "full"}
        return Setup(
            model=model,
            hardware=hardware,
            engine=engine.of_version(self.engine_version or NEWEST),
            sampling=SamplingSpec(),
            precision=Precision(weight_dtype=weight_format(model, self.weight_dtype), kv_dtype=kv),
            draft_precision=None if own is None else Precision(weight_dtype=own, kv_dtype=kv),
            draft_model=draft_model,
            speculation=SpeculationSpec(gamma=self.gamma, **spec),
        )


@dataclass(frozen=True)
class StatedTokens:
    """An acceptance law that gives each of several configurations its own stated tokens per step,
    by one rate for all positions. Fewer than one token is no mean length: it is read as the
    rate."""

    tokens: Array
    gamma: Array
    is_assumed = False
    replay = None
    drafted_share: Any = 1.0
    """Share of steps with a draft; the others verify one token."""

    @cached_property
    def rates(self) -> Array:
        return np.where(self.tokens < 1.0, self.tokens, constant_rate(self.tokens, self.gamma))

    def drafted_share_at(self, gamma: Any) -> Array:
        return np.asarray(self.drafted_share, dtype=np.float64)

    def draft_len_at(self, gamma: Any) -> Array:
        return np.asarray(gamma, dtype=np.float64)

    def tokens_per_step(self, *, budget: Any, context: Any, gamma: Any) -> tuple[Array, Array]:
        """The stated tokens, and the probability that all drafts are accepted."""
        expected = expected_tokens_per_step(
            np.repeat(self.rates[:, None], int(self.gamma.max()), axis=1), self.gamma
        )
        return expected, self.rates**self.gamma


class Predicted(NamedTuple):
    """Seconds per token, in the sense of `PairRow.measured`, of each of several pairs; a deviation
    of the speedup.
    """

    baseline_s: Array
    speculative_s: Array
    log_deviation: Array

    @property
    def speedup(self) -> Array:
        return self.baseline_s / self.speculative_s


def predict_pairs(
    pairs: Sequence[PairRow],
    tokens: Sequence[float | None],
    engines: Mapping[str, EngineProfile] | None = None,
) -> Predicted:
    """Predictions with these tokens per step, or by the believed acceptance where one is None;
    `engines` replaces profiles of the catalog by name. Not a number where no acceptance is
    known."""
    found = np.full((3, len(pairs)), np.nan)
    keys = (
        (*pair.alike, pair.task if given is None else None)
        for pair, given in zip(pairs, tokens, strict=True)
    )
    for indices in places([key] for key in keys).values():
        some = [pairs[index] for index in indices]
        setup = some[0].setup
        if engines is not None and setup.engine.name in engines:
            profile = engines[setup.engine.name].of_version(some[0].engine_version or NEWEST)
            setup = dataclasses.replace(setup, engine=profile)
        found[:, indices] = _predict_alike(setup, some, [tokens[index] for index in indices])
    return Predicted(*found)


def believed_acceptance(row: PairRow) -> AcceptanceProfile:
    """The acceptance that a plan takes for a row's draft and text, nobody having measured it."""
    setup = row.setup
    model = setup.model.name
    spec = setup.speculation
    kind = spec.draft_method
    draft = ""
    if spec.draft_method == "full":
        draft = "" if spec.draft == SELF else spec.draft
        kind = "full" if draft else "self-quantised"
    else:
        draft = checkpoint_in(f"{row.draft} {row.draft_detail}", model, kind)
    question = Question(
        model=model,
        kind=kind,
        billions=setup.model.num_parameters / GIGA,
        draft=draft,
        task=row.task,
        context=row.prompt_len,
        budget=None if spec.draft_budget is None else float(spec.draft_budget),
    )
    return profile_of(question, draft=spec.draft, method=spec.draft_method)


def _predict_alike(setup: Setup, rows: Sequence[PairRow], tokens: Sequence[float | None]) -> Array:
    """Baseline and speculative seconds, and the deviation of their ratio's logarithm, of rows of
    one setup.
    """
    names = ("users", "prompt_len", "output_len", "tp", "budget")
    users, prompt_len, output_len, tp, budgets = columns(rows, *names)
    gamma = np.array([row.gamma for row in rows])
    spec = setup.speculation
    profile: AcceptanceProfile | None = None
    law: Any
    if tokens[0] is None:
        profile = law = believed_acceptance(rows[0])
    else:
        shares = np.array([row.share for row in rows])
        law = StatedTokens(np.array(tokens, dtype=np.float64), gamma, shares)
    alone = dataclasses.replace(
        setup, speculation=AUTOREGRESSIVE, draft_model=None, draft_precision=None
    )

    def at(which: Setup, gamma: Any, budget: Any) -> Points:
        most = largest_active(
            which,
            prompt_len=prompt_len,
            output_len=output_len,
            tp_size=tp,
            budget=budget,
            gamma=gamma,
        )
        if rows[0].is_decoding:
            batch = users
        else:
            batch = np.minimum(users, most)
        return Points(
            batch=batch, context=prompt_len, tp=tp, gamma=gamma, budget=budget, gen_len=output_len
        )

    before = predict(alone, None, at(alone, np.zeros_like(gamma), None))
    after = predict(setup, law, at(setup, gamma, None if spec.draft_budget is None else budgets))
    sure = interval(after, tokens_error(after, profile))
    log_width = np.log(sure.speedup_high / sure.speedup_low) / (2.0 * Z_90)
    if rows[0].is_decoding:
        return np.array(
            np.broadcast_arrays(1.0 / before.tokens_per_s, 1.0 / after.tokens_per_s, log_width)
        )
    requests = whole_requests(after, output_len=output_len)
    cycles = whole_requests(before, output_len=output_len).alone, requests.drafted
    is_rate = np.array([row.is_rate for row in rows])
    baseline_s, speculative_s = (
        np.where(is_rate, cycle.in_slot_s / (cycle.active * output_len), cycle.tpot_s)
        for cycle in cycles
    )
    is_median = np.array([row.unit.startswith("tpot_p50") for row in rows])
    if is_median.any():
        expected = np.broadcast_to(after.expected_tokens_per_step, is_median.shape)
        speculative_s = np.where(
            is_median, speculative_s / median_request(expected, gamma), speculative_s
        )
    low, high = requests.speedup_bounds(sure)
    log_width = np.where(is_rate, np.log(high / low) / (2.0 * Z_90), log_width)
    return np.array(np.broadcast_arrays(baseline_s, speculative_s, log_width))


def median_request(tokens: Array, gamma: Array) -> Array:
    """Tokens per step of the median request over those of all steps, where the rates of requests
    differ by `REQUEST_SPREAD`: slow requests take more of the steps than of the requests."""
    return np.array(
        [_median_factor(float(each), int(most)) for each, most in zip(tokens, gamma, strict=True)]
    )


@lru_cache(maxsize=1024)
def _median_factor(expected: float, gamma: int) -> float:
    """The mean of the rates is the one at which requests together make `expected` tokens."""
    from scipy.optimize import brentq

    def of_requests(mean: float) -> tuple[Array, Array, float]:
        rates, weights = sequence_rates(mean, REQUEST_SPREAD)
        each = expected_tokens_per_step(np.repeat(rates[:, None], gamma, axis=1), gamma)
        return each, weights, float(weights @ (1.0 / each))

    within = float(np.clip(expected, 1.01, gamma + 0.99))
    mean = brentq(lambda mean: 1.0 / of_requests(mean)[2] - within, 1e-3, 1.0 - 1e-3)
    each, weights, steps = of_requests(float(mean))
    return float(each[np.searchsorted(np.cumsum(weights), 0.5)]) * steps


def validate_pairs(
    paths: Sequence[Path], *, acceptance: Literal["measured", "shipped"] = "measured"
) -> dict[str, Any]:
    """{"groups": […], "choice": {…}, "assumed": [one line per row], "refused": [likewise]}.

    `assumed` names the rows that lack a value which the prediction needs, `refused` those that are
    not judged.

    Raises ConfigError for a file that cannot be read or lacks a column, and when no row can be
    judged.
    """
    pairs, refused = read_rows(paths, PairRow)
    is_measured = acceptance == "measured"
    predicted = predict_pairs(pairs, tokens_of_cells(pairs) if is_measured else [None] * len(pairs))
    names: list[list[str]] = []
    for pair, speedup in zip(pairs, predicted.speedup, strict=True):
        names.append([])
        if np.isfinite(speedup) and not (is_measured and pair.tokens_per_step is None):
            *_, compared = labels = list(pair.labels.values())
            names[-1] = ["/".join(labels), f"all/{compared}"]
        else:
            if is_measured:
                lacking = "no measured tokens per step"
            else:
                lacking = "no acceptance"
            refused.append(f"{pair.where}: {lacking} of {pair.draft} for {pair.model}")
    groups = []
    for name, chosen in sorted(places(names).items()):
        groups.append(_group(name, pairs, np.array(chosen), predicted))
    assumed = [f"{pair.where}: {', '.join(pair.assumptions)}" for pair in pairs if pair.assumptions]
    return {
        "groups": groups,
        "choice": _choice(pairs, predicted.speedup),
        "assumed": assumed,
        "refused": refused,
    }


def tokens_of_cells(pairs: Sequence[PairRow]) -> list[float | None]:
    """The tokens per step of each pair; where it states none, those that the rate of the same
    load's nearest gamma gives."""
    stated: dict[Any, dict[int, float]] = defaultdict(dict)
    for pair in pairs:
        if pair.tokens_per_step is not None:
            stated[pair.load][pair.gamma] = pair.tokens_per_step
    found: list[float | None] = []
    for pair in pairs:
        given = stated[pair.load]
        gamma = pair.gamma
        if pair.tokens_per_step is not None or not given:
            found.append(pair.tokens_per_step)
            continue
        near = min(given, key=lambda other: (abs(other - gamma), -other))
        rate = StatedTokens(np.array([given[near]]), np.array([near])).rates
        found.append(
            float(expected_tokens_per_step(np.repeat(rate[:, None], gamma, axis=1), gamma)[0])
        )
    return found


def _group(
    name: str, pairs: Sequence[PairRow], chosen: np.ndarray, predicted: Predicted
) -> dict[str, Any]:
    """The errors of the speedup, of its sign outside the margin, and of both rates."""
    own = [pairs[index] for index in chosen]
    measured = np.array([pair.speedup for pair in own])
    seconds = np.array([pair.measured for pair in own])
    speedup = predicted.speedup[chosen]
    is_far = np.abs(measured - 1.0) > SIGN_MARGIN
    signs = np.sign(speedup - 1.0) == np.sign(measured - 1.0)
    group: dict[str, Any] = {
        "name": name,
        **({} if name.startswith("all/") else own[0].labels),
        **ErrorSummary.of(speedup / measured - 1.0, predicted.log_deviation[chosen]).figures(),
        "sign": float(np.mean(signs[is_far])) if is_far.any() else None,
        "rows_with_sign": int(is_far.sum()),
    }
    for what, times, each in zip(("baseline", "speculative"), predicted, seconds.T, strict=False):
        errors = ErrorSummary.of(times[chosen] / each - 1.0)
        group |= {f"{what}_mape": errors.mape, f"{what}_bias": errors.bias}
    return group


def _choice(pairs: Sequence[PairRow], speedup: Array) -> dict[str, Any]:
    """The mean loss of following the plan's gamma instead of the best measured one, over the loads
    measured at several; that of never speculating and of constant gammas, and the constant that is
    best in hindsight."""
    cells: dict[Any, dict[int, tuple[float, float]]] = defaultdict(dict)
    for pair, predicted in zip(pairs, speedup, strict=True):
        if pair.is_rate and np.isfinite(predicted):
            cells[*pair.load, pair.users][pair.gamma] = (float(predicted), pair.speedup)
    swept = [cell | {0: (1.0, 1.0)} for cell in cells.values() if len(cell) > 1]
    losses: dict[str, list[float]] = defaultdict(list)
    for cell in swept:
        best = max(measured for _, measured in cell.values())
        planned = max(cell, key=lambda gamma: cell[gamma][0])
        losses["plan"].append(1.0 - cell[planned][1] / best)
        for gamma in cell:
            losses["never" if gamma == 0 else f"k{gamma}"].append(1.0 - cell[gamma][1] / best)
    means = {name: float(np.mean(each)) for name, each in losses.items()}
    everywhere = [
        name for name, each in losses.items() if name != "plan" and len(each) == len(swept)
    ]
    return {
        "cells": len(swept),
        **{
            name: means.get(name)
            for name in ("plan", "never", *(f"k{gamma}" for gamma in CONSTANTS))
        },
        "best_constant": min(everywhere, key=lambda name: means[name], default=None),
    }
