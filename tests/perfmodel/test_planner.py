"""The planner against brute force, and what it refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import magicdec
from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.acceptance import (
    MeasuredProfile,
    constant_profile,
)
from magicdec.perfmodel.acceptance.law import Law
from magicdec.perfmodel.intervals import tokens_error
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.reports.data import ReportData
from magicdec.reports.headline import headline_of
from magicdec.reports.several import to_buy
from magicdec.schema.plan import CaseAnswer
from magicdec.schema.row import Gain, verdict_of
from magicdec.specs.catalog import MODELS_DIRECTORY, load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import SpeculationSpec
from tests.same import assert_read_back

LLAMA = load_model_spec("llama-3.1-8b")
STREAMING = MeasuredProfile(
    model="llama-3.1-8b", draft_method="streamingllm", source="a",
    law=Law(rejection=0.2, budget_exponent=0.4, fill_exponent=0.5),
)  # fmt: skip
SNAPKV = msgspec.structs.replace(STREAMING, draft_method="snapkv", source="b")
CASE: dict[str, Any] = {
    "engine": "magicdec-2024", "tp_size": 8, "batch_sizes": (64,), "context_lens": (32_768,),
    "acceptance": (STREAMING,),
}  # fmt: skip


def setup_of(speculation: SpeculationSpec) -> Setup:
    return Setup.of(LLAMA, "a100-sxm-80gb", "magicdec-2024", speculation)


def test_the_best_equals_brute_force() -> None:
    """Every budget and gamma, one scalar prediction at a time."""
    budgets, gammas = (128, 512, 2048), range(1, 13)
    document = make_plan(PlanRequest(**CASE, draft="self", draft_budgets=budgets))
    speedups = {}
    for budget, gamma in itertools.product(budgets, gammas):
        spec = SpeculationSpec(
            draft="self", draft_method="streamingllm", draft_budget=budget, gamma=gamma
        )
        points = Points(batch=64, context=32_768, tp=8, budget=budget)
        one = predict(setup_of(spec), STREAMING, points)
        speedups[budget, gamma] = float(one.speedup)
    best = max(speedups, key=lambda key: speedups[key])
    assert (document.best.draft_budget, document.best.gamma) == best
    assert document.best.speedup == pytest.approx(speedups[best])
    assert len(document.candidates) == len(speedups)


def test_the_search_under_a_latency_limit_equals_brute_force() -> None:
    limit = 0.02
    request = PlanRequest(
        engine="magicdec-2024", num_gpus=8, context_lens=(16_384,), acceptance=(STREAMING,), draft="self",
        draft_budgets=(512,), tpot_limit_s=limit,
    )  # fmt: skip
    document = make_plan(request)
    best: tuple[float, Any] = (0.0, None)
    spec = SpeculationSpec(
        draft="self", draft_method="streamingllm", draft_budget=512, gamma=1
    )
    batches, gammas = np.arange(1, 140)[:, None], np.arange(13)
    for tp in (
        1,
        2,
        4,
        8,
    ):  # a grid of predictions is each of them by itself: test_grid.py
        rows = predict(
            setup_of(spec),
            STREAMING,
            Points(batch=batches, context=16_384, tp=tp, budget=512, gamma=gammas),
        )
        tpot = rows.full(rows.tpot_s)
        for batch, gamma in np.argwhere(
            rows.full(rows.memory.fits) & (tpot <= limit)
        ).tolist():
            best = max(
                best,
                ((batch + 1) / float(tpot[batch, gamma]) / tp, (tp, batch + 1, gamma)),
            )
    assert document.best.tpot_s <= limit
    assert (
        document.best.tp_size,
        document.best.batch_size,
        document.best.gamma,
    ) == best[1]
    assert document.best.num_replicas == 8 // document.best.tp_size


def test_the_document_holds_what_was_promised() -> None:
    document = make_plan(PlanRequest(**CASE))
    assert document.schema_version == 5
    assert document.kind == "plan"
    assert_read_back(document)
    assert {"autoregressive", "draft", "verify"} <= set(document.breakdown)
    for rows in document.breakdown.values():
        for row in rows:
            assert row.time_s > 0
            assert row.bound_by in {"weights", "kv", "compute", "link", "overhead"}
    assert sum(r.time_s for r in document.breakdown["verify"]) == pytest.approx(
        document.best.step.verify_s
    )
    assert len(make_plan(PlanRequest(**CASE)).to_csv().splitlines()) == 2 + len(
        document.candidates
    )


def test_where_speculation_does_not_pay_the_best_is_autoregressive() -> None:
    best = make_plan(
        PlanRequest(**{**CASE, "batch_sizes": (1,), "context_lens": (1024,)})
    ).best
    assert (best.gamma, best.draft_method, best.speedup) == (0, "none", 1.0)
    assert best.speedup_low == best.speedup_high == 1.0


def test_a_draft_without_acceptance_is_listed_and_not_ranked() -> None:
    document = make_plan(
        PlanRequest(**{**CASE, "engine": "vllm", "model": "qwen2.5-14b"})
    )
    lacking = {(row.draft, row.draft_method) for row in document.needs_acceptance}
    assert ("eagle3", "eagle3") in lacking
    ranked = {(row.draft, row.draft_method) for row in document.candidates}
    assert {
        ("self", "streamingllm"),
        ("suffix", "suffix"),
        ("ngram", "ngram"),
    } <= ranked
    assert not ranked & lacking


def test_a_draft_s_interval_does_not_depend_on_the_drafts_beside_it() -> None:
    together = make_plan(
        PlanRequest(**{**CASE, "acceptance": (STREAMING, SNAPKV)}, draft_budgets=(512,))
    )
    for method in ("streamingllm", "snapkv"):
        given = {**CASE, "acceptance": (SNAPKV if method == "snapkv" else STREAMING,)}
        alone = make_plan(
            PlanRequest(
                **given, draft="self", draft_method=method, draft_budgets=(512,)
            )
        )
        assert len(alone.candidates) >= 8
        assert all(row in together.candidates for row in alone.candidates)


def test_gamma_follows_the_batch_where_that_gains_more_than_the_engine_takes() -> None:
    """Against predictions of each batch of its own, and the engine's cost of following a table."""
    case = {
        "hardware": ("a100-sxm-80gb",),
        "tp_size": 1,
        "draft": "eagle3",
        "context_lens": (1024,),
        "acceptance_rate": (0.8,),
    }
    for engine in ("vllm", "sglang"):
        choice = make_plan(PlanRequest(**case, batch_sizes=(64,), engine=engine)).choice
        ratios = []
        for batch in (1, 8, 64):
            asked = {**case, "batch_sizes": (batch,), "engine": engine}
            free = make_plan(PlanRequest(**asked)).best.speedup
            fixed = make_plan(PlanRequest(**asked, gamma=choice.row.gamma))
            ratios.append(free / fixed.candidates[0].speedup)
        cost = load_engine(engine).graphs.gamma_table_cost
        gain = float(np.exp(np.log(ratios).mean())) / (1.0 + cost)
        assert (len(choice.gammas) > 1) == (gain > 1.0) == (engine == "sglang")


