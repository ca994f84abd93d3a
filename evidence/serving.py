"""Compares predictions with measured servers, and fits the engines' constants to them. Errors are
grouped by source, hardware, engine, tp, and by what the figure includes.

Columns: source, model, hardware, tp, batch (requests in the system), context (mean tokens in the
cache), draft, gamma, acceptance, metric, value, engine, weight_dtype, kv_dtype, prompt_len,
output_len, isolated_decode, note. Metrics:

    tpot_ms                             between tokens of one request, prefills of others inside
    ttft_ms, request_ms                 to the first token; of a whole request
    tokens_per_s                        of the batch, decoding alone
    output_tokens_per_s_with_prefill    of a static batch, its own prefill inside
    speedup                             of speculation over none

`acceptance` is a rate, or "mean length E": tokens per step. Each row is compared as seconds (per
token, or of a request), or as a speedup. A cache without a stated format is taken to be in 8 bits
if the weights are in mxfp4 and the device computes in it, as InferenceMAX serves gpt-oss on
Blackwell.

A few constants per engine are fitted, each with a prior: factors near 1 (kernel curves come from
tables of single kernels), and fixed costs the size of one launch or one scheduler step. Engines run
similar kernels on the same hosts, so they are fitted together. Each constant is a shared value plus
the engine's own deviation, so an engine borrows from the others what its own rows do not show (a
format, a device). With codes in units of the priors, the fit minimises

    Σ_rows ρ(ln(predicted/measured) / 6 %) + Σ shared² + Σ_engines (deviation / 0.7)²

Every fit leaves out rows whose note says that requests queued or that the figure lies below the
bytes to be read, rows with `is_prefix_cached` or `is_capped`, and copies of a row (some servers
appear in several dumps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import nan
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from evidence.lanes import JudgedFigure, Lanes, check_source
from magicdec.counts import Z_90, Array, expected_tokens_per_step
from magicdec.errors import ConfigError
from magicdec.fitting import Free
from magicdec.perfmodel.forward import prefill
from magicdec.perfmodel.intervals import engine_error, step_errors
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.perfmodel.lanes import FIGURES, WITHOUT_DRAFT, Figure, Lane, lane_of
from magicdec.perfmodel.serving import serving_time
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import StepTerms, step_terms
from magicdec.schema.comparison import ErrorSummary
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, load_engine
from magicdec.specs.formats import format_name
from magicdec.specs.names import model_name
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import OWN_METHOD, SamplingSpec, SpeculationSpec
from magicdec.units import MILLI
from magicdec.validate.rows import (
    Count,
    Length,
    Size,
    columns,
    engine_name,
    places,
    read_rows,
)
from magicdec.validate.rows import weight_format as format_of_weights

Metric = Literal[
    "tpot_ms",
    "ttft_ms",
    "request_ms",
    "tokens_per_s",
    "output_tokens_per_s_with_prefill",
    "speedup",
]
ISOLATED_RATIO = 4.0
"""Output over prompt length from which a figure counts as decoding alone: the prefills of other
requests are a few per cent of it."""
COLUMN_SPELLINGS = {"tp_size": "tp", "batch_size": "batch", "engine_version": "engine"}
LEFT_OUT = ("device", "tp", "model")
ROW_ERROR = 0.06
"""Standard deviation of a row about the model, which sets the weight of the priors."""
OWN_SPREAD = 0.7
"""Standard deviation of an engine's own deviation, in units of a prior's spread."""
CODE_STEP = 1e-3
"""Step of the numerical slopes, in units of a prior's spread."""
MAX_ROUNDS = 60
LEAST_ERROR = 0.03
"""An engine's error is not stated smaller: repetitions of a server differ by about as much."""
UNSEEN_SHARE = 0.93
"""Share of left-out rows that the interval for rows of a further device, tp or model has to hold.
Rows of one device are alike, so an interval that holds 90 % of the known rows holds fewer of the
next."""
MIN_ROWS = 12
"""Rows below which a fit would be its priors."""
MANY_REQUESTS = 512
SHARE_IN_WAVES = 0.5
"""A request waits for half the prompts of those that start with it before its first token, for half
after it."""
PRIORS = {
    "kernels.gemm_factor": Free(prior=1.0, spread=0.07),
    # SGLang 0.5.14's timed kernels take 0.82 to 1.01 of vLLM's time in narrow formats, experts 0.90
    # to 1.07 of the curves', by device and format
    "kernels.narrow_gemm_factor": Free(prior=0.95, spread=0.04),
    "kernels.experts_factor": Free(prior=0.95, spread=0.03),
    "kernels.attention_factor": Free(prior=1.0, spread=0.2),
    "kernels.collective_factor": Free(prior=1.0, spread=0.2),
    "kernels.elementwise_factor": Free(prior=1.0, spread=0.3),
    "overheads.autoregressive_overhead_s": Free(prior=0.4e-3, spread=0.8),
    "overheads.sequence_overhead_s": Free(prior=10e-6, spread=0.8),
    "overheads.older_sequence_overhead_s": Free(prior=30e-6, spread=0.5),
    "scheduler.prefill_factor": Free(prior=1.0, spread=0.15),
    "graphs.prefill_layer_overhead_s": Free(prior=50e-6, spread=0.8),
    "graphs.launch_s": Free(prior=35e-6, spread=0.5),
    "scheduler.prefill_share": Free(prior=0.9, spread=1.0, scale="unit"),
}
Engines = Mapping[str, EngineProfile]
Devices = Mapping[str, HardwareProfile]


