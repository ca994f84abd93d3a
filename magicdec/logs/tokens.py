"""Text to token ids: a model's tokenizer.json, and its chat template where prompts are messages."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from magicdec.errors import ConfigError
from magicdec.files import read_json, read_text
from magicdec.logs.formats import UnreadableError
from magicdec.logs.ngram import Ints

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
)


class TextTokenizer:
    """A model's tokenizer with its chat template."""

    def __init__(self, path: Path) -> None:
        """Load `path`, a tokenizer.json or its directory.

        Raises:
            ConfigError: it is none.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError(
                "reading text needs the package tokenizers: pip install 'magicdec[logs]'"
            ) from None
        if path.is_dir():
            file = path / "tokenizer.json"
        else:
            file = path
        text = read_text(file, "tokenizer")
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except (
            Exception
        ) as failure:  # the library raises plain Exception for any file that is none
            raise ConfigError(f"{file} is no tokenizer.json: {failure}") from None
        self._folder = file.parent
        config_file = self._folder / "tokenizer_config.json"
        if config_file.is_file():
            config = dict(read_json(config_file))
        else:
            config = {}
        # each is a text, or an object with its content
        tokens: dict[str, str] = {}
        for name in SPECIAL_TOKENS:
            value = config.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
        self._special = tokens
        self._template = self._compiled(_template_of(config, self._folder))
        stop = self._special.get("eos_token")
        self.stop_id: int | None = self._tokenizer.token_to_id(stop) if stop else None

    def text_ids(self, text: str, *, is_prompt: bool) -> Ints:
        """Return the ids of a text; those of a prompt begin as the tokenizer begins one."""
        encoded = self._tokenizer.encode(text, add_special_tokens=is_prompt)
        return np.array(encoded.ids, dtype=np.int32)

    def message_ids(self, messages: Sequence[Mapping[str, Any]]) -> Ints:
        """Return the ids of messages in the model's chat template, with the answer's beginning.

        Raises:
            UnreadableError: there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise UnreadableError("messages, but the tokenizer has no chat template")
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                **self._special,
            )
        except Exception as failure:
            raise UnreadableError(
                f"the chat template refuses its messages ({type(failure).__name__})"
            ) from None
        return np.array(
            self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32
        )

    def _compiled(self, source: str | None) -> Any:
        """The chat template as the libraries that serve models render it."""
        if source is None:
            return None
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = datetime.datetime.now().strftime
        try:
            return environment.from_string(source)
        except TemplateError as failure:
            raise ConfigError(
                f"the chat template of {self._folder}: {failure}"
            ) from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    **options: Any,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _template_of(config: Mapping[str, Any], folder: Path) -> str | None:
    """The chat template: a file of its own, or a field; of several the default."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return read_text(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", next(iter(named.values()), None))
    if isinstance(template, str):
        return template
    return None
