"""Advice on a server's command line: how it runs as it is, and what to change, each change with its
gain. All times are a plan's.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from magicdec.errors import CapacityError
from magicdec.live.changes import (
    advised,
    best_draft,
    change_of_kernel,
    changes_instead,
    changes_of_batch,
    changes_of_draft,
    own_draft,
    table_by_batch,
    weighed,
    without_acceptance,
)
from magicdec.live.findings import USUAL_BATCH, AskedLoad, findings_of
from magicdec.live.options import batch_option
from magicdec.live.settings import Change, Served, costs_of, slowed
from magicdec.perfmodel.memory import capacity_bytes, memory_need
from magicdec.perfmodel.plan.request import Case, PlanRequest, on_generation
from magicdec.perfmodel.plan.search import MARGIN
from magicdec.perfmodel.planner import Answer, answered, make_plan
from magicdec.schema.row import Candidate
from magicdec.specs.serve_command import ServeCommand
from magicdec.units import GIB, format_count, format_percent

CACHE_STEP = 256
"""Tokens to which llama.cpp rounds its cache."""
SETS_CACHE = (
    "kv-cache-memory-bytes",
    "num-gpu-blocks-override",
    "max-total-tokens",
    "kv-cache-config",
)
"""Options that set a cache's size."""


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
    """The command's own configuration with every setting that costs; null: it does not fit, or no
    acceptance is known."""
    without_draft: Candidate | None
    """The server without its draft, set alike."""
    changes: list[Change]
    """Changes in the order of `in_order`; only what mends it where a server does not start."""
    problems: list[str]
    """Settings with which the server does not start."""
    asked: list[str]
    """Questions on which the price depends."""
    not_understood: list[str]
    notes: list[str]

    @property
    def first(self) -> Change | None:
        """The change to make at this load, on these devices; None: none is worth it."""
        return next((change for change in self.changes if change.is_here), None)

    @property
    def headline(self) -> str:
        """The fault, else the change to make, in one line."""
        if self.problems:
            return self.problems[0]
        return self.advice

    @property
    def advice(self) -> str:
        """The change to make, in one line."""
        condition = ""
        if self.command.unread is not None and self.command.speculation is None:
            condition = f"If {self.command.unread} sets no draft: "
        change = self.first
        if change is None and self.without_draft is None:
            return "Not priced: it is partly on the host, which is not modelled."
        if change is None and self.as_it_is is None:
            return f"{condition}Keep it as it is: its own draft is not priced."
        if change is None:
            return f"{condition}Keep it as it is: no change here is likely to gain 2 %."
        if change.gain is None:
            return f"{condition}{change.change}: {change.reason}."
        unsure = ""
        if change.gain_low is not None and change.gain_low <= 1.0:
            likely = format_percent(change.probability)
            unsure = f"; {likely} likely to gain, so measure first"
        return f"{condition}{change.change}: {change.gain_text}{unsure}."


