"""A request to measure: one (model, batch, context) and its configurations. No torch.

Also here: the checks before anything is allocated, and the identity of a request's records, with
digests of the files that a run reads, by content: two checkpoints may have one name, and a file may
change. A weights file is known by its size, its header, which names every tensor with its shape,
and samples of its bytes: all of it where it is small, evenly spread ones where reading it all would
take as long as loading it.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from magicdec.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    StorageError,
    unknown_choice,
)
from magicdec.files import check_apart, check_writable
from magicdec.measure.engines import Runtime, installed_engine
from magicdec.measure.environment import available_memory_bytes
from magicdec.perfmodel.memory import MemoryNeed, memory_need
from magicdec.perfmodel.setup import ModelSetup
from magicdec.schema.gamma_table import TableGamma
from magicdec.schema.record import check_records_file
from magicdec.specs.catalog import checkpoint_directory, load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.model import ModelSpec
from magicdec.specs.precision import PROFILE_DTYPES, Precision
from magicdec.specs.speculation import (
    AUTOREGRESSIVE,
    HEAD_METHODS,
    MODEL_METHODS,
    SPARSE_METHODS,
    SamplingSpec,
    SpeculationSpec,
    draft_model_name,
)
from magicdec.specs.vllm_plugin import VLLM_METHODS
from magicdec.units import KIB, MIB, format_bytes

Weights = Literal["checkpoint", "random"]
NOISE = "noise"
"""A source of prompts for timing only: keys and values are seeded noise, and nothing is prefilled."""
MAX_LINE_BYTES = 1 << 26
REQUEST_FIELDS = (
    "device",
    "dtype",
    "tp_size",
    "batch_size",
    "context_len",
    "context_spread",
    "gen_len",
    "prompts",
    "weights",
    "num_prompts",
    "stop_at_eos",
    "run_to_end",
    "cuda_graphs",
)
SPECULATION_FIELDS = (
    "draft_method",
    "draft_budget",
    "gamma",
    "draft_tp_size",
)
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "seed")
"""Fields of a record that are the request's, its configuration's and its sampling's own."""
SAMPLED_ABOVE_BYTES = 64 * MIB
SAMPLE_BYTES = 64 * KIB
NUM_SAMPLES = 256
"""A larger file's digest is of its header and of 16 MiB in samples evenly spread: a checkpoint of 100 GB
would take minutes, and retrained weights differ everywhere."""
SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
MIN_PROMPT = 2
"""Tokens of a prompt: one that is cached, and the pending one."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkRequest:
    """One (model, batch, context) and the speculative configurations to measure on it."""

    model: str
    engine: Runtime = "ours"
    weights: Weights = "checkpoint"
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int
    context_len: int
    context_spread: float = 0.0
    gen_len: int = 64
    speculations: tuple[SpeculationSpec, ...] = ()
    sampling: SamplingSpec = field(
        default_factory=lambda: SamplingSpec(temperature=1.0)
    )
    prompts: str = "stdlib"
    calibration_prompts: bool = False
    repetitions: int = 3
    simulate_acceptance: tuple[float, ...] | None = None
    stop_at_eos: bool = False
    run_to_end: bool = False
    """Let every sequence reach its end, which also measures the speedup of a static batch."""
    tp_size: int = 1
    gamma_table: TableGamma | None = None
    """A plan's table to choose gamma from anew each step, at most each configuration's own; None:
    gamma is fixed.
    """
    num_prompts: int | None = None
    """Prompts in all: those beyond the batch wait in a queue, and refill slots that become free."""
    cuda_graphs: bool = True
    """Capture steps where the device can."""

    @property
    def max_gamma(self) -> int:
        return max((s.gamma for s in self.speculations), default=0)

    @property
    def max_len(self) -> int:
        """KV slots a sequence needs: its context, the generated tokens, and the block in flight."""
        return self.context_len + self.gen_len + self.max_gamma + 1


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go besides the terminal."""

    records: Path | None = None
    resume: bool = False
    save_output: Path | None = None
    quiet: bool = False

    def check(self, **read: Path | None) -> None:
        """Refuses, before the work, files that cannot be written or hold something of others, and
        two that are one: those that are read, each by the name of its option, among them.

        Raises StorageError.
        """
        inputs = {f"--{name}": path for name, path in read.items()}
        check_apart(
            {"--records": self.records, "--save-output": self.save_output, **inputs}
        )
        if self.records is not None:
            check_records_file(self.records)
        if (path := self.save_output) is None:
            return
        check_writable(path)
        if path.is_file():
            try:
                with path.open("rb") as file:
                    first = file.readline(MAX_LINE_BYTES)
            except OSError as error:
                raise StorageError(
                    f"cannot read {path}: {error.strerror or error}"
                ) from error
            if first and b'"generated_ids"' not in first:
                wrong = "holds something else than a run's output"
                raise StorageError(
                    f"{path} {wrong}, and is left as it is; give another file"
                )


