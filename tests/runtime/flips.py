"""Configurations with a key removed, null or another value, held against transformers' own module: the same logits, or
a refusal in one line. What transformers cannot load has to be refused.

    python -m tests.runtime.flips                   # the matrix by architecture: equal, refused, different; an hour
    python -m tests.runtime.flips llama qwen3_moe   # of these
    python -m tests.runtime.flips --sample 40       # 40 flips of each
    python -m tests.runtime.flips --valid           # each refusal of what transformers loads

The parts of models that are not run are compared by weights and caches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import zlib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from magicdec.errors import MagicdecError
from magicdec.runtime.engine import Engine
from magicdec.runtime.weights import load_model
from magicdec.specs.hf_config import load_hf_config
from magicdec.specs.model import why_not_run
from tests.runtime.test_architectures import RUN, drawn, randomize
from tests.specs import decilm  # noqa: F401  (what transformers lacks)
from tests.specs.architectures import READ_BY_TRANSFORMERS

TOLERANCE = 1e-3
COMPARED = 4
"""Last tokens whose logits are compared."""
PROMPT = torch.randint(
    1, 90, (24,), generator=torch.Generator().manual_seed(1)
).tolist()
NAMES = (*RUN, *(name for name in READ_BY_TRANSFORMERS if name not in RUN))
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    {**YARN, "truncate": False, "beta_fast": 8.0, "mscale": 0.9, "mscale_all_dim": 0.4},
    {**YARN, "attention_factor": 0.7, "beta_slow": 2.0},
    {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [2.0, 3.0, 4.0, 5.0]},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
    {"full_attention": {**YARN, "truncate": False, "beta_fast": 8.0}},
    {},
)  # fmt: skip
OTHERS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (True, False),
    "attn_logit_softcapping": (0.5,),
    "attn_temperature_tuning": (False, 4),
    "final_logit_softcapping": (0.5,),
    "head_dim": (4, 16),
    "hidden_act": ("gelu", "relu"),
    "hidden_activation": ("gelu", "relu"),
    "layer_types": (
        ["sliding_attention", "full_attention"] * 3, ["full_attention"] * 6, ["attention"] * 6,
        ["full_attention", "chunked_attention"] * 3, ["linear_attention", "full_attention"] * 3,
        ["indexed_attention"] * 6, [],
        [["full_attention"]] * 6,
    ),
    "max_window_layers": (1, 2),
    "mlp_bias": (True,),
    "mlp_layer_types": (["sparse"] * 6, ["dense", "sparse"] * 3),
    "moe_layers": ([], [1]),
    "norm_topk_prob": (True, False),
    "no_rope_layers": ([], [1, 0, 0, 1, 1, 0]),
    "num_experts": (5,),
    "num_experts_per_tok": (1, 3, 5),
    "num_key_value_heads": (1, 6),
    "num_local_experts": (5,),
    "n_group": (1, 4),
    "original_max_position_embeddings": (16,),
    "partial_rotary_factor": (0.5,),
    "rms_norm_eps": (0.1, 1),
    "rope_interleave": (True, False),
    "rope_local_base_freq": (500.0,),
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": (500.0, 3),
    "rotary_dim": (4,),
    "routed_scaling_factor": (0.5,),
    "scoring_func": ("softmax", "sigmoid"),
    "sliding_window": (6, 0),
    "sliding_window_pattern": (1, 2, "LG"),
    "topk_group": (1, 2),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "use_bidirectional_attention": (True,),
    "use_qk_norm": (True, False),
    "use_sliding_window": (True, False),
}  # fmt: skip
"""Other values of keys, which are also given to architectures that lack them."""
SKIPPED = {
    "architectures", "dtype", "id2label", "label2id", "model_type", "per_layer_config", "problem_type", "return_dict",
    "transformers_version",
}  # fmt: skip
"""Keys of files, software and classifiers."""


class Flip(NamedTuple):
    """A change, in words, and the configuration that has it."""

    change: str
    config: dict[str, Any]


class Outcome(NamedTuple):
    """`equal`, `refused` or `different`, and why."""

    kind: str
    why: str


def others(key: str, value: Any, num_layers: int = 6) -> list[Any]:
    """Other values of a key, by its name or its kind."""
    if key in OTHERS:
        cut = [
            each[:num_layers] if isinstance(each, list) else each
            for each in OTHERS[key]
        ]
        return [deepcopy(each) for each in cut if each != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1]
    return [value + 0.25] if isinstance(value, float) else [1] if value is None else []


def flips(name: str, seed: int) -> Iterator[Flip]:
    """Each key of a drawn configuration, and of the file that transformers writes for it, removed, null and otherwise;
    keys of other architectures; and each key of each rope."""
    bare = drawn(name, seed)
    kept = {"model_type": bare["model_type"]}
    whole = kept | json.loads(
        AutoConfig.for_model(**deepcopy(bare)).to_json_string(use_diff=False)
    )
    count = bare["num_hidden_layers"]
    yield Flip("as drawn", bare)
    for form, config in (("bare", bare), ("whole", whole)):
        for key in (key for key in config if key not in SKIPPED):
            less = {k: v for k, v in config.items() if k != key}
            yield Flip(f"{form}: {key} removed", less)
            yield Flip(f"{form}: {key} null", {**config, key: None})
            for new in others(key, config[key], count):
                yield Flip(f"{form}: {key} = {_short(new)}", {**config, key: new})
    if "layer_types" in whole:
        full = {"layer_types": ["full_attention"] * count}
        yield Flip("all layers full", {**bare, **full})
        yield Flip(
            "all layers full, and no window", {**bare, **full, "sliding_window": None}
        )
    for key in OTHERS:
        if key not in whole:
            yield from (
                Flip(f"{key} = {_short(new)}", {**bare, key: new})
                for new in others(key, None, count)
            )
    for place in ("rope_scaling", "rope_parameters"):
        for rope in ROPES:
            for inner in rope:
                less = {k: v for k, v in rope.items() if k != inner}
                yield Flip(
                    f"{place} {_short(rope)} less {inner}", {**bare, place: less}
                )
                for new in (None, *others("", rope[inner])):
                    change = f"{place} {_short(rope)}, {inner} = {_short(new)}"
                    yield Flip(change, {**bare, place: {**rope, inner: new}})


def _short(value: Any) -> str:
    return json.dumps(value)[:70]


def outcome(
    config: dict[str, Any], directory: Path, *, always: bool = False
) -> Outcome:
    """What comes of a configuration; with `always`, refusals too are held against transformers."""
    directory.mkdir(exist_ok=True)
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    refusal = None
    try:
        spec = load_hf_config(file)
    except MagicdecError as error:
        refusal = str(error).replace(str(file), "")
        if not always or "\n" in refusal:
            return Outcome("different" if "\n" in refusal else "refused", refusal)
    except Exception as error:
        return Outcome("different", f"a traceback: {error!r}")
    theirs = _theirs(
        directory, config, is_run=refusal is not None or why_not_run(spec) is None
    )
    if refusal is not None:
        return Outcome(
            "refused", refusal if isinstance(theirs, str) else f"valid: {refusal}"
        )
    if isinstance(theirs, int):
        return Outcome(
            *(
                ("equal", "")
                if spec.num_parameters == theirs
                else ("different", "other weights")
            )
        )
    try:
        engine = Engine(load_model(directory), batch_size=1, max_len=40)
        engine.prefill([PROMPT[: 1 - COMPARED]])
        ours = engine.forward(torch.tensor([PROMPT[-COMPARED:]]))[0]
    except MagicdecError as error:
        return Outcome("refused", str(error).replace(str(directory), ""))
    except Exception as error:
        return Outcome("different", f"a traceback: {error!r}")
    if isinstance(theirs, str):
        return Outcome("different", f"transformers cannot load it: {theirs}")
    gap = float((ours - theirs).abs().max())
    return (
        Outcome("equal", "")
        if gap < TOLERANCE
        else Outcome("different", f"logits differ by {gap:.2g}")
    )


def _theirs(
    directory: Path, config: dict[str, Any], *, is_run: bool
) -> torch.Tensor | int | str:
    """transformers' logits, or its number of weights where ours is not run; or why it loads nothing."""
    torch.manual_seed(0)
    try:
        read = AutoConfig.from_pretrained(directory)
        read._attn_implementation = read._experts_implementation = "eager"
        if not is_run:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(read)
            model.tie_weights()
            buffers = [
                value
                for name, value in model.named_buffers()
                if "correction_bias" in name
            ]
            return sum(each.numel() for each in (*model.parameters(), *buffers))
        model = randomize(AutoModelForCausalLM.from_config(read).eval().float())
        model.save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps(config))
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT]), use_cache=False).logits[
                0, -COMPARED:
            ]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return logits if bool(logits.isfinite().all()) else "logits that are not finite"


