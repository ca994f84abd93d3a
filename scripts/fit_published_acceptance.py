"""Fits the acceptance profiles of heads and look-ups that ship, from published tokens per step.

    python scripts/fit_published_acceptance.py

Reads magicdec/specs/data/acceptance/published.csv: one published figure per row, as precise as it was stated, with its
source. `gamma` empty: not stated; a fit then takes UNSTATED_GAMMA, which hardly matters where few drafts are accepted.
`temperature` empty: not stated; the figure then counts at every temperature that others of the draft have.
Writes one profile per target, method and temperature beside it.

    tokens(γ) = 1 + Σ_i Π_{j≤i} rate_j      rates by the law of perfmodel/acceptance/law.py

Fitted: one rejection per dataset, and one drift for the draft. The profile has the datasets' geometric mean, and their
standard deviation, at least LEAST_ERROR, as its error: which text is served is not known. A draft with a single gamma
takes the drift of DRIFT_DONORS, one without lengths at long contexts the context exponent of CONTEXT_DONORS.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq, least_squares, minimize

from magicdec.perfmodel.acceptance import (
    PROFILES_DIRECTORY,
    AcceptanceProfile,
    Law,
    LawError,
    expected_tokens_per_step,
    save_profile,
)
from magicdec.specs.speculation import HEAD_METHODS, LOOKUP_METHODS

TABLE = PROFILES_DIRECTORY / "published.csv"
SHORT = 2048.0
"""Tokens up to which a head's acceptance is taken as that of the short benchmarks."""
UNSTATED_GAMMA = 3
LEAST_ERROR = 0.15
"""Of log(1 - alpha): two harnesses on one dataset differ by this much."""
CONTEXT_ERROR = 0.3
"""Of the context exponent: half the difference between the two heads that have one."""
MTP_CONTEXT_ERROR = 0.15
"""Half a head's: these are trained with the model, at its lengths, but nobody published their acceptance by context."""
DEPTH_ERROR = 0.1
UNKNOWN_DEPTH_ERROR = 0.5
"""Where one position is all that was published."""
DRIFT_DONORS = {"eagle3": ("llama-3.1-8b", "eagle3", 0.0)}
CONTEXT_DONORS = {"eagle3": "qwen3-8b", "eagle": "llama-3.1-8b", "dspark": "qwen3-8b"}
APPLIES_TO = {
    ("llama-3.1-8b", "eagle3"): ["llama-3-8b"],
    ("llama-3.1-8b", "eagle"): ["llama-3-8b"],
    ("llama-3.3-70b", "eagle3"): ["llama-3.1-70b", "llama-3-70b", "llama-3.1-405b"],
    ("apertus-8b", "eagle3"): ["apertus-70b"],
    ("qwen3-8b", "eagle3"): ["qwen3-4b", "qwen3-14b", "qwen3-32b"],
    ("qwen3-235b-a22b", "eagle3"): ["qwen3-coder-480b-a35b"],
    ("kimi-k2.5", "eagle3"): ["kimi-k2"],
    ("llama-4-maverick", "eagle3"): ["llama-4-scout"],
    ("deepseek-v3", "mtp"): ["deepseek-r1", "deepseek-v3.1", "deepseek-v3.2"],
    ("glm-5.2", "mtp"): ["glm-5"],
    ("qwen3.5-397b-a17b", "mtp"): ["qwen3.5-122b-a10b", "qwen3.5-35b-a3b", "qwen3.5-27b"],
}
"""Targets of the same family that a head of the same kind is taken to do for, with a wider error."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published number."""

    model: str
    draft_method: str
    checkpoint: str
    dataset: str
    temperature: float | None
    context: float | None
    gamma: int | None
    tokens_per_step: float
    source: str

    @property
    def is_long(self) -> bool:
        return self.context is not None and self.context >= SHORT


def read_table() -> list[Figure]:
    def number(text: str) -> Any:
        return float(text) if text else None

    with TABLE.open(encoding="utf-8", newline="") as file:
        return [
            Figure(
                model=row["model"],
                draft_method=row["draft_method"],
                checkpoint=row["checkpoint"],
                dataset=row["dataset"],
                temperature=number(row["temperature"]),
                context=number(row["context"]),
                gamma=int(row["gamma"]) if row["gamma"] else None,
                tokens_per_step=float(row["tokens_per_step"]),
                source=row["source"],
            )
            for row in csv.DictReader(file)
        ]


