"""Options and variables that set an engine's path, against another way to say it, another version, or a
thread's figures."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import msgspec
import pytest

from magicdec.live.change import Change, Served
from magicdec.live.findings import _on_command
from magicdec.live.load import AskedLoad, request_of
from magicdec.live.room import users_in_cache
from magicdec.live.settings import costs_of, settings_of, times_as_long
from magicdec.perfmodel.plan.request import Case, PlanRequest
from magicdec.perfmodel.planner import answered
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.serve_command import read_serve_command
from magicdec.specs.serve_command.command import byte_count

EAGLE = (
    "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path AngelSlim/Qwen3-8B_eagle3 --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
HYBRID = "python -m sglang.launch_server --model-path Qwen/Qwen3.5-4B"
WIDE = "vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4"
DRAFTER = (
    "--model Qwen/Qwen3-8B --speculative-config "
    '\'{"method": "eagle3", "model": "AngelSlim/Qwen3-8B_eagle3", "num_speculative_tokens": 3, "enforce_eager": true}\''
)


class Priced(NamedTuple):
    tpot_s: float
    """Time between tokens of the server as it is set."""
    changes: list[Change]

    def advised(self, words: str) -> list[str]:
        return [change.option for change in self.changes if words in change.change]


@cache
def priced(text: str, *, hardware: str = "h100", draft: str = "none") -> Priced:
    """One user of a command, with a draft of which 0.7 are accepted, or none."""
    command = read_serve_command(text)
    model = load_model_spec(command.model)
    load = AskedLoad(hardware=hardware, batch=1, context_len=2048)
    request, _ = request_of(command, load, model)
    request = msgspec.structs.replace(request, draft=draft)
    if draft != "none":
        request = msgspec.structs.replace(request, gamma=3, acceptance_rate=0.7)
    answer = answered(request, model, [])[0][0]
    row = answer.document.best
    option = None if draft == "none" else answer.case.option_of(row)
    served = Served(case=answer.case, option=option, row=row)
    settings = settings_of(command, served)
    times = times_as_long(served, settings)
    return Priced(row.between_tokens_s * times, costs_of(served, settings))


def of_sglang(version: str, words: str, variable: str = "") -> str:
    return f"docker run {variable} lmsysorg/sglang:v{version} {words}"


def test_a_variable_has_older_sglang_draft_as_newer_versions_do():
    on = priced(of_sglang("0.5.8", EAGLE, "-e SGLANG_ENABLE_SPEC_V2=1"), draft="eagle3")
    newer = priced(of_sglang("0.5.11", EAGLE), draft="eagle3")
    older = priced(of_sglang("0.5.8", EAGLE), draft="eagle3")
    assert on.tpot_s == pytest.approx(newer.tpot_s)
    assert older.tpot_s > 1.05 * newer.tpot_s
    off = priced(
        of_sglang("0.5.13", EAGLE, "-e SGLANG_ENABLE_SPEC_V2=0"), draft="eagle3"
    )
    assert off.tpot_s == pytest.approx(older.tpot_s)
    gone = priced(
        of_sglang("0.5.20", EAGLE, "-e SGLANG_ENABLE_SPEC_V2=0"), draft="eagle3"
    )
    assert gone.tpot_s == pytest.approx(newer.tpot_s)


@pytest.mark.parametrize(
    ("version", "words", "is_between"),
    [
        ("0.5.10", "", True),  # no_buffer by default
        ("0.5.10", "--mamba-scheduler-strategy extra_buffer", False),
        ("0.5.10", "--disable-radix-cache", False),
        ("0.5.23", "", False),
        ("0.5.23", "--mamba-radix-cache-strategy no_buffer", True),
    ],
)
def test_a_cache_of_states_without_buffers_schedules_between_steps(
    version: str, words: str, is_between: bool
):
    result = priced(of_sglang(version, f"{HYBRID} {words}"))
    assert bool(result.advised("Schedule the next step")) == is_between
    plain = priced(of_sglang(version, f"{HYBRID} {words} --disable-overlap-schedule"))
    if is_between:
        assert result.tpot_s == pytest.approx(plain.tpot_s)
    else:
        assert result.tpot_s < plain.tpot_s


DRAFTED = (
    "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)


@pytest.mark.parametrize(
    ("version", "words", "is_refused"),
    [
        ("0.5.10", DRAFTED, True),
        ("0.5.10", f"{DRAFTED} --mamba-scheduler-strategy extra_buffer", False),
        ("0.5.10", f"{DRAFTED} --disable-radix-cache", False),
        ("0.5.10", "", False),
        ("0.5.23", DRAFTED, False),
        ("0.5.23", "--mamba-radix-cache-strategy no_buffer", True),
        (
            "0.5.23",
            "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
            False,
        ),
    ],
)
def test_states_without_buffers_are_refused_where_sglang_does(
    version: str, words: str, is_refused: bool
):
    """Its asserts: the first with a draft to 0.5.13, the second with overlapped scheduling from 0.5.16."""
    command = read_serve_command(of_sglang(version, f"{HYBRID} {words}"))
    model = load_model_spec(command.model)
    load = AskedLoad(hardware="h100", batch=1, context_len=2048)
    request, _ = request_of(command, load, model)
    kinds = [finding.kind for finding in _on_command(command, load, request, model)]
    assert ("wrong" in kinds) == is_refused


def test_a_dense_model_has_no_states_to_keep():
    result = priced(of_sglang("0.5.10", EAGLE.partition(" --spec")[0]))
    assert result.advised("Schedule the next step") == []


def test_nccls_sums_are_slower_over_nvlink_and_the_only_ones_on_four_pcie_cards():
    """12 % were reported of a 70B model on four A100 (vLLM issue 2192)."""
    option = "--disable-custom-all-reduce"
    own = priced(WIDE, hardware="a100")
    by_nccl = priced(f"{WIDE} {option}", hardware="a100")
    assert 1.02 < by_nccl.tpot_s / own.tpot_s < 1.2
    assert by_nccl.advised("own kernels") == [f"leave out {option}"]
    alone = priced(f"vllm serve Qwen/Qwen3-8B {option}")
    assert alone.advised("own kernels") == []
    small = "vllm serve Qwen/Qwen3-8B -tp 4"
    cards = priced(small, hardware="rtx-4090-24gb")
    assert priced(f"{small} {option}", hardware="rtx-4090-24gb") == cards
    pair = "vllm serve Qwen/Qwen3-8B -tp 2"
    # NCCL was not timed over an A100's PCIe: what an A30's server lost
    own = priced(pair, hardware="a100-pcie-80gb")
    by_nccl = priced(f"{pair} {option}", hardware="a100-pcie-80gb")
    assert by_nccl.tpot_s == pytest.approx(1.06 * own.tpot_s)


@pytest.mark.parametrize(
    ("variable", "words", "option"),
    [
        ("VLLM_USE_V2_MODEL_RUNNER=0", "", "leave out VLLM_USE_V2_MODEL_RUNNER=0"),
        ("VLLM_USE_V2_MODEL_RUNNER=1", "", ""),
        ("", "--enable-dbo", "leave out --enable-dbo"),
    ],
)
def test_the_older_runner_costs_what_was_measured(
    variable: str, words: str, option: str
):
    """3.32 for 3.08 ms a token at one user, 3.57 for 3.49 at 32 (vLLM pull request 43241)."""
    result = priced(f"{variable} vllm serve Qwen/Qwen3-8B {words}")
    assert result.advised("V2 model runner") == ([option] if option else [])
    plain = priced("vllm serve Qwen/Qwen3-8B")
    times = result.tpot_s / plain.tpot_s
    assert (3.57 / 3.49 < times < 3.32 / 3.08) == bool(option)


@pytest.mark.parametrize(
    ("version", "variable", "is_read"),
    [
        ("0.24.0", "", True),
        ("0.33.0", "", False),
        ("0.33.0", "-e VLLM_USE_V2_MODEL_RUNNER=0", True),
    ],
)
def test_an_eager_drafter_is_of_the_older_runner(
    version: str, variable: str, is_read: bool
):
    result = priced(
        f"docker run {variable} vllm/vllm-openai:v{version} {DRAFTER}", draft="eagle3"
    )
    assert bool(result.advised("drafter's graphs")) == is_read


@pytest.mark.parametrize(
    ("version", "is_between"), [("0.17.1", True), ("0.33.0", False)]
)
def test_ray_schedules_between_steps_in_older_versions(version: str, is_between: bool):
    words = "--model Qwen/Qwen3-8B --distributed-executor-backend ray"
    result = priced(f"docker run vllm/vllm-openai:v{version} {words}")
    assert bool(result.advised("Schedule the next step")) == is_between
    said = priced(
        f"docker run vllm/vllm-openai:v{version} --model Qwen/Qwen3-8B --no-async-scheduling"
    )
    assert (result.tpot_s == pytest.approx(said.tpot_s)) == is_between


def test_a_threshold_of_long_prompts_reads_as_a_smaller_chunk_does():
    long = priced("vllm serve Qwen/Qwen3-8B --long-prefill-token-threshold 256")
    small = priced("vllm serve Qwen/Qwen3-8B --max-num-batched-tokens 256")
    assert long.advised("Read prompts") == ["--long-prefill-token-threshold 8192"]
    assert [
        change.gain for change in long.changes if "Read prompts" in change.change
    ] == [change.gain for change in small.changes if "Read prompts" in change.change]


@pytest.mark.parametrize(
    ("algorithm", "checkpoint", "size", "given", "gamma"),
    [
        ("DFLASH", "z-lab/Qwen3-8B-DFlash-b16", "dflash", 4, 3),
        ("DSPARK", "deepseek-ai/dspark_qwen3_8b_block7", "dspark", 7, 7),
    ],
)
def test_a_block_size_is_a_number_of_drafts(
    algorithm: str, checkpoint: str, size: str, given: int, gamma: int
):
    """DFlash's counts the verified token too, DSpark's does not (sglang/srt/arg_groups/
    speculative_hook.py of 0.5.23)."""
    words = (
        f"python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {checkpoint}"
    )
    drafts = [
        read_serve_command(f"{words} {option}").speculation
        for option in (
            f"--speculative-{size}-block-size {given}",
            f"--speculative-num-draft-tokens {gamma + 1}",
        )
    ]
    assert drafts[0] is not None
    assert drafts[0] == drafts[1]
    assert drafts[0].gamma == gamma


# Memory and ranks


def requested(text: str, **load: Any) -> PlanRequest:
    command = read_serve_command(text)
    asked = AskedLoad(
        **({"hardware": "h200", "batch": 256, "context_len": 4096} | load)
    )
    return request_of(command, asked, load_model_spec(command.model))[0]


@cache
def case_of(text: str, *, hardware: str = "h200", context_len: int = 4096) -> Case:
    request = requested(text, hardware=hardware, context_len=context_len)
    alone = msgspec.structs.replace(request, draft="none", batch_sizes=(1,))
    return answered(alone, load_model_spec(request.model), [])[0][0].case


@pytest.mark.parametrize(
    ("text", "users"),
    [
        # 64 layers of 8 heads of 128, keys and values in 16 bits, over two ranks: 128 KiB a token
        ("vllm serve Qwen/Qwen3-32B -tp 2 --kv-cache-memory-bytes 1G", 1),
        ("vllm serve Qwen/Qwen3-32B -tp 2 --kv-cache-memory-bytes 8GiB", 15),
        ("vllm serve Qwen/Qwen3-32B -tp 2 --num-gpu-blocks-override 100", 0),
        ("vllm serve Qwen/Qwen3-32B --num-gpu-blocks-override 1000 --block-size 32", 7),
        (
            "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --max-total-tokens 16384",
            4,
        ),
        ("vllm serve Qwen/Qwen3-32B", None),
    ],
)
def test_a_cache_of_a_given_size_holds_so_many_users(text: str, users: int | None):
    assert users_in_cache(read_serve_command(text), case_of(text)) == users


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1k", 1000.0),
        ("1K", 1024.0),
        ("25.6k", 25600.0),
        ("1GiB", 2.0**30),
        ("x", None),
    ],
)
def test_bytes_are_read_as_vllm_reads_them(text: str, number: float | None):
    assert byte_count(text) == number


def test_a_context_over_ranks_holds_more_users_of_latent_attention():
    """Each of eight ranks holds the whole cache of DeepSeek's attention, or an eighth of it."""
    plain = "vllm serve deepseek-ai/DeepSeek-V3.1 -tp 8"
    (whole,) = case_of(plain).largest_batches()
    (divided,) = case_of(f"{plain} --decode-context-parallel-size 8").largest_batches()
    assert 7.0 < divided / whole < 8.5


