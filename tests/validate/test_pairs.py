"""`validate pairs`: servers with and without speculation, how names are read, what is refused, and what is scored."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import magicdec
from magicdec.commands.validate import app
from magicdec.counts import expected_tokens_per_step
from magicdec.errors import ConfigError
from magicdec.perfmodel.step import step_terms
from magicdec.validate.pair_errors import validate_pairs
from magicdec.validate.pair_prediction import (
    REQUEST_SPREAD,
    median_request,
    predict_pairs,
)
from magicdec.validate.pairs import PairRow
from magicdec.validate.rows import published, read_rows

HEADER = (
    "source,model,hardware,engine,engine_version,tp,concurrency,prompt_len,output_len,draft,draft_detail,gamma,"
    "tokens_per_step,weight_dtype,kv_dtype,unit,baseline,speculative,note"
)
LINE = "mine run 1,llama-3.1-8b,h100,vllm,0.24.0,1,8,1024,256,eagle3,,3,2.5,bf16,bf16,tok_s,800,1200,"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join((HEADER, *lines)) + "\n")
    return path


def test_the_shipped_sample_is_judged_whole():
    document = validate_pairs(published("speculation_pairs.csv"))
    assert not document["refused"]
    assert document["choice"]["cells"] >= 5
    groups = [
        group for group in document["groups"] if not group["name"].startswith("all/")
    ]
    assert sum(group["rows"] for group in groups) == 42


def test_errors_are_of_predicted_over_measured_speedups(tmp_path):
    (pair,), _ = read_rows([write(tmp_path / "one.csv", LINE)], PairRow)
    speedup = float(predict_pairs([pair], [2.5]).speedup[0])
    lines = [
        LINE.replace("800,1200", f"800,{800 * speedup * factor:.9g}")
        for factor in (0.8, 1.0, 2.0)
    ]
    (group,) = [
        group
        for group in validate_pairs([write(tmp_path / "x.csv", *lines)])["groups"]
        if "all/" not in group["name"]
    ]
    assert group["rows"] == 3
    assert group["mape"] == pytest.approx((0.25 + 0.0 + 0.5) / 3, rel=1e-6)
    assert {
        "source": "mine",
        "model": "llama-3.1-8b",
        "compared": "whole requests",
    }.items() <= group.items()


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("llama-3.1-8b", "llama-3.1-9b", r"x\.csv:3: unknown model 'llama-3.1-9b'"),
        ("h100", "h10", r"x\.csv:3: unknown hardware 'h10'"),
        ("vllm", "vlm", r"x\.csv:3: unknown engine 'vlm': did you mean vllm"),
        ("eagle3", "eaglet", r"x\.csv:3: unknown draft 'eaglet'"),
        (",bf16,bf16,", ",bf17,bf16,", r"x\.csv:3: unknown format of weights 'bf17'"),
        ("tok_s", "tokens", r"x\.csv:3: unknown unit 'tokens'"),
        (
            ",2.5,",
            ",4.5,",
            r"x\.csv:3: column 'tokens_per_step' must be at most gamma \+ 1",
        ),
        (",800,", ",fast,", r"x\.csv:3: .*baseline"),
    ],
)
def test_a_bad_row_is_one_line_and_leaves_the_others(tmp_path, old, new, match):
    document = validate_pairs([write(tmp_path / "x.csv", LINE, LINE.replace(old, new))])
    (line,) = document["refused"]
    with pytest.raises(ConfigError, match=match):
        raise ConfigError(line)
    assert (
        next(group for group in document["groups"] if "all/" in group["name"])["rows"]
        == 1
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct"}, ("llama-3.1-8b", "eagle3", "eagle3", "bf16")),
        ({"llama-3.1-8b": "Qwen/Qwen3-8B-FP8", ",bf16,bf16": ",fp8,fp8"}, ("qwen3-8b", "eagle3", "eagle3", "fp8")),
        ({",bf16,bf16": ",awq,auto"}, ("llama-3.1-8b", "eagle3", "eagle3", "int4")),
        ({"eagle3,": "dspark,5 layers"}, ("llama-3.1-8b", "dspark", "dspark", "bf16")),
        ({"eagle3,": "quantized-self,awq copy"}, ("llama-3.1-8b", "self", "full", "bf16")),
        ({"eagle3,": "streamingllm,7 % of KV"}, ("llama-3.1-8b", "self", "streamingllm", "bf16")),
        (
            {"llama-3.1-8b": "llama-3.3-70b", "eagle3,": "draft_model,Llama-3.1-8B-Instruct"},
            ("llama-3.3-70b", "llama-3.1-8b", "full", "bf16"),
        ),
        ({"gpt": "gpt", "llama-3.1-8b": "openai/gpt-oss-120b", ",bf16,bf16": ",fp4,fp8"},
         ("gpt-oss-120b", "eagle3", "eagle3", "mxfp4")),
    ],
)  # fmt: skip
def test_names_are_read_as_sources_write_them(tmp_path, changes, expected):
    line = LINE
    for old, new in changes.items():
        line = line.replace(old, new, 1)
    (pair,), refused = read_rows([write(tmp_path / "x.csv", line)], PairRow)
    assert not refused
    setup = pair.setup
    spec = setup.speculation
    assert (
        setup.model.name,
        spec.draft,
        spec.draft_method,
        setup.precision.weight_dtype,
    ) == expected


def test_lengths_that_a_row_leaves_out_are_those_of_the_workload_that_it_names(
    tmp_path,
):
    without = LINE.replace(",1024,256,", ",,,")
    lines = (without + "ShareGPT; greedy", without + "chat", LINE + "ShareGPT")
    pairs, _ = read_rows([write(tmp_path / "x.csv", *lines)], PairRow)
    assert [(pair.prompt_len, pair.output_len) for pair in pairs] == [
        (217, 186),
        (512, 256),
        (1024, 256),
    ]


def test_the_regret_is_of_the_gamma_that_is_predicted_best(tmp_path):
    gammas, tokens = (1, 3, 7), (1.7, 2.5, 2.9)
    lines = [
        LINE.replace(",3,2.5,", f",{gamma},{each},")
        for gamma, each in zip(gammas, tokens, strict=True)
    ]
    pairs, _ = read_rows([write(tmp_path / "x.csv", *lines)], PairRow)
    chosen = int(np.argmax(predict_pairs(pairs, tokens).speedup))
    speedups = [1.0, 1.0, 1.0]
    speedups[chosen] = 1.6
    better = (chosen + 1) % 3
    speedups[better] = 2.0
    lines = [
        line.replace("800,1200", f"800,{800 * each}")
        for line, each in zip(lines, speedups, strict=True)
    ]
    choice = validate_pairs([write(tmp_path / "y.csv", *lines)])["choice"]
    assert choice["cells"] == 1
    assert choice["plan"] == pytest.approx(0.2)
    assert choice["never"] == pytest.approx(0.5)
    assert choice["best_constant"] == f"k{gammas[better]}"


def test_a_row_without_tokens_is_named_and_its_load_is_still_ranked(tmp_path):
    lines = [LINE, LINE.replace(",3,2.5,", ",5,,")]
    document = validate_pairs([write(tmp_path / "x.csv", *lines)])
    assert document["choice"]["cells"] == 1
    assert "x.csv:3: no measured tokens per step" in document["refused"][0]


def test_the_median_request_by_simulation():
    """Requests of equal length with rates from the same distribution: 40,000 of them leave the median 0.5 % (one in 1e9
    runs is beyond 5 %)."""
    rng, mean, gamma = np.random.default_rng(5), 0.8, 7
    weight = mean * (1 - mean) / REQUEST_SPREAD**2 - 1
    rates = rng.beta(mean * weight, (1 - mean) * weight, 40_000)
    each = expected_tokens_per_step(np.repeat(rates[:, None], gamma, axis=1), gamma)
    together = 1.0 / np.mean(1.0 / each)
    factor = median_request(np.array([together]), np.array([gamma]))[0]
    assert factor == pytest.approx(np.median(each) / together, rel=0.02)
    assert factor > 1.05


def test_a_parallel_head_takes_one_pass_for_its_block(tmp_path):
    def drafting(method: str, gamma: int) -> float:
        line = LINE.replace("eagle3,", f"{method},").replace(",3,2.5,", f",{gamma},2,")
        (pair,), _ = read_rows([write(tmp_path / "x.csv", line)], PairRow)
        terms = step_terms(
            pair.setup, batch=1, kv_len=1000, draft_kv_len=1000, gamma=gamma
        )
        return float(gamma * terms.draft.total_s)

    assert drafting("dflash", 7) < 1.05 * drafting("dflash", 3)
    assert drafting("eagle3", 7) == pytest.approx(
        7 / 3 * drafting("eagle3", 3), rel=0.01
    )


def test_the_command_prints_groups_and_what_was_skipped(tmp_path):
    path = write(tmp_path / "x.csv", LINE, LINE.replace("h100", "h1000"))
    result = CliRunner().invoke(app, ["pairs", str(path), "--format", "json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert set(document) == {"groups", "choice", "assumed", "refused"}
    assert {
        "rows",
        "mape",
        "bias",
        "p90",
        "coverage",
        "sign",
        "baseline_mape",
        "speculative_mape",
    } <= set(document["groups"][0])
    assert "h1000" in result.stderr


def test_a_table_of_times_alone_has_no_gamma_to_choose(tmp_path: Path) -> None:
    line = LINE.replace("tok_s,800,1200", "tpot_mean_ms,8,6")
    path = write(tmp_path / "x.csv", line, line.replace(",3,2.5,", ",5,2.9,"))
    document = validate_pairs([path])
    assert document["choice"]["cells"] == 0
    assert document["groups"][0]["rows"] == 2
    assert CliRunner().invoke(app, ["pairs", str(path)]).exit_code == 0


LOOKUP_HEADER = (
    "source,model,hardware,engine,engine_version,tp,concurrency,prompt_len,output_len,draft,gamma,"
    "tokens_per_step,drafted_share,tokens_per_drafted_step,unit,baseline,speculative\n"
)
LOOKUP = "s,llama-3.1-8b,h100-sxm-80gb,vllm,{version},1,{users},2000,200,{draft},5,{tokens},tok_s,100,150\n"


def lookup_rows(
    tmp_path: Path,
    *tokens: str,
    users: str = "8",
    version: str = "0.32",
    draft: str = "suffix",
) -> list:
    path = tmp_path / "lookups.csv"
    lines = [
        LOOKUP.format(tokens=each, users=users, version=version, draft=draft)
        for each in tokens
    ]
    path.write_text(LOOKUP_HEADER + "".join(lines))
    rows, refused = read_rows([path], PairRow)
    assert refused == []
    return rows


def test_two_of_the_three_figures_of_a_look_up_give_the_third(tmp_path: Path) -> None:
    """3.31 tokens in drafted steps, 2.18 in all: 51 % of the steps had a draft."""
    both, share, counted = lookup_rows(
        tmp_path, "2.18,,3.31", "2.18,0.51,", ",0.51,3.31"
    )
    assert both.share == pytest.approx(1.18 / 2.31)
    assert share.share == 0.51
    assert counted.tokens_per_step == pytest.approx(1.0 + 0.51 * 2.31)


def test_steps_without_a_draft_verify_one_token(tmp_path: Path) -> None:
    """At equal tokens per step, fewer drafted steps verify fewer tokens: a faster step; not where
    the engine fills in what it does not find, as vLLM's n-gram from 0.30 on."""
    shares = ("1.6,1.0,", "1.6,0.4,")
    for version, draft in (("0.32", "suffix"), ("0.29", "ngram"), ("0.32", "ngram")):
        rows = lookup_rows(tmp_path, *shares, users="64", version=version, draft=draft)
        every, some = predict_pairs(rows, [1.6, 1.6]).speedup
        if (version, draft) == ("0.32", "ngram"):
            assert some == every
        else:
            assert some > every


