"""Readers of the formats in which requests are logged: one document of a file to the requests that
it holds.

token ids       prompt_token_ids or prompt; output_token_ids, generated_token_ids, token_ids, output, or
                outputs[].token_ids (vLLM's RequestOutput, SpecDecode-Bench)
OpenAI          messages or prompt, of the document, its request or its body; choices[].message.content or
                choices[].text, of the document or its response; a conversation without choices ends in the answer
OpenAI batch    custom_id, response.body; the prompts from the batch's input file (custom_id, body)
pairs           prompt, and completion, response, output, generated_text, answer or text
ShareGPT        conversations[].{from, value}: every answer, after all that stands before it
vLLM benchmark  vllm bench serve --save-detailed: input_lens, output_lens, generated_texts, errors, start_times; it
                has no prompts
GuideLLM        benchmarks[].requests.{successful, completed}[]: request_args, output, info.timings
proxies         LiteLLM's payloads and spend logs, Helicone's requests, plain request and response bodies, under the
                names of REQUESTS and RESPONSES: as objects, as JSON in a text, as streamed events; OpenAI's chat,
                completions and responses, and Anthropic's messages
OpenTelemetry   attributes gen_ai.input.messages, gen_ai.output.messages, gen_ai.usage.*: flat, nested, or OTLP JSON;
                OpenLLMetry's gen_ai.prompt.N.content, OpenInference's llm.input_messages.N.message.content
Langfuse        observations of type GENERATION: input, output, startTime or start_time
pages           lists of any of these under data, observations, batch, ... (Langfuse's and Helicone's API)
lm-eval         samples: arguments, resps
Spec-Bench      and EAGLE's answers: question_id, choices[].turns; the prompts from the questions' file (question_id,
                turns)
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    if checked.arrival_s is not None and not math.isfinite(checked.arrival_s):
        raise UnreadableError("a time that is no number")
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
    if "question_id" in document and "turns" in document and "choices" not in document:
        return f"question:{document['question_id']}", document["turns"]
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


def _rows_of_ids(document: Any, companions: Companions) -> list[LoggedRow]:
    rows = []
    for entry in document["rows"]:
        rows += _token_ids(entry, companions)
    return rows


# ---------------------------------------------------------------- OpenAI


OUTPUT_TEXTS = ("completion", "response", "output", "generated_text", "answer", "text")


REQUESTS = (
    "request",
    "body",
    "kwargs",
    "proxy_server_request",
    "request_body",
    "requestBody",
    "req",
    "payload",
    "json",
    "request_data",
)
RESPONSES = (
    "response",
    "body",
    "response_body",
    "responseBody",
    "resp",
    "res",
    "result",
    "completion_response",
    "response_obj",
    "response_data",
    "output",
)
"""Names under which a request and its response stand in proxies' logs."""
ASKED = ("messages", "prompt")


def _request_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that was sent: the document, its request, or a request's body."""
    for name in REQUESTS:
        part = document.get(name)
        if isinstance(part, str):
            part = _decoded(part)
        if not isinstance(part, dict):
            continue
        sent = _request_of(part)
        if any(sent.get(asked) for asked in ASKED) or _is_asked_by_input(sent):
            return sent
    return document


def _is_asked_by_input(request: Mapping[str, Any]) -> bool:
    """Whether it is a request of OpenAI's responses."""
    return "model" in request and isinstance(request.get("input"), str | list)


def _response_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that came back, with its choices: the document, its response, or a response's body."""
    if _first_object(document.get("choices")):
        return document
    for name in RESPONSES:
        part = document.get(name)
        if isinstance(part, str):
            part = _decoded(part) or _events(part)
        if isinstance(part, list):
            part = _streamed(part)
        if isinstance(part, dict):
            found = _response_of(_with_choices(part))
            if "choices" in found:
                return found
    return document


def _events(text: str) -> list[Any] | None:
    """The events of a stream that was logged as text; None of any other text."""
    if "data:" not in text[:200]:
        return None
    events = []
    for line in text.splitlines():
        if line.startswith("data:"):
            event = _decoded(line.removeprefix("data:").strip())
            if event is not None:
                events.append(event)
    return events


