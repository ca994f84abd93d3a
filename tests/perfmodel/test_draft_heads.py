"""What trained heads cost: EAGLE, EAGLE-3, multi-token prediction, against counts by hand and measured chains."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evidence import DATA
from evidence.serving import ServingRow, predict_rows
from magicdec import api
from magicdec.errors import ConfigError
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.planner import make_plan
from magicdec.perfmodel.setup import Setup
from magicdec.perfmodel.step import StepTerms, looked_up_terms, step_terms
from magicdec.schema.plan import Plan
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import (
    HeadSpec,
    SamplingSpec,
    SpeculationSpec,
    load_head,
)
from magicdec.validate.rows import NEWEST, read_rows

CHAINS = DATA / "servers" / "speculative_chains.csv"
LLAMA = load_model_spec("llama-3.1-8b")


def setup(method: str, model: str = "llama-3.1-8b") -> Setup:
    spec = SpeculationSpec(draft=method, draft_method=method)  # type: ignore[arg-type]
    return Setup.of(model, "h100", "vllm", spec, sampling=SamplingSpec())


def terms(
    method: str,
    *,
    gamma: int = 3,
    batch: int = 1,
    tp: int = 1,
    model: str = "llama-3.1-8b",
    context: int = 1000,
    version: str = NEWEST,
    uniform: float = 1.0,
) -> StepTerms:
    given = setup(method, model)
    return step_terms(
        dataclasses.replace(given, engine=given.engine.of_version(version)),
        batch=batch,
        uniform=uniform,
        kv_len=context,
        draft_kv_len=context,
        gamma=gamma,
        tp_size=tp,
        full_acceptance=0.3,
    )


def test_measured_chains_are_predicted():
    """Llama-3.1-8B, H100, batch 1, K from 2 to 7 (vLLM issue 20780)."""
    rows, refused = read_rows([CHAINS], ServingRow)
    assert not refused
    error = predict_rows(rows) / np.array([row.measured for row in rows]) - 1.0
    assert np.abs(error).mean() < 0.06


def test_the_weights_that_a_head_reads_are_counted_by_hand():
    """EAGLE: one layer, the join of two hidden states, the target's head. EAGLE-3: a layer with two inputs to queries,
    keys and values, and a head of 32,000 tokens."""
    hidden, vocab = LLAMA.hidden_size, LLAMA.vocab_size
    attention = LLAMA.attention
    qkv = (
        hidden * (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    )
    layer = (
        qkv + attention.num_heads * attention.head_dim * hidden + 3 * hidden * 14_336
    )
    eagle, eagle3, mtp = (
        float(terms(method).draft.cost.weight_bytes) / 2
        for method in ("eagle", "eagle3", "mtp")
    )
    assert eagle == pytest.approx(layer + 2 * hidden**2 + vocab * hidden)
    assert mtp == pytest.approx(eagle)
    assert eagle3 == pytest.approx(layer + qkv + 32_000 * hidden)


def test_an_eagle3_step_joins_three_hidden_states_of_every_verified_token():
    gamma, batch = 5, 4
    upkeep = terms("eagle3", gamma=gamma, batch=batch).upkeep.cost
    assert float(upkeep.flops) == pytest.approx(
        2 * batch * (gamma + 1) * 3 * LLAMA.hidden_size**2
    )
    assert float(terms("eagle", gamma=gamma, batch=batch).upkeep.cost.flops) == 0.0


def test_eagle3_costs_more_per_step_than_its_bytes_say_in_old_versions():
    """Its own vocabulary makes it lighter than EAGLE; the chains measured in vLLM 0.9 are slower all the same."""
    old = load_engine("vllm").of_version("0.9")
    for engine, is_slower in ((old, True), (load_engine("vllm"), False)):
        one, other = (
            step_terms(
                dataclasses.replace(setup(method), engine=engine),
                batch=1,
                kv_len=1,
                draft_kv_len=1,
                gamma=3,
            )
            for method in ("eagle3", "eagle")
        )
        assert float(one.draft.cost.weight_bytes) < float(other.draft.cost.weight_bytes)
        assert (float(one.draft.total_s) > float(other.draft.total_s)) == is_slower


def test_a_mixture_of_experts_with_eagle3_is_slowed_down():
    """Qwen3-30B-A3B in SGLang on two H100s: 0.72 times the speed without at batch 1, 0.79 at batch 4 (SpecForge issue
    339). The target's steps are short, the head's are not, and verified tokens touch more experts."""
    rows, _ = read_rows([CHAINS.with_name("speculative_moe.csv")], ServingRow)
    predicted = predict_rows(rows)
    assert np.all(predicted < 0.85)
    assert (
        np.abs(predicted / np.array([row.measured for row in rows]) - 1.0).mean() < 0.08
    )


def test_a_dense_head_of_a_mixture_reads_no_experts():
    mixture = terms("eagle3", tp=2, model="qwen3-30b-a3b")
    assert float(mixture.draft.cost.weight_bytes) < 0.2 * float(
        mixture.verify.cost.weight_bytes
    )


def test_lookup_on_the_host_grows_with_the_batch_and_the_text():
    """vLLM's proposer searches one sequence after the other: 17 us for 8k tokens, 66 us for 32k."""
    engine = load_engine("vllm")
    per_sequence = (
        engine.overheads.older_sequence_overhead_s
        + engine.overheads.speculation_sequence_s
    )
    for context, scan_s in ((8192, 17e-6), (32_768, 66e-6)):
        few, many = (
            float(
                terms(
                    "ngram", batch=batch, context=context, version="0.29"
                ).upkeep.total_s
            )
            for batch in (1, 129)
        )
        assert many - few == pytest.approx(128 * (scan_s + per_sequence), rel=1e-3)


