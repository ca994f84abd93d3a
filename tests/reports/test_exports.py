"""Exports for serving engines: the exact text, and that no batch size is left without a gamma."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_exports import (
    CPU,
    DRAFTS,
    SITE,
    planned,
    sample,
    spread_plan,
    table,
    words_of,
)
from samples_reports import changed, plan

from magicdec.errors import ConfigError
from magicdec.naming import ENGINE_TITLES
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.perfmodel.variations import for_engine
from magicdec.reports.deployment import reachable
from magicdec.reports.exports import draft_len_schedule, export
from magicdec.schema.gamma_table import BatchBand, TableGamma
from magicdec.schema.plan import plan_of
from magicdec.specs.catalog import MODELS_DIRECTORY, model_names, served_checkpoint
from magicdec.specs.vllm_plugin import read_settings

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_the_text_is_as_agreed(engine: str, draft: str) -> None:
    assert (
        export(engine, sample(draft), site=SITE)
        == (GOLDEN / f"{engine}-{draft}.txt").read_text()
    )


@pytest.mark.parametrize(
    ("method", "named"),
    [("dflash", {"method": "dflash"}), ("dspark", {"method": "dspark"}),
     ("p-eagle", {"method": "eagle3", "parallel_drafting": True})],
)  # fmt: skip
def test_a_parallel_head_has_vllms_own_name(method: str, named: dict[str, Any]) -> None:
    best = changed(sample("eagle").best, draft=method, draft_method=method)
    words = shlex.split(export("vllm", plan(best=best)).split("vllm serve")[1])
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert named.items() <= config.items()
    assert config["model"].startswith(f"YOUR-{method.upper()}-HEAD-OF-")


@pytest.mark.parametrize("draft", ["draft-model", "ngram", "eagle"])
def test_vllm_reads_back_the_plan(draft: str) -> None:
    """A shell splits the command into the words that vLLM's own rules accept."""
    words = words_of(export("vllm", sample(draft)))
    config = json.loads(words[words.index("--speculative-config") + 1])
    bands = config["num_speculative_tokens_per_batch_size"]
    assert bands == [[1, 2, 0], [3, 8, 2], [9, 32, 3]], "no batch beyond --max-num-seqs"
    assert all(gamma <= config["num_speculative_tokens"] for _, _, gamma in bands)
    assert bands[0][0] == 1
    assert all(a[1] + 1 == b[0] for a, b in pairwise(bands))


def test_one_gamma_is_exported_where_the_table_costs_more_than_it_gains() -> None:
    document = sample("eagle")
    one = [BatchBand(1, document.best.batch_size, document.best.gamma)]
    for gammas, is_table in ((document.choice.gammas, True), (one, False)):
        choice = msgspec.structs.replace(document.choice, gammas=gammas)
        again = msgspec.structs.replace(document, choice=choice)
        text = export("vllm", again)
        config = json.loads(
            words_of(text)[words_of(text).index("--speculative-config") + 1]
        )
        assert ("num_speculative_tokens_per_batch_size" in config) == is_table
        assert is_table or config["num_speculative_tokens"] == document.best.gamma


def test_the_plugins_own_reader_takes_what_is_exported_for_it() -> None:
    """The plan's budget and its table of gamma, by batch and context, without the batches that never run."""
    document = sample("sparse-self")
    words = words_of(export("vllm", document))
    settings = read_settings(json.loads(words[words.index("--additional-config") + 1]))
    assert settings.draft_budget == document.best.draft_budget
    assert [
        list(row) for row in settings.gamma_table.gammas
    ] == document.gamma_table.gamma[:4]
    speculation = json.loads(words[words.index("--speculative-config") + 1])
    assert speculation["num_speculative_tokens"] == settings.gamma_table.max_gamma


