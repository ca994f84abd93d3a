"""Secrets of what is pasted: none comes back, in whatever form it was given, and nothing else is hidden.

Secrets are made at run time: words that look like keys, and plain words under a name that speaks of one.
"""

from __future__ import annotations

import base64
import json
import random
import string
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.errors import ConfigError
from magicdec.live.forms import seen_in
from magicdec.live.judgement import Judgement, ServerFacts
from magicdec.live.show import document_of, lines_of
from magicdec.redaction import redacted
from magicdec.specs.serve_command import read_serve_command

ROOT = Path(__file__).resolve().parents[2]
LETTERS = string.ascii_letters + string.digits
VLLM = "vllm serve Qwen/Qwen3-8B"
NAMED = {
    "vllm": VLLM + " --api-key {} --max-num-seqs 8",
    "vllm, joined": VLLM + " --api-key={} --max-num-seqs 8",
    "vllm, quoted": VLLM + " --api-key '{}' --max-num-seqs 8",
    "an option that the engine lacks": VLLM + " --admin-token {} --other-secret={}",
    "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --api-key {} --admin-api-key={}",
    "trtllm": "trtllm-serve Qwen/Qwen3-8B --hf_token {} --tp_size 2",
    "llama-server": "llama-server -hf Qwen/Qwen3-8B-GGUF --api-key {} --hf-token {}",
    "a lost backslash": VLLM + " \\\n  --max-num-seqs 8\n--api-key={}\n",
    "a lost backslash before the value": VLLM + " --api-key\n  {}\n",
    "a continuation": VLLM + " --api-key \\\n    {} \\\n  --max-num-seqs 8",
    "an open quote": VLLM + " --api-key '{} --max-num-seqs 8",
    "another open quote": 'export HF_TOKEN="{}\n' + VLLM,
    "a variable": "HF_TOKEN={} " + VLLM,
    "an exported variable": 'export VLLM_API_KEY="{}"\n' + VLLM + " --api-key $VLLM_API_KEY",
    "a default": VLLM + " --api-key ${{API_KEY:-{}}} --tensor-parallel-size $TP",
    "a computed value": VLLM + " --tensor-parallel-size $(curl -H 'Authorization: Bearer {}' http://x/tp)",
    "a header": VLLM + " --tensor-parallel-size `curl -H 'X-Api-Key: {}' http://x/tp`",
    "a shell in a shell": "bash -c 'export HF_TOKEN={}; " + VLLM + " --api-key {}'",
    "docker": 'docker run --gpus all -e "HF_TOKEN={}" --env API_PASSWORD={} vllm/vllm-openai:v0.20.0 --model m',
    "docker, joined": "docker run --env=HF_TOKEN={} vllm/vllm-openai --model Qwen/Qwen3-8B --api-key {}",
    "an address": "vllm serve https://user:{}@example.org/m",
    "a query": "vllm serve 'https://example.org/m?token={}&x=1'",
    "compose": (
        "services:\n  vllm:\n    image: vllm/vllm-openai:v0.20.0\n    environment:\n      - HF_TOKEN={}\n"
        "      - API_SECRET={}\n    command: --model Qwen/Qwen3-8B --api-key {}\n"
    ),
    "compose, a mapping": (
        "services:\n  vllm:\n    image: vllm/vllm-openai\n    environment:\n      HF_TOKEN: {}\n"
        "    command: [--model, Qwen/Qwen3-8B, --api-key, {}, --password, '{}']\n"
    ),
    "kubernetes": (
        "kind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai\n    command: [vllm, serve, Qwen/Qwen3-8B]\n"
        "    args:\n    - --api-key\n    - {}\n    - --hf-token={}\n    env:\n    - name: HF_TOKEN\n"
        "      value: {}\n    - value: {}\n      name: API_KEY\n    - {{name: ROOT_PASSWORD, value: {}}}\n"
    ),
    "a secret's manifest": (
        "kind: Secret\nstringData:\n  token: {}\n  api_key: |\n    {}\n---\nkind: Pod\nspec:\n  containers:\n"
        "  - image: vllm/vllm-openai\n    args: [--model, Qwen/Qwen3-8B]\n"
    ),
    "helm's values": (
        "servingEngineSpec:\n  vllmApiKey: {}\n  modelSpec:\n  - name: m\n    modelURL: Qwen/Qwen3-8B\n"
        "    hf_token: '{}'\n    vllmConfig:\n      apiKey: {}\n      extraArgs: ['--api-key', '{}']\n"
    ),
    "helm's command": (
        "helm install x y --set hfToken={},z=1 --set env[0].name=HF_TOKEN,env[0].value={}\n" + VLLM
    ),
    "python": (
        "import os\nfrom vllm import LLM\nos.environ['HF_TOKEN'] = '{}'\nos.environ.setdefault('API_KEY', \"{}\")\n"
        "api_key: str = '{}'\n"
        "llm = LLM(model='Qwen/Qwen3-8B', hf_token='{}', tensor_parallel_size=get_tp(api_key='{}'))\n"
    ),
    "python's process": (
        'import subprocess\nsubprocess.run(["vllm", "serve", "Qwen/Qwen3-8B", "--api-key", "{}"], '
        'env={{"HF_TOKEN": "{}", "N": f(token="{}")}})\n'
    ),
    "python's arguments": (
        'import argparse\nfrom vllm import LLM\np = argparse.ArgumentParser()\n'
        'p.add_argument("--api-key", type=str, default="{}")\nargs = p.parse_args()\n'
        'LLM("Qwen/Qwen3-8B", tensor_parallel_size=args.api_key)\n'
    ),
    "a speculative configuration": (
        VLLM + """ --speculative-config '{{"method": "ngram", "num_speculative_tokens": 3, "api_key": "{}"}}'"""
    ),
    "one without quotes": VLLM + " --speculative-config {{method:ngram,num_speculative_tokens:3,hf_token:{}}}",
    "one that is none": VLLM + """ --speculative-config '{{"token": "{}'""",
    "one within YAML": (
        "kind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai\n    args:\n    - --model=Qwen/Qwen3-8B\n"
        '    - "--speculative-config={{\\"method\\": \\"x\\", \\"api_key\\": \\"{}\\"}}"\n'
    ),
    "an option of it": VLLM + " --speculative-config.method ngram --speculative-config.api_key {}",
    "a dockerfile": (
        'FROM vllm/vllm-openai:v0.20.0\nENV HF_TOKEN {}\nENV API_KEY={}\nCMD ["--model", "m", "--api-key", "{}"]\n'
    ),
    "a unit": "[Service]\nEnvironment=HF_TOKEN={}\nExecStart=" + VLLM + " --api-key {}\n",
    "markdown": "Token: {}\n\n```bash\n" + VLLM + " --api-key {}\n```\n",
}  # fmt: skip
"""Texts with a secret under a name that says so."""
BARE = {
    "an argument": VLLM + " {}",
    "a value": VLLM + " --hf-overrides {} --tensor-parallel-size {}",
    "a model": "vllm serve {}",
    "a model in sglang": "python -m sglang.launch_server --model-path {} --tp {}",
    "a key of a configuration": VLLM + """ --speculative-config '{{"{}": 1, "method": "{}"}}'""",
    "an option": VLLM + " --{} --x{}={}",
    "a reference": VLLM + " --tensor-parallel-size $(f {}) --max-num-seqs ${{X:?{}}}",
    "a command": "{} " + VLLM + "\nsource {}\n$X {}\n",
    "an open quote": VLLM + " '{}",
    "a service": "services:\n  {}:\n    image: vllm/vllm-openai\n    environment: [{}]\n    command: --model {}\n",
    "a python's call": "from vllm import LLM\nLLM('Qwen/Qwen3-8B', tensor_parallel_size=f('{}'))\n",
    "nothing else": "{}",
}  # fmt: skip
"""Texts with a word that looks like a key, whatever it stands for."""
LINE = (
    "INFO 01-01 10:00:{:02d} metrics.py:1] SpecDecoding metrics: Mean acceptance length: 2.00, Accepted: 10 tokens, "
    "Drafted: 10 tokens, Per-position acceptance rate: 1.0"
)
LOGS = {
    "vllm's log": "LLM engine (v0.11.0) with config: model='{}', x\n" + LINE.format(1),
    "vllm's arguments": "non-default args: {{'api_key': ['{}'], 'model': '{}', 'method': '{}'}}\n" + LINE.format(1),
    "vllm's draft": (
        "LLM engine (v0.11.0) with config: model='m', SpeculativeConfig(method='x', model='{}', num_spec_tokens=1)\n"
        + LINE.format(1)
    ),
    "sglang's log": (
        "server_args=ServerArgs(model_path='{}', api_key='{}', speculative_algorithm='{}', "
        "speculative_draft_model_path='{}')\nDecode batch, #running-req: 1, #token: 9, token usage: 0.0, "
        "accept len: 2.0, gen throughput (token/s): 9.0, #queue-req: 0"
    ),
    "metrics": (
        'vllm:num_requests_running{{model_name="{}"}} 1\nvllm:generation_tokens_total{{model_name="{}"}} 90\n'
        'vllm:spec_decode_num_drafts_total{{model_name="{}"}} 30\n'
        'vllm:spec_decode_num_accepted_tokens_total{{model_name="{}"}} 30\n'
    ),
    "a benchmark": '{{"model_id": "{}", "spec_decode_acceptance_length": 2.0, "total_output_tokens": 10, "x": "{}"}}',
    "an unknown document": '{{"{}": 1, "{}": 2}}',
}  # fmt: skip