def _streamed(events: Sequence[Any]) -> dict[str, Any] | None:
    """A stream's events as one response; None of any other list."""
    parts = []
    whole: dict[str, Any] = {}
    finish = None
    for event in events:
        if not isinstance(event, dict):
            return None
        for choice in event.get("choices") or ():
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                return None
            parts.append(_text_of(delta.get("content") or ""))
            finish = choice.get("finish_reason") or finish
        whole = {**whole, **{name: told for name, told in event.items() if told}}
    if not parts:
        return None
    message = {"role": "assistant", "content": "".join(parts)}
    whole["choices"] = [{"message": message, "finish_reason": finish}]
    return whole


def _with_choices(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """A response of Anthropic's messages, or of OpenAI's responses, as a chat's."""
    if "choices" in response:
        return response
    parts = response.get("content")
    if response.get("type") == "message" and isinstance(parts, list):
        stopped = response.get("stop_reason") in ("end_turn", "stop_sequence")
    elif response.get("object") == "response" and isinstance(
        response.get("output"), list
    ):
        messages = [
            part for part in response["output"] if part.get("type") == "message"
        ]
        parts = [part for message in messages for part in message.get("content") or ()]
        stopped = response.get("status") == "completed"
    else:
        return response
    texts = [part for part in parts if part.get("type") in ("text", "output_text")]
    if not texts:
        return response
    usage = response.get("usage") or {}
    choice = {
        "message": {"role": "assistant", "content": _text_of(texts)},
        "finish_reason": "stop" if stopped else None,
    }
    return {
        **response,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.get("input_tokens"),
            "completion_tokens": usage.get("output_tokens"),
            "prompt_tokens_details": {
                "cached_tokens": usage.get("cache_read_input_tokens")
                or (usage.get("input_tokens_details") or {}).get("cached_tokens")
            },
        },
    }


def _decoded(text: str) -> Any:
    """A JSON text's value; None of any other text."""
    if text[:1] not in ("{", "["):
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


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
    if _is_asked_by_input(request) and not any(name in request for name in ASKED):
        sent = request["input"]
        if isinstance(sent, str):
            sent = [{"role": "user", "content": sent}]
        if request.get("instructions"):
            sent = [{"role": "system", "content": request["instructions"]}, *sent]
        return _messages(sent)
    if "messages" in request:
        messages = _maybe_json(request["messages"])
        system = request.get("system")
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        return _messages(messages)
    prompt = _maybe_json(request["prompt"])
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


def _guidellm(document: Any, companions: Companions) -> list[LoggedRow]:
    rows = []
    for benchmark in document["benchmarks"]:
        requests = benchmark["requests"]
        for request in requests.get("successful") or requests.get("completed") or []:
            arguments = request.get("request_args") or {}
            if isinstance(arguments, str):
                arguments = _decoded(arguments) or {}
            body = arguments.get("body") or arguments.get("payload") or arguments
            prompt = None
            if "messages" in body or "prompt" in body:
                prompt = _prompt_of(body)
            timings = (request.get("info") or {}).get("timings") or {}
            start = timings.get("request_start") or request.get("request_start_time")
            prompt_len = request.get("prompt_tokens")
            output_len = request.get("output_tokens")
            rows.append(
                LoggedRow(
                    prompt=prompt,
                    output=request.get("output"),
                    arrival_s=start,
                    prompt_len=prompt_len,
                    output_len=output_len,
                    cached_len=request.get("cached_tokens"),
                )
            )
    return rows


# ---------------------------------------------------------------- traces


