"""A plan as the flags of a serving engine, with what the engine supports of it and what it does
not.

Written for, and checked against the sources of, the versions in `ENGINE_TITLES` (naming.py):
    vLLM        vllm/config/{speculative,vllm}.py, vllm/v1/spec_decode/dynamic/utils.py,
    docs/features/
                speculative_decoding/
    SGLang      sglang/srt/arg_groups/{fields/spec,speculative_hook}.py,
    sglang/srt/speculative/adaptive_spec_params.py
    TensorRT-LLM  tensorrt_llm/llmapi/llm_args.py (DecodingBaseConfig),
    docs/source/features/speculative-decoding.md
and, for how a replica is spread, of
    vLLM        vllm/engine/arg_utils.py, vllm/config/{parallel,scheduler}.py (max_num_seqs: each
    data-parallel rank)
    SGLang      sglang/srt/arg_groups/fields/parallel.py, parallel_hook.py (tp_size counts all ranks
    of a stage)
    TensorRT-LLM  tensorrt_llm/llmapi/llm_args.py, tensorrt_llm/commands/serve.py
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from magicdec.counts import Z_90
from magicdec.errors import unknown_choice
from magicdec.naming import ENGINE_TITLES, METHODS
from magicdec.reports.deployment import (
    Deployment,
    cache_note,
    can_speculate,
    command,
    comment,
    heading,
    read_deployment,
    schedule_note,
    unsupported,
)
from magicdec.schema.gamma_table import BatchBand
from magicdec.schema.plan import UNKNOWN_SITE, Plan, Site
from magicdec.schema.record import Record
from magicdec.schema.row import Candidate
from magicdec.specs.engine import EngineProfile, load_engine, version_number
from magicdec.specs.heads import has_checkpoint, head_for
from magicdec.specs.rules import unlisted_model
from magicdec.specs.vllm_plugin import DRAFT_CLASS
from magicdec.units import MICRO

PLUGIN_METHODS = ("streamingllm",)
"""Self-drafts that magicdec's own plugin (plugins/vllm) runs in vLLM on any device."""
PLUGIN_PAGE_SIZE, PLUGIN_SMALLEST_BUDGET = 32, 96
PROMPT_LOOKUP_MAX = 4
"""Longest n-gram that an n-gram draft looks up, where none was replayed."""


def export(
    engine: str, plan: Plan, *, reason: str = "", site: Site = UNKNOWN_SITE
) -> str:
    """The text to paste for `engine`: comments, then a command or a configuration file.

    `plan` is priced on this engine (perfmodel/variations.py); `reason` says why its best is
    not the first plan's.
    Raises ConfigError for an unknown engine, and for a plan that does not fit in memory.
    """
    return write_settings(engine, deployment_on(engine, plan, reason=reason, site=site))


def check_engine(engine: str) -> None:
    """Raises ConfigError for an engine that nothing is written for."""
    if engine not in ENGINE_TITLES:
        raise unknown_choice("engine", engine, ENGINE_TITLES)


def deployment_on(
    engine: str, plan: Plan, *, reason: str = "", site: Site = UNKNOWN_SITE
) -> Deployment:
    """The deployment of a plan on an engine, which may quantize 16-bit weights as it loads them.
    Raises ConfigError as `read_deployment` does, and for an unknown engine."""
    check_engine(engine)
    deployment = read_deployment(plan, reason=reason, site=site)
    if deployment.other_weights != "fp8" or site.published_weights is not None:
        return deployment
    option = engine_of(engine, deployment).options.quantization
    return dataclasses.replace(deployment, quantization=option)


def is_whole_block(engine: str, row: Record) -> bool:
    """Whether an engine drafts a row's block, no more and no fewer."""
    return load_engine(engine).draft(row.draft, row.draft_method).is_whole_block


def write_settings(engine: str, deployment: Deployment) -> str:
    """The text to paste for what is to be deployed. Raises ConfigError for an unknown engine."""
    writers: dict[str, Callable[[Deployment], str]] = {
        "vllm": _vllm,
        "sglang": _sglang,
        "trtllm": _trtllm,
    }
    check_engine(engine)
    return writers[engine](deployment)


