"""The transformer computes what transformers' own models compute, for each family, from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from magicdec.runtime.engine import Engine
from magicdec.runtime.generate import DecodeOptions, decode
from magicdec.runtime.weights import load_model
from magicdec.specs.speculation import SamplingSpec
from tests.runtime.conftest import FAMILIES

TOLERANCE = 1e-4
PROMPT_LENGTHS = (1, 9, 40)
NUM_STEPS = 12


def random_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_prefill_and_step_by_step(family: str, checkpoints: dict[str, Path]) -> None:
    """Logits of a ragged batch, forced along the reference's tokens through the cache, agree to 1e-4."""
    reference = AutoModelForCausalLM.from_pretrained(checkpoints[family], attn_implementation="eager").eval()
    engine = Engine(load_model(checkpoints[family]), batch_size=len(PROMPT_LENGTHS), max_len=80)
    prompts = random_prompts(FAMILIES[family].vocab_size)
    engine.prefill(prompts, chunk=16)
    forced = torch.randint(1, FAMILIES[family].vocab_size, (len(prompts), NUM_STEPS))
    widths = (1, 1, 3, 1, 5, 1)  # a verification pass takes several tokens at once
    logits, done = [], 0
    for width in widths:
        block = torch.cat((engine.pending_B[:, None], forced[:, done : done + width - 1]), dim=1)
        logits.append(engine.forward(block))
        done += width
        count = torch.full((len(prompts),), width)
        engine.advance(forced[:, done - width : done], count)
        engine.count(count.numpy())
    ours = torch.cat(logits, dim=1)
    for row, prompt in enumerate(prompts):
        with torch.inference_mode():
            whole = reference(torch.tensor([prompt + forced[row].tolist()])).logits[0]
        expected = whole[len(prompt) - 1 : len(prompt) - 1 + NUM_STEPS]
        torch.testing.assert_close(ours[row], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuation_equals_generate(family: str, checkpoints: dict[str, Path]) -> None:
    """Greedy tokens of a ragged batch equal those of generate() on each prompt alone."""
    reference = AutoModelForCausalLM.from_pretrained(checkpoints[family], attn_implementation="eager").eval()
    prompts = random_prompts(FAMILIES[family].vocab_size)
    engine = Engine(load_model(checkpoints[family]), batch_size=len(prompts), max_len=100)
    engine.prefill(prompts)
    result = decode(engine, None, SamplingSpec(), DecodeOptions(max_new_tokens=50))
    for prompt, tokens in zip(prompts, result.tokens, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False, pad_token_id=0)
        assert tokens == expected[0, len(prompt) :].tolist()


def test_prefill_chunk_changes_no_logit(checkpoints: dict[str, Path]) -> None:
    """One chunk, or many, or single tokens: the next-token logits agree to 1e-4."""
    model = load_model(checkpoints["mistral-window"])
    results = []
    for chunk in (4096, 7, 1):
        engine = Engine(model, batch_size=len(PROMPT_LENGTHS), max_len=64)
        engine.prefill(random_prompts(96), chunk=chunk)
        results.append(engine.forward(engine.pending_B[:, None]))
    torch.testing.assert_close(results[1], results[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(results[2], results[0], atol=TOLERANCE, rtol=0)
