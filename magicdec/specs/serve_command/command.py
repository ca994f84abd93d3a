"""A server as its command describes it: the fields that bear on speed, of its options' words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.specs.attention_kernels import backend_name
from magicdec.specs.engine import version_number
from magicdec.specs.serve_command.llama_cpp import llama_cpp_server
from magicdec.specs.serve_command.manifest import load
from magicdec.specs.serve_command.options import (
    LLAMA_CPP,
    OPTIONS,
    names_of,
    scalar,
)
from magicdec.specs.serve_command.server import ServeCommand, Speculation
from magicdec.specs.serve_command.speculation import TABLE_KEY, stated_speculation
from magicdec.specs.serve_command.start import (
    SHOWN,
    STARTS,
    Given,
    Start,
    json_of,
    model_of,
    text_of,
    words_of,
)
from magicdec.specs.serve_command.stated import StatedOptions
from magicdec.units import GIB

MODES = {
    "none": "none",
    "piecewise": "piecewise",
    "full": "whole",
    "full_decode_only": "whole",
    "full_and_piecewise": "whole",
}
"""vLLM's cudagraph_mode."""
MOST_TEMPERATURE = 100
BACKEND_VARIABLE_UNTIL = (0, 15)
"""vLLM's first version without VLLM_ATTENTION_BACKEND (vllm/envs.py)."""
BLOCK_TOKENS = 16
"""Tokens of a block of vLLM's cache on CUDA, where --block-size is not given."""
UNPADDED_BATCHES = (*range(1, 32), 32, 64, 128)
"""TensorRT-LLM's captured batches without padding (cuda_graph_config in its llm_args.py)."""
RAY_RUNS_AHEAD_SINCE = (0, 24)
"""vLLM's first version whose ray executor is known to schedule ahead by default
(VLLM_USE_RAY_V2_EXECUTOR_BACKEND in vllm/envs.py of 0.20 and 0.24)."""
AUTO_BANDS = [[1, 4, 5], [5, 32, 3], [33, 1_000_000, 0]]
"""TensorRT-LLM's AUTO: n-grams, by the number of requests (its tech blog 7)."""


