"""A vLLM server on this machine under Poisson arrivals, without speculation, with n-gram drafts and with the plugin.

    python benchmarks/server_traffic.py calibrate DIRECTORY     (in the environment of `make test-vllm`)
    python benchmarks/server_traffic.py predict DIRECTORY       before anything that is judged is measured
    python benchmarks/server_traffic.py measure DIRECTORY       and once more, for the noise
    python benchmarks/server_traffic.py compare DIRECTORY

Server, engine and load generator share one core. The generator is vLLM's own (`vllm bench serve`; it needs pandas and
datasets), whose seed says when requests arrive. `calibrate` fits the machine, an engine profile for each server by
`magicdec calibrate --server`, and acceptance by the server's own counters at the rates FITTED, with other prompts.
`predict` simulates the arrivals of the rates JUDGED, and writes percentiles with their SHA-256. `compare` prints both,
and writes DIRECTORY/compared.json.
"""

from __future__ import annotations

import argparse
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
PROMPT, OUTPUT, COUNT = 800, 64, 200
FITTED = (2.0, 4.0)
JUDGED = {1.5: 100, 3.0: 150, 4.5: 150}
"""Requests by rate."""
REPEATED = {3.0: 150}
SEED = 11
MAX_SEQUENCES, MAX_TOKENS = 64, 2048
LOADS = ("--concurrency", "1,2,4,8,16", "--prompt-len", "256,800,1600", "--output-len", "32", "--rounds", "2")
SPECULATION: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"speculative": {
        "method": "ngram", "num_speculative_tokens": GAMMA, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }},
    "plugin": {
        "speculative": {
            "method": "custom_class", "model": "magicdec.vllm.draft.SparseDraft", "num_speculative_tokens": GAMMA,
        },
        "additional": {"magicdec": {"draft_method": "streamingllm", "draft_budget": BUDGET}},
    },
}  # fmt: skip
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
    return subprocess.Popen(["taskset", "-c", str(core), *map(str, words)], env=os.environ | ENVIRONMENT, **options)


def done(words: list[Any], core: int) -> None:
    if code := run(words, core).wait():
        raise SystemExit(f"{words} ended with {code}")


def scrape() -> str:
    return str(urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=10).read().decode())


