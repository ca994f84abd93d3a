"""A statement about a rate of arrivals holds for the document that it is of: every number that it
names is that of a field, and what it says in words follows from the fields."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from magicdec.reports.arrivals import (
    load_name,
    percentiles_line,
    sure_devices_line,
    traffic_line,
)
from magicdec.schema.plan import Percentiles, Traffic, TrafficLoad
from magicdec.units import format_number

TIMES = Percentiles(mean=0.1, p50=0.1, p95=0.2, p99=0.3)


@st.composite
def loads(draw: st.DrawFn, rate: float, *, drafted: bool) -> TrafficLoad:
    """A load that keeps its rate, or one that is too much for its devices."""
    is_kept = draw(st.booleans())
    highest = rate * draw(st.floats(1.05, 3.0) if is_kept else st.floats(0.1, 0.9))
    times = TIMES if is_kept else None
    replicas = draw(st.integers(1, 40))
    tp_size = draw(st.sampled_from((1, 2, 4, 8)))
    ends: dict[str, Any] = {}
    if draw(st.booleans()):
        ends["highest_rate_low_per_s"] = highest * draw(st.floats(0.5, 1.0))
        ends["highest_rate_high_per_s"] = highest * draw(st.floats(1.0, 2.0))
        fewer = draw(st.integers(0, replicas - 1))
        ends["num_gpus_low"] = tp_size * (replicas - fewer)
        if draw(st.booleans()):
            more = draw(st.integers(0, 9))
            ends["num_gpus_high"] = tp_size * (replicas + more)
    return TrafficLoad(
        draft="eagle3" if drafted else "none",
        draft_method="eagle3" if drafted else "none",
        draft_budget=None,
        gamma=3 if drafted else 0,
        policy="gamma 3" if drafted else "off",
        tp_size=tp_size,
        num_replicas=replicas,
        rate_per_s=rate,
        overloaded=not is_kept,
        within_limits=is_kept,
        ttft=times,
        tpot=times,
        request=times,
        goodput_per_s=rate,
        output_tokens_per_s=100.0,
        preemptions=0,
        mean_batch=1.0,
        mean_waiting=0.0,
        kv_share=0.1,
        analytic_rate_per_s=rate,
        highest_rate_per_s=highest,
        **ends,
    )


@st.composite
def documents(draw: st.DrawFn) -> Traffic:
    """What a plan may write: the best keeps the rate and is the smaller of those that do within the
    given devices, or is too small, and what it takes is known or not."""
    rate = draw(st.floats(0.5, 500.0))
    kept = [
        draw(loads(rate, drafted=drafted).filter(lambda load: load.within_limits))
        for drafted in (False, True)
    ]
    found = [load if draw(st.booleans()) else None for load in kept]
    able = [load for load in found if load is not None]
    best = min(able, key=lambda load: load.num_gpus, default=None)
    if best is None or draw(st.booleans()):
        small = loads(rate, drafted=draw(st.booleans()))
        best = draw(small.filter(lambda load: not load.within_limits))
    return Traffic(
        rate_per_s=rate,
        num_requests=100,
        best=best,
        autoregressive=found[0],
        speculative=found[1],
        curves=[],
        notes=[],
        has_limits=draw(st.booleans()),
        lacking=draw(st.sampled_from(([], ["no draft was asked for"]))),
    )


def named(traffic: Traffic) -> set[str]:
    """Every number that a statement may name: of the loads, and of their drafts' names."""
    numbers = {format_number(traffic.rate_per_s)}
    for load in (traffic.best, traffic.autoregressive, traffic.speculative):
        if load is not None:
            fields: tuple[Any, ...] = (
                load.num_gpus,
                load.num_gpus_low,
                load.num_gpus_high,
                load.num_replicas,
                load.tp_size,
            )
            numbers |= set(map(str, fields))
            for rate in (
                load.highest_rate_per_s,
                load.highest_rate_low_per_s,
                load.highest_rate_high_per_s,
            ):
                numbers.add(format_number(rate or 0.0))
            numbers |= set(re.findall(r"\d+", load_name(load)))
    return numbers


@given(documents())
def test_the_line_on_a_rate_names_the_fields_of_its_document(traffic: Traffic) -> None:
    line = traffic_line(traffic)
    said = {number.rstrip(".") for number in re.findall(r"\d[\d.]*", line)}
    assert said <= named(traffic), line
    assert line.startswith("Serve ") == traffic.best.within_limits
    others = (traffic.autoregressive, traffic.speculative)
    if "without a draft no number" in line:
        assert traffic.autoregressive is None
    if "no draft keeps" in line or "no draft was asked" in line:
        assert traffic.speculative is None
    if "no number of devices was found" in line:
        assert others == (None, None)
    if "limit" in line:
        assert traffic.has_limits
    if not traffic.best.within_limits:
        for load in others:  # what all of it takes is said of each that is known
            if load is not None:
                assert re.search(
                    rf"\b{load.num_gpus}( \([\d–]*\))? with {re.escape(load_name(load))}",
                    line,
                ), line
        best = traffic.best
        assert ("perhaps all" in line) == (
            (best.highest_rate_high_per_s or 0.0) >= traffic.rate_per_s
        )
    if "it takes" in line and traffic.best.within_limits:
        other = others[0] if traffic.best.is_speculative else others[1]
        assert other is not None
        assert other.num_gpus >= traffic.best.num_gpus


@given(documents())
def test_what_keeps_a_rate_for_sure_is_said_of_what_keeps_it(traffic: Traffic) -> None:
    line = sure_devices_line(traffic)
    best = traffic.best
    is_known = best.within_limits and best.highest_rate_low_per_s is not None
    assert bool(line) == is_known
    if "over 95 %" in line:
        assert (best.highest_rate_low_per_s or 0.0) >= traffic.rate_per_s
    if "it takes" in line and traffic.best.within_limits:
        assert f" {best.num_gpus_high} devices" in line


@given(documents())
def test_headroom_is_said_only_of_devices_that_keep_the_rate(traffic: Traffic) -> None:
    line = percentiles_line(traffic.best)
    assert ("headroom" in line) == traffic.best.within_limits
