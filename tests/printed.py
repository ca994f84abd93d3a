"""What is printed for others to run, read as an engine's version would: an independent reader of its list
of options, of JSON, YAML and a shell's words."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

OPTIONS = Path(__file__).parents[1] / "magicdec/specs/data/options"
OPTION = re.compile(r"--?[A-Za-z][\w-]*(?:\.[\w.]+)?$")
NESTED = ("speculative-config", "compilation-config")
FILE_KEYS = {
    "speculative_config": {
        "decoding_type", "max_draft_len", "speculative_model", "num_nextn_predict_layers", "draft_len_schedule",
        "max_matching_ngram_size", "allow_advanced_sampling",
    },
    "cuda_graph_config": {"enable_padding", "max_batch_size"},
    "kv_cache_config": {"dtype", "enable_block_reuse"},
}  # fmt: skip
"""Keys within TensorRT-LLM's file that are written (tensorrt_llm/llmapi/llm_args.py)."""


@cache
def document(engine: str) -> dict[str, Any]:
    return tomllib.loads((OPTIONS / f"{engine}.toml").read_text())


def in_version(groups: dict[str, Any], version: str) -> list[Any]:
    """Groups of a list that hold for a version; an unlisted one has all."""
    is_listed = any(version in name.split() for name in groups)
    return [
        group
        for name, group in groups.items()
        if name == "all" or not is_listed or version in name.split()
    ]


@cache
def known_options(engine: str, version: str) -> dict[str, str]:
    """Names by kind: flag, value or list."""
    known = {}
    for by_kind in in_version(document(engine)["options"], version):
        for kind, names in by_kind.items():
            known |= dict.fromkeys(names, kind)
    return known


@cache
def known_keys(option: str, version: str) -> frozenset[str]:
    groups = document("vllm")["keys"][option]
    return frozenset().union(*in_version(groups, version))


def newest_with(engine: str, options: Iterable[str]) -> str:
    """The newest listed version that has a command's options; "": none."""
    for version in reversed(document(engine)["versions"]):
        known = known_options(engine, version)
        names = {option.lstrip("-").replace("_", "-") for option in options}
        if engine != "trtllm" and names <= set(known):
            return str(version)
    return ""


def faults_of_words(engine: str, version: str, words: Sequence[str]) -> Iterator[str]:
    """Options that the version lacks, or whose value it cannot read, as argparse takes them."""
    known = known_options(engine, version)
    if (engine, version) == ("vllm", "0.11.0"):  # of which no list is kept
        known = known | {"cuda-graph-sizes": "list"}
        known.pop("max-cudagraph-capture-size")
    if engine == "llama.cpp" and version.isdecimal() and 2026 < int(version) < 9070:
        known = known | {"draft-max": "value"}  # of which no list is kept
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not OPTION.match(word):
            yield f"{word}: no option"
            continue
        name = word.lstrip("-").replace("_", "-")
        names = [name] if name in known else []
        if not names and engine != "llama.cpp":
            names = [one for one in known if one.startswith(name)]
        bare = name.removeprefix("no-")
        if not names and known.get(bare) == "flag":
            names = [bare]
        if len(names) != 1:
            yield f"{word}: {'ambiguous' if names else 'unknown'} in {engine} {version}"
            continue
        values = []
        while place < len(words) and not OPTION.match(words[place]):
            values.append(words[place])
            place += 1
        if "" in values:
            yield f"{word} has no value"
        kind = known[names[0]]
        if (kind == "flag" and values) or (kind == "value" and len(values) != 1):
            yield f"{word} {values}: is a {kind}"
        if engine == "vllm" and names[0] in NESTED:
            for key in set(json.loads(values[0])) - known_keys(names[0], version):
                yield f"{names[0]}.{key}: unknown in vLLM {version}"
    if engine == "sglang":
        yield from faults_of_sglang(words)


