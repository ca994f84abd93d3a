"""A vLLM server on this machine under Poisson arrivals, without speculation, with n-gram drafts and with the plugin.

    python benchmarks/server_traffic.py machine DIRECTORY     (in the environment of `make test-vllm`)
    python benchmarks/server_traffic.py judge DIRECTORY       one server after another: fitted, predicted, then measured
    python benchmarks/server_traffic.py compare DIRECTORY

Server and engine have one core, the load generator another. It is vLLM's own (`vllm bench serve`; it needs pandas and
datasets), whose seed says when requests arrive. `machine` times the kernels. `judge` fits an engine profile to each
running server by `magicdec calibrate --server`, and acceptance by the server's own counters at the rates FITTED, with
other prompts; then it simulates the arrivals of the rates JUDGED, writes percentiles with their SHA-256, and only then
sends these loads (one of them twice, for the noise): a shared machine's speed drifts, so little time lies between a fit
and what it is judged by. Predictions are also made for slower and faster machines, and read where reference kernels put
this one; that made them worse (results/LOG.md), so what counts is `at_fitted_speed`.
`compare` prints both, and writes DIRECTORY/compared.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "magicdec" / "data" / "embedded"
PORT, PAGE, GAMMA, BUDGET = 8801, 64, 3, 256
PROMPT, OUTPUT, COUNT = 800, 64, 250
FITTED = (2.0, 4.0)
JUDGED = {1.5: 80, 5.0: 250, 8.0: 250}
"""Requests by rate."""
REPEATED = {5.0: 250}
SEED = 11
MAX_SEQUENCES, MAX_TOKENS = 64, 2048
LOADS = (
    "--concurrency",
    "1,2,4,8,16",
    "--prompt-len",
    "256,800,1600",
    "--output-len",
    "64",
    "--rounds",
    "3",
)
SPECULATION: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"speculative": {
        "method": "ngram", "num_speculative_tokens": GAMMA, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }},
    "plugin": {
        "speculative": {
            "method": "custom_class", "model": "magicdec_vllm.draft.SparseDraft", "num_speculative_tokens": GAMMA,
        },
        "additional": {"magicdec": {"draft_method": "streamingllm", "draft_budget": BUDGET}},
    },
}  # fmt: skip
SLOWNESS = tuple(round(0.6 + 0.1 * step, 1) for step in range(17))
"""Predictions are made for machines this many times slower than while the server was fitted: a shared one drifts."""
WATCH = """
import json, time
from magicdec.measure.environment import ReferenceKernels
kernels = ReferenceKernels()
while True:
    print(json.dumps([time.time(), *kernels.times()]), flush=True)
    time.sleep(1.0)
