"""Exports for serving engines: the exact text, and that no batch size is left without a gamma."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_reports import plan

from magicdec.errors import ConfigError
from magicdec.naming import ENGINE_TITLES
from magicdec.perfmodel.plan.planner import PlanRequest
from magicdec.perfmodel.plan.planner import plan as make_plan
from magicdec.plan_document import GammaTable, Plan, parse_plan
from magicdec.reports.deployment import batch_bands
from magicdec.reports.exports import draft_len_schedule, export
from magicdec.vllm.settings import read_settings

GOLDEN = Path(__file__).parent / "golden"
DRAFTS: dict[str, dict[str, Any]] = {
    "sparse-self": {},
    "draft-model": {
        "draft": "llama-3.2-1b", "draft_method": "full", "draft_budget": None, "tp_size": 8, "draft_tp_size": 1,
    },
    "sparse-draft": {"draft": "tinyllama-1.1b", "draft_method": "streamingllm", "draft_budget": 512},
    "ngram": {"draft": "ngram", "draft_method": "ngram", "draft_budget": None},
    "eagle": {"draft": "eagle-head", "draft_method": "eagle", "draft_budget": None},
    "off": {"draft": "none", "draft_method": "none", "draft_budget": None, "gamma": 0, "speedup": 1.0},
}  # fmt: skip


def table(batches: list[int], contexts: list[int], gamma: list[list[int]]) -> GammaTable:
    def cells(value: Any) -> list[list[Any]]:
        return [[value] * len(contexts) for _ in batches]

    return GammaTable(
        tp_size=1, batch_sizes=batches, context_lens=contexts, gamma=gamma, speedup=cells(1.0),
        verdict=cells("unclear"), fits=cells(True), break_even_gen_len=cells(None),
        break_even_context=[None] * len(batches),
    )  # fmt: skip


def sample(name: str) -> Plan:
    """A plan of fixed numbers with the named draft, whose best gamma falls again at the greatest batch."""
    fixed = {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6}
    return plan(
        best=msgspec.structs.replace(plan().best, **(fixed | DRAFTS[name])),
        gamma_table=table([1, 4, 16, 32, 64], [512, 4096], [[0, 0], [0, 2], [1, 3], [1, 3], [0, 1]]),
    )


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_the_text_is_as_agreed(engine: str, draft: str) -> None:
    assert export(engine, sample(draft)) == (GOLDEN / f"{engine}-{draft}.txt").read_text()


@pytest.mark.parametrize(
    ("method", "named"),
    [("dflash", {"method": "dflash"}), ("dspark", {"method": "dspark"}),
     ("p-eagle", {"method": "eagle3", "parallel_drafting": True})],
)  # fmt: skip
def test_a_parallel_head_has_vllms_own_name(method: str, named: dict[str, Any]) -> None:
    best = msgspec.structs.replace(sample("eagle").best, draft=method, draft_method=method)
    words = shlex.split(export("vllm", plan(best=best)).split("vllm serve")[1])
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert named.items() <= config.items()
    assert config["model"].startswith(f"YOUR-{method.upper()}-HEAD-OF-")


@pytest.mark.parametrize("draft", ["draft-model", "ngram", "eagle"])
def test_vllm_reads_back_the_plan(draft: str) -> None:
    """A shell splits the command into the words that vLLM's own rules accept."""
    command = "".join(line for line in export("vllm", sample(draft)).splitlines(True) if not line.startswith("#"))
    words = shlex.split(command)
    config = json.loads(words[words.index("--speculative-config") + 1])
    bands = config["num_speculative_tokens_per_batch_size"]
    assert bands == [[1, 3, 0], [4, 15, 2], [16, 63, 3], [64, 64, 1]]
    assert all(gamma <= config["num_speculative_tokens"] for _, _, gamma in bands)
    assert bands[0][0] == 1
    assert all(a[1] + 1 == b[0] for a, b in pairwise(bands))


