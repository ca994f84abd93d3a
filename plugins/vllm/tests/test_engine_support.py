"""What is refused when the draft is built, before weights load; and what the plugin does where nothing asks for it."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from magicdec.errors import ConfigError
from magicdec.specs.vllm_plugin import DRAFT_CLASS


def engine_config(**arguments: Any) -> Any:
    """The engine's configuration, as its own front end makes it: no engine is started."""
    from cases import ENGINE
    from vllm.engine.arg_utils import EngineArgs

    known = {
        name: value for name, value in ENGINE.items() if name != "disable_log_stats"
    }
    return EngineArgs(**{**known, **arguments}).create_engine_config()


@pytest.fixture
def config() -> Any:
    speculation = {
        "method": "custom_class",
        "model": DRAFT_CLASS,
        "num_speculative_tokens": 3,
    }
    return engine_config(speculative_config=speculation)


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        (
            "parallel_config",
            "pipeline_parallel_size",
            2,
            "pipeline parallelism; supported: decoder-only",
        ),
        ("parallel_config", "data_parallel_size", 2, "one engine per replica"),
        ("scheduler_config", "async_scheduling", True, "asynchronous scheduling"),
        ("cache_config", "cache_dtype", "fp8_e5m2", "quantised KV cache"),
        ("cache_config", "block_size", 256, "use at least 768"),
        (
            "model_config.hf_text_config",
            "layer_types",
            ["full_attention", "sliding_attention"],
            "hybrid KV caches",
        ),
        (
            "model_config.hf_text_config",
            "layer_types",
            ["linear_attention"],
            "layers of linear_attention",
        ),
        (
            "model_config.hf_text_config",
            "num_kv_shared_layers",
            1,
            "layers that share keys and values",
        ),
        ("model_config", "attention_chunk_size", 8192, "chunked local attention"),
        (
            "speculative_config",
            "num_speculative_tokens",
            3,
            "set num_speculative_tokens",
        ),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(
    config: Any, part: str, name: str, value: Any, message: str
) -> None:
    from magicdec_vllm.draft import SparseDraft

    SparseDraft(config)
    setattr(attrgetter(part)(config), name, value)
    if part == "speculative_config":
        table = {"batch_sizes": [1], "context_lens": [1], "gammas": [[4]]}
        config.additional_config = {"magicdec": {"gamma_table": table}}
    with pytest.raises(ConfigError, match=message) as refused:
        SparseDraft(config)
    assert "\n" not in str(refused.value)


def test_a_model_with_layers_without_attention_is_refused(config: Any) -> None:
    from magicdec_vllm.draft import SparseDraft

    config.model_config._model_info = replace(
        config.model_config._model_info, is_hybrid=True
    )
    with pytest.raises(ConfigError, match="layers without attention"):
        SparseDraft(config)


def test_slots_ahead_are_reserved_for_this_draft_only(config: Any) -> None:
    """The plugin is loaded by the engine's own front end; n-gram drafts and no drafts stay as they were."""
    assert config.num_lookahead_tokens == 3
    assert engine_config().num_lookahead_tokens == 0
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    assert engine_config(speculative_config=ngram).num_lookahead_tokens == 0


def test_the_v2_runner_takes_this_draft_only(config: Any) -> None:
    """Where the engine would choose V2 it does, and keeps V1 for another custom class."""
    assert config._get_v2_model_runner_unsupported_features() == []
    config.speculative_config.model = "somebody.elses.Draft"
    assert config._get_v2_model_runner_unsupported_features() == [
        "speculative method 'custom_class'"
    ]


