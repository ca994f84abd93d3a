"""Loads of few requests: a rate is simulated some 60 times for an answer, and thousands of requests take the path of
the first hundred. Percentiles and the sizes of simulations have tests of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from magicdec.perfmodel.rate import load


def few_requests(count: int = 60) -> AbstractContextManager[object]:
    return mock.patch.multiple(load, MIN_REQUESTS=count, MAX_REQUESTS=count)
