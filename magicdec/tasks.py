"""Tasks that people serve: the names they go by, and the lengths that are assumed where none are
given.

The lengths are round numbers that we chose, not measurements, so an answer that rests on them names
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from magicdec.errors import ConfigError, unknown_choice


class UsualLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a usual request."""

    prompt_len: int
    output_len: int


USUAL_LENGTHS: Mapping[str, UsualLengths] = {
    "chat": UsualLengths(prompt_len=1024, output_len=300),
    "code": UsualLengths(prompt_len=2048, output_len=300),
    "code-edit": UsualLengths(prompt_len=4096, output_len=500),
    "math": UsualLengths(prompt_len=512, output_len=1000),
    "summarisation": UsualLengths(prompt_len=8192, output_len=300),
    "rag": UsualLengths(prompt_len=8192, output_len=300),
    "translation": UsualLengths(prompt_len=1024, output_len=1000),
    "agentic": UsualLengths(prompt_len=32_768, output_len=500),
    "long-document": UsualLengths(prompt_len=65_536, output_len=500),
}
"""Lengths by the class of text, one of those that beliefs about acceptance tell apart."""
TASKS = tuple(USUAL_LENGTHS)
WEIGHTS: Mapping[str, float] = {
    "chat": 1.0,
    "code": 1.0,
    "code-edit": 0.0,
    "math": 1.0,
    "summarisation": 1.0,
    "rag": 1.0,
    "translation": 0.5,
    "agentic": 1.0,
    "long-document": 0.0,
}
"""How much each class of text counts for the draft that is to serve any. A judgement of ours, not a
measurement of traffic: code edits and long documents, where look-ups win by far, are named apart.
"""
NO_TASK = "chat"
"""Task whose lengths are taken where a question needs lengths and names no task."""
ALIASES: Mapping[str, str] = {
    "agent": "agentic",
    "agents": "agentic",
    "code-agent": "agentic",
    "code-agents": "agentic",
    "coding-agent": "agentic",
    "coding-agents": "agentic",
    "swe-bench": "agentic",
    "tool-use": "agentic",
    "assistant": "chat",
    "chatbot": "chat",
    "conversation": "chat",
    "mt-bench": "chat",
    "sharegpt": "chat",
    "code-generation": "code",
    "code-completion": "code",
    "coding": "code",
    "humaneval": "code",
    "programming": "code",
    "code-editing": "code-edit",
    "edit": "code-edit",
    "editing": "code-edit",
    "document": "long-document",
    "documents": "long-document",
    "long-context": "long-document",
    "long-documents": "long-document",
    "gsm8k": "math",
    "maths": "math",
    "reasoning": "math",
    "question-answering": "rag",
    "qa": "rag",
    "retrieval": "rag",
    "cnn-dailymail": "summarisation",
    "summaries": "summarisation",
    "summarise": "summarisation",
    "summarising": "summarisation",
    "summarization": "summarisation",
    "summarize": "summarisation",
    "summary": "summarisation",
    "translate": "translation",
}


def task_named(text: str) -> str:
    """The task that people call so, or a mixture of tasks by shares ("chat=70,code=30"). Raises
    ConfigError naming the nearest.
    """
    if "=" not in text:
        return _one_named(text)
    parts = [f"{name}={share:.4g}" for name, share in _parts(text).items()]
    return ",".join(parts)


def shares_of(task: str) -> dict[str, float]:
    """The tasks of a mixture with their shares of generated tokens, which add up to 1. Raises
    ConfigError.
    """
    if "=" not in task:
        return {_one_named(task): 1.0}
    parts = _parts(task)
    total = sum(parts.values())
    return {name: share / total for name, share in parts.items()}


def _parts(text: str) -> dict[str, float]:
    parts: dict[str, float] = {}
    for part in text.split(","):
        name, _, given = part.partition("=")
        try:
            share = float(given.strip().removesuffix("%"))
        except ValueError:
            share = 0.0
        if not 0.0 < share < math.inf:
            raise ConfigError(
                f"a mixture of tasks is like chat=70,code=30, not '{text}'"
            )
        task = _one_named(name)
        parts[task] = parts.get(task, 0.0) + share
    return parts


def _one_named(text: str) -> str:
    name = text.strip().lower().replace("_", "-").replace(" ", "-")
    name = ALIASES.get(name, name)
    if name not in USUAL_LENGTHS:
        raise unknown_choice("task", text, TASKS)
    return name


def usual_lengths(task: str | None) -> UsualLengths:
    """Lengths of a usual request of the task, of a chat where none is named, or their means over a
    mixture.
    """
    shares = shares_of(task or NO_TASK)
    prompt = sum(
        share * USUAL_LENGTHS[name].prompt_len for name, share in shares.items()
    )
    output = sum(
        share * USUAL_LENGTHS[name].output_len for name, share in shares.items()
    )
    return UsualLengths(prompt_len=round(prompt), output_len=round(output))
