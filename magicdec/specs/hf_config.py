"""A ModelSpec from a published Hugging Face `config.json`, and the formats of its weights.

The formats come from `quantization_config`, which each library writes in its own way:
compressed-tensors, GPTQ, AWQ, ModelOpt, FBGEMM, bitsandbytes, and Hugging Face for fp8 and mxfp4.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import read_json
from magicdec.redaction import quoted
from magicdec.specs.families import WRAPPERS, architecture, is_known
from magicdec.specs.families.keys import MAX_LAYERS, Keys, fields_of, is_whole
from magicdec.specs.families.rope import reach
from magicdec.specs.families.usual import usual
from magicdec.specs.layers import FeedForward, Layer, MixtureOfExperts
from magicdec.specs.model import ModelSpec, TensorNames
from magicdec.specs.quantization import (
    REGEX,
    WIDE_BYTES,
    PartFormat,
    Quantization,
    Scheme,
    Storage,
    scheme_of,
)

MODALITIES = (
    "vision",
    "image",
    "video",
    "audio",
    "boi",
    "eoi",
    "boa",
    "eoa",
    "mm_",
    "multimodal",
    "projector",
    "projection",
    "spatial",
    "use_unified_vision",
    "language_model_only",
    "media",
)
"""Prefixes of keys that describe the parts before the decoder."""
MODELOPT_FILE = "hf_quant_config.json"
"""ModelOpt's description of a quantised checkpoint, if it is not in config.json."""
BESIDE = ("tie_word_embeddings", "quantization_config", "eos_token_id")
"""Keys that a model of several modalities may give outside its decoder's configuration."""


def model_from_hf_config(config: dict[str, Any], *, name: str, where: str) -> ModelSpec:
    """The spec that a Hugging Face configuration describes. `where` names the file in errors.
    Raises ConfigError for an architecture that is not known, for a missing or unusable key, and for
    a key that may matter and is not understood."""
    values = _decoder(config, where)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(
            f"{where}: key 'model_type' must be a string, not {model_type!r}"
        )
    if values is config and model_type == "mistral" and "layer_types" in config:
        model_type = "ministral"  # as transformers' AutoConfig takes it
    assumed = None
    if not is_known(model_type):
        taken = usual(values)
        if taken is not None:
            model_type, values, assumed = taken
    row = architecture(model_type, where)
    keys = Keys(values, where, fields_of(model_type))
    for key, allowed in row.fixed.items():
        keys.require(key, *allowed)
    keys.ignore(*row.ignored.split(), "max_position_embeddings", "vision_config")
    count = keys.optional_size("num_hidden_layers") or 0
    if count > MAX_LAYERS:
        raise keys.error("num_hidden_layers", f"at most {MAX_LAYERS}", count)
    layers = tuple(row.layers(keys))
    details = row.details(keys)
    details.setdefault("max_position_embeddings", _longest_context(keys, layers))
    if row.mtp_key is not None:
        heads = keys.optional_size(row.mtp_key, least=0) or 0
        details["mtp_layers"] = (layers[-1],) * heads
    hidden = keys.size("hidden_size")
    vocabulary = keys.size("vocab_size")
    spec = ModelSpec(
        name=name,
        architecture=model_type,
        hidden_size=hidden,
        vocab_size=vocabulary,
        layers=layers,
        norm=msgspec.structs.replace(row.norm, eps=keys.number(row.eps_key, most=1.0)),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        quantization=read_quantization(
            keys,
            layers=layers,
            hidden_size=hidden,
            vocab_size=vocabulary,
            names=row.names,
        ),
        names=row.names,
        eos_token_ids=_token_ids(values.get("eos_token_id"), where),
        assumed=assumed,
        **details,
    )
    unread = keys.unread()
    if unread and assumed is None:
        raise ConfigError(
            f"{where}: key '{unread[0]}' is not known for {model_type}, and may change what the "
            "model computes; remove it if it does not"
        )
    return spec


def _longest_context(keys: Keys, layers: Sequence[Layer]) -> int:
    """The longest context that any layer's position embeddings reach."""
    positions = keys.size("max_position_embeddings")
    longest = 0
    for layer in layers:
        rope = None
        if layer.mixer is not None:
            rope = layer.mixer.rotary
        longest = max(longest, reach(rope, positions))
    return longest


