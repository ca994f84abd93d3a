"""Whole requests, prefill included: against a simulated server, and every number of a plan against the others."""

import itertools
import json

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from magicdec.commands.plan import plan_command
from magicdec.errors import ConfigError
from magicdec.perfmodel.forward import num_launches
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.planner import make_plan
from magicdec.perfmodel.serving import Cycle, prefill_seconds, serving_time, unevenness
from magicdec.perfmodel.setup import Setup
from magicdec.specs.engine import load_engine
from magicdec.specs.serve_command import read_serve_command
from magicdec.specs.workload import RequestShape, WorkloadSpec

HOUR_S = 3600.0
app = typer.Typer()
app.command()(plan_command)


def simulated(
    token_s: float, prompt_s: float, *, slots: int, output: int, chunks: int
) -> tuple[float, float, float]:
    """(time per request and slot, time to first token, time between tokens) of a closed loop, event by event.

    A server that mixes: each pass gives every decoding request a token and does one chunk of the oldest prompt. A
    request that ends is replaced at once. Measured after a warm-up, over many requests.
    """
    rng = np.random.default_rng(0)
    clock, waiting, decoding = 0.0, [], {}
    for slot in range(slots):  # so that they do not all start together
        decoding[slot] = [0.0, 0.0, int(rng.integers(1, output))]
    done: list[tuple[float, float, float]] = []
    progress, warm = 0, 20 * slots
    while len(done) < warm + 60 * slots:
        clock += token_s if decoding else 0.0
        prefilled = None
        if waiting:
            clock += prompt_s / chunks
            progress += 1
            if progress == chunks:
                prefilled, progress = waiting.pop(0), 0
        for slot, state in list(decoding.items()):
            state[2] += 1
            if state[2] == output:
                sent, first, _ = decoding.pop(slot)
                done.append(
                    (clock - sent, first - sent, (clock - first) / (output - 1))
                )
                waiting.append((slot, clock))
        if prefilled is not None:
            slot, sent = prefilled
            decoding[slot] = [sent, clock, 1]
    return tuple(np.mean(done[warm:], axis=0))


@pytest.mark.parametrize(
    ("prompt_s", "slots", "output", "chunks"),
    [
        (0.002, 16, 200, 1),
        (0.1, 8, 200, 2),
        (0.3, 16, 400, 2),
        (0.02, 64, 500, 1),
        (0.5, 2, 300, 4),
    ],
)
def test_a_simulated_server_takes_the_same_times(
    prompt_s: float, slots: int, output: int, chunks: int
) -> None:
    token_s = 0.02
    cycle = Cycle(
        token_s=np.asarray(token_s), step_s=np.asarray(token_s), prompt_s=np.asarray(prompt_s),
        active=np.asarray(float(slots)), gaps=output - 1.0, between_share=1.0, filled=1.0,
    )  # fmt: skip
    request, first, between = simulated(
        token_s, prompt_s, slots=slots, output=output, chunks=chunks
    )
    assert float(cycle.in_slot_s) == pytest.approx(request, rel=0.05)
    assert float(cycle.tpot_s) == pytest.approx(between, rel=0.03)
    assert first < request / 2


def test_the_closed_form_solves_the_equations_that_it_is_of() -> None:
    setup = Setup.of("llama-3.1-70b", "h100-sxm-80gb", "sglang")
    load = np.array([1.0, 4.0, 32.0])[:, None]
    time = serving_time(
        setup,
        concurrency=load,
        prompt_len=np.array([128.0, 8192.0]),
        output_len=200,
        tp_size=4,
    )
    others, gaps, share = time.active - 1.0, 199.0, setup.engine.scheduler.prefill_share
    alone_s = time.prompt_s * time.filled
    between = (
        others
        * share
        * gaps
        / (gaps + (time.request_s - alone_s - gaps * time.tpot_s) / time.tpot_s)
    )
    np.testing.assert_allclose(
        time.tpot_s, time.token_s + between * time.prompt_s / gaps
    )
    np.testing.assert_allclose(
        time.ttft_s,
        time.prompt_s * (1.0 + others - between) + 1.5 * time.token_s,
        rtol=1e-9,
    )


LONG = PlanRequest(
    context_lens=(32_768,), gen_len=200, price_per_hour_usd=2.0, num_gpus=8
)


