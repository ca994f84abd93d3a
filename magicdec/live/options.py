"""Options of a server as its engine writes them: those that advice names, and a draft's."""

from __future__ import annotations

import json
from typing import NamedTuple

from magicdec.naming import METHODS, method_name
from magicdec.reports.exports import PROMPT_LOOKUP_MAX, sglang_draft
from magicdec.schema.gamma_table import TableGamma
from magicdec.schema.row import Candidate
from magicdec.specs.catalog import load_model_spec, served_checkpoint
from magicdec.specs.engine import load_engine
from magicdec.specs.heads import facts_of, has_checkpoint
from magicdec.specs.serve_command import ServeCommand


class OptionTexts(NamedTuple):
    """An engine's options, as advice writes them."""

    speculation: str
    gamma: str
    table: str
    """Gamma by batch."""
    tp: str
    batch: str
    """Sequences at once."""
    chunk: str
    """Tokens of a prompt that one step reads."""
    captured: str
    """Largest step that has a graph."""
    asynchronous: str
    """Undoes what keeps a step from being scheduled while another runs."""
    prefix_cache: str


OPTIONS = {
    "vllm": OptionTexts(
        speculation="--speculative-config",
        gamma="--speculative-config '{config}'",
        table="--speculative-config '{config}'",
        tp="--tensor-parallel-size {}",
        batch="--max-num-seqs",
        chunk="--max-num-batched-tokens",
        captured="--max-cudagraph-capture-size {}",
        asynchronous="leave out --no-async-scheduling",
        prefix_cache="leave out --no-enable-prefix-caching",
    ),
    "sglang": OptionTexts(
        speculation="--speculative-algorithm",
        gamma="--speculative-num-draft-tokens {verified}",
        table="--speculative-adaptive",
        tp="--tp {}",
        batch="--max-running-requests",
        chunk="--chunked-prefill-size",
        captured="--cuda-graph-max-bs {}",
        asynchronous="leave out --disable-overlap-schedule",
        prefix_cache="leave out --disable-radix-cache",
    ),
    "trtllm": OptionTexts(
        speculation="speculative_config",
        gamma="speculative_config: max_draft_len: {gamma}",
        table="draft_len_schedule in speculative_config",
        tp="--tp_size {}",
        batch="--max_batch_size",
        chunk="--max_num_tokens",
        captured="cuda_graph_config: max_batch_size: {}",
        asynchronous="disable_overlap_scheduler: false",
        prefix_cache="kv_cache_config: enable_block_reuse: true",
    ),
    "llama.cpp": OptionTexts(
        speculation="--spec-type",
        gamma="--spec-draft-n-max {gamma}",
        table="",
        tp="--split-mode row",  # over all the devices that it sees
        batch="--parallel",
        chunk="--batch-size",
        captured="--cuda-graph-max-bs {}",
        asynchronous="",
        prefix_cache="--cache-prompt",
    ),
}
ONE_PASS_METHODS = tuple(
    name for name, method in METHODS.items() if method.sort in ("lookup", "parallel")
)
"""Methods whose drafts take no steps to count."""


def graph_option(command: ServeCommand) -> str:
    """The option to leave out, as it is written."""
    for option, value in command.read.items():
        names = ("--O", "--optimization-level", "--compilation-config")
        if "graph" in option or "eager" in option or option in names:
            if option == "--O":
                return f"leave out -O{value}"
            if value == "true":
                return f"leave out {option}"
            return f"leave out {option} '{value}'"
    return "leave out the option that turns graphs off"


def states_option(command: ServeCommand) -> str:
    """SGLang's setting that keeps recurrent states for its prefix cache and schedules ahead; "": it does."""
    if not command.keeps_states_between_steps:
        return ""
    renamed = "--mamba-radix-cache-strategy"
    option = renamed if renamed in command.read else "--mamba-scheduler-strategy"
    return f"{option} extra_buffer"


def gamma_option(command: ServeCommand, gamma: int) -> str:
    """The setting that asks for another number of drafted tokens."""
    given = command.read.get("--speculative-config", "{}")
    config = json.loads(given) | {"num_speculative_tokens": gamma}
    option = OPTIONS[command.engine].gamma.format(
        config=json.dumps(config), gamma=gamma, verified=gamma + 1
    )
    speculation = command.speculation
    has_steps = speculation is None or speculation.draft not in ONE_PASS_METHODS
    if command.engine == "sglang" and has_steps:
        return f"--speculative-num-steps {gamma} {option}"
    return option


def draft_option(command: ServeCommand, row: Candidate) -> str:
    """The setting that asks for another draft; a head's checkpoint is left to fill in."""
    engine = load_engine(command.engine_profile)
    call: dict[str, object] = dict(engine.draft_call(row.draft_method))
    checkpoint = ""
    if row.draft not in ("self", row.draft_method):
        checkpoint = served_checkpoint(row.draft) or row.draft
    elif has_checkpoint(row.draft_method, command.model):
        checkpoint = _head_of(command, row)
    if command.engine == "sglang":
        words = sglang_draft(engine, row, row.gamma, checkpoint)
        return " ".join(word for pair in words for word in pair)
    if command.engine == "vllm":
        call |= {"num_speculative_tokens": row.gamma}
        if row.draft_method == "ngram":
            call |= {"prompt_lookup_max": PROMPT_LOOKUP_MAX}
        if checkpoint:
            call |= {"model": checkpoint}
        return f"--speculative-config '{json.dumps(call)}'"
    if command.engine == "llama.cpp":
        sort = {"ngram": "ngram-simple", "full": "draft"}.get(
            row.draft_method, f"draft-{row.draft_method}"
        )
        model = f" --model-draft {checkpoint}" if checkpoint else ""
        return f"--spec-type {sort}{model} --spec-draft-n-max {row.gamma}"
    if row.draft_method == "mtp":
        call |= {"num_nextn_predict_layers": row.gamma}
    if row.draft_method == "ngram":
        call |= {"max_matching_ngram_size": PROMPT_LOOKUP_MAX}
    if checkpoint:
        call |= {"speculative_model": checkpoint}
    call |= {"max_draft_len": row.gamma}
    return f"speculative_config: {json.dumps(call)}"


def _head_of(command: ServeCommand, row: Candidate) -> str:
    """The checkpoint of a head: the command's own where it is of this kind and shape, else the one
    whose acceptance is believed, else a name to fill in."""
    speculation = command.speculation
    if speculation is not None and speculation.checkpoint is not None:
        facts = facts_of(speculation.checkpoint, reads_files=False)
        model = load_model_spec(command.model)
        fits = facts.hidden_size in (None, model.hidden_size) and (
            facts.vocab_size in (None, model.vocab_size)
        )
        if facts.method == row.draft_method and fits:
            return speculation.checkpoint
    return row.drafting.checkpoint or f"{method_name(row.draft_method)}-HEAD"


def table_option(
    command: ServeCommand, gammas: dict[int, int], context_len: int
) -> str:
    """The setting that has gamma follow the batch."""
    table = TableGamma(
        batch_sizes=tuple(gammas),
        context_lens=(context_len,),
        gammas=tuple((gamma,) for gamma in gammas.values()),
    )
    bands = [list(band) for band in table.bands(context_len)]
    config = json.loads(command.read.get("--speculative-config", "{}"))
    config |= {
        "num_speculative_tokens": table.max_gamma,
        "num_speculative_tokens_per_batch_size": bands,
    }
    return OPTIONS[command.engine].table.format(config=json.dumps(config))