@contextmanager
def server(kind: str, given: argparse.Namespace) -> Iterator[None]:
    options = [f"--{name}-config={json.dumps(each)}" for name, each in SPECULATION[kind].items()]
    words = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--served-model-name", "embedded",
        "--dtype", "float32", "--enforce-eager", "--block-size", PAGE, "--max-model-len", 4096, "--port", PORT,
        "--max-num-seqs", MAX_SEQUENCES, "--max-num-batched-tokens", MAX_TOKENS, "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log", *options,
    ]  # fmt: skip
    with (given.directory / f"{kind}.log").open("w") as log:
        process = run(words, given.server_core, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            for _ in range(300):
                time.sleep(1.0)
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
                    break
                except OSError:
                    if process.poll() is not None:
                        raise SystemExit(f"the server did not start: see {log.name}") from None
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
    texts = [tokenizer.decode(each) for each in load_prompts(request, tokenizer=tokenizer, vocab_size=2048)]
    random.Random(seed).shuffle(texts)
    rows = [json.dumps({"prompt": text, "output_tokens_count": OUTPUT}) for text in texts]
    path.write_text("\n".join(rows) + "\n")
    return path


def load(rate: float, seed: int, count: int, name: str, given: argparse.Namespace) -> None:
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
    sent = np.cumsum([np.random.gamma(shape=1.0, scale=1.0 / rate) for _ in range(count)])
    return sent * (count / rate / sent[-1])


def calibrate(given: argparse.Namespace) -> None:
    machine = given.directory / "machine.toml"
    if not machine.exists():
        done([sys.executable, "-m", "magicdec", "calibrate", "--engine", "vllm", "--quick", "-q", "-o", machine],
             given.server_core)  # fmt: skip
        engine = machine.with_suffix(".engine.toml")
        engine.write_text(
            engine.read_text().replace("relative_error", f"prefill_tokens = {MAX_TOKENS}\nrelative_error", 1)
        )
    for kind in given.kinds:
        with server(kind, given):
            if not (fitted := given.directory / f"{kind}.toml").exists():
                done([
                    sys.executable, "-m", "magicdec", "calibrate", "-q", "--server", f"http://127.0.0.1:{PORT}",
                    "--model", "embedded", "--hardware", machine, "--engine", machine.with_suffix(".engine.toml"),
                    *LOADS, "-o", fitted,
                ], given.client_core)  # fmt: skip
            for name, rate in ((f"{kind}-fit-{rate}", rate) for rate in FITTED):
                if not (given.directory / f"{name}.after").exists():
                    (given.directory / f"{name}.before").write_text(scrape())
                    load(rate, 7, 60, name, given)
                    (given.directory / f"{name}.after").write_text(scrape())


def simulated(kind: str, rate: float, seed: int, count: int, directory: Path) -> dict[str, float]:
    """Percentiles of these arrivals, by the profiles and the acceptance that were fitted."""
    import msgspec
    import numpy as np

    from magicdec.live.advice import Serving
    from magicdec.live.metrics import choose_target, parse
    from magicdec.live.observation import observe, parse_draft
    from magicdec.live.profile import acceptance_profile
    from magicdec.perfmodel.traffic.requests import Requests
    from magicdec.perfmodel.traffic.simulate import Server, simulate
    from magicdec.specs.gamma_table import TableGamma

    drafts = {"ngram": parse_draft("ngram"), "plugin": parse_draft("self", method="streamingllm", budget=BUDGET)}
    draft = drafts.get(kind)
    setup = Serving(
        model="embedded", hardware=str(directory / "machine.toml"), engine=str(directory / f"{kind}.toml"),
        temperature=0.0, weight_dtype="fp32", kv_dtype="fp32",
    ).setup(draft)  # fmt: skip
    acceptance = None
    if draft is not None:
        names = [f"{kind}-fit-{fitted}.{end}" for fitted in FITTED for end in ("before", "after")]
        scrapes = [parse((directory / name).read_text(), where=name) for name in names]
        seen = observe(scrapes, choose_target(scrapes[-1], None))
        acceptance = acceptance_profile(seen, draft, model="embedded", context=PROMPT + OUTPUT / 2)
        acceptance = msgspec.structs.replace(acceptance, spread=spread(kind, directory))
    full = np.full(count, 1, dtype=np.int64)
    requests = Requests(
        arrival_s=arrivals(rate, seed, count), prompt_len=full * PROMPT, output_len=full * OUTPUT, cached_len=full * 0
    )
    policy = TableGamma(batch_sizes=(1,), context_lens=(1,), gammas=((GAMMA,),))
    server = Server.of(
        setup, requests, acceptance=acceptance, policy=policy if draft else None, budget=BUDGET if draft else None,
        max_sequences=MAX_SEQUENCES, max_tokens=MAX_TOKENS,
    )  # fmt: skip
    outcomes = [simulate(server, requests, seed=each) for each in range(5 if draft else 1)]
    times = {name: np.concatenate([getattr(each, name) for each in outcomes]) for name in ("ttft_s", "tpot_s", "e2e_s")}
    return figures(**times)


def spread(kind: str, directory: Path) -> float:
    """Standard deviation of the requests' acceptance rates, by the events that each came in, less that of drawing."""
    import numpy as np

    from magicdec.counts import constant_rate

    told = [json.loads((directory / f"{kind}-fit-{rate}.json").read_text()) for rate in FITTED]
    steps = np.array([len(gaps) for each in told for gaps in each["itls"]], dtype=float)
    tokens = np.array([length - 1 for each in told for length in each["output_lens"]], dtype=float)
    rates = constant_rate(np.clip(tokens / steps, 1.0, GAMMA + 1.0), GAMMA)
    trials = tokens  # each step tries its accepted drafts, and the one that is not
    drawn = float(np.mean(rates * (1.0 - rates) / trials))
    return float(np.sqrt(max(np.var(rates) - drawn, 0.0)))


def figures(ttft_s: Any, tpot_s: Any, e2e_s: Any) -> dict[str, float]:
    import numpy as np

    found = {}
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s), ("e2e", e2e_s)):
        found[f"{name}_mean_ms"] = float(np.mean(values)) * 1e3
        found |= {f"{name}_p{at}_ms": float(np.percentile(values, at)) * 1e3 for at in (50, 90, 95, 99)}
    return found


