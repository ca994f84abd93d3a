"""A declared grid of configurations: predicted from the calibration alone, then measured, then
compared. No torch until something is measured.

Predictions come from the same `plan` that users call. All configurations of a (batch, context)
share one prefill and are measured in groups, each recorded when it is done. The speed of a shared
machine changes within minutes, so before each group the reference kernels are timed again; its
predictions are made for the machine as it is then, and written, each with its hash, before the
group's first measurement starts. An interrupted run goes on where it stopped, since configurations
that the records file holds are not measured again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from magicdec.calibrate.local_profile import LocalProfile, load_local_profile
from magicdec.errors import ConfigError
from magicdec.files import converted, read_toml
from magicdec.measure.configuration import BenchmarkRequest, configuration_fields
from magicdec.measure.engines import Runtime
from magicdec.measure.environment import Clock, ReferenceKernels, ReferenceTimes
from magicdec.perfmodel.plan.request import DEFAULT_MAX_GAMMA, PlanRequest
from magicdec.perfmodel.planner import Plan, make_plan
from magicdec.progress import Progress, Stages
from magicdec.schema.comparison import (
    Comparison,
    by_cpu_time,
    pair_records,
    speed_scale,
)
from magicdec.schema.record import (
    Record,
    append_record,
    current_environment,
    read_records,
)
from magicdec.schema.row import Candidate, column
from magicdec.specs.known_heads import named_head
from magicdec.specs.precision import PROFILE_DTYPES
from magicdec.specs.speculation import (
    AUTOREGRESSIVE,
    SELF,
    DraftMethod,
    SamplingSpec,
    SpeculationSpec,
)

if TYPE_CHECKING:
    from magicdec.calibrate.acceptance_bench import AcceptanceRequest

ACCEPTANCE_CONTEXTS = (1280, 3584)
ACCEPTANCE_BUDGETS = (48, 96, 192, 384, 768, 1280)
PREDICTED_FIELDS = (
    "autoregressive_step_s",
    "draft_step_s",
    "verify_step_s",
    "accept_step_s",
    "step_s",
    "expected_tokens_per_step",
    "tpot_s",
    "tokens_per_s",
    "speedup",
    "speedup_low",
    "speedup_high",
    "bound_by",
    "memory_bytes_per_gpu",
)
MEMORY_TERMS = ("autoregressive_step_s", "draft_step_s", "verify_step_s", "step_s")
SLOWER = 1.1
"""How much slower memory is for the second prediction, from which `memory_shares` follows."""


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upper limits, as fractions; None is not checked. Errors are absolute values.

    Step times (`*_step_error`) are normalised where the reference kernels were timed, and raw
    elsewhere.
    """

    median_speedup_error: float | None = None
    p90_speedup_error: float | None = None
    median_autoregressive_step_error: float | None = None
    median_draft_step_error: float | None = None
    median_verify_step_error: float | None = None
    median_step_error: float | None = None
    median_tokens_per_step_error: float | None = None
    regret: float | None = None
    """Mean over the cases of what following the plan loses."""
    coverage: tuple[float, float] | None = None
    """Least and greatest share of the points that the intervals hold."""
    valid_drift: float | None = None
    """A run in which the reference kernels moved further than this between the prediction and the
    measurement, at half of the points, says nothing of the model: it is invalid, and its records are
    kept."""

    def failures(self, comparison: Comparison) -> list[str]:
        """Which thresholds do not hold; one that cannot be checked does not hold."""
        if not comparison.pairs:
            return ["no configuration has both a prediction and a measurement"]
        figures = {
            "regret": comparison.regret,
            "coverage": comparison.coverage,
            "valid_drift": comparison.drift,
        }
        for term, summary in comparison.summaries.items():
            normalised = None
            if term.endswith("_s"):
                normalised = summary.normalised_median_error
            name = f"{term.removeprefix('expected_').removesuffix('_s')}_error"
            error = summary.median_error
            if normalised is not None:
                error = normalised
            figures[f"median_{name}"] = error
            figures[f"p90_{name}"] = summary.p90_error
        failures = []
        for name, limit in msgspec.structs.asdict(self).items():
            if limit is None:
                continue
            low, high = None, limit
            if isinstance(limit, tuple):
                low, high = limit
            value = figures.get(name)
            words = name.replace("_", " ")
            if value is None:
                failures.append(f"{words} could not be computed")
            elif name == "valid_drift" and value > high:
                failures.append(
                    f"the run is invalid: the machine's speed moved by {value:.3f} between "
                    f"predictions and measurements, more than {high:.3f}"
                )
            elif value > high:
                failures.append(f"{words} {value:.3f} exceeds {high:.3f}")
            elif low is not None and value < low:
                failures.append(f"{words} {value:.3f} is below {low:.3f}")
        return failures


class GridSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every combination of the lists. `cases`, if given, replaces the product of batches and
    contexts by a list of pairs."""

    model: str = "embedded"
    dtype: str = "float32"
    device: str = "cpu"
    draft_methods: tuple[DraftMethod, ...] = ("streamingllm",)
    draft_budgets: tuple[int, ...] = (128, 256)
    gammas: tuple[int, ...] = (1, 3, 5)
    heads: tuple[DraftMethod, ...] = ()
    """Methods of trained heads that ship with the model, each at every gamma."""
    batch_sizes: tuple[int, ...] = ()
    context_lens: tuple[int, ...] = ()
    cases: tuple[tuple[int, int], ...] = ()
    temperatures: tuple[float, ...] = (1.0,)
    gen_len: int = 48
    repetitions: int = 3
    prompts: str = "stdlib"
    seed: int = 0
    engine: Runtime = "ours"
    clock: Clock = "wall"
    """Clock of the calibration and of the times judged: the wall's, or one thread's processor time."""
    thresholds: Thresholds = Thresholds()

    def requests(self) -> Iterator[BenchmarkRequest]:
        """One per (batch, context, temperature), the cheapest first so results appear early."""
        cases = self.cases or list(product(self.batch_sizes, self.context_lens))
        for (batch, context), temperature in product(
            sorted(cases, key=lambda case: case[0] * case[1]), self.temperatures
        ):
            speculations = tuple(
                SpeculationSpec(
                    draft="self", draft_method=method, draft_budget=budget, gamma=gamma
                )
                for method, budget, gamma in product(
                    self.draft_methods,
                    self.draft_budgets,
                    self.gammas,
                )
                if budget < context
            )
            speculations += self.head_drafts()
            yield BenchmarkRequest(
                model=self.model,
                engine=self.engine,
                dtype=self.dtype,
                device=self.device,
                batch_size=batch,
                context_len=context,
                gen_len=self.gen_len,
                speculations=speculations,
                sampling=SamplingSpec(temperature=temperature, seed=self.seed),
                prompts=self.prompts,
                repetitions=self.repetitions,
            )

    def head_drafts(self) -> tuple[SpeculationSpec, ...]:
        """The heads at every gamma. Raises ConfigError for one that does not ship with the
        model."""
        heads = []
        for method, gamma in product(self.heads, self.gammas):
            head = named_head(self.model, method, None)
            if head is None:
                raise ConfigError(f"no head of {method} ships with {self.model}")
            heads.append(head.speculation(gamma=gamma))
        return tuple(heads)


BUILT_IN_GRID = GridSpec(cases=((1, 512), (8, 2048), (32, 4096)))
QUICK_GRID = GridSpec(
    cases=((2, 512), (8, 1024)),
    draft_budgets=(64, 256),
    gammas=(1, 3),
    gen_len=48,
    repetitions=4,
    thresholds=Thresholds(
        median_speedup_error=0.15,
        p90_speedup_error=0.35,
        median_step_error=0.25,
        median_autoregressive_step_error=0.25,
        regret=0.10,
    ),
)
"""Its steps take 2 to 8 ms. On a shared machine repetitions of one point differ by a tenth and
more, so the limits are loose and only a broken model exceeds them."""
VLLM_GRID = GridSpec(
    engine="vllm",
    clock="cpu",
    batch_sizes=(4, 8, 16),
    context_lens=(1000, 4000),
    draft_budgets=(256, 512),
    gammas=(1, 2, 3, 4),
    temperatures=(0.0,),
    gen_len=96,
    thresholds=Thresholds(median_speedup_error=0.10, regret=0.03),
)
"""Contexts and batches at which a draft pays in vLLM on a CPU, and some at which it hardly does."""


def choose_grid(
    path: Path | None,
    *,
    quick: bool,
    engine: Runtime | None,
    clock: Clock | None,
) -> GridSpec:
    """The grid of a file, or the one shipped for the engine. `engine` and `clock`, if given,
    replace the file's."""
    if quick:
        grid = QUICK_GRID
    elif path is None and engine == "vllm":
        grid = VLLM_GRID
    else:
        grid = load_grid(path)
    grid = msgspec.structs.replace(
        grid, engine=engine or grid.engine, clock=clock or grid.clock
    )
    if grid.clock == "cpu" and grid.engine != "vllm":
        raise ConfigError(
            "--clock cpu goes with --engine vllm: our runtime's steps are timed by the wall clock"
        )
    return grid


