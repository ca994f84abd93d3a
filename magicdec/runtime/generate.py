"""The decoding loop: one for autoregressive and speculative decoding.

    propose gamma tokens -> verify them in one pass of the target -> accept some -> keep the draft's
    state up

With gamma 0 the proposal is empty and the target's pass is an autoregressive step. The host reads
the device once per step, for the emitted tokens. What stands beside the loop: who decodes in which
slot (Batch), how tokens are judged (sampling.py), and how a CUDA device replays the four parts
of a step as captured graphs (graphs.py).

Shape suffixes: B sequences, T tokens, V vocabulary of this shard.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.counts import Counts
from magicdec.errors import CapacityError, ConfigError, MagicdecError
from magicdec.runtime.distributed import now_s
from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.graphs import PhaseTimer, StepGraphs, part
from magicdec.runtime.prefill import PREFILL_TOKENS
from magicdec.runtime.sampling import Proposal, UniformStream, VerifiedBlock, verify
from magicdec.schema.gamma_table import TableGamma
from magicdec.specs.speculation import SamplingSpec

INACTIVE = -1


class NumericalError(MagicdecError):
    """The model computed something that is not a finite number."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How far to decode, and what to measure.

    max_new_tokens: for all sequences, or for each.
    simulate_acceptance: conditional acceptance rates by position that replace the verdict; the last
        one holds for all further positions.
    stop_when_first_ends: end with the first sequence, so that the whole run is steady state.
    queue: prompts that take the place of sequences that end, numbered on from the batch's;
        max_new_tokens and the result's tokens cover them too.
    prefill_tokens: tokens of queued prompts that one pass takes between two steps, while the other
        sequences go on.
    policy: chooses each step's gamma, at most `gamma`.
    cuda_graphs: capture steps if the device can.
    """

    gamma: int = 0
    max_new_tokens: int | Sequence[int]
    eos_token_ids: tuple[int, ...] = ()
    fences: bool = False
    simulate_acceptance: Sequence[float] | None = None
    stop_when_first_ends: bool = False
    max_steps: int | None = None
    queue: Sequence[Sequence[int]] = ()
    prefill_tokens: int = PREFILL_TOKENS
    policy: TableGamma | None = None
    cuda_graphs: bool = True


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """The decoded tokens, and the time they took.

    Steady state ends with the step in which a slot first stays empty: its sequence has ended and no
    queued prompt follows."""

    tokens: list[list[int]]
    num_accepted: np.ndarray
    """Drafted tokens accepted, [steps, sequences]; -1 where the sequence had ended, or was still
    queued.
    """
    gamma: int
    gammas: np.ndarray
    """Drafted tokens of each step: `gamma`, unless a policy chose fewer."""
    elapsed_s: float
    step_s: np.ndarray
    """Wall-clock of each step."""
    steady_steps: int
    steady_elapsed_s: float
    steady_tokens: int
    full_steps: int
    """Steps of the steady state in which every slot decoded: in the others, a prompt was still
    being prefilled in one of them.
    """
    full_s: float
    """Their time, without prefill."""
    full_tokens: int
    refill_s: float = 0.0
    """Prefilling queued prompts, and building their drafts' state: contained in the times above."""
    phases: dict[str, list[float]] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return len(self.num_accepted)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def steady_tokens_per_s(self) -> float:
        """Throughput of the full batch, without the prefill of queued prompts."""
        if self.full_s:
            return self.full_tokens / self.full_s
        return 0.0

    @property
    def steady_step_s(self) -> float:
        return self.full_s / self.full_steps

    @property
    def phases_s(self) -> dict[str, float]:
        """Mean seconds of each phase over the steady state's steps but the first; empty without
        fences.
        """
        steady = {}
        for name, times in self.phases.items():
            steady[name] = times[: self.steady_steps][1:] or times
        return {name: fmean(times) for name, times in steady.items() if times}

    @property
    def refilled_tokens_per_s(self) -> float:
        """Throughput while slots are kept in use, prefilling queued prompts included."""
        if self.steady_elapsed_s:
            return self.steady_tokens / self.steady_elapsed_s
        return 0.0

    @property
    def counts(self) -> Counts:
        """Drafts tried and accepted by each sequence; a policy may have drafted fewer than `gamma`
        in a step.
        """
        return Counts.of_steps(self.num_accepted, self.gammas, self.gamma)


