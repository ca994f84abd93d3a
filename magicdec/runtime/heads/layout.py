"""The configuration of a trained head, as its publisher wrote it.

Two ways of writing are known: the speculators library's, with the layers' configuration inside
`transformer_layer_config`; and a flat one (SafeAILab, SpecForge, z-lab, DeepSpec), where the
layers' keys stand next to the head's own. Heads of multi-token prediction have no configuration of
their own: they stand in their target's checkpoint.

A state of the target is named by the number of layers before it, as in speculators and vLLM.
SGLang's `eagle_config`, z-lab's `dflash_config` and DeepSpec's `target_layer_ids` name a state by
the layer that it comes out of, one less.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from magicdec.errors import CheckpointError, ConfigError
from magicdec.files import converted, read_json
from magicdec.naming import METHODS
from magicdec.runtime.transformer import NORMED
from magicdec.specs.hf_config import model_from_hf_config
from magicdec.specs.model import ModelSpec, why_not_run
from magicdec.specs.speculation import (
    HEAD_METHODS,
    DraftMethod,
    SpeculationSpec,
    head_method,
)

Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
LAYERS_KEY = "transformer_layer_config"
IRRELEVANT = frozenset(
    """
    _name_or_path architectures auto_map confidence_head_with_markov dtype embed_requires_grad
    enable_confidence_head has_no_defaults_at_init num_target_layers speculators_config
    speculators_model_type speculators_version target_model_type tie_word_embeddings torch_dtype
    transformers_version
    """.split()  # noqa: SIM905  (as a list it would be a page)
)
"""Keys next to `transformer_layer_config` that do not affect drafts."""


class _EagleConfig(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: list[Number] | None = None


class _DFlashConfig(msgspec.Struct):
    target_layer_ids: list[Number] | None = None
    mask_token_id: Number | None = None


class _OwnKeys(msgspec.Struct):
    """The keys that only heads have."""

    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    eagle_aux_hidden_state_layer_ids: list[Number] | None = None
    aux_hidden_state_layer_ids: list[Number] | None = None
    eagle_config: _EagleConfig | None = None
    dflash_config: _DFlashConfig | None = None
    target_layer_ids: list[Number] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    bias: bool = True
    block_size: Size | None = None
    mask_token_id: Number | None = None
    sample_from_anchor: bool | None = None
    sliding_window_non_causal: bool = False
    markov_rank: Number = 256
    markov_head_type: Literal["vanilla"] = "vanilla"
    num_nextn_predict_layers: Size = 1


OWN_KEYS = frozenset(_OwnKeys.__struct_fields__)
FLAT_IRRELEVANT = frozenset(
    """
    confidence_head_alpha confidence_head_with_markov enable_confidence_head modules num_anchors
    num_target_layers target_model_type
    """.split()  # noqa: SIM905  (as above)
)
"""Keys of a flat configuration that do not affect drafts."""


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """How a head computes."""

    method: DraftMethod
    name: str
    spec: ModelSpec
    """Its layers, and the target's vocabulary."""
    reads: tuple[int, ...]
    """The target's states that it reads (transformer.Taps), in the order of its weights."""
    target_hidden_size: int
    draft_vocab_size: int
    """Tokens that it chooses from."""
    is_native: bool = False
    """Whether its tensors stand in the target's checkpoint, under its names."""
    norm_before_residual: bool = False
    """EAGLE-3: the normed states are what the first layer adds to."""
    fusion_norm: Literal["none", "whole", "each"] = "none"
    """EAGLE-3: the norm of the states, all together or each, before they are fused."""
    norm_output: bool = False
    """EAGLE-3: the next step reads the normed output."""
    mask_token: int | None = None
    block_size: int | None = None
    """Positions of a block, the pending token's included, that a parallel head was trained on."""
    samples_anchor: bool = False
    """Whether the position of the pending token proposes a token too."""
    is_window_causal: bool = True
    """Whether the positions of a block see only earlier ones of it in layers with a window."""
    markov_rank: int = 0

    @property
    def num_states(self) -> int:
        return len(self.reads)

    @property
    def most_drafts(self) -> int | None:
        """Tokens that it proposes at most in a step; None: any number."""
        if self.block_size is None:
            return None
        if self.samples_anchor:
            return self.block_size
        return self.block_size - 1


