"""Advice against sweeps made after it, on vLLM's CPU build, with n-gram drafts and the sparse-KV plugin.

    python benchmarks/server_advice.py -o results/server-advice.json        (in the environment of `make test-vllm`)

Engines run in processes of their own, with one thread; times are their processor time, since the clock on the wall of a
shared machine says what else runs there (both are written down). In this order:

1. the machine and the engine's phases are calibrated (`magicdec calibrate --engine vllm --quick --clock cpu`), unless
   profiles are given;
2. per draft and load, metrics before and after some decoding with the gamma in use are the observation, and the advice
   follows;
3. all advice is written to a file, with its time and its SHA-256;
4. every gamma is measured on every load, interleaved and repeated, on the same greedy texts; the advised one's loss
   against the best follows, with its spread over the repetitions.

Gamma 0 is an engine without speculation. The other gammas of a draft share an engine, which is told gamma as its own
table by batch would tell it (`num_speculative_tokens_per_batch_size`; the plugin's `gamma_table`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "magicdec" / "data" / "embedded"
LOADS = ((2, 1000), (6, 1400), (12, 2000))
"""Batch and prompt length."""
DRAFTS = ("ngram", "streamingllm")
BUDGET, PAGE, MAX_GAMMA, MAX_LEN = 256, 64, 12, 2752
MARK = "answer: "
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}  # fmt: skip


class Engine:
    """The engine itself, in the process of its own."""

    def __init__(self, draft: str) -> None:
        from vllm import LLM

        from magicdec.specs.vllm_plugin import DRAFT_CLASS

        options: dict[str, Any] = {}
        if draft == "ngram":
            table = [(1, max(batch for batch, _ in LOADS), MAX_GAMMA)]
            options["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": MAX_GAMMA, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
                "num_speculative_tokens_per_batch_size": table,
            }  # fmt: skip
        elif draft == "streamingllm":
            options["speculative_config"] = {
                "method": "custom_class", "model": DRAFT_CLASS, "num_speculative_tokens": MAX_GAMMA
            }  # fmt: skip
            options["additional_config"] = {
                "magicdec": {"draft_method": draft, "draft_budget": BUDGET}
            }
        self.draft = draft
        self.core = LLM(
            model=str(MODEL), dtype="float32", max_model_len=MAX_LEN, block_size=PAGE, enforce_eager=True,
            max_num_seqs=max(batch for batch, _ in LOADS), distributed_executor_backend="uni",
            disable_log_stats=False, enable_prefix_caching=True, **options,
        ).llm_engine  # fmt: skip

    def set_gamma(self, gamma: int) -> None:
        import msgspec

        from magicdec.schema.gamma_table import TableGamma

        inner = self.core.engine_core.engine_core
        if self.draft == "ngram":
            inner.scheduler.dynamic_sd_lookup = [gamma] * len(
                inner.scheduler.dynamic_sd_lookup
            )
        elif self.draft == "streamingllm":
            drafter = inner.model_executor.driver_worker.worker.model_runner.drafter
            table = TableGamma(batch_sizes=(1,), context_lens=(1,), gammas=((gamma,),))
            drafter.settings = msgspec.structs.replace(
                drafter.settings, gamma_table=table
            )

    def decode(
        self, prompts: list[list[int]], *, gamma: int, tokens: int
    ) -> dict[str, float]:
        """Runs a batch until all prompts are in, then, timed, until `tokens` more are out per sequence on average;
        then drops it."""
        from vllm import SamplingParams

        self.set_gamma(gamma)
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(
                temperature=0.0, max_tokens=MAX_LEN - len(prompt) - 1, ignore_eos=True
            )
            self.core.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        emitted = dict.fromkeys(map(str, range(len(prompts))), 0)

        def step() -> None:
            for answer in self.core.step():
                emitted[answer.request_id] = len(answer.outputs[0].token_ids)

        while min(emitted.values()) < 2:
            step()
        before, count = sum(emitted.values()), 0
        cpu, wall = time.process_time(), time.perf_counter()
        while sum(emitted.values()) - before < tokens * len(prompts):
            step()
            count += 1
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        found = sum(emitted.values()) - before
        self.core.abort_request(list(emitted))
        self.core.step()
        return {
            "tpot_s": cpu * len(prompts) / found, "wall_tpot_s": wall * len(prompts) / found, "step_s": cpu / count,
            "tokens_per_step": found / count / len(prompts),
            "context_len": (sum(map(len, prompts)) + before + found / 2) / len(prompts),
        }  # fmt: skip


def child(draft: str) -> None:
    """Answers each line of stdin, an order to decode, with a line of stdout."""
    from prometheus_client import REGISTRY, generate_latest

    from magicdec.runtime.prompts import PromptRequest, load_prompts, load_tokenizer

    tokenizer, engine = load_tokenizer(MODEL, vocab_size=2048), Engine(draft)
    texts = {
        (batch, length): load_prompts(
            PromptRequest(count=batch, context_len=length, seed=9),
            tokenizer=tokenizer,
            vocab_size=2048,
        )
        for batch, length in LOADS
    }
    print(f"{MARK}{{}}", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts = texts[tuple(order["load"])]
        before = generate_latest(REGISTRY).decode()
        answer: dict[str, Any] = engine.decode(
            prompts, gamma=order["gamma"], tokens=order["tokens"]
        )
        if order.get("metrics"):
            answer |= {"before": before, "after": generate_latest(REGISTRY).decode()}
        print(MARK + json.dumps(answer), flush=True)


class Worker:
    """The other end of a `child`."""

    def __init__(self, draft: str) -> None:
        self.draft = draft
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", draft], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """Its next line that is its own: the engine writes to stdout too."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        raise SystemExit(f"the engine with draft {self.draft} ended")

    def decode(
        self, load: tuple[int, int], gamma: int, tokens: int, *, metrics: bool = False
    ) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(
            json.dumps({"load": load, "gamma": gamma, "tokens": tokens, "metrics": metrics}),
            file=self.process.stdin, flush=True,
        )  # fmt: skip
        return self.answer()


