"""A ModelSpec from a Hugging Face `config.json`, as its publisher wrote it; and the formats of published weights, from
its `quantization_config`, as each library writes it (compressed-tensors, GPTQ, AWQ, ModelOpt, FBGEMM, bitsandbytes, and
Hugging Face's own of fp8 and mxfp4)."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import read_json
from magicdec.specs.families import WRAPPERS, architecture
from magicdec.specs.families.keys import MAX_LAYERS, Keys, fields_of
from magicdec.specs.families.rope import reach
from magicdec.specs.layers import Layer, MixtureOfExperts
from magicdec.specs.model import ModelSpec, TensorNames
from magicdec.specs.quantization import REGEX, WIDE_BYTES, PartFormat, Quantization, Scheme, Storage, scheme_of
from magicdec.units import printable

MODALITIES = (
    "vision", "image", "video", "audio", "boi", "eoi", "mm_", "multimodal", "projector", "projection", "spatial",
    "use_unified_vision", "language_model_only", "media",
)  # fmt: skip
"""Beginnings of keys that describe what stands before the decoder."""
MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt says how it has quantised a checkpoint, if not in its config.json."""
BESIDE = ("tie_word_embeddings", "quantization_config", "eos_token_id")
"""Keys that a model of several modalities may give outside its decoder's configuration."""


def model_from_hf_config(config: dict[str, Any], *, name: str, where: str) -> ModelSpec:
    """The spec that a Hugging Face configuration describes. `where` names the file in errors. Raises ConfigError for an
    architecture that is not known, for a missing or unusable key, and for a key that may matter and is not
    understood."""
    values = _decoder(config, where)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{where}: key 'model_type' must be a string, not {model_type!r}")
    if values is config and model_type == "mistral" and "layer_types" in config:
        model_type = "ministral"  # as transformers' AutoConfig takes it
    row = architecture(model_type, where)
    keys = Keys(values, where, fields_of(model_type))
    for key, allowed in row.fixed.items():
        keys.require(key, *allowed)
    keys.ignore(*row.ignored.split(), "max_position_embeddings", "vision_config")
    if (count := keys.optional_size("num_hidden_layers") or 0) > MAX_LAYERS:
        raise keys.error("num_hidden_layers", f"at most {MAX_LAYERS}", count)
    layers = tuple(row.layers(keys))
    positions = keys.size("max_position_embeddings")
    details = row.details(keys)
    reached = max(reach(layer.mixer.rotary if layer.mixer else None, positions) for layer in layers)
    details.setdefault("max_position_embeddings", reached)
    if row.mtp_key is not None:
        heads = keys.optional_size(row.mtp_key, least=0) or 0
        details["mtp_layers"] = (layers[-1],) * heads
    hidden, vocabulary = keys.size("hidden_size"), keys.size("vocab_size")
    spec = ModelSpec(
        name=name,
        architecture=model_type,
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=layers,
        norm=msgspec.structs.replace(row.norm, eps=keys.number(row.eps_key, most=1.0)),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        quantization=read_quantization(keys, layers=layers, hidden_size=hidden, vocab_size=vocabulary, names=row.names),
        names=row.names,
        eos_token_ids=_token_ids(values.get("eos_token_id"), where),
        **details,
    )
    if unread := keys.unread():
        raise ConfigError(
            f"{where}: key '{unread[0]}' is not known for {model_type}, and may change what the model computes; "
            "remove it if it does not"
        )
    return spec


