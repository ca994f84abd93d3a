"""Advice on a server's command line: how it runs as it is, and what to change, each change with its
gain. All times are a plan's.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from magicdec.counts import Z_90
from magicdec.errors import CapacityError, ConfigError
from magicdec.live.advice import DraftedLoad, choices_at
from magicdec.live.settings import (
    OPTIONS,
    USUAL_OUTPUT,
    AsSet,
    Change,
    Served,
    costs_of,
    unpriced_costs,
)
from magicdec.naming import METHODS, draft_name, head_named_in, method_name
from magicdec.perfmodel.intervals import engine_error
from magicdec.perfmodel.kernels.profile import counted, load_hardware
from magicdec.perfmodel.memory import memory_need
from magicdec.perfmodel.plan.draws import Draws, draws_of
from magicdec.perfmodel.plan.request import Case, DraftOption, PlanRequest
from magicdec.perfmodel.plan.search import DraftRows, every_gamma, most_that_fit
from magicdec.perfmodel.plan.standing import (
    AskedDraft,
    Standing,
    has_module,
    option_of,
    packages_of,
    standing,
)
from magicdec.perfmodel.planner import Answer, answered, make_plan
from magicdec.perfmodel.trees import TREES_LOSE, tree_error
from magicdec.reports.exports import PROMPT_LOOKUP_MAX, sglang_draft
from magicdec.reports.sentences import acceptance_of
from magicdec.schema.gamma_table import TableGamma
from magicdec.schema.row import Candidate
from magicdec.specs.catalog import is_model, load_model_spec, served_checkpoint
from magicdec.specs.device import DTYPE_BYTES
from magicdec.specs.engine import load_engine
from magicdec.specs.heads import facts_of
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import format_name
from magicdec.specs.serve_command import ServeCommand, Speculation
from magicdec.specs.speculation import MAX_GAMMA, OWN_METHOD
from magicdec.tasks import usual_lengths
from magicdec.units import GIB, INTERVAL_ENDS, format_count, format_percent

USUAL_HARDWARE = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-192gb", "b300-sxm-288gb")
"""Devices of which the first that holds the model is assumed, where neither the command nor its user
names one."""
USUAL_BATCH = 32
ASSUMED_CONTEXT = 4096
"""Users and prompt where neither the command nor its user names them; an answer lists them as
assumed."""
NOTEWORTHY = 1.02
"""Gains below this are not named."""
LIGHT_LOADS = (1, 4, 16)
"""Batches at which a table by batch is compared, in addition to the requested one."""
UNMEASURED_FORMS = {"dflash2": "DFlash2", "lilicorr": "LiLiCorr", "xpress": "XPress"}
"""Forms of DFlash that vLLM runs by the same method (vllm/v1/worker/gpu/spec_decode), by a word of the
checkpoint's name or of the configuration: they choose among several candidates a position."""
GIVEN_ACCEPTANCE = ("acceptance_rate", "accept_length", "drafted_share")
"""Names by which a load states the acceptance of the command's own draft."""
PREEMPTING = ("vllm", "sglang")
"""Engines that admit what does not fit with its output, and take its memory back later."""
CACHE_STEP = 256
"""Tokens to which llama.cpp rounds its cache."""
AS_PUBLISHED = ("compressed-tensors", "modelopt", "auto")
"""Values of --quantization that leave the format to the checkpoint."""


class AskedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load, which a command does not state. None: a usual value, listed in the answer."""

    hardware: str | None = None
    batch: int | None = None
    """Users at once."""
    context_len: int | None = None
    gen_len: int = 0
    task: str | None = None
    """The text that is served; it brings the lengths of a usual request."""
    temperature: float = 1.0
    acceptance_rate: float | tuple[float, ...] | None = None
    accept_length: float | None = None
    """Tokens per step at the command's gamma."""
    drafted_share: float | None = None
    """Share of steps that had a draft, where `accept_length` is of these alone."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A command read, predicted and weighed."""

    command: ServeCommand
    hardware: str
    num_gpus: int
    batch_size: int
    context_len: int
    assumed: list[str]
    """Values that the command does not state and that were assumed."""
    as_it_is: Candidate | None
    """The command's own configuration; null: it does not fit, or no acceptance is known."""
    without_draft: Candidate | None
    as_set: AsSet | None = None
    """Both with every setting that costs; null: none does."""
    changes: list[Change]
    """Settings that surely cost first, then those that lose exactness, then gains, the surest of the
    largest first: of those to the draft one can be made, and after it no other gains. Chances, and
    changes without a price, last."""
    problems: list[str]
    not_understood: list[str]
    notes: list[str]

    @property
    def first(self) -> Change | None:
        """The change to make at this load, on these devices; None: the command does not run, or none
        gains rather than loses."""
        if self.as_it_is is None and self.problems:
            return None
        for change in self.changes:
            if change.kind != "gain" or (change.is_likely and _is_here(change)):
                return change
        return None

    @property
    def why_keep(self) -> str:
        """Why none of the changes is to be made first."""
        if any(change.needs_gpus is not None for change in self.changes):
            return "no change gains on these devices"
        if any(change.gain is not None for change in self.changes):
            return "no change is likely to gain"
        return "no change gains"

    @property
    def headline(self) -> str:
        """The fault, else the change to make, in one line."""
        if self.problems:
            return self.problems[0]
        return self.advice

    @property
    def advice(self) -> str:
        """The change to make, in one line."""
        if self.command.unread is not None and self.command.speculation is None:
            return f"If {self.command.unread} sets no draft: {self._advice}"
        return self._advice

    @property
    def _advice(self) -> str:
        change = self.first
        if change is None:
            return f"Keep it as it is: {self.why_keep}."
        if change.gain is None:
            return f"{change.change}: {change.reason}."
        if change.is_sure or change.kind == "cost":
            return f"{change.change}: {_gain(change)}."
        return f"{change.change}: {_gain(change)}; unsure, measure first."


