"""Shows one sequence's text while it is decoded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer

UNFINISHED = "\ufffd"
"""A tokenizer's text for the first bytes of a character whose other bytes are still to come."""


class TextStream:
    """Receives every step's tokens and writes one sequence's new text."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object], *, sequence: int = 0) -> None:
        self._tokenizer, self._write, self._sequence = tokenizer, write, sequence
        self._ids: list[int] = []
        self._shown = ""

    def __call__(self, sequences: np.ndarray, tokens: list[list[int]]) -> None:
        for sequence, new in zip(sequences.tolist(), tokens, strict=True):
            if sequence == self._sequence:
                self._ids += new
                self._show(is_last=False)

    def _show(self, *, is_last: bool) -> None:
        text = self._tokenizer.decode(self._ids)
        if text.endswith(UNFINISHED) and not is_last:
            return
        self._write(text[len(self._shown) :])
        self._shown = text

    def end(self) -> None:
        """Writes what was held back, and ends the line."""
        self._show(is_last=True)
        self._write("\n")
