"""Rows of measured servers, and what is predicted for each.

Columns: source, model, hardware, tp, batch (requests in the system), context (mean tokens in the cache), draft, gamma,
acceptance, metric, value, engine, weight_dtype, kv_dtype, prompt_len, output_len, isolated_decode, note. Metrics:

    tpot_ms                             between tokens of one request, prefills of others inside
    ttft_ms, request_ms                 to the first token; of a whole request
    tokens_per_s                        of the batch, decoding alone
    output_tokens_per_s_with_prefill    of a static batch, its own prefill inside
    speedup                             of speculation over none

`acceptance` is a rate, or "mean length E": tokens per step. Each row is compared as seconds (per token, or of a
request), or as a speedup. A cache without a format is in 8 bits beside mxfp4 where the device computes in it, as
InferenceMAX serves gpt-oss on Blackwell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from magicdec.counts import Array, expected_tokens_per_step
from magicdec.errors import ConfigError
from magicdec.perfmodel.forward import prefill
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.serving import serving_time
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import StepTerms, step_terms
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import OWN_METHOD, SamplingSpec, SpeculationSpec
from magicdec.units import MILLI
from magicdec.validate.csv_rows import Count, Length, Size
from magicdec.validate.names import engine_name, format_name, model_name, weight_format

Metric = Literal[
    "tpot_ms", "ttft_ms", "request_ms", "tokens_per_s", "output_tokens_per_s_with_prefill", "speedup"
]  # fmt: skip
ISOLATED_RATIO = 4.0
"""Output this many times the prompt is decoding alone: the prefills of others are a few per cent of it."""
GREEDY = SamplingSpec()
"""Servers are measured with their benchmarks' defaults, which are greedy."""


COLUMNS = {"tp_size": "tp", "batch_size": "batch", "engine_version": "engine"}


class ServingRow(msgspec.Struct, frozen=True, kw_only=True, rename=COLUMNS):
    """One measured configuration. Raises ConfigError for what is not known."""

    where: str = ""
    source: str
    model: str
    hardware: str
    engine_version: str
    tp_size: Count
    batch_size: Size
    metric: Metric
    value: Annotated[float, msgspec.Meta(ge=1e-9, le=1e12)]
    context: Length | None = None
    prompt_len: Length = 0.0
    output_len: Length = 0.0
    draft: str = "none"
    gamma: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 0
    acceptance: str = ""
    weight_dtype: str = "bf16"
    kv_dtype: str = ""
    isolated_decode: str = "no"
    note: str = ""

    def __post_init__(self) -> None:
        """Puts the catalog's names in place of the table's."""
        msgspec.structs.force_setattr(self, "model", model_name(self.model))
        hardware, weights = load_hardware(self.hardware), _weight_format(self)
        usual = "fp8" if weights == "mxfp4" and hardware.computes_in("mxfp4") else "bf16"
        precision = Precision(weight_dtype=weights, kv_dtype=format_name(self.kv_dtype) or usual)
        names = {"hardware": hardware.name, "weight_dtype": precision.weight_dtype, "kv_dtype": precision.kv_dtype}
        for name, value in names.items():
            msgspec.structs.force_setattr(self, name, value)
        engine = load_engine(self.engine)
        if self.metric == "speedup" or self.gamma:
            tokens_per_step(self)
            row_setup(self, engine)

    @property
    def engine(self) -> str:
        """The profile's name."""
        return engine_name(self.engine_version)

    @property
    def context_len(self) -> float:
        return self.prompt_len + self.output_len / 2.0 if self.context is None else self.context

    @property
    def is_isolated(self) -> bool:
        """Whether hardly any prefill of others is inside its figures."""
        is_long = self.prompt_len > 0 and self.output_len >= ISOLATED_RATIO * self.prompt_len
        return self.isolated_decode == "yes" or is_long

    @property
    def measured(self) -> float:
        """Seconds, or a speedup."""
        if self.metric == "speedup":
            return self.value
        return self.value * MILLI if self.metric.endswith("_ms") else self.batch_size / self.value

    @property
    def is_left_out(self) -> bool:
        """Whether its note says that requests queued, or that it lies below the bytes that must be read."""
        return any(words in self.note for words in ("queue", "below"))


def _weight_format(row: ServingRow) -> str:
    """The experts' format where a note names it ("moe_quant=fp8_block"): they are nearly all weights. A checkpoint that
    is published in blocks of fp8 is served as it is."""
    found = row.note.split("moe_quant=")[1].split(";")[0].strip() if "moe_quant=" in row.note else row.weight_dtype
    return weight_format(load_model_spec(row.model), found)


