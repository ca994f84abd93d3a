"""Fits the acceptance profiles of heads and look-ups that ship, from published tokens per step.

    python -m evidence.fits.published_acceptance

Reads magicdec/specs/data/acceptance/published.csv: one published figure per row, as precise as it was stated, with its
source. `gamma` empty: not stated; a fit then takes UNSTATED_GAMMA, which hardly matters where few drafts are accepted.
`temperature` empty: not stated; the figure then counts at every temperature that others of the draft have.
Writes one profile per target, method and temperature beside it.

    tokens(γ) = 1 + Σ_i Π_{j≤i} rate_j      rates by the law of perfmodel/acceptance/law.py

Fitted: one rejection per dataset, and one drift for the draft. The profile has the datasets' geometric mean, and their
standard deviation, at least LEAST_ERROR, as its error: which text is served is not known. A draft with a single gamma
takes the drift of DRIFT_DONORS, one without lengths at long contexts the context exponent of CONTEXT_DONORS. A draft
that attends over a window sees no more of a long context than of a short one, so it stays beyond what was measured of
it: published tokens per step of two such heads stay within 8 %, 1.52 to 1.63 from 2k to 20k
(https://github.com/vllm-project/speculators/pull/684) and 1.92 to 2.08 from 4k to 170k
(https://github.com/MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks/issues/73).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq, least_squares

from magicdec.counts import expected_tokens_per_step
from magicdec.perfmodel.acceptance import (
    PROFILES_DIRECTORY,
    MeasuredProfile,
    save_profile,
)
from magicdec.perfmodel.acceptance.law import LARGEST, Law, LawError
from magicdec.specs.speculation import LOOKUP_METHODS, SELF

TABLE = PROFILES_DIRECTORY / "published.csv"
SHORT = 2048.0
"""Tokens up to which a head's acceptance is taken as that of the short benchmarks."""
UNSTATED_GAMMA = 3
LEAST_ERROR = 0.15
"""Standard deviation of log(1 - alpha): two harnesses on one dataset differ by this much."""
CONTEXT_ERROR = 0.4
"""Standard deviation of the context exponent, from the four EAGLE-3 heads' that have one (0.2 to 1.1), as far apart as
two reports of one head are (1.14 tokens per step at 7k, 1.28 over 4k to 64k). That of multi-token prediction is from
one prompt; a server's first rejections grew as much, 6.5 to 27.9 % (vllm 47602)."""
DEPTH_ERROR = 0.1
UNKNOWN_DEPTH_ERROR = 0.5
"""Where one position is all that was published."""
WINDOWED = ("dspark",)
"""Heads that attend over a window, as published ones do."""
WINDOWED_CONTEXT_ERROR = 0.15
"""Standard deviation of such a head's context exponent, which is 0: long texts differ."""
COPY_DTYPE = "int4"
"""The only format in which acceptance of a narrower copy of the target is published."""
DRIFT_DONORS = {
    "eagle3": ("llama-3.1-8b", "eagle3", 0.0),
    "mtp": ("qwen3.5-397b-a17b", "mtp", 0.6),
}
CONTEXT_DONORS = {
    "eagle3": ("qwen3-8b", "eagle3"),
    "eagle": ("llama-3.1-8b", "eagle3"),
    "mtp": ("qwen3.8-27b", "mtp"),
}
APPLIES_TO = {
    ("llama-3.1-8b", "eagle3"): ["llama-3-8b"],
    ("llama-3.1-8b", "eagle"): ["llama-3-8b"],
    ("llama-3.3-70b", "eagle3"): ["llama-3.1-70b", "llama-3-70b", "llama-3.1-405b"],
    ("apertus-8b", "eagle3"): ["apertus-70b"],
    ("qwen3-8b", "eagle3"): ["qwen3-4b", "qwen3-14b", "qwen3-32b"],
    ("qwen3-235b-a22b", "eagle3"): ["qwen3-coder-480b-a35b"],
    ("kimi-k2.5", "eagle3"): ["kimi-k2"],
    ("llama-4-maverick", "eagle3"): ["llama-4-scout"],
    ("qwen2.5-7b", "full"): [
        "qwen2.5-14b",
        "qwen2.5-32b",
        "qwen2.5-72b",
        "qwen3-4b",
        "qwen3-8b",
        "qwen3-14b",
        "qwen3-32b",
    ],
    ("mistral-7b-v0.3", "full"): [
        "mistral-7b-v0.1",
        "llama-2-7b",
        "llama-2-7b-32k",
        "llama-2-13b",
        "llama-2-70b",
        "llama-3-8b",
        "llama-3-70b",
        "llama-3.1-8b",
        "llama-3.1-70b",
        "llama-3.1-405b",
        "llama-3.3-70b",
    ],
    ("deepseek-v3", "mtp"): ["deepseek-r1", "deepseek-v3.1", "deepseek-v3.2"],
    ("glm-5.2", "mtp"): ["glm-5"],
    ("qwen3.5-397b-a17b", "mtp"): [
        "qwen3.5-122b-a10b",
        "qwen3.5-35b-a3b",
        "qwen3.5-27b",
    ],
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
    rates = Law(rejection=rejection, drift=drift).conditional_rates(
        budget=None, context=SHORT, gamma_max=gamma
    )
    return float(expected_tokens_per_step(rates, gamma))


def rejection_of(length: float, drift: float, gamma: int) -> float:
    """The 1 - alpha at which so many tokens per step come out."""
    return float(
        brentq(lambda value: tokens(value, drift, gamma) - length, 1e-9, 1.0 - 1e-9)
    )


def fit_datasets(
    figures: list[Figure], drift: float | None
) -> tuple[dict[str, float], float]:
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
                            np.log(
                                rejection_of(
                                    each.tokens_per_step,
                                    drift,
                                    each.gamma or UNSTATED_GAMMA,
                                )
                            )
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
            tokens(float(np.exp(value)), drift, each.gamma or UNSTATED_GAMMA)
            - each.tokens_per_step
            for name, value in zip(names, values[:-1], strict=True)
            for each in by_dataset[name]
        ]

    start = [np.log(0.25)] * len(names) + [0.0]
    fit = least_squares(
        misses, start, bounds=([-8.0] * len(start), [-1e-6] * len(names) + [2.0])
    )
    return {
        name: float(np.exp(value))
        for name, value in zip(names, fit.x[:-1], strict=True)
    }, float(np.exp(fit.x[-1]))


