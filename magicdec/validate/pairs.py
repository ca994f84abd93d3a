"""Compares predictions with servers that were measured with and without speculation: the speedup of
each pair, and the gamma that a plan would choose.

Columns: source, model, hardware, engine, engine_version, tp, concurrency, prompt_len, output_len,
draft, draft_detail, gamma, tokens_per_step, weight_dtype, kv_dtype, unit, baseline, speculative,
note; for look-ups also drafted_share and tokens_per_drafted_step; for drafts that branch top_k and
draft_tokens, the verified ones with the root among them, `gamma` being the draft passes (or all in
draft_detail: "topk 3, 6 draft tokens"); `graphs`: "none" or "eager", "piecewise", or the
engine's own (a note that names eager passes says so too); and `use`: a row whose use does not
begin with "score" is not judged. A row without hardware, or one that begins with "unstated", is
priced on the device of a few whose step without a draft is nearest (`name_devices`). Units: `tok_s`, output tokens per
second of the whole server (prefill inside, unless the note says "decode only"); `tpot_*_ms`, the
time between tokens. A row without lengths gets those of the workload named in its note
(`WORKLOADS`), or else `PROMPT_LEN` and `OUTPUT_LEN`. A row without a concurrency gets one user.

A look-up drafts in some steps only. `tokens_per_step` is over all steps, `drafted_share` the share
of steps that had a draft (or in the note: "drafted steps 0.43"); vLLM's mean acceptance length
counts those alone and goes into `tokens_per_drafted_step`. Any two of the three give the third:

    tokens_per_step = 1 + drafted_share · (tokens_per_drafted_step − 1)

The prediction is a plan's: its acceptance is the row's measured tokens per step, or the belief
about its draft and text. The median time between tokens (`tpot_p50_ms`) belongs to the median
request, whose text is easier than the mean step's."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Z_90, Array, constant_rate, expected_tokens_per_step
from magicdec.errors import ConfigError, MagicdecError, unknown_choice
from magicdec.naming import draft_by_name
from magicdec.perfmodel import (
    ENDS,
    LOOKUP_PRECISION,
    MAX_TREE,
    WITHOUT_DRAFT,
    Acceptance,
    AcceptanceProfile,
    Cycle,
    Lane,
    Points,
    Question,
    Setup,
    checkpoint_in,
    draft_of,
    engine_error,
    interval,
    lane_of,
    largest_active,
    load_hardware,
    predict,
    profile_of,
    sequence_rates,
    tokens_error,
    tree_error,
    tree_tokens,
    whole_requests,
)
from magicdec.schema import ErrorSummary
from magicdec.specs import (
    AUTOREGRESSIVE,
    MAX_GAMMA,
    OWN_METHOD,
    SELF,
    SPARSE_METHODS,
    EngineProfile,
    PathOptions,
    Precision,
    SamplingSpec,
    SpeculationSpec,
    TreeSpec,
    load_engine,
    load_model_spec,
    model_name,
    model_names,
    version_number,
)
from magicdec.units import GIGA, MILLI
from magicdec.validate.lanes import JudgedFigure, Lanes, check_source
from magicdec.validate.rows import (
    FORMATS,
    NEWEST,
    Count,
    Length,
    Line,
    Positive,
    columns,
    engine_name,
    format_name,
    places,
    read_rows,
    row_of,
    weight_format,
)

if TYPE_CHECKING:
    import pandas as pd

PROMPT_LEN, OUTPUT_LEN = 512.0, 256.0
"""Lengths assumed for a row that neither states lengths nor names a known workload."""
WORKLOADS = {"sharegpt": (217.0, 186.0)}
"""Mean prompt and output of workloads by name: 217,393 and 185,616 tokens of the 1,000 requests of
vLLM's benchmark.
"""
SHARED_BUDGET = 0.07
"""Share of the cache that a sparse draft reads where its row states neither a share nor a budget.
"""
SMALLEST_BUDGET = 64
UNNAMED = re.compile(r"$|unstated|not stated|unknown", re.IGNORECASE)
UNNAMED_CONTEXT = 800.0
"""Tokens of a request's cache, where neither its device nor its lengths are stated."""
UNNAMED_DEVICES = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-192gb")
UNNAMED_SIZES = ("1", "2", "4", "8")
NAMED_BY_MEMORY = (
    "a100-pcie-80gb",
    "a100-sxm-80gb",
    "h100-pcie-80gb",
    *UNNAMED_DEVICES,
)
"""Devices of which a row that states the memory alone may be."""
SERVER = (
    "model",
    "hardware",
    "tp",
    "engine",
    "engine_version",
    "concurrency",
    "weight_dtype",
    "kv_dtype",
)
"""Columns in which rows of one server are equal, beside the source."""
SIGN_MARGIN = 0.05
"""Distance of a measured speedup from 1 from which its side counts: nearer ones are noise."""
CONSTANTS = (1, 3, 5, 7)
"""Constant gammas that a plan's choice is compared with."""
REQUEST_SPREAD = 0.134
"""Standard deviation of the acceptance rate between the requests of a mixed load: the one number
with which medians and means of 30 loads (gamma 1 to 7, 1 to 256 users) agree."""
STATED_DRAFTS = {
    "eagle-3": "eagle3",
    "eagle3.1": "eagle3",
    "eagle-3.1": "eagle3",
    "deepseek_mtp": "mtp",
    "deepseek-mtp": "mtp",
    "nextn": "mtp",
    "n-gram": "ngram",
    "prompt-lookup": "ngram",
    "d-flash": "dflash",
    "top-k": "topk",
    "vegas": "topk",
}
DRAFT_MODEL_NAMES = ("draft_model", "draft-model", "draft", "model", "standalone")
QUANTIZED_SELF = (
    "quantized-self",
    "quantised-self",
    "quantized_self",
    "self-quantized",
)
SHARES_HEAD = re.compile(
    r"eagle-?3\.1|full vocab|target'?s? (head|vocab)", re.IGNORECASE
)
"""Details of heads that propose tokens of the whole vocabulary, by the target's own output layer.
"""