def measured(name: str, directory: Path) -> dict[str, float]:
    """The load generator's own times of each request."""
    import numpy as np

    told = json.loads((directory / f"{name}.json").read_text())
    ttft, rest = np.array(told["ttfts"]), np.array([sum(gaps) for gaps in told["itls"]])
    return figures(ttft, rest / (np.array(told["output_lens"]) - 1), ttft + rest)


def predict(given: argparse.Namespace) -> None:
    rows = [
        {"kind": kind, "rate": rate, **simulated(kind, rate, SEED, count, given.directory)}
        for kind in given.kinds for rate, count in JUDGED.items()
    ]  # fmt: skip
    text = json.dumps({"predicted_utc": time.strftime("%FT%TZ", time.gmtime()), "rows": rows}, indent=1)
    (given.directory / "predictions.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (given.directory / "predictions.sha256").write_text(f"{digest}  predictions.json\n")
    for row in rows:
        print({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()})
    print(digest)


def measure(given: argparse.Namespace) -> None:
    for number, rates in enumerate((JUDGED, REPEATED)):
        for kind in given.kinds:
            with server(kind, given):
                for rate, count in rates.items():
                    load(rate, SEED, count, f"{kind}-{rate}-{number}", given)


def compare(given: argparse.Namespace) -> None:
    predictions = given.directory / "predictions.json"
    told = {(row["kind"], row["rate"]): row for row in json.loads(predictions.read_text())["rows"]}
    rows = [
        {"kind": kind, "rate": rate, "requests": count, "round": number,
         "measured": measured(f"{kind}-{rate}-{number}", given.directory), "predicted": told[kind, rate]}
        for number, rates in enumerate((JUDGED, REPEATED)) for kind in given.kinds for rate, count in rates.items()
        if (given.directory / f"{kind}-{rate}-{number}.json").exists()
    ]  # fmt: skip
    digest = hashlib.sha256(predictions.read_bytes()).hexdigest()
    document = {"predictions_sha256": digest, "rows": rows}
    (given.directory / "compared.json").write_text(json.dumps(document, indent=1) + "\n")
    shown = ("ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms", "tpot_p95_ms", "e2e_mean_ms")
    errors: dict[str, list[float]] = {name: [] for name in shown}
    for row in rows:
        pairs = [(name, row["predicted"][name], row["measured"][name]) for name in shown]
        for name, guess, truth in pairs:
            errors[name] += [abs(guess / truth - 1.0)] * (row["round"] == 0)
        text = ", ".join(
            f"{name} {guess:.1f} / {truth:.1f} ({guess / truth - 1.0:+.0%})" for name, guess, truth in pairs
        )
        print(f"{row['kind']} at {row['rate']}/s, round {row['round']}: {text}")
    print("median errors: " + ", ".join(f"{name} {statistics.median(each):.1%}" for name, each in errors.items()))
    for rate in JUDGED:
        here = [row for row in rows if row["rate"] == rate and row["round"] == 0]
        picked, best = (min(here, key=lambda row: row[which]["e2e_mean_ms"]) for which in ("predicted", "measured"))
        loss = picked["measured"]["e2e_mean_ms"] / best["measured"]["e2e_mean_ms"] - 1.0
        print(f"at {rate}/s picked {picked['kind']}, best {best['kind']}, loses {loss:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("calibrate", "predict", "measure", "compare"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(SPECULATION))
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    globals()[given.stage](given)


if __name__ == "__main__":
    main()
