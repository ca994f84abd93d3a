"""Which tensor-parallel sizes split a model."""

from __future__ import annotations

import pytest

from magicdec.errors import ConfigError
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.parallel import check_tp, divides, largest_tp_at_most, valid_tp_sizes


def test_sizes_up_to_the_heads_split_llama() -> None:
    assert valid_tp_sizes(load_model_spec("llama-3.1-8b"), 64) == [1, 2, 4, 8, 16, 32]


def test_kv_heads_may_be_replicated_but_not_split_unevenly() -> None:
    tinyllama = load_model_spec("tinyllama-1.1b")  # 32 heads, 4 KV heads
    assert divides(tinyllama, 8)
    qwen = load_model_spec("qwen2.5-7b")  # 28 heads, 4 KV heads
    assert valid_tp_sizes(qwen, 8) == [1, 2, 4]


def test_a_bad_size_is_refused_with_the_nearest_that_work() -> None:
    with pytest.raises(ConfigError, match=r"tp 3 does not divide llama-3.1-8b .*: 1, 2, 4"):
        check_tp(load_model_spec("llama-3.1-8b"), 3)


def test_a_draft_takes_the_largest_size_that_splits_it() -> None:
    assert largest_tp_at_most(load_model_spec("llama-68m"), 8) == 6