def _decoder(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The decoder's own configuration: `text_config`, with the keys next to it, in a model of
    several modalities.
    """
    model_type = config.get("model_type")
    inside = config.get("text_config")
    is_new = isinstance(model_type, str) and not (
        model_type in WRAPPERS or is_known(model_type)
    )
    if is_new and isinstance(inside, dict):
        return {"model_type": model_type, **_beside(config), **inside}
    if not isinstance(model_type, str) or model_type not in WRAPPERS or inside is None:
        return config
    if not isinstance(inside, dict):
        raise ConfigError(
            f"{where}: key 'text_config' must be an object, not {inside!r}"
        )
    beside = Keys(config, where)
    beside.ignore(
        "text_config",
        "vocab_size",
        "hidden_size",
        "ignore_index",
        "tie_word_embeddings",
        *BESIDE,
    )
    unread = []
    for key in beside.unread():
        if not key.startswith(MODALITIES) and not key.endswith("token_id"):
            unread.append(key)
    if unread:
        raise ConfigError(f"{where}: key '{unread[0]}' is not known for {model_type}")
    return {"model_type": WRAPPERS[model_type], **_beside(config), **inside}


def _beside(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a model of several modalities gives outside its decoder's configuration, where it does."""
    return {key: config[key] for key in BESIDE if config.get(key) is not None}


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    """The tokens of `eos_token_id`, which may be absent, a number, or a list."""
    if isinstance(value, list):
        token_ids = value
    elif value is None:
        token_ids = []
    else:
        token_ids = [value]
    for token_id in token_ids:
        if not is_whole(token_id) or not 0 <= token_id < 2**31:
            raise ConfigError(
                f"{where}: key 'eos_token_id' must be a token's number, or a list of them, "
                f"not {value!r}"
            )
    return tuple(token_ids)


def load_hf_config(path: Path, *, name: str | None = None) -> ModelSpec:
    """Reads a `config.json`, or the one in a checkpoint directory together with ModelOpt's file.
    Raises ConfigError when there is no file, or it is not a JSON object."""
    if path.is_dir():
        file = path / "config.json"
    else:
        file = path
    config = _json_object(file)
    formats_file = path / MODELOPT_FILE
    inside = config.get("text_config")
    has_formats = KEY in config or (isinstance(inside, dict) and KEY in inside)
    if formats_file.is_file() and not has_formats:
        formats = {"quant_method": "modelopt", **_json_object(formats_file)}
        config = {**config, KEY: formats}
    if name is None:
        name = file.stem
        if (
            file.name == "config.json"
        ):  # a link keeps the user's name, so it is not resolved
            name = Path(os.path.abspath(file)).parent.name
        name = quoted(name)
    return model_from_hf_config(config, name=name, where=str(file))


def _json_object(file: Path) -> dict[str, Any]:
    config = read_json(file, decode=json.loads)  # transformers writes infinities
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file} must hold a JSON object, not a {type(config).__name__}"
        )
    return config


# The formats of published weights

KEY = "quantization_config"
WIDE = PartFormat(dtype="bf16", num_bytes=WIDE_BYTES)
MODULES: Mapping[str, str] = {
    "qkv": "self_attn.q_proj",
    "q_a": "self_attn.q_a_proj",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "absorb_k": "self_attn.kv_b_proj",
    "absorb_v": "self_attn.kv_b_proj",
    "index_q": "self_attn.indexer.wq_b",
    "index_k": "self_attn.indexer.wk",
    "linear_in": "linear_attn.in_proj_qkvz",
}
"""The module that holds a projection's weights. A fused or divided projection has one module here.
"""


class Read(NamedTuple):
    """The formats that a configuration describes, whatever the model."""

    schemes: tuple[Scheme, ...]
    kept: tuple[str, ...] = ("lm_head",)
    """Patterns of modules that are left in 16 bits."""
    kv_dtype: str | None = None
    reason: str | None = None
    """Why the runtime cannot widen the weights, as text."""
    experts_only: bool = False


def read_quantization(
    keys: Keys,
    *,
    layers: Sequence[Layer],
    hidden_size: int,
    vocab_size: int,
    names: TensorNames,
) -> Quantization | None:
    """Formats of a model's parts. None: weights in 16 or 32 bits. Raises ConfigError for an unknown
    method or format."""
    value = keys.raw(KEY, "compression_config", default=None)
    if value is None:
        return None
    method = _quantization_method(keys, value)
    read = READERS[method](_Config(value, keys))
    sizes, num_bytes = _sizes(read, _matrices(layers, hidden_size, vocab_size, names))
    parts = {part: _format(sizes[part], num_bytes[part]) for part in sizes}
    inside = sizes["mixer"] + sizes["mlp"] + sizes["experts"]
    counts = {scheme: count for scheme, count in inside.items() if scheme is not None}
    most_weights = read.schemes[0]
    if counts:
        most_weights = max(counts, key=counts.__getitem__)
    return Quantization(
        method=method,
        weight_dtype=most_weights.dtype,
        schemes=read.schemes,
        kept=read.kept,
        kv_dtype=read.kv_dtype,
        reason=_why_not_widened(read, method),
        **parts,
    )