def test_ranks_that_attend_to_their_own_sequences_hold_more_of_them():
    plain = (
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3.1 --tp 8"
    )
    (whole,) = case_of(plain).largest_batches()
    own = case_of(f"{plain} --attn-dp-size 8")
    older = case_of(f"{plain} --enable-dp-attention --dp-size 8")
    assert own.spread == older.spread
    assert own.spread.dp == 8
    assert own.largest_batches()[0] > 3.0 * whole
    trtllm = case_of(
        "trtllm-serve deepseek-ai/DeepSeek-V3.1 --tp_size 8 --enable_attention_dp"
    )
    assert trtllm.spread == own.spread
    # a dense model has no experts to divide
    dense = case_of("trtllm-serve Qwen/Qwen3-32B --tp_size 8 --enable_attention_dp")
    assert dense.spread.dp == 1


def test_a_prompts_part_is_divided_among_the_groups():
    text = (
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3.1 --tp 8 "
        "--chunked-prefill-size 8192"
    )
    assert read_serve_command(text).chunk_tokens == 8192
    assert read_serve_command(f"{text} --attn-dp-size 4").chunk_tokens == 2048


def test_states_in_16_bits_are_read_faster():
    """8 % on code (club-3090 issue 1237)."""
    plain = "vllm serve Qwen/Qwen3.5-4B"
    wide = priced(plain)
    narrow = priced(f"{plain} --mamba-ssm-cache-dtype bfloat16")
    assert priced(f"{plain} --mamba-ssm-cache-dtype float32") == wide
    assert narrow.tpot_s < wide.tpot_s
    users = [
        case_of(text).largest_batches()[0]
        for text in (plain, f"{plain} --mamba-ssm-cache-dtype bfloat16")
    ]
    assert users[1] > users[0]


