"""Advice against a sweep made after it, on vLLM's CPU build with n-gram drafts, by processor time.

    python benchmarks/server_advice.py -o results/server-advice.json        (in the environment of `make test-vllm`)

Each engine runs in a process of its own, with one thread; times are that process's processor time, since the clock on
the wall of a shared machine says what else runs there. In this order:

1. gamma 0: timed loads, half of which only judge, give an engine profile;
2. the gamma in use: its metrics before and after give the observation;
3. the advice is written down;
4. every gamma is measured on the same greedy texts, and the advised one's loss against the best follows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "magicdec" / "data" / "embedded"
BATCH, PROMPT_LEN, TOKENS, SETS = 8, 768, 96, 3
LOADS = [(batch, prompt) for batch in (1, 2, 4, 8, 16) for prompt in (256, 768, 1536)]
TIMED_STEPS = 16
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}  # fmt: skip


def start(gamma: int) -> Any:
    from vllm import LLM

    speculation = {
        "method": "ngram", "num_speculative_tokens": gamma, "prompt_lookup_max": 4, "prompt_lookup_min": 2
    }  # fmt: skip
    llm = LLM(
        model=str(MODEL), dtype="float32", max_model_len=2048, block_size=128, max_num_seqs=16, enforce_eager=True,
        distributed_executor_backend="uni", disable_log_stats=False,
        **({"speculative_config": speculation} if gamma else {}),
    )  # fmt: skip
    return llm.llm_engine


def decode(
    engine: Any, prompts: list[list[int]], *, until: int | None = None, steps: int | None = None
) -> dict[str, float]:
    """Runs a batch until all prompts are in, then, timed, for `steps` steps, or until `until` more tokens are out per
    sequence on average; then drops it."""
    from vllm import SamplingParams

    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    emitted = dict.fromkeys(map(str, range(len(prompts))), 0)

    def step() -> None:
        for answer in engine.step():
            emitted[answer.request_id] = len(answer.outputs[0].token_ids)

    while min(emitted.values()) < 2:
        step()
    before, count, started = sum(emitted.values()), 0, time.process_time()
    while (steps is None or count < steps) and (until is None or sum(emitted.values()) - before < until * len(prompts)):
        step()
        count += 1
    seconds, tokens = time.process_time() - started, sum(emitted.values()) - before
    engine.abort_request(list(emitted))
    engine.step()
    context = sum(map(len, prompts)) / len(prompts) + (before + tokens / 2) / len(prompts)
    return {"step_s": seconds / count, "tpot_s": seconds * len(prompts) / tokens, "context_len": context,
            "tokens_per_step": tokens / count / len(prompts), "steps": count}  # fmt: skip


def texts(count: int) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    library = Path(random.__file__).parent
    ids = [tokenizer.encode((library / f"{name}.py").read_text()).ids for name in ("argparse", "inspect", "typing")]
    choose = random.Random(11)
    found = []
    for _ in range(count):
        text = choose.choice(ids)
        start_at = choose.randrange(len(text) - PROMPT_LEN)
        found.append(text[start_at : start_at + PROMPT_LEN])
    return found


def child(gamma: int, output: Path, with_loads: bool) -> None:
    from prometheus_client import REGISTRY, generate_latest

    engine = start(gamma)
    document: dict[str, Any] = {"loads": [], "runs": []}
    choose = random.Random(5)
    for batch, prompt in LOADS if with_loads else []:
        prompts = [[choose.randrange(16, 2048) for _ in range(prompt)] for _ in range(batch)]
        document["loads"].append({"batch": batch, "prompt": prompt, **decode(engine, prompts, steps=TIMED_STEPS)})
    document["before"] = generate_latest(REGISTRY).decode()
    every = texts(BATCH * SETS)
    for number in range(SETS):
        document["runs"].append(decode(engine, every[number * BATCH : (number + 1) * BATCH], until=TOKENS))
    document["after"] = generate_latest(REGISTRY).decode()
    output.write_text(json.dumps(document))


def run(gamma: int, *, with_loads: bool = False) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "child.json"
        words = [
            sys.executable,
            __file__,
            "--child",
            str(gamma),
            "-o",
            str(output),
            *(["--loads"] if with_loads else []),
        ]
        subprocess.run(words, check=True, env={**os.environ, **ENVIRONMENT})
        return dict(json.loads(output.read_text()))


def fitted(loads: list[dict[str, Any]], hardware: str) -> Any:
    """The engine's profile from the loads' step times, a chequerboard of them left out to judge."""
    from magicdec.live.drive import Measured
    from magicdec.live.loads import plan_loads
    from magicdec.live.profile import parse_draft
    from magicdec.live.server_fit import ServerPoint, fit_server
    from magicdec.live.situation import Serving

    plan = plan_loads(
        concurrencies=[b for b, _ in LOADS], prompt_lens=[p for _, p in LOADS], output_len=TIMED_STEPS, rounds=1,
        max_len=2048,
    )  # fmt: skip
    points = []
    for row in loads:
        (load,) = [each for each in plan.loads if (each.concurrency, each.prompt_len) == (row["batch"], row["prompt"])]
        measured = Measured(
            load=load, step_s=row["step_s"], tpot_s=row["tpot_s"], tokens_per_step=1.0,
            context_len=row["context_len"], ttft_s=0.0, num_steps=TIMED_STEPS,
        )  # fmt: skip
        points.append(ServerPoint(measured=measured, spread=0.0))
    setup = Serving(model="embedded", hardware=hardware, engine="ours", temperature=0.0).setup(
        parse_draft("ngram"), "vllm"
    )
    return fit_server(points, setup=setup, tp_size=1, gamma=0, name="vllm-cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--hardware", default="local.toml")
    parser.add_argument("--in-use", type=int, default=3)
    parser.add_argument("--gammas", default="0,1,2,3,4")
    parser.add_argument("--child", type=int)
    parser.add_argument("--loads", action="store_true")
    given = parser.parse_args()
    if given.child is not None:
        child(given.child, given.output, given.loads)
        return
    from magicdec.live.advice import advise
    from magicdec.live.metrics import choose_target, parse
    from magicdec.live.observation import observe
    from magicdec.live.profile import parse_draft
    from magicdec.live.show import advice_lines, observation_lines
    from magicdec.live.situation import Serving, situation_of
    from magicdec.specs.engine import save_engine

    first = run(0, with_loads=True)
    fit = fitted(first["loads"], given.hardware)
    profile = given.output.with_suffix(".engine.toml")
    save_engine(fit.profile, profile)
    for load, error in zip(first["loads"], fit.errors, strict=True):
        print(f"  {load['batch']} x {load['prompt']}: {load['tpot_s'] * 1e3:.2f} ms, predicted {error:+.1%}")
    print(f"median error {fit.fitted_error:.1%} fitted, {fit.held_out_error:.1%} held out", flush=True)
    used = run(given.in_use)
    before, after = (parse(used[name], where=name) for name in ("before", "after"))
    seen, draft = observe([before, after], choose_target(after, None)), parse_draft("ngram")
    serving = Serving(model="embedded", hardware=given.hardware, engine=str(profile), temperature=0.0)
    held = sum(each["context_len"] for each in used["runs"]) / SETS  # aborted requests are in no histogram of lengths
    advice = advise(situation_of(seen, draft, serving, context=held))
    lines = observation_lines(seen, draft) + advice_lines(advice, seen.counts.tpot_s)
    print("\n".join(lines), flush=True)
    written: dict[str, Any] = {
        "loads": [{**load, "error": error} for load, error in zip(first["loads"], fit.errors, strict=True)],
        "median_error": {"fitted": fit.fitted_error, "held_out": fit.held_out_error},
        "advice": lines, "advised_utc": time.strftime("%FT%TZ", time.gmtime()), "advised_gamma": advice.best.gamma,
        "predicted_tpot_s": {str(each.gamma): each.tpot_s for each in advice.choices},
    }  # fmt: skip
    given.output.write_text(json.dumps(written, indent=1))
    measured = {gamma: run(gamma) for gamma in map(int, given.gammas.split(","))}
    tpot = {gamma: sum(r["tpot_s"] for r in document["runs"]) / SETS for gamma, document in sorted(measured.items())}
    loss = tpot[advice.best.gamma] / min(tpot.values()) - 1.0
    written |= {
        "sweep_utc": time.strftime("%FT%TZ", time.gmtime()), "loss": loss,
        "measured_tpot_s": {str(gamma): value for gamma, value in tpot.items()},
        "runs": {str(gamma): document["runs"] for gamma, document in sorted(measured.items())},
    }  # fmt: skip
    given.output.write_text(json.dumps(written, indent=1) + "\n")
    print("measured", {gamma: f"{value * 1e3:.2f} ms" for gamma, value in tpot.items()})
    print(f"the advised gamma {advice.best.gamma} loses {loss:.1%} against the best of the sweep")


if __name__ == "__main__":
    main()
