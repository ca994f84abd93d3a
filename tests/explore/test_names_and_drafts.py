"""Names on the page are those of `plan`: the catalog's, checkpoints of the hub, so many devices; and only drafts are
offered that can exist.
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from test_http import get

import magicdec
from magicdec.errors import ConfigError
from magicdec.explore.controls import CONTROLS, MAIN
from magicdec.explore.server import ExplorerServer
from magicdec.explore.state import DRAFT_CHOICES, Catalog, link
from magicdec.perfmodel.kernels.profile import hardware_aliases
from magicdec.schema.request import request_options
from magicdec.specs.names import named_models, resolve_name

CATALOG = Catalog.given()


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("h100", "h100-sxm-80gb"),
        ("4xh100", "4xh100-sxm-80gb"),
        ("2x8xh200", "2x8xh200-sxm-141gb"),
        ("H100:8", "8xh100-sxm-80gb"),
        ("b200=5", "b200-sxm-192gb=5"),
        ("2xb200=5.5", "2xb200-sxm-192gb=5.5"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
    ],
)
def test_devices_are_read_as_plan_reads_them(typed: str, kept: str) -> None:
    query = f"hardware={typed.replace(' ', '+')}"
    state = CATALOG.read(query)
    assert state.hardware == (kept,)
    assert CATALOG.read(link(state)) == state


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama-3.1-8b-instruct",
        "Qwen/Qwen2.5-72B-Instruct-AWQ",
        "openai/gpt-oss-120b",
    ],
)
def test_a_checkpoint_is_a_model(name: str) -> None:
    assert CATALOG.read(f"model={name}").model == name


@pytest.mark.parametrize(
    "query",
    [
        "model=nobody/knows-this",
        "model=/etc/passwd",
        "model=../../etc",
        "model=x.toml",
        "hardware=/etc/passwd",
        "hardware=local.toml",
        "hardware=4x/etc/passwd",
        "draft=/etc/passwd",
        "requests=/etc/passwd",
        "requests=0123456789abcdef-..%2Fx.csv",
        "requests=0123456789abcdef-x.csv",
    ],
)
def test_no_link_names_a_file(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a file was opened")

    for name in ("open", "read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, refused)
    with pytest.raises(ConfigError) as raised:
        CATALOG.read(query)
    assert "\n" not in str(raised.value)


def test_a_directory_of_a_models_name_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is a file here"):
        CATALOG.read("model=Qwen/Qwen3-8B")


def test_every_model_device_and_alias_is_suggested() -> None:
    models = CATALOG.suggestions("model")
    for name, row in named_models().items():
        assert set(row.checkpoints) <= set(models[name].split(", ")) or name in (
            CATALOG.start.model,
        )
        for checkpoint in row.checkpoints:
            resolved = resolve_name(checkpoint)
            assert resolved is not None
    devices = CATALOG.suggestions("hardware")
    for alias, name in hardware_aliases().items():
        assert alias in (name, *devices[name].split(", "))


def test_the_page_carries_the_names_for_typing_ahead(server: ExplorerServer) -> None:
    text = get(server, "/?context=1024&batch=4")[1]
    listed = re.search(r'<datalist id="names-model">(.*?)</datalist>', text, re.DOTALL)
    assert listed is not None
    values = re.findall(r'<option value="([^"]+)">([^<]*)<', listed[1])
    assert dict(values)["qwen2.5-72b"] == "Qwen/Qwen2.5-72B-Instruct"
    assert len(values) >= 150


@pytest.mark.parametrize(
    ("query", "has", "lacks"),
    [
        ("model=deepseek-v3&hardware=8xb200", {"mtp", "ngram"}, {"eagle3", "full"}),
        ("model=llama-3.1-8b", {"eagle3", "llama-3.2-1b"}, {"mtp", "qwen3-0.6b"}),
        ("model=gpt-oss-120b&engine=sglang", {"eagle3"}, {"streamingllm", "suffix"}),
        ("model=Qwen/Qwen3-32B", {"qwen3-0.6b"}, {"mtp", "llama-3.2-1b"}),
    ],
)
def test_only_drafts_that_can_exist_are_offered(
    server: ExplorerServer, query: str, has: set[str], lacks: set[str]
) -> None:
    offered = json.loads(get(server, f"/drafts?{query}")[1])
    assert set(offered) >= has
    assert not set(offered) & lacks
    assert len(offered) == len(set(offered))


@pytest.mark.parametrize(
    "query",
    [
        "model=deepseek-v3&hardware=8xb200&context=4096&batch=8",
        "model=qwen3-32b&hardware=2xh100&context=4096&batch=8",
        "model=gpt-oss-120b&hardware=h100&engine=sglang&context=4096&batch=8",
    ],
)
def test_every_offered_draft_can_be_asked_for(
    server: ExplorerServer, query: str
) -> None:
    """Each gives an answer, or says what acceptance it lacks; none is refused as impossible."""
    for draft in json.loads(get(server, f"/drafts?{query}")[1]):
        status, text = get(server, f"/answer?{query}&draft={draft}")
        assert status == 200, (draft, text)


def test_a_chosen_draft_stays_in_the_list_with_its_error(
    server: ExplorerServer,
) -> None:
    status, text = get(server, "/?model=qwen3-8b&draft=llama-3.2-1b&context=1024")
    assert status == 400
    assert "a draft needs its target" in unescape(text)
    assert "llama-3.2-1b" in json.loads(
        get(server, "/drafts?model=qwen3-8b&draft=llama-3.2-1b&context=1024")[1]
    )


def test_every_number_and_switch_of_a_plan_is_a_control() -> None:
    """An option that plan_request gains is on the page by itself."""
    shown = {control.option or name for name, control in CONTROLS.items()}
    for name, option in request_options().items():
        is_number = option.is_whole or option.kind in (bool, float, float | None)
        if is_number:
            assert name in shown
    assert {"task", "rate", "ttft_ms", "p95_tpot_ms", "requests"} <= set(MAIN)
    files = {"acceptance", "workload", "draft_model"}
    assert not files & shown
    assert set(DRAFT_CHOICES) & set(CATALOG.drafts(CATALOG.start))


def test_switches_and_shares_reach_the_planner(server: ExplorerServer) -> None:
    query = "hardware=h100&context=4096&batch=8&plugin=yes&cached=50%25&top_p=0.9"
    document = json.loads(get(server, f"/plan.json?{query}")[1])
    asked = magicdec.plan(
        hardware="h100-sxm-80gb",
        context=4096,
        batch=8,
        plugin=True,
        cached="50%",
        top_p=0.9,
    )
    assert document == json.loads(asked.to_json())
    assert get(server, "/answer?plugin=maybe")[0] == 400
