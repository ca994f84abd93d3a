"""Tables of servers that others measured, the fits of what ships, the lanes of a plan's widths and the
atlas. It imports magicdec, which never imports it and is installed without it.
"""

from pathlib import Path

DATA = Path(__file__).parent / "data"
"""Measured rows by kind, each with its source; data/README.md says where they are from."""
