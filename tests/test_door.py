"""Doors: each name a package lists is the one its module defines, and asking for one loads no more than it needs."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOMS = (
    "calibrate",
    "live",
    "logs",
    "measure",
    "perfmodel",
    "reports",
    "runtime",
    "schema",
    "specs",
    "validate",
)
PACKAGE = Path(__file__).parents[1] / "magicdec"
HEAVY = {"torch", "pandas", "matplotlib", "scipy", "numba", "transformers"}


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_is_also_a_module(room):
    """`magicdec.ROOM.NAME` would be the function or the module, by the order of imports."""
    names = set(import_module(f"magicdec.{room}").__all__)
    assert names
    assert not names & {path.stem for path in (PACKAGE / room).iterdir()}


@pytest.mark.parametrize(
    "room", [room for room in ROOMS if room not in ("runtime", "measure", "calibrate")]
)
def test_every_listed_name_is_there(room):
    package = import_module(f"magicdec.{room}")
    missing = [
        name
        for name in package.__all__
        if name != "ModelReplay" and not hasattr(package, name)
    ]
    assert not missing
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_this_name'"):
        package.nothing_of_this_name  # noqa: B018


@pytest.mark.parametrize("room", ROOMS)
def test_a_door_loads_nothing_itself(room):
    code = (
        f"import sys, magicdec.{room}; "
        f"print(*[name for name in sys.modules if name.startswith('magicdec.{room}.')], "
        f"*({HEAVY!r} & set(sys.modules)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []


def test_a_name_loads_its_own_module_alone():
    code = (
        "import sys; from magicdec.perfmodel import MAX_POSITIONS; print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert "magicdec.perfmodel.acceptance.law" in loaded
    assert "magicdec.perfmodel.planner" not in loaded
    assert not loaded & {"torch", "pandas", "matplotlib", "numba"}
