"""What a shell may offer as the value of an option. The names are the catalogs' own, and nothing here loads torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from magicdec.specs.speculation import (
    DRAFT_METHODS,
    DRAFT_WEIGHT_DTYPES,
    HEAD_METHODS,
    OWN_METHOD,
    SELF,
    SPARSE_METHODS,
)

Completer = Callable[[str], list[str]]
SERVING_ENGINES = ("vllm", "sglang", "trtllm")
PROMPTS = ("stdlib", "recall", "random", "noise")
DEVICES = ("cpu", "cuda")
NOT_RUN = ("none", "suffix", *HEAD_METHODS)


def _values(names: Callable[[], Iterable[str]]) -> Completer:
    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _lists(names: Callable[[], Iterable[str]]) -> Completer:
    """The last of a comma-separated list is completed."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names() if name.startswith(last)]

    return complete


def _models() -> list[str]:
    from magicdec.specs.catalog import model_names

    return model_names()


def _hardware() -> list[str]:
    from magicdec.specs.hardware import hardware_names

    return hardware_names()


def _engines() -> list[str]:
    from magicdec.specs.engine import engine_names

    return engine_names()


def _formats() -> Iterable[str]:
    from magicdec.specs.hardware import DTYPE_BYTES

    return DTYPE_BYTES


def _dtypes() -> Iterable[str]:
    from magicdec.specs.precision import PROFILE_DTYPES

    return PROFILE_DTYPES


def _figures() -> list[str]:
    from magicdec.reports.figures import FIGURES
    from magicdec.reports.tables import TABLE_NAMES

    return ["list", *FIGURES, *TABLE_NAMES]


models = _values(_models)
hardware = _values(_hardware)
hardware_list = _lists(_hardware)
engines = _values(_engines)
serving_engines = _values(lambda: SERVING_ENGINES)
planned_drafts = _values(lambda: [SELF, "none", *OWN_METHOD, *_models()])
run_drafts = _values(lambda: [SELF, "none", "ngram", *_models()])
planned_methods = _values(lambda: [each for each in DRAFT_METHODS if each != "none"])
run_methods = _values(lambda: [each for each in DRAFT_METHODS if each not in NOT_RUN])
profiled_methods = _lists(lambda: list(SPARSE_METHODS))
formats = _values(_formats)
draft_formats = _lists(lambda: DRAFT_WEIGHT_DTYPES)
dtypes = _values(_dtypes)
devices = _values(lambda: DEVICES)
prompts = _values(lambda: PROMPTS)
figures = _values(_figures)
