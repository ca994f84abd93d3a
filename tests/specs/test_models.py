"""The catalog's configurations against the parameter counts their publishers state."""

from __future__ import annotations

import pytest

from magicdec.specs.catalog import EMBEDDED, load_model_spec, model_names

PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-7b-32k": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-68m": 68_030_208,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "yi-1.5-6b": 6_061_035_520,
    "yi-1.5-34b": 34_388_917_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
}
"""Tensor elements in each published safetensors index (a tied head counted once)."""


@pytest.mark.parametrize("name", sorted(set(model_names()) - {EMBEDDED}))
def test_parameter_count_equals_the_published_one(name: str) -> None:
    assert load_model_spec(name).num_parameters == PUBLISHED_PARAMETERS[name]


def test_every_published_count_has_a_model() -> None:
    assert set(PUBLISHED_PARAMETERS) == set(model_names()) - {EMBEDDED}


def test_sliding_window_belongs_to_mistral_v01_only() -> None:
    windows = {n: load_model_spec(n).attention.span for n in PUBLISHED_PARAMETERS}
    assert {n: w for n, w in windows.items() if w} == {"mistral-7b-v0.1": 4096}
