"""What files say of a server equals what the simulated steps behind them did, in every wording."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from magicdec.errors import ConfigError
from magicdec.live.advice import Serving
from magicdec.live.forms import JSON_FORMS, TEXT_FORMS, form_of, looks_like, read_files
from magicdec.live.judgement import Judgement, ServerFacts
from magicdec.live.observation import agreed, parse_draft
from magicdec.live.profile import rates, weighed
from magicdec.live.show import lines_of
from tests.live.servers import Vllm, random_requests

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "docs" / "samples" / "logs"
H7 = """\
[2025-10-22 10:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 28, #cached-token: 0, token usage: 0.00, \
#running-req: 0, #queue-req: 0,
[2025-10-22 10:00:01 TP0] Decode batch. #running-req: 1, #token: 108, token usage: 0.00, accept len: 2.17, \
accept rate: 0.54, cuda graph: True, gen throughput (token/s): 0.40, #queue-req: 0,
[2025-10-22 10:00:02 TP0] Decode batch. #running-req: 1, #token: 186, token usage: 0.00, accept len: 1.95, \
accept rate: 0.49, cuda graph: True, gen throughput (token/s): 178.90, #queue-req: 0,
[2025-10-22 10:00:03 TP0] Decode batch. #running-req: 1, #token: 258, token usage: 0.00, accept len: 1.80, \
accept rate: 0.45, cuda graph: True, gen throughput (token/s): 165.40, #queue-req: 0,
[2025-10-22 10:00:04 TP0] Decode batch. #running-req: 1, #token: 340, token usage: 0.00, accept len: 2.05, \
accept rate: 0.51, cuda graph: True, gen throughput (token/s): 188.70, #queue-req: 0,
[2025-10-22 10:00:05 TP0] Decode batch. #running-req: 1, #token: 412, token usage: 0.00, accept len: 1.80, \
accept rate: 0.45, cuda graph: True, gen throughput (token/s): 165.60, #queue-req: 0,
"""


def read(tmp_path, *texts: str):
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"file{number}")
        paths[-1].write_text(text)
    return read_files(paths)


GAMMA = 4


def test_the_runs_of_a_cost_check_are_left_to_calibrate(tmp_path: Path) -> None:
    """Their acceptance is imposed, so it is no observation."""
    paths = [tmp_path / name for name in ("cost-plain.json", "cost-k3-2.64.json")]
    for path in paths:
        path.write_text("{}")
    with pytest.raises(
        ConfigError, match=r"calibrate --results cost-plain\.json --results cost-k3"
    ):
        read_files(paths)


@pytest.fixture
def sequences() -> list[list[int]]:
    """Accepted drafts of each step of some requests."""
    rng = np.random.default_rng(5)
    rates = np.array([0.8, 0.75, 0.7, 0.65])
    return [
        [int(np.cumprod(rng.random(GAMMA) < rates).sum()) for _ in range(50)]
        for _ in range(12)
    ]


def survival(sequences: list[list[int]]) -> list[float]:
    lengths = np.array(sequences).ravel()
    return [float((lengths >= i).mean()) for i in range(1, GAMMA + 1)]


def vllm_benchmark(sequences: list[list[int]]) -> str:
    lengths = np.array(sequences)
    return json.dumps(
        {
            "spec_decode_acceptance_rate": float(lengths.mean() / GAMMA * 100),
            "spec_decode_num_drafts": lengths.size,
            "spec_decode_draft_tokens": lengths.size * GAMMA,
            "spec_decode_per_position_acceptance_rates": survival(sequences),
        }
    )


def vllm_log(sequences: list[list[int]]) -> str:
    lengths = np.array(sequences)
    rates = ", ".join(f"{each:.3f}" for each in survival(sequences))
    return (
        "INFO 11-22 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s\n"
        f"INFO 11-22 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: {1 + lengths.mean():.2f}, "
        f"Accepted throughput: 9.60 tokens/s, Drafted throughput: 12.80 tokens/s, Accepted: {lengths.sum()} tokens, "
        f"Drafted: {lengths.size * GAMMA} tokens, Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {lengths.mean() / GAMMA:.1%}\n"
    )


def aiperf(sequences: list[list[int]]) -> str:
    """profile_export.jsonl of AIPerf 0.13: a sparse histogram, its keys as JSON has them; a request without a draft."""
    lines = [
        {
            "metadata": {"session_num": 0},
            "metrics": {},
            "spec_decode_acceptance": None,
            "error": None,
        }
    ]
    for each in sequences:
        histogram = {str(j): int(n) for j, n in enumerate(np.bincount(each)) if n}
        told = {
            "engine": "vllm",
            "acceptance_histogram": histogram,
            "num_spec_tokens": GAMMA,
        }
        lines.append(
            {
                "metadata": {},
                "metrics": {},
                "spec_decode_acceptance": told,
                "error": None,
            }
        )
    return "\n".join(map(json.dumps, lines))


def guidellm(sequences: list[list[int]]) -> str:
    """benchmarks.json of GuideLLM 0.8: what vLLM says of each request is passed through."""
    requests: list[dict[str, object]] = [{"response_metrics": None}]
    for each in sequences:
        histogram = np.bincount(each, minlength=GAMMA + 1).tolist()
        told = {
            "acceptance_histogram": histogram,
            "num_spec_steps": len(each),
            "num_spec_tokens": GAMMA,
        }
        requests.append({"response_metrics": {"speculative_decoding": told}})
    return json.dumps(
        {
            "metadata": {"version": 2},
            "benchmarks": [{"requests": {"successful": requests}}],
        }
    )


def vllm_report(sequences: list[list[int]]) -> str:
    """What `vllm bench serve` prints."""
    lengths = np.array(sequences)
    lines = [
        "============ Serving Benchmark Result ============",
        f"{'Successful requests:':<40} {len(sequences):<10}",
        f"{'Total generated tokens:':<40} {lengths.size + lengths.sum() + len(sequences):<10}",
        "---------------Speculative Decoding---------------",
        f"{'Acceptance rate (%):':<40} {lengths.mean() / GAMMA * 100:<10.2f}",
        f"{'Acceptance length:':<40} {1 + lengths.mean():<10.2f}",
        f"{'Drafts:':<40} {lengths.size:<10}",
        f"{'Draft tokens:':<40} {lengths.size * GAMMA:<10}",
        f"{'Accepted tokens:':<40} {lengths.sum():<10}",
        "Per-position acceptance (%):",
    ]
    for position, share in enumerate(survival(sequences)):
        lines.append(f"{f'  Position {position}:':<40} {share * 100:<10.2f}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("write", "exact"),
    [
        (vllm_benchmark, 1e-12),
        (vllm_log, 2e-3),
        (vllm_report, 3e-4),
        (aiperf, 1e-12),
        (guidellm, 1e-12),
    ],
)
def test_counts_by_position_give_the_rates_of_the_steps(
    write, exact, sequences, tmp_path
):
    found = rates(read(tmp_path, write(sequences)), parse_draft("eagle3"))
    survived = np.array([1.0, *survival(sequences)])
    assert found.rates == pytest.approx(survived[1:] / survived[:-1], abs=exact)
    assert found.trials[0] == pytest.approx(600, rel=0.01)


def headline(seen, **view) -> str:
    return lines_of(Judgement(seen, ServerFacts(**view)))[0]


def test_a_device_without_a_model_is_asked_for_the_model(tmp_path: Path) -> None:
    """SGLang's log names none: "cannot read config.json" was said."""
    seen = read(tmp_path, H7)
    serving = Serving(model="", hardware="h100-sxm-80gb")
    with pytest.raises(ConfigError, match="give it by --model"):
        lines_of(Judgement(seen, ServerFacts(serving=serving)))
    named = dataclasses.replace(serving, model="qwen3-8b")
    assert lines_of(
        Judgement(seen, ServerFacts(serving=named, draft=parse_draft("eagle3")))
    )


class Steps:
    """Ten intervals of ten seconds of a server that decodes `batch` sequences, step after step."""

    def __init__(self, *, gamma=3, batch=4, step_s=0.02, rates=(0.7, 0.6, 0.5), seed=1):
        rng = np.random.default_rng(seed)
        self.gamma, self.batch, self.step_s = gamma, batch, step_s
        per_interval = round(10.0 / step_s) * batch
        self.accepted = []
        for _ in range(10):
            draws = rng.random((per_interval, gamma)) < np.array(rates[:gamma])
            self.accepted.append(np.cumprod(draws, axis=1).sum(axis=1))

    @property
    def all(self):
        return np.concatenate(self.accepted)

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + self.all.mean()

    def intervals(self):
        for number, accepted in enumerate(self.accepted):
            steps = len(accepted)
            survived = [(accepted >= i).mean() for i in range(1, self.gamma + 1)]
            yield SimpleNamespace(
                clock=f"10:{number // 6:02d}:{number % 6 * 10:02d}",
                drafted=steps * self.gamma,
                accepted=int(accepted.sum()),
                steps=steps,
                speed=(steps + accepted.sum()) / 10.0,
                mean=1.0 + accepted.mean(),
                positions=", ".join(f"{rate:.3f}" for rate in survived),
                rate=100.0 * accepted.sum() / (steps * self.gamma),
            )


def v0(steps: Steps) -> str:
    lines = []
    accepted = drafted = emitted = 0
    for each in steps.intervals():
        accepted += each.accepted
        drafted += each.drafted
        emitted += each.accepted + each.steps
        lines.append(
            f"INFO 11-20 {each.clock} metrics.py:345] Avg prompt throughput: 0.0 tokens/s, Avg generation "
            f"throughput: {each.speed:.1f} tokens/s, Running: {steps.batch} reqs, Swapped: 0 reqs, Pending: 0 "
            "reqs, GPU KV cache usage: 1.7%, CPU KV cache usage: 0.0%."
        )
        lines.append(
            f"INFO 11-20 {each.clock} metrics.py:361] Speculative metrics: Draft acceptance rate: "
            f"{accepted / drafted:.3f}, System efficiency: {emitted / (drafted * 4 / 3):.3f}, Number of "
            f"speculative tokens: {steps.gamma}, Number of accepted tokens: {accepted}, Number of draft tokens: "
            f"{drafted}, Number of emitted tokens: {emitted}."
        )
    return "\n".join(lines)


def _v1(steps: Steps, speculation: str, prefix: str = "") -> str:
    lines = []
    for each in steps.intervals():
        lines.append(
            f"{prefix}INFO 11-20 {each.clock} [loggers.py:111] Engine 000: Avg prompt throughput: 0.0 tokens/s, "
            f"Avg generation throughput: {each.speed:.1f} tokens/s, Running: {steps.batch} reqs, Waiting: 0 reqs, "
            "GPU KV cache usage: 0.7%, Prefix cache hit rate: 12.1%"
        )
        said = speculation.format(**vars(each))
        lines.append(
            f"{prefix}INFO 11-20 {each.clock} [metrics.py:86] SpecDecoding metrics: {said}"
        )
    return "\n".join(lines)


def v1_8(steps: Steps) -> str:
    return _v1(
        steps,
        "Draft acceptance rate: {rate:.1f}%, Accepted: {accepted} tokens, Drafted: {drafted} tokens",
    )


def v1_9(steps: Steps) -> str:
    return _v1(
        steps,
        "Draft acceptance rate: {rate:.1f}%, Mean acceptance length: {mean:.2f}, Accepted: {accepted} tokens, "
        "Drafted: {drafted} tokens, Per-position acceptance rate: {positions}",
    )


def v1_32(steps: Steps, prefix: str = "\x1b[1;36m(APIServer pid=1)\x1b[0;0m ") -> str:
    return _v1(
        steps,
        "Mean acceptance length: {mean:.2f}, Accepted throughput: 1.00 tokens/s, Drafted throughput: 3.00 "
        "tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: "
        "{positions}, Avg Draft acceptance rate: {rate:.1f}%",
        prefix,
    )


def sglang(steps: Steps, *, of_drafts: bool = False, tokens: str = "#token") -> str:
    lines = []
    for each in steps.intervals():
        rate = each.mean / (steps.gamma + 1)
        if of_drafts:
            rate = (each.mean - 1.0) / steps.gamma
        lines.append(
            f"[2026-01-20 {each.clock} TP0] Decode batch, #running-req: {steps.batch}, {tokens}: 4000, token usage: "
            f"0.02, accept len: {each.mean:.2f}, accept rate: {rate:.2f}, cuda graph: True, gen throughput "
            f"(token/s): {each.speed:.2f}, #queue-req: 0"
        )
    return "\n".join(lines)


def sglang_of_drafts(steps: Steps) -> str:
    return sglang(steps, of_drafts=True, tokens="#full token")


def llama_cpp(steps: Steps) -> str:
    """One request for each interval, alone."""
    lines = []
    for each in steps.intervals():
        tokens = each.steps + each.accepted
        lines += [
            "prompt eval time =     648.99 ms /   133 tokens (    4.88 ms per token,   204.94 tokens per second)",
            f"       eval time = {each.steps * steps.step_s * 1e3:10.2f} ms / {tokens:5d} tokens (   14.84 ms per "
            "token,    67.40 tokens per second)",
            f"draft acceptance rate = {each.rate / 100:0.5f} ({each.accepted:5d} accepted / {each.drafted:5d} "
            "generated)",
        ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("write", "form", "batch"),
    [
        (v0, "vLLM log", 4),
        (v1_8, "vLLM log", 4),
        (v1_9, "vLLM log", 4),
        (v1_32, "vLLM log", 4),
        (sglang, "SGLang log", 4),
        (sglang_of_drafts, "SGLang log", 4),
        (llama_cpp, "llama.cpp log", 1),
    ],
)
def test_every_wording_gives_the_steps_behind_it(write, form, batch, tmp_path):
    steps = Steps(batch=batch)
    seen = read(tmp_path, write(steps))
    assert seen.form == form
    assert seen.counts.tokens_per_step == pytest.approx(steps.tokens_per_step, rel=3e-3)
    assert seen.counts.step_s == pytest.approx(steps.step_s, rel=3e-3)
    assert seen.tokens_per_s == pytest.approx(
        batch * steps.tokens_per_step / steps.step_s, rel=3e-3
    )
    assert seen.load.running == batch
    assert seen.gamma == 3 or write is v1_8
    assert "tokens per step" in headline(seen)


def test_rates_by_position_of_vllms_log_are_those_of_the_steps(tmp_path):
    steps = Steps()
    found = rates(read(tmp_path, v1_32(steps)), parse_draft("eagle3"))
    survived = np.array([(steps.all >= i).sum() for i in range(4)])
    assert found.rates == pytest.approx(survived[1:] / survived[:-1], abs=2e-3)


def test_a_server_that_runs_alone_for_a_while_is_as_fast_as_while_it_decoded(tmp_path):
    """The first line's clock ran while nothing was sent: its 0.4 tokens/s are no speed."""
    seen = read(tmp_path, H7)
    assert seen.gamma == 3
    assert seen.counts.tokens_per_step == pytest.approx(1.954, abs=1e-3)
    assert seen.tokens_per_s == pytest.approx(174.6, abs=0.5)
    assert headline(seen).startswith(
        "1.95 tokens per step (3 drafted); 174.6 tokens/s at batch 1"
    )


def test_data_parallel_engines_are_summed_and_each_is_shown(tmp_path):
    one, two = Steps(seed=1), Steps(seed=2, batch=8)
    both = []
    for first, second in zip(
        v1_32(one).splitlines(), v1_32(two).splitlines(), strict=True
    ):
        both.append((first, second.replace("Engine 000", "Engine 001")))
    lines = []
    for throughput, counted in zip(both[::2], both[1::2], strict=True):
        lines += [throughput[0], counted[0], throughput[1], counted[1]]
    seen = read(tmp_path, "\n".join(lines))
    assert [part.load.running for part in seen.parts] == [4, 8]
    accepted = np.concatenate([one.all, two.all])
    assert seen.counts.tokens_per_step == pytest.approx(1 + accepted.mean(), rel=1e-3)
    assert seen.tokens_per_s == pytest.approx(
        sum(part.tokens_per_s for part in seen.parts)
    )
    text = "\n".join(lines_of(Judgement(seen, ServerFacts())))
    assert "engine 0" in text
    assert "engine 1" in text


def test_one_scrape_is_all_since_the_start_and_engines_are_summed(tmp_path):
    server = Vllm(engines=("0", "1"))
    first, second = random_requests(1), random_requests(2)
    server.serve(first, engine="0")
    server.serve(second, engine="1")
    seen = read(tmp_path, server.scrape())
    accepted = [each for request in first + second for each in request.accepted]
    assert seen.counts.tokens_per_step == pytest.approx(1 + np.mean(accepted))
    assert len(seen.parts) == 2
    assert "since the server started" in "\n".join(
        lines_of(Judgement(seen, ServerFacts()))
    )


@pytest.mark.parametrize("first", [0.08, 0.5, 0.7])
def test_an_engine_whose_draft_does_not_work_is_named_and_left_out(tmp_path, first):
    """One of three accepts 8 % of its first tokens, or as many as another text might."""
    server = Vllm(engines=("0", "1", "2"))
    sound = []
    for engine in ("0", "1", "2"):
        rates_of = (first if engine == "1" else 0.7, 0.6, 0.5)
        requests = random_requests(int(engine), rates=rates_of)
        server.serve(requests, engine=engine)
        if engine != "1":
            sound += [each for request in requests for each in request.accepted]
    draft = parse_draft("eagle3")
    seen = weighed(read(tmp_path, server.scrape()), draft)
    lines = "\n".join(lines_of(Judgement(seen, ServerFacts(draft=draft))))
    assert len(seen.parts) == 3
    if first > 0.3:
        assert "of its first drafts" not in lines
        return
    named = lines.splitlines()[1]
    assert re.match(
        r"  wrong: engine 1 accepts (?:[5-9]|1\d) % of its first dra", named
    )
    assert seen.counts.tokens_per_step == pytest.approx(1 + np.mean(sound))


def test_lines_that_a_page_broke_are_put_together(tmp_path):
    steps = Steps()
    broken = v1_32(steps).replace(", ", ",\n")
    seen = read(tmp_path, broken)
    assert seen.counts.tokens_per_step == pytest.approx(steps.tokens_per_step, rel=3e-3)
    assert seen.counts.step_s == pytest.approx(steps.step_s, rel=3e-3)


def test_lines_as_a_container_logs_them_and_a_sum_of_engines(tmp_path):
    steps = Steps(batch=8)
    wrapped = "\n".join(
        json.dumps({"log": f"{line}\n", "stream": "stderr"})
        for line in sglang(steps).splitlines()
    )
    assert read(tmp_path, wrapped).counts.step_s == pytest.approx(0.02, rel=3e-3)
    summed = v1_32(steps).replace("Engine 000", "2 Engines Aggregated")
    seen = read(tmp_path, summed)
    assert seen.batch_size == 4
    assert seen.counts.step_s == pytest.approx(0.02, rel=3e-3)


def test_an_interval_whose_count_was_cut_away_is_left_out(tmp_path):
    lines = v1_32(Steps()).splitlines()
    kept = lines[:6] + [line for line in lines[6:] if "SpecDecoding" not in line]
    seen = read(tmp_path, "\n".join(kept))
    assert seen.num_scrapes == 3
    assert seen.drafted_share == 1.0


def test_graphs_that_are_off_are_named(tmp_path):
    text = sglang(Steps()).replace("cuda graph: True", "cuda graph: False")
    seen = read(tmp_path, text)
    assert "without a graph" in lines_of(Judgement(seen, ServerFacts()))[1]
    start = (
        "WARNING 05-14 08:25:39 [compilation.py:1390] CUDAGraphMode.FULL_AND_PIECEWISE is not supported with "
        "spec-decode for attention backend FlashInferBackend; setting cudagraph_mode=PIECEWISE\n"
    )
    seen = read(tmp_path, start + v1_32(Steps()))
    assert "PIECEWISE" in lines_of(Judgement(seen, ServerFacts()))[1]


def test_a_draft_that_accepts_nothing_is_said_first_whatever_it_is(tmp_path):
    seen = read(tmp_path, v1_32(Steps(rates=(0.0, 0.0, 0.0))))
    assert "does not work" in headline(seen)
    assert "EAGLE-3 does not work" in headline(seen, draft=parse_draft("eagle3"))


SAMPLE_OF = {
    "vLLM or SGLang benchmark result": "vllm_bench.json",
    "GenAI-Perf or AIPerf summary": "genai_perf.json",
    "AIPerf records": "aiperf.jsonl",
    "GuideLLM report": "guidellm.json",
    "llama.cpp answers": "llama_answers.jsonl",
    "benchmark report": "sglang_bench.txt",
    "vLLM log": "vllm.log",
    "SGLang log": "sglang.log",
    "llama.cpp log": "llama_cpp.log",
    "llama-speculative": "llama_speculative.txt",
}


def test_the_page_shows_each_form_and_what_its_sample_answers():
    page = (ROOT / "docs" / "forms.md").read_text()
    assert set(SAMPLE_OF) == {form.name for form in (*JSON_FORMS, *TEXT_FORMS)}
    for name, sample in SAMPLE_OF.items():
        form = form_of((SAMPLES / sample).read_text())
        assert form is not None
        assert form.name == name
        seen = read_files([SAMPLES / sample])
        seen = weighed(seen, agreed(None, seen.announced))
        answer = "\n".join(
            f"    {line}" for line in lines_of(Judgement(seen, ServerFacts()))[:2]
        )
        assert f"| {name} | " in page
        assert f"observe docs/samples/logs/{sample}\n{answer}\n" in page


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("hello\n", "text of 1 line,"),
        ('{"a": 1, "b": 2}', "the fields a, b"),
        ('{"a": 1}\n{"a": 2', "line 2"),
        ('[{"a": 1}, {"a": 2}]', "a JSON list"),
        ("vllm serve Qwen/Qwen3-8B --port 8000\n", "magicdec check"),
        ("<!DOCTYPE html><html></html>", "a web page"),
        ("# TYPE go_threads gauge\ngo_threads 7\n", "metrics of no engine"),
    ],
)
def test_what_is_not_read_is_said_to_look_like_something(text, said, tmp_path):
    assert said in looks_like(text)
    with pytest.raises(ConfigError, match=r"read are: .*vLLM log"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "SpecDecoding metrics: " * 40_000,
        "SpecDecoding metrics: a: 1,\n" + "Accepted throughput: 1,\n" * 40_000,
        "".join(
            f"Engine {number}: Avg prompt throughput: x\n" for number in range(20_000)
        ),
        "Decode batch #running-req" + ", x: 1" * 150_000,
        "eval time = tokens per second #gen drafts statistics " * 18_000,
        "[" * 1_000_000,
    ],
    ids=["one line", "continued lines", "engines", "fields", "words", "brackets"],
)
def test_a_megabyte_of_anything_is_read_to_its_end(text, tmp_path):
    """In a second or two; minutes where the time grows with the square."""
    started = time.process_time()
    with pytest.raises(ConfigError):
        read(tmp_path, text)
    assert time.process_time() - started < 15.0


