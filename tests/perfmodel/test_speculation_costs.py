"""What a speculative step costs by mechanism: constants by version, attention of several query tokens, captured graphs,
prompts that share a pass with verified tokens."""

from __future__ import annotations

import dataclasses
import heapq

import msgspec
import numpy as np
import pytest

from magicdec.counts import Z_90
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.intervals import engine_error, interval, step_errors
from magicdec.perfmodel.kernels.base import mean_waves
from magicdec.perfmodel.kernels.experts import experts_curve
from magicdec.perfmodel.kernels.op import Where
from magicdec.perfmodel.kernels.profile import HardwareProfile, load_hardware
from magicdec.perfmodel.serving import prefill_seconds
from magicdec.perfmodel.setup import Points, Setup
from magicdec.perfmodel.speedup import predict
from magicdec.perfmodel.step import step_terms
from magicdec.specs.attention_kernels import AttentionLayer, attention_path, tables
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.engine import EngineProfile, engine_from_document, load_engine
from magicdec.specs.precision import Precision
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from tests.kernels import attention_time

FA2 = tables().kernels["fa2"]
FA3 = tables().kernels["fa3"]


def setup(
    hardware: str = "a100",
    *,
    kv: str = "bf16",
    engine: str = "vllm",
    model: str = "llama-3.1-8b",
) -> Setup:
    setup = Setup.of(
        model,
        hardware,
        engine,
        SpeculationSpec(draft="eagle3", draft_method="eagle3"),
        sampling=SamplingSpec(),
    )
    return dataclasses.replace(setup, precision=Precision(kv_dtype=kv))


def step(
    given: Setup, *, batch: float = 1.0, kv_len: float = 800.0, gamma: float = 5.0
) -> tuple[float, float]:
    """Seconds of an autoregressive and of a speculative step."""
    terms = step_terms(
        given, batch=batch, kv_len=kv_len, draft_kv_len=kv_len, gamma=gamma
    )
    return float(terms.autoregressive.total_s), float(terms.step_s)


def test_constants_hold_from_their_version_on():
    document = {
        "name": "x",
        "overheads": {"step_overhead_s": 1e-3},
        "before": {
            "0.14": {"overheads": {"step_overhead_s": 3e-3}},
            "0.20": {
                "overheads": {"step_overhead_s": 2e-3, "draft_step_overhead_s": 1e-4}
            },
        },
    }
    profile = engine_from_document(document, where="x")
    found = {
        version: (
            profile.of_version(version).overheads.step_overhead_s,
            profile.of_version(version).overheads.draft_step_overhead_s,
        )
        for version in (
            "",
            "patched",
            "0.9",
            "0.13.post1",
            "0.14.0",
            "0.19-era",
            "0.20.1rc1 (abc)",
            "1.0",
        )
    }
    assert found == {
        "": (3e-3, 1e-4), "patched": (1e-3, 0.0), "0.9": (3e-3, 1e-4), "0.13.post1": (3e-3, 1e-4),
        "0.14.0": (2e-3, 1e-4), "0.19-era": (2e-3, 1e-4), "0.20.1rc1 (abc)": (1e-3, 0.0), "1.0": (1e-3, 0.0),
    }  # fmt: skip


def test_versions_are_ordered_by_all_their_numbers() -> None:
    profile = EngineProfile(
        name="x", before={"0.5.11": {"overheads": {"step_overhead_s": 3e-3}}}
    )
    found = {
        version: profile.of_version(version).overheads.step_overhead_s
        for version in ("0.5", "0.5.9", "0.5.10.post1", "0.5.11", "0.5.23", "0.6", "1")
    }
    old = {"0.5": 3e-3, "0.5.9": 3e-3, "0.5.10.post1": 3e-3}
    assert found == dict.fromkeys(found, 0.0) | old


