"""The tables around a plan's choice, each cell against a prediction of its own, and the choice over texts against its
definition."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.perfmodel.acceptance import constant_profile
from magicdec.perfmodel.plan import choice as rules
from magicdec.perfmodel.plan import tables
from magicdec.perfmodel.plan.explain import tasks_of, with_paying_rate
from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.planner import Answer, best_of_layouts
from magicdec.perfmodel.serving import whole_requests
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import Prediction, predict
from magicdec.schema.plan import NeedsAcceptance
from magicdec.schema.row import (
    Candidate,
    configuration,
    same_configuration,
)
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.speculation import SELF
from magicdec.tasks import TASKS, WEIGHTS
from tests.perfmodel.cases import asked, case_of, drafts_of, found_of, ways_of

QUESTIONS: list[dict[str, Any]] = [
    {"draft": "eagle3", "batch_sizes": (12,), "context_lens": (3000,)},
    {"draft": SELF, "draft_budgets": (1024,), "context_lens": (30_000,), "plugin": True, "batch_sizes": (16,)},
    {"draft": "llama-3.2-1b", "gen_len": 200},
]  # fmt: skip


@cache
def answer_of(**question: Any) -> Answer:
    found = best_of_layouts([case_of(**question)], [])
    assert found is not None
    return found


def shown_row(question: dict[str, Any]) -> Candidate:
    """The row whose draft the table is of."""
    choice = answer_of(**question).document.choice
    return choice.left_out or choice.row


def every_gamma(
    case: Case, option: DraftOption, row: Candidate, batch: int, context: float
) -> Prediction:
    points = Points(
        batch=float(batch),
        context=context,
        tp=row.tp_size,
        budget=row.draft_budget,
        gamma=np.array(case.gammas_of(option)),
        gen_len=float(case.request.gen_len),
        is_grid=True,
    )
    return predict(case.setup(option), option.acceptance, points)


def alone_at(case: Case, row: Candidate, batch: int, context: float) -> Prediction:
    points = Points(
        batch=float(batch),
        context=context,
        tp=row.tp_size,
        gen_len=float(case.request.gen_len),
    )
    return predict(case.setup(None), None, points)


def gains(case: Case, one: Prediction) -> Any:
    """What decides: of whole requests where a length is generated."""
    speedup = one.full(one.speedup)
    if case.request.gen_len:
        requests = whole_requests(one, output_len=float(case.request.gen_len))
        return one.full(requests.speedup_at(one.speedup))
    return speedup


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_cell_is_the_best_gamma_of_its_batch_and_context(
    question: dict[str, Any],
) -> None:
    case = case_of(**question)
    table = answer_of(**question).document.gamma_table
    row = shown_row(question)
    option = case.option_of(row)
    best = answer_of(**question).document.choice.row
    for place in (0, 3, len(table.batch_sizes) - 1):
        for column in (0, 4, len(table.context_lens) - 1):
            batch, context = table.batch_sizes[place], table.context_lens[column]
            one = every_gamma(case, option, row, batch, float(context))
            alone = alone_at(case, row, batch, float(context))
            has_room = bool(alone.memory.fits)
            can_run = one.full(one.valid & (one.memory.fits | (not has_room)))
            by = np.where(can_run, gains(case, one), 0.0)
            chosen = int(np.argmax(by))
            pays = by[chosen] > 1.0
            decoding = float(one.full(one.speedup)[chosen])
            assert table.gamma[place][column] == (chosen + 1 if pays else 0)
            assert table.speedup[place][column] == pytest.approx(decoding if pays else 1.0)  # fmt: skip
            fits = one.full(one.memory.fits)[chosen] if pays else has_room
            assert table.fits[place][column] == bool(fits)
            assert table.speedup_low is not None
            assert table.speedup_high is not None
            low, high = table.speedup_low[place][column], table.speedup_high[place][column]  # fmt: skip
            if not can_run.any():
                assert (low, high) == (0.0, 0.0)
            else:
                assert low <= decoding <= high
            if not case.request.gen_len:
                verdict = table.verdict[place][column]
                if not pays or high <= 1.0:
                    assert verdict == "does not pay"
                elif low > 1.0:
                    assert verdict == "pays"
            even = table.break_even_gen_len[place][column]
            if not pays:
                assert even is None
            elif even is not None:
                saved = even * float(alone.autoregressive_step_s - one.full(one.tpot_s)[chosen])  # fmt: skip
                paid = batch * float(np.ravel(one.draft_prefill_s)[0])
                assert saved >= paid * (1 - 1e-9)
                assert saved * (even - 1) <= paid * even + 1e-9
            if not best.is_speculative:
                assert table.idle_speedup is None
                continue
            assert table.idle_speedup is not None
            assert table.gamma_set_up is not None
            assert table.speedup_set_up is not None
            idle = table.idle_speedup[place][column]
            assert 0.0 < idle <= 1.0 + 1e-9
            runs = decoding if can_run.any() else 0.0
            assert table.speedup_set_up[place][column] == pytest.approx(max(runs, idle))
            assert table.gamma_set_up[place][column] == (chosen + 1 if runs > idle else 0)  # fmt: skip
    assert table.batch_sizes == sorted({*tables.TABLE_BATCHES, row.batch_size})
    assert set(table.context_lens) <= {*tables.TABLE_CONTEXTS, row.context_len}
    assert table.tp_size == row.tp_size


def test_a_table_reaches_every_batch_and_context_within_a_factor_of_two() -> None:
    """So what is looked up in a table is of a load within a factor of 1.5; and contexts between which a break-even is
    interpolated lie within a tenth of each other, with both ends among every second of them."""
    for axis in (tables.TABLE_BATCHES, tables.TABLE_CONTEXTS):
        powers = [math.log2(value) for value in axis]
        assert powers == sorted({round(power) for power in powers})
        assert max(np.diff(powers)[1:]) <= 1.0
        assert max(np.diff(powers)) <= 2.0
    case = case_of(**QUESTIONS[0])
    best = answer_of(**QUESTIONS[0]).document.choice.row
    contexts = tables.table_contexts(case, best)
    fine = tables.contexts_between(contexts)
    assert fine[::2][0] == fine[0] == contexts[0] == 512
    assert fine[::2][-1] == fine[-1] == contexts[-1] == 131_072
    assert max(fine[1:] / fine[:-1]) < 1.1


def test_no_context_of_a_table_is_longer_than_the_model_reads() -> None:
    """With what is generated at its end."""
    for gen_len in (0, 1, 1000, 66_000):
        case = dataclasses.replace(
            case_of(draft="none"),
            request=msgspec.structs.replace(
                case_of(draft="none").request, gen_len=gen_len
            ),
        )
        best = found_of(draft="none").drafts[0].rows[0]
        contexts = tables.table_contexts(case, best)
        for context in tables.TABLE_CONTEXTS:
            fits = context + gen_len <= case.model.longest_context
            assert (context in contexts) == fits


def test_a_table_without_a_draft_drafts_nothing() -> None:
    case = case_of(draft="none")
    best = found_of(draft="none").drafts[0].rows[0]
    for leading in (None, best):
        table = tables.gamma_table(case, best, leading)
        assert {each for row in table.gamma for each in row} == {0}
        assert {each for row in table.speedup for each in row} == {1.0}
        assert {each for row in table.verdict for each in row} == {"does not pay"}
        assert {each for row in table.break_even_gen_len for each in row} == {None}
        assert set(table.break_even_context) == {None}
        assert (table.draft, table.draft_budget) == ("none", None)
        assert table.gamma_set_up is None
        for batch, fits in zip(table.batch_sizes, table.fits, strict=True):
            for context, fit in zip(table.context_lens, fits, strict=True):
                alone = alone_at(case, best, batch, float(context))
                assert fit == bool(alone.memory.fits)


# The answer's own tables


@pytest.mark.parametrize("question", [*QUESTIONS, {"draft": "eagle3", "tp_size": 4}])
def test_a_breakdown_is_of_the_whole_step_and_no_operation_beats_its_ceiling(
    question: dict[str, Any],
) -> None:
    document = answer_of(**question).document
    row = shown_row(question)
    case = case_of(**question)
    parts = {
        "autoregressive": row.step.autoregressive_s, "draft": row.step.draft_s, "verify": row.step.verify_s,
        "accept": row.step.accept_s, "upkeep": row.step.upkeep_s,
    }  # fmt: skip
    hw = case.hardware
    dtype = case.precision.compute_dtype
    for name, total in parts.items():
        operations = document.breakdown[name]
        assert sum(each.time_s for each in operations) == pytest.approx(total)
        for each in operations:
            assert each.time_s > 0.0
            assert each.flops / hw.compute_rate(dtype) <= each.ceiling_s * (1 + 1e-9)
            if each.bound_by != "link" and not each.op.startswith("all"):
                assert each.bytes / hw.memory_bytes_per_s <= each.ceiling_s * (1 + 1e-9)
            assert len({repr(kernel) for kernel in each.kernels}) == len(each.kernels)
    # a step reads the weights once, and every sequence's cache
    read = sum(each.bytes for each in document.breakdown["autoregressive"] if "reduce" not in each.op)  # fmt: skip
    weights = 2.0 * case.model.num_parameters / row.tp_size
    held = row.batch_size * (row.context_len + case.request.gen_len / 2)
    kv = (
        held * 32 * 2 * 8 * 128 * 2.0 / row.tp_size
    )  # layers, keys and values, heads, their width, bytes
    assert read == pytest.approx(weights + kv, rel=0.1)
    if row.tp_size > 1:
        # a ring sends each rank's part around twice, but for its own
        link = [each for each in document.breakdown["autoregressive"] if each.bound_by == "link"]  # fmt: skip
        assert link
        for each in link:
            rounds = 2.0 * (row.tp_size - 1) / row.tp_size
            assert each.ceiling_s == pytest.approx(rounds * each.bytes / hw.link.bytes_per_s)  # fmt: skip


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "rtx-4090", "v100-sxm-32gb"])
def test_matrix_products_reach_a_share_of_the_device_s_roof(device: str) -> None:
    case = case_of(hardware=(device,), draft="none", model="qwen2.5-7b")
    found = tables.ceilings(case.setup(None))
    assert found.memory_bytes_per_s == case.hardware.memory_bytes_per_s
    assert found.flops_per_s == case.hardware.compute_rate(case.precision.compute_dtype)
    assert 0.3 < found.gemm_bytes_per_s / found.memory_bytes_per_s <= 1.0
    assert 0.3 < found.gemm_flops_per_s / found.flops_per_s <= 1.0


@pytest.mark.parametrize("question", QUESTIONS)
def test_memory_is_the_sum_of_its_parts_and_the_batches_those_that_fit(
    question: dict[str, Any],
) -> None:
    use = answer_of(**question).document.memory
    case = case_of(**question)
    row = answer_of(**question).document.choice.row
    option = case.option_of(row) if row.is_speculative else None
    assert use.largest_autoregressive_batch == case.largest_batches()[0]
    drafted = case.largest_batches(
        option=option, budget=row.draft_budget, gamma=row.gamma
    )
    assert use.largest_batch == drafted[0] <= use.largest_autoregressive_batch
    assert row.fits == (row.batch_size <= use.largest_batch)


@pytest.mark.parametrize("tp_sizes", [(1, 2, 4)])
def test_memory_is_of_the_row_s_own_layout(tp_sizes: tuple[int, ...]) -> None:
    fields: dict[str, Any] = {"num_gpus": 4, "tp_size": None, "draft": "none"}
    case = ways_of(**fields)[0]
    assert case.tp_sizes == tp_sizes
    for row in found_of(**fields).drafts[0].rows:
        prediction = found_of(**fields).prediction(row)
        use = tables.memory_use(case, None, row, prediction)
        place = tp_sizes.index(row.tp_size)
        assert use.largest_batch == case.largest_batches()[place]
        assert use.largest_autoregressive_batch == use.largest_batch


@pytest.mark.parametrize(("draft", "method", "steps"), [
    ("eagle3", "eagle3", 0.0), ("ngram", "ngram", 0.0), (SELF, "streamingllm", 0.0), ("llama-3.2-1b", "full", 0.0),
    (SELF, "full", 0.0), ("eagle3", "eagle3", 10.0),
])  # fmt: skip
def test_the_least_rate_that_pays_pays_and_a_smaller_one_does_not(
    draft: str, method: str, steps: float
) -> None:
    """By plans of constant rates, one rate at a time; where a step costs much beside its tokens, by deep drafts."""
    lacking = NeedsAcceptance(draft=draft, draft_method=method, reason="")
    own = answer_of(draft="none", batch_sizes=(16,))
    if steps:
        more_s = steps * own.document.autoregressive.step_s
        engine = own.case.engine.with_constants({"overheads.step_overhead_s": more_s})
        own = dataclasses.replace(own, case=dataclasses.replace(own.case, engine=engine))  # fmt: skip
    case = own.case
    context = own.document.context_len
    found = with_paying_rate(
        case, own.point, context, lacking
    ).break_even_acceptance_rate
    budget = 512 if method == "streamingllm" else None
    model = load_model_spec(draft) if draft.startswith("llama") else None

    def pays(rate: float) -> bool:
        law = constant_profile(rate)
        option = DraftOption(draft=draft, method=method, model=model, budgets=(budget,), acceptance=law)  # fmt: skip
        points = dataclasses.replace(own.point, budget=budget, gamma=np.arange(1, 13))
        return bool(predict(case.setup(option), law, points).speedup.max() > 1.0)

    if found is None:
        assert not pays(1.0) or method == "ngram"
        return
    assert 0.0 < found <= 1.0
    assert found * 200 == pytest.approx(round(found * 200))
    if method != "ngram":  # whose step is shorter where it finds no draft
        assert pays(found)
        assert not pays(found - 0.005)


def test_the_row_without_a_draft_is_at_the_choice_s_batch_and_layout() -> None:
    """Also where it breaks the limits, so that the search did not keep it."""
    fields: dict[str, Any] = {"draft": "eagle3", "acceptance_rate": 0.9, "batch_sizes": (), "num_gpus": 1}  # fmt: skip
    for limit in (
        0.004,
        0.007,
    ):  # shorter than any step without a draft, and longer than some
        choice = answer_of(**fields, tpot_limit_s=limit).document.choice
        row, alone = choice.row, choice.without_draft
        assert row.is_speculative
        assert row.between_tokens_s <= limit
        assert not alone.is_speculative
        assert alone.draft_budget is None
        at = (row.batch_size, row.tp_size, row.context_len)
        assert (alone.batch_size, alone.tp_size, alone.context_len) == at
        assert not alone.within_limits
        assert alone.step.step_s == pytest.approx(row.step.autoregressive_s)
        baseline = choice.best_without_draft
        if baseline is None:
            assert alone.speedup_vs_best_autoregressive is None
        else:
            over = alone.rate / baseline.rate
            assert alone.speedup_vs_best_autoregressive == pytest.approx(over)
    assert baseline is not None


def test_of_several_batches_the_answer_is_that_of_the_chosen_one() -> None:
    """What is left out, and what the plugin would gain, are of the batch that is answered."""
    seen = set()
    for fields in ({"draft": "eagle3", "acceptance_rate": 0.05}, {"draft_budgets": (512,)}):  # fmt: skip
        both = answer_of(**fields, batch_sizes=(1, 60)).document.choice
        assert both.row.batch_size == 60
        own = answer_of(**fields, batch_sizes=(60,)).document.choice
        assert both.outcome == own.outcome
        for name in ("row", "left_out", "without_draft"):
            one, other = getattr(both, name), getattr(own, name)
            assert (one is None) == (other is None)
            if one is not None:
                assert same_configuration(one, other)
                seen.add(name)
    assert seen >= {"row", "left_out", "without_draft"}


# Texts


def row_of(place: int, gamma_: int, rate: float, *, runs: bool = True) -> Any:
    layout = SimpleNamespace(tp_size=1, pp_size=1, dp_size=1, ep_size=1)
    return SimpleNamespace(
        draft=f"draft {place}", draft_method="x", draft_budget=None, gamma=gamma_, batch_size=1, layout=layout,
        rate=rate, fits=runs, within_limits=True,
    )  # fmt: skip


class OnTable(rules.TextRates):
    """Texts whose rates are given."""

    def rates(self, row: Any) -> Any:
        return np.asarray(row.by_text)


ON_TABLE = OnTable(case=None, searched=None, drafts=[])  # type: ignore[arg-type]
RATES = st.lists(st.floats(0.5, 2.0), min_size=len(TASKS), max_size=len(TASKS))


def mean(losses: Any) -> float:
    total = sum(WEIGHTS[task] for task in TASKS)
    return sum(WEIGHTS[task] * loss for task, loss in zip(TASKS, losses, strict=True)) / total  # fmt: skip


@given(
    tables=st.lists(RATES, min_size=1, max_size=4),
    able=st.lists(st.booleans(), min_size=4, max_size=4),
    closeness=st.sampled_from([1.0, 0.01, 0.001]),
)
def test_the_choice_over_texts_loses_least_and_of_near_ones_least_at_worst(
    tables: list[list[float]], able: list[bool], closeness: float
) -> None:
    """By its definition, one text at a time: near is a mean loss within 0.3 % of the least."""
    rows = []
    for place, table in enumerate(tables):
        row = row_of(place, 1, 1.0, runs=able[place])
        row.by_text = [1.0 + closeness * (rate - 1.0) for rate in table]
        rows.append(row)
    running = [row for row in rows if row.fits] or rows
    losses = {}
    for row in rows:
        losses[row.draft] = [
            1.0 - own / max(other.by_text[text] for other in running)
            for text, own in enumerate(row.by_text)
        ]
    scores = ON_TABLE.scores(rows)
    chosen = max(running, key=lambda row: scores[configuration(row)])
    least = min(mean(losses[row.draft]) for row in running)
    near = [row for row in running if mean(losses[row.draft]) <= least + 0.003]
    weighed = [text for text, task in enumerate(TASKS) if WEIGHTS[task] > 0.0]

    def worst(row: Any) -> float:
        return max(losses[row.draft][text] for text in weighed)

    margin = 1e-9  # a loss just at the edge may round to either side
    assert mean(losses[chosen.draft]) <= least + 0.003 + margin
    clear = [row for row in near if mean(losses[row.draft]) <= least + 0.003 - margin]
    assert worst(chosen) <= min(map(worst, clear)) + margin
    for row in rows[1:]:
        expected = mean([1.0 - own / best for own, best in zip(row.by_text, rows[0].by_text, strict=True)])  # fmt: skip
        assert ON_TABLE.loss(row, rows[0]) == pytest.approx(expected, abs=1e-12)


def test_a_draft_competes_with_its_best_gamma() -> None:
    """Of expected rates: another gamma loses to any draft's best, whatever it gives on texts."""
    deep, shallow, other = row_of(0, 4, 1.2), row_of(0, 1, 1.1), row_of(1, 2, 0.3)
    deep.by_text = [0.2] * len(TASKS)
    shallow.by_text = [1.0] * len(TASKS)
    other.by_text = [0.1] * len(TASKS)
    rows = [deep, other, shallow]
    scores = ON_TABLE.scores(rows)
    ranked = [scores[configuration(row)] for row in rows]
    assert ranked == sorted(ranked, reverse=True)
    assert rules._is_best_depth([shallow, other, deep]).tolist() == [False, True, True]


