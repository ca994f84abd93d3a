"""Prefix hits in the simulation of a rate: what each draft finds of the same cached prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import magicdec
from magicdec.api import request_of
from magicdec.perfmodel.prefix_cache import hit_tokens
from magicdec.perfmodel.rate.layouts import ServedLayout, served_layouts
from magicdec.perfmodel.rate.load import Load
from magicdec.perfmodel.rate.trials import Trial
from magicdec.specs.catalog import load_model_spec

HYBRID: dict[str, Any] = {
    "model": "qwen3.5-35b-a3b",
    "hardware": "h200-sxm-141gb",
    "tp": 1,
    "kv_dtype": "fp8",
    "gamma": 3,
    "engine": "vllm@0.32",
}
PLAIN: dict[str, Any] = HYBRID | {"model": "llama-3.1-8b"}
SHARED = [3783, 7541, 11291, 15018, 18769]
"""Cached tokens of five repeated prompts (vLLM issue 54360)."""
COUNTED = [0, 4288, 8576, 12864, 15008]
"""Tokens hit there with multi-token prediction, gamma 3, an fp8 cache."""


def multi_turn(folder: Path, turns: list[int]) -> str:
    """A log of one conversation, whose turns find all but the last token of the ones before."""
    rows = [
        f"{20.0 * place:.1f},{cached + 1},60,{cached}"
        for place, cached in enumerate(turns)
    ]
    path = folder / "turns.csv"
    path.write_text("arrival,prompt,output,cached\n" + "\n".join(rows) + "\n")
    return str(path)


def layout_of(
    draft: str, requests: str, given: dict[str, Any]
) -> tuple[Load, ServedLayout]:
    request = request_of(**given, requests=requests, draft=draft)
    model = load_model_spec(given["model"])
    load = Load.of(request, model)
    layouts = served_layouts(load, model)
    (layout, *_) = [
        each for each in layouts if (each.option is None) == (draft == "none")
    ]
    return load, layout


def found(draft: str, requests: str, given: dict[str, Any]) -> list[int]:
    load, layout = layout_of(draft, requests, given)
    outcome = Trial(load=load, layout=layout).at(load.rate, 1)
    return outcome.requests.cached_len.tolist()


def test_a_simulated_hybrid_finds_what_vllm_counted(tmp_path: Path) -> None:
    requests = multi_turn(tmp_path, SHARED)
    assert found("mtp", requests, HYBRID) == COUNTED
    alone = found("none", requests, HYBRID)
    assert all(least < most for least, most in zip(COUNTED, alone, strict=True))
    later = found("mtp", requests, HYBRID | {"engine": "vllm@0.33"})
    assert [more - less for more, less in zip(later, COUNTED, strict=True)] == [
        2144
    ] * 5


def test_a_plain_model_loses_one_block(tmp_path: Path) -> None:
    requests = multi_turn(tmp_path, SHARED)
    for draft, drops in (("none", False), ("ngram", False), ("eagle3", True)):
        wanted = [
            hit_tokens(shared, shared + 1, unit_tokens=16, drops_last_unit=drops)
            for shared in SHARED
        ]
        assert found(draft, requests, PLAIN) == wanted


def traffic_notes(
    draft: str, requests: str, given: dict[str, Any], *, limit: float
) -> list[str]:
    """Notes on the traffic under a limit on the time between tokens that takes the draft."""
    plan = magicdec.plan(
        **given, requests=requests, draft=draft, acceptance_rate=0.9, p95_tpot_ms=limit
    )
    assert plan.traffic is not None
    assert plan.traffic.best.is_speculative
    return plan.traffic.notes


@pytest.mark.usefixtures("few_requests")
def test_a_plan_for_a_log_names_what_the_hits_cost_and_the_option(
    tmp_path: Path,
) -> None:
    """On the hybrid model; on the plain one a block of 16 tokens is not worth a sentence."""
    requests = multi_turn(tmp_path, SHARED)
    (note,) = [
        each
        for each in traffic_notes("mtp", requests, HYBRID, limit=4.0)
        if "prefix hit" in each
    ]
    assert "2,144 matched tokens" in note
    assert "disable_eagle_block_drop" in note
    plain = traffic_notes("eagle3", requests, PLAIN, limit=4.0)
    assert not [each for each in plain if "prefix hit" in each]


@pytest.mark.parametrize("gen_len", [0, 400])
def test_a_plan_with_cached_prompts_names_the_option(gen_len: int) -> None:
    """With whole requests in tokens per second, else in time to the first token."""
    plan = magicdec.plan(
        **HYBRID, context=7542, cached="100%", gen_len=gen_len, batch=4, draft="mtp"
    )
    notes = [each for each in plan.notes if "prefix hit" in each]
    assert len(notes) == int(plan.best.is_speculative)
    assert all("disable_eagle_block_drop" in each for each in notes)
    assert plan.best.is_speculative


@pytest.mark.parametrize("engine", ["sglang", "vllm@0.33"])
def test_engines_that_keep_the_last_block_have_no_such_note(engine: str) -> None:
    plan = magicdec.plan(
        **HYBRID | {"engine": engine},
        context=7542,
        cached="100%",
        gen_len=0,
        batch=4,
        draft="mtp",
    )
    assert not [each for each in plan.notes if "prefix hit" in each]
