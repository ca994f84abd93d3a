"""`llama-server`'s command: GGUF files and repositories, by their names' formats, and its drafts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from magicdec.errors import ConfigError
from magicdec.naming import draft_by_name
from magicdec.specs.formats import gguf_format, weight_format
from magicdec.specs.serve_command.options import LLAMA_CPP
from magicdec.specs.serve_command.server import ServeCommand, Speculation
from magicdec.specs.serve_command.start import STARTS
from magicdec.specs.serve_command.stated import StatedOptions

ALL_LAYERS = 99
"""-ngl from which all layers are on the device, whatever the model."""

ON_HOST = frozenset(
    (
        *("nkvo", "no-kv-offload", "cmoe", "cpu-moe", "ncmoe", "n-cpu-moe"),
        *("ot", "override-tensor"),
    )
)
"""Options that keep weights or the cache on the host."""
USUAL_FORMAT = "Q4_K_M"
"""Format of a repository's file that -hf takes, where it names none."""
ANY_TYPE = "gguf"
"""A file whose name tells no type."""
DRAFT_MAX = 16
"""Drafted tokens of a draft model, where the command does not say."""
FORMAT = re.compile(
    r"[-_.:](?:i1-)?((?:UD[-_])?(?:IQ|TQ|Q)\d(?:_\w+)?|MXFP4(?:_\w+)?|NVFP4|BF16|F16|F32)$",
    re.IGNORECASE,
)
SHARD = re.compile(r"-\d{5}-of-\d{5}$")


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
    """The size of a file that is here, all its parts together, as formats write it; "" where it is
    elsewhere."""
    path = Path(name)
    parts = [path]
    if SHARD.search(path.stem):
        parts = sorted(path.parent.glob(f"{SHARD.sub('-*-of-*', path.stem)}.gguf"))
    if not path.is_file():
        return ""
    return f"@{sum(part.stat().st_size for part in parts) / 1e6:.6g}MB"


def llama_cpp_server(said: StatedOptions) -> ServeCommand:
    """llama-server's command, answered by the roofline. Raises ConfigError for values that cannot
    be read."""
    said.check_resolved()
    meanings = said.meanings
    name = meanings.get("repository") or meanings.get("model")
    if not name:
        raise ConfigError(f"the command names no model; {STARTS} take one")
    gguf = gguf_of(name)
    is_usual = not gguf.label and "repository" in meanings
    if is_usual:
        gguf = gguf_of(f"{name}:{USUAL_FORMAT}")
    notes = [
        "llama.cpp was fitted by nobody: its times are the roofline's, and its intervals are as wide as "
        "that"
    ]
    if is_usual:
        notes.append(f"-hf {name} names no format: {USUAL_FORMAT} is llama.cpp's own")
    if gguf.weight_dtype not in (None, "bf16", "f16"):
        kernels = weight_format(gguf.weight_dtype).kernels
        notes.append(
            f"{gguf.label or name} has its own bits and the rates of {kernels}: llama.cpp's kernels are "
            "not modelled"
        )
    on_host = [option for option in said.not_looked_at if option.lstrip("-") in ON_HOST]
    is_on_host = bool(on_host)
    if on_host:
        notes.append(
            f"{', '.join(on_host)}: all is taken for the device's; what stays on the host is not "
            "modelled"
        )
    layers = meanings.get("layers", "all")
    if layers.isdecimal() and int(layers[:6]) < ALL_LAYERS:
        is_on_host = True
        notes.append(
            f"-ngl {layers[:6]}: all layers are taken for the device's; those that stay on the host are "
            "not modelled"
        )
    if "batch" not in meanings:
        notes.append("one sequence at a time is taken for it: --parallel says how many")
    # -c counts the tokens of all sequences together; 0 is the model's own
    length = meanings.get("length", "0")
    tokens = None
    if length.isdecimal() and int(length[:9]) > 0:
        tokens = int(length[:9])
    # the format that is nearest in bits
    kv_dtype = None
    keys = meanings.get("keys", "").lower()
    if keys.startswith("q8"):
        kv_dtype = "fp8"
    elif keys.startswith(("q4", "q5", "iq4")):
        kv_dtype = "int4"
    sequences = said.count("batch") or 1
    return ServeCommand(
        engine=LLAMA_CPP,
        model=gguf.model,
        allocated_tokens=tokens,
        is_partly_on_host=is_on_host,
        max_num_seqs=sequences,
        max_model_len=None if tokens is None else max(tokens // sequences, 1),
        weight_dtype=gguf.weight_dtype,
        kv_dtype=kv_dtype,
        speculation=_draft(meanings),
        hardware=said.start.hardware,
        num_gpus=said.start.num_gpus,
        read=said.written,
        noted=said.noted,
        without_effect=said.without_effect,
        not_looked_at=said.not_looked_at,
        problems=said.problems,
        asked=said.asked,
        notes=[*dict.fromkeys(said.given.notes), *notes],
    )


def _draft(meanings: Mapping[str, str]) -> Speculation | None:
    """Raises ConfigError for a sort of draft that is not planned for."""
    gamma = None
    if re.fullmatch(r"\d{1,4}", meanings.get("gamma", "")):
        gamma = int(meanings["gamma"])
    method = meanings.get("method", "").partition(",")[0]
    if method.startswith("ngram"):
        return Speculation(draft="ngram", gamma=gamma)
    checkpoint = meanings.get("draft") or meanings.get("draft_repository")
    sort = method.removeprefix("draft-").removesuffix("-adaptive")
    named = draft_by_name(sort) if method else None
    if named is not None:
        head = gguf_of(checkpoint).model if checkpoint else None
        return Speculation(draft=named, gamma=gamma, checkpoint=head)
    if method not in ("", "none", "draft", "draft-simple"):
        raise ConfigError(f"--spec-type {method[:40]} is not planned for")
    if not checkpoint:
        return None
    return Speculation(draft=gguf_of(checkpoint).model, gamma=gamma or DRAFT_MAX)
