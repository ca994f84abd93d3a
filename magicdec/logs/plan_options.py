"""Options of a plan that logged requests answer: arrivals, lengths, cached prefixes, and what look-ups accept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from magicdec.errors import CapacityError, ConfigError
from magicdec.files import write_atomic
from magicdec.logs.load import LogLoad, read_load
from magicdec.logs.profiles import profiles_of, sweep
from magicdec.logs.replay import replay_logs
from magicdec.logs.sources import cpu_count, dataset_of
from magicdec.perfmodel.acceptance.files import save_profile
from magicdec.perfmodel.acceptance.replayed import ReplayedProfile
from magicdec.perfmodel.plan.request import PlanRequest, lengths_of, resolve
from magicdec.perfmodel.planner import request_of
from magicdec.progress import shown_progress
from magicdec.specs.catalog import load_model_spec
from magicdec.specs.model import ModelSpec
from magicdec.specs.speculation import LOOKUP_METHODS

READ_FROM_LOGS = ("requests", "workload", "cached")
"""Options that a log answers, and that therefore may not be given with one."""
OF_CACHE_ROOM = (
    "model",
    "hardware",
    "engine",
    "tp",
    "gpus",
    "weight_dtype",
    "kv_dtype",
)
"""Options that decide how many tokens a replica's cache holds."""


def options_of_logs(
    files: list[Path],
    stated: dict[str, Any],
    *,
    batch: str | None,
    tokenizer: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the options of a plan that logs answer, and write what they were read into.

    `stated` are the plan's other options, `batch` is the text of one of them. `say` hears what was
    read, what was not, and what is assumed instead.

    Raises:
        ConfigError: the logs cannot be read.
    """
    folder = Path(f"{dataset_of(files[:1])}.magicdec")
    request = request_of(
        **{name: stated[name] for name in OF_CACHE_ROOM if name in stated}, draft="none"
    )
    model = request.model
    if not isinstance(model, ModelSpec):
        model = load_model_spec(model)
    with shown_progress(False) as show:
        load = read_load(
            files,
            tokenizer=tokenizer,
            room_tokens=cache_room(request, model),
            progress=show,
        )
        profiles = _replayed(files, stated, str(request.model), tokenizer)
    for line in load.account.lines(num_files=len(files)):
        say(line)
    for line in _load_lines(load, batch):
        say(line)
    acceptance = [str(path) for path in stated.get("acceptance") or ()]
    for profile in profiles:
        path = folder / f"acceptance.{profile.draft_method}.json"
        save_profile(profile, path)
        acceptance.append(str(path))
        setting = profile.replay.setting
        place = setting.gammas.index(profile.replay.gamma)
        say(
            f"{profile.draft}: {setting.tokens_per_step[place]:.2f} tokens per step at gamma "
            f"{profile.replay.gamma}, replayed; wrote {path}"
        )
    answered: dict[str, Any] = {"acceptance": acceptance}
    if load.arrival_s is not None and load.arrival_s[-1] > 0.0:
        path = folder / "requests.csv"
        write_atomic(path, load.requests_csv())
        answered["requests"] = str(path)
        say(f"wrote {path}")
    else:
        answered["workload"] = load.workload
        if load.hit_share:
            answered["cached"] = f"{load.hit_share:.1%}"
    return answered


def cache_room(request: PlanRequest, model: ModelSpec) -> int | None:
    """Tokens that the cache of one replica holds on the first device; None where the model does not fit
    as it is asked for.
    """
    try:
        lengths = lengths_of(request)[0]
        device = resolve(request, model, request.hardware[0], [], lengths)[0]
        batch = float(device.largest_batches().max(initial=0))
    except (CapacityError, ConfigError):
        return None
    tokens = batch * lengths.max_len(1.0)
    return int(tokens) or None


def _replayed(
    files: list[Path], stated: dict[str, Any], model: str, tokenizer: Path | None
) -> list[ReplayedProfile]:
    """Profiles of the look-ups that the plan considers; none where a request decodes no step."""
    if (
        stated.get("acceptance_rate") is not None
        or stated.get("accept_length") is not None
    ):
        return []
    draft = stated.get("draft")
    if draft is None:
        rules = list(LOOKUP_METHODS)
    elif draft in LOOKUP_METHODS:
        rules = [draft]
    else:
        return []
    replay = replay_logs(files, sweep(rules), tokenizer=tokenizer, jobs=cpu_count())
    if not any(counts.num_steps for counts in replay.settings):
        return []
    return profiles_of(replay, model=model, dataset=dataset_of(files))


def _load_lines(load: LogLoad, batch: str | None) -> list[str]:
    """Lines on the arrivals, the lengths and the prefix cache: read, or assumed instead."""
    lines = []
    low, middle, high = np.percentile(load.prompt_len, [10, 50, 90])
    out_low, out_middle, out_high = np.percentile(load.output_len, [10, 50, 90])
    lines.append(
        f"lengths (10th, 50th, 90th percentile): prompts {low:.0f}, {middle:.0f}, {high:.0f}; "
        f"outputs {out_low:.0f}, "
        f"{out_middle:.0f}, {out_high:.0f}"
    )
    if load.arrival_s is not None and load.arrival_s[-1] > 0.0:
        rate = (len(load.arrival_s) - 1) / load.arrival_s[-1]
        lines.append(
            f"arrivals: {rate:.3g} requests per second over {load.arrival_s[-1]:.0f} s"
        )
    else:
        lines.append(
            f"arrivals: not in the log ({load.num_timed} of {len(load.prompt_len)} requests have a "
            "time); assumed "
            f"instead: a batch of {batch or 'the usual size'}, --rate for arrivals"
        )
    if load.num_counted:
        lines.append(
            f"prefix cache: {load.hit_share:.0%} of the prompts' tokens, of {load.num_counted} "
            "requests as the engine "
            "counted them"
        )
        return lines
    if load.account.without_prompt == load.account.num_requests:
        lines.append(
            "prefix cache: not known, the log has no prompts; assumed instead: nothing is found"
        )
        return lines
    room = "unknown room"
    if load.room_tokens is not None:
        room = f"room for {load.room_tokens} tokens"
    lines.append(
        f"prefix cache: {load.hit_share:.0%} of the prompts' tokens would be found (blocks of "
        f"{load.block_tokens}, "
        f"{room}), replayed in the order of the log; where replicas share the load, each finds less"
    )
    return lines
