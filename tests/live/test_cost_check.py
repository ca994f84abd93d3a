"""A cost check exported, served by a simulated server with other costs, and read back."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.counts import constant_rate
from magicdec.errors import ConfigError
from magicdec.live.cost_check import read_cost_run
from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.rate.requests import alike
from magicdec.perfmodel.rate.simulate import Server, simulate
from magicdec.perfmodel.variations import priced
from magicdec.schema.gamma_table import TableGamma
from magicdec.schema.plan import load_plan
from magicdec.specs.speculation import AUTOREGRESSIVE

ASKED = "--model llama-3.1-8b --hardware h100 --context 1024 --batch 4 --tp 1 --draft eagle3"


def run(*words: str) -> str:
    register_commands(words[0])
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def served(text: str, truth, choice, folder) -> list[str]:
    """Result files of every load in an export, from a simulated server with the engine `truth`."""
    names = []
    loads = re.findall(
        r"--random-input-len (\d+) --random-output-len (\d+) .*--max-concurrency (\d+) --num-prompts "
        r"(\d+) .* (cost-\S+)",
        text,
    )
    for prompt, output, users, number, name in loads:
        requests = alike(int(number), prompt_len=int(prompt), output_len=int(output))
        imposed = re.match(r"cost-k(\d+)-([\d.]+)\.json", name)
        policy = None
        acceptance = None
        setup = dataclasses.replace(
            choice.setup, engine=truth, speculation=AUTOREGRESSIVE
        )
        if imposed is not None:
            gamma, tokens = int(imposed[1]), float(imposed[2])
            rate = constant_rate(np.array([tokens]), np.array([gamma])).item()
            acceptance = constant_profile(rate, draft="eagle3", draft_method="eagle3")
            setup = dataclasses.replace(choice.setup, engine=truth)
            policy = TableGamma(
                batch_sizes=(1,), context_lens=(1024,), gammas=((gamma,),)
            )
        server = Server.of(
            setup,
            requests,
            acceptance=acceptance,
            policy=policy,
            max_sequences=int(users),
        )
        tpot_s = float(simulate(server, requests).tpot_s.mean())
        (folder / name).write_text(
            json.dumps(
                {
                    "completed": len(requests.prompt_len),
                    "mean_tpot_ms": 1e3 * tpot_s,
                    "max_concurrency": int(users),
                    "total_input_tokens": int(requests.prompt_len.sum()),
                    "total_output_tokens": int(requests.output_len.sum()),
                }
            )
        )
        names.append(str(folder / name))
    return names


def width(text: str) -> float:
    low, high = re.search(r"interval\s+([\d.]+)–([\d.]+)", text).groups()
    return float(high) / float(low)


@pytest.mark.slow
def test_a_cost_check_is_exported_run_and_read_back(tmp_path):
    plan = tmp_path / "plan.json"
    run("plan", *ASKED.split(), "--format", "json", "-o", str(plan))
    text = run("export", "vllm", str(plan), "--check-cost")
    choice = priced(load_plan(plan), "vllm")
    overheads = choice.setup.engine.overheads
    truth = choice.setup.engine.with_constants(
        {
            "kernels.gemm_factor": 1.3 * choice.setup.engine.kernels.gemm_factor,
            "overheads.step_overhead_s": overheads.step_overhead_s + 3e-3,
            "overheads.draft_step_overhead_s": overheads.draft_step_overhead_s + 5e-4,
        }
    )
    names = served(text, truth, choice, tmp_path)
    assert len(names) == 3
    own = tmp_path / "measured.toml"
    files = [word for name in names for word in ("--results", name)]
    lines = run("calibrate", *files, "--plan", str(plan), "-o", str(own)).splitlines()
    now = [float(each) for each in re.findall(r"now ([+-]\d+)%", " ".join(lines))]
    assert len(now) == 3
    assert max(map(abs, now)) <= 5.0
    given = ["--acceptance-rate", "0.7", "--gamma", "3"]
    before = run("plan", *ASKED.split(), *given)
    after = run("plan", *ASKED.split(), *given, "--engine", str(own))
    assert "cost measured (yours)" in after.replace("\n", " ")
    assert "cost measured" not in before
    assert width(after) < width(before)


@pytest.mark.slow
def test_imposed_tokens_are_within_what_the_engine_takes(tmp_path):
    plan = tmp_path / "plan.json"
    run("plan", *ASKED.split(), "--format", "json", "-o", str(plan))
    for engine in ("vllm", "sglang", "trtllm"):
        text = run("export", engine, str(plan), "--check-cost")
        runs = re.findall(r"cost-k(\d+)-([\d.]+)\.json(?: |$)", text)
        assert {int(gamma) for gamma, _ in runs} >= {1}
        for gamma, tokens in runs:
            assert 1.0 <= float(tokens) <= int(gamma) + 1.0
    assert "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS" in text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("other.json", "{}", "no result of a cost check"),
        ("cost-plain.json", "{", "no result of a load generator"),
        ("cost-k3-9.json", "{}", "no result of a load generator"),
        (
            "cost-k3-9.json",
            '{"completed": 1, "mean_tpot_ms": 5, "max_concurrency": 1, "total_input_tokens": 9, '
            '"total_output_tokens": 9}',
            "are not from 1 to 4",
        ),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_cost_run(path)
