"""`magicdec plan`: which draft, budget and gamma; on how many devices; or no speculation. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from magicdec.commands import options
from magicdec.commands.options import OutputFormat, list_of, option, parse_ints, parse_rates, table_console

if TYPE_CHECKING:
    from magicdec.plan_document import Plan

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_HARDWARE = "a100-sxm-80gb"
EPILOG = """\b
Examples:
  magicdec plan
  magicdec plan --model llama-3.1-70b --hardware h100-sxm-80gb --gpus 8 --context 16384,65536
  magicdec plan --draft none --batch 64 --why
  magicdec plan --acceptance-rate 0.8 --format json
"""


def plan_command(
    model: options.Model = DEFAULT_MODEL,
    hardware: Annotated[
        str, option("Catalog names or TOML files, comma-separated.", list_of(options.hardware_names))
    ] = DEFAULT_HARDWARE,
    engine: Annotated[
        str | None, option("vllm (GPUs), ours (CPUs), sglang, trtllm, a TOML file.", options.engines)
    ] = None,
    tp: options.Tp = None,
    gpus: Annotated[int | None, option("Devices to use: searches tp and replicas.")] = None,
    pp: Annotated[int | None, option("Pipeline stages; default: 1, or searched over nodes.")] = None,
    ep: Annotated[int | None, option("Ranks that whole experts are divided over.")] = None,
    dp_attention: Annotated[
        bool, option("Groups of tp ranks hold sequences of their own.", None, "--dp-attention")
    ] = False,
    batch: Annotated[str | None, option("Sequences per replica, a list; default 64, or searched.")] = None,
    context: Annotated[str, option("Prompt lengths, a list.")] = "32768",
    gen_len: Annotated[int, option("Tokens generated after the prompt.")] = 0,
    gamma: options.Gamma = None,
    draft: Annotated[str | None, option("self, none, ngram, eagle3, or model.", options.planned_drafts)] = None,
    draft_method: options.DraftMethod = None,
    draft_budget: options.DraftBudgets = None,
    draft_tp: Annotated[int | None, option("Ranks of the draft; default: all.")] = None,
    temperature: options.Temperature = 1.0,
    top_p: Annotated[float | None, option("Nucleus sampling.")] = None,
    acceptance_rate: options.Rates = None,
    acceptance: options.Profiles = None,
    weight_dtype: Annotated[str | None, option("bf16, fp8, int8, int4 or fp32.", options.formats)] = None,
    kv_dtype: Annotated[str | None, option("bf16, fp8, int4 or fp32.", options.formats)] = None,
    draft_weight_dtype: Annotated[str | None, option("Weights of the draft.", options.formats)] = None,
    draft_kv_dtype: Annotated[str | None, option("KV cache of the draft.", options.formats)] = None,
    tpot_ms: Annotated[float | None, option("Limit on the time per output token.")] = None,
    ttft_ms: Annotated[float | None, option("Limit on the time to the first token.")] = None,
    price: Annotated[float | None, option("Dollars per device and hour.")] = None,
    workload: Annotated[Path | None, option("Distribution of prompt and output lengths.")] = None,
    record: Annotated[Path | None, option("Append the evaluated grid as records.")] = None,
    output_format: options.Format = OutputFormat.TABLE,
    why: Annotated[bool, option("Show the breakdown by operation.", None, "--why")] = False,
) -> None:
    """Predict which drafts pay, and by how much.

    For a model, devices, contexts and batches; each answer has a 90 % interval.
    """
    from magicdec.api import plan

    answer = plan(
        model=model,
        hardware=[part.strip() for part in hardware.split(",") if part.strip()],
        engine=engine,
        tp=tp,
        gpus=gpus,
        pp=pp,
        ep=ep,
        dp_attention=dp_attention,
        batch=parse_ints(batch, "--batch") if batch else (),
        context=parse_ints(context, "--context"),
        gen_len=gen_len,
        gamma=gamma,
        draft=draft,
        draft_method=draft_method,
        draft_budget=parse_ints(draft_budget, "--draft-budget") if draft_budget else (),
        draft_tp=draft_tp,
        temperature=temperature,
        top_p=top_p,
        acceptance_rate=parse_rates(acceptance_rate),
        acceptance=acceptance or (),
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        draft_weight_dtype=draft_weight_dtype,
        draft_kv_dtype=draft_kv_dtype,
        tpot_ms=tpot_ms,
        ttft_ms=ttft_ms,
        price=price,
        workload=workload,
    )
    if record is not None:
        _record(answer, record)
    if output_format is OutputFormat.JSON:
        print(answer.to_json())
    elif output_format is OutputFormat.CSV:
        print(answer.to_csv(), end="")
    else:
        from magicdec.reports.terminal_plan import print_plan

        print_plan(answer, table_console(), why=why)


def _record(answer: Plan, path: Path) -> None:
    """Appends every evaluated row as a record of `source: analytical`."""
    import msgspec

    from magicdec.records import append_record, current_environment
    from magicdec.reports.data import candidate_record

    environment = current_environment()
    for row in answer.rows:
        planned = candidate_record(answer, row)
        append_record(path, msgspec.structs.replace(planned, kind="plan", environment=environment))
