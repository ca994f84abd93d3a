"""The programs for jq of docs/forms.md, each on a log of its kind: the requests that the log holds."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from magicdec.logs.formats import LoggedRow, rows_of

jq = pytest.importorskip("jq")

DOCS = Path(__file__).parents[2] / "docs" / "forms.md"
RECIPES = re.findall(r"\n([^\n]+):\n\n```jq\n(.*?)```", DOCS.read_text(), re.DOTALL)
GUIDELLM = (
    Path(__file__).parents[1] / "data" / "load_generators" / "guidellm-128.json.gz"
)
ASKED = [{"role": "user", "content": "name a colour"}]


def spans(value: Any) -> dict[str, Any]:
    """An OTLP export of one span."""
    attributes = [
        {
            "key": "gen_ai.input.messages",
            "value": {"stringValue": json.dumps(value["input"])},
        },
        {
            "key": "gen_ai.output.messages",
            "value": {"stringValue": json.dumps(value["output"])},
        },
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "12"}},
    ]
    span = {"startTimeUnixNano": "1700000000500000000", "attributes": attributes}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


CASES: dict[str, tuple[str, dict[str, Any], list[LoggedRow]]] = {
    "OpenTelemetry span": (
        "OpenTelemetry's",
        spans(
            {
                "input": [{"role": "user", "parts": [{"type": "text", "content": "name a colour"}]}],
                "output": [
                    {"role": "assistant", "parts": [{"type": "text", "content": "blue"}], "finish_reason": "stop"}
                ],
            }
        ),
        [
            LoggedRow(
                prompt=ASKED, output="blue", is_stopped=True, arrival_s=1700000000.5, prompt_len=12,
            )
        ],
    ),
    "Langfuse": (
        "Langfuse,",
        {
            "id": "g", "type": "GENERATION", "start_time": "2024-01-01 00:00:01.000000",
            "input": json.dumps(ASKED), "output": json.dumps({"role": "assistant", "content": "blue"}),
            "usage_details": {"input": 9, "output": 2},
        },
        [LoggedRow(prompt=ASKED, output="blue", arrival_s=1704067201.0, prompt_len=9, output_len=2)],
    ),
    "lm-eval": (
        "lm-eval's",
        {
            "doc_id": 0, "doc": {}, "target": "4",
            "arguments": {"gen_args_0": {"arg_0": "2+2=", "arg_1": {"until": ["\n"]}}},
            "resps": [[" 4"]], "filtered_resps": ["4"],
        },
        [LoggedRow(prompt="2+2=", output=" 4")],
    ),
    "LiteLLM's payload": (
        "LiteLLM,",
        {
            "id": "chatcmpl-1", "call_type": "acompletion", "status": "success", "startTime": 1704067201.5,
            "endTime": 1704067203.0, "completionStartTime": 1704067201.9, "prompt_tokens": 9, "completion_tokens": 2,
            "messages": ASKED,
            "response": {"object": "chat.completion", "choices": [{"message": {"content": "blue"},
                                                                   "finish_reason": "stop"}]},
        },
        [
            LoggedRow(
                prompt=ASKED, output="blue", is_stopped=True, arrival_s=1704067201.5, prompt_len=9, output_len=2
            )
        ],
    ),
    "LiteLLM's spend log": (
        "LiteLLM,",
        {
            "request_id": "chatcmpl-1", "startTime": "2024-01-01T00:00:01.500000+00:00", "prompt_tokens": 9,
            "completion_tokens": 2, "messages": {}, "proxy_server_request": json.dumps({"messages": ASKED}),
            "response": json.dumps({"choices": [{"message": {"content": "blue"}, "finish_reason": "stop"}]}),
        },
        [
            LoggedRow(
                prompt=ASKED, output="blue", is_stopped=True, arrival_s=1704067201.5, prompt_len=9, output_len=2
            )
        ],
    ),
    "Helicone": (
        "Helicone,",
        {
            "request_id": "r", "request_created_at": "2024-01-01T00:00:01Z", "request_body": {"messages": ASKED},
            "response_body": {"choices": [{"message": {"content": "blue"}}]}, "prompt_tokens": 9,
            "completion_tokens": 2, "delay_ms": 812,
        },
        [LoggedRow(prompt=ASKED, output="blue", arrival_s=1704067201.0, prompt_len=9, output_len=2)],
    ),
    "Helicone's interface": (
        "Helicone,",
        {
            "error": None,
            "data": [
                {
                    "request_created_at": "2024-01-01T00:00:01Z", "request_body": {"messages": ASKED},
                    "response_body": {"choices": [{"message": {"content": "blue"}}]},
                }
            ],
        },
        [LoggedRow(prompt=ASKED, output="blue", arrival_s=1704067201.0)],
    ),
    "Langfuse's interface": (
        "Langfuse,",
        {
            "meta": {"page": 1, "totalPages": 1},
            "data": [
                {"type": "SPAN", "startTime": "2024-01-01T00:00:00Z", "input": "x", "output": "y"},
                {
                    "type": "GENERATION", "startTime": "2024-01-01T00:00:01Z", "input": {"messages": ASKED},
                    "output": {"role": "assistant", "content": "blue"}, "usage": {"input": 9, "output": 2},
                },
            ],
        },
        [LoggedRow(prompt=ASKED, output="blue", arrival_s=1704067201.0, prompt_len=9, output_len=2)],
    ),
    "Langfuse's trace": (
        "Langfuse,",
        {
            "id": "t", "name": "chat",
            "observations": [
                {"type": "GENERATION", "startTime": "2024-01-01T00:00:01Z", "input": ASKED, "output": "blue"}
            ],
        },
        [LoggedRow(prompt=ASKED, output="blue", arrival_s=1704067201.0)],
    ),
    "OpenLLMetry": (
        "OpenLLMetry,",
        {
            "name": "openai.chat", "start_time": "2024-01-01T00:00:01Z",
            "attributes": {
                "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "name a colour",
                "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "blue",
                "gen_ai.completion.0.finish_reason": "stop", "gen_ai.usage.prompt_tokens": 9,
                "gen_ai.usage.completion_tokens": "2", "llm.usage.total_tokens": 11,
            },
        },
        [
            LoggedRow(
                prompt=ASKED, output="blue", is_stopped=True, arrival_s=1704067201.0, prompt_len=9, output_len=2
            )
        ],
    ),
    "OpenInference, nested": (
        "OpenInference,",
        {
            "start_time": "2024-01-01T00:00:01Z",
            "attributes": {
                "llm": {
                    "input_messages": [{"message": {"role": "user", "content": "name a colour"}}],
                    "output_messages": [{"message": {"role": "assistant", "content": "blue"}}],
                    "token_count": {"prompt": 9, "completion": 2},
                }
            },
        },
        [LoggedRow(prompt=ASKED, output="blue", arrival_s=1704067201.0, prompt_len=9, output_len=2)],
    ),
    "a proxy's stream": (
        "A proxy's",
        {
            "ts": 1704067201.0, "req": {"messages": ASKED, "stream": True},
            "res": "".join(
                f"data: {json.dumps(event)}\n\n"
                for event in (
                    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
                    {"choices": [{"delta": {"content": "bl"}}]},
                    {"choices": [{"delta": {"content": "ue"}, "finish_reason": "stop"}]},
                    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
                )
            )
            + "data: [DONE]\n",
        },
        [
            LoggedRow(
                prompt=ASKED, output="blue", is_stopped=True, arrival_s=1704067201.0, prompt_len=9, output_len=2
            )
        ],
    ),
    "a proxy of Anthropic's messages": (
        "Anthropic's",
        {
            "timestamp": "2024-01-01T00:00:01Z", "requestBody": {"system": "be short", "messages": ASKED},
            "responseBody": {
                "type": "message", "role": "assistant", "stop_reason": "end_turn",
                "content": [{"type": "text", "text": "blue"}],
                "usage": {"input_tokens": 9, "output_tokens": 2, "cache_read_input_tokens": 4},
            },
        },
        [
            LoggedRow(
                prompt=[{"role": "system", "content": "be short"}, *ASKED], output="blue", is_stopped=True,
                arrival_s=1704067201.0, prompt_len=9, output_len=2, cached_len=4,
            )
        ],
    ),
    "a proxy of OpenAI's responses": (
        "OpenAI's responses",
        {
            "request": {"model": "m", "input": "name a colour"},
            "response": {
                "object": "response", "status": "completed", "created_at": 1704067201,
                "output": [
                    {"type": "reasoning", "summary": []},
                    {"type": "message", "content": [{"type": "output_text", "text": "blue"}]},
                ],
                "usage": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}},
            },
        },
        [
            LoggedRow(
                prompt=ASKED, output="blue", is_stopped=True, arrival_s=1704067201.0, prompt_len=9, output_len=2,
                cached_len=4,
            )
        ],
    ),
}  # fmt: skip
"""Logs by their kind, each with the beginning of its recipe's title and its requests."""


