"""Predicts pairs of servers in tables of others: acceptance as measured or as a plan believes it, with a
source's own figures left out, and on a device that nobody named.

Columns and figures are those of `magicdec validate pairs`. A row without hardware, or one that begins
with "unstated", is priced on the device of a few whose step without a draft is nearest.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evidence.lanes import JudgedFigure, Lanes, check_source
from evidence.published_rates import fitted_without
from evidence.trees import tree_groups, trees_over_chains
from magicdec.errors import MagicdecError
from magicdec.perfmodel.acceptance import AcceptanceProfile
from magicdec.perfmodel.acceptance.believed import Question, checkpoint_in, profile_of
from magicdec.perfmodel.intervals import engine_error
from magicdec.perfmodel.lanes import WITHOUT_DRAFT, Lane, lane_of
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import predict
from magicdec.specs.engine import EngineProfile
from magicdec.specs.speculation import SELF
from magicdec.units import GIGA
from magicdec.validate.pair_errors import compared, tokens_of_cells
from magicdec.validate.pair_prediction import (
    Predicted,
    predict_alike,
    stated_tokens,
    without_draft,
)
from magicdec.validate.pairs import OUTPUT_LEN, PairRow
from magicdec.validate.rows import Line, places, read_rows, row_of

UNNAMED = re.compile(r"$|unstated|not stated|unknown", re.IGNORECASE)
UNNAMED_CONTEXT = 800.0
"""Tokens of a request's cache, where neither its device nor its lengths are stated."""
UNNAMED_DEVICES = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-192gb")
UNNAMED_SIZES = ("1", "2", "4", "8")
NAMED_BY_MEMORY = (
    "a100-pcie-80gb",
    "a100-sxm-80gb",
    "h100-pcie-80gb",
    *UNNAMED_DEVICES,
)
"""Devices of which a row that states the memory alone may be."""
SERVER = (
    "model",
    "hardware",
    "tp",
    "engine",
    "engine_version",
    "concurrency",
    "weight_dtype",
    "kv_dtype",
)
"""Columns in which rows of one server are equal, beside the source."""
TEXTS = {
    "summar": "summarisation",
    "humaneval": "code",
    "mbpp": "code",
    "livecodebench": "code",
    "swe-bench": "agentic",
    "gsm8k": "math",
    "math": "math",
    "aime": "math",
    "mt-bench": "chat",
    "mt_bench": "chat",
    "mtbench": "chat",
    "sharegpt": "chat",
    "chat": "chat",
    "rag": "rag",
    "pg19": "long-document",
    "pg-19": "long-document",
    "longbench": "long-document",
    "code": "code",
    "translat": "translation",
}
"""Classes of text by a word of a row's note; the first that is found."""


class OthersPair(PairRow, frozen=True, kw_only=True):
    """A pair of a table that may leave out the device."""

    is_device_assumed: bool = False

    def _usual_lengths(self) -> tuple[float, float]:
        if self.is_device_assumed:
            return UNNAMED_CONTEXT - OUTPUT_LEN / 2.0, OUTPUT_LEN
        return super()._usual_lengths()

    @property
    def assumptions(self) -> list[str]:
        stated = super().assumptions
        if not self.is_device_assumed:
            return stated
        assumed = (
            f"{self.tp} x {self.setup.hardware.name} assumed, whose step without a draft is "
            "nearest; decoding alone is compared"
        )
        return [assumed, *stated]

    @property
    def is_decoding(self) -> bool:
        """Whether a rate leaves out prefill, or is compared as if it did."""
        return super().is_decoding or (self.is_rate and self.is_device_assumed)


def validate_pairs(
    paths: Sequence[Path],
    *,
    acceptance: Literal["measured", "believed"] = "measured",
    leave_out: str = "",
) -> dict[str, Any]:
    """The document of `magicdec validate pairs`, with the trees next to their chains. With `leave_out` a
    source's rows alone are judged, by intervals whose widths come from the other sources.

    Raises ConfigError for a file that cannot be read or lacks a column, and when no row can be
    judged.
    """
    pairs, refused = read_pairs(paths)
    tokens: list[float | None] = [None] * len(pairs)
    is_judged = [True] * len(pairs)
    lacking = "no acceptance"
    if acceptance == "measured":
        tokens = tokens_of_cells(pairs)
        is_judged = [pair.tokens_per_step is not None for pair in pairs]
        lacking = "no measured tokens per step"
    if leave_out:
        predicted = without_source(pairs, tokens, leave_out)
    else:
        predicted = predict_pairs(pairs, tokens)
    document = compared(
        pairs, predicted, is_judged, lacking=lacking, refused=refused, source=leave_out
    )
    trees = trees_over_chains(pairs)
    if leave_out:
        trees = [each for each in trees if each.tree.origin == leave_out]
    document["groups"] += tree_groups(trees)
    return document


