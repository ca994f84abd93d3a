"""Logged requests as token ids, and an account of what was read and what was not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from magicdec.logs.formats import (
    Companions,
    LoggedRow,
    PromptContent,
    UnreadableError,
    companion_of,
    format_of,
    rows_of,
)
from magicdec.logs.ngram import Ints
from magicdec.logs.sources import Shard, documents_of
from magicdec.logs.tokens import TextTokenizer
from magicdec.redaction import quoted
from magicdec.units import format_count

MOST_EXAMPLES = 3
"""Places of unreadable rows that are kept for each reason."""


@dataclass(frozen=True, kw_only=True)
class LoggedRequest:
    """A request as token ids."""

    text: Ints
    """Prompt and output; of a request without them, empty."""
    prompt_len: int
    """Tokens of `text` that are the prompt."""
    has_prompt: bool
    """Whether the log holds the prompt; without it look-ups find less than the engine's did."""
    arrival_s: float | None
    logged_prompt_len: int
    """Tokens of the prompt as the engine counted them, or as they are here."""
    logged_output_len: int
    logged_cached_len: int | None


@dataclass
class Account:
    """Rows that were read of some shards, and those that were not; accounts of shards add up."""

    num_rows: int = 0
    num_requests: int = 0
    without_prompt: int = 0
    lengths_only: int = 0
    """Requests of which the log holds lengths, but no output."""
    companions: int = 0
    """Rows that hold a prompt for an output in another file."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokenized: int = 0
    """Requests whose text was turned into tokens here."""
    recounted: int = 0
    """Tokenized outputs that the engine counted too."""
    recounted_alike: int = 0
    """Tokenized outputs with as many tokens as the engine counted."""
    tokenizing_s: float = 0.0
    formats: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, int] = field(default_factory=dict)
    """Rows by the reason that they cannot be read."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Places of the first of them."""

    def refuse(self, reason: str, shard: Shard, place: int) -> None:
        """Count a row that cannot be read, and name it."""
        self.unreadable[reason] = self.unreadable.get(reason, 0) + 1
        named = self.examples.setdefault(reason, [])
        if len(named) < MOST_EXAMPLES:
            if shard.kind != "lines":
                row = "row"
            else:
                row = "line"
            if shard.begin:
                after = f" after byte {shard.begin}"
            else:
                after = ""
            named.append(f"{shard.path.name} {row} {place}{after}")

    def lines(self, *, num_files: int) -> list[str]:
        """Lines on what was read, what was not, and what is assumed of it."""
        lines = []
        kinds = ", ".join(f"{count} {name}" for name, count in self.formats.items())
        lines.append(
            f"read {format_count(self.num_requests, 'request')} of {format_count(num_files, 'file')} "
            f"({kinds}): "
            f"{self.prompt_tokens:,} prompt and {self.output_tokens:,} output tokens"
        )
        for reason, count in self.unreadable.items():
            named = "; ".join(self.examples.get(reason, []))
            lines.append(
                quoted(f"not read: {count} of {self.num_rows} rows, {reason} ({named})")
            )
        if self.without_prompt:
            lines.append(
                f"{self.without_prompt} requests have no prompt in the log: look-ups into it are "
                "missed, so what is "
                "accepted is a lower bound"
            )
        if self.lengths_only:
            lines.append(
                f"{self.lengths_only} requests have lengths alone, and cannot be replayed"
            )
        if self.tokenized:
            line = (
                f"{self.tokenized} requests are text, tokenized here: the engine's own ids may "
                "differ"
            )
            if self.recounted:
                line += (
                    f"; {self.recounted_alike} of {self.recounted} outputs have as many tokens "
                    "as the engine "
                    "counted"
                )
            lines.append(line)
        return lines

    def __add__(self, other: Account) -> Account:
        total = Account(
            **{name: getattr(self, name) + getattr(other, name) for name in ADDED},
            formats=_added(self.formats, other.formats),
            unreadable=_added(self.unreadable, other.unreadable),
        )
        for part in (self, other):
            for reason, places in part.examples.items():
                named = total.examples.setdefault(reason, [])
                named += places[: MOST_EXAMPLES - len(named)]
        return total