def _spans(
    document: Mapping[str, Any],
) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Spans or log records with their attributes, of OTLP JSON or of a flat record."""
    groups = [*document.get("resourceSpans", []), *document.get("resourceLogs", [])]
    if not groups:
        attributes = document.get("attributes", document)
        if isinstance(attributes, list):
            attributes = _by_key(attributes)
        yield document, attributes
    for group in groups:
        for scope in [*group.get("scopeSpans", []), *group.get("scopeLogs", [])]:
            for span in [*scope.get("spans", []), *scope.get("logRecords", [])]:
                yield span, _by_key(span.get("attributes", []))


def _by_key(entries: Sequence[Any]) -> dict[str, Any]:
    """A list of OTLP attributes as a mapping."""
    return {entry["key"]: _any_value(entry["value"]) for entry in entries}


def _any_value(value: Any) -> Any:
    """The value of an OTLP attribute."""
    if not isinstance(value, dict) or not value:
        return value
    kind, inner = next(iter(value.items()))
    if kind == "intValue":
        return int(inner)
    if kind == "arrayValue":
        return [_any_value(entry) for entry in inner.get("values", [])]
    if kind == "kvlistValue":
        return _by_key(inner.get("values", []))
    return inner


SPAN_ROOTS = ("gen_ai", "llm")
OF_SPANS = ("gen_ai.", "llm.input_messages", "llm.output_messages", "openinference.")
USED = {
    "prompt_len": (
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.prompt_tokens",
        "llm.token_count.prompt",
        "llm.usage.prompt_tokens",
    ),
    "output_len": (
        "gen_ai.usage.output_tokens",
        "gen_ai.usage.completion_tokens",
        "llm.token_count.completion",
        "llm.usage.completion_tokens",
    ),
    "cached_len": (
        "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.cache_read_input_tokens",
        "llm.token_count.prompt_details.cache_read",
    ),
}
"""Attributes of lengths in tokens, by a row's fields."""
MOST_MESSAGES = 10_000


def _is_opentelemetry(document: Mapping[str, Any]) -> bool:
    if "resourceSpans" in document or "resourceLogs" in document:
        return True
    names: Iterable[str] = ()
    attributes = document.get("attributes", document)
    if isinstance(attributes, list):
        names = [str(entry.get("key", "")) for entry in attributes]
    elif isinstance(attributes, dict):
        nested = {name: attributes[name] for name in SPAN_ROOTS if name in attributes}
        names = [*attributes, *_flat(nested)]
    return any(name.removeprefix("attributes.").startswith(OF_SPANS) for name in names)


def _opentelemetry(document: Any, companions: Companions) -> list[LoggedRow]:
    rows = []
    for span, told in _spans(document):
        attributes = _flat(told)
        used = {}
        for field, names in USED.items():
            counts = (_count(attributes.get(name)) for name in names)
            used[field] = next((count for count in counts if count is not None), None)
        prompt, outputs = _said_in(attributes)
        for message in outputs:
            content = message.get("content", message.get("parts"))
            if not content:
                continue
            rows.append(
                LoggedRow(
                    prompt=prompt,
                    output=_text_of(content),
                    is_stopped=message.get("finish_reason") in ("stop", "end_turn"),
                    arrival_s=_first_time(span, SPAN_STARTS),
                    **used,
                )
            )
    if not rows:
        raise UnreadableError(
            "a trace without messages (their content is recorded only on request)"
        )
    return rows


