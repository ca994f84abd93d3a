"""An interrupted demo leaves what it measured to the next one of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from magicdec.commands.demo import demo_command
from magicdec.progress import Interrupted


def test_only_an_unfinished_demo_of_the_same_kind_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def stopped(directory: Path, **_: Any) -> None:
        records = directory / "records.jsonl"
        found.append(records.exists() and (directory / "local.toml").exists())
        records.write_text("measured\n")
        (directory / "local.toml").write_text("profile\n")
        raise KeyboardInterrupt

    monkeypatch.setattr("magicdec.validate.demo.run_demo", stopped)
    monkeypatch.setattr("magicdec.measure.environment.bind_threads", lambda: None)
    for quick in (False, False, True, True, False):
        with pytest.raises(Interrupted, match="keeps what was measured"):
            demo_command(output=tmp_path, quick=quick, quiet=True)
    assert found == [False, True, False, True, False]