ADDED = (
    "num_rows",
    "num_requests",
    "without_prompt",
    "lengths_only",
    "companions",
    "prompt_tokens",
    "output_tokens",
    "tokenized",
    "recounted",
    "recounted_alike",
    "tokenizing_s",
)


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    names = dict.fromkeys([*one, *other])
    return {name: one.get(name, 0) + other.get(name, 0) for name in names}


def requests_of(
    shard: Shard,
    account: Account,
    *,
    tokenizer: TextTokenizer | None,
    companions: Companions,
) -> Iterator[LoggedRequest]:
    """Give the requests of a shard, and add to the account what was read and what was not."""
    for place, document in documents_of(shard):
        account.num_rows += 1
        if isinstance(document, UnreadableError):
            account.refuse(str(document), shard, place)
            continue
        if companion_of(document) is not None:
            account.companions += 1
            continue
        try:
            rows = rows_of(document, companions)
        except UnreadableError as failure:
            account.refuse(str(failure), shard, place)
            continue
        name = format_of(document) or ""
        account.formats[name] = account.formats.get(name, 0) + 1
        for row in rows:
            try:
                request = _request(row, account, tokenizer)
            except UnreadableError as failure:
                account.refuse(str(failure), shard, place)
                continue
            account.num_requests += 1
            account.without_prompt += not request.has_prompt
            account.lengths_only += not len(request.text)
            account.prompt_tokens += request.logged_prompt_len
            account.output_tokens += request.logged_output_len
            yield request


def _request(
    row: LoggedRow, account: Account, tokenizer: TextTokenizer | None
) -> LoggedRequest:
    if row.output is None:
        # lengths alone still tell the load, if not what a look-up would accept
        if row.output_len is None or row.prompt_len is None:
            raise UnreadableError("neither an output nor its length")
        return LoggedRequest(
            text=np.zeros(0, dtype=np.int32),
            prompt_len=0,
            has_prompt=False,
            arrival_s=row.arrival_s,
            logged_prompt_len=row.prompt_len,
            logged_output_len=row.output_len,
            logged_cached_len=row.cached_len,
        )
    begun = time.perf_counter()
    output = _ids(row.output, tokenizer)
    prompt = np.zeros(0, dtype=np.int32)
    if row.prompt is not None:
        prompt = _ids(row.prompt, tokenizer, is_prompt=True)
    if isinstance(row.output, str) and tokenizer is not None:
        if row.is_stopped and tokenizer.stop_id is not None:
            output = np.append(output, np.int32(tokenizer.stop_id))
        account.tokenized += 1
        account.tokenizing_s += time.perf_counter() - begun
        if row.output_len is not None:
            account.recounted += 1
            account.recounted_alike += row.output_len == len(output)
    if not len(output):
        raise UnreadableError("an empty output")
    return LoggedRequest(
        text=np.concatenate([prompt, output]),
        prompt_len=len(prompt),
        has_prompt=row.prompt is not None,
        arrival_s=row.arrival_s,
        logged_prompt_len=len(prompt) if row.prompt_len is None else row.prompt_len,
        logged_output_len=len(output),
        logged_cached_len=row.cached_len,
    )


def _ids(
    text: PromptContent, tokenizer: TextTokenizer | None, *, is_prompt: bool = False
) -> Ints:
    """Token ids of a prompt or an output."""
    if not isinstance(text, str) and (not text or isinstance(text[0], int)):
        return np.array(text, dtype=np.int32)
    if tokenizer is None:
        raise UnreadableError("text, which needs --tokenizer")
    if isinstance(text, str):
        return tokenizer.text_ids(text, is_prompt=is_prompt)
    return tokenizer.message_ids(text)  # type: ignore[arg-type]  # not of ids: see above