def test_depths_that_an_engine_adapts_are_noted_as_measured() -> None:
    case = {"hardware": ("b200",), "draft": "dspark", "context_lens": (1024,)}
    for batch, gain in ((4, "-7 %"), (128, "+18 %"), (4000, "+70 %")):
        document = make_plan(
            PlanRequest(**case, batch_sizes=(batch,), acceptance_rate=(0.8,))
        )
        told = [note for note in document.notes if "enable_adaptive" in note]
        assert len(told) == document.best.is_speculative
        if told:
            assert f"{gain} tokens/s measured" in told[0]
    engine = load_engine("sglang")
    for draft in engine.drafts.values():
        assert bool(draft.adaptive_gains) == bool(draft.adaptive_setting)
        assert bool(draft.adaptive_gains) == bool(draft.adaptive_measured)


def test_the_source_with_the_highest_expected_rate_leads() -> None:
    def method(rejection: float) -> str:
        other = msgspec.structs.replace(
            SNAPKV, law=msgspec.structs.replace(SNAPKV.law, rejection=rejection)
        )
        best = make_plan(
            PlanRequest(
                **{**CASE, "acceptance": (STREAMING, other)}, draft_budgets=(512,)
            )
        ).best
        return str(best.draft_method)

    assert method(0.4) == "streamingllm"
    assert method(0.05) == "snapkv"


