"""The supported part of the engine. Everything else is refused in one line, before weights load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from magicdec.errors import ConfigError
from magicdec.specs.vllm_plugin import (
    TESTED_VERSIONS,
    DraftSettings,
    check_pages,
    is_tested,
    read_settings,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

FULL_ATTENTION = ("full_attention", "attention")
"""Names that configurations of models give to layers that see all tokens."""
SUPPORTED = (
    "decoder-only models with one group of full attention, with tensor parallelism"
)


def checked_settings(config: VllmConfig) -> DraftSettings:
    """The draft's settings. Raises ConfigError for what of them, of the engine or its version is
    not supported.
    """
    import vllm

    check_version(vllm.__version__)
    check_supported(config)
    settings = read_settings(config.additional_config)
    speculative = config.speculative_config
    assert speculative is not None
    check_pages(
        settings,
        page_size=config.cache_config.block_size,
        max_gamma=speculative.num_speculative_tokens,
    )
    return settings


def check_version(version: str) -> None:
    """Raises ConfigError for a version of vLLM that this package was not tested with."""
    if not is_tested(version):
        raise ConfigError(
            f"vLLM {version} is untested with magicdec's draft; tested: "
            f"{', '.join(TESTED_VERSIONS)}"
        )


def check_supported(config: VllmConfig) -> None:
    """Raises ConfigError naming what of the engine's configuration the draft does not work with."""
    unsupported = list(_unsupported(config))
    if unsupported:
        raise ConfigError(
            f"magicdec's draft in vLLM does not support {', '.join(unsupported)}; supported: "
            f"{SUPPORTED}"
        )


def _other_layers(model: ModelConfig) -> Iterator[str]:
    """Features of a model that make the engine keep several groups of caches, or caches that are
    not pages of each layer's keys and values."""
    text = model.hf_text_config
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(FULL_ATTENTION))
    if others:
        yield f"hybrid KV caches (layers of {', '.join(others)})"
    elif model.is_hybrid or model.is_attention_free:
        yield "layers without attention"
    if model.attention_chunk_size is not None:
        yield "chunked local attention"
    if getattr(text, "num_kv_shared_layers", None):
        yield "layers that share keys and values"


def _unsupported(config: VllmConfig) -> Iterator[str]:
    """Features of a configuration that the plugin does not run with."""
    yield from _other_parallelism(config)
    yield from _other_models(config.model_config)
    yield from _other_features(config)


def _other_parallelism(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism"
    if (
        parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1
    ):
        yield "context parallelism"
    if parallel.data_parallel_size > 1:
        yield "data parallelism within one engine (start one engine per replica)"
    if parallel.use_ubatching:
        yield "dual-batch overlap"
    if config.scheduler_config.async_scheduling and not config.use_v2_model_runner:
        yield "asynchronous scheduling on the V1 model runner (leave --async-scheduling out)"


def _other_models(model: ModelConfig) -> Iterator[str]:
    if model.use_mla:
        yield "multi-head latent attention (MLA)"
    if model.is_encoder_decoder:
        yield "encoder-decoder models"
    if model.uses_mrope:
        yield "multimodal rotary positions (M-RoPE)"
    if model.get_sliding_window() is not None:
        yield "sliding-window attention"
    yield from _other_layers(model)


def _other_features(config: VllmConfig) -> Iterator[str]:
    cache = config.cache_config
    if cache.cache_dtype != "auto":
        yield f"a quantised KV cache ({cache.cache_dtype})"
    if cache.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill"
    if config.kv_transfer_config is not None:
        yield "KV connectors"
    if config.lora_config is not None:
        yield "LoRA"
