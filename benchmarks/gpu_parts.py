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
from gpu_shapes import FULL, TINY, Item, Maker, Shapes, grid_items, headline_items
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
from magicdec.measure.rank import configuration_key, known_records
from magicdec.measure.repetitions import measure
from magicdec.measure.session import BenchmarkSession
from magicdec.measure.utilisation import (
    bandwidth_bytes_per_s,
    copy_bytes_per_s,
    is_cuda,
)
from magicdec.perfmodel.kernels.profile import load_hardware
from magicdec.runtime.transformer import Transformer
from magicdec.runtime.weights import load_model
from magicdec.schema.record import (
    Record,
    append_record,
    current_environment,
    read_rows,
    unfinished,
)
from magicdec.specs.catalog import MODELS_DIRECTORY, load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.speculation import AUTOREGRESSIVE
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
        facts = self.facts() | {key: value}
        write_atomic(self._facts_path, json.dumps(facts, indent=1) + "\n")

    def facts(self) -> dict[str, Any]:
        path = self._facts_path
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def _facts_path(self) -> Path:
        return self.output / "facts.json"


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
    model = random_model(job, MAIN_MODEL)
    calibrated(job, MAIN_MODEL, model)
    attention_facts(job, MAIN_MODEL, model)


def headline_part(job: Job, name: str) -> bool:
    """Autoregressive decoding and drafts at the largest batches that fit. Predicted from the calibration, or, where
    that failed, from the catalog's profile alone. False where time was too short for all of it."""
    model = random_model(job, name)
    path = job.profile_path(name)
    profile = load_local_profile(path) if path.exists() else None
    return _measure_items(job, name, model, profile, headline_only=True)


def model_part(job: Job, name: str) -> bool:
    """The headline, and a grid with simulated acceptance. False where time was too short for all of it."""
    model = random_model(job, name)
    profile = calibrated(job, name, model)
    attention_facts(job, name, model)
    return _measure_items(job, name, model, profile)


def _measure_items(
    job: Job,
    name: str,
    model: Transformer,
    profile: LocalProfile | None,
    *,
    headline_only: bool = False,
) -> bool:
    """Predicts every item, then measures them one after another."""
    release()
    maker = Maker(
        shapes=job.shapes,
        model_argument=job.model_name(name),
        spec=model.spec,
        device=job.device,
        dtype=job.dtype,
        free_bytes=available_memory_bytes(job.device),
        cuda_graphs=job.cuda_graphs,
    )
    items = headline_items(maker)
    if not headline_only:
        items += grid_items(maker)
    published = published_profile(job)
    for item in items:
        for machine, path in ((profile, job.records), (published, job.published)):
            if machine is not None:
                known = replace(machine, acceptance=(item.acceptance,))
                freeze_predictions([item.request], known, path)
    if profile is not None:
        bandwidth = profile.hardware.memory_bytes_per_s
    elif is_cuda(job.device):
        bandwidth = copy_bytes_per_s(device=job.device)
    else:
        bandwidth = bandwidth_bytes_per_s(device=job.device)
    release()
    return go_on(job, items, lambda item: measure_item(job, model, item, bandwidth))


def published_profile(job: Job) -> LocalProfile | None:
    """What the catalog says of this device from published tables; a trial takes the H200's, whatever it runs on."""
    known = None
    if job.shapes is TINY:
        known = load_hardware("h200")
    elif is_cuda(job.device):
        known = device_in_catalog(torch.cuda.get_device_name(job.device))
    if known is None:
        return None
    return LocalProfile(hardware=known, engine=load_engine("ours"), acceptance=())


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
    """Measures what the records do not hold, writing a row of each run when it ends; returns how long that took."""
    started = time.monotonic()
    request = item.request
    known: set[str] = set()
    rows: dict[str, list[Record]] = {}
    if job.records.exists():
        known = set(known_records(job.records, request.repetitions))
        rows = unfinished(read_rows(job.records))
    missing = []
    begun = {}
    for speculation in (AUTOREGRESSIVE, *request.speculations):
        key = configuration_key(request, speculation)
        if rows.get(key):
            begun[speculation] = rows[key]
        if key not in known and not speculation.is_autoregressive:
            missing.append(speculation)
    if not missing:
        return 0.0

    def write(record: Record) -> None:
        if record.key not in known:
            notes = [*record.notes, "caches of seeded noise"]
            append_record(job.records, msgspec.structs.replace(record, notes=notes))

    session = BenchmarkSession(
        replace(request, speculations=tuple(missing)), model=model
    )
    for record in measure(
        session, bandwidth_bytes_per_s=bandwidth, begun=begun, write=write
    ):
        write(record)
    del session
    release()
    return time.monotonic() - started


def attention_facts(job: Job, name: str, model: Transformer) -> None:
    """Time of verification's attention over that of decoding, by gamma, at the shape of the table; once."""
    fact = f"attention {name}"
    if fact in job.facts():
        return
    release()
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
        fact,
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
        "headline": lambda: headline_part(job, MAIN_MODEL),
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
        known = published_profile(job)
        is_expected = known is not None and not options.tiny
        print_report(
            job.output,
            [MAIN_MODEL, SECOND_MODEL],
            is_tiny=options.tiny,
            unfinished=unfinished,
            expected=expected_rows(known.hardware.name) if is_expected else {},
            published=known,
        )
    except MagicdecError as error:
        sys.exit(f"error: {error}")