TEXTS = {
    "summar": "summarisation",
    "humaneval": "code",
    "mbpp": "code",
    "livecodebench": "code",
    "swe-bench": "agentic",
    "gsm8k": "math",
    "math": "math",
    "aime": "math",
    "mt-bench": "chat",
    "mt_bench": "chat",
    "mtbench": "chat",
    "sharegpt": "chat",
    "chat": "chat",
    "rag": "rag",
    "pg19": "long-document",
    "pg-19": "long-document",
    "longbench": "long-document",
    "code": "code",
    "translat": "translation",
}
"""Classes of text by a word of a row's note; the first that is found."""


FIRST_YEAR = 2000
"""From here on the first number of a version is a year's ("Dec 2025")."""
DRAFTED_STEPS = re.compile(r"drafted steps (\d\.\d+)")
"""The share of the steps that had a draft, in a note."""
TREE = re.compile(r"top-?k (\d+), (\d+) draft tokens", re.IGNORECASE)
"""Details of a draft that branches: top-k, and the verified tokens of a sequence."""


TREES = "tokens per second over the chain's"
"""The figure by which trees beside chains are compared."""


class _StatedDraft(NamedTuple):
    """How a row's server drafts."""

    speculation: SpeculationSpec
    model: str = ""
    """The draft model's name in the catalog; "" for drafts that are no model."""
    weight_dtype: str = ""
    """Format of the draft's own weights; "" for the usual one."""