def test_layers_with_windows_keep_whole_caches_without_their_manager():
    """Half of gpt-oss's layers have a window of 128 tokens."""
    plain = "vllm serve openai/gpt-oss-20b"
    (windows,) = case_of(plain, context_len=16384).largest_batches()
    option = "--disable-hybrid-kv-cache-manager"
    (whole,) = case_of(f"{plain} {option}", context_len=16384).largest_batches()
    assert whole == pytest.approx(windows / 2.0, rel=0.1)


# Requests and drafts


@pytest.mark.parametrize(
    ("text", "temperature"),
    [
        ("vllm serve m --override-generation-config '{\"temperature\": 0}'", 0.0),
        ("vllm serve m --override-generation-config.temperature 0.6", 0.6),
        ("vllm serve m --generation-config vllm", 1.0),
        ("vllm serve m --generation-config auto", None),
        ("vllm serve m", None),
        (
            "python -m sglang.launch_server --model-path m --sampling-defaults openai",
            1.0,
        ),
        ("llama-server -m m --temp 0.6", 0.6),
        ("llama-server -m m --temp -1", 0.0),
    ],
)
def test_clients_that_name_no_temperature_take_the_commands(
    text: str, temperature: float | None
):
    assert read_serve_command(text).temperature == temperature
    named = text.replace(" m", " Qwen/Qwen3-8B", 1)
    assert requested(named).temperature == (1.0 if temperature is None else temperature)
    assert requested(named, temperature=0.3).temperature == 0.3


