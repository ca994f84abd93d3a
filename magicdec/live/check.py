"""Advice on a server's command line: how it runs as it is, and what to change, each change with its
gain. All times are a plan's.
"""

from __future__ import annotations

import math

import msgspec

from magicdec.errors import CapacityError
from magicdec.live.change import Change, Served, advised
from magicdec.live.drafts import (
    best_draft,
    own_draft,
    table_by_batch,
    way_by_kernel,
    ways_instead,
    ways_to_draft,
    weighed,
)
from magicdec.live.findings import findings_of
from magicdec.live.load import AskedLoad, without_acceptance
from magicdec.live.room import (
    allocated_cache,
    note_on_cache,
    notes_on_users,
    sequences_at_once,
    users_in_cache,
)
from magicdec.live.settings import costs_of, settings_of, slowed, times_as_long
from magicdec.perfmodel.plan.request import on_generation
from magicdec.perfmodel.planner import answered
from magicdec.schema.row import Candidate
from magicdec.specs.serve_command import ServeCommand
from magicdec.units import format_percent


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
    found = findings_of(command, load)
    command, model, request = found.command, found.model, found.request
    speculation = command.speculation
    starts = found.starting is None or found.starting.starts
    problems = found.said["wrong"]
    notes = found.said["note"]

    # every draft that can run at this load, and none
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
            assumed=found.assumed,
            as_it_is=None,
            without_draft=None,
            changes=[],
            problems=problems,
            asked=found.said["asked"],
            not_understood=command.not_understood,
            notes=notes,
        )
    held = users_in_cache(command, free.case)
    if held is not None and held < request.batch_sizes[0]:
        notes.append(note_on_cache(command, held, request.context_lens[0]))
        request = msgspec.structs.replace(request, batch_sizes=(max(held, 1),))
        free = answered(without_acceptance(request, gamma=None), model, [])[0][0]
    cache_faults, cache_notes = allocated_cache(command, free.case)
    place = 0 if starts else 1
    problems[place:place] = cache_faults
    notes += cache_notes
    if free.case.may_not_fit:
        notes.append(free.case.may_not_fit)
    of_generation = on_generation(free.case)
    if of_generation is not None:
        notes.append(of_generation.says)

    # what runs, and the other ways to draft
    alone = free.document.autoregressive
    plain = Served(case=free.case, option=None, row=alone)
    drafted = None
    if found.starting is None:
        way = best_draft(command, free, free.drafted, alone, "Speculate")
        ways = [] if way is None else [way]
    else:
        fitting = msgspec.structs.replace(request, batch_sizes=(alone.batch_size,))
        if found.starting.answer in ("cannot start", "accepts nothing"):
            ways = ways_instead(command, found.starting, fitting, model, free)
        else:
            drafted, own_notes = own_draft(command, fitting, model)
            notes += own_notes
            ways = []
            if drafted is not None:
                ways = ways_to_draft(command, drafted, free)
    now = drafted or plain

    # how it runs with its settings, with its draft and without
    at_once = sequences_at_once(command, load.batch or 0, request, model)
    changes = [way.change for way in at_once.ways]
    waiting = math.prod(
        change.gain or 1.0 for change in changes if change.kind == "cost"
    )
    alone_times = times_as_long(plain, settings_of(command, plain)) * waiting
    settings = settings_of(command, now)
    without_draft = slowed(alone, alone_times, alone_times)
    as_it_is: Candidate | None = without_draft
    if drafted is not None:
        own_times = times_as_long(drafted, settings) * waiting
        as_it_is = slowed(drafted.row, own_times, alone_times)
    elif speculation is not None and speculation.gamma_at(alone.batch_size) != 0:
        as_it_is = None

    # what to change; after some changes all others are of another server
    steps = [way for way in at_once.ways if way.command is not None]
    if drafted is not None and not steps:
        kernel = way_by_kernel(command, drafted)
        if kernel is not None and kernel.change.is_advice:
            steps = [kernel]
            changes.append(kernel.change)
    if problems:
        changes = [] if starts else weighed(command, plain, ways, [])[:1]
    elif steps:
        assert steps[0].command is not None
        changes += check_command(steps[0].command, load).changes
    else:
        costs = costs_of(now, settings)
        changes += [*costs, *weighed(command, now, ways, costs)]
        if drafted is not None:
            changes += table_by_batch(command, drafted)
    return Check(
        command=command,
        hardware=alone.hardware,
        num_gpus=alone.num_gpus * command.dp_size * command.prompt_ranks,
        batch_size=alone.batch_size,
        context_len=alone.context_len,
        assumed=found.assumed,
        as_it_is=as_it_is,
        without_draft=without_draft,
        changes=advised(changes),
        problems=problems,
        asked=found.said["asked"],
        not_understood=command.not_understood,
        notes=[*notes, *at_once.notes, *notes_on_users(command, load, request, free)],
    )