class ServingRow(msgspec.Struct, frozen=True, kw_only=True, rename=COLUMN_SPELLINGS):
    """One measured configuration. Raises ConfigError for unknown names."""

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
        """Puts the catalog's names in place of the table's. A note may name the experts' format,
        which nearly all weights have ("moe_quant=fp8_block")."""
        msgspec.structs.force_setattr(self, "model", model_name(self.model))
        hardware = load_hardware(self.hardware)
        _, _, behind = self.note.partition("moe_quant=")
        of_experts, _, _ = behind.partition(";")
        stated = of_experts.strip() or self.weight_dtype
        weights = format_of_weights(load_model_spec(self.model), stated)
        usual = "bf16"
        if weights == "mxfp4" and hardware.computes_in("mxfp4"):
            usual = "fp8"
        precision = Precision(
            weight_dtype=weights, kv_dtype=format_name(self.kv_dtype) or usual
        )
        names = {
            "hardware": hardware.name,
            "weight_dtype": precision.weight_dtype,
            "kv_dtype": precision.kv_dtype,
        }
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
        if self.context is None:
            return self.prompt_len + self.output_len / 2.0
        return self.context

    @property
    def is_isolated(self) -> bool:
        """Whether hardly any prefill of others is inside its figures."""
        is_long = (
            self.prompt_len > 0 and self.output_len >= ISOLATED_RATIO * self.prompt_len
        )
        return self.isolated_decode == "yes" or is_long

    @property
    def measured(self) -> float:
        """Seconds, or a speedup."""
        if self.metric == "speedup":
            return self.value
        if self.metric.endswith("_ms"):
            return self.value * MILLI
        return self.batch_size / self.value

    @property
    def is_left_out(self) -> bool:
        """Whether its note says that requests queued, or that it lies below the bytes that must be
        read.
        """
        return "queue" in self.note or "below" in self.note

    @property
    def is_prefix_cached(self) -> bool:
        """vLLM 0.12.0 and TensorRT-LLM 1.2.0rc6 with fp8 weights among NVIDIA's runs: prompts come
        faster than the device could compute them (to 1,900 of 1,979 TFLOP/s on an H200, and 420 on
        an H100 where decoding alone fills the time between tokens), so most of each prompt was in
        the prefix cache."""
        engine = self.engine_version.startswith(("vllm", "trtllm 1.2.0rc6"))
        return (
            engine and self.source.startswith("NVIDIA") and self.weight_dtype == "fp8"
        )

    @property
    def is_in_waves(self) -> bool:
        """SGLang 0.5.1 among NVIDIA's runs: requests of one length that started together ended together,
        so a first token waited for half of all prompts (9.0 s for 64 prompts of 0.26 s)."""
        return self.engine_version == "sglang 0.5.1.post1"

    @property
    def is_capped(self) -> bool:
        """gpt-oss-120b with 512 requests in vLLM: faster per token than with 64, down to 3.6 ms, so
        most waited.
        """
        return (
            self.model == "gpt-oss-120b"
            and self.engine == "vllm"
            and self.batch_size >= MANY_REQUESTS
        )

    @property
    def origin(self) -> str:
        """Who published it: the benchmark that InferenceMAX became goes by the names of its files
        too."""
        if self.source.startswith(
            (
                "InferenceMAX",
                "InferenceX",
                "db-dump",
                "source_file=2",
                "aiconfigurator 2",
            )
        ):
            return "InferenceX"
        if "gap-analysis" in self.source:
            return "NVIDIA gap-analysis"
        return self.source

    @property
    def lane(self) -> Lane:
        _, _, version = self.engine_version.partition(" ")
        lane = lane_of(row_setup(self, load_engine(self.engine)), version)
        if self.metric == "speedup":
            return lane
        return lane._replace(draft=WITHOUT_DRAFT)

    @property
    def is_fitted_on(self) -> bool:
        left_out = self.is_left_out or self.is_prefix_cached or self.is_capped
        return self.metric == "tpot_ms" and self.gamma == 0 and not left_out

    @property
    def group(self) -> str:
        """source / hardware / engine / parts of a request in the figure."""
        if self.is_left_out:
            what = "queues or below the bytes"
        elif self.metric == "speedup":
            what = "speculative"
        elif self.is_isolated:
            what = "decoding alone"
        else:
            what = "prefill inside"
        return "/".join((self.source, self.hardware, self.engine, what))


