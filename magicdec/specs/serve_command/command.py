"""A server as its command describes it: the fields that bear on speed, of its options' words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.files import bounded
from magicdec.naming import DRAFT_NAMES, head_named_in, parallel_form
from magicdec.specs.engine import version_number
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.serve_command.llama_cpp import (
    ON_HOST,
    USUAL_FORMAT,
    draft_of,
    gguf_of,
    read_words,
)
from magicdec.specs.serve_command.manifest import load
from magicdec.specs.serve_command.options import (
    OF_WRAPPERS,
    OPTIONS,
    names_of,
    options_of,
    scalar,
    title_of,
    unknown_in,
)
from magicdec.specs.serve_command.start import (
    MARKED,
    OPEN,
    OWN_ARGUMENTS,
    SHOWN,
    STARTS,
    Given,
    Start,
    json_of,
    text_of,
    words_of,
)
from magicdec.specs.speculation import TreeSpec
from magicdec.units import parse_count

LLAMA_CPP = "llama.cpp"
UNFITTED = Path(__file__).resolve().parents[1] / "data" / "unfitted"
"""Profiles of engines that nobody fitted."""
ALL_LAYERS = 99
"""-ngl from which all layers are on the device, whatever the model."""
OF_A_MODEL = ("draft_model", "standalone", "drafttarget", "draft_target")
OF_A_HEAD = {
    "eagle_of_trtllm": "eagle3",  # its EAGLE heads are EAGLE-3's
    "eagle_one_model": "eagle3",
    "mtp_eagle": "mtp",
    "mtp_eagle_one_model": "mtp",
    "mtp_vanilla": "mtp",
    "sa": "suffix",
}
MOST_OBJECT = 20_000
QUOTES_LOST = (
    "a shell takes quotes away: give the command in a file, through a pipe (magicdec check -), or "
    "in the other sort of quotes"
)
NEEDED = (
    "model",
    "tp",
    "pp",
    "dp",
    "ep",
    "speculation",
    "algorithm",
    "draft",
    "method",
    "gamma",
    "topk",
    "tree",
    "weights",
)
"""Meanings without which there is no answer."""
SAMPLES = {
    "model": "Qwen/Qwen3-8B",
    "file": "settings.yaml",
    "draft": "Qwen/Qwen3-0.6B",
    "weights": "fp8",
}
LEVELS = {"0": "none", "1": "piecewise"}
"""vLLM's -O levels that leave decoding without whole graphs (0 compiles nothing either)."""
MODES = {
    "none": "none",
    "piecewise": "piecewise",
    "full": "whole",
    "full_decode_only": "whole",
    "full_and_piecewise": "whole",
}
"""vLLM's cudagraph_mode."""
TABLE_KEY = "num_speculative_tokens_per_batch_size"
AUTO_BANDS = [[1, 4, 5], [5, 32, 3], [33, 1_000_000, 0]]
"""TensorRT-LLM's AUTO: n-grams, by the number of requests (its tech blog 7)."""
KNOWN_KEYS = frozenset(
    (
        *("speculative_token_tree", "by_batch"),
        *("use_relaxed_acceptance_for_thinking", "posterior_threshold"),
    )
)
"""Keys of --speculative-config that fields hold and the data lacks: older versions', and ours for what
TensorRT-LLM's settings say."""


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
    bands: tuple[tuple[int, int, int], ...] = ()
    """That table, where the command has it: first and last batch, gamma."""
    is_tree: bool = False
    """Whether drafts branch."""
    tree: TreeSpec | None = None
    """Their shape, where it is known."""
    window: int | None = None
    """Tokens that a head's attention is cut to; None: its whole cache."""
    tp_size: int | None = None
    """Ranks of the draft, where the command says."""
    is_eager: bool = False
    """Whether the drafter's passes are launched kernel by kernel."""
    lossy: list[str] = []
    """Settings with which the output is no longer the target's own."""
    contradiction: str = ""
    """Settings of the draft that contradict each other, and what the engine makes of them."""

    def gamma_at(self, batch: int) -> int | None:
        """Gamma of steps with so many sequences; None: the engine's default."""
        for first, last, gamma in self.bands:
            if first <= batch <= last:
                return gamma
        return self.gamma


class ServeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A server as its command describes it; None: the engine's default."""

    engine: str
    model: str
    version: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    allocated_tokens: int | None = None
    """Tokens of all sequences whose cache is allocated at the start; None: it grows, or the number is
    the engine's."""
    is_partly_on_host: bool = False
    """Whether layers, experts or the cache stay in the host's memory."""
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    speculation: Speculation | None = None
    captured_tokens: int | None = None
    """The most tokens of a pass, or sequences, whose graph is captured, where the command says."""
    graphs: str | None = None
    """"whole", "piecewise", "none" (compiled, launched kernel by kernel) or "eager" (neither)."""
    is_asynchronous: bool | None = None
    """Whether the next step is scheduled while one runs."""
    has_prefix_cache: bool | None = None
    chunk_tokens: int | None = None
    """The most tokens of a pass that reads prompts."""
    memory_fraction: float | None = None
    hardware: str | None = None
    """Device, where the file names it."""
    num_gpus: int | None = None
    """Devices that the file grants."""
    read: dict[str, str] = {}
    """Options that bear on speed, as written."""
    without_effect: list[str] = []
    """Options that the engine has and that change no time here."""
    not_understood: list[str] = []
    problems: list[str] = []
    """Settings whose written form cannot be what is meant."""
    notes: list[str] = []
    unread: str | None = None
    """File of further options, which is not here."""

    @property
    def is_eager(self) -> bool:
        return self.graphs == "eager"

    @property
    def engine_profile(self) -> str:
        """The engine's profile, of the version that the command names: "vllm@0.12.0"."""
        if self.engine == LLAMA_CPP:
            return str(UNFITTED / f"{LLAMA_CPP}.toml")
        if self.version is None or not version_number(self.version):
            return self.engine
        return f"{self.engine}@{self.version}"

    @property
    def path_options(self) -> PathOptions:
        """Its options that change the path of a step."""
        return PathOptions(
            enforce_eager=self.graphs in ("none", "eager"),
            cudagraph_mode=self.graphs or "",
            is_synchronous=self.is_asynchronous is False,
            pp_size=self.pp_size,
        )

    @property
    def why_not_understood(self) -> str:
        """Which versions' options were compared."""
        if self.engine == LLAMA_CPP:
            return "not known"
        return f"not in {title_of(self.engine)} {names_of(self.engine).range}"


