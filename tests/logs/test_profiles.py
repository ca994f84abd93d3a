"""Counts of replays and the profiles made of them."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import magicdec
from magicdec.counts import clustered_stderr, rate_and_error
from magicdec.errors import ConfigError
from magicdec.logs.lookups import lookup
from magicdec.logs.ngram import NgramReplay
from magicdec.logs.profiles import profiles_of, sweep
from magicdec.logs.replay import replay_logs
from magicdec.logs.tally import Tally
from magicdec.perfmodel.acceptance import (
    MeasuredProfile,
    ReplayedProfile,
    load_profile,
    save_profile,
)
from tests.logs.plain_rules import ngram_steps
from tests.processes import Program

DATA = Path(__file__).parents[1] / "data" / "logs"
GREEDY = DATA / "ng3_24_greedy.json.gz"
LOOKUPS = [
    lookup("ngram", gamma=3, min_ngram=2, max_ngram=4),
    lookup("ngram", gamma=5),
    lookup("suffix", gamma=8),
]


def rows_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return list(json.load(file)["rows"])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The requests of a run as JSON lines of token ids."""
    path = tmp_path_factory.mktemp("log") / "requests.jsonl"
    lines = [
        json.dumps({"prompt": row["prompt"], "output": row["output"]})
        for row in rows_of(GREEDY)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def profile(log: Path) -> ReplayedProfile:
    return profiles_of(
        replay_logs([log], sweep(["ngram"])), model="embedded", dataset="requests"
    )[0]


def test_counts_are_those_of_the_steps(log: Path) -> None:
    """Tokens per step, drafted tokens and rates by position follow from plain steps; standard errors are those of
    ratios over requests."""
    setting = replay_logs([log], LOOKUPS[:1]).settings[0]
    steps = []
    for row in rows_of(GREEDY):
        text = row["prompt"] + row["output"]
        taken = ngram_steps("ngram", text, len(row["prompt"]), 3, 2, 4)
        if taken:
            steps.append((len(text) - 1, taken))
    emitted = np.array(
        [sum(min(a + 1, end - place) for place, _, a in taken) for end, taken in steps]
    )
    number = np.array([len(taken) for _, taken in steps])
    value = emitted.sum() / number.sum()
    stderr = clustered_stderr(emitted.astype(float), number.astype(float))
    tokens = setting.tokens_per_step
    assert tokens.value == pytest.approx(value, rel=1e-12)
    assert tokens.stderr == pytest.approx(stderr, rel=1e-9)
    assert setting.drafted_tokens == sum(
        drafted for _, taken in steps for _, drafted, _ in taken
    )
    assert (
        setting.drafted_share
        == sum(d > 0 for _, taken in steps for _, d, _ in taken) / number.sum()
    )
    for position in range(3):
        tried = np.array(
            [
                sum(a >= position and place + position < end for place, _, a in t)
                for end, t in steps
            ]
        )
        accepted = np.array(
            [sum(a > position for _, _, a in taken) for _, taken in steps]
        )
        rate, error = rate_and_error(accepted.astype(float), tried.astype(float))
        assert setting.rates[position].value == pytest.approx(rate, rel=1e-12)
        assert setting.rates[position].stderr == pytest.approx(error, rel=1e-9)


def test_ranges_hold_every_step_once(log: Path) -> None:
    """By context and by place in the output, steps and tokens add up to all."""
    for setting in replay_logs([log], LOOKUPS).settings:
        for table in (setting.by_context, setting.by_output):
            assert table.sum(axis=0).tolist() == setting.totals[:4].tolist()
        assert (
            setting.context_positions[:, :, 1].sum(axis=0).tolist()
            == setting.positions[:, 1].tolist()
        )


def test_shards_add_up_to_the_profile_of_one_pass(log: Path, tmp_path: Path) -> None:
    """Several files, read by several processes, give the same profile to the last digit."""
    whole = profiles_of(replay_logs([log], LOOKUPS), model="m", dataset="d")
    lines = log.read_text().splitlines(keepends=True)
    for number in range(4):
        (tmp_path / f"part{number}.jsonl").write_text(
            "".join(lines[40 * number : 40 * number + 40])
        )
    split = replay_logs([tmp_path / "part*.jsonl"], LOOKUPS, jobs=2)
    assert profiles_of(split, model="m", dataset="d") == whole


@pytest.mark.slow
def test_two_dask_workers_give_the_profile_of_one_pass(
    log: Path, tmp_path: Path
) -> None:
    """joblib's backend is the caller's: here two local processes of Dask."""
    joblib = pytest.importorskip("joblib")
    distributed = pytest.importorskip("distributed")
    whole = profiles_of(replay_logs([log], LOOKUPS), model="m", dataset="d")
    lines = log.read_text().splitlines(keepends=True)
    for number in range(4):
        (tmp_path / f"part{number}.jsonl").write_text(
            "".join(lines[40 * number : 40 * number + 40])
        )
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    )
    with cluster, distributed.Client(cluster), joblib.parallel_config(backend="dask"):
        split = replay_logs([tmp_path / "part*.jsonl"], LOOKUPS, jobs=2)
    assert profiles_of(split, model="m", dataset="d") == whole


