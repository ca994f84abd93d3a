"""`magicdec plan --logs`: a plan from logged requests alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.commands.options import OutputFormat, require
from magicdec.commands.plan import PlanOptions
from magicdec.commands.request_form import values_of
from magicdec.errors import ConfigError
from magicdec.files import write_atomic
from magicdec.progress import shown_progress
from magicdec.specs.speculation import LOOKUP_METHODS

if TYPE_CHECKING:
    from magicdec.logs.load import LogLoad
    from magicdec.perfmodel.acceptance import ReplayedProfile

READ_FROM_LOGS = ("requests", "workload", "cached")
"""Options that a log answers, and that therefore may not be given with one."""
RULES = {"ngram": "ngram", "suffix": "suffix"}
"""The rule that is replayed for each look-up of a plan."""
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


def options_from_logs(asked: PlanOptions, logs: list[str]) -> dict[str, Any]:
    """Return the options of a plan that the logs answer, and write what they were read into.

    Where the answer is a table, prints what was read, what was not, and what is assumed instead.

    Raises:
        ConfigError: an option is given that the logs answer, or they cannot be read.
    """
    for name in READ_FROM_LOGS:
        require(not getattr(asked, name), f"--logs says it: leave --{name} out")
    from magicdec.commands.logs import dataset_of, print_account
    from magicdec.logs.load import read_load
    from magicdec.logs.sources import files_of

    files = files_of(logs)
    folder = Path(f"{dataset_of(files[:1])}.magicdec")
    says = asked.output_format is OutputFormat.TABLE
    room_tokens = cache_room(asked)
    with shown_progress(False) as show:
        load = read_load(
            files,
            tokenizer=asked.tokenizer,
            room_tokens=room_tokens,
            progress=show,
        )
        profiles = _replayed(files, asked, dataset_of(files))
    if says:
        print_account(load.account, num_files=len(files))
        _print_load(load, asked.batch)
    own = [str(path) for path in asked.acceptance or ()]
    answered: dict[str, Any] = {
        "acceptance": [*own, *_written(profiles, folder, says=says)]
    }
    if load.arrival_s is not None and load.arrival_s[-1] > 0.0:
        path = folder / "requests.csv"
        write_atomic(path, load.requests_csv())
        answered["requests"] = str(path)
        if says:
            print(f"wrote {path}")
    else:
        answered["workload"] = load.workload
        if load.hit_share:
            answered["cached"] = f"{load.hit_share:.1%}"
    return answered


def cache_room(asked: PlanOptions) -> int | None:
    """Tokens that the cache of one replica holds, by the plan's model and device; None where the
    model does not fit as it is asked for.
    """
    from magicdec.errors import CapacityError
    from magicdec.perfmodel.plan.request import lengths_of, resolve
    from magicdec.perfmodel.planner import request_of
    from magicdec.specs.catalog import load_model_spec
    from magicdec.specs.model import ModelSpec

    request = request_of(**values_of(asked, OF_CACHE_ROOM), draft="none")
    model = request.model
    if not isinstance(model, ModelSpec):
        model = load_model_spec(model)
    try:
        lengths = lengths_of(request)[0]
        device = resolve(request, model, request.hardware[0], [], lengths)[0]
        batch = float(device.largest_batches().max(initial=0))
    except (CapacityError, ConfigError):
        return None
    tokens = batch * lengths.max_len(1.0)
    return int(tokens) or None


def _replayed(
    files: list[Path],
    asked: PlanOptions,
    dataset: str,
) -> list[ReplayedProfile]:
    """Profiles of the look-ups that the plan considers; none where a request decodes no step."""
    if asked.acceptance_rate is not None or asked.accept_length is not None:
        return []
    if asked.draft is None:
        rules = list(RULES.values())
    elif asked.draft in LOOKUP_METHODS:
        rules = [RULES[asked.draft]]
    else:
        return []
    from magicdec.logs.profiles import profiles_of, sweep
    from magicdec.logs.replay import replay_logs
    from magicdec.logs.sources import cpu_count

    replay = replay_logs(
        files, sweep(rules), tokenizer=asked.tokenizer, jobs=cpu_count()
    )
    if not any(counts.num_steps for counts in replay.settings):
        return []
    return profiles_of(replay, model=asked.model, dataset=dataset)


def _written(profiles: list[ReplayedProfile], folder: Path, *, says: bool) -> list[str]:
    from magicdec.perfmodel.acceptance import save_profile

    paths = []
    for profile in profiles:
        path = folder / f"acceptance.{profile.draft_method}.json"
        save_profile(profile, path)
        paths.append(str(path))
        setting = profile.replay.setting
        place = setting.gammas.index(profile.replay.gamma)
        if says:
            print(
                f"{profile.draft}: {setting.tokens_per_step[place]:.2f} tokens per step at gamma "
                f"{profile.replay.gamma}, replayed; wrote {path}"
            )
    return paths


def _print_load(load: LogLoad, batch: str | None) -> None:
    """Lines on the arrivals, the lengths and the prefix cache: read, or assumed instead."""
    import numpy as np

    low, middle, high = np.percentile(load.prompt_len, [10, 50, 90])
    out_low, out_middle, out_high = np.percentile(load.output_len, [10, 50, 90])
    print(
        f"lengths (10th, 50th, 90th percentile): prompts {low:.0f}, {middle:.0f}, {high:.0f}; "
        f"outputs {out_low:.0f}, "
        f"{out_middle:.0f}, {out_high:.0f}"
    )
    if load.arrival_s is not None and load.arrival_s[-1] > 0.0:
        rate = (len(load.arrival_s) - 1) / load.arrival_s[-1]
        print(
            f"arrivals: {rate:.3g} requests per second over {load.arrival_s[-1]:.0f} s"
        )
    else:
        print(
            f"arrivals: not in the log ({load.num_timed} of {len(load.prompt_len)} requests have a "
            "time); assumed "
            f"instead: a batch of {batch or 'the usual size'}, --rate for arrivals"
        )
    if load.num_counted:
        print(
            f"prefix cache: {load.hit_share:.0%} of the prompts' tokens, of {load.num_counted} "
            "requests as the engine "
            "counted them"
        )
        return
    if load.account.without_prompt == load.account.num_requests:
        print(
            "prefix cache: not known, the log has no prompts; assumed instead: nothing is found"
        )
        return
    room = "unknown room"
    if load.room_tokens is not None:
        room = f"room for {load.room_tokens} tokens"
    print(
        f"prefix cache: {load.hit_share:.0%} of the prompts' tokens would be found (blocks of "
        f"{load.block_tokens}, "
        f"{room}), replayed in the order of the log; where replicas share the load, each finds less"
    )