def test_rates_of_rows_on_texts_are_the_usual_ones_times_what_texts_change() -> None:
    """A draft whose acceptance is the same on any text has one rate; with prompts to prefill a text changes the rest
    of the time alone."""
    for question in ({"gen_len": 200},):
        case = case_of(plugin=True, **question)
        found = rules.texts_of(case, found_of(plugin=True, **question))
        assert found is not None
        for on_texts in found.drafts:
            usual = [row.rate for row in on_texts.rows.rows]
            option = on_texts.rows.option
            if option is None or option.question is None:
                assert on_texts.rates == pytest.approx(np.tile(usual, (len(TASKS), 1)))
                continue
            for place, row in enumerate(on_texts.rows.rows[:2]):
                prefill = 0.0 if row.requests is None else row.requests.prefill_share
                for text, task in list(enumerate(TASKS))[:3]:
                    named = option.question._replace(task=task)
                    law = rules.profile_on(named, draft=option.draft, method=option.method)  # fmt: skip
                    at = on_texts.rows.prediction.take([place])
                    one = predict(case.setup(option), law, at.points)
                    slower = float(np.ravel(one.tpot_s)[0]) / row.tpot_s
                    rate = row.rate / (prefill + (1.0 - prefill) * slower)
                    assert on_texts.rates[text, place] == pytest.approx(rate, rel=1e-6)