def read_layout(
    path: Path, target: ModelSpec, *, method: DraftMethod | None
) -> HeadLayout:
    """The head in a directory. `method`: what it is, where its configuration need not say so.

    Raises ConfigError for a configuration that is not understood, or of another target.
    """
    if path.is_dir():
        file = path / "config.json"
    else:
        file = path
    if not file.is_file():
        raise ConfigError(f"no configuration of a head at {path}: give its directory")
    document = read_json(file, decode=json.loads)
    if not isinstance(document, dict):
        raise ConfigError(
            f"{file} must hold a JSON object, not a {type(document).__name__}"
        )
    own = converted(
        {key: document[key] for key in OWN_KEYS & document.keys()},
        _OwnKeys,
        where=str(file),
    )
    kind = _method(document, file, method)
    spec = _layers(document, file)
    _check_target(own, spec, target, file)
    return _layout(kind, own, spec, target, file)


def _method(
    document: dict[str, Any], file: Path, method: DraftMethod | None
) -> DraftMethod:
    """The kind of head that a configuration describes."""
    named = [document.get("model_type"), document.get("speculators_model_type")]
    named += document.get("architectures") or []
    kind = head_method(str(name) for name in named)
    if kind is None:
        kind = method  # EAGLE's heads are published as plain Llama models
    if kind is None:
        raise ConfigError(
            f"{file} does not say what head it is; name the method, one of "
            f"{', '.join(HEAD_METHODS)}"
        )
    if method is not None and kind != method:
        raise ConfigError(
            f"{file} is of a head of {kind}, not of {method}; use --draft {kind}"
        )
    return kind


def _layers(document: dict[str, Any], file: Path) -> ModelSpec:
    """The head's layers as a model. Unknown settings are refused."""
    inner = document.get(LAYERS_KEY)
    if inner is None:
        inside = {key: value for key, value in document.items() if key not in OWN_KEYS}
        layers = {
            key: value for key, value in inside.items() if key not in FLAT_IRRELEVANT
        }
    elif isinstance(inner, dict):
        layers = inner
        unknown = document.keys() - OWN_KEYS - IRRELEVANT - {LAYERS_KEY, "model_type"}
        if unknown:
            raise ConfigError(
                f"{file}: key '{min(unknown)}' is not known for a head, and may change what it "
                "drafts; remove it if it does not"
            )
    else:
        raise ConfigError(
            f"{file}: key '{LAYERS_KEY}' must be an object, not {inner!r}"
        )
    spec = model_from_hf_config(layers, name=file.parent.name, where=str(file))
    if reason := why_not_run(spec):
        raise ConfigError(f"{file}: a head with {reason} is not run")
    return spec


def _check_target(
    own: _OwnKeys, spec: ModelSpec, target: ModelSpec, file: Path
) -> None:
    """Refuses a head that was trained for another model."""
    hidden_size = own.target_hidden_size or spec.hidden_size
    if hidden_size != target.hidden_size:
        raise ConfigError(
            f"{file} is of a head that reads states of {hidden_size} numbers; those of "
            f"{target.name} have {target.hidden_size}: it is another target's"
        )
    if spec.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{file} is of a head for a vocabulary of {spec.vocab_size}; that of {target.name} "
            f"has {target.vocab_size}: it is another target's"
        )
    if (own.draft_vocab_size or 0) > target.vocab_size:
        raise ConfigError(
            f"{file}: draft_vocab_size {own.draft_vocab_size} exceeds the vocabulary of "
            f"{target.vocab_size}"
        )


