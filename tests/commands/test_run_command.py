"""`magicdec run`: draft models, several ranks, and plans, as a user starts them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from magicdec.errors import CapacityError, ConfigError
from magicdec.measure.configuration import (
    BenchmarkRequest,
    check_request,
    session_bytes,
)
from magicdec.perfmodel.planner import PlanRequest, make_plan
from magicdec.schema.plan import Formats, GammaTable, NeedsAcceptance, Plan
from magicdec.schema.record import read_records
from magicdec.schema.row import Candidate, columns, nested
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.speculation import SpeculationSpec
from tests.asked import asked_of_run, planned_runs
from tests.processes import Done, Program, magicdec

SMALL = (
    "--batch",
    "2",
    "--context",
    "120",
    "--gen-len",
    "6",
    "--repetitions",
    "1",
    "--quiet",
    "--format",
    "json",
)


DRAFTED = (*SMALL[:-2], "--draft-budget", "32")


def rows_of(done: Done) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def generated(path: Path) -> list[list[int]]:
    return [json.loads(line)["generated_ids"] for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_one_rank_and_two_generate_the_same(tmp_path: Path, program: Program) -> None:
    """The same tokens and acceptance; each records itself once, with its ranks. The draft model is on one rank."""
    options = (
        *SMALL,
        "--draft",
        "embedded",
        "--draft-method",
        "streamingllm",
        "--draft-budget",
        "32",
        "--gamma",
        "2",
    )
    outputs, rows = [], []
    for name, extra in (("one", ()), ("two", ("--draft-tp", "1", "--tp", "2"))):
        records, output = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-output.jsonl"
        files = ("--records", str(records), "--save-output", str(output))
        rows.append(rows_of(program("run", *options, *extra, *files)))
        outputs.append(generated(output))
        assert len(read_records(records)) == 2
    assert outputs[0] == outputs[1]
    assert [row.get("tp_size", 1) for _, row in rows] == [1, 2]
    assert [row.get("draft_tp_size") for _, row in rows] == [None, 1]
    assert len({tuple(row["acceptance_histogram"]) for _, row in rows}) == 1
    assert rows[0][1]["draft"] == "embedded"


def plan_of(**changes: Any) -> Plan:
    """A plan of the embedded model whose best is a streamingllm draft, with some of its parts changed."""
    request = PlanRequest(
        model="embedded", batch_sizes=(2,), context_lens=(120,), gen_len=5, draft="self", draft_budgets=(32,), gamma=2,
        acceptance_rate=0.9, tp_size=1, temperature=0.0, weight_dtype="fp32", kv_dtype="fp32",
    )  # fmt: skip
    answer = make_plan(request)
    row = answer.candidates[0]
    others = ({"draft_budget": 48, "batch_size": 4}, {"draft_method": "snapkv"})
    rows = [row, *(changed(row, **each) for each in others)]
    best = changes.pop("best", row)
    changes = {"choice": answer.choosing(best), "candidates": rows} | changes
    return msgspec.structs.replace(answer, **changes)


def changed(row: Candidate, **flat: Any) -> Candidate:
    """A candidate with some of its columns changed."""
    return msgspec.convert(nested(columns(row) | flat), Candidate)


def plan_file(path: Path, **changes: Any) -> Path:
    path.write_text(plan_of(**changes).to_json())
    return path


def test_a_plan_runs_its_best_and_runner_up_and_options_override(
    tmp_path: Path, program: Program
) -> None:
    path = plan_file(tmp_path / "plan.json")
    rows = rows_of(
        program(
            "run",
            "--plan",
            str(path),
            "--gamma",
            "1,3",
            "--repetitions",
            "1",
            "--quiet",
            "--format",
            "json",
        )
    )
    found = [(row.get("draft_method", "none"), row.get("gamma", 0)) for row in rows]
    assert found == [
        ("none", 0),
        ("streamingllm", 1),
        ("streamingllm", 3),
        ("snapkv", 1),
        ("snapkv", 3),
    ]
    assert {
        (r["batch_size"], r["context_len"], r["gen_len"], r.get("temperature", 0.0))
        for r in rows
    } == {(2, 120, 5, 0.0)}


def test_a_plans_head_is_run_from_the_checkpoint_that_it_names(tmp_path: Path) -> None:
    answer = plan_of()
    eagle3 = changed(
        answer.best,
        draft="eagle3",
        draft_method="eagle3",
        draft_budget=None,
        gamma=4,
        draft_checkpoint="heads/mine",
    )
    path = plan_file(tmp_path / "plan.json", best=eagle3, candidates=[eagle3])
    run = planned_runs(path)[0]
    assert (run.draft, run.draft_model, run.gamma) == (
        "eagle3",
        "heads/mine",
        "4",
    )


def test_a_plan_whose_draft_cannot_be_run_names_what_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's own best that is run; without any known acceptance, what to give; a draft named here is enough."""
    monkeypatch.setattr(
        "magicdec.measure.plan_runs.NOT_RUN", ("suffix",)
    )  # as of a planned method
    answer = plan_of()
    suffix = changed(
        answer.best, draft="suffix", draft_method="suffix", draft_budget=None, gamma=4
    )
    path = plan_file(
        tmp_path / "plan.json", best=suffix, candidates=[suffix, *answer.candidates]
    )
    instead = "its best that is run: --draft self --draft-method streamingllm --draft-budget 32 --gamma 2"
    with pytest.raises(ConfigError, match=instead):
        planned_runs(path)
    runner_up = planned_runs(path, "--draft", "self")[1]
    assert (runner_up.draft_method, runner_up.draft_budget) == (
        "streamingllm",
        "32",
    )
    unknown = [
        NeedsAcceptance(draft="self", draft_method="snapkv", reason="not published")
    ]
    plan_file(path, best=answer.autoregressive, candidates=[], needs_acceptance=unknown)
    with pytest.raises(
        ConfigError,
        match="acceptance of self/snapkv on embedded is not known; plan with",
    ):
        planned_runs(path)
    own = ("--draft", "ngram", "--draft-budget", "96", "--gamma", "7")
    (run,) = planned_runs(path, *own)
    assert (run.draft, run.draft_budget, run.gamma) == ("ngram", "96", "7")
    (run,) = planned_runs(path, "--draft", "self")
    usual = asked_of_run()
    assert run.draft_method == usual.draft_method
    assert (run.draft_budget, run.gamma) == (usual.draft_budget, usual.gamma)