def law_by_position(rows: list[Figure]) -> Law:
    """A law that repeats the lengths at every gamma from 1 on. Nothing is fitted: whether a look-up finds anything
    is in position 1."""
    lengths = [
        1.0,
        *(
            each.tokens_per_step
            for each in sorted(rows, key=lambda each: each.gamma or 0)
        ),
    ]
    survival = np.concatenate([[1.0], np.diff(lengths)])
    rates = [round(float(each), 3) for each in survival[1:] / survival[:-1]]
    return Law(rejection=1.0 - rates[0], by_position=rates)


def context_exponent(long: list[Figure], level: float, drift: float) -> float:
    """The exponent with which figures beyond SHORT follow from the short benchmarks' rejection, `level`."""

    def missed(exponent: float) -> float:
        law = Law(
            rejection=level,
            drift=drift,
            context_exponent=exponent,
            reference_context=SHORT,
            flat_below=SHORT,
        )
        total = 0.0
        for each in long:
            gamma = each.gamma or UNSTATED_GAMMA
            rates = law.conditional_rates(
                budget=None, context=each.context, gamma_max=gamma
            )
            total += (
                float(expected_tokens_per_step(rates, gamma)) - each.tokens_per_step
            ) ** 2
        return total

    exponents = np.linspace(0.0, 2.0, 2001)
    return float(exponents[np.argmin([missed(each) for each in exponents])])


def main() -> None:
    groups: dict[tuple[str, str, float | None], list[Figure]] = defaultdict(list)
    long: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in read_table():
        if figure.is_long and figure.draft_method not in LOOKUP_METHODS:
            long[figure.model, figure.draft_method].append(figure)
        else:
            groups[figure.model, figure.draft_method, figure.temperature].append(figure)
    for key in [each for each in groups if each[2] is None]:
        stated = [
            each for each in groups if each[:2] == key[:2] and each[2] is not None
        ]
        for other in stated:
            groups[other] = groups[key] + groups[other]
        if stated:
            del groups[key]
    several = {
        key: len({each.gamma for each in rows}) > 1 and key[1] not in LOOKUP_METHODS
        for key, rows in groups.items()
    }
    drifts = {
        key: fit_datasets(rows, None)[1] for key, rows in groups.items() if several[key]
    }
    exponents: dict[tuple[str, str], float] = {}
    for (model, method), rows in long.items():
        alike = [each for each in groups if each[:2] == (model, method)]
        key = next((each for each in alike if each in drifts), alike[0])
        drift = drifts[key if key in drifts else DRIFT_DONORS[method]]
        own = fit_datasets(groups[key], drift)[0]
        level = float(np.exp(np.mean(np.log(list(own.values())))))
        exponents[model, method] = context_exponent(rows, level, drift)
    for key, rows in groups.items():
        write(key, rows, long.get(key[:2], []), drifts, exponents)