def _quantization_method(keys: Keys, value: Any) -> str:
    """The library that wrote a quantization_config."""
    if not isinstance(value, dict):
        raise keys.error(KEY, "an object", value)
    method = value.get("quant_method")
    if not method and ("quant_algo" in value or "quantization" in value):
        method = "modelopt"
    if not isinstance(method, str) or not method:
        raise keys.error(KEY, "an object with a 'quant_method'", value)
    if method not in READERS:
        raise unknown_choice(f"quant_method in {keys.where}", method, READERS)
    return method


def _why_not_widened(read: Read, method: str) -> str | None:
    """Why the runtime cannot widen these weights, as text. None: it can."""
    if read.reason:
        return read.reason
    for scheme in read.schemes:
        if not scheme.storage:
            return f"weights in {scheme.dtype} ({method})"
    return None


def _sizes(
    read: Read, matrices: Iterable[tuple[str, str, tuple[int, int, int]]]
) -> tuple[dict[str, Counter[Scheme | None]], dict[str, float]]:
    """Weights by part and scheme, and bytes by part."""
    sizes: dict[str, Counter[Scheme | None]] = {
        part: Counter() for part in ("mixer", "mlp", "experts", "head")
    }
    num_bytes = dict.fromkeys(sizes, 0.0)
    for part, module, (copies, outputs, inputs) in matrices:
        scheme = None
        if part == "experts" or not read.experts_only:
            scheme = scheme_of(module, read.schemes, read.kept)
        count = copies * outputs * inputs
        sizes[part][scheme] += count
        if scheme is None:
            num_bytes[part] += count * WIDE_BYTES
        else:
            num_bytes[part] += copies * scheme.num_bytes(outputs, inputs)
    return sizes, num_bytes


def _format(sizes: Counter[Scheme | None], num_bytes: float) -> PartFormat:
    if not sizes:
        return WIDE
    most = sizes.most_common(1)[0][0]
    if most is None:
        dtype = "bf16"
    else:
        dtype = most.dtype
    return PartFormat(dtype=dtype, num_bytes=num_bytes / sizes.total())


def _matrices(
    layers: Sequence[Layer],
    hidden_size: int,
    vocab_size: int,
    names: TensorNames,
) -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """(part, module, (how many, outputs, inputs)) of every matrix that may be published in fewer
    bits.
    """
    yield "head", "lm_head", (1, vocab_size, hidden_size)
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}"
        if layer.mixer is not None:
            for projection in layer.mixer.projections(hidden_size):
                module = MODULES.get(projection.name, "self_attn.o_proj")
                if projection.name == "qkv" and names.fused_qkv:
                    module = "self_attn.qkv_proj"
                yield "mixer", f"{prefix}.{module}", (1, *projection.shape)
        if layer.mlp is not None:
            yield from _feed_forward_matrices(
                layer.mlp,
                hidden_size,
                f"{prefix}.{names.mlp}",
                names,
            )


def _feed_forward_matrices(
    mlp: FeedForward,
    hidden_size: int,
    prefix: str,
    names: TensorNames,
) -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """(part, module, shape) of a feed-forward's matrices, as `_matrices` lists them."""
    for projection in mlp.projections(hidden_size):
        if projection.name in ("router", "shared_gate"):
            continue
        module = prefix
        if projection.name.startswith("shared_") and not names.experts_beside:
            module = f"{prefix}.{names.shared}"
        last = "gate_proj"
        if projection.name.endswith("down"):
            last = "down_proj"
        yield "mlp", f"{module}.{last}", (1, *projection.shape)
    if not isinstance(mlp, MixtureOfExperts):
        return
    if names.experts_beside:
        prefix = prefix.rpartition(".")[0]
    for projection in mlp.expert.projections(mlp.inner_size(hidden_size)):
        last = names.expert
        if projection.name == "down":
            last = {"gate_proj": "down_proj", "w1": "w2"}[names.expert]
        yield (
            "experts",
            f"{prefix}.experts.0.{last}",
            (mlp.num_experts, *projection.shape),
        )


