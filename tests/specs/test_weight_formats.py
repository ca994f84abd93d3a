"""A format weighs what it weighs: sizes of files that others published, and blocks counted by hand.

No constant is fitted to these sizes: the formats' data are llama.cpp's blocks and its rules by tensor.
"""

from __future__ import annotations

import msgspec
import pytest

import magicdec
from magicdec.errors import ConfigError
from magicdec.live.check import check_command
from magicdec.live.load import AskedLoad
from magicdec.perfmodel.footprint import weights_bytes
from magicdec.perfmodel.forward import Pass, forward_pass
from magicdec.perfmodel.setup import Setup
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.formats import (
    format_name,
    gguf_format,
    type_bits,
    weight_format,
    weight_format_names,
)
from magicdec.specs.model import LAYER_PARTS
from magicdec.specs.precision import Precision
from magicdec.specs.serve_command import read_serve_command

FILES_GIB = [
    # the model that llama.cpp's quantize page lists (ggml-org/llama.cpp@311c2c9 tools/quantize/README.md)
    ("llama-3.1-8b", "iq1_s", 1.87), ("llama-3.1-8b", "iq1_m", 2.01), ("llama-3.1-8b", "iq2_xxs", 2.23),
    ("llama-3.1-8b", "iq2_xs", 2.42), ("llama-3.1-8b", "iq2_s", 2.56), ("llama-3.1-8b", "iq2_m", 2.74),
    ("llama-3.1-8b", "iq3_xxs", 3.04), ("llama-3.1-8b", "iq3_xs", 3.27), ("llama-3.1-8b", "iq3_s", 3.42),
    ("llama-3.1-8b", "iq3_m", 3.52), ("llama-3.1-8b", "q2_k_s", 2.78), ("llama-3.1-8b", "q2_k", 2.95),
    ("llama-3.1-8b", "q3_k_s", 3.41), ("llama-3.1-8b", "q3_k_l", 4.02), ("llama-3.1-8b", "q4_k_s", 4.36),
    ("llama-3.1-8b", "q4_k_m", 4.58), ("llama-3.1-8b", "q5_k_s", 5.21), ("llama-3.1-8b", "q5_k_m", 5.33),
    ("llama-3.1-8b", "q6_k", 6.14), ("llama-3.1-8b", "q8_0", 7.95), ("llama-3.1-8b", "f16", 14.96),
    # other models, sums of tensors by llama-bench (lhl/strix-halo-testing@5ee14b5, ggml-org/llama.cpp@4c7e989)
    ("qwen3-32b", "q8_0", 32.421), ("llama-2-7b", "q4_0", 3.562), ("llama-2-7b", "q4_k_m", 3.800),
    ("llama-3.3-70b", "q4_k_m", 39.593), ("llama-3.2-1b", "q4_k_m", 0.745), ("phi-4", "iq3_m", 6.274),
    ("qwen3-coder-30b-a3b", "q8_0", 30.25), ("gpt-oss-20b", "mxfp4_moe", 11.27), ("gpt-oss-120b", "mxfp4_moe", 59.02),
    # gpt-oss as "F16": experts in MXFP4
    ("gpt-oss-20b", "f16", 12.833), ("gpt-oss-120b", "f16", 60.868),
]  # fmt: skip
FILES_GB = [
    # a publisher's list (ozeki.chat/p_8590-understanding-ai-model-files.html)
    ("llama-3.1-70b", "q8_0", 74.98), ("llama-3.1-70b", "q6_k", 57.89), ("llama-3.1-70b", "q5_k_l", 50.6),
    ("llama-3.1-70b", "q5_k_m", 49.95), ("llama-3.1-70b", "q5_k_s", 48.66), ("llama-3.1-70b", "q4_k_l", 43.3),
    ("llama-3.1-70b", "q4_k_m", 42.52), ("llama-3.1-70b", "q4_k_s", 40.35), ("llama-3.1-70b", "q4_0", 40.12),
    ("llama-3.1-70b", "q3_k_xl", 38.06), ("llama-3.1-70b", "iq4_xs", 37.9), ("llama-3.1-70b", "q3_k_l", 37.14),
    ("llama-3.1-70b", "q3_k_m", 34.27), ("llama-3.1-70b", "iq3_m", 31.94), ("llama-3.1-70b", "q3_k_s", 30.91),
    # InventiveHQ/speculative-decoding-consumer-gpus@451748f
    ("qwen2.5-7b", "q2_k", 3.016), ("qwen2.5-7b", "q3_k_m", 3.808), ("qwen2.5-7b", "q4_k_m", 4.683),
    ("qwen2.5-7b", "q5_k_m", 5.445), ("qwen2.5-7b", "q6_k", 6.254), ("qwen2.5-7b", "q8_0", 8.099),
]  # fmt: skip


