"""The layouts that a plan for a rate simulates: each way to spread a replica, without a draft and
with the drafts that serve about the most there by Little's law.

A replica that holds b requests for t seconds each serves b / t of them per second.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import msgspec

from magicdec.errors import CapacityError
from magicdec.perfmodel.plan.choice import objective
from magicdec.perfmodel.plan.drafts import draft_options
from magicdec.perfmodel.plan.request import (
    Case,
    DraftOption,
    Lengths,
    PlanRequest,
    engine_of,
    lengths_of,
    resolve,
)
from magicdec.perfmodel.plan.search import search
from magicdec.perfmodel.plan.tables import follows_table, gamma_table
from magicdec.perfmodel.rate.load import Load
from magicdec.perfmodel.rate.requests import Requests
from magicdec.perfmodel.rate.simulate import Server
from magicdec.schema.gamma_table import TableGamma
from magicdec.schema.plan import GammaTable
from magicdec.schema.row import Candidate
from magicdec.specs.model import ModelSpec

NEAR_MOST = 0.8
"""Share of the highest analytic rate of a draft at a tp size from which others are simulated: how
often a draft's rate varies between requests moves its percentiles by less."""


@dataclass(frozen=True, kw_only=True)
class ServedLayout:
    """One draft (or none) at one tp size, with the analytic answer."""

    case: Case
    option: DraftOption | None
    row: Candidate
    """The row with the highest rate within the limits."""
    follows: str = "off"
    """How gamma is chosen: "fixed", or "by batch" from the plan's table; "off" without a draft."""

    @property
    def rate(self) -> float:
        """Requests per second of one replica, by Little's law."""
        if self.row.requests is None:
            return 0.0
        return self.row.requests.requests_per_s / self.row.num_replicas

    def server(self, requests: Requests) -> Server:
        acceptance = None
        if self.option is not None:
            acceptance = self.option.acceptance
        return Server.of(
            self.case.setup(self.option),
            requests,
            tp_size=self.row.tp_size,
            acceptance=acceptance,
            policy=self.policy,
            budget=self.row.draft_budget,
        )

    @property
    def policy_name(self) -> str:
        if self.follows == "fixed":
            return f"gamma {self.row.gamma}"
        return self.follows

    def with_usual_policy(self) -> ServedLayout:
        """The layout with its gamma by batch where that is worth what the engine takes for it,
        else fixed.
        """
        follows = "by batch"
        cost, _, _ = self.case.engine.table_costs(self.row.draft)
        if cost and not follows_table(self.case, self._table, self.row):
            follows = "fixed"
        return dataclasses.replace(self, follows=follows)

    @cached_property
    def _table(self) -> GammaTable:
        """The table of gammas of its draft alone."""
        assert self.option is not None
        case = dataclasses.replace(self.case, options=(self.option,))
        return gamma_table(case, self.row, self.row)

    @cached_property
    def policy(self) -> TableGamma | None:
        """The gammas that it runs; None without a draft."""
        if self.option is None:
            return None
        if self.follows == "fixed":
            return TableGamma(
                batch_sizes=(1,), context_lens=(1,), gammas=((self.row.gamma,),)
            )
        return self._table.policy.at_context(self.row.context_len)


def served_layouts(
    load: Load, model: ModelSpec, *, widest: bool = False
) -> list[ServedLayout]:
    """Each way to spread a replica without a draft, and with the drafts that serve about the most
    there, of those that a release of the engine runs unless one was requested. `widest`: the usual way at its
    largest tp size alone.

    Raises CapacityError where nothing fits, or nothing keeps the limits.
    """
    cases = _cases(load, model, widest=widest)
    layouts: list[ServedLayout] = []
    refused: list[CapacityError] = []
    for case in cases:
        try:
            rows = _rows_of_released(case)
        except CapacityError as error:
            refused.append(error)
            continue
        drafted = [layout for layout in rows if layout.row.is_speculative]
        most = max((layout.rate for layout in drafted), default=0.0)
        layouts += [layout for layout in rows if layout.option is None]
        for layout in drafted:
            if layout.rate >= NEAR_MOST * most:
                layouts.append(layout.with_usual_policy())
    if layouts:
        return layouts
    if refused:
        raise refused[0]
    raise CapacityError(
        "nothing keeps the limits on latency, not even for one request at a time on an idle device"
    )


def _cases(load: Load, model: ModelSpec, *, widest: bool) -> list[Case]:
    """One for each spread and tp size, with the batch to be searched under the load's limits."""
    asked = msgspec.structs.replace(load.request, workload=load.workload)
    (lengths,) = lengths_of(asked)
    request = msgspec.structs.replace(
        asked,
        num_gpus=asked.num_gpus or _node(asked, model, lengths),
        tpot_limit_s=load.tpot_limit_s,
        ttft_limit_s=load.ttft_limit_s,
    )
    hardware = request.hardware[0]
    engine = engine_of(request, hardware)
    options, _ = draft_options(
        model, request, engine=engine, context=int(lengths.prompt_len)
    )
    options = [option for option in options if not option.is_hypothetical]
    ways = resolve(request, model, hardware, options, lengths)
    if widest:
        largest = max(ways[0].tp_sizes)
        return [dataclasses.replace(ways[0], tp_sizes=(largest,), searches_batch=True)]
    return [
        dataclasses.replace(way, tp_sizes=(tp,), searches_batch=True)
        for way in ways
        for tp in way.tp_sizes
    ]


def _rows_of_released(case: Case) -> list[ServedLayout]:
    """The best rows with drafts that a release of the engine runs; with all where the plugin's are
    admitted.
    """
    request = case.request
    if request.names_a_draft or request.plugin or request.gives_acceptance:
        return _best_rows(case)
    released = []
    for option in case.options:
        # an engine's draft with a note is one of the plugin's
        if not case.engine.draft(option.draft, option.method).note:
            released.append(option)
    return _best_rows(dataclasses.replace(case, options=tuple(released)))


def _best_rows(case: Case) -> list[ServedLayout]:
    """The row of each draft, and of none, that serves most within the limits."""
    layouts = []
    for found in search(case, None):
        row = max(found.rows, key=objective)
        layouts.append(ServedLayout(case=case, option=found.option, row=row))
    return layouts


def _node(request: PlanRequest, model: ModelSpec, lengths: Lengths) -> int | None:
    """Devices of a node, over which layouts are searched where none was given."""
    is_spread = max(request.pp_size or 1, request.ep_size or 1) > 1
    if request.tp_size or request.dp_attention or is_spread:
        return None
    free = msgspec.structs.replace(request, num_gpus=None)
    case = resolve(free, model, request.hardware[0], [], lengths)[0]
    return max(case.tp_sizes)
