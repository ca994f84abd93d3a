"""Mixes of requests, against a simulation of busy slots."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from magicdec.errors import ConfigError
from magicdec.specs.workload import RequestShape, WorkloadSpec, load_workload

MIX = WorkloadSpec(
    requests=(
        RequestShape(prompt_len=1000, gen_len=100, weight=3.0),
        RequestShape(prompt_len=8000, gen_len=400, weight=1.0),
    )
)


def test_mean_over_time_equals_a_simulated_slot() -> None:
    """One slot serving 20,000 random requests: the standard error is under 0.5 %, the tolerance 2 % (4 sigma)."""
    rng = random.Random(0)
    held = steps = 0.0
    for request in rng.choices(MIX.requests, weights=[3.0, 1.0], k=20_000):
        held += request.gen_len * (request.prompt_len + request.gen_len / 2)
        steps += request.gen_len
    assert MIX.mean_kv_len == pytest.approx(held / steps, rel=0.02)


def test_the_tail_lies_between_the_mean_and_the_longest_and_shrinks_with_the_batch() -> (
    None
):
    tails = [MIX.tail_len(batch) for batch in (1, 4, 16, 256)]
    assert tails == sorted(tails, reverse=True)
    assert tails[0] <= MIX.max_len
    assert tails[-1] > 1100


def test_formats_agree(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '{"requests": [{"prompt_len": 10, "gen_len": 5, "weight": 2}]}'
    )
    (tmp_path / "a.toml").write_text(
        "[[requests]]\nprompt_len = 10\ngen_len = 5\nweight = 2.0\n"
    )
    (tmp_path / "a.csv").write_text("prompt_len,gen_len,weight\n10,5,2\n")
    loaded = [
        load_workload(tmp_path / f"a.{suffix}") for suffix in ("json", "toml", "csv")
    ]
    assert loaded[0] == loaded[1] == loaded[2]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"requests": []}', "requests"),
        ('{"requests": [{"prompt_len": 0, "gen_len": 5}]}', "prompt_len"),
        ('{"requests": [{"prompt_len": 5}]}', "gen_len"),
        ('{"requests": [{"prompt_len": 5, "gen_len": 5, "wait": 1}]}', "wait"),
        ('{"requests": [{"prompt_len": "x", "gen_len": 5}]}', "prompt_len"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_bad_file_names_itself_and_the_key(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_workload(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)
