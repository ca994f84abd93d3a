"""Measured runs of the embedded model: what they record, that they resume, and that they are lossless."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from magicdec.errors import CheckpointError, StorageError
from magicdec.measure import configuration
from magicdec.measure.configuration import (
    BenchmarkRequest,
    Outputs,
    configuration_fields,
)
from magicdec.measure.rank import (
    benchmark,
    configuration_key,
    known_records,
    measure_request,
    write_outputs,
)
from magicdec.measure.session import BenchmarkSession
from magicdec.runtime.distributed import SINGLE
from magicdec.runtime.prompts import generation_eos_token_ids
from magicdec.schema.record import UNFINISHED, Record, append_record, read_records
from magicdec.specs.catalog import EMBEDDED_DIRECTORY
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec
from magicdec.validate.demo import check_greedy, first_divergence, top_two_gap


def streaming(budget: int, gamma: int) -> SpeculationSpec:
    return SpeculationSpec(
        draft="self", draft_method="streamingllm", draft_budget=budget, gamma=gamma
    )


REQUEST = BenchmarkRequest(
    model="embedded", batch_size=3, context_len=300, context_spread=0.4, gen_len=24, repetitions=2,
    speculations=(streaming(32, 2), streaming(64, 4)),
)  # fmt: skip


SHORT = replace(REQUEST, gen_len=6)
"""Where a run is measured several times over."""


def test_records_hold_what_was_measured_and_resume_skips_it(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    rows = benchmark(
        replace(SHORT, run_to_end=True), records=records, bandwidth_bytes_per_s=1e10
    )
    assert [r.gamma for r in rows] == [0, 2, 4]
    assert read_records(records) == [*rows[1:], rows[0]]  # as they were complete
    for record in rows[1:]:
        histogram, rates = record.acceptance_histogram, record.acceptance_by_position
        assert len(histogram) == record.gamma + 1
        assert len(rates) == record.gamma
        emitted = sum(n * (accepted + 1) for accepted, n in enumerate(histogram))
        assert record.expected_tokens_per_step == pytest.approx(
            emitted / sum(histogram)
        )
        assert len(record.speedup_samples) == 2
        assert record.speedup_static_batch is not None
        assert record.autoregressive_mbu is not None
        assert {"draft", "verify", "accept"} <= set(record.breakdown_s or {})
        assert record.environment.versions["torch"]
    loaded: list[str] = []
    again = benchmark(
        replace(SHORT, run_to_end=True),
        records=records,
        resume=True,
        progress=loaded.append,
    )
    assert loaded == []
    assert again == rows
    wider = replace(
        SHORT, run_to_end=True, speculations=(*SHORT.speculations, streaming(32, 1))
    )
    more = benchmark(wider, records=records, resume=True)
    assert [r.gamma for r in more] == [0, 2, 4, 1]
    assert len(read_records(records)) == 4


def test_every_repetition_is_written_when_it_ends_and_none_is_measured_twice(
    tmp_path: Path,
) -> None:
    """Stopped before its last run: the file holds a record of each configuration from what was measured, and another
    run measures that one alone. Its records have every sample, and greedy ones the counts of a run in one piece."""

    class Stop(Exception):
        pass

    records = tmp_path / "r.jsonl"
    request = replace(SHORT, sampling=SamplingSpec())
    said: list[str] = []

    def stop(message: str) -> None:
        said.append(str(message))
        if message == "repetition 2/2: StreamingLLM 64, gamma 4":
            raise Stop

    with pytest.raises(Stop):
        benchmark(request, records=records, progress=stop)
    left = {
        (record.gamma, record.repetitions, UNFINISHED in record.notes)
        for record in read_records(records)
    }
    assert left == {(2, 2, False), (0, 3, True), (4, 1, True)}
    said.clear()
    resumed = benchmark(
        request,
        records=records,
        resume=True,
        progress=lambda message: said.append(str(message)),
    )
    assert [each for each in said if each.startswith("repetition")] == [
        "repetition 2/2: StreamingLLM 64, gamma 4"
    ]
    assert [(row.gamma, row.repetitions, len(row.speedup_samples or ())) for row in resumed] == [
        (0, 4, 0), (2, 2, 2), (4, 2, 2),
    ]  # fmt: skip
    assert {record.key: record for record in read_records(records)} == {
        record.key: record for record in resumed
    }
    whole = benchmark(request, records=tmp_path / "whole.jsonl")
    for one, other in zip(resumed, whole, strict=True):
        for name in (
            "acceptance_histogram",
            "acceptance_by_position",
            "acceptance_stderr_by_position",
            "repetitions",
        ):
            assert getattr(one, name) == getattr(other, name)
        if one.gamma:
            assert one.speedup == np.median(one.speedup_samples or ())


def test_another_configuration_is_not_taken_from_the_file(tmp_path: Path) -> None:
    """Whatever changes the result: nothing that the file holds is known then."""
    record = Record(
        source="measured",
        repetitions=2,
        **configuration_fields(REQUEST, AUTOREGRESSIVE),
    )
    append_record(tmp_path / "r.jsonl", record)
    others = {
        "context_spread": 0.2, "stop_at_eos": True, "run_to_end": True, "cuda_graphs": False, "prompts": "recall",
        "calibration_prompts": True, "weights": "random", "repetitions": 3,
    }  # fmt: skip
    for changed in (
        replace(REQUEST, **{name: value}) for name, value in others.items()
    ):  # type: ignore[arg-type]
        known = known_records(tmp_path / "r.jsonl", changed.repetitions)
        assert configuration_key(changed, AUTOREGRESSIVE) not in known
    again = known_records(tmp_path / "r.jsonl", REQUEST.repetitions)
    assert configuration_key(REQUEST, AUTOREGRESSIVE) in again


def test_models_are_told_apart_by_content_not_by_name(tmp_path: Path) -> None:
    """A/final, its copy, one with another weight, one with another end of text."""
    from safetensors.torch import load_file, save_file

    places = [tmp_path / name / "final" for name in "ABCD"]
    for place in places:
        shutil.copytree(EMBEDDED_DIRECTORY, place)
    tensors = load_file(places[2] / "model.safetensors")
    tensors["model.norm.weight"][7] += 0.001
    save_file(tensors, places[2] / "model.safetensors")
    (places[3] / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    keys = [
        configuration_key(replace(REQUEST, model=str(place)), AUTOREGRESSIVE)
        for place in places
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_large_weights_file_is_known_by_samples_of_its_bytes(tmp_path: Path) -> None:
    """Above the limit: its size, its header and any stretch as long as the distance of two samples."""
    size = configuration.SAMPLED_ABOVE_BYTES + 5
    data = bytearray((8).to_bytes(8, "little") + b"{}      " + bytes(size - 16))
    digests = set()
    for start, length in (
        (0, 0),
        (9, 1),
        (size // 3, size // configuration.NUM_SAMPLES),
        (size - 1, 1),
    ):
        changed = data.copy()
        changed[start : start + length] = b"x" * length
        (tmp_path / "model.safetensors").write_bytes(changed)
        digests.add(
            configuration._files_digest(tmp_path, [tmp_path / "model.safetensors"])
        )
    assert len(digests) == 4


def test_what_is_known_is_still_decoded_for_what_is_asked_besides(
    tmp_path: Path,
) -> None:
    """A file that holds every configuration: the text is written all the same, of the request's last one."""
    records, output = tmp_path / "r.jsonl", tmp_path / "out.jsonl"
    request = replace(SHORT, sampling=SamplingSpec(), repetitions=1)
    rows = benchmark(request, records=records)
    before = records.read_bytes()
    outputs = Outputs(records=records, resume=True, save_output=output, quiet=True)
    assert measure_request(SINGLE, request, outputs) == rows
    assert records.read_bytes() == before
    assert len(output.read_text().splitlines()) == 3
    assert [row.num_divergences for row in rows] == [None, 0, 0]


