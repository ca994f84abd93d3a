"""Replays of whole logs: shards in several processes, and what the engine would have counted.

Counts are whole numbers of requests, so those of shards add up to those of one pass. Suffix
decoding's tree of responses lasts over all requests, so that replay is one task that reads the
shards in their order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.errors import ConfigError
from magicdec.logs.formats import Companions, UnreadableError
from magicdec.logs.lookups import Lookup
from magicdec.logs.ngram import Ints, NgramReplay, Steps
from magicdec.logs.requests import Account, requests_of
from magicdec.logs.sources import Shard, companions_of, files_of, shards_of, total_bytes
from magicdec.logs.suffix import SuffixReplay
from magicdec.logs.tally import SettingCounts, Tally
from magicdec.logs.tokens import TextTokenizer
from magicdec.progress import Progress, StepMessage
from magicdec.suffix_tree import SuffixSettings

BETWEEN_MESSAGES_S = 0.2


class ReplayTask(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to replay over some shards in their order."""

    shards: tuple[Shard, ...]
    lookups: tuple[Lookup, ...]
    suffix: SuffixSettings = SuffixSettings()
    tokenizer: Path | None = None
    max_len: int = 0
    """The engine's longest sequence; 0: not known."""

    @property
    def num_bytes(self) -> int:
        return total_bytes(self.shards)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Counts of some settings, and the account of what was read for them."""

    account: Account
    tally: Tally
    replay_s: float
    """Time in the replays themselves, without reading and tokenizing."""

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            account=self.account + other.account,
            tally=self.tally + other.tally,
            replay_s=self.replay_s + other.replay_s,
        )


class Replays(Protocol):
    """Takes the steps of requests, one after the other."""

    def replay(
        self,
        text: Ints,
        prompt_len: int,
        *,
        max_len: int = 0,
    ) -> tuple[Steps, npt.NDArray[np.int64]]:
        """The steps of each setting, [settings, steps, 3], and how many each has.

        Raises UnreadableError for a request that it cannot take.
        """


def count_task(
    task: ReplayTask, companions: Companions, progress: Progress = lambda _: None
) -> Counted:
    """Replay one task in this process."""
    replays: Replays
    if task.lookups[0].is_suffix:
        replays = SuffixReplay(task.lookups, task.suffix)
    else:
        replays = NgramReplay(task.lookups)
    return count(task, companions, replays, progress)


def count(
    task: ReplayTask,
    companions: Companions,
    replays: Replays,
    progress: Progress = lambda _: None,
) -> Counted:
    """Add up the steps that `replays` takes on a task's requests."""
    account = Account()
    tally = Tally.empty(task.lookups)
    if task.tokenizer is None:
        tokenizer = None
    else:
        tokenizer = TextTokenizer(task.tokenizer)
    replay_s = 0.0
    shown_s = time.perf_counter()
    for shard in task.shards:
        for request in requests_of(
            shard, account, tokenizer=tokenizer, companions=companions
        ):
            if len(request.text) - request.prompt_len < 2:
                continue
            begun = time.perf_counter()
            try:
                steps, counts = replays.replay(
                    request.text,
                    request.prompt_len,
                    max_len=task.max_len,
                )
            except UnreadableError as failure:
                account.refuse(str(failure), shard, account.num_rows)
                continue
            text_len = len(request.text)
            tally.add(steps, counts, text_len=text_len, prompt_len=request.prompt_len)
            replay_s += time.perf_counter() - begun
            if time.perf_counter() > shown_s + BETWEEN_MESSAGES_S:
                shown_s = time.perf_counter()
                progress(f"replaying requests: {account.num_requests}")
    return Counted(account=account, tally=tally, replay_s=replay_s)


@dataclass(frozen=True, kw_only=True)
class LogReplay:
    """Counts of every setting over the requests of a log."""

    account: Account
    settings: tuple[SettingCounts, ...]
    replay_s: float
    elapsed_s: float
    replayed_tokens: int
    """Tokens of text times settings."""


def replay_logs(
    patterns: Sequence[str | Path],
    lookups: Sequence[Lookup],
    *,
    suffix: SuffixSettings | None = None,
    tokenizer: Path | None = None,
    max_len: int = 0,
    jobs: int = 1,
    progress: Progress = lambda _: None,
) -> LogReplay:
    """Replay these settings on the requests of files.

    joblib runs the tasks: its processes on this machine, or a cluster's where the caller has chosen
    such a backend (`joblib.parallel_config`).

    Raises:
        ConfigError: a file cannot be read, or none has a request.
    """
    begun = time.perf_counter()
    if not lookups:
        raise ConfigError("no look-up to replay is given")
    shards = shards_of(files_of(patterns))
    companions = companions_of(shards)
    chosen = suffix or SuffixSettings()
    tasks = tasks_of(
        shards, lookups, suffix=chosen, tokenizer=tokenizer, max_len=max_len
    )
    if tokenizer is not None:
        TextTokenizer(tokenizer)  # one error here rather than one in every process
    parts = _run(tasks, companions, jobs=jobs, progress=progress)
    totals: dict[tuple[Lookup, ...], Counted] = {}
    for task, counted in zip(tasks, parts, strict=True):
        before = totals.get(task.lookups)
        totals[task.lookups] = counted if before is None else before + counted
    account = next(iter(totals.values())).account
    if not account.num_requests:
        raise ConfigError(nothing_read(account, [shard.path for shard in shards]))
    settings = {
        row.lookup: row for counted in totals.values() for row in counted.tally.settings
    }
    num_tokens = account.prompt_tokens + account.output_tokens
    return LogReplay(
        account=account,
        settings=tuple(settings[row] for row in lookups),
        replay_s=sum(counted.replay_s for counted in totals.values()),
        elapsed_s=time.perf_counter() - begun,
        replayed_tokens=num_tokens * len(lookups),
    )


