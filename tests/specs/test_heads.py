"""The table of published heads, and what a head's name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magicdec.naming import head_named_in
from magicdec.perfmodel.acceptance.belief import fitted_belief
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.heads import (
    facts_of,
    listed_as,
    published_heads,
    target_named_in,
)
from magicdec.specs.names import named_models

NOT_HEADS = {
    "amd/PARD-Llama-3.2-1B",  # draft models that a catalog's target shares a vocabulary with
    "amd/PARD-Qwen3-0.6B",
    "AngelSlim/Fun-CosyVoice3_eagle3",  # of speech and pages, which no plan is for
    "AngelSlim/HunyuanOCR_eagle3",
    "AngelSlim/Qwen2-Audio_eagle3",
}


def test_every_row_has_the_shape_of_its_target_and_a_source() -> None:
    for head in published_heads():
        assert head.source.startswith("https://"), head.checkpoint
        if head.target in named_models():
            target = load_model_spec(head.target)
            shape = (target.hidden_size, target.vocab_size)
            assert (head.hidden_size, head.vocab_size) == shape, head.checkpoint


def test_the_table_has_every_checkpoint_that_acceptance_is_believed_of() -> None:
    listed = {head.checkpoint for head in published_heads()}
    known = fitted_belief().coefficients.checkpoints
    believed = {name for name, _ in known.values()}
    models = {head for head in believed if head_named_in(head) is None} - listed
    assert believed - listed - NOT_HEADS - models == set()
    assert models <= NOT_HEADS | {
        checkpoint for row in named_models().values() for checkpoint in row.checkpoints
    }


NAMED_OTHERWISE = (
    "vllm-ascend/Qwen3-30B-A3B-vwn-eagle-model",  # an EAGLE-3
    "meta-models/Muse-Glimmer-30B-assistant",  # a DFlash
    "lightseekorg/kimi-k2.7-coder-eagle3.1-mla",  # of Kimi-K2.7-Code
    "Tengyunw/qwen3_30b_moe_eagle3",  # of Qwen3-30B-A3B
)


def test_names_tell_what_the_table_says() -> None:
    """The names of heads outside of the table are read by the same rules."""
    for head in published_heads():
        if head.target in named_models() and head.checkpoint not in NAMED_OTHERWISE:
            assert target_named_in(head.checkpoint) == head.target
        if head.checkpoint not in NAMED_OTHERWISE:
            assert head_named_in(head.checkpoint) == head.method


@pytest.mark.parametrize(
    ("checkpoint", "method", "target"),
    [
        ("someone/EAGLE3-Qwen3-32B-tuned", "eagle3", "qwen3-32b"),
        ("someone/llama_3.1_8b_instruct_eagle-3", "eagle3", "llama-3.1-8b"),
        ("someone/EAGLE-Llama-3.2-3B", "eagle", "llama-3.2-3b"),
        ("someone/gpt-oss-20b-peagle", "p-eagle", "gpt-oss-20b"),
        ("eagle3-lab/some-adapter", None, None),
        ("someone/EAGLE-3B", "eagle", None),
    ],
)
def test_a_name_tells_the_kind_of_head_and_its_target(
    checkpoint: str, method: str | None, target: str | None
) -> None:
    facts = facts_of(checkpoint, reads_files=False)
    assert (facts.method, facts.target) == (method, target)


def test_a_configuration_at_hand_goes_before_the_table_and_the_name(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "EAGLE-Qwen3-8B"
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 5120,
        "vocab_size": 151_936,
        "draft_vocab_size": 32_000,
        "num_attention_heads": 40,
    }
    (directory / "config.json").write_text(json.dumps(config))
    facts = facts_of(str(directory))
    assert (facts.method, facts.hidden_size) == ("eagle3", 5120)
    assert facts.vocab_size == 151_936
    named = facts_of(str(directory), reads_files=False)
    assert (named.method, named.hidden_size) == ("eagle", 4096)


def test_a_block_bounds_the_drafts_of_a_step(tmp_path: Path) -> None:
    """The first position of a block is the pending token's; in DSpark it proposes one, too."""
    config = {"hidden_size": 64, "vocab_size": 100, "block_size": 8}
    for architecture, most in (("DSparkModel", 8), ("DFlashModel", 7)):
        path = tmp_path / architecture
        path.mkdir()
        (path / "config.json").write_text(
            json.dumps(config | {"architectures": [architecture]})
        )
        assert facts_of(str(path)).most_drafts == most


@pytest.mark.parametrize(
    ("checkpoint", "listed"),
    [
        ("/models/Qwen3.8-27B-DFlash2-Q8_0.gguf", "z-lab/Qwen3.8-27B-DFlash2"),
        (
            "/weights/EAGLE3-LLaMA3.1-Instruct-8B",
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        ),
        ("angelslim/qwen3-14b_eagle3", "AngelSlim/Qwen3-14B_eagle3"),
        ("/models/head", None),
    ],
)
def test_a_copy_of_a_listed_head_is_known_by_its_name(
    checkpoint: str, listed: str | None
) -> None:
    assert listed_as(checkpoint) == listed
