"""Names of models, engines and number formats in tables of measured servers, and the catalog's."""

from __future__ import annotations

import re
from functools import lru_cache

from magicdec.errors import unknown_choice
from magicdec.specs.catalog import model_names
from magicdec.specs.engine import engine_names
from magicdec.specs.model import ModelSpec

NEWEST = "9999"
"""The version of a row that states none."""
FORMATS = {
    "fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "half": "bf16", "auto": "bf16", "16bit": "bf16",
    "float32": "fp32", "awq": "int4", "gptq": "int4", "w4a16": "int4", "awq_int4": "int4", "gptq_int4": "int4",
    "int4_awq": "int4", "int4_gptq": "int4", "awq_marlin": "int4", "gptq_marlin": "int4", "w8a16": "int8",
    "w8a8": "int8", "w8a8_int8": "int8", "w8a8_fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8": "fp8",
    "fp8_dynamic": "fp8", "fp8_per_tensor": "fp8", "fp8_blockwise": "fp8_block", "fp4": "nvfp4",
}  # fmt: skip
"""Other names of number formats, and what is priced for them."""
MODELS = {"llama-3.3-70b": "llama-3.1-70b"}
"""Models of another's shape."""
MODEL_NOISE = re.compile(r"^meta-|-(instruct|it|chat|hf|base|thinking|fp8|awq|gptq|int4|int8|w4a16|w8a8|nvfp4|\d{4})\b")
ENGINE_ALIASES = {"tensorrt-llm": "trtllm", "gpt-fast": "gpt-fast"}


@lru_cache(maxsize=1024)
def model_name(text: str) -> str:
    """The catalog's name of a model, however its publisher's is written ("Qwen/Qwen3-8B-Instruct": qwen3-8b)."""
    if text in model_names():
        return text
    name, before = text.rsplit("/", 1)[-1].lower().replace("_", "-"), ""
    while name != before:
        before, name = name, MODEL_NOISE.sub("", name)
    name = MODELS.get(name, name)
    return name if name in model_names() else text


@lru_cache(maxsize=256)
def engine_name(text: str) -> str:
    """The profile that a version's name belongs to ("vllm 0.12.0": vllm). Raises ConfigError, naming the nearest."""
    word = text.split(maxsplit=1)[0].lower() if text.split() else ""
    word = ENGINE_ALIASES.get(word, word)
    if word not in engine_names():
        raise unknown_choice("engine", text, engine_names())
    return word


def format_name(text: str) -> str:
    """The number format that is priced for one of this name."""
    return FORMATS.get(text.lower(), text.lower())


def weight_format(model: ModelSpec, text: str) -> str:
    """The format of a checkpoint's weights that a source names roughly: one published in blocks of fp8 is served as it
    is, and four bits of gpt-oss are its own."""
    dtype = format_name(text)
    if dtype == "nvfp4" and model.name.startswith("gpt-oss"):
        return "mxfp4"
    if dtype == "fp8" and model.quantization is not None and model.quantization.weight_dtype == "fp8_block":
        return "fp8_block"
    return dtype
