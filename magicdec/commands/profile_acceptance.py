"""`magicdec profile-acceptance`: how much of a draft is accepted, measured with a model here or
replayed on logged requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from magicdec.commands import options
from magicdec.commands.options import LOCAL_PROFILE, option, parse_ints, require
from magicdec.counts import Z_90
from magicdec.errors import ConfigError
from magicdec.naming import METHODS
from magicdec.progress import shown_progress
from magicdec.specs.speculation import HEAD_METHODS, SELF
from magicdec.units import format_count, format_seconds

if TYPE_CHECKING:
    from magicdec.logs.replay import LogReplay
    from magicdec.perfmodel.acceptance import MeasuredProfile, ReplayedProfile
    from magicdec.perfmodel.acceptance.replayed import RangeOfSteps, Replay

USUAL_BUDGETS = "64,128,256,512,1024"
SHOWN_SETTINGS = 4
SHOWN_GAMMAS = (1, 2, 3, 4, 5, 8, 12, 16, 24)
OF_LOGS = (
    "tokenizer",
    "gammas",
    "lookup_min",
    "lookup_max",
    "max_model_len",
    "jobs",
)
"""Options of logged requests, which a measurement does not take."""
EPILOG = options.examples(
    "profile-acceptance -o local.toml --draft-budget 64,256,1024",
    "profile-acceptance --model path/to/checkpoint --prompts texts/ --draft-method "
    "streamingllm,snapkv",
    "profile-acceptance --draft ngram --prompts recall",
    "profile-acceptance --outputs docs/samples/requests.jsonl --draft ngram,suffix",
)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of `magicdec profile-acceptance`: the acceptance to measure."""

    output: Annotated[
        Path,
        option(
            "PROFILE.toml; acceptance files are written next to it.", "--output", "-o"
        ),
    ] = LOCAL_PROFILE
    model: options.Checkpoint = "embedded"
    outputs: options.LoggedOutputs = None
    draft: Annotated[
        str,
        option(
            "self, ngram, a head's method or directory, or a draft model's checkpoint; with "
            "--outputs a list: ngram, suffix, other rules (docs/acceptance.md), a draft model."
        ),
    ] = SELF
    draft_model: Annotated[
        str | None,
        option("A trained head's directory; of --draft mtp: default, the target's."),
    ] = None
    tokenizer: options.LogTokenizer = None
    draft_method: Annotated[
        str | None,
        option(
            "streamingllm, snapkv, topk; a model's: full, streamingllm; a list measures each."
        ),
    ] = None
    draft_budget: Annotated[
        str | None,
        option("Budgets to measure of a sparse draft; default: 64,128,256,512,1024."),
    ] = None
    context: Annotated[str, option("Contexts to measure.")] = "4096"
    num_prompts: Annotated[int, option("Prompts per context.", min=2)] = 32
    gen_len: Annotated[
        int, option("Tokens to generate per prompt and budget.", min=1)
    ] = 64
    gamma: Annotated[int, option("Deepest position to measure.", min=1)] = 6
    temperature: options.Temperature = 1.0
    seed: Annotated[int, option("Seeds prompts and sampling.")] = 1
    prompts: Annotated[str, option("stdlib, recall, or a text file or directory.")] = (
        "stdlib"
    )
    dtype: options.Dtype = "float32"
    device: options.DeviceName = "cpu"
    gammas: Annotated[
        str | None,
        option("With --outputs: gammas to replay, a list; default: those in use."),
    ] = None
    lookup_min: Annotated[
        str | None,
        option("With --outputs: shortest n-grams to replay, a list; default: 1 to 5."),
    ] = None
    lookup_max: Annotated[
        str | None,
        option("With --outputs: longest n-grams to replay, a list; default: 3 to 8."),
    ] = None
    max_model_len: Annotated[
        int | None,
        option(
            "With --outputs: the engine's longest sequence, which cuts drafts.", min=2
        ),
    ] = None
    jobs: Annotated[
        int | None, option("With --outputs: processes; default: one per core.", min=1)
    ] = None
    quiet: options.Quiet = False


