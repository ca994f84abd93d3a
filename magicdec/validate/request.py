"""What is to be measured: one (model, batch, context) and its configurations. No torch.

Also here: what refuses a request before anything is allocated, and the identity of its records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from magicdec.errors import CapacityError, ConfigError, unknown_choice
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import SamplingSpec, SpeculationSpec
from magicdec.units import format_bytes
from magicdec.validate.environment import available_memory_bytes

Weights = Literal["checkpoint", "random"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class BenchmarkRequest:
    """One (model, batch, context) and the speculative configurations to measure on it."""

    model: str
    weights: Weights = "checkpoint"
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int
    context_len: int
    context_spread: float = 0.0
    gen_len: int = 64
    speculations: tuple[SpeculationSpec, ...] = ()
    sampling: SamplingSpec = field(default_factory=lambda: SamplingSpec(temperature=1.0))
    prompts: str = "stdlib"
    calibration_prompts: bool = False
    repetitions: int = 3
    simulate_acceptance: tuple[float, ...] | None = None
    stop_at_eos: bool = False
    run_to_end: bool = False
    """Let every sequence reach its end, which also measures the speedup of a static batch."""

    @property
    def max_gamma(self) -> int:
        return max((s.gamma for s in self.speculations), default=0)

    @property
    def max_len(self) -> int:
        """KV slots a sequence needs: its context, what it generates, and the block in flight."""
        return self.context_len + self.gen_len + self.max_gamma + 1


def check_request(request: BenchmarkRequest, model: ModelSpec) -> None:
    """Refuses what cannot be run, before anything is allocated.

    Raises ConfigError or CapacityError with the nearest valid choice.
    """
    if request.dtype not in DTYPE_BYTES:
        raise unknown_choice("dtype", request.dtype, DTYPE_BYTES)
    check_device(request.device)
    if request.max_len > model.max_position_embeddings:
        room = model.max_position_embeddings - request.gen_len - request.max_gamma - 1
        raise CapacityError(
            f"context {request.context_len} + {request.gen_len} generated + a block of {request.max_gamma + 1} exceeds "
            f"the {model.max_position_embeddings} positions of {model.name}; the longest context is {room}"
        )
    for speculation in request.speculations:
        if speculation.draft_budget is not None and speculation.draft_budget > request.context_len:
            raise ConfigError(
                f"draft budget {speculation.draft_budget} exceeds the context {request.context_len}; "
                f"the largest is {request.context_len}"
            )
    dtype_bytes = DTYPE_BYTES[request.dtype]
    per_sequence = model.kv_elements_per_token() * dtype_bytes * request.max_len
    fixed = model.num_parameters * dtype_bytes
    needed, available = fixed + per_sequence * request.batch_size, available_memory_bytes(request.device)
    if needed > available:
        fits = int((available - fixed) // per_sequence)
        advice = f"the largest batch that fits is {fits}" if fits >= 1 else "not even a batch of 1 fits"
        raise CapacityError(
            f"batch {request.batch_size} at context {request.context_len} needs {format_bytes(needed)}, "
            f"{format_bytes(available)} are free; {advice}"
        )


def configuration_fields(request: BenchmarkRequest, speculation: SpeculationSpec) -> dict[str, Any]:
    """The identity part of a record."""
    sampling = request.sampling
    simulated = request.simulate_acceptance if not speculation.is_autoregressive else None
    return {
        "model": load_model_spec(request.model).name,
        "device": request.device,
        "dtype": request.dtype,
        "draft": speculation.draft,
        "draft_method": speculation.draft_method,
        "draft_budget": speculation.draft_budget,
        "gamma": speculation.gamma,
        "batch_size": request.batch_size,
        "context_len": request.context_len,
        "gen_len": request.gen_len,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "prompts": request.prompts,
        "weights": request.weights,
        "simulated_acceptance": list(simulated) if simulated else None,
    }


def check_device(device: str) -> None:
    """Raises ConfigError for a device that torch does not have here."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise unknown_choice("device", device, ("cpu", "cuda", "cuda:0"))
    if kind == "cuda":
        import torch

        count = torch.cuda.device_count()
        if int(index or 0) >= count:
            raise ConfigError(f"device '{device}' is not here: torch sees {count} CUDA devices; use cpu")