def alike(rows: Sequence[ServingRow]) -> list[list[int]]:
    """The places of rows that differ in numbers only."""
    keys = []
    for row in rows:
        key = (
            row.model,
            row.hardware,
            row.engine_version,
            row.weight_dtype,
            row.kv_dtype,
            row.draft,
            row.metric,
        )
        keys.append([key])
    return list(places(keys).values())


def predict_rows(
    rows: Sequence[ServingRow],
    engines: Engines | None = None,
    devices: Devices | None = None,
) -> Array:
    """Seconds or speedup of each row, as `measured`; `engines` and `devices` replace profiles of
    the catalog by name.

    An engine's constants may be columns of n values: the result then is (n, rows).
    """
    by_row: dict[int, Array] = {}
    for indices in alike(rows):
        group = [rows[index] for index in indices]
        name = group[0].engine
        if engines and name in engines:
            engine = engines[name]
        else:
            engine = load_engine(name)
        _, _, version = group[0].engine_version.partition(" ")
        predictions = _predict_alike(group, engine.of_version(version), devices)
        values = np.moveaxis(predictions, -1, 0)
        by_row.update(zip(indices, values, strict=True))
    in_order = [by_row[index] for index in range(len(rows))]
    return np.stack(np.broadcast_arrays(*in_order), axis=-1)


def row_setup(
    row: ServingRow, engine: EngineProfile, devices: Devices | None = None
) -> Setup:
    """The setup that a row was measured with. Server benchmarks sample greedily by default."""
    spec = SpeculationSpec()
    if row.draft != "none":
        method: Any = "full"
        if row.draft in OWN_METHOD:
            method = row.draft
        spec = SpeculationSpec(draft=row.draft, draft_method=method, gamma=row.gamma)
    setup = Setup.of(
        row.model,
        row.hardware,
        engine,
        spec,
        sampling=SamplingSpec(),
        weight_dtype=row.weight_dtype,
        kv_dtype=row.kv_dtype,
    )
    if devices and row.hardware in devices:
        return replace(setup, hardware=devices[row.hardware])
    return setup


def tokens_per_step(row: ServingRow) -> float:
    """Expected tokens per step of a row that speculates: the stated mean length, or the tokens that
    follow from one rate for all positions.

    Raises ConfigError for a text that is neither.
    """
    words = row.acceptance.split()
    try:
        value = float(words[-1])
    except (ValueError, IndexError):
        value = float("nan")
    is_length = row.acceptance.startswith("mean length")
    if is_length and 1.0 <= value <= row.gamma + 1.0:
        return value
    is_rate = len(words) == 1
    if is_rate and 0.0 <= value <= 1.0:
        rates = np.full(row.gamma, value)
        return float(expected_tokens_per_step(rates, row.gamma))
    raise ConfigError(
        "column 'acceptance' must be a rate, or 'mean length' and at most gamma + 1 tokens, "
        f"not '{row.acceptance}'"
    )


def row_steps(
    rows: Sequence[ServingRow], engine: EngineProfile, devices: Devices | None = None
) -> tuple[Setup, StepTerms, Array]:
    """The steps of rows that differ in numbers only, with their setup and tp sizes."""
    setup = row_setup(rows[0], engine, devices)
    tp, kv_len, batch, gamma = columns(
        rows, "tp_size", "context_len", "batch_size", "gamma"
    )
    if rows[0].metric != "speedup":
        gamma = np.zeros(len(rows))
    terms = step_terms(
        setup,
        batch=batch,
        kv_len=kv_len,
        draft_kv_len=kv_len,
        gamma=gamma,
        tp_size=tp,
    )
    return setup, terms, tp


