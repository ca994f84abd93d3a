"""Exported commands, read by the installed engine's own parser of arguments; no engine is started here."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import MODEL

sys.path.append(str(Path(__file__).parents[3] / "tests"))
sys.path.append(str(Path(__file__).parents[3] / "tests" / "reports"))
sys.path.append(str(Path(__file__).parents[3] / "tests" / "live"))
from samples_exports import CPU, DRAFTS, SITE, planned, sample, spread_plan, words_of
from test_printed_forms import ADVISED, VERSION, checked, exported
from test_printed_forms import PLANS as PRINTED

from magicdec.live.check import Check
from magicdec.reports.exports import export
from magicdec.schema.plan import Plan

COMMAND = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
PLANS = {name: lambda name=name: sample(name) for name in DRAFTS} | {
    "stages": lambda: spread_plan("llama-3.1-405b", tp_size=8, pp_size=2),
    "experts": lambda: spread_plan("deepseek-v3", ep_size=16, dp_attention=True),
    "beyond the captured graphs": lambda: planned(
        "vllm", draft="eagle3", batch_sizes=(300,)
    ),
    "fp8 cache": lambda: planned("vllm", kv_dtype="fp8"),
    "a short memory": lambda: planned(
        "vllm", hardware=("l4-24gb",), draft="none", batch_sizes=(1,)
    ),
}


def parsed(words: list[str]) -> Any:
    """As the server reads its command line; an argument that it does not know ends the process."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


@pytest.mark.parametrize("name", PLANS)
def test_the_engine_knows_every_argument(name: str) -> None:
    document: Plan = PLANS[name]()
    for site, start in ((SITE, ["vllm", "serve"]), (CPU, COMMAND)):
        words = words_of(export("vllm", document, site=site))
        assert words[: len(start)] == start
        arguments = parsed(["--model", *words[len(start) :]])
        assert arguments.max_num_seqs == -(
            -document.best.batch_size // document.best.layout.dp_size
        )
        assert (arguments.speculative_config is None) == (
            "--speculative-config" not in words
        )


@pytest.mark.parametrize("is_fixed", [False, True], ids=["gamma table", "fixed gamma"])
def test_the_draft_takes_the_configuration_that_the_engine_makes_of_it(
    is_fixed: bool,
) -> None:
    """On this machine: a CPU, the embedded model, fp32. The table and the fixed gamma that stands in the comments."""
    from vllm.engine.arg_utils import EngineArgs

    from magicdec_vllm.draft import SparseDraft

    text = export("vllm", sample("sparse-self"), site=SITE if is_fixed else CPU)
    words = words_of(text)[3 if is_fixed else len(COMMAND) :]
    if is_fixed:
        (at,) = [
            i
            for i, line in enumerate(text.splitlines())
            if "Gamma 3 at every step" in line
        ]
        instead = [
            line.lstrip("# ")
            for line in text.splitlines()[at:]
            if line.startswith("#  ")
        ]
        words = [
            *words[: words.index("--speculative-config")],
            *words_of("\n".join(instead)),
        ]
        words += ["--enforce-eager"]
    config = EngineArgs.from_cli_args(
        parsed(["--model", str(MODEL), *words])
    ).create_engine_config()
    draft = SparseDraft(config)
    assert draft.gamma == sample("sparse-self").best.gamma
    assert (draft.settings.gamma_table is None) == is_fixed
    assert config.scheduler_config.max_num_seqs == 32


def test_a_cost_check_imposes_acceptance_that_the_engine_takes() -> None:
    """Every arm's arguments, the keys of its draft, and the length that it is to accept."""
    from dataclasses import fields

    from vllm.config.speculative import SpeculativeConfig

    from magicdec.reports.cost_check import write_cost_check

    plan = planned("vllm", draft="eagle3", draft_method="eagle3")
    text = write_cost_check(
        "vllm",
        plan,
        {1: 1.7, plan.best.gamma: 2.4},
        plan_file="plan.json",
        site=SITE,
    )
    _, *arms = text.split("vllm serve")
    assert len(arms) == 3
    known = {field.name for field in fields(SpeculativeConfig)}
    for arm in arms:
        command = arm.split("# Then")[0]
        arguments = parsed(["--model", *words_of(command)])
        config = arguments.speculative_config
        if config is None:
            continue
        assert set(config) <= known
        assert config["rejection_sample_method"] == "synthetic"
        rates = SpeculativeConfig._acceptance_length_to_rates(
            config["synthetic_acceptance_length"], config["num_speculative_tokens"]
        )
        assert len(rates) == config["num_speculative_tokens"]
        assert 1.0 + sum(rates) == pytest.approx(
            config["synthetic_acceptance_length"], abs=0.02
        )


@pytest.mark.parametrize("name", PRINTED)
def test_printed_exports_are_read_with_the_keys_of_their_draft(name: str) -> None:
    from dataclasses import fields

    from vllm.config.speculative import SpeculativeConfig

    again = exported(name, "vllm")
    words = words_of(export("vllm", again.plan, site=again.site))
    config = parsed(["--model", *words[2:]]).speculative_config or {}
    assert set(config) <= {field.name for field in fields(SpeculativeConfig)}


def advised() -> list[tuple[str, str]]:
    """Settings that check advises for vLLM in the installed version."""
    settings = []
    for name, text in ADVISED.items():
        answer: Check = checked(text)
        is_here = answer.command.version in (None, VERSION["vllm"])
        for change in answer.changes:
            if answer.command.engine == "vllm" and is_here and change.option[0] == "-":
                settings.append((name, change.option.partition(" (")[0]))
    return settings


def test_advised_settings_are_read_with_the_keys_of_their_draft() -> None:
    from dataclasses import fields

    from vllm.config.speculative import SpeculativeConfig

    settings = advised()
    assert len(settings) > 5
    for name, setting in settings:
        config = (
            parsed(["--model", "x", *shlex.split(setting)]).speculative_config or {}
        )
        assert set(config) <= {field.name for field in fields(SpeculativeConfig)}, name


@pytest.mark.parametrize(
    ("config", "is_taken"),
    [
        ({}, True),
        (
            {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 2.0,
            },
            True,
        ),
        ({"synthetic_acceptance_length": 2.0}, False),
        ({"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 16, 1]]}, True),
    ],
)
def test_a_length_that_is_imposed_goes_with_its_method(
    config: dict[str, Any], is_taken: bool
) -> None:
    """Advice to leave it out names both keys."""
    from vllm.engine.arg_utils import EngineArgs

    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    words = ["--model", str(MODEL), "--enforce-eager", "--speculative-config"]
    arguments = EngineArgs.from_cli_args(parsed([*words, json.dumps(ngram | config)]))
    if is_taken:
        arguments.create_engine_config()
        return
    with pytest.raises(ValueError, match="only valid with"):
        arguments.create_engine_config()
