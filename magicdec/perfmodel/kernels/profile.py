"""A hardware profile: a device's datasheet, and how near to its ceilings kernels and links were
measured to come.

A profile is one TOML file. The curves (`gemm`, `attention`, `allreduce`, ...) hold dimensionless
efficiencies relative to the datasheet's ceilings and fixed costs in seconds, fitted to measurements
named in `fitted_on`. A device whose kernels nobody measured takes the curves of `curves_from`, or
generic ones, with a wider `relative_error`.

The same structs describe a CPU that was calibrated locally.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from magicdec.errors import ConfigError, closest, either, unknown_choice
from magicdec.files import converted, read_toml, write_atomic
from magicdec.perfmodel.kernels.attention import AttentionCurve, PrefillCurve
from magicdec.perfmodel.kernels.base import (
    Curve,
    borrowed_error,
)
from magicdec.perfmodel.kernels.experts import MoeCurve
from magicdec.perfmodel.kernels.gemm import ElementwiseCurve, GemmCurve
from magicdec.perfmodel.kernels.latents import (
    IndexerCurve,
    LatentCurve,
    SparseCurve,
    TopKCurve,
)
from magicdec.perfmodel.kernels.links import AllReduceCurve, ExchangeCurve
from magicdec.perfmodel.kernels.recurrence import LinearCurve, LinearPrefillCurve
from magicdec.specs.device import DTYPE_BYTES, HARDWARE_DIRECTORY, Device

DATASHEETS = HARDWARE_DIRECTORY / "datasheet"
"""Devices of which nothing was measured."""
INSTANCES_FILE = HARDWARE_DIRECTORY.parent / "instances.toml"
OTHER_HARDWARE = (
    "magicdec hardware lists the known; a TOML file does too (docs/extending.md)"
)
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
    """Decoding and verification of gated delta nets, and of what else keeps a state of fixed size.
    """
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
            if not kind.has_formats:
                continue
            for name in kind.variants(self):
                if name and name not in DTYPE_BYTES:
                    raise ValueError(
                        f"curves for the unknown dtype '{name}' (known: {', '.join(DTYPE_BYTES)})"
                    )

    @property
    def is_measured(self) -> bool:
        """Whether kernels of this very device were measured."""
        for curve in (self.gemm, self.attention):
            if curve is None or not curve.fit.fitted_on or curve.fit.borrowed_from:
                return False
        return True

    def curves(self) -> Iterator[tuple[str, Curve]]:
        """Each kernel's curve with its name: its field, and what of it the curve is for."""
        for kind in KERNELS:
            for field in filter(None, (kind.key, kind.variants_key)):
                held = getattr(self, field)
                if isinstance(held, dict):
                    for variant, curve in held.items():
                        yield f"{kind.key} {variant}", curve
                elif held is not None:
                    yield kind.key, held


KERNELS: tuple[type[Curve], ...] = (
    GemmCurve, AttentionCurve, LatentCurve, PrefillCurve, LinearCurve, LinearPrefillCurve, IndexerCurve, TopKCurve,
    SparseCurve, MoeCurve, AllReduceCurve, ExchangeCurve, ElementwiseCurve,
)  # fmt: skip


@lru_cache(maxsize=1)
def _files() -> dict[str, Path]:
    """Profiles that ship, by name; those of DATASHEETS are known by their datasheet alone."""
    paths = [*HARDWARE_DIRECTORY.glob("*.toml"), *DATASHEETS.glob("*.toml")]
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


ALIASES = re.compile(r"^aliases = \[(.*?)\]", re.MULTILINE | re.DOTALL)
"""Other names of a device, as the files of the catalog list them."""


@lru_cache(maxsize=1)
def hardware_aliases() -> dict[str, str]:
    """Catalog names and aliases."""
    names: dict[str, str] = {}
    for path in _files().values():
        names[path.stem] = path.stem
        # a parser of all TOML takes as long for ninety files as everything else that a plan reads
        listed = ALIASES.search(path.read_text(encoding="utf-8"))
        for alias in re.findall(r'"(.+?)"', listed[1] if listed else ""):
            names.setdefault(alias, path.stem)
    return names


