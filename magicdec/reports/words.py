"""Words for a draft, its gain, and who is served on which devices, which all sentences share."""

from __future__ import annotations

from magicdec.naming import device_name, draft_name
from magicdec.schema.row import Candidate, Gain
from magicdec.units import format_count, format_interval, format_percent

MOST_SURE = 0.99


def drafting_of(row: Candidate) -> str:
    """The draft and gamma: "EAGLE-3, gamma 3"."""
    name = draft_name(row.draft, row.draft_method, row.draft_budget)
    return f"{name}, gamma {row.gamma}"


def gain_of(row: Candidate) -> str:
    """The gain with its interval and probability: "1.35x faster (90 % interval 0.92–1.71); 87 % likely
    to pay"."""
    gain = row.gain
    direction = "as fast"
    if gain.speedup >= 1.0:
        direction = "faster"
    interval = format_interval(gain.low, gain.high)
    likely = f"{probability_of(row)} likely to pay"
    return f"{gain.speedup:.2f}x {direction} ({interval}); {likely}"


def with_ends(gain: Gain) -> str:
    """A speedup and its 90 % interval: "1.35x (0.92–1.71)"."""
    return f"{gain.speedup:.2f}x ({gain.low:.2f}–{gain.high:.2f})"


def probability_of(row: Candidate) -> str:
    """The probability that a draft pays, never as certain."""
    probability = row.gain.probability
    if probability > MOST_SURE:
        return f"over {format_percent(MOST_SURE)}"
    if probability < 1.0 - MOST_SURE:
        return f"under {format_percent(1.0 - MOST_SURE)}"
    return format_percent(probability)


def users_of(row: Candidate) -> str:
    """Users that are served at once, of all replicas."""
    return format_count(row.batch_size * row.num_replicas, "user")


def devices_of(row: Candidate) -> str:
    """The devices of all replicas: "8 x H200 SXM 141 GB (4 replicas)"."""
    count = row.num_gpus * row.num_replicas
    name = device_name(row.hardware).replace("\u00a0", " ")
    devices = f"{count} x {name}"
    if row.num_replicas > 1:
        return f"{devices} ({row.num_replicas} replicas)"
    return devices


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    if not text:
        return ""
    return f"{text[0].upper()}{text[1:]}."