def _predict_alike(
    rows: Sequence[ServingRow], engine: EngineProfile, devices: Devices | None = None
) -> Array:
    """Rows that differ in numbers only."""
    metric = rows[0].metric
    batch, tp, prompt, output = columns(
        rows, "batch_size", "tp_size", "prompt_len", "output_len"
    )
    if metric.endswith("_ms") and np.all(output > 0):
        setup = row_setup(rows[0], engine, devices)
        time = serving_time(
            setup,
            concurrency=batch,
            prompt_len=prompt,
            output_len=output,
            tp_size=tp,
        )
        if metric == "tpot_ms" and rows[0].is_in_waves:
            others_s = SHARE_IN_WAVES * (time.active - 1.0) * time.prompt_s
            return np.asarray(time.token_s + others_s / time.gaps)
        if metric == "tpot_ms":
            return time.tpot_s
        if metric == "ttft_ms":
            return time.ttft_s
        return time.request_s
    setup, terms, _ = row_steps(rows, engine, devices)
    step_s: Array = terms.autoregressive.total_s
    if metric == "speedup":
        tokens = np.array([tokens_per_step(row) for row in rows])
        return np.asarray(step_s * tokens / terms.step_s)
    if metric == "output_tokens_per_s_with_prefill":
        prompts = prefill(setup.model, setup.at, batch=batch, prompt_len=prompt, tp=tp)
        return np.asarray(step_s + prompts.total_s / output)
    return np.broadcast_to(step_s, batch.shape)


def relative_errors(rows: Sequence[ServingRow]) -> Array:
    """One relative standard deviation per prediction, as in a plan's intervals."""
    errors = np.zeros(len(rows))
    for indices in alike(rows):
        group = [rows[index] for index in indices]
        engine = load_engine(group[0].engine)
        of_speedup, of_time = step_errors(*row_steps(group, engine))
        errors[indices] = of_time
        if group[0].metric == "speedup":
            errors[indices] = of_speedup
    return errors


def judged_servers(rows: Sequence[ServingRow]) -> list[JudgedFigure]:
    """The figures of rows that neither queued nor were served from a cache: times of servers without
    a draft, and speedups."""
    judged = []
    predicted = predict_rows(rows)
    deviations = relative_errors(rows)
    for row, value, deviation in zip(rows, predicted, deviations, strict=True):
        if row.is_left_out or row.is_prefix_cached or row.is_capped:
            continue
        figure: Figure = "step without a draft"
        of_kernels = 0.0
        log_speedup = nan
        if row.metric == "speedup":
            figure = "speedup"
            log_speedup = float(np.log(value))
            of_engine = engine_error(row_setup(row, load_engine(row.engine)))
            of_kernels = float(np.sqrt(max(deviation**2 - of_engine**2, 0.0)))
        judged.append(
            JudgedFigure(
                lane=row.lane,
                source=row.origin,
                figure=figure,
                log_error=float(np.log(value / row.measured)),
                of_kernels=of_kernels,
                log_speedup=log_speedup,
                device=row.hardware,
            )
        )
    return judged


def _without_source(rows: Sequence[ServingRow], source: str) -> Array:
    """One standard deviation of each row's prediction by the other sources' rows; NaN for rows of
    other sources. Raises ConfigError for a source that no row has."""
    check_source(source, [row.origin for row in rows])
    lanes = Lanes(judged_servers(rows))
    deviations = np.full(len(rows), np.nan)
    for place, row in enumerate(rows):
        if row.origin == source:
            figure: Figure = "speedup" if row.metric == "speedup" else FIGURES[0]
            deviations[place], _ = lanes.width(row.lane, figure, without=source)
    return deviations