def requests_by(title: str, document: Any) -> list[LoggedRow]:
    (program,) = [text for name, text in RECIPES if name.startswith(title)]
    rows = []
    for made in jq.compile(program).input_value(document).all():
        rows += rows_of(made, {})
    return rows


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_makes_the_requests_of_its_log(name: str) -> None:
    title, document, rows = CASES[name]
    assert requests_by(title, document) == rows


def test_every_recipe_is_tried() -> None:
    tried = {title for title, _, _ in CASES.values()} | {"GuideLLM"}
    assert all(name.startswith(tuple(tried)) for name, _ in RECIPES)


def test_guidellm_s_report_is_read_with_prompts_outputs_and_times() -> None:
    """A report as GuideLLM wrote it."""
    with gzip.open(GUIDELLM) as file:
        report = json.load(file)
    rows = requests_by("GuideLLM", report)
    requests = [
        request
        for part in report["benchmarks"]
        for request in part["requests"]["successful"]
    ]
    assert len(rows) == len(requests)
    assert rows[0].output == requests[0]["output"]
    assert rows[0].arrival_s == requests[0]["info"]["timings"]["request_start"]
    assert rows[0].output_len == requests[0]["output_tokens"]
    assert (
        json.dumps(rows[0].prompt)[1:-1] in requests[0]["request_args"]
        or rows[0].prompt
    )
