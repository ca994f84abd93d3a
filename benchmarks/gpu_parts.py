"""The parts of benchmarks/gpu.py: each measures what the records do not hold yet."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from gpu_expected import expected_rows
from gpu_peer import transformers_part
from gpu_shapes import FULL, TINY, Item, Shapes, model_items
from gpu_table import print_report

from magicdec.calibrate import kernel_bench
from magicdec.calibrate.acceptance_bench import (
    AcceptanceRequest,
    fit_profiles,
    measure_acceptance,
)
from magicdec.calibrate.local_profile import (
    LocalProfile,
    load_local_profile,
    save_points,
)
from magicdec.calibrate.machine import Calibration, calibrate, device_in_catalog
from magicdec.errors import MagicdecError
from magicdec.files import write_atomic
from magicdec.measure.environment import available_memory_bytes
from magicdec.measure.rank import configuration_key
from magicdec.measure.repetitions import measure
from magicdec.measure.session import BenchmarkSession
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.schema.record import append_record, current_environment, read_records
from magicdec.specs.catalog import MODELS_DIRECTORY, load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.validate.grid import freeze_predictions, run_grid

MAIN_MODEL, SECOND_MODEL = "llama-3.1-8b", "llama-2-7b-32k"
TINY_CHANGES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "head_dim": 16,
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
    def published(self) -> Path:
        """The same predictions from the catalog's profile of the device."""
        return self.output / "published.jsonl"

    @property
    def seconds_left(self) -> float:
        return self.deadline_s - time.monotonic()

    def model_name(self, name: str) -> str:
        """The catalog's name, or a directory with the configuration of a tiny model of the same make."""
        if self.shapes is FULL or name == "embedded":
            return name
        config = (
            json.loads((MODELS_DIRECTORY / f"{name}.json").read_text()) | TINY_CHANGES
        )
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
    if (
        job.shapes is TINY and job.profile_path(MAIN_MODEL).exists()
    ):  # once is enough to try the commands
        profile = load_local_profile(job.profile_path(MAIN_MODEL))
        profile.save(path)
        return profile
    result = calibrate(
        model=model,
        device=job.device,
        dtype=job.dtype,
        rounds=job.shapes.rounds,
        quick=job.shapes.quick,
        progress=say,
    )
    profile = LocalProfile(
        hardware=result.hardware, engine=result.engine, acceptance=()
    )
    profile.save(path)
    save_points(result.points, path)
    job.note(
        f"calibration {name}", {"tiny": job.shapes is TINY} | calibration_facts(result)
    )
    release()
    return profile


def calibration_facts(result: Calibration) -> dict[str, Any]:
    launches = {
        f"{p.shape['graph_nodes']} graph nodes": p.time_s
        for p in result.points
        if p.table == "launch"
    }
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
                name: getattr(result.hardware, name).fit.relative_error
                for name in ("gemm", "attention", "elementwise")
            },
        },
        "seconds_per_kernel": launches,
    }


def calibrate_part(job: Job) -> None:
    calibrated(job, MAIN_MODEL, random_model(job, MAIN_MODEL))


def model_part(job: Job, name: str) -> bool:
    """The rows of the table that need a Llama model, and a grid with simulated acceptance. False where time was too
    short for all of it."""
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
    published = published_profile(job, profile)
    for item in items:
        freeze_predictions(
            [item.request], replace(profile, acceptance=(item.acceptance,)), job.records
        )
        if published is not None:
            freeze_predictions(
                [item.request],
                replace(published, acceptance=(item.acceptance,)),
                job.published,
            )
    return go_on(
        job,
        items,
        lambda item: measure_item(
            job, model, item, profile.hardware.memory_bytes_per_s
        ),
    )


def published_profile(job: Job, own: LocalProfile) -> LocalProfile | None:
    """What the catalog says of this device from published tables; a trial takes the H200's, whatever it runs on."""
    known = (
        load_hardware("h200")
        if job.shapes is TINY
        else device_in_catalog(own.hardware.name)
    )
    return (
        None
        if known is None
        else LocalProfile(hardware=known, engine=load_engine("ours"), acceptance=())
    )


def go_on(job: Job, items: list[Item], do: Callable[[Item], float]) -> bool:
    """Works the items off until the time is nearly over; those done before take none. An item is taken to last as long
    as the longest so far, by its work. Returns whether none is left."""
    pace = job.shapes.seconds_per_work
    for number, item in enumerate(items, 1):
        if pace * item.work > job.seconds_left:
            say(
                f"{len(items) - number + 1} of {len(items)} configurations are left: run this part again"
            )
            return False
        say(
            f"[{number}/{len(items)}] batch {item.request.batch_size}, context {item.request.context_len}: {item.what}"
        )
        elapsed_s = do(item)
        pace = max(pace, elapsed_s / item.work)
    return True


