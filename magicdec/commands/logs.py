"""`magicdec profile-acceptance --outputs`: what look-ups and draft models accept on logged
requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.commands import options
from magicdec.counts import Z_90
from magicdec.errors import ConfigError
from magicdec.naming import METHODS
from magicdec.progress import shown_progress
from magicdec.specs.speculation import HEAD_METHODS, SELF
from magicdec.units import MIB, format_count, format_seconds, printable

if TYPE_CHECKING:
    from magicdec.commands.profile_acceptance import ProfileOptions
    from magicdec.logs.replay import LogReplay
    from magicdec.logs.requests import Account
    from magicdec.perfmodel.acceptance import ReplayedProfile
    from magicdec.perfmodel.acceptance.replayed import RangeOfSteps, Replay

KEEP_ABOVE_BYTES = 512 * MIB
"""Size of logs above which the counts of finished parts are kept, to go on from."""
SHOWN_SETTINGS = 4
SHOWN_GAMMAS = (1, 2, 3, 4, 5, 8, 12, 16, 24)


@dataclass(frozen=True, kw_only=True)
class LogRequest:
    """A request to profile acceptance from logs."""

    outputs: tuple[str, ...]
    drafts: tuple[str, ...]
    output: Path
    model: str
    tokenizer: Path | None
    gammas: tuple[int, ...]
    lookup_min: tuple[int, ...]
    lookup_max: tuple[int, ...]
    max_model_len: int
    jobs: int | None
    dtype: str
    device: str
    quiet: bool

    @classmethod
    def of(cls, asked: ProfileOptions, outputs: list[str]) -> LogRequest:
        """From the options' texts. Raises ConfigError for a list that is none."""
        drafts = asked.draft
        if drafts == SELF:
            drafts = "ngram,suffix"
        return cls(
            outputs=tuple(outputs),
            drafts=tuple(drafts.split(",")),
            output=asked.output,
            model=asked.model,
            tokenizer=asked.tokenizer,
            gammas=_whole_numbers(asked.gammas, "--gammas"),
            lookup_min=_whole_numbers(asked.lookup_min, "--lookup-min"),
            lookup_max=_whole_numbers(asked.lookup_max, "--lookup-max"),
            max_model_len=asked.max_model_len or 0,
            jobs=asked.jobs,
            dtype=asked.dtype,
            device=asked.device,
            quiet=asked.quiet,
        )


def _whole_numbers(text: str | None, name: str) -> tuple[int, ...]:
    if text is None:
        return ()
    return tuple(options.parse_ints(text, name))


def profile_logs(request: LogRequest) -> None:
    """Profile every draft of a request on its logs; print the profiles, and write them."""
    rules, models = _sorted_drafts(request.drafts)
    profiles: list[tuple[ReplayedProfile, str]] = []
    if rules:
        profiles += _profile_lookups(request, rules)
    for draft in models:
        profiles.append(_profile_model(request, draft))
    _write(request, profiles)