"""
GENERATOR = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""  # `vllm bench serve`, for which the CPU build has no script
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1",
}  # fmt: skip


def run(words: list[Any], core: int, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["taskset", "-c", str(core), *map(str, words)],
        env=os.environ | ENVIRONMENT,
        **options,
    )


def done(words: list[Any], core: int) -> None:
    if code := run(words, core).wait():
        raise SystemExit(f"{words} ended with {code}")


def scrape() -> str:
    return str(
        urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10)
        .read()
        .decode()
    )


@contextmanager
def watched(given: argparse.Namespace, kind: str) -> Iterator[None]:
    """Times reference kernels beside the load generator, each second."""
    with (given.directory / f"{kind}.speed").open("w") as file:
        process = run([sys.executable, "-c", WATCH], given.client_core, stdout=file)
        try:
            yield
        finally:
            process.kill()
            process.wait()


@contextmanager
def moment(name: str, given: argparse.Namespace) -> Iterator[None]:
    start = time.time()
    yield
    (given.directory / f"{name}.moment").write_text(json.dumps([start, time.time()]))


def slowness(kind: str, name: str, directory: Path) -> float:
    """How many times slower the machine was than while the server was fitted: the mean of what memory and arithmetic
    say, in logarithms, by the median of their times."""

    def medians(name: str) -> list[float]:
        start, end = json.loads((directory / f"{name}.moment").read_text())
        seen = [
            json.loads(line)
            for line in (directory / f"{kind}.speed").read_text().splitlines()
        ]
        return [
            statistics.median(times)
            for times in zip(
                *(row[1:] for row in seen if start <= row[0] <= end), strict=True
            )
        ]

    pairs = zip(medians(name), medians(f"{kind}-fit"), strict=True)
    return statistics.geometric_mean(now / fitted for now, fitted in pairs)


@contextmanager
def server(kind: str, given: argparse.Namespace) -> Iterator[None]:
    options = [
        f"--{name}-config={json.dumps(each)}"
        for name, each in SPECULATION[kind].items()
    ]
    words = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--served-model-name", "embedded",
        "--dtype", "float32", "--enforce-eager", "--block-size", PAGE, "--max-model-len", 4096, "--port", PORT,
        "--max-num-seqs", MAX_SEQUENCES, "--max-num-batched-tokens", MAX_TOKENS, "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log", *options,
    ]  # fmt: skip
    with (given.directory / f"{kind}.log").open("w") as log:
        process = run(
            words,
            given.server_core,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for _ in range(300):
                time.sleep(1.0)
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
                    break
                except OSError:
                    if process.poll() is not None:
                        raise SystemExit(
                            f"the server did not start: see {log.name}"
                        ) from None
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
            time.sleep(2.0)


def prompts(directory: Path, seed: int) -> Path:
    """Windows of held-out source code, one for each request."""
    from magicdec.runtime.prompts import PromptRequest, load_prompts, load_tokenizer

    path = directory / f"prompts-{seed}.jsonl"
    tokenizer = load_tokenizer(MODEL, vocab_size=2048)
    request = PromptRequest(count=COUNT, context_len=PROMPT, seed=seed)
    texts = [
        tokenizer.decode(each)
        for each in load_prompts(request, tokenizer=tokenizer, vocab_size=2048)
    ]
    random.Random(seed).shuffle(texts)
    rows = [
        json.dumps({"prompt": text, "output_tokens_count": OUTPUT}) for text in texts
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


def load(
    rate: float, seed: int, count: int, name: str, given: argparse.Namespace
) -> None:
    """Sends Poisson arrivals by vLLM's own load generator; its results are in the file of this name."""
    done([
        sys.executable, "-c", GENERATOR, "--backend", "openai", "--base-url",
        f"http://127.0.0.1:{PORT}", "--endpoint", "/v1/completions", "--model", "embedded", "--tokenizer", MODEL,
        "--dataset-name", "custom", "--dataset-path", prompts(given.directory, seed), "--custom-output-len", OUTPUT,
        "--skip-chat-template", "--disable-shuffle", "--num-prompts", count, "--request-rate", rate, "--seed", seed,
        "--ignore-eos", "--temperature", 0, "--save-result", "--save-detailed", "--disable-tqdm",
        "--result-dir", given.directory, "--result-filename", f"{name}.json", "--num-warmups", 2,
    ], given.client_core)  # fmt: skip


def arrivals(rate: float, seed: int, count: int) -> Any:
    """When vLLM's load generator sends, by its seed: Poisson, stretched to the mean rate exactly."""
    import numpy as np

    np.random.seed(seed)
    sent = np.cumsum(
        [np.random.gamma(shape=1.0, scale=1.0 / rate) for _ in range(count)]
    )
    return sent * (count / rate / sent[-1])


def machine(given: argparse.Namespace) -> None:
    path = given.directory / "machine.toml"
    done([sys.executable, "-m", "magicdec", "calibrate", "--engine", "vllm", "--quick", "-q", "-o", path],
         given.server_core)  # fmt: skip
    engine = path.with_suffix(".engine.toml")
    engine.write_text(
        engine.read_text().replace(
            "[scheduler]", f"[scheduler]\nprefill_tokens = {MAX_TOKENS}", 1
        )
    )


def judge(given: argparse.Namespace) -> None:
    path = given.directory / "machine.toml"
    for kind in given.kinds:
        with server(kind, given), watched(given, kind):
            time.sleep(5.0)
            with moment(f"{kind}-fit", given):
                done([
                    sys.executable, "-m", "magicdec", "calibrate", "-q", "--server", f"http://127.0.0.1:{PORT}",
                    "--model", "embedded", "--hardware", path, "--engine", path.with_suffix(".engine.toml"),
                    *LOADS, "-o", given.directory / f"{kind}.toml",
                ], given.client_core)  # fmt: skip
            for rate in FITTED:
                name = f"{kind}-fit-{rate}"
                (given.directory / f"{name}.before").write_text(scrape())
                load(rate, 7, 60, name, given)
                (given.directory / f"{name}.after").write_text(scrape())
            predict(kind, given.directory)
            for number, rates in enumerate((JUDGED, REPEATED)):
                for rate, count in rates.items():
                    with moment(name := f"{kind}-{rate}-{number}", given):
                        load(rate, SEED, count, name, given)