def test_the_gamma_table_equals_a_plan_of_each_cell() -> None:
    table = make_plan(
        PlanRequest(**CASE, draft="self", draft_budgets=(128,))
    ).gamma_table
    for row, column in ((0, 2), (5, 5), (6, 6), (7, 4)):
        batch, context = table.batch_sizes[row], table.context_lens[column]
        cell = {**CASE, "batch_sizes": (batch,), "context_lens": (context,)}
        try:
            best = make_plan(
                PlanRequest(**cell, draft="self", draft_budgets=(128,))
            ).best
        except CapacityError:
            assert not table.fits[row][column]
            continue
        assert table.gamma[row][column] == best.gamma
        assert table.speedup[row][column] == pytest.approx(best.speedup)


def test_break_even_contexts_are_where_the_speedup_is_one() -> None:
    table = make_plan(
        PlanRequest(**CASE, draft="self", draft_budgets=(128,))
    ).gamma_table
    for batch, context in zip(table.batch_sizes, table.break_even_context, strict=True):
        if context is None:
            continue
        spec = SpeculationSpec(
            draft="self", draft_method="streamingllm", draft_budget=128, gamma=1
        )
        gammas = np.arange(1, 13)
        points = Points(batch=batch, context=context, tp=8, budget=128, gamma=gammas)
        assert predict(
            setup_of(spec), STREAMING, points
        ).speedup.max() == pytest.approx(1.0, abs=0.03)


def test_from_the_break_even_context_on_every_cell_drafts() -> None:
    """Also where several drafts are ranked, some of which gain at short contexts only: a table is of one draft."""
    document = make_plan(
        PlanRequest(
            hardware=("h100-sxm-80gb",),
            tp_size=8,
            batch_sizes=(16,),
            context_lens=(16_384,),
            plugin=True,
        )
    )
    table = document.gamma_table
    assert (table.draft, table.draft_method) == (
        document.best.draft,
        document.best.draft_method,
    )
    assert any(0 < gammas.count(0) < len(gammas) for gammas in table.gamma)
    for gammas, start in zip(table.gamma, table.break_even_context, strict=True):
        drafting = [gamma > 0 for gamma in gammas]
        assert drafting[-1] == (start is not None)
        assert all(
            each
            for each, at in zip(drafting, table.context_lens, strict=True)
            if start and at >= start
        )


def test_autoregressive_decoding_is_compared_at_its_own_best_batch() -> None:
    document = make_plan(PlanRequest(**CASE))
    alone = document.best_autoregressive
    assert alone.batch_size == document.memory.largest_autoregressive_batch > 64
    ratio = (
        document.best.decoding.tokens_per_s_per_gpu
        / alone.decoding.tokens_per_s_per_gpu
    )
    assert document.best.speedup_vs_best_autoregressive == pytest.approx(ratio)


def test_no_row_of_the_frontier_beats_another_in_both() -> None:
    rows = make_plan(
        PlanRequest(
            num_gpus=4,
            context_lens=(8192,),
            acceptance=(STREAMING,),
            draft="self",
        )
    ).pareto
    latencies, rates = (
        [r.tpot_s for r in rows],
        [r.decoding.tokens_per_s_per_gpu for r in rows],
    )
    assert latencies == sorted(latencies)
    assert rates == sorted(rates)
    assert len(rows) > 5


def test_each_case_is_answered_as_if_it_were_asked_alone() -> None:
    """Two contexts on two devices: best, table, frontier and baseline of each are those of a plan of its own."""
    devices, contexts = ("a100-sxm-80gb", "h100-sxm-80gb"), (4096, 65_536)
    together = make_plan(
        PlanRequest(
            **{**CASE, "hardware": devices, "context_lens": contexts},
            draft="self",
            draft_budgets=(512,),
        )
    )
    cases = [(case.hardware, case.context_len) for case in together.cases]
    assert sorted(cases) == list(itertools.product(devices, contexts))
    for case in together.cases:
        request = {
            **CASE,
            "hardware": (case.hardware,),
            "context_lens": (case.context_len,),
            "draft": "self",
            "draft_budgets": (512,),
        }
        alone = make_plan(PlanRequest(**request))
        for name in CaseAnswer.__struct_fields__:
            assert getattr(case, name) == getattr(alone, name), name