def size_of(model: str, weights: str) -> float:
    precision = Precision(weight_dtype=weights)
    return float(weights_bytes(load_model_spec(model), precision, 1))


@pytest.mark.parametrize(
    ("model", "weights", "num_bytes"),
    [(*row[:2], row[2] * 2**30) for row in FILES_GIB]
    + [(*row[:2], row[2] * 1e9) for row in FILES_GB],
)
def test_a_file_is_as_large_as_its_publisher_says(model, weights, num_bytes):
    """Sums are printed with three or four digits; the one of llama-3.2-1b is of 1.24e9 weights."""
    assert size_of(model, weights) == pytest.approx(num_bytes, rel=0.009)


@pytest.mark.parametrize(
    ("model", "weights", "gib"),
    [
        ("gemma-4-31b", "ud_q4_k_xl", 17.46),
        ("qwen3-30b-a3b", "ud_q4_k_xl", 16.493),
        ("llama-4-scout", "ud_q4_k_xl", 57.728),
        ("gemma-4-26b-a4b", "ud_q8_k_xl", 25.94),
        ("qwen3.5-122b-a10b", "ud_q5_k_xl", 85.60),
    ],
)
def test_a_publisher_s_own_mixture_is_known_to_a_tenth(model, weights, gib):
    assert size_of(model, weights) == pytest.approx(gib * 2**30, rel=0.1)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("q6_k", 8 * (128 + 64 + 16 + 2) / 256),  # low and high bits, scales, one factor
        ("q4_k", 8 * (128 + 12 + 4) / 256),
        ("q4_0", 4 + 16 / 32),
        ("q8_0", 8 + 16 / 32),
        ("mxfp4", 4 + 8 / 32),
        ("nvfp4", 4 + 8 / 16),
        ("int4", 4 + (16 + 4) / 128),
        ("bnb4", 4 + 32 / 64),
        ("bf16", 16),
    ],
)  # fmt: skip
def test_a_block_counts_its_scales(name, bits):
    assert type_bits(name) == pytest.approx(bits)


@pytest.mark.parametrize(
    ("name", "weights", "bits"),
    [
        ("qwen3-32b-awq", "int4", 4.15625),
        ("qwen3-32b-gptq-int4", "int4", 4.15625),
        ("qwen3-32b-w4a16", "int4", 4.125),
        ("qwen3-32b-nvfp4", "nvfp4", 4.5),
        ("qwen3-32b-mxfp4", "mxfp4", 4.25),
        ("qwen3-32b-bnb-4bit", "int4", 4.5),
        ("Intel/Qwen3-32B-int4-AutoRound", "int4", 4.15625),
    ],
)
def test_times_follow_the_scales_that_a_configuration_names(name, weights, bits):
    """The bytes that a pass reads of a published checkpoint's layers are those that it holds."""
    model = load_model_spec(name)
    setup = Setup.of(model, "h100", "vllm")
    assert setup.precision.weight_dtype == weights
    one = Pass(at=setup.at, batch=1, query_len=1, kv_len=64)
    read = float(forward_pass(model, one).cost.weight_bytes)
    head = model.embedding_parameters
    layers = model.num_parameters - 2 * head
    assert 8 * (read - 2 * head) / layers == pytest.approx(bits, rel=1e-3)


@pytest.mark.parametrize(
    ("stated", "name"),
    [("awq_marlin", "int4"), ("GPTQ", "int4"), ("bitsandbytes", "bnb4"), ("Q4_K_M", "q4_k_m"),
     ("modelopt_fp4", "nvfp4"), ("int8_per_token_head", "int8"), ("odd", "odd"),
     ("MXFP4", "mxfp4"), ("W8A16", "int8"), ("FP8-dynamic", "fp8"), ("auto-round", "int4"), ("q6_k@27GB", "q6_k@27GB")],
)  # fmt: skip
def test_formats_go_by_their_engines_names(stated, name):
    assert format_name(stated) == name


