"""Notes to read before relying on a plan, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from magicdec.errors import either
from magicdec.naming import draft_name
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.law import LARGEST
from magicdec.perfmodel.forward import EXPERT_IMBALANCE
from magicdec.perfmodel.intervals import (
    is_engine_fitted_on,
    is_one_head_of_many,
    one_token_pass,
    untimed,
)
from magicdec.perfmodel.plan.request import Case, DraftOption, lengths_of
from magicdec.perfmodel.plan.rows import Users
from magicdec.perfmodel.plan.search import formats_that_fit
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import predict
from magicdec.plan_document import CaseAnswer
from magicdec.plan_rows import Candidate
from magicdec.specs.speculation import draft_kind
from magicdec.units import GIGA, MILLI

LEAST_LOSS = 0.03
"""Share of the speed that lost prefix hits cost before a plan says so."""


def notes(
    cases: list[Case], case: Case, answer: CaseAnswer, drafted: list[Candidate]
) -> tuple[list[str], list[str]]:
    """The notes on a plan whose first case is answered, out of `drafted`: those that may change what
    to do, and the others, which the intervals hold. `cases` of all devices.
    """
    best = answer.best
    key = [*_on_spread(case, answer), *_on_kernels(cases)]
    key += [*_on_devices(cases, best), *_on_engine(case, best), *_on_hits(case, best)]
    key += _on_window(case, best, drafted)
    of_drafts, others = _on_drafts(case, best, drafted)
    rest = [*_on_engine_fit(cases), *_on_measured(case, best), *_on_table(case, answer)]
    return [*key, *of_drafts], [*rest, *others]


def _on_devices(cases: list[Case], best: Candidate) -> Iterator[str]:
    """Formats with which one device holds the model, where their number was not given."""
    groups: dict[str, list[str]] = {}
    for case in cases:
        request = case.request
        count = case.tp_sizes[-1]
        if count == 1 or request.tp_size is not None or request.num_gpus is not None:
            continue
        longest = max(lengths_of(request), key=lambda lengths: lengths.prompt_len)
        one = replace(case, tp_sizes=(1,), lengths=longest)
        batch = max(request.batch_sizes, default=best.batch_size)
        formats = formats_that_fit(one, batch=batch)
        if formats:
            groups.setdefault(either(formats), []).append(f"{count} x {case.hardware.name}")
    for formats_text, devices in groups.items():
        one_does = "one does" if len(devices) == 1 else "one of each does"
        yield (
            f"{', '.join(devices)} are the fewest that hold {cases[0].model.name} with weights in "
            f"{cases[0].precision.weight_dtype}; {one_does} with --weight-dtype {formats_text}"
        )


def _on_measured(case: Case, best: Candidate) -> Iterator[str]:
    """Kernels that nobody timed on the device, and draft methods that no server was measured with."""
    engine = case.engine
    formats = case.precision
    hardware = case.hardware.name
    if case.hardware.is_measured and (kernels := untimed(one_token_pass(case.setup(None)))):
        yield f"no kernels were timed on {hardware} for {', '.join(kernels)}: intervals are wider for it"
    if best.is_speculative and not engine.is_speculation_fitted(
        hardware,
        formats.weight_dtype,
        formats.kv_dtype,
    ):
        yield (
            f"no {engine.name} server with speculation was measured on {hardware} with {formats.weight_dtype} weights "
            f"and a {formats.kv_dtype} cache: the interval is wider for it"
        )


def _on_spread(case: Case, answer: CaseAnswer) -> Iterator[str]:
    """How the best is spread over devices, and which of them it leaves idle."""
    best = answer.best
    spread = case.spread
    link = case.hardware.link
    given = case.request.num_gpus or 0
    if idle := max(given - best.num_gpus * best.num_replicas, 0):
        yield (
            f"{idle} of the {given} GPUs given stay{'s' if idle == 1 else ''} idle: "
            f"{best.layout.label} divides no more"
        )
    if spread.is_spread and best.num_gpus > link.reach:
        rate = link.between_nodes_bytes_per_s
        if rate is None:
            over = "a network that is not known"
        else:
            over = f"a network of {rate / GIGA:.0f} GB/s per device"
        yield f"{best.layout.label} spans nodes over {over}: " + (
            "sends between stages are an unmeasured estimate, with wider intervals"
            if spread.pp > 1
            else "sending tokens to their experts is priced as DeepEP's kernels were measured"
        )
    if spread.pp > 1:
        able = ", ".join(case.engine.staged_drafts)
        if able:
            runs = f"{able} alone"
        else:
            runs = "no draft: decoding is autoregressive"
        yield f"with stages engine {case.engine.name} runs {runs}"
    if spread.whole_experts:
        yield (
            f"the fullest rank's experts are taken to get {EXPERT_IMBALANCE:g} times the mean of tokens: an estimate, "
            "within the interval from none to half as many more"
        )


def _on_kernels(cases: list[Case]) -> Iterator[str]:
    """Devices whose times are estimates."""
    unmeasured = [each.hardware.name for each in cases if not each.hardware.is_measured]
    if unmeasured:
        curves = (
            "its curves are estimates" if len(unmeasured) == 1 else "their curves are estimates"
        )
        yield f"no kernels were measured on {', '.join(unmeasured)}: {curves}, with wider intervals"
    for each in cases:
        name, link = each.hardware.name, each.hardware.link
        if each.hardware.kind == "gpu" and max(each.tp_sizes) > link.reach:
            rate = link.between_nodes_bytes_per_s
            yield f"tp {max(each.tp_sizes)} spans nodes of {link.reach} x {name}: " + (
                "the network between them is not known, so its times are too short; give "
                "link.between_nodes_bytes_per_s in a hardware profile"
                if rate is None
                else f"collectives over the network ({rate / GIGA:.0f} GB/s per device) are an estimate of which "
                "nothing was measured, with wider intervals"
            )


def _on_engine_fit(cases: list[Case]) -> Iterator[str]:
    """Engines whose fixed costs were not fitted, or elsewhere."""
    engine = cases[0].engine
    if not engine.fitted_on:
        yield f"engine profile {engine.name} is not fitted to measurements: its fixed costs are estimates"
    elsewhere = []
    for each in cases:
        if not is_engine_fitted_on(each.hardware, each.engine):
            elsewhere.append(each.hardware.name)
    if elsewhere:
        yield (
            f"engine profile {engine.name} was fitted on {engine.fitted_device}: "
            f"its fixed costs on {', '.join(elsewhere)} are less sure, which is in the intervals"
        )


def _on_engine(case: Case, best: Candidate) -> Iterator[str]:
    """The engine's defaults that bear on the best configuration."""
    engine = case.engine
    if not best.step.is_captured:
        if best.gamma and engine.captured_tokens:
            tokens = f" x {best.gamma + 1} tokens"
        else:
            tokens = ""
        yield (
            f"engine {engine.name} captures no graph for batch {best.batch_size}{tokens} by default, and is priced as "
            "if it did: raise its limit, as `magicdec export` does"
        )
    if best.is_speculative and (
        about := engine.draft_notes.get(draft_kind(best.draft, best.draft_method))
    ):
        yield f"{best.draft}/{best.draft_method} {about}"


