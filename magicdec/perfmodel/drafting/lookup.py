"""Drafts looked up in the text so far, without a network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from magicdec.counts import Array
from magicdec.perfmodel.drafting.base import Block, Draft
from magicdec.perfmodel.kernels.op import Op, fixed


class LookUp(Draft, frozen=True):
    """A draft that is text found before. A sequence without a match has none in that step."""

    drafts: ClassVar[bool] = True

    @property
    def is_by_sequence(self) -> bool:
        return not self.path.is_padded

    def upkeep(self, block: Block) -> list[Op]:
        return [self.search(block)]

    def without_draft(self, block: Block) -> list[Op]:
        """The search, and scheduling that no longer overlaps with the device."""
        plain = self.setup.engine
        own = self.constants
        of_sequences_s = block.batch * (
            own.overheads.sequence_overhead_s - plain.overheads.sequence_overhead_s
        )
        waiting_s = (
            own.overheads.step_overhead_s
            - plain.overheads.step_overhead_s
            + of_sequences_s
        )
        return [self.search(block), fixed("step overhead", "overhead", waiting_s)]

    def search(self, block: Block) -> Op:
        """The search of all sequences' texts: on the host one after the other, on the device at
        once."""
        own = self.own
        each_s: Any = 0.0
        if self.path.search != "device":
            each_s = own.search_s_per_sequence
        if own.scan_s and self.path.search != "device":
            lengths = np.array([float(tokens) for tokens in own.scan_s])
            each_s = np.interp(block.kv_len, lengths, list(own.scan_s.values()))
        of_sequences_s: Array = np.asarray(block.batch * each_s)
        op = fixed("lookup", "overhead", own.search_s + of_sequences_s)
        return replace(op, spread_s=own.search_error * of_sequences_s)