def command_of(start: Start, given: Given) -> ServeCommand:
    """The fields of a started server. Raises ConfigError for values that cannot be read."""
    said = StatedOptions(start, given)
    said.add_environment(start.environment)
    said.add(start.words)
    if start.engine == LLAMA_CPP:
        return llama_cpp_server(said)
    unread = None
    if "file" in said.meanings:
        unread = _add_file(said)
    said.check_resolved()
    meanings = said.meanings
    if not meanings.get("model"):
        raise ConfigError(f"the command names no model; {STARTS} take one")
    _merge_nested(said)
    replicas = said.count("dp") or 1
    if meanings.get("shared_dp") == "true":
        replicas = 1  # SGLang's attention in data parallel shares the devices of tp
    tp_size = said.count("tp") or 1
    attention_dp_size = _attention_groups(said, tp_size)
    if "context_ranks" in meanings:
        given.notes.append(
            f"{said.names['context_ranks']} divides the cache; its reads are priced undivided, what its "
            "ranks exchange is not"
        )
    if attention_dp_size > 1:
        replicas = 1 if meanings.get("shared_dp") == "true" else replicas
    chunk_tokens = None
    if not meanings.get("chunk", "").startswith("-"):  # SGLang's -1: all at once
        chunk_tokens = said.count("chunk")
    if chunk_tokens is not None and attention_dp_size > 1 and start.engine == "sglang":
        # divided among the groups (sglang/srt/arg_groups/parallel_hook.py of 0.5.23)
        chunk_tokens = max(chunk_tokens // attention_dp_size, 1)
    max_model_len = None
    if meanings.get("length", "") not in ("-1", "auto"):
        max_model_len = said.count("length")
    runner = ""
    if "v2_runner" in meanings:
        runner = "V2" if said.truth("v2_runner") else "V1"
    target_backend, draft_backend = _attention_backends(said)
    memory_fraction = None
    if re.fullmatch(r"0?\.\d{1,6}|1\.0*", meanings.get("memory", "")):
        memory_fraction = float(meanings["memory"])
    return ServeCommand(
        engine=start.engine,
        version=start.version,
        model=model_of(meanings["model"]),
        tp_size=tp_size,
        pp_size=said.count("pp") or 1,
        dp_size=replicas,
        ep_size=said.count("ep"),
        max_num_seqs=said.count("batch"),
        max_model_len=max_model_len,
        weight_dtype=meanings.get("weights"),
        kv_dtype=meanings.get("kv_dtype"),
        speculation=_as_set(said, stated_speculation(said)),
        captured_tokens=_captured(meanings),
        graphs=_graphs(meanings),
        is_asynchronous=_is_asynchronous(said),
        has_prefix_cache=said.truth("prefixes"),
        chunk_tokens=chunk_tokens,
        prompt_part_tokens=_prompt_part(said),
        runner=runner,
        has_microbatches=said.truth("microbatches") is True,
        attention_backend=target_backend,
        draft_attention_backend=draft_backend,
        captures_prompts=said.truth("captured_prompts"),
        has_custom_all_reduce=said.truth("custom_all_reduce") is not False,
        reaches_peers=said.truth("peers") is not False,
        frees_windows=said.truth("window_cache") is not False,
        overlaps_drafting=said.truth("overlapped_drafting"),
        attention_dp_size=attention_dp_size,
        context_ranks=min(said.count("context_ranks") or 1, tp_size),
        prompt_ranks=said.count("prompt_ranks") or 1,
        host_weight_bytes=_host_weight_bytes(meanings),
        cache_tokens=_cache_tokens(said),
        cache_bytes=byte_count(meanings.get("cache_bytes", "")),
        state_dtype=meanings.get("state_dtype"),
        temperature=_temperature(said),
        captured_batches=_captured_batches(meanings),
        states_strategy=meanings.get("states_strategy", ""),
        memory_fraction=memory_fraction,
        hardware=start.hardware,
        num_gpus=start.num_gpus,
        read=said.written,
        noted=said.noted,
        without_effect=said.without_effect,
        not_looked_at=said.not_looked_at,
        not_understood=said.unknown,
        problems=said.problems,
        asked=said.asked,
        notes=list(dict.fromkeys(given.notes)),
        unread=unread,
    )


# Files of options


def _add_file(said: StatedOptions) -> str | None:
    """The options of the file that the command names, which its own words replace; the path of one
    that is not at hand."""
    path = said.given.shown(said.meanings["file"])
    text = said.given.file(path)
    if text is None:
        if said.given.folder is None:
            said.asked.append(
                f"the settings in {path[:SHOWN]} are not read here: magicdec check reads them"
            )
        else:
            said.asked.append(
                f"{path[:SHOWN]} is not here, so its settings, speculation too, are not known: give "
                "it beside the command"
            )
        return path
    documents = load(text)
    values = documents[0] if documents else None
    if not isinstance(values, dict):
        raise ConfigError(f"{path[:SHOWN]} must hold options by name")
    if said.start.engine == "trtllm":  # whose file wins
        _add_settings(said, values)
    else:  # the command's own words win
        own = dict(said.meanings)
        said.meanings.pop("model", None)
        said.add(words_of(values))
        said.meanings |= own
    return None


def _add_settings(said: StatedOptions, values: Mapping[Any, Any]) -> None:
    """TensorRT-LLM's options file."""
    names = names_of("trtllm")
    known = names.keys["config"]
    options: dict[str, Any] = {}
    for key, value in values.items():
        name = text_of(key)
        if name not in known:
            said.unknown.append(name[:SHOWN])
            continue
        option = name.replace("_", "-")
        if option in names.keys and isinstance(value, Mapping):
            said.sort_keys(option, name, value)
        if option in OPTIONS["trtllm"]:
            options[name] = value
            if value is None:
                options[name] = "null"
        else:
            said.sort(option, name, text_of(value))
    for name, value in options.items():
        meaning = OPTIONS["trtllm"][name.replace("_", "-")]
        text = json_of(value) if isinstance(value, Mapping) else text_of(value)
        said.written[name] = text
        said.state(meaning, text, name)


def _merge_nested(said: StatedOptions) -> None:
    """TensorRT-LLM's nested settings as the meanings they have elsewhere."""
    if said.start.engine != "trtllm":
        return
    meanings = said.meanings
    cache = _object(meanings.get("cache"))
    if cache.get("dtype"):
        meanings["kv_dtype"] = text_of(cache["dtype"])
    if cache.get("enable_block_reuse") is False:
        meanings["prefixes"] = "false"
    if cache.get("max_tokens"):
        said.state(
            "cache_tokens", text_of(cache["max_tokens"]), "kv_cache_config.max_tokens"
        )
    if cache.get("mamba_ssm_cache_dtype"):
        meanings["state_dtype"] = text_of(cache["mamba_ssm_cache_dtype"])
    if cache.get("free_gpu_memory_fraction"):
        meanings["memory"] = text_of(cache["free_gpu_memory_fraction"])
    graphs = _object(meanings.get("graphs"))
    sizes = graphs.get("batch_sizes")
    if isinstance(sizes, list):
        meanings["captured"] = " ".join(map(text_of, sizes))
    elif graphs.get("max_batch_size"):
        meanings["captured"] = text_of(graphs["max_batch_size"])
    inside = _object(meanings.get("speculation"))
    if "decoding_type" in inside:
        meanings["speculation"] = json.dumps(_as_vllms(inside))


def _as_vllms(inside: Mapping[str, Any]) -> dict[str, Any]:
    """TensorRT-LLM's speculative configuration in the keys of vLLM's."""
    method = text_of(inside["decoding_type"]).lower()
    if method == "eagle":
        method = "eagle_of_trtllm"
    if method == "auto":
        return {"method": "ngram", TABLE_KEY: AUTO_BANDS, "by_batch": True}
    gamma = inside.get("max_draft_len") or inside.get("num_nextn_predict_layers")
    config = {
        "max_concurrency": inside.get("max_concurrency"),
        "method": method,
        "model": inside.get("speculative_model_dir") or inside.get("speculative_model"),
        "num_speculative_tokens": gamma,
    }
    if inside.get("draft_len_schedule"):
        config["by_batch"] = True
    for key in ("use_relaxed_acceptance_for_thinking", "posterior_threshold"):
        config[key] = inside.get(key) or None
    return {key: value for key, value in config.items() if value is not None}


def _object(text: str | None) -> dict[str, Any]:
    value = scalar(text or "{}")
    return value if isinstance(value, dict) else {}


# Fields


def _is_asynchronous(said: StatedOptions) -> bool | None:
    """Whether the next step is scheduled while one runs; None: nothing is said of it."""
    version = version_number(said.start.version or "")
    is_older = bool(version) and version < RAY_RUNS_AHEAD_SINCE
    if said.meanings.get("executor") == "ray" and is_older:
        return False
    return said.truth("asynchronous")


def _attention_groups(said: StatedOptions, tp_size: int) -> int:
    """Groups of the ranks that each attend to sequences of their own."""
    meanings = said.meanings
    if said.start.engine == "trtllm":  # whose option is a flag
        return tp_size if said.truth("attention_dp") else 1
    if meanings.get("shared_dp") == "true" and "attention_dp" not in meanings:
        return said.count("dp") or 1
    return said.count("attention_dp") or 1


def _host_weight_bytes(meanings: Mapping[str, str]) -> float:
    """Bytes of each device's weights in the host's memory: engines' GB are GiB."""
    text = meanings.get("host_weights", "0")
    if re.fullmatch(r"\d{1,5}(?:\.\d{0,9})?", text):
        return float(text) * GIB
    return 0.0


def _cache_tokens(said: StatedOptions) -> int | None:
    """Tokens that the cache holds, where the command says."""
    blocks = said.count("cache_blocks")
    if blocks is not None:
        return blocks * (said.count("block") or BLOCK_TOKENS)
    return said.count("cache_tokens")


def byte_count(text: str) -> float | None:
    """Bytes as vLLM writes them: 1k is 1000, 1K 1024, 25.6k 25600; None: no number."""
    number = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)([kmgtKMGT]?)(?:i?B)?", text)
    if number is None:
        return None
    base = 1000.0 if number[2].islower() else 1024.0
    power = "_kmgt".index(number[2].lower() or "_")
    return float(number[1]) * base**power


