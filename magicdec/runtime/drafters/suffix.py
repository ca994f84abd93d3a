"""Suffix decoding (arXiv 2411.04975) drafts from a tree of the sequence's own text and one of all
responses.

The trees and the rule are those of magicdec/suffix_tree.py, which replays of logs use too, with
vLLM's defaults: the tree of responses grows with every token that any sequence emits, and a
request's first step, from its prompt alone, drafts nothing. A draft may be shorter than gamma; what
fills it up is never accepted (`Proposal.num_drafted_B`). Each run begins with an empty tree of
responses."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from magicdec.runtime.drafters.base import Drafter
from magicdec.runtime.engine import Engine
from magicdec.runtime.sampling import Proposal
from magicdec.suffix_tree import (
    NUM_ACTIVE,
    Ints,
    SuffixSettings,
    Tree,
    append,
    most_nodes,
    new_tree,
    remove,
    speculate,
    with_room,
)

FIRST_NODES = 1024


@dataclass(kw_only=True)
class Sequence:
    """A sequence that grows: its own tree, and where it stands in the tree of responses."""

    text: Ints
    own: Tree
    prompt_len: int
    first: int
    """Place of its response in the responses' text."""
    active: Ints
    """Nodes at which its suffixes end in the tree of responses."""
    num_active: int = 0
    length: int = 0
    """Tokens that the trees hold."""


class SuffixDrafter(Drafter):
    """Drafts on the host, one sequence after the other."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._settings = SuffixSettings()
        self._sequences: dict[int, Sequence] = {}
        self._clear()

    def _clear(self) -> None:
        self._sequences.clear()
        self._responses: Ints = np.zeros(FIRST_NODES, dtype=np.int32)
        self._num_responses = 0
        self._live: deque[tuple[int, int]] = deque()
        self._tree = new_tree(FIRST_NODES, self._settings.max_depth)

    def begin(self) -> None:
        self._clear()
        self.admit()

    def admit(self) -> None:
        engine = self.engine
        sequences = engine.sequence_of_slot[: engine.num_active].tolist()
        for slot, number in enumerate(sequences):
            self._admit(number, int(engine.host_lengths[slot]) + 1)

    def propose(self, gamma: int, uniforms: Tensor | None) -> Proposal:
        engine = self.engine
        count = engine.num_active
        lengths = engine.host_lengths + 1  # the pending token is known
        texts = engine.tokens_BS[:, : int(lengths.max())].cpu().numpy()
        drafts = np.zeros((count, gamma), dtype=np.int64)
        drafted = np.zeros(count, dtype=np.int64)
        sequences = engine.sequence_of_slot[:count].tolist()
        for slot, number in enumerate(sequences):
            text = texts[slot, : lengths[slot]].astype(np.int32)
            sequence = self._sequences[number]
            self._learn(sequence, text)
            if len(text) > sequence.prompt_len:
                draft = self._draft(sequence, gamma)
                drafts[slot, : len(draft)] = draft
                drafted[slot] = len(draft)
        device = engine.model.device
        return Proposal(
            tokens_BT=torch.from_numpy(drafts).to(device),
            num_drafted_B=torch.from_numpy(drafted).to(device),
        )

    def end(self, sequence: int, output: np.ndarray) -> None:
        grown = self._sequences[sequence]
        stop = grown.prompt_len + len(output)
        grown.text[grown.prompt_len : stop] = output
        self._learn(grown, grown.text[:stop].copy())

    def _admit(self, number: int, prompt_len: int) -> None:
        """Adds a new sequence, with a place for its response. A full tree drops its oldest
        response."""
        room = self.engine.max_len - prompt_len + 1
        first = self._num_responses
        self._num_responses += room
        if self._num_responses > len(self._responses):
            more = np.zeros(self._num_responses, dtype=np.int32)
            self._responses = np.concatenate([self._responses, more])
        depth = self._settings.max_depth
        self._sequences[number] = Sequence(
            text=np.zeros(self.engine.max_len + 1, dtype=np.int32),
            own=new_tree(most_nodes(self.engine.max_len + 1), depth),
            prompt_len=prompt_len,
            first=first,
            active=np.zeros(depth + 1, dtype=np.int32),
        )
        self._live.append((number, first))
        if len(self._live) > self._settings.max_cached_requests:
            oldest, start = self._live.popleft()
            gone = self._sequences.pop(oldest)
            response_len = max(gone.length - gone.prompt_len, 0)
            remove(self._tree, self._responses, start, start + response_len)

    def _learn(self, sequence: Sequence, text: Ints) -> None:
        """Adds the tokens that are new to both trees; the prompt's to its own alone."""
        depth = self._settings.max_depth
        sequence.text[: len(text)] = text
        self._tree = with_room(
            self._tree, (depth + 1) * 2 * len(text[sequence.length :])
        )
        tree = self._enter(sequence)
        for place in range(sequence.length, len(text)):
            append(sequence.own, sequence.text, place, depth)
            if place >= sequence.prompt_len:
                response_place = sequence.first + place - sequence.prompt_len
                self._responses[response_place] = text[place]
                append(tree, self._responses, response_place, depth)
        sequence.num_active = int(tree.state[NUM_ACTIVE])
        sequence.length = len(text)

    def _enter(self, sequence: Sequence) -> Tree:
        """The tree of responses as this sequence grows in it."""
        self._tree.state[NUM_ACTIVE] = sequence.num_active
        return self._tree._replace(active=sequence.active)

    def _draft(self, sequence: Sequence, gamma: int) -> npt.NDArray[np.int32]:
        """The draft with the higher score. If both are equal: the one of the sequence's own
        tree."""
        place = sequence.length - 1
        own, score = self._looked_up(
            sequence.own,
            sequence.text,
            sequence,
            place=place,
            own_len=place + 1,
            gamma=gamma,
        )
        response_len = place + 1 - sequence.prompt_len
        others, others_score = self._looked_up(
            self._enter(sequence),
            self._responses,
            sequence,
            place=place,
            own_len=response_len,
            gamma=gamma,
        )
        return others if others_score > score else own

    def _looked_up(
        self,
        tree: Tree,
        texts: Ints,
        sequence: Sequence,
        *,
        place: int,
        own_len: int,
        gamma: int,
    ) -> tuple[npt.NDArray[np.int32], float]:
        scratch = np.zeros(gamma, dtype=np.int32)
        best = np.zeros(gamma, dtype=np.int32)
        settings = self._settings
        length, score = speculate(
            tree,
            texts,
            sequence.text,
            place,
            own_len,
            gamma,
            np.float32(settings.max_factor),
            np.float32(settings.min_probability),
            settings.max_depth,
            scratch,
            best,
        )
        return best[:length], float(score)