class PairRow(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One measured pair of a table's line. Raises ConfigError for unknown names."""

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
    top_k: Annotated[int, msgspec.Meta(ge=0, le=MAX_TREE)] = 0
    draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TREE)] = 0
    is_device_assumed: bool = False
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
    graphs: str = ""
    use: str = "score"

    def __post_init__(self) -> None:
        if not self.use.startswith("score"):
            raise ConfigError(f"not to be scored: {self.use}")
        stated = TREE.search(self.draft_detail)
        if stated and not self.top_k:
            msgspec.structs.force_setattr(self, "top_k", int(stated[1]))
            msgspec.structs.force_setattr(self, "draft_tokens", int(stated[2]))
        prompt_len, output_len = self._usual_lengths()
        if isnan(self.prompt_len):
            msgspec.structs.force_setattr(self, "prompt_len", prompt_len)
        if isnan(self.output_len):
            msgspec.structs.force_setattr(self, "output_len", output_len)
        if self.unit != "tok_s" and not re.fullmatch(
            r"(tpot|itl)(_\w+)?_ms", self.unit
        ):
            raise ConfigError(
                f"unknown unit '{self.unit}': did you mean tok_s or tpot_mean_ms?"
            )
        self._check_tokens()
        _ = self.setup  # an unknown name is refused here

    def _usual_lengths(self) -> tuple[float, float]:
        if self.is_device_assumed:
            return UNNAMED_CONTEXT - OUTPUT_LEN / 2.0, OUTPUT_LEN
        for workload, lengths in WORKLOADS.items():
            if workload in self.note.lower():
                return lengths
        return PROMPT_LEN, OUTPUT_LEN

    def _check_tokens(self) -> None:
        """Derives tokens per step or drafted share from the other. Raises ConfigError."""
        stated = DRAFTED_STEPS.search(self.note)
        if stated and self.drafted_share is None:
            msgspec.structs.force_setattr(self, "drafted_share", float(stated[1]))
        for name in ("tokens_per_step", "tokens_per_drafted_step"):
            tokens = getattr(self, name)
            if tokens is not None and not 0.0 <= tokens <= self.gamma + 1.0:
                raise ConfigError(
                    f"column '{name}' must be at most gamma + 1, not {tokens:g}"
                )
        share = self.drafted_share
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(
                f"column 'drafted_share' must be above 0, at most 1, not {share:g}"
            )
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
        """Requests in the system; one if the row does not say."""
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
    def draft_len(self) -> float:
        """Mean drafted tokens of the steps with a draft. Suffix decoding drafts as many as are
        likely enough, so its steps with a draft rarely have gamma."""
        if self.draft.lower() != "suffix" or self.tokens_per_step is None:
            return float(self.num_drafted)
        accepted = max(self.tokens_per_step - 1.0, 0.0) / max(self.share, 1e-9)
        return float(np.clip(accepted / LOOKUP_PRECISION, 1.0, self.gamma))

    @property
    def assumptions(self) -> list[str]:
        """Values that the prediction needs and the row does not state."""
        assumptions = []
        if self.is_device_assumed:
            assumptions.append(
                f"{self.tp} x {self.setup.hardware.name} assumed, whose step without a draft is "
                "nearest; decoding alone is compared"
            )
        number = version_number(self.engine_version)
        if not number or number[0] >= FIRST_YEAR:
            stated = self.engine_version or "no version"
            assumptions.append(f"{stated} of {self.engine} read as the newest")
        if isnan(self.concurrency):
            assumptions.append("one user assumed")
        if draft_of(self.setup).is_by_sequence and self.drafted_share is None:
            assumptions.append(f"drafted share taken as {self.share:.2f}")
        return assumptions

    @property
    def task(self) -> str:
        """The class of its text, by its note; "" where that does not say."""
        note = self.note.lower()
        for word, task in TEXTS.items():
            if re.search(rf"\b{word}", note):
                return task
        return ""

    @property
    def is_rate(self) -> bool:
        """Whether the figures are tokens per second rather than seconds per token."""
        return self.unit == "tok_s"

    @property
    def is_decoding(self) -> bool:
        """Whether a rate leaves out prefill, or is compared as if it did."""
        stated = re.search(r"decod\w* (only|alone)", self.note) is not None
        return self.is_rate and (stated or self.is_device_assumed)

    @property
    def measured(self) -> tuple[float, float]:
        """Seconds per token without and with speculation: of the whole server if the row states a
        rate, of one request if it states a latency."""
        if self.is_rate:
            return 1.0 / self.baseline, 1.0 / self.speculative
        return self.baseline * MILLI, self.speculative * MILLI

    @property
    def is_ratio(self) -> bool:
        """Whether the figures are relative to the baseline, so no time follows from them."""
        return self.baseline == 1.0

    @property
    def speedup(self) -> float:
        before, after = self.measured
        return before / after

    @property
    def origin(self) -> str:
        """The source without the place in it."""
        return self.source.split(maxsplit=1)[0]

    @property
    def lane(self) -> Lane:
        return lane_of(self.setup, self.engine_version)

    @property
    def alike(self) -> tuple[Any, ...]:
        """Equal for pairs that differ in numbers only."""
        return (
            self.model,
            self.hardware,
            self.engine,
            self.engine_version,
            self.weight_dtype,
            self.kv_dtype,
            self.draft,
            self.draft_detail,
            self.is_decoding,
            self.path_options,
            self.tree,
        )

    @property
    def load(self) -> tuple[Any, ...]:
        """Equal for pairs that differ in gamma and users only."""
        return *self.alike, self.origin, self.tp, self.prompt_len, self.output_len

    @property
    def twin(self) -> tuple[Any, ...]:
        """Equal for a tree and the chain of as many draft passes of the same run."""
        checkpoint, _, _ = self.draft_detail.partition(";")
        return (
            self.origin,
            self.model,
            self.hardware,
            self.tp,
            self.engine,
            self.engine_version,
            self.weight_dtype,
            self.kv_dtype,
            self.draft,
            checkpoint.strip(),
            self.users,
            self.prompt_len,
            self.output_len,
            self.unit,
            self.note,
            self.gamma,
        )

    @property
    def labels(self) -> dict[str, str]:
        """The parts of its group's name, which ends with the figure compared."""
        precision = self.setup.precision
        compared = "between tokens"
        if self.is_rate:
            compared = "whole requests"
        draft = self.draft
        if self.tree is not None:
            draft = f"{draft} tree"
        return {
            "source": self.origin,
            "model": self.model,
            "hardware": self.setup.hardware.name,
            "draft": draft,
            "formats": f"{precision.weight_dtype}, KV {precision.kv_dtype}",
            "compared": compared,
        }

    @property
    def budget(self) -> int:
        """Slots of a sparse draft, read from its details ("budget 512", "7 % of KV")."""
        text = self.draft_detail.lower()
        slots = re.search(r"budget\D*(\d+)", text)
        if slots:
            return int(slots[1])
        share = SHARED_BUDGET
        percent = re.search(r"([\d.]+) ?%", text)
        if percent:
            share = float(percent[1]) / 100.0
        context = self.prompt_len + self.output_len / 2.0
        return max(int(share * context), SMALLEST_BUDGET)

    @cached_property
    def setup(self) -> Setup:
        """The setup that the row's names stand for. Raises ConfigError for an unknown name."""
        engine = load_engine(engine_name(self.engine))
        engine = engine.of_version(self.engine_version or NEWEST)
        model = load_model_spec(model_name(self.model))
        kv_dtype = format_name(self.kv_dtype)
        drafting = self._drafting()
        draft_model = None
        if drafting.model:
            draft_model = load_model_spec(drafting.model)
        draft_precision = None
        if drafting.weight_dtype:
            draft_precision = Precision(
                weight_dtype=drafting.weight_dtype, kv_dtype=kv_dtype
            )
        return Setup(
            model=model,
            hardware=load_hardware(self.hardware),
            engine=engine.as_set(self.path_options),
            sampling=SamplingSpec(),
            precision=Precision(
                weight_dtype=weight_format(model, self.weight_dtype),
                kv_dtype=kv_dtype,
            ),
            draft_precision=draft_precision,
            draft_model=draft_model,
            speculation=drafting.speculation,
        )

    @property
    def tree(self) -> TreeSpec | None:
        """The shape of drafts that branch; None for chains."""
        if self.top_k < 2:
            return None
        return TreeSpec(top_k=self.top_k, num_steps=self.gamma)

    @property
    def num_drafted(self) -> int:
        """Drafted tokens that a step verifies; where drafts branch, not as many as draft passes."""
        if self.tree is None or not self.draft_tokens:
            return self.gamma
        return self.draft_tokens - 1

    @property
    def path_options(self) -> PathOptions:
        """The options of its server that change the path of a step."""
        text = f"{self.graphs} {self.note}".lower()
        is_eager = self.graphs.lower().startswith("none") or re.search(
            r"\beager\b|enforce[_-]eager", text
        )
        mode = ""
        if self.graphs.lower().startswith("piecewise"):
            mode = "PIECEWISE"
        return PathOptions(enforce_eager=bool(is_eager), cudagraph_mode=mode)

    def _drafting(self) -> _StatedDraft:
        """How the row drafts. Raises ConfigError for an unknown draft model."""
        named = self.draft.lower()
        kind: Any = STATED_DRAFTS.get(named) or draft_by_name(named) or named
        if kind in SPARSE_METHODS:
            return _StatedDraft(
                SpeculationSpec(
                    draft=SELF,
                    draft_method=kind,
                    draft_budget=self.budget,
                    gamma=self.gamma,
                )
            )
        if kind in QUANTIZED_SELF:
            own = self._stated_format() or "int4"
            spec = SpeculationSpec(draft=SELF, draft_method="full", gamma=self.gamma)
            return _StatedDraft(spec, weight_dtype=own)
        if kind not in OWN_METHOD:
            name = self._draft_model_name(kind)
            spec = SpeculationSpec(draft=name, draft_method="full", gamma=self.gamma)
            return _StatedDraft(
                spec, model=name, weight_dtype=self._draft_model_format()
            )
        spec = SpeculationSpec(
            draft=kind, draft_method=kind, gamma=self.gamma, tree=self.tree
        )
        if kind == "eagle3":
            shares = SHARES_HEAD.search(self._detail) is not None
            spec = msgspec.structs.replace(spec, shares_vocabulary=shares)
        return _StatedDraft(spec)

    @property
    def _detail(self) -> str:
        return f"{self.draft} {self.draft_detail}".lower()

    def _stated_format(self) -> str:
        """The number format of the draft's weights that the details name, or ""."""
        for word, dtype in FORMATS.items():
            if word in self._detail:
                return dtype
        return ""

    def _draft_model_format(self) -> str:
        stated = self._stated_format()
        if not stated and "fp8" in self._detail:
            return "fp8"
        return stated

    def _draft_model_name(self, kind: str) -> str:
        words = [self.draft]
        if kind in DRAFT_MODEL_NAMES:
            words = [self.draft_detail, *re.split(r"[\s,;()]+", self.draft_detail)]
        for word in words:
            if model_name(word) in model_names():
                return model_name(word)
        known = [*OWN_METHOD, *model_names()]
        raise unknown_choice("draft", self.draft_detail or self.draft, known)


