"""Writes tests/data/golden_predictions.json: what `plan` answers for a few configurations.

    python scripts/golden_predictions.py

Its test (tests/perfmodel/test_golden_predictions.py) fails when an answer changes. That is no proof that the
answers are right, only that a change to them was meant: look at the difference of the file before committing it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from magicdec.perfmodel.planner import PlanRequest, plan

FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "golden_predictions.json"
REQUESTS: dict[str, dict[str, Any]] = {
    "default": {},
    "losing": {"context_lens": (4096,), "batch_sizes": (256,), "tp_size": 8},
    "llama-2 with a draft model": {
        "model": "llama-2-7b-32k", "draft": "tinyllama-1.1b", "draft_method": "streamingllm", "draft_budgets": (512,),
        "context_lens": (16_000,), "batch_sizes": (64,), "tp_size": 8,
    },
    "70B in fp8 under a latency limit": {
        "model": "llama-3.1-70b", "hardware": ("h100-sxm-80gb",), "num_gpus": 8, "context_lens": (16_384,),
        "weight_dtype": "fp8", "kv_dtype": "fp8", "tpot_limit_s": 0.03,
    },
    "experts on MI300X with n-grams": {
        "engine": "vllm", "model": "mixtral-8x7b", "hardware": ("mi300x-192gb",), "draft": "ngram",
        "acceptance_rate": 0.6,
        "batch_sizes": (16,), "context_lens": (8192,),
    },
    "b200 with a given rate": {
        "model": "qwen3-32b", "hardware": ("b200-sxm-192gb",), "tp_size": 4, "batch_sizes": (64,),
        "draft_method": "snapkv", "draft_budgets": (1024,), "acceptance_rate": 0.85,
    },
}  # fmt: skip
KEYS = (
    "draft", "draft_method", "draft_budget", "gamma", "tp_size", "batch_size", "autoregressive_step_s", "draft_step_s",
    "verify_step_s", "step_s", "expected_tokens_per_step", "tpot_s", "speedup", "speedup_low", "speedup_high",
    "speedup_vs_best_autoregressive", "ttft_s", "memory_bytes_per_gpu", "bound_by",
)  # fmt: skip
DIGITS = 5


def rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def predictions() -> dict[str, dict[str, Any]]:
    """The best row of each request, to five digits."""
    paper: dict[str, Any] = {"engine": "magicdec-2024"}
    rows = {name: plan(PlanRequest(**(paper | request))).best for name, request in REQUESTS.items()}
    return {name: {key: rounded(getattr(row, key)) for key in KEYS} for name, row in rows.items()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(predictions(), indent=1) + "\n", encoding="utf-8")