@torch.inference_mode()
def decode(
    engine: Engine,
    drafter: Drafter | None,
    sampling: SamplingSpec,
    options: DecodeOptions,
) -> DecodeResult:
    """Decodes all sequences of the engine from where they stand.

    Raises:
        ConfigError: gamma without a drafter, or options that do not fit the batch.
        CapacityError: the tokens asked for exceed the engine's length.
    """
    if options.gamma and drafter is None:
        raise ConfigError(
            f"gamma {options.gamma} needs a drafter; without one use gamma 0"
        )
    if not options.gamma:
        drafter = None
    batch = Batch(engine, drafter, options)
    step = Step(engine, drafter, sampling, options, batch.num_sequences)
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
    return batch.result(dict(step.timer.phases))


class Verdict(NamedTuple):
    """A judged block."""

    outcome: VerifiedBlock
    packed: Tensor
    """For the host: the step's tokens, of which the first num_accepted + 1 count; num_accepted; and
    whether the logits that chose the last of them were bad. [B, gamma + 3]."""


def _by_position(rates: Sequence[float], gamma: int) -> list[float]:
    """Simulated acceptance rates of gamma positions; the last one holds for all further ones."""
    are_rates = all(0.0 <= rate <= 1.0 for rate in rates)
    if not len(rates) or not are_rates:
        raise ConfigError(
            f"simulated acceptance rates must lie between 0 and 1: {list(rates)}"
        )
    missing = max(gamma - len(rates), 0)
    by_position = [*rates, *[rates[-1]] * missing]
    return by_position[:gamma]


