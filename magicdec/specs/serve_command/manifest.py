"""YAML that starts a server: Docker Compose, Kubernetes and its custom resources, charts' values, Ray
Serve's configurations.

Documents are loaded by PyYAML's safe loader, within bounds on size, depth, aliases and merges. A
template's expressions and what a container takes from elsewhere are open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from magicdec.errors import ConfigError
from magicdec.specs.serve_command.shell import Shell, Value, variables_of
from magicdec.specs.serve_command.start import (
    MENTIONS,
    MOST_STARTS,
    Build,
    Given,
    Start,
    build_of,
    json_of,
    text_of,
    words_of,
)

MOST_MANIFEST_NODES = 100_000
"""Values of a manifest with every alias and merge written out; few lines can stand for billions."""
MOST_MANIFEST_DEPTH = 100
MOST_COMMAND = 100_000
REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")
"""Kubernetes' reference to a variable of the container, or its escape."""
TEMPLATE = re.compile(r"\{\{-?\s*(?P<inside>[^{}]{0,400}?)\s*-?\}\}")
CONTROL = re.compile(
    r"^\s*\{\{-?\s*(?:if|else|end|range|with|define|include|template|/\*|toYaml|\$\w).*\}\}\s*$",
    re.MULTILINE,
)
"""Lines of a template's control alone."""
VALUE = re.compile(r"\.Values\.[\w.]+")
DEVICES = re.compile(r"^(?:(?:nvidia|amd|gpu\.intel)\.com/)?(?:gpu|i915|xe)$")
DEVICE_NAMES = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "gpu.nvidia.com/class",
    "k8s.amazonaws.com/accelerator",
    "gpu.nvidia.com/model",
)
OF_KSERVE = re.compile(
    r"^--(?:model[_-](?:name|dir)|backend|task)(?:=[^\n]*|\n[^-\n][^\n]*|)$",
    re.MULTILINE,
)
"""Options of KServe's own server, each with its value."""
COMMAND_KEYS = ("command", "args", "entrypoint", "modelCommand")
"""Keys that make a mapping a container."""


class _FoundContainer(NamedTuple):
    """A container with the mappings around it, the nearest first, and its name."""

    container: Mapping[str, Any]
    around: tuple[Mapping[str, Any], ...]
    path: str


def starts_of_yaml(given: Given) -> list[Start]:
    """The servers that YAML starts; empty: the text is no YAML, or starts none."""
    text = given.text
    if ":" not in text or "\n" not in text.strip():
        return []
    if "{{" in text:
        text = _marked(text, given)
    documents = load(text)
    mappings = [document for document in documents if isinstance(document, dict)]
    starts: list[Start] = []
    for written in mappings:
        if len(starts) >= MOST_STARTS:
            break
        document = written
        if isinstance(written.get("services"), Mapping) and "kind" not in written:
            document = _interpolated(written, given)
        starts += _of_values(document, given)
        starts += _of_resources(document)
        for found in _containers(document):
            starts += _of_container(found, given)
        embedded = _at(document, ("spec", "serveConfigV2"))
        if not starts and isinstance(embedded, str):  # RayService's YAML within YAML
            for inner in load(embedded):
                if isinstance(inner, dict):
                    starts += _of_resources(inner)
    return starts


# Loading within bounds


def load(text: str) -> list[Any]:
    """The documents of a text; empty: it is no YAML. Raises ConfigError beyond the bounds."""
    import yaml

    try:
        _check_events(text)
        return list(yaml.load_all(text, Loader=_loader()))
    except (yaml.YAMLError, ValueError, OverflowError):
        # no YAML, or a value that looks like a date or a number and cannot be one
        return []
    except RecursionError:
        raise ConfigError(
            f"the manifest nests more than {MOST_MANIFEST_DEPTH} deep"
        ) from None


