"""Compiled kernels on disk: found by another checkout, each in files of its own, and done without where that fails."""

from __future__ import annotations

import importlib.util
import resource
from pathlib import Path
from types import ModuleType

import pytest

from magicdec.runtime.kernels import cpu_attention
from magicdec.runtime.kernels.compiled import SharedFolder

SOURCE = """
from functools import partial
from numba import njit, types
from magicdec.runtime.kernels.compiled import kept

@kept(partial(njit, types.int64(types.int64)))
def increase(x):
    return x + 1

def multiply(by):
    def times(x):
        return x * by
    return kept(partial(njit, types.int64(types.int64)), name=f"times_{by}")(times)

two, three = multiply(2), multiply(3)
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def checkout(directory: Path, source: str = SOURCE) -> ModuleType:
    """Kernels, compiled or found, from a file of this directory."""
    directory.mkdir(exist_ok=True)
    file = directory / "own_kernels.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("own_kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.increase(4), module.two(4), module.three(4)) == (5, 8, 12)
    return module


def hits(module: ModuleType) -> list[int]:
    """Of each kernel, how often it was found."""
    return [
        sum(each.stats.cache_hits.values())
        for each in (module.increase, module.two, module.three)
    ]


def test_another_checkout_finds_what_one_has_compiled(
    kept: Path, tmp_path: Path
) -> None:
    """Each kernel by an index of its own, so that no process can take one for another; a changed source by none."""
    assert hits(checkout(tmp_path / "one")) == [0, 0, 0]
    assert hits(checkout(tmp_path / "two")) == [1, 1, 1]
    (folder,) = kept.iterdir()
    assert len(list(folder.glob("*.nbi"))) == len(list(folder.glob("*.nbc"))) == 3
    assert hits(checkout(tmp_path / "two", SOURCE + "# changed")) == [0, 0, 0]


@pytest.mark.parametrize("fault", ["damaged", "full disk", "no folder"])
def test_what_cannot_be_kept_is_compiled_all_the_same(
    fault: str, kept: Path, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "damaged":
        checkout(tmp_path / "one")
        for path in kept.rglob("*.nb?"):
            path.write_bytes(path.read_bytes()[:50])
    elif fault == "no folder":
        kept.write_text("a file")
    (tmp_path / "two").mkdir()
    try:
        if fault == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(SOURCE), limits[1]))
        assert hits(checkout(tmp_path / "two")) == [0, 0, 0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert fault == "no folder" or len(list(kept.rglob("*.nbc"))) == (
        3 if fault == "damaged" else 0
    )


def test_the_kernels_of_attention_are_kept_so() -> None:
    """Shapes of a kernel are not in its code's name but in the file's."""
    for rows in (1, 2):
        cpu_attention._kernel(rows, 64)
    folder = SharedFolder.from_function(cpu_attention._kernel, cpu_attention.__file__)
    if folder is None:
        pytest.skip("there is no folder to write to")
    names = [path.name for path in Path(folder.get_cache_path()).glob("*.nbi")]
    assert {f"cpu_attention.attend_{rows}_64-0" for rows in (1, 2)} <= {
        name.rpartition(".py")[0] for name in names
    }
