"""One gamma at every batch against the table of gammas by batch.

A server of so many sequences often runs fewer, where another gamma is best. The table's gammas gain
there, and the engine takes its price for following them at every step, full batch or not
(`gamma_table_cost`). Which batches a server sees is not known without a rate of arrivals: those of
the table, about evenly spaced in logarithm, count alike.
"""

from __future__ import annotations

import numpy as np

from magicdec.schema import Candidate, GammaTable, OneGamma
from magicdec.specs import EngineProfile


def one_gamma(
    engine: EngineProfile, table: GammaTable, row: Candidate
) -> OneGamma | None:
    """The row's gamma against its table, up to its batch. None: no draft, or one gamma is best at
    all of these batches.
    """
    if table.speedup_set_up is None or table.speedup_of_one_gamma is None:
        return None
    column = table.context_lens.index(row.context_len)
    ratios = []
    gammas = set()
    for place, batch in enumerate(table.batch_sizes):
        constant = table.speedup_of_one_gamma[place][column]
        if batch > row.batch_size or constant <= 0.0:
            continue
        ratios.append(table.speedup_set_up[place][column] / constant)
        gammas.add(table.gamma_of_steps[place][column])
    if len(gammas) < 2:
        return None
    cost, low, high = engine.table_costs(row.draft)
    return OneGamma(
        gamma=row.gamma,
        most=row.batch_size,
        by_batch=float(np.exp(np.log(ratios).mean())),
        cost=cost,
        cost_low=low,
        cost_high=high,
    )
