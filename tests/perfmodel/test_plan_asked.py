"""What a plan's request means: devices and layouts against memory, drafts against the kinds that there are, and
acceptances against what was given."""

from __future__ import annotations

import dataclasses
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import MeasuredProfile, default_profile
from magicdec.perfmodel.acceptance.law import Law
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.perfmodel.plan import drafts, request, standing
from magicdec.perfmodel.plan.request import DeviceGroups, PlanRequest, layouts
from magicdec.specs.catalog import load_model_spec, models_that_may_draft
from magicdec.specs.engine import load_engine
from magicdec.specs.parallel import Parallelism, valid_tp_sizes
from magicdec.specs.speculation import (
    DRAFT_METHODS,
    HEAD_METHODS,
    LOOKUP_METHODS,
    OWN_METHOD,
    SELF,
    SPARSE_METHODS,
    HeadSpec,
)
from tests.perfmodel.cases import asked, case_of, drafts_of, ways_of

LLAMA = load_model_spec("llama-3.1-8b")
VLLM = load_engine("vllm")
STREAMING = MeasuredProfile(
    model="llama-3.1-8b", draft_method="streamingllm", source="a",
    law=Law(rejection=0.2, budget_exponent=0.4, fill_exponent=0.5),
)  # fmt: skip


# Devices


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b", "llama-3.1-70b", "gpt-oss-120b"])  # fmt: skip
@pytest.mark.parametrize("batch", [1, 64, 300])
def test_without_a_number_the_fewest_devices_hold_the_batch(
    name: str, batch: int
) -> None:
    """At every length that was asked for; the whole node where none does."""
    fields: dict[str, Any] = {
        "model": name, "tp_size": None, "batch_sizes": (batch,), "context_lens": (4096, 30_000), "draft": "none",
    }  # fmt: skip
    (case,) = ways_of(**fields)
    (tp_size,) = case.tp_sizes
    sizes = valid_tp_sizes(case.model, 8, case.engine.sampling.vocabulary_multiple)

    def holds(size: int) -> bool:
        for lengths in request.lengths_of(case.request):
            at = dataclasses.replace(case, tp_sizes=(size,), lengths=lengths)
            if at.largest_batches()[0] < batch:
                return False
        return True

    able = [size for size in sizes if holds(size)]
    assert tp_size == (able[0] if able else sizes[-1])


def test_without_a_batch_a_node_s_devices_hold_the_usual_one_and_a_single_device_one() -> (
    None
):
    """Devices of workstations are bought one by one: they need not hold 64 sequences."""
    for device, batch in (("h100-sxm-80gb", 64), ("rtx-4090", 1)):
        hardware = load_hardware(device)
        assert hardware.link.is_single == (batch == 1)
        for name in ("qwen3-8b", "qwen3-32b"):
            plain = {"model": name, "hardware": (device,), "tp_size": None, "draft": "none"}  # fmt: skip
            (found,) = ways_of(**plain, batch_sizes=())
            (explicit,) = ways_of(**plain, batch_sizes=(batch,))
            assert found.tp_sizes == explicit.tp_sizes