def every_gpu() -> list[str]:
    """GPUs of the catalog that "all" stands for: each once, without profiles that a user measured
    again and without those that are known by their datasheet alone."""
    names = []
    for name, path in _files().items():
        if path.parent != DATASHEETS and not name.endswith("-measured"):
            names.append(name)
    return names


def hardware_names() -> list[str]:
    """Names of the catalog, without aliases."""
    return sorted(set(hardware_aliases().values()))


VENDORS = frozenset(
    ("nvidia", "amd", "instinct", "geforce", "tesla", "quadro", "intel", "intel(r)")
)
"""Parts of a device's name, as a driver prints it, that tell no device."""
UNTOLD_WORDS = VENDORS | {"gpu", "generation", "hbm2", "hbm2e", "hbm3", "hbm3e", "oam"}
"""Words of a device's name that tell no device, in whatever order it is written."""
BRANDS = ("rtx", "rx", "radeon", "apple", "arc", "sxm")
"""Words of a device's name that people leave out: no other device is told apart by them alone."""
OTHER_ACCELERATORS = re.compile(
    r"tpu|trillium|ironwood|\bv\d+[ep]\b|\bct\d|trainium|\btrn\d|inferentia|\binf\d|neuron"
)
"""Names of accelerators, and of their cloud instances, that no engine here drives as a GPU."""
COUNTED = re.compile(
    r"(?:(?P<nodes>\d{1,6})\s*[x*]\s*)?(?P<count>\d{1,6})\s*[x*]\s*(?P<name>.*)"
)


COUNTED_AFTER = re.compile(r"(?P<name>[^/]*[a-z][^/]*?)\s*[:x*]\s*(?P<count>\d{1,3})")
OF_LAMBDA = re.compile(r"^gpu_(\d{1,6})x_")
"""An instance of Lambda's, "gpu_8x_h100_sxm5"."""
PRICED = re.compile(r"(?P<name>.+)=(?P<price>\d+(\.\d*)?)")
EVERY_GPU = "all"
"""Stands for all GPUs of the catalog."""


class Devices(NamedTuple):
    """Devices as people write them: "h100", "4xh100", "2x8xh200", "b200=5"."""

    name: str
    num_gpus: int | None = None
    """Number of devices. None: not given."""
    num_gpus_per_node: int | None = None
    """Number of devices per node, if nodes are given."""
    price_per_hour_usd: float | None = None
    """Dollars per device and hour; None: not given."""


def counted(text: str) -> Devices:
    """The name, number and price of devices: "2x8xh200=3.5" is 16 in nodes of 8, "h200:8" are 8."""
    priced = PRICED.fullmatch(text.strip())
    if priced is not None:
        return counted(priced["name"])._replace(
            price_per_hour_usd=float(priced["price"])
        )
    lowered = text.strip().lower()
    lowered = OF_LAMBDA.sub(r"\1x", lowered)
    held = instances().get(_words(lowered))
    if held is not None:
        return counted(held)
    if _key(lowered) in _keys():
        return Devices(text)  # "7900xtx" is no 7900 pieces of "tx"
    match = COUNTED.fullmatch(lowered)
    if match is None:
        after = COUNTED_AFTER.fullmatch(lowered)
        if after is None:
            return Devices(text)
        return Devices(after["name"], num_gpus=int(after["count"]))
    count = int(match["count"])
    held = instances().get(_words(match["name"]))
    node = counted(held) if held is not None else None
    if match["nodes"] is None and node is not None and node.num_gpus is not None:
        return node._replace(
            num_gpus=count * node.num_gpus, num_gpus_per_node=node.num_gpus
        )
    if match["nodes"] is None:
        return Devices(match["name"], num_gpus=count)
    return Devices(
        match["name"], num_gpus=int(match["nodes"]) * count, num_gpus_per_node=count
    )