def test_a_step_for_which_nothing_was_found_still_searches_and_waits_for_the_host():
    """Asynchronous scheduling is off with look-ups, also in steps without a draft."""
    engine = load_engine("vllm")
    looked_up = terms("ngram", batch=16, context=8192, version="0.29")
    extra = float(looked_up.undrafted.total_s - looked_up.autoregressive.total_s)
    apart = (
        engine.overheads.older_sequence_overhead_s
        - engine.overheads.sequence_overhead_s
    )
    layers, host_layer_s = 32, engine.graphs.piecewise_host_layer_s
    graphs = engine.graphs
    piecewise_s = graphs.piecewise_pass_s + layers * graphs.piecewise_layer_s
    pass_s = sum(
        float(op.time_s)
        for op in looked_up.autoregressive.ops
        if op.name not in ("step overhead", "sampling")
    )
    expected = (
        engine.drafts["ngram"].search_s
        + (max(layers * host_layer_s - pass_s, 0.0) + piecewise_s) / 2.0
        + engine.overheads.synchronous_step_overhead_s
        + 16 * (17e-6 + apart)
    )
    assert extra == pytest.approx(expected, rel=1e-3)
    head = terms("eagle3", batch=16, context=8192)
    assert float(head.undrafted.total_s) == float(head.autoregressive.total_s)


def test_a_head_stays_in_16_bits_beside_a_narrow_target_with_its_published_acceptance():
    def planned(**formats: str):
        return api.plan(
            model="llama-3.1-8b", hardware="h100-sxm-80gb", engine="vllm", batch=4, context=4096, tp=1, draft="eagle3",
            gamma=3, **formats,
        )  # fmt: skip

    (wide,), (narrow,) = planned().candidates, planned(weight_dtype="fp8").candidates
    assert narrow.step.draft_s == wide.step.draft_s
    assert narrow.step.autoregressive_s < 0.8 * wide.step.autoregressive_s
    said = planned(weight_dtype="fp8", draft_weight_dtype="bf16")
    assert said.candidates == [narrow]
    assert (said.precision.weight_dtype, said.precision.draft_weight_dtype) == (
        "fp8",
        "bf16",
    )
    (quantised,) = planned(weight_dtype="fp8", draft_weight_dtype="int4").candidates
    widths = [row.speedup_high / row.speedup_low for row in (quantised, narrow)]
    assert widths[0] > widths[1]