def test_where_a_longer_context_comes_from_is_said_and_how_to_ask_for_it(
    tmp_path: Path,
) -> None:
    """Qwen3-8B's config.json says 40960; its model card, YaRN of factor 4 over 32768."""
    config = json.loads(
        (MODELS_DIRECTORY / "qwen3-8b.json").read_text(encoding="utf-8")
    )
    file = tmp_path / "config.json"
    case: dict[str, Any] = {
        "context_lens": (100_000,),
        "batch_sizes": (1,),
        "acceptance_rate": 0.8,
    }
    file.write_text(json.dumps(config))
    with pytest.raises(
        CapacityError,
        match=r"at most 40960 tokens; .* rope_scaling \(yarn, factor 2.4\d or more\)",
    ):
        make_plan(PlanRequest(model=str(file), **case))
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    file.write_text(json.dumps({**config, "rope_scaling": yarn}))
    for model, is_noted in (("qwen3-8b", True), (str(file), False)):
        notes = make_plan(PlanRequest(model=model, **case)).notes
        assert (
            any(
                "rope_scaling (yarn, factor 4; see its model card)" in note
                for note in notes
            )
            is is_noted
        )


def test_a_context_that_the_model_cannot_read_refuses_itself_alone() -> None:
    document = make_plan(PlanRequest(**{**CASE, "context_lens": (8192, 200_000)}))
    assert [case.context_len for case in document.cases] == [8192]
    assert any("reads at most 131072 tokens; 200000" in note for note in document.notes)


def test_the_verdict() -> None:
    """A log-normal of this interval has 90 % above 1 from 1.2816 deviations on; what is printed as 90 % pays."""
    cases = {
        (1.2, 1.1, 1.5): "pays",
        (1.2, 0.96, 1.5): "pays",
        (1.2, 0.90, 1.5): "unclear",
        (0.7, 0.5, 0.9): "does not pay",
        (1.0, 1.0, 1.0): "does not pay",
    }
    assert {
        ends: Gain(speedup=ends[0], low=ends[1], high=ends[2]).verdict for ends in cases
    } == cases
    assert [verdict_of(chance) for chance in (0.896, 0.894, 0.104, 0.106)] == [
        "pays",
        "unclear",
        "does not pay",
        "unclear",
    ]


def test_the_verdict_is_of_this_load_and_another_batch_is_another_statement() -> None:
    """One user on one H100 with EAGLE: the whole interval is above 1, although a large batch has more throughput."""
    document = make_plan(
        PlanRequest(
            hardware=("h100-sxm-80gb",),
            tp_size=1,
            batch_sizes=(1,),
            context_lens=(512,),
            draft="eagle",
            acceptance_rate=0.65,
        )
    )
    best, table = document.best, document.gamma_table
    assert 1.0 < best.speedup_low < best.speedup
    assert best.verdict == "pays"
    assert best.speedup_vs_best_autoregressive < 0.2
    assert document.best_autoregressive.batch_size > 100
    column = table.context_lens.index(512)
    assert table.verdict[0][column] == "pays"
    assert_read_back(document)
    shown = headline_of(ReportData.from_records([], document))
    assert not shown.when_not.startswith("Leave it off at batch 1")
    assert shown.answer.startswith("Serve 1 user on ")
    assert [fact.label for fact in shown.facts if fact.label == "For throughput alone"]


def test_rows_and_table_give_one_verdict() -> None:
    """The table's cell at the best row's batch and context is that row's."""
    for context in (1024, 8192, 32_768):
        document = make_plan(PlanRequest(**{**CASE, "context_lens": (context,)}))
        table, best = (
            document.gamma_table,
            max(document.candidates, key=lambda row: row.speedup),
        )
        row, column = table.batch_sizes.index(64), table.context_lens.index(context)
        expected = best.verdict if best.speedup > 1.0 else "does not pay"
        assert (table.verdict[row][column], table.fits[row][column]) == (expected, True)


def test_a_device_that_is_too_small_is_noted_beside_one_that_is_not() -> None:
    request = PlanRequest(
        model="llama-3.1-70b", hardware=("l4-24gb", "h200-sxm-141gb"), batch_sizes=(4,), context_lens=(8192,),
        tp_size=4, acceptance_rate=0.8,
    )  # fmt: skip
    document = make_plan(request)
    assert [case.hardware for case in document.cases] == ["h200-sxm-141gb"]
    assert any("does not fit on 4 x l4-24gb" in note for note in document.notes)