def predict_rows(rows: Sequence[ServingRow], engines: Mapping[str, EngineProfile] | None = None) -> Array:
    """Seconds or speedup of each row, as `measured`; `engines` replaces profiles of the catalog by name.

    An engine's constants may be columns of n values: the result then is (n, rows).
    """
    found: dict[int, Array] = {}
    for indices in alike(rows).values():
        some = [rows[index] for index in indices]
        engine = (engines or {}).get(some[0].engine) or load_engine(some[0].engine)
        engine = engine.of_version(some[0].engine_version.partition(" ")[2])
        found.update(zip(indices, np.moveaxis(_predict_alike(some, engine), -1, 0), strict=True))
    return np.stack(np.broadcast_arrays(*(found[index] for index in range(len(rows)))), axis=-1)


def alike(rows: Sequence[ServingRow]) -> dict[tuple[Any, ...], list[int]]:
    """The places of rows that differ in numbers only."""
    places: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        key = (row.model, row.hardware, row.engine_version, row.weight_dtype, row.kv_dtype, row.draft, row.metric)
        places[key].append(index)
    return places


def _column(rows: Sequence[ServingRow], name: str) -> Array:
    return np.array([getattr(row, name) for row in rows], dtype=np.float64)


def row_setup(row: ServingRow, engine: EngineProfile) -> Setup:
    """The setup that a row was measured with."""
    return Setup.of(
        row.model, row.hardware, engine, _speculation(row), sampling=GREEDY, weight_dtype=row.weight_dtype,
        kv_dtype=row.kv_dtype,
    )  # fmt: skip


def _speculation(row: ServingRow) -> SpeculationSpec:
    if row.draft == "none":
        return SpeculationSpec()
    method: Any = row.draft if row.draft in OWN_METHOD else "full"
    return SpeculationSpec(draft=row.draft, draft_method=method, gamma=row.gamma)


def tokens_per_step(row: ServingRow) -> float:
    """Expected tokens per step of a row that speculates: measured, or of a rate at every position.

    Raises ConfigError for what is neither.
    """
    words = row.acceptance.split()
    try:
        value = float(words[-1])
    except (ValueError, IndexError):
        value = float("nan")
    if row.acceptance.startswith("mean length") and 1.0 <= value <= row.gamma + 1.0:
        return value
    if len(words) == 1 and 0.0 <= value <= 1.0:
        return float(expected_tokens_per_step(np.full(row.gamma, value), row.gamma))
    raise ConfigError(
        f"column 'acceptance' must be a rate, or 'mean length' and at most gamma + 1 tokens, not '{row.acceptance}'"
    )


def row_steps(rows: Sequence[ServingRow], engine: EngineProfile) -> tuple[Setup, StepTerms, Array]:
    """The steps of rows that differ in numbers only, with their setup and tp sizes."""
    setup, tp, kv_len = row_setup(rows[0], engine), _column(rows, "tp_size"), _column(rows, "context_len")
    gamma = _column(rows, "gamma") if rows[0].metric == "speedup" else np.zeros(len(rows))
    batch = _column(rows, "batch_size")
    terms = step_terms(setup, batch=batch, kv_len=kv_len, draft_kv_len=kv_len, gamma=gamma, tp_size=tp)
    return setup, terms, tp


def _predict_alike(rows: Sequence[ServingRow], engine: EngineProfile) -> Array:
    """Rows that differ in numbers only."""
    setup, metric = row_setup(rows[0], engine), rows[0].metric
    batch, tp = _column(rows, "batch_size"), _column(rows, "tp_size")
    prompt, output = _column(rows, "prompt_len"), _column(rows, "output_len")
    if metric == "speedup":
        _, terms, _ = row_steps(rows, engine)
        emitted = np.array([tokens_per_step(row) for row in rows])
        speedup: Array = terms.autoregressive.total_s * emitted / terms.step_s
        return speedup
    if metric in ("tokens_per_s", "output_tokens_per_s_with_prefill") or not np.all(output > 0):
        step = row_steps(rows, engine)[1].autoregressive.total_s
        if metric != "output_tokens_per_s_with_prefill":
            return np.broadcast_to(step, batch.shape)
        first = prefill(setup.model, setup.at, batch=batch, prompt_len=prompt, tp=tp).total_s
        per_token: Array = step + first / output
        return per_token
    time = serving_time(setup, concurrency=batch, prompt_len=prompt, output_len=output, tp_size=tp)
    return {"tpot_ms": time.tpot_s, "ttft_ms": time.ttft_s, "request_ms": time.request_s}[metric]