def test_a_profile_gives_the_tokens_of_every_gamma(
    profile: ReplayedProfile, tmp_path: Path
) -> None:
    """Tokens per step are the replayed ones at each gamma, with their errors; a file gives it back."""
    setting = profile.replay.setting
    gammas = np.array(setting.gammas)
    expected, _ = profile.tokens_per_step(budget=100, context=300, gamma=gammas)
    assert expected == pytest.approx(setting.tokens_per_step)
    errors = profile.tokens_error(budget=100, context=300, gamma=gammas)
    assert errors == pytest.approx(
        np.array(setting.tokens_stderr) / setting.tokens_per_step
    )
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize("num_requests", [1, 40])
def test_a_settings_errors_are_those_counted_and_of_one_request_half(
    log: Path, tmp_path: Path, num_requests: int
) -> None:
    """One request tells no spread: a rate is as uncertain as it can be."""
    lines = log.read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:num_requests]))
    counted = replay_logs([tmp_path / "few.jsonl"], LOOKUPS[:1])
    (profile,) = profiles_of(counted, model="m", dataset="d")
    setting = profile.replay.setting
    of_rates = counted.settings[0].rates
    assert setting.rates == [rate.value for rate in of_rates]
    assert setting.trials == [rate.trials for rate in of_rates]
    if num_requests == 1:
        assert setting.stderr == [0.5] * len(of_rates)
        gained = counted.settings[0].tokens_per_step.value - 1.0
        assert setting.tokens_stderr == [pytest.approx(0.5 * max(gained, 0.1))]
    else:
        assert setting.stderr == [rate.stderr for rate in of_rates]
        assert 0.0 < max(setting.stderr) < 0.5


def test_the_law_of_a_profile_gives_the_tokens_at_the_gamma_it_shows(
    profile: ReplayedProfile,
) -> None:
    """Its rates by position are those of the shown gamma; its error is that of the tokens per step."""
    gamma = profile.replay.gamma
    setting = profile.replay.setting
    place = setting.gammas.index(gamma)
    rates = profile.law.conditional_rates(budget=100.0, context=300.0, gamma_max=gamma)
    tokens = 1.0 + np.cumprod(rates).sum()
    # the last step of an output is cut by its end, which rates leave out
    assert tokens == pytest.approx(setting.tokens_per_step[place], rel=0.05)
    shifted = [
        1.0
        + np.cumprod(
            profile.conditional_rates(
                budget=100, context=300, gamma_max=gamma, num_sigma=s
            )
        ).sum()
        for s in (-1.0, 1.0)
    ]
    relative = (shifted[1] - shifted[0]) / sum(shifted)
    assert relative == pytest.approx(
        setting.tokens_stderr[place] / setting.tokens_per_step[place], rel=1e-3
    )