def _decoder(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The decoder's own configuration: `text_config`, with the keys next to it, in a model of several modalities."""
    model_type, inside = config.get("model_type"), config.get("text_config")
    if not isinstance(model_type, str) or model_type not in WRAPPERS or inside is None:
        return config
    if not isinstance(inside, dict):
        raise ConfigError(f"{where}: key 'text_config' must be an object, not {inside!r}")
    beside = Keys(config, where)
    beside.ignore("text_config", "vocab_size", "hidden_size", "ignore_index", "tie_word_embeddings", *BESIDE)
    unread = [key for key in beside.unread() if not key.startswith(MODALITIES) and not key.endswith("token_id")]
    if unread:
        raise ConfigError(f"{where}: key '{unread[0]}' is not known for {model_type}")
    shared = {key: config[key] for key in BESIDE if config.get(key) is not None}
    return {"model_type": WRAPPERS[model_type], **shared, **inside}


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    """`eos_token_id`: nothing, one, or a list."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31 for each in listed):
        raise ConfigError(f"{where}: key 'eos_token_id' must be a token's number, or a list of them, not {value!r}")
    return tuple(listed)


def load_hf_config(path: Path, *, name: str | None = None) -> ModelSpec:
    """Reads a `config.json`, or the one in a checkpoint directory, with ModelOpt's file next to it where there is one.
    Raises ConfigError when there is none, or it is not a JSON object."""
    file = path / "config.json" if path.is_dir() else path
    config = _json_object(file)
    inside = config.get("text_config")
    is_named = any("quantization_config" in each for each in (config, inside) if isinstance(each, dict))
    if path.is_dir() and (beside := path / MODELOPT_FILE).is_file() and not is_named:
        config = {**config, "quantization_config": {"quant_method": "modelopt", **_json_object(beside)}}
    directory = Path(os.path.abspath(file)).parent.name  # not resolved: of a link, the name is the user's
    return model_from_hf_config(
        config, name=name or printable(directory if file.name == "config.json" else file.stem), where=str(file)
    )


def _json_object(file: Path) -> dict[str, Any]:
    config = read_json(file, decode=json.loads)  # transformers writes infinities
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(config).__name__}")
    return config


# The formats of published weights

KEY = "quantization_config"
WIDE = PartFormat(dtype="bf16", num_bytes=WIDE_BYTES)
MODULES: Mapping[str, str] = {
    "qkv": "self_attn.q_proj", "q_a": "self_attn.q_a_proj", "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa", "absorb_k": "self_attn.kv_b_proj", "absorb_v": "self_attn.kv_b_proj",
    "index_q": "self_attn.indexer.wq_b", "index_k": "self_attn.indexer.wk", "linear_in": "linear_attn.in_proj_qkvz",
}  # fmt: skip
"""A module that holds a projection's weights; that of a fused or divided one stands for all of it."""


class Read(NamedTuple):
    """The formats that a configuration describes, whatever the model."""

    schemes: tuple[Scheme, ...]
    kept: tuple[str, ...] = ("lm_head",)
    kv_dtype: str | None = None
    reason: str | None = None
    """Why it is not widened."""
    experts_only: bool = False


def read_quantization(
    keys: Keys, *, layers: Sequence[Layer], hidden_size: int, vocab_size: int, names: TensorNames
) -> Quantization | None:
    """The formats of a model's parts. None where its weights are in 16 or 32 bits. Raises ConfigError for a method or a
    format that is not known."""
    value = keys.raw(KEY, "compression_config", default=None)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise keys.error(KEY, "an object", value)
    method = value.get("quant_method") or ("modelopt" if "quant_algo" in value or "quantization" in value else "")
    if not isinstance(method, str) or not method:
        raise keys.error(KEY, "an object with a 'quant_method'", value)
    if method not in READERS:
        raise unknown_choice(f"quant_method in {keys.where}", method, READERS)
    found = READERS[method](_Config(value, keys))
    sizes: dict[str, Counter[Scheme | None]] = {part: Counter() for part in ("mixer", "mlp", "experts", "head")}
    num_bytes = dict.fromkeys(sizes, 0.0)
    for part, module, shape in _matrices(layers, hidden_size, vocab_size, names):
        scheme = None if found.experts_only and part != "experts" else scheme_of(module, found.schemes, found.kept)
        count = shape[0] * shape[1] * shape[2]
        sizes[part][scheme] += count
        num_bytes[part] += shape[0] * scheme.num_bytes(*shape[1:]) if scheme else count * WIDE_BYTES
    parts = {part: _format(sizes[part], num_bytes[part]) for part in sizes}
    inside = sum((sizes[part] for part in ("mixer", "mlp", "experts")), Counter[Scheme | None]())
    narrow = {scheme: count for scheme, count in inside.items() if scheme is not None}
    most = max(narrow, key=lambda each: narrow[each]) if narrow else found.schemes[0]
    return Quantization(
        method=method, weight_dtype=most.dtype, schemes=found.schemes, kept=found.kept, kv_dtype=found.kv_dtype,
        reason=found.reason or next((f"weights in {s.dtype} ({method})" for s in found.schemes if not s.storage), None),
        **parts,
    )  # fmt: skip


def _format(sizes: Counter[Scheme | None], num_bytes: float) -> PartFormat:
    if not sizes:
        return WIDE
    most = sizes.most_common(1)[0][0]
    return PartFormat(dtype="bf16" if most is None else most.dtype, num_bytes=num_bytes / sizes.total())


def _matrices(
    layers: Sequence[Layer], hidden_size: int, vocab_size: int, names: TensorNames
) -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """(part, module, (how many, outputs, inputs)) of every matrix that may be published in fewer bits."""
    yield "head", "lm_head", (1, vocab_size, hidden_size)
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}"
        for each in () if layer.mixer is None else layer.mixer.projections(hidden_size):
            is_fused = each.name == "qkv" and names.fused_qkv
            module = "self_attn.qkv_proj" if is_fused else MODULES.get(each.name, "self_attn.o_proj")
            yield "mixer", f"{prefix}.{module}", (1, *each.shape)
        if layer.mlp is None:
            continue
        mlp = f"{prefix}.{names.mlp}"
        for each in layer.mlp.projections(hidden_size):
            if each.name not in ("router", "shared_gate"):
                inside = f"{names.shared}." if each.name.startswith("shared_") else ""
                last = "down_proj" if each.name.endswith("down") else "gate_proj"
                yield "mlp", f"{mlp}.{inside}{last}", (1, *each.shape)
        if isinstance(layer.mlp, MixtureOfExperts):
            inner = layer.mlp.inner_size(hidden_size)
            for each in layer.mlp.expert.projections(inner):
                last = {"gate_proj": "down_proj", "w1": "w2"}[names.expert] if each.name == "down" else names.expert
                yield "experts", f"{mlp}.experts.0.{last}", (layer.mlp.num_experts, *each.shape)


