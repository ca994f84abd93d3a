"""The law of acceptance extrapolates from short blocks: on the published tables, and on data drawn from known laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evidence import DATA
from evidence.blocks import (
    PublishedTokens,
    fit_cells,
    split_rows,
    validate_blocks,
)
from magicdec.counts import survival
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance.law import Law

SNAPKV = DATA / "acceptance" / "acceptance_snapkv.csv"
HEADER = "model,dataset,draft_method,context_len,draft_budget_tokens,gamma,accepted_over_drafted,tokens_per_step\n"


@pytest.fixture(scope="module")
def of_snapkv() -> dict[str, Any]:
    """The published table judged, once for the tests that read it."""
    return validate_blocks([SNAPKV])


def test_tokens_at_gamma_16_are_predicted_from_short_blocks_of_the_published_tables(
    of_snapkv: dict[str, Any],
) -> None:
    groups = {group["name"]: group for group in of_snapkv["groups"]}
    for name, group in groups.items():
        if group["tokens_per_step_mape"] is not None:
            assert group["tokens_per_step_mape"] <= 0.08, name
            assert group["rows_unfitted"] > 0
    longest = groups["acceptance_snapkv/llama-3.1-8b/pg-19/snapkv"]
    assert longest["rows_unfitted"] == 12
    assert longest["tokens_per_step_mape"] < longest["tokens_per_step_mape_iid"]


def test_a_group_without_short_blocks_leaves_an_inner_budget_out_and_says_so(
    of_snapkv: dict[str, Any],
) -> None:
    groups = [group for group in of_snapkv["groups"] if "longbench" in group["name"]]
    assert groups[0]["held_out"] == "budget 1025"


@pytest.mark.parametrize(
    "law",
    [
        Law(rejection=0.2),
        Law(rejection=0.2, drift=1.5),
        Law(rejection=0.2, concentration=3.0),
    ],
    ids=["constant", "drifting", "mixed"],
)
def test_known_laws_extrapolate_from_8_to_16(law: Law) -> None:
    """Exact tokens per step, no noise: within 8 % at gamma 16 whichever effect is at work."""
    rows = [
        PublishedTokens(
            model="m",
            dataset="d",
            draft_method="s",
            context=context,
            budget=budget,
            gamma=gamma,
            tokens_per_step=1.0 + float(survival(law.rates_after(rate, gamma)).sum()),
        )
        for context in (8000.0, 16000.0)
        for budget, rate in ((256.0, 0.8), (512.0, 0.85), (1024.0, 0.9))
        for gamma in (1, 2, 3, 4, 6, 8, 16)
    ]
    fitted, unfitted, _ = split_rows(rows)
    predicted = fit_cells(fitted, has_shape=True).tokens(unfitted)[0]
    assert (
        np.mean(np.abs(predicted / np.array([row.tokens for row in unfitted]) - 1))
        < 0.08
    )


def test_accepted_over_drafted_stands_in_for_tokens_per_step(tmp_path: Path) -> None:
    """Tokens per step = 1 + gamma · accepted / drafted."""
    lines = [
        "m,d,s,8000,256,2,0.9,2.8",
        "m,d,s,8000,256,4,0.85,4.4",
        "m,d,s,8000,256,16,0.6,10.6",
    ]
    both, one = tmp_path / "both.csv", tmp_path / "one.csv"
    both.write_text(HEADER + "\n".join(lines))
    one.write_text(
        HEADER.rsplit(",", 1)[0]
        + "\n"
        + "\n".join(line.rsplit(",", 1)[0] for line in lines)
    )
    errors = [
        validate_blocks([path])["groups"][0]["tokens_per_step_mape"]
        for path in (both, one)
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ("model,gamma\nm,2\n", "lacks the column"),
        (HEADER + "m,d,s,8000,256,2,0.9,-1\n", "tokens_per_step"),
        (HEADER + "m,d,s,nan,256,2,0.9,2.8\n", "context_len"),
        (HEADER + "m,d,s,8000,256,2.5,0.9,2.8\n", "whole number"),
        (HEADER + "m,d,s,8000\n", "gamma"),
    ],
)
def test_unusable_tables_are_refused_naming_the_column(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        validate_blocks([path])


def test_a_table_of_rates_is_named_and_the_others_judged(
    of_snapkv: dict[str, Any],
) -> None:
    rates = DATA / "acceptance" / "acceptance_llama31_8b_streamingllm512_pg19.csv"
    counts = SNAPKV
    document = validate_blocks([rates, counts])
    assert document["groups"] == of_snapkv["groups"]
    assert document["refused"] == [
        f"{rates}: rates without a gamma say nothing about deeper blocks"
    ]
    with pytest.raises(ConfigError, match="without a gamma"):
        validate_blocks([rates])


def test_a_single_row_gives_no_error_to_report(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(HEADER + "m,d,s,8000,256,2,0.9,2.8\n")
    group = validate_blocks([path])["groups"][0]
    assert group["rows_unfitted"] == 0
    assert group["tokens_per_step_mape"] is None
