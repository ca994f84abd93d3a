"""The load that a command is checked at, and the plan's request for both: what neither states is assumed,
and told."""

from __future__ import annotations

from typing import Any

import msgspec

from magicdec.errors import CapacityError, ConfigError
from magicdec.perfmodel.kernels.profile import is_file, load_hardware
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.planner import answered
from magicdec.specs.device import DTYPE_BYTES
from magicdec.specs.formats import format_name, is_weight_format
from magicdec.specs.model import ModelSpec
from magicdec.specs.serve_command import ServeCommand
from magicdec.tasks import usual_lengths
from magicdec.units import format_count

USUAL_HARDWARE = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-192gb", "b300-sxm-288gb")
"""Devices of which the first that holds the model is assumed, where neither the command nor its user
names one."""
USUAL_BATCH = 32
ASSUMED_CONTEXT = 4096
"""Users and prompt where neither the command nor its user names them; an answer lists them as
assumed."""
GIVEN_ACCEPTANCE = ("acceptance_rate", "accept_length", "drafted_share")
"""Names by which a load states the acceptance of the command's own draft."""
AS_PUBLISHED = (
    *("compressed-tensors", "modelopt", "modelopt_mixed", "auto", "quark", "torchao"),
    *("humming", "online"),
)
"""Values of --quantization that leave the format to the checkpoint."""


class AskedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load, which a command does not state. None: a usual value, listed in the answer."""

    hardware: str | None = None
    batch: int | None = None
    """Users at once."""
    context_len: int | None = None
    gen_len: int = 0
    task: str | None = None
    """The text that is served; it brings the lengths of a usual request."""
    temperature: float | None = None
    """None: as the command has it for clients that name none, else 1."""
    acceptance_rate: float | tuple[float, ...] | None = None
    accept_length: float | None = None
    """Tokens per step at the command's gamma."""
    drafted_share: float | None = None
    """Share of steps that had a draft, where `accept_length` is of these alone."""
    weight_dtype: str | None = None
    """Format of the weights, where the command does not tell it all: a file's own size, above all."""


