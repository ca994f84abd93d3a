"""Settings of a server as its engine's version writes them: those that advice names, and a draft's."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from magicdec.naming import METHODS, method_name
from magicdec.reports.exports import (
    PROMPT_LOOKUP_MAX,
    captured_size,
    draft_len_schedule,
    gammas_of_sglang,
    sglang_draft,
)
from magicdec.schema.gamma_table import TableGamma
from magicdec.schema.row import Candidate
from magicdec.specs.catalog import load_model_spec, served_checkpoint
from magicdec.specs.engine import load_engine
from magicdec.specs.engine_tables import EngineOptions
from magicdec.specs.heads import facts_of, has_checkpoint, head_for, is_loaded_by
from magicdec.specs.serve_command import OPTIONS, ServeCommand

ONE_PASS_METHODS = tuple(
    name for name, method in METHODS.items() if method.sort in ("lookup", "parallel")
)
"""Methods whose drafts take no steps to count."""
LLAMA_CPP_TYPES = {"ngram": "ngram-simple", "full": "draft-simple"}
"""llama.cpp's --spec-type (common/speculative.cpp), where that is not draft- and our name."""
LLAMA_CPP_GAMMAS = {
    "ngram-simple": "--spec-ngram-simple-size-m",
    "ngram-map-k": "--spec-ngram-map-k-size-m",
    "ngram-map-k4v": "--spec-ngram-map-k4v-size-m",
    "ngram-mod": "--spec-ngram-mod-n-max",
}
"""The option of a look-up's length, by its type: the others have --spec-draft-n-max (common/arg.cpp)."""
LLAMA_CPP_LENGTHS = ("--draft-max", "--draft-n", "--draft", "--spec-draft-n-max")
"""Names of that option, older builds' too."""


def options_of(command: ServeCommand) -> EngineOptions:
    """The options of the command's engine, in its version."""
    engine = load_engine(command.engine_profile)
    if command.engine == "llama.cpp" and command.version is not None:
        engine = engine.of_version(command.version)
    return engine.options


def takes_draft(command: ServeCommand, row: Candidate) -> bool:
    """Whether the engine's version has a setting for a draft: older builds of llama.cpp for models
    alone, as far as is known."""
    if command.engine != "llama.cpp" or options_of(command).speculation:
        return True
    return row.draft_method == "full" and row.draft != "self"


