"""Readers of the formats in which requests are logged: each turns one document of a file into its
requests.

token ids       prompt_token_ids or prompt; output_token_ids, generated_token_ids, token_ids, output, or
                outputs[].token_ids (vLLM's RequestOutput, SpecDecode-Bench)
OpenAI          messages or prompt, of the document, its request or its body; choices[].message.content or
                choices[].text, of the document or its response; a conversation without choices ends in the answer
OpenAI batch    custom_id, response.body; the prompts from the batch's input file (custom_id, body)
pairs           prompt or messages, and completion, response, output, generated_text, answer or text
ShareGPT        conversations[].{from, value}: every answer, after all that stands before it
vLLM benchmark  vllm bench serve --save-detailed: input_lens, output_lens, generated_texts, errors, start_times; it
                has no prompts

Logs of proxies and traces are turned into these by the recipes of docs/forms.md.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

MILLISECONDS_FROM = 1e11
"""A time stamp above this is in milliseconds, one above its 1000-fold in microseconds, and so
on."""
LARGEST_WHOLE = 2**31 - 1
Message = dict[str, Any]
Whole = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_WHOLE)]
PromptContent = str | Sequence[Whole | Message]


class UnreadableError(Exception):
    """A row that holds no request; the message is the reason, without any of its text."""


class LoggedRow(msgspec.Struct, kw_only=True):
    """A logged request as its format gives it."""

    prompt: PromptContent | None = None
    """Token ids, text, or messages; None where the file has no prompt."""
    output: str | Sequence[Whole] | None = None
    """Token ids or text; None where the file has lengths alone."""
    is_stopped: bool = False
    """Whether the output is known to have ended with a token that its text lacks."""
    arrival_s: float | None = None
    """When it arrived, seconds; of a run without a clock since its begin."""
    prompt_len: Whole | None = None
    """Tokens of the prompt, where the log counts them."""
    output_len: Whole | None = None
    cached_len: Whole | None = None
    """Tokens of the prompt that the engine found in its prefix cache, where the log counts them."""


COUNTS = ("prompt_len", "output_len", "cached_len")
FIELDS = {
    "prompt": "a prompt",
    "output": "an output",
    "arrival_s": "a time",
    "prompt_len": "the prompt's length",
    "output_len": "the output's length",
    "cached_len": "cached tokens",
}
"""How an error names each field that cannot be read."""
Companions = dict[str, Any]
"""Prompts that stand in a file of their own, by the id that joins them to their outputs."""
Reader = Callable[[Any, Companions], list[LoggedRow]]


def rows_of(document: Any, companions: Companions) -> list[LoggedRow]:
    """Return the requests of one document.

    Raises:
        UnreadableError: it has none, with the reason.
    """
    if not isinstance(document, dict):
        raise UnreadableError("not a JSON object")
    try:
        for _, is_it, read in FORMATS:
            if is_it(document):
                return [_checked(row) for row in read(document, companions)]
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
    ) as failure:
        raise UnreadableError(_reason(failure)) from None
    raise UnreadableError(
        "no known format: neither token ids nor a prompt with its output"
    )


def _checked(row: LoggedRow) -> LoggedRow:
    """A row whose values are of the types that its fields state: readers take them from a log as
    they stand there.

    Raises UnreadableError naming the field.
    """
    values = msgspec.structs.asdict(row)
    for name in COUNTS:
        value = values[name]
        if isinstance(value, float) and value.is_integer():
            values[name] = int(value)  # tables with gaps hold whole numbers as floats
    try:
        checked = msgspec.convert(values, LoggedRow)
    except msgspec.ValidationError as failure:
        message, _, place = str(failure).replace("`", "").partition(" - at ")
        field = re.split(r"[.\[]", place.strip("`$."))[0]
        message = (
            message.removeprefix("Expected ")
            .replace("object", "message")
            .replace(" | null", "")
        )
        raise UnreadableError(
            f"{FIELDS.get(field, field)}: expected {message}"
        ) from None
    for text in (checked.prompt, checked.output):
        if isinstance(text, list) and len({type(part) for part in text}) > 1:
            raise UnreadableError("a prompt of both messages and token ids")
    arrival_s = checked.arrival_s
    if arrival_s is not None and not abs(arrival_s) <= MILLISECONDS_FROM:
        raise UnreadableError("a time that no clock shows")
    return checked


def format_of(document: Any) -> str | None:
    """Return the name of the document's format; None where it is none of those known."""
    if not isinstance(document, dict):
        return None
    for name, is_it, _ in FORMATS:
        if is_it(document):
            return name
    return None