class _Config:
    """A quantization_config; errors name its file."""

    def __init__(self, values: Mapping[str, Any], keys: Keys) -> None:
        self.values, self.keys = values, keys

    def error(self, expected: str, value: object) -> ConfigError:
        return self.keys.error(KEY, expected, value)

    def whole(self, *names: str, default: int | None = None) -> int | None:
        """The first of these settings that the file has, a positive number. None for -1 and
        null."""
        key = names[0]
        for name in names:
            if name in self.values:
                key = name
                break
        value = self.values.get(key, default)
        if value in (None, -1):
            return None
        if not is_whole(value) or value < 1:
            raise self.error(f"with a positive whole number as '{key}'", value)
        return value

    def patterns(self, *names: str) -> tuple[str, ...]:
        """The strings of the first of these lists that the file has."""
        value: Any = []
        for name in names:
            if self.values.get(name) is not None:
                value = self.values[name]
                break
        if not isinstance(value, list) or not all(
            isinstance(pattern, str) for pattern in value
        ):
            raise self.error(f"with a list of modules as '{names[0]}'", value)
        for pattern in value:
            if not pattern.startswith(REGEX):
                continue
            try:
                re.compile(pattern.removeprefix(REGEX))
            except re.error as error:
                expected = f"with valid regular expressions ({error})"
                raise self.error(expected, pattern) from error
        return tuple(value)

    def block(self, value: Any, key: str) -> tuple[int, int]:
        """A block's rows and columns. `key` is the setting that holds them, for errors."""
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or not all(is_whole(size) and size > 0 for size in value):
            raise self.error(f"of blocks of rows and columns ({key})", value)
        return value[0], value[1]


def _fp8(config: _Config) -> Read:
    kept = (
        "lm_head",
        *config.patterns("modules_to_not_convert", "ignored_layers", "ignore"),
    )
    block = config.values.get("weight_block_size")
    if not block:
        return Read(
            (
                Scheme(
                    dtype="fp8",
                    storage="scaled",
                    bits=8,
                    scale_bytes=4,
                    is_per_tensor=True,
                ),
            ),
            kept,
        )
    size = config.block(block, "weight_block_size")
    return Read(
        (
            Scheme(
                dtype="fp8_block", storage="scaled", bits=8, block=size, scale_bytes=4
            ),
        ),
        kept,
    )


def _fbgemm(config: _Config) -> Read:
    kept = ("lm_head", *config.patterns("modules_to_not_convert"))
    return Read((Scheme(dtype="fp8", storage="scaled", bits=8, scale_bytes=4),), kept)


def _mxfp4(config: _Config) -> Read:
    """gpt-oss: the routed experts alone."""
    scheme = Scheme(
        dtype="mxfp4", storage="stacked_mxfp4", bits=4, group_size=32, scale_bytes=1
    )
    return Read((scheme,), config.patterns("modules_to_not_convert"), experts_only=True)


def _gptq(config: _Config) -> Read:
    bits = _bits(config, "bits")
    values = config.values
    written = values.get("checkpoint_format") or "gptq"
    reason = None
    if written not in ("gptq", "gptq_v2"):
        reason = f"weights that GPTQ wrote for the kernels of {written}"
    elif values.get("dynamic"):
        reason = "GPTQ weights with settings by module (dynamic)"
    storage: Storage = "gptq"
    if written == "gptq_v2":
        storage = "gptq_v2"
    scheme = Scheme(
        dtype=f"int{bits}",
        storage=storage,
        bits=bits,
        zero_bits=bits,
        group_size=config.whole("group_size", default=None),
    )
    wide_modules: tuple[str, ...] = ("lm_head",)
    if values.get("lm_head"):
        wide_modules = ()
    return Read((scheme,), wide_modules, reason=reason)


def _awq(config: _Config) -> Read:
    bits = _bits(config, "bits", "w_bit")
    version = str(config.values.get("version") or "gemm").lower()
    scheme = Scheme(
        dtype=f"int{bits}",
        storage="awq",
        bits=bits,
        zero_bits=bits,
        group_size=config.whole("group_size", "q_group_size", default=128),
    )
    kept = ("lm_head", *config.patterns("modules_to_not_convert"))
    reason = None
    if version != "gemm" or bits != 4:
        reason = f"AWQ weights of {bits} bits packed as {version}"
    return Read((scheme,), kept, reason=reason)


