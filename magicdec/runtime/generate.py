"""The decoding loop: one for autoregressive and speculative decoding.

    propose gamma tokens -> verify them in one pass of the target -> accept some -> keep the draft's state up

With gamma 0 the proposal is empty and the target's pass is an autoregressive step. The host reads the device once per
step, for the emitted tokens. On a CUDA device the four parts of a step are captured as graphs (graphs.py).

Shape suffixes: B sequences, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.errors import CapacityError, ConfigError, MagicdecError
from magicdec.runtime import graphs
from magicdec.runtime.adaptive import GammaPolicy
from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.result import INACTIVE, DecodeResult
from magicdec.runtime.sampling import UniformStream
from magicdec.runtime.timing import PhaseTimer
from magicdec.runtime.verification import Outcome, Proposal, verify
from magicdec.specs.speculation import SamplingSpec

__all__ = ["INACTIVE", "DecodeOptions", "DecodeResult", "NumericalError", "decode"]


class NumericalError(MagicdecError):
    """The model computed something that is not a finite number."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How far to decode, and what to measure.

    max_new_tokens: for all sequences, or for each. simulate_acceptance: conditional acceptance rates by position that
    replace the verdict (the last one holds for all further positions). stop_when_first_ends: end with the first
    sequence, so that the whole run is steady state. on_step: hears, after each step, (sequence ids, their newly
    emitted tokens). queue: prompts that take the place of sequences that end, numbered on from the batch's;
    max_new_tokens and the result's tokens cover them too. policy: chooses each step's gamma, `gamma` at most.
    cuda_graphs: capture steps where the device can.
    """

    gamma: int = 0
    max_new_tokens: int | Sequence[int]
    eos_token_ids: tuple[int, ...] = ()
    fences: bool = False
    simulate_acceptance: Sequence[float] | None = None
    stop_when_first_ends: bool = False
    max_steps: int | None = None
    on_step: Callable[[np.ndarray, list[list[int]]], None] | None = None
    queue: Sequence[Sequence[int]] = ()
    policy: GammaPolicy | None = None
    cuda_graphs: bool = True


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """A verified block: what is kept of it, and the same packed for the host, [B, gamma + 3]."""

    outcome: Outcome
    emitted_BT: Tensor
    packed: Tensor


@torch.inference_mode()
def decode(engine: Engine, drafter: Drafter | None, sampling: SamplingSpec, options: DecodeOptions) -> DecodeResult:
    """Decodes all sequences of the engine from where they stand.

    Raises:
        ConfigError: gamma without a drafter, or options that do not fit the batch.
        CapacityError: the tokens asked for exceed the engine's length.
    """
    return _Decoder(engine, drafter, sampling, options).run()


class _Decoder:
    """The state of one `decode` call."""

    def __init__(self, engine: Engine, drafter: Drafter | None, sampling: SamplingSpec, options: DecodeOptions) -> None:
        self._engine, self._sampling, self._options = engine, sampling, options
        self._gamma = options.gamma if drafter is not None else 0
        if options.gamma and drafter is None:
            raise ConfigError(f"gamma {options.gamma} needs a drafter; without one use gamma 0")
        self._drafter = drafter if self._gamma else None
        self._queue = list(options.queue)
        self._limits = self._check_limits()
        count = len(self._limits)
        self._tokens = np.zeros((count, int(self._limits.max()) + self._gamma + 1), dtype=np.int64)
        self._counts = np.zeros(count, dtype=np.int64)
        self._eos = np.array(options.eos_token_ids, dtype=np.int64)
        self._num_accepted: list[np.ndarray] = []
        self._gammas: list[int] = []
        self._refill_s = 0.0
        self._step_ends: list[float] = []
        self._steady: tuple[int, int, float] | None = None
        self._timer = PhaseTimer(engine.model.device, enabled=options.fences)
        self._uniforms = None
        if not sampling.is_greedy or options.simulate_acceptance is not None:
            self._uniforms = UniformStream(
                seed=sampling.seed, num_sequences=count, width=self._gamma + 1, device=engine.model.device
            )
        self._simulated_T = self._simulated_rates()
        can_capture = engine.static_shapes and engine.model.tp.can_capture and graphs.can_capture(engine.model.device)
        self._graphs = graphs.StepGraphs(enabled=options.cuda_graphs and can_capture)
        engine.model.tp.clock.enabled = options.fences and not self._graphs.enabled  # it would wait within a graph
        # Random numbers in a place that captured steps can read them from.
        shape = (engine.batch_size, self._gamma + 1, 3)
        self._step_uniforms = torch.zeros(shape, device=engine.model.device) if self._uniforms is not None else None

    def _check_limits(self) -> np.ndarray:
        engine, wanted = self._engine, self._options.max_new_tokens
        count = engine.batch_size + len(self._queue)
        per_sequence = [wanted] * count if isinstance(wanted, int) else list(wanted)
        if len(per_sequence) != count:
            behind = f" and a queue of {len(self._queue)}" if self._queue else ""
            raise ConfigError(
                f"{len(per_sequence)} values of max_new_tokens for a batch of {engine.batch_size}{behind}"
            )
        sequences = engine.sequence_of_slot[: engine.num_active]
        if sequences.max(initial=0) >= engine.batch_size:
            raise ConfigError("a run with a queue cannot be continued; prefill new prompts")
        if any(len(prompt) < 2 for prompt in self._queue):
            raise ConfigError("a queued prompt needs at least 2 tokens")
        limits = np.array(per_sequence, dtype=np.int64)
        if limits.min() < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {limits.min()}")
        queued = np.array([len(prompt) for prompt in self._queue], dtype=np.int64) + limits[engine.batch_size :]
        longest = int(np.concatenate((engine.host_lengths + 1 + limits[sequences], queued)).max())
        if longest > engine.max_len:
            raise CapacityError(
                f"prompt and output together reach {longest} tokens, but the engine holds {engine.max_len}; "
                f"ask for at most {int(limits.max()) - (longest - engine.max_len)} new tokens"
            )
        return limits

    def _simulated_rates(self) -> Tensor | None:
        given = self._options.simulate_acceptance
        if given is None or not self._gamma:
            return None
        if not len(given) or not all(0.0 <= rate <= 1.0 for rate in given):
            raise ConfigError(f"simulated acceptance rates must lie between 0 and 1: {list(given)}")
        rates = [given[min(i, len(given) - 1)] for i in range(self._gamma)]
        return torch.tensor(rates, device=self._engine.model.device)

    def run(self) -> DecodeResult:
        setup_start_s = time.perf_counter()
        if self._drafter is not None:
            self._drafter.start(self._sampling)
        if self._graphs.enabled:
            for _ in range(2):  # run plainly, then captured
                self._rehearse()
            if self._drafter is not None and self._drafter.observer is not None:
                self._drafter.start(self._sampling)  # it has learnt from the dropped blocks
        start_s = time.perf_counter()
        self._timer.start()
        max_steps, policy, step_start_s = self._options.max_steps, self._options.policy, start_s
        while self._engine.num_active and (max_steps is None or len(self._step_ends) < max_steps):
            refill_s = self._refill_s
            self._step()
            now_s = time.perf_counter()
            self._step_ends.append(now_s)
            if policy is not None and self._drafter is not None:
                row = self._num_accepted[-1]
                without_refill_s = now_s - step_start_s - (self._refill_s - refill_s)
                policy.observe(self._gammas[-1], row[row != INACTIVE], without_refill_s)
            step_start_s = now_s
            if self._options.stop_when_first_ends and self._steady is not None:
                break
        return self._result(setup_s=start_s - setup_start_s, start_s=start_s)

    def _choose_gamma(self) -> int:
        """The policy's choice; of several ranks, whose clocks differ, the first's."""
        policy, model = self._options.policy, self._engine.model
        if policy is None or self._drafter is None:
            return self._gamma
        lengths = self._engine.host_lengths
        gamma = min(policy.choose(batch_size=len(lengths), context_len=float(lengths.mean()) + 1), self._gamma)
        if model.tp.size > 1:
            gamma = int(model.tp.broadcast(torch.tensor(gamma, device=model.device)))
        return gamma

    def _step(self) -> None:
        engine, gamma, timer = self._engine, self._choose_gamma(), self._timer
        self._gammas.append(gamma)
        sequences = engine.sequence_of_slot[: engine.num_active].copy()
        if self._uniforms is not None and self._step_uniforms is not None:
            self._step_uniforms[: len(sequences)] = self._uniforms.next(sequences)
        judged, block_BT = self._draft_and_verify(gamma)
        host = judged.packed.cpu().numpy()
        emitted, num_accepted = host[:, :-2], host[:, -2]
        if host[:, -1].any():
            self._stop_at_bad_logits(block_BT, sequences[host[:, -1].astype(bool)])
        timer.lap("accept")
        self._graphs.run("upkeep", lambda: self._keep(judged, gamma))
        if self._drafter is not None:
            self._drafter.count(num_accepted, gamma)
        engine.count(num_accepted + 1)
        self._record(sequences, emitted, num_accepted)
        timer.lap("upkeep")
        if engine.model.tp.clock.enabled and engine.model.tp.size > 1:
            timer.phases["collectives"].append(engine.model.tp.clock.take_s())

    def _rehearse(self) -> None:
        """A step whose whole block, the target's own token included, is then dropped."""
        if self._graph_key(self._gamma) is None:
            return
        judged, _ = self._draft_and_verify(self._gamma)
        judged.outcome.num_accepted_B.fill_(-1)
        self._graphs.run("upkeep", lambda: self._keep(judged, self._gamma))

    def _draft_and_verify(self, gamma: int) -> tuple[_Judged, Tensor]:
        """A step up to what the host reads of it; and the block that was verified, [B, gamma + 1]."""
        engine, drafter, step = self._engine, self._drafter, self._graphs
        step.begin(engine.num_active, self._graph_key(gamma))
        uniforms = self._step_uniforms[: engine.num_active] if self._step_uniforms is not None else None
        proposal: Proposal | None = None
        if drafter is not None and gamma:
            proposal = step.run("draft", lambda: drafter.propose(gamma, uniforms))
            self._timer.lap("draft")
        logits_BTV, block_BT = step.run("verify", lambda: self._forward(proposal))
        self._timer.lap("verify")
        return step.run("accept", lambda: self._judge(logits_BTV, proposal, uniforms)), block_BT

    def _graph_key(self, gamma: int) -> Hashable | None:
        """What the work of the next step depends on, the batch aside; None where it cannot be captured."""
        if self._drafter is None:
            return (0, None)
        key = self._drafter.graph_key(gamma)
        return None if key is None else (gamma, key)

    def _forward(self, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
        """The target's logits after each token of the block, [B, gamma + 1, V], and the block."""
        block_BT = self._engine.pending_B[:, None]
        if proposal is not None:
            block_BT = torch.cat((block_BT, proposal.tokens_BT), dim=1)
        observer = self._drafter.observer if self._drafter is not None else None
        return self._engine.forward(block_BT, observer=observer), block_BT

    def _judge(self, logits_BTV: Tensor, proposal: Proposal | None, uniforms: Tensor | None) -> _Judged:
        gamma = logits_BTV.shape[1] - 1
        outcome = verify(
            logits_BTV,
            proposal,
            sampling=self._sampling,
            tp=self._engine.model.tp,
            uniforms=uniforms,
            simulated_rates_T=self._simulated_T[:gamma] if self._simulated_T is not None else None,
        )
        emitted_BT = self._emitted(proposal, outcome)
        is_bad_B = ~logits_BTV.sum(dim=(1, 2), dtype=torch.float32).isfinite()
        packed = torch.cat((emitted_BT, outcome.num_accepted_B[:, None], is_bad_B[:, None]), dim=1)
        return _Judged(outcome=outcome, emitted_BT=emitted_BT, packed=packed)

    def _keep(self, judged: _Judged, gamma: int) -> None:
        """Brings the device's state behind what was accepted."""
        if self._drafter is not None:
            self._drafter.accept(judged.outcome, gamma)
        self._engine.advance(judged.emitted_BT, judged.outcome.num_accepted_B + 1)

    def _emitted(self, proposal: Proposal | None, outcome: Outcome) -> Tensor:
        """The step's tokens [B, gamma + 1], of which the first num_accepted + 1 count."""
        next_B1 = outcome.next_token_B[:, None]
        if proposal is None:
            return next_B1
        return F.pad(proposal.tokens_BT, (0, 1)).scatter_(1, outcome.num_accepted_B[:, None], next_B1)

    def _stop_at_bad_logits(self, block_BT: Tensor, sequences: np.ndarray) -> None:
        layer = self._engine.first_bad_layer(block_BT)
        raise NumericalError(
            f"logits of {self._engine.model.spec.name} are not finite at step {len(self._num_accepted)} in sequence(s) "
            f"{', '.join(map(str, sequences))}; first in {'the head' if layer is None else f'layer {layer}'}; "
            "check the weights, or use a wider dtype"
        )

    def _record(self, sequences: np.ndarray, emitted: np.ndarray, num_accepted: np.ndarray) -> None:
        """Stores the emitted tokens, and retires the sequences that have ended."""
        row = np.full(len(self._limits), INACTIVE, dtype=np.int64)
        row[sequences] = num_accepted
        self._num_accepted.append(row)
        counts, limits = self._counts[sequences], self._limits[sequences]
        columns = counts[:, None] + np.arange(emitted.shape[1])
        self._tokens[sequences[:, None], columns] = emitted
        num_kept = np.minimum(num_accepted + 1, limits - counts)
        is_ended = counts + num_kept == limits
        if self._eos.size:
            is_eos = np.isin(emitted, self._eos) & (np.arange(emitted.shape[1]) < num_kept[:, None])
            has_eos = is_eos.any(axis=1)
            num_kept = np.where(has_eos, is_eos.argmax(axis=1) + 1, num_kept)
            is_ended |= has_eos
        self._counts[sequences] = counts + num_kept
        if self._options.on_step is not None:
            kept = [tokens[:count].tolist() for tokens, count in zip(emitted, num_kept, strict=True)]
            self._options.on_step(sequences, kept)
        if is_ended.any():
            self._retire(np.flatnonzero(is_ended))

    def _retire(self, slots: np.ndarray) -> None:
        """Gives the slots of ended sequences to queued prompts; those that none is left for become inactive."""
        num_refilled = min(len(slots), len(self._queue))
        if num_refilled:
            start_s = self._now_s()
            for slot in slots[:num_refilled].tolist():  # from the first: what slot 0 held is live when it moves on
                self._refill(slot)
            self._refill_s += self._now_s() - start_s
        rest = slots[num_refilled:]
        if len(rest) and self._steady is None:
            # Before the caches of ended sequences are exchanged: steady state has none of that.
            self._steady = (len(self._num_accepted), int(self._counts.sum()), self._now_s())
        for slot in rest[::-1].tolist():  # from the last, so that an exchange brings in a sequence that goes on
            exchanged = self._engine.retire(slot)
            if self._drafter is not None:
                self._drafter.swap(slot, exchanged)

    def _refill(self, slot: int) -> None:
        """The next queued prompt takes an ended sequence's place. It goes to slot 0, the one that can be active alone,
        so that a draft's state is built for it and for no other."""
        engine, drafter = self._engine, self._drafter
        sequence = len(self._limits) - len(self._queue)
        engine.exchange(slot, 0)
        engine.replace_first(sequence, self._queue.pop(0))
        if drafter is not None:
            drafter.swap(slot, 0)
            with engine.only_first():
                drafter.admit()

    def _now_s(self) -> float:
        if self._engine.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _result(self, *, setup_s: float, start_s: float) -> DecodeResult:
        steps = len(self._num_accepted)
        ends = np.array([start_s, *self._step_ends])
        steady_steps, steady_tokens, steady_end_s = self._steady or (steps, int(self._counts.sum()), ends[-1])
        count = len(self._limits)
        return DecodeResult(
            tokens=[self._tokens[i, : self._counts[i]].tolist() for i in range(count)],
            num_accepted=np.array(self._num_accepted, dtype=np.int64).reshape(steps, count),
            gamma=self._gamma,
            gammas=np.array(self._gammas, dtype=np.int64),
            refill_s=self._refill_s,
            setup_s=setup_s,
            elapsed_s=float(ends[-1] - start_s),
            step_s=np.diff(ends),
            steady_steps=steady_steps,
            steady_elapsed_s=float(steady_end_s - start_s),
            steady_tokens=steady_tokens,
            phases={name: list(values) for name, values in self._timer.phases.items()},
        )