def _temperature(said: StatedOptions) -> float | None:
    """The temperature of clients that name none, where the command says; without its checkpoint's own
    configuration engines take 1."""
    given = _object(said.meanings.get("sampling")).get("temperature")
    if isinstance(given, int | float) and not isinstance(given, bool):
        if not 0 <= given <= MOST_TEMPERATURE:
            raise ConfigError(
                f"{said.names['sampling']} has a temperature of {given}, not one between 0 and "
                f"{MOST_TEMPERATURE}"
            )
        return float(given)
    if said.meanings.get("sampling_source") in ("vllm", "openai"):
        return 1.0
    return None


def _captured_batches(meanings: Mapping[str, str]) -> tuple[int, ...]:
    """TensorRT-LLM's batches with graphs where steps between them are not padded."""
    graphs = _object(meanings.get("graphs"))
    if graphs.get("enable_padding") is not False:
        return ()
    sizes = graphs.get("batch_sizes")
    if isinstance(sizes, list):
        return tuple(size for size in sizes if isinstance(size, int))
    most = graphs.get("max_batch_size")
    if not isinstance(most, int):
        return UNPADDED_BATCHES
    return tuple(size for size in UNPADDED_BATCHES if size <= most)


def _as_set(said: StatedOptions, speculation: Speculation | None) -> Speculation | None:
    """The draft with the settings that stand outside its own options, and those of its bytes, its
    requests and its imposed length."""
    if speculation is None:
        return None
    meanings = said.meanings
    config = _object(meanings.get("speculation"))
    weights = meanings.get("draft_weights") or config.get("quantization")
    if (
        said.start.engine == "sglang"
    ):  # its default is the target's (server_args.py of 0.5.10)
        weights = weights or meanings.get("weights")
    if not isinstance(weights, str) or weights == "unquant":
        weights = None
    length = scalar(meanings.get("imposed_length", "0"))
    rates = config.get("synthetic_acceptance_rates")
    if isinstance(rates, list):
        shares = [rate for rate in rates if isinstance(rate, int | float)]
        length = 1.0 + sum(min(share, 1.0) for share in shares)
    length = config.get("synthetic_acceptance_length") or length
    imposed = None
    lossy = speculation.lossy
    if isinstance(length, int | float) and 1.0 <= length < math.inf:
        imposed = float(length)
        if "imposed_length" in meanings:
            lossy = [*lossy, f"SGLANG_SIMULATE_ACC_LEN={length:g}"]
    bands = speculation.bands
    most = config.get("max_concurrency")
    if isinstance(most, int) and most > 0 and speculation.gamma:
        bands = ((1, most, speculation.gamma), (most + 1, 1_000_000, 0))
    return msgspec.structs.replace(
        speculation,
        weight_dtype=weights,
        imposed_length=imposed,
        lossy=lossy,
        bands=bands,
        by_batch=speculation.by_batch or bands != speculation.bands,
    )


