"""Trained heads by the names of their checkpoints: the target that each was made for, and what it
asks of a target that it drafts for.

What is known of a checkpoint comes from its config.json at hand, else from `data/heads.csv`, whose
rows name their sources, else from the hub's config.json, else from its name alone.
"""

import csv
import re
from functools import cache
from pathlib import Path

import msgspec

from magicdec.errors import MagicdecError
from magicdec.naming import METHODS, head_named_in
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.hub import cached_config, hub_config, is_hub_name
from magicdec.specs.names import model_name, named_models, resolve_name
from magicdec.specs.speculation import (
    PUBLISHED_HEADS,
    DraftMethod,
    HeadSpec,
    load_head,
)

HEADS_FILE = Path(__file__).resolve().parent / "data" / "heads.csv"
CONFIG = "its config.json"
NAME = "its name"
NOISE = re.compile(
    r"p[-_ .]?eagle|eagle[-_ .]?[23]?(?![\d.]*b)|dflash2?|dspark|mtp|nextn|ttt\d*|block\d+|b16|"
    r"speculators?|specforge|sglang|sgl|preview|v\d(?![\d.])|head|draft|model|long[-_]context"
)
"""Parts of a head's name that say nothing of its target."""


GGUF = re.compile(r"(-(ud-)?(i?q\d\w*|b?f16))?\.gguf$")
"""End of a converted head's file, with its format."""


class KnownHead(msgspec.Struct, frozen=True, kw_only=True):
    """A published head of the table."""

    checkpoint: str
    """Its repository on the hub."""
    target: str
    """The catalog's name of the model that it was made for, or a repository outside of it."""
    method: DraftMethod
    hidden_size: int | None
    """Its target's; None: not known here."""
    vocab_size: int | None
    """Its target's."""
    draft_vocab_size: int | None
    """Tokens that it can propose; None: not known."""
    most_drafts: int | None
    """Tokens that it proposes at most in a step, by the block that it was trained on; None: any
    number, or not known."""
    trained_len: int | None
    """Tokens of the texts that it was trained on; None: not known."""
    rotary_base: float | None
    """Base of its rotary positions; None: not known."""
    source: str
    """Where it was read."""
    recipe: str | None
    """Where its vocabulary, trained length and base were read, if elsewhere."""


class HeadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The known facts of a checkpoint; None: not known."""

    checkpoint: str
    method: DraftMethod | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    most_drafts: int | None = None
    target: str | None = None
    """The model that it was made for."""
    proof: str = ""
    """Where it is known from; "": nothing is known."""

    @property
    def is_by_name(self) -> bool:
        """Whether nothing but its name tells it."""
        return self.proof == NAME


@cache
def published_heads() -> tuple[KnownHead, ...]:
    """The published heads of the table."""
    with HEADS_FILE.open(encoding="utf-8", newline="") as file:
        rows = [
            {name: value or None for name, value in row.items()}
            for row in csv.DictReader(file)
        ]
    return msgspec.convert(rows, tuple[KnownHead, ...], strict=False)


@cache
def _by_checkpoint() -> dict[str, KnownHead]:
    return {head.checkpoint.lower(): head for head in published_heads()}


@cache
def _by_bare_name() -> dict[str, KnownHead]:
    """The table's heads by the last part of their repositories' names."""
    return {
        head.checkpoint.lower().rpartition("/")[2]: head for head in published_heads()
    }


def _called_like(checkpoint: str) -> KnownHead | None:
    """The table's head whose repository a name, a path or a converted file is called like."""
    bare = checkpoint.lower().rstrip("/").rpartition("/")[2]
    return _by_bare_name().get(GGUF.sub("", bare))


def listed_as(checkpoint: str) -> str | None:
    """The table's repository that a checkpoint is, or is called like; None: the table has none."""
    known = _by_checkpoint().get(checkpoint.lower()) or _called_like(checkpoint)
    return None if known is None else known.checkpoint


def is_named(checkpoint: str) -> bool:
    """Whether a text names one checkpoint: a repository, a path, or a file called like a head of the
    table, not a part of a name."""
    return "/" in checkpoint or checkpoint.lower() in _by_bare_name()


def heads_of(target: str, method: str) -> list[KnownHead]:
    """The table's heads of a kind that were made for a model."""
    name = model_name(target)
    return [
        head
        for head in published_heads()
        if (head.target, head.method) == (name, method)
    ]


def has_checkpoint(method: str, target: str) -> bool:
    """Whether a draft of a target lies in a checkpoint of its own, as Gemma 4's prediction modules
    do."""
    return METHODS[method].has_checkpoint or bool(heads_of(target, method))


