"""Published acceptance as rows: read from a table, brought to one definition, with names made one.

    tokens per step = tokens that one verification gives, the target's own included, over all steps

Sources count differently. Rows whose source leaves the target's own token out get it back. Rows of
look-ups that count only the steps that had a draft say so (`counts_drafted`), unless the source
prints the figure over all steps too. Where only an accepted share of the drafted tokens is printed,
tokens per step are 1 + gamma * share.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from magicdec.counts import Array
from magicdec.errors import ConfigError
from magicdec.naming import METHODS

GROUPS: dict[str, tuple[str, ...]] = {
    "eagle3": (),
    "head": ("eagle1", "eagle2", "hass", "medusa", "hydra", "lstm"),
    "mtp": (),
    "block": ("dflash2", "dfly", "pard"),
    "model": ("draft-model",),
    "lookup": ("prompt-lookup", "lookahead", "rest", "recycling"),
    "self": ("self-sparse", "self-quantised", "layer-skip", "longspec"),
    "mixed": ("hybrid", "other-sam+eagle2"),
}
"""Kinds of draft whose acceptance is alike, besides the methods that plans have (`naming.METHODS`)."""
GROUP_OF = {
    **{name: method.group for name, method in METHODS.items() if name != "none"},
    **{kind: group for group, kinds in GROUPS.items() for kind in kinds},
}
KIND_OF = {"eagle1": "eagle", "draft-model": "full"}
"""Kinds by the names that the rest of the program uses."""
ASSUMED_GAMMA = {
    "eagle3": 3, "head": 5, "mtp": 3, "block": 7, "model": 8, "lookup": 10, "self": 4, "mixed": 8
}  # fmt: skip
"""Gamma of a chain whose source does not say it."""
ASSUMED_TREE_DEPTH = {"eagle3": 7}
LEAST_SEEN = 0.02
"""Nearest to 0 and 1 that a published rate of a position is read."""
OTHER_CLASS = "other"
SAME_TASK = {
    "cnn": "cnndm", "summarization": "cnndm", "specbenchsummarization": "cnndm",
    "longbenchgovreport": "govreport", "codeeditblazedit": "blazedit",
}  # fmt: skip
CODE_EDITS = ("blazedit", "edit5kchar", "canitedit", "instructcoder")
"""Tasks that change a given file; tables class them as code."""
MAKERS = (
    ("specforge", "specforge"), ("spec for ge", "specforge"), ("angelslim", "angelslim"),
    ("angelspec", "angelspec"), ("redhatai", "redhat"), ("nm-testing", "redhat"),
    ("yuhuili", "eagle-authors"), ("deepseek-ai", "deepseek"), ("z-lab", "z-lab"),
    ("modelopt", "modelopt"), ("aq-medai", "aq-medai"), ("amd/", "amd"), ("lmsys/", "lmsys"),
    ("nebius", "nebius"), ("nvidia/", "nvidia"), ("swiss-ai", "swiss-ai"), ("built-in", "vendor"),
    ("native", "vendor"), ("gemma4 assistant", "vendor"),
)  # fmt: skip
"""Makers of drafts by a sign in the draft's name."""
BASELINES = (
    ("spec_bundle", ("specforge", "spec for ge"), ()), ("model-optimizer", ("modelopt",), ()),
    ("deepspec", (), ("dspark",)), ("angelspec", (), ("dfly",)), ("specextend", ("-",), ()),
    ("owl,", ("owl", "howl"), ()),
)  # fmt: skip
"""Sources that compare drafts with their own: what their own one's name holds, or its kind."""
VARIANTS = re.compile(
    r"[-_. ](instruct|chat|it|fp8|nvfp4|int4|int8|w4a16|gguf|q4_k_s|iq1_kt|autoround|mixed|2507|hf|4bit|base)\b"
)
ALL_STEPS = re.compile(r"all[- ]steps?[^=;]*=[^=;]*=\s*(\d+\.?\d*)", re.IGNORECASE)
ROUGH = re.compile(
    r"one prompt|one query|single|8 prompts|smoke|log window|66 drafts|midpoint|mid\)|random",
    re.IGNORECASE,
)
"""Signs that few texts, or no real ones, were counted."""
NUMBER = re.compile(r"\s*~?(\d+\.?\d*)\s*(?:-\s*(\d+\.?\d*))?\s*([kK])?")


