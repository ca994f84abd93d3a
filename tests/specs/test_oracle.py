"""Specs against transformers' own modules, for every architecture that both know: weights, caches and states."""

from __future__ import annotations

from typing import Any

import pytest

from magicdec.specs.families import ARCHITECTURES
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.mixers import Attention
from tests.specs.architectures import READ_BY_TRANSFORMERS, draw
from tests.specs.counted import OTHERS_ROW

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
decilm = pytest.importorskip("tests.specs.decilm")  # what transformers lacks
SEEDS = (0, 1)


def their_config(config: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**config)


def their_model(config: dict[str, Any], *, device: str = "meta") -> Any:
    theirs = their_config(config)
    theirs._attn_implementation = "eager"
    theirs._experts_implementation = "eager"
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(theirs).eval()


def test_every_architecture_is_held_against_transformers_or_modules_of_it() -> None:
    assert set(READ_BY_TRANSFORMERS) == set(ARCHITECTURES) - set(OTHERS_ROW)


@pytest.mark.parametrize("model_type", READ_BY_TRANSFORMERS)
def test_parameters_are_those_of_the_module(model_type: str) -> None:
    """Counted on the meta device, from the published keys and from the file that transformers writes itself."""
    for seed in SEEDS:
        config = draw(model_type, seed)
        theirs = their_model(config)
        theirs.tie_weights()
        buffers = [
            value for name, value in theirs.named_buffers() if "correction_bias" in name
        ]
        expected = sum(each.numel() for each in (*theirs.parameters(), *buffers))
        for written in (config, theirs.config.to_dict()):
            spec = model_from_hf_config(written, name=model_type, where=model_type)
            assert spec.num_parameters == expected, (seed, written is config)


def cached_elements(cache: Any) -> tuple[int, int]:
    """Numbers of keys and values, and of states, that transformers' cache holds."""
    tokens, states = 0, 0
    for layer in cache.layers:
        for key, value in vars(layer).items():
            held = list(value.values()) if isinstance(value, dict) else [value]
            count = sum(each.numel() for each in held if isinstance(each, torch.Tensor))
            tokens += count if key in ("keys", "values", "indexer_keys") else 0
            states += count if key in ("conv_states", "recurrent_states") else 0
    own = getattr(cache, "linear_cache", [])  # MiniMax's
    return tokens, states + sum(
        each.numel() for each in own if isinstance(each, torch.Tensor)
    )


@pytest.mark.parametrize("model_type", READ_BY_TRANSFORMERS)
def test_kv_and_states_are_what_its_own_cache_holds(model_type: str) -> None:
    """After a prompt of 11 tokens, longer than the windows: their cache holds a window less the token to come."""
    for seed in SEEDS:
        config = draw(model_type, seed)
        spec = model_from_hf_config(config, name=model_type, where=model_type)
        module = their_model(config, device="cpu")
        with torch.no_grad():
            cache = module(
                torch.zeros(1, 11, dtype=torch.long), use_cache=True
            ).past_key_values
        tokens, states = cached_elements(cache)
        short = sum(
            count * each.num_heads * each.elements_per_token
            for each, count in spec.caches
            if each.max_tokens is not None and each.max_tokens <= 11
        )
        assert tokens == spec.kv_elements(11) - short, seed
        assert states == sum(spec.state_elements()), seed


def test_windows_are_where_transformers_has_them() -> None:
    for model_type in READ_BY_TRANSFORMERS:
        config = draw(model_type, 0)
        spec = model_from_hf_config(config, name=model_type, where=model_type)
        masks = {
            "window": "sliding_attention",
            "chunk": "chunked_attention",
            "full": "full_attention",
        }
        ours = [
            masks[each.mixer.mask]
            for each in spec.layers
            if isinstance(each.mixer, Attention)
        ]
        theirs = getattr(their_config(config), "layer_types", None)
        if theirs is not None:
            assert ours in ([each for each in theirs if each in masks.values()], []), (
                model_type
            )