def test_every_type_reads_more_bytes_in_more_time():
    model = load_model_spec("qwen3-32b")
    sizes = []
    times = []
    for weights in ("q2_k", "q3_k_m", "q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0"):
        setup = Setup.of(model, "h100", "vllm", weight_dtype=weights)
        one = Pass(at=setup.at, batch=1, query_len=1, kv_len=1024)
        sizes.append(size_of("qwen3-32b", weights))
        times.append(float(forward_pass(model, one).total_s))
    assert sizes == sorted(sizes)
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_a_file_s_own_size_decides_and_an_impossible_one_is_refused():
    assert size_of("qwen3-32b", "q4_k_m@18GiB") == pytest.approx(18 * 2**30, rel=1e-3)
    assert size_of("qwen3-32b", "gguf@23.5GB") == pytest.approx(23.5e9, rel=1e-3)
    with pytest.raises(
        ConfigError, match=r"such a file of qwen3-32b has about 19\.8 GB"
    ):
        size_of("qwen3-32b", "q4_k_m@4.7GB")
    with pytest.raises(ConfigError, match=r"is written q4_k_m@19\.8GB"):
        weight_format("q4_k_m@much")
    with pytest.raises(ConfigError, match="did you mean q4_k_"):
        weight_format("q4_k_n")


@pytest.mark.parametrize("name", weight_format_names())
def test_every_row_names_types_that_exist_and_shares_of_a_whole(name):
    form = weight_format(name)
    for matrix in ("qk", "v", "o", "gate_up", "down"):
        assert sum(getattr(form, matrix).values()) <= 1.0
    model = load_model_spec("qwen3-30b-a3b")
    for part in (*LAYER_PARTS, "head", "embeddings"):
        own = model.part_format(part, Precision(weight_dtype=name))
        assert 0.1 < own.num_bytes <= 4.0


def test_a_draft_s_network_does_not_weigh_as_its_target_s_file():
    precision = Precision(weight_dtype="q4_k_m@19.8GB")
    assert precision.of_its_type == msgspec.structs.replace(
        precision, weight_dtype="q4_k_m"
    )


@pytest.mark.parametrize("model", ["Qwen3-32B", "gemma-3-27b-it"])
def test_models_of_27_to_32_billion_weights_fit_32_gb_in_q6_k(model):
    text = f"llama-server -m /models/{model}-Q6_K.gguf -ngl 99 -c 4096"
    found = check_command(read_serve_command(text), AskedLoad(hardware="rtx-5090"))
    assert found.as_it_is is not None


def test_a_size_given_to_a_check_takes_the_name_s_place():
    command = read_serve_command(
        "llama-server -m Qwen3-32B-UD-Q4_K_XL.gguf -ngl 99 -c 4096"
    )
    times = []
    for weights in ("ud_q4_k_xl@17GB", None, "ud_q4_k_xl@24GB"):
        load = AskedLoad(hardware="h100", weight_dtype=weights)
        times.append(check_command(command, load).as_it_is.tpot_s)
    assert times == sorted(times)
    assert 1.15 < times[2] / times[0] < 24 / 17


@pytest.mark.parametrize(
    ("label", "name"),
    [("Q4_K", "q4_k_m"), ("UD-Q2_K_XL", "q2_k"), ("Q4_0_4_8", "q4_0"), ("IQ3_KT", "iq3_m"), ("LATEST", None)],
)  # fmt: skip
def test_a_type_that_is_not_listed_is_the_nearest_of_its_kind(label, name):
    assert gguf_format(label) == name


def test_four_bits_that_an_option_names_weigh_as_those_of_a_checkpoint():
    """Of one model: --weight-dtype int4, and its AWQ configuration; 3.9 % more than bare halves of bytes."""
    asked = {"hardware": "h100", "batch": 1, "context": 4096, "draft": "ngram"}
    named = magicdec.plan(model="qwen3-32b", weight_dtype="int4", **asked)
    published = magicdec.plan(model="qwen3-32b-awq", **asked)
    assert named.memory.weights_bytes == published.memory.weights_bytes