class _StatedOptions:
    """The options of a command line by what they mean."""

    def __init__(self, start: Start, given: Given) -> None:
        self.start = start
        self.given = given
        self.meanings: dict[str, str] = {}
        self.written: dict[str, str] = {}
        self.without_effect: list[str] = []
        self.unknown: list[str] = []
        self.problems: list[str] = []
        self.names: dict[str, str] = {}
        """Option that a meaning was given by."""
        self.open: list[str] = []
        """References whose values may be any option."""

    def add(self, words: list[str]) -> None:
        """Takes a command's words in; what was said before is replaced."""
        engine = self.start.engine
        for option in options_of(engine, words):
            if not option.name:
                self._positional(option.value or "")
                continue
            name = option.name
            value = option.value
            if name not in OPTIONS[engine] and name.startswith("no-"):
                bare = name.removeprefix("no-")
                if bare in OPTIONS[engine] or bare in names_of(engine).kinds:
                    name = bare
                    value = "false"
            self._option(name, "true" if value is None else value, option.name)

    def _positional(self, value: str) -> None:
        references = self.given.open_in(value)
        takes_model = self.start.engine != "sglang" or not references
        if "model" not in self.meanings and takes_model:
            self.meanings["model"] = value
            self.names["model"] = "the model"
            return
        if value in ("serve", ""):
            return
        if references == ["$@"] and self.given.reasons["$@"][1] == OWN_ARGUMENTS:
            self.given.notes.append(
                "the script's own arguments ($@) are not known here"
            )
        elif references:  # it may be any option
            self.open += references
        else:
            self.unknown.append(value[:SHOWN])

    def _option(self, name: str, value: str, written: str) -> None:
        engine = self.start.engine
        missing = unknown_in(engine, name, self.start.version)
        if missing is not None:
            is_wrapped = OF_WRAPPERS.fullmatch(name) is not None
            if self.start.version in names_of(engine).versions and not is_wrapped:
                self.problems.append(f"{missing}: the server does not start")
            elif is_wrapped:
                self.without_effect.append(f"--{written}")
                return
            if name not in OPTIONS[engine]:
                if self.given.open_in(written):
                    self.open += self.given.open_in(written)
                    return
                self.unknown.append(f"--{written}")
                return
        meaning = OPTIONS[engine].get(name)
        if meaning is None:
            self.without_effect.append(f"--{written}")
            return
        if value.startswith("{") and not self.given.open_in(value):
            value = json.dumps(_json_object(name, value))
        value = _joined(self.meanings.get(meaning), value)
        self.meanings[meaning] = value
        self.names[meaning] = f"--{name}"
        shown = "speculative-config" if meaning == "speculation" else name
        self.written[f"--{shown}"] = value

    def check_resolved(self) -> None:
        """Asks for references that the answer needs, all in one ConfigError; names the others."""
        questions = []
        for meaning, value in list(self.meanings.items()):
            references = self.given.open_in(value)
            if not references:
                continue
            self.meanings[meaning] = self.given.shown(value)
            if meaning in ("model", "draft") and _named_anyway(value):
                continue
            sample = SAMPLES.get(meaning, "4")
            asked = [self.given.question(name, sample) for name in references]
            if meaning in NEEDED:
                questions += asked
            else:
                option = self.names.get(meaning, meaning)
                self.problems.append(f"{option} is not known: {'; '.join(asked)}")
                del self.meanings[meaning]
        for reference in self.open:
            questions.append(self.given.question(reference, '"--max-num-seqs 64"'))
        self.given.ask(questions)
        self.written = {name: self.given.shown(v) for name, v in self.written.items()}


def _named_anyway(value: str) -> bool:
    """Whether the last part of a path names a model, whatever folder it lies in."""
    last = value.rstrip("/").rpartition("/")[2]
    return "/" in value and bool(last) and not MARKED.search(last)


def command_of(start: Start, given: Given) -> ServeCommand:
    """The fields of a started server. Raises ConfigError for values that cannot be read."""
    if start.engine == LLAMA_CPP:
        return _of_llama_cpp(start, given)
    said = _StatedOptions(start, given)
    said.add(start.words)
    unread = None
    if "file" in said.meanings:
        unread = _add_file(said)
    said.check_resolved()
    meanings = said.meanings
    if not meanings.get("model"):
        raise ConfigError(f"the command names no model; {STARTS} take one")
    _merge_nested(said)
    speculation = _speculation(said)
    memory = meanings.get("memory", "")
    replicas = _count(said, "dp") or 1
    if meanings.get("shared_dp") == "true":
        replicas = 1  # SGLang's attention in data parallel shares the devices of tp
    is_asynchronous = None
    if "asynchronous" in meanings:
        is_asynchronous = meanings["asynchronous"] == "true"
    elif meanings.get("synchronous") == "true":
        is_asynchronous = False
    has_prefix_cache = None
    if "prefixes" in meanings:
        has_prefix_cache = meanings["prefixes"] != "false"
    elif meanings.get("no_prefixes") == "true":
        has_prefix_cache = False
    chunk_tokens = None
    if not meanings.get("chunk", "").startswith(
        "-"
    ):  # SGLang's -1: prompts are read whole
        chunk_tokens = _count(said, "chunk")
    max_model_len = None
    if meanings.get("length", "") not in ("-1", "auto"):
        max_model_len = _count(said, "length")
    return ServeCommand(
        engine=start.engine,
        version=start.version,
        model=model_of(meanings["model"]),
        tp_size=_count(said, "tp") or 1,
        pp_size=_count(said, "pp") or 1,
        dp_size=replicas,
        ep_size=_count(said, "ep"),
        max_num_seqs=_count(said, "batch"),
        max_model_len=max_model_len,
        weight_dtype=meanings.get("weights"),
        kv_dtype=meanings.get("kv_dtype"),
        speculation=speculation,
        captured_tokens=_captured(meanings),
        graphs=_graphs(start.engine, meanings),
        is_asynchronous=is_asynchronous,
        has_prefix_cache=has_prefix_cache,
        chunk_tokens=chunk_tokens,
        memory_fraction=float(memory)
        if re.fullmatch(r"0?\.\d{1,6}|1\.0*", memory)
        else None,
        hardware=start.hardware,
        num_gpus=start.num_gpus,
        read=said.written,
        without_effect=said.without_effect,
        not_understood=said.unknown,
        problems=said.problems,
        notes=list(dict.fromkeys(given.notes)),
        unread=unread,
    )