def validate_serving(
    paths: Sequence[Path], *, left_out: bool = False, leave_out: str = ""
) -> dict[str, Any]:
    """{"groups": […], "refused": [one line per row that cannot be judged]}.

    `left_out` adds two figures per kind of group (device, tp, model): the error of each row when
    its group is left out of the engines' fits, and the coverage of intervals whose width comes from
    the errors of the other groups, each left out in turn. With `leave_out` a source's rows alone are
    judged, by intervals whose widths come from the other sources.

    Raises ConfigError for a file that cannot be read or lacks a column, and when no row can be
    judged.
    """
    rows, refused = read_rows(paths, ServingRow)
    measured = np.array([row.measured for row in rows])
    error = predict_rows(rows) / measured - 1.0
    deviations = relative_errors(rows)
    if leave_out:
        deviations = _without_source(rows, leave_out)
    unseen: dict[str, LeftOut] = {}
    if left_out:
        bases = {}
        for engine_name in dict.fromkeys(row.engine for row in rows):
            engine = load_engine(engine_name)
            if engine.fitted_devices:
                bases[engine_name] = engine
        for kind in LEFT_OUT:
            predicted = left_out_predictions(rows, bases, kind)
            log_error = np.log(predicted / measured)
            spread = nested_deviations(rows, log_error, kind)
            unseen[kind] = LeftOut(log_error, spread)
    groups = []
    names = [_group_names(row) if leave_out in ("", row.origin) else () for row in rows]
    for name, chosen in sorted(places(names).items()):
        group: dict[str, Any] = {"name": name}
        group |= ErrorSummary.of(error[chosen], deviations[chosen]).figures()
        for kind, of_kind in unseen.items():
            mape, coverage = of_kind.figures(chosen)
            group[f"mape_other_{kind}"] = mape
            group[f"coverage_other_{kind}"] = coverage
        groups.append(group)
    return {"groups": groups, "refused": refused}


class LeftOut(NamedTuple):
    """Errors of rows whose device, tp or model was left out of the fits."""

    log_error: Array
    deviation: Array

    def figures(self, chosen: Sequence[int]) -> tuple[float | None, float | None]:
        """Mean error and coverage over the chosen rows that could be predicted."""
        indices = np.asarray(chosen)
        known = indices[np.isfinite(self.log_error[indices])]
        if not len(known):
            return None, None
        error = np.expm1(self.log_error[known])
        summary = ErrorSummary.of(error, self.deviation[known])
        return summary.mape, summary.coverage


def _group_names(row: ServingRow) -> tuple[str, str, str]:
    *_, what = row.group.split("/")
    return row.group, f"{row.group}/tp {row.tp_size}", f"all/{what}"


def without_copies(rows: Sequence[ServingRow]) -> list[ServingRow]:
    """One of each set of rows that say the same of one server."""
    first: dict[Any, ServingRow] = {}
    for row in reversed(rows):
        server = (row.hardware, row.engine, row.tp_size, row.batch_size)
        first[server, row.prompt_len, row.output_len, row.value] = row
    return list(first.values())[::-1]


@lru_cache(maxsize=64)
def shape_of(model: str) -> str:
    """A key shared by models of one shape, so V3 and R1 of DeepSeek are left out together."""
    spec = load_model_spec(model)
    return repr((spec.hidden_size, spec.vocab_size, spec.mixers, spec.feed_forwards))


class Joint:
    """Residuals of all engines' rows and of the priors, and their derivatives, as functions of the
    codes: first the shared codes, then each engine's deviations from them.

    The loss is ρ(z) = 2 (√(1 + z²) − 1). It turns a prior's residual c·√(1 + c²/4) into c².
    """

    def __init__(
        self,
        rows: Sequence[ServingRow],
        bases: Engines,
        priors: Mapping[str, Free],
    ) -> None:
        self.priors = priors
        self.bases = bases
        self.size = len(priors)
        self.rows: dict[str, list[ServingRow]] = {}
        self.measured: dict[str, Array] = {}
        self.offsets: dict[str, int] = {}
        for index, name in enumerate(bases):
            own = [row for row in rows if row.engine == name]
            self.rows[name] = own
            self.measured[name] = np.log([row.measured for row in own])
            self.offsets[name] = (index + 1) * self.size

    def engine_codes(self, codes: Array, name: str) -> Array:
        at = self.offsets[name]
        return np.asarray(codes[: self.size] + OWN_SPREAD * codes[at : at + self.size])

    def profile(self, name: str, codes: Array) -> EngineProfile:
        """The engine at (constants,) codes. With (constants, n) codes its constants are columns of
        n values, over which predictions broadcast."""
        constants: dict[str, Any] = {}
        for (key, prior), code in zip(self.priors.items(), codes, strict=True):
            value = prior.at(code)
            if np.ndim(value) == 0:
                constants[key] = float(value)
            else:
                constants[key] = value[:, None]
        return self.bases[name].with_constants(constants)

    def _errors(self, name: str, codes: Array) -> Array:
        predicted = predict_rows(self.rows[name], {name: self.profile(name, codes)})
        return np.asarray((np.log(predicted) - self.measured[name]) / ROW_ERROR)

    def residuals(self, codes: Array) -> Array:
        errors = []
        for name, own in self.rows.items():
            if own:
                errors.append(self._errors(name, self.engine_codes(codes, name)))
        of_priors = codes * np.sqrt(1.0 + codes**2 / 4.0)
        return np.concatenate([*errors, of_priors])

    def jacobian(self, codes: Array) -> Array:
        blocks = []
        # One code moves in each column but the last.
        steps = CODE_STEP * np.eye(self.size, self.size + 1)
        for name, own in self.rows.items():
            if not own:
                continue
            at = self.offsets[name]
            moved = self.engine_codes(codes, name)[:, None] + steps
            errors = np.atleast_2d(self._errors(name, moved))
            slopes = (errors[:-1] - errors[-1]).T / CODE_STEP
            block = np.zeros((len(own), codes.size))
            block[:, : self.size] = slopes
            block[:, at : at + self.size] = OWN_SPREAD * slopes
            blocks.append(block)
        squares = codes**2
        of_priors = (1.0 + squares / 2.0) / np.sqrt(1.0 + squares / 4.0)
        return np.concatenate([*blocks, np.diag(of_priors)])

    def minimised(self, start: Array) -> Any:
        from scipy.optimize import least_squares

        return least_squares(
            self.residuals,
            start,
            jac=self.jacobian,
            loss="soft_l1",
            ftol=1e-5,
            xtol=1e-5,
            max_nfev=MAX_ROUNDS,
        )


