"""Speculative decoding against autoregressive decoding: acceptance joined to the time of a step.

    speedup = T_autoregressive · expected_tokens_per_step / T_step

`predict` is the one place where these are joined; the step's terms are composed in
perfmodel/step.py. Steady state: every sequence of the batch is busy, and emits
`expected_tokens_per_step` on average. Ignored: overlap of the draft with the verification, and the
scheduler of a server with continuous batching.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.perfmodel.acceptance import Acceptance
from magicdec.perfmodel.drafting import draft_of
from magicdec.perfmodel.kernels.op import GridPlaces
from magicdec.perfmodel.memory import (
    MemoryNeed,
    capacity_bytes,
    memory_need,
    prompt_bytes,
)
from magicdec.perfmodel.prefix_cache import hits_of
from magicdec.perfmodel.setup import Cached, Points, Setup, slots_of
from magicdec.perfmodel.step import (
    StepTerms,
    looked_up_terms,
    prefill_terms,
    step_terms,
)
from magicdec.perfmodel.trees import MAX_TREE, tokens_of_tree
from magicdec.specs.speculation import AUTOREGRESSIVE, MAX_GAMMA, SPARSE_METHODS

BoolArray = npt.NDArray[np.bool_]
POINT_LIMITS = {
    "batch": (1.0, 1e7), "context": (0.0, 1e12), "tp": (1.0, 1e5), "gen_len": (-1e12, 1e12),
    "gamma": (0.0, float(MAX_GAMMA)), "budget": (1.0, 1e12),
}  # fmt: skip
NAMES = {"budget": "draft budget", "gen_len": "gen-len"}
AXES = (*POINT_LIMITS, "max_len")
"""The fields of points that are axes."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Steps of configurations, timed. Arrays broadcast to the points' shape; seconds, tokens, bytes
    per device.
    """

    setup: Setup
    points: Points
    terms: StepTerms
    memory: MemoryNeed
    expected_tokens_per_step: Array
    """The median where acceptance is only believed: more are as likely as fewer."""

    @property
    def autoregressive_step_s(self) -> Array:
        return self.terms.autoregressive.total_s

    @property
    def draft_step_s(self) -> Array:
        """One draft step."""
        return self.terms.draft.total_s

    @property
    def verify_step_s(self) -> Array:
        return self.terms.verify.total_s

    @property
    def accept_step_s(self) -> Array:
        return self.terms.accept.total_s

    @property
    def upkeep_step_s(self) -> Array:
        return self.terms.upkeep.total_s

    @property
    def step_s(self) -> Array:
        """The whole speculative step."""
        return self.terms.step_s

    @cached_property
    def tpot_s(self) -> Array:
        """Seconds per emitted token of one sequence."""
        return self.step_s / self.expected_tokens_per_step

    @cached_property
    def tokens_per_s(self) -> Array:
        """Tokens per second of the whole batch, in steady state."""
        return np.asarray(self.points.batch / self.tpot_s)

    @cached_property
    def speedup(self) -> Array:
        """Over autoregressive decoding at the same batch, in steady state."""
        return self.autoregressive_step_s / self.tpot_s

    @property
    def num_gpus(self) -> Array:
        """Devices of one replica."""
        return np.asarray(self.points.tp * self.setup.spread.groups)

    @property
    def valid(self) -> BoolArray:
        """False where a sparse draft's budget is not below the context."""
        if self.setup.speculation.draft_method not in SPARSE_METHODS:
            return np.asarray(True)
        return np.asarray(self.points.budget < self.points.context)

    @cached_property
    def hits(self) -> Cached:
        """Tokens found of cached prompts with the draft set up."""
        at = self.points
        return hits_of(self.setup, at.cached, tp_size=at.tp, gamma=at.gamma)

    @cached_property
    def hits_alone(self) -> Cached:
        """Tokens found of cached prompts without a draft."""
        at = self.points
        return hits_of(self.setup, at.cached, tp_size=at.tp, gamma=0)

    @property
    def ttft_s(self) -> Array:
        """Seconds to the first token of one request, the draft's prefill included, and where it is
        prefilled elsewhere the way of its keys and values.
        """
        return self.prefill_s + self.transfer_s

    @cached_property
    def transfer_s(self) -> Array:
        """Seconds in which the keys and values of one prompt arrive from elsewhere."""
        rate = self.setup.kv_link_bytes_per_s
        if rate is None:
            return np.zeros(())
        at = self.points
        sent = prompt_bytes(
            self.setup,
            prompt_len=at.context,
            budget=at.budget,
            gamma=at.gamma,
            tp_size=at.tp,
        )
        return sent / rate

    @cached_property
    def prefill_s(self) -> Array:
        """Seconds of the prefill of one request alone, the draft's included."""
        return self._rest_s(self.setup, self.points.budget)

    def _rest_s(self, setup: Setup, budget: Any) -> Array:
        """Seconds of the prefill of one request alone, without what is found cached of it."""
        prompt = self.points.context
        tp_size = self.points.tp
        whole_s = _prefill_s(setup, prompt, tp_size, budget)
        if not self.hits.is_any:
            return whole_s
        cached = self.hits.of(prompt)
        return self.hits.seconds_of_rest(
            prompt,
            whole_s=whole_s,
            cached_s=_prefill_s(setup, np.maximum(cached, 1.0), tp_size, budget),
            rest_s=_prefill_s(setup, prompt - cached, tp_size, budget),
        )

    @cached_property
    def draft_prefill_s(self) -> Array:
        """The part of `prefill_s` that the draft adds to the target's own; none where prompts are
        prefilled elsewhere.
        """
        if self.setup.kv_link_bytes_per_s is not None:
            return np.zeros(())
        alone = dataclasses.replace(
            self.setup, speculation=AUTOREGRESSIVE, draft_model=None
        )
        without = self._rest_s(alone, None)
        return np.maximum(self.prefill_s - without, 0.0)

    @cached_property
    def break_even_gen_len(self) -> Array:
        """Generated tokens per sequence from which the draft's own prefill is paid back, one
        request after another; infinite where a step saves nothing."""
        extra = self.points.batch * self.draft_prefill_s / self.setup.spread.groups
        saved = self.autoregressive_step_s - self.tpot_s
        return np.where(
            saved > 0, np.ceil(extra / np.where(saved > 0, saved, 1.0)), np.inf
        )

    def full(self, values: Any) -> Any:
        """`values` at every point."""
        if np.shape(values) == self.points.shape:
            return values
        return np.broadcast_to(values, self.points.shape)

    def take(self, chosen: Any) -> Prediction:
        """The predictions of some points, by their flat indices, as rows."""
        taken = GridPlaces(self.points.shape, chosen)
        points: dict[str, Any] = {}
        for name in AXES:
            axis = getattr(self.points, name)
            points[name] = None if axis is None else taken.rows(axis)
        memory = {
            name: taken.of(value)
            for name, value in msgspec.structs.asdict(self.memory).items()
        }
        return Prediction(
            setup=self.setup,
            points=Points(**points, cached=self.points.cached),
            terms=self.terms.taken(taken),
            memory=MemoryNeed(**memory),
            expected_tokens_per_step=taken.of(self.expected_tokens_per_step),
        )


