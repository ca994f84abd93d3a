"""A plan's sweep on a cluster of Dask workers gives the numbers of one core."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import joblib
import pytest

import magicdec
from magicdec.perfmodel.rate import capacity

pytestmark = pytest.mark.slow


def test_a_sweep_on_a_local_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    trace = tmp_path / "trace.jsonl"
    rows = (
        {
            "arrival": 0.25 * i,
            "prompt": 900,
            "output": 30,
        }
        for i in range(100)
    )
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(capacity, "SHARES", tuple(0.2 + 0.1 * i for i in range(16)))
    request = {
        "hardware": "h100",
        "requests": str(trace),
        "draft": "eagle3",
        "p95_ttft_ms": 500,
        "p95_tpot_ms": 20,
    }
    alone = magicdec.plan(**request)
    assert alone.traffic is not None
    assert len(alone.traffic.curves) >= 32
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
        joblib.parallel_config("dask"),
    ):
        assert len(client.scheduler_info()["workers"]) == 2
        shared = magicdec.plan(**request)
        assert all(
            client.run(
                lambda: "magicdec.perfmodel.rate.capacity" in sys.modules
            ).values()
        )
    assert shared.to_json() == alone.to_json()
