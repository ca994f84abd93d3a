"""Measured runs of the embedded model: what they record, that they resume, and that they are lossless."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from magicdec.errors import CapacityError, ConfigError, StorageError
from magicdec.measure.configuration import BenchmarkRequest, check_request
from magicdec.measure.repetitions import acceptance_by_position, benchmark, write_outputs
from magicdec.measure.session import BenchmarkSession
from magicdec.records import read_records
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from magicdec.validate.lossless import check_greedy, first_divergence, top_two_gap


def streaming(budget: int, gamma: int) -> SpeculationSpec:
    return SpeculationSpec(draft="self", draft_method="streamingllm", draft_budget=budget, gamma=gamma)


REQUEST = BenchmarkRequest(
    model="embedded",
    batch_size=3,
    context_len=300,
    context_spread=0.4,
    gen_len=24,
    repetitions=2,
    speculations=(streaming(32, 2), streaming(64, 4)),
)


def test_records_hold_what_was_measured_and_resume_skips_it(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    _, rows = benchmark(replace(REQUEST, run_to_end=True), records=records, bandwidth_bytes_per_s=1e10)
    assert [r.gamma for r in rows] == [0, 2, 4]
    assert read_records(records) == rows
    for record in rows[1:]:
        histogram, rates = record.acceptance_histogram, record.acceptance_by_position
        assert histogram is not None
        assert rates is not None
        assert len(histogram) == record.gamma + 1
        assert len(rates) == record.gamma
        emitted = sum(n * (accepted + 1) for accepted, n in enumerate(histogram))
        assert record.expected_tokens_per_step == pytest.approx(emitted / sum(histogram))
        assert record.speedup_samples is not None
        assert len(record.speedup_samples) == 2
        assert record.speedup_static_batch is not None
        assert record.autoregressive_mbu is not None
        assert {"draft", "verify", "accept"} <= set(record.breakdown_s or {})
        assert record.environment.versions["torch"]
    session, again = benchmark(replace(REQUEST, run_to_end=True), records=records, resume=True)
    assert session is None
    assert again == rows
    wider = replace(REQUEST, run_to_end=True, speculations=(*REQUEST.speculations, streaming(32, 1)))
    _, more = benchmark(wider, records=records, resume=True)
    assert [r.gamma for r in more] == [0, 2, 4, 1]
    assert len(read_records(records)) == 4


def test_acceptance_by_position_is_conditional() -> None:
    """Of 10 blocks 4 accepted nothing, 3 one, 3 both: position 1 accepts 6/10, position 2 accepts 3/6."""
    assert acceptance_by_position([4, 3, 3]) == ([0.6, 0.5], [10, 6])


@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_output_is_the_autoregressive_one_with_sequences_that_stop_at_different_times(batch_size: int) -> None:
    request = replace(
        REQUEST,
        batch_size=batch_size,
        gen_len=60,
        sampling=SamplingSpec(),
        stop_at_eos=True,
        speculations=(streaming(16, 1), streaming(32, 3), streaming(128, 7)),
    )
    for check in check_greedy(request):
        assert check.num_tokens > 0
        assert check.num_divergences == 0, str(check)
        assert check.num_near_ties == 0, str(check)


def test_first_divergence_and_the_gap_that_would_excuse_it() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == 2
    assert top_two_gap(REQUEST, list(range(1, 50)), [7, 8]) > 1e-5


def test_saved_output_is_prompt_and_text(tmp_path: Path) -> None:
    session = BenchmarkSession(REQUEST)
    write_outputs(session, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(line["prompt_ids"]) for line in lines] == [180, 240, 300]
    assert all(len(line["generated_ids"]) == 24 and isinstance(line["generated"], str) for line in lines)
    with pytest.raises(StorageError, match="cannot write"):
        write_outputs(session, Path("/dev/null/out.jsonl"))


def test_what_cannot_run_is_refused_before_anything_is_allocated() -> None:
    from magicdec.specs.catalog import load_model_spec

    spec = load_model_spec("embedded")
    with pytest.raises(CapacityError, match="longest context is"):
        check_request(replace(REQUEST, context_len=6000), spec)
    with pytest.raises(ConfigError, match="exceeds the context 300"):
        check_request(replace(REQUEST, speculations=(streaming(301, 2),)), spec)
    with pytest.raises(CapacityError, match="largest batch that fits is"):
        check_request(replace(REQUEST, batch_size=10**7), spec)
