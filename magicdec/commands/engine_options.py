"""Options under the names of vLLM, SGLang and TensorRT-LLM: translated to ours, or left out where
they change no prediction.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from magicdec.errors import ConfigError, either, nearest
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
    "speculative-draft-model-path": ("draft",),
    "speculative-algo": ("draft",),
    "request-rate": ("rate",),
    "requests-per-second": ("rate",),
    "qps": ("rate",),
    "rps": ("rate",),
    "tpot": ("tpot-ms",),
    "itl": ("tpot-ms",),
    "ttft": ("ttft-ms",),
    "users": ("batch",),
}
"""Engines' options by ours that mean the same; of several the first that a command has."""
ANSWERS: Mapping[str, str] = {
    "gpu-memory-utilization": "it is `memory_fraction` of an engine profile (--engine FILE)",
    "mem-fraction-static": "it is `memory_fraction` of an engine profile (--engine FILE)",
    "data-parallel-size": "give all devices as --gpus, and --tp for each replica",
    "dp-size": "give all devices as --gpus, and --tp for each replica",
    "enable-expert-parallel": "give the ranks that experts are divided over as --ep",
    "dtype": "give the weights as --weight-dtype and the cache as --kv-dtype",
}
"""Engines' options that no single one of ours means."""
LONGEST = ("max-model-len", "max-seq-len", "context-length")
"""Engines' limit on a request, which stands for the context where nothing else gives the load."""
LOADS = ("--context", "--task", "--workload", "--requests", "--logs")
"""Options of ours that give the lengths of requests."""
SPECULATION = ("speculative-config", "sc")
RATES_OF_USERS = ("tok-s-user", "tps-per-user", "interactivity")
"""Tokens per second that each user sees: the reciprocal of --tpot-ms."""
RECIPROCALS = tuple(f"--{name}" for name in RATES_OF_USERS)
KILO = 1000.0
COUNT = re.compile(r"\d+[kKmM]")
TIME = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>ms|s)")
RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?:/s|rps|qps|req/s|requests/s)")
Say = Callable[[str], None]


def as_ours(
    args: list[str],
    *,
    names: Iterable[str],
    counts: Iterable[str],
    say: Say = lambda _: None,
) -> list[str]:
    """A command line with engines' options under our names, and numbers like "32k" written out.

    `names` are the command's options, `counts` those that take a whole number; `say` hears what is
    left out, or read as something else. Raises ConfigError for an option of an engine that nothing
    of ours means.
    """
    known = set(names)
    numbers = set(counts)
    if "--context" in known:
        args = _for_planning(args, known, say)
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


def quoted_server_command(
    args: Sequence[str], *, names: Sequence[str], flags: Sequence[str]
) -> list[str]:
    """A command line of `check` whose server's command stands in one word, as if it had been put in
    quotes, or got the options that were written behind it.

    `names` are check's own options, `flags` those without a value. Raises ConfigError for an option
    beside a file.
    """
    server: list[str] = []
    own: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in names:
            server.append(word)
            continue
        own.append(word)
        if not equals and name not in flags:
            own += itertools.islice(words, 1)
    further = [word for word in server[1:] if word.startswith("-")]
    if not further or any(_is_a_slip(word, names) for word in further):
        return list(args)
    first, *others = server
    if " " not in first and (first == "-" or Path(first).exists()):
        raise ConfigError(
            f"{further[0]} is no option of check; one of the server's stands in {first}"
        )
    return [" ".join([first, *map(shlex.quote, others)]), *own]


def _is_a_slip(word: str, names: Sequence[str]) -> bool:
    """Whether an option of check's was meant, and none of a server's."""
    from magicdec.specs.serve_command import is_engine_option

    written = word.partition("=")[0]
    name = written.lstrip("-").replace("_", "-")
    if not word.startswith("--") or name in OURS or is_engine_option(name):
        return False
    return nearest(written, names) is not None


def _for_planning(args: list[str], known: set[str], say: Say) -> list[str]:
    """Engines' options that several of ours mean, or none, in a command that plans."""
    gives_load = any(word.partition("=")[0] in LOADS for word in args)
    read: list[str] = []
    place = 0
    while place < len(args):
        word = args[place]
        place += 1
        written, equals, value = word.partition("=")
        name = written.removeprefix("--").replace("_", "-")
        if not written.startswith("--") or not _is_engines_own(written, name, known):
            read.append(word)
            continue
        if not equals and place < len(args) and not args[place].startswith("--"):
            value = args[place]
            place += 1
        if name in SPECULATION:
            read += _drafting(value)
        elif name in LONGEST and not gives_load:
            say(f"{written} is read as --context {value}, the prompt of each request")
            read += ["--context", value]
        else:
            say(f"{written} changes no plan, and is left out")
    return read


def _is_engines_own(written: str, name: str, known: set[str]) -> bool:
    """Whether an option is an engine's that none of ours is the name of."""
    if written in known or name in OURS or name in ANSWERS or name in RATES_OF_USERS:
        return False
    if name in LONGEST or name in SPECULATION:
        return True
    from magicdec.specs.serve_command import is_engine_option

    return is_engine_option(name)


def _drafting(text: str) -> list[str]:
    """Our options for vLLM's --speculative-config."""
    from magicdec.specs.serve_command import speculation_of

    asked = speculation_of(text)
    if asked is None:
        return ["--draft", "none"]
    read = ["--draft", asked.draft]
    if asked.gamma is not None:
        read += ["--gamma", str(asked.gamma)]
    if asked.checkpoint and asked.checkpoint != asked.draft:
        read += ["--draft-model", asked.checkpoint]
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
    time = TIME.fullmatch(text) if option.endswith("-ms") else None
    if time is not None:
        scale = KILO if time["unit"] == "s" else 1.0
        return f"{scale * float(time['number']):.12g}"
    rate = RATE.fullmatch(text) if option == "--rate" else None
    if rate is not None:
        return rate["number"]
    return text
