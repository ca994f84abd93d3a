"""The planner: which draft, method, budget and gamma, on how many devices and at which batch; or no speculation at all.

    document = plan(PlanRequest(model="llama-3.1-8b", hardware=("a100-sxm-80gb",), tp_size=8, batch_sizes=(64,)))
    document.best["gamma"], document.best["speedup"]

With batch sizes given, each (hardware, batch, context) is answered for itself. Without them the batch is searched too,
under the latency limits and the memory. Every candidate is evaluated: the search is exhaustive over the grid.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import msgspec
import numpy as np

from magicdec.errors import CapacityError
from magicdec.perfmodel import candidates
from magicdec.perfmodel.acceptance import constant_profile, expected_tokens_per_step, static_batch_efficiency
from magicdec.perfmodel.candidates import Row
from magicdec.perfmodel.document import SCHEMA_VERSION, PlanDocument, gamma_table
from magicdec.perfmodel.drafts import NAMED_DRAFTS, RATE_BUDGET, DraftOption, draft_options
from magicdec.perfmodel.intervals import is_engine_fitted_on
from magicdec.perfmodel.plan_request import DEFAULT_MAX_GAMMA, Device, Lengths, PlanRequest, resolve
from magicdec.perfmodel.prediction import predict
from magicdec.perfmodel.search import answer, best_autoregressive, finish
from magicdec.perfmodel.setup import Points
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import SPARSE_METHODS, DraftMethod
from magicdec.units import format_seconds

__all__ = ["PlanDocument", "PlanRequest", "plan"]


def plan(request: PlanRequest) -> PlanDocument:
    """Answers a request.

    Raises:
        ConfigError: an impossible combination; the message names the nearest that works.
        CapacityError: the model fits on no number of the devices, or not with this batch and context.
    """
    model = request.model if isinstance(request.model, ModelSpec) else load_model_spec(request.model)
    shortest, longest = _check_lengths(request, model)
    options, lacking = draft_options(
        target=model,
        draft=request.draft,
        method=request.draft_method,
        budgets=request.draft_budgets,
        context=shortest,
        longest_context=longest,
        profiles=request.acceptance,
        rate=request.acceptance_rate,
        draft_tp_size=request.draft_tp_size,
        is_quantised=request.draft_weight_dtype not in (None, request.weight_dtype or "bf16"),
    )
    rows: list[Row] = []
    baselines: list[Row] = []
    devices = [resolve(request, model, hardware, options) for hardware in request.hardware]
    refused: list[str] = []
    for device in devices:
        try:
            rows.extend(answer(device))
        except CapacityError as error:
            if len(devices) == 1:
                raise
            refused.append(str(error))
            continue
        baselines.extend(best_autoregressive(device))
    if not rows:
        raise CapacityError("; ".join(refused)) if refused else _too_slow(request)
    document = _document(request, devices, rows, baselines, lacking)
    document["notes"].extend(refused)
    return PlanDocument(document)


def _too_slow(request: PlanRequest) -> CapacityError:
    """The error for limits that nothing keeps, naming the least that one sequence alone reaches."""
    free = plan(dataclasses.replace(request, tpot_limit_s=None, ttft_limit_s=None, batch_sizes=(1,), workload=None))
    rows = [*free.document["autoregressive_rows"], *free.candidates]
    tpot, ttft = (min(row[name] for row in rows) for name in ("tpot_s", "ttft_s"))
    return CapacityError(
        f"nothing keeps the limits on latency; at batch 1 it takes at least {format_seconds(tpot)} per token and "
        f"{format_seconds(ttft)} to the first one"
    )


def _check_lengths(request: PlanRequest, model: ModelSpec) -> tuple[int, int]:
    """The shortest and the longest prompt of a request. Raises CapacityError for lengths that the model cannot read."""
    if request.workload is not None:
        prompts = [request.workload.mean_prompt_len]
        longest = request.workload.max_len
    else:
        prompts = [float(context) for context in request.context_lens]
        longest = max(request.context_lens) + request.gen_len
    if longest > model.max_position_embeddings:
        raise CapacityError(
            f"{model.name} reads at most {model.max_position_embeddings} tokens; {longest}, prompt and "
            "output together, is too long"
        )
    return int(min(prompts)), int(max(prompts))


def _objective(row: Row) -> tuple[bool, bool, float]:
    return bool(row["within_limits"]), bool(row["fits"]), float(row["tokens_per_s_per_gpu"])


def _ranked(drafted: list[Row]) -> list[Row]:
    """Best first. Sources of acceptance are ranked by the best lower end of an interval that each reaches, which holds
    their difference; rows of one source by what they are expected to do."""
    reached: dict[str, float] = {}
    for row in drafted:
        if row["fits"] and row["within_limits"]:
            low = row["tokens_per_s_per_gpu"] * row["speedup_low"] / row["speedup"]
            reached[row["acceptance_source"]] = max(reached.get(row["acceptance_source"], 0.0), low)

    def key(row: Row) -> tuple[bool, bool, float, float]:
        within, fits, rate = _objective(row)
        return within, fits, reached.get(row["acceptance_source"], 0.0), rate

    return sorted(drafted, key=key, reverse=True)


def _document(
    request: PlanRequest, devices: list[Device], rows: list[Row], baselines: list[Row], lacking: list[dict[str, str]]
) -> dict[str, Any]:
    best_alone = {(row["hardware"], row["context_len"]): row for row in baselines}
    for row in [*rows, *baselines]:
        alone = best_alone.get((row["hardware"], row["context_len"]), row)
        row["speedup_vs_best_autoregressive"] = row["tokens_per_s_per_gpu"] / alone["tokens_per_s_per_gpu"]
    drafted = _ranked([row for row in rows if row["gamma"] > 0])
    alone_rows = [row for row in rows if row["gamma"] == 0]
    of_one_source = [row for row in drafted if row["acceptance_source"] == drafted[0]["acceptance_source"]]
    best = max([*alone_rows, *of_one_source], key=_objective)
    device = next(each for each in devices if each.hardware.name == best["hardware"])
    alone = _alone(device, best)
    alone["speedup_vs_best_autoregressive"] = best["speedup_vs_best_autoregressive"] / best["speedup"]
    frontier = _pareto([row for row in rows if row["context_len"] == best["context_len"]])
    detail = _detail(device, best)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "plan",
        "model": device.model.name,
        "hardware": device.hardware.name,
        "engine": device.engine.name,
        "request": _request_record(request),
        "precision": _formats(device),
        "best": best,
        "autoregressive": alone,
        "best_autoregressive": baselines,
        "best_by_case": _best_by_case(rows),
        "pareto": frontier,
        "best_latency": frontier[0] if frontier else None,
        "best_throughput": frontier[-1] if frontier else None,
        "needs_acceptance": [
            {**each, "break_even_acceptance_rate": _paying_rate(device, best, each)} for each in lacking
        ],
        **detail,
        "gamma_table": _gamma_table(device, best),
        "notes": _notes(device, devices, best, drafted),
        "autoregressive_rows": alone_rows,
        "candidates": drafted,
    }


def _point(device: Device, best: Row) -> tuple[Lengths, Points]:
    """The best row as a point to evaluate again."""
    lengths = next(each for each in device.lengths if round(each.prompt_len) == best["context_len"])
    batch = np.asarray([float(best["batch_size"])])
    return lengths, Points(
        batch=batch,
        context=np.asarray([lengths.prompt_len]),
        tp=np.asarray([float(best["tp_size"])]),
        budget=np.asarray([float(best["draft_budget"] or 0)]),
        gamma=np.asarray([best["gamma"]], dtype=np.int64),
        gen_len=lengths.growth,
        max_len=lengths.max_len(batch),
    )


def _alone(device: Device, best: Row) -> Row:
    """Autoregressive decoding at the best row's tp, batch and context, within the limits or not."""
    lengths, point = _point(device, best)
    point = dataclasses.replace(point, gamma=np.zeros_like(point.gamma), budget=np.zeros_like(point.budget))
    row = candidates.rows(predict(device.setup(None), None, point), None)[0]
    finish(device, lengths, row)
    return row