def in_order(changes: Sequence[Change]) -> list[Change]:
    """Settings that surely cost, that lose exactness, then changes that gain at this load, at
    another, and those without a price.

    Of gains the surest first, by the lower end of its interval; but the largest, and those that
    come within `NOTEWORTHY` of it, before the others, so nothing is left to gain after the first.
    Chances come last.
    """
    likely = []
    for change in changes:
        if change.kind == "gain" and change.is_likely and _is_here(change):
            likely.append(change.gain or 0.0)
    largest = max(likely, default=0.0)

    def place(change: Change) -> tuple[int, bool, bool, bool, bool, float]:
        kinds = ("cost", "exactness", "gain")
        low = change.gain_low or 0.0
        if change.kind != "gain":
            low = change.gain or 0.0
        return (
            kinds.index(change.kind),
            change.gain is None,
            not _is_here(change),
            change.kind == "gain" and not change.is_likely,
            (change.gain or 0.0) * NOTEWORTHY < largest,
            -low,
        )

    return sorted(changes, key=place)


def _is_here(change: Change) -> bool:
    """Whether it is of this load, on these devices."""
    return change.at_batch is None and change.needs_gpus is None


def _gain(change: Change) -> str:
    return f"{change.gain:.2f}x (90 %: {change.gain_low:.2f} to {change.gain_high:.2f})"


def check_command(command: ServeCommand, load: AskedLoad) -> Check:
    """How a server runs as its command has it, and what to change.

    Raises ConfigError for a model, a device or a draft that cannot be planned.
    """
    command = _over_all_devices(command, load)
    model = load_model_spec(command.model)
    request, assumed = _request(command, load, model)
    command = _with_own_head(command, model)
    # a draft's faults need no device, so they are said whatever fits
    found = _standing(command, model)
    of_command, on_start = _on_draft(command, found)
    problems = [*command.problems, *_on_command(command, load, model)]
    on_start += command.notes
    try:
        free = answered(_without_acceptance(request, gamma=None), model, [])[0][0]
    except CapacityError as error:
        # a server has no --weight-dtype: its format is the checkpoint's
        fault = str(error).replace("--weight-dtype ", "weights in ")
        if command.is_partly_on_host:
            raise ConfigError(
                f"{fault}; what stays on the host is not modelled, so nothing is priced"
            ) from None
        return Check(
            command=command,
            hardware=str(request.hardware[0]),
            num_gpus=command.tp_size * command.pp_size * command.dp_size,
            batch_size=request.batch_sizes[0],
            context_len=request.context_lens[0],
            assumed=assumed,
            as_it_is=None,
            without_draft=None,
            changes=in_order(unpriced_costs(command)),
            problems=[*of_command, fault, *problems],
            not_understood=command.not_understood,
            notes=on_start,
        )
    of_command += _on_allocated_cache(command, free.case)
    on_format = _on_format(command, free.case)
    if format_name(command.read.get("--dtype", "auto")) == "bf16":
        of_command += on_format
        on_format = []
    alone = free.document.autoregressive
    # every draft is compared with as many users
    fitting = msgspec.structs.replace(request, batch_sizes=(alone.batch_size,))
    drafted = Drafted()
    if found is None or found.starts:
        drafted = _drafted(command, fitting, model)
        of_draft = _on_speculation(command, drafted, free)
    else:
        of_draft = _instead(command, found, fitting, model, free)
    of_batches = _on_batches(command, load, request, model)
    costs = costs_of(
        command,
        _served(request, drafted, free),
        _served(request, Drafted(), free),
        waiting=math.prod(
            change.gain or 1.0 for change in of_batches if change.kind == "cost"
        ),
    )
    named = []
    for change in (*of_draft, *of_batches, *costs.changes):
        is_small = change.gain is not None and change.gain < NOTEWORTHY
        if change.kind != "gain" or not is_small:
            named.append(change)
    as_it_is: Candidate | None = alone
    if command.speculation is not None:
        as_it_is = drafted.row
    return Check(
        command=command,
        hardware=alone.hardware,
        num_gpus=alone.num_gpus * command.dp_size,
        batch_size=alone.batch_size,
        context_len=alone.context_len,
        assumed=assumed,
        as_it_is=as_it_is,
        without_draft=alone,
        as_set=costs.as_set,
        changes=in_order(named),
        problems=[*of_command, *problems],
        not_understood=command.not_understood,
        notes=[
            *on_start,
            *drafted.notes,
            *on_format,
            *_on_users(command, load, request, free),
        ],
    )