def test_a_drafts_gain_falls_with_the_users_where_the_host_schedules_between_steps() -> (
    None
):
    """SGLang before 0.5.11 does; measured on eight B200 with DeepSeek-R1 (0.5.9, gamma 2): 1.50 with 4 users, 1.22 with
    64. From then on only the device's times are left, by which the gain hardly falls."""
    given = Setup.of(
        "deepseek-r1",
        "b200",
        "sglang",
        SpeculationSpec(draft="mtp", draft_method="mtp", gamma=2),
        sampling=SamplingSpec(),
    )
    precision = Precision(weight_dtype="fp8_block", kv_dtype="fp8")
    users = np.array([4.0, 64.0])
    points = Points(batch=users, context=5120, tp=8, gamma=2)
    gains = {}
    for version in ("0.5.9", "0.5.23"):
        engine = given.engine.of_version(version)
        setup = dataclasses.replace(given, engine=engine, precision=precision)
        gains[version] = predict(setup, constant_profile(0.78), points).speedup
    assert gains["0.5.9"][1] / gains["0.5.9"][0] == pytest.approx(1.22 / 1.50, abs=0.06)
    assert gains["0.5.23"][1] > 0.9 * gains["0.5.23"][0]


def test_a_self_draft_is_priced_as_the_model_runner_runs_it():
    """V1 schedules between steps and captures no draft pass; the step without drafts, and other drafts, stay."""
    engine = load_engine("vllm")
    v1, given = engine.with_constants({"paths.runner": "V1"}), setup()
    assert step(dataclasses.replace(given, engine=v1)) == step(given)
    own = dataclasses.replace(
        given,
        speculation=SpeculationSpec(
            draft="self", draft_method="streamingllm", draft_budget=512
        ),
    )
    (alone, on_v2), (alone_v1, on_v1) = (
        step(dataclasses.replace(own, engine=each), batch=16.0, gamma=3.0)
        for each in (engine, v1)
    )
    assert alone == alone_v1
    layers, terms = given.model.num_hidden_layers, v1.self_drafting
    extra = (
        3 * layers * terms.overheads.draft_model_layer_s
        + terms.overheads.step_overhead_s
        - engine.overheads.step_overhead_s
    )
    assert on_v1 - on_v2 == pytest.approx(
        extra
        + 16
        * (terms.overheads.sequence_overhead_s - engine.overheads.sequence_overhead_s)
    )
    with pytest.raises(ValueError, match="one of V2, V1, not 'V3'"):
        engine.with_constants({"paths.runner": "V3"})


def test_an_engine_that_expands_its_batch_pays_for_each_scored_token():
    """vLLM before 0.8: 16 sequences of 4 tokens are 64 sequences to its host."""
    given = setup()
    older = dataclasses.replace(given, engine=given.engine.of_version("0.6.3"))
    newer = dataclasses.replace(given, engine=given.engine.of_version("0.9"))
    seconds = [
        [step(each, batch=b, gamma=3.0)[1] for b in (1.0, 17.0)]
        for each in (older, newer)
    ]
    apart = (seconds[0][1] - seconds[0][0]) - (seconds[1][1] - seconds[1][0])
    assert apart == pytest.approx(64 * older.engine.overheads.scored_token_s, rel=1e-6)
    assert (
        older.engine.overheads.scored_token_s
        > 0.0
        == given.engine.overheads.scored_token_s
    )


def test_flash_attention_2_neither_packs_nor_splits_several_query_tokens():
    """A block per query head over the whole context: with fewer blocks than multiprocessors the time does not depend on
    the batch, and is 64 rows' arithmetic of one multiprocessor for each key."""
    hw = load_hardware("rtx-a6000-48gb")
    shape = {
        "kv_len": 65536.0,
        "num_heads": 32.0,
        "num_kv_heads": 8.0,
        "head_dim": 128.0,
        "law": FA2,
    }
    one, two = (
        float(attention_time(hw, batch=b, query_len=7.0, **shape).time_s)
        for b in (1.0, 2.0)
    )
    assert two == pytest.approx(one, rel=0.05)
    rate = FA2.rate * hw.flops_per_s["bf16"] / hw.num_multiprocessors
    assert one == pytest.approx(4 * 64 * 65536 * 128 / rate, rel=0.1)
    alone = float(attention_time(hw, batch=1.0, query_len=1.0, **shape).time_s)
    assert one > 3.0 * alone
    hopper = load_hardware("h100")
    ratio = attention_time(
        hopper, batch=8.0, query_len=np.array([1.0, 7.0]), **(shape | {"law": FA3})
    ).time_s
    assert ratio[1] < 1.2 * ratio[0]