def test_requests_for_five_percent_follow_from_the_spread_over_requests() -> None:
    """With four times the requests the error halves, and the number that is needed stays."""
    tally = Tally.empty(LOOKUPS[:1])
    replay = NgramReplay(LOOKUPS[:1])
    rng = np.random.default_rng(0)
    needed = []
    for number in range(1, 1601):
        text = rng.integers(0, 3 + number % 5, size=80).astype(np.int32)
        steps, counts = replay.replay(text, 20)
        tally.add(steps, counts, text_len=80, prompt_len=20)
        if number in (400, 1600):
            needed.append(tally.of(0).requests_for(0.05))
    assert needed[0] is not None
    assert needed[1] == pytest.approx(needed[0], rel=0.2)
    ratio = tally.of(0).tokens_per_step
    assert ratio.stderr is not None
    assert needed[1] == math.ceil(
        1600 * (1.959963984540054 * ratio.stderr / ratio.value / 0.05) ** 2
    )


def test_the_command_writes_profiles_that_a_plan_takes(
    log: Path, tmp_path: Path, program: Program
) -> None:
    """`profile-acceptance --outputs` reads a log without a model; `plan --acceptance` ranks the look-up by it."""
    done = program(
        "profile-acceptance", "--outputs", str(log), "--model", "llama-3.1-8b", "-o", str(tmp_path / "own.toml"),
        "--draft", "ngram,suffix", "--jobs", "1",
    )  # fmt: skip
    assert done.returncode == 0
    assert "read 160 requests of 1 file (160 token ids)" in done.stdout
    paths = [tmp_path / f"own.acceptance.{draft}.json" for draft in ("ngram", "suffix")]
    for path in paths:
        plan = magicdec.plan(
            model="llama-3.1-8b", hardware="h100-sxm-80gb", tp=1, context=4096, batch=4,
            draft=load_profile(path).draft, acceptance=[path],
        )  # fmt: skip
        assert plan.best.drafting.tokens_per_step > 1.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "eagle3"], "reads the target's hidden states"),
        (["--draft", "streamingllm"], "leave --outputs out"),
        (
            ["--draft", "ngram", "--lookup-min", "6", "--lookup-max", "2"],
            "no longest n-gram",
        ),
        (["--draft", "suffix", "--lookup-min", "2"], "no shortest or longest n-gram"),
    ],
)
def test_drafts_that_a_log_cannot_tell_say_what_is_needed(
    arguments: list[str], message: str, log: Path, program: Program
) -> None:
    """One line, and exit code 2."""
    done = program("profile-acceptance", "--outputs", str(log), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_options_of_logs_need_logs(program: Program) -> None:
    """Given without --outputs they are refused rather than ignored."""
    done = program("profile-acceptance", "--lookup-max", "4")
    assert done.returncode == 2
    assert "--lookup-max goes with --outputs" in done.stderr


def test_nothing_of_a_log_s_text_is_written(tmp_path: Path, program: Program) -> None:
    """Neither the profiles, nor what is printed, nor an error holds a word of the logged texts."""
    words = ["sesquipedalian", "antediluvian", "xylographic", "perspicacious"]
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    trained = tokenizers.Tokenizer(model)
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trained.save(str(tmp_path / "tokenizer.json"))
    lines = [
        {"prompt": " ".join(words), "completion": " ".join(words[:3] * 5)}
        for _ in range(4)
    ]
    lines.append({"prompt": words[0], "messages": words[1]})
    lines.append({"unheard": {words[2]: words[3]}})
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + words[0] + "\n"
    )
    done = program(
        "profile-acceptance", "--outputs", str(tmp_path / "log.jsonl"), "--tokenizer", str(tmp_path),
        "-o", str(tmp_path / "out" / "own.toml"), "--jobs", "1",
    )  # fmt: skip
    assert done.returncode == 0
    assert "not read: 3 of 7 rows" in done.stdout or done.stdout.count("not read") >= 2
    written = [path.read_text() for path in (tmp_path / "out").iterdir()]
    assert len(written) == 2
    for text in (*written, done.stdout, done.stderr):
        assert not any(word in text for word in words)