def test_a_look_up_without_its_share_is_judged_and_named(tmp_path: Path) -> None:
    lookup_rows(tmp_path, "1.6,,", users="", version="patched")
    answer = validate_pairs([tmp_path / "lookups.csv"])
    assert answer["groups"]
    (line,) = answer["assumed"]
    assert "one user" in line
    assert "patched of vllm read as 0.33.0" in line
    assert "drafted share" in line


@pytest.mark.parametrize("tokens", ["1.6,0,", "1.6,1.2,", "1.6,,9"])
def test_a_share_that_cannot_be_is_refused(tmp_path: Path, tokens: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(
        LOOKUP_HEADER
        + LOOKUP.format(tokens=tokens, users="1", version="0.32", draft="ngram")
    )
    with pytest.raises(ConfigError, match="drafted"):
        read_rows([path], PairRow)


def test_a_server_without_graphs_is_priced_so_with_and_without_its_draft(
    tmp_path: Path,
) -> None:
    """By a note or by the column: the host's launches of 32 layers bound a step of one user."""
    graphed, eager = (
        read_rows(
            [write(tmp_path / "one.csv", LINE.replace(",8,1024", ",1,1024") + note)],
            PairRow,
        )[0][0]
        for note in ("", "enforce_eager on both sides")
    )
    as_column = msgspec.structs.replace(graphed, graphs="none (both)")
    whole = predict_pairs([graphed], [2.5])
    for row in (eager, as_column):
        none = predict_pairs([row], [2.5])
        assert none.baseline_s > 1.5 * whole.baseline_s
        assert none.speculative_s > 1.5 * whole.speculative_s
        assert none.log_deviation > whole.log_deviation
    (of_drafter,), _ = read_rows(
        [write(tmp_path / "one.csv", LINE + "graphs on; the drafter runs eager")],
        PairRow,
    )
    assert not of_drafter.path_options.enforce_eager


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("0.24.0", ""),
        ("", "no version of vllm read as 0.33.0"),
        ("not stated (Dec 2025)", "not stated (Dec 2025) of vllm read as 0.12.0"),
        ("May 2025", "May 2025 of vllm read as 0.8.5"),
        ("nightly of May 2026", "nightly of May 2026 of vllm read as 0.22.0"),
        ("nightly-5b8c30d6", "nightly-5b8c30d6 of vllm read as 0.33.0"),
    ],
)
def test_a_date_is_the_version_of_that_time(tmp_path, stated, said):
    (pair,), _ = read_rows(
        [write(tmp_path / "x.csv", LINE.replace("0.24.0", stated))], PairRow
    )
    assert pair.assumptions == ([said] if said else [])


