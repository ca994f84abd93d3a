"""The engine's own OpenAI server with the draft: it answers, and `observe` reads from its metrics what it did."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from magicdec.live.http import parse_address
from magicdec.live.metrics import choose_target, read_address
from magicdec.live.observation import Observation, ServedDraft, agreed, observe
from magicdec.live.profile import rates
from magicdec.reports.deployment import Deployment
from magicdec.reports.exports import write_settings
from magicdec.schema.plan import Site
from magicdec.schema.record import Record

NOT_SERVED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE")
START_S = 400.0
GAMMA, BUDGET, NUM_REQUESTS = 3, 256, 4


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server started by the command that is exported for a CPU."""
    from cases import MODEL
    from serving import ENVIRONMENT

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    best = Record(
        source="analytical", model="embedded", draft="self", draft_method="streamingllm", draft_budget=BUDGET,
        gamma=GAMMA, batch_size=8, context_len=1024, speedup=1.5, speedup_low=1.4, speedup_high=1.6,
    )  # fmt: skip
    deployment = Deployment(
        model="embedded", best=best, verdict="pays", bands=(), max_model_len=2048,
        site=Site(checkpoints={"embedded": str(MODEL)}, is_cpu=True), cache_bytes=2**28, weight_dtype="fp32",
    )  # fmt: skip
    text = [
        line.removesuffix("\\")
        for line in write_settings("vllm", deployment).splitlines()
    ]
    words = shlex.split(" ".join(line for line in text if not line.startswith("#")))
    command = [sys.executable, *words[1:], "--host", "127.0.0.1", "--port", str(port)]
    environment = {
        k: v for k, v in (os.environ | ENVIRONMENT).items() if k not in NOT_SERVED
    }
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address + "/health", process, log)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(url, timeout=5)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1.0)
        else:
            return
    raise AssertionError(log.read_text()[-2000:])


def test_the_server_answers_and_counts(address: str) -> None:
    """Long prompts, greedy: drafted tokens are accepted, the first position's more often than the third's."""
    from cases import MODEL, prompts

    body = {
        "model": str(MODEL),
        "prompt": prompts(3, 900),
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        address + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request, timeout=300))
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    assert answer["usage"]["completion_tokens"] == 120
    metrics = urllib.request.urlopen(address + "/metrics", timeout=60).read().decode()
    by_position = dict(
        re.findall(
            r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d)".*\} (\S+)$',
            metrics,
            re.M,
        )
    )
    (drafts,) = re.findall(
        r"^vllm:spec_decode_num_drafts_total\{.*\} (\S+)$", metrics, re.M
    )
    accepted = [float(by_position[str(position)]) for position in range(3)]
    assert (
        float(drafts) > accepted[0] >= accepted[1] >= accepted[2] > 0.3 * float(drafts)
    )


def observed(address: str, asked: list[int]) -> tuple[Observation, list[list[int]]]:
    """Streams requests of the same prompts, each with its own length, between two scrapes."""
    from cases import MODEL, prompts
    from streaming import stream_all

    where = parse_address(address)
    before = read_address(where)
    events = stream_all(
        address, prompts(NUM_REQUESTS, 900, seed=9), asked, model=str(MODEL)
    )
    for _ in range(100):  # an answer's last step may be counted after it was sent
        after = read_address(where)
        seen = observe([before, after], choose_target(after, None))
        if seen.counts.output_tokens == sum(map(sum, events)):
            break
        time.sleep(0.1)
    return seen, events


@pytest.fixture(scope="module")
def steps(address: str) -> tuple[Observation, np.ndarray]:
    """An observation, and the drafts accepted in every step by the streamed answers.

    vLLM also counts accepted tokens that a request's limit cuts off. Greedy answers repeat, so that a first run shows
    where steps end: the limits of the second are there. A reader that lagged gets two steps as one event, which shows
    in their number; then everything is done again.
    """
    _, earlier = observed(address, [80] * NUM_REQUESTS)
    for _ in range(8):
        whole = [events[:-1] for events in earlier]
        seen, events = observed(address, [sum(each) for each in whole])
        if (
            events == whole
            and sum(len(each) - 1 for each in events) == seen.counts.steps
        ):
            return seen, np.array(
                [tokens - 1 for each in events for tokens in each[1:]]
            )
        earlier = observed(address, [80] * NUM_REQUESTS)[1]
    raise AssertionError("the reader always lagged")


def test_observed_acceptance_is_that_of_the_streamed_answers(
    steps: tuple[Observation, np.ndarray],
) -> None:
    seen, accepted = steps
    assert seen.announced == ServedDraft(
        name="self", method="streamingllm", budget=BUDGET
    )
    assert (
        seen.counts.drafts == accepted.size > 50
    )  # a step of this draft has always one
    assert seen.counts.tokens_per_step == pytest.approx(1 + accepted.mean(), abs=1e-12)
    found = rates(seen, agreed(None, seen.announced))
    assert found is not None
    for position in range(1, GAMMA + 1):
        tried = int((accepted >= position - 1).sum())
        assert found.trials[position - 1] == tried
        assert found.rates[position - 1] == (accepted >= position).sum() / tried


def magicdec(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "magicdec", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300
    )


def test_the_profile_is_taken_for_plans_of_this_draft_only(
    address: str, tmp_path: Path
) -> None:
    """`observe` knows the draft from the server; a plan for another one refuses the profile with both names."""
    from cases import MODEL, prompts
    from streaming import stream_all

    profile = str(tmp_path / "acceptance.json")
    metrics = [tmp_path / "before.txt", tmp_path / "after.txt"]
    for number, path in enumerate(metrics):
        path.write_bytes(
            urllib.request.urlopen(address + "/metrics", timeout=60).read()
        )
        if number == 0:
            stream_all(
                address,
                prompts(NUM_REQUESTS, 900, seed=9),
                [40] * NUM_REQUESTS,
                model=str(MODEL),
            )
    done = magicdec(
        "observe", *map(str, metrics), "--model", "embedded", "-q", "-o", profile
    )
    assert done.returncode == 0, done.stderr
    assert "by StreamingLLM, budget 256, gamma 3" in done.stdout
    assert json.loads(Path(profile).read_text())["measured"][0]["budget"] == BUDGET
    plan = (
        "plan",
        "--model",
        "embedded",
        "--engine",
        "ours",
        "--batch",
        "4",
        "--context",
        "900",
    )
    taken = magicdec(
        *plan, "--draft", "self", "--draft-budget", str(BUDGET), "--acceptance", profile
    )
    assert taken.returncode == 0, taken.stderr
    for words, other in (
        (("--draft", "ngram"), "ngram"),
        (("--draft-method", "snapkv"), "snapkv"),
    ):
        refused = magicdec(*plan, *words, "--acceptance", profile)
        assert refused.returncode == 2
        assert "self (streamingllm)" in refused.stderr
        assert other in refused.stderr
    wrong = magicdec(
        "observe", *map(str, metrics), "--draft", "ngram", "--model", "embedded", "-q"
    )
    assert wrong.returncode == 2
    assert (
        "the server drafts with StreamingLLM, budget 256, not with n-gram"
        in " ".join(wrong.stderr.split())
    )
