"""Counts of finished parts of a long replay, kept in a folder to go on from.

A part is data alone (MessagePack of known fields), so reading one that somebody else prepared runs
nothing. Only files that this replay wrote or used are removed again."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from magicdec.files import write_atomic
from magicdec.logs.requests import Account
from magicdec.logs.tally import Tally

if TYPE_CHECKING:
    from magicdec.logs.replay import Counted, ReplayTask

SCHEMA = 2
"""Version of the parts; those of another are counted again."""


class _TaskCounts(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A task's counts as they stand in a file; arrays are flat, their shapes follow from the task."""

    schema: int
    account: Account
    arrays: dict[str, list[int]]
    replay_s: float


class Parts:
    """A folder of counts of finished tasks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_ours = not folder.exists()
        self._files: list[Path] = []

    def load(self, task: ReplayTask) -> Counted | None:
        """Return the counts that were kept of a task; None where there are none that can be used."""
        from magicdec.logs.replay import Counted

        file = self._file(task)
        try:
            part = msgspec.msgpack.decode(file.read_bytes(), type=_TaskCounts)
            tally = Tally.of_arrays(task.lookups, part.arrays)
        except (OSError, ValueError, OverflowError, RecursionError):
            return None  # missing or damaged: it is counted again
        if part.schema != SCHEMA:
            return None
        self._is_ours = True
        self._files.append(file)
        return Counted(account=part.account, tally=tally, replay_s=part.replay_s)

    def save(self, task: ReplayTask, counted: Counted) -> None:
        """Keep a task's counts.

        Raises:
            StorageError: they cannot be written.
        """
        part = _TaskCounts(
            schema=SCHEMA,
            account=counted.account,
            arrays={
                name: np.ravel(array).tolist()
                for name, array in counted.tally.arrays.items()
            },
            replay_s=counted.replay_s,
        )
        file = self._file(task)
        write_atomic(file, msgspec.msgpack.encode(part))
        self._files.append(file)

    def remove(self) -> None:
        """Remove the files of this replay, and the folder if a replay made it and nothing else is in
        it."""
        with contextlib.suppress(OSError):
            for file in self._files:
                file.unlink(missing_ok=True)
            if self._is_ours:
                self.folder.rmdir()  # fails where anything is left

    def _file(self, task: ReplayTask) -> Path:
        """The file of a task's counts: another log, setting or version has another."""
        settings = msgspec.json.encode((SCHEMA, task), enc_hook=str)
        return self.folder / f"{hashlib.sha256(settings).hexdigest()[:32]}.part"
