"""A server's command line, as `vllm serve`, SGLang's `launch_server` and `trtllm-serve` take it.

It is read from a shell line, a script, a Docker Compose file or a Kubernetes manifest. Options that
bear on speed become fields; those that do not are known by name; all others are listed as not
understood.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from magicdec.errors import ConfigError
from magicdec.files import bounded
from magicdec.naming import DRAFT_NAMES, head_named_in
from magicdec.units import parse_count

ENGINES = ("vllm", "sglang", "trtllm")
STARTS = "vllm serve, python -m sglang.launch_server or trtllm-serve"
IMAGES = {"vllm/vllm-openai": "vllm", "lmsysorg/sglang": "sglang"}
"""Container images whose entry point is the server."""
SEPARATORS = frozenset((";", "&&", "||", "|", "&"))
OF_A_MODEL = ("draft_model", "standalone", "drafttarget")


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """A server's draft."""

    draft: str
    """"ngram", "eagle3" and so on, or the draft model's name."""
    gamma: int | None = None
    """Drafted tokens per step; None: the engine's default."""
    checkpoint: str | None = None
    """The head's or the draft's repository."""
    by_batch: bool = False
    """Whether gamma follows a table by batch."""
    is_tree: bool = False
    """Whether drafts branch."""
    window: int | None = None
    """Tokens that a head's attention is cut to; None: its whole cache."""


class ServeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A server as its command describes it; None: the engine's default."""

    engine: str
    model: str
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    speculation: Speculation | None = None
    captured_tokens: int | None = None
    """The most tokens of a pass, or sequences, whose graph is captured, where the command says."""
    is_eager: bool = False
    hardware: str | None = None
    """Device, where the file names it."""
    num_gpus: int | None = None
    """Devices that the file grants."""
    read: dict[str, str] = {}
    """Options that bear on speed, as written."""
    not_understood: list[str] = []
    problems: list[str] = []
    """Settings whose written form cannot be what is meant."""
    unread: str | None = None
    """File of further options, which is not here."""


# What engines call their options

SHARED = {
    "model": "model",
    "tensor-parallel-size": "tp",
    "tp": "tp",
    "tp-size": "tp",
    "pipeline-parallel-size": "pp",
    "pp": "pp",
    "pp-size": "pp",
    "ep-size": "ep",
    "kv-cache-dtype": "kv_dtype",
    "quantization": "weights",
    "q": "weights",
}
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        **SHARED,
        "data-parallel-size": "dp",
        "dp": "dp",
        "enable-expert-parallel": "experts",
        "max-num-seqs": "batch",
        "max-model-len": "length",
        "speculative-config": "speculation",
        "sc": "speculation",
        "speculative-model": "draft",
        "num-speculative-tokens": "gamma",
        "compilation-config": "compilation",
        "O": "compilation",
        "cuda-graph-sizes": "captured",
        "cudagraph-capture-sizes": "captured",
        "max-cudagraph-capture-size": "captured",
        "enforce-eager": "eager",
        "dtype": "dtype",
    },
    "sglang": {
        **SHARED,
        "model-path": "model",
        "tensor-parallel": "tp",
        "dp-size": "dp",
        "dp": "dp",
        "data-parallel-size": "dp",
        "ep": "ep",
        "expert-parallel-size": "ep",
        "max-running-requests": "batch",
        "context-length": "length",
        "speculative-algorithm": "algorithm",
        "speculative-algo": "algorithm",
        "speculative-draft-model-path": "draft",
        "speculative-draft-model": "draft",
        "speculative-num-steps": "gamma",
        "speculative-eagle-topk": "topk",
        "speculative-num-draft-tokens": "tree",
        "speculative-draft-window-size": "window",
        "cuda-graph-max-bs": "captured",
        "cuda-graph-bs": "captured",
        "disable-cuda-graph": "eager",
        "dtype": "dtype",
    },
    "trtllm": {
        **SHARED,
        "max-batch-size": "batch",
        "max-seq-len": "length",
        "extra-llm-api-options": "file",
        "config": "file",
    },
}
"""Options that bear on speed, by what they say."""
HARMLESS = re.compile(
    r"host|port|api-key|served-model-name|trust-remote-code|chat-template.*|tool-call.*|"
    r"enable-auto-tool-choice|reasoning.*|enable-reasoning|disable-log.*|enable-log.*|log-.*|seed|"
    r"download-dir|load-format|tokenizer.*|revision|code-revision|hf-.*|config-format|ssl.*|"
    r"root-path|middleware|allowed-.*|uvicorn.*|response-role|generation-config|"
    r"override-generation.*|max-logprobs|return-tokens.*|otlp.*|enable-metrics|metrics.*|"
    r"collect-.*|enable-request-id.*|api-server-count|lora.*|enable-lora|max-lora.*|max-cpu-loras|"
    r"limit-mm-per-prompt|mm-.*|guided-decoding.*|structured-outputs.*|grammar-backend|watchdog.*|"
    r"gpu-memory-utilization|mem-fraction-static|kv-cache-free-gpu-memory-fraction|"
    r"free-gpu-memory-fraction|swap-space|cpu-offload-gb|block-size|page-size|"
    r"enable-prefix-caching|no-enable-prefix-caching|disable-radix-cache|max-num-batched-tokens|"
    r"chunked-prefill-size|enable-chunked-prefill|no-enable-chunked-prefill|max-num-tokens|"
    r"async-scheduling|no-async-scheduling|scheduling-policy|schedule-policy|schedule-conserv.*|"
    r"distributed-executor-backend|attention-backend|backend|device|nnodes|node-rank|nproc.*|"
    r"dist-init-addr|master-.*|random-seed|skip-server-warmup|enable-mixed-chunk|num-gpus-per-node|"
    r"stream-interval|decode-log-interval|headless|data-parallel-(address|rank|backend|rpc-port|"
    r"size-local|start-rank)|disable-custom-all-reduce|gpus-per-node|cluster-size|log-level"
)
"""Options that a prediction does not need: names, ports, logs; memory, chunks and prefix caching,
which every engine has by default and whose figures a profile holds."""
VISIBLE = re.compile(
    r"(?:CUDA|HIP|ROCR)_VISIBLE_DEVICES[\"']?\s*(?:[=:]|\s+value:)\s*"
    r"[\"']?(?P<devices>\d+(?:,\d+)*)"
)
"""Variable that names the devices of a process, in a shell or in an environment of YAML."""
QUOTES_LOST = (
    "a shell takes quotes away: give the command in a file, through a pipe (magicdec check -), or "
    "in the other sort of quotes"
)
MOST_TEXT = 1_000_000
MOST_NODES = 100_000
"""Values of a manifest with every alias written out; a few lines can stand for billions."""
MOST_DEPTH = 100
SHOWN = 80
"""Characters of a value that an error shows."""
FLAGS = frozenset(("eager", "experts"))
"""Options that are given without a value."""