def _on_hits(case: Case, best: Candidate) -> Iterator[str]:
    """The prefix hits that the best row's draft loses, where that costs more than LEAST_LOSS."""
    engine = case.engine
    if not best.is_speculative or best.draft_method not in engine.drops_last_unit:
        return
    (option,) = [
        each
        for each in case.options
        if (each.draft, each.method) == (best.draft, best.draft_method)
    ]
    points = Points(
        batch=float(best.batch_size),
        context=case.lengths.prompt_len,
        tp=best.tp_size,
        budget=best.draft_budget or 0,
        gamma=best.gamma,
        gen_len=case.lengths.growth,
        cached=case.request.cached,
    )
    losing = predict(case.setup(option), option.acceptance, points)
    keeping_case = keeping_last_unit(case)
    keeping = predict(keeping_case.setup(option), option.acceptance, points)
    slow = Users.of(case, losing)
    fast = Users.of(keeping_case, keeping)
    loss = 1.0 - float(np.ravel(slow.rate_per_gpu / fast.rate_per_gpu)[0])
    what = "of the tokens per second"
    if slow.whole is None:
        loss = 1.0 - float(np.ravel(fast.first_s / slow.first_s)[0])
        what = "of the time to the first token"
    if loss > LEAST_LOSS:
        yield hits_lost(case, best, f"{loss:.0%} {what}", int(losing.hits.unit_tokens))