@pytest.mark.parametrize(
    ("kv_len", "num_heads", "measured_s"), [(16384.0, 24.0, 1.3e-3), (32768.0, 16.0, 2.84e-3)]
)  # fmt: skip
def test_heads_of_256_on_a_chip_that_halves_its_sums(kv_len, num_heads, measured_s):
    """An RTX 3090's verification of a few tokens, as two public profiles have it."""
    seconds = attention_time(
        load_hardware("rtx-3090"),
        batch=1.0,
        query_len=3.0,
        kv_len=kv_len,
        num_heads=num_heads,
        num_kv_heads=4.0,
        head_dim=256.0,
        law=FA2,
    ).time_s
    assert float(seconds) == pytest.approx(measured_s, rel=0.1)


def test_packed_heads_read_the_cache_again_for_rows_beyond_a_tile():
    """Four heads share a KV head: 4 tokens are 16 rows, which one reading serves; 6 tokens are half as many more."""
    given = setup("h100")
    one, four, six, eight = (
        float(
            step_terms(
                given, batch=64, kv_len=8192, draft_kv_len=8192, gamma=gamma
            ).verify.group_seconds()["attention"]
        )
        for gamma in (0, 3, 5, 7)
    )
    assert four == pytest.approx(one, rel=0.05)
    assert eight / four == pytest.approx(
        1.0 + given.engine.kernels.query_tile_reread, rel=0.1
    )
    assert six / four == pytest.approx(
        1.0 + given.engine.kernels.query_tile_reread / 2, rel=0.1
    )
    assert given.engine.kernels.query_tile_reread > 0.2


@pytest.mark.parametrize(
    ("device", "version", "is_slower"),
    [
        ("a100", "0.32", True),
        ("l40s", "0.32", True),
        ("a100", "0.33", False),
        ("h100", "0.32", False),
        ("b200", "0.32", False),
    ],
)
def test_an_8_bit_cache_leaves_captured_graphs_before_hopper(
    device, version, is_slower
):
    """FlashInfer reads it there, which vLLM captures for several tokens from 0.33 on."""
    engine = f"vllm@{version}"
    wide = step(setup(device, engine=engine))
    narrow = step(setup(device, kv="fp8", engine=engine))
    assert (narrow[1] / narrow[0] > 1.1 * wide[1] / wide[0]) == is_slower


def test_prompts_cost_more_beside_verified_tokens():
    """Where decoding leaves arithmetic idle, prompts are computed in its shadow; verification leaves less of it."""
    given = setup("a100")
    seconds = [
        float(
            prefill_seconds(
                given, active=32.0, prompt_len=256.0, tp_size=1, query_len=each
            )
        )
        for each in (1.0, 6.0)
    ]
    assert 1.02 < seconds[1] / seconds[0] < 1.6


def test_heads_that_share_the_vocabulary_read_the_whole_output_layer():
    own = setup("h100")
    spec = msgspec.structs.replace(own.speculation, shares_vocabulary=True)
    shared = dataclasses.replace(own, speculation=spec)
    own_bytes, shared_bytes = (
        float(
            step_terms(
                each, batch=1, kv_len=800, draft_kv_len=800, gamma=3
            ).draft.cost.weight_bytes
        )
        for each in (own, shared)
    )
    vocabulary, hidden = own.model.vocab_size, own.model.hidden_size
    assert shared_bytes - own_bytes == pytest.approx(
        2.0 * (vocabulary - 32_000) * hidden
    )


def test_a_draft_model_is_launched_layer_by_layer():
    """An 8B draft of a 70B target lost in spite of three tokens per step (0.37 to 0.48 times the speed)
    in vLLM 0.23; since 0.24 its layers are compiled, so launches take less than its weights."""
    newest = load_engine("vllm")
    speedups = []
    for version in ("0.23.1rc1", "0.32"):
        given = dataclasses.replace(
            setup("h100", model="llama-3.1-70b"),
            engine=newest.of_version(version),
            draft_model=load_model_spec("llama-3.1-8b"),
            speculation=SpeculationSpec(draft="llama-3.1-8b", draft_method="full"),
        )
        terms = step_terms(
            given, batch=1, kv_len=800, draft_kv_len=800, gamma=5, tp_size=4
        )
        speedups.append(float(3.1 * terms.autoregressive.total_s / terms.step_s))
    assert 0.3 < speedups[0] < 0.5
    assert speedups[1] > 1.0
    launches_s = 32 * newest.overheads.draft_model_layer_s
    assert launches_s < float(terms.draft.total_s) < 3 * launches_s