def read_serve_command(text: str, *, reads_files: bool = True) -> ServeCommand:
    """The server that a command line, a script, or the text of a YAML file starts; `reads_files`:
    with the file of options that it names.

    Raises ConfigError where it starts none, names no model, or gives an option a value that cannot
    be read.
    """
    if len(text) > MOST_TEXT:
        raise ConfigError(
            f"a command of {len(text)} characters is too long; {MOST_TEXT} are read"
        )
    grants: dict[str, Any] = {}
    words = _words_of_yaml(text, grants) or _words_of_shell(text)
    if words is None:
        raise ConfigError(
            f"no server is started here: give {STARTS}, or a file with one"
        )
    visible = VISIBLE.search(text)
    if visible is not None:
        grants["num_gpus"] = len(visible["devices"].split(","))
    engine, arguments = words
    return _read(engine, arguments, grants, reads_files=reads_files)


# From text to the words of one command


def _words_of_shell(text: str) -> tuple[str, list[str]] | None:
    lines = re.sub(r"\\[ \t]*\r?\n", " ", text)
    try:
        lexer = shlex.shlex(lines, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError as error:
        raise ConfigError(
            f"the command cannot be read as a shell reads it: {error}"
        ) from error
    server = _engine_in(words)
    if server is None:
        return None
    engine, start = server
    command = itertools.takewhile(lambda word: word not in SEPARATORS, words[start:])
    return engine, list(command)


def _engine_in(words: Sequence[str]) -> tuple[str, int] | None:
    """The engine that words start, and the place of its first argument."""
    for place, word in enumerate(words):
        serves = list(words[place + 1 : place + 2]) == ["serve"]
        engine = _engine_of(word, serves=serves)
        if engine is not None:
            has_subcommand = serves and not word.startswith("vllm.entrypoints.")
            return engine, place + (2 if has_subcommand else 1)
        image = _image_in(word)
        if image is not None:
            inner = _engine_in(words[place + 1 :])
            if inner is not None:
                return inner[0], inner[1] + place + 1
            return IMAGES[image], place + 1
    return None


def _engine_of(word: str, *, serves: bool) -> str | None:
    """The engine that a word starts; `serves`: the next word is "serve"."""
    base = word.rpartition("/")[2]
    if word.startswith("vllm.entrypoints.") or (base == "vllm" and serves):
        return "vllm"
    if word == "sglang.launch_server" or (base == "sglang" and serves):
        return "sglang"
    if base == "trtllm-serve":
        return "trtllm"
    return None


def _image_in(word: str) -> str | None:
    for name in IMAGES:
        if word.startswith(name):
            return name
    return None


def _words_of_yaml(text: str, grants: dict[str, Any]) -> tuple[str, list[str]] | None:
    """The command of the first container that starts a server, with the devices it is granted."""
    if ":" not in text or "\n" not in text.strip():
        return None
    import yaml

    documents: list[Mapping[str, Any]] = []
    try:
        for document in yaml.safe_load_all(text):
            if isinstance(document, dict):
                documents.append(document)
    except (yaml.YAMLError, ValueError):  # a date or a number that is none
        return None
    except RecursionError:
        raise ConfigError(f"the manifest nests more than {MOST_DEPTH} deep") from None
    _check_size(documents)
    containers = [pair for document in documents for pair in _containers(document, [])]
    for container, around in containers:
        words = _container_words(container)
        server = _engine_in(words)
        if server is not None:
            grants |= _granted([container, *around])
            engine, start = server
            return engine, words[start:]
    return None


def _check_size(documents: list[Any]) -> None:
    """Raises ConfigError for documents of more values or depth than a manifest has."""
    count = 0
    level = list(documents)
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, Mapping):
                inner += node.values()
            elif isinstance(node, list):
                inner += node
        count += len(inner)
        if count > MOST_NODES:
            raise ConfigError(f"the manifest stands for more than {MOST_NODES} values")
        if not inner:
            return
        level = inner
    raise ConfigError(f"the manifest nests more than {MOST_DEPTH} deep")


