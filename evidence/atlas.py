"""An atlas of answers: one plan for each cell of models, devices and loads that a TOML file lists,
and the published measurements of the same models and devices.
"""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from evidence.pairs import predict_pairs
from magicdec.errors import ConfigError, MagicdecError
from magicdec.files import converted, read_toml
from magicdec.naming import draft_name, method_name
from magicdec.schema.plan import Plan
from magicdec.schema.row import Candidate, Gain
from magicdec.validate.pairs import PairRow
from magicdec.validate.rows import published, read_rows

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


class CellAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The plan's choice in one cell, next to decoding without a draft on the same devices."""

    draft: str
    """Name for people ("EAGLE-3"); "none" where the plan chooses no draft."""
    gamma: int
    gain: Gain | None
    """None where no draft is chosen."""
    acceptance: str
    """Where the draft's acceptance comes from."""
    num_gpus: int
    layout: str
    weight_dtype: str
    batch_size: int
    ms_per_token: float
    ms_per_token_without: float
    usd_per_million_tokens: float | None
    usd_per_million_tokens_without: float | None


class AtlasCell(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its answer, or with the reason why there is none."""

    model: str
    device: str
    load: str
    anchor: str
    command: str
    answer: CellAnswer | None = None
    refusal: str = ""


def cell_of(question: AtlasQuestion) -> AtlasCell:
    """Plan one question. A question that cannot be answered becomes a cell with its refusal."""
    from magicdec.perfmodel.planner import make_plan, request_of

    cell = AtlasCell(
        model=question.model,
        device=question.device.name,
        load=question.load.name,
        anchor=question.anchor,
        command=command_of(question),
    )
    try:
        request = request_of(**question.options)
        answered = make_plan(request)
    except MagicdecError as error:
        return msgspec.structs.replace(cell, refusal=str(error))
    return msgspec.structs.replace(cell, answer=answer_of(answered))


def command_of(question: AtlasQuestion) -> str:
    """The command that answers the question."""
    words = ["magicdec", "plan"]
    for name, value in question.options.items():
        words += [f"--{name.replace('_', '-')}", _text(value)]
    return shlex.join(words)


def answer_of(plan: Plan) -> CellAnswer:
    """The plan's choice as one row of the atlas."""
    chosen = plan.best
    without = plan.autoregressive
    gain = None
    draft = "none"
    if chosen.is_speculative:
        gain = chosen.gain
        draft = draft_name(chosen.draft, chosen.draft_method, chosen.draft_budget)
    return CellAnswer(
        draft=draft,
        gamma=chosen.gamma,
        gain=gain,
        acceptance=chosen.drafting.acceptance_source,
        num_gpus=chosen.num_gpus * chosen.num_replicas,
        layout=chosen.layout.label,
        weight_dtype=plan.precision.weight_dtype,
        batch_size=chosen.batch_size,
        ms_per_token=_milliseconds(chosen),
        ms_per_token_without=_milliseconds(without),
        usd_per_million_tokens=chosen.cost.per_million_tokens_usd,
        usd_per_million_tokens_without=without.cost.per_million_tokens_usd,
    )


def cells_of(
    atlas: Atlas, *, jobs: int = 1, backend: str | None = None
) -> Iterator[AtlasCell]:
    """The cells in the order of the questions, by joblib (`jobs` processes, or another backend's
    workers).
    """
    from joblib import Parallel, delayed

    work = (delayed(cell_of)(question) for question in atlas.questions())
    yield from Parallel(n_jobs=jobs, backend=backend, return_as="generator")(work)


def _milliseconds(row: Candidate) -> float:
    return 1000.0 * row.between_tokens_s


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(part) for part in value)
    return str(value)


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The speedup that somebody measured, and the one that a plan of the same load believes."""

    model: str
    device: str
    num_gpus: int
    engine: str
    draft: str
    gamma: int
    users: int
    prompt_len: int
    output_len: int
    unit: str
    measured: float
    predicted: float
    predicted_low: float
    predicted_high: float
    source: str

    @property
    def is_hit(self) -> bool:
        """Whether the measured speedup is in the predicted 90 % interval."""
        return self.predicted_low <= self.measured <= self.predicted_high


@cache
def published_rows() -> tuple[Published, ...]:
    """The shipped pairs of servers with and without speculation. Acceptance is believed, as in a
    plan: what a source measured of it is not used.
    """
    pairs, _ = read_rows(published("speculation_pairs.csv"), PairRow)
    predicted = predict_pairs(pairs, [None] * len(pairs), leaves_out_own=True)
    rows = []
    for pair, speedup, low, high in zip(
        pairs, predicted.speedup, predicted.low, predicted.high, strict=True
    ):
        if not math.isfinite(speedup):
            continue
        rows.append(
            Published(
                model=pair.model,
                device=pair.hardware,
                num_gpus=pair.tp,
                engine=f"{pair.engine} {pair.engine_version}".strip(),
                draft=method_name(pair.setup.speculation.draft_method),
                gamma=pair.gamma,
                users=int(pair.users),
                prompt_len=int(pair.prompt_len),
                output_len=int(pair.output_len),
                unit=pair.unit,
                measured=pair.speedup,
                predicted=float(speedup),
                predicted_low=float(low),
                predicted_high=float(high),
                source=pair.source,
            )
        )
    return tuple(rows)


def published_of(model: str, device: str) -> list[Published]:
    """The published measurements of one model on one device."""
    return [
        row for row in published_rows() if (row.model, row.device) == (model, device)
    ]