def test_every_number_of_a_request_follows_from_the_others() -> None:
    document = make_plan(LONG)
    for row in document.rows:
        per_request_gpu_s = row.requests.request_s * row.tp_size / row.batch_size
        assert row.requests.request_s == pytest.approx(
            row.requests.ttft_s + 199 * row.requests.tpot_s
        )
        assert row.requests.output_tokens_per_s_per_gpu == pytest.approx(
            200 / per_request_gpu_s
        )
        assert row.cost.gpu_hours_per_million_requests == pytest.approx(
            per_request_gpu_s / HOUR_S * 1e6
        )
        assert row.cost.per_million_requests_usd == pytest.approx(
            2.0 * row.cost.gpu_hours_per_million_requests
        )
        assert row.cost.per_million_tokens_usd == pytest.approx(
            row.cost.per_million_requests_usd / 200
        )
        assert row.requests.requests_per_s == pytest.approx(
            8 // row.tp_size * row.batch_size / row.requests.request_s
        )
        assert (
            row.requests.gain.low <= row.requests.gain.speedup <= row.requests.gain.high
        )
        assert 0 < row.requests.prefill_share < 1
    best, alone = document.best, document.autoregressive
    assert best.requests.gain.speedup == pytest.approx(
        alone.requests.request_s / best.requests.request_s
    )
    ratio = (
        best.requests.output_tokens_per_s_per_gpu
        / document.best_autoregressive.requests.output_tokens_per_s_per_gpu
    )
    assert best.speedup_vs_best_autoregressive == pytest.approx(ratio)


def test_long_prompts_with_short_answers_cost_what_their_prefill_does() -> None:
    """32k to read and 200 to write: ten times what decoding alone would cost."""
    document = make_plan(msgspec.structs.replace(LONG, plugin=True))
    best = document.best
    decoding_only = 2.0 / HOUR_S / best.decoding.tokens_per_s_per_gpu * 1e6
    assert best.cost.per_million_tokens_usd > 5 * decoding_only
    of_several = [
        row for row in document.rows if row.is_speculative and row.batch_size > 1
    ]
    fastest = max(of_several, key=lambda row: row.speedup)
    gain = fastest.requests.gain.speedup
    assert 1.0 < gain < 1.0 + (fastest.speedup - 1.0) / 3


def test_a_mix_of_requests_prefills_each_of_its_prompts() -> None:
    """Its prefill is the mean over prompts, not that of the mean prompt."""
    shapes = ((1000, 300, 3.0), (30_000, 300, 1.0))
    mix = WorkloadSpec(
        requests=tuple(
            RequestShape(prompt_len=p, gen_len=g, weight=w) for p, g, w in shapes
        )
    )
    case = {"tp_size": 8, "batch_sizes": (8,), "draft": "none"}
    mixed = make_plan(PlanRequest(workload=mix, **case)).best
    alone = [
        make_plan(PlanRequest(context_lens=(p,), gen_len=g, **case)).best
        for p, g, _ in shapes
    ]
    prefill = [row.requests.prefill_share * row.requests.request_s for row in alone]
    assert mixed.requests.prefill_share * mixed.requests.request_s == pytest.approx(
        0.75 * prefill[0] + 0.25 * prefill[1], rel=1e-6
    )


def test_many_prompt_lengths_are_grouped_without_changing_their_mean() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(100, 50_000, size=500)
    mix = WorkloadSpec(
        requests=tuple(RequestShape(prompt_len=int(n), gen_len=10) for n in lengths)
    )
    groups = mix.prompt_groups()
    assert len(groups) == 8
    assert sum(weight for _, weight in groups) == pytest.approx(500)
    assert sum(length * weight for length, weight in groups) / 500 == pytest.approx(
        lengths.mean()
    )


def test_limits_are_those_of_requests_that_share_the_server() -> None:
    limited = make_plan(
        PlanRequest(
            context_lens=(8192,),
            gen_len=500,
            num_gpus=2,
            draft="eagle3",
            tpot_limit_s=0.03,
            ttft_limit_s=2.0,
        )
    )
    for row in (limited.best, limited.best_autoregressive, *limited.pareto):
        assert row.requests.tpot_s <= 0.03
        assert row.requests.ttft_s <= 2.0