def _on_window(case: Case, best: Candidate, drafted: list[Candidate]) -> Iterator[str]:
    """The gain of a head by the window that was chosen, against its whole cache."""
    flag = case.engine.draft_windows.get(best.draft_method)
    if not best.draft_budget or flag is None:
        return
    same = ("draft", "draft_method", "hardware", "tp_size", "batch_size", "context_len")
    whole = [
        row
        for row in drafted
        if not row.draft_budget and all(getattr(row, each) == getattr(best, each) for each in same)
    ]
    if not whole:
        return
    row = max(whole, key=lambda each: each.speedup)
    name = draft_name(best.draft, best.draft_method)
    yield (
        f"{name} sees {best.draft_budget:,} of {best.context_len:,} tokens ({flag}){_why(case, best)}: "
        f"{_pace(best)}; with its whole cache {_pace(row)}"
    )


def _why(case: Case, best: Candidate) -> str:
    """Why a window raises acceptance: it is no longer than what the head was trained to."""
    (option,) = [
        each
        for each in case.options
        if (each.draft, each.method) == (best.draft, best.draft_method)
    ]
    trained = option.acceptance.trained_len
    if trained is None or (best.draft_budget or 0) > trained:
        return ""
    return f", within the {trained:,} that such heads are usually trained to"


def _pace(row: Candidate) -> str:
    step_ms = row.step.step_s / MILLI
    return (
        f"{row.drafting.tokens_per_step:.2f} tokens per step of {step_ms:.1f} ms at gamma {row.gamma}, "
        f"{row.speedup:.2f}x"
    )


def keeping_last_unit(case: Case) -> Case:
    """The case on an engine whose drafts keep the last unit of each prefix hit."""
    return replace(case, engine=msgspec.structs.replace(case.engine, drops_last_unit=()))


def hits_lost(case: Case, best: Candidate, cost: str, unit_tokens: int) -> str:
    """The cost of a draft's lost prefix hits, and the setting that keeps them."""
    name = draft_name(best.draft, best.draft_method)
    note = (
        f"with {name} {case.engine.name} computes the last {unit_tokens:,} matched tokens of each "
        f"prefix hit anew, which costs {cost}"
    )
    if case.engine.keep_last_unit:
        note += f"; {case.engine.keep_last_unit} keeps them, and may lower the acceptance"
    return note


def _on_table(case: Case, answer: CaseAnswer) -> Iterator[str]:
    """The cost of batches that draft nothing once a draft is set up, and of a gamma that varies, up
    to the best batch at its context."""
    table = answer.gamma_table
    best = answer.best
    if table.gamma_set_up is None or table.idle_speedup is None:
        return
    column = table.context_lens.index(best.context_len)
    count = table.batch_sizes.index(best.batch_size) + 1
    gammas = [row[column] for row in table.gamma_set_up[:count]]
    lost = []
    for row, gamma in zip(table.idle_speedup[:count], gammas, strict=True):
        if gamma == 0:
            lost.append(1.0 - row[column])
    if lost:
        yield (
            f"where the table drafts nothing, having the draft set up costs up to {max(lost):.0%} of the speed of an "
            "engine without it"
        )
    if len(set(gammas)) > 1 and case.engine.gamma_table_note:
        yield case.engine.gamma_table_note


def _on_drafts(
    case: Case, best: Candidate, drafted: list[Candidate]
) -> tuple[list[str], list[str]]:
    """How well the acceptance of drafts is known: notes that bear on the answer, and the others."""
    key: list[str] = []
    others: list[str] = []
    for option in case.options:
        is_best = (option.draft, option.method) == (best.draft, best.draft_method)
        others.extend(_on_full_cache(case, option, best.context_len))
        is_windowed = is_best and best.draft_budget is not None
        gaps = list(_on_conditions(case, option, best.context_len, is_windowed=is_windowed))
        if is_best:
            key.extend(gaps)
        else:
            others.extend(gaps)
        if is_best and best.drafting.is_extrapolated:
            key.append(_extrapolation(option.acceptance, best, drafted))
        others.extend(_on_origin(case, option, is_best=is_best))
    if not best.is_speculative and drafted and max(row.speedup for row in drafted) <= 1.0:
        others.append("speculation does not pay here: decode autoregressively")
    return key, others


