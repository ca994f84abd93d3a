"""The load of logged requests: arrivals, lengths, and the share of prompts that a prefix cache
holds.

A prompt's whole blocks are hashed in a chain, as vLLM hashes them, and looked up in the blocks of
earlier requests in the order of arrival; the least recently used leave when the cache is full. A
request's blocks count as cached from its arrival on, so of requests that arrive together the second
finds the first's."""

from __future__ import annotations

import csv
import io
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.logs.ngram import Ints
from magicdec.logs.replay import nothing_read
from magicdec.logs.requests import Account, LoggedRequest, requests_of
from magicdec.logs.sources import Shard, companions_of, files_of, shards_of
from magicdec.logs.tally import Whole
from magicdec.logs.tokens import TextTokenizer
from magicdec.perfmodel.prefix_cache import hit_tokens
from magicdec.progress import Progress, StepMessage
from magicdec.specs.workload import RequestShape, WorkloadSpec

MAX_BLOCKS = 1 << 20
"""Blocks that are kept at most, whatever the room of the engine's cache."""
MAX_LOGGED_SHAPES = 512
"""Requests, evenly chosen, that stand for the lengths of all."""


class PrefixCache:
    """Blocks of earlier requests' tokens, the least recently used first."""

    def __init__(self, *, block_tokens: int, room_tokens: int | None) -> None:
        self.block_tokens = block_tokens
        self.room = MAX_BLOCKS
        if room_tokens is not None:
            self.room = min(max(room_tokens // block_tokens, 1), MAX_BLOCKS)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def shared_tokens(self, prompt: Ints) -> int:
        """Return how many tokens of a prompt's beginning are cached, in whole blocks."""
        count = 0
        for block in self._chain(prompt):
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            count += 1
        return count * self.block_tokens

    def add(self, text: Ints) -> None:
        """Cache the whole blocks of a request's text."""
        for block in self._chain(text):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.room:
            self._blocks.popitem(last=False)

    def _chain(self, text: Ints) -> Iterable[int]:
        """Hashes of the whole blocks, each with those before it."""
        parent: int | None = None
        size = self.block_tokens
        for begin in range(0, len(text) - size + 1, size):
            parent = hash((parent, text[begin : begin + size].tobytes()))
            yield parent


@dataclass(frozen=True, kw_only=True)
class LogLoad:
    """Requests of a log, in the order of their arrival."""

    account: Account
    arrival_s: Array | None
    """Seconds since the first; None where the log has no times for all of them."""
    num_timed: int
    prompt_len: Whole
    output_len: Whole
    cached_len: Whole
    """Tokens of each prompt that the prefix cache holds: as the engine counted them, or as
    replayed."""
    num_counted: int
    """Requests whose cached tokens the engine counted."""
    block_tokens: int
    room_tokens: int | None

    @property
    def hit_share(self) -> float:
        """Share of the prompts' tokens that need no prefill."""
        return float(self.cached_len.sum() / max(self.prompt_len.sum(), 1))

    @property
    def workload(self) -> WorkloadSpec:
        """The lengths of evenly chosen requests."""
        order = np.lexsort((self.output_len, self.prompt_len))
        count = min(len(order), MAX_LOGGED_SHAPES)
        chosen = order[np.linspace(0, len(order) - 1, count).astype(int)]
        return WorkloadSpec(
            requests=tuple(
                RequestShape(
                    prompt_len=int(self.prompt_len[row]),
                    gen_len=int(self.output_len[row]),
                )
                for row in chosen
            )
        )

    def requests_csv(self) -> str:
        """Arrivals and lengths as a file that `plan --requests` reads; it has none of the text.

        Raises:
            ConfigError: the log has no times.
        """
        if self.arrival_s is None:
            raise ConfigError("the log has no arrival times")
        out = io.StringIO()
        table = csv.writer(out, lineterminator="\n")
        table.writerow(["arrival", "prompt", "output", "cached"])
        columns = (self.arrival_s, self.prompt_len, self.output_len, self.cached_len)
        for arrival, prompt, output, cached in zip(*columns, strict=True):
            table.writerow([f"{arrival:.6f}", int(prompt), int(output), int(cached)])
        return out.getvalue()


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A request's times and lengths."""

    arrival_s: float | None
    prompt_len: int
    output_len: int
    cached_len: int
    is_counted: bool
    """Whether the engine counted what was cached."""


def read_load(
    patterns: Sequence[str | Path],
    *,
    tokenizer: Path | None = None,
    block_tokens: int = 16,
    room_tokens: int | None = None,
    progress: Progress = lambda _: None,
) -> LogLoad:
    """Read the load of logged requests.

    `block_tokens` and `room_tokens` are the engine's prefix cache. What a draft loses of each hit
    is left to the plan, which knows the draft.

    Raises:
        ConfigError: a file cannot be read, or none has a request with a prompt and an output.
    """
    shards = shards_of(files_of(patterns))
    account = Account()
    cache = PrefixCache(block_tokens=block_tokens, room_tokens=room_tokens)
    rows = [
        _entry(request, cache)
        for request in _requests(shards, account, tokenizer, progress)
    ]
    if not rows:
        raise ConfigError(nothing_read(account, [shard.path for shard in shards]))
    times = np.array(
        [np.nan if row.arrival_s is None else row.arrival_s for row in rows]
    )
    arrival_s = None
    if not np.isnan(times).any():
        order = np.argsort(times, kind="stable")
        rows = [rows[place] for place in order.tolist()]
        arrival_s = times[order] - times.min()
    return LogLoad(
        account=account,
        arrival_s=arrival_s,
        num_timed=int((~np.isnan(times)).sum()),
        prompt_len=np.array([row.prompt_len for row in rows], dtype=np.int64),
        output_len=np.array([row.output_len for row in rows], dtype=np.int64),
        cached_len=np.array([row.cached_len for row in rows], dtype=np.int64),
        num_counted=sum(row.is_counted for row in rows),
        block_tokens=block_tokens,
        room_tokens=room_tokens,
    )


def _requests(
    shards: Sequence[Shard],
    account: Account,
    tokenizer: Path | None,
    progress: Progress,
) -> Iterator[LoggedRequest]:
    """Requests with a prompt and an output, or with their lengths."""
    companions = companions_of(shards)
    if tokenizer is None:
        loaded = None
    else:
        loaded = TextTokenizer(tokenizer)
    for number, shard in enumerate(shards):
        progress(StepMessage("reading the load", done=number, total=len(shards)))
        for request in requests_of(
            shard, account, tokenizer=loaded, companions=companions
        ):
            if request.logged_prompt_len >= 1 and request.logged_output_len >= 1:
                yield request


def _entry(request: LoggedRequest, cache: PrefixCache) -> _Entry:
    """A request's lengths, and its hit in the cache, which then holds it too."""
    prompt = request.text[: request.prompt_len]
    shared = cache.shared_tokens(prompt)
    cache.add(request.text)
    counted = request.logged_cached_len
    if counted is None:
        cached = hit_tokens(
            shared,
            len(prompt),
            unit_tokens=cache.block_tokens,
            drops_last_unit=False,
        )
    else:
        cached = min(counted, request.logged_prompt_len)
    return _Entry(
        arrival_s=request.arrival_s,
        prompt_len=request.logged_prompt_len,
        output_len=request.logged_output_len,
        cached_len=cached,
        is_counted=counted is not None,
    )
