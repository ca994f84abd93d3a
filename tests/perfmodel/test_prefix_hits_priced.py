"""What a draft costs in prefix hits: the prompts that an engine has to compute again."""

from __future__ import annotations

import numpy as np
import pytest

from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.serving import whole_requests
from magicdec.perfmodel.setup import Cached, Points, Setup
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SpeculationSpec

HYBRID = "qwen3.5-35b-a3b"
PROMPTS = np.array([3784.0, 7542.0, 11292.0, 15019.0, 18770.0])


def predicted(method: str, *, engine: str = "vllm@0.32", gamma: int = 3) -> Prediction:
    setup = Setup.of(
        HYBRID,
        "h100-sxm-80gb",
        engine,
        SpeculationSpec(draft=method, draft_method=method),
        weight_dtype="fp8",
        kv_dtype="fp8",
    )
    assert setup.precision == Precision(weight_dtype="fp8", kv_dtype="fp8")
    points = Points(
        batch=1.0, context=PROMPTS, gamma=gamma, gen_len=100.0, cached=Cached(share=1.0)
    )
    return predict(setup, constant_profile(0.7), points)


def test_repeated_prompts_hit_with_a_prediction_module_as_vllm_counted() -> None:
    """vLLM issue 54360: five prompts, each sent twice, at a unit of 2,144 tokens."""
    hits = predicted("mtp").hits.of(PROMPTS)
    assert hits.tolist() == [0.0, 4288.0, 8576.0, 12864.0, 15008.0]


def test_a_look_up_keeps_the_last_unit() -> None:
    """Without convolution inputs of drafts the unit is that of gamma 0; no unit is dropped."""
    found = predicted("ngram")
    assert np.array_equal(found.hits.dropped_units, np.zeros(()))
    assert np.all(found.hits.of(PROMPTS) > predicted("mtp").hits.of(PROMPTS))


def test_the_lost_hits_delay_the_first_token_and_lower_the_speedup_of_requests() -> (
    None
):
    """SGLang's profile says nothing of units, so nothing is lost there."""
    lost = predicted("mtp")
    requests = whole_requests(lost, output_len=100.0)
    kept = predicted("mtp", engine="sglang")
    at = np.argmax(PROMPTS)
    computed = PROMPTS - lost.hits.of(PROMPTS)
    assert computed[at] == pytest.approx(18_770 - 15_008)
    assert np.all(kept.hits.of(PROMPTS) == PROMPTS - 1.0)
    assert requests.drafted.prompt_s[at] > 1.5 * requests.alone.prompt_s[at]
