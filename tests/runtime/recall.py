"""Which draft cache keeps what a recalled passage needs? Acceptance of self-drafts on text that repeats a passage from
2000 tokens and more back.

Text is forced: after every token the draft's distribution q and the target's p are compared, and the text goes on as it
stands, so that it stays within the passage (sampled text soon leaves it). The figure is the chance that a drafted token
is accepted, sum(min(p, q)), averaged over tokens and sequences; its standard error is taken over sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from magicdec.runtime.drafters import build_drafter
from magicdec.runtime.engine import Engine, Snapshot
from magicdec.runtime.prompts import PromptRequest, load_prompts, load_tokenizer
from magicdec.runtime.sampling import VerifiedBlock
from magicdec.runtime.weights import load_model
from magicdec.specs.catalog import EMBEDDED, EMBEDDED_DIRECTORY
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec

MIN_DISTANCE = 2000
CUE = 64
"""Tokens of the repeated passage that stand at the prompt's end: more than SnapKV's observation window."""
DRAFTS = {
    "streamingllm": {"draft_method": "streamingllm"},
    "snapkv": {"draft_method": "snapkv"},
    "snapkv, window 8, pooling 63": {
        "draft_method": "snapkv",
        "observation_window": 8,
        "pooling_kernel": 63,
    },
}


def forced_text(
    num_sequences: int,
    context_len: int,
    num_forced: int,
    *,
    is_repeated: bool,
    seed: int = 1,
) -> Tensor:
    """[B, context_len + num_forced] tokens of held-out documents. Where a passage is repeated, its second copy begins
    `CUE` tokens before the context's end and goes on to the last token."""
    tokenizer = load_tokenizer(EMBEDDED_DIRECTORY, vocab_size=2048)
    length = context_len + num_forced
    request = PromptRequest(count=num_sequences, context_len=length, seed=seed)
    text_BT = torch.tensor(load_prompts(request, tokenizer=tokenizer, vocab_size=2048))
    if is_repeated:
        generator = np.random.default_rng(seed)
        passage = CUE + num_forced
        for row in text_BT:
            start = int(generator.integers(0, length - passage - MIN_DISTANCE))
            row[-passage:] = row[start : start + passage].clone()
    return text_BT


def measure(
    text_BT: Tensor, num_forced: int, budgets: Sequence[int]
) -> list[dict[str, object]]:
    """Each draft's acceptance over the last `num_forced` tokens, and its advantage over StreamingLLM's."""
    num_sequences, length = text_BT.shape
    engine = Engine(
        load_model(EMBEDDED), batch_size=num_sequences, max_len=length, max_gamma=1
    )
    engine.prefill(text_BT[:, :-num_forced].tolist())
    snapshot = engine.snapshot()
    rows: list[dict[str, object]] = []
    for budget in budgets:
        reference_B = None
        for name, settings in DRAFTS.items():
            spec = SpeculationSpec(
                draft="self", draft_budget=budget, gamma=1, **settings
            )
            rates_B = acceptance(engine, snapshot, spec, text_BT[:, -num_forced:])
            reference_B = rates_B if reference_B is None else reference_B
            gain_B = rates_B - reference_B
            rows.append(
                {
                    "draft": name,
                    "draft_budget": budget,
                    "acceptance_rate": round(float(rates_B.mean()), 4),
                    "gain": round(float(gain_B.mean()), 4),
                    "gain_standard_error": round(
                        float(gain_B.std()) / math.sqrt(num_sequences), 4
                    ),
                }
            )
    return rows


@torch.inference_mode()
def acceptance(
    engine: Engine, snapshot: Snapshot, spec: SpeculationSpec, forced_BT: Tensor
) -> Tensor:
    """Each sequence's mean chance, at temperature 1, that a drafted token is accepted while the forced text goes on."""
    engine.restore(snapshot)
    drafter = build_drafter(spec, engine)
    assert drafter is not None
    drafter.start(SamplingSpec(temperature=1.0))
    none_B = torch.zeros(len(forced_BT), dtype=torch.long)
    uniforms = torch.full((len(forced_BT), 2, 3), 0.5)
    overlaps = []
    for forced_B in forced_BT.T:
        proposal = drafter.propose(1, uniforms)
        assert proposal.distribution is not None
        target_BV = engine.forward(
            engine.pending_B[:, None], observer=drafter.observer
        )[:, -1].softmax(dim=-1)
        overlaps.append(
            torch.minimum(target_BV, proposal.distribution(none_B)).sum(dim=-1)
        )
        drafter.accept(VerifiedBlock(num_accepted_B=none_B, next_token_B=forced_B), 1)
        drafter.count(none_B.numpy(), 1)
        engine.advance(forced_B[:, None], none_B + 1)
        engine.count(none_B.numpy() + 1)
    return torch.stack(overlaps, dim=1).mean(dim=1)