@pytest.mark.parametrize("accepted", [0, 10, 2_000, 10_000])
def test_a_log_of_100_000_steps_gives_its_tokens_per_step(accepted, tmp_path):
    """vLLM prints rates to a thousandth and lengths to a hundredth; tokens are exact."""
    line = (
        "SpecDecoding metrics: Mean acceptance length: {mean:.2f}, Accepted throughput: 1.00 tokens/s, "
        "Drafted throughput: 9.00 tokens/s, Accepted: {accepted} tokens, Drafted: {drafts} tokens, "
        "Per-position acceptance rate: {rate:.3f}, Avg Draft acceptance rate: {rate:.1%}"
    )
    rate = accepted / 100_000
    text = line.format(mean=1.0 + rate, accepted=accepted, drafts=100_000, rate=rate)
    counts = read(tmp_path, text).counts
    assert counts.tokens_per_step == pytest.approx(1.0 + rate, abs=1e-9)
    assert counts.drafts == 100_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"benchmarks": [{"requests": {"successful": [{"info": {"timings": {}}}]}}]}',
            "first_token_iteration",
        ),
        ('{"mean_ttft_ms": 3.0, "completed": 4}', "tells of no decoding"),
        ('{"metadata": {}, "metrics": {"time_to_first_token": 3}}', "benchmark_phase"),
    ],
)
def test_a_result_that_lacks_what_its_form_has_is_refused(text, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, text)