def test_the_terminal_prints_one_cost() -> None:
    case = ["--context", "32768", "--gen-len", "200", "--price", "2"]
    shown = CliRunner().invoke(app, [*case, "--all"], env={"COLUMNS": "80"}).stdout
    best = json.loads(CliRunner().invoke(app, [*case, "--format", "json"]).stdout)
    row = best["choice"]["row"]
    assert f"{row['cost']['per_million_tokens_usd']:.2f}" in shown
    assert f"{row['cost']['gpu_hours_per_million_requests']:.4g}" in shown
    left_out = best["choice"]["left_out"]
    assert f"{left_out['requests']['gain']['speedup']:.2f}x" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_without_an_output_length_the_cost_is_said_to_be_of_decoding() -> None:
    shown = (
        CliRunner()
        .invoke(
            app,
            ["--context", "32768", "--price", "2", "--all"],
            env={"COLUMNS": "200"},
        )
        .stdout
    )
    assert "$/Mtok" in shown
    assert "Decoding alone: " in shown


def test_drafting_nothing_costs_a_head_its_own_step_and_the_bookkeeping() -> None:
    """Added up by hand from the terms of a step with one draft token."""
    request = PlanRequest(
        draft="eagle3",
        context_lens=(2048,),
        batch_sizes=(4,),
        hardware=("h100-sxm-80gb",),
        tp_size=1,
    )
    document = make_plan(request)
    table, engine = document.gamma_table, load_engine("vllm")
    where = table.batch_sizes.index(4), table.context_lens.index(2048)
    alone_s = document.autoregressive.step.autoregressive_s
    fewest = min(document.candidates, key=lambda row: row.gamma)
    idle_s = alone_s / table.idle_speedup[where[0]][where[1]]
    assert (
        idle_s
        > alone_s
        + engine.overheads.step_overhead_s
        + engine.drafts["eagle3"].step_overhead_s
    )
    assert idle_s == pytest.approx(
        alone_s + fewest.step.draft_s + fewest.step.upkeep_s, rel=0.01
    )


def test_drafting_nothing_is_chosen_only_where_it_is_quicker_than_drafting() -> None:
    """One row per cell computed anew: the set-up gamma is that of the quickest of drafting 1 to 12, and nothing."""
    request = {
        "draft": "eagle3",
        "hardware": ("h100-sxm-80gb",),
        "tp_size": 1,
        "acceptance_rate": (0.3,),
    }
    table = make_plan(
        PlanRequest(**request, context_lens=(2048,), batch_sizes=(4,))
    ).gamma_table
    assert any(0 in row for row in table.gamma)
    for context in (2048, 16_384):
        rows = make_plan(
            PlanRequest(**request, context_lens=(context,), batch_sizes=(8,))
        ).candidates
        cell = table.batch_sizes.index(8), table.context_lens.index(context)
        idle = table.idle_speedup[cell[0]][cell[1]]
        best = max(rows, key=lambda row: row.speedup)
        assert table.gamma_set_up[cell[0]][cell[1]] == (
            best.gamma if best.speedup > idle else 0
        )


CACHED = {
    "model": "llama-3.1-8b",
    "hardware": ("h100-sxm-80gb",),
    "tp_size": 1,
    "batch_sizes": (8,),
    "context_lens": (32_768,),
    "gen_len": 200,
    "draft": "none",
}


def test_a_cached_prefix_is_left_out_of_the_prompt_and_still_attended_to() -> None:
    """Between a prompt of the rest alone and the whole prompt; nothing cached changes nothing."""
    whole = make_plan(PlanRequest(**CACHED)).best
    alone = make_plan(PlanRequest(**CACHED | {"context_lens": (3277,)})).best
    cached = make_plan(PlanRequest(**CACHED, cached_len="90%")).best
    assert alone.ttft_s < cached.ttft_s < 0.3 * whole.ttft_s
    assert cached.requests.tpot_s < whole.requests.tpot_s
    assert cached.requests.prefill_share < whole.requests.prefill_share
    assert cached.tpot_s == whole.tpot_s
    assert make_plan(PlanRequest(**CACHED, cached_len=0)).best == whole
    assert make_plan(PlanRequest(**CACHED, cached_len="0%")).best == whole
    tokens = make_plan(PlanRequest(**CACHED, cached_len=29_491)).best
    assert tokens.ttft_s == pytest.approx(cached.ttft_s)


def test_more_of_a_prompt_cached_is_never_slower() -> None:
    shares = ("0%", "50%", "90%", "100%")
    rows = [make_plan(PlanRequest(**CACHED, cached_len=share)).best for share in shares]
    for before, after in itertools.pairwise(rows):
        assert after.ttft_s <= before.ttft_s
        assert after.requests.request_s <= before.requests.request_s