def load_grid(path: Path | None) -> GridSpec:
    """Reads a grid file. None: the built-in grid.

    Raises ConfigError naming the file and the key.
    """
    if path is None:
        return BUILT_IN_GRID
    grid = converted(read_toml(path, "grid"), GridSpec, where=f"grid {path}")
    if not (grid.cases or (grid.batch_sizes and grid.context_lens)):
        raise ConfigError(
            f"grid {path}: give cases = [[batch, context], ...], or batch_sizes and context_lens"
        )
    return grid


@dataclass(frozen=True, kw_only=True)
class GridRun:
    """The outcome of a grid."""

    predicted: list[Record]
    measured: list[Record]
    comparison: Comparison
    failures: list[str]
    """Thresholds of the grid that do not hold."""


def run_grid(
    grid: GridSpec,
    *,
    profile: LocalProfile | None,
    records: Path,
    quick: bool = False,
    progress: Progress = lambda _: None,
) -> GridRun:
    """Predicts and measures a grid. Without a profile, calibrates first (`quick`: with fewer
    shapes, rounds and prompts), and saves the profile next to the records so that the run can be
    resumed."""
    from magicdec.measure.rank import benchmark

    requests = list(grid.requests())
    profile = profile or _own_profile(
        grid,
        records.with_suffix(".profile.toml"),
        quick=quick,
        progress=progress,
    )
    _warn_of_other_temperatures(grid, profile)
    for prediction in _written_predictions(records).values():
        _check_unchanged(prediction, records)
    references = None
    if grid.engine == "ours":
        references = ReferenceKernels(grid.device)
    else:
        freeze_predictions(requests, profile, records)
    stages = Stages(progress, [_work(request, records) for request in requests])
    measured: list[Record] = []
    for number, request in enumerate(requests):

        def freeze(
            group: Sequence[SpeculationSpec], request: BenchmarkRequest = request
        ) -> None:
            if references is not None:
                next_runs = replace(request, speculations=tuple(group))
                freeze_predictions([next_runs], profile, records, at=references.times())

        measured += benchmark(
            request,
            records=records,
            resume=True,
            bandwidth_bytes_per_s=profile.hardware.memory_bytes_per_s,
            references=references,
            before_group=freeze,
            progress=stages.stage(number),
        )
    predicted = freeze_predictions(requests, profile, records)
    judged = measured
    if grid.clock == "cpu":
        judged = list(map(by_cpu_time, measured))
    comparison = Comparison(pairs=pair_records(predicted + judged))
    failures = grid.thresholds.failures(comparison)
    return GridRun(
        predicted=predicted, measured=measured, comparison=comparison, failures=failures
    )


def _warn_of_other_temperatures(grid: GridSpec, profile: LocalProfile) -> None:
    for law in profile.acceptance:
        if law.temperature is None or law.draft_method not in grid.draft_methods:
            continue
        others = []
        for temperature in grid.temperatures:
            if temperature != law.temperature:
                others.append(f"{temperature:g}")
        if others:
            listed = ", ".join(others)
            warnings.warn(
                f"acceptance of {law.draft_method} was measured at temperature "
                f"{law.temperature:g}; predictions at {listed} use it too",
                stacklevel=2,
            )