@given(
    gammas=st.lists(
        st.lists(st.integers(0, 8), min_size=4, max_size=4), min_size=4, max_size=4
    ),
    room=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    batch=st.integers(1, 16),
    context=st.integers(512, 32_768),
)
def test_a_trimmed_table_answers_as_the_whole_one_wherever_there_is_room(
    gammas: list[list[int]], room: list[int], batch: int, context: int
) -> None:
    """Looked up at any batch and context within the limits; its greatest gamma is of a cell with room."""
    whole = table([1, 4, 8, 16], [512, 2048, 8192, 32_768], gammas)
    room = sorted(room, reverse=True)  # a larger batch has no more
    whole = msgspec.structs.replace(
        whole, fits=[[j < most for j in range(4)] for most in room]
    )
    trimmed = reachable(whole, max_batch=batch, max_len=context)
    fitting = [gammas[i][j] for i in range(4) for j in range(room[i])]
    if trimmed is None:
        return
    cells = msgspec.convert(trimmed, TableGamma)
    assert cells.max_gamma in fitting
    for b in range(1, batch + 1):
        row = min(range(4), key=lambda i: abs(np.log(whole.batch_sizes[i] / b)))
        for c in (512, context // 2, context):
            column = min(
                range(4), key=lambda j: abs(np.log(whole.context_lens[j] / max(c, 1)))
            )
            if column < room[row]:
                assert cells.choose(batch_size=b, context_len=c) == gammas[row][column]


def test_a_cpus_command_is_the_one_that_starts_there() -> None:
    """No script of its own, no compilation, a cache of a stated size; elsewhere none of these."""
    words = words_of(export("vllm", sample("sparse-self"), site=CPU))
    assert words[:5] == [
        "python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "path/to/embedded",
    ]
    assert {"--enforce-eager", "--dtype", "--kv-cache-memory-bytes"} <= set(words)
    assert not {"--enforce-eager", "--kv-cache-memory-bytes"} & set(
        words_of(export("vllm", sample("ngram")))
    )


def test_a_model_is_named_as_its_publisher_does(tmp_path: Path) -> None:
    """Every model of the catalog has a checkpoint; a directory is its own."""
    assert all("/" in str(served_checkpoint(name)) for name in model_names())
    for name, folder in (("llama-3.1-8b", None), (str(tmp_path), tmp_path)):
        if folder is not None:
            (folder / "config.json").write_bytes(
                (MODELS_DIRECTORY / "llama-3.1-8b.json").read_bytes()
            )
        again = for_engine(planned("vllm", model=name, draft="none"), "vllm")
        wanted = "meta-llama/Llama-3.1-8B-Instruct" if folder is None else name
        assert words_of(export("vllm", again.plan, site=again.site))[2] == wanted


def test_a_model_too_long_for_the_memory_is_served_shorter() -> None:
    """One sequence of the model's own length must fit, or vLLM does not start."""
    short = planned("vllm", hardware=("l4-24gb",), draft="none", batch_sizes=(1,))
    text = export("vllm", short)
    (length,) = [
        int(line.split()[1]) for line in text.splitlines() if "--max-model-len" in line
    ]
    assert short.context_len <= length < 131_072
    assert "--max-model-len" not in export(
        "vllm", planned("vllm", hardware=("h200-sxm-141gb",), draft="none")
    )


@given(
    gammas=st.lists(st.integers(0, 8), min_size=1, max_size=8),
    steps=st.lists(st.integers(1, 40), min_size=8, max_size=8),
)
def test_every_batch_size_has_the_gamma_of_the_table(
    gammas: list[int], steps: list[int]
) -> None:
    """Bands hold the gamma that the plugin, a run and a simulation look up at the same batch."""
    batches = [sum(steps[: i + 1]) for i in range(len(gammas))]
    policy = table(batches, [4096], [[gamma] for gamma in gammas]).policy
    bands = policy.bands(4096)
    for batch in range(1, batches[-1] + 1):
        (gamma,) = [g for start, end, g in bands if start <= batch <= end]
        assert gamma == policy.choose(batch_size=batch, context_len=4096)
        distances = [abs(np.log(tabulated / batch)) for tabulated in batches]
        as_near = {
            gammas[i]
            for i, far in enumerate(distances)
            if far <= min(distances) + 1e-12
        }
        assert gamma in as_near
    schedule, changed = draft_len_schedule(bands)
    assert schedule[1] == max(gammas), "the engine refuses anything else"
    for batch in range(1, batches[-1] + 1):
        told = schedule[max(key for key in schedule if key <= batch)]
        (wanted,) = [g for start, end, g in bands if start <= batch <= end]
        assert told == wanted or (changed and told == max(gammas))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fits": False}, "does not fit"),
        ({"draft": "a\nrm -rf /"}, "cannot be written into"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export("vllm", plan(best=changed(plan().best, **change)))


def test_the_draft_runs_on_the_ranks_that_it_was_priced_on() -> None:
    """From the planner's own document, over a file: TinyLlama on 2 of 8 ranks."""
    request = PlanRequest(
        engine="magicdec-2024", model="llama-2-7b-32k", draft="tinyllama-1.1b", draft_method="full", draft_tp_size=2,
        tp_size=8, batch_sizes=(16,), context_lens=(16_384,), acceptance_rate=0.9,
    )  # fmt: skip
    document = plan_of(json.loads(make_plan(request).to_json()))
    if not document.best.is_speculative:
        choice = document.choosing(document.candidates[0])
        document = msgspec.structs.replace(document, choice=choice)
    assert document.best.drafting.tp_size == 2
    assert '"draft_tensor_parallel_size": 2' in export("vllm", document)


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean sglang"):
        export("sgLan", plan())


def test_a_hostile_model_name_stays_one_word() -> None:
    document = msgspec.structs.replace(sample("draft-model"), model="m; echo 'x'")
    assert words_of(export("vllm", document))[2] == "m; echo 'x'"


@pytest.mark.parametrize(
    ("engine", "flag"),
    [("vllm", '"model": "{}"'), ("sglang", "-path {}"), ("trtllm", '"{}"')],
)
def test_a_head_is_the_checkpoint_whose_acceptance_was_planned_with(
    engine: str, flag: str
) -> None:
    text = export(engine, planned(engine, draft="eagle3", batch_sizes=(4,)))
    assert flag.format("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B") in text
    assert "placeholder" not in text


@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_a_head_that_nobody_published_is_a_placeholder_that_says_so(
    engine: str,
) -> None:
    text = export(
        engine,
        planned(
            engine,
            model="gemma-3-27b",
            draft="eagle3",
            batch_sizes=(4,),
            acceptance_rate=0.7,
        ),
    )
    assert text.count("YOUR-EAGLE3-HEAD-OF-gemma-3-27b") == 2
    assert "is a placeholder" in text


@pytest.mark.parametrize(
    ("engine", "most", "flag"),
    [("vllm", "--max-num-seqs 300", "--max-cudagraph-capture-size "),
     ("sglang", "--max-running-requests 300", "--cuda-graph-max-bs-decode 300"),
     ("trtllm", "--max_batch_size 300", "  max_batch_size: 300")],
)  # fmt: skip
def test_a_batch_beyond_the_captured_graphs_raises_their_limit(
    engine: str, most: str, flag: str
) -> None:
    large = planned(engine, draft="eagle3", batch_sizes=(300,))
    small = planned(engine, draft="eagle3", batch_sizes=(16,))
    assert not large.best.step.is_captured
    assert small.best.step.is_captured
    assert flag in export(engine, large)
    assert flag.strip() not in export(engine, small)
    assert most in export(engine, large)
    assert any("captures no graph" in note for note in large.notes)


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ("vllm", "--kv-cache-dtype fp8"),
        ("sglang", "fp8_e4m3"),
        ("trtllm", "  dtype: fp8"),
    ],
)
def test_the_cache_has_the_format_that_was_priced(engine: str, flag: str) -> None:
    assert flag in export(engine, planned(engine, kv_dtype="fp8"))
    assert flag not in export(engine, planned(engine))


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ("vllm", "--dtype half"),
        ("sglang", "--dtype half"),
        ("trtllm", "dtype: float16"),
    ],
)
def test_a_device_without_bf16_is_served_in_fp16(engine: str, flag: str) -> None:
    plans = {}
    for device in ("t4", "l4"):
        request = PlanRequest(
            model="qwen3-0.6b",
            hardware=(device,),
            engine=engine,
            batch_sizes=(1,),
            context_lens=(1024,),
            draft="ngram",
        )
        plans[device] = make_plan(request)
    assert flag in export(engine, plans["t4"])
    assert flag not in export(engine, plans["l4"])
    assert any("cannot compute in bf16" in note for note in plans["t4"].key_notes)
    assert not any("bf16" in note for note in plans["l4"].notes)