def simulated(
    kind: str, rate: float, seed: int, count: int, directory: Path
) -> list[dict[str, float]]:
    """Percentiles of these arrivals, by the profiles and the acceptance that were fitted, for each slowness. Where all
    takes s times longer, times are s times those of arrivals that come s times faster."""
    import msgspec
    import numpy as np

    from magicdec.live.advice import Serving
    from magicdec.live.metrics import choose_target, parse
    from magicdec.live.observation import observe, parse_draft
    from magicdec.live.profile import acceptance_profile
    from magicdec.perfmodel.rate.requests import Requests
    from magicdec.perfmodel.rate.simulate import Server, simulate
    from magicdec.schema.gamma_table import TableGamma

    drafts = {
        "ngram": parse_draft("ngram"),
        "plugin": parse_draft("self", method="streamingllm", budget=BUDGET),
    }
    draft = drafts.get(kind)
    setup = Serving(
        model="embedded", hardware=str(directory / "machine.toml"), engine=str(directory / f"{kind}.toml"),
        temperature=0.0, weight_dtype="fp32", kv_dtype="fp32",
    ).setup(draft)  # fmt: skip
    acceptance = None
    if draft is not None:
        names = [
            f"{kind}-fit-{fitted}.{end}"
            for fitted in FITTED
            for end in ("before", "after")
        ]
        scrapes = [parse((directory / name).read_text(), where=name) for name in names]
        seen = observe(scrapes, choose_target(scrapes[-1], None))
        acceptance = acceptance_profile(
            seen, draft, model="embedded", context=PROMPT + OUTPUT / 2
        )
        acceptance = msgspec.structs.replace(acceptance, spread=spread(kind, directory))
    full = np.full(count, 1, dtype=np.int64)
    requests = Requests(
        arrival_s=np.zeros(count),
        prompt_len=full * PROMPT,
        output_len=full * OUTPUT,
        cached_len=full * 0,
    )
    policy = TableGamma(batch_sizes=(1,), context_lens=(1,), gammas=((GAMMA,),))
    server = Server.of(
        setup, requests, acceptance=acceptance, policy=policy if draft else None, budget=BUDGET if draft else None,
        max_sequences=MAX_SEQUENCES, max_tokens=MAX_TOKENS,
    )  # fmt: skip
    found = []
    for slower in SLOWNESS:
        sent = dataclasses.replace(
            requests, arrival_s=arrivals(rate, seed, count) / slower
        )
        outcomes = [
            simulate(server, sent, seed=each) for each in range(5 if draft else 1)
        ]
        times = ("ttft_s", "tpot_s", "e2e_s")
        found.append(
            figures(
                **{
                    name: slower
                    * np.concatenate([getattr(each, name) for each in outcomes])
                    for name in times
                }
            )
        )
    return found


def spread(kind: str, directory: Path) -> float:
    """Standard deviation of the requests' acceptance rates, by the events that each came in, less that of drawing."""
    import numpy as np

    from magicdec.counts import constant_rate

    told = [
        json.loads((directory / f"{kind}-fit-{rate}.json").read_text())
        for rate in FITTED
    ]
    steps = np.array([len(gaps) for each in told for gaps in each["itls"]], dtype=float)
    tokens = np.array(
        [length - 1 for each in told for length in each["output_lens"]], dtype=float
    )
    rates = constant_rate(np.clip(tokens / steps, 1.0, GAMMA + 1.0), GAMMA)
    trials = tokens  # each step tries its accepted drafts, and the one that is not
    drawn = float(np.mean(rates * (1.0 - rates) / trials))
    return float(np.sqrt(max(np.var(rates) - drawn, 0.0)))


def figures(ttft_s: Any, tpot_s: Any, e2e_s: Any) -> dict[str, float]:
    import numpy as np

    found = {}
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s), ("e2e", e2e_s)):
        found[f"{name}_mean_ms"] = float(np.mean(values)) * 1e3
        found |= {
            f"{name}_p{at}_ms": float(np.percentile(values, at)) * 1e3
            for at in (50, 90, 95, 99)
        }
    return found