def _of_llama_cpp(start: Start, given: Given) -> ServeCommand:
    """llama-server's command, answered by the roofline."""
    command = read_words(start.words)
    questions = []
    for meaning, value in command.said.items():
        for reference in given.open_in(value):
            if meaning not in ("model", "draft") or not _named_anyway(value):
                sample = SAMPLES.get(meaning, "4")
                questions.append(given.question(reference, sample))
    given.ask(questions)
    said = {meaning: given.shown(value) for meaning, value in command.said.items()}
    command = command._replace(said=said)
    name = said.get("repository") or said.get("model")
    if not name:
        raise ConfigError(f"the command names no model; {STARTS} take one")
    gguf = gguf_of(name)
    is_usual = not gguf.label and "repository" in said
    if is_usual:
        gguf = gguf_of(f"{name}:{USUAL_FORMAT}")
    drafted = draft_of(command)
    speculation = None
    if drafted is not None:
        speculation = Speculation(draft=drafted[0], gamma=drafted[1])
    notes = [
        "llama.cpp was fitted by nobody: its times are the roofline's, and its intervals are as wide as "
        "that"
    ]
    if is_usual:
        notes.append(f"-hf {name} names no format: {USUAL_FORMAT} is llama.cpp's own")
    if gguf.label and gguf.weight_dtype != "bf16":
        notes.append(
            f"{gguf.label} is taken for {gguf.weight_dtype}, the nearest in bits; its kernels are not "
            "modelled"
        )
    layers = said.get("layers", "all")
    on_host = [option for option in command.others if option.lstrip("-") in ON_HOST]
    is_on_host = bool(on_host)
    if on_host:
        notes.append(
            f"{', '.join(on_host)}: all is taken for the device's; what stays on the host is not "
            "modelled"
        )
    if layers.isdecimal() and int(layers[:6]) < ALL_LAYERS:
        is_on_host = True
        notes.append(
            f"-ngl {layers[:6]}: all layers are taken for the device's; those that stay on the host are "
            "not modelled"
        )
    if "batch" not in said:
        notes.append("one sequence at a time is taken for it: --parallel says how many")
    # -c counts the tokens of all sequences together; 0 is the model's own
    length = said.get("length", "0")
    tokens = None
    if length.isdecimal() and int(length[:9]) > 0:
        tokens = int(length[:9])
    # the format that is nearest in bits
    kv_dtype = None
    keys = said.get("keys", "").lower()
    if keys.startswith("q8"):
        kv_dtype = "fp8"
    elif keys.startswith(("q4", "q5", "iq4")):
        kv_dtype = "int4"
    sequences = _counted(said.get("batch"), "--parallel") or 1
    return ServeCommand(
        engine=start.engine,
        model=gguf.model,
        allocated_tokens=tokens,
        is_partly_on_host=is_on_host,
        max_num_seqs=sequences,
        max_model_len=None if tokens is None else max(tokens // sequences, 1),
        weight_dtype=gguf.weight_dtype,
        kv_dtype=kv_dtype,
        speculation=speculation,
        hardware=start.hardware,
        num_gpus=start.num_gpus,
        read=command.written,
        without_effect=command.others,
        notes=[*dict.fromkeys(given.notes), *notes],
    )


def model_of(text: str) -> str:
    """The model's name of a path into a cache or of a URI."""
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+?)(?:/|$)", text)
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    return re.sub(r"^(?:hf|pvc|s3|gs)://", "", text)