def check_request(
    request: BenchmarkRequest, model: ModelSpec, *, is_loaded: bool = False
) -> None:
    """Refuses what cannot be run, before anything is allocated; `is_loaded`: but the target's
    weights.

    Raises ConfigError or CapacityError with the nearest valid choice.
    """
    if request.dtype not in PROFILE_DTYPES:
        raise unknown_choice("dtype", request.dtype, PROFILE_DTYPES)
    check_devices(request)
    if request.engine == "vllm":
        _check_for_vllm(request)
        return
    _check_bfloat16(request)
    _check_lengths(request, model)
    if request.tp_size > 1:
        from magicdec.runtime.weights import check_divisible

        check_divisible(model, request.tp_size)
    for speculation in request.speculations:
        _check_speculation(request, speculation, model)
    _check_memory(request, model, is_loaded=is_loaded)


def _check_bfloat16(request: BenchmarkRequest) -> None:
    """Raises ConfigError for bfloat16 on a GPU that only emulates it."""
    if request.dtype != "bfloat16" or not request.device.startswith("cuda"):
        return
    import torch

    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"device '{request.device}' does not compute in bfloat16; use --dtype float16 or "
            "float32"
        )


def _check_lengths(request: BenchmarkRequest, model: ModelSpec) -> None:
    """Raises CapacityError for sequences longer than the model takes, ConfigError for a queue that
    fills no batch and for prompts that are too short.
    """
    if request.max_len > model.max_position_embeddings:
        room = model.max_position_embeddings - request.gen_len - request.max_gamma - 1
        raise CapacityError(
            f"context {request.context_len} + {request.gen_len} generated + a block of "
            f"{request.max_gamma + 1} exceeds "
            f"the {model.max_position_embeddings} positions of {model.name}; the longest context "
            f"is {room}"
        )
    if request.num_prompts is not None and request.num_prompts < request.batch_size:
        raise ConfigError(
            f"a queue of {request.num_prompts} prompts in all cannot fill a batch of "
            f"{request.batch_size}; "
            f"use at least {request.batch_size}"
        )
    if request.prompts == NOISE and request.num_prompts is not None:
        raise ConfigError("a queue is prefilled: it needs prompts of tokens, not noise")
    shortest = round(request.context_len * (1 - request.context_spread))
    if shortest < MIN_PROMPT:
        largest = max(0.0, 1 - MIN_PROMPT / request.context_len)
        raise ConfigError(
            f"with a spread of {request.context_spread:g} the shortest prompt of "
            f"{request.context_len} has {shortest} "
            f"tokens, and {MIN_PROMPT} are needed; use a spread of at most {largest:.2g}"
        )


def _check_for_vllm(request: BenchmarkRequest) -> None:
    """Raises ConfigError for requests that vLLM cannot run."""
    refused = {
        "--tp above 1": request.tp_size > 1,
        "--queue": request.num_prompts is not None,
        "--simulate-acceptance": request.simulate_acceptance is not None,
        "--weights random": request.weights != "checkpoint",
        "--stop-at-eos": request.stop_at_eos,
        "--run-to-end": request.run_to_end,
        "prompts of noise": request.prompts == NOISE,
    }
    for what, is_wanted in refused.items():
        if is_wanted:
            raise ConfigError(f"{what} is not run in vLLM; use --engine ours")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0"):
        raise ConfigError(
            "vLLM is timed in its V1 model runner; unset VLLM_USE_V2_MODEL_RUNNER, or serve and "
            "observe V2"
        )
    for speculation in request.speculations:
        if not speculation.is_self or speculation.draft_method not in VLLM_METHODS:
            raise ConfigError(
                f"draft '{speculation.draft}' with method '{speculation.draft_method}' is not run "
                "in vLLM by this "
                f"package; use --draft self with --draft-method {' or '.join(VLLM_METHODS)}"
            )
    installed_engine(request.engine)