@pytest.mark.parametrize(
    ("plain", "tokens", "speeds"),
    [
        (133.0, {2: 2.1, 4: 2.39, 7: 2.47}, {2: 201.69, 4: 198.0, 7: 169.92}),
        (128.64, {2: 1.89, 4: 2.08}, {2: 175.49, 4: 165.65}),
    ],
)
def test_heads_before_they_were_captured_take_little_longer(
    plain: float, tokens: dict[int, float], speeds: dict[int, float]
):
    """EAGLE in vLLM 0.8, one user, Llama 3 8B on an H100, April 2025 (pull requests 16937, with the accepted lengths of
    issue 20780, and 16035): a step over one without a draft."""
    given = dataclasses.replace(
        setup("h100"),
        engine=load_engine("vllm").of_version("0.8.5"),
        speculation=SpeculationSpec(draft="eagle", draft_method="eagle"),
    )
    for gamma, speed in speeds.items():
        terms = step_terms(
            given, batch=1, kv_len=300, draft_kv_len=300, gamma=gamma, tp_size=1
        )
        ratio = float(terms.step_s / terms.autoregressive.total_s)
        assert ratio == pytest.approx(tokens[gamma] * plain / speed, rel=0.04)


def test_speedups_are_less_sure_where_no_server_was_measured():
    spec = SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=3)
    known, other = (
        engine_error(Setup.of("llama-3.1-8b", device, "vllm", spec))
        for device in ("a100", "rtx-3090")
    )
    assert known < other


def test_mxfp4_is_computed_where_a_device_can_and_widened_elsewhere():
    model = load_model_spec("gpt-oss-120b")
    precision = model.part_precision("experts", Precision(weight_dtype="mxfp4"))
    engine = load_engine("vllm")
    for device, format_of_curve in (
        ("b200", "nvfp4"),
        ("gb200", "nvfp4"),
        ("h200", "mxfp4"),
    ):
        hw = load_hardware(device)
        assert experts_curve(Where(hw, engine, precision)) == hw.moe[format_of_curve]


def test_a_step_costs_the_host_what_it_does_on_its_device():
    profile = EngineProfile(name="x").with_constants(
        {
            "overheads.autoregressive_overhead_s": 1e-3,
            "overheads.step_overhead_s": 2e-3,
            "overheads.overhead_on": {"there": 4e-4},
        }
    )
    assert profile.step_overheads("here") == (1e-3, 2e-3)
    assert profile.step_overheads("there") == pytest.approx((4e-4, 1.4e-3))


def test_experts_that_fill_blocks_take_their_kernel_s_fixed_time():
    """MiniMax-M2.5: 192 columns of a rank of eight do not, 384 of four do."""
    given, engine = setup("h200", model="minimax-m2.5"), load_engine("vllm")
    without = engine.with_constants({"kernels.block_experts_layer_s": 0.0})
    narrow = {
        "precision": Precision(weight_dtype="fp8_block"),
        "speculation": SpeculationSpec(),
    }
    for tp, layers in ((8, 0), (4, given.model.num_hidden_layers)):
        seconds = [
            float(
                step_terms(
                    dataclasses.replace(given, engine=each, **narrow), batch=4, kv_len=800, draft_kv_len=0, gamma=0,
                    tp_size=tp,
                ).autoregressive.total_s
            )
            for each in (engine, without)
        ]  # fmt: skip
        assert seconds[0] - seconds[1] == pytest.approx(
            layers * engine.kernels.block_experts_layer_s, abs=1e-9
        )