def _containers(
    node: Any, around: list[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Mappings with a command or arguments, each with those around it, the nearest first."""
    if isinstance(node, Mapping):
        if any(key in node for key in ("command", "args", "entrypoint")):
            yield node, around
        for value in node.values():
            yield from _containers(value, [node, *around])
    elif isinstance(node, list):
        for value in node:
            yield from _containers(value, around)


def _container_words(container: Mapping[str, Any]) -> list[str]:
    words = [str(container.get("image", ""))]
    for key in ("entrypoint", "command", "args"):
        value = container.get(key)
        if isinstance(value, str):
            words += _split(value.replace("\\\n", " "))
        elif isinstance(value, list):
            words += [str(word) for word in value]
    if len(words) > 2 and words[-2] in ("-c", "-lc", "-ec"):  # sh -c "vllm serve ..."
        server = _words_of_shell(words[-1])
        if server is not None:
            engine, arguments = server
            start = {"vllm": ["vllm", "serve"], "sglang": ["sglang.launch_server"]}
            return [*start.get(engine, ["trtllm-serve"]), *arguments]
    return words


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"the command cannot be read as a shell reads it: {error}"
        ) from error


def _granted(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Devices that a manifest grants: their number, and their name where it is selected."""
    text = json.dumps([dict(node) for node in nodes], default=str)
    granted: dict[str, Any] = {}
    count = re.search(r'"(?:nvidia|amd)\.com/gpu": "?(\d{1,6})\b', text)
    if count is None:
        count = re.search(
            r'"count": "?(\d{1,6})\b"?, "capabilities": \["gpu"|"count": "?(\d{1,6})\b',
            text,
        )
    if count is not None:
        granted["num_gpus"] = int(next(group for group in count.groups() if group))
    name = re.search(
        r'"(?:nvidia\.com/gpu\.product|cloud\.google\.com/gke-accelerator)": "([^"]+)',
        text,
    )
    if name is not None:
        granted["hardware"] = re.sub(r"^nvidia-(tesla-)?", "", name[1].lower())
    return granted


# From words to fields


class _Said(NamedTuple):
    """The options of a command line."""

    meanings: dict[str, str]
    """Values by what the option means."""
    written: dict[str, str]
    """Values by the option's name."""
    unknown: list[str]


def _said(engine: str, words: Sequence[str]) -> _Said:
    said = _Said({}, {}, [])
    for option, value in _pairs(engine, words):
        if option is None:
            said.meanings.setdefault("model", value or "")
            continue
        meaning = OPTIONS[engine].get(option)
        if meaning is None:
            if not HARMLESS.fullmatch(option.removeprefix("no-")):
                said.unknown.append(f"--{option}")
            continue
        given = "true"
        if value is not None:
            given = value
        if given.startswith("{"):
            given = json.dumps(_json_object(option, given))
        given = _joined(said.meanings.get(meaning), given)
        said.meanings[meaning] = given
        name = option
        if meaning == "speculation":
            name = "speculative-config"
        said.written[f"--{name}"] = given
    return said


def _read(
    engine: str,
    words: Sequence[str],
    grants: dict[str, Any],
    *,
    reads_files: bool,
) -> ServeCommand:
    said, written, unknown = _said(engine, words)
    problems: list[str] = []
    if "file" in said and reads_files:
        said |= _trtllm_file(Path(said["file"]), problems)
    elif "file" in said:
        problems.append(
            f"the settings in {said['file'][:SHOWN]} are not read here: magicdec check reads them"
        )
    if not said.get("model"):
        raise ConfigError(f"the command names no model; {STARTS} take one")
    unread = said.get("file")
    if unread is not None and reads_files and _is_here(Path(unread)):
        unread = None
    return ServeCommand(
        unread=unread,
        engine=engine,
        model=said["model"],
        tp_size=_count(said, "tp") or 1,
        pp_size=_count(said, "pp") or 1,
        dp_size=_count(said, "dp") or 1,
        ep_size=_count(said, "ep"),
        max_num_seqs=_count(said, "batch"),
        max_model_len=_count(said, "length"),
        weight_dtype=said.get("weights"),
        kv_dtype=said.get("kv_dtype"),
        speculation=_speculation(said, problems),
        captured_tokens=_captured(said),
        is_eager=said.get("eager") == "true",
        read=written,
        not_understood=unknown,
        problems=problems,
        **grants,
    )


def _pairs(
    engine: str, words: Sequence[str]
) -> Iterator[tuple[str | None, str | None]]:
    """(option, value) of words; the option of a positional argument is None."""
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not re.match(r"--?[A-Za-z]", word):
            yield None, word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        head, dot, inside = name.partition(".")  # --speculative-config.method ngram
        option = head.replace("_", "-")
        if dot:
            if not equals:
                value = "".join(words[place : place + 1])
                place += 1
            value = json.dumps({inside: _scalar(value)})
            yield option, value
            continue
        if equals:
            yield option, value
            continue
        is_flag = OPTIONS[engine].get(option) in FLAGS
        values: list[str] = []
        while (
            not is_flag
            and place < len(words)
            and not re.match(r"--?[A-Za-z]", words[place])
        ):
            values.append(words[place])
            place += 1
            if option not in (
                "cuda-graph-sizes",
                "cuda-graph-bs",
                "cudagraph-capture-sizes",
            ):
                break
        yield option, " ".join(values) if values else None


def _joined(before: str | None, given: str) -> str:
    """An option given in parts (--speculative-config.method ngram) as one object."""
    if before is None or not (before.startswith("{") and given.startswith("{")):
        return given
    return json.dumps(_json_object("option", before) | _json_object("option", given))


def _scalar(text: str) -> Any:
    try:
        return bounded(json.loads, text)
    except ValueError:
        return text


def _count(said: Mapping[str, str], name: str) -> int | None:
    text = said.get(name)
    if text is None or text == "auto":
        return None
    try:
        value = parse_count(text)
    except ValueError:
        raise ConfigError(
            f"{name} must be a whole number, not '{text[:SHOWN]}'"
        ) from None
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")
    return value


def _captured(said: Mapping[str, str]) -> int | None:
    if "captured" in said:
        sizes = re.findall(r"\b\d{1,9}\b", said["captured"])
        return max(map(int, sizes), default=None)
    config = said.get("compilation", "")
    if not config.startswith("{"):
        return None
    values = _json_object("compilation-config", config)
    sizes = values.get("cudagraph_capture_sizes") or [
        values.get("max_cudagraph_capture_size")
    ]
    if not isinstance(sizes, list):
        return None
    whole = [size for size in sizes if isinstance(size, int) and size]
    return max(whole, default=None)


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = bounded(json.loads, text)
    except ValueError:
        value = _without_quotes(text)
    if not isinstance(value, dict):
        raise ConfigError(
            f"--{name} must be a JSON object, not {text[:SHOWN]}; {QUOTES_LOST}"
        )
    return value


def _without_quotes(text: str) -> Any:
    """A JSON object whose quotes a shell took away, as {method:ngram}; None: it is none."""
    words = []
    for word in re.findall(r'"[^"]*"|[{}\[\],:]|[^\s{}\[\],:"]+', text):
        is_json = word[0] in '"{}[],:' or isinstance(_scalar(word), int | float | None)
        words.append(word if is_json else json.dumps(word))
    try:
        return bounded(json.loads, "".join(words))
    except ValueError:
        return None


def speculation_of(text: str) -> Speculation | None:
    """vLLM's --speculative-config; None: it drafts nothing. Raises ConfigError."""
    return _of_config(_json_object("speculative-config", text), [])


def _speculation(said: Mapping[str, str], problems: list[str]) -> Speculation | None:
    if "speculation" in said:
        return _of_config(
            _json_object("speculative-config", said["speculation"]), problems
        )
    if "algorithm" in said:
        method = said["algorithm"].lower()
        gamma = _count(said, "gamma")
        width = _count(said, "topk") or 1
        draft = _draft(method, said.get("draft"), problems)
        return Speculation(
            draft=draft,
            gamma=gamma,
            checkpoint=said.get("draft"),
            is_tree=width > 1,
            window=_count(said, "window"),
        )
    if "draft" in said:
        draft = _draft("", said["draft"], problems)
        return Speculation(
            draft=draft, gamma=_count(said, "gamma"), checkpoint=said["draft"]
        )
    return None


def _of_config(config: Mapping[str, Any], problems: list[str]) -> Speculation | None:
    """vLLM's --speculative-config."""
    checkpoint = config.get("model")
    if checkpoint is not None and not isinstance(checkpoint, str):
        raise ConfigError(f"the draft's model must be a name, not {checkpoint!r:.80}")
    method = str(config.get("method") or "").lower()
    table = config.get("num_speculative_tokens_per_batch_size")
    gamma = config.get("num_speculative_tokens")
    if gamma is None and table:
        gamma = _deepest(table)
    if gamma is not None and (
        isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 0
    ):
        raise ConfigError(
            f"num_speculative_tokens must be a whole number, not {gamma!r}"
        )
    if gamma == 0:
        return None
    if gamma is None and method not in ("suffix", "mtp"):
        problems.append(
            "--speculative-config has no num_speculative_tokens; vLLM does not start"
        )
    return Speculation(
        draft=_draft(method, checkpoint, problems),
        gamma=gamma,
        checkpoint=checkpoint,
        by_batch=bool(table),
    )


def _deepest(table: Any) -> int:
    """The largest gamma of a table by batch, rows of (first batch, last batch, gamma)."""
    try:
        return max(int(row[-1]) for row in table)
    except (TypeError, ValueError, LookupError):
        raise ConfigError(
            "num_speculative_tokens_per_batch_size must be rows of whole numbers, not "
            f"{str(table)[:SHOWN]}"
        ) from None


def _draft(method: str, checkpoint: Any, problems: list[str]) -> str:
    """Our name of a draft."""
    key = method.replace("-", "_")
    if key in DRAFT_NAMES:
        return DRAFT_NAMES[key]
    if key and key not in OF_A_MODEL:
        known = ", ".join(sorted({*DRAFT_NAMES, *OF_A_MODEL}))
        raise ConfigError(
            f"speculative method '{method}' is not planned for; known: {known}"
        )
    if not isinstance(checkpoint, str) or not checkpoint:
        raise ConfigError(
            "the speculative configuration names neither a method nor a model"
        )
    if checkpoint in ("ngram", "[ngram]"):
        return "ngram"
    part = head_named_in(checkpoint)
    if part is not None:
        if not key:
            problems.append(f"no method is given; by its name {checkpoint} is {part}")
        return part
    return checkpoint


def _is_here(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name of a file
        return False


def _trtllm_file(path: Path, problems: list[str]) -> dict[str, str]:
    """TensorRT-LLM's options file as options of a command; a file that is not here adds a
    problem."""
    import yaml

    if not _is_here(path):
        problems.append(
            f"{path} is not here, so its settings, speculation too, are not known"
        )
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold options by name")
    said: dict[str, str] = {}
    inside = values.get("speculative_config")
    if isinstance(inside, dict):
        gamma = inside.get("max_draft_len") or inside.get("num_nextn_predict_layers")
        config = {
            "method": str(inside.get("decoding_type", "")).lower(),
            "model": inside.get("speculative_model_dir")
            or inside.get("speculative_model"),
            "num_speculative_tokens": gamma,
        }
        said["speculation"] = json.dumps(config)
    graphs = values.get("cuda_graph_config")
    if isinstance(graphs, dict) and (most := graphs.get("max_batch_size")):
        said["captured"] = str(most)
    for key, name in (("kv_cache_config", "kv_dtype"),):
        cache = values.get(key)
        if isinstance(cache, dict) and cache.get("dtype"):
            said[name] = str(cache["dtype"])
    return said
