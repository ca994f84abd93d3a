"""Our decoding compared with transformers' `generate()`: same weights, prompts, sampling and machine, interleaved.

Batched decoding is compared with the best of transformers' dynamic and static cache, with sdpa and eager attention;
a batch of one against its assisted generation (prompt lookup). Only decoding counts on either side: transformers starts
each run from keys and values that were computed once, and times count from its first token to its last.
Prints one JSON line. Run: python benchmarks/transformers_generate.py [--batch 32 --context 4096]
"""

# ruff: noqa: E402  (threads are bound before torch is loaded; transformers profits as we do)
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from magicdec.measure.environment import bind_threads

bind_threads()

import torch
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    StoppingCriteria,
)
from transformers.utils import logging

from magicdec.measure.configuration import BenchmarkRequest
from magicdec.measure.session import BenchmarkSession
from magicdec.measure.utilisation import bandwidth_bytes_per_s, phase_bytes
from magicdec.specs.catalog import EMBEDDED_DIRECTORY
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec, SpeculationSpec

ATTENTIONS = ("sdpa", "eager")
CACHES = ("dynamic", "static")
LOOKUP_TOKENS = (3, 10)
CHECKED_TOKENS = 8
KeyValues = list[tuple[torch.Tensor, torch.Tensor]]


class Clock(StoppingCriteria):
    """Never stops; notes when generation had reached which length."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._marks.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def tokens_per_s(self, batch_size: int) -> float:
        """From the first mark, behind the first token, to the last."""
        (start_s, start), (end_s, end) = self._marks[0], self._marks[-1]
        return batch_size * (end - start) / (end_s - start_s)


class Peer:
    """transformers with the embedded model's weights, and one batch's keys and values."""

    def __init__(self, prompts: list[list[int]], gen_len: int) -> None:
        self._models = {
            name: AutoModelForCausalLM.from_pretrained(
                EMBEDDED_DIRECTORY, dtype=torch.float32, attn_implementation=name
            )
            for name in ATTENTIONS
        }
        for model in self._models.values():
            model.generation_config = GenerationConfig(
                eos_token_id=None, pad_token_id=0, top_k=0
            )
        self._ids = torch.tensor(prompts)
        self._gen_len = gen_len
        self._key_values = self._prefill()

    @torch.inference_mode()
    def _prefill(self) -> KeyValues:
        """Of all tokens but the last of each prompt, one prompt after the other so that little memory is needed."""
        found: list[KeyValues] = []
        for row in self._ids:
            cache = DynamicCache()
            self._models["sdpa"].model(
                row[None, :-1], past_key_values=cache, use_cache=True
            )
            found.append([(layer.keys, layer.values) for layer in cache.layers])
        return [
            (
                torch.cat([keys for keys, _ in layer]),
                torch.cat([values for _, values in layer]),
            )
            for layer in zip(*found, strict=True)
        ]

    def _cache(self, kind: str, num_rows: int, gen_len: int) -> Cache:
        config = self._models["sdpa"].config
        length = self._ids.shape[1] + gen_len
        cache = (
            DynamicCache()
            if kind == "dynamic"
            else StaticCache(config=config, max_cache_len=length)
        )
        for layer, (keys, values) in enumerate(self._key_values):
            cache.update(keys[:num_rows], values[:num_rows], layer)
        return cache

    def generate(
        self,
        attention: str,
        kind: str,
        *,
        num_rows: int,
        gen_len: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, float]:
        """The new tokens and the tokens per second of one run."""
        clock, ids, gen_len = Clock(), self._ids[:num_rows], gen_len or self._gen_len
        tokens = self._models[attention].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self._cache(kind, num_rows, gen_len),
            max_new_tokens=gen_len,
            stopping_criteria=[clock],
            **options,
        )
        return tokens[:, ids.shape[1] :], clock.tokens_per_s(num_rows)


def session_for(
    batch: int, context: int, gen_len: int, speculation: SpeculationSpec
) -> BenchmarkSession:
    return BenchmarkSession(
        BenchmarkRequest(
            model="embedded",
            batch_size=batch,
            context_len=context,
            gen_len=max(gen_len, CHECKED_TOKENS),
            speculations=(speculation,),
        )
    )


def check_same_tokens(session: BenchmarkSession, peer: Peer) -> float:
    """Share of the first greedy tokens on which both agree, of transformers' ways the one that agrees least: shows that
    weights, prompts and positions are the same."""
    ours = session.run(
        AUTOREGRESSIVE, sampling=SamplingSpec(), gen_len=CHECKED_TOKENS, run_to_end=True
    ).tokens
    rows = len(session.prompts)
    theirs = [
        peer.generate(
            attention, kind, num_rows=rows, gen_len=CHECKED_TOKENS, do_sample=False
        )[0]
        for attention in ATTENTIONS
        for kind in CACHES
    ]
    return min(
        float((torch.tensor(ours) == tokens).float().mean()) for tokens in theirs
    )


def interleave(
    works: dict[str, Callable[[int], float]],
    repetitions: int,
    note: Callable[[str], None],
) -> Any:
    """Tokens per second of each work in each repetition, after one run of each to warm up."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for repetition in range(-1, repetitions):
        for name, work in works.items():
            note(f"{name}, repetition {repetition + 1}/{repetitions}")
            rate = work(repetition)
            if repetition >= 0:
                rates[name].append(rate)
    return rates


