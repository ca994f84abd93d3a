"""What decoding reaches on one GPU, and whether it was predicted: measured in parts of a few minutes each.

    python benchmarks/gpu.py --part calibrate        copy bandwidth, kernels, engine steps -> llama-3.1-8b.toml
    python benchmarks/gpu.py --part llama-3.1-8b     a grid of budgets, gammas and batches, and rows of the table
    python benchmarks/gpu.py --part llama-2-7b-32k   the same with that model's shapes, calibrated first
    python benchmarks/gpu.py --part embedded         the embedded model, with real acceptance
    python benchmarks/gpu.py --part transformers     autoregressive decoding beside transformers' generate()
    python benchmarks/gpu.py --part report           the comparison and the table from what is there

A part ends after `--minutes`, and goes on where it stopped when it is called again. The Llama models have random
weights, caches of seeded noise instead of a prefill, and acceptance simulated by a published profile or a stated rate:
each record says so. Every point is predicted from the calibration alone, and written down, before it is measured.
Left in `--output`: records.jsonl, the profiles with the timings behind them, facts.json (what is no decoding run),
comparison.json and table.md. Another call with the same `--output` needs what is there. scripts/ship_gpu_profile.py
makes a name of the catalog of it.

Without a GPU the same commands run with `--device cpu --tiny`, on models of a few thousand weights.

Needs the package's `run` extra, and Triton for attention on a GPU. transformers is needed for its own part only, which
says so and leaves its row open where it is missing; flash-attn is one more of its ways where installed. Nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from gpu_peer import transformers_part
from gpu_shapes import FULL, TINY, Item, Shapes, model_items
from gpu_table import print_report

from magicdec.calibrate import kernel_bench
from magicdec.calibrate.acceptance_bench import AcceptanceRequest
from magicdec.calibrate.local_profile import LocalProfile, load_local_profile, save_points
from magicdec.calibrate.machine import Calibration, calibrate, obtain_profile
from magicdec.errors import MagicdecError
from magicdec.files import write_atomic
from magicdec.measure.environment import available_memory_bytes
from magicdec.measure.repetitions import configuration_key, measure, to_record
from magicdec.measure.session import BenchmarkSession
from magicdec.records import append_record, current_environment, read_records
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.specs.catalog import MODELS_DIRECTORY, load_model_spec
from magicdec.specs.speculation import AUTOREGRESSIVE
from magicdec.validate.grid import freeze_predictions, run_grid

MAIN_MODEL, SECOND_MODEL = "llama-3.1-8b", "llama-2-7b-32k"
PARTS = ("calibrate", MAIN_MODEL, SECOND_MODEL, "embedded", "transformers", "report")
TINY_CHANGES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of the script."""

    output: Path
    device: str
    dtype: str
    shapes: Shapes
    deadline_s: float
    cuda_graphs: bool

    @property
    def records(self) -> Path:
        return self.output / "records.jsonl"

    @property
    def seconds_left(self) -> float:
        return self.deadline_s - time.monotonic()

    def model_name(self, name: str) -> str:
        """The catalog's name, or a directory with the configuration of a tiny model of the same make."""
        if self.shapes is FULL or name == "embedded":
            return name
        config = json.loads((MODELS_DIRECTORY / f"{name}.json").read_text()) | TINY_CHANGES
        if config["num_key_value_heads"] == config["num_attention_heads"]:
            config |= {"num_attention_heads": 4, "num_key_value_heads": 4}
        else:
            config |= {"num_attention_heads": 8, "num_key_value_heads": 2}
        directory = self.output / f"tiny-{name}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        return str(directory)

    def profile_path(self, name: str) -> Path:
        return self.output / f"{name}.toml"

    def note(self, key: str, value: Any) -> None:
        """Keeps a fact that is no decoding run."""
        path = self.output / "facts.json"
        facts = json.loads(path.read_text()) if path.exists() else {}
        write_atomic(path, json.dumps(facts | {key: value}, indent=1) + "\n")