def _check_speculation(
    request: BenchmarkRequest, speculation: SpeculationSpec, target: ModelSpec
) -> None:
    """Raises ConfigError for a draft that is not run so, CapacityError for one without room."""
    budget = speculation.draft_budget
    if budget is not None and budget > request.context_len:
        raise ConfigError(
            f"draft budget {budget} exceeds the context {request.context_len}; the largest is "
            f"{request.context_len}"
        )
    speculation.check_block_fits()
    if speculation.is_self and speculation.draft_method not in SPARSE_METHODS:
        raise unknown_choice(
            "draft method of a self-draft",
            speculation.draft_method,
            SPARSE_METHODS,
        )
    if speculation.draft_method in HEAD_METHODS:
        _check_head(request, speculation, target)
        return
    draft_tp_size = speculation.draft_tp_size or request.tp_size
    if not 1 <= draft_tp_size <= request.tp_size:
        raise ConfigError(
            f"the draft cannot be on {draft_tp_size} ranks when the target is on {request.tp_size}"
        )
    name = draft_model_name(speculation.draft)
    if name is not None:
        _check_draft_model(request, speculation, load_model_spec(name), target)
        return
    if draft_tp_size != request.tp_size:
        raise ConfigError(
            f"--draft-tp {draft_tp_size} needs a draft model; draft '{speculation.draft}' has none"
        )


def _check_draft_model(
    request: BenchmarkRequest,
    speculation: SpeculationSpec,
    draft: ModelSpec,
    target: ModelSpec,
) -> None:
    """Refuses a model of another vocabulary, and one with too few positions."""
    if speculation.draft_method not in MODEL_METHODS:
        raise unknown_choice(
            "draft method of a draft model",
            speculation.draft_method,
            MODEL_METHODS,
        )
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft {draft.name} has a vocabulary of {draft.vocab_size}, target {target.name} of "
            f"{target.vocab_size}: they must be the same"
        )
    length = request.max_len
    advice = "use --draft-method streamingllm with a budget"
    if speculation.draft_budget is not None:
        length = speculation.draft_budget + speculation.gamma + 1
        advice = "use a smaller budget"
    if length > draft.max_position_embeddings:
        raise CapacityError(
            f"draft {draft.name} holds {draft.max_position_embeddings} positions, {length} are "
            f"needed; {advice}"
        )


def _check_head(
    request: BenchmarkRequest, speculation: SpeculationSpec, target: ModelSpec
) -> None:
    """Refuses a head that is another target's, and options that are not run for heads."""
    from magicdec.runtime.heads.layout import layout_of

    if speculation.draft_tp_size not in (None, request.tp_size):
        raise ConfigError(
            f"a head is on all {request.tp_size} ranks of its target, not on "
            f"{speculation.draft_tp_size}; leave --draft-tp out"
        )
    layout = layout_of(speculation, target)
    if speculation.draft_budget is not None and layout.block_size is not None:
        raise ConfigError(
            f"--draft-budget is not run for heads of {layout.method}, whose window is trained in; "
            "leave it out"
        )
    most = layout.most_drafts
    if most is not None and speculation.gamma > most:
        raise ConfigError(
            f"the head at {speculation.checkpoint} was trained on blocks that propose {most} "
            f"tokens; use a gamma of at most {most}, not {speculation.gamma}"
        )


