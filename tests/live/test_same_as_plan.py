"""A server is taken as a plan of the same model on the same device takes it: `plan` is the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from magicdec.api import plan
from magicdec.cli import app, register_commands
from magicdec.errors import ConfigError
from magicdec.live.advice import Serving
from magicdec.live.observation import parse_draft
from magicdec.perfmodel.setup import Points
from magicdec.perfmodel.speedup import predict
from magicdec.specs.engine import load_engine
from tests.live.test_benchmark_results import Served, aiperf


@pytest.mark.parametrize(
    ("model", "hardware", "given"),
    [
        ("deepseek-v3", "h200-sxm-141gb", {}),
        ("gpt-oss-120b", "h200-sxm-141gb", {}),
        ("llama-3.1-8b", "h100-sxm-80gb", {}),
        ("deepseek-v3", "h200-sxm-141gb", {"kv_dtype": "fp8"}),
        ("llama-3.1-8b", "h100-sxm-80gb", {"weight_dtype": "fp8"}),
    ],
)
def test_an_observed_server_has_the_formats_and_times_of_its_plan(
    model: str, hardware: str, given: dict
) -> None:
    planned = plan(
        model=model,
        hardware=hardware,
        tp=8,
        batch=8,
        context=4096,
        draft="none",
        **given,
    )
    setup = Serving(
        model=model, hardware=hardware, tp_size=8, engine="vllm", **given
    ).setup(parse_draft("ngram"), "vllm")
    formats = (planned.precision.weight_dtype, planned.precision.kv_dtype)
    assert (setup.precision.weight_dtype, setup.precision.kv_dtype) == formats
    step_s = predict(
        setup, None, Points(batch=8.0, context=4096.0, tp=8.0, gamma=0)
    ).autoregressive_step_s
    assert float(step_s) == pytest.approx(planned.best.step_s, rel=1e-12)


@pytest.mark.slow
def test_an_engine_is_fitted_in_the_formats_of_its_plan(tmp_path: Path) -> None:
    """A server whose steps take what its plan says, on the engine's own factors of the kernels: the fit finds them."""
    register_commands()
    loads = [
        (batch, context) for batch in (1, 8, 32) for context in (1024, 4096, 16384)
    ]
    paths = []
    for batch, context in loads:
        planned = plan(
            model="gpt-oss-20b", hardware="h100-sxm-80gb", engine="vllm", tp=1, batch=batch, context=context + 20,
            draft="none",
        )  # fmt: skip
        served = [
            Served(
                context,
                40,
                0.0,
                [1.0 + planned.best.step_s * step for step in range(40)],
            )
            for _ in range(batch)
        ]
        paths.append(tmp_path / f"{batch}-{context}.jsonl")
        paths[-1].write_text(aiperf(served))
    words = [word for path in paths for word in ("--results", str(path))]
    output = tmp_path / "server.engine.toml"
    done = CliRunner().invoke(
        app,
        ["calibrate", *words, "--model", "gpt-oss-20b", "--hardware", "h100-sxm-80gb", "--engine", "vllm", "-o",
         str(output)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert load_engine(output).kernels.gemm_factor == pytest.approx(
        load_engine("vllm").kernels.gemm_factor, rel=0.1
    )


def test_a_servers_device_is_not_guessed(tmp_path: Path) -> None:
    register_commands()
    for words in (["--server", "127.0.0.1:9"], ["--results", str(tmp_path / "x.json")]):
        done = CliRunner().invoke(app, ["calibrate", *words, "--model", "llama-3.1-8b"])
        assert isinstance(done.exception, ConfigError)
        assert "give --hardware" in str(done.exception)