def test_asynchronous_scheduling_is_refused_on_v1_only(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for, it reaches the draft, which refuses it on V1; test_engine_v2.py runs it on V2."""
    from vllm.envs import disable_envs_cache

    from magicdec_vllm.support import check_supported

    speculation = {
        "method": "custom_class",
        "model": DRAFT_CLASS,
        "num_speculative_tokens": 3,
    }
    asked = engine_config(speculative_config=speculation, async_scheduling=True)
    with pytest.raises(
        ConfigError, match="asynchronous scheduling on the V1 model runner"
    ):
        check_supported(asked)
    assert config.scheduler_config.async_scheduling is False
    disable_envs_cache()  # an engine that started in this process has stopped vLLM from reading the environment
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    check_supported(asked)


@pytest.mark.parametrize("most", [1, 2, 8])
def test_v2_captures_graphs_for_every_gamma_of_the_table(
    config: Any, most: int
) -> None:
    """By the engine's own reading of its table; the largest gammas where there are fewer sequences than gammas."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    from magicdec_vllm.patches import capture_every_gamma

    config.scheduler_config.max_num_seqs = most
    capture_every_gamma(config)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
    table = {
        "batch_sizes": [1, 8],
        "context_lens": [64, 1024],
        "gammas": [[0, 3], [1, 3]],
    }
    config.additional_config = {"magicdec": {"gamma_table": table}}
    capture_every_gamma(config)
    found = build_dynamic_sd_schedule_lookup(
        config.speculative_config.num_speculative_tokens_per_batch_size,
        vllm_max_batch_size=most, vllm_num_speculative_tokens=3,
    )  # fmt: skip
    assert set(found[1:]) == set(sorted([3, 1, 0], reverse=True)[:most])


@pytest.mark.parametrize("most", [3, 20, 50])
def test_v2_has_a_whole_step_graph_for_every_batch_and_gamma(
    config: Any, served: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """By the engine's own sizes and manager of graphs, as on a GPU: verification of each gamma of the table, and steps
    without drafts, up to as many sequences as may run. Without the patch, or the sizes, some batches have none."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from magicdec_vllm.patches import (
        _with_every_gamma,
        capture_every_gamma,
        capture_the_largest_batch,
    )

    del served  # its process knows its place among the ranks
    mode, gammas = CUDAGraphMode.FULL_AND_PIECEWISE, (3, 2, 0)
    compilation = config.compilation_config
    config.model_config.enforce_eager, compilation.cudagraph_mode = False, mode
    compilation.cudagraph_capture_sizes = compilation.max_cudagraph_capture_size = None
    config.scheduler_config.max_num_seqs = most
    table = {
        "batch_sizes": [1, 8],
        "context_lens": [64, 1024],
        "gammas": [[0, 3], [2, 3]],
    }
    config.additional_config = {"magicdec": {"gamma_table": table}}
    monkeypatch.setattr(
        type(current_platform), "_global_graph_pool", object(), raising=False
    )

    def uncovered() -> int:
        manager = CudaGraphManager(
            config, torch.device("cpu"), mode, decode_query_len=max(gammas) + 1
        )
        manager._graphs_captured = True
        found = [
            manager.dispatch(batch, batch * (gamma + 1), gamma + 1, 0)
            for batch in range(1, most + 1)
            for gamma in gammas
        ]
        return sum(each.cg_mode is not CUDAGraphMode.FULL for each in found)

    capture_every_gamma(config)
    config._set_cudagraph_sizes()
    without = uncovered()
    capture_the_largest_batch(config)
    monkeypatch.setattr(
        CudaGraphManager,
        "_init_candidates",
        _with_every_gamma(CudaGraphManager._init_candidates),
    )
    assert without > 0
    assert uncovered() == 0


def test_an_untested_version_stays_as_it_is_and_refuses_the_draft(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm
    from vllm.config import VllmConfig

    from magicdec_vllm.draft import SparseDraft
    from magicdec_vllm.plugin import register

    patched = VllmConfig.num_lookahead_tokens
    monkeypatch.setattr(
        VllmConfig, "num_lookahead_tokens", property(patched.fget.__wrapped__)
    )
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    register()
    (line,) = caplog.messages
    assert "0.99.0 is untested" in line
    assert config.num_lookahead_tokens == 0
    with pytest.raises(ConfigError, match="untested"):
        SparseDraft(config)


def test_top_k_pages_take_their_memory_from_the_cache(config: Any) -> None:
    """A mean key for each page of 32 tokens, and fp32 scores of 16 sequences, 6 heads and 48 pages."""
    from vllm.v1.executor.abstract import Executor

    executor: Any = SimpleNamespace(
        vllm_config=config, collective_rpc=lambda _: [10_000_000]
    )
    assert Executor.determine_available_memory(executor) == [10_000_000]
    config.additional_config = {"magicdec": {"draft_method": "topk"}}
    assert Executor.determine_available_memory(executor) == [
        (10_000_000 - 16 * 6 * 48 * 4) * 64 // 65
    ]
