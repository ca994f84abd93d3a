"""`magicdec calibrate` and `magicdec profile-acceptance`: measure this machine, and a model on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.commands.options import end_progress, parse_ints, progress_printer
from magicdec.units import format_bytes, format_rate, format_seconds

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")]
Model = Annotated[str, typer.Option(help="Catalog name, or a Hugging Face checkpoint directory.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]

CALIBRATE_EPILOG = """Examples:\n
  magicdec calibrate -o local.toml\n
  magicdec plan --model embedded --hardware local.toml --engine local.engine.toml --batch 32 --context 4096
"""
PROFILE_EPILOG = """Examples:\n
  magicdec profile-acceptance -o local.toml --draft-budget 64,256,1024\n
  magicdec profile-acceptance --model path/to/checkpoint --prompts texts/ --draft-method streamingllm,snapkv
"""


def calibrate_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Hardware profile to write (TOML).")] = Path(
        "local.toml"
    ),
    model: Model = "embedded",
    weights: Annotated[Literal["checkpoint", "random"], typer.Option(help="checkpoint, or random.")] = "checkpoint",
    dtype: Dtype = "float32",
    device: DeviceOption = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and rounds.")] = False,
    quiet: Quiet = False,
) -> None:
    """Micro-benchmark this machine: kernels and single engine steps, fitted to profiles that `plan` takes."""
    from magicdec.validate.environment import bind_threads

    bind_threads()
    from magicdec.files import check_writable
    from magicdec.validate.calibrate import calibrate
    from magicdec.validate.local_profile import LocalProfile

    check_writable(output)
    try:
        show = progress_printer(quiet)
        result = calibrate(model=model, weights=weights, dtype=dtype, device=device, quick=quick, progress=show)
    finally:
        end_progress(quiet)
    files = LocalProfile(hardware=result.hardware, engine=result.engine, acceptance=()).save(output)
    hardware = result.hardware
    rates = ", ".join(f"{format_rate(rate, 'FLOP')} {name}" for name, rate in hardware.flops_per_s.items())
    memory = f"{format_bytes(hardware.memory_bytes)} at {format_rate(hardware.memory_bytes_per_s, 'B')}"
    print(f"{hardware.name}: {memory}, {rates}")
    errors = ", ".join(f"{phase} {error:.1%}" for phase, error in result.phase_error.items())
    print(f"{len(result.points)} points in {format_seconds(result.elapsed_s)}; median error of the fit: {errors}")
    print(f"noise between rounds {result.noise:.1%}; drift of the reference kernel {result.drift:.1%}")
    if result.drift > 0.3:
        print("the machine's speed changed while it was measured; calibrate again when it is quieter")
    print("wrote " + ", ".join(map(str, files)))


def profile_acceptance_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="PROFILE.toml whose acceptance files are written beside it.")
    ] = Path("local.toml"),
    model: Model = "embedded",
    draft_method: Annotated[
        str, typer.Option(help="streamingllm, snapkv, topk; a list measures each.")
    ] = "streamingllm",
    draft_budget: Annotated[str, typer.Option(help="Budgets to measure.")] = "64,128,256,512,1024",
    context: Annotated[str, typer.Option(help="Contexts to measure.")] = "4096",
    num_prompts: Annotated[int, typer.Option(min=2, help="Prompts per context.")] = 16,
    gen_len: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt and budget.")] = 128,
    gamma: Annotated[int, typer.Option(min=1, help="Deepest position to measure.")] = 6,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seeds prompts and sampling.")] = 1,
    prompts: Annotated[str, typer.Option(help="stdlib, recall, or a text file or directory.")] = "stdlib",
    dtype: Dtype = "float32",
    device: DeviceOption = "cpu",
    quiet: Quiet = False,
) -> None:
    """Measure a checkpoint's acceptance by position, budget and context, for `plan --acceptance`."""
    from magicdec.validate.environment import bind_threads

    bind_threads()
    from magicdec.perfmodel.acceptance import save_profile
    from magicdec.validate.acceptance_profile import AcceptanceRequest, fit_profiles, measure_acceptance
    from magicdec.validate.local_profile import acceptance_path

    request = AcceptanceRequest(
        model=model,
        draft_methods=tuple(draft_method.split(",")),  # type: ignore[arg-type]  # SpeculationSpec checks each
        draft_budgets=tuple(parse_ints(draft_budget, "--draft-budget")),
        context_lens=tuple(parse_ints(context, "--context")),
        num_prompts=num_prompts,
        gen_len=gen_len,
        gamma=gamma,
        temperature=temperature,
        seed=seed,
        prompts=prompts,
        dtype=dtype,
        device=device,
    )
    try:
        rows = measure_acceptance(request, progress=progress_printer(quiet))
    finally:
        end_progress(quiet)
    for profile in fit_profiles(request, rows):
        for length in request.context_lens:
            for budget in request.draft_budgets:
                rates = profile.conditional_rates(budget=budget, context=length, gamma_max=gamma)
                fitted = " ".join(f"{rate:.3f}" for rate in rates)
                print(f"{profile.draft_method} {budget:5d} at {length}: {fitted}")
        path = acceptance_path(output, profile.draft_method)
        save_profile(profile, path)
        print(
            f"fit error (rms) {profile.fit_rms or 0:.3f}, spread between sequences {profile.spread:.3f}; wrote {path}"
        )