def listed_head(checkpoint: str, method: DraftMethod) -> HeadSpec | None:
    """The usual head of a method with the vocabulary and the length that the table has of a checkpoint. None: it
    has neither."""
    known = _by_checkpoint().get(checkpoint.lower())
    if known is None or (known.draft_vocab_size or known.trained_len) is None:
        return None
    usual = PUBLISHED_HEADS.get(method, HeadSpec())
    return msgspec.structs.replace(
        usual,
        method=method,
        vocab_size=known.draft_vocab_size or usual.vocab_size,
        max_positions=known.trained_len,
    )


def is_loaded_by(engine: str, checkpoint: str) -> bool:
    """Whether an engine loads a head's format: vLLM alone has the architectures of its own
    speculators (vllm-project/speculators issue 53)."""
    return engine == "vllm" or "speculator" not in checkpoint.lower()


def head_for(
    engine: str, target: str, method: str, gamma: int, preferred: str = ""
) -> str:
    """The checkpoint of a head to name in an engine's command: the preferred one, or the table's
    first that the engine loads and that proposes so many tokens; "": none is known."""
    known = []
    if preferred:
        known.append(preferred)
    for head in heads_of(target, method):
        if head.most_drafts is None or gamma <= head.most_drafts:
            known.append(head.checkpoint)
    return next((name for name in known if is_loaded_by(engine, name)), "")


def facts_of(checkpoint: str, *, reads_files: bool = True) -> HeadFacts:
    """The known facts of a head by the name or the path of its checkpoint. `reads_files`: whether a
    file may be read, and the hub asked, for it."""
    if reads_files:
        at_hand = _configuration(checkpoint, from_hub=False)
        if at_hand is not None:
            return facts_of_configuration(checkpoint, at_hand)
    known = _by_checkpoint().get(checkpoint.lower())
    if known is not None:
        return _facts_of_row(known, checkpoint, proof=known.source)
    if reads_files:
        at_hub = _configuration(checkpoint, from_hub=True)
        if at_hub is not None:
            return facts_of_configuration(checkpoint, at_hub)
    return _of_name(checkpoint)


def _facts_of_row(head: KnownHead, checkpoint: str, *, proof: str) -> HeadFacts:
    """The facts of a head of the table, for a checkpoint that is it or is called like it."""
    return HeadFacts(
        checkpoint=checkpoint,
        method=head.method,
        hidden_size=head.hidden_size,
        vocab_size=head.vocab_size,
        most_drafts=head.most_drafts,
        target=head.target,
        proof=proof,
    )


def _configuration(checkpoint: str, *, from_hub: bool) -> HeadSpec | None:
    """The head of a config.json: a path's or the hub cache's, or the hub's own. None: there is none,
    or it is of no head."""
    path = Path(checkpoint)
    try:
        if from_hub:
            if not is_hub_name(checkpoint):
                return None
            path = hub_config(checkpoint)
        elif not path.exists():
            if not is_hub_name(checkpoint):
                return None
            cached = cached_config(checkpoint)
            if cached is None:
                return None
            path = cached
    except (MagicdecError, OSError):
        return None  # then the table or the name speaks
    for method in (None, head_named_in(checkpoint)):  # EAGLE's say LlamaForCausalLM
        try:
            return load_head(path, method=method)
        except (MagicdecError, OSError):
            continue
    return None


def facts_of_configuration(checkpoint: str, head: HeadSpec) -> HeadFacts:
    """The facts that a head's config.json states."""
    return HeadFacts(
        checkpoint=checkpoint,
        method=head.method,
        hidden_size=head.hidden_size,
        vocab_size=head.target_vocab_size,
        most_drafts=head.most_drafts,
        proof=CONFIG,
    )


def _of_name(checkpoint: str) -> HeadFacts:
    """The facts that a name states: those of the table's head of this name, wherever it lies, else
    the kind of head, its block, and a target of the catalog."""
    alike = _called_like(checkpoint)
    if alike is not None:
        return _facts_of_row(alike, checkpoint, proof=NAME)
    method = head_named_in(checkpoint)
    target = target_named_in(checkpoint)
    hidden_size = None
    vocab_size = None
    if target is not None:
        model = load_model_spec(target)
        hidden_size = model.hidden_size
        vocab_size = model.vocab_size
    most = None
    block = re.search(r"block[-_]?(\d+)", checkpoint.lower())
    if block is not None:
        most = int(block[1])
    is_known = method is not None or target is not None
    return HeadFacts(
        checkpoint=checkpoint,
        method=method,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        most_drafts=most,
        target=target,
        proof=NAME if is_known else "",
    )


def target_named_in(checkpoint: str) -> str | None:
    """The catalog's model that a head's name speaks of. None: none, or it cannot be told."""
    bare = checkpoint.rpartition("/")[2].lower().replace("_", "-")
    words = [part for part in re.split(r"[-.]{2,}|-", NOISE.sub("-", bare)) if part]
    # a size or a maker may stand between the family and its version, in any order
    for start in range(len(words)):
        for end in range(len(words), start, -1):
            name = "-".join(words[start:end]).strip(".")
            found = resolve_name(name)
            if found is not None and found.model in named_models():
                return found.model
    return None