def _layout(
    method: DraftMethod,
    own: _OwnKeys,
    spec: ModelSpec,
    target: ModelSpec,
    file: Path,
) -> HeadLayout:
    common: dict[str, Any] = {
        "method": method,
        "name": file.parent.name,
        "spec": spec,
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": own.draft_vocab_size or spec.vocab_size,
    }
    if method == "eagle":
        return HeadLayout(reads=(NORMED,), **common)
    if method == "mtp":
        if own.num_nextn_predict_layers != 1:
            raise ConfigError(
                f"{file} has {own.num_nextn_predict_layers} modules of multi-token prediction, and "
                "one is run: the engines' default, which reads it again and again"
            )
        first = msgspec.structs.replace(spec, layers=spec.layers[-1:])
        return HeadLayout(reads=(NORMED,), **{**common, "spec": first})
    common["reads"] = _reads(method, own, target, file)
    if METHODS[method].parallel_of:
        common["mask_token"] = _mask_token(own, target, file)
    if "eagle3" in (method, METHODS[method].parallel_of):
        fusion_norm: Literal["none", "whole", "each"] = "none"
        if own.norm_before_fc:
            fusion_norm = "whole"
        elif own.fc_norm:
            fusion_norm = "each"
        return HeadLayout(
            norm_before_residual=own.norm_before_residual,
            fusion_norm=fusion_norm,
            norm_output=own.norm_output,
            **common,
        )
    if own.block_size is None or own.block_size < 2:
        raise ConfigError(
            f"{file}: a head of {method} needs a block_size of at least 2"
        )
    samples_anchor = own.sample_from_anchor
    if samples_anchor is None:
        samples_anchor = method == "dspark"
    markov_rank = 0
    if method == "dspark":
        markov_rank = own.markov_rank
    return HeadLayout(
        mask_token=_mask_token(own, target, file),
        block_size=own.block_size,
        samples_anchor=samples_anchor,
        is_window_causal=not own.sliding_window_non_causal,
        markov_rank=markov_rank,
        **common,
    )


def _reads(
    method: DraftMethod, own: _OwnKeys, target: ModelSpec, file: Path
) -> tuple[int, ...]:
    """The target's states that a head names, by the layers before them."""
    count = target.num_hidden_layers
    named = _named_states(own)
    if not named and "eagle3" in (method, METHODS[method].parallel_of):
        named = [2, count // 2, count - 3]  # where EAGLE-3's authors read
    if not named:
        raise ConfigError(f"{file} names no layers of the target that the head reads")
    is_inside = all(0 <= layer <= count for layer in named)
    if not is_inside or len(set(named)) < len(named):
        raise ConfigError(
            f"{file}: the head reads the states after {named} layers of its target, and "
            f"{target.name} has {count}: it is another target's"
        )
    return tuple(named)


def _named_states(own: _OwnKeys) -> list[int] | None:
    """Numbers of layers before the states. EAGLE's and DFlash's inner keys and DSpark's own number
    the layers after which the states are read, from 0."""
    named = own.eagle_aux_hidden_state_layer_ids or own.aux_hidden_state_layer_ids
    if named:
        return named
    layers = own.target_layer_ids
    if own.eagle_config is not None:
        layers = own.eagle_config.eagle_aux_hidden_state_layer_ids
    if not layers and own.dflash_config is not None:
        layers = own.dflash_config.target_layer_ids
    if not layers:
        return None
    return [layer + 1 for layer in layers]


def _mask_token(own: _OwnKeys, target: ModelSpec, file: Path) -> int:
    token = own.mask_token_id
    if token is None and own.dflash_config is not None:
        token = own.dflash_config.mask_token_id
    if token is None or token >= target.vocab_size:
        raise ConfigError(
            f"{file}: a parallel head needs a mask_token_id in the vocabulary of "
            f"{target.vocab_size}, not {token}"
        )
    return token


def native_layout(target: ModelSpec) -> HeadLayout:
    """The head of multi-token prediction in a target's own checkpoint.

    Raises CheckpointError where its configuration has none.
    """
    if not target.mtp_layers:
        raise CheckpointError(
            f"{target.name} has no module of multi-token prediction; use another --draft"
        )
    spec = msgspec.structs.replace(target, layers=target.mtp_layers[:1], mtp_layers=())
    if reason := why_not_run(spec):
        raise ConfigError(
            f"{target.name}: a prediction module with {reason} is not run"
        )
    return HeadLayout(
        method="mtp",
        name=target.name,
        spec=spec,
        reads=(NORMED,),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        is_native=True,
    )


def layout_of(speculation: SpeculationSpec, target: ModelSpec) -> HeadLayout:
    """The head that a speculation names. Raises ConfigError or CheckpointError."""
    if speculation.checkpoint is None and speculation.draft_method == "mtp":
        return native_layout(target)
    if speculation.checkpoint is None:
        raise ConfigError(
            f"draft {speculation.draft_method} needs a head that was trained for {target.name}: "
            "give its directory as --draft-model"
        )
    return read_layout(
        Path(speculation.checkpoint), target, method=speculation.draft_method
    )
