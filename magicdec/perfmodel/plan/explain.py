"""Explanations of a plan's choice: notes to read before relying on it, the gain on each text that a server
may meet, and what would tell more."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from magicdec.counts import Z_90, expected_tokens_per_step
from magicdec.errors import either
from magicdec.naming import draft_name
from magicdec.perfmodel.acceptance import AcceptanceProfile, constant_profile
from magicdec.perfmodel.acceptance.law import LARGEST
from magicdec.perfmodel.acceptance.trained_length import LONGEST, SHORTEST
from magicdec.perfmodel.forward import EXPERT_IMBALANCE
from magicdec.perfmodel.intervals import (
    interval,
    is_engine_fitted_on,
    is_one_head_of_many,
    one_token_pass,
    tokens_error,
    untimed,
)
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.plan.choice import (
    CaseChoice,
    DraftOnTexts,
    Ranking,
    TextRates,
)
from magicdec.perfmodel.plan.drafts import RATE_BUDGET
from magicdec.perfmodel.plan.request import (
    DEFAULT_MAX_GAMMA,
    Case,
    DraftOption,
    lengths_of,
    on_generation,
)
from magicdec.perfmodel.plan.rows import Users, requests_of
from magicdec.perfmodel.plan.search import formats_that_fit
from magicdec.perfmodel.plan.standing import is_known_in_stages
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import predict
from magicdec.perfmodel.trees import TREES_LOSE
from magicdec.schema.plan import CaseAnswer, NeedsAcceptance, OfTask, Outlook
from magicdec.schema.row import NO_GAIN, Candidate, Gain
from magicdec.specs.attention_kernels import attention_path, layers_of
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.speculation import (
    HEAD_METHODS,
    LOOKUP_METHODS,
    SELF,
    SPARSE_METHODS,
    draft_model_name,
)
from magicdec.tasks import TASKS, WEIGHTS
from magicdec.units import GIGA, MILLI, format_percent, format_seconds

LEAST_LOSS = 0.03
"""Share of the speed that lost prefix hits cost before a plan says so."""


def notes(
    cases: list[Case],
    case: Case,
    answer: CaseAnswer,
    drafted: list[Candidate],
) -> tuple[list[str], list[str]]:
    """The notes on a plan: first those that may change what to do, then those on errors that the
    intervals cover. `case` is the answered one among `cases` of all devices; `drafted` are its
    speculative rows.
    """
    best = answer.best
    of_drafts, on_other_drafts = _drafts_notes(case, best, drafted)
    key = [
        *_start_notes(case, answer),
        *_pool_notes(case, best),
        *_spread_notes(case, answer),
        *_kernels_notes(cases),
        *_formats_notes(cases),
        *_devices_notes(cases, best),
        *_engine_notes(case, best),
        *_hits_notes(case, best),
        *_window_notes(case, best, drafted),
        *of_drafts,
    ]
    rest = [
        *_engine_fit_notes(cases),
        *_measured_notes(case),
        *_table_notes(answer),
        *_adaptive_notes(case, best),
        *on_other_drafts,
    ]
    return key, rest


def _start_notes(case: Case, answer: CaseAnswer) -> Iterator[str]:
    """Notes on whether it fits, on what is not known of the shown draft's checkpoint, and on what
    that needs."""
    if case.may_not_fit:
        yield case.may_not_fit
    shown = answer.choice.left_out or answer.best
    for option in case.options:
        if (option.draft, option.method) == (shown.draft, shown.draft_method):
            yield from option.remarks


def _pool_notes(case: Case, best: Candidate) -> Iterator[str]:
    """A pool that only decodes: when prompts come, and what is not in the answer."""
    if case.request.prefill == "here":
        return
    setup = case.setup(None)
    option = None
    if best.is_speculative:
        option = case.option_of(best)
        setup = case.setup(option)
    points = Points(
        batch=1.0,
        context=float(best.context_len),
        tp=best.tp_size,
        budget=best.draft_budget,
        gamma=best.gamma,
    )
    law = None if option is None else option.acceptance
    arrival = predict(setup, law, points)
    transfer_s = float(np.ravel(arrival.transfer_s)[0])
    prefill_s = float(np.ravel(arrival.prefill_s)[0])
    rate = f"{case.request.kv_link_gb_s:g} GB/s per device"
    yield (
        "this pool only decodes: a prompt is prefilled elsewhere, taken as alone on as "
        f"many of these devices ({format_seconds(prefill_s)}), and its keys and values "
        f"arrive at {rate} ({format_seconds(transfer_s)}); the prefilling pool's queue and "
        "devices are not in the answer"
    )


def _devices_notes(cases: list[Case], best: Candidate) -> Iterator[str]:
    """Formats in which one device holds the model, for devices whose number was not given."""
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
            groups.setdefault(either(formats), []).append(
                f"{count} x {case.hardware.name}"
            )
    for formats_text, devices in groups.items():
        fewest = "one"
        if len(devices) > 1:
            fewest = "one of each"
        yield (
            f"{cases[0].model.name} with {cases[0].precision.weight_dtype} weights needs at least "
            f"{either(devices)}; with --weight-dtype {formats_text} it fits on {fewest}"
        )


def _formats_notes(cases: list[Case]) -> Iterator[str]:
    """Devices that do not compute in the format that checkpoints are published in."""
    lacking = []
    for case in cases:
        if not case.hardware.has_bf16:
            lacking.append(case.hardware.name)
    if lacking:
        yield (
            f"{', '.join(lacking)} cannot compute in bf16: planned in fp16, of as many bytes "
            "(engines: --dtype half, as exports say)"
        )
    for case in cases:
        found = on_generation(case)
        if found is not None:
            yield found.says


def _measured_notes(case: Case) -> Iterator[str]:
    """Kernels that nobody timed on the device."""
    hardware = case.hardware.name
    if case.hardware.is_measured:
        kernels = untimed(one_token_pass(case.setup(None)))
        if kernels:
            yield f"nobody timed {', '.join(kernels)} on {hardware}: intervals are wider"


def _spread_notes(case: Case, answer: CaseAnswer) -> Iterator[str]:
    """How the best row is spread over devices, and how many of them it leaves idle."""
    best = answer.best
    spread = case.spread
    link = case.hardware.link
    given = case.request.num_gpus or 0
    idle = given - best.num_gpus * best.num_replicas
    if idle > 0:
        stay = "stay"
        if idle == 1:
            stay = "stays"
        yield (
            f"{idle} of the {given} GPUs given {stay} idle: {best.layout.label} runs on multiples "
            f"of {best.num_gpus}"
        )
    if spread.is_spread and best.num_gpus > link.reach:
        rate = link.between_nodes_bytes_per_s
        over = "a network of unknown speed"
        if rate is not None:
            over = f"a network of {rate / GIGA:.0f} GB/s per device"
        estimate = "sending tokens to their experts is priced as DeepEP's kernels were measured"
        if spread.pp > 1:
            estimate = (
                "sends between stages are an unmeasured estimate, with wider intervals"
            )
        yield f"{best.layout.label} spans nodes over {over}: {estimate}"
    if spread.pp > 1:
        able = []
        for kind in case.engine.drafts:
            draft, _, method = kind.partition("/")
            if is_known_in_stages(
                case.engine, draft, method or draft, case.model, spread.pp
            ):
                able.append(kind)
        drafts = either(able) if able else "no draft"
        yield (
            f"with pipeline stages, {drafts} of {case.model.name} is known to run in engine "
            f"{case.engine.name}"
        )
    if spread.whole_experts:
        yield (
            f"the busiest rank's experts are assumed to get {EXPERT_IMBALANCE:g} times the mean "
            "number of tokens; the interval covers 1 to 1.5 times"
        )


def _kernels_notes(cases: list[Case]) -> Iterator[str]:
    """Devices whose times are estimates."""
    unmeasured = [case.hardware for case in cases if not case.hardware.is_measured]
    if unmeasured:
        names = []
        for hardware in unmeasured:
            name = hardware.name
            if hardware.curves_from:
                name += f" ({hardware.curves_from}'s stand in)"
            names.append(name)
        error = max(GemmCurve.of(each).fit.relative_error for each in unmeasured)
        factor = math.exp(Z_90 * error)
        yield (
            f"no kernels were timed on {', '.join(names)}: times are estimates, 90 % of them within a factor "
            f"of {factor:.1f}"
        )
    for case in cases:
        name = case.hardware.name
        for layer in layers_of(case.model, case.precision.kv_dtype):
            path = attention_path(case.engine, case.hardware, layer)
            if len(path.laws) > 1 and not path.backend:
                yield (
                    f"whether attention of several tokens splits the context is not known on {name}: at long "
                    "contexts a draft may pay or not"
                )
            elif len(path.laws) > 1:
                titles = " or ".join(dict.fromkeys(law.title for law in path.laws))
                yield (
                    f"how {titles} takes several tokens depends on its release, and no server on {name} "
                    "tells it: the interval holds both"
                )
            elif any(law.expands for law in path.laws):
                yield (
                    f"{path.backend} expands the whole context in each step of several tokens"
                    + (f"; {path.costs}" if path.costs else "")
                )
            elif path.loses_graphs:
                yield (
                    f"{path.backend or 'attention'} keeps steps of several tokens out of captured graphs there, which "
                    "costs half or one and a half times what is priced"
                )
    for case in cases:
        link = case.hardware.link
        widest = max(case.tp_sizes)
        if case.hardware.kind != "gpu" or widest <= link.reach:
            continue
        spans = f"tp {widest} spans nodes of {link.reach} x {case.hardware.name}"
        rate = link.between_nodes_bytes_per_s
        if rate is None:
            yield (
                f"{spans}: the network between them is not known, so its times are too short; "
                "give link.between_nodes_bytes_per_s in a hardware profile"
            )
        else:
            yield (
                f"{spans}: collectives over the network ({rate / GIGA:.0f} GB/s per device) are "
                "an unmeasured estimate, with wider intervals"
            )


def _engine_fit_notes(cases: list[Case]) -> Iterator[str]:
    """Engines whose fixed costs were not fitted, or fitted on another device."""
    engine = cases[0].engine
    if not engine.fitted_on:
        yield (
            f"engine profile {engine.name} is not fitted to measurements: its fixed costs are "
            "estimates"
        )
    elsewhere = []
    for case in cases:
        if not is_engine_fitted_on(case.hardware, case.engine):
            elsewhere.append(case.hardware.name)
    if elsewhere:
        yield (
            f"engine profile {engine.name} was fitted on {engine.fitted_device}: its fixed costs "
            f"on {', '.join(elsewhere)} are less certain, and intervals are wider"
        )


def _engine_notes(case: Case, best: Candidate) -> Iterator[str]:
    """The engine's defaults that bear on the best configuration."""
    engine = case.engine
    if not best.step.is_captured:
        tokens = ""
        if best.gamma and engine.graphs.captured_tokens:
            tokens = f" x {best.gamma + 1} tokens"
        yield (
            f"engine {engine.name} captures no graph for batch {best.batch_size}{tokens} by "
            "default, but the plan assumes one: raise its limit, as `magicdec export` does"
        )
    if not best.is_speculative:
        return
    if engine.overheads.tree_step_s and best.draft_method in HEAD_METHODS:
        yield TREES_LOSE
    about = engine.draft(best.draft, best.draft_method).note
    if about:
        yield f"{best.draft}/{best.draft_method} {about}"


