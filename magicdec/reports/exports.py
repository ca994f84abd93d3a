"""A plan as the flags of a serving engine, with what the engine supports of it and what it does not.

Written for, and checked against the sources of, the versions in `VERSIONS`:
    vLLM        vllm/config/speculative.py, vllm/v1/spec_decode/dynamic/utils.py, docs/features/speculative_decoding/
    SGLang      sglang/srt/arg_groups/{fields/spec,speculative_hook}.py, sglang/srt/speculative/adaptive_spec_params.py
    TensorRT-LLM  tensorrt_llm/llmapi/llm_args.py (DecodingBaseConfig), docs/source/features/speculative-decoding.md
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from magicdec.errors import ConfigError, unknown_choice
from magicdec.naming import describe
from magicdec.plan_document import GammaTable, Plan, Verdict
from magicdec.records import Record
from magicdec.reports.data import candidate_record

VERSIONS = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5.23", "trtllm": "TensorRT-LLM 1.2"}
PLUGIN_VERSION = "vLLM 0.32"
PLUGIN_CLASS = "magicdec.vllm.draft.SparseDraft"
PLUGIN_METHODS = ("streamingllm",)
"""Self-drafts that magicdec's own plugin (magicdec/vllm) runs in vLLM on any device."""
PLUGIN_PAGE_SIZE, PLUGIN_SMALLEST_BUDGET = 32, 96
PROMPT_LOOKUP_MAX = 4
HEADS = ("eagle", "eagle3", "mtp")
"""Draft methods of trained heads."""
WITHOUT_CHECKPOINT = ("mtp", "suffix")
"""Drafts that come with the target, or need no network."""
SGLANG_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "EAGLE"}
"""Multi-token prediction runs as EAGLE, with the target's own heads."""
Band = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What of a plan a serving engine can be told."""

    model: str
    best: Record
    verdict: Verdict
    bands: tuple[Band, ...]
    """(first batch, last batch, gamma), without gaps from batch 1 on, at the best configuration's context."""
    reason: str = ""
    """Why this is not what the plan chose, where it is not."""
    table: GammaTable | None = None
    """All of the plan's gammas, for an engine that can be told them by batch and context."""

    @property
    def max_gamma(self) -> int:
        return max([self.best.gamma, *(gamma for _, _, gamma in self.bands)])

    @property
    def is_sparse(self) -> bool:
        return self.best.draft_budget is not None

    @property
    def varies(self) -> bool:
        return len({gamma for _, _, gamma in self.bands}) > 1


def export(engine: str, plan: Plan, *, reason: str = "") -> str:
    """The text to paste for `engine`: comments, then a command or a configuration file.

    `plan` is priced on this engine (perfmodel/replan.py); `reason` says why its best is not what was planned first.
    Raises ConfigError for an unknown engine, and for a plan that does not fit in memory.
    """
    return write_settings(engine, replace(read_deployment(plan), reason=reason))


def check_engine(engine: str) -> None:
    """Raises ConfigError for an engine that nothing is written for."""
    if engine not in VERSIONS:
        raise unknown_choice("engine", engine, VERSIONS)


def write_settings(engine: str, deployment: Deployment) -> str:
    """The text to paste for what is to be deployed. Raises ConfigError for an unknown engine."""
    writers: dict[str, Callable[[Deployment], str]] = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}
    check_engine(engine)
    return writers[engine](deployment)


def read_deployment(plan: Plan) -> Deployment:
    """Raises ConfigError where the plan cannot be run, or names what no command line can hold."""
    best = plan.best
    if not best.fits:
        raise ConfigError(
            "the plan's best configuration does not fit in memory: plan with more devices or a smaller batch"
        )
    record = candidate_record(plan, best)
    for name in (record.model, record.draft):
        if not name or not name.isprintable():
            raise ConfigError(f"the plan's name {name!r} cannot be written into a command")
    return Deployment(
        model=record.model,
        best=record,
        verdict=best.verdict,
        bands=tuple(batch_bands(plan.gamma_table, record.context_len)),
        table=plan.gamma_table,
    )