def engine_of(name: str, plan: Deployment) -> EngineProfile:
    """The engine in the version that the plan was made for."""
    return load_engine(f"{name}@{plan.version}" if plan.version else name)


def title_of(engine: str, plan: Deployment) -> str:
    """The engine and its version that an export is for: the plan's, else the usual one, or the nearest
    that runs the draft."""
    name, _, version = ENGINE_TITLES[engine].rpartition(" ")
    if plan.version:
        return f"{name} {plan.version}"
    profile = load_engine(engine)
    best = plan.best
    newest = profile.draft(best.draft, best.draft_method).newest_version
    if newest:
        version = min(version, newest, key=version_number)
    since = profile.runs_since(best.draft, best.draft_method)
    return f"{name} {max(version, since, key=version_number)}"


def head_name(engine: str, plan: Deployment, lines: list[str]) -> str:
    """The checkpoint of a draft that is another network: the one whose acceptance was planned with,
    another of the table that the engine loads, the name that was given, or a placeholder; `lines`
    says which."""
    best = plan.best
    planned = ""
    if plan.candidate is not None:
        planned = plan.candidate.drafting.checkpoint or ""
    is_head = best.draft == best.draft_method
    if not is_head and not planned:
        known: str | None = plan.site.checkpoints.get(best.draft)
        if known:
            return known
        lines.append(f"{best.draft} stands for the draft's own path or name.")
        return best.draft
    name = head_for(engine, plan.model, best.draft_method, best.gamma, planned)
    if name and name == planned:
        lines.append(
            "The draft's checkpoint is a published one: that whose acceptance was planned with, "
            "where it was measured, and of several the one measured most; --draft-model plans "
            "another."
        )
    elif name:
        lines.append(
            f"{name} is a published head of this model; it was planned with another acceptance."
        )
    else:
        name = f"YOUR-{best.draft.upper()}-HEAD-OF-{plan.model}"
        why = "magicdec knows no published head of this model"
        if planned:
            why += f" that this engine loads ({planned} is in the format of vLLM's speculators)"
        lines.append(f"{name} is a placeholder: {why}.")
    return name


# vLLM
# --------------------------------------------------------------------------------------------------


def _vllm(plan: Deployment) -> str:
    best = plan.best
    if best.draft == "self" and best.draft_method in PLUGIN_METHODS:
        return _vllm_plugin(plan)
    lines = heading("vllm", plan, title_of("vllm", plan))
    words = vllm_words(plan, lines) + _vllm_limits(plan)
    lines += unsupported(title_of("vllm", plan), plan)
    if not can_speculate(plan):
        return comment(lines) + command(words)
    config = _vllm_speculation(plan, lines)
    words.append(["--speculative-config", _json_word(config)])
    words += kernel_words("vllm", plan)
    return comment(lines) + command(words)


def kernel_words(engine: str, plan: Deployment) -> Words:
    """The attention backend that surely gains, where a flag asks for it."""
    kernel = plan.kernel
    if kernel is None or kernel.engine != engine or not kernel.option.startswith("--"):
        return []
    return [kernel.option.split()]


