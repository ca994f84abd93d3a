"""Writes what transformers' configuration classes take for keys that a `config.json` leaves out:
magicdec/specs/data/config_defaults.json, which the readers of specs/families ask for every missing key.

    python scripts/config_defaults.py          # seconds
    python scripts/config_defaults.py --check  # exits with 1 where the installed transformers says otherwise

Of each architecture: its fields with the kinds of value that they accept and their default, the constants that its
class takes for keys of older files, its default rope, and the other spellings of its fields.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, is_typeddict

from magicdec.specs.families import ARCHITECTURES, qwen
from magicdec.specs.families.keys import DEFAULTS_FILE

ROOT = Path(__file__).resolve().parent.parent
NAMES = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    type(None): "null",
    list: "list",
    tuple: "list",
}
PROBE = 7.5
"""A rope's base that no class has: where it comes back, the file's own governs."""
OTHERS_CLASS = {
    "kimi_k2": "deepseek_v3",
    "nemotron-nas": "llama",
    "qwen2_5_vl": "qwen2_5_vl_text",
}
"""Architectures whose configurations are read by another's class."""
OWN = {
    "nemotron-nas": {
        "intermediate_size": ["int|null", None],
        "num_key_value_heads": ["int|null", None],
    }
}
"""Fields that the publisher's code has otherwise: blocks have sizes of their own."""
SOFTWARE = (
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "problem_type",
    "transformers_version",
)
"""Fields of files and classifiers, whose kinds are not those of JSON."""


def kinds(annotation: Any) -> set[str]:
    """The kinds of JSON's values that an annotation accepts."""
    origin = get_origin(annotation)
    if origin in (types.UnionType, Union):
        return set().union(*map(kinds, get_args(annotation)))
    if origin is Literal:
        return set().union(*(kinds(type(value)) for value in get_args(annotation)))
    known = origin or annotation
    return {NAMES.get(known, "dict" if known is dict or is_typeddict(known) else "any")}


def field(annotation: Any, default: Any) -> list[Any]:
    accepted = eval(annotation) if isinstance(annotation, str) else annotation
    return [
        "|".join(sorted(kinds(accepted))),
        list(default) if isinstance(default, tuple) else default,
    ]


def of_older_files(cls: type) -> dict[str, list[Any]]:
    """Constants that a class takes for a key that is no field: `kwargs.pop("full_attention_interval", 4)`."""
    found = {}
    for method in ("__post_init__", "convert_rope_params_to_dict"):
        if method not in vars(cls):
            continue
        for node in ast.walk(
            ast.parse(textwrap.dedent(inspect.getsource(vars(cls)[method])))
        ):
            match node:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Name(id="kwargs"), attr="pop" | "get" | "setdefault"
                    ),
                    args=[ast.Constant(value=str(key)), ast.Constant(value=default)],
                ) if default is not None:
                    found[key] = ["any", default]
    return found


def rope(cls: type) -> dict[str, list[Any]]:
    """The rope of a file without any; what a field of its own or the file's base decides is left out."""
    theta = getattr(cls, "default_theta", None)
    if isinstance(theta, dict):  # of kinds of layers
        return {
            "rope_theta": ["any", theta["global"]],
            "rope_local_base_freq": ["any", theta["local"]],
        }
    found = {} if theta is None else {"rope_theta": ["any", float(theta)]}
    given = getattr(cls(rope_theta=PROBE), "rope_parameters", None) or {}
    own = {
        key: value
        for key, value in given.items()
        if value != PROBE and key != "max_position_embeddings"
    }
    if set(own) - {
        "rope_type",
        "type",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    } and not any(isinstance(value, dict) for value in own.values()):
        found["rope_parameters"] = ["dict|null", own]
    return found


def entry(cls: type) -> dict[str, Any]:
    """What the table says of a class; aliases in both directions."""
    fields = {
        each.name: field(each.type, each.default)
        for each in dataclasses.fields(cls)
        if each.name not in SOFTWARE and each.default is not dataclasses.MISSING
    }
    mapped = {
        name: other
        for name, other in cls.attribute_map.items()
        if {name, other} & set(fields)
    }
    return {
        "fields": {**fields, **of_older_files(cls), **rope(cls)},
        "aliases": {**mapped, **{other: name for name, other in mapped.items()}},
    }


def table() -> dict[str, Any]:
    import transformers

    names = sorted({*ARCHITECTURES, *qwen.MULTIMODAL})
    found = {}
    for name in names:
        cls = transformers.CONFIG_MAPPING[OTHERS_CLASS.get(name, name)]
        found[name] = entry(cls)
        found[name]["fields"] |= OWN.get(name, {})
    return {"transformers": transformers.__version__, "model_types": found}


def written(content: dict[str, Any]) -> str:
    """As JSON with a line for each field."""
    types_ = []
    for name, each in content["model_types"].items():
        fields = ",\n".join(
            f"   {json.dumps(key)}: {json.dumps(value)}"
            for key, value in each["fields"].items()
        )
        aliases = json.dumps(each["aliases"])
        types_.append(
            f'  {json.dumps(name)}: {{\n   "aliases": {aliases},\n   "fields": {{\n{fields}\n  }}}}'
        )
    version = json.dumps(content["transformers"])
    return (
        f'{{\n "transformers": {version},\n "model_types": {{\n'
        + ",\n".join(types_)
        + "\n }\n}\n"
    )


def main() -> int:
    text = written(table())
    if "--check" in sys.argv[1:]:
        is_stale = DEFAULTS_FILE.read_text(encoding="utf-8") != text
        if is_stale:
            print(
                f"{DEFAULTS_FILE.relative_to(ROOT)} is not transformers': python scripts/config_defaults.py"
            )
        return int(is_stale)
    DEFAULTS_FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