def _prefill_s(setup: Setup, prompt_len: Any, tp_size: Any, budget: Any) -> Array:
    """Seconds of the prefill of one request alone. The many points of a plan have few prompts, each
    of which is computed once."""
    axes = np.broadcast_arrays(
        prompt_len, tp_size, np.inf if budget is None else budget
    )
    distinct, place = np.unique(
        np.reshape(axes, (len(axes), -1)), axis=1, return_inverse=True
    )
    prompts, ranks, budgets = distinct
    seconds = prefill_terms(
        setup,
        batch=1.0,
        prompt_len=prompts,
        tp_size=ranks,
        budget=None if budget is None else budgets,
    ).total_s
    of_points: Array = np.broadcast_to(seconds, prompts.shape)[place.ravel()]
    return of_points.reshape(axes[0].shape)


def _whole(setup: Setup, points: Points) -> Points:
    """The points as arrays, with the speculation's own gamma where they have none.

    Raises ConfigError unless every entry is a number within its limits (NaN is not), and for a
    sparse draft without a budget."""
    speculation = setup.speculation
    axes: dict[str, Any] = {}
    for name in AXES:
        value = getattr(points, name)
        if name == "gamma" and value is None:
            value = speculation.gamma
        if name == "budget":
            value = slots_of(value)
        axes[name] = array = (
            None if value is None else np.asarray(value, dtype=np.float64)
        )
        if array is None or name not in POINT_LIMITS:
            continue
        low, high = POINT_LIMITS[name]
        if name == "gamma" and speculation.tree is not None:
            high = MAX_TREE
        inside = (array >= low) & (array <= high)
        if name == "budget" and speculation.draft_method not in SPARSE_METHODS:
            inside |= np.isposinf(array)
        if not np.all(inside):
            if name == "budget" and np.isposinf(array).any():
                raise ConfigError(
                    f"draft method {speculation.draft_method!r} reads a budget of KV slots: give one"
                )
            label = NAMES.get(name, name)
            raise ConfigError(
                f"{label} must be between {low:g} and {high:g}, not {array[~inside].flat[0]:g}"
            )
    gamma = axes["gamma"].astype(np.int64)
    if not draft_of(setup).drafts:
        gamma = np.zeros_like(gamma)
    return dataclasses.replace(points, **axes | {"gamma": gamma})