def of_vllm(keys: str) -> str:
    config = f'{{"method": "eagle3", "model": "AngelSlim/Qwen3-8B_eagle3", "num_speculative_tokens": 3, {keys}}}'
    return f"vllm serve Qwen/Qwen3-8B --speculative-config '{config}'"


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (
            of_vllm(
                '"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5'
            ),
            2.5,
        ),
        (
            of_vllm(
                '"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.5, 0.2]'
            ),
            2.5,
        ),
        (f"SGLANG_SIMULATE_ACC_LEN=2.5 {EAGLE}", 2.5),
        (f"SGLANG_SIMULATE_ACC_LEN=9 {EAGLE}", 4.0),
        (f"SGLANG_SIMULATE_ACC_LEN=-1 {EAGLE}", None),
        (EAGLE, None),
    ],
)
def test_an_imposed_length_is_priced_and_not_exact(text: str, length: float | None):
    speculation = read_serve_command(text).speculation
    assert speculation is not None
    assert requested(text).accept_length == length
    assert bool(speculation.lossy) == (length is not None)
    given = requested(text, accept_length=3.0)
    assert given.accept_length == 3.0


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (of_vllm('"quantization": "fp8"'), "fp8"),
        (f"{EAGLE} --speculative-draft-model-quantization fp8", "fp8"),
        (f"{EAGLE} --quantization fp8", "fp8"),
        (
            f"{EAGLE} --quantization fp8 --speculative-draft-model-quantization unquant",
            None,
        ),
        (of_vllm('"quantization": "a_new_one"'), None),
        (EAGLE, None),
    ],
)
def test_a_drafts_format_is_its_own_or_in_sglang_its_targets(
    text: str, dtype: str | None
):
    assert requested(text).draft_weight_dtype == dtype


def test_thresholds_lose_nothing_where_the_check_is_greedy():
    text = f"{EAGLE} --speculative-accept-threshold-acc 0.5"
    command = read_serve_command(text)
    for hardware, temperature, count in (
        ("h200", 0.0, 0),
        ("h200", 1.0, 1),
        ("mi300x", 1.0, 0),
    ):
        request = requested(text, hardware=hardware, temperature=temperature, batch=1)
        asked = msgspec.structs.replace(
            request, draft="eagle3", gamma=3, acceptance_rate=0.7
        )
        answer = answered(asked, load_model_spec(request.model), [])[0][0]
        row = answer.document.best
        served = Served(case=answer.case, option=answer.case.option_of(row), row=row)
        kinds = [
            change.kind for change in costs_of(served, settings_of(command, served))
        ]
        assert kinds.count("exactness") == count


