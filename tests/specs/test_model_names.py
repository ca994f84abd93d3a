"""Models by the names that people have for them, held against configurations as published."""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from magicdec.errors import ConfigError, closest
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.specs import catalog, hub
from magicdec.specs.catalog import (
    MODELS_DIRECTORY,
    load_model_spec,
    model_names,
    model_shapes,
)
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.names import (
    FORMATS,
    checkpoint_of,
    model_name,
    named_models,
    names_file,
    resolve_name,
)
from scripts import names_table

POPULAR = (
    "meta-llama/Llama-3.3-70B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2.5-72B-Instruct",
    "Qwen/Qwen2.5-Coder-32B-Instruct",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-0.6B",
    "Qwen/QwQ-32B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.1",
    "deepseek-ai/DeepSeek-R1-0528",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "mistralai/Mistral-Small-24B-Instruct-2501",
    "mistralai/Mistral-Nemo-Instruct-2407",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "moonshotai/Kimi-K2-Thinking",
    "google/gemma-3-27b-it",
    "google/gemma-2-9b-it",
    "microsoft/phi-4",
    "zai-org/GLM-4.6",
    "zai-org/GLM-4.5-Air",
    "MiniMaxAI/MiniMax-M2",
)


def test_the_catalog_covers_150_models_each_with_a_source_and_a_shape() -> None:
    file = names_file()
    assert len(file.models) >= 150
    for name, row in file.models.items():
        assert row.source in file.sources, name
        assert row.source != "others" or row.note, name
        assert (row.shape or name) in model_shapes(), name
        assert all(checkpoint.count("/") == 1 for checkpoint in row.checkpoints), name
    assert set(model_shapes()) <= set(file.models)


def test_the_page_of_names_is_what_the_catalog_says() -> None:
    """Otherwise: python scripts/names_table.py"""
    page = names_table.PAGE.read_text(encoding="utf-8")
    assert page == names_table.page()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    models = [row for row in rows if len(row) == 7]
    assert len(models) >= 150
    for name, checkpoint, *_ in models:
        assert model_name(checkpoint) == name.strip("| `")
    devices = [row[0].strip("| `") for row in rows if len(row) == 6]
    assert [load_hardware(name).name for name in devices] == devices


def test_every_name_and_checkpoint_stands_for_its_model_alone() -> None:
    written: dict[str, set[str]] = defaultdict(set)
    for name, row in named_models().items():
        for text in (name, *row.checkpoints):
            assert resolve_name(text.upper()) == resolve_name(text), text
            assert model_name(text) == name
            written[text.rpartition("/")[2].lower()].add(name)
    assert all(len(models) == 1 for models in written.values())


@pytest.mark.parametrize("repository", POPULAR)
def test_a_popular_model_is_known_by_its_hub_name(repository: str) -> None:
    spec = load_model_spec(repository)
    owner, _, short = repository.partition("/")
    assert owner
    for text in (short, short.lower(), short.replace("-", "_")):
        assert load_model_spec(text) == spec
    assert checkpoint_of(repository) == repository


@pytest.mark.parametrize(
    ("text", "model", "dtype"),
    [
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b", "fp8_block"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "qwen2.5-72b", "int4"),
        (
            "hugging-quants/Meta-Llama-3.1-70B-Instruct-GPTQ-INT4",
            "llama-3.1-70b",
            "int4",
        ),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "qwen3-235b-a22b", "nvfp4"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b", "int8"),
        ("unsloth/Llama-3.3-70B-Instruct-bnb-4bit", "llama-3.3-70b", "int4"),
        ("unsloth/Qwen3-32B-unsloth-bnb-4bit", "qwen3-32b", "int4"),
        ("cpatonn/Qwen3-Coder-30B-A3B-AWQ-4bit", "qwen3-coder-30b-a3b", "int4"),
        ("ISTA-DASLab/gemma-3-27b-it-GPTQ-4b-128g", "gemma-3-27b", "int4"),
        ("amd/Llama-3.1-405B-Instruct-FP8-KV", "llama-3.1-405b", "fp8"),
        ("google/gemma-3-27b-it-qat-q4_0-unquantized", "gemma-3-27b", None),
        ("llama-3-1-8b-instruct", "llama-3.1-8b", None),
        ("unsloth/gpt-oss-120b-BF16", "gpt-oss-120b", None),
        ("openai/gpt-oss-120b", "gpt-oss-120b", "mxfp4"),
    ],
)
def test_a_suffix_sets_the_format_of_the_weights(
    text: str, model: str, dtype: str | None
) -> None:
    spec = load_model_spec(text)
    assert spec.name == model
    assert (spec.quantization and spec.quantization.weight_dtype) == dtype


