"""Builds a Transformer from a checkpoint or from random weights; each rank reads only its shard.
Checkpoints may be names on the Hugging Face hub, where there is a network and the hub's client is
installed."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from magicdec.errors import CheckpointError, ConfigError, unknown_choice
from magicdec.runtime.builder import Builder
from magicdec.runtime.checkpoint import CheckpointDirectory, RandomTensors, TensorSource
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.runtime.layers import MLP, ColumnParallelLinear, Experts
from magicdec.runtime.mixers import GroupedAttention, LatentAttention
from magicdec.runtime.quantized import quantize
from magicdec.runtime.transformer import Layer, Transformer
from magicdec.specs import (
    PROFILE_DTYPES,
    ModelSpec,
    check_tp,
    checkpoint_directory,
    load_model_spec,
    local_model,
    why_not_run,
)

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float64", *PROFILE_DTYPES)
}


def load_model(
    model: str | Path | ModelSpec,
    *,
    weights: Literal["checkpoint", "random"] = "checkpoint",
    seed: int = 0,
    tp: TensorParallel | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
) -> Transformer:
    """This rank's shard of a model: a directory, a catalog name, a hub name, or a spec (with random
    weights).

    Raises:
        ConfigError: an unknown name, or a model that cannot be divided into `tp.size` shards.
        CheckpointError: there are no weights, or they do not fit the configuration.
    """
    tp = tp or SINGLE
    torch_device = torch.device(device)
    if torch_device.type == "cuda" and torch_device.index is not None:
        # Triton launches, and events are timed, on the current device
        torch.cuda.set_device(torch_device)
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise unknown_choice("dtype", dtype, DTYPES)
        dtype = DTYPES[dtype]
    if not isinstance(model, ModelSpec):
        model = local_model(str(model), with_weights=weights == "checkpoint")
    if isinstance(model, ModelSpec):
        spec = model
    else:
        spec = load_model_spec(model)
    check_divisible(spec, tp.size)
    source: TensorSource
    if weights == "random":
        if spec.norm.kind.endswith("plus_one"):
            norm_weight = 0.0
        else:
            norm_weight = 1.0
        source = RandomTensors(
            seed=seed, device=torch_device, dtype=dtype, norm_weight=norm_weight
        )
    else:
        if isinstance(model, ModelSpec):
            directory = None
        else:
            directory = checkpoint_directory(model)
        if directory is None:
            raise CheckpointError(
                f"there are no weights for {spec.name} here: give a checkpoint directory, or "
                "random weights"
            )
        source = CheckpointDirectory(
            directory,
            device=torch_device,
            dtype=dtype,
            quantization=spec.quantization,
        )
    with torch.inference_mode():
        return Builder(spec, tp, source, torch_device).build()


@torch.inference_mode()
def with_weight_dtype(model: Transformer, weight_dtype: str | None) -> Transformer:
    """The model with its linear layers and head in a narrower format (see quantized.py), everything
    else shared. The model itself where that is its format, or none is named. Raises ConfigError for
    an unknown format, and for a model that is in another one already."""
    activations = str(model.dtype).removeprefix("torch.")
    own = (model.weight_dtype, PROFILE_DTYPES.get(activations))
    if weight_dtype is None or weight_dtype in own:
        return model
    if model.weight_dtype is not None:
        raise ConfigError(
            f"{model.spec.name} is in {model.weight_dtype} already; load it again for "
            f"{weight_dtype}"
        )
    return replace(
        model,
        layers=_narrowed(model.layers, weight_dtype),
        head=_narrowed(model.head, weight_dtype),
        weight_dtype=weight_dtype,
    )


def _narrowed(part: Any, weight_dtype: str) -> Any:
    """A part of a model with narrower linear layers. Norms, routers and absorbed projections of
    latents keep their format."""
    if isinstance(part, ColumnParallelLinear):
        assert isinstance(part.weight, Tensor)
        return replace(part, weight=quantize(part.weight, weight_dtype))
    if isinstance(part, list | tuple):
        return tuple(_narrowed(member, weight_dtype) for member in part)
    if isinstance(part, Layer | GroupedAttention | LatentAttention | MLP | Experts):
        values = {}
        for field in fields(part):
            value = getattr(part, field.name)
            values[field.name] = _narrowed(value, weight_dtype)
        return replace(part, **values)
    return part


def check_divisible(spec: ModelSpec, tp_size: int) -> None:
    """Raises ConfigError when the model has layers that are not run, or cannot be divided into this
    many shards.
    """
    if reason := why_not_run(spec):
        raise ConfigError(f"{spec.name} has {reason}, which can be planned but not run")
    check_tp(spec, tp_size)