def _vllm_speculation(plan: Deployment, lines: list[str]) -> dict[str, Any]:
    """The value of --speculative-config; `lines` says what of the plan it holds."""
    best = plan.best
    method = METHODS[best.draft_method]
    # not with data parallelism
    by_batch = plan.varies and plan.rank_batch == best.batch_size
    gamma = best.gamma
    if by_batch:
        gamma = plan.max_gamma
    engine = engine_of("vllm", plan)
    lines += _vllm_path(engine, best.draft_method)
    config: dict[str, Any] = dict(engine.draft_call(best.draft_method))
    if best.draft_method == "ngram":
        config |= _lookup_lengths(plan)
    if has_checkpoint(best.draft_method, plan.model):
        config["model"] = head_name("vllm", plan, lines)
    config["num_speculative_tokens"] = gamma
    if best.draft_tp_size is not None and best.draft_tp_size != best.tp_size:
        config["draft_tensor_parallel_size"] = best.draft_tp_size
    if plan.synthetic_tokens is not None:
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_length"] = plan.synthetic_tokens
    elif best.temperature > 0 and method.sort != "lookup":
        config["draft_sample_method"] = "probabilistic"
        lines.append(
            "Supported: sampling from the draft (draft_sample_method), as the planned acceptance "
            "assumes."
        )
    if not plan.varies:
        return config
    if not by_batch:
        lines.append("Not supported with data parallelism: gamma by batch size.")
        lines += schedule_note(plan)
        return config
    config[engine.options.table] = [list(band) for band in plan.bands]
    lines += [
        f"Supported: gamma by batch size ({engine.options.table}; not with data parallelism).",
        f"Not supported: gamma by context; the bands are those of context {best.context_len}.",
    ]
    if not method.is_head:
        lines.append(
            "Untried by vLLM's own tests: gamma by batch size with a draft other than EAGLE and "
            "DFlash."
        )
    return config


def _vllm_limits(plan: Deployment) -> Words:
    """Limits the server to what was priced: sequences at a time, captured graphs, and the formats
    of weights and cache.
    """
    options = engine_of("vllm", plan).options
    words = [[options.batch, str(plan.rank_batch)]]
    if plan.quantization:
        words.append([plan.quantization])
    if plan.max_model_len is not None:
        words.append(["--max-model-len", str(plan.max_model_len)])
    if plan.weight_dtype == "fp32":
        words.append(["--dtype", "float32"])
    if plan.computes_in_fp16:
        words.append(["--dtype", "half"])
    if plan.site.is_cpu:
        words.append(["--enforce-eager"])
        if plan.cache_bytes is not None:
            words.append(["--kv-cache-memory-bytes", str(plan.cache_bytes)])
    elif not plan.is_captured:
        words.append([options.captured.format(captured_size(plan.max_pass_tokens))])
    if plan.kv_dtype == "fp8":
        words.append(["--kv-cache-dtype", "fp8"])
    return words