def measured(name: str, directory: Path) -> dict[str, float]:
    """The load generator's own times of each request."""
    import numpy as np

    told = json.loads((directory / f"{name}.json").read_text())
    ttft, rest = np.array(told["ttfts"]), np.array([sum(gaps) for gaps in told["itls"]])
    return figures(ttft, rest / (np.array(told["output_lens"]) - 1), ttft + rest)


def predict(kind: str, directory: Path) -> None:
    rows = [
        {"kind": kind, "rate": rate, "slowness": slower, **told}
        for rate, count in JUDGED.items()
        for slower, told in zip(
            SLOWNESS, simulated(kind, rate, SEED, count, directory), strict=True
        )
    ]
    text = json.dumps(
        {"predicted_utc": time.strftime("%FT%TZ", time.gmtime()), "rows": rows},
        indent=1,
    )
    (directory / f"predictions-{kind}.json").write_text(text)
    print(kind, "predicted:", hashlib.sha256(text.encode()).hexdigest(), flush=True)


def told_at(rows: list[dict[str, Any]], slower: float) -> dict[str, float]:
    """The prediction at a slowness, between the two nearest that were made."""
    import numpy as np

    at = [row["slowness"] for row in rows]
    return {
        name: float(np.interp(slower, at, [row[name] for row in rows]))
        for name in rows[0]
        if name.endswith("_ms")
    }


def compare(given: argparse.Namespace) -> None:
    texts = {
        kind: (given.directory / f"predictions-{kind}.json").read_text()
        for kind in given.kinds
    }
    told: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for text in texts.values():
        for row in json.loads(text)["rows"]:
            told.setdefault((row["kind"], row["rate"]), []).append(row)
    rows = []
    for number, rates in enumerate((JUDGED, REPEATED)):
        for kind in given.kinds:
            for rate, count in rates.items():
                slower = slowness(
                    kind, name := f"{kind}-{rate}-{number}", given.directory
                )
                guesses = {
                    "predicted": told_at(told[kind, rate], slower),
                    "at_fitted_speed": told_at(told[kind, rate], 1.0),
                }
                found = {
                    "kind": kind,
                    "rate": rate,
                    "requests": count,
                    "round": number,
                    "slowness": slower,
                }
                rows.append(
                    {**found, "measured": measured(name, given.directory), **guesses}
                )
    digests = {
        kind: hashlib.sha256(text.encode()).hexdigest() for kind, text in texts.items()
    }
    document = {"predictions_sha256": digests, "rows": rows}
    (given.directory / "compared.json").write_text(
        json.dumps(document, indent=1) + "\n"
    )
    shown = ("ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms", "tpot_p95_ms", "e2e_mean_ms")
    for which in ("predicted", "at_fitted_speed"):
        errors: dict[str, list[float]] = {name: [] for name in shown}
        for row in rows:
            pairs = [(name, row[which][name], row["measured"][name]) for name in shown]
            for name, guess, truth in pairs:
                errors[name] += [abs(guess / truth - 1.0)] * (row["round"] == 0)
            text = ", ".join(
                f"{name} {guess:.1f} / {truth:.1f} ({guess / truth - 1.0:+.0%})"
                for name, guess, truth in pairs
            )
            print(
                f"{row['kind']} at {row['rate']}/s, round {row['round']}, slowness {row['slowness']:.2f}: {text}"
            )
        print(
            f"{which}: "
            + ", ".join(
                f"{name} {statistics.median(each):.1%}" for name, each in errors.items()
            )
        )
    for rate in JUDGED:
        here = [row for row in rows if row["rate"] == rate and row["round"] == 0]
        picked, best = (
            min(here, key=lambda row: row[which]["e2e_mean_ms"])
            for which in ("predicted", "measured")
        )
        loss = picked["measured"]["e2e_mean_ms"] / best["measured"]["e2e_mean_ms"] - 1.0
        print(
            f"at {rate}/s picked {picked['kind']}, best {best['kind']}, loses {loss:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("machine", "judge", "compare"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=list(SPECULATION)
    )
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    globals()[given.stage](given)


if __name__ == "__main__":
    main()