def test_the_tokens_that_end_a_text_are_those_of_the_generation_configuration(
    tmp_path: Path,
) -> None:
    """As transformers reads them, a list included; what is no token is refused."""
    import transformers

    for given in (5, [6, 7]):
        transformers.GenerationConfig(eos_token_id=given).save_pretrained(tmp_path)
        own = transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id
        found = generation_eos_token_ids(tmp_path, vocab_size=96)
        assert found == (tuple(own) if isinstance(own, list) else (own,))
    (tmp_path / "generation_config.json").write_text("{}")
    assert generation_eos_token_ids(tmp_path, vocab_size=96) is None
    for wrong in (
        '{"eos_token_id": 1.7}',
        '{"eos_token_id": [96]}',
        '{"eos_token_id": true}',
        "[",
        "[]",
    ):
        (tmp_path / "generation_config.json").write_text(wrong)
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            generation_eos_token_ids(tmp_path, vocab_size=96)


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_greedy_output_is_the_autoregressive_one_with_sequences_that_stop_at_different_times(
    batch_size: int,
) -> None:
    request = replace(
        REQUEST, batch_size=batch_size, gen_len=40, sampling=SamplingSpec(), stop_at_eos=True,
        speculations=(streaming(16, 1), streaming(32, 3), streaming(128, 7)),
    )  # fmt: skip
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
    lines = [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    assert [len(line["prompt_ids"]) for line in lines] == [180, 240, 300]
    assert all(
        len(line["generated_ids"]) == 24 and isinstance(line["generated"], str)
        for line in lines
    )
    with pytest.raises(StorageError, match="cannot write"):
        write_outputs(session, Path("/dev/null/out.jsonl"))
