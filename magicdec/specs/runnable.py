"""Which models the runtime runs. No torch, no time: the catalog says it too."""

from __future__ import annotations

from magicdec.specs.layers import Attention, FeedForward, LatentAttention, Mixer, MixtureOfExperts
from magicdec.specs.model import ModelSpec


def why_not_run(spec: ModelSpec) -> str | None:
    """What of a model the runtime does not compute, for people; None where it runs.

    A part that a layer kind gains is refused until it is run: this names what is run.
    """
    for layer in spec.layers:
        if spec.norm.placement == "parallel" and layer.num_sublayers < 2:
            return "blocks of one sublayer behind a norm for two"
        reason = _mixer(layer.mixer) or _feed_forward(layer.mlp)
        if reason is not None:
            return reason
    return None if spec.quantization is None else spec.quantization.reason


def _mixer(kind: Mixer | None) -> str | None:
    if isinstance(kind, LatentAttention):
        return None if kind.indexer is None else "attention to tokens that an indexer chooses"
    if kind is not None and not isinstance(kind, Attention):
        return f"layers of another kind than attention ({kind.label})"
    return None


def _feed_forward(kind: FeedForward | None) -> str | None:
    if kind is None:
        return None
    if kind.activation == "swigluoai" and not kind.gated:
        return "feed-forwards of an activation that has a gate, without one"
    if kind.activation == "xielu" and (kind.gated or isinstance(kind, MixtureOfExperts)):
        return "feed-forwards with xIELU that are gated or experts"
    if isinstance(kind, MixtureOfExperts) and kind.latent_size is not None:
        return "experts of a latent"
    return None
