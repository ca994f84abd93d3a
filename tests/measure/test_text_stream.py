"""Streaming text: what is written, piece by piece, is the whole text, and no character is torn."""

from __future__ import annotations

import numpy as np

from magicdec.measure.text_stream import TextStream
from magicdec.specs.catalog import EMBEDDED_DIRECTORY, load_model_spec


def test_pieces_make_up_the_text_of_one_sequence() -> None:
    """Token by token, with characters of several tokens; the other sequence's tokens are not shown."""
    from magicdec.runtime.prompts import load_tokenizer

    tokenizer = load_tokenizer(EMBEDDED_DIRECTORY, vocab_size=load_model_spec("embedded").vocab_size)
    text = "def größe(x):  # 山 → 🙂 'ok'\n    return x\n"
    ids = tokenizer.encode(text).ids
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append, sequence=1)
    for token in ids:
        stream(np.array([0, 1]), [[5, 6], [token]])
    stream.end()
    assert "".join(pieces) == text + "\n"
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 10