def tokens(rejection: float, drift: float, gamma: int) -> float:
    rates = Law(rejection=rejection, drift=drift).conditional_rates(budget=None, context=SHORT, gamma_max=gamma)
    return float(expected_tokens_per_step(rates, gamma))


def rejection_of(length: float, drift: float, gamma: int) -> float:
    """The 1 - alpha at which so many tokens per step come out."""
    return float(brentq(lambda value: tokens(value, drift, gamma) - length, 1e-9, 1.0 - 1e-9))


def fit_datasets(figures: list[Figure], drift: float | None) -> tuple[dict[str, float], float]:
    """The rejection of each dataset, and the drift (given, or fitted with them)."""
    by_dataset: dict[str, list[Figure]] = defaultdict(list)
    for figure in figures:
        by_dataset[figure.dataset].append(figure)
    if drift is not None:
        return {
            name: float(
                np.exp(
                    np.mean(
                        [
                            np.log(rejection_of(each.tokens_per_step, drift, each.gamma or UNSTATED_GAMMA))
                            for each in rows
                        ]
                    )
                )
            )
            for name, rows in by_dataset.items()
        }, drift
    names = list(by_dataset)

    def misses(values: Any) -> Any:
        drift = float(np.exp(values[-1]))
        return [
            tokens(float(np.exp(value)), drift, each.gamma or UNSTATED_GAMMA) - each.tokens_per_step
            for name, value in zip(names, values[:-1], strict=True)
            for each in by_dataset[name]
        ]

    start = [np.log(0.25)] * len(names) + [0.0]
    fit = least_squares(misses, start, bounds=([-8.0] * len(start), [-1e-6] * len(names) + [2.0]))
    return {name: float(np.exp(value)) for name, value in zip(names, fit.x[:-1], strict=True)}, float(np.exp(fit.x[-1]))


def law_by_position(rows: list[Figure]) -> Law:
    """Of lengths at every gamma from 1 on: whether a look-up finds anything is in position 1, so no law is fitted."""
    lengths = [1.0, *(each.tokens_per_step for each in sorted(rows, key=lambda each: each.gamma or 0))]
    survival = np.concatenate([[1.0], np.diff(lengths)])
    rates = [round(float(each), 3) for each in survival[1:] / survival[:-1]]
    return Law(rejection=1.0 - rates[0], by_position=rates)


def context_exponent(long: list[Figure], rejection: float | None, drift: float) -> tuple[float, float]:
    """The exponent, and the rejection at SHORT that goes with it (`rejection`, where that is given)."""
    contexts = np.array([each.context for each in long])
    lengths = np.array([each.tokens_per_step for each in long])
    gamma = long[0].gamma or UNSTATED_GAMMA

    def missed(values: Any) -> float:
        level = float(np.exp(values[1])) if rejection is None else rejection
        law = Law(
            rejection=level, drift=drift, context_exponent=float(values[0]), reference_context=SHORT, flat_below=SHORT
        )
        rates = law.conditional_rates(budget=None, context=contexts, gamma_max=gamma)
        return float(np.sum((expected_tokens_per_step(rates, gamma) - lengths) ** 2))

    fit = minimize(missed, [0.5, np.log(0.3)], method="Nelder-Mead")
    return float(fit.x[0]), float(np.exp(fit.x[1])) if rejection is None else rejection


def main() -> None:
    groups: dict[tuple[str, str, float | None], list[Figure]] = defaultdict(list)
    long: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in read_table():
        if figure.is_long and figure.draft_method not in LOOKUP_METHODS:
            long[figure.model, figure.draft_method].append(figure)
        else:
            groups[figure.model, figure.draft_method, figure.temperature].append(figure)
    for key in [each for each in groups if each[2] is None]:
        stated = [each for each in groups if each[:2] == key[:2] and each[2] is not None]
        for other in stated:
            groups[other] = groups[key] + groups[other]
        if stated:
            del groups[key]
    several = {
        key: len({each.gamma for each in rows}) > 1 and key[1] not in LOOKUP_METHODS for key, rows in groups.items()
    }
    drifts = {key: fit_datasets(rows, None)[1] for key, rows in groups.items() if several[key]}
    exponents: dict[tuple[str, str], float] = {}
    levels: dict[tuple[str, str], float] = {}
    for (model, method), rows in long.items():
        alike = [each for each in groups if each[:2] == (model, method)]
        key = next((each for each in alike if each in drifts), alike[0])
        drift = drifts[key if key in drifts else DRIFT_DONORS[method]]
        own = fit_datasets(groups[key], drift)[0]
        level = float(np.exp(np.mean(np.log(list(own.values()))))) if len(rows) == 1 else None
        exponents[model, method], level = context_exponent(rows, level, drift)
        if len(rows) > 1:
            levels[model, method] = level
    for key, rows in groups.items():
        write(key, rows, long.get(key[:2], []), drifts, exponents, levels.get(key[:2]))


