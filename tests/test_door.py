"""The door of the package: each name it lists is there, and asking for one loads no more than it needs."""

import subprocess
import sys

import pytest

import magicdec

HEAVY = {"torch", "pandas", "matplotlib", "scipy", "numba", "transformers"}


def loaded_by(code: str) -> set[str]:
    """Modules that are loaded after this code has run in a process of its own."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_every_listed_name_is_there() -> None:
    missing = [name for name in magicdec.__all__ if not hasattr(magicdec, name)]
    assert not missing
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_this_name'"):
        magicdec.nothing_of_this_name  # noqa: B018


def test_the_package_loads_nothing_itself() -> None:
    loaded = loaded_by("import magicdec")
    assert not loaded & HEAVY
    assert "magicdec.api" not in loaded


def test_a_name_loads_its_own_module_alone() -> None:
    loaded = loaded_by("from magicdec.perfmodel.acceptance.law import MAX_POSITIONS")
    assert "magicdec.perfmodel.planner" not in loaded
    assert not loaded & (HEAVY - {"scipy"})
