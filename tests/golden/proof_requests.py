"""A seeded set of requests for scripts/proof.py: plain values only, drawn without the package that answers them.

Request number i does not depend on how many are drawn. The names are written down here, so a new model in the catalog
changes no request that was drawn before.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

MODELS: dict[str, tuple[float, int, str]] = {
    "deepseek-r1": (671, 163_840, "moe"), "deepseek-v3": (671, 163_840, "moe"), "deepseek-v3.2": (672, 163_840, "moe"),
    "gemma-3-27b": (27, 131_072, ""), "glm-4.5-air": (107, 131_072, "moe"), "glm-5": (744, 202_752, "moe"),
    "gpt-oss-120b": (117, 131_072, "moe"), "gpt-oss-20b": (21, 131_072, "moe"), "kimi-k2": (1026, 131_072, "moe"),
    "kimi-k2.5": (1026, 262_144, "moe"), "llama-2-13b": (13, 4096, "llama-2"), "llama-2-70b": (69, 4096, "llama-2"),
    "llama-2-7b": (7, 4096, "llama-2"), "llama-2-7b-32k": (7, 32_768, "llama-2"), "llama-3-70b": (71, 8192, "llama-3"),
    "llama-3-8b": (8, 8192, "llama-3"), "llama-3.1-405b": (406, 131_072, "llama-3"),
    "llama-3.1-70b": (71, 131_072, "llama-3"), "llama-3.1-8b": (8, 131_072, "llama-3"),
    "llama-3.2-1b": (1, 131_072, "llama-3"), "llama-3.2-3b": (3, 131_072, "llama-3"),
    "llama-4-maverick": (401, 1_048_576, "moe"), "llama-4-scout": (108, 10_485_760, "moe"),
    "llama-68m": (0.1, 2048, ""), "minimax-m2.5": (229, 196_608, "moe"), "mistral-7b-v0.1": (7, 32_768, "llama-2"),
    "mistral-7b-v0.3": (7, 32_768, ""), "mixtral-8x22b": (141, 65_536, "moe"), "mixtral-8x7b": (47, 32_768, "moe"),
    "nemotron-3-nano-30b-a3b": (32, 262_144, "moe"), "nemotron-super-49b": (50, 131_072, "llama-3"),
    "qwen2.5-14b": (15, 131_072, "qwen-2.5"), "qwen2.5-32b": (33, 131_072, "qwen-2.5"),
    "qwen2.5-72b": (73, 131_072, "qwen-2.5"), "qwen2.5-7b": (8, 131_072, ""), "qwen3-0.6b": (0.6, 40_960, ""),
    "qwen3-1.7b": (1.7, 40_960, "qwen-3"), "qwen3-14b": (15, 131_072, "qwen-3"),
    "qwen3-235b-a22b": (235, 131_072, "moe"),
    "qwen3-30b-a3b": (30, 131_072, "moe"), "qwen3-32b": (33, 131_072, "qwen-3"), "qwen3-4b": (4, 131_072, "qwen-3"),
    "qwen3-8b": (8, 131_072, "qwen-3"), "qwen3-coder-480b-a35b": (480, 262_144, "moe"),
    "qwen3.5-122b-a10b": (122, 262_144, "moe"), "qwen3.5-27b": (27, 262_144, ""),
    "qwen3.5-35b-a3b": (35, 262_144, "moe"), "qwen3.5-397b-a17b": (396, 262_144, "moe"),
    "tinyllama-1.1b": (1.1, 2048, "llama-2"), "yi-1.5-34b": (34, 4096, "yi"), "yi-1.5-6b": (6, 4096, ""),
}  # fmt: skip
"""Billions of parameters, longest context, and the family whose small models draft ("moe": a mixture of experts)."""
DRAFT_MODELS = {
    "llama-2": ("llama-68m", "tinyllama-1.1b"), "llama-3": ("llama-3.2-1b", "llama-3.2-3b"),
    "qwen-2.5": ("qwen2.5-7b",), "qwen-3": ("qwen3-0.6b", "qwen3-1.7b"), "yi": ("yi-1.5-6b",),
}  # fmt: skip
WITH_HEADS = (
    "deepseek-r1", "deepseek-v3", "deepseek-v3.2", "glm-4.5-air", "glm-5", "minimax-m2.5", "qwen3.5-122b-a10b",
    "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b",
)  # fmt: skip
"""Models published with multi-token prediction."""
HARDWARE = {
    "a100-pcie-40gb": 40, "a100-pcie-80gb": 80, "a100-sxm-40gb": 40, "a100-sxm-80gb": 80, "a10g-24gb": 24,
    "b200-sxm-192gb": 192, "gb200-nvl72": 192, "h100-pcie-80gb": 80, "h100-sxm-80gb": 80, "h200-sxm-141gb": 141,
    "l4-24gb": 24, "l40-48gb": 48, "l40s-48gb": 48, "mi300x-192gb": 192, "rtx-4090-24gb": 24,
}  # fmt: skip
ENGINES = {
    "vllm": ("self/streamingllm", "model", "ngram", "suffix", "eagle", "eagle3", "mtp"),
    "sglang": ("model", "ngram", "eagle", "eagle3", "mtp"),
    "trtllm": ("model", "ngram", "eagle3", "mtp"),
    "ours": (
        "self/streamingllm",
        "self/snapkv",
        "self/topk",
        "self/full",
        "model",
        "ngram",
    ),
    "magicdec-2024": ("self/streamingllm", "self/snapkv", "model"),
}
"""The drafts that each engine runs."""
SPARSE = ("streamingllm", "snapkv", "topk")
TABLE = {
    "batch_sizes": [1, 8, 32],
    "context_lens": [128, 512],
    "gammas": [[3, 2], [2, 1], [0, 1]],
}
"""Gammas by batch and context."""
CORNERS: tuple[dict[str, Any], ...] = (
    {"kind": "plan", "options": {"model": "deepseek-v3", "hardware": ["gb200-nvl72"], "engine": "vllm", "gpus": 16,
                                 "context": [4096], "batch": [64], "draft": "mtp"}},
    {"kind": "plan", "options": {"model": "llama-3.1-70b", "hardware": ["gb200-nvl72"], "engine": "trtllm", "gpus": 8,
                                 "context": [8192], "batch": [16], "draft": "eagle3"}},
    {"kind": "points", "model": "qwen3-30b-a3b", "hardware": "h100-sxm-80gb", "engine": "vllm", "is_cpu": False,
     "draft": "eagle3", "method": "eagle3", "draft_model": None, "draft_tp_size": None,
     "sampling": {"temperature": 1.0}, "precision": {}, "draft_precision": {},
     "spread": {"whole_experts": True, "dp": 1}, "rates": [0.7],
     "tp": [1, 1, 1], "batch": [1, 16, 200], "context": [512, 8192, 32_768], "gamma": [0, 3, 1],
     "budget": [64, 64, 64], "gen_len": 0.0, "output_len": 200.0, "prompts": [], "share": 0.8},
    *({"kind": "points", "model": "qwen3-8b", "hardware": "h100-sxm-80gb", "engine": "vllm", "is_cpu": False,
       "draft": method, "method": method, "draft_model": None, "draft_tp_size": draft_tp_size,
       "sampling": {"temperature": temperature}, "precision": {}, "draft_precision": {}, "spread": {},
       "rates": [0.8, 0.7, 0.6], "tp": [2, 2, 4], "batch": [1, 16, 60], "context": [512, 8192, 30_000],
       "gamma": [4, 7, 1], "budget": [64, 64, 64], "gen_len": 100.0, "output_len": 200.0, "prompts": [], "share": 0.8}
      for method, temperature, draft_tp_size in (("dflash", 0.0, 1), ("p-eagle", 1.0, None))),
    *({"kind": "kernels", "hardware": name, "rows": 40, "seed": 5,
       "variants": ["", "fp8", "fp8_block", "nvfp4", "mxfp4", "int4"]}
      for name in ("b200-sxm-192gb", "h200-sxm-141gb", "l40s-48gb", "mi300x-192gb")),
    *({"kind": "refit", "file": f"tests/data/kernels/{name}.csv.gz", "rows": 50}
      for name in ("allreduce_bf16", "allreduce_engines", "decode_attention_fp8", "gemm_quantized", "indexer",
                   "linear_attention", "linear_prefill", "mla_decode", "moe", "prefill_attention_bf16",
                   "sparse_attention", "top_k")),
    *({"kind": "acceptance", "draft": draft, "method": method, "gamma": 4, "budgets": [64, 128, 256, 512],
       "contexts": contexts, "shifts": shifts}
      for draft, method, contexts, shifts in (("self", "streamingllm", [2048, 8192], [-0.05, 0.0, 0.04]),
                                              ("eagle3", "eagle3", [4096], [0.0]))),
    {"kind": "sensitivity", "options": {"model": "llama-3.1-8b", "hardware": ["h100-sxm-80gb"], "engine": "vllm",
                                        "context": [16_384], "batch": [16], "draft": "eagle3", "gamma": 3}},
    {"kind": "sensitivity", "options": {"model": "llama-3.1-8b", "hardware": ["a100-sxm-80gb"], "engine": "ours",
                                        "tp": 2, "context": [32_768], "batch": [24], "draft": "self",
                                        "draft_method": "snapkv", "draft_budget": 512, "gamma": 4}},
    *({"kind": "plan", "num_requests": 120, "options": {
        "model": "llama-3.1-8b", "engine": "vllm", "context": 1000, "gen_len": 40, **options}}
      for options in ({"hardware": "h100", "rate": 12.0, "p95_ttft_ms": 120, "p95_tpot_ms": 10, "draft": "eagle3"},
                      {"hardware": "a100-sxm-80gb", "rate": 30.0, "p95_ttft_ms": 400, "tp": 2})),
    *({"kind": "traffic", "model": "llama-3.1-8b", "hardware": "h100-sxm-80gb", "engine": engine, "draft": draft,
       "budget": budget, "number": 90, "users": users, "blocks": blocks, "policy": policy, "limits": limits,
       "workload": [{"prompt_len": 600, "gen_len": 80}, {"prompt_len": 90, "gen_len": 200, "weight": 2.0}],
       "arrivals": {"rate": rate, "burstiness": 2.5, "cached_len": 100, "seed": 6},
       "replicas": {"replicas": replicas, "balance": balance, "seed": 2, "warm_up": 0.15}}
      for engine, draft, budget, users, blocks, policy, limits, rate, replicas, balance in (
          ("vllm", ("none", "none"), None, 7, 70, None, {"max_tokens": 500}, 30.0, 2, "least-loaded"),
          ("vllm", ("none", "none"), None, 40, None, None, {"max_sequences": 6}, 25.0, 1, "round-robin"),
          ("vllm", ("eagle3", "eagle3"), None, 12, 110, TABLE, {}, 60.0, 2, "round-robin"),
          ("trtllm", ("eagle3", "eagle3"), None, 20, 150, TABLE, {"max_sequences": 9}, 40.0, 1, "round-robin"),
          ("ours", ("self", "streamingllm"), 128, 9, 120, TABLE, {}, 20.0, 2, "least-loaded"))),
)  # fmt: skip
"""Golden requests that no draw holds: a link that reaches beyond a node, whole experts on one rank, heads that draft in
parallel, kernels, fits, what a speedup hangs on, the devices for a rate, and servers with large and small caches."""
POINTS_EVERY = 3
"""Every so many requests are about points of one setup, the others are plans."""


def draw(number: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """The first `number` requests: {"kind": "plan", "options"} or {"kind": "points", ...}."""
    return [_drawn(place, random.Random(f"{seed}/{place}")) for place in range(number)]


def draw_kernels(seed: int = 0) -> list[dict[str, Any]]:
    """Each device's kernels on random works, and refits to the rows that are kept for tests."""
    files = sorted(
        (Path(__file__).resolve().parents[2] / "tests" / "data" / "kernels").glob(
            "*.csv.gz"
        )
    )
    works = {
        "kind": "kernels",
        "rows": 10_000,
        "variants": ["", "fp8", "fp8_block", "nvfp4", "mxfp4"],
    }
    return [
        *(
            {**works, "hardware": name, "seed": seed + place}
            for place, name in enumerate(HARDWARE)
        ),
        *({"kind": "refit", "file": str(file), "rows": 150} for file in files),
    ]