def calibrated(directory: Path) -> tuple[str, str]:
    """Profiles of this machine and of the engine on it."""
    path = directory / "vllm.toml"
    words = [
        "calibrate",
        "--engine",
        "vllm",
        "--quick",
        "--clock",
        "cpu",
        "-q",
        "-o",
        str(path),
    ]
    subprocess.run(
        [sys.executable, "-m", "magicdec", *words],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return str(path), str(path.with_suffix(".engine.toml"))


def advised(
    worker: Worker, load: tuple[int, int], given: argparse.Namespace
) -> dict[str, Any]:
    """The observation of one load, and what follows from it."""
    from magicdec.live.advice import Serving, advise, situation_of
    from magicdec.live.metrics import choose_target, parse
    from magicdec.live.observation import observe, parse_draft
    from magicdec.live.show import advice_lines, observation_lines

    draft = (
        parse_draft("ngram")
        if worker.draft == "ngram"
        else parse_draft("self", method=worker.draft, budget=BUDGET)
    )
    used = worker.decode(load, given.in_use, given.tokens, metrics=True)
    before, after = (parse(used[name], where=name) for name in ("before", "after"))
    seen = observe([before, after], choose_target(after, None))
    serving = Serving(
        model="embedded", hardware=given.hardware, engine=given.engine, temperature=0.0
    )
    # dropped requests are in no histogram of lengths, and steps beside prefills in the mean batch
    advice = advise(
        situation_of(
            seen, draft, serving, context=used["context_len"], batch=float(load[0])
        )
    )
    return {
        "draft": worker.draft, "load": load, "in_use": given.in_use, "advised": advice.best.gamma,
        "answer": advice.answer, "predicted_tpot_s": {choice.gamma: choice.tpot_s for choice in advice.choices},
        "measured_in_use_tpot_s": used["tpot_s"], "drafted_share": seen.drafted_share,
        "said": observation_lines(seen, draft) + advice_lines(advice, used["tpot_s"]),
    }  # fmt: skip


def swept(
    workers: dict[str, Worker], advice: list[dict[str, Any]], given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every gamma of every draft on every load, those advised included, each round in an order of its own."""
    gammas = {int(each) for each in given.gammas.split(",")}
    rows, choose = [], random.Random(0)
    for number in range(given.rounds + 1):
        for load in LOADS:
            jobs = [("none", 0)]
            for draft in DRAFTS:
                mine = gammas | {
                    e["advised"]
                    for e in advice
                    if (e["draft"], e["load"]) == (draft, load)
                } - {0}
                jobs += [(draft, gamma) for gamma in sorted(mine)]
            for draft, gamma in choose.sample(jobs, len(jobs)):
                found = workers[draft].decode(load, gamma, given.tokens)
                if number:  # the first round warms up: prompts come from the prefix cache from then on
                    rows.append(
                        {
                            "draft": draft,
                            "load": load,
                            "gamma": gamma,
                            "round": number,
                            **found,
                        }
                    )
    return rows


def judged(advice: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The advised gamma's loss against the best: of the mean times, and of each round's."""
    mine = [
        row
        for row in rows
        if row["load"] == advice["load"] and row["draft"] in ("none", advice["draft"])
    ]
    tpot: dict[int, list[float]] = {}
    for row in mine:
        tpot.setdefault(row["gamma"], []).append(row["tpot_s"])
    means = {gamma: statistics.median(values) for gamma, values in sorted(tpot.items())}
    best = min(means, key=means.__getitem__)
    rounds = [
        a / b - 1.0 for a, b in zip(tpot[advice["advised"]], tpot[best], strict=True)
    ]
    kept = advice["in_use"] if advice["answer"] == "keep" else advice["advised"]
    return {
        "draft": advice["draft"], "load": advice["load"], "advised": advice["advised"], "answer": advice["answer"],
        "best": best, "loss": means[advice["advised"]] / means[best] - 1.0, "loss_by_round": rounds,
        "loss_of_following": means[kept] / means[best] - 1.0,
        "loss_of_gamma_in_use": means[advice["in_use"]] / means[best] - 1.0,
        "loss_of_gamma_0": means[0] / means[best] - 1.0,
        "measured_tpot_s": means,
        "spread": {gamma: (max(v) - min(v)) / 2 / means[gamma] for gamma, v in sorted(tpot.items())},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--hardware", help="a calibration's profile; default: calibrate first"
    )
    parser.add_argument("--engine", help="the same of the engine")
    parser.add_argument("--in-use", type=int, default=3)
    parser.add_argument("--gammas", default="1,2,3,4,5,6,8,10,12")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        if given.hardware is None:
            given.hardware, given.engine = calibrated(Path(directory))
        workers = {draft: Worker(draft) for draft in ("none", *DRAFTS)}
        for worker in workers.values():
            worker.answer()
        for draft in DRAFTS:  # the first decoding of an engine takes longer
            workers[draft].decode(LOADS[0], given.in_use, given.tokens)
        advice = [
            advised(workers[draft], load, given) for draft in DRAFTS for load in LOADS
        ]
    written = json.dumps(
        {"advised_utc": time.strftime("%FT%TZ", time.gmtime()), "advice": advice},
        indent=1,
    )
    before = given.output.with_suffix(".advice.json")
    before.write_text(written)
    digest = hashlib.sha256(written.encode()).hexdigest()
    for each in advice:
        print(
            "\n".join(
                [
                    f"{each['draft']}, batch {each['load'][0]}, prompts of {each['load'][1]}",
                    *each["said"],
                ]
            )
        )
    print(f"wrote {before}, SHA-256 {digest}; the sweep begins", flush=True)
    sweep_utc = time.strftime("%FT%TZ", time.gmtime())
    rows = swept(workers, advice, given)
    for worker in workers.values():
        worker.process.communicate()
    verdicts = [judged(each, rows) for each in advice]
    document = {
        **json.loads(written),
        "advice_sha256": digest,
        "sweep_utc": sweep_utc,
        "verdicts": verdicts,
        "runs": rows,
    }
    given.output.write_text(json.dumps(document, indent=1) + "\n")
    for each in verdicts:
        low, high = min(each["loss_by_round"]), max(each["loss_by_round"])
        times = ", ".join(
            f"{gamma}: {tpot * 1e3:.2f}"
            for gamma, tpot in each["measured_tpot_s"].items()
        )
        print(
            f"{each['draft']}, {each['load'][0]} x {each['load'][1]}: advised {each['advised']} ({each['answer']}), "
            f"best {each['best']}, loses {each['loss']:.1%} ({low:+.1%} to {high:+.1%}); "
            f"in use {each['loss_of_gamma_in_use']:.1%}, gamma 0 {each['loss_of_gamma_0']:.1%}\n"
            f"  ms per token by gamma: {times}"
        )
    losses = [each["loss"] for each in verdicts]
    print(
        f"loss of the advised gamma: mean {statistics.mean(losses):.1%}, median {statistics.median(losses):.1%}, "
        f"most {max(losses):.1%}; {time.monotonic() - begun:.0f} s"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()