def test_a_log_without_a_request_is_refused(tmp_path: Path) -> None:
    """The error says what was most often wrong, and where."""
    (tmp_path / "log.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(
        ConfigError, match=r"1 times text, which needs --tokenizer \(log.jsonl line 1\)"
    ):
        replay_logs([tmp_path / "log.jsonl"], LOOKUPS)
    (tmp_path / "one.jsonl").write_text('{"prompt": [1], "output": [2]}\n')
    with pytest.raises(ConfigError, match="no logged output has two tokens"):
        profiles_of(
            replay_logs([tmp_path / "one.jsonl"], LOOKUPS), model="m", dataset="d"
        )


def test_reading_logs_does_not_import_torch() -> None:
    """The replays run where the extra `logs` alone is installed."""
    import subprocess
    import sys

    code = (
        "import sys; from magicdec.logs import replay, profiles, tokens; "
        "print(sorted({'torch', 'pandas', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\[\]", done.stdout.strip())


def test_a_plan_chooses_the_setting_and_its_export_writes_it(
    log: Path, tmp_path: Path
) -> None:
    """Of the replayed settings a plan takes the fastest on its device; each alone is no faster."""
    from magicdec.reports.exports import export

    replayed = replay_logs([log], sweep(["ngram"], gammas=(1, 2, 3, 4, 8)))
    profile = profiles_of(replayed, model="llama-3.1-8b", dataset="requests")[0]
    asked: dict[str, Any] = {
        "model": "llama-3.1-8b", "hardware": "h100-sxm-80gb", "tp": 1, "context": 4096, "batch": 32, "draft": "ngram",
    }  # fmt: skip

    def fastest(own: ReplayedProfile, name: str) -> Any:
        save_profile(own, tmp_path / name)
        plan = magicdec.plan(**asked, acceptance=[tmp_path / name])
        row = max(
            (row for row in plan.rows if row.draft == "ngram"),
            key=lambda row: row.speedup,
        )
        return plan, row

    plan, row = fastest(profile, "all.json")
    lengths = [
        (setting.min_ngram, setting.max_ngram) for setting in profile.replay.settings
    ]
    chosen = lengths.index((row.drafting.lookup_min, row.drafting.lookup_max))
    for place in profile.replay.leading:
        setting = profile.with_setting(place)
        alone = setting.replay.settings[place]
        single = with_settings(setting, [alone])
        _, other = fastest(single, f"{place}.json")
        assert other.speedup <= row.speedup * (1 + 1e-9)
        if place == chosen:
            assert other.speedup == pytest.approx(row.speedup)
    if plan.best.draft == "ngram":
        written = export("vllm", plan)
        assert (
            f'"prompt_lookup_min": {row.drafting.lookup_min}, "prompt_lookup_max": {row.drafting.lookup_max}'
            in written
        )


def with_settings(profile: ReplayedProfile, settings: list[Any]) -> ReplayedProfile:
    """A profile with these settings alone."""
    import msgspec

    replay = msgspec.structs.replace(profile.replay, settings=settings, chosen=0)
    return msgspec.structs.replace(profile, replay=replay)


def test_a_plan_prices_the_tokens_that_steps_really_draft(
    profile: ReplayedProfile,
) -> None:
    """Mean drafted tokens of all steps are those of the replay at each gamma; a profile without one drafts gamma."""
    setting = profile.replay.setting
    gammas = np.array(setting.gammas)
    drafted = profile.draft_len_at(gammas) * profile.drafted_share_at(gammas)
    assert drafted == pytest.approx(setting.drafted_per_step)
    assert np.all(profile.draft_len_at(gammas) <= gammas)
    plain = MeasuredProfile(
        draft_method="ngram", model="m", law=profile.law, drafted_share=0.4
    )
    assert plain.draft_len_at(gammas).tolist() == gammas.tolist()
    assert float(plain.drafted_share_at(3)) == 0.4
