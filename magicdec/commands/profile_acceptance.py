"""`magicdec profile-acceptance`: how much of a draft is accepted, measured with a model here or
replayed on logged requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from magicdec.commands import options
from magicdec.commands.calibrate_machine import LOCAL_PROFILE
from magicdec.commands.options import option, parse_ints, require
from magicdec.progress import shown_progress
from magicdec.specs.speculation import SELF

if TYPE_CHECKING:
    from magicdec.perfmodel.acceptance import MeasuredProfile

USUAL_BUDGETS = "64,128,256,512,1024"
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
        from magicdec.commands.logs import LogRequest, profile_logs

        profile_logs(LogRequest.of(asked, asked.outputs))
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
    from magicdec.counts import Z_90

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