def fit_engines(
    rows: Sequence[ServingRow], bases: Engines, priors: Mapping[str, Free] = PRIORS
) -> dict[str, EngineProfile]:
    """`bases` with those constants of `priors` that best explain all rows together. Their values in
    `bases` do not matter."""
    joint = Joint(rows, bases, priors)
    start = np.zeros((len(bases) + 1) * joint.size)
    codes = joint.minimised(start).x
    engines = {}
    for name in bases:
        own_codes = joint.engine_codes(codes, name)
        engines[name] = joint.profile(name, own_codes)
    return engines


def _key(kind: str) -> Callable[[ServingRow], Any]:
    if kind == "model":
        return lambda row: shape_of(row.model)
    if kind == "device":
        return lambda row: row.hardware
    return lambda row: row.tp_size


def left_out_predictions(
    rows: Sequence[ServingRow], bases: Engines, kind: str
) -> Array:
    """The prediction for each row by profiles fitted without its device (tp, model). NaN: too few
    other rows."""
    key = _key(kind)
    predicted = np.full(len(rows), np.nan)
    for value in dict.fromkeys(map(key, rows)):
        training = []
        test = []
        for index, row in enumerate(rows):
            if row.engine not in bases:
                continue
            if key(row) == value:
                test.append(index)
            elif row.is_fitted_on:
                training.append(row)
        training = without_copies(training)
        if len(training) >= MIN_ROWS and test:
            engines = fit_engines(training, bases)
            predicted[test] = predict_rows([rows[index] for index in test], engines)
    return predicted


def deviation(log_error: Array, share: float = 0.9) -> float:
    """The standard deviation whose 90 % interval holds this share of the rows, given the errors of
    their logarithms. NaN errors are left out."""
    error = np.abs(log_error[np.isfinite(log_error)])
    if not error.size:
        return float("nan")
    largest = float(np.quantile(error, share))
    return max(LEAST_ERROR, largest / Z_90)


def nested_deviations(rows: Sequence[ServingRow], log_error: Array, kind: str) -> Array:
    """The deviation that could be stated for each row before it was seen: that of the left-out
    errors on the engine's rows of other devices (tps, models), or on all engines' rows if it has
    too few."""
    key = _key(kind)
    values = np.array([str(key(row)) for row in rows])
    engines = np.array([row.engine for row in rows])
    judged = np.array([row.is_fitted_on for row in rows]) & np.isfinite(log_error)
    widths = np.full(len(rows), np.nan)
    for value, engine in set(zip(values, engines, strict=True)):
        has_value = values == value
        has_engine = engines == engine
        known = judged & ~has_value & has_engine
        if known.sum() < MIN_ROWS:
            known = judged & ~has_value
        spread = deviation(log_error[known], UNSEEN_SHARE)
        widths[has_value & has_engine] = spread
    return widths