def test_acceptance_measured_at_another_temperature_is_noted() -> None:
    greedy = msgspec.structs.replace(STREAMING, temperature=0.0)
    notes = make_plan(
        PlanRequest(**{**CASE, "acceptance": (greedy,)}, draft="self")
    ).notes
    assert any("measured at temperature 0, not 1" in note for note in notes)


def test_a_static_batch_is_slower_than_the_steady_state_when_sequences_differ() -> None:
    spread = msgspec.structs.replace(STREAMING, spread=0.05)
    best = make_plan(PlanRequest(**{**CASE, "acceptance": (spread,)}, gen_len=256)).best
    assert 0.5 * best.speedup < best.decoding.speedup_static_batch < best.speedup


@pytest.mark.parametrize(("fields", "message"), [
    ({"tp_size": 3}, "tp 3 does not divide llama-3.1-8b"), ({"model": "llama-3.1-8c"}, "did you mean llama-3.1-8b"),
    ({"hardware": ("a100-sxn-80gb",)}, "did you mean a100"), ({"batch_sizes": (0,)}, "batch must be between 1"),
    ({"context_lens": ()}, "at least one context"), ({"context_lens": (200_000,)}, "reads at most 131072 tokens"),
    ({"gamma": 99}, "gamma must be between 0 and 32"),
    ({"draft_budgets": (40_000,)}, "must be below the context 32768"),
    ({"draft_budgets": (2,)}, "must exceed the 4 sink tokens"), ({"draft_method": "snap"}, "did you mean snapkv"),
    ({"draft": "ngram", "draft_method": "topk"}, "has its own method"),
    ({"draft": "tinyllama-1.1b", "acceptance_rate": 0.7, "engine": "vllm"}, "vocabulary of 32000"),
    ({"acceptance_rate": 1.2}, "between 0 and 1"), ({"acceptance_rate": float("nan")}, "between 0 and 1"),
    ({"tpot_limit_s": -1.0}, "must be above 0"),
    ({"tpot_limit_s": 1e-9, "batch_sizes": ()}, "limits on latency; at batch 1 it takes at least .* per token"),
    ({"model": "llama-3.1-405b"}, "does not fit on 8 x a100-sxm-80gb; tp 16, --weight-dtype fp8 or"),
    ({"weight_dtype": "fp7"}, "unknown format of weights 'fp7'"),
    ({"num_gpus": 4}, "tp 8 needs more than the 4 GPUs"),
])  # fmt: skip
def test_the_impossible_gets_a_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, CapacityError), match=message):
        make_plan(PlanRequest(**{**CASE, **fields}))


def test_one_rate_belongs_to_the_draft_named_and_to_one_budget() -> None:
    rows = make_plan(
        PlanRequest(**{**CASE, "acceptance": ()}, acceptance_rate=0.8)
    ).candidates
    assert {(row.draft_method, row.draft_budget) for row in rows} == {
        ("streamingllm", 512)
    }
    assert constant_profile(0.8).source == rows[0].drafting.acceptance_source


def test_a_price_gives_a_cost() -> None:
    best = make_plan(PlanRequest(**CASE, price_per_hour_usd=2.0)).best
    assert best.cost.per_million_tokens_usd == pytest.approx(
        2.0 / 3600 / best.decoding.tokens_per_s_per_gpu * 1e6
    )


def test_a_draft_that_the_ranks_do_not_split_runs_on_the_most_that_do() -> None:
    request = PlanRequest(
        model="llama-2-7b-32k", draft="llama-68m", tp_size=8, batch_sizes=(16,), context_lens=(16_384,),
        acceptance_rate=0.6, engine="ours",
    )  # fmt: skip
    assert {row.drafting.tp_size for row in make_plan(request).candidates} == {4}


def test_small_models_of_the_vocabulary_are_ranked_by_what_other_small_models_reach() -> (
    None
):
    case = {
        "model": "llama-3.1-70b",
        "hardware": ("h100-sxm-80gb",),
        "engine": "sglang",
    }
    document = make_plan(PlanRequest(**case, batch_sizes=(8,), context_lens=(4096,)))
    sources = {row.draft: row.drafting.acceptance_source for row in document.candidates}
    assert {"llama-3.2-1b", "llama-3.2-3b"} <= set(sources)
    assert sources["llama-3.2-1b"].startswith("assumed from")


