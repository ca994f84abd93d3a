"""Questions that take seconds: first come first served, one computation for each, whoever asks; and
none for pages of other origins.

The planner is a stand-in here (slow_plans.py): it says how far it is, and answers when a
file appears. What queues, starts, ends and kills processes is the server's own.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from slow_plans import answer_when_told

from magicdec.explore import computation
from magicdec.explore.explorer import Explorer
from magicdec.explore.server import ExplorerServer
from magicdec.explore.state import Catalog
from magicdec.perfmodel.planner import Plan, PlanRequest, make_plan

QUESTION = "gen_len=100&context=1024&rate={}"
PATIENCE_S = 120.0


class SlowPlans:
    """Which questions have begun, and how often; each ends when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begun(self) -> list[float]:
        files = sorted(
            self.folder.glob("begun-*"), key=lambda file: file.stat().st_mtime_ns
        )
        return [float(file.name.split("-")[1]) for file in files]

    def processes(self, rate: float) -> list[int]:
        return [
            int(file.name.split("-")[2])
            for file in self.folder.glob(f"begun-{rate:g}-*")
        ]

    def end(self, rate: float) -> None:
        (self.folder / f"end-{rate:g}").touch()


@pytest.fixture(scope="module")
def document() -> Plan:
    return make_plan(PlanRequest(context_lens=(1024,), gen_len=100, batch_sizes=(4,)))


@pytest.fixture
def slow_plans(
    document: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SlowPlans:
    planner = partial(answer_when_told, str(tmp_path), document)
    monkeypatch.setattr(computation, "_answer", planner)
    return SlowPlans(tmp_path)


@pytest.fixture
def page(slow_plans: SlowPlans) -> Iterator[ExplorerServer]:
    with ExplorerServer(Explorer(Catalog.given())) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        for rate in range(1, 40):
            slow_plans.end(rate)
        running.shutdown()
        thread.join()


def ask(
    server: ExplorerServer,
    path: str,
    *,
    asker: str = "",
    method: str = "GET",
    **headers: str,
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.server_address[1], timeout=60
    )
    if asker:
        headers["X-Asker"] = asker
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def answer(server: ExplorerServer, rate: float, **options: str) -> tuple[int, str]:
    return ask(server, "/answer?" + QUESTION.format(rate), **options)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    multiprocessing.active_children()  # collects those that have ended
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_open_questions_take_turns_and_none_begins_twice(
    page: ExplorerServer, slow_plans: SlowPlans
) -> None:
    rates = list(range(1, computation.MOST_RUNNING + 4))
    for _ in range(5):
        for rate in rates:
            assert answer(page, rate, asker=f"page {rate}")[0] == 202
    until(lambda: len(slow_plans.begun()) == computation.MOST_RUNNING)
    assert sorted(slow_plans.begun()) == rates[: computation.MOST_RUNNING]
    _, text = answer(page, rates[-1], asker=f"page {rates[-1]}")
    assert f"waiting for {len(rates) - 1} other questions" in text
    for rate in rates:
        slow_plans.end(rate)
        until(lambda rate=rate: answer(page, rate, asker=f"page {rate}")[0] == 200)
    assert sorted(slow_plans.begun()) == rates


def test_many_askers_of_one_state_share_one_computation(
    page: ExplorerServer, slow_plans: SlowPlans
) -> None:
    with ThreadPoolExecutor(8) as pool:
        documents = [
            pool.submit(ask, page, "/plan.json?" + QUESTION.format(2)) for _ in range(6)
        ]
        until(lambda: bool(slow_plans.begun()))
        assert answer(page, 2, asker="a page")[0] == 202
        slow_plans.end(2)
        assert [document.result()[0] for document in documents] == [200] * 6
    assert slow_plans.begun() == [2.0]


def test_who_withdraws_takes_no_answer_from_others(
    page: ExplorerServer, slow_plans: SlowPlans
) -> None:
    with ThreadPoolExecutor(2) as pool:
        figure = pool.submit(ask, page, "/plan.json?" + QUESTION.format(3))
        assert answer(page, 3, asker="one")[0] == 202
        assert answer(page, 3, asker="other")[0] == 202
        until(lambda: bool(slow_plans.begun()))
        answer(page, 3, asker="one", method="DELETE")
        answer(page, 3, asker="other", method="DELETE")
        time.sleep(0.3)
        slow_plans.end(3)
        assert figure.result()[0] == 200
    assert slow_plans.begun() == [3.0]


def test_the_last_who_withdraws_ends_it_and_its_own_wait_is_a_conflict(
    page: ExplorerServer, slow_plans: SlowPlans
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            ask, page, "/figure/traffic?" + QUESTION.format(4), asker="one"
        )
        until(lambda: bool(slow_plans.begun()))
        (process,) = slow_plans.processes(4)
        answer(page, 4, asker="one", method="DELETE")
        status, text = waiting.result()
    assert status == 409
    assert "withdrawn" in text
    until(lambda: not is_alive(process))
    assert answer(page, 4, asker="one")[0] == 202  # asked anew, it begins anew
    until(lambda: len(slow_plans.begun()) == 2)


def test_a_client_that_has_gone_no_longer_waits(
    page: ExplorerServer, slow_plans: SlowPlans
) -> None:
    connection = http.client.HTTPConnection(
        "127.0.0.1", page.server_address[1], timeout=60
    )
    connection.request("GET", "/plan.json?" + QUESTION.format(5))
    until(lambda: bool(slow_plans.begun()))
    (process,) = slow_plans.processes(5)
    connection.close()
    until(lambda: not is_alive(process))


def test_a_killed_process_gives_a_line_and_the_next_question_begins_anew(
    page: ExplorerServer, slow_plans: SlowPlans
) -> None:
    assert answer(page, 6, asker="one")[0] == 202
    until(lambda: bool(slow_plans.begun()))
    (process,) = slow_plans.processes(6)
    os.kill(process, signal.SIGKILL)
    until(lambda: answer(page, 6, asker="one")[0] != 202)
    assert len(slow_plans.begun()) >= 1
    slow_plans.end(6)
    until(lambda: answer(page, 6, asker="one")[0] == 200)
    assert len(slow_plans.begun()) == 2


def test_the_line_of_a_killed_process_names_the_signal(
    page: ExplorerServer, slow_plans: SlowPlans
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, page, "/plan.json?" + QUESTION.format(7))
        until(lambda: bool(slow_plans.begun()))
        os.kill(slow_plans.processes(7)[0], signal.SIGKILL)
        status, text = waiting.result()
    assert status == 500
    assert "ended by signal 9" in text
    assert len([line for line in text.splitlines() if "error" in line]) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {
            "Sec_Fetch_Site": "cross-site",
            "Sec_Fetch_Mode": "no-cors",
            "Sec_Fetch_Dest": "image",
        },
        {
            "Sec_Fetch_Site": "same-site",
            "Sec_Fetch_Mode": "cors",
            "Sec_Fetch_Dest": "empty",
        },
        {
            "Sec_Fetch_Site": "cross-site",
            "Sec_Fetch_Mode": "navigate",
            "Sec_Fetch_Dest": "iframe",
        },
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
    ],
)
@pytest.mark.parametrize("path", ["/answer", "/plan.json", "/figure/traffic", "/"])
def test_other_origins_start_nothing(
    page: ExplorerServer, slow_plans: SlowPlans, headers: dict[str, str], path: str
) -> None:
    status, _ = ask(page, f"{path}?" + QUESTION.format(8), **headers)
    assert status == 403
    assert not slow_plans.begun()


