"""Measured servers as aiconfigurator and as magicdec predict them, row by row the same.

    python -m venv /tmp/aic && /tmp/aic/bin/pip install aiconfigurator==0.12.0
    python benchmarks/aiconfigurator_servers.py FILE.csv… --python /tmp/aic/bin/python [--rows 60] [--out ROWS.jsonl]

Its packages do not go with ours, so that it runs in an interpreter of its own, with its estimate of a server under load
(`cli_estimate`, aggregated) on its newest tables of the engine. --rows takes that many of each kind of row (decoding
alone, prefill inside), chosen by a fixed seed; rows that queue, or that no fit of ours uses, are left out of both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.validate.rows import read_rows
from magicdec.validate.serving import ServingRow, predict_rows, without_copies

MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-r1": "deepseek-ai/DeepSeek-V3",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
}
DEVICES = {"h100-sxm-80gb": "h100_sxm", "h200-sxm-141gb": "h200_sxm", "b200-sxm-192gb": "b200_sxm"}
FORMATS = {"bf16": "bfloat16", "mxfp4": "bfloat16"}
DENSE = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b")
CHILD = """
import json, logging, sys, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
from aiconfigurator.cli.api import cli_estimate
for line in sys.stdin:
    try:
        print(json.dumps({"tpot_ms": cli_estimate(**json.loads(line)).tpot}), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}), flush=True)
"""


def request(row: ServingRow) -> dict[str, Any]:
    """The row as arguments of aiconfigurator's `cli_estimate`."""
    wanted: dict[str, Any] = {
        "model_path": MODELS[row.model],
        "system_name": DEVICES[row.hardware],
        "backend_name": row.engine,
        "isl": int(row.prompt_len),
        "osl": int(row.output_len),
        "batch_size": int(row.batch_size),
        "tp_size": row.tp_size,
        "gemm_quant_mode": FORMATS.get(row.weight_dtype, row.weight_dtype),
        "kvcache_quant_mode": FORMATS.get(row.kv_dtype, row.kv_dtype),
    }
    if row.model not in DENSE:
        moe = "w4a16_mxfp4" if row.weight_dtype == "mxfp4" else wanted["gemm_quant_mode"]
        wanted |= {"moe_tp_size": row.tp_size, "moe_ep_size": 1, "moe_quant_mode": moe}
    return wanted


def estimates(rows: list[ServingRow], python: str) -> list[dict[str, Any]]:
    text = "".join(json.dumps(request(row)) + "\n" for row in rows)
    done = subprocess.run([python, "-c", CHILD], input=text, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def chosen(rows: list[ServingRow], most: int) -> list[ServingRow]:
    """At most so many of each kind of row, the same ones each time."""
    found: list[ServingRow] = []
    for isolated in (True, False):
        alike = [row for row in rows if row.is_isolated == isolated]
        order = np.random.default_rng(0).permutation(len(alike))[:most]
        found += [alike[index] for index in sorted(order)]
    return found


def error(records: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([abs(record[name] / record["measured_ms"] - 1.0) for record in records]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--python", required=True)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = without_copies([row for row in read_rows(arguments.files, ServingRow)[0] if row.is_fitted_on])
    rows = chosen([row for row in rows if row.model in MODELS and row.hardware in DEVICES], arguments.rows)
    theirs = estimates(rows, arguments.python)
    ours = predict_rows(rows) * 1e3
    records = [
        {"where": row.where, "model": row.model, "engine": row.engine, "isolated": row.is_isolated,
         "measured_ms": row.measured * 1e3, "magicdec_ms": float(mine),
         **{f"aiconfigurator_{key}": value for key, value in other.items()}}
        for row, mine, other in zip(rows, ours, theirs, strict=True)
    ]  # fmt: skip
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    for isolated in (True, False):
        for engine in dict.fromkeys(row.engine for row in rows):
            alike = [record for record in records if (record["isolated"], record["engine"]) == (isolated, engine)]
            both = [record for record in alike if "aiconfigurator_tpot_ms" in record]
            if both:
                kind = "decoding alone" if isolated else "prefill inside"
                mine, theirs_error = error(both, "magicdec_ms"), error(both, "aiconfigurator_tpot_ms")
                print(
                    f"{engine:7} {kind:15} {len(both):4} rows: magicdec {mine:.1%}, aiconfigurator {theirs_error:.1%}"
                )
    failed = [record for record in records if "aiconfigurator_error" in record]
    if failed:
        print(f"aiconfigurator could not answer {len(failed)} rows; the first: {failed[0]['aiconfigurator_error']}")


if __name__ == "__main__":
    main()