def test_a_head_to_be_trained_says_from_which_rate_it_would_pay() -> None:
    case = {
        "model": "llama-3.1-70b",
        "hardware": ("h100-sxm-80gb",),
        "tp_size": 8,
        "engine": "vllm",
    }
    case |= {"batch_sizes": (8,), "context_lens": (1024,)}
    lacking = {
        each.draft_method: each
        for each in make_plan(PlanRequest(**case)).needs_acceptance
    }
    rate = lacking["eagle3"].break_even_acceptance_rate
    assert 0.05 < rate < 0.95
    above, below = (
        make_plan(
            PlanRequest(**case, draft_method="eagle3", acceptance_rate=rate + shift)
        )
        .candidates[0]
        .speedup
        for shift in (0.01, -0.015)
    )
    assert below < 1.0 < above


def test_a_small_batch_is_less_certain_where_sequences_differ() -> None:
    """Rates that differ by 0.05 between sequences: the tokens per step of 4 sequences scatter by d ln E / d alpha x
    0.05 / 2, against simulated batches; of 4096 sequences hardly."""
    profile = constant_profile(0.8, model="llama-3.1-8b", draft_method="streamingllm")
    profile = msgspec.structs.replace(profile, spread=0.05)
    rng = np.random.default_rng(1)
    gamma, widths = 4, {}
    for batch in (4, 4096):
        points = Points(batch=batch, context=32768, tp=8, budget=512)
        spec = SpeculationSpec(
            draft="self", draft_method="streamingllm", draft_budget=512, gamma=gamma
        )
        setup = Setup.of(LLAMA, "a100-sxm-80gb", "ours", spec)
        widths[batch] = float(tokens_error(predict(setup, profile, points), profile))
    rates = np.clip(rng.normal(0.8, 0.05, (20_000, 4)), 0.0, 1.0)
    tokens = sum(rates**i for i in range(gamma + 1)).mean(axis=1)
    assert widths[4] == pytest.approx(tokens.std() / tokens.mean(), rel=0.1)
    assert widths[4096] < 0.002


def test_a_break_even_leaves_out_contexts_where_the_draft_alone_has_no_room() -> None:
    """DeepSeek-V3 with its prediction layer on 8 x H200: decoding without it fits a little further."""
    table = make_plan(
        PlanRequest(
            model="deepseek-v3",
            hardware=("h200-sxm-141gb",),
            batch_sizes=(16,),
            draft="mtp",
        )
    ).gamma_table
    row = table.batch_sizes.index(16)
    short = [
        gain
        for gain, context in zip(table.speedup[row], table.context_lens, strict=True)
        if context <= 16_384
    ]
    assert min(short) > 1.0
    assert table.break_even_context[row] in (None, 512)


