"""Tasks that people serve: the names they go by, and the lengths that are assumed where none are
given.

The lengths are round numbers of ours, not measurements: an answer that rests on them names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magicdec.errors import unknown_choice


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a usual request."""

    prompt_len: int
    output_len: int


USUAL_LENGTHS: Mapping[str, Lengths] = {
    "chat": Lengths(prompt_len=1024, output_len=300),
    "code": Lengths(prompt_len=2048, output_len=300),
    "code-edit": Lengths(prompt_len=4096, output_len=500),
    "math": Lengths(prompt_len=512, output_len=1000),
    "summarisation": Lengths(prompt_len=8192, output_len=300),
    "rag": Lengths(prompt_len=8192, output_len=300),
    "translation": Lengths(prompt_len=1024, output_len=1000),
    "agentic": Lengths(prompt_len=32_768, output_len=500),
    "long-document": Lengths(prompt_len=65_536, output_len=500),
}
"""Lengths by the class of text, one of those that beliefs about acceptance tell apart."""
TASKS = tuple(USUAL_LENGTHS)
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
    """The task that people call so. Raises ConfigError naming the nearest."""
    name = text.strip().lower().replace("_", "-").replace(" ", "-")
    name = ALIASES.get(name, name)
    if name not in USUAL_LENGTHS:
        raise unknown_choice("task", text, TASKS)
    return name


def usual_lengths(task: str | None) -> Lengths:
    """Lengths of a usual request of the task, or of a chat where none is named."""
    return USUAL_LENGTHS[task or NO_TASK]