def test_a_self_draft_in_another_format_than_its_target_is_less_sure():
    def width(**formats: str) -> float:
        asked = {
            "hardware": "h100-sxm-80gb",
            "engine": "ours",
            "batch": 4,
            "context": 4096,
            "tp": 1,
            "gamma": 3,
            "draft_budget": 512,
        }
        plan = api.plan(
            model="llama-3.1-8b",
            draft="self",
            draft_method="streamingllm",
            **asked,
            **formats,
        )
        (row,) = plan.candidates
        return row.speedup_high / row.speedup_low

    own = width()
    assert width(draft_weight_dtype="bf16") == own
    assert width(draft_weight_dtype="fp8") > own


EAGLE3_CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
                 "hidden_size": 4096, "max_position_embeddings": 8192, "draft_vocab_size": 32000,
                 "vocab_size": 151936}  # fmt: skip
PLANNED = {
    "model": "qwen3-8b",
    "hardware": ("h100-sxm-80gb",),
    "tp_size": 1,
    "batch_sizes": (4,),
    "gamma": 3,
}


def planned(path: Path | None, context: int, **more: object) -> Plan:
    draft = {"draft": "eagle3"} if path is None else {"draft_model": str(path)}
    return make_plan(PlanRequest(**PLANNED, **draft, context_lens=(context,), **more))


def config(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps(EAGLE3_CONFIG | changes))
    return path


def test_a_named_heads_own_length_and_window_set_where_it_accepts_less(
    tmp_path: Path,
) -> None:
    """Usual heads accept less from 2k on, one trained to 8k from there, one with a window nowhere."""
    usual = [
        planned(None, context).candidates[0].drafting.tokens_per_step
        for context in (1024, 8192, 32_768)
    ]
    assert usual[0] > usual[1] > usual[2]
    longer = planned(config(tmp_path / "config.json"), 32_768)
    at_8k = planned(tmp_path, 8192)
    assert at_8k.candidates[0].drafting.tokens_per_step == pytest.approx(usual[0])
    shorter = planned(
        config(tmp_path / "shorter.json", max_position_embeddings=2048), 32_768
    )
    tokens = [plan.candidates[0].drafting.tokens_per_step for plan in (longer, shorter)]
    assert usual[0] > tokens[0] > tokens[1] > 1.0
    assert any(
        "trained on up to 8,192 tokens" in note and "at 32,768" in note
        for note in longer.notes
    )
    assert not any("trained on up to" in note for note in at_8k.notes)
    windowed = planned(
        config(
            tmp_path / "window.json",
            sliding_window=2048,
            layer_types=["sliding_attention"],
        ),
        32_768,
    )
    assert windowed.candidates[0].drafting.tokens_per_step == pytest.approx(usual[0])
    assert windowed.candidates[0].step.draft_s < longer.candidates[0].step.draft_s
    copied = planned(
        config(tmp_path / "copied.json", max_position_embeddings=40_960), 32_768
    )
    assert tokens[0] > copied.candidates[0].drafting.tokens_per_step > tokens[1]
    large = planned(config(tmp_path / "large.json", rope_theta=1_000_000), 32_768)
    assert usual[0] > large.candidates[0].drafting.tokens_per_step > tokens[0]


def test_a_listed_head_reads_the_rows_of_its_own_vocabulary() -> None:
    """DeepSpec's proposes all 151,936 tokens, AngelSlim's 32,000: the difference is read in a pass, at
    3.35 TB/s at most."""
    draft_s = []
    for name in ("deepseek-ai/eagle3_qwen3_8b_ttt7", "AngelSlim/Qwen3-8B_eagle3"):
        plan = planned(None, 1024, draft_name=name, accept_length=2.5)
        draft_s.append(plan.candidates[0].step.draft_s)
    least = 2 * 4096 * (151_936 - 32_000) / 3.35e12
    assert least < draft_s[0] - draft_s[1] < 2 * least