def test_a_bare_name_takes_the_fewest_devices_that_hold_the_model_and_its_batch() -> (
    None
):
    for batch, context in ((1, 4096), (64, 4096), (64, 32_768), (256, 32_768)):
        asked = {
            "model": "llama-3.1-70b",
            "hardware": ("h100-sxm-80gb",),
            "draft": "none",
        }
        case = asked | {"batch_sizes": (batch,), "context_lens": (context,)}
        found = make_plan(PlanRequest(**case)).best
        if found.tp_size > 2 and found.batch_size == batch:
            fewer = make_plan(PlanRequest(**case, tp_size=found.tp_size // 2))
            assert fewer.best.batch_size < batch
        if found.batch_size < batch:
            assert found.tp_size == 8


def test_a_number_in_front_of_a_device_is_that_of_gpus() -> None:
    asked = {"model": "llama-3.1-70b", "batch_sizes": (16,), "context_lens": (4096,)}
    asked |= {"draft": "ngram"}
    counted = make_plan(PlanRequest(**asked, hardware=("4xh100",)))
    given = make_plan(PlanRequest(**asked, hardware=("h100-sxm-80gb",), num_gpus=4))
    assert counted.best == given.best
    nodes = make_plan(PlanRequest(**asked, hardware=("2x4xh200",)))
    assert nodes.best.num_gpus * nodes.best.num_replicas == 8
    with pytest.raises(ConfigError, match="4xh100 is 4 devices, and --gpus 8"):
        make_plan(PlanRequest(**asked, hardware=("4xh100",), num_gpus=8))


def test_a_batch_beyond_what_fits_is_answered_for_what_does() -> None:
    asked = {"model": "qwen2.5-72b", "hardware": ("4xh100",), "context_lens": (8192,)}
    asked |= {"draft": "ngram"}
    answer = make_plan(PlanRequest(**asked, batch_sizes=(64,)))
    most = answer.best.batch_size
    assert most < 64
    fitting = make_plan(PlanRequest(**asked, batch_sizes=(most,)))
    assert fitting.best == answer.best
    assert make_plan(PlanRequest(**asked, batch_sizes=(64, 8))).best.batch_size == 8


def test_what_does_not_fit_names_devices_and_formats_that_do() -> None:
    asked = {"model": "mistral-small-24b", "context_lens": (8192,), "batch_sizes": (1,)}
    with pytest.raises(CapacityError, match=r"tp 4 or --weight-dtype int4 would"):
        make_plan(PlanRequest(**asked, hardware=("1x4090",)))
    notes = make_plan(PlanRequest(**asked, hardware=("rtx-5090",))).key_notes
    assert any(
        "with --weight-dtype fp8 or int4 it fits on one" in note for note in notes
    )


def test_devices_with_prices_are_offered_by_cost() -> None:
    asked = {
        "model": "qwen3-32b",
        "context_lens": (16_384,),
        "tpot_limit_s": 0.03,
        "draft": "none",
    }
    names = ("h100=2.5", "b200=5", "h200=3.2")
    answer = make_plan(PlanRequest(**asked, hardware=names))
    costs = [offer.cost.per_million_tokens_usd for offer in answer.offers]
    assert costs == sorted(costs)
    for offer in answer.offers:
        price = {"h100-sxm-80gb": 2.5, "b200-sxm-192gb": 5.0, "h200-sxm-141gb": 3.2}[
            offer.hardware
        ]
        assert offer.cost.per_million_tokens_usd == pytest.approx(
            price / 3600.0 / offer.rate_per_gpu * 1e6
        )
        alone = make_plan(
            PlanRequest(**asked, hardware=(offer.hardware,), price_per_hour_usd=price)
        ).best
        assert alone.cost.per_million_tokens_usd == offer.cost.per_million_tokens_usd
    assert to_buy(answer.offers).startswith(f"Buy {answer.offers[0].num_gpus} x ")


def test_devices_without_prices_are_offered_by_tokens_per_second_and_device() -> None:
    answer = magicdec.plan(
        model="qwen3-8b", hardware="all", context=4096, batch=8, draft="none"
    )
    rates = [offer.rate_per_gpu for offer in answer.offers]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) >= 25
    assert to_buy(answer.offers).startswith("Most tokens per device")
    alone = PlanRequest(context_lens=(4096,), batch_sizes=(8,), draft="none")
    assert make_plan(alone).offers == []


def test_the_path_that_was_priced_stands_with_the_breakdown() -> None:
    """n-gram before vLLM 0.30: a host's search on the V1 runner."""
    given = {"model": "llama-3.1-8b", "hardware": "h100", "context": [4096]}
    answer = magicdec.plan(
        **given, batch=[4], draft="ngram", engine="vllm@0.29", task="code-edit"
    )
    assert answer.path.startswith("V1 runner: searched on the host")
    of_head = magicdec.plan(**given, batch=[4], draft="eagle3")
    said = "V2 runner: overlapped, whole graphs; attention by FLASH_ATTN"
    assert of_head.path == said


def test_without_a_context_a_model_is_planned_at_the_longest_that_it_reads() -> None:
    request = PlanRequest(model="olmo-2-7b", hardware=("h100",), batch_sizes=(1,))
    document = make_plan(request)
    assert document.context_len == 4096
    assert any("olmo-2-7b reads at most 4096 tokens" in note for note in document.notes)
    asked = msgspec.structs.replace(request, context_lens=(32_768,))
    with pytest.raises(CapacityError, match="olmo-2-7b reads at most 4096 tokens"):
        make_plan(asked)


def test_no_plan_is_of_a_device_that_the_engine_does_not_start_on() -> None:
    asked: dict[str, Any] = {
        "model": "qwen3-0.6b",
        "batch_sizes": (1,),
        "context_lens": (1024,),
    }
    with pytest.raises(CapacityError, match=r"do not start on p40-24gb.*llama"):
        make_plan(PlanRequest(**asked, hardware=("p40",)))
    plan = make_plan(PlanRequest(**asked, hardware=("p40", "t4")))
    assert [case.hardware for case in plan.cases] == ["t4-16gb"]
    assert any("start on p40" in note for note in plan.key_notes)