def batch_bands(table: GammaTable, context_len: int) -> list[Band]:
    """Ranges of the batch size with one gamma each, from the plan's table at the context nearest to `context_len`.

    Once a draft is set up, drafting nothing costs what the engine charges for it, which the gammas count. A gamma holds
    from its batch size up to the next one of the table.
    """
    batches, contexts = table.batch_sizes, table.context_lens
    column = min(range(len(contexts)), key=lambda i: abs(contexts[i] - context_len))
    starts = [1, *batches[1:]]
    ends = [start - 1 for start in starts[1:]] + [batches[-1]]
    bands: list[Band] = []
    for start, end, row in zip(starts, ends, table.gamma_of_steps, strict=True):
        if bands and bands[-1][2] == row[column]:
            bands[-1] = (bands[-1][0], end, row[column])
        else:
            bands.append((start, end, row[column]))
    return bands


# What is common ------------------------------------------------------------------------------------------------------


def _heading(engine: str, plan: Deployment, *, version: str | None = None) -> list[str]:
    best = plan.best
    lines = [f"Written by magicdec for {version or VERSIONS[engine]}."]
    where = f"batch {best.batch_size}, context {best.context_len}, tp {best.tp_size}"
    where += f", {best.hardware}" if best.hardware else ""
    lines.append(f"Plan: {plan.model}, {where}: {describe(best)}" + (_predicted(plan) if best.is_speculative else ""))
    if plan.reason:
        lines.append(f"Note: {plan.reason}.")
    lines.append("Model names are magicdec's: put the checkpoint's path or Hugging Face name in their place.")
    return lines


def _predicted(plan: Deployment) -> str:
    best = plan.best
    return (
        f", predicted speedup {best.speedup:.2f} (90 % interval {best.speedup_low:.2f} to {best.speedup_high:.2f}): "
        f"{plan.verdict}"
    )


def _sparse_note(engine: str, plan: Deployment) -> list[str]:
    """Why a sparse-KV draft cannot be configured, or what is lost without it."""
    name = VERSIONS[engine]
    if plan.best.draft == "self":
        return [
            f"Not supported by {name}: self-speculation with a sparse KV cache ({plan.best.draft_method}). No flag of",
            "it drafts with the target's own weights, so what follows decodes autoregressively.",
        ]
    return [
        f"Not supported by {name}: the draft's sparse KV cache ({plan.best.draft_method}, budget",
        f"{plan.best.draft_budget}). The draft will read its full KV cache: the predicted speedup does not hold.",
    ]


def _can_speculate(plan: Deployment) -> bool:
    return plan.best.is_speculative and plan.best.draft != "self"


def _off_note(plan: Deployment) -> list[str]:
    if plan.best.is_speculative:
        return []
    return ["Speculation does not pay here: leave it off."]


def _schedule_note(plan: Deployment) -> list[str]:
    """The wanted schedule, for an engine or a build that takes it in another way."""
    if not plan.varies:
        return []
    text = "; ".join(f"{start} to {end}: {gamma}" for start, end, gamma in plan.bands)
    return [f"Wanted gamma by batch size: {text}."]