def _on_full_cache(case: Case, option: DraftOption, context_len: int) -> Iterator[str]:
    limit = (option.model or case.model).max_position_embeddings
    if option.method == "full" and limit < context_len:
        yield (
            f"{option.draft} was made for {limit} tokens: with its full cache it cannot follow "
            "this context"
        )


def _on_conditions(
    case: Case, option: DraftOption, context_len: int, *, is_windowed: bool
) -> Iterator[str]:
    """Differences between this case and what acceptance was trained for or measured at."""
    measured = option.acceptance
    asked = case.request.sampling.temperature
    if context_len > (measured.trained_len or LARGEST) and not is_windowed:
        yield _on_length(option, measured, context_len)
    if measured.temperature not in (None, asked):
        yield (
            f"acceptance of {option.draft}/{option.method} was measured at temperature "
            f"{measured.temperature:g}, not {asked:g}"
        )


def _on_origin(case: Case, option: DraftOption, *, is_best: bool) -> Iterator[str]:
    """Another model or another head from which acceptance is taken."""
    measured = option.acceptance
    if measured.carried_from:
        yield (
            f"acceptance of {option.draft}/{option.method} was measured on {measured.carried_from} "
            f"and is carried over to {case.model.name}, with a wider interval"
        )
    if is_best and is_one_head_of_many(measured):
        head = "one published head"
        if measured.checkpoint:
            head = f"the head {measured.checkpoint}"
        yield (
            f"acceptance is that of {head}: the interval spans what other heads of a model accept"
        )


def _on_length(option: DraftOption, measured: AcceptanceProfile, context: int) -> str:
    """A head that was trained to fewer tokens than the context has."""
    trained = measured.trained_len or 0
    name = draft_name(option.draft, option.method)
    here, near = (
        float(measured.law.first_rate(budget=None, context=each)) for each in (context, trained)
    )
    if option.head is not None:
        subject = f"this {name} head is"
    else:
        subject = f"{name} heads are usually"
    return (
        f"{subject} trained to {trained:,} tokens: at {context:,} the first drafted token is accepted in {here:.0%} of "
        f"steps, {near:.0%} up to there"
    )


def _extrapolation(measured: AcceptanceProfile, best: Candidate, drafted: list[Candidate]) -> str:
    """Where the best row's acceptance was measured, and what the best row there is expected to do."""
    if measured.measured_gamma is not None:
        deepest = [float(measured.measured_gamma)]
    else:
        deepest = []
    axes = (
        ("budget", measured.measured_budgets),
        ("context", measured.measured_contexts),
        ("gamma up to", deepest),
    )
    where = ", ".join(f"{what} {_range(values)}" for what, values in axes if values)
    note = (
        f"acceptance of {best.draft}/{best.draft_method} was measured at {where}: the best row extrapolates it, "
        "with a wider interval"
    )
    same = ("draft", "draft_method", "hardware", "tp_size", "batch_size", "context_len")
    inside = [
        row
        for row in drafted
        if not row.drafting.is_extrapolated
        and all(getattr(row, name) == getattr(best, name) for name in same)
    ]
    if inside:
        row = max(inside, key=lambda each: (each.within_limits, each.fits, each.rate_per_gpu))
        if row.draft_budget:
            budget = f"budget {row.draft_budget}, "
        else:
            budget = ""
        note += (
            f"; within it {budget}gamma {row.gamma} gives {row.gain.speedup:.2f}x "
            f"({row.gain.low:.2f}-{row.gain.high:.2f})"
        )
    return note


def _range(values: list[float]) -> str:
    return f"{min(values):.0f}" + (f" to {max(values):.0f}" if len(values) > 1 else "")
