"""Requests to a server of the engine, with what each event of a streamed answer held."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit


def stream(
    address: str, prompt: list[int], max_tokens: int, *, model: str
) -> list[int]:
    """Sends one greedy request, and gives the tokens in each event of its answer; an event is a step of the engine,
    unless the reader lags."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    where = urlsplit(address)
    connection = http.client.HTTPConnection(
        where.hostname or "", where.port, timeout=300
    )
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body),
        {"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()[:500]
    counts = []
    for line in response:
        text = line.decode().removeprefix("data:").strip()
        if text in ("", "[DONE]"):
            continue
        for choice in json.loads(text)["choices"]:
            if choice["token_ids"]:
                counts.append(len(choice["token_ids"]))
    connection.close()
    return counts


def stream_all(
    address: str, prompts: Sequence[list[int]], max_tokens: Sequence[int], *, model: str
) -> list[list[int]]:
    """All at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(
            pool.map(
                lambda each: stream(address, *each, model=model),
                zip(prompts, max_tokens, strict=True),
            )
        )