def request_of(
    command: ServeCommand, load: AskedLoad, model: ModelSpec
) -> tuple[PlanRequest, list[str]]:
    """The plan's request for a command under a load, and what was assumed for it."""
    named = load.hardware or listed_device(command.hardware)
    device = load_hardware(named or USUAL_HARDWARE[0])
    assumed = []
    batch = load.batch or USUAL_BATCH
    most = command.most_sequences
    if most is not None:
        batch = min(batch, most)
    if load.batch is None:
        assumed.append(f"{format_count(batch, 'user')} at once (--batch)")
    longest = min(command.max_model_len or model.longest_context, model.longest_context)
    context, gen_len, assumed_lengths = _lengths(load, longest)
    assumed += assumed_lengths
    pp_size = None
    if command.pp_size > 1:
        pp_size = command.pp_size
    given: dict[str, Any] = {}
    if command.speculation is not None:
        given = {name: getattr(load, name) for name in GIVEN_ACCEPTANCE}
        if load.accept_length is not None:
            if command.speculation.gamma is None:
                raise ConfigError(
                    "an accept length is of one number of drafted tokens, which this command does "
                    "not state"
                )
            given["gamma"] = command.speculation.gamma
        imposed = command.speculation.imposed_length
        gamma = command.speculation.gamma
        is_given = any(value is not None for value in given.values())
        if imposed is not None and gamma is not None and not is_given:
            given |= {"accept_length": min(imposed, gamma + 1.0), "gamma": gamma}
            assumed.append(
                f"{imposed:g} tokens per step, which the command imposes: a benchmark's, not the draft's"
            )
    temperature = load.temperature
    if temperature is None:
        temperature = 1.0
        if command.temperature is not None:
            temperature = command.temperature
            assumed.append(f"clients that name no temperature: {temperature:g}")
    tp_size = command.tp_size
    ep_size = command.ep_size
    has_groups = command.attention_dp_size > 1 and model.is_moe
    if has_groups:  # whose experts are divided over all ranks
        ep_size = tp_size
        tp_size = max(tp_size // command.attention_dp_size, 1)
    formats, unknown = _formats(command, model)
    assumed += unknown
    request = PlanRequest(
        model=command.model,
        hardware=(device if is_file(named or "") else device.name,),
        engine=command.started_engine,
        tp_size=tp_size,
        pp_size=pp_size,
        ep_size=ep_size,
        dp_attention=has_groups,
        draft_weight_dtype=formats["draft's weights"],
        batch_sizes=(max(batch // command.dp_size, 1),),
        context_lens=(context,),
        gen_len=gen_len,
        task=load.task,
        temperature=temperature,
        **given,
        weight_dtype=formats["weights"],
        kv_dtype=formats["cache"],
        settings=command.settings,
    )
    if named is None:
        request, of_device = _on_usual_hardware(request, model)
        assumed = [of_device, *assumed]
    return request, assumed


def _lengths(load: AskedLoad, longest: int) -> tuple[int, int, list[str]]:
    """The prompt and the output of a request, given or usual, and what was assumed."""
    assumed = []
    context = load.context_len
    gen_len = load.gen_len
    if load.task is not None and not gen_len:
        gen_len = min(usual_lengths(load.task).output_len, longest // 2)
        assumed.append(f"{gen_len} generated tokens (--gen-len)")
    if context is None:
        usual = ASSUMED_CONTEXT
        if load.task is not None:
            usual = usual_lengths(load.task).prompt_len
        context = min(usual, longest // 2)
        assumed.append(f"prompts of {context} tokens (--context)")
    elif context + gen_len > longest:
        raise ConfigError(
            f"requests of {context + gen_len} tokens are longer than the {longest} that the "
            "command allows"
        )
    return context, gen_len, assumed


def _formats(
    command: ServeCommand, model: ModelSpec
) -> tuple[dict[str, str | None], list[str]]:
    """The plan's names for the formats of a server's parts, and what was assumed for them. None: the format
    that the checkpoint is published in, which is assumed where a name is not known."""
    draft = command.speculation
    stated = {
        "draft's weights": None if draft is None else draft.weight_dtype,
        "weights": command.weight_dtype,
        "cache": command.kv_dtype,
    }
    formats: dict[str, str | None] = {}
    assumed = []
    published = model.quantization
    for part, text in stated.items():
        formats[part] = None
        if text is None or text in AS_PUBLISHED:
            continue
        name = format_name(text)
        is_known = name in DTYPE_BYTES if part == "cache" else is_weight_format(name)
        if not is_known:
            assumed.append(f"the {part} as published, as {text} is not known")
            continue
        if published is not None and part == "weights":
            kind = published.weight_dtype.partition("_")[0]
            if name.startswith(kind) or published.method == text:
                continue
        formats[part] = name
    return formats, assumed


def _on_usual_hardware(
    request: PlanRequest, model: ModelSpec
) -> tuple[PlanRequest, str]:
    """The request on the first of the usual devices that holds it, the first of all where none does;
    and what was assumed, in words."""
    usual = USUAL_HARDWARE[0]
    for name in USUAL_HARDWARE:
        asked = msgspec.structs.replace(request, hardware=(name,))
        try:
            answered(without_acceptance(asked, draft="none", gamma=None), model, [])
        except CapacityError:
            continue
        if name == usual:
            return asked, f"{name} (--hardware)"
        return asked, f"{name}, as {usual} does not hold it (--hardware)"
    return request, f"{usual} (--hardware)"


def listed_device(name: str | None) -> str | None:
    """The device that a manifest names, where the catalog has it."""
    if name is None:
        return None
    try:
        return load_hardware(name).name
    except ConfigError:
        return None


def without_acceptance(request: PlanRequest, **changes: Any) -> PlanRequest:
    """The request without the acceptance of the command's own draft, which is no other's."""
    return msgspec.structs.replace(
        request, **dict.fromkeys(GIVEN_ACCEPTANCE), **changes
    )
