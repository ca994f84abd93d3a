"""A command and the load that it is checked at, before anything is priced: the plan's request, what was
assumed for it, and what the rules say of both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from magicdec.errors import CapacityError, ConfigError
from magicdec.naming import head_named_in
from magicdec.perfmodel.kernels.profile import counted, is_file, load_hardware
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.plan.standing import (
    AskedDraft,
    Standing,
    is_published,
    option_of,
    packages_of,
    standing,
)
from magicdec.perfmodel.planner import answered
from magicdec.specs.attention_kernels import (
    attention_path,
    generation_of,
    known_backends,
    layers_of,
    refusal_of,
)
from magicdec.specs.catalog import known_model, load_model_spec
from magicdec.specs.device import DTYPE_BYTES
from magicdec.specs.engine import load_engine
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.formats import format_name, is_weight_format, weight_format
from magicdec.specs.model import ModelSpec
from magicdec.specs.names import folder_name, resolve_name
from magicdec.specs.rules import Finding, FindingKind, finding, unlisted_model
from magicdec.specs.serve_command import ServeCommand, Speculation
from magicdec.specs.speculation import OWN_METHOD
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
BY_BLOCK = ("dflash", "dspark")
"""Drafts whose checkpoints tell the number of tokens where a command states none."""
LENGTH_OVERRIDES = frozenset(
    ("--hf-overrides", "--rope-scaling", "--json-model-override-args")
)
"""Options that may set how many tokens a model reads."""
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


class CommandFindings(NamedTuple):
    """A command held against the rules, before anything is priced."""

    command: ServeCommand
    model: ModelSpec
    request: PlanRequest
    assumed: list[str]
    starting: Standing | None
    """Whether its draft can be started; None: it has none."""
    said: dict[FindingKind, list[str]]
    """Sentences by kind, the draft's first: its faults need no device, so they are said whatever
    fits."""


def findings_of(command: ServeCommand, load: AskedLoad) -> CommandFindings:
    """The sentences of the rules on a command and its load.

    Raises ConfigError for a model or a device that cannot be planned.
    """
    command = _over_all_devices(command, load)
    if load.weight_dtype is not None:
        weight_format(format_name(load.weight_dtype))
        command = msgspec.structs.replace(command, weight_dtype=load.weight_dtype)
    command, by_name = _with_model(command)
    model = load_model_spec(command.model)
    request, assumed = _request(command, load, model)
    command = _with_own_head(command, model)
    said: dict[FindingKind, list[str]] = {"wrong": [], "note": by_name, "asked": []}
    speculation = command.speculation
    starting = None
    if speculation is not None:
        engine = load_engine(command.engine_profile)
        starting = _standing(speculation, command, model)
        if not starting.starts:
            cure = ""
            if starting.method not in (None, speculation.draft):
                cure = f" ({option_of(engine, starting.method)})"
            said["wrong"].append(f"the draft cannot run: {starting.sentence}{cure}")
        elif starting.answer == "accepts nothing":
            said["note"].append(starting.sentence)
        for found in starting.notes:
            said[found.kind].append(found.says)
        package = packages_of(engine, speculation.draft, _method_of(speculation))
        if package and starting.starts:
            said["note"].append(package)
        most = starting.most_drafts
        if speculation.gamma is None and most and speculation.draft in BY_BLOCK:
            speculation = msgspec.structs.replace(speculation, gamma=most)
            command = msgspec.structs.replace(command, speculation=speculation)
    said["wrong"] += command.problems
    said["note"] += command.notes
    said["asked"] += command.asked
    for found in _on_command(command, load, request, model):
        said[found.kind].append(found.says)
    return CommandFindings(command, model, request, assumed, starting, said)


def _standing(
    speculation: Speculation, command: ServeCommand, model: ModelSpec
) -> Standing:
    """Whether the command's draft can be started."""
    checkpoint = ""
    drafting = None
    if speculation.draft in OWN_METHOD:
        checkpoint = speculation.checkpoint or ""
    else:
        drafting = known_model(speculation.draft)
    asked = AskedDraft(
        draft=speculation.draft,
        method=_method_of(speculation),
        checkpoint=checkpoint,
        model=drafting,
        gamma=speculation.gamma,
        tp_size=command.tp_size,
        draft_tp_size=speculation.tp_size,
        pp_size=command.pp_size,
        settings=command.settings,
        exists=True,
    )
    return standing(asked, model, load_engine(command.engine_profile))


def _method_of(speculation: Speculation) -> str:
    if speculation.draft in OWN_METHOD:
        return speculation.draft
    return "full"


def _with_model(command: ServeCommand) -> tuple[ServeCommand, list[str]]:
    """The command with the model that the name of a folder tells, where the folder is not here and is
    called as no model is; and a note on it."""
    path = command.model
    is_folder = path.startswith(("/", "./", "~")) and not Path(path).exists()
    if not is_folder or resolve_name(path) is not None:
        return command, []
    name = folder_name(path)
    if name is None:
        return command, []
    note = f"{path} is taken for {name} by its name: its config.json would tell"
    return msgspec.structs.replace(command, model=name), [note]


def _over_all_devices(command: ServeCommand, load: AskedLoad) -> ServeCommand:
    """llama.cpp's command with its layers, or its tensors, over all the devices that it sees."""
    given = counted(load.hardware or "").num_gpus or command.num_gpus or 1
    if command.engine != "llama.cpp" or given == 1 or command.split == "none":
        return command
    if command.split == "tensor":
        return msgspec.structs.replace(command, tp_size=given)
    note = (
        f"llama.cpp splits its layers over the {given} devices, which then work in turn"
    )
    return msgspec.structs.replace(command, pp_size=given, notes=[*command.notes, note])


