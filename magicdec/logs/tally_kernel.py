"""Adds the steps of one request to counts, for every setting."""

from __future__ import annotations

import numba
import numpy as np

STEPS, DRAFTED_STEPS, DRAFTED, EMITTED = range(4)
"""Columns of what is counted by context and by place in the output."""
NUM_SUMS = 4
REQUESTS, STEPS_SQUARED, STEPS_EMITTED, EMITTED_SQUARED, OPEN_DRAFTED, OPEN_STEPS = (
    range(4, 10)
)
"""Further columns of the totals: sums over requests from which errors follow, and what no log
determines."""
NUM_TOTALS = 10
TRIED, ACCEPTED, TRIED_SQUARED, TRIED_ACCEPTED, ACCEPTED_SQUARED = range(5)
NUM_POSITION_SUMS = 5


@numba.njit(cache=True, nogil=True)
def add_request(
    steps,
    counts,
    text_len,
    prompt_len,
    context_bounds,
    output_bounds,
    totals,
    positions,
    by_context,
    context_positions,
    by_output,
):
    """Add `steps`, [settings, steps, 3], of which each setting has `counts`.

    A draft's token is tried where all before it were accepted and the log has the token that was
    emitted there; a step without a draft at a position tries it too, and does not accept it. So the
    rates by position give the tokens of every step, whether it had a draft or not."""
    end = text_len - 1
    most = positions.shape[1]
    tried = np.zeros(most, np.int64)
    accepted_at = np.zeros(most, np.int64)
    for number in range(len(counts)):
        tried[:] = 0
        accepted_at[:] = 0
        emitted_by_request = 0
        for step in range(counts[number]):
            place = steps[number, step, 0]
            drafted = steps[number, step, 1]
            accepted = steps[number, step, 2]
            emitted = min(accepted + 1, end - place)
            emitted_by_request += emitted
            context = np.searchsorted(context_bounds, place + 1)
            output = np.searchsorted(output_bounds, place + 1 - prompt_len)
            _add(totals[number], drafted, emitted)
            _add(by_context[number, context], drafted, emitted)
            _add(by_output[number, output], drafted, emitted)
            if accepted == end - place and drafted > accepted:
                totals[number, OPEN_STEPS] += 1
                totals[number, OPEN_DRAFTED] += drafted - accepted
            reach = min(accepted + 1, end - place, most)
            for position in range(reach):
                is_accepted = 1 if position < accepted else 0
                tried[position] += 1
                accepted_at[position] += is_accepted
                context_positions[number, context, position, TRIED] += 1
                context_positions[number, context, position, ACCEPTED] += is_accepted
        own_steps = counts[number]
        totals[number, REQUESTS] += 1
        totals[number, STEPS_SQUARED] += own_steps * own_steps
        totals[number, STEPS_EMITTED] += own_steps * emitted_by_request
        totals[number, EMITTED_SQUARED] += emitted_by_request * emitted_by_request
        for position in range(most):
            if tried[position] == 0:
                break
            sums = positions[number, position]
            sums[TRIED] += tried[position]
            sums[ACCEPTED] += accepted_at[position]
            sums[TRIED_SQUARED] += tried[position] * tried[position]
            sums[TRIED_ACCEPTED] += tried[position] * accepted_at[position]
            sums[ACCEPTED_SQUARED] += accepted_at[position] * accepted_at[position]


@numba.njit(cache=True, nogil=True)
def _add(sums, drafted, emitted):
    """Add a step to the first columns of a row of sums."""
    sums[STEPS] += 1
    sums[DRAFTED_STEPS] += 1 if drafted > 0 else 0
    sums[DRAFTED] += drafted
    sums[EMITTED] += emitted
