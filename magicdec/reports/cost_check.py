"""Runs that settle a plan's cost on its user's own server: without a draft, with the planned gamma and
with one drafted token, each with the acceptance imposed, so that the text does not matter.

The result files' names say what was run: cost-plain.json, cost-k3-2.64.json (gamma 3, 2.64 tokens per
step). `magicdec calibrate --results FILE --plan PLAN` reads them (live/cost_check.py).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping

import msgspec

from magicdec.errors import ConfigError
from magicdec.reports.deployment import Deployment, comment
from magicdec.reports.exports import deployment_on, is_whole_block, write_settings
from magicdec.schema.plan import UNKNOWN_SITE, Plan, Site

LEAST_OUTPUT = 512
"""Generated tokens per request: prompts of others then take little of the time between tokens."""
WAVES = 4
"""Requests of each user."""
GENERATORS = {
    "vllm": ("vllm bench serve --backend vllm", "--save-result --result-filename"),
    "sglang": ("python3 -m sglang.bench_serving --backend sglang", "--output-file"),
    "trtllm": (
        "python3 -m tensorrt_llm.serve.scripts.benchmark_serving --backend openai",
        "--save-result --result-filename",
    ),
}
"""Each engine's own load generator, and its options for a result file."""


def write_cost_check(
    engine: str,
    plan: Plan,
    tokens: Mapping[int, float],
    *,
    plan_file: str,
    site: Site = UNKNOWN_SITE,
) -> str:
    """The servers to start one after the other, and the load to send to each. `tokens`: planned tokens
    per step by gamma, 1 and the planned one.

    Raises ConfigError for a plan without a draft.
    """
    deployment = deployment_on(engine, plan, site=site)
    if not deployment.best.is_speculative:
        raise ConfigError(
            "the plan's choice drafts nothing, so there is no cost to check: give --candidate"
        )
    without = msgspec.structs.replace(
        deployment.best, draft="none", draft_method="none", draft_budget=None, gamma=0
    )
    plain = dataclasses.replace(deployment, best=without, bands=())
    if is_whole_block(engine, deployment.best):
        tokens = {deployment.best.gamma: tokens[deployment.best.gamma]}
    output_len = max(plan.request.gen_len, LEAST_OUTPUT)
    names = [result_name(0, 1.0)]
    parts = [
        _part(
            "1. Without a draft.",
            engine,
            plain,
            write_settings(engine, plain),
            names[0],
            output_len,
        )
    ]
    for number, (gamma, imposed) in enumerate(sorted(tokens.items(), reverse=True), 2):
        best = msgspec.structs.replace(deployment.best, gamma=gamma)
        length = min(max(imposed, 1.0), gamma + 1.0)
        if engine == "trtllm":
            length = float(round(length))
        length = round(length, 2)
        arm = dataclasses.replace(
            deployment, best=best, bands=(), synthetic_tokens=length
        )
        names.append(result_name(gamma, length))
        title = f"{number}. Gamma {gamma}, {length:g} tokens per step imposed."
        settings = write_settings(engine, arm)
        parts.append(_part(title, engine, arm, settings, names[-1], output_len))
    files = " ".join(f"--results {name}" for name in names)
    last = comment(
        ["Read the results, stop the last server, and plan with what was measured:"]
    )
    return "\n".join(
        [
            *parts,
            f"{last}magicdec calibrate {files} --plan {shlex.quote(plan_file)} --engine {engine} "
            "-o measured.toml\n",
        ]
    )


def result_name(gamma: int, tokens: float) -> str:
    """The result file of a run."""
    if not gamma:
        return "cost-plain.json"
    return f"cost-k{gamma}-{tokens:g}.json"


def _part(
    title: str,
    engine: str,
    deployment: Deployment,
    settings: str,
    name: str,
    output_len: int,
) -> str:
    """One server with its load, sent from another shell once the server answers."""
    row = deployment.best
    generator, save = GENERATORS[engine]
    lengths = f"--random-input-len {row.context_len} --random-output-len {output_len}"
    load = (
        f"{generator} --model {shlex.quote(deployment.name)} --dataset-name random {lengths} --ignore-eos "
        f"--max-concurrency {row.batch_size} --num-prompts {WAVES * row.batch_size} "
        f"{save} {name}"
    )
    if engine == "sglang":
        load = load.replace(" --ignore-eos", "").replace(
            "--dataset-name random", "--dataset-name random --random-range-ratio 1"
        )
    then = comment(["Then, in another shell:"])
    return f"{comment([title])}{_start(settings)}{then}# {load}\n"


def _start(settings: str) -> str:
    """The command and the file of an export, without the remarks on the plan."""
    lines = settings.splitlines(keepends=True)
    serve = [at for at, line in enumerate(lines) if line.startswith("# Serve with:")]
    first = len(lines)
    if serve:
        first = serve[0]
    kept = [
        line for at, line in enumerate(lines) if not line.startswith("#") or at >= first
    ]
    return "".join(kept)