@options.asks(ProfileOptions)
def profile_acceptance_command(asked: ProfileOptions) -> None:
    """Measure how much of a draft is accepted, for `plan`.

    By position, budget and context, with real blocks; or, with --outputs, by replaying logged
    requests, without a model. `plan --acceptance` takes what is written.
    """
    if asked.outputs:
        _profile_logs(asked, asked.outputs)
        return
    for name in OF_LOGS:
        require(
            getattr(asked, name) is None,
            f"--{name.replace('_', '-')} goes with --outputs: it is of logged requests",
        )
    from magicdec.measure.environment import bind_threads

    bind_threads()
    from magicdec.calibrate.acceptance_bench import (
        AcceptanceRequest,
        fit_profiles,
        measure_acceptance,
    )
    from magicdec.calibrate.local_profile import acceptance_path
    from magicdec.perfmodel.acceptance import save_profile
    from magicdec.specs.known_heads import named_head

    draft = asked.draft
    draft_method = asked.draft_method
    head = named_head(asked.model, draft, asked.draft_model)
    if head is not None:
        require(
            asked.draft_budget is None,
            "profile-acceptance measures a head over its whole cache; leave --draft-budget out "
            "(run measures windows)",
        )
        draft = head.method
        draft_method = draft_method or head.method
    usual = {SELF: "streamingllm", "ngram": "ngram", "suffix": "suffix"}
    methods = draft_method or usual.get(draft, "full")
    request = AcceptanceRequest(
        model=asked.model,
        draft=draft,
        head=head,
        draft_methods=tuple(methods.split(",")),  # AcceptanceRequest checks each
        draft_budgets=tuple(
            parse_ints(asked.draft_budget or USUAL_BUDGETS, "--draft-budget")
        ),
        context_lens=tuple(parse_ints(asked.context, "--context")),
        num_prompts=asked.num_prompts,
        gen_len=asked.gen_len,
        gamma=asked.gamma,
        temperature=asked.temperature,
        seed=asked.seed,
        prompts=asked.prompts,
        dtype=asked.dtype,
        device=asked.device,
    )
    with shown_progress(asked.quiet) as show:
        counts = measure_acceptance(request, progress=show)
    files: list[Path] = []
    for profile in fit_profiles(request, counts):
        _print_profile(profile)
        path = acceptance_path(asked.output, profile.draft_method, draft=profile.draft)
        save_profile(profile, path)
        print(f"  wrote {path}")
        files.append(path)
    checkpoint = None
    if head is not None:
        checkpoint = head.checkpoint
    command = next_plan(
        asked.output,
        files,
        model=asked.model,
        draft=draft,
        draft_model=checkpoint,
        context=max(request.context_lens),
    )
    print(f"next: {command}")


def next_plan(
    profile: Path,
    acceptance: list[Path],
    *,
    model: str,
    draft: str,
    context: int,
    draft_model: str | None = None,
) -> str:
    """The plan with what was measured: the machine's files where they are there, and the
    acceptance.
    """
    from magicdec.calibrate.local_profile import engine_path

    own = {}
    if profile.is_file() and engine_path(profile).is_file():
        own = {"hardware": profile, "engine": engine_path(profile)}
    named = None
    if draft not in (SELF, "ngram"):
        named = draft
    return options.command(
        "plan",
        model=model,
        **own,
        draft=named,
        draft_model=draft_model,
        acceptance=acceptance,
        context=context,
    )


def _print_profile(profile: MeasuredProfile) -> None:
    """Counted rates with their 90 % intervals, the fitted law's rates, and the error of the law."""
    options.print_fault(profile.fault)
    print(
        f"{profile.draft_method}: accepted by position, ± half a 90 % interval (the law)"
    )
    for counted in profile.measured:
        law = profile.conditional_rates(
            budget=counted.budget,
            context=counted.context,
            gamma_max=len(counted.rates),
        )
        cells = []
        for rate, stderr, fitted in zip(
            counted.rates, counted.stderr, law, strict=True
        ):
            cells.append(f"{rate:.2f}±{Z_90 * stderr:.2f} ({fitted:.2f})")
        print(f"  {counted.budget:5.0f} at {counted.context:.0f}: {'  '.join(cells)}")
    if profile.held_out_error is not None:
        print(
            f"  error of the law on budgets left out {profile.held_out_error:.3f} (of its counts "
            "alone "
            f"{profile.held_out_noise:.3f}), spread between sequences {profile.spread:.3f}"
        )


