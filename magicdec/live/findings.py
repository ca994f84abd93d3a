"""A command held against the rules, before anything is priced: its draft, its devices, its longest
sequence, its formats and kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from magicdec.live.load import AskedLoad, listed_device, request_of
from magicdec.naming import METHODS, head_named_in
from magicdec.perfmodel.kernels.profile import counted, load_hardware
from magicdec.perfmodel.plan.request import PlanRequest
from magicdec.perfmodel.plan.standing import (
    AskedDraft,
    Standing,
    is_published,
    option_of,
    packages_of,
    standing,
)
from magicdec.specs.attention_kernels import (
    attention_path,
    generation_of,
    known_backends,
    layers_of,
    refusal_of,
)
from magicdec.specs.catalog import known_model, load_model_spec
from magicdec.specs.engine import load_engine
from magicdec.specs.engine_path import PathOptions
from magicdec.specs.formats import format_name, weight_format
from magicdec.specs.model import ModelSpec
from magicdec.specs.names import folder_name, resolve_name
from magicdec.specs.rules import Finding, FindingKind, finding, unlisted_model
from magicdec.specs.serve_command import ServeCommand, Speculation
from magicdec.specs.speculation import OWN_METHOD

LENGTH_OVERRIDES = frozenset(
    ("--hf-overrides", "--rope-scaling", "--json-model-override-args")
)
"""Options that may set how many tokens a model reads."""


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
    request, assumed = request_of(command, load, model)
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
        method = METHODS.get(speculation.draft)
        has_block = method is not None and method.head_most_drafts is not None
        if speculation.gamma is None and most and has_block:
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
        named = listed_device(command.hardware)
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
            find(
                "a layer that a backend refuses",
                architecture=backend,
                backend=backend,
                why=refusal.says,
            )
            break
        runs = attention_path(asked, device, layer).backend
        if command.speculation is not None:
            find("verification on a backend", architecture=runs, backend=runs)
    return found
