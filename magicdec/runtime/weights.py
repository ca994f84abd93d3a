"""Builds a Transformer from a checkpoint or from random weights; each rank reads only its shard.
Checkpoints may be names on the Hugging Face hub, where there is a network and the hub's client is
installed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from magicdec.errors import CheckpointError, ConfigError, unknown_choice
from magicdec.runtime.builder import Builder
from magicdec.runtime.checkpoint import CheckpointDirectory, RandomTensors, TensorSource
from magicdec.runtime.distributed import SINGLE, TensorParallel
from magicdec.runtime.transformer import Transformer
from magicdec.specs.catalog import checkpoint_directory, load_model_spec, local_model
from magicdec.specs.model import ModelSpec, why_not_run
from magicdec.specs.parallel import check_tp
from magicdec.specs.precision import PROFILE_DTYPES

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
    spec = model if isinstance(model, ModelSpec) else load_model_spec(model)
    check_divisible(spec, tp.size)
    source: TensorSource
    if weights == "random":
        is_offset = spec.norm.kind.endswith("plus_one")
        source = RandomTensors(
            seed=seed,
            device=torch_device,
            dtype=dtype,
            norm_weight=0.0 if is_offset else 1.0,
        )
    else:
        directory = None
        if not isinstance(model, ModelSpec):
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


def check_divisible(spec: ModelSpec, tp_size: int) -> None:
    """Raises ConfigError when the model has layers that are not run, or cannot be divided into this
    many shards.
    """
    if reason := why_not_run(spec):
        raise ConfigError(f"{spec.name} has {reason}, which can be planned but not run")
    check_tp(spec, tp_size)