# Files of options


def _add_file(said: _StatedOptions) -> str | None:
    """The options of the file that the command names, which its own words replace; the path of one
    that is not at hand."""
    path = said.given.shown(said.meanings["file"])
    text = said.given.file(path)
    if text is None:
        if said.given.folder is None:
            said.problems.append(
                f"the settings in {path[:SHOWN]} are not read here: magicdec check reads them"
            )
        else:
            said.problems.append(
                f"{path[:SHOWN]} is not here, so its settings, speculation too, are not known"
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


def _add_settings(said: _StatedOptions, values: Mapping[Any, Any]) -> None:
    """TensorRT-LLM's options file."""
    names = names_of("trtllm")
    known = names.keys["config"]
    options: dict[str, Any] = {}
    for key, value in values.items():
        name = text_of(key)
        if name not in known:
            said.unknown.append(name[:SHOWN])
            continue
        inner = names.keys.get(name)
        if inner is not None and isinstance(value, Mapping):
            for part in value:
                if text_of(part) not in inner:
                    said.unknown.append(f"{name}.{text_of(part)}"[:SHOWN])
        if name.replace("_", "-") in OPTIONS["trtllm"]:
            options[name] = value
            if value is None:
                options[name] = "null"
        else:
            said.without_effect.append(name)
    for name, value in options.items():
        meaning = OPTIONS["trtllm"][name.replace("_", "-")]
        said.meanings[meaning] = (
            json_of(value) if isinstance(value, Mapping) else text_of(value)
        )
        said.names[meaning] = name
        said.written[name] = said.meanings[meaning]


def _merge_nested(said: _StatedOptions) -> None:
    """TensorRT-LLM's nested settings as the meanings they have elsewhere."""
    if said.start.engine != "trtllm":
        return
    meanings = said.meanings
    cache = _object(meanings.get("cache"))
    if cache.get("dtype"):
        meanings["kv_dtype"] = text_of(cache["dtype"])
    if cache.get("enable_block_reuse") is False:
        meanings["prefixes"] = "false"
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


def _graphs(engine: str, meanings: Mapping[str, str]) -> str | None:
    """How much of a decoding step is one graph."""
    if meanings.get("eager") == "true":
        return "eager"
    if engine == "trtllm":
        if meanings.get("graphs") == "null" or meanings.get("graphed") == "false":
            return "none"
        return None
    if meanings.get("ungraphed") == "true" or meanings.get("graphs") == "disabled":
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


def _joined(before: str | None, given: str) -> str:
    """An option given in parts (--speculative-config.method ngram) as one object."""
    if before is None or not (before.startswith("{") and given.startswith("{")):
        return given
    if OPEN in before + given:  # asked for before it is taken apart
        return f"{before}{given}"
    return json.dumps(_json_object("option", before) | _json_object("option", given))


def _count(said: _StatedOptions, meaning: str) -> int | None:
    return _counted(said.meanings.get(meaning), said.names.get(meaning, meaning))


def _counted(text: str | None, option: str) -> int | None:
    """A whole number from 1 on; None: the option leaves it to the engine."""
    if text is None or text in ("auto", "null", "None", ""):
        return None
    try:
        value = parse_count(text)
    except ValueError:
        raise ConfigError(
            f"{option} must be a whole number, not '{text[:SHOWN]}'"
        ) from None
    if value < 1:
        raise ConfigError(f"{option} must be at least 1, not {value}")
    return value


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


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = bounded(json.loads, text)
    except ValueError:
        value = _without_quotes(text)
    if isinstance(value, dict):
        return value
    raise ConfigError(
        f"--{name} must be a JSON object, not {text[:SHOWN]}; {QUOTES_LOST}"
    )


def _without_quotes(text: str) -> Any:
    """A JSON object whose quotes a shell took away, as {method:ngram}; None: it is none."""
    if len(text) > MOST_OBJECT:
        return None
    words = []
    for word in re.findall(r'"[^"]*"|[{}\[\],:]|[^\s{}\[\],:"]+', text):
        is_json = word[0] in '"{}[],:' or isinstance(scalar(word), int | float | None)
        words.append(word if is_json else json.dumps(word))
    try:
        return bounded(json.loads, "".join(words))
    except ValueError:
        return None


# Speculation


def speculation_of(text: str) -> Speculation | None:
    """vLLM's --speculative-config; None: it drafts nothing. Raises ConfigError."""
    return _of_config(_json_object("speculative-config", text), [], [])


def _speculation(said: _StatedOptions) -> Speculation | None:
    meanings = said.meanings
    if "speculation" in meanings:
        text = meanings["speculation"]
        if text in ("null", "None", ""):
            return None
        config = _json_object("speculative-config", text)
        return _of_config(config, said.problems, said.unknown)
    if "algorithm" in meanings:
        return _of_sglang(said)
    if "draft" in meanings or "method" in meanings:
        draft = _draft(meanings.get("method", ""), meanings.get("draft"), said.problems)
        return Speculation(
            draft=draft,
            gamma=_count(said, "gamma"),
            checkpoint=meanings.get("draft"),
        )
    return None


def _of_sglang(said: _StatedOptions) -> Speculation:
    meanings = said.meanings
    method = meanings["algorithm"].lower()
    gamma = _count(said, "gamma")
    tree = _count(said, "tree")
    width = _count(said, "topk") or 1
    checkpoint = meanings.get("draft")
    if checkpoint is not None:
        checkpoint = model_of(checkpoint)
    draft = _draft(method, checkpoint, said.problems)
    contradiction = ""
    if gamma is None and tree is not None and width == 1 and tree > 1:
        gamma = tree - 1
    elif gamma and tree and width == 1 and tree != gamma + 1:
        contradiction = (
            f"{said.names['tree']} {tree} is not taken: with one branch SGLang verifies the "
            f"{gamma} drafted tokens and one more, {gamma + 1}"
        )
    shape = None
    if width > 1 and gamma:
        most = 1 + width + (gamma - 1) * width**2
        if tree is not None and tree > most:
            contradiction = (
                f"{said.names['tree']} {tree} is more than {gamma} steps of top-k {width} "
                f"give: {most}, the root included"
            )
        shape = TreeSpec(top_k=width, num_steps=gamma)
        gamma = max((tree or gamma + 1) - 1, 1)
    lossy = []
    for meaning in ("threshold_single", "threshold_acc"):
        threshold = scalar(meanings.get(meaning, "1"))
        is_number = isinstance(threshold, int | float) and threshold is not False
        if is_number and threshold < 1.0:
            lossy.append(f"{said.names[meaning]} {meanings[meaning]}")
    return Speculation(
        draft=draft,
        gamma=gamma,
        checkpoint=checkpoint,
        by_batch=meanings.get("adaptive") == "true",
        is_tree=width > 1,
        tree=shape,
        window=_count(said, "window"),
        lossy=lossy,
        contradiction=contradiction,
    )


def _of_config(
    config: Mapping[str, Any], problems: list[str], unknown: list[str]
) -> Speculation | None:
    """vLLM's --speculative-config."""
    checkpoint = config.get("model")
    if checkpoint is not None and not isinstance(checkpoint, str):
        raise ConfigError(f"the draft's model must be a name, not {checkpoint!r:.80}")
    if checkpoint is not None:
        checkpoint = model_of(checkpoint)
    method = str(config.get("method") or "").lower()
    table = config.get(TABLE_KEY)
    gamma = _whole(config, "num_speculative_tokens", least=0)
    if gamma is None and table:
        gamma = max(gamma for _, _, gamma in _bands(table))
    known = names_of("vllm").keys["speculative-config"] | KNOWN_KEYS
    for key in config:
        if key not in known:
            unknown.append(f"speculative-config.{key[:SHOWN]}")
    if gamma == 0:
        return None
    if gamma is None and method not in ("suffix", "mtp", "auto"):
        problems.append(
            "--speculative-config has no num_speculative_tokens; vLLM does not start"
        )
    ranks = _whole(config, "draft_tensor_parallel_size", least=1)
    draft = _draft(method, checkpoint, problems, is_told_by_name=True)
    if draft is not None and config.get("parallel_drafting") is True:
        draft = parallel_form(draft)
    return Speculation(
        draft=draft,
        gamma=gamma,
        checkpoint=checkpoint,
        tp_size=ranks,
        by_batch=bool(table) or bool(config.get("by_batch")),
        bands=_bands(table) if table else (),
        is_tree=bool(config.get("speculative_token_tree")),
        is_eager=config.get("enforce_eager") is True,
        lossy=_lossy(config),
    )


def _whole(config: Mapping[str, Any], key: str, *, least: int) -> int | None:
    """A whole number of a configuration; None: it has none."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} must be a whole number, not {value!r:.80}")
    return value


def _lossy(config: Mapping[str, Any]) -> list[str]:
    """Settings with which a draft is accepted that the target would not have given."""
    lossy = []
    method = str(config.get("rejection_sample_method") or "")
    if method in ("fly", "synthetic"):
        lossy.append(f'"rejection_sample_method": "{method}"')
    for key in (
        "posterior_threshold",
        "posterior_alpha",
        "typical_acceptance_sampler_posterior_threshold",
        "use_relaxed_acceptance_for_thinking",
    ):
        if config.get(key):
            lossy.append(f"{key}: {json.dumps(config[key])}")
    if config.get("acceptance_method") == "typical_acceptance_sampler":
        lossy.append('"acceptance_method": "typical_acceptance_sampler"')
    return lossy


def _bands(table: Any) -> tuple[tuple[int, int, int], ...]:
    """A table of gammas by batch: rows of (first batch, last batch, gamma)."""
    try:
        return tuple(
            (int(first), int(last), int(gamma)) for first, last, gamma in table
        )
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{TABLE_KEY} must be rows of first batch, last batch and gamma, not "
            f"{str(table)[:SHOWN]}"
        ) from None


TAKEN_FOR = (
    ("eagle-", "eagle"),
    ("eagle3", "eagle3"),
    ("dflash", "dflash"),
    ("dspark", "dspark"),
)
"""The method by which vLLM takes a head that is given without one: that of the first of these texts
in its model's name (vllm/config/speculative.py of 0.32)."""


def _draft(
    method: str,
    checkpoint: Any,
    problems: list[str],
    *,
    is_told_by_name: bool = False,
) -> str:
    """Our name of a draft. `is_told_by_name`: whether the engine finds the method of a head in its
    name, as vLLM does."""
    key = method.replace("-", "_")
    key = OF_A_HEAD.get(key, key)
    if key in DRAFT_NAMES:
        return DRAFT_NAMES[key]
    if key.endswith("_mtp"):
        return "mtp"
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
    if part is None:
        return checkpoint
    taken = ""
    if is_told_by_name:
        name = checkpoint.lower()
        taken = next((kind for text, kind in TAKEN_FOR if text in name), "")
    if not key and taken != part:
        takes = f", and vLLM takes this one for {taken}" if taken else ""
        problems.append(
            f"no method is given{takes}; by its name {checkpoint} is {part}"
        )
    return part
