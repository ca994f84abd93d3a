"""Loads, tables and questions to the page as nobody would write them: an answer or one
line, within a minute and two GB.

MAGICDEC_FUZZ multiplies the cases.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magicdec.explore.form import FIELDS
from magicdec.explore.server import ExplorerServer
from magicdec.perfmodel.rate import requests as traffic_requests
from tests.fuzz.surfaces import HANGS_S, TALLIES, Case, Memory, Tally, Verdict, judge

MANY = int(os.environ.get("MAGICDEC_FUZZ", "1"))
if MANY == 1:
    pytestmark = pytest.mark.usefixtures("few_requests")
MOST_MIB = 1700.0
"""On top of this process; a command alone starts below 300, and is to stay below 2 GiB."""
LARGEST = 5000 if MANY > 1 else 60
"""An ordinary number; a rate of so many requests a second takes proportionally longer to simulate."""
BURSTINESS = "1e4" if MANY > 1 else "20"
"""So bursty a load is tried on as many devices as there are."""
DRAWN = settings(
    max_examples=8 * MANY,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SERVED = ("--hardware", "h100-sxm-80gb", "--tp", "1", "--draft", "none")
SHORT = ("--context", "512", "--gen-len", "20")
NUMBER = st.one_of(
    st.integers(0, LARGEST),
    st.floats(0.0, 2 * LARGEST),
    st.sampled_from(
        [
            0,
            -1,
            1,
            1e-300,
            5e-324,
            1e300,
            1e12,
            10**400,
            2**31,
            1e-6,
            100.7,
            True,
            None,
            "",
            "x",
        ]
    ),
    st.sampled_from(["nan", "inf", "1e400", "９", "9" * 5000, "\x1b[31m", "1_000"]),
)


def right(case: Case, surface: str) -> None:
    """Judges one case. Raises AssertionError for a fault, or too much memory."""
    assert judge(case, surface).fault == ""
    assert TALLIES[surface].peak_mib < MOST_MIB


def text_of(value: Any) -> str:
    return "" if value is None else str(value)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str]:
    """A file's ending and its text: mostly rows in order with at most one odd cell."""
    count = draw(st.sampled_from([1, 2, 7, 60]))
    gap = draw(st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 0.01, 1.0, 1e6]))
    rows: list[dict[str, Any]] = [
        {
            "arrival": gap * number,
            "prompt": 100 + number,
            "output": 1 + number % 9,
            "cached": 0,
        }
        for number in range(count)
    ]
    if draw(st.booleans()):
        column = draw(st.sampled_from(["arrival", "prompt", "output", "cached"]))
        rows[draw(st.integers(0, count - 1))][column] = draw(NUMBER)
    if draw(st.booleans()):
        return ".jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    lines = [",".join(text_of(cell) for cell in row.values()) for row in rows]
    surplus = draw(st.sampled_from(["", ",", ",3"]))
    return ".csv", "\n".join(
        ["arrival,prompt,output,cached", lines[0] + surplus, *lines[1:]]
    )


@DRAWN
@given(
    file=requests(),
    rate=st.none() | st.sampled_from(["5", "1e6", "1e-6", "1e-300", "nan"]),
)
def test_traces(file: tuple[str, str], rate: str | None, tmp_path: Path) -> None:
    ending, text = file
    path = tmp_path / f"requests{ending}"
    path.write_text(text, encoding="utf-8")
    options = () if rate is None else ("--rate", rate)
    case = Case(
        f"{rate}: {text[:300]!r}", ("plan", *SERVED, "--requests", str(path), *options)
    )
    right(case, "traces")


@DRAWN
@given(
    rate=st.sampled_from(
        ["0.5", "30", "1e-6", "1e-300", "1e6", "inf", "-1", "9" * 400]
    ),
    gen_len=st.sampled_from(["1", "2", "300"]),
    limit=st.sampled_from(["--p95-tpot-ms", "--p95-ttft-ms", "--tpot-ms", "--ttft-ms"]),
    limit_ms=st.sampled_from(["1000", "100", "1e-9", "inf", "nan"]),
)
def test_rates(rate: str, gen_len: str, limit: str, limit_ms: str) -> None:
    options = (
        f"--rate={rate}",
        "--context",
        "512",
        "--gen-len",
        gen_len,
        limit,
        limit_ms,
    )
    right(Case(" ".join(options), ("plan", *SERVED, *options)), "rates")


@DRAWN
@given(
    column=st.sampled_from(
        [
            "tp",
            "output_len",
            "input_len",
            "concurrency",
            "tpot_p50_ms",
            "max_num_seqs",
            "engine",
        ]
    ),
    value=NUMBER,
    copies=st.sampled_from([1, 300]),
)
def test_tables_of_servers(
    column: str, value: Any, copies: int, tmp_path: Path
) -> None:
    row = {
        "engine": "vllm",
        "model": "llama-3.1-8b",
        "gpu": "h100-sxm-80gb",
        "tp": "1",
        "output_len": "20",
        "input_len": "100",
        "concurrency": "2",
        "tpot_p50_ms": "7",
        "max_num_seqs": "",
    }
    odd = row | {column: text_of(value)}
    lines = [",".join(cells.values()) for cells in (row, *(odd for _ in range(copies)))]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([",".join(row), *lines]), encoding="utf-8")
    right(
        Case(f"{column}={value!r}"[:300], ("validate", "traffic", str(path))), "tables"
    )


@pytest.fixture(scope="module")
def page() -> Iterator[ExplorerServer]:
    with ExplorerServer({}) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@DRAWN
@given(
    path=st.sampled_from(["/", "/plan.json"]),
    given_values=st.dictionaries(
        st.sampled_from([name for name in FIELDS if name != "rate"])
        | st.text(max_size=5),
        NUMBER.map(text_of),
        max_size=3,
    ),
)
def test_questions_to_the_page(
    page: ExplorerServer, path: str, given_values: dict[str, str]
) -> None:
    asked(page, f"{path}?{urlencode(given_values)}")


def is_one_line(text: str) -> bool:
    """Whether a page shows an error, or a text is one."""
    return 'class="error"' in text or text.count("\n") == 1


def asked(page: ExplorerServer, path: str) -> None:
    """Judge a question to the page, which is answered or refused in words within a minute."""
    memory = Memory()
    began = time.perf_counter()
    connection = http.client.HTTPConnection(
        "127.0.0.1", page.server_address[1], timeout=HANGS_S
    )
    code, fault, text = 2, "", ""
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
    except TimeoutError:
        fault = f"a hang: {path[:200]}"
    else:
        code = 0 if response.status == 200 else 2
        if response.status not in (200, 303, 400):
            fault = f"a traceback: status {response.status}: {path[:200]}"
        elif response.status == 400 and not is_one_line(text):
            fault = f"no line of an error: {path[:200]}"
    finally:
        connection.close()
    TALLIES.setdefault("page", Tally()).count(
        Verdict(code, fault), time.perf_counter() - began, memory.added_mib()
    )
    assert fault == ""


def test_a_planted_fault_of_a_load_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate that divides by the time of the first arrival."""
    path = tmp_path / "requests.csv"
    path.write_text("arrival,prompt,output\n0,100,10\n1e-300,100,10\n")
    case = Case("at once", ("plan", *SERVED, "--requests", str(path)))
    assert judge(case, "planted").fault == ""
    broken = property(lambda self: 1.0 / float(self.arrival_s[0]))
    monkeypatch.setattr(traffic_requests.Requests, "rate", broken)
    assert "a traceback" in judge(case, "planted").fault
