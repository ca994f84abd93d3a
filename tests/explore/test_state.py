"""A link holds a state, a state is a request to the planner, and bad links are one-line errors."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError, MagicdecError
from magicdec.explore.controls import CONTROLS
from magicdec.explore.explorer import Explorer
from magicdec.explore.state import DRAFT_CHOICES, Catalog, link
from magicdec.schema.request import Request, request_options
from magicdec.specs.catalog import EMBEDDED_DIRECTORY
from magicdec.units import MILLI

CATALOG = Catalog.given()

models = [*CATALOG.suggestions("model")]
states = st.builds(
    Request,
    model=st.sampled_from(models),
    hardware=st.sampled_from([*CATALOG.suggestions("hardware")]).map(
        lambda name: (name,)
    ),
    tp_size=st.none() | st.integers(1, 64),
    batch_sizes=st.integers(1, 65_536).map(lambda count: (count,)),
    context_lens=st.integers(1, 2**20).map(lambda count: (count,)),
    draft=st.none() | st.sampled_from(models),
    draft_budgets=st.just(()) | st.integers(1, 10**6).map(lambda count: (count,)),
    gamma=st.none() | st.integers(0, 64),
    acceptance_rate=st.none() | st.floats(0, 1).map(lambda rate: round(rate, 6)),
    tpot_limit_s=st.none() | st.integers(1, 10**6).map(lambda number: number * MILLI),
    rate=st.none() | st.floats(0.01, 1e3).map(lambda rate: round(rate, 6)),
)


@given(states, st.none() | st.sampled_from(DRAFT_CHOICES))
def test_a_link_gives_back_its_state(state: Request, method: str | None) -> None:
    if state.draft is None:
        state = msgspec.structs.replace(state, draft_method=method)
    if state.rate is not None:
        state = msgspec.structs.replace(state, batch_sizes=(), ttft_p95_s=0.5)
    assert CATALOG.read(link(state)) == state


@given(st.text(max_size=60))
def test_any_query_is_a_state_or_an_error_of_the_users(query: str) -> None:
    with contextlib.suppress(MagicdecError):
        CATALOG.read(query)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("model=llama-3.1-8x", "did you mean llama-3.1-8b?"),
        ("hardware=h10", "did you mean "),
        ("draft=snapvk", "did you mean snapkv?"),
        ("bacth=3", "did you mean batch?"),
        ("batch=many", "a whole number like 64 or 32k, not 'many'"),
        ("batch=9999999999999999999999", "a whole number"),
        ("context=", "context must be given"),
        ("acceptance=high", "from 0 to 1"),
        ("model=/etc/passwd", "unknown model"),
    ],
)
def test_a_bad_link_says_what_is_wrong(query: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CATALOG.read(query)
    assert message in str(raised.value)


def test_values_are_read_as_the_command_line_reads_them() -> None:
    state = CATALOG.read(
        "hardware=a100&context=32k&gpus=8&temperature=0.5&draft_weight_dtype=fp8"
    )
    assert (state.hardware, state.context_lens, state.num_gpus) == (
        ("a100-sxm-80gb",),
        (32_768,),
        8,
    )
    assert (state.temperature, state.draft_weight_dtype) == (0.5, "fp8")
    assert CATALOG.read("rate=&batch=&p95_ttft_ms=500") == CATALOG.read("")


@pytest.mark.parametrize(
    "query",
    ["", "draft=streamingllm&budget=512&gamma=3", "acceptance=0.8&batch=16&tp=4"],
)
def test_the_command_line_shown_gives_the_same_plan(query: str) -> None:
    explorer = Explorer(CATALOG)
    register_commands()
    words = shlex.split(CATALOG.command(CATALOG.read(query)))
    done = CliRunner().invoke(app, [*words[1:], "--format", "json"])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == explorer.plan(query).to_json().strip()


def test_what_was_given_at_the_start_can_be_chosen_and_nothing_else_read() -> None:
    """A file's model is offered under its name; its path is no choice of a link."""
    directory = str(EMBEDDED_DIRECTORY)
    catalog = Catalog.given(model=directory)
    name = catalog.start.model
    assert name in catalog.suggestions("model")
    assert catalog.request(catalog.read("")).model == catalog.models[name]
    assert shlex.split(catalog.command(catalog.start))[:4] == [
        "magicdec",
        "plan",
        "--model",
        directory,
    ]
    with pytest.raises(ConfigError, match="unknown model"):
        catalog.read(f"model={directory}")


def test_profiles_go_only_with_what_they_were_given_with(tmp_path: Path) -> None:
    from magicdec.perfmodel.acceptance import constant_profile, save_profile

    path = tmp_path / "a.json"
    save_profile(
        constant_profile(0.9, model="llama-3.1-8b", draft_method="snapkv"), path
    )
    catalog = Catalog.given(
        model="llama-3.1-8b",
        hardware="l4-24gb",
        engine="magicdec-2024",
        acceptance=[str(path)],
    )
    own = catalog.request(catalog.read(""))
    assert own.engine is not None
    assert [each.draft_method for each in own.acceptance] == ["snapkv"]
    other = catalog.request(catalog.read("model=qwen3-8b&hardware=a100-sxm-80gb"))
    assert other.engine is None
    assert other.acceptance == ()


def test_every_control_is_an_option_and_every_method_one_of_the_planners() -> None:
    assert {control.option or name for name, control in CONTROLS.items()} <= set(
        request_options()
    )
    from magicdec.specs.speculation import DRAFT_METHODS

    assert set(DRAFT_CHOICES) <= set(DRAFT_METHODS)


def test_an_output_length_and_a_price_give_whole_requests_on_the_page() -> None:
    from magicdec.explore.explorer import Explorer

    explorer = Explorer(Catalog())
    query = "model=llama-3.1-8b&hardware=h100-sxm-80gb&tp=1&batch=8&context=8192&gen_len=200&price=2"
    best = explorer.plan(query).best
    _, _, page = explorer.answer(query)
    assert best.requests.request_s is not None
    assert f"{best.requests.request_s:.3g}" in page
    assert f"${best.cost.per_million_tokens_usd:.2f}" in page
    command = Catalog().command(Catalog().read(query))
    assert "--gen-len 200" in command
    assert "--price 2" in command
    assert "Whole request" not in explorer.answer(query.replace("&gen_len=200", ""))[2]