def test_a_name_gives_the_number_of_devices_and_a_price_its_own() -> None:
    four = PlanRequest(num_gpus=None)
    assert request.with_devices(four, "h100").num_gpus is None
    assert request.with_devices(four, "4xh100").num_gpus == 4
    same = PlanRequest(num_gpus=4)
    assert request.with_devices(same, "4xh100") is same
    assert request.with_devices(same, "h100") is same
    with pytest.raises(ConfigError, match="4xh100 is 4 devices, and --gpus 8"):
        request.with_devices(PlanRequest(num_gpus=8), "4xh100")
    priced = PlanRequest(price_per_hour_usd=7.0)
    assert request._at_its_price(priced, "h100").price_per_hour_usd == 7.0
    assert request._at_its_price(priced, "h100=2.5").price_per_hour_usd == 2.5
    hardware = load_hardware("h100=2.5")
    assert request._at_its_price(priced, hardware).price_per_hour_usd == 7.0
    assert request._at_its_price(PlanRequest(), "h100=2.5") == hardware


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "rtx-4090", "l4-24gb"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("num_gpus", [1, 2, 6, 8, 12, 16, 32])
def test_layouts_are_all_the_ways_that_are_compared(
    device: str, name: str, num_gpus: int
) -> None:
    """Written out: tensor parallelism within a node, across nodes and in stages where there are more devices and
    the network between them is known, then whole experts on a node and on all devices."""
    model = load_model_spec(name)
    hardware = load_hardware(device)
    link = hardware.link
    multiple = VLLM.sampling.vocabulary_multiple
    wanted = PlanRequest(model=name, hardware=(device,), num_gpus=num_gpus)
    found = layouts(wanted, model, hardware, VLLM)
    node = max(link.num_gpus_per_node, min(8, link.reach))
    sizes = valid_tp_sizes(model, num_gpus, multiple)
    within = tuple(size for size in sizes if size <= node)
    expected = [DeviceGroups(tp_sizes=within)]
    if link.between_nodes_bytes_per_s is not None or num_gpus <= link.reach:
        across = tuple(size for size in sizes if size > node)
        if across:
            expected.append(DeviceGroups(tp_sizes=across))
        stages = min(num_gpus // within[-1], model.num_hidden_layers)
        if num_gpus > node and stages > 1:
            spread = Parallelism(pp=stages)
            expected.append(DeviceGroups(tp_sizes=(within[-1],), spread=spread))
        ranks = {min(num_gpus, node), num_gpus} if model.is_moe else set()
        for count in sorted(ranks):
            for size in sizes:
                groups, rest = divmod(count, size)
                if groups > 1 and not rest and model.most_experts % count == 0:
                    spread = Parallelism(dp=groups, whole_experts=True)
                    expected.append(DeviceGroups(tp_sizes=(size,), spread=spread))
    assert found == expected


def test_a_layout_that_is_asked_for_is_the_only_one() -> None:
    model = load_model_spec("qwen3-30b-a3b")
    hardware = load_hardware("h100-sxm-80gb")

    def only(**fields: Any) -> tuple[tuple[int, ...], Parallelism]:
        wanted = PlanRequest(model=model.name, hardware=(hardware.name,), **fields)
        (way,) = layouts(wanted, model, hardware, VLLM)
        return way.tp_sizes, way.spread

    assert only() == ((8,), Parallelism())
    assert only(pp_size=2) == ((8,), Parallelism(pp=2))
    assert only(pp_size=1, tp_size=2) == ((2,), Parallelism())
    assert only(pp_size=3, tp_size=2) == ((2,), Parallelism(pp=3))
    assert only(ep_size=4) == ((4,), Parallelism(whole_experts=True))
    assert only(ep_size=4, tp_size=4) == ((4,), Parallelism(whole_experts=True))
    groups = Parallelism(dp=4, whole_experts=True)
    assert only(ep_size=8, tp_size=2, dp_attention=True) == ((2,), groups)
    assert only(dp_attention=True, num_gpus=4) == ((1,), groups)
    assert only(dp_attention=True, tp_size=2, num_gpus=8) == ((2,), groups)
    both = Parallelism(pp=2, dp=4, whole_experts=True)
    assert only(dp_attention=True, pp_size=2, num_gpus=8) == ((1,), both)
    assert only(dp_attention=True)[1].dp == 8  # a node's
    assert only(ep_size=1, tp_size=4) == ((4,), Parallelism())
    with pytest.raises(ConfigError, match="8 devices are needed, more than the 7"):
        only(pp_size=2, tp_size=4, num_gpus=7)
    assert only(pp_size=2, tp_size=4, num_gpus=8) == ((4,), Parallelism(pp=2))
    for num_gpus in range(1, 40):
        for stages in (2, 3, 5):
            if num_gpus < stages:
                with pytest.raises(ConfigError, match=f"{stages} devices are needed"):
                    only(pp_size=stages, num_gpus=num_gpus)
            else:  # the largest that each stage has devices for, within a node
                tp = max(size for size in (1, 2, 4, 8) if size * stages <= num_gpus)
                spread = Parallelism(pp=stages)
                assert only(pp_size=stages, num_gpus=num_gpus) == ((tp,), spread)
    wide = PlanRequest(num_gpus=4, tp_size=8)
    with pytest.raises(ConfigError, match="tp 8 needs more than the 4 GPUs"):
        layouts(wide, LLAMA, hardware, VLLM)
    staged = PlanRequest(pp_size=2)
    with pytest.raises(ConfigError, match="neither stages nor data-parallel"):
        layouts(staged, LLAMA, hardware, load_engine("ours"))


def test_a_batch_is_searched_where_limits_or_devices_bound_it_and_none_was_given() -> (
    None
):
    bounds: list[dict[str, Any]] = [
        {"tpot_limit_s": 0.1}, {"ttft_limit_s": 1.0}, {"num_gpus": 1},
    ]  # fmt: skip
    for bound in bounds:
        assert case_of(draft="none", batch_sizes=(), **bound).searches_batch
        assert not case_of(draft="none", batch_sizes=(4,), **bound).searches_batch
    assert not case_of(draft="none", batch_sizes=()).searches_batch


def test_drafts_on_other_ranks_are_refused_where_they_are_not_priced() -> None:
    with pytest.raises(ConfigError, match="a draft on 1 rank or on all 4, not on 3"):
        ways_of(tp_size=None, num_gpus=4, draft_tp_size=3)
    assert ways_of(tp_size=4, draft_tp_size=4)
    assert ways_of(tp_size=4, draft_tp_size=3, draft="none")
    assert ways_of(tp_size=4, draft_tp_size=2, engine="ours", draft="self")


# Drafts of a case


@given(
    needs_plugin=st.booleans(),
    is_hypothetical=st.booleans(),
    plugin=st.booleans(),
    draft=st.sampled_from([None, "self"]),
    rate=st.sampled_from([None, 0.8]),
    given_method=st.sampled_from([None, "streamingllm", "snapkv"]),
)
def test_a_draft_may_be_chosen_if_it_runs_or_was_asked_for(
    needs_plugin: bool,
    is_hypothetical: bool,
    plugin: bool,
    draft: str | None,
    rate: float | None,
    given_method: str | None,
) -> None:
    profiles = ()
    if given_method:
        profiles = (msgspec.structs.replace(STREAMING, draft_method=given_method),)
    wanted = PlanRequest(
        plugin=plugin, draft=draft, acceptance_rate=rate, acceptance=profiles
    )
    case = dataclasses.replace(case_of(draft="none"), request=wanted)
    drafting = SimpleNamespace(
        needs_plugin=needs_plugin, is_hypothetical=is_hypothetical
    )
    row: Any = SimpleNamespace(
        drafting=drafting, draft=SELF, draft_method="streamingllm"
    )
    was_asked = plugin or draft or rate or given_method == "streamingllm"
    assert case.admits(row) == (
        not is_hypothetical and bool(not needs_plugin or was_asked)
    )


def test_gammas_are_those_whose_acceptance_is_known_and_that_the_engine_takes() -> None:
    case = case_of(draft="eagle3")
    (option,) = case.options
    assert case.gammas_of(None) == (0,)
    for most, multiple in product((1, 3, 7, 15), (1, 2, 3)):
        acceptance = msgspec.structs.replace(option.acceptance, most_drafts=most)
        own = dataclasses.replace(option, acceptance=acceptance, multiple=multiple)
        deepest = request.deepest_gamma(acceptance)
        assert deepest == min(most, acceptance.max_gamma or 12, 12)
        expected = [
            gamma
            for gamma in range(1, deepest + 1)
            if gamma <= multiple or gamma % multiple == 0
        ]
        assert list(case.gammas_of(own)) == expected
    assert case_of(draft="eagle3", gamma=5).gammas_of(option) == (5,)
    profile: Any = SimpleNamespace(max_gamma=None)
    assert request.deepest_gamma(profile) == 12


def test_a_row_s_draft_is_found_by_both_its_names() -> None:
    case = case_of()
    for option in case.options:
        row: Any = SimpleNamespace(draft=option.draft, draft_method=option.method)
        assert case.option_of(row) is option
        assert not case.is_hypothetical(option.draft, option.method)
        trained = dataclasses.replace(option, is_hypothetical=True)
        only = dataclasses.replace(case, options=(trained,))
        assert only.is_hypothetical(option.draft, option.method)
        assert not only.is_hypothetical(option.draft, "other")
    row = SimpleNamespace(draft=SELF, draft_method="full")
    with pytest.raises(LookupError):
        case.option_of(row)


@pytest.mark.parametrize("weights", [None, "fp8", "int4"])
@pytest.mark.parametrize("kv", [None, "fp8"])
def test_a_draft_s_formats_are_the_asked_or_its_own(
    weights: str | None, kv: str | None
) -> None:
    case = case_of(draft="llama-3.2-1b", draft_weight_dtype=weights, draft_kv_dtype=kv)
    (option,) = case.options
    found = case.setup(option).draft_precision
    assert found is not None
    assert found.weight_dtype == (weights or "bf16")
    assert found.kv_dtype == (kv or "bf16")
    assert case.setup(None).draft_precision is None


@pytest.mark.parametrize("fields", [
    {"gamma": 33}, {"cached_len": "120%"}, {"acceptance_rate": 1.2}, {"temperature": -1.0}, {"top_p": 0.0},
])  # fmt: skip
def test_what_is_out_of_range_is_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PlanRequest(**fields)


def test_a_request_is_recorded_in_names() -> None:
    hardware = load_hardware("h100-sxm-80gb")
    named = STREAMING.__class__(**msgspec.structs.asdict(STREAMING) | {"name": "mine"})
    spelled = PlanRequest(
        model=LLAMA,
        hardware=(hardware, "a100"),
        engine=VLLM,
        acceptance=(STREAMING, named),
        gamma=3,
    )
    record = spelled.record()
    assert record.model == "llama-3.1-8b"
    assert list(record.hardware) == ["h100-sxm-80gb", "a100"]
    assert record.engine == "vllm"
    assert list(record.acceptance) == ["a", "mine"]
    assert record.gamma == 3
    assert PlanRequest().record().engine is None


# Which drafts


@pytest.mark.parametrize("draft", [None, SELF, "llama-3.2-1b", *OWN_METHOD])
@pytest.mark.parametrize("method", [None, *(m for m in DRAFT_METHODS if m != "none")])
def test_the_options_name_pairs_of_drafts_and_methods(
    draft: str | None, method: str | None
) -> None:
    if draft in OWN_METHOD and method not in (None, draft):
        with pytest.raises(ConfigError, match="has its own method"):
            drafts._pairs(draft, method)
        return
    found = drafts._pairs(draft, method)
    if draft is None and method is None:
        sparse = {(SELF, kind) for kind in SPARSE_METHODS}
        assert sparse < set(found)
        own = set(found) - sparse
        assert all(name == kind for name, kind in own)
        assert {kind for _, kind in own} == {*LOOKUP_METHODS, "eagle", "eagle3"}
    elif draft in OWN_METHOD or (draft is None and method in OWN_METHOD):
        name = draft or method
        assert found == [(name, name)]
    elif method is not None:
        assert found == [(draft or SELF, method)]
    elif draft == SELF:
        assert found == [(SELF, "streamingllm")]
    else:
        assert found == [(draft, "streamingllm"), (draft, "full")]


@pytest.mark.parametrize(("draft", "is_taken"), [
    (None, True), ("eagle3", True), ("ngram", False), ("eagle", False),
])  # fmt: skip
def test_a_head_that_is_given_is_the_draft(
    monkeypatch: pytest.MonkeyPatch, draft: str | None, is_taken: bool
) -> None:
    given_head = HeadSpec(method="eagle3", max_positions=2048)
    monkeypatch.setattr(drafts, "load_head", lambda _: given_head)
    wanted = asked(draft=draft, draft_model="there/config.json")
    if not is_taken:
        with pytest.raises(ConfigError, match="is a head of eagle3, not of"):
            drafts._with_its_draft(wanted)
        return
    found, head = drafts._with_its_draft(wanted)
    assert (found.draft, head) == ("eagle3", given_head)
    question = drafts._question(LLAMA, "eagle3", "eagle3", wanted, 4096, head)
    assert question.trained.length == 2048
    longer = HeadSpec(method="eagle3", max_positions=LLAMA.max_position_embeddings)
    question = drafts._question(LLAMA, "eagle3", "eagle3", wanted, 4096, longer)
    assert question.trained.length is None


def test_a_profile_is_of_a_draft_that_is_planned() -> None:
    drafts.check_profiles([STREAMING], draft=None, method=None)
    drafts.check_profiles([STREAMING], draft=SELF, method=None)
    refused: list[tuple[str | None, str | None]] = [
        ("eagle3", None), (None, "snapkv"), ("none", None), (None, "none"),
    ]  # fmt: skip
    for draft, method in refused:
        with pytest.raises(ConfigError, match="an acceptance profile is of draft self"):
            drafts.check_profiles([STREAMING], draft=draft, method=method)


@given(
    context=st.integers(20, 200_000),
    budgets=st.lists(st.integers(5, 5000), max_size=4),
)
def test_budgets_are_below_the_context(context: int, budgets: list[int]) -> None:
    """Those that were asked for, each once; else the usual ones up to half of the context."""
    if any(budget >= context for budget in budgets):
        with pytest.raises(ConfigError, match="must be below the context"):
            drafts._budgets(tuple(budgets), context)
        return
    found = drafts._budgets(tuple(budgets), context)
    assert list(found) == sorted(set(found))
    assert all(0 < budget < context for budget in found)
    if budgets:
        assert set(found) == set(budgets)
    elif context >= 128:
        usual = {64 * 2**power for power in range(7) if 64 * 2**power <= context / 2}
        assert set(found) == usual
    else:
        assert found == (max(8, context // 2),)


@pytest.mark.parametrize("context", [4095, 4096, 8191, 8192, 65_535, 65_536, 100_000])
@pytest.mark.parametrize("method", ["eagle3", "mtp", "ngram", "streamingllm", "full"])
@pytest.mark.parametrize("asked_for", [(), (300,)])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_windows_are_of_heads_that_the_engine_can_cut(
    context: int, method: str, asked_for: tuple[int, ...], engine: str
) -> None:
    """Those of prediction modules from 64k on, where what they need not read is a good part of a step."""
    profile = load_engine(engine)
    wanted = asked(draft_budgets=asked_for)
    usable = drafts._budgets(asked_for, context)
    found = drafts._budgets_of(method, profile, wanted, usable, context)
    if method == "streamingllm":
        assert found == usable
    elif method not in HEAD_METHODS or not profile.draft("", method).window_setting:
        assert found == (None,)
    elif asked_for:
        assert found == asked_for
    elif method == "mtp" and context < 64 * 1024:
        assert found == (None,)
    else:
        windows = [window for window in (2048, 4096) if window <= context / 2]
        assert found == (*windows, None)


@pytest.mark.parametrize(("dtype", "method", "draft", "differs"), [
    (None, "full", SELF, False), ("int4", "ngram", "ngram", False), ("int4", "full", SELF, True),
    ("bf16", "full", SELF, False), ("fp32", "eagle3", "eagle3", False), ("fp8", "eagle3", "eagle3", True),
    ("bf16", "eagle3", "eagle3", False), ("fp8", "full", "llama-3.2-1b", True), ("bf16", "full", "llama-3.2-1b", False),
    ("fp8", "full", "llama-3.1-8b", True), ("bf16", "full", "llama-3.1-8b", False),
])  # fmt: skip
def test_weights_that_are_narrower_than_published_accept_otherwise(
    dtype: str | None, method: str, draft: str, differs: bool
) -> None:
    wanted = asked(draft_weight_dtype=dtype)
    assert drafts._has_other_weights(wanted, LLAMA, method, draft) == differs


def test_a_copy_is_compared_with_the_weights_of_its_target() -> None:
    """Of a target that is published in fp8 a copy in fp8 is the target, and one in bf16 is not."""
    target = load_model_spec("deepseek-v3")
    assert target.quantization is not None
    own = target.quantization.weight_dtype
    for dtype, differs in ((own, False), ("bf16", True)):
        wanted = asked(draft_weight_dtype=dtype)
        assert drafts._has_other_weights(wanted, target, "full", SELF) == differs
    wide = asked(draft_weight_dtype="bf16", weight_dtype="bf16")
    assert not drafts._has_other_weights(wide, target, "full", SELF)
    # its module is published in its own format, of which bf16 is wider
    assert not drafts._has_other_weights(asked(draft_weight_dtype="bf16"), target, "mtp", "mtp")  # fmt: skip
    assert drafts._has_other_weights(asked(draft_weight_dtype="int4"), target, "mtp", "mtp")  # fmt: skip


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "glm-4.6"])  # fmt: skip
def test_every_draft_that_there_is_for_a_model_is_considered_once(name: str) -> None:
    model = load_model_spec(name)
    found = drafts._considered(model, asked(model=name), 4096)
    assert len(set(found)) == len(found)
    assert set(drafts._pairs(None, None)) <= set(found)
    options, _ = drafts_of(asked(model=name))
    of_model = {option.method for option in options}
    assert ("mtp" in of_model) == standing.has_module(model)
    small = [pair[0] for pair in found if pair[0] not in (SELF, *OWN_METHOD)]
    assert len(small) <= drafts.NUM_DRAFT_MODELS
    for draft in small:
        assert load_model_spec(draft).num_parameters <= model.num_parameters / 4
        assert load_model_spec(draft).vocab_size == model.vocab_size
    may = models_that_may_draft(model)
    least = [n for n in may if load_model_spec(n).num_parameters <= model.num_parameters / 4]  # fmt: skip
    assert bool(small) == bool(least)
    copies = {(SELF, "full"), (name, "full")}
    assert not copies & set(found)
    narrow = drafts._considered(model, asked(model=name, draft_weight_dtype="int4"), 4096)  # fmt: skip
    assert copies <= set(narrow)
    profiled = asked(model=name, acceptance=(msgspec.structs.replace(STREAMING, draft="x"),))  # fmt: skip
    assert ("x", "streamingllm") in drafts._considered(model, profiled, 4096)
    named = asked(model=name, draft="ngram")
    assert drafts._considered(model, named, 4096) == [("ngram", "ngram")]


def test_a_draft_model_reads_the_context() -> None:
    model = load_model_spec("llama-3.1-8b")
    for context in (2048, 131_072, 200_000):
        for name in drafts._small_drafts(model, context):
            assert load_model_spec(name).longest_context >= context
    assert set(drafts._small_drafts(model, 131_072)) <= set(drafts._small_drafts(model, 2))  # fmt: skip
    assert not list(drafts._small_drafts(model, 10**9))


# Acceptance


@pytest.mark.parametrize("rate", [0.3, 0.8])
@pytest.mark.parametrize("gamma", [None, 1, 4])
def test_a_given_rate_holds_at_the_positions_that_it_was_given_for(
    rate: float, gamma: int | None
) -> None:
    """A number for all of them; a list for its own, each with the rate that was given."""
    (option,), _ = drafts_of(asked(draft="eagle3", acceptance_rate=rate, gamma=gamma))
    tokens, _ = option.acceptance.tokens_per_step(budget=None, context=4096.0, gamma=1)
    assert float(tokens) == pytest.approx(1.0 + rate)
    first = gamma or 1
    tokens, _ = option.acceptance.tokens_per_step(budget=None, context=4096.0, gamma=first)  # fmt: skip
    assert float(tokens) == pytest.approx(sum(rate**n for n in range(first + 1)))
    several = (rate, rate / 2.0)
    (option,), _ = drafts_of(asked(draft="eagle3", acceptance_rate=several))
    tokens, _ = option.acceptance.tokens_per_step(budget=None, context=4096.0, gamma=2)
    assert float(tokens) == pytest.approx(1.0 + rate + rate**2 / 2.0)


def test_a_given_rate_is_of_one_budget() -> None:
    for context, budget in ((4096, 512), (600, 300), (12, 8)):
        wanted = asked(acceptance_rate=0.8, context_lens=(context,))
        (option,), _ = drafts_of(wanted)
        assert (option.draft, option.method) == (SELF, "streamingllm")
        assert option.budgets == (budget,)
    several = asked(acceptance_rate=0.8, draft_budgets=(64, 700))
    (option,), _ = drafts_of(several)
    assert option.budgets == (64, 700)
    (option,), _ = drafts_of(asked(acceptance_rate=0.8, draft_method="eagle3"))
    assert option.draft == "eagle3"


@pytest.mark.parametrize("share", [None, 1.0, 0.5])
@pytest.mark.parametrize("length", [1.5, 2.5, 4.0])
def test_an_accept_length_is_met_at_its_gamma(
    share: float | None, length: float
) -> None:
    """Of steps of which a share has a draft: the others make one token."""
    wanted = asked(draft="eagle3", gamma=3, accept_length=length, drafted_share=share)
    (option,), _ = drafts_of(wanted)
    tokens, _ = option.acceptance.tokens_per_step(budget=None, context=4096.0, gamma=3)
    expected = 1.0 + (length - 1.0) * (share or 1.0)
    assert float(tokens) == pytest.approx(expected, rel=0.01)
    assert float(option.acceptance.drafted_share_at(3)) == pytest.approx(share or 1.0)


@pytest.mark.parametrize(("fields", "message"), [
    ({"accept_length": 2.0}, "give it with --gamma"), ({"accept_length": 2.0, "gamma": 0}, "give it with --gamma"),
    ({"accept_length": 4.01, "gamma": 3}, "make at most 4 tokens"),
    ({"accept_length": 2.0, "gamma": 3, "acceptance_rate": 0.5}, "give one"),
    ({"accept_length": 2.0, "gamma": 3, "draft": "ngram"}, "--drafted-share"),
])  # fmt: skip
def test_an_accept_length_that_says_too_little_or_too_much_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        drafts_of(asked(**{"draft": "eagle3"} | fields))


def test_what_other_engines_print_of_look_ups_is_of_all_steps() -> None:
    wanted = asked(draft="ngram", gamma=3, accept_length=2.0, engine="sglang")
    (option,), _ = drafts_of(wanted)
    tokens, _ = option.acceptance.tokens_per_step(budget=None, context=4096.0, gamma=3)
    assert float(tokens) == pytest.approx(2.0, rel=0.01)


def test_a_profile_of_one_s_own_is_taken_before_any_other() -> None:
    (option,), _ = drafts_of(asked(draft=SELF, acceptance=(STREAMING,)))
    assert not option.acceptance.is_assumed
    assert option.question is None
    assert option.acceptance.source == "measured (yours), a"
    (other,), _ = drafts_of(asked(draft="ngram"))
    assert other.acceptance.is_assumed
    assert other.question is not None


def test_a_copy_of_the_target_accepts_what_was_published_of_copies() -> None:
    """All that its own weights draft; of narrower ones what an int4 copy was measured to."""
    wanted = asked(draft="llama-3.1-8b", draft_method="full")
    (option,), _ = drafts_of(wanted)
    tokens, _ = option.acceptance.tokens_per_step(budget=None, context=4096.0, gamma=4)
    assert float(tokens) == pytest.approx(5.0, rel=0.02)
    published = default_profile("llama-3.1-8b", "full", temperature=1.0, weight_dtype="int4")  # fmt: skip
    narrow = asked(draft="llama-3.1-8b", draft_method="full", draft_weight_dtype="fp8")
    (option,), _ = drafts_of(narrow)
    if published is not None:
        assert option.acceptance == published
    tokens, _ = option.acceptance.tokens_per_step(budget=None, context=4096.0, gamma=4)
    assert float(tokens) < 5.0


# Standing


def test_a_draft_of_another_vocabulary_is_told_models_of_less_than_half_its_target() -> (
    None
):
    """All of the catalog that share its target's vocabulary, and the target itself as a self-draft."""
    other = load_model_spec("tinyllama-1.1b")
    for name in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "qwen3-14b"):
        target = load_model_spec(name)
        ask = standing.AskedDraft(draft=other.name, method="full", model=other)
        refusal = standing.standing(ask, target, VLLM)
        assert refusal.answer == "cannot start"
        told = refusal.cure.removeprefix("in the catalog: ").split(", ")
        expected = [
            each
            for each in models_that_may_draft(target)
            if 2 * load_model_spec(each).num_parameters < target.num_parameters
        ]
        assert told == [*expected, SELF]


