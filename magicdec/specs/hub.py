"""Configurations and checkpoints of the Hugging Face hub, by `owner/name`: from the local cache, or
downloaded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from magicdec.errors import ConfigError

CONFIG = "config.json"
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]
WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
HUB_TIMEOUT_S = 5.0
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_hub_name(model: str) -> bool:
    """Whether a model argument is `owner/name` and no path that exists."""
    if model.endswith((".json", ".toml")) or not HUB_NAME.fullmatch(model):
        return False
    return not Path(model).exists()


def hub_config(name: str) -> Path:
    """The `config.json` of `owner/name`, from the local cache or else downloaded, with a line on
    stderr.

    Raises ConfigError when there is no copy and none can be fetched.
    """
    cached = cached_config(name)
    if cached is not None:
        return cached
    client = _client(name)
    return Path(
        _fetched(name, CONFIG, client, lambda: client.hf_hub_download(name, CONFIG))
    )


def cached_config(name: str) -> Path | None:
    """The `config.json` of `owner/name` in the local cache, if there is one.

    Raises ConfigError where there may be one and the hub's client is not installed.
    """
    # the client takes .7 s to import, which plans ask for each head of the catalog
    if not (_cache_directory() / f"models--{name.replace('/', '--')}").exists():
        return None
    cached = _client(name).try_to_load_from_cache(name, CONFIG)
    if isinstance(cached, str):
        return Path(cached)
    return None


def _cache_directory() -> Path:
    """Where the hub's client keeps repositories, by the variables that it reads."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{caches}/huggingface")
    cache = f"{home}/hub"
    for variable in ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        cache = os.environ.get(variable, cache)
    return Path(os.path.expandvars(cache)).expanduser()


def hub_checkpoint(name: str, *, with_weights: bool) -> str:
    """The local directory of `owner/name`, downloaded on first use: configuration and tokenizer,
    and weights if asked.

    Raises ConfigError when it cannot be fetched.
    """
    client = _client(name)
    patterns = [CONFIG, *TOKENIZER]
    if with_weights:
        patterns += WEIGHTS
    try:  # a copy that is whole needs no network
        return str(
            client.snapshot_download(
                name, allow_patterns=patterns, local_files_only=True
            )
        )
    except (OSError, ValueError):
        pass
    if with_weights:
        what = "the checkpoint"
    else:
        what = CONFIG
    return str(
        _fetched(
            name,
            what,
            client,
            lambda: client.snapshot_download(name, allow_patterns=patterns),
        )
    )


def _client(name: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"{name} is not in the catalog, and reading it from the Hugging Face hub needs "
            f"huggingface_hub: pip install huggingface_hub, or give its {CONFIG}"
        ) from error
    return huggingface_hub


def _fetched(name: str, wanted: str, client: Any, fetch: Callable[[], Any]) -> Any:
    """The result of `fetch`. The hub is tried once before, because the client would retry for half
    a minute where there is no network.
    """
    import httpx

    try:
        if client.is_offline_mode():
            raise OSError("HF_HUB_OFFLINE is set")
        httpx.head(client.constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
        print(f"fetching {wanted} of {name} from the Hugging Face hub", file=sys.stderr)
        return fetch()
    except (OSError, ValueError, httpx.HTTPError) as error:
        lines = str(error).strip().splitlines()
        if lines:
            reason = lines[0]
        else:
            reason = type(error).__name__
        raise ConfigError(
            f"{name} is neither in the catalog nor in the local Hugging Face cache, and the hub "
            f"does not give it ({reason}); download "
            f"https://huggingface.co/{name}/resolve/main/{CONFIG} and give the file instead"
        ) from error
