"""Which tensor-parallel sizes split a model, and how a replica is spread over groups and stages."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.plan.request import PlanRequest, layouts
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.parallel import (
    Parallelism,
    check_tp,
    divides,
    largest_tp_at_most,
    spread_for,
    valid_tp_sizes,
)


def test_sizes_up_to_the_heads_split_llama() -> None:
    assert valid_tp_sizes(load_model_spec("llama-3.1-8b"), 64) == [1, 2, 4, 8, 16, 32]


def test_kv_heads_may_be_replicated_but_not_split_unevenly() -> None:
    tinyllama = load_model_spec("tinyllama-1.1b")  # 32 heads, 4 KV heads
    assert divides(tinyllama, 8)
    qwen = load_model_spec("qwen2.5-7b")  # 28 heads, 4 KV heads
    assert valid_tp_sizes(qwen, 8) == [1, 2, 4]


def test_a_bad_size_is_refused_with_the_nearest_that_work() -> None:
    with pytest.raises(
        ConfigError, match=r"tp 3 does not divide llama-3.1-8b .*: 1, 2, 4"
    ):
        check_tp(load_model_spec("llama-3.1-8b"), 3)


def test_a_draft_takes_the_largest_size_that_splits_it() -> None:
    assert largest_tp_at_most(load_model_spec("llama-68m"), 8) == 4
    assert (
        largest_tp_at_most(load_model_spec("llama-68m"), 8, vocabulary_multiple=0) == 6
    )


@pytest.mark.parametrize(
    ("engine", "sizes"),
    [("ours", [1, 2, 4]), ("vllm", [1, 2, 4]), ("trtllm", [1, 2, 3, 4, 6, 12])],
)
def test_a_plan_offers_the_sizes_that_its_engine_runs(
    engine: str, sizes: list[int]
) -> None:
    """llama-68m: 12 heads, and 32,000 rows of vocabulary, which 3 does not divide unless they are padded for it."""
    found: list[int] = []
    for num_gpus in (1, 2, 3, 4, 6, 12):
        asked = PlanRequest(tp_size=num_gpus)
        with contextlib.suppress(ConfigError):
            found += layouts(
                asked,
                load_model_spec("llama-68m"),
                load_hardware("a100"),
                load_engine(engine),
            )[0].tp_sizes
    assert found == sizes


def test_a_vocabulary_is_padded_before_it_is_divided() -> None:
    model = msgspec.structs.replace(
        load_model_spec("llama-3.1-8b"), vocab_size=49_155
    )  # Granite's: odd
    assert valid_tp_sizes(model, 8) == [1]
    assert valid_tp_sizes(model, 8, vocabulary_multiple=64) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [
        (126, 2, (63, 63)),
        (61, 2, (31, 30)),
        (61, 4, (15, 15, 16, 15)),
        (80, 3, (27, 27, 26)),
        (5, 5, (1,) * 5),
    ],
)
def test_stages_are_even_with_fewer_layers_beside_the_tables(
    layers: int, pp: int, stages: tuple[int, ...]
) -> None:
    """As vLLM's get_pp_indices, by its own description."""
    spread = Parallelism(pp=pp)
    assert spread.stage_layers(layers) == stages
    assert spread.stage_share(layers) == pytest.approx(max(stages) / layers)


@pytest.mark.parametrize(
    ("options", "groups", "ranks"),
    [
        ({"tp_size": 8, "pp_size": 2, "ep_size": None, "dp_attention": False}, 2, 1),
        ({"tp_size": 8, "pp_size": 1, "ep_size": 8, "dp_attention": False}, 1, 8),
        ({"tp_size": 1, "pp_size": 1, "ep_size": 16, "dp_attention": True}, 16, 16),
        ({"tp_size": 4, "pp_size": 2, "ep_size": 16, "dp_attention": True}, 8, 16),
    ],
)
def test_what_the_options_mean(
    options: dict[str, Any], groups: int, ranks: int
) -> None:
    spread = spread_for(**options)
    assert spread.groups == groups
    assert spread.ep_size(options["tp_size"]) == ranks


def test_what_cannot_be_spread_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match="or add --dp-attention"):
        spread_for(tp_size=8, pp_size=1, ep_size=16, dp_attention=False)
    with pytest.raises(ConfigError, match="not a multiple of tp 8"):
        spread_for(tp_size=8, pp_size=1, ep_size=12, dp_attention=True)
    with pytest.raises(ConfigError, match="has no experts"):
        Parallelism(dp=8, whole_experts=True).check(load_model_spec("llama-3.1-8b"), 1)
    with pytest.raises(ConfigError, match="more than the 256 experts"):
        Parallelism(dp=512, whole_experts=True).check(load_model_spec("deepseek-v3"), 1)
    with pytest.raises(ConfigError, match="more than the 32 layers"):
        Parallelism(pp=33).check(load_model_spec("llama-3.1-8b"), 1)