def companion_of(document: Any) -> tuple[str, Any] | None:
    """Return the id and the prompt of a row that holds a prompt alone; None of any other row."""
    if not isinstance(document, dict):
        return None
    if "custom_id" in document and isinstance(document.get("body"), dict):
        if "response" in document:
            return None
        return f"custom:{document['custom_id']}", document["body"]
    return None


def _reason(failure: Exception) -> str:
    """A reason without the row's text: the kind of the failure, and of a key its name."""
    if (
        isinstance(failure, KeyError)
        and failure.args
        and isinstance(failure.args[0], str)
    ):
        return f"no {failure.args[0]!r}"
    return "a field has another form than this format's"


# ---------------------------------------------------------------- token ids


PROMPT_IDS = ("prompt_token_ids", "prompt_ids", "prompt")
OUTPUT_IDS = (
    "output_token_ids",
    "generated_token_ids",
    "completion_token_ids",
    "token_ids",
    "output_ids",
    "output",
)


def _is_token_ids(document: Mapping[str, Any]) -> bool:
    if _first_ids(document, PROMPT_IDS) is None:
        return False
    if _first_ids(document, OUTPUT_IDS) is not None:
        return True
    outputs = document.get("outputs")
    return isinstance(outputs, list) and bool(outputs) and "token_ids" in outputs[0]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(token, int) for token in value[:8]
    )


def _first_ids(document: Mapping[str, Any], names: Sequence[str]) -> list[int] | None:
    """The first of these fields that holds token ids."""
    for name in names:
        if _is_ids(document.get(name)):
            ids: list[int] = document[name]
            return ids
    return None


def _token_ids(document: Any, companions: Companions) -> list[LoggedRow]:
    prompt = _first_ids(document, PROMPT_IDS)
    arrival_s = _first_time(document, ARRIVALS)
    output = _first_ids(document, OUTPUT_IDS)
    if output is not None:
        return [LoggedRow(prompt=prompt, output=output, arrival_s=arrival_s)]
    rows = []
    for choice in document["outputs"]:
        rows.append(
            LoggedRow(prompt=prompt, output=choice["token_ids"], arrival_s=arrival_s)
        )
    return rows


# ---------------------------------------------------------------- OpenAI


OUTPUT_TEXTS = ("completion", "response", "output", "generated_text", "answer", "text")


REQUESTS = ("request", "body")
RESPONSES = ("response", "body")
"""Names under which a request and its response stand."""


def _request_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that was sent: the document, its request, or a request's body."""
    for name in REQUESTS:
        part = document.get(name)
        if isinstance(part, dict):
            sent = _request_of(part)
            if sent.get("messages") or sent.get("prompt"):
                return sent
    return document


def _response_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that came back, with its choices: the document, its response, or a response's body."""
    if _first_object(document.get("choices")):
        return document
    for name in RESPONSES:
        part = document.get(name)
        if isinstance(part, dict):
            found = _response_of(part)
            if "choices" in found:
                return found
    return document


def _first_object(values: Any) -> Mapping[str, Any]:
    """The first element of a list, if it is an object; else an empty one."""
    if isinstance(values, list) and values and isinstance(values[0], dict):
        return values[0]
    return {}


def _is_choices(document: Mapping[str, Any]) -> bool:
    choices = _response_of(document).get("choices")
    first = _first_object(choices)
    return "message" in first or "text" in first or "token_ids" in first