def test_the_plugins_own_reader_takes_what_is_exported_for_it() -> None:
    """The plan's budget and its whole table of gamma, by batch and context."""
    document = sample("sparse-self")
    command = "".join(line for line in export("vllm", document).splitlines(True) if not line.startswith("#"))
    words = shlex.split(command)
    settings = read_settings(json.loads(words[words.index("--additional-config") + 1]))
    assert settings.draft_budget == document.best.draft_budget
    assert settings.gamma_table is not None
    assert [list(row) for row in settings.gamma_table.gammas] == document.gamma_table.gamma
    speculation = json.loads(words[words.index("--speculative-config") + 1])
    assert speculation["num_speculative_tokens"] >= settings.gamma_table.max_gamma


@given(
    gammas=st.lists(st.integers(0, 8), min_size=1, max_size=8),
    steps=st.lists(st.integers(1, 40), min_size=8, max_size=8),
)
def test_every_batch_size_has_the_gamma_of_the_table(gammas: list[int], steps: list[int]) -> None:
    """Looked up row by row: the row of the greatest tabulated batch size that is not above the batch."""
    batches = [sum(steps[: i + 1]) for i in range(len(gammas))]
    bands = batch_bands(table(batches, [4096], [[gamma] for gamma in gammas]), 4096)
    for batch in range(1, batches[-1] + 1):
        (gamma,) = [g for start, end, g in bands if start <= batch <= end]
        rows = [g for b, g in zip(batches, gammas, strict=True) if b <= batch]
        assert gamma == (rows[-1] if rows else gammas[0])
    schedule, changed = draft_len_schedule(bands)
    assert schedule[1] == max(gammas), "the engine refuses anything else"
    for batch in range(1, batches[-1] + 1):
        told = schedule[max(key for key in schedule if key <= batch)]
        (wanted,) = [g for start, end, g in bands if start <= batch <= end]
        assert told == wanted or (changed and told == max(gammas))


@pytest.mark.parametrize(
    ("change", "message"), [({"fits": False}, "does not fit"), ({"draft": "a\nrm -rf /"}, "cannot be written into")]
)
def test_what_cannot_be_served_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export("vllm", plan(best=msgspec.structs.replace(plan().best, **change)))


def test_the_draft_runs_on_the_ranks_that_it_was_priced_on() -> None:
    """From the planner's own document, over a file: TinyLlama on 2 of 8 ranks."""
    request = PlanRequest(
        engine="magicdec-2024", model="llama-2-7b-32k", draft="tinyllama-1.1b", draft_method="full", draft_tp_size=2,
        tp_size=8,
        batch_sizes=(16,), context_lens=(16_384,), acceptance_rate=0.9,
    )  # fmt: skip
    document = parse_plan(make_plan(request).to_json())
    if not document.best.is_speculative:
        document = msgspec.structs.replace(document, best=document.candidates[0])
    assert document.best.draft_tp_size == 2
    assert '"draft_tensor_parallel_size": 2' in export("vllm", document)


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean sglang"):
        export("sgLan", plan())


def test_a_hostile_model_name_stays_one_word() -> None:
    document = msgspec.structs.replace(sample("draft-model"), model="m; echo 'x'")
    command = "".join(line for line in export("vllm", document).splitlines(True) if not line.startswith("#"))
    assert shlex.split(command)[2] == "m; echo 'x'"


def planned(engine: str, **asked: Any) -> Plan:
    case: dict[str, Any] = {
        "model": "llama-3.1-8b", "hardware": ("h100-sxm-80gb",), "tp_size": 1, "context_lens": (1024,), "engine": engine
    }  # fmt: skip
    document = make_plan(PlanRequest(**(case | asked)))
    return msgspec.structs.replace(document, best=document.candidates[0]) if document.candidates else document


@pytest.mark.parametrize(("engine", "flag"), [("vllm", '"model": "{}"'), ("sglang", "-path {}"), ("trtllm", '"{}"')])
def test_a_head_is_the_checkpoint_whose_acceptance_was_planned_with(engine: str, flag: str) -> None:
    text = export(engine, planned(engine, draft="eagle3", batch_sizes=(4,)))
    assert flag.format("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B") in text
    assert "placeholder" not in text


