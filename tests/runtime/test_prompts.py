"""Prompts from the standard library, from files, and random ones."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer, models, pre_tokenizers

from magicdec.errors import CheckpointError, ConfigError
from magicdec.runtime.prompts import (
    PromptRequest,
    is_held_out,
    load_prompts,
    load_tokenizer,
    stdlib_documents,
)


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_held_out_rule_is_a_fixed_property_of_the_path() -> None:
    """The split must never change: the shipped weights were trained under it."""
    files = (
        "abc.py",
        "ast.py",
        "heapq.py",
        "json/decoder.py",
        "pydoc.py",
        "random.py",
        "socket.py",
    )
    assert [p for p in files if is_held_out(p)] == ["ast.py", "pydoc.py", "random.py"]
    held_out, training = (
        list(stdlib_documents(held_out=True)),
        list(stdlib_documents(held_out=False)),
    )
    assert not set(held_out) & set(training)
    assert 0.03 < len(held_out) / (len(held_out) + len(training)) < 0.2


def test_lengths_are_spread_and_end_at_the_context() -> None:
    request = PromptRequest(count=5, context_len=1000, context_spread=0.2)
    assert request.lengths == [800, 850, 900, 950, 1000]


@pytest.mark.parametrize("source", ["stdlib", "recall", "random"])
def test_prompts_have_the_asked_lengths_and_repeat_with_the_seed(
    source: str, byte_tokenizer: Tokenizer
) -> None:
    request = PromptRequest(
        source=source, count=3, context_len=600, context_spread=0.5, seed=4
    )
    prompts = load_prompts(request, tokenizer=byte_tokenizer, vocab_size=256)
    assert [len(p) for p in prompts] == request.lengths
    assert prompts == load_prompts(request, tokenizer=byte_tokenizer, vocab_size=256)
    assert all(0 <= t < 256 for p in prompts for t in p)


def test_calibration_prompts_share_no_text_with_measured_ones(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(
        "".join(chr(33 + i % 90) + str(i) for i in range(3000))
    )
    requests = [
        PromptRequest(source=str(tmp_path), count=2, context_len=2000, calibration=c)
        for c in (False, True)
    ]
    measured, calibration = (
        load_prompts(r, tokenizer=byte_tokenizer, vocab_size=256) for r in requests
    )
    chunks = {tuple(p[i : i + 40]) for p in measured for i in range(len(p) - 40)}
    assert not any(
        tuple(p[i : i + 40]) in chunks for p in calibration for i in range(len(p) - 40)
    )


def test_recall_prompt_ends_with_a_passage_of_its_first_half(
    byte_tokenizer: Tokenizer,
) -> None:
    request = PromptRequest(source="recall", count=1, context_len=2000)
    prompt = load_prompts(request, tokenizer=byte_tokenizer, vocab_size=256)[0]
    cue = prompt[-24:]
    starts = [i for i in range(1000) if prompt[i : i + 24] == cue]
    assert starts


def test_unusable_sources_are_one_line_errors(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "b.bin"
    short.write_text("tiny")
    binary.write_bytes(b"\xff\xfe\x00")
    refused = {
        "stdlb": "did you mean stdlib",
        str(short): "context of at most 4",
        str(binary): "not UTF-8",
    }
    for source, message in refused.items():
        request = PromptRequest(source=source, count=1, context_len=10)
        with pytest.raises(ConfigError, match=message):
            load_prompts(request, tokenizer=byte_tokenizer, vocab_size=256)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path, vocab_size=256)
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="do not belong together"):
        load_tokenizer(tmp_path, vocab_size=100)


@pytest.mark.slow
def test_snapkv_beats_streamingllm_on_a_recalled_passage() -> None:
    """At equal budget, on held-out text that repeats a passage from at least 2000 tokens back: the embedded model shows
    what selecting by attention is for."""
    from tests.runtime.recall import forced_text, measure

    _, snapkv, widely_pooled = measure(
        forced_text(12, 2600, 40, is_repeated=True), 40, [512]
    )
    assert snapkv["gain"] > 0
    assert widely_pooled["gain"] > 2 * widely_pooled["gain_standard_error"]
