"""`magicdec tune` on a real server: vLLM's CPU build with n-gram drafts, restarted by a script under a continuous load.

    python benchmarks/server_tune.py --hardware vllm.toml --engine vllm.engine.toml     (in that of `make test-vllm`)

The script ends the server and starts one with the gamma it is given; 0 is without speculation. The load goes on through
restarts: so many clients, each with one request after another, that wait while nobody answers. What `tune` prints is
this program's output. Times are by the clock on the wall, as a server's metrics have them: nothing else should run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MODEL = Path(__file__).resolve().parent.parent / "magicdec" / "data" / "embedded"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1",
}  # fmt: skip
SERVE = """#!/bin/sh
# serve.sh GAMMA: ends the server that runs, and starts one that drafts GAMMA tokens
cd {folder}
if [ -f pid ]; then
  old=$(cat pid)
  kill "$old" 2>/dev/null
  for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$old" 2>/dev/null || break; sleep 0.5; done
  kill -9 -- "-$old" 2>/dev/null # it waits for connections whose requests its engine has dropped
fi
speculation=""
if [ "$1" -gt 0 ]; then
  speculation='--speculative-config={{"method":"ngram","num_speculative_tokens":'$1',"prompt_lookup_max":4,"prompt_lookup_min":2}}'
fi
setsid {python} -m vllm.entrypoints.openai.api_server --model {model} --dtype float32 --host 127.0.0.1 --port {port} \\
  --max-model-len 2048 --block-size 64 --max-num-seqs 16 --enforce-eager $speculation >log 2>&1 &
echo $! >pid
"""


class Load:
    """Clients that send one request after another until they are stopped."""

    def __init__(
        self, port: int, *, clients: int, prompts: list[list[int]], output_len: int
    ) -> None:
        self.port, self.prompts, self.output_len = port, prompts, output_len
        self.is_over, self.num_answered = threading.Event(), 0
        self.threads = [
            threading.Thread(target=self._ask, args=(each, clients), daemon=True)
            for each in range(clients)
        ]
        for thread in self.threads:
            thread.start()

    def _ask(self, client: int, clients: int) -> None:
        number = client
        while not self.is_over.is_set():
            body = {
                "model": str(MODEL), "prompt": self.prompts[number % len(self.prompts)], "temperature": 0,
                "max_tokens": self.output_len, "ignore_eos": True,
            }  # fmt: skip
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            try:
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(body),
                    {"Content-Type": "application/json"},
                )
                if connection.getresponse().read() and not self.is_over.is_set():
                    self.num_answered += 1
                    number += clients
            except (OSError, http.client.HTTPException):
                self.is_over.wait(0.5)
            finally:
                connection.close()


def prompts(count: int, length: int) -> list[list[int]]:
    from magicdec.runtime.prompts import PromptRequest, load_prompts, load_tokenizer

    tokenizer = load_tokenizer(MODEL, vocab_size=2048)
    request = PromptRequest(count=count, context_len=length, seed=4)
    return load_prompts(request, tokenizer=tokenizer, vocab_size=2048)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--in-use", type=int, default=2)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prompt-len", type=int, default=800)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    port, folder = free_port(), Path(tempfile.mkdtemp(prefix="serve-"))
    script = folder / "serve.sh"
    script.write_text(
        SERVE.format(folder=folder, python=sys.executable, model=MODEL, port=port)
    )
    script.chmod(0o755)
    environment = {**os.environ, **ENVIRONMENT}
    subprocess.run([str(script), str(given.in_use)], check=True, env=environment)
    load = Load(
        port,
        clients=given.clients,
        prompts=prompts(24, given.prompt_len),
        output_len=given.output_len,
    )
    try:
        deadline = time.monotonic() + 600
        while load.num_answered < 2 * given.clients:
            if time.monotonic() > deadline:
                raise SystemExit((folder / "log").read_text()[-3000:])
            time.sleep(0.5)
        words = [
            "tune", f"http://127.0.0.1:{port}", "--model", "embedded", "--hardware", given.hardware, "--engine",
            given.engine, "--temperature", "0", "--draft", "ngram", "--restart", f"{script} {{gamma}}", "--seconds",
            f"{given.seconds:g}", "--yes", "-q",
        ]  # fmt: skip
        print(
            "$ magicdec "
            + " ".join(f"'{word}'" if " " in word else word for word in words),
            flush=True,
        )
        subprocess.run(
            [sys.executable, "-m", "magicdec", *words], check=True, env=environment
        )
        print(f"{load.num_answered} requests were answered meanwhile")
    finally:
        load.is_over.set()
        os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)


if __name__ == "__main__":
    main()