def test_the_interval_of_an_unknown_version_holds_the_answers_of_all(tmp_path):
    """In December 2025 it was 0.12 or 0.13; without a date it may be asynchronous too."""

    def predicted(version):
        rows = [LINE.replace("0.24.0", version)]
        pairs, _ = read_rows([write(tmp_path / "x.csv", *rows)], PairRow)
        return predict_pairs(pairs, [2.5])

    dated, unknown = predicted("Dec 2025"), predicted("")
    for version in ("0.12.0", "0.13.0"):
        assert dated.low < predicted(version).speedup < dated.high
    for version in ("0.8.5", "0.12.0", "0.24.0", "0.33.0"):
        assert unknown.low < predicted(version).speedup < unknown.high
    assert unknown.high / unknown.low > dated.high / dated.low
    assert dated.speedup == predicted("0.12.0").speedup
    assert unknown.speedup == predicted("0.33.0").speedup


def test_suffix_decoding_drafts_often_and_short(tmp_path):
    """Accepted tokens fix how many are drafted, so a step costs what fewer, longer drafts cost: not
    gamma tokens in each step that has a draft."""
    line = LINE.replace("eagle3,,3,2.5", "suffix,,32,2.5").replace("0.24.0", "0.12.0")
    table = write(tmp_path / "x.csv", line + "drafted steps 0.940", line)
    (often, seldom), _ = read_rows([table], PairRow)
    assert (often.share, seldom.share) == (0.94, pytest.approx(1.5 / 0.5 / 32))
    assert often.draft_len == pytest.approx(1.5 / 0.94 / 0.5)
    assert seldom.draft_len == pytest.approx(32)
    steps_s = predict_pairs([often, seldom], [2.5, 2.5]).speculative_s
    assert steps_s[0] == pytest.approx(steps_s[1], rel=0.1)
    ngram = msgspec.structs.replace(often, draft="ngram", gamma=5)
    assert ngram.draft_len == 5