def test_no_single_sequence_more_costs_a_wave_of_verification() -> None:
    """FlashAttention 2 does not split verification: on 108 multiprocessors a block more than two
    waves of equal lengths costs a third wave. Lengths of a server differ, so its steps grow evenly,
    and where they do not differ the edge lies within the interval.
    """
    spec = SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=1024)
    server = Setup.of("llama-3.1-8b", "a100-sxm-80gb", "vllm", spec)
    engine = server.engine.with_constants({"kernels.has_mixed_lengths": False})
    equal = dataclasses.replace(server, engine=engine)
    points = Points(
        batch=np.arange(40.0, 71.0), context=32_768, tp=8, gamma=4, budget=1024
    )
    predicted = {}
    growth = {}
    for name, setup in (("server", server), ("equal", equal)):
        predicted[name] = predict(setup, constant_profile(0.8), points)
        verify_s = predicted[name].verify_step_s
        growth[name] = float(np.max(verify_s[1:] / verify_s[:-1]))
    assert growth["server"] < 1.03
    assert growth["equal"] > 1.4
    assert np.mean(predicted["server"].verify_step_s) == pytest.approx(
        np.mean(predicted["equal"].verify_step_s), rel=0.05
    )
    sure = interval(predicted["server"])
    of_equal = interval(predicted["equal"])
    assert np.all(sure.speedup_low < predicted["equal"].speedup)
    assert np.all(predicted["equal"].speedup < sure.speedup_high)
    assert np.all(
        sure.speedup_high / sure.speedup_low
        > of_equal.speedup_high / of_equal.speedup_low
    )


@pytest.mark.parametrize("variation", [0.05, 0.1, 0.2, 0.3])
def test_blocks_of_unequal_length_take_the_mean_of_waves(variation: float) -> None:
    """Blocks of drawn lengths, each taken by the first multiprocessor that is free: the mean time
    of the last is the law's, and single loads lie within two deviations or so."""
    rng = np.random.default_rng(0)
    multiprocessors, heads = 108, 4
    for filling in (1.1, 1.5, 2.0, 2.1, 3.0, 4.0):
        sequences = round(filling * multiprocessors / heads)
        means, deviations = mean_waves(np.array([filling]))
        ends = []
        for _ in range(10):
            lengths = rng.gamma(variation**-2, variation**2, sequences)
            busy_until = [0.0] * multiprocessors
            for length in np.repeat(lengths, heads):
                heapq.heapreplace(busy_until, busy_until[0] + length)
            ends.append(max(busy_until))
        assert np.mean(ends) == pytest.approx(means[0], abs=1.65 * deviations[0])


@pytest.mark.parametrize(
    ("model", "device", "tp", "users", "weights", "ratios", "within"),
    [
        ("llama-3.1-8b", "h200", 1, 1, "bf16", (1.36, 1.49, 1.63), 0.05),
        ("qwen3-30b-a3b", "h200", 2, 8, "bf16", (1.70, 1.93, 2.11), 0.08),
        ("kimi-k2", "b200", 8, 8, "fp8", (2.03, 2.37, 2.66), 0.17),
    ],
)
def test_sglangs_speculative_steps_are_as_much_longer_as_measured(
    model: str,
    device: str,
    tp: int,
    users: int,
    weights: str,
    ratios: tuple[float, ...],
    within: float,
) -> None:
    """SpecForge's SpecBundle, EAGLE-3 chains of 3, 5 and 7 tokens: tokens per step times the plain speed over the
    speculative one, on the device whose plain step is nearest; of December 2025, before steps overlapped."""
    given = Setup.of(
        model,
        device,
        "sglang@0.5.6",
        SpeculationSpec(draft="eagle3", draft_method="eagle3", gamma=7),
        weight_dtype=weights,
        sampling=SamplingSpec(temperature=0.0),
    )
    terms = step_terms(
        given, batch=users, kv_len=800, draft_kv_len=800, gamma=(3, 5, 7), tp_size=tp
    )
    ratio = terms.step_s / terms.autoregressive.total_s
    assert ratio == pytest.approx(np.array(ratios), rel=within)