def _attention_backends(said: StatedOptions) -> tuple[str, str]:
    """The attention backends of the target and of the draft, as the engine calls them; "": its own
    choice. With a draft the target's is the one that verifies."""
    meanings = said.meanings
    asked = meanings.get("attention_backend", "")
    own = meanings.get("draft_attention_backend", "")
    if said.start.engine == "vllm":
        asked = asked or text_of(
            _object(meanings.get("attention_config")).get("backend", "")
        )
        older = meanings.get("older_attention_backend", "").upper()
        number = version_number(said.start.version or "")
        if older and number and number < BACKEND_VARIABLE_UNTIL:
            asked = asked or older
        elif older:
            said.find("a variable that chose the attention backend", backend=older)
        inside = _object(meanings.get("speculation"))
        own = text_of(inside.get("attention_backend", ""))
        return backend_name(asked), backend_name(own)
    if said.start.engine == "sglang":
        side = "decode_attention_backend"
        if "algorithm" in meanings and meanings.get("verifying_side") != "decode":
            side = "prefill_attention_backend"
        return meanings.get(side, asked).lower(), own.lower()
    return asked.upper(), own


def _prompt_part(said: StatedOptions) -> int | None:
    """The most tokens of one prompt that a step reads; 0 is no bound."""
    if said.meanings.get("prompt_part", "0") == "0":
        return None
    return said.count("prompt_part")


def _graphs(meanings: Mapping[str, str]) -> str | None:
    """How much of a decoding step is one graph."""
    if meanings.get("eager") == "true":
        return "eager"
    if meanings.get("graphed") == "false":
        return "none"
    if meanings.get("graphs") in ("disabled", "null"):  # SGLang's, TensorRT-LLM's
        return "none"
    compilation = _object(meanings.get("compilation"))
    level = meanings.get("level", meanings.get("compilation", ""))
    mode = text_of(compilation.get("cudagraph_mode")).rpartition(".")[2].lower()
    if mode in MODES:
        return MODES[mode]
    if (
        text_of(compilation.get("level", compilation.get("mode"))) == "0"
        or level == "0"
    ):
        return "eager"
    return None


def _captured(said: Mapping[str, str]) -> int | None:
    if "captured" in said:
        sizes = re.findall(r"\b\d{1,9}\b", said["captured"])
        return max(map(int, sizes), default=None)
    values = _object(said.get("compilation"))
    captured = values.get("cudagraph_capture_sizes") or [
        values.get("max_cudagraph_capture_size")
    ]
    if not isinstance(captured, list):
        return None
    whole = [size for size in captured if isinstance(size, int) and size]
    return max(whole, default=None)