def _check_events(text: str) -> None:
    """Raises ConfigError for more values or depth than a manifest has, each alias counted with
    what it stands for."""
    import yaml

    parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    total = 0
    sizes: dict[str, int] = {}
    open_anchors: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=parser):
        if isinstance(event, yaml.AliasEvent):
            # an anchor that holds itself has no end
            total += sizes.get(event.anchor, MOST_MANIFEST_NODES)
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            total += 1
            depth += 1
            open_anchors.append((event.anchor, total))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            anchor, before = open_anchors.pop()
            if anchor:
                sizes[anchor] = total - before + 1
        if depth > MOST_MANIFEST_DEPTH:
            raise ConfigError(
                f"the manifest nests more than {MOST_MANIFEST_DEPTH} deep"
            )
        if total > MOST_MANIFEST_NODES:
            raise ConfigError(
                f"the manifest stands for more than {MOST_MANIFEST_NODES} values"
            )


def _loader() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Bounded(base):  # type: ignore[misc]
        """A safe loader whose merges ("<<") end."""

        merged = 0

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            self.merged += len(node.value)
            if self.merged > 2 * MOST_MANIFEST_NODES:
                raise ConfigError(
                    f"the manifest stands for more than {MOST_MANIFEST_NODES} values"
                )

    return Bounded


# Templates and variables


def _marked(text: str, given: Given) -> str:
    """A template whose expressions are open, without its lines of control."""

    def value(match: re.Match[str]) -> str:
        named = VALUE.search(match["inside"])
        if named is None:
            place = given.place(match[0])
            return given.left_open(match[0], f"is a template's{place}")
        if named[0] in given.values:
            return given.values[named[0]]
        return given.left_open(named[0], f"is a chart's value{given.place(named[0])}")

    return TEMPLATE.sub(value, CONTROL.sub("", text))


def _at(values: Any, path: Sequence[str]) -> Any:
    for name in path:
        if not isinstance(values, Mapping):
            return None
        values = values.get(name)
    return values


def _interpolated(document: dict[str, Any], given: Given) -> dict[str, Any]:
    """A Compose file with its ${X:-d} resolved, by --set and .env beside it."""
    shell = Shell(given, variables_of(given.file(".env") or ""))

    def text(node: Any) -> Any:
        if isinstance(node, str) and "$" in node:
            return shell.interpolated(node)
        if isinstance(node, Mapping):
            return {key: text(value) for key, value in node.items()}
        if isinstance(node, list):
            return [text(value) for value in node]
        return node

    resolved = text(document)
    assert isinstance(resolved, dict)
    return resolved


def _environment(
    container: Mapping[str, Any],
    around: Sequence[Mapping[str, Any]],
    given: Given,
) -> tuple[dict[str, Value], dict[str, str]]:
    """A container's variables, and why those are open that it takes from elsewhere."""
    variables: dict[str, Value] = {}
    reasons: dict[str, str] = {}
    for name in _listed(container.get("env_file")):
        path = name.get("path") if isinstance(name, Mapping) else name
        variables |= variables_of(given.file(text_of(path)) or "")
    for holder in (*around[1:3][::-1], container):
        for key in ("env", "envs", "environment"):
            for variable, value in _pairs_of(holder.get(key)):
                variables.pop(variable, None)
                reasons.pop(variable, None)
                if value is None:
                    place = given.place(variable)
                    reasons[variable] = f"is taken from elsewhere{place}"
                else:
                    variables[variable] = _dereferenced(value, variables, reasons, None)
    return variables, reasons


def _pairs_of(node: Any) -> Iterator[tuple[str, str | None]]:
    """Variables as a mapping, as a list of names and values, or as a list of NAME=value; None: the
    value stands elsewhere."""
    items: list[Any] = _listed(node)
    if isinstance(node, Mapping):
        items = [{"name": name, "value": value} for name, value in node.items()]
    for item in items:
        if isinstance(item, Mapping):
            value = item.get("value")
            is_plain = "valueFrom" not in item and not isinstance(value, Mapping | list)
            yield text_of(item.get("name")), text_of(value) if is_plain else None
        else:
            name, equals, value = text_of(item).partition("=")
            yield name, value if equals else None