def _choices(document: Any, companions: Companions) -> list[LoggedRow]:
    request = _request_of(document)
    response = _response_of(document)
    if (
        "custom_id" in document
        and "messages" not in request
        and "prompt" not in request
    ):
        known = companions.get(f"custom:{document['custom_id']}")
        if known is None:
            raise UnreadableError(
                "a batch's output without its request: give the batch's input file too"
            )
        request = known
    prompt = response.get("prompt_token_ids") or _prompt_of(request)
    usage = response.get("usage") or document.get("usage") or document
    details = usage.get("prompt_tokens_details") or {}
    arrival_s = _first_time(document, ARRIVALS)
    if arrival_s is None and isinstance(document.get("request"), dict):
        arrival_s = _first_time(document["request"], ARRIVALS)
    if arrival_s is None:
        arrival_s = _first_time(response, ("created", "created_at"))
    choices = response["choices"]
    output_len = None
    if len(choices) == 1:
        output_len = usage.get("completion_tokens")
    rows = []
    for choice in choices:
        output = choice.get("token_ids")
        if not output and "message" in choice:
            output = _answer(choice["message"])
        elif not output:
            output = str(choice["text"])
        rows.append(
            LoggedRow(
                prompt=prompt,
                output=output,
                is_stopped=choice.get("finish_reason") == "stop",
                arrival_s=arrival_s,
                prompt_len=usage.get("prompt_tokens"),
                output_len=output_len,
                cached_len=details.get("cached_tokens"),
            )
        )
    return rows


def _prompt_of(request: Mapping[str, Any]) -> PromptContent:
    if "messages" in request:
        return _messages(request["messages"])
    prompt = request["prompt"]
    if _first_object(prompt):
        return _messages(prompt)
    if isinstance(prompt, str) or _is_ids(prompt):
        return prompt  # type: ignore[no-any-return]
    raise UnreadableError("several prompts in one request")


def _answer(message: Mapping[str, Any]) -> str:
    """The text of an answer, its reasoning before it, as reasoning models emit it."""
    content = message.get("content")
    if not content and message.get("tool_calls"):
        raise UnreadableError(
            "the output is a tool call, whose tokens the log does not have"
        )
    text = _text_of(content or "")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        return f"<think>\n{reasoning}\n</think>\n\n{text}"
    return text