@pytest.mark.parametrize(("method", "name"), [
    ("dspark", "deepseek-ai/dspark_qwen3_8b_block7"), ("dflash", "z-lab/Qwen3-8B-DFlash-b16"),
])  # fmt: skip
def test_a_head_proposes_up_to_its_block(method: str, name: str) -> None:
    """Of a checkpoint that says its block: one token more accepts next to nothing, and the cure is the block."""
    target = load_model_spec("qwen3-8b")
    for gamma in range(1, 18):
        ask = standing.AskedDraft(
            draft=method, method=method, checkpoint=name, gamma=gamma, reads_files=False
        )
        found = standing.standing(ask, target, VLLM)
        assert found.most_drafts is not None
        assert (found.answer == "starts") == (gamma <= found.most_drafts)
        if found.answer != "starts":
            assert f"use {found.most_drafts}" in found.sentence
            assert found.method == method


@given(modules=st.integers(1, 4), gamma=st.integers(1, 12))
def test_the_cure_for_an_odd_gamma_is_a_multiple_below_it(
    modules: int, gamma: int
) -> None:
    one = load_model_spec("glm-4.5-air")
    target = msgspec.structs.replace(one, mtp_layers=one.mtp_layers * modules)
    ask = standing.AskedDraft(draft="mtp", method="mtp", gamma=gamma)
    found = standing.standing(ask, target, VLLM)
    if found.starts:
        assert found.multiple == modules
        assert gamma <= modules or gamma % modules == 0
        return
    use = int(found.cure.removeprefix("use "))
    assert use < gamma < use + modules
    assert use % modules == 0
    again = dataclasses.replace(ask, gamma=use)
    assert standing.standing(again, target, VLLM).starts


@pytest.mark.parametrize(("name", "text"), [
    ("org/model", True), ("./head", True), ("a/b/c", True), ("eagle3-of-mine", False), ("", False),
])  # fmt: skip
def test_a_checkpoint_is_a_repository_or_a_path(name: str, text: bool) -> None:
    assert standing.is_named(name) == text