def _listed(node: Any) -> list[Any]:
    if isinstance(node, list):
        return node
    if isinstance(node, str):
        return [node]
    return []


def _dereferenced(
    text: str,
    variables: Mapping[str, Value],
    reasons: Mapping[str, str],
    given: Given | None,
) -> str:
    """Kubernetes' $(X) resolved; `given`: where one that is not set is left open."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        known = variables.get(name)
        if given is not None and name in given.values:
            return given.values[name]
        if isinstance(known, str):
            return known
        if given is None:
            return match[0]
        place = given.place(match[0])
        return given.left_open(
            match[0], reasons.get(name, f"is set nowhere in this file{place}")
        )

    return REFERENCE.sub(value, text)


# Containers


def _containers(document: Mapping[str, Any]) -> Iterator[_FoundContainer]:
    """Mappings with a command or arguments, in the order of the text."""
    stack: list[tuple[Any, tuple[Mapping[str, Any], ...], str]] = [(document, (), "")]
    while stack:
        node, around, path = stack.pop()
        inner: list[tuple[Any, tuple[Mapping[str, Any], ...], str]] = []
        if isinstance(node, Mapping):
            if any(key in node for key in COMMAND_KEYS):
                yield _FoundContainer(node, around, path)
            for key, value in node.items():
                if isinstance(value, Mapping | list):
                    inner.append((value, (node, *around), f"{path}/{key}"))
        elif isinstance(node, list):
            for value in node:
                if isinstance(value, Mapping | list):
                    inner.append((value, around, path))
        stack += reversed(inner)


def _of_container(found: _FoundContainer, given: Given) -> list[Start]:
    container, around, path = found
    words = _container_words(container, around)
    if not any(MENTIONS.search(word) for word in words):
        return []
    variables, reasons = _environment(container, around, given)
    if "services" not in (around[-1] if around else {}):
        words = [_dereferenced(word, variables, reasons, given) for word in words]
    shell = Shell(given, variables, reasons=reasons)
    shell.command(_as_script(words))
    roles = [text_of(holder.get("subComponentType")) for holder in around[:4]]
    name = f"{path}/{text_of(container.get('name'))} {' '.join(roles)}"
    for start in shell.starts:
        _grant(start, [container, *around])
        if "prefill" in name.lower():
            start.is_prefill = True
    return shell.starts


def _container_words(
    container: Mapping[str, Any], around: Sequence[Mapping[str, Any]]
) -> list[str]:
    """A container's image, entry point, command and arguments."""
    words = [text_of(container.get("image"))]
    for key in ("entrypoint", "command", "args"):
        value = container.get(key)
        if isinstance(value, str):
            words += _divided(value)
        else:
            words += [text_of(word) for word in _listed(value)]
    if container.get("modelCommand") == "vllmServe":
        words[1:1] = ["vllm", "serve", *_served_of_values(around)]
    return words


def _as_script(words: list[str]) -> list[str]:
    """A container's words; arguments that are one whole command stand for its words."""
    for place, word in enumerate(words[1:], 1):
        is_command = re.match(
            r"\s*(?:exec\s+)?(?:python3?|vllm|sglang|trtllm-serve)\s", word
        )
        if is_command and not re.fullmatch(r"-\w*c", words[place - 1]):
            return [*words[:1], "sh", "-c", " ".join(words[place:])]
    return words


def _divided(text: str) -> list[str]:
    """A command in one text, as Compose divides it."""
    import shlex

    if len(text) > MOST_COMMAND:
        raise ConfigError(f"a command has more than {MOST_COMMAND} characters")
    try:
        return shlex.split(re.sub(r"\\[ \t]*\n", " ", text), comments=False)
    except ValueError as error:
        raise ConfigError(
            f"the command cannot be read as a shell reads it: {error}"
        ) from error