def _detail(device: Device, best: Row) -> dict[str, Any]:
    """Breakdown and memory of the best configuration, and what a static batch of it would lose."""
    option = _option_of(device, best)
    setup = device.setup(option)
    lengths, point = _point(device, best)
    prediction = predict(setup, option.acceptance if option else None, point)
    if option is not None and option.acceptance is not None and device.request.gen_len > 0:
        kept = static_batch_efficiency(
            option.acceptance,
            budget=best["draft_budget"],
            context=lengths.prompt_len + lengths.growth / 2.0,
            gamma=best["gamma"],
            batch_size=best["batch_size"],
            gen_len=device.request.gen_len,
        )
        best["speedup_static_batch"] = best["speedup"] * kept
    need = prediction.memory
    sizes = {
        name: float(np.ravel(getattr(need, name))[0])
        for name in (
            "weights_bytes",
            "kv_bytes",
            "draft_weights_bytes",
            "draft_kv_bytes",
            "workspace_bytes",
            "capacity_bytes",
        )
    }
    where = device.tp_sizes.index(best["tp_size"])
    budget, gamma = best["draft_budget"], best["gamma"]
    drafted = device.largest_batches(lengths, option=option, budget=budget, gamma=gamma)
    sizes["largest_batch"] = float(drafted[where])
    sizes["largest_autoregressive_batch"] = float(device.largest_batches(lengths)[where])
    return {"breakdown": candidates.breakdown(prediction), "memory": sizes}