@lru_cache(maxsize=1)
def instances() -> dict[str, str]:
    """Cloud instances and the devices they hold: "p5.48xlarge" is "8xh100-sxm-80gb"."""
    document = tomllib.loads(INSTANCES_FILE.read_text(encoding="utf-8"))
    return {_words(name): str(devices) for name, devices in document.items()}


def _words(name: str) -> str:
    """A name in small letters, its words divided by hyphens."""
    return re.sub(r"[\s_-]+", "-", name.strip().lower())


def load_hardware(name_or_path: str | Path) -> HardwareProfile:
    """A profile of the catalog (by name, alias or the name that a driver prints), or of a TOML
    file, which is read anew each time. A number of devices in front ("4xh100") is no part of it;
    that of a node is.

    Raises ConfigError naming the file and the key, or the nearest known name.
    """
    text = str(name_or_path)
    if is_file(text):
        return _load_file(Path(name_or_path))
    devices = counted(text)
    profile = _of_catalog(_key(devices.name), devices.name)
    if devices.price_per_hour_usd is not None:
        price = devices.price_per_hour_usd
        profile = msgspec.structs.replace(profile, price_per_hour_usd=price)
    if devices.num_gpus_per_node is None:
        return profile
    link = msgspec.structs.replace(
        profile.link, num_gpus_per_node=devices.num_gpus_per_node
    )
    return msgspec.structs.replace(profile, link=link)


def is_file(text: str) -> bool:
    """Whether a device is given as a file, not by a name."""
    return "/" in text or text.endswith(".toml")


def _key(name: str) -> str:
    """A device's name without separators and vendor."""
    parts = re.split(r"[\s_-]+", name.strip().lower())
    return "".join(part for part in parts if part not in VENDORS)


@lru_cache(maxsize=1)
def _keys() -> dict[str, str]:
    return {_key(alias): name for alias, name in hardware_aliases().items()}


def _parts(name: str) -> frozenset[str]:
    """The words that tell a device, whatever their order: {"a100", "pcie", "80gb"}."""
    parts = set()
    for part in re.split(r"[\s_()+-]+", name.strip().lower()):
        memory = re.sub(r"^(\d+)(?:g|gib)$", r"\1gb", part)
        parts.add(re.sub(r"^sxm\d$", "sxm", memory))
    return frozenset(parts - UNTOLD_WORDS - {""})


def _by_parts(given: str) -> str | None:
    """The device of the catalog that has these words, or that alone has them with its memory, its
    brand or its socket besides."""
    parts = _parts(given)
    if not any(re.search(r"\d", part) for part in parts):
        return None
    those = set()
    others = set()
    for alias, name in hardware_aliases().items():
        further = _parts(alias) - parts
        if not parts <= _parts(alias):
            continue
        if not further:
            those.add(name)
        if all(part in BRANDS or re.fullmatch(r"\d+gb", part) for part in further):
            others.add(name)
    those = those or others
    return those.pop() if len(those) == 1 else None


MIG_SLICE = re.compile(r"\b\d+g\.\d+gb\b")
"""Name of a profile of NVIDIA's MIG."""


@lru_cache(maxsize=256)
def _of_catalog(key: str, given: str) -> HardwareProfile:
    if MIG_SLICE.search(given.lower()):
        raise ConfigError(
            f"'{given}' is a slice of a card: name the whole card, or describe the slice's own memory, "
            "bandwidth and multiprocessors in a TOML file (docs/extending.md)"
        )
    stem = _keys().get(key) or _by_parts(given)
    if stem is None:
        raise _unknown_hardware(given)
    return _load_file(_files()[stem])


def _alike(given: str, aliases: Mapping[str, str]) -> dict[str, str]:
    """The aliases that a name may stand for: another letter or number is another device, one left out a
    slip."""
    numbered = re.findall(r"[a-z]*\d+", given.lower())
    if not numbered:
        return dict(aliases)
    alike = {}
    for alias, name in aliases.items():
        for part in re.findall(r"[a-z]*\d+", alias):
            if any(each.startswith(part) or part.startswith(each) for each in numbered):
                alike[alias] = name
    return alike