def test_a_described_device_verifies_by_its_generations_kernel(tmp_path):
    """Two datasheets that differ in generation alone: Ampere's library does not split a context for
    several query tokens, Hopper's does."""
    ratios = {}
    for generation in ("ampere", "hopper"):
        path = tmp_path / f"{generation}.toml"
        path.write_text(
            f'name = "mine-{generation}"\nkind = "gpu"\ngeneration = "{generation}"\n'
            "memory_bytes = 80e9\nmemory_bytes_per_s = 2e12\nnum_multiprocessors = 108\n"
            "[flops_per_s]\nbf16 = 312e12\nfp32 = 19.5e12\n"
            "[link]\nbytes_per_s = 1e11\n"
        )
        hw = load_hardware(str(path))
        (law,) = attention_path(load_engine("vllm"), hw, AttentionLayer()).laws
        alone, several = attention_time(
            hw,
            batch=1.0,
            query_len=np.array([1.0, 4.0]),
            kv_len=32768.0,
            num_heads=32.0,
            num_kv_heads=8.0,
            head_dim=128.0,
            law=law,
        ).time_s
        ratios[generation] = several / alone
    assert ratios["hopper"] < 1.3
    assert ratios["ampere"] > 3.0


LONG_CONTEXTS = [
    # context, users, tokens per step, measured speedup
    (32768, 1, 4.85, 0.75),
    (32768, 4, 5.31, 1.18),
    (65536, 1, 5.38, 0.86),
    (131072, 1, 6.12, 1.09),
]
"""huzama/LongCtxSpecDecode: Qwen3-4B drafts for itself over 7 % of its cache, six tokens, RTX A6000."""


@pytest.mark.parametrize(("context", "users", "tokens", "measured"), LONG_CONTEXTS)
def test_a_device_known_by_its_datasheet_alone_holds_what_was_measured_at_long_context(
    context, users, tokens, measured
):
    """Nobody says which attention library the device has: the interval holds the kernel that does not
    split the context, which it was, and the middle is no longer the one that does."""
    known = load_hardware("rtx-a6000")
    ceilings = {
        name: getattr(known, name)
        for name in ("memory_bytes", "memory_bytes_per_s", "flops_per_s", "l2_bytes")
    }
    speedups = {}
    for generation in ("", "hopper"):
        device = HardwareProfile(
            name="unknown",
            generation=generation,
            num_multiprocessors=known.num_multiprocessors,
            **ceilings,
        )
        given = Setup.of(
            "qwen3-4b",
            device,
            load_engine("vllm").of_version("0.32"),  # the one that runs such a draft
            SpeculationSpec(
                draft="self",
                draft_method="streamingllm",
                draft_budget=int(0.07 * context),
                gamma=6,
            ),
            sampling=SamplingSpec(),
        )
        terms = step_terms(
            given,
            batch=users,
            kv_len=context,
            draft_kv_len=0.07 * context,
            gamma=6,
        )
        speedup = tokens * float(terms.autoregressive.total_s / terms.step_s)
        error, _ = step_errors(given, terms, 1)
        speedups[generation] = (speedup, float(error))
    speedup, error = speedups[""]
    assert abs(np.log(speedup / measured)) < Z_90 * error
    ideal, ideal_error = speedups["hopper"]
    assert speedup < 0.95 * ideal
    assert error > ideal_error


def test_a_host_search_of_many_sequences_is_less_sure() -> None:
    """9 to 45 us a sequence were reported of suffix decoding, one after the other; n-gram's was timed."""
    widths = {}
    for method in ("suffix", "ngram"):
        speculation = SpeculationSpec(draft=method, draft_method=method, gamma=4)
        engine = load_engine("vllm@0.29")
        given = Setup.of("llama-3.1-8b", "h100", engine, speculation)
        for users in (8, 64, 512):
            terms = step_terms(
                given, batch=users, kv_len=800, draft_kv_len=800, gamma=4, tp_size=1
            )
            search = next(op for op in terms.upkeep.ops if op.name == "lookup")
            widths[method, users] = float(search.spread_s)
            error, _ = step_errors(given, terms, 1)
            assert float(error) > float(search.spread_s / terms.step_s)
    assert widths["suffix", 64] == pytest.approx(8.0 * widths["suffix", 8])
    assert widths["suffix", 512] == pytest.approx(512 * 20e-6)
    assert widths["ngram", 512] == 0.0