def summary(rates: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "median": round(statistics.median(found), 1),
            "min": round(min(found), 1),
            "max": round(max(found), 1),
        }
        for name, found in rates.items()
    }


def ratio(rates: dict[str, list[float]], name: str, against: str) -> float:
    """The median of the repetitions' own ratios: what a slow moment of the machine does to both cancels."""
    return round(
        statistics.median(
            a / b for a, b in zip(rates[name], rates[against], strict=True)
        ),
        3,
    )


def best_of(rates: dict[str, list[float]], prefix: str) -> str:
    return max(
        (name for name in rates if name.startswith(prefix)),
        key=lambda name: statistics.median(rates[name]),
    )


def measure(
    batch: int,
    options: argparse.Namespace,
    note: Callable[[str], None],
    *,
    gen_len: int,
    peer_gen_len: int,
) -> dict[str, Any]:
    """One batch size: our two ways of decoding and transformers' own, in turn."""
    speculation = SpeculationSpec(
        draft="self",
        draft_method="streamingllm",
        draft_budget=options.draft_budget,
        gamma=options.gamma,
    )
    note(f"prefilling {batch} prompts of {options.context} tokens")
    session = session_for(batch, options.context, gen_len, speculation)
    peer = Peer(session.prompts, peer_gen_len)

    def ours(chosen: SpeculationSpec) -> Callable[[int], float]:
        return lambda seed: session.run(chosen, seed=max(seed, 0)).steady_tokens_per_s

    def theirs(attention: str, kind: str, **more: Any) -> Callable[[int], float]:
        def work(seed: int) -> float:
            torch.manual_seed(max(seed, 0))
            return peer.generate(
                attention, kind, num_rows=batch, do_sample=True, temperature=1.0, **more
            )[1]

        return work

    works: dict[str, Callable[[int], float]] = {
        "ours autoregressive": ours(AUTOREGRESSIVE),
        "bandwidth": lambda _: bandwidth_bytes_per_s(device="cpu"),
        "ours speculative": ours(speculation),
    }
    works |= {
        f"generate {kind} {name}": theirs(name, kind)
        for kind in CACHES
        for name in ATTENTIONS
    }
    if batch == 1:
        works |= {
            f"assisted lookup {tokens}": theirs(
                "sdpa", "dynamic", prompt_lookup_num_tokens=tokens
            )
            for tokens in LOOKUP_TOKENS
        }
    same = check_same_tokens(session, peer)
    rates = interleave(works, options.repetitions, note)
    bandwidths = rates.pop("bandwidth")
    peer_best = best_of(rates, "generate")
    step_bytes = phase_bytes(
        session.request, [len(prompt) for prompt in session.prompts], AUTOREGRESSIVE
    )["autoregressive"]
    result = {
        "batch_size": batch,
        "same_greedy_tokens": same,
        "tokens_per_s": summary(rates),
        "best_of_generate": peer_best,
        "autoregressive_ratio": ratio(rates, "ours autoregressive", peer_best),
        "speculative_over_autoregressive": ratio(
            rates, "ours speculative", "ours autoregressive"
        ),
        "speculative_over_generate": ratio(rates, "ours speculative", peer_best),
        "bandwidth_bytes_per_s": [round(each) for each in sorted(bandwidths)],
        "autoregressive_mbu": mbu(
            rates["ours autoregressive"], step_bytes, batch, bandwidths
        ),
        "generate_mbu": mbu(rates[peer_best], step_bytes, batch, bandwidths),
    }
    if batch == 1:
        assisted = best_of(rates, "assisted")
        result |= {
            "best_assisted": assisted,
            "speculative_over_assisted": ratio(rates, "ours speculative", assisted),
        }
        result["autoregressive_over_assisted"] = ratio(
            rates, "ours autoregressive", assisted
        )
    return result


def mbu(
    rates: list[float], step_bytes: float, batch: int, bandwidths: list[float]
) -> float:
    """Share of the bandwidth measured in the same repetition at which a step's bytes (weights and KV, once) are read:
    the median over the repetitions."""
    shares = (
        step_bytes * rate / batch / bandwidth
        for rate, bandwidth in zip(rates, bandwidths, strict=True)
    )
    return round(statistics.median(shares), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--gen-len", type=int, default=48)
    parser.add_argument("--draft-budget", type=int, default=256)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def note(message: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K{message}")

    gen_len = options.gen_len
    result = {
        "benchmark": "transformers_generate",
        "model": "embedded",
        "dtype": "float32",
        "temperature": 1.0,
        "context_len": options.context,
        "gen_len": gen_len,
        "draft": f"streamingllm {options.draft_budget}, gamma {options.gamma}",
        "repetitions": options.repetitions,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "batched": measure(
            options.batch, options, note, gen_len=gen_len, peer_gen_len=gen_len // 2
        ),
        "single": measure(
            1, options, note, gen_len=4 * gen_len, peer_gen_len=4 * gen_len
        ),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