def _profile_logs(asked: ProfileOptions, outputs: list[str]) -> None:
    """Replays every draft on the logs, prints the profiles, and writes them next to the output with the
    plan that takes them.
    """
    from magicdec.calibrate.local_profile import acceptance_path
    from magicdec.perfmodel.acceptance.files import save_profile

    drafts = asked.draft
    if drafts == SELF:
        drafts = "ngram,suffix"
    gammas = _whole_numbers(asked.gammas, "--gammas")
    min_ngrams = _whole_numbers(asked.lookup_min, "--lookup-min")
    max_ngrams = _whole_numbers(asked.lookup_max, "--lookup-max")
    rules, models = _sorted_drafts(drafts.split(","))
    profiles: list[tuple[ReplayedProfile, str]] = []
    if rules:
        profiles += _profile_lookups(
            asked,
            outputs,
            rules,
            gammas=gammas,
            min_ngrams=min_ngrams,
            max_ngrams=max_ngrams,
        )
    for draft in models:
        profiles.append(_profile_model(asked, outputs, draft, gammas))
    files = []
    for profile, name in profiles:
        path = acceptance_path(asked.output, profile.draft_method, draft=name)
        save_profile(profile, path)
        print(f"wrote {path}")
        files.append(path)
    only_draft = profiles[0][0].draft if len(profiles) == 1 else None
    command = options.command(
        "plan", model=asked.model, draft=only_draft, acceptance=files
    )
    print(f"next: {command}")


def _whole_numbers(text: str | None, name: str) -> tuple[int, ...]:
    if text is None:
        return ()
    return tuple(parse_ints(text, name))


def _sorted_drafts(drafts: list[str]) -> tuple[list[str], list[str]]:
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
    asked: ProfileOptions,
    outputs: list[str],
    rules: list[str],
    *,
    gammas: tuple[int, ...],
    min_ngrams: tuple[int, ...],
    max_ngrams: tuple[int, ...],
) -> list[tuple[ReplayedProfile, str]]:
    try:
        import numba  # noqa: F401  # the replays' only compiled dependency
    except ImportError:
        raise ConfigError(
            "replaying logs needs a package: pip install 'magicdec[logs]'"
        ) from None
    from magicdec.logs.profiles import profiles_of, sweep
    from magicdec.logs.replay import replay_logs
    from magicdec.logs.sources import cpu_count, dataset_of, files_of

    files = files_of(outputs)
    lookups = sweep(
        rules,
        gammas=gammas,
        min_ngrams=min_ngrams,
        max_ngrams=max_ngrams,
    )
    with shown_progress(asked.quiet) as show:
        replay = replay_logs(
            files,
            lookups,
            tokenizer=asked.tokenizer,
            max_len=asked.max_model_len or 0,
            jobs=asked.jobs or cpu_count(),
            progress=show,
        )
    profiles = profiles_of(replay, model=asked.model, dataset=dataset_of(files))
    for line in replay.account.lines(num_files=len(files)):
        print(line)
    _print_pace(replay)
    for profile in profiles:
        _print_replay(profile.replay, max_len=asked.max_model_len or 0)
    return [(profile, rule) for profile, rule in zip(profiles, rules, strict=True)]


def _profile_model(
    asked: ProfileOptions, outputs: list[str], draft: str, gammas: tuple[int, ...]
) -> tuple[ReplayedProfile, str]:
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
    from magicdec.logs.sources import dataset_of, files_of
    from magicdec.measure.environment import bind_threads

    bind_threads()
    files = files_of(outputs)
    lookups = [
        Lookup(rule=DRAFT_MODEL, gamma=gamma) for gamma in gammas or MODEL_GAMMAS
    ]
    with shown_progress(asked.quiet) as show:
        replays = ModelReplay(draft, lookups, dtype=asked.dtype, device=asked.device)
        replay = replay_draft_model(
            files,
            replays,
            lookups,
            tokenizer=asked.tokenizer,
            max_len=asked.max_model_len or 0,
            progress=show,
        )
    name = replays.model.spec.name
    profile = profiles_of(
        replay, model=asked.model, dataset=dataset_of(files), draft=draft
    )[0]
    for line in replay.account.lines(num_files=len(files)):
        print(line)
    _print_pace(replay)
    options.print_fault(profile.fault)
    print(
        f"draft {name}: exact where the engine drafts greedily (vLLM's V1 runner, at every "
        "temperature); where it "
        "samples its drafts, run it and read its counters: magicdec observe"
    )
    _print_replay(profile.replay, max_len=asked.max_model_len or 0)
    return profile, draft


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
