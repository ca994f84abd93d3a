"""A server that follows all of its advice, option by option as it is written, is advised nothing more."""

from __future__ import annotations

import json
import random
import shlex

import pytest

from magicdec.live.change import Change
from magicdec.live.check import Check, check_command
from magicdec.live.load import AskedLoad
from magicdec.specs.serve_command import read_serve_command


def checked(words: list[str], load: AskedLoad) -> Check:
    return check_command(read_serve_command(shlex.join(words)), load)


def without(words: list[str], option: str) -> list[str]:
    """The words without an option and its value, or without a variable."""
    kept = []
    skips = False
    for number, word in enumerate(words):
        follows = words[number + 1] if number + 1 < len(words) else ""
        name = word.partition("=")[0]
        if skips:
            skips = False
            continue
        if option in (word, name):
            skips = "=" not in word and word.startswith("-") and not follows.startswith("-")  # fmt: skip
            continue
        kept.append(word)
    return kept


def with_option(words: list[str], setting: str) -> list[str]:
    """The words with a setting: "--x 3 --y 4", "leave out --z"; what stands in brackets is left out too."""
    setting, _, bracket = setting.partition(" (leave out ")
    if bracket:
        words = without(words, bracket.rstrip(")").split()[0])
    given = shlex.split(setting)
    if given[:2] == ["leave", "out"]:
        return without(words, given[2])
    if given[0] == "leave":  # a key of a configuration
        place = words.index(given[-1]) + 1
        config = json.loads(words[place])
        del config[given[1]]
        return [*words[:place], json.dumps(config), *words[place + 1 :]]
    if given[0] in ("--speculative-config", "--speculative-algorithm"):
        for name in [word for word in words if word.startswith("--spec")]:
            words = without(words, name)
    for name in given:
        if name.startswith("--"):
            words = without(words, name)
    return [*words, *given]


def followed(words: list[str], changes: list[Change]) -> list[str]:
    """All changes of this load made; of several ways to draft the one that gains most."""
    ways = []
    for change in changes:
        if not change.is_here:
            continue
        if change.change.startswith(("Draft ", "Do not speculate", "Speculate ")):
            ways.append(change)
        else:
            words = with_option(words, change.option)
    if ways:
        most = max(ways, key=lambda way: way.gain or 0.0)
        words = with_option(words, most.option)
    return words


MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "Qwen/Qwen3-8B": "AngelSlim/Qwen3-8B_eagle3",
    "Qwen/Qwen3-32B": "RedHatAI/Qwen3-32B-speculator.eagle3",
}


def drawn(seed: int) -> tuple[list[str], AskedLoad]:
    """A server of vLLM or SGLang with some settings that cost, or none, and a load."""
    draws = random.Random(seed)
    model = draws.choice(list(MODELS))
    tp = draws.choice(["1", "2"]) if "32B" not in model else "2"
    batch = draws.choice([1, 4, 16, 32, 64])
    load = AskedLoad(
        hardware=draws.choice(["h100", "h200", "a100-80gb"]),
        batch=batch,
        context_len=draws.choice([1024, 4096, 16384]),
        gen_len=draws.choice([0, 0, 256]),
        task=draws.choice([None, None, "chat", "code"]),
    )

    def some(*words: str) -> list[str]:
        return [*words] if draws.random() < 0.3 else []

    gamma = draws.choice([1, 2, 3, 5, 7])
    kind = draws.choice(["none", "ngram", "eagle3", "eagle3"])
    if draws.random() < 0.6:
        config = {"method": kind, "num_speculative_tokens": gamma}
        if kind == "eagle3":
            config |= {"model": MODELS[model]}
            if draws.random() < 0.2:
                config |= {"enforce_eager": True}
        words = ["vllm", "serve", model, "--tensor-parallel-size", tp]
        words += some("--enforce-eager")
        words += some("--no-async-scheduling")
        words += some("--max-num-batched-tokens", draws.choice(["512", "2048"]))
        words += some("--max-num-seqs", draws.choice(["4", "512"]))
        words += some("--max-cudagraph-capture-size", "64")
        words += some("--no-enable-prefix-caching")
        words += some("--disable-custom-all-reduce")
        if kind != "none":
            words += ["--speculative-config", json.dumps(config)]
        return words, load
    words = ["python", "-m", "sglang.launch_server", "--model-path", model, "--tp", tp]  # fmt: skip
    words += some("--disable-cuda-graph")
    words += some("--disable-overlap-schedule")
    words += some("--cuda-graph-max-bs", "8")
    words += some("--chunked-prefill-size", "1024")
    words += some("--max-running-requests", "4")
    words += some("--disable-radix-cache")
    if kind == "eagle3":
        words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", MODELS[model]]  # fmt: skip
        words += ["--speculative-num-steps", str(gamma), "--speculative-eagle-topk", "1"]  # fmt: skip
        words += ["--speculative-num-draft-tokens", str(gamma + 1)]
    return words, load


@pytest.mark.parametrize("seed", range(6))
def test_all_advice_followed_leaves_none(seed: int) -> None:
    words, load = drawn(seed)
    result = checked(words, load)
    assert not result.problems
    for change in result.changes:
        assert change.is_advice
    again = checked(followed(words, result.changes), load)
    assert again.first is None, (words, load, result.changes, again.first)
