"""The decoding loop: one for autoregressive and speculative decoding.

    propose gamma tokens -> verify them in one pass of the target -> accept some -> keep the draft's state up

With gamma 0 the proposal is empty and the target's pass is an autoregressive step. The host reads the device once per
step, for the emitted tokens. What stands beside the loop: who decodes in which slot (batch.py), how tokens are judged
(verification.py), and how a CUDA device replays the four parts of a step as captured graphs (graphs.py).

Shape suffixes: B sequences, T tokens, V vocabulary of this shard.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.errors import ConfigError, MagicdecError
from magicdec.runtime import graphs
from magicdec.runtime.batch import Batch
from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.graphs import PhaseTimer, part
from magicdec.runtime.result import INACTIVE, DecodeOptions, DecodeResult
from magicdec.runtime.sampling import UniformStream
from magicdec.runtime.verification import Outcome, Proposal, verify
from magicdec.specs.speculation import SamplingSpec

__all__ = ["INACTIVE", "DecodeOptions", "DecodeResult", "NumericalError", "decode"]


class NumericalError(MagicdecError):
    """The model computed something that is not a finite number."""


@torch.inference_mode()
def decode(engine: Engine, drafter: Drafter | None, sampling: SamplingSpec, options: DecodeOptions) -> DecodeResult:
    """Decodes all sequences of the engine from where they stand.

    Raises:
        ConfigError: gamma without a drafter, or options that do not fit the batch.
        CapacityError: the tokens asked for exceed the engine's length.
    """
    if options.gamma and drafter is None:
        raise ConfigError(f"gamma {options.gamma} needs a drafter; without one use gamma 0")
    drafter = drafter if options.gamma else None
    batch = Batch(engine, drafter, options)
    step = Step(engine, drafter, sampling, options, num_sequences=batch.num_sequences)
    step.prepare()
    batch.start()
    step.timer.start()
    while batch.goes_on:
        gamma = batch.choose_gamma()
        step.begin(gamma, batch.sequences)
        proposal = step.propose(gamma) if gamma else None
        logits_BTV = step.verify(proposal)
        verdict = step.accept(logits_BTV, proposal)
        emitted, num_accepted = step.read(verdict, proposal, batch)
        step.keep_up(verdict)
        batch.record(gamma, emitted, num_accepted)
        step.end()
    return batch.result(step.timer.phases_so_far())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judged block: the step's tokens [B, gamma + 1], of which the first num_accepted + 1 count; and whether the
    target's logits were bad."""

    outcome: Outcome
    emitted_BT: Tensor
    packed: Tensor
    """All of it for the host, [B, gamma + 3]."""


