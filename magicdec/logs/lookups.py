"""Rules by which engines look drafts up in the text of a request, and their settings.

`text` is the prompt and the output so far, the token just emitted included.

    ngram           vLLM's default: the longest n in [min, max] whose last n tokens stand earlier in the text; of
                    several places the earliest; the draft is up to k tokens that follow it there
                    (vllm/v1/spec_decode/ngram_proposer.py)
    ngram-gpu       vLLM's V2 runner: the latest place; always exactly k drafts, the last token of the text where
                    nothing follows or nothing is found (vllm/v1/worker/gpu/spec_decode/ngram/speculator.py)
    llama.cpp       ngram-simple: the latest place of the last `max` tokens, only where it drafts at least `max` tokens
                    (common/ngram-map.cpp)
    suffix          vLLM's suffix decoding: trees of the request's text and of earlier responses
    suffix-local    suffix decoding with suffix_decoding_max_cached_requests 0: the request's own text alone
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from magicdec.errors import ConfigError, unknown_choice

Rule = Literal[
    "ngram",
    "ngram-gpu",
    "llama.cpp",
    "suffix",
    "suffix-local",
    "draft-model",
]
DRAFT_MODEL: Rule = "draft-model"
"""A draft model that is decoded greedily, replayed by one prefill."""
RULES: tuple[str, ...] = tuple(rule for rule in get_args(Rule) if rule != DRAFT_MODEL)
"""Rules of look-ups."""
SUFFIX_RULES = ("suffix", "suffix-local")
MAX_NGRAM = 64
MAX_REPLAYED_GAMMA = 64


class Lookup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule with its settings."""

    rule: Rule
    gamma: int
    """Most tokens drafted per step."""
    min_ngram: int = 0
    """Shortest n-gram looked up (`prompt_lookup_min`); 0 for suffix decoding."""
    max_ngram: int = 0
    """Longest n-gram looked up (`prompt_lookup_max`); 0 for suffix decoding."""

    @property
    def is_suffix(self) -> bool:
        return self.rule in SUFFIX_RULES

    def __str__(self) -> str:
        if not self.max_ngram:
            return f"{self.rule} gamma {self.gamma}"
        return (
            f"{self.rule} gamma {self.gamma} look-up {self.min_ngram}..{self.max_ngram}"
        )


def lookup(
    rule: str,
    *,
    gamma: int,
    min_ngram: int | None = None,
    max_ngram: int | None = None,
) -> Lookup:
    """Return the checked settings of one rule, with the engine's defaults in place of None.

    vLLM takes 5 for both where neither is given, and the other's value where one is.

    Raises:
        ConfigError: the rule is unknown or its settings do not go together.
    """
    if rule not in RULES:
        raise unknown_choice("look-up rule", rule, RULES)
    if not 1 <= gamma <= MAX_REPLAYED_GAMMA:
        raise ConfigError(
            f"a look-up drafts 1 to {MAX_REPLAYED_GAMMA} tokens, not {gamma}"
        )
    if rule in SUFFIX_RULES:
        if min_ngram is not None or max_ngram is not None:
            raise ConfigError(
                "suffix decoding has no shortest or longest n-gram; give neither"
            )
        return Lookup(rule=rule, gamma=gamma)  # type: ignore[arg-type]  # checked above
    default_min, default_max = DEFAULT_NGRAMS[rule]
    if rule in ("ngram", "ngram-gpu") and (min_ngram is None) != (max_ngram is None):
        min_ngram = max_ngram = max_ngram or min_ngram
    if min_ngram is None:
        low = default_min
    else:
        low = min_ngram
    if max_ngram is None:
        high = default_max
    else:
        high = max_ngram
    if not 1 <= low <= high <= MAX_NGRAM:
        raise ConfigError(
            f"n-grams are 1 to {MAX_NGRAM} tokens, the shortest first, not {low}..{high}"
        )
    return Lookup(rule=rule, gamma=gamma, min_ngram=low, max_ngram=high)  # type: ignore[arg-type]


DEFAULT_NGRAMS = {
    "ngram": (5, 5),
    "ngram-gpu": (5, 5),
    "llama.cpp": (12, 12),
}
"""Shortest and longest n-gram of each rule where the engine is given none."""