def _check_memory(
    request: BenchmarkRequest, model: ModelSpec, *, is_loaded: bool
) -> None:
    """On a CPU the ranks of a machine share its memory; on GPUs each rank has its own."""
    on_device = 1
    if request.device == "cpu":
        on_device = min(request.tp_size, _local_world_size(request))
    weights, caches = session_bytes(request)
    fixed = on_device * weights
    per_sequence = on_device * (caches + choosing_bytes(request))
    if is_loaded:
        fixed -= on_device * float(
            planned_memory(request, AUTOREGRESSIVE).weights_bytes
        )
    needed = fixed + per_sequence * request.batch_size
    available = available_memory_bytes(request.device)
    if needed > available:
        fits = int((available - fixed) // per_sequence)
        if fits >= 1:
            advice = f"the largest batch that fits is {fits}"
        else:
            advice = "not even a batch of 1 fits"
        raise CapacityError(
            f"batch {request.batch_size} at context {request.context_len} needs "
            f"{format_bytes(needed)}, "
            f"{format_bytes(available)} are free; {advice}"
        )


def model_setup(request: BenchmarkRequest, speculation: SpeculationSpec) -> ModelSetup:
    """One of a request's configurations as the performance model describes it."""
    draft = draft_model_name(speculation.draft)
    draft_model = None
    if draft is not None:
        draft_model = load_model_spec(draft)
    dtype = PROFILE_DTYPES[request.dtype]
    return ModelSetup(
        model=load_model_spec(request.model),
        engine=load_engine("ours"),
        speculation=speculation,
        draft_model=draft_model,
        sampling=request.sampling,
        precision=Precision(weight_dtype=dtype, kv_dtype=dtype),
        draft_precision=Precision(weight_dtype=dtype, kv_dtype=dtype),
    )


def planned_memory(
    request: BenchmarkRequest,
    speculation: SpeculationSpec,
    batch_size: int | None = None,
) -> MemoryNeed:
    """Memory that one of a request's configurations needs on each rank."""
    batch = request.batch_size
    if batch_size is not None:
        batch = batch_size
    return memory_need(
        model_setup(request, speculation),
        batch=batch,
        max_len=request.context_len + request.gen_len,
        budget=speculation.draft_budget,
        gamma=speculation.gamma,
        tp_size=request.tp_size,
    )


def choosing_bytes(request: BenchmarkRequest) -> float:
    """Bytes that each rank takes per sequence while the fullest configuration's tokens are chosen:
    the part of the planned workspace that grows with the batch."""
    most = 0.0
    for speculation in (AUTOREGRESSIVE, *request.speculations):
        of_one = planned_memory(request, speculation, batch_size=1).workspace_bytes
        of_two = planned_memory(request, speculation, batch_size=2).workspace_bytes
        most = max(most, float(of_two - of_one))
    return most


def session_bytes(request: BenchmarkRequest) -> tuple[float, float]:
    """Bytes that each rank holds during a session: of weights, and of KV caches per sequence;
    drafts included, and what comes and goes not.

    A draft model and its cache stay for the whole session; a self-draft's compact cache lasts for
    one run.
    """
    weights: dict[tuple[object, ...], float] = {}
    caches: dict[tuple[object, ...], float] = {}
    alone = planned_memory(request, AUTOREGRESSIVE, batch_size=1)
    kv = float(alone.kv_bytes)
    compact = 0.0
    for speculation in request.speculations:
        need = planned_memory(request, speculation, batch_size=1)
        kv = max(kv, float(need.kv_bytes))
        held = (
            speculation.checkpoint or speculation.draft,
            speculation.draft_tp_size or request.tp_size,
        )
        weights[held] = float(need.draft_weights_bytes)
        if speculation.is_self:
            compact = max(compact, float(need.draft_kv_bytes))
        else:
            caches[(*held, speculation.draft_budget)] = float(need.draft_kv_bytes)
    return float(alone.weights_bytes) + sum(weights.values()), kv + sum(
        caches.values()
    ) + compact


def _local_world_size(request: BenchmarkRequest) -> int:
    """Ranks on this machine: what torchrun says, or all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", request.tp_size))


def configuration_fields(
    request: BenchmarkRequest, speculation: SpeculationSpec
) -> dict[str, Any]:
    """The identity part of a record."""
    parts = (
        (request, REQUEST_FIELDS),
        (speculation, SPECULATION_FIELDS),
        (request.sampling, SAMPLING_FIELDS),
    )
    fields: dict[str, Any] = {}
    for part, names in parts:
        for name in names:
            fields[name] = getattr(part, name)
    models = [request.model]
    fields["model"] = load_model_spec(request.model).name
    fields["engine"] = installed_engine(request.engine)
    fields["draft"] = speculation.draft
    draft = draft_model_name(speculation.draft)
    if draft is not None:
        models.append(draft)
        fields["draft"] = load_model_spec(draft).name
    fields |= {"simulated_acceptance": None, "adaptive": False, "gamma_table": None}
    if not speculation.is_autoregressive:
        if request.simulate_acceptance:
            fields["simulated_acceptance"] = list(request.simulate_acceptance)
        if request.gamma_table is not None:
            fields["adaptive"] = True
            fields["gamma_table"] = request.gamma_table.digest
    fields["inputs_digest"] = inputs_digest(
        tuple(models),
        head=speculation.checkpoint,
        with_weights=request.weights == "checkpoint",
        prompts=request.prompts,
        for_calibration=request.calibration_prompts,
    )
    return fields


def check_devices(request: BenchmarkRequest) -> None:
    """Raises ConfigError when this machine lacks the devices of its ranks."""
    num_ranks = 1
    if request.tp_size > 1:
        num_ranks = _local_world_size(request)
    check_device(request.device, num_ranks=num_ranks)


def check_device(device: str, *, num_ranks: int = 1) -> None:
    """Raises ConfigError for a device that torch does not have here, or not once for each rank."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise unknown_choice("device", device, ("cpu", "cuda", "cuda:0"))
    if index and num_ranks > 1:
        raise ConfigError(
            f"device '{device}' is one device, but {num_ranks} ranks need one each; use {kind}"
        )
    if kind == "cuda":
        import torch

        count = torch.cuda.device_count()
        if int(index or 0) + num_ranks > count:
            raise ConfigError(
                f"{num_ranks} of device '{device}' wanted, torch sees {count} CUDA devices; use cpu"
            )


def inputs_digest(
    models: Iterable[str],
    *,
    with_weights: bool,
    prompts: str,
    for_calibration: bool,
    head: str | None = None,
) -> str:
    """Digest of all inputs of a run: its models in their order, a head's directory, and the half of
    the prompts' text that it takes."""
    digests = [model_digest(model, with_weights=with_weights) for model in models]
    if head is not None:
        directory = Path(head)
        files = [directory / "config.json"]
        if with_weights:
            files += sorted(directory.glob("*.safetensors"))
        digests.append(_files_digest(directory, files))
    digests.append(prompts_digest(prompts))
    digests.append(str(for_calibration))
    return _hash([digest.encode() for digest in digests])


def model_digest(model: str, *, with_weights: bool) -> str:
    """Digest of a model argument: of its directory's settings and weights, or of its spec alone.
    Raises CheckpointError for a file that cannot be read."""
    directory = checkpoint_directory(model)
    if directory is None or not with_weights:
        return _hash([repr(load_model_spec(model)).encode()])
    files = [directory / name for name in SETTINGS if (directory / name).is_file()]
    return _files_digest(directory, [*files, *sorted(directory.glob("*.safetensors"))])


def prompts_digest(source: str) -> str:
    """Digest of a file's or a directory's bytes; text that ships with Python is known by its
    version.
    """
    path = Path(source)
    if not path.exists():
        return f"{source} of Python {platform.python_version()}"
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
    else:
        files = [path]
    return _files_digest(path, files)


def _files_digest(root: Path, files: list[Path]) -> str:
    """The digest of files by content; one whose size and time of change stay is not read again."""
    return _read_digest(
        root, *((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    )


@lru_cache(maxsize=64)
def _read_digest(root: Path, *files: tuple[Path, int, int]) -> str:
    parts = []
    for file, size, _ in files:
        if file != root:
            name = file.relative_to(root)
        else:
            name = Path()
        parts += [name.as_posix().encode(), str(size).encode()]
        try:
            parts.append(hashlib.sha256(b"".join(_samples(file, size))).digest())
        except OSError as error:
            kind = CheckpointError if file.suffix == ".safetensors" else ConfigError
            raise kind(f"cannot read {file}: {error.strerror or error}") from error
    return _hash(parts)


def _samples(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        if size <= SAMPLED_ABOVE_BYTES:
            yield file.read()
            return
        # of the header, in a safetensors file
        length = int.from_bytes(file.read(8), "little")
        yield file.read(min(length, SAMPLED_ABOVE_BYTES))
        for number in range(NUM_SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def _hash(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