def _auto_round(config: _Config) -> Read:
    """AutoRound's, which lists the layers that it leaves in 16 bits in `extra_config`."""
    bits = _bits(config, "bits")
    kept = ["lm_head"]
    extra = config.values.get("extra_config")
    if isinstance(extra, dict):
        for module, settings in extra.items():
            if isinstance(settings, dict) and settings.get("bits") in (16, 32):
                kept.append(module)
    scheme = Scheme(
        dtype=f"int{bits}",
        storage=None,
        bits=bits,
        zero_bits=bits,
        group_size=config.whole("group_size", default=128),
    )
    return Read((scheme,), tuple(kept))


def _bits(config: _Config, *names: str) -> int:
    bits = config.whole(*names, default=4)
    if bits not in (4, 8):
        raise config.error("of weights of 4 or 8 bits", bits)
    return bits


def _bitsandbytes(config: _Config) -> Read:
    kept = ("lm_head", *config.patterns("llm_int8_skip_modules"))
    if config.values.get("load_in_8bit"):
        return Read((Scheme(dtype="int8", storage=None, bits=8, scale_bytes=4),), kept)
    # An fp32 scale per 64 weights; quantised again, 8 bits and an fp32 one per 256 of them (QLoRA,
    # arXiv 2305.14314).
    if config.values.get("bnb_4bit_use_double_quant"):
        scale_bytes = 1 + 4 / 256
    else:
        scale_bytes = 4.0
    return Read(
        (
            Scheme(
                dtype="int4",
                storage=None,
                bits=4,
                group_size=64,
                scale_bytes=scale_bytes,
            ),
        ),
        kept,
    )