@dataclass(frozen=True)
class StatedTokens:
    """An acceptance law that gives each of several configurations its stated tokens per step, with
    one rate for all positions. A figure below one token cannot be a mean length, so it is read as
    the rate."""

    tokens: Array
    gamma: Array
    drafted_share: Any = 1.0
    """Share of steps with a draft; the others verify one token."""
    draft_len: Any = None
    """Mean drafted tokens of the steps with a draft; None: gamma."""
    is_of_tree: bool = False
    """Whether the tokens are a tree's, which no chain's rates give."""

    @property
    def is_partly_drafted(self) -> bool:
        return bool(np.any(np.asarray(self.drafted_share) < 1.0))

    @cached_property
    def rates(self) -> Array:
        return np.where(
            self.tokens < 1.0, self.tokens, constant_rate(self.tokens, self.gamma)
        )

    def drafted_share_at(self, gamma: Any) -> Array:
        return np.asarray(self.drafted_share, dtype=np.float64)

    def draft_len_at(self, gamma: Any) -> Array:
        length = self.draft_len
        if length is None:
            length = gamma
        return np.asarray(length, dtype=np.float64)

    def mean_tokens(
        self, middle: Array, *, budget: Any, context: Any, gamma: Any
    ) -> Array:
        """Stated tokens are no belief: nothing of theirs is uncertain."""
        if self.is_of_tree:
            return self.tokens
        return middle

    def tokens_per_step(
        self, *, budget: Any, context: Any, gamma: Any
    ) -> tuple[Array, Array]:
        """The stated tokens, and the probability that all drafts are accepted."""
        expected = expected_tokens_per_step(
            np.repeat(self.rates[:, None], int(self.gamma.max()), axis=1), self.gamma
        )
        return expected, self.rates**self.gamma


class Predicted(NamedTuple):
    """Seconds per token of several pairs, as in `PairRow.measured`, the ends of the speedup's 90 %
    interval, and the probability that it is above 1."""

    baseline_s: Array
    speculative_s: Array
    low: Array
    high: Array
    chance: Array

    @property
    def speedup(self) -> Array:
        return self.baseline_s / self.speculative_s

    @property
    def log_deviation(self) -> Array:
        """Standard deviation of the speedup's logarithm, by its interval."""
        return np.asarray(np.log(self.high / self.low) / (2.0 * Z_90))

    def is_inside(self, pairs: Sequence[PairRow]) -> Array:
        """Whether each pair's measured speedup lies in its interval."""
        measured = np.array([pair.speedup for pair in pairs])
        return np.asarray((self.low <= measured) & (measured <= self.high))


def predict_pairs(
    pairs: Sequence[PairRow],
    tokens: Sequence[float | None],
    engines: Mapping[str, EngineProfile] | None = None,
    *,
    leaves_out_own: bool = False,
    widths: Sequence[float] | None = None,
) -> Predicted:
    """Predictions with these tokens per step; None stands for the believed acceptance, without what a
    pair's own source published of it where `leaves_out_own`. `engines` replaces profiles of the catalog
    by name, and `widths` the error of a speedup that the pairs' engines have in plans. Pairs without a
    known acceptance are NaN."""
    predicted = np.full((len(Predicted._fields), len(pairs)), np.nan)
    keys = []
    for pair, stated in zip(pairs, tokens, strict=True):
        task = None
        if stated is None:
            task = pair.task
        origin = pair.origin if leaves_out_own else ""
        keys.append([(*pair.alike, task, origin)])
    for indices in places(keys).values():
        rows = [pairs[index] for index in indices]
        setup = rows[0].setup
        if engines is not None and setup.engine.name in engines:
            profile = engines[setup.engine.name].of_version(
                rows[0].engine_version or NEWEST
            )
            profile = profile.as_set(rows[0].path_options)
            setup = dataclasses.replace(setup, engine=profile)
        tokens_of_rows = [tokens[index] for index in indices]
        width: Any = engine_error(setup)
        if widths is not None:
            width = np.array([widths[index] for index in indices])
        without = rows[0].origin if leaves_out_own else ""
        predicted[:, indices] = _predict_alike(
            setup, rows, tokens_of_rows, width=width, without=without
        )
    return Predicted(*predicted)


