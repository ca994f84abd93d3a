"""Names the draft in the server's metrics, since none of the engine's own does: a gauge of 1 with
labels.

    magicdec:draft_info{model_name="...",engine="0",
                        draft="self",draft_method="streamingllm",draft_budget="512"} 1.0

The engine builds it in the process of its API server, from the group `vllm.stat_logger_plugins`,
beside its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from magicdec.errors import ConfigError
from magicdec.specs.vllm_plugin import read_settings
from magicdec_vllm.patches import is_asked_for

NAME = "magicdec:draft_info"
LABELS = ("model_name", "engine", "draft", "draft_method", "draft_budget")


@cache
def _gauge() -> Gauge:
    return Gauge(
        NAME, "What magicdec's draft is", LABELS, multiprocess_mode="mostrecent"
    )


class DraftInfo(StatLoggerBase):  # type: ignore[misc]  # untyped where vLLM is not installed
    """Does nothing where the configuration does not name the draft."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        if not is_asked_for(vllm_config):
            return
        try:
            settings = read_settings(vllm_config.additional_config)
        except ConfigError:  # the draft itself refuses it, in the engine's process
            return
        model = vllm_config.model_config.served_model_name
        _gauge().labels(
            model_name=model if isinstance(model, str) else model[0],
            engine=str(engine_index),
            draft="self",
            draft_method=settings.draft_method,
            draft_budget=str(settings.draft_budget),
        ).set(1)

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing changes while it runs."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