@pytest.mark.parametrize("given", ["ninety%", "101%", "-1%", "x"])
def test_no_number_and_no_share_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="cached must be tokens"):
        PlanRequest(**CACHED, cached_len=given)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("per_pass", [0.01, 0.3, 2.0, 40.0])
def test_groups_wait_for_the_one_with_most_prompts(
    groups: int, per_pass: float
) -> None:
    """Against prompts drawn and handed out one by one to the group with the fewest."""
    drawn = np.random.default_rng(0).poisson(per_pass, 200_000)
    held = np.array([-(-count // groups) for count in range(drawn.max() + 1)])
    expected = held[drawn].mean() / drawn.mean()
    assert float(unevenness(per_pass, groups)) == pytest.approx(expected, rel=0.03)
    assert float(unevenness(np.inf, groups)) == pytest.approx(1.0 / groups)
    assert float(unevenness(1e-9, groups)) == pytest.approx(1.0)


def served(model: str, weights: str, device: str, version: str) -> Setup:
    return Setup.of(
        model,
        device,
        load_engine("sglang").of_version(version),
        weight_dtype=weights,
        kv_dtype="bf16",
    )


@pytest.mark.parametrize(
    ("model", "weights", "per_layer"),
    [
        # norm, q/k/v, two norms of heads, rotation, cache, attention, o, sum; norm, gate and up, activation, down, sum
        ("qwen3-32b", "bf16", 14.0),
        # two products narrow their input; router, choice, sorting (2), narrowing (2), products (2), activation, sum
        ("qwen3-235b-a22b", "fp8_block", 23.0),
    ],
)
def test_the_launches_of_a_layer_are_those_of_its_code(
    model: str, weights: str, per_layer: float
) -> None:
    setup = served(model, weights, "h200", "0.5.9")
    layers = setup.model.num_hidden_layers
    assert num_launches(setup.model, setup.at) == per_layer * layers


def test_a_short_prompt_takes_the_hosts_launches_before_pieces_were_captured() -> None:
    """DeepSeek-R1 on eight H200 in SGLang 0.5.9 takes some 105 ms over 1,024 tokens: 32.99 ms a token with 1,024 of
    output at 64 users, 30.61 with 8,192 (InferenceMAX)."""
    old, new = (
        float(
            prefill_seconds(
                served("deepseek-v3", "fp8_block", "h200", version),
                active=64.0,
                prompt_len=1024.0,
                tp_size=8,
                passes=1024.0,
            )
        )
        for version in ("0.5.9", "0.5.10")
    )
    assert 0.06 < old < 0.13
    assert new < old


def test_prompts_of_one_step_share_its_launches() -> None:
    """Requests end at random: the mean number of those that end in a step in which one does, drawn 100,000 times."""
    setup = served("llama-3.1-8b", "bf16", "h100", "0.5.9")
    asked = {"active": 128.0, "prompt_len": 16.0, "tp_size": 8}
    alone, shared = (
        float(prefill_seconds(setup, passes=passes, **asked)) for passes in (1e9, 128.0)
    )
    ended = np.random.default_rng(0).poisson(1.0, 100_000)
    assert alone / shared == pytest.approx(ended[ended > 0].mean(), rel=0.01)


def test_a_server_that_captures_no_prompts_launches_each_of_their_kernels() -> None:
    """Qwen3-30B-A3B in 16 bits: 4 for norms and sums, 2 products and 5 more of attention, router and 9 of experts."""
    text = "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B "
    launches = []
    for option in ("", "--disable-piecewise-cuda-graph"):
        engine = read_serve_command(text + option).started_engine
        setup = Setup.of(
            "qwen3-30b-a3b", "h100", engine, weight_dtype="bf16", kv_dtype="bf16"
        )
        launches.append(num_launches(setup.model, setup.at) / 48)
    assert launches == [6.0, 21.0]


def test_prompts_of_recurrent_layers_are_launched_one_by_one() -> None:
    """Qwen3.8-27B on a GB300: first tokens of 1,024 after 72 ms (SGLang's cookbook), 10 of them a step."""
    setup = served("qwen3.8-27b", "bf16", "gb300", "0.5.18")
    seconds = prefill_seconds(setup, active=1.0, prompt_len=1024.0, tp_size=1)
    assert 0.035 < float(seconds) < 0.072