@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_comments_fit_a_terminal_and_state_the_whole_request(engine: str) -> None:
    document = planned(engine, gen_len=300, price_per_hour_usd=2.0, draft="eagle3")
    comments = [
        line for line in export(engine, document).splitlines() if line.startswith("# ")
    ]
    assert all(len(line) < 80 for line in comments if not line.startswith("#  "))
    text = " ".join(line[2:] for line in comments)
    assert (
        f"${document.best.cost.per_million_tokens_usd:.2f} per million tokens" in text
    )
    assert f"{document.best.requests.gain.speedup:.2f} times as fast as without" in text


SPREADS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "tp 8 x pp 2": ("llama-3.1-405b", {"tp_size": 8, "pp_size": 2}, {
        "vllm": "--tensor-parallel-size 8|--pipeline-parallel-size 2|--nnodes 2|--max-num-seqs 32",
        "sglang": "--tp-size 8|--pp-size 2|--nnodes 2|--max-running-requests 32",
        "trtllm": "--tp_size 8 --pp_size 2 --max_batch_size 32",
    }),
    "2 nodes": ("deepseek-v3", {"ep_size": 16, "dp_attention": True}, {
        "vllm": "--tensor-parallel-size 1|--enable-expert-parallel|--data-parallel-size 16|--data-parallel-size-local 8"
                "|--all2all-backend deepep_low_latency|--max-num-seqs 2",
        "sglang": "--tp-size 16|--dp-size 16|--enable-dp-attention|--enable-dp-lm-head|--moe-dense-tp-size 1"
                  "|--ep-size 16|--moe-a2a-backend deepep|--max-running-requests 32",
        "trtllm": "--tp_size 16 --ep_size 16 --max_batch_size 2|enable_attention_dp: true",
    }),
}  # fmt: skip