def _paying_rate(device: Device, best: Row, lacking: dict[str, str]) -> float | None:
    """The least rate, alike at all positions, from which a draft would pay at the best row's batch, context and tp (a
    sparse one with a budget of RATE_BUDGET); None where none does. Steps are those at a rate of 0.8."""
    lengths, point = _point(device, best)
    method = cast(DraftMethod, lacking["draft_method"])
    budget = min(RATE_BUDGET, max(8, int(lengths.prompt_len) // 2)) if method in SPARSE_METHODS else 0
    usual = constant_profile(0.8)
    option = DraftOption(
        draft=lacking["draft"],
        method=method,
        model=None if lacking["draft"] in NAMED_DRAFTS else load_model_spec(lacking["draft"]),
        budgets=(budget,),
        acceptance=usual,
        draft_tp_size=device.request.draft_tp_size,
    )
    gammas = np.arange(1, DEFAULT_MAX_GAMMA + 1)
    prediction = predict(device.setup(option), usual, dataclasses.replace(point, budget=float(budget), gamma=gammas))
    rates = np.linspace(0.0, 1.0, 201)
    tokens = expected_tokens_per_step(np.repeat(rates[:, None, None], len(gammas), axis=-1), gammas)
    at_rates = dataclasses.replace(prediction, expected_tokens_per_step=tokens)
    pays = np.flatnonzero(at_rates.speedup.max(axis=-1) > 1.0)
    return float(rates[pays[0]]) if len(pays) else None


def _option_of(device: Device, row: Row) -> DraftOption | None:
    for option in device.options:
        if row["gamma"] > 0 and (option.draft, option.method) == (row["draft"], row["draft_method"]):
            return option
    return None


def _request_record(request: PlanRequest) -> dict[str, Any]:
    """The request in plain values: names for specs."""
    record: dict[str, Any] = {}
    for key, value in request.__dict__.items():
        if key == "acceptance":
            record[key] = [profile.name or profile.source for profile in value]
        elif key == "hardware":
            record[key] = [each if isinstance(each, str) else each.name for each in value]
        elif key == "workload":
            record[key] = msgspec.to_builtins(value) if value is not None else None
        elif key == "sampling":
            record.update(temperature=value.temperature, top_k=value.top_k, top_p=value.top_p)
        else:
            record[key] = value.name if isinstance(value, ModelSpec | EngineProfile) else value
    return record


def _formats(device: Device) -> dict[str, str]:
    """Number formats of the target and, with `draft_` before the name, of the draft."""
    draft = msgspec.structs.asdict(device.draft_precision)
    return msgspec.structs.asdict(device.precision) | {f"draft_{name}": value for name, value in draft.items()}


def _best_by_case(rows: list[Row]) -> list[Row]:
    """The best row of each device, context and (where it was given) batch."""
    cases: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        case = (row["hardware"], row["context_len"], row["batch_size"])
        if case not in cases or _objective(row) > _objective(cases[case]):
            cases[case] = row
    return list(cases.values())


def _pareto(rows: list[Row]) -> list[Row]:
    """Rows that no other beats in both latency and throughput per device, quickest first."""
    frontier: list[Row] = []
    highest = 0.0
    for row in sorted(rows, key=lambda each: (each["tpot_s"], -each["tokens_per_s_per_gpu"])):
        if row["fits"] and row["within_limits"] and row["tokens_per_s_per_gpu"] > highest:
            highest = row["tokens_per_s_per_gpu"]
            frontier.append(row)
    return frontier


TABLE_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
TABLE_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


def _gamma_table(device: Device, best: Row) -> dict[str, Any]:
    limit = device.model.max_position_embeddings - device.request.gen_len
    batches = sorted({*TABLE_BATCHES, best["batch_size"]})
    contexts = sorted({*(each for each in TABLE_CONTEXTS if each <= limit), best["context_len"]})
    return gamma_table(
        [(device.setup(option), option) for option in device.options],
        tp_size=best["tp_size"],
        batch_sizes=batches,
        context_lens=contexts,
        gammas=device.gammas,
        gen_len=device.request.gen_len,
    )


def _notes(device: Device, devices: list[Device], best: Row, drafted: list[Row]) -> list[str]:
    notes = []
    for each in devices:
        if not each.hardware.is_measured:
            notes.append(
                f"no kernels were measured on {each.hardware.name}: its curves are estimates, with wider intervals"
            )
    for option in device.options:
        limit = (
            option.model.max_position_embeddings if option.model is not None else device.model.max_position_embeddings
        )
        if option.method == "full" and limit < best["context_len"]:
            notes.append(
                f"{option.draft} was made for {limit} tokens: with its full cache it cannot follow this context"
            )
    for option in device.options:
        measured, asked = option.acceptance, device.request.sampling.temperature
        if measured is not None and measured.temperature is not None and measured.temperature != asked:
            notes.append(
                f"acceptance of {option.draft}/{option.method} was measured at temperature {measured.temperature:g}, "
                f"not {asked:g}"
            )
    if best["acceptance_extrapolated"]:
        notes.append(_extrapolation_note(device, best, drafted))
    if not device.engine.fitted_on:
        notes.append(
            f"engine profile {device.engine.name} is not fitted to measurements: its fixed costs are estimates"
        )
    elsewhere = [each.hardware.name for each in devices if not is_engine_fitted_on(each.hardware, each.engine)]
    if elsewhere:
        notes.append(
            f"engine profile {device.engine.name} was fitted on {device.engine.fitted_device}: "
            f"its fixed costs on {', '.join(elsewhere)} are less sure, which is in the intervals"
        )
    if len({row["acceptance_source"] for row in drafted}) > 1:
        notes.append(
            "acceptance comes from different sources, which is in the intervals of all but the first: "
            "a measured profile of each method on the same task would rank them better"
        )
    if best["gamma"] == 0 and drafted and max(row["speedup"] for row in drafted) <= 1.0:
        notes.append("speculation does not pay here: decode autoregressively")
    for each in devices:
        node = each.hardware.link.num_gpus_per_node
        if each.hardware.kind == "gpu" and max(each.tp_sizes) > node:
            notes.append(
                f"tp {max(each.tp_sizes)} is more than the {node} devices of a node of {each.hardware.name}: links "
                "between nodes are not modelled, so its times are too short"
            )
    return notes


def _extrapolation_note(device: Device, best: Row, drafted: list[Row]) -> str:
    """Where the best row's acceptance was measured, and what the best row there is expected to do."""
    option = _option_of(device, best)
    assert option is not None
    measured = option.acceptance
    assert measured is not None
    where = " and ".join(
        f"{what} {_range(values)}"
        for what, values in (("budget", measured.measured_budgets), ("context", measured.measured_contexts))
        if values
    )
    note = (
        f"acceptance of {best['draft']}/{best['draft_method']} was measured at {where}: the best row extrapolates it, "
        "with a wider interval"
    )
    same = ("draft", "draft_method", "hardware", "tp_size", "batch_size", "context_len")
    inside = [row for row in drafted if not row["acceptance_extrapolated"] and all(row[k] == best[k] for k in same)]
    if inside:
        row = max(inside, key=_objective)
        note += (
            f"; within it budget {row['draft_budget']}, gamma {row['gamma']} gives {row['speedup']:.2f}x "
            f"({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
        )
    return note


def _range(values: list[float]) -> str:
    return f"{min(values):.0f}" + (f" to {max(values):.0f}" if len(values) > 1 else "")
