"""`llama-server`'s command: GGUF files and repositories, by their names' formats, and its drafts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from magicdec.errors import ConfigError
from magicdec.naming import draft_by_name, head_named_in
from magicdec.specs.engine import version_number
from magicdec.specs.formats import gguf_format, type_bits, weight_format
from magicdec.specs.rules import finding
from magicdec.specs.serve_command.options import LLAMA_CPP, names_of, options_of
from magicdec.specs.serve_command.server import ServeCommand, Speculation
from magicdec.specs.serve_command.start import SHOWN, STARTS
from magicdec.specs.serve_command.stated import StatedOptions
from magicdec.specs.speculation import MAX_GAMMA

ALL_LAYERS = 99
"""-ngl from which all layers are on the device, whatever the model."""

ON_HOST = frozenset(
    (
        *("nkvo", "no-kv-offload", "no-kvo", "ot", "override-tensor"),
        *("cmoe", "cpu-moe", "ncmoe", "n-cpu-moe", "ncffn", "n-cpu-ffn"),
    )
)
"""Options that keep weights or the cache on the host."""
NEVER_FITTED_BEFORE = 7400
"""The first build with --fit, which is on by default (pull request 16653, December 2025)."""
NAMES_CHANGED = 8960
"""The first build without --draft-max, whose default is three drafts (pull request 22397, April 2026)."""
TYPE_NEEDED = 9450
"""The first build in which a draft model drafts only with --spec-type (pull request 23988, June 2026)."""
USUAL_PASS = 2048
USUAL_CHUNK = 512
"""-b and -ub by default (common/common.h)."""
USUAL_GAMMAS = {"ngram-mod": 64, "draft": 3}
"""Most drafted tokens by default: of ngram-mod, of models and heads (common/common.h)."""
USUAL_MGRAM = 48
"""Drafted tokens of the other look-ups by default."""
USUAL_FORMAT = "Q4_K_M"
"""Format of a repository's file that -hf takes, where it names none."""
ANY_TYPE = "gguf"
"""A file whose name tells no type."""
OLDER_GAMMA = 16
"""Most drafted tokens of a model by default in builds before `NAMES_CHANGED`."""
FORMAT = re.compile(
    r"[-_.:](?:i1-)?((?:UD[-_])?(?:IQ|TQ|Q)\d(?:_\w+)?|MXFP4(?:_\w+)?|NVFP4|BF16|F16|F32)$",
    re.IGNORECASE,
)
CACHE_TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Formats below 16 bits that -ctk and -ctv take (common/arg.cpp)."""
WIDE_TYPES = ("f16", "bf16", "f32")
SHARD = re.compile(r"-\d{5}-of-(\d{5})$")


class Gguf(NamedTuple):
    """A GGUF file by its name."""

    model: str
    label: str
    """Its format as it is called; "": the name has none."""
    weight_dtype: str | None
    """Its format in data/formats.toml, with the file's own size where it is here."""


def gguf_of(name: str) -> Gguf:
    """The model and the format that the name of a file, or of a repository with its tag, tells."""
    base = name.rstrip("/").rpartition("/")[2]
    repository, _, tag = base.partition(":")
    base = SHARD.sub("", re.sub(r"\.gguf$", "", repository, flags=re.IGNORECASE))
    label = ""
    found = FORMAT.search(base)
    if found is not None:
        label = found[1]
        base = base[: found.start()]
    if tag:
        found = FORMAT.search(f":{tag}")
        label = found[1] if found is not None else tag
    base = re.sub(r"[-_.]GGUF$", "", base, flags=re.IGNORECASE)
    weights = gguf_format(label)
    size = _size_of(name)
    if size:
        weights = f"{weights or ANY_TYPE}{size}"
    return Gguf(base, label.upper(), weights)


def _size_of(name: str) -> str:
    """The size of a file that is here with all its parts, as formats write it, else ""."""
    parts = [name]
    found = SHARD.search(name.removesuffix(".gguf"))
    if found is not None:
        begin = name[: found.start()]
        num_parts = int(found[1])
        parts = []
        for number in range(1, num_parts + 1):
            parts.append(f"{begin}-{number:05d}-of-{num_parts:05d}.gguf")
    if not all(map(os.path.isfile, parts)):
        return ""
    return f"@{sum(map(os.path.getsize, parts)) / 1e6:.6g}MB"


