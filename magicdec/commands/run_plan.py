"""Reads what `magicdec plan --format json` wrote: the configurations that a run of it measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from magicdec.errors import ConfigError

OPTION_OF_KEY = {
    "draft": "draft",
    "draft_method": "draft_method",
    "draft_budget": "draft_budget",
    "draft_tp_size": "draft_tp",
    "gamma": "gamma",
    "tp_size": "tp",
    "batch_size": "batch",
    "context_len": "context",
}
"""Keys of a plan's row, and the run's option that each sets."""
OPTION_OF_REQUEST = {"gen_len": "gen_len", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}


def read_plan(path: Path) -> list[dict[str, Any]]:
    """The options of the plan's best configuration and of its runner-up (the next best of the same batch, context and
    devices, where there is one).

    Raises ConfigError when the file is no plan.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read plan {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; write it with `magicdec plan --format json`") from error
    if not isinstance(document, dict) or document.get("kind") != "plan":
        raise ConfigError(f"{path} is no plan; write one with `magicdec plan --format json`")
    try:
        best, candidates, request = document["best"], document["candidates"], document["request"]
        rows = [best, *_runner_up(best, candidates)]
        common = {"model": request.get("model") or document["model"]}
        common |= {option: request[key] for key, option in OPTION_OF_REQUEST.items() if request.get(key) is not None}
        return [_options(row, common) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a whole plan: {error!r}") from error


def _runner_up(best: dict[str, Any], candidates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    others = [row for row in candidates if any(row[key] != best[key] for key in OPTION_OF_KEY)]
    alike = [row for row in others if all(row[k] == best[k] for k in ("batch_size", "context_len", "tp_size"))]
    return (alike or others)[:1]


def _options(row: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    options = common | {option: row[key] for key, option in OPTION_OF_KEY.items()}
    # Lists on the command line, so text here.
    options["gamma"] = str(options["gamma"])
    options["draft_budget"] = str(options["draft_budget"]) if options["draft_budget"] is not None else None
    if not options.get("gen_len"):
        options.pop("gen_len", None)
    return options