class Step:
    """The four parts of a step. Each is work on the device only, and is timed and replayed under
    its name.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        sampling: SamplingSpec,
        options: DecodeOptions,
        num_sequences: int,
    ) -> None:
        model = engine.model
        self._engine = engine
        self._drafter = drafter
        self._sampling = sampling
        self._gamma = options.gamma
        self.timer = PhaseTimer(model.device, enabled=options.fences)
        self.graphs = StepGraphs(enabled=options.cuda_graphs and model.can_capture)
        # the clock would wait within a graph
        model.tp.clock.enabled = options.fences and not self.graphs.enabled
        self._simulated_T: Tensor | None = None
        if options.gamma and options.simulate_acceptance is not None:
            by_position = _by_position(options.simulate_acceptance, options.gamma)
            self._simulated_T = torch.tensor(by_position, device=model.device)
        self._stream: UniformStream | None = None
        if not sampling.is_greedy or options.simulate_acceptance is not None:
            self._stream = UniformStream(
                seed=sampling.seed,
                num_sequences=num_sequences,
                batch_size=engine.batch_size,
                width=self._gamma + 1,
                device=model.device,
            )

    @part("draft")
    def propose(self, gamma: int) -> Proposal:
        """The draft proposes gamma tokens for each sequence."""
        assert self._drafter is not None
        return self._drafter.propose(gamma, self._uniforms)

    @part("verify")
    def verify(self, proposal: Proposal | None) -> Tensor:
        """One pass of the target: its logits after the pending token and each proposed one, [B,
        gamma + 1, V].
        """
        block_BT = self._block(proposal)
        if self._drafter is None:
            return self._engine.forward(block_BT)
        return self._engine.forward(
            block_BT,
            observer=self._drafter.observer,
            taps=self._drafter.taps,
        )

    @part("accept")
    def accept(self, logits_BTV: Tensor, proposal: Proposal | None) -> Verdict:
        """The proposed tokens up to the first that does not fit stay, and one of the target's own
        follows them.
        """
        simulated_T = self._simulated_T
        if simulated_T is not None:
            gamma = logits_BTV.shape[1] - 1
            simulated_T = simulated_T[:gamma]
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
            emitted_BT = F.pad(proposal.tokens_BT, (0, 1)).scatter_(
                1,
                outcome.num_accepted_B[:, None],
                emitted_BT,
            )
        num_accepted_B1 = outcome.num_accepted_B[:, None]
        # A number that is not finite ends the accepted tokens where it stands, so one position of
        # each block is looked at, which costs a step of any gamma the same.
        rows_B = torch.arange(len(logits_BTV), device=logits_BTV.device)
        judged_BV = logits_BTV[rows_B, outcome.num_accepted_B]
        sums_B1 = judged_BV.sum(dim=1, dtype=torch.float32)[:, None]
        packed = torch.cat((emitted_BT, num_accepted_B1, ~sums_B1.isfinite()), dim=1)
        return Verdict(outcome, packed)

    @part("upkeep")
    def keep_up(self, verdict: Verdict) -> None:
        """The draft's state and the target's go on behind what was accepted."""
        emitted_BT = verdict.packed[:, :-2]
        if self._drafter is not None:
            self._drafter.accept(verdict.outcome, emitted_BT.shape[1] - 1)
        self._engine.advance(emitted_BT, verdict.outcome.num_accepted_B + 1)

    def begin(self, gamma: int, sequences: np.ndarray) -> None:
        """Draws the step's random numbers, and finds what was captured of steps of its kind."""
        if self._stream is not None:
            self._stream.draw(sequences)
        self.graphs.begin(self._engine.num_active, self._graph_key(gamma))

    def read(
        self,
        verdict: Verdict,
        proposal: Proposal | None,
        batch: Batch,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The step's tokens [B, gamma + 1] and how many of them were accepted [B], on the host.
        Raises NumericalError for logits of the target that are not finite."""
        host = verdict.packed.cpu().numpy()
        is_bad = host[:, -1].astype(bool)
        if is_bad.any():
            layer = self._engine.first_bad_layer(self._block(proposal))
            first = "the head"
            if layer is not None:
                first = f"layer {layer}"
            sequences = ", ".join(map(str, batch.sequences[is_bad]))
            raise NumericalError(
                f"logits of {self._engine.model.spec.name} are not finite at step "
                f"{batch.num_steps} in sequence(s) {sequences}; first in {first}; check the "
                "weights, or use a wider dtype"
            )
        return host[:, :-2], host[:, -2]

    def end(self) -> None:
        self.timer.enter(None)
        tp = self._engine.model.tp
        if tp.clock.enabled and tp.size > 1:
            self.timer.phases["collectives"].append(tp.clock.take_s())

    def prepare(self) -> None:
        """Builds the draft's state; where steps are captured, also by running one plainly, and one
        captured.
        """
        if self._drafter is not None:
            self._drafter.start(self._sampling)
        if not self.graphs.enabled:
            return
        for _ in range(2):
            key = self._graph_key(self._gamma)
            if key is None:
                continue
            self.graphs.begin(self._engine.num_active, key)
            proposal = self.propose(self._gamma) if self._gamma else None
            verdict = self.accept(self.verify(proposal), proposal)
            # drops the whole block, the target's own token included
            verdict.outcome.num_accepted_B.fill_(-1)
            self.keep_up(verdict)
        if self._drafter is not None and self._drafter.learns:
            # it has learnt from the dropped blocks
            self._drafter.start(self._sampling)

    def _graph_key(self, gamma: int) -> Hashable | None:
        """A key of all that the next step's work depends on, the batch aside; None where it cannot
        be captured.
        """
        if self._drafter is None:
            return (0, None)
        key = self._drafter.graph_key(gamma)
        if key is None:
            return None
        return (gamma, key)

    def _block(self, proposal: Proposal | None) -> Tensor:
        """The tokens that the target processes: the pending one, and the proposed ones, [B, gamma +
        1].
        """
        pending_B1 = self._engine.pending_B[:, None]
        if proposal is None:
            return pending_B1
        return torch.cat((pending_B1, proposal.tokens_BT), dim=1)

    @property
    def _uniforms(self) -> Tensor | None:
        if self._stream is None:
            return None
        return self._stream.drawn[: self._engine.num_active]


class Batch:
    """The sequences of one decoding run: a slot each for those that are active, and a queue behind
    them.
    """

    def __init__(
        self, engine: Engine, drafter: Drafter | None, options: DecodeOptions
    ) -> None:
        self._engine = engine
        self._drafter = drafter
        self._options = options
        self.gamma = options.gamma
        self._device = engine.model.device
        self._queue = list(options.queue)
        self._limits = self._check_limits()
        self.num_sequences = len(self._limits)
        self._tokens = np.zeros(
            (self.num_sequences, int(self._limits.max()) + self.gamma + 1),
            dtype=np.int64,
        )
        self._counts = np.zeros(self.num_sequences, dtype=np.int64)
        self._eos = np.array(options.eos_token_ids, dtype=np.int64)
        self._num_accepted: list[np.ndarray] = []
        self._gammas: list[int] = []
        self._step_tokens: list[int] = []
        self._start_s = time.perf_counter()
        self._decode_ends: list[float] = []
        self._step_ends: list[float] = []
        """Ends of steps, the refilling behind each included."""
        self._steady_steps: int | None = None

    def _check_limits(self) -> np.ndarray:
        engine = self._engine
        wanted = self._options.max_new_tokens
        count = engine.batch_size + len(self._queue)
        if isinstance(wanted, int):
            per_sequence = [wanted] * count
        else:
            per_sequence = list(wanted)
        if len(per_sequence) != count:
            if self._queue:
                behind = f" and a queue of {len(self._queue)}"
            else:
                behind = ""
            raise ConfigError(
                f"{len(per_sequence)} values of max_new_tokens for a batch of "
                f"{engine.batch_size}{behind}"
            )
        sequences = engine.sequence_of_slot[: engine.num_active]
        if sequences.max(initial=0) >= engine.batch_size:
            raise ConfigError(
                "a run with a queue cannot be continued; prefill new prompts"
            )
        if any(len(prompt) < 2 for prompt in self._queue):
            raise ConfigError("a queued prompt needs at least 2 tokens")
        limits = np.array(per_sequence, dtype=np.int64)
        if limits.min() < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {limits.min()}")
        queued = (
            np.array([len(prompt) for prompt in self._queue], dtype=np.int64)
            + limits[engine.batch_size :]
        )
        longest = int(
            np.concatenate((engine.host_lengths + 1 + limits[sequences], queued)).max()
        )
        if longest > engine.max_len:
            raise CapacityError(
                f"prompt and output together reach {longest} tokens, but the engine holds "
                f"{engine.max_len}; "
                f"ask for at most {int(limits.max()) - (longest - engine.max_len)} new tokens"
            )
        return limits

    def start(self) -> None:
        """Starts the clock of decoding; until now it was set up."""
        self._start_s = time.perf_counter()

    @property
    def goes_on(self) -> bool:
        """Whether there is another step."""
        options = self._options
        if options.stop_when_first_ends and self._steady_steps is not None:
            return False
        return self._engine.num_active > 0 and (
            options.max_steps is None or self.num_steps < options.max_steps
        )

    @property
    def num_steps(self) -> int:
        return len(self._gammas)

    @property
    def sequences(self) -> np.ndarray:
        """The active sequences' numbers, by slot."""
        return self._engine.sequence_of_slot[: self._engine.num_active].copy()

    def choose_gamma(self) -> int:
        """The policy's choice, where there is one."""
        policy = self._options.policy
        if policy is None or self._drafter is None:
            return self.gamma
        lengths = self._engine.host_lengths
        context_len = float(lengths.mean()) + 1  # the pending token is not cached yet
        chosen = policy.choose(batch_size=len(lengths), context_len=context_len)
        return min(chosen, self.gamma)

    def record(self, gamma: int, emitted: np.ndarray, num_accepted: np.ndarray) -> None:
        """Stores a step: its tokens [B, gamma + 1], of which the first num_accepted + 1 count.
        Retires the sequences that have ended."""
        sequences = self.sequences
        if self._drafter is not None:
            self._drafter.count(num_accepted, gamma)
        self._engine.count(num_accepted + 1)
        row = np.full(self.num_sequences, INACTIVE, dtype=np.int64)
        row[sequences] = num_accepted
        self._num_accepted.append(row)
        self._gammas.append(gamma)
        counted = int(self._counts.sum())
        is_ended = self._store(sequences, emitted, num_accepted)
        self._step_tokens.append(int(self._counts.sum()) - counted)
        if self._drafter is not None:
            for number in sequences[is_ended].tolist():
                self._drafter.end(number, self._tokens[number, : self._counts[number]])
        if is_ended.any() or self._engine.num_prompts:
            self._decode_ends.append(now_s(self._device))
            self._retire(np.flatnonzero(is_ended))
            self._refill()
            self._step_ends.append(now_s(self._device))
        else:
            self._decode_ends.append(time.perf_counter())
            self._step_ends.append(self._decode_ends[-1])

    def _store(
        self,
        sequences: np.ndarray,
        emitted: np.ndarray,
        num_accepted: np.ndarray,
    ) -> np.ndarray:
        """Keeps each sequence's tokens up to its limit or its end. Returns which sequences have
        reached either."""
        counts = self._counts[sequences]
        limits = self._limits[sequences]
        positions = np.arange(emitted.shape[1])
        columns = counts[:, None] + positions
        self._tokens[sequences[:, None], columns] = emitted
        num_kept = np.minimum(num_accepted + 1, limits - counts)
        is_ended = counts + num_kept == limits
        if self._eos.size:
            is_kept = positions < num_kept[:, None]
            is_eos = np.isin(emitted, self._eos) & is_kept
            has_eos = is_eos.any(axis=1)
            num_kept = np.where(has_eos, is_eos.argmax(axis=1) + 1, num_kept)
            is_ended |= has_eos
        self._counts[sequences] = counts + num_kept
        return is_ended

    def _retire(self, slots: np.ndarray) -> None:
        """Frees the slots of ended sequences. Steady state ends where the queue does not fill them
        all.
        """
        if len(slots) > len(self._queue) and self._steady_steps is None:
            self._steady_steps = self.num_steps
        # from the last, so that an exchange brings in a sequence that goes on
        for slot in reversed(slots.tolist()):
            self._swap_drafts(slot, self._engine.retire(slot))

    def _refill(self) -> None:
        """Queued prompts take free slots, and one pass goes over what it can hold of them: the rest
        waits for the next step, as does everything where no sequence is active."""
        engine = self._engine
        while (
            self._queue and engine.num_active + engine.num_prompts < engine.batch_size
        ):
            engine.begin_prompt(
                self.num_sequences - len(self._queue), self._queue.pop(0)
            )
        while engine.num_prompts:
            followers = [] if self._drafter is None else [self._drafter]
            engine.prefill_part(self._options.prefill_tokens, followers)
            while (exchanged := engine.admit_first()) is not None:
                self._swap_drafts(*exchanged)
                self._admit_last()
            if engine.num_active:
                break

    def _admit_last(self) -> None:
        """Builds the draft's state of the last active sequence, and of no other: it goes to slot 0,
        the one that can be active alone."""
        if self._drafter is None:
            return
        engine = self._engine
        last = engine.num_active - 1
        engine.exchange(last, 0)
        self._swap_drafts(last, 0)
        with engine.first_alone():
            self._drafter.admit()

    def _swap_drafts(self, first: int, second: int) -> None:
        if self._drafter is not None and first != second:
            self._drafter.swap(first, second)

    def result(self, phases: dict[str, list[float]]) -> DecodeResult:
        steps = self.num_steps
        count = self.num_sequences
        num_accepted = np.array(self._num_accepted, dtype=np.int64).reshape(
            steps, count
        )
        begins = np.array([self._start_s, *self._step_ends])
        decode_ends = np.array(self._decode_ends)
        steady = self._steady_steps or steps
        num_active = (num_accepted[:steady] != INACTIVE).sum(axis=1)
        is_full = num_active == max(num_active, default=0)
        step_tokens = np.array(self._step_tokens, dtype=np.int64)[:steady]
        decode_s = decode_ends[:steady] - begins[:-1][:steady]
        refill_s = begins[1:] - decode_ends
        if steady:
            steady_elapsed_s = float(decode_ends[steady - 1] - self._start_s)
        else:
            steady_elapsed_s = 0.0
        return DecodeResult(
            tokens=[self._tokens[i, : self._counts[i]].tolist() for i in range(count)],
            num_accepted=num_accepted,
            gamma=self.gamma,
            gammas=np.array(self._gammas, dtype=np.int64),
            refill_s=float(refill_s.sum()),
            elapsed_s=float(begins[-1] - self._start_s),
            step_s=np.diff(begins),
            steady_steps=steady,
            steady_elapsed_s=steady_elapsed_s,
            steady_tokens=int(step_tokens.sum()),
            full_steps=int(is_full.sum()),
            full_s=float(decode_s[is_full].sum()),
            full_tokens=int(step_tokens[is_full].sum()),
            phases=phases,
        )
