"""Pairs of tables that name no device, trees next to their chains, and what a source does not judge of itself."""

from __future__ import annotations

import numpy as np
import pytest

from evidence.pairs import predict_pairs, read_pairs, validate_pairs
from evidence.trees import trees_over_chains
from magicdec.errors import ConfigError
from magicdec.perfmodel.step import step_terms
from magicdec.perfmodel.trees import tree_tokens
from magicdec.validate.pairs import PairRow
from magicdec.validate.rows import read_rows
from tests.validate.test_pairs import HEADER, LINE, write


def unnamed(line: str, hardware: str = "", tp: str = "") -> str:
    cells = line.split(",")
    cells[2], cells[5], cells[3], cells[4] = hardware, tp, "sglang", ""
    return ",".join(cells)


@pytest.mark.parametrize(
    ("device", "tp"), [("h200-sxm-141gb", 4), ("h100-sxm-80gb", 2)]
)
def test_a_device_that_nobody_named_is_the_one_whose_plain_step_is_nearest(
    tmp_path, device, tp
):
    """Three texts of one server: one of them slower than the others by far."""
    line = LINE.replace("llama-3.1-8b", "llama-3.1-70b").replace(
        ",bf16,bf16,", ",fp8,bf16,"
    )
    stated = unnamed(line, device, str(tp)) + "decode only"
    (pair,), _ = read_rows([write(tmp_path / "stated.csv", stated)], PairRow)
    rate = 1.0 / float(predict_pairs([pair], [2.5]).baseline_s[0])
    lines = [
        unnamed(line).replace("800,1200", f"{rate * factor:.6g},900")
        for factor in (0.99, 1.01, 0.5)
    ]
    table = write(tmp_path / "unnamed.csv", *lines)
    pairs, refused = read_pairs([table])
    assert not refused
    assert {(pair.hardware, pair.tp) for pair in pairs} == {(device, tp)}
    assert all(pair.is_decoding for pair in pairs)
    document = validate_pairs([table])
    assert all(f"{tp} x {device} assumed" in line for line in document["assumed"])
    with pytest.raises(ConfigError, match="'hardware, tp' is missing or empty"):
        read_rows([table], PairRow)


def test_of_a_device_of_which_the_memory_is_stated_only_such_are_tried(tmp_path):
    line = unnamed(LINE, "unstated-80gb", "2")
    (pair,), _ = read_pairs([write(tmp_path / "x.csv", line)])
    assert pair.hardware.endswith("-80gb")
    assert pair.tp == 2


CHAIN = "mine,llama-3.1-8b,h100,sglang,0.5.20,1,1,800,256,eagle3,head,5,3.2,bf16,bf16,tok_s,200,400,gsm8k"


@pytest.mark.parametrize("is_in_detail", [True, False])
def test_a_tree_is_priced_as_one_and_compared_with_its_chain(tmp_path, is_in_detail):
    tree = CHAIN.replace(",5,3.2,", ",5,2.8,").replace("200,400", "200,330")
    header, ends = HEADER, ("", "")
    if is_in_detail:
        tree = tree.replace(",head,", ',"head; tree topk 3, 6 draft tokens",')
    else:
        header, ends = f"{HEADER},top_k,draft_tokens", (",,", ",3,6")
    table = tmp_path / "trees.csv"
    table.write_text("\n".join((header, CHAIN + ends[0], tree + ends[1])) + "\n")
    pairs, refused = read_pairs([table])
    assert not refused
    chain, tree = pairs
    assert chain.tree is None
    assert (tree.tree.top_k, tree.tree.num_steps, tree.num_drafted) == (3, 5, 5)

    def step_s(pair):
        return float(
            step_terms(
                pair.setup, batch=1, kv_len=928, draft_kv_len=928, gamma=5, tp_size=1
            ).step_s
        )

    (found,) = trees_over_chains(pairs)
    assert found.measured == pytest.approx(330 / 400)
    assert found.step_ratio == pytest.approx(step_s(tree) / step_s(chain), rel=0.02)
    rate = found.rates[0]
    assert sum(rate**place for place in range(6)) == pytest.approx(3.2, rel=1e-6)
    tokens = tree_tokens(found.rates, tree.tree, 5)
    assert found.predicted() == pytest.approx(tokens / 3.2 / found.step_ratio)
    groups = {group["name"]: group for group in validate_pairs([table])["groups"]}
    error = found.predicted() / found.measured - 1.0
    of_trees = groups["all/tokens per second over the chain's"]
    assert (of_trees["rows"], of_trees["bias"]) == (1, pytest.approx(error))
    (own,) = (
        group
        for name, group in groups.items()
        if "eagle3 tree" in name and "whole" in name
    )
    speedup = predict_pairs([tree], [2.8]).speedup[0]
    assert own["bias"] == pytest.approx(speedup / (330 / 200) - 1.0)


def test_a_tree_of_more_tokens_than_passes_has_no_chain_of_as_many(tmp_path):
    tree = CHAIN.replace(",head,", ',"head; tree topk 4, 16 draft tokens",')
    pairs, _ = read_pairs([write(tmp_path / "x.csv", CHAIN, tree)])
    assert pairs[1].num_drafted == 15
    assert not trees_over_chains(pairs)


def test_wider_errors_of_the_engine_widen_the_interval(tmp_path):
    pairs, _ = read_rows([write(tmp_path / "x.csv", LINE)], PairRow)
    usual = predict_pairs(pairs, [2.5])
    wider = predict_pairs(pairs, [2.5], widths=[0.3])
    assert np.all(wider.high / wider.low > usual.high / usual.low)
    assert wider.speedup == pytest.approx(usual.speedup)
