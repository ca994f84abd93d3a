"""Replays of draft models against transformers, and against what the runtime accepts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from magicdec.errors import ConfigError
from magicdec.logs.draft_model import ModelReplay, step_runs
from magicdec.logs.lookups import DRAFT_MODEL, Lookup
from magicdec.logs.profiles import profiles_of
from magicdec.logs.replay import replay_draft_model
from magicdec.perfmodel.acceptance import load_profile
from magicdec.specs.catalog import EMBEDDED_DIRECTORY
from tests.processes import Program
from tests.runtime.families import FAMILIES, write_checkpoint

GAMMAS = (1, 2, 4, 7)
LOOKUPS = [Lookup(rule=DRAFT_MODEL, gamma=gamma) for gamma in GAMMAS]
SAMPLES = Path(__file__).parents[2] / "docs" / "samples" / "requests.jsonl"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("draft"), FAMILIES["llama-gqa-tied"]
    )


def texts(checkpoint: Path) -> list[tuple[list[int], int]]:
    """Texts that the model continues greedily at most places and at random at others, with the prompts' lengths."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    rng = np.random.default_rng(1)
    made = []
    for prompt_len in (3, 9, 20):
        text = rng.integers(0, 96, size=prompt_len).tolist()
        with torch.no_grad():
            while len(text) < prompt_len + 40:
                likeliest = int(model(torch.tensor([text])).logits[0, -1].argmax())
                text.append(
                    likeliest if rng.random() < 0.75 else int(rng.integers(0, 96))
                )
        made.append((text, prompt_len))
    return made


@pytest.mark.slow
def test_one_prefill_gives_the_steps_of_every_gamma(checkpoint: Path) -> None:
    """Each step accepts as many drafts as transformers' greedy continuation of the text so far agrees with the log."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    replay = ModelReplay(str(checkpoint), LOOKUPS)
    for text, prompt_len in texts(checkpoint):
        steps, counts = replay.replay(np.array(text, dtype=np.int32), prompt_len)
        for number, gamma in enumerate(GAMMAS):
            place = prompt_len
            expected = []
            while place < len(text) - 1:
                drafted = model.generate(
                    torch.tensor([text[: place + 1]]),
                    max_new_tokens=gamma,
                    do_sample=False,
                    use_cache=False,
                )[0, place + 1 :].tolist()
                rest = text[place + 1 :]
                accepted = 0
                while (
                    accepted < min(gamma, len(rest))
                    and drafted[accepted] == rest[accepted]
                ):
                    accepted += 1
                expected.append((place, gamma, accepted))
                place += accepted + 1
            assert [
                tuple(row) for row in steps[number, : counts[number]].tolist()
            ] == expected


def test_runs_are_cut_near_the_engine_s_longest_sequence() -> None:
    """Drafts never reach beyond it."""
    steps = np.zeros((1, 10, 3), dtype=np.int32)
    counts = step_runs(
        np.ones(10, dtype=bool), 2, np.array([4], dtype=np.int32), 11, steps
    )
    assert steps[0, : counts[0]].tolist() == [[2, 4, 4], [7, 2, 2]]


@given(
    matches=st.lists(st.booleans(), min_size=1, max_size=30),
    prompt_len=st.integers(0, 9),
    gammas=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    max_len=st.integers(0, 34),
)
def test_steps_follow_the_runs_of_matches(
    matches: list[bool], prompt_len: int, gammas: list[int], max_len: int
) -> None:
    """Token by token; none is drafted that would be the last of the engine's longest sequence, or
    stand beyond it, and a step without a draft emits one all the same."""
    size = len(matches)
    steps = np.zeros((len(gammas), size, 3), dtype=np.int32)
    counts = step_runs(
        np.array(matches), prompt_len, np.array(gammas, np.int32), max_len, steps
    )
    for number, gamma in enumerate(gammas):
        expected = []
        place = prompt_len
        while place < size:
            room = gamma if max_len == 0 else max_len - place - 2
            drafted = min(gamma, room) if room > 0 else 0
            accepted = 0
            while (
                accepted < drafted
                and place + accepted < size
                and matches[place + accepted]
            ):
                accepted += 1
            expected.append([place, drafted, accepted])
            place += accepted + 1
        assert steps[number, : counts[number]].tolist() == expected


def test_a_token_outside_the_draft_s_vocabulary_is_refused(checkpoint: Path) -> None:
    """The draft is not of this target."""
    with pytest.raises(ConfigError, match="needs its target's vocabulary"):
        ModelReplay(str(checkpoint), LOOKUPS).matches(
            np.array([1, 4000], dtype=np.int32)
        )


def test_a_model_accepts_all_of_its_own_greedy_outputs(
    tmp_path: Path, program: Program
) -> None:
    """A log of transformers' greedy outputs, replayed with the same model as the draft."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        EMBEDDED_DIRECTORY, dtype=torch.float32
    ).eval()
    rows = []
    for line in SAMPLES.read_text().splitlines()[:4]:
        prompt = json.loads(line)["prompt_token_ids"]
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=30, do_sample=False
        )[0].tolist()
        rows.append({"prompt": prompt, "output": whole[len(prompt) :]})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = program(
        "profile-acceptance", "--outputs", str(tmp_path / "log.jsonl"), "--draft", "embedded",
        "-o", str(tmp_path / "own.toml"), "--gammas", "1,3,5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    profile = load_profile(tmp_path / "own.acceptance.embedded.full.json")
    assert (profile.draft, profile.draft_method) == ("embedded", "full")
    assert profile.replay is not None
    assert profile.replay.setting.rates == [1.0] * 3
    assert profile.drafted_share == 1.0


def test_a_text_longer_than_the_draft_reads_is_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    """It is counted as not read, and the others are replayed."""
    rows = [
        {"prompt": [1] * 600, "output": [2, 3, 4]},
        {"prompt": [1, 5], "output": [2, 3, 4, 1, 2]},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    replay = replay_draft_model(
        [tmp_path / "log.jsonl"], ModelReplay(str(checkpoint), LOOKUPS), LOOKUPS
    )
    assert replay.account.unreadable == {
        "longer than the 512 tokens that the draft model reads": 1
    }
    profile = profiles_of(replay, model="m", dataset="d", draft="x")[0]
    assert profile.replay is not None
    assert profile.replay.requests == 1