def key(rng: random.Random) -> str:
    """A word that looks like a key."""
    word = "".join(rng.choices(LETTERS, k=rng.randrange(34, 60))) + "a1"
    token = ".".join(
        base64.urlsafe_b64encode(part).decode().rstrip("=")
        for part in (b'{"alg": "none"}', rng.randbytes(20), rng.randbytes(20))
    )
    return rng.choice(
        [
            f"hf{'_'}{word}",
            f"sk{'-'}{word}",
            f"sk{'-'}proj-{word}",
            f"gh{'p'}_{word}",
            "AKI" + "A" + "".join(rng.choices(string.ascii_uppercase, k=16)),
            token,
            rng.randbytes(32).hex(),
            "".join(rng.choices(LETTERS, k=48)),
        ]
    )


def plain(rng: random.Random) -> str:
    """A word that looks like none."""
    return "q" + "".join(rng.choices(string.ascii_lowercase, k=11))


def answer(text: str) -> str:
    """All that is said of a command's text, whatever prints it."""
    try:
        command = read_serve_command(text, reads_files=False)
    except ConfigError as error:
        return str(error)
    return msgspec.json.encode(command).decode()


def observed(text: str) -> str:
    try:
        seen = seen_in([("a file", text)])
    except ConfigError as error:
        return str(error)
    if seen is None:
        return ""
    judged = Judgement(seen, ServerFacts())
    return json.dumps(document_of(judged), default=str) + "\n".join(lines_of(judged))


