"""Calls a function in a process of its own, which ends with the call.

vLLM is started so: it frees nothing of an engine's memory while its process lives, and its search of all modules for
kernels to replace fails in a process that has loaded numba, as our kernels for CPUs and vLLM's own n-gram drafts do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_own_process(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """The call's result, or its exception. The function is one of a module; its arguments can be pickled."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **named).result()