FORMATS = {
    "weight_dtype": "bf16",
    "kv_dtype": "bf16",
    "draft_weight_dtype": "bf16",
    "draft_kv_dtype": "bf16",
}


def test_the_dtype_of_a_plan(tmp_path: Path) -> None:
    """Of its formats."""
    for name, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        formats = Formats(**dict.fromkeys(FORMATS, name))
        for run in planned_runs(plan_file(tmp_path / "plan.json", precision=formats)):
            assert run.dtype == dtype


def test_a_draft_in_fewer_bits_is_planned_and_not_run(tmp_path: Path) -> None:
    """A copy of the target's weights, as the planner states it; a look-up has none."""
    asked = PlanRequest(
        model="llama-3.1-8b", hardware=("a100-sxm-80gb",), batch_sizes=(64,), context_lens=(32_768,),
        draft="self", draft_method="streamingllm", acceptance_rate=0.9, draft_weight_dtype="fp8",
    )  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(make_plan(asked).to_json())
    with pytest.raises(ConfigError, match="a draft's weights in fp8, which is not run"):
        planned_runs(path)
    assert planned_runs(path, "--dtype", "float16")[0].dtype == "float16"
    looked_up = msgspec.structs.replace(asked, draft="ngram", draft_method=None)
    path.write_text(make_plan(looked_up).to_json())
    assert planned_runs(path)[0].dtype == "bfloat16"