def check_command(command: ServeCommand, load: AskedLoad) -> Check:
    """How a server runs as its command has it, and what to change.

    Raises ConfigError for a model, a device or a draft that cannot be planned.
    """
    command, model, request, assumed, starting, said = findings_of(command, load)
    speculation = command.speculation
    problems = said["wrong"]
    notes = said["note"]
    starts = starting is None or starting.starts
    try:
        free = answered(without_acceptance(request, gamma=None), model, [])[0][0]
    except CapacityError as error:
        # a server has no --weight-dtype: its format is the checkpoint's
        fault = str(error).replace("--weight-dtype ", "weights in ")
        if command.is_partly_on_host or command.is_fitted:
            by = ""
            if not command.is_partly_on_host:
                by = ", and --fit, on by default, leaves layers on the host"
            short = fault.partition(";")[0]
            notes.insert(0, f"partly on the host, not priced: {short}{by}")
        else:
            problems.insert(0 if starts else 1, fault)
        return Check(
            command=command,
            hardware=request.record().hardware[0],
            num_gpus=command.num_devices,
            batch_size=request.batch_sizes[0],
            context_len=request.context_lens[0],
            assumed=assumed,
            as_it_is=None,
            without_draft=None,
            changes=[],
            problems=problems,
            asked=said["asked"],
            not_understood=command.not_understood,
            notes=notes,
        )
    held = users_in_cache(command, free.case)
    if held is not None and held < request.batch_sizes[0]:
        option = next(
            name
            for name in command.read
            if name.lstrip("-").replace("_", "-") in SETS_CACHE
        )
        users = f"{format_count(held * command.dp_size, 'user')} at once"
        if held == 0:
            users = f"not one request of {request.context_lens[0]} tokens"
        notes.append(
            f"the cache that {option} {command.read[option]} sets holds {users}"
        )
        request = msgspec.structs.replace(request, batch_sizes=(max(held, 1),))
        free = answered(without_acceptance(request, gamma=None), model, [])[0][0]
    cache_faults, cache_notes = _on_allocated_cache(command, free.case)
    place = 0 if starts else 1
    problems[place:place] = cache_faults
    notes += cache_notes
    if free.case.may_not_fit:
        notes.append(free.case.may_not_fit)
    of_generation = on_generation(free.case)
    if of_generation is not None:
        notes.append(of_generation.says)

    # its own draft and the others, with as many users
    alone = free.document.autoregressive
    fitting = msgspec.structs.replace(request, batch_sizes=(alone.batch_size,))
    plain = Served(case=free.case, option=None, row=alone)
    now = plain
    drafted = None
    if speculation is None or starting is None:
        drafts = best_draft(command, free, free.drafted, alone, "Speculate")
    elif starting.answer in ("cannot start", "accepts nothing"):
        drafts = changes_instead(command, starting, fitting, model, free)
    else:
        drafts = []
        own = own_draft(command, fitting, model)
        if isinstance(own, str):
            notes.append(own)
        else:
            drafted = own
            notes += own.notes
            drafts = changes_of_draft(command, own, free)
            now = Served(case=own.case, option=own.option, row=own.row)

    # the server as it is set, with its draft and without
    at_once = changes_of_batch(command, load.batch or 0, request, model)
    notes += at_once.notes
    costs = costs_of(command, now)
    waiting = math.prod(
        change.gain or 1.0 for change in at_once.changes if change.kind == "cost"
    )
    alone_times = costs_of(command, plain).times_as_long * waiting
    without_draft = slowed(alone, alone_times, alone_times)
    as_it_is: Candidate | None = without_draft
    if drafted is not None:
        as_it_is = slowed(drafted.row, costs.times_as_long * waiting, alone_times)
    elif speculation is not None and speculation.gamma_at(alone.batch_size) != 0:
        as_it_is = None

    # what to change; with more sequences at once or another kernel the rest is of that server
    changes = at_once.changes
    kernel = None if drafted is None else change_of_kernel(command, drafted)
    if problems:
        changes = [] if starts else weighed(command, plain, drafts)[:1]
    elif at_once.serves is not None:
        wider = msgspec.structs.replace(command, max_num_seqs=at_once.serves)
        changes += check_command(wider, load).changes
    elif kernel is not None and kernel[0].is_advice:
        change, with_kernel = kernel
        changes += [change, *check_command(with_kernel, load).changes]
    else:
        changes += [*costs.changes, *weighed(command, now, drafts)]
        if drafted is not None:
            changes += table_by_batch(command, drafted)
    return Check(
        command=command,
        hardware=alone.hardware,
        num_gpus=alone.num_gpus * command.dp_size * command.prompt_ranks,
        batch_size=alone.batch_size,
        context_len=alone.context_len,
        assumed=assumed,
        as_it_is=as_it_is,
        without_draft=without_draft,
        changes=advised(changes),
        problems=problems,
        asked=said["asked"],
        not_understood=command.not_understood,
        notes=[*notes, *_on_users(command, load, request, free)],
    )


def users_in_cache(command: ServeCommand, case: Case) -> int | None:
    """Sequences of a case that the cache of a given size holds; None: the engine sizes it."""
    length = float(case.lengths.max_len(1.0))
    if command.cache_tokens is not None:
        groups = command.attention_dp_size
        return int(command.cache_tokens // length) * groups
    if command.cache_bytes is None:
        return None
    need = memory_need(
        case.setup(None),
        batch=1.0,
        max_len=length,
        budget=None,
        gamma=0,
        tp_size=case.tp_sizes[0],
    )
    return int(command.cache_bytes // float(need.kv_bytes))


def _on_allocated_cache(
    command: ServeCommand, case: Case
) -> tuple[list[str], list[str]]:
    """llama.cpp's cache, which it allocates whole at its start, where that and the rest are more than
    the device's memory: a fault, or a note where layers then go to the host, or where nobody can
    tell."""
    allocated = command.allocated_tokens
    if allocated is None or command.is_partly_on_host:
        return [], []
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
    held = need.total_bytes
    memory = float(capacity_bytes(case.hardware, case.engine))
    if held[-1] <= memory * (1.0 - MARGIN):
        return [], []
    of = f"{held[-1] / GIB:.1f} of {memory / GIB:.1f} GiB of each {case.hardware.name}"
    if held[-1] <= memory * (1.0 + MARGIN):
        return [], [f"may not fit: -c {allocated} takes {of}"]
    if command.is_fitted:
        return [], [
            f"-c {allocated} takes {of}: --fit, on by default, leaves layers on the host, which is not "
            "priced; times are as if all were on the device"
        ]
    weights, cache = (
        f"{float(np.ravel(part)[-1]) / GIB:.1f} GiB"
        for part in (need.weights_bytes, need.kv_bytes)
    )
    most = sequences * lengths[held <= memory].max(initial=0)
    each = "" if command.pp_size == 1 else "each "
    fault = (
        f"context: -c {allocated} allocates {cache} of cache, with {weights} of weights more than "
        f"{each}{case.hardware.name} has ({memory / GIB:.1f} GiB): at most about -c {most} fits"
    )
    return [fault], []


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
    most = command.most_sequences
    if load.batch is not None or most is None or most >= USUAL_BATCH:
        return notes
    rows = []
    for batch in (asked, max(USUAL_BATCH // replicas, 1)):
        at_batch = without_acceptance(request, draft="none", batch_sizes=(batch,))
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
        f"if {users} users wait, {batch_option(command, users)} serves {times:.2g} times the "
        f"tokens per second without a draft, each token {slower:.2g} times as slow (--batch)",
    ]
