"""`magicdec plan` as a program: formats, records, cold start, and errors in one line."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import typer
from typer.testing import CliRunner

from magicdec.commands.plan import plan_command
from magicdec.schema.record import read_records

app = typer.Typer()
app.command()(plan_command)
BASE = ["--acceptance-rate", "0.8"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*BASE, *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_json_is_one_object_with_the_papers_question_by_default() -> None:
    document = json.loads(run("--format", "json"))
    assert document["model"] == "llama-3.1-8b"
    best = document["choice"]["row"]
    assert best["layout"]["tp_size"] == 4
    assert (best["batch_size"], best["context_len"]) == (64, 32_768)


def test_csv_has_a_header_and_a_row_per_candidate() -> None:
    rows = list(csv.DictReader(io.StringIO(run("--format", "csv"))))
    assert len(rows) == 13
    assert float(rows[1]["speedup"]) > 0
    assert (
        "speedup_static_batch"
        in run("--format", "csv", "--gen-len", "100").splitlines()[0]
    )


def test_records_hold_the_evaluated_grid(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    run("--record", str(path), "--context", "8192,32768")
    records = read_records(path)
    assert len(records) == 2 * 13
    assert {record.source for record in records} <= {"analytical", "calibrated"}
    assert all(
        record.tpot_s and record.hardware == "a100-sxm-80gb" for record in records
    )


def test_a_plan_imports_only_what_it_needs() -> None:
    """Neither torch nor plotting, nor pydantic, by which typer would convert options: a plan's time is mostly
    imports.
    """
    code = (
        "import sys; from magicdec.cli import main\n"
        "sys.argv = ['magicdec', 'plan', '--gpus', '2', '--tpot-ms', '30.5', '--format', 'json']\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'torch', 'pandas', 'matplotlib', 'scipy', 'transformers', 'pydantic'}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert re.match(r"\{", done.stdout)


def test_a_locally_calibrated_machine_is_planned_from_its_files(tmp_path: Path) -> None:
    """A CPU profile, an engine profile with measured terms, and a measured acceptance, for a model directory."""
    from magicdec.perfmodel.acceptance import MeasuredProfile, save_profile
    from magicdec.perfmodel.acceptance.law import Law
    from magicdec.perfmodel.kernels.profile import HardwareProfile, save_hardware
    from magicdec.specs.engine import EngineProfile, save_engine

    config = {
        "model_type": "llama", "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 8, "head_dim": 32, "vocab_size": 2048, "max_position_embeddings": 5120,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    hardware = HardwareProfile(
        name="here",
        kind="cpu",
        memory_bytes=8e9,
        memory_bytes_per_s=1.5e10,
        flops_per_s={"fp32": 1.2e11},
    )
    save_hardware(hardware, tmp_path / "hardware.toml")
    engine = EngineProfile(name="local").with_constants(
        {
            "overheads.layer_overhead_s": 2e-4,
            "sampling.accept_s_per_element": 1e-8,
            "memory.workspace_bytes": 0.0,
        }
    )
    save_engine(engine, tmp_path / "engine.toml")
    law = Law(rejection=0.2, budget_exponent=0.3, reference_budget=256)
    save_profile(
        MeasuredProfile(
            model="small", draft_method="streamingllm", law=law, source="measured"
        ),
        tmp_path / "acceptance.json",
    )
    arguments = [
        "--model",
        str(tmp_path / "small"),
        "--hardware",
        str(tmp_path / "hardware.toml"),
        "--batch",
        "32",
    ]
    arguments += [
        "--engine",
        str(tmp_path / "engine.toml"),
        "--acceptance",
        str(tmp_path / "acceptance.json"),
    ]
    result = CliRunner().invoke(
        app,
        [
            *arguments,
            "--draft-method",
            "streamingllm",
            "--context",
            "4096",
            "--format",
            "json",
        ],
        catch_exceptions=False,
    )
    document = json.loads(result.output)
    best = document["choice"]["row"]
    drafting = best["drafting"]
    assert best["layout"]["tp_size"] == 1
    assert drafting["method"] == "streamingllm"
    assert (
        document["memory"]["kv_bytes"]
        == 32 * (4096 + drafting["gamma"] + 1) * 3 * 2 * 8 * 32 * 4
    )  # fp32 on a CPU
    assert best["decoding"]["gain"]["speedup"] > 1.2
