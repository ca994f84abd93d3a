"""Decoding in bfloat16: greedy tokens are the target's up to rounding, sampled ones follow its distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.session import BenchmarkSession
from magicdec.runtime.engine import Engine
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec
from magicdec.validate.demo import top_two_gap
from tests.runtime.conftest import tiny_spec
from tests.runtime.test_lossless import (
    FALSE_ALARM,
    VOCAB,
    Batch,
    Logits,
    batch_of,
    chi_square_p_value,
    exact_joint,
    exact_logits,
    sampled_counts,
)

NEAR_TIE = 0.35
"""Logits of the embedded model reach 20, where bfloat16's steps are 0.125 wide; sums in other orders add as much."""
SELF_DRAFTS = [
    SpeculationSpec(draft="self", draft_method=method, draft_budget=48, gamma=4)
    for method in ("streamingllm", "snapkv", "topk")
]


@torch.inference_mode()
def teacher_forced_gaps(
    request: BenchmarkRequest, prompt: Sequence[int], generated: Sequence[int]
) -> torch.Tensor:
    """For each generated token, how far its logit is below the best, [generated tokens]; 0 where it is the best. The
    target is given all tokens, and computes in float64: so these are the tokens' own errors, and none follows from an
    earlier one. Greedy output in a narrow format is right where no gap exceeds what its rounding can explain."""
    model = load_model(
        request.model, weights=request.weights, device=request.device, dtype="float64"
    )
    engine = Engine(model, batch_size=1, max_len=len(prompt) + len(generated))
    engine.prefill([prompt])
    block_BT = torch.tensor([[prompt[-1], *generated[:-1]]], device=model.device)
    logits_TV = engine.forward(block_BT)[0]
    chosen_T = logits_TV.gather(
        1, torch.tensor(generated, device=model.device)[:, None]
    ).squeeze(1)
    return logits_TV.amax(dim=-1) - chosen_T


def test_greedy_tokens_are_the_targets_own_but_for_near_ties() -> None:
    """Teacher forcing in float64, token by token, of autoregressive and self-speculative output."""
    request = BenchmarkRequest(
        model="embedded", dtype="bfloat16", batch_size=2, context_len=200, context_spread=0.3, gen_len=32,
        speculations=tuple(SELF_DRAFTS), sampling=SamplingSpec(),
    )  # fmt: skip
    session = BenchmarkSession(request)
    for speculation in (AUTOREGRESSIVE, *SELF_DRAFTS):
        result = session.run(speculation, run_to_end=True)
        gaps = torch.cat(
            [
                teacher_forced_gaps(request, *pair)
                for pair in zip(session.prompts, result.tokens, strict=True)
            ]
        )
        assert len(gaps) == 64
        assert float(gaps.max()) <= NEAR_TIE, speculation
        assert float((gaps == 0).double().mean()) > 0.9, speculation
        if not speculation.is_autoregressive:
            assert 1.2 < result.counts.tokens_per_step < 5.0, speculation


def test_a_second_best_token_is_further_off_than_a_near_tie() -> None:
    """The tolerance is narrow: most tokens of the output would exceed it if they were exchanged for the next best."""
    request = BenchmarkRequest(
        model="embedded",
        dtype="bfloat16",
        batch_size=1,
        context_len=200,
        gen_len=32,
        sampling=SamplingSpec(),
    )
    session = BenchmarkSession(request)
    tokens = session.run(AUTOREGRESSIVE, run_to_end=True).tokens[0]
    gaps = [
        top_two_gap(request, session.prompts[0], tokens[:count])
        for count in range(0, 32, 4)
    ]
    assert np.mean(np.array(gaps) > NEAR_TIE) >= 0.6, gaps


@pytest.fixture(scope="module")
def narrow_and_wide() -> tuple[Batch, Logits]:
    """A batch of a model in bfloat16; and the logits of the same weights applied in float64."""
    spec = tiny_spec(vocab_size=VOCAB, num_hidden_layers=2, hidden_size=16)
    narrow = load_model(spec, weights="random", seed=5, dtype="bfloat16")
    wide = load_model(spec, weights="random", seed=5, dtype="float64")
    with torch.inference_mode():
        for source, target in zip(_tensors(narrow), _tensors(wide), strict=True):
            target.copy_(source)
    return batch_of(narrow), exact_logits(wide)


def _tensors(model: Transformer) -> list[torch.Tensor]:
    tensors = [model.embedding.weight_VH, model.norm.weight]
    for layer in model.layers:
        tensors += [
            layer.input_norm.weight,
            layer.mixer.qkv.weight,
            layer.mixer.output.weight,
            layer.mlp_norm.weight,
        ]
        tensors += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
    return tensors


@pytest.mark.parametrize("draft", [None, "model"])
def test_sampled_tokens_follow_the_distribution_of_the_same_weights_in_float64(
    draft: str | None, narrow_and_wide: tuple[Batch, Logits]
) -> None:
    """2000 continuations, chi-square at a false-alarm probability of 1e-4: rounding moves probabilities by about 1 %,
    which so many cannot tell."""
    batch, logits = narrow_and_wide
    sampling = SamplingSpec(temperature=0.8, seed=21)
    expected = exact_joint(logits, sampling)
    counts, _ = sampled_counts(batch, draft, sampling, 2)
    assert chi_square_p_value(counts, counts.sum() * expected) > FALSE_ALARM
