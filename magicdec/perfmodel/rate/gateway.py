"""Requests as gateways log them: a time, and the tokens of an OpenAI usage object, nested or flat.

Columns are recognised by their names, in any case and however deep in an object; the names may also
be given. Lines without tokens (errors) are left out, and lines need not be in the order of arrival:
most logs are written when a request ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from magicdec.errors import ConfigError, closest, either

ROLES: Mapping[str, tuple[str, ...]] = {
    "arrival": (
        "arrival",
        "arrival_time",
        "arrived_at",
        "request_time",
        "requested_at",
        "received_at",
        "start_time",
        "starttime",
        "started_at",
        "created_at",
        "createdat",
        "created",
        "timestamp",
        "@timestamp",
        "start",
        "time",
        "ts",
        "datetime",
        "date",
    ),
    "prompt": (
        "prompt_tokens",
        "input_tokens",
        "num_prompt_tokens",
        "num_input_tokens",
        "prompt_token_count",
        "prompttokens",
        "inputtokens",
        "prompt_len",
        "input_len",
        "input_length",
        "prompt",
    ),
    "output": (
        "completion_tokens",
        "output_tokens",
        "num_completion_tokens",
        "num_output_tokens",
        "generated_tokens",
        "num_generated_tokens",
        "completion_token_count",
        "candidates_token_count",
        "completiontokens",
        "outputtokens",
        "output_len",
        "output_length",
        "gen_len",
        "output",
    ),
    "cached": (
        "cached_tokens",
        "cache_read_input_tokens",
        "cache_read_tokens",
        "num_cached_tokens",
        "cached",
    ),
}
"""Names of a request's parts, the likeliest first; a name may stand at the end of a path."""
NEEDED = ("arrival", "prompt", "output")
EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""Seconds of one unit of a time since 1970 that is above a number."""


class Columns(NamedTuple):
    """Where each part of a request stands in a line: paths into its objects, joined by dots."""

    arrival: str
    prompt: str
    output: str
    cached: str | None = None

    def __str__(self) -> str:
        named = zip(ROLES, self, strict=True)
        return ", ".join(
            f"{role} from {path}" for role, path in named if path is not None
        )


class GatewayLine(NamedTuple):
    """A line of a log as a request."""

    arrival_s: float
    prompt: int
    output: int
    cached: int


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The values of nested objects by their paths; a cell that holds an object as text is read."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = value
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                inner = json.loads(value)
            except ValueError:
                inner = value
        if isinstance(inner, Mapping):
            found |= flat(inner, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = inner
    return found


def recognised(first: Mapping[str, Any]) -> Columns | None:
    """The columns of a log, by its first lines; None where a time or tokens are not found."""
    paths = list(flat(first))
    found = {role: _path(paths, names) for role, names in ROLES.items()}
    if any(found[role] is None for role in NEEDED):
        return None
    return Columns(**found)  # type: ignore[arg-type]  # the needed ones are there


def _path(paths: Iterable[str], names: Iterable[str]) -> str | None:
    """The path that ends with the first of the names that any ends with, the shortest of
    several."""
    by_end: dict[str, list[str]] = {}
    for path in paths:
        end = path.rpartition(".")[2].lower().replace("-", "_").replace(" ", "_")
        by_end.setdefault(end, []).append(path)
    for name in names:
        if name in by_end:
            return min(by_end[name], key=len)
    return None


def given(text: str, first: Mapping[str, Any]) -> Columns:
    """Columns as "arrival=ts,prompt=in,output=out"; those that are not given are recognised.

    Raises ConfigError for a part that no request has, or a column that the file does not have.
    """
    paths = flat(first)
    found = {role: _path(paths, names) for role, names in ROLES.items()}
    for pair in text.split(","):
        role, equals, path = (part.strip() for part in pair.partition("="))
        if not equals or role not in ROLES:
            raise ConfigError(
                f"--columns must be {', '.join(f'{role}=COLUMN' for role in ROLES)}, not '{pair}'"
            )
        if path not in paths:
            raise _unknown_column(pair, path, paths)
        found[role] = path
    missing = [role for role in NEEDED if found[role] is None]
    if missing:
        raise ConfigError(
            f"no column of the file is known to be its {either(missing)}; give "
            f"--columns {','.join(f'{role}=COLUMN' for role in missing)}"
        )
    return Columns(**found)  # type: ignore[arg-type]  # the needed ones are there


def _unknown_column(pair: str, path: str, paths: Iterable[str]) -> ConfigError:
    known = f"it has {', '.join(paths)}"
    close = closest(path, paths)
    if close:
        known = f"did you mean {either(close)}?"
    return ConfigError(f"--columns {pair}: the file has no column '{path}'; {known}")


class LogReader:
    """Reads the lines of a log by its columns."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __call__(self, values: Mapping[str, Any]) -> GatewayLine | None:
        """A line's request; None for one that has no tokens. Raises ConfigError for a time or a
        number of tokens that is none.
        """
        line = flat(values)
        prompt = _tokens(line, self.columns.prompt)
        output = _tokens(line, self.columns.output)
        if not prompt or not output:
            return None
        cached = 0
        if self.columns.cached is not None:
            cached = min(_tokens(line, self.columns.cached) or 0, prompt)
        arrival = seconds(line.get(self.columns.arrival), self.columns.arrival)
        return GatewayLine(arrival, prompt, output, cached)


def _tokens(line: Mapping[str, Any], column: str) -> int | None:
    value = line.get(column)
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{column} must be a number of tokens, not '{value}'"
        ) from None
    if isinstance(value, bool) or not number.is_integer() or number < 0:
        raise ConfigError(f"{column} must be a whole number of tokens, not {value}")
    return int(number)


def seconds(value: Any, column: str = "time") -> float:
    """A time as seconds: a date, or a number of seconds, milliseconds, microseconds or nanoseconds
    since 1970 (or of seconds since the log began).

    Raises ConfigError for anything else.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        return _date(value, column)
    if isinstance(value, bool) or math.isnan(number) or number < 0:
        raise ConfigError(f"{column} must be a time, not {value}")
    for least, unit in EPOCHS:
        if number > least:
            return number * unit
    return number


def _date(value: Any, column: str) -> float:
    text = str(value).strip().replace(" UTC", "+00:00")
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{column} must be a date like 2026-01-31T12:00:00Z or seconds, not '{value}'"
        ) from None
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
