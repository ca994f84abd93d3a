"""The questions of an atlas: a TOML file of models, devices and loads."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from magicdec.errors import ConfigError
from magicdec.files import converted, read_toml

SHIPPED = Path(__file__).parent / "atlas.toml"
OWN_OPTIONS = ("model", "hardware", "engine", "price")
"""Options of a plan that the atlas sets itself."""
Price = Annotated[float, msgspec.Meta(gt=0)]


class RequestKind(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Requests of one kind: options of a plan under their names on the command line."""

    name: str
    title: str
    options: dict[str, Any]


class PricedDevice(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A device of the catalog, or a TOML file, with the dollars of one per hour."""

    name: str
    price: Price


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model as `magicdec plan --model` takes it."""

    name: str


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the devices' prices are from, and the day they were read."""

    source: str
    read_on: datetime.date


class AtlasQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the atlas."""

    model: str
    device: PricedDevice
    load: RequestKind
    engine: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of the plan that answers it."""
        return {
            "model": self.model,
            "hardware": self.device.name,
            "engine": self.engine,
            "price": self.device.price,
            **self.load.options,
        }

    @property
    def anchor(self) -> str:
        """Name of the cell in a link, stable between builds."""
        return f"{self.model}--{self.device.name}--{self.load.name}"


class Atlas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every question of an atlas: each model on each device under each load."""

    title: str
    engine: str
    loads: list[RequestKind]
    prices: Prices
    devices: list[PricedDevice]
    models: list[Model]

    def questions(self) -> Iterator[AtlasQuestion]:
        for model in self.models:
            for device in self.devices:
                for load in self.loads:
                    yield AtlasQuestion(
                        model=model.name, device=device, load=load, engine=self.engine
                    )


def read_atlas(path: Path = SHIPPED) -> Atlas:
    """Read the questions of a TOML file. Raises ConfigError naming the file and the key."""
    atlas: Atlas = converted(read_toml(path), Atlas, where=f"{path} is not an atlas")
    for what, names in (
        ("load", [load.name for load in atlas.loads]),
        ("device", [device.name for device in atlas.devices]),
        ("model", [model.name for model in atlas.models]),
    ):
        if not names:
            raise ConfigError(f"{path} lists no {what}")
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{path} lists the {what} {name} twice")
    for load in atlas.loads:
        for name in OWN_OPTIONS:
            if name in load.options:
                raise ConfigError(
                    f"{path}: load {load.name} sets {name}, which the atlas sets"
                )
    return atlas