def _text_of(content: Any) -> str:
    """A message's text: itself, or its parts'."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if isinstance(part, str):
            text = part
        else:
            text = part.get("text", part.get("content"))
        if not isinstance(text, str):
            raise UnreadableError("a message has parts that are no text")
        parts.append(text)
    return "".join(parts)


def _messages(messages: Any) -> list[Message]:
    """Messages as chat templates take them: a role and a text each."""
    if not isinstance(messages, list) or not messages:
        raise UnreadableError("no messages")
    plain: list[Message] = []
    for message in messages:
        content = message.get("content", message.get("parts"))
        if content is None and not message.get("tool_calls"):
            raise UnreadableError("a message without content")
        plain.append({**message, "content": _text_of(content or "")})
    return plain


def _is_conversation(document: Mapping[str, Any]) -> bool:
    """Whether messages end in the answer, as in files to train on."""
    messages = _request_of(document).get("messages")
    if not isinstance(messages, list) or _has_output_text(document):
        return False
    last = _first_object(messages[-1:])
    return last.get("role") == "assistant"


def _conversation(document: Any, companions: Companions) -> list[LoggedRow]:
    messages = _messages(_request_of(document)["messages"])
    rows = []
    for number, message in enumerate(messages):
        if message.get("role") == "assistant" and number > 0:
            rows.append(
                LoggedRow(
                    prompt=messages[:number], output=_answer(message), is_stopped=True
                )
            )
    if not rows:
        raise UnreadableError("a conversation that begins with its answer")
    return rows


def _has_output_text(document: Mapping[str, Any]) -> bool:
    return _output_text(document) is not None


def _output_text(document: Mapping[str, Any]) -> str | None:
    for name in OUTPUT_TEXTS:
        text = document.get(name)
        if isinstance(text, str):
            return text
    return None


def _is_pair(document: Mapping[str, Any]) -> bool:
    request = _request_of(document)
    return ("prompt" in request or "messages" in request) and _has_output_text(document)


def _pair(document: Any, companions: Companions) -> list[LoggedRow]:
    prompt = _prompt_of(_request_of(document))
    arrival_s = _first_time(document, ARRIVALS)
    return [
        LoggedRow(
            prompt=prompt,
            output=_output_text(document),
            arrival_s=arrival_s,
            prompt_len=document.get("prompt_tokens"),
            output_len=document.get("completion_tokens"),
        )
    ]


# ---------------------------------------------------------------- ShareGPT


ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
}


def _sharegpt(document: Any, companions: Companions) -> list[LoggedRow]:
    turns: list[Message] = []
    rows = []
    for turn in document["conversations"]:
        role = ROLES.get(str(turn.get("from", turn.get("role"))).lower())
        if role is None:
            raise UnreadableError("a turn of an unknown speaker")
        if "value" in turn:
            text = _text_of(turn["value"])
        else:
            text = _text_of(turn["content"])
        if role == "assistant" and turns:
            rows.append(LoggedRow(prompt=list(turns), output=text, is_stopped=True))
        turns.append({"role": role, "content": text})
    if not rows:
        raise UnreadableError("a conversation without an answer")
    return rows


# ---------------------------------------------------------------- benchmarks


def _vllm_benchmark(document: Any, companions: Companions) -> list[LoggedRow]:
    prompt_lens = document["input_lens"]
    output_lens = document["output_lens"]
    unknown = [None] * len(prompt_lens)
    texts = document.get("generated_texts") or unknown
    errors = document.get("errors") or unknown
    starts = document.get("start_times") or unknown
    prompts = document.get("prompts") or unknown
    columns = zip(prompt_lens, output_lens, texts, errors, starts, prompts, strict=True)
    rows = []
    for prompt_len, output_len, text, error, start, prompt in columns:
        if error:
            continue
        rows.append(
            LoggedRow(
                prompt=prompt,
                output=text,
                arrival_s=start,
                prompt_len=prompt_len,
                output_len=output_len,
            )
        )
    return rows


# ---------------------------------------------------------------- times


ARRIVALS = (
    "arrival_s",
    "arrival_time",
    "arrival",
    "timestamp",
    "start_time",
    "created_at",
    "time",
)


def _first_time(document: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """The first of these fields that is a time, in seconds."""
    for name in names:
        value = document.get(name)
        if value is None or isinstance(value, bool):
            continue
        seconds = _seconds(value)
        if seconds is not None:
            return seconds
    return None


def _seconds(value: Any) -> float | None:
    """A time in seconds: a number of seconds or of smaller units since 1970, or ISO 8601."""
    if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
        try:
            return _utc(datetime.datetime.fromisoformat(value)).timestamp()
        except ValueError:
            return None
    if isinstance(value, datetime.datetime):
        return _utc(value).timestamp()
    if not isinstance(value, int | float | str):
        return None
    seconds = float(value)
    # Nanoseconds are the smallest unit that clocks are logged in.
    for _ in range(3):
        if seconds > MILLISECONDS_FROM:
            seconds /= 1000.0
    if not abs(seconds) <= MILLISECONDS_FROM:
        return None
    return seconds


def _utc(moment: datetime.datetime) -> datetime.datetime:
    if moment.tzinfo is None:
        return moment.replace(tzinfo=datetime.UTC)
    return moment


FORMATS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool], Reader], ...] = (
    ("token ids", _is_token_ids, _token_ids),
    (
        "vllm bench serve",
        lambda document: "input_lens" in document and "output_lens" in document,
        _vllm_benchmark,
    ),
    ("OpenAI", _is_choices, _choices),
    (
        "ShareGPT",
        lambda document: isinstance(document.get("conversations"), list),
        _sharegpt,
    ),
    ("conversation", _is_conversation, _conversation),
    ("prompt and completion", _is_pair, _pair),
)
"""Name, test and reader of each format, the most particular first."""


def as_document(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's row as a document: cells of JSON text as their values."""
    document: dict[str, Any] = {}
    for name, cell in row.items():
        if cell is None:
            continue
        document[name] = _listed(cell)
    return document


def _listed(cell: Any) -> Any:
    if hasattr(cell, "tolist"):
        return cell.tolist()
    if isinstance(cell, str) and name_is_json(cell):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(cell)
    return cell


def name_is_json(text: str) -> bool:
    """Whether a cell's text is a JSON list or object."""
    return text[:1] in ("{", "[") and text[-1:] in ("}", "]")