def _grant(start: Start, holders: Sequence[Mapping[str, Any]]) -> None:
    """Adds the devices that a manifest grants: their number, and their name where it is chosen."""
    for holder in holders:
        if start.num_gpus is None:
            start.num_gpus = _devices_of(holder)
        if start.hardware is None:
            start.hardware = _device_name(holder)
    pods = None
    for holder in holders:
        template = holder.get("leaderWorkerTemplate")
        if isinstance(template, Mapping):
            pods = template.get("size")
    if start.num_gpus and isinstance(pods, int) and 1 < pods < 1000:
        start.num_gpus *= pods


def _devices_of(holder: Mapping[str, Any]) -> int | None:
    """Devices that a mapping grants: Kubernetes' limits, Compose's reservations."""
    counts: list[Any] = []
    for kind in ("limits", "requests"):
        limits = _at(holder, ("resources", kind))
        if isinstance(limits, Mapping):
            for key, value in limits.items():
                if DEVICES.match(text_of(key)):
                    counts.append(value)
    reserved = _at(holder, ("deploy", "resources", "reservations", "devices"))
    for device in _listed(reserved):
        listed = _at(device, ("device_ids",))
        if isinstance(listed, list) and listed:
            counts.append(len(",".join(map(text_of, listed)).split(",")))
        counts.append(_at(device, ("count",)))
    counts.append(holder.get("gpus"))
    for count in counts:
        if re.fullmatch(r"\d{1,4}", text_of(count)):
            return int(text_of(count)) or None
    return None


def _device_name(holder: Mapping[str, Any]) -> str | None:
    selectors: list[Any] = [holder.get("nodeSelector")]
    terms = _at(
        holder,
        (
            "affinity",
            "nodeAffinity",
            "requiredDuringSchedulingIgnoredDuringExecution",
            "nodeSelectorTerms",
        ),
    )
    for term in _listed(terms):
        for expression in _listed(_at(term, ("matchExpressions",))):
            values = _listed(_at(expression, ("values",)))
            if values:
                selectors.append({_at(expression, ("key",)): values[0]})
    for selector in selectors:
        if not isinstance(selector, Mapping):
            continue
        for key in DEVICE_NAMES:
            if selector.get(key):
                name = text_of(selector[key]).lower()
                return re.sub(r"^nvidia-(tesla-)?", "", name)
    return None


# Values of charts and custom resources, whose controllers write the command


def _of_values(document: Mapping[str, Any], given: Given) -> list[Start]:
    """vLLM's production stack: servingEngineSpec.modelSpec."""
    starts = []
    spec = document.get("servingEngineSpec")
    common = spec if isinstance(spec, Mapping) else {}
    for model in _listed(common.get("modelSpec")):
        if not isinstance(model, Mapping):
            continue
        config = model.get("vllmConfig")
        options = dict(config) if isinstance(config, Mapping) else {}
        extra = [text_of(word) for word in _listed(options.pop("extraArgs", None))]
        options.pop("v1", None)
        options.pop("v0", None)
        words = [text_of(model.get("modelURL")), *words_of(options), *extra]
        variables, reasons = _environment(model, (), given)
        tag = re.match(r"v?(\d[\w.]*)", text_of(model.get("tag")))
        start = Start(
            engine="vllm",
            words=[_dereferenced(word, variables, reasons, given) for word in words],
            version=None if tag is None else tag[1],
        )
        if re.fullmatch(r"\d{1,4}", text_of(model.get("requestGPU"))):
            start.num_gpus = int(text_of(model["requestGPU"])) or None
        _grant(start, [model, common])
        starts.append(start)
    return starts


