"""Another attention backend of the engine, with which verification would not read the whole context in
one part."""

import dataclasses
from collections.abc import Iterator

from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.search import same_on, search
from magicdec.schema.plan import OtherKernel
from magicdec.schema.row import Candidate, Gain
from magicdec.specs.attention_kernels import (
    attention_path,
    layers_of,
    splitting_backend,
)
from magicdec.specs.engine import EngineProfile
from magicdec.specs.engine_path import PathOptions

SEVERAL = 2.0
"""Query tokens of the least verification."""


def other_kernel(
    case: Case, now: Candidate, option: DraftOption | None = None
) -> OtherKernel | None:
    """The backend with which a draft surely gains over the configuration `now`, and how much: the draft
    of `now` as it is where its `option` is given, else whichever gains most surely at the same batch and
    layout. None: no backend is known to.

    What both have in common cancels: its interval is as wide as that of the draft's own gain.
    Self-drafts get no advice: magicdec's plugin takes one version of vLLM, and was tried with no other
    backend than its default's."""
    layers = layers_of(case.model, case.precision.kv_dtype)
    backend = splitting_backend(case.engine, case.hardware, layers, SEVERAL)
    if not backend:
        return None
    engine = case.engine.as_set(PathOptions(attention_backend=backend))
    best = None
    for of_draft, row in _rows_on(engine, case, now, option):
        speedup = now.between_tokens_s / row.between_tokens_s
        own = row.gain
        gain = Gain(
            speedup=speedup,
            low=speedup * own.low / own.speedup,
            high=speedup * own.high / own.speedup,
        )
        is_better = best is None or best[2].low < gain.low
        if row.draft != "self" and gain.low > 1.0 and is_better:
            best = (of_draft, row, gain)
    if best is None:
        return None
    of_draft, row, gain = best
    usual = same_on(case.engine, case, of_draft, row)
    if usual is None:
        return None
    path = attention_path(engine, case.hardware, layers[0])
    return OtherKernel(
        engine=engine.name,
        backend=backend,
        option=engine.options.attention_backend.format(backend),
        row=row,
        kernel=path.laws[0].title,
        usual_kernel=attention_path(case.engine, case.hardware, layers[0])
        .laws[0]
        .title,
        gain=gain,
        usual_verify_s=usual.step.verify_s,
        loses_graphs=path.loses_graphs > 0.0,
        costs=path.costs,
    )


def _rows_on(
    engine: EngineProfile, case: Case, now: Candidate, option: DraftOption | None
) -> Iterator[tuple[DraftOption, Candidate]]:
    """The drafted rows that may run in place of `now` on an engine that is set otherwise."""
    if option is not None:
        row = same_on(engine, case, option, now)
        if row is not None:
            yield option, row
        return
    otherwise = dataclasses.replace(case, engine=engine)
    for of_draft in search(otherwise, None):
        for row in of_draft.rows:
            is_here = (row.batch_size, row.layout) == (now.batch_size, now.layout)
            runs = row.fits and row.within_limits and otherwise.admits(row)
            if of_draft.option is not None and is_here and runs:
                yield of_draft.option, row