def say(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def release() -> None:
    """Gives what is no longer used back to the device, so that what is free can be read."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def random_model(job: Job, name: str) -> Transformer:
    spec = load_model_spec(job.model_name(name))
    say(f"{spec.name}: {spec.num_parameters / 1e9:.3g} G random weights")
    return load_model(spec, weights="random", device=job.device, dtype=job.dtype)


def calibrated(job: Job, name: str, model: Transformer) -> LocalProfile:
    """The model's profile of this device, measured where there is none yet."""
    path = job.profile_path(name)
    if path.exists():
        return load_local_profile(path)
    result = calibrate(
        model=model, device=job.device, dtype=job.dtype, rounds=job.shapes.rounds, quick=job.shapes.quick, progress=say
    )
    profile = LocalProfile(hardware=result.hardware, engine=result.engine, acceptance=())
    profile.save(path)
    save_points(result.points, path)
    job.note(f"calibration {name}", {"tiny": job.shapes is TINY} | calibration_facts(result))
    release()
    return profile


def calibration_facts(result: Calibration) -> dict[str, Any]:
    launches = {f"{p.shape['graph_nodes']} graph nodes": p.time_s for p in result.points if p.table == "launch"}
    return {
        "environment": msgspec.to_builtins(current_environment()),
        "elapsed_s": result.elapsed_s,
        "num_points": len(result.points),
        "noise": result.noise,
        "memory_bytes_per_s": result.hardware.memory_bytes_per_s,
        "flops_per_s": dict(result.hardware.flops_per_s),
        "fit_error": {
            **result.phase_error,
            **{
                name: getattr(result.hardware, name).fit.relative_error for name in ("gemm", "attention", "elementwise")
            },
        },
        "seconds_per_kernel": launches,
    }


def calibrate_part(job: Job) -> None:
    calibrated(job, MAIN_MODEL, random_model(job, MAIN_MODEL))


def model_part(job: Job, name: str) -> None:
    """A grid with simulated acceptance, and the rows of the table that need a Llama model."""
    model = random_model(job, name)
    profile = calibrated(job, name, model)
    release()
    attention_facts(job, name, model)
    release()
    items = model_items(
        job.shapes,
        name=name,
        model_argument=job.model_name(name),
        spec=model.spec,
        device=job.device,
        dtype=job.dtype,
        free_bytes=available_memory_bytes(job.device),
        profile=profile,
        cuda_graphs=job.cuda_graphs,
    )
    for item in items:
        freeze_predictions([item.request], replace(profile, acceptance=(item.acceptance,)), job.records)
    go_on(job, items, lambda item: measure_item(job, model, item, profile.hardware.memory_bytes_per_s))


def go_on(job: Job, items: list[Item], do: Callable[[Item], float]) -> None:
    """Works the items off until the time is nearly over; those done before take none. An item is taken to last as long
    as the longest so far, by its work."""
    pace = job.shapes.seconds_per_work
    for number, item in enumerate(items, 1):
        if pace * item.work > job.seconds_left:
            say(f"{len(items) - number + 1} of {len(items)} configurations are left: run this part again")
            return
        say(f"[{number}/{len(items)}] batch {item.request.batch_size}, context {item.request.context_len}: {item.what}")
        elapsed_s = do(item)
        pace = max(pace, elapsed_s / item.work)


def measure_item(job: Job, model: Transformer, item: Item, bandwidth: float) -> float:
    """Measures what the records do not hold; returns how long that took."""
    started = time.monotonic()
    known = {r.key for r in read_records(job.records) if r.source == "measured"}
    request = item.request
    missing = tuple(s for s in request.speculations if configuration_key(request, s) not in known)
    if not missing:
        return 0.0
    session = BenchmarkSession(replace(request, speculations=missing), model=model)
    for measurement in measure(session):
        record = to_record(session, measurement, bandwidth_bytes_per_s=bandwidth)
        if measurement.speculation != AUTOREGRESSIVE or record.key not in known:
            append_record(job.records, msgspec.structs.replace(record, notes=[*record.notes, "caches of seeded noise"]))
    del session
    release()
    return time.monotonic() - started


def attention_facts(job: Job, name: str, model: Transformer) -> None:
    """Time of verification's attention over that of decoding, by gamma, at the shape of the table."""
    batch, context = job.shapes.attention_case
    slot_bytes = model.spec.kv_elements_per_token() / model.spec.num_hidden_layers * model.dtype.itemsize
    batch = max(1, min(batch, int(0.4 * available_memory_bytes(job.device) / (slot_bytes * context))))
    lengths = range(1, 9)
    works = kernel_bench.attention_works(
        model.spec, device=job.device, dtype=job.dtype, shapes=((batch, context),), query_lengths=tuple(lengths)
    )
    points = kernel_bench.time_interleaved(works, device=job.device, rounds=5)
    seconds = {point.shape["query_len"]: point.time_s for point in points}
    job.note(
        f"attention {name}",
        {
            "batch_size": batch,
            "context_len": context,
            "decode_s": seconds[1],
            "verify_over_decode": {str(n - 1): seconds[n] / seconds[1] for n in lengths if n > 1},
            "bytes_per_s": slot_bytes * batch * context / seconds[1],
        },
    )


def embedded_part(job: Job) -> None:
    """Real acceptance: profiled on other prompts and contexts than those of the grid."""
    grid = msgspec.structs.replace(job.shapes.embedded_grid, device=job.device, dtype=job.dtype)
    path = job.profile_path("embedded")
    if not path.exists():
        request = AcceptanceRequest(device=job.device, dtype=job.dtype, **job.shapes.embedded_acceptance)
        obtain_profile(
            "embedded", device=job.device, dtype=job.dtype, request=request, quick=job.shapes.quick, progress=say
        ).save(path)
        release()
    run_grid(grid, profile=load_local_profile(path), records=job.records, progress=say)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given several times; default: all")
    parser.add_argument("--output", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16; on a CPU float32"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts of this call together")
    parser.add_argument("--tiny", action="store_true", help="tiny models and shapes: the same commands, on any machine")
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    job = Job(
        output=options.output,
        device=options.device,
        dtype=options.dtype or ("float32" if options.device == "cpu" else "bfloat16"),
        shapes=TINY if options.tiny else FULL,
        deadline_s=time.monotonic() + 60 * options.minutes,
        cuda_graphs=options.cuda_graphs,
    )
    parts: dict[str, Callable[[], None]] = {
        "calibrate": lambda: calibrate_part(job),
        MAIN_MODEL: lambda: model_part(job, MAIN_MODEL),
        SECOND_MODEL: lambda: model_part(job, SECOND_MODEL),
        "embedded": lambda: embedded_part(job),
        "transformers": lambda: transformers_part(job, job.model_name(MAIN_MODEL)),
        "report": lambda: None,
    }
    try:
        for name in options.part or PARTS:
            say(f"part {name}")
            parts[name]()
            release()
        print_report(job.output, [MAIN_MODEL, SECOND_MODEL], is_tiny=options.tiny)
    except MagicdecError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
