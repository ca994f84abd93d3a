"""What a comparison must satisfy to pass."""

from __future__ import annotations

import msgspec

from magicdec.comparison import Comparison


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upper limits, as fractions; None is not checked. Errors are absolute values.

    Step times (`*_step_error`) are normalised where the reference kernels were timed, and raw elsewhere.
    """

    median_speedup_error: float | None = None
    p90_speedup_error: float | None = None
    median_autoregressive_step_error: float | None = None
    median_draft_step_error: float | None = None
    median_verify_step_error: float | None = None
    median_step_error: float | None = None
    median_tokens_per_step_error: float | None = None
    regret: float | None = None
    """Mean over the cases of what following the plan loses."""
    coverage: tuple[float, float] | None = None
    """Least and greatest share of the points that the intervals hold."""

    def failures(self, comparison: Comparison) -> list[str]:
        """Which thresholds do not hold; one that cannot be checked does not hold."""
        if not comparison.pairs:
            return ["no configuration has both a prediction and a measurement"]
        failures = []
        for name, value in _figures(comparison).items():
            limit = getattr(self, name)
            if limit is None:
                continue
            low, high = limit if isinstance(limit, tuple) else (None, limit)
            if value is None:
                failures.append(f"{name.replace('_', ' ')} could not be computed")
            elif value > high:
                failures.append(f"{name.replace('_', ' ')} {value:.3f} exceeds {high:.3f}")
            elif low is not None and value < low:
                failures.append(f"{name.replace('_', ' ')} {value:.3f} is below {low:.3f}")
        return failures


def _figures(comparison: Comparison) -> dict[str, float | None]:
    """The statistic that each threshold limits."""
    summaries = comparison.summaries
    figures: dict[str, float | None] = {"regret": comparison.regret, "coverage": comparison.coverage}
    for term, summary in summaries.items():
        name = f"median_{term.removeprefix('expected_').removesuffix('_s')}_error"
        is_time = term.endswith("_s")
        normalised = summary.normalised_median_error if is_time else None
        figures[name] = summary.median_error if normalised is None else normalised
    if "speedup" in summaries:
        figures["p90_speedup_error"] = summaries["speedup"].p90_error
    return {name: figures.get(name) for name in Thresholds.__struct_fields__}
