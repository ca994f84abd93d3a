"""Files of engines and studies: each gives the counts of the same steps, which are counted here by themselves."""

from __future__ import annotations

import json

import numpy as np
import pytest

from magicdec.errors import ConfigError
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


def vllm_benchmark(sequences: list[list[int]]) -> str:
    lengths = np.array(sequences)
    return json.dumps(
        {
            "spec_decode_acceptance_rate": float(lengths.mean() / GAMMA * 100),
            "spec_decode_num_drafts": lengths.size,
            "spec_decode_draft_tokens": lengths.size * GAMMA,
            "spec_decode_per_position_acceptance_rates": survival(sequences),
        }
    )


def vllm_log(sequences: list[list[int]]) -> str:
    lengths = np.array(sequences)
    rates = ", ".join(f"{each:.3f}" for each in survival(sequences))
    return (
        "INFO 11-22 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s\n"
        f"INFO 11-22 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: {1 + lengths.mean():.2f}, "
        f"Accepted throughput: 9.60 tokens/s, Drafted throughput: 12.80 tokens/s, Accepted: {lengths.sum()} tokens, "
        f"Drafted: {lengths.size * GAMMA} tokens, Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {lengths.mean() / GAMMA:.1%}\n"
    )


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


def aiperf(sequences: list[list[int]]) -> str:
    """profile_export.jsonl of AIPerf 0.13: a sparse histogram, its keys as JSON has them; a request without a draft."""
    lines = [
        {
            "metadata": {"session_num": 0},
            "metrics": {},
            "spec_decode_acceptance": None,
            "error": None,
        }
    ]
    for each in sequences:
        histogram = {str(j): int(n) for j, n in enumerate(np.bincount(each)) if n}
        told = {
            "engine": "vllm",
            "acceptance_histogram": histogram,
            "num_spec_tokens": GAMMA,
        }
        lines.append(
            {
                "metadata": {},
                "metrics": {},
                "spec_decode_acceptance": told,
                "error": None,
            }
        )
    return "\n".join(map(json.dumps, lines))


def guidellm(sequences: list[list[int]]) -> str:
    """benchmarks.json of GuideLLM 0.8: what vLLM says of each request is passed through."""
    requests: list[dict[str, object]] = [{"response_metrics": None}]
    for each in sequences:
        histogram = np.bincount(each, minlength=GAMMA + 1).tolist()
        told = {
            "acceptance_histogram": histogram,
            "num_spec_steps": len(each),
            "num_spec_tokens": GAMMA,
        }
        requests.append({"response_metrics": {"speculative_decoding": told}})
    return json.dumps(
        {
            "metadata": {"version": 2},
            "benchmarks": [{"requests": {"successful": requests}}],
        }
    )


def spec_bench(sequences: list[list[int]], bonus: int = 1) -> str:
    return "\n".join(
        json.dumps(
            {
                "question_id": number,
                "choices": [{"accept_lengths": [value + bonus for value in each]}],
            }
        )
        for number, each in enumerate(sequences)
    )


def spec_bench_without_bonus(sequences: list[list[int]]) -> str:
    return spec_bench(sequences, bonus=0)


@pytest.mark.parametrize(("write", "kind", "exact"), [
    (trace, "trace", 1e-12), (bare_trace, "trace", 1e-12), (vllm_benchmark, "vLLM benchmark", 1e-12),
    (aiperf, "AIPerf records", 1e-12), (guidellm, "GuideLLM report", 1e-12), (vllm_log, "vLLM log", 2e-3),
    (sglang, "SGLang answers", 1e-12), (older_sglang, "SGLang answers", 1e-12),
    (spec_bench, "Spec-Bench answers", 1e-12), (spec_bench_without_bonus, "Spec-Bench answers", 1e-12),
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
            '{"metadata": {}, "metrics": {}, "spec_decode_acceptance": null}',
            "counts no accepted draft",
        ),
        ('{"benchmarks": [{"requests": {}}]}', "no 'successful'"),
        (
            '{"metadata": {}, "metrics": {}, "spec_decode_acceptance": {"acceptance_histogram": [1, 2, 3], '
            '"num_spec_tokens": 1}}',
            "at most 1 accepted",
        ),
        ('{"a": 1}\n', "is no trace"),
        ("[1, -1]\n", "whole numbers"),
        ("[1, 2.5]\n", "whole numbers"),
        ("[1]\n[1, true]\n", "line 2"),
        ('{"accepted_lengths": [1]}\n{"other": []}\n', "line 2: no 'accepted_lengths'"),
        (
            '{"spec_decode_num_drafts": 0, "spec_decode_per_position_acceptance_rates": []}',
            "no draft was verified",
        ),
        (
            '{"spec_decode_num_drafts": 9, "spec_decode_per_position_acceptance_rates": [2.0]}',
            "between 0 and 1",
        ),
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


@pytest.mark.parametrize("accepted", [0, 10, 2_000, 10_000])
def test_a_log_of_100_000_steps_gives_its_tokens_per_step(accepted, tmp_path):
    """vLLM prints rates to a thousandth and lengths to a hundredth; tokens are exact."""
    line = (
        "SpecDecoding metrics: Mean acceptance length: {mean:.2f}, Accepted throughput: 1.00 tokens/s, "
        "Drafted throughput: 9.00 tokens/s, Accepted: {accepted} tokens, Drafted: {drafts} tokens, "
        "Per-position acceptance rate: {rate:.3f}, Avg Draft acceptance rate: {rate:.1%}"
    )
    rate = accepted / 100_000
    text = line.format(mean=1.0 + rate, accepted=accepted, drafts=100_000, rate=rate)
    (tmp_path / "log").write_text(text)
    counts = read_acceptance(tmp_path / "log").counts
    assert counts.tokens_per_step == pytest.approx(1.0 + rate, abs=1e-9)
    assert counts.steps.sum() == 100_000


def test_a_trace_in_which_nothing_is_accepted_is_one_of_zeros(tmp_path):
    (tmp_path / "trace").write_text("[0, 0, 0]\n[0]\n")
    counts = read_acceptance(tmp_path / "trace").counts
    assert counts.rates == [0.0]
    assert counts.trials == [4]
