"""Checkpoints by their name on the Hugging Face hub, where there is a network and the hub's client is installed."""

from __future__ import annotations

import re
from pathlib import Path

from magicdec.errors import ConfigError

WANTED = ["config.json", "tokenizer.json", "tokenizer_config.json"]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_hub_name(model: str, *, with_weights: bool) -> str:
    """The local directory of `owner/name`, downloaded on first use; any other model argument as it is.

    Raises ConfigError when it looks like a hub name but cannot be fetched.
    """
    if Path(model).exists() or not _HUB_NAME.fullmatch(model) or model.startswith("."):
        return model
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{model} is no local directory, and fetching it from the hub needs the package huggingface_hub"
        ) from error
    patterns = [*WANTED, "*.safetensors", "*.safetensors.index.json"] if with_weights else WANTED
    try:
        return str(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the client raises its own, the transport's and OSError
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"{model} is no local directory and cannot be fetched from the hub: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error