def chosen(name: str, seed: int, sample: int | None) -> list[Flip]:
    every = list(flips(name, seed))
    rng = random.Random(zlib.crc32(f"{name}{seed}".encode()))
    return (
        every
        if sample is None or sample >= len(every)
        else [every[0], *rng.sample(every[1:], sample)]
    )


def outcomes(
    name: str, *, seed: int = 0, sample: int | None = None, always: bool = False
) -> Iterator[tuple[str, Outcome]]:
    """Each flip's change, and what came of it."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for flip in chosen(name, seed, sample):
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            yield (
                flip.change,
                outcome(flip.config, Path(directory) / "a", always=always),
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--valid", action="store_true")
    options = parser.parse_args()
    total: dict[str, int] = dict.fromkeys(("equal", "refused", "different"), 0)
    print(f"{'architecture':32}{'equal':>8}{'refused':>9}{'different':>11}")
    for name in options.names:
        found: dict[str, int] = dict.fromkeys(total, 0)
        for change, (kind, why) in outcomes(
            name, seed=options.seed, sample=options.sample, always=options.valid
        ):
            found[kind] += 1
            if kind == "different" or why.startswith("valid:"):
                print(f"  {name}: {change}: {why}", flush=True)
        print(
            f"{name:32}{found['equal']:8}{found['refused']:9}{found['different']:11}",
            flush=True,
        )
        total = {kind: total[kind] + found[kind] for kind in total}
    print(f"{'all':32}{total['equal']:8}{total['refused']:9}{total['different']:11}")


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with contextlib.suppress(KeyboardInterrupt):
        main()