def plant(
    form: str, make: Callable[[random.Random], str], seed: int
) -> tuple[str, list[str]]:
    rng = random.Random(seed)
    secrets = [make(rng) for _ in range(form.replace("{{", "").count("{}"))]
    return form.format(*secrets), secrets


FORMS = [
    *(
        (name, form, make, answer)
        for name, form in NAMED.items()
        for make in (plain, key)
    ),
    *((name, form, key, answer) for name, form in BARE.items()),
    *((name, form, key, observed) for name, form in LOGS.items()),
]


@pytest.mark.parametrize(
    ("form", "make", "said"),
    [each[1:] for each in FORMS],
    ids=[f"{name}, {make.__name__}" for name, _, make, _ in FORMS],
)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_secret_comes_back(
    form: str,
    make: Callable[[random.Random], str],
    said: Callable[[str], str],
    seed: int,
) -> None:
    text, secrets = plant(form, make, seed)
    out = said(text)
    assert [secret for secret in secrets if secret in out] == []


@pytest.mark.parametrize("name", NAMED)
def test_nothing_reads_what_is_named_a_secret(name: str) -> None:
    """Not only the sentences of today's readers: the text that they read holds none."""
    text, secrets = plant(NAMED[name], plain, 1)
    hidden = redacted(text)
    assert [word for word in secrets if word in hidden] == []
    assert redacted(hidden) == hidden


USUAL = [
    *(
        found["text"]
        for found in tomllib.loads(
            (ROOT / "tests/data/serve_commands.toml").read_text(encoding="utf-8")
        )["command"]
    ),
    *(
        path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "docs/samples").rglob("*"))
        if path.is_file()
    ),
]


def test_samples_and_public_commands_are_left_as_they_are() -> None:
    """So they print as before."""
    assert len(USUAL) > 60
    for text in USUAL:
        assert redacted(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "--served-model-name x --max-num-batched-tokens 8192 --tokenizer t --max-tokens 5",
        f"--revision {'0123456789abcdef' * 2}01234567",
        f"vllm/vllm-openai@sha256:{'0123456789abcdef' * 4}",
        f"/hub/models--Qwen--Qwen3-8B/snapshots/{'0123456789abcdef' * 2}01234567",
        "num_experts_per_token: 8",
        "- key: nvidia.com/gpu.product",
        "secretKeyRef: {name: hf-secret, key: token}",
        "sorted(names, key=lambda name: name.size)",
        "docker run -e HF_TOKEN vllm/vllm-openai:latest --model m",
        "--api-key $KEY --hf-token ${TOKEN} --password $(PASSWORD) --secret {{ .Values.secret }}",
        "--hf-token --model m",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "RedHatAI/Meta-Llama-3.1-405B-Instruct-quantized.w8a8",
        "--hf-overrides '{}' --hf-config-path x",
        "if token: raise ValueError('none')",
    ],
)
def test_what_only_sounds_like_a_secret_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "part",
    ["key ", "api_key=a,", "--token \n", "token, default", "token=$(", "a-", "\\"],
)
def test_a_long_text_takes_time_by_its_length(part: str) -> None:
    """Processor time, four times the text: about four times, and never sixteen."""
    seconds = []
    for length in (40_000, 160_000):
        text = part * (length // len(part))
        begun = time.process_time()
        redacted(text)
        seconds.append(time.process_time() - begun)
    assert seconds[1] < 10 * seconds[0] + 0.2
