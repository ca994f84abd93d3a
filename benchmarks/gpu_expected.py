"""What each part of the campaign is expected to show on a GPU, written down before the first run: no GPU, no torch.

    python benchmarks/gpu.py --expect h200

The profile is the catalog's, from published tables, with our own engine on it; the configurations are those that
`--all` measures there, with 0.95 of the card's memory less the weights free. Written are the rows of the table and a
predicted record of every configuration. A later run's table has a column with them.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from gpu_shapes import FULL, Item, Maker, grid_items, headline_items
from gpu_table import model_rows

from magicdec.calibrate.local_profile import LocalProfile
from magicdec.files import read_json, write_atomic
from magicdec.measure.configuration import BenchmarkRequest
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.forward import Pass, forward_pass
from magicdec.perfmodel.kernels.op import Where
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.schema.record import Record
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SpeculationSpec
from magicdec.units import GIGA
from magicdec.validate.grid import predict_records

RESULTS = Path(__file__).resolve().parent.parent / "results"
DTYPE = "bfloat16"
FREE_SHARE = 0.95
VLLM_CASE, VLLM_BUDGET, VLLM_GAMMAS, VLLM_RATE = (16, 32_000), 512, (1, 2, 3, 4), 0.81
"""Of gpu_vllm.py: the batch and context of the plugin in vLLM, its drafts, and the stated acceptance."""


def expected_path(device: str) -> Path:
    return RESULTS / f"gpu-expected-{device}.json"


def expected_rows(device: str) -> dict[tuple[str, str], str]:
    """The figure that was expected of each (model, row) on a device of the catalog; empty where none was written."""
    path = expected_path(device)
    rows = read_json(path)["rows"] if path.exists() else []
    return {(row["model"], row["what"]): row["expected"] for row in rows}


def write_expected(name: str, models: tuple[str, ...]) -> None:
    """Predicts every part on a device of the catalog; prints the table, and writes it and the predicted records."""
    hardware = load_hardware(name)
    profile = LocalProfile(hardware=hardware, engine=load_engine("ours"), acceptance=())
    rows: list[dict[str, str]] = [
        _row(
            "calibrate",
            "copy bandwidth, at most",
            f"{hardware.memory_bytes_per_s / GIGA:.0f} GB/s",
        ),
        _row(
            "calibrate",
            "largest bf16 product",
            f"{hardware.flops_per_s['bf16'] / 1e12:.0f} TFLOP/s",
        ),
        _row("tests", "failed", "0"),
    ]
    records: list[Record] = []
    for model in models:
        spec = load_model_spec(model)
        free = FREE_SHARE * hardware.memory_bytes - 2.0 * spec.num_parameters
        maker = Maker(
            shapes=FULL, model_argument=model, spec=spec, device="cuda", dtype=DTYPE, free_bytes=free,
            cuda_graphs=True,
        )  # fmt: skip
        items = headline_items(maker) + grid_items(maker)
        found = [record for item in items for record in _predicted(item, profile)]
        records += found
        with tempfile.TemporaryDirectory() as directory:
            profile.save(Path(directory) / f"{model}.toml")
            rows += [
                _row(model, row.what, row.measured, row.beside)
                for row in model_rows(
                    Path(directory), model, found, _attention(model, profile)
                )
                if row.value is not None
            ]
    records += (in_vllm := _in_vllm(profile))
    rows += [
        _row("vllm", f"speedup at gamma {each.gamma}, acceptance {VLLM_RATE}",
             f"{each.speedup:.2f} x ({each.speedup_low:.2f} to {each.speedup_high:.2f})", _case(each))
        for each in in_vllm if each.gamma
    ]  # fmt: skip
    document = {
        "benchmark": "gpu --expect", "device": hardware.name, "rows": rows,
        "predictions": [_told(record) for record in records],
    }  # fmt: skip
    path = expected_path(hardware.name)
    write_atomic(path, json.dumps(document, indent=1) + "\n")
    print("| part | what | expected | |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['model']} | {row['what']} | {row['expected']} | {row['at']} |")
    print(f"{len(records)} predicted records and {len(rows)} rows: {path}")


def _row(model: str, what: str, expected: str, at: str = "") -> dict[str, str]:
    return {"model": model, "what": what, "expected": expected, "at": at}


def _case(record: Record) -> str:
    return f"batch {record.batch_size}, context {record.context_len}, budget {record.draft_budget}"


def _told(record: Record) -> dict[str, Any]:
    names = ("model", "engine", "draft_method", "draft_budget", "gamma", "batch_size",
             "context_len", "simulated_acceptance", "autoregressive_step_s", "draft_step_s", "verify_step_s", "step_s",
             "tokens_per_s", "speedup", "speedup_low", "speedup_high")  # fmt: skip
    return {"key": record.key, **{name: getattr(record, name) for name in names}}


def _predicted(item: Item, profile: LocalProfile) -> list[Record]:
    """As if they were measured, for the table's rows."""
    found = predict_records(
        item.request, dataclasses.replace(profile, acceptance=(item.acceptance,))
    )
    at = Where(
        profile.hardware,
        profile.engine,
        Precision(weight_dtype="bf16", kv_dtype="bf16"),
    )
    measured = []
    for record in found:
        kv_len = record.context_len + (record.gen_len or 0) / 2
        cost = forward_pass(
            load_model_spec(record.model),
            Pass(at=at, batch=record.batch_size, query_len=1, kv_len=kv_len),
        ).cost
        least_s = (
            float(cost.weight_bytes + cost.kv_bytes)
            / profile.hardware.memory_bytes_per_s
        )
        share = (
            least_s / record.autoregressive_step_s
            if record.autoregressive_step_s
            else None
        )
        measured.append(
            msgspec.structs.replace(record, source="measured", autoregressive_mbu=share)
        )
    return measured


def _attention(model: str, profile: LocalProfile) -> dict[str, Any]:
    """What gpu_parts.attention_facts would note."""
    spec, (batch, context) = load_model_spec(model), FULL.attention_case
    at = Where(
        profile.hardware,
        profile.engine,
        Precision(weight_dtype="bf16", kv_dtype="bf16"),
    )
    seconds = {
        n: float(
            forward_pass(
                spec, Pass(at=at, batch=batch, query_len=n, kv_len=context)
            ).group_seconds()["attention"]
        )
        for n in range(1, 9)
    }
    ratios = {str(n - 1): seconds[n] / seconds[1] for n in range(2, 9)}
    return {
        f"attention {model}": {
            "batch_size": batch,
            "context_len": context,
            "verify_over_decode": ratios,
        }
    }


def _in_vllm(profile: LocalProfile) -> list[Record]:
    batch, context = VLLM_CASE
    acceptance = constant_profile(
        VLLM_RATE, model="llama-3.1-8b", draft_method="streamingllm", source="stated"
    )
    request = BenchmarkRequest(
        model="llama-3.1-8b", weights="random", prompts="random", dtype=DTYPE, device="cuda",
        batch_size=batch, context_len=context, gen_len=FULL.gen_len, repetitions=FULL.repetitions,
        speculations=tuple(
            SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=VLLM_BUDGET, gamma=gamma)
            for gamma in VLLM_GAMMAS
        ),
        simulate_acceptance=(VLLM_RATE,) * max(VLLM_GAMMAS),
    )  # fmt: skip
    served = LocalProfile(
        hardware=profile.hardware, engine=load_engine("vllm"), acceptance=(acceptance,)
    )
    return predict_records(request, served)