def read_pairs(paths: Sequence[Path]) -> tuple[list[OthersPair], list[str]]:
    """The usable rows and one line for each other; rows of devices that nobody named are on the
    nearest."""
    return read_rows(paths, OthersPair, fill=name_devices)


def name_devices(lines: list[Line]) -> None:
    """Puts a device and its number into the lines that name none: of a few the one whose step
    without a draft is nearest to the measured ones of its server. With two free choices this is a
    weak test of steps with a draft, and none of those without."""
    servers = []
    for line in lines:
        is_unnamed = UNNAMED.match(line.get("hardware", "")) is not None
        server = None
        if is_unnamed:
            server = (line.get("source", "").partition(" ")[0], *map(line.get, SERVER))
        servers.append([server] if server else [])
    for own in places(servers).values():
        chosen = _nearest([lines[place] for place in own])
        for place in own:
            lines[place] |= chosen


def _nearest(lines: Sequence[Line]) -> Line:
    """The cells of the device and number nearest to these lines of one server; none where no line
    can be read or no device holds the model."""
    memory = re.search(r"(\d+) ?gb", lines[0]["hardware"].lower())
    devices: Sequence[str] = UNNAMED_DEVICES
    if memory:
        devices = tuple(name for name in NAMED_BY_MEMORY if f"-{memory[1]}gb" in name)
    sizes: Sequence[str] = UNNAMED_SIZES
    if lines[0]["tp"]:
        sizes = (lines[0]["tp"],)
    best: Line = {}
    least = np.inf
    for device in devices:
        for tp in sizes:
            cells = {"hardware": device, "tp": tp, "is_device_assumed": "true"}
            apart = _apart([line | cells for line in lines])
            if apart < least:
                best, least = cells, apart
    return best


def _apart(lines: Sequence[Line]) -> float:
    """How far the steps without a draft are from the measured ones, in the median of their
    logarithms; infinite where they cannot be predicted."""
    errors = []
    for line in lines:
        try:
            row = row_of(line, OthersPair)
        except MagicdecError:
            continue
        point = Points(
            batch=row.users, context=row.prompt_len, tp=row.tp, gen_len=row.output_len
        )
        prediction = predict(without_draft(row.setup), None, point)
        if not np.all(prediction.memory.fits):
            return np.inf
        per_token_s = 1.0 / float(prediction.tokens_per_s)
        if not row.is_rate:
            per_token_s *= row.users
        errors.append(np.log(per_token_s / row.measured[0]))
    if not errors:
        return np.inf
    return abs(float(np.median(errors)))


def predict_pairs(
    pairs: Sequence[PairRow],
    tokens: Sequence[float | None],
    engines: Mapping[str, EngineProfile] | None = None,
    *,
    leaves_out_own: bool = False,
    widths: Sequence[float] | None = None,
) -> Predicted:
    """Predictions with these tokens per step; None stands for the believed acceptance, without what a
    pair's own source published of it where `leaves_out_own`. `engines` replaces profiles of the catalog
    by name, and `widths` the error of a speedup that the pairs' engines have in plans. Pairs without a
    known acceptance are NaN."""
    predicted = np.full((len(Predicted._fields), len(pairs)), np.nan)
    keys = []
    for pair, stated in zip(pairs, tokens, strict=True):
        task = None
        if stated is None:
            task = task_of(pair)
        origin = pair.origin if leaves_out_own else ""
        keys.append([(*pair.alike, task, origin)])
    for indices in places(keys).values():
        rows = [pairs[index] for index in indices]
        setup = rows[0].setup
        if engines is not None and setup.engine.name in engines:
            profile = engines[setup.engine.name].of_version(rows[0].version)
            profile = profile.as_set(rows[0].path_options)
            setup = dataclasses.replace(setup, engine=profile)
        tokens_of_rows = [tokens[index] for index in indices]
        width: Any = engine_error(setup)
        if widths is not None:
            width = np.array([widths[index] for index in indices])
        law: Any
        if tokens_of_rows[0] is None:
            without = rows[0].origin if leaves_out_own else ""
            law = believed_acceptance(rows[0], without=without)
        else:
            law = stated_tokens(rows, tokens_of_rows)
        predicted[:, indices] = predict_alike(setup, rows, law, width=width)
    return Predicted(*predicted)


def task_of(pair: PairRow) -> str:
    """The class of its text, by its note; "" where that does not say."""
    note = pair.note.lower()
    for word, task in TEXTS.items():
        if re.search(rf"\b{word}", note):
            return task
    return ""


def lane_of_pair(pair: PairRow) -> Lane:
    return lane_of(pair.setup, pair.version)


