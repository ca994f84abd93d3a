"""Reads the options of engines' servers from their wheels, by version, into the package's data.

    pip download --no-deps -d wheels vllm==0.32.0 vllm==0.33.0
    python scripts/read_engine_options.py vllm wheels/vllm-0.32*.whl wheels/vllm-0.33*.whl
    python scripts/read_engine_options.py llama.cpp llama.cpp/common/arg.cpp

A folder with a wheel's files, named as the wheel is, is read alike. Nothing of a wheel is imported:
parsers are read as syntax. vLLM adds options in engine/arg_utils.py and in the entry points, each
typed by a field of a configuration's class; SGLang annotates fields. llama.cpp adds all options of its
programs in one file of C++, each with the programs that have it.
"""

from __future__ import annotations

import argparse
import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

OUTPUT = Path(__file__).resolve().parent.parent / "magicdec/specs/data/options"
READ = {
    "vllm": ("vllm/engine/", "vllm/entrypoints/", "vllm/config/"),
    "sglang": ("sglang/srt/server_args.py", "sglang/srt/arg_groups/", "sglang/cli/"),
}
ELSEWHERE = ("/benchmarks/", "run_batch", "entrypoints/cli/openai", "grpc_server")
"""Other commands' parsers."""
NESTED = {
    "vllm": {
        "speculative-config": "SpeculativeConfig",
        "compilation-config": "CompilationConfig",
    },
    "sglang": {},
}
"""Options that take an object, with the class whose fields are its keys."""
INSIDE = ("target_", "draft_model_config", "draft_parallel_config", "draft_load_config")
"""Fields that the engine fills in itself."""


ADDED = re.compile(
    r"common_arg\(\s*\{(?P<names>[^}]*)\}(?P<rest>.*?)(?=common_arg\(\s*\{|\Z)",
    re.DOTALL,
)
"""An option of llama.cpp: its names, and all up to the next one."""