def _of_gemma_4(*wide: str, num_layers: int) -> dict[str, Any]:
    group = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    return {
        "config_groups": {
            "group_0": {
                "input_activations": group,
                "weights": group,
                "targets": ["Linear"],
            }
        },
        "ignore": [
            "lm_head",
            "model.embed_vision*",
            *(
                f"model.language_model.layers.{layer}.{name}*"
                for layer in range(num_layers)
                for name in wide
            ),
            "model.vision_tower*",
        ],
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    }


PUBLISHED_BILLIONS = {
    "gemma-4-12b": (11.95, None),
    "gemma-4-31b": (30.7, None),
    "gemma-4-26b-a4b": (25.2, 3.8),
    "glm-4.7-flash": (30, None),
    "glm-5.2": (744, 40),
    "ling-3.0-flash": (124, 5.1),
    "minicpm3-4b": (4, None),
    "nemotron-3-super-120b-a12b": (120, 12),
}
"""Parameters, and those that a token passes through, as the publishers state them."""


@pytest.mark.parametrize(("name", "published"), PUBLISHED_BILLIONS.items())
def test_a_shape_has_the_size_that_its_publisher_states(
    name: str, published: tuple[float, float | None]
) -> None:
    spec = load_model_spec(name)
    num_parameters, active = published
    assert spec.num_parameters / 1e9 == pytest.approx(num_parameters, rel=0.025)
    if active is not None:
        assert spec.active_parameters / 1e9 == pytest.approx(active, rel=0.15)


PUBLISHED = {
    "Qwen/Qwen3-32B-FP8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "nvidia/Qwen3-235B-A22B-NVFP4": {
        "quant_method": "modelopt",
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"],
        },
    },
    "nvidia/Gemma-4-31B-IT-NVFP4": _of_gemma_4("self_attn", num_layers=60),
    "nvidia/Gemma-4-26B-A4B-IT-NVFP4": _of_gemma_4(
        "mlp", "router", "self_attn", num_layers=30
    ),
}
"""What these checkpoints' own files say (aiconfigurator-core 0.12.0, model_configs)."""


@pytest.mark.parametrize("repository", PUBLISHED)
def test_a_suffix_stands_for_what_the_checkpoint_publishes(repository: str) -> None:
    ours = load_model_spec(repository).quantization
    name = resolve_name(repository)
    assert name is not None
    assert ours is not None
    config = json.loads((MODELS_DIRECTORY / f"{name.model}.json").read_text())
    config["quantization_config"] = PUBLISHED[repository]
    theirs = model_from_hf_config(
        config, name="published", where="config.json"
    ).quantization
    assert theirs is not None
    assert (ours.mixer, ours.mlp, ours.experts, ours.head) == (
        theirs.mixer,
        theirs.mlp,
        theirs.experts,
        theirs.head,
    )


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_is_read_for_a_dense_model_and_for_one_of_experts(
    suffix: str,
) -> None:
    for model in ("llama-3.1-8b", "qwen3-30b-a3b"):
        assert load_model_spec(f"owner/{model}-{suffix}").name == model


def test_a_model_that_shares_a_shape_is_one_of_its_own() -> None:
    later, first = load_model_spec("llama-3.3-70b"), load_model_spec("llama-3.1-70b")
    assert later.layers == first.layers
    assert later.name != first.name
    assert load_model_spec("qwq-32b").longest_context == 131_072
    assert load_model_spec("mistral-small-3.2-24b").num_parameters == 23_572_403_200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "mistral-small",
            ["mistral-small-24b", "mistral-small-2409", "mistral-small-3.1-24b"],
        ),
        ("llama-3.1-9b", ["llama-3.1-8b"]),
        ("gpt-4", []),
        ("claude-opus", []),
    ],
)
def test_a_hint_names_the_closest_or_nothing(text: str, expected: list[str]) -> None:
    assert closest(text, model_names()) == expected