def llama_cpp_server(said: StatedOptions) -> ServeCommand:
    """llama-server's command, answered by the roofline. Raises ConfigError for values that cannot
    be read."""
    said.check_resolved()
    meanings = said.meanings
    name = meanings.get("repository") or meanings.get("model")
    if not name or name == "true":  # an option without its value
        raise ConfigError(f"the command names no model; {STARTS} take one")
    gguf = gguf_of(meanings.get("hub_file") or name)
    is_usual = not gguf.label and "repository" in meanings
    if is_usual:
        gguf = gguf_of(f"{name}:{USUAL_FORMAT}")
    notes = [
        "llama.cpp was fitted by nobody: its times are the roofline's, and its intervals are as wide as "
        "that"
    ]
    if is_usual:
        notes.append(f"-hf {name} names no format: {USUAL_FORMAT} is llama.cpp's own")
    if weight_format(gguf.weight_dtype or "bf16").is_average:
        notes.append(
            f"{gguf.label} files differ by a tenth from model to model: --weight-dtype "
            f"{gguf.weight_dtype}@18.7GB tells the size of this one"
        )
    if gguf.weight_dtype not in (None, "bf16", "f16"):
        kernels = weight_format(gguf.weight_dtype).kernels
        notes.append(
            f"{gguf.label or name} has its own bits and the rates of {kernels}: llama.cpp's kernels are "
            "not modelled"
        )
    problems, remarks = _by_build(said)
    notes += remarks

    # what stays on the host
    on_host = [option for option in said.noted if option.lstrip("-") in ON_HOST]
    layers = meanings.get("layers", "all")
    if layers.isdecimal() and int(layers[:6]) < ALL_LAYERS:
        on_host.append(f"-ngl {layers[:6]}")
    if on_host:
        notes.append(
            f"{', '.join(on_host)}: all is taken for the device's; what stays on the host is not "
            "modelled"
        )
    build = build_number(said.start.version)
    has_fit = build is None or build >= NEVER_FITTED_BEFORE
    is_fitted = has_fit and meanings.get("fit", "on") not in ("off", "0", "false")
    if "layers" in meanings and layers != "auto":
        is_fitted = False

    # the load
    if "batch" not in meanings:
        notes.append("one sequence at a time is taken for it: --parallel says how many")
    # -c counts the tokens of all sequences together; 0 is the model's own
    length = meanings.get("length", "0")
    tokens = None
    if length.isdecimal() and int(length[:9]) > 0:
        tokens = int(length[:9])
    sequences = said.count("batch") or 1
    chunk = min(said.count("pass") or USUAL_PASS, said.count("chunk") or USUAL_CHUNK)
    is_unsplit = meanings.get("attention") in ("off", "0", "false")
    split = meanings.get("split", "layer")
    if split == "row":
        notes.append(
            "-sm row is deprecated: -sm tensor takes its place from 2026 on (llama.cpp pull request "
            "19378)"
        )
    return ServeCommand(
        engine=LLAMA_CPP,
        version=said.start.version,
        model=gguf.model,
        allocated_tokens=tokens,
        is_partly_on_host=bool(on_host),
        is_fitted=is_fitted,
        split=split,
        is_unsplit_attention=is_unsplit,
        max_num_seqs=sequences,
        max_model_len=None if tokens is None else max(tokens // sequences, 1),
        weight_dtype=gguf.weight_dtype,
        kv_dtype=_cache_format(meanings, notes),
        speculation=_draft(meanings, build, notes),
        has_prefix_cache=said.truth("prefixes"),
        prefill_tokens=chunk,
        frees_windows=meanings.get("whole_windows") != "true",
        temperature=_temperature(said),
        hardware=said.start.hardware,
        num_gpus=said.start.num_gpus,
        read=said.written,
        noted=said.noted,
        without_effect=said.without_effect,
        not_looked_at=said.not_looked_at,
        not_understood=said.unknown,
        problems=[*said.problems, *problems],
        asked=said.asked,
        notes=[*dict.fromkeys(said.given.notes), *notes],
    )


def _temperature(said: StatedOptions) -> float | None:
    """The temperature of clients that name none, where the command says; below 0 it is 0."""
    text = said.meanings.get("temperature")
    if text is None:
        return None
    if re.fullmatch(r"-?\d{1,2}(?:\.\d{0,9})?", text) is None:
        option = said.names["temperature"]
        raise ConfigError(f"{option} must be a number below 100, not '{text[:40]}'")
    return max(float(text), 0.0)


def build_number(version: str | None) -> int | None:
    """The number of a build ("9235" of "b9235"); None: not told."""
    numbers = version_number(version or "")
    return numbers[0] if numbers else None


def _by_build(said: StatedOptions) -> tuple[list[str], list[str]]:
    """Faults and notes of options that newer builds do not have."""
    removed = names_of(LLAMA_CPP).removed
    given: dict[str, list[str]] = {}
    for option in options_of(LLAMA_CPP, said.start.words):
        if option.name in removed:
            given.setdefault(removed[option.name], []).append(option.written)
    problems: list[str] = []
    notes: list[str] = []
    for instead, options in given.items():
        names = dict.fromkeys(options)
        situation = "removed option"
        if said.start.version is None or not instead.startswith("use --spec"):
            situation = "option that newer builds lack"
        found = finding(
            situation,
            LLAMA_CPP,
            said.start.version or "",
            options=", ".join(names),
            instead=instead,
            build=build_number(said.start.version),
        )
        if found is not None:
            (problems if found.kind == "wrong" else notes).append(found.says)
    values = said.meanings.get("values", "f16").lower()
    is_off = said.meanings.get("attention") in ("off", "0", "false")
    if values in CACHE_TYPES:
        found = finding(
            "narrow values in the cache",
            LLAMA_CPP,
            settings=() if is_off else ("flash attention",),
            values=values,
        )
        if found is not None:
            problems.append(found.says)
    return problems, notes


def _cache_format(meanings: Mapping[str, str], notes: list[str]) -> str | None:
    """The format that is nearest to the bits of keys and values together; None: 16 bits."""
    bits = []
    for part in ("keys", "values"):
        label = meanings.get(part, "f16").lower()
        if label not in (*CACHE_TYPES, *WIDE_TYPES):
            notes.append(
                f"{label[:SHOWN]} is no format of llama.cpp's cache: priced in 16 bits"
            )
        bits.append(type_bits(label) if label in CACHE_TYPES else 16.0)
    mean = sum(bits) / 2.0
    if mean >= 16.0:
        return None
    nearest = min(("bf16", "fp8", "int4"), key=lambda name: abs(type_bits(name) - mean))
    notes.append(
        f"the cache has {mean:.3g} bits a number and is priced as {nearest}: llama.cpp's kernels are not "
        "modelled"
    )
    return None if nearest == "bf16" else nearest


def _draft(
    meanings: Mapping[str, str], build: int | None, notes: list[str]
) -> Speculation | None:
    """Raises ConfigError for a sort of draft that is not planned for."""
    types = [sort for sort in meanings.get("method", "").split(",") if sort]
    if not types and meanings.get("usual_draft") == "true":
        types = ["ngram-mod"]
    method = types[0] if types else ""
    if len(types) > 1:
        notes.append(f"--spec-type {','.join(types)}: {method} alone is priced")
    checkpoint = meanings.get("draft") or meanings.get("draft_repository")
    is_old = build is not None and build < NAMES_CHANGED
    if method.startswith("ngram"):
        # the common length is the look-up's own in older builds, and says nothing in newer ones
        given = meanings.get(f"gamma {method}") or meanings.get("gamma", "")
        gamma = USUAL_GAMMAS.get(method, USUAL_MGRAM)
        if given.isdecimal():
            gamma = int(given[:4])
        if gamma > MAX_GAMMA:
            notes.append(
                f"{method} drafts up to {gamma} tokens and is priced with {MAX_GAMMA}"
            )
        return Speculation(draft="ngram", gamma=min(gamma, MAX_GAMMA))
    given = meanings.get("gamma", "")
    gamma = OLDER_GAMMA if is_old else USUAL_GAMMAS["draft"]
    if given.isdecimal():
        gamma = int(given[:4])
    sort = method.removeprefix("draft-").removesuffix("-adaptive")
    named = draft_by_name(sort) if method else None
    head = None
    weights = None
    if checkpoint:
        head, _, weights = gguf_of(checkpoint)
    if not method and head is not None:
        part = head_named_in(head)
        if part in ("dflash", "dspark", "mtp"):  # told from the file itself
            named = part
    if named is not None:
        if weights is not None:  # a head's file may hold tables of its own
            weights = weights.partition("@")[0]
        return Speculation(
            draft=named, gamma=gamma, checkpoint=head, weight_dtype=weights
        )
    if method not in ("", "none", "draft", "draft-simple"):
        raise ConfigError(f"--spec-type {method[:40]} is not planned for")
    if checkpoint is None or method == "none":
        return None
    assert head is not None
    if not method and build is not None and build >= TYPE_NEEDED:
        notes.append(
            f"-md alone drafts nothing in b{build}, and {head} only takes memory: add --spec-type "
            "draft-simple (llama.cpp pull request 23988)"
        )
        return None
    if not method and build is None:
        notes.append(
            "-md alone drafts nothing in builds since June 2026: add --spec-type draft-simple, with which "
            "it is priced (llama.cpp pull request 23988)"
        )
    return Speculation(draft=head, gamma=gamma, weight_dtype=weights)