def _comment(lines: Sequence[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def _command(words: Sequence[Sequence[str]]) -> str:
    return " \\\n  ".join(" ".join(group) for group in words) + "\n"


# vLLM ----------------------------------------------------------------------------------------------------------------


def _vllm(plan: Deployment) -> str:
    best = plan.best
    if best.draft == "self" and best.draft_method in PLUGIN_METHODS:
        return _vllm_plugin(plan)
    lines = _heading("vllm", plan) + _off_note(plan)
    serve = ["vllm", "serve", shlex.quote(plan.model)]
    words = [serve, ["--tensor-parallel-size", str(best.tp_size)]]
    if best.is_speculative and plan.is_sparse:
        lines += _sparse_note("vllm", plan)
    if not _can_speculate(plan):
        return _comment(lines + (_schedule_note(plan) if best.is_speculative else [])) + _command(words)
    config: dict[str, Any] = _vllm_draft(best) | {"num_speculative_tokens": plan.max_gamma}
    if best.draft_tp_size is not None and best.draft_tp_size != best.tp_size:
        config["draft_tensor_parallel_size"] = best.draft_tp_size
    if best.temperature > 0 and config["method"] != "ngram":
        config["draft_sample_method"] = "probabilistic"
        lines.append("Supported: sampling from the draft (draft_sample_method), as the planned acceptance assumes.")
    if plan.varies:
        config["num_speculative_tokens_per_batch_size"] = [list(band) for band in plan.bands]
        lines += [
            "Supported: gamma by batch size (num_speculative_tokens_per_batch_size; not with data parallelism).",
            f"Not supported: gamma by context; the bands are those of context {best.context_len}.",
        ]
        if best.draft_method not in HEADS:
            lines.append("Untried by vLLM's own tests: gamma by batch size with a draft other than EAGLE and DFlash.")
    return _comment(lines) + _command([*words, ["--speculative-config", shlex.quote(json.dumps(config))]])


def _vllm_plugin(plan: Deployment) -> str:
    """The command that runs the plan's own draft, with magicdec's plugin."""
    best = plan.best
    assert best.draft_budget is not None
    budget = max(best.draft_budget, PLUGIN_SMALLEST_BUDGET)
    lines = [
        *_heading("vllm", plan, version=PLUGIN_VERSION),
        "Needs magicdec's plugin: pip install 'magicdec[vllm]' in the engine's environment (docs/vllm.md). Tested on",
        "CPUs; on a GPU nothing was measured yet.",
    ]
    if budget != best.draft_budget:
        lines.append(f"Changed: the budget holds at least three pages of {PLUGIN_PAGE_SIZE} tokens, so {budget}.")
    settings: dict[str, Any] = {"draft_method": best.draft_method, "draft_budget": budget}
    gammas = [best.gamma]
    if plan.table is not None and any(any(row) for row in plan.table.gamma_of_steps):
        gammas += [gamma for row in plan.table.gamma_of_steps for gamma in row]
        settings["gamma_table"] = {
            "batch_sizes": plan.table.batch_sizes,
            "context_lens": plan.table.context_lens,
            "gammas": plan.table.gamma_of_steps,
        }
        lines.append("Supported: gamma by batch and context, 0 included (gamma_table).")
    config: dict[str, Any] = {
        "method": "custom_class", "model": PLUGIN_CLASS, "num_speculative_tokens": max(gammas),
    }  # fmt: skip
    if best.temperature > 0:
        config["draft_sample_method"] = "probabilistic"
    words = [
        ["vllm", "serve", shlex.quote(plan.model)],
        ["--tensor-parallel-size", str(best.tp_size)],
        ["--block-size", str(PLUGIN_PAGE_SIZE)],
        ["--speculative-config", shlex.quote(json.dumps(config))],
        ["--additional-config", shlex.quote(json.dumps({"magicdec": settings}))],
    ]
    return _comment(lines) + _command(words)


def _vllm_draft(best: Record) -> dict[str, Any]:
    if best.draft_method == "ngram":
        return {"method": "ngram", "prompt_lookup_max": PROMPT_LOOKUP_MAX}
    if best.draft_method in WITHOUT_CHECKPOINT:
        return {"method": best.draft_method}
    return {"method": best.draft_method if best.draft_method in HEADS else "draft_model", "model": best.draft}


# SGLang --------------------------------------------------------------------------------------------------------------


def _sglang(plan: Deployment) -> str:
    best = plan.best
    lines = _heading("sglang", plan) + _off_note(plan)
    words = [
        ["python3", "-m", "sglang.launch_server"],
        ["--model-path", shlex.quote(plan.model)],
        ["--tp-size", str(best.tp_size)],
    ]
    if best.is_speculative and plan.is_sparse:
        lines += _sparse_note("sglang", plan)
    if not _can_speculate(plan):
        return _comment(lines + (_schedule_note(plan) if best.is_speculative else [])) + _command(words)
    candidates = {gamma for _, _, gamma in plan.bands}
    gamma = best.gamma if best.gamma in candidates or not plan.varies else plan.max_gamma
    if best.draft_method == "ngram":
        words.append(["--speculative-algorithm", "NGRAM"])
    else:
        algorithm = SGLANG_ALGORITHMS.get(best.draft_method, "STANDALONE")
        words.append(["--speculative-algorithm", algorithm])
        if best.draft_method not in WITHOUT_CHECKPOINT:
            words.append(["--speculative-draft-model-path", shlex.quote(best.draft)])
        words += [
            ["--speculative-num-steps", str(gamma)],
            ["--speculative-eagle-topk", "1"],
        ]
    words.append(["--speculative-num-draft-tokens", str(gamma + 1)])
    words.append(["--max-running-requests", str(best.batch_size)])  # speculation would reset it to 48
    if best.draft_method in HEADS and plan.varies:
        schedule = {str(start): {"candidate_steps": [steps]} for start, _, steps in plan.bands}
        words += [["--speculative-adaptive"], ["--speculative-adaptive-config", "gamma.json"]]
        lines += ["Supported: gamma by batch size. Save as gamma.json:", f"  {json.dumps(schedule)}"]
    elif plan.varies:
        lines.append("Not supported for this draft: gamma by batch size (--speculative-adaptive is for EAGLE only).")
        lines += _schedule_note(plan)
    if best.temperature > 0 and best.draft_method in HEADS:
        words.append(["--speculative-use-rejection-sampling"])
    elif best.temperature > 0 and best.draft_method != "ngram":
        lines.append("Not supported for this draft: rejection sampling; at temperature > 0 fewer drafts are accepted.")
    if best.draft_tp_size is not None and best.draft_tp_size != best.tp_size:
        lines.append(f"Not supported: a draft on {best.draft_tp_size} of {best.tp_size} ranks.")
    return _comment(lines) + _command(words)


# TensorRT-LLM --------------------------------------------------------------------------------------------------------


def _trtllm(plan: Deployment) -> str:
    best = plan.best
    lines = _heading("trtllm", plan) + _off_note(plan)
    command = f"trtllm-serve {shlex.quote(plan.model)} --tp_size {best.tp_size}"
    if best.is_speculative and plan.is_sparse:
        lines += _sparse_note("trtllm", plan)
    if not _can_speculate(plan):
        lines += _schedule_note(plan) if best.is_speculative else []
        return _comment([*lines, f"Serve with: {command}"])
    lines.append(f"Serve with: {command} --extra_llm_api_options THIS_FILE.yaml")
    config = _trtllm_draft(best) | {"max_draft_len": plan.max_gamma}
    body = ["disable_overlap_scheduler: true"] if best.draft_method not in HEADS else []
    body += ["speculative_config:", *(f"  {name}: {json.dumps(value)}" for name, value in config.items())]
    if plan.varies and best.draft_method not in HEADS:
        schedule, changed = draft_len_schedule(plan.bands)
        if len(schedule) > 1:
            body += ["  draft_len_schedule:", *(f"    {batch}: {gamma}" for batch, gamma in schedule.items())]
            lines += [
                "Supported: gamma by batch size (draft_len_schedule). In 1.2 a key is the batch size from which its",
                "length holds; the 1.3 release candidates read it as the batch size up to which it holds.",
                f"Not supported: gamma by context; the schedule is that of context {best.context_len}.",
            ]
        lines += changed
    elif plan.varies:
        lines += ["Not supported for EAGLE in 1.2: gamma by batch size.", *_schedule_note(plan)]
    if best.draft_tp_size is not None and best.draft_tp_size != best.tp_size:
        lines.append(f"Not supported: a draft on {best.draft_tp_size} of {best.tp_size} ranks.")
    return _comment(lines) + "\n".join(body) + "\n"


def draft_len_schedule(bands: Sequence[Band]) -> tuple[dict[int, int], list[str]]:
    """{batch size from which it holds: draft length}, and a note where the engine's rule changes the plan.

    The engine wants batch size 1 to have the greatest length, so the bands before the one with the greatest gamma get
    it too.
    """
    longest = max(gamma for _, _, gamma in bands)
    first = next(start for start, _, gamma in bands if gamma == longest)
    schedule = {1: longest} | {start: gamma for start, _, gamma in bands if start > first}
    if first == 1:
        return schedule, []
    wanted = "; ".join(f"{start} to {end}: {gamma}" for start, end, gamma in bands if start < first)
    return schedule, [
        f"Changed: batch size 1 must have the greatest length, so batches below {first} draft {longest} tokens;",
        f"the plan wants {wanted}.",
    ]


def _trtllm_draft(best: Record) -> dict[str, Any]:
    if best.draft_method == "ngram":
        return {"decoding_type": "NGram", "max_matching_ngram_size": PROMPT_LOOKUP_MAX}
    if best.draft_method == "mtp":
        return {"decoding_type": "MTP", "num_nextn_predict_layers": best.gamma}
    kind = "Eagle3" if best.draft_method in HEADS else "Draft_Target"
    return {"decoding_type": kind, "speculative_model": best.draft}
