"""The trained head that options name: by its directory, by a name on the hub, or by its method
where the target brings it along.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from magicdec.specs.catalog import local_model, shipped_head
from magicdec.specs.speculation import (
    HEAD_METHODS,
    DraftMethod,
    HeadSpec,
    SpeculationSpec,
    is_head_directory,
    load_head,
)


@dataclass(frozen=True, kw_only=True)
class NamedHead:
    """A trained head, and where its weights are."""

    method: DraftMethod
    spec: HeadSpec | None = None
    checkpoint: str | None = None
    """Its directory; None: its weights are part of the target's checkpoint."""

    def speculation(self, *, gamma: int) -> SpeculationSpec:
        """Speculation with this head."""
        return SpeculationSpec(
            draft=self.method,
            draft_method=self.method,
            gamma=gamma,
            head=self.spec,
            checkpoint=self.checkpoint,
        )


def named_head(
    model: str,
    draft: str,
    draft_model: str | None,
    *,
    with_weights: bool = True,
) -> NamedHead | None:
    """The head of a target that `--draft` and `--draft-model` name; None where they name none.

    Raises ConfigError where its configuration is not there or is of another head.
    """
    method = next((known for known in HEAD_METHODS if known == draft), None)
    directory: Path | None = None
    if draft_model is not None:
        directory = Path(draft_model)
        if not directory.exists():
            directory = Path(local_model(draft_model, with_weights=with_weights))
    elif method is not None:
        directory = shipped_head(model, method)
    elif is_head_directory(draft):
        directory = Path(draft)
    if directory is not None:
        spec = load_head(directory, method=method)
        if directory.is_file():
            place = directory.parent
        else:
            place = directory
        return NamedHead(method=spec.method, spec=spec, checkpoint=str(place))
    if method is not None:
        return NamedHead(method=method)
    return None


def head_beside(model: str) -> NamedHead | None:
    """The head that ships with a model, if any."""
    for method in HEAD_METHODS:
        if shipped_head(model, method) is not None:
            return named_head(model, method, None)
    return None