def _flat(attributes: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Attributes by their dotted names, however they are nested."""
    flat: dict[str, Any] = {}
    for name, value in attributes.items():
        whole = f"{before}{name}".removeprefix("attributes.")
        if isinstance(value, dict) and before.count(".") < 4:
            flat |= _flat(value, f"{whole}.")
        else:
            flat[whole] = value
    return flat


def _count(value: Any) -> Any:
    """A count, which some exporters write as text."""
    if isinstance(value, str) and value.isdecimal():
        return int(value[:12])
    return value


def _said_in(
    attributes: Mapping[str, Any],
) -> tuple[list[Message] | None, list[Message]]:
    """The messages of a prompt (None: not recorded) and of its answer, by any of three conventions."""
    if "gen_ai.output.messages" in attributes:
        outputs = _maybe_json(attributes["gen_ai.output.messages"])
        inputs = _maybe_json(attributes.get("gen_ai.input.messages"))
        system = _maybe_json(attributes.get("gen_ai.system_instructions"))
        if system and inputs:
            inputs = [{"role": "system", "content": _text_of(system)}, *inputs]
    else:
        outputs = _numbered(attributes, "gen_ai.completion.")
        inputs = _numbered(attributes, "gen_ai.prompt.")
        if not outputs:
            outputs = _numbered(attributes, "llm.output_messages.")
            inputs = _numbered(attributes, "llm.input_messages.")
    return _messages(inputs) if inputs else None, outputs


def _numbered(attributes: Mapping[str, Any], prefix: str) -> list[Message]:
    """Messages whose fields are attributes with a number in their names, or one list of them."""
    listed = _maybe_json(attributes.get(prefix.rstrip(".")))
    if isinstance(listed, list):
        return [_unprefixed(entry) for entry in listed if isinstance(entry, dict)]
    found: dict[int, Message] = {}
    for name, value in attributes.items():
        if not name.startswith(prefix):
            continue
        number, _, field = name.removeprefix(prefix).partition(".")
        if number.isdecimal() and len(number) < 6 and int(number) < MOST_MESSAGES:
            message = found.setdefault(int(number), {})
            field = field.removeprefix("message.")
            if field.startswith("contents.") and field.endswith("message_content.text"):
                message["content"] = f"{message.get('content', '')}{value}"
            elif "." not in field:
                message[field] = _maybe_json(value) if field == "content" else value
    return [found[number] for number in sorted(found)]


def _unprefixed(message: Mapping[str, Any]) -> Message:
    """A message of OpenInference, whose fields stand in "message" or begin with it."""
    inner = message.get("message", message)
    return {name.removeprefix("message."): told for name, told in inner.items()}


def _maybe_json(value: Any) -> Any:
    if isinstance(value, str):
        return _decoded(value) or value
    return value


PAGES = (
    "data",
    "observations",
    "batch",
    "items",
    "results",
    "records",
    "logs",
    "requests",
    "spans",
)
"""Names under which exports and answers of interfaces list what they hold."""


def _listed_in(document: Mapping[str, Any]) -> list[Any]:
    """The entries of a page that have a format."""
    for name in PAGES:
        entries = document.get(name)
        if isinstance(entries, list) and any(map(format_of, map(_unwrapped, entries))):
            return [_unwrapped(entry) for entry in entries]
    return []


def _unwrapped(entry: Any) -> Any:
    """An event's body where it is one: {"type": "generation-create", "body": {...}}."""
    if isinstance(entry, dict) and str(entry.get("type", "")).startswith("generation-"):
        return {**entry.get("body", {}), "type": "GENERATION"}
    return entry


def _pages(document: Any, companions: Companions) -> list[LoggedRow]:
    rows = []
    reason = ""
    for entry in _listed_in(document):
        try:
            rows += rows_of(entry, companions)
        except UnreadableError as error:
            reason = reason or str(error)
    if not rows:
        raise UnreadableError(reason)
    return rows


def _is_langfuse(document: Mapping[str, Any]) -> bool:
    if "input" not in document or "output" not in document:
        return False
    return not {"type", "startTime", "start_time"}.isdisjoint(document)


def _langfuse(document: Any, companions: Companions) -> list[LoggedRow]:
    if str(document.get("type", "GENERATION")).upper() != "GENERATION":
        raise UnreadableError("an observation that is no generation")
    sent = _maybe_json(document["input"])
    if isinstance(sent, dict):
        sent = sent.get("messages", sent.get("prompt"))
    request = {"prompt": sent}
    if isinstance(sent, list):
        request = {"messages": sent}
    usage = _langfuse_usage(document)
    return [
        LoggedRow(
            prompt=_prompt_of(request),
            output=_langfuse_output(_maybe_json(document["output"])),
            arrival_s=_first_time(document, LANGFUSE_STARTS),
            prompt_len=usage.get("input", usage.get("promptTokens")),
            output_len=usage.get("output", usage.get("completionTokens")),
        )
    ]


def _langfuse_usage(document: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("usageDetails", "usage_details", "usage"):
        usage = _maybe_json(document.get(name))
        if isinstance(usage, dict):
            return usage
    return {}


def _langfuse_output(output: Any) -> str:
    if isinstance(output, dict) and "choices" in output:
        output = output["choices"][0]["message"]
    if isinstance(output, list):
        output = output[-1]
    if isinstance(output, dict):
        return _answer(output)
    return str(output)


# ---------------------------------------------------------------- evaluations


def _lm_eval(document: Any, companions: Companions) -> list[LoggedRow]:
    arguments = _maybe_json(document["arguments"])
    responses = _maybe_json(document["resps"])
    sent: list[Any] = []
    if isinstance(arguments, dict):
        for name in sorted(arguments):
            sent.append(arguments[name]["arg_0"])
    else:
        sent.extend(call[0] for call in arguments)
    rows = []
    for written, texts in zip(sent, responses, strict=False):
        if not texts or not isinstance(texts[0], str):
            raise UnreadableError("an answer that was scored, not generated")
        prompt = _maybe_json(written)
        if isinstance(prompt, list):
            prompt = _messages(prompt)
        for text in texts:
            rows.append(LoggedRow(prompt=prompt, output=text))
    return rows


def _is_spec_bench(document: Mapping[str, Any]) -> bool:
    return "question_id" in document and "turns" in _first_object(
        document.get("choices")
    )


def _spec_bench(document: Any, companions: Companions) -> list[LoggedRow]:
    asked = companions.get(f"question:{document['question_id']}")
    rows = []
    for choice in document["choices"]:
        said: list[Message] = []
        for number, answer in enumerate(choice["turns"]):
            prompt: PromptContent | None = None
            if asked is not None:
                said.append({"role": "user", "content": asked[number]})
                prompt = list(said)
            rows.append(LoggedRow(prompt=prompt, output=answer, is_stopped=True))
            said.append({"role": "assistant", "content": answer})
    return rows


# ---------------------------------------------------------------- times


LANGFUSE_STARTS = ("startTime", "start_time", "timestamp", "createdAt", "created_at")
ARRIVALS = (
    "arrival_s",
    "arrival_time",
    "arrival",
    "timestamp",
    "start_time",
    "created_at",
    "time",
    "startTime",
    "request_created_at",
    "createdAt",
    "started_at",
    "request_time",
    "requested_at",
    "ts",
    "@timestamp",
)
SPAN_STARTS = (
    "startTimeUnixNano",
    "start_time_unix_nano",
    "timeUnixNano",
    "start_time",
    "startTime",
    "timestamp",
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
    if not math.isfinite(seconds):
        return None
    # Nanoseconds are the smallest unit that clocks are logged in.
    for _ in range(3):
        if seconds > MILLISECONDS_FROM:
            seconds /= 1000.0
    if seconds > MILLISECONDS_FROM:
        return None
    return seconds


def _utc(moment: datetime.datetime) -> datetime.datetime:
    if moment.tzinfo is None:
        return moment.replace(tzinfo=datetime.UTC)
    return moment


FORMATS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool], Reader], ...] = (
    ("token ids", _is_token_ids, _token_ids),
    (
        "token ids",
        lambda document: _is_token_ids(_first_object(document.get("rows"))),
        _rows_of_ids,
    ),
    (
        "vllm bench serve",
        lambda document: "input_lens" in document and "output_lens" in document,
        _vllm_benchmark,
    ),
    (
        "GuideLLM",
        lambda document: isinstance(document.get("benchmarks"), list),
        _guidellm,
    ),
    ("OpenTelemetry GenAI", _is_opentelemetry, _opentelemetry),
    (
        "lm-eval samples",
        lambda document: "arguments" in document and "resps" in document,
        _lm_eval,
    ),
    ("page of an export", lambda document: bool(_listed_in(document)), _pages),
    ("Spec-Bench answers", _is_spec_bench, _spec_bench),
    # an observation's output may be a whole response of OpenAI's
    ("Langfuse", _is_langfuse, _langfuse),
    ("OpenAI", _is_choices, _choices),
    (
        "ShareGPT",
        lambda document: isinstance(document.get("conversations"), list),
        _sharegpt,
    ),
    ("conversation", _is_conversation, _conversation),
    ("prompt and completion", _is_pair, _pair),
    (
        "input and output",
        lambda document: bool(document.get("input")) and bool(document.get("output")),
        _langfuse,
    ),
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
        return _maybe_json(cell)
    return cell


def name_is_json(text: str) -> bool:
    """Whether a cell's text is a JSON list or object."""
    return text[:1] in ("{", "[") and text[-1:] in ("}", "]")
