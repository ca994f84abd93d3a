"""A plan's request with what its names stand for."""

from __future__ import annotations

import msgspec

from magicdec import plan_request
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import AcceptanceProfile, constant_profile
from magicdec.perfmodel.kernels.profile import HardwareProfile
from magicdec.plan_request import Request
from magicdec.specs.engine import EngineProfile
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import MAX_GAMMA, SamplingSpec
from magicdec.specs.workload import WorkloadSpec


class PlanRequest(Request, frozen=True, kw_only=True):
    """A request that may hold specs and profiles in place of names. Raises ConfigError for what is out of range."""

    model: str | ModelSpec = "llama-3.1-8b"  # type: ignore[assignment]  # these five widen the document's plain types
    hardware: tuple[str | HardwareProfile, ...] = ("a100-sxm-80gb",)  # type: ignore[assignment]
    engine: str | EngineProfile | None = None  # type: ignore[assignment]
    """The engine; None: "vllm" on GPUs, "ours" on a CPU."""
    acceptance: tuple[AcceptanceProfile, ...] = ()  # type: ignore[assignment]
    workload: WorkloadSpec | None = None
    """Lengths of requests; replaces `context_lens` and `gen_len`."""

    def __post_init__(self) -> None:
        plan_request.check(self)
        if self.gamma is not None and self.gamma > MAX_GAMMA:
            raise ConfigError(f"gamma must be between 0 and {MAX_GAMMA}, not {self.gamma}")
        _ = self.sampling  # a way of sampling out of range is refused here
        if self.acceptance_rate is not None:
            constant_profile(self.acceptance_rate)  # a rate out of range is refused here

    @property
    def sampling(self) -> SamplingSpec:
        return SamplingSpec(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @property
    def names_a_draft(self) -> bool:
        return self.draft is not None or self.draft_method is not None

    def record(self) -> Request:
        """The request in plain values, names for specs."""
        values = {name: getattr(self, name) for name in Request.__struct_fields__}
        values |= {
            "acceptance": [profile.name or profile.source for profile in self.acceptance],
            "hardware": [each if isinstance(each, str) else each.name for each in self.hardware],
            "workload": msgspec.to_builtins(self.workload),
        }
        for key, spec in (("model", self.model), ("engine", self.engine)):
            values[key] = spec.name if isinstance(spec, ModelSpec | EngineProfile) else spec
        return msgspec.convert(values, Request)