def write(
    key: tuple[str, str, float | None],
    rows: list[Figure],
    long: list[Figure],
    drifts: dict[tuple[str, str, float | None], float],
    exponents: dict[tuple[str, str], float],
) -> None:
    """The profile of one target, method and temperature."""
    model, method, temperature = key
    donor = DRIFT_DONORS.get(method)
    levels, drift = fit_datasets(
        rows, drifts[key] if key in drifts else drifts[donor] if donor else 0.0
    )
    logs = np.log(list(levels.values()))
    spread = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0
    if (
        len(levels) == 1
        and len({each.tokens_per_step for each in rows if each.gamma == rows[0].gamma})
        > 1
    ):
        spread = (
            float(
                np.ptp(
                    [
                        np.log(
                            rejection_of(each.tokens_per_step, drift, each.gamma or 1)
                        )
                        for each in rows
                    ]
                )
            )
            / 2
        )
    is_copy = method == "full"
    is_head = method not in LOOKUP_METHODS and not is_copy
    is_whole = is_head and method not in WINDOWED
    exponent = exponents.get(
        (model, method), exponents[CONTEXT_DONORS[method]] if is_whole else 0.0
    )
    gamma = max(each.gamma or UNSTATED_GAMMA for each in rows)
    notes = [
        f"tokens per step at gamma {', '.join(sorted({str(each.gamma) for each in rows}))}"
    ]
    if key not in drifts and donor:
        notes.append(f"fall by position as on {donor[0]} ({donor[1]})")
    if is_whole:
        whose = (
            "as measured"
            if (model, method) in exponents
            else "as measured with the {1} head of {0}".format(*CONTEXT_DONORS[method])
        )
        notes.append(f"short benchmarks; beyond {SHORT:.0f} tokens {whose}")
    elif is_copy:
        notes.append(
            f"the target's own weights in {COPY_DTYPE}; over 0.9 at contexts of 4k to 128k (arXiv 2502.10424)"
        )
    elif is_head:
        notes.append(
            "over a window of its own, so taken as constant beyond the contexts measured"
        )
    error_of_context = (
        CONTEXT_ERROR if is_whole else WINDOWED_CONTEXT_ERROR if is_head else 0.0
    )
    name = "-".join(
        [
            model,
            method,
            *([COPY_DTYPE] if is_copy else []),
            *([f"t{temperature:g}"] if temperature is not None else []),
        ]
    )
    profile = MeasuredProfile(
        name=name,
        model=model,
        draft=SELF if is_copy else method,
        draft_method=method,
        draft_weight_dtype=COPY_DTYPE if is_copy else "",
        checkpoint=rows[0].checkpoint,
        applies_to=APPLIES_TO.get((model, method), []),
        dataset=", ".join(
            [*levels, *sorted({each.dataset for each in long} - {*levels})]
        ),
        temperature=temperature,
        definition="; ".join(notes),
        source=", ".join(dict.fromkeys(each.source for each in [*rows, *long])),
        law=law_by_position(rows)
        if method in LOOKUP_METHODS
        else Law(
            rejection=round(float(np.exp(np.mean(logs))), 4),
            drift=round(drift, 4),
            context_exponent=round(exponent, 3),
            reference_context=SHORT,
            flat_below=SHORT if is_head else 0.0,
            flat_beyond=max(each.context or SHORT for each in long)
            if long and method in WINDOWED
            else LARGEST,
        ),
        error=LawError(
            log_rejection=round(max(spread, LEAST_ERROR), 3),
            context_exponent=error_of_context,
            depth=UNKNOWN_DEPTH_ERROR if gamma == 1 else DEPTH_ERROR,
        ),
        measured_contexts=sorted(
            {1.0, SHORT, *(each.context for each in long if each.context)}
        )
        if is_head
        else [],
        measured_gamma=gamma,
    )
    save_profile(profile, PROFILES_DIRECTORY / f"{name}.json")
    print(
        f"{name:28} rejection {profile.law.rejection:.3f} drift {drift:.2f} context^{profile.law.context_exponent:.2f}"
    )


if __name__ == "__main__":
    main()