@pytest.mark.parametrize("spread", SPREADS)
def test_a_spread_replica_is_written_for_each_engine(spread: str) -> None:
    """With 32 sequences over 16 groups, the engines that count by group are told 2."""
    model, how, flags = SPREADS[spread]
    document = spread_plan(model, **how)
    for engine, wanted in flags.items():
        text = export(engine, document)
        assert all(each in text for each in (*wanted.split("|"), spread, "2 nodes")), (
            text
        )


@pytest.mark.parametrize("number", [None, 2])
def test_an_export_is_for_the_version_that_was_priced(number: int | None) -> None:
    """The same candidate as in the plan, whatever a newer version would take for it."""
    request = PlanRequest(
        model="llama-3.1-8b", hardware=("h100-sxm-80gb",), engine="vllm@0.24",
        batch_sizes=(8,), context_lens=(4096,), draft="eagle3",
    )  # fmt: skip
    planned = make_plan(request)
    again = for_engine(planned, "vllm", number=number)
    wanted = planned.best if number is None else planned.candidates[number - 1]
    assert again.plan.best.gain.speedup == pytest.approx(wanted.gain.speedup)
    first = export("vllm", again.plan, site=again.site).splitlines()[0]
    assert first == "# Written by magicdec for vLLM 0.24."