def _served_of_values(around: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields that llm-d's chart adds to a container: the model, and its parallelism."""
    words: list[str] = []
    for holder in around:
        artifacts = holder.get("modelArtifacts")
        if isinstance(artifacts, Mapping):
            uri = text_of(artifacts.get("uri"))
            name = text_of(artifacts.get("name"))
            if uri.startswith("hf://"):
                name = uri.removeprefix("hf://")
            words.insert(0, name)
        words += _parallelism(holder.get("parallelism"))
    return words


def _parallelism(node: Any) -> list[str]:
    words = []
    if isinstance(node, Mapping):
        for key in ("tensor", "data", "pipeline"):
            if node.get(key):
                words.append(f"--{key}-parallel-size={text_of(node[key])}")
        if node.get("expert") is True:
            words.append("--enable-expert-parallel")
    return words


def _of_resources(document: Mapping[str, Any]) -> list[Start]:
    """KServe's InferenceService and LLMInferenceService, and Ray Serve's llm_configs."""
    starts = []
    spec = document.get("spec")
    kind = document.get("kind")
    if isinstance(spec, Mapping) and kind in ("InferenceService", "ServingRuntime"):
        predictor = spec.get("predictor")
        model = _at(predictor, ("model",))
        form = _at(model, ("modelFormat", "name"))
        if isinstance(model, Mapping) and form in ("huggingface", "vLLM", "vllm"):
            starts.append(_of_kserve(model, predictor))
    if isinstance(spec, Mapping) and kind == "LLMInferenceService":
        starts.append(_of_llm_service(spec))
    for application in _listed(document.get("applications")):
        configs = _at(application, ("args", "llm_configs"))
        for config in _listed(configs):
            if isinstance(config, Mapping):
                starts.append(start_of_llm_config(config))
    return starts


def _of_kserve(model: Mapping[str, Any], predictor: Any) -> Start:
    words = [text_of(word) for word in _listed(model.get("args"))]
    text = "\n".join(words)
    text = re.sub(r"^--model[_-]id(?==|$)", "--model", text, flags=re.MULTILINE)
    text = OF_KSERVE.sub("", text)
    words = [word for word in text.split("\n") if word]
    uri = text_of(model.get("storageUri"))
    if uri and not any(word.startswith("--model") for word in words):
        words.insert(0, f"--model={_model_of(uri)}")
    start = Start(engine="vllm", words=words)
    _grant(start, [model, predictor if isinstance(predictor, Mapping) else {}])
    return start


def _of_llm_service(spec: Mapping[str, Any]) -> Start:
    words = [_model_of(text_of(_at(spec, ("model", "uri"))))]
    words += _parallelism(spec.get("parallelism"))
    speculator = spec.get("speculator")
    if isinstance(speculator, Mapping):  # https://github.com/kserve/kserve/pull/5687
        config = speculator.get("config")
        draft = dict(config) if isinstance(config, Mapping) else {}
        head = _at(speculator, ("model", "uri"))
        if head is not None:
            draft["model"] = _model_of(text_of(head))
        words.append(f"--speculative-config={json_of(draft)}")
    template = spec.get("template")
    containers = _listed(_at(template, ("containers",)))
    holders = [holder for holder in containers if isinstance(holder, Mapping)]
    for container in holders:
        words += [text_of(word) for word in _listed(container.get("args"))]
        extra = dict(_pairs_of(container.get("env"))).get("VLLM_ADDITIONAL_ARGS")
        if extra is not None:
            words += _divided(extra)
    start = Start(engine="vllm", words=words)
    for container in holders:
        start.built(build_of(text_of(container.get("image"))) or Build())
    outer = template if isinstance(template, Mapping) else {}
    _grant(start, [*holders, outer])
    return start


def _model_of(uri: str) -> str:
    return re.sub(r"^\w+://", "", uri)


def start_of_llm_config(config: Mapping[str, Any]) -> Start:
    """Ray Serve's LLMConfig, in YAML or in Python."""
    loading = config.get("model_loading_config")
    model = ""
    if isinstance(loading, Mapping):
        source = loading.get("model_source")
        model = text_of(source if isinstance(source, str) else loading.get("model_id"))
    kwargs = config.get("engine_kwargs")
    words = [model]
    if isinstance(kwargs, Mapping):
        words += words_of(kwargs)
    hardware = text_of(config.get("accelerator_type")).lower().replace("_", "-")
    return Start(engine="vllm", words=words, hardware=hardware or None)