def judged_pairs(pairs: Sequence[PairRow], predicted: Predicted) -> list[JudgedFigure]:
    """The figures of the pairs that state their tokens per step, at which they were predicted."""
    judged = []
    for place, pair in enumerate(pairs):
        if pair.tokens_per_step is None or not np.isfinite(predicted.speedup[place]):
            continue
        before_s, after_s = pair.measured
        of_engine = engine_error(pair.setup)
        of_kernels = max(predicted.log_deviation[place] ** 2 - of_engine**2, 0.0)
        judged.append(
            JudgedFigure(
                lane=pair.lane,
                source=pair.origin,
                figure="speedup",
                log_error=float(np.log(predicted.speedup[place] / pair.speedup)),
                of_kernels=float(np.sqrt(of_kernels)),
                log_speedup=float(np.log(predicted.speedup[place])),
                device=pair.setup.hardware.name,
            )
        )
        if pair.is_ratio:
            continue
        judged += [
            JudgedFigure(
                lane=pair.lane._replace(draft=WITHOUT_DRAFT),
                source=pair.origin,
                figure="step without a draft",
                log_error=float(np.log(predicted.baseline_s[place] / before_s)),
                device=pair.setup.hardware.name,
            ),
            JudgedFigure(
                lane=pair.lane,
                source=pair.origin,
                figure="speculative step",
                log_error=float(np.log(predicted.speculative_s[place] / after_s)),
                device=pair.setup.hardware.name,
            ),
        ]
    return judged


def judged_beliefs(pairs: Sequence[PairRow], lanes: Lanes) -> list[JudgedFigure]:
    """The speedups of all pairs as a plan answers, their acceptance believed: neither what a pair's own
    source published of it is known, nor what its servers add to the width of a lane."""
    predicted = predict_pairs(
        pairs,
        [None] * len(pairs),
        leaves_out_own=True,
        widths=[width_without_own(pair, lanes) for pair in pairs],
    )
    is_inside = predicted.is_inside(pairs)
    judged = []
    for place, pair in enumerate(pairs):
        if np.isfinite(predicted.speedup[place]):
            judged.append(
                JudgedFigure(
                    lane=pair.lane,
                    source=pair.origin,
                    figure="speedup, acceptance believed",
                    log_error=float(np.log(predicted.speedup[place] / pair.speedup)),
                    log_speedup=float(np.log(predicted.speedup[place])),
                    chance=float(predicted.chance[place]),
                    is_inside=bool(is_inside[place]),
                    device=pair.setup.hardware.name,
                )
            )
    return judged


def width_without_own(pair: PairRow, lanes: Lanes) -> float:
    """The error of a pair's speedup that a plan would have without the pair's source."""
    width, owner = lanes.width(pair.lane, "speedup", without=pair.origin)
    if owner == pair.lane:
        return width
    return max(width, pair.setup.engine.errors.speedup_relative_error)


def without_source(
    pairs: Sequence[PairRow], tokens: Sequence[float | None], source: str
) -> Predicted:
    """Predictions from what the other sources' tables and rows tell; those of other sources are NaN.
    Raises ConfigError for a source that no pair has."""
    check_source(source, [pair.origin for pair in pairs])
    lanes = Lanes(judged_pairs(pairs, predict_pairs(pairs, tokens_of_cells(pairs))))
    own = [place for place, pair in enumerate(pairs) if pair.origin == source]
    values = np.full((len(Predicted._fields), len(pairs)), np.nan)
    values[:, own] = predict_pairs(
        [pairs[place] for place in own],
        [tokens[place] for place in own],
        leaves_out_own=True,
        widths=[width_without_own(pairs[place], lanes) for place in own],
    )
    return Predicted(*values)


def believed_acceptance(row: PairRow, *, without: str = "") -> AcceptanceProfile:
    """The acceptance that a plan takes for a row's draft and text, nobody having measured it, and a
    source having published nothing."""
    setup = row.setup
    model = setup.model.name
    spec = setup.speculation
    kind = spec.draft_method
    if kind == "full" and spec.draft == SELF:
        kind = "self-quantised"
    budget = None
    if spec.draft_budget is not None:
        budget = float(spec.draft_budget)
    question = Question(
        model=model,
        kind=kind,
        billions=setup.model.num_parameters / GIGA,
        task=row.task,
        context=row.prompt_len,
        budget=budget,
        without=without,
    )
    if kind == "full":
        question = question._replace(draft=spec.draft)
    elif kind != "self-quantised":
        draft = checkpoint_in(f"{row.draft} {row.draft_detail}", question)
        question = question._replace(draft=draft)
    return profile_of(question, draft=spec.draft, method=spec.draft_method)


def without_draft(setup: Setup) -> Setup:
    """The server of this setup, with no draft."""
    return dataclasses.replace(
        setup,
        speculation=AUTOREGRESSIVE,
        draft_model=None,
        draft_precision=None,
    )