def _drawn(place: int, rng: random.Random) -> dict[str, Any]:
    model = list(MODELS)[(place * 7 + place // len(MODELS)) % len(MODELS)]
    if place % POINTS_EVERY == POINTS_EVERY - 1:
        return {"kind": "points", **_points(model, rng)}
    return {"kind": "plan", "options": _plan(model, rng)}


def _chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def _between(rng: random.Random, low: float, high: float) -> int:
    """A whole number, alike in each factor of two; every third a power of two."""
    value = low * (high / low) ** rng.random()
    return (
        max(round(low), min(round(high), 1 << round(value).bit_length() - 1))
        if _chance(rng, 0.33)
        else round(value)
    )


def _device(model: str, rng: random.Random) -> str:
    """A device whose node may hold the model."""
    billions = MODELS[model][0]
    able = [
        name for name, gigabytes in HARDWARE.items() if gigabytes * 8 > billions * 1.4
    ]
    return rng.choice(able)


def _sampling(rng: random.Random) -> dict[str, Any]:
    ways: list[dict[str, Any]] = [
        {}, {}, {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.6},
        {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 50},
        {"temperature": 0.0, "top_p": 0.9}, {"temperature": 1.0, "top_p": 1.0},
    ]  # fmt: skip
    return rng.choice(ways)


def _formats(rng: random.Random) -> dict[str, str]:
    """Formats that a request names."""
    found: dict[str, str] = {}
    if _chance(rng, 0.4):
        found["weight_dtype"] = rng.choice(("bf16", "fp8", "int8", "int4", "fp32"))
    if _chance(rng, 0.35):
        found["kv_dtype"] = rng.choice(("bf16", "fp8"))
    if _chance(rng, 0.12):
        found["draft_weight_dtype"] = rng.choice(("bf16", "fp8", "int4"))
    if _chance(rng, 0.08):
        found["draft_kv_dtype"] = rng.choice(("bf16", "fp8"))
    return found


def _drafted(
    model: str, engine: str, context: int, is_staged: bool, rng: random.Random
) -> dict[str, Any]:
    """Which draft a plan is about, with a rate of acceptance mostly."""
    if is_staged and _chance(rng, 0.9):
        return (
            {"draft": "eagle3", "acceptance_rate": 0.7}
            if engine == "vllm"
            else {"draft": "none"}
        )
    if _chance(rng, 0.15):
        return {}
    kinds = [
        each
        for each in ENGINES[engine]
        if (each != "mtp" or model in WITH_HEADS)
        and (each != "model" or MODELS[model][2] in DRAFT_MODELS)
    ]
    kind = rng.choice(kinds)
    found: dict[str, Any] = {}
    method = kind.rpartition("/")[2]
    if kind == "model":
        found["draft"] = rng.choice(DRAFT_MODELS[MODELS[model][2]])
        method = (
            rng.choice(("full", "streamingllm"))
            if engine in ("ours", "magicdec-2024")
            else "full"
        )
        found["draft_method"] = method
    elif kind.startswith("self"):
        found |= {"draft": "self", "draft_method": method}
    else:
        found["draft"] = kind
    if method in SPARSE and _chance(rng, 0.8):
        found["draft_budget"] = _between(rng, 16, max(17, min(4096, context - 1)))
    if _chance(rng, 0.6):
        found["acceptance_rate"] = round(rng.uniform(0.3, 0.95), 3)
        if _chance(rng, 0.25):
            found["acceptance_rate"] = [
                round(rng.uniform(0.3, 0.95), 3) for _ in range(rng.randint(1, 6))
            ]
    if _chance(rng, 0.05) and engine in ("ours", "magicdec-2024"):
        found["draft_tp"] = rng.choice((1, 2))
    return found


def _spread(model: str, device: str, engine: str, rng: random.Random) -> dict[str, Any]:
    """How a replica is spread, mostly over as many devices as hold it in 16 bits."""
    billions, _, family = MODELS[model]
    able = [size for size in (1, 2, 4, 8) if size * HARDWARE[device] > 2.6 * billions]
    if engine in ("vllm", "sglang", "trtllm"):
        if family == "moe" and _chance(rng, 0.3):
            if _chance(rng, 0.5):
                return {"dp_attention": True} | (
                    {"ep": rng.choice((4, 8, 16))} if _chance(rng, 0.6) else {}
                )
            ranks = rng.choice((2, 4, 8))
            return {"ep": ranks, "tp": ranks}
        if _chance(rng, 0.2 if engine == "vllm" else 0.05):
            return {"pp": rng.choice((2, 3, 4)), "tp": rng.choice(able[-2:] or [8])}
        if _chance(rng, 0.08):
            return {"gpus": rng.choice((2, 3, 4, 8, 16, 24))}
    return (
        {}
        if _chance(rng, 0.25) or model == "qwen2.5-7b"
        else {"tp": rng.choice(able or [8])}
    )


def _lengths(rng: random.Random) -> dict[str, Any]:
    """Tokens to generate, or a mix of requests."""
    if _chance(rng, 0.3):
        return {"gen_len": _between(rng, 1, 1024)}
    if _chance(rng, 0.08):
        return {
            "workload": [
                {
                    "prompt_len": _between(rng, 16, 1024),
                    "gen_len": _between(rng, 1, 512),
                    "weight": rng.randint(1, 4),
                }
                for _ in range(rng.choice((1, 2, 3, 12)))
            ]
        }
    return {}


def _refusals(rng: random.Random) -> dict[str, Any]:
    """Something that cannot be."""
    ways: list[dict[str, Any]] = [
        {"gamma": 99}, {"draft": "gpt-2"}, {"tp": 7}, {"draft_budget": 200_000, "draft": "self"}, {"gpus": 0},
        {"weight_dtype": "fp3"}, {"hardware": "h1000"}, {"acceptance_rate": 1.5}, {"pp": 4096},
        {"draft_tp": 16, "tp": 2},
        {"draft": "eagle", "draft_method": "mtp"}, {"context": 2**25}, {"tpot_ms": -1.0}, {"batch": 65_000},
        {"draft": "llama-68m", "draft_method": "full"}, {"ttft_ms": 0.001}, {"price": 0.0}, {"engine": "vlm"},
    ]  # fmt: skip
    return rng.choice(ways)


def _plan(model: str, rng: random.Random) -> dict[str, Any]:
    """Options of `magicdec.plan`; mostly one batch and one context, which keeps a plan quick."""
    engine = rng.choice(("vllm", "vllm", "sglang", "trtllm", "ours", "magicdec-2024"))
    lengths = _lengths(rng)
    longest = min(MODELS[model][1], 131_072) - lengths.get("gen_len", 0)
    context = _between(rng, 128, longest)
    device = _device(model, rng)
    options: dict[str, Any] = {
        "model": model,
        "hardware": [device],
        "engine": engine,
        "context": [context],
    }
    options |= (
        lengths | _formats(rng) | _sampling(rng) | _spread(model, device, engine, rng)
    )
    options |= _drafted(model, engine, context, "pp" in options, rng)
    if _chance(rng, 0.92):
        options["batch"] = [_between(rng, 1, max(2, min(256, 400_000 // context)))]
        if _chance(rng, 0.1):
            options["batch"] += [_between(rng, 1, 64), _between(rng, 1, 32)]
    elif _chance(rng, 0.5):
        options["tpot_ms"] = float(_between(rng, 8, 200))
    if _chance(rng, 0.6) and options.get("draft"):
        options["gamma"] = rng.randint(1, 8)
    if _chance(rng, 0.06):
        options["tpot_ms"] = float(_between(rng, 4, 200))
    if _chance(rng, 0.04):
        options["ttft_ms"] = float(_between(rng, 100, 20_000))
    if _chance(rng, 0.1):
        options["price"] = round(rng.uniform(0.5, 8.0), 2)
    if _chance(rng, 0.04):
        options["context"].append(_between(rng, 128, longest))
    if _chance(rng, 0.03):
        options["hardware"].append(_device(model, rng))
    if _chance(rng, 0.03):
        del options["engine"]
    return options | (_refusals(rng) if _chance(rng, 0.025) else {})


def _points(model: str, rng: random.Random) -> dict[str, Any]:
    """One setup with rows of points, for everything that is predicted of it."""
    billions, longest, family = MODELS[model]
    engine = rng.choice(tuple(ENGINES))
    kind = rng.choice(
        [
            each
            for each in ("none", *ENGINES[engine])
            if (each != "mtp" or model in WITH_HEADS)
            and (each != "model" or family in DRAFT_MODELS)
        ]
    )
    method = kind.rpartition("/")[2]
    draft_model = rng.choice(DRAFT_MODELS[family]) if kind == "model" else None
    if kind == "model":
        method = rng.choice(("full", "full", *SPARSE))
    spread: dict[str, Any] = {}
    if engine in ("vllm", "sglang", "trtllm"):
        if family == "moe" and _chance(rng, 0.5):
            spread = {"whole_experts": True, "dp": rng.choice((1, 2, 8))}
        if _chance(rng, 0.25):
            spread["pp"] = rng.choice((2, 3, 4))
    rows = 6
    formats = _formats(rng)
    return {
        "model": model,
        "hardware": _device(model, rng),
        "engine": engine,
        "is_cpu": engine == "ours" and _chance(rng, 0.3),
        "draft": draft_model
        or {"none": "none", "self": "self"}.get(kind.partition("/")[0], kind),
        "method": method,
        "draft_model": draft_model,
        "draft_tp_size": rng.choice((None, None, 1, 2)),
        "sampling": {"temperature": 1.0} | _sampling(rng),
        "precision": {
            key: formats[key] for key in ("weight_dtype", "kv_dtype") if key in formats
        },
        "draft_precision": {
            key.removeprefix("draft_"): value
            for key, value in formats.items()
            if key.startswith("draft_")
        },
        "spread": spread,
        "rates": [
            round(rng.uniform(0.3, 0.98), 3) for _ in range(rng.choice((1, 1, 4)))
        ],
        "tp": [rng.choice((1, 2, 4, 8)) if billions < 100 else 8 for _ in range(rows)],
        "batch": [_between(rng, 1, 400) for _ in range(rows)],
        "context": [_between(rng, 64, min(longest, 131_072)) for _ in range(rows)],
        "gamma": [rng.randint(0 if place else 3, 10) for place in range(rows)],
        "budget": [_between(rng, 16, 4096) for _ in range(rows)],
        "gen_len": rng.choice((0.0, 0.0, float(_between(rng, 1, 2000)))),
        "output_len": float(_between(rng, 1, 2000)),
        "prompts": [
            [float(_between(rng, 16, 8000)), float(rng.randint(1, 4))]
            for _ in range(rng.choice((0, 1, 3)))
        ],
        "share": round(rng.uniform(0.2, 0.95), 3),
    }