def write(
    key: tuple[str, str, float | None],
    rows: list[Figure],
    long: list[Figure],
    drifts: dict[tuple[str, str, float | None], float],
    exponents: dict[tuple[str, str], float],
    long_level: float | None,
) -> None:
    """The profile of one target, method and temperature."""
    model, method, temperature = key
    donor = DRIFT_DONORS.get(method)
    levels, drift = fit_datasets(rows, drifts[key] if key in drifts else drifts[donor] if donor else 0.0)
    logs = np.log([*levels.values(), *([long_level] if long_level is not None else [])])
    spread = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0
    if len(levels) == 1 and len({each.tokens_per_step for each in rows if each.gamma == rows[0].gamma}) > 1:
        spread = (
            float(np.ptp([np.log(rejection_of(each.tokens_per_step, drift, each.gamma or 1)) for each in rows])) / 2
        )
    is_head = method in HEAD_METHODS and method != "mtp"
    is_short = method not in LOOKUP_METHODS
    own = (model, method) in exponents
    exponent = exponents.get((model, method), exponents.get((CONTEXT_DONORS.get(method, ""), "eagle3"), 0.0))
    gamma = max(each.gamma or UNSTATED_GAMMA for each in rows)
    notes = [f"tokens per step at gamma {', '.join(sorted({str(each.gamma) for each in rows}))}"]
    if key not in drifts and donor:
        notes.append(f"fall by position as on {donor[0]} (EAGLE-3)")
    if is_short and not is_head:
        notes.append("short benchmarks; beyond them taken as constant, with a wider interval")
    if is_head:
        notes.append(
            f"short benchmarks; beyond {SHORT:.0f} tokens "
            + ("as measured" if own else f"as measured with the EAGLE-3 head of {CONTEXT_DONORS[method]}")
        )
    name = "-".join([model, method, *([f"t{temperature:g}"] if temperature is not None else [])])
    profile = AcceptanceProfile(
        name=name,
        model=model,
        draft=method,
        draft_method=method,
        checkpoint=rows[0].checkpoint,
        applies_to=APPLIES_TO.get((model, method), []),
        only_if_asked=method in LOOKUP_METHODS,
        dataset=", ".join([*levels, *sorted({each.dataset for each in long} - {*levels})]),
        temperature=temperature,
        definition="; ".join(notes),
        source=", ".join(dict.fromkeys(each.source for each in [*rows, *long])),
        law=law_by_position(rows)
        if method in LOOKUP_METHODS
        else Law(
            rejection=round(float(np.exp(np.mean(logs))), 4),
            drift=round(drift, 4),
            context_exponent=round(exponent, 3) if is_head else 0.0,
            reference_context=SHORT,
            flat_below=SHORT if is_short else 0.0,
        ),
        error=LawError(
            log_rejection=round(max(spread, LEAST_ERROR), 3),
            context_exponent=CONTEXT_ERROR if is_head else MTP_CONTEXT_ERROR if is_short else 0.0,
            depth=UNKNOWN_DEPTH_ERROR if gamma == 1 else DEPTH_ERROR,
        ),
        measured_contexts=sorted({1.0, SHORT, *(each.context for each in long if each.context)}) if is_short else [],
        measured_gamma=gamma,
    )
    save_profile(profile, PROFILES_DIRECTORY / f"{name}.json")
    print(
        f"{name:28} rejection {profile.law.rejection:.3f} drift {drift:.2f} context^{profile.law.context_exponent:.2f}"
    )


if __name__ == "__main__":
    main()