def _predict_alike(
    setup: Setup,
    rows: Sequence[PairRow],
    tokens: Sequence[float | None],
    *,
    width: Any,
    without: str = "",
) -> Array:
    """Rows of one setup, [figures of `Predicted`, rows], with these errors of the engine's; `without`:
    source whose published acceptance is not believed in."""
    names = ("users", "prompt_len", "output_len", "tp", "budget")
    users, prompt_len, output_len, tp, budgets = columns(rows, *names)
    gamma = np.array([row.num_drafted for row in rows])
    spec = setup.speculation
    profile: AcceptanceProfile | None = None
    law: Acceptance
    if tokens[0] is None:
        profile = law = believed_acceptance(rows[0], without=without)
    else:
        shares = np.array([row.share for row in rows])
        is_of_tree = spec.tree is not None
        law = StatedTokens(
            np.array(tokens, np.float64),
            gamma,
            shares,
            draft_len=np.array([row.draft_len for row in rows]),
            is_of_tree=is_of_tree,
        )
    alone = without_draft(setup)

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
            batch=batch,
            context=prompt_len,
            tp=tp,
            gamma=gamma,
            budget=budget,
            gen_len=output_len,
        )

    before = predict(alone, None, at(alone, np.zeros_like(gamma), None))
    budget = None
    if spec.draft_budget is not None:
        budget = budgets
    after = predict(setup, law, at(setup, gamma, budget))
    gains = interval(after, tokens_error(after, profile)).gains
    expected = after.full(after.speedup)
    # errors of the median request's tokens, beside those of the costs
    of_request = np.zeros(len(rows))
    if rows[0].is_decoding:
        baseline_s = before.full(1.0 / before.tokens_per_s)
        speculative_s = after.full(1.0 / after.tokens_per_s)
    else:
        requests = whole_requests(after, output_len=output_len)
        alone_requests = whole_requests(before, output_len=output_len)
        is_rate = np.array([row.is_rate for row in rows])

        def seconds_per_token(cycle: Cycle) -> Array:
            of_server_s = cycle.in_slot_s / (cycle.active * output_len)
            return np.where(is_rate, of_server_s, cycle.tpot_s)

        baseline_s = seconds_per_token(alone_requests.alone)
        speculative_s = seconds_per_token(requests.drafted)
        is_median = np.array([row.unit.startswith("tpot_p50") for row in rows])
        if is_median.any():
            tokens_expected = after.full(after.expected_tokens_per_step)
            factors = np.where(is_median, median_request(tokens_expected, gamma), 1.0)
            speculative_s = speculative_s / factors
            of_request = np.log(factors)
        whole = requests.gains(gains)
        gains = dataclasses.replace(
            gains,
            speedups=np.where(is_rate, whole.speedups, gains.speedups),
            deviations=np.where(is_rate, whole.deviations, gains.deviations),
        )
        expected = np.where(is_rate, requests.speedup_at(expected), expected)
    # a server without a draft may hold more requests at once than one with: pairs are not plans' rows
    scale = baseline_s / speculative_s / expected
    others = np.maximum(gains.deviations**2 - engine_error(setup) ** 2, 0.0)
    gains = dataclasses.replace(
        gains,
        speedups=gains.speedups * scale,
        deviations=np.sqrt(others + width**2 + of_request**2),
        most=gains.most * scale,
    )
    low, high = gains.quantiles(ENDS)
    return np.array(
        np.broadcast_arrays(baseline_s, speculative_s, low, high, gains.above())
    )


def median_request(tokens: Array, gamma: Array) -> Array:
    """Tokens per step of the median request over those of all steps, where the rates of requests
    differ by `REQUEST_SPREAD`: slow requests take more of the steps than of the requests. How much
    a load's rates differ is not stated (requests of one kind hardly do), so this factor is as
    uncertain as it is large."""
    factors = []
    for expected, deepest in zip(tokens, gamma, strict=True):
        factors.append(_median_factor(float(expected), int(deepest)))
    return np.array(factors)


@lru_cache(maxsize=1024)
def _median_factor(expected: float, gamma: int) -> float:
    """Solves for the mean rate at which all requests together make `expected` tokens per step."""
    from scipy.optimize import brentq

    def of_requests(mean: float) -> tuple[Array, Array, float]:
        """Tokens per step of the requests, their weights, and steps per token of all."""
        rates, weights = sequence_rates(mean, REQUEST_SPREAD)
        by_position = np.repeat(rates[:, None], gamma, axis=1)
        tokens = expected_tokens_per_step(by_position, gamma)
        return tokens, weights, float(weights @ (1.0 / tokens))

    within = float(np.clip(expected, 1.01, gamma + 0.99))

    def excess(mean: float) -> float:
        _, _, steps_per_token = of_requests(mean)
        return 1.0 / steps_per_token - within

    mean = brentq(excess, 1e-3, 1.0 - 1e-3)
    tokens, weights, steps_per_token = of_requests(float(mean))
    middle = np.searchsorted(np.cumsum(weights), 0.5)
    return float(tokens[middle]) * steps_per_token


def read_pairs(paths: Sequence[Path]) -> tuple[list[PairRow], list[str]]:
    """The usable rows and one line for each other; rows of devices that nobody named are on the
    nearest."""
    return read_rows(paths, PairRow, fill=name_devices)


def name_devices(lines: list[Line]) -> None:
    """Puts a device and its number into the lines that name none: of a few the one whose step
    without a draft is nearest to the measured ones of its server. With two free choices this is a
    weak test of steps with a draft, and none of those without."""
    servers = []
    for line in lines:
        is_unnamed = UNNAMED.match(line.get("hardware", "")) is not None
        server = None
        if is_unnamed:
            server = (line.get("source", "").partition(" ")[0], *map(line.get, SERVER))
        servers.append([server] if server else [])
    for own in places(servers).values():
        chosen = _nearest([lines[place] for place in own])
        for place in own:
            lines[place] |= chosen


