"""Answers requests of tests/golden/proof_requests.py with the package that is importable, as arrays by term.

    python tests/golden/proof_answers.py REQUESTS.json ANSWERS.npz

A plan's terms are the paths of its document ("candidates.speedup"); those of points name what the model predicts of
them ("verify.attention_s"). Functions are found by name in whatever module defines them, so this outlives moves.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

Answer = dict[str, list[Any]]
"""Values by term: numbers, or texts."""
PACKAGES = ("magicdec.specs", "magicdec.schema", "magicdec.perfmodel")


@cache
def _modules() -> tuple[ModuleType, ...]:
    packages = [importlib.import_module(name) for name in PACKAGES]
    found = [
        each.name
        for package in packages
        for each in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    ]
    if importlib.util.find_spec("evidence") is not None:
        found.append("evidence.kernel_tables")
    return tuple(importlib.import_module(name) for name in found)


@cache
def find(name: str) -> Any:
    """The class or function of this name, in the module that defines it."""
    for module in _modules():
        value = getattr(module, name, None)
        if (
            value is not None
            and getattr(value, "__module__", module.__name__) == module.__name__
        ):
            return value
    raise LookupError(f"no module of {', '.join(PACKAGES)} defines {name}")


def answer(request: dict[str, Any]) -> Answer:
    """Every value of one request; a refusal is an answer too."""
    from magicdec.errors import MagicdecError

    try:
        return ANSWERS[request["kind"]](request)
    except MagicdecError as error:
        return {"refused": [type(error).__name__], "refusal": [str(error)]}


def _plan(request: dict[str, Any]) -> Answer:
    import msgspec

    from magicdec import api
    from magicdec.perfmodel.rate import load

    options = request["options"]
    if request["kind"] == "plan":
        options = options | {"plugin": True}
    if "workload" in options:
        options = options | {
            "workload": msgspec.convert(
                {"requests": options["workload"]}, find("WorkloadSpec")
            )
        }
    found: Answer = {}
    asked = api.sensitivity if request["kind"] == "sensitivity" else api.plan
    counts = {
        name: request.get("num_requests", getattr(load, name))
        for name in ("MIN_REQUESTS", "MAX_REQUESTS")
    }
    with patch.multiple(load, **counts):
        answered = asked(**options)
    for term, value in _flat(_in_columns(answered), ""):
        found.setdefault(term, []).append(value)
    return found


def _in_columns(value: Any) -> Any:
    """Plain data, each candidate as its columns, and the parts of a choice beside the others."""
    import msgspec

    from magicdec.schema.plan import CaseAnswer
    from magicdec.schema.row import Candidate, columns

    if isinstance(value, Candidate):
        return columns(value)
    if isinstance(value, list | tuple):
        return [_in_columns(item) for item in value]
    if not isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    plain = {
        name: _in_columns(getattr(value, name)) for name in value.__struct_fields__
    }
    if isinstance(value, CaseAnswer):
        del plain["choice"]
        plain["best"] = columns(value.best)
        plain["autoregressive"] = columns(value.autoregressive)
        ceiling = value.best_autoregressive
        plain["best_autoregressive"] = None if ceiling is None else columns(ceiling)
    return plain


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        yield f"{path}.length", len(value)
        for each in value:
            yield from _flat(each, path)
    else:
        yield path, value


def _setup(request: dict[str, Any]) -> Any:
    import msgspec

    hardware = find("load_hardware")(request["hardware"])
    if request["is_cpu"]:
        hardware = msgspec.structs.replace(
            hardware, kind="cpu", memory_spread=0.02, compute_spread=0.03
        )
    precision = find("Precision")(**request["precision"])
    own = request["draft_precision"]
    is_sparse = request["method"] in ("streamingllm", "snapkv", "topk")
    return find("Setup")(
        model=find("load_model_spec")(request["model"]),
        hardware=hardware,
        engine=find("load_engine")(request["engine"]),
        speculation=find("SpeculationSpec")(
            draft=request["draft"], draft_method=request["method"], draft_budget=64 if is_sparse else None,
            draft_tp_size=request["draft_tp_size"],
        ),
        draft_model=find("load_model_spec")(request["draft_model"]) if request["draft_model"] else None,
        sampling=find("SamplingSpec")(**request["sampling"]),
        precision=precision,
        draft_precision=msgspec.structs.replace(precision, **own) if own else None,
        spread=find("Parallelism")(**request["spread"]),
    )  # fmt: skip


def _points(request: dict[str, Any]) -> Answer:
    setup = _setup(request)
    is_sparse = request["method"] in ("streamingllm", "snapkv", "topk")
    batch, context, tp, gamma = (
        np.asarray(request[name]) for name in ("batch", "context", "tp", "gamma")
    )
    budget = (
        np.minimum(np.asarray(request["budget"], dtype=float), context)
        if is_sparse
        else None
    )
    law = find("constant_profile")(
        request["rates"][0] if len(request["rates"]) == 1 else tuple(request["rates"])
    )
    points = find("Points")(
        batch=batch,
        context=context,
        tp=tp,
        budget=budget,
        gamma=gamma,
        gen_len=request["gen_len"],
    )
    prediction = find("predict")(setup, law, points)
    found: dict[str, Any] = {}
    for name in (
        "autoregressive_step_s", "step_s", "tpot_s", "tokens_per_s", "speedup", "num_gpus", "ttft_s",
        "draft_prefill_s", "break_even_gen_len", "expected_tokens_per_step", "valid",
    ):  # fmt: skip
        found[name] = getattr(prediction, name)
    for name in ("autoregressive", "draft", "verify", "accept", "upkeep"):
        time = getattr(prediction.terms, name)
        found |= {
            f"{name}.{group}_s": seconds
            for group, seconds in time.group_seconds().items()
        }
        found |= {
            f"{name}.by_{bound}_s": seconds
            for bound, seconds in time.bound_seconds().items()
        }
        for op in time.ops:
            found[f"{name}.ops.{op.name}_s"] = (
                found.get(f"{name}.ops.{op.name}_s", 0.0) + op.time_s
            )
        for part, value in zip(
            ("flops", "weight_bytes", "kv_bytes", "activation_bytes", "sent"),
            time.cost,
            strict=True,
        ):
            found[f"{name}.{part}"] = value
    need = prediction.memory
    fields = getattr(need, "__struct_fields__", None) or vars(need)
    found |= {f"memory.{name}": getattr(need, name) for name in fields}
    found["memory.fits"] = need.fits
    bounds = find("interval")(prediction, find("tokens_error")(prediction, law))
    ends = ("speedup_low", "speedup_high", "tpot_low_s", "tpot_high_s")
    found |= {f"interval.{name}": getattr(bounds, name) for name in ends}
    found |= _deeper(setup, request, prediction, budget)
    shape = prediction.points.shape
    return {
        term: np.broadcast_to(np.asarray(value), shape).ravel().tolist()
        for term, value in found.items()
    }


def _deeper(
    setup: Any, request: dict[str, Any], prediction: Any, budget: Any
) -> dict[str, Any]:
    """Whole requests, serving, idle steps and looked-up drafts."""
    at = prediction.points
    read = find("draft_kv_tokens")(setup, at.context, budget)
    found: dict[str, Any] = {}
    whole = find("whole_requests")(
        prediction,
        output_len=request["output_len"],
        prompts=[tuple(each) for each in request["prompts"]],
    )
    for name in ("ttft_s", "tpot_s", "in_slot_s", "prefill_share"):
        found |= {
            f"requests.{name}": getattr(whole.drafted, name),
            f"requests.alone.{name}": getattr(whole.alone, name),
        }
    found["requests.output_tokens_per_s"] = whole.output_tokens_per_s
    found["requests.speedup"] = whole.speedup_at(prediction.speedup * 0.9)
    serving = find("serving_time")(
        setup,
        concurrency=at.batch,
        prompt_len=at.context,
        output_len=request["output_len"],
        tp_size=at.tp,
    )
    names = ("ttft_s", "tpot_s", "request_s", "active", "requests_per_s")
    found |= {f"serving.{name}": getattr(serving, name) for name in names}
    if "none" not in (request["draft"], request["method"]):
        found["idle_step_s"] = find("idle_step_s")(
            setup, batch=at.batch, kv_len=at.context, draft_kv_len=read, tp_size=at.tp
        )
    if request["method"] in ("ngram", "suffix"):
        few = np.minimum(at.batch, 12.0)
        terms, probability = find("looked_up_terms")(
            setup,
            batch=few,
            kv_len=at.context,
            gamma=at.gamma,
            share=request["share"],
            tp_size=at.tp[0],
        )
        found["looked_up.step_s"] = np.sum(terms.step_s * probability, axis=-1)
    return found


def _kernels(request: dict[str, Any]) -> Answer:
    """Seconds of random works of every table of timed kernels on one device, in every number format."""
    from magicdec.perfmodel.kernels.profile import KERNELS

    tables = [table for kernel in KERNELS for table in kernel.tables]
    profile, found = find("load_hardware")(request["hardware"]), {}
    rng = np.random.default_rng(request["seed"])
    for table in sorted(tables, key=lambda table: table.kind):
        most = {
            "kv_len": 1e6,
            "prompt_len": 1e5,
            "message_bytes": 2.0**28,
            "head_dim": 256.0,
            "top_k": 4096.0,
        }
        for variant in request["variants"]:
            names = (*table.columns, *getattr(table, "flags", ()))
            limits = [
                2.0
                if name in table.flags
                else most.get(name, 2.0**14 if len(name) < 2 else 512.0)
                for name in names
            ]
            rows = {
                name: np.floor(np.exp(rng.uniform(0.0, np.log(limit), request["rows"])))
                for name, limit in zip(names, limits, strict=True)
            }
            found[f"{table.kind}/{variant}"] = np.asarray(
                find("row_seconds")(table, profile, rows, variant)
            )
    return found


def _refit(request: dict[str, Any]) -> Answer:
    """Constants of refits to the published rows of one table."""
    found: Answer = {}
    table, groups = find("read_table")(
        Path(__file__).resolve().parents[2] / request["file"]
    )
    for key, rows in groups.items():
        few = {name: values[: request["rows"]] for name, values in rows.items()}
        profile = find("refit")(
            table, find("load_hardware")(key.device), few, variant=key.variant
        )
        curve = find("curve_of")(table, profile, key.variant)
        for name in curve.__struct_fields__:
            if isinstance(getattr(curve, name), float):
                found[f"{key.name(table.kind)}.{name}"] = np.array(
                    [getattr(curve, name)]
                )
    return found


def _acceptance(request: dict[str, Any]) -> Answer:
    """A profile fitted to counts of sequences that differ."""
    import msgspec

    rows: list[dict[str, Any]] = []
    for sequence, shift in enumerate(request["shifts"]):
        for budget in request["budgets"]:
            for context in request["contexts"]:
                trials = 500
                for position in range(1, request["gamma"] + 1):
                    rate = (
                        1.0
                        - 0.25 * (128.0 / budget) ** 0.4 * (context / 4096.0) ** 0.2
                        + shift
                        + 0.02 * position
                    )
                    accepted = round(trials * min(rate, 0.99))
                    rows.append({
                        "draft_method": request["method"], "budget": budget, "context": context, "position": position,
                        "trials": trials, "accepted": accepted, "temperature": 1.0, "sequence": sequence,
                    })  # fmt: skip
                    trials = accepted
    profile = find("fit_profile")(rows, draft=request["draft"])
    found: Answer = {}
    for term, value in _flat(msgspec.to_builtins(profile), ""):
        found.setdefault(term, []).append(value)
    points = {"budget": 300.0, "context": 9000.0}
    found["rates"] = profile.law.conditional_rates(**points, gamma_max=8).tolist()
    static = find("static_batch_efficiency")
    found["static"] = [
        static(profile, **points, gamma=gamma, batch_size=8, gen_len=100)
        for gamma in (0, 1, 5)
    ]
    return found


def _traffic(request: dict[str, Any]) -> Answer:
    """Times of every request of one load: on replicas under arrivals, and in a closed loop."""
    from dataclasses import replace

    import msgspec

    from magicdec.perfmodel.rate import simulate as traffic

    draft, method = request["draft"]
    spec = find("SpeculationSpec")(
        draft=draft, draft_method=method, draft_budget=request["budget"]
    )
    setup = find("Setup").of(
        request["model"], request["hardware"], request["engine"], spec
    )
    workload = msgspec.convert({"requests": request["workload"]}, find("WorkloadSpec"))
    requests = find("drawn")(
        request["number"], workload=workload, **request["arrivals"]
    )
    policy = (
        msgspec.convert(request["policy"], find("TableGamma"))
        if request["policy"]
        else None
    )
    server = traffic.Server.of(
        setup, requests, acceptance=find("constant_profile")(0.7) if policy else None, policy=policy,
        budget=request["budget"], **request["limits"],
    )  # fmt: skip
    blocks = request["blocks"] or server.limits.num_blocks
    small = replace(server, limits=replace(server.limits, num_blocks=blocks))
    found: Answer = {
        f"limits.{name}": [float(value)]
        for name, value in vars(server.limits).items()
        if value is not None
    }
    for name, outcome in (
        ("open", traffic.simulate(small, requests, **request["replicas"])),
        (
            "closed",
            traffic.simulate_closed(server, requests, users=request["users"], seed=3),
        ),
    ):
        found |= {
            f"{name}.{term}": getattr(outcome, term)
            for term in ("ttft_s", "tpot_s", "e2e_s")
        }
        numbers = (
            outcome.preemptions, outcome.tokens_per_s, outcome.is_overloaded, outcome.goodput(0.1, 0.012),
            outcome.goodput(None, None), *(each.iterations for each in outcome.replicas),
        )  # fmt: skip
        found[f"{name}.numbers"] = [float(value) for value in numbers]
        found[f"{name}.timeline"] = [
            float(value)
            for one in outcome.replicas
            for row in one.timeline
            for value in row
        ]
    return found


ANSWERS = {
    "plan": _plan, "sensitivity": _plan, "points": _points, "kernels": _kernels, "refit": _refit,
    "acceptance": _acceptance, "traffic": _traffic,
}  # fmt: skip


def write(answers: list[Answer], path: Path) -> None:
    """One array of all numbers, and the terms and texts as JSON."""
    numbers: list[float] = []
    index: list[dict[str, Any]] = []
    for each in answers:
        terms: dict[str, Any] = {}
        for term, values in each.items():
            if any(isinstance(value, str) for value in values):
                terms[term] = values
            else:
                terms[term] = len(values)
                numbers += [
                    np.nan if value is None else float(value) for value in values
                ]
        index.append(terms)
    np.savez(
        path,
        numbers=np.asarray(numbers),
        index=np.frombuffer(json.dumps(index).encode(), dtype=np.uint8),
    )


def read(path: Path) -> list[dict[str, Any]]:
    """What `write` wrote: an array or a list of texts by term."""
    with np.load(path) as file:
        numbers, index = file["numbers"], json.loads(file["index"].tobytes())
    place = 0
    for terms in index:
        for term, values in terms.items():
            if isinstance(values, int):
                terms[term] = numbers[place : place + values]
                place += values
    return index


def main(requests_file: str, answers_file: str) -> None:
    requests = json.loads(Path(requests_file).read_text(encoding="utf-8"))
    with np.errstate(all="ignore"):
        write([answer(each) for each in requests], Path(answers_file))


if __name__ == "__main__":
    main(*sys.argv[1:])
