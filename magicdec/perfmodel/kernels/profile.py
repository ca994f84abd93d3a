"""A hardware profile: a device's datasheet, and how near to its ceilings kernels and links were measured to come.

A profile is one TOML file. The curves (`gemm`, `attention`, `allreduce`, ...) hold dimensionless efficiencies relative
to the datasheet's ceilings and fixed costs in seconds, fitted to measurements named in `fitted_on`. A device whose
kernels nobody measured takes the curves of `curves_from`, or generic ones, with a wider `relative_error`.

The same structs describe a CPU that was calibrated locally.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from magicdec.errors import ConfigError, unknown_choice
from magicdec.files import converted, read_toml, write_atomic
from magicdec.perfmodel.kernels.attention import AttentionCurve
from magicdec.perfmodel.kernels.base import Curve, borrowed_error
from magicdec.perfmodel.kernels.elementwise import ElementwiseCurve
from magicdec.perfmodel.kernels.experts import MoeCurve
from magicdec.perfmodel.kernels.gemm import GemmCurve
from magicdec.perfmodel.kernels.indexing import IndexerCurve, SparseCurve, TopKCurve
from magicdec.perfmodel.kernels.latent import LatentCurve
from magicdec.perfmodel.kernels.links import AllReduceCurve, ExchangeCurve
from magicdec.perfmodel.kernels.prefill import PrefillCurve
from magicdec.perfmodel.kernels.recurrence import LinearCurve, LinearPrefillCurve
from magicdec.specs import device
from magicdec.specs.device import DTYPE_BYTES, Device

HARDWARE_DIRECTORY = Path(device.__file__).resolve().parent / "data" / "hardware"
AnyCurve = TypeVar("AnyCurve", bound=Curve)


class HardwareProfile(Device, frozen=True, kw_only=True):
    """One device: ceilings from its datasheet, and fitted curves."""

    gemm: GemmCurve | None = None
    gemm_formats: dict[str, GemmCurve] = msgspec.field(default_factory=dict)
    """Linear layers whose products run in a narrow format (fp8, fp8_block, nvfp4)."""
    attention: AttentionCurve | None = None
    attention_formats: dict[str, AttentionCurve] = msgspec.field(default_factory=dict)
    """Attention over a KV cache in a narrow format (fp8)."""
    latent: dict[str, LatentCurve] = msgspec.field(default_factory=dict)
    """Decoding of multi-head latent attention, by the format of the cache."""
    prefill: PrefillCurve | None = None
    linear: LinearCurve | None = None
    """Decoding and verification of gated delta nets, and of what else keeps a state of fixed size."""
    linear_prefill: LinearPrefillCurve | None = None
    indexer: IndexerCurve | None = None
    top_k: dict[str, TopKCurve] = msgspec.field(default_factory=dict)
    """Choosing by an indexer's scores, by how the scores that were timed are distributed."""
    sparse: dict[str, SparseCurve] = msgspec.field(default_factory=dict)
    """Attention to the tokens that an indexer chose, by the format of the cache."""
    moe: dict[str, MoeCurve] = msgspec.field(default_factory=dict)
    """Mixtures of experts, by the format of the experts' weights."""
    allreduce: AllReduceCurve | None = None
    allreduce_engines: dict[str, AllReduceCurve] = msgspec.field(default_factory=dict)
    """All-reduces of engines with kernels of their own; `allreduce` is vLLM's."""
    exchange: ExchangeCurve | None = None
    """Tokens sent between the ranks of whole experts."""
    elementwise: ElementwiseCurve | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in KERNELS:
            for name in kind.variants(self) if kind.has_formats else ():
                if name and name not in DTYPE_BYTES:
                    raise ValueError(f"curves for the unknown dtype '{name}' (known: {', '.join(DTYPE_BYTES)})")

    @property
    def is_measured(self) -> bool:
        """Whether kernels of this very device were measured."""
        curves = (self.gemm, self.attention)
        return all(curve is not None and curve.fit.fitted_on and not curve.fit.borrowed_from for curve in curves)


KERNELS: tuple[type[Curve], ...] = (
    GemmCurve, AttentionCurve, LatentCurve, PrefillCurve, LinearCurve, LinearPrefillCurve, IndexerCurve, TopKCurve,
    SparseCurve, MoeCurve, AllReduceCurve, ExchangeCurve, ElementwiseCurve,
)  # fmt: skip


@lru_cache(maxsize=1)
def hardware_aliases() -> dict[str, str]:
    """Catalog names and aliases."""
    names: dict[str, str] = {}
    for path in sorted(HARDWARE_DIRECTORY.glob("*.toml")):
        names[path.stem] = path.stem
        for alias in tomllib.loads(path.read_text(encoding="utf-8")).get("aliases", ()):
            names.setdefault(alias, path.stem)
    return names


def hardware_names() -> list[str]:
    """Names of the catalog, without aliases."""
    return sorted(set(hardware_aliases().values()))


def load_hardware(name_or_path: str | Path) -> HardwareProfile:
    """A profile of the catalog (by name or alias), or of a TOML file, which is read anew each time.

    Raises ConfigError naming the file and the key, or the nearest known name.
    """
    text = str(name_or_path)
    if "/" in text or text.endswith(".toml"):
        return _load_file(Path(name_or_path))
    return _of_catalog(text.lower(), text)


@lru_cache(maxsize=64)
def _of_catalog(name: str, given: str) -> HardwareProfile:
    direct = HARDWARE_DIRECTORY / f"{name}.toml"
    if direct.is_file():
        return _load_file(direct)
    stem = hardware_aliases().get(name)
    if stem is None:
        raise unknown_choice("hardware", given, hardware_names())
    return _load_file(HARDWARE_DIRECTORY / f"{stem}.toml")


def _load_file(path: Path) -> HardwareProfile:
    profile = converted(read_toml(path, "hardware profile"), HardwareProfile, where=str(path))
    if profile.curves_from:
        if profile.curves_from not in hardware_aliases() or hardware_aliases()[profile.curves_from] == path.stem:
            raise ConfigError(
                f"{path}: key 'curves_from': {unknown_choice('hardware', profile.curves_from, hardware_aliases())}"
            )
        profile = _borrow(profile, load_hardware(profile.curves_from))
    return profile


def lent(curve: AnyCurve, donor: str) -> AnyCurve:
    """A curve measured on another device, marked so and with a wider error."""
    fit = msgspec.structs.replace(
        curve.fit, relative_error=borrowed_error(curve.fit.relative_error), borrowed_from=donor
    )
    return msgspec.structs.replace(curve, fit=fit)


def _borrow(profile: HardwareProfile, donor: HardwareProfile) -> HardwareProfile:
    """`profile` with the donor's curves where it has none, marked so and with a wider error."""
    changes: dict[str, Any] = {}
    for kind in KERNELS:
        for key in filter(None, (kind.key, kind.variants_key)):
            mine, theirs = getattr(profile, key), getattr(donor, key)
            if isinstance(theirs, dict):
                apt = {name: each for name, each in theirs.items() if kind.may_borrow(profile, donor, name)}
                changes[key] = {name: lent(each, donor.name) for name, each in apt.items()} | mine
            elif mine is None and theirs is not None and kind.may_borrow(profile, donor, ""):
                changes[key] = lent(theirs, donor.name)
    return msgspec.structs.replace(profile, **changes)


def save_hardware(profile: HardwareProfile, path: Path) -> None:
    """Writes a profile as TOML, whole or not at all.

    Raises StorageError when the file cannot be written.
    """
    write_atomic(path, msgspec.toml.encode(profile))