def batch_option(command: ServeCommand, users: int) -> str:
    """The setting that serves so many users at once."""
    options = options_of(command)
    most = users
    if options.is_batch_of_rank:
        most = -(-users // command.dp_size)
    return f"{options.batch} {most}"


def captured_option(command: ServeCommand, needed: int) -> str:
    """The setting that captures graphs of steps of so many tokens or sequences: by the command's own
    name where its engine's version is not known, and without a list of sizes, which it contradicts.
    """
    size = captured_size(needed) if command.engine == "vllm" else needed
    setting = options_of(command).captured.format(size)
    meanings = OPTIONS[command.engine]
    for option in command.read:
        if meanings.get(option.lstrip("-")) != "captured":
            continue
        if "max" in option and command.version is None:
            return f"{option} {size}"
        if "max" not in option:
            return f"{setting} (leave out {option})"
    return setting


def leave_out(command: ServeCommand, *meanings: str) -> str:
    """The advice to leave out the option, or the variable, that states one of these meanings or its
    opposite, as it is written."""
    known = OPTIONS[command.engine]
    for name, value in command.read.items():
        plain = name.lstrip("-")
        meaning = known.get(plain, known.get(plain.replace("_", "-"), ""))
        if meaning.removeprefix("not ") not in meanings:
            continue
        if name == "--O":
            return f"leave out -O{value}"
        if value == "true":
            return f"leave out {name}"
        between = "=" if name.isupper() else " "
        return f"leave out {name}{between}{shlex.quote(value)}"
    return "leave out the option that turns it off"


def states_option(command: ServeCommand) -> str:
    """SGLang's setting that keeps recurrent states for its prefix cache and schedules ahead; "": it does."""
    if not command.keeps_states_between_steps:
        return ""
    renamed = "--mamba-radix-cache-strategy"
    option = renamed if renamed in command.read else "--mamba-scheduler-strategy"
    return f"{option} extra_buffer"


def without_draft(command: ServeCommand) -> str:
    """The settings to leave out for no draft, by the names that the command gives them."""
    if command.engine == "llama.cpp":
        return f"leave out {' and '.join(_drafting_options(command))}"
    name = options_of(command).speculation
    shortened = [option for option in command.read if name.startswith(option)]
    return f"leave out {max(shortened, key=len, default=name)}"


def _drafting_options(command: ServeCommand) -> list[str]:
    """llama.cpp's options of a draft that a command gives."""
    given = []
    for option, value in command.read.items():
        name = option.lstrip("-")
        if "draft" in name or name in ("md", "hfd", "hfrd", "spec-type"):
            given.append(f"{option} {shlex.quote(value)}")
    return given


def gamma_option(command: ServeCommand, gamma: int) -> str:
    """The setting that asks for another number of drafted tokens."""
    speculation = command.speculation
    draft = "" if speculation is None else speculation.draft
    if command.engine == "vllm":
        return _vllm_config(command, {"num_speculative_tokens": gamma})
    if command.engine == "sglang":
        option = f"--speculative-num-draft-tokens {gamma + 1}"
        if draft in ONE_PASS_METHODS:
            return option
        return f"--speculative-num-steps {gamma} {option}"
    if command.engine == "llama.cpp":
        sort = command.read.get("--spec-type", "")
        option = LLAMA_CPP_GAMMAS.get(sort, options_of(command).gamma)
        setting = f"{option} {gamma}"
        for other in LLAMA_CPP_LENGTHS:
            if other in command.read and other != option:
                setting += f" (leave out {other})"
        return setting
    return _trtllm_config(_trtllm_lengths(draft, gamma))


def draft_option(command: ServeCommand, row: Candidate) -> str:
    """The setting that asks for another draft; a head's checkpoint is left to fill in."""
    engine = load_engine(command.engine_profile)
    method = row.draft_method
    call: dict[str, object] = dict(engine.draft_call(method))
    checkpoint = ""
    if row.draft not in ("self", method):
        checkpoint = served_checkpoint(row.draft) or row.draft
    elif has_checkpoint(method, command.model):
        checkpoint = _head_of(command, row)
    if command.engine == "sglang":
        quoted = shlex.quote(checkpoint) if checkpoint else ""
        words = sglang_draft(engine, row, row.gamma, quoted)
        return " ".join(word for pair in words for word in pair)
    if command.engine == "vllm":
        call |= {"num_speculative_tokens": row.gamma}
        if method == "ngram":
            call |= {"prompt_lookup_max": PROMPT_LOOKUP_MAX}
        if checkpoint:
            call |= {"model": checkpoint}
        return f"--speculative-config {shlex.quote(json.dumps(call))}"
    if command.engine == "llama.cpp":
        return _llama_cpp_draft(command, row, checkpoint)
    if method == "ngram":
        call |= {"max_matching_ngram_size": PROMPT_LOOKUP_MAX}
    if checkpoint:
        call |= {"speculative_model": checkpoint}
    return _trtllm_config(call | _trtllm_lengths(method, row.gamma))


def _vllm_config(command: ServeCommand, changes: Mapping[str, object]) -> str:
    """The command's --speculative-config with other values at these keys."""
    config = json.loads(command.read.get("--speculative-config", "{}")) | changes
    return f"--speculative-config {shlex.quote(json.dumps(config))}"


def _trtllm_lengths(method: str, gamma: int) -> dict[str, object]:
    """A draft's length in TensorRT-LLM's settings: both keys of a prediction module must agree."""
    if method == "mtp":
        return {"num_nextn_predict_layers": gamma, "max_draft_len": gamma}
    return {"max_draft_len": gamma}


def _trtllm_config(config: Mapping[str, object]) -> str:
    """Lines of TensorRT-LLM's file, in one."""
    values = ", ".join(f"{key}: {json.dumps(value)}" for key, value in config.items())
    return f"speculative_config: {{{values}}}"


def _llama_cpp_draft(command: ServeCommand, row: Candidate, checkpoint: str) -> str:
    """llama.cpp's settings of a draft, whose network is a GGUF file, in place of the command's own."""
    options = options_of(command)
    sort = LLAMA_CPP_TYPES.get(row.draft_method, f"draft-{row.draft_method}")
    gamma = LLAMA_CPP_GAMMAS.get(sort, options.gamma)
    setting = f"{options.speculation} {sort} {gamma} {row.gamma}"
    if not options.speculation:
        setting = f"{gamma} {row.gamma}"
    remarks = []
    if checkpoint:
        setting += " --model-draft DRAFT.gguf"
        converted = f"DRAFT.gguf: convert_hf_to_gguf.py of {checkpoint}"
        if row.draft_method != "full":
            converted += ", with --target-model-dir"
        remarks.append(converted)
    given = _drafting_options(command)
    if given:
        remarks.append(f"leave out {' and '.join(given)}")
    if remarks:
        return f"{setting} ({'; '.join(remarks)})"
    return setting


def _head_of(command: ServeCommand, row: Candidate) -> str:
    """The checkpoint of a head: the command's own where it is of this kind and shape, else the one
    whose acceptance is believed, else one of the table, else a name to fill in."""
    speculation = command.speculation
    method = row.draft_method
    if speculation is not None and speculation.checkpoint is not None:
        facts = facts_of(speculation.checkpoint, reads_files=False)
        model = load_model_spec(command.model)
        fits = facts.hidden_size in (None, model.hidden_size) and (
            facts.vocab_size in (None, model.vocab_size)
        )
        is_loaded = is_loaded_by(command.engine, speculation.checkpoint)
        if facts.method == method and fits and is_loaded:
            return speculation.checkpoint
    known = head_for(
        command.engine, command.model, method, row.gamma, row.drafting.checkpoint
    )
    return known or f"{method_name(method)}-HEAD"


def table_option(
    command: ServeCommand, gammas: dict[int, int], context_len: int
) -> str:
    """The setting that has gamma follow the batch; "": the engine follows none with this draft and
    these options."""
    options = options_of(command)
    speculation = command.speculation
    assert speculation is not None
    method = speculation.draft if speculation.draft in METHODS else "full"
    is_hindered = command.dp_size > 1
    for option in command.read:
        is_hindered |= option.lstrip("-") in options.table_not_with
    if not options.table or is_hindered or not options.follows_batch(method):
        return ""
    table = TableGamma(
        batch_sizes=tuple(gammas),
        context_lens=(context_len,),
        gammas=tuple((gamma,) for gamma in gammas.values()),
    )
    bands = table.bands(context_len)
    if command.engine == "vllm":
        return _vllm_config(
            command,
            {
                "num_speculative_tokens": table.max_gamma,
                options.table: [list(band) for band in bands],
            },
        )
    if command.engine == "sglang":
        steps = table.max_gamma
        return (
            f"--speculative-num-steps {steps} --speculative-num-draft-tokens {steps + 1} "
            f"{options.table} {options.table}-config gamma.json (gamma.json: {gammas_of_sglang(bands)})"
        )
    schedule, _ = draft_len_schedule(bands)
    lengths = ", ".join(f"{batch}: {gamma}" for batch, gamma in schedule.items())
    return (
        f"speculative_config: {{max_draft_len: {table.max_gamma}, "
        f"{options.table}: {{{lengths}}}}}"
    )
