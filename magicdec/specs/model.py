"""What a decoder-only transformer is made of, read from a Hugging Face `config.json`. No torch, no time.

Shapes, with the field's names (H = hidden_size, A = num_attention_heads, K = num_key_value_heads, D = head_dim,
F = intermediate_size, L = num_hidden_layers, V = vocab_size): q [A·D, H], k and v [K·D, H], o [H, A·D],
gate and up [F, H], down [H, F], embedding and head [V, H].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from magicdec.errors import ConfigError, unknown_choice

Family = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
MAX_DIMENSION = 2**31


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Position-interpolation of rotary embeddings: `linear`, or Llama 3.1's frequency-dependent `llama3`."""

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A dense or mixture-of-experts decoder with grouped-query attention and SwiGLU."""

    name: str
    family: Family
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on q, k and v."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each head's query and key, with a weight of head_dim."""
    sliding_window: int | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    eos_token_ids: tuple[int, ...] = ()

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention, biases and q/k norms included."""
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        count = self.hidden_size * (2 * q_size + 2 * kv_size)
        if self.attention_bias:
            count += q_size + 2 * kv_size
        if self.attention_output_bias:
            count += self.hidden_size
        if self.qk_norm:
            count += 2 * self.head_dim
        return count

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert (of the MLP, in a dense model)."""
        width = self.moe_intermediate_size if self.is_moe else self.intermediate_size
        return 3 * self.hidden_size * width + (2 * width + self.hidden_size if self.mlp_bias else 0)

    @property
    def router_parameters(self) -> int:
        return self.hidden_size * self.num_experts

    @property
    def layer_parameters(self) -> int:
        experts = max(1, self.num_experts)
        return (
            self.attention_parameters + experts * self.expert_parameters + self.router_parameters + 2 * self.hidden_size
        )

    @property
    def embedding_parameters(self) -> int:
        """The embedding table; the head's, of the same size, is counted apart unless tied."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights, a tied head counted once."""
        tables = self.embedding_parameters * (1 if self.tie_word_embeddings else 2)
        return tables + self.num_hidden_layers * self.layer_parameters + self.hidden_size

    def kv_elements_per_token(self) -> int:
        """Numbers stored per token of context over all layers: keys and values of each KV head."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


def model_from_hf_config(config: dict[str, Any], *, name: str, where: str) -> ModelSpec:
    """The spec that a Hugging Face configuration describes.

    `where` names the file in errors. Raises ConfigError for an unsupported architecture, or a missing or unusable key.
    """
    reader = _Reader(config, where)
    model_type = reader.get("model_type", str)
    if model_type not in FAMILIES:
        raise unknown_choice(f"model_type in {where}", model_type, FAMILIES)
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    head_dim = reader.size("head_dim", hidden // heads)
    kv_heads = reader.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    moe = model_type in ("mixtral", "qwen3_moe")
    intermediate = reader.size("intermediate_size")
    experts_key = "num_local_experts" if model_type == "mixtral" else "num_experts"
    rope = config.get("rope_parameters") or {}
    attention_bias = bool(config.get("attention_bias", model_type == "qwen2"))
    return ModelSpec(
        name=name,
        family=model_type,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=reader.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("max_position_embeddings"),
        rope_theta=reader.number("rope_theta", rope.get("rope_theta", 10_000.0)),
        rope_scaling=_rope_scaling(config.get("rope_scaling") or rope, where),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and model_type == "llama",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        sliding_window=_sliding_window(config, model_type),
        num_experts=reader.size(experts_key) if moe else 0,
        num_experts_per_tok=reader.size("num_experts_per_tok") if moe else 0,
        moe_intermediate_size=reader.size("moe_intermediate_size", intermediate) if moe else 0,
        eos_token_ids=_token_ids(config.get("eos_token_id")),
    )


class _Reader:
    """Typed look-ups in a configuration, with errors that name the file and the key."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._where}: key '{key}' is missing")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigError(f"{self._where}: key '{key}' must be {kind.__name__}, not {value!r}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        if not 1 <= value <= MAX_DIMENSION:
            raise ConfigError(f"{self._where}: key '{key}' must be between 1 and {MAX_DIMENSION}, not {value}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{self._where}: key '{key}' must be a positive number, not {value!r}")
        return float(value)


def _rope_scaling(scaling: Any, where: str) -> RopeScaling | None:
    if not isinstance(scaling, dict) or not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise unknown_choice(f"rope_scaling type in {where}", kind, ("default", "linear", "llama3"))
    try:
        return msgspec.convert({**scaling, "rope_type": kind}, RopeScaling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: rope_scaling: {error}") from error


def _sliding_window(config: dict[str, Any], model_type: str) -> int | None:
    window = config.get("sliding_window")
    if model_type.startswith("qwen") and not config.get("use_sliding_window", False):
        return None
    return window if isinstance(window, int) and window > 0 else None


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def load_hf_config(path: Path, *, name: str | None = None) -> ModelSpec:
    """Reads a `config.json`, or the one in a checkpoint directory.

    Raises ConfigError when there is none, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(config).__name__}")
    return model_from_hf_config(
        config, name=name or (path.name if path.is_dir() else file.parent.name), where=str(file)
    )
