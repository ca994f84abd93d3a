"""Typed look-ups in a Hugging Face configuration that remember what was read.

A key that nobody reads, and that is not known to change nothing, means that the model is not
understood: it is refused by name, never guessed. So the table of an architecture's structural keys
is what its row reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, TypeGuard, TypeVar

from magicdec.errors import ConfigError, unknown_choice
from magicdec.specs.layers import Activation

DEFAULTS_FILE = Path(__file__).resolve().parents[1] / "data" / "config_defaults.json"
"""Fields and defaults of transformers' configuration classes, written by
scripts/config_defaults.py.
"""
MAX_DIMENSION = 2**31
MAX_LAYERS = 10_000
T = TypeVar("T")

IRRELEVANT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels
    add_cross_attention architectures attention_dropout attn_implementation attn_pdrop auto_map
    aux_loss_alpha bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward cross_attention_hidden_size custom_pipelines decoder_start_token_id
    diversity_penalty do_sample dropout dtype early_stopping embd_pdrop embedding_dropout
    encoder_no_repeat_ngram_size eos_token_id experts_implementation
    exponential_decay_length_penalty finetuning_task for_llm_compressor forced_bos_token_id
    forced_eos_token_id hidden_dropout id2label init_method_std initializer_range input_jitter_noise
    is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id length_penalty
    mamba_ssm_cache_dtype max_length max_sequence_length min_length model_max_length model_type
    moe_router_dtype moe_shared_expert_overlap name_or_path no_repeat_ngram_size num_beam_groups
    num_beams num_labels num_logits_to_keep num_return_sequences output_attentions output_dropout
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty rescale_prenorm_residual
    resid_pdrop residual_dropout residual_in_fp32 return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise router_z_loss_coef sep_token_id seq_aux suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder time_step_floor
    time_step_max time_step_min time_step_rank tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16
    use_cache use_mamba_kernels use_return_dict
    """.split()  # noqa: SIM905  (a list of 100 strings would be 100 lines)
)
"""Keys of training, generation, files and software, in any architecture: they change no weight and
no logit.
"""

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""transformers' names of activation functions (transformers/activations.py)."""

KINDS = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    NoneType: "null",
    list: "list",
    dict: "dict",
}
"""Names of JSON's kinds of value in the table of fields."""
WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number written with a point",
    "str": "a string",
    "null": "null",
    "list": "a list",
    "dict": "an object",
}
_MISSING = object()


class ConfigFields(NamedTuple):
    """A configuration class of transformers, as scripts/config_defaults.py has written it down."""

    fields: Mapping[str, tuple[str, Any]] = MappingProxyType({})
    """Kinds of values that a field accepts, and its value if a file lacks it."""
    aliases: Mapping[str, str] = MappingProxyType({})
    """Other spellings of fields, in both directions."""


@cache
def _known() -> dict[str, Any]:
    model_types: dict[str, Any] = json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))[
        "model_types"
    ]
    return model_types


def fields_of(model_type: str) -> ConfigFields:
    return ConfigFields(**_known()[model_type])


NO_FIELDS = ConfigFields()