def _with_own_head(command: ServeCommand, model: ModelSpec) -> ServeCommand:
    """The command with EAGLE's algorithm and no checkpoint of an EAGLE head read as the model's
    prediction module, its own or in a checkpoint apart, which SGLang then drafts with.
    """
    speculation = command.speculation
    if speculation is None or not is_published(model, "mtp"):
        return command
    if head_named_in(speculation.checkpoint or "") not in (None, "mtp"):
        return command
    if command.engine != "sglang" or speculation.draft != "eagle":
        return command
    own = msgspec.structs.replace(speculation, draft="mtp")
    return msgspec.structs.replace(command, speculation=own)


def _request(
    command: ServeCommand, load: AskedLoad, model: ModelSpec
) -> tuple[PlanRequest, list[str]]:
    """The plan's request for a command under a load, and what was assumed for it."""
    named = load.hardware or _listed_device(command.hardware)
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
    stated = None if command.speculation is None else command.speculation.weight_dtype
    draft_weights = _format("draft's weights", stated, model, assumed)
    request = PlanRequest(
        model=command.model,
        hardware=(device if is_file(named or "") else device.name,),
        engine=command.started_engine,
        tp_size=tp_size,
        pp_size=pp_size,
        ep_size=ep_size,
        dp_attention=has_groups,
        draft_weight_dtype=draft_weights,
        batch_sizes=(max(batch // command.dp_size, 1),),
        context_lens=(context,),
        gen_len=gen_len,
        task=load.task,
        temperature=temperature,
        **given,
        weight_dtype=_format("weights", command.weight_dtype, model, assumed),
        kv_dtype=_format("cache", command.kv_dtype, model, assumed),
        settings=command.settings,
    )
    if named is None:
        request, of_device = _on_usual_hardware(request, model)
        assumed = [of_device, *assumed]
    return request, assumed


def without_acceptance(request: PlanRequest, **changes: Any) -> PlanRequest:
    """The request without the acceptance of the command's own draft, which is no other's."""
    return msgspec.structs.replace(
        request,
        acceptance_rate=None,
        accept_length=None,
        drafted_share=None,
        **changes,
    )


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


def _listed_device(name: str | None) -> str | None:
    """The device that a manifest names, where the catalog has it."""
    if name is None:
        return None
    try:
        return load_hardware(name).name
    except ConfigError:
        return None


def _on_command(
    command: ServeCommand, load: AskedLoad, request: PlanRequest, model: ModelSpec
) -> list[Finding]:
    """Findings of the rules on its devices, its longest sequence and its number format."""
    found: list[Finding] = []

    def find(name: str, **values: Any) -> None:
        version = command.version or ""
        says = finding(
            name, command.engine, version, settings=command.settings, **values
        )
        if says is not None:
            found.append(says)

    # devices
    named = load.hardware
    if named is None and command.hardware is not None:
        named = _listed_device(command.hardware)
        if named is None:
            find("a device that is not known", device=command.hardware)
    needed = command.num_devices
    granted = counted(named or "").num_gpus or command.num_gpus or needed
    if granted < needed:
        find("fewer devices than are used", needed=needed, granted=granted)
    elif granted > needed:
        find("more devices than are used", needed=needed, granted=granted)

    listed = unlisted_model(
        command.engine, command.version or "", model.name, model.architecture
    )
    if listed is not None:
        found.append(listed)

    # its longest sequence
    most = command.max_model_len
    if most is not None and most > model.longest_context:
        is_overridden = command.settings & LENGTH_OVERRIDES
        find(
            "longer by an override" if is_overridden else "longer than the model reads",
            option=command.option_of("length"),
            length=most,
            longest=model.longest_context,
            model=model.name,
        )

    # a prefix cache of recurrent states
    if model.states and command.keeps_states_between_steps:
        if command.speculation is not None:
            find("a draft beside states without buffers", model=model.name)
        if command.states_strategy == "no_buffer":
            find("states without buffers")

    # the format that it computes in
    device = request.hardware[0]
    if isinstance(device, str):
        device = load_hardware(device)
    dtype = command.read.get("--dtype", "auto")
    if not device.has_bf16 and format_name(dtype) == "bf16":
        find("no bf16", option="--dtype", dtype=dtype, device=device.name)
    elif not device.has_bf16 and format_name(dtype) != "fp16":
        find("no bf16, and none asked for", device=device.name)

    # the attention kernels that it asks for
    backend = command.attention_backend
    engine = load_engine(command.engine_profile)
    if backend and backend not in known_backends(engine, device):
        find("an attention backend that is not known", backend=backend)
    asked = engine.as_set(PathOptions(attention_backend=backend))
    for layer in layers_of(model, format_name(request.kv_dtype or "bf16")):
        generation = generation_of(device)
        refusal = refusal_of(
            command.engine, command.version or "", generation, layer, backend
        )
        if refusal is not None:
            why = refusal.says
            find("a layer that a backend refuses", backend=backend, why=why)
            break
        runs = attention_path(asked, device, layer).backend
        if command.speculation is not None:
            find("verification on a backend", architecture=runs, backend=runs)
    return found


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


def _format(
    part: str, text: str | None, model: ModelSpec, assumed: list[str]
) -> str | None:
    """The plan's name for the format of a part. None: the format that the checkpoint is published
    in, which is assumed where the name is not known."""
    if text is None or text in AS_PUBLISHED:
        return None
    name = format_name(text)
    is_known = is_weight_format(name)
    if part == "cache":
        is_known = name in DTYPE_BYTES
    if not is_known:
        assumed.append(f"the {part} as published, as {text} is not known")
        return None
    published = model.quantization
    if published is not None and part == "weights":
        kind = published.weight_dtype.partition("_")[0]
        if name.startswith(kind) or published.method == text:
            return None
    return name
