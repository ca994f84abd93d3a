from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.perfmodel.acceptance import (
        LOOKUP_PRECISION,
        PROFILES_DIRECTORY,
        Acceptance,
        AcceptanceProfile,
        MeasuredProfile,
        ReplayedProfile,
        constant_profile,
        default_profile,
        fit_profile,
        load_profile,
        save_profile,
    )
    from magicdec.perfmodel.acceptance.belief import (
        MOST_LOGIT,
        Situation,
        constant_rate_logit,
        fitted_belief,
    )
    from magicdec.perfmodel.acceptance.believed import (
        Question,
        checkpoint_in,
        completed,
        profile_of,
    )
    from magicdec.perfmodel.acceptance.files import (
        ImportedAcceptance,
        histogram_survivors,
        is_acceptance,
        read_acceptance,
    )
    from magicdec.perfmodel.acceptance.fit import (
        MeasuredRates,
        Measurement,
        measured_rates,
        measurements_of,
    )
    from magicdec.perfmodel.acceptance.law import (
        MAX_POSITIONS,
        Law,
        LawError,
        sequence_rates,
    )
    from magicdec.perfmodel.acceptance.profile import law_of_rates
    from magicdec.perfmodel.acceptance.replayed import (
        LookupSetting,
        RangeOfSteps,
        Replay,
    )
    from magicdec.perfmodel.drafting import draft_kv_tokens, draft_of
    from magicdec.perfmodel.forward import prefill
    from magicdec.perfmodel.intervals import (
        OTHER_HEAD_ERROR,
        cost_place,
        engine_error,
        group_shares,
        interval,
        is_one_head_of_many,
        ratio_variance,
        relative_errors,
        reported_error,
        step_errors,
        tokens_error,
    )
    from magicdec.perfmodel.kernels.attention import Attended, AttentionCurve
    from magicdec.perfmodel.kernels.gemm import (
        ElementwiseCurve,
        GemmCurve,
        Product,
        Stream,
    )
    from magicdec.perfmodel.kernels.op import ForwardTime
    from magicdec.perfmodel.kernels.profile import (
        EVERY_GPU,
        HardwareProfile,
        counted,
        hardware_aliases,
        hardware_names,
        load_hardware,
        save_hardware,
    )
    from magicdec.perfmodel.lanes import (
        FIGURES,
        LANES,
        LEAST_SOURCES,
        WITHOUT_DRAFT,
        Figure,
        Lane,
        LaneRow,
        lane_of,
    )
    from magicdec.perfmodel.memory import MemoryNeed, memory_need
    from magicdec.perfmodel.plan.drafts import check_profiles
    from magicdec.perfmodel.plan.draws import Draws, draws_of
    from magicdec.perfmodel.plan.request import (
        DEFAULT_MAX_GAMMA,
        Case,
        DraftOption,
        PlanRequest,
        deepest_gamma,
        engine_of,
        lengths_of,
        resolve,
    )
    from magicdec.perfmodel.plan.search import (
        DraftRows,
        every_gamma,
        is_sure_depth,
        most_that_fit,
        search,
    )
    from magicdec.perfmodel.plan.standing import (
        AskedDraft,
        Standing,
        has_module,
        option_of,
        packages_of,
        standing,
    )
    from magicdec.perfmodel.planner import (
        Answer,
        Plan,
        answered,
        make_plan,
        request_of,
    )
    from magicdec.perfmodel.prefix_cache import hit_tokens
    from magicdec.perfmodel.rate.capacity import simulated
    from magicdec.perfmodel.rate.replica import PassLimit
    from magicdec.perfmodel.rate.requests import (
        MIN_RATE,
        Requests,
        alike,
    )
    from magicdec.perfmodel.rate.simulate import (
        Server,
        SimulatedTimes,
        simulate,
        simulate_closed,
    )
    from magicdec.perfmodel.serving import (
        Cycle,
        largest_active,
        pass_seconds,
        prompt_time,
        serving_time,
        whole_requests,
    )
    from magicdec.perfmodel.setup import ModelSetup, Points, Setup
    from magicdec.perfmodel.speedup import Prediction, predict
    from magicdec.perfmodel.step import (
        StepTerms,
        looked_up_terms,
        read_bytes,
        step_terms,
    )
    from magicdec.perfmodel.trees import MAX_TREE, TREES_LOSE, tree_error, tree_tokens
    from magicdec.perfmodel.variations import (
        Priced,
        Sensitivity,
        for_engine,
        priced,
        sensitivity,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
