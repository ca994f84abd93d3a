"""Records and a plan as the program writes them, made up for the tests: no number here was measured.

A seeded toy model gives them plausible shapes: time grows with batch x context, acceptance with the draft's budget, and
the "measured" rows scatter around the "predicted" ones by a few per cent.
"""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec

from magicdec.schema.plan import (
    Choice,
    Formats,
    GammaTable,
    MemoryUse,
    NeedsAcceptance,
    Operation,
    Plan,
    Request,
)
from magicdec.schema.record import Environment, Record
from magicdec.schema.row import (
    Candidate,
    Decoding,
    Drafting,
    Gain,
    Layout,
    Memory,
    StepTimes,
    TokenCost,
    columns,
    nested,
)

ENVIRONMENT = Environment(
    created_utc="2026-01-02T03:04:05+00:00",
    host_cpu="Example CPU x2",
    python="3.11.9",
    versions={"magicdec": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
    commit="0123456789ab",
    command="magicdec run --batch 32 --context 4096 --gamma 1,2,3,4,5,6 --draft-budget 256",
)


def rates(budget: int, context: int, gamma: int, method: str) -> list[float]:
    miss = 0.9 * budget**-0.35 * (1 - budget / (context + budget)) ** 0.3
    miss *= 0.8 if method == "snapkv" and budget >= 256 else 1.0
    return [1 - miss * (1 + 0.04 * i) for i in range(gamma)]


def expected_tokens(by_position: list[float]) -> float:
    total, product = 1.0, 1.0
    for rate in by_position:
        product *= rate
        total += product
    return total


def configuration(
    batch: int, context: int, method: str, budget: int | None, gamma: int
) -> dict[str, Any]:
    base = {
        "model": "embedded",
        "dtype": "float32",
        "batch_size": batch,
        "context_len": context,
        "temperature": 1.0,
    }
    if gamma == 0:
        return base
    return base | {
        "draft": "self",
        "draft_method": method,
        "draft_budget": budget,
        "gamma": gamma,
    }


def predicted(
    batch: int,
    context: int,
    method: str = "streamingllm",
    budget: int = 256,
    gamma: int = 3,
) -> Record:
    kv = batch * 6144 * context / 9.5e9
    dense = 3e-3 + 0.5e-3 * batch
    ar = dense + kv + 2e-3
    fields: dict[str, Any] = {
        "source": "calibrated",
        "hardware": "local-cpu",
        "autoregressive_step_s": ar,
    }
    if gamma == 0:
        rate = batch / ar
        fields |= {
            "step_s": ar,
            "tpot_s": ar,
            "tokens_per_s": rate,
            "autoregressive_tokens_per_s": rate,
            "speedup": 1.0,
        }
        return Record(**configuration(batch, context, method, None, 0), **fields)
    draft = dense + kv * budget / context + 2e-3
    verify = dense * (1 + 0.45 * gamma) + kv * (1 + 0.06 * gamma) + 2e-3
    accept = 0.4e-3 * (gamma + 1) + 0.02e-3 * batch
    step = gamma * draft + verify + accept
    by_position = rates(budget, context, gamma, method)
    tokens = expected_tokens(by_position)
    speedup = ar * tokens / step
    fields |= {
        "draft_step_s": draft, "verify_step_s": verify, "accept_step_s": accept, "step_s": step,
        "expected_tokens_per_step": tokens, "acceptance_by_position": by_position, "tpot_s": step / tokens,
        "tokens_per_s": batch * tokens / step, "autoregressive_tokens_per_s": batch / ar, "speedup": speedup,
        "speedup_low": speedup * 0.92, "speedup_high": speedup * 1.08, "bound_by": "kv",
    }  # fmt: skip
    return Record(**configuration(batch, context, method, budget, gamma), **fields)


def measured(
    batch: int,
    context: int,
    method: str = "streamingllm",
    budget: int = 256,
    gamma: int = 3,
) -> Record:
    guess = predicted(batch, context, method, budget, gamma)
    noise = random.Random(f"{batch} {context} {method} {budget} {gamma}")

    def near(value: float, spread: float = 0.03) -> float:
        return value * math.exp(noise.gauss(0, spread))

    ar = near(guess.autoregressive_step_s or 0)
    fields: dict[str, Any] = {
        "source": "measured", "device": "cpu", "seed": 0, "prompts": "stdlib", "weights": "checkpoint", "gen_len": 64,
        "repetitions": 3, "environment": ENVIRONMENT, "autoregressive_step_s": ar, "prefill_s": 2.5,
    }  # fmt: skip
    if gamma == 0:
        fields |= {
            "step_s": ar,
            "tpot_s": ar,
            "tokens_per_s": batch / ar,
            "autoregressive_tokens_per_s": batch / ar,
        }
        return Record(
            **configuration(batch, context, method, None, 0), **fields, speedup=1.0
        )
    step = near(guess.step_s or 0)
    trials, accepted, by_position, histogram = batch * 20, 0, [], []
    counts = [trials]
    for rate in guess.acceptance_by_position or []:
        accepted = sum(noise.random() < rate for _ in range(trials))
        by_position.append(accepted / trials if trials else 0.0)
        histogram.append(trials - accepted)
        trials = accepted
        counts.append(trials)
    tokens = 1 + sum(counts[1:]) / counts[0]
    speedup = ar * tokens / step
    samples = sorted(speedup * (1 + noise.gauss(0, 0.015)) for _ in range(2))
    fields |= {
        "draft_step_s": near(guess.draft_step_s or 0), "verify_step_s": near(guess.verify_step_s or 0),
        "accept_step_s": near(guess.accept_step_s or 0), "step_s": step, "expected_tokens_per_step": tokens,
        "acceptance_by_position": by_position, "acceptance_trials_by_position": counts[:-1],
        "acceptance_histogram": [*histogram, accepted], "tpot_s": step / tokens, "tokens_per_s": batch * tokens / step,
        "autoregressive_tokens_per_s": batch / ar, "speedup": speedup, "speedup_low": min(samples[0], speedup),
        "speedup_high": max(samples[1], speedup), "speedup_samples": [samples[0], speedup, samples[1]],
    }  # fmt: skip
    return Record(**configuration(batch, context, method, budget, gamma), **fields)


def grid() -> list[Record]:
    """Measured and predicted rows of a small grid, with autoregressive rows."""
    points: list[tuple[int, int, str, int, int]] = []
    for batch in (1, 4, 16, 32):
        for context in (1024, 4096):
            points.append((batch, context, "streamingllm", 256, 0))
            points.append((batch, context, "streamingllm", 256, 3))
    points += [(32, 4096, "streamingllm", 256, gamma) for gamma in (1, 2, 4, 5, 6)]
    for budget in (64, 128, 512, 1024):
        points.append((32, 4096, "streamingllm", budget, 3))
    points += [(32, 4096, "snapkv", budget, 3) for budget in (64, 128, 256, 512, 1024)]
    return [make(*point) for point in points for make in (predicted, measured)]


def candidate(batch: int, context: int, budget: int, gamma: int) -> Candidate:
    row = predicted(batch, context, "streamingllm", budget, gamma)
    low = row.speedup_low or 1.0
    high = row.speedup_high or 1.0
    drafting = Drafting(acceptance_source="made up")
    if gamma:
        drafting = Drafting(
            draft=row.draft,
            method=row.draft_method,
            budget=row.draft_budget,
            gamma=gamma,
            tokens_per_step=row.expected_tokens_per_step or 1.0,
            acceptance_source="made up",
        )
    return Candidate(
        hardware="local-cpu",
        batch_size=batch,
        context_len=context,
        layout=Layout(tp_size=1),
        drafting=drafting,
        step=StepTimes(
            autoregressive_s=row.autoregressive_step_s,
            draft_s=row.draft_step_s or 0.0,
            verify_s=row.verify_step_s or 0.0,
            accept_s=row.accept_step_s or 0.0,
            upkeep_s=0.0,
            step_s=row.step_s,
            bound_by=row.bound_by or "kv",
        ),
        decoding=Decoding(
            tpot_s=row.tpot_s,
            tpot_low_s=0.9 * row.tpot_s,
            tpot_high_s=1.1 * row.tpot_s,
            ttft_s=1.0,
            tokens_per_s=row.tokens_per_s,
            tokens_per_s_per_gpu=row.tokens_per_s,
            gain=Gain(speedup=row.speedup or 1.0, low=low, high=high),
        ),
        memory=Memory(bytes_per_gpu=1.2e9, fits=True),
        cost=TokenCost(),
        within_limits=True,
        speedup_vs_best_autoregressive=row.speedup,
    )


def ops(scale: float, query_len: int) -> list[Operation]:
    rows = [
        ("qkv", 0.6e-3, "weights", 2.1e8 * query_len, 6e6), ("attention", 85e-3, "kv", 8e8 * query_len, 805e6),
        ("mlp", 1.8e-3, "compute", 5.6e8 * query_len, 5e6), ("lm_head", 1.2e-3, "compute", 2.5e8 * query_len, 2e6),
        ("norms", 0.4e-3, "overhead", 1e6, 1e6), ("sampling", 0.5e-3, "overhead", 5e6, 4e6),
    ]  # fmt: skip
    return [
        Operation(
            op=op, time_s=t * (scale if op == "attention" else 1) * (1 + 0.3 * (query_len - 1)),
            ceiling_s=0.7 * t * (scale if op == "attention" else 1), bound_by=bound,
            flops=f * (scale if op == "attention" else 1), bytes=b * (scale if op == "attention" else 1),
        )
        for op, t, bound, f, b in rows
    ]  # fmt: skip


def gamma_table() -> GammaTable:
    batches, contexts = [1, 4, 16, 32, 64], [512, 1024, 2048, 4096]
    best = [
        [
            max(
                (predicted(b, c, "streamingllm", 256, g).speedup or 1, g)
                for g in range(7)
            )
            for c in contexts
        ]
        for b in batches
    ]
    return GammaTable(
        tp_size=1,
        batch_sizes=batches,
        context_lens=contexts,
        gamma=[[g for _, g in row] for row in best],
        speedup=[[s for s, _ in row] for row in best],
        verdict=[
            [
                Gain(speedup=s, low=s * 0.92, high=s * 1.08).verdict
                if g
                else "does not pay"
                for s, g in row
            ]
            for row in best
        ],
        fits=[[True] * len(contexts) for _ in batches],
        break_even_gen_len=[[None] * len(contexts) for _ in batches],
        break_even_context=[
            next((c for c, (_, g) in zip(contexts, row, strict=True) if g), None)
            for row in best
        ],
    )


def plan(**changes: Any) -> Plan:
    """A plan as `magicdec plan` writes it, with some of its parts changed."""
    candidates = [
        candidate(b, 4096, budget, g)
        for b in (4, 16, 32)
        for budget in (128, 256)
        for g in range(1, 7)
    ]
    best = max((c for c in candidates if c.batch_size == 32), key=lambda c: c.speedup)
    alone = candidate(32, 4096, 256, 0)
    request = dict.fromkeys(Request.__struct_fields__) | {
        "model": "embedded", "hardware": ["local-cpu"], "batch_sizes": [32], "context_lens": [4096], "gen_len": 0,
        "draft_budgets": [], "temperature": 1.0, "acceptance": [], "dp_attention": False,
        "plugin": False, "burstiness": 1.0, "cached_len": 0, "balance": "round-robin",
        "prefill": "here", "kv_link_gb_s": 50.0,
    }  # fmt: skip
    table = gamma_table()
    whole = Plan(
        model="embedded",
        engine="ours",
        hardware="local-cpu",
        context_len=4096,
        request=Request(**request),
        precision=Formats(weight_dtype="fp32", kv_dtype="fp32", draft_weight_dtype="fp32", draft_kv_dtype="fp32"),
        choice=Choice(
            row=best,
            outcome="speculate",
            without_draft=alone,
            best_without_draft=alone,
            gammas=table.policy.bands(4096, most=best.batch_size),
        ),
        best_by_batch=[],
        pareto=[best],
        gamma_table=table,
        breakdown={"autoregressive": ops(1, 1), "draft": ops(1 / 16, 1), "verify": ops(1, best.gamma + 1)},
        memory=MemoryUse(
            weights_bytes=6.6e6, kv_bytes=830e6, draft_weights_bytes=0, draft_kv_bytes=52e6, workspace_bytes=120e6,
            capacity_bytes=8e9, largest_batch=200, largest_autoregressive_batch=220,
        ),
        other_cases=[],
        needs_acceptance=[NeedsAcceptance(draft="ngram", draft_method="ngram", reason="no published acceptance")],
        notes=["Acceptance of embedded with StreamingLLM was measured on this machine."],
        autoregressive_rows=[],
        candidates=candidates,
    )  # fmt: skip
    best = changes.pop("best", best)
    whole = msgspec.structs.replace(whole, **changes)
    gammas = whole.gamma_table.policy.bands(best.context_len, most=best.batch_size)
    choice = msgspec.structs.replace(whole.choice, row=best, gammas=gammas)
    whole = msgspec.structs.replace(whole, choice=choice)
    return msgspec.structs.replace(whole, choice=whole.choosing(best))


def changed(row: Candidate, **flat: Any) -> Candidate:
    """A candidate with some of its columns changed."""
    return msgspec.convert(nested(columns(row) | flat), Candidate)