def of_trtllm(keys: str) -> str:
    return f"cat > a.yml <<EOF\n{keys}\nEOF\ntrtllm-serve Qwen/Qwen3-8B --extra_llm_api_options a.yml"


def test_tensorrt_llm_drafts_nothing_above_its_number_of_requests():
    text = of_trtllm(
        "speculative_config: {decoding_type: NGram, max_draft_len: 4, max_concurrency: 2}"
    )
    speculation = read_serve_command(text).speculation
    assert speculation is not None
    assert [speculation.gamma_at(batch) for batch in (1, 2, 3, 32)] == [4, 4, 0, 0]


def test_tensorrt_llm_has_graphs_of_captured_batches_alone_without_padding():
    keys = "cuda_graph_config: {{batch_sizes: [2, 4], enable_padding: {}}}"
    padded = priced(of_trtllm(keys.format("true")))
    alone = priced(of_trtllm(keys.format("false")))
    assert padded.advised("Capture graphs") == []
    assert alone.advised("Capture graphs") == [
        "cuda_graph_config: {enable_padding: true}"
    ]
    assert alone.tpot_s > padded.tpot_s


def test_weights_on_the_host_come_over_its_link_in_every_pass():
    """10 GiB over sixteen lanes of PCIe 5, 63 GB/s at most, and a slower one before Hopper."""
    plain = "vllm serve Qwen/Qwen3-14B"
    option = "--cpu-offload-gb 10"
    for hardware, least_s in (
        ("h100", 10 * 2**30 / 63e9),
        ("a100", 10 * 2**30 / 31.5e9),
    ):
        on_host = priced(f"{plain} {option}", hardware=hardware)
        more_s = on_host.tpot_s - priced(plain, hardware=hardware).tpot_s
        assert least_s < more_s < 1.5 * least_s
        assert on_host.advised("Keep all weights") == [f"leave out {option}"]
    # all of its weights, at most
    whole = priced(f"{plain} --cpu-offload-gb 1000")
    assert whole.tpot_s == pytest.approx(
        priced(f"{plain} --cpu-offload-gb 28").tpot_s, rel=0.1
    )


def test_a_model_that_fits_with_weights_on_the_host_alone_is_not_told_to_keep_them():
    large = priced("vllm serve meta-llama/Llama-3.1-70B-Instruct --cpu-offload-gb 90")
    assert large.advised("Keep all weights") == []
    assert large.tpot_s > 1.0


def test_a_prompts_ranks_multiply_the_devices():
    """vllm/config/parallel.py of 0.33: the world is tp x pp x pcp."""
    command = read_serve_command("vllm serve Qwen/Qwen3-32B -tp 2 -dp 2 -pcp 4")
    assert command.num_devices == 16


@pytest.mark.parametrize(
    ("words", "hardware", "is_decoding"),
    [
        ("-tp 2 --disable-custom-all-reduce", "rtx-5090-32gb", True),
        ("-tp 4", "rtx-5090-32gb", True),
        ("-tp 2", "rtx-5090-32gb", False),
    ],
)
def test_nccl_through_the_host_slows_what_it_sums(
    words: str, hardware: str, is_decoding: bool
):
    """288 and 223 tokens/s of two cards without the engine's own kernels (club-3090 issue 873)."""
    plain = f"vllm serve Qwen/Qwen3-8B {words}"
    hidden = priced(f"NCCL_P2P_DISABLE=1 {plain}", hardware=hardware)
    (change,) = [each for each in hidden.changes if "Let NCCL" in each.change]
    assert (change.kind == "cost") == is_decoding
    of_links = priced(f"NCCL_P2P_DISABLE=1 {plain}").changes
    assert [each.gain for each in of_links if "Let NCCL" in each.change] == [None]
    times = hidden.tpot_s / priced(plain, hardware=hardware).tpot_s
    assert 1.0 <= times <= 288 / 223
    assert (times > 1.0) == is_decoding
    for other in (
        f"NCCL_P2P_DISABLE=0 {plain}",
        "NCCL_P2P_DISABLE=1 vllm serve Qwen/Qwen3-8B",
    ):
        assert priced(other, hardware=hardware).advised("Let NCCL") == []
