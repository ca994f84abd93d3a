"""The shipped acceptance of heads and look-ups against the published figures, and which engine runs which draft."""

from __future__ import annotations

import csv
import math
import re

import pytest

from magicdec.counts import expected_tokens_per_step
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import (
    PROFILES_DIRECTORY,
    MeasuredProfile,
    default_profile,
    load_profile,
    published_drafts,
)
from magicdec.perfmodel.planner import PlanRequest, make_plan

with (PROFILES_DIRECTORY / "published.csv").open(encoding="utf-8", newline="") as file:
    FIGURES = list(csv.DictReader(file))


@pytest.mark.parametrize(
    "row", FIGURES, ids=lambda row: "-".join(list(row.values())[:7])
)
def test_a_published_figure_lies_within_two_deviations_of_its_profile(
    row: dict[str, str],
) -> None:
    temperature = float(row["temperature"]) if row["temperature"] else None
    method, gamma = row["draft_method"], int(row["gamma"] or 3)
    draft: dict[str, str] = (
        {"draft": "self", "weight_dtype": "int4"}
        if method == "full"
        else {"draft": method}
    )
    profile = default_profile(row["model"], method, temperature=temperature, **draft)
    assert row["source"] in profile.source
    low, high = (
        float(
            expected_tokens_per_step(
                profile.conditional_rates(
                    budget=None,
                    context=float(row["context"] or 1000),
                    gamma_max=gamma,
                    num_sigma=sigma,
                ),
                gamma,
            )
        )
        for sigma in (-2.0, 2.0)
    )
    assert low <= float(row["tokens_per_step"]) <= high


def test_a_head_that_nobody_published_is_not_ranked_and_said_to_need_training() -> None:
    document = make_plan(
        PlanRequest(
            model="llama-3.1-70b", hardware=("h100-sxm-80gb",), batch_sizes=(4,)
        )
    )
    assert "eagle3" not in {row.draft for row in document.candidates}
    (reason,) = [
        each.reason for each in document.needs_acceptance if each.draft == "eagle3"
    ]
    assert "no EAGLE-3 head of llama-3.1-70b is known to magicdec" in reason
    asked = make_plan(
        PlanRequest(
            model="llama-3.1-70b",
            hardware=("h100-sxm-80gb",),
            batch_sizes=(4,),
            draft="eagle3",
        )
    )
    assert re.match(
        r"assumed from \d+ published EAGLE-3 heads",
        asked.candidates[0].drafting.acceptance_source,
    )


def test_an_engine_that_cannot_run_a_draft_says_which_can() -> None:
    with pytest.raises(
        ConfigError, match=r"sglang does not run self/streamingllm; --engine vllm"
    ):
        make_plan(PlanRequest(engine="sglang", draft="self"))
    with pytest.raises(ConfigError, match="on 1 rank or on all 8, not on 2"):
        make_plan(
            PlanRequest(
                draft="llama-3.2-1b", acceptance_rate=0.8, draft_tp_size=2, tp_size=8
            )
        )


def test_every_look_up_is_ranked_and_its_text_moves_it() -> None:
    edited, translated = (
        make_plan(
            PlanRequest(batch_sizes=(1,), draft="ngram", gamma=3, task=task)
        ).candidates[0]
        for task in ("code-edit", "translation")
    )
    assert edited.drafting.tokens_per_step > 1.1 * translated.drafting.tokens_per_step
    assert {"ngram", "suffix"} <= {
        row.draft for row in make_plan(PlanRequest(batch_sizes=(1,))).candidates
    }


