"""How many drafted tokens are accepted: `law` and `profile` say it, `fit` and `files` take it from counts."""

from magicdec.counts import expected_tokens_per_step, survival
from magicdec.perfmodel.acceptance.fit import Measurement
from magicdec.perfmodel.acceptance.law import Law, LawError
from magicdec.perfmodel.acceptance.profile import (
    PROFILES_DIRECTORY,
    AcceptanceProfile,
    constant_profile,
    default_profile,
    default_profile_names,
    fit_profile,
    load_profile,
    published_drafts,
    save_profile,
)

__all__ = [
    "PROFILES_DIRECTORY", "AcceptanceProfile", "Law", "LawError", "Measurement", "constant_profile", "default_profile",
    "default_profile_names", "expected_tokens_per_step", "fit_profile", "load_profile", "published_drafts",
    "save_profile", "survival",
]  # fmt: skip