class Situation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A draft on a text, as far as it is known: what an acceptance was measured in, or is asked of.

    An empty name is unknown.
    """

    kind: str
    model: str = ""
    draft: str = ""
    maker: str = ""
    is_baseline: bool = False
    """Whether its source compares it with a draft of its own."""
    task: str = ""
    task_class: str = ""
    temperature: float | None = None
    context: float | None = None
    window: float | None = None
    """Tokens of the draft's cache, where it is kept shorter than the context."""
    has_trained_window: bool = False
    trained_len: float | None = None
    budget: float | None = None
    """Cache slots that a sparse self-draft reads."""
    target_billions: float | None = None
    is_tree: bool = False
    is_thinking: bool = False
    counts_drafted: bool = False
    """Whether only steps with a draft are counted."""
    source: str = ""

    @property
    def group(self) -> str:
        return GROUP_OF.get(self.kind, "self")

    @property
    def checkpoint(self) -> str:
        return f"{self.model}|{self.kind}|{self.draft}"

    def is_from(self, source: str) -> bool:
        """Whether a source published it: one that names a repository by that, without the place and the
        commit in it."""
        repository = source.split(maxsplit=1)[0].split("@", maxsplit=1)[0]
        if "/" not in repository:
            return plain(source) == self.source
        return plain(repository) in self.source


class Rate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens per step as a source gives them."""

    situation: Situation
    gamma: int
    tokens: float
    """Tokens per step, of all steps."""
    is_gamma_assumed: bool = False
    is_from_share: bool = False
    """Whether the source prints an accepted share, and no tokens per step."""
    is_rough: bool = False
    """Few texts, no real ones, or figures quoted or computed from others."""

    @property
    def is_chain(self) -> bool:
        """Whether it is a chain of a length that the source states, as are its tokens per step."""
        return not (
            self.situation.is_tree or self.is_gamma_assumed or self.is_from_share
        )


def plain(name: str) -> str:
    """A name without case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def plain_model(name: str) -> str:
    """A target's name without its organisation, format and tuning: sources differ in those."""
    bare = re.sub(r"\(.*?\)", "", name.rsplit("/", maxsplit=1)[-1].lower())
    return plain(VARIANTS.sub("", bare)) or plain(name)


def plain_task(name: str) -> str:
    bare = plain(re.sub(r"\(.*?\)", "", name))
    return SAME_TASK.get(bare, bare)


def maker_of(draft: str, kind: str) -> str:
    """Who made a draft, from its name; "" where that does not say."""
    lower = draft.lower()
    for sign, maker in MAKERS:
        if sign in lower:
            return maker
    if kind == "mtp":
        return "vendor"
    if kind.startswith("eagle") and re.fullmatch(r"eagle-?[23]?( .*)?", lower):
        return "eagle-authors"
    if GROUP_OF.get(kind) == "lookup":
        return kind
    if "/" in lower:
        return lower.split("/")[0]
    return ""


def is_baseline(draft: str, kind: str, source: str) -> bool:
    """Whether a source measured the draft to compare it with one of its own."""
    lower = source.lower()
    for sign, names, kinds in BASELINES:
        if sign in lower:
            named = any(name in draft.lower() for name in names)
            return not named and kind not in kinds
    return "as compared" in draft.lower()