def test_multi_token_prediction_gives_the_speedup_that_nvidia_measured() -> None:
    """DeepSeek-R1 in nvfp4 on 8 x B200, batch 1, 1k in and 2k out: 2.16x at three drafts; none of it was fitted, and
    nobody published its acceptance.

    https://nvidia.github.io/TensorRT-LLM/blogs/tech_blog/blog2_DeepSeek_R1_MTP_Implementation_and_Optimization.html
    """
    planned = make_plan(
        PlanRequest(
            model="deepseek-r1", hardware=("b200-sxm-192gb",), tp_size=8, batch_sizes=(1,), context_lens=(2048,),
            engine="trtllm", draft="mtp", weight_dtype="nvfp4",
        )
    )  # fmt: skip
    (row,) = [row for row in planned.candidates if row.gamma == 3]
    assert row.speedup == pytest.approx(2.16, rel=0.2)
    assert row.speedup_low < 2.16 < row.speedup_high


def test_a_narrower_copy_of_the_target_is_ranked_by_its_published_acceptance() -> None:
    """An int4 copy that vLLM runs as a draft model; one in the target's own weights has none to rank."""
    case = {
        "model": "qwen2.5-7b",
        "hardware": ("a40-48gb",),
        "batch_sizes": (1,),
        "context_lens": (1024,),
    }
    rows = make_plan(PlanRequest(**case, draft_weight_dtype="int4")).candidates
    (copied, *_) = [row for row in rows if row.draft == "qwen2.5-7b" and row.gamma == 1]
    assert copied.drafting.tokens_per_step == pytest.approx(1.884, rel=0.01)
    asked = {
        "draft": "self", "draft_method": "full", "engine": "ours", "context_lens": (1024,), "model": "llama-3.1-8b",
    }  # fmt: skip
    (best, *_) = make_plan(PlanRequest(**asked, draft_weight_dtype="int4")).candidates
    assert 1.5 < best.drafting.tokens_per_step < best.gamma + 1
    own = make_plan(PlanRequest(**asked)).candidates[0]
    assert own.drafting.tokens_per_step == pytest.approx(own.gamma + 1)
    assert "qwen2.5-7b" not in {
        row.draft
        for row in make_plan(PlanRequest(**case, draft_weight_dtype="bf16")).candidates
    }


def shipped() -> list[MeasuredProfile]:
    found = []
    for path in sorted(PROFILES_DIRECTORY.glob("*.json")):
        profile = load_profile(path)
        assert isinstance(profile, MeasuredProfile)
        found.append(profile)
    return found


@pytest.mark.parametrize("temperature", [None, 0.0, 0.4, 1.0])
def test_a_shipped_profile_is_the_targets_own_else_its_familys_with_a_wider_error(
    temperature: float | None,
) -> None:
    """Of several the one measured nearest to the temperature; in the words of the tables."""
    profiles = shipped()
    models = {name for each in profiles for name in (each.model, *each.applies_to)}
    sorts = {(each.draft, each.draft_method, each.draft_weight_dtype) for each in profiles}  # fmt: skip
    for model in sorted(models):
        for draft, method, weight_dtype in sorted(sorts):
            of_sort = [
                each for each in profiles
                if (each.draft, each.draft_method, each.draft_weight_dtype) == (draft, method, weight_dtype)
            ]  # fmt: skip
            own = [each for each in of_sort if each.model == model]
            family = [each for each in of_sort if model in each.applies_to]
            found = default_profile(model, method, draft, temperature, weight_dtype)
            if not (own or family):
                assert found is None
                continue
            assert isinstance(found, MeasuredProfile)
            candidates = own or family

            def away(profile: MeasuredProfile) -> float:
                if temperature is None or profile.temperature is None:
                    return 0.0
                return abs(profile.temperature - temperature)

            nearest = min(candidates, key=away)
            if own:
                assert found == nearest
                continue
            assert found.carried_from == nearest.model
            assert found.model == model
            assert found.law == nearest.law
            assert found.error.log_rejection == pytest.approx(
                math.hypot(nearest.error.log_rejection, nearest.carried_error)
            )
            assert found.error.depth == nearest.error.depth
        pairs = published_drafts(model)
        assert set(pairs) == {
            (each.draft, each.draft_method)
            for each in profiles
            if model in (each.model, *each.applies_to) and not each.draft_weight_dtype
        }
