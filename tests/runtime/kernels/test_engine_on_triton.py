"""Whole decoding runs on the Triton kernels, interpreted where there is no GPU, against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from magicdec.runtime import attention
from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SamplingSpec
from tests.runtime.conftest import tiny_spec
from tests.runtime.drafts import DRAFTS, draft_model_for

triton = pytest.importorskip("triton")

from magicdec.runtime.kernels import triton_attention  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and not triton.knobs.runtime.interpret,
        reason="neither a GPU nor Triton's interpreter",
    ),
]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Lets Triton's kernel take what the reference would; lists its calls (whether with probabilities)."""
    calls: list[bool] = []

    def counted(*inputs: object, probabilities: bool, **options: object) -> object:
        calls.append(probabilities)
        return triton_attention.decode_attention(
            *inputs, probabilities=probabilities, num_splits=2, **options
        )  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "fastest_kernel", lambda *_: counted)
    return calls


@pytest.mark.parametrize(
    ("draft", "window"),
    [
        ("streamingllm", 16),
        pytest.param("snapkv", None, marks=pytest.mark.slow),
        ("topk", None),
    ],
)
def test_greedy_output_and_acceptance_are_the_references(
    draft: str,
    window: int | None,
    kernel_calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged prompts, shorter and longer than the budget: holes, selection by probabilities, and the model's window."""
    model = load_model(
        tiny_spec(
            model_type="mistral",
            sliding_window=window,
            num_hidden_layers=1,
            num_key_value_heads=1,
        ),
        weights="random",
        seed=3,
        device=DEVICE,
    )
    engine = Engine(model, batch_size=2, max_len=60)
    generator = np.random.default_rng(5)
    engine.prefill([generator.integers(0, 64, n).tolist() for n in (4, 30)])
    snapshot = engine.snapshot()
    results = []
    for is_reference in (False, True):
        if is_reference:
            monkeypatch.setattr(attention, "fastest_kernel", lambda *_: None)
        engine.restore(snapshot)
        drafter = build_drafter(
            DRAFTS[draft], engine, draft_model_for(DRAFTS[draft], engine.model)
        )
        options = DecodeOptions(gamma=2, max_new_tokens=4)
        results.append(decode(engine, drafter, SamplingSpec(), options))
    assert results[0].tokens == results[1].tokens
    assert np.array_equal(results[0].num_accepted, results[1].num_accepted)
    assert kernel_calls
    assert any(kernel_calls) == (draft in ("snapkv", "topk"))