def _on_format(command: ServeCommand, case: Case) -> list[str]:
    """A device without bf16, which the command asks for, or which the model would be served in."""
    written = command.read.get("--dtype", "auto")
    if case.hardware.has_bf16 or command.engine == "llama.cpp":
        return []
    name = case.hardware.name
    if format_name(written) == "bf16":
        return [f"dtype {written}: {name} cannot compute in bf16 (--dtype half)"]
    if format_name(written) == "fp16":
        return []
    return [f"{name} cannot compute in bf16: priced in fp16 (--dtype half)"]


def _on_allocated_cache(command: ServeCommand, case: Case) -> list[str]:
    """llama.cpp's cache, which it allocates whole at its start, where that and the weights are more
    than the device's memory."""
    allocated = command.allocated_tokens
    if allocated is None or command.is_partly_on_host:
        return []
    sequences = command.max_num_seqs or 1
    lengths = np.arange(CACHE_STEP, allocated // sequences + CACHE_STEP, CACHE_STEP)
    need = memory_need(
        case.setup(None),
        batch=sequences,
        max_len=lengths,
        budget=None,
        gamma=0,
        tp_size=command.tp_size,
    )
    held = need.weights_bytes + need.kv_bytes
    memory = case.hardware.memory_bytes
    if held[-1] <= memory:
        return []
    weights, cache = (
        f"{float(np.ravel(part)[-1]) / GIB:.1f} GiB"
        for part in (need.weights_bytes, need.kv_bytes)
    )
    most = sequences * lengths[held <= memory].max(initial=0)
    each = "" if command.pp_size == 1 else "each "
    return [
        f"context: -c {allocated} allocates {cache} of cache, with {weights} of weights more than "
        f"{each}{case.hardware.name} has ({memory / GIB:.0f} GiB): at most about -c {most} fits"
    ]


def _without_acceptance(request: PlanRequest, **changes: Any) -> PlanRequest:
    """The request without the acceptance of the command's own draft, which is no other's."""
    return msgspec.structs.replace(
        request,
        acceptance_rate=None,
        accept_length=None,
        drafted_share=None,
        **changes,
    )


def _standing(command: ServeCommand, model: ModelSpec) -> Standing | None:
    """Whether the command's draft can be started. None: it has none."""
    speculation = command.speculation
    if speculation is None:
        return None
    checkpoint = ""
    if speculation.draft in OWN_METHOD:
        checkpoint = speculation.checkpoint or ""
    drafting = None
    if speculation.draft not in OWN_METHOD and is_model(speculation.draft):
        drafting = load_model_spec(speculation.draft)
    asked = AskedDraft(
        draft=speculation.draft,
        method=_method_of(speculation),
        checkpoint=checkpoint,
        model=drafting,
        gamma=speculation.gamma,
        tp_size=command.tp_size,
        draft_tp_size=speculation.tp_size,
        pp_size=command.pp_size,
        exists=True,
    )
    return standing(asked, model, load_engine(command.engine_profile))


def _method_of(speculation: Speculation) -> str:
    if speculation.draft in OWN_METHOD:
        return speculation.draft
    return "full"


def _on_draft(
    command: ServeCommand, found: Standing | None
) -> tuple[list[str], list[str]]:
    """Why the server does not start or accepts nothing with its draft, with the option that cures it;
    and notes on what is not known of the draft's checkpoint, and on what the draft needs."""
    speculation = command.speculation
    if found is None or speculation is None:
        return [], []
    engine = load_engine(command.engine_profile)
    if not found.starts:
        cure = ""
        if found.method not in (None, speculation.draft):
            cure = f" ({option_of(engine, found.method)})"
        return [f"the draft cannot run: {found.sentence}{cure}"], []
    notes = []
    if found.answer == "unknown":
        notes.append(found.sentence)
    package = packages_of(engine, speculation.draft, _method_of(speculation))
    if package:
        notes.append(package)
    return [], notes


def _instead(
    command: ServeCommand,
    found: Standing,
    request: PlanRequest,
    model: ModelSpec,
    free: Answer,
) -> list[Change]:
    """The draft to use in place of one that cannot be started, compared with no draft: the command's
    checkpoint by the method and depth that it has, and the best of the other drafts."""
    assert command.speculation is not None
    changes: list[Change] = []
    others = free.drafted
    alone = free.document.autoregressive
    if found.method is not None:
        asked = _without_acceptance(request, draft=found.method, gamma=None)
        rows = []
        for row in answered(asked, model, [])[0][0].drafted:
            if found.most_drafts is None or row.gamma <= found.most_drafts:
                rows.append(row)
        changes += _best_draft(command, rows, alone, "Draft")
        others = [row for row in others if row.draft_method != found.method]
    return [*changes, *_best_draft(command, others, alone, "Speculate")]


def _over_all_devices(command: ServeCommand, load: AskedLoad) -> ServeCommand:
    """llama.cpp's command with its layers over all the devices that it sees, in stages."""
    given = counted(load.hardware or "").num_gpus or command.num_gpus or 1
    if command.engine != "llama.cpp" or given == 1:
        return command
    note = (
        f"llama.cpp splits its layers over the {given} devices, which then work in turn"
    )
    return msgspec.structs.replace(command, pp_size=given, notes=[*command.notes, note])


def _with_own_head(command: ServeCommand, model: ModelSpec) -> ServeCommand:
    """The command with EAGLE's algorithm and no checkpoint of an EAGLE head read as the model's own
    prediction module, which SGLang then drafts with.
    """
    speculation = command.speculation
    if speculation is None or not has_module(model):
        return command
    if speculation.checkpoint and head_named_in(speculation.checkpoint):
        return command
    if command.engine != "sglang" or speculation.draft != "eagle":
        return command
    own = msgspec.structs.replace(speculation, draft="mtp")
    return msgspec.structs.replace(command, speculation=own)


def _on_users(
    command: ServeCommand, load: AskedLoad, request: PlanRequest, free: Answer
) -> list[str]:
    """Users that do not fit at once; and the weight of more sequences at once, where the users are not
    known and the command admits fewer than usual."""
    notes = []
    replicas = command.dp_size
    asked = request.batch_sizes[0]
    fits = free.document.autoregressive.batch_size
    if fits < asked:
        line = f"{fits * replicas} of {asked * replicas} users fit at once; the others wait"
        largest = int(free.document.memory.largest_autoregressive_batch)
        if min(largest, asked) > fits:
            line += f" ({min(largest, asked) * replicas} fit without a draft)"
        notes.append(line)
    most = command.max_num_seqs
    if load.batch is not None or most is None or most >= USUAL_BATCH:
        return notes
    rows = []
    for batch in (asked, max(USUAL_BATCH // replicas, 1)):
        at_batch = _without_acceptance(request, draft="none", batch_sizes=(batch,))
        try:
            rows.append(make_plan(at_batch).best)
        except CapacityError:
            return notes
    now, wider = rows
    if wider.batch_size <= now.batch_size:
        return notes
    times = wider.tokens_per_s / now.tokens_per_s
    users = wider.batch_size * replicas
    slower = wider.between_tokens_s / now.between_tokens_s
    return [
        *notes,
        f"if {users} users wait, {OPTIONS[command.engine].batch} {users} serves {times:.2g} times the "
        f"tokens per second without a draft, each token {slower:.2g} times as slow (--batch)",
    ]


def _request(
    command: ServeCommand, load: AskedLoad, model: ModelSpec
) -> tuple[PlanRequest, list[str]]:
    """The plan's request for a command under a load, and what was assumed for it."""
    named = load.hardware or _listed_device(command.hardware)
    assumed = []
    batch = load.batch or USUAL_BATCH
    if command.max_num_seqs is not None:
        batch = min(batch, command.max_num_seqs)
    if load.batch is None:
        assumed.append(f"{format_count(batch, 'user')} at once (--batch)")
    longest = min(command.max_model_len or model.longest_context, model.longest_context)
    context, gen_len, assumed_lengths = _lengths(load, longest)
    assumed += assumed_lengths
    pp_size = None
    if command.pp_size > 1:
        pp_size = command.pp_size
    given: dict[str, Any] = {}
    if command.speculation is not None:
        given = {name: getattr(load, name) for name in GIVEN_ACCEPTANCE}
        if load.accept_length is not None:
            if command.speculation.gamma is None:
                raise ConfigError(
                    "an accept length is of one number of drafted tokens, which this command does "
                    "not state"
                )
            given["gamma"] = command.speculation.gamma
    request = PlanRequest(
        model=command.model,
        hardware=(load_hardware(named or USUAL_HARDWARE[0]).name,),
        engine=command.engine_profile,
        tp_size=command.tp_size,
        pp_size=pp_size,
        ep_size=command.ep_size,
        batch_sizes=(max(batch // command.dp_size, 1),),
        context_lens=(context,),
        gen_len=gen_len,
        task=load.task,
        temperature=load.temperature,
        **given,
        weight_dtype=_format("quantization", command.weight_dtype, model),
        kv_dtype=_format("kv-cache-dtype", command.kv_dtype, model),
    )
    if named is None:
        request, of_device = _on_usual_hardware(request, model)
        assumed = [of_device, *assumed]
    return request, assumed


def _on_usual_hardware(
    request: PlanRequest, model: ModelSpec
) -> tuple[PlanRequest, str]:
    """The request on the first of the usual devices that holds it, the first of all where none does;
    and what was assumed, in words."""
    usual = USUAL_HARDWARE[0]
    for name in USUAL_HARDWARE:
        asked = msgspec.structs.replace(request, hardware=(name,))
        try:
            answered(_without_acceptance(asked, draft="none", gamma=None), model, [])
        except CapacityError:
            continue
        if name == usual:
            return asked, f"{name} (--hardware)"
        return asked, f"{name}, as {usual} does not hold it (--hardware)"
    return request, f"{usual} (--hardware)"


def _listed_device(name: str | None) -> str | None:
    """The device that a manifest names, where the catalog has it."""
    if name is None:
        return None
    try:
        return load_hardware(name).name
    except ConfigError:
        return None


def _on_command(command: ServeCommand, load: AskedLoad, model: ModelSpec) -> list[str]:
    """A device that is not known, another number of devices than the command uses, a longest sequence
    that the model does not read, and settings of a draft that contradict each other."""
    problems = []
    named = load.hardware
    if named is None and command.hardware is not None:
        named = _listed_device(command.hardware)
        if named is None:
            problems.append(
                f"devices: {command.hardware}, which the file asks for, is not in the catalog "
                "(--hardware)"
            )
    needed = command.tp_size * command.pp_size * command.dp_size
    granted = counted(named or "").num_gpus or command.num_gpus
    if granted is not None and granted != needed:
        problems.append(f"devices: the command uses {needed}, but {granted} are given")
    most = command.max_model_len
    if most is not None and most > model.longest_context:
        problems.append(
            f"max-model-len {most} is more than the {model.longest_context} tokens that {model.name} reads"
        )
    if command.speculation is not None and command.speculation.contradiction:
        problems.append(command.speculation.contradiction)
    return problems


def _lengths(load: AskedLoad, longest: int) -> tuple[int, int, list[str]]:
    """The prompt and the output of a request, given or usual, and what was assumed."""
    assumed = []
    context = load.context_len
    gen_len = load.gen_len
    if load.task is not None and not gen_len:
        gen_len = min(usual_lengths(load.task).output_len, longest // 2)
        assumed.append(f"{gen_len} generated tokens (--gen-len)")
    if context is None:
        usual = ASSUMED_CONTEXT
        if load.task is not None:
            usual = usual_lengths(load.task).prompt_len
        context = min(usual, longest // 2)
        assumed.append(f"prompts of {context} tokens (--context)")
    elif context + gen_len > longest:
        raise ConfigError(
            f"requests of {context + gen_len} tokens are longer than the {longest} that the "
            "command allows"
        )
    return context, gen_len, assumed


def _format(option: str, text: str | None, model: ModelSpec) -> str | None:
    """The plan's name for a format. None: the format that the checkpoint is published in."""
    if text is None or text in AS_PUBLISHED:
        return None
    name = format_name(text)
    published = model.quantization
    if published is not None and option == "quantization":
        kind = published.weight_dtype.partition("_")[0]
        if name.startswith(kind):
            return None
    if name not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ConfigError(f"--{option} {text} is not planned for; known: {known}")
    return name


class Over(NamedTuple):
    """A gain over the command as it is, with its 90 % interval."""

    gain: float
    low: float
    high: float
    chance: float | None = None
    """Probability that it is above 1; None: by the interval alone."""


class Drafted(NamedTuple):
    """The command's own draft."""

    row: Candidate | None = None
    case: Case | None = None
    option: DraftOption | None = None
    gamma: int = 0
    notes: tuple[str, ...] = ()

    def gammas(self, batch: int) -> DraftRows:
        """Every gamma of the draft, as a chain, at a batch: a tree may hold more tokens than any
        chain."""
        assert self.row is not None
        assert self.case is not None
        assert self.option is not None
        here = msgspec.structs.replace(self.row, batch_size=batch)
        chain = replace(self.option, tree=None)
        deepest = min(self.gamma, MAX_GAMMA)
        return every_gamma(self.case, chain, here, deepest=deepest)

    def best_at(self, batch: int) -> tuple[int, Over]:
        """The best gamma at a batch, 0 among them, and its gain over the command's there."""
        rows = self.gammas(batch).rows
        now = next(row for row in rows if row.gamma == self.gamma)
        best = max(rows, key=_rate)
        if best.gain.speedup < 1.0:
            return 0, _over_draft(now)
        return best.gamma, self.over(best, now)

    def over(self, row: Candidate, now: Candidate) -> Over:
        """Another gamma's rate over that of the command's own, as a chain over its tree too.

        The interval is that of decoding (advice.py), whose part of a request's time is what differs.
        Tree and chain share the errors of acceptance and kernels, so the tree's law and the engine's
        error are left.
        """
        assert self.case is not None
        assert self.option is not None
        gain = row.rate / now.rate
        setup = self.case.setup(self.option)
        tree = self.option.tree
        if tree is not None:
            error = float(tree_error(tree, self.gamma))
            width = math.exp(Z_90 * math.hypot(error, engine_error(setup)))
            return Over(gain, gain / width, gain * width)
        situation = DraftedLoad(
            setup=setup,
            acceptance=self.option.acceptance,
            batch_size=now.batch_size,
            context_len=now.context_len,
            gamma=self.gamma,
            tp_size=now.tp_size,
        )
        choices = choices_at(
            situation, now.batch_size, now.context_len, over=self.gamma
        )
        choice = choices[row.gamma]
        share = 0.0
        if now.requests is not None:
            share = now.requests.prefill_share

        def of_requests(decoding: float) -> float:
            return 1.0 / (share + (1.0 - share) / decoding)

        middle = of_requests(choice.gain)
        low = gain * of_requests(choice.gain_low) / middle
        high = gain * of_requests(choice.gain_high) / middle
        return Over(gain, low, high)


def _drafted(command: ServeCommand, request: PlanRequest, model: ModelSpec) -> Drafted:
    """The command's draft at its gamma, where its acceptance is known."""
    speculation = command.speculation
    if speculation is None:
        return Drafted()
    if speculation.draft not in OWN_METHOD and not is_model(speculation.draft):
        note = (
            f"nothing is known of the draft {speculation.draft}, so it is not priced: its "
            "config.json would tell"
        )
        return Drafted(notes=(note,))
    batch = request.batch_sizes[0]
    gamma = speculation.gamma_at(batch)
    asked = msgspec.structs.replace(
        request,
        draft=speculation.draft,
        gamma=gamma or speculation.gamma,
        tree=speculation.tree,
    )
    if speculation.draft not in OWN_METHOD:
        asked = msgspec.structs.replace(asked, draft_method="full")
    first = answered(asked, model, [])[0][0]
    if not first.drafted:
        break_even = ""
        unknown = make_plan(_without_acceptance(asked, gamma=None)).needs_acceptance
        for draft in unknown:
            rate = draft.break_even_acceptance_rate
            if rate is not None:
                break_even = f"; it is faster from a rate of {rate:.2f}"
                break
        note = (
            f"no acceptance of {speculation.draft} is known for {model.name}{break_even} "
            "(--acceptance-rate)"
        )
        return Drafted(notes=(note,))
    row = first.drafted[0]
    for other in first.drafted:
        if other.draft_budget == speculation.window:
            row = other
            break
    notes = []
    if speculation.gamma is None:
        notes.append(f"gamma is the engine's default; {row.gamma}, the best, was taken")
    if speculation.tree is not None:
        notes.append(TREES_LOSE)
    elif speculation.is_tree:
        notes.append("drafts branch here and are priced as chains")
    written = f"{speculation.checkpoint} {command.read}".lower()
    for word, name in UNMEASURED_FORMS.items():
        if speculation.draft == "dflash" and word in written:
            notes.append(
                f"{name} is priced as DFlash: its own choice among candidates was not measured"
            )
    if speculation.by_batch and not speculation.bands:
        notes.append("gamma follows a table by batch; its deepest was taken")
    elif speculation.by_batch and gamma == 0:
        notes.append(
            f"gamma follows a table by batch, which drafts nothing for {batch} sequences; its "
            f"deepest, {row.gamma}, was taken"
        )
    elif speculation.by_batch:
        notes.append(
            f"gamma follows a table by batch: {row.gamma} for {batch} sequences"
        )
    return Drafted(
        row=row,
        case=first.case,
        option=first.searched.origin(row).option,
        gamma=row.gamma,
        notes=tuple(notes),
    )


ONE_PASS_METHODS = tuple(
    name for name, method in METHODS.items() if method.sort in ("lookup", "parallel")
)
"""Methods whose drafts take no steps to count."""

# What to change


def _on_speculation(
    command: ServeCommand,
    drafted: Drafted,
    free: Answer,
) -> list[Change]:
    """Another gamma, no draft, another draft, a draft at all, or gamma by batch."""
    alone = free.document.autoregressive
    if command.speculation is None:
        return _best_draft(command, free.drafted, alone, "Speculate")
    if drafted.row is None:
        return []
    row = drafted.row
    own = drafted.gammas(row.batch_size)
    changes = []
    runs = [other for other in own.rows if other.fits]
    best = max(runs, key=_rate, default=row)
    if command.speculation.tree is not None:
        changes.append(_chain(command, drafted, best, runs))
    elif best.gamma != drafted.gamma:
        changes.append(
            _gaining(
                drafted.over(best, row),
                change=f"Draft {_tokens(best.gamma)} per step, not {drafted.gamma}",
                option=_gamma_option(command, best.gamma),
                reason=_steps(best, row),
            )
        )
    changes.append(
        _gaining(
            _over_draft(row),
            change=f"Do not speculate at {format_count(row.batch_size, 'user')}",
            option=f"leave out {OPTIONS[command.engine].speculation}",
            reason="a step with drafts costs more than its tokens are worth",
        )
    )
    others = []
    for other in free.drafted:
        if (other.draft, other.draft_method) != (row.draft, row.draft_method):
            others.append(other)
    assert drafted.case is not None
    plain, *of_drafts = free.searched
    draws = draws_of(drafted.case, [plain, own, *of_drafts], row)
    changes += _best_draft(command, others, row, "Draft", draws)
    if not command.speculation.by_batch:
        changes += _by_batch(command, drafted)
    return changes


def _gaining(over: Over, *, change: str, option: str, reason: str) -> Change:
    return Change(
        change=change,
        option=option,
        reason=reason,
        gain=over.gain,
        gain_low=over.low,
        gain_high=over.high,
        chance=over.chance,
    )


def _over_draft(row: Candidate) -> Over:
    """The gain of no draft over a row's: its own gain, turned round."""
    gain = row.gain
    return Over(
        gain=1.0 / gain.speedup,
        low=1.0 / gain.high,
        high=1.0 / gain.low,
        chance=1.0 - gain.probability,
    )


def _chain(
    command: ServeCommand,
    drafted: Drafted,
    best: Candidate,
    chains: Sequence[Candidate],
) -> Change:
    """A chain of drafts instead of the command's tree."""
    assert drafted.row is not None
    reason = (
        f"{best.drafting.tokens_per_step:.2f} tokens per step for "
        f"{drafted.row.drafting.tokens_per_step:.2f}"
    )
    for chain in chains:
        if chain.gamma == drafted.gamma != best.gamma:
            gain = chain.rate / drafted.row.rate
            reason += f"; a chain of {chain.gamma}: {gain:.2f}x"
    return _gaining(
        drafted.over(best, drafted.row),
        change=f"Draft a chain of {_tokens(best.gamma)}, not a tree of {drafted.gamma}",
        option=f"--speculative-eagle-topk 1 {_gamma_option(command, best.gamma)}",
        reason=reason,
    )


def _best_draft(
    command: ServeCommand,
    rows: Sequence[Candidate],
    now: Candidate,
    verb: str,
    draws: Draws | None = None,
) -> list[Change]:
    """The best row that runs of some drafts, over what runs now; `draws`: of all of them and of what
    runs now, where that is a draft."""
    able = []
    for row in rows:
        needs_more = row.drafting.needs_plugin or row.drafting.is_hypothetical
        if row.is_speculative and row.fits and not needs_more:
            able.append(row)
    if not able:
        return []
    best = max(able, key=_rate)
    name = draft_name(best.draft, best.draft_method, best.draft_budget)
    engine = load_engine(command.engine_profile)
    package = packages_of(engine, best.draft, best.draft_method)
    reason = f"{_steps(best, now)}. {acceptance_of(best.drafting)}"
    if package:
        reason += f" {package[0].upper()}{package[1:]}."
    return [
        _gaining(
            _over(best, now, draws),
            change=f"{verb} with {name}, {_tokens(best.gamma)} per step",
            option=_draft_option(command, best),
            reason=reason,
        )
    ]


def _over(row: Candidate, now: Candidate, draws: Draws | None) -> Over:
    """A draft's rate over that of what runs now. Drafts share errors of costs and of acceptance, so
    the interval between two is of draws of both."""
    gain = row.rate / now.rate
    if not now.is_speculative:
        return Over(gain, row.gain.low, row.gain.high, row.gain.probability)
    times = None if draws is None else draws.times_as_fast(row, now)
    if times is None:
        width = math.exp(math.hypot(_deviation(row), _deviation(now)) * Z_90)
        return Over(gain, gain / width, gain * width)
    low, high = np.quantile(times, INTERVAL_ENDS).tolist()
    return Over(gain, low, high, float((times > 1.0).mean()))


def _steps(row: Candidate, now: Candidate) -> str:
    """The tokens per step of a row and of what runs now, and which has the longer steps."""
    length = "longer" if row.step_s > now.step_s else "shorter"
    return (
        f"{row.drafting.tokens_per_step:.2f} tokens per step for {now.drafting.tokens_per_step:.2f}, "
        f"in {length} steps"
    )


def _tokens(gamma: int) -> str:
    return format_count(gamma, "token")


def _deviation(row: Candidate) -> float:
    """Standard deviation of the logarithm of a speedup; none without a draft."""
    return math.log(row.gain.high / row.gain.low) / (2.0 * Z_90)


def _rate(row: Candidate) -> float:
    return row.rate


def _by_batch(command: ServeCommand, drafted: Drafted) -> list[Change]:
    """A table of gammas by batch, weighed where it differs most from one gamma."""
    assert drafted.row is not None
    assert drafted.case is not None
    assert drafted.option is not None
    if drafted.option.tree is not None:
        return []
    here = drafted.row.batch_size
    gammas: dict[int, int] = {}
    over: dict[int, Over] = {}
    for batch in (*(batch for batch in LIGHT_LOADS if batch < here), here):
        gammas[batch], over[batch] = drafted.best_at(batch)
    if len(set(gammas.values())) == 1 or command.engine == "llama.cpp":
        return []
    cost, cost_low, cost_high = drafted.case.engine.table_costs(drafted.row.draft)
    gains = [of_batch.gain for of_batch in over.values()]
    if statistics.geometric_mean(gains) < NOTEWORTHY * (1.0 + cost):
        return []
    light = [batch for batch in over if batch < here]
    batch = max(light, key=lambda batch: over[batch].gain)
    most = over[batch]
    bands = ", ".join(f"{batch}: {gamma}" for batch, gamma in gammas.items())
    reason = "few sequences leave more room for drafts"
    if gammas[min(gammas)] < gammas[here]:  # a mixture reads further experts for each
        reason = "a step of few sequences pays more for each token that it verifies"
    if cost:
        # it is paid at every batch, also where the table's gamma is the one that runs now
        reason += (
            f"; following a table makes every step {format_percent(cost)} longer, which is "
            "counted here"
        )
    return [
        Change(
            change=f"Let gamma follow the batch ({bands})",
            option=_table_option(command, drafted, gammas),
            reason=reason,
            gain=most.gain / (1.0 + cost),
            gain_low=most.low / (1.0 + cost_high),
            gain_high=most.high / (1.0 + cost_low),
            at_batch=batch,
        )
    ]


def _on_batches(
    command: ServeCommand,
    load: AskedLoad,
    request: PlanRequest,
    model: ModelSpec,
) -> list[Change]:
    """max-num-seqs below the users there are or above what fits, and devices that hold them."""
    alone = _without_acceptance(request, draft="none", gamma=None)
    first = answered(alone, model, [])[0][0]
    fits = int(most_that_fit(first.case)) * command.dp_size
    now = first.document.best
    most = command.max_num_seqs
    option = OPTIONS[command.engine].batch
    changes = []
    users = load.batch or 0
    if users > fits:
        changes += _more_devices(command, alone, users, now)
    if most is not None and most > fits:
        expected = Change(
            change=f"Expect {fits} sequences at once, not {most}",
            option=f"{option} {fits}",
            reason=f"more do not fit at {request.context_lens[0]} tokens: they wait, or are "
            "preempted and computed again",
            gain=None,
        )
        if users > fits and command.engine in PREEMPTING:
            # no request's prompt is read again, or each one's once
            output_s = (request.gen_len or USUAL_OUTPUT) * now.tpot_s
            again = now.decoding.ttft_s / (now.decoding.ttft_s + output_s)
            expected = msgspec.structs.replace(
                expected,
                gain=1.0 + again / 2.0,
                gain_low=1.0,
                gain_high=1.0 + again,
                kind="cost",
            )
        changes.append(expected)
    if most is not None and min(users, fits) > most:
        wider = min(users, fits) // command.dp_size
        row = make_plan(msgspec.structs.replace(alone, batch_sizes=(wider,))).best
        reason = "the others wait; each token then takes longer"
        served = f"Serve {format_count(min(users, fits), 'user')} at once, not {most}"
        changes.append(
            _throughput(served, f"{option} {min(users, fits)}", reason, row, now)
        )
    return changes


def _more_devices(
    command: ServeCommand,
    alone: PlanRequest,
    users: int,
    now: Candidate,
) -> list[Change]:
    """The fewest devices of a replica that hold all users, or else those of a node."""
    if command.pp_size > 1:
        return []
    batch = max(users // command.dp_size, 1)
    asked = msgspec.structs.replace(alone, tp_size=None, batch_sizes=(batch,))
    try:
        row = make_plan(asked).best
    except CapacityError:
        return []
    if row.tp_size <= command.tp_size:
        return []
    return [
        _throughput(
            f"Use tp {row.tp_size}: it holds {row.batch_size * command.dp_size} of {users} users",
            OPTIONS[command.engine].tp.format(row.tp_size),
            f"{now.batch_size * command.dp_size} fit at once now",
            row,
            now,
            needs_gpus=row.tp_size * command.dp_size,
        )
    ]


def _throughput(
    change: str,
    option: str,
    reason: str,
    row: Candidate,
    now: Candidate,
    *,
    needs_gpus: int | None = None,
) -> Change:
    """A change of how many are served at once, by tokens per second of a replica."""
    gain = row.tokens_per_s / now.tokens_per_s
    return Change(
        change=change,
        option=option,
        reason=reason,
        gain=gain,
        gain_low=gain * row.decoding.tpot_low_s / row.tpot_s,
        gain_high=gain * row.decoding.tpot_high_s / row.tpot_s,
        needs_gpus=needs_gpus,
    )


def _served(request: PlanRequest, drafted: Drafted, free: Answer) -> Served:
    """The command's own row, or the one without a draft, with what prices it at other settings."""
    return Served(
        case=drafted.case or free.case,
        option=drafted.option,
        row=drafted.row or free.document.autoregressive,
        gen_len=request.gen_len,
    )


def _gamma_option(command: ServeCommand, gamma: int) -> str:
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


def _draft_option(command: ServeCommand, row: Candidate) -> str:
    """The setting that asks for another draft; a head's checkpoint is left to fill in."""
    engine = load_engine(command.engine_profile)
    call: dict[str, object] = dict(engine.draft_call(row.draft_method))
    checkpoint = ""
    if row.draft not in ("self", row.draft_method):
        checkpoint = served_checkpoint(row.draft) or row.draft
    elif METHODS[row.draft_method].has_checkpoint:
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


def _table_option(
    command: ServeCommand, drafted: Drafted, gammas: dict[int, int]
) -> str:
    assert drafted.row is not None
    table = TableGamma(
        batch_sizes=tuple(gammas),
        context_lens=(drafted.row.context_len,),
        gammas=tuple((gamma,) for gamma in gammas.values()),
    )
    bands = [list(band) for band in table.bands(drafted.row.context_len)]
    config = json.loads(command.read.get("--speculative-config", "{}"))
    config |= {
        "num_speculative_tokens": table.max_gamma,
        "num_speculative_tokens_per_batch_size": bands,
    }
    return OPTIONS[command.engine].table.format(config=json.dumps(config))