def measure_item(job: Job, model: Transformer, item: Item, bandwidth: float) -> float:
    """Measures what the records do not hold; returns how long that took."""
    started = time.monotonic()
    known = {r.key for r in read_records(job.records) if r.source == "measured"}
    request = item.request
    missing = tuple(
        s for s in request.speculations if configuration_key(request, s) not in known
    )
    if not missing:
        return 0.0
    session = BenchmarkSession(replace(request, speculations=missing), model=model)
    for record in measure(session, bandwidth_bytes_per_s=bandwidth):
        if record.is_speculative or record.key not in known:
            append_record(
                job.records,
                msgspec.structs.replace(
                    record, notes=[*record.notes, "caches of seeded noise"]
                ),
            )
    del session
    release()
    return time.monotonic() - started


def attention_facts(job: Job, name: str, model: Transformer) -> None:
    """Time of verification's attention over that of decoding, by gamma, at the shape of the table."""
    batch, context = job.shapes.attention_case
    slot_bytes = (
        model.spec.kv_elements_per_token()
        / model.spec.num_hidden_layers
        * model.dtype.itemsize
    )
    batch = max(
        1,
        min(
            batch,
            int(0.4 * available_memory_bytes(job.device) / (slot_bytes * context)),
        ),
    )
    lengths = range(1, 9)
    works = kernel_bench.attention_works(
        model.spec,
        device=job.device,
        dtype=job.dtype,
        shapes=((batch, context),),
        query_lengths=tuple(lengths),
    )
    points = kernel_bench.time_interleaved(works, device=job.device, rounds=5)
    seconds = {point.shape["query_len"]: point.time_s for point in points}
    job.note(
        f"attention {name}",
        {
            "batch_size": batch,
            "context_len": context,
            "decode_s": seconds[1],
            "verify_over_decode": {
                str(n - 1): seconds[n] / seconds[1] for n in lengths if n > 1
            },
            "bytes_per_s": slot_bytes * batch * context / seconds[1],
        },
    )


def embedded_part(job: Job) -> None:
    """Real acceptance: profiled on other prompts and contexts than those of the grid."""
    grid = msgspec.structs.replace(
        job.shapes.embedded_grid, device=job.device, dtype=job.dtype
    )
    path = job.profile_path("embedded")
    if not path.exists():
        request = AcceptanceRequest(
            device=job.device, dtype=job.dtype, **job.shapes.embedded_acceptance
        )
        model = load_model("embedded", device=job.device, dtype=job.dtype)
        machine = calibrated(job, "embedded-steps", model)
        counts = measure_acceptance(request, progress=say)
        replace(machine, acceptance=tuple(fit_profiles(request, counts))).save(path)
        del model
        release()
    run_grid(grid, profile=load_local_profile(path), records=job.records, progress=say)


def run_parts(names: Sequence[str], options: argparse.Namespace) -> None:
    """Runs the parts in this order, and prints the table of all that is there; which are unfinished, its last line
    says."""
    job = Job(
        output=options.output,
        device=options.device,
        dtype=options.dtype,
        shapes=TINY if options.tiny else FULL,
        deadline_s=time.monotonic() + 60 * options.minutes,
        cuda_graphs=options.cuda_graphs,
    )
    parts: dict[str, Callable[[], bool | None]] = {
        "calibrate": lambda: calibrate_part(job),
        MAIN_MODEL: lambda: model_part(job, MAIN_MODEL),
        SECOND_MODEL: lambda: model_part(job, SECOND_MODEL),
        "embedded": lambda: embedded_part(job),
        "transformers": lambda: transformers_part(job, job.model_name(MAIN_MODEL)),
        "report": lambda: None,
    }
    unfinished = []
    try:
        for name in names:
            say(f"part {name}")
            if parts[name]() is False:
                unfinished.append(name)
            release()
        path = job.profile_path(MAIN_MODEL)
        known = (
            device_in_catalog(load_local_profile(path).hardware.name)
            if path.exists()
            else None
        )
        expected = {} if known is None else expected_rows(known.name)
        print_report(
            job.output,
            [MAIN_MODEL, SECOND_MODEL],
            is_tiny=options.tiny,
            unfinished=unfinished,
            expected=expected,
        )
    except MagicdecError as error:
        sys.exit(f"error: {error}")
