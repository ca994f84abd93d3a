"""Scale constants and human formatting. No other module writes a factor like 1e9 or 2**30."""

from __future__ import annotations

from typing import Any

MICRO = 1e-6
MILLI = 1e-3
MEGA = 1e6
GIGA = 1e9
TERA = 1e12
KIB = 2**10
MIB = 2**20
GIB = 2**30
PERCENT = 100.0
SECONDS_PER_HOUR = 3600.0
INTERVAL_SHARE = 0.9
"""Share of the values that every stated interval holds."""
INTERVAL_ENDS = (0.05, 0.95)
"""Quantiles between which an interval holds that share."""
INTERVAL = f"{PERCENT * INTERVAL_SHARE:.0f} % interval"


def printable(text: str) -> str:
    """Text from elsewhere without what would act on a terminal or cannot be written: control
    characters, lone halves of characters."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


def format_bytes(num_bytes: float) -> str:
    """Binary units, three significant figures: 1.5 GiB, 1010 MiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < KIB:
            if unit == "B":
                return f"{value:.0f} {unit}"
            return f"{format_number(value)} {unit}"
        value /= KIB
    return f"{format_number(value)} TiB"


def format_seconds(seconds: float) -> str:
    """A duration with three significant figures: 12.3 ms, 4.56 s, 3 min 20 s."""
    size = abs(seconds)
    if size >= 120:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    if size >= 1:
        return f"{seconds:.3g} s"
    if size >= MILLI:
        return f"{seconds / MILLI:.3g} ms"
    return f"{seconds / MICRO:.3g} us"


def format_rate(per_second: float, unit: str) -> str:
    """A rate with a decimal prefix: 1.69 TB/s, 312 TFLOP/s, 507 tokens/s."""
    for scale, prefix in ((TERA, "T"), (GIGA, "G"), (MEGA, "M")):
        if abs(per_second) >= scale:
            return f"{per_second / scale:.3g} {prefix}{unit}/s"
    return f"{per_second:.0f} {unit}/s"


def format_number(value: float) -> str:
    """A number with three significant figures, and no exponent: 0.123, 12.3, 1250."""
    if abs(value) < 999.5:
        return f"{value:.3g}"
    return f"{value:.0f}"


def format_percent(share: float, *, signed: bool = False) -> str:
    """A share in a sentence: 12 %; with its sign, +12 %."""
    sign = "+" if signed else ""
    return f"{PERCENT * share:{sign}.0f} %"


def format_interval(low: float, high: float, *, to: str = "–") -> str:
    """An interval of ratios in a sentence: 90 % interval 0.92–1.71."""
    return f"{INTERVAL} {low:.2f}{to}{high:.2f}"


def format_tokens(tokens: float) -> str:
    """A number of tokens as options take it: 512, 13.8k."""
    if tokens >= KIB:
        return f"{format_number(tokens / KIB)}k"
    return f"{tokens:.0f}"


def parse_share(text: str) -> float | None:
    """ "7%" -> 0.07; None for what is no share above 0 and up to 1."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / PERCENT
    except ValueError:
        return None
    if text.strip() == number or not 0.0 < share <= 1.0:
        return None
    return share


LARGEST_NUMBER = 1e18
"""Size beyond which nothing is measured here."""
LARGEST_COUNT = 10**15
"""More of anything than is counted here."""
MOST_BITS = 64
"""Bits of a whole number in a document: clocks in nanoseconds and hashes fill them."""


def whole_number(text: str) -> int:
    """A whole number as it is written. Raises ValueError, also for one beyond `LARGEST_COUNT`."""
    digits = text.strip()
    if len(digits) > 2 * len(str(LARGEST_COUNT)) or abs(int(digits)) > LARGEST_COUNT:
        raise ValueError(f"a whole number of at most {LARGEST_COUNT:.0e} is expected")
    return int(digits)


def read_number(value: Any, *, most: float = LARGEST_NUMBER) -> float:
    """A number of a document or a log. Raises ValueError where it is not finite or is beyond `most`,
    TypeError where it is none."""
    read = float(value)
    if not abs(read) <= most:
        raise ValueError(f"a number of {read:g}, beyond {most:g}")
    return read


COUNT_SUFFIXES = {"k": KIB, "m": MIB}


def parse_count(text: str) -> int:
    """ "32k" -> 32768; k is 1024, m its square. Raises ValueError."""
    text = text.strip().lower()
    scale = COUNT_SUFFIXES.get(text[-1:])
    if scale is None:
        return whole_number(text)
    return whole_number(text[:-1]) * scale


def format_count(number: int, noun: str) -> str:
    """A number with its noun: "1 user", "8 users"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"
