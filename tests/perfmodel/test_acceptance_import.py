"""Files of engines and studies: each gives the counts of the same steps, which are counted here by themselves."""

from __future__ import annotations

import json

import numpy as np
import pytest

from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import files
from magicdec.perfmodel.acceptance.files import read_acceptance
from magicdec.perfmodel.acceptance.fit import measured_rates, measurements_of

GAMMA = 4
RATES = np.array([0.8, 0.75, 0.7, 0.65])


@pytest.fixture
def sequences() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [
        [int(np.cumprod(rng.random(GAMMA) < RATES).sum()) for _ in range(50)]
        for _ in range(12)
    ]


def counted(sequences: list[list[int]]) -> list[float]:
    lengths = np.array([each for sequence in sequences for each in sequence])
    return [
        float((lengths >= i).sum() / (lengths >= i - 1).sum())
        for i in range(1, GAMMA + 1)
    ]


def survival(sequences: list[list[int]]) -> list[float]:
    lengths = np.array([each for sequence in sequences for each in sequence])
    return [float((lengths >= i).mean()) for i in range(1, GAMMA + 1)]


def trace(sequences: list[list[int]]) -> str:
    return "\n".join(
        json.dumps({"accepted_lengths": each, "id": 3}) for each in sequences
    )


def bare_trace(sequences: list[list[int]]) -> str:
    return "\n".join(json.dumps(each) for each in sequences) + "\n"


def sglang(
    sequences: list[list[int]], name: str = "spec_correct_drafts_histogram"
) -> str:
    answers = [
        {"text": "", "meta_info": {name: np.bincount(each).tolist()}}
        for each in sequences
    ]
    return "\n".join(json.dumps(each) for each in answers)


def older_sglang(sequences: list[list[int]]) -> str:
    return sglang(sequences, "spec_accept_histogram")


def vllm_answers(sequences: list[list[int]], around: str = "{}") -> str:
    """Answers of vLLM 0.29 and later, with counts of each request."""
    lines = []
    for each in sequences:
        told = {
            "acceptance_histogram": np.bincount(each, minlength=GAMMA + 1).tolist(),
            "num_spec_steps": len(each),
            "num_spec_tokens": GAMMA,
        }
        answer = {"choices": [{"text": ""}], "metrics": {"speculative_decoding": told}}
        lines.append(around.replace("{}", json.dumps(answer)))
    return "\n".join(lines)


def proxied_answers(sequences: list[list[int]]) -> str:
    return vllm_answers(sequences, '{"id": "1", "data": [{"response": {}}]}')


@pytest.mark.parametrize(("write", "kind", "exact"), [
    (trace, "trace", 1e-12), (bare_trace, "trace", 1e-12), (vllm_answers, "vLLM answers", 1e-12),
    (proxied_answers, "vLLM answers", 1e-12), (sglang, "SGLang answers", 1e-12),
    (older_sglang, "SGLang answers", 1e-12),
])  # fmt: skip
def test_each_format_gives_the_rates_of_the_steps(
    write, kind, exact, sequences, tmp_path
):
    (tmp_path / "file").write_text(write(sequences))
    found = read_acceptance(tmp_path / "file")
    assert found.kind == kind
    (rates,) = measured_rates(
        measurements_of(found.counts, draft_method="eagle", budget=1000, context=1000)
    )
    assert rates.rates == pytest.approx(counted(sequences), abs=exact)
    assert found.counts.steps.sum() == pytest.approx(600, rel=0.01)


