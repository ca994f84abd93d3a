"""A plan for a rate of requests on the page: progress first, then the answer of `magicdec plan`; given up, it ends."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
import urllib.request
from html import unescape
from http import HTTPStatus
from urllib.parse import parse_qsl

import pytest
from slow_plans import answer_with_few_requests
from test_http import get

import magicdec
from magicdec.explore import computation
from magicdec.explore.server import ExplorerServer
from magicdec.explore.state import EXAMPLE
from tests.processes import still_alive_after
from tests.same import assert_same

PATIENCE_S = 300
ASKED = EXAMPLE.replace("gen_len=64", "gen_len=60")
"""A rate that no other test asks for: its answer is not there yet."""


def awaited(server: ExplorerServer, query: str) -> tuple[int, str, list[float]]:
    """The answer, with the shares done that were said until then."""
    shares, end = [], time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        status, text = get(server, f"/answer?{query}")
        if status != HTTPStatus.ACCEPTED:
            return status, text, shares
        shares.append(
            float(re.findall(r'<progress max="1" value="([0-9.]+)"', text)[0])
        )
        time.sleep(0.1)
    raise AssertionError("no answer")


def begun(
    before: set[multiprocessing.process.BaseProcess],
) -> multiprocessing.process.BaseProcess:
    """The one process that is new."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        started = set(multiprocessing.active_children()) - before
        if started:
            (process,) = started
            return process
        time.sleep(0.02)
    raise AssertionError("no process")


def gone(process: multiprocessing.process.BaseProcess) -> bool:
    """Asks the system: the server's thread may collect the exit code first, and `join` then
    returns before the process object knows it.
    """
    assert process.pid is not None
    return not still_alive_after(PATIENCE_S, [process.pid])


@pytest.mark.usefixtures("few_requests")
def test_progress_comes_first_then_the_answer_of_plan(
    server: ExplorerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computation, "_answer", answer_with_few_requests)
    status, text, shares = awaited(server, ASKED)
    assert status == HTTPStatus.OK
    assert shares == sorted(shares)
    assert len(set(shares)) > 2
    asked = {
        name: float(text) if name.startswith(("rate", "p95")) else text
        for name, text in parse_qsl(ASKED)
    }
    answer = magicdec.plan(**asked)
    shown = json.loads(get(server, f"/plan.json?{ASKED}")[1])
    assert_same(shown, json.loads(answer.to_json()))
    assert answer.traffic is not None
    assert "requests/s, and does a draft help?" in text
    assert all(note in unescape(text) for note in answer.traffic.notes)
    for name in ("traffic", "goodput", "timeline"):
        assert (
            f'<figure id="figure-{name}">' in get(server, f"/figure/{name}?{ASKED}")[1]
        )
    assert "http-equiv" not in get(server, f"/?{ASKED}")[1]


def test_a_question_that_is_given_up_ends_and_the_page_answers_meanwhile(
    server: ExplorerServer,
) -> None:
    query = EXAMPLE.replace("rate=1", "rate=2")
    before = set(multiprocessing.active_children())
    status, page = get(server, f"/?{query}")
    assert (status, '<noscript><meta http-equiv="refresh"' in page) == (
        HTTPStatus.OK,
        True,
    )
    process = begun(before)
    assert get(server, "/answer?batch=16")[0] == HTTPStatus.OK
    assert process.is_alive()
    urllib.request.urlopen(
        urllib.request.Request(f"{server.url}answer?{query}", method="DELETE"),
        timeout=60,
    ).close()
    assert gone(process)
    assert (
        get(server, f"/answer?{query}")[0] == HTTPStatus.ACCEPTED
    )  # asked anew, it begins anew
    begun(before).terminate()


def test_one_that_nobody_asks_for_any_more_ends_too(
    server: ExplorerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computation, "PATIENCE_S", 0.5)
    before = set(multiprocessing.active_children())
    assert (
        get(server, f"/answer?{EXAMPLE.replace('rate=1', 'rate=3')}")[0]
        == HTTPStatus.ACCEPTED
    )
    process = begun(before)
    assert gone(process)


def test_an_error_of_the_planner_is_the_one_line(server: ExplorerServer) -> None:
    status, text, _ = awaited(server, "rate=4&context=1024&gen_len=0")
    assert status == HTTPStatus.BAD_REQUEST
    assert "a rate needs lengths" in text