def predict(setup: Setup, acceptance: Acceptance | None, points: Points) -> Prediction:
    """Every point; each term is evaluated on the axes that it depends on, and only then broadcast.

    Raises ConfigError for a number out of range, and without an acceptance where something is
    drafted.
    """
    at = _whole(setup, points)
    draft = draft_of(setup)
    kv_len = at.context + at.gen_len / 2.0
    read = draft.tokens_read(kv_len, at.budget)
    tokens: Array = np.ones(())
    everything: Array = tokens
    if np.any(at.gamma > 0):
        if acceptance is None:
            spec = setup.speculation
            raise ConfigError(
                f"draft {spec.draft} ({spec.draft_method}) needs an acceptance rate or profile"
            )
        seen = draft.context_seen(kv_len, at.budget)
        drafted: dict[str, Any] = {"budget": read, "context": seen, "gamma": at.gamma}
        tokens, everything = acceptance.tokens_per_step(**drafted)
        tree = setup.speculation.tree
        if tree is not None:
            tokens = tokens_of_tree(acceptance, tree, **drafted)
    if draft.is_by_sequence and acceptance is not None and acceptance.is_partly_drafted:
        by_number, probability = looked_up_terms(
            setup,
            batch=at.batch,
            kv_len=kv_len,
            gamma=at.gamma,
            draft_len=acceptance.draft_len_at(at.gamma),
            share=acceptance.drafted_share_at(at.gamma),
            tp_size=at.tp,
        )
        terms = by_number.averaged(probability, at.gamma)
    else:
        is_uncut = at.is_grid and setup.speculation.draft_method in SPARSE_METHODS
        terms = step_terms(
            setup,
            batch=at.batch,
            kv_len=kv_len,
            draft_kv_len=at.budget if is_uncut else read,
            gamma=at.gamma,
            tp_size=at.tp,
            full_acceptance=everything,
        )
    if at.max_len is None:
        held = at.context + at.gen_len
    else:
        held = at.max_len
    need = memory_need(
        setup,
        batch=at.batch,
        max_len=held,
        budget=at.budget,
        gamma=at.gamma,
        tp_size=at.tp,
        capacity=capacity_bytes(setup.hardware, setup.engine, at.tp),
    )
    return Prediction(
        setup=setup,
        points=at,
        terms=terms,
        memory=need,
        expected_tokens_per_step=tokens,
    )
