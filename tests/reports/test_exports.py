"""Exports for serving engines: the exact text, and that no batch size is left without a gamma."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_reports import plan

from magicdec.errors import ConfigError
from magicdec.reports.exports import VERSIONS, batch_bands, draft_len_schedule, export

GOLDEN = Path(__file__).parent / "golden"
DRAFTS: dict[str, dict[str, Any]] = {
    "sparse-self": {},
    "draft-model": {
        "draft": "llama-3.2-1b", "draft_method": "full", "draft_budget": None, "tp_size": 8, "draft_tp_size": 1,
    },
    "sparse-draft": {"draft": "tinyllama-1.1b", "draft_method": "streamingllm", "draft_budget": 512},
    "ngram": {"draft": "ngram", "draft_method": "ngram", "draft_budget": None},
    "eagle": {"draft": "eagle-head", "draft_method": "eagle", "draft_budget": None},
    "off": {"draft": "none", "draft_method": "none", "draft_budget": None, "gamma": 0, "speedup": 1.0},
}  # fmt: skip


def sample(name: str) -> dict[str, Any]:
    """A plan of fixed numbers with the named draft, whose best gamma falls again at the greatest batch."""
    document = plan()
    document["best"] |= {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6} | DRAFTS[name]
    document["gamma_table"] |= {
        "batch_sizes": [1, 4, 16, 32, 64],
        "context_lens": [512, 4096],
        "gamma": [[0, 0], [0, 2], [1, 3], [1, 3], [0, 1]],
        "speedup": [[1, 1], [1, 1.2], [1.1, 1.4], [1.1, 1.5], [1, 1.2]],
    }
    return document


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("engine", VERSIONS)
def test_the_text_is_as_agreed(engine: str, draft: str) -> None:
    assert export(engine, sample(draft)) == (GOLDEN / f"{engine}-{draft}.txt").read_text()


@pytest.mark.parametrize("draft", ["draft-model", "ngram", "eagle"])
def test_vllm_reads_back_the_plan(draft: str) -> None:
    """A shell splits the command into the words that vLLM's own rules accept."""
    command = "".join(line for line in export("vllm", sample(draft)).splitlines(True) if not line.startswith("#"))
    words = shlex.split(command)
    config = json.loads(words[words.index("--speculative-config") + 1])
    bands = config["num_speculative_tokens_per_batch_size"]
    assert bands == [[1, 3, 0], [4, 15, 2], [16, 63, 3], [64, 64, 1]]
    assert all(gamma <= config["num_speculative_tokens"] for _, _, gamma in bands)
    assert bands[0][0] == 1
    assert all(a[1] + 1 == b[0] for a, b in pairwise(bands))


@given(
    gammas=st.lists(st.integers(0, 8), min_size=1, max_size=8),
    steps=st.lists(st.integers(1, 40), min_size=8, max_size=8),
)
def test_every_batch_size_has_the_gamma_of_the_table(gammas: list[int], steps: list[int]) -> None:
    """Looked up row by row: the row of the greatest tabulated batch size that is not above the batch."""
    batches = [sum(steps[: i + 1]) for i in range(len(gammas))]
    document = sample("draft-model")
    document["gamma_table"] = {"batch_sizes": batches, "context_lens": [4096], "gamma": [[g] for g in gammas]}
    bands = batch_bands(document, 4096)
    for batch in range(1, batches[-1] + 1):
        (gamma,) = [g for start, end, g in bands if start <= batch <= end]
        rows = [g for b, g in zip(batches, gammas, strict=True) if b <= batch]
        assert gamma == (rows[-1] if rows else gammas[0])
    schedule, changed = draft_len_schedule(bands)
    assert schedule[1] == max(gammas), "the engine refuses anything else"
    for batch in range(1, batches[-1] + 1):
        told = schedule[max(key for key in schedule if key <= batch)]
        (wanted,) = [g for start, end, g in bands if start <= batch <= end]
        assert told == wanted or (changed and told == max(gammas))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"best": None}, "no best configuration"),
        ({"best": plan()["best"] | {"fits": False}}, "does not fit"),
        ({"best": plan()["best"] | {"gamma": -1}}, "gamma"),
        ({"best": plan()["best"] | {"speedup": float("nan")}}, "speedup is nan"),
        ({"best": plan()["best"] | {"draft": "a\nrm -rf /"}}, "cannot be written into a command"),
        ({"gamma_table": {"batch_sizes": [4, 1], "context_lens": [1], "gamma": [[1], [1]]}}, "rising order"),
        ({"gamma_table": {"batch_sizes": [1], "context_lens": [], "gamma": [[]]}}, "gamma_table"),
        ({"gamma_table": {"batch_sizes": [1], "context_lens": [1], "gamma": [["x"]]}}, "gamma_table"),
        ({"kind": "record"}, "not a plan document"),
    ],
)
def test_an_invalid_plan_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export("vllm", sample("draft-model") | change)


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean sglang"):
        export("sgLan", plan())


def test_a_hostile_model_name_stays_one_word() -> None:
    document = sample("draft-model") | {"model": "m; echo 'x'"}
    command = "".join(line for line in export("vllm", document).splitlines(True) if not line.startswith("#"))
    assert shlex.split(command)[2] == "m; echo 'x'"
