"""Reads tables of servers that were measured with and without speculation, one pair a row.

Columns: source, model, hardware, engine, engine_version, tp, concurrency, prompt_len, output_len,
draft, draft_detail, gamma, tokens_per_step, weight_dtype, kv_dtype, unit, baseline, speculative,
note; for look-ups also drafted_share and tokens_per_drafted_step; for drafts that branch top_k and
draft_tokens, the verified ones with the root among them, `gamma` being the draft passes (or all in
draft_detail: "topk 3, 6 draft tokens"); `graphs`: "none" or "eager", "piecewise", or the
engine's own (a note that names eager passes says so too); and `use`: a row whose use does not
begin with "score" is not judged. Units: `tok_s`, output tokens per second of the whole server
(prefill inside, unless the note says "decode only"); `tpot_*_ms`, the time between tokens. A row
without lengths gets those of the workload named in its note (`WORKLOADS`), or else `PROMPT_LEN` and
`OUTPUT_LEN`. A row without a concurrency gets one user.

A look-up drafts in some steps only. `tokens_per_step` is over all steps, `drafted_share` the share
of steps that had a draft (or in the note: "drafted steps 0.43"); vLLM's mean acceptance length
counts those alone and goes into `tokens_per_drafted_step`. Any two of the three give the third:

    tokens_per_step = 1 + drafted_share · (tokens_per_drafted_step − 1)
"""

from __future__ import annotations

import re
from functools import cached_property
from math import isnan, nan
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from magicdec.errors import ConfigError, unknown_choice
from magicdec.naming import draft_by_name
from magicdec.perfmodel.acceptance import LOOKUP_PRECISION
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.trees import MAX_TREE
from magicdec.specs.catalog import load_model_spec, model_names
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.formats import format_name, is_weight_format
from magicdec.specs.names import model_name
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import (
    MAX_GAMMA,
    OWN_METHOD,
    SELF,
    SPARSE_METHODS,
    SamplingSpec,
    SpeculationSpec,
    TreeSpec,
)
from magicdec.units import MILLI
from magicdec.validate.rows import (
    NEWEST,
    Count,
    Length,
    Positive,
    engine_name,
    weight_format,
)

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


DRAFTED_STEPS = re.compile(r"drafted steps (\d\.\d+)")
"""The share of the steps that had a draft, in a note."""
TREE = re.compile(r"top-?k (\d+), (\d+) draft tokens", re.IGNORECASE)
"""Details of a draft that branches: top-k, and the verified tokens of a sequence."""


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
        if len(self._versions) > 1:
            stated = self.engine_version or "no version"
            assumptions.append(f"{stated} of {self.engine} read as {self.version}")
        if isnan(self.concurrency):
            assumptions.append("one user assumed")
        if draft_of(self.setup).is_by_sequence and self.drafted_share is None:
            assumptions.append(f"drafted share taken as {self.share:.2f}")
        return assumptions

    @property
    def is_rate(self) -> bool:
        """Whether the figures are tokens per second rather than seconds per token."""
        return self.unit == "tok_s"

    @property
    def is_decoding(self) -> bool:
        """Whether a rate leaves out prefill."""
        stated = re.search(r"decod\w* (only|alone)", self.note) is not None
        return self.is_rate and stated

    @property
    def measured(self) -> tuple[float, float]:
        """Seconds per token without and with speculation: of the whole server if the row states a
        rate, of one request if it states a latency."""
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
        engine = load_engine(engine_name(self.engine)).of_version(self.version)
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
    def version(self) -> str:
        """The likeliest version of its engine."""
        return self._versions[0]

    @cached_property
    def _versions(self) -> list[str]:
        """The versions that its row may mean and that run the draft, the likeliest first."""
        newest = load_engine(engine_name(self.engine))
        meant = newest.versions_meant(self.engine_version) or [NEWEST]
        if len(meant) == 1:
            return meant
        speculation = self._drafting().speculation
        draft, method = speculation.draft, speculation.draft_method
        able = [each for each in meant if newest.of_version(each).runs(draft, method)]
        return able or meant

    @property
    def possible_engines(self) -> list[EngineProfile]:
        """The engine in the versions that its row may mean, where it differs; the likeliest
        first."""
        newest = load_engine(engine_name(self.engine))
        found = [self.setup.engine]
        for version in self._versions[1:]:
            profile = newest.of_version(version).as_set(self.path_options)
            if not any(profile.is_like(other) for other in found):
                found.append(profile)
        return found

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
        text = f"{self.graphs}; {self.note}".lower()
        is_eager = self.graphs.lower().startswith("none")
        for remark in re.split(r"[;,()]|\. ", text):
            # a drafter that runs eager says nothing of the target's graphs
            of_draft = "draft" in remark or "head" in remark
            is_eager |= "eager" in re.split(r"[^a-z]+", remark) and not of_draft
        mode = ""
        if self.graphs.lower().startswith("piecewise"):
            mode = "PIECEWISE"
        return PathOptions(enforce_eager=is_eager, cudagraph_mode=mode)

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
            return _StatedDraft(spec, model=name, weight_dtype=self._stated_format())
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
        formats = map(format_name, re.split(r"\W+", self._detail))
        return next(filter(is_weight_format, formats), "")

    def _draft_model_name(self, kind: str) -> str:
        words = [self.draft]
        if kind in DRAFT_MODEL_NAMES:
            words = [self.draft_detail, *re.split(r"[\s,;()]+", self.draft_detail)]
        for word in words:
            if model_name(word) in model_names():
                return model_name(word)
        known = [*OWN_METHOD, *model_names()]
        raise unknown_choice("draft", self.draft_detail or self.draft, known)
