"""The page's server on a free port of loopback, and the browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from magicdec.explore.server import ExplorerServer
from tests.headless import driver  # noqa: F401  # a fixture


@pytest.fixture(scope="session")
def server() -> Iterator[ExplorerServer]:
    with ExplorerServer({}) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()
