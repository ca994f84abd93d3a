"""Trying gammas on a server that a command restarts; its step times and acceptance are known."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError, ServerError
from magicdec.live.advice import advise
from magicdec.live.http import parse_address
from magicdec.live.tune import (
    METRICS_POLL_S,
    GammaTrial,
    candidates,
    check_restart,
    in_turns,
    outcomes,
    regret,
    restart,
    try_gamma,
    try_in_turns,
)
from tests.live import servers
from tests.live.servers import Vllm, random_requests
from tests.live.test_advice import situation

RATES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, *(0.2,) * 6)


class Restarted:
    """A server whose gamma is what a file says, and which serves a batch before each scrape."""

    def __init__(self, path) -> None:
        self.path, self.gamma, self.scrapes = path, -1, 0
        self.engine = Vllm()

    def answer(self, handler) -> None:
        gamma = int(self.path.read_text())
        if gamma != self.gamma:
            self.gamma, self.engine = (
                gamma,
                Vllm(gamma=gamma or None, model="llama-3.1-8b"),
            )
        self.scrapes += 1
        for part in range(8):  # so many that two scrapes are enough
            self.engine.serve(
                random_requests(
                    8 * self.scrapes + part, number=8, gamma=gamma, rates=RATES
                )
            )
        handler.reply(self.engine.scrape().encode())


register_commands()


@pytest.fixture
def server(tmp_path, serve):
    (tmp_path / "gamma").write_text("3")
    _, address = serve({"/metrics": Restarted(tmp_path / "gamma").answer})
    return str(
        address
    ), f"{sys.executable} -c \"open('{tmp_path}/gamma', 'w').write('{{gamma}}')\""


def expected_tokens(gamma: int) -> float:
    total, product = 1.0, 1.0
    for rate in RATES[:gamma]:
        product *= rate
        total += product
    return total


def test_a_trial_measures_the_gamma_it_restarted_with(server):
    address, command = server
    for gamma in (0, 1, 5):
        trial = try_gamma(
            parse_address(address), command, gamma, seconds=1.0, interval_s=0.2
        )
        assert trial.tokens_per_step == pytest.approx(expected_tokens(gamma), rel=0.1)
        assert trial.tpot_s == pytest.approx(servers.STEP_S / trial.tokens_per_step)
        assert trial.batch_size == pytest.approx(8)


def test_the_best_the_one_in_use_and_close_ones_are_tried():
    advice = advise(situation())
    tried = candidates(advice)
    assert tried[0] == advice.best.gamma
    assert set(tried) >= {advice.best.gamma, advice.situation.gamma}
    assert len(tried) <= 3


def trial_of(gamma: int, tpot: float) -> GammaTrial:
    return GammaTrial(gamma=gamma, tpot_s=tpot, tokens_per_step=2.0, batch_size=8.0)


def test_regret_is_of_the_advised_one_and_repetitions_show_their_spread():
    times = {3: (1.1, 1.3), 2: (1.0, 1.0)}
    found = outcomes(
        [
            trial_of(gamma, times[gamma][n])
            for n in (0, 1)
            for gamma in in_turns((3, 2), 1)
        ]
    )
    assert [(each.gamma, each.low_s, each.high_s) for each in found] == [
        (3, 1.1, 1.3),
        (2, 1.0, 1.0),
    ]
    assert regret(found) == pytest.approx(0.2)
    assert found[0].spread == pytest.approx(0.1 / 1.2)
    assert regret(outcomes([trial_of(3, 1.0), trial_of(2, 1.5)])) == 0.0


def test_gammas_are_tried_there_and_back_until_the_time_is_up():
    """A drift over the trials cancels; no trial begins that would end too late, and each is told what is left."""
    assert in_turns((5, 2, 0), 3) == [5, 2, 0, 0, 2, 5, 5, 2, 0]
    now, lefts = [0.0], []

    def try_one(gamma: int, left: float) -> GammaTrial:
        lefts.append(left)
        now[0] += 30.0
        return trial_of(gamma, 1.0)

    done = list(
        try_in_turns(
            in_turns((5, 2, 0), 2), try_one, limit_s=100.0, clock=lambda: now[0]
        )
    )
    assert [trial.gamma for trial in done] == [5, 2, 0]
    assert lefts == [100.0, 70.0, 40.0]


@pytest.mark.parametrize("command", ["", "systemctl restart vllm"])
def test_a_command_without_a_place_for_gamma_is_refused(command):
    with pytest.raises(ConfigError, match="gamma"):
        check_restart(command)


def test_a_command_that_fails_stops_everything():
    with pytest.raises(ConfigError, match="status 3"):
        restart(f'{sys.executable} -c "raise SystemExit({{gamma}})"', 3)
    with pytest.raises(ConfigError, match="failed"):
        restart("/no/such/program {gamma}", 3)


@pytest.mark.slow
def test_the_command_tries_and_reports(server):
    """Steps of the made-up server cost the same for every gamma, so that the deepest tried is the best."""
    address, command = server
    words = [
        "tune",
        address,
        "--restart",
        command,
        "--model",
        "llama-3.1-8b",
        "--hardware",
        "a100-sxm-80gb",
        "--yes",
    ]
    done = CliRunner().invoke(
        app, [*words, "--draft", "eagle", "--seconds", "1", "--interval", "0.2"]
    )
    assert done.exit_code == 0, done.output
    assert "best of these: gamma" in done.stdout
    assert done.stdout.count("per token measured") in (4, 6)
    assert "it ends within 30 min" in done.stdout
    assert "repetitions differ by ±" in done.stdout


def test_the_result_is_one_document_on_stdout(server):
    """What it tells meanwhile is on stderr."""
    address, command = server
    words = [
        "tune",
        address,
        "--restart",
        command,
        "--model",
        "llama-3.1-8b",
        "--hardware",
        "a100-sxm-80gb",
        "--yes",
    ]
    words += [
        "--draft",
        "eagle",
        "--seconds",
        "0.4",
        "--interval",
        "0.2",
        "--repeats",
        "1",
        "--format",
        "json",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [trial["gamma"] for trial in document["trials"]] == document["planned"]
    assert document["advised"] == document["outcomes"][0]["gamma"]
    assert "it ends within" in done.stderr


def test_what_was_tried_is_shown_when_the_server_does_not_come_back(server, tmp_path):
    address, command = server
    write = command.split('"')[1]
    once = f"import os; os.mkdir('{tmp_path}/once'); {write}"
    words = ["tune", address, "--restart", f'{sys.executable} -c "{once}"', "--model", "llama-3.1-8b", "--hardware",
             "a100-sxm-80gb", "--yes", "--draft", "eagle", "--seconds", "0.4", "--interval", "0.2"]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert "status 1" in str(done.exception)
    assert "it ended after 1 of" in done.stdout
    assert "best of these: gamma" in done.stdout


def test_a_trial_ends_in_the_time_it_is_given(server):
    command = f'{sys.executable} -c "import time; time.sleep(60)#{{gamma}}"'
    with pytest.raises(ConfigError, match="timed out"):
        try_gamma(
            parse_address(server[0]),
            command,
            1,
            seconds=0.4,
            interval_s=0.2,
            limit_s=3.0,
        )


def test_a_server_without_load_cannot_be_tuned(serve):
    idle = Vllm().scrape().encode()
    _, address = serve({"/metrics": lambda handler: handler.reply(idle)})
    with pytest.raises(ServerError, match="no load"):
        try_gamma(
            address,
            f"{sys.executable} -c pass#{{gamma}}",
            1,
            seconds=0.4,
            interval_s=0.2,
        )


@pytest.mark.parametrize(("gamma", "drafted"), [(5, 3), (0, 3)])
def test_a_command_that_starts_another_gamma_is_refused(server, gamma, drafted):
    """What was tried would be something else than what is reported."""
    address, command = server
    other = command.replace("{gamma}", str(drafted)) + " #{gamma}"
    with pytest.raises(
        ConfigError, match=f"gamma {gamma} the server drafts {drafted} tokens"
    ):
        try_gamma(parse_address(address), other, gamma, seconds=1.0, interval_s=0.2)


def test_a_process_that_was_there_before_is_not_observed(serve):
    """A restart that returns early leaves the old process answering for a while; the load then takes a moment too."""
    old, new = Vllm(gamma=2), Vllm(gamma=4)
    polled = []

    def answer(handler) -> None:
        polled.append(handler.path)
        late, busy = len(polled) > 3, len(polled) > 6
        for part in range(8):
            if busy or not late:
                gamma = 4 if late else 2
                (new if late else old).serve(
                    random_requests(
                        len(polled) * 8 + part, number=8, gamma=gamma, rates=RATES
                    )
                )
        text = (
            new if late else old
        ).scrape() + f"process_start_time_seconds {2.0 if late else 1.0}\n"
        handler.reply(text.encode())

    _, address = serve({"/metrics": answer})
    slept = []
    trial = try_gamma(
        address, f"{sys.executable} -c pass#{{gamma}}", 4,
        seconds=1.0, interval_s=0.5, sleep=slept.append,
    )  # fmt: skip
    assert trial.tokens_per_step == pytest.approx(expected_tokens(4), rel=0.1)
    assert slept.count(METRICS_POLL_S) >= 2  # for the old process to go
