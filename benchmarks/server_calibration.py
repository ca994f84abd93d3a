"""A black-box fit of a server on this machine, timed by its engine's processor time instead of the clock on the wall.

    python benchmarks/server_calibration.py http://127.0.0.1:8000 ENGINE_PIDS local.toml -o server.engine.toml

On a machine that does other work the wall's clock says what that work does. The processor time of the engine's
processes (vLLM's EngineCore and Worker, one thread) does not: the loads, the windows and the fit are those of
`magicdec calibrate --server`, only the clock differs.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from magicdec.live.advice import Serving
from magicdec.live.calibration import describe_server, fit_server, save_fit, send_plan
from magicdec.live.drive import drive, plan_loads
from magicdec.live.http import parse_address
from magicdec.specs.catalog import load_model_spec


def processor_clock(pids: list[int]) -> float:
    """Seconds that all threads of the processes have run."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server")
    parser.add_argument("pids", help="the processes of the engine, comma-separated")
    parser.add_argument("hardware")
    parser.add_argument("-o", "--output", type=Path, default=Path("server.engine.toml"))
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--prompt-len", default="256,1024,2048")
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    pids = [int(each) for each in given.pids.split(",")]
    address, spec = parse_address(given.server), load_model_spec("embedded")
    server = describe_server(address, spec)
    serving = Serving(model="embedded", hardware=given.hardware, temperature=0.0, weight_dtype="fp32", kv_dtype="fp32")
    setup = serving.setup(server.draft, server.engine)
    plan = plan_loads(
        concurrencies=[int(each) for each in given.concurrency.split(",")],
        prompt_lens=[int(each) for each in given.prompt_len.split(",")],
        output_len=given.output_len,
        rounds=given.rounds,
        max_len=server.max_len,
        gamma=server.gamma,
        seed=secrets.randbits(31),
    )
    found = send_plan(
        address,
        plan,
        lambda load, seed: drive(
            address,
            load,
            model=server.model,
            vocab_size=spec.vocab_size,
            seed=seed,
            clock=lambda: processor_clock(pids),
        ),
        max_len=server.max_len,
        progress=lambda text: print(text, flush=True),
    )
    points = found.points
    print(found.noise_line, found.stopped)
    fit = fit_server(
        points, setup=setup, tp_size=1, gamma=server.gamma, name=given.output.stem, noise=found.noise or 0.0
    )
    for point, error in zip(points, fit.errors, strict=True):
        role = "judges" if point.load.is_judge else "fitted"
        print(f"{point.load}: {role}, {point.tpot_s * 1e3:.1f} ms ± {point.spread or 0.0:.0%}, {error:+.1%}")
    print(f"median error {fit.fitted_error:.1%} fitted, {fit.held_out_error:.1%} held out: {fit.constants}")
    print(*save_fit(fit, points, plan.about, given.output))


if __name__ == "__main__":
    main()