def _nearest(lines: Sequence[Line]) -> Line:
    """The cells of the device and number nearest to these lines of one server; none where no line
    can be read or no device holds the model."""
    memory = re.search(r"(\d+) ?gb", lines[0]["hardware"].lower())
    devices: Sequence[str] = UNNAMED_DEVICES
    if memory:
        devices = tuple(name for name in NAMED_BY_MEMORY if f"-{memory[1]}gb" in name)
    sizes: Sequence[str] = UNNAMED_SIZES
    if lines[0]["tp"]:
        sizes = (lines[0]["tp"],)
    best: Line = {}
    least = np.inf
    for device in devices:
        for tp in sizes:
            cells = {"hardware": device, "tp": tp, "is_device_assumed": "true"}
            apart = _apart([line | cells for line in lines])
            if apart < least:
                best, least = cells, apart
    return best


def _apart(lines: Sequence[Line]) -> float:
    """How far the steps without a draft are from the measured ones, in the median of their
    logarithms; infinite where they cannot be predicted."""
    errors = []
    for line in lines:
        try:
            row = row_of(line, PairRow)
        except MagicdecError:
            continue
        point = Points(
            batch=row.users, context=row.prompt_len, tp=row.tp, gen_len=row.output_len
        )
        prediction = predict(without_draft(row.setup), None, point)
        if not np.all(prediction.memory.fits):
            return np.inf
        per_token_s = 1.0 / float(prediction.tokens_per_s)
        if not row.is_rate:
            per_token_s *= row.users
        errors.append(np.log(per_token_s / row.measured[0]))
    if not errors:
        return np.inf
    return abs(float(np.median(errors)))


def validate_pairs(
    paths: Sequence[Path],
    *,
    acceptance: Literal["measured", "shipped"] = "measured",
    leave_out: str = "",
) -> dict[str, Any]:
    """{"groups": […], "choice": {…}, "assumed": [one line per row], "refused": [likewise]}.

    Trees are judged by their measured tokens per step, as any draft, and beside the chain of as many
    verified tokens by what they make over it. `assumed` lists the rows that lack a value which the
    prediction needs, `refused` the rows that are not judged. With `leave_out` a source's rows alone
    are judged, by intervals whose widths come from the other sources.

    Raises ConfigError for a file that cannot be read or lacks a column, and when no row can be
    judged.
    """
    pairs, refused = read_pairs(paths)
    is_measured = acceptance == "measured"
    tokens: list[float | None] = [None] * len(pairs)
    lacking = "no acceptance"
    if is_measured:
        tokens = tokens_of_cells(pairs)
        lacking = "no measured tokens per step"
    if leave_out:
        predicted = without_source(pairs, tokens, leave_out)
    else:
        predicted = predict_pairs(pairs, tokens)
    names: list[list[str]] = []
    for pair, speedup in zip(pairs, predicted.speedup, strict=True):
        if leave_out and pair.origin != leave_out:
            names.append([])
            continue
        is_unstated = is_measured and pair.tokens_per_step is None
        if is_unstated or not np.isfinite(speedup):
            refused.append(f"{pair.where}: {lacking} of {pair.draft} for {pair.model}")
            names.append([])
        else:
            labels = pair.labels
            names.append(["/".join(labels.values()), f"all/{labels['compared']}"])
    groups = []
    for name, chosen in sorted(places(names).items()):
        groups.append(_group(name, pairs, np.array(chosen), predicted))
    trees = trees_over_chains(pairs)
    if leave_out:
        trees = [each for each in trees if each.tree.origin == leave_out]
    groups += _tree_groups(trees)
    assumed = []
    for pair in pairs:
        if pair.assumptions:
            assumed.append(f"{pair.where}: {', '.join(pair.assumptions)}")
    return {
        "groups": groups,
        "choice": _choice(pairs, predicted.speedup),
        "assumed": assumed,
        "refused": refused,
    }


class TreeOverChain(NamedTuple):
    """A tree of as many verified tokens as the chain of the same run, and what it makes over it."""

    tree: PairRow
    chain: PairRow
    rates: Array
    """Conditional rates of the chain by position: one that gives its measured tokens per step."""
    step_ratio: float
    """Seconds of the tree's step over the chain's, predicted."""

    @property
    def measured(self) -> float:
        """Tokens per second over the chain's."""
        _, of_chain = self.chain.measured
        _, of_tree = self.tree.measured
        return of_chain / of_tree

    def predicted(self, **law: float) -> float:
        """The ratio that the rates and the cost of the chain alone lead to; `law`: other numbers for `tree_tokens`."""
        assert self.tree.tree is not None
        assert self.chain.tokens_per_step is not None
        drafted = self.tree.num_drafted
        tokens = tree_tokens(self.rates, self.tree.tree, drafted, **law)
        return float(tokens) / self.chain.tokens_per_step / self.step_ratio


def trees_over_chains(pairs: Sequence[PairRow]) -> list[TreeOverChain]:
    """The trees whose chain of as many verified tokens is there too, both with measured tokens per
    step."""
    chains = {}
    for pair in pairs:
        if pair.tree is None and pair.tokens_per_step is not None:
            chains[pair.twin] = pair
    found = []
    for pair in pairs:
        chain = chains.get(pair.twin)
        is_equal = pair.tree is not None and pair.num_drafted == pair.gamma
        if is_equal and chain is not None and pair.tokens_per_step is not None:
            found.append((pair, chain))
    if not found:
        return []
    step_s = []
    for own in zip(*found, strict=True):
        tokens = [pair.tokens_per_step for pair in own]
        step_s.append(predict_pairs(own, tokens).speculative_s * np.array(tokens))
    ratios = step_s[0] / step_s[1]
    trees = []
    for (pair, chain), ratio in zip(found, ratios, strict=True):
        of_chain = StatedTokens(
            np.array([chain.tokens_per_step]), np.array([chain.gamma])
        )
        rates = np.repeat(of_chain.rates, chain.gamma)
        trees.append(TreeOverChain(pair, chain, rates, float(ratio)))
    return trees


