"""Another attention backend of the engine, with which verification would not read the whole context in
one part."""

from magicdec.perfmodel.plan.request import Case, DraftOption
from magicdec.perfmodel.plan.search import same_on
from magicdec.schema.plan import OtherKernel
from magicdec.schema.row import Candidate, Gain
from magicdec.specs.attention_kernels import (
    attention_path,
    layers_of,
    splitting_backends,
)
from magicdec.specs.engine_path import PathOptions


def other_kernel(
    case: Case, option: DraftOption, row: Candidate, now: Candidate
) -> OtherKernel | None:
    """The backend with which a drafted row is fastest, and what it gains over the configuration
    `now`; None: no other surely gains.

    What both have in common cancels: its interval is as wide as that of the draft's own gain.
    Self-drafts get no advice: magicdec's plugin takes one version of vLLM, and was tried with no other
    backend than its default's."""
    if row.draft == "self":
        return None
    layers = layers_of(case.model, case.precision.kv_dtype)
    found = None
    for backend in splitting_backends(
        case.engine, case.hardware, layers, row.gamma + 1.0
    ):
        engine = case.engine.as_set(PathOptions(attention_backend=backend))
        other = same_on(engine, case, option, row)
        if other is None:
            continue
        speedup = now.between_tokens_s / other.between_tokens_s
        own = other.gain
        gain = Gain(
            speedup=speedup,
            low=speedup * own.low / own.speedup,
            high=speedup * own.high / own.speedup,
        )
        if gain.low <= 1.0 or (found and found.gain.speedup >= speedup):
            continue
        path = attention_path(engine, case.hardware, layers[0])
        usual = attention_path(case.engine, case.hardware, layers[0])
        found = OtherKernel(
            engine=engine.name,
            backend=backend,
            option=engine.options.attention_backend.format(backend),
            kernel=path.laws[0].title,
            usual_kernel=usual.laws[0].title,
            gain=gain,
            verify_s=other.step.verify_s,
            usual_verify_s=row.step.verify_s,
            costs=path.costs,
        )
    return found