def test_a_link_from_elsewhere_opens_the_page_which_then_asks_itself(
    page: ExplorerServer, slow_plans: SlowPlans
) -> None:
    link = {
        "Sec_Fetch_Site": "cross-site",
        "Sec_Fetch_Mode": "navigate",
        "Sec_Fetch_Dest": "document",
    }
    assert ask(page, "/?" + QUESTION.format(9), **link)[0] == 200
    time.sleep(0.2)
    assert not slow_plans.begun()
    own = {"Sec_Fetch_Site": "same-origin", "Origin": page.url.rstrip("/")}
    assert answer(page, 9, **own)[0] == 202
    until(lambda: slow_plans.begun() == [9.0])


def test_too_many_questions_are_refused_in_a_line(
    page: ExplorerServer, slow_plans: SlowPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computation, "MOST_WAITING", 2)
    for rate in range(1, computation.MOST_RUNNING + 3):
        assert answer(page, rate)[0] == 202
    status, text = answer(page, 30)
    assert status == 503
    assert "questions wait already" in text
    assert answer(page, 1)[0] == 202


def test_a_bug_is_answered_and_shown(
    page: ExplorerServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: object) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(page.explorer, "_answered", broken)
    status, text = ask(page, "/answer?batch=4")
    assert status == 500
    assert "traceback is in the server" in text
    assert "IndexError: planted" in capsys.readouterr().err