def _tree_groups(trees: Sequence[TreeOverChain]) -> list[dict[str, Any]]:
    """Errors of what trees make over chains, by model and of all."""
    names = []
    for each in trees:
        labels = each.tree.labels | {"compared": TREES}
        names.append(["/".join(labels.values()), f"all/{TREES}"])
    groups = []
    for name, chosen in sorted(places(names).items()):
        own = [trees[place] for place in chosen]
        signed = np.array([each.predicted() / each.measured - 1.0 for each in own])
        errors = [
            float(tree_error(each.tree.tree, each.tree.num_drafted)) for each in own
        ]
        group: dict[str, Any] = {"name": name}
        if not name.startswith("all/"):
            group |= own[0].tree.labels | {"compared": TREES}
        groups.append(group | ErrorSummary.of(signed, np.array(errors)).figures())
    return groups


def tokens_of_cells(pairs: Sequence[PairRow]) -> list[float | None]:
    """The stated tokens per step of each pair. A pair without gets those that follow from the rate
    at the same load's nearest gamma."""
    by_load: dict[Any, dict[int, float]] = defaultdict(dict)
    for pair in pairs:
        if pair.tokens_per_step is not None:
            by_load[pair.load][pair.gamma] = pair.tokens_per_step
    tokens: list[float | None] = []
    for pair in pairs:
        by_gamma = by_load[pair.load]
        if pair.tokens_per_step is not None or not by_gamma:
            tokens.append(pair.tokens_per_step)
        else:
            tokens.append(_tokens_at(pair.gamma, by_gamma))
    return tokens


def _tokens_at(gamma: int, stated: Mapping[int, float]) -> float:
    """Tokens per step at this gamma by the rate at the nearest stated one, the deeper of two."""
    near = min(stated, key=lambda other: (abs(other - gamma), -other))
    tokens = np.array([stated[near]])
    rates = StatedTokens(tokens, np.array([near])).rates
    by_position = np.repeat(rates[:, None], gamma, axis=1)
    return float(expected_tokens_per_step(by_position, gamma)[0])


def _group(
    name: str,
    pairs: Sequence[PairRow],
    chosen: np.ndarray,
    predicted: Predicted,
) -> dict[str, Any]:
    """Errors of the speedup and of both rates, and how often the sign is right outside a margin."""
    own = [pairs[index] for index in chosen]
    measured = np.array([pair.speedup for pair in own])
    seconds = np.array([pair.measured for pair in own])
    speedup = predicted.speedup[chosen]
    is_far = np.abs(measured - 1.0) > SIGN_MARGIN
    signs = np.sign(speedup - 1.0) == np.sign(measured - 1.0)
    group: dict[str, Any] = {"name": name}
    if not name.startswith("all/"):
        group |= own[0].labels
    group |= ErrorSummary.of(speedup / measured - 1.0).figures()
    group["coverage"] = float(np.mean(predicted.is_inside(pairs)[chosen]))
    group["sign"] = None
    if is_far.any():
        group["sign"] = float(np.mean(signs[is_far]))
    group["rows_with_sign"] = int(is_far.sum())
    of_times = {
        "baseline": (predicted.baseline_s, seconds[:, 0]),
        "speculative": (predicted.speculative_s, seconds[:, 1]),
    }
    for what, (predicted_s, measured_s) in of_times.items():
        errors = ErrorSummary.of(predicted_s[chosen] / measured_s - 1.0)
        group[f"{what}_mape"] = errors.mape
        group[f"{what}_bias"] = errors.bias
    return group


def _choice(pairs: Sequence[PairRow], speedup: Array) -> dict[str, Any]:
    """Mean loss against the best measured gamma, over the loads measured at several gammas: of the
    plan's choice, of never speculating, and of constant gammas. Also the constant that is best in
    hindsight."""
    predicted, measured = _swept_loads(pairs, speedup)
    losses = 1.0 - measured.div(measured.max(axis=1), axis=0)
    losses.columns = [_policy(int(gamma)) for gamma in measured.columns]
    means = losses.mean().dropna()
    everywhere = means[losses.notna().all()]
    of_plan = []
    for load, gamma in predicted.idxmax(axis=1).items():
        of_load = losses.loc[[load], _policy(gamma)].to_numpy()
        of_plan.append(of_load.item())
    choice: dict[str, Any] = {"cells": len(losses), "plan": None}
    if of_plan:
        choice["plan"] = float(np.mean(of_plan))
    for policy in map(_policy, (0, *CONSTANTS)):
        choice[policy] = means.get(policy)
    choice["best_constant"] = None
    if len(everywhere):
        choice["best_constant"] = everywhere.idxmin()
    return choice


def _policy(gamma: int) -> str:
    if gamma == 0:
        return "never"
    return f"k{gamma}"


def _swept_loads(
    pairs: Sequence[PairRow], speedup: Array
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predicted and measured speedups of the loads measured at several gammas, by load and gamma;
    gamma 0 among them.
    """
    import pandas as pd

    rows = []
    for pair, predicted in zip(pairs, speedup, strict=True):
        if pair.is_rate and np.isfinite(predicted):
            load = repr((*pair.load, pair.users))
            rows.append((load, pair.gamma, float(predicted), pair.speedup))
    if not rows:
        return pd.DataFrame(), pd.DataFrame()
    table = pd.DataFrame(rows, columns=["load", "gamma", "predicted", "measured"])
    table = table.drop_duplicates(["load", "gamma"], keep="last")
    cells = table.pivot(index="load", columns="gamma")
    swept = cells[np.count_nonzero(cells["measured"].notna(), axis=1) > 1]
    by_gamma = []
    for name in ("predicted", "measured"):
        speedups = swept[name].copy()
        speedups[0] = 1.0
        by_gamma.append(speedups)
    return by_gamma[0], by_gamma[1]
