"""Autoregressive decoding compared with transformers' `generate()`, with the same random weights, batch and machine.

Both sides decode after a cache of seeded noise, and only decoding counts: from the first new token to the last.
transformers runs with its dynamic and its static cache (the static one compiled too, as `generate` does it on a GPU),
each with the attention implementations that are installed; ours is compared with the best of them.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from magicdec.measure.configuration import NOISE, BenchmarkRequest
from magicdec.measure.session import BenchmarkSession
from magicdec.runtime.weights import load_model
from magicdec.specs.catalog import MODELS_DIRECTORY, load_model_spec
from magicdec.specs.speculation import AUTOREGRESSIVE, SamplingSpec

SECONDS_OF_A_WAY = 30
"""What has to be left for another of transformers' ways to be begun."""


class PeerJob(Protocol):
    """What this part needs of gpu.py's job."""

    device: str
    dtype: str
    shapes: Any

    def note(self, key: str, value: Any) -> None: ...

    @property
    def seconds_left(self) -> float: ...


def transformers_part(job: PeerJob, model_argument: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        job.note(
            "transformers",
            {
                "model": load_model_spec(model_argument).name,
                "missing": "no transformers here",
            },
        )
        print("transformers is not installed: its row stays open", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as directory:
        job.note("transformers", _compare(job, model_argument, Path(directory)))


def _compare(job: PeerJob, model_argument: str, directory: Path) -> dict[str, Any]:
    batch, context = job.shapes.peer_case
    gen_len, repetitions = job.shapes.gen_len, job.shapes.repetitions
    spec = load_model_spec(model_argument)
    peer = Peer(
        model_argument, directory, job, batch=batch, context=context, gen_len=gen_len
    )
    model = load_model(str(directory), device=job.device, dtype=job.dtype)
    request = BenchmarkRequest(
        model=model_argument, weights="random", prompts=NOISE, dtype=job.dtype, device=job.device, batch_size=batch,
        context_len=context, gen_len=gen_len, sampling=SamplingSpec(), repetitions=repetitions,
    )  # fmt: skip
    session = BenchmarkSession(request, model=model)
    works: dict[str, Callable[[], float]] = {
        "ours": lambda: session.run(AUTOREGRESSIVE).steady_tokens_per_s
    }
    works |= peer.ways()
    rates: dict[str, list[float]] = {name: [] for name in works}
    failed: dict[str, str] = {}
    for repetition in range(-1, repetitions):  # the first run warms up, and compiles
        for name, work in works.items():
            if name in failed:
                continue
            if (
                name != "ours"
                and job.seconds_left < SECONDS_OF_A_WAY
                and repetition < 0
            ):
                failed[name] = "no time was left"
                continue
            print(
                f"transformers: {name}, repetition {repetition + 1}/{repetitions}",
                file=sys.stderr,
            )
            try:
                rate = work()
            except (
                RuntimeError,
                ValueError,
                NotImplementedError,
                ImportError,
            ) as error:
                if name == "ours":
                    raise
                failed[name] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0]}"  # one of the peer's ways only
                )
                print(f"  {failed[name]}", file=sys.stderr)
                continue
            if repetition >= 0:
                rates[name].append(rate)
    found = {
        name: statistics.median(each)
        for name, each in rates.items()
        if each and name not in failed
    }
    if set(found) == {"ours"}:
        return {
            "model": spec.name,
            "missing": "none of transformers' ways ran",
            "failed": failed,
        }
    best = max((name for name in found if name != "ours"), key=lambda name: found[name])
    pairs = zip(rates["ours"], rates[best], strict=True)
    return {
        "model": spec.name,
        "batch_size": batch,
        "context_len": context,
        "gen_len": gen_len,
        "tokens_per_s": found,
        "best": best,
        "ratio": statistics.median(a / b for a, b in pairs),
        "failed": failed,
    }


class Peer:
    """transformers' model of a configuration with random weights, left in `directory` for ours to read."""

    def __init__(
        self,
        model_argument: str,
        directory: Path,
        job: PeerJob,
        *,
        batch: int,
        context: int,
        gen_len: int,
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        file = MODELS_DIRECTORY / f"{model_argument}.json"
        config = AutoConfig.from_pretrained(
            file if file.is_file() else Path(model_argument) / "config.json"
        )
        torch.manual_seed(0)
        self._dtype = getattr(torch, job.dtype)
        with torch.device(job.device):
            self._model = AutoModelForCausalLM.from_config(
                config, dtype=self._dtype
            ).eval()
        self._model.generation_config = GenerationConfig(
            eos_token_id=None, pad_token_id=0
        )
        self._model.save_pretrained(directory)
        self._config, self._device = config, job.device
        self._batch, self._context, self._gen_len = batch, context, gen_len
        self._ids = torch.zeros(batch, context, dtype=torch.long, device=job.device)

    def ways(self) -> dict[str, Callable[[], float]]:
        attentions = ["sdpa", "eager"]
        if importlib.util.find_spec("flash_attn") is not None:
            attentions.insert(0, "flash_attention_2")

        def way(cache: str, attention: str, compiled: bool) -> Callable[[], float]:
            return lambda: self._generate(cache, attention, compiled=compiled)

        ways = {
            f"{cache} {name}": way(cache, name, False)
            for cache in ("dynamic", "static")
            for name in attentions
        }
        if self._device.startswith("cuda"):
            ways["static sdpa compiled"] = way("static", "sdpa", True)
        return ways

    def _noise_cache(self, kind: str) -> Any:
        from transformers import DynamicCache, StaticCache

        config = self._config
        length = self._context + self._gen_len
        cache = (
            DynamicCache()
            if kind == "dynamic"
            else StaticCache(config=config, max_cache_len=length)
        )
        head_dim = (
            getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads
        )
        shape = (self._batch, config.num_key_value_heads, self._context - 1, head_dim)
        noise = torch.empty(shape, dtype=self._dtype, device=self._device).uniform_(
            -1, 1
        )
        for layer in range(config.num_hidden_layers):
            cache.update(noise, noise, layer)
        return cache

    @torch.inference_mode()
    def _generate(self, kind: str, attention: str, *, compiled: bool) -> float:
        """Tokens per second."""
        from transformers import StoppingCriteria

        class Clock(StoppingCriteria):
            def __init__(self) -> None:
                self.marks: list[tuple[float, int]] = []

            def __call__(
                self, input_ids: torch.Tensor, scores: Any, **_: Any
            ) -> torch.Tensor:
                if input_ids.is_cuda:
                    torch.cuda.synchronize()
                self.marks.append((time.perf_counter(), input_ids.shape[1]))
                return torch.zeros(
                    len(input_ids), dtype=torch.bool, device=input_ids.device
                )

        clock = Clock()
        self._model.set_attn_implementation(attention)
        self._model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            past_key_values=self._noise_cache(kind),
            max_new_tokens=self._gen_len,
            do_sample=False,
            disable_compile=not compiled,
            stopping_criteria=[clock],
        )
        (start_s, start), (end_s, end) = clock.marks[0], clock.marks[-1]
        return self._batch * (end - start) / (end_s - start_s)