def test_a_plan_in_a_format_that_cannot_be_run(tmp_path: Path) -> None:
    for formats, message in (
        (
            {"weight_dtype": "fp8"},
            "plans weights in fp8, which is not run; --dtype bfloat16 runs the rest of it",
        ),
        (
            {"kv_dtype": "fp8", "draft_kv_dtype": "int4"},
            "plans a KV cache in fp8 and a draft's KV cache in int4",
        ),
    ):
        path = plan_file(
            tmp_path / "plan.json", precision=Formats(**(FORMATS | formats))
        )
        with pytest.raises(ConfigError, match=message):
            planned_runs(path)
        assert planned_runs(path, "--dtype", "float16")[0].dtype == "float16"


def test_bfloat16_on_a_device_without_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation
    )
    request = BenchmarkRequest(
        model="embedded", batch_size=1, context_len=100, device="cuda", dtype="bfloat16"
    )
    with pytest.raises(
        ConfigError,
        match="does not compute in bfloat16; use --dtype float16 or float32",
    ):
        check_request(request, load_model_spec("embedded"))


def test_gamma_is_chosen_from_a_plans_table(tmp_path: Path, program: Program) -> None:
    """Up to the table's largest gamma, at the table's entry for this batch and context; the record says so."""
    cells = [[1.0] * 3] * 3
    table = GammaTable(
        tp_size=1, batch_sizes=[1, 2, 8], context_lens=[64, 128, 4096], gamma=[[0, 0, 0], [5, 1, 6], [3, 3, 3]],
        speedup=cells, verdict=[["pays"] * 3] * 3, fits=[[True] * 3] * 3, break_even_gen_len=[[None] * 3] * 3,
        break_even_context=[None] * 3,
    )  # fmt: skip
    path = plan_file(tmp_path / "plan.json", gamma_table=table)
    options = (
        "--plan",
        str(path),
        "--adaptive",
        "--repetitions",
        "1",
        "--quiet",
        "--format",
        "json",
    )
    for row in rows_of(program("run", *options))[1:]:
        assert (row["gamma"], row["adaptive"], len(row["gamma_table"])) == (6, True, 12)
        drafted = row["acceptance_trials_by_position"]
        assert drafted[0] > 0
        assert drafted[1:] == [0] * 5
    document = json.loads(path.read_text())
    document["gamma_table"]["gamma"] = [[1]]
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="gamma must have a row per batch size"):
        planned_runs(path)


def test_the_memory_check_counts_the_draft_model_and_its_cache() -> None:
    """Against the specs' own numbers: embedded drafting for itself over a full cache doubles everything."""
    target = load_model_spec("embedded")
    alone = BenchmarkRequest(
        model="embedded", batch_size=2, context_len=100, gen_len=10
    )
    spec = SpeculationSpec(draft="embedded", draft_method="full", gamma=3)
    drafted = BenchmarkRequest(
        model="embedded", batch_size=2, context_len=97, gen_len=10, speculations=(spec,)
    )
    assert session_bytes(alone)[0] == 4 * target.num_parameters
    assert session_bytes(drafted) == pytest.approx(
        [2 * x for x in session_bytes(alone)]
    )
    sparse = SpeculationSpec(draft="llama-68m", draft_method="full", gamma=3)
    long = BenchmarkRequest(
        model="llama-2-7b",
        weights="random",
        batch_size=1,
        context_len=3000,
        gen_len=100,
        speculations=(sparse,),
    )
    with pytest.raises(
        CapacityError,
        match="llama-68m holds 2048 positions, 3104 are needed; use --draft-method",
    ):
        check_request(long, load_model_spec("llama-2-7b"))