def read_rates(path: str | Path) -> list[Rate]:
    """Reads a table of published acceptance.

    Rows without tokens per step or a rate are left out. Raises ConfigError naming the file, and the
    column it lacks.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            lacking = {"model", "draft_kind", "mean_acceptance_length"} - set(
                reader.fieldnames or ()
            )
            if lacking:
                raise ConfigError(f"{path} has no column {', '.join(sorted(lacking))}")
            rates = []
            for line in reader:
                _check_window(line, f"{path}, line {reader.line_num}")
                rates.append(_rate(line))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return [rate for rate in rates if rate is not None]


def published_slopes(path: str | Path) -> dict[str, list[float]]:
    """How the logit of the conditional rate changes per ln(position), one value per checkpoint and source,
    by group of drafts: of the chains of a table whose rates are given by position."""
    slopes: dict[tuple[str, ...], list[float]] = {}
    for line in read_lines(path):
        rates = _conditional_rates(line)
        if len(rates) < 2 or (line.get("shape") or "").startswith("tree"):
            continue
        kind = KIND_OF.get(line["draft_kind"], line["draft_kind"])
        key = (
            GROUP_OF.get(kind, "self"),
            line["model"],
            line["draft_name"],
            line["source"],
        )
        logits = np.log(rates / (1.0 - rates))
        slope, _ = np.polyfit(np.log(np.arange(1, len(rates) + 1)), logits, 1)
        slopes.setdefault(key, []).append(float(slope))
    by_group: dict[str, list[float]] = {}
    for (group, *_), values in slopes.items():
        by_group.setdefault(group, []).append(float(np.mean(values)))
    return by_group


def _conditional_rates(line: Mapping[str, str]) -> Array:
    """The conditional rates of a line, inside (0, 1), from marginal or conditional ones: whichever give
    its tokens per step. Empty: the line does not give both."""
    texts = line["acceptance_by_position"].split(";")
    tokens = number(line["mean_acceptance_length"])
    stated = np.array([number(text) or 0.0 for text in texts])
    if tokens is None or not np.all(stated > 0.0):
        return np.zeros(0)
    as_conditional = 1.0 + np.cumprod(stated).sum()
    rates = stated
    if abs(1.0 + stated.sum() - tokens) <= abs(as_conditional - tokens):
        rates = stated / np.concatenate([[1.0], stated[:-1]])
    return np.asarray(np.clip(rates, LEAST_SEEN, 1.0 - LEAST_SEEN))


def read_lines(path: str | Path) -> list[dict[str, str]]:
    """The lines of a table of published acceptance."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _check_window(line: Mapping[str, str | None], where: str) -> None:
    """Refuses lengths that no head can have."""
    trained = number(line.get("trained_length") or "")
    if trained is not None and trained < 1.0:
        raise ConfigError(
            f"{where}: trained_length must be at least 1, not {trained:g}"
        )
    window = number(line.get("window") or "")
    sinks = number(line.get("sink") or "") or 0.0
    if window is not None and window <= sinks:
        raise ConfigError(
            f"{where}: window {window:g} must exceed the {sinks:g} sinks beside it"
        )


def _rate(line: Mapping[str, str | None]) -> Rate | None:
    """The rate of a line. None: the line states no usable one."""
    text = {name: value or "" for name, value in line.items() if isinstance(name, str)}
    raw_kind = text["draft_kind"].strip()
    kind = KIND_OF.get(raw_kind, raw_kind)
    group = GROUP_OF.get(kind, "self")
    is_tree = text.get("shape", "").startswith("tree")
    gamma = _gamma(text.get("gamma", ""))
    tokens = _stated_tokens(text)
    is_derived = False
    if tokens is None and gamma is not None:
        share = _share(text.get("acceptance_rate", ""))
        if share is not None:
            tokens = 1.0 + gamma * share
            is_derived = True
    if tokens is None or tokens <= 1.005:
        return None
    is_assumed = gamma is None
    if gamma is None:
        gamma = max(_assumed_gamma(group, is_tree=is_tree), int(tokens) + 1)
    if tokens > (gamma + 1) * 1.01:
        return None
    definition = text.get("definition", "")
    draft = text.get("draft_name", "")
    remarks = f"{definition} {text.get('task', '')} {draft}"
    is_rough = text.get("secondary") == "True" or bool(ROUGH.search(remarks))
    counts_drafted = group == "lookup" and _counts_drafted_steps(definition)
    return Rate(
        situation=_situation(
            text, kind, draft, is_tree=is_tree, counts_drafted=counts_drafted
        ),
        gamma=gamma,
        tokens=tokens,
        is_gamma_assumed=is_assumed,
        is_from_share=is_derived,
        is_rough=is_derived or is_rough,
    )