class Keys:
    """A configuration's keys, those that are missing as transformers' class has them. Errors name
    the file and the key; `unread` lists the keys that no reader used. A key may be null where the
    class accepts null, and means what the class makes of it."""

    def __init__(
        self, values: Mapping[str, Any], where: str, known: ConfigFields = NO_FIELDS
    ) -> None:
        self._values = values
        self.where = where
        self._fields, self._aliases = known
        self._read: set[str] = set()
        for key, value in values.items():
            field = self._fields.get(key) or self._fields.get(
                self._aliases.get(key, "")
            )
            if field:
                kinds = field[0].split("|")
            else:
                kinds = ["any"]
            if "any" not in kinds and KINDS.get(type(value)) not in kinds:
                raise self.error(key, " or ".join(WORDS[kind] for kind in kinds), value)

    def error(self, key: str, expected: str, value: object) -> ConfigError:
        return ConfigError(
            f"{self.where}: key '{key}' must be {expected}, not {_shown(value)}"
        )

    def raw(self, *names: str, default: Any = _MISSING) -> Any:
        """The value under the first of these names that the file has. Several names are spellings
        of one key; spellings that the class lacks are ignored. A file without any of them gives the
        class's default; a class without the key gives `default`."""
        names = self._spellings(names) or names
        self._read.update(names)
        present = {name: self._values[name] for name in names if name in self._values}
        if present:
            self._require_equal(present)
            return next(iter(present.values()))
        for name in names:
            if name in self._fields:
                return self._fields[name][1]
        if default is _MISSING:
            raise ConfigError(f"{self.where}: key '{names[0]}' is missing")
        return default

    def _spellings(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The names that the class has, each followed by its other spelling."""
        spellings = []
        for name in names:
            spellings.append(name)
            if name in self._aliases:
                spellings.append(self._aliases[name])
        known = self._fields.keys() | self._aliases.keys()
        return tuple(spelling for spelling in spellings if spelling in known)

    def _require_equal(self, values: Mapping[str, Any]) -> None:
        """Refuses spellings of one setting whose values differ."""
        first = next(iter(values.values()))
        if all(value == first for value in values.values()):
            return
        shown = ", ".join(f"'{name}' {_shown(value)}" for name, value in values.items())
        raise ConfigError(f"{self.where}: {shown} are one setting, and differ")

    def default(self, key: str) -> Any:
        """The class's own value of a key, whatever the file says; None where it has none."""
        if key in self._fields:
            return self._fields[key][1]
        return None

    def knows(self, key: str) -> bool:
        """Whether the class has this field."""
        return key in self._fields

    def size(self, *names: str, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.raw(*names)
        if not is_whole(value):
            raise self.error(names[0], "a whole number", value)
        if not least <= value <= MAX_DIMENSION:
            raise self.error(names[0], f"between {least} and {MAX_DIMENSION}", value)
        return value

    def optional_size(self, *names: str, least: int = 1) -> int | None:
        """A whole number. None: the key is missing or null."""
        if self.raw(*names, default=None) is None:
            return None
        return self.size(*names, least=least)

    def number(self, *names: str, least: float = 0.0, most: float = 1e15) -> float:
        """A finite number above `least` and at most `most`."""
        value = self.raw(*names)
        if not is_number(value):
            expected = "a number"
            if least == 0:
                expected = "a positive number"
            raise self.error(names[0], expected, value)
        if not least < value <= most:
            raise self.error(names[0], f"above {least:g} and at most {most:g}", value)
        return float(value)

    def optional_number(
        self, *names: str, least: float = 0.0, most: float = 1e15
    ) -> float | None:
        if self.raw(*names, default=None) is None:
            return None
        return self.number(*names, least=least, most=most)

    def flag(self, *names: str) -> bool:
        """True or false; null is false."""
        value = self.raw(*names)
        if value is not None and not isinstance(value, bool):
            raise self.error(names[0], "true or false", value)
        return bool(value)

    def choice(self, *names: str, choices: Mapping[str, T]) -> T:
        """The value that one of some names stands for. Raises ConfigError naming the nearest for
        another.
        """
        value = self.raw(*names)
        if not isinstance(value, str):
            raise self.error(names[0], "a string", value)
        if value not in choices:
            raise unknown_choice(f"{names[0]} in {self.where}", value, choices)
        return choices[value]

    def activation(self, *names: str) -> Activation:
        return self.choice(*(names or ("hidden_act",)), choices=ACTIVATIONS)

    def per_layer(
        self,
        key: str,
        num_layers: int,
        item: Callable[[Any], bool],
        expected: str,
    ) -> list[Any] | None:
        """A list with one entry per layer. None: the key is missing."""
        value = self.raw(key, default=None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(item(entry) for entry in value):
            raise self.error(key, f"a list of {expected}", value)
        if len(value) != num_layers:
            raise ConfigError(
                f"{self.where}: key '{key}' has {len(value)} entries for {num_layers} layers"
            )
        return value

    def indices(self, key: str, num_layers: int) -> frozenset[int] | None:
        """A list of layers' numbers."""
        value = self.raw(key, default=None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(is_whole(index) for index in value):
            raise self.error(key, "a list of whole numbers", value)
        return frozenset(index for index in value if index < num_layers)

    def require(self, key: str, *allowed: Any) -> None:
        """Refuses a setting whose value is not one of `allowed`. Null is false."""
        value = self.raw(key, default=allowed[0])
        if value is None:
            means_false = not self.knows(key) or not allowed[0]
            if means_false:
                return
        for choice in allowed:
            if value == choice and type(value) is type(choice):
                return
        expected = _shown(allowed[0])
        if len(allowed) > 1:
            expected = "one of " + ", ".join(map(_shown, allowed))
        raise self.error(key, expected, value)

    def ignore(self, *names: str) -> None:
        """Counts keys as read that change nothing in this architecture."""
        self._read.update(names)

    def unread(self) -> list[str]:
        """Keys that no reader used and that may matter, in the file's order. Null keys are passed
        over.
        """
        known = self._read | IRRELEVANT
        unread = []
        for key, value in self._values.items():
            if key not in known and value is not None:
                unread.append(key)
        return unread


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _shown(value: object) -> str:
    text = re.sub(r"\s+", " ", repr(value))
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    if len(text) <= 80:
        return text
    return text[:77] + "..."
