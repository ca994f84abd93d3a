"""The versions of vLLM that the package installs and takes, and its place in magicdec."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from magicdec.errors import ConfigError
from magicdec.specs.vllm_plugin import TESTED_VERSIONS
from magicdec_vllm.support import check_version

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_extra_installs_the_tested_versions() -> None:
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    wanted = [f"vllm=={version}.*" for version in TESTED_VERSIONS]
    assert project["optional-dependencies"]["vllm"] == wanted


def test_untested_versions_are_refused() -> None:
    check_version("0.32.0")
    with pytest.raises(ConfigError, match=r"0\.33\.0 is untested .* tested: 0\.32"):
        check_version("0.33.0")


def test_magicdec_names_the_package_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from magicdec.measure.engines import installed_engine

    def no_entry_points(**_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(metadata, "entry_points", no_entry_points)
    with pytest.raises(ConfigError, match="needs the package magicdec-vllm"):
        installed_engine("vllm")