class _Config:
    """A quantization_config; errors name its file."""

    def __init__(self, values: Mapping[str, Any], keys: Keys) -> None:
        self.values, self.keys = values, keys

    def error(self, expected: str, value: object) -> ConfigError:
        return self.keys.error(KEY, expected, value)

    def whole(self, *names: str, default: int | None = None) -> int | None:
        """The first of these that is there, a positive number; -1 and null: none."""
        key = next((name for name in names if name in self.values), names[0])
        value = self.values.get(key, default)
        if value in (None, -1):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"with a positive whole number as '{key}'", value)
        return value

    def patterns(self, *names: str) -> tuple[str, ...]:
        """The strings of the first of these lists that is there."""
        value: Any = next((self.values[name] for name in names if self.values.get(name) is not None), [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(f"with a list of modules as '{names[0]}'", value)
        for each in value:
            if each.startswith(REGEX):
                try:
                    re.compile(each.removeprefix(REGEX))
                except re.error as error:
                    raise self.error(f"with regular expressions that can be read ({error})", each) from error
        return tuple(value)

    def block(self, value: Any, key: str) -> tuple[int, int]:
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value):
            raise self.error(f"of blocks of rows and columns ({key})", value)
        return value[0], value[1]


def _fp8(config: _Config) -> Read:
    kept = ("lm_head", *config.patterns("modules_to_not_convert", "ignored_layers", "ignore"))
    block = config.values.get("weight_block_size")
    if not block:
        return Read((Scheme(dtype="fp8", storage="scaled", bits=8, scale_bytes=4, is_per_tensor=True),), kept)
    size = config.block(block, "weight_block_size")
    return Read((Scheme(dtype="fp8_block", storage="scaled", bits=8, block=size, scale_bytes=4),), kept)


def _fbgemm(config: _Config) -> Read:
    kept = ("lm_head", *config.patterns("modules_to_not_convert"))
    return Read((Scheme(dtype="fp8", storage="scaled", bits=8, scale_bytes=4),), kept)


def _mxfp4(config: _Config) -> Read:
    """gpt-oss: the routed experts alone."""
    scheme = Scheme(dtype="mxfp4", storage="stacked_mxfp4", bits=4, group_size=32, scale_bytes=1)
    return Read((scheme,), config.patterns("modules_to_not_convert"), experts_only=True)


def _gptq(config: _Config) -> Read:
    bits, values = _bits(config, "bits"), config.values
    written = values.get("checkpoint_format") or "gptq"
    reason = None
    if written not in ("gptq", "gptq_v2"):
        reason = f"weights that GPTQ wrote for the kernels of {written}"
    elif values.get("dynamic"):
        reason = "GPTQ weights with settings by module (dynamic)"
    scheme = Scheme(
        dtype=f"int{bits}", storage="gptq_v2" if written == "gptq_v2" else "gptq", bits=bits, zero_bits=bits,
        group_size=config.whole("group_size", default=None),
    )  # fmt: skip
    return Read((scheme,), () if values.get("lm_head") else ("lm_head",), reason=reason)


def _awq(config: _Config) -> Read:
    bits = _bits(config, "bits", "w_bit")
    version = str(config.values.get("version") or "gemm").lower()
    is_read = version == "gemm" and bits == 4
    scheme = Scheme(
        dtype=f"int{bits}", storage="awq", bits=bits, zero_bits=bits,
        group_size=config.whole("group_size", "q_group_size", default=128),
    )  # fmt: skip
    kept = ("lm_head", *config.patterns("modules_to_not_convert"))
    return Read((scheme,), kept, reason=None if is_read else f"AWQ weights of {bits} bits packed as {version}")


def _bits(config: _Config, *names: str) -> int:
    bits = config.whole(*names, default=4)
    if bits not in (4, 8):
        raise config.error("of weights of 4 or 8 bits", bits)
    return bits


def _bitsandbytes(config: _Config) -> Read:
    kept = ("lm_head", *config.patterns("llm_int8_skip_modules"))
    if config.values.get("load_in_8bit"):
        return Read((Scheme(dtype="int8", storage=None, bits=8, scale_bytes=4),), kept)
    # An fp32 scale per 64 weights; quantised again, 8 bits and an fp32 one per 256 of them (QLoRA, arXiv 2305.14314).
    scale_bytes = 1 + 4 / 256 if config.values.get("bnb_4bit_use_double_quant") else 4.0
    return Read((Scheme(dtype="int4", storage=None, bits=4, group_size=64, scale_bytes=scale_bytes),), kept)


MODELOPT: Mapping[str, Scheme] = {
    "FP8": Scheme(dtype="fp8", storage="scaled", bits=8, scale_bytes=4, is_per_tensor=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(dtype="fp8", storage="scaled", bits=8, scale_bytes=4),
    "FP8_PB_WO": Scheme(dtype="fp8_block", storage="scaled", bits=8, block=(128, 128), scale_bytes=4),
    "NVFP4": Scheme(dtype="nvfp4", storage="nvfp4", bits=4, group_size=16, scale_bytes=1),
    "W4A16_NVFP4": Scheme(dtype="nvfp4", storage="nvfp4", bits=4, group_size=16, scale_bytes=1),
    "MXFP8": Scheme(dtype="fp8", storage="mxfp8", bits=8, group_size=32, scale_bytes=1),
    "NVFP4_AWQ": Scheme(dtype="nvfp4", storage=None, bits=4, group_size=16, scale_bytes=1),
    "W4A16_AWQ": Scheme(dtype="int4", storage=None, bits=4, group_size=128),
    "W4A8_AWQ": Scheme(dtype="int4", storage=None, bits=4, group_size=128),
    "INT8_SQ": Scheme(dtype="int8", storage=None, bits=8, scale_bytes=4),
    "W8A8_SQ_PER_CHANNEL": Scheme(dtype="int8", storage=None, bits=8, scale_bytes=4),
}
"""By `quant_algo`. Those that scale a layer's inputs as well (AWQ, SmoothQuant) are not widened."""


def _modelopt(config: _Config) -> Read:
    inside = config.values.get("quantization")
    values = inside if isinstance(inside, dict) else config.values
    within = _Config(values, config.keys)
    kept = within.patterns("exclude_modules", "ignore")
    cache = values.get("kv_cache_quant_algo") or values.get("kv_cache_scheme")
    algorithm = str(values.get("quant_algo", "")).upper()
    if algorithm == "MIXED_PRECISION":
        layers = values.get("quantized_layers")
        if not isinstance(layers, dict) or not layers or not all(isinstance(each, dict) for each in layers.values()):
            raise config.error("of a mixed precision that names its layers (quantized_layers)", layers)
        _Config({"quantized_layers": list(layers)}, config.keys).patterns("quantized_layers")
        named: dict[str, list[str]] = {}
        for module, each in layers.items():
            named.setdefault(str(each.get("quant_algo", "")).upper(), []).append(module)
        schemes = tuple(_of_algorithm(config, each, tuple(modules)) for each, modules in named.items())
    else:
        schemes = (_of_algorithm(config, algorithm, ()),)
    return Read(schemes, kept or ("lm_head",), kv_dtype="fp8" if cache else None)


def _of_algorithm(config: _Config, name: str, targets: tuple[str, ...]) -> Scheme:
    if name not in MODELOPT:
        raise config.error(f"of an algorithm that is known ({', '.join(MODELOPT)})", name)
    return msgspec.structs.replace(MODELOPT[name], targets=targets)


COMPRESSED: Mapping[Any, tuple[str, Storage]] = {
    **{("pack-quantized", "int", bits): (f"int{bits}", "packed") for bits in (4, 8)},
    ("nvfp4-pack-quantized", "float", 4): ("nvfp4", "nvfp4_inverse"),
    ("mxfp4-pack-quantized", "float", 4): ("mxfp4", "mxfp4"),
    ("mxfp8-quantized", "float", 8): ("fp8", "mxfp8"),
    **{(each, "float", 8): ("fp8", "scaled") for each in ("float-quantized", "naive-quantized")},
    **{(each, "int", 8): ("int8", "scaled") for each in ("int-quantized", "naive-quantized")},
}
"""(format, type, bits) of compressed-tensors: what a plan calls it, and how it is stored."""
PLANNED = {"float8": "fp8", "float4": "nvfp4", "int8": "int8", "int4": "int4"}
"""Formats, not widened, by the one that they are planned as."""


def _compressed(config: _Config) -> Read:
    groups = config.values.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    schemes = [_group(config, each) for each in listed if isinstance(each, dict) and each.get("weights")]
    if not schemes:
        raise config.error("compressed-tensors with groups of weights (config_groups)", groups)
    cache = config.values.get("kv_cache_scheme")
    sparse = config.values.get("sparsity_config")
    is_sparse = isinstance(sparse, dict) and sparse.get("format", "dense") != "dense"
    transformed = config.values.get("transform_config")
    reason = "weights that are sparse as well" if is_sparse else "rotated weights" if transformed else None
    return Read(tuple(schemes), config.patterns("ignore"), kv_dtype="fp8" if cache else None, reason=reason)


def _group(config: _Config, group: Mapping[str, Any]) -> Scheme:
    weights = group["weights"]
    if not isinstance(weights, dict):
        raise config.error("compressed-tensors with groups of weights (config_groups)", weights)
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("strategy")
    written = group.get("format") or config.values.get("format")
    if f"{kind}{bits}" not in PLANNED:
        raise config.error("compressed-tensors with weights of 4 or 8 bits", f"{kind}{bits}")
    dtype, storage = COMPRESSED.get((str(written), kind, bits), (PLANNED[f"{kind}{bits}"], None))
    block = weights.get("block_structure") if strategy == "block" else None
    if isinstance(block, str):
        block = [int(each) if each.isdigit() else each for each in block.split("x")]
    is_asymmetric = weights.get("symmetric") is False
    inside = _Config(weights, config.keys)
    return Scheme(
        dtype="fp8_block" if block else dtype, storage=storage, bits=bits,
        group_size=inside.whole("group_size"), targets=_Config(group, config.keys).patterns("targets"),
        block=config.block(block, "block_structure") if block else None,
        scale_bytes=1.0 if storage in ("nvfp4_inverse", "mxfp4", "mxfp8") else 2.0,
        zero_bits=bits if is_asymmetric else 0, is_per_tensor=strategy == "tensor",
    )  # fmt: skip


READERS: Mapping[str, Callable[[_Config], Read]] = {
    "fp8": _fp8, "fbgemm_fp8": _fbgemm, "mxfp4": _mxfp4, "gptq": _gptq, "awq": _awq, "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt, "modelopt_fp4": _modelopt, "compressed-tensors": _compressed,
}  # fmt: skip
"""By `quant_method`."""