def faults_of_sglang(words: Sequence[str]) -> Iterator[str]:
    """What SGLang's hooks refuse or ignore (arg_groups/speculative_hook.py)."""
    given = dict(zip(words, [*words[1:], ""], strict=True))
    algorithm = given.get("--speculative-algorithm", "")
    steps = given.get("--speculative-num-steps")
    tokens = given.get("--speculative-num-draft-tokens")
    if steps and tokens and int(tokens) != int(steps) + 1:
        yield f"{tokens} draft tokens of {steps} steps"
    block = re.search(r"block(\d+)", given.get("--speculative-draft-model-path", ""))
    if algorithm == "DSPARK" and block and tokens and int(tokens) != int(block[1]) + 1:
        yield f"{tokens} draft tokens of a block of {block[1]}"
    if "--speculative-use-rejection-sampling" in words and algorithm != "EAGLE":
        yield f"rejection sampling with {algorithm}"
    if "--speculative-adaptive" in words:
        if "--speculative-adaptive-config" not in words:
            yield "adaptive by its own table"
        if "--enable-dp-attention" in words or algorithm not in ("", "EAGLE", "EAGLE3"):
            yield "adaptive is turned off here"


def faults_of_file(text: str) -> Iterator[str]:
    """TensorRT-LLM's file: YAML of known keys."""
    settings = yaml.safe_load(text)
    if not isinstance(settings, dict):
        yield f"{text!r}: no mapping"
        return
    known = set().union(*document("trtllm")["keys"]["config"].values())
    for key, value in settings.items():
        if key not in known:
            yield f"{key}: unknown in TensorRT-LLM"
        if isinstance(value, dict):
            for inner in set(value) - FILE_KEYS[key]:
                yield f"{key}.{inner}: unknown in TensorRT-LLM"
    draft = settings.get("speculative_config", {})
    modules = draft.get("num_nextn_predict_layers")
    if modules is not None and modules != draft.get("max_draft_len"):
        yield "two lengths of one draft"
    if "draft_len_schedule" in draft:
        schedule = draft["draft_len_schedule"]
        if not all(isinstance(key, int) for key in schedule) or 1 not in schedule:
            yield f"draft_len_schedule {schedule}"


def faults_of_shell(text: str) -> Iterator[str]:
    """A script's syntax, by bash."""
    read = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, check=False
    )
    if read.returncode:
        yield read.stderr


def faults_of_export(engine: str, version: str, text: str) -> list[str]:
    """What an engine's version does not take of an exported text."""
    faults = []
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if line.startswith("# Serve with:"):
            command = lines[place + 1].lstrip("# ")
            faults += faults_of_shell(command)
            words = shlex.split(command)
            start = words.index("trtllm-serve")
            faults += faults_of_words(engine, version, words[start + 2 :])
        if "gamma.json:" in line:
            table = json.loads(lines[place + 1].lstrip("# "))
            for batch, entry in table.items():
                if not batch.isdecimal() or list(entry) != ["candidate_steps"]:
                    faults.append(f"gamma.json: {batch} {entry}")
    body = "".join(f"{line}\n" for line in lines if not line.startswith("#"))
    if engine == "trtllm":
        return faults + (list(faults_of_file(body)) if body else [])
    faults += faults_of_shell(body)
    words = shlex.split(body.replace("\\\n", " "))
    first = next(place for place, word in enumerate(words) if word.startswith("--"))
    return [*faults, *faults_of_words(engine, version, words[first:])]


def faults_of_advice(engine: str, version: str, option: str, command: str) -> list[str]:
    """What an engine's version does not take of an advised setting; `command`: the one advised on."""
    setting, _, remark = option.partition(" (")
    if remark.startswith("gamma.json: "):
        json.loads(remark.removeprefix("gamma.json: ").removesuffix(")"))
    for leave_out in ("leave out ", "leave "):
        if setting.startswith(leave_out):
            names = re.findall(r"--[\w-]+|\"\w+\"|(?<=\s)-\w+", setting)
            lacking = [
                name
                for name in names
                if name not in command
                and name.replace("-", "_") not in command
                and name.lstrip("-").replace("-", "_") not in command
            ]
            return [f"{name} is not there to leave out" for name in lacking]
    if engine == "trtllm" and not setting.startswith("-"):
        return list(faults_of_file(setting))
    faults = list(faults_of_shell(setting))
    return faults or list(faults_of_words(engine, version, shlex.split(setting)))
