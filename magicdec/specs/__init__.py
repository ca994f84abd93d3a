from __future__ import annotations

from typing import TYPE_CHECKING

from magicdec.door import door

if TYPE_CHECKING:
    from magicdec.specs.catalog import (
        architecture_facts,
        checkpoint_directory,
        is_model,
        load_model_spec,
        local_model,
        model_names,
        models_that_may_draft,
        served_checkpoint,
    )
    from magicdec.specs.device import (
        DTYPE_BYTES,
        HARDWARE_DIRECTORY,
        LIMITS,
        WEIGHT_ONLY,
        Device,
        Link,
        Spec,
        bytes_per_element,
    )
    from magicdec.specs.engine import (
        DEFAULT_CPU_ENGINE,
        DEFAULT_ENGINE,
        SERVING_ENGINES,
        EngineProfile,
        engine_names,
        engines_that_run,
        load_engine,
        save_engine,
        version_number,
    )
    from magicdec.specs.engine_path import PathOptions, StepPath
    from magicdec.specs.engine_tables import EngineDraft
    from magicdec.specs.heads import (
        HeadFacts,
        KnownHead,
        facts_of,
        facts_of_configuration,
        heads_of,
        published_heads,
        target_named_in,
    )
    from magicdec.specs.hf_config import model_from_hf_config
    from magicdec.specs.hub import is_hub_name
    from magicdec.specs.known_heads import NamedHead, head_beside, named_head
    from magicdec.specs.layers import MLP, Activation, Layer, MixtureOfExperts
    from magicdec.specs.mixers import (
        Attention,
        GatedDeltaNet,
        KimiDeltaAttention,
        LatentAttention,
        LightningAttention,
        Mamba2,
        Mixer,
        Part,
        Projection,
        Rope,
        RopeScaling,
    )
    from magicdec.specs.model import ModelSpec, why_not_run
    from magicdec.specs.names import (
        catalog_name,
        model_name,
        named_models,
        resolve_name,
    )
    from magicdec.specs.parallel import (
        TENSOR_PARALLEL,
        Parallelism,
        check_tp,
        largest_tp_at_most,
        spread_for,
        valid_tp_sizes,
    )
    from magicdec.specs.precision import (
        BF16,
        DTYPE_OF_FORMAT,
        PROFILE_DTYPES,
        Precision,
        format_name,
    )
    from magicdec.specs.quantization import Quantization, Scheme
    from magicdec.specs.serve_command import (
        MOST_TEXT,
        ServeCommand,
        Speculation,
        is_engine_option,
        read_serve_command,
        speculation_of,
    )
    from magicdec.specs.speculation import (
        ANY_MODEL,
        AUTOREGRESSIVE,
        DRAFT_METHODS,
        HEAD_METHODS,
        LOOKUP_METHODS,
        MAX_GAMMA,
        MODEL_METHODS,
        NAMED_DRAFTS,
        NOT_RUN,
        OWN_METHOD,
        PUBLISHED_HEADS,
        SELF,
        SPARSE_METHODS,
        DraftMethod,
        HeadSpec,
        SamplingSpec,
        SpeculationSpec,
        TreeSpec,
        budget_at,
        check_gamma,
        draft_kind,
        draft_model_name,
        head_method,
        load_head,
    )
    from magicdec.specs.vllm_plugin import DRAFT_CLASS, VLLM_METHODS
    from magicdec.specs.workload import (
        MAX_TOKENS,
        RequestShape,
        WorkloadSpec,
        load_workload,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
