"""More acceptance never makes an answer slower, and a longer context never makes a step shorter: over
models, devices, engines and formats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.errors import MagicdecError
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.kernels.profile import hardware_names
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.specs.catalog import model_names
from magicdec.specs.engine import engine_names
from magicdec.specs.speculation import AUTOREGRESSIVE, SpeculationSpec

ROUNDING = 1e-9
GAMMAS = np.arange(1.0, 9.0)
CONTEXTS = np.unique(np.round(np.geomspace(16, 131_072, 300)))
DRAFTS = {
    "full": SpeculationSpec(draft="self", draft_method="full"),
    "streamingllm": SpeculationSpec(
        draft="self", draft_method="streamingllm", draft_budget=64
    ),
    "snapkv": SpeculationSpec(draft="self", draft_method="snapkv", draft_budget=64),
    "eagle": SpeculationSpec(draft="eagle", draft_method="eagle"),
    "mtp": SpeculationSpec(draft="mtp", draft_method="mtp"),
    "ngram": SpeculationSpec(draft="ngram", draft_method="ngram"),
    "model": SpeculationSpec(draft="llama-3.2-1b"),
}
FORMATS = st.sampled_from([None, "fp8", "int8", "int4"])
WHERE = {
    "model": st.sampled_from(model_names()),
    "device": st.sampled_from(hardware_names()),
    "engine": st.sampled_from(engine_names()),
    "weights": FORMATS,
    "cache": FORMATS,
    "batch": st.sampled_from([1, 2, 3, 8, 16, 37, 64, 256]),
    "tp": st.sampled_from([1, 2, 8]),
}
ACCEPTANCE = {
    **WHERE,
    "draft": st.sampled_from(sorted(DRAFTS)),
    "draft_weights": FORMATS,
    "context": st.sampled_from([100, 1000, 8192, 30_000, 120_000]),
    "rates": st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6).map(sorted),
}


def setup_of(asked: dict[str, Any]) -> Setup | None:
    """None where a name, a format or a pair of vocabularies does not go with the others."""
    more = {}
    if asked.get("draft_weights"):
        more["draft_weight_dtype"] = asked["draft_weights"]
    try:
        return Setup.of(
            asked["model"],
            asked["device"],
            asked["engine"],
            DRAFTS.get(asked.get("draft", ""), AUTOREGRESSIVE),
            weight_dtype=asked["weights"],
            kv_dtype=asked["cache"],
            **more,
        )
    except (MagicdecError, TypeError):
        return None


def catch_up_s(prediction: Prediction) -> Any:
    """The last draft taken in by the draft: with more acceptance some sequence of a batch needs it in
    more steps, and all sequences wait for it.
    """
    found = [op.time_s for op in prediction.terms.upkeep.ops if op.name == "catch-up"]
    return sum(found, np.zeros(1))


def check_acceptance(asked: dict[str, Any]) -> None:
    setup = setup_of(asked)
    if setup is None:
        return
    sparse = asked["draft"] in ("streamingllm", "snapkv")
    points = Points(
        batch=float(asked["batch"]),
        context=float(asked["context"]),
        tp=asked["tp"],
        budget=64 if sparse else None,
        gamma=GAMMAS,
    )
    speedups, steps, later = [], [], []
    for rate in asked["rates"]:
        try:
            prediction = predict(setup, constant_profile(rate), points)
        except MagicdecError:
            return
        speedups.append(np.broadcast_to(prediction.speedup, GAMMAS.shape))
        steps.append(np.broadcast_to(prediction.step_s, GAMMAS.shape))
        later.append(np.broadcast_to(catch_up_s(prediction), GAMMAS.shape))
    for place in range(len(speedups) - 1):
        slower = np.maximum(later[place + 1] - later[place], 0.0)
        without = speedups[place + 1] * steps[place + 1] / (steps[place + 1] - slower)
        assert np.all(without >= speedups[place] * (1.0 - ROUNDING))
        if asked["draft"] not in ("full", "streamingllm", "snapkv", "model"):
            assert np.max(speedups[place + 1]) >= np.max(speedups[place]) * (
                1.0 - ROUNDING
            )


def check_context(asked: dict[str, Any]) -> None:
    setup = setup_of(asked)
    if setup is None:
        return
    points = Points(
        batch=float(asked["batch"]),
        context=CONTEXTS,
        tp=asked["tp"],
        budget=setup.speculation.draft_budget,
    )
    try:
        seconds = predict(setup, None, points).autoregressive_step_s
    except MagicdecError:
        return
    seconds = np.broadcast_to(seconds, CONTEXTS.shape)
    falls = seconds[1:] < np.maximum.accumulate(seconds)[:-1] * (1.0 - ROUNDING)
    assert not falls.any(), CONTEXTS[1:][falls].tolist()


@given(asked=st.fixed_dictionaries(ACCEPTANCE))
def test_more_acceptance_is_never_slower(asked: dict[str, Any]) -> None:
    """A draft network's catch-up set aside, which more acceptance makes more frequent."""
    check_acceptance(asked)


@given(asked=st.fixed_dictionaries(WHERE))
def test_a_longer_context_never_makes_a_step_shorter(asked: dict[str, Any]) -> None:
    check_context(asked)


@pytest.mark.parametrize("device", ["b200-sxm-192gb", "h200-sxm-141gb"])
@pytest.mark.parametrize("batch", [2, 3, 8, 37, 100])
def test_short_reads_of_latents_take_no_longer_than_long_ones(
    device: str, batch: int
) -> None:
    """Their curves read small caches at a lower bandwidth, which ends within a factor of two."""
    asked = {"model": "deepseek-v3", "device": device, "engine": "vllm", "batch": batch}
    check_context(asked | {"weights": None, "cache": "fp8", "tp": 2})


@pytest.mark.slow
@settings(max_examples=100)
@given(asked=st.fixed_dictionaries(ACCEPTANCE))
def test_more_acceptance_is_never_slower_anywhere(asked: dict[str, Any]) -> None:
    check_acceptance(asked)


@pytest.mark.slow
@settings(max_examples=100)
@given(asked=st.fixed_dictionaries(WHERE))
def test_a_longer_context_never_makes_a_step_shorter_anywhere(
    asked: dict[str, Any],
) -> None:
    check_context(asked)
