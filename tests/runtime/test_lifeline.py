"""A process that ends with its parent, with the kernel's help and without."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PARENT = """
import os, subprocess, sys, time
code = "import os; from magicdec.runtime.launch import end_with_parent; "
code += "end_with_parent(int(sys.argv[1]), ask_kernel={ask_kernel}); print('ready', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", "import sys, time; " + code, {parent}], stdout=subprocess.PIPE)
{then}
"""


def ends_with(
    then: str, *, ask_kernel: bool, parent: str = "str(os.getpid())"
) -> subprocess.CompletedProcess[str]:
    """The child keeps its parent's standard error open, which is read to its end: so it waits for both."""
    code = PARENT.format(ask_kernel=ask_kernel, parent=parent, then=then)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("ask_kernel", [True, False])
def test_a_child_ends_when_its_parent_is_killed(ask_kernel: bool) -> None:
    """Without the kernel's help by its own watching, as on other systems than Linux."""
    done = ends_with(
        "child.stdout.readline(); os.kill(os.getpid(), 9)", ask_kernel=ask_kernel
    )
    assert done.returncode == -signal.SIGKILL
    assert not done.stderr


def test_a_child_whose_parent_was_gone_already_ends_at_once() -> None:
    done = ends_with("sys.exit(child.wait())", ask_kernel=False, parent="'1'")
    assert done.returncode == 256 - signal.SIGKILL