def test_threads_are_bound_before_torch_is_loaded() -> None:
    """Reading options and checking paths must not import torch: it reads the binding once."""
    code = (
        "import sys, magicdec.commands.run as run\n"
        "from magicdec.measure import environment\n"
        "def check(): print('torch' in sys.modules); sys.exit(0)\n"
        "environment.bind_threads = check\n"
        "from magicdec.cli import main; sys.argv[1:] = ['run', '--batch', '1', '--context', '100']; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_a_run_to_its_end_after_prompts_of_mixed_lengths(
    tmp_path: Path, program: Program
) -> None:
    """120 tokens after 150 to 300: greedy speculation gives what autoregressive decoding does, to the last token."""
    options = (
        "--batch",
        "3",
        "--context",
        "300",
        "--context-spread",
        "0.5",
        "--gen-len",
        "120",
        "--temperature",
        "0",
    )
    options += (
        "--repetitions",
        "1",
        "--run-to-end",
        "--draft-budget",
        "64",
        "--quiet",
        "--format",
        "json",
    )
    alone, drafted = tmp_path / "alone.jsonl", tmp_path / "drafted.jsonl"
    rows_of(program("run", *options, "--draft", "none", "--save-output", str(alone)))
    rows = rows_of(program("run", *options, "--save-output", str(drafted)))
    assert generated(drafted) == generated(alone)
    assert [len(tokens) for tokens in generated(drafted)] == [120] * 3
    prompts = [
        json.loads(line)["prompt_ids"] for line in drafted.read_text().splitlines()
    ]
    assert [len(prompt) for prompt in prompts] == [150, 225, 300]
    assert rows[1]["static_batch_tokens_per_s"] < rows[1]["tokens_per_s"]
    assert rows[1]["speedup_static_batch"] > 0


@pytest.mark.slow
def test_a_queue_is_recorded_and_changes_no_token(
    tmp_path: Path, program: Program
) -> None:
    """Greedy, with 5 prompts through 2 slots: the tokens are those of a batch of 5."""
    options = (
        "--context-spread",
        "0.3",
        "--draft-budget",
        "32",
        "--gamma",
        "3",
        "--temperature",
        "0",
    )
    queued, whole = tmp_path / "queued.jsonl", tmp_path / "whole.jsonl"
    extra = ("--queue", "5", "--save-output", str(queued))
    done = program("run", *SMALL, *options, *extra)
    alone, drafted = rows_of(done)
    assert (alone["num_prompts"], drafted["num_prompts"]) == (5, 5)
    assert 0 < drafted["refilled_tokens_per_s"] < drafted["tokens_per_s"]
    assert drafted["speedup_refilled"] > 0
    rows_of(
        program("run", *SMALL, *options, "--batch", "5", "--save-output", str(whole))
    )
    assert sorted(generated(queued)) == sorted(generated(whole))


@pytest.mark.slow
def test_two_nodes_generate_what_one_process_does(
    tmp_path: Path, program: Program
) -> None:
    """Two torchrun processes that meet at a rendezvous on loopback, one rank each; only the first node writes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
    )
    torchrun += (
        "--rdzv-id",
        "test",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--local-addr",
        "127.0.0.1",
        "-m",
    )
    one, outputs = (
        tmp_path / "one.jsonl",
        [tmp_path / f"node{i}.jsonl" for i in range(2)],
    )
    records, options = tmp_path / "records.jsonl", ("run", *DRAFTED)
    assert program(*options, "--save-output", str(one)).returncode == 0
    with ThreadPoolExecutor() as pool:
        start = partial(
            magicdec, *options, "--records", str(records), launcher=torchrun
        )
        nodes = list(
            pool.map(lambda output: start("--save-output", str(output)), outputs)
        )
    assert [node.returncode for node in nodes] == [0, 0], nodes
    written = [path for path in outputs if path.exists()]
    assert len(written) == 1
    assert generated(written[0]) == generated(one)
    assert [record.tp_size for record in read_records(records)] == [2, 2]