def _sorted_drafts(drafts: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Look-up rules and draft models. Raises ConfigError for a draft that no log can replay."""
    from magicdec.logs.lookups import RULES

    rules = []
    models = []
    for draft in drafts:
        name = draft.strip()
        if name in RULES:
            rules.append(name)
        elif name in HEAD_METHODS:
            raise ConfigError(
                f"{METHODS[name].text} reads the target's hidden states, which no log holds: run "
                "it, and read the "
                f"server's counters: magicdec observe http://HOST:PORT --draft {name} -o "
                "acceptance.json"
            )
        elif name in (SELF, *METHODS):
            raise ConfigError(
                f"draft {name} runs the target on a part of its cache, which no log holds: leave "
                "--outputs out "
                "to measure it with the target's checkpoint"
            )
        else:
            models.append(name)
    return rules, models


def _profile_lookups(
    request: LogRequest, rules: list[str]
) -> list[tuple[ReplayedProfile, str]]:
    try:
        import numba  # noqa: F401  # the replays' only compiled dependency
    except ImportError:
        raise ConfigError(
            "replaying logs needs a package: pip install 'magicdec[logs]'"
        ) from None
    from magicdec.logs.parts import Parts
    from magicdec.logs.profiles import profiles_of, sweep
    from magicdec.logs.replay import replay_logs
    from magicdec.logs.sources import cpu_count, files_of

    files = files_of(request.outputs)
    total = sum(file.stat().st_size for file in files)
    keep = None
    if total > KEEP_ABOVE_BYTES:
        keep = Parts(request.output.with_suffix(".parts"))
    lookups = sweep(
        rules,
        gammas=request.gammas,
        min_ngrams=request.lookup_min,
        max_ngrams=request.lookup_max,
    )
    with shown_progress(request.quiet) as show:
        replay = replay_logs(
            files,
            lookups,
            tokenizer=request.tokenizer,
            max_len=request.max_model_len,
            jobs=request.jobs or cpu_count(),
            keep=keep,
            progress=show,
        )
    profiles = profiles_of(replay, model=request.model, dataset=dataset_of(files))
    print_account(replay.account, num_files=len(files))
    _print_pace(replay)
    for profile in profiles:
        _print_replay(profile.replay, max_len=request.max_model_len)
    if keep is not None:
        keep.remove()
    return [(profile, rule) for profile, rule in zip(profiles, rules, strict=True)]


def _profile_model(request: LogRequest, draft: str) -> tuple[ReplayedProfile, str]:
    """One prefill of the draft over every logged text."""
    try:
        import torch  # noqa: F401  # the runtime's
    except ImportError:
        raise ConfigError(
            "replaying a draft model needs torch: pip install 'magicdec[run]'"
        ) from None
    from magicdec.logs.draft_model import ModelReplay
    from magicdec.logs.lookups import DRAFT_MODEL, Lookup
    from magicdec.logs.profiles import MODEL_GAMMAS, profiles_of
    from magicdec.logs.replay import replay_draft_model
    from magicdec.logs.sources import files_of
    from magicdec.measure.environment import bind_threads

    bind_threads()
    files = files_of(request.outputs)
    gammas = request.gammas or MODEL_GAMMAS
    lookups = [Lookup(rule=DRAFT_MODEL, gamma=gamma) for gamma in gammas]
    with shown_progress(request.quiet) as show:
        replays = ModelReplay(
            draft, lookups, dtype=request.dtype, device=request.device
        )
        replay = replay_draft_model(
            files,
            replays,
            lookups,
            tokenizer=request.tokenizer,
            max_len=request.max_model_len,
            progress=show,
        )
    name = replays.model.spec.name
    profile = profiles_of(
        replay, model=request.model, dataset=dataset_of(files), draft=draft
    )[0]
    print_account(replay.account, num_files=len(files))
    _print_pace(replay)
    options.print_fault(profile.fault)
    print(
        f"draft {name}: exact where the engine drafts greedily (vLLM's V1 runner, at every "
        "temperature); where it "
        "samples its drafts, run it and read its counters: magicdec observe"
    )
    _print_replay(profile.replay, max_len=request.max_model_len)
    return profile, draft


def dataset_of(files: list[Path]) -> str:
    """Return a name for some files: the only one's, or the first and how many more."""
    name = files[0].name.split(".")[0]
    if len(files) == 1:
        return name
    return f"{name} and {len(files) - 1} more"


def print_account(account: Account, *, num_files: int) -> None:
    """Print what was read, what was not, and what is assumed of it."""
    kinds = ", ".join(f"{count} {name}" for name, count in account.formats.items())
    print(
        f"read {format_count(account.num_requests, 'request')} of {format_count(num_files, 'file')} "
        f"({kinds}): "
        f"{account.prompt_tokens:,} prompt and {account.output_tokens:,} output tokens"
    )
    for reason, count in account.unreadable.items():
        named = "; ".join(account.examples.get(reason, []))
        print(
            printable(
                f"not read: {count} of {account.num_rows} rows, {reason} ({named})"
            )
        )
    if account.without_prompt:
        print(
            f"{account.without_prompt} requests have no prompt in the log: look-ups into it are "
            "missed, so what is "
            "accepted is a lower bound"
        )
    if account.lengths_only:
        print(
            f"{account.lengths_only} requests have lengths alone, and cannot be replayed"
        )
    if account.tokenized:
        line = (
            f"{account.tokenized} requests are text, tokenized here: the engine's own ids may "
            "differ"
        )
        if account.recounted:
            line += (
                f"; {account.recounted_alike} of {account.recounted} outputs have as many tokens "
                "as the engine "
                "counted"
            )
        print(line)


def _print_pace(replay: LogReplay) -> None:
    account = replay.account
    pace = replay.replayed_tokens / max(replay.replay_s, 1e-9)
    line = (
        f"{format_count(len(replay.settings), 'setting')} in {format_seconds(replay.elapsed_s)}; replays alone "
        f"{format_seconds(replay.replay_s)}, {pace / 1e6:.1f} M tokens per second and setting"
    )
    if account.tokenizing_s:
        line += f"; tokenizing {format_seconds(account.tokenizing_s)}"
    print(line)


def _print_replay(replay: Replay, *, max_len: int) -> None:
    """The best settings by gamma, the chosen one's ranges, and what the log leaves open."""
    print(f"\n{replay.rule}: tokens per step (drafted tokens per step)")
    _print_settings(replay)
    _print_error(replay)
    _print_ranges("context", replay.by_context)
    _print_ranges("output token", replay.by_output)
    if replay.not_determined:
        print(
            f"  not in any log: of {replay.not_determined} drafted tokens beyond the ends of "
            "outputs the engine may "
            "have accepted some; they are not counted"
        )
    if not max_len:
        print(
            "  drafts near the engine's longest sequence are cut: --max-model-len, if outputs come "
            "near it"
        )


def _print_settings(replay: Replay) -> None:
    chosen = replay.setting
    others = [setting for setting in replay.settings if setting is not chosen]
    others.sort(key=lambda setting: max(setting.tokens_per_step), reverse=True)
    gammas = [
        gamma for gamma in SHOWN_GAMMAS if gamma in chosen.gammas
    ] or chosen.gammas
    print("  gamma      " + "".join(f"{gamma:>15}" for gamma in gammas))
    for setting in [chosen, *others[:SHOWN_SETTINGS]]:
        label = f"{setting.min_ngram}..{setting.max_ngram}"
        if not setting.max_ngram:
            label = "all"
        mark = "*" if setting is chosen else " "
        cells = []
        for gamma in gammas:
            tokens = float(setting.tokens_at(gamma))
            drafted = float(setting.drafted_at(gamma))
            cells.append(f"{tokens:.2f} ({drafted:.2f})".rjust(15))
        print(f"  {mark} {label:<9}" + "".join(cells))


def _print_error(replay: Replay) -> None:
    setting = replay.setting
    place = setting.gammas.index(replay.gamma)
    need = "one request tells no error"
    if replay.requests_for_5_percent is not None:
        need = f"± 5 % takes {format_count(replay.requests_for_5_percent, 'request')}, there are {replay.requests}"
    half = Z_90 * setting.tokens_stderr[place]
    print(
        f"  at gamma {replay.gamma}: {setting.tokens_per_step[place]:.3f} ± {half:.3f} (90 %, by "
        "request), "
        f"{setting.drafted_share[place]:.0%} of {replay.steps} steps have a draft; {need}"
    )


def _print_ranges(title: str, rows: list[RangeOfSteps]) -> None:
    cells = []
    for row in rows:
        upto = "beyond" if row.upto is None else f"≤ {row.upto}"
        cells.append(f"{upto} {row.tokens_per_step:.2f}")
    print(f"  by {title}: {', '.join(cells)}")


def _write(request: LogRequest, profiles: list[tuple[ReplayedProfile, str]]) -> None:
    """Write each profile next to the output, and print the plan that takes them."""
    from magicdec.calibrate.local_profile import acceptance_path
    from magicdec.perfmodel.acceptance import save_profile

    files = []
    for profile, name in profiles:
        path = acceptance_path(request.output, profile.draft_method, draft=name)
        save_profile(profile, path)
        print(f"wrote {path}")
        files.append(path)
    draft = profiles[0][0].draft if len(profiles) == 1 else None
    command = options.command(
        "plan", model=request.model, draft=draft, acceptance=files
    )
    print(f"next: {command}")