def test_a_given_gamma_adds_positions_that_were_never_accepted(tmp_path):
    (tmp_path / "trace.jsonl").write_text("[0, 1, 1, 0]\n")
    rows = measurements_of(
        read_acceptance(tmp_path / "trace.jsonl", gamma=2).counts,
        draft_method="ngram",
        budget=100,
        context=100,
    )
    assert [(row.position, row.trials, row.accepted) for row in rows] == [
        (1, 4.0, 2.0),
        (2, 2.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("hello\n", "line 1 is not JSON"),
        (
            '{"acceptance_histogram": [1, 2, 3], "num_spec_tokens": 1}',
            "at most 1 accepted",
        ),
        ('{"a": 1}\n', "is no trace"),
        ("[1, -1]\n", "whole numbers"),
        ("[1, 2.5]\n", "whole numbers"),
        ("[1]\n[1, true]\n", "line 2"),
        ('{"accepted_lengths": [1]}\n{"other": []}\n', "line 2: no 'accepted_lengths'"),
    ],
)
def test_what_is_no_acceptance_is_refused_with_its_line(text, said, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_acceptance(tmp_path / "file")


def test_a_gamma_below_what_was_accepted_is_refused(tmp_path):
    (tmp_path / "file").write_text("[3, 1]\n")
    with pytest.raises(ConfigError, match="3 accepted drafts, more than gamma 2"):
        read_acceptance(tmp_path / "file", gamma=2)


@pytest.mark.parametrize("write", [trace, vllm_answers, sglang])
def test_a_files_deepest_step_bounds_its_gamma(write, sequences, tmp_path) -> None:
    """Of every format: what a step accepted was drafted."""
    path = tmp_path / "file"
    path.write_text(write([*sequences, [GAMMA]]))
    for gamma in (None, GAMMA):
        assert len(read_acceptance(path, gamma=gamma).counts.rates) == GAMMA
    with pytest.raises(ConfigError, match=f"{GAMMA} accepted drafts, more than gamma"):
        read_acceptance(path, gamma=GAMMA - 1)


@pytest.mark.parametrize("write", [trace, sglang])
def test_as_many_positions_are_read_as_a_law_has(write, tmp_path) -> None:
    path = tmp_path / "file"
    path.write_text(write([[64, 0]]))
    assert len(read_acceptance(path).counts.rates) == 64
    path.write_text(write([[65, 0]]))
    with pytest.raises(ConfigError, match="up to 65 accepted drafts; 1 to 64 are read"):
        read_acceptance(path)


def test_histograms_by_name_and_by_place_are_one() -> None:
    """Survivors: steps that accepted at least so many; as deep as was drafted, where that is said."""
    for histogram in ([5, 0, 3], {"0": 5, "2": 3}, {2: 3, 0: 5}):
        told = {"acceptance_histogram": histogram}
        assert files.histogram_survivors(told) == [(8, 3, 3)]
        assert files.histogram_survivors(told | {"num_spec_tokens": 4}) == [
            (8, 3, 3, 0, 0)
        ]
        with pytest.raises(ValueError, match="at most 1 accepted"):
            files.histogram_survivors(told | {"num_spec_tokens": 1})
    with pytest.raises(ValueError, match="no histogram"):
        files.histogram_survivors({"acceptance_histogram": [5, -1, 3]})
    for nothing in (None, {}, {"acceptance_histogram": []}):
        assert files.histogram_survivors(nothing) == []


def test_counts_are_found_wherever_a_proxy_put_them() -> None:
    """Among the first hundred of a list, and the first 20,000 values."""
    told = {"acceptance_histogram": [1, 1]}
    assert files._found({"a": [{"b": told}]}, "acceptance_histogram") == told
    assert files._found([*[0] * 99, told], "acceptance_histogram") == told
    assert files._found([*[0] * 100, told], "acceptance_histogram") is None
    wide = {f"k{number}": 0 for number in range(19_999)}
    assert files._found({"a": told} | wide, "acceptance_histogram") is None
    assert files._found(wide | {"a": told}, "acceptance_histogram") == told
    fits = {f"k{number}": 0 for number in range(19_998)}
    assert files._found({"a": told} | fits, "acceptance_histogram") == told
    assert files._found({"acceptance_histogram": []}, "acceptance_histogram") is None


def test_a_trace_in_which_nothing_is_accepted_is_one_of_zeros(tmp_path):
    (tmp_path / "trace").write_text("[0, 0, 0]\n[0]\n")
    counts = read_acceptance(tmp_path / "trace").counts
    assert counts.rates == [0.0]
    assert counts.trials == [4]