def _hits_notes(case: Case, best: Candidate) -> Iterator[str]:
    """The cost of the prefix hits that the best row's draft loses, if it is above LEAST_LOSS."""
    engine = case.engine
    if (
        not best.is_speculative
        or best.draft_method not in engine.prefix_cache.drops_last_unit
    ):
        return
    option = case.option_of(best)
    points = Points(
        batch=float(best.batch_size),
        context=case.lengths.prompt_len,
        tp=best.tp_size,
        budget=best.draft_budget,
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
        yield hits_lost(
            case, best, f"{format_percent(loss)} {what}", int(losing.hits.unit_tokens)
        )


def _has_the_draft_of(row: Candidate, best: Candidate) -> bool:
    """Whether two rows differ in budget and gamma at most."""
    return (
        row.draft == best.draft
        and row.draft_method == best.draft_method
        and row.hardware == best.hardware
        and row.tp_size == best.tp_size
        and row.batch_size == best.batch_size
        and row.context_len == best.context_len
    )


def _window_notes(
    case: Case, best: Candidate, drafted: list[Candidate]
) -> Iterator[str]:
    """The speedup of a head with the chosen window, compared with its whole cache."""
    flag = case.engine.draft(best.draft, best.draft_method).window_setting
    if best.draft_budget is None or not flag:
        return
    whole = []
    for row in drafted:
        if row.draft_budget is None and _has_the_draft_of(row, best):
            whole.append(row)
    if not whole:
        return
    fastest = max(whole, key=lambda row: row.speedup)
    name = draft_name(best.draft, best.draft_method)
    yield (
        f"{name} sees {best.draft_budget:,} of {best.context_len:,} tokens ({flag})"
        f"{_why(case, best)}: {_pace(best)}; with its whole cache {_pace(fastest)}"
    )


def _why(case: Case, best: Candidate) -> str:
    """The reason why a window raises acceptance: the head was trained on contexts of its length."""
    trained = case.option_of(best).acceptance.trained_len
    window = best.draft_budget
    if trained is None or window is None or window > trained:
        return ""
    return f", within the {trained:,} that such heads are usually trained on"


def _pace(row: Candidate) -> str:
    step_ms = row.step.step_s / MILLI
    tokens = row.drafting.tokens_per_step
    return f"{tokens:.2f} tokens per {step_ms:.1f} ms step at gamma {row.gamma}, {row.speedup:.2f}x"


def keeping_last_unit(case: Case) -> Case:
    """The case on an engine whose drafts keep the last unit of each prefix hit."""
    return replace(
        case, engine=case.engine.with_constants({"prefix_cache.drops_last_unit": ()})
    )


def hits_lost(case: Case, best: Candidate, cost: str, unit_tokens: int) -> str:
    """The cost of a draft's lost prefix hits, and the setting that keeps them."""
    name = draft_name(best.draft, best.draft_method)
    note = (
        f"with {name}, {case.engine.name} recomputes the last {unit_tokens:,} matched tokens of "
        f"each prefix hit, which costs {cost}"
    )
    if case.engine.prefix_cache.keep_last_unit:
        note += f"; {case.engine.prefix_cache.keep_last_unit} keeps them, and may lower the acceptance"
    return note


def _table_notes(answer: CaseAnswer) -> Iterator[str]:
    """The cost of a loaded draft at batches that draft nothing, up to the best batch, at its
    context.
    """
    table = answer.gamma_table
    best = answer.best
    if table.speedup_set_up is None:
        return
    column = table.context_lens.index(best.context_len)
    count = table.batch_sizes.index(best.batch_size) + 1
    lost = []
    for gammas, speedups in zip(
        table.gamma[:count], table.speedup_set_up[:count], strict=True
    ):
        if gammas[column] == 0:
            lost.append(1.0 - speedups[column])
    if lost:
        yield (
            f"where the table says off, the loaded draft still costs up to {format_percent(max(lost))} of "
            "the speed of an engine without it"
        )


def _adaptive_notes(case: Case, best: Candidate) -> Iterator[str]:
    """Depths that the engine adapts itself, as measured on another server."""
    engine = case.engine
    draft = engine.draft(best.draft, best.draft_method)
    gains = draft.adaptive_gains
    if not best.is_speculative or not gains or not draft.adaptive_setting:
        return
    batches = np.log([float(batch) for batch in gains])
    gain = np.interp(np.log(best.batch_size), batches, list(gains.values()))
    users = f"{best.batch_size} sequences"
    if len(gains) == 1:
        users = f"{next(iter(gains))} sequences"
    yield (
        f"{draft.adaptive_setting} adapts how many drafts a step verifies: "
        f"{format_percent(float(gain) - 1.0, signed=True)} tokens/s measured at about {users} "
        f"({draft.adaptive_measured}); elsewhere its worth is not known"
    )


def _drafts_notes(
    case: Case,
    best: Candidate,
    drafted: list[Candidate],
) -> tuple[list[str], list[str]]:
    """How well the acceptance of drafts is known: notes on the best row's draft, and others."""
    key: list[str] = []
    others: list[str] = []
    for option in case.options:
        is_best = (option.draft, option.method) == (best.draft, best.draft_method)
        is_windowed = is_best and best.draft_budget is not None
        gaps = _conditions_notes(
            case, option, best.context_len, is_windowed=is_windowed
        )
        others.extend(_full_cache_notes(case, option, best.context_len))
        if is_best:
            key.extend(gaps)
            key.extend(_budget_notes(case, option))
        else:
            others.extend(gaps)
        if is_best and best.drafting.is_extrapolated:
            key.append(_extrapolation(option.acceptance, best, drafted))
        others.extend(_origin_notes(case, option, is_best=is_best))
    return key, others


def _budget_notes(case: Case, option: DraftOption) -> Iterator[str]:
    """A budget that was asked for, and that the engine cannot give to a head."""
    method = option.method
    if not case.request.draft_budgets or method not in HEAD_METHODS:
        return
    draft = case.engine.draft(option.draft, method)
    if not draft.window_setting:
        name = draft_name(option.draft, method)
        why = draft.window_note or f"{case.engine.name} has no window for it"
        yield f"{name} keeps its whole cache, whatever --draft-budget says: {why}"


def _full_cache_notes(
    case: Case, option: DraftOption, context_len: int
) -> Iterator[str]:
    limit = (option.model or case.model).max_position_embeddings
    if option.method == "full" and limit < context_len:
        yield (
            f"{option.draft} supports contexts up to {limit:,} tokens: with its full cache it "
            "cannot draft at this one"
        )


def _conditions_notes(
    case: Case,
    option: DraftOption,
    context_len: int,
    *,
    is_windowed: bool,
) -> Iterator[str]:
    """Differences between this case and the length that a head was trained on, or the temperature
    that its acceptance was measured at."""
    measured = option.acceptance
    asked = case.request.sampling.temperature
    if context_len > (measured.trained_len or LARGEST) and not is_windowed:
        unavailable = case.engine.draft(option.draft, option.method).window_note
        yield _length_notes(option, measured, context_len, unavailable)
    if measured.temperature not in (None, asked):
        yield (
            f"acceptance of {option.draft}/{option.method} was measured at temperature "
            f"{measured.temperature:g}, not {asked:g}"
        )


def _origin_notes(case: Case, option: DraftOption, *, is_best: bool) -> Iterator[str]:
    """The other model or head that the acceptance was measured with."""
    measured = option.acceptance
    if measured.measured_on:
        yield (
            f"acceptance of {option.draft}/{option.method} was measured on {measured.measured_on} "
            f"and is assumed for {case.model.name} too, with a wider interval"
        )
    if is_best and is_one_head_of_many(measured):
        head = "one published head"
        if measured.checkpoint:
            head = f"the head {measured.checkpoint}"
        yield f"acceptance was measured with {head}: the interval covers other heads of the model"


USUAL_RANGE = f"{SHORTEST.length:,.0f} to {LONGEST.length:,.0f}"
"""Tokens that the usual recipes train a head on."""


def _length_notes(
    option: DraftOption,
    measured: AcceptanceProfile,
    context: int,
    unavailable: str,
) -> str:
    """A head that was trained on shorter contexts, and why no window keeps it within them."""
    trained = measured.trained_len or 0
    name = draft_name(option.draft, option.method)
    here = float(measured.law.first_rate(budget=None, context=context))
    near = float(measured.law.first_rate(budget=None, context=trained))
    subject = f"{name} heads are usually trained on {USUAL_RANGE} tokens, and nobody says it of this one"
    if option.head is not None and option.head.max_positions is not None:
        subject = f"this {name} head is trained on up to {trained:,} tokens"
    note = (
        f"{subject}: the first drafted token is accepted in "
        f"{format_percent(here)} of steps at {context:,}, in {format_percent(near)} at {trained:,}"
    )
    if not unavailable:
        return note
    return f"{note}; {unavailable}"


def _extrapolation(
    measured: AcceptanceProfile, best: Candidate, drafted: list[Candidate]
) -> str:
    """The range over which the best row's acceptance was measured, and the best row inside it."""
    where = []
    if measured.measured_budgets:
        where.append(f"budget {_range(measured.measured_budgets)}")
    if measured.measured_contexts:
        where.append(f"context {_range(measured.measured_contexts)}")
    if measured.measured_gamma is not None:
        where.append(f"gamma up to {measured.measured_gamma}")
    note = (
        f"acceptance of {best.draft}/{best.draft_method} was measured at {', '.join(where)}: the "
        "best row lies outside, and its interval is wider"
    )
    inside = []
    for row in drafted:
        if not row.drafting.is_extrapolated and _has_the_draft_of(row, best):
            inside.append(row)
    if inside:
        row = max(
            inside, key=lambda row: (row.within_limits, row.fits, row.rate_per_gpu)
        )
        budget = ""
        if row.draft_budget is not None:
            budget = f"budget {row.draft_budget}, "
        note += (
            f"; inside, {budget}gamma {row.gamma} gives {row.gain.speedup:.2f}x "
            f"({row.gain.low:.2f}-{row.gain.high:.2f})"
        )
    return note


def _range(values: list[float]) -> str:
    if len(values) > 1:
        return f"{min(values):.0f} to {max(values):.0f}"
    return f"{values[0]:.0f}"


# The texts that a server may meet
# ------------------------------------------------------------


def outlook(choice: CaseChoice, ranking: Ranking, shown: Candidate) -> Outlook | None:
    """How the choice hangs on its text and its acceptance; `shown`: the draft that is chosen, else the
    fastest that is not. None where nothing was searched without a draft beside it."""
    case = choice.case
    here = (shown.batch_size, shown.tp_size)
    if not any(
        (row.batch_size, row.tp_size) == here and row.within_limits and row.fits
        for draft in choice.searched
        if draft.option is None
        for row in draft.rows
    ):
        return None
    option = case.option_of(shown)
    measure = ""
    if option.question is not None:
        measure = measuring_command(case, option, shown.draft_budget)
    tasks = []
    if choice.texts is not None:
        rows = []
        for row in [*choice.alone, *ranking.admitted]:
            is_beside = row.batch_size == choice.row.batch_size
            if is_beside and row.within_limits and row.fits:
                rows.append(row)
        tasks = tasks_of(choice.texts, choice.row, rows or [choice.row])
    return Outlook(tasks=tasks, measure=measure)


def tasks_of(
    texts: TextRates, chosen: Candidate, rows: Sequence[Candidate]
) -> list[OfTask]:
    """The choice's gain on each text, and the fastest configuration there of these."""
    gains_of_choice = _gains_on_texts(texts, [chosen] * len(TASKS))
    kept = texts.rates(chosen)
    rates = np.stack([texts.rates(row) for row in rows], axis=1)
    fastest = [rows[place] for place in np.argmax(rates, axis=1)]
    best = _gains_on_texts(texts, fastest)
    tasks = []
    for text, row in enumerate(fastest):
        changes = float(rates[text].max() / kept[text]) - 1.0
        tasks.append(
            OfTask(
                task=TASKS[text],
                weight=WEIGHTS[TASKS[text]],
                own=gains_of_choice[text],
                draft=row.draft,
                draft_method=row.draft_method,
                draft_budget=row.draft_budget,
                gamma=row.gamma,
                best=best[text],
                changes=max(changes, 0.0),
            )
        )
    return tasks


def _gains_on_texts(texts: TextRates, rows: Sequence[Candidate]) -> list[Gain]:
    """The gain of one row on each text."""
    by_draft: dict[int, list[tuple[int, int]]] = {}
    for text, row in enumerate(rows):
        number, place = texts.searched.place(row)
        by_draft.setdefault(number, []).append((text, place))
    gains: dict[int, Gain] = {}
    for number, cells in by_draft.items():
        draft = texts.drafts[number]
        for cell, gain in zip(cells, _gains(texts.case, draft, cells), strict=True):
            gains[cell[0]] = gain
    return [gains[text] for text in range(len(rows))]


def _gains(
    case: Case, draft: DraftOnTexts, cells: Sequence[tuple[int, int]]
) -> list[Gain]:
    """The gains of a draft's rows, each on a text; `cells`: the text, and the row's place."""
    rows = draft.rows.rows
    if draft.rows.option is None:
        return [NO_GAIN] * len(cells)
    if draft.law is None:
        return [rows[place].gain for _, place in cells]
    error = draft.prediction.full(tokens_error(draft.prediction, draft.law))
    flat = np.array([text * len(rows) + place for text, place in cells])
    prediction = draft.prediction.take(flat)
    gains = interval(prediction, error.ravel()[flat]).gains
    whole = requests_of(case, prediction)
    expected = prediction.full(prediction.speedup)
    if whole is not None:
        gains = whole.gains(gains)
        expected = prediction.full(whole.speedup_at(prediction.speedup))
    quantiles = gains.quantiles()
    pays = gains.above()
    result = []
    for number in range(len(cells)):
        result.append(
            Gain(
                speedup=float(expected[number]),
                low=float(quantiles[0, number]),
                high=float(quantiles[-1, number]),
                pays=float(pays[number]),
            )
        )
    return result


# What would tell more
# ------------------------------------------------------------


LOGS = "requests.jsonl"
TOKENIZER = "path/to/tokenizer.json"
SERVER = "http://localhost:8000"


def measuring_command(case: Case, option: DraftOption, budget: int | None) -> str:
    """The command that measures a draft's acceptance: look-ups and draft models are replayed on logged
    requests, others are counted on a server."""
    replay = f"magicdec profile-acceptance --outputs {LOGS} --draft"
    if option.method in LOOKUP_METHODS:
        # logs of text are split into tokens; those of tokens take no harm
        return f"{replay} {option.draft} --tokenizer {TOKENIZER}"
    if option.model is not None and option.draft != SELF:
        return f"{replay} path/to/{option.draft}"
    draft = f"--draft {option.draft}"
    if option.draft == SELF:
        draft += f" --draft-method {option.method}"
        if budget is not None:
            draft += f" --draft-budget {budget}"
    return (
        f"magicdec observe {SERVER} {draft} --model {case.model.name} --seconds 600 "
        "-o acceptance.json"
    )


def with_paying_rate(
    case: Case, points: Points, context: int, lacking: NeedsAcceptance
) -> NeedsAcceptance:
    """A draft with the least acceptance rate, equal at all positions, at which it would pay at the
    best row's batch, context and tp; None if it pays at no rate. A sparse draft has a budget of
    RATE_BUDGET. A step's time is that at a rate of 0.8."""
    method = lacking.draft_method
    budget: int | None = None
    if method in SPARSE_METHODS:
        budget = min(RATE_BUDGET, max(8, context // 2))
    model = None
    name = draft_model_name(lacking.draft)
    if name:
        model = load_model_spec(name)
    usual = constant_profile(0.8)
    option = DraftOption(
        draft=lacking.draft,
        method=method,
        model=model,
        budgets=(budget,),
        acceptance=usual,
        draft_tp_size=case.request.draft_tp_size,
    )
    gammas = np.arange(1, DEFAULT_MAX_GAMMA + 1)
    deeper = dataclasses.replace(points, budget=budget, gamma=gammas)
    rates = np.linspace(0.0, 1.0, 201)
    by_position = np.repeat(rates[:, None, None], len(gammas), axis=-1)
    tokens = expected_tokens_per_step(by_position, gammas)
    prediction = predict(case.setup(option), usual, deeper)
    speedups = msgspec.structs.replace(
        prediction, expected_tokens_per_step=tokens
    ).speedup
    pays = np.flatnonzero(speedups.max(axis=-1) > 1.0)
    least = None
    if len(pays):
        least = float(rates[pays[0]])
    return msgspec.structs.replace(lacking, break_even_acceptance_rate=least)