def without_source(
    pairs: Sequence[PairRow], tokens: Sequence[float | None], source: str
) -> Predicted:
    """Predictions from what the other sources' tables and rows tell; those of other sources are NaN.
    Raises ConfigError for a source that no pair has."""
    check_source(source, [pair.origin for pair in pairs])
    lanes = Lanes(judged_pairs(pairs, predict_pairs(pairs, tokens_of_cells(pairs))))
    own = [place for place, pair in enumerate(pairs) if pair.origin == source]
    values = np.full((len(Predicted._fields), len(pairs)), np.nan)
    values[:, own] = predict_pairs(
        [pairs[place] for place in own],
        [tokens[place] for place in own],
        leaves_out_own=True,
        widths=[width_without_own(pairs[place], lanes) for place in own],
    )
    return Predicted(*values)


def width_without_own(pair: PairRow, lanes: Lanes) -> float:
    """The error of a pair's speedup that a plan would have without the pair's source."""
    width, owner = lanes.width(lane_of_pair(pair), "speedup", without=pair.origin)
    if owner == lane_of_pair(pair):
        return width
    return max(width, pair.setup.engine.errors.speedup_relative_error)


def believed_acceptance(row: PairRow, *, without: str = "") -> AcceptanceProfile:
    """The acceptance that a plan takes for a row's draft and text, nobody having measured it, and a
    source having published nothing."""
    setup = row.setup
    model = setup.model.name
    spec = setup.speculation
    kind = spec.draft_method
    if kind == "full" and spec.draft == SELF:
        kind = "self-quantised"
    budget = None
    if spec.draft_budget is not None:
        budget = float(spec.draft_budget)
    question = Question(
        model=model,
        kind=kind,
        billions=setup.model.num_parameters / GIGA,
        task=task_of(row),
        context=row.prompt_len,
        budget=budget,
        published=fitted_without(without) if without else None,
    )
    if kind == "full":
        question = question._replace(draft=spec.draft)
    elif kind != "self-quantised":
        draft = checkpoint_in(f"{row.draft} {row.draft_detail}", question)
        question = question._replace(draft=draft)
    return profile_of(question, draft=spec.draft, method=spec.draft_method)


def judged_pairs(pairs: Sequence[PairRow], predicted: Predicted) -> list[JudgedFigure]:
    """The figures of the pairs that state their tokens per step, at which they were predicted."""
    judged = []
    for place, pair in enumerate(pairs):
        if pair.tokens_per_step is None or not np.isfinite(predicted.speedup[place]):
            continue
        before_s, after_s = pair.measured
        of_engine = engine_error(pair.setup)
        of_kernels = max(predicted.log_deviation[place] ** 2 - of_engine**2, 0.0)
        judged.append(
            JudgedFigure(
                lane=lane_of_pair(pair),
                source=pair.origin,
                figure="speedup",
                log_error=float(np.log(predicted.speedup[place] / pair.speedup)),
                of_kernels=float(np.sqrt(of_kernels)),
                log_speedup=float(np.log(predicted.speedup[place])),
                device=pair.setup.hardware.name,
            )
        )
        if pair.baseline == 1.0:  # a ratio, from which no time follows
            continue
        judged += [
            JudgedFigure(
                lane=lane_of_pair(pair)._replace(draft=WITHOUT_DRAFT),
                source=pair.origin,
                figure="step without a draft",
                log_error=float(np.log(predicted.baseline_s[place] / before_s)),
                device=pair.setup.hardware.name,
            ),
            JudgedFigure(
                lane=lane_of_pair(pair),
                source=pair.origin,
                figure="speculative step",
                log_error=float(np.log(predicted.speculative_s[place] / after_s)),
                device=pair.setup.hardware.name,
            ),
        ]
    return judged


def judged_beliefs(pairs: Sequence[PairRow], lanes: Lanes) -> list[JudgedFigure]:
    """The speedups of all pairs as a plan answers, their acceptance believed: neither what a pair's own
    source published of it is known, nor what its servers add to the width of a lane."""
    predicted = predict_pairs(
        pairs,
        [None] * len(pairs),
        leaves_out_own=True,
        widths=[width_without_own(pair, lanes) for pair in pairs],
    )
    is_inside = predicted.is_inside(pairs)
    judged = []
    for place, pair in enumerate(pairs):
        if np.isfinite(predicted.speedup[place]):
            judged.append(
                JudgedFigure(
                    lane=lane_of_pair(pair),
                    source=pair.origin,
                    figure="speedup, acceptance believed",
                    log_error=float(np.log(predicted.speedup[place] / pair.speedup)),
                    log_speedup=float(np.log(predicted.speedup[place])),
                    chance=float(predicted.chance[place]),
                    is_inside=bool(is_inside[place]),
                    device=pair.setup.hardware.name,
                )
            )
    return judged
