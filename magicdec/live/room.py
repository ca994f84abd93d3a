"""How many sequences a server has room for: those that its cache holds, its users, the most that it
admits, and the devices that hold more. All times are a plan's.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from magicdec.errors import CapacityError
from magicdec.live.change import Change, Way
from magicdec.live.load import USUAL_BATCH, AskedLoad, without_acceptance
from magicdec.live.options import batch_option, options_of
from magicdec.live.settings import USUAL_OUTPUT
from magicdec.perfmodel.memory import capacity_bytes, memory_need
from magicdec.perfmodel.plan.request import Case, PlanRequest
from magicdec.perfmodel.plan.search import MARGIN, most_that_fit
from magicdec.perfmodel.planner import Answer, answered, make_plan
from magicdec.schema.row import Candidate, Gain
from magicdec.specs.model import ModelSpec
from magicdec.specs.serve_command import OPTIONS, ServeCommand
from magicdec.units import GIB, format_count

CACHE_STEP = 256
"""Tokens to which llama.cpp rounds its cache."""
CACHE_SIZES = ("cache_bytes", "cache_blocks", "cache_tokens", "cache")
"""Meanings of options that set a cache's size."""
PREEMPTING = ("vllm", "sglang")
"""Engines that admit what does not fit with its output, and take its memory back later."""


# Its cache


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


def note_on_cache(command: ServeCommand, users: int, context_len: int) -> str:
    """The remark that a cache of a given size holds so many users of a replica."""
    meanings = OPTIONS[command.engine]
    option = next(
        name
        for name in command.read
        if meanings.get(name.lstrip("-").replace("_", "-")) in CACHE_SIZES
    )
    held = f"{format_count(users * command.dp_size, 'user')} at once"
    if users == 0:
        held = f"not one request of {context_len} tokens"
    return f"the cache that {option} {command.read[option]} sets holds {held}"


def allocated_cache(command: ServeCommand, case: Case) -> tuple[list[str], list[str]]:
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


# Its users


def notes_on_users(
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


# Another number of sequences at once


class AtOnce(NamedTuple):
    """How many sequences to serve at once."""

    ways: list[Way]
    notes: list[str]


def sequences_at_once(
    command: ServeCommand,
    users: int,
    request: PlanRequest,
    model: ModelSpec,
) -> AtOnce:
    """More devices for users that do not fit, and a most of sequences below them or above what fits;
    `users` 0: it is not known how many there are."""
    alone = without_acceptance(request, draft="none", gamma=None)
    first = answered(alone, model, [])[0][0]
    fits = int(most_that_fit(first.case)) * command.dp_size
    now = first.document.best
    most = command.most_sequences
    ways = []
    notes = []
    if users > fits:
        ways += _more_devices(command, alone, users, now)
    if most is not None and most > fits:
        if users > fits and command.engine in PREEMPTING:
            # no request's prompt is read again, or each one's once
            output_s = (request.gen_len or USUAL_OUTPUT) * now.tpot_s
            again = now.decoding.ttft_s / (now.decoding.ttft_s + output_s)
            expected = Change(
                change=f"Expect {fits} sequences at once, not {most}",
                option=batch_option(command, fits),
                reason=f"more do not fit at {request.context_lens[0]} tokens: they are preempted and "
                "computed again",
                kind="cost",
            )
            gain = Gain(speedup=1.0 + again / 2.0, low=1.0, high=1.0 + again)
            ways.append(Way(change=expected.gaining(gain)))
        else:
            fit = format_count(fits, "sequence")
            notes.append(
                f"{fit} of {request.context_lens[0]} tokens fit at once, not {most}: others wait, or are "
                f"preempted ({batch_option(command, fits)})"
            )
    served = min(users, fits)
    if most is None or served <= most:
        return AtOnce(ways, notes)
    wider = (served // command.dp_size,)
    row = make_plan(msgspec.structs.replace(alone, batch_sizes=wider)).best
    option = batch_option(command, served)
    change = Change(
        change=f"Serve {format_count(served, 'user')} at once, not {most}",
        option=option,
        reason="the others wait; each token then takes longer",
    ).gaining(_throughput(row, now))
    if change.is_advice:
        admitted = int(option.rpartition(" ")[2])
        other = msgspec.structs.replace(command, max_num_seqs=admitted)
        ways.append(Way(change=change, command=other))
    return AtOnce(ways, notes)


def _more_devices(
    command: ServeCommand, alone: PlanRequest, users: int, now: Candidate
) -> list[Way]:
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
    change = Change(
        change=f"Use tp {row.tp_size}: it holds {row.batch_size * command.dp_size} of {users} users",
        option=options_of(command).tp.format(row.tp_size),
        reason=f"{now.batch_size * command.dp_size} fit at once now",
        needs_gpus=row.tp_size * command.dp_size,
    )
    return [Way(change=change.gaining(_throughput(row, now)))]


def _throughput(row: Candidate, now: Candidate) -> Gain:
    """The gain in tokens per second of a replica."""
    gain = row.tokens_per_s / now.tokens_per_s
    return Gain(
        speedup=gain,
        low=gain * row.decoding.tpot_low_s / row.tpot_s,
        high=gain * row.decoding.tpot_high_s / row.tpot_s,
    )