MODELOPT: Mapping[str, Scheme] = {
    "FP8": Scheme(
        dtype="fp8", storage="scaled", bits=8, scale_bytes=4, is_per_tensor=True
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(
        dtype="fp8", storage="scaled", bits=8, scale_bytes=4
    ),
    "FP8_PB_WO": Scheme(
        dtype="fp8_block",
        storage="scaled",
        bits=8,
        block=(128, 128),
        scale_bytes=4,
    ),
    "NVFP4": Scheme(
        dtype="nvfp4", storage="nvfp4", bits=4, group_size=16, scale_bytes=1
    ),
    "W4A16_NVFP4": Scheme(
        dtype="nvfp4", storage="nvfp4", bits=4, group_size=16, scale_bytes=1
    ),
    "MXFP8": Scheme(dtype="fp8", storage="mxfp8", bits=8, group_size=32, scale_bytes=1),
    "NVFP4_AWQ": Scheme(
        dtype="nvfp4", storage=None, bits=4, group_size=16, scale_bytes=1
    ),
    "W4A16_AWQ": Scheme(dtype="int4", storage=None, bits=4, group_size=128),
    "W4A8_AWQ": Scheme(dtype="int4", storage=None, bits=4, group_size=128),
    "INT8_SQ": Scheme(dtype="int8", storage=None, bits=8, scale_bytes=4),
    "W8A8_SQ_PER_CHANNEL": Scheme(dtype="int8", storage=None, bits=8, scale_bytes=4),
}
"""Formats by `quant_algo`. Formats that also scale a layer's inputs (AWQ, SmoothQuant) are not
widened."""


def _modelopt(config: _Config) -> Read:
    values = config.values
    inside = config.values.get("quantization")
    if isinstance(inside, dict):
        values = inside
    within = _Config(values, config.keys)
    kept = within.patterns("exclude_modules", "ignore")
    cache = values.get("kv_cache_quant_algo") or values.get("kv_cache_scheme")
    algorithm = str(values.get("quant_algo", "")).upper()
    if algorithm == "MIXED_PRECISION":
        schemes = _mixed_schemes(config, values.get("quantized_layers"))
    else:
        schemes = (_of_algorithm(config, algorithm, ()),)
    kv_dtype = None
    if cache:
        kv_dtype = "fp8"
    return Read(schemes, kept or ("lm_head",), kv_dtype=kv_dtype)


def _mixed_schemes(config: _Config, layers: Any) -> tuple[Scheme, ...]:
    """The schemes of ModelOpt's `quantized_layers`, which gives each module its algorithm."""
    expected = "of a mixed precision that names its layers (quantized_layers)"
    if not isinstance(layers, dict) or not layers:
        raise config.error(expected, layers)
    if not all(isinstance(settings, dict) for settings in layers.values()):
        raise config.error(expected, layers)
    _Config({"quantized_layers": list(layers)}, config.keys).patterns(
        "quantized_layers"
    )
    modules_of: dict[str, list[str]] = {}
    for module, settings in layers.items():
        algorithm = str(settings.get("quant_algo", "")).upper()
        modules_of.setdefault(algorithm, []).append(module)
    return tuple(
        _of_algorithm(config, algorithm, tuple(modules))
        for algorithm, modules in modules_of.items()
    )


def _of_algorithm(config: _Config, name: str, targets: tuple[str, ...]) -> Scheme:
    if name not in MODELOPT:
        raise config.error(
            f"of an algorithm that is known ({', '.join(MODELOPT)})", name
        )
    return msgspec.structs.replace(MODELOPT[name], targets=targets)


COMPRESSED: Mapping[Any, tuple[str, Storage]] = {
    **{("pack-quantized", "int", bits): (f"int{bits}", "packed") for bits in (4, 8)},
    ("nvfp4-pack-quantized", "float", 4): ("nvfp4", "nvfp4_inverse"),
    ("mxfp4-pack-quantized", "float", 4): ("mxfp4", "mxfp4"),
    ("mxfp8-quantized", "float", 8): ("fp8", "mxfp8"),
    **{
        (each, "float", 8): ("fp8", "scaled")
        for each in ("float-quantized", "naive-quantized")
    },
    **{
        (each, "int", 8): ("int8", "scaled")
        for each in ("int-quantized", "naive-quantized")
    },
}
"""Formats of compressed-tensors by (format, type, bits): the plan's name, and the storage."""
PLANNED = {"float8": "fp8", "float4": "nvfp4", "int8": "int8", "int4": "int4"}
"""The format that prices each of these, which are not widened."""


def _compressed(config: _Config) -> Read:
    groups = config.values.get("config_groups")
    listed: Iterable[Any] = ()
    if isinstance(groups, dict):
        listed = groups.values()
    schemes = []
    for group in listed:
        if isinstance(group, dict) and group.get("weights"):
            schemes.append(_group(config, group))
    if not schemes:
        raise config.error(
            "compressed-tensors with groups of weights (config_groups)", groups
        )
    cache = config.values.get("kv_cache_scheme")
    sparse = config.values.get("sparsity_config")
    is_sparse = isinstance(sparse, dict) and sparse.get("format", "dense") != "dense"
    transformed = config.values.get("transform_config")
    if is_sparse:
        reason = "weights that are sparse as well"
    elif transformed:
        reason = "rotated weights"
    else:
        reason = None
    kv_dtype = None
    if cache:
        kv_dtype = "fp8"
    return Read(
        tuple(schemes), config.patterns("ignore"), kv_dtype=kv_dtype, reason=reason
    )


def _group(config: _Config, group: Mapping[str, Any]) -> Scheme:
    weights = group["weights"]
    if not isinstance(weights, dict):
        raise config.error(
            "compressed-tensors with groups of weights (config_groups)", weights
        )
    kind = weights.get("type", "int")
    bits = weights.get("num_bits", 8)
    strategy = weights.get("strategy")
    written = group.get("format") or config.values.get("format")
    if f"{kind}{bits}" not in PLANNED:
        raise config.error(
            "compressed-tensors with weights of 4 or 8 bits", f"{kind}{bits}"
        )
    dtype, storage = COMPRESSED.get(
        (str(written), kind, bits), (PLANNED[f"{kind}{bits}"], None)
    )
    block = None
    if strategy == "block":
        block = weights.get("block_structure")
    if isinstance(block, str):
        block = [int(size) if size.isdigit() else size for size in block.split("x")]
    is_asymmetric = weights.get("symmetric") is False
    inside = _Config(weights, config.keys)
    zero_bits = 0
    if is_asymmetric:
        zero_bits = bits
    scale_bytes = 2.0
    if storage in ("nvfp4_inverse", "mxfp4", "mxfp8"):
        scale_bytes = 1.0
    size = None
    if block:
        size = config.block(block, "block_structure")
        dtype = "fp8_block"
    return Scheme(
        dtype=dtype,
        storage=storage,
        bits=bits,
        group_size=inside.whole("group_size"),
        targets=_Config(group, config.keys).patterns("targets"),
        block=size,
        scale_bytes=scale_bytes,
        zero_bits=zero_bits,
        is_per_tensor=strategy == "tensor",
    )


READERS: Mapping[str, Callable[[_Config], Read]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed,
}
"""By `quant_method`."""