def _own_profile(
    grid: GridSpec, path: Path, *, quick: bool, progress: Progress
) -> LocalProfile:
    if path.exists():
        return load_local_profile(path)
    from magicdec.calibrate.machine import obtain_profile

    head = None
    if grid.heads:
        head = named_head(grid.model, grid.heads[0], None)
    profile = obtain_profile(
        grid.model,
        dtype=grid.dtype,
        device=grid.device,
        engine=grid.engine,
        clock=grid.clock,
        request=acceptance_request(grid, quick=quick),
        quick=quick,
        head=head,
        progress=progress,
    )
    profile.save(path)
    return profile


def acceptance_request(grid: GridSpec, *, quick: bool = False) -> AcceptanceRequest:
    """The grid's methods, at budgets, contexts and a gamma outside the grid."""
    from magicdec.calibrate.acceptance_bench import AcceptanceRequest

    cases = grid.cases or list(product(grid.batch_sizes, grid.context_lens))
    longest = max(context for _, context in cases)
    grid_contexts = {context for _, context in cases}
    contexts = []
    for context in ACCEPTANCE_CONTEXTS:
        if context not in grid_contexts and context < longest:
            contexts.append(context)
    if not contexts:
        contexts = [longest - longest // 4]
    draft_budgets = []
    for budget in ACCEPTANCE_BUDGETS:
        if budget not in grid.draft_budgets and budget < contexts[-1]:
            draft_budgets.append(budget)
    num_prompts = 48
    if quick:
        num_prompts = 16
    return AcceptanceRequest(
        model=grid.model,
        dtype=grid.dtype,
        device=grid.device,
        draft_methods=grid.draft_methods,
        beside=grid.head_drafts()[:: max(len(grid.gammas), 1)],
        draft_budgets=tuple(draft_budgets),
        context_lens=tuple(contexts),
        num_prompts=num_prompts,
        gamma=max(grid.gammas) + 1,
        temperature=grid.temperatures[0],
        prompts=grid.prompts,
    )


def _work(request: BenchmarkRequest, records: Path) -> float:
    """Rough duration, in any unit, of the configurations that the file lacks. Each takes a constant
    plus a time proportional to its KV slots."""
    from magicdec.measure.rank import configuration_key, known_records

    known = {}
    if records.exists():
        known = known_records(records, request.repetitions)
    num_missing = 0
    for speculation in request.speculations:
        if configuration_key(request, speculation) not in known:
            num_missing += 1
    slots = request.batch_size * request.context_len
    return (slots + 8000.0) * num_missing


def freeze_predictions(
    requests: list[BenchmarkRequest],
    profile: LocalProfile,
    records: Path,
    *,
    at: ReferenceTimes | None = None,
) -> list[Record]:
    """Predicts every point and writes the predictions: for a machine whose reference kernels take
    `at`, or, without, as fast as at calibration. Predictions already in the file, from an
    interrupted run, stay.

    Raises ConfigError for a prediction in the file that was changed after it was written.
    """
    written = _written_predictions(records)
    frozen = []
    differs = False
    for request in requests:
        for usual in predict_records(request, profile):
            prediction = written.get(usual.key)
            speed = at
            if prediction is not None:
                _check_unchanged(prediction, records)
                speed = None
                # the reference kernels' times that it was made at
                memory_s = prediction.reference_s
                compute_s = prediction.compute_reference_s
                if memory_s is not None and compute_s is not None:
                    speed = ReferenceTimes(memory_s, compute_s)
            record = usual if speed is None else at_speed(usual, speed)
            if prediction is None:
                note = prediction_note(record)
                prediction = msgspec.structs.replace(record, notes=[note])
                append_record(records, prediction)
                written[record.key] = prediction
            if (
                prediction.step_s != record.step_s
                or prediction.speedup != record.speedup
            ):
                differs = True
            frozen.append(prediction)
    if differs:
        warnings.warn(
            f"{records} keeps its predictions, which are another profile's; give another --records "
            "to use this profile",
            stacklevel=2,
        )
    return frozen


def _written_predictions(records: Path) -> dict[str, Record]:
    """The predictions of a file by their key."""
    written: dict[str, Record] = {}
    if records.exists():
        for record in read_records(records):
            if record.source == "calibrated":
                written[record.key] = record
    return written


def at_speed(prediction: Record, now: ReferenceTimes) -> Record:
    """The prediction for a machine whose reference kernels take this long: each time follows them by
    its share of memory, the rest by arithmetic. Unchanged where the calibration timed none."""
    scale = {}
    for term in MEMORY_TERMS:
        by = speed_scale(
            prediction,
            term,
            reference_s=now.memory_s,
            compute_reference_s=now.compute_s,
        )
        if by is not None:
            scale[term] = by
    if not {"autoregressive_step_s", "step_s"} <= set(scale):
        return prediction
    of_step = scale["step_s"]
    of_speedup = scale["autoregressive_step_s"] / of_step
    factors = {
        **scale,
        "tpot_s": of_step,
        "tokens_per_s": 1.0 / of_step,
        "speedup": of_speedup,
        "speedup_low": of_speedup,
        "speedup_high": of_speedup,
    }
    if prediction.compute_reference_s:
        factors["accept_step_s"] = now.compute_s / prediction.compute_reference_s
    scaled = {}
    for name, factor in factors.items():
        value = getattr(prediction, name)
        if value is not None:
            scaled[name] = value * factor
    return msgspec.structs.replace(
        prediction,
        **scaled,
        reference_s=now.memory_s,
        compute_reference_s=now.compute_s,
    )


def _check_unchanged(prediction: Record, records: Path) -> None:
    if prediction.notes != [prediction_note(prediction)]:
        raise ConfigError(
            f"{records}: prediction {prediction.key} is not what was written before the "
            "measurements"
        )


def prediction_note(record: Record) -> str:
    """The commitment to a prediction: a hash of its contents."""
    text = msgspec.json.encode(msgspec.structs.replace(record, notes=[]))
    return f"prediction sha256 {hashlib.sha256(text).hexdigest()}"


class DraftKind(NamedTuple):
    """Draft requested of a plan: its name, method and a head's directory."""

    draft: str = SELF
    method: str | None = None
    checkpoint: str | None = None

    @property
    def words(self) -> str:
        """The draft's options of `profile-acceptance`."""
        if self.draft == SELF:
            return f"--draft-method {self.method}"
        return f"--draft {self.checkpoint or self.draft}"


def plan_local(
    request: BenchmarkRequest,
    profile: LocalProfile,
    *,
    kind: DraftKind | None = None,
    draft_budgets: tuple[int, ...] = (),
    gen_len: int = 0,
) -> Plan:
    """A plan for a measured configuration's model, batch and context on the calibrated machine.
    Without a generated length it counts decoding alone, as runs do. `kind` restricts it to one kind
    of draft; None: the target's own drafts."""
    dtype = PROFILE_DTYPES[request.dtype]
    kind = kind or DraftKind()
    return make_plan(
        PlanRequest(
            model=request.model,
            hardware=(profile.hardware,),
            engine=profile.engine,
            tp_size=1,
            batch_sizes=(request.batch_size,),
            context_lens=(request.context_len,),
            gen_len=gen_len,
            draft=kind.draft,
            draft_model=kind.checkpoint,
            draft_method=kind.method,
            draft_budgets=draft_budgets,
            temperature=request.sampling.temperature,
            top_k=request.sampling.top_k,
            top_p=request.sampling.top_p,
            acceptance=profile.acceptance,
            weight_dtype=dtype,
            kv_dtype=dtype,
            draft_weight_dtype=dtype if kind.checkpoint else None,
        )
    )


def predict_records(request: BenchmarkRequest, profile: LocalProfile) -> list[Record]:
    """One predicted record per requested configuration, the autoregressive one first."""
    hardware = profile.hardware
    slow = msgspec.structs.replace(
        hardware, memory_bytes_per_s=hardware.memory_bytes_per_s / SLOWER
    )
    machines = (profile, replace(profile, hardware=slow))
    by_kind: dict[DraftKind, list[SpeculationSpec]] = defaultdict(list)
    for speculation in request.speculations:
        if speculation.gamma > DEFAULT_MAX_GAMMA:
            raise ConfigError(
                f"predictions reach gamma {DEFAULT_MAX_GAMMA}, not {speculation.gamma}; measure "
                "it with magicdec run"
            )
        kind = DraftKind(
            draft=speculation.draft,
            method=speculation.draft_method,
            checkpoint=speculation.checkpoint,
        )
        by_kind[kind].append(speculation)
    measured_methods = {known.draft_method for known in profile.acceptance}
    predicted: list[Record] = []
    for kind, speculations in by_kind.items():
        budgets = set()
        for speculation in speculations:
            if speculation.draft_budget is not None:
                budgets.add(speculation.draft_budget)
        documents = []
        for machine in machines:
            documents.append(
                plan_local(
                    request,
                    machine,
                    kind=kind,
                    draft_budgets=tuple(sorted(budgets)),
                    gen_len=request.gen_len,
                )
            )
        is_measured = kind.method in measured_methods
        if not is_measured or not documents[0].candidates:
            raise ConfigError(
                f"no acceptance of {kind.method} on {request.model} is known; measure it with "
                f"`magicdec profile-acceptance {kind.words}`, saved next to the profile"
            )
        if not predicted:
            baselines = [document.autoregressive for document in documents]
            predicted.append(_record(request, AUTOREGRESSIVE, baselines, profile))
        predicted += _speculative_records(request, speculations, documents, profile)
    return predicted


def _speculative_records(
    request: BenchmarkRequest,
    speculations: Sequence[SpeculationSpec],
    documents: Sequence[Plan],
    profile: LocalProfile,
) -> list[Record]:
    """The predictions of one draft's configurations, from its plans on both memories."""
    rows_of_plans = []
    for document in documents:
        rows_of_plans.append(
            {(row.draft_budget, row.gamma): row for row in document.candidates}
        )
    records = []
    for speculation in speculations:
        key = (speculation.draft_budget, speculation.gamma)
        if key not in rows_of_plans[0]:
            raise ConfigError(
                f"gamma {speculation.gamma} is deeper than the acceptance that the profile holds; "
                f"measure it with magicdec profile-acceptance --gamma {speculation.gamma}"
            )
        rows = [rows_of_plan[key] for rows_of_plan in rows_of_plans]
        records.append(_record(request, speculation, rows, profile))
    return records


def _record(
    request: BenchmarkRequest,
    speculation: SpeculationSpec,
    rows: list[Candidate],
    profile: LocalProfile,
) -> Record:
    """The prediction of a configuration, from its rows with the real and with a slower memory. It
    includes conditional acceptance rates if an acceptance profile describes the method."""
    row, slow_row = rows
    kind = (speculation.draft, speculation.draft_method)
    law = None
    for acceptance in profile.acceptance:
        if (acceptance.draft, acceptance.draft_method) == kind:
            law = acceptance
            break
    acceptance_by_position = None
    if law is not None and speculation.gamma:
        rates = law.conditional_rates(
            budget=speculation.draft_budget,
            context=request.context_len,
            gamma_max=speculation.gamma,
        )
        acceptance_by_position = list(map(float, rates))
    memory_shares = {}
    for name in MEMORY_TERMS:
        seconds = column(row, name)
        if seconds:
            memory_shares[name] = (column(slow_row, name) / seconds - 1.0) / (
                SLOWER - 1.0
            )
    return Record(
        source="calibrated",
        hardware=profile.hardware.name,
        environment=current_environment(),
        **{**configuration_fields(request, speculation), "engine": profile.engine.name},
        **{name: column(row, name) for name in PREDICTED_FIELDS},
        memory_shares=memory_shares,
        reference_s=profile.hardware.reference_s,
        compute_reference_s=profile.hardware.compute_reference_s,
        acceptance_by_position=acceptance_by_position,
    )