GONE = {
    "cd": "the draft has its target's length",
    "ctx-size-draft": "the draft has its target's length",
    "mlock": "use --load-mode mlock",
    "mmap": "use --load-mode mmap",
    "no-mmap": "use --load-mode none",
    "direct-io": "use --load-mode dio",
    "dio": "use --load-mode dio",
}
"""Options of older builds of llama.cpp that its parser no longer has, and what took their place."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=sorted([*READ, "llama.cpp"]))
    parser.add_argument("wheels", nargs="+", type=Path)
    asked = parser.parse_args()
    if asked.engine == "llama.cpp":
        document = _llama_cpp(asked.wheels[0].read_text())
        path = OUTPUT / "llama.cpp.toml"
        path.write_text(tomli_w.dumps(document))
        print(
            path,
            {kind: len(names) for kind, names in document["options"]["all"].items()},
        )
        return
    by_version: dict[str, dict[str, str]] = {}
    keys: dict[str, dict[str, set[str]]] = {}
    for wheel in asked.wheels:
        version = wheel.name.split("-")[1]
        trees = list(_trees(wheel, READ[asked.engine]))
        by_version[version] = _options(trees, is_vllm=asked.engine == "vllm")
        for option, name in NESTED[asked.engine].items():
            keys.setdefault(option, {})[version] = _fields_of(trees, name)
    document = {
        "versions": list(by_version),
        "source": f"scripts/read_engine_options.py on {asked.engine}'s wheels",
        "options": _by_kind(by_version),
    }
    for option, fields in keys.items():
        document.setdefault("keys", {})[option] = _merged(fields)
    OUTPUT.mkdir(exist_ok=True)
    path = OUTPUT / f"{asked.engine}.toml"
    path.write_text(tomli_w.dumps(document))
    print(path, {version: len(found) for version, found in by_version.items()})


def _llama_cpp(text: str) -> dict[str, Any]:
    """The options of llama.cpp's server, those that it names only to refuse them, and the variables
    that set one."""
    kinds: dict[str, list[str]] = {"flag": [], "value": []}
    removed = dict(GONE)
    variables = {}
    for match in ADDED.finditer(text):
        rest = match["rest"]
        of_programs = "".join(re.findall(r"set_examples\(\{(.*?)\}", rest))
        not_of = "".join(re.findall(r"set_excludes\(\{(.*?)\}", rest))
        if of_programs and not re.search("_SERVER|_COMMON", of_programs):
            continue
        if "_SERVER" in not_of:
            continue
        names = re.findall(r'"--?([^"]+)"', match["names"])
        opposites = re.match(r"\s*,\s*\{([^}]*)\}", rest)
        hint = re.search(r'arg_removed\("(.*?)"', rest)
        if hint is not None:
            removed |= dict.fromkeys(names, hint[1])
            continue
        kind = "value"
        if re.search(
            r"\(common_params & ?(?:params|/\*params\*/)?(?:, bool \w*)?\)", rest
        ):
            kind = "flag"
        kinds[kind] += names
        if opposites is not None:
            kinds["flag"] += re.findall(r'"--?([^"]+)"', opposites[1])
        variable = re.search(r'set_env\("(\w+)"\)', rest)
        if variable is not None:
            variables[variable[1]] = names[-1]
    return {
        "versions": ["2026"],
        "source": "scripts/read_engine_options.py on common/arg.cpp, as llama-cpp-python 0.3.36 brings it along",
        "options": {"all": {kind: sorted(set(names)) for kind, names in kinds.items()}},
        "removed": removed,
        "variables": variables,
    }


def _trees(wheel: Path, prefixes: tuple[str, ...]) -> Iterator[ast.Module]:
    """The syntax of the files of a wheel, or of its folder, that begin with one of the prefixes."""
    if wheel.is_dir():
        files = (wheel / prefix for prefix in prefixes)
        names = [
            path.relative_to(wheel).as_posix()
            for place in files
            for path in (place.rglob("*.py") if place.is_dir() else [place])
        ]
        for name in sorted(names):
            if _is_read(name, prefixes) and (wheel / name).is_file():
                yield ast.parse((wheel / name).read_bytes())
        return
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if _is_read(name, prefixes):
                yield ast.parse(archive.read(name))


def _is_read(name: str, prefixes: tuple[str, ...]) -> bool:
    is_source = name.endswith(".py") and name.startswith(prefixes)
    return is_source and not any(part in name for part in ELSEWHERE)


def _options(trees: list[ast.Module], *, is_vllm: bool) -> dict[str, str]:
    """Kinds by option: flag, value or list."""
    kinds: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign):
                        name = ast.unparse(field.target)
                        annotations.setdefault(name, ast.unparse(field.annotation))
                        _add_field(node.name, field, kinds)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _is_added(node):
                kind = _kind(node, annotations)
                for name in _names(node):
                    kinds.setdefault(name, kind)
    if is_vllm:
        kinds |= {"O": "value", "config": "value"}
    return kinds


def _add_field(owner: str, field: ast.AnnAssign, kinds: dict[str, str]) -> None:
    """A field that stands for an option: of vLLM's front end, or annotated as SGLang's are."""
    name = ast.unparse(field.target)
    annotation = field.annotation
    if owner.endswith("FrontendArgs"):
        kinds.setdefault(name.replace("_", "-"), _kind_of(ast.unparse(annotation)))
        return
    if (
        not isinstance(annotation, ast.Subscript)
        or ast.unparse(annotation.value) != "A"
    ):
        return
    assert isinstance(annotation.slice, ast.Tuple)
    kind = _kind_of(ast.unparse(annotation.slice.elts[0]))
    names = [name.replace("_", "-")]
    metadata = annotation.slice.elts[1]
    if isinstance(metadata, ast.Call):
        given = {keyword.arg: keyword.value for keyword in metadata.keywords}
        if "no_cli" in given:
            return
        if "cli_name" in given:
            names = [ast.literal_eval(given["cli_name"]).lstrip("-")]
        if "aliases" in given:
            names += [word.lstrip("-") for word in ast.literal_eval(given["aliases"])]
        if "type_parser" in given and kind == "list":
            kind = "value"
    for spelling in names:
        kinds.setdefault(spelling, kind)


def _is_added(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"


def _names(call: ast.Call) -> Iterator[str]:
    for argument in call.args:
        is_text = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        if is_text and argument.value.startswith("-"):
            yield argument.value.lstrip("-").replace("_", "-")


def _kind(call: ast.Call, annotations: dict[str, str]) -> str:
    """The kind of an added option: by its action, or by the field that types it."""
    for keyword in call.keywords:
        text = ast.unparse(keyword.value)
        if keyword.arg == "action" and (
            "rue" in text or "alse" in text or "Bool" in text
        ):
            return "flag"
        if keyword.arg == "nargs" and text in ("'+'", "'*'"):
            return "list"
        if keyword.arg == "nargs" and text == "'?'":
            return "value"
        fields = [  # **kwargs["x"], or **{**kwargs["x"], "default": None}
            node for node in ast.walk(keyword.value) if isinstance(node, ast.Subscript)
        ]
        if keyword.arg is None and fields:
            field = ast.literal_eval(fields[0].slice)
            return _kind_of(annotations.get(field, "str"))
    return "value"


def _kind_of(annotation: str) -> str:
    words = re.sub(r"(Optional|SkipValidation|InitVar)\[", "", annotation)
    if words.startswith("bool"):
        return "flag"
    if re.search(r"(^|\| )([Ll]ist|set)\[", words):
        return "list"
    return "value"


def _fields_of(trees: list[ast.Module], name: str) -> set[str]:
    fields = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                for field in node.body:
                    if isinstance(field, ast.AnnAssign):
                        fields.add(ast.unparse(field.target))
    return {field for field in fields if not field.startswith(INSIDE)}


def _by_kind(by_version: dict[str, dict[str, str]]) -> dict[str, dict[str, list[str]]]:
    """Names by versions that have them and kind; "all": every version."""
    document: dict[str, dict[str, list[str]]] = {}
    names = sorted({name for found in by_version.values() for name in found})
    for name in names:
        versions = [version for version, found in by_version.items() if name in found]
        where = "all" if len(versions) == len(by_version) else " ".join(versions)
        kind = by_version[versions[-1]][name]
        document.setdefault(where, {}).setdefault(kind, []).append(name)
    return document


def _merged(fields: dict[str, set[str]]) -> dict[str, list[str]]:
    document: dict[str, list[str]] = {}
    for name in sorted(set().union(*fields.values())):
        versions = [version for version, found in fields.items() if name in found]
        where = "all" if len(versions) == len(fields) else " ".join(versions)
        document.setdefault(where, []).append(name)
    return document


if __name__ == "__main__":
    main()
