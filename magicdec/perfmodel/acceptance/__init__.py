"""Acceptance of drafts: the interface of a profile (profile.py), one class for each way to know it,
their common law (law.py, fitted by fit.py), and profiles as files (files.py).
"""

from magicdec.perfmodel.acceptance.files import (
    PROFILES_DIRECTORY,
    default_profile,
    default_profile_names,
    load_profile,
    published_drafts,
    save_profile,
)
from magicdec.perfmodel.acceptance.measured import MeasuredProfile, fit_profile
from magicdec.perfmodel.acceptance.profile import (
    LOOKUP_PRECISION,
    Acceptance,
    AcceptanceProfile,
    BelievedProfile,
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