@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_a_head_that_nobody_published_is_a_placeholder_that_says_so(engine: str) -> None:
    text = export(engine, planned(engine, model="gemma-3-27b", draft="eagle3", batch_sizes=(4,), acceptance_rate=0.7))
    assert text.count("YOUR-EAGLE3-HEAD-OF-gemma-3-27b") == 2
    assert "is a placeholder" in text


@pytest.mark.parametrize(
    ("engine", "most", "flag"),
    [("vllm", "--max-num-seqs 300", "--max-cudagraph-capture-size "),
     ("sglang", "--max-running-requests 300", "--cuda-graph-max-bs 300"),
     ("trtllm", "--max_batch_size 300", "  max_batch_size: 300")],
)  # fmt: skip
def test_a_batch_beyond_the_captured_graphs_raises_their_limit(engine: str, most: str, flag: str) -> None:
    large = planned(engine, draft="eagle3", batch_sizes=(300,))
    small = planned(engine, draft="eagle3", batch_sizes=(16,))
    assert not large.best.is_captured
    assert small.best.is_captured
    assert flag in export(engine, large)
    assert flag.strip() not in export(engine, small)
    assert most in export(engine, large)
    assert any("captures no graph" in note for note in large.notes)


@pytest.mark.parametrize(
    ("engine", "flag"), [("vllm", "--kv-cache-dtype fp8"), ("sglang", "fp8_e4m3"), ("trtllm", "  dtype: fp8")]
)
def test_the_cache_has_the_format_that_was_priced(engine: str, flag: str) -> None:
    assert flag in export(engine, planned(engine, kv_dtype="fp8"))
    assert flag not in export(engine, planned(engine))


@pytest.mark.parametrize("engine", ENGINE_TITLES)
def test_comments_fit_a_terminal_and_state_the_whole_request(engine: str) -> None:
    document = planned(engine, gen_len=300, price_per_hour_usd=2.0, draft="eagle3")
    comments = [line for line in export(engine, document).splitlines() if line.startswith("# ")]
    assert all(len(line) < 80 for line in comments if not line.startswith("#  "))
    text = " ".join(line[2:] for line in comments)
    assert f"${document.best.cost_per_million_tokens_usd:.2f} per million tokens" in text
    assert f"{document.best.request_speedup:.2f} times as fast as without" in text


def spread_plan(model: str, **how: Any) -> Plan:
    case: dict[str, Any] = {"context_lens": (4096,), "batch_sizes": (32,), "hardware": ("h100-sxm-80gb",)}
    return make_plan(PlanRequest(model=model, draft="none", **case, **how))


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("vllm", "--tensor-parallel-size 8|--pipeline-parallel-size 2|--nnodes 2|--max-num-seqs 32"),
        ("sglang", "--tp-size 8|--pp-size 2|--nnodes 2|--max-running-requests 32"),
        ("trtllm", "--tp_size 8 --pp_size 2 --max_batch_size 32"),
    ],
)
def test_stages_are_written_for_each_engine(engine: str, flags: str) -> None:
    text = export(engine, spread_plan("llama-3.1-405b", tp_size=8, pp_size=2))
    assert all(each in text for each in flags.split("|")), text
    assert "tp 8 x pp 2" in text
    assert "2 nodes" in text


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        (
            "vllm",
            "--tensor-parallel-size 1|--enable-expert-parallel|--data-parallel-size 16|--data-parallel-size-local 8"
            "|--all2all-backend deepep_low_latency|--max-num-seqs 2",
        ),
        (
            "sglang",
            "--tp-size 16|--dp-size 16|--enable-dp-attention|--enable-dp-lm-head|--moe-dense-tp-size 1|--ep-size 16"
            "|--moe-a2a-backend deepep|--max-running-requests 32",
        ),
        ("trtllm", "--tp_size 16 --ep_size 16 --max_batch_size 2|enable_attention_dp: true"),
    ],
)
def test_data_parallel_attention_is_written_for_each_engine(engine: str, flags: str) -> None:
    """32 sequences over 16 groups: the engines that count by group are told 2."""
    text = export(engine, spread_plan("deepseek-v3", ep_size=16, dp_attention=True))
    assert all(each in text for each in flags.split("|")), text
    assert "2 nodes" in text