def _stated_tokens(text: Mapping[str, str]) -> float | None:
    """Tokens per step with the bonus token, over all steps if the definition gives these."""
    definition = text.get("definition", "")
    of_all = ALL_STEPS.search(definition)
    if of_all is not None:
        return float(of_all.group(1))
    tokens = number(text["mean_acceptance_length"])
    if tokens is not None and re.search(
        r"accepted only|bonus excluded", definition, re.I
    ):
        tokens += 1.0
    return tokens


def _counts_drafted_steps(definition: str) -> bool:
    """Whether the mean is over steps with a draft alone."""
    if ALL_STEPS.search(definition) is not None:
        return False
    return re.search("per drafted step", definition, re.I) is not None


def _assumed_gamma(group: str, *, is_tree: bool) -> int:
    usual = ASSUMED_GAMMA[group]
    if is_tree:
        return ASSUMED_TREE_DEPTH.get(group, usual)
    return usual


def _situation(
    text: Mapping[str, str],
    kind: str,
    draft: str,
    *,
    is_tree: bool,
    counts_drafted: bool,
) -> Situation:
    source = text.get("source", "")
    task = plain_task(text.get("task", ""))
    task_class = text.get("task_class", "") or OTHER_CLASS
    if task in CODE_EDITS and task_class == "code":
        task_class = "code-edit"
    made = maker_of(draft, kind)
    return Situation(
        kind=kind,
        model=plain_model(text["model"]),
        draft=plain(draft),
        maker=made,
        is_baseline=is_baseline(draft, kind, source),
        task=task,
        task_class=task_class,
        temperature=number(text.get("temperature", "")),
        context=number(text.get("context_len", "")),
        window=number(text.get("window", "")),
        has_trained_window="trained with a slid" in draft.lower(),
        trained_len=number(text.get("trained_length", "")),
        budget=number(text.get("budget", "")),
        target_billions=number(text.get("target_params_b", "")),
        is_tree=is_tree,
        is_thinking="thinking_on" in text.get("task", ""),
        counts_drafted=counts_drafted,
        source=plain(
            re.sub(r"results?/.*|results\.json|find_string id|excerpt", "", source)
        )[:60],
    )


def number(text: str) -> float | None:
    """The number that a field begins with, the middle of a range, "2K" as 2048; None: none."""
    match = NUMBER.match(text)
    if match is None:
        return None
    low, high, thousands = match.groups()
    value = float(low)
    if high is not None:
        value = (value + float(high)) / 2.0
    if thousands:
        return value * 1024.0
    return value


def _gamma(text: str) -> int | None:
    if re.fullmatch(r"\d+(\.0*)?", text.strip()):
        return round(float(text))
    return None


def _share(text: str) -> float | None:
    value = number(text)
    if value is not None and 0.0 < value <= 1.0:
        return value
    return None


def same_rate(rate: Rate) -> tuple[object, ...]:
    """Identity of a row among others: a table that holds it twice counts it once."""
    at = rate.situation
    text = (at.task, at.temperature, at.context, at.window)
    return (at.checkpoint, *text, at.is_tree, rate.gamma, round(rate.tokens, 3))


def distinct(rates: Sequence[Rate]) -> list[Rate]:
    """The rows without repetitions."""
    return list({same_rate(rate): rate for rate in reversed(rates)}.values())[::-1]