def captured_size(tokens: int) -> int:
    """The least step of at least so many tokens that vLLM captures by itself: its sizes are
    multiples of 8, from 256 on of 16 (vllm/config/vllm.py, _set_cudagraph_sizes)."""
    step = 16 if tokens > 256 else 8
    return -(-tokens // step) * step


def _vllm_plugin(plan: Deployment) -> str:
    """The command that runs the plan's own draft, with magicdec's plugin."""
    best = plan.best
    assert best.draft_budget is not None
    budget = max(best.draft_budget, PLUGIN_SMALLEST_BUDGET)
    lines = [
        *heading("vllm", plan, title_of("vllm", plan)),
        "Needs magicdec's plugin: pip install 'magicdec-vllm[vllm]' in the engine's environment "
        "(docs/vllm.md). Tested on "
        "CPUs; on a GPU nothing was measured yet.",
    ]
    if budget != best.draft_budget:
        lines.append(
            f"Changed: the budget holds at least three pages of {PLUGIN_PAGE_SIZE} tokens, so "
            f"{budget}."
        )
    settings: dict[str, Any] = {
        "draft_method": best.draft_method,
        "draft_budget": budget,
    }
    config: dict[str, Any] = {
        "method": "custom_class",
        "model": DRAFT_CLASS,
        "num_speculative_tokens": best.gamma,
    }
    if best.temperature > 0:
        config["draft_sample_method"] = "probabilistic"
    draft = _plugin_words(config, settings)
    if plan.table is not None:
        lines.append("Supported: gamma by batch and context, 0 included (gamma_table).")
        if not plan.site.is_cpu:
            lines += [
                f"Gamma {best.gamma} at every step, as V1's whole-step CUDA graphs need it: "
                "replace the last two by",
                *(f"  {words}" for words in command(draft).splitlines()),
            ]
        gamma = max(map(max, plan.table["gammas"]))
        draft = _plugin_words(
            config | {"num_speculative_tokens": gamma},
            settings | {"gamma_table": plan.table},
        )
    words = [
        *vllm_words(plan, lines),
        *_vllm_limits(plan),
        ["--block-size", str(PLUGIN_PAGE_SIZE)],
        *draft,
    ]
    return comment(lines + cache_note(plan)) + command(words)


def _plugin_words(config: dict[str, Any], settings: dict[str, Any]) -> Words:
    return [
        ["--speculative-config", _json_word(config)],
        ["--additional-config", _json_word({"magicdec": settings})],
    ]


def _json_word(value: dict[str, Any]) -> str:
    """A value as JSON that a shell takes as one word."""
    return shlex.quote(json.dumps(value))


def _vllm_path(engine: EngineProfile, method: str) -> list[str]:
    """How vLLM runs a draft that is no head, as it was priced."""
    path = engine.path(method, method)
    if path.search != "none":
        priced = [f"Priced: {'; '.join(path.sentences())}."]
        package = engine.draft(method, method).package
        if package:
            priced.insert(0, f"Needs the package {package}: pip install {package}.")
        untried = engine.draft(method, method).untried
        if untried:
            priced.append(f"Unmeasured, and so not priced: {untried}.")
        return priced
    if method != "full":
        return []
    layer_us = engine.overheads.draft_model_layer_s / MICRO
    factor = math.exp(Z_90 * engine.overheads.draft_model_layer_error)
    return [
        f"Priced: the draft model outside captured graphs, {layer_us:.0f} us of launches a layer "
        f"(90 % within a factor of {factor:.1f})."
    ]


def _lookup_lengths(plan: Deployment) -> dict[str, int]:
    """vLLM's shortest and longest n-gram: those that were replayed from logs, else the longest
    alone.
    """
    longest_alone = {"prompt_lookup_max": PROMPT_LOOKUP_MAX}
    if plan.candidate is None:
        return longest_alone
    shortest = plan.candidate.drafting.lookup_min
    longest = plan.candidate.drafting.lookup_max
    if shortest is None or longest is None:
        return longest_alone
    return {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}


# SGLang
# --------------------------------------------------------------------------------------------------


def _sglang(plan: Deployment) -> str:
    lines = heading("sglang", plan, title_of("sglang", plan))
    engine = engine_of("sglang", plan)
    words = [
        ["python3", "-m", "sglang.launch_server"],
        ["--model-path", shlex.quote(plan.name)],
        *sglang_words(plan, lines),
        [
            engine.options.batch,
            str(plan.best.batch_size),
        ],  # speculation would reset it to 48
    ]
    if plan.quantization:
        words.append([plan.quantization])
    if not plan.is_captured:
        words.append([engine.options.captured.format(plan.rank_batch)])
    if plan.computes_in_fp16:
        words.append(["--dtype", "half"])
    if plan.kv_dtype == "fp8":
        words.append(["--kv-cache-dtype", "fp8_e4m3"])
    best = plan.best
    window = engine.window_settings(best.draft, best.draft_method, best.draft_budget)
    lines += unsupported(title_of("sglang", plan), plan, has_window=bool(window))
    if can_speculate(plan):
        words += _sglang_draft(plan, lines)
        words += kernel_words("sglang", plan)
        words += _sglang_schedule(plan, lines)
        words += _sglang_sampling(plan, lines)
        if plan.synthetic_tokens is not None:
            words.insert(0, [f"SGLANG_SIMULATE_ACC_LEN={plan.synthetic_tokens:g}"])
        lines += _draft_ranks_note(plan.best)
    return comment(lines) + command(words)


def _sglang_draft(plan: Deployment, lines: list[str]) -> Words:
    """The flags of the draft: how it drafts, its checkpoint, gamma and window."""
    best = plan.best
    gamma = best.gamma
    if _follows_batch(plan) and gamma not in {steps for _, _, steps in plan.bands}:
        gamma = plan.max_gamma
    checkpoint = ""
    if has_checkpoint(best.draft_method, plan.model):
        checkpoint = shlex.quote(head_name("sglang", plan, lines))
    return sglang_draft(engine_of("sglang", plan), best, gamma, checkpoint)


def sglang_draft(
    engine: EngineProfile, row: Record | Candidate, gamma: int, checkpoint: str
) -> Words:
    """The flags of a row's draft at a gamma, with its checkpoint where it has one."""
    call = engine.draft_call(row.draft_method)
    words = [["--speculative-algorithm", str(call["algorithm"])]]
    if checkpoint:
        words.append(["--speculative-draft-model-path", checkpoint])
    if METHODS[row.draft_method].sort not in ("lookup", "parallel"):
        # the others draft a whole block at once, so there are no steps to count
        words.append(["--speculative-num-steps", str(gamma)])
        words.append(["--speculative-eagle-topk", "1"])
    words.append(["--speculative-num-draft-tokens", str(gamma + 1)])
    window = engine.window_settings(row.draft, row.draft_method, row.draft_budget)
    words += [[name, str(count)] for name, count in window.items()]
    backend = engine.draft(row.draft, row.draft_method).window_backend
    if window and backend:
        words.append([backend])
    return words


def _follows_batch(plan: Deployment) -> bool:
    """Whether SGLang has gamma follow the batch: not with attention in data parallel."""
    options = engine_of("sglang", plan).options
    is_able = options.follows_batch(plan.best.draft_method) and plan.best.dp_size == 1
    return plan.varies and is_able


def _sglang_schedule(plan: Deployment, lines: list[str]) -> Words:
    """Gamma by batch size, where SGLang follows it."""
    if not plan.varies:
        return []
    option = engine_of("sglang", plan).options.table
    if not _follows_batch(plan):
        lines.append(
            f"Not supported here: gamma by batch size ({option} is for EAGLE, EAGLE-3 and prediction "
            "modules without attention in data parallel)."
        )
        lines += schedule_note(plan)
        return []
    lines.append("Supported: gamma by batch size. Save as gamma.json:")
    lines.append(f"  {gammas_of_sglang(plan.bands)}")
    return [[option], [f"{option}-config", "gamma.json"]]


def gammas_of_sglang(bands: Sequence[BatchBand]) -> str:
    """SGLang's file of gammas by batch."""
    schedule = {str(start): {"candidate_steps": [steps]} for start, _, steps in bands}
    return json.dumps(schedule)


def _sglang_sampling(plan: Deployment, lines: list[str]) -> Words:
    """Sampling from the draft, where SGLang has an option for it."""
    best = plan.best
    method = METHODS[best.draft_method]
    is_greedy = best.temperature <= 0 or method.sort == "lookup"
    if is_greedy or method.sort == "parallel":  # these sample without an option
        return []
    setting = (
        engine_of("sglang", plan).draft(best.draft, best.draft_method).sampling_setting
    )
    if setting:
        return [[setting]]
    lines.append(
        "Not supported for this draft: rejection sampling; at temperature > 0 fewer drafts are "
        "accepted."
    )
    return []


def _draft_ranks_note(best: Record) -> list[str]:
    """Names a draft that was priced on other ranks than its target's."""
    if best.draft_tp_size is None or best.draft_tp_size == best.tp_size:
        return []
    return [f"Not supported: a draft on {best.draft_tp_size} of {best.tp_size} ranks."]


# TensorRT-LLM
# --------------------------------------------------------------------------------------------------


def _trtllm(plan: Deployment) -> str:
    lines = heading("trtllm", plan, title_of("trtllm", plan))
    flags, spread = trtllm_flags(plan, lines)
    engine = engine_of("trtllm", plan)
    version = title_of("trtllm", plan).rpartition(" ")[2]
    found = unlisted_model("trtllm", version, plan.model, plan.site.architecture)
    if found is not None:
        lines.append(f"{found.says}.")
    name = shlex.quote(plan.name)
    serve = f"trtllm-serve {name} {flags} {engine.options.batch} {plan.rank_batch}"
    body = list(spread)
    if plan.computes_in_fp16:
        body.append("dtype: float16")
    if not plan.is_captured:
        body += [
            "cuda_graph_config:",
            "  enable_padding: true",
            f"  max_batch_size: {plan.rank_batch}",
        ]
    if plan.kv_dtype == "fp8":
        body += ["kv_cache_config:", "  dtype: fp8"]
    lines += unsupported(title_of("trtllm", plan), plan)
    if not can_speculate(plan):
        lines += _trtllm_serve(serve, has_file=bool(body))
        return comment(lines) + "".join(f"{line}\n" for line in body)
    method = plan.best.draft_method
    config: dict[str, Any] = dict(engine.draft_call(method))
    gamma = plan.best.gamma
    if engine.options.follows_batch(method):
        gamma = plan.max_gamma
    if method == "ngram":
        longest = _lookup_lengths(plan)["prompt_lookup_max"]
        config["max_matching_ngram_size"] = longest
    elif not has_checkpoint(method, plan.model):
        config["num_nextn_predict_layers"] = gamma
    else:
        config["speculative_model"] = head_name("trtllm", plan, lines)
    config["max_draft_len"] = gamma
    sampling = engine.draft(plan.best.draft, method).sampling_setting
    if sampling and plan.best.temperature > 0:
        config[sampling] = True
    if plan.synthetic_tokens is not None:
        accepted = round(plan.synthetic_tokens - 1.0)
        serve = f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={accepted} {serve}"
    lines += _trtllm_serve(serve, has_file=True)
    if not METHODS[method].is_head:
        body.append("disable_overlap_scheduler: true")
    body.append("speculative_config:")
    for key, value in config.items():
        body.append(f"  {key}: {json.dumps(value)}")
    body += _trtllm_schedule(plan, lines)
    lines += _draft_ranks_note(plan.best)
    return comment(lines) + "\n".join(body) + "\n"


def _trtllm_schedule(plan: Deployment, lines: list[str]) -> list[str]:
    """Gamma by batch size, which TensorRT-LLM does not take for heads."""
    if not plan.varies:
        return []
    if not engine_of("trtllm", plan).options.follows_batch(plan.best.draft_method):
        lines.append("Not supported for heads: gamma by batch size.")
        lines += schedule_note(plan)
        return []
    schedule, changed = draft_len_schedule(plan.bands)
    body = []
    if len(schedule) > 1:
        body.append("  draft_len_schedule:")
        for batch, gamma in schedule.items():
            body.append(f"    {batch}: {gamma}")
        lines += [
            "Supported: gamma by batch size (draft_len_schedule). In 1.2 a key is the batch size "
            "from which its length holds; the 1.3 release candidates read it as the batch size up "
            "to which it holds.",
            "Not supported: gamma by context; the schedule is that of context "
            f"{plan.best.context_len}.",
        ]
    lines += changed
    return body


def draft_len_schedule(bands: Sequence[BatchBand]) -> tuple[dict[int, int], list[str]]:
    """{batch size from which it holds: draft length}, and a note where the engine's rule changes
    the plan.

    The engine wants batch size 1 to have the greatest length, so the bands before the one with the
    greatest gamma get it too.
    """
    first, _, longest = max(bands, key=lambda band: band[2])
    schedule = {1: longest}
    shorter = []
    for start, end, gamma in bands:
        if start > first:
            schedule[start] = gamma
        elif start < first:
            shorter.append(f"{start} to {end}: {gamma}")
    if first == 1:
        return schedule, []
    wanted = "; ".join(shorter)
    note = (
        "Changed: batch size 1 must have the greatest length, so batches below "
        f"{first} draft {longest} tokens; the plan wants {wanted}."
    )
    return schedule, [note]


def _trtllm_serve(command: str, *, has_file: bool) -> list[str]:
    if has_file:
        command += " --extra_llm_api_options THIS_FILE.yaml"
    return ["Serve with:", f"  {command}"]


# How a replica is spread
# --------------------------------------------------------------------------------------------

Words = list[list[str]]


def vllm_words(plan: Deployment, lines: list[str]) -> Words:
    """The command, which vLLM's community build for CPUs has no script for, and how the replica is
    spread.
    """
    row = plan.best
    start = ["vllm", "serve"]
    if plan.site.is_cpu:
        start = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    words = [
        [*start, shlex.quote(plan.name)],
        ["--tensor-parallel-size", str(row.tp_size)],
    ]
    if row.pp_size > 1:
        words.append(["--pipeline-parallel-size", str(row.pp_size)])
    if row.ep_size > 1:
        words.append(["--enable-expert-parallel"])
    if row.dp_size > 1:
        words.append(["--data-parallel-size", str(row.dp_size)])
        words.append(["--all2all-backend", "deepep_low_latency"])
        lines.append(
            "Priced with DeepEP's low-latency kernels, which must be installed beside vLLM."
        )
    if plan.num_nodes > 1:
        words.append(_vllm_nodes(row, plan.num_nodes, lines))
    return words


def _vllm_nodes(row: Record, nodes: int, lines: list[str]) -> list[str]:
    """How one replica is spread over several nodes."""
    if row.dp_size > 1:
        local = -(-row.dp_size // nodes)
        lines.append(
            f"{nodes} nodes: run it on the first with --data-parallel-address ADDRESS-OF-THE-FIRST "
            "and "
            "--data-parallel-rpc-port PORT; on node R with these, --headless and "
            "--data-parallel-start-rank "
            f"{local} x R."
        )
        return ["--data-parallel-size-local", str(local)]
    lines.append(
        f"{nodes} nodes: run it on each with --node-rank R (0 is the first) and --master-addr "
        "ADDRESS-OF-THE-FIRST; on the others with --headless."
    )
    return ["--nnodes", str(nodes)]


def sglang_words(plan: Deployment, lines: list[str]) -> Words:
    row = plan.best
    stage_ranks = row.tp_size * row.dp_size
    words = [["--tp-size", str(stage_ranks)]]
    if row.pp_size > 1:
        words.append(["--pp-size", str(row.pp_size)])
    if row.dp_size > 1:
        words.append(["--dp-size", str(row.dp_size)])
        words.append(["--enable-dp-attention"])
        words.append(["--enable-dp-lm-head"])
        if row.tp_size == 1:
            words.append(["--moe-dense-tp-size", "1"])
        words.append(["--moe-a2a-backend", "deepep"])
        words.append(["--deepep-mode", "auto"])
        lines.append(
            "--tp-size counts all ranks of a stage here; attention has --tp-size / --dp-size of "
            "them."
        )
    if row.ep_size > 1:
        words.append(["--ep-size", str(row.ep_size)])
    if plan.num_nodes > 1:
        words.append(["--nnodes", str(plan.num_nodes)])
        lines.append(
            f"{plan.num_nodes} nodes: run it on each with --node-rank R (0 is the first) and "
            "--dist-init-addr ADDRESS-OF-THE-FIRST:PORT."
        )
    return words


def trtllm_flags(plan: Deployment, lines: list[str]) -> tuple[str, list[str]]:
    """Flags of trtllm-serve, and lines of its configuration file."""
    row = plan.best
    flags = f"--tp_size {row.tp_size * row.dp_size}"
    if row.pp_size > 1:
        flags += f" --pp_size {row.pp_size}"
    if row.ep_size > 1:
        flags += f" --ep_size {row.ep_size}"
    body = []
    if row.dp_size > 1:
        body.append("enable_attention_dp: true")
        if row.tp_size > 1:
            lines.append(
                f"Not supported: groups of {row.tp_size} ranks in attention; each rank will be a "
                "group of its own."
            )
        lines.append(
            "--tp_size counts all ranks of a stage here, and --max_batch_size is of each of them."
        )
    if plan.num_nodes > 1:
        lines.append(
            f"{plan.num_nodes} nodes: run it under MPI, as mpirun or srun with one task per GPU: "
            "trtllm-llmapi-launch."
        )
    return flags, body