def test_a_pair_has_the_interval_that_a_plan_of_it_prints(tmp_path: Path) -> None:
    """Of greedy decoding, at acceptance that is given."""
    rate, gamma = 0.7, 3
    tokens = sum(rate**accepted for accepted in range(gamma + 1))
    plan = magicdec.plan(
        model="llama-3.1-8b", hardware="h100-sxm-80gb", batch=[8], context=[1024],
        gen_len=256, draft="eagle3", gamma=gamma, acceptance_rate=rate, temperature=0.0,
    )  # fmt: skip
    (row,) = [row for row in plan.candidates if row.is_speculative]
    ends = (row.speedup_low, row.speedup_high)
    line = LINE.replace("3,2.5", f"3,{tokens:.9f}").replace(
        "vllm,0.24.0", "vllm,0.33.0"
    )
    lines = []
    for end in ends:
        for factor in (0.999, 1.001):
            measured = f"800,{800 * end * factor:.9g},decode only"
            lines.append(line.replace("800,1200,", measured))
    pairs, _ = read_rows([write(tmp_path / "four.csv", *lines)], PairRow)
    assert all(pair.is_decoding for pair in pairs)
    predicted = predict_pairs(pairs, [tokens] * len(pairs))
    assert predicted.low == pytest.approx(ends[0], rel=1e-6)
    assert predicted.high == pytest.approx(ends[1], rel=1e-6)
    assert predicted.is_inside(pairs).tolist() == [False, True, True, False]