def _unknown_hardware(given: str) -> ConfigError:
    """An error that names the devices with the same number, else the name most like the given."""
    if "laptop" in given.lower() or "mobile" in given.lower():
        return ConfigError(
            f"unknown hardware '{given}': a laptop's GPU has other clocks and memory than the card "
            "of its name; describe it in a TOML file (docs/extending.md)"
        )
    number = re.search(r"\d{4}", given)
    if number is not None:
        same = [name for name in hardware_names() if number[0] in name]
        if same:
            meant = either(same)
            return ConfigError(f"unknown hardware '{given}': did you mean {meant}?")
    if OTHER_ACCELERATORS.search(given.lower()):
        return ConfigError(
            f"{given} is not covered: kernels and engines of TPUs, Trainium and Inferentia were not "
            "modelled; --hardware FILE.toml plans a device by its ceilings alone (docs/extending.md)"
        )
    known = _alike(given, hardware_aliases())
    words = [word for word in given.split() if word.lower() not in VENDORS]
    if not closest(given, known):  # a driver's name has more words than ours
        beginnings = ("-".join(words[:length]).lower() for length in (3, 2, 1))
        like = next((name for name in beginnings if name in known), None)
        if like is not None:
            return ConfigError(f"unknown hardware '{given}': did you mean {like}?")
    by_device: dict[str, str] = {}
    for alias in closest(given, known):
        by_device.setdefault(known[alias], alias)
    hint = OTHER_HARDWARE
    if by_device:
        hint = f"did you mean {either(list(by_device.values()))}?"
    return ConfigError(f"unknown hardware '{given}': {hint}")


def _load_file(path: Path) -> HardwareProfile:
    document = read_toml(path, "hardware profile")
    profile = converted(document, HardwareProfile, where=str(path))
    if profile.kind == "gpu" and "num_multiprocessors" not in document:
        raise ConfigError(
            f"{path}: key 'num_multiprocessors' is missing: a GPU's kernels divide their work by "
            "them (multiProcessorCount; an AMD device's compute units)"
        )
    lender = profile.curves_from
    if not lender:
        return profile
    known = hardware_aliases()
    if known.get(lender) in (None, path.stem):
        raise ConfigError(
            f"{path}: key 'curves_from': {unknown_choice('hardware', lender, known)}"
        )
    return _borrow(profile, load_hardware(lender))


def lent(curve: AnyCurve, donor: HardwareProfile, to: Device) -> AnyCurve:
    """A curve measured on another device, marked so and with a wider error, that of another
    generation's wider still."""
    of_generation, of_other = curve.borrowed_errors
    least = of_generation
    if donor.generation != to.generation:
        least = of_other
    fit = msgspec.structs.replace(
        curve.fit,
        relative_error=borrowed_error(curve.fit.relative_error, least),
        borrowed_from=donor.name,
    )
    return msgspec.structs.replace(curve, fit=fit)


def _borrow(profile: HardwareProfile, donor: HardwareProfile) -> HardwareProfile:
    """`profile` with the donor's curves where it has none, marked so and with a wider error."""
    changes: dict[str, Any] = {}
    for kind in KERNELS:
        for key in filter(None, (kind.key, kind.variants_key)):
            mine = getattr(profile, key)
            theirs = getattr(donor, key)
            if isinstance(theirs, dict):
                curves = {}
                for name, curve in theirs.items():
                    if kind.may_borrow(profile, donor, name):
                        curves[name] = lent(curve, donor, profile)
                changes[key] = {**curves, **mine}
            elif (
                mine is None
                and theirs is not None
                and kind.may_borrow(profile, donor, "")
            ):
                changes[key] = lent(theirs, donor, profile)
    return msgspec.structs.replace(profile, **changes)


def save_hardware(profile: HardwareProfile, path: Path) -> None:
    """Writes a profile as TOML, whole or not at all.

    Raises StorageError when the file cannot be written.
    """
    write_atomic(path, msgspec.toml.encode(profile))
