"""Prefix-cache units and hits, against the figures that vLLM's logs print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.perfmodel.prefix_cache import hit_tokens, hit_unit_tokens
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.precision import Precision

FP8_KV = Precision(weight_dtype="fp8", kv_dtype="fp8")


@pytest.mark.parametrize(
    ("model", "tp_size", "gamma", "unit"),
    [
        (
            "qwen3.5-35b-a3b",
            1,
            3,
            2144,
        ),  # vLLM issue 54360, the same shape as Qwen3.6-35B-A3B
        ("qwen3.5-27b", 2, 7, 1648),  # vLLM issue 53670, the same shape as Qwen3.8-27B
        ("llama-3.1-8b", 1, 3, 16),
        ("deepseek-v3", 8, 3, 16),
    ],
)
def test_the_unit_is_the_one_that_vllm_prints(
    model: str, tp_size: int, gamma: int, unit: int
) -> None:
    spec = load_model_spec(model)
    assert hit_unit_tokens(spec, FP8_KV, tp_size=tp_size, gamma=gamma) == unit


def test_a_state_smaller_than_a_block_takes_one_block() -> None:
    """The unit is whole blocks: of blocks that hold a state's bytes many times over, one."""
    spec = load_model_spec("qwen3.5-27b")
    units = [
        hit_unit_tokens(spec, FP8_KV, tp_size=48, gamma=1, block_tokens=tokens)
        for tokens in (16, 64, 256, 1024)
    ]
    longest = units[0]
    assert units == [-(-longest // tokens) * tokens for tokens in (16, 64, 256, 1024)]
    assert units[-1] == 1024


@pytest.mark.parametrize(
    ("prompt", "hit"),
    [(3784, 0), (7542, 4288), (11292, 8576), (15019, 12864), (18770, 15008)],
)
def test_a_repeated_prompt_hits_as_vllm_counted(prompt: int, hit: int) -> None:
    """vLLM issue 54360, comment of 2026-09-05: an exact repeat of each prompt with MTP."""
    assert hit_tokens(prompt, prompt, unit_tokens=2144, drops_last_unit=True) == hit


def test_a_unit_that_ends_with_the_prompt_is_not_found_whole() -> None:
    assert hit_tokens(32, 32, unit_tokens=16, drops_last_unit=False) == 16


@given(
    shared=st.integers(0, 10**6),
    prompt=st.integers(1, 10**6),
    unit=st.integers(1, 5000).map(lambda blocks: 16 * blocks),
)
def test_a_draft_costs_one_unit_of_a_hit_and_no_more(
    shared: int, prompt: int, unit: int
) -> None:
    plain = hit_tokens(shared, prompt, unit_tokens=unit, drops_last_unit=False)
    drafted = hit_tokens(shared, prompt, unit_tokens=unit, drops_last_unit=True)
    assert plain < prompt
    assert plain % unit == 0
    assert drafted == max(plain - unit, 0)