def test_a_report_of_sglangs_generator_gives_its_time_of_a_step():
    """Tokens per step times the time of a token, and the requests that decode at once."""
    seen = read_files([SAMPLES / "sglang_bench.txt"])
    assert seen.target.series.engine == "sglang"
    assert seen.counts.tokens_per_step == pytest.approx(2.71, abs=1e-6)
    assert seen.counts.step_s == pytest.approx(2.71 * 9.89e-3, rel=1e-6)
    assert seen.batch_size == pytest.approx(9.89e-3 * (65536 - 128) / 43.18, rel=1e-6)
    assert seen.tokens_per_s == pytest.approx(1517.74, rel=1e-3)


def test_what_llama_speculative_prints_gives_its_steps():
    seen = read_files([SAMPLES / "llama_speculative.txt"])
    assert seen.counts.tokens_per_step == pytest.approx(512 / (512 - 366))
    assert seen.gamma == 8
    assert seen.tokens_per_s == pytest.approx(512 / 7.315)


def test_llamas_answers_say_what_its_log_says():
    answers, log = (
        read_files([SAMPLES / name])
        for name in ("llama_answers.jsonl", "llama_cpp.log")
    )
    assert answers.counts.tokens_per_step == log.counts.tokens_per_step
    assert answers.counts.step_s == log.counts.step_s
