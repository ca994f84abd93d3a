"""DeciLM (`nemotron-nas`), whose published code is not part of transformers: put together from Llama's own modules.

A block is Llama's with KV heads and a width of its own, and lacks the attention, or the feed-forward, with its norm,
where that is a no-op.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
)

MULTIPLE = 256
"""Widths are rounded up to it."""


@strict
class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"
    intermediate_size: int | None = None
    block_configs: list | None = None


class DeciLMBlock(nn.Module):
    def __init__(self, config: DeciLMConfig, index: int) -> None:
        super().__init__()
        block = config.block_configs[index]
        own = copy(config)
        self.self_attn = self.mlp = None
        if not block["attention"]["no_op"]:
            own.num_key_value_heads = (
                config.num_attention_heads // block["attention"]["n_heads_in_group"]
            )
            self.input_layernorm = LlamaRMSNorm(
                config.hidden_size, eps=config.rms_norm_eps
            )
            self.self_attn = LlamaAttention(own, index)
        if not block["ffn"]["no_op"]:
            width = int(2 * block["ffn"]["ffn_mult"] * config.hidden_size / 3)
            own.intermediate_size = width + -width % MULTIPLE
            self.post_attention_layernorm = LlamaRMSNorm(
                config.hidden_size, eps=config.rms_norm_eps
            )
            self.mlp = LlamaMLP(own)

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        if self.self_attn is not None:
            hidden_states = (
                hidden_states
                + self.self_attn(self.input_layernorm(hidden_states), **given)[0]
            )
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(
                self.post_attention_layernorm(hidden_states)
            )
        return hidden_states


class DeciLMForCausalLM(LlamaForCausalLM):
    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(_small(config))
        self.config = self.model.config = config
        self.model.layers = nn.ModuleList(
            DeciLMBlock(config, i) for i in range(config.num_hidden_layers)
        )


def _small(config: DeciLMConfig) -> DeciLMConfig:
    """With blocks of any size, as all of them are replaced."""
    changed = copy(config)
    changed.intermediate_size = MULTIPLE
    return changed


AutoConfig.register("nemotron-nas", DeciLMConfig)
AutoModelForCausalLM.register(DeciLMConfig, DeciLMForCausalLM)