def replay_draft_model(
    patterns: Sequence[str | Path],
    replays: Replays,
    lookups: Sequence[Lookup],
    *,
    tokenizer: Path | None = None,
    max_len: int = 0,
    progress: Progress = lambda _: None,
) -> LogReplay:
    """Replay a draft model (draft_model.ModelReplay) on the requests of files, in this process.

    Raises:
        ConfigError: a file cannot be read, none has a request, or the draft cannot read its tokens.
    """
    begun = time.perf_counter()
    shards = shards_of(files_of(patterns))
    task = ReplayTask(
        shards=tuple(shards),
        lookups=tuple(lookups),
        tokenizer=tokenizer,
        max_len=max_len,
    )
    counted = count(task, companions_of(shards), replays, progress)
    account = counted.account
    if not account.num_requests:
        raise ConfigError(nothing_read(account, [shard.path for shard in shards]))
    return LogReplay(
        account=account,
        settings=tuple(counted.tally.settings),
        replay_s=counted.replay_s,
        elapsed_s=time.perf_counter() - begun,
        replayed_tokens=account.prompt_tokens + account.output_tokens,
    )


def tasks_of(
    shards: Sequence[Shard],
    lookups: Sequence[Lookup],
    *,
    suffix: SuffixSettings,
    tokenizer: Path | None,
    max_len: int,
) -> list[ReplayTask]:
    """Return the tasks, the longest first: rules with a memory over requests take all shards."""
    groups: dict[str, list[Lookup]] = {"with a memory": [], "ngram": [], "local": []}
    for row in lookups:
        if not row.is_suffix:
            groups["ngram"].append(row)
        elif row.rule == "suffix" and suffix.max_cached_requests:
            groups["with a memory"].append(row)
        else:
            groups["local"].append(row)
    tasks = []
    for name, rows in groups.items():
        if not rows:
            continue
        portions: list[tuple[Shard, ...]] = [(shard,) for shard in shards]
        if name == "with a memory":
            portions = [tuple(shards)]
        tasks += [
            ReplayTask(
                shards=portion,
                lookups=tuple(rows),
                suffix=suffix,
                tokenizer=tokenizer,
                max_len=max_len,
            )
            for portion in portions
        ]
    return tasks


def nothing_read(account: Account, paths: Sequence[Path]) -> str:
    """Return a line that says why no request was read."""
    named = ", ".join(path.name for path in dict.fromkeys(paths))
    if not account.num_rows:
        return f"{named}: no row"
    reason, number = max(
        account.unreadable.items(), key=lambda item: item[1], default=("", 0)
    )
    place = "; ".join(account.examples.get(reason, []))
    if reason:
        why = f": {number} times {reason} ({place})"
    else:
        why = ""
    return f"{named}: none of {account.num_rows} rows is a request{why}"


def _run(
    tasks: Sequence[ReplayTask],
    companions: Companions,
    *,
    jobs: int,
    progress: Progress,
) -> list[Counted]:
    """The counts of every task."""
    results: dict[int, Counted] = {}
    total = max(sum(task.num_bytes for task in tasks), 1)
    done = 0
    progress(StepMessage("reading logs", done=done, total=total))
    for number, counted in _finished(tasks, companions, jobs=jobs, progress=progress):
        results[number] = counted
        done += tasks[number].num_bytes
        progress(StepMessage("reading logs", done=done, total=total))
    return [results[number] for number in range(len(tasks))]


def _finished(
    tasks: Sequence[ReplayTask],
    companions: Companions,
    *,
    jobs: int,
    progress: Progress,
) -> Iterator[tuple[int, Counted]]:
    """The tasks' numbers and counts, as they end; one alone says how far it is."""
    if min(jobs, len(tasks)) <= 1:
        for number, task in enumerate(tasks):
            yield number, count_task(task, companions, progress)
        return
    from joblib import Parallel, delayed

    calls = (
        delayed(_numbered)(number, task, companions)
        for number, task in enumerate(tasks)
    )
    yield from Parallel(n_jobs=min(jobs, len(tasks)), return_as="generator_unordered")(
        calls
    )


def _numbered(
    number: int, task: ReplayTask, companions: Companions
) -> tuple[int, Counted]:
    return number, count_task(task, companions)