def test_texts_are_asked_where_none_was_named_and_a_draft_is_believed() -> None:
    named = case_of(draft="eagle3", task="code")
    assert rules.texts_of(named, found_of(draft="eagle3", task="code")) is None
    given_rate = case_of(draft="eagle3", acceptance_rate=0.7)
    found = found_of(draft="eagle3", acceptance_rate=0.7)
    assert rules.texts_of(given_rate, found) is None
    assert rules.texts_of(case_of(draft="eagle3"), found_of(draft="eagle3")) is not None


def test_each_text_s_fastest_is_the_fastest_there() -> None:
    case = case_of(plugin=True)
    searched = found_of(plugin=True)
    found = rules.texts_of(case, searched)
    assert found is not None
    rows = [row for of_draft in searched for row in of_draft.rows[:4]]
    chosen = rows[6]
    for text, of_task in enumerate(tasks_of(found, chosen, rows)):
        assert (of_task.task, of_task.weight) == (TASKS[text], WEIGHTS[TASKS[text]])
        fastest = max(rows, key=lambda row: found.rates(row)[text])
        told = (of_task.draft, of_task.draft_method, of_task.gamma)
        assert told == (fastest.draft, fastest.draft_method, fastest.gamma)
        changes = found.rates(fastest)[text] / found.rates(chosen)[text] - 1.0
        assert of_task.changes == pytest.approx(max(changes, 0.0))
        assert of_task.own.low < of_task.own.speedup < of_task.own.high
    alone = searched.drafts[0].rows[0]
    for of_task in tasks_of(found, alone, [alone]):
        assert of_task.own.speedup == of_task.best.speedup == 1.0
        assert of_task.changes == 0.0


def test_options_that_nobody_published_are_not_considered_unless_named() -> None:
    named: Any = {"model": "gemma-2-9b", "hardware": ("h100",)}
    options, lacking = drafts_of(asked(**named))
    assert all(not option.is_hypothetical for option in options)
    told = {each.draft for each in lacking}
    assert "eagle3" in told
    assert not told & {option.draft for option in options}
    (option,), lacking = drafts_of(asked(**named, draft="eagle3"))
    assert option.is_hypothetical
    assert [each.draft for each in lacking] == ["eagle3"]