def test_a_model_of_the_local_hub_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache as the hub's client lays it out, with the client offline."""
    constants = pytest.importorskip("huggingface_hub.constants")
    commit = "0" * 40
    folder = tmp_path / "models--someone--MyModel-3B"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    config = (MODELS_DIRECTORY / "llama-3.2-3b.json").read_text()
    (folder / "snapshots" / commit / "config.json").write_text(config)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    # the client reads the variable once, when it is imported
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    spec = load_model_spec("someone/MyModel-3B")
    assert spec.name == "MyModel-3B"
    assert spec.layers == load_model_spec("llama-3.2-3b").layers


def test_a_model_that_nobody_has_says_what_to_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError,
        match=r"download https://huggingface.co/nobody/nothing/resolve/main/config.js",
    ):
        load_model_spec("nobody/nothing")


@pytest.mark.parametrize(
    ("repository", "model", "weights"),
    [
        ("someone/Qwen3.6-27B-Text-NVFP4-MTP", "qwen3.6-27b", "nvfp4"),
        ("someone/Qwen3.6-35B-A3B-int4-mixed-AutoRound", "qwen3.6-35b-a3b", "int4"),
        ("someone/Qwen3.8-27B-W4A16-G32", "qwen3.8-27b", "w4a16"),
        ("someone/Qwen3.6-27B-AWQ-6Bit", None, ""),
        ("someone/Qwen3.6-27B-tuned", None, ""),
    ],
)
def test_a_quantised_repository_that_cannot_be_read_is_known_by_its_names_parts(
    monkeypatch: pytest.MonkeyPatch, repository: str, model: str | None, weights: str
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if model is None:
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_model_spec(repository)
        return
    spec = load_model_spec(repository)
    assert spec.layers == load_model_spec(model).layers
    assert spec.assumed is not None
    assert f"by its name it is {model} in {weights}" in spec.assumed


def test_a_path_is_no_hub_name() -> None:
    assert hub.is_hub_name("owner/model")
    assert not hub.is_hub_name("./owner/model")
    assert not hub.is_hub_name("missing/config.json")
    assert not hub.is_hub_name("plain")


def test_drafts_of_a_model_have_its_tokenizer() -> None:
    """Falcon's vocabulary has the size of Mistral's, open-llama's that of Llama 2."""
    small = catalog.models_that_may_draft(load_model_spec("mistral-small-24b"))
    assert "ministral-3-3b" in small
    assert not any(name.startswith("falcon") for name in small)
    assert "open-llama-3b" not in catalog.models_that_may_draft(
        load_model_spec("llama-2-70b")
    )
    assert (
        catalog.models_that_may_draft(load_model_spec("qwen3-32b"))[0] == "qwen3-0.6b"
    )


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/caches"},
        {"HF_HOME": "~/home", "XDG_CACHE_HOME": "/caches"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/home"},
        {"HF_HUB_CACHE": "$HOME/new", "HUGGINGFACE_HUB_CACHE": "/old"},
    ],
)
def test_the_cache_is_where_the_client_has_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`constants` of a client that was imported with the same variables."""
    constants = pytest.importorskip("huggingface_hub.constants")
    source = Path(constants.__file__)
    for name in (
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_HOME",
        "XDG_CACHE_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spec = spec_from_file_location("huggingface_hub.constants_again", source)
    assert spec is not None
    assert spec.loader is not None
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    assert hub._cache_directory() == Path(again.HF_HUB_CACHE)


@pytest.mark.parametrize(
    "name",
    [
        "google/gemma-4-E2B-it",
        "gemma-4-e4b",
        "deepseek-ai/DeepSeek-V4-Flash",
        "minimax-m3",
        "moonshotai/Kimi-K3",
        "Qwen/Qwen3.8-Flash-Next",
    ],
)
def test_a_model_of_layers_that_are_not_modelled_is_no_other(name):
    """No nearest name is given for it, and the hub is not asked."""
    with pytest.raises(ConfigError, match="is not covered") as caught:
        load_model_spec(name)
    assert "did you mean" not in str(caught.value)


def test_a_config_of_layers_that_are_not_modelled_says_what_they_are(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    with pytest.raises(
        ConfigError, match=r"not covered \(attention to compressed keys"
    ):
        load_model_spec(str(tmp_path))
