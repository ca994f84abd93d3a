"""The part of a plan that a serving engine can be told, and the head of every export."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.errors import ConfigError
from magicdec.naming import describe
from magicdec.reports.arrivals import percentiles_line
from magicdec.reports.data import candidate_record
from magicdec.reports.words import probability_of
from magicdec.schema.gamma_table import BatchBand, nearest
from magicdec.schema.plan import (
    UNKNOWN_SITE,
    GammaTable,
    OtherKernel,
    Plan,
    Site,
    TrafficLoad,
)
from magicdec.schema.record import Record
from magicdec.schema.row import Candidate, Verdict
from magicdec.units import MIB, MILLI, format_interval, format_number, format_seconds

COMMENT_WIDTH = 79
SIXTEEN_BITS = frozenset(("bf16", "fp16", "fp32"))
"""Formats that a checkpoint of 16 bits is served in by an option of its type of numbers."""
RECEIVING = {
    "vllm": "add --kv-transfer-config with your connector (NixlConnector, for instance)",
    "sglang": "add --disaggregation-mode decode and your --disaggregation-transfer-backend",
    "trtllm": "set cache_transceiver_config, and start it as a generation server",
}
"""The settings of a pool that only decodes, which a plan cannot know."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The part of a plan that a serving engine can be told."""

    model: str
    best: Record
    verdict: Verdict
    bands: tuple[BatchBand, ...]
    """(first batch, last batch, gamma), without gaps from batch 1 on, at the best configuration's
    context.
    """
    version: str = ""
    """Version of the engine that was priced; "": the newest."""
    reason: str = ""
    """Why this is not what the plan chose, where it is not."""
    receives_prompts: bool = False
    """Whether prompts are prefilled elsewhere."""
    site: Site = UNKNOWN_SITE
    table: dict[str, list[Any]] | None = None
    """The plan's gammas that a server of this size can reach, for an engine that can be told them
    by batch and context."""
    max_model_len: int | None = None
    """The longest sequence that there is room for, where it is shorter than the model's own."""
    cache_bytes: int | None = None
    """Bytes of the KV cache, where the engine would not find them by itself."""
    candidate: Candidate | None = None
    """The configuration that a plan priced, where one did."""
    load: TrafficLoad | None = None
    """The simulated load of a plan for a rate."""
    synthetic_tokens: float | None = None
    """Tokens per step that the engine is to impose instead of checking drafts."""
    kv_dtype: str = "bf16"
    weight_dtype: str = "bf16"
    other_weights: str = ""
    """The format that a plan asked for, where the checkpoint has another one."""
    kernel: OtherKernel | None = None
    """Another attention backend that surely gains."""
    quantization: str = ""
    """The option that makes it of the checkpoint; "": another checkpoint is needed."""

    @property
    def name(self) -> str:
        """The model as the command names it."""
        if self.other_weights and not self.quantization:
            return f"YOUR-{self.other_weights.upper()}-CHECKPOINT-OF-{self.model}"
        name: str = self.site.checkpoints.get(self.model, self.model)
        return name

    @property
    def max_gamma(self) -> int:
        gammas = [self.best.gamma]
        for _, _, gamma in self.bands:
            gammas.append(gamma)
        return max(gammas)

    @property
    def is_captured(self) -> bool:
        """Whether the engine captures graphs of these passes without being told to."""
        return self.candidate is None or self.candidate.step.is_captured

    @property
    def computes_in_fp16(self) -> bool:
        """Whether 16-bit numbers are fp16: as asked for, or on a device without bf16."""
        return "fp16" in (self.weight_dtype, self.kv_dtype)

    @property
    def num_nodes(self) -> int:
        """Nodes of one replica."""
        if self.candidate is None:
            return 1
        return self.candidate.layout.num_nodes

    @property
    def rank_batch(self) -> int:
        """Sequences of each group of ranks that holds its own."""
        return -(-self.best.batch_size // self.best.dp_size)

    @property
    def max_pass_tokens(self) -> int:
        sequences = -(-self.rank_batch // self.best.pp_size)
        if self.best.is_speculative:
            return sequences * (self.max_gamma + 1)
        return sequences

    @property
    def varies(self) -> bool:
        return len({gamma for _, _, gamma in self.bands}) > 1


def read_deployment(
    plan: Plan, *, reason: str = "", site: Site = UNKNOWN_SITE
) -> Deployment:
    """Raises ConfigError where the plan cannot be run, or names what no command line can hold."""
    best = plan.best
    if not best.fits:
        raise ConfigError(
            "the plan's best configuration does not fit in memory: plan with more devices or a "
            "smaller batch"
        )
    record = candidate_record(plan, best)
    formats = (plan.precision.weight_dtype, plan.precision.kv_dtype)
    for name in (record.model, record.draft, *formats):
        if not name or not name.isprintable():
            raise ConfigError(
                f"the plan's name {name!r} cannot be written into a command"
            )
    # the longest sequence that fits at the table's smallest batch; the planned one at least
    table = plan.gamma_table
    planned_len = record.context_len + plan.request.gen_len
    limit = planned_len
    for context_len, fits in zip(table.context_lens, table.fits[0], strict=True):
        if fits:
            limit = max(limit, context_len)
    max_len = None
    # a model that takes no longer contexts needs no limit of the server's
    takes_longer = site.longest_context is None or limit < site.longest_context
    if takes_longer and not all(table.fits[0]):
        max_len = limit
    length = max_len or site.longest_context or limit
    cache_bytes = None
    if site.is_cpu:
        # the plan's cache, in whole MiB: that of the batch, more where one sequence of `length`
        # takes more
        share = max(1.0, length / (best.batch_size * planned_len))
        cache_bytes = MIB * math.ceil(plan.memory.kv_bytes * share / MIB)
    asked = plan.request.weight_dtype or ""
    published = (site.published_weights or "bf16").partition("_")[0]
    other_weights = ""
    is_kept = not asked or asked.startswith(published)
    if not is_kept and not {asked, published} <= SIXTEEN_BITS:
        other_weights = asked
    load = None
    if plan.traffic is not None:
        load = plan.traffic.best
    asked_engine, _, version = (plan.request.engine or "").partition("@")
    return Deployment(
        model=record.model,
        best=record,
        verdict=best.verdict,
        bands=tuple(plan.choice.gammas),
        version=version if asked_engine == plan.engine else "",
        reason=reason,
        receives_prompts=plan.request.prefill == "elsewhere",
        site=site,
        table=reachable(table, max_batch=best.batch_size, max_len=length),
        max_model_len=max_len,
        cache_bytes=cache_bytes,
        candidate=best,
        load=load,
        kv_dtype=plan.precision.kv_dtype,
        weight_dtype=plan.precision.weight_dtype,
        other_weights=other_weights,
        kernel=plan.choice.other_kernel,
    )


def reachable(
    table: GammaTable, *, max_batch: int, max_len: int
) -> dict[str, list[Any]] | None:
    """The part of a table that a server with at most `max_batch` sequences of `max_len` tokens
    looks up, as the plugin reads it.

    Batches and contexts without room for the cache are left out; a single cell without room takes
    the gamma of the longest context of its row that has some. None where nothing is left to draft.
    """
    last_row = nearest(table.batch_sizes, max_batch)
    rows = []
    for row in range(last_row + 1):
        if table.fits[row][0]:
            rows.append(row)
    last_column = nearest(table.context_lens, max_len)
    columns = []
    for column in range(last_column + 1):
        if any(table.fits[row][column] for row in rows):
            columns.append(column)
    gammas = []
    for row in rows:
        of_batch: list[int] = []
        for column in columns:
            if table.fits[row][column]:
                of_batch.append(table.gamma_of_steps[row][column])
            else:
                of_batch.append(of_batch[-1])
        gammas.append(of_batch)
    if not any(map(any, gammas)):
        return None
    return {
        "batch_sizes": [table.batch_sizes[row] for row in rows],
        "context_lens": [table.context_lens[column] for column in columns],
        "gammas": gammas,
    }


def heading(engine: str, plan: Deployment, title: str) -> list[str]:
    """The lines at the head: the engine and version that it is written for (`title`), the
    configuration, and its predicted times.
    """
    best = plan.best
    lines = [f"Written by magicdec for {title}."]
    layout = f"tp {best.tp_size}"
    if plan.candidate is not None:
        layout = plan.candidate.layout.label
    where = f"batch {best.batch_size}, context {best.context_len}, {layout}"
    if best.hardware:
        where += f", {best.hardware}"
    configuration = describe(best)
    lines.append(f"Plan: {plan.model}, {where}: {configuration}.")
    if best.is_speculative:
        lines.append(_predicted_gain(plan))
    if plan.load is not None:
        lines.append(f"{traffic_times(plan.load)}.")
    elif plan.candidate is not None:
        lines.append(_times(plan.candidate))
    if plan.receives_prompts:
        lines.append(f"Prompts come from a prefilling pool: {RECEIVING[engine]}.")
    if plan.kernel is not None and plan.kernel.engine == engine:
        gain = plan.kernel.gain
        times = f"{gain.speedup:.2f} times as fast ({format_interval(gain.low, gain.high, to=' to ')})"
        lines.append(f"{plan.kernel.option}: {times}: {plan.kernel.reason}.")
    if plan.reason:
        lines.append(f"Note: {plan.reason}.")
    if plan.name == plan.model:
        lines.append(
            "Model names are magicdec's: put the checkpoint's path or Hugging Face name in their "
            "place."
        )
    if plan.quantization:
        lines.append(
            f"Weights are quantized to {plan.other_weights} while they are loaded."
        )
    elif plan.other_weights:
        lines.append(
            f"{plan.name} stands for a checkpoint with weights in {plan.other_weights}, as priced."
        )
    if not best.is_speculative:
        lines.append("No speculation that is known to pay runs here: leave it off.")
    return lines


def _predicted_gain(plan: Deployment) -> str:
    """The gain and the verdict, both of one quantity; where its interval decides nothing, the
    probability that the plan's first line has.
    """
    verdict: str = plan.verdict
    if plan.candidate is not None:
        gain = plan.candidate.gain
        quantity = plan.candidate.gain_is_of
        speedup = f"{gain.speedup:.2f}"
        interval = format_interval(gain.low, gain.high, to=" to ")
        if verdict == "unclear":
            verdict = f"{probability_of(plan.candidate)} likely to pay"
    else:
        best = plan.best
        quantity = "decoding"
        speedup = f"{best.speedup:.2f}"
        assert best.speedup_low is not None
        assert best.speedup_high is not None
        interval = format_interval(best.speedup_low, best.speedup_high, to=" to ")
    predicted = f"{speedup} ({interval})"
    return f"Predicted speedup of {quantity} {predicted}: {verdict}."


def traffic_times(load: TrafficLoad) -> str:
    """The simulated latencies of a rate, and its cost."""
    rate = format_number(load.rate_per_s)
    text = f"Simulated at {rate} requests/s: {percentiles_line(load)}"
    if load.cost_per_million_tokens_usd is None:
        return text
    return f"{text}; ${load.cost_per_million_tokens_usd:.2f} per million tokens"


def _times(row: Candidate) -> str:
    per_token = f"{row.tpot_s / MILLI:.3g} ms per token"
    rate = f"{row.tokens_per_s:.0f} tokens/s"
    text = f"Predicted: {per_token} and {rate} of decoding"
    if row.requests is None:
        first_token = format_seconds(row.ttft_s)
        return f"{text}; first token of one request after {first_token}."
    first_token = format_seconds(row.first_token_s)
    between = f"{row.between_tokens_s / MILLI:.3g} ms per token"
    whole = format_seconds(row.requests.request_s)
    text += (
        f"; whole requests, prefill included: first token after {first_token}, {between}, "
        f"{whole} each"
    )
    if row.is_speculative:
        text += f", {row.gain.speedup:.2f} times as fast as without speculation"
    cost = row.cost.per_million_tokens_usd
    if cost is not None:
        text += f", ${cost:.2f} per million tokens"
    return f"{text}."


def unsupported(title: str, plan: Deployment, *, has_window: bool = False) -> list[str]:
    """Parts of the plan that the engine cannot do: the cache's format, a sparse-KV draft.
    `has_window`: whether its settings cut the draft's attention to the budget."""
    best = plan.best
    lines = cache_note(plan)
    if not best.is_speculative:
        return lines
    if best.draft_budget is not None and best.draft == "self":
        lines.append(
            f"Not supported by {title}: self-speculation with a sparse KV cache "
            f"({best.draft_method}). No flag of it "
            "drafts with the target's own weights, so what follows decodes autoregressively."
        )
    elif best.draft_budget is not None and not has_window:
        lines.append(
            f"Not supported by {title}: the draft's sparse KV cache ({best.draft_method}, budget "
            f"{best.draft_budget}). "
            "The draft will read its full KV cache: the predicted speedup does not hold."
        )
    if not can_speculate(plan):
        lines += schedule_note(plan)
    return lines


def cache_note(plan: Deployment) -> list[str]:
    if plan.kv_dtype in ("bf16", "fp16", "fp32", "fp8"):
        return []
    return [
        f"Not supported: KV in {plan.kv_dtype}; the cache will take more memory than was planned."
    ]


def can_speculate(plan: Deployment) -> bool:
    return plan.best.is_speculative and plan.best.draft != "self"


def schedule_note(plan: Deployment) -> list[str]:
    """The wanted schedule, for an engine or a build that takes it in another way."""
    if not plan.varies:
        return []
    bands = []
    for start, end, gamma in plan.bands:
        bands.append(f"{start} to {end}: {gamma}")
    text = "; ".join(bands)
    return [f"Wanted gamma by batch size: {text}."]


def comment(lines: Sequence[str]) -> str:
    """Wrapped, but for lines that start with a space, which are to be copied."""
    wrapped = []
    for line in lines:
        if line.startswith(" "):
            wrapped.append(line)
        else:
            wrapped += textwrap.wrap(
                line,
                COMMENT_WIDTH - 2,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "".join(f"# {line}\n" for line in wrapped)


def command(words: Sequence[Sequence[str]]) -> str:
    lines = [" ".join(group) for group in words]
    return " \\\n  ".join(lines) + "\n"
