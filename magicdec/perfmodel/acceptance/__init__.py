"""Acceptance of drafts: what is asked of it and its sorts (profile.py), the law that they have
(law.py; fitted in fit.py), and profiles as files (library.py).
"""

from magicdec.perfmodel.acceptance.believed import LOOKUP_PRECISION, BelievedProfile
from magicdec.perfmodel.acceptance.library import (
    PROFILES_DIRECTORY,
    default_profile,
    default_profile_names,
    load_profile,
    published_drafts,
    save_profile,
)
from magicdec.perfmodel.acceptance.measured import MeasuredProfile, fit_profile
from magicdec.perfmodel.acceptance.profile import (
    Acceptance,
    AcceptanceProfile,
    RateProfile,
    constant_profile,
)
from magicdec.perfmodel.acceptance.replayed import ReplayedProfile

__all__ = [
    "LOOKUP_PRECISION",
    "PROFILES_DIRECTORY",
    "Acceptance",
    "AcceptanceProfile",
    "BelievedProfile",
    "MeasuredProfile",
    "RateProfile",
    "ReplayedProfile",
    "constant_profile",
    "default_profile",
    "default_profile_names",
    "fit_profile",
    "load_profile",
    "published_drafts",
    "save_profile",
]