class Step:
    """The four parts of a step. Each is work on the device only, and is timed and replayed under its name."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        sampling: SamplingSpec,
        options: DecodeOptions,
        *,
        num_sequences: int,
    ) -> None:
        model = engine.model
        self._engine, self._drafter, self._sampling, self._gamma = engine, drafter, sampling, options.gamma
        self.timer = PhaseTimer(model.device, enabled=options.fences)
        can_capture = engine.static_shapes and model.can_capture and graphs.can_capture(model.device)
        self.graphs = graphs.StepGraphs(enabled=options.cuda_graphs and can_capture)
        model.tp.clock.enabled = options.fences and not self.graphs.enabled  # it would wait within a graph
        self._simulated_T = _simulated_rates(options, model.device)
        self._stream: UniformStream | None = None
        self._numbers: Tensor | None = None  # in a place that captured steps can read them from
        if not sampling.is_greedy or options.simulate_acceptance is not None:
            self._stream = UniformStream(
                seed=sampling.seed, num_sequences=num_sequences, width=self._gamma + 1, device=model.device
            )
            self._numbers = torch.zeros(engine.batch_size, self._gamma + 1, 3, device=model.device)

    @part("draft")
    def propose(self, gamma: int) -> Proposal:
        """The draft proposes gamma tokens for each sequence."""
        assert self._drafter is not None
        return self._drafter.propose(gamma, self._uniforms)

    @part("verify")
    def verify(self, proposal: Proposal | None) -> Tensor:
        """One pass of the target: its logits after the pending token and each proposed one, [B, gamma + 1, V]."""
        observer = self._drafter.observer if self._drafter is not None else None
        return self._engine.forward(self._block(proposal), observer=observer)

    @part("accept")
    def accept(self, logits_BTV: Tensor, proposal: Proposal | None) -> Verdict:
        """The proposed tokens up to the first that does not fit stay, and one of the target's own follows them."""
        simulated_T = self._simulated_T[: logits_BTV.shape[1] - 1] if self._simulated_T is not None else None
        outcome = verify(
            logits_BTV,
            proposal,
            sampling=self._sampling,
            tp=self._engine.model.tp,
            uniforms=self._uniforms,
            simulated_rates_T=simulated_T,
        )
        emitted_BT = outcome.next_token_B[:, None]
        if proposal is not None:
            emitted_BT = F.pad(proposal.tokens_BT, (0, 1)).scatter_(1, outcome.num_accepted_B[:, None], emitted_BT)
        is_bad_B = ~logits_BTV.sum(dim=(1, 2), dtype=torch.float32).isfinite()
        packed = torch.cat((emitted_BT, outcome.num_accepted_B[:, None], is_bad_B[:, None]), dim=1)
        return Verdict(outcome=outcome, emitted_BT=emitted_BT, packed=packed)

    @part("upkeep")
    def keep_up(self, verdict: Verdict) -> None:
        """The draft's state and the target's go on behind what was accepted."""
        if self._drafter is not None:
            self._drafter.accept(verdict.outcome, verdict.emitted_BT.shape[1] - 1)
        self._engine.advance(verdict.emitted_BT, verdict.outcome.num_accepted_B + 1)

    def begin(self, gamma: int, sequences: np.ndarray) -> None:
        """Draws the step's random numbers, and finds what was captured of steps of its kind."""
        if self._stream is not None and self._numbers is not None:
            self._numbers[: len(sequences)] = self._stream.next(sequences)
        self.graphs.begin(self._engine.num_active, self._graph_key(gamma))

    def read(self, verdict: Verdict, proposal: Proposal | None, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The step's tokens [B, gamma + 1] and how many of them were accepted [B], on the host.

        Raises NumericalError for logits of the target that are not finite.
        """
        host = verdict.packed.cpu().numpy()
        is_bad = host[:, -1].astype(bool)
        if is_bad.any():
            layer = self._engine.first_bad_layer(self._block(proposal))
            raise NumericalError(
                f"logits of {self._engine.model.spec.name} are not finite at step {batch.num_steps} in sequence(s) "
                f"{', '.join(map(str, batch.sequences[is_bad]))}; first in "
                f"{'the head' if layer is None else f'layer {layer}'}; check the weights, or use a wider dtype"
            )
        return host[:, :-2], host[:, -2]

    def end(self) -> None:
        self.timer.end()
        tp = self._engine.model.tp
        if tp.clock.enabled and tp.size > 1:
            self.timer.phases["collectives"].append(tp.clock.take_s())

    def prepare(self) -> None:
        """Builds the draft's state; where steps are captured, also by running one plainly, and one captured."""
        if self._drafter is not None:
            self._drafter.start(self._sampling)
        if not self.graphs.enabled:
            return
        for _ in range(2):
            self._rehearse()
        if self._drafter is not None and self._drafter.observer is not None:
            self._drafter.start(self._sampling)  # it has learnt from the dropped blocks

    def _rehearse(self) -> None:
        """A step whose whole block, the target's own token included, is then dropped."""
        key = self._graph_key(self._gamma)
        if key is None:
            return
        self.graphs.begin(self._engine.num_active, key)
        proposal = self.propose(self._gamma) if self._gamma else None
        verdict = self.accept(self.verify(proposal), proposal)
        verdict.outcome.num_accepted_B.fill_(-1)
        self.keep_up(verdict)

    def _graph_key(self, gamma: int) -> Hashable | None:
        """A key of all that the next step's work depends on, the batch aside; None where it cannot be captured."""
        if self._drafter is None:
            return (0, None)
        key = self._drafter.graph_key(gamma)
        return None if key is None else (gamma, key)

    def _block(self, proposal: Proposal | None) -> Tensor:
        """The tokens that the target processes: the pending one, and the proposed ones, [B, gamma + 1]."""
        pending_B1 = self._engine.pending_B[:, None]
        return pending_B1 if proposal is None else torch.cat((pending_B1, proposal.tokens_BT), dim=1)

    @property
    def _uniforms(self) -> Tensor | None:
        return None if self._numbers is None else self._numbers[: self._engine.num_active]


def _simulated_rates(options: DecodeOptions, device: torch.device) -> Tensor | None:
    given = options.simulate_acceptance
    if given is None or not options.gamma:
        return None
    if not len(given) or not all(0.0 <= rate <= 1.0 for rate in given):
        raise ConfigError(f"simulated acceptance rates must lie between 0 and 1: {list(given)}")
    return torch.tensor([given[min(i, len(given) - 1)] for i in range(options.gamma)], device=device)