def test_a_head_as_the_speculators_library_writes_it_is_read(tmp_path: Path) -> None:
    inner = {
        "num_hidden_layers": 4,
        "hidden_size": 4096,
        "max_position_embeddings": 4096,
        "sliding_window": None,
    }
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {"speculators_model_type": "peagle", "transformer_layer_config": inner}
        )
    )
    assert load_head(path) == HeadSpec(
        method="p-eagle",
        num_layers=4,
        max_positions=4096,
        rotary_base=10_000.0,
        hidden_size=4096,
    )


@pytest.mark.parametrize(("changes", "message"), [
    ({"hidden_size": 5120}, "hidden size 5120, but .* has 4096"),
    ({"architectures": ["LlamaForCausalLM"]}, "no trained head that is known"),
    ({"num_hidden_layers": "many"}, "num_hidden_layers"),
])  # fmt: skip
def test_a_head_that_does_not_go_with_the_target_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(config(tmp_path / "config.json", **changes), 4096)
    with pytest.raises(ConfigError, match="is a head of eagle3, not of eagle"):
        planned(config(tmp_path / "other.json"), 4096, draft="eagle")
    with pytest.raises(ConfigError, match="no configuration of a head"):
        planned(tmp_path / "nothing", 4096)


def test_v1_waits_for_the_host_in_steps_that_mix_drafts_and_none():
    """V1 replays a whole graph only where every sequence has as many tokens; elsewhere a layer takes
    at least its launch by one law, and each pass and layer so much more by another. V2 verifies gamma
    drafts of every sequence in one graph."""
    layers = 80
    engine = load_engine("vllm")
    host_s = layers * engine.graphs.piecewise_host_layer_s

    def verify_s(**path: Any) -> float:
        time = terms("ngram", model="llama-3.1-70b", tp=8, **path).verify
        return float(time.total_s)

    whole_s = verify_s(version="0.29", uniform=1.0)
    assert whole_s < host_s
    graphs = engine.graphs
    piecewise_s = graphs.piecewise_pass_s + layers * graphs.piecewise_layer_s
    assert verify_s(version="0.29", uniform=0.0) == pytest.approx(
        (host_s + whole_s + piecewise_s) / 2.0, rel=0.02
    )
    assert verify_s(uniform=0.0) == pytest.approx(whole_s)
    older_s = verify_s(version="0.10", uniform=1.0)
    assert verify_s(version="0.10", uniform=0.0) == pytest.approx(older_s)
    mixed = terms("ngram", version="0.29", uniform=0.0)
    assert float(mixed.spread_s) > float(terms("ngram", version="0.29").spread_s)


@pytest.mark.parametrize(("draft_len", "whole"), [(8.0, 1.0), (6.0, 0.5), (3.0, 0.0)])
def test_a_step_whose_drafts_are_shorter_than_gamma_replays_no_whole_graph(
    draft_len, whole
):
    """Suffix decoding's, on V1: all drafts of a step are drawn long or short, and the launches of
    each case are those of its pass."""
    engine = load_engine("vllm").of_version("0.29")
    given = dataclasses.replace(setup("suffix", "llama-3.1-70b"), engine=engine)
    share, batch = 0.7, 2
    mean, probability = looked_up_terms(
        given,
        batch=batch,
        kv_len=900,
        gamma=8,
        share=share,
        draft_len=draft_len,
        tp_size=8,
    )
    expected = 0.0
    for having in (1, 2):
        ways = (
            (2 if having == 1 else 1) * share**having * (1 - share) ** (batch - having)
        )
        all_whole = whole**2 if having == batch else 0.0
        for uniform, chance in ((1.0, all_whole), (0.0, 1.0 - all_whole)):
            step = step_terms(
                given,
                batch=batch,
                kv_len=900,
                draft_kv_len=900,
                gamma=draft_len * having / batch,
                tp_size=8,
                uniform=uniform,
            )
            expected += ways * chance * float(step.verify.total_s)
    found = float(
        (mean.verify.total_s * np.where(mean.gamma > 0, probability, 0.0)).sum()
    )
    assert found == pytest.approx(expected, rel=1e-9)
