"""Who decodes in which slot, what each has emitted so far, and what takes the place of those that end."""

from __future__ import annotations

import time

import numpy as np
import torch

from magicdec.errors import CapacityError, ConfigError
from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.result import INACTIVE, DecodeOptions, DecodeResult


class Batch:
    """The sequences of one decoding run: a slot each for those that are active, and a queue behind them."""

    def __init__(self, engine: Engine, drafter: Drafter | None, options: DecodeOptions) -> None:
        self._engine, self._drafter, self._options = engine, drafter, options
        self.gamma = options.gamma if drafter is not None else 0
        self._queue = list(options.queue)
        self._limits = self._check_limits()
        self.num_sequences = len(self._limits)
        self._tokens = np.zeros((self.num_sequences, int(self._limits.max()) + self.gamma + 1), dtype=np.int64)
        self._counts = np.zeros(self.num_sequences, dtype=np.int64)
        self._eos = np.array(options.eos_token_ids, dtype=np.int64)
        self._num_accepted: list[np.ndarray] = []
        self._gammas: list[int] = []
        self._refill_s = 0.0
        self._setup_start_s = self._start_s = time.perf_counter()
        self._step_ends: list[float] = []
        self._steady: tuple[int, int, float] | None = None

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

    def start(self) -> None:
        """Starts the clock of decoding; until now it was set up."""
        self._start_s = time.perf_counter()

    @property
    def goes_on(self) -> bool:
        """Whether there is another step."""
        options = self._options
        if options.stop_when_first_ends and self._steady is not None:
            return False
        return self._engine.num_active > 0 and (options.max_steps is None or self.num_steps < options.max_steps)

    @property
    def num_steps(self) -> int:
        return len(self._gammas)

    @property
    def sequences(self) -> np.ndarray:
        """The active sequences' numbers, by slot."""
        return self._engine.sequence_of_slot[: self._engine.num_active].copy()

    def choose_gamma(self) -> int:
        """The policy's choice; of several ranks, whose clocks differ, the first's."""
        policy, model = self._options.policy, self._engine.model
        if policy is None or self._drafter is None:
            return self.gamma
        lengths = self._engine.host_lengths
        gamma = min(policy.choose(batch_size=len(lengths), context_len=float(lengths.mean()) + 1), self.gamma)
        if model.tp.size > 1:
            gamma = int(model.tp.broadcast(torch.tensor(gamma, device=model.device)))
        return gamma

    def record(self, gamma: int, emitted: np.ndarray, num_accepted: np.ndarray) -> None:
        """Stores a step: its tokens [B, gamma + 1], of which the first num_accepted + 1 count. Retires the sequences
        that have ended."""
        sequences, refill_s = self.sequences, self._refill_s
        if self._drafter is not None:
            self._drafter.count(num_accepted, gamma)
        self._engine.count(num_accepted + 1)
        row = np.full(self.num_sequences, INACTIVE, dtype=np.int64)
        row[sequences] = num_accepted
        self._num_accepted.append(row)
        self._gammas.append(gamma)
        is_ended = self._store(sequences, emitted, num_accepted)
        if is_ended.any():
            self._retire(np.flatnonzero(is_ended))
        now_s, before_s = time.perf_counter(), self._step_ends[-1] if self._step_ends else self._start_s
        self._step_ends.append(now_s)
        if self._options.policy is not None and self._drafter is not None:
            without_refill_s = now_s - before_s - (self._refill_s - refill_s)
            self._options.policy.observe(gamma, num_accepted, without_refill_s)

    def _store(self, sequences: np.ndarray, emitted: np.ndarray, num_accepted: np.ndarray) -> np.ndarray:
        """Keeps each sequence's tokens up to its limit or its end; whether it has reached either."""
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
        return is_ended

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
            self._steady = (self.num_steps, int(self._counts.sum()), self._now_s())
        for slot in rest[::-1].tolist():  # from the last, so that an exchange brings in a sequence that goes on
            self._swap_drafts(slot, self._engine.retire(slot))

    def _refill(self, slot: int) -> None:
        """The next queued prompt takes an ended sequence's place. It goes to slot 0, the one that can be active alone,
        so that a draft's state is built for it and for no other."""
        engine, drafter = self._engine, self._drafter
        sequence = self.num_sequences - len(self._queue)
        engine.exchange(slot, 0)
        engine.replace_first(sequence, self._queue.pop(0))
        self._swap_drafts(slot, 0)
        if drafter is not None:
            with engine.only_first():
                drafter.admit()

    def _swap_drafts(self, first: int, second: int) -> None:
        if self._drafter is not None and first != second:
            self._drafter.swap(first, second)

    def _now_s(self) -> float:
        if self._engine.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def result(self, phases: dict[str, list[float]]) -> DecodeResult:
        steps, count = self.num_steps, self.num_sequences
        ends = np.array([self._start_s, *self._step_ends])
        steady_steps, steady_tokens, steady_end_s = self._steady or (steps, int(self._counts.sum()), ends[-1])
        return DecodeResult(
            tokens=[self._tokens[i, : self._counts[i]].tolist() for i in range(count)],
            num_accepted=np.array(self._num_accepted, dtype=np.int64).reshape(steps, count),
            gamma=self.gamma,
            gammas=np.array(self._gammas, dtype=np.int64),
            refill_s=self._refill_s,
            setup_s=self._start_s - self._setup_start_s,
            elapsed_s=float(ends[-1] - self._start_s),
            step_s=np.diff(ends),
            steady_steps=steady_steps,
            steady_elapsed_s=float(steady_end_s - self._start_s),
            steady_tokens=steady_tokens,
            phases=phases,
        )
