"""Options under the names of vLLM, SGLang and TensorRT-LLM: read as ours, or answered with ours."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from magicdec.errors import ConfigError, either
from magicdec.units import parse_count

OURS: Mapping[str, tuple[str, ...]] = {
    "model-path": ("model",),
    "served-model-name": ("model",),
    "gpu": ("hardware",),
    "gpu-type": ("hardware",),
    "num-gpus": ("gpus",),
    "tensor-parallel-size": ("tp",),
    "tensor-parallel": ("tp",),
    "tp-size": ("tp",),
    "pipeline-parallel-size": ("pp",),
    "pp-size": ("pp",),
    "expert-parallel-size": ("ep",),
    "ep-size": ("ep",),
    "moe-expert-parallel-size": ("ep",),
    "max-num-seqs": ("batch",),
    "max-running-requests": ("batch",),
    "max-batch-size": ("batch",),
    "batch-size": ("batch",),
    "concurrency": ("batch",),
    "max-concurrency": ("batch",),
    "input-len": ("context", "prompt-len"),
    "input-length": ("context", "prompt-len"),
    "isl": ("context", "prompt-len"),
    "random-input-len": ("context", "prompt-len"),
    "prompt-len": ("context",),
    "output-len": ("gen-len",),
    "output-length": ("gen-len", "output-len"),
    "osl": ("gen-len", "output-len"),
    "random-output-len": ("gen-len", "output-len"),
    "max-tokens": ("gen-len", "output-len"),
    "max-new-tokens": ("gen-len", "output-len"),
    "num-speculative-tokens": ("gamma",),
    "speculative-num-steps": ("gamma",),
    "max-draft-len": ("gamma",),
    "speculative-model": ("draft",),
    "speculative-algorithm": ("draft",),
    "quantization": ("weight-dtype",),
    "kv-cache-dtype": ("kv-dtype",),
    "request-rate": ("rate",),
}
"""Engines' options by ours that mean the same; of several the first that a command has."""
ANSWERS: Mapping[str, str] = {
    "max-model-len": "give the prompt as --context and the output as --gen-len",
    "max-seq-len": "give the prompt as --context and the output as --gen-len",
    "context-length": "give the prompt as --context and the output as --gen-len",
    "gpu-memory-utilization": "it is `memory_fraction` of an engine profile (--engine FILE)",
    "mem-fraction-static": "it is `memory_fraction` of an engine profile (--engine FILE)",
    "speculative-config": "magicdec check reads a whole serve command; here --draft and --gamma",
    "data-parallel-size": "give all devices as --gpus, and --tp for each replica",
    "dp-size": "give all devices as --gpus, and --tp for each replica",
    "enable-expert-parallel": "give the ranks that experts are divided over as --ep",
    "enable-prefix-caching": "give the tokens of a prompt that are cached as --cached",
    "dtype": "give the weights as --weight-dtype and the cache as --kv-dtype",
}
"""Engines' options that no single one of ours means."""
RATES_OF_USERS = ("tok-s-user", "tps-per-user", "interactivity")
"""Tokens per second that each user sees: the reciprocal of --tpot-ms."""
RECIPROCALS = tuple(f"--{name}" for name in RATES_OF_USERS)
KILO = 1000.0
COUNT = re.compile(r"\d+[kKmM]")


def as_ours(
    args: list[str], *, names: Iterable[str], counts: Iterable[str]
) -> list[str]:
    """A command line with engines' options under our names, and numbers like "32k" written out.

    `names` are the command's options, `counts` those that take a whole number. Raises ConfigError
    for an option of an engine that no single one of ours means.
    """
    known = set(names)
    numbers = set(counts)
    read: list[str] = []
    option = ""
    for word in args:
        if word.startswith("--"):
            written, equals, value = word.partition("=")
            option = _our_name(written, known)
            if option in RECIPROCALS:
                read.append("--tpot-ms")
                read += [_milliseconds(option, value)] if equals else []
                continue
            read.append(
                f"{option}={_value(option, value, numbers)}" if equals else option
            )
            continue
        if option in RECIPROCALS:
            read.append(_milliseconds(option, word))
        else:
            read.append(_value(option, word, numbers))
        option = ""
    return read


def _our_name(written: str, known: set[str]) -> str:
    name = written.removeprefix("--").replace("_", "-")
    if name in RATES_OF_USERS and "--tpot-ms" in known:
        return f"--{name}"
    if written in known or written.startswith("--no-"):
        return written
    for ours in OURS.get(name, ()):
        if f"--{ours}" in known:
            return f"--{ours}"
    if name in ANSWERS and "--context" in known:
        raise ConfigError(f"{written} is an engine's option: {ANSWERS[name]}")
    if name in OURS:
        raise ConfigError(
            f"{written} is an engine's option: --{either(OURS[name])} of other commands"
        )
    return written


def _milliseconds(option: str, text: str) -> str:
    """Milliseconds per token of a rate of tokens per second. Raises ConfigError for no rate."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < math.inf:
        raise ConfigError(f"{option} must be tokens per second above 0, not '{text}'")
    return f"{KILO / rate:.12g}"


def _value(option: str, text: str, numbers: set[str]) -> str:
    if option in numbers and COUNT.fullmatch(text):
        return str(parse_count(text))
    return text
