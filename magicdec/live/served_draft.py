"""What a server drafts with: as the user says, or as the server's metrics say of magicdec's draft in vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from magicdec.errors import ConfigError, unknown_choice
from magicdec.live.metrics import Scrape, Target
from magicdec.live.series import DRAFT_INFO
from magicdec.naming import draft_name
from magicdec.specs.speculation import LOOKUP_METHODS, OWN_METHOD, SELF, SPARSE_METHODS, DraftMethod

DEFAULT = "ngram"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft's name and method; `budget`: the KV slots that a step of a sparse one reads, None: the full cache."""

    name: str
    method: DraftMethod
    budget: int | None = None

    @property
    def may_be_absent(self) -> bool:
        """Whether a step may have no draft for want of one, which then counts as a draft that was not accepted."""
        return self.method in LOOKUP_METHODS

    def __str__(self) -> str:
        return draft_name(self.name, self.method) + (f", budget {self.budget}" if self.budget else "")


def parse_draft(text: str, *, method: str | None = None, budget: int | None = None) -> Draft:
    """ "ngram", "eagle" and the like, a draft model's name (with its full cache unless a sparse method is given), or
    "self" with a sparse method and its budget.

    Raises ConfigError where these do not go together.
    """
    if text in OWN_METHOD:
        if method not in (None, text) or budget is not None:
            raise ConfigError(f"draft {text} has its own method and no budget; give neither")
        return Draft(name=text, method=text)
    if method is not None and method not in get_args(DraftMethod):
        raise unknown_choice("draft method", method, SPARSE_METHODS)
    chosen = method or ("streamingllm" if text == SELF else "full")
    if (chosen in SPARSE_METHODS) != (budget is not None):
        raise ConfigError(
            f"draft {text} with method {chosen} needs a --draft-budget"
            if budget is None
            else f"--draft-budget goes with a sparse method ({', '.join(SPARSE_METHODS)}), not with {chosen}"
        )
    if chosen not in (*SPARSE_METHODS, "full"):
        raise unknown_choice("draft method", chosen, SPARSE_METHODS)
    return Draft(name=text, method=chosen, budget=budget)


def announced(scrape: Scrape, target: Target) -> Draft | None:
    """The draft that the server's own metrics name: magicdec's in vLLM. None: they name none, as of all others."""
    for labels, _ in scrape.samples.get(DRAFT_INFO, ()):
        if any(labels.get(name, value) != value for name, value in target.labels.items()):
            continue
        try:
            return parse_draft(SELF, method=labels["draft_method"], budget=int(labels["draft_budget"]))
        except (KeyError, ValueError, ConfigError):
            return None
    return None


def agreed(given: Draft | None, server: Draft | None) -> Draft:
    """The draft that both name, or the only one that is named; n-gram where none is.

    Raises ConfigError where they differ.
    """
    if given is not None and server is not None and given != server:
        raise ConfigError(f"the server drafts with {server}, not with {given}; leave --draft out")
    return given or server or Draft(name=DEFAULT, method="ngram")
